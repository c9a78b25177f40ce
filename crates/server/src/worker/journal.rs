//! The journal: changes that were acknowledged and are not yet committed to the shard.
//!
//! A transaction of LMDB costs several times what a request adds to one (measured: docs/decisions/0001), so the shard
//! thread keeps one open over many batches. What it acknowledged meanwhile must survive its death: each change is
//! written here first, in a mapped file beside the shard that is allocated whole, and the next worker applies it again to
//! the last commit. That gives the same inode numbers and replies, as the request, its caller, its time and the order are the
//! same, and the shard's counters are part of what was committed.
//!
//! ```text
//! word 0   bytes in use, this header included (published last)
//! word 8   number of the first record
//! records  u32 message bytes  u32 slot  u64 session  u64 sequence  u64 seconds  u64 nanoseconds  message, padded to 8
//! ```
//!
//! Each commit keeps the number of the last record that it includes, as the reply of a session that does not exist, so
//! that a crash between commit and [`Journal::clear`] does not apply a record twice.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use forebay_ring::Mapping;
use forebay_types::limits::MESSAGE_BYTES_MAX;
use forebay_types::{Error, Result, Timestamp};
use rustix::fs::{FallocateFlags, Mode, OFlags};

/// Bytes of the journal: some thousand changes.
const BYTES: usize = 1 << 20;
const HEADER_BYTES: usize = 64;
const RECORD_BYTES: usize = 40;
/// The session under whose slot 0 the shard keeps the number of the last record that it includes. Sessions of processes
/// are never 0.
pub(super) const MARK_SESSION: u64 = 0;
/// Its file, relative to the target.
pub(super) const JOURNAL_FILE: &str = "shard/journal";

const _: () = assert!(HEADER_BYTES + 2 * (RECORD_BYTES + MESSAGE_BYTES_MAX) <= BYTES);

/// One acknowledged change.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Record {
    pub(super) number: u64,
    pub(super) session: u64,
    pub(super) slot: usize,
    pub(super) seq: u64,
    pub(super) now: Timestamp,
    /// The encoded request, caller included.
    pub(super) message: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct Journal {
    memory: Mapping,
    used: usize,
    next: u64,
}

