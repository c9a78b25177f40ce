//! Opens, drains, releases and restores of one file in the orders that have lost data in other designs. The test is the
//! mover itself: it takes the leases and sends the requests, and the pool's own mover has nothing to do, because nothing
//! is drained except on request. New files that are not open yet: `created`.

use std::cell::Cell;
use std::fs::{File, FileTimes};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Receiver};
use std::time::{Duration, UNIX_EPOCH};

use forebay_client::{has_name, Kept, LeaseKind, PathBuffer, Place, Pool, Striping};
use forebay_data::BackingName;
use forebay_types::{
    Attr, Code, Entry, Ino, PendingPlace, Reply, Request, SetAttr, StoreVersion, TimeSet, Timestamp,
    FLAG_DIRTY, FLAG_DRAINING,
};
use rustix::fs::{Access, AtFlags, FlockOperation, Mode, OFlags};

use crate::bed::{entry, Bed};

/// What the store has of a file after a drain.
const VERSION: StoreVersion = StoreVersion { ino: 77, ..StoreVersion::NOTHING };

pub(crate) struct Raced {
    pub(crate) bed: Bed,
    pub(crate) pool: &'static Pool,
}

impl Raced {
    /// A pool with a file of these bytes at `/s/f`.
    fn up(bytes: &str) -> Raced {
        Raced::up_with(bytes, &[])
    }

    /// The same with these settings of the store.
    pub(crate) fn up_with(bytes: &str, settings: &[&str]) -> Raced {
        let bed = Bed::new("64MiB");
        bed.attach_with("", &[&["--drain", "request"], settings].concat());
        bed.sh(&format!("printf %s {bytes} > /forebay/s/f"));
        let pool = bed.attach_client();
        Raced { bed, pool }
    }

    pub(crate) fn entry(&self) -> Entry {
        self.named("f")
    }

    pub(crate) fn named(&self, name: &str) -> Entry {
        entry(self.pool, &format!("s/{name}")).unwrap()
    }

    fn has(&self, flag: u32) -> bool {
        self.entry().attr.flags & flag != 0
    }

    fn place(&self, name: &str) -> PendingPlace {
        let request = Request::Pending { parent: Ino(0), name: b"" };
        let places = self.pool.request(&request, |reply| match reply {
            Reply::Bytes(bytes) => PendingPlace::decode_list(bytes),
            _ => Err(Code::Malformed),
        });
        places.unwrap().into_iter().find(|place| place.name == name.as_bytes()).unwrap()
    }

    /// The beginning of a drain; returns the epoch that is copied.
    fn begin_drain(&self) -> u64 {
        self.begin_drain_of("f")
    }

    pub(crate) fn begin_drain_of(&self, name: &str) -> u64 {
        let ino = self.named(name).attr.ino;
        self.pool.request(&Request::BeginDrain { ino }, |_| Ok(())).unwrap();
        self.named(name).attr.epoch()
    }

    /// The end of a drain of this epoch.
    fn commit(&self, epoch: u64) {
        self.commit_of("f", epoch, VERSION);
    }

    pub(crate) fn commit_of(&self, name: &str, epoch: u64, version: StoreVersion) {
        let place = self.place(name);
        let ino = self.named(name).attr.ino;
        let (parent, name, seen) = (place.parent, &place.name[..], place.changes);
        let request = Request::Published { parent, name, ino, epoch, seen, version };
        self.pool.request(&request, |_| Ok(())).unwrap();
    }

    /// Opens the file with attributes that were read before, in a thread of its own, and writes or reads it. Returns
    /// what it reads.
    fn opener(&self, before: Entry, writes: Option<&'static [u8]>) -> Receiver<Vec<u8>> {
        let (read, result) = channel();
        let pool = self.pool;
        std::thread::spawn(move || {
            let file = pool.open_file(&before, writes.is_some()).unwrap();
            if let Some(bytes) = writes {
                file.write_at(bytes, 0).unwrap();
            }
            let mut bytes = [0; 64];
            let n = file.read_at(&mut bytes, 0).unwrap();
            drop(file);
            read.send(bytes[..n].to_vec()).unwrap();
        });
        result
    }

