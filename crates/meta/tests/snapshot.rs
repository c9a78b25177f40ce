//! Snapshots: copies of a commit that are made while the shard goes on, and what is read from them.

mod place;

use std::fs::File;

use forebay_meta::{check_snapshot, Remains, Shard, SnapshotHead};
use forebay_types::{Code, Ino, NodeId, Request};
use place::{at, Driver, Place, OPTIONS};

const ROOT: Ino = Ino::ROOT;

fn head() -> SnapshotHead {
    SnapshotHead { node: NodeId::FIRST, pool: "pool".to_owned(), taken: at(7) }
}

/// Makes a directory with files in one commit.
fn commit(shard: &Shard, driver: &mut Driver, name: &str) -> Ino {
    let mut batch = shard.begin().unwrap();
    let directory = driver.directory(&mut batch, ROOT, name.as_bytes()).unwrap();
    for i in 0..200 {
        driver.file(&mut batch, directory, format!("{name}-{i}").as_bytes()).unwrap();
    }
    batch.commit().unwrap();
    directory
}

#[test]
fn copy_has_its_commit_while_the_next_one_is_made() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    let mut driver = Driver::new();
    for name in ["a", "b", "c", "d"] {
        commit(&shard, &mut driver, name);
    }
    let mut batch = shard.begin().unwrap();
    let file = driver.file(&mut batch, ROOT, b"file").unwrap();
    let request = Request::SetXattr { ino: file, name: b"user.x", value: &[b'v'; 5000], flags: 0 };
    driver.ask(&mut batch, request).unwrap();
    batch.commit().unwrap();
    let source = shard.snapshot_source().unwrap();
    // One commit and an open transaction later the pages are still there.
    let late = commit(&shard, &mut driver, "late");
    let mut batch = shard.begin().unwrap();
    for i in 0..200 {
        driver.unlink(&mut batch, late, format!("late-{i}").as_bytes()).unwrap();
    }
    let path = place.path().join("copy");
    assert!(source.copy_to(&File::create(&path).unwrap(), &head(), &|| true).unwrap());
    batch.commit().unwrap();
    assert_eq!(check_snapshot(&path).unwrap(), head());
    let (node, remains) = Remains::read(&path).unwrap();
    assert_eq!((node, remains.damaged), (NodeId::FIRST, 0));
    assert_eq!(remains.inodes.len(), 1 + 4 * 201 + 1, "as of the commit");
    assert_eq!(remains.names[&file], [(ROOT, b"file".to_vec())]);
    assert_eq!(remains.value(file, b"user.x"), Some(&[b'v'; 5000][..]));
    assert!(!remains.names.contains_key(&late));
    let directory = remains.names.iter().find(|(_, names)| names[0].1 == b"b").unwrap().0;
    assert_eq!(remains.path_below(ROOT, *directory), Some(vec![b"b".to_vec()]));
    assert_eq!(remains.path_below(*directory, ROOT), None);
}

#[test]
fn copy_that_becomes_void_or_is_damaged_is_not_used() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    commit(&shard, &mut Driver::new(), "a");
    let source = shard.snapshot_source().unwrap();
    let path = place.path().join("copy");
    assert!(!source.copy_to(&File::create(&path).unwrap(), &head(), &|| false).unwrap());
    assert_eq!(check_snapshot(&path).unwrap_err().code, Code::Corrupt);
    assert!(source.copy_to(&File::create(&path).unwrap(), &head(), &|| true).unwrap());
    let whole = std::fs::read(&path).unwrap();
    assert_eq!(whole.len() as u64, source.bytes());
    for at in (0..whole.len()).step_by(511) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x10;
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(check_snapshot(&path).unwrap_err().code, Code::Corrupt, "byte {at}");
    }
    for end in [0, 100, 4096, 8192, whole.len() - 4096, whole.len() - 1] {
        std::fs::write(&path, &whole[..end]).unwrap();
        assert_eq!(check_snapshot(&path).unwrap_err().code, Code::Corrupt, "cut at {end}");
    }
    std::fs::remove_file(&path).unwrap();
    assert_eq!(check_snapshot(&path).unwrap_err().code, Code::NotFound);
}
