//! Movers and workers of all nodes are killed while programs on all nodes change files: at the end pool and store agree.

use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::bed::Nodes;

/// Seconds of the test, unless FOREBAY_KILL_SECONDS says otherwise.
fn seconds() -> u64 {
    let default = if std::env::var_os("FOREBAY_SOAK").is_some() { 600 } else { 20 };
    std::env::var("FOREBAY_KILL_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// A program that changes files and directories, by a number as its seed.
const CHANGES: &str = include_str!("../changes.sh");

#[test]
fn killed_movers_and_workers_of_any_node_leave_store_and_pool_equal() {
    let Some(nodes) = Nodes::up(3, "128MiB") else { return };
    nodes.attach(2, "", &[]);
    let start = |seed: usize, node: usize, preload: bool| {
        let inside = if preload { "/forebay/s" } else { "s" };
        let mut command = nodes.command(node, &format!("cd {inside}; set +e\n{CHANGES}"), preload);
        command.env("SEED", seed.to_string()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    // A file of all nodes, which each of them copies a part of.
    nodes.sh(1, "mkdir s/long");
    nodes.ok(1, &["layout", "set", "-c", "3", "-S", "65536", "/s/long"]);
    let long = "until test -e $S/../stop; do head -c 6000000 /dev/urandom > s/long/f; sleep 0.5; done 2>/dev/null; true";
    let mut long = nodes.command(3, &format!("set +e; {long}"), false);
    let long = long.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let mut programs =
        vec![long, start(1, 1, false), start(2, 2, false), start(3, 3, false), start(4, 1, true)];
    let until = Instant::now() + Duration::from_secs(seconds());
    let mut random = 88_172_645_463_325_252_u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let mut kills = 0;
    while Instant::now() < until {
        std::thread::sleep(Duration::from_millis(100 + next() % 900));
        let node = 1 + (next() % 3) as usize;
        kills += usize::from(nodes.kill_now(node, if next() % 4 == 0 { "worker" } else { "mover" }));
    }
    std::fs::write(nodes.store().join("../stop"), "").unwrap();
    for program in &mut programs {
        program.wait().unwrap();
    }
    assert!(kills > 1, "{kills} kills");
    nodes.durable(1);
    assert_eq!(nodes.differences(3), "", "{}", nodes.logs());
    let left = nodes.sh(1, "find $S -name '*forebay*'");
    assert_eq!(left, "", "temporaries and conflicts");
    nodes.check();
}
