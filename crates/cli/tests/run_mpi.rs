//! Runs of one job: ranks of one launcher on this node.

mod common;

use std::process::{Command, Stdio};

use common::{eventually, start, Place, Ran};

/// Starts runs as a launcher would: with the launch's name, a rank each, and the number of ranks.
fn ranks(place: &Place, count: usize, arguments: &[&str]) -> Vec<common::Guarded> {
    some_ranks(place, 0..count, count, arguments)
}

/// Starts some of the ranks: launchers do not start all at the same instant.
fn some_ranks(
    place: &Place,
    which: std::ops::Range<usize>,
    count: usize,
    arguments: &[&str],
) -> Vec<common::Guarded> {
    which
        .map(|rank| {
            let mut command = place.command(arguments);
            command.env("PMIX_NAMESPACE", format!("test@{}", place.path.display()));
            command.env("PMIX_RANK", rank.to_string()).env("OMPI_COMM_WORLD_LOCAL_SIZE", count.to_string());
            command.stderr(Stdio::piped());
            start(command)
        })
        .collect()
}

fn texts(place: &Place, name: &str, count: usize) -> Vec<String> {
    (0..count).map(|i| std::fs::read_to_string(place.join(format!("{name}{i}"))).unwrap()).collect()
}

#[test]
fn ranks_share_one_pool_and_see_each_others_files() {
    let place = Place::new();
    // Rank 0 ends at once; the others find its file, although rank 0 may have ended before they started.
    let script = format!(
        "echo $FOREBAY_POOL > {0}/pool$PMIX_RANK; echo $PMIX_RANK > /forebay/from$PMIX_RANK; \
         [ $PMIX_RANK = 0 ] && exit 0; \
         while [ ! -e /forebay/from0 ]; do sleep 0.05; done; cat /forebay/from0 > {0}/seen$PMIX_RANK",
        place.path.display()
    );
    let arguments = ["run", "--quiet", "--", "sh", "-c", &script];
    let mut all = some_ranks(&place, 0..1, 4, &arguments);
    eventually("the program of rank 0 has run", || place.join("pool0").exists());
    std::thread::sleep(std::time::Duration::from_millis(300));
    all.extend(some_ranks(&place, 1..4, 4, &arguments));
    for rank in &mut all {
        assert_eq!(rank.wait().code(), Some(0));
    }
    let pools = texts(&place, "pool", 4);
    assert!(pools.iter().all(|p| *p == pools[0]), "{pools:?}");
    assert!((1..4).all(|i| std::fs::read_to_string(place.join(format!("seen{i}"))).unwrap() == "0\n"));
    place.assert_nothing_left();
}

#[test]
fn ranks_stage_in_once_and_out_once_when_the_last_has_ended() {
    let place = Place::new();
    let input = place.write("input", "data");
    let out = format!("/all:{}", place.join("all").display());
    let script = "mkdir -p /forebay/all; sleep 0.$PMIX_RANK; cp /forebay/input /forebay/all/$PMIX_RANK";
    let arguments =
        ["run", "--stage-in", input.to_str().unwrap(), "--stage-out", &out, "--", "sh", "-c", script];
    let mut all = ranks(&place, 3, &arguments);
    let mut said = String::new();
    for rank in &mut all {
        use std::io::Read;
        rank.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(rank.wait().code(), Some(0), "{said}");
    }
    assert_eq!(said.matches("staged in").count(), 1, "{said}");
    assert_eq!(said.matches("staged out").count(), 1, "{said}");
    for rank in 0..3 {
        assert_eq!(std::fs::read(place.join(format!("all/{rank}"))).unwrap(), b"data", "{said}");
    }
    place.assert_nothing_left();
}

#[test]
fn rank_that_fails_keeps_results_from_being_staged_out() {
    let place = Place::new();
    let out = format!("/f:{}", place.join("f").display());
    let script = "echo x > /forebay/f; sleep 0.$PMIX_RANK; [ $PMIX_RANK != 0 ]";
    let mut all = ranks(&place, 2, &["run", "--stage-out", &out, "--", "sh", "-c", script]);
    let codes: Vec<_> = all.iter_mut().map(|r| r.wait().code()).collect();
    assert_eq!(codes, [Some(1), Some(0)]);
    assert!(!place.join("f").exists());
    place.assert_nothing_left();
}

#[test]
fn stage_in_that_fails_fails_every_rank() {
    let place = Place::new();
    let input = place.write("input", vec![0u8; 200 << 20]);
    let arguments = ["run", "--capacity", "128MiB", "--stage-in", input.to_str().unwrap(), "--", "true"];
    let mut all = ranks(&place, 2, &arguments);
    for rank in &mut all {
        let mut said = String::new();
        use std::io::Read;
        rank.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(rank.wait().code(), Some(125), "{said}");
        assert!(said.contains("No space left"), "{said}");
    }
    place.assert_nothing_left();
}

#[test]
fn mpirun_starts_runs_that_share_a_pool() {
    let place = Place::new();
    let found = Command::new("mpirun").arg("--version").output();
    if !found.is_ok_and(|o| o.status.success()) {
        println!("skipped: no mpirun");
        return;
    }
    let launch = |inner: &[&str], outer: &[&str]| {
        let mut words: Vec<String> = outer.iter().map(|s| s.to_string()).collect();
        words.extend(["mpirun", "-n", "3", "--oversubscribe", "--allow-run-as-root"].map(String::from));
        words.extend(inner.iter().map(|s| s.to_string()));
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        place.dress(&mut command);
        Ran::of(command.output().unwrap())
    };
    let forebay = common::forebay().to_str().unwrap();
    let script = "echo pool $FOREBAY_POOL; echo x > /forebay/rank$OMPI_COMM_WORLD_RANK";
    for (inner, outer) in [
        (vec![forebay, "run", "--quiet", "--", "sh", "-c", script], vec![]),
        (vec!["sh", "-c", script], vec![forebay, "run", "--quiet", "--"]),
        (vec![forebay, "run", "--quiet", "--", "sh", "-c", script], vec![forebay, "run", "--quiet", "--"]),
    ] {
        let ran = launch(&inner, &outer);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        let pools: Vec<&str> = ran.out.lines().filter_map(|l| l.strip_prefix("pool ")).collect();
        assert_eq!(pools.len(), 3, "{ran:?}");
        assert!(pools.iter().all(|p| *p == pools[0] && p.contains("/run-")), "{ran:?}");
        eventually("the pool is gone", || place.pools().is_empty());
    }
    place.assert_nothing_left();
}
