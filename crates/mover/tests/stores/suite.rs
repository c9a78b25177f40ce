//! The behaviour of every store.

use std::os::fd::AsFd;

use forebay_mover::store::{Attributes, DirectoryRemoval, Outcome, StorePath, StoreVersion};
use forebay_types::{Code, Kind, Timestamp};

use super::subject::{contents, memory_file, path, pattern, source, Subject};

macro_rules! suite {
    ($($case:ident)*) => {
        suite!(@of tmpfs $($case)*);
        suite!(@of disk $($case)*);
        suite!(@of without_rename_flags $($case)*);
        suite!(@of without_links_and_exchange $($case)*);
        suite!(@of without_openat2 $($case)*);
        suite!(@of limited $($case)*);
        suite!(@of faulty $($case)*);
        suite!(@of object $($case)*);
        suite!(@of object_without_conditions $($case)*);
        mod running {
            $(#[test]
            fn $case() {
                if let Some(subject) = crate::subject::Subject::running() {
                    super::$case(&subject);
                }
            })*
        }
    };
    (@of $kind:ident $($case:ident)*) => {
        mod $kind {
            $(#[test]
            fn $case() {
                super::$case(&crate::subject::Subject::$kind());
            })*
        }
    };
}

suite! {
    upload_is_invisible_until_it_is_published
    publish_onto_a_taken_name_is_a_conflict
    publish_replaces_only_the_expected_version
    read_gives_ranges_of_the_expected_version
    attributes_are_kept_as_far_as_the_store_says
    attributes_of_a_published_file_change
    odd_names_are_kept_or_refused
    listing_has_all_objects_and_no_temporaries
    rename_moves_only_the_expected_version
    directory_is_renamed_with_its_files
    remove_takes_only_the_expected_version
    directories_are_made_once_and_removed_when_empty
    links_share_a_file
    symbolic_links_keep_their_target
    nodes_are_made
    extended_attributes_are_kept
    holes_stay_holes
    large_and_empty_files_are_whole
    parts_make_one_file
    missing_objects_and_parents_are_reported
    only_own_temporaries_are_discarded
}

fn done<T: std::fmt::Debug>(outcome: Outcome<T>) -> T {
    match outcome {
        Outcome::Done(value) => value,
        Outcome::Conflict(found) => panic!("conflict with {found:?}"),
    }
}

fn upload_is_invisible_until_it_is_published(s: &Subject) {
    let to = path("file");
    let temporary = s.upload(&to, b"data");
    assert_eq!(s.names(&StorePath::root()), Vec::<Vec<u8>>::new());
    assert_eq!(s.store.look(&to).unwrap(), None);
    s.store.make_durable(std::slice::from_ref(&temporary)).unwrap();
    let version = done(s.store.publish(&temporary, &to, None).unwrap());
    s.store.sync_directory(&StorePath::root()).unwrap();
    assert_eq!(s.store.look(&to).unwrap().unwrap().version, version);
    assert_eq!(s.get(&to).unwrap(), b"data");
    assert_eq!(s.store.look(&temporary).unwrap(), None);
    let listing = s.store.list(&StorePath::root(), &mut |_| Ok(())).unwrap();
    assert_eq!((listing.objects, listing.temporaries), (1, 0));
    // Many at a time are made durable together.
    let more: Vec<_> = (0..20).map(|i| s.upload(&path(&format!("f{i}")), b"x")).collect();
    s.store.make_durable(&more).unwrap();
    let failure = s.store.upload(&more[0], &source(b"y"), &Attributes::default()).unwrap_err();
    assert_eq!(failure.code(), Code::Exists);
}

fn publish_onto_a_taken_name_is_a_conflict(s: &Subject) {
    let to = path("file");
    let first = s.put(&to, b"first");
    let Err(Outcome::Conflict(Some(found))) = s.publish(&to, b"second", None) else { panic!("overwritten") };
    assert_eq!((found.version, found.name), (first, b"file".to_vec()));
    assert_eq!(s.get(&to).unwrap(), b"first");
}

