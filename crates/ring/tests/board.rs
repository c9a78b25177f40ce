//! The board: readers see what was published, all of it or nothing.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use forebay_ring::{memfd_sealed, Board, BoardWriter, Lookup, Mapping, NameRef, Seal};
use forebay_types::limits::BOARD_NAME_MAX;
use forebay_types::{Attr, Entry, Ino, Kind, Layout, NodeId, Timestamp, FLAG_ATTACHED, FLAG_UNLISTED};

fn entry(ino: Ino, mode: u32, value: u64) -> Entry {
    let t = Timestamp { sec: value as i64, nsec: 0 };
    let attr = Attr {
        ino,
        size: value,
        rdev: value,
        parent: Ino(value),
        mode,
        uid: value as u32,
        gid: value as u32,
        nlink: 1,
        flags: 0,
        home: NodeId(1),
        width_log2: 0,
        atime: t,
        mtime: t,
        ctime: t,
        btime: t,
    };
    Entry { attr, layout: Layout::single(NodeId(1), 0) }
}

fn board(bytes: u64) -> (BoardWriter, Board) {
    let (fd, writer) = BoardWriter::create(bytes).unwrap();
    let mapping = Mapping::new(fd.as_fd(), writer.bytes(), false).unwrap();
    (writer, Board::open(mapping).unwrap())
}

const FILE: u32 = 0o100_644;
const DIRECTORY: u32 = 0o040_755;

#[test]
fn lookup_of_published_names_hits_and_of_others_is_unknown() {
    let (mut w, board) = board(1 << 20);
    let long = [b'x'; BOARD_NAME_MAX + 1];
    let longest = [b'y'; BOARD_NAME_MAX];
    for name in [b"a".as_slice(), b"12345678", b"123456789", &longest] {
        w.name(Ino(1), name, Some((Ino(7), Kind::File)));
    }
    w.name(Ino(1), b"gone", None);
    w.name(Ino(1), &long, Some((Ino(7), Kind::File)));
    w.finish();
    let hit = Lookup::Hit(NameRef { ino: Ino(7), kind: Kind::File, permissions: (0, 0, 0) });
    for name in [b"a".as_slice(), b"12345678", b"123456789", &longest] {
        assert_eq!(board.lookup(Ino(1), name), hit);
        assert_eq!(board.lookup(Ino(2), name), Lookup::Unknown, "another directory");
    }
    assert_eq!(board.lookup(Ino(1), b"gone"), Lookup::Absent);
    assert_eq!(board.lookup(Ino(1), b"1234567"), Lookup::Unknown, "a prefix of a name");
    assert_eq!(board.lookup(Ino(1), &long), Lookup::Unknown, "too long for the board");
    w.name(Ino(1), b"a", None);
    w.name(Ino(1), b"gone", Some((Ino(7), Kind::File)));
    w.finish();
    assert_eq!(board.lookup(Ino(1), b"a"), Lookup::Absent);
    assert_eq!(board.lookup(Ino(1), b"gone"), hit);
}

#[test]
fn directory_name_shows_its_permissions_and_follows_chmod() {
    let (mut w, board) = board(1 << 20);
    let permissions = |name: &[u8]| match board.lookup(Ino(1), name) {
        Lookup::Hit(found) => Some(found.permissions),
        _ => None,
    };
    w.name(Ino(1), b"unseen", Some((Ino(8), Kind::Directory)));
    w.inode(Ino(9), Some(&entry(Ino(9), DIRECTORY, 5)));
    w.name(Ino(1), b"d", Some((Ino(9), Kind::Directory)));
    w.finish();
    assert_eq!(permissions(b"unseen"), None, "a walk could not check it");
    assert_eq!(permissions(b"d"), Some((DIRECTORY, 5, 5)));
    w.inode(Ino(9), Some(&entry(Ino(9), 0o040_700, 6)));
    w.finish();
    assert_eq!(permissions(b"d"), Some((0o040_700, 6, 6)));
    w.name(Ino(1), b"d", None);
    w.name(Ino(1), b"e", Some((Ino(9), Kind::Directory)));
    w.finish();
    w.inode(Ino(9), Some(&entry(Ino(9), DIRECTORY, 7)));
    w.finish();
    assert_eq!((permissions(b"d"), permissions(b"e")), (None, Some((DIRECTORY, 7, 7))));
}

