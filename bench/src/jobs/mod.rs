//! Staging as jobs of a real Slurm see it: when they may start, and when all their data are on the store again.
//!
//! The section starts the Slurm of the tests, with a slow store that all its nodes mount. Three jobs, each on a node of
//! its own, read a data set, rewrite it and sync each file. *Directly*, they do so on the store; else the prolog stages
//! the data set in, and the epilog stages it out. Transfers of several jobs go on
//! *at once*, *in turn*, or as *measured*. Then ten jobs,
//! one after the other, read the same two data sets and write a result each: from the store; from a pool of their own,
//! which stages in for each; from a persistent pool, which has staged in once. All bytes are compared with what was to
//! be written.

// The test has more to do with them.
#[allow(dead_code)]
#[path = "../../../tests/conformance/tests/cluster/bed.rs"]
mod bed;
#[allow(dead_code)]
#[path = "../../../tests/conformance/tests/slurm/cluster.rs"]
mod cluster;
mod prolog;
#[allow(dead_code)]
#[path = "../../../tests/conformance/tests/slurm/site.rs"]
mod site;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::backing::{Files, SlowStore, Slowness};
use crate::report::Table;
use crate::sizes::Sizes;
use serde_json::Value;
use site::{Site, ANN};

const MIB: u64 = 1 << 20;
/// Longer than any job takes.
const PATIENCE: Duration = Duration::from_secs(3600);
/// Jobs with a data set each.
const JOBS: u64 = 3;
/// Jobs that read the same data.
const ITERATIONS: u64 = 10;
/// A store that reads and writes at most so much, and one whose calls take long.
const LIMITED: Slowness = Slowness { rate: 100_000_000, latency_ms: 0 };
const DISTANT: Slowness = Slowness { rate: 0, latency_ms: 30 };

fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// How the three jobs reach their data: the column, and the store's setting, if a pool is used.
const WAYS: [(&str, Option<&str>); 4] =
    [("measured", Some("\"measured\"")), ("in turn", Some("1")), ("at once", Some("0")), ("direct", None)];

/// How the ten jobs reach theirs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reuse {
    Persistent,
    Own,
    Direct,
}

const REUSES: [(&str, Reuse); 3] =
    [("persistent", Reuse::Persistent), ("own pools", Reuse::Own), ("direct", Reuse::Direct)];

/// A Slurm beside a slow store. Slurm ends first.
struct Bench {
    site: Site,
    store: SlowStore,
}

impl Bench {
    fn up(disk: &Path, slowness: Slowness, capacity: u64, at_once: &str) -> Result<Bench, String> {
        let store = SlowStore::of(disk, slowness)?;
        let settings = format!("[[store]]\npath = '{}'\nat_once = {at_once}\n", store.at.display());
        let site = Site::patient(&format!("{}MiB", capacity / MIB), &settings, PATIENCE);
        Ok(Bench { site, store })
    }

    /// Files of version 1 in a new directory of the store, which the jobs' user owns.
    fn files(&self, name: &str, like: &Files) -> Result<Files, String> {
        let files = Files { root: self.store.behind.join(name), ..like.clone() };
        site::open_to_all(&files.root);
        files.write(1)?;
        let owned = std::process::Command::new("chown").args(["-R", ANN]).arg(&files.root).status();
        match owned {
            Ok(status) if status.success() => Ok(files),
            other => Err(format!("chown -R {ANN} {}: {other:?}", files.root.display())),
        }
    }

    fn submit(&self, name: &str, options: &str, script: &str) -> Result<u32, String> {
        self.site.submit(ANN, name, options, script).map_err(|why| format!("sbatch of {name}: {why}"))
    }

    /// The time that a job has written, in seconds since 1970.
    fn time(&self, name: &str) -> Result<f64, String> {
        let text = site::read(&self.site.dir().join("work").join(name));
        text.trim().parse().map_err(|_| format!("job {name} has written no time: {text:?}"))
    }

    /// The last line that a job printed.
    fn printed(&self, name: &str) -> Result<Value, String> {
        let text = site::read(&self.site.dir().join(format!("work/{name}.out")));
        let line = text.lines().last().unwrap_or_default();
        serde_json::from_str(line).map_err(|e| format!("job {name} has printed {text:?}: {e}"))
    }

    /// Waits until Slurm has nothing more to do for the jobs.
    fn finish(&self, jobs: &[u32]) {
        for job in jobs {
            self.site.await_shown(*job, "COMPLETED");
        }
        self.site.assert_clean("the benchmark", jobs.last().copied());
    }
}

/// When the last of the files was written or got its name, in seconds since 1970.
fn written_s(dir: &Path) -> f64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let times = entries.filter_map(|entry| entry.metadata().ok());
    times.map(|stat| stat.ctime() as f64 + stat.ctime_nsec() as f64 / 1e9).fold(0.0, f64::max)
}

