//! Movers, workers, mounts and whole nodes are killed while programs on all nodes change files: at the end pool and store
//! agree. `FOREBAY_KILL_SECONDS=600` goes on so long; `FOREBAY_KILL_SEED=7` chooses what is killed.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::bed::Nodes;
use crate::killing::{kill, kill_below};

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Seconds of the test, unless FOREBAY_KILL_SECONDS says otherwise.
fn seconds() -> u64 {
    number("FOREBAY_KILL_SECONDS", if std::env::var_os("FOREBAY_SOAK").is_some() { 600 } else { 20 })
}

/// A program that changes files and directories, by a number as its seed.
const CHANGES: &str = include_str!("../changes.sh");

/// Writes a long file again and again.
const LONG: &str =
    "until test -e $S/../stop; do head -c 6000000 /dev/urandom > long/f; sleep 0.5; done 2>/dev/null; true";

/// A program: its node, and whether it is a preloaded one, else one of the mount; what it does.
type Program = (usize, bool, &'static str);

const PROGRAMS: [Program; 5] =
    [(1, false, CHANGES), (2, false, CHANGES), (3, false, CHANGES), (1, true, CHANGES), (3, false, LONG)];

fn start(nodes: &Nodes, seed: u64, (node, preload, script): Program) -> Child {
    let inside = if preload { "/forebay/s" } else { "s" };
    let mut command = nodes.command(node, &format!("cd {inside}; set +e\n{script}"), preload);
    command.env("SEED", seed.to_string()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// Kills the programs of a node that `which` chooses, and starts them again after `then`.
fn replace(
    nodes: &Nodes,
    programs: &mut [Child],
    seed: u64,
    which: impl Fn(Program) -> bool,
    then: impl FnOnce(),
) {
    let chosen = || PROGRAMS.into_iter().enumerate().filter(|(_, program)| which(*program));
    for (i, _) in chosen() {
        kill_below(programs[i].id());
        let _ = programs[i].wait();
    }
    then();
    for (i, program) in chosen() {
        programs[i] = start(nodes, seed + i as u64, program);
    }
}

#[test]
fn killed_movers_and_workers_of_any_node_leave_store_and_pool_equal() {
    let Some(nodes) = Nodes::up(3, "128MiB") else { return };
    nodes.attach(2, "", &[]);
    // A file of all nodes, which each of them copies a part of.
    nodes.sh(1, "mkdir s/long");
    nodes.ok(1, &["layout", "set", "-c", "3", "-S", "65536", "/s/long"]);
    let seed = number("FOREBAY_KILL_SEED", 1);
    let start_all = PROGRAMS.into_iter().enumerate();
    let mut programs: Vec<Child> =
        start_all.map(|(i, program)| start(&nodes, seed + i as u64, program)).collect();
    let until = Instant::now() + Duration::from_secs(seconds());
    let mut random = 88_172_645_463_325_252_u64 ^ (seed - 1);
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let mut kills = [0; 4];
    while Instant::now() < until {
        std::thread::sleep(Duration::from_millis(100 + next() % 900));
        let node = 1 + (next() % 3) as usize;
        match next() % 20 {
            // Its supervisor, worker and mover at once, with its mount and its programs.
            0 => {
                kills[3] += 1;
                nodes.kill_node(node);
                replace(
                    &nodes,
                    &mut programs,
                    next() % 30_000,
                    |program| program.0 == node,
                    || {
                        nodes.start(node);
                        assert!(nodes.mount(node));
                    },
                );
            }
            1 | 2 => {
                let Some(mount) = nodes.status(node)["mounts"][0]["pid"].as_u64() else { continue };
                kills[2] += 1;
                kill(mount);
                let is_there = || nodes.at(node).join("s").exists();
                replace(
                    &nodes,
                    &mut programs,
                    next() % 30_000,
                    |program| program.0 == node && !program.1,
                    || {
                        nodes.wait("the mount is back", is_there);
                    },
                );
            }
            3..=6 => kills[1] += usize::from(nodes.kill_now(node, "worker")),
            _ => kills[0] += usize::from(nodes.kill_now(node, "mover")),
        }
    }
    std::fs::write(nodes.store().join("../stop"), "").unwrap();
    for program in &mut programs {
        program.wait().unwrap();
    }
    let [movers, workers, mounts, whole] = kills;
    println!("seed {seed}: killed {movers} movers, {workers} workers, {mounts} mounts, {whole} nodes");
    assert!(movers + workers > 1, "{kills:?}");
    nodes.durable(1);
    assert_eq!(nodes.differences(3), "", "seed {seed}\n{}", nodes.logs());
    let left = nodes.sh(1, "find $S -name '*forebay*'");
    assert_eq!(left, "", "temporaries and conflicts");
    nodes.check();
}
