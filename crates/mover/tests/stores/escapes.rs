//! Nothing outside the store is read or written, whatever links lie in it. And what cannot be opened says why.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{symlink, PermissionsExt};
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_mover::store::{
    Attributes, Outcome, PosixOptions, PosixStore, Store, StoreDirectory, StorePath, StoreUrl, StoreVersion,
};
use forebay_types::{Code, Kind};
use rustix::fs::{RenameFlags, CWD};

use super::subject::{id, memory_file, path, source, TempDir};

fn open(directory: &TempDir, openat2: bool) -> PosixStore {
    PosixStore::open(&directory.0, PosixOptions { openat2, ..PosixOptions::default() }, id()).unwrap()
}

#[test]
fn what_cannot_have_its_owner_is_not_left_without_it() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root sets owners");
    }
    let inside = TempDir::tmpfs();
    // As root on an NFS mount with root_squash. Capabilities are those of a thread.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut all = rustix::thread::capabilities(None).unwrap();
            all.effective.remove(rustix::thread::CapabilitySet::CHOWN);
            rustix::thread::set_capabilities(None, all).unwrap();
            let store = open(&inside, true);
            let attributes = Attributes { uid: Some(1234), mode: Some(0o755), ..Attributes::default() };
            // Not only the first time.
            for _ in 0..2 {
                let failures = [
                    store.make_directory(&path("d"), &attributes).unwrap_err(),
                    store.make_symlink(&path("l"), b"x", &attributes).unwrap_err(),
                    store.make_node(&path("p"), Kind::Fifo, 0, &attributes).unwrap_err(),
                ];
                for failure in failures {
                    assert_eq!(failure.code(), Code::NotPermitted, "{failure}");
                }
            }
        });
    });
    assert_eq!(fs::read_dir(&inside.0).unwrap().count(), 0);
}

#[test]
fn directories_that_are_links_are_never_entered() {
    for openat2 in [true, false] {
        let (outside, inside) = (TempDir::tmpfs(), TempDir::tmpfs());
        fs::write(outside.0.join("secret"), "secret").unwrap();
        let store = open(&inside, openat2);
        fs::create_dir(inside.0.join("real")).unwrap();
        fs::write(inside.0.join("real/file"), "x").unwrap();
        symlink(&outside.0, inside.0.join("absolute")).unwrap();
        symlink(
            format!("../{}", outside.0.file_name().unwrap().to_str().unwrap()),
            inside.0.join("relative"),
        )
        .unwrap();
        symlink("real", inside.0.join("within")).unwrap();
        let version = StoreVersion::default();
        for link in ["absolute", "relative", "within"] {
            let file = path(&format!("{link}/secret"));
            let failures = [
                store.look(&file).unwrap_err(),
                store.list(&path(link), &mut |_| Ok(())).unwrap_err(),
                store.upload(&file, &source(b"x"), &Attributes::default()).unwrap_err(),
                store.make_directory(&path(&format!("{link}/d")), &Attributes::default()).unwrap_err(),
                store.make_symlink(&path(&format!("{link}/l")), b"x", &Attributes::default()).unwrap_err(),
                store.remove(&file, &version).unwrap_err(),
                store.sync_directory(&path(link)).unwrap_err(),
                store.remove_leftovers(&path(link), &|_| false).unwrap_err(),
            ];
            for failure in failures {
                assert_eq!(failure.code(), Code::NotDirectory, "{failure}");
                assert!(failure.to_string().contains("follows no links"), "{failure}");
            }
            let into = memory_file(&[]);
            let stale = store.read(&file, &version, 0..0, into.as_fd()).unwrap_err();
            assert_eq!(stale.code(), Code::Stale);
        }
        let names: Vec<_> =
            fs::read_dir(&outside.0).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["secret"]);
        assert_eq!(fs::read_dir(inside.0.join("real")).unwrap().count(), 1);
    }
}

#[test]
fn file_that_is_a_link_is_the_link() {
    let (outside, inside) = (TempDir::tmpfs(), TempDir::tmpfs());
    let target = outside.0.join("target");
    fs::write(&target, "untouched").unwrap();
    fs::set_permissions(&target, fs::Permissions::from_mode(0o600)).unwrap();
    symlink(&target, inside.0.join("link")).unwrap();
    let store = open(&inside, true);
    let found = store.look(&path("link")).unwrap().unwrap();
    assert_eq!(found.kind, Kind::Symlink);
    let attributes = Attributes {
        mode: Some(0o777),
        mtime: Some(forebay_types::Timestamp { sec: 5, nsec: 5 }),
        xattrs: Some(vec![(b"user.a".to_vec(), b"b".to_vec())]),
        ..Attributes::default()
    };
    let changed = store.set_attributes(&path("link"), &found.version, &attributes).unwrap().done().unwrap();
    assert_eq!(store.look(&path("link")).unwrap().unwrap().mtime.sec, 5);
    assert_eq!(fs::metadata(&target).unwrap().permissions().mode() & 0o7777, 0o600);
    assert_eq!(store.xattrs(&path("link")).unwrap(), []);
    let into = memory_file(&[]);
    assert_eq!(store.read(&path("link"), &changed, 0..1, into.as_fd()).unwrap_err().code(), Code::Stale);
    let temporary = store.temporaries().next(&StorePath::root());
    store.upload(&temporary, &source(b"new"), &Attributes::default()).unwrap();
    assert!(matches!(store.publish(&temporary, &path("link"), Some(&changed)).unwrap(), Outcome::Done(_)));
    assert_eq!(fs::read(&target).unwrap(), b"untouched");
    assert_eq!(fs::symlink_metadata(inside.0.join("link")).unwrap().len(), 3);
}

