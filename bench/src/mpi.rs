//! MPI-IO on a shared file: Forebay compared with the same MPI's own I/O on tmpfs and on a tmpfs with huge pages, by
//! bench/mpi.c, and by `ior`, on a file and on a volume, when it is on PATH.
//!
//! Each MPI with a compiler and a launcher on this machine is measured. Mounting a tmpfs with huge pages needs root;
//! without root that column is omitted, and a line says so.

use crate::report::{Table, Target};
use crate::systems::{said, Pool, System};
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: u64 = 1 << 20;
const TMPFS: &str = "tmpfs";
const HUGE: &str = "huge tmpfs";
const WITHOUT: &str = "without";

/// An MPI, with the names of its programs in Debian.
pub(crate) struct Mpi {
    pub(crate) name: &'static str,
    pub(crate) compiler: &'static str,
    pub(crate) launcher: &'static [&'static str],
}

impl Mpi {
    /// True if its compiler and launcher are installed.
    pub(crate) fn is_here(&self) -> bool {
        runs(self.compiler) && runs(self.launcher[0])
    }
}

pub(crate) const MPIS: [Mpi; 2] = [
    Mpi {
        name: "Open MPI",
        compiler: "mpicc.openmpi",
        launcher: &["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n"],
    },
    Mpi { name: "MPICH", compiler: "mpicc.mpich", launcher: &["mpiexec.hydra", "-n"] },
];

/// A tmpfs with huge pages, filled and freed once; dropping it unmounts it.
struct HugeTmpfs(PathBuf);

impl HugeTmpfs {
    fn new(bytes: u64) -> Result<HugeTmpfs, String> {
        let at = std::env::temp_dir().join(format!("forebay-bench-huge-{}", std::process::id()));
        std::fs::create_dir(&at).map_err(|e| format!("{}: {e}", at.display()))?;
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "huge=within_size", "none"]).arg(&at);
        if let Err(message) = said(&mut mount) {
            std::fs::remove_dir(&at).ok();
            return Err(message);
        }
        let huge = HugeTmpfs(at);
        let file = huge.0.join("age");
        let block = vec![1u8; MIB as usize];
        let mut out = std::fs::File::create(&file).map_err(|e| format!("{}: {e}", file.display()))?;
        for _ in 0..bytes / MIB {
            std::io::Write::write_all(&mut out, &block).map_err(|e| format!("{}: {e}", file.display()))?;
        }
        std::fs::remove_file(&file).map_err(|e| format!("{}: {e}", file.display()))?;
        Ok(huge)
    }
}

impl Drop for HugeTmpfs {
    fn drop(&mut self) {
        if let Err(message) = said(Command::new("umount").arg(&self.0)) {
            eprintln!("forebay-bench: {message}");
        }
        std::fs::remove_dir(&self.0).ok();
    }
}

/// The directory of the built programs; dropping it removes them.
pub(crate) struct Built(PathBuf);

impl Built {
    /// A new directory.
    pub(crate) fn new() -> Result<Built, String> {
        let built = Built(std::env::temp_dir().join(format!("forebay-bench-mpi-{}", std::process::id())));
        std::fs::create_dir(&built.0).map_err(|e| format!("{}: {e}", built.0.display()))?;
        Ok(built)
    }

    /// bench/mpi.c, for an MPI.
    pub(crate) fn program(&self, mpi: &Mpi) -> Result<PathBuf, String> {
        let program = self.0.join(mpi.compiler);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("mpi.c");
        said(Command::new(mpi.compiler).args(["-O2", "-o"]).arg(&program).arg(source))?;
        Ok(program)
    }
}

impl Drop for Built {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

fn runs(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// The tables of each installed MPI, each shown when it is done: with more ranks than processors they may take minutes.
pub(crate) fn measure(
    pool: &Pool,
    tmpfs: &Path,
    sizes: &crate::sizes::Sizes,
    show: &mut dyn FnMut(Table),
) -> Result<(), String> {
    let built = Built::new()?;
    let huge = match HugeTmpfs::new(sizes.bytes as u64 * 2) {
        Ok(huge) => Some(huge),
        Err(message) => {
            println!("\n(f) without a tmpfs with huge pages: {message}");
            None
        }
    };
    for mpi in &MPIS {
        if !mpi.is_here() {
            println!("\n(f) {} is left out: no {} or {}", mpi.name, mpi.compiler, mpi.launcher[0]);
            continue;
        }
        let program = built.program(mpi)?;
        for ranks in [2, 4] {
            one(mpi, ranks, &program, pool, tmpfs, huge.as_ref(), sizes)?.into_iter().for_each(&mut *show);
        }
    }
    ior(pool, tmpfs, huge.as_ref(), sizes)?.into_iter().for_each(show);
    Ok(())
}

/// A volume of the pool; dropping it deletes it.
struct Volume<'a>(&'a Pool);

impl Volume<'_> {
    const NAME: &'static str = "bench-ior";

