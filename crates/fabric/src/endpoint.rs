//! What a node has of the network: the trait that libfabric and the simulation both are.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::Duration;

use forebay_types::Code;
use forebay_wire::Memory;
use rustix::event::{PollFd, PollFlags};

use crate::memory::{Access, Region};

/// A peer that an endpoint knows, by number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Peer(pub u32);

/// Memory that an endpoint registered, by number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Local(pub u64);

/// Registered memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Registered {
    /// Its number here.
    pub local: Local,
    /// What a peer must be told to reach its first byte.
    pub remote: Memory,
    /// Bytes of it.
    pub bytes: usize,
}

/// What a transfer does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From the peer's memory to ours.
    Read,
    /// From ours to the peer's.
    Write,
    /// Likewise, ahead of a message that says so: it has ended when it has left, and whether it has come is for the
    /// peer to see.
    Ahead,
}

/// One transfer by RMA, of any length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// Which way.
    pub direction: Direction,
    /// Our memory.
    pub local: Local,
    /// Where in it.
    pub local_offset: usize,
    /// The peer's memory: the address already has the offset added.
    pub remote: Memory,
    /// How much.
    pub bytes: usize,
}

/// What an endpoint can do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Bytes of the longest message.
    pub message_bytes: usize,
    /// Operations that may wait for one peer; more are refused with [`Code::Busy`].
    pub waiting_per_peer: usize,
    /// A message comes behind the transfers to its peer that were started before it, and what these wrote is in the
    /// peer's memory by then; unless they failed, as when the connection broke between the two. Of those of up to
    /// [`MOVE_BYTES_MAX`](forebay_types::limits::MOVE_BYTES_MAX) the bytes come from the first to the last, so that all
    /// are there when that is.
    pub in_order: bool,
}

/// What happened. Every accepted operation ends in one `Done` or one `Failed` with its token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event<'a> {
    /// A message came. From whom is for its content to say and to prove.
    Received {
        /// As its sender gave it.
        tag: u64,
        /// Its bytes, to be copied out before the call returns.
        bytes: &'a [u8],
    },
    /// A send or a transfer ahead has left, or another transfer is complete: what was read is here, what was written is
    /// in the peer's memory.
    Done {
        /// The operation.
        token: u64,
    },
    /// An operation failed, or its deadline passed. What it did, if anything, is not known.
    Failed {
        /// The operation.
        token: u64,
        /// With whom.
        peer: Peer,
        /// [`Code::TimedOut`] at the deadline; else what the transport says, mostly [`Code::Io`].
        code: Code,
        /// In words.
        why: &'a str,
    },
}

/// Nobody waits, and nobody has woken since the last wait.
const AWAKE: u32 = 0;
/// The waiter sleeps, or is about to.
const ASLEEP: u32 = 1;
/// Somebody has woken.
const WOKEN: u32 = 2;

/// Breaks another thread's [`Endpoint::wait`]: the one under way, or else the next, so that what was done before waking
/// is seen before the thread sleeps. While it is awake that takes no system call.
#[derive(Clone, Debug)]
pub struct Waker {
    inner: Arc<WakerInner>,
}

#[derive(Debug)]
struct WakerInner {
    event: OwnedFd,
    state: AtomicU32,
}

impl Waker {
    pub(crate) fn new() -> forebay_types::Result<Waker> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let event = rustix::event::eventfd(0, flags)
            .map_err(|e| forebay_types::Error::io("cannot make an eventfd", &e.into()))?;
        Ok(Waker { inner: Arc::new(WakerInner { event, state: AtomicU32::new(AWAKE) }) })
    }

    /// Wakes; once is enough until the waiter has returned.
    pub fn wake(&self) {
        if self.inner.state.swap(WOKEN, Ordering::SeqCst) == ASLEEP {
            // The only failure is a counter that is full, and then it is readable anyway.
            let _ = rustix::io::write(&self.inner.event, &1u64.to_ne_bytes());
        }
    }

    /// Says that the waiter is about to sleep; false when somebody has woken it since it last did.
    fn falls_asleep(&self) -> bool {
        let state = &self.inner.state;
        let asleep = state.compare_exchange(AWAKE, ASLEEP, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if !asleep {
            state.store(AWAKE, Ordering::SeqCst);
        }
        asleep
    }

    /// Says that it is awake. Who woke it may be writing yet: then the next sleep is a short one.
    fn is_awake(&self, readable: bool) {
        self.inner.state.store(AWAKE, Ordering::SeqCst);
        if readable {
            let _ = rustix::io::read(&self.inner.event, &mut [0; 8]);
        }
    }
}

/// A sleep that is begun: it ends when something may have come, by the waker, or when its time has passed.
#[derive(Debug)]
#[must_use = "who begins to sleep and does not is woken in vain"]
pub struct Sleep {
    waker: Waker,
    descriptor: Option<Arc<OwnedFd>>,
    timeout: Duration,
}

impl Sleep {
    /// How long it is at most.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Sleeps.
    pub fn sleep(self) {
        let timeout = rustix::event::Timespec {
            tv_sec: self.timeout.as_secs().min(3600) as i64,
            tv_nsec: self.timeout.subsec_nanos().into(),
        };
        let mut woken = PollFd::from_borrowed_fd(self.waker.inner.event.as_fd(), PollFlags::IN);
        let polled = match &self.descriptor {
            Some(fd) => {
                let mut both = [woken, PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)];
                let polled = rustix::event::poll(&mut both, Some(&timeout));
                [woken, _] = both;
                polled
            }
            None => rustix::event::poll(std::slice::from_mut(&mut woken), Some(&timeout)),
        };
        self.waker.is_awake(polled.is_ok() && woken.revents().contains(PollFlags::IN));
    }
}

