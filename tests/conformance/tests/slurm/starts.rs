//! Cases of `jobs` about starts: pools that cannot start, a job that is started twice, and starts that take too long.

use std::time::Duration;

use super::site::{can_mount, open_to_all, read, write, Site, ANN, BEN};

/// Each hold has the reason for which the prolog failed, and not what became of a pool that never was.
pub(super) fn pool_that_cannot_start_holds_the_job_with_the_reason(site: &Site) {
    let node = site.slurm.node_name(2);
    let script = "#BB_LUA forebay capacity=64MiB pool=forebay stage_out=/o:%D/store/blocked\n\
                  forebay run --quiet -- sh -c 'echo there >/forebay/o'\n";
    let job = site.submit(BEN, "blocked", &format!("--hold --nodelist={node}"), script).unwrap();
    let dir = site.dir().join(format!("node2/pools/33/{job}.0"));
    write(&dir.join("pool/other"), "this is no pool");
    let owned = std::process::Command::new("chown").arg("-R").arg(BEN).arg(dir.parent().unwrap()).status();
    assert!(owned.unwrap().success());
    assert!(site.slurm.on_first(&format!("scontrol release {job}")).status.success());
    let shown = site.await_shown(job, "slurm_bb_data_in");
    assert!(shown.contains(&format!("node_{node}:")) && !shown.contains("memory"), "{shown}");
    site.until("it is pending", || site.shown(job).starts_with("PENDING"));
    std::fs::remove_dir_all(&dir).unwrap();
    site.release_on(job, &node);
    site.await_shown(job, "COMPLETED");
    site.await_content(&site.store("blocked"), "there\n");
    site.assert_clean("a job whose pool could not start", Some(job));
}

/// Nothing serves the mount of such a pool any more, and nothing takes it away. Its data are on the disk.
pub(super) fn pool_on_a_disk_whose_processes_were_all_killed_is_staged_out(site: &Site) {
    if !can_mount() {
        return println!("skipped: a mount that nobody serves: no /dev/fuse or no fusermount3");
    }
    let script = "#BB_LUA forebay capacity=64MiB pool=forebay mode=ssd stage_out=/r:%D/store/all-killed\n\
                  echo here >$FOREBAY_MOUNT/r\nkill -KILL -1\n";
    let node = site.slurm.node_name(3);
    let job = site.submit(ANN, "all-killed", &format!("--nodelist={node}"), script).unwrap();
    site.await_shown(job, "COMPLETED");
    site.await_content(&site.store("all-killed"), "here\n");
    site.assert_clean("a job whose pool was killed as a whole", Some(job));
}

/// slurmctld starts a job again that it has lost sight of. `paths` is what it calls first.
pub(super) fn what_the_first_of_two_starts_has_left_is_kept_and_not_drained(site: &Site) {
    open_to_all(&site.store("twice"));
    for name in ["old", "gone"] {
        write(&site.store("twice").join(name), "of the store\n");
        open_to_all_files(&site.store("twice").join(name));
    }
    let script = "#BB_LUA forebay capacity=64MiB pool=forebay backing=%D/store/twice policy=request stage_out=/d:%D/store/twice-d\n\
                  set -e\nforebay run --quiet -- sh -c 'cd /forebay; echo more >>old; rm gone; mkdir d; echo n >d/n; \
                  echo b >\"a b\"; ln -s nowhere link'\n\
                  touch twice; while [ ! -e end-twice ]; do sleep .1; done\n";
    let job = site.submit(ANN, "twice", "", script).unwrap();
    site.await_file("twice");
    let paths = site.dir().join("work/paths");
    let again = site.slurm.on_first(&format!("forebay bb hook paths {job} - {}", paths.display()));
    let set = read(&paths);
    assert!(again.status.success() && set.contains(&format!("FOREBAY_JOB={job}.1\n")), "{set}");
    assert!(set.contains("FOREBAY_PREFIX=/forebay\n"), "{set}");
    site.mark("end-twice");
    let kept = site.dir().join(format!("kept/{job}.0"));
    site.until("what the run has left is kept", || {
        Site::text_of(&site.slurm.on_first("scontrol show bbstat")).contains(&format!("{job}.0 user"))
            && site.leftovers(Some(job)).is_empty()
    });
    assert_eq!(read(&site.store("twice/old")), "of the store\n");
    assert!(
        site.store("twice/gone").exists()
            && !site.store("twice/d").exists()
            && !site.store("twice-d").exists()
    );
    // What the stage-out would have copied is the first of the two.
    assert_eq!((read(&kept.join("0/d/n")), read(&kept.join("1/d/n"))), ("n\n".into(), "n\n".into()));
    assert_eq!(
        (read(&kept.join("1/old")), read(&kept.join("1/a b"))),
        ("of the store\nmore\n".into(), "b\n".into())
    );
    assert_eq!(std::fs::read_link(kept.join("1/link")).unwrap().to_str(), Some("nowhere"));
    let to = site.dir().join("work/rescued");
    let recovered = site.by(ANN, &format!("forebay recover {job} --to {}", to.display()));
    assert!(recovered.status.success(), "{}", Site::text_of(&recovered));
    assert_eq!(read(&to.join("old")), "of the store\nmore\n");
    assert!(site.by(ANN, &format!("scancel --hurry {job}")).status.success());
    site.assert_clean("a job that was started twice", Some(job));
}

