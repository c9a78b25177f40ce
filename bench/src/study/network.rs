//! The parts of the study over a network: a pool on the storage node, ranks on the compute nodes, on each medium.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::finding::{apart, Finding};
use super::kernels::{phases, rate};
use super::media::MEDIA;
use crate::mpi::Mpi;
use crate::report::{median, Table};
use crate::star::{Ranks, Star, StarPool, COMPUTE};
use crate::systems::said;

const MIB: u64 = 1 << 20;
const KIB: u64 = 1 << 10;
const CAPACITY_BYTES: u64 = 512 * MIB;
/// The transfers of figure 11.
const TRANSFERS: [u64; 5] = [32 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB];
/// Bytes of a rank in a call, unless a transfer is longer.
const CALL_BYTES: u64 = 2 * MIB;
/// The transfer of the shuffle's share, and of more processes.
const SHUFFLED_BYTES: u64 = 256 * KIB;
/// Calls whose shuffle is measured. The driver knows the times of all ranks of all but the last.
const SHUFFLED_CALLS: u64 = 8;
/// HACC-IO's file: opening it takes the MPI library some milliseconds.
const DATA_BYTES: u64 = 64 * MIB;
/// Shares of the shuffle in the paper's table II, in percent.
const SHUFFLE: [f64; 3] = [7.85, 49.93, 50.16];
/// Rates that differ by less than this part are the same.
const SAME: f64 = 0.10;
/// Shares that differ by less are the same.
const STEP: f64 = 0.05;

const WAYS: [&str; 2] = ["collective", "independent"];

/// The programs and nodes of all measurements.
pub(super) struct Place<'a> {
    pub(super) star: &'a Star,
    pub(super) binaries: &'a Path,
    pub(super) mpi: &'a Mpi,
    pub(super) kernels: &'a Path,
    /// bench/points.c.
    pub(super) points: &'a Path,
    pub(super) repetitions: usize,
    pub(super) is_quick: bool,
}

fn size(bytes: u64) -> String {
    if bytes >= MIB {
        format!("{} MiB", bytes / MIB)
    } else {
        format!("{} KiB", bytes / KIB)
    }
}

/// Lines of points.c: interleaved transfers, each with the bytes of a rank in each of so many calls.
fn lines(points: &[(u64, u64)], calls: u64) -> String {
    let line =
        |(number, (run, bytes)): (usize, &(u64, u64))| format!("{number} runs {run} {bytes} 1 {calls}\n");
    points.iter().enumerate().map(line).collect()
}

