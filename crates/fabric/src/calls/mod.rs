//! Calls: requests to other nodes and their answers, on top of an endpoint.
//!
//! A *link* leads from the node that sends requests to the node that serves them. Two nodes that send requests to each
//! other have two links. A link begins with the handshake of crates/wire, which fails without the pool's secret. Every
//! later frame on it has a counter and a MAC. A call is sent on the link to its node and kept until it is answered. It
//! is sent again with the same (session, slot, sequence) if the link was replaced, or if no answer was received for
//! [`CallsSettings::resend`]. The serving node answers such a retry from its kept replies. A request that is still
//! being served is not delivered to the user again.
//!
//! ```text
//! link:  idle ─call─► handshake ─Welcome─► up ─silence, failed send─► handshake, old link still valid ─► up | down
//! call:  waiting for the link ─► sent ─► answered | deadline: TimedOut | node unreachable: EIO that names it
//! ```
//! No function but [`Calls::wait`] blocks, and [`Calls`] has no thread. The user calls [`Calls::progress`] and takes
//! events from [`Calls::next_event`], or starts a [`CallsThread`]. Faults survived: any loss, delay, duplication or
//! reordering of messages; peers that stop, die and restart. Tests: `tests/calls.rs`, `tests/simulation.rs`,
//! `tests/death.rs`.

mod call_event;
mod incoming;
mod link;
mod outgoing;
mod settings;
mod state;
mod thread;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use forebay_types::{Code, NodeId};
use forebay_wire::limits::BUNDLE_BYTES_MAX;
use forebay_wire::{join, Message, Secret, Stamp};

use crate::endpoint::{Endpoint, Event, Peer, Sleep, Transfer};
use crate::numbers::{Entropy, Numbers};
pub use call_event::{Body, CallEvent, CallId, Failed, Ticket};
pub use settings::{CallsSettings, Identity, Statistics};
use state::{OutgoingFrame, State, To};
pub use thread::CallsThread;

/// Endpoint tokens with this bit set belong to the user's transfers. Other tokens belong to messages and are node
/// numbers.
const TRANSFER: u64 = 1 << 63;
/// The tag of all messages. The kind of a frame is in the frame's header.
const TAG: u64 = 0;

/// Bytes of transfers that start before what was gathered leaves, at most. So the requests, or the answers, of several short
/// transfers leave in one message, and the peer does not wait for many transfers before it can begin.
const BEFORE_GATHERED_BYTES: usize = 256 << 10;

/// Frames that leave for one peer in one message.
#[derive(Debug)]
struct Bundle {
    peer: Peer,
    node: u16,
    bytes: Vec<u8>,
}

/// The calls of a node. See the module.
pub struct Calls {
    endpoint: Box<dyn Endpoint>,
    state: State,
    peers: BTreeMap<Vec<u8>, Peer>,
    outgoing: VecDeque<Bundle>,
    /// Outgoing frames wait for [`Calls::send_gathered`] or [`Calls::progress`].
    gathers: bool,
    /// Bytes of transfers that have started since a frame was gathered.
    passed_bytes: usize,
    /// Messages from hosts other than the nodes' may be dropped.
    only_nodes: bool,
}

impl std::fmt::Debug for Calls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Calls")
            .field("node", &self.state.identity.node)
            .field("calls", &self.state.calls.len())
            .finish_non_exhaustive()
    }
}

