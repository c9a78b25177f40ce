//! Shared by the command's tests: the built programs, and a directory for each test that is cleaned up even when the
//! test fails.

#![allow(dead_code, unreachable_pub, missing_docs)]

pub mod devices;
pub mod mpi;

use std::ffi::{OsStr, OsString};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::Value;

/// No step of these tests takes this long, even on a busy machine.
pub const TIMEOUT: Duration = Duration::from_secs(60);
/// An ordinary user, for tests of operations that only root may do.
pub const NOBODY: u32 = 65534;

/// The command, with daemon and libraries built beside it.
pub fn forebay() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let forebay = PathBuf::from(env!("CARGO_BIN_EXE_forebay"));
        let profile = forebay.parent().unwrap();
        // Set by tools/run-tests, which has built everything.
        if std::env::var_os("FOREBAY_BUILT").is_some() {
            return forebay;
        }
        let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| env!("CARGO").into()));
        // With the features of `make test`, so that little is built twice.
        build.args(["build", "--quiet", "--workspace", "--features"]);
        build.arg("forebay-server/simulation,forebay-mover/simulation");
        build.arg("--target-dir").arg(profile.parent().unwrap());
        if profile.ends_with("release") {
            build.arg("--release");
        }
        build.current_dir(env!("CARGO_MANIFEST_DIR"));
        assert!(build.status().unwrap().success(), "the daemon and the libraries cannot be built");
        forebay
    })
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A directory of one test, which holds all its pools. Dropping it stops the pools and removes it.
pub struct Place {
    pub path: PathBuf,
}

impl Place {
    pub fn new() -> Place {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = PathBuf::from(format!("/tmp/fbt-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Place { path }
    }

    pub fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path.join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        path
    }

    /// The command with this directory for pools without a path. Variables of the caller that could name a pool or a
    /// job are removed.
    pub fn command<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(forebay());
        command.args(arguments);
        self.dress(&mut command);
        command
    }

    /// Sets this directory's environment for a command. Launchers of Open MPI that start and end at the same time remove
    /// each other's directory where they share it.
    pub fn dress(&self, command: &mut Command) {
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            let foreign = ["FOREBAY_", "SLURM_", "PMIX_", "PMI_", "OMPI_", "PBS_", "FLUX_", "LSB_"];
            if foreign.iter().any(|p| text.starts_with(p)) || text == "LD_PRELOAD" {
                command.env_remove(&name);
            }
        }
        command.env("OMPI_MCA_orte_tmpdir_base", self.sessions());
        command.env("FOREBAY_TMPDIR", &self.path).stdin(Stdio::null());
    }

    /// The directory of launchers of Open MPI, beside this one: tests count what is in this one.
    fn sessions(&self) -> PathBuf {
        self.path.with_extension("sessions")
    }

    /// Runs the command until it ends.
    pub fn run<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Ran {
        Ran::of(self.command(arguments).output().unwrap())
    }

    /// Runs the command and expects success.
    pub fn ok<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Ran {
        let ran = self.run(arguments);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran
    }

    /// Runs the command and parses its JSON.
    pub fn json<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Value {
        let ran = self.ok(arguments);
        serde_json::from_str(&ran.out).unwrap_or_else(|e| panic!("{e}: {ran:?}"))
    }

    /// Starts a pool of 128 MiB in this directory; returns the pool's directory.
    pub fn up(&self, name: &str) -> PathBuf {
        let dir = self.join(name);
        self.ok([
            OsStr::new("up"),
            "--capacity".as_ref(),
            "128MiB".as_ref(),
            "--path".as_ref(),
            dir.as_ref(),
        ]);
        dir
    }

    /// Directories here that are pools or were pools.
    pub fn pools(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut rest = vec![(self.path.clone(), 0)];
        while let Some((dir, depth)) = rest.pop() {
            if dir.join("lock").is_file() || dir.join("pool.json").is_file() {
                found.push(dir.clone());
            }
            let is_target = dir.ends_with("target");
            for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
                // That of a job is in `nodes/UID/JOB.RUN/pool`.
                if depth < 4 && !is_target && entry.file_type().is_ok_and(|t| t.is_dir()) {
                    rest.push((entry.path(), depth + 1));
                }
            }
        }
        found
    }

    /// Mount points below this directory.
    pub fn mounts(&self) -> Vec<String> {
        let bytes = std::fs::read("/proc/self/mountinfo").unwrap();
        let text = String::from_utf8_lossy(&bytes);
        let prefix = format!("{}/", self.path.display());
        text.lines()
            .filter_map(|l| l.split(' ').nth(4))
            .filter(|m| m.starts_with(&prefix))
            .map(str::to_owned)
            .collect()
    }

    /// The directory for pools without a path.
    pub fn user_directory(&self) -> PathBuf {
        self.join(format!("forebay-{}", rustix::process::geteuid().as_raw()))
    }

    /// Asserts that no pool, mount or per-user directory is left.
    pub fn assert_nothing_left(&self) {
        eventually("nothing of the pools is left", || {
            self.pools().is_empty() && self.mounts().is_empty() && !self.user_directory().exists()
        });
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for pool in self.pools() {
            let _ = self.command(["down", "--force", "--discard", "--pool"]).arg(&pool).output();
            // Leftovers even of that: processes, found by pid, and mounts, found by path.
            if let Some(pid) = lock_holder(&pool) {
                kill(pid, 9);
            }
        }
        for mount in self.mounts() {
            let _ = Command::new("umount").args(["-l", &mount]).output();
        }
        let _ = std::fs::remove_dir_all(self.sessions());
        let removed = std::fs::remove_dir_all(&self.path);
        if !std::thread::panicking() {
            removed.unwrap();
        }
    }
}

