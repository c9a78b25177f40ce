//! Links: incoming ones, of nodes that send requests here, and outgoing ones, to nodes that serve requests of this
//! node.

use std::collections::BTreeSet;
use std::time::Duration;

use forebay_wire::{Hello, Initiator, Session};

use crate::endpoint::Peer;

/// A link from another node.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) hello: Hello,
    pub(super) session: Box<Session>,
    /// A frame under the session's key was received, so the peer is the node of its Hello, and the Hello is no replay.
    pub(super) proven: bool,
    pub(super) heard: Duration,
    /// Requests that were delivered to the user and are not answered.
    pub(super) asked: BTreeSet<u64>,
}

/// A link that is up.
#[derive(Debug)]
pub(super) struct Up {
    pub(super) link: u64,
    pub(super) session: Box<Session>,
    /// When the last valid frame was received.
    pub(super) heard: Duration,
    /// When a frame was last sent.
    pub(super) spoke: Duration,
}

/// A handshake without an answer yet.
#[derive(Debug)]
pub(super) struct Asking {
    pub(super) initiator: Initiator,
    pub(super) again_at: Duration,
    pub(super) pause: Duration,
}

/// A node that this node sends requests to.
#[derive(Debug)]
pub(super) struct ServingNode {
    pub(super) address: Vec<u8>,
    pub(super) peer: Peer,
    pub(super) up: Option<Up>,
    pub(super) asking: Option<Asking>,
    /// Calls without an answer yet.
    pub(super) calls: BTreeSet<u64>,
    /// Since when calls have waited for the link. None while the link is up or no call waits.
    pub(super) waiting_since: Option<Duration>,
    /// [`CallEvent::Down`](super::CallEvent::Down) was reported, and no [`CallEvent::Up`](super::CallEvent::Up) since.
    pub(super) reported_down: bool,
    /// The node refused the handshake with a reason. No handshake is started before this time.
    pub(super) refused_until: Duration,
}

impl ServingNode {
    /// True while a handshake is in progress.
    pub(super) fn is_asking(&self) -> bool {
        self.asking.is_some()
    }

    /// True while the link is up or is being made.
    pub(super) fn is_wanted(&self) -> bool {
        self.up.is_some() || self.asking.is_some()
    }
}
