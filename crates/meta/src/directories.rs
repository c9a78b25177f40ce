//! Directories in memory: the decoded inode records of directories in use, and their pending attributes.
//!
//! A create changes its parent's size and times. If each create rewrote the parent's record, LMDB would copy one more
//! path of its tree in every transaction. So for the [`PENDING_MAX`] directories that changed last these attributes are
//! pending: they are written to the ledger, and to the record only when another directory takes the place in the
//! ledger. A pending directory is always in memory, and directories in memory are always up to date: every read of an
//! inode that may be a directory looks here first.
//!
//! A slot number stays valid until [`Directories::trim`], which is called between requests.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use forebay_types::{Ino, Timestamp};

use crate::record::{Inode, Pending, PENDING_MAX};

/// Directories that are kept in memory besides those that are pending or changed.
const KEPT_MAX: usize = 4096;

/// A directory in memory.
#[derive(Debug)]
pub(crate) struct Directory {
    /// Its inode, always up to date.
    pub(crate) inode: Inode,
    /// Its attributes are in the ledger, as committed or from the next commit on. The record may be older.
    pending: bool,
    /// Size, links or times have changed since the last commit.
    changed: bool,
    /// Other attributes have changed too, so the record must be written.
    rewrite_record: bool,
    /// Time of the last change, to find the pending directory that was idle longest.
    used: u64,
    /// Whether its backing store may have anything in it, as far as the shard knows. None before it was looked at. True
    /// stays, also when all of it was removed.
    has_places: Option<bool>,
    /// It was created since the shard was opened, and no mover has begun anything in it.
    is_untouched: bool,
}

/// All directories in memory.
#[derive(Debug, Default)]
pub(crate) struct Directories {
    slots: Vec<Directory>,
    index: HashMap<u64, usize, BuildHasherDefault<InoHasher>>,
    changed: Vec<usize>,
    pending: Vec<usize>,
    removed: usize,
    clock: u64,
    last: (u64, usize),
}

/// A hash for inode numbers. They are counters, so one multiplication distributes them.
#[derive(Default)]
pub(crate) struct InoHasher(u64);

impl Hasher for InoHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.write_u64(*b as u64);
        }
    }

    fn write_u64(&mut self, v: u64) {
        let mixed = (self.0 ^ v).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ mixed >> 32;
    }
}

impl Directories {
    /// The slot of a directory that is in memory.
    #[inline]
    pub(crate) fn find(&mut self, ino: Ino) -> Option<usize> {
        if self.last.0 == ino.0 {
            return Some(self.last.1);
        }
        let slot = *self.index.get(&ino.0)?;
        self.last = (ino.0, slot);
        Some(slot)
    }

    /// The inode of a directory that is in memory. Changes nothing, not even the cache of the last look-up.
    pub(crate) fn peek(&self, ino: Ino) -> Option<&Inode> {
        self.index.get(&ino.0).map(|slot| &self.slots[*slot].inode)
    }

    /// Adds a directory that was read from its record, or was just created.
    pub(crate) fn insert(&mut self, inode: Inode) -> usize {
        debug_assert!(!self.index.contains_key(&inode.attr.ino.0));
        let slot = self.slots.len();
        self.slots.push(Directory {
            inode,
            pending: false,
            changed: false,
            rewrite_record: false,
            used: 0,
            has_places: None,
            is_untouched: false,
        });
        self.index.insert(inode.attr.ino.0, slot);
        slot
    }

    /// Adds a directory whose newest attributes are pending in the ledger.
    pub(crate) fn insert_pending(&mut self, mut inode: Inode, pending: &Pending) {
        pending.apply(&mut inode.attr);
        let slot = self.insert(inode);
        self.slots[slot].pending = true;
        self.pending.push(slot);
    }

    /// Whether the store may have anything in a directory; none where that is not known.
    #[inline]
    pub(crate) fn has_places(&self, ino: Ino) -> Option<bool> {
        self.index.get(&ino.0).and_then(|slot| self.slots[*slot].has_places)
    }

