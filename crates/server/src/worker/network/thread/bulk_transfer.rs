//! Transfers of data between memory of a client on its node, which is its buffer or memory of its program, and memory of the
//! node that has the backing file: its bounce buffer (docs/decisions/0018), or a volume's piece itself (`direct_pieces.rs`).
//! The client's node sends the address, the file's node starts the transfer.
//!
//! ```text
//!  client's node:  Move ─► address of the buffer ─► ReadStripe, WriteStripe ───────────────────────► reply ─► client
//!  file's node:    read:  piece ─► an I/O worker fills it ─► transfer to the buffer, and the reply right behind it
//!                  write: piece ─► transfer from the buffer ─► an I/O worker writes it ─► reply
//! ```
//! The pieces of volumes need no bounce buffer where the host's processor copies (`direct_pieces.rs`).
//! Short writes are not fetched where the file's node has granted eager buffers (`eager_buffers.rs`): the client's node
//! starts the transfer, and the request follows it at once. The request also says where the client's buffer is, for
//! data that did not arrive.
//!
//! The client's node checks the session and the range of a buffer before it sends anything. A peer can reach only the
//! buffers whose address it received, and only with their keys. A buffer whose request ended with an unknown outcome
//! goes into quarantine: it is unregistered, refused from then on, and kept in memory until no transfer can be in
//! flight.
//!
//! Where messages keep their order behind transfers, the reply to a read is sent before the transfer has completed. A
//! connection that breaks between the two may lose the data and not the reply. Therefore the client's node writes a
//! canary where the last byte will arrive ([`Canary`]). When it finds the canary there with the reply, it repeats the
//! request. The second reply is the one that the file's node kept when the transfer had ended. If the file's node has a
//! new worker since, which may also have replied early, the second reply does not count.

#[cfg(test)]
mod tests;

use forebay_fabric::{Body, Direction, Failed, Local, Ticket, Transfer};
use forebay_types::limits::{BACKING_AHEAD, EAGER_BUFFERS, EAGER_BUFFER_BYTES, MOVE_BYTES_MAX};
use forebay_types::{BackingId, Code, Move, MoveKind, NodeId, Reply};
use forebay_wire::{DataLocation, Message as Wire};

use super::flights::Flight;
use super::moves::{Asked, Asking, Buffer, Canary};
use super::registered_ranges::RegisteredPlace;
use super::state::{NetworkThread, NODE_TIMEOUT, SHORT_REPLY_BYTES};
use crate::worker::call::Call;
use crate::worker::network::bounce::{Bounce, DataBuffer};
use crate::worker::network::commands::Command;
use crate::worker::network::direct_pieces::{DirectPlace, Use};
use crate::worker::network::eager_buffers::{Arrived, BufferUse, RemoteBuffers, UsedBuffer};
use crate::worker::network::jobs::{Job, Moving};

/// Transfers to and from pieces of volumes at a time: of the longest, 256 MiB, two seconds of 1 Gbit/s.
const DIRECT_MAX: usize = 256;

impl NetworkThread {
    // --- for this node's clients

