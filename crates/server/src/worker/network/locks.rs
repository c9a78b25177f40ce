//! Locks of processes of other nodes, and their appends to files of several backing files.
//!
//! A lock is the kernel's, on a descriptor of the backing file that each owner has here: flock's by flock(2), record locks by
//! open-file-description locks. So it excludes those of this node's programs, which take theirs on the same backing file, preloaded
//! or through the mount. Nothing waits here: who has to wait asks again.
//!
//! Held in memory and by descriptors of this process alone: a worker that is killed takes them with it.
//!
//! Lock order: the tables are taken one at a time, and no other lock with them.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_types::limits::{APPEND_HOLD_MS, FILE_BYTES_MAX, REMOTE_LOCK_OWNERS_MAX};
use forebay_types::{BackingId, Code, LockKind, LockWish};

/// Longest time of one append.
const HOLD: Duration = Duration::from_millis(APPEND_HOLD_MS);

/// Whose locks are on one descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Owner {
    session: u64,
    id: BackingId,
    owner: u64,
    flock: bool,
}

/// Who is appending.
#[derive(Debug)]
struct Appending {
    session: u64,
    handle: u64,
    since: Instant,
}

/// All that processes of other nodes hold here.
#[derive(Debug, Default)]
pub(super) struct RemoteLocks {
    held: Mutex<HashMap<Owner, Arc<OwnedFd>>>,
    appending: Mutex<HashMap<BackingId, Appending>>,
}

fn check(result: i32) -> Result<(), Code> {
    if result >= 0 {
        return Ok(());
    }
    match std::io::Error::last_os_error().raw_os_error().unwrap_or(0) {
        libc::EAGAIN | libc::EACCES => Err(Code::Busy),
        errno => Err(Code::from_errno(errno)),
    }
}

fn record(wish: &LockWish) -> libc::flock {
    // SAFETY: an all-zero flock is valid.
    let mut record: libc::flock = unsafe { std::mem::zeroed() };
    record.l_type = match wish.kind {
        LockKind::Read => libc::F_RDLCK,
        LockKind::Write => libc::F_WRLCK,
        LockKind::Unlock => libc::F_UNLCK,
    } as i16;
    record.l_whence = libc::SEEK_SET as i16;
    record.l_start = wish.start as i64;
    // A length of 0 reaches to the end, whatever that is.
    record.l_len = if wish.end >= FILE_BYTES_MAX { 0 } else { (wish.end - wish.start + 1) as i64 };
    record
}

fn apply(file: &OwnedFd, wish: &LockWish) -> Result<(), Code> {
    if wish.flock {
        let how = match wish.kind {
            LockKind::Read => libc::LOCK_SH,
            LockKind::Write => libc::LOCK_EX,
            LockKind::Unlock => libc::LOCK_UN,
        };
        // SAFETY: plain system call on a descriptor of ours.
        return check(unsafe { libc::flock(file.as_raw_fd(), how | libc::LOCK_NB) });
    }
    let record = record(wish);
    // SAFETY: `record` lives over the call.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const record) })
}

