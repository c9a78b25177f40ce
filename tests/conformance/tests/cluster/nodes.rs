//! The daemons of a test's cluster, one on each node, and programs on them.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::bed::Bed;

/// Timeout for each program of a test, in seconds: a program that takes longer hangs.
pub(crate) const PATIENCE_S: &str = "300";

/// A cluster whose nodes are numbered from 1. Node N has its pool directory in `nN`.
pub(crate) struct Cluster {
    pub(crate) bed: Bed,
    dir: PathBuf,
    count: usize,
}

/// The path of a program that `cargo build` made.
pub(crate) fn program(name: &str) -> PathBuf {
    let me = std::env::current_exe().unwrap();
    let path = me.parent().and_then(Path::parent).unwrap().join(name);
    assert!(path.is_file(), "{} is not there: cargo build --workspace", path.display());
    path
}

/// Bytes in which each aligned group of four differs from those at other positions and of nearby seeds.
pub(crate) fn bytes(count: usize, seed: u32) -> Vec<u8> {
    (0..count as u32 / 4 + 1)
        .flat_map(|i| i.wrapping_mul(2_654_435_761).wrapping_add(seed).to_le_bytes())
        .take(count)
        .collect()
}

/// A program's output and error output.
pub(crate) fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn signal(pid: u64, signal: i32) {
    // SAFETY: plain system call; the number is of a process that this test started and has not buried.
    unsafe { libc::kill(pid as i32, signal) };
}

impl Cluster {
    /// Writes the pool file of `count` nodes; none of them runs yet.
    pub(crate) fn prepare(name: &str, count: usize) -> Cluster {
        Cluster::prepare_with(name, count, |c, node| {
            format!("target = [{{ path = \"{}\", capacity = \"96MiB\" }}]", c.pool(node).display())
        })
    }

    /// Like [`Cluster::prepare`]; `rest` returns more lines for each node's entry.
    pub(crate) fn prepare_with(
        name: &str,
        count: usize,
        rest: impl Fn(&Cluster, usize) -> String,
    ) -> Cluster {
        let dir = std::env::temp_dir().join(format!("fbc-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        let cluster = Cluster { bed: Bed::new(count), dir, count };
        let nodes: String = (1..=count)
            .map(|i| {
                let (address, rest) = (cluster.bed.address(i), rest(&cluster, i));
                format!("[[node]]\nname = \"n{i}\"\nhost = \"{address}\"\n{rest}\n")
            })
            .collect();
        std::fs::write(cluster.file(), nodes).unwrap();
        cluster
    }

    /// A cluster that is up.
    pub(crate) fn up(name: &str, count: usize) -> Cluster {
        let cluster = Cluster::prepare(name, count);
        cluster.start_all();
        cluster
    }

    /// Starts every node.
    pub(crate) fn start_all(&self) {
        for node in 1..=self.count {
            let output = self.start(node);
            assert!(output.status.success(), "{}", said(&output));
        }
    }

    /// The pool file.
    pub(crate) fn file(&self) -> PathBuf {
        self.dir.join("pool.toml")
    }

    /// A node's pool directory.
    pub(crate) fn pool(&self, node: usize) -> PathBuf {
        self.dir.join(format!("n{node}"))
    }

    /// Starts a node.
    pub(crate) fn start(&self, node: usize) -> Output {
        let (file, name) = (self.file(), format!("n{node}"));
        self.forebay(node, &["up", "--pool", file.to_str().unwrap(), "--node", &name])
    }

    /// Starts a node whose monotonic clock is `ahead_s` seconds ahead of the others'. None where that is not possible.
    pub(crate) fn start_ahead(&self, node: usize, ahead_s: u64) -> Option<Output> {
        let mut command = self.bed.command_with_clock(node, ahead_s, &program("forebay"))?;
        command.args(["up", "--pool"]).arg(self.file()).args(["--node", &format!("n{node}")]);
        Some(command.env_remove("FOREBAY_POOL").output().unwrap())
    }

    /// Runs the `forebay` command on a node.
    pub(crate) fn forebay(&self, node: usize, words: &[&str]) -> Output {
        let mut command = self.bed.command(node, Path::new("/usr/bin/timeout"));
        command.arg(PATIENCE_S).arg(program("forebay")).args(words);
        command.env_remove("FOREBAY_POOL").output().unwrap()
    }

    /// Runs the `forebay` command with a script in place of ssh that reaches the bed's nodes.
    pub(crate) fn by_remote_shell(&self, words: &[String]) -> Output {
        use std::os::unix::fs::PermissionsExt;
        let script = self.dir.join("rsh");
        let mut text = "#!/bin/sh\nhost=$1; shift\ncase $host in\n".to_owned();
        for node in 1..=self.count {
            let shell = self.bed.command(node, Path::new("/bin/sh"));
            let parts: Vec<_> = std::iter::once(shell.get_program()).chain(shell.get_args()).collect();
            let line: Vec<_> = parts.iter().map(|part| part.to_string_lossy()).collect();
            text += &format!("{}) exec {} -c \"$*\";;\n", self.bed.address(node), line.join(" "));
        }
        std::fs::write(&script, text + "esac\necho no such host: $host >&2; exit 1\n").unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o700)).unwrap();
        let mut command = Command::new("/usr/bin/timeout");
        command.arg(PATIENCE_S).arg(program("forebay")).args(words);
        command.env_remove("FOREBAY_POOL").env("FOREBAY_RSH", script).output().unwrap()
    }

