//! Requests of other nodes: passed to the thread that serves them, or answered here.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

use forebay_fabric::{Body, Ticket};
use forebay_types::limits::{LOCKS_OF_UNREACHED_MS, SESSIONS_ASKED_MAX};
use forebay_types::{
    AtomicOp, BackingId, BackingOp, Class, Code, GroupOp, MoveKind, NodeId, PieceWord, Reply, Request,
    SegmentId, REPLY_HEADER_BYTES,
};
use forebay_wire::{DataLocation, Message as Wire};

use super::flights::Flight;
use super::moves::Asked;
use super::served::{Served, State};
use super::state::{NetworkThread, NODE_TIMEOUT, SHORT_REPLY_BYTES};
use crate::worker::message::Message;
use crate::worker::network::commands::Command;
use crate::worker::network::eager_buffers::BufferUse;
use crate::worker::network::jobs::{Asker, Job};
use crate::worker::session_id::node_of_session;

impl NetworkThread {
    /// Answers another node's request.
    pub(super) fn answer(&mut self, ticket: &Ticket, reply: &[u8]) {
        let (stamp, mut ticket) = (ticket.stamp, *ticket);
        if let Some(served) = self.served.get_mut(&(stamp.session, stamp.slot)) {
            if let (State::Running { asker, told }, true) = (&served.state, served.sequence == stamp.sequence)
            {
                let is_told = *told && Reply::decode(reply).is_ok();
                ticket = *asker;
                served.state = State::Done(reply.to_vec());
                if is_told {
                    return;
                }
            }
        }
        self.send_answer(&ticket, reply);
    }

    /// Answers a read as soon as its transfer has started. The data arrive before the reply, or the requester finds
    /// that they have not. The final reply is kept for a retry.
    pub(super) fn answer_ahead(&mut self, ticket: &Ticket, reply: &[u8]) {
        let key = (ticket.stamp.session, ticket.stamp.slot);
        let running = self.served.get_mut(&key).filter(|s| s.sequence == ticket.stamp.sequence);
        if let Some(State::Running { asker, told }) = running.map(|served| &mut served.state) {
            *told = true;
            let asker = *asker;
            self.send_answer(&asker, reply);
        }
    }

    fn send_answer(&mut self, ticket: &Ticket, reply: &[u8]) {
        let answer = Reply::decode_answer(reply);
        if let Err(code) = self.calls.answer(ticket, &Wire::Answer(answer)) {
            tracing::error!("cannot answer node {}: {code}", ticket.node);
            self.refuse(ticket, code, "the reply cannot be sent");
        }
    }

    pub(super) fn refuse(&mut self, ticket: &Ticket, code: Code, why: &str) {
        let (stamp, key) = (ticket.stamp, (ticket.stamp.session, ticket.stamp.slot));
        let fails = |s: &Served| s.sequence == stamp.sequence && matches!(s.state, State::Running { .. });
        if self.served.get(&key).is_some_and(fails) {
            self.served.remove(&key);
        }
        // A requester that is gone gets no reply.
        let _ = self.calls.answer(ticket, &Wire::Failure { code, detail: why.as_bytes() });
    }

    /// Handles a request of another node.
    pub(super) fn asked(&mut self, ticket: Ticket, body: &Body) {
        if self.ended.has(ticket.stamp.session) {
            return self.refuse(&ticket, Code::Stale, "its process is over");
        }
        let request = match body.message() {
            Wire::Ask(_, request) => request,
            Wire::ReadStripe { id, offset, bytes, to: DataLocation::Remote(memory) } => {
                let (kind, until) = (MoveKind::Read, self.calls.now() + NODE_TIMEOUT);
                return self.asked_move(Asked { ticket, id, kind, offset, bytes, memory, until }, None);
            }
            Wire::WriteStripe { id, offset, append, bytes, from: DataLocation::Remote(memory) } => {
                let kind = if append { MoveKind::Append } else { MoveKind::Write };
                let until = self.calls.now() + NODE_TIMEOUT;
                return self.asked_move(Asked { ticket, id, kind, offset, bytes, memory, until }, None);
            }
            Wire::WriteStripe {
                id,
                offset,
                bytes,
                from: DataLocation::Eager { memory, grant, buffer, generation },
                ..
            } => {
                let (kind, until) = (MoveKind::Write, self.calls.now() + NODE_TIMEOUT);
                // Claimed whatever becomes of the request: the buffer gets its canary again only after it was claimed.
                let arrived =
                    self.moves.granted.claim(&ticket, bytes, BufferUse { grant, buffer, generation });
                let asked = Asked { ticket, id, kind, offset, bytes, memory, until };
                return self.asked_move(asked, arrived);
            }
            Wire::TakeEagerBuffers { grant } => return self.grant_eager_buffers(&ticket, grant),
            _ => return self.refuse(&ticket, Code::NotSupported, "this version does not serve that"),
        };
        let message = body.bytes().to_vec();
        match request {
            Request::Backing { id, op } => self.asked_backing(ticket, &id, &op, message),
            Request::EndSession { session } if node_of_session(session) == ticket.node => {
                self.session_ended(session);
                self.answer(&ticket, &DONE);
            }
            Request::AreThere { sessions } => {
                let words = sessions.chunks_exact(8).filter_map(|w| w.try_into().ok());
                let sessions = words.map(u64::from_le_bytes).collect();
                self.tell(Message::AreThere { ticket, sessions });
            }
            Request::AreSegments { segments } => {
                let segments = SegmentId::listed(segments).collect();
                self.tell(Message::AreSegments { ticket, segments });
            }
            Request::RemoveBackings { .. } => {
                // The shard thread knows whether a client may be creating one.
                self.tell(Message::RemoveBackings { ticket, message });
            }
            request if request.class() == Class::Peer => self.tell(Message::LeaseAsked { ticket, message }),
            _ => self.tell(Message::Asked { ticket, message }),
        }
    }

