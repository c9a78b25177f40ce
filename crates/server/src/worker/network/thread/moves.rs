//! The state of data transfers: buffers of this node's processes, requests in flight, and requests of other nodes.
//! Their protocol is in `bulk_transfer.rs`.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::mpsc::Sender;
use std::sync::Arc;
use std::time::Duration;

use forebay_fabric::{Region, Ticket};
use forebay_types::{BackingId, Code, MoveKind, NodeId, Reply};
use forebay_wire::{DataLocation, Memory, Message as Wire, Stamp};

use super::registered_ranges::{RegisteredRanges, Unregistering};
use crate::worker::network::bounce::{Bounce, DataBuffer};
use crate::worker::network::direct_pieces::DirectPieces;
use crate::worker::network::eager_buffers::{GrantedBuffers, RemoteBuffers, UsedBuffer};
use crate::worker::network::jobs::Moving;
use crate::worker::network::unmapping::{Freeing, Unmapping};

/// A client's data request in flight.
#[derive(Debug)]
pub(super) struct Asking {
    pub(super) node: NodeId,
    pub(super) stamp: Stamp,
    /// The client's buffer.
    pub(super) buffer: u64,
    pub(super) canary: Option<Canary>,
    /// The eager buffer that the data were written to.
    pub(super) eager: Option<UsedBuffer>,
    /// The first reply arrived without its data, and the request was repeated.
    pub(super) again: bool,
    /// Data are written into the buffer.
    pub(super) reads: bool,
    /// Its range of the buffer.
    pub(super) range: Range<usize>,
}

/// The canary of a read: the value at the place of its last byte until the data have arrived.
#[derive(Debug)]
pub(super) struct Canary {
    pub(super) byte: u8,
    /// Its offset in the buffer.
    pub(super) at: usize,
    /// The read, to be repeated.
    pub(super) id: BackingId,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) to: Memory,
    pub(super) deadline: Duration,
}

impl Canary {
    /// The value of the n-th canary. Neighbours have different ones. None is 0, a byte that files are full of.
    pub(super) fn byte(n: u64) -> u8 {
        (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56).max(1) as u8
    }

    /// True when a reply says that all bytes were read, and the last byte may not have arrived.
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
    /// Tells it from others that have had its number.
    pub(super) generation: u64,
    pub(super) memory: Arc<Region>,
    pub(super) registered: RegisteredRanges,
    /// Requests in flight that name it.
    pub(super) flights: usize,
    /// No new request may use it.
    pub(super) retired: bool,
    /// The outcome of a request is unknown.
    pub(super) in_doubt: bool,
    /// The ranges of such requests that write files: another node may still read them.
    pub(super) may_be_read: Vec<Range<usize>>,
    /// Its process has ended, or the program has withdrawn it: no one looks at what is in it.
    pub(super) abandoned: bool,
    /// Memory that the program works with, and not one from which the client copies.
    pub(super) is_programs: bool,
}

impl Buffer {
    pub(super) fn new(
        session: u64,
        generation: u64,
        memory: Arc<Region>,
        registered: RegisteredRanges,
        is_programs: bool,
    ) -> Buffer {
        let (retired, in_doubt, abandoned) = (false, false, false);
        let may_be_read = Vec::new();
        Buffer {
            session,
            generation,
            memory,
            registered,
            flights: 0,
            retired,
            in_doubt,
            may_be_read,
            abandoned,
            is_programs,
        }
    }
}

/// Memory of a program of which ranges are still to be registered.
#[derive(Debug)]
pub(super) struct ToRegister {
    pub(super) number: u64,
    pub(super) generation: u64,
    /// When its client waits no longer, and copies.
    pub(super) until: Duration,
    pub(super) outcome: Sender<Result<(), Code>>,
}

/// Memory in quarantine.
#[derive(Debug)]
pub(super) struct Quarantined {
    pub(super) until: Duration,
    pub(super) session: u64,
    pub(super) number: u64,
    pub(super) memory: Arc<Region>,
    /// As of [`Buffer`].
    pub(super) is_programs: bool,
    /// As of [`Buffer`].
    pub(super) may_be_read: Vec<Range<usize>>,
    /// Its pages are to be freed, or left to the program.
    pub(super) is_to_free: bool,
    pub(super) freeing: Freeing,
    /// When that is tried again, if it has failed.
    pub(super) free_again_at: Duration,
}

/// The state of both sides.
#[derive(Debug, Default)]
pub(super) struct Moves {
    /// Buffers of this node's processes, by their numbers.
    pub(super) buffers: HashMap<u64, Buffer>,
    /// Memory in quarantine.
    pub(super) quarantined: Vec<Quarantined>,
    /// The number of buffers there have been.
    pub(super) generations: u64,
    /// Memory of programs of which ranges are still to be registered.
    pub(super) to_register: VecDeque<ToRegister>,
    /// What was registered in this round, as `cost` of `registered_ranges.rs` counts it.
    pub(super) registered: usize,
    /// Memory of which ranges are still to be unregistered.
    pub(super) unregistering: Unregistering,
    /// Memory of programs that is to be retired: number and generation.
    pub(super) to_retire: VecDeque<(u64, u64)>,
    /// Unmaps large memory.
    pub(super) unmapping: Unmapping,
    /// The bounce buffer, made when another node first requests data.
    pub(super) bounce: Option<Bounce>,
    /// Pieces of volumes that the network reads and writes itself.
    pub(super) direct: DirectPieces,
    /// When those that are gone are next looked for.
    pub(super) direct_review_at: Duration,
    /// Requests that wait for a piece of the bounce buffer.
    pub(super) waiting: VecDeque<Asked>,
    /// Waiting requests are being started.
    pub(super) beginning: bool,
    /// Transfers in flight.
    pub(super) under_way: HashMap<u64, Moving>,
    pub(super) token: u64,
    /// The number of canaries written.
    pub(super) canaries: u64,
    /// Eager buffers that this node granted to others.
    pub(super) granted: GrantedBuffers,
    /// Eager buffers that other nodes granted to this one.
    pub(super) taken: RemoteBuffers,
    /// Transfers into eager buffers that are in flight.
    pub(super) eager_transfers: HashMap<u64, UsedBuffer>,
}

/// A data request of another node.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) ticket: Ticket,
    pub(super) id: BackingId,
    pub(super) kind: MoveKind,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) memory: Memory,
    /// When the request expires: its sender waits no longer, and may have reused the memory.
    pub(super) until: Duration,
}

impl Asked {
    pub(super) fn into_moving(self, room: DataBuffer) -> Moving {
        let Asked { ticket, id, kind, offset, bytes, memory, until } = self;
        Moving { ticket, id, kind, offset, bytes: bytes as usize, memory, room, until }
    }
}

impl Moves {
    /// True while data are transferred, or are about to be.
    pub(super) fn are_under_way(&self) -> bool {
        !self.under_way.is_empty() || !self.waiting.is_empty() || self.buffers.values().any(|b| b.flights > 0)
    }
}