impl Calls {
    /// Makes the calls of a node over its endpoint.
    pub fn new(
        endpoint: Box<dyn Endpoint>,
        identity: Identity,
        secret: Secret,
        settings: CallsSettings,
    ) -> Calls {
        let mut entropy = match settings.seed {
            None => Entropy::System,
            Some(seed) => Entropy::Seeded(Numbers::new(seed)),
        };
        let data = settings.data.unwrap_or(0);
        let incarnation = u64::from(data) << 32 | entropy.u64() & u64::from(u32::MAX);
        let state = State {
            secret,
            identity,
            incarnation,
            expected: BTreeMap::new(),
            address: endpoint.address().to_vec(),
            now: endpoint.now(),
            settings,
            entropy,
            links: BTreeMap::new(),
            serving_nodes: BTreeMap::new(),
            incoming: BTreeMap::new(),
            proven_links: BTreeMap::new(),
            calls: BTreeMap::new(),
            next_call: 0,
            outgoing: VecDeque::new(),
            happened: VecDeque::new(),
            statistics: Statistics::default(),
            heard: endpoint.now(),
            timers_at: Duration::ZERO,
        };
        Calls {
            endpoint,
            state,
            peers: BTreeMap::new(),
            outgoing: VecDeque::new(),
            gathers: false,
            passed_bytes: 0,
            only_nodes: false,
        }
    }

    /// Adds a node with its address. A new address replaces the old one, for a node that has restarted elsewhere.
    ///
    /// # Errors
    /// [`Code::Invalid`] for bytes that are no address of the transport, and for this node's own number.
    pub fn add_node(&mut self, node: NodeId, address: &[u8]) -> Result<(), Code> {
        if node == self.state.identity.node {
            return Err(Code::Invalid);
        }
        let peer = self.endpoint.connect(address)?;
        self.peers.insert(address.to_vec(), peer);
        if self.only_nodes {
            self.endpoint.admit(address);
        }
        self.state.add_serving_node(node, address.to_vec(), peer);
        Ok(())
    }

    /// From now on the endpoint may drop connections of hosts that have no node. Nodes may still be added later.
    pub fn hear_only_nodes(&mut self) {
        self.only_nodes = true;
        for address in self.state.addresses() {
            self.endpoint.admit(&address);
        }
    }

    /// Sets the data ID that a node must have. A peer with that node's number and another data ID is refused.
    pub fn expect_data(&mut self, node: NodeId, data: u32) {
        self.state.expected.insert(node, data);
    }

    /// The data ID in an incarnation: [`CallsSettings::data`], or 0 for none.
    pub fn data_of(incarnation: u64) -> u32 {
        state::data_of(incarnation)
    }

    /// Removes a node, fails its calls and closes its link. For node numbers that are retired.
    pub fn remove_node(&mut self, node: NodeId) {
        if let Some(peer) = self.state.remove_serving_node(node) {
            self.flush();
            self.endpoint.forget(peer);
        }
    }

    /// Sends a request to a node. Its result is [`CallEvent::Answered`], at the latest at the deadline.
    ///
    /// # Errors
    /// [`Code::Invalid`] for an unknown node and for a message that is no request, [`Code::Busy`] when too many calls
    /// are in progress, in all or to this node, and the errors of [`Message::encode_to`].
    pub fn call(
        &mut self,
        node: NodeId,
        stamp: Stamp,
        message: &Message<'_>,
        deadline: Duration,
    ) -> Result<CallId, Code> {
        self.state.now = self.endpoint.now();
        let id = self.state.call(node, stamp, message, deadline)?;
        self.flush_unless_gathering();
        Ok(id)
    }

    /// True if a call to the node would not be refused because too many calls are in progress.
    pub fn has_room(&self, node: NodeId) -> bool {
        self.state.has_room(node)
    }

    /// Answers a request of [`CallEvent::Asked`]. Without a link from its sender the answer is dropped, and the sender
    /// sends the request again when it has a link.
    ///
    /// # Errors
    /// The errors of [`Message::encode_to`]: no answer was sent, and the request can still be answered with another
    /// message. [`Code::Invalid`] for a message that is no answer.
    pub fn answer(&mut self, ticket: &Ticket, message: &Message<'_>) -> Result<(), Code> {
        self.state.answer(ticket, message)?;
        self.flush_unless_gathering();
        Ok(())
    }

    /// From now on requests and answers wait for [`Calls::send_gathered`] or the next [`Calls::progress`], so that
    /// those for one node leave in one message. The user calls one of these soon.
    pub fn gather(&mut self) {
        self.gathers = true;
    }

    /// Sends what was gathered. From now on requests and answers are sent at once again.
    pub fn send_gathered(&mut self) {
        self.gathers = false;
        self.flush();
    }

