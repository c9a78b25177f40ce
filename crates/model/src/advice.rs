//! Advice: the way, the aggregators, the buffer and the stripe count that the model finds fastest for a pattern.

use crate::calibration::Calibration;
use crate::pattern::Pattern;
use crate::prediction::{predict, Estimate, Prediction};

/// A way with its parameters.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Choice {
    /// The pattern with the parameters of this choice.
    pub pattern: Pattern,
    /// Through aggregators.
    pub is_collective: bool,
    /// The predicted time.
    pub time: Estimate,
}

/// The fastest choice of each way.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Advice {
    /// Through aggregators.
    pub collective: Choice,
    /// By each rank alone.
    pub independent: Choice,
}

impl Advice {
    /// The better of both. Independent access, where the collective one is not faster by more than 5 %.
    pub fn best(&self) -> &Choice {
        let both = Prediction { collective: self.collective.time, independent: self.independent.time };
        if both.is_collective() {
            &self.collective
        } else {
            &self.independent
        }
    }

    /// False where the intervals of both ways overlap: the calibration does not tell which is faster, or the order in which
    /// ranks come to an arm decides.
    pub fn is_certain(&self) -> bool {
        let (c, i) = (&self.collective.time, &self.independent.time);
        c.high < i.low || i.high < c.low
    }
}

impl Choice {
    /// The hints of MPI-IO for this choice, by name.
    pub fn hints(&self) -> Vec<(&'static str, String)> {
        let way = if self.pattern.writes { "romio_cb_write" } else { "romio_cb_read" };
        let mut hints = vec![(way, if self.is_collective { "enable" } else { "disable" }.to_owned())];
        if self.is_collective {
            hints.push(("cb_nodes", self.pattern.aggregators.to_string()));
            hints.push(("cb_buffer_size", self.pattern.buffer_bytes.to_string()));
        }
        if self.pattern.targets > 1 {
            hints.push(("striping_factor", self.pattern.targets.to_string()));
        }
        hints
    }
}

/// The buffers that are tried: those that the MPI driver accepts, in powers of four.
const BUFFERS: [u64; 7] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 32 << 20, 64 << 20];

/// The fastest choice of each way, with at most `targets` stripes and the pattern's other parameters. A later candidate
/// replaces an earlier one only if it is faster by 1 %, so that the advice prefers few aggregators, small buffers and few
/// stripes.
pub fn advise(pattern: &Pattern, calibration: &Calibration, targets: u64) -> Advice {
    let mut best: [Option<Choice>; 2] = [None; 2];
    let mut offer = |is_collective: bool, pattern: Pattern, time: Estimate| {
        let kept = &mut best[usize::from(is_collective)];
        if kept.is_none_or(|kept| time.value < kept.time.value * 0.99) {
            *kept = Some(Choice { pattern, is_collective, time });
        }
    };
    let aggregators = (0..).map(|i| 1u64 << i).take_while(|n| *n < pattern.ranks).chain([pattern.ranks]);
    let aggregators: Vec<u64> = aggregators.take(64).collect();
    for targets in 1..=targets.clamp(1, 256) {
        for &aggregators in &aggregators {
            for buffer_bytes in BUFFERS {
                let tried = Pattern { aggregators, buffer_bytes, targets, ..*pattern };
                let found = predict(&tried, calibration);
                offer(true, tried, found.collective);
                offer(false, tried, found.independent);
            }
        }
    }
    let [Some(independent), Some(collective)] = best else { unreachable!("something was offered") };
    Advice { collective, independent }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Value};

    fn short_runs() -> Pattern {
        Pattern {
            ranks: 8,
            nodes: 4,
            aggregators: 8,
            bytes: 4 << 20,
            run_bytes: 512,
            gap_bytes: 7 * 512,
            access: Access::Strided,
            is_far: true,
            ..Pattern::default()
        }
    }

    #[test]
    fn advice_is_no_slower_than_what_was_asked_about() {
        let c = Calibration { write_run_ns: Value::exactly(20_000), ..Calibration::default() };
        let given = predict(&short_runs(), &c);
        let found = advise(&short_runs(), &c, 4);
        assert!(found.collective.time.value <= given.collective.value);
        assert!(found.best().is_collective && found.is_certain());
        let hints = found.best().hints();
        assert!(hints.contains(&("romio_cb_write", "enable".into())), "{hints:?}");
        assert!(hints.iter().any(|(name, _)| *name == "cb_nodes"), "{hints:?}");
    }

    #[test]
    fn a_disk_with_seeks_is_written_together_also_on_one_node() {
        let seek = Value::exactly(8_000_000);
        let disk = Calibration { write_run_ns: seek, parallel: 1, ..Calibration::default() };
        let here = Pattern { nodes: 1, is_far: false, ..short_runs() };
        assert!(advise(&here, &disk, 1).best().is_collective);
        let memory = advise(&here, &Calibration::default(), 1);
        assert!(!memory.best().is_collective, "{memory:?}");
        assert_eq!(memory.best().hints(), [("romio_cb_write", "disable".to_owned())]);
    }

    #[test]
    fn one_rank_needs_no_aggregators() {
        let one = Pattern { ranks: 1, nodes: 1, aggregators: 1, is_far: false, ..short_runs() };
        assert_eq!(advise(&one, &Calibration::default(), 1).collective.pattern.aggregators, 1);
    }
}
