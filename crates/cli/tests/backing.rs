//! Backing stores as users reach them: attach and detach, state, tasks, the mover that the supervisor keeps, and the end
//! of pools that have something left to copy.
//!
//! The stores are directories beside the pool. What the mover does in detail is tested in `crates/mover`.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{eventually, forebay, is_alive, kill, Place, Ran, Replaced};
use forebay_server::launch::{self, Attempt, DownOptions};
use serde_json::Value;

/// A pool that is up, and a directory to be its store.
struct Bed {
    place: Place,
    pool: PathBuf,
    store: PathBuf,
}

impl Bed {
    fn new() -> Bed {
        let place = Place::new();
        let store = place.join("store");
        std::fs::create_dir(&store).unwrap();
        place.write("store/a.txt", "alpha");
        place.write("store/sub/b.bin", vec![7u8; 100_000]);
        let pool = place.up("p");
        Bed { place, pool, store }
    }

    /// With the store attached at `/data`.
    fn attached(options: &[&str]) -> Bed {
        let bed = Bed::new();
        bed.ok(&[&["attach", bed.store.to_str().unwrap(), "/data"], options].concat());
        bed
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.place.command(arguments);
        command.env("FOREBAY_POOL", &self.pool);
        command
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        Ran::of(self.command(arguments).output().unwrap())
    }

    fn ok(&self, arguments: &[&str]) -> Ran {
        let ran = self.run(arguments);
        assert_eq!(ran.code, Some(0), "{arguments:?}: {ran:?}");
        ran
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let ran = self.ok(arguments);
        serde_json::from_str(&ran.out).unwrap_or_else(|e| panic!("{e}: {ran:?}"))
    }

    /// Runs a shell command that sees the pool at `/forebay`.
    fn sh(&self, script: &str) -> Ran {
        self.ok(&["run", "--quiet", "--", "sh", "-c", script])
    }

    fn mover(&self) -> Value {
        self.json(&["status", "--json"])["mover"].clone()
    }

    fn mover_pid(&self) -> i32 {
        self.mover()["pid"].as_i64().unwrap() as i32
    }

    fn stored(&self, name: &str) -> Option<String> {
        std::fs::read_to_string(self.store.join(name)).ok()
    }

    fn state(&self, path: &str) -> Value {
        self.json(&["state", "--json", path])[0].clone()
    }
}

#[test]
fn attach_shows_the_stores_tree_and_what_is_written_reaches_the_store() {
    let bed = Bed::attached(&[]);
    let read = bed.sh("cat /forebay/data/a.txt; wc -c </forebay/data/sub/b.bin");
    assert_eq!(read.out, "alpha100000\n", "{read:?}");
    bed.sh("echo one >/forebay/data/new; echo two >>/forebay/data/a.txt; mkdir /forebay/data/d");
    bed.ok(&["wait-durable", "-r", "/data", "--timeout", "60s"]);
    assert_eq!(bed.stored("new").as_deref(), Some("one\n"));
    assert_eq!(bed.stored("a.txt").as_deref(), Some("alphatwo\n"));
    assert!(bed.store.join("d").is_dir());
    let state = bed.state("/data/new");
    assert_eq!((state["state"].as_str(), state["durable"].as_bool()), (Some("clean"), Some(true)), "{state}");
    assert_eq!(
        (state["store"]["at"].as_str(), state["store"]["path"].as_str()),
        (Some("/data"), Some("new"))
    );
    assert_eq!(state["published"]["bytes"], 4);
    let sums = bed.json(&["state", "-r", "--json", "/data"])[0].clone();
    assert_eq!((sums["clean"]["files"].as_u64(), sums["pending"].as_u64()), (Some(3), Some(0)), "{sums}");
}

