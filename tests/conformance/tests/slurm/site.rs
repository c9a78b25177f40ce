//! A Slurm with Forebay's burst buffer: the plugin, prolog and epilog, two users, a directory that plays the stores.
//!
//! Jobs are of two users that are not root, and SlurmUser is not root either where Debian's user exists. The benchmark
//! of jobs uses this file too.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use super::cluster::{lacking, Slurm, NODES};

/// Users that each Debian has, of no rights.
pub(super) const ANN: &str = "games";
pub(super) const BEN: &str = "www-data";

/// Longer than any job of the tests takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(200);

pub(super) struct Site {
    pub(super) slurm: Slurm,
    patience: Duration,
}

/// The reason why this site cannot run here, if there is one.
pub(super) fn lacking_plugin() -> Option<String> {
    if let Some(why) = lacking() {
        return Some(why);
    }
    let plugin = "/usr/lib/x86_64-linux-gnu/slurm-wlm/burst_buffer_lua.so";
    if !Path::new(plugin).exists() {
        return Some(format!("there is no {plugin}"));
    }
    [ANN, BEN].into_iter().find(|user| !has_user(user)).map(|user| format!("there is no user {user}"))
}

/// Whether users of the nodes can mount.
pub(super) fn can_mount() -> bool {
    Path::new("/dev/fuse").exists() && Path::new("/usr/bin/fusermount3").exists()
}

fn has_user(name: &str) -> bool {
    Command::new("id").arg(name).output().is_ok_and(|o| o.status.success())
}

pub(super) fn open_to_all(dir: &Path) {
    std::fs::create_dir_all(dir).unwrap();
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o1777)).unwrap();
}

impl Site {
    /// A Slurm, each of whose nodes gives `capacity`. `settings` are added to Forebay's; `%D` is the directory.
    pub(super) fn up(capacity: &str, settings: &str) -> Site {
        Site::patient(capacity, settings, PATIENCE)
    }

    /// The same, with longer waits of the tests for what Slurm does.
    pub(super) fn awaited(self, patience: Duration) -> Site {
        Site { patience, ..self }
    }

    /// The same, with jobs that take so long at most.
    pub(super) fn patient(capacity: &str, settings: &str, patience: Duration) -> Site {
        let slurm = Slurm::with("b", |slurm, conf| {
            let dir = &slurm.dir;
            let user = if has_user("slurm") { "slurm" } else { "root" };
            for name in ["ctld", "registry"] {
                std::fs::create_dir(dir.join(name)).unwrap();
            }
            for name in ["work", "store", "kept"] {
                open_to_all(&dir.join(name));
            }
            let given = Command::new("chown")
                .arg(user)
                .args(["ctld", "registry", "state"].map(|n| dir.join(n)))
                .output();
            assert!(given.unwrap().status.success());
            let nodes: Vec<String> = (1..=NODES).map(|n| slurm.node_name(n)).collect();
            let shown = dir.display();
            *conf = conf
                .replace(&format!("{shown}/slurmctld."), &format!("{shown}/ctld/slurmctld."))
                .replace("KillWait=5", "KillWait=2")
                // A requeued job waits until its credential has expired.
                .replace(
                    &format!("AuthInfo=socket={shown}/munge"),
                    &format!("AuthInfo=socket={shown}/munge,cred_expire=5"),
                );
            conf.push_str(&format!(
                "SlurmUser={user}\nBurstBufferType=burst_buffer/lua\nPrologFlags=Alloc\nProlog={shown}/prolog\n\
                 Epilog={shown}/epilog\nSlurmdTimeout=10\nDebugFlags=BurstBuffer\nBatchStartTimeout={}\n\
                 SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1,requeue_setup_env_fail\n",
                // Longer than any stage-in.
                patience.as_secs() * 3 / 10
            ));
            let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
            let source =
                above.map(|dir| dir.join("slurm")).find(|dir| dir.join("burst_buffer.lua").is_file());
            let source = source.expect("the plugin is in the sources");
            std::fs::copy(source.join("burst_buffer.lua"), dir.join("burst_buffer.lua")).unwrap();
            std::fs::write(
                dir.join("burst_buffer.conf"),
                "Directive=BB_LUA\nFlags=TeardownFailure\nOtherTimeout=60\n",
            )
            .unwrap();
            for name in ["prolog", "epilog"] {
                let text = std::fs::read_to_string(source.join(name)).unwrap();
                let text =
                    text.replace("REGISTRY=/shared/forebay", &format!("REGISTRY={shown}/registry")).replace(
                        "exec forebay",
                        &format!(
                            "export FOREBAY_SLURM_CONF={shown}/forebay.toml SLURM_CONF={shown}/slurm.conf\n\
                         exec {shown}/bin/forebay"
                        ),
                    );
                let text =
                    text.replace("exec ", &format!("exec 2>>{shown}/{name}.$SLURMD_NODENAME.log\nexec "));
                std::fs::write(dir.join(name), text).unwrap();
                std::fs::set_permissions(dir.join(name), std::fs::Permissions::from_mode(0o755)).unwrap();
            }
            std::fs::write(
                dir.join("forebay.toml"),
                format!(
                    "registry = '{shown}/registry'\nnode_dir = '{shown}/here/pools'\nkeep_dir = '{shown}/kept'\n\
                     nodes = '{}'\ncapacity = '{capacity}'\nstage_out_pause_s = 3\nsilence_s = 10\nrestart_pause_s = 15\n{}",
                    nodes.join(","),
                    settings.replace("%D", &shown.to_string())
                ),
            )
            .unwrap();
        });
        Site { slurm, patience }
    }

