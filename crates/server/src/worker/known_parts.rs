//! The known parts of wide directories, in a durable table (`durable_table.rs`). If the last worker sent a request to a
//! part and did not receive the answer, this worker sends it to the same part again, whose reply cache has the answer.
//! This also holds when the directory's home no longer has the directory.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use forebay_types::limits::{WIDE_KNOWN_MAX, WIDTH_MAX};
use forebay_types::{Ino, Parts, Result};

use super::durable_table::{DurableMemory, DurableTable, Format};
use crate::store::FdStore;

/// Words of an entry: the number of parts, the directory, its parts.
const WORDS: usize = 2 + WIDTH_MAX;
const FORMAT: Format = Format {
    tag: "wide",
    what: "the parts of wide directories",
    version: 1,
    tables: &[(WIDE_KNOWN_MAX, WORDS)],
};

/// The known parts, by directory.
#[derive(Debug)]
pub(super) struct KnownParts {
    all: HashMap<Ino, Parts>,
    table: DurableTable<WORDS>,
    /// The entry of each directory, also of directories that [`KnownParts::take`] removed from `all`.
    entries: HashMap<Ino, usize>,
}

impl Default for KnownParts {
    fn default() -> KnownParts {
        KnownParts::open(&DurableMemory::none(&FORMAT))
    }
}

impl KnownParts {
    /// Opens the memory that the last worker left with the supervisor, taken out of `left`, or makes new memory and
    /// stores it there.
    ///
    /// # Errors
    /// When there is no memory, or the supervisor is gone.
    pub(super) fn restored(store: &FdStore, left: &mut Vec<(String, Vec<OwnedFd>)>) -> Result<KnownParts> {
        Ok(KnownParts::open(&DurableMemory::restored(&FORMAT, store, left)?))
    }

    fn open(memory: &DurableMemory) -> KnownParts {
        let (table, left) = memory.table(0);
        let mut known = KnownParts { all: HashMap::new(), table, entries: HashMap::new() };
        for (entry, [count, of, inos @ ..]) in left {
            let parts = inos.map(Ino).get(..count as usize).and_then(|inos| Parts::new(Ino(of), inos).ok());
            match parts {
                Some(parts) if !known.all.contains_key(&parts.of) => {
                    known.all.insert(parts.of, parts);
                    known.entries.insert(parts.of, entry);
                }
                _ => known.table.remove(entry),
            }
        }
        known
    }

    /// Removes and returns all entries. They stay in the table for the next worker.
    pub(super) fn take(&mut self) -> HashMap<Ino, Parts> {
        std::mem::take(&mut self.all)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn get(&self, directory: Ino) -> Option<Parts> {
        self.all.get(&directory).copied()
    }

    /// Stores the parts of a directory. If the table is full, all other entries are removed.
    pub(super) fn insert(&mut self, parts: Parts) {
        if self.all.insert(parts.of, parts) == Some(parts) {
            return;
        }
        let mut words = [0; WORDS];
        (words[0], words[1]) = (parts.as_slice().len() as u64, parts.of.0);
        words[2..].iter_mut().zip(parts.as_slice()).for_each(|(word, ino)| *word = ino.0);
        let entry = self.table.insert(words).or_else(|| {
            self.all.retain(|of, _| *of == parts.of);
            self.entries.drain().for_each(|(_, entry)| self.table.remove(entry));
            self.table.insert(words)
        });
        if let Some(before) = entry.and_then(|entry| self.entries.insert(parts.of, entry)) {
            self.table.remove(before);
        }
    }

    /// Removes the entries for which `keeps` is false.
    pub(super) fn retain(&mut self, keeps: impl Fn(&Parts) -> bool) {
        for (of, _) in self.all.extract_if(|_, parts| !keeps(parts)) {
            if let Some(entry) = self.entries.remove(&of) {
                self.table.remove(entry);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::NodeId;
    use std::os::fd::AsFd;

    fn parts(counter: u64, width: u16) -> Parts {
        let inos: Vec<Ino> = (1..=width).map(|node| Ino::part(NodeId(node), counter)).collect();
        Parts::new(Ino::new(NodeId(9), counter), &inos).unwrap()
    }

    #[test]
    fn next_worker_knows_what_was_learnt_and_not_forgotten() {
        let (ours, theirs) = crate::store::pair().unwrap();
        let store = FdStore::new(ours);
        let mut known = KnownParts::restored(&store, &mut Vec::new()).unwrap();
        let message = crate::store::receive(theirs.as_fd(), rustix::net::RecvFlags::empty()).unwrap();
        let Some(crate::store::Message::Put(tag, fds)) = message else { panic!("{message:?}") };
        // The supervisor passes the memory to the next worker.
        let worker = || {
            let mut left = vec![(tag.clone(), vec![fds[0].try_clone().unwrap()])];
            let next = KnownParts::restored(&store, &mut left).unwrap();
            assert!(left.is_empty());
            next
        };
        for (counter, width) in [(1, 2), (2, 16), (3, 3)] {
            known.insert(parts(counter, width));
            known.insert(parts(counter, width));
        }
        assert_eq!(known.table.free_count(), WIDE_KNOWN_MAX - 3, "each once");
        assert!(worker().all == known.all && known.all.len() == 3);
        known.retain(|parts| parts.as_slice().len() != 16);
        let mut next = worker();
        assert!(next.all == known.all && next.get(Ino::new(NodeId(9), 2)).is_none());
        next.insert(parts(4, 5));
        assert_eq!(worker().get(Ino::new(NodeId(9), 4)), Some(parts(4, 5)));
        // The next worker finds the entries that `take` removed. An entry that is stored again, with the same or other
        // parts, exists once.
        let mut again = worker();
        again.take();
        again.insert(parts(1, 2));
        let others = Parts::new(parts(3, 3).of, parts(5, 2).as_slice()).unwrap();
        again.insert(others);
        next = worker();
        assert_eq!((next.all.len(), next.table.free_count()), (3, WIDE_KNOWN_MAX - 3));
        assert_eq!((next.get(others.of), next.get(parts(4, 5).of)), (Some(others), Some(parts(4, 5))));
        // An entry beyond the table's size makes room for itself.
        for counter in 10..10 + WIDE_KNOWN_MAX as u64 {
            next.insert(parts(counter, 2));
        }
        let last = parts(10 + WIDE_KNOWN_MAX as u64 - 1, 2);
        assert!(next.all.len() <= WIDE_KNOWN_MAX && next.get(last.of) == Some(last));
        assert_eq!(worker().all, next.all);
    }

    #[test]
    fn entry_that_makes_no_sense_is_dropped() {
        let memory = DurableMemory::new(&FORMAT);
        let mut known = KnownParts::open(&memory);
        known.insert(parts(1, 2));
        known.insert(parts(2, 16));
        let (mut table, left) = memory.table::<WORDS>(0);
        let (_, [_, of, inos @ ..]) = left.into_iter().find(|(_, words)| words[0] == 2).unwrap();
        // Too many parts, too few, parts of no directory, one directory twice.
        for (count, of) in [(u64::MAX, of), (17, of), (1, of), (2, u64::MAX), (2, of)] {
            let mut words = [0; WORDS];
            (words[0], words[1]) = (count, of);
            words[2..].copy_from_slice(&inos);
            table.insert(words).unwrap();
        }
        let next = KnownParts::open(&memory);
        assert_eq!((next.all, next.table.free_count()), (known.all, WIDE_KNOWN_MAX - 2));
    }
}
