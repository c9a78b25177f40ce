//! Client threads, one of which runs at a time: each client has a seat, and the scheduler passes the baton.
//!
//! A client is the real library on a thread of its own. It runs only while it has the baton. It returns the baton
//! between two operations, and where the library would sleep until its daemon replies ([`forebay_ring::Waiter`]). So
//! all events have one order, which the scheduler chooses. A killed client never gets the baton again; its thread ends
//! with the process.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The simulation's clock, in nanoseconds: a copy of the network's clock.
pub(crate) static NOW_NS: AtomicU64 = AtomicU64::new(0);

/// The time for the time stamps of the pool's files.
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
    /// It sleeps while this word of its ring has this value, until this time at most.
    Asleep { word: *const AtomicU32, value: u32, until_ns: u64 },
    /// Its thread has ended, by a panic or regularly.
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

    /// Called by the scheduler: lets the client run until it pauses.
    pub(crate) fn pass(&self) {
        let mut seat = self.seat();
        seat.has_baton = true;
        self.shared.1.notify_all();
        self.await_turn(seat, false);
        assert!(!matches!(self.seat().pause, Pause::Ended { panicked: true }), "a client panicked");
    }

    /// Called by the scheduler: true when the client is between two operations.
    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.seat().pause, Pause::Ready)
    }

    /// Called by the scheduler: true when the word has changed or the time has passed for which the client sleeps.
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

    /// Called by the scheduler: true when the client's thread has ended.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.seat().pause, Pause::Ended { .. })
    }

    /// Called by the client first: takes this seat for its thread and waits for the first turn.
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

    /// Called by the client between two operations.
    pub(crate) fn between_operations(&self) {
        self.pause(Pause::Ready);
    }

    /// Called by the client last.
    pub(crate) fn end(&self, panicked: bool) {
        self.pause(Pause::Ended { panicked });
    }
}

/// Clock and sleep for the rings.
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

/// From now on all rings of this process use the scheduler's clock, and sleep by returning the baton.
pub(crate) fn take_over() {
    forebay_ring::simulate(Box::new(Scheduled));
}
