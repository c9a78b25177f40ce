//! Names: hash collisions, listing while entries are created and removed, and examples of the rules for each kind of
//! request.

mod place;

use std::collections::BTreeSet;

use forebay_meta::{Batch, Shard};
use forebay_types::{
    Code, Ino, Kind, Reply, Request, SetAttr, FLAG_HAS_VALUES, RENAME_EXCHANGE, RENAME_NOREPLACE,
    XATTR_CREATE, XATTR_REPLACE,
};
use place::{at, Driver, Place, OPTIONS};
use proptest::prelude::*;

const ROOT: Ino = Ino::ROOT;

fn same_hash(_: &[u8]) -> u64 {
    77
}

fn numbered(n: usize) -> Vec<u8> {
    format!("name {n}").into_bytes()
}

#[test]
fn names_of_one_hash_fill_128_places_and_no_more() {
    let place = Place::new();
    let shard = Shard::create_with_hash(place.path(), &OPTIONS, at(1), same_hash).unwrap();
    let mut driver = Driver::new();
    let mut batch = shard.begin().unwrap();
    for n in 0..128 {
        driver.file(&mut batch, ROOT, &numbered(n)).unwrap();
    }
    assert_eq!(driver.file(&mut batch, ROOT, &numbered(128)), Err(Code::NoSpace));
    assert_eq!(driver.file(&mut batch, ROOT, &numbered(5)), Err(Code::Exists));
    for n in (0..128).step_by(3) {
        driver.unlink(&mut batch, ROOT, &numbered(n)).unwrap();
        assert_eq!(
            driver.ask(&mut batch, Request::Lookup { parent: ROOT, name: &numbered(n) }),
            Err(Code::NotFound)
        );
    }
    driver.file(&mut batch, ROOT, &numbered(128)).unwrap();
    let listed: BTreeSet<_> = driver.list(&mut batch, ROOT).into_iter().map(|n| n.1).collect();
    let expected: BTreeSet<_> = (0..129).filter(|n| *n == 128 || n % 3 != 0).map(numbered).collect();
    assert_eq!(listed, expected);
    for name in &expected {
        driver.entry(&mut batch, Request::Lookup { parent: ROOT, name }).unwrap();
    }
    batch.commit().unwrap();
    assert_eq!(shard.check(&mut |_| {}).unwrap().problems, Vec::<String>::new());
}

#[test]
fn rename_among_names_of_one_hash_keeps_every_other_name() {
    let place = Place::new();
    let shard = Shard::create_with_hash(place.path(), &OPTIONS, at(1), same_hash).unwrap();
    let mut driver = Driver::new();
    let mut batch = shard.begin().unwrap();
    let inos: Vec<_> = (0..4).map(|n| driver.file(&mut batch, ROOT, &numbered(n)).unwrap()).collect();
    for (from, to) in [(0, 9), (1, 2), (9, 1)] {
        let (name, new_name) = (numbered(from), numbered(to));
        let request =
            Request::Rename { parent: ROOT, name: &name, new_parent: ROOT, new_name: &new_name, flags: 0 };
        driver.ask(&mut batch, request).unwrap();
    }
    for (name, ino) in [(1, inos[0]), (2, inos[1]), (3, inos[3])] {
        let found =
            driver.entry(&mut batch, Request::Lookup { parent: ROOT, name: &numbered(name) }).unwrap();
        assert_eq!(found.attr.ino, ino);
    }
    batch.commit().unwrap();
    let report = shard.check(&mut |_| {}).unwrap();
    assert_eq!((report.problems.len(), report.entries), (0, 3));
}

#[test]
fn directory_inherits_setgid_and_files_its_group() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    let mut driver = Driver::new();
    let mut batch = shard.begin().unwrap();
    let set = SetAttr { mode: Some(0o2755), gid: Some(55), ..SetAttr::default() };
    driver.ask(&mut batch, Request::SetAttr { ino: ROOT, set }).unwrap();
    let file = driver.file(&mut batch, ROOT, b"f").unwrap();
    let directory = driver.directory(&mut batch, ROOT, b"d").unwrap();
    let file = driver.attr(&mut batch, file).unwrap();
    let directory = driver.attr(&mut batch, directory).unwrap();
    assert_eq!((file.mode, file.uid, file.gid), (0o100_644, 1000, 55));
    assert_eq!((directory.mode, directory.gid), (0o042_755, 55));
}

