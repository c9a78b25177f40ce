//! Processes and volumes: rates, the share of open and close, and how much runs differ.

use std::ffi::CString;
use std::path::Path;
use std::process::Command;

use super::super::far::rate;
use super::super::hosts::Hosts;
use super::super::library::{File, Volume};
use super::super::raw;
use super::super::volumes::{client, library, table, this, SharedMemory};
use crate::gate::Gate;
use crate::orders::Orders;
use crate::picture::{Grid, Panel};
use crate::report::{median, Table};
use crate::sizes::Sizes;
use crate::systems::{said, Pool};

const CAPACITY_BYTES: u64 = 1 << 30;
/// Bytes of each volume.
const VOLUME_BYTES: usize = 64 << 20;
/// Bytes that all processes together put and get in one pass, whatever the number of volumes.
const BYTES: usize = 64 << 20;
const BLOCK: usize = 256 << 10;
/// Passes of a phase.
const PASSES: usize = 4;
const VOLUMES: [usize; 3] = [1, 2, 4];
const PROCESSES: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const PROCESSES_QUICK: [usize; 4] = [1, 4, 16, 64];
const FAR_PROCESSES: [usize; 4] = [1, 4, 16, 64];
/// Runs whose rates are compared.
const RUNS: usize = 40;
const RUNS_QUICK: usize = 15;
/// Resamplings for an interval.
const RESAMPLINGS: usize = 2000;
const MEMORY: &str = "memcpy";
const FILES: &str = "pool files";
const PAPER: &str = "the paper";

/// The volumes `v0+v1+...` as one.
fn joined(volumes: usize) -> String {
    (0..volumes).map(|i| format!("v{i}")).collect::<Vec<_>>().join("+")
}

fn label(kind: &str, order: &str, processes: usize, volumes: usize) -> String {
    format!("{kind}, {order}, {}", axes(processes, volumes))
}

fn axes(processes: usize, volumes: usize) -> String {
    let counted =
        |count: usize, one: &str, many: &str| format!("{count} {}", if count == 1 { one } else { many });
    format!("{:>12}, {}", counted(processes, "process", "processes"), counted(volumes, "volume", "volumes"))
}

/// On the node of the volumes: the tables of rates, of open and close, and of the differences of runs, and the isolines.
pub(super) fn measure(binaries: &Path, sizes: &Sizes) -> Result<(Vec<Table>, Vec<Panel>), String> {
    let pool = Pool::up(binaries, CAPACITY_BYTES)?;
    for i in 0..VOLUMES[VOLUMES.len() - 1] {
        let (name, bytes) = (format!("v{i}"), VOLUME_BYTES.to_string());
        said(pool.command().args(["volume", "create", &name, "--size", &bytes, "--json"]))?;
    }
    let processes: &[usize] = if sizes.is_quick { &PROCESSES_QUICK } else { &PROCESSES };
    let ask = |processes: usize, volumes: usize, random: bool| {
        let root = joined(volumes);
        let orders = Orders {
            root,
            block: BLOCK,
            processes,
            bytes: BYTES,
            files: volumes,
            random,
            ..Orders::default()
        };
        client(binaries, &orders, "volume-clients", pool.directory(), Command::new(this()?))
    };
    let mut rates = table(
        format!("(a) processes and volumes of this node, calls of {} KiB", BLOCK >> 10),
        "GB/s",
        &["Forebay", MEMORY, FILES],
    );
    let mut shares = table(
        "(b) open and close, share of a run in which all processes put and get 256 MiB each way".into(),
        "% of the time",
        &["Forebay", PAPER],
    );
    for _ in 0..sizes.repetitions {
        for &count in processes {
            for volumes in VOLUMES {
                for (random, order) in [(false, "sequential"), (true, "random")] {
                    let told = ask(count, volumes, random)?;
                    for kind in ["put", "get"] {
                        let label = label(kind, order, count, volumes);
                        for (column, of) in ["", "memory ", "file "].into_iter().enumerate() {
                            rates.add(&label, column, rate(&told, &format!("{of}{kind}"))?, Vec::new);
                        }
                    }
                    if !random {
                        let label = axes(count, volumes);
                        shares.add(&label, 0, rate(&told, "share of open and close")?, Vec::new);
                        shares.add(&label, 1, 10.0, Vec::new);
                    }
                }
            }
        }
    }
    rates.rows.sort_by_key(|row| (row.label.starts_with("get"), row.label.contains("random")));
    let panels = isolines(&rates, processes);
    let differences = differences(sizes, &|| ask(4, 1, false))?;
    Ok((vec![rates, shares, differences], panels))
}

