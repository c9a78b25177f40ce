//! `forebay model calibrate`: measures a medium, messages, and this node's processors, and stores the result.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use forebay_model::{Calibration, Document, Value};
use forebay_types::limits::GAP_BYTES_MAX_ELSEWHERE;
use forebay_types::{Code, Error, Result, MODEL_FILE, MODEL_FILE_NEW};
use serde_json::json;

use super::fit::{lines, Line, Sample};
use super::medium::{Medium, Memory};
use super::messages::{by_memory, by_mpi};
use crate::arguments::ModelCalibrate;
use crate::table::Facts;
use crate::{failure, pool};

/// From this share of the processors' time on that others take, the machine counts as busy.
pub(super) const BUSY_PERCENT: i64 = 20;

/// The length of sequential calls.
const CALL_BYTES: usize = 4 << 20;
/// The length of short calls that follow each other, a small part of a stripe.
const NEXT_BYTES: usize = 64 << 10;
/// The length of runs that give the random bandwidth.
const RANDOM_BYTES: usize = 64 << 10;
/// Gaps between runs that are read, more than any read takes with it: a node reads gaps of up to 64 KiB for others.
const READ_GAP_BYTES: usize = 2 * GAP_BYTES_MAX_ELSEWHERE;
/// Threads whose runs show how many overlap.
const QUEUE_MAX: usize = 8;
/// Runs of the first batch, and batches that are measured, at least.
const BATCH_RUNS_FIRST: usize = 4;
const BATCHES_MIN: usize = 5;
/// Bytes of runs that are moved between two readings of the clock.
const BATCH_BYTES: usize = 1 << 20;
/// Runs between two readings of the clock, at most.
const BATCH_RUNS: usize = 256;

/// How much is measured.
struct Effort {
    /// Bytes of the file.
    extent: u64,
    /// Passes over it.
    passes: usize,
    /// Time for the runs of one size.
    for_size: Duration,
    /// Messages of each size.
    messages: usize,
}

const FULL: Effort = Effort { extent: 512 << 20, passes: 3, for_size: Duration::from_secs(3), messages: 401 };
const QUICK: Effort =
    Effort { extent: 64 << 20, passes: 1, for_size: Duration::from_millis(200), messages: 51 };

pub(super) fn calibrate(named: Option<PathBuf>, arguments: &ModelCalibrate) -> Result<ExitCode> {
    let effort = if arguments.quick { &QUICK } else { &FULL };
    let is_pool = arguments.medium.as_os_str() == "pool";
    let dir = if is_pool || arguments.output.is_none() { Some(pool::directory(named)?) } else { None };
    // A pool that is down keeps no calibration.
    let attached = match &dir {
        Some(dir) => Some(pool::attach(dir)?),
        None => None,
    };
    let busy_percent = busy();
    let (medium, place) = match attached {
        Some(pool) if is_pool => (Medium::pool(pool)?, "the pool".to_owned()),
        _ => (Medium::directory(&arguments.medium)?, arguments.medium.display().to_string()),
    };
    let messages = match &arguments.mpi {
        Some(line) => by_mpi(line)?,
        None => by_memory(effort.messages),
    };
    let mut found = Calibration::default();
    measure_medium(&mut found, &medium, effort)?;
    measure_processor(&mut found);
    if messages.between.is_some() {
        let (mut start, mut slope, request) = (found.message_ns, found.message_byte_ps, found.request_ns);
        set(&mut start, &mut slope, messages.between.as_ref());
        found.set_network(start, slope, request);
    }
    set(&mut found.local_message_ns, &mut found.local_message_byte_ps, messages.within.as_ref());
    widen(&mut found, busy_percent);
    found.check()?;
    let document = Document {
        made_s: SystemTime::UNIX_EPOCH.elapsed().map_or(0, |t| t.as_secs() as i64),
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        medium: format!("{place} ({})", medium.words()),
        messages: messages.words,
        busy_percent,
        calibration: found,
    };
    let (path, new) = match (&arguments.output, &dir) {
        (Some(path), _) => {
            let mut new = path.clone().into_os_string();
            new.push(format!(".{}.new", std::process::id()));
            (path.clone(), new.into())
        }
        (None, Some(dir)) => (dir.join(MODEL_FILE), dir.join(MODEL_FILE_NEW)),
        (None, None) => unreachable!("the pool's directory is looked up where no output is named"),
    };
    store(&path, &new, &document.text())?;
    print(&document, &path, arguments.json);
    Ok(ExitCode::SUCCESS)
}

