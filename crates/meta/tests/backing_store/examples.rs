//! Examples of each request: what it does, and what it refuses.

use forebay_types::{
    Code, Ino, Kind, NodeId, PendingPlace, Request, SetAttr, StoreObject, StoreVersion, TimeSet, Timestamp,
    Wanted, Writer, CHANGES_ALL, EPOCH_UNKNOWN, FLAG_ATTACHED, FLAG_CLOSE_WAITS, FLAG_DIRTY, FLAG_DRAINING,
    FLAG_PINNED, FLAG_RESIDENT, FLAG_UNLISTED,
};

use super::pool::Pool;

const STATES: u32 = FLAG_RESIDENT | FLAG_DIRTY | FLAG_DRAINING;
const NOTHING: StoreVersion = StoreVersion::NOTHING;

fn version(ino: u64) -> StoreVersion {
    StoreVersion { ino, ..NOTHING }
}

fn published(parent: Ino, name: &[u8], ino: Ino, epoch: u64, seen: u64, number: u64) -> Request<'_> {
    Request::Published { parent, name, ino, epoch, seen, version: version(number) }
}

impl Pool {
    fn states(&mut self, ino: Ino) -> u32 {
        self.attr(ino).unwrap().flags & STATES
    }

    fn pending_at(&mut self, name: &[u8]) -> Option<PendingPlace> {
        self.pending().into_iter().find(|place| place.name == name)
    }

    /// A clean file that the store has under this name, with this version.
    pub(super) fn clean_file(&mut self, parent: Ino, name: &[u8], number: u64) -> Ino {
        let ino = self.create(parent, name).unwrap();
        self.ask(Request::BeginDrain { ino }).unwrap();
        let seen = self.pending_at(name).unwrap().changes;
        self.ask(published(parent, name, ino, 0, seen, number)).unwrap();
        assert_eq!(self.states(ino), FLAG_RESIDENT);
        ino
    }

    /// Names of the pending places.
    fn names(&mut self) -> Vec<Vec<u8>> {
        self.pending().into_iter().map(|place| place.name).collect()
    }

    fn copy_of(&mut self, ino: Ino) -> Option<Vec<u8>> {
        Some(self.store_place(ino).ok()?.1.path)
    }
}

pub(super) fn objects(list: &[StoreObject<'_>]) -> Vec<u8> {
    let mut buffer = vec![0; 60_000];
    let mut w = Writer::new(&mut buffer);
    list.iter().for_each(|object| object.encode(&mut w).unwrap());
    let n = w.len();
    buffer.truncate(n);
    buffer
}

pub(super) fn object(name: &[u8], kind: Kind) -> StoreObject<'_> {
    StoreObject {
        name,
        kind,
        mode: 0o640,
        uid: 5,
        gid: 6,
        rdev: 0,
        atime: Timestamp { sec: 7, nsec: 0 },
        version: StoreVersion { bytes: 99, mtime: Timestamp { sec: 8, nsec: 0 }, ..version(1) },
        target: if kind == Kind::Symlink { b"target" } else { b"" },
        nlink: 1,
        file_system: 0,
    }
}

#[test]
fn only_an_empty_directory_outside_every_store_is_attached() {
    let mut pool = Pool::new(false);
    let (top, root) = (pool.top, Ino::ROOT);
    let attach = |ino| Request::Attach { ino, listed: true, settings: b"s" };
    let inside = pool.mkdir(top, b"inside").unwrap();
    assert_eq!(pool.ask(attach(top)), Err(Code::Exists));
    assert_eq!(pool.ask(attach(inside)), Err(Code::Exists));
    assert_eq!(pool.ask(attach(root)), Err(Code::NotEmpty));
    assert_eq!(pool.ask(Request::Detach { ino: inside }), Err(Code::NoAttribute));
    assert_eq!(pool.ask(Request::Detach { ino: top }), Err(Code::NotEmpty));
    pool.ask(Request::RemoveDirectory { parent: top, name: b"inside" }).unwrap();
    pool.ask(Request::Detach { ino: top }).unwrap();
    assert_eq!(pool.attr(top).unwrap().flags & FLAG_ATTACHED, 0);
    pool.assert_clean();
}

