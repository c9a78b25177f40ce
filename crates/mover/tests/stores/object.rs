//! What object stores alone have: conditions, lost answers, keys of others, credentials.

use std::fs;
use std::sync::atomic::Ordering;

use forebay_mover::store::{Attributes, ObjectStore, Outcome, Source, Store, StorePath, StoreUrl};
use forebay_types::{Code, Kind};

use super::s3_server::{Memory, Server, ServerFault, ACCESS_KEY, SECRET_KEY};
use super::subject::{id, path, pattern, source, Foreign, Subject, TempDir};

fn subject() -> (std::sync::Arc<Memory>, Subject) {
    let memory = Memory::new(true);
    let subject = Subject::of_memory(memory.clone());
    (memory, subject)
}

#[test]
fn conditions_are_used_only_where_they_hold() {
    assert!(Subject::object().store.abilities().conditional_publish);
    assert!(!Subject::object_without_conditions().store.abilities().conditional_publish);
    // The objects of the test are gone.
    let (memory, _subject) = subject();
    assert_eq!(memory.keys(), Vec::<String>::new());
}

#[test]
fn copy_whose_answer_was_lost_is_recognized() {
    let (memory, s) = subject();
    let to = path("file");
    for (round, expected) in [None, Some(())].into_iter().enumerate() {
        let version = expected.and_then(|()| s.store.look(&to).unwrap()).map(|object| object.version);
        let temporary = s.upload(&to, format!("round {round}").as_bytes());
        memory.inject("copy", ServerFault::AnswerLost);
        let outcome = s.store.publish(&temporary, &to, version.as_ref()).unwrap();
        let Outcome::Done(version) = outcome else { panic!("taken for a foreign object: {outcome:?}") };
        assert_eq!(s.store.look(&to).unwrap().unwrap().version, version);
    }
    assert_eq!(s.get(&to).unwrap(), b"round 1");
    assert_eq!(memory.keys(), ["some/prefix/file"]);
}

#[test]
fn publication_that_is_repeated_after_it_landed_is_done() {
    let (_, s) = subject();
    let to = path("file");
    let temporary = s.upload(&to, b"once");
    let Outcome::Done(version) = s.store.publish(&temporary, &to, None).unwrap() else { panic!() };
    assert_eq!(s.store.publish(&temporary, &to, None).unwrap(), Outcome::Done(version));
}

#[test]
fn store_that_is_busy_or_full_is_told_apart() {
    let (memory, s) = subject();
    memory.inject("put", ServerFault::Unavailable);
    s.put(&path("file"), b"after a repetition");
    memory.inject("put", ServerFault::Full);
    let temporary = s.store.temporaries().next(&StorePath::root());
    let failure = s.store.upload(&temporary, &source(b"x"), &Attributes::default()).unwrap_err();
    assert_eq!((failure.code(), failure.is_transient), (Code::NoSpace, false), "{failure}");
    assert!(failure.to_string().contains("the bucket's quota is used up (QuotaExceeded)"), "{failure}");
    memory.clear_faults();
    for _ in 0..8 {
        memory.inject("head", ServerFault::Unavailable);
    }
    let failure = s.store.look(&path("file")).unwrap_err();
    assert!(failure.is_transient, "{failure}");
}

#[test]
fn credentials_lost_in_the_middle_are_reported_and_never_shown() {
    let (memory, s) = subject();
    let version = s.put(&path("file"), b"before");
    memory.refuses_credentials.store(true, Ordering::Relaxed);
    let into = super::subject::memory_file(&[]);
    use std::os::fd::AsFd;
    let failures = [
        s.store.look(&path("file")).unwrap_err(),
        s.store.read(&path("file"), &version, 0..1, into.as_fd()).unwrap_err(),
        s.store.list(&StorePath::root(), &mut |_| Ok(())).unwrap_err(),
        s.store.remove(&path("file"), &version).unwrap_err(),
    ];
    for failure in failures {
        let shown = format!("{failure} {failure:?}");
        assert!(!shown.contains(SECRET_KEY) && !shown.contains(ACCESS_KEY), "{shown}");
        assert_eq!((failure.code(), failure.is_transient), (Code::AccessDenied, false), "{failure}");
        assert!(failure.to_string().contains("check the credentials"), "{failure}");
    }
    memory.refuses_credentials.store(false, Ordering::Relaxed);
    assert_eq!(s.get(&path("file")).unwrap(), b"before");
}

#[test]
fn nothing_that_is_shown_has_credentials() {
    let memory = Memory::new(true);
    let server = Server::memory(memory);
    let place = server.place("bucket", "p");
    let store = ObjectStore::open(&place, id()).unwrap();
    let url = StoreUrl { place: forebay_mover::store::StorePlace::S3(place), limits: Default::default() };
    let wrong = ObjectStore::open(&server.place("nobucket", ""), id()).unwrap_err();
    assert_eq!(wrong.code(), Code::NotFound, "{wrong}");
    assert!(wrong.to_string().contains("create the bucket"), "{wrong}");
    let shown = format!("{store:?} {} {url} {url:?} {wrong} {wrong:?}", store.title());
    assert!(!shown.contains(SECRET_KEY) && !shown.contains(ACCESS_KEY), "{shown}");
    assert_eq!(store.title(), "s3://bucket/p");
    // The same store by its URL, with limits.
    let limited = url.open(id()).unwrap();
    assert_eq!(limited.look(&path("none")).unwrap(), None);
}

