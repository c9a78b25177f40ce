//! Locks: flock and fcntl's record locks, taken on the backing file, where every other door takes its own.
//!
//! Each owner has a descriptor of its own, on which its locks are: flock's by flock(2), record locks by open-file-description
//! locks, which exclude the record locks of processes and one another. The kernel tells when an owner lets go: by
//! unlocking, by a flush when a process closes one of its descriptors, by the release of an open file. Of a program's own
//! open-file-description locks it tells no more than that release, which is known by the open's number. A lock is taken or
//! dropped while the table of owners is locked, so that what was granted is in the table and nothing else closes it.
//!
//! Locks that have to wait are tried again and again by one thread, there while any waits, so that no thread that serves
//! requests does. An INTERRUPT ends a wait; one that another thread reads before the wait has begun is remembered.
//!
//! Of a file whose first backing file is on another node, that node's daemon takes them on it, each owner's on a descriptor of
//! its own, where that node's programs take theirs. It is asked while nothing here is locked. What it may have granted to an owner that was
//! told of a failure, and what it did not hear of having been let go of, it is told to drop until it has.
//!
//! Lock order: what waits, then the table of owners. Tests: below, and `tests/locks.rs`.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_client::{leaves_lock_in_doubt, new_lock_owner, LockPlace, LocksElsewhere, Unlocks};
use forebay_types::limits::{
    FILE_BYTES_MAX, INTERRUPTS_KEPT, LOCK_OWNERS_MAX, LOCK_OWNERS_PART, LOCK_WAITS_MAX,
};

use forebay_types::{Code, LockKind, LockWish};

use crate::errno::{check, Errno};
use crate::filesystem::{FileSystem, Outcome};
use crate::handles::Handle;
use crate::opened::reopen;
use crate::protocol::{Body, Request, LK_FLOCK};

/// First and longest pause between two attempts of a lock that waits.
const PAUSE: Duration = Duration::from_micros(200);
const PAUSE_MAX: Duration = Duration::from_millis(20);
/// Between two attempts to tell a node that a lock was let go.
const UNLOCK_PAUSE: Duration = Duration::from_secs(1);

/// Who holds locks of an inode, and of which kind they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Owner {
    ino: u64,
    owner: u64,
    flock: bool,
}

/// An owner's locks.
#[derive(Debug)]
struct Held {
    owner: Owner,
    /// The number of the open that the first was taken by.
    handle: u64,
    on: On,
    /// It has had a lock. Until then it is here for one that waits.
    granted: bool,
}

/// What an owner's locks are on.
#[derive(Debug)]
enum On {
    /// This descriptor.
    File(OwnedFd),
    /// What another node's daemon has of them, under this number of the owner: another one each time that the owner has let go of all.
    Elsewhere(LocksElsewhere, u64),
}

/// Who holds locks, by inode.
#[derive(Debug, Default)]
struct Table {
    by_inode: HashMap<u64, Vec<Held>>,
    owners: usize,
}

impl Table {
    fn get(&self, owner: Owner) -> Option<&On> {
        self.by_inode.get(&owner.ino)?.iter().find(|held| held.owner == owner).map(|held| &held.on)
    }

    fn get_mut(&mut self, owner: Owner) -> Option<&mut Held> {
        self.by_inode.get_mut(&owner.ino)?.iter_mut().find(|held| held.owner == owner)
    }

    fn insert(&mut self, held: Held) {
        self.by_inode.entry(held.owner.ino).or_default().push(held);
        self.owners += 1;
    }

    /// Takes out an inode's owners of which `which` is true.
    fn remove(&mut self, ino: u64, which: impl Fn(&Held) -> bool) -> Vec<Held> {
        let Some(held) = self.by_inode.get_mut(&ino) else { return Vec::new() };
        let gone: Vec<Held> = held.extract_if(.., |held| which(held)).collect();
        if held.is_empty() {
            self.by_inode.remove(&ino);
        }
        self.owners -= gone.len();
        gone
    }
}

/// A lock that waits, and who is told how it went.
struct Wait {
    wish: Wish,
    unique: u64,
    pause: Duration,
    next: Instant,
    reply: Box<dyn FnOnce(i32) + Send>,
}

impl std::fmt::Debug for Wait {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wait").field("wish", &self.wish).field("unique", &self.unique).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Waits {
    list: Vec<Wait>,
    /// Requests that were interrupted before they waited, if they ever do.
    interrupted: VecDeque<u64>,
    /// The thread that tries them is there.
    is_tended: bool,
    /// The one that is being tried at another node, and whether it was interrupted meanwhile.
    trying: Option<(u64, bool)>,
}