/// The efficiency of volumes and of files for sequential puts and gets.
fn isolines(rates: &Table, processes: &[usize]) -> Vec<Panel> {
    let mut panels = Vec::new();
    for kind in ["put", "get"] {
        for (column, what) in [(0, "volumes"), (2, "files of the pool")] {
            let efficiency = |processes: usize, volumes: usize| {
                let row =
                    rates.rows.iter().find(|row| row.label == label(kind, "sequential", processes, volumes));
                let of = |column: usize| row.and_then(|row| median(&row.samples[column]));
                of(column).zip(of(1)).map_or(f64::NAN, |(ours, memory)| ours / memory)
            };
            let grid = Grid {
                xs: processes.iter().map(|&count| count as f64).collect(),
                ys: VOLUMES.iter().map(|&count| count as f64).collect(),
                values: VOLUMES
                    .iter()
                    .map(|&volumes| processes.iter().map(|&count| efficiency(count, volumes)).collect())
                    .collect(),
            };
            let verb = match (kind, column) {
                ("put", 0) => "puts to",
                ("get", 0) => "gets from",
                ("put", _) => "writes to",
                _ => "reads from",
            };
            panels.push(Panel::Isolines {
                title: format!("{verb} {what}"),
                x_name: "client processes",
                y_name: if column == 0 { "volumes" } else { "files" },
                grid,
                step: 0.25,
            });
        }
    }
    panels
}

/// Standard deviations of the rates of runs, with intervals.
fn differences(sizes: &Sizes, run: &dyn Fn() -> Result<String, String>) -> Result<Table, String> {
    let runs = if sizes.is_quick { RUNS_QUICK } else { RUNS };
    let mut all = table(
        format!("(c) how much {runs} runs differ: standard deviation, and the interval of 95 %"),
        "% of the mean",
        &["Forebay", PAPER, "from", "to", FILES, MEMORY],
    );
    let told = (0..runs).map(|_| run()).collect::<Result<Vec<_>, _>>()?;
    for (kind, of_paper) in [("get", 1.23), ("put", 1.78)] {
        let of = |what: &str| told.iter().map(|text| rate(text, what)).collect::<Result<Vec<_>, _>>();
        let rates = of(kind)?;
        let (from, to) = interval(&rates);
        let columns = [
            deviation(&rates),
            of_paper,
            from,
            to,
            deviation(&of(&format!("file {kind}"))?),
            deviation(&of(&format!("memory {kind}"))?),
        ];
        for (column, value) in columns.into_iter().enumerate() {
            all.add(kind, column, value, Vec::new);
        }
    }
    Ok(all)
}

/// The standard deviation in % of the mean.
fn deviation(rates: &[f64]) -> f64 {
    let mean = rates.iter().sum::<f64>() / rates.len() as f64;
    let squares: f64 = rates.iter().map(|rate| (rate - mean).powi(2)).sum();
    100.0 * (squares / (rates.len() as f64 - 1.0).max(1.0)).sqrt() / mean
}

/// The interval of 95 % of the deviation, by resampling.
fn interval(rates: &[f64]) -> (f64, f64) {
    let mut random = Random(1);
    let mut all: Vec<f64> = (0..RESAMPLINGS)
        .map(|_| {
            let drawn: Vec<f64> = rates.iter().map(|_| rates[random.below(rates.len())]).collect();
            deviation(&drawn)
        })
        .collect();
    all.sort_by(f64::total_cmp);
    (all[RESAMPLINGS * 25 / 1000], all[RESAMPLINGS * 975 / 1000])
}

