//! What the layer tells its user.

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
    /// For the log: with the node's number where a node is the cause.
    pub why: String,
}

/// To answer a request by.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Ticket {
    /// Who asks.
    pub node: NodeId,
    /// Which start of it.
    pub incarnation: u64,
    /// The asker's number of the request.
    pub request: u64,
    /// By which a retry is known.
    pub stamp: Stamp,
}

/// A message, decoded once already.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Body {
    kind: Kind,
    bytes: Vec<u8>,
}

impl Body {
    pub(super) fn new(kind: Kind, bytes: &[u8]) -> Body {
        Body { kind, bytes: bytes.to_vec() }
    }

    /// The encoded message, as it came.
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

/// Something that happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CallEvent {
    /// A link to a node is up, for the first time or again.
    Up {
        /// The node.
        node: NodeId,
        /// Which start of it: another one than before means that it lost what it had in memory.
        incarnation: u64,
        /// What it gives.
        capacity_bytes: u64,
        /// Its clock less ours, in microseconds, when its welcome came.
        clock_ahead_us: i64,
    },
    /// A node is unreachable, or refused us: its calls have failed.
    Down {
        /// The node.
        node: NodeId,
        /// Why, naming it.
        failed: Failed,
    },
    /// A node that asks has made a link.
    Joined {
        /// The node.
        node: NodeId,
        /// Which start of it.
        incarnation: u64,
        /// What it gives.
        capacity_bytes: u64,
        /// Where it is.
        address: Vec<u8>,
    },
    /// It has left, or has been silent for too long, or has started anew.
    Left {
        /// The node.
        node: NodeId,
        /// Which start of it.
        incarnation: u64,
        /// Why.
        why: String,
    },
    /// A node asks.
    Asked {
        /// To answer by.
        ticket: Ticket,
        /// What.
        body: Body,
    },
    /// A call has ended.
    Answered {
        /// The call.
        call: CallId,
        /// Who was asked.
        node: NodeId,
        /// The answer. [`Message::Failure`] comes as a failure.
        outcome: Result<Body, Failed>,
        /// It was sent at least once; if not, nobody has done anything about it.
        sent: bool,
    },
    /// A transfer has ended.
    Moved {
        /// As given to [`super::Calls::transfer`].
        token: u64,
        /// How.
        outcome: Result<(), Failed>,
    },
}