    /// Notes whether the store may have anything in a directory, if that is in memory.
    pub(crate) fn note_places(&mut self, ino: Ino, has_places: bool) {
        if let Some(slot) = self.index.get(&ino.0) {
            self.slots[*slot].has_places = Some(has_places);
        }
    }

    /// True if no mover has ever begun anything in a directory, as far as that is known.
    #[inline]
    pub(crate) fn is_untouched(&self, ino: Ino) -> bool {
        self.index.get(&ino.0).is_some_and(|slot| self.slots[*slot].is_untouched)
    }

    /// Notes that no mover has begun anything in a directory, or that one has.
    pub(crate) fn note_untouched(&mut self, ino: Ino, is_untouched: bool) {
        if let Some(slot) = self.index.get(&ino.0) {
            self.slots[*slot].is_untouched = is_untouched;
        }
    }

    /// The directory in a slot.
    #[inline]
    pub(crate) fn get(&self, slot: usize) -> &Inode {
        &self.slots[slot].inode
    }

    /// The directory in a slot, to change its size, links or times. True when this is its first change in this batch.
    #[inline]
    pub(crate) fn change(&mut self, slot: usize) -> (&mut Inode, bool) {
        let first = !self.slots[slot].changed;
        if first {
            self.changed.push(slot);
        }
        self.clock += 1;
        let directory = &mut self.slots[slot];
        directory.changed = true;
        directory.used = self.clock;
        (&mut directory.inode, first)
    }

    /// The same, to change anything.
    pub(crate) fn change_whole(&mut self, slot: usize) -> (&mut Inode, bool) {
        self.slots[slot].rewrite_record = true;
        self.change(slot)
    }

    /// Updates size, links and times after entries changed. True when this is its first change in this batch.
    #[inline]
    pub(crate) fn touch(&mut self, slot: usize, entries: i64, links: i64, now: Timestamp) -> bool {
        let (inode, first) = self.change(slot);
        let attr = &mut inode.attr;
        attr.size = attr.size.wrapping_add_signed(entries);
        attr.nlink = (attr.nlink as i64 + links) as u32;
        attr.mtime = now;
        attr.ctime = now;
        first
    }

    /// Drops a directory that was removed.
    pub(crate) fn remove(&mut self, ino: Ino) {
        let Some(slot) = self.index.remove(&ino.0) else { return };
        self.changed.retain(|s| *s != slot);
        self.pending.retain(|s| *s != slot);
        self.slots[slot].inode.attr.ino = Ino(0);
        self.removed += 1;
        self.last = (0, 0);
    }

    /// True when something must be written at commit.
    pub(crate) fn is_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Prepares a commit: chooses the directories that are pending from now on, and passes the inodes whose records
    /// must be written to `write`.
    pub(crate) fn settle<E>(&mut self, mut write: impl FnMut(&Inode) -> Result<(), E>) -> Result<(), E> {
        let changed = std::mem::take(&mut self.changed);
        for &slot in &changed {
            let directory = &mut self.slots[slot];
            directory.changed = false;
            if directory.rewrite_record {
                directory.rewrite_record = false;
                write(&directory.inode)?;
                if directory.pending {
                    directory.pending = false;
                    self.pending.retain(|s| *s != slot);
                }
            } else if !directory.pending {
                if self.pending.len() >= PENDING_MAX {
                    let idle = (0..self.pending.len())
                        .min_by_key(|i| self.slots[self.pending[*i]].used)
                        .unwrap_or_default();
                    let out = self.pending.swap_remove(idle);
                    self.slots[out].pending = false;
                    write(&self.slots[out].inode)?;
                }
                self.slots[slot].pending = true;
                self.pending.push(slot);
            }
        }
        self.changed = changed;
        self.changed.clear();
        Ok(())
    }

