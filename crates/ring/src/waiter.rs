//! How a caller waits for its reply, and by which clock: the kernel's, or that of a simulation in its place.
//!
//! A simulation runs many clients in one process, one at a time: where a client would sleep, another one continues.
//! Without a simulation this costs one load of an unchanging word for each call.

use std::sync::atomic::AtomicU32;
use std::sync::OnceLock;
use std::time::Duration;

use forebay_sys::wait;

/// What a simulation provides in the kernel's place, on the calling thread.
pub trait Waiter: Send + Sync {
    /// Nanoseconds on a clock that never goes back.
    fn now_ns(&self) -> u64;

    /// Sleeps while `word` is `value`, at most for `timeout_ms` of that clock. It may return early.
    fn sleep(&self, word: &AtomicU32, value: u32, timeout_ms: u64);
}

static SIMULATED: OnceLock<Box<dyn Waiter>> = OnceLock::new();

/// Makes all calls of this process wait by `waiter` from now on. Only the first use has an effect.
pub fn simulate(waiter: Box<dyn Waiter>) {
    let _ = SIMULATED.set(waiter);
    forebay_sys::opening::simulate(|| pause(Duration::from_millis(1)));
}

/// True when a simulation has replaced the clock. Nothing happens there while a client spins.
#[inline]
pub fn is_simulated() -> bool {
    SIMULATED.get().is_some()
}

/// Nanoseconds on the monotonic clock.
pub(crate) fn now_ns() -> u64 {
    nanoseconds(libc::CLOCK_MONOTONIC)
}

/// Nanoseconds on the clock for waiting calls, which stops while a machine is suspended.
pub fn call_clock() -> u64 {
    now_ns()
}

/// Nanoseconds on the clock for leases between nodes, which continues while a machine is suspended.
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

/// Sleeps while `word` is `value`, at most for `timeout_ms`.
pub(crate) fn sleep(word: &AtomicU32, value: u32, timeout_ms: u64) {
    match SIMULATED.get() {
        Some(waiter) => waiter.sleep(word, value, timeout_ms),
        None => wait::sleep(word, value, Duration::from_millis(timeout_ms)),
    }
}
