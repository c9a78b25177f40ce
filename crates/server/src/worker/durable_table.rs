//! Durable tables: entries of a fixed size in memory that outlives the worker.
//!
//! A durable memory is a memfd whose descriptor is in the supervisor's descriptor store, so the next worker reads what
//! the last one had written when it was killed. The header has the memory's version and the shapes of its tables.
//! Memory with another header or of another size is not read: new memory replaces it, and that is logged.
//!
//! ```text
//! header: magic │ version │ the shape of each table │ how many entries of each table have ever been used
//! tables: entry, entry, …         entry: state │ other words
//! ```
//! An entry exists if its state is not 0. The state is stored last: an entry whose writer was killed does not exist.
//! The owner of a table checks what it finds in the entries of an earlier worker, and removes entries without sense.
//!
//! A table has one owner, which calls it under its own mutex or from one thread. Without a memory (simulations, tests)
//! a table only counts its entries. Tests: below, and those of the owners (`known_parts.rs`, `network/reply_cache.rs`,
//! `network/appended.rs`, `network/groups.rs`).

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{compiler_fence, Ordering};
use std::sync::Arc;

use forebay_ring::{memfd_sealed, Mapping, Seal};
use forebay_types::{Error, Result};

use crate::store::FdStore;

/// The first word of a memory. It changes with the header.
const MAGIC: u64 = u64::from_le_bytes(*b"forebay1");
/// The state of an entry that is free or being written.
const FREE: u64 = 0;

/// What a durable memory consists of.
#[derive(Debug)]
pub(super) struct Format {
    /// Its tag in the descriptor store.
    pub(super) tag: &'static str,
    /// What the memory is, for errors and the log.
    pub(super) what: &'static str,
    /// Changes when a word gets another meaning.
    pub(super) version: u64,
    /// How many entries each table has, and how many words an entry has.
    pub(super) tables: &'static [(usize, usize)],
}

impl Format {
    /// The words with which every memory of this format begins.
    fn header(&self) -> impl Iterator<Item = u64> {
        let shapes = self.tables.iter().map(|(entries, words)| (entries << 32 | words) as u64);
        [MAGIC, self.version].into_iter().chain(shapes)
    }

    /// The word at which a table begins; for the index behind the last table, the number of words.
    fn begin(&self, table: usize) -> usize {
        let header = (2 + 2 * self.tables.len()).next_multiple_of(8);
        header + self.tables[..table].iter().map(|(entries, words)| entries * words).sum::<usize>()
    }

    fn bytes(&self) -> usize {
        8 * self.begin(self.tables.len())
    }

    fn make(&self) -> io::Result<(OwnedFd, Mapping)> {
        let name = CString::new(format!("forebay-{}", self.tag))?;
        let (fd, mapping) = memfd_sealed(&name, self.bytes(), Seal::Size)?;
        for (i, word) in self.header().enumerate() {
            mapping.word64(8 * i).store(word, Ordering::Relaxed);
        }
        Ok((fd, mapping))
    }

    /// Maps memory that an earlier worker left; none if it has another format.
    fn map(&self, fd: BorrowedFd<'_>) -> io::Result<Option<Mapping>> {
        // Beyond the end of a memfd an access to its mapping raises SIGBUS.
        if rustix::fs::fstat(fd)?.st_size != self.bytes() as i64 {
            return Ok(None);
        }
        let mapping = Mapping::new(fd, self.bytes(), true)?;
        let mut header = self.header().enumerate();
        Ok(header.all(|(i, word)| mapping.word64(8 * i).load(Ordering::Acquire) == word).then_some(mapping))
    }
}

/// A durable memory, or none.
#[derive(Clone, Debug)]
pub(super) struct DurableMemory {
    format: &'static Format,
    mapping: Option<Arc<Mapping>>,
}

impl DurableMemory {
    /// No memory: nothing outlives the tables.
    pub(super) fn none(format: &'static Format) -> DurableMemory {
        DurableMemory { format, mapping: None }
    }

    /// The memory that the last worker left with the supervisor, taken out of `left`, or new memory that is put there.
    ///
    /// # Errors
    /// No memory; the supervisor is gone.
    pub(super) fn restored(
        format: &'static Format,
        store: &FdStore,
        left: &mut Vec<(String, Vec<OwnedFd>)>,
    ) -> Result<DurableMemory> {
        let Format { tag, what, .. } = format;
        let failed = |e: io::Error| Error::io(format!("cannot keep {what} for the next worker"), &e);
        let memory = |mapping| DurableMemory { format, mapping: Some(Arc::new(mapping)) };
        let kept = left.extract_if(.., |(its, _)| its == tag).find_map(|(_, mut fds)| fds.pop());
        if let Some(fd) = kept {
            if let Some(mapping) = format.map(fd.as_fd()).map_err(failed)? {
                return Ok(memory(mapping));
            }
            tracing::warn!(
                "the descriptor store holds {tag:?} in the format of another version: {what} is lost"
            );
        }
        let (fd, mapping) = format.make().map_err(failed)?;
        store.put(tag, &[fd.as_fd()])?;
        Ok(memory(mapping))
    }