/// Writes the whole document, or none.
fn store(path: &Path, new: &Path, text: &str) -> Result<()> {
    let written = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(new)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .and_then(|()| std::fs::rename(new, path));
    written.map_err(|e| {
        let _ = std::fs::remove_file(new);
        Error::io(format!("cannot store the calibration in {}", path.display()), &e)
    })
}

/// Busy and all ticks of the processors.
fn ticks() -> Option<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    let numbers: Vec<u64> =
        text.lines().next()?.split_whitespace().skip(1).filter_map(|n| n.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal; guests are in user.
    let all: u64 = numbers.iter().take(8).sum();
    let idle = numbers.get(3)? + numbers.get(4)?;
    Some((all - idle, all))
}

/// The share of the processors' time that others take, in percent. 0 if the kernel does not say.
fn busy() -> i64 {
    let before = ticks();
    std::thread::sleep(Duration::from_millis(300));
    let (Some((busy, all)), Some((busy_now, all_now))) = (before, ticks()) else { return 0 };
    let passed = all_now.saturating_sub(all).max(1);
    (busy_now.saturating_sub(busy) * 100 / passed).min(100) as i64
}

/// On a busy machine a time may be shorter, and much longer, than what was measured.
fn widen(found: &mut Calibration, busy_percent: i64) {
    if busy_percent >= BUSY_PERCENT {
        *found = found.widened(1.0 + busy_percent as f64 / 100.0);
    }
}

/// A value from three measurements of it.
fn value([value, low, high]: [f64; 3]) -> Value {
    let number = |n: f64| (n.round() as i64).max(1);
    let value = number(value);
    Value { value, low: number(low.min(high)).min(value), high: number(high.max(low)).max(value) }
}

/// The start and slope of measured lines.
fn set(start: &mut Value, slope: &mut Value, found: Option<&[Line; 3]>) {
    if let Some(lines) = found {
        *start = value(lines.map(|line| line.start));
        *slope = value(lines.map(|line| line.slope * 1000.0));
    }
}

fn measure_medium(found: &mut Calibration, medium: &Medium, effort: &Effort) -> Result<()> {
    let mut memory = Memory::new(CALL_BYTES);
    for writes in [true, false] {
        if !writes {
            medium.settle()?;
        }
        let call = sequential(medium, writes, memory.slice(), effort, CALL_BYTES)?;
        let (run, random) = runs(medium, writes, memory.slice(), effort)?;
        let short = sequential(medium, writes, memory.slice(), effort, NEXT_BYTES)?;
        let stripes = medium.stripes(CALL_BYTES as u64);
        let (rate, next) = match stripes > 1.0 {
            true => {
                let rate = of_bytes(call, run, stripes);
                (rate, next_of(short, rate))
            }
            false => of_calls(call, short),
        };
        if writes {
            (found.write_sequential_byte_ps, found.write_run_ns, found.write_random_byte_ps) =
                (rate, run, random);
            found.write_next_ns = next;
        } else {
            (found.read_sequential_byte_ps, found.read_run_ns, found.read_random_byte_ps) =
                (rate, run, random);
            found.read_next_ns = next;
        }
    }
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    found.processors = processors as i64;
    found.parallel = parallel(medium, processors, effort)?;
    found.queue = queue(medium, effort)?.max(found.parallel);
    Ok(())
}

/// What a byte of a call costs, in picoseconds, besides the run that the call is in each stripe. At least half of the call's
/// time is that of its bytes: where it is not, the runs were slower when they were measured.
fn of_bytes(call: Sample, run: Value, stripes: f64) -> Value {
    let ps = |call: f64, run: i64| (call - stripes * run as f64).max(call / 2.0) * 1000.0 / CALL_BYTES as f64;
    value([ps(call.value, run.value), ps(call.low, run.value), ps(call.high, run.value)])
}