    fn flush_unless_gathering(&mut self) {
        // A frame of half a message or more gains nothing by waiting.
        let is_long = |outgoing: &OutgoingFrame| outgoing.frame.len() >= BUNDLE_BYTES_MAX / 2;
        if !self.gathers || self.state.outgoing.back().is_some_and(is_long) {
            self.flush();
        }
    }

    /// Starts a transfer with the memory of the node that sent a request. Its end is reported as [`CallEvent::Moved`]. What
    /// was gathered before may leave after a short transfer; what is sent from now on does not overtake it.
    ///
    /// # Errors
    /// As [`Calls::transfer`]. [`Code::Stale`] if that incarnation of the node has no link: its memory's keys mean
    /// nothing to the next incarnation.
    pub fn transfer_for(
        &mut self,
        asker: &Ticket,
        transfer: &Transfer,
        token: u64,
        deadline: Duration,
    ) -> Result<(), Code> {
        let address = self.state.address_of_asker(asker).ok_or(Code::Stale)?;
        self.transfer_to(&address, transfer, token, deadline)
    }

    /// Starts a transfer with the memory of a node, whatever its incarnation. Its end is reported as
    /// [`CallEvent::Moved`].
    ///
    /// # Errors
    /// As [`Endpoint::transfer`]; [`Code::Invalid`] for a node without a link, or a token of 2^63 or more.
    pub fn transfer(
        &mut self,
        node: NodeId,
        transfer: &Transfer,
        token: u64,
        deadline: Duration,
    ) -> Result<(), Code> {
        let address = self.state.address_of(node).ok_or(Code::Invalid)?;
        self.transfer_to(&address, transfer, token, deadline)
    }

    fn transfer_to(
        &mut self,
        address: &[u8],
        transfer: &Transfer,
        token: u64,
        deadline: Duration,
    ) -> Result<(), Code> {
        if token >= TRANSFER {
            return Err(Code::Invalid);
        }
        let peer = self.peer(address)?;
        if self.has_to_send() {
            self.passed_bytes += transfer.bytes;
            if !self.gathers || self.passed_bytes > BEFORE_GATHERED_BYTES {
                self.flush();
            }
        }
        self.endpoint.transfer(peer, transfer, token | TRANSFER, deadline)
    }

    fn peer(&mut self, address: &[u8]) -> Result<Peer, Code> {
        if let Some(peer) = self.peers.get(address) {
            return Ok(*peer);
        }
        let peer = self.endpoint.connect(address)?;
        self.peers.insert(address.to_vec(), peer);
        Ok(peer)
    }

    /// Sends and receives what is possible and handles timers. Returns the number of events of the endpoint. Never
    /// blocks.
    pub fn progress(&mut self) -> usize {
        self.flush();
        let Calls { endpoint, state, .. } = self;
        state.now = endpoint.now();
        let events = endpoint.progress(&mut |event| match event {
            Event::Received { bytes, .. } => state.hear(bytes),
            Event::Done { token } if token & TRANSFER != 0 => {
                state.happened.push_back(CallEvent::Moved { token: token & !TRANSFER, outcome: Ok(()) });
            }
            Event::Done { .. } => {}
            Event::Failed { token, code, why, .. } if token & TRANSFER != 0 => {
                let outcome = Err(Failed { code, why: why.to_owned() });
                state.happened.push_back(CallEvent::Moved { token: token & !TRANSFER, outcome });
            }
            Event::Failed { token, why, .. } => state.send_failed(NodeId(token as u16), why),
        });
        if state.now >= state.timers_at {
            state.timers();
            if state.hears_nobody() {
                endpoint.suspect();
            }
        }
        self.flush();
        events
    }

    /// The next event.
    pub fn next_event(&mut self) -> Option<CallEvent> {
        self.state.happened.pop_front()
    }

    /// Sleeps until an event is possible, at most `timeout`. As [`Endpoint::wait`], with the timers of the calls.
    pub fn wait(&mut self, timeout: Duration) {
        if let Some(sleep) = self.falls_asleep(timeout) {
            sleep.sleep();
        }
    }

