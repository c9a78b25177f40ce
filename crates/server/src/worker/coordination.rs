//! The shard thread's part in changes over several nodes: what [`Transactions`] says is done here, and requests that
//! meet what such a change holds wait here until it is over.
//!
//! ```text
//! a request ─ plan ─► transactions ─► this shard, as a change like any · other nodes, by the network thread
//!     └ meets held names ─► parked ─► served anew when something was finished; after a bound: EIO
//! ```
//! Daemons ask each other in sessions like clients', one a worker, so that what they ask is batched, journaled, told to
//! the mount and answered like all else. Crates/meta's `transactions.rs` has the protocol; a pool of one node has none of this.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use forebay_meta::{Client, Since, Transactions};
use forebay_types::limits::{HELD_LIST_TIMEOUT_MS, HELD_TIMEOUT_MS};
use forebay_types::{Code, NodeId, Outcome, Part, Request, Result, Timestamp};

use super::call::Call;
use super::cross_check::CrossCheck;
use super::leases::Wait;
use super::notifier::Invalidation;
use super::session_id::{daemon_session, new_daemon_session, random_number};

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
pub(super) struct Parked {
    pub(super) call: Call,
    pub(super) since: Duration,
}

/// What is to be done before a late answer.
#[derive(Debug, Default)]
pub(super) struct Late {
    /// The kernel is told this.
    pub(super) invalidations: Vec<Invalidation>,
    /// Then leases have run out of which nothing is known.
    pub(super) wait: Option<Wait>,
}

/// The state of all that.
#[derive(Debug)]
pub(super) struct CrossNode {
    pub(super) transactions: Transactions,
    pub(super) parked: Vec<Parked>,
    /// Requests to be served anew.
    pub(super) anew: VecDeque<Parked>,
    /// Something was prepared or finished since the parked were looked at.
    pub(super) moved: bool,
    /// When requests that are being served were asked first, if that was before.
    pub(super) since: HashMap<(u64, usize), (u64, Duration)>,
    /// What is to be done before such a request is answered late.
    pub(super) late: HashMap<(u64, usize), Late>,
    /// This worker's session at other nodes, its free slots there, and what waits for one.
    pub(super) session: u64,
    pub(super) free: u64,
    pub(super) flying: HashMap<usize, u64>,
    pub(super) waiting: VecDeque<(u64, NodeId, Vec<u8>)>,
    pub(super) sequence: u64,
    time: Time,
    /// Checks that are under way, by number.
    pub(super) checks: BTreeMap<u64, CrossCheck>,
    pub(super) checks_begun: u64,
}

/// Flights with this bit are questions of a check: its number, and the question's behind.
pub(super) const OF_CHECK: u64 = 1 << 63;
/// Those with this one are parts of wide directories that listings ask ahead, by number.
pub(super) const OF_LISTING: u64 = 1 << 62;
/// Bits of a question's number.
pub(super) const QUESTION_BITS: u32 = 32;

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
    pub(super) fn first_asked(&mut self, client: Client) -> Duration {
        let now = self.now();
        match self.since.remove(&(client.session, client.slot)) {
            Some((seq, since)) if seq == client.seq => since,
            _ => now,
        }
    }
}

/// When a parked request waits no longer.
pub(super) fn end_of_waiting(parked: &Parked) -> Duration {
    let lists = matches!(parked.call.request(), Request::ReadDirectory { .. });
    parked.since + Duration::from_millis(if lists { HELD_LIST_TIMEOUT_MS } else { HELD_TIMEOUT_MS })
}

/// What the kernel may believe wrongly after a step that had these effects.
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

/// True when a daemon of `node` may say this.
pub(super) fn is_said_by(request: &Request<'_>, node: NodeId) -> bool {
    match request {
        Request::Prepare { tx, .. } | Request::Finish { tx, .. } => tx.coordinator() == node,
        Request::Decide { .. } => false,
        _ => true,
    }
}