#[test]
fn requests_on_what_is_gone_or_of_the_wrong_kind_are_refused() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    let mut driver = Driver::new();
    let mut batch = shard.begin().unwrap();
    let file = driver.file(&mut batch, ROOT, b"f").unwrap();
    let directory = driver.directory(&mut batch, ROOT, b"d").unwrap();
    driver.file(&mut batch, directory, b"in").unwrap();
    let gone = driver.directory(&mut batch, ROOT, b"gone").unwrap();
    driver.ask(&mut batch, Request::RemoveDirectory { parent: ROOT, name: b"gone" }).unwrap();
    let refused = [
        (Request::MakeDirectory { parent: gone, name: b"x", mode: 0 }, Code::NotFound),
        (Request::Lookup { parent: file, name: b"x" }, Code::NotDirectory),
        (Request::ReadDirectory { ino: file, cookie: 0, attributes: false }, Code::NotDirectory),
        (Request::ReadDirectory { ino: gone, cookie: 0, attributes: false }, Code::NotFound),
        (Request::Unlink { parent: ROOT, name: b"d" }, Code::IsDirectory),
        (Request::Unlink { parent: ROOT, name: b"none" }, Code::NotFound),
        (Request::RemoveDirectory { parent: ROOT, name: b"f" }, Code::NotDirectory),
        (Request::RemoveDirectory { parent: ROOT, name: b"d" }, Code::NotEmpty),
        (Request::Link { ino: directory, parent: ROOT, name: b"x" }, Code::NotPermitted),
        (Request::Link { ino: directory, parent: ROOT, name: b"f" }, Code::Exists),
        (Request::ReadLink { ino: file }, Code::Invalid),
        (Request::MarkDirty { ino: directory }, Code::IsDirectory),
        (Request::PathOf { ino: file }, Code::NotDirectory),
        (Request::Ping, Code::NotSupported),
    ];
    for (request, code) in refused {
        assert_eq!(driver.ask(&mut batch, request), Err(code), "{request:?}");
    }
    let open = Request::Create {
        parent: ROOT,
        name: b"d",
        mode: 0,
        exclusive: false,
        dirty: false,
        layout: None,
        number: None,
        reserve: false,
    };
    match driver.ask(&mut batch, open) {
        Ok(Reply::Created { entry, created: false, next: None }) => assert_eq!(entry.attr.ino, directory),
        other => panic!("{other:?}"),
    }
    let path = driver.ask(&mut batch, Request::PathOf { ino: ROOT });
    assert_eq!(path, Ok(Reply::Bytes(b"/")));
}

#[test]
fn rename_every_refusal_is_the_one_of_linux() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    let mut driver = Driver::new();
    let mut batch = shard.begin().unwrap();
    let a = driver.directory(&mut batch, ROOT, b"a").unwrap();
    let b = driver.directory(&mut batch, a, b"b").unwrap();
    driver.directory(&mut batch, ROOT, b"empty").unwrap();
    driver.file(&mut batch, b, b"deep").unwrap();
    let file = driver.file(&mut batch, ROOT, b"f").unwrap();
    driver.ask(&mut batch, Request::Link { ino: file, parent: ROOT, name: b"same" }).unwrap();
    let rename = |from: (Ino, &'static [u8]), to: (Ino, &'static [u8]), flags| Request::Rename {
        parent: from.0,
        name: from.1,
        new_parent: to.0,
        new_name: to.1,
        flags,
    };
    let refused = [
        (rename((ROOT, b"none"), (ROOT, b"f"), 0), Code::NotFound),
        (rename((ROOT, b"f"), (ROOT, b"same"), RENAME_NOREPLACE), Code::Exists),
        (rename((ROOT, b"f"), (ROOT, b"none"), RENAME_EXCHANGE), Code::NotFound),
        (rename((ROOT, b"a"), (b, b"x"), 0), Code::Invalid),
        (rename((ROOT, b"a"), (a, b"x"), 0), Code::Invalid),
        (rename((b, b"deep"), (ROOT, b"a"), 0), Code::NotEmpty),
        (rename((b, b"deep"), (ROOT, b"a"), RENAME_EXCHANGE), Code::Invalid),
        (rename((ROOT, b"f"), (ROOT, b"a"), 0), Code::IsDirectory),
        (rename((ROOT, b"a"), (ROOT, b"f"), 0), Code::NotDirectory),
        (rename((ROOT, b"empty"), (ROOT, b"a"), 0), Code::NotEmpty),
        (rename((ROOT, b"f"), (file, b"x"), 0), Code::NotDirectory),
    ];
    for (request, code) in refused {
        assert_eq!(driver.ask(&mut batch, request), Err(code), "{request:?}");
    }
    let before = driver.attr(&mut batch, ROOT).unwrap();
    driver.ask(&mut batch, rename((ROOT, b"f"), (ROOT, b"same"), 0)).unwrap();
    assert_eq!(driver.attr(&mut batch, ROOT).unwrap(), before, "two names of one inode: nothing changes");
    // A directory replaces an empty one: the root has one directory less, and the moved directory has a new parent.
    match driver.ask(&mut batch, rename((a, b"b"), (ROOT, b"empty"), 0)) {
        Ok(Reply::Removed { last: true, kind: Kind::Directory, .. }) => {}
        other => panic!("{other:?}"),
    }
    let (root, moved) = (driver.attr(&mut batch, ROOT).unwrap(), driver.attr(&mut batch, b).unwrap());
    assert_eq!((root.nlink, root.size, moved.parent), (4, 4, ROOT));
    assert_eq!(driver.attr(&mut batch, a).unwrap().nlink, 2);
    // An exchange of a directory and a file between directories moves a link.
    driver.ask(&mut batch, rename((ROOT, b"empty"), (a, b"g"), 0)).unwrap();
    driver.ask(&mut batch, rename((ROOT, b"f"), (a, b"g"), RENAME_EXCHANGE)).unwrap();
    assert_eq!(driver.ask(&mut batch, Request::PathOf { ino: b }), Ok(Reply::Bytes(b"/f")));
    assert_eq!(driver.attr(&mut batch, a).unwrap().nlink, 2);
    batch.commit().unwrap();
    assert_eq!(shard.check(&mut |_| {}).unwrap().problems, Vec::<String>::new());
}

