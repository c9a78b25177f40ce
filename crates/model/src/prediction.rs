//! The formulas: the time that a pattern takes, with collective and with independent I/O.
//!
//! Without extensions these are the paper's:
//!
//! - collective: sum over rounds (T_s + T_w · msg · tau) + bytes / bw_seq, with tau = non-aggregators / processes and msg
//!   the collective buffer. A round serves one buffer of every aggregator.
//! - independent: bytes / bw_ran.
//!
//! All times are sums and products of calibrated costs, so the calibration's lower ends give the lower end of a time, and
//! its upper ends the upper one.

use crate::calibration::Calibration;
use crate::correction::Corrections;
use crate::pattern::{Access, Pattern};

/// The largest data inside a request to another node. Longer runs go in several requests, or by remote memory access.
const REQUEST_BYTES: f64 = 32768.0;

/// Bytes of data sieving's buffer.
const SIEVE_BYTES: f64 = (1 << 20) as f64;

/// Ranges of up to so many bytes on another node travel together in requests of up to [`MESSAGE_BYTES`], in which each has
/// [`RANGE_BYTES`] more.
const TOGETHER_BYTES: f64 = (16 << 10) as f64;
const MESSAGE_BYTES: f64 = (64 << 10) as f64;
const RANGE_BYTES: f64 = 12.0;
/// What such a range costs at least, in nanoseconds: a system call by a worker that shares its processors with the network
/// (docs/decisions/0052: 36 MB/s of ranges of 64 bytes by two workers).
const RANGE_NS: f64 = 1500.0;

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

/// Accesses for other nodes that a node serves at the same time.
const WORKERS: f64 = 4.0;

/// Exchanges between all ranks in a round: counts, agreement, lists of runs, data.
const EXCHANGES: f64 = 4.0;

/// Exchanges between all ranks in a call, besides: the pattern, memory, the result.
const EXCHANGES_OF_A_CALL: f64 = 3.0;

/// The greatest time that is predicted, in nanoseconds: about 292 years.
const TIME_MAX: f64 = i64::MAX as f64;

/// What the model considers besides the paper's base.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extensions {
    /// Every run costs a latency, on the medium, in each stripe that it touches.
    pub runs: bool,
    /// Reads fetch small gaps too, and runs that do not combine are written one by one.
    pub sieving: bool,
    /// Messages on one node are cheaper than between nodes; a round has several exchanges of log2(ranks) steps.
    pub messages: bool,
    /// Runs on another node cost a request and the network, while the medium serves others.
    pub remote: bool,
    /// Several targets are accessed at the same time.
    pub targets: bool,
    /// Processes share a medium's bandwidth, and wait for each other's runs, only if they are more than it serves at a
    /// time. Ranks of a node share processors likewise.
    pub contention: bool,
    /// T_other: lists of runs, and copies between buffers.
    pub copies: bool,
}

impl Extensions {
    /// The paper's model.
    pub const NONE: Extensions = Extensions {
        runs: false,
        sieving: false,
        messages: false,
        remote: false,
        targets: false,
        contention: false,
        copies: false,
    };
    /// All extensions.
    pub const ALL: Extensions = Extensions {
        runs: true,
        sieving: true,
        messages: true,
        remote: true,
        targets: true,
        contention: true,
        copies: true,
    };
    /// The extensions by name.
    pub const NAMES: [&'static str; 7] =
        ["runs", "sieving", "messages", "remote", "targets", "contention", "copies"];

    /// All extensions but those of these names. None for an unknown name.
    pub fn without<'a>(names: impl IntoIterator<Item = &'a str>) -> Option<Extensions> {
        let mut used = Extensions::ALL;
        for name in names {
            *match name {
                "runs" => &mut used.runs,
                "sieving" => &mut used.sieving,
                "messages" => &mut used.messages,
                "remote" => &mut used.remote,
                "targets" => &mut used.targets,
                "contention" => &mut used.contention,
                "copies" => &mut used.copies,
                _ => return None,
            } = false;
        }
        Some(used)
    }
}

/// The parts of a time, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Parts {
    /// T_comm: messages between ranks.
    pub communication: f64,
    /// T_io: accesses to the file.
    pub io: f64,
    /// T_other: lists and copies.
    pub other: f64,
}