/// A driver's command line for a job's script.
fn drive(files: &Files, verb: &str, root: &Path, version: u64) -> String {
    format!("forebay-bench {}", files.arguments(verb, root, version).join(" "))
}

/// Adds the times of one run of the three jobs to a column.
fn three_jobs(
    table: &mut Table,
    column: usize,
    disk: &Path,
    slowness: Slowness,
    set: &Files,
) -> Result<(), String> {
    let (_, at_once) = WAYS[column];
    let bytes = (set.count * set.bytes).max(64 * MIB);
    let bench = Bench::up(disk, slowness, 4 * bytes, at_once.unwrap_or("0"))?;
    let sets: Vec<Files> =
        (0..JOBS).map(|i| bench.files(&format!("set{i}"), set)).collect::<Result<_, _>>()?;
    let begun = now_s();
    let mut jobs = Vec::new();
    for i in 0..JOBS {
        let on_store = bench.store.at.join(format!("set{i}"));
        let at = on_store.display();
        let (directives, run, root) = match at_once {
            Some(_) => (
                format!(
                    "#BB_LUA forebay capacity={}MiB pool=forebay stage_in={at}:/set stage_out=/set/:{at}\n",
                    2 * bytes / MIB
                ),
                "forebay run --quiet -- ",
                PathBuf::from("/forebay/set"),
            ),
            None => (String::new(), "", on_store.clone()),
        };
        let program = drive(&sets[i as usize], "rewrite", &root, 2);
        let script = format!("{directives}date +%s.%N >started.{i}\n{run}{program}\n");
        let node = bench.site.slurm.node_name(1 + i as usize);
        jobs.push(bench.submit(&format!("set{i}"), &format!("--nodelist={node}"), &script)?);
    }
    bench.finish(&jobs);
    let mut starts = (0..JOBS)
        .map(|i| Ok(bench.time(&format!("started.{i}"))? - begun))
        .collect::<Result<Vec<_>, String>>()?;
    let mut read = 0.0;
    for (i, start) in starts.iter().enumerate() {
        read += start + bench.printed(&format!("set{i}"))?["read"].as_f64().ok_or("no time of reading")?;
    }
    starts.sort_by(f64::total_cmp);
    let out = sets.iter().map(|set| written_s(&set.root)).fold(0.0, f64::max) - begun;
    sets.iter().try_for_each(|set| set.check(2).map(drop))?;
    for (place, start) in ["first", "second", "third"].into_iter().zip(&starts) {
        table.add(&format!("the {place} job starts"), column, *start, Vec::new);
    }
    table.add("mean until a job starts", column, starts.iter().sum::<f64>() / JOBS as f64, Vec::new);
    table.add("mean until a job has read its data", column, read / JOBS as f64, Vec::new);
    table.add("the store has all data", column, out, Vec::new);
    Ok(())
}