    #[cfg(test)]
    pub(super) fn new(format: &'static Format) -> DurableMemory {
        DurableMemory { format, mapping: Some(Arc::new(format.make().unwrap().1)) }
    }

    /// The table of this index, and the entries in it with their own indices.
    pub(super) fn table<const WORDS: usize>(
        &self,
        index: usize,
    ) -> (DurableTable<WORDS>, Vec<(usize, [u64; WORDS])>) {
        let (entries, words) = self.format.tables[index];
        assert_eq!(words, WORDS);
        let (begin, used_at) = (self.format.begin(index), 2 + self.format.tables.len() + index);
        let mapping = self.mapping.clone();
        let mut table = DurableTable { mapping, begin, used_at, entries, used: 0, free: Vec::new() };
        let Some(mapping) = &self.mapping else { return (table, Vec::new()) };
        let load = |word: usize| mapping.word64(8 * word).load(Ordering::Acquire);
        // A page that was never used takes memory once it is read.
        table.used = load(used_at).min(entries as u64) as usize;
        let entry = |entry| (entry, std::array::from_fn(|i| load(table.at(entry, i))));
        let mut left: Vec<(usize, [u64; WORDS])> = (0..table.used).rev().map(entry).collect();
        table.free = left.extract_if(.., |(_, words)| words[0] == FREE).map(|(entry, _)| entry).collect();
        (table, left)
    }
}

/// A durable table. Word 0 of an entry is its state.
#[derive(Debug)]
pub(super) struct DurableTable<const WORDS: usize> {
    mapping: Option<Arc<Mapping>>,
    /// Where the entries begin, and where `used` is stored, in words.
    begin: usize,
    used_at: usize,
    entries: usize,
    /// No entry from this one on has ever been used.
    used: usize,
    /// The free ones of those before.
    free: Vec<usize>,
}

impl<const WORDS: usize> DurableTable<WORDS> {
    /// Where a word of an entry is.
    fn at(&self, entry: usize, index: usize) -> usize {
        assert!(entry < self.used && index < WORDS);
        self.begin + entry * WORDS + index
    }

    fn store(&self, at: usize, value: u64, ordering: Ordering) {
        if let Some(mapping) = &self.mapping {
            mapping.word64(8 * at).store(value, ordering);
        }
    }

    /// Takes a free entry, for [`DurableTable::write`]; none in a full table.
    pub(super) fn take_free(&mut self) -> Option<usize> {
        if self.free.is_empty() && self.used < self.entries {
            self.free.push(self.used);
            self.used += 1;
            self.store(self.used_at, self.used as u64, Ordering::SeqCst);
        }
        self.free.pop()
    }

    /// Writes an entry, whatever was in it. A worker that is killed meanwhile leaves the entry free.
    pub(super) fn write(&self, entry: usize, words: [u64; WORDS]) {
        // No state while the words are of two entries.
        self.set(entry, 0, FREE);
        compiler_fence(Ordering::SeqCst);
        for (i, word) in words.into_iter().enumerate().skip(1) {
            self.store(self.at(entry, i), word, Ordering::Relaxed);
        }
        self.set(entry, 0, words[0]);
    }

    /// Writes a free entry; its index, or none in a full table.
    pub(super) fn insert(&mut self, words: [u64; WORDS]) -> Option<usize> {
        let entry = self.take_free()?;
        self.write(entry, words);
        Some(entry)
    }

    /// Replaces one word of an entry. The next worker finds such changes in their order.
    pub(super) fn set(&self, entry: usize, index: usize, value: u64) {
        self.store(self.at(entry, index), value, Ordering::SeqCst);
    }

    /// Frees an entry.
    pub(super) fn remove(&mut self, entry: usize) {
        self.set(entry, 0, FREE);
        self.free.push(entry);
    }