impl Parts {
    /// Their sum.
    pub fn total(&self) -> f64 {
        self.communication + self.io + self.other
    }
}

/// A time with its interval, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Estimate {
    /// The estimate.
    pub value: f64,
    /// The least that it may be.
    pub low: f64,
    /// The most that it may be.
    pub high: f64,
    /// The parts of the estimate.
    pub parts: Parts,
}

/// The times of both ways.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Prediction {
    /// Through aggregators.
    pub collective: Estimate,
    /// By each rank alone.
    pub independent: Estimate,
}

impl Prediction {
    /// True if the collective call is faster by more than what the choice may lose, 5 %.
    pub fn is_collective(&self) -> bool {
        self.collective.value * 1.05 < self.independent.value
    }
}

/// The times of a pattern, with all extensions.
pub fn predict(pattern: &Pattern, calibration: &Calibration) -> Prediction {
    predict_with(pattern, calibration, Extensions::ALL, &Corrections::default())
}

/// The times of a pattern, with these extensions and what earlier calls have shown.
pub fn predict_with(
    pattern: &Pattern,
    calibration: &Calibration,
    used: Extensions,
    corrections: &Corrections,
) -> Prediction {
    let pattern = pattern.clamped();
    let ends = [*calibration, calibration.at_end(false), calibration.at_end(true)];
    let times = |of: fn(&Model) -> Parts, factor: f64| {
        let [parts, low, high] =
            ends.map(|c| of(&Model { p: pattern, c: Costs::of(&c, pattern.writes), used }));
        let time = |parts: Parts| (parts.total() * factor).clamp(1.0, TIME_MAX);
        let value = time(parts);
        Estimate { value, low: time(low).min(value), high: time(high).max(value), parts }
    };
    Prediction {
        collective: times(Model::collective, corrections.factor(pattern.writes, true)),
        independent: times(Model::independent, corrections.factor(pattern.writes, false)),
    }
}

impl Estimate {
    /// This time, and `count` times another one.
    fn and(self, count: f64, other: &Estimate) -> Estimate {
        let sum = |a: f64, b: f64| (a + count * b).min(TIME_MAX);
        let parts = Parts {
            communication: self.parts.communication + count * other.parts.communication,
            io: self.parts.io + count * other.parts.io,
            other: self.parts.other + count * other.parts.other,
        };
        Estimate {
            value: sum(self.value, other.value),
            low: sum(self.low, other.low),
            high: sum(self.high, other.high),
            parts,
        }
    }
}

/// The times of `calls` calls, at least one, each of which begins in the file where the one before has ended.
pub fn predict_calls(
    pattern: &Pattern,
    calls: u64,
    calibration: &Calibration,
    used: Extensions,
    corrections: &Corrections,
) -> Prediction {
    let of = |is_continued| {
        let pattern = Pattern { is_continued, ..*pattern };
        predict_with(&pattern, calibration, used, corrections)
    };
    let (first, later, count) = (of(pattern.is_continued), of(true), calls.max(1) as f64 - 1.0);
    Prediction {
        collective: first.collective.and(count, &later.collective),
        independent: first.independent.and(count, &later.independent),
    }
}

/// The number of aggregators with which the collective way is fastest, at most the pattern's, and the times with it. It is
/// the pattern's, a half of it, a quarter, and so on; a smaller one where that is faster by more than 5 %.
pub fn predict_best(
    pattern: &Pattern,
    calibration: &Calibration,
    used: Extensions,
    corrections: &Corrections,
) -> (u64, Prediction) {
    let mut tried = pattern.clamped();
    let mut best = (tried.aggregators, predict_with(&tried, calibration, used, corrections));
    while tried.aggregators > 1 {
        tried.aggregators /= 2;
        let found = predict_with(&tried, calibration, used, corrections);
        if found.collective.value * 1.05 < best.1.collective.value {
            best = (tried.aggregators, found);
        }
    }
    best
}

