//! Which appends of processes of other nodes were begun and which are done, in memory that the supervisor keeps over
//! the worker: an append, unlike a write at an offset, is not to be done twice, and what is under way when a worker is
//! killed is asked of the next.
//!
//! A log of the last [`APPENDS_KEPT`]. What is under way is among them, as each of a process's slots has one at a time.
//! An entry is written before its append, and marked behind it; who is killed between the two leaves it to the file's
//! size whether anything was written, and where that does not tell, the process is told EIO.
//!
//! Behind it, in the same memory, are the inodes of other nodes whose backing files were removed last: a request to
//! make one of them that comes late, or again, makes nothing, whichever worker it meets.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{compiler_fence, AtomicU64, Ordering};

use forebay_ring::{memfd_sealed, Mapping, Seal};
use forebay_types::limits::APPENDS_KEPT;
use forebay_types::{BackingId, Code, Error, Ino, Result};
use forebay_wire::Stamp;

use crate::store::FdStore;

/// The tag of the log in the supervisor's store.
pub(in crate::worker) const TAG: &str = "appends";
/// Words of an entry: its number, the state, session, slot, sequence, target, inode, number and stripe, and where.
const WORDS: usize = 8;
const ENTRY_BYTES: usize = 8 * WORDS;
/// Inodes whose backing files were removed last.
const REMOVED_KEPT: usize = 4096;
/// Where they begin: how many there were, and the last of them.
const REMOVED_AT: usize = APPENDS_KEPT * ENTRY_BYTES;
/// Bytes of all that.
pub(super) const APPENDS_BYTES: usize = REMOVED_AT + 8 * (1 + REMOVED_KEPT);

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

/// An entry of the log.
#[derive(Debug)]
pub(super) struct Entry(usize);

/// Whose, and of which file.
type Key = (u64, u16, u64, BackingId);

/// The log.
#[derive(Debug, Default)]
pub(in crate::worker) struct Appended {
    /// None: nothing outlives this (tests).
    log: Option<Mapping>,
    next: AtomicU64,
    /// What the last worker left.
    before: HashMap<Key, Before>,
}

fn packed(id: &BackingId) -> u64 {
    u64::from(id.target) << 32 | u64::from(id.number) << 16 | u64::from(id.stripe)
}

/// Where the `i`-th inode is whose backing files were removed.
fn removed_at(i: u64) -> usize {
    REMOVED_AT + 8 * (1 + i as usize % REMOVED_KEPT)
}

