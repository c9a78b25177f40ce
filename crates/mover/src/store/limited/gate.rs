//! A limit of calls at a time that adapts to the store.
//!
//! After each window of calls the gate compares throughput and time per unit of work with before. The limit grows while
//! the store answers as fast as it can, or while throughput grows; it shrinks when calls only wait for one another, and
//! is halved when the store says that it is busy. A unit of work is a call or [`CALL_BYTES`] bytes; calls of different
//! sorts take different times, so each sort has a least time of its own. At first the limit doubles with each window, as
//! in TCP's slow start: a store that answers after 30 ms would have been drained before a limit that grows by one mattered.
//! Where its calls take long, as uploads of many calls to a distant server do, the limit grows fourfold.
//!
//! Calls that write leave half of the limit to calls that read while such wait, because programs may wait for them: many
//! stores move bytes both ways at once, and a long upload keeps its turn for seconds. Calls that read leave a quarter.
//! Uploads of large files always leave a quarter, one turn at least: without the short calls after them nothing that was
//! copied would be published, and small files would wait for large ones.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use forebay_types::Code;

use crate::host::{self, Instant};
use crate::store::error::{StoreError, StoreResult};

/// Bytes that count as much as a call without bytes.
const CALL_BYTES: u64 = 256 * 1024;
/// A window has at least this many calls and lasts at least this long, so that one slow call decides nothing.
const WINDOW_CALLS: u32 = 16;
const WINDOW: Duration = Duration::from_millis(50);
/// Time per unit, against the least seen: up to the first factor the store has room, from the second on calls queue.
const ROOM: f64 = 1.3;
const QUEUES: f64 = 2.0;
/// Throughput that counts as growth.
const GROWTH: f64 = 1.05;
/// The same while the limit doubles. Files of 4 KiB and of 64 KiB take different times by the unit where each write is a
/// call, so a window of the former makes the next one look slow.
const STARTING_GROWTH: f64 = 1.4;
/// By how much the limit grows at first, and the same after a window whose calls took at least [`LONG_CALL`] each.
const START: f64 = 2.0;
const START_LONG: f64 = 4.0;
const LONG_CALL: Duration = Duration::from_millis(200);
/// The first limit of a store that is known to be distant, of the least one.
const DISTANT: usize = 4;
/// By how much the least time seen rises in each window, so that a store that became slower is learnt.
const FORGET: f64 = 1.02;

/// Ways of calls.
const READS: usize = 0;
const WRITES: usize = 1;
const LARGE: usize = 2;
const WAYS: usize = 3;
/// Bytes of an upload from which on it may keep its turn for long.
const LARGE_BYTES: u64 = 8 << 20;

/// What a call does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sort {
    Look,
    Read,
    Upload,
    /// Of a file that keeps its turn for long.
    LargeUpload,
    MakeDurable,
    Name,
    /// Of the directories for temporaries: several calls to the store, as many as it takes.
    UploadDirectories,
    Other,
}

const SORTS: usize = 8;
/// Sorts of calls whose time is the store's alone: others move bytes, at a rate that may be limited, or list directories.
const SHORT: [Sort; 2] = [Sort::Look, Sort::Name];

impl Sort {
    /// That of an upload of so many bytes.
    pub(super) fn of_upload(bytes: u64) -> Sort {
        match bytes >= LARGE_BYTES {
            true => Sort::LargeUpload,
            false => Sort::Upload,
        }
    }

    /// False for calls that say nothing of how soon the store answers: making directories, with a trial before the first of
    /// them, takes up to four times as many calls as removing them, each of which waits for the lock of one directory. The
    /// quickest would be the measure of all others.
    fn is_measured(self) -> bool {
        self != Sort::UploadDirectories
    }

    /// 0 for calls that read, 1 for those that write, 2 for those that write for long.
    fn way(self) -> usize {
        match self {
            Sort::Look | Sort::Read | Sort::Other => READS,
            Sort::Upload | Sort::MakeDurable | Sort::Name | Sort::UploadDirectories => WRITES,
            Sort::LargeUpload => LARGE,
        }
    }
}

/// Bounds of the number of calls at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GateLimits {
    /// At least, and at first.
    pub least: usize,
    /// At most.
    pub most: usize,
    /// How long a call waits for its turn, before it fails with a transient error.
    pub wait: Duration,
}

impl Default for GateLimits {
    fn default() -> GateLimits {
        GateLimits { least: 4, most: 64, wait: Duration::from_secs(60) }
    }
}