/// From another node: the sum of the rates of all processes, and the rate of the network provider.
pub(super) fn measure_far(binaries: &Path, sizes: &Sizes) -> Result<Table, String> {
    let (hosts, place) = Hosts::apart(binaries)?;
    hosts.up(2, CAPACITY_BYTES)?;
    for i in 0..VOLUMES[VOLUMES.len() - 1] {
        let mut create = hosts.forebay();
        create.args(["volume", "create", &format!("v{i}"), "--size", &VOLUME_BYTES.to_string()]);
        said(create.args(["--on", "2", "--json", "--pool"]).arg(hosts.pool(1)))?;
    }
    let mut all = table(
        format!(
            "(d) processes of one node and volumes of another, calls of {} KiB, over {place}",
            BLOCK >> 10
        ),
        "GB/s",
        &["Forebay", "provider, one call at a time"],
    );
    for _ in 0..sizes.repetitions {
        for processes in FAR_PROCESSES {
            for volumes in VOLUMES {
                let root = joined(volumes);
                let orders = Orders { root, block: BLOCK, processes, bytes: BYTES, ..Orders::default() };
                let told =
                    client(binaries, &orders, "volume-clients-far", &hosts.pool(1), hosts.on(1, &this()?))?;
                let raw = raw::measure(&hosts, raw::Kind::Memory, BLOCK)?;
                for (kind, transfer) in [("put", "write"), ("get", "read")] {
                    let label = label(kind, "sequential", processes, volumes);
                    all.add(&label, 0, rate(&told, kind)?, Vec::new);
                    all.add(&label, 1, rate(&raw, transfer)?, Vec::new);
                }
            }
        }
    }
    all.rows.sort_by_key(|row| row.label.starts_with("get"));
    hosts.down(2)?;
    Ok(all)
}

/// Numbers by a linear congruential generator.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % end
    }

    /// The numbers below `count` in a random order.
    pub(super) fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for i in (1..count).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

/// What a process calls, place after place.
struct Walk {
    /// Places of this process, in units of a block.
    order: Vec<usize>,
    first: usize,
}

impl Walk {
    fn new(orders: &Orders, process: usize) -> Walk {
        let calls = (orders.bytes / orders.block / orders.processes).max(1);
        let order = match orders.random {
            true => Random(process as u64 + 1).order(calls),
            false => (0..calls).collect(),
        };
        Walk { order, first: process * calls }
    }

    /// Calls at each place, in each pass.
    fn run(&self, call: &mut dyn FnMut(usize) -> Result<(), String>) -> Result<(), String> {
        (0..PASSES).try_for_each(|_| self.pass(call))
    }

    fn pass(&self, call: &mut dyn FnMut(usize) -> Result<(), String>) -> Result<(), String> {
        self.order.iter().try_for_each(|place| call(self.first + place))
    }

    fn calls(&self) -> usize {
        PASSES * self.order.len()
    }
}

fn opened(orders: &Orders) -> CString {
    CString::new(orders.root.as_str()).unwrap_or_default()
}

