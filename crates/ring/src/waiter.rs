//! How a caller waits for its reply, and by which clock: the kernel's, unless a simulation has taken its place.
//!
//! A simulation that runs many clients in one process lets one of them run at a time; where a client would sleep,
//! another goes on. Who does not simulate pays one load of a word that nobody writes, once a call.

use std::sync::atomic::AtomicU32;
use std::sync::OnceLock;
use std::time::Duration;

use forebay_sys::wait;

/// What a simulation does in the kernel's place, on the calling thread.
pub trait Waiter: Send + Sync {
    /// Nanoseconds on a clock that never goes back.
    fn now_ns(&self) -> u64;

    /// Sleeps while `word` is `value`, for `timeout_ms` of that clock at most; it may return early.
    fn sleep(&self, word: &AtomicU32, value: u32, timeout_ms: u64);
}

static SIMULATED: OnceLock<Box<dyn Waiter>> = OnceLock::new();

/// Has all calls of this process wait by `waiter` from now on. Only the first one counts.
pub fn simulate(waiter: Box<dyn Waiter>) {
    let _ = SIMULATED.set(waiter);
}

/// True when a simulation has the clock: spinning would be time in which nothing happens.
#[inline]
pub(crate) fn is_simulated() -> bool {
    SIMULATED.get().is_some()
}

/// Nanoseconds on the monotonic clock.
pub(crate) fn now_ns() -> u64 {
    nanoseconds(libc::CLOCK_MONOTONIC)
}

/// Nanoseconds on the clock by which calls wait: it stands still while a machine is suspended.
pub fn call_clock() -> u64 {
    now_ns()
}

/// Nanoseconds on the clock that leases between nodes run by: it goes on while a machine is suspended.
pub fn lease_clock() -> u64 {
    nanoseconds(libc::CLOCK_BOOTTIME)
}

fn nanoseconds(clock: libc::clockid_t) -> u64 {
    if let Some(waiter) = SIMULATED.get() {
        return waiter.now_ns();
    }
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is valid for the call, which cannot fail for clocks that every Linux has.
    unsafe { libc::clock_gettime(clock, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Sleeps for a time by [`call_clock`]; in a simulation for whole milliseconds.
pub fn pause(time: Duration) {
    static NOTHING: AtomicU32 = AtomicU32::new(0);
    match SIMULATED.get() {
        Some(waiter) => waiter.sleep(&NOTHING, 0, (time.as_millis() as u64).max(1)),
        None => std::thread::sleep(time),
    }
}

/// Sleeps while `word` is `value`, for `timeout_ms` at most.
pub(crate) fn sleep(word: &AtomicU32, value: u32, timeout_ms: u64) {
    match SIMULATED.get() {
        Some(waiter) => waiter.sleep(word, value, timeout_ms),
        None => wait::sleep(word, value, Duration::from_millis(timeout_ms)),
    }
}
