//! Names of one file of the store, which are imported at different times.

use forebay_types::{
    Attr, Code, Ino, Kind, PendingPlace, Request, SetAttr, StoreObject, StoreVersion, TimeSet, Timestamp,
    EPOCH_UNKNOWN, FLAG_DIRTY, FLAG_RESIDENT,
};

use super::examples::{forget, object, objects};
use super::pool::Pool;

const VERSION: StoreVersion =
    StoreVersion { bytes: 99, mtime: Timestamp { sec: 8, nsec: 0 }, ino: 70, tag: 0 };

/// One of two names of the store's file 70.
fn named(name: &[u8]) -> StoreObject<'_> {
    StoreObject { version: VERSION, nlink: 2, ..object(name, Kind::File) }
}

impl Pool {
    fn import(&mut self, directory: Ino, object: StoreObject<'_>) -> Attr {
        self.ask(Request::Import { ino: directory, objects: &objects(&[object]) }).unwrap();
        self.lookup(directory, object.name).unwrap()
    }

    fn place(&mut self, name: &[u8]) -> Option<PendingPlace> {
        self.pending().into_iter().find(|place| place.name == name)
    }

    fn publish(&mut self, name: &[u8], ino: Ino, epoch: u64, version: StoreVersion) -> Result<(), Code> {
        let (parent, seen) = (self.top, self.place(name).map_or(0, |place| place.changes));
        self.ask(Request::Published { parent, name, ino, epoch, seen, version })
    }
}

/// A pool whose store has a file with the names `a` and `d/b`, of which `a` is known.
fn half_known() -> (Pool, Ino, Ino) {
    let mut pool = Pool::new(true);
    let top = pool.top;
    let ino = pool.import(top, named(b"a")).ino;
    let directory = pool.import(top, object(b"d", Kind::Directory)).ino;
    (pool, ino, directory)
}

#[test]
fn names_of_one_file_of_the_store_are_names_of_one_inode() {
    let (mut pool, ino, directory) = half_known();
    let top = pool.top;
    let before = pool.attr(ino).unwrap();
    let second = named(b"b");
    pool.ask(Request::Import { ino: directory, objects: &objects(&[second]) }).unwrap();
    assert_eq!(pool.shown(), (0, 1, 0), "the board gets the name, and the inode as changed");
    let second = pool.lookup(directory, b"b").unwrap();
    assert_eq!((second.ino, second.nlink, second.ctime), (ino, 2, before.ctime));
    assert_eq!(pool.pending(), [], "the store has them");
    // The data are restored once, and the store is left with one name.
    pool.restore(ino, 0).unwrap();
    pool.ask(Request::Unlink { parent: top, name: b"a" }).unwrap();
    let seen = pool.place(b"a").unwrap().changes;
    pool.ask(Request::Intend { parent: top, name: b"a", version: StoreVersion::NOTHING }).unwrap();
    assert_eq!(pool.attr(ino).unwrap().flags & FLAG_DIRTY, 0, "the other name has the data");
    pool.ask(Request::Unpublished { parent: top, name: b"a", seen }).unwrap();
    let (path, place) = pool.store_place(ino).unwrap();
    assert_eq!((path, place.epoch), (vec![b"d".to_vec(), b"b".to_vec()], 0));
    let seen = pool.place(b"b").expect("changes were noted at the lost place").changes;
    pool.ask(Request::Settled { parent: directory, name: b"b", seen }).unwrap();
    // The last name takes the record along: what comes is a file of its own.
    pool.ask(forget(directory, b"b", false)).unwrap();
    assert_ne!(pool.import(directory, named(b"b")).ino, ino);
    pool.assert_clean();
}

#[test]
fn files_that_only_look_alike_stay_apart() {
    let (mut pool, ino, directory) = half_known();
    let later = StoreVersion { mtime: Timestamp { sec: 9, nsec: 0 }, ..VERSION };
    let others = [
        StoreObject { file_system: 5, ..named(b"snapshot") },
        StoreObject { version: later, ..named(b"number used again") },
        StoreObject { version: StoreVersion { ino: 71, ..VERSION }, ..named(b"copy") },
    ];
    let mut inodes = vec![ino];
    for other in others {
        inodes.push(pool.import(directory, other).ino);
    }
    inodes.sort_unstable();
    inodes.dedup();
    assert_eq!(inodes.len(), 4);
    // Of objects without links, as of an object store, nothing is remembered.
    let alone = StoreObject { nlink: 1, version: StoreVersion { ino: 72, ..VERSION }, ..named(b"x") };
    let first = pool.import(directory, alone).ino;
    assert_ne!(pool.import(directory, StoreObject { name: b"y", ..alone }).ino, first);
    pool.assert_clean();
}

#[test]
fn a_name_that_is_listed_after_its_file_was_written_leads_to_the_new_data_and_is_linked_to_them() {
    let (mut pool, ino, directory) = half_known();
    pool.restore(ino, 0).unwrap();
    pool.ask(Request::MarkDirty { ino }).unwrap();
    let epoch = pool.entry(Request::BeginDrain { ino }).unwrap().epoch();
    let new = StoreVersion { ino: 80, ..VERSION };
    pool.publish(b"a", ino, epoch, new).unwrap();
    assert_eq!((pool.attr(ino).unwrap().flags & FLAG_DIRTY, pool.pending()), (0, vec![]));
    pool.reopen();
    // The store has the old file at it, with one name by now.
    let second = pool.import(directory, StoreObject { nlink: 1, ..named(b"b") });
    assert_eq!((second.ino, second.nlink), (ino, 2));
    let place = pool.place(b"b").expect("the store differs there");
    assert_eq!(place.placed.unwrap().version, VERSION);
    // What is there may go, and is no copy of the file's data: those at the first name may not.
    let top = pool.top;
    pool.release(ino).unwrap();
    let intend = |parent, name| Request::Intend { parent, name, version: StoreVersion::NOTHING };
    pool.ask(intend(directory, b"b")).unwrap();
    pool.ask(Request::Unlink { parent: top, name: b"a" }).unwrap();
    assert_eq!(pool.ask(intend(top, b"a")), Err(Code::Busy));
    pool.assert_clean();
}

