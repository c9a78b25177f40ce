//! A pattern of access: what all ranks do in one collective call.

use forebay_types::{Code, Error, Result};

/// Where the runs of the ranks lie.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// The runs of a rank follow each other: each rank has one range of the file.
    Sequential,
    /// The runs of a rank have gaps between them, which other ranks may fill.
    Strided,
    /// The runs of all ranks together cover one range, in random order.
    Random,
}

impl Access {
    /// The word on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Access::Sequential => "sequential",
            Access::Strided => "strided",
            Access::Random => "random",
        }
    }
}

/// One collective call, or a program's whole access, by all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pattern {
    /// Processes.
    pub ranks: u64,
    /// Nodes that the ranks are on, 1 to `ranks`.
    pub nodes: u64,
    /// Ranks that access the file for all in a collective call, 1 to `ranks`.
    pub aggregators: u64,
    /// Bytes that each rank reads or writes.
    pub bytes: u64,
    /// Bytes of the file that follow each other in a rank's data.
    pub run_bytes: u64,
    /// Bytes between two runs of a rank. Unused unless the access is strided.
    pub gap_bytes: u64,
    /// True for writes.
    pub writes: bool,
    /// Where the runs lie.
    pub access: Access,
    /// Bytes that an aggregator handles in a round (`cb_buffer_size`).
    pub buffer_bytes: u64,
    /// Backing files that can be accessed at the same time, or targets.
    pub targets: u64,
    /// True if data are on another node than the rank that accesses them.
    pub is_far: bool,
    /// True if all of that data are on nodes without ranks, as on storage nodes. Unused unless data are far.
    pub is_apart: bool,
    /// True if the ranges of all ranks begin where those of the call before have ended.
    pub is_continued: bool,
}

/// Bytes that an aggregator of the MPI driver handles in a round, unless a hint says otherwise.
pub(crate) const BUFFER_BYTES: u64 = 4 << 20;

impl Default for Pattern {
    fn default() -> Pattern {
        Pattern {
            ranks: 2,
            nodes: 1,
            aggregators: 2,
            bytes: 1 << 20,
            run_bytes: 1 << 20,
            gap_bytes: 0,
            writes: true,
            access: Access::Sequential,
            buffer_bytes: BUFFER_BYTES,
            targets: 1,
            is_far: false,
            is_apart: false,
            is_continued: false,
        }
    }
}

impl Pattern {
    /// Refuses numbers that make no sense together.
    pub fn check(&self) -> Result<()> {
        let refuse = |why: String| {
            let error = Error::new(Code::Invalid, "the pattern makes no sense").why(why);
            Err(error.cure("see `forebay model predict --help`"))
        };
        let positive = [
            ("ranks", self.ranks),
            ("run", self.run_bytes),
            ("buffer", self.buffer_bytes),
            ("targets", self.targets),
        ];
        if let Some((name, _)) = positive.iter().find(|(_, number)| *number == 0) {
            return refuse(format!("{name} is 0"));
        }
        if self.nodes == 0 || self.nodes > self.ranks {
            return refuse(format!("{} nodes for {} ranks", self.nodes, self.ranks));
        }
        if self.aggregators == 0 || self.aggregators > self.ranks {
            return refuse(format!("{} aggregators for {} ranks", self.aggregators, self.ranks));
        }
        Ok(())
    }

    /// The same pattern with each number in its range, for numbers that nobody checked.
    pub(crate) fn clamped(&self) -> Pattern {
        let ranks = self.ranks.max(1);
        Pattern {
            ranks,
            nodes: self.nodes.clamp(1, ranks),
            aggregators: self.aggregators.clamp(1, ranks),
            run_bytes: self.run_bytes.max(1),
            buffer_bytes: self.buffer_bytes.max(1),
            targets: self.targets.max(1),
            ..*self
        }
    }

    /// Bytes of all ranks.
    pub(crate) fn total(&self) -> f64 {
        self.ranks as f64 * self.bytes as f64
    }

    /// Runs of a rank.
    pub(crate) fn runs(&self) -> f64 {
        self.bytes.div_ceil(self.run_bytes) as f64
    }

    /// Bytes from the first run of a rank to its last.
    pub(crate) fn span(&self) -> f64 {
        match self.access {
            Access::Sequential => self.bytes as f64,
            Access::Strided => self.bytes as f64 + (self.runs() - 1.0).max(0.0) * self.gap_bytes as f64,
            Access::Random => self.total(),
        }
    }

    /// The part of the file's range that the ranks' runs cover, above 0 and at most 1.
    pub(crate) fn density(&self) -> f64 {
        match self.access {
            Access::Sequential | Access::Random => 1.0,
            Access::Strided => {
                let run = self.run_bytes as f64;
                (self.ranks as f64 * run / (run + self.gap_bytes as f64)).min(1.0)
            }
        }
    }

    /// Bytes from the first run of any rank to the end of the last. What lies behind the runs of the last turn is not in it.
    pub(crate) fn range(&self) -> f64 {
        let behind = match self.access {
            Access::Strided => {
                let run = self.run_bytes as f64;
                (run + self.gap_bytes as f64 - self.ranks as f64 * run).max(0.0)
            }
            Access::Sequential | Access::Random => 0.0,
        };
        (self.total() / self.density() - behind).max(self.total())
    }
}
