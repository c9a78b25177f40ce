//! The inodes that the kernel knows (those with a FUSE lookup count above 0): for each its count and its open state.
//!
//! The kernel may send requests for an inode until FORGET has returned its whole lookup count, also after the inode
//! lost its last name: through an open file, a working directory, an O_PATH descriptor. The attributes of such an
//! inode are kept here, because the shard has deleted them.
//!
//! Locks: one for each of [`PARTS`] parts, held for a few instructions and never across a request to the pool.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_types::Timestamp;

use crate::opened::Opened;

const PARTS: usize = 64;

/// Inode numbers count up, so their low bits are spread by a multiplication.
#[derive(Default)]
struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, n: u64) {
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
        self.0 = (self.0 ^ n).wrapping_mul(ODD).rotate_left(29);
    }
}

/// Mode, owner and group, as last seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl Seen {
    pub(crate) fn of(st: &libc::stat) -> Seen {
        Seen { mode: st.st_mode, uid: st.st_uid, gid: st.st_gid }
    }
}

impl From<Seen> for crate::rights::Owned {
    fn from(Seen { mode, uid, gid }: Seen) -> Self {
        Self { mode, uid, gid }
    }
}

/// Where a directory is: the node of its parent, and its name there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) parent: u64,
    pub(crate) name: Box<[u8]>,
}

#[derive(Debug, Default)]
struct Node {
    /// FUSE lookup count: references that the kernel has not returned with FORGET.
    lookup_count: u64,
    seen: Seen,
    /// Opens that were not released yet.
    opens: u32,
    opened: Option<Arc<Opened>>,
    /// The inode was opened for reading and writing. A writable mapping may exist, even after the last close.
    written: bool,
    /// The ctime with which the inode was found to have no file capabilities.
    incapable_since: Option<Timestamp>,
    /// For a directory in a pool of several nodes: the place that the kernel was last given.
    place: Option<Box<Place>>,
}

type Part = HashMap<u64, Node, BuildHasherDefault<NumberHasher>>;

/// All inodes that the kernel knows.
pub(crate) struct Nodes {
    parts: [Mutex<Part>; PARTS],
}

impl std::fmt::Debug for Nodes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nodes").finish_non_exhaustive()
    }
}

impl Nodes {
    pub(crate) fn new() -> Nodes {
        Nodes { parts: std::array::from_fn(|_| Mutex::default()) }
    }

