//! The shard thread's part in changes over several nodes: what [`Transactions`] says is done here, and requests that meet
//! what such a change holds wait here until it is over.
//!
//! ```text
//! a request ─ plan ─► transactions ─► this shard, as a change like any · other nodes, by the network thread
//!     └ meets held names ─► parked ─► served anew when something was finished; after a bound: EIO
//! ```
//! Daemons ask each other in sessions like clients', one a worker, so that what they ask is batched, journaled, told to
//! the mount and answered like all else. Crates/meta's `transactions.rs` has the protocol; a pool of one node has none of this.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use forebay_meta::{Act, Client, Delivery, Mark, Since, Transactions};
use forebay_types::limits::{HELD_LIST_TIMEOUT_MS, HELD_TIMEOUT_MS, RING_SLOTS};
use forebay_types::{Answer, Class, Code, NodeId, Outcome, Part, Refusal, Reply, Request, Result, Timestamp};
use forebay_wire::Stamp;
use serde_json::Value;

use super::acks::ReplyBuf;
use super::call::Call;
use super::cross_check::CrossCheck;
use super::leases::Wait;
use super::network::Command;
use super::notifier::{Note, Whose};
use super::session::{
    daemon_session, is_of_daemon, new_daemon_session, node_of_session, random_number, session_on,
};
use super::shard_thread::ShardThread;
use super::wide::Redirect;

/// What the request's reply becomes when it does not go the common way.
pub(super) enum Interception {
    /// It waits, or several nodes are at it: its answer comes later.
    Later,
    /// This is its reply.
    Refused(Code),
    /// This is its reply.
    Outcome(Outcome),
    /// It goes the common way.
    No,
}

/// A call that met what a change over several nodes holds, or that is served again.
#[derive(Debug)]
struct Parked {
    call: Call,
    since: Duration,
}

/// What is to be done before a late answer.
#[derive(Debug, Default)]
struct Late {
    /// The kernel is told this.
    notes: Vec<Note>,
    /// Then leases have run out of which nothing is known.
    wait: Option<Wait>,
}

/// The state of all that.
#[derive(Debug)]
pub(super) struct CrossNode {
    pub(super) transactions: Transactions,
    parked: Vec<Parked>,
    /// Requests to be served anew.
    anew: VecDeque<Parked>,
    /// Something was prepared or finished since the parked were looked at.
    moved: bool,
    /// When requests that are being served were asked first, if that was before.
    since: HashMap<(u64, usize), (u64, Duration)>,
    /// What is to be done before such a request is answered late.
    late: HashMap<(u64, usize), Late>,
    /// This worker's session at other nodes, its free slots there, and what waits for one.
    session: u64,
    free: u64,
    flying: HashMap<usize, u64>,
    waiting: VecDeque<(u64, NodeId, Vec<u8>)>,
    sequence: u64,
    time: Time,
    /// Checks that are under way, by number.
    checks: BTreeMap<u64, CrossCheck>,
    checks_begun: u64,
}

/// Flights with this bit are questions of a check: its number, and the question's behind.
const OF_CHECK: u64 = 1 << 63;
/// Those with this one are parts of wide directories that listings ask ahead, by number.
const OF_LISTING: u64 = 1 << 62;
/// Bits of a question's number.
const QUESTION_BITS: u32 = 32;

/// What the time is since some moment.
#[derive(Clone, Copy, Debug)]
enum Time {
    Since(Instant),
    By(fn() -> Timestamp),
}

impl CrossNode {
    pub(super) fn new(node: NodeId) -> Result<CrossNode> {
        let (first, session) = (random_number()?, new_daemon_session(node)?);
        Ok(CrossNode::with(node, first, session, Time::Since(Instant::now())))
    }

    /// Those of a simulated node: with a clock of its caller's, and numbers that follow from its epoch.
    pub(super) fn by_clock(node: NodeId, epoch: u64, clock: fn() -> Timestamp) -> CrossNode {
        CrossNode::with(node, epoch << 20, daemon_session(node, epoch), Time::By(clock))
    }

    fn with(node: NodeId, first: u64, session: u64, time: Time) -> CrossNode {
        CrossNode {
            transactions: Transactions::new(node, first),
            parked: Vec::new(),
            anew: VecDeque::new(),
            moved: false,
            since: HashMap::new(),
            late: HashMap::new(),
            session,
            free: u64::MAX,
            flying: HashMap::new(),
            waiting: VecDeque::new(),
            sequence: 0,
            time,
            checks: BTreeMap::new(),
            checks_begun: 0,
        }
    }

