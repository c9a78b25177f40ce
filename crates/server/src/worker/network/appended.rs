//! The log of appends by processes of other nodes, in memory that the supervisor keeps for the next worker. Unlike a
//! write at an offset, an append must not be done twice. An append that was in progress when a worker was killed is
//! retried at the next worker.
//!
//! The log has the last append of each slot ([`ReplyCache`]). The entry is written before the append and marked as done
//! after it. If a worker was killed between the two, the file's content shows the state of the append, because the
//! repeated request has the append's bytes: an append that is not in the file is done, and a torn one is completed.
//! Appends to one file by this module are serialized, so that none of them takes another's position. Programs of this
//! node append without the worker: if one of them has appended meanwhile, the retry fails with EIO.
//!
//! The same memory lists the recently removed inodes of other nodes. A late or duplicate request to make the backing
//! file of such an inode makes nothing, at this worker or the next.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use forebay_types::limits::REPLIES_KEPT;
use forebay_types::{BackingId, Code, Ino};
use forebay_wire::Stamp;

use super::reply_cache::{packed, ReplyCache, WORDS};
use crate::worker::durable_table::{DurableMemory, DurableTable, Format};

/// The tag of the memory in the supervisor's store.
pub(in crate::worker) const TAG: &str = "appends";
/// How many recently removed inodes are stored.
const REMOVED_KEPT: usize = 4096;
/// The tables: last appends, removed inodes.
pub(super) const FORMAT: Format = Format {
    tag: TAG,
    what: "the log of finished appends and removed inodes",
    version: 1,
    tables: &[(REPLIES_KEPT, WORDS), (REMOVED_KEPT, 2)],
};

/// The states of an append. Its words: the inode, the rest of the backing file's name, and the offset: the file's size
/// before an append that has begun, the offset of its first byte when it is done.
const BEGUN: u64 = 1;
const DONE: u64 = 2;

/// The known state of an append.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Before {
    /// It has begun; the file's size before it.
    Begun(u64),
    /// It is done; the offset of its first byte.
    Done(u64),
}

/// The operations on a backing file that an append needs.
pub(super) trait AppendFile {
    /// The file's size in bytes.
    fn size(&self) -> Result<u64, Code>;
    /// Reads at an offset; returns the number of bytes, which is lower at the end.
    fn read(&self, bytes: &mut [u8], at: u64) -> Result<usize, Code>;
    /// Writes at the current end; returns the offset of the first byte.
    fn append(&self, bytes: &[u8]) -> Result<u64, Code>;
}

/// How much of an append is in its file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Found {
    /// This many of its first bytes, and the file ends after them.
    First(usize),
    /// All bytes.
    All,
    /// The file has other bytes at the append's offset, or ends before it.
    Other,
}

/// Compares the file with bytes that were to be appended at offset `at`.
fn find(file: &impl AppendFile, bytes: &[u8], at: u64) -> Result<Found, Code> {
    let Some(there) = file.size()?.checked_sub(at) else { return Ok(Found::Other) };
    let there = bytes.len().min(usize::try_from(there).unwrap_or(usize::MAX));
    let (mut done, mut piece) = (0, [0; 16 * 1024]);
    while done < there {
        let most = piece.len().min(there - done);
        let n = file.read(&mut piece[..most], at + done as u64)?;
        if n == 0 || piece[..n] != bytes[done..done + n] {
            return Ok(Found::Other);
        }
        done += n;
    }
    Ok(if there == bytes.len() { Found::All } else { Found::First(there) })
}

/// The number of mutexes that serialize appends to one file. Two files may share one.
const FILE_LOCKS: usize = 64;

/// The last append of each slot, and the removed inodes.
#[derive(Debug)]
pub(in crate::worker) struct Appended {
    last: Mutex<ReplyCache>,
    /// Taken before `last`.
    files: [Mutex<()>; FILE_LOCKS],
    removed: RwLock<Removed>,
}

