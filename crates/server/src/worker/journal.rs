//! The journal: changes that were acknowledged and are not yet committed to the shard.
//!
//! A transaction of LMDB costs several times what a request adds to one (measured: docs/decisions/0001), so the shard
//! thread keeps one open over many batches. What it acknowledged meanwhile must survive its death. So each change is
//! first written here, in a mapped file beside the shard. The file's space is allocated in advance. The next worker
//! applies these changes again to the last commit. That gives the same inode numbers and replies, because request,
//! caller, time and order are the same, and the shard's counters are part of the commit.
//!
//! ```text
//! word 0   bytes in use, this header included (published last)
//! word 8   number of the first record
//! records  u32 message bytes  u32 slot  u64 session  u64 sequence  u64 seconds  u64 nanoseconds  message, padded to 8
//! ```
//!
//! Each commit keeps the number of the last record that it includes, as the reply of a session that does not exist, so
//! that a crash between commit and [`Journal::clear`] does not apply a record twice.
//!
//! Word 0 is published after the record, so the death of a process leaves only whole records. Anything else is damage.
//! A damaged journal is refused and never repaired by guessing, because each record is an acknowledged change.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use forebay_ring::Mapping;
use forebay_types::limits::{MESSAGE_BYTES_MAX, RING_SLOTS};
use forebay_types::{Code, Error, Result, Timestamp};
use rustix::fs::{FallocateFlags, Mode, OFlags};

/// Bytes of the journal: some thousand changes.
const BYTES: usize = 1 << 20;
const HEADER_BYTES: usize = 64;
const RECORD_BYTES: usize = 40;
/// The session under whose slot 0 the shard keeps the number of the last record that it includes. Sessions of processes
/// are never 0.
pub(super) const MARK_SESSION: u64 = 0;
/// The journal's file, relative to the target.
pub(super) const JOURNAL_FILE: &str = "shard/journal";

const _: () = assert!(HEADER_BYTES + 2 * (RECORD_BYTES + MESSAGE_BYTES_MAX) <= BYTES);

/// The error of a journal whose record `number`, at byte `offset`, cannot be applied. The shard is as its last commit
/// left it.
pub(super) fn damaged(number: u64, offset: usize, why: impl std::fmt::Display) -> Error {
    Error::new(Code::Corrupt, format!("cannot apply record {number} at byte {offset} of the target's {JOURNAL_FILE}"))
        .why(why)
        .cure(
            "copy the target's shard directory first. A journal of another version of Forebay is applied by that version. \
             Without the file the pool starts, and loses the changes from this record on: some thousand at most, all \
             acknowledged since the last commit",
        )
}

