//! Whose turn it is: the shard and the network are each behind a lock, and two threads sleep for them, one until a
//! client rings and one until something comes from another node.
//!
//! A thread that wakes does what there is to do for the other one too, unless that one is at it: the shard thread sends
//! the commands that it gave; the network thread serves what came for the shard. So a request that is sent on wakes one
//! thread on its way out, one at the other node, and one on its way back. Whoever holds a lock only ever tries the
//! other, and who does not get it says so to who has it (doorbell, waker), as if there were no helping: nobody waits
//! for more than the few rounds that are under way. Nobody sleeps with a lock.
//!
//! While the network thread is awake and the shard thread sleeps, it minds the doorbell too: clients need not ring, it
//! looks at their rings beside the network, and the shard thread, should it wake, does not look beside it. Before it
//! sleeps, and when it cannot do what is to be done, it gives the doorbell back.
//!
//! Bounds: the network thread serves a few rounds, and none where the shard is on a disk, for whose sake it would be
//! silent; messages that may take long it leaves. The shard thread sends nothing while data are moved.
//!
//! Tests: `handoff/tests.rs`; `tests/handoff.rs`, a real daemon whose threads fail and panic (`faults.rs`); the cluster
//! tests of the conformance crate. The simulation drives both sides' rounds in one thread.

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_fabric::Sleep;
use forebay_ring::Doorbell;
use forebay_types::{Code, Error, Result};

use super::adaptive_spin::AdaptiveSpin;
use super::core::state::{Round, ShardThread};
use super::network::{NetworkThread, Round as NetworkRound};
use super::statistics::Statistics;

/// Rounds that the network thread serves for the shard thread before that one is woken.
const ROUNDS: usize = 4;
/// Rounds for clients without anything for another node, after which the network thread leaves them to the shard thread
/// until it has heard something: they are none of its business.
const STRANGE_MAX: usize = 8;
/// Who sleeps for so long is asleep: from its saying so to the system call.
const FALLING_ASLEEP: Duration = Duration::from_micros(20);
/// What is to be done this much before the shard thread wakes anyway is worth no wake-up of its own.
const LATE: Duration = Duration::from_millis(1);

/// What the shard thread has.
struct Core {
    thread: ShardThread<'static>,
    /// What ended a round that the network thread did.
    failed: Option<Error>,
    /// A round has failed: what was acknowledged is in the journal, the open transaction is gone, and only the next
    /// worker may go on from there.
    over: bool,
    /// The network thread served something since this was looked at.
    served: bool,
    /// Since when the shard thread sleeps, and when it wakes if nobody rings; none while it is awake.
    asleep: Option<(Instant, Instant)>,
}

// SAFETY: what binds it to a thread is the open transaction and the borrow of the shard's state. LMDB is told to keep
// no locks and nothing in thread-local storage, so a transaction may go on in another thread; the shard is used by
// nobody but who has the core, one after the other, by the lock around it; and a watcher that is bound to its thread is
// set in simulations, which install nobody, and by tests that have one thread.
unsafe impl Send for Core {}

/// See the module.
pub(super) struct Handoff {
    shard: Mutex<Option<Core>>,
    network: Mutex<Option<NetworkThread>>,
    doorbell: Arc<Doorbell>,
    /// The network thread may serve for the shard thread.
    serves: bool,
    /// The network thread is awake, and looks for what clients ask.
    minds: AtomicBool,
}

/// What came of a round in the shard thread's place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Service {
    /// All is done; it gave the network something to send, or did not.
    Done { gave: bool },
    /// The shard thread is to go on.
    Left,
}

/// How the shard thread goes on after a sleep.
struct Rest {
    spin: AdaptiveSpin,
    idle_rounds: u32,
    slept: bool,
}

impl Handoff {
    /// Nobody's yet. `in_memory` says that the shard is.
    pub(super) fn new(doorbell: Arc<Doorbell>, in_memory: bool) -> Arc<Handoff> {
        let (shard, network) = (Mutex::new(None), Mutex::new(None));
        Arc::new(Handoff { shard, network, doorbell, serves: in_memory, minds: AtomicBool::new(false) })
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
        let handoff = Arc::clone(self);
        std::thread::Builder::new()
            .name("network".into())
            .spawn(move || handoff.communicate())
            .map_err(|e| Error::io("cannot start a thread", &e))
    }

