//! Requests that wait for a backing store or for space, apart from the serving threads.
//!
//! A request that may wait long gets a thread of its own, so that a store that does not answer holds up only the
//! programs that need it. Requests that wait at the daemon are limited, each kind by itself: a process has
//! [`RING_SLOTS`] requests at the daemon at a time, and most of them stay free for requests that do not wait. Beyond the
//! limit a request first waits here, for [`PATIENCE`] at most, or [`RANGE_PATIENCE`].
//!
//! [`RING_SLOTS`]: forebay_types::limits::RING_SLOTS

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_client::Pool;
use forebay_types::limits::{HIGH_WATER_PERCENT, RING_SLOTS, SCARCE_LOOK_MS, SCARCE_PERCENT};

use crate::errno::Errno;

/// Requests of one kind that wait at the daemon.
const AT_DAEMON: usize = RING_SLOTS / 5;
/// Requests that wait: each has a thread.
const THREADS_MAX: usize = 512;
/// How long a request waits here, for a permit or for space: as long as the daemon lets one wait.
const PATIENCE: Duration = Duration::from_secs(25);
/// The same for a range of a file: as long as a slow store may take for what others read.
const RANGE_PATIENCE: Duration = Duration::from_secs(3600);
/// How long a look at the free space is good for.
const LOOK_NS: u64 = SCARCE_LOOK_MS * 1_000_000;
/// Pause between two looks for space.
const PAUSE: Duration = Duration::from_millis(10);

/// What a request may wait for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WaitsFor {
    /// The names of a directory.
    Names,
    /// A file's data.
    Data,
    /// A range of a file that is being restored.
    Range,
    /// Space, at the daemon: a file is created, or opened for writing.
    Room,
    /// Space, here: an open file is written.
    Write,
    /// The medium that the pool emulates.
    Medium,
}

impl WaitsFor {
    /// How long a request waits for a permit.
    fn patience(self) -> Duration {
        match self {
            // Each range that arrives gives one back, and a store that fails gives all of them back.
            WaitsFor::Range => RANGE_PATIENCE,
            _ => PATIENCE,
        }
    }
}

#[derive(Debug, Default)]
struct Permits {
    taken: Mutex<usize>,
    given_back: Condvar,
}

impl Permits {
    /// Takes a permit; none when there is none in time.
    fn take(&self, patience: Duration) -> Option<Permit<'_>> {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let all_taken = |taken: &mut usize| *taken >= AT_DAEMON;
        let waited = self.given_back.wait_timeout_while(taken, patience, all_taken);
        let (mut taken, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() && *taken >= AT_DAEMON {
            return None;
        }
        *taken += 1;
        drop(taken);
        Some(Permit(self))
    }
}

/// A permit that was taken. Dropping it gives it back.
struct Permit<'a>(&'a Permits);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        *self.0.taken.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.given_back.notify_one();
    }
}

/// The waiting requests of a mount.
#[derive(Debug)]
pub(crate) struct Waiting {
    names: Permits,
    data: Permits,
    ranges: Permits,
    room: Permits,
    threads: AtomicUsize,
    begun: Instant,
    /// When the free space was looked at last, after `begun`, and what percentage was used.
    looked_ns: AtomicU64,
    used_percent: AtomicU64,
}

impl Waiting {
    pub(crate) fn new() -> Waiting {
        Waiting {
            names: Permits::default(),
            data: Permits::default(),
            ranges: Permits::default(),
            room: Permits::default(),
            threads: AtomicUsize::new(0),
            begun: Instant::now(),
            looked_ns: AtomicU64::new(0),
            used_percent: AtomicU64::new(0),
        }
    }