/// Adds the times of one run of the ten jobs to a column.
fn ten_jobs(
    table: &mut Table,
    column: usize,
    disk: &Path,
    set: &Files,
    result: &Files,
) -> Result<(), String> {
    let (_, reuse) = REUSES[column];
    let bytes = 2 * set.count * set.bytes + ITERATIONS * result.count * result.bytes;
    let bench = Bench::up(disk, LIMITED, 2 * bytes, "1")?;
    for name in ["a", "b"] {
        bench.files(name, set)?;
    }
    site::open_to_all(&bench.store.behind.join("out"));
    let at = bench.store.at.display();
    let capacity = format!("capacity={}MiB pool=forebay", bytes.div_ceil(MIB) + 64);
    let staged_in = format!("stage_in={at}/a:/a stage_in={at}/b:/b");
    let on = format!("--job-name=ten --dependency=singleton --nodelist={}", bench.site.slurm.node_name(2));
    let begun = now_s();
    let mut jobs = Vec::new();
    for i in 0..ITERATIONS {
        let staged_out = format!("stage_out=/r{i}:{at}/out/r{i}");
        let (directives, run, root) = match reuse {
            Reuse::Persistent if i == 0 => (
                format!("persistent name=ten {capacity} {staged_in} {staged_out}"),
                "forebay run --quiet -- ",
                "/forebay",
            ),
            Reuse::Persistent => {
                (format!("use name=ten {staged_out}"), "forebay run --quiet -- ", "/forebay")
            }
            Reuse::Own => {
                (format!("{capacity} {staged_in} {staged_out}"), "forebay run --quiet -- ", "/forebay")
            }
            Reuse::Direct => (String::new(), "", ""),
        };
        let root = if root.is_empty() { bench.store.at.clone() } else { PathBuf::from(root) };
        let to = if reuse == Reuse::Direct { root.join("out") } else { root.clone() };
        let mut script = match directives.as_str() {
            "" => String::new(),
            words => format!("#BB_LUA forebay {words}\n"),
        };
        script += &format!("date +%s.%N >started.{i}\nset -e\n{run}mkdir {0}/r{i}\n", to.display());
        for name in ["a", "b"] {
            script += &format!("{run}{}\n", drive(set, "check", &root.join(name), 1));
        }
        script += &format!("{run}{}\n", drive(result, "write", &to.join(format!("r{i}")), 2 + i));
        jobs.push(bench.submit(&format!("ten{i}"), &on, &script)?);
    }
    for job in &jobs {
        bench.site.await_shown(*job, "COMPLETED");
    }
    let results: Vec<PathBuf> =
        (0..ITERATIONS).map(|i| bench.store.behind.join(format!("out/r{i}"))).collect();
    let out = results.iter().map(|dir| written_s(dir)).fold(0.0, f64::max) - begun;
    for (i, root) in results.into_iter().enumerate() {
        Files { root, ..result.clone() }.check(2 + i as u64)?;
    }
    if reuse == Reuse::Persistent {
        bench
            .submit("end", &on, "#BB_LUA forebay destroy name=ten\ntrue\n")
            .map(|job| bench.site.await_shown(job, "COMPLETED"))?;
        bench.site.until("the pool is gone", || bench.site.leftovers(None).matches("p.ten").count() == 0);
    }
    table.add("the first job starts", column, bench.time("started.0")? - begun, Vec::new);
    let last = ITERATIONS - 1;
    table.add("the tenth job starts", column, bench.time(&format!("started.{last}"))? - begun, Vec::new);
    table.add("the store has all results", column, out, Vec::new);
    Ok(())
}

/// The tables of (j).
pub(crate) fn measure(
    binaries: &Path,
    disk: &Path,
    sizes: &Sizes,
    show: &mut dyn FnMut(Table),
) -> Result<(), String> {
    let here = std::env::current_exe().ok().and_then(|path| path.parent().map(Path::to_owned));
    if let Some(why) = site::lacking_plugin() {
        println!("\n(j) jobs of Slurm are not measured: {why}");
        return Ok(());
    }
    if here.as_ref().and_then(|dir| dir.canonicalize().ok()) != binaries.canonicalize().ok() {
        println!(
            "\n(j) jobs of Slurm are not measured: forebay-bench is not beside the programs of --binaries"
        );
        return Ok(());
    }
    let files = |count, bytes| Files { root: PathBuf::new(), count, bytes };
    let (set, reused) = match sizes.is_quick {
        true => (files(16, 16 * MIB), files(4, 16 * MIB)),
        false => (files(16, 64 * MIB), files(8, 16 * MIB)),
    };
    let result = files(1, 16 * MIB);
    let table = |title: String, columns: &[&str]| Table {
        title,
        unit: "s after submission",
        more_is_better: false,
        columns: columns.iter().map(|c| (*c).to_owned()).collect(),
        rows: Vec::new(),
    };
    let mib = |files: &Files| files.count * files.bytes / MIB;
    let mut three = table(
        format!("(j) {JOBS} jobs of Slurm, each reads and rewrites {} MiB, a store of 100 MB/s", mib(&set)),
        &WAYS.map(|(name, _)| name),
    );
    let small = files(300, 16 << 10);
    let mut distant = table(
        format!("(j) the same with {} files of 16 KiB, a store whose calls take 30 ms", small.count),
        &WAYS.map(|(name, _)| name),
    );
    let mut ten = table(
        format!(
            "(j) {ITERATIONS} jobs of Slurm one after the other, each reads the same 2 x {} MiB and writes {} MiB",
            mib(&reused),
            mib(&result)
        ),
        &REUSES.map(|(name, _)| name),
    );
    // Each table is shown as soon as it is complete: they take minutes.
    let repetitions = if sizes.is_quick { 1 } else { 3 };
    show(prolog::measure(disk)?);
    for repetition in 0..repetitions {
        for turn in 0..WAYS.len() {
            three_jobs(&mut three, (turn + repetition) % WAYS.len(), disk, LIMITED, &set)?;
        }
    }
    show(three);
    for repetition in 0..repetitions {
        for turn in 0..WAYS.len() {
            three_jobs(&mut distant, (turn + repetition) % WAYS.len(), disk, DISTANT, &small)?;
        }
    }
    show(distant);
    for repetition in 0..repetitions {
        for turn in 0..REUSES.len() {
            ten_jobs(&mut ten, (turn + repetition) % REUSES.len(), disk, &reused, &result)?;
        }
    }
    show(ten);
    Ok(())
}
