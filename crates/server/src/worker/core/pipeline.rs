//! The pipeline: a batch of calls, from taking them to their acknowledgements. A stage is a function of its name,
//! except that `lead_to_parts` runs before `move_on`, `apply` journals too, and `conclude` observes:
//!
//! ```text
//! take ─► move on ─► route ─► apply ─► journal ─► observe ─► publish ─► acknowledge ─► settle
//!                      └─► away: another node, network thread, transaction; parked behind a hold or removals
//! ```
//! `take` is [`ShardThread::take_requests`]. A call that went away is taken again later, or its reply arrives on its
//! own.

use std::ops::Range;

use forebay_meta::{Client, Mark};
use forebay_types::{Answer, Class, Code, Ino, Outcome, Refusal, Reply, Request, Result, Timestamp};

use super::state::ShardThread;
use crate::worker::acks::{Ack, ReplyBuf};
use crate::worker::backing_files::layout_of_number;
use crate::worker::batch::Taken;
use crate::worker::call::Call;
use crate::worker::coordination::{step_invalidations, Interception};
use crate::worker::moments::Moment;
use crate::worker::network::all_here;
use crate::worker::notifier::{invalidations_of, HeldReply, Invalidation};
use crate::worker::own_answers;
use crate::worker::recorder::InFlight;
use crate::worker::session::{created, relaid, reserve_behind};
use crate::worker::session_id::is_of_daemon;
use crate::worker::statistics::Statistics;
use crate::worker::sweeper::Sweep;
use crate::worker::wide::Redirect;

/// Imported names from which on nothing is served before the replies.
const IMPORTED_MANY: usize = 32;

/// The route of a call.
enum Route {
    /// To this node's shard.
    Here,
    /// It is refused.
    Refuse(Refusal),
    /// The answer to `AskOutcome` for a transaction that is undecided.
    Outcome(Outcome),
    /// It went away: its reply follows later.
    Away,
    /// It waits, and is taken again.
    Parked,
}