fn open_to_all_files(file: &std::path::Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o666)).unwrap();
}

/// What docs/slurm.md says of BatchStartTimeout: a node that registers ends a stage-in that takes longer, and no other.
pub(super) fn stage_in_and_batch_start_timeout(site: &Site) {
    // Slurm adds 10 s.
    const LONGER: Duration = Duration::from_secs(14);
    write(&site.store("one/late"), "late");
    let path = site.dir().join("slurm.conf");
    let conf = read(&path);
    let line = conf.lines().find(|line| line.starts_with("BatchStartTimeout=")).unwrap();
    let registers = |conf: &str| {
        std::fs::write(&path, conf).unwrap();
        assert!(site.slurm.on_first("scontrol reconfigure").status.success());
    };
    let script = "#BB_LUA forebay capacity=64MiB pool=forebay stage_in=%D/store/one/late:/l stage_out=/o:%D/store/NAME\n\
                  echo run ${SLURM_RESTART_COUNT:-0} >NAME\nforebay run --quiet -- cp /forebay/l /forebay/o\n";
    let starts_late = |name: &str, conf: &str| {
        let held = site.hold("one");
        registers(conf);
        let job = site.submit(ANN, name, "--requeue", &script.replace("NAME", name)).unwrap();
        site.until("its stage-in waits", || {
            Site::text_of(&site.by(ANN, "forebay queue")).contains(&format!("stage-in of job {job}.0 waits"))
        });
        std::thread::sleep(LONGER);
        registers(conf);
        (job, held)
    };
    let (job, held) = starts_late("too-late", &conf.replace(line, "BatchStartTimeout=1"));
    let log = site.dir().join("ctld/slurmctld.log");
    site.until("Slurm takes it for missing", || read(&log).contains(&format!("Batch JobId={job} missing")));
    std::thread::sleep(Duration::from_secs(2));
    if read(&log).contains(&format!("for JobId={job} terminated by slurmctld")) {
        // Slurm has ended its own hook, and holds the job for ever (docs/slurm.md). Its prolog goes on until it has staged in.
        println!("Slurm has ended the post_run of job {job}; scancel");
        drop(held);
        site.until("its nodes have ended it", || site.leftovers(Some(job)).is_empty());
        registers(&conf);
        assert!(site.slurm.on_first(&format!("scancel {job}")).status.success());
        assert!(!site.dir().join("work/too-late").exists(), "its script must not begin");
    } else {
        site.until("its prolog gives up", || site.leftovers(Some(job)).is_empty());
        drop(held);
        registers(&conf);
        site.await_content(&site.store("too-late"), "late");
        site.await_shown(job, "COMPLETED");
        assert_eq!(read(&site.dir().join("work/too-late")), "run 1\n", "the script has not begun before");
    }
    site.assert_clean("a job whose stage-in took too long", Some(job));

    let (job, held) = starts_late("in-time", &conf);
    std::thread::sleep(Duration::from_secs(3));
    drop(held);
    site.await_shown(job, "COMPLETED");
    assert_eq!(read(&site.dir().join("work/in-time")), "run 0\n");
    site.await_content(&site.store("in-time"), "late");
    site.assert_clean("a job whose stage-in took long", Some(job));
}
