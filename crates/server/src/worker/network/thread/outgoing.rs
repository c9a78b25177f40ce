//! Requests to other nodes: of clients, of the shard thread, and of the daemon itself; and their replies.

use std::collections::BTreeMap;
use std::time::Duration;

use forebay_fabric::{Body, CallId, Failed};
use forebay_ring::lease_clock;
use forebay_types::limits::{REMOVED_AT_ONCE_MAX, SESSIONS_ASKED_MAX, STEP_TIMEOUT_MS};
use forebay_types::{BackingId, BackingOp, Caller, Code, Ino, Layout, NodeId, Reply, Request, SegmentId};
use forebay_wire::{Message as Wire, Stamp};

use super::flights::Flight;
use super::state::{NetworkThread, NODE_TIMEOUT};
use crate::worker::call::Call;
use crate::worker::message::Message;
use crate::worker::network::commands::Command;
use crate::worker::network::lease_renewal::LEASE;

/// The caller of the daemon's own requests.
const NOBODY: Caller = Caller { uid: 0, gid: 0 };

impl NetworkThread {
    /// Sends a request of the daemon itself, which may be repeated without harm.
    pub(super) fn ask(
        &mut self,
        node: NodeId,
        request: &Request<'_>,
        within: Duration,
        flight: Flight,
    ) -> Result<(), Code> {
        let (stamp, deadline) = self.own_call(within);
        let id = self.calls.call(node, stamp, &Wire::Ask(NOBODY, *request), deadline)?;
        self.flights.insert(id, flight);
        Ok(())
    }

    /// The stamp and the deadline of a request of the daemon itself.
    pub(super) fn own_call(&mut self, within: Duration) -> (Stamp, Duration) {
        self.sequence += 1;
        let stamp = Stamp { session: self.session, slot: 0, sequence: self.sequence };
        (stamp, self.calls.now() + within)
    }

    pub(super) fn renew_lease(&mut self, node: NodeId) {
        // The lease counts from before the request is sent.
        if self.ask(node, &Request::RenewLease, LEASE, Flight::Lease(node, lease_clock())).is_err() {
            self.tell(Message::LeaseRenewed(node, None));
        }
    }

    pub(super) fn revoke(&mut self, node: NodeId, number: u64, message: Vec<u8>) -> bool {
        let Ok((_, request)) = Request::decode(&message) else { return true };
        match self.ask(node, &request, LEASE, Flight::Revocation(number)) {
            Ok(()) => true,
            Err(Code::Busy) => {
                self.backlog.push_back(Command::Revocation { node, number, message });
                false
            }
            Err(_) => {
                self.tell(Message::Revoked(number, false));
                true
            }
        }
    }

    pub(super) fn forward(&mut self, node: NodeId, call: Call) -> bool {
        let (deadline, stamp) = (self.calls.now() + NODE_TIMEOUT, call.stamp());
        if let Request::Backing { id, op: BackingOp::Move(wish) } = *call.request() {
            return self.forward_move(node, id, wish, call);
        }
        match self.calls.call(node, stamp, &Wire::Ask(call.caller(), *call.request()), deadline) {
            Ok(id) => {
                self.flights.insert(id, Flight::Forward(stamp));
                true
            }
            Err(Code::Busy) => {
                self.backlog.push_back(Command::Forward { node, call });
                false
            }
            Err(code) => {
                tracing::warn!("cannot send a request to node {node}: {code}");
                let code = if code == Code::Invalid { Code::Io } else { code };
                self.answered(stamp, Err(code));
                true
            }
        }
    }

