//! The network thread: executes commands, drives the calls to other nodes, and passes requests of other nodes to the
//! thread that serves them. Which thread runs its rounds, and how it sleeps, is in `handoff.rs`.

mod bulk_transfer;
mod client_buffers;
mod cluster_status;
mod data_requests;
mod flights;
mod join;
mod local_clients;
mod memory_registration;
mod moves;
mod outgoing;
mod registered_ranges;
mod served;
mod serving;
mod state;

use std::collections::BTreeSet;
use std::time::Duration;

use forebay_fabric::{CallEvent, Calls, Sleep};
use forebay_types::limits::SESSIONS_PERIOD_MS;
use forebay_types::{NodeId, Reply, Request};

use super::commands::Command;
use crate::worker::message::Message;
use crate::worker::session_id::node_of_session;
use flights::Flight;
use state::NODE_TIMEOUT;

pub(in crate::worker) use state::{Member, NetworkThread};

/// Clocks that differ by more are logged. A handshake takes less time to arrive.
const CLOCKS_APART_US: i64 = 2_000_000;
/// How often pieces that the network has registered are looked for that are gone.
const DIRECT_REVIEW: Duration = Duration::from_secs(1);
/// Rounds that another thread runs in place of this one.
const HELPS: usize = 4;
/// A timer that expires this much before the sleeping thread wakes anyway needs no wake-up of its own.
const LATE: Duration = Duration::from_millis(2);

/// The result of a round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::worker) enum Round {
    /// There may be more work.
    Busy,
    /// There is no work for so long, unless an event arrives.
    Idle(Duration),
    /// The thread was told to stop, and has left the pool.
    Stopped,
}

impl NetworkThread {
    /// True when there is a command or an event.
    pub(in crate::worker) fn has_work(&mut self) -> bool {
        let order = self.commands.try_recv().ok();
        let found = order.is_some();
        self.backlog.extend(order);
        found || self.has_data_requests() || self.calls.progress() > 0
    }

    /// True when a message was sent to the shard thread since the last call.
    pub(in crate::worker) fn take_told(&mut self) -> bool {
        std::mem::take(&mut self.told)
    }

    /// Begins to sleep. None when there is work.
    pub(in crate::worker) fn falls_asleep(&mut self, next_timeout: Duration) -> Option<Sleep> {
        let sleep = self.calls.falls_asleep(next_timeout);
        self.sleeps_until = sleep.as_ref().map(|sleep| self.calls.now() + sleep.timeout());
        sleep
    }

    /// True while data are transferred. The rounds copy data, so no other thread should run them.
    pub(in crate::worker) fn moves_data(&self) -> bool {
        self.moves.are_under_way()
    }

    /// Runs some rounds in another thread while this one sleeps: that thread has commands, sends them itself, and
    /// handles the events that have arrived. False when this thread must be woken for the rest.
    pub(in crate::worker) fn help(&mut self) -> bool {
        // Rounds copy data, which the other thread should not wait for.
        if self.moves_data() {
            return false;
        }
        (self.helps, self.leaves) = (true, false);
        let is_done = self.help_some();
        self.helps = false;
        is_done && !self.leaves
    }

    fn help_some(&mut self) -> bool {
        for _ in 0..HELPS {
            if self.round() == Round::Stopped {
                self.stopped = true;
                return false;
            }
            if self.calls.may_sleep() {
                let now = self.calls.now();
                let next_timeout = self.removals.next_timeout(now).min(self.renewals.next_timeout(now));
                let timer = self.calls.next_timer().min(now.saturating_add(next_timeout));
                return self.sleeps_until.is_none_or(|until| until <= timer + LATE);
            }
        }
        false
    }

    /// Does the work that there is now, once. Never waits.
    pub(in crate::worker) fn round(&mut self) -> Round {
        if self.stopped {
            return Round::Stopped;
        }
        self.calls.gather();
        let round = self.go_round();
        self.calls.send_gathered();
        round
    }

    /// Serves the data requests that clients of this node have posted. True when there were any.
    pub(in crate::worker) fn serve_data_requests(&mut self) -> bool {
        if self.stopped || !self.has_data_requests() {
            return false;
        }
        self.calls.gather();
        let served = self.take_data_requests();
        self.calls.send_gathered();
        served
    }

