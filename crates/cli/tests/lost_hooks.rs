//! Records of jobs whose hooks slurmctld has lost: what `forebay bb reconcile` does with each state of the registry and
//! each answer of the controller. A script plays squeue; tests/conformance/tests/slurm kills a real slurmctld.

mod common;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use common::{Place, Ran};
use serde_json::{json, Value};

/// Longer ago than any limit of a comparison.
const LONG_AGO_S: u64 = 10_000;

/// Longer than this test takes.
const RESTART_PAUSE_S: u64 = 3600;

/// A registry, and scripts in the place of Slurm's commands. A file `answers/JOB` is what squeue prints of a job;
/// without one, the controller does not know it.
struct Books {
    place: Place,
    uid: u32,
}

const SQUEUE: &str = "#!/bin/sh\n\
    for word; do case $word in --jobs=*) job=${word#*=} ;; --states=*) states=${word#*=} ;; esac; done\n\
    if [ -e DIR/down ]; then\n\
    echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1\n\
    fi\n\
    if [ -z \"$job\" ]; then grep -hs \"$states\" DIR/answers/*; exit 0; fi\n\
    if [ ! -e DIR/answers/$job ]; then echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; fi\n\
    if [ $states = PENDING ]; then cat DIR/waits/$job 2>/dev/null; exit 0; fi\n\
    cat DIR/answers/$job\n";