impl RemoteLocks {
    fn held(&self) -> MutexGuard<'_, HashMap<Owner, Arc<OwnedFd>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn appending(&self) -> MutexGuard<'_, HashMap<BackingId, Appending>> {
        self.appending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes or drops a lock; `open` gives a descriptor of its own for an owner's first.
    ///
    /// # Errors
    /// [`Code::Busy`] when another's is in the way; [`Code::NoResources`] when there are too many owners.
    pub(super) fn lock(
        &self,
        session: u64,
        id: &BackingId,
        wish: &LockWish,
        open: impl FnOnce() -> Result<OwnedFd, Code>,
    ) -> Result<(), Code> {
        let owner = Owner { session, id: *id, owner: wish.owner, flock: wish.flock };
        let file = self.held().get(&owner).cloned();
        let file = match (file, wish.kind) {
            (None, LockKind::Unlock) => return Ok(()),
            (Some(file), LockKind::Unlock) if wish.flock || wish.start == 0 && wish.end >= FILE_BYTES_MAX => {
                self.held().remove(&owner);
                // Explicitly, as another thread may be about to use the descriptor.
                return apply(&file, wish);
            }
            (Some(file), _) => file,
            (None, _) => {
                let file = Arc::new(open()?);
                let mut held = self.held();
                if held.len() >= REMOTE_LOCK_OWNERS_MAX {
                    return Err(Code::NoResources);
                }
                Arc::clone(held.entry(owner).or_insert(file))
            }
        };
        apply(&file, wish)
    }

    /// The lock that is in the way of one, if one is.
    pub(super) fn test(
        &self,
        session: u64,
        id: &BackingId,
        wish: &LockWish,
        open: impl FnOnce() -> Result<OwnedFd, Code>,
    ) -> Result<Option<LockWish>, Code> {
        let owner = Owner { session, id: *id, owner: wish.owner, flock: wish.flock };
        // The owner's own locks are not in the way on its own descriptor.
        let file = self.held().get(&owner).cloned();
        let file = match file {
            Some(file) => file,
            None => Arc::new(open()?),
        };
        let mut found = record(wish);
        // SAFETY: the record lives over the call.
        check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut found) })?;
        let kind = match i32::from(found.l_type) {
            libc::F_UNLCK => return Ok(None),
            libc::F_RDLCK => LockKind::Read,
            _ => LockKind::Write,
        };
        let start = found.l_start as u64;
        let end = if found.l_len == 0 { FILE_BYTES_MAX } else { start + found.l_len as u64 - 1 };
        Ok(Some(LockWish { owner: 0, flock: false, kind, start, end }))
    }

    /// A process is about to write at the end.
    ///
    /// # Errors
    /// [`Code::Busy`] while another is.
    pub(super) fn begin_append(&self, session: u64, id: &BackingId, handle: u64) -> Result<(), Code> {
        let mut appending = self.appending();
        let now = Instant::now();
        match appending.get(id) {
            Some(a) if (a.session, a.handle) != (session, handle) && now.duration_since(a.since) < HOLD => {
                return Err(Code::Busy);
            }
            // A retry does not begin anew: its process counts from the first.
            Some(a) if (a.session, a.handle) == (session, handle) => {}
            _ => {
                appending.insert(*id, Appending { session, handle, since: now });
            }
        }
        Ok(())
    }

    /// It has written.
    pub(super) fn end_append(&self, session: u64, id: &BackingId, handle: u64) {
        let mut appending = self.appending();
        if appending.get(id).is_some_and(|a| (a.session, a.handle) == (session, handle)) {
            appending.remove(id);
        }
    }

    /// A process is over.
    pub(super) fn end(&self, session: u64) {
        self.held().retain(|owner, _| owner.session != session);
        self.appending().retain(|_, a| a.session != session);
    }

    /// Processes that hold something.
    pub(super) fn sessions(&self) -> Vec<u64> {
        let mut all: Vec<u64> = self.held().keys().map(|owner| owner.session).collect();
        all.extend(self.appending().values().map(|a| a.session));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::Ino;

    const ALL: LockWish =
        LockWish { owner: 1, flock: false, kind: LockKind::Write, start: 0, end: FILE_BYTES_MAX };

    fn file(name: &str) -> impl Fn() -> Result<OwnedFd, Code> + Clone {
        let path = std::env::temp_dir().join(format!("forebay-locks-{name}-{}", std::process::id()));
        std::fs::write(&path, b"x").unwrap();
        move || {
            let opened = std::fs::OpenOptions::new().read(true).write(true).open(&path);
            Ok(opened.unwrap().into())
        }
    }

    #[test]
    fn locks_exclude_other_owners_and_this_node_s_programs_until_their_process_is_over() {
        let open = file("exclude");
        let (locks, id) =
            (RemoteLocks::default(), BackingId { target: 1 << 16, ino: Ino(5), number: 0, stripe: 0 });
        let lock = |session, wish: LockWish| locks.lock(session, &id, &wish, open.clone());
        for flock in [false, true] {
            let wish = LockWish { flock, ..ALL };
            lock(7, wish).unwrap();
            lock(7, wish).unwrap();
            assert_eq!(lock(7, LockWish { owner: 2, ..wish }), Err(Code::Busy));
            assert_eq!(lock(8, wish), Err(Code::Busy));
            let local = open().unwrap();
            assert_eq!(apply(&local, &wish), Err(Code::Busy), "a program of this node");
            assert!(locks.sessions().contains(&7));
            locks.end(7);
            lock(8, wish).unwrap();
            lock(8, LockWish { kind: LockKind::Unlock, ..wish }).unwrap();
            apply(&local, &wish).unwrap();
            assert_eq!(lock(8, wish), Err(Code::Busy));
            drop(local);
            locks.end(8);
        }
        // Ranges.
        lock(7, LockWish { start: 10, end: 19, ..ALL }).unwrap();
        lock(8, LockWish { start: 20, end: 29, ..ALL }).unwrap();
        let found = locks.test(8, &id, &ALL, open.clone()).unwrap().unwrap();
        assert_eq!((found.start, found.end, found.kind), (10, 19, LockKind::Write));
        lock(7, LockWish { start: 10, end: 14, kind: LockKind::Unlock, ..ALL }).unwrap();
        lock(8, LockWish { start: 10, end: 14, ..ALL }).unwrap();
        assert_eq!(lock(8, LockWish { start: 15, end: 15, kind: LockKind::Read, ..ALL }), Err(Code::Busy));
        lock(7, LockWish { kind: LockKind::Unlock, ..ALL }).unwrap();
        assert_eq!(locks.test(8, &id, &ALL, open.clone()).unwrap(), None);
        let path = std::env::temp_dir().join(format!("forebay-locks-exclude-{}", std::process::id()));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn appends_are_one_at_a_time_and_end_with_their_process() {
        let locks = RemoteLocks::default();
        let id = |n| BackingId { target: 1 << 16, ino: Ino(n), number: 1, stripe: 0 };
        locks.begin_append(7, &id(1), 1).unwrap();
        locks.begin_append(7, &id(1), 1).unwrap();
        locks.begin_append(8, &id(2), 1).unwrap();
        assert_eq!(locks.begin_append(7, &id(1), 2), Err(Code::Busy));
        assert_eq!(locks.begin_append(8, &id(1), 1), Err(Code::Busy));
        locks.end_append(8, &id(1), 1);
        assert_eq!(locks.begin_append(8, &id(1), 1), Err(Code::Busy), "it was not its to end");
        locks.end(7);
        locks.begin_append(8, &id(1), 1).unwrap();
        let old = Instant::now().checked_sub(HOLD).unwrap();
        locks.appending().get_mut(&id(1)).unwrap().since = old;
        locks.begin_append(9, &id(1), 1).unwrap();
    }
}