/// The gate.
#[derive(Debug)]
pub struct Gate {
    limits: GateLimits,
    state: Mutex<State>,
    /// A turn ended, for calls of each way.
    left: [Condvar; WAYS],
    /// Bytes that uploads of large files have moved so far.
    moved: AtomicU64,
}

#[derive(Debug)]
struct State {
    limit: f64,
    /// Calls that run and that wait, by their way.
    running: [usize; WAYS],
    waiting: [usize; WAYS],
    window: Window,
    /// The limit still doubles.
    is_starting: bool,
    /// Work per second in the window before, and whether a call had to wait for its turn in it.
    throughput: f64,
    was_full: bool,
    /// The least seconds of one unit of work, by sort.
    least_time: [f64; SORTS],
}

#[derive(Debug)]
struct Window {
    started: Instant,
    calls: u32,
    /// Units of work, and the seconds that they took one after the other, by sort.
    work: [f64; SORTS],
    time: [f64; SORTS],
    /// A call had to wait for its turn.
    was_full: bool,
    was_busy: bool,
}

impl Window {
    fn new() -> Window {
        Window {
            started: Instant::now(),
            calls: 0,
            work: [0.0; SORTS],
            time: [0.0; SORTS],
            was_full: false,
            was_busy: false,
        }
    }
}

/// A turn. It ends when it is dropped, too.
#[derive(Debug)]
pub(super) struct Permit<'a> {
    gate: &'a Gate,
    sort: Sort,
    started: Instant,
    bytes: u64,
    was_busy: bool,
}

impl Gate {
    /// A gate with these bounds.
    pub fn new(limits: GateLimits) -> Gate {
        let least = limits.least.max(1);
        let limits = GateLimits { least, most: limits.most.max(least), ..limits };
        Gate {
            limits,
            state: Mutex::new(State {
                limit: least as f64,
                running: [0; WAYS],
                waiting: [0; WAYS],
                window: Window::new(),
                is_starting: true,
                throughput: 0.0,
                was_full: false,
                least_time: [f64::INFINITY; SORTS],
            }),
            left: std::array::from_fn(|_| Condvar::new()),
            moved: AtomicU64::new(0),
        }
    }

    /// The number of calls that may run now.
    pub fn limit(&self) -> usize {
        self.lock().limit as usize
    }

    /// The number of uploads of large files that may run now.
    pub(super) fn large_limit(&self) -> usize {
        most_large(self.limit())
    }

    /// The same at most, whatever it learns.
    pub(super) fn large_limit_max(&self) -> usize {
        most_large(self.limits.most)
    }

    /// Raises the limit so that so many uploads of large files may run, within its bounds: somebody measures whether the store
    /// is faster with them. Such calls take too long for a window of them to end soon.
    pub(super) fn admit_large(&self, uploads: usize) {
        let mut state = self.lock();
        let mut limits = state.limit as usize..=self.limits.most;
        let limit = limits.find(|limit| most_large(*limit) >= uploads).unwrap_or(self.limits.most);
        state.limit = state.limit.max(limit as f64);
        let waiting = state.waiting;
        drop(state);
        // Each that leaves wakes the next.
        self.wake(&waiting);
    }

