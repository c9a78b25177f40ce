//! Requests and answers between nodes, on top of an endpoint.
//!
//! A *link* goes from the node that asks to the node that serves; two nodes that ask one another have two. It begins
//! with the handshake of crates/wire, so that nobody without the pool's secret is heard, and everything on it is
//! sealed. A call is sent on the link to its node, kept until it is answered, and sent again with the same (session,
//! slot, sequence) when the link was made anew or no answer came for long: the serving node answers such a retry from
//! what it kept. A request that is being served is not handed out twice.
//!
//! ```text
//! link:  idle ─call─► asking ─Welcome─► up ─silence, failed send─► asking anew, the old one still heard ─► up | down
//! call:  waiting for the link ─► sent ─► answered | deadline: timed out | node unreachable: EIO, naming it
//! ```
//! Nothing here blocks or has a thread: the user calls [`Calls::progress`] and takes what happened from [`Calls::next_event`]; or
//! gives it to a [`CallsThread`]. Faults survived: any loss, delay, duplicate or reordering of messages; peers that stop, die
//! and come back. Tests: `tests/calls.rs`, `tests/simulation.rs`, `tests/death.rs`.

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
use state::{Leaving, State, To};
pub use thread::CallsThread;

/// Tokens of the endpoint with this bit are of user's transfers; without it they are of frames, by node.
const TRANSFER: u64 = 1 << 63;
/// The tag of all frames: what they are is for their headers to say.
const TAG: u64 = 0;

/// Frames on their way to the endpoint in one message.
#[derive(Debug)]
struct Bundle {
    peer: Peer,
    node: u16,
    bytes: Vec<u8>,
}

