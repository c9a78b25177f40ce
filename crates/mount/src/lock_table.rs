//! The locks of the mount's files, by owner, and the requests that wait for one.
//!
//! Lock order: `Locks::waits`, then `Locks::held`.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_client::{LocksElsewhere, Unlocks};
use forebay_types::limits::{FILE_BYTES_MAX, INTERRUPTS_KEPT, LOCK_OWNERS_MAX, LOCK_OWNERS_PART};
use forebay_types::{LockKind, LockRequest};

use crate::closing::RELEASE_DUE_BUSY;
use crate::errno::{check, Errno};

/// First and longest pause between two attempts to take a waiting lock.
pub(crate) const PAUSE: Duration = Duration::from_micros(200);
pub(crate) const PAUSE_MAX: Duration = Duration::from_millis(20);
/// The pause between two attempts to send an unlock to another node.
const UNLOCK_PAUSE: Duration = Duration::from_secs(1);

/// An owner of locks of an inode, and the kind of the locks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Owner {
    pub(crate) ino: u64,
    pub(crate) owner: u64,
    pub(crate) flock: bool,
}

/// An owner's locks.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) owner: Owner,
    /// The number of the open by which the first lock was taken.
    pub(crate) handle: u64,
    pub(crate) on: On,
    /// For [`On::Elsewhere`]: the owner has had a lock. Until then the owner is in the table because a lock waits.
    pub(crate) granted: bool,
    pub(crate) flushed: Flushed,
}

/// Whether a descriptor of an open was closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Flushed {
    Never,
    /// It may have been the last descriptor of the open: the release is expected.
    At(Instant),
    /// A descriptor was closed and no release followed: a copy is open. No request waits for the release of this open
    /// again.
    Copied,
}

/// What an owner's locks are on.
#[derive(Debug)]
pub(crate) enum On {
    /// This descriptor.
    File(OwnedFd),
    /// At another node's daemon, under this number of the owner. The owner gets a new number each time it has released
    /// all its locks.
    Elsewhere(LocksElsewhere, u64),
}

/// The owners of locks, by inode.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) by_inode: HashMap<u64, Vec<Held>>,
    pub(crate) owners: usize,
}

impl Table {
    pub(crate) fn get(&self, owner: Owner) -> Option<&On> {
        self.by_inode.get(&owner.ino)?.iter().find(|held| held.owner == owner).map(|held| &held.on)
    }

    pub(crate) fn get_mut(&mut self, owner: Owner) -> Option<&mut Held> {
        self.by_inode.get_mut(&owner.ino)?.iter_mut().find(|held| held.owner == owner)
    }

    pub(crate) fn insert(&mut self, held: Held) {
        self.by_inode.entry(held.owner.ino).or_default().push(held);
        self.owners += 1;
    }

    /// Records that a descriptor of an open was closed: the release of the open may follow.
    pub(crate) fn note_flush(&mut self, ino: u64, handle: u64) {
        for held in self.by_inode.get_mut(&ino).into_iter().flatten().filter(|held| held.handle == handle) {
            if held.flushed != Flushed::Copied {
                held.flushed = Flushed::At(Instant::now());
            }
        }
    }

    /// Returns until when a lock that conflicts with `of` may still be dropped by a release that follows its flush.
    /// The kernel does not wait for the release that drops a flock. So a program that has seen the holder end, or has
    /// itself closed the file, still finds the lock held until that release arrives.
    pub(crate) fn release_due(&self, of: Owner) -> Option<Instant> {
        let flushed = |held: &Held| match held.flushed {
            Flushed::At(at) if held.owner != of => Some(at),
            _ => None,
        };
        let due = self.by_inode.get(&of.ino)?.iter().filter_map(flushed).max()? + RELEASE_DUE_BUSY;
        (due > Instant::now()).then_some(due)
    }

    /// Records that `to` has waited in vain for the release of opens that were flushed.
    pub(crate) fn no_release_came(&mut self, to: Owner) {
        for held in self.by_inode.get_mut(&to.ino).into_iter().flatten().filter(|held| held.owner != to) {
            if matches!(held.flushed, Flushed::At(at) if at.elapsed() >= RELEASE_DUE_BUSY) {
                held.flushed = Flushed::Copied;
            }
        }
    }

    /// Removes the owners of an inode for which `which` returns true.
    pub(crate) fn remove(&mut self, ino: u64, which: impl Fn(&Held) -> bool) -> Vec<Held> {
        let Some(held) = self.by_inode.get_mut(&ino) else { return Vec::new() };
        let gone: Vec<Held> = held.extract_if(.., |held| which(held)).collect();
        if held.is_empty() {
            self.by_inode.remove(&ino);
        }
        self.owners -= gone.len();
        gone
    }
}

/// A lock that waits, and the callback that receives its outcome.
pub(crate) struct Wait {
    pub(crate) request: FuseLock,
    pub(crate) unique: u64,
    pub(crate) pause: Duration,
    pub(crate) next: Instant,
    /// When it fails with EAGAIN. None: it waits without limit.
    pub(crate) until: Option<Instant>,
    pub(crate) reply: Box<dyn FnOnce(i32) + Send>,
}

