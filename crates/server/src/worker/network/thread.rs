//! The network thread: takes orders, drives the calls, and hands what other nodes ask to who serves it.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::Arc;
use std::time::Duration;

use forebay_fabric::{Body, CallId, Calls, Failed, Happening, Ticket};
use forebay_ring::{lease_clock, Doorbell};
use forebay_types::limits::{
    LOCKS_OF_UNREACHED_MS, NODE_TIMEOUT_MS, SESSIONS_ASKED_MAX, SESSIONS_PERIOD_MS, STEP_TIMEOUT_MS,
};
use forebay_types::{BackingId, BackingOp, Caller, Code, Ino, NodeId, PoolSpace, Reply, Request};
use forebay_wire::{Message as Wire, Stamp};
use serde_json::{json, Value};

use super::crew::{Asker, Job};
use super::kept::KeptOpen;
use super::leases::{Renewals, LEASE};
use super::met::MetNodes;
use super::placement::{Giver, Said, Surroundings};
use super::removals::Removals;
use super::Order;
use crate::worker::session::{node_of_session, session_on};
use crate::worker::shard_thread::Message;

const NODE_TIMEOUT: Duration = Duration::from_millis(NODE_TIMEOUT_MS);
/// How long `status` waits for the other nodes: longer than a link takes that is made on this occasion.
const SURVEY_TIMEOUT: Duration = Duration::from_millis(1500);
/// Clocks that differ by more are told of: what a node's handshake takes to arrive is less.
const CLOCKS_APART_US: i64 = 2_000_000;
/// Backing files that were removed last: nobody makes them again.
const REMOVED_KEPT: usize = 4096;
/// Room for a reply that is found here: numbers.
const SHORT_REPLY_BYTES: usize = 64;
/// A node that did not answer whether it knows other data of this one is asked again after so long.
const INTRODUCE_AGAIN: Duration = Duration::from_secs(1);
/// The daemon asks for itself on behalf of nobody.
const NOBODY: Caller = Caller { uid: 0, gid: 0 };

/// What a call that is under way is for.
#[derive(Debug)]
enum Flight {
    Forward(Stamp),
    Step(Stamp),
    Removal(Ino),
    EndSession,
    /// Whether these processes are there.
    Review(Vec<u64>),
    /// Where to say whether this node's data are refused.
    Introduction(NodeId, Option<Sender<Introduced>>),
    Survey(NodeId),
    Targets(NodeId),
    /// A lease from this node, asked for at this time.
    Lease(NodeId, u64),
    /// A recall, by its number.
    Recall(u64),
}

/// What another node says to this node's new data: why it refuses them.
pub(super) type Introduced = Result<(), String>;

/// An append, so that a retry is answered and not repeated.
#[derive(Debug)]
struct Append {
    sequence: u64,
    /// Once it is done.
    reply: Option<Vec<u8>>,
}

/// A look at all nodes that `status` asked for.
#[derive(Debug, Default)]
struct Survey {
    waiting: Vec<Sender<Value>>,
    left: usize,
    found: Vec<Value>,
}

/// What a round of the thread came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::worker) enum Round {
    /// There may be more to do.
    Busy,
    /// Nothing is to be done for so long, unless something comes.
    Idle(Duration),
    /// It was told to stop, and has said goodbye.
    Stopped,
}

/// The thread's state.
pub(in crate::worker) struct NetworkThread {
    calls: Calls,
    me: NodeId,
    /// Number, name and host of every node.
    members: Vec<(NodeId, String, String)>,
    orders: Receiver<Order>,
    /// What the calls have no room for.
    backlog: VecDeque<Order>,
    to_shard: Sender<Message>,
    doorbell: Arc<Doorbell>,
    jobs: Sender<Job>,
    /// What the crew keeps open for processes of other nodes.
    kept: Arc<KeptOpen>,
    flights: HashMap<CallId, Flight>,
    removals: Removals,
    renewals: Renewals,
    /// The last append of each session's slot.
    appended: HashMap<(u64, u16), Append>,
    removed: VecDeque<Ino>,
    survey: Survey,
    met: MetNodes,
    /// New data are introduced at the start: where the answer goes, and whether all are told.
    introduction: Option<(Sender<Introduced>, bool)>,
    /// True where the data are new: another node may refuse them at any time.
    is_new: bool,
    /// Nodes that have not answered to that, and when they are asked again.
    introduce_at: BTreeMap<NodeId, Duration>,
    surroundings: Surroundings,
    /// When the other nodes are asked next which of their processes are there.
    review_at: Duration,
    /// Since when a process's node could not be asked.
    unreached: HashMap<u64, Duration>,
    /// The session of what the daemon asks for itself.
    session: u64,
    sequence: u64,
    rings: bool,
}

