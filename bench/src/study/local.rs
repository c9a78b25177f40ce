//! The parts of the study on one node: a file system on an emulated device, by the page cache that programs have.
//!
//! MPI libraries sync a file when it is closed. So POSIX is compared with them on data that are synced.

use std::path::Path;
use std::process::Command;

use super::device::Device;
use super::finding::{apart, falls, loss, Finding};
use super::kernels::{phases, rate, Phase};
use super::media::{Media, FAST, MEDIA};
use crate::mpi::Mpi;
use crate::report::{median, Table};
use crate::star::Star;

const MIB: u64 = 1 << 20;
const RANKS: u64 = 2;
/// A share of page cache: the paper's gigabyte.
const SHARE_BYTES: u64 = 16 * MIB;
/// The most and the least page cache.
const SHARES: [u64; 2] = [11, 1];
/// Bytes of the file of each program.
const DATA_BYTES: u64 = 8 * SHARE_BYTES;
const DEVICE_BYTES: u64 = 512 * MIB;
/// Memory in which a program runs to learn how much it needs for itself.
const ENOUGH_BYTES: u64 = 1 << 30;
/// Bytes a second that a rank of S3aSim searches, and its queries, fewer where each takes longer. The paper does not name the
/// rate. At the first one the ranks want more than the disk gives; the last one is that of a search that computes.
const SEARCHES: [(&str, u32); 3] = [("64MiB", 5), ("16MiB", 2), ("4MiB", 2)];
/// Rates that differ by less than this part are the same.
const SAME: f64 = 0.10;
/// Losses that differ by less are the same.
const STEP: f64 = 0.03;

/// A kernel with its options, and with those of a run that is as small as possible.
struct Program {
    name: &'static str,
    words: String,
    small: &'static str,
    /// Bytes of the ranks' own memory for their data.
    own_bytes: u64,
    /// The phases that are its I/O.
    is_io: fn(&str) -> bool,
    /// The paper's loss, in percent, on each medium.
    paper: [Option<f64>; 3],
}

fn programs() -> [Program; 3] {
    let particles = DATA_BYTES / RANKS / 38;
    let matrix = 1024 * 1024 * 8;
    let bins = DATA_BYTES / matrix;
    [
        Program {
            name: "hacc-io",
            words: format!("--particles {particles}"),
            small: "--particles 1000",
            own_bytes: DATA_BYTES,
            is_io: |_| true,
            paper: [Some(92.7), Some(84.8), Some(11.5)],
        },
        Program {
            name: "madbench2",
            words: format!("--pixels 1024 --bins {bins} --busy-work 1"),
            small: "--pixels 60 --bins 2 --busy-work 1",
            own_bytes: 3 * matrix,
            is_io: |phase| !phase.ends_with("work"),
            // One medium, which the paper's summary does not name.
            paper: [Some(40.16), None, None],
        },
        Program {
            name: "s3asim",
            words: searches(SEARCHES[0]),
            small: "--queries 1 --fragments 2 --fragment-size 64KiB",
            own_bytes: 16 * MIB,
            // The whole run but for making the database: its searches take most of it.
            is_io: |phase| phase != "database",
            paper: [Some(5.91), None, None],
        },
    ]
}

/// The label of a program's row.
fn label(program: &Program, media: &Media) -> String {
    format!("{}, {}", program.name, media.name)
}

/// S3aSim's options for a rate of its searches.
fn searches((rate, queries): (&str, u32)) -> String {
    format!("--queries {queries} --fragments 8 --fragment-size {} --search-rate {rate}", DATA_BYTES / 8)
}

/// A run of a kernel in the device's file system.
fn command(mpi: &Mpi, built: &Path, ranks: u64, name: &str, words: &str) -> Command {
    let mut command = Command::new(mpi.launcher[0]);
    command.args(&mpi.launcher[1..]).arg(ranks.to_string()).arg(built.join(name)).arg("--json");
    command.args(words.split_whitespace()).arg("file");
    command
}

/// Adds the rates of a program with the most and the least page cache.
fn by_cache(
    table: &mut Table,
    device: &Device,
    program: &Program,
    label: &str,
    run: &dyn Fn(&str) -> Command,
    repetitions: usize,
) -> Result<(), String> {
    let base = device.limited(ENOUGH_BYTES, &run(program.small))?.1 + program.own_bytes;
    for _ in 0..repetitions {
        for shares in SHARES {
            let found = ran(device, base + shares * SHARE_BYTES, &run(&program.words))?;
            let column = usize::from(shares == SHARES[0]);
            table.add(label, column, rate(&found, program.is_io) / 1e6, Vec::new);
        }
    }
    Ok(())
}

