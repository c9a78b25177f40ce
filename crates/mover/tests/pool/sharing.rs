//! Two pools in front of one directory, whose movers drain and sweep at the same time.

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use super::bed::{text, Bed};
use super::killing::kill;

/// Kills of the second pool's mover.
const KILLS: usize = 8;

/// A pool of its own in front of the store of `other`.
fn beside(other: &Bed, options: &str) -> Bed {
    let bed = Bed::new("256MiB");
    let url = format!("file://{}{options}", other.store().display());
    let done = bed.pool_verb(&["attach", &url, "/s"]);
    assert!(done.status.success(), "{}", text(&done));
    bed
}

/// A program that writes new files and replaces old ones, in the directories of both pools, as long as a file is there.
fn writer(bed: &Bed, who: &str, goes_on: &Path) -> Child {
    let script = format!(
        "cd /forebay/s; mkdir -p d d/e; i=0; while test -e {}; do i=$((i + 1)); f=$((i % 23)); \
         for d in d d/e; do head -c $((RANDOM * 9)) /dev/urandom > $d/{who}-$f; done; \
         test $((i % 5)) = 0 && mv -f d/{who}-$f d/e/{who}-moved; test $((i % 7)) = 0 && rm -f d/e/{who}-$f; \
         test $f = 0 && head -c 9000000 /dev/urandom > d/{who}-large; sleep 0.02; done",
        goes_on.display()
    );
    let mut command = bed.command(&script);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn mover(bed: &Bed) -> Option<u64> {
    bed.status()["mover"]["pid"].as_u64()
}

fn all_below(directory: &Path, all: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap().flatten() {
        if entry.file_type().unwrap().is_dir() {
            all_below(&entry.path(), all);
        }
        all.push(entry.path());
    }
}

#[test]
fn sweeps_of_two_movers_leave_what_the_other_one_uploads() {
    // Each call takes a while: there are uploads at every moment.
    let options = "?latency=5ms";
    let one = Bed::new("256MiB");
    one.attach_with(options, &[]);
    let two = beside(&one, options);
    // It goes with the first pool, also when this process is killed.
    let goes_on = one.pool().with_file_name("goes-on");
    std::fs::write(&goes_on, "").unwrap();
    let writers = [writer(&one, "one", &goes_on), writer(&two, "two", &goes_on)];
    for _ in 0..KILLS {
        std::thread::sleep(std::time::Duration::from_millis(900));
        let killed = mover(&two).unwrap();
        kill(killed);
        // The next one sweeps where the last one uploaded.
        two.wait("it has another mover", || mover(&two).is_some_and(|now| now != killed));
    }
    std::fs::remove_file(&goes_on).unwrap();
    for mut writer in writers {
        assert!(writer.wait().unwrap().success());
    }
    for (bed, who) in [(&one, "one"), (&two, "two")] {
        bed.wait_drained();
        let compare = format!(
            "cd /forebay/s; find . -name '{who}-*' | sort | while read f; do cmp $f {}/$f; done",
            one.store().display()
        );
        assert_eq!(bed.sh(&compare), "", "{}", bed.log());
        let listed = |at: &str| bed.sh(&format!("cd {at}; find . -name '{who}-*' | sort"));
        assert_eq!(listed("/forebay/s"), listed(&one.store().display().to_string()));
        let whole_log = std::fs::read_to_string(bed.pool().join("log")).unwrap();
        assert!(!whole_log.contains("was removed before"), "{whole_log}");
        assert_eq!(bed.status()["mover"]["conflicts"], 0, "{whole_log}");
    }
    assert_eq!(one.status()["mover"]["restarts"], 0);
    let mut all = Vec::new();
    all_below(&one.store(), &mut all);
    all.retain(|path| path.file_name().unwrap().to_string_lossy().starts_with(".forebay-"));
    assert_eq!(all, Vec::<PathBuf>::new());
}