    fn new(pool: &Pool, bytes: u64) -> Result<Volume<'_>, String> {
        let size = format!("{}MiB", bytes.div_ceil(MIB));
        said(pool.command().args(["volume", "create", Self::NAME, "--size", &size]))?;
        Ok(Volume(pool))
    }
}

impl Drop for Volume<'_> {
    fn drop(&mut self) {
        if let Err(message) = said(self.0.command().args(["volume", "delete", Self::NAME])) {
            eprintln!("forebay-bench: {message}");
        }
    }
}

/// Runs `ior`, when it is on PATH, on a file and on a volume of the pool, by the launcher of the MPI that it is linked
/// with.
fn ior(
    pool: &Pool,
    tmpfs: &Path,
    huge: Option<&HugeTmpfs>,
    sizes: &crate::sizes::Sizes,
) -> Result<Vec<Table>, String> {
    let Ok(libraries) = said(Command::new("sh").args(["-c", "ldd \"$(command -v ior)\""])) else {
        println!("\n(f) ior is not on PATH");
        return Ok(Vec::new());
    };
    let family = if libraries.contains("libmpich") { "MPICH" } else { "Open MPI" };
    let Some(mpi) = MPIS.iter().find(|mpi| mpi.name == family && runs(mpi.launcher[0])) else {
        println!("\n(f) ior is left out: there is no launcher of its MPI");
        return Ok(Vec::new());
    };
    let systems = systems(pool, tmpfs, huge)?;
    let mut tables = vec![ior_on(mpi, "a file", &systems[0].root.join("ior"), &systems, sizes)?];
    // HDF5 and PnetCDF write a little more than the data.
    match Volume::new(pool, sizes.bytes as u64 + 64 * MIB) {
        Ok(_volume) => {
            let file = PathBuf::from(format!("forebay:{}", Volume::NAME));
            tables.push(ior_on(mpi, "a volume", &file, &systems, sizes)?);
        }
        Err(message) => println!("\n(f) ior on a volume is left out: {message}"),
    }
    Ok(tables)
}

/// Runs `ior` with MPI-IO and its other built-in interfaces, on Forebay with this file, elsewhere with one of a
/// system's directory.
fn ior_on(
    mpi: &Mpi,
    what: &str,
    file: &Path,
    systems: &[System<'_>],
    sizes: &crate::sizes::Sizes,
) -> Result<Table, String> {
    let columns: Vec<String> = systems.iter().map(|s| s.name.clone()).collect();
    let mut table = Table {
        title: format!("(f) ior on {what}, {}, 2 ranks, means", mpi.name),
        unit: "GB/s",
        more_is_better: true,
        columns: columns.clone(),
        rows: Vec::new(),
    };
    let block = format!("{}", sizes.bytes as u64 / 2 / MIB * MIB);
    let segments = format!("{}", sizes.bytes / 2 / 47008);
    let easy = ["-t", "1m", "-b", &block];
    let hard = ["-t", "47008", "-b", "47008", "-s", &segments];
    for (api, options, collective) in [
        ("MPIIO", &easy[..], false),
        ("MPIIO", &easy[..], true),
        ("MPIIO", &hard[..], false),
        ("MPIIO", &hard[..], true),
        ("HDF5", &easy[..], true),
        ("NCMPI", &easy[..], true),
    ] {
        let kind = if collective { "collective" } else { "independent" };
        let label = format!("{api}, {} bytes a transfer, {kind}", options[1]);
        for column in crate::systems::turns(systems, table.rows.len()) {
            let mut command = systems[column].command(mpi.launcher[0]);
            command.args(&mpi.launcher[1..]).args(["2", "ior", "-a", api, "-w", "-r", "-i"]);
            command.arg(sizes.repetitions.to_string()).args(options).args(collective.then_some("-c"));
            command.arg("-o");
            match systems[column].pool {
                Some(_) => command.arg(file),
                None => command.arg(systems[column].root.join("ior")),
            };
            let text = match said(&mut command) {
                Ok(text) => text,
                Err(_) if api != "MPIIO" => break, // it was built without this interface
                Err(message) => return Err(message),
            };
            let summary = text.rsplit("Summary of all tests").next().unwrap_or_default();
            for line in summary.lines() {
                let words: Vec<&str> = line.split_whitespace().collect();
                // The operation, then the greatest, least and mean rate in MiB/s.
                if let [operation @ ("write" | "read"), _, _, mean, ..] = words[..] {
                    let mean: f64 = mean.parse().map_err(|e| format!("ior said {mean:?}: {e}"))?;
                    let label = format!("{operation} {label}");
                    table.add(&label, column, mean * MIB as f64 / 1e9, || targets(&label, &columns));
                }
            }
        }
    }
    Ok(table)
}

/// The systems to compare, each with a new directory.
fn systems<'a>(pool: &'a Pool, tmpfs: &Path, huge: Option<&HugeTmpfs>) -> Result<Vec<System<'a>>, String> {
    let mut systems = vec![System::in_pool(pool, "Forebay", "mpi")?, System::at(TMPFS, tmpfs)?];
    if let Some(huge) = huge {
        systems.push(System::at(HUGE, &huge.0)?);
    }
    Ok(systems)
}

