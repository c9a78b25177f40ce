//! What a client has locked. Locks of files whose first backing file is on another node are taken and let go of as the
//! mount does it: under a number that is given up with them, and when the other node may have granted what its asker
//! was told has failed, or has not heard that it was let go of, it is told until it has.

use std::cell::RefCell;
use std::collections::{btree_map, BTreeMap, BTreeSet};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_client::{leaves_lock_in_doubt, new_lock_owner, LocksElsewhere, Unlocks};
use forebay_types::limits::FILE_BYTES_MAX;
use forebay_types::{Code, Ino, LockKind, LockRequest};

/// A lock of a whole file, as another node's daemon takes it.
const WHOLE: LockRequest =
    LockRequest { owner: 0, flock: false, kind: LockKind::Write, start: 0, end: FILE_BYTES_MAX };

/// A client's locks of files whose first backing file is on its node, which are the kernel's, by a descriptor each: a
/// process that is killed leaves none.
#[derive(Clone, Debug, Default)]
pub(crate) struct Locked {
    files: Arc<Mutex<BTreeMap<Ino, OwnedFd>>>,
}

impl Locked {
    fn files(&self) -> MutexGuard<'_, BTreeMap<Ino, OwnedFd>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks a file by a duplicate of a descriptor of its own, unless there is one that has.
    pub(crate) fn take(&self, ino: Ino, file: BorrowedFd<'_>) -> Result<(), Code> {
        if let btree_map::Entry::Vacant(vacant) = self.files().entry(ino) {
            // SAFETY: a flock of zeros but for its type, which means the whole file.
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

    /// False when it has no lock of that file here.
    pub(crate) fn drop_lock(&self, ino: Ino) -> bool {
        self.files().remove(&ino).is_some()
    }

    /// Its client is killed.
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
        // Whatever waits to be told: it is over for all files, or none.
        if self.unlocks.retry() {
            Ok(())
        } else {
            Err(Code::Io)
        }
    }

    /// Files of which it is not known what the client has of them; empty from now on.
    pub(crate) fn take_doubts(&self) -> BTreeSet<Ino> {
        std::mem::take(&mut self.in_doubt.borrow_mut())
    }
}
