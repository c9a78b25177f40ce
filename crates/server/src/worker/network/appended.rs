//! Which appends of processes of other nodes were begun and which are done, in memory that the supervisor keeps over
//! the worker: an append, unlike a write at an offset, is not to be done twice, and what is under way when a worker is
//! killed is asked of the next.
//!
//! The last append of each slot ([`ReplyCache`]). Its entry is written before the append, and marked behind it; who is
//! killed between the two leaves it to the file's size whether anything was written, and where that does not tell, the
//! process is told EIO.
//!
//! Behind it, in the same memory, are the inodes of other nodes whose backing files were removed last: a request to
//! make one of them that comes late, or again, makes nothing, whichever worker it meets.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_ring::{memfd_sealed, Mapping, Seal};
use forebay_types::limits::REPLIES_KEPT;
use forebay_types::{BackingId, Code, Error, Ino, Result};
use forebay_wire::Stamp;

use super::reply_cache::{ReplyCache, ENTRY_BYTES};
use crate::store::FdStore;

/// The tag of the log in the supervisor's store.
pub(in crate::worker) const TAG: &str = "appends";
/// Inodes whose backing files were removed last.
const REMOVED_KEPT: usize = 4096;
/// Where they begin: how many there were, and the last of them.
const REMOVED_AT: usize = REPLIES_KEPT * ENTRY_BYTES;
/// Bytes of all that.
pub(super) const APPENDS_BYTES: usize = REMOVED_AT + 8 * (1 + REMOVED_KEPT);

/// The states of an append. Its words: the inode, the rest of the backing file's name, and where it goes.
const BEGUN: u64 = 1;
const DONE: u64 = 2;

/// What became of an append.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Before {
    /// It was begun when the file was so long.
    Begun(u64),
    /// It is done: where its first byte went.
    Done(u64),
}

/// An append that was begun, by its number.
#[derive(Debug)]
pub(super) struct Entry(u64);

/// The last append of each slot, and what was removed.
#[derive(Debug)]
pub(in crate::worker) struct Appended {
    /// None: nothing outlives this (tests).
    memory: Option<Mapping>,
    last: Mutex<ReplyCache>,
}

impl Default for Appended {
    fn default() -> Appended {
        Appended { memory: None, last: Mutex::new(ReplyCache::new(0, REPLIES_KEPT)) }
    }
}

fn packed(id: &BackingId) -> u64 {
    u64::from(id.target) << 32 | u64::from(id.number) << 16 | u64::from(id.stripe)
}

/// Where the `i`-th inode is whose backing files were removed.
fn removed_at(i: u64) -> usize {
    REMOVED_AT + 8 * (1 + i as usize % REMOVED_KEPT)
}

impl Appended {
    /// What the last worker left with the supervisor, taken out of `left`, or new memory that is put there.
    ///
    /// # Errors
    /// No memory; the supervisor is gone.
    pub(in crate::worker) fn restored(
        store: &FdStore,
        left: &mut Vec<(String, Vec<OwnedFd>)>,
    ) -> Result<Appended> {
        let kept = left.extract_if(.., |(tag, _)| tag == TAG).find_map(|(_, mut fds)| fds.pop());
        if let Some(fd) = kept {
            return Appended::open(fd.as_fd());
        }
        let what = "cannot keep which appends are done";
        let (fd, mapping) =
            memfd_sealed(c"forebay-appends", APPENDS_BYTES, Seal::Size).map_err(|e| Error::io(what, &e))?;
        store.put(TAG, &[fd.as_fd()])?;
        Ok(Appended { memory: Some(mapping), ..Appended::default() })
    }

    /// What is kept in memory of [`APPENDS_BYTES`], which is zero where there is none yet.
    ///
    /// # Errors
    /// Memory that cannot be mapped.
    pub(super) fn open(fd: std::os::fd::BorrowedFd<'_>) -> Result<Appended> {
        let what = "cannot see which appends are done";
        let memory = Mapping::new(fd, APPENDS_BYTES, true).map_err(|e| Error::io(what, &e))?;
        let last = Mutex::new(ReplyCache::restored(&memory, 0, REPLIES_KEPT));
        Ok(Appended { memory: Some(memory), last })
    }