    fn go_round(&mut self) -> Round {
        let mut busy = false;
        // A link may be a new one by now: this is known before data are written to eager buffers of the old one.
        while let Some(event) = self.calls.next_event() {
            busy = true;
            self.handle(event);
        }
        let waiting = self.backlog.len();
        for n in 0.. {
            let order = if n < waiting { self.backlog.pop_front() } else { self.commands.try_recv().ok() };
            let Some(order) = order else { break };
            if matches!(order, Command::Stop) {
                self.calls.leave("its daemon stops");
                return Round::Stopped;
            }
            busy |= self.execute(order);
        }
        busy |= self.take_data_requests();
        busy |= self.calls.progress() > 0;
        while let Some(event) = self.calls.next_event() {
            busy = true;
            self.handle(event);
        }
        let now = self.calls.now();
        let due = self.removals.due(now);
        if !due.is_empty() {
            self.remove(&due);
        }
        for node in self.renewals.take_due(now) {
            self.renew_lease(node);
        }
        self.introduce_again();
        self.review_volumes(now);
        busy |= self.retire_some();
        busy |= self.register_some();
        self.end_quarantines(now);
        if now >= self.review_at {
            self.review_at = now + Duration::from_millis(SESSIONS_PERIOD_MS);
            self.tell(Message::ReviewSessions(None));
        }
        if !self.moves.direct.is_empty() && now >= self.moves.direct_review_at {
            self.moves.direct_review_at = now + DIRECT_REVIEW;
            self.drop_gone_pieces();
        }
        if busy {
            return Round::Busy;
        }
        let next_timeout = self.removals.next_timeout(now).min(self.renewals.next_timeout(now));
        Round::Idle(next_timeout.min(Duration::from_secs(1)))
    }

    /// Notes the data of a node that was reached or has joined.
    fn meet(&mut self, node: NodeId, incarnation: u64, address: Option<&[u8]>) {
        let data = Calls::data_of(incarnation);
        let Some(news) = self.met.meet(node, data, address) else { return };
        self.calls.expect_data(node, data);
        // The node replaces another one, whose data are lost.
        let (Some(old), Some(address)) = (news.instead_of, address) else { return };
        if self.calls.add_node(node, address).is_err() {
            return tracing::error!("cannot use the address of node {node}");
        }
        let old = NodeId(old);
        self.introduce_instead(old, node);
        self.removals.hurry(old);
        if let Some(member) = self.members.iter_mut().find(|m| m.node == old) {
            tracing::warn!("node {old} ({}) is now node {node}: what had number {old} is gone", member.name);
            member.node = node;
            self.space_map.renumber(old, node);
            self.tell(Message::Renumbered(old, node));
        }
    }

