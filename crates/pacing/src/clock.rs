//! The clock of paced requests, and waiting until a time on it.
//!
//! A sleep ends late: by the timer slack of the thread (50 us unless set), and by the time that a wake-up takes, which
//! differs between machines and is longer after long sleeps. So a wait has the least slack, sleeps until some time before its
//! end, and polls the clock from then on. Each thread learns that time from how late its sleeps end. While it polls it lets
//! other threads run, which may have waits as short; where one of them does not give the processor back, the next waits
//! sleep: the scheduler prefers a thread that wakes up to one that is working.

use std::cell::Cell;

/// The shortest last part of a wait, in which the clock is polled: about what a wake-up takes when the timer slack is 1 ns.
pub const SPIN_NS: u64 = 25_000;
/// So long it may be in any wait, even if that is the whole wait: an idle processor of a virtual machine may take as long to
/// wake up, which would double the time of a request to a medium of some tens of microseconds.
const SPIN_NS_SHORT: u64 = 60_000;
/// The longest: a thread that waits for a processor wakes up later than any polling could make good.
const SPIN_NS_MAX: u64 = 200_000;
/// The shortest sleep. One for less time takes longer than that, and the last part of the wait is over.
const SLEEP_NS_MIN: u64 = 10_000;
/// Longest wait for one request. Other processes write the memory that says how long, and no call may wait for ever.
pub const WAIT_MAX_NS: u64 = 600_000_000_000;

/// The time in nanoseconds on a clock that all processes of the node share.
pub fn now_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is valid for the call, which cannot fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

thread_local! {
    /// How late this thread's sleeps end, most of the time.
    static LATE_NS: Cell<u64> = const { Cell::new(SPIN_NS) };
    static CROWD: Cell<Crowd> = const { Cell::new(Crowd { waits: 0, next: CROWDED_WAITS_MIN }) };
}

/// A processor that is given back later than this has a thread with work. One that polls gives it back sooner.
const GIVEN_BACK_NS: u64 = 4 * SPIN_NS;
/// Waits that are slept after another thread did not give the processor back: twice as many each time, up to the second.
const CROWDED_WAITS_MIN: u32 = 256;
const CROWDED_WAITS_MAX: u32 = 1 << 14;

/// Whether threads with work share this thread's processor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Crowd {
    /// So many of the following waits are slept.
    waits: u32,
    /// So many will be after the next time that the processor was not given back.
    next: u32,
}

impl Crowd {
    /// Before a wait: whether it is one of those.
    fn begin(&mut self) -> bool {
        let is_crowded = self.waits > 0;
        self.waits -= u32::from(is_crowded);
        is_crowded
    }

    /// After a wait in which the thread let others run, and got the processor back at once or not.
    fn end(&mut self, came_back: bool) {
        if came_back {
            self.next = (self.next / 2).max(CROWDED_WAITS_MIN);
        } else {
            self.waits = self.next;
            self.next = (2 * self.next).min(CROWDED_WAITS_MAX);
        }
    }
}

/// The lateness to expect after a sleep that ended so late: it follows later ones at once, and earlier ones slowly, so
/// that most sleeps end earlier than it says.
fn expected_late(before_ns: u64, late_ns: u64) -> u64 {
    let late_ns = late_ns.clamp(SPIN_NS, SPIN_NS_MAX);
    match late_ns > before_ns {
        true => before_ns + (late_ns - before_ns) / 4,
        false => before_ns - (before_ns - late_ns) / 16,
    }
}

/// Sets the thread's timer slack to the least value. The drop restores the value that the program has chosen.
struct LeastSlack {
    before: libc::c_int,
}

impl LeastSlack {
    fn set() -> LeastSlack {
        // SAFETY: plain system calls without pointers, on the slack of this thread.
        let before = unsafe { libc::prctl(libc::PR_GET_TIMERSLACK, 0, 0, 0, 0) };
        if before > 1 {
            // SAFETY: as above.
            unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1, 0, 0, 0) };
        }
        LeastSlack { before }
    }
}

impl Drop for LeastSlack {
    fn drop(&mut self) {
        if self.before > 1 {
            // SAFETY: as above.
            unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, self.before, 0, 0, 0) };
        }
    }
}

/// Sleeps until a time, and returns the time at the end.
fn sleep_until(wake_ns: u64) -> u64 {
    let _slack = LeastSlack::set();
    let t = libc::timespec {
        tv_sec: (wake_ns / 1_000_000_000) as libc::time_t,
        tv_nsec: (wake_ns % 1_000_000_000) as libc::c_long,
    };
    // It returns its error, and leaves errno alone.
    // SAFETY: `t` is valid for the call, and the remaining time is not requested.
    unsafe { libc::clock_nanosleep(libc::CLOCK_MONOTONIC, libc::TIMER_ABSTIME, &t, std::ptr::null_mut()) };
    now_ns()
}