#[test]
fn extended_attributes_are_bounded_together_and_listed_apart() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    let mut driver = Driver::new();
    let mut batch = shard.begin().unwrap();
    let file = driver.file(&mut batch, ROOT, b"f").unwrap();
    let set = |name: &'static [u8], value: &'static [u8], flags| Request::SetXattr {
        ino: file,
        name,
        value,
        flags,
    };
    let large: &'static [u8] = &[3; 65_536];
    driver.ask(&mut batch, set(b"user.large", large, 0)).unwrap();
    assert_eq!(driver.ask(&mut batch, set(b"user.second", large, 0)), Err(Code::NoSpace));
    driver.ask(&mut batch, set(b"user.second", &[4; 20_000], XATTR_CREATE)).unwrap();
    assert_eq!(driver.ask(&mut batch, set(b"user.second", b"", XATTR_CREATE)), Err(Code::Exists));
    assert_eq!(driver.ask(&mut batch, set(b"user.third", b"", XATTR_REPLACE)), Err(Code::NoAttribute));
    driver.ask(&mut batch, set(b"user.second", b"", XATTR_REPLACE)).unwrap();
    let value = driver.ask(&mut batch, Request::GetXattr { ino: file, name: b"user.large" });
    assert_eq!(value, Ok(Reply::Bytes(large)));
    let value = driver.ask(&mut batch, Request::GetXattr { ino: file, name: b"user.second" });
    assert_eq!(value, Ok(Reply::Bytes(b"")));
    let list = driver.ask(&mut batch, Request::ListXattr { ino: file });
    assert_eq!(list, Ok(Reply::Bytes(b"user.large\0user.second\0")));
    driver.ask(&mut batch, Request::RemoveXattr { ino: file, name: b"user.large" }).unwrap();
    let list = driver.ask(&mut batch, Request::ListXattr { ino: file });
    assert_eq!(list, Ok(Reply::Bytes(b"user.second\0")));
    driver.unlink(&mut batch, ROOT, b"f").unwrap();
    batch.commit().unwrap();
    assert_eq!(shard.check(&mut |_| {}).unwrap().problems, Vec::<String>::new());
}