    /// Uploads of large files have moved so many bytes.
    pub(super) fn note_moved(&self, bytes: u64) {
        self.moved.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    /// Begins with a limit of [`DISTANT`] times the least: the store is known to be distant, where calls wait for the way and
    /// not for each other.
    pub(super) fn begin_distant(&self) {
        let mut state = self.lock();
        state.limit = (DISTANT * self.limits.least).min(self.limits.most) as f64;
    }

    /// True if short calls, of which some were made, take at least so long, also when the store has least to do.
    pub(super) fn takes_at_least(&self, time: Duration) -> bool {
        let state = self.lock();
        let least =
            SHORT.map(|sort| state.least_time[sort as usize]).into_iter().fold(f64::INFINITY, f64::min);
        least.is_finite() && least >= time.as_secs_f64()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Wakes a thread of each way on which some wait. Each condition variable that is notified costs a system call,
    /// also when no thread waits for it.
    fn wake(&self, waiting: &[usize; WAYS]) {
        let ways = self.left.iter().zip(waiting).filter(|(_, waiting)| **waiting > 0);
        ways.for_each(|(left, _)| left.notify_one());
    }

    /// Waits for a turn.
    pub(super) fn enter(&self, sort: Sort, title: impl Fn() -> String) -> StoreResult<Permit<'_>> {
        let mut state = self.lock();
        let way = sort.way();
        if state.is_full(way) {
            state.window.was_full = true;
            state.waiting[way] += 1;
            let full = |state: &mut State| state.is_full(way);
            let mut moved = self.moved();
            let wait =
                |state| host::wait_while((&self.state, &self.left[way]), state, self.limits.wait, full);
            let (mut waited, mut has_turn) = wait(state);
            // Large uploads before it may take long: it waits while they move.
            while !has_turn && way == LARGE && self.moved() != moved {
                moved = self.moved();
                (waited, has_turn) = wait(waited);
            }
            waited.waiting[way] -= 1;
            if waited.waiting[way] == 0 {
                // The others have the whole limit again.
                self.wake(&waited.waiting);
            }
            if !has_turn {
                let calls: usize = waited.running.iter().sum();
                // This thread may have been woken for a turn that it no longer takes: another thread gets it.
                self.wake(&waited.waiting);
                drop(waited);
                return Err(StoreError::transient(
                    Code::TimedOut,
                    format!("cannot reach the store {}", title()),
                )
                .why(format!("{calls} calls have not been answered for {} s", self.limits.wait.as_secs()))
                .cure("check the store; Forebay tries again"));
            }
            state = waited;
        }
        state.running[way] += 1;
        drop(state);
        Ok(Permit { gate: self, sort, started: Instant::now(), bytes: 0, was_busy: false })
    }
}

impl Permit<'_> {
    /// Ends the turn with the call's bytes and failure.
    pub(super) fn leave(mut self, bytes: u64, failure: Option<&StoreError>) {
        self.bytes = bytes;
        self.was_busy = failure.is_some_and(|e| e.is_transient);
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        let before = state.limit as usize;
        state.running[self.sort.way()] -= 1;
        if self.sort.is_measured() {
            state.window.calls += 1;
            state.window.work[self.sort as usize] += 1.0 + self.bytes as f64 / CALL_BYTES as f64;
            state.window.time[self.sort as usize] += self.started.elapsed().as_secs_f64();
        }
        state.window.was_busy |= self.was_busy;
        let least = if state.is_starting { state.limit as u32 } else { WINDOW_CALLS.max(state.limit as u32) };
        let is_long = state.is_starting || state.window.started.elapsed() >= WINDOW;
        if (state.window.calls >= least && is_long) || self.was_busy {
            state.adapt(self.gate.limits);
        }
        let more = (state.limit as usize).saturating_sub(before);
        let waiting = state.waiting;
        drop(state);
        // This turn, and those by which the limit grew. Each waiting thread that is woken in vain costs as much as a call.
        for _ in 0..=more {
            self.gate.wake(&waiting);
        }
    }
}

/// Of so many calls those that may be uploads of large files.
fn most_large(limit: usize) -> usize {
    limit - (limit / 4).max(1).min(limit - 1)
}

impl State {
    /// True while a call that goes this way has to wait.
    fn is_full(&self, way: usize) -> bool {
        let limit = self.limit as usize;
        let most = most_large(limit);
        let writing = self.running[WRITES] + self.running[LARGE];
        let (running, others_wait) = match way {
            READS => (self.running[READS], self.waiting[WRITES] + self.waiting[LARGE] > 0),
            _ => (writing, self.waiting[READS] > 0),
        };
        let share = match others_wait {
            // With so few a listing, which looks at its objects, has to have two.
            _ if limit <= 2 => limit,
            false => limit,
            true if way == READS => most,
            true => limit / 2,
        };
        let is_full = self.running.iter().sum::<usize>() >= limit || running >= share;
        is_full || (way == LARGE && self.running[LARGE] >= most)
    }

