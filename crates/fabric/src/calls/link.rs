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
    /// A frame under the session's key has come: the peer is the node that it says, and this is no replay.
    pub(super) proven: bool,
    pub(super) heard: Duration,
    /// Requests that were handed to the user and not answered.
    pub(super) asked: BTreeSet<u64>,
}

/// A link that is up.
#[derive(Debug)]
pub(super) struct Up {
    pub(super) link: u64,
    pub(super) session: Box<Session>,
    /// When the last valid frame came.
    pub(super) heard: Duration,
    /// When something was last sent.
    pub(super) spoke: Duration,
}

/// A handshake that is not answered.
#[derive(Debug)]
pub(super) struct Asking {
    pub(super) initiator: Initiator,
    pub(super) again_at: Duration,
    pub(super) pause: Duration,
}

/// A node that this node sends requests to.
#[derive(Debug)]
pub(super) struct Neighbour {
    pub(super) address: Vec<u8>,
    pub(super) peer: Peer,
    pub(super) up: Option<Up>,
    pub(super) asking: Option<Asking>,
    /// Calls that are not answered.
    pub(super) calls: BTreeSet<u64>,
    /// Since when calls have waited for the link; None while it is up or no call waits.
    pub(super) missed: Option<Duration>,
    /// The user was told that it is unreachable, and not yet that it is up.
    pub(super) told_down: bool,
    /// It refused the handshake with a reason: not tried again before this time.
    pub(super) refused_until: Duration,
}

impl Neighbour {
    /// A handshake is under way.
    pub(super) fn is_asking(&self) -> bool {
        self.asking.is_some()
    }

    /// It is up, or should be.
    pub(super) fn is_wanted(&self) -> bool {
        self.up.is_some() || self.asking.is_some()
    }
}
