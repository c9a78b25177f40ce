//! Reports about many files in one request.

use forebay_types::{
    decode_store_places, Code, Ino, NodeId, Request, StoreVersion, FLAG_DIRTY, FLAG_DRAINING, FLAG_RESIDENT,
    REPORTS_MAX,
};

use super::pool::Pool;

fn version(ino: u64) -> StoreVersion {
    StoreVersion { ino, ..StoreVersion::NOTHING }
}

fn states(pool: &mut Pool, ino: Ino) -> u32 {
    pool.attr(ino).unwrap().flags & (FLAG_DIRTY | FLAG_DRAINING)
}

#[test]
fn files_are_drained_together_and_one_that_is_refused_keeps_none_from_it() {
    let mut pool = Pool::new(false);
    let parent = pool.top;
    let (a, b, c) = (
        pool.create(parent, b"a").unwrap(),
        pool.create(parent, b"b").unwrap(),
        pool.create(parent, b"c").unwrap(),
    );
    pool.ask(Request::Unlink { parent, name: b"b" }).unwrap();
    let begun = pool.report(&[a, b, c].map(|ino| Request::BeginDrain { ino }));
    assert_eq!(begun, [Ok(0), Err(Code::NotFound), Ok(0)]);
    assert_eq!(states(&mut pool, a), FLAG_DIRTY | FLAG_DRAINING);
    // A program writes c meanwhile.
    pool.ask(Request::MarkDirty { ino: c }).unwrap();
    let seen = |pool: &mut Pool, name: &[u8]| {
        let found = pool.pending().into_iter().find(|place| place.name == name);
        found.map_or(0, |place| place.changes)
    };
    let (seen_a, seen_c) = (seen(&mut pool, b"a"), seen(&mut pool, b"c"));
    let intend = |name, number| Request::Intend { parent, name, version: version(number) };
    assert_eq!(pool.report(&[intend(b"a", 1), intend(b"c", 3)]), [Ok(0), Ok(0)]);
    let pending = pool.pending();
    assert_eq!(
        pending.iter().map(|place| place.intent).collect::<Vec<_>>(),
        [Some(version(1)), Some(version(3))]
    );
    let published = |name, ino, seen, number| Request::Published {
        parent,
        name,
        ino,
        epoch: 0,
        seen,
        version: version(number),
    };
    let done = pool.report(&[published(b"a", a, seen_a, 1), published(b"c", c, seen_c, 3)]);
    assert_eq!(done, [Ok(0), Ok(0)]);
    assert_eq!(states(&mut pool, a), 0, "clean");
    assert_eq!(states(&mut pool, c), FLAG_DIRTY, "written since");
    assert_eq!(pool.pending().iter().map(|place| &place.name[..]).collect::<Vec<_>>(), [b"c"]);
    pool.reopen();
    assert_eq!((states(&mut pool, a), states(&mut pool, c)), (0, FLAG_DIRTY));
    pool.assert_clean();
}

#[test]
fn a_report_that_is_refused_changes_nothing() {
    let mut pool = Pool::new(false);
    let parent = pool.top;
    let ino = pool.create(parent, b"a").unwrap();
    pool.report(&[Request::BeginDrain { ino }]);
    let publish = |epoch| Request::Published { parent, name: b"a", ino, epoch, seen: 1, version: version(1) };
    pool.report(&[publish(0)]);
    pool.release(ino).unwrap();
    let before = (pool.attr(ino).unwrap(), pool.pending());
    // Released: of the file's data only the store has a copy, of another epoch than this.
    let outcomes = pool.report(&[
        publish(0),
        Request::BeginDrain { ino },
        Request::Intend { parent: Ino(999), name: b"x", version: version(9) },
    ]);
    assert_eq!(outcomes[..2], [Err(Code::Stale), Err(Code::Stale)]);
    assert_eq!(pool.attr(ino).unwrap(), before.0);
    pool.ask(Request::Settled { parent: Ino(999), name: b"x", seen: 1 }).unwrap();
    assert_eq!(pool.pending(), before.1);
    pool.assert_clean();
}