    /// Sends a request of the shard thread, a step of a cross-node transaction.
    pub(super) fn step(&mut self, node: NodeId, stamp: Stamp, message: Vec<u8>) -> bool {
        let deadline = self.calls.now() + Duration::from_millis(STEP_TIMEOUT_MS);
        let asked = match Request::decode(&message) {
            Ok((caller, request)) => self.calls.call(node, stamp, &Wire::Ask(caller, request), deadline),
            Err(code) => Err(code),
        };
        match asked {
            Ok(id) => {
                self.flights.insert(id, Flight::Step(stamp));
            }
            Err(Code::Busy) => {
                self.backlog.push_back(Command::Step { node, stamp, message });
                return false;
            }
            Err(code) => {
                let code = match code {
                    _ if self.met.is_gone(node) => Code::NoDevice,
                    // A node that the pool file lacks may still exist.
                    Code::NoDevice | Code::Invalid => Code::Io,
                    code => code,
                };
                let known = self.members.iter().any(|member| member.node == node);
                let why = if known || code == Code::NoDevice {
                    ""
                } else {
                    ": this node's pool file has no such node"
                };
                tracing::warn!("cannot send node {node} its step of a cross-node transaction: {code}{why}");
                self.tell(Message::Stepped(usize::from(stamp.slot), Err(code)));
            }
        }
        true
    }

    pub(super) fn call_ended(
        &mut self,
        call: CallId,
        node: NodeId,
        outcome: Result<Body, Failed>,
        sent: bool,
    ) {
        let Some(flight) = self.flights.remove(&call) else { return };
        if let Err(failed) = &outcome {
            tracing::debug!("a request to node {node} failed: {}", failed.why);
        }
        let failed = outcome.as_ref().err().cloned();
        if let Some(failed) = failed.as_ref().filter(|failed| self.is_new && failed.code == Code::Stale) {
            // Other nodes know this node's number with other data.
            self.tell(Message::Unwelcome(failed.why.clone()));
        }
        if let Flight::EagerBuffers(number) = flight {
            return self.eager_buffers_granted(node, number, outcome);
        }
        let body = outcome.map_err(|failed| failed.code).and_then(|body| match body.message() {
            Wire::Answer(_) => Ok(body),
            _ => Err(Code::Malformed),
        });
        if let Flight::Forward(stamp) = flight {
            // A network failure is an I/O error to a program.
            let reply = body.as_ref().map(Body::bytes).map_err(|code| match code {
                Code::Busy | Code::TimedOut | Code::Malformed | Code::NotPermitted | Code::Stale => Code::Io,
                code => *code,
            });
            return self.answered(stamp, reply);
        }
        let reply = body.map(|body| body.bytes().to_vec());
        match flight {
            Flight::Move(asking) => self.move_ended(asking, reply, sent),
            Flight::Step(stamp) => {
                let reply = reply.map_err(|code| match code {
                    // It is unknown whether the request was served.
                    Code::TimedOut | Code::Malformed | Code::NotPermitted | Code::NoDevice => Code::Io,
                    code => code,
                });
                self.tell(Message::Stepped(usize::from(stamp.slot), reply));
            }
            Flight::Removals(inos) => {
                let done = match reply.as_deref().map(Reply::decode) {
                    Ok(Ok(Reply::Bytes(done))) if done.len() == inos.len() => done,
                    _ => &[],
                };
                self.removals_ended(&inos, done);
            }
            Flight::EndSession => {}
            Flight::Introduction(node, answer) => {
                self.introduced(node, answer, failed.map_or(Ok(()), Err));
            }
            Flight::Lease(node, asked) => self.lease_ended(node, asked, reply),
            Flight::Revocation(number) => {
                let answered = reply.is_ok_and(|reply| Reply::decode(&reply).is_ok());
                self.tell(Message::Revoked(number, answered));
            }
            Flight::Review(sessions) => {
                let Ok(reply) = reply else { return self.not_reviewed(&sessions) };
                self.unreached.retain(|session, _| !sessions.contains(session));
                let Ok(Reply::Bytes(there)) = Reply::decode(&reply) else { return };
                if there.len() == sessions.len() {
                    let gone = sessions.into_iter().zip(there).filter(|(_, there)| **there == 0);
                    gone.for_each(|(session, _)| self.session_ended(session));
                }
            }
            Flight::Segments(segments) => {
                let Ok(Ok(Reply::Bytes(states))) = reply.as_deref().map(Reply::decode) else { return };
                let gone = self.away_volumes.answered(&segments, states, self.calls.now());
                if !gone.is_empty() && states.len() == segments.len() {
                    self.tell(Message::SegmentsGone(gone));
                }
            }
            Flight::Targets(node) => self.heard_targets(node, reply),
            Flight::Forward(_) | Flight::EagerBuffers(_) => {}
        }
    }