#[test]
fn a_name_whose_file_another_program_replaced_elsewhere_stays_apart() {
    let theirs = StoreVersion { ino: 90, ..VERSION };
    for by_conflict in [false, true] {
        let (mut pool, ino, directory) = half_known();
        let top = pool.top;
        match by_conflict {
            // A released file takes the store's version over.
            false => pool.publish(b"a", ino, 0, theirs).unwrap(),
            true => {
                pool.ask(Request::Conflict { parent: top, name: b"a", found: true, version: theirs }).unwrap()
            }
        }
        let second = pool.import(directory, StoreObject { nlink: 1, ..named(b"b") });
        assert_ne!(second.ino, ino, "the mover would link the pool's file in its place");
        assert!(pool.place(b"b").is_none());
        pool.assert_clean();
    }
}

#[test]
fn a_name_that_was_looked_at_before_the_times_of_its_file_were_set_joins_it() {
    let (mut pool, ino, directory) = half_known();
    let mtime = Timestamp { sec: 5, nsec: 0 };
    let set = SetAttr { mtime: TimeSet::At(mtime), ..SetAttr::default() };
    pool.ask(Request::SetAttr { ino, set }).unwrap();
    pool.publish(b"a", ino, 0, StoreVersion { mtime, ..VERSION }).unwrap();
    assert_eq!(pool.import(directory, named(b"b")).ino, ino);
    let third = StoreObject { version: StoreVersion { mtime, ..VERSION }, ..named(b"c") };
    assert_eq!(pool.import(directory, third).ino, ino);
    assert_eq!(pool.pending(), []);
    pool.assert_clean();
}

#[test]
fn what_is_written_in_place_in_the_store_is_written_at_all_names() {
    let (mut pool, ino, directory) = half_known();
    pool.import(directory, named(b"b"));
    let longer = StoreVersion { bytes: 200, mtime: Timestamp { sec: 9, nsec: 0 }, ..VERSION };
    pool.publish(b"a", ino, 0, longer).unwrap();
    let place = pool.place(b"b").expect("the mover looks at the other name");
    assert_eq!(place.placed.unwrap().version, longer);
    let (parent, seen) = (directory, place.changes);
    pool.ask(Request::Settled { parent, name: b"b", seen }).unwrap();
    // The data at the other name are those of the copy: the first name may go.
    let top = pool.top;
    pool.ask(Request::Unlink { parent: top, name: b"a" }).unwrap();
    pool.ask(Request::Intend { parent: top, name: b"a", version: StoreVersion::NOTHING }).unwrap();
    let seen = pool.place(b"a").unwrap().changes;
    pool.ask(Request::Unpublished { parent: top, name: b"a", seen }).unwrap();
    assert_eq!(pool.store_place(ino).unwrap().1.epoch, 0);
    pool.assert_clean();
}

#[test]
fn a_conflict_at_one_name_leaves_a_file_the_data_at_the_others() {
    let (mut pool, ino, directory) = half_known();
    let top = pool.top;
    pool.import(directory, named(b"b"));
    pool.restore(ino, 0).unwrap();
    let theirs = StoreVersion { ino: 90, ..VERSION };
    pool.ask(Request::Conflict { parent: top, name: b"a", found: true, version: theirs }).unwrap();
    assert_eq!(pool.attr(ino).unwrap().flags & (FLAG_DIRTY | FLAG_RESIDENT), FLAG_RESIDENT);
    assert_eq!(pool.store_place(ino).unwrap().0, [b"d", b"b"]);
    // The last name is another matter.
    let version = theirs;
    pool.ask(Request::Conflict { parent: directory, name: b"b", found: true, version }).unwrap();
    assert_eq!(pool.attr(ino).unwrap().flags & (FLAG_DIRTY | FLAG_RESIDENT), FLAG_RESIDENT | FLAG_DIRTY);
    assert_eq!(pool.store_place(ino).unwrap().1.epoch, EPOCH_UNKNOWN);
    pool.assert_clean();
}

#[test]
fn a_name_that_left_its_file_is_imported_as_what_the_store_has_there() {
    let (mut pool, ino, directory) = half_known();
    let top = pool.top;
    pool.import(directory, named(b"b"));
    pool.ask(forget(top, b"a", false)).unwrap();
    assert_eq!((pool.attr(ino).unwrap().nlink, pool.store_place(ino).unwrap().0.len()), (1, 2));
    let theirs = StoreObject { version: StoreVersion { ino: 90, ..VERSION }, nlink: 1, ..named(b"a") };
    assert_ne!(pool.import(top, theirs).ino, ino);
    pool.ask(forget(top, b"a", false)).unwrap();
    assert_eq!(pool.import(top, named(b"a")).ino, ino, "if it is the same file, after all");
    pool.assert_clean();
}