impl std::fmt::Debug for Wait {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wait")
            .field("request", &self.request)
            .field("unique", &self.unique)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Waits {
    pub(crate) list: Vec<Wait>,
    /// Requests whose interrupt was read before they waited. Some of them never wait.
    pub(crate) interrupted: VecDeque<u64>,
    /// The thread that retries waiting locks runs.
    pub(crate) retry_thread_runs: bool,
    /// The lock that is being requested from another node, and whether it was interrupted meanwhile.
    pub(crate) trying: Option<(u64, bool)>,
}

/// All locks, and the requests that wait for one.
#[derive(Debug)]
pub(crate) struct Locks {
    pub(crate) held: Mutex<Table>,
    pub(crate) owners_max: usize,
    pub(crate) waits: Mutex<Waits>,
    pub(crate) freed: Condvar,
    pub(crate) unlocks: Arc<Unlocks>,
    /// The thread that retries unlocks runs.
    pub(crate) unlock_retry_runs: Arc<AtomicBool>,
}

impl Wait {
    /// The errno of the request when a signal ends its wait. A request that must not wait reports the conflict
    /// instead.
    pub(crate) fn interrupted(&self) -> i32 {
        if self.until.is_some() {
            libc::EAGAIN
        } else {
            libc::EINTR
        }
    }
}

/// A lock request's fields.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FuseLock {
    pub(crate) owner: Owner,
    pub(crate) handle: u64,
    pub(crate) kind: i32,
    pub(crate) start: u64,
    pub(crate) end: u64,
}

impl FuseLock {
    /// The lock request that is sent to another node's daemon.
    pub(crate) fn elsewhere(&self, number: u64) -> LockRequest {
        LockRequest {
            owner: number,
            flock: self.owner.flock,
            kind: match self.kind {
                libc::F_RDLCK => LockKind::Read,
                libc::F_WRLCK => LockKind::Write,
                _ => LockKind::Unlock,
            },
            start: self.start.min(FILE_BYTES_MAX),
            end: self.end.min(FILE_BYTES_MAX),
        }
    }

    pub(crate) fn whole(&self) -> bool {
        self.start == 0 && self.end >= i64::MAX as u64
    }

    pub(crate) fn record(&self) -> libc::flock {
        // SAFETY: an all-zero flock is valid.
        let mut record: libc::flock = unsafe { std::mem::zeroed() };
        record.l_type = self.kind as i16;
        record.l_whence = libc::SEEK_SET as i16;
        record.l_start = self.start as i64;
        // A length of 0 means up to the end of the file, whatever its size.
        record.l_len = if self.end >= i64::MAX as u64 { 0 } else { (self.end - self.start + 1) as i64 };
        record
    }

    /// Takes or releases the lock on `file`, without waiting.
    pub(crate) fn apply(&self, file: &OwnedFd) -> Result<(), Errno> {
        if self.owner.flock {
            let how = match self.kind {
                libc::F_RDLCK => libc::LOCK_SH,
                libc::F_WRLCK => libc::LOCK_EX,
                _ => libc::LOCK_UN,
            };
            // SAFETY: plain system call on a descriptor of ours.
            return check(unsafe { libc::flock(file.as_raw_fd(), how | libc::LOCK_NB) }).map(|_| ());
        }
        let record = self.record();
        // SAFETY: `record` lives over the call.
        let done = check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const record) });
        done.map(|_| ()).map_err(|e| match e {
            // A write lock on a descriptor that could not be opened for writing.
            Errno(libc::EBADF) => Errno(libc::ENOLCK),
            e => e,
        })
    }
}