    /// Sends a client's data request to the file's node. False when it must wait.
    pub(super) fn forward_move(&mut self, node: NodeId, id: BackingId, wish: Move, call: Call) -> bool {
        let stamp = call.stamp();
        let buffer = self.moves.buffers.get_mut(&wish.buffer);
        let buffer = buffer.filter(|b| b.session == stamp.session && !b.retired);
        let end = u64::from(wish.at) + u64::from(wish.bytes);
        let place = |buffer: &Buffer| buffer.registered.place(wish.at as usize, wish.bytes as usize);
        let Some((buffer, place)) = buffer.and_then(|buffer| place(buffer).map(|place| (buffer, place)))
        else {
            self.answered(stamp, Err(Code::Fault));
            return true;
        };
        let RegisteredPlace { local, local_offset, remote: to } = place;
        let mut memory = DataLocation::Remote(to);
        let (offset, bytes) = (wish.offset, u64::from(wish.bytes));
        let mut last = [0];
        let goes_ahead = wish.kind == MoveKind::Write
            && RemoteBuffers::fits(bytes)
            && buffer.memory.read_at(end as usize - 1, &mut last).is_ok();
        let mut eager = None;
        if goes_ahead {
            // A thread that helps copies the bytes of one eager buffer at most: others wait for it.
            if self.helps && self.moves.are_under_way() {
                self.leaves = true;
                self.backlog.push_back(Command::Forward { node, call });
                return false;
            }
            let from = (local, local_offset);
            eager = self.start_eager_transfer(node, from, bytes, last[0]);
        }
        if let Some(UsedBuffer { of: BufferUse { grant, buffer, generation }, .. }) = eager {
            memory = DataLocation::Eager { memory: to, grant, buffer, generation };
        }
        let Some(buffer) = self.moves.buffers.get_mut(&wish.buffer) else { return true };
        let message_to = match wish.kind {
            MoveKind::Read => Wire::ReadStripe { id, offset, bytes, to: memory },
            MoveKind::Write => Wire::WriteStripe { id, offset, append: false, bytes, from: memory },
            MoveKind::Append => Wire::WriteStripe { id, offset, append: true, bytes, from: memory },
        };
        let deadline = self.calls.now() + NODE_TIMEOUT;
        let mut canary = None;
        if wish.kind == MoveKind::Read && bytes > 0 {
            let at = end as usize - 1;
            self.moves.canaries += 1;
            let byte = Canary::byte(self.moves.canaries);
            // Before the request is sent.
            if buffer.memory.write_at(at, &[byte]).is_ok() {
                canary = Some(Canary { byte, at, id, offset, bytes, to, deadline });
            }
        }
        match self.calls.call(node, stamp, &message_to, deadline) {
            Ok(asked) => {
                buffer.flights += 1;
                let (reads, range) = (wish.kind == MoveKind::Read, wish.at as usize..end as usize);
                let again = false;
                let asking = Asking { node, stamp, buffer: wish.buffer, canary, eager, again, reads, range };
                self.flights.insert(asked, Flight::Move(asking));
            }
            Err(Code::Busy) => {
                self.retire_eager(eager);
                self.backlog.push_back(Command::Forward { node, call });
                return false;
            }
            Err(code) => {
                tracing::warn!("cannot send a request to node {node}: {code}");
                self.retire_eager(eager);
                self.answered(stamp, Err(Code::Io));
            }
        }
        true
    }

    /// Starts a transfer of `bytes` bytes of this node's memory, whose last is `last`, to an eager buffer of the node
    /// that will write them. None if no buffer is free now.
    fn start_eager_transfer(
        &mut self,
        node: NodeId,
        (local, at): (Local, usize),
        bytes: u64,
        last: u8,
    ) -> Option<UsedBuffer> {
        if !self.calls.endpoint().limits().in_order {
            return None;
        }
        let now = self.calls.now();
        if let Some(number) = self.moves.taken.next_request(node, now) {
            self.request_eager_buffers(node, number);
        }
        if !self.calls.has_room(node) {
            return None;
        }
        let (used, remote) = self.moves.taken.take(node, bytes, last)?;
        let transfer =
            Transfer { direction: Direction::Ahead, local, local_offset: at, remote, bytes: bytes as usize };
        self.moves.token += 1;
        let token = self.moves.token;
        match self.calls.transfer(node, &transfer, token, now + NODE_TIMEOUT) {
            Ok(()) => {
                self.moves.eager_transfers.insert(token, used);
                Some(used)
            }
            Err(_) => {
                self.moves.taken.cancelled(used);
                None
            }
        }
    }

    /// No request names the buffer that data are transferred to.
    fn retire_eager(&mut self, eager: Option<UsedBuffer>) {
        if let Some(used) = eager {
            self.moves.taken.retire(used);
        }
    }

    /// Requests eager buffers of a node.
    fn request_eager_buffers(&mut self, node: NodeId, grant: u32) {
        let (stamp, deadline) = self.own_call(NODE_TIMEOUT);
        if let Ok(id) = self.calls.call(node, stamp, &Wire::TakeEagerBuffers { grant }, deadline) {
            self.flights.insert(id, Flight::EagerBuffers(grant));
        }
    }