#[test]
fn the_directory_with_a_store_stays_where_it_is_and_nothing_crosses_its_border() {
    let mut pool = Pool::new(false);
    let (top, root) = (pool.top, Ino::ROOT);
    assert_eq!(pool.rename((root, b"top"), (root, b"other"), 0), Err(Code::Busy));
    assert_eq!(pool.ask(Request::RemoveDirectory { parent: root, name: b"top" }), Err(Code::Busy));
    let inside = pool.create(top, b"f").unwrap();
    assert_eq!(pool.rename((top, b"f"), (root, b"f"), 0), Err(Code::CrossDevice));
    assert_eq!(pool.ask(Request::Link { ino: inside, parent: root, name: b"f" }), Err(Code::CrossDevice));
    let outside = pool.create(root, b"g").unwrap();
    assert_eq!(pool.ask(Request::Link { ino: outside, parent: top, name: b"g" }), Err(Code::CrossDevice));
}

#[test]
fn the_width_of_new_directories_and_closes_that_wait_are_set_apart() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    let width = |width| SetAttr { width_of_new: Some(width), ..SetAttr::default() };
    let odd = pool.mkdir(Ino::ROOT, b"odd").unwrap();
    pool.ask(Request::SetAttr { ino: odd, set: width(3) }).unwrap();
    let file = pool.create(odd, b"f").unwrap();
    assert_eq!(pool.attr(odd).unwrap().flags & FLAG_CLOSE_WAITS, 0);
    assert_eq!(pool.attr(file).unwrap().flags & FLAG_CLOSE_WAITS, 0);
    pool.ask(Request::WaitForStore { ino: top, fsync: false, close: true }).unwrap();
    for set in [2, 3, 0] {
        pool.ask(Request::SetAttr { ino: top, set: width(set) }).unwrap();
        pool.reopen();
        let attr = pool.attr(top).unwrap();
        assert_eq!((attr.width_of_new(), attr.flags & FLAG_CLOSE_WAITS), (set, FLAG_CLOSE_WAITS));
    }
    let file = pool.create(top, b"f").unwrap();
    assert_eq!(pool.attr(file).unwrap().flags & FLAG_CLOSE_WAITS, FLAG_CLOSE_WAITS);
}

#[test]
fn released_file_takes_over_a_version_of_another_program_in_one_step() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    let ino = pool.clean_file(top, b"f", 1);
    pool.release(ino).unwrap();
    let before = pool.attr(ino).unwrap();
    let theirs = StoreVersion { bytes: 77, mtime: Timestamp { sec: 9, nsec: 8 }, ..version(2) };
    let report = |seen, version| Request::Published {
        parent: top,
        name: b"f",
        ino,
        epoch: before.epoch(),
        seen,
        version,
    };
    // A version that the mover made says nothing of the pool's attributes.
    pool.ask(report(0, theirs)).unwrap();
    let attr = pool.attr(ino).unwrap();
    assert_eq!((attr.size, attr.mtime), (before.size, before.mtime));
    let theirs = StoreVersion { bytes: 78, ..theirs };
    pool.ask(report(CHANGES_ALL, theirs)).unwrap();
    let attr = pool.attr(ino).unwrap();
    assert_eq!((attr.size, attr.mtime), (78, theirs.mtime));
    assert_eq!(attr.flags & STATES, 0);
    pool.reopen();
    assert_eq!(pool.attr(ino).unwrap().size, 78);
    // Another thread that looked at the same time changes nothing.
    assert_eq!(pool.ask(report(CHANGES_ALL, theirs)), Err(Code::Stale));
    assert_eq!(pool.attr(ino).unwrap(), attr);
    // The same once more changes nothing: it is known.
    let (size, mtime) = (attr.size, attr.mtime);
    let again = Request::Published {
        parent: top,
        name: b"f",
        ino,
        epoch: attr.epoch(),
        seen: CHANGES_ALL,
        version: theirs,
    };
    pool.ask(again).unwrap();
    let attr = pool.attr(ino).unwrap();
    assert_eq!((attr.size, attr.mtime), (size, mtime));
    pool.assert_clean();
}

#[test]
fn another_programs_version_voids_a_restore_of_the_one_before() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    let ino = pool.clean_file(top, b"f", 1);
    pool.release(ino).unwrap();
    let before = pool.attr(ino).unwrap();
    let report = |epoch, number| Request::Published {
        parent: top,
        name: b"f",
        ino,
        epoch,
        seen: CHANGES_ALL,
        version: version(number),
    };
    // A restore has read the first version, and another program has written the second.
    pool.ask(report(before.epoch(), 2)).unwrap();
    assert_eq!(pool.restore(ino, before.epoch()), Err(Code::Stale));
    let now = pool.attr(ino).unwrap();
    assert_eq!((now.versions_taken_over(), before.versions_taken_over()), (1, 0));
    assert_eq!(pool.store_place(ino).unwrap().1.epoch, now.epoch());
    // A restore of the second is sound: the file is clean. A third version is not that of its data.
    pool.restore(ino, now.epoch()).unwrap();
    assert_eq!(pool.states(ino), FLAG_RESIDENT);
    assert_eq!(pool.ask(report(now.epoch(), 3)), Err(Code::Stale));
    pool.release(ino).unwrap();
    assert_eq!(pool.attr(ino).unwrap().epoch(), now.epoch() + 1);
    pool.assert_clean();
}