#[test]
fn full_board_evicts_and_never_shows_what_is_not_so() {
    let (mut w, board) = board(1 << 20);
    for i in 0..50_000u64 {
        w.inode(Ino(i + 1), Some(&entry(Ino(i + 1), FILE, i)));
        w.name(Ino(1), format!("n{i}").as_bytes(), Some((Ino(i + 1), Kind::File)));
        if i % 7 == 0 {
            w.finish();
        }
    }
    w.finish();
    assert!(w.evicted() > 0);
    let (mut names, mut inodes) = (0, 0);
    for i in 0..50_000u64 {
        match board.lookup(Ino(1), format!("n{i}").as_bytes()) {
            Lookup::Hit(found) => {
                assert_eq!(found.ino, Ino(i + 1));
                names += 1;
            }
            Lookup::Absent => panic!("n{i} exists"),
            Lookup::Unknown => {}
        }
        if let Some(e) = board.inode(Ino(i + 1)) {
            assert_eq!(e, entry(Ino(i + 1), FILE, i));
            inodes += 1;
        }
    }
    assert!(names > 2000 && inodes > 2000, "{names} names, {inodes} inodes left");
}

#[test]
fn board_that_is_half_full_loses_no_name_and_names_come_and_go_as_guests() {
    let (mut w, board) = board(12 << 20);
    // The names have a third of the bytes, 128 bytes for each; these are half as many names.
    let names = (12 << 20) / 3 / 128 / 2u64;
    let name = |i: u64| format!("file.{i}").into_bytes();
    let file = |i: u64| Some((Ino(i + 10), Kind::File));
    for i in 0..names {
        w.name(Ino(1), &name(i), file(i));
        w.finish();
    }
    let found = |i: u64| match board.lookup(Ino(1), &name(i)) {
        Lookup::Hit(found) => Some(found.ino.0 - 10),
        _ => None,
    };
    let lost = (0..names).filter(|&i| found(i) != Some(i)).count() as u64;
    assert!(lost < names / 1000, "{lost} of {names} names gave way in a table that is half full");
    // Churn: other names take the places of guests, and guests take the places of other names.
    for round in 1..4 {
        for i in (0..names).filter(|i| i % 3 == round % 3) {
            w.name(Ino(1), &name(i), None);
            w.finish();
            assert_eq!(board.lookup(Ino(1), &name(i)), Lookup::Absent);
        }
        for i in (0..names).filter(|i| i % 3 == round % 3) {
            w.name(Ino(1), &name(i), file(i + round));
            w.finish();
        }
        for i in 0..names {
            let expected = i + if i % 3 == round % 3 { round } else { 0 };
            assert!(found(i).is_none_or(|f| f == expected), "{i}: {:?}", found(i));
        }
        for i in (0..names).filter(|i| i % 3 == round % 3) {
            w.name(Ino(1), &name(i), file(i));
        }
        w.finish();
    }
    let lost = (0..names).filter(|&i| found(i) != Some(i)).count() as u64;
    assert!(lost < names / 100, "{lost} of {names} names are lost after changes");
}

#[test]
fn state_of_a_files_data_is_what_its_attributes_say() {
    let (mut w, board) = board(1 << 20);
    for (epoch, flags) in [(5, FLAG_ATTACHED), (1 << 40 | 7, u32::MAX), (0, 0)] {
        let mut file = entry(Ino(7), FILE, epoch);
        file.attr.flags = flags;
        w.inode(Ino(7), Some(&file));
        w.finish();
        assert_eq!(board.inode(Ino(7)), Some(file));
        assert_eq!(board.data_state(Ino(7)), Some((epoch, flags)));
        assert_eq!(board.data_state(Ino(8)), None);
    }
    w.inode(Ino(7), None);
    w.finish();
    assert_eq!(board.data_state(Ino(7)), None);
}

#[test]
fn removed_inode_is_no_longer_shown() {
    let (mut w, board) = board(1 << 20);
    w.inode(Ino(3), Some(&entry(Ino(3), FILE, 1)));
    w.finish();
    assert!(board.inode(Ino(3)).is_some() && w.has_inode(Ino(3)));
    w.inode(Ino(3), None);
    w.finish();
    assert!(board.inode(Ino(3)).is_none() && !w.has_inode(Ino(3)));
}

