//! Random operations on files in the pool, compared with a model: some 100,000 of them, or FOREBAY_EXERCISE_OPERATIONS.
//! The test prints its seed, and FOREBAY_EXERCISE_SEED repeats it.

mod support;

use std::path::Path;
use std::process::Command;
use support::{compile, succeeds, Pool, Scratch};

/// Processes that work at the same time, each on its own files.
const PROCESSES: u64 = 2;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

fn seed() -> u64 {
    let clock = || std::time::UNIX_EPOCH.elapsed().map_or(1, |now| now.subsec_nanos().into());
    let seed = number("FOREBAY_EXERCISE_SEED").unwrap_or_else(clock);
    println!("FOREBAY_EXERCISE_SEED={seed}");
    seed
}

/// Runs the program in `root`, in several processes.
fn exercise(command: impl Fn() -> Command + Sync, root: &Path, make: impl Fn(&Path), operations: u64) {
    let seed = seed();
    let directory = |process: u64| root.join(process.to_string());
    (0..PROCESSES).for_each(|process| make(&directory(process)));
    std::thread::scope(|scope| {
        for process in 0..PROCESSES {
            let mut command = command();
            command.arg(directory(process)).arg((seed + process).to_string());
            command.arg((operations / PROCESSES).to_string());
            scope.spawn(move || succeeds(&mut command));
        }
    });
}

#[test]
fn files_in_the_pool_hold_what_was_written_last() {
    let (pool, scratch) = (Pool::start(), Scratch::new());
    let program = compile("exerciser", scratch.path());
    let operations = number("FOREBAY_EXERCISE_OPERATIONS").unwrap_or(100_000);
    let make = |directory: &Path| {
        succeeds(pool.command("mkdir").arg(directory));
    };
    exercise(|| pool.command(&program), Path::new("/forebay"), make, operations);
    assert_eq!(succeeds(pool.command("find").args(["/forebay", "-type", "f"])), "");
}

#[test]
fn files_of_a_plain_file_system_hold_what_was_written_last() {
    let scratch = Scratch::new();
    let program = compile("exerciser", scratch.path());
    exercise(|| Command::new(&program), scratch.path(), |path| std::fs::create_dir(path).unwrap(), 10_000);
}
