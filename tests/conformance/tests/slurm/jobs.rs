//! Jobs with burst buffers: Slurm's burst_buffer/lua, prolog and epilog on a real Slurm.
//!
//! All cases share one Slurm, in which jobs are of two users that are not root, and SlurmUser is not root either where
//! Debian's user exists. After each case the nodes are looked at for leftovers.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use super::cluster::{lacking, Slurm, NODES};

/// Users that each Debian has, of no rights.
const ANN: &str = "games";
const BEN: &str = "www-data";

/// Longer than any job here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

struct Site {
    slurm: Slurm,
}

fn has_user(name: &str) -> bool {
    Command::new("id").arg(name).output().is_ok_and(|o| o.status.success())
}

fn open_to_all(dir: &Path) {
    std::fs::create_dir_all(dir).unwrap();
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o1777)).unwrap();
}

impl Site {
    fn up() -> Site {
        let slurm = Slurm::with("b", |slurm, conf| {
            let dir = &slurm.dir;
            let user = if has_user("slurm") { "slurm" } else { "root" };
            for name in ["ctld", "registry"] {
                std::fs::create_dir(dir.join(name)).unwrap();
            }
            for name in ["work", "store", "kept"] {
                open_to_all(&dir.join(name));
            }
            let given = Command::new("chown").arg(user).args(["ctld", "registry", "state"].map(|n| dir.join(n))).output();
            assert!(given.unwrap().status.success());
            let nodes: Vec<String> = (1..=NODES).map(|n| slurm.node_name(n)).collect();
            let shown = dir.display();
            *conf = conf
                .replace(&format!("{shown}/slurmctld."), &format!("{shown}/ctld/slurmctld."))
                .replace("KillWait=5", "KillWait=2");
            conf.push_str(&format!(
                "SlurmUser={user}\nBurstBufferType=burst_buffer/lua\nPrologFlags=Alloc\nProlog={shown}/prolog\n\
                 Epilog={shown}/epilog\nSlurmdTimeout=10\nDebugFlags=BurstBuffer\nBatchStartTimeout=60\n\
                 SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1,requeue_setup_env_fail\n"
            ));
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../slurm");
            std::fs::copy(source.join("burst_buffer.lua"), dir.join("burst_buffer.lua")).unwrap();
            std::fs::write(dir.join("burst_buffer.conf"), "Directive=BB_LUA\nOtherTimeout=60\n").unwrap();
            for name in ["prolog", "epilog"] {
                let text = std::fs::read_to_string(source.join(name)).unwrap();
                let text = text
                    .replace("REGISTRY=/shared/forebay", &format!("REGISTRY={shown}/registry"))
                    .replace("exec forebay", &format!(
                        "export FOREBAY_SLURM_CONF={shown}/forebay.toml SLURM_CONF={shown}/slurm.conf\n\
                         exec {shown}/bin/forebay"
                    ));
                let text = text.replace("exec ", &format!("exec 2>>{shown}/{name}.$SLURMD_NODENAME.log\nexec "));
                std::fs::write(dir.join(name), text).unwrap();
                std::fs::set_permissions(dir.join(name), std::fs::Permissions::from_mode(0o755)).unwrap();
            }
            std::fs::write(
                dir.join("forebay.toml"),
                format!(
                    "registry = '{shown}/registry'\nnode_dir = '{shown}/here/pools'\nkeep_dir = '{shown}/kept'\n\
                     nodes = '{}'\ncapacity = '256MiB'\nstage_out_pause_s = 1\nsilence_s = 10\n\
                     [[store]]\npath = '{shown}/store'\nat_once = 1\n",
                    nodes.join(",")
                ),
            )
            .unwrap();
        });
        Site { slurm }
    }

    fn dir(&self) -> &Path {
        &self.slurm.dir
    }

    fn store(&self, name: &str) -> PathBuf {
        self.dir().join("store").join(name)
    }

    /// Runs a command line of a user on the first node.
    fn by(&self, user: &str, line: &str) -> Output {
        let dir = self.dir().display();
        self.slurm.on_first(&format!(
            "env -u FOREBAY_POOL FOREBAY_SLURM_CONF={dir}/forebay.toml setpriv --reuid {user} --regid {user} \
             --init-groups {line}"
        ))
    }

    fn text_of(output: &Output) -> String {
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
    }

    /// Submits a script; the text of sbatch.
    fn submit(&self, user: &str, name: &str, options: &str, script: &str) -> Result<u32, String> {
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

    fn output(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir().join("work").join(format!("{name}.out"))).unwrap_or_default()
    }