fn publish_replaces_only_the_expected_version(s: &Subject) {
    let to = path("file");
    let first = s.put(&to, b"first");
    let second = s.publish(&to, b"second, longer", Some(&first)).unwrap();
    assert_ne!(first, second);
    assert_eq!(s.get(&to).unwrap(), b"second, longer");
    assert!(s.publish(&to, b"third", Some(&first)).is_err());
    assert_eq!(s.get(&to).unwrap(), b"second, longer");
    if s.foreign.write(&to, b"foreign") {
        let conflict = s.publish(&to, b"fourth", Some(&second)).unwrap_err();
        assert!(matches!(conflict, Outcome::Conflict(Some(found)) if found.bytes() == 7));
        assert_eq!(s.get(&to).unwrap(), b"foreign");
    }
    // Expected, but gone.
    assert!(matches!(s.publish(&path("other"), b"x", Some(&first)), Err(Outcome::Conflict(None))));
    let gone = s.store.temporaries().next(&StorePath::root());
    assert_eq!(s.store.publish(&gone, &path("new"), None).unwrap_err().code(), Code::NotFound);
    let listing = s.store.list(&StorePath::root(), &mut |_| Ok(())).unwrap();
    assert_eq!((listing.objects, listing.temporaries), (1, 0));
}

fn read_gives_ranges_of_the_expected_version(s: &Subject) {
    let to = path("file");
    let bytes = pattern(7, 300_000);
    let version = s.put(&to, &bytes);
    let into = memory_file(&[]);
    rustix::fs::ftruncate(&into, bytes.len() as u64).unwrap();
    std::thread::scope(|scope| {
        for start in (0..300_000u64).step_by(50_000) {
            let into = into.as_fd();
            let to = &to;
            scope.spawn(move || s.store.read(to, &version, start..start + 50_000, into).unwrap());
        }
    });
    assert_eq!(contents(into), bytes);
    let into = memory_file(&[]);
    s.store.read(&to, &version, 5..5, into.as_fd()).unwrap();
    let beyond = s.store.read(&to, &version, 0..300_001, into.as_fd()).unwrap_err();
    assert_eq!(beyond.code(), Code::Invalid);
    let replaced = s.publish(&to, &pattern(8, 300_001), Some(&version)).unwrap();
    let stale = s.store.read(&to, &version, 0..10, into.as_fd()).unwrap_err();
    assert_eq!((stale.code(), stale.is_transient), (Code::Stale, false), "{stale}");
    done(s.store.remove(&to, &replaced).unwrap());
    assert_eq!(s.store.read(&to, &replaced, 0..10, into.as_fd()).unwrap_err().code(), Code::Stale);
}

fn wanted() -> Attributes {
    Attributes {
        mode: Some(0o2751),
        uid: Some(rustix::process::geteuid().as_raw()),
        gid: Some(rustix::process::getegid().as_raw()),
        atime: Some(Timestamp { sec: 1_600_000_000, nsec: 1 }),
        mtime: Some(Timestamp { sec: -77, nsec: 999_999_999 }),
        xattrs: None,
    }
}

fn attributes_are_kept_as_far_as_the_store_says(s: &Subject) {
    let mut attributes = wanted();
    if rustix::process::geteuid().is_root() {
        (attributes.uid, attributes.gid) = (Some(12_345), Some(54_321));
    }
    let temporary = s.store.temporaries().next(&StorePath::root());
    s.store.upload(&temporary, &source(b"x"), &attributes).unwrap();
    let version = done(s.store.publish(&temporary, &path("file"), None).unwrap());
    let found = s.store.look(&path("file")).unwrap().unwrap();
    assert_eq!((found.kind, found.bytes(), found.version), (Kind::File, 1, version));
    let abilities = s.store.abilities();
    assert!(abilities.modes && abilities.owners && abilities.times);
    assert_eq!(Some(found.mode), attributes.mode);
    assert_eq!((Some(found.uid), Some(found.gid)), (attributes.uid, attributes.gid));
    assert_eq!((Some(found.atime), Some(found.mtime)), (attributes.atime, attributes.mtime));
    assert!(found.is_complete);
}

