//! How long the shard thread, and the network thread, look for requests before they sleep: as long as that pays, giving way to others meanwhile.
//!
//! What pays is learnt from the gaps between requests, those that were slept through included: when a client rings
//! soon after the thread went to sleep, looking a little longer would have spared both a system call and a wake-up,
//! which on a virtual machine costs more than most requests. Between looks the thread yields, so that a client on the
//! same processor runs at once; a yield that takes long means that others compute there, and then it is better to
//! sleep and be woken, as the scheduler favours who slept. And while more threads want to run than the node has
//! processors, a look takes away from one of them what it may gain another: only gaps that are shorter than sleeping and
//! waking take are looked through then.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// Longest look: several times what a client needs between two requests.
const LOOK_MAX: Duration = Duration::from_micros(100);
/// Longest look while the node is crowded.
const LOOK_CROWDED: Duration = Duration::from_micros(20);
/// How long it is believed that the node is crowded, or that it is not.
const CROWDED_KNOWN: Duration = Duration::from_millis(2);
/// A yield from which the thread comes back later than this found others at work.
const YIELD_LONG: Duration = Duration::from_micros(150);
/// No looking for so long after that.
const BUSY: Duration = Duration::from_millis(10);
/// Looks between two yields: few, as the network thread's are system calls, and who waits for the processor may be the one that is looked for.
const LOOKS: u32 = 4;

/// The adaptive bound.
#[derive(Debug)]
pub(super) struct AdaptiveSpin {
    /// At most [`LOOK_MAX`]; none when nothing was gained of late.
    look: Duration,
    busy_until: Option<Instant>,
    /// When the last request was done.
    idle_since: Instant,
    crowd: Crowd,
}

/// Whether more threads want to run than there are processors.
#[derive(Debug)]
struct Crowd {
    /// /proc/loadavg, whose fourth number is how many want to run; none where there is no such file.
    file: Option<File>,
    processors: u64,
    asked: Instant,
    crowded: bool,
}

impl Crowd {
    fn new() -> Crowd {
        // Of the node, as the number that is held against it is: this process may be bound to some of them.
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

/// The number of threads that want to run, in the text of /proc/loadavg.
fn runnable(text: &[u8]) -> Option<u64> {
    let field = text.split(|&b| b == b' ').nth(3)?;
    std::str::from_utf8(field.split(|&b| b == b'/').next()?).ok()?.parse().ok()
}

impl AdaptiveSpin {
    pub(super) fn new() -> AdaptiveSpin {
        AdaptiveSpin { look: LOOK_MAX, busy_until: None, idle_since: Instant::now(), crowd: Crowd::new() }
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
        let look = if self.crowd.is_there(started) { self.look.min(LOOK_CROWDED) } else { self.look };
        loop {
            for _ in 0..LOOKS {
                if work() {
                    return true;
                }
                std::hint::spin_loop();
            }
            let before = Instant::now();
            if before - started >= look {
                return false;
            }
            std::thread::yield_now();
            let now = Instant::now();
            if now - before >= YIELD_LONG {
                self.busy_until = Some(now + BUSY);
                return work();
            }
        }
    }

    /// Tells that the thread slept after a look in vain, and whether a request ended the sleep.
    pub(super) fn slept(&mut self, request: bool) {
        let gap = self.idle_since.elapsed();
        // A gap that was slept through is longer by the wake-up.
        let pays = if self.crowd.is_there(Instant::now()) { 2 * LOOK_CROWDED } else { 2 * LOOK_MAX };
        self.look = if request && gap < pays { LOOK_MAX } else { self.look / 2 };
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
        // Of this machine: this very thread runs.
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
        assert_eq!(spin.look, Duration::ZERO);
        // A look of no length takes next to no time: the request came soon, if this thread was not held up.
        for _ in 0..1000 {
            spin.look(|| false);
            spin.slept(true);
            if spin.look == LOOK_MAX {
                return;
            }
        }
        panic!("a request that came at once did not make the thread look for it");
    }
}
