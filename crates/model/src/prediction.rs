//! The formulas: the time that a pattern takes, with collective and with independent I/O.
//!
//! Without extensions these are the paper's:
//!
//! - collective: sum over rounds (T_s + T_w · msg · tau) + bytes / bw_seq, with tau = non-aggregators / processes and msg
//!   the collective buffer. A round serves one buffer of every aggregator.
//! - independent: bytes / bw_ran.
//!
//! All times are sums and products of calibrated costs, so the calibration's lower ends give the lower end of a time, and
//! its upper ends the upper one. Where a time depends on the order in which accesses of several processes arrive, which is
//! chance, the ends are also those of the best and of the worst order.

mod costs;
mod extensions;
mod io;

use self::costs::Costs;
pub use self::extensions::Extensions;
use self::io::{Accesses, Model, Moved, Order, MESSAGE_BYTES, RANGE_NS};
use crate::calibration::Calibration;
use crate::correction::Corrections;
use crate::pattern::{Access, Pattern};

/// Bytes of data sieving's buffer.
const SIEVE_BYTES: f64 = (1 << 20) as f64;

/// Of a turn of three ranks or more, so many accesses come just after the one where they begin. Ranks that wait for a disk keep
/// the order in which they came: of four, one of them is behind the one before it in the file in about six of ten calls.
/// Two ranks are taken to keep that of the file, which is the faster one of two: each happens in about half of the calls
/// (docs/study.md). So where independent calls are chosen against, it is not because of chance.
const FOLLOWING: f64 = 0.6;

/// Bytes between nodes take so much longer where several ranks of a node share its link: their streams leave gaps, or wait for each
/// other (measured: two ranks a node, 1.05 to 1.6).
const SHARED_LINK: f64 = 1.2;

/// Pieces of a window, at most, and their mean length, at least, that aggregators move without a copy (mpi/src/exchange.c).
const DIRECT_PIECES: f64 = 512.0;
const DIRECT_BYTES: f64 = 1024.0;

/// Exchanges between all ranks in a round: counts, agreement, lists of runs, data.
const EXCHANGES: f64 = 4.0;

/// Exchanges between all ranks in a call, besides: the pattern, memory, the result.
const EXCHANGES_OF_A_CALL: f64 = 3.0;

/// The greatest time that is predicted, in nanoseconds: about 292 years.
const TIME_MAX: f64 = i64::MAX as f64;

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
    /// The parts of the estimate, without corrections.
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
    let ends = [
        (*calibration, Order::Usual),
        (calibration.at_end(false), Order::OfTheFile),
        (calibration.at_end(true), Order::Apart),
    ];
    let times = |of: fn(&Model) -> Parts, is_collective: bool| {
        let [parts, low, high] =
            ends.map(|(c, order)| of(&Model { p: pattern, c: Costs::of(&c, pattern.writes), used, order }));
        let factor = corrections.factor(pattern.writes, is_collective, parts.total());
        let time = |parts: Parts| (parts.total() * factor).clamp(1.0, TIME_MAX);
        let value = time(parts);
        Estimate { value, low: time(low).min(value), high: time(high).max(value), parts }
    };
    Prediction { collective: times(Model::collective, true), independent: times(Model::independent, false) }
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

/// The smallest whole number that is not less than log2.
fn steps(ranks: u64) -> f64 {
    f64::from(u64::BITS - ranks.saturating_sub(1).leading_zeros())
}

