//! The shard thread: takes requests from the rings in batches, applies them in the open transaction, and answers.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::Arc;

use forebay_data::{Media, NodeTargets};
use forebay_meta::{Batch, Effects, Shard, ShardStatistics};
use forebay_ring::BoardWriter;
use forebay_types::limits::{BATCH_MAX, BATCH_PER_RING, DOORBELL_POLL_MS, MESSAGE_BYTES_MAX};
use forebay_types::{Code, NodeId, Result, Timestamp};
use serde_json::Value;

use super::backing_files::BackingFiles;
use super::coordination::CrossNode;
use super::journal::{Journal, MARK_SESSION};
use super::late_removals::LateRemovals;
use super::leases::Leases;
pub(super) use super::message::Message;
use super::network::{Command, Network};
use super::notifier::MountedKernel;
use super::pipeline::{Pipeline, Taken};
use super::recorder::FlightRecorder;
use super::session::Session;
use super::statistics::Statistics;
use super::stepped::{Moment, Watcher};
use super::sweeper::Sweep;
use super::watches::Watched;
use super::wide::Wide;
use crate::notifier::Starter;

/// So many orphan records are deleted before space is looked at again: they take no more than the largest removal.
const FORGET_AT_ONCE: usize = 8;
/// An open transaction is committed when nobody asked for so long.
const IDLE_COMMIT_MS: u64 = 2;
/// Changes of one transaction: more make it no cheaper, and a crash repeats them.
const CHANGES_MAX: usize = 1024;

/// What a round of the shard thread came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Round {
    /// Requests were served: there may be more.
    Served,
    /// Nobody asks.
    Idle,
    /// It was told to stop.
    Stopped,
}

/// The shard thread's state.
pub(super) struct ShardThread<'a> {
    pub(super) shard: &'a Shard,
    /// The open transaction.
    pub(super) batch: Option<Batch<'a>>,
    pub(super) journal: Journal,
    /// Slots whose last change is not kept in the shard yet: session and slot.
    pub(super) unkept: Vec<(u64, usize)>,
    /// The shard as of the last commit.
    pub(super) committed: ShardStatistics,
    pub(super) targets: Arc<NodeTargets>,
    pub(super) board: BoardWriter,
    pub(super) recorder: FlightRecorder,
    messages: Receiver<Message>,
    /// Messages that were taken out, and not heard yet.
    left: VecDeque<Message>,
    /// For messages to this thread.
    pub(super) to_self: Sender<Message>,
    /// The kernel that has the pool mounted.
    pub(super) mount: Option<MountedKernel>,
    /// By which it is told of changes.
    pub(super) notifiers: Option<Arc<Starter>>,
    /// The directories that programs watch, since the first one.
    pub(super) watched: Option<Watched>,
    /// Backing files that clients may be making, and those that are to go.
    pub(super) backing: BackingFiles,
    pub(super) statistics: Arc<Statistics>,
    pub(super) epoch: u64,
    pub(super) sessions: Vec<Session>,
    /// Those of them that are other nodes'.
    pub(super) remote_sessions: usize,
    /// The way to the other nodes, if there are any.
    pub(super) network: Option<Network>,
    /// Changes over several of them.
    pub(super) cross_node: Option<CrossNode>,
    /// What nodes may believe of each other's directories, if there are others.
    pub(super) leases: Option<Leases>,
    /// The wide directories that it knows.
    pub(super) wide: Wide,
    /// The session that the next batch starts with.
    turn: usize,
    /// Where a request is copied out of its ring.
    scratch: Vec<u8>,
    pub(super) effects: Effects,
    /// Requests that wait until clients' late removals are done.
    pub(super) late: LateRemovals,
    pub(super) pipeline: Pipeline,
    /// Changes in the open transaction.
    pub(super) uncommitted: usize,
    /// What the time is.
    pub(super) clock: fn() -> Timestamp,
    /// Told where the thread is, so that a simulation can kill it there.
    pub(super) watcher: Option<Watcher>,
    stop: bool,
}

