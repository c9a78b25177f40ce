//! How long the shard thread spins before it sleeps: as long as that has paid lately, and not at all while the node is
//! busy.

use std::time::{Duration, Instant};

/// Longest spin: a few times what a client needs between two requests.
const SPIN_MAX: Duration = Duration::from_micros(60);
/// Shortest, so that it is noticed when spinning begins to pay.
const SPIN_MIN: Duration = Duration::from_micros(2);
/// No spinning for so long after the kernel took the processor away from a spin.
const BUSY: Duration = Duration::from_millis(20);

/// The adaptive bound.
#[derive(Debug)]
pub(super) struct Pace {
    spin: Duration,
    busy_until: Option<Instant>,
    switches: i64,
}

/// Times that the kernel took the processor away from this thread.
fn involuntary_switches() -> i64 {
    // SAFETY: an all-zero rusage is valid, and filled by the call, which cannot fail with these arguments.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &mut usage);
        usage.ru_nivcsw
    }
}

impl Pace {
    pub(super) fn new() -> Pace {
        Pace { spin: SPIN_MAX, busy_until: None, switches: involuntary_switches() }
    }

    /// Spins until `work` says true, for a bounded time; whether it did.
    pub(super) fn spin(&mut self, mut work: impl FnMut() -> bool) -> bool {
        let started = Instant::now();
        if let Some(until) = self.busy_until {
            if started < until {
                return work();
            }
            self.busy_until = None;
            self.switches = involuntary_switches();
        }
        loop {
            // The clock costs more than a look at the rings.
            for _ in 0..16 {
                if work() {
                    self.spin = (self.spin * 2).min(SPIN_MAX);
                    return true;
                }
                std::hint::spin_loop();
            }
            if started.elapsed() >= self.spin {
                break;
            }
        }
        self.spin = (self.spin / 2).max(SPIN_MIN);
        let switches = involuntary_switches();
        if switches != self.switches {
            self.switches = switches;
            self.busy_until = Some(Instant::now() + BUSY);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spin_ends_without_work_and_returns_at_once_with_it() {
        let mut pace = Pace::new();
        assert!(!pace.spin(|| false));
        let mut looks = 0;
        while !pace.spin(|| {
            looks += 1;
            looks > 3
        }) {}
        assert_eq!(looks, 4);
    }
}