    /// Handles the reply to a request for eager buffers.
    pub(super) fn eager_buffers_granted(&mut self, node: NodeId, number: u32, outcome: Result<Body, Failed>) {
        self.moves.taken.request_ended(node, number, self.calls.now());
        match outcome.as_ref().map(Body::message) {
            Ok(Wire::GrantEagerBuffers { memory, buffers, bytes }) => {
                self.moves.taken.add_grant(node, number, memory, buffers, bytes);
            }
            Ok(_) => {}
            Err(failed) => tracing::debug!("node {node} grants no eager buffers: {}", failed.why),
        }
    }

    /// A data request has ended. [`Code::Interrupted`]: the file's node has not served it to the end, because the network
    /// failed, but a transfer may still write the piece. [`Code::Fault`] makes the client repeat the request with another
    /// buffer, as when the second reply may be another worker's. EIO has the same meaning for the client's piece,
    /// unless the request was never `sent`.
    pub(super) fn move_ended(&mut self, mut asking: Asking, reply: Result<Vec<u8>, Code>, sent: bool) {
        let (stamp, number) = (asking.stamp, asking.buffer);
        let mut reply = reply;
        if let Some(used) = asking.eager.take() {
            match reply {
                Ok(_) => self.moves.taken.completed(used),
                Err(_) => self.moves.taken.retire(used),
            }
        }
        if let (Some(canary), Ok(told)) = (asking.canary.take(), &reply) {
            if self.moves.buffers.get(&number).is_some_and(|buffer| canary.is_there(told, &buffer.memory)) {
                match self.calls.call(asking.node, stamp, &canary.asks(), canary.deadline) {
                    Ok(call) => {
                        asking.again = true;
                        self.flights.insert(call, Flight::Move(asking));
                        return;
                    }
                    Err(code) => reply = Err(code),
                }
            }
        }
        // No canary can be written for the second reply: late data may be there already. The memory of a program must
        // not change after the reply, but what it has put in flight for a worker that ended may still arrive.
        let is_unproven =
            self.moves.buffers.get(&number).is_some_and(|buffer| {
                buffer.in_doubt && (asking.again || asking.reads && buffer.is_programs)
            });
        let undone =
            reply.as_deref().is_ok_and(|reply| is_unproven || Reply::decode(reply) == Err(Code::Interrupted));
        let in_doubt = reply.is_err() && sent || undone;
        let reply = if undone { Err(Code::Fault) } else { reply.map_err(|_| Code::Io) };
        let mut left = in_doubt;
        if let Some(buffer) = self.moves.buffers.get_mut(&number) {
            buffer.flights -= 1;
            left |= buffer.retired;
            if in_doubt && !asking.reads {
                buffer.may_be_read.push(asking.range);
            }
        }
        if left {
            self.retire_buffer(number, in_doubt);
        }
        self.answered(stamp, reply.as_deref().map_err(|code| *code));
    }

    // --- for other nodes

    /// Another node requests eager buffers.
    pub(super) fn grant_eager_buffers(&mut self, ticket: &Ticket, number: u32) {
        let now = self.calls.now();
        match self.moves.granted.grant(self.calls.endpoint(), now, ticket, number) {
            Ok(memory) => {
                let grant = Wire::GrantEagerBuffers {
                    memory,
                    buffers: EAGER_BUFFERS as u16,
                    bytes: EAGER_BUFFER_BYTES as u32,
                };
                if let Err(code) = self.calls.answer(ticket, &grant) {
                    tracing::error!("cannot answer node {}: {code}", ticket.node);
                }
            }
            Err(code) => self.refuse(ticket, code, "there are no eager buffers for it"),
        }
    }

    /// Handles a data request of another node, whose data may have arrived already.
    pub(super) fn asked_move(&mut self, asked: Asked, arrived: Option<Arrived>) {
        if asked.bytes > MOVE_BYTES_MAX as u64 {
            return self.refuse(&asked.ticket, Code::TooBig, "more than a piece of memory holds");
        }
        if self.was_served(&asked.ticket) {
            return arrived.iter().for_each(|arrived| self.moves.granted.release(arrived));
        }
        if let Some(arrived) = arrived {
            return self.have_served(asked.into_moving(DataBuffer::Eager(arrived)));
        }
        self.moves.waiting.push_back(asked);
        self.begin_moves();
    }

    /// Starts waiting requests, as long as there are free pieces.
    fn begin_moves(&mut self) {
        // A request that is served at once frees its piece within this call.
        if !std::mem::replace(&mut self.moves.beginning, true) {
            self.begin_waiting();
            self.moves.beginning = false;
        }
    }