#[test]
fn no_link_leads_from_one_store_into_another() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    let second = pool.mkdir(Ino::ROOT, b"second").unwrap();
    pool.ask(Request::Attach { ino: second, listed: false, settings: b"s" }).unwrap();
    let ino = pool.clean_file(top, b"f", 1);
    assert_eq!(pool.ask(Request::Link { ino, parent: second, name: b"f" }), Err(Code::CrossDevice));
    assert_eq!(pool.rename((top, b"f"), (second, b"f"), 0), Err(Code::CrossDevice));
    pool.ask(Request::Link { ino, parent: top, name: b"g" }).unwrap();
    pool.assert_clean();
}

#[test]
fn names_that_the_pool_knows_are_not_imported_again() {
    let mut pool = Pool::new(true);
    let top = pool.top;
    assert_eq!(pool.create(top, b"f"), Err(Code::NotListed));
    let list = objects(&[
        object(b"f", Kind::File),
        object(b"d", Kind::Directory),
        object(b"l", Kind::Symlink),
        object(b"f", Kind::File),
    ]);
    pool.ask(Request::Import { ino: top, objects: &list }).unwrap();
    pool.ask(Request::Listed { ino: top, epoch: 0, objects: b"" }).unwrap();
    pool.ask(Request::Unlink { parent: top, name: b"l" }).unwrap();
    // A refresh: what the pool removed, and the store still has, does not come back.
    pool.ask(Request::Import { ino: top, objects: &list }).unwrap();
    assert_eq!(pool.lookup(top, b"l").map(|_| ()), Err(Code::NotFound));
    pool.ask(Request::Import { ino: top, objects: &objects(&[object(b"new", Kind::File)]) }).unwrap();
    pool.lookup(top, b"new").unwrap();
    assert_eq!(pool.list(top).unwrap().len(), 3);
    assert_eq!(pool.names(), [b"l"], "the store has the others");
    let file = pool.lookup(top, b"f").unwrap();
    assert_eq!((file.size, file.uid, file.mtime.sec, file.flags), (99, 5, 8, FLAG_ATTACHED));
    let directory = pool.lookup(top, b"d").unwrap();
    assert!(directory.flags & FLAG_UNLISTED != 0);
    let rmdir = Request::RemoveDirectory { parent: top, name: b"d" };
    assert_eq!(pool.ask(rmdir), Err(Code::NotListed));
    let removal = Request::Intend { parent: top, name: b"d", version: NOTHING };
    pool.rename((top, b"d"), (top, b"e"), 0).unwrap();
    assert_eq!(pool.ask(removal), Err(Code::Busy), "it may have names");
    pool.assert_clean();
}

#[test]
fn a_file_is_clean_only_if_the_epoch_that_was_copied_is_the_present_one() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    let ino = pool.create(top, b"f").unwrap();
    let seen = pool.pending_at(b"f").unwrap().changes;
    pool.ask(Request::BeginDrain { ino }).unwrap();
    pool.ask(Request::MarkDirty { ino }).unwrap();
    pool.ask(published(top, b"f", ino, 0, seen, 1)).unwrap();
    assert_eq!(pool.states(ino), FLAG_RESIDENT | FLAG_DIRTY);
    assert!(pool.pending_at(b"f").is_some());
    // The epoch is right, but the drain had not begun.
    pool.ask(published(top, b"f", ino, 1, seen, 2)).unwrap();
    assert_eq!(pool.states(ino), FLAG_RESIDENT | FLAG_DIRTY);
    assert_eq!(pool.store_place(ino).unwrap().1.epoch, EPOCH_UNKNOWN);
    pool.ask(Request::BeginDrain { ino }).unwrap();
    let seen = pool.pending_at(b"f").unwrap().changes;
    pool.ask(published(top, b"f", ino, 1, seen, 3)).unwrap();
    assert_eq!((pool.states(ino), pool.names().len()), (FLAG_RESIDENT, 0));
    pool.assert_clean();
}