fn ran(device: &Device, memory: u64, command: &Command) -> Result<Vec<Phase>, String> {
    device.settle()?;
    phases(&device.limited(memory, command)?.0)
}

/// The tables: page cache, POSIX beside MPI-IO, random beside sequential places. Adds findings.
pub(super) fn measure(
    star: &Star,
    forebay: &Path,
    mpi: &Mpi,
    built: &Path,
    repetitions: usize,
    findings: &mut Vec<Finding>,
) -> Result<Vec<Table>, String> {
    let table = |title: &str, columns: [&str; 2]| Table {
        title: title.to_owned(),
        unit: "MB/s",
        more_is_better: true,
        columns: columns.map(String::from).to_vec(),
        rows: Vec::new(),
    };
    let mut cache = table("study: page cache of 11 shares and of 1, two ranks", ["1 share", "11 shares"]);
    let mut losses = Table {
        title: "study: lost of the rate from 11 shares to 1".into(),
        unit: "%",
        more_is_better: false,
        columns: vec!["here".into(), "paper".into()],
        rows: Vec::new(),
    };
    let mut by_search = table(
        "study: S3aSim on the HDD, by the bytes a second that a rank searches",
        ["1 share", "11 shares"],
    );
    let mut ways = table("study: POSIX beside MPI independent, HACC-IO, one node", ["independent", "POSIX"]);
    let mut places = table("study: 256 KiB at random and at following places", ["random", "sequential"]);
    for media in &MEDIA {
        let device = Device::up(forebay, media.profile, DEVICE_BYTES, &star.directory)?;
        for program in &programs() {
            let run = |words: &str| command(mpi, built, RANKS, program.name, words);
            by_cache(&mut cache, &device, program, &label(program, media), &run, repetitions)?;
        }
        if media.name == MEDIA[0].name {
            for search in SEARCHES {
                let [.., s3asim] = programs();
                let s3asim = Program { words: searches(search), ..s3asim };
                let run = |words: &str| command(mpi, built, RANKS, s3asim.name, words);
                by_cache(&mut by_search, &device, &s3asim, search.0, &run, repetitions)?;
            }
        }
        for _ in 0..repetitions {
            for (column, api) in ["independent", "posix"].into_iter().enumerate() {
                let words = format!("{} --sync --api {api}", programs()[0].words);
                let found = ran(&device, ENOUGH_BYTES, &command(mpi, built, RANKS, "hacc-io", &words))?;
                ways.add(media.name, column, rate(&found, |_| true) / 1e6, Vec::new);
            }
            // One rank: two sequential streams would take turns at one arm.
            let words = "--direct --size 256KiB --count 64 --orders sequential,random";
            let found = ran(&device, ENOUGH_BYTES, &command(mpi, built, 1, "io-modelling", words))?;
            for (column, order) in ["random", "sequential"].into_iter().enumerate() {
                places.add(media.name, column, rate(&found, |name| name.starts_with(order)) / 1e6, Vec::new);
            }
        }
    }
    let [hacc, ..] = &programs();
    let device = Device::up(forebay, FAST.profile, DEVICE_BYTES, &star.directory)?;
    let run = |words: &str| command(mpi, built, RANKS, hacc.name, words);
    by_cache(&mut cache, &device, hacc, &label(hacc, &FAST), &run, repetitions)?;
    let (lost, fast) = add_losses(&cache, &mut losses);
    let searching = SEARCHES.map(|(rate, _)| {
        let [few, many] = rates(&by_search, rate);
        loss(many, few)
    });
    findings.extend(found(&lost, fast, searching, &ways, &places));
    Ok(vec![cache, losses, by_search, ways, places])
}

/// The median rates of a row.
fn rates(table: &Table, label: &str) -> [f64; 2] {
    let row = table.rows.iter().find(|row| row.label == label);
    [0, 1].map(|column| row.and_then(|row| median(&row.samples[column])).unwrap_or(f64::NAN))
}

/// The losses of each program, by medium, and that of the first one on fast NVM.
fn add_losses(cache: &Table, losses: &mut Table) -> ([[f64; 3]; 3], f64) {
    let mut all = [[0.0; 3]; 3];
    for (program, lost) in programs().iter().zip(&mut all) {
        for (at, media) in MEDIA.iter().enumerate() {
            let label = label(program, media);
            let [few, many] = rates(cache, &label);
            lost[at] = loss(many, few);
            losses.add(&label, 0, lost[at] * 100.0, Vec::new);
            if let Some(paper) = program.paper[at] {
                losses.add(&label, 1, paper, Vec::new);
            }
        }
    }
    let label = label(&programs()[0], &FAST);
    let [few, many] = rates(cache, &label);
    let fast = loss(many, few);
    losses.add(&label, 0, fast * 100.0, Vec::new);
    (all, fast)
}