#[test]
fn name_not_found_in_a_complete_directory_is_absent_until_one_of_its_names_gives_way() {
    let (mut w, board) = board(1 << 20);
    let directory = |entries: u64| {
        let mut e = entry(Ino(9), DIRECTORY, 1);
        e.attr.size = entries;
        e
    };
    assert_eq!(board.lookup(Ino(9), b"x"), Lookup::Unknown);
    w.inode(Ino(9), Some(&directory(3)));
    w.finish();
    assert_eq!(board.lookup(Ino(9), b"x"), Lookup::Unknown, "its names are not known");
    w.inode(Ino(9), Some(&directory(0)));
    w.finish();
    assert_eq!(board.lookup(Ino(9), b"x"), Lookup::Absent, "it is empty");
    w.inode(Ino(9), Some(&directory(1)));
    w.name(Ino(9), b"a", Some((Ino(10), Kind::File)));
    w.finish();
    assert_eq!(board.lookup(Ino(9), b"x"), Lookup::Absent);
    assert!(matches!(board.lookup(Ino(9), b"a"), Lookup::Hit(_)));
    assert_eq!(board.lookup(Ino(9), &[b'l'; BOARD_NAME_MAX + 1]), Lookup::Unknown, "too long for the board");
    w.name(Ino(9), b"a", None);
    w.finish();
    assert_eq!(board.lookup(Ino(9), b"a"), Lookup::Absent);
    // A subdirectory whose permissions are not on the board cannot be shown, so its parent is not complete any more.
    w.name(Ino(9), b"d", Some((Ino(77), Kind::Directory)));
    w.finish();
    assert_eq!((board.lookup(Ino(9), b"d"), board.lookup(Ino(9), b"x")), (Lookup::Unknown, Lookup::Unknown));
}

#[test]
fn complete_directory_that_outgrows_the_board_never_denies_a_name_that_it_has() {
    let (mut w, board) = board(1 << 20);
    let mut e = entry(Ino(1), DIRECTORY, 1);
    e.attr.size = 0;
    w.inode(Ino(1), Some(&e));
    w.finish();
    let mut unknown = 0;
    for i in 0..20_000u64 {
        e.attr.size = i + 1;
        w.inode(Ino(1), Some(&e));
        w.name(Ino(1), format!("n{i}").as_bytes(), Some((Ino(i + 10), Kind::File)));
        w.finish();
        let probe = format!("n{}", i.wrapping_mul(7919) % (i + 1));
        match board.lookup(Ino(1), probe.as_bytes()) {
            Lookup::Hit(_) => {}
            Lookup::Absent => panic!("{probe} exists"),
            Lookup::Unknown => unknown += 1,
        }
    }
    assert!(unknown > 0 && w.evicted() > 0, "the board must have been outgrown");
}

/// Lets readers race a writer. All fields of an attribute have one value, so that a torn read is detected.
fn race(rounds: u64, write: impl Fn(&mut BoardWriter, u64) + Send) -> (u64, u64) {
    let (fd, mut w) = BoardWriter::create(1 << 20).unwrap();
    let bytes = w.bytes();
    let (stop, torn, read) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let board = Board::open(Mapping::new(fd.as_fd(), bytes, false).unwrap()).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    for i in 1..4 {
                        let Some(e) = board.inode(Ino(i)) else { continue };
                        read.fetch_add(1, Ordering::Relaxed);
                        if e != entry(Ino(i), FILE, e.attr.size) {
                            torn.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
        for value in 0..rounds {
            write(&mut w, value);
        }
        stop.store(true, Ordering::Relaxed);
    });
    (read.into_inner(), torn.into_inner())
}

#[test]
fn inode_read_while_it_is_written_is_never_torn() {
    let (read, torn) = race(300_000, |w, value| {
        for i in 1..4 {
            w.inode(Ino(i), Some(&entry(Ino(i), FILE, value)));
        }
        w.finish();
    });
    assert!(read > 0);
    assert_eq!(torn, 0, "of {read} reads");
}

