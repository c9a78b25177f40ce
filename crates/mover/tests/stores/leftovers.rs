//! What movers leave that die: temporaries alone, and a sweep that loses nothing.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use forebay_mover::store::{
    runs_here, Attributes, Leftovers, Marks, Outcome, PosixOptions, PosixStore, Store, StorePath,
};

use super::subject::{id, path, pattern, source, TempDir};

const CHILD: &str = "FOREBAY_STORES_CHILD";
const FLAGS: &str = "FOREBAY_STORES_FLAGS";

fn options(rename_flags: bool) -> PosixOptions {
    PosixOptions { exchange: rename_flags, no_replace: rename_flags, ..PosixOptions::default() }
}

/// Bytes that say by themselves whether they are whole: their length, then a pattern of it.
fn framed(seed: u64) -> Vec<u8> {
    let bytes = pattern(seed, 1000 + (seed * 7919 % 200_000) as usize);
    [&seed.to_le_bytes()[..], &bytes].concat()
}

fn is_whole(bytes: &[u8]) -> bool {
    let seed = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    bytes == framed(seed)
}

/// Not a test by itself: the process that is killed. It publishes, replaces, renames and removes until then.
#[test]
fn child_that_is_killed() {
    let Some(directory) = std::env::var_os(CHILD) else { return };
    let options = options(std::env::var_os(FLAGS).is_some());
    let store = PosixStore::open(directory.as_ref(), options, id()).unwrap();
    for seed in 0.. {
        let to = path("file");
        let expected = store.look(&to).unwrap().map(|object| object.version);
        let temporary = store.temporaries().next(&StorePath::root());
        store.upload(&temporary, &source(&framed(seed)), &Attributes::default()).unwrap();
        let Outcome::Done(_) = store.publish(&temporary, &to, expected.as_ref()).unwrap() else {
            panic!("only this process writes")
        };
        let other = path("other");
        let temporary = store.temporaries().next(&StorePath::root());
        let version = store.upload(&temporary, &source(&framed(seed)), &Attributes::default()).unwrap();
        let Outcome::Done(_) = store.publish(&temporary, &path("moved"), None).unwrap() else { panic!() };
        let replaced = store.look(&other).unwrap().map(|object| object.version);
        let Outcome::Done(version) =
            store.rename(&path("moved"), &version, &other, replaced.as_ref()).unwrap()
        else {
            panic!()
        };
        if seed % 2 == 0 {
            store.remove(&other, &version).unwrap();
        }
    }
}

