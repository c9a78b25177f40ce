//! Calls to other nodes that are under way.

use std::sync::mpsc::Sender;

use forebay_types::{Ino, NodeId};
use forebay_wire::Stamp;

use super::moves::Asking;

/// What another node says to this node's new data: why it refuses them.
pub(in crate::worker::network) type Introduced = Result<(), String>;

/// What a call that is under way is for.
#[derive(Debug)]
pub(super) enum Flight {
    Forward(Stamp),
    /// Data move for a client.
    Move(Asking),
    Step(Stamp),
    /// Backing files of these.
    Removals(Vec<Ino>),
    EndSession,
    /// Whether these processes are there.
    Review(Vec<u64>),
    /// Where to say whether this node's data are refused.
    Introduction(NodeId, Option<Sender<Introduced>>),
    Targets(NodeId),
    /// A lease from this node, asked for at this time.
    Lease(NodeId, u64),
    /// A revocation, by its number.
    Revocation(u64),
    /// A grant of buffers, by its number.
    EagerBuffers(u32),
}