/// One endpoint of a node: sends, receives, transfers. It does something only within its methods; whoever has it calls
/// [`Endpoint::progress`] as long as anything is expected. Times are its own clock's ([`Endpoint::now`]).
pub trait Endpoint: Send {
    /// Its address, for others to connect to: opaque, at most `forebay_wire::limits::ADDRESS_BYTES_MAX` bytes.
    fn address(&self) -> &[u8];

    /// The transport, for people: `tcp;ofi_rxm`.
    fn provider(&self) -> &str;

    /// What it can do.
    fn limits(&self) -> Limits;

    /// Its clock: monotonic, from an origin of its own.
    fn now(&self) -> Duration;

    /// Makes a peer of an address; nothing is sent. The same address gives the same peer.
    ///
    /// # Errors
    /// [`Code::Invalid`] for what is no address of this transport, [`Code::NoResources`].
    fn connect(&mut self, address: &[u8]) -> Result<Peer, Code>;

    /// Forgets a peer and what connection there is. Operations that wait for it fail.
    fn forget(&mut self, peer: Peer);

    /// Sends a message: `bytes` are copied. Messages to one peer arrive in order.
    ///
    /// # Errors
    /// [`Code::TooBig`], [`Code::Busy`] when too many wait for the peer, [`Code::Invalid`] for an unknown peer.
    fn send(
        &mut self,
        peer: Peer,
        tag: u64,
        bytes: &[u8],
        token: u64,
        deadline: Duration,
    ) -> Result<(), Code>;

    /// Registers memory; peers may do with it what `access` allows, by the key that is returned. It is kept until
    /// [`Endpoint::unregister`] and the end of all its transfers.
    ///
    /// # Errors
    /// [`Code::NoResources`], or what the transport says.
    fn register(&mut self, region: Arc<Region>, access: Access) -> Result<Registered, Code>;

    /// Ends what peers may do. Unknown numbers are ignored.
    fn unregister(&mut self, local: Local);

    /// Starts a transfer. A peer's refusal (no such key, beyond its bounds) comes as `Failed`, and may fail what else
    /// is under way with that peer.
    ///
    /// # Errors
    /// [`Code::Fault`] for local memory that is not registered or not so long, [`Code::Busy`], [`Code::Invalid`].
    fn transfer(
        &mut self,
        peer: Peer,
        transfer: &Transfer,
        token: u64,
        deadline: Duration,
    ) -> Result<(), Code>;

    /// Moves everything on, and tells what happened; the number of events. Never blocks.
    fn progress(&mut self, sink: &mut dyn FnMut(Event<'_>)) -> usize;

    /// Something to poll for input, beside other descriptors, when [`Endpoint::may_sleep`] said yes. None: only
    /// spinning or short sleeps.
    fn descriptor(&self) -> Option<&Arc<OwnedFd>>;

    /// Asks, right before polling, whether the descriptor will tell of everything that comes. No: progress first.
    fn may_sleep(&mut self) -> bool;

    /// When something must be done even if nothing comes: a deadline, another try.
    fn next_timer(&self) -> Option<Duration>;

    /// A node is at this address. From the first on, what comes from hosts of none need not be heard.
    fn admit(&mut self, _address: &[u8]) {}

    /// The user hears nobody, though somebody should be heard: perhaps it is the endpoint that is deaf, which then
    /// looks after itself.
    fn suspect(&mut self) {}

    /// How often it has closed everything and opened it again, because it was deaf.
    fn opened_again(&self) -> u64 {
        0
    }

    /// What breaks [`Endpoint::wait`].
    fn waker(&self) -> &Waker;

    /// Sleeps until something may have come, the timer is due, the waker is used, or `timeout` has passed. Where there
    /// is no descriptor it sleeps 50 µs at most.
    fn wait(&mut self, timeout: Duration) {
        if let Some(sleep) = self.falls_asleep(timeout) {
            sleep.sleep();
        }
    }

    /// How long a sleep may last while there is no descriptor to wait for: then only looking shows what comes.
    fn pause_without_descriptor(&self) -> Duration {
        Duration::from_micros(50)
    }

    /// The first half of [`Endpoint::wait`]; the second is done without the endpoint, which another thread may use
    /// meanwhile, as long as [`Endpoint::may_sleep`] says yes whenever that one leaves it. None: there is something to
    /// do.
    fn falls_asleep(&mut self, timeout: Duration) -> Option<Sleep> {
        let waker = self.waker().clone();
        if !waker.falls_asleep() {
            return None;
        }
        if !self.may_sleep() {
            waker.is_awake(false);
            return None;
        }
        let now = self.now();
        let mut timeout = self.next_timer().map_or(timeout, |at| timeout.min(at.saturating_sub(now)));
        let descriptor = self.descriptor().cloned();
        if descriptor.is_none() {
            timeout = timeout.min(self.pause_without_descriptor());
        }
        Some(Sleep { waker, descriptor, timeout })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_before_the_sleep_is_not_lost_and_one_while_awake_writes_nothing() {
        let waker = Waker::new().unwrap();
        let written = |waker: &Waker| rustix::io::read(&waker.inner.event, &mut [0; 8]).is_ok();
        waker.wake();
        waker.wake();
        assert!(!written(&waker) && !waker.falls_asleep(), "woken since");
        assert!(waker.falls_asleep());
        waker.clone().wake();
        assert!(written(&waker));
        waker.is_awake(false);
        assert!(waker.falls_asleep(), "that wake was for the sleep that it ended");
    }
}