    pub(super) fn now(&self) -> Duration {
        match self.time {
            Time::Since(begun) => begun.elapsed(),
            Time::By(clock) => {
                let now = clock();
                Duration::new(now.sec.max(0) as u64, now.nsec)
            }
        }
    }

    /// This worker's session at other nodes.
    pub(super) fn session(&self) -> u64 {
        self.session
    }

    /// How long there is nothing to do.
    pub(super) fn next_timeout(&self) -> Duration {
        if !self.anew.is_empty() || self.transactions.has_acts() {
            return Duration::ZERO;
        }
        let now = self.now();
        let parked = self.parked.iter().map(|parked| end_of_waiting(parked).saturating_sub(now));
        let checks = self.checks.values().filter_map(|check| check.next_at);
        let next = parked.chain(checks.map(|at| at.saturating_sub(now))).min();
        next.unwrap_or(Duration::MAX).min(self.transactions.next_timeout(now))
    }

    /// Takes a request that is to be served anew.
    pub(super) fn next_anew(&mut self) -> Option<Call> {
        let Parked { call, since } = self.anew.pop_front()?;
        let Client { session, slot, seq } = call.client;
        self.since.insert((session, slot), (seq, since));
        Some(call)
    }

    /// True when so many other nodes can be asked something at once, and as much is left for changes.
    pub(super) fn has_room_for(&self, asks: usize) -> bool {
        self.waiting.is_empty() && self.free.count_ones() as usize >= 2 * asks
    }

    /// Asks a node for a part of a wide directory that a listing comes to soon; its answer comes to `told_ahead`.
    pub(super) fn ask_ahead(&mut self, number: u64, node: NodeId, message: Vec<u8>) {
        self.waiting.push_back((OF_LISTING | number, node, message));
    }

    /// Has a call served again, or another in its place.
    pub(super) fn serve_anew(&mut self, call: Call) {
        let since = self.first_asked(call.client);
        self.anew.push_back(Parked { call, since });
    }

    /// When a request was asked first.
    fn first_asked(&mut self, client: Client) -> Duration {
        let now = self.now();
        match self.since.remove(&(client.session, client.slot)) {
            Some((seq, since)) if seq == client.seq => since,
            _ => now,
        }
    }
}

/// When a parked request waits no longer.
fn end_of_waiting(parked: &Parked) -> Duration {
    let lists = matches!(parked.call.request(), Request::ReadDirectory { .. });
    parked.since + Duration::from_millis(if lists { HELD_LIST_TIMEOUT_MS } else { HELD_TIMEOUT_MS })
}

/// What the kernel may believe wrongly after a step that had these effects.
pub(super) fn notes_of_step(request: &Request<'_>, effects: Since<'_>) -> Vec<Note> {
    let mut notes: Vec<Note> = effects.inodes().iter().map(|(ino, _)| Note::Inode(*ino)).collect();
    notes.extend(effects.names().map(|n| Note::Name(n.parent, n.name.to_vec())));
    if let Request::Prepare {
        part: Part::Leave { parent, name, .. } | Part::Enter { parent, name, .. },
        ..
    } = *request
    {
        notes.push(Note::Name(parent, name.to_vec()));
    }
    notes
}

/// True when a daemon of `node` may say this.
fn is_said_by(request: &Request<'_>, node: NodeId) -> bool {
    match request {
        Request::Prepare { tx, .. } | Request::Finish { tx, .. } => tx.coordinator() == node,
        Request::Decide { .. } => false,
        _ => true,
    }
}

