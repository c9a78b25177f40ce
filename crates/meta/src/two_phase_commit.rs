//! Drives cross-node transactions: those that this node coordinates, its deliveries to other nodes, and parts prepared
//! here whose coordinator does not answer. No I/O: the caller executes each [`Act`] and reports the result.
//!
//! ```text
//! begin ─► prepare, part by part ─► decide (a record, with the reply) ─► deliver to participants ─► reply
//!              │ refused                                                     │ not reached: retry until it is
//!              └─► drop on all; reply, or start again on a conflict          └─► reply all the same: it is decided
//! ```
//! An undecided transaction is only in memory: one that its coordinator does not know was aborted. A decided one is in
//! the shard until all participants have acknowledged it. So when a node dies, at any instant, the others can finish.
//! Deliveries are sent again until they are acknowledged, and can be repeated. Tests: `tests/transactions`, which drops
//! messages and restarts nodes at every step.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use forebay_types::limits::{DOUBT_AFTER_MS, TRANSACTION_TIMEOUT_MS};
use forebay_types::{Answer, Caller, Code, NodeId, Outcome, Refusal, Reply, Request, TxId};

use crate::coordinator::{Coordinator, Exclusive, Next, Plan};
use crate::deliveries::{Deliveries, Ended};
use crate::effects::Delivery;

/// The largest encoded reply of a cross-node transaction.
const REPLY_BYTES_MAX: usize = 512;
/// The largest of the daemon's own requests: [`Request::Decide`] with a node for each part that a transaction can have.
const REQUEST_BYTES_MAX: usize = 2048;
/// The daemon's own requests are made for no user.
const NOBODY: Caller = Caller { uid: 0, gid: 0 };

/// The request of a client that started a transaction: session, slot, sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Client {
    /// The process's session.
    pub session: u64,
    /// Its slot.
    pub slot: usize,
    /// The slot's sequence.
    pub seq: u64,
}

/// An action for the caller, in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Act {
    /// Apply a request to this node's shard, a [`Request::Decide`] as `client`'s change. Then call
    /// [`Transactions::answered`].
    Local {
        /// The number by which to report the answer.
        flight: u64,
        /// The encoded request.
        message: Vec<u8>,
        /// The client for which it is made, if any.
        client: Option<Client>,
    },
    /// Send a request to another node. Then call [`Transactions::answered`], with [`Code::NoDevice`] if another node
    /// has its place for good.
    Ask {
        /// The number by which to report the answer.
        flight: u64,
        /// The node.
        node: NodeId,
        /// The encoded request.
        message: Vec<u8>,
    },
    /// Answer a client's request.
    Answer {
        /// The client.
        client: Client,
        /// The result.
        answer: Box<Answer<'static>>,
    },
    /// Execute a client's request again: the transaction that it met is over by now.
    Again {
        /// The client.
        client: Client,
        /// The encoded request.
        message: Vec<u8>,
        /// When the request first arrived.
        since: Duration,
    },
    /// A delivery was acknowledged: call [`crate::Batch::settle`].
    Settle(Delivery),
}

/// What a request in flight is for.
#[derive(Debug)]
enum Flight {
    Prepare(TxId),
    Decide(TxId),
    Abort,
    Deliver(Delivery),
    Doubt(TxId),
    Resolve(TxId),
}

/// A client's request that needs a cross-node transaction.
#[derive(Debug)]
struct PendingRequest {
    client: Client,
    message: Vec<u8>,
    since: Duration,
}

/// A transaction that is not decided.
#[derive(Debug)]
struct Undecided {
    coordinator: Coordinator,
    asked: PendingRequest,
    /// Set when it is decided.
    reply: Reply<'static>,
}

/// A request that is answered after deliveries.
#[derive(Debug)]
struct Waiting {
    client: Client,
    reply: Reply<'static>,
    left: Vec<Delivery>,
}

/// An action that is retried at a time, unless it is in flight.
#[derive(Clone, Copy, Debug)]
struct Due {
    at: Duration,
    under_way: bool,
}

/// All cross-node transactions of a node; see the module.
#[derive(Debug)]
pub struct Transactions {
    me: NodeId,
    next_number: u64,
    next_flight: u64,
    acts: VecDeque<Act>,
    flights: HashMap<u64, Flight>,
    undecided: HashMap<TxId, Undecided>,
    /// Operations that run one at a time: the running transaction of each sort, and requests that wait for it.
    running: HashMap<Exclusive, TxId>,
    queue: VecDeque<(Exclusive, PendingRequest, Caller, Plan)>,
    /// Requests that met another transaction.
    again: Vec<(Duration, PendingRequest)>,
    waiting: Vec<Waiting>,
    deliveries: Deliveries,
    /// Deliveries of the previous worker that have not been tried since.
    inherited: BTreeSet<Delivery>,
    doubts: BTreeMap<TxId, Due>,
}

