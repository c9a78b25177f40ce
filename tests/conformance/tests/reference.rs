//! The suite on plain directories: what Linux does is the reference, so every case must pass there, and a door that
//! lies must not.

use forebay_conformance::harness::{suite, Scratch, Summary};
use forebay_conformance::wrong_door::Lie;

const SPELLINGS: [&str; 3] = ["absolute", "relative", "at"];

fn root() -> bool {
    // SAFETY: no memory is passed.
    unsafe { libc::geteuid() == 0 }
}

#[track_caller]
fn passes(summary: &Summary, at_least: usize) {
    assert_eq!(summary.failed, 0, "{}", summary.output);
    assert!(
        summary.passed >= at_least,
        "{} cases passed, expected {at_least}\n{}",
        summary.passed,
        summary.output
    );
}

#[test]
fn suite_on_a_directory_of_the_disk_passes() {
    for spelling in SPELLINGS {
        let scratch = Scratch::on_disk();
        let summary = suite(&["--root", scratch.text(), "--spelling", spelling]);
        passes(&summary, 90);
    }
}

#[test]
fn suite_as_another_user_passes() {
    if !root() {
        eprintln!("not root: the test above is this one");
        return;
    }
    let scratch = Scratch::in_memory();
    scratch.give_to(65_534);
    passes(&suite(&["--root", scratch.text(), "--user", "65534"]), 90);
}

#[test]
fn suite_on_a_small_tmpfs_passes_and_fills_it() {
    let scratch = Scratch::in_memory();
    if root() {
        let claims = ["xattrs", "own-space", "small-space"].map(|c| ["--claim", c]).concat();
        let mount = ["--root", scratch.text(), "--private-tmpfs", "size=64m,nr_inodes=20000,mode=755"];
        let summary = suite(&[&mount[..], &claims].concat());
        if !summary.output.contains("no tmpfs can be mounted") {
            return passes(&summary, 95);
        }
        eprintln!("{}", summary.output);
    }
    // Where nothing may be mounted, the cases that fill a file system are left to the doors.
    passes(&suite(&["--root", scratch.text()]), 90);
}

#[test]
fn every_lie_is_found_out() {
    for lie in Lie::ALL {
        let scratch = Scratch::in_memory();
        let lie = format!("{lie:?}");
        let summary = suite(&["--root", scratch.text(), "--lie", &lie]);
        assert!(summary.failed > 0, "the suite believes a door that lies ({lie}):\n{}", summary.output);
    }
}
