//! The staging experiments of node-local burst buffers, on a store that takes and gives 100 MB/s, and a burst.
//!
//! Three jobs each read a data set and rewrite it, and sync each file. Directly, they do so on the store. Through the
//! pool, each job's data set is prestaged first, and drained by the pool itself; *uncoordinated*, all jobs begin at once,
//! *interleaved*, the next data set is prestaged when the one before is there. The time ends when all data are on the
//! store. Then a program that runs ten times over two data sets, and one that writes a burst. All bytes are compared
//! with what was to be written.

use super::attached::Attached;
use super::programs::Files;
use super::slow::SlowStore;
use crate::report::{Table, Target};
use crate::sizes::Sizes;
use crate::systems::said;
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

const MIB: u64 = 1 << 20;
const JOBS: u64 = 3;
const ITERATIONS: u64 = 10;
/// Column names.
const OURS: &str = "Forebay";
const DIRECT: &str = "direct";

/// Amounts.
struct Amounts {
    set: Files,
    reused: Files,
    burst: Files,
}

impl Amounts {
    fn new(sizes: &Sizes) -> Amounts {
        let files = |count, bytes| Files { root: Default::default(), count, bytes };
        match sizes.is_quick {
            true => {
                Amounts { set: files(16, 16 * MIB), reused: files(4, 16 * MIB), burst: files(8, 32 * MIB) }
            }
            false => {
                Amounts { set: files(16, 64 * MIB), reused: files(8, 16 * MIB), burst: files(8, 128 * MIB) }
            }
        }
    }
}

/// This program, as the driver of an experiment.
fn drive(arguments: &[String]) -> Result<Command, String> {
    let mut command = Command::new(std::env::current_exe().map_err(|e| format!("this program's path: {e}"))?);
    command.args(arguments);
    Ok(command)
}

/// The command as a program of the pool, if there is one.
fn seen_by(pool: Option<&Attached>, command: Command) -> Command {
    match pool {
        Some(pool) => pool.under(command),
        None => command,
    }
}

/// What a driver printed.
fn printed(command: &mut Command) -> Result<Value, String> {
    let text = said(command)?;
    serde_json::from_str(text.trim()).map_err(|e| format!("the driver said {text:?}: {e}"))
}

/// The three jobs' data sets, version 1, behind a new slow store.
fn three_sets(disk: &Path, set: &Files) -> Result<(SlowStore, Vec<Files>), String> {
    let store = SlowStore::new(disk)?;
    let sets: Vec<Files> =
        (0..JOBS).map(|i| Files { root: store.behind.join(format!("set{i}")), ..set.clone() }).collect();
    for set in &sets {
        std::fs::create_dir(&set.root).map_err(|e| format!("{}: {e}", set.root.display()))?;
        set.write(1)?;
    }
    Ok((store, sets))
}

/// Runs something for each job at once.
fn at_once(run: impl Fn(u64) -> Result<(), String> + Sync) -> Result<(), String> {
    std::thread::scope(|scope| {
        let run = &run;
        let jobs: Vec<_> = (0..JOBS).map(|i| scope.spawn(move || run(i))).collect();
        jobs.into_iter().try_for_each(|job| job.join().map_err(|_| "a job panicked".to_owned())?)
    })
}

fn three_jobs_directly(disk: &Path, set: &Files) -> Result<f64, String> {
    let (store, sets) = three_sets(disk, set)?;
    let begun = Instant::now();
    at_once(|i| {
        let root = store.at.join(format!("set{i}"));
        said(&mut drive(&sets[i as usize].arguments("rewrite", &root, 2))?).map(|_| ())
    })?;
    let seconds = begun.elapsed().as_secs_f64();
    sets.iter().try_for_each(|set| set.check(2).map(|_| ()))?;
    Ok(seconds)
}

fn three_jobs_through_the_pool(
    binaries: &Path,
    disk: &Path,
    set: &Files,
    interleaved: bool,
) -> Result<f64, String> {
    let (store, sets) = three_sets(disk, set)?;
    let capacity = 2 * JOBS * set.count * set.bytes + 256 * MIB;
    let pool = Attached::up(binaries, capacity, &store.at.to_string_lossy(), "close")?;
    let prestage = |i: u64| pool.verb(&["prestage", "-r", &format!("/store/set{i}")]);
    let work = |i: u64| {
        let root = pool.path(&format!("set{i}"));
        said(&mut pool.under(drive(&sets[i as usize].arguments("rewrite", &root, 2))?)).map(|_| ())
    };
    let begun = Instant::now();
    if interleaved {
        std::thread::scope(|scope| {
            let (mut jobs, work) = (Vec::new(), &work);
            for i in 0..JOBS {
                prestage(i)?;
                jobs.push(scope.spawn(move || work(i)));
            }
            jobs.into_iter().try_for_each(|job| job.join().map_err(|_| "a job panicked".to_owned())?)
        })?;
    } else {
        at_once(|i| prestage(i).and_then(|()| work(i)))?;
    }
    pool.verb(&["wait-durable", "-r", "/store"])?;
    let seconds = begun.elapsed().as_secs_f64();
    sets.iter().try_for_each(|set| set.check(2).map(|_| ()))?;
    Ok(seconds)
}

