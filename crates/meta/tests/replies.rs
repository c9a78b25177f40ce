//! Kept replies, sessions and orphans, which retries and restarts need.

mod place;

use forebay_meta::{Shard, KEPT_REPLY_BYTES_MAX};
use forebay_types::{Code, Ino, Layout, NodeId, Request};
use place::{at, Driver, Place, OPTIONS};

#[test]
fn kept_reply_is_the_slots_last_one_and_survives_with_its_batch() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    let mut batch = shard.begin().unwrap();
    assert_eq!(batch.kept_reply(7, 0).unwrap(), None);
    batch.keep_reply(7, 0, 1, b"first").unwrap();
    batch.keep_reply(7, 63, 5, b"another slot").unwrap();
    batch.keep_reply(8, 0, 9, &[8; KEPT_REPLY_BYTES_MAX]).unwrap();
    batch.keep_reply(7, 0, 2, b"").unwrap();
    assert_eq!(batch.keep_reply(7, 0, 3, &[0; KEPT_REPLY_BYTES_MAX + 1]).unwrap_err().code, Code::TooBig);
    assert_eq!(batch.kept_reply(7, 0).unwrap(), Some((2, b"".as_slice())));
    batch.commit().unwrap();
    let mut batch = shard.begin().unwrap();
    batch.keep_reply(7, 63, 6, b"of a batch that is dropped").unwrap();
    drop(batch);
    drop(shard);
    let shard = Shard::open(place.path()).unwrap();
    let batch = shard.begin().unwrap();
    assert_eq!(batch.kept_reply(7, 0).unwrap(), Some((2, b"".as_slice())));
    assert_eq!(batch.kept_reply(7, 63).unwrap(), Some((5, b"another slot".as_slice())));
    assert_eq!(batch.kept_reply(8, 0).unwrap(), Some((9, [8; KEPT_REPLY_BYTES_MAX].as_slice())));
}

#[test]
fn orphan_that_is_listed_again_is_counted_once() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    let (ino, layout) = (Ino(9999), Layout::single(NodeId(1), 0));
    for _ in 0..2 {
        let mut batch = shard.begin().unwrap();
        batch.list_orphan(ino, &layout).unwrap();
        batch.list_orphan(ino, &layout).unwrap();
        assert_eq!(batch.orphans().unwrap(), [(ino, layout)]);
        batch.commit().unwrap();
        assert_eq!(shard.statistics().unwrap().orphans, 1);
    }
    // The batches had nothing else to commit.
    drop(shard);
    let shard = Shard::open(place.path()).unwrap();
    assert_eq!(shard.begin().unwrap().orphans().unwrap(), [(ino, layout)]);
    let mut batch = shard.begin().unwrap();
    batch.remove_orphans(&[ino]).unwrap();
    batch.commit().unwrap();
    assert_eq!(shard.statistics().unwrap().orphans, 0);
}

#[test]
fn forgotten_session_takes_its_replies_along_and_no_others() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    let mut batch = shard.begin().unwrap();
    for session in [1, 2, u64::MAX] {
        batch.add_session(session).unwrap();
        for slot in 0..64 {
            batch.keep_reply(session, slot, 1, &[slot; 157]).unwrap();
        }
    }
    batch.add_session(2).unwrap();
    assert_eq!(batch.sessions().unwrap(), [1, 2, u64::MAX]);
    batch.forget_session(2).unwrap();
    batch.forget_session(77).unwrap();
    assert_eq!(batch.sessions().unwrap(), [1, u64::MAX]);
    for slot in 0..64 {
        assert_eq!(batch.kept_reply(2, slot).unwrap(), None);
        for session in [1, u64::MAX] {
            assert_eq!(batch.kept_reply(session, slot).unwrap(), Some((1, [slot; 157].as_slice())));
        }
    }
    batch.commit().unwrap();
    assert_eq!(shard.check(&mut |_| {}).unwrap().problems, Vec::<String>::new());
}

#[test]
fn orphan_is_listed_until_it_is_removed_in_its_batch_or_later() {
    let place = Place::new();
    let mut shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    let layout = Layout::overstriped(NodeId::FIRST, 3, 9, 1 << 16).unwrap();
    let mut driver = Driver::new();
    let mut batch = shard.begin().unwrap();
    let mut orphans: Vec<Ino> = Vec::new();
    for name in [b"a".as_slice(), b"b", b"c", b"d"] {
        let request = Request::Create {
            parent: Ino::ROOT,
            name,
            mode: 0o600,
            exclusive: true,
            dirty: true,
            layout: Some(layout),
            number: None,
            reserve: false,
        };
        orphans.push(driver.entry(&mut batch, request).unwrap().attr.ino);
        driver.unlink(&mut batch, Ino::ROOT, name).unwrap();
        assert_eq!(driver.effects.orphaned(), [(orphans[orphans.len() - 1], layout)]);
    }
    // The first orphan is removed in its own transaction, the second in the next, the third after a restart; the last
    // stays.
    for round in 0..3 {
        let removed = orphans.remove(0);
        batch.remove_orphans(&[removed, removed, Ino(12345)]).unwrap();
        let mut listed = batch.orphans().unwrap();
        listed.sort_by_key(|o| o.0);
        assert_eq!(listed, orphans.iter().map(|ino| (*ino, layout)).collect::<Vec<_>>());
        batch.commit().unwrap();
        let report = shard.check(&mut |_| {}).unwrap();
        assert_eq!((report.problems.len(), report.orphans as usize), (0, orphans.len()));
        assert_eq!(shard.statistics().unwrap().orphans as usize, orphans.len());
        if round == 1 {
            drop(shard);
            shard = Shard::open(place.path()).unwrap();
        }
        batch = shard.begin().unwrap();
    }
}

#[test]
fn orphans_of_a_dropped_batch_are_not_listed() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    let mut driver = Driver::new();
    let mut batch = shard.begin().unwrap();
    driver.file(&mut batch, Ino::ROOT, b"a").unwrap();
    batch.commit().unwrap();
    let mut batch = shard.begin().unwrap();
    driver.unlink(&mut batch, Ino::ROOT, b"a").unwrap();
    assert_eq!(batch.orphans().unwrap().len(), 1);
    drop(batch);
    let mut batch = shard.begin().unwrap();
    assert_eq!(batch.orphans().unwrap(), []);
    driver.entry(&mut batch, Request::Lookup { parent: Ino::ROOT, name: b"a" }).unwrap();
}