impl ShardThread<'_> {
    /// Looks whether a call goes the common way.
    pub(super) fn intercept(&mut self, session: usize, call: &Call) -> Result<Interception> {
        self.batch()?;
        let (Some(batch), Some(steps)) = (&mut self.batch, &mut self.cross_node) else {
            return Ok(Interception::No);
        };
        let (client, request) = (call.client, call.request());
        if request.class() == Class::Step {
            let is_daemon = !self.sessions[session].is_here() && is_of_daemon(client.session);
            if !is_daemon || !is_said_by(request, node_of_session(client.session)) {
                return Ok(Interception::Refused(Code::NotPermitted));
            }
            steps.moved |= matches!(request, Request::Prepare { .. } | Request::Finish { .. });
            return Ok(match *request {
                Request::AskOutcome { tx } if steps.transactions.is_undecided(tx) => {
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
            let parked = Parked { call: call.clone(), since: steps.first_asked(client) };
            if steps.now() < end_of_waiting(&parked) {
                steps.parked.push(parked);
                return Ok(Interception::Later);
            }
            if matches!(request, Request::ReadDirectory { .. }) {
                return Ok(Interception::No); // as it is
            }
            tracing::warn!(
                "refused {request:?}: a change over several nodes holds it, and its nodes do not answer"
            );
            return Ok(Interception::Refused(Code::Io));
        }
        Ok(match batch.plan(request, &nodes) {
            Ok(None) => {
                if !steps.since.is_empty() {
                    steps.since.remove(&(client.session, client.slot));
                }
                Interception::No
            }
            Ok(Some(plan)) => {
                let (since, now) = (steps.first_asked(client), steps.now());
                steps.transactions.begin(client, call.caller(), call.bytes(), plan, since, now);
                if self.sessions[session].is_here() {
                    self.sessions[session].remember_sent(call);
                }
                Interception::Later
            }
            Err(code) => {
                steps.first_asked(client);
                Interception::Refused(code)
            }
        })
    }

    /// A request was applied and owes other nodes something: true when it is answered only when they know.
    pub(super) fn owes(&mut self, client: Client, reply: &Reply<'_>, before: Mark) -> bool {
        let deliveries = self.effects.since(before).deliveries();
        let Some(steps) = self.cross_node.as_mut().filter(|_| !deliveries.is_empty()) else { return false };
        let drops: Vec<Delivery> =
            deliveries.iter().copied().filter(|d| matches!(d, Delivery::DropLink(..))).collect();
        let waits = !drops.is_empty() && !is_of_daemon(client.session);
        if let (true, Some(reply)) = (waits, reply.owned()) {
            steps.transactions.answer_after(client, reply, &drops);
        }
        let now = steps.now();
        steps.transactions.deliver(deliveries, now);
        waits
    }

    /// What the kernel is to be told before such a request is acknowledged.
    pub(super) fn note_for_late_answer(&mut self, client: Client, notes: Vec<Note>) {
        if let Some(steps) = self.cross_node.as_mut().filter(|_| !notes.is_empty()) {
            steps.late.insert((client.session, client.slot), Late { notes, wait: None });
        }
    }

    /// After a crash: a change is asked for again whose reply is known. What other nodes were to hear of when the last worker
    /// died may be this change; they hear of it before its client does. False when there is nothing of that sort.
    pub(super) fn answer_when_delivered(&mut self, call: &Call, reply: &Reply<'_>, notes: &[Note]) -> bool {
        let request = call.request();
        let Some(steps) = self.cross_node.as_mut().filter(|_| request.may_take_several_nodes()) else {
            return false;
        };
        let Some(reply) = reply.owned() else { return false };
        if !steps.transactions.answer_after_inherited(call.client, reply) {
            return false;
        }
        let wait = self.leases.as_ref().and_then(|leases| leases.caution(request));
        let Client { session, slot, .. } = call.client;
        steps.late.insert((session, slot), Late { notes: notes.to_vec(), wait });
        true
    }

    /// At the start: what the last worker left is finished.
    pub(super) fn resume_steps(&mut self) -> Result<()> {
        if self.cross_node.is_none() {
            return Ok(());
        }
        let batch = self.batch()?;
        let (prepared, deliveries) = (batch.prepared(), batch.deliveries()?);
        if let Some(steps) = &mut self.cross_node {
            if !prepared.is_empty() || !deliveries.is_empty() {
                tracing::info!(
                    "{} changes over several nodes are in doubt, {} deliveries are to be made",
                    prepared.len(),
                    deliveries.len()
                );
            }
            let now = steps.now();
            steps.transactions.resume(&prepared, &deliveries, now);
        }
        Ok(())
    }

    /// Another node has answered, or will not.
    pub(super) fn stepped(&mut self, slot: usize, reply: std::result::Result<Vec<u8>, Code>) {
        let Some(steps) = &mut self.cross_node else { return };
        let Some(flight) = steps.flying.remove(&slot) else { return };
        steps.free |= 1 << slot;
        let now = steps.now();
        let answer = reply.as_deref().map(Reply::decode_answer).map_err(|code| *code);
        if flight & OF_CHECK != 0 {
            let number = (flight & !OF_CHECK) >> QUESTION_BITS;
            let question = flight & ((1 << QUESTION_BITS) - 1);
            if let Some(check) = steps.checks.get_mut(&number) {
                let reply = answer.and_then(|answer| answer.map_err(|refusal| refusal.code()));
                if check.answered(question, reply) && check.conclude(now) {
                    steps.checks.remove(&number);
                }
            }
            return;
        }
        if flight & OF_LISTING != 0 {
            let answer = answer.unwrap_or_else(|code| Err(code.into()));
            return self.told_ahead(flight & !OF_LISTING, &answer);
        }
        steps.transactions.answered(flight, answer, now);
    }

    /// This node's part of a check is done: the others are asked, if there are any.
    pub(super) fn check_with_others(&mut self, report: Result<Value>, reply: Sender<Result<Value>>) {
        match (&self.network, &mut self.cross_node, report) {
            (Some(network), Some(steps), Ok(report)) if !network.others.is_empty() => {
                let check = CrossCheck::new(network.node, network.others.clone(), report, reply);
                steps.checks_begun += 1;
                steps.checks.insert(steps.checks_begun, check);
            }
            (_, _, report) => {
                let _ = reply.send(report);
            }
        }
    }

    /// True while a check looks for what leads to other nodes, through the whole shard.
    pub(super) fn is_checking(&self) -> bool {
        self.cross_node.as_ref().is_some_and(|steps| !steps.checks.is_empty())
    }

    /// Begins the looks of checks that are due, and asks what they ask.
    fn drive_checks(&mut self) -> Result<()> {
        let Some(steps) = &mut self.cross_node else { return Ok(()) };
        let now = steps.now();
        let due: Vec<u64> = steps
            .checks
            .iter()
            .filter(|(_, c)| c.next_at.is_some_and(|at| at <= now))
            .map(|(n, _)| *n)
            .collect();
        for number in due {
            let beyond = self.batch()?.beyond();
            let Some(steps) = &mut self.cross_node else { return Ok(()) };
            match (beyond, steps.checks.get_mut(&number)) {
                (Ok(beyond), Some(check)) => check.begin(beyond),
                // What is damaged is in the report already.
                (Err(_), Some(check)) => {
                    check.give_up();
                    steps.checks.remove(&number);
                }
                (_, None) => {}
            }
        }
        let Some(steps) = &mut self.cross_node else { return Ok(()) };
        for (number, check) in &mut steps.checks {
            while let Some((question, node, message)) = check.next_question() {
                let flight = OF_CHECK | number << QUESTION_BITS | question;
                steps.waiting.push_back((flight, node, message));
            }
        }
        Ok(())
    }

    /// A node is reached again.
    pub(super) fn reached(&mut self, node: NodeId) {
        if let Some(steps) = &mut self.cross_node {
            let now = steps.now();
            steps.transactions.hurry(node, now);
        }
    }

    /// Does what there is to do.
    pub(super) fn drive_steps(&mut self) -> Result<()> {
        if self.is_checking() {
            self.drive_checks()?;
        }
        loop {
            let Some(steps) = &mut self.cross_node else { return Ok(()) };
            let now = steps.now();
            if std::mem::take(&mut steps.moved) {
                let prepared = self.batch()?.prepared();
                let Some(steps) = &mut self.cross_node else { return Ok(()) };
                steps.transactions.note_prepared(&prepared, now);
                steps.anew.extend(steps.parked.drain(..));
            }
            let Some(steps) = &mut self.cross_node else { return Ok(()) };
            let late: Vec<_> = steps.parked.extract_if(.., |parked| end_of_waiting(parked) <= now).collect();
            steps.anew.extend(late);
            if steps.transactions.next_timeout(now).is_zero() {
                steps.transactions.tick(now);
            }
            while steps.free != 0 {
                let Some((flight, node, message)) = steps.waiting.pop_front() else { break };
                let slot = steps.free.trailing_zeros() as usize;
                debug_assert!(slot < RING_SLOTS);
                steps.free &= !(1 << slot);
                steps.flying.insert(slot, flight);
                steps.sequence += 1;
                let stamp = Stamp { session: steps.session, slot: slot as u16, sequence: steps.sequence };
                if let Some(network) = &self.network {
                    network.commands.give(Command::Step { node, stamp, message });
                }
            }
            let Some(act) = steps.transactions.next_act() else { return Ok(()) };
            match act {
                Act::Ask { flight, node, message } => steps.waiting.push_back((flight, node, message)),
                Act::Again { client, message, since } => match Call::parse(client, message) {
                    Ok(call) => steps.anew.push_back(Parked { call, since }),
                    Err(code) => self.answer_late(client, &Err(code.into())),
                },
                Act::Settle(delivery) => {
                    // One that cannot be noted is made again by the next worker.
                    self.remove_in_batch(|batch| batch.settle(&delivery))?;
                    self.uncommitted += 1;
                }
                Act::Answer { client, answer } => self.answer_late(client, &answer),
                Act::Local { flight, message, client } => self.step_here(flight, message, client)?,
            }
        }
    }

    /// Answers a call whose slot was left open.
    fn answer_late(&mut self, client: Client, answer: &Answer<'_>) {
        let mut reply = ReplyBuf::encode(answer);
        if let Some(i) = self.sessions.iter().position(|s| s.id == client.session) {
            match self.redirect(i, &client, None, answer) {
                Some(Redirect::Ask(call)) => return self.serve_anew(call),
                Some(Redirect::Answer(other)) => reply = other,
                Some(Redirect::Wait) => return,
                None => {}
            }
        }
        let reply = reply.bytes;
        let Some(steps) = &mut self.cross_node else { return };
        let Late { notes, wait } = steps.late.remove(&(client.session, client.slot)).unwrap_or_default();
        let whose = || Whose::Client { client, reply: reply.clone() };
        let is_mounts = self.mount.as_ref().is_none_or(|mount| mount.session == client.session);
        let notes = if is_mounts { Vec::new() } else { notes };
        match (&mut self.leases, &mut self.mount, wait) {
            (Some(leases), _, Some(wait)) => leases.hold(whose(), notes, wait),
            (_, Some(mount), None) if !notes.is_empty() => mount.hold(whose(), notes),
            _ => self.answer_client(client, &reply),
        }
    }

    /// Answers a request, if it is still the slot's.
    pub(super) fn answer_client(&self, client: Client, reply: &[u8]) {
        if let Some(session) = self.sessions.iter().find(|s| s.id == client.session) {
            session.answer_if_waiting(client.slot, client.seq, reply);
        }
    }

    /// A step here was carried out, and the kernel was told of what it has changed.
    pub(super) fn step_told(&mut self, flight: u64, answer: Answer<'_>) {
        if let Some(steps) = &mut self.cross_node {
            let now = steps.now();
            steps.transactions.answered(flight, Ok(answer), now);
        }
    }

    /// Applies a step to this shard, as a change like any.
    fn step_here(&mut self, flight: u64, message: Vec<u8>, client: Option<Client>) -> Result<()> {
        if self.must_commit() {
            self.commit()?;
        }
        // Nobody's: what is kept of it is forgotten at the next start.
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

    /// What follows from a step: journal, orphans, the board, deliveries, leases, the kernel.
    fn follow_step(&mut self, flight: u64, step: &Call, now: Timestamp, answer: Answer<'static>) {
        let request = step.request();
        let (mut notes, mut wait) = (Vec::new(), None);
        if let Ok(reply) = answer {
            if request.changes() {
                self.uncommitted += 1;
                self.journal_step(step, now, &reply);
            }
            // A step on behalf of the mount's own session makes no notes, unless it is nobody's.
            if self.mount.as_ref().is_some_and(|mount| mount.session != step.client.session) {
                notes = notes_of_step(request, self.effects.since(Mark::default()));
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
        if let Some(steps) = &mut self.cross_node {
            steps.moved |= matches!(request, Request::Prepare { .. } | Request::Finish { .. });
            let now = steps.now();
            steps.transactions.deliver(self.effects.deliveries(), now);
        }
        match (answer, &mut self.leases, &mut self.mount, wait) {
            (Ok(reply), Some(leases), _, Some(wait)) => {
                leases.hold(Whose::Step { flight, reply }, notes, wait);
            }
            (Ok(reply), _, Some(mount), None) if !notes.is_empty() => {
                mount.hold(Whose::Step { flight, reply }, notes);
            }
            _ => self.step_told(flight, answer),
        }
    }

    fn apply_step(&mut self, step: &Call, now: Timestamp) -> Result<Answer<'static>> {
        self.batch()?;
        self.effects.clear();
        let Some(batch) = &mut self.batch else { unreachable!("begun above") };
        let answer = batch.apply(step.caller(), step.request(), now, &mut self.effects, &mut []);
        // No step's reply borrows anything.
        Ok(answer.and_then(|reply| reply.owned().ok_or(Refusal::Code(Code::Malformed))))
    }

    /// Writes a step to the journal: a decision as its client's change, whose reply is kept.
    fn journal_step(&mut self, step: &Call, now: Timestamp, reply: &Reply<'_>) {
        let Client { session, slot, seq } = step.client;
        let decides = matches!(step.request(), Request::Decide { .. });
        let client = self.sessions.iter_mut().find(|s| decides && s.id == session);
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