#[test]
fn attributes_that_change_during_the_first_publication_are_published_next() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    // A file: the drain is void.
    let ino = pool.create(top, b"f").unwrap();
    pool.ask(Request::BeginDrain { ino }).unwrap();
    pool.chmod(ino, 0o600).unwrap();
    pool.ask(published(top, b"f", ino, 0, 1, 1)).unwrap();
    assert!(pool.states(ino) & FLAG_DIRTY != 0);
    // A directory and a symbolic link: their places stay pending.
    let directory = pool.mkdir(top, b"d").unwrap();
    pool.ask(Request::Symlink { parent: top, name: b"l", target: b"t" }).unwrap();
    let link = pool.lookup(top, b"l").unwrap().ino;
    for (ino, name) in [(directory, b"d".as_slice()), (link, b"l")] {
        let seen = pool.pending_at(name).unwrap().changes;
        let set = SetAttr { gid: Some(9), ..SetAttr::default() };
        pool.ask(Request::SetAttr { ino, set }).unwrap();
        pool.ask(published(top, name, ino, 0, seen, 2)).unwrap();
        let place = pool.pending_at(name).unwrap();
        pool.ask(published(top, name, ino, 0, place.changes, 2)).unwrap();
        assert!(pool.pending_at(name).is_none());
    }
    pool.assert_clean();
}

#[test]
fn attributes_that_change_before_a_renamed_file_is_moved_are_published_next() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    let ino = pool.clean_file(top, b"a", 1);
    pool.rename((top, b"a"), (top, b"b"), 0).unwrap();
    let seen = pool.pending_at(b"b").unwrap().changes;
    pool.chmod(ino, 0o600).unwrap();
    let (name, new_name) = (b"a".as_slice(), b"b".as_slice());
    pool.ask(Request::Moved { parent: top, name, new_parent: top, new_name, version: version(1) }).unwrap();
    pool.ask(published(top, b"b", ino, 0, seen, 1)).unwrap();
    assert!(pool.pending_at(b"b").is_some());
    assert_eq!(pool.copy_of(ino).unwrap(), b"b");
    pool.assert_clean();
}

#[test]
fn a_released_file_keeps_its_only_copy() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    let ino = pool.clean_file(top, b"a", 1);
    pool.release(ino).unwrap();
    assert_eq!((pool.states(ino), pool.attr(ino).unwrap().epoch()), (0, 1));
    pool.rename((top, b"a"), (top, b"b"), 0).unwrap();
    let other = pool.create(top, b"a").unwrap();
    let seen = pool.pending_at(b"a").unwrap().changes;
    let refused = [
        Request::Unpublished { parent: top, name: b"a", seen },
        Request::Intend { parent: top, name: b"a", version: NOTHING },
        Request::Intend { parent: top, name: b"a", version: version(2) },
        Request::Conflict { parent: top, name: b"a", found: false, version: version(2) },
        published(top, b"a", other, 0, seen, 2),
    ];
    for request in refused {
        assert_eq!(pool.ask(request), Err(Code::Busy), "{request:?}");
    }
    assert_eq!(pool.ask(published(top, b"b", ino, 0, 1, 2)), Err(Code::Stale), "another epoch");
    // It goes where the pool has it; then the place is free.
    pool.ask(Request::Intend { parent: top, name: b"a", version: version(1) }).unwrap();
    let (name, new_name) = (b"a".as_slice(), b"b".as_slice());
    pool.ask(Request::Moved { parent: top, name, new_parent: top, new_name, version: version(1) }).unwrap();
    pool.ask(Request::Intend { parent: top, name: b"a", version: version(2) }).unwrap();
    assert!(matches!(pool.pending_at(b"b").unwrap().wanted, Some(Wanted::Here(_, Some(_)))));
    pool.restore(ino, 1).unwrap();
    assert_eq!(pool.states(ino), FLAG_RESIDENT);
    pool.assert_clean();
}

#[test]
fn release_keeps_the_change_time_and_takes_that_of_a_write_which_the_shard_did_not_see() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    let second = |sec| Timestamp { sec, nsec: 3 };
    for (name, wrote) in [(b"a", false), (b"b", true)] {
        let ino = pool.clean_file(top, name, 1);
        let before = pool.attr(ino).unwrap();
        let mtime = if wrote { second(before.ctime.sec + 60) } else { before.mtime };
        let set = SetAttr { mtime: TimeSet::At(mtime), ..SetAttr::default() };
        pool.ask(Request::Release { ino, epoch: before.epoch(), set }).unwrap();
        let after = pool.attr(ino).unwrap();
        assert_eq!((after.mtime, after.ctime), (mtime, if wrote { mtime } else { before.ctime }));
    }
}

