//! Locks: flock and fcntl's record locks, taken on the backing file, where every other door takes its own.
//!
//! Each owner has a descriptor of its own, on which its locks are: flock's by flock(2), record locks by open-file-description
//! locks, which exclude the record locks of processes and one another. The kernel tells when an owner lets go: by
//! unlocking, by a flush when one of its descriptors is closed, by the release of an open file.
//!
//! A lock that has to wait is tried again and again by a thread of its own, so that no thread that serves requests waits,
//! and an INTERRUPT ends the wait.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::errno::{check, Errno};
use crate::filesystem::{FileSystem, Outcome};
use crate::opened::reopen;
use crate::protocol::{Body, Request, LK_FLOCK};

/// First and longest pause between two attempts of a lock that waits.
const PAUSE: Duration = Duration::from_micros(200);
const PAUSE_MAX: Duration = Duration::from_millis(20);

/// Who holds locks of an inode, and of which kind they are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Owner {
    ino: u64,
    owner: u64,
    flock: bool,
}

#[derive(Debug)]
struct Held {
    file: Arc<OwnedFd>,
    writable: bool,
}

/// All locks, and the requests that wait for one.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    held: Mutex<HashMap<Owner, Held>>,
    waiting: Mutex<HashSet<u64>>,
}

/// A lock request's fields.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish {
    owner: Owner,
    kind: i32,
    start: u64,
    end: u64,
    pid: u32,
}

impl Wish {
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
        check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const record) }).map(|_| ())
    }
}

impl Locks {
    fn held(&self) -> MutexGuard<'_, HashMap<Owner, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waiting(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An owner's record locks go: it has closed a descriptor of the file.
    pub(crate) fn drop_posix(&self, ino: u64, owner: u64) {
        let gone = self.held().remove(&Owner { ino, owner, flock: false });
        drop(gone);
    }

    /// An open file's flock goes with it.
    pub(crate) fn drop_flock(&self, ino: u64, owner: u64) {
        let gone = self.held().remove(&Owner { ino, owner, flock: true });
        drop(gone);
    }

    /// A request that waits is to wait no longer. One that has not begun to is interrupted when it does: the kernel asks
    /// again when it is told that the request is not known.
    pub(crate) fn interrupt(&self, unique: u64) -> bool {
        self.waiting().remove(&unique)
    }
}

impl FileSystem {
    fn wish(&self, rq: &Request<'_>) -> Result<Wish, Errno> {
        let mut f = rq.fields;
        let (_handle, owner, start, end) = (f.u64()?, f.u64()?, f.u64()?, f.u64()?);
        let (kind, pid, flags) = (f.u32()? as i32, f.u32()?, f.u32()?);
        if end < start {
            return Err(Errno(libc::EINVAL));
        }
        let owner = Owner { ino: self.open_ino(rq.node).0, owner, flock: flags & LK_FLOCK != 0 };
        Ok(Wish { owner, kind, start, end, pid })
    }

    /// The owner's descriptor, made at its first lock.
    fn lock_descriptor(&self, wish: &Wish) -> Result<Arc<OwnedFd>, Errno> {
        let mut held = self.locks.held();
        let writes = wish.kind == libc::F_WRLCK && !wish.owner.flock;
        if let Some(held) = held.get(&wish.owner).filter(|held| held.writable || !writes) {
            return Ok(Arc::clone(&held.file));
        }
        let opened = self.nodes.opened(wish.owner.ino).ok_or(Errno(libc::EOPNOTSUPP))?;
        let (file, writable) = match opened.writable() {
            Some(file) => (reopen(&file, libc::O_RDWR)?, true),
            None => (reopen(&*opened.any().ok_or(Errno(libc::EBADF))?, libc::O_RDONLY)?, false),
        };
        let file = Arc::new(file);
        // Locks on a descriptor that could not write are lost with it, as if the owner had dropped them first.
        held.insert(wish.owner, Held { file: Arc::clone(&file), writable });
        Ok(file)
    }

    pub(crate) fn getlk(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        let wish = self.wish(rq)?;
        let file = self.lock_descriptor(&Wish { kind: libc::F_RDLCK, ..wish })?;
        let mut record = wish.record();
        // SAFETY: `record` lives over the call.
        check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut record) })?;
        let end = if record.l_len == 0 { i64::MAX } else { record.l_start + record.l_len - 1 };
        out.u64(record.l_start as u64);
        out.u64(end as u64);
        out.u32(record.l_type as u32);
        // Of an open-file-description lock, as the mount's own are, nobody can tell the process.
        out.u32(record.l_pid.max(0) as u32);
        let _ = wish.pid;
        Ok(Outcome::Reply)
    }

    /// Takes or drops a lock, without waiting.
    pub(crate) fn setlk(&self, rq: &Request<'_>) -> Result<Outcome, Errno> {
        let wish = self.wish(rq)?;
        if wish.kind == libc::F_UNLCK {
            if wish.whole() {
                let gone = self.locks.held().remove(&wish.owner);
                drop(gone);
            } else if let Some(held) = self.locks.held().get(&wish.owner) {
                wish.apply(&held.file)?;
            }
            return Ok(Outcome::Reply);
        }
        let file = self.lock_descriptor(&wish)?;
        wish.apply(&file)?;
        Ok(Outcome::Reply)
    }

    /// Takes a lock, and waits for it in a thread of its own if need be: `reply` is called with how it went.
    pub(crate) fn setlkw(
        self: &Arc<Self>,
        rq: &Request<'_>,
        reply: impl FnOnce(i32) + Send + 'static,
    ) -> Result<Outcome, Errno> {
        match self.setlk(rq) {
            Err(Errno(libc::EAGAIN)) => {}
            done => return done,
        }
        let (wish, unique) = (self.wish(rq)?, rq.unique);
        let file = self.lock_descriptor(&wish)?;
        self.locks.waiting().insert(unique);
        let this = Arc::clone(self);
        let wait = move || {
            let mut pause = PAUSE;
            let error = loop {
                if !this.locks.waiting().contains(&unique) {
                    break libc::EINTR;
                }
                match wish.apply(&file) {
                    Ok(()) => break 0,
                    Err(Errno(libc::EAGAIN)) => {}
                    Err(Errno(error)) => break error,
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(PAUSE_MAX);
            };
            this.locks.waiting().remove(&unique);
            reply(error);
        };
        let spawned = std::thread::Builder::new().name("lock".into()).stack_size(128 * 1024).spawn(wait);
        if spawned.is_err() {
            self.locks.waiting().remove(&unique);
            return Err(Errno(libc::ENOLCK));
        }
        Ok(Outcome::Silence)
    }
}