#[test]
fn attach_refuses_what_cannot_be_a_store_and_changes_nothing() {
    let bed = Bed::new();
    let store = bed.store.to_str().unwrap();
    for url in ["s3://me:hunter2@bucket", "s3://bucket?secret_access_key=hunter2"] {
        let ran = bed.run(&["attach", url, "/data"]);
        ran.assert_refused(1, &["hint: leave it out", "AWS_ACCESS_KEY_ID"]);
        assert!(!ran.err.contains("hunter2"), "{ran:?}");
    }
    bed.run(&["attach", "http://host/x", "/data"])
        .assert_refused(1, &["no kind of store", "s3://BUCKET/PREFIX"]);
    bed.run(&["attach", "/nowhere/at/all", "/data"]).assert_refused(1, &["no such directory"]);
    let file = bed.place.join("store/a.txt");
    bed.run(&["attach", file.to_str().unwrap(), "/data"]).assert_refused(1, &["no directory"]);
    let pool = bed.pool.join("target");
    bed.run(&["attach", pool.to_str().unwrap(), "/data"]).assert_refused(1, &["the pool's own directory"]);
    let above = bed.place.path.to_str().unwrap();
    bed.run(&["attach", above, "/data"]).assert_refused(1, &["the pool would show itself"]);
    let misspelt = format!("file://{store}?latancy=30ms");
    bed.run(&["attach", &misspelt, "/data"]).assert_refused(1, &["latancy", "latency"]);
    assert_eq!(bed.run(&["attach", store, "/data", "--drain", "soon"]).code, Some(2));
    // A variable that is not set does not mean the root.
    bed.run(&["attach", store, ""]).assert_refused(2, &["it is empty", "write /"]);
    assert_eq!(bed.ok(&["ls"]).out, "", "no directory is left");

    bed.sh("mkdir /forebay/full; touch /forebay/full/x /forebay/file");
    bed.run(&["attach", store, "/full"]).assert_refused(1, &["has entries"]);
    bed.run(&["attach", store, "/file"]).assert_refused(1, &["no directory"]);
    bed.ok(&["attach", store, "/data"]);
    let again = bed.json(&["attach", store, "/data", "--json"]);
    assert_eq!(again["already"], true);
    bed.run(&["attach", store, "/data", "--read-only"])
        .assert_refused(1, &["is attached there", "forebay detach /data"]);
    bed.run(&["attach", store, "/data/sub"]).assert_refused(1, &["belongs to the store", "/data"]);
}

#[test]
fn store_whose_directory_was_made_anew_is_used_when_attach_is_told() {
    let bed = Bed::attached(&["--drain", "request"]);
    bed.sh("echo mine >/forebay/data/mine");
    let (store, aside) = (bed.store.to_str().unwrap(), bed.place.join("aside"));
    std::fs::rename(&bed.store, &aside).unwrap();
    std::fs::create_dir(&bed.store).unwrap();
    std::fs::copy(aside.join("a.txt"), bed.store.join("a.txt")).unwrap();
    assert_ne!(bed.run(&["sync", "-r", "/data"]).code, Some(0));
    let again = ["attach", store, "/data", "--drain", "request", "--replaced"];
    bed.run(&again[..5]).assert_refused(1, &["another directory", "--replaced"]);
    bed.run(&["attach", store, "/data", "--replaced"]).assert_refused(1, &["is attached there"]);
    assert!(!bed.store.join("mine").exists());
    bed.ok(&again);
    bed.ok(&["sync", "-r", "/data"]);
    assert_eq!(std::fs::read_to_string(bed.store.join("mine")).unwrap(), "mine\n");
    assert_eq!(bed.json(&[&again[..5], &["--json"]].concat())["already"], true);
}

#[test]
fn relative_path_is_meant_from_the_working_directory() {
    let bed = Bed::new();
    let mut attach = bed.command(&["attach", "store", "/data", "--json"]);
    let ran = Ran::of(attach.current_dir(&bed.place.path).output().unwrap());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let said: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(said["url"].as_str(), bed.store.to_str());
    assert_eq!((said["at"].as_str(), said["drain"].as_str()), (Some("/data"), Some("close")));
}

#[test]
fn detach_leaves_the_store_as_it_is_and_the_directory_empty() {
    let bed = Bed::attached(&["--drain", "request"]);
    bed.sh("cat /forebay/data/a.txt /forebay/data/sub/b.bin >/dev/null; echo new >/forebay/data/sub/new");
    let said = bed.json(&["detach", "/data", "--json"]);
    assert_eq!((said["drained_files"].as_u64(), said["lost_files"].as_u64()), (Some(1), Some(0)), "{said}");
    assert_eq!(bed.stored("sub/new").as_deref(), Some("new\n"));
    assert_eq!(bed.stored("a.txt").as_deref(), Some("alpha"));
    assert_eq!(bed.ok(&["ls", "-a", "/data"]).out, "");
    bed.run(&["detach", "/data"]).assert_refused(1, &["no store is attached there"]);
    bed.ok(&["fsck"]);
    bed.ok(&["attach", bed.store.to_str().unwrap(), "/data"]);
    assert_eq!(bed.ok(&["ls", "/data/sub"]).out, "b.bin\nnew\n");
}

