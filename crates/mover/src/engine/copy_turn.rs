//! Which batch of small files is being copied.
//!
//! Batches go through the steps copy, sync, publish. If all of them copied at the same time, they would all be synced at
//! the same time too, and the processors would wait meanwhile. So one batch is copied with all threads while others are
//! synced and published. The next one begins when no file of this one is left to begin with. A leaf mutex.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// The turn of the batches of one pass.
#[derive(Debug, Default)]
pub(super) struct CopyTurn {
    is_taken: Mutex<bool>,
    free: Condvar,
}

/// The turn of one batch, until it is passed on or dropped.
#[derive(Debug)]
pub(super) struct Copying<'a> {
    turn: &'a CopyTurn,
    is_held: AtomicBool,
}

impl CopyTurn {
    /// Waits for the turn.
    pub(super) fn take(&self) -> Copying<'_> {
        let mut is_taken = self.is_taken.lock().unwrap_or_else(PoisonError::into_inner);
        while *is_taken {
            is_taken = self.free.wait(is_taken).unwrap_or_else(PoisonError::into_inner);
        }
        *is_taken = true;
        Copying { turn: self, is_held: AtomicBool::new(true) }
    }
}

impl Copying<'_> {
    /// Passes the turn on, once.
    pub(super) fn pass_on(&self) {
        if self.is_held.swap(false, Ordering::AcqRel) {
            *self.turn.is_taken.lock().unwrap_or_else(PoisonError::into_inner) = false;
            self.turn.free.notify_one();
        }
    }
}

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        self.pass_on();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turn_is_one_batch_s_until_that_passes_it_on() {
        let turn = CopyTurn::default();
        let first = turn.take();
        let is_taken = || *turn.is_taken.lock().unwrap();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| {
                let second = turn.take();
                assert!(is_taken());
                second.pass_on();
                assert!(!is_taken());
            });
            assert!(is_taken());
            first.pass_on();
            second.join().unwrap();
        });
        // What has passed it on does not free it for others again.
        let third = turn.take();
        first.pass_on();
        drop(first);
        assert!(is_taken());
        drop(third);
        assert!(!is_taken());
    }
}
