//! Signals to commands that wait for a worker or a mover that is stopped.

mod common;

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{eventually, kill, lock_holder, Place, Ran};
use serde_json::Value;

/// A pool that is up, with a store at `/data` that gets 2 MB in a second, when it is told to.
struct Bed {
    place: Place,
    pool: PathBuf,
}

impl Bed {
    /// In the foreground of the returned process.
    fn new() -> (Bed, Child) {
        let place = Place::new();
        let (pool, store) = (place.join("p"), place.join("store"));
        std::fs::create_dir(&store).unwrap();
        let bed = Bed { place, pool };
        let path = bed.pool.to_str().unwrap();
        let up =
            bed.command(&["up", "--capacity", "128MiB", "--path", path, "--foreground"]).spawn().unwrap();
        bed.ok(&["status", "--wait", "60"]);
        bed.ok(&["attach", &format!("file://{}?rate=2MB/s", store.display()), "/data", "--drain", "request"]);
        (bed, up)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.place.command(arguments);
        command.env("FOREBAY_POOL", &self.pool).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn ok(&self, arguments: &[&str]) -> Ran {
        let ran = Ran::of(self.command(arguments).output().unwrap());
        assert_eq!(ran.code, Some(0), "{arguments:?}: {ran:?}");
        ran
    }

    fn status(&self) -> Value {
        serde_json::from_str(&self.ok(&["status", "--json"]).out).unwrap()
    }

    fn worker(&self) -> i32 {
        self.status()["pids"]["worker"].as_i64().unwrap() as i32
    }

    fn mover(&self) -> i32 {
        self.status()["mover"]["pid"].as_i64().unwrap() as i32
    }

    fn sh(&self, script: &str) {
        self.ok(&["run", "--quiet", "--", "sh", "-c", script]);
    }

    /// Waits until the mover copies for a command.
    fn copies(&self) {
        eventually("it copies", || {
            let tasks: Value = serde_json::from_str(&self.ok(&["tasks", "--json"]).out).unwrap_or_default();
            tasks.as_array().is_some_and(|tasks| tasks.iter().any(|task| task["state"] == "running"))
        });
    }
}

/// Waits until signals no longer end a command at once.
fn takes_signals(child: &Child) {
    eventually("it takes signals", || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
        u64::from_str_radix(blocked.trim(), 16).unwrap() & (1 << (libc::SIGTERM - 1)) != 0
    });
}

/// The end of a command that a signal is to end while `stopped` is stopped. It is killed if the signal does not.
fn ended_by(signal: i32, child: Child, stopped: i32) -> Ran {
    kill(child.id() as i32, signal);
    let (pid, over) = (child.id() as i32, std::sync::mpsc::channel::<()>());
    let killer = std::thread::spawn(move || {
        if over
            .1
            .recv_timeout(Duration::from_secs(25))
            .is_err_and(|e| e == std::sync::mpsc::RecvTimeoutError::Timeout)
        {
            kill(pid, libc::SIGKILL);
        }
    });
    let ran = Ran::of(child.wait_with_output().unwrap());
    drop(over.0);
    killer.join().unwrap();
    kill(stopped, libc::SIGCONT);
    ran
}

