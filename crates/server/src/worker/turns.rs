//! Whose turn it is: the shard and the network are each behind a lock, and two threads sleep for them, one until a client rings
//! and one until something comes from another node.
//!
//! A thread that wakes does what there is to do for the other one too, unless that one is at it: the shard thread sends the
//! orders that it gave; the network thread serves what came for the shard. So a request that is sent on wakes one thread on
//! its way out, one at the other node, and one on its way back. Whoever holds a lock only ever tries the other, and who does
//! not get it says so to who has it (doorbell, waker), as if there were no helping: nobody waits for more than the few rounds that
//! are under way. Nobody sleeps with a lock.
//!
//! Bounds: the network thread serves a few rounds, and none where the shard is on a disk, for whose sake it would be silent;
//! messages that may take long it leaves. The shard thread sends nothing while data are moved.
//!
//! Tests: `turns/tests.rs`; `tests/turns.rs`, a real daemon whose threads fail and panic (`faults.rs`); the cluster tests of the
//! conformance crate. The simulation drives both sides' rounds in one thread.

#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_fabric::Sleep;
use forebay_ring::Doorbell;
use forebay_types::{Code, Error, Result};

use super::network::{NetworkThread, Round as NetworkRound};
use super::pace::Pace;
use super::shard_thread::{Round, ShardThread};
use super::statistics::Statistics;

/// Rounds that the network thread serves for the shard thread before that one is woken.
const ROUNDS: usize = 4;
/// What is to be done this much before the shard thread wakes anyway is worth no wake-up of its own.
const LATE: Duration = Duration::from_millis(1);

/// What the shard thread has.
struct Seat {
    thread: ShardThread<'static>,
    /// What ended a round that the network thread did.
    failed: Option<Error>,
    /// A round has failed: what was acknowledged is in the journal, the open transaction is gone, and only the next worker may
    /// go on from there.
    over: bool,
    /// The network thread served something since this was looked at.
    served: bool,
    /// When the shard thread wakes if nobody rings; none while it is awake.
    sleeps_until: Option<Instant>,
}

// SAFETY: what binds it to a thread is the open transaction and the borrow of the shard's state. LMDB is told to keep no locks and
// nothing in thread-local storage, so a transaction may go on in another thread; the shard is used by nobody but who has the
// seat, one after the other, by the lock around it; and a watcher that is bound to its thread is set in simulations, which
// seat nobody, and by tests that have one thread.
unsafe impl Send for Seat {}

/// See the module.
pub(super) struct Turns {
    shard: Mutex<Option<Seat>>,
    network: Mutex<Option<NetworkThread>>,
    doorbell: Arc<Doorbell>,
    /// The network thread may serve for the shard thread.
    serves: bool,
}

/// How the shard thread goes on after a sleep.
struct Rest {
    pace: Pace,
    idle_rounds: u32,
    slept: bool,
}

impl Turns {
    /// Nobody's yet. `in_memory` says that the shard is.
    pub(super) fn new(doorbell: Arc<Doorbell>, in_memory: bool) -> Arc<Turns> {
        let (shard, network) = (Mutex::new(None), Mutex::new(None));
        Arc::new(Turns { shard, network, doorbell, serves: in_memory })
    }

    /// Nothing that either thread does waits for a disk.
    pub(super) fn are_in_memory(&self) -> bool {
        self.serves
    }

    // --- the network thread

    /// Starts the thread that sleeps for the network; it ends when that is told to stop.
    ///
    /// # Errors
    /// No thread.
    pub(super) fn start_network(self: &Arc<Self>, mut network: NetworkThread) -> Result<JoinHandle<()>> {
        network.introduce();
        *self.network.lock().map_err(|_| panicked())? = Some(network);
        let turns = Arc::clone(self);
        std::thread::Builder::new()
            .name("network".into())
            .spawn(move || turns.communicate())
            .map_err(|e| Error::io("cannot start a thread", &e))
    }

    fn communicate(&self) {
        let (mut pace, mut slept) = (Pace::new(), false);
        let _end = EndOfWorker;
        while let Ok(mut guard) = self.network.lock() {
            let Some(network) = guard.as_mut() else { return };
            if slept {
                pace.slept(network.has_work());
            }
            let Some(sleep) = self.drive(network, &mut pace) else {
                *guard = None;
                return;
            };
            drop(guard);
            sleep.sleep();
            slept = true;
        }
    }

    /// Works until there is nothing to do; none when it was told to stop. Before it sleeps it looks for orders and for what comes, as
    /// long as that paid of late.
    fn drive(&self, network: &mut NetworkThread, pace: &mut Pace) -> Option<Sleep> {
        loop {
            let round = network.round();
            if network.take_told() {
                self.serve_for_shard_thread();
            } else if let NetworkRound::Idle(patience) = round {
                if pace.look(|| network.has_work()) {
                    continue;
                }
                match network.falls_asleep(patience) {
                    Some(sleep) => return Some(sleep),
                    None => pace.slept(true),
                }
            }
            if round == NetworkRound::Stopped {
                return None;
            }
        }
    }

