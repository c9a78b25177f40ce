//! Looks at all nodes: their space, and how they are.

use std::sync::mpsc::Sender;
use std::time::Duration;

use forebay_types::{Code, NodeId, Reply, Request, TargetSpace};
use serde_json::{json, Value};

use super::asking::Flight;
use super::NetworkThread;
use crate::worker::network::placement::Said;

/// How long `status` waits for the other nodes: longer than a link takes that is made on this occasion.
const SURVEY_TIMEOUT: Duration = Duration::from_millis(1500);

/// A look at all nodes that `status` asked for.
#[derive(Debug, Default)]
pub(super) struct Survey {
    waiting: Vec<Sender<Value>>,
    left: usize,
    found: Vec<Value>,
}

/// What a node says of its targets.
fn said(reply: Vec<u8>) -> Result<Said, Code> {
    match Reply::decode(&reply)? {
        Reply::Targets { inodes, free_inodes, spaces } => {
            Ok(Said { inodes, free_inodes, spaces: spaces.iter().collect() })
        }
        _ => Err(Code::Malformed),
    }
}

impl NetworkThread {
    /// Asks the other nodes for theirs, unless that was just done.
    pub(super) fn refresh_surroundings(&mut self) {
        for node in self.surroundings.next_round(self.calls.now()) {
            let asked = self.ask(node, &Request::Targets, SURVEY_TIMEOUT, Flight::Targets(node));
            if let Err(code) = asked {
                self.heard_targets(node, Err(code));
            }
        }
    }

    pub(super) fn heard_targets(&mut self, node: NodeId, reply: Result<Vec<u8>, Code>) {
        for (stamp, space) in self.surroundings.hear(node, reply.and_then(said)) {
            self.answered_with(stamp, Ok(Reply::Space(space)));
        }
    }

    // --- status

    pub(super) fn look_around(&mut self, reply: Sender<Value>) {
        self.survey.waiting.push(reply);
        if self.survey.waiting.len() > 1 {
            return; // one is under way
        }
        self.survey.left = self.members.len();
        for i in 0..self.members.len() {
            let node = self.members[i].0;
            if node == self.me {
                self.survey.left -= 1;
            } else if let Err(code) = self.ask(node, &Request::Targets, SURVEY_TIMEOUT, Flight::Survey(node))
            {
                self.surveyed(node, Err(code));
            }
        }
        self.end_survey();
    }

    pub(super) fn surveyed(&mut self, node: NodeId, reply: Result<Vec<u8>, Code>) {
        self.survey.left = self.survey.left.saturating_sub(1);
        let (name, host) = self
            .members
            .iter()
            .find(|(number, ..)| *number == node)
            .map_or(("", ""), |(_, name, host)| (name.as_str(), host.as_str()));
        let mut told = match reply.and_then(said) {
            Ok(Said { inodes, spaces, .. }) => {
                let sum = |of: fn(&TargetSpace) -> u64| spaces.iter().map(of).fold(0, u64::saturating_add);
                let target =
                    |s: &TargetSpace| json!({ "total_bytes": s.total_bytes, "free_bytes": s.free_bytes });
                json!({
                    "state": "up",
                    "total_bytes": sum(|s| s.total_bytes),
                    "free_bytes": sum(|s| s.free_bytes),
                    "inodes": inodes,
                    "targets": spaces.iter().map(target).collect::<Vec<_>>(),
                })
            }
            Err(_) => json!({ "state": "unreachable" }),
        };
        told["node"] = node.0.into();
        told["name"] = name.into();
        told["host"] = host.into();
        self.survey.found.push(told);
        self.end_survey();
    }

    pub(super) fn end_survey(&mut self) {
        if self.survey.left > 0 || self.survey.waiting.is_empty() {
            return;
        }
        let mut survey = std::mem::take(&mut self.survey);
        survey.found.sort_by_key(|node| node["node"].as_u64());
        let s = self.calls.statistics();
        let name =
            self.members.iter().find(|(number, ..)| *number == self.me).map(|(_, name, _)| name.as_str());
        let told = json!({
            "node_name": name.unwrap_or_default(),
            "nodes": survey.found,
            "network": {
                "frames_in": s.frames_in, "forged": s.forged, "replayed": s.replayed, "unusable": s.unusable,
                "repeated": s.repeated, "resent": s.resent, "links_made": s.links_made,
            },
        });
        for waiting in survey.waiting {
            let _ = waiting.send(told.clone());
        }
    }
}
