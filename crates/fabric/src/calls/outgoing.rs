//! Outgoing links: to nodes that serve this node's requests. And the calls on them.

use std::collections::BTreeSet;
use std::time::Duration;

use forebay_types::{Code, NodeId};
use forebay_wire::{Answer, Initiator, Kind, Message, Stamp};

use super::call_event::{Body, CallEvent, CallId, Failed};
use super::link::{Asking, ServingNode, Up};
use super::state::{Call, OutgoingFrame, Role, State, To};
use crate::endpoint::Peer;

impl State {
    /// The addresses of all nodes that serve requests of this node.
    pub(super) fn addresses(&self) -> Vec<Vec<u8>> {
        self.serving_nodes.values().map(|n| n.address.clone()).collect()
    }

    pub(super) fn add_serving_node(&mut self, node: NodeId, address: Vec<u8>, peer: Peer) {
        if let Some(known) = self.serving_nodes.get_mut(&node) {
            if known.address != address {
                (known.address, known.peer) = (address, peer);
                self.drop_link(node);
            }
            return;
        }
        let serving_node = ServingNode {
            address,
            peer,
            up: None,
            asking: None,
            calls: BTreeSet::new(),
            waiting_since: None,
            reported_down: false,
            refused_until: Duration::ZERO,
        };
        self.serving_nodes.insert(node, serving_node);
    }

    pub(super) fn remove_serving_node(&mut self, node: NodeId) -> Option<Peer> {
        self.send_to_served(node, 0, Stamp::default(), &Message::Goodbye { detail: b"removed" });
        self.fail_calls(node, Code::Io, &format!("node {node} was removed from the pool"));
        self.drop_link(node);
        self.serving_nodes.remove(&node).map(|n| n.peer)
    }

    /// Drops the link to a node. Its calls wait for the next link.
    fn drop_link(&mut self, node: NodeId) {
        let Some(serving_node) = self.serving_nodes.get_mut(&node) else { return };
        let up = serving_node.up.take().map(|up| up.link);
        let asking = serving_node.asking.take().map(|asking| asking.initiator.hello().link);
        for link in up.into_iter().chain(asking) {
            self.links.remove(&link);
        }
        for id in &serving_node.calls {
            if let Some(call) = self.calls.get_mut(id) {
                call.sent = None;
            }
        }
    }

    pub(super) fn call(
        &mut self,
        node: NodeId,
        stamp: Stamp,
        message: &Message<'_>,
        deadline: Duration,
    ) -> Result<CallId, Code> {
        if !message.kind().asks() || stamp.slot > forebay_wire::limits::SLOT_MAX {
            return Err(Code::Invalid);
        }
        if self.calls.len() >= self.settings.calls_max {
            return Err(Code::Busy);
        }
        let serving_node = self.serving_nodes.get(&node).ok_or(Code::Invalid)?;
        if serving_node.calls.len() >= self.settings.calls_per_node {
            return Err(Code::Busy);
        }
        let mut body = Vec::new();
        message.encode_to(&mut body)?;
        self.soon();
        let serving_node = self.serving_nodes.get_mut(&node).ok_or(Code::Invalid)?;
        self.next_call += 1;
        let id = self.next_call;
        serving_node.calls.insert(id);
        self.calls.insert(
            id,
            Call { node, kind: message.kind(), stamp, body, deadline, sent: None, was_sent: false },
        );
        if serving_node.up.is_some() {
            self.send_call(id);
        } else {
            self.want(node);
        }
        Ok(CallId(id))
    }

    pub(super) fn has_room(&self, node: NodeId) -> bool {
        let per_node = |n: &ServingNode| n.calls.len() < self.settings.calls_per_node;
        self.calls.len() < self.settings.calls_max && self.serving_nodes.get(&node).is_some_and(per_node)
    }