#[test]
fn release_is_refused_unless_the_store_has_the_data_and_keeps_them() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    let ino = pool.create(top, b"a").unwrap();
    assert_eq!(pool.release(ino), Err(Code::Stale), "it is dirty");
    let ino = pool.clean_file(top, b"b", 1);
    pool.ask(Request::Pin { ino, pinned: true }).unwrap();
    assert!(pool.attr(ino).unwrap().flags & FLAG_PINNED != 0);
    assert_eq!(pool.release(ino), Err(Code::Busy));
    pool.ask(Request::Pin { ino, pinned: false }).unwrap();
    pool.ask(Request::Intend { parent: top, name: b"b", version: version(1) }).unwrap();
    assert_eq!(pool.release(ino), Err(Code::Busy), "a mover is about to move it");
    pool.ask(Request::Settled { parent: top, name: b"b", seen: 0 }).unwrap();
    pool.ask(Request::Conflict { parent: top, name: b"b", found: true, version: version(9) }).unwrap();
    assert_eq!(pool.states(ino), FLAG_RESIDENT | FLAG_DIRTY, "the pool alone has its version");
    assert_eq!(pool.release(ino), Err(Code::Stale));
    let stale = Request::Release { ino, epoch: 7, set: SetAttr::default() };
    assert_eq!(pool.ask(stale), Err(Code::Stale));
    pool.assert_clean();
}

#[test]
fn a_place_is_pending_until_the_store_has_what_the_pool_wants_there() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    let ino = pool.clean_file(top, b"a", 1);
    pool.ask(Request::Unlink { parent: top, name: b"a" }).unwrap();
    pool.create(top, b"a").unwrap();
    let seen = pool.pending_at(b"a").unwrap().changes;
    pool.ask(Request::Settled { parent: top, name: b"a", seen }).unwrap();
    assert_eq!(pool.pending_at(b"a").unwrap().placed.unwrap().ino, ino);
    pool.ask(Request::Unpublished { parent: top, name: b"a", seen }).unwrap();
    assert!(pool.pending_at(b"a").unwrap().placed.is_none(), "the new file is still to be published");
    // What was published for a file that is gone is to be removed, although the name came and went.
    let gone = pool.create(top, b"b").unwrap();
    pool.ask(Request::Unlink { parent: top, name: b"b" }).unwrap();
    assert!(pool.pending_at(b"b").is_none());
    pool.ask(published(top, b"b", gone, 0, 1, 2)).unwrap();
    assert_eq!(pool.pending_at(b"b").unwrap().placed.unwrap().ino, gone);
    pool.assert_clean();
}

#[test]
fn a_name_that_came_and_went_after_an_intent_stays_pending() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    pool.create(top, b"a").unwrap();
    pool.ask(Request::Intend { parent: top, name: b"a", version: version(1) }).unwrap();
    pool.ask(Request::Unlink { parent: top, name: b"a" }).unwrap();
    let place = pool.pending_at(b"a").unwrap();
    assert_eq!((place.intent, place.wanted), (Some(version(1)), None));
    // A refresh that sees what the mover has just published does not bring the name back.
    pool.ask(Request::Import { ino: top, objects: &objects(&[object(b"a", Kind::File)]) }).unwrap();
    assert_eq!(pool.lookup(top, b"a").map(|_| ()), Err(Code::NotFound));
    pool.ask(Request::Settled { parent: top, name: b"a", seen: place.changes }).unwrap();
    assert!(pool.pending_at(b"a").is_none());
}

#[test]
fn an_open_that_finds_the_name_changes_nothing() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    pool.create(top, b"a").unwrap();
    let open = Request::Create {
        parent: top,
        name: b"a",
        mode: 0,
        exclusive: false,
        dirty: false,
        layout: None,
        number: None,
        reserve: false,
    };
    pool.ask(open).unwrap();
    assert_eq!(pool.pending_at(b"a").unwrap().changes, 1);
}

