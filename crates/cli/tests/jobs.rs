//! `forebay job` in scripts of users: where results go, what is refused at the beginning, and what becomes of a job whose
//! pool was killed. Scripts that end in each way, and those of several nodes, are in `tests/conformance/tests/slurm`.

mod common;

use std::process::Command;

use common::{forebay, kill, lock_holder, Place, Ran};

fn script(place: &Place, job: &str, text: &str) -> Ran {
    let mut command = Command::new("bash");
    place.dress(&mut command);
    command.args(["-c", &text.replace("FOREBAY ", &format!("{} ", forebay().display()))]);
    command.env("LSB_JOBID", job).env_remove("FOREBAY_POOL").current_dir(&place.path);
    Ran::of(command.output().unwrap())
}

/// The directory with the user's pools stays.
fn assert_nothing_left(place: &Place) {
    common::eventually("nothing of the jobs is left", || {
        let left = std::fs::read_dir(place.user_directory()).into_iter().flatten().count();
        left == 0 && place.pools().is_empty() && place.mounts().is_empty()
    });
}

#[test]
fn results_go_where_the_script_began_although_it_goes_elsewhere() {
    let place = Place::new();
    place.write("input", "hi\n");
    std::fs::create_dir(place.join("elsewhere")).unwrap();
    let ran = script(
        &place,
        "relative",
        "eval \"$(FOREBAY job begin --capacity 64MiB --stage-in input:/in --stage-out /out:results --stage-out '/a\\:b:re\\:sults')\"\n\
         FOREBAY run --quiet -- sh -c 'cp /forebay/in /forebay/out; cp /forebay/in /forebay/a:b'\ncd elsewhere",
    );
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for name in ["results", "re:sults"] {
        assert_eq!(std::fs::read_to_string(place.join(name)).unwrap(), "hi\n", "{ran:?}");
    }
    assert_eq!(std::fs::read_dir(place.join("elsewhere")).unwrap().count(), 0);
    assert_nothing_left(&place);
}

#[test]
fn pairs_that_make_no_sense_are_refused_before_the_script_computes() {
    let place = Place::new();
    for option in ["--stage-out /out", "--stage-in :/in", "--stage-out /out:"] {
        let text = format!("eval \"$(FOREBAY job begin --capacity 64MiB {option})\"\ntouch computed");
        let ran = script(&place, "wrong", &text);
        assert_eq!(ran.code, Some(125), "{option}: {ran:?}");
        assert!(ran.err.contains("write SRC"), "{option}: {ran:?}");
        assert!(!place.join("computed").exists(), "{option}");
        assert_nothing_left(&place);
    }
}

/// Begins a job whose script and watcher are killed, with a file that is to be staged out.
fn killed_job(place: &Place, job: &str) -> (std::path::PathBuf, std::path::PathBuf) {
    let ran = script(
        place,
        job,
        "FOREBAY job begin --capacity 64MiB --stage-out /out:results >begin\n\
         eval \"$(grep ^export begin)\"; FOREBAY run --quiet -- sh -c 'echo result >/forebay/out'\n\
         echo $FOREBAY_JOB_DIR; echo $FOREBAY_POOL",
    );
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let mut lines = ran.out.lines().map(std::path::PathBuf::from);
    (lines.next().unwrap(), lines.next().unwrap())
}

fn end(place: &Place, dir: &std::path::Path) -> Ran {
    Ran::of(place.command(["job", "end"]).env("FOREBAY_JOB_DIR", dir).output().unwrap())
}

#[test]
fn end_of_a_job_whose_daemon_was_killed_stages_out_what_the_pool_has() {
    let place = Place::new();
    let (dir, pool) = killed_job(&place, "killed");
    kill(lock_holder(&pool).unwrap(), 9);
    common::eventually("the daemon is gone", || lock_holder(&pool).is_none());
    if place.json(["up", "--json", "--path", pool.to_str().unwrap()])["reopened"] != true {
        return println!("skipped: a pool here goes with its daemon");
    }
    kill(lock_holder(&pool).unwrap(), 9);
    let ran = script(&place, "killed", "eval \"$(FOREBAY job begin --capacity 64MiB)\"\ntouch again");
    assert_eq!(ran.code, Some(125), "{ran:?}");
    assert!(ran.err.contains("begun already") && ran.err.contains("job end"), "{ran:?}");
    let ran = end(&place, &dir);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(std::fs::read_to_string(place.join("results")).unwrap(), "result\n");
    assert_nothing_left(&place);
}

