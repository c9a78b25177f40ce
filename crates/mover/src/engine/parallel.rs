//! Calls to a store for many files at a time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::Scope;
use std::time::Duration;

use crate::host::{self, Instant};
use crate::store::limited::Limited;
use crate::store::Store;

/// Files at a time, at most: as many calls as the store may get.
const FILES_AT_ONCE: usize = 64;
/// A call for a small file or a directory that takes longer waits for its store.
const SLOW: Duration = Duration::from_millis(1);
/// The share of slow calls among the recent ones: of so many parts. Each call counts for an eighth of the share.
const ALL_SLOW: usize = 1 << 12;
const CALL_WEIGHT: usize = 8;
/// A store of whose recent calls so many are slow answers late.
const LATE_SHARE: usize = ALL_SLOW / 4;
/// Items that a thread takes one after the other, while other threads have some to take: most of them are of one directory,
/// which the kernel locks for each name that is made in it.
const ITEMS_IN_A_ROW: usize = 8;
/// Threads for a store that answers at once, at least: a call that hangs holds up one of them.
const THREADS_MIN: usize = 4;
/// The same for items that are needed in their order: one calls the store while the other waits for the pool.
const IN_ORDER_MIN: usize = 2;
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
    in_threads(|| threads_for(store), 1, items, each)
}

/// The same for items of which each waits until it may call the store: there are threads for as many as may ever do so.
pub(super) fn in_parallel_with_turns<T: Sync, R: Send>(
    items: &[T],
    each: impl Fn(usize, &T) -> R + Sync,
) -> Vec<R> {
    in_threads(|| FILES_AT_ONCE, 1, items, each)
}

/// The same for small files and names. A store that answers at once, as a local file system does from memory, keeps the
/// processors busy: more threads than these would only wait for each other and for the locks of directories. As soon as it
/// answers late, it gets as many calls as it takes.
pub(super) fn in_parallel_if_slow<T: Sync, R: Send>(
    store: &Limited,
    items: &[T],
    each: impl Fn(usize, &T) -> R + Sync,
) -> Vec<R> {
    in_parallel_on(processors(), ITEMS_IN_A_ROW, store, items, |i, item| {
        let begun = Instant::now();
        let result = each(i, item);
        (result, Some(begun.elapsed()))
    })
}

/// The same for items that are needed in their order: all threads take the next one. `each` returns how long the store took
/// for its first answer, if it was asked: not what the pool took, which serves the program that needs the items.
///
/// While the store answers at once, a few threads keep the pool busy, and the program needs a processor too. One whose call
/// hangs holds up no item that the program waits for: the pool asks for that one by itself.
pub(super) fn in_order_if_slow<T: Sync>(
    store: &Limited,
    items: &[T],
    each: impl Fn(&T) -> Option<Duration> + Sync,
) {
    let lateness = Lateness::of(store);
    in_threads(
        || lateness.threads_in_order_on(processors(), store),
        1,
        items,
        |_, item| {
            if let Some(took) = each(item) {
                lateness.note(took);
            }
        },
    );
}

/// The same with the number of processors, and of items that a thread takes one after the other. `each` returns its result,
/// and how long the store took.
fn in_parallel_on<T: Sync, R: Send>(
    processors: usize,
    in_a_row: usize,
    store: &Limited,
    items: &[T],
    each: impl Fn(usize, &T) -> (R, Option<Duration>) + Sync,
) -> Vec<R> {
    let lateness = Lateness::of(store);
    in_threads(
        || lateness.threads_on(processors, store),
        in_a_row,
        items,
        |i, item| {
            let (result, took) = each(i, item);
            if let Some(took) = took {
                lateness.note(took);
            }
            result
        },
    )
}

/// Whether a store answers late, by the last calls to it.
#[derive(Debug, Default)]
pub(super) struct Lateness {
    /// The share of slow calls, of [`ALL_SLOW`].
    slow_share: AtomicUsize,
}

impl Lateness {
    /// Before the first call: as all calls to the store so far.
    pub(super) fn of(store: &Limited) -> Lateness {
        let is_late = store.has_slow_names() || store.answers_after(SLOW);
        Lateness { slow_share: AtomicUsize::new(if is_late { ALL_SLOW } else { 0 }) }
    }

    /// A call for a small file has taken so long. The calls of two threads at the same time may count as one.
    pub(super) fn note(&self, took: Duration) {
        let share = self.slow_share.load(Ordering::Relaxed);
        self.slow_share.store(with_call(share, took >= SLOW), Ordering::Relaxed);
    }

    /// Threads for small files of a store: as many as it takes calls if it answers late, else as many as there are
    /// processors.
    pub(super) fn threads_for(&self, store: &Limited) -> usize {
        self.threads_on(processors(), store)
    }

    /// The same for items that a program needs in their order.
    fn threads_in_order_on(&self, processors: usize, store: &Limited) -> usize {
        match self.is_late() {
            true => threads_for(store),
            false => processors.clamp(IN_ORDER_MIN, THREADS_MIN).min(threads_for(store)),
        }
    }

