//! The limit of what a process has copied from a backing store by reading (`forebay attach --recall`): through the mount,
//! where a process is told by the thread that opens, and in preloaded programs.

mod common;

use common::Place;
use std::fs::File;
use std::path::{Path, PathBuf};

use serde_json::Value;

const MIB: usize = 1 << 20;

/// A mounted pool that shows a store at `/s`, with the files `f0` to `f9` of 1 MiB and `large` of 17 MiB, all released.
struct Limited {
    place: Place,
}

impl Limited {
    fn up(recall: &str) -> Option<Limited> {
        let place = Place::of(&["--capacity", "256MiB"])?;
        let store = place.dir.join("store");
        std::fs::create_dir(&store).unwrap();
        for i in 0..10u8 {
            std::fs::write(store.join(format!("f{i}")), vec![b'0' + i; MIB]).unwrap();
        }
        std::fs::write(store.join("large"), vec![b'x'; 17 * MIB]).unwrap();
        place.done(&["attach", store.to_str().unwrap(), "/s", "--recall", recall]);
        place.done(&["mount", place.mnt().to_str().unwrap()]);
        Some(Limited { place })
    }

    fn at(&self, name: &str) -> PathBuf {
        self.place.mnt().join("s").join(name)
    }

    fn state(&self, name: &str) -> String {
        let all: Value =
            serde_json::from_str(&self.place.done(&["state", &format!("/s/{name}"), "--json"])).unwrap();
        all[0]["state"].as_str().unwrap_or_default().to_owned()
    }

    fn refusals_in_log(&self) -> usize {
        let log = std::fs::read_to_string(self.place.pool().join("log")).unwrap();
        log.lines().filter(|line| line.contains("cannot open more released files")).count()
    }
}

fn error_of(path: &Path) -> Option<i32> {
    File::open(path).err().and_then(|e| e.raw_os_error())
}

#[test]
fn process_that_reads_through_the_mount_has_as_much_copied_as_the_setting_says() {
    let Some(on) = Limited::up("3MiB") else { return };
    for i in 0..3u8 {
        assert!(std::fs::read(on.at(&format!("f{i}"))).unwrap() == vec![b'0' + i; MIB]);
    }
    assert_eq!(error_of(&on.at("f3")), Some(libc::ENODATA));
    assert_eq!(error_of(&on.at("large")), Some(libc::ENODATA));
    let by_thread = on.at("f3");
    assert_eq!(std::thread::spawn(move || error_of(&by_thread)).join().unwrap(), Some(libc::ENODATA));
    assert_eq!((on.state("f3").as_str(), on.state("large").as_str()), ("released", "released"));
    assert_eq!(on.refusals_in_log(), 1, "once for a process");
    // What is in the pool is read, what is written is copied, and so is what a user asks for.
    assert!(std::fs::read(on.at("f0")).unwrap() == vec![b'0'; MIB]);
    drop(File::options().append(true).open(on.at("f4")).unwrap());
    assert_ne!(on.state("f4"), "released");
    on.place.done(&["prestage", "/s/f5"]);
    assert!(std::fs::read(on.at("f5")).unwrap() == vec![b'5'; MIB]);
    // Another process, the child of this one.
    let copied = std::process::Command::new("cat").arg(on.at("f6")).output().unwrap();
    assert!(copied.status.success() && copied.stdout == vec![b'6'; MIB]);
    let shown = on.place.done(&["state", "/s"]);
    assert!(shown.contains("a process has at most 3 MiB copied within 10 minutes"), "{shown}");
    let shown: Value = serde_json::from_str(&on.place.done(&["state", "/s", "--json"])).unwrap();
    assert_eq!(shown[0]["store"]["recall"], (3 * MIB).to_string());
    on.place.is_clean();
}

#[test]
fn preloaded_process_has_as_much_copied_as_the_setting_says() {
    let Some(on) = Limited::up("2MiB") else { return };
    // The shell itself opens what a built-in reads.
    let opens = "cd /forebay/s; for i in 0 1 2 3; do { true < f$i; } 2>/dev/null && echo $i; done; true < f1 && echo again";
    assert_eq!(on.place.preloaded(opens), "0\n1\nagain\n");
    assert_eq!(on.state("f3"), "released");
    let shown = on.place.preloaded(
        "cd /forebay/s; { true < large; } 2>/dev/null || echo no; true >> f2 && echo written; cat f3 f4 | wc -c",
    );
    assert_eq!(shown, format!("no\nwritten\n{}\n", 2 * MIB));
    assert_ne!(on.state("f2"), "released");
    on.place.is_clean();
}

#[test]
fn nothing_is_copied_for_readers_of_a_store_whose_setting_is_no() {
    let Some(on) = Limited::up("no") else { return };
    assert_eq!(error_of(&on.at("f0")), Some(libc::ENODATA));
    let shown = on.place.preloaded(
        "cd /forebay/s; { true < f0; } 2>/dev/null || echo no; cat f0 2>&1 >/dev/null | grep -c 'No data'",
    );
    assert_eq!(shown, "no\n1\n");
    drop(File::options().write(true).open(on.at("f0")).unwrap());
    assert!(std::fs::read(on.at("f0")).unwrap() == vec![b'0'; MIB], "it is in the pool by now");
    let refused = on.place.refused(&["attach", "/tmp", "/t", "--recall", "some"]);
    assert!(refused.contains("neither yes nor no"), "{refused}");
}
