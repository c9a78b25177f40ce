//! Pending places that are in memory, in the log and in records of their own: whoever reads them finds all of them.

use std::collections::HashSet;

use forebay_meta::Remains;
use forebay_types::{Ino, Kind, PendingPlace, Request, StoreVersion};

use super::examples::{object, objects};
use super::pool::Pool;

fn intend(pool: &mut Pool, name: &[u8], bytes: u64) {
    let version = StoreVersion { bytes, ..StoreVersion::default() };
    pool.ask(Request::Intend { parent: pool.top, name, version }).unwrap();
}

fn unlink(pool: &mut Pool, parent: Ino, name: &[u8]) {
    pool.ask(Request::Unlink { parent, name }).unwrap();
}

fn name(i: u64) -> Vec<u8> {
    format!("name {i}").into_bytes()
}

/// The pending places, which are in order.
fn listed(pool: &mut Pool) -> Vec<PendingPlace> {
    let all = pool.pending();
    assert!(all.windows(2).all(|two| (two[0].parent, &two[0].name) < (two[1].parent, &two[1].name)));
    all
}

#[test]
fn pending_places_are_found_by_a_listing_after_a_restart_by_the_check_and_by_a_recovery() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    for i in 0..3000 {
        pool.create(top, &name(i)).unwrap();
    }
    // A mover has begun something at some, some are renamed, and some are gone again.
    (0..3000).step_by(3).for_each(|i| intend(&mut pool, &name(i), i));
    (0..3000).step_by(5).for_each(|i| pool.rename((top, &name(i)), (top, &name(i + 10_000)), 0).unwrap());
    (0..3000).step_by(7).filter(|i| i % 5 != 0).for_each(|i| unlink(&mut pool, top, &name(i)));
    let all = listed(&mut pool);
    let of = |i: u64| all.iter().find(|place| place.name == name(i));
    assert!(of(1).unwrap().intent.is_none() && of(1).unwrap().changes == 1);
    assert_eq!(of(3).unwrap().intent.map(|version| version.bytes), Some(3));
    assert!(of(5).is_none() && of(10_005).is_some(), "the store never had it");
    assert!(of(15).is_some_and(|place| place.wanted.is_none()), "the mover may have put it there");
    assert!(of(7).is_none() && of(21).is_some());
    assert_eq!(all.len() as u64, pool.check().pending);

    pool.reopen();
    assert_eq!(listed(&mut pool), all);
    pool.assert_clean();
    let names: HashSet<(Ino, Vec<u8>)> = all.into_iter().map(|place| (place.parent, place.name)).collect();
    assert_eq!(pool.remains(|remains: Remains| remains.pending), names);
}

#[test]
fn absent_names_are_told_with_whether_their_directory_is_in_front_of_a_store() {
    let mut pool = Pool::new(true);
    let top = pool.top;
    pool.ask(Request::Import { ino: top, objects: &objects(&[object(b"f", Kind::File)]) }).unwrap();
    pool.ask(Request::Listed { ino: top, epoch: 0 }).unwrap();
    for (parent, is_in_store) in [(top, true), (Ino::ROOT, false)] {
        pool.create(parent, b"made").unwrap();
        assert_eq!(pool.absences(), [], "it is there");
        pool.rename((parent, b"made"), (parent, b"renamed"), 0).unwrap();
        assert_eq!(pool.absences(), [(b"made".to_vec(), is_in_store)]);
        unlink(&mut pool, parent, b"renamed");
        assert_eq!(pool.absences(), [(b"renamed".to_vec(), is_in_store)]);
        assert!(pool.lookup(parent, b"none").is_err());
        assert_eq!(pool.absences(), [(b"none".to_vec(), is_in_store)]);
    }
}