    /// What a program that starts now reads.
    fn content(&self) -> String {
        self.bed.sh("cat /forebay/s/f")
    }

    /// A command that has to succeed.
    pub(crate) fn verb(&self, arguments: &[&str]) {
        let done = self.bed.pool_verb(arguments);
        assert!(done.status.success(), "{}", crate::bed::text(&done));
    }

    /// The modification time that a program sees, in seconds.
    fn mtime(&self) -> String {
        self.bed.sh("stat -c %Y /forebay/s/f").trim().to_owned()
    }

    /// Releases the file as a mover does that has lost its leases before its request, and dies after it.
    fn release_without_end(&self) {
        // On a busy machine the pool's mover may have a request to restore it left, of a program that has read it before.
        self.bed.wait("it is released", || {
            self.release_once();
            !self.entry().attr.is_resident()
        });
    }

    fn release_once(&self) {
        let (at, entry) = (Place { dir: Ino::ROOT, path: b"s/f" }, self.entry());
        let st = self.pool.stat(at, true, &mut PathBuffer::new()).unwrap();
        let time = |sec: i64, nsec: i64| TimeSet::At(Timestamp { sec, nsec: nsec as u32 });
        let set = SetAttr {
            size: Some(st.st_size as u64),
            atime: time(st.st_atime, st.st_atime_nsec),
            mtime: time(st.st_mtime, st.st_mtime_nsec),
            ..SetAttr::default()
        };
        let (ino, epoch) = (entry.attr.ino, entry.attr.epoch());
        // Refused while it is being restored.
        let _ = self.pool.request(&Request::Release { ino, epoch, set }, |_| Ok(()));
    }

    /// Has the pool's mover drain and release the file, and checks that the store has these bytes.
    fn is_durable(&self, bytes: &str) {
        self.verb(&["purge", "--no-progress", "/s/f"]);
        assert_eq!(self.bed.sh("cat $S/f"), bytes);
        assert_eq!(self.content(), bytes);
    }
}

#[test]
fn drain_that_commits_between_an_opens_look_and_its_mark_does_not_hide_the_write() {
    let raced = Raced::up("before");
    let epoch = raced.begin_drain();
    // The program looks: the file is dirty, so it seems to need no mark.
    let look = raced.entry();
    assert!(look.attr.flags & FLAG_DIRTY != 0 && look.attr.flags & FLAG_DRAINING != 0);
    raced.commit(epoch);
    assert!(!raced.has(FLAG_DIRTY), "the drain has committed");
    assert_eq!(raced.opener(look, Some(b"behind")).recv().unwrap(), b"behind");
    assert!(raced.has(FLAG_DIRTY) && raced.entry().attr.epoch() != epoch);
}

#[test]
fn drain_that_commits_after_its_lease_was_broken_does_not_hide_the_write() {
    let raced = Raced::up("before");
    let held = raced.pool.lease_files(&raced.entry(), LeaseKind::Read).unwrap();
    let epoch = raced.begin_drain();
    // A program opens the file for writing, and waits for the lease. The kernel breaks it some time later.
    let written = raced.opener(raced.entry(), Some(b"during"));
    raced.bed.wait("the program waits", || !held.is_undisturbed());
    drop(held);
    assert_eq!(written.recv().unwrap(), b"during");
    raced.commit(epoch);
    assert!(raced.has(FLAG_DIRTY), "what was copied is not what the file contains");
}