/// What a byte costs, in picoseconds, and what a call costs besides that begins where the one before has ended, from long and
/// short calls that do, in a file with one backing file.
fn of_calls(long: Sample, short: Sample) -> (Value, Value) {
    let bytes = (long.bytes - short.bytes) as f64;
    // A short call is as long as the part of a long one that its bytes are, at least: else it was disturbed less.
    let least = |long_ns: f64| long_ns * short.bytes as f64 / long.bytes as f64;
    let ps = |long_ns: f64, short_ns: f64| {
        (long_ns - short_ns.max(least(long_ns))).max(long_ns / 10.0) * 1000.0 / bytes
    };
    let rate = value([ps(long.value, short.value), ps(long.low, short.low), ps(long.high, short.high)]);
    (rate, next_of(short, rate))
}

/// What a short call costs besides its bytes that begins where the one before has ended.
fn next_of(short: Sample, rate: Value) -> Value {
    let ns = |call: f64, ps: i64| (call - short.bytes as f64 * ps as f64 / 1000.0).max(1.0);
    value([ns(short.value, rate.value), ns(short.low, rate.high), ns(short.high, rate.low)])
}

/// Calls of this length one after the other. Long ones move the whole file, in fresh space if they write; of short ones there
/// are as many as there is time for, and most are in the stripe of the one before.
fn sequential(
    medium: &Medium,
    writes: bool,
    memory: &mut [u8],
    effort: &Effort,
    bytes: usize,
) -> Result<Sample> {
    let (mut times, is_short, began) = (Vec::new(), bytes < CALL_BYTES, Instant::now());
    for _ in 0..if is_short { 1 } else { effort.passes } {
        if writes && !is_short {
            medium.empty()?;
        }
        for at in (0..effort.extent).step_by(bytes) {
            if is_short && began.elapsed() > effort.for_size && !times.is_empty() {
                break;
            }
            let start = Instant::now();
            medium.transfer(writes, &mut memory[..bytes], at)?;
            times.push(start.elapsed().as_nanos() as f64);
        }
    }
    Ok(Sample::of(bytes as u64, &mut times))
}

/// What a run costs besides its bytes, from runs with gaps; and the bandwidth of runs of 64 KiB at random places. Runs that
/// are read have gaps that are not read with them.
fn runs(medium: &Medium, writes: bool, memory: &mut [u8], effort: &Effort) -> Result<(Value, Value)> {
    let mut samples = Vec::new();
    for bytes in [medium.run_bytes_min(), 4 << 10, 16 << 10, RANDOM_BYTES] {
        if !samples.iter().any(|s: &Sample| s.bytes == bytes as u64) {
            samples.push(runs_of(medium, writes, memory, effort, (bytes, false))?);
        }
    }
    let random = runs_of(medium, writes, memory, effort, (RANDOM_BYTES, true))?;
    let ps = |ns: f64| ns * 1000.0 / random.bytes as f64;
    let start = value(lines(&samples).map(|line| line.start));
    Ok((start, value([ps(random.value), ps(random.low), ps(random.high)])))
}

/// The times of runs of one size: in batches that begin anywhere, or each anywhere. A batch is as long as the clock needs,
/// and no longer on a slow medium than leaves time for several.
fn runs_of(
    medium: &Medium,
    writes: bool,
    memory: &mut [u8],
    effort: &Effort,
    (bytes, random): (usize, bool),
) -> Result<Sample> {
    let gap = if writes { bytes } else { bytes.max(READ_GAP_BYTES) };
    let step = (bytes + gap).next_multiple_of(medium.run_bytes_min()) as u64;
    let most = (BATCH_BYTES / bytes).min(BATCH_RUNS);
    let mut count = most.min(BATCH_RUNS_FIRST);
    let mut state = 88_172_645_463_325_252_u64;
    let mut draw = |places: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % places
    };
    let (places, mut times) = (effort.extent / step, Vec::new());
    let began = Instant::now();
    for batch in 0..2000 {
        if batch > BATCHES_MIN && began.elapsed() > effort.for_size {
            break;
        }
        let first = draw(places - count as u64);
        let at = |i: u64| if random { draw(places) } else { first + i };
        let mut offsets: Vec<u64> = (0..count as u64).map(at).map(|place| place * step).collect();
        offsets.sort_unstable();
        offsets.dedup();
        let start = Instant::now();
        medium.runs(writes, memory, &offsets, bytes)?;
        let of_run = start.elapsed().as_nanos() as f64 / offsets.len() as f64;
        if batch == 0 {
            // The first one only says how many runs there is time for.
            let fit = effort.for_size.as_nanos() as f64 / (BATCHES_MIN + 1) as f64 / of_run.max(1.0);
            count = (fit as usize).clamp(most.min(BATCH_RUNS_FIRST), most);
        } else {
            times.push(of_run);
        }
    }
    Ok(Sample::of(bytes as u64, &mut times))
}