#[test]
fn name_read_while_others_come_and_go_around_it_is_what_was_published() {
    // A small board, so that names become guests, are evicted and return. Every third name always stays.
    let (fd, mut w) = BoardWriter::create(96 << 10).unwrap();
    let bytes = w.bytes();
    let names = 400u64;
    let name = |i: u64| format!("n{i}").into_bytes();
    let directory = |entries: u64| {
        let mut e = entry(Ino(9), DIRECTORY, 1);
        e.attr.size = entries;
        e
    };
    w.inode(Ino(9), Some(&directory(0)));
    w.finish();
    for i in (0..names).step_by(3) {
        w.name(Ino(9), &name(i), Some((Ino(1000 + i), Kind::File)));
        w.finish();
    }
    let (stop, wrong, read) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for reader in 0..2u64 {
            let (stop, wrong, read, fd) = (&stop, &wrong, &read, &fd);
            scope.spawn(move || {
                let board = Board::open(Mapping::new(fd.as_fd(), bytes, false).unwrap()).unwrap();
                let mut i = reader;
                while !stop.load(Ordering::Relaxed) {
                    i = (i + 7) % names;
                    let bad = match board.lookup(Ino(9), &name(i)) {
                        Lookup::Hit(found) => found.ino != Ino(1000 + i),
                        Lookup::Absent => i % 3 == 0,
                        Lookup::Unknown => false,
                    };
                    read.fetch_add(1, Ordering::Relaxed);
                    wrong.fetch_add(u64::from(bad), Ordering::Relaxed);
                }
            });
        }
        for round in 0..400u64 {
            for i in (0..names).filter(|i| i % 3 != 0) {
                let there = (i + round) % 2 == 0;
                w.name(Ino(9), &name(i), there.then_some((Ino(1000 + i), Kind::File)));
                if i % 5 == 0 {
                    w.finish();
                }
            }
            w.finish();
        }
        stop.store(true, Ordering::Relaxed);
    });
    let (read, wrong) = (read.into_inner(), wrong.into_inner());
    assert!(read > 1000);
    assert_eq!(wrong, 0, "of {read} reads");
}

#[test]
fn names_of_a_directory_that_becomes_wide_are_forgotten_when_it_says_so_and_not_whenever_it_is_shown() {
    let (mut writer, board) = board(8 << 20);
    let (dir, other, file) = (Ino(5), Ino(6), Ino(7));
    let show = |writer: &mut BoardWriter, ino: Ino, width_log2: u8| {
        let mut entry = entry(ino, 0o040_755, 0);
        (entry.attr.size, entry.attr.width_log2) = (0, width_log2);
        writer.inode(ino, Some(&entry));
        writer.finish();
    };
    for parent in [dir, other] {
        show(&mut writer, parent, 0);
        writer.name(parent, b"gone", None);
        writer.finish();
        assert_eq!(board.lookup(parent, b"gone"), Lookup::Absent);
    }
    writer.forget_names_of(dir);
    show(&mut writer, dir, 2);
    assert_eq!(board.lookup(dir, b"gone"), Lookup::Unknown);
    assert_eq!(board.lookup(other, b"gone"), Lookup::Absent);
    // The names of this node's part stay, however often the directory is published again.
    writer.name(dir, b"file", Some((file, Kind::File)));
    writer.inode(dir, None);
    show(&mut writer, dir, 2);
    assert!(matches!(board.lookup(dir, b"file"), Lookup::Hit(found) if found.ino == file));
}