    /// The first half of [`Calls::wait`], as [`Endpoint::falls_asleep`]. The second half, [`Sleep::sleep`], does not
    /// need the calls. None if there is work to do.
    pub fn falls_asleep(&mut self, timeout: Duration) -> Option<Sleep> {
        if !self.state.happened.is_empty() || self.has_to_send() {
            return None;
        }
        let timer = self.state.timers_at.saturating_sub(self.endpoint.now());
        self.endpoint.falls_asleep(timeout.min(timer))
    }

    /// True if no event waits to be taken, no frame waits to be sent, and any further input will end a sleep that was
    /// begun.
    pub fn may_sleep(&mut self) -> bool {
        self.state.happened.is_empty() && !self.has_to_send() && self.endpoint.may_sleep()
    }

    fn has_to_send(&self) -> bool {
        !self.outgoing.is_empty() || !self.state.outgoing.is_empty()
    }

    /// When [`Calls::progress`] has work to do even if no message is received.
    pub fn next_timer(&self) -> Duration {
        let timer = self.state.timers_at;
        self.endpoint.next_timer().map_or(timer, |at| at.min(timer))
    }

    /// Sends a Goodbye on all links, so that no node waits for this one. Calls in progress get no answer.
    pub fn leave(&mut self, detail: &str) {
        self.state.leave(detail);
        self.flush();
        for _ in 0..100 {
            self.endpoint.progress(&mut |_| {});
        }
    }

    /// The endpoint: to register memory, to poll, to wake.
    pub fn endpoint(&mut self) -> &mut dyn Endpoint {
        &mut *self.endpoint
    }

    /// The time of the endpoint's clock. Deadlines are times of this clock.
    pub fn now(&self) -> Duration {
        self.endpoint.now()
    }

    /// Counters since the start.
    pub fn statistics(&self) -> Statistics {
        Statistics { opened_again: self.endpoint.opened_again(), ..self.state.statistics }
    }

    /// Passes outgoing frames to the endpoint. Frames for one peer share as few messages as possible.
    fn flush(&mut self) {
        self.passed_bytes = 0;
        if self.outgoing.is_empty() && self.state.outgoing.is_empty() {
            return;
        }
        while let Some(outgoing) = self.state.outgoing.pop_front() {
            let peer = match &outgoing.to {
                To::Peer(peer) => Ok(*peer),
                To::Address(address) => self.peer(address),
            };
            match peer {
                Ok(peer) => self.bundle(peer, outgoing),
                Err(code) => self.state.send_failed(NodeId(outgoing.node), code.name()),
            }
        }
        let deadline = self.endpoint.now() + self.state.settings.send_timeout;
        let mut busy = VecDeque::new();
        for bundle in std::mem::take(&mut self.outgoing) {
            let Bundle { peer, node, ref bytes } = bundle;
            match self.endpoint.send(peer, TAG, bytes, node.into(), deadline) {
                Ok(()) => {}
                // The peer's queue is full. This bundle waits, and bundles for other peers are sent.
                Err(Code::Busy) if busy.len() < self.state.settings.calls_max => busy.push_back(bundle),
                // As if the message were lost on the way: calls in it are sent again.
                Err(code) => self.state.send_failed(NodeId(node), code.name()),
            }
        }
        self.outgoing = busy;
    }

    /// Appends a frame to the message that leaves for its peer.
    fn bundle(&mut self, peer: Peer, OutgoingFrame { frame, node, .. }: OutgoingFrame) {
        if let Some(last) = self.outgoing.iter_mut().rev().find(|bundle| bundle.peer == peer) {
            // A failed message is attributed to one node. So frames of outgoing links to two nodes do not share one.
            // Frames of incoming links (node 0) can join any.
            if (last.node == node || last.node == 0 || node == 0) && join(&mut last.bytes, &frame) {
                last.node = last.node.max(node);
                return;
            }
        }
        self.outgoing.push_back(Bundle { peer, node, bytes: frame });
    }
}