impl NetworkThread {
    pub(in crate::worker) fn new(
        calls: Calls,
        me: NodeId,
        members: Vec<(NodeId, String, String)>,
        orders: Receiver<Order>,
        to_shard: Sender<Message>,
        doorbell: Arc<Doorbell>,
        (jobs, kept): (Sender<Job>, Arc<KeptOpen>),
    ) -> NetworkThread {
        let givers = members.iter().map(|(node, ..)| Giver { node: *node, targets: 1 }).collect();
        NetworkThread {
            calls,
            me,
            members,
            orders,
            backlog: VecDeque::new(),
            to_shard,
            doorbell,
            jobs,
            kept,
            flights: HashMap::new(),
            removals: Removals::default(),
            renewals: Renewals::default(),
            appended: HashMap::new(),
            removed: VecDeque::new(),
            survey: Survey::default(),
            met: MetNodes::default(),
            introduction: None,
            is_new: false,
            introduce_at: BTreeMap::new(),
            surroundings: Surroundings::new(me, givers),
            review_at: Duration::ZERO,
            unreached: HashMap::new(),
            session: session_on(me, 0),
            sequence: 0,
            rings: false,
        }
    }

    /// Remembers which data nodes are met with; a node with new data introduces itself.
    pub(super) fn with_met(
        mut self,
        met: MetNodes,
        introduction: Option<(Sender<Introduced>, bool)>,
    ) -> NetworkThread {
        self.met = met;
        self.is_new = introduction.is_some();
        self.introduction = introduction;
        self
    }

    /// Works until it is told to stop.
    pub(super) fn run(mut self) {
        self.introduce();
        loop {
            match self.round() {
                Round::Busy => {}
                Round::Idle(patience) => self.calls.wait(patience),
                Round::Stopped => return,
            }
        }
    }

    /// What there is to do now, once; it never waits.
    pub(in crate::worker) fn round(&mut self) -> Round {
        let mut busy = false;
        for _ in 0..self.backlog.len() {
            let Some(order) = self.backlog.pop_front() else { break };
            busy |= self.obey(order);
        }
        while let Ok(order) = self.orders.try_recv() {
            if matches!(order, Order::Stop) {
                self.calls.leave("its daemon stops");
                return Round::Stopped;
            }
            busy |= self.obey(order);
        }
        busy |= self.calls.progress() > 0;
        while let Some(happening) = self.calls.next_happening() {
            busy = true;
            self.hear(happening);
        }
        let now = self.calls.now();
        for (ino, layout) in self.removals.due(now) {
            self.remove(ino, &layout);
        }
        for node in self.renewals.take_due(now) {
            self.renew_lease(node);
        }
        while let Some((node, _)) = self.introduce_at.iter().find(|(_, at)| **at <= now) {
            let node = *node;
            self.introduce_at.remove(&node);
            self.introduce_to(node, None);
        }
        if now >= self.review_at {
            self.review_at = now + Duration::from_millis(SESSIONS_PERIOD_MS);
            self.tell(Message::ReviewSessions(None));
        }
        if std::mem::take(&mut self.rings) {
            self.doorbell.ring();
        }
        if busy {
            return Round::Busy;
        }
        let patience = self.removals.patience(now).min(self.renewals.patience(now));
        Round::Idle(patience.min(Duration::from_secs(1)))
    }

    /// Asks the first other node, by its number, for anything, to hear whether it knows other data of this node; a node with a
    /// new number asks all, so that they know it.
    fn introduce(&mut self) {
        let Some((answer, to_all)) = self.introduction.take() else { return };
        let mut nodes: Vec<NodeId> =
            self.members.iter().map(|m| m.0).filter(|node| *node != self.me).collect();
        nodes.sort();
        nodes.truncate(if to_all { nodes.len() } else { 1 });
        let mut answer = Some(answer);
        for node in nodes {
            self.introduce_to(node, answer.take());
        }
    }

