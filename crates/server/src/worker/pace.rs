//! How long the shard thread looks for requests before it sleeps: as long as that pays, giving way to others meanwhile,
//! and not at all while the node is busy.
//!
//! What pays is learnt from the gaps between requests, those that were slept through included: when a client rings
//! soon after the thread went to sleep, looking a little longer would have spared both a system call and a wake-up,
//! which on a virtual machine costs more than most requests. Between looks the thread yields, so that a client on the
//! same processor runs at once; a yield that takes long means that others compute there, and then it is better to
//! sleep and be woken, as the scheduler favours who slept.

use std::time::{Duration, Instant};

/// Longest look: several times what a client needs between two requests.
const LOOK_MAX: Duration = Duration::from_micros(100);
/// A gap of up to so much is worth looking through.
const PAYS: Duration = Duration::from_micros(200);
/// A yield from which the thread comes back later than this found others at work.
const YIELD_LONG: Duration = Duration::from_micros(150);
/// No looking for so long after that.
const BUSY: Duration = Duration::from_millis(10);
/// Looks between two yields.
const LOOKS: u32 = 24;

/// The adaptive bound.
#[derive(Debug)]
pub(super) struct Pace {
    look: Duration,
    busy_until: Option<Instant>,
    /// When the last request was done.
    idle_since: Instant,
}

impl Pace {
    pub(super) fn new() -> Pace {
        Pace { look: LOOK_MAX, busy_until: None, idle_since: Instant::now() }
    }

    /// Looks until `work` says true, for a bounded time; whether it did.
    pub(super) fn look(&mut self, mut work: impl FnMut() -> bool) -> bool {
        let started = Instant::now();
        self.idle_since = started;
        if let Some(until) = self.busy_until {
            if started < until {
                return work();
            }
            self.busy_until = None;
        }
        if self.look.is_zero() {
            return work();
        }
        let mut before = started;
        loop {
            for _ in 0..LOOKS {
                if work() {
                    return true;
                }
                std::hint::spin_loop();
            }
            std::thread::yield_now();
            let now = Instant::now();
            if now - before >= YIELD_LONG {
                self.busy_until = Some(now + BUSY);
                return work();
            }
            if now - started >= self.look {
                return false;
            }
            before = now;
        }
    }

    /// Tells that the thread slept after a look in vain, and whether a request ended the sleep.
    pub(super) fn slept(&mut self, request: bool) {
        self.look = if request && self.idle_since.elapsed() < PAYS { LOOK_MAX } else { self.look / 2 };
        if self.look < LOOK_MAX / 64 {
            self.look = Duration::ZERO;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn look_ends_without_work_and_returns_at_once_with_it() {
        let mut pace = Pace::new();
        assert!(!pace.look(|| false));
        let mut looks = 0;
        while !pace.look(|| {
            looks += 1;
            looks > 3
        }) {}
        assert_eq!(looks, 4);
    }

    #[test]
    fn look_is_given_up_when_it_never_pays_and_taken_up_when_a_request_comes_soon() {
        let mut pace = Pace::new();
        for _ in 0..10 {
            pace.look(|| false);
            pace.slept(false);
        }
        assert_eq!(pace.look, Duration::ZERO);
        // A look of no length takes next to no time: the request came soon, if this thread was not held up.
        for _ in 0..1000 {
            pace.look(|| false);
            pace.slept(true);
            if pace.look == LOOK_MAX {
                return;
            }
        }
        panic!("a request that came at once did not make the thread look for it");
    }
}