/// Waits until a time of [`now_ns`], and returns the time at the end of the wait. A signal does not end the wait.
pub fn wait_until(until_ns: u64) -> u64 {
    let mut now = now_ns();
    let half = until_ns.saturating_sub(now) / 2;
    let mut crowd = CROWD.get();
    let mut is_crowded = crowd.begin();
    let (mut has_slept, mut has_yielded, mut came_back) = (false, false, true);
    while now < until_ns {
        // Half of a longer wait is slept at least: polling takes a processor from those that have work.
        let most_ns = half.max(if is_crowded { SPIN_NS } else { SPIN_NS_SHORT });
        let spin_ns = LATE_NS.get().min(most_ns);
        let left = until_ns - now;
        if left >= spin_ns + SLEEP_NS_MIN {
            let wake = until_ns - spin_ns;
            now = sleep_until(wake);
            has_slept = true;
            if now >= wake {
                LATE_NS.set(expected_late(LATE_NS.get(), now - wake));
            }
        } else if left > SPIN_NS && !is_crowded && !has_slept {
            // Not after a sleep: the scheduler has just preferred this thread to working ones, and would run those now.
            std::thread::yield_now();
            let before = std::mem::replace(&mut now, now_ns());
            has_yielded = true;
            came_back = now - before <= GIVEN_BACK_NS;
            is_crowded = !came_back;
        } else {
            std::hint::spin_loop();
            now = now_ns();
        }
    }
    if has_yielded {
        crowd.end(came_back);
    }
    CROWD.set(crowd);
    now
}

/// Measures what pacing itself adds to a request here, in nanoseconds: how late waits for short and for long times end,
/// each the median of some.
pub fn measure_floor() -> (u64, u64) {
    let median = |wait_ns: u64, count: usize| {
        let mut late: Vec<u64> = (0..count)
            .map(|_| {
                let until = now_ns() + wait_ns;
                wait_until(until) - until
            })
            .collect();
        late.sort_unstable();
        late[count / 2]
    };
    (median(SPIN_NS / 5, 201), median(4 * SPIN_NS, 101))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expected_lateness_stays_in_its_limits_and_above_most_sleeps() {
        let mut late = SPIN_NS;
        (0..100).for_each(|_| late = expected_late(late, u64::MAX));
        assert!(late > SPIN_NS_MAX * 9 / 10 && late <= SPIN_NS_MAX, "{late}");
        (0..1000).for_each(|i| late = expected_late(late, if i % 4 == 0 { 90_000 } else { 40_000 }));
        assert!((60_000..90_000).contains(&late), "{late}");
        (0..1000).for_each(|_| late = expected_late(late, 0));
        assert!(late < SPIN_NS + 16, "{late}");
    }

    #[test]
    fn waits_are_slept_where_processors_are_not_given_back_and_more_of_them_each_time() {
        let mut crowd = CROWD.get();
        let sleeps = |crowd: &mut Crowd| {
            let mut count = 0;
            while crowd.begin() {
                count += 1;
            }
            count
        };
        assert_eq!(sleeps(&mut crowd), 0);
        for waits in [256, 512, 1024] {
            crowd.end(false);
            assert_eq!(sleeps(&mut crowd), waits);
        }
        crowd.end(true);
        crowd.end(false);
        assert_eq!(sleeps(&mut crowd), 1024, "half of what it would have been");
        (0..100).for_each(|_| crowd.end(false));
        assert_eq!(sleeps(&mut crowd), CROWDED_WAITS_MAX);
        (0..100).for_each(|_| crowd.end(true));
        assert_eq!((sleeps(&mut crowd), crowd.next), (0, CROWDED_WAITS_MIN));
    }

    #[test]
    fn wait_leaves_the_timer_slack_of_the_thread_as_it_was() {
        // SAFETY: plain system calls without pointers, on the slack of this thread.
        let slack = || unsafe { libc::prctl(libc::PR_GET_TIMERSLACK, 0, 0, 0, 0) };
        // SAFETY: as above.
        let set = unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 123_456, 0, 0, 0) };
        assert_eq!((set, slack()), (0, 123_456));
        {
            let _least = LeastSlack::set();
            assert_eq!(slack(), 1);
        }
        wait_until(now_ns() + 20 * SPIN_NS);
        assert_eq!(slack(), 123_456);
    }

    #[test]
    fn wait_until_never_returns_early_whether_it_sleeps_or_spins() {
        for ns in [0, 100, SPIN_NS - 1, SPIN_NS + SLEEP_NS_MIN - 1, SPIN_NS + SLEEP_NS_MIN, 20 * SPIN_NS] {
            let until = now_ns() + ns;
            let ended = wait_until(until);
            assert!(ended >= until && now_ns() >= ended);
        }
        assert!(wait_until(0) > 0, "a time in the past is no wait");
    }
}