#[test]
fn detach_with_discard_needs_no_store_and_says_what_is_lost() {
    let bed = Bed::attached(&["--drain", "request"]);
    bed.sh("echo lost >/forebay/data/lost; rm /forebay/data/a.txt; mv /forebay/data/sub /forebay/data/moved");
    let said = bed.json(&["detach", "--discard", "/data", "--json"]);
    assert_eq!(said["lost_files"], 1, "{said}");
    assert_eq!(bed.stored("lost"), None);
    assert_eq!(bed.stored("a.txt").as_deref(), Some("alpha"));
    assert!(bed.store.join("sub/b.bin").exists() && !bed.store.join("moved").exists());
    bed.ok(&["fsck"]);
    assert_eq!(bed.ok(&["ls", "-a", "/data"]).out, "");
}

#[test]
fn empty_path_is_refused_and_never_means_the_root() {
    let place = Place::new();
    let store = place.write("store/a.txt", b"a").parent().unwrap().to_owned();
    place.ok(["up", "--capacity", "64MiB"]);
    place.ok(["attach", store.to_str().unwrap(), "/", "--drain", "request"]);
    place.ok(["run", "--quiet", "--", "sh", "-c", "echo b >/forebay/b.txt"]);
    for verb in [
        &["detach", "--discard"][..],
        &["release", "-r"],
        &["purge", "-r"],
        &["sync", "-r"],
        &["state"],
        &["pin"],
        &["resolve", "--keep", "pool"],
        &["wait-durable"],
        &["stat"],
        &["ls"],
        &["layout", "set", "-c", "2"],
    ] {
        place.run(verb.iter().chain(&[""])).assert_refused(2, &["it is empty", "write /"]);
    }
    assert_eq!(place.json(["state", "--json", "/b.txt"])[0]["state"], "dirty");
    place.ok(["down"]);
    assert_eq!(std::fs::read(store.join("b.txt")).unwrap(), b"b\n");
}

#[test]
fn state_lists_each_place_at_which_the_store_differs() {
    let bed = Bed::attached(&["--drain", "request", "--rule", "*.tmp=temporary"]);
    bed.sh("cd /forebay/data; echo x >>a.txt; mkdir d; echo y >d/new; rm -r sub; echo t >x.tmp; ln -s a.txt link");
    let listed = bed.ok(&["state", "-r", "--list", "/data"]).out;
    for line in [
        "dirty     /data/a.txt\n",
        "new       /data/d\n",
        "new       /data/d/new\n",
        "new       /data/link\n",
        "removed   /data/sub\n",
        "removed   /data/sub/b.bin\n",
        "new       /data/x.tmp  temporary: ",
    ] {
        assert!(listed.contains(line), "{line} is not in {listed}");
    }
    let below = bed.json(&["state", "-r", "--list", "--json", "/data/d"]);
    assert_eq!(
        (below.as_array().unwrap().len(), below[0]["path"].as_str()),
        (1, Some("/data/d/new")),
        "{below}"
    );
    let link = bed.json(&["state", "-r", "--list", "--json", "/"]);
    let link = link.as_array().unwrap().iter().find(|place| place["kind"] == "symlink").unwrap();
    assert_eq!(link["target"], "a.txt");
    std::fs::write(bed.store.join("a.txt"), "others wrote this").unwrap();
    assert_ne!(bed.run(&["sync", "-r", "/data"]).code, Some(0));
    let listed = bed.ok(&["state", "-r", "--list", "/data"]).out;
    assert!(listed.contains("/data/a.txt  conflict: ") && listed.matches('\n').count() == 2, "{listed}");
    assert_eq!(bed.run(&["state", "--list", "/data"]).code, Some(2));
}

#[test]
fn detach_takes_files_along_that_are_never_to_reach_the_store() {
    let bed = Bed::attached(&["--rule", "*.tmp=temporary"]);
    bed.sh("cd /forebay/data; echo x >x.tmp; mkdir d; echo y >d/y.tmp; echo kept >d/kept; rm a.txt");
    let said = bed.json(&["detach", "/data", "--json"]);
    assert_eq!(said["lost_files"], 0, "{said}");
    assert_eq!(bed.stored("d/kept").as_deref(), Some("kept\n"));
    assert_eq!((bed.stored("x.tmp"), bed.stored("d/y.tmp"), bed.stored("a.txt")), (None, None, None));
    assert_eq!(bed.ok(&["ls", "-a", "/data"]).out, "");
    bed.ok(&["fsck"]);
}

