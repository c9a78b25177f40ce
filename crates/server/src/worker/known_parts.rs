//! The parts of wide directories that a daemon has learnt, in memory that the supervisor keeps over the worker: a
//! request that the last worker sent to a part, and whose answer it did not hear, goes to that part again, which has
//! kept the answer, also when the directory's home has nothing of it any more.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use forebay_ring::{memfd_sealed, Mapping, Seal};
use forebay_types::limits::{WIDE_KNOWN_MAX, WIDTH_MAX};
use forebay_types::{Error, Ino, Parts, Result};

use crate::store::FdStore;

/// The tag of the memory in the supervisor's store.
const TAG: &str = "wide";
/// Words of an entry: how many parts, 0 of none; the directory; the parts.
const WORDS: usize = 2 + WIDTH_MAX;
const MEMORY_BYTES: usize = WIDE_KNOWN_MAX * WORDS * 8;

/// By directory.
#[derive(Debug, Default)]
pub(super) struct KnownParts {
    all: HashMap<Ino, Parts>,
    /// None: nothing outlives this (a pool of one node, tests).
    memory: Option<Mapping>,
    /// Entries that were used.
    used: usize,
}

impl KnownParts {
    /// What the last worker left with the supervisor, taken out of `left`, or new memory that is put there.
    ///
    /// # Errors
    /// No memory; the supervisor is gone.
    pub(super) fn restored(store: &FdStore, left: &mut Vec<(String, Vec<OwnedFd>)>) -> Result<KnownParts> {
        let kept = left.extract_if(.., |(tag, _)| tag == TAG).find_map(|(_, mut fds)| fds.pop());
        if let Some(fd) = kept {
            return KnownParts::open(fd.as_fd());
        }
        let what = "cannot keep which parts wide directories have";
        let (fd, mapping) =
            memfd_sealed(c"forebay-wide", MEMORY_BYTES, Seal::Size).map_err(|e| Error::io(what, &e))?;
        store.put(TAG, &[fd.as_fd()])?;
        Ok(KnownParts { memory: Some(mapping), ..KnownParts::default() })
    }

    fn open(fd: BorrowedFd<'_>) -> Result<KnownParts> {
        let what = "cannot see which parts wide directories have";
        let memory = Mapping::new(fd, MEMORY_BYTES, true).map_err(|e| Error::io(what, &e))?;
        let mut known = KnownParts::default();
        for entry in 0..WIDE_KNOWN_MAX {
            let load = |i: usize| memory.word64((entry * WORDS + i) * 8).load(Ordering::Acquire);
            let count = load(0) as usize;
            // They follow each other. What nobody has used takes no memory until it is looked at.
            if count == 0 {
                break;
            }
            known.used = entry + 1;
            let inos: Vec<Ino> = (0..count.min(WIDTH_MAX)).map(|i| Ino(load(2 + i))).collect();
            if let Ok(parts) = Parts::new(Ino(load(1)), &inos) {
                known.all.insert(parts.of, parts);
            }
        }
        Ok(KnownParts { memory: Some(memory), ..known })
    }

    /// Forgets all, but for the next worker; what it was.
    pub(super) fn take(&mut self) -> HashMap<Ino, Parts> {
        std::mem::take(&mut self.all)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn get(&self, directory: Ino) -> Option<Parts> {
        self.all.get(&directory).copied()
    }

    /// Learns the parts of a directory; for want of room all others are forgotten.
    pub(super) fn insert(&mut self, parts: Parts) {
        if self.all.insert(parts.of, parts) == Some(parts) {
            return;
        }
        if self.used == WIDE_KNOWN_MAX {
            self.retain(|known| *known == parts);
            return;
        }
        self.write(&parts);
    }

    /// Forgets those of which `keeps` is false.
    pub(super) fn retain(&mut self, keeps: impl Fn(&Parts) -> bool) {
        let before = self.all.len();
        self.all.retain(|_, parts| keeps(parts));
        if self.all.len() == before && self.used < WIDE_KNOWN_MAX {
            return;
        }
        for entry in 0..self.used {
            self.set(entry, 0, 0);
        }
        self.used = 0;
        let all: Vec<Parts> = self.all.values().copied().collect();
        for parts in all {
            self.write(&parts);
        }
    }

    fn write(&mut self, parts: &Parts) {
        let (entry, inos) = (self.used, parts.as_slice());
        self.used += 1;
        self.set(entry, 1, parts.of.0);
        for (i, ino) in inos.iter().enumerate() {
            self.set(entry, 2 + i, ino.0);
        }
        // Last: the entry is there with this.
        self.set(entry, 0, inos.len() as u64);
    }

    fn set(&self, entry: usize, index: usize, value: u64) {
        if let Some(memory) = &self.memory {
            memory.word64((entry * WORDS + index) * 8).store(value, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::NodeId;

    fn parts(counter: u64, width: u16) -> Parts {
        let inos: Vec<Ino> = (1..=width).map(|node| Ino::part(NodeId(node), counter)).collect();
        Parts::new(Ino::new(NodeId(9), counter), &inos).unwrap()
    }

    #[test]
    fn next_worker_knows_what_was_learnt_and_not_forgotten() {
        let (ours, theirs) = crate::store::pair().unwrap();
        let mut known = KnownParts::restored(&FdStore::new(ours), &mut Vec::new()).unwrap();
        let message = crate::store::receive(theirs.as_fd(), rustix::net::RecvFlags::empty()).unwrap();
        let Some(crate::store::Message::Put(tag, fds)) = message else { panic!("{message:?}") };
        let memory = fds[0].try_clone().unwrap();
        let worker = || KnownParts::open(memory.as_fd()).unwrap();
        for (counter, width) in [(1, 2), (2, 16), (3, 3)] {
            known.insert(parts(counter, width));
            known.insert(parts(counter, width));
        }
        assert_eq!(known.used, 3, "each once");
        assert!(worker().all == known.all && known.all.len() == 3);
        known.retain(|parts| parts.as_slice().len() != 16);
        let mut next = worker();
        assert!(next.all == known.all && next.get(Ino::new(NodeId(9), 2)).is_none());
        next.insert(parts(4, 5));
        assert_eq!(worker().get(Ino::new(NodeId(9), 4)), Some(parts(4, 5)));
        // The supervisor hands it to the next one.
        let (ours, _theirs) = crate::store::pair().unwrap();
        let mut left = vec![(tag, fds)];
        assert_eq!(KnownParts::restored(&FdStore::new(ours), &mut left).unwrap().all, next.all);
        assert!(left.is_empty());
        // One more than there is room for makes room.
        for counter in 10..10 + WIDE_KNOWN_MAX as u64 {
            next.insert(parts(counter, 2));
        }
        let last = parts(10 + WIDE_KNOWN_MAX as u64 - 1, 2);
        assert!(next.all.len() <= WIDE_KNOWN_MAX && next.get(last.of) == Some(last));
        assert_eq!(worker().all, next.all);
    }
}
