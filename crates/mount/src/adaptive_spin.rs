//! How long a serving thread polls for the next request before it sleeps: for as long as polling pays
//! (`forebay_sys::wait`).
//!
//! A program that makes one call after another leaves a few microseconds between two requests. If the thread sleeps in
//! that gap, it has to be woken, which on a virtual machine costs more than serving most requests. One thread polls at
//! a time. The others sleep, and are woken when requests arrive together.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_sys::wait::{self, Learnt, Time};

/// Longest poll: several times what a program needs between two calls.
const LOOK_MAX: Duration = Duration::from_micros(100);
/// A shorter poll is not made at all.
const LOOK_MIN_NS: u64 = 2_000;
/// If a request ends a sleep sooner than this, a longer poll would have avoided the sleep.
const GAP_SHORT: Duration = Duration::from_micros(250);
/// A yield that takes longer than this shows that other threads want the processor.
const YIELD_LONG: Duration = Duration::from_micros(150);
/// Polls between two yields.
const LOOKS: u32 = 8;

/// The learnt polling time, shared by all threads of a session.
#[derive(Debug)]
pub(crate) struct AdaptiveSpin {
    look_ns: Learnt,
    looking: AtomicBool,
}

impl AdaptiveSpin {
    pub(crate) fn new() -> AdaptiveSpin {
        AdaptiveSpin {
            look_ns: Learnt::new(LOOK_MAX.as_nanos() as u64, LOOK_MIN_NS, 0),
            looking: AtomicBool::new(false),
        }
    }

    /// Polls `work` until it finds something, for a bounded time. Returns `None` at once if another thread polls or
    /// polling does not pay.
    pub(crate) fn look<T>(&self, work: impl FnMut() -> Option<T>) -> Option<T> {
        let look_ns = self.look_ns.get();
        if look_ns == 0 || self.looking.swap(true, Ordering::Acquire) {
            return None;
        }
        let mut budget = Time::new(Instant::now(), Duration::from_nanos(look_ns), LOOKS, YIELD_LONG);
        let found = wait::look(&mut budget, work);
        self.looking.store(false, Ordering::Release);
        if found.is_none() {
            self.look_ns.shorten(look_ns);
        }
        found
    }

    /// Records that a request ended a sleep which began `gap` ago.
    pub(crate) fn slept(&self, gap: Duration) {
        if gap < GAP_SHORT {
            self.look_ns.lengthen();
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