/// The process that holds a pool's lock, if it is alive.
pub fn lock_holder(pool: &Path) -> Option<i32> {
    let pid = std::fs::read_to_string(pool.join("lock")).ok()?.trim().parse().ok()?;
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    name.starts_with("forebayd").then_some(pid)
}

/// The result of a command.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ran {
    pub fn of(output: Output) -> Ran {
        use std::os::unix::process::ExitStatusExt;
        Ran {
            code: output.status.code(),
            signal: output.status.signal(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Asserts that the command failed with `code` and printed all of `words` on stderr.
    pub fn assert_refused(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        for word in words {
            assert!(self.err.contains(word), "{word:?} is not said: {self:?}");
        }
    }
}

/// Waits until `condition` holds; panics after [`TIMEOUT`].
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < end, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// True while a process runs. A zombie does not count.
pub fn is_alive(pid: i32) -> bool {
    forebay_sys::process::Stat::of(pid as u32).is_ok_and(|stat| !stat.has_ended())
}

pub fn kill(pid: i32, signal: i32) {
    // SAFETY: sends a signal to a process that the test started.
    unsafe { libc::kill(pid, signal) };
}

/// One of a pool's sockets, in whose place is that of a test.
pub struct Replaced {
    pub socket: PathBuf,
    pub aside: PathBuf,
    pub fake: UnixListener,
}

impl Replaced {
    pub fn new(pool: &Path, name: &str) -> Replaced {
        let (socket, aside) = (pool.join(name), pool.join("aside"));
        std::fs::rename(&socket, &aside).unwrap();
        let fake = UnixListener::bind(&socket).unwrap();
        Replaced { socket, aside, fake }
    }

    /// Waits for somebody to connect, who then waits for an answer as long as the connection is there.
    pub fn meet(&self) -> UnixStream {
        self.fake.set_nonblocking(true).unwrap();
        let mut met = None;
        eventually("somebody asks", || {
            met = self.fake.accept().ok();
            met.is_some()
        });
        met.unwrap().0
    }

    /// Puts the pool's own socket back.
    pub fn restore(self) {
        std::fs::rename(&self.aside, &self.socket).unwrap();
    }

    /// Both.
    pub fn meet_and_restore(self) -> UnixStream {
        let met = self.meet();
        self.restore();
        met
    }
}

/// A child that is killed when the test ends.
pub struct Guarded(pub Child);

impl Guarded {
    pub fn pid(&self) -> i32 {
        self.0.id() as i32
    }

    pub fn wait(&mut self) -> std::process::ExitStatus {
        let end = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "a program does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a command without waiting for its end.
pub fn start(mut command: Command) -> Guarded {
    Guarded(command.spawn().unwrap())
}

/// True if commands can run as an ordinary user, by setpriv(1).
pub fn can_be_nobody() -> bool {
    is_root() && Command::new("setpriv").arg("--version").output().is_ok_and(|o| o.status.success())
}

/// The command as an ordinary user.
pub fn as_nobody<S: AsRef<OsStr>>(place: &Place, arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new("setpriv");
    let id = NOBODY.to_string();
    command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "--"]);
    command.arg(forebay());
    command.args(arguments.into_iter().map(|a| OsString::from(a.as_ref())));
    place.dress(&mut command);
    command
}

/// Makes the ordinary user the owner of a file.
pub fn give_to_nobody(path: &Path) {
    std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
}
