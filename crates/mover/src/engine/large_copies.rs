//! How many large files are copied to a store at a time: no more than make it faster.
//!
//! This is for stores that answer at once: a local file system, a file server nearby. Many a such store takes a few files at a time
//! as fast as many. With few, the first of them is on the store, and can be released, long before the last, and one file is
//! synced while others are copied: if all were copied at the same time, all would be synced at the same time too, while the
//! store gets no bytes. A store of many servers may be faster with many. (A distant store gets as many files as calls.)
//!
//! So there are few at first. While more files wait for their turn, the number is raised, and stays if the rate has grown with
//! it: the gate of the store's calls, which would learn that from calls that take seconds, is raised with it. Where copies take
//! long, they do not begin together, so that files of the same size do not end together either. One mutex, under which that
//! of the gate is taken.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::host::{self, Instant};
use crate::store::limited::Limited;

/// Files at a time, at first.
const FIRST: usize = 3;
/// How long a rate is measured.
const MEASURE: Duration = Duration::from_millis(300);
/// A larger number of files stays if the rate grows by at least this part of what the number has grown by.
const GAIN: f64 = 0.3;
/// How long a number that was found to be enough is not raised.
const SETTLED: Duration = Duration::from_secs(10);
/// A copy begins after the one before by what the last one took, divided by the number of files and by this; at most so much
/// later.
const APART: u32 = 4;
const APART_MAX: Duration = Duration::from_millis(200);
/// A file that waits looks so often at the rate, and whether it is to wait no longer. Of many that wait each looks more rarely:
/// by this part for each.
const LOOK: Duration = Duration::from_millis(50);
const LOOKERS: u32 = 4;
/// A store that takes no byte for so long is not waited for here: the limit of its calls ends the wait with an error.
const STALLED: Duration = Duration::from_secs(60);

/// The large files that are being copied to one store.
#[derive(Debug, Default)]
pub(super) struct LargeCopies {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug)]
struct State {
    running: usize,
    waiting: usize,
    /// How many are allowed since the number was raised; before [`FIRST`]. No more than the gate allows in any case.
    raised: Option<usize>,
    /// When the last copy began, and how long the last one took that has ended.
    begun: Option<Instant>,
    took: Duration,
    /// The number before it was raised, and its rate, while it is open whether it stays.
    before: Option<(usize, f64)>,
    /// Since when as many as are allowed are copied, and how many bytes had been copied then.
    since: Option<(Instant, u64)>,
    settled: Option<Instant>,
    /// The bytes that had been copied when they were last looked at and were more than before.
    moved: Option<(Instant, u64)>,
}

impl Default for State {
    fn default() -> State {
        State {
            running: 0,
            waiting: 0,
            raised: None,
            begun: None,
            took: Duration::ZERO,
            before: None,
            since: None,
            settled: None,
            moved: None,
        }
    }
}

/// The turn of one file, until it is dropped.
#[derive(Debug)]
pub(super) struct LargeCopy<'a> {
    copies: &'a LargeCopies,
    begun: Instant,
}

impl LargeCopies {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a turn. None if it is over before.
    pub(super) fn begin(&self, store: &Limited, is_over: impl Fn() -> bool) -> Option<LargeCopy<'_>> {
        self.lock().waiting += 1;
        let turn = self.wait(store, is_over);
        let mut state = self.lock();
        state.waiting -= 1;
        state.end_measure_if_none_waits();
        // A turn may be free that it was woken for, or one more.
        self.ended.notify_one();
        drop(state);
        turn
    }

    fn wait(&self, store: &Limited, is_over: impl Fn() -> bool) -> Option<LargeCopy<'_>> {
        // That may take long, so it is asked without the lock.
        while !is_over() {
            let (now, copied) = (Instant::now(), store.large_bytes());
            let mut state = self.lock();
            let allowed = state.raised.unwrap_or(FIRST).min(store.large_uploads());
            let is_full = |state: &mut State| state.running >= allowed;
            let too_soon = state.too_soon(now, allowed);
            let may_begin = !is_full(&mut state) && too_soon.is_zero();
            if may_begin || state.is_stalled(now, copied) {
                state.running += 1;
                state.begun = Some(now);
                return Some(LargeCopy { copies: self, begun: now });
            }
            if is_full(&mut state) {
                let raised = state.adapt(now, copied, allowed, store.large_uploads_max());
                // Once: a store that is busy lowers the limit again.
                raised.inspect(|files| store.admit_large_uploads(*files));
                let look = LOOK + LOOK * u32::try_from(state.waiting).unwrap_or(0) / LOOKERS;
                drop(host::wait_while((&self.state, &self.ended), state, look, is_full));
            } else {
                // Fewer are copied than are allowed: that is no measure of the number.
                state.since = None;
                drop(host::wait_while((&self.state, &self.ended), state, too_soon, |_| true));
            }
        }
        None
    }
}