#[test]
fn a_change_of_a_file_reaches_all_its_names_and_its_copy_outlives_any_of_them() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    let ino = pool.clean_file(top, b"a", 1);
    for name in [b"b", b"c"] {
        pool.ask(Request::Link { ino, parent: top, name }).unwrap();
        let seen = pool.pending_at(name).unwrap().changes;
        pool.ask(published(top, name, ino, 0, seen, 1)).unwrap();
    }
    assert_eq!(pool.names(), Vec::<Vec<u8>>::new());
    pool.chmod(ino, 0o600).unwrap();
    for name in [b"a", b"b", b"c"] {
        assert_eq!(pool.names(), [name]);
        let seen = pool.pending_at(name).unwrap().changes;
        pool.ask(Request::Settled { parent: top, name, seen }).unwrap();
    }
    assert_eq!(pool.names(), Vec::<Vec<u8>>::new());
    // Its data are released, then the name of its copy is removed.
    pool.release(ino).unwrap();
    pool.ask(Request::Unlink { parent: top, name: b"a" }).unwrap();
    pool.ask(Request::Intend { parent: top, name: b"a", version: NOTHING }).unwrap();
    let seen = pool.pending_at(b"a").unwrap().changes;
    pool.ask(Request::Unpublished { parent: top, name: b"a", seen }).unwrap();
    assert_eq!(pool.copy_of(ino).unwrap(), b"b");
    pool.assert_clean();
}

#[test]
fn a_directory_of_the_store_is_removed_after_what_is_in_it() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    let directory = pool.mkdir(top, b"d").unwrap();
    pool.ask(published(top, b"d", directory, 0, 1, 1)).unwrap();
    pool.clean_file(directory, b"f", 2);
    pool.ask(Request::Unlink { parent: directory, name: b"f" }).unwrap();
    pool.ask(Request::RemoveDirectory { parent: top, name: b"d" }).unwrap();
    let again = pool.mkdir(top, b"d").unwrap();
    let seen = pool.pending_at(b"d").unwrap().changes;
    for request in [
        Request::Intend { parent: top, name: b"d", version: NOTHING },
        Request::Unpublished { parent: top, name: b"d", seen },
        published(top, b"d", again, 0, seen, 1),
    ] {
        assert_eq!(pool.ask(request), Err(Code::Busy), "{request:?}");
    }
    assert_eq!(pool.copy_of(directory).unwrap(), b"d", "the path to what is to be removed");
    pool.ask(Request::Unpublished { parent: directory, name: b"f", seen: 1 }).unwrap();
    pool.ask(published(top, b"d", again, 0, seen, 1)).unwrap();
    assert_eq!((pool.names().len(), pool.copy_of(directory)), (0, None));
    assert_eq!(pool.ask(published(top, b"e", again, 0, 1, 1)), Err(Code::Busy), "it has one path");
    pool.assert_clean();
}

#[test]
fn a_parked_inode_is_to_be_fetched() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    let ino = pool.clean_file(top, b"a", 1);
    pool.rename((top, b"a"), (top, b"b"), 0).unwrap();
    let (name, new_name) = (b"a".as_slice(), b".parked".as_slice());
    let moved = Request::Moved { parent: top, name, new_parent: top, new_name, version: version(1) };
    pool.ask(moved).unwrap();
    assert_eq!(pool.ask(moved), Err(Code::NotFound));
    assert_eq!(pool.pending_at(b".parked").unwrap().placed.unwrap().ino, ino);
    assert_eq!(pool.copy_of(ino).unwrap(), b".parked");
    pool.assert_clean();
}

#[test]
fn requests_for_what_is_no_file_of_a_store_are_refused() {
    let mut pool = Pool::new(false);
    let (top, plain) = (pool.top, pool.create(Ino::ROOT, b"plain").unwrap());
    let restored = pool.restored(plain, 0);
    let refused = [
        (restored, Code::Invalid),
        (Request::BeginDrain { ino: plain }, Code::Invalid),
        (Request::BeginDrain { ino: top }, Code::IsDirectory),
        (Request::Pin { ino: plain, pinned: true }, Code::NoAttribute),
        (Request::StorePlace { ino: plain }, Code::NotFound),
        (Request::Import { ino: Ino::ROOT, objects: b"" }, Code::NoAttribute),
        (Request::Listed { ino: plain, epoch: 0, objects: b"" }, Code::NotDirectory),
    ];
    for (request, code) in refused {
        assert_eq!(pool.ask(request), Err(code), "{request:?}");
    }
}

#[test]
fn hundreds_of_names_are_imported_at_once() {
    let mut pool = Pool::new(true);
    let top = pool.top;
    let names: Vec<_> = (0..600).map(|n| format!("name {n}").into_bytes()).collect();
    let all: Vec<_> = names.iter().map(|name| object(name, Kind::File)).collect();
    let list = objects(&all);
    let count = pool.with(Request::Import { ino: top, objects: &list }, |reply| match reply {
        forebay_types::Reply::Count(count) => count,
        other => panic!("{other:?}"),
    });
    assert_eq!(count, Ok(600));
    pool.assert_clean();
}