/// How many of several processes' short runs are served at the same time, each as fast as those of one alone.
fn queue(medium: &Medium, effort: &Effort) -> Result<i64> {
    let bytes = medium.run_bytes_min();
    let step = 2 * bytes as u64;
    let share = effort.extent / QUEUE_MAX as u64;
    let span = effort.for_size / 4;
    // Runs in a second of so many threads, each in its part of the file.
    let rate = |threads: usize| -> Result<f64> {
        let of_one = |index: u64| -> Result<u64> {
            let mut memory = Memory::new(bytes);
            let (began, mut done) = (Instant::now(), 0);
            while done == 0 || began.elapsed() < span {
                let at = index * share + done % (share / step) * step;
                medium.transfer(true, memory.slice(), at)?;
                done += 1;
            }
            Ok(done)
        };
        let began = Instant::now();
        let done = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..threads as u64).map(|index| scope.spawn(move || of_one(index))).collect();
            let done = threads.into_iter().map(|thread| thread.join().map_err(|_| lost_thread())?);
            done.sum::<Result<u64>>()
        })?;
        Ok(done as f64 / began.elapsed().as_secs_f64().max(1e-9))
    };
    let alone = rate(1)?;
    let gain = rate(QUEUE_MAX)? / alone.max(1e-9);
    Ok((gain.round() as i64).clamp(1, QUEUE_MAX as i64))
}

fn lost_thread() -> Error {
    Error::new(Code::Io, "a thread of the measurement failed")
}

/// How many writers at a time the medium serves at the speed of one: at most the processors.
fn parallel(medium: &Medium, processors: usize, effort: &Effort) -> Result<i64> {
    let share = effort.extent / processors as u64;
    // With many processors in smaller calls.
    let call = share.min(CALL_BYTES as u64) / 4096 * 4096;
    if processors == 1 || call == 0 {
        return Ok(processors as i64);
    }
    let part = share / call * call;
    let write = |index: u64| -> Result<Duration> {
        let mut memory = Memory::new(CALL_BYTES);
        let start = Instant::now();
        for at in (0..part).step_by(call as usize) {
            medium.transfer(true, &mut memory.slice()[..call as usize], index * part + at)?;
        }
        Ok(start.elapsed())
    };
    let alone = write(0)?;
    let slowest = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..processors as u64).map(|index| scope.spawn(move || write(index))).collect();
        let times = threads.into_iter().map(|thread| thread.join().map_err(|_| lost_thread())?);
        times.collect::<Result<Vec<_>>>()
    })?;
    let slowest = slowest.into_iter().max().unwrap_or(alone).as_secs_f64().max(1e-9);
    let gain = processors as f64 * alone.as_secs_f64() / slowest;
    Ok((gain.round() as i64).clamp(1, processors as i64))
}

/// A copied byte, and a run in the lists that ranks exchange: it is appended, sorted by its offset, and its bytes copied.
fn measure_processor(found: &mut Calibration) {
    const PIECES: usize = 16_384;
    const PIECE_BYTES: usize = 16;
    let (from, mut to) = (vec![1u8; CALL_BYTES], vec![0u8; CALL_BYTES]);
    let (mut copies, mut lists) = (Vec::new(), Vec::new());
    for _ in 0..21 {
        let start = Instant::now();
        to.copy_from_slice(&from);
        std::hint::black_box(&mut to);
        copies.push(start.elapsed().as_nanos() as f64 * 1000.0 / CALL_BYTES as f64);
        let start = Instant::now();
        let mut pieces: Vec<(u64, u64)> = Vec::new();
        for rank in 0..4 {
            let own =
                (0..PIECES as u64 / 4).map(|i| ((4 * i + rank) * PIECE_BYTES as u64, PIECE_BYTES as u64));
            pieces.extend(own);
        }
        pieces.sort_unstable();
        for (i, (offset, bytes)) in pieces.iter().enumerate() {
            let at = *offset as usize;
            to[at..at + *bytes as usize].copy_from_slice(&from[i * PIECE_BYTES..][..PIECE_BYTES]);
        }
        std::hint::black_box(&mut to);
        lists.push(start.elapsed().as_nanos() as f64 / PIECES as f64);
    }
    let of = |times: &mut [f64]| {
        let sample = Sample::of(1, times);
        value([sample.value, sample.low, sample.high])
    };
    found.copy_byte_ps = of(&mut copies);
    found.piece_ns = of(&mut lists);
}

