//! MPI-IO on a pool of this node by the model's choice, beside the rule that holds without it (`FOREBAY_MODEL=off`), by
//! bench/mpi.c. A pool in memory has nothing to gain from the model; this shows what it costs there.

use std::path::{Path, PathBuf};

use crate::mpi::{run, Built, MPIS};
use crate::report::{median, Table, Target};
use crate::sizes::Sizes;
use crate::systems::{said, Pool, System};

const RULE: &str = "rule without it";
/// With the model collective calls have at least this part of the rate that they have without, in the geometric mean of all
/// rows. Single rows differ by more from run to run, also those of independent calls, for which nothing is chosen.
const PART: f64 = 0.95;
/// Rows whose labels end so have a mean together.
const KINDS: [&str; 2] = ["collective", "independent"];

fn table(title: String, unit: &'static str, more_is_better: bool) -> Table {
    Table { title, unit, more_is_better, columns: vec!["model".into(), RULE.into()], rows: Vec::new() }
}

/// The geometric means of the medians of both columns, of rows of a kind.
fn means(tables: &[Table], kind: &str) -> [f64; 2] {
    let rows = || tables.iter().flat_map(|table| &table.rows).filter(|row| row.label.ends_with(kind));
    let count = rows().count().max(1) as f64;
    [0, 1].map(|column| {
        let logs = rows().filter_map(|row| median(&row.samples[column])).map(f64::ln);
        (logs.sum::<f64>() / count).exp()
    })
}

/// A table for each installed MPI and number of ranks, and their means. The pool is calibrated before, so that the model
/// knows it.
pub(crate) fn measure(binaries: &Path, sizes: &Sizes, show: &mut dyn FnMut(Table)) -> Result<(), String> {
    let pool = Pool::up(binaries, sizes.capacity_bytes)?;
    said(pool.command().args(["model", "calibrate", "--quick"]))?;
    let system = System::in_pool(&pool, "Forebay", "choice")?;
    let (built, mut all) = (Built::new()?, Vec::new());
    for mpi in MPIS.iter().filter(|mpi| mpi.is_here()) {
        let program = built.program(mpi)?;
        for ranks in [2, 4] {
            let bytes = sizes.bytes as u64 / ranks as u64;
            let what =
                format!("choice: a pool of one node, {}, {ranks} ranks, {} MiB", mpi.name, sizes.bytes >> 20);
            let mut rates = table(what.clone(), "GB/s", true);
            let mut times = table(format!("{what}: times"), "us", false);
            // A first run of both counts for none.
            for repetition in 0..=sizes.repetitions {
                for column in [repetition % 2, 1 - repetition % 2] {
                    let switch = (column == 1).then_some(("FOREBAY_MODEL", "off"));
                    let file: PathBuf = system.root.join("shared");
                    let found = run(&system, mpi, ranks, (&program, &file, bytes), switch)?;
                    for (label, value) in found.iter().filter(|_| repetition > 0) {
                        match label.strip_prefix("us of ") {
                            Some(label) => times.add(label, column, *value, Vec::new),
                            None => rates.add(label, column, *value, Vec::new),
                        }
                    }
                }
            }
            all.extend([rates, times]);
        }
    }
    let mut mean = table("choice: rates, geometric means of all rows".into(), "GB/s", true);
    for kind in KINDS {
        let target = || match kind {
            "collective" => vec![Target::Ratio { against: RULE.into(), at_least: PART }],
            _ => Vec::new(),
        };
        for (column, value) in means(&all, kind).into_iter().enumerate() {
            mean.add(kind, column, value, target);
        }
    }
    all.into_iter().for_each(&mut *show);
    show(mean);
    Ok(())
}