pub(super) fn forget(parent: Ino, name: &[u8], discard: bool) -> Request<'_> {
    Request::Forget { parent, name, relist: true, discard }
}

#[test]
fn a_name_that_is_not_pending_is_forgotten_and_the_directory_is_listed_again() {
    let mut pool = Pool::new(true);
    let top = pool.top;
    pool.ask(Request::Listed { ino: top, epoch: 0, objects: b"" }).unwrap();
    let ino = pool.clean_file(top, b"a", 1);
    let directory = pool.mkdir(top, b"d").unwrap();
    pool.ask(published(top, b"d", directory, 0, 1, 2)).unwrap();
    pool.clean_file(directory, b"in", 3);
    assert_eq!(pool.ask(forget(top, b"d", false)), Err(Code::NotEmpty));
    assert_eq!(pool.ask(forget(top, b"none", false)), Err(Code::NotFound));
    assert_eq!(pool.ask(forget(Ino::ROOT, b"top", false)), Err(Code::NoAttribute), "it belongs to no store");
    pool.ask(forget(directory, b"in", false)).unwrap();
    // Although it is to be listed again.
    pool.ask(forget(top, b"d", false)).unwrap();
    pool.ask(forget(top, b"a", false)).unwrap();
    assert_eq!((pool.names().len(), pool.copy_of(ino), pool.copy_of(directory)), (0, None, None));
    assert_eq!(pool.ask(Request::Lookup { parent: top, name: b"a" }), Err(Code::NotListed));
    pool.assert_clean();
    pool.ask(Request::Import { ino: top, objects: &objects(&[object(b"a", Kind::File)]) }).unwrap();
    pool.ask(Request::Listed { ino: top, epoch: 2, objects: b"" }).unwrap();
    pool.ask(Request::Lookup { parent: top, name: b"a" }).unwrap();
    pool.ask(forget(top, b"a", false)).unwrap();
    pool.ask(Request::Detach { ino: top }).unwrap();
    pool.assert_clean();
}

#[test]
fn a_directory_in_which_the_store_still_has_a_file_that_was_moved_out_is_not_forgotten() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    let directory = pool.mkdir(top, b"d").unwrap();
    pool.ask(published(top, b"d", directory, 0, 1, 2)).unwrap();
    let ino = pool.clean_file(directory, b"in", 3);
    pool.release(ino).unwrap();
    pool.rename((directory, b"in"), (top, b"out"), 0).unwrap();
    assert_eq!(pool.ask(forget(top, b"d", false)), Err(Code::Busy));
    assert_eq!(pool.copy_of(ino).unwrap(), b"d/in");
    pool.assert_clean();
}

#[test]
fn what_the_store_does_not_have_is_forgotten_only_if_it_is_discarded() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    let ino = pool.clean_file(top, b"a", 1);
    pool.ask(Request::MarkDirty { ino }).unwrap();
    pool.create(top, b"new").unwrap();
    pool.clean_file(top, b"gone", 2);
    pool.ask(Request::Unlink { parent: top, name: b"gone" }).unwrap();
    let moved = pool.clean_file(top, b"from", 3);
    let to = Request::Rename { parent: top, name: b"from", new_parent: top, new_name: b"to", flags: 0 };
    pool.ask(to).unwrap();
    let removed = pool.mkdir(top, b"d").unwrap();
    pool.ask(published(top, b"d", removed, 0, 1, 4)).unwrap();
    pool.clean_file(removed, b"in", 5);
    pool.ask(Request::Unlink { parent: removed, name: b"in" }).unwrap();
    pool.ask(Request::RemoveDirectory { parent: top, name: b"d" }).unwrap();
    let all = [
        (top, &b"a"[..]),
        (top, b"new"),
        (top, b"gone"),
        (top, b"from"),
        (top, b"to"),
        (removed, b"in"),
        (top, b"d"),
    ];
    for (parent, name) in all {
        assert_eq!(pool.ask(forget(parent, name, false)), Err(Code::Busy), "{name:?}");
    }
    assert_eq!(pool.ask(Request::Detach { ino: top }), Err(Code::NotEmpty));
    for (parent, name) in all {
        pool.ask(forget(parent, name, true)).unwrap();
    }
    assert_eq!((pool.names().len(), pool.copy_of(moved), pool.copy_of(removed)), (0, None, None));
    pool.ask(Request::Detach { ino: top }).unwrap();
    pool.assert_clean();
}

