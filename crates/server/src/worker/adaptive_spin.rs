//! The adaptive spin of the shard thread and the network thread: they poll for requests before they sleep, for as long
//! as that pays (`forebay_sys::wait`).
//!
//! What pays is learnt from the gaps between requests, including those that were slept through: when a client rings
//! soon after the thread went to sleep, a longer spin would have saved a system call and a wake-up. A yield that takes
//! long means that other threads compute on this processor. Then it is better to sleep and be woken, because the
//! scheduler favours a thread that slept. While more threads are runnable than the node has processors, one of them
//! could use the time that a spin takes. Then the thread spins only through gaps that are shorter than a sleep with its
//! wake-up.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use forebay_sys::wait::{self, Learnt, Time};

/// Longest spin: several times what a client needs between two requests.
const LOOK_MAX: Duration = Duration::from_micros(100);
/// Longest spin while the node is crowded.
const LOOK_CROWDED: Duration = Duration::from_micros(20);
/// How long a reading of /proc/loadavg is used.
const CROWDED_KNOWN: Duration = Duration::from_millis(2);
/// A yield that takes longer than this means that other threads were running.
const YIELD_LONG: Duration = Duration::from_micros(150);
/// No spin for this long after such a yield.
const BUSY: Duration = Duration::from_millis(10);
/// Polls between two yields. There are few, because the network thread's polls are system calls, and the client or
/// daemon that is waited for may need this processor.
const LOOKS: u32 = 4;

/// The adaptive bound.
#[derive(Debug)]
pub(super) struct AdaptiveSpin {
    /// Length of the spin in nanoseconds: at most [`LOOK_MAX`], 0 when recent spins found nothing.
    look: Learnt,
    busy_until: Option<Instant>,
    /// When the last request was done.
    idle_since: Instant,
    crowd: Crowd,
}

/// Whether more threads are runnable than there are processors.
#[derive(Debug)]
struct Crowd {
    /// /proc/loadavg, whose fourth field begins with the number of runnable threads. None where there is no such file.
    file: Option<File>,
    processors: u64,
    asked: Instant,
    crowded: bool,
}

impl Crowd {
    fn new() -> Crowd {
        // Processors of the node, like the number it is compared with: this process may be bound to some of them.
        // SAFETY: no pointers.
        let processors = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }.max(1) as u64;
        Crowd { file: File::open("/proc/loadavg").ok(), processors, asked: Instant::now(), crowded: false }
    }

    fn is_there(&mut self, now: Instant) -> bool {
        if now - self.asked >= CROWDED_KNOWN {
            self.asked = now;
            let mut text = [0; 64];
            let n = self.file.as_ref().and_then(|file| file.read_at(&mut text, 0).ok()).unwrap_or(0);
            self.crowded = runnable(&text[..n]).is_some_and(|n| n > self.processors);
        }
        self.crowded
    }
}

/// The number of runnable threads in the text of /proc/loadavg.
fn runnable(text: &[u8]) -> Option<u64> {
    let field = text.split(|&b| b == b' ').nth(3)?;
    std::str::from_utf8(field.split(|&b| b == b'/').next()?).ok()?.parse().ok()
}

impl AdaptiveSpin {
    pub(super) fn new() -> AdaptiveSpin {
        let most = LOOK_MAX.as_nanos() as u64;
        let look = Learnt::new(most, most / 64, 0);
        AdaptiveSpin { look, busy_until: None, idle_since: Instant::now(), crowd: Crowd::new() }
    }

    /// Spins until `work` is true, for a bounded time. Returns whether it was.
    pub(super) fn look(&mut self, mut work: impl FnMut() -> bool) -> bool {
        let started = Instant::now();
        self.idle_since = started;
        if let Some(until) = self.busy_until {
            if started < until {
                return work();
            }
            self.busy_until = None;
        }
        let mut most = Duration::from_nanos(self.look.get());
        if most.is_zero() {
            return work();
        }
        if self.crowd.is_there(started) {
            most = most.min(LOOK_CROWDED);
        }
        let mut budget = Time::new(started, most, LOOKS, YIELD_LONG);
        let found = wait::look(&mut budget, || work().then_some(()));
        self.busy_until = budget.long_yield_ended().map(|at| at + BUSY);
        found.is_some()
    }

    /// Records that the thread slept after a spin without result, and whether a request ended the sleep.
    pub(super) fn slept(&mut self, request: bool) {
        let gap = self.idle_since.elapsed();
        // A gap that was slept through includes the wake-up.
        let pays = if self.crowd.is_there(Instant::now()) { 2 * LOOK_CROWDED } else { 2 * LOOK_MAX };
        match request && gap < pays {
            true => self.look.lengthen(),
            false => self.look.shorten(self.look.get()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn look_ends_without_work_and_returns_at_once_with_it() {
        let mut spin = AdaptiveSpin::new();
        assert!(!spin.look(|| false));
        let mut looks = 0;
        while !spin.look(|| {
            looks += 1;
            looks > 3
        }) {}
        assert_eq!(looks, 4);
    }

    #[test]
    fn runnable_is_the_fourth_number() {
        assert_eq!(runnable(b"0.53 1.39 2.08 3/1182 45077\n"), Some(3));
        assert_eq!(runnable(b""), None);
        assert_eq!(runnable(b"a b c d"), None);
        // On this machine: this thread runs.
        let text = std::fs::read("/proc/loadavg").unwrap();
        assert!(runnable(&text).is_some_and(|n| n >= 1));
    }

    #[test]
    fn look_is_given_up_when_it_never_pays_and_taken_up_when_a_request_comes_soon() {
        let mut spin = AdaptiveSpin::new();
        for _ in 0..10 {
            spin.look(|| false);
            spin.slept(false);
        }
        assert_eq!(spin.look.get(), 0);
        // A spin of length 0 takes next to no time: the request arrived soon, unless this thread was delayed.
        for _ in 0..1000 {
            spin.look(|| false);
            spin.slept(true);
            if spin.look.get() == LOOK_MAX.as_nanos() as u64 {
                return;
            }
        }
        panic!("a request that came at once did not make the thread look for it");
    }
}