fn encode(request: &Request<'_>) -> Result<Vec<u8>, Code> {
    let mut bytes = vec![0; REQUEST_BYTES_MAX];
    let n = request.encode(NOBODY, &mut bytes)?;
    bytes.truncate(n);
    Ok(bytes)
}

/// The message of a request without fields of variable length.
fn encoded(request: &Request<'_>) -> Vec<u8> {
    let message = encode(request);
    debug_assert!(message.is_ok(), "{request:?} does not fit");
    message.unwrap_or_default()
}

/// The message by which this node decides a transaction.
fn decide(tx: TxId, nodes: &[NodeId], reply: Reply<'_>) -> Result<Vec<u8>, Code> {
    let nodes: Vec<u8> = nodes.iter().flat_map(|node| node.0.to_le_bytes()).collect();
    let mut room = [0; REPLY_BYTES_MAX];
    let n = Reply::encode(&Ok(reply), &mut room)?;
    encode(&Request::Decide { tx, nodes: &nodes, reply: &room[..n] })
}

impl Transactions {
    /// The transactions of node `me`. `first` is a random number, so that no number is used twice.
    pub fn new(me: NodeId, first: u64) -> Transactions {
        Transactions {
            me,
            next_number: first,
            next_flight: 1,
            acts: VecDeque::new(),
            flights: HashMap::new(),
            undecided: HashMap::new(),
            running: HashMap::new(),
            queue: VecDeque::new(),
            again: Vec::new(),
            waiting: Vec::new(),
            deliveries: Deliveries::default(),
            inherited: BTreeSet::new(),
            doubts: BTreeMap::new(),
        }
    }

    /// The next action.
    pub fn next_act(&mut self) -> Option<Act> {
        self.acts.pop_front()
    }

    /// True when there is an action.
    pub fn has_acts(&self) -> bool {
        !self.acts.is_empty()
    }

    /// True when nothing is in progress, to be delivered or in doubt.
    pub fn is_idle(&self) -> bool {
        self.acts.is_empty()
            && self.undecided.is_empty()
            && self.queue.is_empty()
            && self.again.is_empty()
            && self.deliveries.is_empty()
            && self.doubts.is_empty()
    }

    /// Starts the transaction planned for a request; the result is an [`Act::Answer`]. `since`: when the request first
    /// arrived.
    pub fn begin(
        &mut self,
        client: Client,
        caller: Caller,
        message: &[u8],
        plan: Plan,
        since: Duration,
        now: Duration,
    ) {
        let asked = PendingRequest { client, message: message.to_vec(), since };
        if let Some(exclusive) =
            Coordinator::exclusive(&plan).filter(|exclusive| self.running.contains_key(exclusive))
        {
            return self.queue.push_back((exclusive, asked, caller, plan));
        }
        self.start(asked, caller, plan, now);
    }

    fn start(&mut self, asked: PendingRequest, caller: Caller, plan: Plan, now: Duration) {
        self.next_number = self.next_number.wrapping_add(1);
        let mut tx = TxId::new(self.me, self.next_number);
        if tx == TxId::new(self.me, 0) {
            self.next_number += 1;
            tx = TxId::new(self.me, self.next_number);
        }
        if let Some(exclusive) = Coordinator::exclusive(&plan) {
            self.running.insert(exclusive, tx);
        }
        let mut coordinator = Coordinator::new(tx, self.me, caller, plan);
        let next = coordinator.begin();
        self.undecided.insert(tx, Undecided { coordinator, asked, reply: Reply::Done });
        self.go_on(tx, next, now);
    }

    /// Answers a request with `reply` when these deliveries were made, or could not be made.
    pub fn answer_after(&mut self, client: Client, reply: Reply<'static>, deliveries: &[Delivery]) {
        let waiting = Waiting { client, reply, left: deliveries.to_vec() };
        self.waiting.push(waiting);
        self.answer_waiting(|_| false);
    }

    /// A client repeats a change of the previous worker whose reply is known. The change may be one that other nodes
    /// have not been notified of. If there are such deliveries, returns true: the request is answered when all
    /// deliveries of the previous worker have been tried.
    pub fn answer_after_inherited(&mut self, client: Client, reply: Reply<'static>) -> bool {
        if self.inherited.is_empty() {
            return false;
        }
        // Which of them belong to this change is not known.
        let left = self.inherited.iter().copied().collect();
        self.waiting.push(Waiting { client, reply, left });
        true
    }

