//! The events that this layer reports to its user.

use forebay_types::{Code, NodeId};
use forebay_wire::{Kind, Message, Stamp};

/// A call, by its number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CallId(pub u64);

/// Why something failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failed {
    /// The code for the program.
    pub code: Code,
    /// The reason for the log. It has the node's number if a node is the cause.
    pub why: String,
}

/// Identifies a request so that it can be answered.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Ticket {
    /// The node that sent the request.
    pub node: NodeId,
    /// The incarnation of that node.
    pub incarnation: u64,
    /// The sender's number of the request.
    pub request: u64,
    /// The request's stamp, which a retry has too.
    pub stamp: Stamp,
}

/// A message that was decoded successfully when it was received.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Body {
    kind: Kind,
    bytes: Vec<u8>,
}

impl Body {
    pub(super) fn new(kind: Kind, bytes: &[u8]) -> Body {
        Body { kind, bytes: bytes.to_vec() }
    }

    /// The encoded message, as it was received.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The message.
    pub fn message(&self) -> Message<'_> {
        match Message::decode(self.kind, &self.bytes) {
            Ok(message) => message,
            Err(code) => unreachable!("it was decoded when it came: {code}"),
        }
    }
}

/// An event.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CallEvent {
    /// A link to a node is up, for the first time or again.
    Up {
        /// The node.
        node: NodeId,
        /// The node's incarnation. If it changed, the node has lost what it had in memory.
        incarnation: u64,
        /// Capacity of the node's targets.
        capacity_bytes: u64,
        /// The node's clock minus this node's clock, in microseconds, when its Welcome was received.
        clock_ahead_us: i64,
    },
    /// A node is unreachable or refused this node. Its calls have failed.
    Down {
        /// The node.
        node: NodeId,
        /// The reason, with the node's number.
        failed: Failed,
    },
    /// A node that sends requests has made a link: [`CallEvent::Left`] reports its end. Or a node answered at the
    /// address of another one: then there is no link, and no `Left` follows.
    Joined {
        /// The node.
        node: NodeId,
        /// The node's incarnation.
        incarnation: u64,
        /// Capacity of the node's targets.
        capacity_bytes: u64,
        /// The node's address.
        address: Vec<u8>,
    },
    /// A node that sent requests has left, was silent for too long, or has restarted.
    Left {
        /// The node.
        node: NodeId,
        /// The node's incarnation.
        incarnation: u64,
        /// The reason.
        why: String,
    },
    /// A node has sent a request.
    Asked {
        /// The argument for [`super::Calls::answer`].
        ticket: Ticket,
        /// The request.
        body: Body,
    },
    /// A call has ended.
    Answered {
        /// The call.
        call: CallId,
        /// The node that the request was sent to.
        node: NodeId,
        /// The answer. A [`Message::Failure`] is reported as `Err`.
        outcome: Result<Body, Failed>,
        /// The request was sent at least once. If not, no node has executed any of it.
        sent: bool,
    },
    /// A transfer has ended.
    Moved {
        /// As given to [`super::Calls::transfer`].
        token: u64,
        /// The result.
        outcome: Result<(), Failed>,
    },
}
