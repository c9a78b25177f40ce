//! A pool with a directory as its backing store, for each test. Both are removed at the end, also when the test fails or
//! its process is killed.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use forebay_client::Pool;
use forebay_types::{Code, Entry, Ino, PendingPlace, Reply, Request, Wanted};

/// On a machine that is merely busy nothing in these tests takes this long.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(180);

fn binaries() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_forebay-mover")).parent().unwrap().to_owned()
}

/// What the directories of a process's beds begin with.
fn places(pid: u32) -> String {
    format!("/tmp/fbv-{pid}-")
}

/// Starts, once, a process that ends the pools of this one when it has ended before it did so itself.
fn start_heir() {
    static HEIR: OnceLock<Child> = OnceLock::new();
    HEIR.get_or_init(|| {
        // Its input ends with this process.
        let script = "read -r; for d in \"$1\"*; do test -d \"$d\" || continue; \
            \"$0\" --pool \"$d/pool\" down --discard; \"$0\" --pool \"$d/pool\" down; \
            rm -rf --one-file-system \"$d\"; done";
        let mut command = Command::new("bash");
        command.args(["-c", script]).arg(binaries().join("forebay")).arg(places(std::process::id()));
        // What ends this process may end its group.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        command.env_remove("FOREBAY_POOL").spawn().unwrap()
    });
}

/// A pool, and a directory in front of which it stands.
pub(crate) struct Bed {
    dir: PathBuf,
}

impl Bed {
    /// A pool with this capacity, and an empty store directory that is not attached yet.
    pub(crate) fn new(capacity: &str) -> Bed {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        start_heir();
        let dir = PathBuf::from(format!("{}{number}", places(std::process::id())));
        std::fs::create_dir(&dir).unwrap();
        std::fs::create_dir(dir.join("store")).unwrap();
        let bed = Bed { dir };
        let done = bed.up(capacity);
        assert!(done.status.success(), "{}", text(&done));
        bed
    }

    /// Starts the pool.
    pub(crate) fn up(&self, capacity: &str) -> Output {
        self.forebay(&["up", "--path", self.pool().to_str().unwrap(), "--capacity", capacity])
    }

    /// The command with this pool.
    pub(crate) fn pool_verb(&self, arguments: &[&str]) -> Output {
        self.forebay(&[&["--pool", self.pool().to_str().unwrap()], arguments].concat())
    }

    /// Where the pool is mounted, if it is.
    pub(crate) fn mountpoint(&self) -> PathBuf {
        self.dir.join("mount")
    }

    pub(crate) fn mount(&self) -> Output {
        let _ = std::fs::create_dir(self.mountpoint());
        let (pool, at) = (self.pool(), self.mountpoint());
        self.forebay(&["--pool", pool.to_str().unwrap(), "mount", at.to_str().unwrap()])
    }

    /// The same, with the store attached at `/s`. `options` are those of its URL, such as `?rate=10MB/s`.
    pub(crate) fn attached(capacity: &str, options: &str, settings: &str) -> Bed {
        let bed = Bed::new(capacity);
        bed.attach(options, settings);
        bed
    }

    /// Attaches the store at `/s`.
    pub(crate) fn attach(&self, options: &str, settings: &str) {
        let pool = self.attach_client();
        let root = match pool.make_directory_in(CALLER, Ino::ROOT, b"s", 0o755) {
            Ok(entry) => entry.attr.ino,
            Err(code) => panic!("{code:?}"),
        };
        let url = format!("file://{}{options}", self.store().display());
        let settings = format!("{{\"url\":\"{url}\"{settings}}}");
        let request = Request::Attach { ino: root, listed: true, settings: settings.as_bytes() };
        pool.request(&request, |_| Ok(())).unwrap();
        forebay_server::control::start_mover(&self.pool()).unwrap();
    }

    /// Attaches the store at `/s` by the command, with these options.
    pub(crate) fn attach_with(&self, options: &str, arguments: &[&str]) {
        let done = self.try_attach_with(options, arguments);
        assert!(done.status.success(), "{}\nlog: {}", text(&done), self.log());
    }

    pub(crate) fn try_attach_with(&self, options: &str, arguments: &[&str]) -> Output {
        let url = format!("file://{}{options}", self.store().display());
        let pool = self.pool();
        self.forebay(&[&["--pool", pool.to_str().unwrap(), "attach", &url, "/s"], arguments].concat())
    }

    /// The command.
    pub(crate) fn program(&self) -> PathBuf {
        binaries().join("forebay")
    }