    fn begin_waiting(&mut self) {
        while let Some(asked) = self.moves.waiting.pop_front() {
            if self.calls.now() >= asked.until {
                self.tell_moved(&asked.ticket, Err(Code::Interrupted));
                continue;
            }
            // More could not end in time behind a slow link, and one that is late ends them all.
            if asked.id.piece().is_some() && self.moves.under_way.len() >= DIRECT_MAX {
                return self.moves.waiting.push_front(asked);
            }
            if let Some(place) = self.direct_place(&asked) {
                self.start_transfer(asked.into_moving(DataBuffer::Direct(place)), true);
                continue;
            }
            if self.moves.bounce.is_none() {
                match Bounce::new(self.calls.endpoint()) {
                    Ok(bounce) => self.moves.bounce = Some(bounce),
                    Err(code) => {
                        tracing::error!("no memory for the data transfer: {code}");
                        self.refuse(&asked.ticket, code, "no memory for the data transfer");
                        continue;
                    }
                }
            }
            let Some(piece) = self.moves.bounce.as_mut().and_then(Bounce::take) else {
                return self.moves.waiting.push_front(asked);
            };
            let kind = asked.kind;
            let mut moving = asked.into_moving(DataBuffer::Piece(piece));
            // The parts of one call, not of many calls.
            let idle = self.moves.under_way.len() < BACKING_AHEAD;
            let filled =
                self.io_worker.as_ref().and_then(|io_worker| io_worker.fill_at_once(&mut moving, idle));
            match (kind, filled) {
                (_, Some(result)) => self.piece_moved(moving, result),
                (MoveKind::Read, None) => self.have_served(moving),
                (MoveKind::Write | MoveKind::Append, None) => self.start_transfer(moving, true),
            }
        }
    }

    /// The place of a request's bytes in a piece of a volume, if the network moves them from or to there.
    fn direct_place(&mut self, asked: &Asked) -> Option<DirectPlace> {
        let Asked { ticket, id, kind, offset, bytes, .. } = asked;
        let piece = id.piece().filter(|_| *bytes > 0 && self.calls.endpoint().limits().copies)?;
        let access = (*kind, offset.saturating_add(*bytes));
        let in_use = self.io_worker.as_ref()?.open_reserved(ticket.stamp.session, id, access)?;
        let (endpoint, table) = (self.calls.endpoint(), &self.kept.pieces);
        let way = if *kind == MoveKind::Read { Use::Reads } else { Use::Writes };
        self.moves.direct.place(endpoint, table, (piece, way), (*offset, *bytes as usize), in_use).ok()
    }

    /// Drops what the network has of pieces that are gone.
    pub(super) fn drop_gone_pieces(&mut self) {
        let (endpoint, table, moves) = (self.calls.endpoint(), &self.kept.pieces, &mut self.moves);
        moves.direct.drop_gone(endpoint, table, &mut moves.unmapping);
    }

    fn have_served(&mut self, mut moving: Moving) {
        let written = self.io_worker.as_ref().and_then(|io_worker| io_worker.write_at_once(&mut moving));
        if let Some(result) = written {
            return self.piece_moved(moving, result);
        }
        if let Err(Job::Move(moving)) = self.jobs.give(Job::Move(Box::new(moving))) {
            self.refuse(&moving.ticket, Code::Io, "the threads that serve data have ended");
        }
    }