    pub(super) fn dir(&self) -> &Path {
        &self.slurm.dir
    }

    pub(super) fn store(&self, name: &str) -> PathBuf {
        self.dir().join("store").join(name)
    }

    /// Runs a command line of a user on the first node.
    pub(super) fn by(&self, user: &str, line: &str) -> Output {
        let dir = self.dir().display();
        self.slurm.on_first(&format!(
            "env -u FOREBAY_POOL FOREBAY_SLURM_CONF={dir}/forebay.toml setpriv --reuid {user} --regid {user} \
             --init-groups {line}"
        ))
    }

    pub(super) fn text_of(output: &Output) -> String {
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
    }

    /// Submits a script; the text of sbatch.
    pub(super) fn submit(&self, user: &str, name: &str, options: &str, script: &str) -> Result<u32, String> {
        let path = self.dir().join("work").join(format!("{name}.sh"));
        let dir = self.dir().display().to_string();
        std::fs::write(&path, format!("#!/bin/bash\n{}", script.replace("%D", &dir))).unwrap();
        let line = format!(
            "sbatch --parsable --chdir={dir}/work --output={dir}/work/{name}.out --open-mode=append {options} {}",
            path.display()
        );
        let output = self.by(user, &line);
        let id = String::from_utf8_lossy(&output.stdout).trim().parse();
        id.map_err(|_| Site::text_of(&output))
    }

    /// `squeue`'s state and reason of a job.
    pub(super) fn shown(&self, job: u32) -> String {
        let output = self.slurm.on_first(&format!("scontrol --oneliner show job {job}"));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let field = |name: &str| {
            let rest = text.split_once(name).map_or("", |(_, rest)| rest);
            rest.split(" Dependency=")
                .next()
                .unwrap_or("")
                .split(" ExitCode=")
                .next()
                .unwrap_or("")
                .to_owned()
        };
        field(" JobState=").replace(" Reason=", " ")
    }

    /// Lets a held job run, on these nodes.
    pub(super) fn release_on(&self, job: u32, node: &str) {
        self.until("it is pending, and may be moved", || {
            let moved = format!("scontrol update JobId={job} ReqNodeList={node}");
            self.slurm.on_first(&moved).status.success()
        });
        let released = self.slurm.on_first(&format!("scontrol release {job}"));
        assert!(released.status.success(), "{}\n{}", Site::text_of(&released), self.shown(job));
    }

