//! What is recovered with marks alone, snapshots alone, both, a shard that was left, and none of them.

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use crate::bed::{backing_files, has_mark, Bed};
use crate::common::eventually;
use serde_json::Value;

/// Files that the store does not have: the policy copies nothing by itself.
fn written() -> Bed {
    let bed = Bed::with(&[("old", "the store's\n")], &["--drain", "request"]);
    bed.sh(
        "cd /forebay; mkdir -m 750 d; echo one >d/one; chmod 640 d/one; touch -d '2020-02-02 02:02:02 UTC' d/one; \
         echo changed >old; truncate -s 1M sparse; echo end >>sparse; ln -s d/one link; \
         printf 'sh\\n' >two; ln two d/two",
    );
    bed
}

fn fate<'a>(report: &'a Value, path: &str) -> &'a str {
    let files = report["files"].as_array().unwrap();
    let file = files.iter().find(|file| file["path"] == path).unwrap_or_else(|| panic!("{path}: {report}"));
    file["fate"].as_str().unwrap()
}

fn check_files(bed: &Bed) {
    assert_eq!(bed.stored("d/one").as_deref(), Some("one\n"));
    let one = std::fs::metadata(bed.store.join("d/one")).unwrap();
    assert_eq!((one.permissions().mode() & 0o7777, one.mtime()), (0o640, 1_580_608_922));
    assert_eq!(bed.stored("old").as_deref(), Some("the store's\n"), "nothing is replaced");
    let beside: Vec<_> =
        bed.names().into_iter().filter(|name| name.starts_with("old.forebay-recovered-")).collect();
    assert_eq!(beside.len(), 1, "{:?}", bed.names());
    assert_eq!(bed.stored(&beside[0]).as_deref(), Some("changed\n"));
    let sparse = std::fs::metadata(bed.store.join("sparse")).unwrap();
    assert_eq!(sparse.len(), (1 << 20) + 4);
    assert!(sparse.blocks() * 512 < 256 * 1024, "the hole is filled: {} blocks", sparse.blocks());
    assert!(!bed.names().iter().any(|name| name.starts_with(".forebay-")), "{:?}", bed.names());
}

#[test]
fn shard_that_was_left_by_killed_processes_gives_everything() {
    let bed = written();
    bed.die();
    let report = bed.recovered(&[]);
    assert_eq!(report["complete"], true, "{report}");
    assert!(report["files"].as_array().unwrap().iter().all(|file| file["source"] != "snapshot"), "{report}");
    check_files(&bed);
    assert_eq!(std::fs::read_link(bed.store.join("link")).unwrap().to_str(), Some("d/one"));
    let d = std::fs::metadata(bed.store.join("d")).unwrap();
    assert_eq!(d.permissions().mode() & 0o7777, 0o750);
    assert_eq!((bed.stored("two"), bed.stored("d/two")), (Some("sh\n".into()), Some("sh\n".into())));
    // Again: nothing is written twice.
    let names = bed.names();
    let again = bed.recovered(&[]);
    assert_eq!(bed.names(), names);
    assert_eq!(fate(&again, "/old"), "already", "{again}");
    assert_eq!(again["sums"]["recovered"], Value::Null, "{again}");
    // Then the pool's directory goes, as it was wished.
    bed.place.ok(["recover", "--discard", bed.pool.to_str().unwrap()]);
    assert!(!bed.pool.exists());
}

#[test]
fn snapshot_alone_gives_everything_of_its_time() {
    let bed = written();
    bed.await_snapshot();
    bed.die();
    bed.restart_node();
    bed.remove_marks();
    std::fs::remove_file(bed.shard("data.mdb")).unwrap();
    std::fs::remove_file(bed.shard("journal")).unwrap();
    let report = bed.recovered(&[]);
    assert_eq!(report["complete"], true, "{report}");
    assert_eq!(fate(&report, "/d/one"), "recovered");
    check_files(&bed);
    assert_eq!(std::fs::read_link(bed.store.join("link")).unwrap().to_str(), Some("d/one"));
}

