//! Calls to a store for many files at a time.

use crate::host;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;

/// Files at a time, at most. The store's own limit adapts to its latency.
const FILES_AT_ONCE: usize = 32;

/// Runs `each` over `items` in up to [`FILES_AT_ONCE`] threads. The results are in the order of the items.
pub(super) fn in_parallel<T: Sync, R: Send>(items: &[T], each: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let results: Vec<_> = items.iter().map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    let run = || loop {
        let i = next.fetch_add(1, Ordering::Relaxed);
        let (Some(item), Some(slot)) = (items.get(i), results.get(i)) else { return };
        let result = each(item);
        *slot.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(result);
    };
    let threads = items.len().min(FILES_AT_ONCE);
    let ended = host::for_each(vec![(); threads], |()| run());
    assert_eq!(ended.len(), threads, "a thread panicked");
    let taken =
        results.into_iter().map(|slot| slot.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner));
    taken.flatten().collect()
}
