//! The links and calls of a node, without its endpoint. So the endpoint's events can be handled while the endpoint is
//! borrowed.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use forebay_types::{Code, NodeId};
use forebay_wire::{Frames, Header, Hello, Kind, Message, Secret, Stamp};

use super::call_event::{CallEvent, Ticket};
use super::link::{Incoming, ServingNode};
use super::settings::{CallsSettings, Identity, Statistics};
use crate::endpoint::Peer;
use crate::numbers::Entropy;

/// The destination of a frame.
#[derive(Debug)]
pub(super) enum To {
    Address(Vec<u8>),
    Peer(Peer),
}

/// A frame that waits to be sent.
#[derive(Debug)]
pub(super) struct OutgoingFrame {
    pub(super) to: To,
    pub(super) frame: Vec<u8>,
    /// The node of an outgoing link, to which a failed send is attributed. 0 for an incoming link.
    pub(super) node: u16,
}

/// The meaning of a link's number in received frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    /// A link from here to this node.
    Out(NodeId),
    /// A link from another node to here.
    In,
}

/// A call without an answer yet.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) node: NodeId,
    pub(super) kind: Kind,
    pub(super) stamp: Stamp,
    pub(super) body: Vec<u8>,
    pub(super) deadline: Duration,
    /// When the call was last sent, and on which link. None if it waits for the link.
    pub(super) sent: Option<(Duration, u64)>,
    /// The call was sent at least once.
    pub(super) was_sent: bool,
}

/// Everything but the endpoint.
pub(super) struct State {
    pub(super) secret: Secret,
    pub(super) identity: Identity,
    pub(super) settings: CallsSettings,
    pub(super) entropy: Entropy,
    pub(super) incarnation: u64,
    /// The data ID that each node must have ([`Calls::expect_data`](super::Calls::expect_data)).
    pub(super) expected: BTreeMap<NodeId, u32>,
    pub(super) address: Vec<u8>,
    pub(super) now: Duration,
    pub(super) links: BTreeMap<u64, Role>,
    pub(super) serving_nodes: BTreeMap<NodeId, ServingNode>,
    pub(super) incoming: BTreeMap<u64, Incoming>,
    /// The proven link of each incarnation of each node that sends requests.
    pub(super) proven_links: BTreeMap<(NodeId, u64), u64>,
    pub(super) calls: BTreeMap<u64, Call>,
    pub(super) next_call: u64,
    pub(super) outgoing: VecDeque<OutgoingFrame>,
    pub(super) happened: VecDeque<CallEvent>,
    pub(super) statistics: Statistics,
    /// When the last valid frame was received, from any node.
    pub(super) heard: Duration,
    pub(super) timers_at: Duration,
}

/// The data ID in an incarnation.
pub(super) fn data_of(incarnation: u64) -> u32 {
    (incarnation >> 32) as u32
}

impl State {
    /// The Hello of a link whose number here is `link`.
    pub(super) fn hello(&mut self, link: u64) -> Hello {
        let mut nonce = [0; 32];
        self.entropy.fill(&mut nonce);
        Hello {
            protocols: self.settings.protocols,
            pool: self.identity.pool,
            node: self.identity.node,
            incarnation: self.incarnation,
            link,
            capacity_bytes: self.identity.capacity_bytes,
            clock_us: self.clock_us(),
            nonce,
            address: self.address.clone(),
        }
    }

    /// Microseconds since 1970. In a simulation, since its start.
    pub(super) fn clock_us(&self) -> u64 {
        if self.settings.seed.is_some() {
            return self.now.as_micros() as u64;
        }
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let now_us = now.map_or(0, |now| now.as_micros() as u64);
        now_us.saturating_add_signed(self.settings.clock_ahead_us)
    }

    /// If a peer has another data ID than the node whose number it uses: the reason to refuse it.
    pub(super) fn lacks_its_data(&self, peer: &Hello) -> Option<String> {
        let expected = self.expected.get(&peer.node)?;
        (data_of(peer.incarnation) != *expected)
            .then(|| format!("node {} restarted without its data; give it a new node number", peer.node))
    }

