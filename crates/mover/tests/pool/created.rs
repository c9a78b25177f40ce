//! New files that a mover drains or releases before their creator has opened the backing file. The test is the mover, as
//! in `races`, and holds leases for which the creator waits.

use std::fs::File;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::mpsc::{channel, Receiver};
use std::time::{Duration, Instant};

use forebay_client::{Fail, LeaseKind, LeasedFiles, PathBuffer, Place, Pool};
use forebay_data::BackingName;
use forebay_types::{Attr, Caller, Code, Entry, Ino, Request, StoreVersion, Timestamp, FLAG_DIRTY};
use rustix::fs::{Mode, OFlags};

use crate::bed::entry;
use crate::races::Raced;

impl Raced {
    /// A drain of the empty file `g` commits.
    fn copied_empty(&self) {
        let epoch = self.begin_drain_of("g");
        let path = self.bed.store().join("g");
        std::fs::write(&path, "").unwrap();
        let stat = std::fs::metadata(path).unwrap();
        let mtime = Timestamp { sec: stat.mtime(), nsec: stat.mtime_nsec() as u32 };
        let version = StoreVersion { ino: stat.ino(), mtime, ..StoreVersion::NOTHING };
        self.commit_of("g", epoch, version);
        assert!(self.named("g").attr.flags & FLAG_DIRTY == 0, "the drain has committed");
    }

    /// The mover releases `g`.
    fn releases_empty(&self) {
        let file = self.named("g");
        assert!(matches!(self.pool.release_leased(&file, || true), Ok(Ok(_))));
        assert!(!self.named("g").attr.is_resident());
    }
}

/// A file `/s/g` whose creator waits in the open of its backing file.
struct Created {
    raced: Raced,
    /// Leases on the backing files under the next numbers, for one of which the creator waits.
    held: Vec<LeasedFiles>,
    /// The creator writes `behind`, and closes the file.
    written: Receiver<()>,
}

impl Created {
    /// A mover that finds the file now makes its backing file, which is there already: a creator whose threads wait for a
    /// processor opens it later.
    fn up() -> Created {
        Created::up_with(|pool, parent| {
            let made = pool.create(Caller { uid: 0, gid: 0 }, parent, b"g", 0o644, true, 0).unwrap();
            made.2.unwrap()
        })
    }

    /// The same with a creator that opens the file so.
    fn up_with(create: fn(&Pool, Ino) -> OwnedFd) -> Created {
        let (raced, held) = Created::held(LeaseKind::Read, &[]);
        let written = Created::start(&raced, &held, move |pool, parent| {
            File::from(create(pool, parent)).write_all_at(b"behind", 0).unwrap();
        });
        Created { raced, held, written }
    }

    /// A pool whose next new file is opened once the leases are given back: for writing, or with write leases at all.
    fn held(kind: LeaseKind, settings: &[&str]) -> (Raced, Vec<LeasedFiles>) {
        let raced = Raced::up_with("first", settings);
        let first = raced.entry();
        let numbers = (1..=64).map(|more| Ino(first.attr.ino.0 + more));
        let held = numbers.map(|ino| {
            let entry = Entry { attr: Attr { ino, ..first.attr }, ..first };
            let name = BackingName::new(ino, 0, 0);
            let target = raced.pool.target_directories()[0];
            let (flags, mode) = (OFlags::RDWR | OFlags::CREATE | OFlags::EXCL, Mode::RWXU);
            drop(rustix::fs::openat(target, name.as_c_str(), flags | OFlags::CLOEXEC, mode).unwrap());
            let mut lease = None;
            // A child that another test starts at this moment has the descriptor until it runs its program.
            raced.bed.wait("nobody has the file open", || {
                match raced.pool.lease_files(&entry, kind) {
                    Ok(leased) => lease = Some(leased),
                    Err(code) => assert_eq!(code, Code::Busy),
                }
                lease.is_some()
            });
            lease.unwrap()
        });
        let held = held.collect();
        (raced, held)
    }

    /// Runs a creator of `g`, whose result is received once it is done.
    fn start<T: Send + 'static>(
        raced: &Raced,
        held: &[LeasedFiles],
        creator: impl FnOnce(&'static Pool, Ino) -> T + Send + 'static,
    ) -> Receiver<T> {
        let pool = raced.pool;
        let parent = entry(pool, "s").unwrap().attr.ino;
        let (done, result) = channel();
        std::thread::spawn(move || done.send(creator(pool, parent)).unwrap());
        raced.bed.wait("the creator waits", || held.iter().any(|lease| !lease.is_undisturbed()));
        result
    }

    /// A drain of the empty file commits.
    fn copied(&self) {
        self.raced.copied_empty();
    }

    /// The creator goes on. What it writes is not lost.
    fn ends_whole(self) {
        let Created { raced, held, written } = self;
        drop(held);
        written.recv().unwrap();
        assert_eq!(raced.bed.sh("cat /forebay/s/g"), "behind");
        raced.verb(&["purge", "--no-progress", "/s/g"]);
        assert_eq!(raced.bed.sh("cat $S/g; cat /forebay/s/g"), "behindbehind");
    }
}