    /// The pending attributes, for the ledger.
    pub(crate) fn pending(&self) -> impl ExactSizeIterator<Item = Pending> + '_ {
        self.pending.iter().map(|slot| Pending::of(&self.slots[*slot].inode.attr))
    }

    /// Drops directories above the bound. Called between requests: slot numbers change.
    #[inline]
    pub(crate) fn trim(&mut self) {
        if self.slots.len() > KEPT_MAX + self.changed.len() + self.pending.len() {
            self.trim_now();
        }
    }

    #[cold]
    fn trim_now(&mut self) {
        let old = std::mem::take(&mut self.slots);
        self.index.clear();
        self.changed.clear();
        self.pending.clear();
        self.removed = 0;
        self.last = (0, 0);
        for directory in old {
            if directory.inode.attr.ino == Ino(0) || !(directory.changed || directory.pending) {
                continue;
            }
            let slot = self.slots.len();
            self.index.insert(directory.inode.attr.ino.0, slot);
            if directory.changed {
                self.changed.push(slot);
            }
            if directory.pending {
                self.pending.push(slot);
            }
            self.slots.push(directory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Inode;
    use forebay_types::{Attr, Layout, NodeId};

    fn directory(ino: u64) -> Inode {
        let t = Timestamp::default();
        let attr = Attr {
            ino: Ino(ino),
            size: 0,
            rdev: 0,
            parent: Ino(1),
            mode: 0o040_755,
            uid: 0,
            gid: 0,
            nlink: 2,
            flags: 0,
            home: NodeId(1),
            width_log2: 0,
            atime: t,
            mtime: t,
            ctime: t,
            btime: t,
        };
        Inode { attr, layout: Layout::single(NodeId(1), 0), cookie: 0, marks: 0 }
    }

    fn settle(d: &mut Directories) -> Vec<u64> {
        let mut written = Vec::new();
        d.settle(|inode| -> Result<(), ()> {
            written.push(inode.attr.ino.0);
            Ok(())
        })
        .unwrap();
        written
    }

    #[test]
    fn settle_keeps_the_newest_pending_and_writes_the_idlest() {
        let mut d = Directories::default();
        for ino in 1..=PENDING_MAX as u64 {
            let slot = d.insert(directory(ino));
            d.touch(slot, 1, 0, Timestamp { sec: 9, nsec: 0 });
        }
        assert_eq!(settle(&mut d), []);
        assert_eq!(d.pending().len(), PENDING_MAX);
        let first = d.find(Ino(1)).unwrap();
        d.touch(first, 1, 0, Timestamp::default());
        let slot = d.insert(directory(100));
        d.touch(slot, 1, 0, Timestamp::default());
        assert_eq!(settle(&mut d), [2], "1 changed again, so 2 is the idlest");
        assert!(d.pending().any(|p| p.ino == Ino(100)) && d.pending().all(|p| p.ino != Ino(2)));
        assert!(!d.is_changed());
    }

    #[test]
    fn settle_writes_what_changed_as_a_whole() {
        let mut d = Directories::default();
        let slot = d.insert(directory(5));
        d.touch(slot, 1, 1, Timestamp::default());
        assert_eq!(settle(&mut d), []);
        d.change_whole(slot).0.attr.mode = 0o040_700;
        assert_eq!(settle(&mut d), [5]);
        assert_eq!(d.pending().len(), 0);
        assert_eq!(d.get(slot).attr.nlink, 3);
    }

    #[test]
    fn trim_keeps_pending_and_changed() {
        let mut d = Directories::default();
        for ino in 1..=KEPT_MAX as u64 + 100 {
            d.insert(directory(ino));
        }
        let a = d.find(Ino(50)).unwrap();
        d.touch(a, 7, 0, Timestamp::default());
        settle(&mut d);
        let b = d.find(Ino(60)).unwrap();
        d.touch(b, 8, 0, Timestamp::default());
        d.remove(Ino(61));
        d.trim();
        assert_eq!(d.find(Ino(1)), None);
        assert_eq!(d.find(Ino(61)), None);
        assert_eq!(d.peek(Ino(50)).unwrap().attr.size, 7);
        assert_eq!(d.peek(Ino(60)).unwrap().attr.size, 8);
        assert!(d.is_changed());
        assert_eq!(settle(&mut d), []);
        assert_eq!(d.pending().len(), 2);
    }
}
