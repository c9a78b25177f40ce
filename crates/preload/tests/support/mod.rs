//! Support for these tests: the built binaries, a pool, scratch directories, and programs that run with and without the
//! preload library. Everything that a test makes is removed when it is dropped, also after a panic.

#![allow(dead_code, unreachable_pub)]

pub mod scripts;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long a pool may take to start or to end.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A built binary or library, from the directory of the running test.
pub fn binary(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.ancestors().nth(2).unwrap().join(name);
    assert!(path.exists(), "{} is not built: run `cargo build --workspace` first", path.display());
    path
}

/// A directory for one test.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Scratch {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("forebay-preload-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = Path::new("/dev/shm").join(name);
        fs::create_dir(&path).unwrap_or_else(|e| panic!("{} cannot be made: {e}", path.display()));
        Scratch(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn text(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// A running pool.
pub struct Pool {
    daemon: Child,
    dir: Scratch,
}

impl Pool {
    pub fn start() -> Pool {
        let dir = Scratch::new();
        let log = fs::File::create(dir.path().join("log")).unwrap();
        let daemon = Command::new(binary("forebayd"))
            .args(["--foreground", "--capacity", "256MiB", "--pool"])
            .arg(dir.path().join("pool"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut pool = Pool { daemon, dir };
        let started = Instant::now();
        while !pool.path().join("socket").exists() {
            let ended = pool.daemon.try_wait().unwrap();
            let log = || fs::read_to_string(pool.dir.path().join("log")).unwrap_or_default();
            assert!(ended.is_none(), "the daemon ended: {}", log());
            assert!(started.elapsed() < TIMEOUT, "the daemon did not start: {}", log());
            std::thread::sleep(Duration::from_millis(20));
        }
        pool
    }

    /// The pool's directory.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("pool")
    }

    /// The supervisor's process number.
    pub fn supervisor(&self) -> i32 {
        self.daemon.id() as i32
    }

    /// The worker's process number; none while it is replaced.
    pub fn worker(&self) -> Option<i32> {
        let mut status = Command::new(binary("forebay"));
        let output = status.args(["status", "--json", "--pool"]).arg(self.path()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let number = text.split("\"worker\": ").nth(1)?;
        number.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    }

    /// A command that runs with the preload library, in `/`.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = under_door(program, &self.path());
        command.current_dir("/");
        command
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: the process is a child of this test that was not waited for.
        unsafe { libc::kill(self.daemon.id() as i32, libc::SIGTERM) };
        let asked = Instant::now();
        while asked.elapsed() < TIMEOUT && matches!(self.daemon.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        self.daemon.kill().ok();
        self.daemon.wait().ok();
        let target = self.path().join("target");
        let target = std::ffi::CString::new(target.into_os_string().into_encoded_bytes()).unwrap();
        // SAFETY: a C string. Where the daemon could not mount, there is nothing to unmount.
        unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
    }
}

/// A command that runs with the preload library and the pool of a directory.
pub fn under_door(program: impl AsRef<std::ffi::OsStr>, pool: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .env("LD_PRELOAD", binary("libforebay_preload.so"))
        .env("FOREBAY_POOL", pool)
        .env("FOREBAY_PREFIX", "/forebay")
        .env_remove("FOREBAY_DISABLE");
    command
}

/// Runs a command. Returns its output, with standard error after standard output.
#[track_caller]
pub fn said(command: &mut Command) -> (Output, String) {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output, text)
}

/// Runs a command that must succeed. Returns its standard output.
#[track_caller]
pub fn succeeds(command: &mut Command) -> String {
    let (output, text) = said(command);
    assert!(output.status.success(), "{command:?}: {}\n{text}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Compiles the C program whose sources are in a directory beside the tests.
pub fn compile(sources: &str, into: &Path) -> PathBuf {
    let program = into.join(sources);
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(sources);
    let sources = fs::read_dir(&sources).unwrap().map(|entry| entry.unwrap().path());
    let options = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-pthread", "-o"];
    let mut compiler = Command::new("cc");
    compiler
        .args(options)
        .arg(&program)
        .args(sources.filter(|path| path.extension().is_some_and(|e| e == "c")));
    succeeds(&mut compiler);
    program
}

/// True when a program is on PATH.
pub fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}