impl Default for Appended {
    fn default() -> Appended {
        Appended::open(&DurableMemory::none(&FORMAT))
    }
}

impl Appended {
    /// Opens the log in a memory.
    pub(super) fn open(memory: &DurableMemory) -> Appended {
        let last = ReplyCache::open(memory, 0, |state, _| state == BEGUN || state == DONE);
        let files = [const { Mutex::new(()) }; FILE_LOCKS];
        Appended { last: Mutex::new(last), files, removed: RwLock::new(Removed::open(memory)) }
    }

    fn last(&self) -> MutexGuard<'_, ReplyCache> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores inodes, before backing files of them are removed. Waits for files that are being made: the removal finds
    /// them.
    pub(super) fn note_removed(&self, inodes: impl Iterator<Item = Ino>) {
        let mut removed = self.removed.write().unwrap_or_else(PoisonError::into_inner);
        inodes.for_each(|ino| removed.note(ino));
    }

    /// Makes a backing file with `make`, unless its inode was removed. Requests to make and to remove a file are served
    /// in any order by several threads: between the look at the list and the end of `make`, no removal begins.
    ///
    /// # Errors
    /// [`Code::NotFound`] for a removed inode, and what `make` fails with.
    pub(super) fn unless_removed(
        &self,
        ino: Ino,
        make: impl FnOnce() -> Result<(), Code>,
    ) -> Result<(), Code> {
        let removed = self.removed.read().unwrap_or_else(PoisonError::into_inner);
        if removed.contains(ino) {
            return Err(Code::NotFound);
        }
        make()
    }

    /// The state of a retried append; none if it never began.
    pub(super) fn before(&self, stamp: &Stamp, id: &BackingId) -> Option<Before> {
        self.numbered_before(stamp, id).map(|(_, before)| before)
    }

    fn numbered_before(&self, stamp: &Stamp, id: &BackingId) -> Option<(u64, Before)> {
        let last = self.last();
        let kept = last.get(stamp).filter(|kept| kept.words[..2] == [id.ino.0, packed(id)])?;
        let at = kept.words[2];
        Some((kept.number, if kept.state == DONE { Before::Done(at) } else { Before::Begun(at) }))
    }

    /// Records that an append begins on a file of `size` bytes; returns its number.
    fn begin(&self, stamp: &Stamp, id: &BackingId, size: u64) -> u64 {
        self.last().put(stamp, BEGUN, [id.ino.0, packed(id), size])
    }

    /// Records that the append of this number is done, with its first byte at `at`.
    fn done(&self, number: u64, at: u64) {
        self.last().advance(number, DONE, at);
    }

    /// The processes with stored appends.
    pub(super) fn sessions(&self) -> Vec<u64> {
        self.last().sessions()
    }

    /// A process has ended: removes its entries.
    pub(super) fn end(&self, session: u64) {
        self.last().end(session);
    }

    /// Does an append, or the rest of it, unless it was done before; returns the offset of its first byte.
    ///
    /// # Errors
    /// The errors of the file's calls. [`Code::Io`] when an earlier worker was killed during the append, and another
    /// program has appended since or the file is shorter or gone. [`Code::Stale`] when its slot has begun a later
    /// append.
    pub(super) fn once(
        &self,
        stamp: &Stamp,
        id: &BackingId,
        bytes: &[u8],
        file: &impl AppendFile,
    ) -> Result<u64, Code> {
        let lock = &self.files[id.ino.0 as usize % FILE_LOCKS];
        let _apart = lock.lock().unwrap_or_else(PoisonError::into_inner);
        match self.numbered_before(stamp, id) {
            Some((_, Before::Done(at))) => return Ok(at),
            Some((number, Before::Begun(at))) => match find(file, bytes, at).map_err(|_| Code::Io)? {
                Found::First(0) if !bytes.is_empty() => {}
                Found::First(n) => {
                    if file.append(&bytes[n..])? != at + n as u64 {
                        return Err(Code::Io);
                    }
                    self.done(number, at);
                    return Ok(at);
                }
                Found::All => {
                    self.done(number, at);
                    return Ok(at);
                }
                Found::Other => return Err(Code::Io),
            },
            None if self.last().is_overtaken(stamp) => return Err(Code::Stale),
            None => {}
        }
        let number = self.begin(stamp, id, file.size()?);
        let at = file.append(bytes)?;
        self.done(number, at);
        Ok(at)
    }
}

