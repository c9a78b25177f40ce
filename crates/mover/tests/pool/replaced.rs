//! The directory of a store is moved away, replaced by another one, or missing, while the mover runs and when it starts.
//! Nothing is taken for absent then, and nothing is written into another directory.

use std::path::PathBuf;
use std::process::Command;

use super::bed::{text, Bed};

/// A pool in front of a store with a directory that the pool has not listed, and a file that it has released.
fn bed() -> Bed {
    let bed = Bed::new("128MiB");
    std::fs::create_dir(bed.store().join("deep")).unwrap();
    std::fs::write(bed.store().join("deep/there"), "there\n").unwrap();
    std::fs::write(bed.store().join("released"), "released\n").unwrap();
    bed.attach_with("", &["--drain", "request"]);
    bed.sh("ls /forebay/s >$S/../listed");
    bed
}

fn aside(bed: &Bed) -> PathBuf {
    bed.store().with_file_name("aside")
}

fn kill_mover(bed: &Bed) {
    let before = bed.status()["mover"]["pid"].as_u64().unwrap();
    assert!(Command::new("kill").args(["-9", &before.to_string()]).status().unwrap().success());
    bed.wait("another mover runs", || {
        let mover = bed.status()["mover"].clone();
        mover["state"] == "up" && mover["pid"].as_u64() != Some(before)
    });
}

/// What a program gets: the error's text, in the C locale.
fn error(bed: &Bed, script: &str) -> String {
    let done = bed.run(&format!("cd /forebay/s; export LC_ALL=C; {script}"));
    assert!(!done.status.success(), "{script}: {}", text(&done));
    text(&done)
}

fn assert_is_unusable(bed: &Bed) {
    for script in ["cat deep/absent", "cat deep/there", "cat released", "ls deep"] {
        let said = error(bed, script);
        assert!(said.contains("Input/output error"), "{script}: {said}");
    }
    let done = bed.pool_verb(&["sync", "-r", "/s"]);
    assert!(!done.status.success(), "{}", text(&done));
    for word in ["cannot", "store"] {
        assert!(text(&done).contains(word), "{}", text(&done));
    }
    bed.wait("the status tells it", || bed.status()["mover"]["stores"][0]["last_error"].is_string());
}

#[test]
fn store_whose_directory_was_replaced_is_neither_read_nor_written() {
    for restarts in [false, true] {
        let bed = bed();
        bed.sh("echo mine > /forebay/s/mine");
        std::fs::rename(bed.store(), aside(&bed)).unwrap();
        std::fs::create_dir(bed.store()).unwrap();
        if restarts {
            kill_mover(&bed);
        }
        assert_is_unusable(&bed);
        assert_eq!(bed.stored(), [], "nothing is written into the other directory");
        std::fs::remove_dir(bed.store()).unwrap();
        std::fs::rename(aside(&bed), bed.store()).unwrap();
        assert_eq!(bed.sh("cd /forebay/s; cat deep/there released"), "there\nreleased\n", "{}", bed.log());
        let done = bed.pool_verb(&["sync", "-r", "/s"]);
        assert!(done.status.success(), "{}\nlog: {}", text(&done), bed.log());
        assert!(bed.stored().contains(&("mine".into(), b"mine\n".to_vec())), "{:?}", bed.stored());
        bed.sh("test ! -e /forebay/s/deep/absent");
    }
}

#[test]
fn store_whose_directory_is_missing_lacks_no_name() {
    for restarts in [false, true] {
        let bed = bed();
        bed.sh("echo mine > /forebay/s/mine");
        std::fs::rename(bed.store(), aside(&bed)).unwrap();
        if restarts {
            kill_mover(&bed);
        }
        assert_is_unusable(&bed);
        std::fs::rename(aside(&bed), bed.store()).unwrap();
        assert_eq!(bed.sh("cd /forebay/s; cat deep/there released"), "there\nreleased\n", "{}", bed.log());
        let done = bed.pool_verb(&["sync", "-r", "/s"]);
        assert!(done.status.success(), "{}\nlog: {}", text(&done), bed.log());
    }
}

#[test]
fn file_with_the_name_of_a_temporary_stays_in_the_pool_and_whole() {
    let bed = Bed::attached("128MiB", "", "");
    let name = ".forebay-h.00.1.1-1.tmp";
    bed.sh(&format!("cd /forebay/s; echo keep > {name}; echo other > other"));
    bed.wait("the other one is drained", || bed.stored().len() == 1);
    let done = bed.pool_verb(&["sync", "/s"]);
    assert!(!done.status.success() && text(&done).contains("another name"), "{}", text(&done));
    assert_eq!(bed.stored().len(), 1, "{:?}", bed.stored());
    bed.sh(&format!("cd /forebay/s; test \"$(cat {name})\" = keep; mv {name} plain"));
    bed.wait_drained();
    assert!(bed.stored().contains(&("plain".into(), b"keep\n".to_vec())), "{:?}", bed.stored());
}
