//! Faults of a store, as the mover meets them.

use std::time::{Duration, Instant};

use forebay_mover::store::faulty::{Call, Fault, Faults};
use forebay_mover::store::{Attributes, Outcome, StorePath, StoreVersion};
use forebay_types::Code;

use super::subject::{path, pattern, source, Subject};

#[test]
fn faults_of_each_kind_are_reported_as_what_they_are() {
    let s = Subject::faulty();
    let faults = s.faults.clone().unwrap();
    for (fault, code, is_transient) in [
        (Fault::Unavailable, Code::Busy, true),
        (Fault::Late(Duration::ZERO), Code::TimedOut, true),
        (Fault::AnswerLost, Code::TimedOut, true),
        (Fault::NoCredentials, Code::AccessDenied, false),
        (Fault::Full, Code::NoSpace, false),
        (Fault::Fail(Code::Corrupt), Code::Corrupt, false),
    ] {
        faults.inject(Call::Look, fault, 1);
        let failure = s.store.look(&path("x")).unwrap_err();
        assert_eq!((failure.code(), failure.is_transient), (code, is_transient), "{fault:?}");
        assert_eq!(s.store.look(&path("x")).unwrap(), None);
    }
    faults.inject(None, Fault::NoCredentials, u64::MAX);
    for _ in 0..3 {
        assert_eq!(s.store.list(&StorePath::root(), &mut |_| Ok(())).unwrap_err().code(), Code::AccessDenied);
    }
    faults.clear();
    s.store.list(&StorePath::root(), &mut |_| Ok(())).unwrap();
}

#[test]
fn call_that_stalls_stops_only_its_thread() {
    let s = Subject::faulty();
    let faults = s.faults.clone().unwrap();
    s.put(&path("file"), b"x");
    faults.inject(Call::Look, Fault::Stall, 1);
    std::thread::scope(|scope| {
        let stalled = scope.spawn(|| s.store.look(&path("file")).unwrap());
        while faults.stalled() == 0 {
            std::thread::yield_now();
        }
        s.put(&path("another"), b"y");
        assert!(s.store.look(&path("another")).unwrap().is_some());
        assert!(!stalled.is_finished());
        faults.release();
        assert!(stalled.join().unwrap().is_some());
    });
}

#[test]
fn upload_cut_short_shows_in_its_version_or_stays_a_temporary() {
    let s = Subject::faulty();
    let faults = s.faults.clone().unwrap();
    let bytes = pattern(1, 10_000);
    faults.inject(Call::Upload, Fault::Truncate(100), 1);
    let temporary = s.store.temporaries().next(&StorePath::root());
    let version = s.store.upload(&temporary, &source(&bytes), &Attributes::default()).unwrap();
    assert_eq!(version.bytes, 100);
    faults.inject(Call::Upload, Fault::Torn(100), 1);
    let temporary = s.store.temporaries().next(&StorePath::root());
    let failure = s.store.upload(&temporary, &source(&bytes), &Attributes::default()).unwrap_err();
    assert!(failure.is_transient);
    let listing = s.store.list(&StorePath::root(), &mut |_| Ok(())).unwrap();
    assert_eq!((listing.objects, listing.temporaries), (0, 2));
}

#[test]
fn late_upload_lands_beside_and_late_publication_is_seen() {
    let s = Subject::faulty();
    let faults = s.faults.clone().unwrap();
    let to = path("file");
    faults.inject(Call::Upload, Fault::Late(Duration::from_millis(10)), 1);
    let lost = s.store.temporaries().next(&StorePath::root());
    s.store.upload(&lost, &source(b"late"), &Attributes::default()).unwrap_err();
    let version = s.put(&to, b"in time");
    faults.wait_late();
    assert!(s.store.look(&lost).unwrap().is_some());
    assert_eq!(s.store.look(&to).unwrap().unwrap().version, version);
    // A publication that lands after its time-out: a repeated one finds that out.
    let temporary = s.upload(&to, b"second");
    let upload = s.store.look(&temporary).unwrap().unwrap().version;
    faults.inject(Call::Publish, Fault::Late(Duration::from_millis(10)), 1);
    assert!(s.store.publish(&temporary, &to, Some(&version)).unwrap_err().is_transient);
    faults.wait_late();
    let again = s.store.publish(&temporary, &to, Some(&version)).unwrap_err();
    assert_eq!(again.code(), Code::NotFound);
    assert_eq!(s.store.look(&to).unwrap().unwrap().version, upload);
    assert_eq!(s.get(&to).unwrap(), b"second");
}