#[test]
fn directory_that_a_killed_mover_made_without_its_attributes_gets_them() {
    let raced = Raced::up("first");
    raced.bed.sh("umask 022; mkdir /forebay/s/d /forebay/s/e");
    let parent = raced.place("d").parent;
    for name in ["d", "e"] {
        let version = StoreVersion::A_DIRECTORY;
        raced.pool.request(&Request::Intend { parent, name: name.as_bytes(), version }, |_| Ok(())).unwrap();
    }
    // The mover was killed between mkdir and chmod. Another program has made the other one, for itself.
    let made = |name: &str, uid: u32| {
        let path = raced.bed.store().join(name);
        std::fs::create_dir(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::chown(&path, Some(uid), None).map(|()| path)
    };
    let begun = made("d", rustix::process::geteuid().as_raw()).unwrap();
    let foreign = made("e", 12345).ok();
    assert_eq!(raced.bed.pool_verb(&["sync", "-r", "/s"]).status.code(), Some(0));
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().mode() & 0o7777;
    assert_eq!(mode(&begun), 0o755);
    if let Some(foreign) = foreign {
        assert_eq!(mode(&foreign), 0o700);
    }
}

#[test]
fn open_of_a_file_that_is_released_and_removed_meanwhile_fails() {
    let raced = Raced::up("data");
    raced.is_durable("data");
    // The program has looked, and waits for a processor.
    let look = raced.entry();
    assert!(look.attr.is_resident());
    raced.verb(&["release", "/s/f"]);
    // A restore begins, and the program opens what it fills.
    drop(raced.pool.open_to_restore(&raced.entry()).unwrap());
    let held = raced.pool.lease_files(&look, LeaseKind::Write).unwrap();
    let (opened, file) = channel();
    let pool = raced.pool;
    std::thread::spawn(move || opened.send(pool.open_file(&look, false).map(drop)).unwrap());
    raced.bed.wait("the program waits", || !held.is_undisturbed());
    raced.bed.sh("rm /forebay/s/f");
    drop(held);
    assert_eq!(file.recv().unwrap(), Err(Code::Stale));
}

#[test]
fn backing_file_that_a_release_or_a_restore_has_in_hand_is_not_swept() {
    let raced = Raced::up("data");
    raced.is_durable("data");
    let (look, pool) = (raced.entry(), raced.pool);
    let target = pool.target_directories()[0];
    let (ino, name) = (look.attr.ino, BackingName::new(look.attr.ino, 0, 0));
    // A release that may be taken back has the file open.
    let held = pool.lease_files(&look, LeaseKind::Write).unwrap();
    assert!(pool.remove_left(ino, target, name.as_c_str(), || true).is_err());
    drop(held);
    assert_eq!(raced.content(), "data");
    raced.verb(&["release", "/s/f"]);
    // A restore that runs, too.
    let file = pool.open_to_restore(&raced.entry()).unwrap();
    assert_eq!(pool.remove_left(ino, target, name.as_c_str(), || true), Err(Code::Busy));
    assert!(has_name(file.as_fd()).unwrap());
    drop(file);
    // One that begins while a sweep looks at what an earlier one left waits for it.
    let (opened, file) = channel();
    let released = raced.entry();
    let look = || {
        std::thread::spawn(move || opened.send(pool.open_to_restore(&released)).unwrap());
        assert!(file.recv_timeout(Duration::from_millis(300)).is_err(), "the restore waits");
        true
    };
    assert_eq!(pool.remove_left(ino, target, name.as_c_str(), look), Ok(()));
    assert!(has_name(file.recv().unwrap().unwrap().as_fd()).unwrap());
    assert_eq!(raced.content(), "data");
}

#[test]
fn sweep_removes_the_file_alone_that_it_has_looked_at() {
    let raced = Raced::up("data");
    raced.is_durable("data");
    let (pool, ino) = (raced.pool, raced.entry().attr.ino);
    raced.verb(&["release", "/s/f"]);
    drop(pool.open_to_restore(&raced.entry()).unwrap());
    let target = pool.target_directories()[0];
    let name = BackingName::new(ino, 0, 0);
    let bucket = std::str::from_utf8(&name.as_bytes()[..7]).unwrap();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let directory = rustix::fs::openat(target, bucket, flags, Mode::empty()).unwrap();
    let swept = pool.remove_left(ino, target, name.as_c_str(), || {
        // A conversion to one backing file, which opens nothing before it removes what is there, does not wait for the
        // requests of a sweep.
        rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive).unwrap();
        rustix::fs::flock(&directory, FlockOperation::Unlock).unwrap();
        // It puts another file there.
        rustix::fs::renameat(target, name.as_c_str(), target, "data/aside").unwrap();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        drop(rustix::fs::openat(target, name.as_c_str(), flags, Mode::RWXU).unwrap());
        true
    });
    assert_eq!(swept, Ok(()));
    rustix::fs::accessat(target, name.as_c_str(), Access::EXISTS, AtFlags::empty()).unwrap();
    rustix::fs::unlinkat(target, "data/aside", AtFlags::empty()).unwrap();
    // While a file is converted, nothing is swept there. Its conversion may have begun while the sweep looked.
    let swept = pool.remove_left(ino, target, name.as_c_str(), || {
        rustix::fs::flock(&directory, FlockOperation::LockExclusive).unwrap();
        true
    });
    assert_eq!(swept, Err(Code::Busy));
    assert_eq!(pool.remove_left(ino, target, name.as_c_str(), || true), Err(Code::Busy));
    rustix::fs::flock(&directory, FlockOperation::Unlock).unwrap();
    assert_eq!(pool.remove_left(ino, target, name.as_c_str(), || true), Ok(()));
    assert_eq!(raced.content(), "data");
}