    fn adapt(&mut self, limits: GateLimits) {
        let window = std::mem::replace(&mut self.window, Window::new());
        let throughput = window.work.iter().sum::<f64>() / window.started.elapsed().as_secs_f64().max(1e-6);
        let call_s = window.time.iter().sum::<f64>() / f64::from(window.calls.max(1));
        let (mut time, mut least) = (0.0, 0.0);
        for sort in 0..SORTS {
            let work = window.work[sort];
            if work > 0.0 {
                let each = window.time[sort] / work;
                time += window.time[sort];
                least += work * self.least_time[sort].min(each);
                self.least_time[sort] = (self.least_time[sort] * FORGET).min(each);
            }
        }
        // A window in which the mover had less to do says nothing of what the store can do.
        let growth = if self.was_full { throughput / self.throughput.max(1e-6) } else { 1.0 };
        let slowness = if least > 0.0 { time / least } else { 1.0 };
        self.is_starting &=
            !window.was_busy && (!window.was_full || slowness <= ROOM || growth >= STARTING_GROWTH);
        self.limit = match self.is_starting && window.was_full {
            true if call_s >= LONG_CALL.as_secs_f64() => START_LONG * self.limit,
            true => START * self.limit,
            false => next_limit(self.limit, &window, growth, slowness),
        };
        self.limit = self.limit.clamp(limits.least as f64, limits.most as f64);
        self.throughput = throughput;
        self.was_full = window.was_full;
    }
}