/// A directory and a link out of the store change places all the time.
#[test]
fn directory_swapped_for_a_link_leads_nowhere() {
    for openat2 in [true, false] {
        let (outside, inside) = (TempDir::tmpfs(), TempDir::tmpfs());
        fs::write(outside.0.join("secret"), "secret").unwrap();
        fs::create_dir_all(outside.0.join("sub")).unwrap();
        fs::create_dir_all(inside.0.join("d/sub")).unwrap();
        symlink(&outside.0, inside.0.join("swap")).unwrap();
        let store = open(&inside, openat2);
        let stop = AtomicBool::new(false);
        let (d, swap) = (inside.0.join("d"), inside.0.join("swap"));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    rustix::fs::renameat_with(CWD, &d, CWD, &swap, RenameFlags::EXCHANGE).unwrap();
                }
            });
            let mut entered = 0;
            for _ in 0..5000 {
                let seen = store.look(&path("d/secret"));
                assert!(!matches!(seen, Ok(Some(_))), "a file outside was seen");
                let temporary = store.temporaries().next(&path("d/sub"));
                if store.upload(&temporary, &source(b"x"), &Attributes::default()).is_ok() {
                    entered += 1;
                    let _ = store.discard(&temporary);
                }
                let _ = store.list(&path("d"), &mut |object| {
                    assert_ne!(object.name, b"secret");
                    Ok(())
                });
            }
            stop.store(true, Ordering::Relaxed);
            assert!(entered > 0, "the directory was never there");
        });
        assert_eq!(fs::read_dir(outside.0.join("sub")).unwrap().count(), 0);
        assert_eq!(fs::read_dir(&outside.0).unwrap().count(), 2);
    }
}

#[test]
fn store_that_cannot_be_opened_says_why() {
    let directory = TempDir::tmpfs();
    fs::write(directory.0.join("file"), "").unwrap();
    let shown = |url: String| {
        let failure = url.parse::<StoreUrl>().unwrap().open(id()).err().expect("opened");
        (failure.code(), failure.to_string())
    };
    let (code, text) = shown(format!("{}/none", directory.0.display()));
    assert_eq!(code, Code::NotFound);
    assert!(
        text.contains("none: No such file or directory") && text.contains("create the directory"),
        "{text}"
    );
    let (code, text) = shown(format!("file://{}/file?rate=1MB/s", directory.0.display()));
    assert_eq!(code, Code::NotDirectory);
    assert!(text.contains("name a directory"), "{text}");
}

#[test]
fn url_of_a_directory_opens_with_its_limits() {
    let directory = TempDir::tmpfs();
    let url: StoreUrl = format!("file://{}?rate=10MB/s&latency=5ms", directory.0.display()).parse().unwrap();
    let store = url.open(id()).unwrap();
    let started = std::time::Instant::now();
    let temporary = store.temporaries().next(&StorePath::root());
    store.upload(&temporary, &source(&vec![1; 1_000_000]), &Attributes::default()).unwrap();
    let took = started.elapsed();
    assert!(took >= std::time::Duration::from_millis(80), "1 MB at 10 MB/s took {took:?}");
    assert_eq!(store.title(), directory.0.display().to_string());
}

#[test]
fn store_without_rights_says_so() {
    if !rustix::process::geteuid().is_root() {
        let directory = TempDir::tmpfs();
        let store = open(&directory, true);
        fs::set_permissions(&directory.0, fs::Permissions::from_mode(0o500)).unwrap();
        let failure = store.upload(&path("x"), &source(b"x"), &Attributes::default()).unwrap_err();
        fs::set_permissions(&directory.0, fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!((failure.code(), failure.is_transient), (Code::AccessDenied, false));
        assert!(failure.to_string().contains("let the user who runs Forebay write there"), "{failure}");
    }
}

#[test]
fn another_directory_than_is_meant_is_refused_and_nothing_is_written_there() {
    use std::os::unix::fs::MetadataExt;
    let directory = TempDir::disk();
    let path = &directory.0;
    let before = std::fs::metadata(path).unwrap();
    let kind = forebay_sys::file_system::FileSystem::of(std::fs::File::open(path).unwrap()).unwrap().magic();
    let open = |number, file_system| {
        let directory = StoreDirectory { number, file_system };
        let options = PosixOptions { directory, ..PosixOptions::default() };
        PosixStore::open(path, options, id()).map(drop)
    };
    let number = before.ino();
    let others = [(Some(number + 1), None), (None, Some(kind + 1)), (Some(number), Some(kind + 1))];
    let refused = others.map(|(number, kind)| open(number, kind).map_err(|e| e.code()));
    let after = std::fs::metadata(path).unwrap();
    let opened = [open(Some(number), None).is_ok(), open(None, Some(kind)).is_ok()];
    assert_eq!(refused, [Err(Code::Io); 3]);
    let changed = |of: &std::fs::Metadata| (of.mtime(), of.mtime_nsec(), of.ctime(), of.ctime_nsec());
    assert_eq!(changed(&before), changed(&after));
    assert_eq!(opened, [true; 2]);
}
