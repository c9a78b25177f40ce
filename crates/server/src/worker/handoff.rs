//! Thread handoff: the shard and the network are each behind a mutex. Two threads sleep for them, the shard thread
//! until a client rings the doorbell, and the network thread until a message from another node arrives.
//!
//! A thread that wakes also runs rounds of the other one, unless that thread is awake: the shard thread sends the
//! commands that it gave, and the network thread serves messages for the shard. So a forwarded request wakes one thread
//! on its way out, one on the other node, and one on its way back. A thread that holds one mutex takes the other only
//! with `try_lock`. When that fails, it rings the doorbell or the waker, as it would without the handoff. So no thread
//! waits for more than the few rounds in progress, and none sleeps while it holds a mutex.
//!
//! While the network thread is awake and the shard thread sleeps, the network thread also *minds* the doorbell: clients
//! need not ring, because it polls their rings beside the network; and a shard thread that wakes does not spin beside
//! it. The network thread gives the doorbell back before it sleeps, and when it cannot run the shard's rounds. It minds
//! requests for data whenever it is awake, also then: their clients do not wake the shard thread, which could only hand
//! them over.
//!
//! Bounds: the network thread runs a few rounds at a time, and none if the shard is on a disk, where it would not
//! answer other nodes meanwhile. It leaves messages that may take long to the shard thread. The shard thread sends
//! nothing while data are moved.
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
use forebay_sys::stopped;
use forebay_types::{Code, Error, Result};

use super::adaptive_spin::AdaptiveSpin;
use super::core::state::{Round, ShardThread};
use super::end_of_worker::EndOfWorker;
use super::network::{NetworkThread, Round as NetworkRound};
use super::statistics::Statistics;

/// Rounds that the network thread runs for the shard thread before it wakes that thread.
const ROUNDS: usize = 4;
/// After so many rounds for clients that gave the network nothing to send, the network thread leaves clients to the
/// shard thread until it receives a message: they do not need the network.
const STRANGE_MAX: usize = 8;
/// After this long a shard thread that announced its sleep is taken to have made the system call.
const FALLING_ASLEEP: Duration = Duration::from_micros(20);
/// The shard thread is not woken for work that is due at most this long before its own wake-up.
const LATE: Duration = Duration::from_millis(1);
/// A worker whose network thread did not run for so long ends, and executes nothing of what had reached it. Other nodes
/// have given this one up by then, and repeat nothing.
pub(super) const STOPPED_MAX: Duration = Duration::from_secs(10);

/// What the shard thread owns.
struct Core {
    thread: ShardThread<'static>,
    /// The error that ended a round of the network thread.
    failed: Option<Error>,
    /// A round has failed. What was acknowledged is in the journal, the open transaction is lost, and only the next
    /// worker may continue from there.
    over: bool,
    /// The network thread ran a round since the shard thread last checked this.
    served: bool,
    /// Since when the shard thread sleeps, and when its timeout ends. None while it is awake.
    asleep: Option<(Instant, Instant)>,
}

// SAFETY: a core is bound to a thread by the open transaction and the borrow of the shard's state. LMDB is opened
// without locks and thread-local storage, so a transaction may continue in another thread. Only the thread that holds
// the mutex around the core uses the shard. A watcher that is bound to its thread is set only in simulations, which
// install no core, and in tests with one thread.
unsafe impl Send for Core {}

/// See the module.
pub(super) struct Handoff {
    shard: Mutex<Option<Core>>,
    network: Mutex<Option<NetworkThread>>,
    doorbell: Arc<Doorbell>,
    /// The network thread may run the shard's rounds.
    serves: bool,
    /// The network thread is awake and polls for clients' requests.
    minds: AtomicBool,
}

/// The result of rounds in the shard thread's place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Service {
    /// Nothing is left to do. `gave`: the rounds gave the network something to send.
    Done { gave: bool },
    /// The shard thread has to continue.
    Left,
}

