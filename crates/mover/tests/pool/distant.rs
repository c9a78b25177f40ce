//! Drains to a store each call of which takes a while, and whose new names are links: the file system of `forebay-bench
//! slow`, which needs root and FUSE.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use super::bed::{text, Bed};
use super::killing::kill;

/// A slow directory, unmounted and removed when this is dropped.
struct Slow {
    top: PathBuf,
    serving: Child,
}

impl Slow {
    /// None where it cannot be mounted.
    fn mounted(latency_ms: u32) -> Option<Slow> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let top = std::env::temp_dir().join(format!("forebay-distant-{}-{number}", std::process::id()));
        let program = Path::new(env!("CARGO_BIN_EXE_forebay-mover")).with_file_name("forebay-bench");
        if !program.exists() || !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
            eprintln!("skipped: a slow directory needs root, /dev/fuse, and {}", program.display());
            return None;
        }
        let [behind, at] = ["behind", "at"].map(|name| top.join(name));
        std::fs::create_dir_all(&behind).unwrap();
        std::fs::create_dir(&at).unwrap();
        let mut command = Command::new(program);
        command.arg("slow").args([&behind, &at]).args(["0".to_owned(), latency_ms.to_string()]);
        let mut slow = Slow { top, serving: command.spawn().unwrap() };
        let is_mounted = || {
            let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
            mounts.lines().any(|line| line.split(' ').nth(1) == at.to_str())
        };
        while !is_mounted() {
            if slow.serving.try_wait().unwrap().is_some() {
                eprintln!("skipped: no mount");
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(slow)
    }

    fn behind(&self) -> PathBuf {
        self.top.join("behind")
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(self.top.join("at")).status();
        if !unmounted.is_ok_and(|status| status.success()) {
            let _ = self.serving.kill();
        }
        let _ = self.serving.wait();
        let _ = std::fs::remove_dir_all(self.behind());
        let _ = std::fs::remove_dir(self.top.join("at"));
        let _ = std::fs::remove_dir(&self.top);
    }
}

/// A pool in front of it. The pool ends first.
struct Distant {
    bed: Bed,
    slow: Slow,
}

impl Distant {
    fn up(latency_ms: u32) -> Option<Distant> {
        let slow = Slow::mounted(latency_ms)?;
        let bed = Bed::new("256MiB");
        let at = slow.top.join("at");
        let attached = bed.pool_verb(&["attach", at.to_str().unwrap(), "/s", "--drain", "request"]);
        assert!(attached.status.success(), "{}", text(&attached));
        Some(Distant { bed, slow })
    }

    fn sync(&self) -> std::process::Output {
        self.bed.pool_verb(&["sync", "--no-progress", "-r", "/s"])
    }

    /// The store has what the pool has, and no temporary.
    fn assert_equal(&self) {
        let script = format!("diff -r --no-dereference /forebay/s {}", self.slow.behind().display());
        let different = self.bed.run(&script);
        assert!(different.status.success(), "{}\n{}", text(&different), self.bed.log());
    }

    /// When the files of the store, and its directories, came to be.
    fn births(&self) -> Option<(Vec<SystemTime>, Vec<SystemTime>)> {
        let (mut files, mut directories, mut left) = (Vec::new(), Vec::new(), vec![self.slow.behind()]);
        while let Some(directory) = left.pop() {
            for entry in std::fs::read_dir(directory).unwrap() {
                let entry = entry.unwrap();
                let metadata = entry.metadata().unwrap();
                let Ok(born) = metadata.created() else {
                    eprintln!("skipped: the file system does not keep when a file was made");
                    return None;
                };
                if metadata.is_dir() {
                    directories.push(born);
                    left.push(entry.path());
                } else {
                    files.push(born);
                }
            }
        }
        Some((files, directories))
    }
}

#[test]
fn files_of_a_distant_store_are_uploaded_while_directories_of_others_are_made() {
    let Some(on) = Distant::up(20) else { return };
    on.bed.sh("cd /forebay/s; mkdir -p t/there");
    let synced = on.sync();
    assert!(synced.status.success(), "{}", text(&synced));
    // Of a directory that is there, of new ones, one of them below another; with names of one file in two of them.
    on.bed.sh(
        "cd /forebay/s/t; echo there > there/f; for d in $(seq 30); do mkdir d$d; echo $d > d$d/f; done; mkdir d1/below;
        echo below > d1/below/f; ln d1/f d2/second; for i in $(seq 20); do echo $i > d3/f$i; done; ln -s f d4/link",
    );
    let synced = on.sync();
    assert!(synced.status.success(), "{}", text(&synced));
    on.assert_equal();
    let behind = on.slow.behind();
    let links = on.bed.sh(&format!("stat -c %h {}", behind.join("t/d2/second").display()));
    assert_eq!(links.trim(), "2");
    let Some((files, directories)) = on.births() else { return };
    let (first, last) = (files.iter().min().unwrap(), directories.iter().max().unwrap());
    assert!(first < last, "the first upload waited for the last directory");
}

#[test]
fn movers_that_are_killed_while_they_make_directories_and_upload_leave_store_and_pool_equal() {
    let Some(on) = Distant::up(4) else { return };
    for round in 0..8u32 {
        on.bed.sh(&format!(
            "mkdir /forebay/s/r{round}; cd /forebay/s/r{round}; for d in $(seq 12); do mkdir d$d; for f in 1 2; do
            echo $d $f > d$d/f$f; done; done; for i in $(seq 20); do echo $i > d3/w$i; done; ln d1/f1 d2/second; cd ..;
            test {round} = 0 || {{ mv r$(({round} - 1))/d1 moved{round}; echo more >> r$(({round} - 1))/d2/f2; }}"
        ));
        std::thread::scope(|scope| {
            // It may fail, since its mover is killed.
            scope.spawn(|| on.sync());
            std::thread::sleep(Duration::from_millis(u64::from(60 * (round + 1))));
            on.bed.status()["mover"]["pid"].as_u64().into_iter().for_each(kill);
        });
    }
    on.bed.wait("a mover drains all", || on.sync().status.success() && on.bed.sums()["pending"] == 0);
    on.bed.wait("what the killed ones left is removed", || {
        let left = Command::new("find").arg(on.slow.behind()).args(["-name", ".forebay-*"]).output().unwrap();
        left.stdout.is_empty()
    });
    on.assert_equal();
}
