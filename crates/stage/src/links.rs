//! Hard links: the first name of an inode is copied, further ones become links to the copy.
//!
//! The table holds inodes with several links until all of them were met; those with links outside of what is staged
//! stay to the end. It holds the branch of the copy, too, so that its directory is not finished, and perhaps closed to
//! us by its mode, before the last link to it is made.

use std::collections::HashMap;
use std::sync::Mutex;

use crate::entry::Entry;
use crate::tree::Tree;

/// Device and inode in the source.
pub(crate) type Key = (u64, u64);

enum State<S: Tree, D: Tree> {
    /// The first name is being copied; these wait for it.
    Copying(Vec<Entry<S, D>>),
    /// It is copied.
    Done(Entry<S, D>),
}

struct Inode<S: Tree, D: Tree> {
    state: State<S, D>,
    /// Names that were not met yet.
    unmet: u32,
}

/// Inodes with several links.
pub(crate) struct Links<S: Tree, D: Tree>(Mutex<HashMap<Key, Inode<S, D>>>);

/// What to do with a name of an inode with several links.
pub(crate) enum Claim<S: Tree, D: Tree> {
    /// It is the first: copy it, then call `done` or `failed`.
    Copy,
    /// The first is being copied by another thread, which will link this one.
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

    /// Meets `entry`, a name of inode `key`, which has `links` links.
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

    /// The first name was copied: those that waited, to be linked to it.
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

    /// The first name could not be copied: those that waited, to be tried anew.
    pub(crate) fn failed(&self, key: Key) -> Vec<Entry<S, D>> {
        match self.lock().remove(&key).map(|inode| inode.state) {
            Some(State::Copying(waiting)) => waiting,
            _ => Vec::new(),
        }
    }

    /// Forgets all, which lets go of their branches.
    pub(crate) fn clear(&self) {
        let table = std::mem::take(&mut *self.lock());
        drop(table);
    }
}
