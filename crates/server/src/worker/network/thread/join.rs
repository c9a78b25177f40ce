//! Introductions: a node with new data sends other nodes a request when it starts. A node that knows other data under
//! the same number refuses the request, now or when it is reached.

use std::sync::mpsc::Sender;
use std::time::Duration;

use forebay_fabric::Failed;
use forebay_types::{Code, NodeId, Request};

use super::flights::{Flight, Introduced};
use super::state::{NetworkThread, NODE_TIMEOUT};

/// How long after an introduction without a reply it is sent again.
const INTRODUCE_AGAIN: Duration = Duration::from_secs(1);

impl NetworkThread {
    /// Sends a request to the other node with the lowest number, which refuses it if it knows other data of this node.
    /// A node with a new number sends one to all nodes, so that they learn the number.
    pub(in crate::worker) fn introduce(&mut self) {
        let Some((answer, to_all)) = self.introduction.take() else { return };
        let mut nodes: Vec<NodeId> =
            self.members.iter().map(|m| m.node).filter(|node| *node != self.me).collect();
        nodes.sort();
        nodes.truncate(if to_all { nodes.len() } else { 1 });
        let mut answer = Some(answer);
        for node in nodes {
            self.introduce_to(node, answer.take());
        }
    }

    fn introduce_to(&mut self, node: NodeId, answer: Option<Sender<Introduced>>) {
        let flight = Flight::Introduction(node, answer);
        if self.ask(node, &Request::Space, NODE_TIMEOUT, flight).is_err() {
            self.introduce_at.insert(node, self.calls.now() + INTRODUCE_AGAIN);
        }
    }

    /// An introduction was answered, or failed.
    pub(super) fn introduced(
        &mut self,
        node: NodeId,
        answer: Option<Sender<Introduced>>,
        said: Result<(), Failed>,
    ) {
        let said = match said {
            Ok(()) => Ok(()),
            Err(failed) if failed.code == Code::Stale => Err(failed.why),
            // The node is down, or not up yet: it may refuse later.
            Err(_) if !self.met.is_gone(node) => {
                self.introduce_at.insert(node, self.calls.now() + INTRODUCE_AGAIN);
                Ok(())
            }
            Err(_) => Ok(()),
        };
        if let Some(answer) = answer {
            // The receiver may have stopped waiting.
            let _ = answer.send(said);
        }
    }

    /// Another node has taken the place of a node. This node introduces itself to the new one if the old one has not
    /// answered.
    pub(super) fn introduce_instead(&mut self, old: NodeId, new: NodeId) {
        let mut flights = self.flights.values();
        let is_asked = flights.any(|flight| matches!(flight, Flight::Introduction(node, _) if *node == old));
        if self.introduce_at.remove(&old).is_some() || is_asked {
            self.introduce_at.insert(new, self.calls.now());
        }
    }

    /// Repeats the introductions that are due.
    pub(super) fn introduce_again(&mut self) {
        let now = self.calls.now();
        while let Some((node, _)) = self.introduce_at.iter().find(|(_, at)| **at <= now) {
            let node = *node;
            self.introduce_at.remove(&node);
            self.introduce_to(node, None);
        }
    }
}
