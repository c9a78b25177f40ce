//! What other threads tell the shard thread.

use std::os::fd::OwnedFd;
use std::sync::mpsc::Sender;

use forebay_fabric::Ticket;
use forebay_types::{Code, Ino, NodeId, Request, Result};
use forebay_wire::Stamp;
use serde_json::Value;

use super::session::Session;

/// What other threads tell the shard thread; each send but that of `Attached` is followed by a ring of the doorbell.
#[derive(Debug)]
pub(super) enum Message {
    /// A process attached, and may ask already.
    Attached(Box<Session>),
    /// A process is gone.
    Ended(u64),
    /// These backing files were unlinked.
    Swept(Vec<Ino>),
    /// What the sweeper was given before this mark was removed.
    SweptUpTo(u64),
    /// Facts for `status`.
    Status(Sender<Value>),
    /// Check shard and target.
    Check(Sender<Result<Value>>),
    /// A session serves the pool's mount: the kernel behind the device is told of changes from now on.
    Mounted(u64, OwnedFd, Sender<bool>),
    /// Is this session known?
    Known(u64, Sender<bool>),
    /// A process of another node asks.
    Asked {
        /// To answer by.
        ticket: Ticket,
        /// The encoded request.
        message: Vec<u8>,
    },
    /// What was asked of another node is answered.
    Answered {
        /// The client's session, slot and sequence.
        stamp: Stamp,
        /// The encoded reply.
        reply: Vec<u8>,
    },
    /// Another node's inodes are gone: backing files of them here are to go.
    RemoveBackings {
        /// To answer by.
        ticket: Ticket,
        /// The encoded request.
        message: Vec<u8>,
    },
    /// Find out which processes of other nodes, or of this one, are gone without a word.
    ReviewSessions(Option<NodeId>),
    /// Another node asks which of these processes are there.
    AreThere {
        /// To answer by.
        ticket: Ticket,
        /// Their sessions.
        sessions: Vec<u64>,
    },
    /// A process of this other node is gone.
    EndedElsewhere(NodeId, u64),
    /// Another node has answered what this one asked in this slot for a change over several, or will not.
    Stepped(usize, std::result::Result<Vec<u8>, Code>),
    /// A node is reached again.
    Reached(NodeId),
    /// The node of this number has lost its data, and has the other one now.
    Renumbered(NodeId, NodeId),
    /// Another node knows other data of this node than it has, and this is what it says.
    Unwelcome(String),
    /// Another node's daemon asks for a lease, or takes back what it told.
    LeaseAsked {
        /// To answer by.
        ticket: Ticket,
        /// The encoded request.
        message: Vec<u8>,
    },
    /// A lease from this node was renewed, or could not be: its term and its end.
    LeaseRenewed(NodeId, Option<(u64, u64)>),
    /// The revocation of this number was answered, or could not be brought.
    Revoked(u64, bool),
    /// The watch thread asks for something.
    Watch(super::watches::Command),
    /// Stop serving.
    Stop,
}

impl Message {
    /// Comes from the network thread, and is heard without anything that takes long.
    pub(super) fn is_of_network(&self) -> bool {
        // Looks through the whole shard.
        let is_long = |message: &[u8]| matches!(Request::decode(message), Ok((_, Request::LeadsTo { .. })));
        matches!(self, Message::Asked { message, .. } if !is_long(message))
            || matches!(
                self,
                Message::Answered { .. }
                    | Message::RemoveBackings { .. }
                    | Message::ReviewSessions(_)
                    | Message::AreThere { .. }
                    | Message::Stepped(..)
                    | Message::Reached(_)
                    | Message::Renumbered(..)
                    | Message::LeaseAsked { .. }
                    | Message::LeaseRenewed(..)
                    | Message::Revoked(..)
            )
    }
}