    fn last(&self) -> MutexGuard<'_, ReplyCache> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A backing file of an inode is about to be removed: the inode is put to those of `known`, and kept for the next
    /// worker. One that has several here is told of several times in a row, and is to make no more than one other
    /// forgotten.
    pub(super) fn note_removed(&self, known: &mut VecDeque<Ino>, ino: Ino) {
        if known.back() == Some(&ino) {
            return;
        }
        known.push_back(ino);
        if known.len() > REMOVED_KEPT {
            known.pop_front();
        }
        let Some(memory) = &self.memory else { return };
        let count = memory.word64(REMOVED_AT).load(Ordering::Relaxed);
        memory.word64(removed_at(count)).store(ino.0, Ordering::Relaxed);
        memory.word64(REMOVED_AT).store(count.wrapping_add(1), Ordering::Release);
    }

    /// Those that were removed last, by this worker or an earlier one.
    pub(super) fn removed(&self) -> VecDeque<Ino> {
        let Some(memory) = &self.memory else { return VecDeque::new() };
        let count = memory.word64(REMOVED_AT).load(Ordering::Acquire);
        let last = count.saturating_sub(REMOVED_KEPT as u64)..count;
        last.map(|i| Ino(memory.word64(removed_at(i)).load(Ordering::Relaxed))).collect()
    }

    /// What was done of an append that is asked again; none of one that was never begun.
    pub(super) fn before(&self, stamp: &Stamp, id: &BackingId) -> Option<Before> {
        let last = self.last();
        let kept = last.get(stamp).filter(|kept| kept.words[..2] == [id.ino.0, packed(id)])?;
        Some(if kept.state == DONE { Before::Done(kept.words[2]) } else { Before::Begun(kept.words[2]) })
    }

    /// An append begins on a file that is so long.
    pub(super) fn begin(&self, stamp: &Stamp, id: &BackingId, size: u64) -> Entry {
        Entry(self.last().put(self.memory.as_ref(), stamp, BEGUN, [id.ino.0, packed(id), size]))
    }

    /// It is done: its first byte went there.
    pub(super) fn done(&self, entry: &Entry, at: u64) {
        self.last().advance(self.memory.as_ref(), entry.0, DONE, at);
    }

    /// The processes whose appends are kept.
    pub(super) fn sessions(&self) -> Vec<u64> {
        self.last().sessions()
    }

    /// A process is over.
    pub(super) fn end(&self, session: u64) {
        self.last().end(self.memory.as_ref(), session);
    }

