//! A pool on a disk in front of a store, its death, and its recovery.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::{eventually, is_alive, is_root, kill, lock_holder, Place, Ran};
use serde_json::Value;

pub struct Bed {
    pub place: Place,
    pub pool: PathBuf,
    pub store: PathBuf,
}

impl Bed {
    /// A pool with an empty store attached at its root, with these options.
    pub fn new(attach: &[&str]) -> Bed {
        Bed::with(&[], attach)
    }

    /// The same, with a store that has these files.
    pub fn with(files: &[(&str, &str)], attach: &[&str]) -> Bed {
        let bed = Bed::without_store();
        for (name, content) in files {
            std::fs::write(bed.store.join(name), content).unwrap();
        }
        bed.ok(&[&["attach", bed.store.to_str().unwrap(), "/"], attach].concat());
        bed
    }

    pub fn without_store() -> Bed {
        let place = Place::new();
        let (pool, store) = (disk(&place).join("pool"), place.join("store"));
        std::fs::create_dir(&store).unwrap();
        let bed = Bed { place, pool, store };
        bed.up();
        bed
    }

    pub fn up(&self) {
        let path = self.pool.to_str().unwrap();
        self.place.ok([
            "up",
            "--media",
            "ssd",
            "--capacity",
            "256MiB",
            "--snapshots",
            "0.5s",
            "--path",
            path,
        ]);
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.place.command(arguments);
        command.env("FOREBAY_POOL", &self.pool);
        command
    }

    pub fn ok(&self, arguments: &[&str]) -> Ran {
        let ran = Ran::of(self.command(arguments).output().unwrap());
        assert_eq!(ran.code, Some(0), "{arguments:?}: {ran:?}");
        ran
    }

    /// Runs a shell command that sees the pool at `/forebay`.
    pub fn sh(&self, script: &str) -> Ran {
        self.ok(&["run", "--quiet", "--", "sh", "-e", "-c", script])
    }

    pub fn recover(&self, arguments: &[&str]) -> Ran {
        self.place.run([&["recover", self.pool.to_str().unwrap()], arguments].concat())
    }

    pub fn recovered(&self, arguments: &[&str]) -> Value {
        let ran = self.recover(&[&["--json"], arguments].concat());
        assert!(matches!(ran.code, Some(0 | 4)), "{ran:?}");
        serde_json::from_str(&ran.out).unwrap_or_else(|e| panic!("{e}: {ran:?}"))
    }

    pub fn stored(&self, name: &str) -> Option<String> {
        std::fs::read_to_string(self.store.join(name)).ok()
    }

    /// All names in the store's root.
    pub fn names(&self) -> BTreeSet<String> {
        std::fs::read_dir(&self.store)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    pub fn shard(&self, name: &str) -> PathBuf {
        self.pool.join("target/shard").join(name)
    }

    /// Waits for a snapshot that is newer than everything so far.
    pub fn await_snapshot(&self) {
        let modified = || std::fs::metadata(self.shard("snapshot")).and_then(|m| m.modified()).ok();
        for _ in 0..2 {
            // A request, so that there is something new.
            self.ok(&["ls", "/"]);
            let before = modified();
            eventually("a snapshot is taken", || modified() > before);
        }
    }

    /// Kills all processes of the pool, and the programs that use it.
    pub fn die(&self) {
        die(&self.pool);
    }

    /// As after a restart of the node: the shard on the medium may be torn.
    pub fn restart_node(&self) {
        std::fs::write(self.shard("boot"), "another boot\n").unwrap();
    }

    /// The names alone are gone: only marks are left.
    pub fn lose_shard(&self) {
        for name in ["data.mdb", "journal", "snapshot", "boot"] {
            let _ = std::fs::remove_file(self.shard(name));
        }
    }

    pub fn remove_marks(&self) {
        for path in backing_files(&self.pool) {
            let _ = rustix::fs::removexattr(&path, "user.forebay.mark");
        }
    }
}

/// A disk of the test's own, where this user may mount one: on a disk that others fill, programs wait for space.
pub fn disk(place: &Place) -> PathBuf {
    let (image, disk) = (place.join("disk.img"), place.join("disk"));
    std::fs::create_dir(&disk).unwrap();
    if !is_root() {
        return disk;
    }
    std::fs::File::create(&image).unwrap().set_len(512 << 20).unwrap();
    let run = |program: &str, arguments: &[&str], last: &Path| {
        let status =
            Command::new(program).args(arguments).arg(&image).arg(last).stdout(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    let made = Command::new("mkfs.ext4").args(["-q", "-O", "^has_journal"]).arg(&image).status();
    if !made.is_ok_and(|status| status.success()) || !run("mount", &["-o", "loop"], &disk) {
        eprintln!("no file system of the test's own: its disk is that of /tmp");
    }
    disk
}

/// The backing files of a target.
pub fn backing_files(pool: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for directory in std::fs::read_dir(pool.join("target/data")).unwrap() {
        all.extend(std::fs::read_dir(directory.unwrap().path()).unwrap().map(|entry| entry.unwrap().path()));
    }
    all
}

pub fn has_mark(path: &Path) -> bool {
    rustix::fs::getxattr(path, "user.forebay.mark", &mut [0u8; 4000][..]).is_ok()
}

fn children(of: i32) -> Vec<i32> {
    let path = format!("/proc/{of}/task");
    let tasks = std::fs::read_dir(path).into_iter().flatten().flatten();
    tasks
        .filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|text| text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// Kills the daemon of the pool and all that it started.
pub fn die(pool: &Path) {
    let supervisor = lock_holder(pool).expect("the pool is not up");
    // It must not start anything again.
    kill(supervisor, libc::SIGSTOP);
    let mut all = vec![supervisor];
    let mut at = 0;
    while at < all.len() {
        all.extend(children(all[at]));
        at += 1;
    }
    all.iter().rev().for_each(|pid| kill(*pid, libc::SIGKILL));
    eventually("the pool's processes are dead", || all.iter().all(|pid| !is_alive(*pid)));
    // A process whose first thread has ended may have others that end after it, and hold the lock until then.
    let lock = std::fs::File::open(pool.join("lock")).unwrap();
    eventually("the pool's lock is free", || lock.try_lock_shared().is_ok());
}