    /// The environment of a launcher. Those of Open MPI that start and end at the same time remove each other's directory
    /// where they share it.
    pub(crate) fn apart(&self) -> [(&'static str, PathBuf); 1] {
        [("OMPI_MCA_orte_tmpdir_base", self.dir.join("sessions"))]
    }

    /// Runs `forebay layout` on a node.
    pub(crate) fn layout(&self, node: usize, words: &[&str]) -> Output {
        let pool = self.pool(node);
        self.forebay(node, &[&["--pool", pool.to_str().unwrap(), "layout"], words].concat())
    }

    /// The names of the nodes on which a file's data are.
    pub(crate) fn lies_on(&self, path: &str) -> String {
        said(&self.layout(1, &["get", path])).rsplit_once("on ").unwrap().1.trim().to_owned()
    }

    /// A shell on a node that sees the pool at /forebay.
    pub(crate) fn shell(&self, node: usize, script: &str) -> Output {
        let pool = self.pool(node);
        self.forebay(node, &["run", "--quiet", "--pool", pool.to_str().unwrap(), "--", "bash", "-c", script])
    }

    /// Runs a shell on a node and returns its output. Panics if it fails.
    pub(crate) fn tell(&self, node: usize, script: &str) -> String {
        let output = self.shell(node, script);
        assert!(output.status.success(), "on node {node}: {script}\n{}", said(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Starts a shell on a node and does not wait for it.
    pub(crate) fn spawn(&self, node: usize, script: &str) -> std::process::Child {
        self.command(node, script).spawn().unwrap()
    }

    /// A shell on a node that sees the pool at /forebay.
    pub(crate) fn command(&self, node: usize, script: &str) -> Command {
        let mut command = self.bed.command(node, Path::new("/usr/bin/timeout"));
        command.arg(PATIENCE_S).arg(program("forebay"));
        command.args(["run", "--quiet", "--pool"]).arg(self.pool(node)).args(["--", "bash", "-c", script]);
        command.env_remove("FOREBAY_POOL");
        command
    }

    /// Mounts the pool on a node. None, after printing the reason, if this user may not mount.
    pub(crate) fn mount(&self, node: usize) -> Option<PathBuf> {
        let at = self.dir.join(format!("mount{node}"));
        std::fs::create_dir_all(&at).unwrap();
        let pool = self.pool(node);
        let words = ["mount", "--pool", pool.to_str().unwrap(), at.to_str().unwrap()];
        let output = self.forebay(node, &words);
        if output.status.success() {
            return Some(at);
        }
        println!("skipped what needs a mount: {}", said(&output));
        None
    }

    /// Kills a program of [`Cluster::spawn`] with its children.
    pub(crate) fn kill_program(&self, child: &mut std::process::Child) {
        // SAFETY: plain system call; `timeout` leads a process group of its own, and was not waited for yet.
        unsafe { libc::kill(-(child.id() as i32), libc::SIGKILL) };
        let _ = child.wait();
    }

    /// The output of `forebay status --json` on a node.
    pub(crate) fn status(&self, node: usize) -> Value {
        let pool = self.pool(node);
        let output = self.forebay(node, &["status", "--json", "--pool", pool.to_str().unwrap()]);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", said(&output)))
    }

    fn pid(&self, node: usize, which: &str) -> u64 {
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(pid) = self.status(node)["pids"][which].as_u64() {
                return pid;
            }
            assert!(Instant::now() < end, "node {node} has no {which}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills a node's supervisor and worker, as if its host had lost power, except that its memory survives.
    pub(crate) fn kill(&self, node: usize) {
        let (supervisor, worker) = (self.pid(node, "supervisor"), self.pid(node, "worker"));
        signal(supervisor, libc::SIGKILL);
        signal(worker, libc::SIGKILL);
    }

    /// Kills a node's worker. Its supervisor starts another one.
    pub(crate) fn kill_worker(&self, node: usize) {
        signal(self.pid(node, "worker"), libc::SIGKILL);
    }

    /// Stops a node's worker with SIGSTOP. The returned function continues it.
    pub(crate) fn stop_worker(&self, node: usize) -> impl FnOnce() {
        let worker = self.pid(node, "worker");
        signal(worker, libc::SIGSTOP);
        move || signal(worker, libc::SIGCONT)
    }

    /// Checks every node's shard and targets with `forebay fsck`.
    pub(crate) fn check(&self) {
        for node in 1..=self.count {
            let pool = self.pool(node);
            let output = self.forebay(node, &["fsck", "--pool", pool.to_str().unwrap()]);
            assert!(output.status.success(), "node {node}: {}", said(&output));
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for node in 1..=self.count {
            let pool = self.pool(node);
            if std::thread::panicking() {
                let log = std::fs::read_to_string(pool.join("log")).unwrap_or_default();
                let lines: Vec<&str> = log.lines().rev().take(30).collect();
                println!("--- log of node {node}");
                lines.iter().rev().for_each(|line| println!("{line}"));
            }
            if pool.exists() {
                let _ = self.forebay(node, &["down", "--force", "--pool", pool.to_str().unwrap()]);
            }
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Repeats `look` until it returns a value. Panics after 60 s.
pub(crate) fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "{what} does not happen");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Runs a command outside the cluster.
pub(crate) fn plain(program: &str, words: &[&str]) -> Output {
    Command::new("/usr/bin/timeout").arg(PATIENCE_S).arg(program).args(words).output().unwrap()
}