    /// Whether it does now.
    pub(super) fn is_late(&self) -> bool {
        self.slow_share.load(Ordering::Relaxed) >= LATE_SHARE
    }

    fn threads_on(&self, processors: usize, store: &Limited) -> usize {
        match self.is_late() {
            true => threads_for(store),
            false => processors.max(THREADS_MIN).min(threads_for(store)),
        }
    }
}

/// The processors of this process. Counted once: the standard library reads the files of control groups each time.
fn processors() -> usize {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    *PROCESSORS.get_or_init(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get))
}

/// True if one more thread is to be started, of `most` at most: it counts as started then.
pub(super) fn start_one_more(started: &AtomicUsize, most: usize) -> bool {
    let one_more = |started: usize| (started < most).then_some(started + 1);
    started.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok()
}

/// The share of slow calls after one more.
fn with_call(share: usize, is_slow: bool) -> usize {
    let one = if is_slow { ALL_SLOW / CALL_WEIGHT } else { 0 };
    share - share.div_ceil(CALL_WEIGHT) + one
}

/// The same in a few threads, for what needs the pool alone and takes microseconds.
pub(super) fn in_few_threads<T: Sync, R: Send>(items: &[T], each: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = items.len().div_ceil(ITEMS_A_THREAD).min(FEW_THREADS);
    in_threads(|| threads, 1, items, |_, item| each(item))
}

/// Runs `each` over `items` in as many threads as `threads` says. A thread takes one item at a time, as long as it can
/// `in_a_row` of them one after the other.
fn in_threads<T: Sync, R: Send>(
    threads: impl Fn() -> usize + Sync,
    in_a_row: usize,
    items: &[T],
    each: impl Fn(usize, &T) -> R + Sync,
) -> Vec<R> {
    let crew = Crew {
        items,
        results: items.iter().map(|_| Mutex::new(None)).collect(),
        in_a_row,
        rows: items.chunks(in_a_row).map(|_| AtomicUsize::new(0)).collect(),
        next_row: AtomicUsize::new(0),
        done: AtomicUsize::new(0),
        started: AtomicUsize::new(1),
        threads,
        each,
    };
    if host::is_simulated() {
        // One thread runs at a time in any case.
        crew.take_all(&|| {});
    } else {
        std::thread::scope(|scope| crew.work(scope));
    }
    let taken = crew.results.into_iter();
    taken.filter_map(|slot| slot.into_inner().unwrap_or_else(PoisonError::into_inner)).collect()
}

/// Threads that share items. A thread takes the items of a row, then those of the next row that no thread has begun, and at
/// the end what is left in the rows of other threads. So an item waits only for a thread, never for the item before it.
struct Crew<'a, T, R, N, E> {
    items: &'a [T],
    results: Vec<Mutex<Option<R>>>,
    /// Items of a row.
    in_a_row: usize,
    /// For each row the number of its items that were taken, or more.
    rows: Vec<AtomicUsize>,
    next_row: AtomicUsize,
    /// Items that are done.
    done: AtomicUsize,
    /// Threads that take items: the caller's thread, and those that were started.
    started: AtomicUsize,
    /// How many threads there may be now.
    threads: N,
    each: E,
}