impl Locks {
    /// No locks yet. The process's present limit on descriptors bounds the number of owners.
    pub(crate) fn new() -> Locks {
        // SAFETY: the structure is valid when all zero, and lives over the call.
        let descriptors = unsafe {
            let mut limit: libc::rlimit = std::mem::zeroed();
            libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
            usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX)
        };
        Locks {
            held: Mutex::default(),
            owners_max: LOCK_OWNERS_MAX.min(descriptors / LOCK_OWNERS_PART),
            waits: Mutex::default(),
            freed: Condvar::new(),
            unlocks: Arc::default(),
            unlock_retry_runs: Arc::default(),
        }
    }

    pub(crate) fn held(&self) -> MutexGuard<'_, Table> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn waits(&self) -> MutexGuard<'_, Waits> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn drop_of(&self, ino: u64, which: impl Fn(&Held) -> bool) {
        let gone = self.held().remove(ino, which);
        if gone.is_empty() {
            return;
        }
        for held in gone {
            if let On::Elsewhere(locks, number) = held.on {
                self.let_go_elsewhere(locks, number, held.owner.flock);
            }
        }
        self.try_again();
    }

    /// Releases all locks that an owner may have at another node, and sends the unlock until that node acknowledges
    /// it.
    pub(crate) fn let_go_elsewhere(&self, locks: LocksElsewhere, number: u64, flock: bool) {
        if self.unlocks.release(locks, number, flock) || self.unlock_retry_runs.swap(true, Ordering::SeqCst) {
            return;
        }
        let (unlocks, unlock_retry_runs) = (Arc::clone(&self.unlocks), Arc::clone(&self.unlock_retry_runs));
        let thread = std::thread::Builder::new().name("unlocks".into()).stack_size(128 * 1024);
        let started = thread.spawn(move || loop {
            std::thread::sleep(UNLOCK_PAUSE);
            if unlocks.retry() {
                unlock_retry_runs.store(false, Ordering::SeqCst);
                // An unlock that was given between the retry and the store found this thread running, and started
                // none.
                if unlocks.retry() || unlock_retry_runs.swap(true, Ordering::SeqCst) {
                    return;
                }
            }
        });
        if started.is_err() {
            // The next unlock tries to start it again.
            self.unlock_retry_runs.store(false, Ordering::SeqCst);
        }
    }

    pub(crate) fn drop_all(&self, owner: Owner) {
        self.drop_of(owner.ino, |held| held.owner == owner);
    }

    /// Releases a process's record locks, because the process has closed a descriptor of the file.
    pub(crate) fn drop_posix(&self, ino: u64, owner: u64) {
        self.drop_all(Owner { ino, owner, flock: false });
    }

    /// Releases the locks of an open that was released. The flush before has already released the record locks that
    /// processes took by it.
    pub(crate) fn drop_opened(&self, ino: u64, handle: u64) {
        self.drop_of(ino, |held| held.handle == handle);
    }

    /// Releases an open file's flock.
    pub(crate) fn drop_flock(&self, ino: u64, owner: u64) {
        self.drop_all(Owner { ino, owner, flock: true });
    }

    /// Retries all waiting locks at once, because a lock was released.
    pub(crate) fn try_again(&self) {
        let mut waits = self.waits();
        if waits.list.is_empty() {
            return;
        }
        let now = Instant::now();
        for wait in &mut waits.list {
            (wait.next, wait.pause) = (now, PAUSE);
        }
        self.freed.notify_one();
    }

    /// Ends the wait of a request. Each thread reads requests from a descriptor of its own, so an interrupt may be
    /// read before its request.
    pub(crate) fn interrupt(&self, unique: u64) {
        let mut waits = self.waits();
        if let Some((trying, interrupted)) = &mut waits.trying {
            if *trying == unique {
                *interrupted = true;
                return;
            }
        }
        if let Some(i) = waits.list.iter().position(|wait| wait.unique == unique) {
            let wait = waits.list.remove(i);
            drop(waits);
            let error = wait.interrupted();
            return (wait.reply)(error);
        }
        // The request may be no lock request, or may have been answered. Request numbers are never reused, so keeping
        // the number is harmless.
        waits.interrupted.push_back(unique);
        if waits.interrupted.len() > INTERRUPTS_KEPT {
            waits.interrupted.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_of_an_open_file_takes_the_locks_that_were_taken_by_it() {
        let locks = Locks::new();
        let hold = |ino, owner, handle| {
            let file = std::fs::File::open("/dev/null").unwrap().into();
            let on = On::File(file);
            locks.held().insert(Held {
                owner: Owner { ino, owner, flock: false },
                handle,
                on,
                granted: true,
                flushed: Flushed::Never,
            });
        };
        hold(1, 10, 5);
        hold(1, 11, 6);
        hold(2, 12, 5);
        locks.drop_opened(1, 5);
        locks.drop_opened(3, 5);
        let held = locks.held();
        let is_held = |ino, owner| held.get(Owner { ino, owner, flock: false }).is_some();
        assert!(!is_held(1, 10) && is_held(1, 11) && is_held(2, 12));
        assert_eq!(held.owners, 2);
    }

    #[test]
    fn interrupts_that_nothing_waits_for_are_remembered_up_to_their_number() {
        let locks = Locks::new();
        for unique in 0..2 * INTERRUPTS_KEPT as u64 {
            locks.interrupt(unique);
        }
        let waits = locks.waits();
        assert_eq!(waits.interrupted.len(), INTERRUPTS_KEPT);
        assert_eq!(waits.interrupted.back(), Some(&(2 * INTERRUPTS_KEPT as u64 - 1)));
    }

    #[test]
    fn interrupt_of_a_lock_that_waits_ends_the_wait_alone() {
        let locks = Locks::new();
        let (told, answers) = std::sync::mpsc::channel();
        for unique in [7, 8] {
            let told = told.clone();
            let owner = Owner { ino: 1, owner: unique, flock: false };
            locks.waits().list.push(Wait {
                request: FuseLock { owner, handle: 1, kind: libc::F_WRLCK, start: 0, end: 9 },
                unique,
                pause: PAUSE,
                next: Instant::now(),
                until: None,
                reply: Box::new(move |error| told.send((unique, error)).unwrap()),
            });
        }
        locks.interrupt(8);
        assert_eq!(answers.try_iter().collect::<Vec<_>>(), [(8, libc::EINTR)]);
        let waits = locks.waits();
        assert_eq!(waits.list.iter().map(|wait| wait.unique).collect::<Vec<_>>(), [7]);
        assert!(waits.interrupted.is_empty());
    }
}
