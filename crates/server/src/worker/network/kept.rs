//! Backing files that processes of other nodes have open: one descriptor for all opens of a process. So the file stays
//! usable after it is unlinked, as it does for this node's processes, whose open files the kernel keeps. The descriptor
//! is for reading, and the first write of the process adds one for writing: so a mover can have a read lease on a file
//! that is only read (docs/decisions/0042).
//!
//! The descriptors are in memory alone: after a worker's death, files are opened by name again, and a file without a
//! name is gone.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_types::limits::BACKING_OPEN_MAX;
use forebay_types::{BackingId, Code, Error};

use super::appended::{self, Appended};
use super::atomics::{self, Atomics};
use super::gathering::Gathering;
use super::groups::{self, Groups};
use super::locks::RemoteLocks;
use crate::store::FdStore;
use crate::worker::durable_table::DurableMemory;
use crate::worker::piece_table::PieceTable;

#[derive(Debug)]
struct Kept {
    file: Arc<OwnedFd>,
    writable: Option<Arc<OwnedFd>>,
    handles: HashSet<u64>,
}

/// All of them, with the rest of what is kept for processes of other nodes.
#[derive(Debug, Default)]
pub(in crate::worker) struct KeptOpen {
    /// The locks of these processes.
    pub(super) locks: RemoteLocks,
    /// Their last appends.
    pub(super) appended: Appended,
    /// Their appends of which not all pieces have arrived.
    pub(super) gathering: Gathering,
    /// The groups of processes of all nodes that opened a file together.
    pub(super) groups: Groups,
    /// Their last atomic operations on words of volumes.
    pub(super) atomics: Atomics,
    /// The pieces of volumes, which they open here too.
    pub(super) pieces: PieceTable,
    all: Mutex<HashMap<(u64, BackingId), Kept>>,
}

impl KeptOpen {
    /// What the last worker left with the supervisor, taken out of `left`; what it did not leave is put there.
    ///
    /// # Errors
    /// No memory; the supervisor is gone.
    pub(in crate::worker) fn restored(
        store: FdStore,
        left: &mut Vec<(String, Vec<OwnedFd>)>,
        pieces: PieceTable,
    ) -> Result<KeptOpen, Error> {
        let mut memory = |format| DurableMemory::restored(format, &store, left);
        let appended = Appended::open(&memory(&appended::FORMAT)?);
        let groups = Groups::open(&memory(&groups::FORMAT)?);
        let atomics = Atomics::open(&memory(&atomics::FORMAT)?);
        let locks = RemoteLocks::restored(store, left);
        Ok(KeptOpen { appended, groups, atomics, locks, pieces, ..KeptOpen::default() })
    }

    fn all(&self) -> MutexGuard<'_, HashMap<(u64, BackingId), Kept>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The descriptor of a file that a session has open.
    pub(super) fn get(&self, session: u64, id: &BackingId) -> Option<Arc<OwnedFd>> {
        self.all().get(&(session, *id)).map(|kept| Arc::clone(&kept.file))
    }

    /// The descriptor through which a session has written a file.
    pub(super) fn get_writable(&self, session: u64, id: &BackingId) -> Option<Arc<OwnedFd>> {
        self.all().get(&(session, *id)).and_then(|kept| kept.writable.clone())
    }

    /// A session that has a file open begins to write it.
    pub(super) fn keep_writable(&self, session: u64, id: &BackingId, file: &Arc<OwnedFd>) {
        if let Some(kept) = self.all().get_mut(&(session, *id)) {
            kept.writable.get_or_insert_with(|| Arc::clone(file));
        }
    }

    /// A session opens a file, perhaps for the second time.
    ///
    /// # Errors
    /// [`Code::NoResources`] when too many are open, and what `open` fails with.
    pub(super) fn open(
        &self,
        session: u64,
        id: &BackingId,
        handle: u64,
        open: impl FnOnce() -> Result<OwnedFd, Code>,
    ) -> Result<(), Code> {
        if let Some(kept) = self.all().get_mut(&(session, *id)) {
            kept.handles.insert(handle);
            return Ok(());
        }
        let file = Arc::new(open()?);
        let mut all = self.all();
        if all.len() >= BACKING_OPEN_MAX {
            return Err(Code::NoResources);
        }
        let kept = all.entry((session, *id)).or_insert_with(|| Kept {
            file,
            writable: None,
            handles: HashSet::new(),
        });
        kept.handles.insert(handle);
        Ok(())
    }