    fn introduce_to(&mut self, node: NodeId, answer: Option<Sender<Introduced>>) {
        let flight = Flight::Introduction(node, answer);
        if self.ask(node, &Request::Space, NODE_TIMEOUT, flight).is_err() {
            self.introduce_at.insert(node, self.calls.now() + INTRODUCE_AGAIN);
        }
    }

    /// A node was asked whether it knows other data of this one.
    fn introduced(&mut self, node: NodeId, answer: Option<Sender<Introduced>>, said: Result<(), Failed>) {
        let said = match said {
            Ok(()) => Ok(()),
            Err(failed) if failed.code == Code::Stale => Err(failed.why),
            // It is not there, or not yet: it may refuse when it is.
            Err(_) => {
                self.introduce_at.insert(node, self.calls.now() + INTRODUCE_AGAIN);
                Ok(())
            }
        };
        if let Some(answer) = answer {
            // Nobody may wait any more.
            let _ = answer.send(said);
        }
    }

    /// A node has been met.
    fn meet(&mut self, node: NodeId, incarnation: u64, address: Option<&[u8]>) {
        let data = Calls::data_of(incarnation);
        let Some(news) = self.met.meet(node, data, address) else { return };
        self.calls.expect_data(node, data);
        // One in the place of another, whose data are gone.
        let (Some(old), Some(address)) = (news.instead_of, address) else { return };
        if self.calls.add_node(node, address).is_err() {
            return tracing::error!("cannot use the address of node {node}");
        }
        let old = NodeId(old);
        if let Some(member) = self.members.iter_mut().find(|m| m.0 == old) {
            tracing::warn!("node {old} ({}) is now node {node}: what had number {old} is gone", member.1);
            member.0 = node;
            self.surroundings.renumber(old, node);
        }
    }

    fn tell(&mut self, message: Message) {
        // The shard thread outlives this one.
        let _ = self.to_shard.send(message);
        self.rings = true;
    }

    /// Does what an order says, or keeps it for later: false then.
    fn obey(&mut self, order: Order) -> bool {
        match order {
            Order::Forward { node, stamp, message } => {
                return self.forward(node, stamp, message);
            }
            Order::Step { node, stamp, message } => return self.step(node, stamp, message),
            Order::Answer { ticket, reply } => self.answer(&ticket, &reply),
            Order::Serve { ticket, message } => self.serve(ticket, message),
            Order::ServeHere { stamp, message } => {
                if self.jobs.send(Job { asker: Asker::Here(stamp), message }).is_err() {
                    self.answered(stamp, Err(Code::Io));
                }
            }
            Order::AnswerHere { stamp, reply } => self.answered(stamp, Ok(reply)),
            Order::Remove(ino, layout) => self.remove(ino, &layout),
            Order::EndSession(session, nodes) => {
                // What it asked last must not come behind the word that it is gone.
                let is_its = |stamp: &Stamp| stamp.session == session;
                if self.flights.values().any(|f| matches!(f, Flight::Forward(stamp) if is_its(stamp)))
                    || self.backlog.iter().any(|o| matches!(o, Order::Forward { stamp, .. } if is_its(stamp)))
                {
                    self.backlog.push_back(Order::EndSession(session, nodes));
                    return false;
                }
                self.end_appends(session);
                for node in nodes {
                    if node == self.me {
                        self.kept.locks.end(session);
                        continue;
                    }
                    // One that is down asks when it is back.
                    let request = Request::EndSession { session };
                    let _ = self.ask(node, &request, NODE_TIMEOUT, Flight::EndSession);
                }
            }
            Order::RenewLease(node) => self.renewals.want(node, self.calls.now()),
            Order::Recall { node, number, message } => return self.recall(node, number, message),
            Order::Review(node, sessions) => self.review(node, sessions),
            Order::Survey(reply) => self.look_around(reply),
            Order::Space { stamp, own } => {
                self.refresh_surroundings();
                if let Some(space) = self.surroundings.space(self.calls.now(), stamp, own) {
                    self.answered_with(stamp, Ok(Reply::Space(space)));
                }
            }
            Order::Place { stamp, stripe_count, own } => {
                self.refresh_surroundings();
                let targets = self.surroundings.place(&own, stripe_count);
                self.answered_with(stamp, Ok(Reply::Placed(targets)));
            }
            Order::Stop => {}
        }
        true
    }