    /// Adds deliveries, which are sent until they are acknowledged.
    pub fn deliver(&mut self, deliveries: &[Delivery], now: Duration) {
        for delivery in deliveries {
            self.deliveries.add(*delivery, now);
        }
        self.pump(now);
    }

    /// Sets the list of transactions with parts that are prepared on this node.
    pub fn note_prepared(&mut self, prepared: &[TxId], now: Duration) {
        self.doubts.retain(|tx, _| prepared.contains(tx));
        for tx in prepared {
            // Transactions that this node coordinates and has not decided are in `undecided`; the previous worker left
            // all others.
            let next_timeout = Duration::from_millis(DOUBT_AFTER_MS);
            self.doubts.entry(*tx).or_insert(Due { at: now + next_timeout, under_way: false });
        }
    }

    /// The same at the start, when this node coordinates no undecided transaction.
    pub fn resume(&mut self, prepared: &[TxId], deliveries: &[Delivery], now: Duration) {
        for tx in prepared {
            self.doubts.insert(*tx, Due { at: now, under_way: false });
        }
        self.inherited.extend(deliveries);
        self.deliver(deliveries, now);
        self.tick(now);
    }

    /// True for a transaction that this node coordinates and has not decided.
    pub fn is_undecided(&self, tx: TxId) -> bool {
        self.undecided.contains_key(&tx)
    }

    /// A node is reachable again: deliveries to it and questions to it as a coordinator are due.
    pub fn hurry(&mut self, node: NodeId, now: Duration) {
        self.deliveries.hurry(node, now);
        for (tx, due) in &mut self.doubts {
            if tx.coordinator() == node {
                due.at = due.at.min(now);
            }
        }
    }

    /// Executes what is due.
    pub fn tick(&mut self, now: Duration) {
        let (due, later): (Vec<_>, Vec<_>) = self.again.drain(..).partition(|(at, _)| *at <= now);
        self.again = later;
        for (_, PendingRequest { client, message, since }) in due {
            self.acts.push_back(Act::Again { client, message, since });
        }
        self.pump(now);
        let due: Vec<TxId> =
            self.doubts.iter().filter(|(_, d)| !d.under_way && d.at <= now).map(|(tx, _)| *tx).collect();
        for tx in due {
            if let Some(doubt) = self.doubts.get_mut(&tx) {
                doubt.at = now + Duration::from_millis(DOUBT_AFTER_MS);
                // If the transaction is undecided here, or its commit is being delivered to this node, the coordinator
                // need not be asked.
                let known = self.undecided.contains_key(&tx)
                    || self.deliveries.contains(&Delivery::Commit(tx, self.me));
                if !known {
                    doubt.under_way = true;
                    self.ask(tx.coordinator(), encoded(&Request::AskOutcome { tx }), Flight::Doubt(tx));
                }
            }
        }
    }

    /// The time until something is due.
    pub fn next_timeout(&self, now: Duration) -> Duration {
        let due = self.doubts.values().filter(|d| !d.under_way).map(|d| d.at);
        let due = due.chain(self.deliveries.next_at());
        let next = due.chain(self.again.iter().map(|(at, _)| *at)).min();
        next.map_or(Duration::MAX, |at| at.saturating_sub(now))
    }

