//! The commands of the network thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::Arc;

use forebay_fabric::{Region, Ticket, Waker};
use forebay_types::{Code, Ino, Layout, NodeId, PoolSpace, SegmentId, TargetSpace};
use forebay_wire::Stamp;
use serde_json::Value;

use super::jobs::Moving;
use crate::worker::attached_ring::AttachedRing;
use crate::worker::call::Call;

/// A command to the network thread.
#[derive(Debug)]
pub(in crate::worker) enum Command {
    /// Send a client's request to a node.
    Forward {
        /// The node.
        node: NodeId,
        /// The request.
        call: Call,
    },
    /// Send a node a step of a cross-node transaction.
    Step {
        /// The node.
        node: NodeId,
        /// The worker's session at other nodes, slot and sequence.
        stamp: Stamp,
        /// The encoded request.
        message: Vec<u8>,
    },
    /// Answer another node's request.
    Answer {
        /// The request.
        ticket: Ticket,
        /// The encoded reply.
        reply: Vec<u8>,
    },
    /// Have the I/O workers serve a request for a backing file.
    Serve {
        /// For the answer.
        ticket: Ticket,
        /// The encoded request.
        message: Vec<u8>,
    },
    /// A client of this node has attached: take its data requests from its ring.
    Attach(u64, Arc<AttachedRing>),
    /// All clients of this node that the last worker left have attached: release what is kept for others of this node,
    /// which ended when no worker could release it.
    EndOthers,
    /// Serve a data request of a client of this node that the shard thread took from the ring, and answer its slot.
    ServeClient(Call),
    /// The I/O workers have served a request of a client of this node.
    AnswerHere {
        /// The client's session, slot and sequence.
        stamp: Stamp,
        /// The encoded reply.
        reply: Vec<u8>,
    },
    /// The I/O workers have filled a piece of memory from a backing file, or written it to one.
    Moved(Box<Moving>, Result<usize, Code>),
    /// A client has a new buffer for data to and from other nodes, in place of the one it had.
    Buffer {
        /// The client's session.
        session: u64,
        /// The buffer's number.
        number: u64,
        /// The buffer.
        memory: Region,
    },
    /// A client has memory of its own for data to and from other nodes.
    ProgramMemory {
        /// The client's session.
        session: u64,
        /// The memory's number.
        number: u64,
        /// The memory.
        memory: Region,
        /// Gets the outcome.
        registered: Sender<Result<(), Code>>,
    },
    /// A client does not use such memory any longer.
    WithdrawMemory {
        /// The client's session.
        session: u64,
        /// The memory's number.
        number: u64,
    },
    /// Remove the backing files of deleted inodes on other nodes.
    Remove(Vec<(Ino, Layout)>),
    /// A client has ended. These nodes keep state for it.
    EndSession(u64, Vec<NodeId>),
    /// Answer which of these processes of this node live: 1 for each that does.
    AreThere {
        /// For the answer.
        ticket: Ticket,
        /// Their sessions.
        sessions: Vec<u64>,
        /// What the shard thread knows of each.
        there: Vec<u8>,
    },
    /// Have a file marked dirty that is about to be written for another node, and send the outcome.
    Mark(Ino, Sender<Result<(), Code>>),
    /// Renew the lease from a node when a third of it has passed.
    RenewLease(NodeId),
    /// Send a node a revocation of a name or directory.
    Revocation {
        /// The node.
        node: NodeId,
        /// The revocation's number.
        number: u64,
        /// The encoded request.
        message: Vec<u8>,
    },
    /// Ask a node, or all, which of these processes of theirs live, and of those that have files open here.
    Review(Option<NodeId>, Vec<u64>),
    /// This node has pieces of these segments of volumes of other homes.
    AwayVolumes(Vec<SegmentId>),
    /// Ask the homes of all such segments now whether they still exist.
    ReviewVolumes,
    /// Report the status of all nodes.
    Survey(Sender<Value>),
    /// A client requests the space of all nodes. This node's space is given.
    Space {
        /// The client's session, slot and sequence.
        stamp: Stamp,
        /// This node's.
        own: PoolSpace,
    },
    /// A client requests targets for a new file.
    Place {
        /// The client's session, slot and sequence.
        stamp: Stamp,
        /// The number of backing files.
        stripe_count: u16,
        /// This node's targets.
        own: Vec<TargetSpace>,
    },
    /// Leave the pool and end.
    Stop,
}

/// The sending end of the network thread's commands.
#[derive(Clone, Debug)]
pub(in crate::worker) struct Commands {
    sender: Sender<Command>,
    waker: Waker,
    /// Set when a command was sent without a wake-up.
    given: Option<Arc<AtomicBool>>,
}

impl Commands {
    /// For the thread that receives from the sender's other end and is woken by the waker.
    pub(in crate::worker) fn new(sender: Sender<Command>, waker: Waker) -> Commands {
        Commands { sender, waker, given: None }
    }

    /// A copy that does not wake the thread: its user checks [`Commands::take_given`] after several commands.
    pub(in crate::worker) fn without_waking(&self) -> Commands {
        let given = Some(Arc::new(AtomicBool::new(false)));
        Commands { sender: self.sender.clone(), waker: self.waker.clone(), given }
    }

    /// True when commands were sent without a wake-up since the last call.
    pub(in crate::worker) fn take_given(&self) -> bool {
        // The threads that send and that check do so one after the other.
        self.given.as_ref().is_some_and(|given| {
            let is_given = given.load(Ordering::Relaxed);
            if is_given {
                given.store(false, Ordering::Relaxed);
            }
            is_given
        })
    }

    /// Wakes the thread.
    pub(in crate::worker) fn wake(&self) {
        self.waker.wake();
    }

    /// Sends a command.
    pub(in crate::worker) fn give(&self, order: Command) {
        // The thread outlives all senders, unless it panicked; then the worker ends.
        let _ = self.sender.send(order);
        match &self.given {
            Some(given) => given.store(true, Ordering::Relaxed),
            None => self.waker.wake(),
        }
    }
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
