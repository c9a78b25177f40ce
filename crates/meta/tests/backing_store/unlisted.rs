//! Names of directories that are not listed: each is served once the store was asked for it.

use forebay_types::limits::FOUND_SHOWN_MAX;
use forebay_types::{Code, Ino, Kind, Request};

use super::examples::{forget, object, objects};
use super::pool::Pool;

#[test]
fn a_name_of_an_unlisted_directory_is_refused_until_it_was_looked_up() {
    let mut pool = Pool::new(true);
    let top = pool.top;
    assert_eq!(pool.lookup(top, b"f").map(|_| ()), Err(Code::NotListed));
    assert_eq!(pool.unlisted.take(), Some((top, Some(b"f".to_vec()))));
    pool.ask(Request::Import { ino: top, objects: &objects(&[object(b"f", Kind::File)]) }).unwrap();
    let ino = pool.lookup(top, b"f").unwrap().ino;
    assert_eq!(pool.create(top, b"f"), Err(Code::Exists), "it is in the store");
    // All others are as unknown as before, and so is whether there are any.
    assert_eq!(pool.create(top, b"g"), Err(Code::NotListed));
    assert_eq!(pool.rename((top, b"f"), (top, b"g"), 0), Err(Code::NotListed));
    assert_eq!(pool.unlisted.take(), Some((top, Some(b"g".to_vec()))));
    assert_eq!(pool.list(top), Err(Code::NotListed));
    assert_eq!(pool.unlisted.take(), Some((top, None)));
    pool.note_absent(top, b"g").unwrap();
    assert_eq!(pool.lookup(top, b"g").map(|_| ()), Err(Code::NotFound));
    pool.rename((top, b"f"), (top, b"g"), 0).unwrap();
    assert_eq!(pool.lookup(top, b"g").unwrap().ino, ino);
    assert_eq!(pool.lookup(top, b"f").map(|_| ()), Err(Code::NotFound), "its place is known");
    // What the pool has renamed does not come back when the directory is listed.
    pool.ask(Request::Import { ino: top, objects: &objects(&[object(b"f", Kind::File)]) }).unwrap();
    pool.ask(Request::Listed { ino: top, epoch: 0, objects: b"" }).unwrap();
    assert_eq!(pool.list(top).unwrap().len(), 1);
    pool.assert_clean();
}

#[test]
fn a_first_listing_shows_its_names_to_the_board_and_announces_no_change() {
    let mut pool = Pool::new(true);
    let top = pool.top;
    let before = pool.attr(top).unwrap();
    let import = |pool: &mut Pool, names: &[(&[u8], Kind)]| {
        let all: Vec<_> = names.iter().map(|(name, kind)| object(name, *kind)).collect();
        pool.ask(Request::Import { ino: top, objects: &objects(&all) }).unwrap();
        pool.shown()
    };
    // A store may show a name twice while it changes.
    let all: [(&[u8], Kind); 4] =
        [(b"f", Kind::File), (b"d", Kind::Directory), (b"f", Kind::File), (b"g", Kind::File)];
    assert_eq!(import(&mut pool, &all), (3, 3, 0));
    let now = pool.attr(top).unwrap();
    assert_eq!((now.size, now.nlink), (before.size + 3, before.nlink + 1));
    assert_eq!(now.mtime, before.mtime);
    assert_eq!(import(&mut pool, &all), (0, 0, 0), "they are known");
    // What the pool removed is to be removed in the store: a later part of the listing does not bring it back.
    pool.ask(Request::Unlink { parent: top, name: b"g" }).unwrap();
    assert_eq!(import(&mut pool, &[(b"g", Kind::File), (b"h", Kind::File)]), (1, 1, 0));
    assert_eq!(pool.lookup(top, b"g").map(|_| ()), Err(Code::NotFound));
    let epoch = pool.attr(top).unwrap().epoch();
    pool.ask(Request::Listed { ino: top, epoch, objects: b"" }).unwrap();
    assert_eq!(pool.list(top).unwrap().len(), 3);
    // From now on a name that comes may be known to be absent.
    assert_eq!(import(&mut pool, &[(b"i", Kind::File)]), (0, 1, 1));
    pool.assert_clean();
}

#[test]
fn a_directory_that_becomes_unlisted_is_reported_once_so_that_caches_drop_its_absences() {
    let mut pool = Pool::new(true);
    let top = pool.top;
    assert_eq!(pool.became_unlisted(), [(top, false)], "it was attached");
    pool.ask(Request::Listed { ino: top, epoch: 0, objects: b"" }).unwrap();
    assert_eq!(pool.became_unlisted(), []);
    pool.clean_file(top, b"a", 1);
    pool.clean_file(top, b"b", 2);
    pool.ask(forget(top, b"a", false)).unwrap();
    assert_eq!(pool.became_unlisted(), [(top, true)]);
    pool.ask(forget(top, b"b", false)).unwrap();
    assert_eq!(pool.became_unlisted(), [], "it was unlisted already");
    // A directory that is found is unlisted from the beginning.
    pool.ask(Request::Import { ino: top, objects: &objects(&[object(b"d", Kind::Directory)]) }).unwrap();
    assert_eq!(pool.became_unlisted(), []);
    pool.assert_clean();
}