/// Ten runs of a program over two data sets.
fn iterations(binaries: Option<&Path>, disk: &Path, set: &Files) -> Result<f64, String> {
    let store = SlowStore::new(disk)?;
    let names = ["a", "b"];
    for name in names {
        let set = Files { root: store.behind.join(name), ..set.clone() };
        std::fs::create_dir(&set.root).map_err(|e| format!("{}: {e}", set.root.display()))?;
        set.write(1)?;
    }
    let capacity = 4 * set.count * set.bytes + 256 * MIB;
    let pool = match binaries {
        Some(binaries) => Some(Attached::up(binaries, capacity, &store.at.to_string_lossy(), "close")?),
        None => None,
    };
    let begun = Instant::now();
    for _ in 0..ITERATIONS {
        for name in names {
            let root = pool.as_ref().map_or(store.at.join(name), |pool| pool.path(name));
            said(&mut seen_by(pool.as_ref(), drive(&set.arguments("check", &root, 1))?))?;
        }
    }
    Ok(begun.elapsed().as_secs_f64())
}

/// Seconds for which a burst holds its program, and until the store has it.
fn burst(binaries: Option<&Path>, disk: &Path, files: &Files) -> Result<(f64, f64), String> {
    let store = SlowStore::new(disk)?;
    let capacity = 2 * files.count * files.bytes + 256 * MIB;
    let pool = match binaries {
        Some(binaries) => Some(Attached::up(binaries, capacity, &store.at.to_string_lossy(), "close")?),
        None => None,
    };
    let root = pool.as_ref().map_or(store.at.clone(), |pool| pool.path(""));
    let mut command = seen_by(pool.as_ref(), drive(&files.arguments("write", &root, 1))?);
    let begun = Instant::now();
    let held = printed(&mut command)?["seconds"].as_f64().ok_or("the driver said no seconds")?;
    if let Some(pool) = &pool {
        pool.verb(&["wait-durable", "-r", "/store"])?;
    }
    let durable = begun.elapsed().as_secs_f64();
    Files { root: store.behind.clone(), ..files.clone() }.check(1)?;
    Ok((held, durable))
}

/// The tables of (a) and (b).
pub(super) fn measure(binaries: &Path, disk: &Path, sizes: &Sizes) -> Result<Vec<Table>, String> {
    let amounts = Amounts::new(sizes);
    let mib = |files: &Files| files.count * files.bytes / MIB;
    let columns = vec![OURS.to_owned(), DIRECT.to_owned()];
    let table = |title: String| Table {
        title,
        unit: "s",
        more_is_better: false,
        columns: columns.clone(),
        rows: Vec::new(),
    };
    let at_least = |at_least: f64| move || vec![Target::Ratio { against: DIRECT.into(), at_least }];
    let mut jobs = table(format!(
        "(h) {JOBS} jobs, each reads and rewrites {} MiB; {ITERATIONS} runs over 2 x {} MiB; a store of 100 MB/s",
        mib(&amounts.set),
        mib(&amounts.reused),
    ));
    let mut bursts = table(format!("(h) a burst of {} MiB, a store of 100 MB/s", mib(&amounts.burst)));
    // The times are those of the store's rate: they vary by some percent, and take minutes.
    for repetition in 0..sizes.repetitions.min(if sizes.is_quick { 1 } else { 3 }) {
        let both = |forebay: &mut dyn FnMut() -> Result<(), String>,
                    direct: &mut dyn FnMut() -> Result<(), String>| match repetition % 2 {
            0 => forebay().and_then(|()| direct()),
            _ => direct().and_then(|()| forebay()),
        };
        // Papers: 835.5 s directly, 715.3 and 583.2 s with stage-in; 240.5 and 71.8 s.
        let direct = three_jobs_directly(disk, &amounts.set)?;
        for (label, interleaved, ratio) in
            [("3 jobs, uncoordinated", false, 835.5 / 715.3), ("3 jobs, interleaved", true, 835.5 / 583.2)]
        {
            let ours = three_jobs_through_the_pool(binaries, disk, &amounts.set, interleaved)?;
            jobs.add(label, 0, ours, at_least(ratio));
            jobs.add(label, 1, direct, Vec::new);
        }
        let mut ours = 0.0;
        let mut direct = 0.0;
        both(&mut || iterations(Some(binaries), disk, &amounts.reused).map(|s| ours = s), &mut || {
            iterations(None, disk, &amounts.reused).map(|s| direct = s)
        })?;
        jobs.add("10 runs over the same data", 0, ours, at_least(240.5 / 71.8));
        jobs.add("10 runs over the same data", 1, direct, Vec::new);
        let (mut ours, mut direct) = ((0.0, 0.0), (0.0, 0.0));
        both(&mut || burst(Some(binaries), disk, &amounts.burst).map(|s| ours = s), &mut || {
            burst(None, disk, &amounts.burst).map(|s| direct = s)
        })?;
        bursts.add("the program is held", 0, ours.0, at_least(10.0));
        bursts.add("the program is held", 1, direct.0, Vec::new);
        bursts.add("until the store has all", 0, ours.1, Vec::new);
        bursts.add("until the store has all", 1, direct.1, Vec::new);
    }
    Ok(vec![jobs, bursts])
}
