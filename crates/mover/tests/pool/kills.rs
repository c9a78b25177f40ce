//! Movers and workers that are killed while programs change files: at the end pool and store agree.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::bed::Bed;

/// Seconds of the test, unless FOREBAY_KILL_SECONDS says otherwise.
fn seconds() -> u64 {
    std::env::var("FOREBAY_KILL_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(600)
}

/// A program that creates, rewrites, renames, links and removes files and directories, by a number as its seed.
const CHANGES: &str = r#"
cd /forebay/s; RANDOM=$SEED; until test -e $S/../stop; do
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
  esac; done; true"#;

fn pids(bed: &Bed) -> (Option<u64>, Option<u64>) {
    let status = bed.status();
    (status["mover"]["pid"].as_u64(), status["pids"]["worker"].as_u64())
}

fn kill(pid: u64) {
    let _ = Command::new("kill").args(["-9", &pid.to_string()]).stderr(Stdio::null()).status();
}

/// What differs between pool and store.
fn differences(bed: &Bed) -> String {
    let done = bed.run(
        "cd /forebay/s; find . -type d -printf '%P/ %m\n' -o -type f -printf '%P %m %s\n' -o -printf '%P %l\n' | sort > $S/../a;
         cd $S; find . -type d -printf '%P/ %m\n' -o -type f -printf '%P %m %s\n' -o -printf '%P %l\n' | sort > $S/../b;
         diff $S/../a $S/../b; diff -r --no-dereference /forebay/s $S",
    );
    String::from_utf8_lossy(&done.stdout).into_owned()
}

#[test]
fn killed_movers_and_workers_leave_store_and_pool_equal() {
    if std::env::var_os("FOREBAY_SOAK").is_none() {
        eprintln!("skipped: `make soak` runs it");
        return;
    }
    let bed = Bed::attached("256MiB", "", "");
    let mut programs: Vec<_> = (1..3)
        .map(|seed| bed.command(CHANGES).env("SEED", seed.to_string()).stdout(Stdio::null()).spawn().unwrap())
        .collect();
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
        let (mover, worker) = pids(&bed);
        if let Some(pid) = mover.filter(|_| next() % 3 != 0) {
            kill(pid);
            kills += 1;
        }
        if let Some(pid) = worker.filter(|_| next() % 4 == 0) {
            kill(pid);
            kills += 1;
        }
    }
    std::fs::write(bed.store().join("../stop"), "").unwrap();
    for program in &mut programs {
        program.wait().unwrap();
    }
    assert!(kills > 1, "{kills} kills");
    bed.wait_drained();
    assert_eq!(differences(&bed), "", "{}", bed.log());
    let check = bed.forebay(&["--pool", bed.pool().to_str().unwrap(), "fsck"]);
    assert!(check.status.success(), "{}", crate::bed::text(&check));
}