    /// A link's number. It cannot be guessed, so that frames of other senders are dropped before their MAC is computed.
    pub(super) fn new_link(&mut self) -> u64 {
        loop {
            let link = self.entropy.u64();
            if link != 0 && !self.links.contains_key(&link) {
                return link;
            }
        }
    }

    /// Handles a message, which any sender may have sent.
    pub(super) fn hear(&mut self, message: &[u8]) {
        self.statistics.messages_in += 1;
        for frame in Frames::of(message) {
            self.statistics.frames_in += 1;
            match frame.and_then(|frame| self.hear_frame(frame)) {
                Ok(()) => self.heard = self.now,
                Err(Code::AccessDenied) => self.statistics.forged += 1,
                Err(Code::Stale) => self.statistics.replayed += 1,
                Err(_) => self.statistics.unusable += 1,
            }
        }
    }

    /// True if no valid frame was received for [`CallsSettings::quiet`], although there are nodes with links from or to
    /// here.
    pub(super) fn hears_nobody(&self) -> bool {
        let expected =
            self.serving_nodes.values().any(ServingNode::is_wanted) || !self.proven_links.is_empty();
        expected && self.now >= self.heard + self.settings.quiet
    }

    pub(super) fn hear_frame(&mut self, frame: &[u8]) -> Result<(), Code> {
        let header = Header::peek(frame)?;
        match header.kind {
            Kind::Hello => self.hear_hello(frame),
            Kind::Welcome | Kind::Refuse => self.hear_answer_to_hello(frame),
            _ => match self.links.get(&header.link) {
                Some(Role::Out(node)) => self.hear_from_served(*node, header.link, frame),
                Some(Role::In) => self.hear_from_asker(header.link, frame),
                None => Err(Code::UnknownSession),
            },
        }
    }

    /// The address of the node that sent a request, while it has a link.
    pub(super) fn address_of_asker(&self, asker: &Ticket) -> Option<Vec<u8>> {
        let link = self.proven_links.get(&(asker.node, asker.incarnation))?;
        self.incoming.get(link).map(|i| i.hello.address.clone())
    }

    /// The address of a node with a link in either direction.
    pub(super) fn address_of(&self, node: NodeId) -> Option<Vec<u8>> {
        if let Some(serving_node) = self.serving_nodes.get(&node) {
            return Some(serving_node.address.clone());
        }
        let (_, link) = self.proven_links.range((node, 0)..=(node, u64::MAX)).next_back()?;
        self.incoming.get(link).map(|i| i.hello.address.clone())
    }

    /// Handles all timers that are due.
    pub(super) fn timers(&mut self) {
        self.outgoing_timers();
        self.incoming_timers();
        self.call_timers();
        // Without calls only heartbeats need timers.
        let busy = !self.calls.is_empty() || self.serving_nodes.values().any(ServingNode::is_asking);
        self.timers_at = self.now + if busy { self.settings.tick() } else { self.settings.heartbeat / 2 };
    }

    /// Has timers checked soon, for a new call or link.
    pub(super) fn soon(&mut self) {
        self.timers_at = self.timers_at.min(self.now + self.settings.tick());
    }

    pub(super) fn leave(&mut self, detail: &str) {
        let detail = &detail.as_bytes()[..detail.len().min(forebay_wire::limits::DETAIL_BYTES_MAX)];
        let nodes: Vec<NodeId> = self.serving_nodes.keys().copied().collect();
        for node in nodes {
            self.send_to_served(node, 0, Stamp::default(), &Message::Goodbye { detail });
        }
        let links: Vec<u64> = self.incoming.iter().filter(|(_, i)| i.proven).map(|(link, _)| *link).collect();
        for link in links {
            self.send_to_asker(link, 0, Stamp::default(), &Message::Goodbye { detail });
        }
    }
}