#[test]
fn drain_that_commits_before_a_new_file_is_open_does_not_hide_what_its_creator_writes() {
    let created = Created::up();
    created.copied();
    created.ends_whole();
}

#[test]
fn release_of_a_new_file_that_is_not_open_yet_does_not_lose_what_its_creator_writes() {
    let created = Created::up();
    created.copied();
    created.raced.releases_empty();
    created.ends_whole();
}

/// Creates `g` by an open with these flags.
fn creates(pool: &Pool, flags: OFlags) -> Result<OwnedFd, Option<Code>> {
    let at = Place { dir: Ino::ROOT, path: b"s/g" };
    let flags = OFlags::CREATE | OFlags::EXCL | flags;
    match pool.open(at, flags.bits() as i32, 0o644, &mut PathBuffer::new()) {
        // SAFETY: the descriptor is new and ours.
        Ok(fd) => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        Err(Fail::Code(code)) => Err(Some(code)),
        Err(Fail::Escape) => Err(None),
    }
}

#[test]
fn exclusive_create_of_a_file_that_cannot_be_restored_says_why() {
    let (raced, held) = Created::held(LeaseKind::Read, &[]);
    // No mover has the file restored.
    let mover = raced.bed.status()["mover"]["pid"].as_i64().unwrap() as i32;
    let mover = rustix::process::Pid::from_raw(mover).unwrap();
    rustix::process::kill_process(mover, rustix::process::Signal::STOP).unwrap();
    let created = Created::start(&raced, &held, |pool, _| creates(pool, OFlags::RDWR).map(|_| ()));
    raced.copied_empty();
    raced.releases_empty();
    drop(held);
    let ino = raced.named("g").attr.ino;
    let until = Instant::now() + Duration::from_secs(20);
    let failed = loop {
        let request = Request::StoreFailed { ino, code: Code::NoSpace as u16 };
        raced.pool.request(&request, |_| Ok(())).unwrap();
        match created.recv_timeout(Duration::from_millis(20)) {
            Ok(failed) => break failed,
            Err(_) => assert!(Instant::now() < until, "the creator still waits"),
        }
    };
    rustix::process::kill_process(mover, rustix::process::Signal::CONT).unwrap();
    assert_eq!(failed, Err(Some(Code::NoSpace)));
}

#[test]
fn new_file_that_is_released_before_its_creator_has_it_open_needs_no_recall() {
    let (raced, held) = Created::held(LeaseKind::Write, &["--recall", "no"]);
    let created = Created::start(&raced, &held, |pool, _| creates(pool, OFlags::RDONLY).map(drop));
    raced.copied_empty();
    raced.releases_empty();
    drop(held);
    assert_eq!(created.recv().unwrap(), Ok(()));
    // What it has opened is the file that programs see.
    raced.bed.sh("printf behind > /forebay/s/g");
    assert_eq!(raced.bed.sh("cat /forebay/s/g"), "behind");
    // Data do need one.
    raced.verb(&["purge", "--no-progress", "/s/g"]);
    assert!(!raced.bed.run("cat /forebay/s/g").status.success());
}

/// As if a mover found no program that has the file open, when it has been restored for its creator. Returns how often.
fn release_again() -> u32 {
    let created = Created::up_with(|pool, _| {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR;
        let at = Place { dir: Ino::ROOT, path: b"s/g" };
        let fd = pool.open(at, flags.bits() as i32, 0o644, &mut PathBuffer::new()).unwrap();
        // SAFETY: the descriptor is new and ours.
        unsafe { OwnedFd::from_raw_fd(fd) }
    });
    created.copied();
    let pool = created.raced.pool;
    assert!(matches!(pool.release_leased(&created.raced.named("g"), || true), Ok(Ok(_))));
    let releases = std::thread::spawn(move || {
        let (mut releases, end) = (0, Instant::now() + Duration::from_secs(30));
        // Until the creator has it open for writing.
        while Instant::now() < end {
            let file = entry(pool, "s/g").unwrap();
            if file.attr.flags & FLAG_DIRTY != 0 {
                break;
            }
            // As a mover does: nobody opens or restores it meanwhile.
            let lease = file.attr.is_resident().then(|| pool.lease_files(&file, LeaseKind::Write));
            if let Some(Ok(_lease)) = lease {
                releases += u32::from(matches!(pool.release_leased(&file, || true), Ok(Ok(_))));
            }
        }
        releases
    });
    let Created { raced, held, written } = created;
    drop(held);
    written.recv().unwrap();
    assert_eq!(raced.bed.sh("cat /forebay/s/g"), "behind");
    releases.join().unwrap()
}

#[test]
fn new_file_that_is_released_again_and_again_is_opened_at_last() {
    // The creator often has it open before it is released again.
    let (mut releases, mut rounds) = (0, 0);
    while releases < 3 && rounds < 40 {
        (releases, rounds) = (releases + release_again(), rounds + 1);
    }
    assert!(releases > 0, "in {rounds} rounds the creator had the file at once");
}