    pub(super) fn asked_backing(
        &mut self,
        ticket: Ticket,
        id: &BackingId,
        op: &BackingOp<'_>,
        message: Vec<u8>,
    ) {
        match op {
            BackingOp::Write { .. }
            | BackingOp::WriteRuns { .. }
            | BackingOp::Truncate { .. }
            | BackingOp::Allocate { .. }
            | BackingOp::AppendPiece { .. }
            | BackingOp::SetTimes { .. }
            | BackingOp::Open { .. }
            | BackingOp::Close { .. }
            | BackingOp::Lock(_)
            | BackingOp::BeginAppend { .. }
            | BackingOp::EndAppend { .. }
                if self.was_served(&ticket) =>
            {
                return;
            }
            BackingOp::Atomic { word, op: AtomicOp::Load } => {
                self.serve_load(&ticket, id, *word);
                return;
            }
            BackingOp::Atomic { word, op } => {
                if !self.was_served(&ticket) {
                    self.serve_atomic(&ticket, id, *word, *op);
                }
                return;
            }
            BackingOp::Group { key, op } => {
                if !self.was_served(&ticket) {
                    self.serve_group(&ticket, id, *key, *op);
                }
                return;
            }
            _ => {}
        }
        self.serve(ticket, message);
    }

    /// Serves an operation on a group of processes that opened a file together.
    fn serve_group(&mut self, ticket: &Ticket, id: &BackingId, key: u64, op: GroupOp) {
        let served = match id.node() == self.me {
            true => self.kept.groups.serve(ticket.stamp, id, key, op),
            false => Err(Code::Stale),
        };
        self.answer_shortly(ticket, &served);
    }

    /// Executes an atomic operation on a word of a piece of a volume.
    fn serve_atomic(&mut self, ticket: &Ticket, id: &BackingId, word: PieceWord, op: AtomicOp) {
        let kept = &self.kept;
        let served = match id.piece().filter(|_| id.node() == self.me) {
            Some(piece) => {
                let session = ticket.stamp.session;
                let may = || kept.get_writable(session, id).is_some();
                kept.atomics.once(&ticket.stamp, &kept.pieces, (piece, word, op), may).map(Reply::Count)
            }
            None => Err(Code::Malformed),
        };
        self.answer_shortly(ticket, &served);
    }

    /// Answers what a word of a piece is: nothing needs to be kept for a retry.
    fn serve_load(&mut self, ticket: &Ticket, id: &BackingId, word: PieceWord) {
        let served = match id.piece().filter(|_| id.node() == self.me) {
            Some(_) if self.kept.get(ticket.stamp.session, id).is_none() => Err(Code::Stale),
            Some(piece) => self.kept.pieces.apply(piece, word, AtomicOp::Load).map(Reply::Count),
            None => Err(Code::Malformed),
        };
        self.answer_shortly(ticket, &served);
    }

    fn answer_shortly(&mut self, ticket: &Ticket, served: &Result<Reply<'_>, Code>) {
        let mut bytes = [0; SHORT_REPLY_BYTES];
        match Reply::encode(served, &mut bytes) {
            Ok(n) => self.answer(ticket, &bytes[..n]),
            Err(code) => self.refuse(ticket, code, "the reply cannot be encoded"),
        }
    }

    /// True when a change was made before, is in progress, or has been overtaken by a later one of its slot: it is
    /// answered from the kept reply, when it is done, or refused. Otherwise it is noted as in progress.
    pub(super) fn was_served(&mut self, ticket: &Ticket) -> bool {
        let stamp = ticket.stamp;
        match self.served.get_mut(&(stamp.session, stamp.slot)) {
            Some(Served { sequence, .. }) if *sequence > stamp.sequence => {
                self.refuse(ticket, Code::Stale, "a later request of its slot was served");
            }
            Some(Served { sequence, state }) if *sequence == stamp.sequence => match state {
                State::Running { asker, told } => (*asker, *told) = (*ticket, false),
                State::Done(reply) => {
                    let reply = reply.clone();
                    self.answer(ticket, &reply);
                }
            },
            _ => {
                let served = Served {
                    sequence: stamp.sequence,
                    state: State::Running { asker: *ticket, told: false },
                };
                self.served.insert((stamp.session, stamp.slot), served);
                return false;
            }
        }
        true
    }