#[test]
fn killed_movers_leave_whole_files_and_temporaries() {
    let rounds: u64 = std::env::var("FOREBAY_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(20);
    for rename_flags in [true, false] {
        let directory = TempDir::tmpfs();
        fs::write(directory.0.join("file"), framed(1)).unwrap();
        let mut swept = Leftovers::default();
        for round in 0..rounds {
            let mut child = Command::new(std::env::current_exe().unwrap());
            child
                .args(["--exact", "leftovers::child_that_is_killed", "--nocapture"])
                .env(CHILD, &directory.0);
            if rename_flags {
                child.env(FLAGS, "1");
            }
            let mut child = child.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            std::thread::sleep(Duration::from_micros(30_000 + round * 7919 % 40_000));
            assert!(child.try_wait().unwrap().is_none(), "the child ended by itself");
            child.kill().unwrap();
            child.wait().unwrap();
            let store = PosixStore::open(&directory.0, options(rename_flags), id()).unwrap();
            let done =
                store.remove_leftovers(&StorePath::root(), &|mover| runs_here(mover) != Some(false)).unwrap();
            assert_eq!((done.live, done.kept), (0, 0), "round {round}");
            swept.removed += done.removed;
            swept.put_back += done.put_back;
            let mut names = Vec::new();
            let listing = store.list(&StorePath::root(), &mut |object| {
                names.push(object.name);
                Ok(())
            });
            assert_eq!(listing.unwrap().temporaries, 0, "round {round}");
            assert!(names.contains(&b"file".to_vec()), "round {round}: the file is lost");
            for name in names {
                let bytes = fs::read(directory.file(&StorePath::root().join(&name).unwrap())).unwrap();
                assert!(is_whole(&bytes), "round {round}: {} is torn", String::from_utf8_lossy(&name));
            }
            // The next child renames to a free name again.
            let _ = fs::remove_file(directory.0.join("moved"));
        }
        assert!(swept.removed > 0, "no kill hit an upload");
    }
}

/// Each state that a kill can leave, made by hand.
#[test]
fn sweep_puts_back_removes_or_keeps_what_was_aside() {
    let directory = TempDir::tmpfs();
    let store = PosixStore::open(&directory.0, PosixOptions::default(), id()).unwrap();
    let dead = "host.0123456789ab00000000.1.1";
    let stem = |number: u32| format!(".forebay-{dead}-{number}");
    let put = |name: &str, bytes: &str| {
        fs::write(directory.0.join(name), bytes).unwrap();
        store.look(&path(name)).unwrap().unwrap().version
    };
    let version = |name: &str| store.look(&path(name)).unwrap().unwrap().version;
    let marks = |name: &str, expected: Option<&str>, upload: Option<&str>| {
        let other = put(&format!("{name}-other"), "other");
        let expected = expected.map_or(other, version);
        let marks = Marks::new(&expected, upload.map(version).as_ref());
        fs::remove_file(directory.0.join(format!("{name}-other"))).unwrap();
        format!("{:08x}{:08x}", marks.expected, marks.spare)
    };
    let aside = |number: u32, source: &str, marks: String, name: &str| {
        fs::rename(
            directory.0.join(source),
            directory.0.join(format!("{}.{marks}.was.{name}", stem(number))),
        )
        .unwrap();
    };
    // 1 An upload.
    put(&format!("{}.tmp", stem(1)), "upload");
    // 2 The expected version, its name free: removed, or about to be replaced.
    put("a", "expected");
    aside(2, "a", marks("a", Some("a"), None), "back");
    // 3 The expected version, replaced.
    put("b", "expected");
    put("replaced", "new");
    aside(3, "b", marks("b", Some("b"), Some("replaced")), "replaced");
    // 4 A version that nobody expected, its name taken.
    put("c", "foreign");
    put("taken", "newer");
    aside(4, "c", marks("c", None, None), "taken");
    // 5 The upload itself, before it changed places.
    put("d", "upload");
    put("old", "old");
    aside(5, "d", marks("d", Some("old"), Some("d")), "old");
    // 6 A long name, in a directory of its own.
    let long = "y".repeat(250);
    put("e", "long");
    let inner = format!("{}.{}.was", stem(6), marks("e", Some("e"), None));
    fs::create_dir(directory.0.join(&inner)).unwrap();
    fs::rename(directory.0.join("e"), directory.0.join(&inner).join(&long)).unwrap();
    // 7 The version that an upload replaced; what replaced it was removed since.
    put("f", "old");
    put("g", "upload");
    let replaced = version("f");
    let marks = Marks::of_upload(&replaced, &version("g"));
    let name = format!("{}.{:08x}{:08x}.new.removed", stem(7), marks.expected, marks.spare);
    fs::rename(directory.0.join("f"), directory.0.join(name)).unwrap();
    fs::remove_file(directory.0.join("g")).unwrap();
    // 8 Belongs to a live mover.
    put(".forebay-host.00.2.2-8.tmp", "live");

    let done = store.remove_leftovers(&StorePath::root(), &|mover| mover != dead).unwrap();
    assert_eq!(done, Leftovers { removed: 4, put_back: 2, kept: 1, live: 1 });
    let read = |name: &str| fs::read_to_string(directory.0.join(name)).unwrap();
    assert_eq!(read("back"), "expected");
    assert_eq!(read("replaced"), "new");
    assert!(!directory.0.join("removed").exists(), "an old version came back");
    assert_eq!((read("taken"), read("taken.forebay-kept-1")), ("newer".into(), "foreign".into()));
    assert_eq!((read("old"), read(&long)), ("old".into(), "long".into()));
    assert_eq!(fs::read_dir(&directory.0).unwrap().count(), 7);
}

#[test]
fn uploads_in_directories_of_their_own_are_published_and_what_is_left_of_them_is_swept() {
    let directory = super::subject::TempDir::tmpfs();
    let options = |rename_flags| PosixOptions { slow_names: true, ..options(rename_flags) };
    let store = PosixStore::open(&directory.0, options(false), id()).unwrap();
    let below = path("below");
    store.make_directory(&below, &Attributes::default()).unwrap();
    let entries = || fs::read_dir(directory.file(&below)).unwrap().count();
    let upload = |apart: &StorePath, name: &str| {
        let temporary = store.temporaries().next(apart);
        store.upload(&temporary, &source(b"data"), &Attributes::default()).unwrap();
        assert!(directory.file(&temporary).starts_with(directory.file(apart)));
        let published = store.publish(&temporary, &below.join(name.as_bytes()).unwrap(), None).unwrap();
        assert!(matches!(published, Outcome::Done(_)));
    };
    let made = store.make_upload_directories(&below, 40);
    assert_eq!((made.len(), entries()), (2, 2));
    upload(&made[0], "a");
    upload(&made[1], "b");
    let mut names = Vec::new();
    let listing = store.list(&below, &mut |object| {
        names.push(object.name);
        Ok(())
    });
    names.sort();
    assert_eq!((names, listing.unwrap().temporaries), (vec![b"a".to_vec(), b"b".to_vec()], 2));
    store.remove_upload_directories(&made);
    assert_eq!(entries(), 2, "only the files");
    assert_eq!(fs::read(directory.file(&below).join("b")).unwrap(), b"data");

    // A mover that dies: with an upload, and with a file that is none.
    let made = store.make_upload_directories(&below, 40);
    store.upload(&store.temporaries().next(&made[0]), &source(b"torn"), &Attributes::default()).unwrap();
    fs::write(directory.file(&made[1]).join("foreign"), "kept").unwrap();
    store.remove_upload_directories(&made);
    assert_eq!(entries(), 4);
    assert_eq!(store.remove_leftovers(&below, &|_| true).unwrap().live, 2);
    assert_eq!((store.remove_leftovers(&below, &|_| false).unwrap().removed, entries()), (1, 3));
    assert_eq!(fs::read(directory.file(&made[1]).join("foreign")).unwrap(), b"kept");

    assert_eq!(store.make_upload_directories(&below, 15), [], "too few");
    assert_eq!(store.make_upload_directories(&path("none"), 40), [], "no such directory");
    let fast = PosixStore::open(&directory.0, options(true), id()).unwrap();
    assert_eq!(fast.make_upload_directories(&below, 40), [], "a new name is one call");
    let local = PosixOptions { slow_names: false, ..options(false) };
    let local = PosixStore::open(&directory.0, local, id()).unwrap();
    assert_eq!(local.make_upload_directories(&below, 40), [], "nothing waits for a server");
}