fn attributes_of_a_published_file_change(s: &Subject) {
    let to = path("file");
    let version = s.put(&to, b"some data");
    let wanted = wanted();
    let changed = done(s.store.set_attributes(&to, &version, &wanted).unwrap());
    let found = s.store.look(&to).unwrap().unwrap();
    assert_eq!((found.version, Some(found.mode), Some(found.mtime)), (changed, wanted.mode, wanted.mtime));
    assert_eq!(s.get(&to).unwrap(), b"some data");
    // One alone leaves the others.
    let mode = Attributes { mode: Some(0o600), ..Attributes::default() };
    done(s.store.set_attributes(&to, &changed, &mode).unwrap());
    let found = s.store.look(&to).unwrap().unwrap();
    assert_eq!((found.mode, Some(found.mtime)), (0o600, wanted.mtime));
    let longer = s.publish(&to, b"another version", Some(&found.version)).unwrap();
    assert!(s.store.set_attributes(&to, &changed, &mode).unwrap().is_conflict());
    assert_eq!(s.store.set_attributes(&path("none"), &longer, &mode).unwrap(), Outcome::Conflict(None));
}

fn odd_names_are_kept_or_refused(s: &Subject) {
    let long = "x".repeat(255);
    let plain =
        ["with space", "new\nline", "per%cent%41", "quo\"te'<&>", "ünï", "-", "...", "a+b", "#?", &long];
    for name in plain {
        let to = path(name);
        let version = s.put(&to, name.as_bytes());
        assert_eq!(s.get(&to).unwrap(), name.as_bytes(), "{name:?}");
        // Long names are put aside in a directory of their own.
        let version = s.publish(&to, b"replaced", Some(&version)).unwrap();
        assert_eq!(s.get(&to).unwrap(), b"replaced", "{name:?}");
        assert!(s.names(&StorePath::root()).contains(&name.as_bytes().to_vec()), "{name:?}");
        done(s.store.remove(&to, &version).unwrap());
    }
    for name in [&b"\xff\xfe"[..], b" leading", b"trailing "] {
        let to = StorePath::root().join(name).unwrap();
        if s.store.abilities().raw_names {
            s.put(&to, b"x");
            assert!(s.names(&StorePath::root()).contains(&name.to_vec()));
        } else {
            let temporary = s.upload(&path("x"), b"x");
            let failure = s.store.publish(&temporary, &to, None).unwrap_err();
            assert_eq!(failure.code(), Code::NotSupported, "{failure}");
            s.store.discard(&temporary).unwrap();
        }
    }
}

fn listing_has_all_objects_and_no_temporaries(s: &Subject) {
    let directory = path("dir");
    done(s.store.make_directory(&directory, &Attributes::default()).unwrap());
    let mut wanted = Vec::new();
    for i in 0..1200 {
        let name = format!("f{i:04}");
        if !s.foreign.write(&path(&format!("dir/{name}")), b"12") {
            s.put(&path(&format!("dir/{name}")), b"12");
        }
        wanted.push(name.into_bytes());
    }
    done(s.store.make_directory(&path("dir/g"), &Attributes::default()).unwrap());
    s.put(&path("dir/g/inner"), b"x");
    wanted.push(b"g".to_vec());
    s.upload(&path("dir/h"), b"x");
    assert_eq!(s.names(&directory), wanted);
    let mut directories = 0;
    let listing = s.store.list(&directory, &mut |object| {
        assert!(object.kind == Kind::Directory || object.bytes() == 2);
        directories += u64::from(object.kind == Kind::Directory);
        Ok(())
    });
    let listing = listing.unwrap();
    assert_eq!((listing.objects, listing.temporaries, listing.unusable, directories), (1201, 1, 0, 1));
    // What a listing shows is what look shows.
    let mut found = None;
    s.store
        .list(&directory, &mut |object| {
            if object.name == b"f0007" {
                found = Some(object.version);
            }
            Ok(())
        })
        .unwrap();
    assert_eq!(s.store.look(&path("dir/f0007")).unwrap().unwrap().version, found.unwrap());
    assert_eq!(s.store.list(&path("none"), &mut |_| Ok(())).unwrap_err().code(), Code::NotFound);
    let stopped = s
        .store
        .list(&directory, &mut |_| Err(forebay_mover::store::StoreError::lasting(Code::Interrupted, "stop")));
    assert_eq!(stopped.unwrap_err().code(), Code::Interrupted);
}

