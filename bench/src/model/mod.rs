//! The model of collective and independent I/O, beside what was measured: pools on emulated media, ranks on their node and
//! on compute nodes behind limited links. A medium is calibrated once, by none of the grid's points.
//!
//! Needs root (namespaces, mounts), an MPI, and FUSE.

mod grid;
mod tally;

use std::path::{Path, PathBuf};

use serde_json::Value;

use self::grid::{Grid, Pattern};
use self::tally::{
    choices, errors_of, errors_of_certain, gain, left_to_chance, outside_of_intervals, Outcome, COLLECTIVE,
    INDEPENDENT, WORST_ERROR,
};
use crate::mpi::{Mpi, MPIS};
use crate::report::{median, Table, Target};
use crate::sizes::Sizes;
use crate::star::{script, Ranks, Star, StarPool, COMPUTE, STORAGE};
use crate::systems::said;

const CAPACITY_BYTES: u64 = 768 << 20;
/// The extensions of the model that `forebay model predict --without` knows.
const EXTENSIONS: [&str; 7] = ["runs", "sieving", "messages", "remote", "targets", "contention", "copies"];
/// Targets: errors, wrong choices, and the time that they lose, in percent.
const MEAN_ERROR: f64 = 4.93;
const WRONG: f64 = 5.0;
/// At most so many points may be left to chance, in percent.
const CHANCE: f64 = 20.0;
const LOST: f64 = 5.0;
/// Automatic calls must reach this part of the better way's speed at each point.
const AUTOMATIC_PART: f64 = 0.95;
/// The columns of a table of points; those of the MPI libraries follow.
const COLUMNS: [&str; 6] =
    ["automatic", "better way", "independent", "predicted", "collective", "predicted c."];
/// The ways of bench/points.c that are columns.
const WAYS: [(&str, usize); 3] = [(COLUMNS[0], 0), (COLUMNS[2], 2), (COLUMNS[4], 4)];