impl Place<'_> {
    fn points_file(&self, points: &[(u64, u64)], calls: u64) -> Result<PathBuf, String> {
        let file = self.star.directory.join("points");
        std::fs::write(&file, lines(points, calls)).map_err(|e| format!("{}: {e}", file.display()))?;
        Ok(file)
    }

    /// Times of points in both ways: the point, whether it was written, the way's place in `WAYS`, seconds.
    fn timed(
        &self,
        pool: &StarPool<'_>,
        ranks: Ranks,
        points: &[(u64, u64)],
    ) -> Result<Vec<(usize, bool, usize, f64)>, String> {
        let mut command = self.star.launch(self.mpi, ranks);
        command
            .arg(pool.by_driver())
            .arg(self.points)
            .arg("/forebay/points")
            .arg(self.points_file(points, 1)?);
        command.args([WAYS.join(","), self.repetitions.to_string()]);
        let text = said(&mut command)?;
        let sample = |line: &str| {
            let found: Value = serde_json::from_str(line).ok()?;
            let way = WAYS.iter().position(|way| found["way"] == *way)?;
            let point = found["point"].as_u64()? as usize;
            Some((point, found["writes"].as_bool()?, way, found["seconds"].as_f64()?))
        };
        let lines = text.lines().filter(|line| line.starts_with('{'));
        lines.map(|line| sample(line).ok_or(format!("points.c said {line:?}"))).collect()
    }

    /// The share of the shuffle in two-phase calls with an aggregator on each node, as the driver reports it. By itself the
    /// driver has one for a disk, so that more data cross the network.
    fn shuffle(&self, pool: &StarPool<'_>, ranks: Ranks) -> Result<f64, String> {
        let mut command = self.star.launch(self.mpi, ranks);
        command.arg(pool.by_driver()).arg(self.points).arg("/forebay/points");
        command.arg(self.points_file(&[(SHUFFLED_BYTES, CALL_BYTES)], SHUFFLED_CALLS)?).args([
            WAYS[0],
            "1",
            &COMPUTE.to_string(),
        ]);
        let output =
            command.env("FOREBAY_MPI_DEBUG", "1").output().map_err(|e| format!("{command:?}: {e}"))?;
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            return Err(format!("{command:?} failed ({}): {}", output.status, told.trim()));
        }
        share_of(&told).ok_or_else(|| format!("the driver reported no two-phase calls: {told}"))
    }

    /// HACC-IO's rate on all compute nodes: by a script, with these words.
    fn hacc(&self, by: &Path, words: &str) -> Result<f64, String> {
        let ranks = Ranks::Compute { nodes: COMPUTE, each: 1 };
        let particles = (DATA_BYTES / COMPUTE as u64 / 38).to_string();
        let mut command = self.star.launch(self.mpi, ranks);
        command.arg(by).arg(self.kernels.join("hacc-io")).args(["--json", "--particles", &particles]);
        let found = phases(&said(command.args(words.split(' ')))?)?;
        Ok(rate(&found, |_| true) / 1e6)
    }
}

/// The part of two-phase calls that was not spent in the file, from lines such as "8 collective writes were two-phase:
/// predicted 812 us each, measured 901, of which 500 in the file".
fn share_of(told: &str) -> Option<f64> {
    let (mut all, mut file) = (0.0, 0.0);
    for line in told.lines().filter(|line| line.contains("were two-phase:")) {
        let after = |words: &str| line.split_once(words)?.1.split([' ', ',']).next()?.parse::<f64>().ok();
        let before = line.split_once(" collective ")?.0;
        let calls: f64 = before.rsplit(' ').next()?.parse().ok()?;
        all += calls * after("measured ")?;
        file += calls * after("of which ")?;
    }
    (all > 0.0).then(|| 1.0 - file / all)
}

fn table(title: String, unit: &'static str, more_is_better: bool, columns: &[&str]) -> Table {
    let columns = columns.iter().copied().map(String::from).collect();
    Table { title, unit, more_is_better, columns, rows: Vec::new() }
}

/// The median of each row with this start, in a column.
fn medians(table: &Table, start: &str, column: usize) -> Vec<f64> {
    let rows = table.rows.iter().filter(|row| row.label.starts_with(start));
    rows.filter_map(|row| median(&row.samples[column])).collect()
}

