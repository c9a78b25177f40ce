//! Shards that are locked, newer, not shards, or damaged: each is refused or reported in words, and none makes the
//! shard panic. Records are damaged through LMDB directly, as docs/disk-format.md describes them.

mod place;

use std::path::Path;

use forebay_meta::{Shard, ShardOptions};
use forebay_types::{limits, Code, Error, Ino, NodeId, Request};
use heed::types::Bytes;
use heed::{Database, EnvFlags, EnvOpenOptions};
use place::{at, Driver, Place, OPTIONS};
use proptest::prelude::*;

const ROOT: Ino = Ino::ROOT;

/// Changes records while the shard is closed.
fn tamper(dir: &Path, f: impl FnOnce(&mut heed::RwTxn<'_>, Database<Bytes, Bytes>)) {
    let mut options = EnvOpenOptions::new().read_txn_without_tls();
    // SAFETY: no shard is open on the directory, and only this thread uses the environment.
    let env = unsafe { options.flags(EnvFlags::NO_LOCK).open(dir) }.unwrap();
    let mut txn = env.write_txn().unwrap();
    let tree = env.open_database(&txn, None).unwrap().unwrap();
    f(&mut txn, tree);
    txn.commit().unwrap();
}

fn records(dir: &Path) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut all = Vec::new();
    tamper(dir, |txn, tree| {
        all = tree.iter(txn).unwrap().map(|r| r.unwrap()).map(|(k, v)| (k.to_vec(), v.to_vec())).collect();
    });
    all
}

fn inode_key(ino: Ino) -> Vec<u8> {
    [[8].as_slice(), &ino.0.to_be_bytes()].concat()
}

/// Fills a shard with all kinds of records: /d/f with two links, /s, /d/e, an attribute, an orphan, a kept reply.
fn furnish(dir: &Path) -> [Ino; 4] {
    let shard = Shard::create(dir, &OPTIONS, at(1)).unwrap();
    let mut driver = Driver::new();
    let mut batch = shard.begin().unwrap();
    let d = driver.directory(&mut batch, ROOT, b"d").unwrap();
    let f = driver.file(&mut batch, d, b"f").unwrap();
    driver.ask(&mut batch, Request::Link { ino: f, parent: ROOT, name: b"f too" }).unwrap();
    let s = driver.entry(&mut batch, Request::Symlink { parent: ROOT, name: b"s", target: &[b't'; 3000] });
    let e = driver.directory(&mut batch, d, b"e").unwrap();
    driver.ask(&mut batch, Request::SetXattr { ino: f, name: b"user.a", value: b"v", flags: 0 }).unwrap();
    driver.file(&mut batch, ROOT, b"gone").unwrap();
    driver.unlink(&mut batch, ROOT, b"gone").unwrap();
    batch.keep_reply(1, 2, 3, b"reply").unwrap();
    batch.add_session(1).unwrap();
    batch.commit().unwrap();
    assert_eq!(shard.check(&mut |_| {}).unwrap().problems, Vec::<String>::new());
    [d, f, s.unwrap().attr.ino, e]
}

fn open_error(dir: &Path) -> Error {
    let error = Shard::open(dir).map(|_| ()).unwrap_err();
    assert!(error.what.contains("shard") && !error.why.is_empty() && !error.cure.is_empty(), "{error}");
    error
}

