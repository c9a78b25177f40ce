//! The look-ups of names that are under way, and how often names of a directory were looked up (`look.rs`).

use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_types::Ino;

/// Look-ups in a directory before it is listed.
const LOOKS_BEFORE_LIST: u64 = 8;
/// Names that are listed for each look-up that there was.
const NAMES_A_LOOK: u64 = 256;
/// Directories of which the look-ups are counted.
const DIRECTORIES_MAX: usize = 256;

/// The look-ups that are under way, and how often programs looked up names of directories. A leaf mutex.
#[derive(Debug, Default)]
pub(super) struct Looks(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    under_way: HashSet<(Ino, Vec<u8>)>,
    /// The directories that were used last come last.
    directories: VecDeque<(Ino, u64)>,
}

impl Looks {
    fn locked(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False if the name is being looked up already.
    pub(super) fn begin(&self, directory: Ino, name: &[u8]) -> bool {
        self.locked().under_way.insert((directory, name.to_vec()))
    }

    pub(super) fn end(&self, directory: Ino, name: &[u8]) {
        self.locked().under_way.remove(&(directory, name.to_vec()));
    }

    /// A name of a directory was looked up. The names up to which the directory is to be listed now, if it is.
    pub(super) fn note(&self, directory: Ino) -> Option<u64> {
        let all = &mut self.locked().directories;
        let at = all.iter().position(|(known, _)| *known == directory);
        let (_, before) = at.and_then(|at| all.remove(at)).unwrap_or((directory, 0));
        if all.len() >= DIRECTORIES_MAX {
            all.pop_front();
        }
        let looks = before + 1;
        all.push_back((directory, looks));
        let is_due = looks >= LOOKS_BEFORE_LIST && looks.is_power_of_two();
        is_due.then_some(looks * NAMES_A_LOOK)
    }

    /// A directory is listed: its look-ups count from the beginning if it is to be listed again.
    pub(super) fn forget(&self, directory: Ino) {
        self.locked().directories.retain(|(known, _)| *known != directory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_is_listed_after_several_looks_and_again_after_twice_as_many() {
        let looks = Looks::default();
        let due: Vec<_> =
            (1..=32).map(|look| (look, looks.note(Ino(5)))).filter(|(_, n)| n.is_some()).collect();
        let names = |looks: u64| Some(looks * NAMES_A_LOOK);
        assert_eq!(due, [(8, names(8)), (16, names(16)), (32, names(32))]);
        looks.forget(Ino(5));
        assert!((1..8).all(|_| looks.note(Ino(5)).is_none()));
        assert!(looks.note(Ino(5)).is_some());
    }

    #[test]
    fn looks_are_counted_for_the_directories_that_were_used_last() {
        let looks = Looks::default();
        (1..8).for_each(|_| assert_eq!(looks.note(Ino(5)), None));
        for other in 0..DIRECTORIES_MAX as u64 {
            assert_eq!(looks.note(Ino(100 + other)), None);
        }
        assert_eq!(looks.note(Ino(5)), None, "it was forgotten");
        assert_eq!(looks.locked().directories.len(), DIRECTORIES_MAX);
    }
}