/// All tables. Adds findings.
pub(super) fn measure(place: &Place<'_>, findings: &mut Vec<Finding>) -> Result<Vec<Table>, String> {
    let four = Ranks::Compute { nodes: COMPUTE, each: 1 };
    let many = Ranks::Compute { nodes: COMPUTE, each: 4 };
    let mut sweep =
        table("study: collective and independent, 4 nodes, by transfer".into(), "MB/s", true, &WAYS);
    let mut shuffle =
        table("study: the shuffle's share of collective calls".into(), "%", false, &["here", "paper"]);
    let mut posix =
        table("study: HACC-IO over the network".into(), "MB/s", true, &["independent", "POSIX", "driver"]);
    let title = format!("study: 1 and 4 processes a node, transfers of {}", size(SHUFFLED_BYTES));
    let mut each = table(title, "MB/s", true, &["4 a node", "1 a node"]);
    let transfers: Vec<u64> = match place.is_quick {
        true => vec![TRANSFERS[0], TRANSFERS[3]],
        false => TRANSFERS.to_vec(),
    };
    let points: Vec<_> = transfers.iter().map(|run| (*run, CALL_BYTES.max(*run))).collect();
    for (media, paper) in MEDIA.iter().zip(SHUFFLE) {
        let pool = StarPool::up(place.star, place.binaries, media.profile, CAPACITY_BYTES)?;
        let direction = |writes: bool| if writes { "write" } else { "read" };
        for (point, writes, way, seconds) in place.timed(&pool, four, &points)? {
            let (run, bytes) = points[point];
            let label = format!("{}, {}, {}", media.name, direction(writes), size(run));
            sweep.add(&label, way, bytes as f64 * four.count() as f64 / seconds / 1e6, Vec::new);
        }
        for _ in 0..place.repetitions {
            shuffle.add(media.name, 0, place.shuffle(&pool, four)? * 100.0, Vec::new);
            posix.add(
                media.name,
                0,
                place.hacc(&pool.by_mount(), "--sync --api independent hacc")?,
                Vec::new,
            );
            posix.add(media.name, 1, place.hacc(&pool.by_mount(), "--sync --api posix hacc")?, Vec::new);
            posix.add(
                media.name,
                2,
                place.hacc(&pool.by_driver(), "--sync --api independent /forebay/hacc")?,
                Vec::new,
            );
        }
        shuffle.add(media.name, 1, paper, Vec::new);
        // The same bytes in all.
        for (column, ranks, bytes) in [(0, many, CALL_BYTES / 4), (1, four, CALL_BYTES)] {
            for (_, writes, way, seconds) in place.timed(&pool, ranks, &[(SHUFFLED_BYTES, bytes)])? {
                let label = format!("{}, {}, {}", media.name, direction(writes), WAYS[way]);
                each.add(&label, column, bytes as f64 * ranks.count() as f64 / seconds / 1e6, Vec::new);
            }
        }
    }
    sweep.rows.sort_by_key(|row| {
        let of = |text: &str| row.label.contains(text);
        let media = MEDIA.iter().position(|media| of(media.name));
        (
            media,
            of(", read"),
            transfers.iter().position(|run| row.label.ends_with(&format!(", {}", size(*run)))),
        )
    });
    findings.extend(found(&sweep, &shuffle, &posix, &each));
    Ok(vec![sweep, shuffle, posix, each])
}

/// How much faster the collective way is on each medium: the geometric mean over the rows.
fn gains(sweep: &Table) -> [f64; 3] {
    MEDIA.each_ref().map(|media| {
        let start = format!("{}, ", media.name);
        let (together, alone) = (medians(sweep, &start, 0), medians(sweep, &start, 1));
        let logs: Vec<f64> = together.iter().zip(&alone).map(|(c, i)| (c / i).ln()).collect();
        (logs.iter().sum::<f64>() / logs.len().max(1) as f64).exp()
    })
}

