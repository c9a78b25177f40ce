//! What the network thread is told to do.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::Arc;

use forebay_fabric::{Region, Ticket, Waker};
use forebay_types::{Code, Ino, Layout, NodeId, PoolSpace, TargetSpace};
use forebay_wire::Stamp;
use serde_json::Value;

use super::jobs::Moving;
use crate::worker::call::Call;

/// What others ask of the network thread.
#[derive(Debug)]
pub(in crate::worker) enum Command {
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
    Moved(Box<Moving>, Result<usize, Code>),
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
pub(in crate::worker) struct Commands {
    sender: Sender<Command>,
    waker: Waker,
    /// Set by those who give and do not wake.
    given: Option<Arc<AtomicBool>>,
}

impl Commands {
    /// To the thread that takes commands from the sender's other end and is woken by the waker.
    pub(in crate::worker) fn new(sender: Sender<Command>, waker: Waker) -> Commands {
        Commands { sender, waker, given: None }
    }

    /// For who sees to it that they are executed when it has given several ([`Commands::take_given`]).
    pub(in crate::worker) fn without_waking(&self) -> Commands {
        let given = Some(Arc::new(AtomicBool::new(false)));
        Commands { sender: self.sender.clone(), waker: self.waker.clone(), given }
    }

    /// True when some were given that nobody was woken for.
    pub(in crate::worker) fn take_given(&self) -> bool {
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
    pub(in crate::worker) fn wake(&self) {
        self.waker.wake();
    }

    /// Gives an order.
    pub(in crate::worker) fn give(&self, order: Command) {
        // The thread outlives all who give commands, unless it panicked; then the worker ends.
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