/// Writes a file and removes it: the host may have reclaimed memory that was not used recently, and returns it slowly.
fn fill_and_free(system: &System<'_>, bytes: u64) -> Result<(), String> {
    let script = "dd if=/dev/zero of=\"$0\" bs=1M count=\"$1\" 2>/dev/null && rm \"$0\"";
    let mut command = system.command("sh");
    command.args(["-c", script]).arg(system.root.join("filled")).arg((bytes / MIB).to_string());
    said(&mut command).map(|_| ())
}

/// Forebay's targets: rates of writes to a shared file, all other rates, and times.
fn targets(label: &str, columns: &[String]) -> Vec<Target> {
    let at_least = if label.starts_with("write") { 1.5 } else { 1.0 };
    columns[1..].iter().map(|against| Target::Ratio { against: against.clone(), at_least }).collect()
}

/// What bench/mpi.c measures on a file, with so many bytes for each rank, perhaps with an environment variable.
pub(crate) fn run(
    system: &System<'_>,
    mpi: &Mpi,
    ranks: usize,
    (program, file, bytes): (&Path, &Path, u64),
    variable: Option<(&str, &str)>,
) -> Result<Vec<(String, f64)>, String> {
    fill_and_free(system, bytes * ranks as u64 * 5 / 4)?;
    let mut command = system.command(mpi.launcher[0]);
    command.args(&mpi.launcher[1..]).arg(ranks.to_string()).arg(program).arg(file).arg(bytes.to_string());
    command.envs(variable);
    let text = said(&mut command)?;
    let map: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(text.trim()).map_err(|e| format!("bench/mpi.c said {text:?}: {e}"))?;
    Ok(map.into_iter().filter_map(|(name, value)| Some((name, value.as_f64()?))).collect())
}

fn one(
    mpi: &Mpi,
    ranks: usize,
    program: &Path,
    pool: &Pool,
    tmpfs: &Path,
    huge: Option<&HugeTmpfs>,
    sizes: &crate::sizes::Sizes,
) -> Result<Vec<Table>, String> {
    let systems = systems(pool, tmpfs, huge)?;
    let columns: Vec<String> = systems.iter().map(|s| s.name.clone()).collect();
    let table = |title: String, unit, more_is_better, columns: &[String]| Table {
        title,
        unit,
        more_is_better,
        columns: columns.to_vec(),
        rows: Vec::new(),
    };
    let bytes = sizes.bytes as u64 / ranks as u64;
    let what = format!("(f) MPI-IO, {}, {ranks} ranks, {} MiB in all", mpi.name, sizes.bytes as u64 / MIB);
    let mut rates = table(what.clone(), "GB/s", true, &columns);
    let mut times = table(format!("{what}: times"), "us", false, &columns);
    let own = [String::from("with the driver"), String::from(WITHOUT)];
    let mut calls = table(
        format!("(f) a call on a file outside the pool, {}, {ranks} ranks", mpi.name),
        "us",
        false,
        &own,
    );
    let run = |system, file: &Path, bytes| run(system, mpi, ranks, (program, file, bytes), None);
    for repetition in 0..sizes.repetitions {
        for column in crate::systems::turns(&systems, repetition) {
            let system = &systems[column];
            for (label, value) in run(system, &system.root.join("shared"), bytes)? {
                match label.strip_prefix("us of ") {
                    Some(label) => times.add(label, column, value, || targets(label, &columns)),
                    None => rates.add(&label, column, value, || targets(&label, &columns)),
                }
            }
        }
        // The same file outside the pool, by the same program with and without the driver.
        for column in [repetition % 2, 1 - repetition % 2] {
            let system = &systems[column];
            let took = run(system, &systems[1].root.join("outside"), MIB)?;
            for (label, value) in took.iter().filter_map(|(l, v)| Some((l.strip_prefix("us of ")?, v))) {
                calls.add(label, column, *value, Vec::new);
            }
        }
    }
    Ok(vec![rates, times, calls])
}