    /// Asks a node for the daemon itself: what is repeated without harm.
    fn ask(
        &mut self,
        node: NodeId,
        request: &Request<'_>,
        within: Duration,
        flight: Flight,
    ) -> Result<(), Code> {
        self.sequence += 1;
        let stamp = Stamp { session: self.session, slot: 0, sequence: self.sequence };
        let deadline = self.calls.now() + within;
        let id = self.calls.call(node, stamp, &Wire::Ask(NOBODY, *request), deadline)?;
        self.flights.insert(id, flight);
        Ok(())
    }

    fn renew_lease(&mut self, node: NodeId) {
        // The lease counts from here: from before it is asked for.
        if self.ask(node, &Request::RenewLease, LEASE, Flight::Lease(node, lease_clock())).is_err() {
            self.tell(Message::LeaseRenewed(node, None));
        }
    }

    fn recall(&mut self, node: NodeId, number: u64, message: Vec<u8>) -> bool {
        let Ok((_, request)) = Request::decode(&message) else { return true };
        match self.ask(node, &request, LEASE, Flight::Recall(number)) {
            Ok(()) => true,
            Err(Code::Busy) => {
                self.backlog.push_back(Order::Recall { node, number, message });
                false
            }
            Err(_) => {
                self.tell(Message::Recalled(number, false));
                true
            }
        }
    }

    fn forward(&mut self, node: NodeId, stamp: Stamp, message: Vec<u8>) -> bool {
        let deadline = self.calls.now() + NODE_TIMEOUT;
        let asked = match Request::decode(&message) {
            Ok((caller, request)) => self.calls.call(node, stamp, &Wire::Ask(caller, request), deadline),
            Err(code) => Err(code),
        };
        match asked {
            Ok(id) => {
                self.flights.insert(id, Flight::Forward(stamp));
                true
            }
            Err(Code::Busy) => {
                self.backlog.push_back(Order::Forward { node, stamp, message });
                false
            }
            Err(code) => {
                tracing::warn!("cannot ask node {node}: {code}");
                let code = if code == Code::Invalid { Code::Io } else { code };
                self.answered(stamp, Err(code));
                true
            }
        }
    }

