//! Access to the pool's other nodes: one thread that owns the endpoint and the calls, and I/O workers that read and
//! write backing files for nodes that cannot open them.
//!
//! ```text
//!  shard thread ──commands──► network thread ══ other nodes     (or the thread that runs its rounds: handoff.rs)
//!       ▲                     ▲    │
//!       └──── messages ───────┼────┤ requests of the namespace, answers      rings ══ data requests of local clients
//!                    answers  │    ▼
//!                         I/O workers         reads and writes of backing files, several at a time
//! ```
//! Giving a command never waits or fails: commands for which the calls have no capacity are queued here. Requests in
//! progress when this process dies are retried by their senders: clients' slots stay open, with their stamps
//! (docs/decisions/0011). A pool without a pool file has no network.

mod appended;
mod atomics;
mod away_volumes;
mod backing_operations;
mod bounce;
mod buffers;
mod commands;
mod direct_pieces;
mod eager_buffers;
mod ended;
mod file_io;
mod gathering;
mod groups;
mod io_workers;
mod jobs;
mod kept;
mod lease_renewal;
mod locks;
mod met;
mod opening;
mod paced;
mod removals;
mod reply_cache;
mod runs;
mod target_selection;
mod thread;
mod unmapping;

use forebay_types::{Layout, NodeId};

#[cfg(any(test, feature = "simulation"))]
pub(super) use appended::TAG as APPENDS_TAG;
#[cfg(any(test, feature = "simulation"))]
pub(super) use atomics::TAG as ATOMICS_TAG;
pub(super) use away_volumes::{BEING_MADE, COMPLETE, GONE};
pub(super) use buffers::{accept_memory, give_buffer};
pub(super) use commands::{Command, Commands};
#[cfg(any(test, feature = "simulation"))]
pub(super) use io_workers::IoWorker;
#[cfg(any(test, feature = "simulation"))]
pub(super) use jobs::{queue, Job, Taker};
pub(super) use kept::KeptOpen;
#[cfg(any(test, feature = "simulation"))]
pub(super) use locks::{TAG as LOCK_TAG, TURN_TAG};
pub(super) use opening::{start, unwelcome};
pub(super) use target_selection::TargetNode;
#[cfg(any(test, feature = "simulation"))]
pub(super) use thread::Member;
pub(super) use thread::{NetworkThread, Round};

/// The network, as the shard thread sees it.
#[derive(Debug)]
pub(super) struct Network {
    /// This node.
    pub(super) node: NodeId,
    /// How many nodes the pool has.
    pub(super) nodes: usize,
    /// The other nodes.
    pub(super) others: Vec<NodeId>,
    /// All nodes, this one too, with the number of targets of each. A node without a target is home to nothing.
    pub(super) target_nodes: Vec<TargetNode>,
    /// To the network thread.
    pub(super) commands: Commands,
    /// Ends with the worker.
    pub(super) thread: Option<std::thread::JoinHandle<()>>,
}

impl Network {
    /// The nodes that have targets, including this one if it has.
    pub(super) fn homes(&self) -> Vec<NodeId> {
        self.target_nodes
            .iter()
            .filter(|target_node| target_node.targets > 0)
            .map(|target_node| target_node.node)
            .collect()
    }

    /// A node has lost its data, and has a new number from now on.
    pub(super) fn renumber(&mut self, old: NodeId, new: NodeId) {
        self.others.iter_mut().filter(|node| **node == old).for_each(|node| *node = new);
        self.target_nodes
            .iter_mut()
            .filter(|target_node| target_node.node == old)
            .for_each(|target_node| target_node.node = new);
    }

    /// True if files may lie on the node. A node never gets its first target later, nor loses its last.
    pub(super) fn has_targets(&self, node: NodeId) -> bool {
        self.target_nodes.iter().any(|target_node| target_node.node == node && target_node.targets > 0)
    }

    /// Stops the thread after the commands that it has received before.
    pub(super) fn stop(&mut self) {
        self.commands.give(Command::Stop);
        self.commands.wake();
        if let Some(thread) = self.thread.take() {
            if thread.join().is_err() {
                tracing::error!("the network thread had panicked");
            }
        }
    }
}

/// True when all backing files of a layout are on this node, or there are no other nodes.
pub(super) fn all_here(network: Option<&Network>, layout: &Layout) -> bool {
    let Some(Network { node, .. }) = network else { return true };
    layout.components().iter().all(|component| {
        let targets = &component.targets[..usize::from(component.target_count)];
        targets.iter().all(|target| target >> 16 == u32::from(node.0))
    })
}
