//! Several processes make random calls through the preload library and through the mount, on the same names of a directory
//! with a store, while the mover drains, releases and restores: two_doors.py. After each call the other door must show its
//! result, and at the end the store must equal the pool.
//!
//! Each run prints its seed; FOREBAY_DOORS_SEED repeats its calls, though not what the mover does meanwhile. With FOREBAY_SOAK
//! there are more seeds.

use forebay_conformance::harness::{said, Scratch, TestPool};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const CAPACITY_MIB: u64 = 512;
const ACTORS: &str = "3";
const STEPS: &str = "200";

fn seeds() -> Vec<u64> {
    if let Some(seed) = std::env::var("FOREBAY_DOORS_SEED").ok().and_then(|seed| seed.parse().ok()) {
        return vec![seed];
    }
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let count = if std::env::var_os("FOREBAY_SOAK").is_some() { 40 } else { 1 };
    (0..count).map(|i| now.as_millis() as u64 + i).collect()
}

/// Has the mover do one thing after the other until `is_over`. Any of them may fail: files are open, or gone.
fn disturb(pool: &TestPool, seed: u64, is_over: &AtomicBool) {
    let mut dice = seed | 1;
    while !is_over.load(Ordering::Relaxed) {
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        std::thread::sleep(Duration::from_millis(dice % 64));
        let mut verb = pool.forebay();
        match dice >> 32 & 7 {
            0 | 1 => verb.args(["sync", "--no-progress", "-r", "/s"]),
            2..=4 => verb.args(["release", "--no-progress", "-r", "/s"]),
            5 | 6 => verb.args(["prestage", "--no-progress", "-r", "/s"]),
            _ => verb.args(["refresh", "/s"]),
        };
        verb.output().unwrap();
    }
}

#[test]
fn each_of_two_doors_shows_at_once_what_the_other_has_changed_while_the_mover_works() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/two_doors.py");
    for seed in seeds() {
        println!("FOREBAY_DOORS_SEED={seed}");
        let (pool, store) = (TestPool::up(CAPACITY_MIB), Scratch::on_disk());
        said(pool.forebay().args(["attach", store.text(), "/s"]));
        let Some(mount) = pool.mount() else { return };
        let mounted = mount.join("s");
        let mut run = pool.forebay();
        run.args(["run", "--quiet", "--", "python3"]).arg(&script).arg("/forebay/s").arg(&mounted);
        run.args([&seed.to_string(), ACTORS, STEPS]);
        let is_over = AtomicBool::new(false);
        let output = std::thread::scope(|scope| {
            scope.spawn(|| disturb(&pool, seed, &is_over));
            let output = run.output();
            is_over.store(true, Ordering::Relaxed);
            output.unwrap()
        });
        let log = || std::fs::read_to_string(pool.directory().join("log")).unwrap_or_default();
        assert!(output.status.success(), "{}\n{}", String::from_utf8_lossy(&output.stderr), log());
        let synced = pool.forebay().args(["sync", "--no-progress", "-r", "/s"]).output().unwrap();
        assert!(synced.status.success(), "{}\n{}", String::from_utf8_lossy(&synced.stderr), log());
        said(pool.program("forebay-conformance").args(["--equal", "/forebay/s", "--to", store.text()]));
        let report = pool.fsck();
        assert_eq!(report["clean"], true, "{report:#}");
        let status = pool.status();
        assert_eq!((&status["restarts"], &status["mover"]["restarts"]), (&0.into(), &0.into()), "{status:#}");
    }
}