#[test]
fn supervisor_keeps_the_mover_and_ends_it_with_the_pool() {
    let bed = Bed::new();
    assert!(bed.mover().is_null(), "a pool without stores has none");
    bed.ok(&["attach", bed.store.to_str().unwrap(), "/data"]);
    let first = bed.mover_pid();
    for round in 1..=2 {
        kill(bed.mover_pid(), 9);
        eventually("the mover is started again", || {
            let mover = bed.mover();
            mover["state"] == "up" && mover["restarts"] == round
        });
    }
    let mover = bed.mover();
    assert_eq!(mover["last_crash"], "was killed by signal 9");
    assert_ne!(bed.mover_pid(), first);
    let text = bed.ok(&["status"]).out;
    assert!(text.contains("mover") && text.contains("started again 2 times"), "{text}");
    bed.sh("cat /forebay/data/a.txt");
    let last = bed.mover_pid();
    bed.ok(&["down", "--keep"]);
    assert!(!is_alive(last));
    let up = bed.place.json(["up", "--json", "--path", bed.pool.to_str().unwrap()]);
    if up["reopened"] == true {
        eventually("the mover of the pool from before runs", || bed.mover()["state"] == "up");
        assert_eq!(bed.sh("cat /forebay/data/a.txt").out, "alpha");
    }
}

#[test]
fn mover_of_a_killed_supervisor_ends() {
    let bed = Bed::attached(&[]);
    let status = bed.json(&["status", "--json"]);
    let mover = bed.mover_pid();
    kill(status["pids"]["supervisor"].as_i64().unwrap() as i32, 9);
    eventually("the mover ends", || !is_alive(mover));
    // Data of the pool may be newer than those of the store.
    if bed.json(&["up", "--json", "--path", bed.pool.to_str().unwrap()])["reopened"] == true {
        eventually("another mover runs", || bed.mover()["state"] == "up");
    }
}

#[test]
fn tasks_have_numbers_and_outcomes_that_outlive_the_mover() {
    let bed = Bed::attached(&["--drain", "request"]);
    bed.sh("echo one >/forebay/data/one; echo two >/forebay/data/sub/two");
    let started = bed.json(&["sync", "-r", "--no-wait", "--json", "/data"]);
    let id = started[0]["id"].to_string();
    let over = bed.json(&["tasks", "wait", &id, "--json"]);
    assert_eq!((over["state"].as_str(), over["files_done"].as_u64()), (Some("done"), Some(2)), "{over}");
    assert_eq!((bed.stored("one"), bed.stored("sub/two")), (Some("one\n".into()), Some("two\n".into())));
    let prestaged = bed.ok(&["prestage", "-r", "/data"]);
    assert!(prestaged.out.contains("prestage of /data: done"), "{prestaged:?}");
    assert_eq!(bed.state("/data/sub/b.bin")["state"], "clean");
    bed.ok(&["release", "/data/sub/b.bin"]);
    let released = bed.state("/data/sub/b.bin");
    assert_eq!(
        (released["state"].as_str(), released["resident_bytes"].as_u64()),
        (Some("released"), Some(0))
    );
    let before = bed.json(&["tasks", "--json"]);
    kill(bed.mover_pid(), 9);
    eventually("the mover is started again", || bed.mover()["restarts"] == 1 && bed.mover()["state"] == "up");
    assert_eq!(bed.json(&["tasks", "list", "--json"]), before);
    let text = bed.ok(&["tasks", "show", &id]).out;
    assert!(text.contains("sync of /data, and everything below"), "{text}");
    let cancelled = bed.json(&["tasks", "cancel", &id, "--json"]);
    assert_eq!(cancelled["state"], "done", "it was over");
    bed.run(&["tasks", "show", "999"]).assert_refused(1, &["no such task", "forebay tasks"]);
}

#[test]
fn verbs_of_stores_on_what_belongs_to_none_say_so() {
    let bed = Bed::new();
    bed.sh("echo x >/forebay/file");
    for verb in ["sync", "prestage", "release", "purge", "refresh", "pin", "unpin", "wait-durable"] {
        bed.run(&[verb, "/file"]).assert_refused(1, &["belongs to no backing store", "forebay attach"]);
    }
    assert_eq!(bed.state("/file")["state"], "unattached");
    bed.run(&["tasks"]).assert_refused(1, &["does not run", "forebay attach"]);
    bed.run(&["state", "/absent"]).assert_refused(1, &["no such name"]);
    // With --json each path has its place in the list.
    let verbs = ["state", "stat", "ls", "pin", "unpin", "sync", "refresh", "wait-durable"];
    for verb in verbs.iter().map(|verb| vec![*verb]).chain([vec!["layout", "get"]]) {
        let ran = bed.run(&[&verb[..], &["--json", "/absent", "/file"]].concat());
        let list: Value = serde_json::from_str(&ran.out).unwrap_or_else(|e| panic!("{verb:?}: {e}: {ran:?}"));
        assert_eq!((ran.code, list.as_array().map(Vec::len)), (Some(1), Some(2)), "{verb:?}: {ran:?}");
        assert_eq!(
            (&list[0]["path"], &list[0]["error"]["code"]),
            (&"/absent".into(), &"not-found".into()),
            "{ran:?}"
        );
    }
    assert_eq!(bed.run(&["resolve", "/file"]).code, Some(2), "--keep is missing");
    assert_eq!(bed.run(&["tasks", "show", "x"]).code, Some(2));
}