#[test]
fn open_of_an_open_shard_is_busy_and_in_peace_again_afterwards() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    for file in ["data.mdb", "lock"] {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(place.path().join(file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }
    assert_eq!(open_error(place.path()).code, Code::Busy);
    assert_eq!(Shard::create(place.path(), &OPTIONS, at(1)).unwrap_err().code, Code::Busy);
    let batch = shard.begin().unwrap();
    assert_eq!(shard.begin().unwrap_err().code, Code::Busy);
    assert_eq!(shard.check(&mut |_| {}).unwrap_err().code, Code::Busy);
    drop(batch);
    drop(shard);
    let shard = Shard::open(place.path()).unwrap();
    assert_eq!(shard.node(), NodeId::FIRST);
    drop(shard);
    assert_eq!(Shard::create(place.path(), &OPTIONS, at(1)).unwrap_err().code, Code::Exists);
}

#[test]
fn open_where_there_is_none_says_so() {
    let place = Place::new();
    assert_eq!(open_error(place.path()).code, Code::NotFound);
    assert_eq!(Shard::open(&place.path().join("nowhere")).unwrap_err().code, Code::NotFound);
    assert_eq!(
        Shard::create(&place.path().join("nowhere"), &OPTIONS, at(1)).unwrap_err().code,
        Code::NotFound
    );
    for number in [0, limits::NODE_NUMBER_MAX + 1, u16::MAX] {
        let bad = ShardOptions { node: NodeId(number), ..OPTIONS };
        assert_eq!(Shard::create(place.path(), &bad, at(1)).unwrap_err().code, Code::Invalid, "{number}");
    }
    let last = ShardOptions { node: NodeId(limits::NODE_NUMBER_MAX), ..OPTIONS };
    assert!(Shard::create(place.path(), &last, at(1)).is_ok());
}

#[test]
fn open_of_a_newer_format_is_refused_with_its_version() {
    let place = Place::new();
    furnish(place.path());
    tamper(place.path(), |txn, tree| {
        // A newer format may have any bytes behind the version.
        tree.put(txn, &[1], &[9, 0, 0, 0]).unwrap();
    });
    let error = open_error(place.path());
    assert_eq!(error.code, Code::NewerFormat);
    assert!(error.why.contains("version 9"), "{error}");
}

#[test]
fn open_of_the_format_before_the_first_release_is_refused_with_a_cure_and_left_alone() {
    let place = Place::new();
    furnish(place.path());
    tamper(place.path(), |txn, tree| tree.put(txn, &[1], &[1, 0, 0, 0, 1, 0]).unwrap());
    let before = std::fs::read(place.path().join("data.mdb")).unwrap();
    let error = open_error(place.path());
    assert_eq!(error.code, Code::NotSupported);
    assert!(error.why.contains("version 1") && error.cure.contains("stage its data out"), "{error}");
    assert_eq!(std::fs::read(place.path().join("data.mdb")).unwrap(), before);
}

#[test]
fn open_of_what_is_no_shard_is_refused() {
    for content in [b"".as_slice(), b"short", &[0; 1 << 16], &[0xaa; 1 << 16]] {
        let place = Place::new();
        std::fs::write(place.path().join("data.mdb"), content).unwrap();
        assert_eq!(open_error(place.path()).code, Code::Corrupt, "{} bytes", content.len());
    }
    for (key, value) in [([1].as_slice(), b"".as_slice()), (&[1], &[0; 6]), (&[2], b"ledger"), (&[2], b"")] {
        let place = Place::new();
        furnish(place.path());
        tamper(place.path(), |txn, tree| tree.put(txn, key, value).unwrap());
        let error = Shard::open(place.path()).map(|_| ()).unwrap_err();
        assert_eq!(error.code, Code::Corrupt, "{key:?}");
        assert!(!error.cure.is_empty());
    }
    let place = Place::new();
    furnish(place.path());
    tamper(place.path(), |txn, tree| assert!(tree.delete(txn, &[1]).unwrap()));
    assert_eq!(open_error(place.path()).code, Code::Corrupt);
}

#[test]
fn shard_cut_short_is_refused_or_reported_and_survived() {
    for pages in 2..12 {
        let place = Place::new();
        let inos = furnish(place.path());
        let data = std::fs::File::options().write(true).open(place.path().join("data.mdb")).unwrap();
        data.set_len(pages * 4096).unwrap();
        if let Ok(shard) = Shard::open_for_check(place.path()) {
            if shard.check(&mut |_| {}).is_ok_and(|report| report.is_clean()) {
                assert!(pages > 4, "{pages} pages cannot hold it all");
            }
            exercise(&shard, &inos);
        }
    }
}

/// A kind of damage, and the text that the check must report for it.
type Damage = (&'static str, fn(&mut heed::RwTxn<'_>, Database<Bytes, Bytes>, [Ino; 4]));

/// Changes bytes of an inode's record.
fn patch(txn: &mut heed::RwTxn<'_>, tree: Database<Bytes, Bytes>, key: &[u8], offset: usize, bytes: &[u8]) {
    let mut record = tree.get(txn, key).unwrap().unwrap().to_vec();
    record[offset..offset + bytes.len()].copy_from_slice(bytes);
    tree.put(txn, key, &record).unwrap();
}

/// The key of an entry that leads to an inode.
fn entry_key(txn: &heed::RwTxn<'_>, tree: Database<Bytes, Bytes>, ino: Ino) -> Vec<u8> {
    let leads = |key: &[u8], value: &[u8]| key[0] == 7 && value[1..9] == ino.0.to_le_bytes();
    let found = tree.iter(txn).unwrap().map(|r| r.unwrap()).find(|(k, v)| leads(k, v));
    found.unwrap().0.to_vec()
}