#[test]
fn restore_that_waits_for_a_release_fills_a_file_that_has_a_name() {
    let raced = Raced::up("data");
    raced.is_durable("data");
    let entry = raced.entry();
    let held = raced.pool.lease_files(&entry, LeaseKind::Write).unwrap();
    let (opened, file) = channel();
    let released = raced.pool.release_leased(&entry, || {
        // The release has looked at its lease, and is about to unlink the file.
        let (pool, released) = (raced.pool, raced.entry());
        std::thread::spawn(move || opened.send(pool.open_to_restore(&released)).unwrap());
        raced.bed.wait("the restore waits", || !held.is_undisturbed());
        true
    });
    assert!(matches!(released, Ok(Ok(_))), "{released:?}");
    drop(held);
    assert!(has_name(file.recv().unwrap().unwrap().as_fd()).unwrap());
}

#[test]
fn restore_that_has_read_a_version_before_another_program_wrote_the_next_is_void() {
    let raced = Raced::up("before");
    raced.is_durable("before");
    raced.verb(&["release", "/s/f"]);
    let before = raced.entry();
    assert!(!before.attr.is_resident());
    // A restore has copied the version, and a task takes the next one over.
    let file = raced.pool.open_to_restore(&before).unwrap();
    raced.bed.sh("printf other > $S/f");
    raced.verb(&["refresh", "/s/f"]);
    assert_eq!(raced.pool.request(&Request::restored(&before), |_| Ok(())), Err(Code::Stale));
    drop(file);
    assert_eq!(raced.content(), "other");
}

#[test]
fn times_that_are_set_before_a_restore_ends_are_those_that_a_stat_shows_then() {
    let raced = Raced::up("data");
    raced.is_durable("data");
    raced.verb(&["release", "/s/f"]);
    let before = raced.entry();
    // A restore has copied the data, and taken the times.
    let file = raced.pool.open_to_restore(&before).unwrap();
    raced.bed.sh("touch -c -d @1000000 /forebay/s/f");
    assert_eq!(raced.pool.request(&Request::restored(&before), |_| Ok(())), Err(Code::Busy));
    assert_eq!(raced.mtime(), "1000000");
    drop(file);
    assert_eq!(raced.content(), "data");
    assert_eq!(raced.mtime(), "1000000");
}

#[test]
fn stat_of_a_file_that_is_released_and_restored_meanwhile_shows_the_same_size_and_times() {
    let raced = Raced::up("data");
    raced.is_durable("data");
    let pool = raced.pool;
    let seen = || {
        let at = Place { dir: Ino::ROOT, path: b"s/f" };
        let st = pool.stat(at, true, &mut PathBuffer::new()).unwrap();
        (st.st_size, st.st_mtime, st.st_mtime_nsec)
    };
    let (expected, is_over) = (seen(), AtomicBool::new(false));
    /// Ends the other threads, also when this one panics.
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    std::thread::scope(|scope| {
        let _over = Over(&is_over);
        // More threads than processors: they lose these at any point of a stat.
        for _ in 0..4 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    assert_eq!(seen(), expected);
                }
            });
        }
        for _ in 0..1000 {
            let entry = raced.entry();
            let held = loop {
                match pool.lease_files(&entry, LeaseKind::Write) {
                    // The pool's mover looks whether the file is a leftover.
                    Err(Code::Busy) => std::thread::yield_now(),
                    held => break held.unwrap(),
                }
            };
            assert!(matches!(pool.release_leased(&entry, || true), Ok(Ok(_))));
            drop(held);
            let released = raced.entry();
            let file = File::from(pool.open_to_restore(&released).unwrap());
            file.set_len(4).unwrap();
            file.write_all_at(b"data", 0).unwrap();
            let time = |t: Timestamp| UNIX_EPOCH + Duration::new(t.sec as u64, t.nsec);
            let Attr { atime, mtime, .. } = released.attr;
            file.set_times(FileTimes::new().set_accessed(time(atime)).set_modified(time(mtime))).unwrap();
            pool.request(&Request::restored(&released), |_| Ok(())).unwrap();
        }
    });
}

