//! Data that the network moves, as both sides keep them: buffers of this node's processes, requests under way, and what
//! other nodes ask for. What is done with them is in `bulk_transfer.rs`.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use forebay_fabric::{Region, Registered, Ticket};
use forebay_types::{BackingId, MoveKind, NodeId, Reply};
use forebay_wire::{DataLocation, Memory, Message as Wire, Stamp};

use crate::worker::network::bounce::{Bounce, DataBuffer};
use crate::worker::network::eager_buffers::{GrantedBuffers, RemoteBuffers, UsedBuffer};
use crate::worker::network::jobs::Moving;

/// A request for a client's data that is under way.
#[derive(Debug)]
pub(super) struct Asking {
    pub(super) node: NodeId,
    pub(super) stamp: Stamp,
    /// By which the data move.
    pub(super) buffer: u64,
    pub(super) canary: Option<Canary>,
    /// The eager buffer that the data were written to.
    pub(super) eager: Option<UsedBuffer>,
    /// The first answer came without its data.
    pub(super) again: bool,
}

/// What stands where the last byte of a read is to come, until it has come.
#[derive(Debug)]
pub(super) struct Canary {
    pub(super) byte: u8,
    /// Where in the buffer.
    pub(super) at: usize,
    /// The read, to be asked for again.
    pub(super) id: BackingId,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) to: Memory,
    pub(super) deadline: Duration,
}

impl Canary {
    /// The byte of the n-th: neighbours have different ones, and none is 0, of which files are full.
    pub(super) fn byte(n: u64) -> u8 {
        (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56).max(1) as u8
    }

    /// True when an answer says that all was read, and the last byte may not have come.
    pub(super) fn is_there(&self, reply: &[u8], memory: &Region) -> bool {
        let mut last = [0];
        Reply::decode(reply) == Ok(Reply::Count(self.bytes))
            && (memory.read_at(self.at, &mut last).is_err() || last[0] == self.byte)
    }

    pub(super) fn asks(&self) -> Wire<'_> {
        Wire::ReadStripe {
            id: self.id,
            offset: self.offset,
            bytes: self.bytes,
            to: DataLocation::Remote(self.to),
        }
    }
}

/// A process's buffer.
#[derive(Debug)]
pub(super) struct Buffer {
    pub(super) session: u64,
    pub(super) memory: Arc<Region>,
    pub(super) registered: Registered,
    /// Requests under way that name it.
    pub(super) flights: usize,
    /// It is not to be used any more.
    pub(super) retired: bool,
    /// Whether a request was served was not told.
    pub(super) in_doubt: bool,
    /// Its process is over.
    pub(super) orphaned: bool,
}

/// Both sides' state.
#[derive(Debug, Default)]
pub(super) struct Moves {
    /// Buffers of this node's processes, by their numbers.
    pub(super) buffers: HashMap<u64, Buffer>,
    /// Memory that a peer may write yet: until when, and whose process's it was.
    pub(super) quarantined: Vec<(Duration, u64, Arc<Region>)>,
    /// This node's own, once another node has asked for data.
    pub(super) bounce: Option<Bounce>,
    /// What waits for a piece of it.
    pub(super) waiting: VecDeque<Asked>,
    /// What waits is being begun.
    pub(super) beginning: bool,
    /// Transfers under way.
    pub(super) under_way: HashMap<u64, Moving>,
    pub(super) token: u64,
    /// Reads that were canaries.
    pub(super) canaries: u64,
    /// Places of this node that others write.
    pub(super) granted: GrantedBuffers,
    /// Places of others that this node writes.
    pub(super) taken: RemoteBuffers,
    /// Transfers into those that are under way.
    pub(super) eager_transfers: HashMap<u64, UsedBuffer>,
}

/// A request for data.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) ticket: Ticket,
    pub(super) id: BackingId,
    pub(super) kind: MoveKind,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) memory: Memory,
    /// By when it is to have begun: who asks waits no longer, and may have given the memory to something else.
    pub(super) until: Duration,
}

impl Asked {
    pub(super) fn into_moving(self, room: DataBuffer) -> Moving {
        let Asked { ticket, id, kind, offset, bytes, memory, until } = self;
        Moving { ticket, id, kind, offset, bytes: bytes as usize, memory, room, until }
    }
}

impl Moves {
    /// True while data are moved, or are about to be.
    pub(super) fn are_under_way(&self) -> bool {
        !self.under_way.is_empty() || !self.waiting.is_empty() || self.buffers.values().any(|b| b.flights > 0)
    }
}