/// Removes the pending directories from the ledger, so that their inode records count.
fn forget_pending(txn: &mut heed::RwTxn<'_>, tree: Database<Bytes, Bytes>) {
    let mut ledger = tree.get(txn, &[2]).unwrap().unwrap()[..34].to_vec();
    ledger[1] = 0;
    tree.put(txn, &[2], &ledger).unwrap();
}

/// Makes /d/e wide, with a part on this node and one on another.
fn widen(txn: &mut heed::RwTxn<'_>, tree: Database<Bytes, Bytes>, e: Ino) {
    let record = tree.get(txn, &inode_key(e)).unwrap().unwrap().to_vec();
    patch(txn, tree, &inode_key(e), 1, &[1, 1]);
    let mut list = [e.0.to_le_bytes().as_slice(), &[2]].concat();
    let part = part(e);
    for ino in [part, Ino::part(NodeId(2), 9)] {
        list.extend(ino.0.to_le_bytes());
    }
    tree.put(txn, &[[9].as_slice(), &e.0.to_be_bytes(), &[0, 0, 0]].concat(), &list).unwrap();
    tree.put(txn, &inode_key(part), &record).unwrap();
    patch(txn, tree, &inode_key(part), 82, &e.0.to_le_bytes());
    patch(txn, tree, &inode_key(part), 90, &[2, 0, 0, 0, 0, 0, 0, 0]);
    let inodes = tree.get(txn, &[2]).unwrap().unwrap()[10];
    patch(txn, tree, &[2], 10, &[inodes + 1]);
}

/// The part of a wide directory on this node.
fn part(e: Ino) -> Ino {
    Ino::part(NodeId::FIRST, e.counter())
}

const DAMAGES: [Damage; 22] = [
    ("has 7 links, but 2 entries here and 0 elsewhere", |t, tree, [_, f, ..]| {
        patch(t, tree, &inode_key(f), 16, &[7, 0, 0, 0])
    }),
    ("its record is damaged", |t, tree, [_, f, ..]| patch(t, tree, &inode_key(f), 0, &[99])),
    ("its record is damaged", |t, tree, [d, ..]| tree.put(t, &inode_key(d), b"rubbish").unwrap()),
    ("which does not exist", |t, tree, [_, f, ..]| assert!(tree.delete(t, &inode_key(f)).unwrap())),
    ("entries in directory", |t, tree, [d, ..]| assert!(tree.delete(t, &inode_key(d)).unwrap())),
    ("no entry leads to it", |t, tree, [_, _, s, _]| {
        let key = entry_key(t, tree, s);
        assert!(tree.delete(t, &key).unwrap());
    }),
    ("has 2 links, but 1 entries here and 0 elsewhere", |t, tree, [_, f, ..]| {
        let key = entry_key(t, tree, f);
        assert!(tree.delete(t, &key).unwrap());
    }),
    ("says 3 entries, has 2", |t, tree, [d, ..]| {
        forget_pending(t, tree);
        patch(t, tree, &inode_key(d), 26, &[3]);
    }),
    ("lies in itself", |t, tree, [_, _, _, e]| patch(t, tree, &inode_key(e), 82, &e.0.to_le_bytes())),
    ("as its parent, but its entry is in", |t, tree, [_, _, _, e]| {
        patch(t, tree, &inode_key(e), 82, &ROOT.0.to_le_bytes())
    }),
    ("there is no root directory", |t, tree, _| assert!(tree.delete(t, &inode_key(ROOT)).unwrap())),
    ("its target is not 3000 bytes long", |t, tree, [_, _, s, _]| {
        let key = [[9].as_slice(), &s.0.to_be_bytes(), &[0, 0, 1]].concat();
        assert!(tree.delete(t, &key).unwrap());
    }),
    ("a piece of value \"\" is missing", |t, tree, [_, _, s, _]| {
        let key = [[9].as_slice(), &s.0.to_be_bytes(), &[0, 0, 0]].concat();
        assert!(tree.delete(t, &key).unwrap());
    }),
    ("lacks the mark for them", |t, tree, [_, f, ..]| patch(t, tree, &inode_key(f), 1, &[0])),
    ("too many extended attributes", |t, tree, [_, f, ..]| {
        // Their names and values alone are no more than the bound.
        for n in 0..limits::XATTR_TOTAL_MAX / (limits::XATTR_OVERHEAD + 20) {
            let key =
                [[9].as_slice(), &f.0.to_be_bytes(), format!("user.{n:015}").as_bytes(), &[0, 0, 0]].concat();
            tree.put(t, &key, b"").unwrap();
        }
    }),
    ("lists 2 parts, but its width is 2^3", |t, tree, [_, _, _, e]| {
        widen(t, tree, e);
        patch(t, tree, &inode_key(e), 2, &[3]);
    }),
    ("has another place in the directory's list", |t, tree, [_, _, _, e]| {
        widen(t, tree, e);
        patch(t, tree, &inode_key(part(e)), 90, &[3, 0]);
    }),
    ("has another place in the directory's list", |t, tree, [_, _, _, e]| {
        widen(t, tree, e);
        patch(t, tree, &inode_key(part(e)), 90, &[2, 1]);
    }),
    ("the ledger counts", |t, tree, _| patch(t, tree, &[2], 10, &[200])),
    ("the next would be 3", |t, tree, _| patch(t, tree, &[2], 2, &[3])),
    ("under the unknown key", |t, tree, _| tree.put(t, &[9, 9], b"").unwrap()),
    ("has a cookie that does not match the hash of its name", |t, tree, [d, ..]| {
        let key = entry_key(t, tree, d);
        patch(t, tree, &key, 13, b"z");
    }),
];