fn found(sweep: &Table, shuffle: &Table, posix: &Table, each: &Table) -> Vec<Finding> {
    let of = |table: &Table, column: usize| {
        MEDIA.each_ref().map(|media| medians(table, media.name, column).first().copied().unwrap_or(f64::NAN))
    };
    let list = |numbers: &[f64], unit: &str| {
        numbers.iter().map(|n| format!("{n:.2}{unit}")).collect::<Vec<_>>().join(", ")
    };
    let gain = gains(sweep);
    let share = of(shuffle, 0);
    let (independent, by_posix) = (of(posix, 0), of(posix, 1));
    let differ: Vec<f64> = independent.iter().zip(by_posix).map(|(a, b)| apart(*a, b) * 100.0).collect();
    let more = MEDIA.each_ref().map(|media| {
        let start = format!("{}, ", media.name);
        let ratios =
            medians(each, &start, 0).into_iter().zip(medians(each, &start, 1)).map(|(four, one)| four / one);
        let ratios: Vec<f64> = ratios.collect();
        ratios.iter().sum::<f64>() / ratios.len().max(1) as f64
    });
    vec![
        Finding {
            words: "collective I/O pays on the HDD alone",
            here: format!("collective is {} times as fast as independent", list(&gain, "")),
            is_reproduced: gain[0] > 1.0 && gain[1..].iter().all(|g| *g < gain[0] && *g < 1.0 + SAME),
        },
        Finding {
            words: "the shuffle's share is larger on SSD and NVM than on the HDD",
            here: list(&share, " %"),
            is_reproduced: share[1..].iter().all(|part| *part > share[0] + STEP * 100.0),
        },
        Finding {
            words: "MPI independent I/O is as fast as POSIX over a network",
            here: format!("{} apart; paper 0 %", list(&differ, " %")),
            is_reproduced: differ.iter().all(|part| *part < SAME * 100.0),
        },
        Finding {
            words: "more processes a node do not make the storage node faster",
            here: format!("4 a node are {} times as fast as 1", list(&more, "")),
            is_reproduced: more.iter().all(|ratio| *ratio < 1.0 + SAME),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_is_what_calls_spent_outside_of_the_file() {
        let told = "forebay: /x: 3 collective writes were two-phase: predicted 8 us each, measured 100, of which 40 in the file\n\
            forebay: /x: 1 collective reads were two-phase: predicted 8 us each, measured 100, of which 80 in the file\n\
            forebay: /x: 9 collective reads were independent: predicted 8 us each, measured 1000\n";
        assert!((share_of(told).unwrap() - 0.5).abs() < 1e-9);
        assert_eq!(share_of("forebay: nothing"), None);
    }

    fn filled(columns: usize, rows: &[(&str, &[f64])]) -> Table {
        let names = ["a", "b", "c"];
        let mut table = table(String::new(), "MB/s", true, &names[..columns]);
        for (label, samples) in rows {
            samples.iter().enumerate().for_each(|(column, s)| table.add(label, column, *s, Vec::new));
        }
        table
    }

    #[test]
    fn findings_follow_from_tables() {
        let [hdd, ssd, nvm] = MEDIA.each_ref().map(|media| media.name);
        let rows = |of: [[f64; 2]; 3]| {
            let labels = [hdd, ssd, nvm].map(|name| format!("{name}, write, x"));
            let rows: Vec<(&str, &[f64])> =
                labels.iter().zip(&of).map(|(label, pair)| (label.as_str(), &pair[..])).collect();
            filled(2, &rows)
        };
        let plain = |of: [[f64; 2]; 3]| {
            let rows: Vec<(&str, &[f64])> =
                [hdd, ssd, nvm].into_iter().zip(of.iter().map(|p| &p[..])).collect();
            filled(2, &rows)
        };
        let sweep = rows([[3.0, 1.0], [0.9, 1.0], [0.8, 1.0]]);
        assert!((gains(&sweep)[0] - 3.0).abs() < 1e-9);
        let shuffle = plain([[10.0, 7.85], [50.0, 49.93], [50.0, 50.16]]);
        let posix = plain([[100.0, 99.0]; 3]);
        let each = rows([[1.0, 1.0]; 3]);
        assert!(found(&sweep, &shuffle, &posix, &each).iter().all(|finding| finding.is_reproduced));
        let sweep = rows([[0.5, 1.0], [0.9, 1.0], [3.0, 1.0]]);
        let shuffle = plain([[50.0, 7.85], [50.0, 49.93], [50.0, 50.16]]);
        let posix = plain([[100.0, 50.0]; 3]);
        let each = rows([[4.0, 1.0]; 3]);
        assert!(!found(&sweep, &shuffle, &posix, &each).iter().any(|finding| finding.is_reproduced));
    }

    #[test]
    fn points_are_lines_of_the_program() {
        assert_eq!(
            lines(&[(32768, 2 << 20), (16 << 20, 16 << 20)], 1),
            "0 runs 32768 2097152 1 1\n1 runs 16777216 16777216 1 1\n"
        );
    }
}
