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

/// True for locks, appends and groups. The file's node serves them for all nodes, its own clients included.
fn is_for_all_nodes(op: &BackingOp<'_>) -> bool {
    matches!(
        op,
        BackingOp::Lock(_)
            | BackingOp::TestLock(_)
            | BackingOp::BeginAppend { .. }
            | BackingOp::EndAppend { .. }
            | BackingOp::Group { .. }
    )
}

/// True when the node that serves an operation keeps state for the client, and must be notified when the client ends.
fn keeps_state(op: &BackingOp<'_>) -> bool {
    matches!(
        op,
        BackingOp::Open { .. }
            | BackingOp::Lock(_)
            | BackingOp::BeginAppend { .. }
            | BackingOp::Write { .. }
            | BackingOp::Truncate { .. }
            | BackingOp::Allocate { .. }
            | BackingOp::Move(_)
            | BackingOp::AppendPiece { .. }
            | BackingOp::Group { .. }
    )
}

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

impl NetworkThread {
    /// A process of this node has attached.
    pub(super) fn attach(&mut self, session: u64, ring: Arc<AttachedRing>) {
        let in_progress = Box::new([None; RING_SLOTS]);
        let client = LocalClient { ring, in_progress, nodes: BTreeSet::new(), has_ended: false };
        self.clients.all.insert(session, client);
    }

    /// A process of this node has ended. Its requests in progress go on.
    pub(super) fn stop_taking(&mut self, session: u64) {
        if let Some(client) = self.clients.all.get_mut(&session) {
            client.has_ended = true;
        }
    }

    /// Forgets a process of this node; the nodes that keep state for it.
    pub(super) fn detach(&mut self, session: u64) -> BTreeSet<NodeId> {
        self.clients.all.remove(&session).map(|client| client.nodes).unwrap_or_default()
    }

    /// True when a process of this node has posted a data request.
    #[inline]
    pub(super) fn has_data_requests(&self) -> bool {
        let mut clients = self.clients.all.values();
        clients.any(|client| !client.has_ended && client.ring.data_requests() != 0)
    }

    /// Takes data requests of processes of this node and serves them. True when there were any.
    pub(super) fn take_data_requests(&mut self) -> bool {
        if !self.has_data_requests() {
            return false;
        }
        let taken = self.clients.take(BATCH_MAX);
        let any = !taken.is_empty();
        Statistics::count(&self.statistics.data_requests, taken.len() as u64);
        for call in taken {
            match call {
                Ok(call) => {
                    self.serve_taken(call);
                }
                Err((stamp, code)) => self.answered(stamp, Err(code)),
            }
        }
        any
    }

    /// Serves a data request that the shard thread took. False when it must wait for room in the calls.
    pub(super) fn serve_client(&mut self, call: Call) -> bool {
        let client = self.clients.all.get_mut(&call.client.session);
        // A process that has ended reads no reply.
        let Some(client) = client.filter(|client| !client.has_ended) else { return true };
        client.in_progress[call.client.slot] = Some(call.client.seq);
        self.serve_taken(call)
    }

    fn serve_taken(&mut self, call: Call) -> bool {
        let stamp = call.stamp();
        let Request::Backing { id, op } = *call.request() else {
            // The client changed the request after it had posted it.
            self.answered(stamp, Err(Code::Malformed));
            return true;
        };
        let node = id.node();
        if node != self.me {
            if let Some(client) = self.clients.all.get_mut(&stamp.session).filter(|_| keeps_state(&op)) {
                client.nodes.insert(node);
            }
            return self.forward(node, call);
        }
        match op {
            BackingOp::Group { key, op } => {
                let served = self.kept.groups.serve(stamp, &id, key, op);
                self.answered_with(stamp, served);
            }
            op if !is_for_all_nodes(&op) => self.answered(stamp, Err(Code::NotSupported)),
            _ => {
                let job = Job::Serve { asker: Asker::Here(stamp), message: call.bytes().to_vec() };
                if self.jobs.give(job).is_err() {
                    self.answered(stamp, Err(Code::Io));
                }
            }
        }
        true
    }
}
