//! The daemon's worker is killed repeatedly while programs run in the pool. The programs finish, with the right
//! results.

mod support;

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use support::scripts::Script;
use support::{compile, succeeds, Pool, Scratch};

/// How long the next worker may take to start and to answer.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The time between a worker's first answer and its end, in steps. It is long enough that the supervisor starts the
/// next worker at once.
const STEP: Duration = Duration::from_millis(10);
const STEPS_MIN: u64 = 100;
const STEPS_MORE: u64 = 60;

/// Kills the worker until it is stopped.
struct Killer<'p> {
    pool: &'p Pool,
    stop: AtomicBool,
    kills: AtomicU32,
}

impl Killer<'_> {
    fn run(&self) {
        let mut state = u64::from(std::process::id()) | 1;
        while !self.stop.load(Ordering::Relaxed) {
            if let Some(worker) = self.pool.worker() {
                // SAFETY: the worker of this test's own pool.
                unsafe { libc::kill(worker, libc::SIGKILL) };
                let killed = Instant::now();
                while self.pool.worker().is_none_or(|now| now == worker) {
                    assert!(killed.elapsed() < TIMEOUT, "no new worker started");
                    std::thread::sleep(STEP);
                }
                // Once the worker answers, no request that was in progress at this crash can also be in progress at the
                // next.
                succeeds(
                    self.pool.command("sh").args(["-c", "mkdir /forebay/probe && rmdir /forebay/probe"]),
                );
                self.kills.fetch_add(1, Ordering::Relaxed);
            }
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            for _ in 0..STEPS_MIN + (state >> 33) % STEPS_MORE {
                if self.stop.load(Ordering::Relaxed) {
                    return;
                }
                std::thread::sleep(STEP);
            }
        }
    }
}

/// Stops the killer even when the test panics.
struct Stop<'k>(&'k AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `work` while the worker is killed. Returns the number of kills.
fn under_kills(pool: &Pool, work: impl FnOnce()) -> u32 {
    let killer = Killer { pool, stop: AtomicBool::new(false), kills: AtomicU32::new(0) };
    std::thread::scope(|scope| {
        scope.spawn(|| killer.run());
        let _stop = Stop(&killer.stop);
        work();
    });
    killer.kills.into_inner()
}

/// No data are lost or damaged.
fn is_sound(pool: &Pool) {
    succeeds(Command::new(support::binary("forebay")).arg("fsck").arg("--pool").arg(pool.path()));
}

/// Runs each script several times under kills.
fn finish(scripts: &[(Script, usize)]) {
    let pool = Pool::start();
    let kills = AtomicU32::new(0);
    for (script, times) in scripts {
        script.compare(&pool, *times, |run| {
            kills.fetch_add(under_kills(&pool, run), Ordering::Relaxed);
        });
    }
    let kills = kills.into_inner();
    println!("{kills} kills");
    assert!(kills as usize >= scripts.iter().map(|(_, times)| times).sum(), "{kills} kills prove little");
    is_sound(&pool);
}

macro_rules! script {
    ($name:literal, $($need:literal),*) => {
        Script { name: $name, needs: &[$($need),*] }
    };
}

#[test]
fn git_and_archives_finish_while_the_worker_is_killed() {
    finish(&[
        (script!("history.sh", "git"), 1),
        (script!("archives.sh", "tar"), 2),
        (script!("copies.sh", "rsync"), 1),
    ]);
}

#[test]
fn builds_and_databases_finish_while_the_worker_is_killed() {
    finish(&[
        (script!("configure.sh", "cc", "make"), 2),
        (script!("wal.py", "python:sqlite3"), 2),
        (script!("database.sh", "sqlite3"), 1),
        (script!("jobs.sh", "bash", "flock"), 1),
    ]);
}

#[test]
fn interrupted_calls_and_locks_stay_correct_while_the_worker_is_killed() {
    let (pool, scratch) = (Pool::start(), Scratch::new());
    let program = compile("calls", scratch.path());
    let exerciser = compile("exerciser", scratch.path());
    let kills = under_kills(&pool, || {
        for section in ["handlers", "stopped", "cancelled", "children", "closing", "locks", "threads"] {
            let root = format!("/forebay/{section}");
            succeeds(pool.command("mkdir").arg(&root));
            succeeds(pool.command(&program).arg(&root).arg(section));
        }
        let root = Path::new("/forebay/exerciser");
        succeeds(pool.command("mkdir").arg(root));
        succeeds(pool.command(&exerciser).arg(root).args(["1", "60000"]));
    });
    assert!(kills > 1, "{kills} kills prove little");
    is_sound(&pool);
}
