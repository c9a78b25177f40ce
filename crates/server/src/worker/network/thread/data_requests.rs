//! Data requests of processes of this node: this thread takes them from the rings, serves them or sends them to another
//! node, and answers their slots, without the shard thread (docs/decisions/0040).

use forebay_types::limits::BATCH_MAX;
use forebay_types::{BackingOp, Code, Request};

use super::state::NetworkThread;
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
            | BackingOp::WriteRuns { .. }
            | BackingOp::Truncate { .. }
            | BackingOp::Allocate { .. }
            | BackingOp::Move(_)
            | BackingOp::AppendPiece { .. }
            | BackingOp::Group { .. }
            | BackingOp::Atomic { .. }
    )
}

impl NetworkThread {
    /// True when a process of this node has posted a data request.
    #[inline]
    pub(in crate::worker) fn has_data_requests(&self) -> bool {
        self.clients.have_requests()
    }

    /// True when a data request was found since the last call that the shard thread has to take.
    pub(in crate::worker) fn has_left_requests(&self) -> bool {
        self.clients.have_left_requests()
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
                    self.serve_data_request(call);
                }
                Err((stamp, code)) => self.answered(stamp, Err(code)),
            }
        }
        any
    }

    /// Serves a data request that the shard thread took. False when it must wait for room in the calls.
    pub(super) fn serve_client(&mut self, call: Call) -> bool {
        !self.clients.adopt(&call) || self.serve_data_request(call)
    }

    fn serve_data_request(&mut self, call: Call) -> bool {
        let stamp = call.stamp();
        let Request::Backing { id, op } = *call.request() else {
            // The client changed the request after it had posted it.
            self.answered(stamp, Err(Code::Malformed));
            return true;
        };
        let node = id.node();
        if node != self.me {
            if keeps_state(&op) {
                self.clients.note_node(stamp.session, node);
            }
            return self.forward(node, call);
        }
        match op {
            BackingOp::Group { key, op } => {
                let served = self.kept.groups.serve(stamp, &id, key, op);
                self.answered_with(stamp, served);
            }
            op if is_for_all_nodes(&op) => {
                let job = Job::Serve { asker: Asker::Here(stamp), message: call.bytes().to_vec() };
                if self.jobs.give(job).is_err() {
                    self.answered(stamp, Err(Code::Io));
                }
            }
            // The client reaches the backing file itself.
            _ => self.answered(stamp, Err(Code::NotSupported)),
        }
        true
    }
}
