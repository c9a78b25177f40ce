//! A pool of several nodes on this machine, each with a mount, in front of a directory. All is removed at the end, also
//! when the test fails.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// On a machine that is merely busy nothing in these tests takes this long.
const TIMEOUT: Duration = Duration::from_secs(180);

fn binaries() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_forebay-mover")).parent().unwrap().to_owned()
}

pub(crate) fn text(done: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr))
}

/// The pool and the store. Nodes are numbered from 1.
pub(crate) struct Nodes {
    dir: PathBuf,
    count: usize,
}

impl Nodes {
    /// A pool that is up and mounted on all nodes. None, after printing the reason, if this user may not mount.
    pub(crate) fn up(count: usize, capacity: &str) -> Option<Nodes> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let (number, pid) = (NUMBER.fetch_add(1, Ordering::Relaxed), std::process::id());
        let dir = PathBuf::from(format!("/tmp/fbn-{pid}-{number}"));
        std::fs::create_dir(&dir).unwrap();
        std::fs::create_dir(dir.join("store")).unwrap();
        let nodes = Nodes { dir, count };
        let entries: String = (1..=count)
            .map(|i| {
                let host =
                    format!("127.{}.{}.{}", 100 + pid % 100, pid / 100 % 250, number as usize * 10 + i);
                let pool = nodes.pool(i).display().to_string();
                format!(
                    "[[node]]\nname = \"n{i}\"\nhost = \"{host}\"\n\
                     target = [{{ path = \"{pool}\", capacity = \"{capacity}\" }}]\n"
                )
            })
            .collect();
        std::fs::write(nodes.file(), entries).unwrap();
        for i in 1..=count {
            nodes.start(i);
        }
        for i in 1..=count {
            if !nodes.mount(i) {
                return None;
            }
        }
        Some(nodes)
    }

    fn file(&self) -> PathBuf {
        self.dir.join("pool.toml")
    }

    pub(crate) fn start(&self, node: usize) {
        let name = format!("n{node}");
        let mut command =
            self.plain_command(&["up", "--pool", self.file().to_str().unwrap(), "--node", &name]);
        let levels = std::env::var("FOREBAY_LOG");
        let levels = levels.unwrap_or_else(|_| "info,forebay_mover::engine::parts=debug".to_owned());
        let done = command.env("FOREBAY_LOG", levels).output().unwrap();
        assert!(done.status.success(), "{}", text(&done));
    }

    pub(crate) fn mount(&self, node: usize) -> bool {
        std::fs::create_dir_all(self.at(node)).unwrap();
        let done = self.forebay(node, &["mount", self.at(node).to_str().unwrap()]);
        if !done.status.success() {
            println!("skipped, as it needs a mount: {}", text(&done));
        }
        done.status.success()
    }

    /// A node's pool directory.
    pub(crate) fn pool(&self, node: usize) -> PathBuf {
        self.dir.join(format!("p{node}"))
    }

    /// Where a node has the pool mounted.
    pub(crate) fn at(&self, node: usize) -> PathBuf {
        self.dir.join(format!("m{node}"))
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.dir.join("store")
    }

    fn plain_command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("timeout");
        command.arg("120").arg(binaries().join("forebay")).args(words).env_remove("FOREBAY_POOL");
        command
    }

    fn plain(&self, words: &[&str]) -> Output {
        self.plain_command(words).output().unwrap()
    }

    /// The `forebay` command on a node.
    pub(crate) fn forebay(&self, node: usize, words: &[&str]) -> Output {
        let pool = self.pool(node).display().to_string();
        self.plain(&[&["--pool", &pool], words].concat())
    }

    /// The same; it has to succeed. Returns what it printed.
    pub(crate) fn ok(&self, node: usize, words: &[&str]) -> String {
        let done = self.forebay(node, words);
        assert!(done.status.success(), "node {node}: {words:?}\n{}\n{}", text(&done), self.logs());
        String::from_utf8_lossy(&done.stdout).into_owned()
    }

    /// Attaches the store at `/s`, by a command on a node, which then has the tree.
    pub(crate) fn attach(&self, node: usize, options: &str, more: &[&str]) {
        let url = format!("file://{}{options}", self.store().display());
        self.ok(node, &[&["attach", &url, "/s"], more].concat());
    }

    /// A shell script in a node's mount; the store's directory is `$S`. With `preload`, programs get the pool by the
    /// preload library, at /forebay.
    pub(crate) fn command(&self, node: usize, script: &str, preload: bool) -> Command {
        let mut command = Command::new("timeout");
        command.arg("120");
        if preload {
            let pool = self.pool(node).display().to_string();
            command.arg(binaries().join("forebay")).args(["--pool", &pool, "run", "--quiet", "--"]);
        }
        command.args(["bash", "-c", &format!("set -e; {script}")]);
        let at = if preload { Path::new("/").to_owned() } else { self.at(node) };
        command.current_dir(at).env("S", self.store()).env_remove("FOREBAY_POOL");
        command
    }

    fn sh_of(&self, node: usize, script: &str, preload: bool) -> String {
        let done = self.command(node, script, preload).output().unwrap();
        assert!(done.status.success(), "node {node}: {script}\n{}\n{}", text(&done), self.logs());
        String::from_utf8_lossy(&done.stdout).into_owned()
    }

    /// Runs a script in a node's mount. It has to succeed. Returns what it printed.
    pub(crate) fn sh(&self, node: usize, script: &str) -> String {
        self.sh_of(node, script, false)
    }

    /// The same through the preload library.
    pub(crate) fn preloaded(&self, node: usize, script: &str) -> String {
        self.sh_of(node, script, true)
    }

    /// Waits until a condition holds.
    pub(crate) fn wait(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !holds() {
            assert!(begun.elapsed() < TIMEOUT, "{what}: not after {TIMEOUT:?}\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits, on a node, until the store has everything.
    pub(crate) fn durable(&self, node: usize) {
        self.ok(node, &["wait-durable", "--recursive", "--no-progress", "--timeout", "90", "/s"]);
    }

    /// What `forebay state` says of a path, on a node.
    pub(crate) fn state(&self, node: usize, path: &str) -> serde_json::Value {
        let all: serde_json::Value =
            serde_json::from_str(&self.ok(node, &["state", "--json", path])).unwrap();
        all[0].clone()
    }

    /// A node's status; nothing while its worker is being started again.
    pub(crate) fn status(&self, node: usize) -> serde_json::Value {
        serde_json::from_slice(&self.forebay(node, &["status", "--json"]).stdout).unwrap_or_default()
    }

    /// Kills a node's process, `worker`, `supervisor` or `mover`, if it runs now.
    pub(crate) fn kill_now(&self, node: usize, which: &str) -> bool {
        let status = self.status(node);
        let pid = match which {
            "mover" => status["mover"]["pid"].as_u64(),
            which => status["pids"][which].as_u64(),
        };
        let kill = |pid: u64| Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success();
        pid.is_some_and(kill)
    }

    /// The same, when it runs.
    pub(crate) fn kill(&self, node: usize, which: &str) {
        self.wait(which, || self.kill_now(node, which));
    }

    /// Kills all processes of a node, as if its host had lost power, except that its memory survives.
    pub(crate) fn kill_node(&self, node: usize) {
        let status = self.status(node);
        let pids = [&status["pids"]["supervisor"], &status["pids"]["worker"], &status["mover"]["pid"]];
        for pid in pids.into_iter().filter_map(serde_json::Value::as_u64) {
            let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
        }
        let at = self.at(node).display().to_string();
        self.wait("the end of the mount", || {
            let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
            !mounts.lines().any(|line| line.contains(&format!(" {at} ")))
        });
    }

    /// A node's log.
    pub(crate) fn log(&self, node: usize) -> String {
        std::fs::read_to_string(self.pool(node).join("log")).unwrap_or_default()
    }

    /// The ends of the daemons' logs; whole if FOREBAY_LOG says what is in them.
    pub(crate) fn logs(&self) -> String {
        let most = if std::env::var_os("FOREBAY_LOG").is_some() { usize::MAX } else { 3000 };
        let log = |node: usize| {
            let log = self.log(node);
            format!(
                "--- node {node}\n{}\n",
                String::from_utf8_lossy(&log.as_bytes()[log.len().saturating_sub(most)..])
            )
        };
        (1..=self.count).map(log).collect()
    }

    /// What differs between a node's view of the tree and the store.
    pub(crate) fn differences(&self, node: usize) -> String {
        let list = "find . -type d -printf '%P/ %m\\n' -o -type f -printf '%P %m %s\\n' -o -printf '%P %l\\n' | sort";
        let script =
            format!("cd s; diff <({list}) <(cd $S; {list}) || true; diff -r --no-dereference . $S || true");
        self.sh(node, &script)
    }

    /// Checks every node's shard and targets.
    pub(crate) fn check(&self) {
        for node in 1..=self.count {
            self.ok(node, &["fsck"]);
        }
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for node in 1..=self.count {
            if self.pool(node).exists() {
                let _ = self.forebay(node, &["down", "--force", "--discard"]);
            }
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
