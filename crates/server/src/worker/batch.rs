//! One batch: requests that are waiting together are applied, published and answered together.

use forebay_data::{Media, Medium, NodeTargets, Target};
use forebay_meta::Client;
use forebay_types::limits::{BATCH_MAX, MESSAGE_BYTES_MAX};
use forebay_types::{
    Attr, BackingOp, Class, Code, Ino, Kind, Layout, PoolSpace, Reply, Request, Result, TargetSpace,
    TargetSpaces, Targets, Timestamp,
};

use super::coordination::Interception;
use super::device_nodes;
use super::forward::all_here;
use super::network::Command;
use super::notifier::{notes_of, Whose};
use super::recorder::InFlight;
use super::remote::Door;
use super::session::is_of_daemon;
use super::shard_thread::ShardThread;
use super::statistics::Statistics;
use super::stepped::Moment;
use super::sweeper::Sweep;
use super::wide::Redirect;

/// Replies collected before their transaction is committed: bytes of ordinary ones. A batch ends early when the next
/// might not fit.
const REPLY_BYTES: usize = 16 * MESSAGE_BYTES_MAX;

/// Room for what one node says of its targets.
const TARGETS_REPLY_BYTES: usize = 4096;

/// A request that was taken from its slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    pub(super) session: usize,
    pub(super) slot: usize,
    pub(super) seq: u64,
    pub(super) request: (usize, usize),
    reply: (usize, usize),
    refused: Option<Code>,
    /// Its answer comes later: another node was asked, or it waits.
    forwarded: bool,
}

/// The requests of a batch and their replies.
#[derive(Debug)]
pub(super) struct Answers {
    taken: Vec<Taken>,
    requests: Vec<u8>,
    request_bytes: usize,
    replies: Vec<u8>,
}

impl Answers {
    pub(super) fn new() -> Answers {
        Answers {
            taken: Vec::with_capacity(BATCH_MAX),
            requests: vec![0; BATCH_MAX * MESSAGE_BYTES_MAX],
            request_bytes: 0,
            replies: vec![0; REPLY_BYTES],
        }
    }

    pub(super) fn clear(&mut self) {
        self.taken.clear();
        self.request_bytes = 0;
    }

    pub(super) fn len(&self) -> usize {
        self.taken.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.taken.is_empty()
    }

    /// A request that was copied out.
    pub(super) fn request(&self, (start, end): (usize, usize)) -> &[u8] {
        &self.requests[start..end]
    }

    /// A reply that was collected.
    pub(super) fn reply(&self, (start, end): (usize, usize)) -> &[u8] {
        &self.replies[start..end]
    }

    /// True when one more request has room.
    pub(super) fn has_room(&self) -> bool {
        self.taken.len() < BATCH_MAX
    }

    /// Takes a request that was taken out of its slot before.
    pub(super) fn put(&mut self, session: usize, slot: usize, seq: u64, message: &[u8]) {
        let at = self.request_bytes;
        let request = (at, at + message.len());
        self.requests[request.0..request.1].copy_from_slice(message);
        self.request_bytes += message.len();
        self.taken.push(Taken {
            session,
            slot,
            seq,
            request,
            reply: (0, 0),
            refused: None,
            forwarded: false,
        });
    }

    /// Session, slot and sequence of the `i`-th request taken, and where it is.
    pub(super) fn place_of(&self, i: usize) -> (usize, usize, u64, (usize, usize)) {
        let Taken { session, slot, seq, request, .. } = self.taken[i];
        (session, slot, seq, request)
    }

    /// Puts another request in the place of the `i`-th taken.
    pub(super) fn replace(&mut self, i: usize, message: &[u8]) {
        let (start, end) = self.taken[i].request;
        let at = if message.len() <= end - start { start } else { self.request_bytes };
        let request = (at, at + message.len());
        // There is room for as many of the longest, of which few are.
        self.requests.resize(self.requests.len().max(request.1 + MESSAGE_BYTES_MAX), 0);
        self.requests[request.0..request.1].copy_from_slice(message);
        self.request_bytes = self.request_bytes.max(request.1);
        self.taken[i].request = request;
    }