    /// `squeue`'s state and reason of a job.
    fn shown(&self, job: u32) -> String {
        let output = self.slurm.on_first(&format!("scontrol --oneliner show job {job}"));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let field = |name: &str| {
            let rest = text.split_once(name).map_or("", |(_, rest)| rest);
            rest.split(" Dependency=").next().unwrap_or("").split(" ExitCode=").next().unwrap_or("").to_owned()
        };
        field(" JobState=").replace(" Reason=", " ")
    }

    fn await_shown(&self, job: u32, wanted: &str) -> String {
        let end = Instant::now() + PATIENCE;
        loop {
            let shown = self.shown(job);
            if shown.contains(wanted) {
                return shown;
            }
            assert!(Instant::now() < end, "job {job} is not {wanted}: {shown}\n{}", self.evidence());
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn evidence(&self) -> String {
        let mut text = Site::text_of(&self.slurm.on_first("scontrol show bbstat"));
        for name in ["ctld/slurmctld.log", "work"] {
            let path = self.dir().join(name);
            let files: Vec<PathBuf> = match std::fs::read_dir(&path) {
                Ok(entries) => entries.flatten().map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "out")).collect(),
                Err(_) => vec![path],
            };
            for file in files {
                let log = std::fs::read_to_string(&file).unwrap_or_default();
                let tail: Vec<&str> = log.lines().rev().take(60).collect();
                text += &format!("{}:\n{}\n", file.display(), tail.into_iter().rev().collect::<Vec<_>>().join("\n"));
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

    /// Waits until the nodes have nothing of any job any more.
    fn assert_clean(&self, case: &str) {
        let end = Instant::now() + PATIENCE;
        loop {
            let left = self.leftovers();
            if left.is_empty() {
                return;
            }
            assert!(Instant::now() < end, "{case} has left: {left}\n{}", self.evidence());
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn leftovers(&self) -> String {
        let mut left = String::new();
        for node in 1..=NODES {
            let pools = self.dir().join(format!("node{node}/pools"));
            for user in std::fs::read_dir(pools).into_iter().flatten().flatten() {
                for pool in std::fs::read_dir(user.path()).into_iter().flatten().flatten() {
                    left += &format!("{} ", pool.path().display());
                }
                left += &format!("{} ", user.path().display());
            }
        }
        let own = self.dir().display().to_string();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            let is_daemon = ["forebayd", "forebay-mount", "forebay-mover"].iter().any(|d| line.contains(d));
            if is_daemon && line.contains(&own) {
                left += &format!("process {}: {line} ", entry.file_name().to_string_lossy());
            }
        }
        let turns = std::fs::read_dir(self.dir().join("registry/turns")).into_iter().flatten().count();
        if turns > 0 {
            left += &format!("{turns} turns ");
        }
        left
    }
}

fn write(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

#[test]
fn jobs_with_burst_buffers_lose_nothing_and_leave_nothing() {
    if let Some(why) = lacking() {
        return println!("skipped: no Slurm of three nodes here: {why}");
    }
    let plugin = "/usr/lib/x86_64-linux-gnu/slurm-wlm/burst_buffer_lua.so";
    if !Path::new(plugin).exists() || !has_user(ANN) || !has_user(BEN) {
        return println!("skipped: no {plugin}, or no users {ANN} and {BEN}");
    }
    let site = Site::up();
    job_that_succeeds(&site);
}

fn job_that_succeeds(site: &Site) {
    write(&site.store("case/a"), "input");
    let job = site
        .submit(
            ANN,
            "good",
            "--nodes=2",
            "#BB_LUA forebay capacity=64MiB pool=forebay stage_in=%D/store/case:/case\n\
             #STAGE OUT /out %D/store/good\n\
             set -e\nforebay run --quiet -- sh -c 'mkdir /forebay/out; cp /forebay/case/a /forebay/out/a'\n\
             srun --overlap --nodes=2 --ntasks-per-node=1 forebay run --quiet -- sh -c 'echo $SLURM_PROCID: $(cat /forebay/case/a) >/forebay/out/$SLURM_PROCID'\n\
             forebay status | head -n 3\n",
        )
        .unwrap();
    let shown = site.await_shown(job, "COMPLETED");
    assert!(!shown.contains("BurstBuffer"), "{shown}");
    site.assert_clean("a job that succeeds");
    assert_eq!(std::fs::read_to_string(site.store("good/a")).unwrap_or_default(), "input", "{}", site.evidence());
    assert_eq!(std::fs::read_to_string(site.store("good/1")).unwrap(), "1: input\n");
}