/// The shard thread's state from one sleep to the next.
struct Rest {
    spin: AdaptiveSpin,
    idle_rounds: u32,
    slept: bool,
}

impl Handoff {
    /// Without shard and network yet. `in_memory`: the shard is in memory.
    pub(super) fn new(doorbell: Arc<Doorbell>, in_memory: bool) -> Arc<Handoff> {
        // The last worker may have been killed while its network thread polled.
        doorbell.leaves_data(|| true);
        let (shard, network) = (Mutex::new(None), Mutex::new(None));
        Arc::new(Handoff { shard, network, doorbell, serves: in_memory, minds: AtomicBool::new(false) })
    }

    /// True when neither thread waits for a disk.
    pub(super) fn are_in_memory(&self) -> bool {
        self.serves
    }

    // --- the network thread

    /// Starts the network thread. It ends on `Command::Stop`.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start_network(self: &Arc<Self>, mut network: NetworkThread) -> Result<JoinHandle<()>> {
        network.introduce();
        *self.network.lock().map_err(|_| panicked())? = Some(network);
        let handoff = Arc::clone(self);
        // What came before, as a recovery, may have taken long.
        stopped::waited();
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
            // Of all threads, the one that drives the network executes the handler of SIGCONT.
            let Some(sleep) = stopped::hearing(|| self.drive(network, &mut spin)) else {
                *guard = None;
                return;
            };
            drop(guard);
            sleep.sleep();
            slept = true;
        }
    }

    /// Runs rounds until there is nothing to do. None when it received `Command::Stop`. Before it sleeps, it polls
    /// commands, messages and clients' rings with an adaptive spin.
    fn drive(&self, network: &mut NetworkThread, spin: &mut AdaptiveSpin) -> Option<Sleep> {
        // Successive rounds for clients that gave the network nothing to send.
        let mut strange = 0;
        loop {
            // Each round takes the requests for data.
            self.doorbell.minds_data();
            stopped::runs();
            let round = network.round();
            let told = network.take_told();
            if told {
                strange = 0;
            }
            // Data are copied within rounds, and clients must not wait for that.
            let minds = strange < STRANGE_MAX && !network.moves_data();
            let mut asked = if minds { self.is_asked() } else { !self.gives_doorbell_back() };
            self.wakes_for_left(network);
            if let (false, NetworkRound::Idle(next_timeout)) = (told || asked, round) {
                let found = spin.look(|| {
                    asked = minds && self.is_asked();
                    asked || network.has_work()
                });
                if !found {
                    asked = !self.gives_doorbell_back();
                }
                if !found && !asked {
                    if !self.doorbell.leaves_data(|| !network.has_data_requests()) {
                        spin.slept(true);
                        continue;
                    }
                    self.wakes_for_left(network);
                    match network.falls_asleep(next_timeout.min(STOPPED_MAX / 4)) {
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
                self.doorbell.leaves_data(|| true);
                return None;
            }
        }
    }

    /// Wakes the shard thread for a request for data that the network thread leaves to it. Its client has woken no thread.
    fn wakes_for_left(&self, network: &NetworkThread) {
        if network.has_left_requests() {
            self.doorbell.ring();
        }
    }

    /// Runs the shard's rounds for messages of the network thread or clients' requests, or wakes the shard thread.
    fn serve_for_shard_thread(&self) -> Service {
        let tried = match self.serves {
            true => self.shard.try_lock().ok(),
            false => None,
        };
        let Some(mut guard) = tried else {
            // The shard thread is awake and checks once more before it sleeps. Or the doorbell is not minded, and
            // clients ring it.
            self.doorbell.ring();
            return Service::Left;
        };
        let Some(core) = guard.as_mut() else {
            self.doorbell.ring();
            return Service::Left;
        };
        let service = core.serve_for_network();
        if service == Service::Left {
            // It sleeps on the doorbell, minded or not, and counts as awake from here on.
            core.asleep = None;
            drop(guard);
            self.doorbell.wake();
        }
        service
    }

    /// True when a request or message waits and the shard thread sleeps. From here on the network thread minds the
    /// doorbell.
    fn is_asked(&self) -> bool {
        if !self.serves {
            return false;
        }
        self.minds.store(true, Ordering::Relaxed);
        let Ok(mut guard) = self.shard.try_lock() else { return false };
        let Some(core) = guard.as_mut().filter(|core| !core.over) else { return false };
        // A thread that has not made the system call yet would return from it at once, because `mind` changes the word.
        if core.asleep.is_none_or(|(since, _)| since.elapsed() <= FALLING_ASLEEP) {
            return false;
        }
        self.doorbell.mind();
        core.thread.has_work()
    }

    /// Gives the doorbell back before the network thread sleeps: from here on clients wake the shard thread. False when
    /// a request has arrived before.
    fn gives_doorbell_back(&self) -> bool {
        if !self.minds.load(Ordering::Relaxed) {
            return true;
        }
        let given = match self.shard.try_lock() {
            // The thread that holds the core is awake, and checks the doorbell before it sleeps.
            Err(_) => true,
            Ok(mut guard) => match guard.as_mut() {
                Some(core) if core.asleep.is_some() => self.doorbell.falls_asleep(|| !core.thread.has_work()),
                _ => true,
            },
        };
        // Otherwise the network thread must try again: the doorbell rings for no thread until then.
        self.minds.store(!given, Ordering::Relaxed);
        given
    }

    // --- the shard thread

    /// Installs the shard thread's core.
    ///
    /// # Errors
    /// Another thread has panicked.
    pub(super) fn install(&self, thread: ShardThread<'static>) -> Result<()> {
        let core = Core { thread, failed: None, over: false, served: false, asleep: None };
        *self.shard()? = Some(core);
        Ok(())
    }

    /// Drops the core.
    pub(super) fn take_core(&self) {
        if let Ok(mut guard) = self.shard.lock() {
            *guard = None;
        }
    }

    fn shard(&self) -> Result<MutexGuard<'_, Option<Core>>> {
        self.shard.lock().map_err(|_| panicked())
    }

    /// Serves until it receives `Message::Stop`.
    ///
    /// # Errors
    /// Errors that end the worker.
    pub(super) fn serve(&self) -> Result<()> {
        let mut rest = Rest { spin: AdaptiveSpin::new(), idle_rounds: 0, slept: false };
        let _end = EndOfWorker;
        stopped::waited();
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

    /// Works until there is nothing to do, and returns the timeout in milliseconds. None when it received
    /// `Message::Stop`.
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
            stopped::check();
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
            // One polling thread is enough.
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
            if thread.network.is_none() {
                // No thread polls for requests for data, whatever a client may have written there.
                self.doorbell.leaves_data(|| true);
            }
            Statistics::add(&thread.statistics.sleeps, 1);
            if self.doorbell.falls_asleep(|| !thread.has_work()) {
                let now = Instant::now();
                core.asleep = Some((now, now + Duration::from_millis(timeout)));
                return Ok(Some(timeout));
            }
            rest.spin.slept(true);
        }
    }

    /// Sends what the shard thread has for other nodes, or wakes the network thread.
    fn send(&self, thread: &ShardThread<'_>) {
        let Some(network) = thread.network.as_ref().filter(|network| network.commands.take_given()) else {
            return;
        };
        let helped = match self.network.try_lock() {
            Ok(mut guard) => guard.as_mut().is_some_and(|network| stopped::hearing(|| network.help())),
            Err(TryLockError::WouldBlock | TryLockError::Poisoned(_)) => false,
        };
        if !helped {
            network.commands.wake();
        }
    }
}

impl Core {
    /// Runs the shard's rounds in the network thread.
    fn serve_for_network(&mut self) -> Service {
        // A check searches the whole shard, which may take seconds. A node must not leave other nodes unanswered for
        // that long.
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
        // The network thread is running and sends what the rounds gave it.
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

fn panicked() -> Error {
    Error::new(Code::Io, "another thread of the worker has panicked")
}