    /// Copies the request out of `slot` of the `session`-th session.
    pub(super) fn take(&mut self, session: usize, slot: usize, door: &Door) {
        let at = self.request_bytes;
        let Some((seq, request)) = door.take(slot, &mut self.requests[at..at + MESSAGE_BYTES_MAX]) else {
            return;
        };
        let (len, refused) = match request {
            Ok(request) => (request.len, None),
            Err(code) => (0, Some(code)),
        };
        self.request_bytes += len;
        let request = (at, at + len);
        self.taken.push(Taken { session, slot, seq, request, reply: (0, 0), refused, forwarded: false });
    }
}

impl ShardThread<'_> {
    /// Serves the requests that were taken, in as many steps as their replies need.
    pub(super) fn serve_batch(&mut self) -> Result<()> {
        let mut from = 0;
        while from < self.answers.len() {
            from = self.serve_some(from)?;
        }
        Ok(())
    }

    /// Serves requests from the `from`-th on; the index behind the last one served.
    fn serve_some(&mut self, from: usize) -> Result<usize> {
        self.effects.clear();
        // Asked for the first change: look-ups need no time.
        let (clock, mut time) = (self.clock, None);
        let (mut at, mut i) = (0, from);
        while i < self.answers.len() && at + MESSAGE_BYTES_MAX <= REPLY_BYTES {
            let led = self.lead_to_parts(i);
            let mut taken = self.answers.taken[i];
            taken.refused = taken.refused.or(led.err());
            self.move_on(taken.session, taken.slot, taken.seq);
            if self.waits_for_removals(&taken) {
                self.answers.taken[i].forwarded = true;
                i += 1;
                continue;
            }
            if self.network.is_some() && taken.refused.is_none() {
                match self.send_on(&taken) {
                    Ok(true) => {
                        self.answers.taken[i].forwarded = true;
                        i += 1;
                        continue;
                    }
                    Ok(false) => {}
                    Err(code) => taken.refused = Some(code),
                }
            }
            if self.must_commit() {
                self.commit()?;
            }
            let mut outcome = None;
            if self.cross_node.is_some() && taken.refused.is_none() {
                match self.intercept(taken.session, (taken.slot, taken.seq), taken.request)? {
                    Interception::Later => {
                        self.answers.taken[i].forwarded = true;
                        i += 1;
                        continue;
                    }
                    Interception::Refused(code) => taken.refused = Some(code),
                    Interception::Outcome(what) => outcome = Some(what),
                    Interception::No => {}
                }
            }
            self.batch()?;
            let Some(batch) = &mut self.batch else { unreachable!("begun above") };
            let flight =
                InFlight { session: self.sessions[taken.session].id, slot: taken.slot, seq: taken.seq };
            let out = &mut self.answers.replies[at..at + MESSAGE_BYTES_MAX];
            let orphaned = self.effects.orphaned().len();
            let owed = self.effects.deliveries().len();
            let shown = (self.effects.names().len(), self.effects.inodes().len());
            let decoded = match taken.refused {
                Some(code) => Err(code),
                None if !self.recorder.takes_off(i - from, flight) => {
                    tracing::error!("refused a request that was being served at two crashes: {flight:?}");
                    Err(Code::Io)
                }
                None => {
                    let (start, end) = taken.request;
                    Request::decode(&self.answers.requests[start..end])
                }
            };
            let alone = self.network.as_ref().is_none_or(|network| network.nodes <= 1);
            let decoded = decoded.and_then(|(caller, request)| {
                if self.network.is_none() {
                    super::layout_change::check_targets(&self.targets, None, &request)?;
                }
                if let Request::SetLayout { ino, layout } = request {
                    super::layout_change::check_change(&self.targets, batch, ino, &layout, alone)?;
                }
                Ok((caller, request))
            });
            let mut changed = false;
            let len = match decoded {
                Err(code) => batch.refuse(code, out),
                Ok((_, Request::AskOutcome { .. })) if outcome.is_some() => {
                    Reply::encode(&outcome.map(Reply::Outcome).ok_or(Code::Io), out).unwrap_or(0)
                }
                Ok((_, Request::Ping)) => Reply::encode(&Ok(Reply::Done), out).unwrap_or(0),
                Ok((_, Request::Space)) => {
                    let space = space(&self.targets, self.committed.inodes).map(Reply::Space);
                    Reply::encode(&space, out).unwrap_or(0)
                }
                Ok((_, Request::Targets)) => {
                    let mut room = [0; TARGETS_REPLY_BYTES];
                    let spaces = own_targets(&self.targets);
                    let told = space(&self.targets, self.committed.inodes).and_then(|space| {
                        let (inodes, free_inodes) = (space.inodes, space.free_inodes);
                        let spaces = TargetSpaces::encode(&spaces, &mut room)?;
                        Ok(Reply::Targets { inodes, free_inodes, spaces })
                    });
                    Reply::encode(&told, out).unwrap_or(0)
                }
                // In a pool of several nodes the network thread knows.
                Ok((_, Request::Place { .. })) => {
                    let own: Vec<u32> = own_targets(&self.targets).iter().map(|s| s.target).collect();
                    let placed = Targets::new(&own).map(Reply::Placed).ok_or(Code::NotSupported);
                    Reply::encode(&placed, out).unwrap_or(0)
                }
                Ok((_, Request::Create { number: Some(number), .. }))
                    if self.sessions[taken.session].slots[taken.slot].reserved != Some(number) =>
                {
                    Reply::encode(&Err(Code::Stale), out).unwrap_or(0)
                }
                Ok((caller, request)) => {
                    let (changes, backing) =
                        (request.changes(), matches!(request, Request::MakeBacking { .. }));
                    let now = if changes { *time.get_or_insert_with(clock) } else { Timestamp::default() };
                    let mut len = batch.apply(caller, &request, now, &mut self.effects, out);
                    if is_no_space(out) && self.uncommitted + self.done_orphans.len() > 0 {
                        let message = self.answers.requests[taken.request.0..taken.request.1].to_vec();
                        len = self.apply_anew(&message, now, at)?;
                    }
                    let out = &mut self.answers.replies[at..at + MESSAGE_BYTES_MAX];
                    let made = match Reply::decode(&out[..if backing { len } else { 0 }]) {
                        Ok(Reply::Entry(entry)) => Some(entry),
                        _ => None,
                    };
                    if let Some(entry) = made {
                        match make_backing(&self.targets, &entry) {
                            Ok(()) => len,
                            Err(code) => Reply::encode(&Err(code), out).unwrap_or(0),
                        }
                    } else {
                        changed = changes && out.first_chunk::<2>() == Some(&[0, 0]);
                        if changed {
                            let message = &self.answers.requests[taken.request.0..taken.request.1];
                            self.journal.append(flight.session, taken.slot, taken.seq, now, message);
                            self.passes(Moment::Journaled)?;
                        }
                        len
                    }
                }
            };
            let mut len = len;
            if self.network.is_some() && !changed {
                let reply = self.answers.reply((at, at + len)).to_vec();
                match self.redirect((taken.session, taken.slot, taken.seq), Some(taken.request), &reply) {
                    Some(Redirect::Ask(message)) => {
                        self.serve_anew(taken.session, taken.slot, taken.seq, message);
                        self.answers.taken[i].forwarded = true;
                        i += 1;
                        continue;
                    }
                    Some(Redirect::Wait) => {
                        self.answers.taken[i].forwarded = true;
                        i += 1;
                        continue;
                    }
                    Some(Redirect::Reply(reply)) => {
                        self.answers.replies[at..at + reply.len()].copy_from_slice(&reply);
                        len = reply.len();
                    }
                    None => {}
                }
            }
            if changed {
                self.uncommitted += 1;
                self.note_change(taken.session, taken.slot, taken.seq, (at, at + len), orphaned);
                if self.mount.as_ref().is_some_and(|mount| mount.session != flight.session) {
                    self.note_for_mount(i, taken.request, (at, at + len), shown);
                }
                if self.watched.is_some() {
                    self.note_taken_for_watches(taken.request, shown);
                }
                let client = Client { session: flight.session, slot: taken.slot, seq: taken.seq };
                if self.owes(client, (at, at + len), owed) {
                    // Answered when the other node knows; then the kernel is told too.
                    if let Some((_, notes)) = self.notes.pop_if(|(of, _)| *of == i) {
                        self.note_for_late_answer(client, notes);
                    }
                    self.answers.taken[i].forwarded = true;
                }
            }
            if self.leases.is_some() {
                self.mind_leases(i, changed, (at, at + len), shown);
                if self.answers.taken[i].forwarded {
                    // What a foreign link's end waits for is no directory, which is all that leases tell of.
                    self.waits.pop_if(|(of, _)| *of == i);
                }
            }
            let taken = &mut self.answers.taken[i];
            taken.reply = (at, at + len);
            at += len;
            i += 1;
        }
        self.publish();
        self.passes(Moment::Published)?;
        self.answer(from, i);
        self.passes(Moment::Answered)?;
        if !self.given_up.is_empty() {
            let given_up = std::mem::take(&mut self.given_up);
            self.sweep_numbers(given_up)?;
        }
        self.sweep_if_due();
        self.sweep_late_if_due();
        if self.has_orphans_to_forget() {
            self.forget_orphans()?;
        }
        Ok(i)
    }

    /// In a pool of several nodes: true when another one is asked, whose answer will be this request's.
    fn send_on(&mut self, taken: &Taken) -> std::result::Result<bool, Code> {
        let (_, request) = Request::decode(self.answers.request(taken.request))?;
        // Nodes that are to hear when the client is gone: they keep something for it.
        let keeps_some = |op: &BackingOp<'_>| {
            matches!(
                op,
                BackingOp::Open { .. }
                    | BackingOp::Lock(_)
                    | BackingOp::BeginAppend { .. }
                    | BackingOp::Write { .. }
                    | BackingOp::Truncate { .. }
                    | BackingOp::Allocate { .. }
                    | BackingOp::Move(_)
                    | BackingOp::AppendPiece { .. }
                    | BackingOp::Group { .. }
            )
        };
        let keeps = request.changes() || matches!(&request, Request::Backing { op, .. } if keeps_some(op));
        if request.class() == Class::Peer {
            return Err(Code::NotPermitted);
        }
        if request.class() == Class::Step {
            // Those that are no daemon's are refused where they are served.
            return match self.sessions[taken.session].is_here() {
                true => Err(Code::NotPermitted),
                false => Ok(false),
            };
        }
        match request {
            Request::Space => {
                let own = space(&self.targets, self.committed.inodes)?;
                return Ok(self.ask_network(taken, |stamp| Command::Space { stamp, own }));
            }
            Request::Place { stripe_count } => {
                let own = own_targets(&self.targets);
                return Ok(self.ask_network(taken, |stamp| Command::Place { stamp, stripe_count, own }));
            }
            Request::Backing { id, op } if self.network.as_ref().is_some_and(|n| n.node == id.node()) => {
                let for_all = matches!(
                    op,
                    BackingOp::Lock(_)
                        | BackingOp::TestLock(_)
                        | BackingOp::BeginAppend { .. }
                        | BackingOp::EndAppend { .. }
                        | BackingOp::Group { .. }
                );
                let message = self.answers.request(taken.request).to_vec();
                let asker = &mut self.sessions[taken.session];
                if !for_all || !asker.is_here() {
                    return Err(Code::NotSupported);
                }
                if keeps && !asker.asked_nodes.contains(&id.node()) {
                    asker.asked_nodes.push(id.node());
                }
                return Ok(self.ask_network(taken, |stamp| Command::ServeHere { stamp, message }));
            }
            _ => {}
        }
        match self.elsewhere(&request) {
            // Before it may become a change over several nodes, whose parts nobody looks at like this.
            None => super::layout_change::check_targets(&self.targets, self.network.as_ref(), &request)
                .map(|()| false),
            Some(node) => self.forward(taken.session, taken.slot, taken.seq, node, taken.request, keeps),
        }
    }

    /// In a pool of several nodes: revokes what the `i`-th request taken changed, or notes whom it told what.
    fn mind_leases(&mut self, i: usize, changed: bool, reply: (usize, usize), effects: (usize, usize)) {
        let taken = self.answers.taken[i];
        let session = &self.sessions[taken.session];
        if !changed && session.is_here() {
            return;
        }
        let (id, message) = (session.id, self.answers.request(taken.request).to_vec());
        let Ok((_, request)) = Request::decode(&message) else { return };
        if changed {
            let wait = self.revoke(&request, effects);
            self.waits.extend(wait.map(|wait| (i, wait)));
        } else {
            let reply = self.answers.replies[reply.0..reply.1].to_vec();
            self.note_told(id, &request, &reply);
        }
    }

    /// Applies a request in a fresh transaction: a long one refuses growth earlier, as it cannot use what it freed.
    #[cold]
    fn apply_anew(&mut self, message: &[u8], now: Timestamp, at: usize) -> Result<usize> {
        self.forget_orphans()?;
        self.commit()?;
        self.batch()?;
        let out = &mut self.answers.replies[at..at + MESSAGE_BYTES_MAX];
        let (Some(batch), Ok((caller, request))) = (&mut self.batch, Request::decode(message)) else {
            unreachable!("begun above, and decoded before")
        };
        Ok(batch.apply(caller, &request, now, &mut self.effects, out))
    }

    /// The slot's client sends its next request: it has done what its last reply called for, except that it may still be
    /// unlinking what its last removal left.
    fn move_on(&mut self, session: usize, slot: usize, seq: u64) {
        let session = &mut self.sessions[session];
        session.moves_on(slot, seq, &mut self.done_orphans);
        let slot = &mut session.slots[slot];
        slot.relaid.clear();
        if let Some(ino) = slot.pending_create.take() {
            if let Some(orphan) = self.create_settled(ino) {
                let _ = self.sweeper.send(Sweep::Orphans(vec![orphan]));
            }
        }
    }

    /// Remembers what the kernel is to be told before the `i`-th request taken, a change, is acknowledged.
    #[cold]
    fn note_for_mount(
        &mut self,
        i: usize,
        request: (usize, usize),
        reply: (usize, usize),
        shown: (usize, usize),
    ) {
        let Ok((_, request)) = Request::decode(&self.answers.requests[request.0..request.1]) else { return };
        if request.class() == Class::Step {
            let notes = self.notes_of_step(&request, shown);
            if !notes.is_empty() {
                self.notes.push((i, notes));
            }
            return;
        }
        let moved: Vec<Ino> = match request {
            Request::Rename { parent, name, new_parent, new_name, .. } => {
                [(parent, name), (new_parent, new_name)]
                    .into_iter()
                    .filter_map(|(parent, name)| {
                        let shown =
                            self.effects.names().filter(|n| n.parent == parent && n.name == name).last();
                        shown.and_then(|n| n.entry.map(|(ino, _)| ino))
                    })
                    .collect()
            }
            _ => Vec::new(),
        };
        let notes = notes_of(&request, &self.answers.replies[reply.0..reply.1], &moved);
        if !notes.is_empty() {
            self.notes.push((i, notes));
        }
    }

    /// Notes the change that a request taken made, for the watches of its directory.
    #[cold]
    fn note_taken_for_watches(&mut self, (start, end): (usize, usize), shown: (usize, usize)) {
        let Some(watched) = &mut self.watched else { return };
        if let Ok((_, request)) = Request::decode(&self.answers.requests[start..end]) {
            watched.note(&request, &self.effects, shown);
        }
    }

    /// Remembers the reply of a change, and what the client owes after it: making a backing file, or unlinking some.
    fn note_change(
        &mut self,
        session: usize,
        slot: usize,
        seq: u64,
        reply: (usize, usize),
        orphaned_before: usize,
    ) {
        let reply = &self.answers.replies[reply.0..reply.1];
        let session = &mut self.sessions[session];
        let is_here = session.is_here();
        let state = &mut session.slots[slot];
        state.last_change.0 = seq;
        state.last_change.1.clear();
        state.last_change.1.extend_from_slice(reply);
        if !state.unkept {
            state.unkept = true;
            self.unkept.push((session.id, slot));
        }
        let (mut left, mut owed) = (Vec::new(), Vec::new());
        for &(ino, layout) in &self.effects.orphaned()[orphaned_before..] {
            if self.pending_creates.contains(&ino) {
                self.unlinked_while_pending.push((ino, layout));
            } else if is_here && all_here(self.network.as_ref(), &layout) {
                owed.push((ino, layout));
            } else {
                // No client unlinks these.
                left.push((ino, layout));
            }
        }
        state.relaid.extend(super::session::relaid(reply));
        // What a client of another node makes, its own daemon watches over.
        if let Some((ino, _)) = super::session::created(reply).filter(|_| is_here) {
            state.pending_create = Some(ino);
            self.pending_creates.push(ino);
        }
        // What daemons are told in numbers are directories on the way of one that moves: nothing is in reserve for them.
        let (reserved, given_up) = match is_of_daemon(session.id) {
            true => (None, None),
            false => super::session::reserve_behind(state.reserved, reply),
        };
        state.reserved = reserved;
        session.owes(slot, owed);
        self.given_up.extend(given_up);
        left.into_iter().for_each(|orphan| self.sweep_soon(orphan));
    }

    /// Removes the backing files that a client may have made under numbers that no inode will have. Until they are removed
    /// they are orphans like others, so that a crash forgets none.
    pub(super) fn sweep_numbers(&mut self, numbers: impl IntoIterator<Item = Ino>) -> Result<()> {
        let list: Vec<_> = numbers.into_iter().map(|ino| (ino, layout_of_number(ino))).collect();
        for (ino, layout) in &list {
            if !self.remove_in_batch(|batch| batch.list_orphan(*ino, layout))? {
                tracing::warn!("no room to list inode number {ino} as an orphan");
            }
        }
        if !list.is_empty() {
            let _ = self.sweeper.send(Sweep::Orphans(list));
        }
        Ok(())
    }

    /// Shows on the board what the transaction changed or found.
    pub(super) fn publish(&mut self) {
        // Parts of wide directories are nothing that programs know.
        for (ino, entry) in self.effects.inodes().iter().filter(|(ino, _)| !ino.is_part()) {
            self.board.inode(*ino, entry.as_ref());
        }
        let batch = self.batch.as_ref();
        let shown = |parent: Ino| batch.map_or(parent, |batch| batch.shown_parent(parent));
        for ino in self.effects.all_widened() {
            self.board.forget_names_of(*ino);
        }
        for name in self.effects.names() {
            self.board.name(shown(name.parent), name.name, name.entry);
        }
        if let Some(batch) = batch.filter(|batch| batch.has_holds()) {
            // Whoever looks for one of these is to ask, and to wait.
            for (parent, name) in batch.held_names() {
                self.board.forget_name(shown(parent), name);
            }
        }
        self.board.finish();
        if let Some(watched) = &mut self.watched {
            watched.send(self.effects.all_widened());
        }
        if let (Some(mount), false) = (&self.mount, self.effects.all_widened().is_empty()) {
            // The kernel may believe that names are absent, which other nodes make from now on without telling it. Which it asked for
            // nobody knows; it looks all up anew.
            mount.move_epoch();
        }
    }

    fn answer(&mut self, from: usize, to: usize) {
        let mut errors = 0;
        let mut notes = std::mem::take(&mut self.notes).into_iter().peekable();
        let mut waits = std::mem::take(&mut self.waits).into_iter().peekable();
        for (i, taken) in self.answers.taken.iter().enumerate().take(to).skip(from) {
            if taken.forwarded {
                continue;
            }
            let (start, end) = taken.reply;
            let reply = &self.answers.replies[start..end];
            errors += u64::from(reply.first_chunk::<2>() != Some(&[0, 0]));
            let session = &self.sessions[taken.session];
            let told = notes.next_if(|(of, _)| *of == i);
            let whose = |reply: &[u8]| Whose::Client {
                session: session.id,
                slot: taken.slot,
                seq: taken.seq,
                reply: reply.to_vec(),
            };
            if let (Some(leases), Some((_, wait))) = (&mut self.leases, waits.next_if(|(of, _)| *of == i)) {
                leases.hold(whose(reply), told.map_or_else(Vec::new, |(_, notes)| notes), wait);
                continue;
            }
            match (&mut self.mount, told) {
                (Some(mount), Some((_, notes))) => mount.hold(whose(reply), notes),
                _ => session.answer_if_waiting(taken.slot, taken.seq, reply),
            }
            if self.recorder.has_suspects() {
                let session = self.sessions[taken.session].id;
                self.recorder.clear(InFlight { session, slot: taken.slot, seq: taken.seq });
            }
        }
        self.recorder.landed();
        Statistics::add(&self.statistics.requests, (to - from) as u64);
        Statistics::add(&self.statistics.errors, errors);
        Statistics::add(&self.statistics.batches, 1);
    }
}