    /// Serves what the network thread told the shard thread, or rings for that one.
    fn serve_for_shard_thread(&self) {
        let served = self.serves
            && self
                .shard
                .try_lock()
                .is_ok_and(|mut guard| guard.as_mut().is_some_and(Seat::serve_for_network));
        if !served {
            self.doorbell.ring();
        }
    }

    // --- the shard thread

    /// Gives the shard thread its seat.
    ///
    /// # Errors
    /// Another thread has panicked.
    pub(super) fn seat(&self, thread: ShardThread<'static>) -> Result<()> {
        let seat = Seat { thread, failed: None, over: false, served: false, sleeps_until: None };
        *self.shard()? = Some(seat);
        Ok(())
    }

    /// Takes everything apart.
    pub(super) fn unseat(&self) {
        if let Ok(mut guard) = self.shard.lock() {
            *guard = None;
        }
    }

    fn shard(&self) -> Result<MutexGuard<'_, Option<Seat>>> {
        self.shard.lock().map_err(|_| panicked())
    }

    /// Serves until told to stop.
    ///
    /// # Errors
    /// What ends the worker.
    pub(super) fn serve(&self) -> Result<()> {
        let mut rest = Rest { pace: Pace::new(), idle_rounds: 0, slept: false };
        let _end = EndOfWorker;
        loop {
            let mut guard = self.shard()?;
            let Some(seat) = guard.as_mut() else { return Ok(()) };
            let worked = self.work(seat, &mut rest);
            seat.over |= worked.is_err();
            let Some(timeout) = worked? else {
                if let Some(network) = &mut seat.thread.network {
                    network.stop();
                }
                return Ok(());
            };
            drop(guard);
            self.doorbell.sleep_on(timeout);
            rest.slept = true;
        }
    }

    /// Works until there is nothing to do, and says for how long; none when it was told to stop.
    fn work(&self, seat: &mut Seat, rest: &mut Rest) -> Result<Option<u64>> {
        seat.sleeps_until = None;
        if std::mem::take(&mut rest.slept) {
            rest.pace.slept(seat.served || seat.thread.has_work());
        }
        loop {
            if let Some(e) = seat.failed.take() {
                return Err(e);
            }
            let thread = &mut seat.thread;
            let round = thread.round()?;
            self.send(thread);
            match round {
                Round::Stopped => return Ok(None),
                Round::Served => {
                    rest.idle_rounds = 0;
                    continue;
                }
                Round::Idle if std::mem::take(&mut seat.served) => rest.idle_rounds = 0,
                Round::Idle => {}
            }
            if rest.pace.look(|| thread.has_work()) {
                Statistics::add(&thread.statistics.spun, 1);
                continue;
            }
            if thread.rest(rest.idle_rounds > 0)? {
                continue;
            }
            self.send(thread);
            rest.idle_rounds = rest.idle_rounds.saturating_add(1);
            let timeout = thread.patience_ms(rest.idle_rounds);
            Statistics::add(&thread.statistics.sleeps, 1);
            if self.doorbell.falls_asleep(|| !thread.has_work()) {
                seat.sleeps_until = Some(Instant::now() + Duration::from_millis(timeout));
                return Ok(Some(timeout));
            }
            rest.pace.slept(true);
        }
    }

    /// Sends what the shard thread has for other nodes, or wakes who does.
    fn send(&self, thread: &ShardThread<'_>) {
        let Some(network) = thread.network.as_ref().filter(|network| network.orders.take_given()) else {
            return;
        };
        let helped = match self.network.try_lock() {
            Ok(mut guard) => guard.as_mut().is_some_and(NetworkThread::help),
            Err(TryLockError::WouldBlock | TryLockError::Poisoned(_)) => false,
        };
        if !helped {
            network.orders.wake();
        }
    }
}

impl Seat {
    /// In the network thread's hands. False when the shard thread is to be woken.
    fn serve_for_network(&mut self) -> bool {
        // To look for what leads beyond the shard takes seconds where it is large, for which no node may be silent.
        if self.over || self.thread.is_checking() {
            return false;
        }
        let mut round = Ok(Round::Served);
        for _ in 0..ROUNDS {
            round = self.thread.round_for_network();
            self.served = true;
            if !matches!(round, Ok(Round::Served)) {
                break;
            }
        }
        if let Some(network) = &self.thread.network {
            // The network thread is at it.
            network.orders.take_given();
        }
        match round {
            Ok(Round::Idle) => {}
            Ok(Round::Served | Round::Stopped) => return false,
            Err(e) => {
                (self.failed, self.over) = (Some(e), true);
                return false;
            }
        }
        let due = Instant::now() + Duration::from_millis(self.thread.patience_ms(1));
        !self.thread.has_left() && self.sleeps_until.is_none_or(|until| until <= due + LATE)
    }
}

/// Ends the worker when its thread panics: half a worker would keep clients and other nodes waiting, and the supervisor starts a
/// whole one.
struct EndOfWorker;

impl Drop for EndOfWorker {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

fn panicked() -> Error {
    Error::new(Code::Io, "another thread of the worker has panicked")
}