#[test]
fn detach_ends_by_a_signal_while_the_worker_or_the_mover_is_stopped() {
    let (bed, up) = Bed::new();
    // Long enough to be forgotten one after the other that the worker is stopped meanwhile.
    bed.sh("cd /forebay/data && seq 20000 | xargs touch");
    let detach = bed.command(&["detach", "--discard", "/data"]).spawn().unwrap();
    takes_signals(&detach);
    let worker = bed.worker();
    kill(worker, libc::SIGSTOP);
    let detach = ended_by(libc::SIGTERM, detach, worker);
    assert!(detach.signal == Some(libc::SIGTERM) && detach.err.contains("the pool is up"), "{detach:?}");
    assert!(detach.err.contains("/data is still attached"), "{detach:?}");

    bed.sh("head -c 6000000 /dev/zero >/forebay/data/big; rm -rf /forebay/data/[0-9]*");
    let detach = bed.command(&["detach", "/data"]).spawn().unwrap();
    bed.copies();
    let mover = bed.mover();
    kill(mover, libc::SIGSTOP);
    let detach = ended_by(libc::SIGINT, detach, mover);
    assert!(detach.signal == Some(libc::SIGINT) && detach.err.contains("the pool is up"), "{detach:?}");

    // What its starter has it ignore does not end it.
    let mut command = bed.command(&["detach", "/data"]);
    // SAFETY: signal is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGHUP, libc::SIG_IGN);
            Ok(())
        });
    }
    let detach = command.spawn().unwrap();
    bed.copies();
    kill(detach.id() as i32, libc::SIGHUP);
    let detach = Ran::of(detach.wait_with_output().unwrap());
    assert_eq!(detach.code, Some(0), "{detach:?}");
    assert_eq!(std::fs::metadata(bed.place.join("store/big")).unwrap().len(), 6_000_000);
    bed.ok(&["down"]);
    assert_eq!(Ran::of(up.wait_with_output().unwrap()).code, Some(0));
}

#[test]
fn pool_in_the_foreground_ends_by_a_further_signal_while_its_worker_or_mover_is_stopped() {
    for stops_mover in [false, true] {
        let (bed, up) = Bed::new();
        bed.sh("head -c 6000000 /dev/zero >/forebay/data/big");
        let stays_up = bed.status()["backing"] == "detached";
        let stopped = if stops_mover { bed.mover() } else { bed.worker() };
        if stops_mover {
            kill(up.id() as i32, libc::SIGTERM);
            bed.copies();
            kill(stopped, libc::SIGSTOP);
        } else {
            kill(stopped, libc::SIGSTOP);
            kill(up.id() as i32, libc::SIGTERM);
            // It asks the worker how the pool is.
            std::thread::sleep(Duration::from_secs(7));
        }
        let up = ended_by(libc::SIGTERM, up, stopped);
        let fate = if stays_up { "the pool stays up" } else { "the data are kept" };
        up.assert_refused(1, &["cannot copy everything", "does not answer", fate]);
        if !stays_up {
            eventually("the pool is down", || lock_holder(&bed.pool).is_none());
            bed.ok(&["up", "--path", bed.pool.to_str().unwrap()]);
        }
        bed.ok(&["down"]);
        assert_eq!(std::fs::metadata(bed.place.join("store/big")).unwrap().len(), 6_000_000);
    }
}

/// It has no store, so nothing is copied, and the supervisor kills the worker after a while.
#[test]
fn pool_in_the_foreground_without_a_store_does_not_wait_for_its_worker_after_a_further_signal() {
    let place = Place::new();
    let pool = place.join("p");
    let words = ["up", "--capacity", "128MiB", "--path", pool.to_str().unwrap(), "--foreground"];
    let up = place.command(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    place.ok(["status", "--pool", pool.to_str().unwrap(), "--wait", "60"]);
    let status = place.json(["status", "--pool", pool.to_str().unwrap(), "--json"]);
    let worker = status["pids"]["worker"].as_i64().unwrap() as i32;
    kill(worker, libc::SIGSTOP);
    kill(up.id() as i32, libc::SIGINT);
    let log = || std::fs::read_to_string(pool.join("log")).unwrap();
    eventually("the pool stops", || log().contains("pool stops"));
    kill(up.id() as i32, libc::SIGINT);
    let up = Ran::of(up.wait_with_output().unwrap());
    assert!(up.signal == Some(libc::SIGINT) && up.err.contains("it stops by itself"), "{up:?}");
    assert!(common::is_alive(worker), "it waited for the worker");
    eventually("the pool is down", || lock_holder(&pool).is_none());
}