/// Costs in nanoseconds, of one direction.
struct Costs {
    message: f64,
    message_byte: f64,
    local_message: f64,
    local_message_byte: f64,
    sequential_byte: f64,
    random_byte: f64,
    run: f64,
    next: f64,
    request: f64,
    request_byte: f64,
    copy_byte: f64,
    piece: f64,
    gap_bytes: f64,
    parallel: f64,
    processors: f64,
    queue: f64,
}

impl Costs {
    fn of(c: &Calibration, writes: bool) -> Costs {
        let ns = |v: crate::Value| v.value.max(0) as f64;
        let byte = |v: crate::Value| v.value.max(0) as f64 / 1000.0;
        let [sequential, random, run, next] = if writes {
            [c.write_sequential_byte_ps, c.write_random_byte_ps, c.write_run_ns, c.write_next_ns]
        } else {
            [c.read_sequential_byte_ps, c.read_random_byte_ps, c.read_run_ns, c.read_next_ns]
        };
        Costs {
            message: ns(c.message_ns),
            message_byte: byte(c.message_byte_ps),
            local_message: ns(c.local_message_ns),
            local_message_byte: byte(c.local_message_byte_ps),
            sequential_byte: byte(sequential),
            random_byte: byte(random),
            run: ns(run),
            // Noise may have made it the greater one.
            next: ns(next).min(ns(run)),
            request: ns(c.request_ns),
            request_byte: byte(c.request_byte_ps),
            copy_byte: byte(c.copy_byte_ps),
            piece: ns(c.piece_ns),
            gap_bytes: c.gap_bytes.max(0) as f64,
            parallel: c.parallel.max(1) as f64,
            processors: c.processors.max(1) as f64,
            queue: c.queue.max(1) as f64,
        }
    }
}

/// The smallest whole number that is not less than log2.
fn steps(ranks: u64) -> f64 {
    f64::from(u64::BITS - ranks.saturating_sub(1).leading_zeros())
}

/// What a process moves.
#[derive(Clone, Copy)]
struct Moved {
    bytes: f64,
    /// With the gaps that the medium's node reads.
    medium_bytes: f64,
    /// Of the longest call.
    call_bytes: f64,
}

impl Moved {
    fn all(bytes: f64, call_bytes: f64) -> Moved {
        Moved { bytes, medium_bytes: bytes, call_bytes }
    }
}

/// Accesses of a process to the medium.
#[derive(Clone, Copy)]
struct Accesses {
    /// Those that begin anywhere.
    starts: f64,
    /// Those that begin where the one before has ended.
    nexts: f64,
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

struct Model {
    p: Pattern,
    c: Costs,
    used: Extensions,
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
    fn is_continued(&self) -> bool {
        self.p.is_continued && self.p.density() >= 1.0 && self.p.access != Access::Random
    }

    /// The accesses of `calls` calls, each with a range of these bytes, by each of `processes`.
    ///
    /// Each stripe begins in another backing file, but on a medium with seeks. For data on another node a call is several
    /// requests. Those of one process arrive in their order. Of several processes', those that are read arrive in the
    /// order of their calls, as many as a process sends at a time; what is written is fetched from the processes first, so
    /// these come by turns.
    fn accesses(&self, processes: f64, calls: f64, bytes: f64) -> Accesses {
        let stripes = if self.seeks() { 1.0 } else { (bytes / STRIPE_BYTES).ceil().max(1.0) };
        if self.far_part() == 0.0 {
            return Accesses { starts: calls * stripes, nexts: 0.0 };
        }
        let parts = (bytes / part_bytes(bytes).max(1.0)).ceil().max(1.0);
        let starts = if processes <= 1.0 {
            stripes.min(parts)
        } else if self.p.writes {
            parts
        } else {
            stripes.max(parts - parts.min(AHEAD) + 1.0)
        };
        Accesses { starts: calls * starts, nexts: calls * (parts - starts).max(0.0) }
    }