#[test]
fn job_whose_pool_is_gone_says_so_at_its_end_and_can_begin_again() {
    for ends in [true, false] {
        let place = Place::new();
        let (dir, pool) = killed_job(&place, "gone");
        place.ok(["down", "--force", "--pool", pool.to_str().unwrap()]);
        if ends {
            let ran = end(&place, &dir);
            assert_eq!(ran.code, Some(1), "{ran:?}");
            assert!(ran.err.contains("is gone with its data"), "{ran:?}");
            assert_eq!(end(&place, &dir).code, Some(0), "there is nothing left to do");
        }
        // The scheduler has started it again.
        let text = "eval \"$(FOREBAY job begin --capacity 64MiB --stage-out /out:results)\"\n\
                    FOREBAY run --quiet -- sh -c 'echo second >/forebay/out'";
        let ran = script(&place, "gone", text);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        assert_eq!(std::fs::read_to_string(place.join("results")).unwrap(), "second\n");
        assert_nothing_left(&place);
    }
}

#[test]
fn end_by_the_shell_of_another_begin_leaves_the_pool_up() {
    let place = Place::new();
    let (dir, pool) = killed_job(&place, "other");
    let begin = std::fs::read_to_string(place.join("begin")).unwrap();
    let nonce = begin.split("job end --nonce ").nth(1).and_then(|rest| rest.get(..32)).unwrap();
    assert!(begin.contains(&format!("job watch --nonce {nonce} ")), "{begin}");
    let end = |words: &[&str]| {
        let words = [&["job"][..], words].concat();
        Ran::of(place.command(words).env("FOREBAY_JOB_DIR", &dir).output().unwrap())
    };
    // A process that has ended.
    for words in [&["end", "--nonce", "another"][..], &["watch", "--nonce", "another", "4194304"]] {
        let ran = end(words);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        assert!(lock_holder(&pool).is_some() && !place.join("results").exists(), "{words:?}");
    }
    let ran = end(&["end", "--nonce", nonce]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(std::fs::read_to_string(place.join("results")).unwrap(), "result\n");
    assert_nothing_left(&place);
}

#[test]
fn end_of_a_job_whose_pool_was_killed_and_lost_its_data_says_so_and_leaves_nothing() {
    for (option, said) in
        [("--stage-out /out:results", "cannot stage out"), ("--backing store", "cannot drain")]
    {
        let place = Place::new();
        std::fs::create_dir(place.join("store")).unwrap();
        let text = format!(
            "FOREBAY job begin --capacity 64MiB {option} >begin\neval \"$(grep ^export begin)\"\n\
             echo $FOREBAY_JOB_DIR; echo $FOREBAY_POOL"
        );
        let ran = script(&place, "lost", &text);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        let mut lines = ran.out.lines().map(std::path::PathBuf::from);
        let (dir, pool) = (lines.next().unwrap(), lines.next().unwrap());
        kill(lock_holder(&pool).unwrap(), 9);
        common::eventually("the daemon is gone", || lock_holder(&pool).is_none());
        let (target, aside) = (pool.join("target"), pool.join("aside"));
        let data = target.canonicalize();
        if target.symlink_metadata().is_ok() && std::fs::rename(&target, &aside).is_ok() {
            // What cannot be opened may be there.
            std::fs::write(&target, "").unwrap();
            let ran = script(&place, "lost", "eval \"$(FOREBAY job begin --capacity 64MiB)\"");
            assert_eq!(ran.code, Some(125), "{ran:?}");
            assert!(ran.err.contains("begun already"), "{ran:?}");
            std::fs::remove_file(&target).unwrap();
            let _ = std::fs::remove_file(&aside);
            let _ = std::fs::remove_dir_all(&aside);
            let _ = data.map(std::fs::remove_dir_all);
        } else {
            // A memory file system is mounted there, or the data have gone with the daemon.
            let _ = Command::new("umount").arg("-l").arg(&target).output();
        }
        let ran = end(&place, &dir);
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert!(ran.err.contains(said) && ran.err.contains("is gone with its data"), "{ran:?}");
        assert_eq!(end(&place, &dir).code, Some(0), "there is nothing left to do");
        assert_nothing_left(&place);
    }
}