    fn communicate(&self) {
        let (mut spin, mut slept) = (AdaptiveSpin::new(), false);
        let _end = EndOfWorker;
        while let Ok(mut guard) = self.network.lock() {
            let Some(network) = guard.as_mut() else { return };
            if slept {
                spin.slept(network.has_work());
            }
            let Some(sleep) = self.drive(network, &mut spin) else {
                *guard = None;
                return;
            };
            drop(guard);
            sleep.sleep();
            slept = true;
        }
    }

    /// Works until there is nothing to do; none when it was told to stop. Before it sleeps it looks for commands, for
    /// what comes and for what clients ask, as long as that paid of late.
    fn drive(&self, network: &mut NetworkThread, spin: &mut AdaptiveSpin) -> Option<Sleep> {
        // Rounds for clients, one after the other, in which nothing was for another node.
        let mut strange = 0;
        loop {
            let round = network.round();
            let told = network.take_told();
            if told {
                strange = 0;
            }
            // Data are copied within rounds, for which clients are not to wait.
            let minds = strange < STRANGE_MAX && !network.moves_data();
            let mut asked = if minds { self.is_asked() } else { !self.gives_doorbell_back() };
            if let (false, NetworkRound::Idle(next_timeout)) = (told || asked, round) {
                let found = spin.look(|| {
                    asked = minds && self.is_asked();
                    asked || network.has_work()
                });
                if !found {
                    asked = !self.gives_doorbell_back();
                }
                if !found && !asked {
                    match network.falls_asleep(next_timeout) {
                        Some(sleep) => return Some(sleep),
                        None => spin.slept(true),
                    }
                }
            }
            // Requests for data need the network alone.
            if asked && network.serve_data_requests() {
                strange = 0;
                asked = minds && self.is_asked();
            }
            if told || asked {
                let gave = self.serve_for_shard_thread() == Service::Done { gave: true };
                strange = if gave || told { 0 } else { strange + 1 };
            }
            if round == NetworkRound::Stopped {
                self.gives_doorbell_back();
                return None;
            }
        }
    }

    /// Serves what the network thread told the shard thread, or clients ask; or wakes that one.
    fn serve_for_shard_thread(&self) -> Service {
        let tried = match self.serves {
            true => self.shard.try_lock().ok(),
            false => None,
        };
        let Some(mut guard) = tried else {
            // It is awake, and looks once more before it sleeps; or its clients have to ring.
            self.doorbell.ring();
            return Service::Left;
        };
        let Some(core) = guard.as_mut() else {
            self.doorbell.ring();
            return Service::Left;
        };
        let service = core.serve_for_network();
        if service == Service::Left {
            // It sleeps by the doorbell, whoever minds that, and is not asleep from here on.
            core.asleep = None;
            drop(guard);
            self.doorbell.wake();
        }
        service
    }

    /// True when a client asks, or a message waits, and nobody but this thread is there for it: the network thread
    /// minds the doorbell from here on.
    fn is_asked(&self) -> bool {
        if !self.serves {
            return false;
        }
        self.minds.store(true, Ordering::Relaxed);
        let Ok(mut guard) = self.shard.try_lock() else { return false };
        let Some(core) = guard.as_mut().filter(|core| !core.over) else { return false };
        // One that has only begun to sleep would find the doorbell rung.
        if core.asleep.is_none_or(|(since, _)| since.elapsed() <= FALLING_ASLEEP) {
            return false;
        }
        self.doorbell.mind();
        core.thread.has_work()
    }

    /// The network thread is about to sleep: from here on clients wake the shard thread. False when one has asked
    /// before.
    fn gives_doorbell_back(&self) -> bool {
        if !self.minds.swap(false, Ordering::Relaxed) {
            return true;
        }
        // The thread that holds the core is awake, and looks at the doorbell before it sleeps.
        let Ok(mut guard) = self.shard.try_lock() else { return true };
        match guard.as_mut() {
            Some(core) if core.asleep.is_some() => self.doorbell.falls_asleep(|| !core.thread.has_work()),
            _ => true,
        }
    }

    // --- the shard thread

    /// Gives the shard thread its core.
    ///
    /// # Errors
    /// Another thread has panicked.
    pub(super) fn install(&self, thread: ShardThread<'static>) -> Result<()> {
        let core = Core { thread, failed: None, over: false, served: false, asleep: None };
        *self.shard()? = Some(core);
        Ok(())
    }

