//! The time of messages: by a program with MPI, or between two threads that share memory.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;
use std::time::Instant;

use forebay_types::{Code, Error, Result};
use serde_json::Value;

use super::fit::{lines, lines_from_shortest, Line, Sample};

/// Sizes of messages.
const SIZES: [usize; 5] = [8, 4 << 10, 32 << 10, 256 << 10, 1 << 20];

/// What was measured, with the lines through medians and quartiles.
pub(super) struct Messages {
    /// Between nodes, if that was measured.
    pub(super) between: Option<[Line; 3]>,
    /// On one node, if that was measured.
    pub(super) within: Option<[Line; 3]>,
    /// How.
    pub(super) words: String,
}

fn refuse(why: impl std::fmt::Display) -> Error {
    Error::new(Code::Invalid, "cannot measure messages").why(why).cure(
        "the command starts the program ping-pong of kernels/ on two ranks or more, such as \
         \"mpirun -n 2 --map-by node $HOME/kernels/ping-pong\"",
    )
}

/// Runs the command, whose program prints a line of JSON for each pair of ranks and size.
pub(super) fn by_mpi(line: &str) -> Result<Messages> {
    let mut words = line.split_whitespace();
    let program = words.next().ok_or_else(|| refuse("the command is empty"))?;
    let output = Command::new(program).args(words).stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.map_err(|e| refuse(format!("{program} cannot be started: {e}")))?;
    if !output.status.success() {
        return Err(refuse(format!("`{line}` ended with {}", output.status)));
    }
    parse(&String::from_utf8_lossy(&output.stdout), line)
}

fn parse(text: &str, line: &str) -> Result<Messages> {
    let (mut between, mut within) = (Vec::new(), Vec::new());
    for found in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        let number = |name: &str| found[name].as_f64().filter(|n| *n > 0.0);
        let (Some(same), Some(bytes), Some(value), Some(low), Some(high)) = (
            found["same_node"].as_bool(),
            found["bytes"].as_u64(),
            number("ns"),
            number("low_ns"),
            number("high_ns"),
        ) else {
            continue;
        };
        if low <= value && value <= high {
            if same { &mut within } else { &mut between }.push(Sample { bytes, value, low, high });
        }
    }
    if between.len() < 2 && within.len() < 2 {
        return Err(refuse(format!("`{line}` printed no results of ping-pong")));
    }
    let found = |samples: Vec<Sample>| (samples.len() >= 2).then(|| lines_from_shortest(&samples));
    Ok(Messages { between: found(between), within: found(within), words: format!("MPI: {line}") })
}

/// How often a waiting thread looks before it gives its processor to others.
const SPINS: u32 = 2000;

fn wait(turn: &AtomicU64, wanted: u64) {
    let mut spins = 0;
    while turn.load(Ordering::Acquire) != wanted {
        spins += 1;
        if spins % SPINS == 0 {
            std::thread::yield_now();
        }
        std::hint::spin_loop();
    }
}

/// Two threads send a message back and forth, with a copy into shared memory and one out of it, as ranks of one node do.
pub(super) fn by_memory(count: usize) -> Messages {
    let samples: Vec<Sample> = SIZES.iter().map(|&bytes| shared(bytes, count)).collect();
    Messages {
        between: None,
        within: Some(lines(&samples)),
        words: "two threads by shared memory, as no MPI was given; between nodes not measured".to_owned(),
    }
}

fn shared(bytes: usize, count: usize) -> Sample {
    let (turn, segment) = (AtomicU64::new(0), Mutex::new(vec![0u8; bytes]));
    let copy = |own: &mut [u8], out: bool| {
        let mut shared = segment.lock().expect("no thread panics");
        if out {
            own.copy_from_slice(&shared);
        } else {
            shared.copy_from_slice(own);
        }
    };
    let rounds = count as u64 + 2;
    let mut times = Vec::with_capacity(count);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut own = vec![0u8; bytes];
            for round in 0..rounds {
                wait(&turn, 2 * round + 1);
                copy(&mut own, true);
                copy(&mut own, false);
                turn.store(2 * round + 2, Ordering::Release);
            }
        });
        let mut own = vec![1u8; bytes];
        for round in 0..rounds {
            let start = Instant::now();
            copy(&mut own, false);
            turn.store(2 * round + 1, Ordering::Release);
            wait(&turn, 2 * round + 2);
            copy(&mut own, true);
            // The first rounds touch the memory.
            if round >= 2 {
                times.push(start.elapsed().as_nanos() as f64 / 2.0);
            }
        }
    });
    Sample::of(bytes as u64, &mut times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_ping_pong_are_read_by_place_and_other_lines_ignored() {
        let text = "hello\n\
            {\"same_node\": true, \"bytes\": 8, \"ns\": 500, \"low_ns\": 400, \"high_ns\": 600}\n\
            {\"same_node\": true, \"bytes\": 1000008, \"ns\": 100500, \"low_ns\": 90000, \"high_ns\": 200000}\n\
            {\"same_node\": false, \"bytes\": 8, \"ns\": 20000, \"low_ns\": 1, \"high_ns\": 3}\n\
            {\"bytes\": \"x\"}\n";
        let found = parse(text, "mpirun x").unwrap();
        assert!(found.between.is_none(), "one size, and outside its interval");
        let [line, ..] = found.within.unwrap();
        assert!((line.start - 500.0).abs() < 2.0 && (line.slope - 0.1).abs() < 1e-3, "{line:?}");
        assert!(found.words.contains("mpirun x"));
    }

    #[test]
    fn command_without_results_is_refused_with_what_to_write() {
        for line in ["true", "false", "/nowhere/mpirun", ""] {
            let error = by_mpi(line).err().expect("refused").to_string();
            assert!(error.contains("ping-pong"), "{line}: {error}");
        }
    }

    #[test]
    fn messages_by_memory_take_time() {
        let [line, ..] = by_memory(9).within.unwrap();
        assert!(
            line.start + line.slope > 0.0 && line.start.is_finite() && line.slope.is_finite(),
            "{line:?}"
        );
    }
}
