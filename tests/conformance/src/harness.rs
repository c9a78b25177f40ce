//! What the tests of this crate stand on: scratch directories, the built binaries, pools, and runs of the suite.
//!
//! Everything made here is taken away when it is dropped, also when the test panics.

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
    /// On the disk that holds the build.
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

    /// Makes it another user's.
    pub fn give_to(&self, user: u32) {
        chown(&self.0, Some(user), Some(user)).expect("root may give a directory away");
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A case that failed may have left directories that nobody may enter.
        fs::set_permissions(&self.0, fs::Permissions::from_mode(0o700)).ok();
        fs::remove_dir_all(&self.0).ok();
    }
}

/// True when the tests run as root.
pub fn is_root() -> bool {
    // SAFETY: no memory is passed.
    unsafe { libc::geteuid() == 0 }
}

/// What the tests' user cannot be: what a door cannot do because of it.
pub fn not_me() -> &'static str {
    if is_root() {
        "NotRoot"
    } else {
        "Root"
    }
}

/// What a run of the suite came to.
#[derive(Debug)]
pub struct Summary {
    /// Cases that passed.
    pub passed: usize,
    /// Cases that failed; 1 where the run itself did.
    pub failed: usize,
    /// Cases that the door cannot do.
    pub skipped: usize,
    /// All that was printed.
    pub output: String,
}

impl Summary {
    /// Panics unless every case passed but those that need one of these abilities, by name.
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

/// The directory of the built binaries and libraries: the one that holds the running test's.
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
    /// A pool of `capacity_mib` MiB that is up.
    pub fn up(capacity_mib: u64) -> TestPool {
        TestPool::of(Scratch::on_disk(), binaries(), None, capacity_mib)
    }

    /// The same as another user, who cannot read where the build is: with copies of the binaries in `place`. Only root
    /// can do this.
    pub fn up_as(user: u32, place: &Scratch, capacity_mib: u64) -> TestPool {
        for name in [
            "forebay",
            "forebayd",
            "forebay-mount",
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

    /// A built program, as the pool's user, in an environment without Forebay.
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

    /// `forebay --pool DIR`, to which a verb is added.
    pub fn forebay(&self) -> Command {
        let mut command = self.plain("forebay");
        command.arg("--pool").arg(self.directory());
        command
    }

    /// A built program that sees the pool as `/forebay`: as `forebay run` starts it, without that process between, so
    /// that a test can kill it by its number.
    pub fn program(&self, program: &str) -> Command {
        let mut command = self.plain(program);
        command.env("LD_PRELOAD", self.binaries.join("libforebay_preload.so"));
        command.env("FOREBAY_POOL", self.directory()).env("FOREBAY_PREFIX", "/forebay");
        command
    }

    /// Mounts the pool, for all users; none where that cannot be done on this machine, which is said.
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

    /// The suite through a path that any program can use.
    pub fn suite_at(&self, root: &Path, arguments: &[&str]) -> Summary {
        summary(self.plain("forebay-conformance").arg("--root").arg(root).args(arguments))
    }

    /// The suite, run by `forebay run` over the pool.
    pub fn suite_by_run(&self, arguments: &[&str]) -> Summary {
        let suite = self.binaries.join("forebay-conformance");
        summary(self.forebay().args(["run", "--quiet", "--"]).arg(suite).args(arguments))
    }

    /// The suite, through the client library.
    pub fn suite_by_client(&self, arguments: &[&str]) -> Summary {
        summary(self.plain("forebay-conformance").arg("--pool").arg(self.directory()).args(arguments))
    }

    /// What `forebay status --json` says.
    pub fn status(&self) -> Value {
        json(self.forebay().args(["status", "--json"]))
    }

    /// What `forebay fsck --json` says.
    pub fn fsck(&self) -> Value {
        json(self.forebay().args(["fsck", "--json"]))
    }

    /// The worker's process number; none while it is replaced.
    pub fn worker(&self) -> Option<i32> {
        self.status()["pids"]["worker"].as_i64().map(|pid| pid as i32)
    }
}

impl Drop for TestPool {
    fn drop(&mut self) {
        let down = self.forebay().args(["down", "--force"]).output();
        if !down.as_ref().is_ok_and(|output| output.status.success()) {
            eprintln!("the test's pool does not go down: {down:?}");
        }
    }
}

/// Runs a command that must succeed; what it printed.
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