/// Publishes one version as a mover has to: after a transient failure it looks before it goes on.
fn drain(s: &Subject, to: &StorePath, bytes: &[u8], mut expected: Option<StoreVersion>) -> StoreVersion {
    let again = |e: &forebay_mover::store::StoreError| assert!(e.is_transient, "{e}");
    loop {
        let temporary = s.store.temporaries().next(&to.parent().unwrap());
        let upload = match s.store.upload(&temporary, &source(bytes), &Attributes::default()) {
            Ok(version) if version.bytes == bytes.len() as u64 => version,
            Ok(_) => continue,
            Err(e) => {
                again(&e);
                continue;
            }
        };
        loop {
            match s.store.publish(&temporary, to, expected.as_ref()) {
                Ok(Outcome::Done(version)) => return version,
                Ok(Outcome::Conflict(Some(found))) if found.version == upload => return upload,
                Ok(Outcome::Conflict(found)) => panic!("conflict with {found:?}"),
                Err(e) if e.code() == Code::NotFound => {}
                Err(e) => again(&e),
            }
            // An earlier publication may have landed, or may land between this look and the next try.
            match s.store.look(to) {
                Ok(Some(found)) if found.version == upload => return upload,
                Ok(found) => expected = found.map(|object| object.version),
                Err(e) => again(&e),
            }
        }
    }
}

#[test]
fn random_faults_lose_and_tear_nothing() {
    let seeds: u64 = std::env::var("FOREBAY_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(25);
    for seed in 1..=seeds {
        let s = Subject::tmpfs().with_faults(Faults::random(seed, 300));
        let faults = s.faults.clone().unwrap();
        let mut versions = vec![None; 6];
        for round in 0..3 {
            for file in 0..6 {
                let bytes = pattern(seed * 100 + round * 10 + file, 500 + (file * 700) as usize);
                let version = &mut versions[file as usize];
                *version = Some(drain(&s, &path(&format!("f{file}")), &bytes, *version));
            }
        }
        faults.wait_late();
        faults.clear();
        for file in 0..6u64 {
            let bytes = pattern(seed * 100 + 20 + file, 500 + (file * 700) as usize);
            assert!(s.get(&path(&format!("f{file}"))).unwrap() == bytes, "seed {seed}, file {file}");
        }
        let listing = s.store.list(&StorePath::root(), &mut |_| Ok(())).unwrap();
        assert_eq!(listing.objects, 6, "seed {seed}");
        s.store.remove_leftovers(&StorePath::root(), &|_| false).unwrap();
        let listing = s.store.list(&StorePath::root(), &mut |_| Ok(())).unwrap();
        assert_eq!((listing.objects, listing.temporaries), (6, 0), "seed {seed}");
    }
}

#[test]
fn source_that_fails_in_the_middle_leaves_nothing() {
    let s = Subject::tmpfs();
    let to = path("file");
    let version = s.put(&to, b"kept");
    struct Failing;
    impl forebay_mover::store::Source for Failing {
        fn bytes(&self) -> u64 {
            1 << 20
        }
        fn next_data(&self, within: std::ops::Range<u64>) -> Result<Option<std::ops::Range<u64>>, Code> {
            Ok((!within.is_empty()).then_some(within))
        }
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
            if offset > 1 << 19 {
                return Err(Code::Io);
            }
            let bytes = buffer.len().min(1 << 18);
            buffer[..bytes].fill(1);
            Ok(bytes)
        }
    }
    let temporary = s.store.temporaries().next(&StorePath::root());
    let failure = s.store.upload(&temporary, &Failing, &Attributes::default()).unwrap_err();
    assert!(failure.to_string().contains("cannot read the pool's copy"), "{failure}");
    assert_eq!(s.store.look(&temporary).unwrap(), None);
    assert_eq!(s.store.look(&to).unwrap().unwrap().version, version);
}

#[test]
fn store_that_hangs_answers_the_others_after_the_limit() {
    use forebay_mover::store::limited::{GateLimits, Limited, Limits};
    let s = Subject::faulty();
    let faults = s.faults.clone().unwrap();
    let calls = GateLimits { least: 1, most: 2, wait: Duration::from_millis(50) };
    let limited = Limited::new(s.store.clone(), Limits { calls, ..Limits::default() });
    use forebay_mover::store::Store;
    faults.inject(None, Fault::Stall, 1);
    std::thread::scope(|scope| {
        scope.spawn(|| limited.look(&path("x")).unwrap());
        while faults.stalled() == 0 {
            std::thread::yield_now();
        }
        let started = Instant::now();
        let failure = limited.look(&path("x")).unwrap_err();
        assert_eq!((failure.code(), failure.is_transient), (Code::TimedOut, true), "{failure}");
        assert!(started.elapsed() < Duration::from_secs(20));
        faults.release();
    });
}
