//! How many messages of readers are served at a time (`through.rs`): so many for each store, so that a store that hangs
//! holds up no reader of another one.
//!
//! The store of a file is known only after a question to the pool. It never changes, as neither a rename nor a link leads
//! from one store to another, and so it is remembered. A leaf mutex. Tests: here.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_types::Ino;

/// Messages of one store. Programs ask again.
const READERS_MAX: usize = 64;
/// Messages of all stores, each with a thread: eight stores that hang leave room to a ninth.
const THREADS_MAX: usize = 9 * READERS_MAX;
/// Files whose stores are remembered.
const FILES_MAX: usize = 4096;

#[derive(Debug, Default)]
struct State {
    threads: usize,
    /// By the directory with the store.
    of_stores: BTreeMap<Ino, usize>,
    stores: BTreeMap<Ino, Ino>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Readers(Mutex<State>);

/// One message of a store is being served, until this is dropped.
#[derive(Debug)]
pub(super) struct Reading<'a> {
    readers: &'a Readers,
    store: Ino,
}

impl Readers {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a thread. False if there are too many.
    pub(super) fn begin(&self) -> bool {
        let mut state = self.lock();
        let begins = state.threads < THREADS_MAX;
        state.threads += usize::from(begins);
        begins
    }

    /// A thread that [`Readers::begin`] has counted has answered.
    pub(super) fn end(&self) {
        self.lock().threads -= 1;
    }

    /// The directory with the store of a file; `find` asks the pool for it.
    pub(super) fn store_of<E>(&self, ino: Ino, find: impl FnOnce() -> Result<Ino, E>) -> Result<Ino, E> {
        if let Some(store) = self.lock().stores.get(&ino) {
            return Ok(*store);
        }
        let store = find()?;
        let mut state = self.lock();
        if state.stores.len() >= FILES_MAX {
            state.stores.clear();
        }
        state.stores.insert(ino, store);
        Ok(store)
    }

    /// Counts a message of a store. None if there are too many.
    pub(super) fn of_store(&self, store: Ino) -> Option<Reading<'_>> {
        let mut state = self.lock();
        let count = state.of_stores.entry(store).or_default();
        if *count >= READERS_MAX {
            return None;
        }
        *count += 1;
        Some(Reading { readers: self, store })
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let mut state = self.readers.lock();
        let left = state.of_stores.get_mut(&self.store).map(|count| {
            *count -= 1;
            *count
        });
        if left == Some(0) {
            state.of_stores.remove(&self.store);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STORES: [Ino; 2] = [Ino(5), Ino(6)];

    #[test]
    fn store_that_hangs_leaves_the_readers_of_another_their_places() {
        let readers = Readers::default();
        let mut hanging: Vec<_> = (0..READERS_MAX).map(|_| readers.of_store(STORES[0]).unwrap()).collect();
        assert!(readers.of_store(STORES[0]).is_none());
        let other: Vec<_> = (0..READERS_MAX).map(|_| readers.of_store(STORES[1]).unwrap()).collect();
        assert!(readers.of_store(STORES[1]).is_none());
        drop(other);
        assert!(readers.of_store(STORES[0]).is_none(), "the places of another store");
        hanging.pop();
        hanging.push(readers.of_store(STORES[0]).unwrap());
        assert!(readers.of_store(STORES[0]).is_none());
        hanging.clear();
        assert!(readers.lock().of_stores.is_empty());
    }

    #[test]
    fn threads_are_bounded_and_counted_again_when_they_end() {
        let readers = Readers::default();
        assert!((0..THREADS_MAX).all(|_| readers.begin()));
        assert!(!readers.begin());
        readers.end();
        assert!(readers.begin() && !readers.begin());
    }

    #[test]
    fn store_of_a_file_is_asked_for_once() {
        let readers = Readers::default();
        assert_eq!(readers.store_of(Ino(1), || Err("no answer")), Err("no answer"));
        assert_eq!(readers.store_of(Ino(1), || Ok::<_, &str>(STORES[0])), Ok(STORES[0]));
        assert_eq!(readers.store_of(Ino(1), || Err("asked again")), Ok(STORES[0]));
        for ino in 0..2 * FILES_MAX as u64 {
            assert_eq!(readers.store_of(Ino(100 + ino), || Ok::<_, &str>(STORES[1])), Ok(STORES[1]));
        }
        assert!(readers.lock().stores.len() <= FILES_MAX);
    }
}