    /// Executes a command. False when it must wait, and is kept.
    fn execute(&mut self, order: Command) -> bool {
        match order {
            Command::Forward { node, call } => return self.forward(node, call),
            Command::Step { node, stamp, message } => return self.step(node, stamp, message),
            Command::Answer { ticket, reply } => self.answer(&ticket, &reply),
            Command::Serve { ticket, message } => self.serve(ticket, message),
            Command::Attach(session, ring) => self.clients.attach(session, ring),
            Command::ServeClient(call) => return self.serve_client(call),
            Command::AnswerHere { stamp, reply } => self.answered(stamp, Ok(&reply)),
            Command::Remove(orphans) => self.remove(&orphans),
            Command::EndSession(session, nodes) => {
                self.clients.stop_taking(session);
                // Its last requests must not arrive after the message that it has ended.
                if self.asks_for(session) || self.clients.is_served(session) {
                    self.backlog.push_back(Command::EndSession(session, nodes));
                    return false;
                }
                let nodes: BTreeSet<NodeId> = self.clients.detach(session).into_iter().chain(nodes).collect();
                self.retire_buffers(session);
                self.end_served(session);
                // Also state of an earlier worker.
                self.kept.locks.end(session);
                self.kept.groups.end(session);
                self.kept.groups.forget_steps(session);
                self.kept.appended.end(session);
                self.kept.atomics.end(session);
                let me = self.me;
                for node in nodes.into_iter().filter(|node| *node != me) {
                    // A node that is down asks when it is up again.
                    let request = Request::EndSession { session };
                    let _ = self.ask(node, &request, NODE_TIMEOUT, Flight::EndSession);
                }
            }
            Command::EndOthers => {
                let theirs = self.kept.sessions().into_iter();
                let ended = |session: &u64| {
                    node_of_session(*session) == self.me && !self.clients.is_attached(*session)
                };
                let ended: BTreeSet<u64> = theirs.filter(ended).collect();
                ended.into_iter().for_each(|session| self.kept.end(session));
            }
            Command::Moved(moving, result) => self.piece_moved(*moving, result),
            Command::Buffer { session, number, memory } => self.add_buffer(session, number, memory),
            Command::ProgramMemory { session, number, memory, registered } => {
                self.add_program_memory(session, number, memory, registered);
            }
            Command::WithdrawMemory { session, number } => self.withdraw_memory(session, number),
            Command::Mark(ino, done) => self.tell(Message::Mark(ino, done)),
            Command::RenewLease(node) => self.renewals.want(node, self.calls.now()),
            Command::Revocation { node, number, message } => return self.revoke(node, number, message),
            Command::AreThere { ticket, sessions, there } => {
                self.tell_which_are_there(&ticket, &sessions, there)
            }
            Command::Review(node, sessions) => self.review(node, sessions),
            Command::AwayVolumes(volumes) => self.away_volumes.set(&volumes, self.calls.now()),
            Command::ReviewVolumes => self.away_volumes.hurry(self.calls.now()),
            Command::Survey(reply) => self.survey(reply),
            Command::Space { stamp, own } => {
                self.refresh_space_map();
                if let Some(space) = self.space_map.space(self.calls.now(), stamp, own) {
                    self.answered_with(stamp, Ok(Reply::Space(space)));
                }
            }
            Command::Place { stamp, stripe_count, own } => {
                self.refresh_space_map();
                let targets = self.space_map.place(&own, stripe_count);
                self.answered_with(stamp, Ok(Reply::Placed(targets)));
            }
            Command::Stop => {}
        }
        true
    }

    /// Handles an event of the calls to other nodes.
    fn handle(&mut self, event: CallEvent) {
        match event {
            CallEvent::Up { node, incarnation, clock_ahead_us, .. } => {
                self.failures.remove(&node);
                self.moves.taken.drop_grant(node);
                self.saw(node, true);
                self.space_map.found(node);
                if self.starts.insert(node, incarnation).is_some_and(|before| before != incarnation) {
                    self.doubt_moves(node);
                }
                self.meet(node, incarnation, None);
                tracing::info!("node {node} is reached; its clock is {} ms ahead", clock_ahead_us / 1000);
                if clock_ahead_us.abs() > CLOCKS_APART_US {
                    tracing::warn!(
                        "the clock of node {node} is {} s ahead of this node's: times of files differ as much; nothing else \
                         depends on it",
                        clock_ahead_us / 1_000_000
                    );
                }
                self.removals.hurry(node);
                self.tell(Message::Reached(node));
            }
            // The calls have logged it.
            CallEvent::Down { node, failed } => {
                self.moves.taken.drop_grant(node);
                self.saw(node, false);
                self.failures.insert(node, failed.why);
                self.space_map.lost(node);
            }
            CallEvent::Joined { node, incarnation, ref address, .. } => {
                self.meet(node, incarnation, Some(address));
                tracing::info!("node {node} has joined");
                self.tell(Message::ReviewSessions(Some(node)));
            }
            CallEvent::Left { node, incarnation, why } => {
                let now = self.calls.now();
                self.moves.granted.revoke(self.calls.endpoint(), now, node, incarnation);
                self.saw(node, false);
                tracing::info!("node {node} has left: {why}");
            }
            CallEvent::Asked { ticket, body } => self.asked(ticket, &body),
            CallEvent::Answered { call, node, outcome, sent } => self.call_ended(call, node, outcome, sent),
            CallEvent::Moved { token, outcome } => self.transferred(token, outcome),
        }
    }
}
