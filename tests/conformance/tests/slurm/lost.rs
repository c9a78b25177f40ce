//! Cases of `jobs` in which something is lost: slurmctld with the hooks that it runs, a node of a pool of several.

use super::site::{open_to_all, read, Site, ANN};

/// Has the calls of a hook wait as long as `hold` is in the jobs' directory. Slurm reads the plugin again for each call.
fn hold_hook(site: &Site, name: &str) -> String {
    let work = site.dir().join("work").display().to_string();
    let plugin = site.dir().join("burst_buffer.lua");
    let text = read(&plugin);
    site.mark("hold");
    let waits = format!(
        "\nlocal held_{name} = slurm_bb_{name}\nfunction slurm_bb_{name}(...)\n\
         os.execute('touch {work}/{name}-called; while [ -e {work}/hold ]; do sleep .1; done')\n\
         return held_{name}(...)\nend\n"
    );
    std::fs::write(&plugin, format!("{text}{waits}")).unwrap();
    text
}

/// Waits until Slurm has saved its jobs. `other` is one that lives.
pub(super) fn saves_its_jobs(site: &Site, other: u32) {
    let saved = site.dir().join("state/job_state");
    // The first file may have been begun before the last change.
    for _ in 0..2 {
        let changed = std::time::SystemTime::now();
        assert!(site.by(ANN, &format!("scontrol update JobId={other} Comment=saved")).status.success());
        site.until("Slurm saves its state", || {
            saved.metadata().and_then(|m| m.modified()).is_ok_and(|at| at > changed)
        });
    }
}

/// Kills slurmctld with its hooks once it has saved what it knows of jobs, but before it saves its burst buffers, which
/// it does each half minute. `other` is a job that lives.
fn kill_slurmctld(site: &mut Site, other: u32) {
    saves_its_jobs(site, other);
    site.slurm.kill("slurmctld -D", Some(1));
    for name in ["burst_buffer_lua_state", "burst_buffer_lua_state.old"] {
        let _ = std::fs::remove_file(site.dir().join("state").join(name));
    }
}

pub(super) fn teardown_lost_with_slurmctld(mut site: Site) -> Site {
    let on = format!("--nodelist={}", site.slurm.node_name(2));
    let make = "#BB_LUA forebay persistent name=orphan capacity=64MiB pool=forebay\ntrue\n";
    let first = site.submit(ANN, "orphan", &on, make).unwrap();
    site.await_shown(first, "COMPLETED");
    // The node is taken, so the next job stays staged in.
    let taken = site.submit(ANN, "taken", &format!("{on} --exclusive"), "touch takes; sleep 600\n").unwrap();
    site.await_file("takes");
    let job = site.submit(ANN, "user", &on, "#BB_LUA forebay use name=orphan\ntrue\n").unwrap();
    let of_job = |site: &Site| {
        let text = Site::text_of(&site.slurm.on_first(&format!("scontrol show bbstat {job}")));
        text.lines().find(|line| line.contains(&format!("  {job} run 0 "))).unwrap_or_default().to_owned()
    };
    site.until("it is staged in", || of_job(&site).contains(": staged in"));

    let plugin = hold_hook(&site, "job_teardown");
    assert!(site.by(ANN, &format!("scancel {job}")).status.success());
    // Slurm ends the hooks of a job that is cancelled, at times also the teardown that it has just begun. Then it is lost
    // without more.
    let (called, log) = (site.dir().join("work/job_teardown-called"), site.dir().join("ctld/slurmctld.log"));
    let ended = format!("teardown for JobId={job} terminated by slurmctld");
    site.until("its teardown", || called.exists() || read(&log).contains(&ended));
    let begins = called.exists();
    if begins {
        kill_slurmctld(&mut site, taken);
    }
    std::fs::write(site.dir().join("burst_buffer.lua"), plugin).unwrap();
    std::fs::remove_file(site.dir().join("work/hold")).unwrap();
    let pool = site.dir().join("registry/pools/orphan.json");
    let record = || read(&pool);
    if begins {
        assert!(record().contains(&format!("\"users\":[{job}]")), "its teardown was not lost: {}", record());
        site.slurm.start("slurmctld -D", Some(1));
    }

    site.until("the job does not use the pool any more", || record().contains("\"users\":[]"));
    assert!(of_job(&site).contains(": torn down"), "{}", of_job(&site));
    site.await_shown(job, "CANCELLED");
    if !begins {
        // Slurm itself forgets such a job when slurmctld is restarted (docs/slurm.md).
        kill_slurmctld(&mut site, taken);
        site.slurm.start("slurmctld -D", Some(1));
        let answers = || Site::text_of(&site.slurm.on_first("scontrol ping")).contains("is UP");
        site.until("slurmctld answers", answers);
    }
    let done = site.by(ANN, "forebay bb destroy orphan --discard");
    assert!(done.status.success(), "{}", Site::text_of(&done));
    assert!(site.by(ANN, &format!("scancel {taken}")).status.success());
    site.assert_clean("a job whose teardown was lost", Some(job));
    site
}

