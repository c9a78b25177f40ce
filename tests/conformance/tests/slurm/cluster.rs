//! A Slurm of three nodes. Each node is a network, PID, mount and host-name namespace with a slurmd; the first one also
//! runs slurmctld.

use std::fmt::Write as _;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use super::bed::Bed;

pub(super) const NODES: usize = 3;
/// Timeout for a job, in seconds: a job that takes longer hangs.
const PATIENCE_S: &str = "100";
/// Longer than a daemon takes to start on a busy machine.
const START: Duration = Duration::from_secs(60);
const FREEZER: &str = "/sys/fs/cgroup/freezer";

/// The reason why this test cannot run here, if there is one.
pub(super) fn lacking() -> Option<String> {
    // SAFETY: a plain system call.
    if unsafe { libc::geteuid() } != 0 {
        return Some("this user is not root".to_owned());
    }
    for program in ["/usr/sbin/slurmctld", "/usr/sbin/slurmd", "/usr/bin/sbatch", "/usr/sbin/munged"] {
        if !Path::new(program).exists() {
            return Some(format!("there is no {program}"));
        }
    }
    (!Path::new(FREEZER).is_dir()).then(|| format!("there is no {FREEZER}"))
}

/// A running Slurm, and a directory that all its nodes share, except its subdirectory `here`: each node has its own
/// there.
pub(super) struct Slurm {
    pub(super) dir: PathBuf,
    /// Distinguishes this test's nodes from those of other tests.
    tag: &'static str,
    daemons: Vec<(String, Option<usize>, Child)>,
    bed: Bed,
}

impl Slurm {
    pub(super) fn up() -> Slurm {
        Slurm::with("", |_, conf| conf.push_str("SlurmUser=root\n"))
    }

    pub(super) fn node_name(&self, node: usize) -> String {
        format!("fbs{}{}n{node}", std::process::id(), self.tag)
    }

