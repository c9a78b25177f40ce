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
mod places;
mod removals;
mod reply_cache;
mod target_selection;
mod thread;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::Arc;

use forebay_fabric::{Region, Ticket, Waker};
use forebay_types::{Code, Ino, Layout, NodeId, PoolSpace, TargetSpace};
use forebay_wire::Stamp;
use serde_json::Value;

use super::call::Call;

pub(super) use appended::{Appended, TAG as APPENDS_TAG};
pub(super) use buffers::give_buffer;
pub(super) use groups::Groups;
pub(super) use io_workers::{IoWorker, Job};
pub(super) use jobs::{queue, Taker};
pub(super) use kept::KeptOpen;
pub(super) use locks::{RemoteLocks, TAG as LOCK_TAG, TURN_TAG};
pub(super) use opening::{start, unwelcome};
pub(super) use target_selection::TargetNode;
pub(super) use thread::{Member, NetworkThread, Round};

/// What others ask of the network thread.
#[derive(Debug)]
pub(super) enum Command {
    /// Ask a node for a client.
    Forward {
        /// Whom.
        node: NodeId,
        /// What the client asks.
        call: Call,
    },
    /// Ask a node for a change over several.
    Step {
        /// Whom.
        node: NodeId,
        /// The worker's session at other nodes, slot and sequence.
        stamp: Stamp,
        /// The encoded request.
        message: Vec<u8>,
    },
    /// Answer a node.
    Answer {
        /// What it asked.
        ticket: Ticket,
        /// The encoded reply.
        reply: Vec<u8>,
    },
    /// Have the I/O workers serve a request for a backing file.
    Serve {
        /// To answer by.
        ticket: Ticket,
        /// The encoded request.
        message: Vec<u8>,
    },
    /// Serve a client of this node, or have the I/O workers do it: locks, appends and groups, which are for all nodes
    /// to see.
    ServeHere {
        /// The client's session, slot and sequence.
        stamp: Stamp,
        /// The encoded request.
        message: Vec<u8>,
    },
    /// What the I/O workers served for a client of this node is answered.
    AnswerHere {
        /// The client's session, slot and sequence.
        stamp: Stamp,
        /// The encoded reply.
        reply: Vec<u8>,
    },
    /// The I/O workers have filled a piece of memory from a backing file, or written it to one.
    Moved(Box<io_workers::Moving>, Result<usize, Code>),
    /// A client has got a buffer by which data pass to and from other nodes, in place of what it had.
    Buffer {
        /// The client's session.
        session: u64,
        /// What it calls the buffer.
        number: u64,
        /// The buffer.
        memory: Region,
    },
    /// Have the backing files of inodes that are gone removed where they are, in time.
    Remove(Vec<(Ino, Layout)>),
    /// A client is gone, which asked these nodes for what they keep for it.
    EndSession(u64, Vec<NodeId>),
    /// Tell another node which of these processes of here are there: 1 for each that is.
    AreThere {
        /// To answer by.
        ticket: Ticket,
        /// Their sessions.
        sessions: Vec<u64>,
        /// As far as the shard thread knows.
        there: Vec<u8>,
    },
    /// Renew the lease from a node when a third of it has passed.
    RenewLease(NodeId),
    /// Take back what a node was told of a directory.
    Revocation {
        /// Whom.
        node: NodeId,
        /// Its number.
        number: u64,
        /// The encoded request.
        message: Vec<u8>,
    },
    /// Ask the node, or all, which of these processes of theirs are there, and of those that the I/O workers keep files
    /// open for.
    Review(Option<NodeId>, Vec<u64>),
    /// How are the others?
    Survey(Sender<Value>),
    /// A client asks for the space of all nodes; this one's is given.
    Space {
        /// The client's session, slot and sequence.
        stamp: Stamp,
        /// This node's.
        own: PoolSpace,
    },
    /// A client asks for targets of a new file.
    Place {
        /// The client's session, slot and sequence.
        stamp: Stamp,
        /// Backing files.
        stripe_count: u16,
        /// This node's targets.
        own: Vec<TargetSpace>,
    },
    /// Say goodbye and end.
    Stop,
}

/// By which the network thread is told what to do.
#[derive(Clone, Debug)]
pub(super) struct Commands {
    sender: Sender<Command>,
    waker: Waker,
    /// Set by those who give and do not wake.
    given: Option<Arc<AtomicBool>>,
}

impl Commands {
    /// To the thread that takes commands from the sender's other end and is woken by the waker.
    pub(super) fn new(sender: Sender<Command>, waker: Waker) -> Commands {
        Commands { sender, waker, given: None }
    }

    /// For who sees to it that they are executed when it has given several ([`Commands::take_given`]).
    pub(super) fn without_waking(&self) -> Commands {
        let given = Some(Arc::new(AtomicBool::new(false)));
        Commands { sender: self.sender.clone(), waker: self.waker.clone(), given }
    }

    /// True when some were given that nobody was woken for.
    pub(super) fn take_given(&self) -> bool {
        // Only who gives and who has its state asks, one after the other.
        self.given.as_ref().is_some_and(|given| {
            let is_given = given.load(Ordering::Relaxed);
            if is_given {
                given.store(false, Ordering::Relaxed);
            }
            is_given
        })
    }

    /// Wakes the thread.
    pub(super) fn wake(&self) {
        self.waker.wake();
    }

    /// Gives an order.
    pub(super) fn give(&self, order: Command) {
        // The thread outlives all who give commands, unless it panicked; then the worker ends.
        let _ = self.sender.send(order);
        match &self.given {
            Some(given) => given.store(true, Ordering::Relaxed),
            None => self.waker.wake(),
        }
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_fabric::simulated::{Faults, Network as Simulated};
    use forebay_fabric::Endpoint;

    #[test]
    fn orders_without_waking_are_told_of_once() {
        let endpoint = Simulated::new(1, Faults::NONE).endpoint(1);
        let (sender, receiver) = std::sync::mpsc::channel();
        let commands = Commands::new(sender, endpoint.waker().clone());
        let quiet = commands.without_waking();
        assert!(!quiet.take_given());
        quiet.clone().give(Command::Stop);
        assert!(quiet.take_given() && !quiet.take_given(), "whoever gave it");
        commands.give(Command::Stop);
        assert!(!quiet.take_given() && !commands.take_given(), "for that one somebody was woken");
        assert_eq!(receiver.try_iter().count(), 2);
    }
}