    /// This process as a client of the pool. A process has one pool: tests that call it run in processes of their own.
    pub(crate) fn attach_client(&self) -> &'static Pool {
        Pool::attach(&self.pool()).unwrap()
    }

    pub(crate) fn pool(&self) -> PathBuf {
        self.dir.join("pool")
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.dir.join("store")
    }

    pub(crate) fn forebay(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(binaries().join("forebay"));
        command
            .env_remove("FOREBAY_POOL")
            .env("FOREBAY_LOG", std::env::var("BED_LOG").unwrap_or("info".into()))
            .args(arguments);
        command.output().unwrap()
    }

    /// A shell script on the pool, which is at `/forebay`; the store's directory is `$S`.
    pub(crate) fn command(&self, script: &str) -> Command {
        let mut command = Command::new(binaries().join("forebay"));
        command.args(["--pool", self.pool().to_str().unwrap(), "run", "--", "bash", "-c", script]);
        command.env("S", self.store());
        command
    }

    /// Runs a shell script, up to its first failure.
    pub(crate) fn run(&self, script: &str) -> Output {
        self.command(&format!("set -e; {script}")).output().unwrap()
    }

    /// The same; it has to succeed. Returns what it printed.
    pub(crate) fn sh(&self, script: &str) -> String {
        let done = self.run(script);
        assert!(done.status.success(), "{script}\n{}\nlog: {}", text(&done), self.log());
        String::from_utf8_lossy(&done.stdout).into_owned()
    }

    /// Waits until a condition holds.
    pub(crate) fn wait(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !holds() {
            if begun.elapsed() > TIMEOUT {
                panic!("{what}: not after {TIMEOUT:?}\n{}\nlog: {}", self.pending(), self.log());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until nothing is pending.
    pub(crate) fn wait_drained(&self) {
        self.wait("all is drained", || self.sums()["pending"] == 0);
    }

    /// What the shard says of all files together. A change makes its places pending there before it is answered; the mover's
    /// report is older.
    pub(crate) fn sums(&self) -> serde_json::Value {
        let done = self.pool_verb(&["state", "-r", "--json", "/"]);
        let sums: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap_or_default();
        sums[0].clone()
    }

    /// The pending places, for a message.
    fn pending(&self) -> String {
        let pool = self.attach_client();
        let request = Request::Pending { parent: Ino(0), name: b"" };
        let places = pool.request(&request, |reply| match reply {
            Reply::Bytes(bytes) => PendingPlace::decode_list(bytes),
            _ => Err(Code::Malformed),
        });
        let each = |place: PendingPlace| {
            let wanted = place.wanted.map(|wanted| match wanted {
                Wanted::Here(entry, copy) => {
                    let attr = entry.attr;
                    format!(
                        "{} mode {:o} flags {} epoch {} {copy:?}",
                        attr.ino,
                        attr.mode,
                        attr.flags,
                        attr.epoch()
                    )
                }
                Wanted::Elsewhere(ino, _) => format!("{ino} elsewhere"),
            });
            let (parent, name) = (place.parent, String::from_utf8_lossy(&place.name).into_owned());
            let (intent, placed, conflict) = (place.intent, place.placed, place.conflict);
            format!("{parent} {name}: {intent:?} conflict {conflict}\n  has {placed:?}\n  wants {wanted:?}\n")
        };
        places.map_or_else(|code| format!("{code:?}"), |places| places.into_iter().map(each).collect())
    }

    pub(crate) fn status(&self) -> serde_json::Value {
        let done = self.forebay(&["--pool", self.pool().to_str().unwrap(), "status", "--json"]);
        serde_json::from_slice(&done.stdout).unwrap_or_default()
    }

    /// The end of the daemon's log.
    pub(crate) fn log(&self) -> String {
        let log = std::fs::read_to_string(self.pool().join("log")).unwrap_or_default();
        let whole = std::env::var_os("BED_LOG").is_some();
        log[log.len().saturating_sub(if whole { usize::MAX } else { 4000 })..].to_owned()
    }

    /// The files below the store's directory, with their contents; directories end in `/`.
    pub(crate) fn stored(&self) -> Vec<(String, Vec<u8>)> {
        let mut all = Vec::new();
        let mut directories = vec![self.store()];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(&directory).unwrap().flatten() {
                let path = entry.path();
                let name = path.strip_prefix(self.store()).unwrap().display().to_string();
                let kind = entry.file_type().unwrap();
                if kind.is_dir() {
                    all.push((name + "/", Vec::new()));
                    directories.push(path);
                } else if kind.is_symlink() {
                    all.push((
                        name + "@",
                        std::fs::read_link(path).unwrap().display().to_string().into_bytes(),
                    ));
                } else {
                    all.push((name, std::fs::read(path).unwrap_or_default()));
                }
            }
        }
        all.sort();
        all
    }
}

const CALLER: forebay_types::Caller = forebay_types::Caller { uid: 0, gid: 0 };

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = self.forebay(&["--pool", self.pool().to_str().unwrap(), "down", "--force", "--discard"]);
        let _ = self.forebay(&["--pool", self.pool().to_str().unwrap(), "down"]);
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

pub(crate) fn text(done: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr))
}

/// An inode by its path below the root.
#[allow(dead_code)]
pub(crate) fn entry(pool: &Pool, path: &str) -> Result<Entry, Code> {
    let mut ino = Ino::ROOT;
    for name in path.split('/').filter(|name| !name.is_empty()) {
        ino = pool.request(&Request::Lookup { parent: ino, name: name.as_bytes() }, |reply| match reply {
            Reply::Entry(entry) => Ok(entry.attr.ino),
            _ => Err(Code::Malformed),
        })?;
    }
    pool.get_attr(ino)
}

/// Runs the test below in a process of its own.
const IS_TO_BE_KILLED: &str = "BED_IS_TO_BE_KILLED";

#[test]
fn pools_of_a_test_that_is_killed_end() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "bed::test_that_is_killed"]).env(IS_TO_BE_KILLED, "1");
    let mut test = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let bed = Bed { dir: PathBuf::from(format!("{}0", places(test.id()))) };
    bed.wait("the test has begun", || bed.store().join("begun").exists());
    let mover = bed.status()["mover"]["pid"].as_u64().unwrap();
    test.kill().unwrap();
    test.wait().unwrap();
    let gone = || !bed.dir.exists() && !Path::new(&format!("/proc/{mover}")).exists();
    bed.wait("its pool has ended", gone);
}

/// Does nothing unless it is run by the test above.
#[test]
fn test_that_is_killed() {
    if std::env::var_os(IS_TO_BE_KILLED).is_none() {
        return;
    }
    let bed = Bed::new("64MiB");
    bed.attach_with("", &[]);
    std::fs::write(bed.store().join("begun"), "").unwrap();
    std::thread::sleep(TIMEOUT);
}
