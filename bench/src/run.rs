//! The sequence of a run: set up and age the systems, measure section by section, print tables, write the results file.

use crate::orders::Orders;
use crate::report::{Table, Target};
use crate::sizes::Sizes;
use crate::systems::{turns, Pool, System};
use crate::{
    backing, choice, cost, data, jobs, machine, media, meta, model, mount, mpi, nodes, stage, study, tools,
};
use std::path::PathBuf;

const MIB: usize = 1 << 20;
/// The disk gets one file in this many.
const DISK_PART: usize = 5;

pub(crate) fn main(arguments: &[String]) -> Result<(), String> {
    let (mut binaries, mut results, mut disk) = (None, None, std::env::temp_dir());
    let (mut quick, mut sections) = (false, Vec::new());
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let mut value = || rest.next().map(PathBuf::from).ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--binaries" => binaries = Some(value()?),
            "--results" => results = Some(value()?),
            "--disk" => disk = value()?,
            "--quick" => quick = true,
            "meta" | "data" | "stage" | "cost" | "mount" | "mpi" | "choice" | "nodes" | "far" | "ranks" | "volumes" | "sweeps" | "backing" | "jobs"
            | "media" | "model" | "study" | "day" | "tools" => {
                sections.push(argument.as_str());
            }
            part if backing::PARTS.contains(&part) => sections.push(part),
            other => {
                return Err(format!(
                    "there is no section or option {other}; the sections are meta, data, stage, cost, mount, mpi, choice, nodes, far, ranks, volumes, sweeps, backing ({}), jobs, media, model, study, day, tools",
                    backing::PARTS.join(", ")
                ))
            }
        }
    }
    let binaries = binaries.ok_or("--binaries DIR is needed")?;
    // Some programs are started in other directories.
    let binaries = std::fs::canonicalize(&binaries).map_err(|e| format!("{}: {e}", binaries.display()))?;
    let results = results.ok_or("--results DIR is needed")?;
    if sections.is_empty() {
        sections = vec!["meta", "data", "stage", "cost", "mount", "mpi", "choice", "nodes"];
    }
    if !sections.contains(&"tools") && tools::there() {
        sections.push("tools");
    }
    let sizes = Sizes::new(quick)?;
    let machine = machine::describe(&disk);
    println!("machine: {machine}");
    println!(
        "{} repetitions; a pool of {} GiB in memory; (a) and (b) sync nothing, so the disk's numbers are its page cache's",
        sizes.repetitions,
        sizes.capacity_bytes >> 30
    );

    let pool = Pool::up(&binaries, sizes.capacity_bytes)?;
    let systems = System::all(&pool, &disk)?;
    let needs_no_age = |section: &str| {
        let own = [
            "cost", "choice", "nodes", "far", "ranks", "volumes", "sweeps", "backing", "jobs", "media",
            "model", "study", "day",
        ];
        own.contains(&section) || backing::PARTS.contains(&section)
    };
    if sections.iter().any(|section| !needs_no_age(section)) {
        age(&systems, &sizes)?;
    }
    let mut tables = Vec::new();
    let mut missed = 0;
    let mut show = |table: Table, tables: &mut Vec<Table>| {
        print!("{}", table.text(&mut missed));
        tables.push(table);
    };
    for section in sections {
        match section {
            "meta" => show(metadata(&systems, &sizes)?, &mut tables),
            "data" => show(throughput(&systems, &sizes)?, &mut tables),
            "stage" => {
                stage::measure(&pool, &disk, &sizes)?.into_iter().for_each(|table| show(table, &mut tables))
            }
            "cost" => cost::measure(&systems, sizes.repetitions)?
                .into_iter()
                .for_each(|table| show(table, &mut tables)),
            "mount" => mount::measure(&pool, &systems[1].root, &sizes)?
                .into_iter()
                .for_each(|table| show(table, &mut tables)),
            "mpi" => {
                mpi::measure(&pool, &systems[1].root, &sizes, &mut |table| show(table, &mut tables))?;
            }
            "choice" => choice::measure(&binaries, &sizes, &mut |table| show(table, &mut tables))?,
            "nodes" => {
                nodes::measure(&binaries, &sizes)?.into_iter().for_each(|table| show(table, &mut tables))
            }
            "far" => {
                nodes::measure_far(&binaries, &sizes)?.into_iter().for_each(|table| show(table, &mut tables));
            }
            "ranks" => {
                nodes::measure_ranks(&binaries, &sizes)?
                    .into_iter()
                    .for_each(|table| show(table, &mut tables));
            }
            "volumes" => {
                nodes::measure_volumes(&binaries, &sizes)?
                    .into_iter()
                    .for_each(|table| show(table, &mut tables));
            }
            "sweeps" => {
                nodes::measure_sweeps(&binaries, &results, &sizes, &mut |table| show(table, &mut tables))?;
            }
            "backing" => {
                backing::measure(&binaries, &disk, &sizes, None, &mut |table| show(table, &mut tables))?;
            }
            part if backing::PARTS.contains(&part) => {
                backing::measure(&binaries, &disk, &sizes, Some(part), &mut |table| {
                    show(table, &mut tables)
                })?;
            }
            "media" => {
                media::measure(&binaries, &sizes)?.into_iter().for_each(|table| show(table, &mut tables))
            }
            "model" => model::measure(&binaries, &sizes, &mut |table| show(table, &mut tables))?,
            "study" => study::measure(&binaries, &sizes, &mut |table| show(table, &mut tables))?,
            "jobs" => jobs::measure(&binaries, &disk, &sizes, &mut |table| show(table, &mut tables))?,
            "day" => backing::day(&binaries, &disk, &results, sizes.is_quick)?,
            _ => tools::measure(&systems)?,
        }
    }
    println!("\n{missed} targets missed");
    let record = serde_json::json!({
        "machine": machine,
        "quick": quick,
        "tables": tables.iter().map(Table::json).collect::<Vec<_>>(),
    });
    std::fs::create_dir_all(&results).map_err(|e| format!("{}: {e}", results.display()))?;
    let path = results.join(format!("bench-{}.json", machine["time"]));
    std::fs::write(&path, format!("{record:#}\n")).map_err(|e| format!("{}: {e}", path.display()))?;
    println!("all samples: {}", path.display());
    Ok(())
}