    /// Sends a call on the link of its node, if it is up.
    fn send_call(&mut self, id: u64) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        let Some(serving_node) = self.serving_nodes.get_mut(&call.node) else { return };
        let Some(up) = &mut serving_node.up else { return };
        let mut frame = Vec::new();
        match up.session.seal_body(call.kind, id, call.stamp, &call.body, &mut frame) {
            Ok(()) => {
                call.sent = Some((self.now, up.link));
                call.was_sent = true;
                up.spoke = self.now;
                let outgoing = OutgoingFrame { to: To::Peer(serving_node.peer), frame, node: call.node.0 };
                self.outgoing.push_back(outgoing);
            }
            // The session's counters are used up. A new link has new ones.
            Err(_) => self.drop_link(self.calls[&id].node),
        }
    }

    /// Sends a message that is no call on the link to a node, if the link is up.
    pub(super) fn send_to_served(&mut self, node: NodeId, request: u64, stamp: Stamp, message: &Message<'_>) {
        let Some(serving_node) = self.serving_nodes.get_mut(&node) else { return };
        let Some(up) = &mut serving_node.up else { return };
        let mut frame = Vec::new();
        if up.session.seal(request, stamp, message, &mut frame).is_ok() {
            up.spoke = self.now;
            self.outgoing.push_back(OutgoingFrame { to: To::Peer(serving_node.peer), frame, node: node.0 });
        }
    }

    /// Begins a handshake with a node, unless one is in progress or the node has just refused one.
    fn want(&mut self, node: NodeId) {
        let link = self.new_link();
        let Some(serving_node) = self.serving_nodes.get_mut(&node) else { return };
        if serving_node.up.is_none() {
            serving_node.waiting_since.get_or_insert(self.now);
        }
        if serving_node.asking.is_some() || serving_node.refused_until > self.now {
            return;
        }
        let hello = self.hello(link);
        let Ok(initiator) = Initiator::start(&self.secret, hello) else { return };
        self.soon();
        let pause = self.settings.retry.0;
        let Some(serving_node) = self.serving_nodes.get_mut(&node) else { return };
        let frame = initiator.frame().to_vec();
        serving_node.asking = Some(Asking { initiator, again_at: self.now + pause, pause });
        self.links.insert(link, Role::Out(node));
        self.outgoing.push_back(OutgoingFrame { to: To::Peer(serving_node.peer), frame, node: node.0 });
    }

    /// A frame to a node could not be sent. Its link may be broken, so another is made.
    pub(super) fn send_failed(&mut self, node: NodeId, why: &str) {
        let Some(serving_node) = self.serving_nodes.get(&node) else { return };
        tracing::debug!("node {node}: {why}");
        if serving_node.up.is_some() {
            // Lost calls are sent again once the new link is up. Until then, answers on the old link are still
            // accepted.
            self.want(node);
        }
    }

    /// Handles a Welcome or a Refuse.
    pub(super) fn hear_answer_to_hello(&mut self, frame: &[u8]) -> Result<(), Code> {
        // Only the handshake whose digest the frame has verifies it.
        let asking = self.serving_nodes.iter().find_map(|(node, n)| {
            n.asking.as_ref().filter(|a| a.initiator.is_answered_by(frame)).map(|a| (*node, a))
        });
        let (node, asking) = asking.ok_or(Code::Stale)?;
        let answer = asking.initiator.finish(&self.secret, frame)?;
        let link = asking.initiator.hello().link;
        let (peer, session) = match answer {
            Answer::Refused(refusal) => {
                let why = format!("node {node} refused: {}", refusal.detail);
                let code = if refusal.code == Code::Stale { Code::Stale } else { Code::NotPermitted };
                self.unreachable(node, code, why);
                if let Some(serving_node) = self.serving_nodes.get_mut(&node) {
                    serving_node.refused_until = self.now + self.settings.retry.1;
                }
                return Ok(());
            }
            Answer::Welcome(peer, session) => (peer, session),
        };
        if peer.node != node {
            let why = format!("the address of node {node} belongs to node {}", peer.node);
            self.unreachable(node, Code::Io, why);
            self.happened.push_back(CallEvent::Joined {
                node: peer.node,
                incarnation: peer.incarnation,
                capacity_bytes: peer.capacity_bytes,
                address: peer.address,
            });
            return Ok(());
        }
        if let Some(why) = self.lacks_its_data(&peer) {
            self.unreachable(node, Code::Io, why);
            if let Some(serving_node) = self.serving_nodes.get_mut(&node) {
                serving_node.refused_until = self.now + self.settings.retry.1;
            }
            return Ok(());
        }
        self.statistics.links_made += 1;
        let clock_ahead_us = peer.clock_us as i64 - self.clock_us() as i64;
        let Some(serving_node) = self.serving_nodes.get_mut(&node) else { return Err(Code::Stale) };
        let (now, incarnation) = (self.now, peer.incarnation);
        let old = serving_node.up.replace(Up { link, session, heard: now, spoke: now });
        serving_node.asking = None;
        serving_node.waiting_since = None;
        serving_node.reported_down = false;
        if let Some(old) = &old {
            self.links.remove(&old.link);
        }
        let calls: Vec<u64> = serving_node.calls.iter().copied().collect();
        self.happened.push_back(CallEvent::Up {
            node,
            incarnation,
            capacity_bytes: peer.capacity_bytes,
            clock_ahead_us,
        });
        self.send_to_served(node, 0, Stamp::default(), &Message::Finish);
        for id in calls {
            self.statistics.resent += u64::from(self.calls[&id].sent.is_some());
            self.send_call(id);
        }
        Ok(())
    }

    /// Handles a frame of an outgoing link.
    pub(super) fn hear_from_served(&mut self, node: NodeId, link: u64, frame: &[u8]) -> Result<(), Code> {
        let now = self.now;
        let serving_node = self.serving_nodes.get_mut(&node).ok_or(Code::UnknownSession)?;
        let up = serving_node.up.as_mut().filter(|up| up.link == link).ok_or(Code::UnknownSession)?;
        let (header, body) = up.session.open(frame)?;
        up.heard = now;
        match header.kind {
            kind if kind.answers() => {
                let message = Message::decode(kind, body);
                // An answer may be a duplicate, or may arrive after the call's deadline.
                let known = self.calls.get(&header.request).is_some_and(|c| c.node == node);
                if !known {
                    return Err(Code::Stale);
                }
                let outcome = match message {
                    Ok(Message::Failure { code, detail }) => {
                        let why = format!("node {node}: {}", String::from_utf8_lossy(detail));
                        Err(Failed { code, why })
                    }
                    Ok(_) => Ok(Body::new(kind, body)),
                    Err(code) => {
                        let why = format!("node {node} sent a malformed answer: {code}");
                        Err(Failed { code: Code::Malformed, why })
                    }
                };
                self.finish_call(header.request, outcome);
                Ok(())
            }
            Kind::Alive => Ok(()),
            Kind::Goodbye => {
                let detail = match Message::decode(header.kind, body)? {
                    Message::Goodbye { detail } => String::from_utf8_lossy(detail).into_owned(),
                    _ => String::new(),
                };
                self.unreachable(node, Code::Io, format!("node {node} has left: {detail}"));
                Ok(())
            }
            _ => Err(Code::Malformed),
        }
    }

    pub(super) fn finish_call(&mut self, id: u64, outcome: Result<Body, Failed>) {
        let Some(call) = self.calls.remove(&id) else { return };
        if let Some(serving_node) = self.serving_nodes.get_mut(&call.node) {
            serving_node.calls.remove(&id);
        }
        let event = CallEvent::Answered { call: CallId(id), node: call.node, outcome, sent: call.was_sent };
        self.happened.push_back(event);
    }

    fn fail_calls(&mut self, node: NodeId, code: Code, why: &str) {
        let Some(serving_node) = self.serving_nodes.get(&node) else { return };
        for id in serving_node.calls.clone() {
            self.finish_call(id, Err(Failed { code, why: why.to_owned() }));
        }
    }

    /// Marks a node as unreachable. Its calls fail, and its link is dropped. The next call makes a new link.
    fn unreachable(&mut self, node: NodeId, code: Code, why: String) {
        self.fail_calls(node, code, &why);
        self.drop_link(node);
        if let Some(serving_node) = self.serving_nodes.get_mut(&node) {
            serving_node.waiting_since = None;
            if !serving_node.reported_down {
                serving_node.reported_down = true;
                tracing::warn!("{why}");
                self.happened.push_back(CallEvent::Down { node, failed: Failed { code, why } });
            }
        }
    }

    pub(super) fn outgoing_timers(&mut self) {
        let now = self.now;
        let (heartbeat, quiet, unreachable) =
            (self.settings.heartbeat, self.settings.quiet, self.settings.unreachable);
        let nodes: Vec<NodeId> = self.serving_nodes.keys().copied().collect();
        for node in nodes {
            let clock_us = self.clock_us();
            let Some(serving_node) = self.serving_nodes.get_mut(&node) else { continue };
            if let Some(up) = &serving_node.up {
                let (silence, spoke) = (now.saturating_sub(up.heard), up.spoke);
                if silence >= unreachable {
                    let why = format!("node {node} has not answered for {} ms", silence.as_millis());
                    self.unreachable(node, Code::Io, why);
                    continue;
                }
                if now >= spoke + heartbeat || (silence >= heartbeat && now >= spoke + heartbeat / 2) {
                    self.send_to_served(node, 0, Stamp::default(), &Message::Heartbeat { clock_us });
                }
                if silence >= quiet {
                    self.want(node);
                }
            } else if let Some(since) =
                // A node that is known to be down gets a shorter timeout.
                serving_node.waiting_since.filter(|s| {
                    now >= *s + if serving_node.reported_down { quiet } else { unreachable }
                })
            {
                let why = format!(
                    "node {node} is unreachable: no answer to a handshake for {} ms (is it down, or does it have a different secret?)",
                    (now - since).as_millis()
                );
                self.unreachable(node, Code::Io, why);
                continue;
            } else if !serving_node.calls.is_empty() {
                self.want(node);
            }
            let Some(serving_node) = self.serving_nodes.get_mut(&node) else { continue };
            if let Some(asking) = serving_node.asking.as_mut().filter(|a| a.again_at <= now) {
                // The same Hello is sent again, so the first answer to any copy is accepted.
                asking.pause = (asking.pause * 2).min(self.settings.retry.1);
                asking.again_at = now + asking.pause;
                let frame = asking.initiator.frame().to_vec();
                self.outgoing.push_back(OutgoingFrame {
                    to: To::Peer(serving_node.peer),
                    frame,
                    node: node.0,
                });
            }
        }
    }

    pub(super) fn call_timers(&mut self) {
        let (now, resend) = (self.now, self.settings.resend);
        let late: Vec<u64> =
            self.calls.iter().filter(|(_, c)| c.deadline <= now).map(|(id, _)| *id).collect();
        for id in late {
            let why = format!("node {} did not answer in time", self.calls[&id].node);
            self.finish_call(id, Err(Failed { code: Code::TimedOut, why }));
        }
        let again: Vec<u64> = self
            .calls
            .iter()
            .filter(|(_, c)| c.sent.is_none_or(|(at, _)| now >= at + resend))
            .map(|(id, _)| *id)
            .collect();
        for id in again {
            self.statistics.resent += u64::from(self.calls[&id].sent.is_some());
            self.send_call(id);
        }
    }
}