#[test]
fn marks_alone_give_files_with_attributes() {
    let bed = written();
    bed.sh("cd /forebay; sync d/one; sync old; sync sparse; sync two; sync .");
    // Names and attributes that came after the mark reach it too.
    bed.sh("cd /forebay; echo tmp >x.tmp; sync x.tmp; mv x.tmp x.final; sync .");
    bed.die();
    bed.lose_shard();
    let report = bed.recovered(&[]);
    assert_eq!(report["complete"], true, "{report}");
    check_files(&bed);
    assert_eq!(bed.stored("x.final").as_deref(), Some("tmp\n"));
    assert_eq!(bed.stored("x.tmp"), None);
}

#[test]
fn attributes_that_changed_after_the_mark_are_durable_once_fsync_has_returned() {
    let bed = Bed::new(&["--drain", "request"]);
    bed.sh("cd /forebay; for i in 1 2 3 4; do echo $i >f$i; done; sync f1 f2 f3 f4");
    // At once: the mover's own next pass would find the change too.
    bed.sh(
        "cd /forebay; for i in 1 2 3 4; do chmod 60$i f$i; touch -d '2020-02-02 02:02:02 UTC' f$i; sync f$i; done",
    );
    bed.die();
    bed.lose_shard();
    let report = bed.recovered(&[]);
    assert_eq!(report["complete"], true, "{report}");
    for i in 1..=4 {
        let file = std::fs::metadata(bed.store.join(format!("f{i}"))).unwrap();
        assert_eq!((file.permissions().mode() & 0o7777, file.mtime()), (0o600 + i, 1_580_608_922), "f{i}");
    }
}

#[test]
fn torn_shard_and_torn_snapshot_are_not_used() {
    let bed = written();
    bed.sh("cd /forebay; sync d/one; sync old; sync sparse");
    bed.await_snapshot();
    bed.die();
    bed.restart_node();
    // LMDB would be killed by this one.
    let shard = bed.shard("data.mdb");
    let bytes = std::fs::read(&shard).unwrap();
    let mut torn = bytes[..8192].to_vec();
    torn.extend(bytes[8192..(64 << 10).min(bytes.len())].iter().map(|byte| !byte));
    std::fs::write(&shard, &torn).unwrap();
    let snapshot = bed.shard("snapshot");
    let mut bytes = std::fs::read(&snapshot).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&snapshot, &bytes).unwrap();
    let report = bed.recovered(&[]);
    let notes = report["notes"].to_string();
    for word in ["its checksum is wrong", "it is torn"] {
        assert!(notes.contains(word), "{word} is not said: {report}");
    }
    check_files(&bed);
    // And a snapshot that was cut off.
    std::fs::write(&snapshot, &bytes[..middle / 4096 * 4096]).unwrap();
    assert!(bed.recovered(&["--list"])["notes"].to_string().contains("not written to its end"));
}

#[test]
fn what_is_newer_than_the_snapshot_is_known_by_its_mark() {
    let bed = Bed::new(&["--drain", "request"]);
    bed.sh("cd /forebay; echo before >kept; echo old >renamed.tmp; echo gone >removed");
    bed.await_snapshot();
    // No further snapshot: the names below are in marks alone.
    let snapshot = std::fs::read(bed.shard("snapshot")).unwrap();
    bed.sh(
        "cd /forebay; rm removed; mv renamed.tmp renamed; echo more >>kept; sync kept; echo new >new; sync new; sync .",
    );
    bed.die();
    bed.restart_node();
    std::fs::remove_file(bed.shard("data.mdb")).unwrap();
    std::fs::write(bed.shard("snapshot"), snapshot).unwrap();
    let report = bed.recovered(&[]);
    assert_eq!(report["complete"], true, "{report}");
    let files = [("kept", "before\nmore\n"), ("renamed", "old\n"), ("new", "new\n")];
    assert_eq!(bed.names(), files.iter().map(|(name, _)| (*name).to_owned()).collect());
    for (name, content) in files {
        assert_eq!(bed.stored(name).as_deref(), Some(content), "{name}");
    }
}