#[test]
fn pinned_file_is_not_released() {
    let bed = Bed::attached(&[]);
    bed.sh("cat /forebay/data/a.txt");
    bed.ok(&["pin", "/data/a.txt"]);
    assert_eq!(bed.state("/data/a.txt")["pinned"], true);
    bed.run(&["release", "/data/a.txt"]).assert_refused(1, &["cannot release"]);
    assert_eq!(bed.state("/data/a.txt")["state"], "clean");
    bed.ok(&["unpin", "/data/a.txt"]);
    bed.ok(&["release", "/data/a.txt"]);
    assert_eq!(bed.state("/data/a.txt")["state"], "released");
}

#[test]
fn down_copies_first_and_says_how_much() {
    let bed = Bed::attached(&["--drain", "request"]);
    bed.sh("echo one >/forebay/data/one; rm /forebay/data/a.txt");
    bed.run(&["wait-durable", "/data/one"])
        .assert_refused(1, &["nothing copies it by itself", "forebay sync /data/one"]);
    let down = bed.ok(&["down"]);
    assert!(down.out.contains("copied to the backing store: 1 file (4 B)"), "{down:?}");
    // The pool had a directory without a store, too.
    assert!(down.out.contains("are gone") && !down.out.contains("all files"), "{down:?}");
    assert_eq!((bed.stored("one").as_deref(), bed.stored("a.txt")), (Some("one\n"), None));
}

#[test]
fn down_says_that_nothing_is_gone_when_the_store_has_all_files() {
    let rule: &[&str] = &["--rule", "*.tmp=never"];
    for (more, fate) in [(&[][..], "its store has all files"), (rule, "are gone")] {
        let place = Place::new();
        let store = place.write("store/a.txt", b"a").parent().unwrap().to_owned();
        let store = store.to_str().unwrap();
        place.ok(["up", "--capacity", "64MiB"]);
        place.ok(["attach", store, "/"].iter().chain(more));
        place.ok(["run", "--quiet", "--", "sh", "-c", "cat /forebay/a.txt >/forebay/b.txt"]);
        let down = place.ok(["down"]);
        assert!(down.out.contains(fate), "{down:?}");
        assert_eq!(std::fs::read(place.join("store/b.txt")).unwrap(), b"a");
    }
}

#[test]
fn down_refuses_to_lose_what_the_store_does_not_take() {
    let bed = Bed::attached(&["--drain", "request"]);
    bed.sh("echo mine >>/forebay/data/a.txt");
    std::fs::write(bed.store.join("a.txt"), "theirs, and longer").unwrap();
    let refused = bed.run(&["down"]);
    refused.assert_refused(1, &["1 file", "forebay resolve", "--discard"]);
    let state = bed.state("/data/a.txt");
    assert_eq!(
        (state["conflict"].as_bool(), state["durable"].as_bool()),
        (Some(true), Some(false)),
        "{state}"
    );
    bed.run(&["detach", "/data"]).assert_refused(1, &["forebay resolve", "detach --discard"]);
    assert_eq!(bed.stored("a.txt").as_deref(), Some("theirs, and longer"));
    bed.ok(&["resolve", "/data/a.txt", "--keep", "pool"]);
    bed.ok(&["down"]);
    assert_eq!(bed.stored("a.txt").as_deref(), Some("alphamine\n"));
}

#[test]
fn pool_that_stays_up_for_want_of_its_store_stays_mounted() {
    let bed = Bed::attached(&["--drain", "request"]);
    let mount = bed.place.join("mnt");
    std::fs::create_dir(&mount).unwrap();
    if bed.run(&["mount", mount.to_str().unwrap()]).code != Some(0) {
        return; // no FUSE
    }
    bed.sh("echo mine >>/forebay/data/a.txt");
    std::fs::write(bed.store.join("a.txt"), "theirs, and longer").unwrap();
    bed.run(&["down"]).assert_refused(1, &["forebay resolve"]);
    assert_eq!(std::fs::read_to_string(mount.join("data/a.txt")).unwrap(), "alphamine\n");
    bed.ok(&["resolve", "/data/a.txt", "--keep", "pool"]);
    bed.ok(&["down"]);
    assert_eq!(bed.stored("a.txt").as_deref(), Some("alphamine\n"));
    assert_eq!(std::fs::read_dir(&mount).unwrap().count(), 0);
}

