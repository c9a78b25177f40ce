//! What the tests of the mount share: a pool and a mount for each test, removed also when the test fails.

#![allow(dead_code, unreachable_pub, missing_docs)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

/// On a machine that is merely busy nothing in these tests takes this long.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// The directory of the built programs.
pub fn binaries() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_forebay-mount")).parent().unwrap().to_owned()
}

/// A pool in memory and a directory to mount it on.
pub struct Place {
    pub dir: PathBuf,
}

impl Place {
    /// None where nothing can be mounted. Prints the reason then.
    pub fn new() -> Option<Place> {
        Place::of(&["--capacity", "256MiB"])
    }

    /// The same with arguments for `up`.
    pub fn of(up: &[&str]) -> Option<Place> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        if !Path::new("/dev/fuse").exists() {
            eprintln!("skipped: there is no /dev/fuse");
            return None;
        }
        // SAFETY: cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            eprintln!("skipped: not root, who may mount with passthrough");
            return None;
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = PathBuf::from(format!("/tmp/fbm-{}-{number}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        std::fs::create_dir(dir.join("mnt")).unwrap();
        let place = Place { dir };
        place.done(&[&["up", "--path", place.pool().to_str().unwrap()], up].concat());
        Some(place)
    }

    /// A pool, mounted with arguments for `mount`.
    pub fn mounted_as(up: &[&str], mount: &[&str]) -> Option<Place> {
        let place = Place::of(up)?;
        place.done(&[&["mount", place.mnt().to_str().unwrap()], mount].concat());
        Some(place)
    }

    /// The same, mounted without arguments.
    pub fn mounted() -> Option<Place> {
        let place = Place::new()?;
        place.done(&["mount", place.mnt().to_str().unwrap()]);
        Some(place)
    }

    pub fn pool(&self) -> PathBuf {
        self.dir.join("pool")
    }

    pub fn mnt(&self) -> PathBuf {
        self.dir.join("mnt")
    }

    /// The path of a file on the mount.
    pub fn file(&self, name: &str) -> PathBuf {
        self.mnt().join(name)
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let program = binaries().join("forebay");
        assert!(program.is_file(), "{} is not built: run `cargo build --workspace` first", program.display());
        let mut command = Command::new(program);
        for name in ["FOREBAY_PREFIX", "FOREBAY_DISABLE", "LD_PRELOAD"] {
            command.env_remove(name);
        }
        command.env("FOREBAY_POOL", self.pool()).args(arguments);
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs a command that must succeed. Returns its output.
    #[track_caller]
    pub fn done(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "forebay {arguments:?}: {words}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs a command that must fail. Returns its messages.
    #[track_caller]
    pub fn refused(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(!output.status.success(), "forebay {arguments:?} succeeded");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Runs a line of shell in a program that sees the pool as /forebay.
    #[track_caller]
    pub fn preloaded(&self, line: &str) -> String {
        self.done(&["run", "--quiet", "--", "sh", "-c", line])
    }

    pub fn status(&self) -> Value {
        serde_json::from_str(&self.done(&["status", "--json"])).unwrap()
    }

    /// The number of a process of the pool, once it is ready.
    #[track_caller]
    pub fn pid(&self, of: &str) -> i32 {
        let end = Instant::now() + TIMEOUT;
        loop {
            let status = self.status();
            let mount = &status["mounts"][0];
            let pid = match of {
                "mount" if mount["state"] == "mounted" => mount["pid"].as_i64(),
                "mount" => None,
                "mover" => status["mover"]["pid"].as_i64(),
                other => status["pids"][other].as_i64(),
            };
            if let Some(pid) = pid {
                return pid as i32;
            }
            assert!(Instant::now() < end, "no {of}: {status:#}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn kill(&self, of: &str) {
        kill(self.pid(of));
    }

    #[track_caller]
    pub fn is_clean(&self) {
        let report: Value = serde_json::from_str(&self.done(&["fsck", "--json"])).unwrap();
        assert_eq!(report["clean"], true, "{report:#}");
    }
}

/// The state of a thread or process, by its directory in /proc: one letter, 'X' for one that has been reaped.
pub fn state(task: &Path) -> char {
    let Ok(stat) = std::fs::read_to_string(task.join("stat")) else { return 'X' };
    stat.rsplit(") ").next().and_then(|fields| fields.chars().next()).unwrap()
}

/// A stopped process, which continues when the test ends or fails.
pub struct Stopped(i32);

impl Stopped {
    pub fn new(pid: i32) -> Stopped {
        // SAFETY: a process of this test's pool, which is not reaped before its supervisor has noticed.
        unsafe { libc::kill(pid, libc::SIGSTOP) };
        let stopped = Stopped(pid);
        // The signal is sent to the process: its threads stop one after the other.
        wait_for("all threads stop", || {
            let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
            tasks.flatten().all(|task| matches!(state(&task.path()), 'T' | 'X'))
        });
        stopped
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // SAFETY: as above. It does nothing to a process that has ended.
        unsafe { libc::kill(self.0, libc::SIGCONT) };
    }
}

pub fn kill(pid: i32) {
    // SAFETY: a process of this test's pool, which is not reaped before its supervisor has noticed.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}

/// Retries until the condition holds.
#[track_caller]
pub fn wait_for(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !so() {
        assert!(Instant::now() < end, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// True when the kernel's table has a mount there.
pub fn is_mounted(at: &Path) -> bool {
    forebay_mount::mountpoint::mounted_on(at).is_some()
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = self.command(&["down", "--force"]).output();
        for at in [self.mnt(), self.pool().join("target")] {
            // Several mounts, one over another, if a test left them so.
            for _ in 0..4 {
                if is_mounted(&at) {
                    let _ = Command::new("umount").arg("-l").arg(&at).output();
                }
            }
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Contents in which no two ranges are equal, and no byte is zero.
pub fn bytes(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..count).map(|_| (next() >> 32) as u8 | 1).collect()
}

pub fn read(file: &File, from: usize, len: usize) -> std::io::Result<Vec<u8>> {
    let mut read = vec![0; len];
    file.read_exact_at(&mut read, from as u64).map(|()| read)
}

#[track_caller]
pub fn is_equal(file: &File, from: usize, expected: &[u8]) {
    let read = read(file, from, expected.len()).unwrap();
    assert!(read == expected, "other bytes than the store's from {from} on");
}