impl Drop for LargeCopy<'_> {
    fn drop(&mut self) {
        let mut state = self.copies.lock();
        state.running -= 1;
        state.took = self.begun.elapsed();
        state.end_measure_if_none_waits();
        self.copies.ended.notify_one();
    }
}

impl State {
    /// While none waits, it is not known whether the store could do more.
    fn end_measure_if_none_waits(&mut self) {
        if self.waiting == 0 {
            (self.since, self.moved) = (None, None);
            if let Some((fewer, _)) = self.before.take() {
                self.raised = Some(fewer);
            }
        }
    }

    /// How long it takes until another copy may begin beside those that run.
    fn too_soon(&self, now: Instant, allowed: usize) -> Duration {
        let parts = APART * u32::try_from(allowed).unwrap_or(1).max(1);
        let apart = (self.took / parts).min(APART_MAX);
        match self.begun {
            Some(begun) if self.running > 0 => apart.saturating_sub(now.since(begun)),
            _ => Duration::ZERO,
        }
    }

    /// True if the store has taken no byte for a long time.
    fn is_stalled(&mut self, now: Instant, copied: u64) -> bool {
        match self.moved {
            Some((then, before)) if before == copied => now.since(then) >= STALLED,
            _ => {
                self.moved = Some((now, copied));
                false
            }
        }
    }

    /// Called while as many files are copied as are allowed, and more wait. Returns the number when it is raised.
    fn adapt(&mut self, now: Instant, copied: u64, allowed: usize, most: usize) -> Option<usize> {
        let Some((since, from)) = self.since else {
            self.since = Some((now, copied));
            return None;
        };
        let took = now.since(since);
        if took < MEASURE {
            return None;
        }
        let rate = copied.saturating_sub(from) as f64 / took.as_secs_f64();
        self.since = Some((now, copied));
        match self.before {
            Some((fewer, before)) if rate < before * least_growth(fewer, allowed) => {
                (self.raised, self.before, self.settled) = (Some(fewer), None, Some(now));
            }
            _ if self.settled.is_some_and(|settled| now.since(settled) < SETTLED) => {}
            _ if allowed >= most => self.before = None,
            _ => {
                self.before = Some((allowed, rate));
                self.raised = Some((allowed + allowed.div_ceil(2)).min(most));
                // Of the new number, once so many are copied.
                self.since = None;
                return self.raised;
            }
        }
        None
    }
}

