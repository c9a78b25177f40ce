//! A medium that is really full: a tiny tmpfs, if this process may mount one.

mod trees;

use std::path::{Path, PathBuf};

use forebay_stage::{stage_between, Pair, Quiet, StageOptions, Way};
use forebay_types::Code;
use rustix::mount::{mount, unmount, MountFlags, UnmountFlags};
use trees::{assert_no_temporaries, noise, snapshot, Scratch};

/// A mounted tmpfs that is unmounted when it is dropped.
struct Tiny(PathBuf);

impl Tiny {
    fn mount(at: &Path, options: &str) -> Option<Tiny> {
        std::fs::create_dir(at).unwrap();
        let options = std::ffi::CString::new(options).unwrap();
        match mount("forebay-test", at, "tmpfs", MountFlags::empty(), Some(options.as_c_str())) {
            Ok(()) => Some(Tiny(at.to_path_buf())),
            Err(e) => {
                eprintln!("SKIPPED: this test needs to mount a tmpfs, which is not allowed here: {e}");
                None
            }
        }
    }
}

impl Drop for Tiny {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

fn pairs(source: &Path, destination: &Path) -> [Pair; 1] {
    [Pair { source: source.into(), destination: destination.into() }]
}

#[test]
fn stage_onto_a_full_medium_is_told_with_numbers_and_can_go_on_when_there_is_space() {
    let scratch = Scratch::within(&std::env::temp_dir());
    let store = scratch.join("store");
    std::fs::create_dir(&store).unwrap();
    for i in 0..40 {
        std::fs::write(store.join(format!("f{i:02}")), noise(200_000, i)).unwrap();
    }
    std::fs::write(store.join("large"), noise(70 << 20, 99)).unwrap();
    let all = snapshot(&store);
    for (n, way) in [Way::In, Way::Out].into_iter().enumerate() {
        let Some(tiny) = Tiny::mount(&scratch.join(&format!("tiny-{n}")), "size=4m") else { return };
        let target = tiny.0.join("out");
        let options = StageOptions { all_or_nothing: true, ..StageOptions::default() };
        let report = stage_between(way, &pairs(&store, &target), &options, &Quiet).unwrap();
        assert!(report.rolled_back && !target.exists());

        let report = stage_between(way, &pairs(&store, &target), &StageOptions::default(), &Quiet).unwrap();
        let error = report.outcome().unwrap_err();
        assert_eq!(error.code, Code::NoSpace);
        assert!(error.why.contains("No space left on device"), "{error}");
        assert!(error.why.contains("needs") && error.why.contains("free"), "{error}");
        assert!(error.cure.contains("run it again"), "{error}");
        assert_no_temporaries(&tiny.0);
        for (path, item) in snapshot(&target).iter().filter(|(_, item)| item.kind == 0o100_000) {
            assert_eq!(Some(item), all.get(path), "torn: {}", path.escape_ascii());
        }

        // The space of removed copies is free again, and with more space the same call finishes.
        let more = std::ffi::CString::new("size=128m").unwrap();
        rustix::mount::mount_remount(&tiny.0, MountFlags::empty(), more.as_c_str()).unwrap();
        let report = stage_between(way, &pairs(&store, &target), &StageOptions::default(), &Quiet).unwrap();
        report.outcome().unwrap();
        let (mut a, mut b) = (all.clone(), snapshot(&target));
        // Snapshots of different file systems differ only in the granularity of holes.
        a.values_mut().chain(b.values_mut()).for_each(|item| item.data.clear());
        trees::assert_same(&a, &b);
    }
}

#[test]
fn stage_onto_a_medium_without_inodes_says_so() {
    let scratch = Scratch::within(&std::env::temp_dir());
    let store = scratch.join("store");
    std::fs::create_dir(&store).unwrap();
    for i in 0..100 {
        std::fs::write(store.join(format!("f{i:02}")), b"x").unwrap();
    }
    let Some(tiny) = Tiny::mount(&scratch.join("tiny"), "size=4m,nr_inodes=20") else { return };
    let pairs = pairs(&store, &tiny.0.join("out"));
    let report = stage_between(Way::Out, &pairs, &StageOptions::default(), &Quiet).unwrap();
    let error = report.outcome().unwrap_err();
    assert_eq!(error.code, Code::NoSpace);
    assert!(error.why.contains("no inodes are free") || error.why.contains("free"), "{error}");
    assert_no_temporaries(&tiny.0);
}