fn rename_moves_only_the_expected_version(s: &Subject) {
    let (a, b) = (path("a"), path("b"));
    let version = s.put(&a, b"one");
    let moved = done(s.store.rename(&a, &version, &b, None).unwrap());
    assert_eq!((s.get(&a), s.get(&b)), (None, Some(b"one".to_vec())));
    assert_eq!(s.store.look(&b).unwrap().unwrap().version, moved);
    assert_eq!(s.store.rename(&a, &version, &b, None).unwrap(), Outcome::Conflict(None));
    // Onto another: only if that is expected.
    let second = s.put(&a, b"second");
    assert!(s.store.rename(&a, &second, &b, None).unwrap().is_conflict());
    let wrong = StoreVersion { bytes: 99, ..moved };
    assert!(s.store.rename(&a, &second, &b, Some(&wrong)).unwrap().is_conflict());
    assert!(s.store.rename(&a, &wrong, &b, Some(&moved)).unwrap().is_conflict());
    assert_eq!((s.get(&a), s.get(&b)), (Some(b"second".to_vec()), Some(b"one".to_vec())));
    done(s.store.rename(&a, &second, &b, Some(&moved)).unwrap());
    assert_eq!((s.get(&a), s.get(&b)), (None, Some(b"second".to_vec())));
    let listing = s.store.list(&StorePath::root(), &mut |_| Ok(())).unwrap();
    assert_eq!((listing.objects, listing.temporaries), (1, 0));
}

fn directory_is_renamed_with_its_files(s: &Subject) {
    let made = done(s.store.make_directory(&path("d"), &Attributes::default()).unwrap());
    s.put(&path("d/file"), b"x");
    let renamed = s.store.rename(&path("d"), &made.version, &path("e"), None);
    if !s.store.abilities().rename_directory {
        assert_eq!(renamed.unwrap_err().code(), Code::NotSupported);
        return;
    }
    // The directory changed since: its version did not.
    done(renamed.unwrap());
    assert_eq!(s.get(&path("e/file")).unwrap(), b"x");
    s.put(&path("file"), b"x");
    assert!(s.store.rename(&path("e"), &made.version, &path("file"), None).unwrap().is_conflict());
}

fn remove_takes_only_the_expected_version(s: &Subject) {
    let to = path("file");
    let first = s.put(&to, b"first");
    let second = s.publish(&to, b"second!", Some(&first)).unwrap();
    let Outcome::Conflict(Some(found)) = s.store.remove(&to, &first).unwrap() else { panic!("removed") };
    assert_eq!(found.version, second);
    assert_eq!(s.get(&to).unwrap(), b"second!");
    done(s.store.remove(&to, &second).unwrap());
    assert_eq!(s.store.look(&to).unwrap(), None);
    assert_eq!(s.store.remove(&to, &second).unwrap(), Outcome::Conflict(None));
    let listing = s.store.list(&StorePath::root(), &mut |_| Ok(())).unwrap();
    assert_eq!((listing.objects, listing.temporaries), (0, 0));
}

