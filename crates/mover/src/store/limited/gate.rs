//! A limit of calls at a time that adapts to the store.
//!
//! After each window of calls the gate compares throughput and time per unit of work with before. The limit grows while
//! the store answers as fast as it can, or while throughput grows; it shrinks when calls only wait for one another, and
//! is halved when the store says that it is busy. A unit of work is a call or [`CALL_BYTES`] bytes.

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
/// By how much the least time seen rises in each window, so that a store that became slower is learnt.
const FORGET: f64 = 1.02;

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
    left: Condvar,
}

#[derive(Debug)]
struct State {
    limit: f64,
    running: usize,
    window: Window,
    /// Work per second in the window before.
    throughput: f64,
    /// The least seconds of one unit of work.
    least_time: f64,
}

#[derive(Debug)]
struct Window {
    started: Instant,
    calls: u32,
    work: f64,
    /// Seconds of all calls together.
    time: f64,
    /// A call had to wait for its turn.
    was_full: bool,
    was_busy: bool,
}

impl Window {
    fn new() -> Window {
        Window { started: Instant::now(), calls: 0, work: 0.0, time: 0.0, was_full: false, was_busy: false }
    }
}

/// A turn. It ends when it is dropped, too.
#[derive(Debug)]
pub(super) struct Permit<'a> {
    gate: &'a Gate,
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
                running: 0,
                window: Window::new(),
                throughput: 0.0,
                least_time: f64::INFINITY,
            }),
            left: Condvar::new(),
        }
    }

    /// The number of calls that may run now.
    pub fn limit(&self) -> usize {
        self.lock().limit as usize
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Waits for a turn.
    pub(super) fn enter(&self, title: impl Fn() -> String) -> StoreResult<Permit<'_>> {
        let mut state = self.lock();
        if state.running >= state.limit as usize {
            state.window.was_full = true;
            let full = |state: &mut State| state.running >= state.limit as usize;
            let (waited, has_turn) =
                host::wait_while((&self.state, &self.left), state, self.limits.wait, full);
            if !has_turn {
                let calls = waited.running;
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
        state.running += 1;
        drop(state);
        Ok(Permit { gate: self, started: Instant::now(), bytes: 0, was_busy: false })
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
        state.running -= 1;
        state.window.calls += 1;
        state.window.work += 1.0 + self.bytes as f64 / CALL_BYTES as f64;
        state.window.time += self.started.elapsed().as_secs_f64();
        state.window.was_busy |= self.was_busy;
        let enough = state.window.calls >= WINDOW_CALLS.max(state.limit as u32);
        if (enough && state.window.started.elapsed() >= WINDOW) || self.was_busy {
            state.adapt(self.gate.limits);
        }
        drop(state);
        // All of them, because the limit may have grown by several.
        self.gate.left.notify_all();
    }
}

impl State {
    fn adapt(&mut self, limits: GateLimits) {
        let window = std::mem::replace(&mut self.window, Window::new());
        let throughput = window.work / window.started.elapsed().as_secs_f64().max(1e-6);
        let time = window.time / window.work.max(1.0);
        self.limit =
            next_limit(self.limit, &window, throughput / self.throughput.max(1e-6), time / self.least_time);
        self.limit = self.limit.clamp(limits.least as f64, limits.most as f64);
        self.throughput = throughput;
        self.least_time = (self.least_time * FORGET).min(time);
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
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    for _ in 0..calls {
                        let permit = gate.enter(String::new).unwrap();
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
        gate.enter(String::new).unwrap().leave(0, Some(&busy));
        assert_eq!(gate.limit(), 20);
        for _ in 0..8 {
            gate.enter(String::new).unwrap().leave(0, Some(&busy));
        }
        assert_eq!(gate.limit(), 4);
    }

    #[test]
    fn call_behind_hanging_calls_fails_after_the_limit() {
        let gate = Gate::new(GateLimits { least: 1, most: 1, wait: Duration::from_millis(20) });
        let hanging = gate.enter(String::new).unwrap();
        let failure = gate.enter(|| "/slow".into()).unwrap_err();
        assert!(failure.is_transient);
        assert_eq!(failure.code(), Code::TimedOut);
        assert!(failure.to_string().contains("/slow"), "{failure}");
        drop(hanging);
        assert!(gate.enter(String::new).is_ok());
    }
}
