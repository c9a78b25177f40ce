//! Which threads read requests. A request wakes one thread only.
//!
//! If all threads slept in the kernel, each request would wake one of them, even while another thread polls for it. On
//! a machine whose processors sleep deeply this costs twice as much as serving the request. So one thread, the
//! *leader*, polls and sleeps in the kernel, and the others wait here. Two events wake one of them:
//!
//! - The leader has served one request for a long time (it frees a file's space, or the daemon restarts): the
//!   *standby*, which checks the leader repeatedly while there is work, becomes the leader. The old leader returns here
//!   when its request is done.
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
    /// The current leader's term and steps, see [`Progress`]. They are one word, so that a relieved leader cannot
    /// change its successor's steps.
    progress: AtomicU64,
    /// The standby sleeps until it is woken.
    standby_sleeps: AtomicBool,
}

/// How far the leader is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Progress {
    /// Counts leaders. A leader that finds another number than its own was relieved.
    term: u32,
    /// Counts the leader's steps: odd while it serves a request.
    steps: u32,
}

impl Progress {
    fn of(word: u64) -> Progress {
        Progress { term: (word >> 32) as u32, steps: word as u32 }
    }

    fn word(self) -> u64 {
        u64::from(self.term) << 32 | u64::from(self.steps)
    }

    /// The progress of the next leader, which begins between two requests.
    fn of_next(self) -> Progress {
        Progress { term: self.term.wrapping_add(1), steps: 0 }
    }

    fn after_step(self) -> Progress {
        Progress { steps: self.steps.wrapping_add(1), ..self }
    }

    fn is_serving(self) -> bool {
        self.steps & 1 == 1
    }
}

/// What a thread has to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Duty {
    /// Serve and sleep for requests, while [`ServingThreads::is_leader`] is true for this term.
    Leader(u32),
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
            progress: AtomicU64::new(0),
            standby_sleeps: AtomicBool::new(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn progress(&self) -> Progress {
        Progress::of(self.progress.load(Ordering::SeqCst))
    }

    /// Begins the term of another leader, if the leader has made no step since `before`. Returns the new term.
    fn relieve(&self, before: Progress) -> Option<u32> {
        let next = before.of_next();
        let order = Ordering::SeqCst;
        self.progress.compare_exchange(before.word(), next.word(), order, order).ok().map(|_| next.term)
    }

    /// Counts a step of the leader of a term. A relieved leader counts none, because the steps are its successor's by
    /// now.
    fn step(&self, term: u32) {
        let next = |word| Some(Progress::of(word)).filter(|p| p.term == term).map(|p| p.after_step().word());
        let _ = self.progress.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
    }

    /// Waits for a duty.
    pub(crate) fn duty(&self) -> Duty {
        let mut state = self.state();
        loop {
            if state.over {
                return Duty::Over;
            }
            if !state.leader {
                // Nothing else changes the progress before there is a leader.
                let first = self.progress().of_next();
                self.progress.store(first.word(), Ordering::SeqCst);
                state.leader = true;
                return Duty::Leader(first.term);
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
            let (back, term) = self.stand_by(state);
            state = back;
            state.standby = false;
            // Another thread can be the standby now.
            self.changed.notify_one();
            if let Some(term) = term {
                return Duty::Leader(term);
            }
        }
    }

    /// Waits as the standby. When the leader has been at one request for a whole period, relieves it and returns the
    /// new term.
    fn stand_by<'a>(&'a self, mut state: MutexGuard<'a, State>) -> (MutexGuard<'a, State>, Option<u32>) {
        let mut before = self.progress();
        loop {
            let waited = self.standby_changed.wait_timeout(state, STANDBY_PERIOD);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.over || state.called > 0 || !state.leader {
                return (state, None);
            }
            let now = self.progress();
            if now == before && now.is_serving() {
                if let Some(term) = self.relieve(now) {
                    return (state, Some(term));
                }
            } else if now == before {
                // There is no work: the standby sleeps until the leader begins its next request.
                self.standby_sleeps.store(true, Ordering::SeqCst);
                if self.progress() == now {
                    state = self.standby_changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                self.standby_sleeps.store(false, Ordering::SeqCst);
            }
            before = self.progress();
        }
    }

    /// True while no thread has relieved the leader of this term.
    pub(crate) fn is_leader(&self, term: u32) -> bool {
        self.progress().term == term
    }

    /// The leader of a term begins to serve a request.
    pub(crate) fn begins(&self, term: u32) {
        self.step(term);
        if self.standby_sleeps.load(Ordering::SeqCst) && self.standby_sleeps.swap(false, Ordering::SeqCst) {
            drop(self.state());
            self.standby_changed.notify_one();
        }
    }

    /// The leader of a term has finished its request.
    pub(crate) fn ends(&self, term: u32) {
        self.step(term);
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
    fn standby_takes_over_from_a_leader_that_serves_long() {
        let serving = ServingThreads::new(3);
        let Duty::Leader(first) = serving.duty() else { panic!() };
        serving.begins(first);
        std::thread::scope(|scope| {
            let standby = scope.spawn(|| serving.duty());
            let Duty::Leader(second) = standby.join().unwrap() else { panic!() };
            assert_ne!(first, second);
            assert!(!serving.is_leader(first) && serving.is_leader(second));
        });
        assert!(!serving.progress().is_serving(), "the new leader begins between two requests");
        serving.ends(first);
        assert!(!serving.progress().is_serving(), "the steps are the new leader's");
        serving.begins(first);
        assert!(!serving.progress().is_serving(), "a relieved leader may read one more request");
    }

    #[test]
    fn relieve_of_a_leader_that_has_just_finished_changes_nothing() {
        let serving = ServingThreads::new(3);
        let Duty::Leader(first) = serving.duty() else { panic!() };
        serving.begins(first);
        let before = serving.progress();
        serving.ends(first);
        assert_eq!(serving.relieve(before), None);
        assert!(serving.is_leader(first) && !serving.progress().is_serving());
    }

    #[test]
    fn steps_of_a_leader_never_change_its_term() {
        let serving = ServingThreads::new(3);
        let Duty::Leader(first) = serving.duty() else { panic!() };
        let last = Progress { term: first, steps: u32::MAX };
        serving.progress.store(last.word(), Ordering::SeqCst);
        serving.ends(first);
        assert!(serving.is_leader(first) && !serving.progress().is_serving());
    }

    #[test]
    fn standby_leaves_a_leader_alone_that_has_no_work_and_wakes_when_it_has() {
        let serving = ServingThreads::new(3);
        let Duty::Leader(first) = serving.duty() else { panic!() };
        std::thread::scope(|scope| {
            let standby = scope.spawn(|| serving.duty());
            std::thread::sleep(Duration::from_millis(20));
            assert!(serving.is_leader(first), "relieved though idle");
            serving.begins(first);
            let begun = Instant::now();
            assert!(matches!(standby.join().unwrap(), Duty::Leader(_)));
            assert!(begun.elapsed() < Duration::from_secs(5));
        });
    }

    #[test]
    fn burst_calls_helpers_up_to_their_number() {
        let serving = ServingThreads::new(3);
        assert!(matches!(serving.duty(), Duty::Leader(_)));
        serving.found_at_once(1);
        serving.found_at_once(BURST);
        serving.found_at_once(BURST);
        assert_eq!(serving.duty(), Duty::Helper);
        serving.helped();
        serving.end();
        assert_eq!(serving.duty(), Duty::Over, "the second call was one too many");
    }
}