/// `drive volume-clients`: GB/s of all processes together, and the share of open and close in %.
pub(crate) fn drive(orders: &Orders) -> Result<Vec<(String, f64)>, String> {
    let memory = SharedMemory::new(orders.bytes)?;
    let block = orders.block;
    let seconds = Gate::run(orders.processes, |gate| {
        let library = library()?;
        let walk = Walk::new(orders, gate.process);
        // Not zero: its pages would be one page.
        let mut buffer = vec![1 + gate.process as u8; block];
        let mut volume: Option<Volume<'_>> = None;
        gate.timed(|| {
            volume = Some(library.volume(&opened(orders))?);
            Ok(())
        })?;
        let open = volume.as_ref().ok_or("not open")?;
        // The mappings have their pages before the time begins, as do files and memory below.
        walk.pass(&mut |place| open.put(&buffer, place * block))?;
        gate.timed(|| walk.run(&mut |place| open.put(&buffer, place * block)))?;
        gate.timed(|| walk.run(&mut |place| open.get(&mut buffer, place * block)))?;
        gate.timed(|| {
            drop(volume.take());
            Ok(())
        })?;

        // Block after block goes to the next file, as to the next volume.
        let files = (0..orders.files)
            .map(|i| {
                let path = CString::new(format!("/clients-{i}")).unwrap_or_default();
                library.open(&path, libc::O_CREAT | libc::O_RDWR)
            })
            .collect::<Result<Vec<File<'_>>, _>>()?;
        let of = |place: usize| (&files[place % files.len()], place / files.len() * block);
        walk.pass(&mut |place| {
            let (file, at) = of(place);
            memory.copy_to(place * block, &buffer);
            file.write(&buffer, at)
        })?;
        gate.timed(|| {
            walk.run(&mut |place| {
                let (file, at) = of(place);
                file.write(&buffer, at)
            })
        })?;
        gate.timed(|| {
            walk.run(&mut |place| {
                let (file, at) = of(place);
                file.read(&mut buffer, at)
            })
        })?;
        gate.timed(|| {
            walk.run(&mut |place| {
                memory.copy_to(place * block, &buffer);
                Ok(())
            })
        })?;
        gate.timed(|| {
            walk.run(&mut |place| {
                memory.copy_from(place * block, &mut buffer);
                std::hint::black_box(&buffer);
                Ok(())
            })
        })
    })?;
    let [open, put, get, close, file_put, file_get, memory_put, memory_get] = seconds[..] else {
        return Err(format!("{} phases", seconds.len()));
    };
    let bytes = (Walk::new(orders, 0).calls() * orders.processes * block) as f64;
    let rates = [
        ("put", put),
        ("get", get),
        ("file put", file_put),
        ("file get", file_get),
        ("memory put", memory_put),
        ("memory get", memory_get),
    ];
    let share = 100.0 * (open + close) / (open + put + get + close);
    Ok(rates
        .into_iter()
        .map(|(name, seconds)| (name.to_owned(), bytes / seconds / 1e9))
        .chain([("share of open and close".to_owned(), share)])
        .collect())
}

/// `drive volume-clients-far`: GB/s of all processes together.
pub(crate) fn drive_far(orders: &Orders) -> Result<Vec<(String, f64)>, String> {
    let block = orders.block;
    let seconds = Gate::run(orders.processes, |gate| {
        let library = library()?;
        let volume = library.volume(&opened(orders))?;
        let walk = Walk::new(orders, gate.process);
        let mut buffer = vec![1 + gate.process as u8; block];
        gate.timed(|| walk.run(&mut |place| volume.put(&buffer, place * block)))?;
        gate.timed(|| walk.run(&mut |place| volume.get(&mut buffer, place * block)))
    })?;
    let [put, get] = seconds[..] else { return Err(format!("{} phases", seconds.len())) };
    let bytes = (Walk::new(orders, 0).calls() * orders.processes * block) as f64;
    Ok([("put", put), ("get", get)].map(|(name, seconds)| (name.to_owned(), bytes / seconds / 1e9)).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deviation_is_that_of_a_sample_in_percent_of_the_mean() {
        assert!((deviation(&[9.0, 10.0, 11.0]) - 10.0).abs() < 1e-9);
        assert_eq!(deviation(&[5.0; 4]), 0.0);
        let rates: Vec<f64> = (0..30).map(|i| 100.0 + f64::from(i % 3) - 1.0).collect();
        let (from, to) = interval(&rates);
        let all = deviation(&rates);
        assert!(0.0 < from && from < all && all < to && to < 2.0 * all, "{from} {all} {to}");
    }

    #[test]
    fn processes_walk_through_all_places_once_in_a_pass() {
        for random in [false, true] {
            let orders =
                Orders { processes: 4, bytes: 64 << 10, block: 1 << 10, random, ..Orders::default() };
            let mut places = Vec::new();
            for process in 0..4 {
                let call = &mut |place| {
                    places.push(place);
                    Ok(())
                };
                Walk::new(&orders, process).run(call).unwrap();
            }
            places.sort_unstable();
            places.dedup();
            assert_eq!(places, (0..64).collect::<Vec<_>>());
        }
    }
}
