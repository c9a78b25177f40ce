//! The points of the model's grid: medium x pattern x size x ranks, written and read.

use crate::star::Ranks;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Most bytes of all ranks in a call.
const CALL_BYTES_MAX: u64 = 32 * MIB;
/// Most bytes of the file that a measurement covers.
const EXTENT_MAX: u64 = 64 * MIB;
/// Calls of a measurement, at most.
const CALLS_MAX: u64 = 16;
/// Calls are repeated until a measurement takes this long.
const MEASURED_S: f64 = 0.08;

/// Where the ranks' data of a call lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Pattern {
    /// Bytes of a rank in a call.
    pub(super) bytes: u64,
    /// Bytes that follow each other in the file. All of a rank's if they are one block.
    pub(super) run: u64,
    /// The ranks' runs take this part of the range: 1 all, 2 half of it.
    pub(super) spread: u64,
}

impl Pattern {
    fn is_blocks(&self) -> bool {
        self.run == self.bytes && self.spread == 1
    }

    /// Bytes between two runs of a rank.
    fn gap(&self, ranks: u64) -> u64 {
        if self.is_blocks() {
            0
        } else {
            self.run * (ranks * self.spread - 1)
        }
    }

    /// In tables, where each pattern has a row of its own.
    pub(super) fn words(&self) -> String {
        let size = |bytes: u64| match bytes {
            b if b % MIB == 0 => format!("{} MiB", b / MIB),
            b => format!("{} KiB", b / KIB),
        };
        match self {
            p if p.is_blocks() => format!("blocks of {}", size(p.bytes)),
            p if p.spread > 1 => format!("runs of {}, gaps, {} a rank", size(p.run), size(p.bytes)),
            p => format!("runs of {}, {} a rank", size(p.run), size(p.bytes)),
        }
    }

    /// A line for bench/points.c.
    pub(super) fn line(&self, number: usize, calls: u64) -> String {
        let kind = if self.is_blocks() { "blocks" } else { "runs" };
        format!("{number} {kind} {} {} {} {calls}\n", self.run, self.bytes, self.spread)
    }

    /// How many calls a measurement makes, if one takes `seconds`.
    pub(super) fn calls(&self, ranks: u64, seconds: f64) -> u64 {
        let extent = self.bytes * ranks * self.spread;
        let wanted = (MEASURED_S / seconds.max(1e-6)).ceil() as u64;
        wanted.clamp(1, CALLS_MAX).min(EXTENT_MAX / extent).max(1)
    }

    /// The options of `forebay model predict` for so many calls.
    pub(super) fn options(&self, ranks: Ranks, writes: bool, calls: u64) -> Vec<String> {
        let count = ranks.count() as u64;
        let mut all: Vec<String> = Vec::new();
        for (name, value) in [
            ("--ranks", count),
            ("--nodes", ranks.nodes() as u64),
            ("--bytes", self.bytes),
            ("--run", self.run),
            ("--gap", self.gap(count)),
            ("--calls", calls),
        ] {
            all.extend([name.to_owned(), value.to_string()]);
        }
        if let Ranks::Compute { .. } = ranks {
            all.push("--apart".to_owned());
        }
        if !writes {
            all.push("--read".to_owned());
        }
        all
    }
}

/// What is measured: the media, the places of the ranks, the patterns of each.
pub(super) struct Grid {
    pub(super) media: &'static [&'static str],
    pub(super) places: &'static [Ranks],
    patterns: &'static [Pattern],
}

const fn blocks(bytes: u64) -> Pattern {
    Pattern { bytes, run: bytes, spread: 1 }
}

const fn runs(run: u64, bytes: u64, spread: u64) -> Pattern {
    Pattern { bytes, run, spread }
}

/// Runs of 32 KiB to 16 MiB, and short ones of 4 KiB.
const FULL: Grid = Grid {
    media: &["hdd", "ssd", "slc", "pcram"],
    places: &[
        Ranks::Here(2),
        Ranks::Here(4),
        Ranks::Compute { nodes: 4, each: 1 },
        Ranks::Compute { nodes: 4, each: 2 },
    ],
    patterns: &[
        blocks(MIB / 2),
        blocks(16 * MIB),
        runs(4 * KIB, 128 * KIB, 1),
        runs(32 * KIB, MIB, 1),
        runs(256 * KIB, 2 * MIB, 1),
        // Several rounds of a collective call.
        runs(256 * KIB, 8 * MIB, 1),
        runs(64 * KIB, MIB, 2),
    ],
};

const QUICK: Grid = Grid {
    media: &["hdd", "pcram"],
    places: &[Ranks::Here(4), Ranks::Compute { nodes: 4, each: 1 }],
    patterns: &[blocks(MIB / 2), runs(4 * KIB, 128 * KIB, 1), runs(64 * KIB, MIB, 1)],
};

impl Grid {
    pub(super) fn of(is_quick: bool) -> &'static Grid {
        if is_quick {
            &QUICK
        } else {
            &FULL
        }
    }

    /// The patterns of so many ranks: not more data than a measurement has time for.
    pub(super) fn patterns(&self, ranks: Ranks) -> Vec<Pattern> {
        let fits = |p: &&Pattern| p.bytes * ranks.count() as u64 <= CALL_BYTES_MAX;
        self.patterns.iter().filter(fits).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grid_has_enough_points_of_every_kind() {
        let grid = Grid::of(false);
        let of_a_medium: usize = grid.places.iter().map(|ranks| 2 * grid.patterns(*ranks).len()).sum();
        assert!(grid.media.len() * of_a_medium >= 60);
        let counts: Vec<_> = grid.places.iter().map(|ranks| ranks.count()).collect();
        assert_eq!((counts.iter().min(), counts.iter().max()), (Some(&2), Some(&8)));
        let all: Vec<_> = grid.places.iter().flat_map(|ranks| grid.patterns(*ranks)).collect();
        assert!(all.iter().any(|p| p.run == 16 * MIB) && all.iter().any(|p| p.run == 32 * KIB));
        assert!(
            all.iter().any(|p| p.bytes > 4 * MIB && !p.is_blocks()),
            "longer than an aggregator's window"
        );
        let names: std::collections::BTreeSet<_> = grid.patterns.iter().map(Pattern::words).collect();
        assert_eq!(names.len(), grid.patterns.len(), "a pattern's samples are its own");
        assert!(all.iter().any(Pattern::is_blocks) && all.iter().any(|p| p.spread > 1));
    }

    #[test]
    fn options_of_a_pattern_say_where_its_runs_are() {
        let far = Ranks::Compute { nodes: 4, each: 2 };
        let said = runs(4 * KIB, MIB, 2).options(far, false, 3).join(" ");
        assert_eq!(
            said,
            "--ranks 8 --nodes 4 --bytes 1048576 --run 4096 --gap 61440 --calls 3 --apart --read"
        );
        let said = blocks(MIB).options(Ranks::Here(2), true, 1).join(" ");
        assert_eq!(said, "--ranks 2 --nodes 1 --bytes 1048576 --run 1048576 --gap 0 --calls 1");
    }

    #[test]
    fn calls_are_as_many_as_time_and_space_allow() {
        assert_eq!(runs(4 * KIB, 64 * KIB, 1).calls(2, 0.1), 1);
        assert_eq!(runs(4 * KIB, 64 * KIB, 1).calls(2, 0.04), 2);
        assert_eq!(runs(4 * KIB, 64 * KIB, 1).calls(2, 0.0), CALLS_MAX);
        assert_eq!(blocks(16 * MIB).calls(2, 1e-3), 2, "64 MiB");
    }
}