    /// Reports the answer to an act; or the reason why there is none.
    pub fn answered(&mut self, flight: u64, answer: Result<Answer<'_>, Code>, now: Duration) {
        let Some(flight) = self.flights.remove(&flight) else { return };
        let reached = answer.is_ok();
        // Only this node itself gives this code, never another node's reply: the number belongs to no node of the pool,
        // so no message from it will arrive any more.
        let gone = answer == Err(Code::NoDevice);
        let reply = answer.unwrap_or_else(|code| Err(code.into()));
        match flight {
            Flight::Prepare(tx) => {
                let Some(undecided) = self.undecided.get_mut(&tx) else { return };
                let lost = if gone { undecided.coordinator.lost() } else { None };
                let next = match (lost, reply) {
                    (Some(next), _) => next,
                    (None, Ok(reply)) => undecided.coordinator.prepared(reply),
                    // The client's node sends the request again, to the part.
                    (None, Err(Refusal::Wide(parts))) => Ok(Next::Nothing(Err(Refusal::Wide(parts)))),
                    (None, Err(Refusal::Code(code))) => Err(code),
                };
                self.go_on(tx, next, now);
            }
            Flight::Decide(tx) => match reply {
                Ok(_) => {
                    let Some(undecided) = self.undecided.remove(&tx) else { return };
                    let nodes = undecided.coordinator.nodes.iter();
                    let left: Vec<_> = nodes.map(|node| Delivery::Commit(tx, *node)).collect();
                    self.answer_after(undecided.asked.client, undecided.reply, &left);
                    self.deliver(&left, now);
                    self.decided(tx, now);
                }
                Err(refusal) => self.abort(tx, Err(refusal), now),
            },
            Flight::Abort => {}
            Flight::Deliver(delivery) => {
                let how = match reply {
                    Ok(_) => Ended::Made,
                    Err(_) if gone => Ended::Made,
                    Err(_) if reached => Ended::Refused,
                    Err(_) => Ended::NotReached,
                };
                self.deliveries.ended(delivery, how, now);
                if how == Ended::Made {
                    self.acts.push_back(Act::Settle(delivery));
                }
                let silent = (how == Ended::NotReached).then_some(delivery.node());
                let has_ended = |of: &Delivery| *of == delivery || Some(of.node()) == silent;
                self.inherited.retain(|of| !has_ended(of));
                // A client that waits for a node that is not reached waits for one try only.
                self.answer_waiting(has_ended);
                self.pump(now);
            }
            Flight::Doubt(tx) => {
                if let Some(doubt) = self.doubts.get_mut(&tx) {
                    doubt.under_way = false;
                }
                let commit = match reply {
                    Ok(Reply::Outcome(Outcome::Committed)) => true,
                    // A coordinator that is no longer a node of the pool can never send another outcome.
                    Ok(Reply::Outcome(Outcome::Aborted)) => false,
                    Err(_) if gone => false,
                    _ => return,
                };
                self.ask(self.me, encoded(&Request::Finish { tx, commit }), Flight::Resolve(tx));
            }
            Flight::Resolve(tx) => {
                if reply.is_ok() {
                    self.doubts.remove(&tx);
                }
            }
        }
    }

    fn ask(&mut self, node: NodeId, message: Vec<u8>, what: Flight) {
        let client = match &what {
            Flight::Prepare(tx) => self.undecided.get(tx).map(|undecided| undecided.asked.client),
            Flight::Deliver(of) => {
                self.waiting.iter().find(|waiting| waiting.left.contains(of)).map(|waiting| waiting.client)
            }
            _ => None,
        };
        let flight = self.next_flight;
        self.next_flight += 1;
        self.flights.insert(flight, what);
        self.acts.push_back(match node == self.me {
            true => Act::Local { flight, message, client },
            false => Act::Ask { flight, node, message },
        });
    }

    fn go_on(&mut self, tx: TxId, next: Result<Next, Code>, now: Duration) {
        match next {
            Ok(Next::Prepare(node, message)) => self.ask(node, message, Flight::Prepare(tx)),
            Ok(Next::Decide(reply)) => {
                let Some(undecided) = self.undecided.get_mut(&tx) else { return };
                let message = match decide(tx, &undecided.coordinator.nodes, reply) {
                    Ok(message) => message,
                    Err(code) => return self.abort(tx, Err(code.into()), now),
                };
                undecided.reply = reply;
                let (flight, client) = (self.next_flight, Some(undecided.asked.client));
                self.next_flight += 1;
                self.flights.insert(flight, Flight::Decide(tx));
                self.acts.push_back(Act::Local { flight, message, client });
            }
            Ok(Next::Nothing(answer)) => self.abort(tx, answer, now),
            Err(code) => self.abort(tx, Err(code.into()), now),
        }
    }

    /// Drops the prepared parts. Answers the request, or has it executed again if it met another transaction.
    fn abort(&mut self, tx: TxId, answer: Answer<'static>, now: Duration) {
        let Some(Undecided { coordinator, asked, .. }) = self.undecided.remove(&tx) else { return };
        // [`Code::Stale`]: what this node found when it planned has changed, so the request is planned again. A client
        // that made the look-up itself must repeat it.
        let answer = match answer {
            Err(Refusal::Code(Code::Stale)) if !coordinator.client_looked_up() => {
                Err(Refusal::Code(Code::Busy))
            }
            answer => answer,
        };
        for node in coordinator.nodes {
            self.ask(node, encoded(&Request::Finish { tx, commit: false }), Flight::Abort);
        }
        let waited = now.saturating_sub(asked.since);
        match answer {
            Err(Refusal::Code(Code::Busy)) if waited < Duration::from_millis(TRANSACTION_TIMEOUT_MS) => {
                // The pause grows, and varies so that two transactions that met do not meet again.
                let pause = (waited / 4).clamp(Duration::from_millis(1), Duration::from_millis(100));
                let pause = pause + pause * (tx.0.wrapping_mul(0x9e37_79b9) >> 16 & 7) as u32 / 8;
                self.again.push((now + pause, asked));
            }
            answer => {
                let answer = Box::new(answer);
                self.acts.push_back(Act::Answer { client: asked.client, answer });
            }
        }
        self.decided(tx, now);
    }