#[test]
fn server_that_is_away_is_a_transient_failure() {
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let server = Server::memory(Memory::new(true));
    let mut place = server.place("bucket", "");
    place.endpoint = Some(format!("http://{address}"));
    let failure = ObjectStore::open(&place, id()).unwrap_err();
    assert!(failure.is_transient, "{failure:?}");
}

#[test]
fn objects_of_others_have_defaults_and_odd_keys_are_counted() {
    let (memory, s) = subject();
    for key in [
        "plain",
        "dir/a",
        "dir//empty",
        "dir/../up",
        "dir/.",
        "dir/b",
        "dir/b/hidden",
        "dir/ white",
        "other/x",
    ] {
        memory.put(&format!("some/prefix/{key}"), b"12345");
    }
    memory.put("some/prefixed", b"not in the store");
    memory.put("elsewhere", b"not in the store");
    let found = s.store.look(&path("plain")).unwrap().unwrap();
    assert_eq!((found.kind, found.mode, found.bytes()), (Kind::File, 0o644, 5));
    assert_eq!(found.mtime.sec, found.version.mtime.sec);
    assert_eq!(s.names(&StorePath::root()), [&b"dir"[..], b"other", b"plain"]);
    let mut names = Vec::new();
    let listing = s.store.list(&path("dir"), &mut |object| {
        names.push(object.name);
        Ok(())
    });
    let listing = listing.unwrap();
    assert_eq!(names, [b"a", b"b"]);
    assert_eq!((listing.objects, listing.unusable), (2, 5));
    assert_eq!(s.store.look(&path("dir")).unwrap().unwrap().kind, Kind::Directory);
    // A name that is a directory is no free name for a file.
    let temporary = s.upload(&path("x"), b"x");
    assert!(s.store.publish(&temporary, &path("dir"), None).unwrap().is_conflict());
}

#[test]
fn large_upload_that_fails_leaves_no_parts() {
    struct Failing;
    impl Source for Failing {
        fn bytes(&self) -> u64 {
            30 << 20
        }
        fn next_data(&self, within: std::ops::Range<u64>) -> Result<Option<std::ops::Range<u64>>, Code> {
            Ok((!within.is_empty()).then_some(within))
        }
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
            if offset >= 20 << 20 {
                Err(Code::Stale)
            } else {
                Ok(buffer.len())
            }
        }
    }
    let (memory, s) = subject();
    let temporary = s.store.temporaries().next(&StorePath::root());
    let failure = s.store.upload(&temporary, &Failing, &Attributes::default()).unwrap_err();
    assert_eq!(failure.code(), Code::Stale);
    assert_eq!((memory.keys().len(), memory.unfinished_uploads()), (0, 0));
    // A part that fails once is sent again.
    memory.inject("part", ServerFault::Unavailable);
    let bytes = pattern(5, 30 << 20);
    s.put(&path("large"), &bytes);
    assert!(memory.get("some/prefix/large").unwrap() == bytes);
    assert_eq!(memory.unfinished_uploads(), 0);
}

#[test]
fn change_between_attributes_read_and_written_is_a_conflict() {
    let (_, s) = subject();
    let version = s.put(&path("file"), b"x");
    s.foreign.write(&path("file"), b"y");
    let mode = Attributes { mode: Some(0o600), ..Attributes::default() };
    assert!(s.store.set_attributes(&path("file"), &version, &mode).unwrap().is_conflict());
    assert_eq!(s.get(&path("file")).unwrap(), b"y");
}

/// s3s-fs 0.11 has no etags in answers to HEAD, no conditions, no delimiter and no end of listings, and takes a directory
/// for an object: what remains works, and nothing hangs.
#[test]
fn weak_server_stores_and_compares_files() {
    let root = TempDir::disk();
    fs::create_dir(root.0.join("bucket")).unwrap();
    let server = Server::files(&root.0);
    let store = ObjectStore::open(&server.place("bucket", "p"), id()).unwrap_or_else(|e| panic!("{e}"));
    assert!(!store.abilities().conditional_publish);
    let s = Subject::over(store, Foreign::None, server);
    let bytes = pattern(9, 100_000);
    let first = s.put(&path("a/file"), &bytes);
    assert!(s.get(&path("a/file")).unwrap() == bytes);
    assert!(s.publish(&path("a/file"), b"other", None).is_err());
    let second = s.publish(&path("a/file"), b"longer by far", Some(&first)).unwrap();
    assert!(s.publish(&path("a/file"), b"third", Some(&first)).is_err());
    let endless = s.store.list(&path("a"), &mut |_| Ok(())).unwrap_err();
    assert_eq!(endless.code(), Code::Corrupt, "{endless}");
    assert!(!s.store.remove(&path("a/file"), &second).unwrap().is_conflict());
    assert_eq!(s.store.look(&path("a/file")).unwrap(), None);
}
