//! Movers and workers of all nodes are killed while programs on all nodes change files: at the end pool and store agree.

use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::bed::Nodes;

/// Seconds of the test, unless FOREBAY_KILL_SECONDS says otherwise.
fn seconds() -> u64 {
    let default = if std::env::var_os("FOREBAY_SOAK").is_some() { 600 } else { 20 };
    std::env::var("FOREBAY_KILL_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// A program that creates, rewrites, renames, links and removes files and directories, by a number as its seed.
const CHANGES: &str = r#"
set +e; RANDOM=$SEED; until test -e $S/../stop; do
  d=d$((RANDOM % 4)); e=d$((RANDOM % 4)); f=f$((RANDOM % 6)); g=f$((RANDOM % 6))
  case $((RANDOM % 12)) in
    0|1|2) mkdir -p $d; head -c $((RANDOM * 3)) /dev/urandom > $d/$f;;
    3) test -f $d/$f && printf x >> $d/$f;;
    4) mv -f $d/$f $e/$g 2>/dev/null;;
    5) rm -f $d/$f;;
    6) mv -T $d $e 2>/dev/null || mv -T $d m$RANDOM 2>/dev/null;;
    7) ln $d/$f $e/$g 2>/dev/null;;
    8) rm -rf m* 2>/dev/null;;
    9) test -e $d/$f && chmod $((RANDOM % 2 ? 600 : 644)) $d/$f;;
    10) ln -sfn $f $d/l 2>/dev/null;;
    11) test -f $d/$f && cat $d/$f >/dev/null;;
  esac; done 2>/dev/null; true"#;

#[test]
fn killed_movers_and_workers_of_any_node_leave_store_and_pool_equal() {
    let Some(nodes) = Nodes::up(3, "128MiB") else { return };
    nodes.attach(2, "", &[]);
    let start = |seed: usize, node: usize, preload: bool| {
        let inside = if preload { "/forebay/s" } else { "s" };
        let mut command = nodes.command(node, &format!("cd {inside}; {CHANGES}"), preload);
        command.env("SEED", seed.to_string()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let mut programs = vec![start(1, 1, false), start(2, 2, false), start(3, 3, false), start(4, 1, true)];
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
