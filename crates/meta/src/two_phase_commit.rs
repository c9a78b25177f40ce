//! Drives changes over several nodes: those that this node coordinates, what it has to deliver to others, and what it
//! has prepared for others that say nothing. No I/O: the user does what [`Act`] says and tells what came of it.
//!
//! ```text
//! begin ─► prepare, part by part ─► decide (a record here, with the reply) ─► deliver to all that prepared ─► answer
//!              │ refused                                                          │ not reached: again, until it is
//!              └─► drop on all; answer, or begin anew when it met another         └─► answer all the same: it is decided
//! ```
//! What is undecided is in memory alone, and a transaction that nobody knows was aborted; what is decided is in the shard
//! until all have acknowledged it. So whoever dies, at any instant, the others finish by themselves. Deliveries are made
//! again until they are acknowledged, and can be repeated. Tests: `tests/transactions`, which drops messages and restarts
//! nodes at every step.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use forebay_types::limits::{DOUBT_AFTER_MS, TRANSACTION_TIMEOUT_MS};
use forebay_types::{Answer, Caller, Code, NodeId, Outcome, Refusal, Reply, Request, TxId};

use crate::coordinator::{Coordinator, Next, Plan, Turn};
use crate::deliveries::{Deliveries, Ended};
use crate::effects::Delivery;

/// The largest reply of a change over several nodes, encoded.
const REPLY_BYTES_MAX: usize = 512;
/// The daemon asks for itself on behalf of nobody.
const NOBODY: Caller = Caller { uid: 0, gid: 0 };

/// Whose request a transaction is: session, slot, sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Client {
    /// The process's session.
    pub session: u64,
    /// Its slot.
    pub slot: usize,
    /// The slot's sequence.
    pub seq: u64,
}

/// What is to be done next, in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Act {
    /// Apply a request to this node's shard, a [`Request::Decide`] as `client`'s change; then
    /// [`Transactions::answered`].
    Local {
        /// What is answered.
        flight: u64,
        /// The encoded request.
        message: Vec<u8>,
        /// On behalf of whom, if of anybody.
        client: Option<Client>,
    },
    /// Ask another node; then [`Transactions::answered`], with [`Code::NoDevice`] when another node has its place for
    /// good.
    Ask {
        /// What is answered.
        flight: u64,
        /// Whom.
        node: NodeId,
        /// The encoded request.
        message: Vec<u8>,
    },
    /// Answer a request.
    Answer {
        /// Whose.
        client: Client,
        /// What it came to.
        answer: Box<Answer<'static>>,
    },
    /// Serve a request anew, as what it met is gone by now.
    Again {
        /// Whose.
        client: Client,
        /// The encoded request.
        message: Vec<u8>,
        /// When it was asked first.
        since: Duration,
    },
    /// A delivery was acknowledged: [`crate::Batch::settle`].
    Settle(Delivery),
}

/// What an answer is to.
#[derive(Debug)]
enum Flight {
    Prepare(TxId),
    Decide(TxId),
    Abort,
    Deliver(Delivery),
    Doubt(TxId),
    Resolve(TxId),
}

/// A request that asked for a change over several nodes.
#[derive(Debug)]
struct Asked {
    client: Client,
    message: Vec<u8>,
    since: Duration,
}

/// A transaction that is not decided.
#[derive(Debug)]
struct Deal {
    coordinator: Coordinator,
    asked: Asked,
    /// Once it is decided.
    reply: Reply<'static>,
}

/// A request that is answered when deliveries were made.
#[derive(Debug)]
struct Waiting {
    client: Client,
    reply: Reply<'static>,
    left: Vec<Delivery>,
}