    /// A session closes a file.
    pub(super) fn close(&self, session: u64, id: &BackingId, handle: u64) {
        let mut all = self.all();
        let Some(kept) = all.get_mut(&(session, *id)) else { return };
        kept.handles.remove(&handle);
        let gone = if kept.handles.is_empty() { all.remove(&(session, *id)) } else { None };
        // To close the last descriptor of a large file takes long: not under the lock.
        drop(all);
        drop(gone);
    }

    /// The node of a session cannot be reached: closes the pieces of volumes that it has open, so that the volumes can be
    /// deleted. If it comes back, it opens them again.
    pub(super) fn close_pieces(&self, session: u64) {
        let mut all = self.all();
        let closed: Vec<_> = all.extract_if(|(of, id), _| *of == session && id.piece().is_some()).collect();
        drop(all);
        drop(closed);
    }

    /// The segment of a piece that a session has open is gone: so does what the session keeps of it.
    #[cold]
    pub(super) fn close_piece(&self, session: u64, id: &BackingId) {
        let closed = self.all().remove(&(session, *id));
        drop(closed);
    }

    /// The sessions that have files open, locks or kept replies.
    pub(super) fn sessions(&self) -> Vec<u64> {
        let mut sessions = self.locks.sessions();
        sessions.extend(self.groups.sessions());
        sessions.extend(self.groups.step_sessions());
        sessions.extend(self.appended.sessions());
        sessions.extend(self.atomics.sessions());
        sessions.extend(self.all().keys().map(|(session, _)| *session));
        sessions
    }

    /// A session has ended: releases all that is kept for it.
    pub(super) fn end(&self, session: u64) {
        self.locks.end(session);
        self.groups.end(session);
        self.groups.forget_steps(session);
        self.appended.end(session);
        self.atomics.end(session);
        self.gathering.end(session);
        let mut all = self.all();
        let theirs: Vec<_> = all.keys().filter(|(of, _)| *of == session).copied().collect();
        let gone: Vec<_> = theirs.iter().filter_map(|key| all.remove(key)).collect();
        drop(all);
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::Ino;

    fn null() -> Result<OwnedFd, Code> {
        Ok(std::fs::File::open("/dev/null").unwrap().into())
    }

    #[test]
    fn a_file_is_kept_until_its_last_handle_is_closed_or_its_session_ends() {
        let kept = KeptOpen::default();
        let id = BackingId { target: 1 << 16, ino: Ino(5), number: 0, stripe: 0 };
        for handle in [1, 2, 2] {
            kept.open(7, &id, handle, null).unwrap();
        }
        kept.open(8, &id, 1, null).unwrap();
        kept.close(7, &id, 1);
        kept.close(7, &id, 1);
        assert!(kept.get(7, &id).is_some());
        kept.close(7, &id, 2);
        assert!(kept.get(7, &id).is_none() && kept.get(8, &id).is_some());
        kept.end(8);
        assert!(kept.get(8, &id).is_none());
        assert_eq!(kept.open(8, &id, 1, || Err(Code::NotFound)), Err(Code::NotFound));
        assert!(kept.get(8, &id).is_none());
    }

    #[test]
    fn more_than_the_bound_are_refused() {
        let kept = KeptOpen::default();
        let id = |n| BackingId { target: 1 << 16, ino: Ino(n), number: 0, stripe: 0 };
        let file = Arc::new(null().unwrap());
        for n in 0..BACKING_OPEN_MAX as u64 {
            let entry = Kept { file: Arc::clone(&file), writable: None, handles: HashSet::from([1]) };
            kept.all().insert((7, id(n)), entry);
        }
        assert_eq!(kept.open(7, &id(1 << 40), 1, null), Err(Code::NoResources));
        kept.open(7, &id(0), 2, null).unwrap();
    }
}