/// One acknowledged change.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Record {
    pub(super) number: u64,
    /// Byte of the journal's file at which it begins.
    pub(super) offset: usize,
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
    /// Opens the journal of the target's shard with what a dead worker left in it, or creates an empty one. Apply
    /// [`Journal::records`], commit, then [`Journal::clear`].
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
        let used = memory.word64(0).load(Ordering::Acquire);
        let first = memory.word64(8).load(Ordering::Relaxed);
        let used = match usize::try_from(used) {
            // A new file, or one that was allocated and never written to.
            Ok(0) => HEADER_BYTES,
            Ok(used @ HEADER_BYTES..=BYTES) if used % 8 == 0 && (first > 0 || used == HEADER_BYTES) => used,
            _ => {
                let why = format!("its header says {used} bytes in use and a first record {first}");
                return Err(damaged(first, 0, why));
            }
        };
        if first == 0 {
            // Numbers begin at 1: a shard without a mark includes record 0.
            memory.word64(8).store(1, Ordering::Release);
        }
        let next = memory.word64(8).load(Ordering::Relaxed);
        let mut journal = Journal { memory, used, next };
        journal.next += journal.records()?.len() as u64;
        Ok(journal)
    }

    /// All records, oldest first.
    ///
    /// # Errors
    /// [`Code::Corrupt`] when one is not whole.
    pub(super) fn records(&self) -> Result<Vec<Record>> {
        let mut records = Vec::new();
        let (mut at, mut number) = (HEADER_BYTES, self.memory.word64(8).load(Ordering::Relaxed));
        while at < self.used {
            if at + RECORD_BYTES > self.used {
                return Err(damaged(number, at, "the journal ends in its head"));
            }
            let word = |i: usize| self.memory.word64(at + 8 * i).load(Ordering::Relaxed);
            let (len, slot) = (word(0) as u32 as usize, (word(0) >> 32) as usize);
            let end = at + RECORD_BYTES + len.next_multiple_of(8);
            if len > MESSAGE_BYTES_MAX || end > self.used {
                return Err(damaged(number, at, format!("its message of {len} bytes is cut")));
            }
            if slot >= RING_SLOTS || word(4) >= 1_000_000_000 {
                return Err(damaged(number, at, format!("slot {slot} or time {} is out of bounds", word(4))));
            }
            let mut message = vec![0; len];
            self.memory.load(at + RECORD_BYTES, &mut message);
            let now = Timestamp { sec: word(3) as i64, nsec: word(4) as u32 };
            records.push(Record { number, offset: at, session: word(1), slot, seq: word(2), now, message });
            at = end;
            number += 1;
        }
        Ok(records)
    }

    /// True when the journal has no record.
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

    /// Empties the journal: its records are committed.
    pub(super) fn clear(&mut self) {
        self.used = HEADER_BYTES;
        self.memory.word64(0).store(HEADER_BYTES as u64, Ordering::Release);
        self.memory.word64(8).store(self.next, Ordering::Release);
    }

    /// Continues the numbers behind `mark`, for a new journal over a shard that had another.
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

    /// A new directory in place of a target, removed on drop.
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
        assert!(journal.is_empty() && place.open().records().unwrap().is_empty());
        let now = Timestamp { sec: -3, nsec: 999 };
        for i in 0..100u64 {
            journal.append(7 + i, i as usize % 64, i, now, &vec![i as u8; i as usize]);
        }
        drop(journal);
        let mut next = place.open();
        let records = next.records().unwrap();
        assert_eq!(records.len(), 100);
        let mut offset = HEADER_BYTES;
        for (i, r) in records.iter().enumerate() {
            let expected = Record {
                number: i as u64 + 1,
                offset,
                session: 7 + i as u64,
                slot: i % 64,
                seq: i as u64,
                now,
                message: vec![i as u8; i],
            };
            assert_eq!(*r, expected);
            offset += RECORD_BYTES + i.next_multiple_of(8);
        }
        assert_eq!(next.last(), 100);
        next.clear();
        next.append(1, 0, 1, now, b"x");
        assert_eq!(place.open().records().unwrap()[0].number, 101);
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
        assert_eq!(journal.records().unwrap().len() as u64, n);
        assert!(n > 10);
    }

    #[test]
    fn open_of_a_damaged_journal_is_refused_and_names_the_record() {
        let second = HEADER_BYTES + RECORD_BYTES + 8;
        // The word that is damaged, its new value, and what the error contains.
        let cases = [
            (0, u64::MAX, "bytes in use"),
            (0, BYTES as u64 + 8, "bytes in use"),
            (0, 8, "bytes in use"),
            (0, HEADER_BYTES as u64 + 60, "bytes in use"),
            (8, 0, "bytes in use"),
            (0, HEADER_BYTES as u64 + 64, "record 2 at byte 112"),
            (0, second as u64 + RECORD_BYTES as u64, "record 2 at byte 112"),
            (second, u64::from(u32::MAX), "record 2 at byte 112"),
            (second, 7 | (RING_SLOTS as u64) << 32, "record 2 at byte 112"),
            (second + 32, 1_000_000_000, "record 2 at byte 112"),
        ];
        for (i, (at, value, said)) in cases.into_iter().enumerate() {
            let place = Place::new(&format!("damaged-{i}"));
            let mut journal = place.open();
            for i in 0..3 {
                journal.append(1, 0, i, Timestamp::default(), b"message");
            }
            journal.memory.word64(at).store(value, Ordering::Relaxed);
            let before = std::fs::read(place.0.join(JOURNAL_FILE)).unwrap();
            let directory = std::fs::File::open(&place.0).unwrap();
            let error = Journal::open(directory.as_fd()).expect_err(said);
            assert_eq!(error.code, Code::Corrupt, "{error}");
            assert!(error.to_string().contains(said), "{error}");
            assert_eq!(before, std::fs::read(place.0.join(JOURNAL_FILE)).unwrap(), "the journal is kept");
        }
    }

    #[test]
    fn continue_behind_a_mark_never_gives_an_old_number() {
        let place = Place::new("mark");
        let mut journal = place.open();
        journal.continue_behind(500);
        journal.append(1, 0, 1, Timestamp::default(), b"");
        assert_eq!(place.open().records().unwrap()[0].number, 501);
    }
}