/// All locks, and the requests that wait for one.
#[derive(Debug)]
pub(crate) struct Locks {
    held: Mutex<Table>,
    owners_max: usize,
    waits: Mutex<Waits>,
    freed: Condvar,
    unlocks: Arc<Unlocks>,
    /// The thread that tells other nodes again is there.
    is_telling: Arc<AtomicBool>,
}

/// A lock request's fields.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish {
    owner: Owner,
    handle: u64,
    kind: i32,
    start: u64,
    end: u64,
}

impl Wish {
    /// As another node's daemon is asked for it.
    fn elsewhere(&self, number: u64) -> LockWish {
        LockWish {
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

    fn whole(&self) -> bool {
        self.start == 0 && self.end >= i64::MAX as u64
    }

    fn record(&self) -> libc::flock {
        // SAFETY: an all-zero flock is valid.
        let mut record: libc::flock = unsafe { std::mem::zeroed() };
        record.l_type = self.kind as i16;
        record.l_whence = libc::SEEK_SET as i16;
        record.l_start = self.start as i64;
        // A length of 0 reaches to the end, whatever that is.
        record.l_len = if self.end >= i64::MAX as u64 { 0 } else { (self.end - self.start + 1) as i64 };
        record
    }

    /// Takes or drops it on `file`, without waiting.
    fn apply(&self, file: &OwnedFd) -> Result<(), Errno> {
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
            // A lock for writing on a file that could not be opened for it.
            Errno(libc::EBADF) => Errno(libc::ENOLCK),
            e => e,
        })
    }
}

impl Locks {
    /// No locks yet, in a process that may have as many descriptors as its limit says now.
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
            is_telling: Arc::default(),
        }
    }

    fn held(&self) -> MutexGuard<'_, Table> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waits(&self) -> MutexGuard<'_, Waits> {
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

    /// An owner has let go of all that it may have at another node, which is told until it has heard.
    fn let_go_elsewhere(&self, locks: LocksElsewhere, number: u64, flock: bool) {
        if self.unlocks.give(locks, number, flock) || self.is_telling.swap(true, Ordering::SeqCst) {
            return;
        }
        let (unlocks, is_telling) = (Arc::clone(&self.unlocks), Arc::clone(&self.is_telling));
        let thread = std::thread::Builder::new().name("unlocks".into()).stack_size(128 * 1024);
        let started = thread.spawn(move || loop {
            std::thread::sleep(UNLOCK_PAUSE);
            if unlocks.retry() {
                is_telling.store(false, Ordering::SeqCst);
                // One that came between the two saw a thread that was there.
                if unlocks.retry() || is_telling.swap(true, Ordering::SeqCst) {
                    return;
                }
            }
        });
        if started.is_err() {
            // The next that is let go of tries again.
            self.is_telling.store(false, Ordering::SeqCst);
        }
    }

    fn drop_all(&self, owner: Owner) {
        self.drop_of(owner.ino, |held| held.owner == owner);
    }

    /// A process's record locks go: it has closed a descriptor of the file.
    pub(crate) fn drop_posix(&self, ino: u64, owner: u64) {
        self.drop_all(Owner { ino, owner, flock: false });
    }

    /// An open file is gone, and with it its locks. Those that a process took by it went with the flush before.
    pub(crate) fn drop_opened(&self, ino: u64, handle: u64) {
        self.drop_of(ino, |held| held.handle == handle);
    }

    /// An open file's flock goes with it.
    pub(crate) fn drop_flock(&self, ino: u64, owner: u64) {
        self.drop_all(Owner { ino, owner, flock: true });
    }

    /// Something was let go: who waits is to look at once.
    fn try_again(&self) {
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

    /// The request is to wait no longer. Threads read requests from descriptors of their own, so that the one with this
    /// word may be ahead of the one with the request.
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
            return (wait.reply)(libc::EINTR);
        }
        // Perhaps no lock at all, or answered by now: numbers are never used again, so it harms nothing.
        waits.interrupted.push_back(unique);
        if waits.interrupted.len() > INTERRUPTS_KEPT {
            waits.interrupted.pop_front();
        }
    }
}

impl FileSystem {
    fn wish(&self, rq: &Request<'_>) -> Result<Wish, Errno> {
        let mut f = rq.fields;
        let (handle, owner, start, end) = (f.u64()?, f.u64()?, f.u64()?, f.u64()?);
        let (kind, _pid, flags) = (f.u32()? as i32, f.u32()?, f.u32()?);
        if end < start {
            return Err(Errno(libc::EINVAL));
        }
        let owner = Owner { ino: self.open_ino(rq.node).0, owner, flock: flags & LK_FLOCK != 0 };
        Ok(Wish { owner, handle, kind, start, end })
    }