    /// Asks for the shard thread itself.
    fn step(&mut self, node: NodeId, stamp: Stamp, message: Vec<u8>) -> bool {
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
                self.backlog.push_back(Order::Step { node, stamp, message });
                return false;
            }
            Err(code) => {
                let known = self.members.iter().any(|(number, ..)| *number == node);
                let code = if known { code } else { Code::NoDevice };
                tracing::warn!("cannot ask node {node} for its part: {code}");
                self.tell(Message::Stepped(usize::from(stamp.slot), Err(code)));
            }
        }
        true
    }

    /// A client's request has an answer that was found here.
    fn answered_with(&mut self, stamp: Stamp, reply: Result<Reply<'_>, Code>) {
        let mut bytes = [0; SHORT_REPLY_BYTES];
        let reply = Reply::encode(&reply, &mut bytes).map(|n| bytes[..n].to_vec());
        self.answered(stamp, reply);
    }

    /// A client's request has its answer.
    fn answered(&mut self, stamp: Stamp, reply: Result<Vec<u8>, Code>) {
        let reply = reply.unwrap_or_else(|code| {
            let mut bytes = [0; 8];
            let n = Reply::encode(&Err(code), &mut bytes).unwrap_or(0);
            bytes[..n].to_vec()
        });
        self.tell(Message::Answered { stamp, reply });
    }

    /// Answers a node.
    fn answer(&mut self, ticket: &Ticket, reply: &[u8]) {
        let stamp = ticket.stamp;
        if let Some(append) = self.appended.get_mut(&(stamp.session, stamp.slot)) {
            if append.sequence == stamp.sequence {
                append.reply = Some(reply.to_vec());
            }
        }
        let result = Reply::decode(reply);
        if let Err(code) = self.calls.answer(ticket, &Wire::Answer(result)) {
            tracing::error!("cannot answer node {}: {code}", ticket.node);
            self.refuse(ticket, code, "the reply cannot be sent");
        }
    }

    fn refuse(&mut self, ticket: &Ticket, code: Code, why: &str) {
        // An asker that is gone is not told.
        let _ = self.calls.answer(ticket, &Wire::Failure { code, detail: why.as_bytes() });
    }

    /// Something happened.
    fn hear(&mut self, happening: Happening) {
        match happening {
            Happening::Up { node, incarnation, clock_ahead_us, .. } => {
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
            // The calls have told of it.
            Happening::Down { .. } => {}
            Happening::Joined { node, incarnation, ref address, .. } => {
                self.meet(node, incarnation, Some(address));
                tracing::info!("node {node} has joined");
                self.tell(Message::ReviewSessions(Some(node)));
            }
            Happening::Left { node, why, .. } => tracing::info!("node {node} has left: {why}"),
            Happening::Asked { ticket, body } => self.asked(ticket, &body),
            Happening::Answered { call, node, outcome } => self.call_ended(call, node, outcome),
            Happening::Moved { .. } => {}
        }
    }

    /// A node asks.
    fn asked(&mut self, ticket: Ticket, body: &Body) {
        let Wire::Ask(_, request) = body.message() else {
            return self.refuse(&ticket, Code::NotSupported, "this version does not serve that");
        };
        let message = body.bytes().to_vec();
        match request {
            Request::Backing(id, op) => self.asked_backing(ticket, &id, &op, message),
            Request::EndSession { session } if node_of_session(session) == ticket.node => {
                self.session_ended(session);
                self.answer(&ticket, &DONE);
            }
            Request::AreThere { sessions } => {
                let words = sessions.chunks_exact(8).filter_map(|w| w.try_into().ok());
                let sessions = words.map(u64::from_le_bytes).collect();
                self.tell(Message::AreThere { ticket, sessions });
            }
            request if request.is_between_daemons() => self.tell(Message::LeaseAsked { ticket, message }),
            _ => self.tell(Message::Asked { ticket, message }),
        }
    }

    fn asked_backing(&mut self, ticket: Ticket, id: &BackingId, op: &BackingOp<'_>, message: Vec<u8>) {
        let key = (ticket.stamp.session, ticket.stamp.slot);
        match op {
            BackingOp::Make if self.removed.contains(&id.ino) => {
                return self.answer(&ticket, &NOT_FOUND);
            }
            BackingOp::Remove => {
                self.removed.push_back(id.ino);
                if self.removed.len() > REMOVED_KEPT {
                    self.removed.pop_front();
                }
                // A client may be about to make it: the shard thread knows.
                return self.tell(Message::RemoveBacking { ticket, id: *id, message });
            }
            BackingOp::Write { append: true, .. } => {
                let sequence = ticket.stamp.sequence;
                match self.appended.get(&key).filter(|append| append.sequence == sequence) {
                    Some(Append { reply: Some(reply), .. }) => {
                        let reply = reply.clone();
                        return self.answer(&ticket, &reply);
                    }
                    // It is being written by another's ticket, whose asker has started anew: whether it will be is not known.
                    Some(Append { reply: None, .. }) => {
                        return self.refuse(&ticket, Code::Busy, "it is being written")
                    }
                    None => {
                        self.appended.insert(key, Append { sequence, reply: None });
                    }
                }
            }
            _ => {}
        }
        self.serve(ticket, message);
    }

    fn serve(&mut self, ticket: Ticket, message: Vec<u8>) {
        if self.jobs.send(Job { asker: Asker::There(ticket), message }).is_err() {
            self.refuse(&ticket, Code::Io, "the threads that serve data have ended");
        }
    }

    /// A process of another node is gone.
    fn session_ended(&mut self, session: u64) {
        self.unreached.remove(&session);
        self.end_appends(session);
        self.kept.end(session);
        self.tell(Message::EndedElsewhere(node_of_session(session), session));
    }

    /// The node of these processes does not answer. After a time it is taken for dead, and what they have locked is free.
    fn not_reviewed(&mut self, sessions: &[u64]) {
        let now = self.calls.now();
        for session in sessions {
            let since = *self.unreached.entry(*session).or_insert(now);
            if now.saturating_sub(since) >= Duration::from_millis(LOCKS_OF_UNREACHED_MS) {
                self.kept.locks.end(*session);
            }
        }
    }

    /// Asks which of these processes of other nodes are there, and of those that have something open here.
    fn review(&mut self, node: Option<NodeId>, sessions: Vec<u64>) {
        let kept = self.kept.sessions().into_iter().chain(self.appended.keys().map(|(of, _)| *of));
        let mut by_node: BTreeMap<NodeId, BTreeSet<u64>> = BTreeMap::new();
        for session in sessions.into_iter().chain(kept) {
            let of = node_of_session(session);
            if of != self.me && node.is_none_or(|node| node == of) {
                by_node.entry(of).or_default().insert(session);
            }
        }
        for (node, sessions) in by_node {
            let sessions: Vec<u64> = sessions.into_iter().collect();
            for some in sessions.chunks(SESSIONS_ASKED_MAX) {
                let words: Vec<u8> = some.iter().flat_map(|session| session.to_le_bytes()).collect();
                let request = Request::AreThere { sessions: &words };
                // A node that is down is asked again in time.
                let _ = self.ask(node, &request, NODE_TIMEOUT, Flight::Review(some.to_vec()));
            }
        }
    }

    fn end_appends(&mut self, session: u64) {
        self.appended.retain(|(of, _), _| *of != session);
    }

    fn call_ended(&mut self, call: CallId, node: NodeId, outcome: Result<Body, Failed>) {
        let Some(flight) = self.flights.remove(&call) else { return };
        if let Err(failed) = &outcome {
            tracing::debug!("a request to node {node} failed: {}", failed.why);
        }
        let failed = outcome.as_ref().err().cloned();
        if let Some(failed) = failed.as_ref().filter(|failed| self.is_new && failed.code == Code::Stale) {
            // What this node gives out under its number is another's for the others.
            self.tell(Message::Unwelcome(failed.why.clone()));
        }
        let reply = outcome.map_err(|failed| failed.code).and_then(|body| match body.message() {
            Wire::Answer(_) => Ok(body.bytes().to_vec()),
            _ => Err(Code::Malformed),
        });
        match flight {
            Flight::Forward(stamp) => {
                // What the other side says of the network is an I/O error to a program.
                let reply = reply.map_err(|code| match code {
                    Code::Busy | Code::TimedOut | Code::Malformed | Code::NotPermitted | Code::Stale => {
                        Code::Io
                    }
                    code => code,
                });
                self.answered(stamp, reply);
            }
            Flight::Step(stamp) => {
                let reply = reply.map_err(|code| match code {
                    // Whether it came to be served is not known.
                    Code::TimedOut | Code::Malformed | Code::NotPermitted | Code::NoDevice => Code::Io,
                    code => code,
                });
                self.tell(Message::Stepped(usize::from(stamp.slot), reply));
            }
            Flight::Removal(ino) => {
                let done = reply.is_ok_and(|reply| Reply::decode(&reply).is_ok());
                if let Some(ino) = self.removals.ended(ino, done, self.calls.now()) {
                    self.tell(Message::Swept(vec![ino]));
                }
            }
            Flight::EndSession => {}
            Flight::Introduction(node, answer) => {
                self.introduced(node, answer, failed.map_or(Ok(()), Err));
            }
            Flight::Lease(node, asked) => self.lease_ended(node, asked, reply),
            Flight::Recall(number) => {
                let answered = reply.is_ok_and(|reply| Reply::decode(&reply).is_ok());
                self.tell(Message::Recalled(number, answered));
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
            Flight::Survey(node) => self.surveyed(node, reply),
            Flight::Targets(node) => self.heard_targets(node, reply),
        }
    }

    fn lease_ended(&mut self, node: NodeId, asked: u64, reply: Result<Vec<u8>, Code>) {
        match reply.as_deref().map(Reply::decode) {
            Ok(Ok(Reply::Count(term))) => {
                let until = asked + LEASE.as_nanos() as u64;
                self.tell(Message::LeaseRenewed(node, Some((term, until))));
            }
            // A recall from here is under way there: as soon as it is answered.
            Ok(Err(Code::Busy)) => self.renewals.want(node, self.calls.now()),
            _ => self.tell(Message::LeaseRenewed(node, None)),
        }
    }

    /// Has the stripes of an inode removed that lie on other nodes.
    fn remove(&mut self, ino: Ino, layout: &forebay_types::Layout) {
        let elsewhere: Vec<BackingId> = layout
            .stripes()
            .map(|(component, stripe)| BackingId::of(ino, layout, component, stripe))
            .filter(|id| id.node() != self.me)
            .collect();
        self.removals.begin(ino, layout, elsewhere.len());
        if elsewhere.is_empty() {
            self.tell(Message::Swept(vec![ino]));
        }
        for id in elsewhere {
            let request = Request::Backing(id, BackingOp::Remove);
            if self.ask(id.node(), &request, NODE_TIMEOUT, Flight::Removal(ino)).is_err() {
                self.removals.ended(ino, false, self.calls.now());
            }
        }
    }

    // --- space of all nodes

    /// Asks the other nodes for theirs, unless that was just done.
    fn refresh_surroundings(&mut self) {
        for node in self.surroundings.next_round(self.calls.now()) {
            let asked = self.ask(node, &Request::Targets, SURVEY_TIMEOUT, Flight::Targets(node));
            if let Err(code) = asked {
                self.heard_targets(node, Err(code));
            }
        }
    }

    fn heard_targets(&mut self, node: NodeId, reply: Result<Vec<u8>, Code>) {
        let said = reply.and_then(|reply| match Reply::decode(&reply)? {
            Reply::Targets { inodes, free_inodes, spaces } => {
                Ok(Said { inodes, free_inodes, spaces: spaces.iter().collect() })
            }
            _ => Err(Code::Malformed),
        });
        for (stamp, space) in self.surroundings.hear(node, said) {
            self.answered_with(stamp, Ok(Reply::Space(space)));
        }
    }

    // --- status

    fn look_around(&mut self, reply: Sender<Value>) {
        self.survey.waiting.push(reply);
        if self.survey.waiting.len() > 1 {
            return; // one is under way
        }
        self.survey.left = self.members.len();
        for i in 0..self.members.len() {
            let node = self.members[i].0;
            if node == self.me {
                self.survey.left -= 1;
            } else if let Err(code) = self.ask(node, &Request::Space, SURVEY_TIMEOUT, Flight::Survey(node)) {
                self.surveyed(node, Err(code));
            }
        }
        self.end_survey();
    }

    fn surveyed(&mut self, node: NodeId, reply: Result<Vec<u8>, Code>) {
        self.survey.left = self.survey.left.saturating_sub(1);
        let (name, host) = self
            .members
            .iter()
            .find(|(number, ..)| *number == node)
            .map_or(("", ""), |(_, name, host)| (name.as_str(), host.as_str()));
        let space = reply.and_then(|reply| match Reply::decode(&reply)? {
            Reply::Space(space) => Ok(space),
            _ => Err(Code::Malformed),
        });
        let mut told = json!({ "node": node.0, "name": name, "host": host, "state": "up" });
        match space {
            Ok(PoolSpace { total_bytes, free_bytes, inodes, .. }) => {
                told["total_bytes"] = total_bytes.into();
                told["free_bytes"] = free_bytes.into();
                told["inodes"] = inodes.into();
            }
            Err(_) => told["state"] = "unreachable".into(),
        }
        self.survey.found.push(told);
        self.end_survey();
    }

    fn end_survey(&mut self) {
        if self.survey.left > 0 || self.survey.waiting.is_empty() {
            return;
        }
        let mut survey = std::mem::take(&mut self.survey);
        survey.found.sort_by_key(|node| node["node"].as_u64());
        let s = self.calls.statistics();
        let name =
            self.members.iter().find(|(number, ..)| *number == self.me).map(|(_, name, _)| name.as_str());
        let told = json!({
            "node_name": name.unwrap_or_default(),
            "nodes": survey.found,
            "network": {
                "frames_in": s.frames_in, "forged": s.forged, "replayed": s.replayed, "unusable": s.unusable,
                "repeated": s.repeated, "resent": s.resent, "links_made": s.links_made,
            },
        });
        for waiting in survey.waiting {
            let _ = waiting.send(told.clone());
        }
    }
}

/// `Reply::Done`, encoded.
const DONE: [u8; 4] = [0, 0, 1, 0];
/// `Err(Code::NotFound)`, encoded.
const NOT_FOUND: [u8; 4] = [Code::NotFound as u8, 0, 0, 0];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constant_replies_are_what_the_encoder_writes() {
        let mut bytes = [0; 8];
        let n = Reply::encode(&Ok(Reply::Done), &mut bytes).unwrap();
        assert_eq!(bytes[..n], DONE);
        let n = Reply::encode(&Err(Code::NotFound), &mut bytes).unwrap();
        assert_eq!(bytes[..n], NOT_FOUND);
    }
}
