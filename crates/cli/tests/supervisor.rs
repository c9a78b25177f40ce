//! Supervisor and worker under SIGKILL and SIGSTOP, seen from outside.

mod common;

use std::path::Path;

use common::{eventually, is_alive, kill, start, Place};
use serde_json::Value;

fn status(place: &Place, pool: &Path) -> Value {
    place.json(["status", "--json", "--pool", pool.to_str().unwrap()])
}

fn worker(status: &Value) -> Option<i32> {
    status["pids"]["worker"].as_i64().map(|p| p as i32)
}

#[test]
fn worker_that_is_killed_is_restarted_on_the_same_shard() {
    let place = Place::new();
    let pool = place.up("p");
    let before = status(&place, &pool);
    for round in 1..=3 {
        let now = status(&place, &pool);
        kill(worker(&now).unwrap(), 9);
        eventually("the worker is restarted", || {
            let s = status(&place, &pool);
            s["restarts"] == round && s["state"] == "up" && worker(&s).is_some()
        });
    }
    let after = status(&place, &pool);
    assert_eq!(after["pids"]["supervisor"], before["pids"]["supervisor"]);
    assert_ne!(after["pids"]["worker"], before["pids"]["worker"]);
    assert_eq!(after["inodes"], before["inodes"]);
    assert_eq!(after["last_crash"], "was killed by signal 9");
    let log = std::fs::read_to_string(pool.join("log")).unwrap();
    assert!(log.contains("worker was killed by signal 9"), "{log}");
}

#[test]
fn supervisor_that_is_killed_takes_its_worker_and_the_next_up_works() {
    let place = Place::new();
    let pool = place.up("p");
    let text = pool.to_str().unwrap();
    let before = status(&place, &pool);
    kill(before["pids"]["supervisor"].as_i64().unwrap() as i32, 9);
    // The pool is up until the kernel has ended the last thread of the supervisor.
    let lock = std::fs::File::open(pool.join("lock")).unwrap();
    let is_free = || rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockShared).is_ok();
    eventually("the supervisor's lock is free", is_free);
    drop(lock);
    // The worker may still be dying: `up` waits for its end and finds the data.
    let up = place.json(["up", "--path", text, "--json"]);
    assert!(!is_alive(worker(&before).unwrap()));
    assert_eq!(up["reopened"], up["backing"] != "detached");
    assert_eq!(status(&place, &pool)["restarts"], 0);
}

#[test]
fn supervisor_that_is_terminated_keeps_what_can_be_kept() {
    let place = Place::new();
    let pool = place.up("p");
    let before = status(&place, &pool);
    let pid = before["pids"]["supervisor"].as_i64().unwrap() as i32;
    kill(pid, libc::SIGTERM);
    eventually("it ends", || !is_alive(pid) && !is_alive(worker(&before).unwrap()));
    if before["backing"] == "tmpfs" {
        assert_eq!(place.mounts().len(), 1);
        let up = place.json(["up", "--path", pool.to_str().unwrap(), "--json"]);
        assert_eq!(up["reopened"], true);
    }
}

#[test]
fn worker_that_is_stopped_is_killed_by_down() {
    let place = Place::new();
    let pool = place.up("p");
    let before = status(&place, &pool);
    kill(worker(&before).unwrap(), libc::SIGSTOP);
    // The supervisor still answers, with the facts that it has itself.
    let stopped = status(&place, &pool);
    assert_eq!(stopped["state"], "up");
    assert!(stopped["ring"].is_null(), "{stopped}");
    let down = place.ok(["down", "--pool", pool.to_str().unwrap()]);
    assert!(down.out.contains("killed"), "{down:?}");
    eventually("the worker is gone", || !is_alive(worker(&before).unwrap()));
    assert!(!pool.exists());
}

#[test]
fn two_ups_at_once_make_one_pool() {
    let place = Place::new();
    let pool = place.join("p");
    let mut all: Vec<_> = (0..4)
        .map(|_| start(place.command(["up", "--capacity", "128MiB", "--path", pool.to_str().unwrap()])))
        .collect();
    let codes: Vec<_> = all.iter_mut().map(|c| c.wait().code()).collect();
    assert_eq!(codes.iter().filter(|c| **c == Some(0)).count(), 1, "{codes:?}");
    assert_eq!(codes.iter().filter(|c| **c == Some(1)).count(), 3, "{codes:?}");
    assert!(place.mounts().len() <= 1);
    assert_eq!(status(&place, &pool)["state"], "up");
}

#[test]
fn down_while_a_run_uses_the_pool_is_refused_without_force() {
    let place = Place::new();
    let pool = place.up("p");
    let text = pool.to_str().unwrap();
    let mut run = start(place.command(["--pool", text, "run", "--quiet", "sleep", "60"]));
    eventually("it is a member", || status(&place, &pool)["members"] == 1);
    place.run(["down", "--pool", text]).assert_refused(1, &["sleep 60", "--force"]);
    place.ok(["down", "--force", "--pool", text]);
    kill(run.pid(), libc::SIGTERM);
    run.wait();
    assert!(!pool.exists());
}
