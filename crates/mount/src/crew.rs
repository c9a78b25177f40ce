//! Which threads read requests, so that a request wakes one thread and no more.
//!
//! Were all threads to sleep in the kernel, each request would wake one of them, also while another is looking for it: on a
//! machine whose processors sleep deeply, twice the price of serving it. So one thread, the *sentinel*, looks and sleeps
//! there; the others wait here. Two things take them out:
//!
//! - The sentinel has been at one request for long (a file's space to free, a daemon that starts again): the *relief*, which
//!   looks now and then while there is work, becomes the sentinel; the other comes back here when it is done.
//! - Requests wait behind one another: a *helper* serves until none is left.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often the relief looks while there is work.
const RELIEF_PERIOD: Duration = Duration::from_millis(1);
/// Requests found at once, one behind the other, that call a helper.
const BURST: u32 = 6;

#[derive(Debug, Default)]
struct State {
    sentinel: bool,
    relief: bool,
    /// Helpers that were called and have not come yet.
    called: u32,
    helpers: u32,
    over: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Crew {
    state: Mutex<State>,
    changed: Condvar,
    relief_changed: Condvar,
    helpers_max: u32,
    /// Counts sentinels: one that finds another number than its own was relieved.
    term: AtomicU64,
    /// Counts what sentinels do: odd while they serve a request.
    steps: AtomicU64,
    /// The relief sleeps until it is woken.
    relief_sleeps: AtomicBool,
}

/// What a thread is to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Duty {
    /// Serve, sleeping for requests, while [`Crew::is_sentinel`] says so of this term.
    Sentinel(u64),
    /// Serve until no request waits.
    Helper,
    /// The connection is over.
    Over,
}

impl Crew {
    pub(crate) fn new(threads: usize) -> Crew {
        Crew {
            state: Mutex::default(),
            changed: Condvar::new(),
            relief_changed: Condvar::new(),
            helpers_max: threads.saturating_sub(2) as u32,
            term: AtomicU64::new(0),
            steps: AtomicU64::new(0),
            relief_sleeps: AtomicBool::new(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for something to do.
    pub(crate) fn duty(&self) -> Duty {
        let mut state = self.state();
        loop {
            if state.over {
                return Duty::Over;
            }
            if !state.sentinel {
                state.sentinel = true;
                return Duty::Sentinel(self.term.fetch_add(1, Ordering::SeqCst) + 1);
            }
            if state.called > 0 {
                state.called -= 1;
                state.helpers += 1;
                return Duty::Helper;
            }
            if state.relief {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state.relief = true;
            let (back, relieves) = self.stand_by(state);
            state = back;
            state.relief = false;
            // Another is the relief now.
            self.changed.notify_one();
            if relieves {
                return Duty::Sentinel(self.term.fetch_add(1, Ordering::SeqCst) + 1);
            }
        }
    }

    /// As the relief: true when the sentinel has been at one request for a whole period.
    fn stand_by<'a>(&'a self, mut state: MutexGuard<'a, State>) -> (MutexGuard<'a, State>, bool) {
        let mut before = self.steps.load(Ordering::SeqCst);
        loop {
            let waited = self.relief_changed.wait_timeout(state, RELIEF_PERIOD);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.over || state.called > 0 || !state.sentinel {
                return (state, false);
            }
            let now = self.steps.load(Ordering::SeqCst);
            if now == before && now & 1 == 1 {
                return (state, true);
            }
            if now == before {
                // No work: sleeps until the sentinel has some again.
                self.relief_sleeps.store(true, Ordering::SeqCst);
                if self.steps.load(Ordering::SeqCst) == now {
                    state = self.relief_changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                self.relief_sleeps.store(false, Ordering::SeqCst);
            }
            before = self.steps.load(Ordering::SeqCst);
        }
    }

    /// True while nobody has relieved the sentinel of this term.
    pub(crate) fn is_sentinel(&self, term: u64) -> bool {
        self.term.load(Ordering::SeqCst) == term
    }

    /// The sentinel begins to serve a request.
    pub(crate) fn begins(&self) {
        self.steps.fetch_add(1, Ordering::SeqCst);
        if self.relief_sleeps.load(Ordering::SeqCst) && self.relief_sleeps.swap(false, Ordering::SeqCst) {
            drop(self.state());
            self.relief_changed.notify_one();
        }
    }

    /// The sentinel of a term is done with its request.
    pub(crate) fn ends(&self, term: u64) {
        // One that was relieved has nothing to count: the steps are another's.
        if self.is_sentinel(term) {
            self.steps.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// The sentinel took over in the middle of another's step: it begins between steps.
    pub(crate) fn takes_over(&self) {
        self.steps.fetch_add(self.steps.load(Ordering::SeqCst) & 1, Ordering::SeqCst);
    }

    /// Tells how many requests were found at once, one behind the other.
    pub(crate) fn found_at_once(&self, count: u32) {
        if count < BURST {
            return;
        }
        let mut state = self.state();
        if state.called + state.helpers < self.helpers_max {
            state.called += 1;
            drop(state);
            self.changed.notify_one();
            self.relief_changed.notify_one();
        }
    }

    /// A helper found no more to do.
    pub(crate) fn helped(&self) {
        self.state().helpers -= 1;
    }

    /// The connection is over, for all.
    pub(crate) fn end(&self) {
        self.state().over = true;
        self.changed.notify_all();
        self.relief_changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn relief_takes_over_from_a_sentinel_that_serves_long() {
        let crew = Crew::new(3);
        let Duty::Sentinel(first) = crew.duty() else { panic!() };
        crew.takes_over();
        crew.begins();
        std::thread::scope(|scope| {
            let relief = scope.spawn(|| crew.duty());
            let Duty::Sentinel(second) = relief.join().unwrap() else { panic!() };
            assert_ne!(first, second);
            assert!(!crew.is_sentinel(first) && crew.is_sentinel(second));
        });
        crew.takes_over();
        crew.ends(first);
        assert_eq!(crew.steps.load(Ordering::SeqCst) & 1, 0, "the new one's steps are its own");
    }

    #[test]
    fn relief_leaves_a_sentinel_alone_that_has_no_work_and_wakes_when_it_has() {
        let crew = Crew::new(3);
        let Duty::Sentinel(first) = crew.duty() else { panic!() };
        crew.takes_over();
        std::thread::scope(|scope| {
            let relief = scope.spawn(|| crew.duty());
            std::thread::sleep(Duration::from_millis(20));
            assert!(crew.is_sentinel(first), "relieved though idle");
            crew.begins();
            let begun = Instant::now();
            assert!(matches!(relief.join().unwrap(), Duty::Sentinel(_)));
            assert!(begun.elapsed() < Duration::from_secs(5));
        });
    }

    #[test]
    fn burst_calls_helpers_up_to_their_number() {
        let crew = Crew::new(3);
        assert!(matches!(crew.duty(), Duty::Sentinel(_)));
        crew.takes_over();
        crew.found_at_once(1);
        crew.found_at_once(BURST);
        crew.found_at_once(BURST);
        assert_eq!(crew.duty(), Duty::Helper);
        crew.helped();
        crew.end();
        assert_eq!(crew.duty(), Duty::Over, "the second call was one too many");
    }
}