    /// How many entries are free.
    #[cfg(test)]
    pub(super) fn free_count(&self) -> usize {
        self.entries - self.used + self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMAT: Format = Format { tag: "test", what: "a test", version: 3, tables: &[(1, 3), (4, 4)] };

    /// The second table as the next worker finds it, and its entries in their order.
    fn found(memory: &DurableMemory) -> (DurableTable<4>, Vec<(usize, [u64; 4])>) {
        let (table, mut left) = memory.table(1);
        left.reverse();
        (table, left)
    }

    #[test]
    fn next_worker_finds_what_was_written_and_not_removed() {
        let memory = DurableMemory::new(&FORMAT);
        let ((mut other, _), (mut table, left)) = (memory.table::<3>(0), found(&memory));
        assert!(left.is_empty() && table.free_count() == 4);
        other.insert([u64::MAX; 3]).unwrap();
        assert_eq!([1, 2, 3, 4, 5].map(|n| table.insert([n; 4])), [Some(0), Some(1), Some(2), Some(3), None]);
        assert_eq!(table.take_free(), None, "it is full");
        table.remove(1);
        table.remove(2);
        table.write(3, [6, 7, 8, 9]);
        table.set(0, 3, 10);
        let (mut next, left) = found(&memory);
        assert_eq!(left, [(0, [1, 1, 1, 10]), (3, [6, 7, 8, 9])]);
        assert_eq!((next.free_count(), next.insert([11; 4])), (2, Some(1)));
        assert_eq!(found(&memory).1[1], (1, [11; 4]));
        assert_eq!(memory.table::<3>(0).1, [(0, [u64::MAX; 3])]);
    }

    #[test]
    fn table_without_memory_has_the_same_bounds() {
        let (mut table, left) = found(&DurableMemory::none(&FORMAT));
        assert!(left.is_empty());
        assert_eq!([1; 5].map(|n| table.insert([n; 4])), [Some(0), Some(1), Some(2), Some(3), None]);
        table.remove(2);
        assert_eq!((table.insert([1; 4]), table.free_count()), (Some(2), 0));
    }

    #[test]
    fn entry_whose_writer_was_killed_is_free() {
        let memory = DurableMemory::new(&FORMAT);
        let (mut table, _) = found(&memory);
        table.insert([1; 4]).unwrap();
        // Killed when it had taken an entry, when it had written the words of another, and those of the first anew.
        table.take_free().unwrap();
        let entry = table.take_free().unwrap();
        (1..4).for_each(|i| table.set(entry, i, 2));
        table.set(0, 0, FREE);
        let (mut next, left) = found(&memory);
        assert_eq!((left, next.free_count()), (vec![], 4));
        assert_eq!(next.insert([4, 5, 6, 7]), Some(0));
        assert_eq!(found(&memory).1, [(0, [4, 5, 6, 7])]);
    }

    #[test]
    fn garbage_stays_within_the_bounds_of_its_table() {
        let memory = DurableMemory::new(&FORMAT);
        let mapping = memory.mapping.as_ref().unwrap();
        (4..FORMAT.bytes() / 8).for_each(|word| mapping.word64(8 * word).store(u64::MAX, Ordering::Relaxed));
        let (mut table, left) = found(&memory);
        assert_eq!(left.len(), 4, "not as many as the header says");
        left.iter().for_each(|(entry, _)| table.remove(*entry));
        assert_eq!((found(&memory).1, memory.table::<3>(0).1.len()), (vec![], 1));
    }

    /// How many entries a worker of one format finds in the memory that a worker of another format has left.
    fn taken_over(left: &'static Format, format: &'static Format) -> usize {
        let (ours, theirs) = crate::store::pair().unwrap();
        let store = FdStore::new(ours);
        let first = DurableMemory::restored(left, &store, &mut Vec::new()).unwrap();
        first.table::<4>(1).0.insert([1; 4]).unwrap();
        let put = || match crate::store::receive(theirs.as_fd(), rustix::net::RecvFlags::DONTWAIT) {
            Ok(Some(crate::store::Message::Put(tag, fds))) => Some((tag, fds)),
            _ => None,
        };
        let mut kept = vec![("else".into(), Vec::new()), put().unwrap()];
        let next = DurableMemory::restored(format, &store, &mut kept).unwrap();
        assert_eq!(kept.len(), 1, "it is taken out");
        let entries = found(&next).1.len();
        assert_eq!(put().map(|(tag, _)| tag).as_deref(), (entries == 0).then_some("test"));
        entries
    }

    #[test]
    fn memory_of_another_version_layout_or_size_is_replaced() {
        const NEWER: Format = Format { version: 4, ..FORMAT };
        const LONGER: Format = Format { tables: &[(1, 3), (5, 4)], ..FORMAT };
        const SAME_SIZE: Format = Format { tables: &[(3, 1), (4, 4)], ..FORMAT };
        const MORE: Format = Format { tables: &[(1, 3), (4, 4), (1, 1)], ..FORMAT };
        assert_eq!(SAME_SIZE.bytes(), FORMAT.bytes());
        for other in [&NEWER, &LONGER, &SAME_SIZE, &MORE] {
            assert_eq!((taken_over(other, &FORMAT), taken_over(&FORMAT, other)), (0, 0));
        }
        assert_eq!(taken_over(&FORMAT, &FORMAT), 1);
    }
}