    /// Does an append, unless it was done before; where its first byte went. `size` is the file's, and `append` does
    /// it.
    ///
    /// # Errors
    /// What `size` and `append` fail with; [`Code::Io`] when an earlier worker was killed in the middle of it, and the file
    /// has grown or gone since; [`Code::Stale`] when its slot has begun a later one.
    pub(super) fn once(
        &self,
        stamp: &Stamp,
        id: &BackingId,
        size: impl Fn() -> std::result::Result<u64, Code>,
        append: impl FnOnce() -> std::result::Result<u64, Code>,
    ) -> std::result::Result<u64, Code> {
        match self.before(stamp, id) {
            Some(Before::Done(at)) => return Ok(at),
            Some(Before::Begun(then)) if size() != Ok(then) => return Err(Code::Io),
            None if self.last().is_overtaken(stamp) => return Err(Code::Stale),
            _ => {}
        }
        let entry = self.begin(stamp, id, size()?);
        let at = append()?;
        self.done(&entry, at);
        Ok(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(slot: u16, sequence: u64) -> Stamp {
        Stamp { session: u64::MAX - 1, slot, sequence }
    }

    #[test]
    fn next_worker_knows_what_was_begun_and_what_is_done() {
        let (fd, memory) = memfd_sealed(c"appends", APPENDS_BYTES, Seal::Size).unwrap();
        let first = Appended { memory: Some(memory), ..Appended::default() };
        let id = BackingId { target: u32::MAX, ino: Ino(u64::MAX - 5), number: 3, stripe: u16::MAX };
        let other = BackingId { stripe: 1, ..id };
        assert_eq!(first.once(&stamp(63, 7), &id, || Ok(100), || Ok(100)), Ok(100));
        let entry = first.begin(&stamp(1, 7), &id, 110);
        first.begin(&stamp(2, 8), &id, 110);
        first.done(&entry, 120);
        let next = Appended::open(fd.as_fd()).unwrap();
        assert_eq!(next.before(&stamp(63, 7), &id), Some(Before::Done(100)));
        assert_eq!(next.before(&stamp(1, 7), &id), Some(Before::Done(120)));
        assert_eq!(next.before(&stamp(2, 8), &id), Some(Before::Begun(110)));
        assert!([stamp(2, 9), stamp(3, 7)].iter().all(|of| next.before(of, &id).is_none()));
        assert_eq!(next.before(&stamp(63, 7), &other), None);
        // Done is not done again; what was begun is where nothing was written, and is in doubt where something was.
        let not = || -> std::result::Result<u64, Code> { panic!("it is done") };
        assert_eq!(next.once(&stamp(1, 7), &id, || Ok(500), not), Ok(120));
        assert_eq!(next.once(&stamp(2, 8), &id, || Ok(111), not), Err(Code::Io));
        // Of a file that is gone since, the one is known, and of the other nothing.
        assert_eq!(next.once(&stamp(1, 7), &id, || Err(Code::NotFound), not), Ok(120));
        assert_eq!(next.once(&stamp(2, 8), &id, || Err(Code::NotFound), not), Err(Code::Io));
        assert_eq!(next.once(&stamp(2, 8), &id, || Ok(110), || Ok(110)), Ok(110));
        // And the worker after it knows the last of each.
        let third = Appended::open(fd.as_fd()).unwrap();
        assert_eq!(third.before(&stamp(2, 8), &id), Some(Before::Done(110)));
        assert_eq!(third.before(&stamp(1, 7), &id), Some(Before::Done(120)));
    }

    #[test]
    fn next_worker_knows_what_was_removed_last() {
        let (fd, _memory) = memfd_sealed(c"appends", APPENDS_BYTES, Seal::Size).unwrap();
        let worker = || Appended::open(fd.as_fd()).unwrap();
        let note = |inodes: &[u64]| {
            let worker = worker();
            let mut known = worker.removed();
            inodes.iter().for_each(|ino| worker.note_removed(&mut known, Ino(*ino)));
            known
        };
        assert!(note(&[]).is_empty());
        note(&[7]);
        // Stripes of one inode, of which the last worker knew already.
        note(&[7, 7, 8, 8, 8]);
        assert_eq!(note(&[]), [Ino(7), Ino(8)]);
        let stripes: Vec<u64> = (0..2 * REMOVED_KEPT as u64).map(|i| 100 + i / 2).collect();
        for known in [note(&stripes), note(&[])] {
            assert_eq!((known.len(), known[0]), (REMOVED_KEPT, Ino(100)));
        }
        assert_eq!(note(&[7]), note(&[]));
        assert_eq!((note(&[]).len(), note(&[])[0]), (REMOVED_KEPT, Ino(101)), "the oldest made room");
    }

    #[test]
    fn append_whose_reply_was_lost_is_known_though_others_append_many_times() {
        let (fd, memory) = memfd_sealed(c"appends", APPENDS_BYTES, Seal::Size).unwrap();
        let first = Appended { memory: Some(memory), ..Appended::default() };
        let id = BackingId { target: 1 << 16, ino: Ino(5), number: 0, stripe: 0 };
        first.once(&stamp(1, 1), &id, || Ok(0), || Ok(0)).unwrap();
        for sequence in 0..REPLIES_KEPT as u64 + 10 {
            first.once(&stamp(0, sequence), &id, || Ok(sequence), || Ok(sequence)).unwrap();
        }
        let next = Appended::open(fd.as_fd()).unwrap();
        let not = || -> std::result::Result<u64, Code> { panic!("it is not to be done again") };
        assert_eq!(next.once(&stamp(1, 1), &id, || Ok(500), not), Ok(0));
        assert_eq!(next.once(&stamp(0, 3), &id, || Ok(500), not), Err(Code::Stale), "its slot went on");
        next.end(stamp(0, 0).session);
        assert!(Appended::open(fd.as_fd()).unwrap().before(&stamp(1, 1), &id).is_none());
    }
}