#[test]
fn down_with_discard_copies_nothing() {
    let bed = Bed::attached(&["--drain", "request"]);
    bed.sh("echo one >/forebay/data/one");
    bed.ok(&["down", "--discard"]);
    assert_eq!(bed.stored("one"), None);
}

/// The program that uses the pool when `down` first looks has ended when `down` stops the pool.
#[test]
fn down_of_a_pool_whose_last_program_ends_meanwhile_loses_nothing() {
    let bed = Bed::attached(&["--drain", "request"]);
    let script = "echo one >/forebay/data/one; sleep 1000";
    let mut run = bed.command(&["run", "--quiet", "--", "sh", "-c", script]).spawn().unwrap();
    eventually("the file is there", || bed.run(&["stat", "/data/one"]).code == Some(0));
    assert_eq!(bed.json(&["status", "--json"])["members"], 1);
    let worker = Replaced::new(&bed.pool, "socket");
    let down = bed.command(&["down"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The supervisor has answered `down`; the worker has not.
    let looks = worker.meet_and_restore();
    kill(down.id() as i32, libc::SIGSTOP);
    kill(run.id() as i32, libc::SIGKILL);
    run.wait().unwrap();
    eventually("the pool knows", || bed.json(&["status", "--json"])["members"] == 0);
    kill(down.id() as i32, libc::SIGCONT);
    drop(looks);
    let down = Ran::of(down.wait_with_output().unwrap());
    assert_eq!(down.code, Some(0), "{down:?}");
    assert_eq!(bed.stored("one").as_deref(), Some("one\n"), "{down:?}");
}

#[test]
fn pool_that_a_program_has_used_since_it_was_drained_is_not_stopped() {
    let bed = Bed::attached(&["--drain", "request"]);
    let uses = launch::ensure_unused(&bed.pool).unwrap();
    bed.sh("echo one >/forebay/data/one");
    let options = DownOptions { uses: Some(uses), ..DownOptions::default() };
    assert!(matches!(launch::try_down(&bed.pool, options).unwrap(), Attempt::Used));
    let uses = launch::ensure_unused(&bed.pool).unwrap();
    let mount = bed.place.join("mnt");
    std::fs::create_dir(&mount).unwrap();
    if bed.run(&["mount", mount.to_str().unwrap()]).code == Some(0) {
        let options = DownOptions { uses: Some(uses), ..DownOptions::default() };
        assert!(matches!(launch::try_down(&bed.pool, options).unwrap(), Attempt::Used));
    }
    bed.ok(&["down"]);
    assert_eq!(bed.stored("one").as_deref(), Some("one\n"));
}

/// A daemon that does not answer is killed only with `--discard`, as its data in memory go with it.
#[test]
fn down_of_a_pool_that_does_not_answer_does_not_discard_what_its_store_lacks() {
    let bed = Bed::attached(&["--drain", "request"]);
    bed.sh("echo one >/forebay/data/one");
    let status = bed.json(&["status", "--json"]);
    if status["backing"] == "directory" {
        return; // its data stay in any case
    }
    let supervisor = status["pids"]["supervisor"].as_i64().unwrap() as i32;
    kill(supervisor, libc::SIGSTOP);
    let down = bed.run(&["down"]);
    kill(supervisor, libc::SIGCONT);
    down.assert_refused(1, &["does not answer", "--discard"]);
    bed.ok(&["down"]);
    assert_eq!(bed.stored("one").as_deref(), Some("one\n"));
}

#[test]
fn pool_in_the_foreground_that_gets_a_signal_copies_to_its_store_first() {
    let place = Place::new();
    place.write("store/a.txt", "alpha");
    let (pool, store) = (place.join("p"), place.join("store"));
    let path = pool.to_str().unwrap();
    let up = |more: &[&str]| {
        let words = ["up", "--capacity", "128MiB", "--path", path, "--foreground"];
        let mut command = place.command(words.iter().chain(more));
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        place.ok(["status", "--wait", "60", "--pool", path]);
        child
    };
    let write = |script: &str| place.ok(["--pool", path, "run", "--quiet", "--", "sh", "-c", script]);
    let stored = |name: &str| std::fs::read_to_string(store.join(name)).ok();
    let first = up(&[]);
    let attached = ["attach", store.to_str().unwrap(), "/", "--drain", "request", "--pool", path];
    place.ok(attached);
    write("echo one >/forebay/one");
    kill(first.id() as i32, libc::SIGTERM);
    let ended = Ran::of(first.wait_with_output().unwrap());
    assert_eq!((ended.code, stored("one").as_deref()), (Some(0), Some("one\n")), "{ended:?}");
    // What the store does not take is kept.
    let second = up(&[]);
    place.ok(attached);
    let kind = place.json(["status", "--json", "--pool", path])["backing"].clone();
    write("echo two >/forebay/two; echo mine >>/forebay/a.txt");
    std::fs::write(store.join("a.txt"), "theirs, and longer").unwrap();
    kill(second.id() as i32, libc::SIGTERM);
    let ended = Ran::of(second.wait_with_output().unwrap());
    ended.assert_refused(1, &["cannot copy everything", "1 file", "forebay resolve"]);
    assert_eq!(stored("two").as_deref(), Some("two\n"));
    if kind != "detached" {
        place.ok(["up", "--path", path]);
    }
    place.ok(["resolve", "/a.txt", "--keep", "pool", "--pool", path]);
    place.ok(["down", "--pool", path]);
    assert_eq!(stored("a.txt").as_deref(), Some("alphamine\n"));
}

#[test]
fn data_that_are_never_drained_do_not_keep_the_pool() {
    let bed = Bed::attached(&["--drain", "never"]);
    bed.sh("echo scratch >/forebay/data/scratch");
    bed.ok(&["detach", "/data"]);
    assert_eq!((bed.stored("scratch"), bed.ok(&["ls", "/data"]).out), (None, String::new()));
    bed.ok(&["down"]);
}

#[test]
fn up_with_a_store_starts_both_or_neither() {
    let place = Place::new();
    place.write("store/a.txt", "alpha");
    let (pool, store) = (place.join("p"), place.join("store"));
    let (pool, store) = (pool.to_str().unwrap(), store.to_str().unwrap());
    let refused = place.run(["up", "--capacity", "128MiB", "--path", pool, "--backing", "/nowhere/at/all"]);
    refused.assert_refused(1, &["no such directory"]);
    assert!(place.pools().is_empty());
    let up = place.json(["up", "--capacity", "128MiB", "--path", pool, "--backing", store, "--json"]);
    assert_eq!((up["attached"]["at"].as_str(), up["attached"]["url"].as_str()), (Some("/"), Some(store)));
    assert_eq!(place.ok(["ls", "--pool", pool]).out, "a.txt\n");
    place.ok(["down", "--pool", pool]);
}

#[test]
fn run_with_a_store_leaves_its_results_there_and_no_pool() {
    let place = Place::new();
    place.write("store/in", "input");
    let store = place.join("store");
    let script = "cat /forebay/in >/forebay/out; mkdir /forebay/d; echo deep >/forebay/d/deep";
    let ran = place.ok([
        "run",
        "--backing",
        store.to_str().unwrap(),
        "--capacity",
        "128MiB",
        "--",
        "sh",
        "-c",
        script,
    ]);
    assert_eq!(std::fs::read_to_string(store.join("out")).unwrap(), "input", "{ran:?}");
    assert_eq!(std::fs::read_to_string(store.join("d/deep")).unwrap(), "deep\n");
    place.assert_nothing_left();
    let failed = place.run(["run", "--backing", "/nowhere/at/all", "--", "true"]);
    failed.assert_refused(125, &["no such directory"]);
    place.assert_nothing_left();
}

#[test]
fn run_whose_results_cannot_be_copied_keeps_the_pool_and_names_it() {
    let place = Place::new();
    place.write("store/a", "alpha");
    let store = place.join("store");
    // The program changes the file in the pool and, as another user of the store would, in the store.
    let script =
        format!("echo mine >>/forebay/a; printf 'theirs, and longer' >{}", store.join("a").display());
    let ran = place.run([
        "run",
        "--backing",
        store.to_str().unwrap(),
        "--capacity",
        "128MiB",
        "--",
        "sh",
        "-c",
        &script,
    ]);
    if std::fs::read_to_string(store.join("a")).unwrap() == "alphamine\n" {
        return; // the mover was faster than the script
    }
    ran.assert_refused(125, &["cannot copy everything", "their pool stays up", "forebay down --pool"]);
    let pools = place.pools();
    assert_eq!(pools.len(), 1, "{pools:?}");
    let pool = pools[0].to_str().unwrap();
    place.ok(["resolve", "--pool", pool, "/a", "--keep", "pool"]);
    place.ok(["down", "--pool", pool]);
    assert_eq!(std::fs::read_to_string(store.join("a")).unwrap(), "alphamine\n");
}

#[test]
fn run_that_is_killed_leaves_its_results_in_the_store_and_no_pool() {
    let place = Place::new();
    place.write("store/a", "alpha");
    let store = place.join("store");
    let url = format!("file://{}?rate=4MB/s", store.display());
    let script =
        "head -c 6000000 /dev/zero >/forebay/big; echo small >/forebay/small; echo >&2; exec sleep 600";
    let arguments = ["run", "--quiet", "--backing", &url, "--capacity", "128MiB", "--", "sh", "-c", script];
    let mut run = place.command(arguments).stderr(std::process::Stdio::piped()).spawn().unwrap();
    // The program has written; the store does not have it yet.
    let mut said = std::io::BufReader::new(run.stderr.take().unwrap());
    std::io::BufRead::read_line(&mut said, &mut String::new()).unwrap();
    run.kill().unwrap();
    run.wait().unwrap();
    eventually("the pool is drained and gone", || place.pools().is_empty());
    assert_eq!(std::fs::metadata(store.join("big")).unwrap().len(), 6_000_000);
    assert_eq!(std::fs::read_to_string(store.join("small")).unwrap(), "small\n");
    place.assert_nothing_left();
}

/// A run within a run uses its pool, and may end later.
#[test]
fn what_a_run_within_a_run_writes_after_that_has_ended_is_in_the_store() {
    let place = Place::new();
    let store = place.join("store");
    std::fs::create_dir(&store).unwrap();
    let go = place.join("go");
    let inner = format!("until [ -e {} ]; do sleep 0.1; done; echo late >/forebay/late", go.display());
    // The inner run has joined when its program runs.
    let outer = format!(
        "\"$0\" run --quiet -- sh -c 'touch {0}; {inner}' & until [ -e {0} ]; do sleep 0.1; done; \
         echo early >/forebay/early",
        place.join("joined").display()
    );
    let words =
        ["run", "--quiet", "--capacity", "128MiB", "--backing", store.to_str().unwrap(), "--", "sh", "-c"];
    let mut command = place.command(words);
    let status = command.arg(outer).arg(forebay()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    assert_eq!(status.unwrap().code(), Some(0));
    assert_eq!(std::fs::read_to_string(store.join("early")).unwrap(), "early\n");
    std::fs::write(&go, "").unwrap();
    eventually("the pool is gone", || place.pools().is_empty());
    assert_eq!(std::fs::read_to_string(store.join("late")).unwrap(), "late\n");
    place.assert_nothing_left();
}

#[test]
fn killed_pool_with_a_store_is_not_removed_without_discard() {
    let bed = Bed::attached(&["--drain", "request"]);
    bed.sh("echo one >/forebay/data/one");
    let status = bed.json(&["status", "--json"]);
    kill(status["pids"]["supervisor"].as_i64().unwrap() as i32, 9);
    eventually("the pool is down", || !is_alive(status["pids"]["worker"].as_i64().unwrap() as i32));
    if status["backing"] != "tmpfs" {
        return; // its data went with it, or stay in any case
    }
    bed.run(&["down"]).assert_refused(1, &["may have data", "--discard"]);
    bed.place.ok(["up", "--path", bed.pool.to_str().unwrap()]);
    bed.ok(&["down"]);
    assert_eq!(bed.stored("one").as_deref(), Some("one\n"));
}

#[test]
fn mover_by_hand_says_what_it_is_and_what_is_wrong() {
    let mover = forebay().with_file_name("forebay-mover");
    let ran = |arguments: &[&str]| Ran::of(Command::new(&mover).args(arguments).output().unwrap());
    assert!(ran(&["--help"]).out.contains("Usage: forebay-mover --pool DIR"));
    assert!(ran(&["--version"]).out.starts_with("forebay-mover "));
    ran(&[]).assert_refused(2, &["no pool is named", "--help"]);
    assert_eq!(ran(&["--pool", "/nowhere"]).code, Some(1));
    let bed = Bed::attached(&[]);
    let second = ran(&["--pool", bed.pool.to_str().unwrap()]);
    second.assert_refused(1, &["another one serves pool"]);
    assert!(Path::new(&bed.pool).join("mover.sock").exists());
}
