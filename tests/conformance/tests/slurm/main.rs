//! Jobs on a real Slurm of three nodes.
//!
//! Slurm tracks steps with control groups, as on clusters, so it kills all processes that a step leaves running. The
//! tests need root, Debian's Slurm and version 1 of control groups: with version 2, Slurm needs systemd to create a
//! group.

#[path = "../cluster/bed.rs"]
#[allow(dead_code)] // links are not cut here
mod bed;
mod cluster;
mod jobs;
mod lost;
mod pools;
mod scripts;
mod site;
mod soak;
mod starts;

use std::process::Command;

use cluster::{lacking, Slurm, NODES};

#[test]
fn pool_of_a_job_lives_as_long_as_the_step_that_started_it_and_other_steps_use_it() {
    if let Some(why) = lacking() {
        return println!("skipped: no Slurm of three nodes here: {why}");
    }
    let slurm = Slurm::up();
    // A short form of the script in the README.
    let (text, well) = slurm.batch(
        r#"set -e
srun --overlap --ntasks-per-node=1 forebay up --job --capacity 96MiB --mount $HERE/mnt &
forebay status --wait 60 >/dev/null
srun --overlap --ntasks-per-node=2 forebay run --quiet -- sh -c 'mkdir /forebay/$SLURM_PROCID; echo by $SLURM_PROCID > /forebay/$SLURM_PROCID/f'
echo $(cat $HERE/mnt/?/f)
srun --overlap --ntasks-per-node=1 sh -c 'cat $HERE/mnt/?/f | md5sum' | sort -u | wc -l
srun --overlap --ntasks-per-node=1 forebay down
wait
echo all ended
"#,
    );
    assert!(well, "{text}");
    assert!(text.contains("by 0 by 1 by 2 by 3 by 4 by 5\n1\n"), "{text}");
    assert!(text.contains("is down; ") && text.ends_with("all ended\n"), "{text}");
    assert_eq!(text.matches("so this one stays until `forebay down`").count(), NODES, "{text}");
    assert_eq!(leftovers(&slurm), "", "nothing is left of the pool");

    mpi_programs_in_a_job(&slurm);

    // With `--background` the step ends and Slurm kills the pool with it. That is why `up --job` stays without it.
    let (text, well) = slurm.batch(
        r#"srun --ntasks-per-node=1 forebay up --job --background --capacity 96MiB
forebay status && echo it is up
srun --ntasks-per-node=1 forebay down
true
"#,
    );
    assert!(well && !text.contains("it is up") && text.contains("is not up"), "{text}");

    // A cancelled job: its pool is stopped and its memory is freed.
    let (text, _) = slurm.batch(
        r#"srun --overlap --ntasks-per-node=1 forebay up --job --capacity 96MiB &
forebay status --wait 60 >/dev/null && echo it is up
scancel $SLURM_JOB_ID
wait
"#,
    );
    assert!(text.contains("it is up"), "{text}");
    slurm.wait("an end of the pool of a job that was cancelled", || leftovers(&slurm).is_empty());
}

/// Ranks on all three nodes. Each MPI's own launcher starts them, with helpers that Slurm starts. They write and read
/// one striped file and one file each, through their own node's pool.
fn mpi_programs_in_a_job(slurm: &Slurm) {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster/ranks.c");
    for (compiler, launcher) in [
        (
            "mpicc.openmpi",
            "mpirun.openmpi --allow-run-as-root --mca orte_tmpdir_base $HERE/sessions --mca btl tcp,self \
             --map-by node -n 6",
        ),
        // UCX treats namespaces of one kernel as one host and would use shared memory.
        (
            "mpicc.mpich",
            "env UCX_TLS=tcp,self CHECK_WITHOUT_END=1 mpiexec.hydra -disable-auto-cleanup -n 6 -ppn 2",
        ),
    ] {
        let program = slurm.dir.join(format!("ranks.{compiler}"));
        let compiled = Command::new(compiler).args(["-O1", "-o"]).arg(&program).arg(source).output();
        if !compiled.as_ref().is_ok_and(|output| output.status.success()) {
            println!("skipped: ranks in a job, as nothing can be compiled with {compiler}: {compiled:?}");
            continue;
        }
        let (text, well) = slurm.batch(&format!(
            r#"set -e
srun --overlap --ntasks-per-node=1 forebay up --job --capacity 96MiB --mount $HERE/mnt &
forebay status --wait 60 >/dev/null
mkdir $HERE/mnt/d
forebay run --quiet -- timeout 60 {launcher} {} /forebay/d
srun --overlap --ntasks-per-node=1 sh -c 'cat $HERE/mnt/d/* | md5sum' | sort -u | wc -l
srun --overlap --ntasks-per-node=1 forebay fsck >/dev/null
srun --overlap --ntasks-per-node=1 forebay down
wait
"#,
            program.display()
        ));
        assert!(well && text.contains("all 6 ranks"), "{compiler}: {text}");
        assert!(text.contains("\n1\n"), "all nodes see the same: {text}");
    }
}

/// What remains of pools on all nodes.
fn leftovers(slurm: &Slurm) -> String {
    let list = |node: usize| {
        let pools = slurm.dir.join(format!("node{node}/pool"));
        let names = std::fs::read_dir(pools).into_iter().flatten().flatten();
        names.map(|e| format!("{node}: {} ", e.file_name().to_string_lossy())).collect::<String>()
    };
    (1..=NODES).map(list).collect()
}