#[test]
fn clean_files_are_left_alone_and_temporary_ones_too() {
    let bed = Bed::with(&[("read", "restored\n")], &["--rule", "*.scratch=temporary"]);
    bed.sh("cd /forebay; cat read; echo drained >drained; echo x >a.scratch; sync a.scratch");
    bed.ok(&["wait-durable", "/drained", "--timeout", "60s"]);
    eventually("the drained file is marked clean, and the restored one", || {
        backing_files(&bed.pool).iter().filter(|path| has_mark(path)).count() >= 2
    });
    bed.await_snapshot();
    bed.die();
    bed.restart_node();
    let inode = std::fs::metadata(bed.store.join("drained")).unwrap().ino();
    let report = bed.recovered(&[]);
    assert_eq!(report["complete"], true, "{report}");
    assert_eq!(fate(&report, "/a.scratch"), "temporary");
    assert_eq!(std::fs::metadata(bed.store.join("drained")).unwrap().ino(), inode);
    assert_eq!(bed.names(), ["drained", "read"].map(str::to_owned).into());
}

#[test]
fn pool_without_a_store_is_recovered_to_where_it_is_wanted() {
    let bed = Bed::without_store();
    bed.sh("mkdir /forebay/d; echo data >/forebay/d/file");
    bed.await_snapshot();
    bed.die();
    bed.restart_node();
    std::fs::remove_file(bed.shard("data.mdb")).unwrap();
    let ran = bed.recover(&[]);
    assert_eq!(ran.code, Some(4), "{ran:?}");
    assert!(ran.out.contains("/d/file") && ran.out.contains("name one with --to"), "{ran:?}");
    let report = bed.recovered(&["--to", bed.store.to_str().unwrap()]);
    assert_eq!(report["complete"], true, "{report}");
    assert_eq!(bed.stored("d/file").as_deref(), Some("data\n"));
}

#[test]
fn data_without_any_name_are_recovered_on_request() {
    let bed = Bed::without_store();
    bed.sh("echo data >/forebay/file");
    bed.die();
    bed.lose_shard();
    let report = bed.recovered(&[]);
    assert_eq!(report["sums"]["unnamed"]["files"], 1, "{report}");
    assert!(bed.names().is_empty());
    let ran = bed.recover(&["--unnamed"]);
    ran.assert_refused(1, &["--to"]);
    let report = bed.recovered(&["--unnamed", "--to", bed.store.to_str().unwrap()]);
    assert_eq!(report["complete"], true, "{report}");
    let directory = std::fs::read_dir(&bed.store).unwrap().next().unwrap().unwrap().path();
    let file = std::fs::read_dir(directory).unwrap().next().unwrap().unwrap().path();
    assert_eq!(std::fs::read_to_string(file).unwrap(), "data\n");
}

#[test]
fn pool_keeps_its_setting_of_snapshots() {
    let bed = Bed::without_store();
    let pool = bed.pool.to_str().unwrap();
    let up = |more: &[&str]| bed.place.ok([&["up", "--media", "ssd", "--path", pool], more].concat());
    let setting = || -> Value {
        let text = std::fs::read_to_string(bed.pool.join("pool.json")).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()["snapshots_ms"].clone()
    };
    assert_eq!(setting(), 500);
    bed.ok(&["down"]);
    std::fs::remove_file(bed.shard("snapshot")).unwrap();
    for more in [&["--snapshots", "off"][..], &[]] {
        up(more);
        bed.ok(&["down"]);
        assert_eq!(setting(), 0);
        assert!(!bed.shard("snapshot").exists(), "with {more:?}, also when the pool stops");
    }
    up(&["--snapshots", "2m"]);
    assert_eq!(setting(), 120_000);
    bed.ok(&["down"]);
    assert!(bed.shard("snapshot").exists());
    let ran = bed.place.run(["up", "--path", pool, "--snapshots", "often"]);
    ran.assert_refused(2, &["often", "no time between two snapshots"]);
}
