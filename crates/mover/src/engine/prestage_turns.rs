//! Whose turn it is to prestage from a store: the oldest task's (`prestage.rs`). A leaf mutex.

use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_types::Ino;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The prestaging tasks that run, by store, in the order of their starts.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// The directory with the store, and the task's number here.
    running: Vec<(Option<Ino>, u64)>,
}

/// A running task's turn; it ends when it is dropped.
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    store: Option<Ino>,
    number: u64,
}

impl Turns {
    pub(super) fn begin(&self, store: Option<Ino>) -> Turn<'_> {
        let mut state = locked(&self.0);
        state.next += 1;
        let number = state.next;
        state.running.push((store, number));
        Turn { turns: self, store, number }
    }
}

impl Turn<'_> {
    pub(super) fn is_oldest(&self) -> bool {
        let state = locked(&self.turns.0);
        state.running.iter().find(|other| other.0 == self.store).is_some_and(|other| other.1 == self.number)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        locked(&self.turns.0).running.retain(|other| other.1 != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_task_of_each_store_has_the_turn_until_it_ends() {
        let turns = Turns::default();
        let (a, b) = (Some(Ino(1)), Some(Ino(2)));
        let (first, second, other) = (turns.begin(a), turns.begin(a), turns.begin(b));
        assert!(first.is_oldest() && !second.is_oldest() && other.is_oldest());
        drop(first);
        assert!(second.is_oldest());
    }
}
