//! The clock of paced requests, and waiting until a time on it.
//!
//! A sleep ends late: by the timer slack of the thread (50 us unless set), and by the time that a wake-up takes. So a wait
//! sleeps until [`SPIN_NS`] before its time, and polls the clock from then on.

/// The last part of a wait, in which the clock is polled: about what a wake-up takes when the timer slack is 1 ns.
pub const SPIN_NS: u64 = 25_000;
/// Longest wait for one request. Other processes write the memory that says how long, and no call may wait for ever.
pub const WAIT_MAX_NS: u64 = 600_000_000_000;

/// The time in nanoseconds on a clock that all processes of the node share.
pub fn now_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is valid for the call, which cannot fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Waits until a time of [`now_ns`], and returns the time at the end of the wait. A signal does not end the wait.
pub fn wait_until(until_ns: u64) -> u64 {
    loop {
        let now = now_ns();
        if now >= until_ns {
            return now;
        }
        if until_ns - now > SPIN_NS {
            let wake = until_ns - SPIN_NS;
            let t = libc::timespec {
                tv_sec: (wake / 1_000_000_000) as libc::time_t,
                tv_nsec: (wake % 1_000_000_000) as libc::c_long,
            };
            // It returns its error, and leaves errno alone.
            // SAFETY: `t` is valid for the call, and the remaining time is not requested.
            unsafe {
                libc::clock_nanosleep(libc::CLOCK_MONOTONIC, libc::TIMER_ABSTIME, &t, std::ptr::null_mut())
            };
        } else {
            std::hint::spin_loop();
        }
    }
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
    fn wait_until_never_returns_early_whether_it_sleeps_or_spins() {
        for ns in [0, 100, SPIN_NS - 1, SPIN_NS + 1, 20 * SPIN_NS] {
            let until = now_ns() + ns;
            let ended = wait_until(until);
            assert!(ended >= until && now_ns() >= ended);
        }
        assert!(wait_until(0) > 0, "a time in the past is no wait");
    }
}
