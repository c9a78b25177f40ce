//! MPI-IO on a pool of this node by the model's choice, beside the rule that holds without it (`FOREBAY_MODEL=off`), by
//! bench/mpi.c. A pool in memory has nothing to gain from the model; this shows what it costs there.

use std::path::{Path, PathBuf};

use crate::mpi::{run, Built, MPIS};
use crate::report::{Table, Target};
use crate::sizes::Sizes;
use crate::systems::{said, Pool, System};

const RULE: &str = "rule without it";
/// With the model a call has at least this part of the rate that it has without, and at most so much more time. The same
/// program's runs differ by some percent.
const PART: f64 = 0.95;

/// A table for each installed MPI and number of ranks. The pool is calibrated before, so that the model knows it.
pub(crate) fn measure(binaries: &Path, sizes: &Sizes, show: &mut dyn FnMut(Table)) -> Result<(), String> {
    let pool = Pool::up(binaries, sizes.capacity_bytes)?;
    said(pool.command().args(["model", "calibrate", "--quick"]))?;
    let system = System::in_pool(&pool, "Forebay", "choice")?;
    let built = Built::new()?;
    for mpi in MPIS.iter().filter(|mpi| mpi.is_here()) {
        let program = built.program(mpi)?;
        for ranks in [2, 4] {
            let bytes = sizes.bytes as u64 / ranks as u64;
            let what = format!(
                "(f) the choice on a pool of one node, {}, {ranks} ranks, {} MiB",
                mpi.name,
                sizes.bytes >> 20
            );
            let table = |title: String, unit, more_is_better| Table {
                title,
                unit,
                more_is_better,
                columns: vec!["model".into(), RULE.into()],
                rows: Vec::new(),
            };
            let mut rates = table(what.clone(), "GB/s", true);
            let mut times = table(format!("{what}: times"), "us", false);
            // A first run of both counts for none.
            for repetition in 0..=sizes.repetitions {
                for column in [repetition % 2, 1 - repetition % 2] {
                    let switch = (column == 1).then_some(("FOREBAY_MODEL", "off"));
                    let file: PathBuf = system.root.join("shared");
                    let found = run(&system, mpi, ranks, (&program, &file, bytes), switch)?;
                    for (label, value) in found.iter().filter(|_| repetition > 0) {
                        let target = || vec![Target::Ratio { against: RULE.into(), at_least: PART }];
                        match label.strip_prefix("us of ") {
                            Some(label) => times.add(label, column, *value, target),
                            None => rates.add(label, column, *value, target),
                        }
                    }
                }
            }
            show(rates);
            show(times);
        }
    }
    Ok(())
}
