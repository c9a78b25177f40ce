//! The locks of a client. Locks of files whose first backing file is on another node are taken and released as the
//! mount does it: under an owner number that is used for one lock. The client repeats a release until the other node
//! has acknowledged it. It also releases a lock after a failed request if the other node may have granted the lock.

use std::cell::RefCell;
use std::collections::{btree_map, BTreeMap, BTreeSet};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_client::{leaves_lock_in_doubt, new_lock_owner, LocksElsewhere, Unlocks};
use forebay_types::limits::FILE_BYTES_MAX;
use forebay_types::{Code, Ino, LockKind, LockRequest};

/// A lock of a whole file, as requested from another node's daemon.
const WHOLE: LockRequest =
    LockRequest { owner: 0, flock: false, kind: LockKind::Write, start: 0, end: FILE_BYTES_MAX };

/// A client's locks of files whose first backing file is on its node. They are open file description locks of the
/// kernel, one descriptor each, so a killed process leaves none.
#[derive(Clone, Debug, Default)]
pub(crate) struct Locked {
    files: Arc<Mutex<BTreeMap<Ino, OwnedFd>>>,
}

impl Locked {
    fn files(&self) -> MutexGuard<'_, BTreeMap<Ino, OwnedFd>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks a file, unless the client holds the lock already. A duplicate of `file` keeps the lock.
    pub(crate) fn take(&self, ino: Ino, file: BorrowedFd<'_>) -> Result<(), Code> {
        if let btree_map::Entry::Vacant(vacant) = self.files().entry(ino) {
            // SAFETY: all zeros is a valid `flock`. Zeros, except for the type, mean the whole file.
            let mut lock: libc::flock = unsafe { std::mem::zeroed() };
            lock.l_type = libc::F_WRLCK as i16;
            // SAFETY: the record lives over the call.
            if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } < 0 {
                return Err(Code::Busy);
            }
            vacant.insert(file.try_clone_to_owned().expect("a descriptor"));
        }
        Ok(())
    }

    /// False when the client holds no lock of that file here.
    pub(crate) fn drop_lock(&self, ino: Ino) -> bool {
        self.files().remove(&ino).is_some()
    }

    /// Releases all locks, because the client was killed.
    pub(crate) fn end(&self) {
        self.files().clear();
    }
}

/// A client's locks at other nodes.
#[derive(Debug, Default)]
pub(crate) struct LockedElsewhere {
    owners: RefCell<BTreeMap<Ino, u64>>,
    unlocks: Unlocks,
    in_doubt: RefCell<BTreeSet<Ino>>,
}

impl LockedElsewhere {
    pub(crate) fn take(&self, ino: Ino, locks: LocksElsewhere) -> Result<(), Code> {
        let mut owners = self.owners.borrow_mut();
        let has = owners.get(&ino).copied();
        let owner = has.unwrap_or_else(new_lock_owner);
        let taken = locks.set(LockRequest { owner, ..WHOLE });
        match taken {
            Ok(()) => drop(owners.insert(ino, owner)),
            Err(code) if leaves_lock_in_doubt(code) && has.is_none() => {
                self.in_doubt.borrow_mut().insert(ino);
                self.unlocks.release(locks, owner, false);
            }
            Err(_) => {}
        }
        taken
    }

    pub(crate) fn drop_lock(&self, ino: Ino, locks: LocksElsewhere) -> Result<(), Code> {
        if let Some(owner) = self.owners.borrow_mut().remove(&ino) {
            if !self.unlocks.release(locks, owner, false) {
                self.in_doubt.borrow_mut().insert(ino);
            }
        }
        // This repeats all pending releases, of other files too: the outcome is known for all, or the operation fails.
        if self.unlocks.retry() {
            Ok(())
        } else {
            Err(Code::Io)
        }
    }

    /// Takes out the files for which it is unknown whether the client holds the lock.
    pub(crate) fn take_doubts(&self) -> BTreeSet<Ino> {
        std::mem::take(&mut self.in_doubt.borrow_mut())
    }
}