/// By which factor the rate is to grow if there are more files.
fn least_growth(fewer: usize, more: usize) -> f64 {
    1.0 + GAIN * (more as f64 / fewer.max(1) as f64 - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::limited::{GateLimits, Limits};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::Arc;

    /// How many files are allowed after some seconds at a store with a rate for each number of files.
    fn after(seconds: u64, most: usize, rate: impl Fn(usize) -> f64) -> usize {
        let (mut state, mut copied, mut time) = (State::default(), 0.0, Instant::now());
        for _ in 0..seconds * 20 {
            time = time + LOOK;
            let allowed = state.raised.unwrap_or(FIRST);
            copied += rate(allowed) * LOOK.as_secs_f64();
            state.adapt(time, copied as u64, allowed, most);
        }
        state.raised.unwrap_or(FIRST)
    }

    #[test]
    fn store_with_a_rate_of_its_own_gets_few_files_at_a_time() {
        assert_eq!(after(5, 64, |_| 1e8), FIRST);
        // It is tried again.
        let more_later = std::cell::Cell::new(0);
        after(30, 64, |files| {
            more_later.set(more_later.get().max(files));
            1e8
        });
        assert_eq!(more_later.get(), FIRST + 2);
    }

    #[test]
    fn store_that_is_faster_with_more_files_gets_more() {
        assert_eq!(after(10, 64, |files| files as f64 * 1e7), 64);
        assert_eq!(after(10, 12, |files| files as f64 * 1e7), 12);
        let of_ten = after(10, 64, |files| files.min(10) as f64 * 1e7);
        assert!((8..=12).contains(&of_ten), "{of_ten}");
    }

    #[test]
    fn store_that_takes_no_byte_is_not_waited_for() {
        let (mut state, begin) = (State::default(), Instant::now());
        assert!(!state.is_stalled(begin, 7) && !state.is_stalled(begin + STALLED / 2, 7));
        assert!(!state.is_stalled(begin + STALLED / 2, 8) && !state.is_stalled(begin + STALLED, 8));
        assert!(state.is_stalled(begin + STALLED + STALLED / 2, 8));
    }

    #[test]
    fn long_copies_do_not_begin_together() {
        let now = Instant::now();
        let mut state = State { running: 1, begun: Some(now), ..State::default() };
        assert_eq!(state.too_soon(now, 3), Duration::ZERO, "none has ended");
        state.took = Duration::from_millis(1200);
        assert_eq!(state.too_soon(now, 3), Duration::from_millis(100));
        assert_eq!(state.too_soon(now + Duration::from_millis(99), 3), Duration::from_millis(1));
        assert_eq!(state.too_soon(now + Duration::from_millis(101), 3), Duration::ZERO);
        state.took = Duration::from_secs(1000);
        assert_eq!(state.too_soon(now, 3), APART_MAX);
        assert_eq!(state.too_soon(now, 5000), Duration::from_millis(50));
        state.running = 0;
        assert_eq!(state.too_soon(now, 3), Duration::ZERO);
    }

    fn store(calls: GateLimits) -> Limited {
        let options = crate::store::PosixOptions::default();
        let store =
            crate::store::PosixStore::open(&std::env::temp_dir(), options, crate::store::MoverId::own());
        Limited::new(Arc::new(store.unwrap()), Limits { calls, ..Limits::default() })
    }

    #[test]
    fn turn_is_waited_for_until_one_ends_or_all_is_over() {
        let (copies, store) = (LargeCopies::default(), store(GateLimits::default()));
        let begin = |is_over: bool| copies.begin(&store, || is_over);
        let turns: Vec<_> = (0..FIRST).map(|_| begin(false).unwrap()).collect();
        assert!(begin(true).is_none());
        let tries = AtomicUsize::new(0);
        assert!(copies.begin(&store, || tries.fetch_add(1, Ordering::Relaxed) > 2).is_none());
        std::thread::scope(|scope| {
            let waits: Vec<_> = (0..4).map(|_| scope.spawn(|| begin(false).is_some())).collect();
            drop(turns);
            assert!(waits.into_iter().all(|one| one.join().unwrap()));
        });
        let state = copies.lock();
        assert_eq!((state.running, state.waiting), (0, 0));
    }

    #[test]
    fn gate_allows_as_many_calls_as_files_that_make_the_store_faster() {
        let limits = |least, most| GateLimits { least, most, ..GateLimits::default() };
        for (calls, first) in [(limits(4, 64), FIRST), (limits(1, 16), 1)] {
            let (copies, store) = (LargeCopies::default(), store(calls));
            let running: Vec<_> = (0..first).map(|_| copies.begin(&store, || false).unwrap()).collect();
            let begun = Instant::now();
            // Bytes move only while it waits: no more than one trial is made, and it does not stay.
            let more = copies.begin(&store, || begun.elapsed() > Duration::from_secs(30));
            assert!(more.is_some() && store.large_uploads() > first, "the number was raised");
            drop((running, more));
            store.admit_large_uploads(1000);
            assert_eq!(store.large_uploads(), store.large_uploads_max());
            assert_eq!(store.parallelism(), calls.most);
        }
    }
}