fn percents(of: &[f64]) -> String {
    of.iter().map(|part| format!("{:.1} %", part * 100.0)).collect::<Vec<_>>().join(", ")
}

fn found(lost: &[[f64; 3]; 3], fast: f64, searching: [f64; 3], ways: &Table, places: &Table) -> Vec<Finding> {
    let media = |table: &Table, of: fn(f64, f64) -> f64| {
        MEDIA.each_ref().map(|Media { name, .. }| {
            let [one, other] = rates(table, name);
            of(one, other)
        })
    };
    let [hacc, madbench, _] = lost;
    let differ = media(ways, apart);
    let behind = media(places, |random, sequential| loss(sequential, random));
    vec![
        Finding {
            words:
                "with less page cache, HACC-IO loses most on the HDD, then on the SSD, and little on fast NVM",
            here: format!(
                "{}; NVM as slow as the paper's table has it: {}",
                percents(&[hacc[0], hacc[1], fast]),
                percents(&hacc[2..])
            ),
            is_reproduced: falls(&[hacc[0], hacc[1], fast], STEP),
        },
        Finding {
            words: "with less page cache, MADBench2 loses more than S3aSim, whose searches compute",
            here: format!(
                "on the HDD {}; S3aSim by the bytes a second that a rank searches, {}: {}",
                percents(&madbench[..1]),
                SEARCHES.map(|(rate, _)| rate).join(", "),
                percents(&searching)
            ),
            is_reproduced: searching[1..].iter().all(|lost| madbench[0] > *lost) && madbench[0] > STEP,
        },
        Finding {
            words: "MPI independent I/O is as fast as POSIX on one node",
            here: format!("{} apart; paper 4.87 %", percents(&differ)),
            is_reproduced: differ.iter().all(|part| *part < SAME),
        },
        Finding {
            words: "random places cost much on the HDD, and little on SSD and NVM",
            here: format!("{} behind; paper 38.4 % on the HDD", percents(&behind)),
            is_reproduced: behind[0] > SAME && behind[1..].iter().all(|part| *part < behind[0] / 2.0),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two(rates: [[f64; 2]; 3]) -> Table {
        let mut table = Table {
            title: String::new(),
            unit: "MB/s",
            more_is_better: true,
            columns: vec!["a".into(), "b".into()],
            rows: Vec::new(),
        };
        for (media, pair) in MEDIA.iter().zip(rates) {
            pair.into_iter().enumerate().for_each(|(column, r)| table.add(media.name, column, r, Vec::new));
        }
        table
    }

    #[test]
    fn findings_follow_from_rates() {
        let lost = [[0.9, 0.5, 0.1], [0.4, 0.2, 0.0], [0.1, 0.0, 0.0]];
        let (same, random) = (two([[99.0, 100.0]; 3]), two([[60.0, 100.0], [95.0, 100.0], [100.0, 100.0]]));
        let all = found(&lost, 0.1, [0.8, 0.3, 0.1], &same, &random);
        assert!(all.iter().all(|finding| finding.is_reproduced));
        let slow_searches_lose_more = found(&lost, 0.1, [0.8, 0.5, 0.1], &same, &random);
        assert!(!slow_searches_lose_more[1].is_reproduced);
        let none = [[0.1, 0.5, 0.9], [0.0; 3], [0.1, 0.0, 0.0]];
        let slower = two([[50.0, 100.0], [99.0, 100.0], [99.0, 100.0]]);
        let even = two([[60.0, 100.0]; 3]);
        assert!(!found(&none, 0.9, [0.1; 3], &slower, &even).iter().any(|finding| finding.is_reproduced));
    }

    #[test]
    fn losses_are_from_many_shares_to_few() {
        let mut cache = two([[1.0, 1.0]; 3]);
        cache.rows.clear();
        for program in &programs() {
            for media in &MEDIA {
                let label = label(program, media);
                cache.add(&label, 0, 25.0, Vec::new);
                cache.add(&label, 1, 100.0, Vec::new);
            }
        }
        let label = format!("hacc-io, {}", FAST.name);
        cache.add(&label, 0, 90.0, Vec::new);
        cache.add(&label, 1, 100.0, Vec::new);
        let mut losses = two([[1.0, 1.0]; 3]);
        losses.rows.clear();
        let (all, fast) = add_losses(&cache, &mut losses);
        assert!(all == [[0.75; 3]; 3] && (fast - 0.1).abs() < 1e-9, "{all:?} {fast}");
        assert_eq!(losses.rows.len(), 10);
    }
}