    /// A transaction is no longer undecided: the next request waiting for its [`Exclusive`] may start.
    fn decided(&mut self, tx: TxId, now: Duration) {
        let Some(exclusive) = self.running.iter().find(|(_, of)| **of == tx).map(|(exclusive, _)| *exclusive)
        else {
            return;
        };
        self.running.remove(&exclusive);
        let next_timeout = Duration::from_millis(TRANSACTION_TIMEOUT_MS);
        while let Some(next) = self.queue.iter().position(|(of, ..)| *of == exclusive) {
            let Some((_, asked, caller, plan)) = self.queue.remove(next) else { return };
            if now.saturating_sub(asked.since) < next_timeout {
                return self.start(asked, caller, plan, now);
            }
            self.acts
                .push_back(Act::Answer { client: asked.client, answer: Box::new(Err(Code::Busy.into())) });
        }
    }

    /// Sends the deliveries that are due, up to the limits.
    fn pump(&mut self, now: Duration) {
        while let Some(delivery) = self.deliveries.next(now) {
            let request = match delivery {
                Delivery::Commit(tx, _) => Request::Finish { tx, commit: true },
                Delivery::DropLink(ino, link) => Request::DropLink { ino, link },
                Delivery::Touch(ino, _) => Request::Touch { ino },
            };
            self.ask(delivery.node(), encoded(&request), Flight::Deliver(delivery));
        }
    }

    /// Answers the requests that wait for no other delivery, now that these have ended.
    fn answer_waiting(&mut self, have_ended: impl Fn(&Delivery) -> bool) {
        let (acts, mut left) = (&mut self.acts, Vec::new());
        for mut waiting in self.waiting.drain(..) {
            waiting.left.retain(|delivery| !have_ended(delivery));
            if waiting.left.is_empty() {
                acts.push_back(Act::Answer { client: waiting.client, answer: Box::new(Ok(waiting.reply)) });
            } else {
                left.push(waiting);
            }
        }
        self.waiting = left;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::limits::{COMPONENTS_MAX, TARGETS_MAX, WIDTH_MAX};
    use forebay_types::{Attr, Component, Entry, Ino, Layout, Parts, Timestamp};

    #[test]
    fn largest_decision_fits_its_message() {
        let component = |end| Component {
            end,
            stripe_bytes: 4096,
            stripe_count: TARGETS_MAX as u16,
            target_count: TARGETS_MAX as u8,
            targets: std::array::from_fn(|i| (i as u32 + 1) << 16),
        };
        let mut components: Vec<Component> = (1..COMPONENTS_MAX as u64).map(|i| component(i << 20)).collect();
        components.push(component(u64::MAX));
        let layout = Layout::new(&components).unwrap();
        let inos: Vec<Ino> = (1..=WIDTH_MAX as u16).map(|node| Ino::part(NodeId(node), 5)).collect();
        let ino = Ino::new(NodeId(1), 5);
        // A coordinator counts its parts in a byte.
        let nodes: Vec<NodeId> = (1..=u16::from(u8::MAX)).map(NodeId).collect();
        for reply in [
            Reply::Parts(Parts::new(ino, &inos).unwrap()),
            Reply::Relaid { ino, layout },
            Reply::Removed { ino, last: true, kind: forebay_types::Kind::Directory, layout },
            Reply::Entry(Entry { attr: attr(ino), layout }),
        ] {
            let message = decide(TxId::new(NodeId(1), 7), &nodes, reply).expect("it fits");
            let Request::Decide { nodes: told, reply: encoded, .. } = Request::decode(&message).unwrap().1
            else {
                panic!("{message:?}")
            };
            assert_eq!((told.len(), Reply::decode(encoded)), (2 * nodes.len(), Ok(reply)));
        }
    }

    fn attr(ino: Ino) -> Attr {
        let zero = Timestamp::default();
        Attr {
            ino,
            size: 0,
            rdev: 0,
            parent: Ino::ROOT,
            mode: 0o040_755,
            uid: 1,
            gid: 2,
            nlink: 2,
            flags: 0,
            home: NodeId::FIRST,
            width_log2: 0,
            atime: zero,
            mtime: zero,
            ctime: zero,
            btime: zero,
        }
    }
}
