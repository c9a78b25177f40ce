//! The base of this crate's tests: scratch directories, the built binaries, pools, and runs of the suite.
//!
//! Everything created here is removed when it is dropped, also when the test panics.

use serde_json::Value;
use std::fs;
use std::os::unix::fs::{chown, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory of its own for a test.
pub struct Scratch(PathBuf);

impl Scratch {
    /// In the directory for temporary files.
    pub fn on_disk() -> Scratch {
        Scratch::under(&std::env::temp_dir())
    }

    /// In memory.
    pub fn in_memory() -> Scratch {
        Scratch::under(Path::new("/dev/shm"))
    }

    fn under(place: &Path) -> Scratch {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("forebay-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = place.join(name);
        fs::create_dir(&path).unwrap_or_else(|e| panic!("{} cannot be made: {e}", path.display()));
        Scratch(path)
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Its path as text.
    pub fn text(&self) -> &str {
        self.0.to_str().expect("scratch paths are text")
    }

    /// Changes its owner and group.
    pub fn give_to(&self, user: u32) {
        chown(&self.0, Some(user), Some(user)).expect("root may give a directory away");
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A failed case may have left this directory without permissions.
        fs::set_permissions(&self.0, fs::Permissions::from_mode(0o700)).ok();
        fs::remove_dir_all(&self.0).ok();
    }
}

/// True when the tests run as root.
pub fn is_root() -> bool {
    // SAFETY: no memory is passed.
    unsafe { libc::geteuid() == 0 }
}

/// The ability that every door lacks because of the user that runs the tests.
pub fn not_me() -> &'static str {
    if is_root() {
        "NotRoot"
    } else {
        "Root"
    }
}

/// The result of a run of the suite.
#[derive(Debug)]
pub struct Summary {
    /// Cases that passed.
    pub passed: usize,
    /// Cases that failed; 1 if the run itself failed.
    pub failed: usize,
    /// Cases that were skipped, because the door lacks an ability.
    pub skipped: usize,
    /// All output.
    pub output: String,
}

impl Summary {
    /// Panics unless every case passed, except those that need one of the abilities `lacking`, given by name.
    #[track_caller]
    pub fn passed_but_for(&self, lacking: &[&str]) {
        assert_eq!(self.failed, 0, "{}", self.output);
        let others = self.output.lines().filter(|line| line.starts_with("skipped "));
        let others: Vec<_> =
            others.filter(|line| !lacking.iter().any(|l| line.ends_with(&format!("(lacks {l})")))).collect();
        assert!(others.is_empty(), "skipped, though the door should do it: {others:#?}");
        assert!(self.passed >= 90, "{} cases passed\n{}", self.passed, self.output);
    }
}

/// The program that runs the suite and its workloads.
pub fn program() -> PathBuf {
    binaries().join("forebay-conformance")
}

/// The directory of the built binaries and libraries: the parent of the running test's directory.
pub fn binaries() -> PathBuf {
    let test = std::env::current_exe().expect("a running test has a path");
    test.ancestors().nth(2).expect("tests lie in <profile>/deps").to_owned()
}

/// Runs the suite with these arguments.
pub fn suite(arguments: &[&str]) -> Summary {
    summary(Command::new(program()).args(arguments))
}

/// Runs a command that runs the suite.
pub fn summary(command: &mut Command) -> Summary {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?} cannot be run: {e}"));
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    // "P passed, F failed, S skipped"
    let counts: Vec<usize> = text
        .lines()
        .filter(|line| line.ends_with(" skipped") && line.contains(" passed, "))
        .flat_map(|line| line.split(' ').filter_map(|word| word.parse().ok()))
        .collect();
    match counts[..] {
        [passed, failed, skipped] => Summary { passed, failed, skipped, output: text },
        _ => Summary { passed: 0, failed: 1, skipped: 0, output: format!("{}: {text}", output.status) },
    }
}

/// A pool of its own for a test, in memory.
pub struct TestPool {
    scratch: Scratch,
    binaries: PathBuf,
    user: Option<u32>,
}

impl TestPool {
    /// Starts a pool of `capacity_mib` MiB.
    pub fn up(capacity_mib: u64) -> TestPool {
        TestPool::of(Scratch::on_disk(), binaries(), None, capacity_mib)
    }

    /// Like [`TestPool::up`], as another user, with copies of the binaries in `place`, because that user may not be
    /// able to read the build's directory. Needs root.
    pub fn up_as(user: u32, place: &Scratch, capacity_mib: u64) -> TestPool {
        for name in [
            "forebay",
            "forebayd",
            "forebay-mount",
            "forebay-mover",
            "libforebay.so",
            "libforebay_preload.so",
            "forebay-conformance",
        ] {
            let from = binaries().join(name);
            fs::copy(&from, place.path().join(name)).unwrap_or_else(|e| panic!("{}: {e}", from.display()));
        }
        let scratch = Scratch::on_disk();
        scratch.give_to(user);
        TestPool::of(scratch, place.path().to_owned(), Some(user), capacity_mib)
    }

    fn of(scratch: Scratch, binaries: PathBuf, user: Option<u32>, capacity_mib: u64) -> TestPool {
        let command = binaries.join("forebay");
        assert!(command.is_file(), "{} is not built: run `cargo build --workspace` first", command.display());
        let pool = TestPool { scratch, binaries, user };
        let mut up = pool.plain("forebay");
        up.args(["up", "--media", "dram", "--capacity", &format!("{capacity_mib}MiB"), "--path"]);
        said(up.arg(pool.directory()));
        pool
    }

    /// The pool's directory.
    pub fn directory(&self) -> PathBuf {
        self.scratch.path().join("pool")
    }

    /// A built program, as the pool's user, in an environment without Forebay's variables.
    fn plain(&self, program: &str) -> Command {
        let mut command = Command::new(self.binaries.join(program));
        for name in ["FOREBAY_POOL", "FOREBAY_PREFIX", "FOREBAY_DISABLE", "LD_PRELOAD"] {
            command.env_remove(name);
        }
        if let Some(user) = self.user {
            command.uid(user).gid(user).current_dir("/");
        }
        command
    }

    /// `forebay --pool DIR`; the caller adds a subcommand.
    pub fn forebay(&self) -> Command {
        let mut command = self.plain("forebay");
        command.arg("--pool").arg(self.directory());
        command
    }

    /// A built program that sees the pool as `/forebay`, with the environment that `forebay run` sets. It has no
    /// `forebay run` as its parent, so that a test can kill it by its process number.
    pub fn program(&self, program: &str) -> Command {
        let mut command = self.plain(program);
        command.env("LD_PRELOAD", self.binaries.join("libforebay_preload.so"));
        command.env("FOREBAY_POOL", self.directory()).env("FOREBAY_PREFIX", "/forebay");
        command
    }

    /// Mounts the pool, for all users if this user is root. None, after printing the reason, if this machine or user
    /// cannot mount.
    pub fn mount(&self) -> Option<PathBuf> {
        let at = self.scratch.path().join("mnt");
        if !at.is_dir() {
            fs::create_dir(&at).expect("a scratch directory takes a mount point");
        }
        let mut mount = self.forebay();
        mount.arg("mount").arg(&at);
        if is_root() {
            mount.arg("--allow-other");
        }
        if !Path::new("/dev/fuse").exists() {
            eprintln!("skipped: there is no /dev/fuse");
            return None;
        }
        let output = mount.output().unwrap_or_else(|e| panic!("{mount:?} cannot be run: {e}"));
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() && words.contains("may not") {
            eprintln!("skipped: this user may not mount: {words}");
            return None;
        }
        assert!(output.status.success(), "{mount:?} failed: {words}");
        Some(at)
    }

    /// Runs the suite in a directory that any program can use, such as a mount.
    pub fn suite_at(&self, root: &Path, arguments: &[&str]) -> Summary {
        summary(self.plain("forebay-conformance").arg("--root").arg(root).args(arguments))
    }

    /// Runs the suite under `forebay run`.
    pub fn suite_by_run(&self, arguments: &[&str]) -> Summary {
        let suite = self.binaries.join("forebay-conformance");
        summary(self.forebay().args(["run", "--quiet", "--"]).arg(suite).args(arguments))
    }

    /// Runs the suite through the client library.
    pub fn suite_by_client(&self, arguments: &[&str]) -> Summary {
        summary(self.plain("forebay-conformance").arg("--pool").arg(self.directory()).args(arguments))
    }

    /// The output of `forebay status --json`.
    pub fn status(&self) -> Value {
        json(self.forebay().args(["status", "--json"]))
    }

    /// The output of `forebay fsck --json`.
    pub fn fsck(&self) -> Value {
        json(self.forebay().args(["fsck", "--json"]))
    }

    /// The worker's process number. None while no worker is running.
    pub fn worker(&self) -> Option<i32> {
        self.status()["pids"]["worker"].as_i64().map(|pid| pid as i32)
    }
}

impl Drop for TestPool {
    fn drop(&mut self) {
        let down = self.forebay().args(["down", "--force", "--discard"]).output();
        if !down.as_ref().is_ok_and(|output| output.status.success()) {
            eprintln!("the test's pool does not go down: {down:?}");
        }
    }
}

/// Runs a command that must succeed, and returns its output.
#[track_caller]
pub fn said(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?} cannot be run: {e}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?} failed ({}): {}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

/// Runs a command that prints JSON, whatever its exit status.
#[track_caller]
fn json(command: &mut Command) -> Value {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?} cannot be run: {e}"));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| {
        panic!("{command:?} printed no JSON ({e}): {}", String::from_utf8_lossy(&output.stderr))
    })
}