impl ShardThread<'_> {
    /// Serves the calls that were taken. Publishes the batch when its replies fill their memory, when many names were
    /// imported, which takes as long as many other calls, and at its end.
    pub(in crate::worker) fn serve_batch(&mut self) -> Result<()> {
        while !self.pipeline.taken.is_empty() {
            self.effects.clear();
            (self.pipeline.served, self.pipeline.now) = (0, None);
            while self.pipeline.acks.has_room() && self.effects.found().len() < IMPORTED_MANY {
                let Some(taken) = self.pipeline.taken.pop_front() else { break };
                self.serve(taken)?;
                self.pipeline.served += 1;
            }
            self.publish();
            self.passes(Moment::Published)?;
            self.acknowledge();
            self.passes(Moment::Answered)?;
            self.settle()?;
        }
        Ok(())
    }

    /// Takes one call through the stages before the publication.
    fn serve(&mut self, Taken { session, client, call }: Taken) -> Result<()> {
        let flight = InFlight::of(&client);
        let call = call.and_then(|call| self.lead_to_parts(session, call));
        self.move_on(session, &client);
        let call = match call {
            Ok(call) => call,
            Err(code) => {
                self.recorder.clear(flight);
                self.acknowledge_later(session, client, &Err(code.into()));
                return Ok(());
            }
        };
        let route = self.route(session, &call)?;
        // A call that is applied is cleared at the end of its batch, and a parked one is still to be served.
        if !matches!(route, Route::Here | Route::Parked) {
            self.recorder.clear(flight);
        }
        match route {
            Route::Here => self.apply(session, call),
            Route::Refuse(refusal) => {
                self.conclude(session, call, &Err(refusal), None);
                Ok(())
            }
            Route::Outcome(outcome) => {
                self.conclude(session, call, &Ok(Reply::Outcome(outcome)), None);
                Ok(())
            }
            Route::Away | Route::Parked => Ok(()),
        }
    }

    /// The slot's client sends its next request. So it has executed what its last reply requires, except that it may
    /// still be unlinking what its last removal left.
    fn move_on(&mut self, session: usize, client: &Client) {
        let session = &mut self.sessions[session];
        session.moves_on(client.slot, client.seq, self.backing.all_unlinked());
        let slot = &mut session.slots[client.slot];
        slot.relaid.clear();
        if let Some(ino) = slot.pending_create.take() {
            if let Some(orphan) = self.backing.create_settled(ino) {
                self.backing.sweep(Sweep::Orphans(vec![orphan]));
            }
        }
        session.note_obligation(client.slot);
    }

    /// Decides the route of a call: to another node, to the network thread, into a cross-node transaction, or to this
    /// node's shard.
    fn route(&mut self, session: usize, call: &Call) -> Result<Route> {
        // Not for other nodes: they cache this node's report for seconds, and do not wait longer for it.
        if self.sessions[session].is_here() && self.park_for_removals(call) {
            return Ok(Route::Parked);
        }
        if self.network.is_some() {
            match self.send_on(session, call) {
                Ok(true) => return Ok(Route::Away),
                Ok(false) => {}
                Err(code) => return self.refused(code),
            }
        }
        if self.must_commit() {
            self.commit()?;
        }
        if self.cross_node.is_none() {
            return Ok(Route::Here);
        }
        Ok(match self.intercept(session, call)? {
            Interception::Later => {
                let parked = self.cross_node.as_ref().and_then(|cross_node| cross_node.parked.last());
                match parked.is_some_and(|parked| parked.call.client == call.client) {
                    true => Route::Parked,
                    false => Route::Away,
                }
            }
            Interception::Refused(code) => return self.refused(code),
            Interception::Outcome(outcome) => Route::Outcome(outcome),
            Interception::No => Route::Here,
        })
    }

    fn refused(&mut self, code: Code) -> Result<Route> {
        Ok(Route::Refuse(self.batch()?.refusal(code)))
    }

    /// Applies a call to this node's shard, and handles the answer.
    fn apply(&mut self, session: usize, call: Call) -> Result<()> {
        let flight = InFlight::of(&call.client);
        if !self.recorder.takes_off(flight) {
            tracing::error!("refused a request that was being served at two crashes: {flight:?}");
            self.conclude(session, call, &Err(Refusal::Code(Code::Io)), None);
            return Ok(());
        }
        if self.serve_for_store(session, &call)? || self.serve_for_volumes(session, &call)? {
            return Ok(());
        }
        let before = self.effects.mark();
        let mut payload = std::mem::take(&mut self.pipeline.payload);
        let applied = self.execute(session, &call, &mut payload).and_then(|(answer, changed)| {
            if matches!(answer, Err(Refusal::Code(Code::NotListed))) && self.wait_for_listing(&call) {
                return Ok(());
            }
            if changed {
                self.note_for_store(call.request(), &answer);
                self.note_for_volumes(&call);
                let now = self.pipeline.now.unwrap_or_default();
                self.journal.append(flight.session, flight.slot, flight.seq, now, call.bytes());
                self.passes(Moment::Journaled)?;
            }
            self.conclude(session, call, &answer, changed.then_some(before));
            Ok(())
        });
        self.pipeline.payload = payload;
        applied.and_then(|()| self.settle_volumes())
    }

    /// The answer to a call, and whether it has changed the shard.
    fn execute<'o>(
        &mut self,
        session: usize,
        call: &Call,
        payload: &'o mut [u8],
    ) -> Result<(Answer<'o>, bool)> {
        let request = call.request();
        self.batch()?;
        if let Err(code) = self.check_layout(request) {
            return Ok((Err(self.batch()?.refusal(code)), false));
        }
        if own_answers::answers(request) {
            return Ok((own_answers::answer(&self.targets, self.committed.inodes, request, payload), false));
        }
        if self.takes_a_number_not_in_reserve(session, call) {
            return Ok((Err(Refusal::Code(Code::Stale)), false));
        }
        let answer = self.apply_to_shard(call, payload)?;
        if let (Request::MakeBacking { .. }, Ok(Reply::Entry(entry))) = (request, &answer) {
            let made = own_answers::make_backing(&self.targets, entry);
            return Ok((made.map_or_else(|code| Err(code.into()), |()| answer), false));
        }
        let changed = answer.is_ok() && request.changes();
        Ok((answer, changed))
    }

    fn takes_a_number_not_in_reserve(&self, session: usize, call: &Call) -> bool {
        let reserved = self.sessions[session].slots[call.client.slot].reserved;
        matches!(call.request(), Request::Create { number: Some(number), .. } if reserved != Some(*number))
    }

    /// Checks that the targets that a request names exist, and that a layout may change.
    fn check_layout(&mut self, request: &Request<'_>) -> std::result::Result<(), Code> {
        let alone = self.network.as_ref().is_none_or(|network| network.nodes <= 1);
        if self.network.is_none() {
            crate::worker::layout_change::check_targets(&self.targets, None, request)?;
        }
        match (&mut self.batch, request) {
            (Some(batch), Request::SetLayout { ino, layout }) => {
                crate::worker::layout_change::check_change(&self.targets, batch, *ino, layout, alone)
            }
            _ => Ok(()),
        }
    }

    /// Applies a call in the open transaction. A long transaction cannot use the pages that it freed, and refuses
    /// growth early: the call is then applied in a new transaction.
    fn apply_to_shard<'o>(&mut self, call: &Call, payload: &'o mut [u8]) -> Result<Answer<'o>> {
        let (caller, request) = (call.caller(), call.request());
        let now = match request.changes() {
            true => *self.pipeline.now.get_or_insert_with(self.clock),
            false => Timestamp::default(),
        };
        if request.changes() && (self.uncommitted > 0 || self.backing.has_unlinked()) {
            self.batch()?;
            let Some(batch) = &mut self.batch else { unreachable!("begun above") };
            let answer = batch.apply(caller, request, now, &mut self.effects, payload);
            match answer.map(|reply| (reply.owned(), borrowed_bytes(&reply))) {
                Ok((Some(reply), _)) => return Ok(Ok(reply)),
                Ok((None, bytes)) => return Ok(Ok(Reply::Bytes(&payload[..bytes]))),
                Err(Refusal::Code(Code::NoSpace)) => {}
                Err(refusal) => return Ok(Err(refusal)),
            }
            self.forget_orphans()?;
            self.commit()?;
        }
        self.batch()?;
        let Some(batch) = &mut self.batch else { unreachable!("begun above") };
        Ok(batch.apply(caller, request, now, &mut self.effects, payload))
    }

    /// Handles an answer. `change` is where the effects of a change begin. Answers that lead to another part of a wide
    /// directory are followed; all others are acknowledged when the batch is published.
    pub(in crate::worker) fn conclude(
        &mut self,
        session: usize,
        call: Call,
        answer: &Answer<'_>,
        change: Option<Mark>,
    ) {
        let client = call.client;
        let Some(before) = change else {
            if let Some(leases) = self.leases.as_mut().filter(|_| !self.sessions[session].is_here()) {
                leases.told(&client, call.request(), answer);
            }
            match self.redirect(session, &client, Some(&call), answer) {
                None => self.acknowledge_later(session, client, answer),
                Some(Redirect::Answer(reply)) => self.acknowledge_encoded(session, client, &reply),
                Some(Redirect::Ask(call)) => self.serve_anew(call),
                Some(Redirect::Wait) => {}
            }
            return;
        };
        self.uncommitted += 1;
        let reply = self.pipeline.acks.encode(answer);
        let Ok(made) = answer else { unreachable!("a change was made") };
        self.note_change(session, &client, made, &reply, before);
        let invalidations = match &self.mount {
            Some(mount) if mount.session != client.session => self.notes_for_mount(&call, made, before),
            _ => Vec::new(),
        };
        if let Some(watched) = &mut self.watched {
            watched.note(call.request(), self.effects.since(before));
        }
        // `wait` is not needed for a late answer: it is the removal of a foreign link, whose name is not a directory's,
        // and only directories are leased.
        let wait = self.revoke(call.request(), before);
        if self.owes(client, made, before) {
            // Answered after the delivery to the other node. The kernel is notified then, too.
            return self.note_for_late_answer(client, invalidations);
        }
        let ack = self.pipeline.acks.add(session, client, false, reply);
        (ack.invalidations, ack.wait) = (invalidations, wait);
    }

    fn acknowledge_later(&mut self, session: usize, client: Client, answer: &Answer<'_>) {
        let reply = self.pipeline.acks.encode(answer);
        self.pipeline.acks.add(session, client, answer.is_err(), reply);
    }

    fn acknowledge_encoded(&mut self, session: usize, client: Client, answer: &ReplyBuf) {
        let reply = self.pipeline.acks.copy(&answer.bytes);
        self.pipeline.acks.add(session, client, answer.is_error, reply);
    }

    /// Invalidations that are written before a change is acknowledged.
    #[cold]
    fn notes_for_mount(&self, call: &Call, reply: &Reply<'_>, before: Mark) -> Vec<Invalidation> {
        let (request, effects) = (call.request(), self.effects.since(before));
        // Names that were imported may be known to be absent: the directory was listed before.
        let imports = matches!(request, Request::Import { .. } | Request::Listed { .. });
        if request.class() == Class::Step || imports {
            return step_invalidations(request, effects);
        }
        let moved: Vec<Ino> = match *request {
            Request::Rename { parent, name, new_parent, new_name, .. } => {
                let leads_to = |(parent, name)| {
                    let shown = effects.names().filter(|n| n.parent == parent && n.name == name).last();
                    shown.and_then(|n| n.entry.map(|(ino, _)| ino))
                };
                [(parent, name), (new_parent, new_name)].into_iter().filter_map(leads_to).collect()
            }
            _ => Vec::new(),
        };
        invalidations_of(request, reply, &moved)
    }

    /// Keeps the reply of a change, and records what the client does after it: it makes a backing file, or unlinks
    /// some.
    fn note_change(
        &mut self,
        session: usize,
        client: &Client,
        reply: &Reply<'_>,
        encoded: &Range<usize>,
        before: Mark,
    ) {
        let session = &mut self.sessions[session];
        let is_here = session.is_here();
        let state = &mut session.slots[client.slot];
        state.last_change.0 = client.seq;
        state.last_change.1.clear();
        state.last_change.1.extend_from_slice(self.pipeline.acks.reply(encoded));
        if !state.unkept {
            state.unkept = true;
            self.unkept.push((session.id, client.slot));
        }
        let (mut left, mut owed) = (Vec::new(), Vec::new());
        for &(ino, layout) in self.effects.since(before).orphaned() {
            if self.backing.is_pending(ino) {
                self.backing.unlinked_while_pending(ino, layout);
            } else if is_here && all_here(self.network.as_ref(), &layout) {
                owed.push((ino, layout));
            } else {
                // No client unlinks it.
                left.push((ino, layout));
            }
        }
        state.relaid.extend(relaid(reply));
        // A client of another node: its own daemon tracks its backing file.
        if let Some((ino, _)) = created(reply).filter(|_| is_here) {
            state.pending_create = Some(ino);
            self.backing.create_pending(ino);
        }
        // Daemons create only directories, for which no number is reserved.
        let (reserved, given_up) = match is_of_daemon(session.id) {
            true => (None, None),
            false => reserve_behind(state.reserved, reply),
        };
        state.reserved = reserved;
        session.owes(client.slot, owed);
        self.backing.give_up(given_up);
        left.into_iter().for_each(|orphan| self.backing.sweep_soon(orphan));
    }

    /// Publishes on the board what the batch changed or found.
    pub(in crate::worker) fn publish(&mut self) {
        for entry in self.effects.found() {
            self.board.found_inode(entry);
        }
        // Programs do not use the numbers of parts.
        for (ino, entry) in self.effects.inodes().iter().filter(|(ino, _)| !ino.is_part()) {
            self.board.inode(*ino, entry.as_ref());
        }
        let batch = self.batch.as_ref();
        let shown = |parent: Ino| batch.map_or(parent, |batch| batch.shown_parent(parent));
        for ino in self.effects.all_widened() {
            self.board.forget_names_of(*ino);
        }
        for directory in self.effects.unlisted().iter().filter(|directory| !directory.was_attached) {
            self.board.forget_names_of(directory.ino);
        }
        for name in self.effects.names() {
            match name.entry.filter(|_| name.is_found) {
                Some(found) => self.board.found_name(shown(name.parent), name.name, found),
                None => self.board.name(shown(name.parent), name.name, name.entry),
            }
        }
        if let Some(batch) = batch.filter(|batch| batch.has_holds()) {
            // Clients that look up a held name must send a request, and wait.
            for (parent, name) in batch.held_names() {
                self.board.forget_name(shown(parent), name);
            }
        }
        self.board.finish();
        if let Some(watched) = &mut self.watched {
            watched.send(self.effects.all_widened());
        }
        let is_any_absence_void =
            !self.effects.all_widened().is_empty() || !self.effects.unlisted().is_empty();
        if let (Some(mount), true) = (&self.mount, is_any_absence_void) {
            // The kernel may have cached that names are absent, which other nodes will create, or which an import will
            // find, without a notification here. Which names it has cached is unknown, so it looks up all names again.
            mount.move_epoch();
        }
    }

    /// Acknowledges the calls of the batch: now, or when leases are revoked and the kernel's cache is invalidated.
    fn acknowledge(&mut self) {
        let mut errors = 0;
        let ShardThread { pipeline, sessions, leases, mount, recorder, .. } = self;
        pipeline.acks.release(|Ack { session, client, is_error, invalidations, wait, .. }, reply| {
            errors += u64::from(is_error);
            let held_reply = |reply: &[u8]| HeldReply::Client { client, reply: reply.to_vec() };
            match (leases.as_mut(), mount.as_mut(), wait) {
                (Some(leases), _, Some(wait)) => leases.hold(held_reply(reply), invalidations, wait),
                (_, Some(mount), None) if !invalidations.is_empty() => {
                    mount.hold(held_reply(reply), invalidations)
                }
                _ => sessions[session].answer_if_waiting(client.slot, client.seq, reply),
            }
        });
        recorder.landed();
        Statistics::add(&self.statistics.requests, self.pipeline.served as u64);
        Statistics::add(&self.statistics.errors, errors);
        Statistics::add(&self.statistics.batches, 1);
    }

    /// After the replies: reserved numbers that were given up, backing files to sweep, orphan records to delete.
    fn settle(&mut self) -> Result<()> {
        let given_up = self.backing.take_given_up();
        self.sweep_numbers(given_up)?;
        self.backing.sweep_if_due();
        self.sweep_late_if_due();
        if self.backing.has_many_unlinked() {
            self.forget_orphans()?;
        }
        Ok(())
    }

    /// Removes the backing files that a client may have created under reserved numbers that were not used. They are
    /// listed as orphans until then, so that a crash loses none.
    pub(in crate::worker) fn sweep_numbers(&mut self, numbers: Vec<Ino>) -> Result<()> {
        let list: Vec<_> = numbers.into_iter().map(|ino| (ino, layout_of_number(ino))).collect();
        for (ino, layout) in &list {
            if !self.remove_in_batch(|batch| batch.list_orphan(*ino, layout))? {
                tracing::warn!("no room to list inode number {ino} as an orphan");
            }
        }
        if !list.is_empty() {
            self.backing.sweep(Sweep::Orphans(list));
        }
        Ok(())
    }
}

/// The bytes of the payload that the reply of a change borrows: it has no other part of it.
fn borrowed_bytes(reply: &Reply<'_>) -> usize {
    match reply {
        Reply::Bytes(bytes) => bytes.len(),
        _ => 0,
    }
}