/// Sends every kind of request for every inode: nothing may panic.
fn exercise(shard: &Shard, inos: &[Ino]) {
    let mut driver = Driver::new();
    let Ok(mut batch) = shard.begin() else { return };
    for &ino in inos.iter().chain([&ROOT]) {
        for name in [b"d".as_slice(), b"f", b"e", b"s", b"f too", b"new"] {
            let _ = driver.ask(&mut batch, Request::Lookup { parent: ino, name });
            let _ = driver.file(&mut batch, ino, name);
            let rename =
                Request::Rename { parent: ino, name, new_parent: inos[0], new_name: b"moved", flags: 0 };
            let _ = driver.ask(&mut batch, rename);
            let _ = driver.unlink(&mut batch, ino, name);
            let _ = driver.ask(&mut batch, Request::RemoveDirectory { parent: ino, name });
        }
        for request in [
            Request::GetAttr { ino },
            Request::ReadLink { ino },
            Request::ListXattr { ino },
            Request::GetXattr { ino, name: b"user.a" },
            Request::RemoveXattr { ino, name: b"user.a" },
            Request::MarkDirty { ino },
            Request::PathOf { ino },
            Request::ReadDirectory { ino, cookie: 0, attributes: true },
        ] {
            let _ = driver.ask(&mut batch, request);
        }
    }
    let _ = (batch.orphans(), batch.sessions(), batch.kept_reply(1, 2));
    let _ = batch.commit();
    let _ = shard.check(&mut |_| {});
}

#[test]
fn check_of_a_wide_directory_without_damage_is_clean() {
    let place = Place::new();
    let [_, _, _, e] = furnish(place.path());
    tamper(place.path(), |txn, tree| widen(txn, tree, e));
    let report = Shard::open_for_check(place.path()).unwrap().check(&mut |_| {}).unwrap();
    assert_eq!(report.problems, Vec::<String>::new());
}

#[test]
fn check_of_each_damage_finds_words_for_it() {
    for (words, damage) in DAMAGES {
        let place = Place::new();
        let inos = furnish(place.path());
        tamper(place.path(), |txn, tree| damage(txn, tree, inos));
        let shard = Shard::open_for_check(place.path()).unwrap();
        let report = shard.check(&mut |_| {}).unwrap();
        assert!(report.problems.iter().any(|p| p.contains(words)), "{words}: {:?}", report.problems);
        assert!(!report.is_clean());
        exercise(&shard, &inos);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Replaces any record by any bytes: every request still gets an answer.
    #[test]
    fn any_damage_to_records_is_survived(
        damages in proptest::collection::vec((any::<prop::sample::Index>(), 0u8..4, any::<u8>(),
            proptest::collection::vec(any::<u8>(), 0..120)), 1..4),
    ) {
        let place = Place::new();
        let inos = furnish(place.path());
        let all = records(place.path());
        tamper(place.path(), |txn, tree| {
            for (which, how, byte, bytes) in &damages {
                let (key, value) = which.get(&all);
                let mut value = value.clone();
                match how {
                    0 => {
                        tree.delete(txn, key).unwrap();
                        continue;
                    }
                    1 => value = bytes.clone(),
                    2 if !value.is_empty() => {
                        let at = *byte as usize % value.len();
                        value[at] ^= 1 + bytes.len() as u8;
                    }
                    _ => value.truncate(*byte as usize),
                }
                tree.put(txn, key, &value).unwrap();
            }
        });
        if let Ok(shard) = Shard::open_for_check(place.path()) {
            let _ = shard.check(&mut |_| {});
            exercise(&shard, &inos);
        }
    }
}