/// Fills every system once and frees it; on the disk only as much as is used later.
fn age(systems: &[System<'_>], sizes: &Sizes) -> Result<(), String> {
    for system in systems {
        let bytes = if system.is_disk { sizes.bytes } else { sizes.capacity_bytes as usize / 10 * 9 };
        system.drive("age", &Orders { files: 5 * files_on(system, sizes), bytes, ..Orders::default() })?;
    }
    Ok(())
}

/// Files of each process on a system. A disk gets fewer, as it may create only a thousand files a second; the
/// comparison is of rates.
fn files_on(system: &System<'_>, sizes: &Sizes) -> usize {
    if system.is_disk {
        sizes.files / DISK_PART
    } else {
        sizes.files
    }
}

fn columns(systems: &[System<'_>]) -> Vec<String> {
    systems.iter().map(|s| s.name.clone()).collect()
}

fn against_tmpfs(at_least: Option<f64>) -> Vec<Target> {
    at_least.map(|at_least| Target::Ratio { against: "tmpfs".into(), at_least }).into_iter().collect()
}

fn metadata(systems: &[System<'_>], sizes: &Sizes) -> Result<Table, String> {
    let mut table = Table {
        title: format!(
            "(a) metadata, {} files a process ({} on the disk)",
            sizes.files,
            sizes.files / DISK_PART
        ),
        unit: "operations/s",
        more_is_better: true,
        columns: columns(systems),
        rows: Vec::new(),
    };
    for repetition in 0..sizes.repetitions {
        for (processes, shared) in [(1, true), (2, true), (2, false), (4, true), (4, false)] {
            for column in turns(systems, repetition) {
                let files = files_on(&systems[column], sizes);
                let orders = Orders { processes, shared, files, ..Orders::default() };
                let rates = systems[column].drive("meta", &orders)?;
                for phase in meta::PHASES {
                    let Some((_, rate)) = rates.iter().find(|(name, _)| name == phase) else { continue };
                    let place = match (processes, shared) {
                        (1, _) => "",
                        (_, true) => ", one directory",
                        (_, false) => ", one each",
                    };
                    let label = format!("{phase}: {processes}{place}");
                    table.add(&label, column, *rate, || against_tmpfs(metadata_target(phase, processes)));
                }
            }
        }
    }
    table.rows.sort_by_key(|row| meta::PHASES.iter().position(|p| row.label.starts_with(&format!("{p}:"))));
    Ok(table)
}

/// Target of a metadata rate, relative to tmpfs.
fn metadata_target(phase: &str, processes: usize) -> Option<f64> {
    match (phase, processes) {
        ("create", 1) => Some(0.40),
        ("create", 2) => Some(0.28),
        ("unlink", 1) => Some(0.35),
        ("unlink", 2) => Some(0.25),
        ("stat, file with data", 1 | 2) => Some(0.6),
        ("stat, directory" | "stat, absent name", 1 | 2) => Some(2.0),
        _ => None,
    }
}

fn throughput(systems: &[System<'_>], sizes: &Sizes) -> Result<Table, String> {
    let mut table = Table {
        title: format!("(b) data, {} MiB in all", sizes.bytes / MIB),
        unit: "GB/s",
        more_is_better: true,
        columns: columns(systems),
        rows: Vec::new(),
    };
    for repetition in 0..sizes.repetitions {
        for block in [4096, 128 << 10, MIB] {
            for random in [false, true] {
                for (processes, shared) in [(1, true), (2, true), (2, false)] {
                    for column in turns(systems, repetition) {
                        let bytes = sizes.bytes;
                        let orders = Orders { processes, shared, bytes, block, random, ..Orders::default() };
                        let rates = systems[column].drive("data", &orders)?;
                        for phase in data::PHASES {
                            let Some((_, rate)) = rates.iter().find(|(name, _)| name == phase) else {
                                continue;
                            };
                            let place = match (processes, shared) {
                                (1, _) => "1 process",
                                (_, true) => "2, one file",
                                (_, false) => "2, one each",
                            };
                            let order = if random { "random" } else { "sequential" };
                            let label = format!("{phase}, {:>4} KiB {order}: {place}", block >> 10);
                            let target =
                                (block == MIB).then_some(if phase == "first write" { 1.8 } else { 0.95 });
                            table.add(&label, column, *rate, || against_tmpfs(target));
                        }
                    }
                }
            }
        }
    }
    table.rows.sort_by_key(|row| data::PHASES.iter().position(|p| row.label.starts_with(&format!("{p},"))));
    Ok(table)
}
