//! The interface to the network: a trait that libfabric and the simulation implement.

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
    /// Its number at this endpoint.
    pub local: Local,
    /// Address and key by which a peer reaches its first byte.
    pub remote: Memory,
    /// Its length.
    pub bytes: usize,
}

/// What a transfer does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From the peer's memory to local memory.
    Read,
    /// As `Read`, to memory that others use: no byte is stored there after the deadline, or once the transfer was reported. If
    /// the deadline passes, the endpoint may replace the local memory ([`Region::detach`]). Then it is registered no longer
    /// ([`Endpoint::is_registered`]), and other `ReadInTime` transfers to it fail too. So no other transfers use that region.
    /// For endpoints that copy ([`Limits::copies`]).
    ReadInTime,
    /// From local memory to the peer's.
    Write,
    /// As `Write`, ahead of a message that announces the bytes. The operation ends when the bytes have left. The peer
    /// has to check whether they have arrived.
    Ahead,
}

/// One transfer by RMA, of any length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// The direction.
    pub direction: Direction,
    /// The local memory.
    pub local: Local,
    /// The offset in the local memory.
    pub local_offset: usize,
    /// The peer's memory: the address already has the offset added.
    pub remote: Memory,
    /// The length.
    pub bytes: usize,
}

/// What an endpoint can do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Bytes of the longest message.
    pub message_bytes: usize,
    /// Operations that may wait for one peer. Further ones are refused with [`Code::Busy`].
    pub waiting_per_peer: usize,
    /// A message arrives after the transfers to its peer that were started before it, and then their bytes are in the
    /// peer's memory. The exception are transfers that failed, for example because the connection broke between the
    /// two. A transfer of up to [`MOVE_BYTES_MAX`](forebay_types::limits::MOVE_BYTES_MAX) bytes writes its bytes from
    /// the first to the last. So when the last byte is there, all are.
    pub in_order: bool,
    /// The processor of the host copies the bytes of transfers, within calls of the endpoint. So registering memory pins no
    /// pages, and no byte of a transfer is stored once it has ended, other than by its deadline.
    pub copies: bool,
}

/// An event. Every accepted operation ends in one `Done` or one `Failed` with its token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event<'a> {
    /// A message was received. Its content has to name its sender and to prove it.
    Received {
        /// The tag that its sender passed.
        tag: u64,
        /// Its bytes, valid until the callback returns.
        bytes: &'a [u8],
    },
    /// A send or an `Ahead` transfer has left, or another transfer is complete: bytes that were read are in local
    /// memory, bytes that were written are in the peer's memory.
    Done {
        /// The operation.
        token: u64,
    },
    /// An operation failed, or its deadline passed. It may have been executed wholly, in part, or not at all.
    Failed {
        /// The operation.
        token: u64,
        /// The other end.
        peer: Peer,
        /// [`Code::TimedOut`] at the deadline, otherwise the transport's error, mostly [`Code::Io`].
        code: Code,
        /// The reason, as text.
        why: &'a str,
    },
}

/// No thread waits, and none has called `wake` since the last wait.
const AWAKE: u32 = 0;
/// The waiter sleeps, or is about to.
const ASLEEP: u32 = 1;
/// A thread has called `wake`.
const WOKEN: u32 = 2;

/// Ends another thread's [`Endpoint::wait`]: the current one, or else the next. So the waiter sees what other threads
/// did before they called `wake`. While the waiter is awake, `wake` makes no system call.
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

    /// Wakes the waiter. One call is enough until the waiter has returned.
    pub fn wake(&self) {
        if self.inner.state.swap(WOKEN, Ordering::SeqCst) == ASLEEP {
            // Write fails only if the eventfd's counter is full, and then the eventfd is readable anyway.
            let _ = rustix::io::write(&self.inner.event, &1u64.to_ne_bytes());
        }
    }

    /// Marks the waiter as about to sleep. False if it was woken since it last slept.
    fn falls_asleep(&self) -> bool {
        let state = &self.inner.state;
        let asleep = state.compare_exchange(AWAKE, ASLEEP, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if !asleep {
            state.store(AWAKE, Ordering::SeqCst);
        }
        asleep
    }

    /// Marks the waiter as awake. The thread that woke it may still be about to write. Then the next sleep ends at
    /// once.
    fn is_awake(&self, readable: bool) {
        self.inner.state.store(AWAKE, Ordering::SeqCst);
        if readable {
            let _ = rustix::io::read(&self.inner.event, &mut [0; 8]);
        }
    }
}