/// Something that is tried again at a time, unless it is under way.
#[derive(Clone, Copy, Debug)]
struct Due {
    at: Duration,
    under_way: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Transactions {
    me: NodeId,
    next_number: u64,
    next_flight: u64,
    acts: VecDeque<Act>,
    flights: HashMap<u64, Flight>,
    deals: HashMap<TxId, Deal>,
    /// Those that are under way alone, and those that wait for their turn behind them.
    turns: HashMap<Turn, TxId>,
    queue: VecDeque<(Turn, Asked, Caller, Plan)>,
    /// Requests that met another transaction.
    again: Vec<(Duration, Asked)>,
    waiting: Vec<Waiting>,
    deliveries: Deliveries,
    /// Those of the last worker that were not tried yet since.
    inherited: BTreeSet<Delivery>,
    doubts: BTreeMap<TxId, Due>,
}

fn encoded(request: &Request<'_>) -> Vec<u8> {
    let mut bytes = vec![0; 2048];
    let n = request.encode(NOBODY, &mut bytes).unwrap_or(0);
    bytes.truncate(n);
    bytes
}

impl Transactions {
    /// Those of a node; `first` is a random number, so that no number comes twice.
    pub fn new(me: NodeId, first: u64) -> Transactions {
        Transactions {
            me,
            next_number: first,
            next_flight: 1,
            acts: VecDeque::new(),
            flights: HashMap::new(),
            deals: HashMap::new(),
            turns: HashMap::new(),
            queue: VecDeque::new(),
            again: Vec::new(),
            waiting: Vec::new(),
            deliveries: Deliveries::default(),
            inherited: BTreeSet::new(),
            doubts: BTreeMap::new(),
        }
    }

    /// What is to be done next.
    pub fn next_act(&mut self) -> Option<Act> {
        self.acts.pop_front()
    }

    /// True when there is something to be done.
    pub fn has_acts(&self) -> bool {
        !self.acts.is_empty()
    }

    /// True when nothing is under way, owed or in doubt.
    pub fn is_idle(&self) -> bool {
        self.acts.is_empty()
            && self.deals.is_empty()
            && self.queue.is_empty()
            && self.again.is_empty()
            && self.deliveries.is_empty()
            && self.doubts.is_empty()
    }

    /// Begins what was planned for a request; its answer comes as [`Act::Answer`]. `since`: when it was asked first.
    pub fn begin(
        &mut self,
        client: Client,
        caller: Caller,
        message: &[u8],
        plan: Plan,
        since: Duration,
        now: Duration,
    ) {
        let asked = Asked { client, message: message.to_vec(), since };
        if let Some(turn) = Coordinator::turn(&plan).filter(|turn| self.turns.contains_key(turn)) {
            return self.queue.push_back((turn, asked, caller, plan));
        }
        self.start(asked, caller, plan, now);
    }

    fn start(&mut self, asked: Asked, caller: Caller, plan: Plan, now: Duration) {
        self.next_number = self.next_number.wrapping_add(1);
        let mut tx = TxId::new(self.me, self.next_number);
        if tx == TxId::new(self.me, 0) {
            self.next_number += 1;
            tx = TxId::new(self.me, self.next_number);
        }
        if let Some(turn) = Coordinator::turn(&plan) {
            self.turns.insert(turn, tx);
        }
        let mut coordinator = Coordinator::new(tx, self.me, caller, plan);
        let next = coordinator.begin();
        self.deals.insert(tx, Deal { coordinator, asked, reply: Reply::Done });
        self.go_on(tx, next, now);
    }

    /// Requests that are answered with `reply` once these deliveries were made, or could not be.
    pub fn answer_after(&mut self, client: Client, reply: Reply<'static>, deliveries: &[Delivery]) {
        let waiting = Waiting { client, reply, left: deliveries.to_vec() };
        self.waiting.push(waiting);
        self.answer_waiting(|_| false);
    }

    /// A change of the last worker's is asked for again, and its reply is known: it may be one that other nodes are
    /// still to hear of. True: it is answered when all that the last worker left undelivered was tried.
    pub fn answer_after_inherited(&mut self, client: Client, reply: Reply<'static>) -> bool {
        if self.inherited.is_empty() {
            return false;
        }
        // Which of them are this change's is not known.
        let left = self.inherited.iter().copied().collect();
        self.waiting.push(Waiting { client, reply, left });
        true
    }