impl<T: Sync, R: Send, N: Fn() -> usize + Sync, E: Fn(usize, &T) -> R + Sync> Crew<'_, T, R, N, E> {
    /// Takes items until all are taken, and starts other threads before each.
    fn work<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        self.take_all(&|| {
            while self.may_start() {
                let run = || self.work(scope);
                // Without it the others do its work.
                if std::thread::Builder::new().name("copy".to_owned()).spawn_scoped(scope, run).is_err() {
                    break;
                }
            }
        });
    }

    /// True if one more thread is to be started, which counts as started then.
    fn may_start(&self) -> bool {
        let left = self.items.len() - self.done.load(Ordering::Relaxed);
        start_one_more(&self.started, (self.threads)().min(left))
    }

    /// Takes items until all are taken. Calls `before` before each.
    fn take_all(&self, before: &dyn Fn()) {
        loop {
            let row = self.next_row.fetch_add(1, Ordering::Relaxed);
            if row >= self.rows.len() {
                break;
            }
            self.take_row(row, before);
        }
        (0..self.rows.len()).for_each(|row| self.take_row(row, before));
    }

    /// Takes items of a row until all of them are taken.
    fn take_row(&self, row: usize, before: &dyn Fn()) {
        let first = row * self.in_a_row;
        let items = self.items.len().min(first + self.in_a_row) - first;
        while self.rows[row].load(Ordering::Relaxed) < items {
            before();
            let taken = self.rows[row].fetch_add(1, Ordering::Relaxed);
            if taken >= items {
                break;
            }
            let result = (self.each)(first + taken, &self.items[first + taken]);
            *self.results[first + taken].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
            self.done.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::limited::{GateLimits, Limits};
    use std::sync::{Arc, Condvar};

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
        for in_a_row in [1, 3, 8, 2000] {
            let done = in_threads(
                || 5,
                in_a_row,
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

    /// Waits until so many threads are here together. False if they have not come for a long time.
    struct Together(Mutex<usize>, Condvar);

    impl Together {
        fn new() -> Together {
            Together(Mutex::new(0), Condvar::new())
        }

        fn comes(&self) {
            *self.0.lock().unwrap() += 1;
            self.1.notify_all();
        }

        fn are(&self, count: usize) -> bool {
            let here = self.0.lock().unwrap();
            let (here, _) =
                self.1.wait_timeout_while(here, Duration::from_secs(60), |here| *here < count).unwrap();
            *here >= count
        }
    }

    #[test]
    fn store_that_answers_late_gets_as_many_calls_as_it_takes_whatever_the_processors() {
        let store = store();
        let most = threads_for(&store);
        assert!(most > THREADS_MIN);
        let together = Together::new();
        let first = 4 * CALL_WEIGHT;
        // The first calls are slow. Then so many wait for each other as the store takes.
        let all = in_parallel_on(1, ITEMS_IN_A_ROW, &store, &vec![(); first + most], |i, ()| {
            if i < first {
                return (true, Some(2 * SLOW));
            }
            together.comes();
            (together.are(most), None)
        });
        assert!(all.into_iter().all(|came| came));
    }

    #[test]
    fn items_in_order_get_few_threads_until_the_store_answers_late() {
        let store = store();
        let lateness = Lateness::default();
        let threads = |processors| lateness.threads_in_order_on(processors, &store);
        assert_eq!([1, 2, 3, 64].map(threads), [2, 2, 3, THREADS_MIN]);
        (0..4 * CALL_WEIGHT).for_each(|_| lateness.note(2 * SLOW));
        assert_eq!([1, 64].map(threads), [threads_for(&store); 2]);
    }

    #[test]
    fn store_that_has_answered_late_gets_as_many_calls_as_it_takes_from_the_first_on() {
        let inner = store();
        let latency = 2 * SLOW;
        let calls = GateLimits { least: 16, most: 16, ..GateLimits::default() };
        let store = Limited::new(Arc::new(inner), Limits { latency, calls, ..Limits::default() });
        let most = threads_for(&store);
        assert!(Lateness::of(&store).threads_on(1, &store) < most);
        for _ in 0..2 * calls.least {
            store.look(&crate::store::StorePath::root()).unwrap();
        }
        let together = Together::new();
        let all = in_parallel_on(1, ITEMS_IN_A_ROW, &store, &vec![(); most], |_, ()| {
            together.comes();
            (together.are(most), None)
        });
        assert!(all.into_iter().all(|came| came));
    }

    #[test]
    fn call_that_hangs_holds_up_no_other_item() {
        let store = store();
        let items = 5 * ITEMS_IN_A_ROW;
        let hung = THREADS_MIN - 1;
        let others = Together::new();
        let all = in_parallel_on(1, ITEMS_IN_A_ROW, &store, &vec![(); items], |i, ()| {
            if i % ITEMS_IN_A_ROW == 0 && i / ITEMS_IN_A_ROW < hung {
                return (others.are(items - hung), None);
            }
            others.comes();
            (true, None)
        });
        assert!(all.into_iter().all(|others_were_done| others_were_done));
    }

    #[test]
    fn items_in_order_are_begun_in_their_order_while_one_takes_long() {
        let store = store();
        let (begun, others) = (Mutex::new(Vec::new()), Together::new());
        in_parallel_on(1, 1, &store, &[(); 5 * ITEMS_IN_A_ROW], |i, ()| {
            begun.lock().unwrap().push(i);
            match i {
                0 => assert!(others.are(2 * ITEMS_IN_A_ROW)),
                _ => others.comes(),
            }
            ((), None)
        });
        let begun = begun.into_inner().unwrap();
        let early = begun.iter().enumerate().filter(|(nth, item)| **item >= nth + THREADS_MIN);
        assert_eq!(early.count(), 0, "{begun:?}");
    }

    #[test]
    fn share_of_slow_calls_tells_a_store_that_answers_late() {
        let after = |calls: &[bool]| calls.iter().fold(0, |share, is_slow| with_call(share, *is_slow));
        let is_late = |calls: &[bool]| after(calls) >= LATE_SHARE;
        assert!(!is_late(&[true, true]), "two calls may be late for another reason");
        assert!(is_late(&[true; 4]));
        assert!(is_late(&[true, false, true, false].repeat(8)), "every second one");
        assert!(!is_late(&[&[true][..], &[false; 7]].concat().repeat(20)), "one of eight");
        assert!(!is_late(&[&[true; 50][..], &[false; 20]].concat()), "it was late before");
        assert_eq!(after(&[&[true; 50][..], &[false; 100]].concat()), 0);
        assert!(after(&[true; 1000]) <= ALL_SLOW);
    }
}
