//! Threads of which one runs at a time: each client has a seat, and the scheduler passes the baton.
//!
//! A client is the real library on a thread of its own. It runs only while it has the baton, and gives it back between
//! two operations and where the library would sleep for its daemon ([`forebay_ring::Waiter`]). So everything that
//! happens has one order, which the scheduler chooses. A killed client never gets the baton again; its thread ends with
//! the process.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The simulation's clock, in nanoseconds: the network's.
pub(crate) static NOW_NS: AtomicU64 = AtomicU64::new(0);

/// The time that files of the pool are stamped with.
pub(crate) fn timestamp() -> forebay_types::Timestamp {
    let ns = NOW_NS.load(Ordering::Relaxed);
    forebay_types::Timestamp {
        sec: 1_000_000 + (ns / 1_000_000_000) as i64,
        nsec: (ns % 1_000_000_000) as u32,
    }
}

/// Why a client does not run.
#[derive(Clone, Copy, Debug)]
enum Pause {
    /// It is between two operations.
    Ready,
    /// It sleeps while this word of its ring is this value, until this time at most.
    Asleep { word: *const AtomicU32, value: u32, until_ns: u64 },
    /// Its thread has ended, by a panic or in order.
    Ended { panicked: bool },
}

#[derive(Debug)]
struct Seat {
    has_baton: bool,
    pause: Pause,
}

// SAFETY: the word is of a ring's mapping, which a client never unmaps, and atomic.
unsafe impl Send for Seat {}

/// A client's seat. Clones are the same seat.
#[derive(Clone, Debug)]
pub(crate) struct Baton {
    shared: Arc<(Mutex<Seat>, Condvar)>,
}

thread_local! {
    static MINE: RefCell<Option<Baton>> = const { RefCell::new(None) };
}

impl Baton {
    pub(crate) fn new() -> Baton {
        let seat = Seat { has_baton: false, pause: Pause::Ready };
        Baton { shared: Arc::new((Mutex::new(seat), Condvar::new())) }
    }

    fn seat(&self) -> MutexGuard<'_, Seat> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn await_turn<'s>(&'s self, mut seat: MutexGuard<'s, Seat>, mine: bool) {
        while seat.has_baton != mine {
            seat = self.shared.1.wait(seat).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The scheduler's: lets the client run until it pauses.
    pub(crate) fn pass(&self) {
        let mut seat = self.seat();
        seat.has_baton = true;
        self.shared.1.notify_all();
        self.await_turn(seat, false);
        assert!(!matches!(self.seat().pause, Pause::Ended { panicked: true }), "a client panicked");
    }

    /// The scheduler's: true when the client is between two operations.
    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.seat().pause, Pause::Ready)
    }

    /// The scheduler's: true when what the client sleeps for has come.
    pub(crate) fn is_woken(&self) -> bool {
        match self.seat().pause {
            Pause::Asleep { word, value, until_ns } => {
                // SAFETY: as for `Send`.
                let now = unsafe { &*word }.load(Ordering::Acquire);
                now != value || NOW_NS.load(Ordering::Relaxed) >= until_ns
            }
            Pause::Ready | Pause::Ended { .. } => false,
        }
    }

    /// The scheduler's: true when the client's thread has ended.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.seat().pause, Pause::Ended { .. })
    }

    /// The client's first: this is its seat, and it waits for its first turn.
    pub(crate) fn sit_down(&self) {
        MINE.with(|mine| *mine.borrow_mut() = Some(self.clone()));
        self.await_turn(self.seat(), true);
    }

    fn pause(&self, pause: Pause) {
        let mut seat = self.seat();
        seat.pause = pause;
        seat.has_baton = false;
        self.shared.1.notify_all();
        if !matches!(pause, Pause::Ended { .. }) {
            self.await_turn(seat, true);
        }
    }

    /// The client's, between two operations.
    pub(crate) fn between_operations(&self) {
        self.pause(Pause::Ready);
    }

    /// The client's last.
    pub(crate) fn end(&self, panicked: bool) {
        self.pause(Pause::Ended { panicked });
    }
}

/// Where rings sleep and what time it is to them.
struct Scheduled;

impl forebay_ring::Waiter for Scheduled {
    fn now_ns(&self) -> u64 {
        NOW_NS.load(Ordering::Relaxed)
    }

    fn sleep(&self, word: &AtomicU32, value: u32, timeout_ms: u64) {
        let until_ns = self.now_ns() + timeout_ms * 1_000_000;
        MINE.with(|mine| match &*mine.borrow() {
            Some(baton) => baton.pause(Pause::Asleep { word, value, until_ns }),
            None => panic!("a thread without a seat asks a daemon"),
        });
    }
}

/// Has this process's rings wait for the scheduler from now on.
pub(crate) fn take_over() {
    forebay_ring::simulate(Box::new(Scheduled));
}
