//! How many files of a directory get their names at a time.
//!
//! A client of a distant file system makes one name at a time in a directory (Linux locks it until the server has
//! answered), so calls beyond that wait in the kernel. There they would keep turns of the store ([`Limited`]) from
//! uploads, and would look as if the store had no room for more calls. Here they wait without a turn. A leaf mutex.
//!
//! [`Limited`]: crate::store::limited::Limited

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// So many that one waits for the lock while another makes its name, a third looks at its temporary, and a fourth removes
/// its own elsewhere. No more: the limit of calls learns nothing from calls that wait for a lock.
const AT_A_TIME: usize = 4;

/// Turns of the directories of one pass, each of which is known by a `D`.
#[derive(Debug)]
pub(super) struct NameTurns<D> {
    /// Turns that are taken, by directory.
    taken: Mutex<BTreeMap<D, usize>>,
    left: Condvar,
}

impl<D> Default for NameTurns<D> {
    fn default() -> NameTurns<D> {
        NameTurns { taken: Mutex::default(), left: Condvar::new() }
    }
}

/// A turn, until it is dropped.
#[derive(Debug)]
pub(super) struct Naming<'a, D: Ord> {
    turns: &'a NameTurns<D>,
    directory: &'a D,
}

impl<D: Ord> NameTurns<D> {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<D, usize>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a turn of a directory.
    pub(super) fn take<'a>(&'a self, directory: &'a D) -> Naming<'a, D>
    where
        D: Clone,
    {
        let is_full = |taken: &mut BTreeMap<D, usize>| taken.get(directory).is_some_and(|n| *n >= AT_A_TIME);
        let mut taken = self.left.wait_while(self.lock(), is_full).unwrap_or_else(PoisonError::into_inner);
        *taken.entry(directory.clone()).or_default() += 1;
        Naming { turns: self, directory }
    }
}

impl<D: Ord> Drop for Naming<'_, D> {
    fn drop(&mut self) {
        let mut taken = self.turns.lock();
        if let Some(n) = taken.get_mut(self.directory) {
            *n -= 1;
            if *n == 0 {
                taken.remove(self.directory);
            }
        }
        drop(taken);
        // Those that wait do so for different directories.
        self.turns.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::store::StorePath;

    #[test]
    fn few_files_of_a_directory_are_named_at_a_time_and_those_of_others_do_not_wait() {
        let path = |name: &str| StorePath::root().join(name.as_bytes()).unwrap();
        let (one, other, turns) = (path("one"), path("other"), NameTurns::default());
        let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            let held: Vec<_> = (0..AT_A_TIME).map(|_| turns.take(&one)).collect();
            drop(turns.take(&other));
            for _ in 0..16 {
                scope.spawn(|| {
                    let _turn = turns.take(&one);
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(1));
                    now.fetch_sub(1, Ordering::SeqCst);
                });
            }
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(most.load(Ordering::SeqCst), 0, "all turns are held");
            drop(held);
        });
        assert!((1..=AT_A_TIME).contains(&most.load(Ordering::SeqCst)));
        assert!(turns.lock().is_empty());
    }
}