#[test]
fn names_removed_in_front_of_a_store_are_unknown_once_the_directory_is_to_be_listed_again() {
    let (mut w, board) = board(1 << 20);
    let dir = Ino(5);
    let show = |w: &mut BoardWriter, entries: u64, flags: u32| {
        let mut e = entry(dir, DIRECTORY, 0);
        (e.attr.size, e.attr.flags) = (entries, flags);
        w.inode(dir, Some(&e));
    };
    // Not complete, as after a listing.
    show(&mut w, 2, FLAG_ATTACHED);
    for name in [b"a", b"b"] {
        w.name(dir, name, Some((Ino(7), Kind::File)));
    }
    w.name(dir, b"a", None);
    w.finish();
    assert_eq!(board.lookup(dir, b"a"), Lookup::Unknown);
    show(&mut w, 1, FLAG_ATTACHED | FLAG_UNLISTED);
    w.finish();
    assert_eq!(board.lookup(dir, b"a"), Lookup::Unknown);
    assert!(matches!(board.lookup(dir, b"b"), Lookup::Hit(_)));
    // Complete: what the board does not have is absent, until the directory is to be listed again.
    show(&mut w, 0, FLAG_ATTACHED);
    w.name(dir, b"b", None);
    w.finish();
    assert_eq!(board.lookup(dir, b"b"), Lookup::Absent);
    show(&mut w, 0, FLAG_ATTACHED | FLAG_UNLISTED);
    w.finish();
    assert_eq!(board.lookup(dir, b"b"), Lookup::Unknown);
    // A directory that no store is in front of shows its absences.
    show(&mut w, 2, 0);
    w.name(dir, b"c", None);
    w.finish();
    assert_eq!(board.lookup(dir, b"c"), Lookup::Absent);
}

/// xorshift64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// Publishes an empty directory, so that it is complete.
fn show_empty_directory(w: &mut BoardWriter, ino: Ino) {
    let mut e = entry(ino, DIRECTORY, 1);
    e.attr.size = 0;
    w.inode(ino, Some(&e));
    w.finish();
}

#[test]
fn board_that_grows_says_what_a_map_says() {
    for seed in 1..=20u64 {
        let (mut w, board) = board(16 << 20);
        let (mut dice, mut model) = (Dice(seed), HashMap::new());
        show_empty_directory(&mut w, Ino(1));
        // Some rounds mostly add names, the others mostly remove them. Directories among them move with their groups.
        for step in 0..30_000u64 {
            let (parent, name) = (Ino(1 + dice.below(2)), format!("name {}", dice.below(6000)).into_bytes());
            let ino = Ino(10 + step);
            let adds = dice.below(10) < if step / 5000 % 2 == 0 { 9 } else { 2 };
            let kind = if dice.below(8) == 0 { Kind::Directory } else { Kind::File };
            if adds && kind == Kind::Directory {
                w.inode(ino, Some(&entry(ino, DIRECTORY, step)));
            }
            let target = adds.then_some((ino, kind));
            w.name(parent, &name, target);
            model.insert((parent, name), target);
            if dice.below(3) == 0 {
                w.finish();
            }
        }
        w.finish();
        let kept = model.values().flatten().count();
        assert!(kept > 3000, "{kept} names");
        assert_eq!(w.evicted(), 0, "seed {seed}: it had room for all names");
        for ((parent, name), target) in &model {
            let expected = target.map(|(ino, kind)| (ino, kind));
            let found = match board.lookup(*parent, name) {
                Lookup::Hit(found) => Some((found.ino, found.kind)),
                Lookup::Absent => None,
                Lookup::Unknown => panic!("seed {seed}: the board does not know {parent} {name:?}"),
            };
            assert_eq!(found, expected, "seed {seed}: {parent} {name:?}");
        }
        assert_eq!(board.lookup(Ino(1), b"never"), Lookup::Absent, "the directory is complete");
        assert_eq!(board.lookup(Ino(2), b"never"), Lookup::Unknown);
        // A change of permissions must reach a directory's name at its present place.
        for ((parent, name), target) in &model {
            if let Some((ino, Kind::Directory)) = target {
                w.inode(*ino, Some(&entry(*ino, 0o040_700, 9)));
                w.finish();
                let permissions = match board.lookup(*parent, name) {
                    Lookup::Hit(found) => Some(found.permissions),
                    _ => None,
                };
                assert_eq!(permissions, Some((0o040_700, 9, 9)), "seed {seed}: {parent} {name:?}");
            }
        }
    }
}

