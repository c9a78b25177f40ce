//! How long a serving thread looks for the next request before it sleeps: as long as that pays (`forebay_sys::wait`).
//!
//! A program that makes one call after another leaves a few microseconds between two requests. A thread that went to
//! sleep in them has to be woken, which on a virtual machine costs more than to serve most requests. One thread looks
//! at a time; the others sleep, and are there when requests come together.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_sys::wait::{self, Learnt, Time};

/// Longest look: several times what a program needs between two calls.
const LOOK_MAX: Duration = Duration::from_micros(100);
/// Less than this is nothing at all.
const LOOK_MIN_NS: u64 = 2_000;
/// A gap that ended so soon after a thread went to sleep is one that it should have looked through.
const GAP_SHORT: Duration = Duration::from_micros(250);
/// A yield from which the thread comes back later than this found other threads that want the processor.
const YIELD_LONG: Duration = Duration::from_micros(150);
/// Looks between two yields.
const LOOKS: u32 = 8;

/// What was learnt, shared by all threads of a session.
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

    /// Looks until `work` finds something, for a bounded time; nothing when another thread looks, or it does not pay.
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