#[test]
fn each_time_that_is_set_while_the_mover_restores_a_file_is_seen_from_then_on() {
    let bed = Bed::new("64MiB");
    let data: Vec<u8> = (0..2_500_000u32).map(|i| ((i * 7) >> 3) as u8).collect();
    std::fs::write(bed.store().join("f"), data).unwrap();
    bed.attach_with("?rate=2MB/s", &["--drain", "request"]);
    let seen = bed.sh(
        "cd /forebay/s; cat f > /dev/null & cat=$!; i=0; while kill -0 $cat 2> /dev/null; do \
         i=$((i + 1)); touch -c -d @$i f; [ $(stat -c %Y f) = $i ]; done; wait $cat; stat -c %Y f; echo $i; cmp f $S/f",
    );
    let seen: Vec<&str> = seen.lines().collect();
    assert_eq!(seen[0], seen[1]);
    let pool = bed.attach_client();
    assert!(entry(pool, "s/f").unwrap().attr.is_resident());
}

#[test]
fn times_of_a_file_that_was_released_since_a_program_looked_are_set() {
    let raced = Raced::up("data");
    raced.is_durable("data");
    let look = raced.entry();
    assert!(look.attr.is_resident());
    raced.verb(&["release", "/s/f"]);
    let mtime = TimeSet::At(Timestamp { sec: 1_000_000, nsec: 0 });
    raced.pool.set_times_entry(&look, TimeSet::Omit, mtime).unwrap();
    assert_eq!(raced.mtime(), "1000000");
    assert_eq!(raced.content(), "data");
    assert_eq!(raced.mtime(), "1000000");
}

#[test]
fn release_of_a_striped_file_that_an_opener_disturbs_leaves_its_data() {
    let raced = Raced::up("data");
    let striping = Striping { stripe_count: 3, stripe_bytes: 4096, directory_takes_precedence: false };
    let at = Place { dir: Ino::ROOT, path: b"s/striped" };
    let flags = (OFlags::RDWR | OFlags::CREATE).bits() as i32;
    let file = raced.pool.open_striped(at, flags, 0o644, striping, &mut PathBuffer::new()).unwrap();
    let bytes: Vec<u8> = (0..20_000u32).map(|i| (i / 100) as u8).collect();
    file.write_at(&bytes, 0).unwrap();
    drop(file);
    raced.verb(&["sync", "--no-progress", "/s/striped"]);
    let striped = entry(raced.pool, "s/striped").unwrap();
    assert!(!striped.layout.is_single());
    let held = raced.pool.lease_files(&striped, LeaseKind::Write).unwrap();
    let released = raced.pool.release_leased(&striped, || {
        raced.bed.sh("touch -c -d @1000000 /forebay/s/striped");
        false
    });
    assert!(matches!(released, Ok(Err(Kept::Because(_)))), "{released:?}");
    drop(held);
    assert_eq!(raced.bed.sh("stat -c '%Y %s' /forebay/s/striped").trim(), "1000000 20000");
    let file = raced.pool.open_file(&entry(raced.pool, "s/striped").unwrap(), false).unwrap();
    let mut read = vec![0; bytes.len() + 1];
    assert_eq!(file.read_at(&mut read, 0).unwrap(), bytes.len());
    assert!(read[..bytes.len()] == bytes);
}

