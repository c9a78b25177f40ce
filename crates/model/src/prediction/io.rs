//! Accesses to the medium and to the network: how many there are, which of them begin where another one has ended, and how
//! long they take.

use super::costs::Costs;
use super::extensions::Extensions;
use crate::pattern::{Access, Pattern};

/// The largest data inside a request to another node. Longer runs go in several requests, or by remote memory access.
const REQUEST_BYTES: f64 = 32768.0;

/// Ranges of up to so many bytes on another node travel together in requests of up to [`MESSAGE_BYTES`], in which each has
/// [`RANGE_BYTES`] more.
const TOGETHER_BYTES: f64 = (16 << 10) as f64;
pub(super) const MESSAGE_BYTES: f64 = (64 << 10) as f64;
const RANGE_BYTES: f64 = 12.0;
/// What such a range costs at least, in nanoseconds: a system call by a worker that shares its processors with the network
/// (docs/decisions/0052: 36 MB/s of ranges of 64 bytes by two workers).
pub(super) const RANGE_NS: f64 = 1500.0;

/// Where data are on another node, gaps that are not longer than the runs are read too, from this length to that one; the
/// latter is also the largest gap that this node reads.
const FAR_GAP_BYTES: f64 = 1024.0;
const MEDIUM_GAP_BYTES: f64 = (64 << 10) as f64;

/// Bytes of a stripe. Each stripe that a range touches is an access to another backing file.
const STRIPE_BYTES: f64 = (1 << 20) as f64;

/// What one request to another node transfers of a long range: an eighth, as there are [`AHEAD`] requests, within these
/// limits.
const PART_BYTES_MIN: f64 = (128 << 10) as f64;
const PART_BYTES_MAX: f64 = (1 << 20) as f64;

/// Requests to other nodes that a process has in progress at the same time.
const AHEAD: f64 = 8.0;

/// A medium has seeks where an access that begins anywhere takes so much longer than one that begins where the one before
/// has ended, in nanoseconds, and more than twice as long. There a file has one backing file on each target.
const SEEK_NS: f64 = 100_000.0;

/// The share of a range's parts behind the first that come in their order where several processes write to another node, and
/// the least and the greatest (measured).
const PARTS_IN_ORDER: f64 = 0.25;
const PARTS_IN_ORDER_MIN: f64 = 0.0;
const PARTS_IN_ORDER_MAX: f64 = 0.53;

/// Accesses for other nodes that a node serves at the same time.
const WORKERS: f64 = 4.0;

/// What a process moves.
#[derive(Clone, Copy)]
pub(super) struct Moved {
    pub(super) bytes: f64,
    /// With the gaps that the medium's node reads.
    pub(super) medium_bytes: f64,
    /// Of the longest call.
    pub(super) call_bytes: f64,
}

impl Moved {
    pub(super) fn all(bytes: f64, call_bytes: f64) -> Moved {
        Moved { bytes, medium_bytes: bytes, call_bytes }
    }
}

/// Accesses of a process to the medium.
#[derive(Clone, Copy)]
pub(super) struct Accesses {
    /// Those that begin anywhere.
    pub(super) starts: f64,
    /// Those that begin where the one before has ended.
    pub(super) nexts: f64,
}

impl Accesses {
    fn all(self) -> f64 {
        self.starts + self.nexts
    }

    /// The same accesses, so many of which begin anywhere.
    fn with_starts(self, starts: f64) -> Accesses {
        Accesses { starts, nexts: self.all() - starts }
    }
}

/// The bytes that a request to another node transfers of a range.
fn part_bytes(range: f64) -> f64 {
    (range / AHEAD).clamp(PART_BYTES_MIN, PART_BYTES_MAX).min(range)
}

/// How the accesses of several processes come one after the other, where that is chance.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// As the prediction takes them to come.
    Usual,
    /// That of the file: as many as possible begin where the one before has ended.
    OfTheFile,
    /// As few as possible do.
    Apart,
}

/// A pattern on a medium.
pub(super) struct Model {
    pub(super) p: Pattern,
    pub(super) c: Costs,
    pub(super) used: Extensions,
    pub(super) order: Order,
}

impl Model {
    /// How many of `accesses` at the same time are as fast as one alone, if a target has room for `each`.
    fn at_once(&self, accesses: f64, each: f64) -> f64 {
        let each = if self.used.contention { each } else { 1.0 };
        let targets = if self.used.targets { self.p.targets as f64 } else { 1.0 };
        accesses.min(each * targets).max(1.0)
    }

    /// True if the medium has seeks.
    fn seeks(&self) -> bool {
        self.c.run > 2.0 * self.c.next && self.c.run - self.c.next > SEEK_NS
    }

    /// True if the range of the call begins where the one before has ended.
    pub(super) fn is_continued(&self) -> bool {
        self.p.is_continued && self.p.density() >= 1.0 && self.p.access != Access::Random
    }

    /// The accesses of `calls` calls, each with a range of these bytes, by each of `processes`.
    ///
    /// Each stripe begins in another backing file, but on a medium with seeks. For data on another node a call is several
    /// requests. Those of one process arrive in their order. Of several processes', those that are read arrive in the
    /// order of their calls, as many as a process sends at a time; what is written is fetched from the processes first, so
    /// most of these come by turns.
    pub(super) fn accesses(&self, processes: f64, calls: f64, bytes: f64) -> Accesses {
        let stripes = if self.seeks() { 1.0 } else { (bytes / STRIPE_BYTES).ceil().max(1.0) };
        if self.far_part() == 0.0 {
            return Accesses { starts: calls * stripes, nexts: 0.0 };
        }
        let parts = (bytes / part_bytes(bytes).max(1.0)).ceil().max(1.0);
        let starts = if processes <= 1.0 {
            stripes.min(parts)
        } else if self.p.writes {
            parts - (parts - 1.0) * self.parts_in_order()
        } else {
            stripes.max(parts - parts.min(AHEAD) + 1.0)
        };
        Accesses { starts: calls * starts, nexts: calls * (parts - starts).max(0.0) }
    }