    /// The same accesses, if those of a turn of all `processes` follow each other in the file: one of them begins where
    /// another one has just ended. Processes of this node that wait for the medium keep the order in which they came,
    /// which is that of the file for one of them as a rule. One process's accesses follow each other.
    fn in_turns(&self, processes: f64, accesses: Accesses) -> Accesses {
        if processes <= 1.0 {
            accesses.with_starts(if self.is_continued() { 0.0 } else { accesses.starts.min(1.0) })
        } else if self.far_part() == 0.0 && self.seeks() {
            accesses.with_starts(accesses.starts * (1.0 - 1.0 / processes))
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
    fn access(&self, processes: f64, calls: f64, accesses: Accesses, moved: Moved, byte: f64) -> f64 {
        let medium = self.medium(processes, accesses, moved.medium_bytes, byte);
        let network = self.network(processes, calls, processes * moved.bytes);
        let part = part_bytes(moved.call_bytes) * byte.min(self.c.request_byte);
        medium.max(network) + self.far_part() * calls.min(1.0) * (self.c.request + part)
    }

    /// How much longer a rank's own work takes because the ranks of its node share the processors.
    fn crowding(&self) -> f64 {
        let on_a_node = self.p.ranks as f64 / self.p.nodes as f64;
        if self.used.contention {
            (on_a_node / self.c.processors).max(1.0)
        } else {
            1.0
        }
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
    fn gap_limit(&self) -> f64 {
        match self.used.remote && self.p.is_far {
            true => (self.p.run_bytes as f64).clamp(FAR_GAP_BYTES, MEDIUM_GAP_BYTES),
            false => self.c.gap_bytes,
        }
    }

    /// The largest gap that the node of the data reads too: one that takes less time than another access.
    fn medium_gap_limit(&self) -> f64 {
        (self.c.run / self.c.sequential_byte.max(f64::MIN_POSITIVE)).min(MEDIUM_GAP_BYTES)
    }

    /// True if ranges of so many bytes travel together.
    fn is_together(&self, bytes: f64) -> bool {
        self.used.remote && self.p.is_far && bytes <= TOGETHER_BYTES
    }

    /// Requests in `calls` calls that move ranges of so many bytes each.
    fn requests(&self, calls: f64, bytes: f64) -> f64 {
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

    fn independent(&self) -> Parts {
        let (p, c) = (&self.p, &self.c);
        let ranks = p.ranks as f64;
        let is_sieved = self.used.sieving
            && !p.writes
            && p.access == Access::Strided
            && p.runs() > 1.0
            && p.gap_bytes > 0
            && p.gap_bytes as f64 <= self.gap_limit();
        if !self.used.runs {
            let accesses = Accesses { starts: p.runs(), nexts: 0.0 };
            let bytes = p.bytes as f64;
            let moved = Moved::all(bytes, p.run_bytes.min(p.bytes) as f64);
            let io = self.access(ranks, p.runs(), accesses, moved, c.random_byte);
            return Parts { communication: 0.0, io, other: 0.0 };
        }
        // Calls, and the bytes of each.
        let (calls, of_call, bytes) = match is_sieved {
            true => {
                let calls = (p.span() / SIEVE_BYTES).ceil().max(1.0);
                (calls, p.span() / calls, p.span())
            }
            false if p.access == Access::Sequential => (p.runs().min(1.0), p.bytes as f64, p.bytes as f64),
            false => (p.runs(), p.run_bytes.min(p.bytes) as f64, p.bytes as f64),
        };
        let (accesses, moved) = match self.is_together(of_call) && calls > 1.0 {
            // The node of the data may read what is between them.
            true if self.used.sieving && !p.writes && p.gap_bytes as f64 <= self.medium_gap_limit() => {
                let accesses = Accesses { starts: self.requests(calls, of_call), nexts: 0.0 };
                let medium_bytes = p.span().max(bytes);
                (accesses, Moved { bytes, medium_bytes, call_bytes: MESSAGE_BYTES.min(bytes) })
            }
            // A range takes RANGE_NS where the medium's latency is shorter.
            true => {
                let starts = calls * (RANGE_NS / c.run.max(1.0)).max(1.0);
                (Accesses { starts, nexts: 0.0 }, Moved::all(bytes, MESSAGE_BYTES.min(bytes)))
            }
            false => {
                let accesses = self.accesses(ranks, calls, of_call);
                let is_dense = !is_sieved && p.access != Access::Random && p.density() >= 1.0;
                let longest = if is_sieved { SIEVE_BYTES.min(bytes) } else { of_call };
                let accesses = if is_dense { self.in_turns(ranks, accesses) } else { accesses };
                (accesses, Moved::all(bytes, longest))
            }
        };
        let is_gathered = is_sieved || self.is_together(of_call) && calls > 1.0;
        let picked = if is_gathered && self.used.copies {
            (p.runs() * c.piece + p.bytes as f64 * c.copy_byte) * self.crowding()
        } else {
            0.0
        };
        let io = self.access(ranks, self.requests(calls, of_call), accesses, moved, c.sequential_byte);
        Parts { communication: 0.0, io, other: picked }
    }

    fn collective(&self) -> Parts {
        let (p, c) = (&self.p, &self.c);
        let (ranks, aggregators) = (p.ranks as f64, p.aggregators as f64);
        let buffer = p.buffer_bytes as f64;
        let rounds = (p.range() / aggregators / buffer).ceil();
        let data = p.total() / aggregators; // that each aggregator gets from, or sends to, the ranks
        let communication = if self.used.messages {
            self.exchange(rounds, data)
        } else {
            let tau = (ranks - aggregators) / ranks;
            // Every message is a whole buffer, but for a last one.
            rounds * c.message + data * tau * c.message_byte
        };
        let is_dense = !self.used.sieving || p.density() >= 1.0;
        let runs_of_aggregator = ranks * p.runs() / aggregators;
        // Runs of the ranks that follow each other are written by one call. At least one run of each rank's is followed by a
        // gap; each gap may be behind another run.
        let merged =
            (p.runs() / aggregators + runs_of_aggregator * (1.0 - p.density())).min(runs_of_aggregator);
        // A read fetches the gaps between the ranks' runs too.
        let (calls, bytes) = match (is_dense, p.writes) {
            (true, _) => (rounds, data),
            (false, true) => (rounds.max(merged), data),
            (false, false) => (rounds, p.range() / aggregators),
        };
        let accesses = if is_dense || !p.writes {
            // A range of the file for each aggregator, in rounds.
            let accesses = self.accesses(aggregators, calls, bytes / calls.max(1.0));
            if calls <= 1.0 || aggregators <= 1.0 {
                self.in_turns(aggregators, accesses)
            } else {
                accesses
            }
        } else {
            Accesses { starts: calls, nexts: 0.0 }
        };
        let requests = self.requests(calls, bytes / calls);
        let moved = Moved::all(bytes, buffer.min(bytes));
        let io = self.access(aggregators, requests, accesses, moved, c.sequential_byte);
        let other = if self.used.copies {
            let work =
                (p.runs() + runs_of_aggregator) * c.piece + (2.0 * p.bytes as f64 + data) * c.copy_byte;
            work * self.crowding()
        } else {
            0.0
        };
        Parts { communication, io, other }
    }

    /// T_comm with the places of the ranks: what crosses the link of a node, and what stays on the node.
    fn exchange(&self, rounds: f64, data: f64) -> f64 {
        let (p, c) = (&self.p, &self.c);
        let (ranks, nodes) = (p.ranks as f64, p.nodes as f64);
        let on_a_node = (p.aggregators as f64 / nodes).max(1.0);
        // The parts of an aggregator's data that are its own rank's, and its node's.
        let (own, of_node) = match p.access {
            // An aggregator serves the ranges of its own rank and of those that follow up to the next aggregator.
            Access::Sequential => {
                let served = (ranks / p.aggregators as f64).max(1.0);
                (1.0 / served, served.min(ranks / nodes) / served)
            }
            Access::Strided | Access::Random => (1.0 / ranks, 1.0 / nodes),
        };
        let (across, within) = (1.0 - of_node, of_node - own);
        let message = if p.nodes > 1 { c.message } else { c.local_message };
        let exchanges = rounds * EXCHANGES + EXCHANGES_OF_A_CALL;
        let latency = exchanges * steps(p.ranks) * message;
        let local_byte = c.local_message_byte * self.crowding();
        latency + data * (on_a_node * across * c.message_byte + within * local_byte)
    }
}

#[cfg(test)]
mod tests;