/// The inodes of other nodes whose backing files were removed last.
#[derive(Debug)]
struct Removed {
    /// Words of an entry: the number of the removal, from 1, and the inode.
    table: DurableTable<2>,
    /// The inodes, oldest removal first.
    last: VecDeque<Ino>,
    /// The entries of `last`.
    entries: VecDeque<usize>,
    next: u64,
}

impl Removed {
    /// The inodes that this worker or an earlier one removed last.
    fn open(memory: &DurableMemory) -> Removed {
        let (table, mut left) = memory.table(1);
        left.sort_unstable_by_key(|(_, [number, _])| *number);
        let next = left.last().map_or(1, |(_, [number, _])| number.saturating_add(1));
        let (entries, last) = left.into_iter().map(|(entry, [_, ino])| (entry, Ino(ino))).unzip();
        Removed { table, last, entries, next }
    }

    fn contains(&self, ino: Ino) -> bool {
        self.last.contains(&ino)
    }

    /// Stores an inode before a backing file of it is removed, also for the next worker. An inode with several backing
    /// files here is noted several times in a row, and takes only one entry.
    fn note(&mut self, ino: Ino) {
        if self.last.back() == Some(&ino) {
            return;
        }
        let entry = self.table.take_free().or_else(|| {
            self.last.pop_front();
            self.entries.pop_front()
        });
        let Some(entry) = entry else { return };
        self.table.write(entry, [self.next, ino.0]);
        self.next = self.next.saturating_add(1);
        self.last.push_back(ino);
        self.entries.push_back(entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    const ID: BackingId = BackingId { target: u32::MAX, ino: Ino(u64::MAX - 5), number: 3, stripe: u16::MAX };

    fn stamp(slot: u16, sequence: u64) -> Stamp {
        Stamp { session: u64::MAX - 1, slot, sequence }
    }

    /// A file in memory; none when it is removed.
    struct Fake(RefCell<Option<Vec<u8>>>);

    impl Fake {
        fn with(bytes: &[u8]) -> Fake {
            Fake(RefCell::new(Some(bytes.to_vec())))
        }

        fn bytes(&self) -> Vec<u8> {
            self.0.borrow().clone().unwrap()
        }
    }

    impl AppendFile for Fake {
        fn size(&self) -> Result<u64, Code> {
            self.0.borrow().as_ref().map(|bytes| bytes.len() as u64).ok_or(Code::NotFound)
        }

        fn read(&self, bytes: &mut [u8], at: u64) -> Result<usize, Code> {
            let file = self.0.borrow();
            let found = file.as_ref().and_then(|file| file.get(at as usize..)).ok_or(Code::NotFound)?;
            let n = found.len().min(bytes.len());
            bytes[..n].copy_from_slice(&found[..n]);
            Ok(n)
        }

        fn append(&self, bytes: &[u8]) -> Result<u64, Code> {
            let at = self.size()?;
            self.0.borrow_mut().as_mut().ok_or(Code::NotFound)?.extend_from_slice(bytes);
            Ok(at)
        }
    }

    /// The next worker's result for an append of "abcd", and the file's content after it. The first worker was killed
    /// between the entry and its mark; the file was `then` before the append and is `now` afterwards.
    fn repeated(then: &[u8], now: &[u8]) -> (Result<u64, Code>, Vec<u8>) {
        let memory = DurableMemory::new(&FORMAT);
        let first = Appended::open(&memory);
        first.begin(&stamp(2, 7), &ID, then.len() as u64);
        let (next, file) = (Appended::open(&memory), Fake::with(now));
        let told = next.once(&stamp(2, 7), &ID, b"abcd", &file);
        if let Ok(at) = told {
            assert_eq!(Appended::open(&memory).before(&stamp(2, 7), &ID), Some(Before::Done(at)));
        }
        assert_eq!(next.once(&stamp(2, 7), &ID, b"abcd", &file), told, "asked again");
        (told, file.bytes())
    }

    #[test]
    fn append_whose_worker_was_killed_is_done_once_and_completed_where_it_is_torn() {
        assert_eq!(repeated(b"xyz", b"xyz"), (Ok(3), b"xyzabcd".to_vec()));
        for n in 1..=4 {
            assert_eq!(repeated(b"xyz", &b"xyzabcd"[..3 + n]), (Ok(3), b"xyzabcd".to_vec()), "{n}");
        }
        assert_eq!(repeated(b"", b"abcdmore"), (Ok(0), b"abcdmore".to_vec()), "others' behind it");
    }

    #[test]
    fn append_whose_worker_was_killed_fails_where_another_program_has_changed_the_file() {
        for now in [&b"xyzother"[..], b"xyzabx", b"xyzaxcd", b"xy", b""] {
            assert_eq!(repeated(b"xyz", now), (Err(Code::Io), now.to_vec()));
        }
    }

    #[test]
    fn next_worker_knows_what_is_done_also_of_a_file_that_is_gone() {
        let memory = DurableMemory::new(&FORMAT);
        let first = Appended::open(&memory);
        let (file, gone) = (Fake::with(b"xyz"), Fake(RefCell::new(None)));
        assert_eq!(first.once(&stamp(63, 7), &ID, b"ab", &file), Ok(3));
        first.begin(&stamp(2, 8), &ID, 5);
        let next = Appended::open(&memory);
        assert_eq!(next.before(&stamp(63, 7), &ID), Some(Before::Done(3)));
        assert_eq!(next.before(&stamp(2, 8), &ID), Some(Before::Begun(5)));
        assert!([stamp(2, 9), stamp(3, 7)].iter().all(|of| next.before(of, &ID).is_none()));
        assert_eq!(next.before(&stamp(63, 7), &BackingId { stripe: 1, ..ID }), None);
        assert_eq!(next.once(&stamp(63, 7), &ID, b"ab", &gone), Ok(3));
        assert_eq!(next.once(&stamp(2, 8), &ID, b"ab", &gone), Err(Code::Io));
        assert_eq!(next.once(&stamp(4, 1), &ID, b"ab", &gone), Err(Code::NotFound));
        assert_eq!(file.bytes(), b"xyzab");
    }

    #[test]
    fn next_worker_knows_what_was_removed_last() {
        let memory = DurableMemory::new(&FORMAT);
        let note = |inodes: &[u64]| {
            let mut removed = Removed::open(&memory);
            inodes.iter().for_each(|ino| removed.note(Ino(*ino)));
            removed.last
        };
        assert!(note(&[]).is_empty());
        note(&[7]);
        // Stripes of one inode, which the last worker has already stored.
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
        let memory = DurableMemory::new(&FORMAT);
        let first = Appended::open(&memory);
        let file = Fake::with(b"");
        first.once(&stamp(1, 1), &ID, b"a", &file).unwrap();
        for sequence in 0..REPLIES_KEPT as u64 + 10 {
            first.once(&stamp(0, sequence), &ID, b"b", &file).unwrap();
        }
        let (next, before) = (Appended::open(&memory), file.bytes());
        assert_eq!(next.once(&stamp(1, 1), &ID, b"a", &file), Ok(0));
        assert_eq!(next.once(&stamp(0, 3), &ID, b"b", &file), Err(Code::Stale), "its slot went on");
        assert!(file.bytes() == before);
        next.end(stamp(0, 0).session);
        assert!(Appended::open(&memory).before(&stamp(1, 1), &ID).is_none());
    }
}