/// The programs of a run.
struct Programs {
    forebay: PathBuf,
    /// For each MPI that is installed: bench/points.c.
    mpis: Vec<(&'static Mpi, PathBuf)>,
    /// kernels/src/ping-pong.c, for the first of them.
    ping_pong: PathBuf,
}

impl Programs {
    fn build(binaries: &Path, star: &Star) -> Result<Programs, String> {
        let source = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
        let build = |mpi: &Mpi, name: &str, from: &str| {
            let program = star.directory.join(format!("{name}.{}", mpi.compiler));
            let mut command = std::process::Command::new(mpi.compiler);
            said(command.args(["-O2", "-o"]).arg(&program).arg(source(from))).map(|_| program)
        };
        let mut mpis = Vec::new();
        for mpi in MPIS.iter().filter(|mpi| mpi.is_here()) {
            mpis.push((mpi, build(mpi, "points", "points.c")?));
        }
        let (first, _) = mpis.first().ok_or("no MPI is installed")?;
        let ping_pong = build(first, "ping-pong", "../kernels/src/ping-pong.c")?;
        Ok(Programs { forebay: binaries.join("forebay"), mpis, ping_pong })
    }
}

/// What `forebay model predict` says, in seconds of a call.
struct Predicted {
    /// Independent, collective.
    times: [f64; 2],
    /// Low and high of each, for a calibration that is exact: what the order of accesses makes of it.
    intervals: [[f64; 2]; 2],
    /// The model's choice.
    is_collective: bool,
}

/// A point: a row of a table, and what was predicted for it.
struct Point {
    label: String,
    predicted: Predicted,
    without: Vec<[f64; 2]>,
}

/// The points of a medium and a place, each first written, then read.
struct Points {
    all: Vec<Point>,
    /// What bench/points.c reads.
    file: PathBuf,
}

/// Shows a table for each medium, and the summary.
pub(crate) fn measure(binaries: &Path, sizes: &Sizes, show: &mut dyn FnMut(Table)) -> Result<(), String> {
    let ready =
        Star::new().and_then(|star| Programs::build(binaries, &star).map(|programs| (star, programs)));
    let (star, programs) = match ready {
        Ok(ready) => ready,
        Err(why) => {
            println!("\nmodel is left out: {why}");
            return Ok(());
        }
    };
    let grid = Grid::of(sizes.is_quick);
    let (mut outcomes, mut defaults) = (Vec::new(), Vec::new());
    for medium in grid.media {
        let pool = StarPool::up(&star, binaries, medium, CAPACITY_BYTES)?;
        let document = exact(&star, &calibrate(&programs, &star, &pool)?)?;
        let mut columns: Vec<String> = COLUMNS.map(String::from).to_vec();
        for (mpi, _) in &programs.mpis {
            columns.push(format!("own {}", mpi.name));
        }
        columns.extend(programs.mpis.iter().skip(1).map(|(mpi, _)| format!("auto {}", mpi.name)));
        let title = format!("model: {medium}, a call");
        let mut table = Table { title, unit: "ms", more_is_better: false, columns, rows: Vec::new() };
        for ranks in grid.places {
            let points = points_of(&programs, &star, &document, &grid.patterns(*ranks), *ranks, medium)?;
            run(&programs, &star, &pool, *ranks, &points, sizes.repetitions, &mut table)?;
            for point in &points.all {
                outcomes.push(finish(&mut table, point)?);
            }
        }
        defaults.push(against_defaults(&programs, &table, medium));
        show(table);
    }
    show(summary(&outcomes));
    show(gains(&outcomes));
    let mut all = sums();
    for part in defaults {
        all.columns = part.columns;
        all.rows.extend(part.rows);
    }
    show(all);
    Ok(())
}

/// Calibrates the pool on the storage node, and stores the document with the pool on all nodes.
fn calibrate(programs: &Programs, star: &Star, pool: &StarPool<'_>) -> Result<PathBuf, String> {
    // Two ranks on each of two nodes, so that messages on a node are measured too.
    let (mpi, _) = programs.mpis[0];
    let line = star.launch(mpi, Ranks::Compute { nodes: 2, each: 2 });
    let words = std::iter::once(line.get_program()).chain(line.get_args());
    let words: Vec<String> = words.map(|word| format!("'{}'", word.to_string_lossy())).collect();
    let messages = star.directory.join("messages");
    script(&messages, &format!("exec {} '{}'", words.join(" "), programs.ping_pong.display()))?;
    let mut command = star.command(STORAGE, &programs.forebay);
    command.arg("--pool").arg(pool.on(STORAGE)).args(["model", "calibrate", "--quick", "--json"]);
    command.arg("--mpi").arg(&messages).env_remove("FOREBAY_POOL");
    let said = said(&mut command)?;
    let found: Value = serde_json::from_str(&said).map_err(|e| format!("calibrate said {said:?}: {e}"))?;
    let file = found["file"].as_str().ok_or(format!("calibrate said {said:?}"))?;
    println!("\ncalibrated {file}: {}", found["values"]);
    let document = PathBuf::from(file);
    let name = document.file_name().ok_or(format!("calibrate stored {file}"))?;
    for node in STORAGE + 1..=STORAGE + COMPUTE {
        let copy = pool.on(node).join(name);
        std::fs::copy(&document, &copy).map_err(|e| format!("{}: {e}", copy.display()))?;
    }
    Ok(document)
}

/// A copy of a calibration whose intervals are its values. So the intervals of predictions are what the order of accesses makes
/// of them, and a busy machine during the calibration makes none of them wider.
fn exact(star: &Star, document: &Path) -> Result<PathBuf, String> {
    let text = std::fs::read_to_string(document).map_err(|e| format!("{}: {e}", document.display()))?;
    let to = star.directory.join("exact.toml");
    let lines: Vec<String> = text.lines().map(without_interval).collect();
    std::fs::write(&to, lines.join("\n") + "\n").map_err(|e| format!("{}: {e}", to.display()))?;
    Ok(to)
}

/// `name = [value, low, high]` with the value alone; any other line as it is.
fn without_interval(line: &str) -> String {
    let value = line.split_once(" = [").and_then(|(name, list)| Some((name, list.split_once(',')?.0)));
    value.map_or(line.to_owned(), |(name, value)| format!("{name} = [{value}, {value}, {value}]"))
}

/// What the model says of so many calls.
fn predict(
    programs: &Programs,
    document: &Path,
    (options, calls): (&[String], u64),
    without: Option<&str>,
) -> Result<Predicted, String> {
    let mut command = std::process::Command::new(&programs.forebay);
    command.args(["model", "predict", "--json", "--calibration"]).arg(document).args(options);
    if let Some(name) = without {
        command.args(["--without", name]);
    }
    let text = said(&mut command)?;
    let found: Value = serde_json::from_str(&text).map_err(|e| format!("predict said {text:?}: {e}"))?;
    let seconds = |way: &str, name: &str| {
        found[way][name].as_f64().map(|ns| ns / 1e9 / calls as f64).ok_or(format!("predict said {text:?}"))
    };
    let interval = |way: &str| Ok::<_, String>([seconds(way, "low_ns")?, seconds(way, "high_ns")?]);
    Ok(Predicted {
        times: [seconds("independent", "ns")?, seconds("collective", "ns")?],
        intervals: [interval("independent")?, interval("collective")?],
        is_collective: found["choice"] == "collective",
    })
}

fn points_of(
    programs: &Programs,
    star: &Star,
    document: &Path,
    patterns: &[Pattern],
    ranks: Ranks,
    medium: &str,
) -> Result<Points, String> {
    let (mut all, mut lines) = (Vec::new(), String::new());
    for (number, pattern) in patterns.iter().enumerate() {
        let mut shortest = f64::MAX;
        for writes in [true, false] {
            let options = pattern.options(ranks, writes, 1);
            let [independent, collective] = predict(programs, document, (&options, 1), None)?.times;
            shortest = shortest.min(independent.min(collective));
        }
        let calls = pattern.calls(ranks.count() as u64, shortest);
        for writes in [true, false] {
            let options = pattern.options(ranks, writes, calls);
            let predict = |without| predict(programs, document, (&options, calls), without);
            let predicted = predict(None)?;
            let without = EXTENSIONS
                .iter()
                .map(|name| predict(Some(name)).map(|found| found.times))
                .collect::<Result<_, _>>()?;
            let direction = if writes { "write" } else { "read" };
            let label = format!("{medium}, {}, {direction}, {}", ranks.words(), pattern.words());
            all.push(Point { label, predicted, without });
        }
        lines += &pattern.line(number, calls);
    }
    let file = star.directory.join("points");
    std::fs::write(&file, lines).map_err(|e| format!("{}: {e}", file.display()))?;
    Ok(Points { all, file })
}

/// Measures all points of a place: with the driver, by the libraries' own I/O on the mount.
fn run(
    programs: &Programs,
    star: &Star,
    pool: &StarPool<'_>,
    ranks: Ranks,
    points: &Points,
    repetitions: usize,
    table: &mut Table,
) -> Result<(), String> {
    let mut launch =
        |mpi: usize, by: &Path, file: &str, ways: &str, repetitions: usize, columns: &[(&str, usize)]| {
            let (mpi, program) = &programs.mpis[mpi];
            let mut command = star.launch(mpi, ranks);
            command.arg(by).arg(program).arg(file).arg(&points.file).args([ways, &repetitions.to_string()]);
            let text = said(&mut command)?;
            for line in text.lines().filter(|line| line.starts_with('{')) {
                let found: Value =
                    serde_json::from_str(line).map_err(|e| format!("points.c said {line:?}: {e}"))?;
                let wrong = || format!("points.c said {line:?}");
                let number = found["point"].as_u64().ok_or_else(wrong)? as usize;
                let writes = found["writes"].as_bool().ok_or_else(wrong)?;
                let seconds = found["seconds"].as_f64().ok_or_else(wrong)?;
                let column = columns.iter().find(|(way, _)| found["way"] == *way).ok_or_else(wrong)?.1;
                let point = points.all.get(2 * number + usize::from(!writes)).ok_or_else(wrong)?;
                table.add(&point.label, column, seconds * 1e3, || {
                    vec![Target::Ratio { against: COLUMNS[1].into(), at_least: AUTOMATIC_PART }]
                });
            }
            Ok::<(), String>(())
        };
    launch(0, &pool.by_driver(), "/forebay/points", "independent,collective,automatic", repetitions, &WAYS)?;
    // Fewer repetitions: these are no part of the model's error.
    let few = repetitions.min(3);
    let own = COLUMNS.len();
    let automatic = own + programs.mpis.len() - 1;
    for mpi in 0..programs.mpis.len() {
        launch(mpi, &pool.by_mount(), "points-own", "default", few, &[("default", own + mpi)])?;
        if mpi > 0 {
            let column = [("automatic", automatic + mpi)];
            launch(mpi, &pool.by_driver(), "/forebay/points-other", "automatic", few, &column)?;
        }
    }
    Ok(())
}

/// The point's medians, with which its row is completed.
fn finish(table: &mut Table, point: &Point) -> Result<Outcome, String> {
    let row = table.rows.iter_mut().find(|row| row.label == point.label);
    let row = row.ok_or_else(|| format!("points.c did not measure {}", point.label))?;
    let seconds =
        |column: usize| median(&row.samples[column]).map(|ms| ms / 1e3).ok_or("a way has no samples");
    let outcome = Outcome {
        measured: [seconds(2)?, seconds(4)?],
        automatic: seconds(0)?,
        predicted: point.predicted.times,
        is_collective: point.predicted.is_collective,
        without: point.without.clone(),
        intervals: point.predicted.intervals,
    };
    row.samples[1] = row.samples[2 + 2 * outcome.better_way()].clone();
    for (way, column) in [(INDEPENDENT, 3), (COLLECTIVE, 5)] {
        row.samples[column] = vec![point.predicted.times[way] * 1e3];
        // Tables show the median of these three, which is the predicted time; the file of samples has the interval too.
        row.samples[column].extend(point.predicted.intervals[way].map(|s| s * 1e3));
    }
    Ok(outcome)
}

fn columns(of: [&str; 2]) -> Vec<String> {
    of.map(String::from).to_vec()
}

/// Errors and choices beside the targets.
fn summary(outcomes: &[Outcome]) -> Table {
    let title = format!("model: errors and choices over {} points", outcomes.len());
    let columns = columns(["found", "target"]);
    let mut table = Table { title, unit: "%", more_is_better: false, columns, rows: Vec::new() };
    let mut row = |label: &str, part: f64, target: Option<f64>| {
        let at_most = || vec![Target::Difference { against: "target".into(), at_most: 0.0 }];
        match target {
            Some(target) => {
                table.add(label, 0, part * 100.0, at_most);
                table.add(label, 1, target, Vec::new);
            }
            None => table.add(label, 0, part * 100.0, Vec::new),
        }
    };
    for (name, way) in [("independent", INDEPENDENT), ("collective", COLLECTIVE)] {
        let found = errors_of(outcomes, way);
        row(&format!("{name}: mean error"), found.mean, Some(MEAN_ERROR));
        let worst = Some(WORST_ERROR * 100.0);
        row(&format!("{name}: worst error"), found.worst, worst);
        row(&format!("{name}: points left to chance"), left_to_chance(outcomes, way), Some(CHANCE));
        let outside = outside_of_intervals(outcomes, way).worst;
        row(&format!("{name}: of these, outside of the interval, worst"), outside, worst);
        let certain = errors_of_certain(outcomes, way).worst;
        row(&format!("{name}: worst error of the others"), certain, worst);
    }
    let found = choices(outcomes);
    row("points with the wrong choice", found.wrong, Some(WRONG));
    row("lost by a wrong choice, worst", found.worst_lost, Some(LOST));
    row("lost by wrong choices, of all", found.lost, Some(LOST));
    row("automatic slower than better, worst", found.automatic_worst, Some(LOST));
    row("automatic slower than better, of all", found.automatic, Some(LOST));
    table
}

/// What each extension of the model gains.
fn gains(outcomes: &[Outcome]) -> Table {
    let mut table = Table {
        title: "model: mean error with an extension left out, less that with all".into(),
        unit: "points of %",
        more_is_better: true,
        columns: vec!["gain".into()],
        rows: Vec::new(),
    };
    for (at, name) in EXTENSIONS.iter().enumerate() {
        table.add(name, 0, gain(outcomes, at) * 100.0, Vec::new);
    }
    table
}

/// Automatic calls beside the MPI libraries' own I/O: seconds of all points together.
fn sums() -> Table {
    let title = "model: one call at each point, in the sum".into();
    Table { title, unit: "s", more_is_better: false, columns: Vec::new(), rows: Vec::new() }
}

fn against_defaults(programs: &Programs, table: &Table, medium: &str) -> Table {
    let mut all = sums();
    all.columns = columns(["automatic", "own"]);
    for (mpi, (family, _)) in programs.mpis.iter().enumerate() {
        let automatic = if mpi == 0 { 0 } else { COLUMNS.len() + programs.mpis.len() - 1 + mpi };
        let sum = |column: usize| {
            table.rows.iter().filter_map(|row| median(&row.samples[column])).sum::<f64>() / 1e3
        };
        let label = format!("{medium}, {}", family.name);
        all.add(&label, 0, sum(automatic), || vec![Target::Ratio { against: "own".into(), at_least: 1.0 }]);
        all.add(&label, 1, sum(COLUMNS.len() + mpi), Vec::new);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_calibration_has_values_alone() {
        assert_eq!(
            without_interval("request_ns = [25000, 6250, 43750]"),
            "request_ns = [25000, 25000, 25000]"
        );
        for line in ["queue = 1", "host = \"a [b, c]\"", ""] {
            assert_eq!(without_interval(line), line);
        }
    }
}
