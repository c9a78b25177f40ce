//! Rounds of the shard thread: each handles messages, takes a batch of calls, and serves it.

use super::state::{Round, ShardThread};
use crate::worker::batch::Taken;
use crate::worker::coordination::CrossNode;
use crate::worker::leases::Leases;
use crate::worker::message::Message;
use crate::worker::network::Command;
use crate::worker::notifier::MountedKernel;
use crate::worker::session::Session;
use crate::worker::statistics::Statistics;
use crate::worker::sweeper::Sweep;
use forebay_types::limits::{BATCH_MAX, BATCH_PER_RING, DOORBELL_POLL_MS};
use forebay_types::{NodeId, Result};
use serde_json::Value;

/// An open transaction is committed when no call came for so long.
const IDLE_COMMIT_MS: u64 = 2;
impl ShardThread<'_> {
    /// Runs one round: messages, then a batch of calls.
    pub(in crate::worker) fn round(&mut self) -> Result<Round> {
        while let Some(message) = self.unhandled.pop_front().or_else(|| self.messages.try_recv().ok()) {
            self.handle(message)?;
        }
        self.serve_what_waits()
    }

    /// Runs a round in the network thread: messages from the network, and calls. Other messages may take long, and are
    /// left to the shard thread.
    pub(in crate::worker) fn round_for_network(&mut self) -> Result<Round> {
        while let Some(message) = self.unhandled.pop_front().or_else(|| self.messages.try_recv().ok()) {
            if !message.is_of_network() {
                self.unhandled.push_front(message);
                break;
            }
            self.handle(message)?;
        }
        self.serve_what_waits()
    }

    /// True when there is a message or a request.
    #[inline]
    pub(in crate::worker) fn has_work(&mut self) -> bool {
        self.unhandled.extend(self.messages.try_recv().ok());
        self.has_unhandled()
            || self.has_released_calls()
            || !self.store.released.is_empty()
            || !self.mover_mail.released.is_empty()
            || !self.arrivals.is_empty()
            || self.sessions.local().iter().any(Session::has_pending)
            || self.mount.as_ref().is_some_and(MountedKernel::has_written)
    }

    /// True when a message waits for the shard thread itself.
    pub(in crate::worker) fn has_unhandled(&self) -> bool {
        !self.unhandled.is_empty()
    }

    fn serve_what_waits(&mut self) -> Result<Round> {
        if self.stop {
            self.commit()?;
            return Ok(Round::Stopped);
        }
        self.acknowledge_written();
        self.acknowledge_overdue();
        self.stop_waiting_for_removals()?;
        if self.cross_node.is_some() {
            self.drive_steps()?;
        }
        self.acknowledge_revoked();
        self.take_requests();
        if self.pipeline.taken.is_empty() {
            return Ok(Round::Idle);
        }
        self.serve_batch()?;
        Ok(Round::Served)
    }

    /// Does the work of idle times. True when there may be more. `long`: no call has come for a moment, so the
    /// transaction is committed too.
    pub(in crate::worker) fn rest(&mut self, long: bool) -> Result<bool> {
        if self.backing.has_unlinked() && self.forget_orphans()? {
            return Ok(true);
        }
        if long {
            self.sweep_late();
            self.backing.sweep_together();
            self.volumes.drop_unused();
        }
        if long && self.batch.is_some() && !self.is_held_for_snapshot() {
            self.commit()?;
        }
        if long && self.leases.is_some() {
            self.free_ended_leases();
        }
        Ok(false)
    }

    /// Milliseconds until the next timed work, after this many rounds without a call.
    pub(in crate::worker) fn next_timeout_ms(&self, idle_rounds: u32) -> u64 {
        // The poll by timer, which exists for scribbled doorbells, slows down after a moment.
        let timeout = match idle_rounds {
            0 | 1 => IDLE_COMMIT_MS,
            2..20 => DOORBELL_POLL_MS,
            _ => 10 * DOORBELL_POLL_MS,
        };
        let held = self.mount.as_ref().and_then(MountedKernel::next_timeout);
        let timeout = held.map_or(timeout, |left| timeout.min(left.as_millis() as u64 + 1));
        let cross_node =
            self.cross_node.as_ref().map(|cross_node| cross_node.next_timeout().as_millis().min(1000) as u64);
        let timeout = cross_node.map_or(timeout, |left| timeout.min(left + 1));
        let timeout = self.next_release_ms().map_or(timeout, |left| timeout.min(left));
        let timeout = self.next_store_ms().map_or(timeout, |left| timeout.min(left));
        let leased = self.leases.as_ref().and_then(Leases::next_timeout_ms);
        leased.map_or(timeout, |left| timeout.min(left))
    }

    /// Takes a batch: calls that are served again, calls of other nodes' processes, and calls from the rings.
    fn take_requests(&mut self) {
        let most = if self.recorder.has_suspects() { 1 } else { BATCH_MAX };
        while self.pipeline.taken.len() < most {
            let Some(call) = self.cross_node.as_mut().and_then(CrossNode::next_anew) else { break };
            // A call that its client has given up meanwhile is dropped.
            let client = call.client;
            let session = self.sessions.index_of(client.session);
            if let Some(session) = session.filter(|i| self.sessions[*i].is_waiting(client.slot, client.seq)) {
                self.pipeline.taken.push_back(Taken { session, client, call: Ok(call) });
            }
        }
        self.take_released_calls(most);
        self.take_calls_of_store(most);
        self.take_calls_of_volumes(most);
        // Half of the batch is for each sort of process, as far as it asks. A batch of one call is for each in turn.
        self.is_rings_turn = !self.is_rings_turn;
        let share = if most == 1 { usize::from(!self.is_rings_turn) } else { most / 2 };
        self.take_arrivals(share);
        self.take_from_rings(most);
        self.take_arrivals(most);
    }

    /// Takes calls of other nodes' processes into the batch, in the order of their arrival, until it has `most` calls.
    fn take_arrivals(&mut self, most: usize) {
        while self.pipeline.taken.len() < most {
            let Some((id, slot)) = self.arrivals.next() else { break };
            let Some(session) = self.sessions.index_of(id) else { continue };
            if let Some((client, call)) = self.sessions[session].channel.take(id, slot, &mut self.scratch) {
                self.pipeline.taken.push_back(Taken { session, client, call });
            }
        }
    }

    /// Takes a bounded number of calls from each ring in turn, beginning with another ring each time.
    fn take_from_rings(&mut self, most: usize) {
        let n = self.sessions.local().len();
        for k in 0..n {
            let i = (self.first_session + k) % n;
            let room = most.saturating_sub(self.pipeline.taken.len());
            if room == 0 {
                self.first_session = i;
                return;
            }
            let Session { id, channel, .. } = &self.sessions[i];
            let mut bits = channel.ring().map_or(0, |ring| ring.take_pending(room.min(BATCH_PER_RING)));
            while bits != 0 {
                let slot = bits.trailing_zeros() as usize;
                bits &= bits - 1;
                if let Some((client, call)) = channel.take(*id, slot, &mut self.scratch) {
                    self.pipeline.taken.push_back(Taken { session: i, client, call });
                }
            }
        }
        if n > 0 {
            self.first_session = (self.first_session + 1) % n;
        }
    }

    fn handle(&mut self, message: Message) -> Result<()> {
        match message {
            Message::Attached(session) => {
                self.give_ring_to_network(&session);
                self.sessions.push(*session);
                self.count_clients();
                Statistics::add(&self.statistics.attached, 1);
            }
            Message::Ended(id) => self.end_session(id)?,
            Message::Swept(inos) => {
                Statistics::add(&self.statistics.swept, inos.len() as u64);
                self.backing.unlinked(inos);
            }
            Message::SweptUpTo(mark) => self.swept_up_to(mark)?,
            Message::Status(reply) => self.tell_status(reply)?,
            Message::Snapshot(reply) => self.give_snapshot(&reply)?,
            Message::Check(reply) => {
                let report = self.check_here()?;
                self.check_with_others(report, reply);
            }
            Message::Mounted(id, device, done) => {
                let known = self.sessions.find(id).is_some();
                if known {
                    self.take_mount(id, device)?;
                }
                let _ = done.send(known);
            }
            Message::Volumes(done) => self.volumes_done(done),
            Message::OpenPiece(piece, writes, user, reply) => {
                let _ = reply.send(self.open_piece(piece, writes, user)?);
            }
            Message::Watch(order) => self.mind_watches(order)?,
            Message::Known(id, reply) => {
                let _ = reply.send(self.sessions.find(id).is_some());
            }
            Message::Asked { ticket, message } => self.asked(ticket, message)?,
            Message::Answered { stamp, reply } => self.answered(stamp, &reply)?,
            Message::RemoveBackings { ticket, message } => self.remove_backings(ticket, message)?,
            Message::LeaseAsked { ticket, message } => self.lease_asked(ticket, &message),
            Message::LeaseRenewed(node, lease) => self.lease_renewed(node, lease),
            Message::Revoked(number, answered) => self.revoked(number, answered),
            Message::ReviewSessions(node) => self.review_sessions(node),
            Message::AreThere { ticket, sessions } => self.are_there(ticket, sessions),
            Message::AreSegments { ticket, segments } => self.are_segments(ticket, &segments)?,
            Message::SegmentsGone(gone) => self.segments_gone(&gone),
            Message::EndedElsewhere(node, session) => self.ended_elsewhere(node, session)?,
            Message::Stepped(slot, reply) => self.stepped(slot, reply),
            Message::Mark(ino, done) => self.mark_for_node(ino, done)?,
            Message::Reached(node) => self.reached(node),
            Message::Renumbered(old, new) => {
                if let Some(network) = &mut self.network {
                    network.renumber(old, new);
                }
            }
            Message::Unwelcome(why) => {
                let node = self.network.as_ref().map_or(NodeId::FIRST, |network| network.node);
                return Err(crate::worker::network::unwelcome(node, why));
            }
            Message::Stop => {
                self.forget_mount();
                self.stop = true;
            }
        }
        Ok(())
    }

    /// Checks this node's part of the pool: its report, or why there is none.
    ///
    /// # Errors
    /// Those that end the worker.
    pub(in crate::worker) fn check_here(&mut self) -> Result<Result<Value>> {
        // Orphan records whose backing files are gone would look like damage.
        if self.backing.has_unlinked() {
            self.forget_orphans()?;
        }
        // A damaged shard has no list of volumes; the check says so.
        let of_volumes = self.problems_of_volumes().unwrap_or_default();
        self.commit()?;
        Ok(crate::worker::check::check(self.shard, &self.targets, of_volumes))
    }

    /// A process has ended. Finishes what it left undone.
    pub(in crate::worker) fn end_session(&mut self, id: u64) -> Result<()> {
        let Some(mut session) = self.sessions.remove(id) else { return Ok(()) };
        if self.mount.as_ref().is_some_and(|mount| mount.session == id) {
            self.forget_mount();
        }
        self.count_clients();
        self.store.end(id);
        self.mover_mail.end(id);
        self.end_maker(id)?;
        if let (Some(network), true) = (&self.network, session.is_here()) {
            let nodes = std::mem::take(&mut session.asked_nodes);
            network.commands.give(Command::EndSession(id, nodes));
        }
        self.recorder.forget_session(id);
        let (mut left, mut replaced) = (Vec::new(), Vec::new());
        self.sweep_numbers(session.slots.iter().filter_map(|slot| slot.reserved).collect())?;
        session.take_orphans(&mut left);
        for slot in session.slots.iter_mut() {
            replaced.append(&mut slot.relaid);
            if let Some(ino) = slot.pending_create.take() {
                if let Some(orphan) = self.backing.create_settled(ino) {
                    left.push(orphan);
                }
            }
        }
        if session.noted && !self.remove_in_batch(|batch| batch.forget_session(id))? {
            tracing::warn!("no room to forget a session: the next worker will");
        }
        if !replaced.is_empty() {
            self.backing.sweep(Sweep::Replaced(replaced));
        }
        self.give_to_sweeper(left);
        Ok(())
    }
}