fn directories_are_made_once_and_removed_when_empty(s: &Subject) {
    let directory = path("dir");
    let attributes = Attributes { mode: Some(0o750), ..Attributes::default() };
    let made = done(s.store.make_directory(&directory, &attributes).unwrap());
    assert_eq!(made.kind, Kind::Directory);
    let again = done(s.store.make_directory(&directory, &Attributes::default()).unwrap());
    assert_eq!(made.version, again.version);
    assert_eq!(s.store.look(&directory).unwrap().unwrap().kind, Kind::Directory);
    let file = s.put(&path("dir/file"), b"x");
    assert!(s.store.make_directory(&path("dir/file"), &attributes).unwrap().is_conflict());
    let alive = |_: &str| true;
    assert_eq!(s.store.remove_directory(&directory, &alive).unwrap(), DirectoryRemoval::NotEmpty);
    done(s.store.remove(&path("dir/file"), &file).unwrap());
    // A temporary of a live mover counts, one of a dead mover does not.
    s.upload(&path("dir/file"), b"x");
    assert_eq!(s.store.remove_directory(&directory, &alive).unwrap(), DirectoryRemoval::NotEmpty);
    assert_eq!(s.store.remove_directory(&directory, &|_| false).unwrap(), DirectoryRemoval::Removed);
    assert_eq!(s.store.look(&directory).unwrap(), None);
    assert_eq!(s.store.remove_directory(&directory, &alive).unwrap(), DirectoryRemoval::Removed);
    assert_eq!(s.store.remove_directory(&path("x/y"), &alive).unwrap(), DirectoryRemoval::Removed);
}

fn links_share_a_file(s: &Subject) {
    let (a, b) = (path("a"), path("b"));
    let version = s.put(&a, b"shared");
    let linked = s.store.link(&a, &version, &b);
    if !s.store.abilities().hard_links {
        // Without the ability the call may work all the same, where only the way to publish is switched off.
        assert!(linked.is_ok() || linked.unwrap_err().code() == Code::NotSupported);
        return;
    }
    assert_eq!(done(linked.unwrap()), version);
    let (first, second) = (s.store.look(&a).unwrap().unwrap(), s.store.look(&b).unwrap().unwrap());
    assert_eq!((first.nlink, first.version), (2, second.version));
    assert!(s.store.link(&a, &version, &b).unwrap().is_conflict());
    let wrong = StoreVersion { bytes: 1, ..version };
    assert!(s.store.link(&a, &wrong, &path("c")).unwrap().is_conflict());
    assert_eq!(s.store.look(&path("c")).unwrap(), None);
    // Names of one file change places like those of two.
    let temporary = s.store.temporaries().next(&StorePath::root());
    done(s.store.link(&a, &version, &temporary).unwrap());
    done(s.store.publish(&temporary, &b, Some(&version)).unwrap());
    done(s.store.rename(&a, &version, &b, Some(&version)).unwrap());
    assert_eq!(s.names(&StorePath::root()), [b"b".to_vec()]);
    assert_eq!(s.get(&b).unwrap(), b"shared");
}

fn symbolic_links_keep_their_target(s: &Subject) {
    let target = b"../else where/\xc3\xa4";
    let link = path("link");
    let version = done(s.store.make_symlink(&link, target, &Attributes::default()).unwrap());
    let found = s.store.look(&link).unwrap().unwrap();
    assert_eq!((found.kind, &found.link_target[..], found.version), (Kind::Symlink, &target[..], version));
    assert!(s.store.make_symlink(&link, b"x", &Attributes::default()).unwrap().is_conflict());
    // Replaced like a file, by way of a temporary.
    let temporary = s.store.temporaries().next(&StorePath::root());
    done(s.store.make_symlink(&temporary, b"new", &Attributes::default()).unwrap());
    s.store.make_durable(std::slice::from_ref(&temporary)).unwrap();
    let version = done(s.store.publish(&temporary, &link, Some(&version)).unwrap());
    assert_eq!(s.store.look(&link).unwrap().unwrap().link_target, b"new");
    done(s.store.remove(&link, &version).unwrap());
}