impl Journal {
    /// The journal of the target's shard, with what a dead worker left in it; an empty one is made if there is none.
    /// Apply [`Journal::records`], commit, [`Journal::clear`].
    pub(super) fn open(target: BorrowedFd<'_>) -> Result<Journal> {
        let make = || {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let file = rustix::fs::openat(target, JOURNAL_FILE, flags, Mode::from_raw_mode(0o600))?;
            // Allocated whole: a store to a page that the medium cannot give would be SIGBUS.
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, BYTES as u64)?;
            Ok(file)
        };
        let file = make().map_err(|e: rustix::io::Errno| {
            Error::io("cannot make the shard's journal", &e.into()).cure("free 1 MiB on the target's medium")
        })?;
        let memory =
            Mapping::new(file.as_fd(), BYTES, true).map_err(|e| Error::io("cannot map the journal", &e))?;
        let used = (memory.word64(0).load(Ordering::Acquire) as usize).clamp(HEADER_BYTES, BYTES);
        if memory.word64(8).load(Ordering::Relaxed) == 0 {
            // A new file. Numbers begin at 1: a shard without a mark includes record 0.
            memory.word64(8).store(1, Ordering::Release);
        }
        let next = memory.word64(8).load(Ordering::Relaxed);
        let mut journal = Journal { memory, used, next };
        journal.next += journal.records().len() as u64;
        Ok(journal)
    }

    /// All records, oldest first.
    pub(super) fn records(&self) -> Vec<Record> {
        let mut records = Vec::new();
        let (mut at, mut number) = (HEADER_BYTES, self.memory.word64(8).load(Ordering::Relaxed));
        while at + RECORD_BYTES <= self.used {
            let word = |i: usize| self.memory.word64(at + 8 * i).load(Ordering::Relaxed);
            let (len, slot) = (word(0) as u32 as usize, (word(0) >> 32) as usize);
            if at + RECORD_BYTES + len > self.used {
                tracing::error!("the journal ends in the middle of record {number}");
                break;
            }
            let mut message = vec![0; len];
            self.memory.load(at + RECORD_BYTES, &mut message);
            let now = Timestamp { sec: word(3) as i64, nsec: word(4) as u32 };
            records.push(Record { number, session: word(1), slot, seq: word(2), now, message });
            at += RECORD_BYTES + len.next_multiple_of(8);
            number += 1;
        }
        records
    }

    /// True when nothing is in it.
    pub(super) fn is_empty(&self) -> bool {
        self.used == HEADER_BYTES
    }

    /// True when the next record may not fit: commit and clear first.
    pub(super) fn is_full(&self) -> bool {
        self.used + RECORD_BYTES + MESSAGE_BYTES_MAX > BYTES
    }

    /// The number of the last record, 0 when there never was one.
    pub(super) fn last(&self) -> u64 {
        self.next - 1
    }

    /// Writes one change. It must fit: see [`Journal::is_full`].
    #[inline]
    pub(super) fn append(&mut self, session: u64, slot: usize, seq: u64, now: Timestamp, message: &[u8]) {
        let at = self.used;
        let words =
            [message.len() as u64 | (slot as u64) << 32, session, seq, now.sec as u64, u64::from(now.nsec)];
        for (i, v) in words.into_iter().enumerate() {
            self.memory.word64(at + 8 * i).store(v, Ordering::Relaxed);
        }
        self.memory.store(at + RECORD_BYTES, message);
        self.used = at + RECORD_BYTES + message.len().next_multiple_of(8);
        self.next += 1;
        self.memory.word64(0).store(self.used as u64, Ordering::Release);
    }

    /// Empties it: what it held is committed.
    pub(super) fn clear(&mut self) {
        self.used = HEADER_BYTES;
        self.memory.word64(0).store(HEADER_BYTES as u64, Ordering::Release);
        self.memory.word64(8).store(self.next, Ordering::Release);
    }

    /// Numbers go on behind `mark`: a new journal over a shard that has seen another.
    pub(super) fn continue_behind(&mut self, mark: u64) {
        if self.next <= mark {
            self.next = mark + 1;
            self.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A target with nothing in it, removed on drop.
    struct Place(std::path::PathBuf);

    impl Place {
        fn new(name: &str) -> Place {
            let path = std::env::temp_dir().join(format!("forebay-journal-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            std::fs::create_dir_all(path.join("shard")).unwrap();
            Place(path)
        }

        fn open(&self) -> Journal {
            Journal::open(std::fs::File::open(&self.0).unwrap().as_fd()).unwrap()
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn records_survive_their_writer_until_they_are_cleared() {
        let place = Place::new("survive");
        let mut journal = place.open();
        assert!(journal.is_empty() && place.open().records().is_empty());
        let now = Timestamp { sec: -3, nsec: 999 };
        for i in 0..100u64 {
            journal.append(7 + i, i as usize % 64, i, now, &vec![i as u8; i as usize]);
        }
        drop(journal);
        let mut next = place.open();
        let records = next.records();
        assert_eq!(records.len(), 100);
        for (i, r) in records.iter().enumerate() {
            let expected = Record {
                number: i as u64 + 1,
                session: 7 + i as u64,
                slot: i % 64,
                seq: i as u64,
                now,
                message: vec![i as u8; i],
            };
            assert_eq!(*r, expected);
        }
        assert_eq!(next.last(), 100);
        next.clear();
        next.append(1, 0, 1, now, b"x");
        assert_eq!(place.open().records()[0].number, 101);
    }

    #[test]
    fn is_full_before_the_longest_message_would_not_fit() {
        let place = Place::new("full");
        let mut journal = place.open();
        let message = vec![1; MESSAGE_BYTES_MAX];
        let mut n = 0;
        while !journal.is_full() {
            journal.append(1, 0, n, Timestamp::default(), &message);
            n += 1;
        }
        assert_eq!(journal.records().len() as u64, n);
        assert!(n > 10);
    }

    #[test]
    fn open_of_a_damaged_journal_gives_what_is_whole() {
        let place = Place::new("damaged");
        let mut journal = place.open();
        for i in 0..3 {
            journal.append(1, 0, i, Timestamp::default(), b"message");
        }
        journal.memory.word64(0).store(u64::MAX, Ordering::Relaxed);
        assert!(place.open().records().len() >= 3);
        journal.memory.word64(0).store(HEADER_BYTES as u64 + 60, Ordering::Relaxed);
        assert_eq!(place.open().records().len(), 1);
    }

    #[test]
    fn continue_behind_a_mark_never_gives_an_old_number() {
        let place = Place::new("mark");
        let mut journal = place.open();
        journal.continue_behind(500);
        journal.append(1, 0, 1, Timestamp::default(), b"");
        assert_eq!(place.open().records()[0].number, 501);
    }
}
