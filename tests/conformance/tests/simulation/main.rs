//! Simulates whole nodes in one process from one seed: the code of server and client over a simulated network, a
//! scheduler that chooses the next thread, faults of all kinds, and a model that must explain every reply to a client
//! (docs/decisions/0019).
//!
//! `backing` does the same with movers, in front of a store with faults.
//!
//! Each history runs in a process of its own, because clients' threads and rings last as long as their process.
//! `FOREBAY_SEEDS=2000` runs more of them; `FOREBAY_SEED=17` runs one and prints its trace.

mod backing;
mod baton;
mod checker;
mod client;
mod door;
mod history;
mod locks;
mod model;
mod reach;
mod words;
mod world;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;

use checker::Verdict;
use client::Defect;
use history::{Outcome, Recorder};
use world::{Plot, World};

const PLANTED: &str = "FOREBAY_PLANTED";
/// The beginning of the error for a history that no order of its operations explains. Each planted defect leads to it.
const IMPOSSIBLE: &str = "what clients were told is impossible: ";

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn plot(seed: u64) -> Plot {
    let nodes = 2 + (seed % 3) as u16;
    Plot {
        seed,
        nodes,
        without_target: (nodes > 2 && seed % 4 > 1).then_some(nodes),
        clients_per_node: 1 + (seed % 2) as usize,
        much_data: seed % 4 == 2,
        locks: seed % 4 == 3,
        blocks: seed % 4 == 1,
        words: seed.is_multiple_of(4),
        backing: false,
        turns: number("FOREBAY_TURNS").unwrap_or(6000),
        planted: std::env::var(PLANTED).ok().map(|word| {
            let known = Defect::ALL.iter().find(|(_, name)| *name == word);
            known.unwrap_or_else(|| panic!("no such defect: {word}")).0
        }),
    }
}

/// Judges a history and the final state of all nodes; the error describes the first problem.
fn judge(world: &mut World, recorder: &Recorder) -> Result<(), String> {
    let history = recorder.history();
    let twice = checker::numbers_given_twice(&history);
    if !twice.is_empty() {
        return Err(format!("numbers were given twice: {twice:?}"));
    }
    match checker::judge(&history) {
        Verdict::Sound => {}
        Verdict::Impossible(_, why) => return Err(format!("{IMPOSSIBLE}{why}")),
        Verdict::Tangled(index) => return Err(format!("too much is in doubt at #{index} to judge")),
    }
    drop(history);
    if let Some(words) = &world.words {
        let (calls, unknown) = words.judge()?;
        recorder.tell(format!("{calls} atomic operations, {unknown} of them in doubt"));
    }
    for (i, report) in world.check_nodes().iter().enumerate() {
        if report["clean"] != true {
            return Err(format!("node {} is damaged: {report}", i + 1));
        }
    }
    let there = recorder.history().found_in_the_end();
    let leaked: Vec<_> =
        world.foreign_backing_files().into_iter().filter(|(_, ino)| !there.contains(ino)).collect();
    if !leaked.is_empty() {
        return Err(format!("backing files of other nodes' inodes, by node, that nobody has: {leaked:?}"));
    }
    let (kept, live) = world.sessions();
    let dead: BTreeSet<_> = kept.difference(&live).collect();
    if !dead.is_empty() {
        return Err(format!("replies of processes that are gone are kept: {dead:x?}"));
    }
    Ok(())
}

/// The directory for the targets of a history: in memory if there is a tmpfs.
fn place(process: u32, seed: u64) -> PathBuf {
    let shared = Path::new("/dev/shm");
    let parent = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
    parent.join(format!("forebay-simulation-{process}-{seed}"))
}

/// Runs one history in this process. The last line of the output summarizes it.
fn tell(seed: u64) {
    baton::take_over();
    let recorder = Recorder::new(std::env::var("FOREBAY_QUIET").is_err());
    let mut world = World::new(plot(seed), place(std::process::id(), seed), recorder.clone());
    world.run();
    world.heal();
    let judged = judge(&mut world, &recorder);
    let history = recorder.history();
    let failed = |e: &&history::Entry| e.outcome.as_ref().is_none_or(Outcome::is_doubtful);
    println!(
        "history {:016x}: {} operations, {} in doubt, {} messages, {:.1} s",
        history.hash() ^ world.network.events(),
        history.entries.len(),
        history.entries.iter().filter(failed).count(),
        world.network.events(),
        world.network.now().as_secs_f64(),
    );
    if let Err(why) = judged {
        panic!("{why}");
    }
}

/// The test that runs histories of pools, and the one for pools in front of a store.
const POOLS: &str = "whole_pools_keep_their_promises_in_every_history";
const FRONTS: &str = "pools_in_front_of_a_store_keep_their_promises_in_every_history";