#[test]
fn a_list_that_is_malformed_or_too_long_is_refused_as_a_whole() {
    let mut pool = Pool::new(false);
    let ino = pool.create(pool.top, b"a").unwrap();
    let mut report = [0; 9];
    report[0] = Request::BeginDrain { ino }.number();
    report[1..].copy_from_slice(&ino.0.to_le_bytes());
    let refusal = |pool: &mut Pool, reports: &[u8]| {
        pool.ask(Request::StoreReports { node: NodeId(1), reports }).unwrap_err()
    };
    assert_eq!(refusal(&mut pool, &[&report[..], &[7]].concat()), Code::Malformed);
    let unlink = [&[Request::Ping.number()][..], &report].concat();
    assert_eq!(refusal(&mut pool, &unlink), Code::Malformed);
    assert_eq!(refusal(&mut pool, &report.repeat(REPORTS_MAX + 1)), Code::TooBig);
    assert_eq!(states(&mut pool, ino), FLAG_DIRTY, "none was taken");
    pool.assert_clean();
}

#[test]
fn places_of_many_files_are_read_together_as_each_alone() {
    let mut pool = Pool::new(false);
    let parent = pool.top;
    let (a, b) = (pool.create(parent, b"a").unwrap(), pool.create(parent, b"b").unwrap());
    pool.report(&[Request::BeginDrain { ino: a }]);
    pool.report(&[Request::Published { parent, name: b"a", ino: a, epoch: 0, seen: 1, version: version(1) }]);
    let inos: Vec<u8> = [a, b, parent].iter().flat_map(|ino| ino.0.to_le_bytes()).collect();
    let read = |pool: &mut Pool, inos: &[u8]| pool.bytes(Request::StorePlaces { node: NodeId(0), inos });
    let places = decode_store_places(&read(&mut pool, &inos).unwrap()).unwrap();
    let alone = |pool: &mut Pool, ino| pool.store_place(ino).map(|(_, place)| place);
    assert_eq!(places.len(), 3);
    assert_eq!(places[0], alone(&mut pool, a));
    assert_eq!(places[0].as_ref().unwrap().placed.unwrap().version, version(1));
    assert_eq!(places[1], Err(Code::NotFound), "not in the store");
    assert_eq!(places[2], alone(&mut pool, parent));
    assert_eq!(read(&mut pool, &inos[..12]), Err(Code::Malformed));
    assert_eq!(read(&mut pool, &inos[..8].repeat(REPORTS_MAX + 1)), Err(Code::TooBig));
}

#[test]
fn files_are_restored_together_unless_their_epoch_is_another_one() {
    let mut pool = Pool::new(false);
    let parent = pool.top;
    let files = [&b"a"[..], b"b"].map(|name| {
        let ino = pool.create(parent, name).unwrap();
        pool.report(&[Request::BeginDrain { ino }]);
        pool.report(&[Request::Published { parent, name, ino, epoch: 0, seen: 1, version: version(ino.0) }]);
        pool.release(ino).unwrap();
        (ino, pool.attr(ino).unwrap().epoch())
    });
    let [(a, epoch_a), (b, epoch_b)] = files;
    let (of_a, of_b) = (pool.restored(a, epoch_a), pool.restored(b, epoch_b + 1));
    let outcomes = pool.report(&[of_a, of_b, of_a]);
    assert_eq!(outcomes, [Ok(epoch_a), Err(Code::Stale), Err(Code::Stale)], "the last one is resident");
    let is_resident = |pool: &mut Pool, ino| pool.attr(ino).unwrap().flags & FLAG_RESIDENT != 0;
    assert!(is_resident(&mut pool, a) && !is_resident(&mut pool, b));
    pool.assert_clean();
}
