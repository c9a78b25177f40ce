//! Reports of all nodes: their space, and their state.

use std::sync::mpsc::Sender;
use std::time::Duration;

use forebay_data::Medium;
use forebay_types::{Code, NodeId, Reply, Request, TargetSpace};
use serde_json::{json, Value};

use super::flights::Flight;
use super::state::{Member, NetworkThread};
use crate::worker::network::target_selection::SpaceReport;

/// How long `status` waits for the other nodes: longer than the making of a link takes.
const SURVEY_TIMEOUT: Duration = Duration::from_millis(1500);

/// A node's report of its targets.
fn said(reply: Vec<u8>) -> Result<SpaceReport, Code> {
    match Reply::decode(&reply)? {
        Reply::Targets { inodes, free_inodes, spaces } => {
            Ok(SpaceReport { inodes, free_inodes, spaces: spaces.iter().collect() })
        }
        _ => Err(Code::Malformed),
    }
}

impl NetworkThread {
    /// Requests the other nodes' reports, unless that was just done.
    pub(super) fn refresh_space_map(&mut self) {
        let nodes = self.space_map.next_round(self.calls.now());
        self.ask_all(nodes);
    }

    fn ask_all(&mut self, nodes: Vec<NodeId>) {
        for node in nodes {
            let asked = self.ask(node, &Request::Targets, SURVEY_TIMEOUT, Flight::Targets(node));
            if let Err(code) = asked {
                self.heard_targets(node, Err(code));
            }
        }
    }

    /// Notes whether a node is up, as far as this node can tell.
    pub(super) fn saw(&mut self, node: NodeId, up: bool) {
        let now = self.calls.now();
        let state = self.states.entry(node).or_insert((up, now));
        if state.0 != up {
            *state = (up, now);
        }
    }

    pub(super) fn heard_targets(&mut self, node: NodeId, reply: Result<Vec<u8>, Code>) {
        self.saw(node, reply.is_ok());
        for (stamp, space) in self.space_map.hear(node, reply.and_then(said)) {
            self.answered_with(stamp, Ok(Reply::Space(space)));
        }
        self.end_survey();
    }

    // --- status

    /// Sends the state of all nodes when each has answered or failed.
    pub(super) fn survey(&mut self, reply: Sender<Value>) {
        self.surveyors.push(reply);
        let nodes = self.space_map.round_now(self.calls.now());
        self.ask_all(nodes);
        self.end_survey();
    }

    fn end_survey(&mut self) {
        if self.space_map.is_asking() || self.surveyors.is_empty() {
            return;
        }
        let mut found: Vec<Value> = Vec::new();
        for Member { node, name, host, media } in self.members.iter().filter(|member| member.node != self.me)
        {
            let mut told = match self.space_map.said_by(*node) {
                Some(SpaceReport { inodes, spaces, .. }) => {
                    let sum =
                        |of: fn(&TargetSpace) -> u64| spaces.iter().map(of).fold(0, u64::saturating_add);
                    let target =
                        |s: &TargetSpace| json!({ "total_bytes": s.total_bytes, "free_bytes": s.free_bytes });
                    let medium =
                        |s: &TargetSpace| if s.in_memory { Medium::Dram } else { Medium::Ssd }.to_string();
                    json!({
                        "state": "up",
                        "media": spaces.iter().map(medium).collect::<Vec<_>>(),
                        "total_bytes": sum(|s| s.total_bytes),
                        "free_bytes": sum(|s| s.free_bytes),
                        "inodes": inodes,
                        "targets": spaces.iter().map(target).collect::<Vec<_>>(),
                    })
                }
                None => json!({ "state": "unreachable" }),
            };
            if let Some((_, since)) = self.states.get(node) {
                told["since_s"] = self.calls.now().saturating_sub(*since).as_secs_f64().into();
            }
            if told["state"] != "up" {
                told["why"] = self.failures.get(node).map(String::as_str).into();
            }
            // The media in the pool file, if the node itself does not report any.
            if told["media"].is_null() {
                told["media"] = media.as_slice().into();
            }
            told["node"] = node.0.into();
            told["name"] = name.as_str().into();
            told["host"] = host.as_str().into();
            found.push(told);
        }
        found.sort_by_key(|node| node["node"].as_u64());
        let s = self.calls.statistics();
        let name =
            self.members.iter().find(|member| member.node == self.me).map(|member| member.name.as_str());
        let told = json!({
            "node_name": name.unwrap_or_default(),
            "nodes": found,
            "network": {
                "messages_in": s.messages_in, "frames_in": s.frames_in, "forged": s.forged, "replayed": s.replayed, "unusable": s.unusable,
                "repeated": s.repeated, "resent": s.resent, "links_made": s.links_made,
                "opened_again": s.opened_again,
            },
        });
        for waiting in std::mem::take(&mut self.surveyors) {
            let _ = waiting.send(told.clone());
        }
    }
}
