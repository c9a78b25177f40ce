//! A day in the life of a pool that is smaller than what is written into it, in front of a store of 100 MB/s.
//!
//! A program writes checkpoints without pause, and a log that it keeps open; a second program reads every fourth
//! checkpoint back when eight later ones are written. The bytes written, on the store and in the pool are recorded over
//! time. At the end all data are on the store, and every byte of it is compared. Results: `day.json` and `day.svg`.

use super::attached::Attached;
use super::plot::{svg, Curve};
use super::programs::{check_file, checkpoint, log_line};
use super::slow::{SlowStore, RATE};
use crate::gate::now_ns;
use crate::report::median;
use crate::systems::said;
use serde_json::{json, Value};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// Time between two samples.
const PERIOD: Duration = Duration::from_millis(50);
/// Checkpoints that are whole before the reader reads one.
const LAG: u64 = 8;
/// From this part of the pool on, writers may have to wait for the store.
const FULL: f64 = 0.8;

/// A moment: seconds, bytes in the pool, bytes on the store.
type Sample = (f64, u64, u64);

/// Space that a directory's file system has in use.
fn used(directory: &Path) -> u64 {
    let path = crate::calls::c_path(&directory.to_string_lossy(), ".");
    // SAFETY: all zeros is a valid structure, and the string ends in NUL.
    unsafe {
        let mut space: libc::statvfs = std::mem::zeroed();
        match libc::statvfs(path.as_ptr(), &raw mut space) {
            0 => (space.f_blocks - space.f_bfree) * space.f_frsize,
            _ => 0,
        }
    }
}

/// Bytes of all files of a directory.
fn bytes_in(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).filter(|st| st.is_file()).map(|st| st.len()).sum()
}

/// The spans of a driver's report in seconds since `begun`.
fn spans(report: &Value, key: &str, begun: u64) -> Vec<(f64, f64)> {
    let at = |value: &Value| (value.as_u64().unwrap_or(0).saturating_sub(begun)) as f64 / 1e9;
    let all = report[key].as_array().into_iter().flatten();
    all.map(|span| (at(&span[0]), at(&span[1]))).collect()
}

fn driver(pool: &Attached, words: &[String]) -> Result<Command, String> {
    let this = std::env::current_exe().map_err(|e| format!("this program's path: {e}"))?;
    let mut command = Command::new(this);
    command.arg("drive").args(words);
    Ok(pool.under(command))
}

fn report(command: &mut Command) -> Result<Value, String> {
    let text = said(command)?;
    serde_json::from_str(text.trim()).map_err(|e| format!("the driver said {text:?}: {e}"))
}

/// Runs the day; writes the picture and the numbers to `results`.
pub(crate) fn measure(binaries: &Path, disk: &Path, results: &Path, is_quick: bool) -> Result<(), String> {
    let (count, bytes, capacity) = match is_quick {
        true => (24, 16 * MIB, 192 * MIB),
        false => (60, 64 * MIB, 1024 * MIB),
    };
    let store = SlowStore::new(disk)?;
    let pool = Attached::up(binaries, capacity, &store.at.to_string_lossy(), "close")?;
    let root = pool.path("").to_string_lossy().into_owned();
    let mut words = vec![root, count.to_string(), bytes.to_string()];
    let mut writer = driver(&pool, &[&["day-write".to_owned()], &words[..]].concat())?;
    words.push(LAG.to_string());
    let mut reader = driver(&pool, &[&["day-read".to_owned()], &words[..]].concat())?;
    let begun = now_ns();
    let seconds = || (now_ns() - begun) as f64 / 1e9;
    let is_over = AtomicBool::new(false);
    let (written, read, drained, samples) = std::thread::scope(|scope| {
        let sampler = scope.spawn(|| {
            let mut samples: Vec<Sample> = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                samples.push((seconds(), used(&pool.pool.target()), bytes_in(&store.behind)));
                std::thread::sleep(PERIOD);
            }
            samples
        });
        let reading = scope.spawn(|| report(&mut reader));
        let written = report(&mut writer);
        let read = reading.join().unwrap_or_else(|_| Err("the reader panicked".into()));
        let drained = pool.verb(&["wait-durable", "-r", "/store"]).map(|()| seconds());
        is_over.store(true, Ordering::Relaxed);
        (written, read, drained, sampler.join().unwrap_or_default())
    });
    let (written, read, drained) = (written?, read?, drained?);
    for i in 0..count {
        check_file(&checkpoint(&store.behind, i).1, i, bytes, i + 1)?;
    }
    let log = std::fs::read_to_string(store.behind.join("log")).map_err(|e| format!("the log: {e}"))?;
    if log != (0..count).map(log_line).collect::<String>() {
        return Err("the log on the store is not what was written".into());
    }
    let (written, read) = (spans(&written, "checkpoints", begun), spans(&read, "read", begun));
    conclude(results, &Day { count, bytes, capacity, written, read, drained, samples })
}