/// Clients answer by the flag alone that an inode has no extended attributes.
#[test]
fn inodes_with_extended_attributes_have_a_flag_in_replies_effects_and_after_a_restart() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    let mut driver = Driver::new();
    let mut batch = shard.begin().unwrap();
    let plain = driver.file(&mut batch, ROOT, b"plain").unwrap();
    let file = driver.file(&mut batch, ROOT, b"f").unwrap();
    let directory = driver.directory(&mut batch, ROOT, b"d").unwrap();
    let set = |ino| Request::SetXattr { ino, name: b"user.a", value: b"1", flags: 0 };
    for ino in [file, directory] {
        assert_eq!(driver.attr(&mut batch, ino).unwrap().flags & FLAG_HAS_VALUES, 0);
        driver.ask(&mut batch, set(ino)).unwrap();
        let shown = driver.effects.inodes().iter().rfind(|(of, _)| *of == ino);
        let flags = shown.and_then(|(_, entry)| *entry).map(|entry| entry.attr.flags);
        assert_eq!(flags.map(|flags| flags & FLAG_HAS_VALUES), Some(FLAG_HAS_VALUES));
    }
    let check = |driver: &mut Driver, batch: &mut Batch<'_>| {
        for (ino, has) in [(plain, 0), (file, FLAG_HAS_VALUES), (directory, FLAG_HAS_VALUES)] {
            assert_eq!(driver.attr(batch, ino).unwrap().flags & FLAG_HAS_VALUES, has);
        }
    };
    check(&mut driver, &mut batch);
    batch.commit().unwrap();
    drop(shard);
    let shard = Shard::open(place.path()).unwrap();
    let mut batch = shard.begin().unwrap();
    check(&mut driver, &mut batch);
    batch.commit().unwrap();
    assert_eq!(shard.check(&mut |_| {}).unwrap().problems, Vec::<String>::new());
}

#[test]
fn path_of_a_directory_too_deep_for_a_path_is_refused() {
    let place = Place::new();
    let shard = Shard::create(place.path(), &OPTIONS, at(1)).unwrap();
    let mut driver = Driver::new();
    let mut batch = shard.begin().unwrap();
    let mut at = ROOT;
    for n in 0..16 {
        at = driver.directory(&mut batch, at, &[b'd'; 255]).unwrap();
        let path = driver.ask(&mut batch, Request::PathOf { ino: at });
        match path {
            Ok(Reply::Bytes(path)) => assert_eq!(path.len(), 256 * (n + 1)),
            other => assert_eq!((other, n), (Err(Code::NameTooLong), 15)),
        }
    }
}

/// Eight bits of hash: some of the names in a directory of many hundreds collide.
fn middling_hash(name: &[u8]) -> u64 {
    (forebay_types::name_hash(name) & 0xff) + 1
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 25, ..ProptestConfig::default() })]

    /// An entry that exists throughout a listing is listed exactly once, whatever is created and removed meanwhile.
    #[test]
    fn listing_while_entries_come_and_go_misses_and_repeats_nothing(
        changes in proptest::collection::vec((0usize..3000, any::<bool>()), 1..200),
        weak in any::<bool>(),
    ) {
        let place = Place::new();
        let hash = if weak { middling_hash } else { forebay_types::name_hash };
        let shard = Shard::create_with_hash(place.path(), &OPTIONS, at(1), hash).unwrap();
        let mut driver = Driver::new();
        let mut batch = shard.begin().unwrap();
        // Entries with even numbers stay; those with odd numbers are created and removed.
        for n in (0..3000).step_by(2) {
            driver.file(&mut batch, ROOT, &numbered(n)).unwrap();
        }
        let mut changes = changes.iter().cycle();
        let (mut cookie, mut seen, mut requests) = (0, BTreeSet::new(), 0);
        loop {
            let request = Request::ReadDirectory { ino: ROOT, cookie, attributes: requests % 2 == 0 };
            let Ok(Reply::Entries(entries)) = driver.ask(&mut batch, request) else { panic!() };
            requests += 1;
            let end = entries.end;
            for entry in entries.iter() {
                let entry = entry.unwrap();
                prop_assert!(entry.cookie > cookie);
                cookie = entry.cookie;
                prop_assert!(seen.insert(entry.name.to_vec()), "{:?} twice", entry.name);
            }
            if end {
                break;
            }
            for (n, make) in changes.by_ref().take(40) {
                let name = numbered(n | 1);
                let _ = match make {
                    true => driver.file(&mut batch, ROOT, &name).map(|_| ()),
                    false => driver.unlink(&mut batch, ROOT, &name),
                };
            }
        }
        prop_assert!(requests > 2, "the listing must have been interrupted");
        for n in (0..3000).step_by(2) {
            prop_assert!(seen.contains(&numbered(n)), "{n} was missed");
        }
    }
}