    /// These are to be delivered, from now until they are acknowledged.
    pub fn deliver(&mut self, deliveries: &[Delivery], now: Duration) {
        for delivery in deliveries {
            self.deliveries.add(*delivery, now);
        }
        self.pump(now);
    }

    /// These transactions have parts that are prepared here, and no others.
    pub fn note_prepared(&mut self, prepared: &[TxId], now: Duration) {
        self.doubts.retain(|tx, _| prepared.contains(tx));
        for tx in prepared {
            // Of its own that are undecided it knows; all others were left by the last worker.
            let next_timeout = Duration::from_millis(DOUBT_AFTER_MS);
            self.doubts.entry(*tx).or_insert(Due { at: now + next_timeout, under_way: false });
        }
    }

    /// The same at the start: what this node coordinates is undecided no more.
    pub fn resume(&mut self, prepared: &[TxId], deliveries: &[Delivery], now: Duration) {
        for tx in prepared {
            self.doubts.insert(*tx, Due { at: now, under_way: false });
        }
        self.inherited.extend(deliveries);
        self.deliver(deliveries, now);
        self.tick(now);
    }

    /// True for a transaction of this node's that is not decided.
    pub fn is_undecided(&self, tx: TxId) -> bool {
        self.deals.contains_key(&tx)
    }

    /// A node is back: what waits for it need not wait any longer.
    pub fn hurry(&mut self, node: NodeId, now: Duration) {
        self.deliveries.hurry(node, now);
        for (tx, due) in &mut self.doubts {
            if tx.coordinator() == node {
                due.at = due.at.min(now);
            }
        }
    }

    /// Does what is due.
    pub fn tick(&mut self, now: Duration) {
        let (due, later): (Vec<_>, Vec<_>) = self.again.drain(..).partition(|(at, _)| *at <= now);
        self.again = later;
        for (_, Asked { client, message, since }) in due {
            self.acts.push_back(Act::Again { client, message, since });
        }
        self.pump(now);
        let due: Vec<TxId> =
            self.doubts.iter().filter(|(_, d)| !d.under_way && d.at <= now).map(|(tx, _)| *tx).collect();
        for tx in due {
            if let Some(doubt) = self.doubts.get_mut(&tx) {
                doubt.at = now + Duration::from_millis(DOUBT_AFTER_MS);
                // What is undecided here, or on its way, needs no asking.
                let known =
                    self.deals.contains_key(&tx) || self.deliveries.contains(&Delivery::Commit(tx, self.me));
                if !known {
                    doubt.under_way = true;
                    self.ask(tx.coordinator(), encoded(&Request::AskOutcome { tx }), Flight::Doubt(tx));
                }
            }
        }
    }

    /// How long there is nothing to do.
    pub fn next_timeout(&self, now: Duration) -> Duration {
        let due = self.doubts.values().filter(|d| !d.under_way).map(|d| d.at);
        let due = due.chain(self.deliveries.next_at());
        let next = due.chain(self.again.iter().map(|(at, _)| *at)).min();
        next.map_or(Duration::MAX, |at| at.saturating_sub(now))
    }

