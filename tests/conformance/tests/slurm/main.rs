//! A job on a real Slurm of three nodes: its first step starts a pool, other steps use it, and the job ends.
//!
//! Each node is a network, PID, mount and host-name namespace with a slurmd; the first one also runs slurmctld. Slurm
//! tracks steps with control groups, as on clusters, so it kills all processes that a step leaves running. The test
//! needs root, Debian's Slurm and version 1 of control groups: with version 2, Slurm needs systemd to create a group.

#[path = "../cluster/bed.rs"]
#[allow(dead_code)] // links are not cut here
mod bed;

use std::fmt::Write as _;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use bed::Bed;

const NODES: usize = 3;
/// Timeout for a job, in seconds: a job that takes longer hangs.
const PATIENCE_S: &str = "100";
/// Longer than a daemon takes to start on a busy machine.
const START: Duration = Duration::from_secs(60);
const FREEZER: &str = "/sys/fs/cgroup/freezer";

/// The reason why this test cannot run here, if there is one.
fn lacking() -> Option<String> {
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
struct Slurm {
    dir: PathBuf,
    daemons: Vec<Child>,
    bed: Bed,
}

fn node_name(node: usize) -> String {
    format!("fbs{}n{node}", std::process::id())
}

impl Slurm {
    fn up() -> Slurm {
        let dir = std::env::temp_dir().join(format!("fbs-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::DirBuilder::new().mode(0o755).create(&dir).unwrap();
        let mut slurm = Slurm { bed: Bed::new(NODES), daemons: Vec::new(), dir };
        slurm.write_files();
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

    fn write_files(&self) {
        let dir = self.dir.display();
        let key: Vec<u8> = (0..128u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let write = |name: &str, bytes: &[u8]| std::fs::write(self.dir.join(name), bytes).unwrap();
        write("key", &key);
        std::fs::set_permissions(self.dir.join("key"), std::fs::Permissions::from_mode(0o600)).unwrap();
        let mut hosts = "127.0.0.1 localhost\n".to_owned();
        let mut conf = format!(
            "ClusterName=forebay\nSlurmctldHost={first}\nSlurmUser=root\nSlurmdUser=root\nAuthType=auth/munge\n\
             AuthInfo=socket={dir}/munge\nStateSaveLocation={dir}/state\nSlurmdSpoolDir={dir}/spool.%n\n\
             SlurmctldPidFile={dir}/slurmctld.pid\nSlurmdPidFile={dir}/slurmd.%n.pid\n\
             SlurmctldLogFile={dir}/slurmctld.log\nSlurmdLogFile={dir}/slurmd.%n.log\nProctrackType=proctrack/cgroup\n\
             TaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\nMpiDefault=none\nReturnToService=2\n\
             SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nKillWait=5\n\
             PartitionName=all Nodes=ALL Default=YES State=UP\n",
            first = node_name(1)
        );
        for node in 1..=NODES {
            let (name, address) = (node_name(node), self.bed.address(node));
            writeln!(hosts, "{address} {name}").unwrap();
            writeln!(conf, "NodeName={name} NodeAddr={address} CPUs=4 State=UNKNOWN").unwrap();
            std::fs::create_dir(self.dir.join(format!("spool.{name}"))).unwrap();
            std::fs::create_dir(self.dir.join(format!("node{node}"))).unwrap();
        }
        conf.push_str("SlurmdParameters=config_overrides\n"); // so many processors whatever this machine has
        std::fs::create_dir(self.dir.join("state")).unwrap();
        std::fs::create_dir(self.dir.join("here")).unwrap();
        write("hosts", hosts.as_bytes());
        write("slurm.conf", conf.as_bytes());
        write("cgroup.conf", b"CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n");
    }

    /// A command line on a node, with the node's host name and mounts. `alone`: in a PID namespace of its own.
    fn line(&self, node: usize, alone: bool, line: &str) -> Command {
        let mut command = self.bed.command(node, Path::new("/usr/bin/unshare"));
        command.args(["--uts", "--mount"]);
        if alone {
            command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
        }
        let dir = self.dir.display();
        let script = format!(
            "mount --bind {dir}/hosts /etc/hosts && mount --bind {dir}/node{node} {dir}/here && hostname {} && exec {line}",
            node_name(node)
        );
        command.args(["sh", "-c", &script]).env("SLURM_CONF", self.dir.join("slurm.conf"));
        command.env("FOREBAY_POOL", self.dir.join("here/pool")).env("HERE", self.dir.join("here"));
        command.env("PATH", self.path()).stdin(Stdio::null()).current_dir("/");
        command
    }

    /// The search path, with the programs of `cargo build` and Slurm's.
    fn path(&self) -> String {
        let me = std::env::current_exe().unwrap();
        let built = me.parent().and_then(Path::parent).unwrap();
        assert!(built.join("forebay").is_file(), "cargo build --workspace has not been run");
        format!("{}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", built.display())
    }

    /// Starts a daemon on a node, or on this host.
    fn start(&mut self, line: &str, on: Option<usize>) {
        let mut command = match on {
            Some(node) => self.line(node, true, line),
            None => {
                let mut command = Command::new("sh");
                command.args(["-c", &format!("exec {line}")]).env("PATH", self.path());
                command
            }
        };
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.daemons.push(command.spawn().unwrap());
    }

    fn wait(&self, what: &str, mut come: impl FnMut() -> bool) {
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
    fn on_first(&self, line: &str) -> Output {
        self.line(1, false, &format!("timeout {PATIENCE_S} {line}")).output().unwrap()
    }

    /// Runs a batch script on all nodes. Returns its output, and whether it succeeded.
    fn batch(&self, script: &str) -> (String, bool) {
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

impl Drop for Slurm {
    fn drop(&mut self) {
        // When the first process of a node's PID namespace ends, the kernel kills all others in it.
        for daemon in self.daemons.iter_mut().rev() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        for node in 1..=NODES {
            let group = Path::new(FREEZER).join(format!("slurm_{}", node_name(node)));
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

#[test]
fn pool_of_a_job_lives_as_long_as_the_step_that_started_it_and_other_steps_use_it() {
    if let Some(why) = lacking() {
        return println!("skipped: no Slurm of three nodes here: {why}");
    }
    let slurm = Slurm::up();
    // A short form of the script in the README.
    let (text, well) = slurm.batch(
        r#"set -e
srun --overlap --ntasks-per-node=1 forebay up --job --capacity 96MiB --mount $HERE/mnt &
forebay status --wait 60 >/dev/null
srun --overlap --ntasks-per-node=2 forebay run --quiet -- sh -c 'mkdir /forebay/$SLURM_PROCID; echo by $SLURM_PROCID > /forebay/$SLURM_PROCID/f'
echo $(cat $HERE/mnt/?/f)
srun --overlap --ntasks-per-node=1 sh -c 'cat $HERE/mnt/?/f | md5sum' | sort -u | wc -l
srun --overlap --ntasks-per-node=1 forebay down
wait
echo all ended
"#,
    );
    assert!(well, "{text}");
    assert!(text.contains("by 0 by 1 by 2 by 3 by 4 by 5\n1\n"), "{text}");
    assert!(text.contains("is down; ") && text.ends_with("all ended\n"), "{text}");
    assert_eq!(text.matches("so this one stays until `forebay down`").count(), NODES, "{text}");
    assert_eq!(leftovers(&slurm), "", "nothing is left of the pool");

    mpi_programs_in_a_job(&slurm);

    // With `--background` the step ends and Slurm kills the pool with it. That is why `up --job` stays without it.
    let (text, well) = slurm.batch(
        r#"srun --ntasks-per-node=1 forebay up --job --background --capacity 96MiB
forebay status && echo it is up
srun --ntasks-per-node=1 forebay down
true
"#,
    );
    assert!(well && !text.contains("it is up") && text.contains("is not up"), "{text}");

    // A cancelled job: its pool is stopped and its memory is freed.
    let (text, _) = slurm.batch(
        r#"srun --overlap --ntasks-per-node=1 forebay up --job --capacity 96MiB &
forebay status --wait 60 >/dev/null && echo it is up
scancel $SLURM_JOB_ID
wait
"#,
    );
    assert!(text.contains("it is up"), "{text}");
    slurm.wait("an end of the pool of a job that was cancelled", || leftovers(&slurm).is_empty());
}

/// Ranks on all three nodes. Each MPI's own launcher starts them, with helpers that Slurm starts. They write and read
/// one striped file and one file each, through their own node's pool.
fn mpi_programs_in_a_job(slurm: &Slurm) {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster/ranks.c");
    for (compiler, launcher) in [
        ("mpicc.openmpi", "mpirun.openmpi --allow-run-as-root --mca btl tcp,self --map-by node -n 6"),
        // UCX treats namespaces of one kernel as one host and would use shared memory.
        ("mpicc.mpich", "env UCX_TLS=tcp,self CHECK_WITHOUT_END=1 mpiexec.hydra -n 6 -ppn 2"),
    ] {
        let program = slurm.dir.join(format!("ranks.{compiler}"));
        let compiled = Command::new(compiler).args(["-O1", "-o"]).arg(&program).arg(source).output();
        if !compiled.as_ref().is_ok_and(|output| output.status.success()) {
            println!("skipped: ranks in a job, as nothing can be compiled with {compiler}: {compiled:?}");
            continue;
        }
        let (text, well) = slurm.batch(&format!(
            r#"set -e
srun --overlap --ntasks-per-node=1 forebay up --job --capacity 96MiB --mount $HERE/mnt &
forebay status --wait 60 >/dev/null
mkdir $HERE/mnt/d
forebay run --quiet -- timeout 60 {launcher} {} /forebay/d
srun --overlap --ntasks-per-node=1 sh -c 'cat $HERE/mnt/d/* | md5sum' | sort -u | wc -l
srun --overlap --ntasks-per-node=1 forebay fsck >/dev/null
srun --overlap --ntasks-per-node=1 forebay down
wait
"#,
            program.display()
        ));
        assert!(well && text.contains("all 6 ranks"), "{compiler}: {text}");
        assert!(text.contains("\n1\n"), "all nodes see the same: {text}");
    }
}

/// What remains of pools on all nodes.
fn leftovers(slurm: &Slurm) -> String {
    let list = |node: usize| {
        let pools = slurm.dir.join(format!("node{node}/pool"));
        let names = std::fs::read_dir(pools).into_iter().flatten().flatten();
        names.map(|e| format!("{node}: {} ", e.file_name().to_string_lossy())).collect::<String>()
    };
    (1..=NODES).map(list).collect()
}