    /// A descriptor for an owner's locks. Record locks for writing need one that can write, and an owner's locks must stay
    /// on one descriptor: it can write from the first lock on, whatever that was for.
    fn lock_descriptor(&self, owner: Owner) -> Result<On, Errno> {
        let parts = self.handles.parts_of(owner.ino);
        let opened;
        let file = match parts.as_deref() {
            Some(Handle::Parts(file, _)) => match file.lock_place() {
                LockPlace::There(locks) => return Ok(On::Elsewhere(locks, new_lock_owner())),
                LockPlace::Here(file) => file,
            },
            _ => {
                let node = self.nodes.opened(owner.ino).ok_or(Errno(libc::EOPNOTSUPP))?;
                opened = node.writable().or_else(|| node.any()).ok_or(Errno(libc::EBADF))?;
                opened.as_fd()
            }
        };
        if owner.flock {
            return reopen(&file, libc::O_RDONLY).map(On::File);
        }
        match reopen(&file, libc::O_RDWR) {
            // A program that runs from its backing file: nobody writes it.
            Err(Errno(libc::ETXTBSY | libc::EACCES | libc::EROFS)) => reopen(&file, libc::O_RDONLY),
            file => file,
        }
        .map(On::File)
    }

    pub(crate) fn getlk(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        let wish = self.wish(rq)?;
        let mut record = wish.record();
        let elsewhere = {
            let held = self.locks.held();
            let new;
            // The owner's own locks are not in the way on its own descriptor.
            let on = match held.get(wish.owner) {
                Some(on) => on,
                None => {
                    new = self.lock_descriptor(wish.owner)?;
                    &new
                }
            };
            match on {
                On::File(file) => {
                    // SAFETY: `record` lives over the call.
                    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut record) })?;
                    None
                }
                On::Elsewhere(locks, number) => Some((*locks, *number)),
            }
        };
        if let Some((locks, number)) = elsewhere {
            record.l_type = libc::F_UNLCK as i16;
            if let Some(found) = locks.test(wish.elsewhere(number))? {
                let kind = if found.kind == LockKind::Read { libc::F_RDLCK } else { libc::F_WRLCK };
                let (start, end) = (found.start, found.end);
                record = Wish { kind, start, end, ..wish }.record();
            }
        }
        let end = if record.l_len == 0 { i64::MAX } else { record.l_start + record.l_len - 1 };
        out.u64(record.l_start as u64);
        out.u64(end as u64);
        out.u32(record.l_type as u32);
        // Of an open-file-description lock, as the mount's own are, nobody can tell the process.
        out.u32(record.l_pid.max(0) as u32);
        Ok(Outcome::Reply)
    }

    /// Takes a lock, without waiting.
    fn take(&self, wish: &Wish) -> Result<(), Errno> {
        let mut held = self.locks.held();
        let (locks, number) = match held.get(wish.owner) {
            Some(On::File(file)) => return wish.apply(file),
            Some(On::Elsewhere(locks, number)) => (*locks, *number),
            None => {
                if held.owners >= self.locks.owners_max {
                    return Err(Errno(libc::ENOLCK));
                }
                let on = self.lock_descriptor(wish.owner)?;
                let (taken, elsewhere) = match &on {
                    On::File(file) => (wish.apply(file), None),
                    On::Elsewhere(locks, number) => (Ok(()), Some((*locks, *number))),
                };
                // Also when it has to wait: it will be tried again.
                held.insert(Held { owner: wish.owner, handle: wish.handle, on, granted: false });
                match elsewhere {
                    None => return taken,
                    Some(elsewhere) => elsewhere,
                }
            }
        };
        drop(held);
        let taken = locks.set(wish.elsewhere(number));
        let mut held = self.locks.held();
        let at = |on: &On| matches!(on, On::Elsewhere(_, of) if *of == number);
        let Some(of) = held.get_mut(wish.owner).filter(|of| at(&of.on)) else {
            drop(held);
            // Its owner has gone meanwhile, and said so perhaps before this was granted: the other node grants nothing under its number any more.
            self.locks.let_go_elsewhere(locks, number, wish.owner.flock);
            return Err(Errno(libc::EINTR));
        };
        match taken {
            Ok(()) => of.granted = true,
            // It may be granted yet, to an owner that is told of a failure and will not let go of what it does not have.
            Err(code) if leaves_lock_in_doubt(code) && !of.granted => {
                held.remove(wish.owner.ino, |of| of.owner == wish.owner);
                drop(held);
                self.locks.let_go_elsewhere(locks, number, wish.owner.flock);
            }
            Err(_) => {}
        }
        taken.map_err(|code| match code {
            Code::Busy => Errno(libc::EAGAIN),
            Code::NoResources => Errno(libc::ENOLCK),
            // The owner's number is over at the other node, and here by now.
            Code::Stale => Errno(libc::EIO),
            code => code.into(),
        })
    }

    /// Takes or drops a lock, without waiting.
    pub(crate) fn setlk(&self, rq: &Request<'_>) -> Result<Outcome, Errno> {
        let wish = self.wish(rq)?;
        if wish.kind != libc::F_UNLCK {
            self.take(&wish)?;
        } else if wish.whole() {
            self.locks.drop_all(wish.owner);
        } else {
            let dropped = match self.locks.held().get(wish.owner) {
                Some(On::File(file)) => wish.apply(file).map(|()| None),
                Some(On::Elsewhere(locks, number)) => Ok(Some((*locks, *number))),
                None => return Ok(Outcome::Reply),
            };
            if let Some((locks, number)) = dropped? {
                locks.set(wish.elsewhere(number))?;
            }
            self.locks.try_again();
        }
        Ok(Outcome::Reply)
    }

    /// Takes a lock, and has it wait if need be: `reply` is called with how it went then.
    pub(crate) fn setlkw(
        self: &Arc<Self>,
        rq: &Request<'_>,
        reply: impl FnOnce(i32) + Send + 'static,
    ) -> Result<Outcome, Errno> {
        match self.setlk(rq) {
            Err(Errno(libc::EAGAIN)) => {}
            done => return done,
        }
        let wish = self.wish(rq)?;
        let mut waits = self.locks.waits();
        if let Some(i) = waits.interrupted.iter().position(|unique| *unique == rq.unique) {
            waits.interrupted.remove(i);
            return Err(Errno(libc::EINTR));
        }
        if waits.list.len() >= LOCK_WAITS_MAX {
            return Err(Errno(libc::ENOLCK));
        }
        if !waits.is_tended {
            let this = Arc::clone(self);
            let thread = std::thread::Builder::new().name("locks".into()).stack_size(128 * 1024);
            thread.spawn(move || this.tend_locks()).map_err(|_| Errno(libc::ENOLCK))?;
            waits.is_tended = true;
        }
        // At once: what is in the way may have gone since the first attempt.
        let next = Instant::now();
        waits.list.push(Wait { wish, unique: rq.unique, pause: PAUSE, next, reply: Box::new(reply) });
        self.locks.freed.notify_one();
        Ok(Outcome::Silence)
    }

    /// True when another node is asked for a lock.
    fn is_elsewhere(&self, wish: &Wish) -> bool {
        matches!(self.locks.held().get(wish.owner), Some(On::Elsewhere(..)))
    }

    /// Tries the locks that wait, the longest waiting first, until none is left.
    fn tend_locks(&self) {
        let mut waits = self.locks.waits();
        while !waits.list.is_empty() {
            let (now, mut done) = (Instant::now(), Vec::new());
            let mut i = 0;
            while let Some(wait) = waits.list.get_mut(i) {
                if wait.next > now {
                    i += 1;
                    continue;
                }
                let (unique, wish) = (wait.unique, wait.wish);
                // Also when the try fails: who is tried is not tried again in this round.
                wait.next = now + wait.pause;
                wait.pause = (wait.pause * 2).min(PAUSE_MAX);
                let mut taken;
                if self.is_elsewhere(&wish) {
                    waits.trying = Some((unique, false));
                    drop(waits);
                    taken = self.take(&wish);
                    waits = self.locks.waits();
                    let interrupted = waits.trying.take().is_some_and(|(_, interrupted)| interrupted);
                    if interrupted && taken == Err(Errno(libc::EAGAIN)) {
                        taken = Err(Errno(libc::EINTR));
                    }
                } else {
                    taken = self.take(&wish);
                }
                // Others may have come and gone while nothing was locked.
                let Some(at) = waits.list.iter().position(|wait| wait.unique == unique) else { continue };
                if taken == Err(Errno(libc::EAGAIN)) {
                    i = at + 1;
                } else {
                    done.push((waits.list.remove(at), taken.err().map_or(0, |e| e.0)));
                    i = at;
                }
            }
            if !done.is_empty() {
                drop(waits);
                for (wait, error) in done {
                    (wait.reply)(error);
                }
                waits = self.locks.waits();
                continue;
            }
            let next = waits.list.iter().map(|wait| wait.next).min().unwrap_or(now);
            let pause = next.saturating_duration_since(Instant::now());
            waits = self.locks.freed.wait_timeout(waits, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
        waits.is_tended = false;
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
                wish: Wish { owner, handle: 1, kind: libc::F_WRLCK, start: 0, end: 9 },
                unique,
                pause: PAUSE,
                next: Instant::now(),
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
