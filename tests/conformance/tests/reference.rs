//! The suite on plain directories. Linux is the reference: every case must pass there, and a door with a planted defect
//! must fail.

use forebay_conformance::harness::{is_root, suite, Scratch};
use forebay_conformance::wrong_door::Lie;

const SPELLINGS: [&str; 3] = ["absolute", "relative", "at"];
/// Abilities that a plain directory may lack, depending on its file system.
const NOT_CLAIMED: &[&str] = &["Xattrs", "LargeXattrs", "OwnSpace", "SmallSpace"];
const ROOT_OR_NOT: &[&str] = &["Root", "NotRoot"];

#[test]
fn suite_on_a_directory_of_the_disk_passes() {
    for spelling in SPELLINGS {
        let scratch = Scratch::on_disk();
        let summary = suite(&["--root", scratch.text(), "--spelling", spelling]);
        summary.passed_but_for(&[NOT_CLAIMED, ROOT_OR_NOT].concat());
    }
}

#[test]
fn suite_as_another_user_passes() {
    if !is_root() {
        eprintln!("not root: the test above is this one");
        return;
    }
    let scratch = Scratch::in_memory();
    scratch.give_to(65_534);
    let summary = suite(&["--root", scratch.text(), "--user", "65534"]);
    summary.passed_but_for(&[NOT_CLAIMED, &["Root"]].concat());
}

#[test]
fn suite_on_a_small_tmpfs_passes_and_fills_it() {
    let scratch = Scratch::in_memory();
    if is_root() {
        let claims = ["xattrs", "own-space", "small-space"].map(|c| ["--claim", c]).concat();
        let mount = ["--root", scratch.text(), "--private-tmpfs", "size=64m,nr_inodes=20000,mode=755"];
        let summary = suite(&[&mount[..], &claims].concat());
        if !summary.output.contains("no tmpfs can be mounted") {
            return summary.passed_but_for(&["LargeXattrs", "NotRoot"]);
        }
        eprintln!("{}", summary.output);
    }
    // If this user may not mount, the cases that fill a file system run only through the doors of pools.
    suite(&["--root", scratch.text()]).passed_but_for(&[NOT_CLAIMED, ROOT_OR_NOT].concat());
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
