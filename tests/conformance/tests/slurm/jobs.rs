//! Jobs with burst buffers: Slurm's burst_buffer/lua, prolog and epilog on a real Slurm.
//!
//! All cases share one Slurm. After each case the nodes are looked at for leftovers.

use std::time::Duration;

use super::cluster::NODES;
use super::site::{can_mount, lacking_plugin, open_to_all, read, write, Site, ANN, BEN};
use super::{lost, pools, soak, starts};

/// A case: its name, and what it does.
type Case = (&'static str, fn(&Site));

/// Pools are mounted. Stores with and without turns.
const SETTINGS: &str = "mount = true\n\
                      [[store]]\npath = '%D/store'\nat_once = 0\n\
                      [[store]]\npath = '%D/store/one'\nat_once = 1\n\
                      [[store]]\npath = '%D/store/two'\nat_once = 1\n";

#[test]
fn jobs_with_burst_buffers_lose_nothing_and_leave_nothing() {
    if let Some(why) = lacking_plugin() {
        return println!("skipped: no Slurm of three nodes with burst buffers here: {why}");
    }
    let settings = if can_mount() { SETTINGS.to_owned() } else { SETTINGS.replace("true", "false") };
    let is_soak = std::env::var_os("FOREBAY_SOAK").is_some();
    let site = Site::up("256MiB", &settings);
    // slurmctld that was killed finds a job missing after two minutes, and runs it again some minutes later.
    let site = if is_soak { site.awaited(Duration::from_secs(600)) } else { site };
    let cases: &[Case] = &[
        ("succeeds", job_that_succeeds),
        ("fails", job_that_fails),
        ("bad directive", bad_directives_are_refused),
        ("cancelled while it runs", job_cancelled_while_it_runs),
        ("cancelled while staging in", job_cancelled_while_staging_in),
        ("cancelled while staging out", job_cancelled_while_staging_out),
        ("stage-in that fails", stage_in_that_fails_holds_the_job_until_it_is_mended),
        ("stage-out that fails", stage_outs_that_fail),
        ("requeued, and a killed daemon", requeued_job_and_killed_daemon),
        ("chain", chain_of_jobs_on_a_persistent_pool),
        ("not to be requeued", pools::stage_in_that_fails_holds_a_job_that_may_not_be_requeued),
        ("mounted, in front of a store", pools::pool_of_one_of_two_nodes_mounted_in_front_of_a_store),
        ("destroyed", pools::persistent_pool_elsewhere_and_destroyed_by_its_user),
        ("not started", starts::pool_that_cannot_start_holds_the_job_with_the_reason),
        ("started twice", starts::what_the_first_of_two_starts_has_left_is_kept_and_not_drained),
        ("drained", pools::persistent_pool_in_front_of_a_store_is_drained_before_it_is_destroyed),
    ];
    std::thread::scope(|scope| {
        for &(name, case) in cases {
            let site = &site;
            std::thread::Builder::new()
                .name(name.to_owned())
                .spawn_scoped(scope, move || case(site))
                .unwrap();
        }
    });
    starts::pool_on_a_disk_whose_processes_were_all_killed_is_staged_out(&site);
    let site = slurmctld_restarted_while_a_job_runs(site);
    let site = lost::teardown_lost_with_slurmctld(site);
    let site = lost::node_of_a_pool_lost(site);
    // These take minutes: Slurm's shortest time limit is one, and a lost node is waited for.
    let site = if is_soak {
        job_out_of_time_and_killed_supervisor(&site);
        starts::stage_in_and_batch_start_timeout(&site);
        let site = lost::job_that_lost_a_node_runs_again(node_lost_while_a_job_runs(site));
        soak::kills_at_random(site)
    } else {
        site
    };
    // A pool that was destroyed without a job on its node leaves an empty directory, which belongs to root.
    for node in 1..=NODES {
        let swept = site.slurm.line(node, false, "forebay bb sweep").output().unwrap();
        assert!(swept.status.success(), "{}", Site::text_of(&swept));
    }
    site.assert_clean("all jobs", None);
}

fn job_that_succeeds(site: &Site) {
    write(&site.store("case/a"), "input");
    let job = site
        .submit(
            ANN,
            "good",
            "--nodes=2",
            "#BB_LUA forebay capacity=128MiB pool=forebay stage_in=%D/store/case:/case\n\
             #STAGE OUT /out %D/store/good\n\
             set -e\nforebay run --quiet -- sh -c 'mkdir /forebay/out; cp /forebay/case/a /forebay/out/a'\n\
             srun --overlap --nodes=2 --ntasks-per-node=1 forebay run --quiet -- sh -c 'echo by $SLURM_PROCID >/forebay/out/$SLURM_PROCID'\n\
             touch running; while [ ! -e go ]; do sleep .1; done\n",
        )
        .unwrap();
    site.await_file("running");
    let stat = Site::text_of(&site.slurm.on_first(&format!("scontrol show bbstat {job}")));
    assert!(stat.contains(&format!("{job} run 0 user 5 128 MiB: running")), "{stat}");
    let burst = Site::text_of(&site.slurm.on_first("scontrol show burst"));
    assert!(burst.contains(&format!("JobID={job}")) && burst.contains("Name=lua"), "{burst}");
    assert!(burst.contains("TotalSpace=768M"), "{burst}");
    site.mark("go");
    let shown = site.await_shown(job, "COMPLETED");
    assert!(!shown.contains("BurstBuffer"), "{shown}");
    site.assert_clean("a job that succeeds", Some(job));
    assert_eq!(read(&site.store("good/a")), "input", "{}", site.evidence());
    assert_eq!(read(&site.store("good/1")), "by 1\n");
}

fn job_that_fails(site: &Site) {
    let script = "#BB_LUA forebay capacity=64MiB pool=forebay stage_out=/r/:%D/store/failed\n\
                  forebay run --quiet -- sh -c 'mkdir /forebay/r; echo $SLURM_ARRAY_TASK_ID >/forebay/r/f$SLURM_ARRAY_TASK_ID'\nexit 3\n";
    // An array: each task is a job with a pool of its own.
    let job = site.submit(ANN, "bad", "--array=1-2", script).unwrap();
    site.await_shown(job, "FAILED");
    for task in 1..=2 {
        site.await_content(&site.store(&format!("failed/f{task}")), &format!("{task}\n"));
    }
    site.assert_clean("jobs that fail", Some(job));
}

fn bad_directives_are_refused(site: &Site) {
    for (line, word, remedy) in [
        ("capacity=64MiB pool=forebay stage_inn=/a:/b", "stage_inn", "did you mean stage_in?"),
        ("capacity=900GiB pool=forebay", "900 GiB", "smaller capacity="),
        ("use", "use names no pool", "use name=NAME"),
    ] {
        let refused =
            site.submit(ANN, "refused", "", &format!("#BB_LUA forebay {line}\ntrue\n")).unwrap_err();
        assert!(refused.contains(word) && refused.contains(remedy), "{line}: {refused}");
    }
}

fn job_cancelled_while_it_runs(site: &Site) {
    let script = "#BB_LUA forebay capacity=64MiB pool=forebay stage_out=/r:%D/store/cancelled\n\
                  forebay run --quiet -- sh -c 'echo kept >/forebay/r'; touch wrote; sleep 600\n";
    let job = site.submit(ANN, "cancelled", "", script).unwrap();
    site.await_file("wrote");
    assert!(site.by(ANN, &format!("scancel {job}")).status.success());
    site.await_shown(job, "CANCELLED");
    site.await_content(&site.store("cancelled"), "kept\n");
    site.assert_clean("a job that was cancelled", Some(job));
}

fn job_cancelled_while_staging_in(site: &Site) {
    write(&site.store("one/x"), "x");
    let _held = site.hold("one");
    let script = "#BB_LUA forebay capacity=64MiB pool=forebay stage_in=%D/store/one:/x\ntouch must-not-run\n";
    let job = site.submit(ANN, "early", "", script).unwrap();
    site.until("its stage-in waits", || {
        let queue = Site::text_of(&site.by(ANN, "forebay queue"));
        queue.contains(&format!("2. stage-in of job {job}.0 waits"))
    });
    assert!(site.by(ANN, &format!("scancel {job}")).status.success());
    site.await_shown(job, "CANCELLED");
    site.until("it is clean", || site.leftovers(Some(job)).is_empty());
    assert!(!site.dir().join("work/must-not-run").exists());
}

fn job_cancelled_while_staging_out(site: &Site) {
    let _held = site.hold("two");
    let script = "#BB_LUA forebay capacity=64MiB pool=forebay stage_out=/r:%D/store/two/r\n\
                  forebay run --quiet -- sh -c 'echo r >/forebay/r'\n";
    let job = site.submit(ANN, "late", "", script).unwrap();
    site.until("its stage-out waits", || {
        let queue = Site::text_of(&site.by(ANN, "forebay queue --json"));
        queue.contains(&format!("\"job\": \"{job}.0\"")) && queue.contains("\"runs\": false")
    });
    assert!(
        site.shown(job).contains("STAGE_OUT") || site.shown(job).contains("Stage-out"),
        "{}",
        site.shown(job)
    );
    assert!(site.by(ANN, &format!("scancel --hurry {job}")).status.success());
    site.until("it is clean", || site.leftovers(Some(job)).is_empty());
    assert!(!site.store("two/r").exists(), "given up");
}

fn stage_in_that_fails_holds_the_job_until_it_is_mended(site: &Site) {
    let script = "#BB_LUA forebay capacity=64MiB pool=forebay stage_in=%D/store/missing:/m stage_out=/o:%D/store/mended\n\
                  forebay run --quiet -- cp /forebay/m /forebay/o\n";
    let node = site.slurm.node_name(1);
    let job = site.submit(BEN, "missing", &format!("--nodelist={node}"), script).unwrap();
    let shown = site.await_shown(job, "slurm_bb_data_in");
    assert!(shown.contains("PENDING") && shown.contains("store/missing"), "{shown}");
    assert!(site.shown(job).contains("PENDING"));
    write(&site.store("missing"), "there");
    site.release_on(job, &node);
    site.await_shown(job, "COMPLETED");
    site.await_content(&site.store("mended"), "there");
    site.assert_clean("a job whose stage-in failed", Some(job));
}

fn stage_outs_that_fail(site: &Site) {
    // A file where a directory is needed.
    write(&site.store("flaky"), "");
    write(&site.store("never"), "");
    let script = |name: &str| {
        format!(
            "#BB_LUA forebay capacity=64MiB pool=forebay stage_out=/r:%D/store/{name}/r\n\
             forebay run --quiet -- sh -c 'mkdir /forebay/r; echo {name} >/forebay/r/f'\n"
        )
    };
    let flaky = site.submit(ANN, "flaky", "", &script("flaky")).unwrap();
    let never = site.submit(ANN, "never", "", &script("never")).unwrap();
    let said = site.dir().join(format!("registry/results/{flaky}.0/said"));
    site.until("two tries have failed", || read(&said).contains("try 2 failed"));
    std::fs::remove_file(site.store("flaky")).unwrap();
    open_to_all(&site.store("flaky"));
    site.await_content(&site.store("flaky/r/f"), "flaky\n");
    site.await_shown(flaky, "COMPLETED");
    site.assert_clean("a stage-out that failed twice", Some(flaky));

    let shown = site.await_shown(never, "slurm_bb_data_out");
    assert!(shown.contains("recover"), "{shown}");
    site.assert_clean("a stage-out that failed: the data are kept, and no node has them", Some(never));
    assert_eq!(read(&site.dir().join(format!("kept/{never}.0/0/r/f"))), "never\n");
    assert!(!site.by(BEN, &format!("forebay recover {never}")).status.success(), "they are not his");
    std::fs::remove_file(site.store("never")).unwrap();
    open_to_all(&site.store("never"));
    let recovered = site.by(ANN, &format!("forebay recover {never}"));
    assert!(recovered.status.success(), "{}", Site::text_of(&recovered));
    assert_eq!(read(&site.store("never/r/f")), "never\n");
    assert!(!site.dir().join(format!("kept/{never}.0")).exists());
}

fn requeued_job_and_killed_daemon(site: &Site) {
    let script = "#BB_LUA forebay capacity=64MiB pool=forebay stage_out=/r/:%D/store/again\n\
                  n=${SLURM_RESTART_COUNT:-0}\n\
                  forebay run --quiet -- sh -c \"mkdir /forebay/r; echo $n >/forebay/r/run$n\"; touch run$n\n\
                  [ $n = 0 ] && sleep 600\n\
                  kill -KILL $(forebay status --json | sed -n 's/.*\"worker\": \\([0-9]*\\).*/\\1/p')\n\
                  forebay run --quiet -- sh -c 'echo after >/forebay/r/after'\n";
    let node = site.slurm.node_name(2);
    let job = site.submit(ANN, "again", &format!("--requeue --nodelist={node}"), script).unwrap();
    site.await_file("run0");
    assert!(site.by(ANN, &format!("scontrol requeuehold {job}")).status.success());
    site.await_content(&site.store("again/run0"), "0\n");
    site.release_on(job, &node);
    site.await_file("run1");
    site.await_shown(job, "COMPLETED");
    site.await_content(&site.store("again/run1"), "1\n");
    site.await_content(&site.store("again/after"), "after\n");
    site.assert_clean("a job that was requeued", Some(job));
}

fn chain_of_jobs_on_a_persistent_pool(site: &Site) {
    write(&site.store("chain/more"), "more");
    let first = "#BB_LUA forebay persistent name=chain capacity=64MiB pool=forebay\n\
                 forebay run --quiet -- sh -c 'echo made by $SLURM_JOB_ID >/forebay/made'\n";
    let second =
        "#BB_LUA forebay use name=chain stage_in=%D/store/chain/more:/more stage_out=/both:%D/store/both\n\
                  forebay run --quiet -- sh -c 'cat /forebay/made /forebay/more >/forebay/both'\n";
    let node = site.slurm.node_name(3);
    let on = format!("--nodelist={node}");
    let a = site.submit(ANN, "first", &on, first).unwrap();
    let b = site.submit(ANN, "second", &format!("{on} --dependency=afterburstbuffer:{a}"), second).unwrap();
    let foreign = site
        .submit(
            BEN,
            "foreign",
            &format!("{on} --dependency=afterburstbuffer:{a}"),
            "#BB_LUA forebay use name=chain\ntouch must-not\n",
        )
        .unwrap();
    let denied = site.await_shown(foreign, "slurm_bb_setup");
    assert!(denied.contains("another_user") || denied.contains("another user"), "{denied}");
    assert!(site.by(BEN, &format!("scancel {foreign}")).status.success());
    site.await_shown(b, "COMPLETED");
    site.await_content(&site.store("both"), &format!("made by {a}\nmore"));
    let stat = Site::text_of(&site.slurm.on_first("scontrol show bbstat chain"));
    assert!(stat.contains(&format!("chain user 5 64 MiB of job {a}, used by []")), "{stat}");
    let free = Site::text_of(&site.slurm.on_first("forebay bb hook pools"));
    // Those of the other cases too, as long as they are there.
    let is_less = [704, 640, 576].iter().any(|mib| free.contains(&format!("\"free\":{mib},")));
    assert!(is_less, "its space is not free: {free}");
    let last = site.submit(ANN, "last", &on, "#BB_LUA forebay destroy name=chain\ntrue\n").unwrap();
    site.await_shown(last, "COMPLETED");
    site.until("the pool is gone", || {
        let pools = site.dir().join("node3/pools/5");
        !std::fs::read_dir(pools)
            .into_iter()
            .flatten()
            .flatten()
            .any(|e| e.file_name().to_string_lossy().starts_with("p."))
    });
    assert!(!site.dir().join("work/must-not").exists());
}

fn slurmctld_restarted_while_a_job_runs(mut site: Site) -> Site {
    let script = "#BB_LUA forebay capacity=64MiB pool=forebay stage_out=/r:%D/store/restarted\n\
                  forebay run --quiet -- sh -c 'echo r >/forebay/r'; touch up; while [ ! -e done ]; do sleep .1; done\n";
    let job = site.submit(ANN, "restart", "", script).unwrap();
    site.await_file("up");
    // Slurm saves its state some seconds after a change.
    let changed = std::time::SystemTime::now();
    assert!(site.by(ANN, &format!("scontrol update JobId={job} Comment=saved")).status.success());
    let saved = site.dir().join("state/job_state");
    site.until("Slurm saves its state", || {
        saved.metadata().and_then(|m| m.modified()).is_ok_and(|at| at > changed)
    });
    site.slurm.kill("slurmctld -D", Some(1));
    site.mark("done");
    site.slurm.start("slurmctld -D", Some(1));
    site.await_shown(job, "COMPLETED");
    site.await_content(&site.store("restarted"), "r\n");
    site.assert_clean("a job over a restart of slurmctld", Some(job));
    site
}

fn job_out_of_time_and_killed_supervisor(site: &Site) {
    let slow = "#BB_LUA forebay capacity=64MiB pool=forebay stage_out=/r:%D/store/slow\n\
                forebay run --quiet -- sh -c 'echo slow >/forebay/r'; sleep 600\n";
    let killed = "#BB_LUA forebay capacity=64MiB pool=forebay MODE stage_out=/r:%D/store/killed\n\
                  forebay run --quiet -- sh -c 'echo killed >/forebay/r'\n\
                  kill -KILL $(forebay status --json | sed -n 's/.*\"supervisor\": \\([0-9]*\\).*/\\1/p')\n";
    let slow = site.submit(ANN, "slow", "--time=1", slow).unwrap();
    let in_memory = site.submit(ANN, "memory", "", &killed.replace("MODE", "mode=dram")).unwrap();
    let shown = site.await_shown(in_memory, "slurm_bb_data_out");
    assert!(shown.contains("were_in_memory"), "a loss is not told: {shown}");
    assert!(!site.store("killed").exists());
    let killed = site.submit(ANN, "killed", "", &killed.replace("MODE", "mode=ssd")).unwrap();
    site.await_content(&site.store("killed"), "killed\n");
    site.assert_clean("a job whose pool was killed", Some(killed));
    site.await_content(&site.store("slow"), "slow\n");
    site.await_shown(slow, "TIMEOUT ");
    site.assert_clean("a job that ran out of time", Some(slow));
}

/// The node's processes end with its PID namespace, as in a crash, but its files stay, as if slurmd alone had died.
fn node_lost_while_a_job_runs(mut site: Site) -> Site {
    let node = site.slurm.node_name(3);
    let script = "#BB_LUA forebay capacity=64MiB pool=forebay mode=ssd stage_out=/r:%D/store/lost\n\
                  forebay run --quiet -- sh -c 'echo lost >/forebay/r'; touch wrote-it; sleep 600\n";
    let job = site.submit(ANN, "lost", &format!("--no-requeue --nodelist={node}"), script).unwrap();
    site.await_file("wrote-it");
    site.slurm.kill("slurmd -D", Some(3));
    let shown = site.await_shown(job, "slurm_bb_data_out");
    assert!(shown.contains(&node) && shown.contains("until_a_reboot"), "{shown}");
    assert!(!site.store("lost").exists());
    site.slurm.start("slurmd -D", Some(3));
    // An administrator runs it by hand, without the variables that slurmd sets.
    let swept = site.slurm.line(3, false, "forebay bb sweep").output().unwrap();
    assert!(swept.status.success(), "{}", Site::text_of(&swept));
    assert_eq!(read(&site.store("lost")), "lost\n", "{}", Site::text_of(&swept));
    site.assert_clean("a job whose node was lost", Some(job));
    site
}