#[test]
fn restore_that_waits_for_a_release_that_is_taken_back_leaves_the_file() {
    let raced = Raced::up("data");
    raced.is_durable("data");
    let entry = raced.entry();
    let held = raced.pool.lease_files(&entry, LeaseKind::Write).unwrap();
    let (opened, file) = channel();
    let released = raced.pool.release_leased(&entry, || {
        let (pool, released) = (raced.pool, raced.entry());
        std::thread::spawn(move || opened.send(pool.open_to_restore(&released)).unwrap());
        raced.bed.wait("the restore waits", || !held.is_undisturbed());
        held.is_undisturbed()
    });
    assert!(matches!(released, Ok(Err(Kept::Because(_)))), "{released:?}");
    drop(held);
    assert_eq!(file.recv().unwrap().map(drop), Err(Code::Interrupted));
    assert_eq!(raced.content(), "data");
}

#[test]
fn release_that_an_opener_disturbs_leaves_the_file() {
    let raced = Raced::up("data");
    raced.is_durable("data");
    let entry = raced.entry();
    let held = raced.pool.lease_files(&entry, LeaseKind::Write).unwrap();
    let read = raced.opener(entry, None);
    raced.bed.wait("the program waits", || !held.is_undisturbed());
    let released = raced.pool.release_leased(&entry, || held.is_undisturbed()).unwrap();
    assert!(matches!(released, Err(Kept::Because(_))), "{released:?}");
    drop(held);
    assert_eq!(read.recv().unwrap(), b"data");
    assert_eq!(raced.content(), "data");
}

#[test]
fn reader_that_opens_a_file_during_a_release_that_does_not_end_sees_what_is_written_next() {
    let raced = Raced::up("before");
    raced.is_durable("before");
    // Its open has waited until the kernel broke the lease of a mover that stalls.
    let reader = raced.pool.open_file(&raced.entry(), false).unwrap();
    let read = || {
        let mut bytes = [0; 64];
        let n = reader.read_at(&mut bytes, 0).unwrap();
        String::from_utf8_lossy(&bytes[..n]).into_owned()
    };
    raced.release_without_end();
    assert_eq!(raced.content(), "before");
    assert!(raced.entry().attr.is_resident());
    raced.bed.sh("printf behind > /forebay/s/f");
    assert_eq!(read(), "behind");
    raced.verb(&["sync", "--no-progress", "/s/f"]);
    assert_eq!(raced.bed.sh("cat $S/f"), "behind");
    // Programs and tasks restore it in the same way.
    raced.release_without_end();
    raced.verb(&["prestage", "--no-progress", "/s/f"]);
    raced.bed.sh("printf again > /forebay/s/f");
    assert_eq!(read(), "again");
    raced.verb(&["sync", "--no-progress", "/s/f"]);
    // When no process reads it any more, the store's version is restored.
    drop(reader);
    raced.release_without_end();
    raced.is_durable("again");
}

#[test]
fn backing_file_that_a_release_left_does_not_hide_what_another_program_wrote() {
    let raced = Raced::up("before");
    raced.is_durable("before");
    let reader = raced.pool.open_file(&raced.entry(), false).unwrap();
    raced.release_without_end();
    raced.bed.sh("printf other- > $S/f");
    raced.verb(&["refresh", "/s/f"]);
    assert_eq!(raced.content(), "other-");
    let mut bytes = [0; 64];
    let n = reader.read_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes[..n], b"before", "of one version");
}

#[test]
fn opener_that_waits_for_a_release_gets_the_restored_file() {
    let raced = Raced::up("data");
    raced.is_durable("data");
    for (writes, expected) in [(None, "data"), (Some(&b"DATA"[..]), "DATA")] {
        let entry = raced.entry();
        let held = raced.pool.lease_files(&entry, LeaseKind::Write).unwrap();
        // The program waits for the lease on a backing file that is released, and about to be unlinked.
        let read = Cell::new(None);
        let released = raced.pool.release_leased(&entry, || {
            read.set(Some(raced.opener(entry, writes)));
            raced.bed.wait("the program waits", || !held.is_undisturbed());
            true
        });
        assert!(matches!(released, Ok(Ok(_))), "{released:?}");
        drop(held);
        assert_eq!(read.take().unwrap().recv().unwrap(), expected.as_bytes());
        assert_eq!(raced.content(), expected);
    }
    raced.is_durable("DATA");
}