#[test]
fn names_of_one_file_are_forgotten_one_by_one_and_it_keeps_a_copy() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    let ino = pool.clean_file(top, b"a", 1);
    pool.ask(Request::Link { ino, parent: top, name: b"b" }).unwrap();
    let seen = pool.pending_at(b"b").unwrap().changes;
    pool.ask(published(top, b"b", ino, 0, seen, 1)).unwrap();
    pool.release(ino).unwrap();
    pool.ask(forget(top, b"a", false)).unwrap();
    assert_eq!(pool.copy_of(ino).unwrap(), b"b");
    pool.assert_clean();
    pool.ask(forget(top, b"b", false)).unwrap();
    assert_eq!((pool.names().len(), pool.copy_of(ino)), (0, None));
    pool.assert_clean();
}

#[test]
fn a_store_is_detached_while_another_has_pending_places() {
    let mut pool = Pool::new(false);
    let other =
        pool.entry(Request::MakeDirectory { parent: Ino::ROOT, name: b"o", mode: 0o755 }).unwrap().ino;
    pool.ask(Request::Attach { ino: other, listed: false, settings: b"s" }).unwrap();
    pool.clean_file(other, b"f", 1);
    pool.ask(Request::Unlink { parent: other, name: b"f" }).unwrap();
    assert_eq!(pool.ask(Request::Detach { ino: other }), Err(Code::Busy));
    pool.ask(Request::Detach { ino: pool.top }).unwrap();
    pool.assert_clean();
}

#[test]
fn relocation_of_a_released_file_voids_a_restore_that_is_under_way() {
    let mut p = Pool::new(false);
    let root = p.top;
    let ino = p.clean_file(root, b"f", 3);
    let relocate = |node| Request::Relocate { ino, node: NodeId(node) };
    assert_eq!(p.ask(relocate(2)), Err(Code::Stale), "its data are here");
    p.release(ino).unwrap();
    let before = p.attr(ino).unwrap().epoch();
    assert_eq!(p.ask(relocate(0)), Err(Code::Invalid));
    p.ask(relocate(2)).unwrap();
    let after = p.attr(ino).unwrap().epoch();
    assert_ne!(after, before);
    assert_eq!(p.restore(ino, before), Err(Code::Stale), "it went to the old place");
    p.restore(ino, after).unwrap();
    assert_eq!(p.states(ino), FLAG_RESIDENT, "the store has the same data");
    assert!(p.pending().is_empty());
    p.assert_clean();
}

#[test]
fn a_directory_that_was_made_in_the_store_and_removed_in_the_pool_is_known_as_a_directory() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    let d = pool.entry(Request::MakeDirectory { parent: top, name: b"d", mode: 0o755 }).unwrap().ino;
    let seen = pool.pending_at(b"d").unwrap().changes;
    pool.ask(Request::Intend { parent: top, name: b"d", version: StoreVersion::A_DIRECTORY }).unwrap();
    pool.ask(Request::RemoveDirectory { parent: top, name: b"d" }).unwrap();
    pool.ask(published(top, b"d", d, EPOCH_UNKNOWN, seen, 0)).unwrap();
    let pending = pool.pending_at(b"d").unwrap();
    assert_eq!(pending.placed.map(|placed| placed.kind), Some(Kind::Directory));
    assert_eq!(pending.wanted, None);
    pool.assert_clean();
}

#[test]
fn links_to_one_object_of_the_store_follow_a_change_of_its_time() {
    let mut pool = Pool::new(false);
    let top = pool.top;
    let ino = pool.clean_file(top, b"a", 1);
    pool.ask(Request::Link { ino, parent: top, name: b"b" }).unwrap();
    let seen = pool.pending_at(b"b").unwrap().changes;
    let epoch = pool.attr(ino).unwrap().epoch();
    pool.ask(published(top, b"b", ino, epoch, seen, 1)).unwrap();
    let touched = StoreVersion { mtime: Timestamp { sec: 5, nsec: 6 }, ..version(1) };
    let change = |version| Request::Published { parent: top, name: b"a", ino, epoch, seen: 0, version };
    pool.ask(change(touched)).unwrap();
    for name in [b"a", b"b"] {
        pool.ask(Request::Unlink { parent: top, name }).unwrap();
    }
    let versions: Vec<_> =
        pool.pending().iter().map(|place| place.placed.map(|placed| placed.version)).collect();
    assert_eq!(versions, [Some(touched), Some(touched)]);
    pool.assert_clean();
}
