//! Hard links: the first name of an inode is copied, and further names become links to the copy.
//!
//! The table holds an inode with several links until all its links have been met; an inode with links outside of the
//! staged trees stays to the end. It also holds the branch of the copy. So the copy's directory is not finished, and
//! perhaps closed to this process by its mode, before the last link to the copy exists.

use std::collections::HashMap;
use std::sync::Mutex;

use crate::entry::Entry;
use crate::tree::Tree;

/// Device and inode number in the source.
pub(crate) type Key = (u64, u64);

enum State<S: Tree, D: Tree> {
    /// The first name is being copied; these entries wait for it.
    Copying(Vec<Entry<S, D>>),
    /// The first name has been copied.
    Done(Entry<S, D>),
}

struct Inode<S: Tree, D: Tree> {
    state: State<S, D>,
    /// Links that were not met yet.
    unmet: u32,
}

/// Inodes with several links.
pub(crate) struct Links<S: Tree, D: Tree>(Mutex<HashMap<Key, Inode<S, D>>>);

/// What to do with a name of an inode with several links.
pub(crate) enum Claim<S: Tree, D: Tree> {
    /// It is the first name: copy it, then call `done` or `failed`.
    Copy,
    /// Another thread is copying the first name, and will link this one.
    Wait,
    /// Link it to this copy.
    Link(Entry<S, D>),
}

impl<S: Tree, D: Tree> Links<S, D> {
    pub(crate) fn new() -> Links<S, D> {
        Links(Mutex::new(HashMap::new()))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Inode<S, D>>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Registers `entry`, a name of inode `key`, which has `links` links.
    pub(crate) fn claim(&self, key: Key, links: u32, entry: &Entry<S, D>) -> Claim<S, D> {
        let mut table = self.lock();
        let Some(inode) = table.get_mut(&key) else {
            table.insert(key, Inode { state: State::Copying(Vec::new()), unmet: links.saturating_sub(1) });
            return Claim::Copy;
        };
        inode.unmet = inode.unmet.saturating_sub(1);
        match &mut inode.state {
            State::Copying(waiting) => {
                waiting.push(entry.clone());
                Claim::Wait
            }
            State::Done(first) => {
                let first = first.clone();
                if inode.unmet == 0 {
                    table.remove(&key);
                }
                Claim::Link(first)
            }
        }
    }

    /// Marks the first name as copied, and returns the waiting entries, to be linked to it.
    pub(crate) fn done(&self, key: Key, first: &Entry<S, D>) -> Vec<Entry<S, D>> {
        let mut table = self.lock();
        let Some(inode) = table.get_mut(&key) else { return Vec::new() };
        let before = std::mem::replace(&mut inode.state, State::Done(first.clone()));
        if inode.unmet == 0 {
            table.remove(&key);
        }
        match before {
            State::Copying(waiting) => waiting,
            State::Done(_) => Vec::new(),
        }
    }

    /// Removes an inode whose first name could not be copied, and returns the waiting entries, to be tried again.
    pub(crate) fn failed(&self, key: Key) -> Vec<Entry<S, D>> {
        match self.lock().remove(&key).map(|inode| inode.state) {
            Some(State::Copying(waiting)) => waiting,
            _ => Vec::new(),
        }
    }

    /// Removes all inodes, which releases their branches.
    pub(crate) fn clear(&self) {
        let table = std::mem::take(&mut *self.lock());
        drop(table);
    }
}