impl Books {
    fn new() -> Books {
        let place = Place::new();
        let dir = place.path.display().to_string();
        for name in ["registry", "answers", "waits", "kept"] {
            std::fs::create_dir(place.join(name)).unwrap();
        }
        place.write(
            "slurm.toml",
            format!(
                "registry = '{dir}/registry'\nnodes = 'n[1-4]'\ncapacity = '1GiB'\nkeep_dir = '{dir}/kept'\n\
                 node_dir = '{dir}/nodes'\nrestart_pause_s = {RESTART_PAUSE_S}\n"
            ),
        );
        let scancel = "#!/bin/sh\necho $* >>DIR/cancelled\n";
        for (name, text) in [("squeue", SQUEUE), ("scancel", scancel)] {
            let path = place.write(&format!("bin/{name}"), text.replace("DIR", &dir));
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        Books { place, uid: rustix::process::geteuid().as_raw() }
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = self.place.command(words);
        command.env("FOREBAY_SLURM_CONF", self.place.join("slurm.toml"));
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", self.place.join("bin").display()));
        command
    }

    fn run(&self, words: &[&str]) -> Ran {
        let ran = Ran::of(self.command(words).output().unwrap());
        assert_eq!(ran.code, Some(0), "{words:?}: {ran:?}");
        ran
    }

    /// Calls a hook as the plugin does; its message.
    fn hook(&self, words: &[&str]) -> Result<String, String> {
        let out = self.run(&[&["bb", "hook"], words].concat()).out;
        match out.split_once('\n') {
            Some(("0", text)) => Ok(text.to_owned()),
            _ => Err(out),
        }
    }

    fn setup(&self, job: u32, directive: &str) {
        let script =
            self.place.write(&format!("{job}.sh"), format!("#!/bin/sh\n#BB_LUA forebay {directive}\n"));
        let (job, uid) = (job.to_string(), self.uid.to_string());
        self.hook(&["setup", &job, &uid, &uid, "forebay", "0", script.to_str().unwrap()]).unwrap();
    }

    /// Calls hooks of a job that have no other arguments.
    fn hooks(&self, job: u32, names: &[&str]) {
        for name in names {
            self.hook(&[name, &job.to_string(), "script", "false"]).unwrap();
        }
    }

    fn read(&self, name: &str) -> Value {
        let text = std::fs::read(self.place.join("registry").join(name)).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    fn state(&self, job: u32) -> String {
        self.read(&format!("jobs/{job}.json"))["state"].as_str().unwrap().to_owned()
    }

    fn users(&self) -> Value {
        self.read("pools/p.json")["users"].clone()
    }

    /// Has the record of a job last changed so long ago, and Slurm asked for it before that.
    fn age(&self, job: u32, seconds: u64) {
        let name = format!("registry/jobs/{job}.json");
        let mut record = self.read(&format!("jobs/{job}.json"));
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        record["changed_s"] = json!(now - seconds);
        self.place.write(&name, record.to_string());
        let asked = self.place.join(format!("registry/hooks/{job}"));
        if let Ok(file) = OpenOptions::new().write(true).open(asked) {
            file.set_modified(SystemTime::now() - Duration::from_secs(LONG_AGO_S)).unwrap();
        }
    }

    /// Starts the pool of a job's first run, on this node, which has reported it; its directory.
    fn pool_of(&self, job: u32, words: &[&str]) -> String {
        let up = json!({ "ok": true, "nodes": ["n1"] });
        self.place.write(&format!("registry/results/{job}.0/n1.up.json"), up.to_string());
        let dir = self.place.join(format!("nodes/{}/{job}.0", self.uid));
        std::fs::create_dir_all(&dir).unwrap();
        let pool = dir.join("pool").display().to_string();
        self.run(&[&["up", "--path", &pool, "--capacity", "64MiB"], words].concat());
        pool
    }

    /// Saves what the first run of a job has left on this node.
    fn save(&self, job: u32) -> Command {
        let mut command = self.command(&["bb", "save", &job.to_string(), "0"]);
        command.env("SLURMD_NODENAME", "n1");
        command
    }

    /// What the controller says of a job from now on.
    fn answer(&self, job: u32, state: &str) {
        self.place.write(&format!("answers/{job}"), self.line(job, state, &job.to_string()));
    }

    /// What squeue prints of a job.
    fn line(&self, job: u32, state: &str, name: &str) -> String {
        format!("{job} {} {state} {name}\n", self.uid)
    }

    /// Has an earlier look, so long ago, shown the job as staging out.
    fn seen(&self, job: u32, seconds: u64) {
        let record = self.read(&format!("jobs/{job}.json"));
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        let note = format!("{} {} {}\n", record["run"], record["changed_s"], now - seconds);
        let path = self.place.write(&format!("registry/hooks/{job}"), note);
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(LONG_AGO_S)).unwrap();
    }

    /// The words of scancel, a line each call.
    fn cancelled(&self) -> String {
        std::fs::read_to_string(self.place.join("cancelled")).unwrap_or_default()
    }

    fn reconcile(&self) {
        self.run(&["bb", "reconcile"]);
    }

    /// A persistent pool p, whose job has ended.
    fn pool(&self) {
        self.setup(1, "persistent name=p capacity=64MiB pool=forebay");
        self.hooks(1, &["data_in", "pre_run", "post_run", "data_out", "job_teardown"]);
        std::fs::create_dir(self.place.join(format!("registry/results/{}", self.pool_key()))).unwrap();
        assert_eq!(self.users(), json!([]));
    }

    fn pool_key(&self) -> String {
        format!("p.p.{}", self.read("pools/p.json")["serial"])
    }

    /// A job that stages out, and what its epilog has said.
    fn stages_out(&self, job: u32, epilog: &Value) {
        self.setup(job, "capacity=64MiB pool=forebay stage_out=/r:/nowhere/r");
        self.hooks(job, &["data_in", "pre_run", "post_run"]);
        self.place.write(&format!("registry/results/{job}.0/out.json"), epilog.to_string());
        self.answer(job, "STAGE_OUT");
    }
}

#[test]
fn job_whose_teardown_was_lost_ends_when_the_controller_says_that_it_is_over() {
    let books = Books::new();
    books.pool();
    books.setup(2, "use name=p");
    books.hooks(2, &["data_in"]);
    assert_eq!((books.state(2).as_str(), books.users()), ("staged-in", json!([2])));
    let lives = |why: &str| {
        books.reconcile();
        assert_eq!((books.state(2).as_str(), books.users()), ("staged-in", json!([2])), "{why}");
    };
    books.answer(2, "CANCELLED");
    lives("its teardown may be on its way");
    books.age(2, LONG_AGO_S);
    books.place.write("down", "");
    lives("the controller does not answer");
    books.age(2, LONG_AGO_S);
    std::fs::remove_file(books.place.join("down")).unwrap();
    books.answer(2, "PENDING");
    lives("it waits for its nodes");
    books.answer(2, "CANCELLED");
    lives("it was asked for a moment ago");
    books.age(2, LONG_AGO_S);
    books.reconcile();
    assert_eq!((books.state(2).as_str(), books.users()), ("torn-down", json!([])));

    // One that Slurm has forgotten.
    books.setup(3, "use name=p");
    books.age(3, LONG_AGO_S);
    books.reconcile();
    assert_eq!((books.state(3).as_str(), books.users()), ("torn-down", json!([])));
    // A late call changes nothing.
    books.hooks(3, &["job_teardown"]);
    books.setup(3, "use name=p");
    assert_eq!(books.read("jobs/3.json")["run"], 1, "a job of the number begins again");
}

#[test]
fn record_of_a_job_that_runs_says_so_though_pre_run_was_lost() {
    let books = Books::new();
    books.setup(5, "capacity=64MiB pool=forebay");
    books.hooks(5, &["data_in"]);
    books.answer(5, "RUNNING");
    books.age(5, LONG_AGO_S);
    books.reconcile();
    assert_eq!(books.state(5), "running");
}

#[test]
fn setup_of_a_requeued_job_begins_another_run_though_the_teardown_was_lost() {
    let books = Books::new();
    let run = || books.read("jobs/6.json")["run"].as_u64().unwrap();
    books.setup(6, "capacity=64MiB pool=forebay");
    books.hooks(6, &["data_in"]);
    books.setup(6, "capacity=64MiB pool=forebay");
    assert_eq!(run(), 0, "slurmctld was restarted while the job waited");
    books.hooks(6, &["data_in", "pre_run"]);
    books.setup(6, "capacity=64MiB pool=forebay");
    assert_eq!((run(), books.state(6).as_str()), (1, "setup"));
    // The nodes have begun, but the record does not say so.
    books.place.write("registry/results/6.1/n1.up.json", json!({ "ok": true }).to_string());
    books.setup(6, "capacity=64MiB pool=forebay");
    assert_eq!(run(), 2);
}

/// slurmctld was killed before it had saved that the job has started, and starts it again, with its burst buffer as it
/// was.
#[test]
fn second_start_of_a_job_does_not_take_the_results_of_the_first_for_its_own() {
    let books = Books::new();
    let start = || {
        let file = books.place.write("paths", "");
        books.hook(&["paths", "6", "script", file.to_str().unwrap()]).unwrap();
        std::fs::read_to_string(file).unwrap().lines().last().unwrap().to_owned()
    };
    books.setup(6, "capacity=64MiB pool=forebay stage_out=/r:/nowhere/r");
    books.hooks(6, &["data_in"]);
    assert_eq!((start(), start()), ("FOREBAY_JOB=6.0".to_owned(), "FOREBAY_JOB=6.0".to_owned()));
    let done = json!({ "ok": true }).to_string();
    books.place.write("registry/results/6.0/n1.up.json", &*done);
    assert_eq!(start(), "FOREBAY_JOB=6.1", "its nodes have begun");
    books.place.write("registry/results/6.1/out.json", &*done);
    assert_eq!(start(), "FOREBAY_JOB=6.2", "its epilog has ended");
    books.hooks(6, &["pre_run"]);
    assert_eq!(start(), "FOREBAY_JOB=6.3", "it has had its nodes: a prolog may stage in for long");

    // Its first nodes end it now. What they say is not said of the run that goes on elsewhere.
    if books.uid != 0 {
        return println!("skipped: this user is not root, as slurmd's epilog is");
    }
    let ends = || {
        let mut command = books.command(&["bb", "epilog"]);
        command.env("SLURM_JOB_ID", "6").env("SLURMD_NODENAME", "n1").env("SLURM_NODELIST", "n1");
        let ran = Ran::of(command.output().unwrap());
        assert_eq!(ran.code, Some(0), "{ran:?}");
        books.place.join("registry/results/6.3/out.json").exists()
    };
    let pool = books.place.join("nodes/0/6.0");
    std::fs::create_dir_all(&pool).unwrap();
    assert!(!ends());
    assert!(!pool.exists(), "what the first start has left is removed");
    assert!(ends(), "and that of a node without a pool is said");
    // Nor has it a word for nodes that have begun.
    std::fs::remove_dir_all(books.place.join("registry/results/6.3")).unwrap();
    books.place.write("registry/results/6.3/n2.up.json", &*done);
    assert!(!ends());
}

#[test]
fn what_a_lost_node_has_of_an_earlier_run_is_kept_and_replaces_nothing() {
    let books = Books::new();
    let stored = books.place.write("store/r", "new\n");
    let directive = format!("capacity=64MiB pool=forebay mode=ssd stage_out=/r:{}", stored.display());
    books.setup(6, &directive);
    books.hooks(6, &["data_in", "pre_run"]);
    let up = json!({ "ok": true, "nodes": ["n1"] });
    books.place.write("registry/results/6.0/n1.up.json", up.to_string());
    let dir = books.place.join(format!("nodes/{}/6.0", books.uid));
    std::fs::create_dir_all(&dir).unwrap();
    let pool = dir.join("pool").display().to_string();
    books.run(&["up", "--path", &pool, "--capacity", "64MiB"]);
    books.run(&["--pool", &pool, "run", "--quiet", "--", "sh", "-c", "echo old >/forebay/r"]);
    // The node was lost, and the job runs again elsewhere.
    books.setup(6, &directive);
    let saved = books.command(&["bb", "save", "6", "0"]).env("SLURMD_NODENAME", "n1").output().unwrap();
    let saved = Ran::of(saved);
    assert_eq!(saved.code, Some(0), "{saved:?}");
    assert!(!dir.exists());
    assert_eq!(std::fs::read_to_string(stored).unwrap(), "new\n");
    assert_eq!(std::fs::read_to_string(books.place.join("kept/6.0/0/r")).unwrap(), "old\n");
    let text = books.hook(&["get_status"]).unwrap();
    assert!(text.contains("  6.0 user ") && text.contains("`forebay recover 6`"), "{text}");
}

#[test]
fn results_of_a_run_stay_as_long_as_a_lost_node_may_have_its_data() {
    let books = Books::new();
    let run = |job: u32, hurry: &str, results: &[&str]| {
        books.setup(job, "capacity=64MiB pool=forebay mode=ssd stage_out=/r:/nowhere/r");
        books.hooks(job, &["data_in", "pre_run"]);
        for name in results {
            books.place.write(&format!("registry/results/{job}.0/{name}"), json!({ "ok": true }).to_string());
        }
        books.hook(&["job_teardown", &job.to_string(), "script", hurry]).unwrap();
    };
    run(1, "false", &["n1.up.json"]);
    run(2, "true", &["n1.up.json"]);
    run(3, "false", &["n1.up.json", "out.json"]);
    run(4, "false", &["said"]);
    run(5, "false", &["n1.up.json", "failed/by"]);
    books.run(&["bb", "sweep"]);
    let has = |job: u32| books.place.join(format!("registry/results/{job}.0")).exists();
    assert_eq!([1, 2, 3, 4, 5].map(has), [true, false, false, false, false]);
    // Slurm's controller has forgotten it.
    std::fs::remove_file(books.place.join("registry/jobs/1.json")).unwrap();
    books.run(&["bb", "sweep"]);
    assert!(!has(1));
}

#[test]
fn job_that_starts_again_waits_until_slurmd_has_forgotten_its_last_run() {
    let books = Books::new();
    let directive = "capacity=64MiB pool=forebay";
    books.setup(6, directive);
    books.hooks(6, &["data_in", "job_teardown"]);
    books.setup(6, directive);
    books.hooks(6, &["data_in", "pre_run", "job_teardown"]); // the first has had no nodes
    books.setup(6, directive);
    let mut waits = books.command(&["bb", "hook", "data_in", "6", "script"]);
    let waits = waits.stdout(Stdio::piped()).spawn().unwrap();
    common::eventually("its hook is called", || books.state(6) == "staging-in");
    books.hooks(6, &["job_teardown"]);
    let said = String::from_utf8(waits.wait_with_output().unwrap().stdout).unwrap();
    assert!(said.starts_with("1\n") && said.contains("its burst buffer was torn down"), "{said}");
    // Long ago, for a last run.
    let mut record = books.read("jobs/6.json");
    record["ended_s"] = json!(1);
    books.place.write("registry/jobs/6.json", record.to_string());
    books.setup(6, directive);
    books.hooks(6, &["data_in"]);
    assert_eq!(books.state(6), "staged-in");
}

#[test]
fn job_without_a_record_does_not_keep_a_pool() {
    let books = Books::new();
    books.pool();
    let mut pool = books.read("pools/p.json");
    pool["users"] = json!([1, 99]);
    books.place.write("registry/pools/p.json", pool.to_string());
    books.reconcile();
    assert_eq!(books.users(), json!([]), "1 is torn down, and nobody knows 99");
    // A pool that no job has begun.
    pool["outlives"] = json!(false);
    books.place.write("registry/pools/p.json", pool.to_string());
    books.reconcile();
    assert_eq!(books.users(), json!([]), "its nodes have begun it");
    std::fs::remove_dir(books.place.join(format!("registry/results/{}", books.pool_key()))).unwrap();
    books.reconcile();
    assert!(!books.place.join("registry/pools/p.json").exists());
}

#[test]
fn stage_out_whose_hook_was_lost_is_awaited_and_slurm_is_told() {
    let books = Books::new();
    books.stages_out(7, &json!({ "ok": true }));
    books.age(7, LONG_AGO_S);
    books.reconcile();
    assert_eq!(books.state(7), "staging-out", "Slurm may call the hook yet");
    books.seen(7, 100);
    books.reconcile();
    assert_eq!(books.state(7), "staging-out", "Slurm may call the hook yet");
    books.seen(7, LONG_AGO_S);
    let hook = File::open(books.place.join("registry/hooks/7")).unwrap();
    hook.lock_shared().unwrap();
    books.reconcile();
    assert_eq!(books.state(7), "staging-out", "a hook works on it");
    drop(hook);
    books.seen(7, LONG_AGO_S);
    books.reconcile();
    assert_eq!((books.state(7).as_str(), books.cancelled().as_str()), ("torn-down", "--hurry 7\n"));
    books.hooks(7, &["post_run", "data_out", "job_teardown"]);
    assert_eq!(books.state(7), "torn-down", "the hooks are called after all");

    // A requeued job would be cancelled, not only its stage-out.
    books.stages_out(8, &json!({ "ok": true }));
    books.place.write("waits/8", books.line(8, "STAGE_OUT", "8"));
    books.age(8, LONG_AGO_S);
    books.seen(8, LONG_AGO_S);
    books.reconcile();
    assert_eq!((books.state(8).as_str(), books.cancelled().as_str()), ("torn-down", "--hurry 7\n"));
}

/// slurmctld was killed before it had saved that the job is over. It takes it for one that runs, and then finds it missing.
#[test]
fn hooks_of_a_job_that_was_torn_down_succeed_again_and_its_next_run_is_another() {
    let books = Books::new();
    books.stages_out(9, &json!({ "ok": true }));
    books.hooks(9, &["data_out", "job_teardown"]);
    let ended = books.read("jobs/9.json");
    assert_eq!((books.state(9).as_str(), ended["run"].as_u64()), ("torn-down", Some(0)));
    books.hooks(9, &["post_run", "data_out", "job_teardown"]);
    assert_eq!(books.read("jobs/9.json"), ended, "nothing is left to do");
    books.setup(9, "capacity=64MiB pool=forebay stage_out=/r:/nowhere/r");
    assert_eq!((books.state(9).as_str(), books.read("jobs/9.json")["run"].as_u64()), ("setup", Some(1)));

    books.stages_out(12, &json!({ "ok": false, "why": "the store is full" }));
    for _ in 0..2 {
        let told = books.hook(&["data_out", "12", "script"]).unwrap_err();
        assert!(told.contains("the store is full"), "{told}");
        books.hooks(12, &["job_teardown", "post_run"]);
    }
}

/// slurmctld was killed after it had saved that the job stages out, and before that this is over.
#[test]
fn job_that_was_torn_down_and_that_slurm_shows_as_staging_out_is_ended_there() {
    let books = Books::new();
    for job in [10, 11] {
        books.stages_out(job, &json!({ "ok": true }));
        books.hooks(job, &["data_out", "job_teardown"]);
    }
    books.answer(11, "COMPLETED");
    let asked =
        |job: u32| books.place.join(format!("registry/hooks/{job}")).metadata().unwrap().modified().unwrap();
    let cancelled_after = |seen_s: Option<u64>| {
        if let Some(seconds) = seen_s {
            books.seen(10, seconds);
        }
        books.reconcile();
        assert_eq!(books.state(10), "torn-down");
        books.cancelled()
    };
    assert_eq!(cancelled_after(None), "", "Slurm may not have had the time to end it");
    books.age(10, LONG_AGO_S / 2);
    books.age(11, LONG_AGO_S / 2);
    books.place.write("down", "");
    let before = asked(10);
    assert_eq!(cancelled_after(None), "", "the controller does not answer");
    assert_eq!(asked(10), before, "it is asked again");
    std::fs::remove_file(books.place.join("down")).unwrap();
    assert_eq!(cancelled_after(None), "", "it is shown for the first time");
    assert_eq!(cancelled_after(Some(100)), "");
    assert_eq!(cancelled_after(Some(LONG_AGO_S)), "--hurry 10\n");

    // Slurm is not asked again for a job that it has ended, however it was shown before.
    books.answer(10, "COMPLETED");
    let minutes_ago = SystemTime::now() - Duration::from_secs(200);
    let ages = |job: u32| {
        let hooks =
            OpenOptions::new().write(true).open(books.place.join(format!("registry/hooks/{job}"))).unwrap();
        hooks.set_modified(minutes_ago).unwrap();
    };
    ages(10);
    books.reconcile();
    assert_ne!(asked(10), minutes_ago, "it was seen to stage out");
    for job in [10, 11] {
        ages(job);
        books.reconcile();
        assert_eq!(asked(job), minutes_ago, "{job}");
    }
}

#[test]
fn job_that_has_long_run_is_left_to_slurm_when_it_begins_to_stage_out() {
    let books = Books::new();
    books.setup(5, "capacity=64MiB pool=forebay stage_out=/r:/nowhere/r");
    books.hooks(5, &["data_in", "pre_run"]);
    books.place.write("registry/results/5.0/out.json", json!({ "ok": true }).to_string());
    books.answer(5, "STAGE_OUT");
    books.age(5, LONG_AGO_S);
    books.reconcile();
    assert_eq!(books.state(5), "running", "its post_run may be on its way");
    // What was noted of another state of the record does not count.
    books.seen(5, LONG_AGO_S);
    books.age(5, LONG_AGO_S / 2);
    books.reconcile();
    assert_eq!(books.state(5), "running");
    books.seen(5, LONG_AGO_S);
    books.reconcile();
    assert_eq!((books.state(5).as_str(), books.cancelled().as_str()), ("torn-down", "--hurry 5\n"));
}

#[test]
fn only_the_task_of_an_array_is_cancelled_and_no_part_of_a_heterogeneous_job() {
    let books = Books::new();
    let ends = |job: u32, answer: String| {
        books.stages_out(job, &json!({ "ok": true }));
        books.place.write(&format!("answers/{job}"), answer);
        books.age(job, LONG_AGO_S);
        books.seen(job, LONG_AGO_S);
        books.reconcile();
        assert_eq!(books.state(job), "torn-down");
    };
    // The last task has the number of the array, for which squeue lists all.
    books.place.write("waits/10", books.line(12, "PENDING", "10_2"));
    ends(10, books.line(11, "RUNNING", "10_1") + &books.line(10, "STAGE_OUT", "10_3"));
    assert_eq!(books.cancelled(), "--hurry 10_3\n");
    ends(20, books.line(20, "STAGE_OUT", "20+0") + &books.line(21, "STAGE_OUT", "20+1"));
    assert_eq!(books.cancelled(), "--hurry 10_3\n");
}

#[test]
fn data_that_are_not_out_are_named_though_slurm_has_forgotten_the_job() {
    let books = Books::new();
    let kept = books.place.join("kept/9.0");
    books.stages_out(9, &json!({ "ok": false, "why": "the store is full", "kept": [&kept] }));
    std::fs::create_dir(&kept).unwrap();
    std::fs::remove_file(books.place.join("answers/9")).unwrap();
    let stays = json!({ "ok": false, "why": "no place", "kept": ["n3:/dev/shm/pool"] });
    books.stages_out(10, &stays);
    books.age(9, LONG_AGO_S);
    books.age(10, LONG_AGO_S);
    books.seen(10, LONG_AGO_S);
    books.reconcile();
    assert_eq!((books.state(9).as_str(), books.state(10).as_str()), ("torn-down", "torn-down"));
    let text = books.hook(&["get_status"]).unwrap();
    for words in [
        format!("  9 run 0 user {} 64 MiB: torn down", books.uid),
        "the store is full".to_owned(),
        format!("  9.0 user {} in {}: `forebay recover 9`", books.uid, kept.display()),
        format!("  10.0 user {} in pools that are up: n3:/dev/shm/pool", books.uid),
    ] {
        assert!(text.contains(&words), "{words} is not in {text}");
    }
    let late = books.hook(&["data_out", "9", "script"]).unwrap_err();
    assert!(late.contains("the store is full"), "{late}");
    let of_one = books.hook(&["get_status", "10"]).unwrap();
    assert!(of_one.contains("10.0 user") && !of_one.contains("9.0 user"), "{of_one}");
}

/// It was removed, with data that were nowhere else.
#[test]
fn pool_on_a_disk_that_cannot_be_started_again_stays() {
    let books = Books::new();
    let stored = books.place.join("stored");
    books.setup(6, &format!("capacity=64MiB pool=forebay mode=ssd stage_out=/r:{}", stored.display()));
    books.hooks(6, &["data_in", "pre_run"]);
    let up = json!({ "ok": true, "nodes": ["n1"] });
    books.place.write("registry/results/6.0/n1.up.json", up.to_string());
    let dir = books.place.join(format!("nodes/{}/6.0", books.uid));
    std::fs::create_dir_all(&dir).unwrap();
    let pool = dir.join("pool");
    let path = pool.display().to_string();
    books.run(&["up", "--path", &path, "--media", "ssd", "--capacity", "64MiB"]);
    books.run(&["--pool", &path, "run", "--quiet", "--", "sh", "-c", "echo here >/forebay/r"]);
    books.run(&["--pool", &path, "down"]);
    let file = std::fs::read(pool.join("pool.json")).unwrap();
    std::fs::write(pool.join("pool.json"), "{").unwrap();
    let save =
        || Ran::of(books.command(&["bb", "save", "6", "0"]).env("SLURMD_NODENAME", "n1").output().unwrap());
    let saved = save();
    assert!(saved.code == Some(1) && saved.err.contains("the pool stays on"), "{saved:?}");
    let kept = books.read("results/6.0/out.json")["kept"][0].as_str().unwrap().to_owned();
    assert!(kept.ends_with(&format!(":{}", dir.display())), "{kept}");
    // It is mended.
    std::fs::write(pool.join("pool.json"), file).unwrap();
    let saved = save();
    assert_eq!(saved.code, Some(0), "{saved:?}");
    assert_eq!(std::fs::read_to_string(stored).unwrap(), "here\n");
    assert!(!dir.exists());
}

/// The files of a directory that is a store, and their bytes.
fn held(store: &std::path::Path) -> (u64, u64) {
    let mut sum = (0, 0);
    for entry in std::fs::read_dir(store).into_iter().flatten().flatten() {
        let (files, bytes) = match entry.metadata() {
            Ok(it) if it.is_dir() => held(&entry.path()),
            Ok(it) => (1, it.len()),
            Err(_) => (0, 0),
        };
        sum = (sum.0 + files, sum.1 + bytes);
    }
    sum
}

/// What goes to the store by policy goes on by itself, and a task of the mover when the command is killed that waits for it.
#[test]
fn nothing_more_of_an_earlier_run_reaches_the_store_while_it_is_kept() {
    for policy in ["close", "request"] {
        let books = Books::new();
        let store = books.place.join("store");
        std::fs::create_dir(&store).unwrap();
        let url = format!("file://{}?latency=300ms&parallel=1", store.display());
        let directive = format!("capacity=64MiB pool=forebay backing={url} policy={policy}");
        books.setup(6, &directive);
        books.hooks(6, &["data_in", "pre_run"]);
        let pool = books.pool_of(6, &[]);
        books.run(&["--pool", &pool, "attach", "--drain", policy, &url, "/"]);
        let writes = "for i in $(seq 100); do echo old >/forebay/$i; done";
        books.run(&["--pool", &pool, "run", "--quiet", "--", "sh", "-c", writes]);
        if policy == "request" {
            let mut sync = books.command(&["--pool", &pool, "sync", "-r", "/"]);
            let mut sync = sync.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            common::eventually("it is copied", || held(&store).0 > 0);
            sync.kill().unwrap();
            sync.wait().unwrap();
        }
        common::eventually("it is copied", || held(&store).0 > 0);
        books.setup(6, &directive);
        // What cannot be kept stays, as the run has left it.
        std::fs::remove_dir(books.place.join("kept")).unwrap();
        books.place.write("kept", "no directory");
        let saved = Ran::of(books.save(6).output().unwrap());
        assert!(saved.code == Some(1) && saved.err.contains("the pool stays on"), "{policy}: {saved:?}");
        let before = held(&store);
        std::thread::sleep(Duration::from_secs(3));
        // The next mover removes what an upload has left that was not over.
        let after = held(&store);
        assert!(after.0 <= before.0 && after.1 <= before.1, "{policy}: {before:?}, {after:?}");
        assert!(before.0 < 100, "{policy}: this has to be slow");
        let tasks: Value =
            serde_json::from_str(&books.run(&["--pool", &pool, "tasks", "--json"]).out).unwrap();
        let states: Vec<_> = tasks.as_array().unwrap().iter().map(|task| task["state"].clone()).collect();
        assert!(!states.iter().any(|it| it == "queued" || it == "running"), "{policy}: {states:?}");
        books.run(&["--pool", &pool, "down", "--force", "--discard"]);
    }
}

/// The child of a process that has this word.
fn child_with(parent: u32, word: &str) -> Option<i32> {
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    let has = |child: &&str| {
        let words = std::fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
        words.split(|byte| *byte == 0).any(|one| one == word.as_bytes())
    };
    children.split_whitespace().find(has)?.parse().ok()
}

/// Its start was given up after half a second, as the run has ended, and it stayed for ever.
#[test]
fn start_of_a_killed_pool_on_a_disk_may_take_long_after_the_end_of_its_run() {
    let books = Books::new();
    let stored = books.place.join("stored");
    books.setup(6, &format!("capacity=64MiB pool=forebay mode=ssd stage_out=/r:{}", stored.display()));
    books.hooks(6, &["data_in", "pre_run", "post_run"]);
    let pool = books.pool_of(6, &["--media", "ssd"]);
    books.run(&["--pool", &pool, "run", "--quiet", "--", "sh", "-c", "echo here >/forebay/r"]);
    books.run(&["--pool", &pool, "down"]);
    let save = books.save(6).stderr(Stdio::piped()).spawn().unwrap();
    // It takes a few milliseconds.
    let end = Instant::now() + Duration::from_secs(30);
    let mut up = None;
    while up.is_none() && Instant::now() < end {
        up = child_with(save.id(), "up");
    }
    let up = rustix::process::Pid::from_raw(up.unwrap()).unwrap();
    rustix::process::kill_process(up, rustix::process::Signal::STOP).unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    let _ = rustix::process::kill_process(up, rustix::process::Signal::CONT);
    let saved = Ran::of(save.wait_with_output().unwrap());
    assert_eq!(saved.code, Some(0), "{saved:?}");
    assert_eq!(std::fs::read_to_string(stored).unwrap(), "here\n");
    assert_eq!(books.read("results/6.0/out.json")["ok"], true);
}

#[test]
fn script_is_checked_at_submission_without_the_registry() {
    let books = Books::new();
    let script = books.place.write("job.sh", "#!/bin/sh\n#BB_LUA forebay capacity=64MiB pool=forebay\n");
    let script = script.to_str().unwrap();
    let registry = books.place.join("registry");
    std::fs::remove_dir_all(&registry).unwrap();
    std::fs::write(&registry, "no directory").unwrap();
    assert_eq!(books.hook(&["job_process", script]), Ok(String::new()));
    assert!(books.hook(&["pools"]).is_err());
    std::fs::remove_file(&registry).unwrap();
}
