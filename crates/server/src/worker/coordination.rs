//! The shard thread's part in cross-node transactions: executes the acts of [`Transactions`], and parks requests that
//! meet a hold until it is released.
//!
//! ```text
//! request ─ plan ─► transactions ─► this shard, as an ordinary change · other nodes, through the network thread
//!    └ meets a hold ─► parked ─► served again when some part was finished; after a timeout: EIO
//! ```
//! Each worker has one session at other nodes, like a client's. So its steps there are batched, journaled and answered
//! like other requests, and the mount is notified of them. The protocol is in `two_phase_commit.rs` of forebay-meta. A
//! pool of one node has none of this.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use forebay_meta::{Client, Since, Transactions};
use forebay_types::limits::{HELD_LIST_TIMEOUT_MS, HELD_TIMEOUT_MS};
#[cfg(any(test, feature = "simulation"))]
use forebay_types::Timestamp;
use forebay_types::{Code, NodeId, Outcome, Part, Request, Result};

use super::call::Call;
use super::cross_check::CrossCheck;
use super::leases::Wait;
use super::notifier::Invalidation;
#[cfg(any(test, feature = "simulation"))]
use super::session_id::daemon_session;
use super::session_id::{new_daemon_session, random_number};

/// What happens to a request before the pipeline applies it.
pub(super) enum Interception {
    /// It is parked, or a transaction executes it: the answer follows later.
    Later,
    /// This is its answer.
    Refused(Code),
    /// This is its answer.
    Outcome(Outcome),
    /// The pipeline applies it.
    No,
}

/// A call that met a hold, or that is served again.
#[derive(Debug)]
pub(super) struct Parked {
    pub(super) call: Call,
    pub(super) since: Duration,
}

/// What precedes a late answer.
#[derive(Debug, Default)]
pub(super) struct Late {
    /// Invalidations that are written to the kernel.
    pub(super) invalidations: Vec<Invalidation>,
    /// The end of leases that the last worker may have given.
    pub(super) wait: Option<Wait>,
}

/// State of the cross-node transactions.
#[derive(Debug)]
pub(super) struct CrossNode {
    pub(super) transactions: Transactions,
    pub(super) parked: Vec<Parked>,
    /// Calls to be served again.
    pub(super) anew: VecDeque<Parked>,
    /// A part was prepared or finished since the parked calls were checked.
    pub(super) moved: bool,
    /// By session and slot: the sequence of a call that is served again, and when it was received first.
    pub(super) since: HashMap<(u64, usize), (u64, Duration)>,
    /// By session and slot: what precedes the late answer.
    pub(super) late: HashMap<(u64, usize), Late>,
    /// This worker's session at other nodes.
    pub(super) session: u64,
    /// Its free slots there: a bit mask.
    pub(super) free: u64,
    /// The flight in each slot in use.
    pub(super) flying: HashMap<usize, u64>,
    /// Requests that wait for a slot: flight, node, message.
    pub(super) waiting: VecDeque<(u64, NodeId, Vec<u8>)>,
    pub(super) sequence: u64,
    time: Time,
    /// Checks in progress, by number.
    pub(super) checks: BTreeMap<u64, CrossCheck>,
    pub(super) checks_begun: u64,
    /// Marks in progress, by number, and who waits for each.
    pub(super) marks: HashMap<u64, Sender<std::result::Result<(), Code>>>,
    pub(super) marks_begun: u64,
}

/// Flights with this bit are questions of a check: the check's number, then the question's.
pub(super) const OF_CHECK: u64 = 1 << 63;
/// Flights with this bit are parts of wide directories that listings request ahead, by number.
pub(super) const OF_LISTING: u64 = 1 << 62;
/// Flights with this bit are marks of files that this node writes for other nodes, by number.
pub(super) const OF_MARK: u64 = 1 << 61;
/// Bits of a question's number in a flight.
pub(super) const QUESTION_BITS: u32 = 32;

/// The time since some fixed moment.
#[derive(Clone, Copy, Debug)]
enum Time {
    Since(Instant),
    #[cfg(any(test, feature = "simulation"))]
    By(fn() -> Timestamp),
}

impl CrossNode {
    pub(super) fn new(node: NodeId) -> Result<CrossNode> {
        let (first, session) = (random_number()?, new_daemon_session(node)?);
        Ok(CrossNode::with(node, first, session, Time::Since(Instant::now())))
    }

    #[cfg(any(test, feature = "simulation"))]
    /// For a simulated node: its clock is the caller's, and its numbers follow from its epoch.
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
            marks: HashMap::new(),
            marks_begun: 0,
        }
    }

    pub(super) fn now(&self) -> Duration {
        match self.time {
            Time::Since(begun) => begun.elapsed(),
            #[cfg(any(test, feature = "simulation"))]
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

    /// The time until something is due.
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

    /// Takes a call that is to be served again.
    pub(super) fn next_anew(&mut self) -> Option<Call> {
        let Parked { call, since } = self.anew.pop_front()?;
        let Client { session, slot, seq } = call.client;
        self.since.insert((session, slot), (seq, since));
        Some(call)
    }

    /// True when `asks` slots at other nodes are free, and as many more remain for transactions.
    pub(super) fn has_room_for(&self, asks: usize) -> bool {
        self.waiting.is_empty() && self.free.count_ones() as usize >= 2 * asks
    }

    /// Requests a part of a wide directory that a listing will need. `told_ahead` gets the answer.
    pub(super) fn ask_ahead(&mut self, number: u64, node: NodeId, message: Vec<u8>) {
        self.waiting.push_back((OF_LISTING | number, node, message));
    }

    /// Queues a call to be served again, or another call in its place.
    pub(super) fn serve_anew(&mut self, call: Call) {
        let since = self.first_asked(call.client);
        self.anew.push_back(Parked { call, since });
    }

    /// When a call was first received: now, unless it is served again.
    pub(super) fn first_asked(&mut self, client: Client) -> Duration {
        let now = self.now();
        match self.since.remove(&(client.session, client.slot)) {
            Some((seq, since)) if seq == client.seq => since,
            _ => now,
        }
    }
}

/// When a parked call is refused, or listed in spite of the hold.
pub(super) fn end_of_waiting(parked: &Parked) -> Duration {
    let lists = matches!(parked.call.request(), Request::ReadDirectory { .. });
    parked.since + Duration::from_millis(if lists { HELD_LIST_TIMEOUT_MS } else { HELD_TIMEOUT_MS })
}

/// What the kernel must invalidate after a step with these effects.
pub(super) fn step_invalidations(request: &Request<'_>, effects: Since<'_>) -> Vec<Invalidation> {
    let mut invalidations: Vec<Invalidation> =
        effects.inodes().iter().map(|(ino, _)| Invalidation::Inode(*ino)).collect();
    invalidations.extend(effects.names().map(|n| Invalidation::Name(n.parent, n.name.to_vec())));
    if let Request::Prepare {
        part: Part::Leave { parent, name, .. } | Part::Enter { parent, name, .. },
        ..
    } = *request
    {
        invalidations.push(Invalidation::Name(parent, name.to_vec()));
    }
    invalidations
}

/// True when a daemon of `node` may send this step.
pub(super) fn is_said_by(request: &Request<'_>, node: NodeId) -> bool {
    match request {
        Request::Prepare { tx, .. } | Request::Finish { tx, .. } => tx.coordinator() == node,
        Request::Decide { .. } => false,
        _ => true,
    }
}
