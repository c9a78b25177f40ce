//! The way to the pool's other nodes: one thread that has the endpoint and the calls, and I/O workers that serve the
//! data of backing files to nodes that cannot open them.
//!
//! ```text
//!  shard thread ──commands──► network thread ══ other nodes        (who does its rounds has the endpoint: handoff.rs)
//!       ▲                     ▲    │
//!       └──── messages ───────┼────┤ requests of the namespace, answers
//!                    answers  │    ▼
//!                         I/O workers         reads and writes of backing files, several at a time
//! ```
//! Commands never wait and are never refused: what the calls have no room for waits here. What is under way when this
//! process dies is asked again by who asked: clients' slots stay open, and their stamps with them (docs/decisions/0011).
//! A pool without a pool file has none of this.

mod appended;
mod bounce;
mod buffers;
mod commands;
mod eager_buffers;
mod ended;
mod gathering;
mod groups;
mod io_workers;
mod jobs;
mod kept;
mod lease_renewal;
mod locks;
mod met;
mod opening;
mod removals;
mod reply_cache;
mod target_selection;
mod thread;

use forebay_types::{Layout, NodeId};

pub(super) use appended::{Appended, TAG as APPENDS_TAG};
pub(super) use buffers::give_buffer;
pub(super) use commands::{Command, Commands};
pub(super) use groups::Groups;
pub(super) use io_workers::IoWorker;
pub(super) use jobs::{queue, Job, Taker};
pub(super) use kept::KeptOpen;
pub(super) use locks::{RemoteLocks, TAG as LOCK_TAG, TURN_TAG};
pub(super) use opening::{start, unwelcome};
pub(super) use target_selection::TargetNode;
pub(super) use thread::{Member, NetworkThread, Round};

/// The network, as the shard thread sees it.
#[derive(Debug)]
pub(super) struct Network {
    /// This node.
    pub(super) node: NodeId,
    /// How many nodes the pool has.
    pub(super) nodes: usize,
    /// The others.
    pub(super) others: Vec<NodeId>,
    /// All, this one too, and how many targets each has: where there is none nothing has its home.
    pub(super) target_nodes: Vec<TargetNode>,
    /// To the thread.
    pub(super) commands: Commands,
    /// Ends with the worker.
    pub(super) thread: Option<std::thread::JoinHandle<()>>,
}

impl Network {
    /// The nodes that have targets, this one too if it has.
    pub(super) fn homes(&self) -> Vec<NodeId> {
        self.target_nodes
            .iter()
            .filter(|target_node| target_node.targets > 0)
            .map(|target_node| target_node.node)
            .collect()
    }

    /// A node has lost its data, and is another from now on.
    pub(super) fn renumber(&mut self, old: NodeId, new: NodeId) {
        self.others.iter_mut().filter(|node| **node == old).for_each(|node| *node = new);
        self.target_nodes
            .iter_mut()
            .filter(|target_node| target_node.node == old)
            .for_each(|target_node| target_node.node = new);
    }

    /// Whether files may lie on the node. A node never gets its first target later, nor loses its last.
    pub(super) fn has_targets(&self, node: NodeId) -> bool {
        self.target_nodes.iter().any(|target_node| target_node.node == node && target_node.targets > 0)
    }

    /// Ends the thread when what it was told before is done.
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