    pub(super) fn await_shown(&self, job: u32, wanted: &str) -> String {
        let end = Instant::now() + self.patience;
        loop {
            let shown = self.shown(job);
            if shown.contains(wanted) {
                return shown;
            }
            let is_over = ["COMPLETED", "FAILED", "TIMEOUT"].iter().any(|state| shown.starts_with(state));
            let may_change = !is_over || Instant::now() < end && !wanted.chars().all(char::is_uppercase);
            assert!(
                Instant::now() < end && may_change,
                "job {job} is not {wanted}: {shown}\n{}",
                self.evidence()
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    pub(super) fn until(&self, what: &str, mut come: impl FnMut() -> bool) {
        let end = Instant::now() + self.patience;
        while !come() {
            assert!(Instant::now() < end, "{what}: it has not come\n{}", self.evidence());
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Waits for a file that a job makes in its working directory.
    pub(super) fn await_file(&self, name: &str) {
        self.until(name, || self.dir().join("work").join(name).exists());
    }

    /// Makes a file for which a job waits.
    pub(super) fn mark(&self, name: &str) {
        std::fs::write(self.dir().join("work").join(name), "").unwrap();
    }

    pub(super) fn await_content(&self, path: &Path, wanted: &str) {
        self.until(&format!("{} in {}", wanted.trim(), path.display()), || read(path) == wanted);
    }

    pub(super) fn evidence(&self) -> String {
        let mut text = Site::text_of(&self.slurm.on_first("scontrol show bbstat"));
        for name in ["ctld/slurmctld.log", "work"] {
            let path = self.dir().join(name);
            let files: Vec<PathBuf> = match std::fs::read_dir(&path) {
                Ok(entries) => entries
                    .flatten()
                    .map(|e| e.path())
                    .filter(|p| p.extension().is_some_and(|e| e == "out"))
                    .collect(),
                Err(_) => vec![path],
            };
            for file in files {
                let log = std::fs::read_to_string(&file).unwrap_or_default();
                let tail: Vec<&str> = log.lines().rev().take(60).collect();
                text += &format!(
                    "{}:\n{}\n",
                    file.display(),
                    tail.into_iter().rev().collect::<Vec<_>>().join("\n")
                );
            }
        }
        for entry in std::fs::read_dir(self.dir()).unwrap().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with("prolog.") || name.starts_with("epilog.") {
                text += &format!("{name}:\n{}\n", std::fs::read_to_string(entry.path()).unwrap_or_default());
            }
        }
        text
    }

    /// Waits until the nodes have nothing any more of a job, or of any.
    pub(super) fn assert_clean(&self, case: &str, job: Option<u32>) {
        let end = Instant::now() + self.patience;
        loop {
            let mut left = self.leftovers(job);
            if let (Some(job), true) = (job, left.is_empty()) {
                left = self.in_the_books(job);
            }
            if left.is_empty() {
                return;
            }
            assert!(Instant::now() < end, "{case} has left: {left}\n{}", self.evidence());
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// What Slurm and Forebay still count of a job that is over.
    fn in_the_books(&self, job: u32) -> String {
        let burst = Site::text_of(&self.slurm.on_first("scontrol show burst"));
        let names = [format!("JobID={job} "), format!("({job}) ")];
        let of_slurm = burst.lines().filter(|line| names.iter().any(|name| line.contains(name)));
        let stat = Site::text_of(&self.slurm.on_first(&format!("scontrol show bbstat {job}")));
        let record = format!("  {job} run ");
        let ours = stat.lines().filter(|line| line.starts_with(&record) && !line.contains(": torn down"));
        of_slurm.chain(ours).collect::<Vec<_>>().join("; ")
    }

    pub(super) fn leftovers(&self, job: Option<u32>) -> String {
        let mut left = String::new();
        let is_meant = |name: &str| job.is_none_or(|job| name.starts_with(&format!("{job}.")));
        for node in 1..=NODES {
            let pools = self.dir().join(format!("node{node}/pools"));
            for user in std::fs::read_dir(pools).into_iter().flatten().flatten() {
                for pool in std::fs::read_dir(user.path()).into_iter().flatten().flatten() {
                    if is_meant(&pool.file_name().to_string_lossy()) {
                        left += &format!("{} ", pool.path().display());
                    }
                }
                if job.is_none() {
                    left += &format!("{} ", user.path().display());
                }
            }
        }
        let own = match job {
            Some(job) => format!("/{job}."),
            None => String::new(),
        };
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            let is_daemon = ["forebayd", "forebay-mount", "forebay-mover"].iter().any(|d| line.contains(d));
            if is_daemon && line.contains(&self.dir().display().to_string()) && line.contains(&own) {
                left += &format!("process {}: {line} ", entry.file_name().to_string_lossy());
            }
        }
        for mount in self.slurm.mounts().into_iter().filter(|mount| mount.contains(&own)) {
            left += &format!("mount {mount} ");
        }
        if job.is_none() {
            left += &memory_of_users();
        }
        for turn in std::fs::read_dir(self.dir().join("registry/turns")).into_iter().flatten().flatten() {
            let name = turn.file_name().to_string_lossy().into_owned();
            if name.starts_with("rate@") {
                continue; // what was measured of a store stays
            }
            if job.is_none_or(|job| name.contains(&format!("@{job}."))) {
                left += &format!("turn {name} ");
            }
        }
        left
    }

    /// Another transfer's turn at the directory of a store: transfers of jobs wait as long as it is held.
    pub(super) fn hold(&self, store: &str) -> Held {
        let path = self.store(store).display().to_string().replace('/', "!");
        let file = self.dir().join(format!("registry/turns/{:020}@0.0@{path}@in", 1));
        // A turn that is not renewed ends after seconds: this one looks as if it were renewed until it is dropped.
        let made = std::fs::File::create(&file).unwrap();
        made.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(3600)).unwrap();
        Held(file)
    }
}

/// Files of the jobs' users in shared memory.
fn memory_of_users() -> String {
    let mut left = String::new();
    for user in [ANN, BEN] {
        let found = Command::new("find").args(["/dev/shm", "-user", user]).output().unwrap();
        left += &String::from_utf8_lossy(&found.stdout).replace('\n', " ");
    }
    left
}

/// Ends at its drop.
pub(super) struct Held(PathBuf);

impl Drop for Held {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

pub(super) fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

pub(super) fn write(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}