    fn part(&self, ino: u64) -> MutexGuard<'_, Part> {
        self.parts[ino as usize % PARTS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a reference to an inode that a reply is about to give to the kernel.
    pub(crate) fn add_lookup(&self, ino: u64, seen: Seen) {
        let mut part = self.part(ino);
        let node = part.entry(ino).or_default();
        node.lookup_count += 1;
        node.seen = seen;
    }

    /// Takes back `count` references that the kernel returned.
    pub(crate) fn forget(&self, ino: u64, count: u64) {
        let gone = {
            let mut part = self.part(ino);
            let Some(node) = part.get_mut(&ino) else { return };
            node.lookup_count = node.lookup_count.saturating_sub(count);
            if node.lookup_count == 0 && node.opens == 0 {
                part.remove(&ino)
            } else {
                None
            }
        };
        drop(gone);
    }

    /// Records the attributes of an inode, if the kernel knows it.
    pub(crate) fn note(&self, ino: u64, seen: Seen) {
        if let Some(node) = self.part(ino).get_mut(&ino) {
            node.seen = seen;
        }
    }

    /// The attributes of an inode as last recorded.
    pub(crate) fn seen(&self, ino: u64) -> Option<Seen> {
        self.part(ino).get(&ino).map(|node| node.seen)
    }

    /// The open state of an inode, if it is open.
    pub(crate) fn opened(&self, ino: u64) -> Option<Arc<Opened>> {
        self.part(ino).get(&ino).and_then(|node| node.opened.clone())
    }

    /// Counts an open, which [`Nodes::close`] ends. All opens of an inode share one [`Opened`].
    pub(crate) fn open(&self, ino: u64) -> Arc<Opened> {
        let mut part = self.part(ino);
        let node = part.entry(ino).or_default();
        node.opens += 1;
        Arc::clone(node.opened.get_or_insert_with(|| Arc::new(Opened::new(ino))))
    }

    /// Ends an open. Returns true for the last one: the [`Opened`] is then dropped as soon as no thread uses it.
    pub(crate) fn close(&self, ino: u64) -> bool {
        let last = {
            let mut part = self.part(ino);
            let Some(node) = part.get_mut(&ino) else { return false };
            node.opens = node.opens.saturating_sub(1);
            if node.opens > 0 {
                return false;
            }
            let last = node.opened.take();
            if node.lookup_count == 0 {
                part.remove(&ino);
            }
            last
        };
        drop(last);
        true
    }

    /// Records that an inode was opened for reading and writing. Returns true the first time.
    pub(crate) fn note_writer(&self, ino: u64) -> bool {
        match self.part(ino).get_mut(&ino) {
            Some(node) => !std::mem::replace(&mut node.written, true),
            None => false,
        }
    }

    /// True when an inode was opened for reading and writing. Stores through a mapping may then change its times
    /// without the knowledge of the kernel's FUSE code, also after the last close.
    pub(crate) fn was_written(&self, ino: u64) -> bool {
        self.part(ino).get(&ino).is_some_and(|node| node.written)
    }

    /// Records that no mapping can store to an inode any more. Returns false if the inode is open again.
    pub(crate) fn forget_writer(&self, ino: u64) -> bool {
        match self.part(ino).get_mut(&ino) {
            Some(node) if node.opens == 0 => {
                node.written = false;
                true
            }
            Some(_) => false,
            None => true,
        }
    }

    /// True when an inode is open.
    pub(crate) fn is_open(&self, ino: u64) -> bool {
        self.part(ino).get(&ino).is_some_and(|node| node.opens > 0)
    }

    /// Records that an inode has no file capabilities; `changed` is its ctime.
    pub(crate) fn note_incapable(&self, ino: u64, changed: Timestamp) {
        if let Some(node) = self.part(ino).get_mut(&ino) {
            node.incapable_since = Some(changed);
        }
    }

    /// True when an inode was recorded to have no file capabilities, and its ctime has not changed since.
    pub(crate) fn is_incapable(&self, ino: u64, changed: Timestamp) -> bool {
        self.part(ino).get(&ino).is_some_and(|node| node.incapable_since == Some(changed))
    }

    /// Records the place of a directory that the kernel knows. Returns the previous place if it was another one.
    pub(crate) fn place(&self, ino: u64, place: Place) -> Option<Place> {
        let mut part = self.part(ino);
        let node = part.get_mut(&ino)?;
        if node.place.as_deref() == Some(&place) {
            return None;
        }
        node.place.replace(Box::new(place)).map(|before| *before)
    }

    /// True when the kernel was last given this place for some directory.
    pub(crate) fn is_place(&self, place: &Place) -> bool {
        self.parts.iter().any(|part| {
            let part = part.lock().unwrap_or_else(PoisonError::into_inner);
            part.values().any(|node| node.place.as_deref() == Some(place))
        })
    }

    /// The numbers of all inodes for which `which` returns true.
    pub(crate) fn numbers(&self, which: impl Fn(Seen) -> bool) -> Vec<u64> {
        let mut all = Vec::new();
        for part in &self.parts {
            let part = part.lock().unwrap_or_else(PoisonError::into_inner);
            all.extend(part.iter().filter(|(_, node)| which(node.seen)).map(|(ino, _)| *ino));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forget_of_every_lookup_forgets_what_was_seen() {
        let nodes = Nodes::new();
        let seen = Seen { mode: 0o100_644, uid: 1, gid: 2 };
        nodes.add_lookup(7, seen);
        nodes.add_lookup(7, seen);
        nodes.forget(7, 1);
        assert_eq!(nodes.seen(7), Some(seen));
        nodes.forget(7, 1);
        assert_eq!(nodes.seen(7), None);
    }

    #[test]
    fn place_of_a_directory_that_moved_is_told_once() {
        let nodes = Nodes::new();
        let place = |parent, name: &[u8]| Place { parent, name: name.into() };
        assert_eq!(nodes.place(7, place(1, b"a")), None, "the kernel does not know it");
        nodes.add_lookup(7, Seen::default());
        assert_eq!(nodes.place(7, place(1, b"a")), None);
        assert_eq!(nodes.place(7, place(1, b"a")), None);
        assert_eq!(nodes.place(7, place(2, b"a")), Some(place(1, b"a")));
        assert!(nodes.is_place(&place(2, b"a")) && !nodes.is_place(&place(1, b"a")));
        nodes.forget(7, 1);
        assert!(!nodes.is_place(&place(2, b"a")));
    }

    #[test]
    fn writer_is_forgotten_only_while_nothing_is_open() {
        let nodes = Nodes::new();
        nodes.add_lookup(7, Seen::default());
        nodes.open(7);
        assert!(nodes.note_writer(7) && !nodes.note_writer(7));
        assert!(!nodes.forget_writer(7) && nodes.was_written(7));
        nodes.close(7);
        assert!(nodes.forget_writer(7) && !nodes.was_written(7));
        assert!(nodes.note_writer(7), "the kernel is told again");
    }

    #[test]
    fn close_of_the_last_open_drops_what_was_open() {
        let nodes = Nodes::new();
        nodes.add_lookup(7, Seen::default());
        let one = nodes.open(7);
        let two = nodes.open(7);
        assert!(Arc::ptr_eq(&one, &two));
        nodes.close(7);
        assert!(nodes.opened(7).is_some());
        nodes.close(7);
        assert!(nodes.opened(7).is_none());
        let three = nodes.open(7);
        assert!(!Arc::ptr_eq(&one, &three), "opened anew");
    }

    #[test]
    fn forget_of_an_open_inode_waits_for_its_close() {
        let nodes = Nodes::new();
        nodes.add_lookup(7, Seen::default());
        nodes.open(7);
        nodes.forget(7, 1);
        assert!(nodes.opened(7).is_some());
        nodes.close(7);
        assert!(nodes.seen(7).is_none());
    }
}