    /// A Slurm to whose settings `more` adds. It runs before the daemons start.
    pub(super) fn with(tag: &'static str, more: impl FnOnce(&Slurm, &mut String)) -> Slurm {
        let dir = std::env::temp_dir().join(format!("fbs-{}{tag}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::DirBuilder::new().mode(0o755).create(&dir).unwrap();
        let mut slurm = Slurm { bed: Bed::new(NODES), daemons: Vec::new(), dir, tag };
        slurm.write_files(more);
        let munged = format!(
            "munged --foreground --force --num-threads=2 --key-file={0}/key --socket={0}/munge --pid-file={0}/munged.pid \
             --log-file={0}/munged.log --seed-file={0}/seed",
            slurm.dir.display()
        );
        slurm.start(&munged, None);
        slurm.wait("munged", || slurm.dir.join("munge").exists());
        slurm.start("slurmctld -D", Some(1));
        for node in 1..=NODES {
            slurm.start("slurmd -D", Some(node));
        }
        slurm.wait("three idle nodes", || {
            let output = slurm.on_first("sinfo --noheader --format=%T:%D");
            String::from_utf8_lossy(&output.stdout).trim() == "idle:3"
        });
        slurm
    }

    fn write_files(&self, more: impl FnOnce(&Slurm, &mut String)) {
        let dir = self.dir.display();
        let key: Vec<u8> = (0..128u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let write = |name: &str, bytes: &[u8]| std::fs::write(self.dir.join(name), bytes).unwrap();
        write("key", &key);
        std::fs::set_permissions(self.dir.join("key"), std::fs::Permissions::from_mode(0o600)).unwrap();
        let mut hosts = "127.0.0.1 localhost\n".to_owned();
        let mut conf = format!(
            "ClusterName=forebay\nSlurmctldHost={first}\nSlurmdUser=root\nAuthType=auth/munge\n\
             AuthInfo=socket={dir}/munge\nStateSaveLocation={dir}/state\nSlurmdSpoolDir={dir}/spool.%n\n\
             SlurmctldPidFile={dir}/slurmctld.pid\nSlurmdPidFile={dir}/slurmd.%n.pid\n\
             SlurmctldLogFile={dir}/slurmctld.log\nSlurmdLogFile={dir}/slurmd.%n.log\nProctrackType=proctrack/cgroup\n\
             TaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\nMpiDefault=none\nReturnToService=2\n\
             SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nKillWait=5\n\
             MessageTimeout=60\n\
             PartitionName=all Nodes=ALL Default=YES State=UP\n",
            first = self.node_name(1)
        );
        for node in 1..=NODES {
            let (name, address) = (self.node_name(node), self.bed.address(node));
            writeln!(hosts, "{address} {name}").unwrap();
            writeln!(conf, "NodeName={name} NodeAddr={address} CPUs=4 State=UNKNOWN").unwrap();
            std::fs::create_dir(self.dir.join(format!("spool.{name}"))).unwrap();
            std::fs::create_dir(self.dir.join(format!("node{node}"))).unwrap();
        }
        conf.push_str("SlurmdParameters=config_overrides\n"); // so many processors whatever this machine has
        std::fs::create_dir(self.dir.join("state")).unwrap();
        std::fs::create_dir(self.dir.join("here")).unwrap();
        std::fs::create_dir(self.dir.join("bin")).unwrap();
        // Users of the nodes may mount, whether or not those of this host may.
        if Path::new("/dev/fuse").exists() {
            let mut made = Command::new("mknod");
            made.arg("--mode=666").arg(self.dir.join("fuse")).args(["c", "10", "229"]);
            assert!(made.status().unwrap().success());
        }
        more(self, &mut conf);
        write("hosts", hosts.as_bytes());
        write("slurm.conf", conf.as_bytes());
        write("cgroup.conf", b"CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n");
    }

    /// A command line on a node, with the node's host name and mounts. `alone`: in a PID namespace of its own.
    pub(super) fn line(&self, node: usize, alone: bool, line: &str) -> Command {
        let mut command = self.bed.command(node, Path::new("/usr/bin/unshare"));
        command.args(["--uts", "--mount"]);
        if alone {
            command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
        }
        let dir = self.dir.display();
        let script = format!(
            "mount --bind {dir}/hosts /etc/hosts && mount --bind {dir}/node{node} {dir}/here && \
             {{ [ ! -e {dir}/fuse ] || mount --bind {dir}/fuse /dev/fuse; }} && \
             mount --bind {} {dir}/bin && hostname {} && exec {line}",
            self.built().display(),
            self.node_name(node)
        );
        command.args(["sh", "-c", &script]).env("SLURM_CONF", self.dir.join("slurm.conf"));
        command.env("FOREBAY_POOL", self.dir.join("here/pool")).env("HERE", self.dir.join("here"));
        command.env("FOREBAY_SLURM_CONF", self.dir.join("forebay.toml"));
        command.env("PATH", self.path()).stdin(Stdio::null()).current_dir("/");
        command
    }

    /// The directory with the programs of `cargo build`. All users see it on the nodes as `bin`.
    fn built(&self) -> PathBuf {
        let me = std::env::current_exe().unwrap();
        // The benchmark is beside them, tests are one directory below.
        let built = me.ancestors().skip(1).take(2).find(|dir| dir.join("forebay").is_file());
        let built = built.expect("cargo build --workspace has not been run");
        built.to_owned()
    }

    /// The search path: the programs of this build, then the system's.
    fn path(&self) -> String {
        format!("{}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", self.dir.display())
    }

    /// Starts a daemon on a node, or on this host.
    pub(super) fn start(&mut self, line: &str, on: Option<usize>) {
        let mut command = match on {
            Some(node) => self.line(node, true, line),
            None => {
                let mut command = Command::new("sh");
                command.args(["-c", &format!("exec {line}")]).env("PATH", self.path());
                command
            }
        };
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.daemons.push((line.to_owned(), on, command.spawn().unwrap()));
    }

    /// Kills a daemon and, if it has a PID namespace of its own, everything in that.
    pub(super) fn kill(&mut self, line: &str, on: Option<usize>) {
        let at = self.daemons.iter().position(|(l, n, _)| l == line && *n == on).expect("it runs");
        let (_, _, daemon) = self.daemons.remove(at);
        end(daemon);
    }

    /// The mounts of Forebay that the nodes' slurmds see, a line each.
    pub(super) fn mounts(&self) -> Vec<String> {
        let slurmds = self.daemons.iter().filter(|(line, _, _)| line.starts_with("slurmd"));
        let of = |daemon: &Child| {
            let id = daemon.id();
            let children =
                std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
            let mounts = |child| std::fs::read_to_string(format!("/proc/{child}/mounts")).unwrap_or_default();
            children.split_whitespace().map(mounts).collect::<String>()
        };
        let dir = self.dir.display().to_string();
        let all: String = slurmds.map(|(_, _, daemon)| of(daemon)).collect();
        let ours = |line: &&str| line.contains(" fuse") && line.contains(&dir);
        all.lines().filter(ours).map(str::to_owned).collect()
    }

    pub(super) fn wait(&self, what: &str, mut come: impl FnMut() -> bool) {
        let end = Instant::now() + START;
        while !come() {
            if Instant::now() > end {
                let mut logs = String::new();
                for entry in std::fs::read_dir(&self.dir).unwrap().flatten() {
                    if entry.path().extension().is_some_and(|e| e == "log") {
                        let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
                        logs += &format!("{}:\n{text}\n", entry.path().display());
                    }
                }
                panic!("{what}: has not come\n{logs}");
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Runs a command line on the first node.
    pub(super) fn on_first(&self, line: &str) -> Output {
        self.line(1, false, &format!("timeout {PATIENCE_S} {line}")).output().unwrap()
    }

    /// Runs a batch script on all nodes. Returns its output, and whether it succeeded.
    pub(super) fn batch(&self, script: &str) -> (String, bool) {
        let (path, out) = (self.dir.join("job.sh"), self.dir.join("job.out"));
        std::fs::write(&path, format!("#!/bin/bash\n{script}")).unwrap();
        let _ = std::fs::remove_file(&out);
        let line = format!(
            "sbatch --wait --nodes={NODES} --exclusive --export=ALL,HOME={0} --output={1} {2}",
            self.dir.display(),
            out.display(),
            path.display()
        );
        let output = self.on_first(&line);
        let text = std::fs::read_to_string(&out).unwrap_or_default();
        (format!("{}{text}", String::from_utf8_lossy(&output.stderr)), output.status.success())
    }
}

/// Kills a daemon with its children, first of them the first process of its PID namespace. Their parent's death alone does
/// not end those that have become another user: the kernel then forgets which signal they wanted for it.
fn end(mut daemon: Child) {
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", daemon.id()));
    for child in children.unwrap_or_default().split_whitespace() {
        let _ = Command::new("kill").args(["-KILL", child]).status();
    }
    let _ = daemon.kill();
    let _ = daemon.wait();
}

impl Drop for Slurm {
    fn drop(&mut self) {
        // When the first process of a node's PID namespace ends, the kernel kills all others in it.
        self.daemons.drain(..).rev().for_each(|(_, _, daemon)| end(daemon));
        for node in 1..=NODES {
            let group = Path::new(FREEZER).join(format!("slurm_{}", self.node_name(node)));
            let end = Instant::now() + Duration::from_secs(10);
            while group.is_dir() && Instant::now() < end {
                let _ = Command::new("find")
                    .arg(&group)
                    .args(["-depth", "-type", "d", "-exec", "rmdir", "{}", ";"])
                    .output();
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        if std::thread::panicking() {
            println!("the logs are in {}", self.dir.display());
        } else {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }
}
