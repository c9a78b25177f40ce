//! How long a thread looks for the next request before it sleeps: as long as that pays.
//!
//! A program that makes one call after another leaves a few microseconds between two requests; a thread that went to sleep
//! in them has to be woken, which on a virtual machine costs more than to serve most requests. Between looks the thread
//! yields, so that the program, or the daemon, runs if it wants the same processor. One thread looks at a time: the others
//! sleep, and are there when requests come together.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longest look: several times what a program needs between two calls.
const LOOK_MAX: Duration = Duration::from_micros(100);
/// A gap that ended so soon after a thread went to sleep is one that it should have looked through.
const GAP_SHORT: Duration = Duration::from_micros(250);
/// A yield from which the thread comes back later than this found others at work, who want the processor.
const YIELD_LONG: Duration = Duration::from_micros(150);
/// Looks between two yields.
const LOOKS: u32 = 8;

/// What was learnt, shared by all threads of a session.
#[derive(Debug)]
pub(crate) struct AdaptiveSpin {
    look_ns: AtomicU64,
    looking: AtomicBool,
}

impl AdaptiveSpin {
    pub(crate) fn new() -> AdaptiveSpin {
        AdaptiveSpin { look_ns: AtomicU64::new(LOOK_MAX.as_nanos() as u64), looking: AtomicBool::new(false) }
    }

    /// Looks until `work` finds something, for a bounded time; nothing when another thread looks, or it does not pay.
    pub(crate) fn look<T>(&self, mut work: impl FnMut() -> Option<T>) -> Option<T> {
        let look = Duration::from_nanos(self.look_ns.load(Ordering::Relaxed));
        if look.is_zero() || self.looking.swap(true, Ordering::Acquire) {
            return None;
        }
        let started = Instant::now();
        let found = loop {
            let found = (0..LOOKS).find_map(|_| work());
            let before = Instant::now();
            if found.is_some() || before - started >= look {
                break found;
            }
            std::thread::yield_now();
            if before.elapsed() >= YIELD_LONG {
                break work();
            }
        };
        self.looking.store(false, Ordering::Release);
        if found.is_none() {
            let less = look.as_nanos() as u64 / 2;
            self.look_ns.store(if less < 2_000 { 0 } else { less }, Ordering::Relaxed);
        }
        found
    }

    /// Tells that a request ended a sleep which began `gap` ago.
    pub(crate) fn slept(&self, gap: Duration) {
        if gap < GAP_SHORT {
            self.look_ns.store(LOOK_MAX.as_nanos() as u64, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn look_in_vain_becomes_shorter_and_a_short_sleep_restores_it() {
        let spin = AdaptiveSpin::new();
        for _ in 0..10 {
            assert!(spin.look(|| None::<()>).is_none());
        }
        let mut looked = false;
        spin.look(|| {
            looked = true;
            None::<()>
        });
        assert!(!looked, "it does not pay");
        spin.slept(Duration::from_micros(5));
        assert_eq!(spin.look(|| Some(7)), Some(7));
    }

    #[test]
    fn look_of_a_second_thread_is_none() {
        let spin = AdaptiveSpin::new();
        let inner = spin.look(|| Some(spin.look(|| Some(1))));
        assert_eq!(inner, Some(None));
    }
}