    /// Serves a request by `serve`, in a thread of its own. It fails by `fail` when it could not even begin to wait; one that
    /// waits for the medium is served in this thread then, as those behind it have to wait for the medium too.
    pub(crate) fn hand_over(
        self: &Arc<Self>,
        what: WaitsFor,
        serve: impl FnOnce() + Send + 'static,
        fail: impl FnOnce(Errno) + Clone + Send + 'static,
    ) {
        if self.threads.fetch_add(1, Ordering::Relaxed) >= THREADS_MAX {
            self.threads.fetch_sub(1, Ordering::Relaxed);
            if what == WaitsFor::Medium {
                return serve();
            }
            tracing::warn!("{THREADS_MAX} programs wait for backing stores: the next one gets EIO");
            return fail(Errno(libc::EIO));
        }
        let (this, fail_too) = (Arc::clone(self), fail.clone());
        let run = move || {
            match this.permits(what).map(|permits| permits.take(what.patience())) {
                Some(None) => fail(Errno(libc::EIO)),
                // The permit lives until the request is served.
                None | Some(Some(_)) => serve(),
            }
            this.threads.fetch_sub(1, Ordering::Relaxed);
        };
        // A thread that cannot be started would take the request with it.
        let run = Arc::new(Mutex::new(Some(run)));
        let take = |run: &Mutex<Option<_>>| run.lock().unwrap_or_else(PoisonError::into_inner).take();
        let theirs = Arc::clone(&run);
        let thread = std::thread::Builder::new().name("store".into()).stack_size(256 * 1024);
        let started = thread.spawn(move || {
            if let Some(run) = take(&theirs) {
                run();
            }
        });
        match (started.is_ok(), what) {
            (true, _) => {}
            (false, WaitsFor::Medium) => {
                if let Some(run) = take(&run) {
                    run();
                }
            }
            (false, _) => {
                self.threads.fetch_sub(1, Ordering::Relaxed);
                fail_too(Errno(libc::EAGAIN));
            }
        }
    }

    fn permits(&self, what: WaitsFor) -> Option<&Permits> {
        match what {
            WaitsFor::Names => Some(&self.names),
            WaitsFor::Data => Some(&self.data),
            WaitsFor::Range => Some(&self.ranges),
            WaitsFor::Room => Some(&self.room),
            WaitsFor::Write | WaitsFor::Medium => None,
        }
    }

    /// The percentage of the pool that is used, some milliseconds ago at most.
    fn used_percent(&self, pool: &Pool) -> u64 {
        let now = self.begun.elapsed().as_nanos() as u64 + LOOK_NS + 1;
        if now.saturating_sub(self.looked_ns.load(Ordering::Acquire)) > LOOK_NS {
            self.used_percent.store(pool.used_percent().unwrap_or(0), Ordering::Relaxed);
            self.looked_ns.store(now, Ordering::Release);
        }
        self.used_percent.load(Ordering::Relaxed)
    }

    /// True when files are opened for writing so that their writes can wait.
    pub(crate) fn is_scarce(&self, pool: &Pool) -> bool {
        self.used_percent(pool) >= SCARCE_PERCENT
    }

    /// True when writes wait.
    pub(crate) fn is_full(&self, pool: &Pool) -> bool {
        self.used_percent(pool) >= HIGH_WATER_PERCENT
    }

    /// Waits until there is space, for a limited time. Returns whether there is.
    pub(crate) fn wait_for_space(&self, pool: &Pool) -> bool {
        let until = Instant::now() + PATIENCE;
        while self.is_full(pool) {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(PAUSE);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn request_beyond_the_limit_waits_for_one_of_its_kind_to_end() {
        let permits = Permits::default();
        let mut taken: Vec<_> = (0..AT_DAEMON).map(|_| permits.take(Duration::ZERO).unwrap()).collect();
        assert!(permits.take(Duration::from_millis(1)).is_none());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| permits.take(Duration::from_secs(60)).is_some());
            drop(taken.pop());
            assert!(waits.join().unwrap());
        });
    }

    #[test]
    fn requests_that_wait_for_names_leave_room_for_those_that_wait_for_data() {
        let waiting = Arc::new(Waiting::new());
        let (go, wait) = channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        let never = |e| panic!("{e:?}");
        for _ in 0..2 * AT_DAEMON {
            let wait = Arc::clone(&wait);
            waiting.hand_over(WaitsFor::Names, move || wait.lock().unwrap().recv().unwrap_or(()), never);
        }
        let (done, served) = channel();
        waiting.hand_over(WaitsFor::Data, move || done.send(()).unwrap(), never);
        served.recv_timeout(Duration::from_secs(60)).unwrap();
        drop(go);
    }

    #[test]
    fn requests_for_the_medium_are_served_though_there_is_no_further_thread() {
        let waiting = Arc::new(Waiting::new());
        waiting.threads.store(THREADS_MAX, Ordering::Relaxed);
        let (done, served) = channel();
        waiting.hand_over(WaitsFor::Medium, move || done.send(()).unwrap(), |e| panic!("{e:?}"));
        served.try_recv().unwrap();
        let (done, served) = channel();
        waiting.hand_over(WaitsFor::Write, || (), move |Errno(e)| done.send(e).unwrap());
        assert_eq!(served.try_recv(), Ok(libc::EIO));
    }
}