/// A sleep that was begun. It ends when input may have arrived, when the waker is used, or when its time has passed.
#[derive(Debug)]
#[must_use = "who begins to sleep and does not is woken in vain"]
pub struct Sleep {
    waker: Waker,
    descriptor: Option<Arc<OwnedFd>>,
    timeout: Duration,
}

impl Sleep {
    /// The longest duration of the sleep.
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

/// One endpoint of a node: sends, receives, transfers. It works only inside its methods. Its user calls
/// [`Endpoint::progress`] as long as it expects events. Times are those of the endpoint's own clock
/// ([`Endpoint::now`]).
pub trait Endpoint: Send {
    /// The address that peers connect to: opaque, at most `forebay_wire::limits::ADDRESS_BYTES_MAX` bytes.
    fn address(&self) -> &[u8];

    /// The transport's name, for people, such as `tcp;ofi_rxm`.
    fn provider(&self) -> &str;

    /// The endpoint's limits.
    fn limits(&self) -> Limits;

    /// The time of its clock, which is monotonic and has an origin of its own.
    fn now(&self) -> Duration;

    /// Makes a peer of an address. Sends nothing. The same address gives the same peer.
    ///
    /// # Errors
    /// [`Code::Invalid`] for bytes that are no address of this transport, [`Code::NoResources`].
    fn connect(&mut self, address: &[u8]) -> Result<Peer, Code>;

    /// Forgets a peer and its connection, if any. Operations that wait for the peer fail.
    fn forget(&mut self, peer: Peer);

    /// Sends a message. Copies `bytes`. Messages to one peer arrive in order.
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

    /// Registers memory. Peers that have the returned key may access it as `access` allows. The region is kept until
    /// [`Endpoint::unregister`] and the end of all its transfers.
    ///
    /// # Errors
    /// [`Code::NoResources`], or the transport's error.
    fn register(&mut self, region: Arc<Region>, access: Access) -> Result<Registered, Code>;

    /// Ends the peers' access. Ignores unknown numbers.
    fn unregister(&mut self, local: Local);

    /// True for memory that transfers can use: it was registered, and neither unregistered nor replaced since.
    fn is_registered(&self, local: Local) -> bool;

    /// Starts a transfer; none whose deadline has passed: that is reported as `Failed`. If the peer refuses it (unknown key,
    /// out of bounds), it is reported as `Failed`, and other operations in progress with that peer may fail too.
    ///
    /// # Errors
    /// [`Code::Fault`] if the range is not in registered local memory, [`Code::Busy`], [`Code::Invalid`].
    fn transfer(
        &mut self,
        peer: Peer,
        transfer: &Transfer,
        token: u64,
        deadline: Duration,
    ) -> Result<(), Code>;

    /// Drives operations and passes events to `sink`. Returns the number of events. Never blocks.
    fn progress(&mut self, sink: &mut dyn FnMut(Event<'_>)) -> usize;

    /// A descriptor to poll for input, together with others, after [`Endpoint::may_sleep`] returned true. None if the
    /// endpoint can only be polled by `progress`.
    fn descriptor(&self) -> Option<&Arc<OwnedFd>>;

    /// To be called right before polling. True if the descriptor will become readable at any further input. If false,
    /// call `progress` first.
    fn may_sleep(&mut self) -> bool;

    /// When `progress` has work to do even without input: a deadline or a retry.
    fn next_timer(&self) -> Option<Duration>;

    /// Adds the address of a node. From the first one on, the endpoint may drop connections from hosts without a node.
    fn admit(&mut self, _address: &[u8]) {}

    /// Called when the user has received nothing for a while though it should have. The endpoint then checks whether it
    /// still receives, and repairs itself if not.
    fn suspect(&mut self) {}

    /// How often the endpoint closed and opened everything again, because it had stopped receiving.
    fn opened_again(&self) -> u64 {
        0
    }

    /// The waker that ends [`Endpoint::wait`].
    fn waker(&self) -> &Waker;

    /// Sleeps until input may have arrived, a timer is due, the waker is used, or `timeout` has passed. Without a
    /// descriptor it sleeps at most [`Endpoint::pause_without_descriptor`].
    fn wait(&mut self, timeout: Duration) {
        if let Some(sleep) = self.falls_asleep(timeout) {
            sleep.sleep();
        }
    }

    /// The longest sleep without a descriptor, as input then shows only in `progress`.
    fn pause_without_descriptor(&self) -> Duration {
        Duration::from_micros(50)
    }

    /// The first half of [`Endpoint::wait`]. The second half, [`Sleep::sleep`], does not need the endpoint. Another
    /// thread may use the endpoint meanwhile, if [`Endpoint::may_sleep`] returns true each time it stops. None if there
    /// is work to do.
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
