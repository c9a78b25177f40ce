//! Requests of other nodes' processes that wait to be taken, in the order of their arrival. Without this queue a round
//! would check all sessions, most of which have sent no request in a large pool.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Session and slot of each. An entry is stale when its request was taken meanwhile, or its session has ended.
#[derive(Clone, Debug, Default)]
pub(super) struct Arrivals(Arc<Mutex<VecDeque<(u64, usize)>>>);

impl Arrivals {
    // The mutex is never contended: one thread at a time owns the shard.
    fn queue(&self) -> MutexGuard<'_, VecDeque<(u64, usize)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, session: u64, slot: usize) {
        self.queue().push_back((session, slot));
    }

    pub(super) fn next(&self) -> Option<(u64, usize)> {
        self.queue().pop_front()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue().is_empty()
    }
}