struct Day {
    count: u64,
    bytes: u64,
    capacity: u64,
    /// When each checkpoint was written, and when each old one was read.
    written: Vec<(f64, f64)>,
    read: Vec<(f64, f64)>,
    /// When the store had all.
    drained: f64,
    samples: Vec<Sample>,
}

fn conclude(results: &Path, day: &Day) -> Result<(), String> {
    let mb = |bytes: u64| bytes as f64 / 1e6;
    let full = day.samples.iter().find(|sample| sample.1 as f64 >= FULL * day.capacity as f64);
    let full = full.map_or(f64::INFINITY, |sample| sample.0);
    let rate = |span: &(f64, f64)| mb(day.bytes) / (span.1 - span.0).max(1e-9);
    let before: Vec<f64> = day.written.iter().filter(|span| span.1 <= full).map(rate).collect();
    // The rate after that is that of all bytes: a checkpoint waits, and the next finds room.
    let after: Vec<_> = day.written.iter().filter(|span| span.0 > full).collect();
    let after_rate = match (after.first(), after.last()) {
        (Some(first), Some(last)) => mb(day.bytes * after.len() as u64) / (last.1 - first.0),
        _ => 0.0,
    };
    let longest = day.written.iter().map(|span| span.1 - span.0).fold(0.0, f64::max);
    println!(
        "\n(i) a day: {} checkpoints of {} MiB into a pool of {} MiB, a store of {} MB/s, a log open throughout\n\
         until the pool was full ({full:.1} s): {:.0} MB/s each (median of {})\n\
         after that: {after_rate:.0} MB/s ({} checkpoints); the longest checkpoint took {longest:.2} s\n\
         {} old checkpoints read back while that went on; no write failed\n\
         all on the store, byte for byte, after {:.1} s: {:.0} MB/s over all",
        day.count,
        day.bytes / MIB,
        day.capacity / MIB,
        RATE / 1_000_000,
        median(&before).unwrap_or(0.0),
        before.len(),
        after.len(),
        day.read.len(),
        day.drained,
        mb(day.count * day.bytes) / day.drained,
    );
    let mut sum = 0.0;
    let mut written = vec![(0.0, 0.0)];
    for span in &day.written {
        written.push((span.0, sum));
        sum += mb(day.bytes);
        written.push((span.1, sum));
    }
    let curves = [
        Curve { name: "written by the program", color: "#1f77b4", points: written },
        Curve {
            name: "on the store",
            color: "#d62728",
            points: day.samples.iter().map(|sample| (sample.0, mb(sample.2))).collect(),
        },
        Curve {
            name: "in the pool",
            color: "#2ca02c",
            points: day.samples.iter().map(|sample| (sample.0, mb(sample.1))).collect(),
        },
        Curve {
            name: "the pool's capacity",
            color: "#98df8a",
            points: vec![(0.0, mb(day.capacity)), (day.drained, mb(day.capacity))],
        },
    ];
    let title = format!(
        "{} checkpoints of {} MiB into a pool of {} MiB in front of a store of {} MB/s",
        day.count,
        day.bytes / MIB,
        day.capacity / MIB,
        RATE / 1_000_000
    );
    let picture = svg(&title, &curves, ("a second program reads", &day.read));
    let record = json!({
        "checkpoints": day.count,
        "bytes_each": day.bytes,
        "capacity_bytes": day.capacity,
        "store_bytes_per_second": RATE,
        "pool_full_s": full.is_finite().then_some(full),
        "before_full_mb_s": before,
        "after_full_mb_s": after_rate,
        "longest_checkpoint_s": longest,
        "all_on_the_store_s": day.drained,
        "written_s": day.written,
        "read_back_s": day.read,
        "samples": {"columns": ["seconds", "bytes in the pool", "bytes on the store"], "rows": day.samples},
    });
    std::fs::create_dir_all(results).map_err(|e| format!("{}: {e}", results.display()))?;
    for (name, text) in [("day.svg", picture), ("day.json", format!("{record:#}\n"))] {
        let path = results.join(name);
        std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))?;
        println!("{}", path.display());
    }
    Ok(())
}
