//! Where programs walk through trees that are not listed (`ahead.rs`). A leaf mutex.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_types::Ino;

/// The number of directories that are remembered because one of their subdirectories was listed.
const PARENTS_MAX: usize = 64;

/// The parents of directories that programs needed lately.
#[derive(Debug, Default)]
pub(super) struct Walks(Mutex<VecDeque<Ino>>);

impl Walks {
    fn locked(&self) -> MutexGuard<'_, VecDeque<Ino>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A program needed a directory of `parent`. True if it is the second one: it is forgotten then.
    pub(super) fn is_second(&self, parent: Ino) -> bool {
        let mut parents = self.locked();
        if let Some(at) = parents.iter().position(|known| *known == parent) {
            parents.remove(at);
            return true;
        }
        if parents.len() >= PARENTS_MAX {
            parents.pop_front();
        }
        parents.push_back(parent);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_directory_of_a_parent_tells_a_walk_and_starts_it_once() {
        let walks = Walks::default();
        assert!(!walks.is_second(Ino(5)) && !walks.is_second(Ino(6)));
        assert!(walks.is_second(Ino(5)));
        assert!(!walks.is_second(Ino(5)));
        (100..200).for_each(|ino| assert!(!walks.is_second(Ino(ino))));
        assert!(!walks.is_second(Ino(6)), "it was forgotten");
        assert!(walks.locked().len() <= PARENTS_MAX);
    }
}