    pub(super) fn lease_ended(&mut self, node: NodeId, asked: u64, reply: Result<Vec<u8>, Code>) {
        match reply.as_deref().map(Reply::decode) {
            Ok(Ok(Reply::Count(term))) => {
                let until = asked + LEASE.as_nanos() as u64;
                self.tell(Message::LeaseRenewed(node, Some((term, until))));
            }
            // The other node handles a revocation of this node: the lease is renewed as soon as that is answered.
            Ok(Err(Code::Busy)) => self.renewals.want(node, self.calls.now()),
            _ => self.tell(Message::LeaseRenewed(node, None)),
        }
    }

    /// Asks the homes of segments that have pieces here, when it is time, whether the segments still exist.
    pub(super) fn review_volumes(&mut self, now: Duration) {
        for (home, segments) in self.away_volumes.take_due(now) {
            for some in segments.chunks(SESSIONS_ASKED_MAX) {
                let list = SegmentId::list(some);
                let request = Request::AreSegments { segments: &list };
                // A home that is down is asked again later.
                let _ = self.ask(home, &request, NODE_TIMEOUT, Flight::Segments(some.to_vec()));
            }
        }
    }

    /// Requests the removal of inodes' stripes on other nodes. The stripes of a node that was replaced are lost with
    /// its data.
    pub(super) fn remove(&mut self, orphans: &[(Ino, Layout)]) {
        let (mut by_node, mut swept) = (BTreeMap::<NodeId, Vec<BackingId>>::new(), Vec::new());
        for (ino, layout) in orphans {
            let stripes = layout.stripes();
            let all = stripes.map(|(component, stripe)| BackingId::of(*ino, layout, component, stripe));
            let is_there = |id: &BackingId| id.node() != self.me && !self.met.is_gone(id.node());
            let elsewhere: Vec<BackingId> = all.filter(is_there).collect();
            self.removals.begin(*ino, layout, elsewhere.len());
            if elsewhere.is_empty() {
                swept.push(*ino);
            }
            elsewhere.into_iter().for_each(|id| by_node.entry(id.node()).or_default().push(id));
        }
        for (node, ids) in by_node {
            for some in ids.chunks(REMOVED_AT_ONCE_MAX) {
                let list = BackingId::list(some);
                let inos: Vec<Ino> = some.iter().map(|id| id.ino).collect();
                let flight = Flight::Removals(inos.clone());
                let request = Request::RemoveBackings { ids: &list };
                if self.ask(node, &request, NODE_TIMEOUT, flight).is_err() {
                    self.removals_ended(&inos, &[]);
                }
            }
        }
        if !swept.is_empty() {
            self.tell(Message::Swept(swept));
        }
    }

    /// A request to remove a backing file of each of these inodes has ended. `done` says which are removed: none
    /// without it.
    fn removals_ended(&mut self, inos: &[Ino], done: &[u8]) {
        let now = self.calls.now();
        let mut swept = Vec::new();
        for (i, ino) in inos.iter().enumerate() {
            let is_done = done.get(i).is_some_and(|done| *done != 0);
            swept.extend(self.removals.ended(*ino, is_done, now));
        }
        if !swept.is_empty() {
            self.tell(Message::Swept(swept));
        }
    }
}