    fn parts_in_order(&self) -> f64 {
        match self.order {
            Order::Usual => PARTS_IN_ORDER,
            Order::OfTheFile => PARTS_IN_ORDER_MAX,
            Order::Apart => PARTS_IN_ORDER_MIN,
        }
    }

    /// The same accesses, in so many turns of all `processes`, if those of a turn are side by side in the file. `following` of
    /// the first turn, and of each later one, usually come just after the one where they begin, and `at_most` so many. One
    /// process's accesses follow each other.
    pub(super) fn in_turns(
        &self,
        processes: f64,
        accesses: Accesses,
        turns: f64,
        following: [f64; 2],
        at_most: [f64; 2],
    ) -> Accesses {
        if processes <= 1.0 {
            accesses.with_starts(if self.is_continued() { 0.0 } else { accesses.starts.min(1.0) })
        } else if self.far_part() == 0.0 && self.seeks() {
            let following = match self.order {
                Order::Usual => following,
                Order::OfTheFile => at_most,
                Order::Apart => [0.0; 2],
            };
            let [first, later] = following.map(|n| 1.0 - n / processes);
            let turns = turns.max(1.0);
            accesses.with_starts(accesses.starts / turns * (first + (turns - 1.0) * later))
        } else {
            accesses
        }
    }

    /// The medium's time, if each of `processes` moves `bytes` in `accesses`. Bytes share the bandwidth; the latencies of
    /// different accesses overlap.
    fn medium(&self, processes: f64, accesses: Accesses, bytes: f64, byte: f64) -> f64 {
        let Accesses { starts, nexts } = accesses;
        let latencies = if self.used.runs { starts * self.c.run + nexts * self.c.next } else { 0.0 };
        let transfer = processes * bytes * byte;
        let bandwidth = transfer / self.at_once(processes, self.c.parallel);
        let (under_way, queue) = match self.far_part() > 0.0 {
            true => (processes * AHEAD.min(accesses.all().max(1.0)), self.c.queue.min(WORKERS)),
            false => (processes, self.c.queue),
        };
        let served = (processes * latencies + transfer) / self.at_once(under_way, queue);
        let first = if self.used.runs { starts.min(1.0) * self.c.run } else { 0.0 };
        bandwidth.max(served).max(first)
    }

    /// The time of accesses by `processes`: each makes `calls` calls with `accesses` to the medium in all, and moves
    /// `bytes`, for which the medium moves `medium_bytes`. Network and medium work at the same time, but for a first request,
    /// and for one part of the data, which one of them moves before the other one.
    pub(super) fn access(
        &self,
        processes: f64,
        calls: f64,
        accesses: Accesses,
        moved: Moved,
        byte: f64,
    ) -> f64 {
        let medium = self.medium(processes, accesses, moved.medium_bytes, byte);
        let network = self.network(processes, calls, processes * moved.bytes);
        let part = part_bytes(moved.call_bytes) * byte.min(self.c.request_byte);
        medium.max(network) + self.far_part() * calls.min(1.0) * (self.c.request + part)
    }

    /// The part of the data that is on other nodes than the rank that accesses them.
    fn far_part(&self) -> f64 {
        match self.p.nodes {
            _ if !self.used.remote || !self.p.is_far => 0.0,
            _ if self.p.is_apart => 1.0,
            1 => 1.0,
            nodes => 1.0 - 1.0 / nodes as f64,
        }
    }

    /// The largest gap that is read too.
    pub(super) fn gap_limit(&self) -> f64 {
        match self.used.remote && self.p.is_far {
            true => (self.p.run_bytes as f64).clamp(FAR_GAP_BYTES, MEDIUM_GAP_BYTES),
            false => self.c.gap_bytes,
        }
    }

    /// The largest gap that the node of the data reads too: one that takes less time than another access.
    pub(super) fn medium_gap_limit(&self) -> f64 {
        (self.c.run / self.c.sequential_byte.max(f64::MIN_POSITIVE)).min(MEDIUM_GAP_BYTES)
    }

    /// True if ranges of so many bytes travel together.
    pub(super) fn is_together(&self, bytes: f64) -> bool {
        self.used.remote && self.p.is_far && bytes <= TOGETHER_BYTES
    }

    /// Requests in `calls` calls that move ranges of so many bytes each.
    pub(super) fn requests(&self, calls: f64, bytes: f64) -> f64 {
        match self.is_together(bytes) {
            true => (calls * (bytes + RANGE_BYTES) / MESSAGE_BYTES).ceil(),
            false => calls,
        }
    }

    /// The network's part in accesses by `processes`, of which each makes `calls` calls: requests, and bytes that share
    /// the link of a node. If all data are on nodes without ranks, these nodes' links are shared by all bytes.
    fn network(&self, processes: f64, calls: f64, bytes: f64) -> f64 {
        let far = self.far_part();
        let on_a_node = (processes / self.p.nodes as f64).max(1.0);
        let requests = calls.max(bytes / processes.max(1.0) / REQUEST_BYTES / 32.0);
        let of_a_node = bytes / processes.max(1.0) * on_a_node;
        let busiest = match self.p.is_apart {
            true => of_a_node.max(bytes / self.p.targets as f64),
            false => of_a_node,
        };
        far * (requests * self.c.request).max(busiest * self.c.request_byte)
    }
}