impl<'a> ShardThread<'a> {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn new(
        shard: &'a Shard,
        targets: Arc<NodeTargets>,
        board: BoardWriter,
        recorder: FlightRecorder,
        journal: Journal,
        (to_self, messages): (Sender<Message>, Receiver<Message>),
        sweeper: Sender<Sweep>,
        statistics: Arc<Statistics>,
        epoch: u64,
        mut network: Option<Network>,
        new: bool,
    ) -> Result<ShardThread<'a>> {
        if let Some(network) = &mut network {
            network.commands = network.commands.without_waking();
        }
        let steps = match &network {
            Some(network) => Some(CrossNode::new(network.node)?),
            None => None,
        };
        let leases = network.as_ref().filter(|n| n.nodes > 1).map(|_| Leases::new(new));
        Ok(ShardThread {
            shard,
            batch: None,
            journal,
            unkept: Vec::new(),
            committed: shard.statistics()?,
            targets,
            board,
            recorder,
            messages,
            left: VecDeque::new(),
            to_self,
            mount: None,
            notifiers: None,
            watched: None,
            backing: BackingFiles::new(sweeper),
            statistics,
            epoch,
            sessions: Vec::new(),
            remote_sessions: 0,
            network,
            cross_node: steps,
            leases,
            wide: Wide::default(),
            turn: 0,
            effects: Effects::new(),
            late: LateRemovals::default(),
            pipeline: Pipeline::new(),
            scratch: vec![0; MESSAGE_BYTES_MAX],
            uncommitted: 0,
            clock: super::now,
            watcher: None,
            stop: false,
        })
    }

    /// Tells the watcher, if there is one, where this is.
    ///
    /// # Errors
    /// The watcher's, which end the worker.
    #[inline]
    pub(super) fn passes(&mut self, moment: Moment) -> Result<()> {
        match &mut self.watcher {
            Some(watcher) => watcher(moment),
            None => Ok(()),
        }
    }

    /// The open transaction, begun if there is none.
    pub(super) fn batch(&mut self) -> Result<&mut Batch<'a>> {
        if self.batch.is_none() {
            self.batch = Some(self.shard.begin()?);
        }
        match &mut self.batch {
            Some(batch) => Ok(batch),
            None => unreachable!("begun above"),
        }
    }

    /// Commits the open transaction; the journal is empty then.
    ///
    /// # Errors
    /// The worker must end: what is acknowledged is in the journal, and the next one tries again.
    pub(super) fn commit(&mut self) -> Result<()> {
        let Some(mut batch) = self.batch.take() else { return Ok(()) };
        let (mut kept, mut refused) = (Vec::new(), Vec::new());
        for (session, slot) in self.unkept.drain(..) {
            let Some(session) = self.sessions.iter_mut().find(|s| s.id == session) else { continue };
            let state = &mut session.slots[slot];
            let (seq, reply) = &state.last_change;
            super::session::encode_kept(state.reserved, reply, &mut kept);
            let noted = if session.noted { Ok(()) } else { batch.add_session(session.id) };
            session.noted |= noted.is_ok();
            if let Err(e) = noted.and_then(|()| batch.keep_reply(session.id, slot as u8, *seq, &kept)) {
                // Without it a crash between here and the slot's next request would repeat the change.
                tracing::warn!("{e}");
                refused.push((session.id, slot));
            } else {
                state.unkept = false;
            }
        }
        self.unkept = refused;
        if !self.journal.is_empty() {
            batch.keep_reply(MARK_SESSION, 0, self.journal.last(), &[])?;
        }
        self.passes(Moment::Committing)?;
        batch.commit()?;
        self.passes(Moment::Committed)?;
        self.journal.clear();
        self.uncommitted = 0;
        self.committed = self.shard.statistics()?;
        Statistics::add(&self.statistics.commits, 1);
        Ok(())
    }

    /// What there is to do now, once: messages, then a batch of requests.
    pub(super) fn round(&mut self) -> Result<Round> {
        while let Some(message) = self.left.pop_front().or_else(|| self.messages.try_recv().ok()) {
            self.hear(message)?;
        }
        self.serve_what_waits()
    }

    /// The same in the network thread's hands: messages from the network, and requests. What else there is may take long, and
    /// is left.
    pub(super) fn round_for_network(&mut self) -> Result<Round> {
        while let Some(message) = self.left.pop_front().or_else(|| self.messages.try_recv().ok()) {
            if !message.is_of_network() {
                self.left.push_front(message);
                break;
            }
            self.hear(message)?;
        }
        self.serve_what_waits()
    }

    /// True when there is a message or a request.
    #[inline]
    pub(super) fn has_work(&mut self) -> bool {
        self.left.extend(self.messages.try_recv().ok());
        self.has_left()
            || self.has_requests_for_space()
            || self.sessions.iter().any(|s| s.door.has_pending())
            || self.mount.as_ref().is_some_and(MountedKernel::has_news)
    }

    /// True when a message waits for the shard thread itself.
    pub(super) fn has_left(&self) -> bool {
        !self.left.is_empty()
    }

    fn serve_what_waits(&mut self) -> Result<Round> {
        if self.stop {
            self.commit()?;
            return Ok(Round::Stopped);
        }
        self.acknowledge_told();
        self.acknowledge_late();
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

    /// What is done while nobody asks; true when there may be more. `long` says that nobody has asked for a moment: then the
    /// transaction is committed.
    pub(super) fn rest(&mut self, long: bool) -> Result<bool> {
        if self.backing.has_unlinked() && self.forget_orphans()? {
            return Ok(true);
        }
        if long {
            self.sweep_late();
            self.backing.sweep_together();
        }
        if long && self.batch.is_some() {
            self.commit()?;
        }
        if long && self.leases.is_some() {
            self.free_ended_leases();
        }
        Ok(false)
    }

    /// Milliseconds until something is to be done though nobody asks, when nobody has for so many rounds.
    pub(super) fn next_timeout_ms(&self, idle_rounds: u32) -> u64 {
        // After a moment the poll by timer, there for scribbled doorbells, slows down.
        let timeout = match idle_rounds {
            0 | 1 => IDLE_COMMIT_MS,
            2..20 => DOORBELL_POLL_MS,
            _ => 10 * DOORBELL_POLL_MS,
        };
        let held = self.mount.as_ref().and_then(MountedKernel::next_timeout);
        let timeout = held.map_or(timeout, |left| timeout.min(left.as_millis() as u64 + 1));
        let steps = self.cross_node.as_ref().map(|steps| steps.next_timeout().as_millis().min(1000) as u64);
        let timeout = steps.map_or(timeout, |left| timeout.min(left + 1));
        let leased = self.leases.as_ref().and_then(Leases::next_timeout_ms);
        leased.map_or(timeout, |left| timeout.min(left))
    }

    /// Takes a batch: calls that are served again, then from every ring in turn, a bounded number each, starting with another ring
    /// each time.
    fn take_requests(&mut self) {
        let most = if self.recorder.has_suspects() { 1 } else { BATCH_MAX };
        while self.pipeline.taken.len() < most {
            let Some(call) = self.cross_node.as_mut().and_then(CrossNode::next_anew) else { break };
            // One that its client has given up meanwhile is not done any more.
            let client = call.client;
            let asks = |s: &Session| s.id == client.session && s.is_waiting(client.slot, client.seq);
            if let Some(session) = self.sessions.iter().position(asks) {
                self.pipeline.taken.push_back(Taken { session, client, call: Ok(call) });
            }
        }
        self.take_requests_for_space(most);
        let n = self.sessions.len();
        for k in 0..n {
            let i = (self.turn + k) % n;
            let room = most.saturating_sub(self.pipeline.taken.len());
            if room == 0 {
                self.turn = i;
                return;
            }
            let Session { id, door, .. } = &self.sessions[i];
            let mut bits = door.take_pending(room.min(BATCH_PER_RING));
            while bits != 0 {
                let slot = bits.trailing_zeros() as usize;
                bits &= bits - 1;
                if let Some((client, call)) = door.take(*id, slot, &mut self.scratch) {
                    self.pipeline.taken.push_back(Taken { session: i, client, call });
                }
            }
        }
        if n > 0 {
            self.turn = (self.turn + 1) % n;
        }
    }

    /// Removes something in the open transaction, or in a fresh one if a long one has no room left. False when a full
    /// medium leaves none in that either: it is for another time.
    pub(super) fn remove_in_batch(&mut self, remove: impl Fn(&mut Batch<'_>) -> Result<()>) -> Result<bool> {
        if self.must_commit() {
            self.commit()?;
        }
        let mut removed = remove(self.batch()?);
        if removed.as_ref().is_err_and(|e| e.code == Code::NoSpace) {
            self.commit()?;
            removed = remove(self.batch()?);
        }
        match removed {
            Ok(()) => Ok(true),
            Err(e) if e.code == Code::NoSpace => {
                tracing::debug!("{e}");
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }

    /// Deletes the records of orphans whose backing files are gone, as far as there is room to; whether any went.
    pub(super) fn forget_orphans(&mut self) -> Result<bool> {
        let inos = self.backing.take_unlinked();
        for (i, some) in inos.chunks(FORGET_AT_ONCE).enumerate() {
            if !self.remove_in_batch(|batch| batch.remove_orphans(some))? {
                self.backing.unlinked(inos[i * FORGET_AT_ONCE..].iter().copied());
                return Ok(i > 0);
            }
        }
        Ok(true)
    }

    /// True when the open transaction must not grow.
    pub(super) fn must_commit(&self) -> bool {
        self.uncommitted >= CHANGES_MAX
            || self.journal.is_full()
            || self.batch.as_ref().is_some_and(Batch::is_spent)
    }

    fn hear(&mut self, message: Message) -> Result<()> {
        match message {
            Message::Attached(session) => {
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
            Message::Check(reply) => {
                let report = self.check_here()?;
                self.check_with_others(report, reply);
            }
            Message::Mounted(id, device, done) => {
                let known = self.sessions.iter().any(|s| s.id == id);
                if known {
                    self.take_mount(id, device)?;
                }
                let _ = done.send(known);
            }
            Message::Watch(order) => self.mind_watches(order)?,
            Message::Known(id, reply) => {
                let _ = reply.send(self.sessions.iter().any(|s| s.id == id));
            }
            Message::Asked { ticket, message } => self.asked(ticket, message)?,
            Message::Answered { stamp, reply } => self.answered(stamp, &reply)?,
            Message::RemoveBackings { ticket, message } => self.remove_backings(ticket, message)?,
            Message::LeaseAsked { ticket, message } => self.lease_asked(ticket, &message),
            Message::LeaseRenewed(node, lease) => self.lease_renewed(node, lease),
            Message::Revoked(number, answered) => self.revoked(number, answered),
            Message::ReviewSessions(node) => self.review_sessions(node),
            Message::AreThere { ticket, sessions } => self.are_there(ticket, sessions),
            Message::EndedElsewhere(node, session) => self.ended_elsewhere(node, session)?,
            Message::Stepped(slot, reply) => self.stepped(slot, reply),
            Message::Reached(node) => self.reached(node),
            Message::Renumbered(old, new) => {
                if let Some(network) = &mut self.network {
                    network.renumber(old, new);
                }
            }
            Message::Unwelcome(why) => {
                let node = self.network.as_ref().map_or(NodeId::FIRST, |network| network.node);
                return Err(super::network::unwelcome(node, why));
            }
            Message::Stop => {
                self.forget_mount();
                self.stop = true;
            }
        }
        Ok(())
    }

    /// Checks this node's part: what is there, or why that cannot be told.
    ///
    /// # Errors
    /// What ends the worker.
    pub(super) fn check_here(&mut self) -> Result<Result<Value>> {
        // What is swept and not yet forgotten would look like damage.
        if self.backing.has_unlinked() {
            self.forget_orphans()?;
        }
        self.commit()?;
        Ok(super::check::check(self.shard, &self.targets))
    }

    pub(super) fn count_clients(&self) {
        let here = self.sessions.len() - self.remote_sessions;
        self.statistics.clients.store(here as u64, Ordering::Relaxed);
    }

    /// A process is gone: what it left half done is finished.
    pub(super) fn end_session(&mut self, id: u64) -> Result<()> {
        let Some(i) = self.sessions.iter().position(|s| s.id == id) else { return Ok(()) };
        if self.mount.as_ref().is_some_and(|mount| mount.session == id) {
            self.forget_mount();
        }
        let mut session = self.sessions.swap_remove(i);
        self.remote_sessions -= usize::from(!session.is_here());
        self.count_clients();
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

    pub(super) fn status(&self) -> Value {
        let space = self.targets.space().unwrap_or_default();
        let s = &self.committed;
        serde_json::json!({
            "used_bytes": space.total_bytes.saturating_sub(space.free_bytes),
            "free_bytes": space.free_bytes,
            "target_spaces": self.targets.for_files().iter().map(|target| {
                let space = target.space().unwrap_or_default();
                serde_json::json!({ "total_bytes": space.total_bytes, "free_bytes": space.free_bytes })
            }).collect::<Vec<_>>(),
            "clients": self.sessions.len() - self.remote_sessions,
            "ring": self.statistics.to_json(),
            "board": { "bytes": self.board.bytes(), "evicted": self.board.evicted() },
            "inodes": s.inodes,
            "watched_directories": self.watched_directories(),
            "shard": { "entries": s.entries, "orphans": s.orphans, "bytes": s.bytes },
        })
    }
}