fn nodes_are_made(s: &Subject) {
    let attributes = Attributes { mode: Some(0o640), ..Attributes::default() };
    let made = s.store.make_node(&path("fifo"), Kind::Fifo, 0, &attributes);
    if !s.store.abilities().nodes {
        assert_eq!(made.unwrap_err().code(), Code::NotSupported);
        return;
    }
    let version = done(made.unwrap());
    let found = s.store.look(&path("fifo")).unwrap().unwrap();
    assert_eq!((found.kind, found.mode), (Kind::Fifo, 0o640));
    // Nothing waits for a writer.
    let into = memory_file(&[]);
    assert_eq!(s.store.read(&path("fifo"), &version, 0..0, into.as_fd()).unwrap_err().code(), Code::Stale);
    s.store.make_durable(&[path("fifo")]).unwrap();
    done(s.store.remove(&path("fifo"), &version).unwrap());
}

fn extended_attributes_are_kept(s: &Subject) {
    let named = |pairs: &[(&str, &str)]| {
        Some(
            pairs.iter().map(|(name, value)| (name.as_bytes().to_vec(), value.as_bytes().to_vec())).collect(),
        )
    };
    let attributes =
        Attributes { xattrs: named(&[("user.a", "1"), ("user.b", "")]), ..Attributes::default() };
    let temporary = s.store.temporaries().next(&StorePath::root());
    s.store.upload(&temporary, &source(b"x"), &attributes).unwrap();
    let version = done(s.store.publish(&temporary, &path("file"), None).unwrap());
    if !s.store.abilities().extended_attributes {
        assert_eq!(s.store.warnings().xattrs, 1);
        assert_eq!(s.store.xattrs(&path("file")).unwrap(), []);
        return;
    }
    let mut found = s.store.xattrs(&path("file")).unwrap();
    found.sort();
    assert_eq!(Some(found), attributes.xattrs);
    let changed = Attributes { xattrs: named(&[("user.c", "3")]), ..Attributes::default() };
    done(s.store.set_attributes(&path("file"), &version, &changed).unwrap());
    assert_eq!(Some(s.store.xattrs(&path("file")).unwrap()), changed.xattrs);
}

fn holes_stay_holes(s: &Subject) {
    let fd = memory_file(&[]);
    rustix::io::pwrite(&fd, &pattern(1, 4096), 1 << 20).unwrap();
    rustix::fs::ftruncate(&fd, 3 << 20).unwrap();
    let sparse = forebay_mover::store::FileSource::new(fd, 3 << 20);
    let temporary = s.store.temporaries().next(&StorePath::root());
    s.store.upload(&temporary, &sparse, &Attributes::default()).unwrap();
    let to = path("sparse");
    let version = done(s.store.publish(&temporary, &to, None).unwrap());
    let mut wanted = vec![0; 3 << 20];
    wanted[1 << 20..(1 << 20) + 4096].copy_from_slice(&pattern(1, 4096));
    assert_eq!(s.get(&to).unwrap(), wanted);
    // What the destination had in place of a hole goes.
    let into = memory_file(&vec![0xee; 3 << 20]);
    s.store.read(&to, &version, 0..3 << 20, into.as_fd()).unwrap();
    let blocks = rustix::fs::fstat(&into).unwrap().st_blocks;
    assert!(!s.store.abilities().holes || blocks * 512 < 1 << 20, "{blocks}");
    assert!(contents(into) == wanted);
}

/// The bytes of some ranges of a file; the rest counts as hole.
struct Pieces<'a>(&'a [u8], Vec<std::ops::Range<u64>>);

