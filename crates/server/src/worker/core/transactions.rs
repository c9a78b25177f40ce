//! Connects cross-node transactions (`coordination.rs`): executes their acts on this node's shard, and parks calls that
//! meet a hold.

use super::state::ShardThread;
use crate::worker::acks::ReplyBuf;
use crate::worker::call::Call;
use crate::worker::coordination::end_of_waiting;
use crate::worker::coordination::is_said_by;
use crate::worker::coordination::step_invalidations;
use crate::worker::coordination::Interception;
use crate::worker::coordination::Late;
use crate::worker::coordination::Parked;
use crate::worker::coordination::OF_CHECK;
use crate::worker::coordination::OF_LISTING;
use crate::worker::coordination::OF_MARK;
use crate::worker::coordination::QUESTION_BITS;
use crate::worker::cross_check::CrossCheck;
use crate::worker::network::Command;
use crate::worker::notifier::{HeldReply, Invalidation};
use crate::worker::session_id::{is_of_daemon, node_of_session, session_on};
use crate::worker::wide::Redirect;
use forebay_meta::{Act, Client, Delivery, Mark};
use forebay_types::limits::RING_SLOTS;
use forebay_types::{
    Answer, Caller, Class, Code, Ino, NodeId, Outcome, Refusal, Reply, Request, Result, Timestamp,
};
use forebay_wire::Stamp;
use serde_json::Value;
use std::sync::mpsc::Sender;