/// Runs one history of a pool in front of a store in this process.
fn tell_of_front(seed: u64) {
    baton::take_over();
    if std::env::var_os("FOREBAY_LOG").is_some() {
        forebay_log::to_stderr();
    }
    let recorder = Recorder::new(std::env::var("FOREBAY_QUIET").is_err());
    let nodes = 1 + (seed % 3) as u16;
    let plot = Plot {
        nodes,
        without_target: None,
        clients_per_node: if nodes == 1 { 3 } else { 2 },
        much_data: false,
        locks: false,
        blocks: false,
        words: false,
        backing: true,
        planted: None,
        ..plot(seed)
    };
    let mut world = World::new(plot, place(std::process::id(), seed), recorder);
    world.run();
    let mut front = world.front.take().expect("a store");
    let judged = backing::heal(&mut world, &mut front);
    let (calls, faults) = front.weather.counts();
    let ledger = front.shared.lock();
    println!(
        "history {:016x}: {} operations, {} failed, {calls} calls, {faults} faults, {} messages, {:.1} s",
        ledger.hash ^ world.network.events(),
        ledger.operations,
        ledger.failed,
        world.network.events(),
        world.network.now().as_secs_f64(),
    );
    if let Err(why) = judged {
        panic!("{why}");
    }
}

/// Runs one history in a process of its own.
fn run_of(test: &str, seed: u64, planted: Option<&str>) -> Output {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command
        .args(["--exact", test, "--nocapture"])
        .env("FOREBAY_SEED", seed.to_string())
        .env("FOREBAY_QUIET", "1");
    if let Some(planted) = planted {
        command.env(PLANTED, planted);
    }
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("this program runs");
    let process = child.id();
    let output = child.wait_with_output().expect("it ends");
    // A process that was killed has left its targets.
    let _ = std::fs::remove_dir_all(place(process, seed));
    output
}

/// The line that summarizes a history.
fn summary(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().find(|line| line.starts_with("history ")).unwrap_or_default().to_owned()
}

/// Runs histories, as many at a time as there are processors, until `enough` returns true for one.
fn run_all(test: &str, seeds: u64, planted: Option<&str>, enough: impl Fn(u64, &Output) -> bool + Sync) {
    let next = AtomicU64::new(1);
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed > seeds {
                    return;
                }
                if enough(seed, &run_of(test, seed, planted)) {
                    next.store(seeds + 1, Ordering::Relaxed);
                }
            });
        }
    });
}

/// Runs histories, none of which may fail.
fn assert_kept(test: &str, seeds: u64) {
    let (failures, summaries) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    run_all(test, seeds, None, |seed, output| {
        if output.status.success() {
            summaries.lock().unwrap().push(summary(output));
        } else {
            let text = [&output.stdout[..], &output.stderr[..]].concat();
            failures.lock().unwrap().push((seed, String::from_utf8_lossy(&text).into_owned()));
        }
        false
    });
    let failures = failures.into_inner().unwrap();
    for (seed, text) in &failures {
        println!(
            "--- FOREBAY_SEED={seed} cargo test -p forebay-conformance --test simulation {test}\n{text}"
        );
    }
    let failed: BTreeSet<u64> = failures.iter().map(|(seed, _)| *seed).collect();
    assert!(failed.is_empty(), "{} of {seeds} histories failed: {failed:?}", failed.len());
    let sum = |word: &str| -> u64 {
        let before = |line: &String| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words.windows(2).find(|w| w[1].starts_with(word)).and_then(|w| w[0].parse::<u64>().ok())
        };
        summaries.lock().unwrap().iter().filter_map(before).sum()
    };
    let (operations, messages) = (sum("operations"), sum("messages"));
    println!("{seeds} histories, {operations} operations, {messages} messages");
    assert!(operations > seeds * 20 && messages > seeds * 100, "histories too quiet to mean anything");
}

#[test]
fn whole_pools_keep_their_promises_in_every_history() {
    if let Some(seed) = number("FOREBAY_SEED") {
        return tell(seed);
    }
    assert_kept(POOLS, number("FOREBAY_SEEDS").unwrap_or(200));
}

#[test]
fn pools_in_front_of_a_store_keep_their_promises_in_every_history() {
    if let Some(seed) = number("FOREBAY_SEED") {
        return tell_of_front(seed);
    }
    // Each takes about as long as eight of the others.
    assert_kept(FRONTS, number("FOREBAY_SEEDS").map_or(8, |seeds| (seeds / 8).max(8)));
}

#[test]
fn one_seed_gives_one_history() {
    for (test, seed) in [(POOLS, 3), (POOLS, 5), (POOLS, 44), (POOLS, 127), (FRONTS, 1), (FRONTS, 2)] {
        let run = |seed| summary(&run_of(test, seed, None));
        let (first, second) = (run(seed), run(seed));
        assert!(!first.is_empty() && first == second, "seed {seed}: {first}, then {second}");
        assert_ne!(first, run(seed + 300), "another seed is another history");
    }
}

/// Each planted defect must show within this number of histories. The rarest shows in one of some hundreds.
const CANARY_HISTORIES: u64 = 1500;

/// Canary tests of the model: each planted defect shows in at least one history.
#[test]
fn planted_defects_are_caught() {
    for (defect, name) in Defect::ALL {
        let caught = Mutex::new(None);
        run_all(POOLS, CANARY_HISTORIES, Some(name), |seed, output| {
            // Any other failure, such as a history that is too tangled, proves nothing about the checker.
            let words = String::from_utf8_lossy(&output.stderr);
            let is_caught = !output.status.success() && words.contains(IMPOSSIBLE);
            if is_caught {
                *caught.lock().unwrap() = Some(seed);
            }
            is_caught
        });
        let caught = caught.into_inner().unwrap();
        println!("{defect:?} is caught by seed {caught:?}");
        assert!(caught.is_some(), "{CANARY_HISTORIES} histories did not show it: {defect:?}");
    }
}
