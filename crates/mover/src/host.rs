//! What the engine gets from its machine: time and threads.
//!
//! A simulation runs the movers of several nodes in one process, one thread at a time by a clock of its own, and provides
//! both in the machine's place (`Host`). So the engine uses this module alone for them. Nothing here holds a lock.

use std::ops::Add;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::time::{clock_gettime, ClockId, Timespec};

#[cfg(feature = "simulation")]
pub use self::simulated::{simulate, Host};

#[cfg(feature = "simulation")]
mod simulated {
    use std::sync::OnceLock;
    use std::time::Duration;

    /// What a simulation provides in the machine's place, to the calling thread.
    pub trait Host: Send + Sync {
        /// Time on a clock that never goes back.
        fn now(&self) -> Duration;

        /// Time since 1970.
        fn since_1970(&self) -> Duration;

        /// Lets other threads run for this time.
        fn sleep(&self, time: Duration);

        /// Starts a thread of the calling thread's mover.
        fn start(&self, name: &str, run: Box<dyn FnOnce() + Send>);
    }

    static SIMULATED: OnceLock<Box<dyn Host>> = OnceLock::new();

    /// Makes all movers of this process use `host` from now on. Only the first use has an effect.
    pub fn simulate(host: Box<dyn Host>) {
        let _ = SIMULATED.set(host);
    }

    pub(super) fn simulated() -> Option<&'static dyn Host> {
        SIMULATED.get().map(|host| &**host)
    }
}

#[cfg(feature = "simulation")]
use self::simulated::simulated;

/// A moment on the monotonic clock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Instant(Duration);

fn clock(id: ClockId) -> Duration {
    let Timespec { tv_sec, tv_nsec } = clock_gettime(id);
    Duration::new(tv_sec.max(0) as u64, tv_nsec as u32)
}

impl Instant {
    pub(crate) fn now() -> Instant {
        #[cfg(feature = "simulation")]
        if let Some(host) = simulated() {
            return Instant(host.now());
        }
        Instant(clock(ClockId::Monotonic))
    }

    pub(crate) fn elapsed(self) -> Duration {
        Instant::now().since(self)
    }

    /// The time since an earlier moment; none if it is a later one.
    pub(crate) fn since(self, earlier: Instant) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Instant {
    type Output = Instant;

    fn add(self, time: Duration) -> Instant {
        Instant(self.0 + time)
    }
}

/// True where one thread runs at a time.
pub(crate) fn is_simulated() -> bool {
    #[cfg(feature = "simulation")]
    return simulated().is_some();
    #[cfg(not(feature = "simulation"))]
    false
}

/// Time since 1970.
pub(crate) fn since_1970() -> Duration {
    #[cfg(feature = "simulation")]
    if let Some(host) = simulated() {
        return host.since_1970();
    }
    clock(ClockId::Realtime)
}

pub(crate) fn sleep(time: Duration) {
    #[cfg(feature = "simulation")]
    if let Some(host) = simulated() {
        return host.sleep(time);
    }
    std::thread::sleep(time);
}

/// Starts a thread. A simulated one has no handle.
pub(crate) fn start(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> std::io::Result<Option<JoinHandle<()>>> {
    #[cfg(feature = "simulation")]
    if let Some(host) = simulated() {
        host.start(name, Box::new(run));
        return Ok(None);
    }
    std::thread::Builder::new().name(name.to_owned()).spawn(run).map(Some)
}

/// Runs `run` for each item in a thread of its own, one of them the caller's; in a simulation one after the other.
/// Returns the results in the order of the items, except those of threads that panicked.
pub(crate) fn for_each<I: Send, T: Send>(items: Vec<I>, run: impl Fn(I) -> T + Sync) -> Vec<T> {
    #[cfg(feature = "simulation")]
    if simulated().is_some() {
        return items.into_iter().map(run).collect();
    }
    std::thread::scope(|scope| {
        let mut items = items.into_iter();
        let (own, run) = (items.next(), &run);
        let others: Vec<_> = items.map(|item| scope.spawn(move || run(item))).collect();
        let own = own.map(run);
        own.into_iter().chain(others.into_iter().filter_map(|other| other.join().ok())).collect()
    })
}

/// Waits while `condition` holds, up to a limit. True if it did not hold in the end.
pub(crate) fn wait_while<'m, T>(
    (mutex, changed): (&'m Mutex<T>, &Condvar),
    guard: MutexGuard<'m, T>,
    limit: Duration,
    condition: impl FnMut(&mut T) -> bool,
) -> (MutexGuard<'m, T>, bool) {
    #[cfg(feature = "simulation")]
    if simulated().is_some() {
        let (mut guard, mut condition, until) = (guard, condition, Instant::now() + limit);
        while condition(&mut guard) {
            drop(guard);
            sleep(Duration::from_millis(1));
            guard = mutex.lock().unwrap_or_else(PoisonError::into_inner);
            if Instant::now() >= until {
                return (guard, false);
            }
        }
        return (guard, true);
    }
    let _ = mutex;
    let waited = changed.wait_timeout_while(guard, limit, condition);
    let (guard, timed_out) = waited.unwrap_or_else(PoisonError::into_inner);
    (guard, !timed_out.timed_out())
}

/// Locks a mutex that is held over requests to the pool.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    #[cfg(feature = "simulation")]
    while simulated().is_some() {
        match mutex.try_lock() {
            Ok(guard) => return guard,
            Err(std::sync::TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
            Err(std::sync::TryLockError::WouldBlock) => sleep(Duration::from_millis(1)),
        }
    }
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_item_has_a_thread_and_results_keep_their_order() {
        let barrier = std::sync::Barrier::new(3);
        let doubled = for_each(vec![1, 2, 3], |n| {
            barrier.wait();
            n * 2
        });
        assert_eq!(doubled, [2, 4, 6]);
        assert!(for_each(Vec::<u8>::new(), |n| n).is_empty());
    }

    #[test]
    fn wait_ends_with_the_condition_or_at_the_limit() {
        let (mutex, changed) = (Mutex::new(3), Condvar::new());
        let lock = || mutex.lock().unwrap();
        assert!(wait_while((&mutex, &changed), lock(), Duration::from_secs(60), |n| *n != 3).1);
        assert!(!wait_while((&mutex, &changed), lock(), Duration::from_millis(1), |n| *n == 3).1);
    }
}