impl ShardThread<'_> {
    /// Checks whether a call is a step, needs several nodes, or meets a hold.
    pub(in crate::worker) fn intercept(&mut self, session: usize, call: &Call) -> Result<Interception> {
        self.batch()?;
        let (Some(batch), Some(cross_node)) = (&mut self.batch, &mut self.cross_node) else {
            return Ok(Interception::No);
        };
        let (client, request) = (call.client, call.request());
        if request.class() == Class::Step {
            let is_daemon = !self.sessions[session].is_here() && is_of_daemon(client.session);
            if !is_daemon || !is_said_by(request, node_of_session(client.session)) {
                return Ok(Interception::Refused(Code::NotPermitted));
            }
            cross_node.moved |= matches!(request, Request::Prepare { .. } | Request::Finish { .. });
            return Ok(match *request {
                Request::AskOutcome { tx } if cross_node.transactions.is_undecided(tx) => {
                    Interception::Outcome(Outcome::Undecided)
                }
                _ => Interception::No,
            });
        }
        let nodes = match (&self.network, request) {
            (
                Some(network),
                Request::SetWidth { .. } | Request::MakeDirectory { .. } | Request::MakeDirectoryAt { .. },
            ) => network.homes(),
            _ => Vec::new(),
        };
        if batch.must_wait(request) {
            let parked = Parked { call: call.clone(), since: cross_node.first_asked(client) };
            if cross_node.now() < end_of_waiting(&parked) {
                cross_node.parked.push(parked);
                return Ok(Interception::Later);
            }
            if matches!(request, Request::ReadDirectory { .. }) {
                return Ok(Interception::No); // as it is
            }
            tracing::warn!(
                "refused {request:?}: a cross-node transaction holds its name, and the transaction's nodes do not answer"
            );
            return Ok(Interception::Refused(Code::Io));
        }
        let plan = batch.plan(request, &nodes);
        if plan == Err(Code::NotListed) && self.wait_for_listing(call) {
            return Ok(Interception::Later);
        }
        let Some(cross_node) = &mut self.cross_node else { return Ok(Interception::No) };
        Ok(match plan {
            Ok(None) => {
                if !cross_node.since.is_empty() {
                    cross_node.since.remove(&(client.session, client.slot));
                }
                Interception::No
            }
            Ok(Some(plan)) => {
                let (since, now) = (cross_node.first_asked(client), cross_node.now());
                cross_node.transactions.begin(client, call.caller(), call.bytes(), plan, since, now);
                if self.sessions[session].is_here() {
                    self.sessions[session].remember_sent(call);
                }
                Interception::Later
            }
            Err(code) => {
                cross_node.first_asked(client);
                Interception::Refused(code)
            }
        })
    }

    /// Begins the deliveries that a change owes other nodes. True when its reply waits for them.
    pub(in crate::worker) fn owes(&mut self, client: Client, reply: &Reply<'_>, before: Mark) -> bool {
        let deliveries = self.effects.since(before).deliveries();
        let Some(cross_node) = self.cross_node.as_mut().filter(|_| !deliveries.is_empty()) else {
            return false;
        };
        let drops: Vec<Delivery> =
            deliveries.iter().copied().filter(|d| matches!(d, Delivery::DropLink(..))).collect();
        let waits = !drops.is_empty() && !is_of_daemon(client.session);
        if let (true, Some(reply)) = (waits, reply.owned()) {
            cross_node.transactions.answer_after(client, reply, &drops);
        }
        let now = cross_node.now();
        cross_node.transactions.deliver(deliveries, now);
        waits
    }

    /// Keeps the invalidations that are written before such a reply.
    pub(in crate::worker) fn note_for_late_answer(
        &mut self,
        client: Client,
        invalidations: Vec<Invalidation>,
    ) {
        if let Some(cross_node) = self.cross_node.as_mut().filter(|_| !invalidations.is_empty()) {
            cross_node.late.insert((client.session, client.slot), Late { invalidations, wait: None });
        }
    }

    /// After a crash: a client retries a change whose reply is known. The deliveries that the last worker left may
    /// belong to this change, so the reply waits until each was tried. False when there are none.
    pub(in crate::worker) fn answer_when_delivered(
        &mut self,
        call: &Call,
        reply: &Reply<'_>,
        invalidations: &[Invalidation],
    ) -> bool {
        let request = call.request();
        let Some(cross_node) = self.cross_node.as_mut().filter(|_| request.may_take_several_nodes()) else {
            return false;
        };
        let Some(reply) = reply.owned() else { return false };
        if !cross_node.transactions.answer_after_inherited(call.client, reply) {
            return false;
        }
        let wait = self.leases.as_ref().and_then(|leases| leases.caution(request));
        let Client { session, slot, .. } = call.client;
        cross_node.late.insert((session, slot), Late { invalidations: invalidations.to_vec(), wait });
        true
    }

    /// At the start: finishes what the last worker left.
    pub(in crate::worker) fn resume_steps(&mut self) -> Result<()> {
        if self.cross_node.is_none() {
            return Ok(());
        }
        let batch = self.batch()?;
        let (prepared, deliveries) = (batch.prepared(), batch.deliveries()?);
        if let Some(cross_node) = &mut self.cross_node {
            if !prepared.is_empty() || !deliveries.is_empty() {
                tracing::info!(
                    "{} cross-node transactions are in doubt, {} deliveries are pending",
                    prepared.len(),
                    deliveries.len()
                );
            }
            let now = cross_node.now();
            cross_node.transactions.resume(&prepared, &deliveries, now);
        }
        Ok(())
    }

    /// The answer of another node, or its failure.
    pub(in crate::worker) fn stepped(&mut self, slot: usize, reply: std::result::Result<Vec<u8>, Code>) {
        let Some(cross_node) = &mut self.cross_node else { return };
        let Some(flight) = cross_node.flying.remove(&slot) else { return };
        cross_node.free |= 1 << slot;
        let now = cross_node.now();
        let answer = reply.as_deref().map(Reply::decode_answer).map_err(|code| *code);
        if flight & OF_CHECK != 0 {
            let number = (flight & !OF_CHECK) >> QUESTION_BITS;
            let question = flight & ((1 << QUESTION_BITS) - 1);
            if let Some(check) = cross_node.checks.get_mut(&number) {
                let reply = answer.and_then(|answer| answer.map_err(|refusal| refusal.code()));
                if check.answered(question, reply) && check.conclude(now) {
                    cross_node.checks.remove(&number);
                }
            }
            return;
        }
        if flight & OF_MARK != 0 {
            let answer = answer.unwrap_or_else(|code| Err(code.into()));
            return self.marked(flight, &answer);
        }
        if flight & OF_LISTING != 0 {
            let answer = answer.unwrap_or_else(|code| Err(code.into()));
            return self.told_ahead(flight & !OF_LISTING, &answer);
        }
        cross_node.transactions.answered(flight, answer, now);
    }

    /// The check of this node is done: continues on the other nodes, if there are any.
    pub(in crate::worker) fn check_with_others(
        &mut self,
        report: Result<Value>,
        reply: Sender<Result<Value>>,
    ) {
        match (&self.network, &mut self.cross_node, report) {
            (Some(network), Some(cross_node), Ok(report)) if !network.others.is_empty() => {
                let check = CrossCheck::new(network.node, network.others.clone(), report, reply);
                cross_node.checks_begun += 1;
                cross_node.checks.insert(cross_node.checks_begun, check);
            }
            (_, _, report) => {
                let _ = reply.send(report);
            }
        }
    }

    /// True while a check searches the whole shard for references to other nodes.
    pub(in crate::worker) fn is_checking(&self) -> bool {
        self.cross_node.as_ref().is_some_and(|cross_node| !cross_node.checks.is_empty())
    }

    /// Begins the searches that are due, and sends the questions of checks.
    fn drive_checks(&mut self) -> Result<()> {
        let Some(cross_node) = &mut self.cross_node else { return Ok(()) };
        let now = cross_node.now();
        let due: Vec<u64> = cross_node
            .checks
            .iter()
            .filter(|(_, c)| c.next_at.is_some_and(|at| at <= now))
            .map(|(n, _)| *n)
            .collect();
        for number in due {
            let beyond = self.batch()?.beyond();
            let Some(cross_node) = &mut self.cross_node else { return Ok(()) };
            match (beyond, cross_node.checks.get_mut(&number)) {
                (Ok(beyond), Some(check)) => check.begin(beyond),
                // The local report names the damage already.
                (Err(_), Some(check)) => {
                    check.give_up();
                    cross_node.checks.remove(&number);
                }
                (_, None) => {}
            }
        }
        let Some(cross_node) = &mut self.cross_node else { return Ok(()) };
        for (number, check) in &mut cross_node.checks {
            while let Some((question, node, message)) = check.next_question() {
                let flight = OF_CHECK | number << QUESTION_BITS | question;
                cross_node.waiting.push_back((flight, node, message));
            }
        }
        Ok(())
    }

    /// A node can be reached again.
    pub(in crate::worker) fn reached(&mut self, node: NodeId) {
        if let Some(cross_node) = &mut self.cross_node {
            let now = cross_node.now();
            cross_node.transactions.hurry(node, now);
        }
    }

    /// Executes the acts that are due.
    pub(in crate::worker) fn drive_steps(&mut self) -> Result<()> {
        if self.is_checking() {
            self.drive_checks()?;
        }
        loop {
            let Some(cross_node) = &mut self.cross_node else { return Ok(()) };
            let now = cross_node.now();
            if std::mem::take(&mut cross_node.moved) {
                let prepared = self.batch()?.prepared();
                let Some(cross_node) = &mut self.cross_node else { return Ok(()) };
                cross_node.transactions.note_prepared(&prepared, now);
                cross_node.anew.extend(cross_node.parked.drain(..));
            }
            let Some(cross_node) = &mut self.cross_node else { return Ok(()) };
            let late: Vec<_> =
                cross_node.parked.extract_if(.., |parked| end_of_waiting(parked) <= now).collect();
            cross_node.anew.extend(late);
            if cross_node.transactions.next_timeout(now).is_zero() {
                cross_node.transactions.tick(now);
            }
            while cross_node.free != 0 {
                let Some((flight, node, message)) = cross_node.waiting.pop_front() else { break };
                let slot = cross_node.free.trailing_zeros() as usize;
                debug_assert!(slot < RING_SLOTS);
                cross_node.free &= !(1 << slot);
                cross_node.flying.insert(slot, flight);
                cross_node.sequence += 1;
                let stamp =
                    Stamp { session: cross_node.session, slot: slot as u16, sequence: cross_node.sequence };
                if let Some(network) = &self.network {
                    network.commands.give(Command::Step { node, stamp, message });
                }
            }
            let Some(act) = cross_node.transactions.next_act() else { return Ok(()) };
            match act {
                Act::Ask { flight, node, message } => cross_node.waiting.push_back((flight, node, message)),
                Act::Again { client, message, since } => match Call::parse(client, message) {
                    Ok(call) => cross_node.anew.push_back(Parked { call, since }),
                    Err(code) => self.answer_late(client, &Err(code.into())),
                },
                Act::Settle(delivery) => {
                    // If this fails, the next worker makes the delivery again.
                    self.remove_in_batch(|batch| batch.settle(&delivery))?;
                    self.uncommitted += 1;
                }
                Act::Answer { client, answer } => self.answer_late(client, &answer),
                Act::Local { flight, message, client } => self.step_here(flight, message, client)?,
            }
        }
    }

    /// Answers a call after the end of its batch.
    fn answer_late(&mut self, client: Client, answer: &Answer<'_>) {
        let mut reply = ReplyBuf::encode(answer);
        if let Some(i) = self.sessions.index_of(client.session) {
            match self.redirect(i, &client, None, answer) {
                Some(Redirect::Ask(call)) => return self.serve_anew(call),
                Some(Redirect::Answer(other)) => reply = other,
                Some(Redirect::Wait) => return,
                None => {}
            }
        }
        let reply = reply.bytes;
        let Some(cross_node) = &mut self.cross_node else { return };
        let Late { invalidations, wait } =
            cross_node.late.remove(&(client.session, client.slot)).unwrap_or_default();
        let held_reply = || HeldReply::Client { client, reply: reply.clone() };
        let is_mounts = self.mount.as_ref().is_none_or(|mount| mount.session == client.session);
        let invalidations = if is_mounts { Vec::new() } else { invalidations };
        match (&mut self.leases, &mut self.mount, wait) {
            (Some(leases), _, Some(wait)) => leases.hold(held_reply(), invalidations, wait),
            (_, Some(mount), None) if !invalidations.is_empty() => mount.hold(held_reply(), invalidations),
            _ => self.answer_client(client, &reply),
        }
    }

    /// Answers a call, if its client still waits for it.
    pub(in crate::worker) fn answer_client(&self, client: Client, reply: &[u8]) {
        if let Some(session) = self.sessions.find(client.session) {
            session.answer_if_waiting(client.slot, client.seq, reply);
        }
    }

    /// Marks a file dirty that this node writes for another node. Its home may be any node.
    pub(in crate::worker) fn mark_for_node(
        &mut self,
        ino: Ino,
        done: Sender<std::result::Result<(), Code>>,
    ) -> Result<()> {
        let here = self.here();
        let mut message = [0; 64];
        let encoded = Request::MarkDirty { ino }.encode(Caller { uid: 0, gid: 0 }, &mut message);
        let (Some(cross_node), Ok(n)) = (&mut self.cross_node, encoded) else { return Ok(()) };
        cross_node.marks_begun += 1;
        let flight = OF_MARK | cross_node.marks_begun;
        cross_node.marks.insert(flight, done);
        if ino.birth_node() == here {
            return self.step_here(flight, message[..n].to_vec(), None);
        }
        cross_node.waiting.push_back((flight, ino.birth_node(), message[..n].to_vec()));
        Ok(())
    }

    fn marked(&mut self, flight: u64, answer: &Answer<'_>) {
        let marked = match answer {
            Ok(Reply::Entry(entry)) if entry.attr.is_resident() => Ok(()),
            Ok(Reply::Entry(_)) => Err(Code::Stale),
            Ok(_) => Err(Code::Malformed),
            Err(refusal) => Err(refusal.code()),
        };
        let done = self.cross_node.as_mut().and_then(|cross_node| cross_node.marks.remove(&flight));
        // The I/O worker may have stopped waiting.
        let _ = done.map(|done| done.send(marked));
    }

    /// A step on this node is done, and its invalidations are written.
    pub(in crate::worker) fn step_told(&mut self, flight: u64, answer: Answer<'_>) {
        if flight & OF_MARK != 0 {
            return self.marked(flight, &answer);
        }
        if let Some(cross_node) = &mut self.cross_node {
            let now = cross_node.now();
            cross_node.transactions.answered(flight, Ok(answer), now);
        }
    }

    /// Applies a step to this node's shard.
    fn step_here(&mut self, flight: u64, message: Vec<u8>, client: Option<Client>) -> Result<()> {
        if self.must_commit() {
            self.commit()?;
        }
        // The session of no process: its kept replies are dropped at the next start.
        let nobody = Client { session: session_on(self.here(), 0), slot: 0, seq: 0 };
        let step = match Call::parse(client.unwrap_or(nobody), message) {
            Ok(step) => step,
            Err(code) => {
                self.step_told(flight, Err(code.into()));
                return Ok(());
            }
        };
        let now = (self.clock)();
        let mut answer = self.apply_step(&step, now)?;
        if matches!(answer, Err(Refusal::Code(Code::NoSpace))) && self.uncommitted > 0 {
            self.commit()?;
            answer = self.apply_step(&step, now)?;
        }
        self.follow_step(flight, &step, now, answer);
        Ok(())
    }

    /// Handles the answer of a step as the pipeline does: journal, orphans, board, deliveries, leases, invalidations.
    fn follow_step(&mut self, flight: u64, step: &Call, now: Timestamp, answer: Answer<'static>) {
        let request = step.request();
        let (mut invalidations, mut wait) = (Vec::new(), None);
        if let Ok(reply) = answer {
            if request.changes() {
                self.uncommitted += 1;
                self.journal_step(step, now, &reply);
            }
            // A step on behalf of the mount's own session needs no invalidations. A step without a client does.
            if self.mount.as_ref().is_some_and(|mount| mount.session != step.client.session) {
                invalidations = step_invalidations(request, self.effects.since(Mark::default()));
            }
            if let Some(watched) = &mut self.watched {
                watched.note(request, self.effects.since(Mark::default()));
            }
            for &(ino, layout) in self.effects.orphaned() {
                if self.backing.is_pending(ino) {
                    self.backing.unlinked_while_pending(ino, layout);
                } else {
                    self.backing.sweep_soon((ino, layout));
                }
            }
            wait = self.revoke(request, Mark::default());
        }
        self.publish();
        if let Some(cross_node) = &mut self.cross_node {
            cross_node.moved |= matches!(request, Request::Prepare { .. } | Request::Finish { .. });
            let now = cross_node.now();
            cross_node.transactions.deliver(self.effects.deliveries(), now);
        }
        match (answer, &mut self.leases, &mut self.mount, wait) {
            (Ok(reply), Some(leases), _, Some(wait)) => {
                leases.hold(HeldReply::Step { flight, reply: Box::new(reply) }, invalidations, wait);
            }
            (Ok(reply), _, Some(mount), None) if !invalidations.is_empty() => {
                mount.hold(HeldReply::Step { flight, reply: Box::new(reply) }, invalidations);
            }
            _ => self.step_told(flight, answer),
        }
    }

    fn apply_step(&mut self, step: &Call, now: Timestamp) -> Result<Answer<'static>> {
        self.batch()?;
        self.effects.clear();
        let Some(batch) = &mut self.batch else { unreachable!("begun above") };
        let answer = batch.apply(step.caller(), step.request(), now, &mut self.effects, &mut []);
        // No step's reply borrows memory.
        Ok(answer.and_then(|reply| reply.owned().ok_or(Refusal::Code(Code::Malformed))))
    }

    /// Journals a step. A decision is its client's change, so its reply is kept.
    fn journal_step(&mut self, step: &Call, now: Timestamp, reply: &Reply<'_>) {
        let Client { session, slot, seq } = step.client;
        let decides = matches!(step.request(), Request::Decide { .. });
        let client = self.sessions.find_mut(session).filter(|_| decides);
        let Some(client) = client else {
            let nobody = session_on(self.here(), 0);
            return self.journal.append(nobody, 0, 0, now, step.bytes());
        };
        self.journal.append(session, slot, seq, now, step.bytes());
        let state = &mut client.slots[slot];
        state.last_change = (seq, ReplyBuf::encode(&Ok(*reply)).bytes);
        if !state.unkept {
            state.unkept = true;
            self.unkept.push((session, slot));
        }
    }

    /// This node.
    fn here(&self) -> NodeId {
        self.network.as_ref().map_or(NodeId::FIRST, |network| network.node)
    }
}
