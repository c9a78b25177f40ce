//! Client threads, one of which runs at a time: each client has a seat, and the scheduler passes the baton.
//!
//! A client is the real library on a thread of its own. It runs only while it has the baton. It returns the baton
//! between two operations, and where the library would sleep until its daemon replies ([`forebay_ring::Waiter`]). So
//! all events have one order, which the scheduler chooses. A killed client never gets the baton again; its thread ends
//! with the process.

use std::cell::{Cell, RefCell};
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
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
    /// Set when the thread's process is killed: its next pause ends the thread, and what it has open is closed.
    is_killed: Arc<AtomicBool>,
}

/// The panic payload of a thread whose process is killed.
struct Killed;

thread_local! {
    static MINE: RefCell<Option<Baton>> = const { RefCell::new(None) };
    /// What a killed thread adds to the clock, so that nothing that it waits for takes long.
    static AHEAD_NS: Cell<u64> = const { Cell::new(0) };
}

impl Baton {
    pub(crate) fn new() -> Baton {
        Baton::of(&Arc::default())
    }

    /// The seat of a thread of a process, which is killed by setting this.
    fn of(is_killed: &Arc<AtomicBool>) -> Baton {
        let seat = Seat { has_baton: false, pause: Pause::Ready };
        Baton { shared: Arc::new((Mutex::new(seat), Condvar::new())), is_killed: Arc::clone(is_killed) }
    }

    fn is_killed(&self) -> bool {
        self.is_killed.load(Ordering::Relaxed)
    }

    fn end_if_killed(&self) {
        if self.is_killed() && !std::thread::panicking() {
            resume_unwind(Box::new(Killed));
        }
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
        // A killed thread closes what it has open, and waits for nothing.
        if self.is_killed() && !matches!(pause, Pause::Ended { .. }) {
            return self.end_if_killed();
        }
        let mut seat = self.seat();
        seat.pause = pause;
        seat.has_baton = false;
        self.shared.1.notify_all();
        if !matches!(pause, Pause::Ended { .. }) {
            self.await_turn(seat, true);
            self.end_if_killed();
        }
    }

    /// The seat of the calling thread.
    pub(crate) fn mine() -> Baton {
        MINE.with(|mine| mine.borrow().clone()).expect("a thread with a seat")
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
        let now = NOW_NS.load(Ordering::Relaxed);
        let is_killed = MINE.with(|mine| mine.borrow().as_ref().is_some_and(Baton::is_killed));
        if is_killed {
            AHEAD_NS.set(AHEAD_NS.get() + 1_000_000_000);
        }
        now + AHEAD_NS.get()
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

/// The threads of a process that can be killed: then each ends where it sleeps, as if its process had got SIGKILL. What it
/// has open is closed. Clones are the same process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Process {
    is_killed: Arc<AtomicBool>,
    seats: Arc<Mutex<Vec<Baton>>>,
}

thread_local! {
    static PROCESS: RefCell<Option<Process>> = const { RefCell::new(None) };
}

impl Process {
    /// The process of the calling thread.
    pub(crate) fn mine() -> Process {
        PROCESS.with(|process| process.borrow().clone()).expect("a thread of a process")
    }

    fn seats(&self) -> MutexGuard<'_, Vec<Baton>> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a thread. It runs when it gets the baton.
    pub(crate) fn start(&self, name: &str, run: impl FnOnce() + Send + 'static) -> Baton {
        let seat = Baton::of(&self.is_killed);
        self.seats().push(seat.clone());
        let (its, process) = (seat.clone(), self.clone());
        let body = move || {
            PROCESS.with(|mine| *mine.borrow_mut() = Some(process));
            its.sit_down();
            let done = catch_unwind(AssertUnwindSafe(|| {
                its.end_if_killed();
                run();
            }));
            its.end(done.is_err_and(|panic| !panic.is::<Killed>()));
        };
        std::thread::Builder::new().name(name.to_owned()).spawn(body).expect("a thread");
        seat
    }

    /// Called by the scheduler: passes the baton to each thread that can run and that `runs` chooses.
    pub(crate) fn run(&self, mut runs: impl FnMut() -> bool) {
        self.seats().retain(|seat| !seat.has_ended());
        let seats = self.seats().clone();
        for seat in seats {
            if (seat.is_ready() || seat.is_woken()) && runs() {
                seat.pass();
            }
        }
    }

    pub(crate) fn is_killed(&self) -> bool {
        self.is_killed.load(Ordering::Relaxed)
    }

    /// True while it has threads.
    pub(crate) fn is_alive(&self) -> bool {
        self.seats().iter().any(|seat| !seat.has_ended())
    }

    /// Called by the scheduler: kills the process.
    pub(crate) fn kill(&self) {
        self.is_killed.store(true, Ordering::Relaxed);
        loop {
            let Some(seat) = self.seats().pop() else { return };
            if !seat.has_ended() {
                seat.pass();
            }
        }
    }
}