/// The layout of the one backing file that may be there under a number.
pub(super) fn layout_of_number(ino: Ino) -> Layout {
    Layout::single(ino.birth_node(), 0)
}

fn is_no_space(reply: &[u8]) -> bool {
    reply.first_chunk::<2>() == Some(&(Code::NoSpace as u16).to_le_bytes())
}

/// Makes the backing files that are missing, and opens them to their owner.
fn make_backing(targets: &NodeTargets, entry: &forebay_types::Entry) -> std::result::Result<(), Code> {
    let attr: &Attr = &entry.attr;
    if attr.kind() != Kind::File {
        return device_nodes::create(targets.first(), attr);
    }
    targets.create_all(attr.ino, &entry.layout)?;
    // One that is on another node is made there, by who asks next.
    match targets.get(entry.layout.components()[0].target(0)) {
        Ok(target) if entry.layout.is_single() => device_nodes::repair_mode(target, attr.ino),
        _ => Ok(()),
    }
}

/// Space of this node's targets; of none where no file lies on it.
fn own_targets(targets: &NodeTargets) -> Vec<TargetSpace> {
    let space_of = |target: &Target| {
        // One whose space is not known has none for anybody.
        let space = target.space().unwrap_or_default();
        let (total_bytes, free_bytes) = (space.total_bytes, space.free_bytes);
        let (target, in_memory) = (target.target(), target.medium() == Medium::Dram);
        TargetSpace { target, total_bytes, free_bytes, in_memory }
    };
    targets.for_files().iter().map(space_of).collect()
}

fn space(targets: &NodeTargets, inodes: u64) -> std::result::Result<PoolSpace, Code> {
    let medium = targets.space()?;
    // An inode takes about this much of the shard, with its name.
    const INODE_BYTES: u64 = 512;
    // Without a target it is no directory's home either.
    let free_inodes = match targets.for_files() {
        [] => 0,
        _ => targets.first().space()?.free_bytes / INODE_BYTES,
    };
    let (total_bytes, free_bytes) = (medium.total_bytes, medium.free_bytes);
    Ok(PoolSpace { total_bytes, free_bytes, inodes, free_inodes })
}