impl Appended {
    /// The log that the last worker left with the supervisor, taken out of `left`, or a new one that is put there.
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
        Ok(Appended { log: Some(mapping), ..Appended::default() })
    }

    /// The log in memory of [`APPENDS_BYTES`], which is zero where there is none yet.
    ///
    /// # Errors
    /// Memory that cannot be mapped.
    pub(super) fn open(fd: std::os::fd::BorrowedFd<'_>) -> Result<Appended> {
        let what = "cannot see which appends are done";
        let log = Mapping::new(fd, APPENDS_BYTES, true).map_err(|e| Error::io(what, &e))?;
        let (mut before, mut newest) = (HashMap::new(), HashMap::new());
        let mut next = 0;
        for index in 0..APPENDS_KEPT {
            let word = |i: usize| log.word64(index * ENTRY_BYTES + 8 * i).load(Ordering::Acquire);
            let state = match word(1) {
                BEGUN => Before::Begun(word(7)),
                DONE => Before::Done(word(7)),
                // Never used, or its writer was killed while it was being written.
                _ => continue,
            };
            let files = word(6);
            let id = BackingId {
                target: (files >> 32) as u32,
                ino: Ino(word(5)),
                number: (files >> 16) as u8,
                stripe: files as u16,
            };
            let (number, key) = (word(0), (word(2), word(3) as u16, word(4), id));
            next = next.max(number + 1);
            // One that was begun again is what its last beginning says.
            if newest.get(&key).is_none_or(|before| *before < number) {
                newest.insert(key, number);
                before.insert(key, state);
            }
        }
        Ok(Appended { log: Some(log), next: AtomicU64::new(next), before })
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
        let Some(log) = &self.log else { return };
        let count = log.word64(REMOVED_AT).load(Ordering::Relaxed);
        log.word64(removed_at(count)).store(ino.0, Ordering::Relaxed);
        log.word64(REMOVED_AT).store(count.wrapping_add(1), Ordering::Release);
    }

    /// Those that were removed last, by this worker or an earlier one.
    pub(super) fn removed(&self) -> VecDeque<Ino> {
        let Some(log) = &self.log else { return VecDeque::new() };
        let count = log.word64(REMOVED_AT).load(Ordering::Acquire);
        let last = count.saturating_sub(REMOVED_KEPT as u64)..count;
        last.map(|i| Ino(log.word64(removed_at(i)).load(Ordering::Relaxed))).collect()
    }

    /// What an earlier worker did of an append that is asked again; none of one that it never began.
    pub(super) fn before(&self, stamp: &Stamp, id: &BackingId) -> Option<Before> {
        self.before.get(&(stamp.session, stamp.slot, stamp.sequence, *id)).copied()
    }

    /// An append begins on a file that is so long.
    pub(super) fn begin(&self, stamp: &Stamp, id: &BackingId, size: u64) -> Entry {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let entry = Entry(number as usize % APPENDS_KEPT);
        let Some(log) = &self.log else { return entry };
        let word = |i: usize| log.word64(entry.0 * ENTRY_BYTES + 8 * i);
        // No state while the rest is not all of one append.
        word(1).store(0, Ordering::SeqCst);
        compiler_fence(Ordering::SeqCst);
        let words = [
            (0, number),
            (2, stamp.session),
            (3, stamp.slot.into()),
            (4, stamp.sequence),
            (5, id.ino.0),
            (6, packed(id)),
            (7, size),
        ];
        for (i, value) in words {
            word(i).store(value, Ordering::Relaxed);
        }
        word(1).store(BEGUN, Ordering::SeqCst);
        entry
    }

    /// It is done: its first byte went there.
    pub(super) fn done(&self, entry: &Entry, at: u64) {
        let Some(log) = &self.log else { return };
        let word = |i: usize| log.word64(entry.0 * ENTRY_BYTES + 8 * i);
        word(7).store(at, Ordering::Relaxed);
        word(1).store(DONE, Ordering::SeqCst);
    }

    /// Does an append, unless an earlier worker has; where its first byte went. `size` is the file's, and `append` does
    /// it.
    ///
    /// # Errors
    /// What `size` and `append` fail with; [`Code::Io`] when an earlier worker was killed in the middle of it, and the file has grown
    /// or gone since.
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
        let (fd, log) = memfd_sealed(c"appends", APPENDS_BYTES, Seal::Size).unwrap();
        let first = Appended { log: Some(log), ..Appended::default() };
        let id = BackingId { target: u32::MAX, ino: Ino(u64::MAX - 5), number: 3, stripe: u16::MAX };
        let other = BackingId { stripe: 1, ..id };
        assert_eq!(first.once(&stamp(63, 7), &id, || Ok(100), || Ok(100)), Ok(100));
        let entry = first.begin(&stamp(2, 7), &id, 110);
        first.begin(&stamp(2, 8), &id, 110);
        first.done(&entry, 120);
        let next = Appended::open(fd.as_fd()).unwrap();
        assert_eq!(next.before(&stamp(63, 7), &id), Some(Before::Done(100)));
        assert_eq!(next.before(&stamp(2, 7), &id), Some(Before::Done(120)));
        assert_eq!(next.before(&stamp(2, 8), &id), Some(Before::Begun(110)));
        assert!([stamp(2, 9), stamp(3, 7)].iter().all(|of| next.before(of, &id).is_none()));
        assert_eq!(next.before(&stamp(63, 7), &other), None);
        // Done is not done again; what was begun is where nothing was written, and is in doubt where something was.
        let not = || -> std::result::Result<u64, Code> { panic!("it is done") };
        assert_eq!(next.once(&stamp(2, 7), &id, || Ok(500), not), Ok(120));
        assert_eq!(next.once(&stamp(2, 8), &id, || Ok(111), not), Err(Code::Io));
        // Of a file that is gone since, the one is known, and of the other nothing.
        assert_eq!(next.once(&stamp(2, 7), &id, || Err(Code::NotFound), not), Ok(120));
        assert_eq!(next.once(&stamp(2, 8), &id, || Err(Code::NotFound), not), Err(Code::Io));
        assert_eq!(next.once(&stamp(2, 8), &id, || Ok(110), || Ok(110)), Ok(110));
        // And the worker after it knows the last of each.
        let third = Appended::open(fd.as_fd()).unwrap();
        assert_eq!(third.before(&stamp(2, 8), &id), Some(Before::Done(110)));
        assert_eq!(third.before(&stamp(2, 7), &id), Some(Before::Done(120)));
    }

    #[test]
    fn next_worker_knows_what_was_removed_last() {
        let (fd, _log) = memfd_sealed(c"appends", APPENDS_BYTES, Seal::Size).unwrap();
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
    fn log_goes_round_and_keeps_the_last() {
        let (fd, log) = memfd_sealed(c"appends", APPENDS_BYTES, Seal::Size).unwrap();
        let first = Appended { log: Some(log), ..Appended::default() };
        let id = BackingId { target: 1 << 16, ino: Ino(5), number: 0, stripe: 0 };
        for sequence in 0..APPENDS_KEPT as u64 + 10 {
            first.once(&stamp(0, sequence), &id, || Ok(sequence), || Ok(sequence)).unwrap();
        }
        let next = Appended::open(fd.as_fd()).unwrap();
        assert_eq!(next.before.len(), APPENDS_KEPT);
        assert!(next.before(&stamp(0, 9), &id).is_none() && next.before(&stamp(0, 10), &id).is_some());
        next.once(&stamp(0, 99_999), &id, || Ok(1), || Ok(1)).unwrap();
        let third = Appended::open(fd.as_fd()).unwrap();
        assert!(third.before(&stamp(0, 10), &id).is_none(), "the oldest made room");
        assert!(third.before(&stamp(0, 11), &id).is_some() && third.before(&stamp(0, 99_999), &id).is_some());
    }
}