    /// An act was answered, or there is no answer and this is why.
    pub fn answered(&mut self, flight: u64, answer: Result<Answer<'_>, Code>, now: Duration) {
        let Some(flight) = self.flights.remove(&flight) else { return };
        let reached = answer.is_ok();
        // This node's word, and never another's: of a number that is no node's any more nothing comes, now or later.
        let gone = answer == Err(Code::NoDevice);
        let reply = answer.unwrap_or_else(|code| Err(code.into()));
        match flight {
            Flight::Prepare(tx) => {
                let Some(deal) = self.deals.get_mut(&tx) else { return };
                let lost = if gone { deal.coordinator.lost() } else { None };
                let next = match (lost, reply) {
                    (Some(next), _) => next,
                    (None, Ok(reply)) => deal.coordinator.prepared(reply),
                    // The client's node sends the request again, to the part.
                    (None, Err(Refusal::Wide(parts))) => Ok(Next::Nothing(Err(Refusal::Wide(parts)))),
                    (None, Err(Refusal::Code(code))) => Err(code),
                };
                self.go_on(tx, next, now);
            }
            Flight::Decide(tx) => match reply {
                Ok(_) => {
                    let Some(deal) = self.deals.remove(&tx) else { return };
                    let nodes = deal.coordinator.nodes.iter();
                    let left: Vec<_> = nodes.map(|node| Delivery::Commit(tx, *node)).collect();
                    self.answer_after(deal.asked.client, deal.reply, &left);
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
                // Who waits for a node that is not reached waits for no more than one try.
                self.answer_waiting(has_ended);
                self.pump(now);
            }
            Flight::Doubt(tx) => {
                if let Some(doubt) = self.doubts.get_mut(&tx) {
                    doubt.under_way = false;
                }
                let commit = match reply {
                    Ok(Reply::Outcome(Outcome::Committed)) => true,
                    // A coordinator that is no node of the pool any more tells nobody otherwise.
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
            Flight::Prepare(tx) => self.deals.get(tx).map(|deal| deal.asked.client),
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
                let Some(deal) = self.deals.get_mut(&tx) else { return };
                let nodes: Vec<u8> =
                    deal.coordinator.nodes.iter().flat_map(|node| node.0.to_le_bytes()).collect();
                let mut room = [0; REPLY_BYTES_MAX];
                let n = Reply::encode(&Ok(reply), &mut room).unwrap_or(0);
                let message = encoded(&Request::Decide { tx, nodes: &nodes, reply: &room[..n] });
                deal.reply = reply;
                let (flight, client) = (self.next_flight, Some(deal.asked.client));
                self.next_flight += 1;
                self.flights.insert(flight, Flight::Decide(tx));
                self.acts.push_back(Act::Local { flight, message, client });
            }
            Ok(Next::Nothing(answer)) => self.abort(tx, answer, now),
            Err(code) => self.abort(tx, Err(code.into()), now),
        }
    }

    /// Drops what was prepared; answers, or has the request served anew when it met another transaction.
    fn abort(&mut self, tx: TxId, answer: Answer<'static>, now: Duration) {
        let Some(Deal { coordinator, asked, .. }) = self.deals.remove(&tx) else { return };
        // What this node found when it planned is so no longer: it is planned anew. A plan of a client's is its own to
        // make anew.
        let answer = match answer {
            Err(Refusal::Code(Code::Stale)) if !coordinator.is_clients() => Err(Refusal::Code(Code::Busy)),
            answer => answer,
        };
        for node in coordinator.nodes {
            self.ask(node, encoded(&Request::Finish { tx, commit: false }), Flight::Abort);
        }
        let waited = now.saturating_sub(asked.since);
        match answer {
            Err(Refusal::Code(Code::Busy)) if waited < Duration::from_millis(TRANSACTION_TIMEOUT_MS) => {
                // Longer and longer, and not in step with what it met.
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

    /// A transaction is no longer undecided: the next of those that are alone may begin.
    fn decided(&mut self, tx: TxId, now: Duration) {
        let Some(turn) = self.turns.iter().find(|(_, of)| **of == tx).map(|(turn, _)| *turn) else { return };
        self.turns.remove(&turn);
        let next_timeout = Duration::from_millis(TRANSACTION_TIMEOUT_MS);
        while let Some(next) = self.queue.iter().position(|(of, ..)| *of == turn) {
            let Some((_, asked, caller, plan)) = self.queue.remove(next) else { return };
            if now.saturating_sub(asked.since) < next_timeout {
                return self.start(asked, caller, plan, now);
            }
            self.acts
                .push_back(Act::Answer { client: asked.client, answer: Box::new(Err(Code::Busy.into())) });
        }
    }

    /// Makes the deliveries that are due, as many at a time as may be.
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

    /// Answers those that wait for nothing any more, as these deliveries have ended.
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