    /// Takes everything apart.
    pub(super) fn take_core(&self) {
        if let Ok(mut guard) = self.shard.lock() {
            *guard = None;
        }
    }

    fn shard(&self) -> Result<MutexGuard<'_, Option<Core>>> {
        self.shard.lock().map_err(|_| panicked())
    }

    /// Serves until told to stop.
    ///
    /// # Errors
    /// What ends the worker.
    pub(super) fn serve(&self) -> Result<()> {
        let mut rest = Rest { spin: AdaptiveSpin::new(), idle_rounds: 0, slept: false };
        let _end = EndOfWorker;
        loop {
            let mut guard = self.shard()?;
            let Some(core) = guard.as_mut() else { return Ok(()) };
            let worked = self.work(core, &mut rest);
            core.over |= worked.is_err();
            let Some(timeout) = worked? else {
                if let Some(network) = &mut core.thread.network {
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
    fn work(&self, core: &mut Core, rest: &mut Rest) -> Result<Option<u64>> {
        core.asleep = None;
        if std::mem::take(&mut rest.slept) {
            rest.spin.slept(core.served || core.thread.has_work());
        }
        loop {
            if let Some(e) = core.failed.take() {
                return Err(e);
            }
            let thread = &mut core.thread;
            let round = thread.round()?;
            self.send(thread);
            match round {
                Round::Stopped => return Ok(None),
                Round::Served => {
                    rest.idle_rounds = 0;
                    continue;
                }
                Round::Idle if std::mem::take(&mut core.served) => rest.idle_rounds = 0,
                Round::Idle => {}
            }
            // One that looks is enough.
            let minded = self.minds.load(Ordering::Relaxed);
            if !minded && rest.spin.look(|| thread.has_work()) {
                Statistics::add(&thread.statistics.spun, 1);
                continue;
            }
            if thread.rest(rest.idle_rounds > 0)? {
                continue;
            }
            self.send(thread);
            rest.idle_rounds = rest.idle_rounds.saturating_add(1);
            let timeout = thread.next_timeout_ms(rest.idle_rounds);
            Statistics::add(&thread.statistics.sleeps, 1);
            if self.doorbell.falls_asleep(|| !thread.has_work()) {
                let now = Instant::now();
                core.asleep = Some((now, now + Duration::from_millis(timeout)));
                return Ok(Some(timeout));
            }
            rest.spin.slept(true);
        }
    }

    /// Sends what the shard thread has for other nodes, or wakes who does.
    fn send(&self, thread: &ShardThread<'_>) {
        let Some(network) = thread.network.as_ref().filter(|network| network.commands.take_given()) else {
            return;
        };
        let helped = match self.network.try_lock() {
            Ok(mut guard) => guard.as_mut().is_some_and(NetworkThread::help),
            Err(TryLockError::WouldBlock | TryLockError::Poisoned(_)) => false,
        };
        if !helped {
            network.commands.wake();
        }
    }
}

impl Core {
    /// In the network thread's hands.
    fn serve_for_network(&mut self) -> Service {
        // To look for what leads beyond the shard takes seconds where it is large, for which no node may be silent.
        if self.over || self.thread.is_checking() {
            return Service::Left;
        }
        let mut round = Ok(Round::Served);
        for _ in 0..ROUNDS {
            round = self.thread.round_for_network();
            self.served = true;
            if !matches!(round, Ok(Round::Served)) {
                break;
            }
        }
        // The network thread is at it.
        let gave = self.thread.network.as_ref().is_some_and(|network| network.commands.take_given());
        match round {
            Ok(Round::Idle) => {}
            Ok(Round::Served | Round::Stopped) => return Service::Left,
            Err(e) => {
                (self.failed, self.over) = (Some(e), true);
                return Service::Left;
            }
        }
        let due = Instant::now() + Duration::from_millis(self.thread.next_timeout_ms(1));
        match !self.thread.has_unhandled() && self.asleep.is_none_or(|(_, until)| until <= due + LATE) {
            true => Service::Done { gave },
            false => Service::Left,
        }
    }
}

/// Ends the worker when its thread panics: half a worker would keep clients and other nodes waiting, and the supervisor
/// starts a whole one.
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