#[test]
fn names_beyond_those_that_a_directory_shows_are_imported_and_not_shown() {
    let mut pool = Pool::new(true);
    let top = pool.top;
    let step = 512;
    let import = |pool: &mut Pool, first: u64, count: u64| {
        let names: Vec<_> = (first..first + count).map(|i| format!("n{i}").into_bytes()).collect();
        let all: Vec<_> = names.iter().map(|name| object(name, Kind::File)).collect();
        pool.ask(Request::Import { ino: top, objects: &objects(&all) }).unwrap();
        pool.shown()
    };
    for first in (0..FOUND_SHOWN_MAX).step_by(step) {
        assert_eq!(import(&mut pool, first, step as u64), (step, step, 0));
    }
    assert_eq!(import(&mut pool, FOUND_SHOWN_MAX, 1), (0, 0, 0));
    pool.lookup(top, format!("n{FOUND_SHOWN_MAX}").as_bytes()).unwrap();
    assert_eq!(pool.attr(top).unwrap().size, FOUND_SHOWN_MAX + 1);
}

#[test]
fn an_absence_is_believed_until_the_directory_is_listed_again_or_the_shard_is_opened_again() {
    let mut pool = Pool::new(true);
    let top = pool.top;
    let is_unknown = |pool: &mut Pool, name: &[u8]| pool.lookup(top, name) == Err(Code::NotListed);
    for name in [b"a", b"b"] {
        pool.note_absent(top, name).unwrap();
    }
    // It comes by the pool, reaches the store, and is forgotten by the pool: only the store knows it then.
    pool.clean_file(top, b"a", 1);
    pool.note_absent(top, b"a").unwrap();
    pool.ask(forget(top, b"a", false)).unwrap();
    assert!(is_unknown(&mut pool, b"a") && is_unknown(&mut pool, b"b"));
    pool.note_absent(top, b"b").unwrap();
    assert!(!is_unknown(&mut pool, b"b"));
    pool.reopen();
    assert!(is_unknown(&mut pool, b"b"));
    pool.note_absent(top, b"b").unwrap();
    pool.ask(Request::Listed { ino: top, epoch: 1, objects: b"" }).unwrap();
    // Another store may have it.
    pool.ask(Request::Detach { ino: top }).unwrap();
    pool.ask(Request::Attach { ino: top, listed: true, settings: b"s" }).unwrap();
    assert!(is_unknown(&mut pool, b"b"));
    assert_eq!(pool.note_absent(Ino(77), b"b"), Err(Code::NotFound));
    pool.assert_clean();
}

#[test]
fn what_was_acknowledged_in_an_unlisted_directory_is_applied_again_after_a_crash() {
    let mut pool = Pool::new(true);
    let top = pool.top;
    let create = Request::MakeDirectory { parent: top, name: b"d", mode: 0o755 };
    pool.note_absent(top, b"d").unwrap();
    // The transaction is lost with the worker; the journal has the request, and the absence is nowhere.
    pool.reopen();
    assert_eq!(pool.ask(create), Err(Code::NotListed));
    pool.again(create).unwrap();
    pool.lookup(top, b"d").unwrap();
    pool.assert_clean();
}

#[test]
fn a_name_that_is_forgotten_during_a_listing_is_not_missing_after_it() {
    let mut pool = Pool::new(true);
    let top = pool.top;
    let epoch = pool.attr(top).unwrap().epoch();
    let list = objects(&[object(b"f", Kind::File), object(b"g", Kind::File)]);
    pool.ask(Request::Import { ino: top, objects: &list }).unwrap();
    pool.ask(forget(top, b"f", false)).unwrap();
    assert_eq!(pool.ask(Request::Listed { ino: top, epoch, objects: b"" }), Err(Code::Stale));
    assert_eq!(pool.list(top).err(), Some(Code::NotListed));
    pool.reopen();
    let epoch = pool.attr(top).unwrap().epoch();
    pool.ask(Request::Import { ino: top, objects: &list }).unwrap();
    pool.ask(Request::Listed { ino: top, epoch, objects: b"" }).unwrap();
    assert_eq!(pool.list(top).unwrap().len(), 2);
    pool.assert_clean();
}

#[test]
fn the_last_objects_of_a_listing_are_imported_with_its_end_or_not_at_all() {
    let mut pool = Pool::new(true);
    let top = pool.top;
    let before = pool.attr(top).unwrap();
    let (first, last) = (objects(&[object(b"f", Kind::File)]), objects(&[object(b"g", Kind::File)]));
    pool.ask(Request::Import { ino: top, objects: &first }).unwrap();
    let stale = Request::Listed { ino: top, epoch: before.epoch() + 1, objects: &last };
    assert_eq!(pool.ask(stale), Err(Code::Stale));
    assert_eq!(pool.ask(Request::Lookup { parent: top, name: b"g" }), Err(Code::NotListed));
    let epoch = before.epoch();
    let is_listed = |reply: forebay_types::Reply<'_>| matches!(reply, forebay_types::Reply::Entry(_));
    assert_eq!(pool.with(Request::Listed { ino: top, epoch, objects: &last }, is_listed), Ok(true));
    assert_eq!(pool.list(top).unwrap().len(), 2);
    assert_eq!(pool.attr(top).unwrap().mtime, before.mtime, "it has had these entries all along");
    pool.reopen();
    assert_eq!(pool.list(top).unwrap().len(), 2);
    pool.assert_clean();
}