#[test]
fn names_of_a_large_board_lie_on_few_pages() {
    let (fd, mut w) = BoardWriter::create(256 << 20).unwrap();
    let bytes = w.bytes();
    let resident = || {
        let mut pages = vec![0; bytes / 4096];
        Mapping::new(fd.as_fd(), bytes, false).unwrap().resident(0, &mut pages);
        pages.iter().filter(|state| **state & 1 == 1).count()
    };
    let before = resident();
    const NAMES: u64 = 20_000;
    for i in 0..NAMES {
        w.name(Ino(1), format!("file.mdtest.0.{i}").as_bytes(), Some((Ino(10 + i), Kind::File)));
        w.finish();
    }
    let pages = resident() - before;
    // Groups of 16 names are at least half full, and two groups fill a page. The remainder is the index.
    assert!(pages as u64 <= NAMES / 14, "{pages} pages for {NAMES} names");
}

#[test]
fn name_read_while_the_board_grows_under_it_is_never_denied_nor_another() {
    const NAMES: u64 = 60_000;
    let name = |i: u64| format!("n{i}").into_bytes();
    let (fd, mut w) = BoardWriter::create(64 << 20).unwrap();
    let bytes = w.bytes();
    show_empty_directory(&mut w, Ino(9));
    let (published, read, unknown) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for reader in 1..=2u64 {
            let (published, read, unknown, fd) = (&published, &read, &unknown, &fd);
            scope.spawn(move || {
                let board = Board::open(Mapping::new(fd.as_fd(), bytes, false).unwrap()).unwrap();
                let mut dice = Dice(reader);
                loop {
                    let there = published.load(Ordering::Acquire);
                    if there == NAMES {
                        break;
                    }
                    for _ in 0..100 {
                        let i = dice.below(there + 1);
                        match board.lookup(Ino(9), &name(i)) {
                            Lookup::Hit(found) => assert_eq!(found.ino, Ino(1000 + i)),
                            Lookup::Absent => assert_eq!(i, there, "it is there"),
                            Lookup::Unknown => _ = unknown.fetch_add(1, Ordering::Relaxed),
                        }
                        assert!(!matches!(board.lookup(Ino(9), &name(NAMES + i)), Lookup::Hit(_)));
                        read.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        for i in 0..NAMES {
            w.name(Ino(9), &name(i), Some((Ino(1000 + i), Kind::File)));
            w.finish();
            published.store(i + 1, Ordering::Release);
        }
    });
    let (read, unknown) = (read.into_inner(), unknown.into_inner());
    assert!(read > 1000 && w.evicted() == 0);
    assert!(unknown < read / 10, "{unknown} of {read} reads met an entry that was written");
}

/// Reads the board that a killed daemon left: each look-up returns what was published, or Unknown.
#[test]
fn board_of_a_daemon_killed_while_it_grows_denies_no_name_and_shows_none_torn() {
    let name = |i: u64| format!("n{i}").into_bytes();
    let (mut dice, mut unknown) = (Dice(0x9e37_79b9), 0);
    for kill in 0..60 {
        let (fd, mut w) = BoardWriter::create(64 << 20).unwrap();
        let bytes = w.bytes();
        let (_count_fd, count) = memfd_sealed(c"count", 4096, Seal::Size).unwrap();
        show_empty_directory(&mut w, Ino(9));
        // SAFETY: the child writes the board and ends by a signal; what it allocates is its own.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            for i in 0.. {
                w.name(Ino(9), &name(i), Some((Ino(1000 + i), Kind::File)));
                w.finish();
                count.word64(0).store(i + 1, Ordering::Release);
            }
        }
        let published = || count.word64(0).load(Ordering::Acquire);
        while published() < 10 {
            std::thread::yield_now();
        }
        let until = published() + dice.below(20_000);
        while published() < until {
            std::hint::spin_loop();
        }
        // SAFETY: plain system calls on our child.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            assert_eq!(libc::waitpid(child, std::ptr::null_mut(), 0), child);
        }
        let board = Board::open(Mapping::new(fd.as_fd(), bytes, false).unwrap()).unwrap();
        let there = published();
        for i in 0..there + 100 {
            match board.lookup(Ino(9), &name(i)) {
                Lookup::Hit(found) => assert!(found.ino == Ino(1000 + i) && i <= there, "kill {kill}: n{i}"),
                Lookup::Absent => assert!(i >= there, "kill {kill}: n{i} of {there} is denied"),
                Lookup::Unknown => unknown += 1,
            }
        }
    }
    assert!(unknown > 0, "no kill came in the middle of a publication");
}