impl forebay_mover::store::Source for Pieces<'_> {
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn next_data(&self, within: std::ops::Range<u64>) -> Result<Option<std::ops::Range<u64>>, Code> {
        let meet = |range: &std::ops::Range<u64>| range.start.max(within.start)..range.end.min(within.end);
        Ok(self.1.iter().map(meet).find(|range| range.start < range.end))
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
        let left = &self.0[offset as usize..];
        let n = left.len().min(buffer.len());
        buffer[..n].copy_from_slice(&left[..n]);
        Ok(n)
    }
}

fn parts_make_one_file(s: &Subject) {
    let (bytes, path): (Vec<u8>, _) = (vec![7; 3_000_001], path("parts"));
    let temporary = s.store.temporaries().next(&StorePath::root());
    let pieces = [vec![0..1_000_000, 2_999_999..3_000_001], vec![1_500_000..1_600_000, 0..0]];
    let written: Vec<_> = pieces.iter().map(|pieces| Pieces(&bytes, pieces.clone())).collect();
    let begun = s.store.begin_parts(&temporary, bytes.len() as u64);
    if !s.store.abilities().parts {
        assert_eq!(begun.unwrap_err().code(), Code::NotSupported);
        assert_eq!(s.store.write_part(&temporary, &written[0]).unwrap_err().code(), Code::NotSupported);
        return;
    }
    begun.unwrap();
    assert_eq!(s.store.begin_parts(&temporary, 5).unwrap_err().code(), Code::Exists);
    std::thread::scope(|scope| {
        for part in &written {
            scope.spawn(|| s.store.write_part(&temporary, part).unwrap());
        }
    });
    let version = s.store.end_parts(&temporary, &Attributes { mode: Some(0o640), ..wanted() }).unwrap();
    s.store.make_durable(std::slice::from_ref(&temporary)).unwrap();
    assert_eq!(done(s.store.publish(&temporary, &path, None).unwrap()), version);
    let mut expected = vec![0; bytes.len()];
    for range in pieces.iter().flatten() {
        expected[range.start as usize..range.end as usize].fill(7);
    }
    assert!(s.get(&path).unwrap() == expected);
    assert_eq!(s.store.look(&path).unwrap().unwrap().mode, 0o640);
    // A mover that was given up writes into nothing.
    assert_eq!(s.store.write_part(&temporary, &written[0]).unwrap_err().code(), Code::NotFound);
}

fn large_and_empty_files_are_whole(s: &Subject) {
    let bytes = pattern(3, (20 << 20) + 17);
    s.put(&path("large"), &bytes);
    assert!(s.get(&path("large")).unwrap() == bytes);
    s.put(&path("empty"), b"");
    assert_eq!(s.get(&path("empty")).unwrap(), b"");
}

fn missing_objects_and_parents_are_reported(s: &Subject) {
    assert_eq!(s.store.look(&path("a/b/c")).unwrap(), None);
    let root = s.store.look(&StorePath::root()).unwrap().unwrap();
    assert_eq!((root.kind, root.name), (Kind::Directory, Vec::new()));
    let version = StoreVersion::default();
    assert_eq!(s.store.remove(&path("a/b"), &version).unwrap(), Outcome::Conflict(None));
    assert_eq!(s.store.rename(&path("a/b"), &version, &path("c"), None).unwrap(), Outcome::Conflict(None));
    s.store.discard(&s.store.temporaries().next(&path("a/b"))).unwrap();
}

fn only_own_temporaries_are_discarded(s: &Subject) {
    s.put(&path("file"), b"x");
    assert_eq!(s.store.discard(&path("file")).unwrap_err().code(), Code::Invalid);
    let foreign = path(".forebay-other.00.1.1-1.tmp");
    assert_eq!(s.store.discard(&foreign).unwrap_err().code(), Code::Invalid);
    let own = s.upload(&path("y"), b"x");
    s.store.discard(&own).unwrap();
    s.store.discard(&own).unwrap();
    assert_eq!(s.names(&StorePath::root()), [b"file".to_vec()]);
}