impl Model {
    /// How much longer a rank's own work takes because the ranks of its node share the processors.
    fn crowding(&self) -> f64 {
        let on_a_node = self.p.ranks as f64 / self.p.nodes as f64;
        if self.used.contention {
            (on_a_node / self.c.processors).max(1.0)
        } else {
            1.0
        }
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
                let longest = if is_sieved { SIEVE_BYTES.min(bytes) } else { of_call };
                let accesses = match p.access {
                    _ if ranks <= 1.0 && calls > 1.0 => accesses,
                    Access::Random => accesses,
                    // The ranks' ranges overlap. One of them begins where the call before has ended.
                    _ if is_sieved && ranks > 1.0 && self.is_continued() => {
                        self.in_turns(ranks, accesses, calls, [1.0, 0.0], [1.0, 0.0])
                    }
                    _ if is_sieved => accesses,
                    _ => {
                        let later = self.following();
                        let first = if self.is_continued() { later } else { FOLLOWING };
                        let all = if p.density() >= 1.0 { ranks } else { ranks - 1.0 };
                        let all = [if self.is_continued() { all } else { ranks - 1.0 }, all];
                        self.in_turns(ranks, accesses, calls, [first, later], all)
                    }
                };
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

    /// Accesses of a later turn of all ranks that come just after the one where they begin. The ranks' runs are taken to be side
    /// by side, with the gap behind the last one.
    fn following(&self) -> f64 {
        match self.p.ranks {
            2 if self.p.density() >= 1.0 => 2.0,
            2 => 1.0,
            _ => FOLLOWING,
        }
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
        // Runs of the ranks that follow each other are written by one call: those of a turn, if they are side by side.
        let merged = p.runs() / aggregators;
        // A read fetches the gaps between the ranks' runs too.
        let (calls, bytes) = match (is_dense, p.writes) {
            (true, _) => (rounds, data),
            (false, true) => (rounds.max(merged), data),
            (false, false) => (rounds, p.range() / aggregators),
        };
        let is_range = is_dense || !p.writes;
        let accesses = self.accesses(aggregators, calls, bytes / calls.max(1.0));
        let accesses = match is_range && (calls <= 1.0 || aggregators <= 1.0) {
            // They come in any order.
            true => {
                let usual = [1.0 - 1.0 / aggregators; 2];
                let most = if self.is_continued() { aggregators } else { aggregators - 1.0 };
                self.in_turns(aggregators, accesses, 1.0, usual, [most; 2])
            }
            false => accesses,
        };
        let requests = self.requests(calls, bytes / calls);
        let moved = Moved::all(bytes, buffer.min(bytes));
        let io = self.access(aggregators, requests, accesses, moved, c.sequential_byte);
        let other = if self.used.copies {
            let [own, _] = self.shares();
            let windows = if self.is_direct(is_dense || p.writes) { 0.0 } else { data };
            let work = (p.runs() + runs_of_aggregator) * c.piece + (own * data + windows) * c.copy_byte;
            work * self.crowding()
        } else {
            0.0
        };
        // While one window is moved to or from other nodes, the ranks exchange another one.
        let hidden = match p.is_far && self.used.remote {
            true => (rounds - 1.0).max(0.0) / rounds.max(1.0) * communication.min(io),
            false => 0.0,
        };
        Parts { communication, io: io - hidden, other }
    }

    /// True if aggregators move the ranks' pieces between the file and the memory of messages, without a copy: few pieces, of a
    /// file on their nodes. `is_whole`: a call has no gaps that it must take too.
    fn is_direct(&self, is_whole: bool) -> bool {
        let p = &self.p;
        let run = p.run_bytes.min(p.bytes) as f64;
        let window = (p.buffer_bytes as f64).min(p.range() / p.aggregators as f64);
        is_whole && !p.is_far && run >= DIRECT_BYTES && window * p.density() <= DIRECT_PIECES * run
    }

    /// How much of an aggregator's data comes from its own rank, and how much from all ranks of its node.
    fn shares(&self) -> [f64; 2] {
        let p = &self.p;
        let (ranks, nodes) = (p.ranks as f64, p.nodes as f64);
        match p.access {
            // An aggregator serves the ranges of its own rank and of those that follow up to the next aggregator.
            Access::Sequential => {
                let served = (ranks / p.aggregators as f64).max(1.0);
                [1.0 / served, served.min(ranks / nodes) / served]
            }
            Access::Strided | Access::Random => [1.0 / ranks, 1.0 / nodes],
        }
    }

    /// T_comm with the places of the ranks: what crosses the link of a node, and what stays on the node.
    fn exchange(&self, rounds: f64, data: f64) -> f64 {
        let (p, c) = (&self.p, &self.c);
        let on_a_node = (p.aggregators as f64 / p.nodes as f64).max(1.0);
        let [own, of_node] = self.shares();
        let (across, within) = (1.0 - of_node, of_node - own);
        let message = if p.nodes > 1 { c.message } else { c.local_message };
        let exchanges = rounds * EXCHANGES + EXCHANGES_OF_A_CALL;
        let latency = exchanges * steps(p.ranks) * message;
        let local_byte = c.local_message_byte * self.crowding();
        let shared = match self.used.contention && p.ranks > p.nodes {
            true => SHARED_LINK,
            false => 1.0,
        };
        latency + data * (on_a_node * across * shared * c.message_byte + within * local_byte)
    }
}

#[cfg(test)]
mod tests;
