//! Which pool `forebay run` uses, and its messages where the program's results could be lost with the pool.

mod common;

use common::{eventually, is_root, kill, lock_holder, start, Place};

/// Kills the default pool's daemon, as a crash would; returns the pool's directory.
fn kill_default_pool(place: &Place) -> std::path::PathBuf {
    let pool = place.user_directory().join("pool");
    kill(lock_holder(&pool).unwrap(), libc::SIGKILL);
    pool
}

fn lock_is_free(pool: &std::path::Path) -> bool {
    let lock = std::fs::File::open(pool.join("lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockShared).is_ok()
}

#[test]
fn medium_of_the_default_pool_that_is_up_cannot_be_chosen() {
    let place = Place::new();
    place.ok(["up", "--capacity", "128MiB"]);
    for option in [["--capacity", "64MiB"], ["--media", "dram"]] {
        let ran = place.run(["run", option[0], option[1], "--", "sh", "-c", "echo x > /forebay/result"]);
        ran.assert_refused(125, &["--media, --capacity and --media-profile", "/pool, which is up", "--own"]);
        let ran = place.ok(["run", "--own", option[0], option[1], "--", "sh", "-c", "echo $FOREBAY_POOL"]);
        assert!(ran.out.contains("/run-"), "{ran:?}");
    }
    place.ok(["down"]);
    let ran = place.ok(["run", "--capacity", "64MiB", "--", "sh", "-c", "echo $FOREBAY_POOL"]);
    assert!(ran.out.contains("/run-"), "no pool is up, so the run has its own: {ran:?}");
    place.assert_nothing_left();
}

#[test]
fn default_pool_whose_daemon_was_killed_is_not_replaced_by_an_empty_one() {
    let place = Place::new();
    place.ok(["up", "--capacity", "128MiB"]);
    place.ok(["run", "--", "sh", "-c", "echo before > /forebay/before"]);
    kill_default_pool(&place);
    let write = ["run", "--", "sh", "-c", "echo after > /forebay/after"];
    let words = ["/pool", "its daemon was killed", "`forebay up`", "`forebay down`", "--own"];
    place.run(write).assert_refused(125, &words);
    let ran = place.ok(["run", "--own", "--", "sh", "-c", "ls /forebay"]);
    assert_eq!(ran.out, "", "a pool of its own is empty");
    // What is staged out is not lost, so the run goes on, and warns which pool it uses.
    let out = place.join("out");
    let pair = format!("/f:{}", out.display());
    let ran = place.ok(["run", "--quiet", "--stage-out", &pair, "--", "sh", "-c", "echo x > /forebay/f"]);
    assert!(ran.err.contains("warning: pool") && ran.err.contains("its daemon was killed"), "{ran:?}");
    assert_eq!(std::fs::read(&out).unwrap(), b"x\n");
    // The printed advice works.
    let up = place.ok(["up"]);
    if is_root() {
        assert!(up.out.contains("with its data from before"), "{up:?}");
        assert_eq!(place.ok(["run", "--quiet", "--", "cat", "/forebay/before"]).out, "before\n");
    }
    place.ok(write);
    kill_default_pool(&place);
    place.run(write).assert_refused(125, &words);
    place.ok(["down"]);
    place.ok(write);
    place.assert_nothing_left();
}

#[test]
fn default_pool_whose_memory_is_gone_is_said_to_have_lost_its_data() {
    if !is_root() {
        println!(
            "skipped: only root has a pool whose memory outlives its daemon, and can be taken away from it"
        );
        return;
    }
    let place = Place::new();
    place.ok(["up", "--capacity", "64MiB"]);
    let pool = kill_default_pool(&place);
    eventually("its worker has ended", || lock_is_free(&pool));
    // As after a restart of the node: the pool's directory exists, its memory does not.
    let status = std::process::Command::new("umount").arg(pool.join("target")).status().unwrap();
    assert!(status.success());
    place
        .run(["run", "true"])
        .assert_refused(125, &["its data are gone with it", "starts it, empty", "--own"]);
    let up = place.ok(["up", "--capacity", "64MiB"]);
    assert!(up.out.contains("note: empty: the data of the pool that was here before"), "{up:?}");
    place.ok(["run", "true"]);
    place.ok(["down"]);
    let up = place.ok(["up", "--capacity", "64MiB"]);
    assert!(!up.out.contains("note: empty"), "it was stopped in good order: {up:?}");
    place.ok(["down"]);
    place.assert_nothing_left();
}

#[test]
fn default_pool_that_was_stopped_with_its_data_is_not_replaced_by_an_empty_one() {
    let place = Place::new();
    place.ok(["up", "--capacity", "128MiB", "--media", "ssd"]);
    place.ok(["down", "--keep"]);
    let run = ["run", "--", "sh", "-c", "echo after > /forebay/after"];
    place.run(run).assert_refused(125, &["/pool", "it was stopped, and its data are kept", "--own"]);
    place.ok(["up"]);
    place.ok(run);
    assert!(place.ok(["ls", "/"]).out.contains("after"));
}

#[test]
fn default_pool_that_just_starts_is_waited_for() {
    let place = Place::new();
    for _ in 0..5 {
        let mut command = place.command(["up", "--capacity", "64MiB"]);
        command.stdout(std::process::Stdio::null());
        let mut up = start(command);
        let pool = place.user_directory().join("pool");
        eventually("the pool begins to start", || pool.join("lock").exists());
        let ran = place.ok(["run", "--quiet", "--", "sh", "-c", "echo $FOREBAY_POOL"]);
        assert!(ran.out.trim().ends_with("/pool"), "{ran:?}");
        assert!(up.wait().success());
        place.ok(["down"]);
    }
    place.assert_nothing_left();
}

#[test]
fn mistyped_source_of_a_stage_out_leaves_no_empty_pool() {
    let place = Place::new();
    let pair = format!("/typo:{}", place.join("out").display());
    let ran = place.run(["run", "--stage-out", &pair, "--", "true"]);
    ran.assert_refused(125, &["/typo", "No such file", "name an existing path in the pool"]);
    assert!(!ran.err.contains("not lost"), "there are no results: {ran:?}");
    place.assert_nothing_left();
    // The pool has an entry, which the user may have meant.
    let ran = place.run(["run", "--stage-out", &pair, "--", "sh", "-c", "echo x > /forebay/type"]);
    ran.assert_refused(125, &["/typo", "their pool stays up", "forebay ls --pool"]);
    assert!(!ran.err.contains("room"), "space was not the cause: {ran:?}");
    let advice = |word: &str| {
        let line = ran.err.lines().find(|l| l.trim_start().starts_with(word)).unwrap();
        place.ok(line.split_whitespace().skip(1)).out
    };
    assert!(advice("forebay ls").contains("type"));
    advice("forebay down");
    place.assert_nothing_left();
}

#[test]
fn results_that_stay_in_a_pool_of_the_user_are_not_to_be_stopped_away() {
    let place = Place::new();
    place.ok(["up", "--capacity", "64MiB"]);
    let pair = format!("/typo:{}", place.join("out").display());
    let ran = place.run(["run", "--stage-out", &pair, "--", "true"]);
    ran.assert_refused(125, &["/typo", "still in the pool", "forebay stage-out --pool"]);
    assert!(!ran.err.contains("forebay down") && !ran.err.contains("room"), "{ran:?}");
    place.ok(["down"]);
    place.assert_nothing_left();
}

#[test]
fn run_whose_pool_is_stopped_under_it_fails_and_says_what_became_of_the_data() {
    let place = Place::new();
    place.ok(["up", "--capacity", "64MiB"]);
    let (ready, go) = (place.join("ready"), place.join("go"));
    let script = format!(
        "echo x > /forebay/result; touch {}; while [ ! -e {} ]; do sleep 0.02; done",
        ready.display(),
        go.display()
    );
    let run = || {
        for file in [&ready, &go] {
            let _ = std::fs::remove_file(file);
        }
        let mut command = place.command(["run", "--", "sh", "-c", &script]);
        let child = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
        eventually("the program has written", || ready.exists());
        child
    };
    let end = |child: std::process::Child| {
        std::fs::write(&go, "").unwrap();
        common::Ran::of(child.wait_with_output().unwrap())
    };
    let child = run();
    place.ok(["down", "--force"]);
    end(child)
        .assert_refused(125, &["the pool is gone", "stopped under the program", "what was in it is gone"]);
    // Stopped with its data, or killed: the next start finds the data.
    if is_root() {
        place.ok(["up", "--capacity", "64MiB"]);
        let child = run();
        place.ok(["down", "--force", "--keep"]);
        end(child).assert_refused(125, &["the pool is gone", "its data are still there: `forebay up"]);
        place.ok(["up"]);
        let child = run();
        kill_default_pool(&place);
        end(child).assert_refused(125, &["the pool is gone", "its data are still there: `forebay up"]);
        place.ok(["down"]);
    }
    place.assert_nothing_left();
}
