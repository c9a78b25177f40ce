//! Pools that could not start, and pools that have ended, leave nothing behind.

mod common;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

use common::{eventually, is_root, start, Place, Ran};

#[test]
fn directories_above_pools_go_with_the_last_pool() {
    let place = Place::new();
    place.run(["status"]).assert_refused(1, &["there is no such directory"]);
    assert!(!place.user_directory().exists(), "a look makes nothing");
    place.ok(["up", "--capacity", "64MiB"]);
    place.ok(["run", "--own", "true"]);
    eventually("the run's pool is gone", || std::fs::read_dir(place.user_directory()).unwrap().count() == 1);
    place.ok(["down"]);
    place.assert_nothing_left();
    // A pool on a disk, and one that could not start.
    let mut command = place.command(["run", "--media", "ssd", "--capacity", "64MiB", "true"]);
    assert_eq!(Ran::of(command.env("TMPDIR", &place.path).output().unwrap()).code, Some(0));
    place.run(["run", "--capacity", "900TiB", "true"]).assert_refused(125, &["too large"]);
    eventually("nothing is left", || std::fs::read_dir(&place.path).unwrap().count() == 0);
}

#[test]
fn runs_that_end_and_start_at_the_same_time_do_not_take_each_others_directory() {
    let place = Place::new();
    for _ in 0..6 {
        let mut runs: Vec<_> = (0..4).map(|_| start(place.command(["run", "--quiet", "true"]))).collect();
        assert!(runs.iter_mut().all(|run| run.wait().success()));
    }
    place.assert_nothing_left();
}

/// A tmpfs that is or may be mounted at the path; dropping this unmounts it.
struct Full<'a>(&'a Path);

impl Full<'_> {
    fn mount<'a>(at: &'a Path, options: &str, fill: bool) -> Full<'a> {
        let status = Command::new("mount").args(["-t", "tmpfs", "-o", options, "full"]).arg(at).status();
        assert!(status.unwrap().success());
        let full = Full(at);
        if fill {
            // The write ends with ENOSPC, when nothing is free.
            let _ = std::fs::write(at.join("fill"), vec![1u8; 1 << 20]);
        }
        full
    }
}

impl Drop for Full<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0).output();
    }
}

#[test]
fn run_where_the_directory_for_pools_is_full_leaves_nothing_there() {
    if !is_root() {
        println!("skipped: only root may mount a full file system");
        return;
    }
    let place = Place::new();
    let at = place.join("tmp");
    std::fs::create_dir(&at).unwrap();
    // First no free bytes; then no inode for the user's directory, the start's lock, the pool's directory, its lock,
    // its log, and so on.
    let media =
        ["size=64k,nr_inodes=20", "nr_inodes=3", "nr_inodes=4", "nr_inodes=5", "nr_inodes=6", "nr_inodes=7"];
    for (number, options) in media.into_iter().enumerate() {
        let full = Full::mount(&at, options, number == 0);
        let mut command = place.command(["run", "--capacity", "64MiB", "true"]);
        let ran = Ran::of(command.env("FOREBAY_TMPDIR", &at).output().unwrap());
        ran.assert_refused(125, &["No space left", "hint:"]);
        let left = || -> Vec<_> {
            let entries = std::fs::read_dir(&at).unwrap().flatten();
            entries.map(|e| e.file_name()).filter(|name| name != "fill").collect()
        };
        eventually(&format!("nothing is left with {options}: {:?}", left()), || left().is_empty());
        drop(full);
    }
    assert_eq!(place.mounts(), Vec::<String>::new());
}

#[test]
fn up_in_a_directory_whose_path_is_not_utf_8_is_refused_before_anything_is_made() {
    let place = Place::new();
    let odd = place.path.join(OsStr::from_bytes(b"p\xffq"));
    let target = odd.join("target");
    let _left = Full(&target);
    let ran = Ran::of(place.command(["up", "--capacity", "64MiB", "--path"]).arg(&odd).output().unwrap());
    ran.assert_refused(1, &["cannot make a pool in", "its path is not UTF-8", "--path DIR"]);
    assert!(!odd.exists());
    let table = std::fs::read("/proc/self/mountinfo").unwrap();
    let ours = place.path.as_os_str().as_bytes();
    assert!(!table.windows(ours.len()).any(|part| part == ours), "nothing is mounted there");
}
