//! Kills programs and the daemon's worker at random times from a printed seed, and checks what survives.
//!
//! Each test runs for some seconds. FOREBAY_CRASH_SECONDS sets this time, and FOREBAY_CRASH_SEED repeats a run. Quoted
//! from docs/semantics.md: "A killed program loses no change whose call has returned, and harms no other program." "A
//! daemon killed at any instant restarts on the same shard: programs wait a moment and get no error." "After any such
//! kill no space is lost, and `forebay fsck` finds nothing wrong."

use forebay_conformance::harness::{said, Scratch, TestPool};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const CLIENTS: usize = 3;
/// Large enough that clients use late removal of backing files.
const CAPACITY_MIB: u64 = 4096;
/// Space that a workload's removed files may leave allocated in the shard: empty LMDB pages stay allocated.
const SHARD_GROWTH_BYTES: u64 = 24 << 20;

fn seconds() -> Duration {
    let text = std::env::var("FOREBAY_CRASH_SECONDS").unwrap_or_default();
    Duration::from_secs(text.parse().unwrap_or(12))
}

/// xorshift64, from the printed seed.
struct Dice(u64);

impl Dice {
    fn new(test: &str) -> Dice {
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(1, |d| d.as_nanos() as u64);
        let seed = std::env::var("FOREBAY_CRASH_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(now);
        println!("{test}: FOREBAY_CRASH_SEED={seed}");
        Dice(seed | 1)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// A running workload. Dropping it kills it.
struct Workload {
    child: Child,
    directory: String,
    journal: PathBuf,
}

impl Drop for Workload {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// A pool with its workloads, and their progress.
struct Scene {
    pool: TestPool,
    journals: Scratch,
    running: Vec<Workload>,
    started: u64,
    acknowledged: u64,
    used_at_start: u64,
}

impl Scene {
    fn new(dice: &mut Dice) -> Scene {
        let pool = TestPool::up(CAPACITY_MIB);
        let used_at_start = pool.status()["used_bytes"].as_u64().expect("status tells the used bytes");
        let journals = Scratch::on_disk();
        let mut scene =
            Scene { pool, journals, running: Vec::new(), started: 0, acknowledged: 0, used_at_start };
        for _ in 0..CLIENTS {
            scene.start(dice);
        }
        scene
    }

    fn start(&mut self, dice: &mut Dice) {
        self.started += 1;
        let directory = format!("/forebay/w{}", self.started);
        let journal = self.journals.path().join(format!("journal{}", self.started));
        let seed = dice.below(u64::MAX).to_string();
        let mut command = self.pool.program("forebay-churn");
        command.args(["run", &directory, &seed]).arg(&journal).arg("1000000000");
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let child = command.spawn().expect("the workload can be started");
        self.running.push(Workload { child, directory, journal });
    }

    /// Fails if a workload has ended that was not killed: it got an error.
    fn nobody_noticed(&mut self) {
        for workload in &mut self.running {
            if let Some(status) = workload.child.try_wait().expect("the workload is a child") {
                let mut text = String::new();
                if let Some(mut stderr) = workload.child.stderr.take() {
                    std::io::Read::read_to_string(&mut stderr, &mut text).ok();
                }
                panic!("a program that nobody killed ended ({status}): {text}");
            }
        }
    }

    /// The journals' lengths, in bytes.
    fn written(&self) -> Vec<u64> {
        self.running.iter().map(|w| std::fs::metadata(&w.journal).map_or(0, |m| m.len())).collect()
    }

    /// Waits until every workload has made progress. Fails if one makes none in 60 s.
    fn all_go_on(&mut self) {
        let before = self.written();
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.written().iter().zip(&before).any(|(now, then)| now <= then) {
            self.nobody_noticed();
            assert!(
                Instant::now() < deadline,
                "a program is stuck: {before:?} then, {:?} now",
                self.written()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills a workload, checks what it left, and removes that.
    fn kill_client(&mut self, which: usize) {
        let mut workload = self.running.remove(which);
        workload.child.kill().expect("a child can be killed");
        workload.child.wait().expect("a child can be waited for");
        self.check(&workload);
    }

    fn check(&mut self, workload: &Workload) {
        if std::fs::metadata(&workload.journal).map_or(0, |m| m.len()) == 0 {
            // It was killed before its first step, so its directory may not exist.
            self.pool.program("forebay-churn").args(["remove", &workload.directory]).output().ok();
            return;
        }
        let mut check = self.pool.program("forebay-churn");
        let done = said(check.args(["check", &workload.directory]).arg(&workload.journal));
        self.acknowledged += done.trim().parse::<u64>().expect("check prints a number");
        let mut remove = self.pool.program("forebay-churn");
        said(remove.args(["remove", &workload.directory]));
        std::fs::remove_file(&workload.journal).ok();
    }

    fn kill_worker(&mut self) {
        let Some(worker) = self.pool.worker() else { return };
        // SAFETY: no memory is passed; the pool is this test's own.
        assert_eq!(unsafe { libc::kill(worker, libc::SIGKILL) }, 0, "the worker {worker} can be killed");
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.pool.worker().is_none_or(|now| now == worker) {
            assert!(Instant::now() < deadline, "no new worker came");
            std::thread::sleep(Duration::from_millis(2));
        }
        // A request that is in progress at two crashes gets EIO, so each workload must make progress before the next
        // kill.
        self.all_go_on();
    }

    /// Ends and checks all workloads, and checks that no space is lost.
    fn finish(mut self) {
        self.nobody_noticed();
        while !self.running.is_empty() {
            self.kill_client(0);
        }
        // The sweeper removes the backing files that killed programs left after an unlink.
        let deadline = Instant::now() + Duration::from_secs(20);
        let report = loop {
            let report = self.pool.fsck();
            let at_rest = report["orphans"] == 0 && report["backing_files"] == 0;
            if at_rest || Instant::now() > deadline {
                break report;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        let sum = |key: &str| report[key].as_u64();
        assert_eq!(report["clean"], true, "{report:#}");
        assert_eq!(
            (sum("files"), sum("backing_files"), sum("orphans")),
            (Some(0), Some(0), Some(0)),
            "{report:#}"
        );
        assert_eq!(sum("leaked_backing_files"), Some(0), "{report:#}");
        assert!(
            sum("inodes") <= Some(1 + CLIENTS as u64),
            "more than the root and early kills' roots: {report:#}"
        );
        let used = self.pool.status()["used_bytes"].as_u64().expect("status tells the used bytes");
        assert!(
            used <= self.used_at_start + SHARD_GROWTH_BYTES,
            "{used} bytes are used by nothing, {} were at the start",
            self.used_at_start
        );
        println!("{} programs, {} steps acknowledged", self.started, self.acknowledged);
        assert!(self.acknowledged > 100, "too little happened to prove anything");
    }
}

#[test]
fn program_killed_at_random_leaves_what_was_acknowledged() {
    let mut dice = Dice::new("program killed");
    let mut scene = Scene::new(&mut dice);
    let end = Instant::now() + seconds();
    while Instant::now() < end {
        std::thread::sleep(Duration::from_micros(dice.below(300_000)));
        scene.nobody_noticed();
        scene.kill_client(dice.below(CLIENTS as u64) as usize);
        scene.start(&mut dice);
    }
    scene.finish();
}

#[test]
fn worker_killed_at_random_is_not_noticed() {
    let mut dice = Dice::new("worker killed");
    let mut scene = Scene::new(&mut dice);
    scene.all_go_on();
    let end = Instant::now() + seconds();
    let mut kills = 0;
    while Instant::now() < end {
        std::thread::sleep(Duration::from_micros(dice.below(200_000)));
        scene.kill_worker();
        kills += 1;
    }
    let restarts = scene.pool.status()["restarts"].as_u64();
    assert_eq!(restarts, Some(kills), "every kill is one restart, and nothing else is");
    scene.finish();
}

#[test]
fn worker_and_programs_killed_at_random_leave_what_was_acknowledged() {
    let mut dice = Dice::new("both killed");
    let mut scene = Scene::new(&mut dice);
    let end = Instant::now() + seconds();
    while Instant::now() < end {
        std::thread::sleep(Duration::from_micros(dice.below(200_000)));
        if dice.below(2) == 0 {
            scene.kill_worker();
        } else {
            scene.kill_client(dice.below(CLIENTS as u64) as usize);
            scene.start(&mut dice);
        }
        scene.nobody_noticed();
    }
    scene.finish();
}
