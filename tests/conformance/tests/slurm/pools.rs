//! Cases of `jobs` about pools: where they are, mounted, in front of a store, persistent ones and their end.

use super::site::{can_mount, open_to_all, read, write, Site, ANN, BEN};

/// Waits for a job that is held; its reason.
fn held(site: &Site, job: u32, wanted: &str) -> String {
    site.await_shown(job, wanted);
    // Slurm may still be ending its run before.
    site.until("it is pending", || site.shown(job).starts_with("PENDING"));
    let shown = site.shown(job);
    assert!(shown.contains(wanted), "{shown}");
    shown
}

pub(super) fn stage_in_that_fails_holds_a_job_that_may_not_be_requeued(site: &Site) {
    let script = "#BB_LUA forebay capacity=64MiB pool=forebay stage_in=%D/store/absent:/a stage_out=/o:%D/store/once\n\
                  forebay run --quiet -- cp /forebay/a /forebay/o\n";
    let node = site.slurm.node_name(3);
    let job = site.submit(BEN, "absent", &format!("--no-requeue --nodelist={node}"), script).unwrap();
    let shown = held(site, job, "slurm_bb_data_in");
    assert!(shown.contains("store/absent"), "{shown}");
    let record = Site::text_of(&site.slurm.on_first(&format!("scontrol show job {job}")));
    assert!(record.contains("Requeue=0"), "its user's wish is as before: {record}");
    write(&site.store("absent"), "there");
    // Its user may not.
    site.release_on(job, &node);
    site.await_shown(job, "COMPLETED");
    site.await_content(&site.store("once"), "there");
    site.assert_clean("a job that may not be requeued", Some(job));
}

pub(super) fn pool_of_one_of_two_nodes_mounted_in_front_of_a_store(site: &Site) {
    if !can_mount() {
        return println!("skipped: a pool that is mounted: no /dev/fuse or no fusermount3");
    }
    open_to_all(&site.store("back"));
    write(&site.store("back/in"), "behind");
    let script =
        "#BB_LUA forebay capacity=96MiB pool=forebay nodes=1 mode=ssd backing=%D/store/back policy=request\n\
                  set -e\ncp $FOREBAY_MOUNT/in $FOREBAY_MOUNT/out\n\
                  srun --overlap --nodes=2 --ntasks-per-node=1 sh -c \
                  'cat $FOREBAY_MOUNT/out >$FOREBAY_MOUNT/seen.$SLURM_PROCID'\n\
                  forebay status >status; touch mounted; while [ ! -e unmount ]; do sleep .1; done\n";
    let job = site.submit(ANN, "mounted", "--nodes=2", script).unwrap();
    site.await_file("mounted");
    let mounts = site.slurm.mounts().iter().filter(|mount| mount.contains(&format!("/{job}."))).count();
    assert_eq!(mounts, 2, "{:?}", site.slurm.mounts());
    let status = read(&site.dir().join("work/status"));
    assert_eq!(status.lines().filter(|line| line.contains(" none ")).count(), 1, "{status}");
    assert!(status.contains("ssd"), "{status}");
    assert!(!site.store("back/out").exists(), "policy=request copies nothing by itself");
    site.mark("unmount");
    site.await_shown(job, "COMPLETED");
    site.await_content(&site.store("back/out"), "behind");
    assert_eq!(
        (read(&site.store("back/seen.0")), read(&site.store("back/seen.1"))),
        ("behind".into(), "behind".into())
    );
    site.assert_clean("a pool that was mounted", Some(job));
}

pub(super) fn persistent_pool_elsewhere_and_destroyed_by_its_user(site: &Site) {
    let there = site.slurm.node_name(2);
    let script = "#BB_LUA forebay persistent name=own capacity=64MiB pool=forebay\n\
                  forebay run --quiet -- sh -c 'echo mine >/forebay/mine'\n\
                  touch made; while [ ! -e leave ]; do sleep .1; done\n";
    let job = site.submit(ANN, "own", &format!("--nodelist={there}"), script).unwrap();
    site.await_file("made");
    let refused = |user: &str, words: &str, why: &str| {
        let output = site.by(user, &format!("forebay bb destroy {words}"));
        let text = Site::text_of(&output);
        assert!(!output.status.success() && text.contains(why), "{words}: {text}");
    };
    refused(ANN, "own", &format!("the jobs [{job}] use it"));
    site.mark("leave");
    site.await_shown(job, "COMPLETED");

    let here = site.slurm.node_name(1);
    let script = "#BB_LUA forebay use name=own\ntouch must-not-be\n";
    let elsewhere = site.submit(ANN, "elsewhere", &format!("--nodelist={here}"), script).unwrap();
    let shown = held(site, elsewhere, "slurm_bb_data_in");
    assert!(shown.contains(&format!("--nodelist={there}")), "{shown}");
    assert!(site.by(ANN, &format!("scancel {elsewhere}")).status.success());
    site.until("no job uses the pool", || {
        Site::text_of(&site.slurm.on_first("scontrol show bbstat own")).contains("used by []")
    });
    assert!(!site.dir().join("work/must-not-be").exists());

    refused(BEN, "own", "another user");
    refused(ANN, "none", "none of this name");
    refused(ANN, "own", "1 file of it may be nowhere else");
    let done = site.by(ANN, "forebay bb destroy own --discard");
    assert!(done.status.success(), "{}", Site::text_of(&done));
    site.until("its nodes have left it", || !has_pool(site, 2, "p.own."));
}

fn has_pool(site: &Site, node: usize, prefix: &str) -> bool {
    let pools = site.dir().join(format!("node{node}/pools/5"));
    let mut names = std::fs::read_dir(pools).into_iter().flatten().flatten();
    names.any(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
}

pub(super) fn persistent_pool_in_front_of_a_store_is_drained_before_it_is_destroyed(site: &Site) {
    open_to_all(&site.store("front"));
    let on = format!("--nodelist={}", site.slurm.node_name(3));
    let script = "#BB_LUA forebay persistent name=front capacity=64MiB pool=forebay backing=%D/store/front policy=request\n\
                  forebay run --quiet -- sh -c 'echo late >/forebay/late'\n";
    let first = site.submit(ANN, "front", &on, script).unwrap();
    site.await_shown(first, "COMPLETED");
    assert!(!site.store("front/late").exists());
    let last = site
        .submit(
            ANN,
            "drop",
            &format!("{on} --dependency=afterburstbuffer:{first}"),
            "#BB_LUA forebay destroy name=front\ntrue\n",
        )
        .unwrap();
    site.await_shown(last, "COMPLETED");
    site.until("the pool is gone", || !has_pool(site, 3, "p.front."));
    assert_eq!(read(&site.store("front/late")), "late\n");
}