/// A node's calls. See the module.
pub struct Calls {
    endpoint: Box<dyn Endpoint>,
    state: State,
    peers: BTreeMap<Vec<u8>, Peer>,
    leaving: VecDeque<Bundle>,
    /// What is asked and answered leaves together, when the user says so.
    gathers: bool,
    /// Only the nodes' hosts are heard.
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
    /// The calls of a node over its endpoint.
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
            neighbours: BTreeMap::new(),
            incoming: BTreeMap::new(),
            askers: BTreeMap::new(),
            calls: BTreeMap::new(),
            next_call: 0,
            leaving: VecDeque::new(),
            happened: VecDeque::new(),
            statistics: Statistics::default(),
            heard: endpoint.now(),
            timers_at: Duration::ZERO,
        };
        Calls {
            endpoint,
            state,
            peers: BTreeMap::new(),
            leaving: VecDeque::new(),
            gathers: false,
            only_nodes: false,
        }
    }

    /// Says where a node is. A new address replaces an old one, as when a node has come back elsewhere.
    ///
    /// # Errors
    /// [`Code::Invalid`] for what is no address of the transport, and for this node itself.
    pub fn add_node(&mut self, node: NodeId, address: &[u8]) -> Result<(), Code> {
        if node == self.state.identity.node {
            return Err(Code::Invalid);
        }
        let peer = self.endpoint.connect(address)?;
        self.peers.insert(address.to_vec(), peer);
        if self.only_nodes {
            self.endpoint.admit(address);
        }
        self.state.add_neighbour(node, address.to_vec(), peer);
        Ok(())
    }

    /// From now on only hosts of nodes that were added, or are added later, need be heard.
    pub fn hear_only_nodes(&mut self) {
        self.only_nodes = true;
        for address in self.state.addresses() {
            self.endpoint.admit(&address);
        }
    }

    /// Says which data a node has: with others nobody is heard as that node any more.
    pub fn expect_data(&mut self, node: NodeId, data: u32) {
        self.state.expected.insert(node, data);
    }

    /// The data of who has this incarnation: [`CallsSettings::data`], or 0 for none.
    pub fn data_of(incarnation: u64) -> u32 {
        state::data_of(incarnation)
    }

    /// Forgets a node: its calls fail, its link is closed. For node numbers that are retired.
    pub fn remove_node(&mut self, node: NodeId) {
        if let Some(peer) = self.state.remove_neighbour(node) {
            self.flush();
            self.endpoint.forget(peer);
        }
    }

    /// Asks a node. The answer comes as [`CallEvent::Answered`], at the latest at the deadline.
    ///
    /// # Errors
    /// [`Code::Invalid`] for an unknown node and for a message that asks nothing, [`Code::Busy`] when too many calls are
    /// under way, in all or to this node, and what [`Message::encode_to`] refuses.
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

    /// True when a call to the node would not be refused for too many that are under way.
    pub fn has_room(&self, node: NodeId) -> bool {
        self.state.has_room(node)
    }

    /// Answers what [`CallEvent::Asked`]. An asker that is gone is not told; it asks again if it comes back.
    ///
    /// # Errors
    /// What [`Message::encode_to`] refuses: nothing was sent, answer something else. [`Code::Invalid`] for a message that
    /// answers nothing.
    pub fn answer(&mut self, ticket: &Ticket, message: &Message<'_>) -> Result<(), Code> {
        self.state.answer(ticket, message)?;
        self.flush_unless_gathering();
        Ok(())
    }

    /// From now on what is asked and answered waits for [`Calls::send_gathered`] or the next [`Calls::progress`], so
    /// that what goes to one node leaves in one message. Who uses it calls one of them soon.
    pub fn gather(&mut self) {
        self.gathers = true;
    }

    /// Sends what was gathered; from now on everything leaves at once again.
    pub fn send_gathered(&mut self) {
        self.gathers = false;
        self.flush();
    }

    fn flush_unless_gathering(&mut self) {
        // What fills a message by itself gains nothing by waiting.
        let is_long = |leaving: &Leaving| leaving.frame.len() >= BUNDLE_BYTES_MAX / 2;
        if !self.gathers || self.state.leaving.back().is_some_and(is_long) {
            self.flush();
        }
    }

    /// Starts a transfer with the memory of the caller. Its end comes as [`CallEvent::Moved`].
    ///
    /// # Errors
    /// As [`Calls::transfer`]; [`Code::Stale`] when that start of the node is gone: what it named is none of the next one's.
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

    /// Starts a transfer with the memory of a node, whichever start of it there is. Its end comes as
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
        // A message that was given before comes before.
        self.flush();
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

    /// Moves everything on; how many things the endpoint told. Never blocks.
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

    /// The next thing that happened.
    pub fn next_event(&mut self) -> Option<CallEvent> {
        self.state.happened.pop_front()
    }

    /// Sleeps until something may have happened, at most `timeout`: [`Endpoint::wait`], by this layer's timers too.
    pub fn wait(&mut self, timeout: Duration) {
        if let Some(sleep) = self.falls_asleep(timeout) {
            sleep.sleep();
        }
    }

    /// The first half of [`Calls::wait`], as [`Endpoint::falls_asleep`]: the second is done without the calls. None:
    /// there is something to do.
    pub fn falls_asleep(&mut self, timeout: Duration) -> Option<Sleep> {
        if !self.state.happened.is_empty() || self.has_to_send() {
            return None;
        }
        let timer = self.state.timers_at.saturating_sub(self.endpoint.now());
        self.endpoint.falls_asleep(timeout.min(timer))
    }

    /// True when nothing has happened that was not taken, and all that comes will end a sleep that has begun.
    pub fn may_sleep(&mut self) -> bool {
        self.state.happened.is_empty() && !self.has_to_send() && self.endpoint.may_sleep()
    }

    fn has_to_send(&self) -> bool {
        !self.leaving.is_empty() || !self.state.leaving.is_empty()
    }

    /// When something is to be done even if nothing comes.
    pub fn next_timer(&self) -> Duration {
        let timer = self.state.timers_at;
        self.endpoint.next_timer().map_or(timer, |at| at.min(timer))
    }

    /// Says goodbye to all, so that nobody waits for this node. What is under way is not answered.
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

    /// The endpoint's clock, in which deadlines are.
    pub fn now(&self) -> Duration {
        self.endpoint.now()
    }

    /// What happened so far, in numbers.
    pub fn statistics(&self) -> Statistics {
        Statistics { opened_again: self.endpoint.opened_again(), ..self.state.statistics }
    }

    /// Hands what is to leave to the endpoint: what is for one peer in as few messages as it fits in.
    fn flush(&mut self) {
        if self.leaving.is_empty() && self.state.leaving.is_empty() {
            return;
        }
        while let Some(leaving) = self.state.leaving.pop_front() {
            let peer = match &leaving.to {
                To::Peer(peer) => Ok(*peer),
                To::Address(address) => self.peer(address),
            };
            match peer {
                Ok(peer) => self.bundle(peer, leaving),
                Err(code) => self.state.send_failed(NodeId(leaving.node), code.name()),
            }
        }
        let deadline = self.endpoint.now() + self.state.settings.send_timeout;
        let mut busy = VecDeque::new();
        for bundle in std::mem::take(&mut self.leaving) {
            let Bundle { peer, node, ref bytes } = bundle;
            match self.endpoint.send(peer, TAG, bytes, node.into(), deadline) {
                Ok(()) => {}
                // Its peer takes no more for now: this one waits its turn, others go.
                Err(Code::Busy) if busy.len() < self.state.settings.calls_max => busy.push_back(bundle),
                // As if it were lost on the way: whoever wants an answer sends it again.
                Err(code) => self.state.send_failed(NodeId(node), code.name()),
            }
        }
        self.leaving = busy;
    }

    /// Puts a frame behind those that leave for its peer.
    fn bundle(&mut self, peer: Peer, Leaving { frame, node, .. }: Leaving) {
        if let Some(last) = self.leaving.iter_mut().rev().find(|bundle| bundle.peer == peer) {
            // What fails is told of one node: of its link, and answers on links of others.
            if (last.node == node || last.node == 0 || node == 0) && join(&mut last.bytes, &frame) {
                last.node = last.node.max(node);
                return;
            }
        }
        self.leaving.push_back(Bundle { peer, node, bytes: frame });
    }
}