/// The next limit. `growth` is throughput against the window before, `slowness` time per unit against the least seen.
fn next_limit(limit: f64, window: &Window, growth: f64, slowness: f64) -> f64 {
    if window.was_busy {
        limit / 2.0
    } else if !window.was_full {
        // Nothing was learnt: the mover has less to do.
        limit
    } else if slowness <= ROOM || growth >= GROWTH {
        limit + (limit / 8.0).max(1.0)
    } else if slowness > QUEUES {
        limit * 0.85
    } else {
        limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn drive(gate: &Gate, threads: usize, calls: usize, call: impl Fn() + Sync) {
        drive_of(Sort::Other, gate, threads, calls, call);
    }

    fn drive_of(sort: Sort, gate: &Gate, threads: usize, calls: usize, call: impl Fn() + Sync) {
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    for _ in 0..calls {
                        let permit = gate.enter(sort, String::new).unwrap();
                        call();
                        permit.leave(0, None);
                    }
                });
            }
        });
    }

    #[test]
    fn limit_grows_for_a_distant_store_and_is_kept() {
        let gate = Gate::new(GateLimits { least: 2, most: 24, ..GateLimits::default() });
        let (running, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        drive(&gate, 32, 40, || {
            most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(10));
            running.fetch_sub(1, Ordering::SeqCst);
        });
        assert!(gate.limit() >= 8, "{}", gate.limit());
        assert!(most.load(Ordering::SeqCst) <= 24);
    }

    #[test]
    fn limit_grows_fourfold_while_calls_take_long_and_not_after_a_pause() {
        let limits = GateLimits { least: 2, most: 64, ..GateLimits::default() };
        let idle = Gate::new(limits);
        std::thread::sleep(LONG_CALL);
        drive_of(Sort::Name, &idle, 3, 1, || std::thread::sleep(LONG_CALL / 10));
        assert_eq!(idle.limit(), 4);
        let gate = Gate::new(limits);
        assert!(!gate.takes_at_least(Duration::ZERO), "no window has ended");
        // More calls than the limit: a window that was full.
        drive_of(Sort::Name, &gate, 3, 1, || std::thread::sleep(LONG_CALL));
        assert_eq!(gate.limit(), 8);
        let distant = Gate::new(GateLimits { least: 2, most: 6, ..GateLimits::default() });
        distant.begin_distant();
        assert_eq!(distant.limit(), 6);
        assert!(gate.takes_at_least(LONG_CALL) && !gate.takes_at_least(2 * LONG_CALL));
    }

    #[test]
    fn large_upload_waits_for_others_as_long_as_they_move_bytes() {
        let wait = Duration::from_secs(3);
        let gate = Gate::new(GateLimits { least: 2, most: 2, wait });
        let enter = || gate.enter(Sort::LargeUpload, String::new);
        let (first, second) = (enter().unwrap(), enter());
        // A quarter is left to short calls: one of two.
        assert!(second.is_err_and(|e| e.error.why.contains("not been answered")));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| (Instant::now(), enter().is_ok(), Instant::now()));
            for _ in 0..8 {
                std::thread::sleep(wait / 6);
                gate.note_moved(1);
            }
            drop(first);
            let (begun, has_turn, ended) = waits.join().unwrap();
            assert!(has_turn && ended.since(begun) > wait);
        });
    }

    #[test]
    fn directories_for_temporaries_are_no_measure_of_other_calls() {
        let gate = Gate::new(GateLimits { least: 2, most: 64, ..GateLimits::default() });
        let end = |sort: Sort, took: Duration| {
            let permit = gate.enter(sort, String::new).unwrap();
            std::thread::sleep(took);
            permit.leave(0, None);
        };
        // Some removed at once, others made: as many calls as a window has.
        end(Sort::UploadDirectories, Duration::ZERO);
        end(Sort::UploadDirectories, Duration::from_millis(5));
        let (least, of_window) = {
            let state = gate.lock();
            (state.least_time, (state.window.calls, state.window.time))
        };
        assert_eq!((least, of_window), ([f64::INFINITY; SORTS], (0, [0.0; SORTS])));
        // They end no window of other calls, and are none of it.
        end(Sort::Name, Duration::ZERO);
        end(Sort::UploadDirectories, Duration::from_millis(5));
        assert_eq!(gate.lock().window.calls, 1);
        end(Sort::Name, Duration::ZERO);
        assert!(gate.takes_at_least(Duration::ZERO));
        assert_eq!(Sort::UploadDirectories.way(), WRITES);
    }

    #[test]
    fn limit_stays_low_where_calls_only_queue() {
        let gate = Gate::new(GateLimits { least: 2, most: 64, ..GateLimits::default() });
        let one = Mutex::new(());
        drive(&gate, 64, 12, || {
            let _alone = one.lock().unwrap();
            std::thread::sleep(Duration::from_millis(1));
        });
        assert!(gate.limit() <= 16, "{}", gate.limit());
    }

    #[test]
    fn limit_is_halved_by_a_busy_store_and_bounded() {
        let gate = Gate::new(GateLimits { least: 4, most: 64, ..GateLimits::default() });
        gate.lock().limit = 40.0;
        let busy = StoreError::transient(Code::Busy, "slow down");
        gate.enter(Sort::Other, String::new).unwrap().leave(0, Some(&busy));
        assert_eq!(gate.limit(), 20);
        for _ in 0..8 {
            gate.enter(Sort::Other, String::new).unwrap().leave(0, Some(&busy));
        }
        assert_eq!(gate.limit(), 4);
    }

    #[test]
    fn calls_that_read_get_their_half_behind_calls_that_write() {
        let gate = Gate::new(GateLimits { least: 4, most: 4, ..GateLimits::default() });
        let begun = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let uploads: Vec<_> = (0..4).map(|_| gate.enter(Sort::Upload, String::new).unwrap()).collect();
            for _ in 0..4 {
                scope.spawn(|| drop(gate.enter(Sort::Upload, String::new).unwrap()));
            }
            scope.spawn(|| {
                let read = gate.enter(Sort::Read, String::new).unwrap();
                begun.fetch_add(1, Ordering::SeqCst);
                drop(read);
            });
            while gate.lock().waiting != [1, 4, 0] {
                std::thread::yield_now();
            }
            // Three uploads run on: more than their half, so the turn goes to the call that reads.
            let mut uploads = uploads.into_iter();
            drop(uploads.next());
            while begun.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            assert_eq!(uploads.len(), 3);
        });
    }

    #[test]
    fn uploads_of_large_files_leave_a_turn_to_short_calls() {
        let gate = Gate::new(GateLimits { least: 4, most: 4, wait: Duration::from_millis(20) });
        let large: Vec<_> =
            (0..3).map(|_| gate.enter(Sort::of_upload(1 << 30), String::new).unwrap()).collect();
        assert!(gate.enter(Sort::LargeUpload, String::new).is_err());
        for sort in [Sort::Upload, Sort::MakeDurable, Sort::Name, Sort::Look, Sort::of_upload(1000)] {
            drop(gate.enter(sort, String::new).unwrap());
        }
        drop(large);
        let gate = Gate::new(GateLimits { least: 1, most: 1, wait: Duration::from_millis(20) });
        drop(gate.enter(Sort::LargeUpload, String::new).unwrap());
    }

    #[test]
    fn call_behind_hanging_calls_fails_after_the_limit() {
        let gate = Gate::new(GateLimits { least: 1, most: 1, wait: Duration::from_millis(20) });
        let hanging = gate.enter(Sort::Other, String::new).unwrap();
        let failure = gate.enter(Sort::Other, || "/slow".into()).unwrap_err();
        assert!(failure.is_transient);
        assert_eq!(failure.code(), Code::TimedOut);
        assert!(failure.to_string().contains("/slow"), "{failure}");
        drop(hanging);
        assert!(gate.enter(Sort::Other, String::new).is_ok());
    }
}