/// A job of two nodes that loses one is requeued, waits with what it has lost as the reason, and runs again elsewhere.
pub(super) fn job_that_lost_a_node_runs_again(mut site: Site) -> Site {
    let [spare, first, lost] = [1, 2, 3].map(|node| site.slurm.node_name(node));
    let script = "#BB_LUA forebay capacity=128MiB pool=forebay stage_out=/r/:%D/store/rerun\n\
                  set -e\nn=${SLURM_RESTART_COUNT:-0}\nforebay run --quiet -- mkdir /forebay/r\n\
                  export n; srun --overlap --nodes=2 --ntasks-per-node=1 forebay run --quiet -- \
                  sh -c 'echo by $SLURM_PROCID >/forebay/r/$n.$SLURM_PROCID'\n\
                  touch rerun$n; [ $n = 0 ] && sleep 600; true\n";
    let options = format!("--requeue --nodes=2 --nodelist={first},{lost}");
    let job = site.submit(ANN, "rerun", &options, script).unwrap();
    site.await_file("rerun0");
    site.slurm.kill("slurmd -D", Some(3));
    let shown = site.await_shown(job, "slurm_bb_data_out");
    assert!(shown.contains(&format!("1_file_lost_with_node_{lost},")), "{shown}\n{}", site.evidence());
    site.release_on(job, &format!("{spare},{first}"));
    site.await_file("rerun1");
    site.await_shown(job, "COMPLETED");
    for (name, content) in [("0.0", "by 0\n"), ("1.0", "by 0\n"), ("1.1", "by 1\n")] {
        site.await_content(&site.store(&format!("rerun/{name}")), content);
    }
    assert!(!site.store("rerun/0.1").exists());
    assert!(site.by(ANN, &format!("forebay recover {job}")).status.success());
    site.slurm.start("slurmd -D", Some(3));
    let swept =
        site.slurm.line(3, false, &format!("env SLURMD_NODENAME={lost} forebay bb sweep")).output().unwrap();
    assert!(swept.status.success(), "{}", Site::text_of(&swept));
    site.assert_clean("a job that ran again without its lost node", Some(job));
    site
}

/// One of the nodes of a pool dies with what it has. The other one's data are staged out, and the lost file is named.
pub(super) fn node_of_a_pool_lost(mut site: Site) -> Site {
    let (first, lost) = (site.slurm.node_name(2), site.slurm.node_name(3));
    let script = "#BB_LUA forebay capacity=128MiB pool=forebay stage_out=/r:%D/store/split\n\
                  set -e\nforebay run --quiet -- mkdir /forebay/r\n\
                  srun --overlap --nodes=2 --ntasks-per-node=1 forebay run --quiet -- \
                  sh -c 'echo by $SLURM_PROCID >/forebay/r/$SLURM_PROCID'\n\
                  touch split\nsleep 600\n";
    let options = format!("--no-requeue --nodes=2 --nodelist={first},{lost}");
    let job = site.submit(ANN, "split", &options, script).unwrap();
    open_to_all(&site.store("behind"));
    let script = "#BB_LUA forebay capacity=128MiB pool=forebay backing=%D/store/behind policy=request\n\
                  set -e\nsrun --overlap --nodes=2 --ntasks-per-node=1 forebay run --quiet -- \
                  sh -c 'echo by $SLURM_PROCID >/forebay/$SLURM_PROCID'\n\
                  touch behind\nsleep 600\n";
    let backed = site.submit(ANN, "behind", &options, script).unwrap();
    site.await_file("split");
    site.await_file("behind");
    site.slurm.kill("slurmd -D", Some(3));
    let shown = site.await_shown(backed, "slurm_bb_data_out");
    let said = format!("1_file_lost_with_node_{lost},_the_first_/1;_the_others_are_in_");
    assert!(shown.contains(&said), "{shown}\n{}", site.evidence());
    assert_eq!(read(&site.store("behind/0")), "by 0\n");
    assert!(!site.store("behind/1").exists());
    let shown = site.await_shown(job, "slurm_bb_data_out");
    let said = format!("1_file_lost_with_node_{lost},_the_first_/r/1;");
    assert!(shown.contains(&said), "{shown}\n{}", site.evidence());
    assert_eq!(read(&site.store("split/0")), "by 0\n");
    assert!(!site.store("split/1").exists());
    site.until("the node that is left has nothing of it", || {
        [job, backed].iter().all(|job| !site.leftovers(Some(*job)).contains("node2/pools"))
    });
    let stat = Site::text_of(&site.slurm.on_first(&format!("scontrol show bbstat {job}")));
    assert!(stat.contains(&format!("  {job}.0 user 5 in ")), "what was lost is not named: {stat}");
    let recovered = Site::text_of(&site.by(ANN, &format!("forebay recover {job}")));
    assert!(recovered.contains("/r/1\t"), "{recovered}");
    assert!(!site.dir().join(format!("kept/{job}.0")).exists());

    site.slurm.start("slurmd -D", Some(3));
    let swept =
        site.slurm.line(3, false, &format!("env SLURMD_NODENAME={lost} forebay bb sweep")).output().unwrap();
    assert!(swept.status.success(), "{}", Site::text_of(&swept));
    site.assert_clean("a job that lost a node of its pool", Some(job));
    site.assert_clean("a job that lost a node of its pool in front of a store", Some(backed));
    site
}
