//! Messages of other threads to the shard thread.

use std::os::fd::OwnedFd;
use std::sync::mpsc::Sender;

use forebay_fabric::Ticket;
use forebay_types::{Code, Ino, NodeId, PieceId, Request, Result, SegmentId};
use forebay_wire::Stamp;
use serde_json::Value;

use super::session::Session;

/// A message to the shard thread. After each send, except that of `Attached`, the sender rings the doorbell.
#[derive(Debug)]
pub(super) enum Message {
    /// A process has attached, and may send requests already.
    Attached(Box<Session>),
    /// A process has ended.
    Ended(u64),
    /// These backing files were unlinked.
    Swept(Vec<Ino>),
    /// All that the sweeper got before this mark is removed.
    SweptUpTo(u64),
    /// A request for the data of `forebay status`.
    Status(Sender<Value>),
    /// Commit, and give the commit to the thread that copies it.
    Snapshot(Sender<super::snapshot_hold::Answer>),
    /// Check shard and target.
    Check(Sender<Result<Value>>),
    /// A session serves the pool's mount: the kernel behind the device is notified of changes from now on.
    Mounted(u64, OwnedFd, Sender<bool>),
    /// Is this session known?
    Known(u64, Sender<bool>),
    /// A request of a process of another node.
    Asked {
        /// For the answer.
        ticket: Ticket,
        /// The encoded request.
        message: Vec<u8>,
    },
    /// The answer of another node.
    Answered {
        /// The client's session, slot and sequence.
        stamp: Stamp,
        /// The encoded reply.
        reply: Vec<u8>,
    },
    /// Another node's inodes are gone: their backing files on this node are to be removed.
    RemoveBackings {
        /// For the answer.
        ticket: Ticket,
        /// The encoded request.
        message: Vec<u8>,
    },
    /// Find out which processes of another node, or of all nodes, have ended without a message about it.
    ReviewSessions(Option<NodeId>),
    /// Another node asks which of these processes live.
    AreThere {
        /// For the answer.
        ticket: Ticket,
        /// Their sessions.
        sessions: Vec<u64>,
    },
    /// Another node asks which of these segments of this node's volumes still exist.
    AreSegments {
        /// For the answer.
        ticket: Ticket,
        /// Their numbers.
        segments: Vec<SegmentId>,
    },
    /// These segments, of which this node has pieces, are gone, as their home says.
    SegmentsGone(Vec<SegmentId>),
    /// A process of this other node has ended.
    EndedElsewhere(NodeId, u64),
    /// The answer of another node to the cross-node step in this slot, or its failure.
    Stepped(usize, std::result::Result<Vec<u8>, Code>),
    /// A file that is about to be written for another node is to be marked dirty, as the mover may have copied it.
    Mark(Ino, Sender<std::result::Result<(), Code>>),
    /// A node can be reached again.
    Reached(NodeId),
    /// The node of the first number has lost its data, and has the second number now.
    Renumbered(NodeId, NodeId),
    /// Another node has another data ID for this node's number; the text of its refusal.
    Unwelcome(String),
    /// Another node's daemon renews its lease, or sends a revocation.
    LeaseAsked {
        /// For the answer.
        ticket: Ticket,
        /// The encoded request.
        message: Vec<u8>,
    },
    /// A lease from this node was renewed (its term and end), or could not be.
    LeaseRenewed(NodeId, Option<(u64, u64)>),
    /// The revocation of this number was answered, or could not be delivered.
    Revoked(u64, bool),
    /// The helper of volumes has done something.
    Volumes(super::volumes::Done),
    /// A process opens a piece of a volume, to write to it if true, as this user and group.
    OpenPiece(PieceId, bool, (u32, u32), Sender<std::result::Result<super::volumes::Opened, Code>>),
    /// A command of the watch thread.
    Watch(super::watches::Command),
    /// Stop serving.
    Stop,
}

impl Message {
    /// True for messages of the network thread that are handled in a short time.
    pub(super) fn is_of_network(&self) -> bool {
        // It searches the whole shard.
        let is_long = |message: &[u8]| matches!(Request::decode(message), Ok((_, Request::LeadsTo { .. })));
        matches!(self, Message::Asked { message, .. } if !is_long(message))
            || matches!(
                self,
                Message::Answered { .. }
                    | Message::RemoveBackings { .. }
                    | Message::ReviewSessions(_)
                    | Message::AreThere { .. }
                    | Message::AreSegments { .. }
                    | Message::SegmentsGone(_)
                    | Message::Stepped(..)
                    | Message::Mark(..)
                    | Message::Reached(_)
                    | Message::Renumbered(..)
                    | Message::LeaseAsked { .. }
                    | Message::LeaseRenewed(..)
                    | Message::Revoked(..)
            )
    }
}