fn print(d: &Document, path: &Path, as_json: bool) {
    let values = || Calibration::NAMES.iter().zip(d.calibration.values());
    let c = &d.calibration;
    if as_json {
        let list: serde_json::Map<String, serde_json::Value> = values()
            .map(|(name, v)| ((*name).to_owned(), json!({ "value": v.value, "low": v.low, "high": v.high })))
            .collect();
        return failure::print_json(&json!({
            "file": path.to_string_lossy(), "version": forebay_model::VERSION, "made_s": d.made_s, "host": d.host,
            "medium": d.medium, "messages": d.messages, "busy_percent": d.busy_percent, "values": list,
                "gap_bytes": c.gap_bytes, "parallel": c.parallel, "processors": c.processors, "queue": c.queue,
        }));
    }
    let rate = |v: Value| {
        let mb = |ps: i64| 1e6 / ps.max(1) as f64;
        format!("{:.0} MB/s ({:.0} to {:.0})", mb(v.value), mb(v.high), mb(v.low))
    };
    let us = |v: Value| {
        let us = |ns: i64| ns as f64 / 1e3;
        format!("{:.2} us ({:.2} to {:.2})", us(v.value), us(v.low), us(v.high))
    };
    let mut facts = Facts::default();
    facts.add("medium", d.medium.clone());
    let three = |sequential, random, run| {
        format!("sequential {}, random {}, a run {}", rate(sequential), rate(random), us(run))
    };
    facts.add("writes", three(c.write_sequential_byte_ps, c.write_random_byte_ps, c.write_run_ns));
    facts.add("reads", three(c.read_sequential_byte_ps, c.read_random_byte_ps, c.read_run_ns));
    facts.add("parallel", format!("{} of {} processors at full speed", c.parallel, c.processors));
    facts.add("queue", format!("short runs of {} at the same time", c.queue));
    facts.add("messages", d.messages.clone());
    facts.add("", format!("on a node {}, then {}", us(c.local_message_ns), rate(c.local_message_byte_ps)));
    facts.add("", format!("between nodes {}, then {}", us(c.message_ns), rate(c.message_byte_ps)));
    if d.busy_percent >= BUSY_PERCENT {
        facts.add(
            "note",
            format!("other programs took {} % of the processors: the intervals were widened", d.busy_percent),
        );
    }
    facts.add("stored in", path.display().to_string());
    failure::put(facts.text());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_machine_has_a_wider_interval_around_the_same_values() {
        let quiet = Calibration::default();
        let (mut idle, mut busy) = (quiet, quiet);
        widen(&mut idle, BUSY_PERCENT - 1);
        assert_eq!(idle, quiet);
        widen(&mut busy, 90);
        for (a, b) in quiet.values().into_iter().zip(busy.values()) {
            assert!(b.value == a.value && b.low <= a.low && b.high > a.high, "{a:?} {b:?}");
        }
        // Also where all measurements were equal.
        let mut exact = Calibration { request_ns: Value::exactly(1000), ..quiet };
        widen(&mut exact, 50);
        assert!(exact.request_ns.high > 1000 && exact.request_ns.low < 1000 && exact.check().is_ok());
    }

    #[test]
    fn value_is_within_its_interval_whatever_the_quartiles_are() {
        for three in [[5.0, 7.0, 3.0], [0.0, -4.0, 0.2], [1e9, 1e9, 1e9]] {
            let v = value(three);
            assert!(v.low >= 1 && v.low <= v.value && v.value <= v.high, "{three:?}: {v:?}");
        }
    }
}