    /// Starts a transfer. `whole`: it has all bytes of the request.
    fn start_transfer(&mut self, moving: Moving, whole: bool) {
        let reads = moving.kind == MoveKind::Read;
        // A late write of a volume's piece would replace what others have put there since.
        let (local, local_offset, fetch) = match &moving.room {
            DataBuffer::Piece(piece) => (piece.local, piece.at(), Direction::Read),
            DataBuffer::Direct(place) => (place.local, place.at, Direction::ReadInTime),
            DataBuffer::Eager(_) => return self.have_served(moving),
        };
        self.moves.token += 1;
        let token = self.moves.token;
        let transfer = Transfer {
            direction: if reads { Direction::Write } else { fetch },
            local,
            local_offset,
            remote: moving.memory,
            bytes: moving.bytes,
        };
        if self.calls.now() >= moving.until {
            return self.end_move(moving, Err(Code::Interrupted));
        }
        match self.calls.transfer_for(&moving.ticket, &transfer, token, moving.until) {
            Ok(()) => {
                if reads && whole && self.calls.endpoint().limits().in_order {
                    let mut bytes = [0; SHORT_REPLY_BYTES];
                    let reply = Reply::encode(&Ok(Reply::Count(moving.bytes as u64)), &mut bytes);
                    self.answer_ahead(&moving.ticket, &bytes[..reply.unwrap_or(0)]);
                }
                self.moves.under_way.insert(token, moving);
            }
            // This node's memory was retired meanwhile, the provider is busy, or the requester is gone and its buffer
            // with it: nothing was transferred.
            Err(Code::Fault | Code::Busy | Code::Stale) => self.end_move(moving, Err(Code::Interrupted)),
            Err(code) => {
                self.refuse(&moving.ticket, code, "the transfer cannot be started");
                self.free(moving);
            }
        }
    }

    fn free(&mut self, moving: Moving) {
        match (moving.room, &mut self.moves.bounce) {
            (DataBuffer::Piece(piece), Some(bounce)) => bounce.give_back(piece),
            (DataBuffer::Piece(_), None) | (DataBuffer::Direct(_), _) => {}
            (DataBuffer::Eager(arrived), _) => self.moves.granted.release(&arrived),
        }
        self.begin_moves();
    }

    /// The I/O workers have filled a piece from a backing file, or written it to one.
    pub(super) fn piece_moved(&mut self, mut moving: Moving, result: Result<usize, Code>) {
        match result {
            // There is nothing to be transferred to the other node.
            Ok(n) if moving.kind != MoveKind::Read || n == 0 => self.end_move(moving, Ok(n as u64)),
            Ok(n) => {
                let whole = n == moving.bytes;
                moving.bytes = n;
                self.start_transfer(moving, whole);
            }
            Err(code) => self.end_move(moving, Err(code)),
        }
    }

    /// A transfer has ended.
    pub(super) fn transferred(&mut self, token: u64, outcome: Result<(), Failed>) {
        if let Some(used) = self.moves.eager_transfers.remove(&token) {
            return match outcome {
                Ok(()) => self.moves.taken.completed(used),
                Err(_) => self.moves.taken.retire(used),
            };
        }
        let Some(moving) = self.moves.under_way.remove(&token) else { return };
        match (outcome, moving.kind) {
            (Ok(()), MoveKind::Read) => {
                let bytes = moving.bytes as u64;
                self.end_move(moving, Ok(bytes));
            }
            // Too late to be written: the requester has received a failure, and may have written newer data.
            (Ok(()), _) if self.calls.now() >= moving.until => self.end_move(moving, Err(Code::Interrupted)),
            (Ok(()), _) if matches!(moving.room, DataBuffer::Direct(_)) => {
                let bytes = moving.bytes as u64;
                self.end_move(moving, Ok(bytes));
            }
            (Ok(()), _) => self.have_served(moving),
            (Err(failed), _) => {
                tracing::debug!("a transfer with node {} failed: {}", moving.ticket.node, failed.why);
                // Kept as a reply: the message may be lost with the connection, and the retry must not break the next
                // connection.
                self.tell_moved(&moving.ticket, Err(Code::Interrupted));
                let DataBuffer::Piece(piece) = &moving.room else { return self.begin_moves() };
                if self.moves.bounce.as_mut().is_some_and(|bounce| bounce.lose(piece)) {
                    if let Some(bounce) = self.moves.bounce.take() {
                        self.calls.endpoint().unregister(bounce.local());
                    }
                }
                self.begin_moves();
            }
        }
    }

    fn end_move(&mut self, moving: Moving, result: Result<u64, Code>) {
        let ticket = moving.ticket;
        // The canary is back before the writer may use the buffer again.
        self.free(moving);
        self.tell_moved(&ticket, result);
    }

    fn tell_moved(&mut self, ticket: &Ticket, result: Result<u64, Code>) {
        let mut bytes = [0; 32];
        let n = Reply::encode(&result.map(Reply::Count), &mut bytes).unwrap_or(0);
        self.answer(ticket, &bytes[..n]);
    }
}