    pub(super) fn serve(&mut self, ticket: Ticket, message: Vec<u8>) {
        if let Some(mut io_worker) = self.io_worker.take() {
            let answered =
                io_worker.reply_at_once(ticket.stamp, &message).map(|reply| self.answer(&ticket, reply));
            self.io_worker = Some(io_worker);
            if answered.is_some() {
                return;
            }
        }
        if self.jobs.give(Job::Serve { asker: Asker::There(ticket), message }).is_err() {
            self.refuse(&ticket, Code::Io, "the threads that serve data have ended");
        }
    }

    /// A process of another node has ended.
    pub(super) fn session_ended(&mut self, session: u64) {
        self.ended.note(session);
        self.unreached.remove(&session);
        self.end_served(session);
        self.kept.end(session);
        self.tell(Message::EndedElsewhere(node_of_session(session), session));
    }

    /// Answers which processes of this node live. A process with a request in flight counts as living: a node that
    /// forgot its kept replies would repeat the change when the request is repeated.
    pub(super) fn tell_which_are_there(&mut self, ticket: &Ticket, sessions: &[u64], mut there: Vec<u8>) {
        let asking: HashSet<u64> = self.asking().collect();
        for (there, session) in there.iter_mut().zip(sessions) {
            *there |= u8::from(asking.contains(session));
        }
        let mut reply = vec![0; there.len() + REPLY_HEADER_BYTES];
        let n = Reply::encode(&Ok(Reply::Bytes(&there)), &mut reply).unwrap_or(0);
        self.answer(ticket, &reply[..n]);
    }

    /// True while a request of this process to another node is in flight.
    pub(super) fn asks_for(&self, session: u64) -> bool {
        self.asking().any(|of| of == session)
    }

    /// The sessions of this node's requests to other nodes in flight, one for each request.
    fn asking(&self) -> impl Iterator<Item = u64> + '_ {
        let flying = self.flights.values().filter_map(|flight| match flight {
            Flight::Forward(stamp) => Some(stamp.session),
            Flight::Move(asking) => Some(asking.stamp.session),
            _ => None,
        });
        let waiting = self.backlog.iter().filter_map(|order| match order {
            Command::Forward { call, .. } => Some(call.client.session),
            _ => None,
        });
        flying.chain(waiting)
    }

    /// The node of these processes does not reply. After a time it counts as dead, and their locks are released.
    pub(super) fn not_reviewed(&mut self, sessions: &[u64]) {
        let now = self.calls.now();
        for session in sessions {
            let since = *self.unreached.entry(*session).or_insert(now);
            if now.saturating_sub(since) >= Duration::from_millis(LOCKS_OF_UNREACHED_MS) {
                self.kept.locks.end(*session);
                self.kept.groups.end(*session);
                self.kept.close_pieces(*session);
            }
        }
    }

    /// Asks which of these processes of other nodes live, and which of those that have files open or replies kept here.
    pub(super) fn review(&mut self, node: Option<NodeId>, sessions: Vec<u64>) {
        let kept = self.kept.sessions().into_iter().chain(self.served.keys().map(|(of, _)| *of));
        let mut by_node: BTreeMap<NodeId, BTreeSet<u64>> = BTreeMap::new();
        for session in sessions.into_iter().chain(kept) {
            let of = node_of_session(session);
            if of != self.me && node.is_none_or(|node| node == of) {
                by_node.entry(of).or_default().insert(session);
            }
        }
        for (node, sessions) in by_node {
            if self.met.is_gone(node) {
                // No node of this number exists any more.
                sessions.into_iter().for_each(|session| self.session_ended(session));
                continue;
            }
            let sessions: Vec<u64> = sessions.into_iter().collect();
            for some in sessions.chunks(SESSIONS_ASKED_MAX) {
                let words: Vec<u8> = some.iter().flat_map(|session| session.to_le_bytes()).collect();
                let request = Request::AreThere { sessions: &words };
                // A node that is down is asked again later.
                let _ = self.ask(node, &request, NODE_TIMEOUT, Flight::Review(some.to_vec()));
            }
        }
    }

    pub(super) fn end_served(&mut self, session: u64) {
        self.served.retain(|(of, _), _| *of != session);
    }
}

/// `Reply::Done`, encoded.
const DONE: [u8; 4] = [0, 0, 1, 0];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constant_reply_is_what_the_encoder_writes() {
        let mut bytes = [0; 8];
        let n = Reply::encode(&Ok(Reply::Done), &mut bytes).unwrap();
        assert_eq!(bytes[..n], DONE);
    }
}
