//! Names that the stores of unlisted directories are known to lack (`unlisted.rs`): knowledge of the store, not state of
//! the pool. So it is in memory alone, at most [`ABSENT_NAMES_MAX`] names, of which the oldest is forgotten first. A name
//! that is forgotten costs one more question to the store.

use std::collections::{HashMap, VecDeque};

use forebay_types::limits::ABSENT_NAMES_MAX;
use forebay_types::Ino;

/// The names that stores are known to lack.
#[derive(Debug, Default)]
pub(crate) struct Absences {
    /// For each directory its names, each with the number of its arrival.
    names: HashMap<u64, HashMap<Vec<u8>, u64>>,
    /// In the order of the numbers. A name that was forgotten may be in it still.
    order: VecDeque<(Ino, Vec<u8>, u64)>,
    /// The last number.
    last: u64,
}

impl Absences {
    pub(crate) fn has(&self, directory: Ino, name: &[u8]) -> bool {
        self.names.get(&directory.0).is_some_and(|names| names.contains_key(name))
    }

    pub(crate) fn add(&mut self, directory: Ino, name: &[u8]) {
        self.last += 1;
        self.names.entry(directory.0).or_default().insert(name.to_vec(), self.last);
        self.order.push_back((directory, name.to_vec(), self.last));
        if self.order.len() > ABSENT_NAMES_MAX {
            let Some((directory, name, number)) = self.order.pop_front() else { return };
            let came = self.names.get(&directory.0).and_then(|names| names.get(&name));
            if came == Some(&number) {
                self.forget(directory, &name);
            }
        }
    }

    /// A name may be in the store.
    pub(crate) fn forget(&mut self, directory: Ino, name: &[u8]) {
        if let Some(names) = self.names.get_mut(&directory.0) {
            names.remove(name);
            if names.is_empty() {
                self.names.remove(&directory.0);
            }
        }
    }

    /// The names of a directory are known no longer, or all of them are known.
    pub(crate) fn forget_all_of(&mut self, directory: Ino) {
        self.names.remove(&directory.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absences_are_bounded_and_the_oldest_is_forgotten_first() {
        let mut absences = Absences::default();
        let name = |i: usize| i.to_string().into_bytes();
        for i in 0..ABSENT_NAMES_MAX + 10 {
            absences.add(Ino(5 + i as u64 % 3), &name(i));
        }
        let has = |absences: &Absences, i: usize| absences.has(Ino(5 + i as u64 % 3), &name(i));
        assert!((0..10).all(|i| !has(&absences, i)));
        assert!((10..ABSENT_NAMES_MAX + 10).all(|i| has(&absences, i)));
        // A name that came and went often is known when it came last, and leaves nothing behind when it went last.
        for _ in 0..3 * ABSENT_NAMES_MAX {
            absences.add(Ino(9), b"n");
            assert!(absences.has(Ino(9), b"n"));
            absences.forget(Ino(9), b"n");
        }
        assert!(absences.order.len() <= ABSENT_NAMES_MAX && absences.names.is_empty());
    }

    #[test]
    fn names_of_a_listed_directory_are_forgotten_and_those_of_others_are_not() {
        let mut absences = Absences::default();
        absences.add(Ino(5), b"a");
        absences.add(Ino(5), b"b");
        absences.add(Ino(6), b"a");
        absences.forget(Ino(5), b"a");
        assert!(!absences.has(Ino(5), b"a") && absences.has(Ino(5), b"b"));
        absences.forget_all_of(Ino(5));
        assert!(!absences.has(Ino(5), b"b") && absences.has(Ino(6), b"a"));
    }
}
