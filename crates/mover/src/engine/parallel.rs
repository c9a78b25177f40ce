//! Calls to a store for many files at a time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;

use crate::host;
use crate::store::limited::Limited;

/// Files at a time, at most: as many calls as the store may get.
const FILES_AT_ONCE: usize = 64;
/// Threads for what takes microseconds, and items for which one more is worth its start.
const FEW_THREADS: usize = 4;
const ITEMS_A_THREAD: usize = 256;

/// Threads for files of a store: somewhat more than it may get calls now, since they call the pool too, and since the
/// store's limit grows only while calls wait for their turn.
pub(super) fn threads_for(store: &Limited) -> usize {
    let calls = store.parallelism();
    (calls + calls / 4 + 2).min(FILES_AT_ONCE)
}

/// Runs `each` over `items` and their indexes, in as many threads as the store takes calls; more are started as it takes
/// more. The results are in the order of the items.
pub(super) fn in_parallel<T: Sync, R: Send>(
    store: &Limited,
    items: &[T],
    each: impl Fn(usize, &T) -> R + Sync,
) -> Vec<R> {
    in_threads(|| threads_for(store), items, each)
}

/// The same in a few threads, for what needs the pool alone and takes microseconds.
pub(super) fn in_few_threads<T: Sync, R: Send>(items: &[T], each: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = items.len().div_ceil(ITEMS_A_THREAD).min(FEW_THREADS);
    in_threads(|| threads, items, |_, item| each(item))
}

fn in_threads<T: Sync, R: Send>(
    threads: impl Fn() -> usize,
    items: &[T],
    each: impl Fn(usize, &T) -> R + Sync,
) -> Vec<R> {
    let results: Vec<_> = items.iter().map(|_| Mutex::new(None)).collect();
    let (next, started) = (AtomicUsize::new(0), AtomicUsize::new(1));
    let one = || {
        let i = next.fetch_add(1, Ordering::Relaxed);
        let (Some(item), Some(slot)) = (items.get(i), results.get(i)) else { return false };
        let result = each(i, item);
        *slot.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(result);
        true
    };
    if host::is_simulated() {
        // One thread runs at a time in any case.
        while one() {}
    }
    std::thread::scope(|scope| loop {
        // This thread starts the others, and works as they do.
        let left = items.len().saturating_sub(next.load(Ordering::Relaxed));
        while started.load(Ordering::Relaxed) < threads().min(left) {
            started.fetch_add(1, Ordering::Relaxed);
            let run = || while one() {};
            // Without it the others do its work.
            if std::thread::Builder::new().name("copy".to_owned()).spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        if !one() {
            break;
        }
    });
    let taken =
        results.into_iter().map(|slot| slot.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner));
    taken.flatten().collect()
}
