//! Which threads read requests. A request wakes one thread only.
//!
//! If all threads slept in the kernel, each request would wake one of them, even while another thread polls for it. On
//! a machine whose processors sleep deeply this costs twice as much as serving the request. So one thread, the
//! *leader*, polls and sleeps in the kernel, and the others wait here. Two events wake one of them:
//!
//! - The leader has been at one request for long (a file's space to free, a daemon that restarts): the *standby*,
//!   which checks the leader repeatedly while there is work, becomes the leader. The old leader returns here when its
//!   request is done.
//! - Requests queue up: a *helper* serves until none is left.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often the standby checks the leader while there is work.
const STANDBY_PERIOD: Duration = Duration::from_millis(1);
/// Requests found in a row without waiting that call a helper.
const BURST: u32 = 6;

#[derive(Debug, Default)]
struct State {
    leader: bool,
    standby: bool,
    /// Helpers that were called and have not started yet.
    called: u32,
    helpers: u32,
    over: bool,
}

/// The duties of the serving threads; see the module.
#[derive(Debug)]
pub(crate) struct ServingThreads {
    state: Mutex<State>,
    changed: Condvar,
    standby_changed: Condvar,
    helpers_max: u32,
    /// Counts leaders. A leader that finds another number than its own was relieved.
    term: AtomicU64,
    /// Counts the leader's steps: odd while it serves a request.
    steps: AtomicU64,
    /// The standby sleeps until it is woken.
    standby_sleeps: AtomicBool,
}

/// What a thread has to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Duty {
    /// Serve and sleep for requests, while [`ServingThreads::is_leader`] is true for this term.
    Leader(u64),
    /// Serve until no request waits.
    Helper,
    /// The connection is over.
    Over,
}

impl ServingThreads {
    pub(crate) fn new(threads: usize) -> ServingThreads {
        ServingThreads {
            state: Mutex::default(),
            changed: Condvar::new(),
            standby_changed: Condvar::new(),
            helpers_max: threads.saturating_sub(2) as u32,
            term: AtomicU64::new(0),
            steps: AtomicU64::new(0),
            standby_sleeps: AtomicBool::new(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a duty.
    pub(crate) fn duty(&self) -> Duty {
        let mut state = self.state();
        loop {
            if state.over {
                return Duty::Over;
            }
            if !state.leader {
                state.leader = true;
                return Duty::Leader(self.term.fetch_add(1, Ordering::SeqCst) + 1);
            }
            if state.called > 0 {
                state.called -= 1;
                state.helpers += 1;
                return Duty::Helper;
            }
            if state.standby {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state.standby = true;
            let (back, relieves) = self.stand_by(state);
            state = back;
            state.standby = false;
            // Another thread can be the standby now.
            self.changed.notify_one();
            if relieves {
                return Duty::Leader(self.term.fetch_add(1, Ordering::SeqCst) + 1);
            }
        }
    }

    /// Waits as the standby. Returns true when the leader has been at one request for a whole period.
    fn stand_by<'a>(&'a self, mut state: MutexGuard<'a, State>) -> (MutexGuard<'a, State>, bool) {
        let mut before = self.steps.load(Ordering::SeqCst);
        loop {
            let waited = self.standby_changed.wait_timeout(state, STANDBY_PERIOD);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.over || state.called > 0 || !state.leader {
                return (state, false);
            }
            let now = self.steps.load(Ordering::SeqCst);
            if now == before && now & 1 == 1 {
                return (state, true);
            }
            if now == before {
                // There is no work: the standby sleeps until the leader begins its next request.
                self.standby_sleeps.store(true, Ordering::SeqCst);
                if self.steps.load(Ordering::SeqCst) == now {
                    state = self.standby_changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                self.standby_sleeps.store(false, Ordering::SeqCst);
            }
            before = self.steps.load(Ordering::SeqCst);
        }
    }

    /// True while no thread has relieved the leader of this term.
    pub(crate) fn is_leader(&self, term: u64) -> bool {
        self.term.load(Ordering::SeqCst) == term
    }

    /// The leader begins to serve a request.
    pub(crate) fn begins(&self) {
        self.steps.fetch_add(1, Ordering::SeqCst);
        if self.standby_sleeps.load(Ordering::SeqCst) && self.standby_sleeps.swap(false, Ordering::SeqCst) {
            drop(self.state());
            self.standby_changed.notify_one();
        }
    }

    /// The leader of a term has finished its request.
    pub(crate) fn ends(&self, term: u64) {
        // A relieved leader counts nothing, because the steps are its successor's by now.
        if self.is_leader(term) {
            self.steps.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// A leader may take over in the middle of its predecessor's step. This makes the count even.
    pub(crate) fn takes_over(&self) {
        self.steps.fetch_add(self.steps.load(Ordering::SeqCst) & 1, Ordering::SeqCst);
    }

    /// Reports how many requests were found in a row without waiting.
    pub(crate) fn found_at_once(&self, count: u32) {
        if count < BURST {
            return;
        }
        let mut state = self.state();
        if state.called + state.helpers < self.helpers_max {
            state.called += 1;
            drop(state);
            self.changed.notify_one();
            self.standby_changed.notify_one();
        }
    }

    /// A helper found no more requests.
    pub(crate) fn helped(&self) {
        self.state().helpers -= 1;
    }

    /// The connection is over, for all threads.
    pub(crate) fn end(&self) {
        self.state().over = true;
        self.changed.notify_all();
        self.standby_changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn relief_takes_over_from_a_sentinel_that_serves_long() {
        let serving = ServingThreads::new(3);
        let Duty::Leader(first) = serving.duty() else { panic!() };
        serving.takes_over();
        serving.begins();
        std::thread::scope(|scope| {
            let standby = scope.spawn(|| serving.duty());
            let Duty::Leader(second) = standby.join().unwrap() else { panic!() };
            assert_ne!(first, second);
            assert!(!serving.is_leader(first) && serving.is_leader(second));
        });
        serving.takes_over();
        serving.ends(first);
        assert_eq!(serving.steps.load(Ordering::SeqCst) & 1, 0, "the new one's steps are its own");
    }

    #[test]
    fn relief_leaves_a_sentinel_alone_that_has_no_work_and_wakes_when_it_has() {
        let serving = ServingThreads::new(3);
        let Duty::Leader(first) = serving.duty() else { panic!() };
        serving.takes_over();
        std::thread::scope(|scope| {
            let standby = scope.spawn(|| serving.duty());
            std::thread::sleep(Duration::from_millis(20));
            assert!(serving.is_leader(first), "relieved though idle");
            serving.begins();
            let begun = Instant::now();
            assert!(matches!(standby.join().unwrap(), Duty::Leader(_)));
            assert!(begun.elapsed() < Duration::from_secs(5));
        });
    }

    #[test]
    fn burst_calls_helpers_up_to_their_number() {
        let serving = ServingThreads::new(3);
        assert!(matches!(serving.duty(), Duty::Leader(_)));
        serving.takes_over();
        serving.found_at_once(1);
        serving.found_at_once(BURST);
        serving.found_at_once(BURST);
        assert_eq!(serving.duty(), Duty::Helper);
        serving.helped();
        serving.end();
        assert_eq!(serving.duty(), Duty::Over, "the second call was one too many");
    }
}
