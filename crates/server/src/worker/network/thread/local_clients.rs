//! Data requests of processes of this node. The network thread takes them from the rings and answers their slots itself,
//! without the shard thread (`worker/attached_ring.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use forebay_types::limits::{BATCH_MAX, MESSAGE_BYTES_MAX, RING_SLOTS};
use forebay_types::{BackingOp, Code, NodeId, Request};
use forebay_wire::Stamp;

use super::state::NetworkThread;
use crate::worker::attached_ring::AttachedRing;
use crate::worker::call::Call;
use crate::worker::channel::Channel;
use crate::worker::network::jobs::{Asker, Job};
use crate::worker::statistics::Statistics;

/// A process of this node.
#[derive(Debug)]
struct LocalClient {
    ring: Arc<AttachedRing>,
    /// The sequence of the request in progress of each slot.
    in_progress: Box<[Option<u64>; RING_SLOTS]>,
    /// Nodes that keep state for the process.
    nodes: BTreeSet<NodeId>,
    /// The process has ended: no more requests are taken.
    has_ended: bool,
}

/// The processes of this node, by session.
#[derive(Debug, Default)]
pub(super) struct LocalClients {
    all: BTreeMap<u64, LocalClient>,
    /// The session that is looked at first.
    first: u64,
    /// Memory into which a request is copied.
    scratch: Vec<u8>,
}

impl LocalClients {
    /// Answers the slot of a request that was taken here, once. False for any other request.
    pub(super) fn answer(&mut self, stamp: Stamp, reply: &[u8]) -> bool {
        let Some(client) = self.all.get_mut(&stamp.session) else { return false };
        let slot = usize::from(stamp.slot);
        if client.in_progress.get(slot) != Some(&Some(stamp.sequence)) {
            return false;
        }
        client.in_progress[slot] = None;
        client.ring.answer(slot, reply);
        true
    }

    /// Takes up to `most` requests: calls, and the stamps of those that cannot be parsed.
    fn take(&mut self, most: usize) -> Vec<Result<Call, (Stamp, Code)>> {
        let mut taken = Vec::new();
        let first = std::mem::take(&mut self.first);
        let order: Vec<u64> =
            self.all.range(first..).chain(self.all.range(..first)).map(|(id, _)| *id).collect();
        for session in order {
            if taken.len() >= most {
                self.first = session;
                break;
            }
            let Some(client) = self.all.get_mut(&session).filter(|client| !client.has_ended) else {
                continue;
            };
            let mut slots = client.ring.take_slots(client.ring.data_requests());
            while slots != 0 {
                let slot = slots.trailing_zeros() as usize;
                slots &= slots - 1;
                self.scratch.resize(MESSAGE_BYTES_MAX, 0);
                let channel = Channel::Ring(Arc::clone(&client.ring));
                let Some((of, call)) = channel.take(session, slot, &mut self.scratch) else { continue };
                client.in_progress[slot] = Some(of.seq);
                let stamp = Stamp { session: of.session, slot: of.slot as u16, sequence: of.seq };
                taken.push(call.map_err(|code| (stamp, code)));
            }
        }
        taken
    }
}

