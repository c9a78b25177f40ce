//! The way to the pool's other nodes: one thread that has the endpoint and the calls, and a crew that serves the data of
//! backing files to nodes that cannot open them.
//!
//! ```text
//!  shard thread ──orders──► network thread ══ other nodes        (the only one that touches the endpoint)
//!       ▲                     ▲    │
//!       └──── messages ───────┼────┤ requests of the namespace, answers
//!                    answers  │    ▼
//!                            crew        reads and writes of backing files, several at a time
//! ```
//! Orders never wait and are never refused: what the calls have no room for waits here. What is under way when this
//! process dies is asked again by who asked: clients' slots stay open, and their stamps with them (docs/decisions/0011).
//! A pool without a pool file has none of this.

mod appended;
mod bounce;
mod buffers;
mod crew;
mod gathering;
mod kept;
mod leases;
mod locks;
mod met;
mod opening;
mod placement;
mod removals;
mod thread;

use std::sync::mpsc::Sender;

use forebay_fabric::{Region, Ticket, Waker};
use forebay_types::{Code, Ino, Layout, NodeId, PoolSpace, TargetSpace};
use forebay_wire::Stamp;
use serde_json::Value;

pub(super) use appended::Appended;
pub(super) use buffers::give_buffer;
pub(super) use crew::{Hand, Job};
pub(super) use kept::KeptOpen;
pub(super) use locks::RemoteLocks;
pub(super) use opening::{start, unwelcome};
pub(super) use placement::Giver;
pub(super) use thread::{NetworkThread, Round};

/// What others ask of the network thread.
#[derive(Debug)]
pub(super) enum Order {
    /// Ask a node for a client.
    Forward {
        /// Whom.
        node: NodeId,
        /// The client's session, slot and sequence.
        stamp: Stamp,
        /// The encoded request.
        message: Vec<u8>,
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
    /// Have the crew serve a request for a backing file.
    Serve {
        /// To answer by.
        ticket: Ticket,
        /// The encoded request.
        message: Vec<u8>,
    },
    /// Have the crew serve a client of this node: locks and appends, which are for all nodes to see.
    ServeHere {
        /// The client's session, slot and sequence.
        stamp: Stamp,
        /// The encoded request.
        message: Vec<u8>,
    },
    /// What the crew served for a client of this node is answered.
    AnswerHere {
        /// The client's session, slot and sequence.
        stamp: Stamp,
        /// The encoded reply.
        reply: Vec<u8>,
    },
    /// The crew has filled a piece of memory from a backing file, or written it to one.
    Moved(Box<crew::Moving>, Result<usize, Code>),
    /// A client has got a buffer by which data pass to and from other nodes, in place of what it had.
    Buffer {
        /// The client's session.
        session: u64,
        /// What it calls the buffer.
        number: u64,
        /// The buffer.
        memory: Region,
    },
    /// Have the backing files of an inode that is gone removed where they are, in time.
    Remove(Ino, Layout),
    /// A client is gone, which asked these nodes for what they keep for it.
    EndSession(u64, Vec<NodeId>),
    /// Renew the lease from a node when a third of it has passed.
    RenewLease(NodeId),
    /// Take back what a node was told of a directory.
    Recall {
        /// Whom.
        node: NodeId,
        /// Its number.
        number: u64,
        /// The encoded request.
        message: Vec<u8>,
    },
    /// Ask the node, or all, which of these processes of theirs are there, and of those that the crew keeps files open for.
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
pub(super) struct Orders {
    sender: Sender<Order>,
    waker: Waker,
}

impl Orders {
    /// To the thread that takes orders from the sender's other end and is woken by the waker.
    pub(super) fn new(sender: Sender<Order>, waker: Waker) -> Orders {
        Orders { sender, waker }
    }

    /// Gives an order.
    pub(super) fn give(&self, order: Order) {
        // The thread outlives all who give orders, unless it panicked; then the worker ends.
        let _ = self.sender.send(order);
        self.waker.wake();
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
    /// Those that have targets, this one too if it has: on the others nothing has its home.
    pub(super) homes: Vec<NodeId>,
    /// To the thread.
    pub(super) orders: Orders,
    /// Ends with the worker.
    pub(super) thread: Option<std::thread::JoinHandle<()>>,
}

impl Network {
    /// Ends the thread when what it was told before is done.
    pub(super) fn stop(&mut self) {
        self.orders.give(Order::Stop);
        if let Some(thread) = self.thread.take() {
            if thread.join().is_err() {
                tracing::error!("the network thread had panicked");
            }
        }
    }
}
