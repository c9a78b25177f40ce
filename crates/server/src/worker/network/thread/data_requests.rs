//! Data requests of processes of this node: this thread takes them from the rings, serves them or sends them to another
//! node, and answers their slots, without the shard thread (docs/decisions/0040).

use std::collections::BTreeSet;
use std::sync::Arc;

use forebay_types::limits::BATCH_MAX;
use forebay_types::{BackingOp, Code, NodeId, Request};

use super::state::NetworkThread;
use crate::worker::attached_ring::AttachedRing;
use crate::worker::call::Call;
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
