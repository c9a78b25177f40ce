//! What the tests of this crate stand on: scratch directories, the built binaries, pools, and runs of the suite.
//!
//! Everything made here is taken away when it is dropped, also when the test panics.

use std::fs;
use std::os::unix::fs::{chown, PermissionsExt};
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
