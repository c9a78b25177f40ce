//! Calls to a store for many files at a time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;
use std::time::Duration;

use crate::host::{self, Instant};
use crate::store::limited::Limited;

/// Files at a time, at most: as many calls as the store may get.
const FILES_AT_ONCE: usize = 64;
/// A call for a small file or a directory that takes longer waits for its store.
const SLOW: Duration = Duration::from_millis(1);
/// So many slow or short calls one after the other tell how the store answers.
const CALLS_IN_A_ROW: usize = 4;
/// Items that a thread takes at once while calls are short: most of them are of one directory, which the kernel locks for
/// each name that is made in it.
const ITEMS_AT_ONCE: usize = 8;
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
    in_threads(|| threads_for(store), || 1, items, each)
}

/// The same for small files and names. A store that answers at once, as a local file system does from memory, keeps the
/// processors busy: more threads than these would only wait for each other and for the locks of directories. As soon as it
/// answers late, it gets as many calls as it takes.
pub(super) fn in_parallel_if_slow<T: Sync, R: Send>(
    store: &Limited,
    items: &[T],
    each: impl Fn(usize, &T) -> R + Sync,
) -> Vec<R> {
    // Calls of one sort since the last of the other one.
    let (slow, short) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let is_at_least = |calls: &AtomicUsize| calls.load(Ordering::Relaxed) >= CALLS_IN_A_ROW;
    let threads = || match is_at_least(&slow) {
        true => threads_for(store),
        false => processors().min(threads_for(store)),
    };
    let at_once = || if is_at_least(&short) { ITEMS_AT_ONCE } else { 1 };
    in_threads(threads, at_once, items, |i, item| {
        let begun = Instant::now();
        let result = each(i, item);
        let (more, none) = if begun.elapsed() >= SLOW { (&slow, &short) } else { (&short, &slow) };
        more.fetch_add(1, Ordering::Relaxed);
        none.store(0, Ordering::Relaxed);
        result
    })
}

/// The processors that this process may use.
fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// The same in a few threads, for what needs the pool alone and takes microseconds.
pub(super) fn in_few_threads<T: Sync, R: Send>(items: &[T], each: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = items.len().div_ceil(ITEMS_A_THREAD).min(FEW_THREADS);
    in_threads(|| threads, || 1, items, |_, item| each(item))
}

/// Runs `each` in as many threads as `threads` says, each of which takes as many items as `at_once` says.
fn in_threads<T: Sync, R: Send>(
    threads: impl Fn() -> usize,
    at_once: impl Fn() -> usize + Sync,
    items: &[T],
    each: impl Fn(usize, &T) -> R + Sync,
) -> Vec<R> {
    let results: Vec<_> = items.iter().map(|_| Mutex::new(None)).collect();
    let (next, started) = (AtomicUsize::new(0), AtomicUsize::new(1));
    let one = || {
        let taken = at_once();
        let first = next.fetch_add(taken, Ordering::Relaxed);
        let mine = items.iter().zip(&results).enumerate().skip(first).take(taken);
        let mut has_done = false;
        for (i, (item, slot)) in mine {
            let result = each(i, item);
            *slot.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(result);
            has_done = true;
        }
        has_done
    };
    if host::is_simulated() {
        // One thread runs at a time in any case.
        while one() {}
    }
    std::thread::scope(|scope| loop {
        // This thread starts the others, and works as they do.
        let left = items.len().saturating_sub(next.load(Ordering::Relaxed));
        while started.load(Ordering::Relaxed) < threads().min(left.div_ceil(at_once())) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::limited::Limits;
    use std::collections::HashSet;
    use std::sync::Arc;

    fn store() -> Limited {
        let options = crate::store::PosixOptions::default();
        let store =
            crate::store::PosixStore::open(&std::env::temp_dir(), options, crate::store::MoverId::own());
        Limited::new(Arc::new(store.unwrap()), Limits::default())
    }

    #[test]
    fn items_are_done_once_in_any_number_of_threads_and_results_keep_their_order() {
        let items: Vec<usize> = (0..1000).collect();
        let counts: Vec<AtomicUsize> = items.iter().map(|_| AtomicUsize::new(0)).collect();
        for at_once in [1, 3, 8, 2000] {
            let done = in_threads(
                || 5,
                || at_once,
                &items,
                |i, item| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                    (i, *item)
                },
            );
            assert!(done.iter().enumerate().all(|(i, done)| *done == (i, i)) && done.len() == items.len());
        }
        assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 4));
    }

    #[test]
    fn store_that_answers_late_gets_more_calls_at_a_time_than_there_are_processors() {
        let store = store();
        let least = threads_for(&store);
        let threads = Mutex::new(HashSet::new());
        in_parallel_if_slow(&store, &[(); 200], |_, ()| {
            threads.lock().unwrap().insert(std::thread::current().id());
            std::thread::sleep(2 * SLOW);
        });
        assert!(threads.lock().unwrap().len() >= least, "{} threads", threads.lock().unwrap().len());
    }
}
