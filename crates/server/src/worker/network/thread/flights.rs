//! Calls to other nodes in flight.

use std::sync::mpsc::Sender;

use forebay_types::{Ino, NodeId, SegmentId};
use forebay_wire::Stamp;

use super::moves::Asking;

/// Another node's reply to this node's new data: why it refuses them.
pub(in crate::worker::network) type Introduced = Result<(), String>;

/// The purpose of a call in flight.
#[derive(Debug)]
pub(super) enum Flight {
    Forward(Stamp),
    /// A client's data request.
    Move(Asking),
    Step(Stamp),
    /// The removal of backing files of these inodes.
    Removals(Vec<Ino>),
    EndSession,
    /// The question which of these processes live.
    Review(Vec<u64>),
    /// The question which of these segments exist.
    Segments(Vec<SegmentId>),
    /// The introduction of new data to a node, and the receiver of the result.
    Introduction(NodeId, Option<Sender<Introduced>>),
    Targets(NodeId),
    /// A lease from this node, requested at this time.
    Lease(NodeId, u64),
    /// A revocation, by its number.
    Revocation(u64),
    /// A grant of eager buffers, by its number.
    EagerBuffers(u32),
}
