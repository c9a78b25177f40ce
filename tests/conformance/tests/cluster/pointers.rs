//! MPI's shared file pointers, ordered calls and atomic mode with ranks on several nodes, which share no memory. Each
//! rank has its own boot identity, because ranks with the same one consider themselves on one node.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use crate::nodes::{plain, program, said, until, Cluster, PATIENCE_S};
use crate::volumes::{succeeds, volume};

const NODES: usize = 4;
/// How often the workers of one pool are killed.
const KILLS_MAX: usize = 60;
/// What the driver prints when ranks begin to use a pointer that a daemon keeps.
const KEPT_BY_DAEMON: &str = "a daemon keeps their file pointer";

struct Mpi {
    compiler: &'static str,
    launcher: &'static [&'static str],
    /// More arguments, with which the other ranks continue after one was killed.
    outliving: &'static [&'static str],
    /// False if ranks on one host may wait for ever in MPI_Finalize when they consider themselves on several hosts.
    /// Then they end without it.
    ends: bool,
}

const MPIS: [Mpi; 2] = [
    Mpi {
        compiler: "mpicc.openmpi",
        launcher: &["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"],
        outliving: &["--mca", "orte_enable_recovery", "1", "--mca", "orte_abort_on_non_zero_status", "0"],
        ends: true,
    },
    Mpi {
        compiler: "mpicc.mpich",
        launcher: &["mpiexec.hydra", "-disable-auto-cleanup"],
        outliving: &[],
        ends: false,
    },
];

fn is_soak() -> bool {
    std::env::var_os("FOREBAY_SOAK").is_some()
}

/// Builds a program of mpi/tests in the cluster's directory. None, after printing the reason, if it cannot be built or
/// run.
fn built(c: &Cluster, mpi: &Mpi, name: &str) -> Option<PathBuf> {
    let source = format!("{}/../../mpi/tests/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let at = c.file().with_file_name(format!("{name}-{}", mpi.compiler));
    let output =
        Command::new(mpi.compiler).arg("-O1").arg("-o").arg(&at).args([&source, "-lpthread"]).output();
    if !output.is_ok_and(|output| output.status.success()) {
        println!("skipped: {} does not build {name}.c", mpi.compiler);
        return None;
    }
    if !plain("unshare", &["--mount", "true"]).status.success() {
        println!("skipped: this user may not give ranks boot identities of their own");
        return None;
    }
    Some(at)
}

/// Runs a command line as one rank on each node. The launcher says that all are on one node: `forebay run` gets the true
/// number of ranks on its node, so that it does not wait for more.
fn by_ranks_apart(c: &Cluster, mpi: &Mpi, program_line: &str) -> Output {
    ranks_apart(c, mpi, &[], program_line).env("RANKS_HERE", "1").output().unwrap()
}

/// The command of [`by_ranks_apart`].
fn ranks_apart(c: &Cluster, mpi: &Mpi, words: &[&str], program_line: &str) -> Command {
    let dir = c.file().parent().map(Path::to_path_buf).unwrap();
    let script = format!(
        "n=$((${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}} + 1)); boot=/proc/sys/kernel/random/boot_id\n\
         export OMPI_COMM_WORLD_LOCAL_SIZE=${{RANKS_HERE:-$OMPI_COMM_WORLD_LOCAL_SIZE}}\n\
         cat /proc/sys/kernel/random/uuid > {dir}/boot$n && mount --bind {dir}/boot$n $boot || exit 1\n\
         exec {forebay} run --quiet --pool {dir}/n$n -- {program_line}",
        dir = dir.display(),
        forebay = program("forebay").display()
    );
    let mut command = Command::new("/usr/bin/timeout");
    // An MPI without the driver takes the name of a volume for that of a file.
    command.current_dir(&dir);
    command.arg(PATIENCE_S).args(mpi.launcher).args(words).args(["-n", &NODES.to_string()]);
    command.args(["unshare", "--mount", "sh", "-c", &script]);
    command.env_remove("FOREBAY_POOL").envs(c.apart()).env("FOREBAY_MPI_DEBUG", "1").env("UCX_TLS", "tcp");
    command.env("FOREBAY_MPI_PREFIX", "none,xpd:");
    if !mpi.ends {
        command.env("CHECK_WITHOUT_END", "1");
    }
    command
}

/// Whether the checks of all ranks passed. MPICH's launcher counts a rank that ends without MPI_Finalize as killed by signal 1
/// if it reads the end of its connection, which `forebay run` has too, after that of the rank.
fn has_passed(mpi: &Mpi, ran: &Output) -> bool {
    let words = said(ran);
    let is_made_up = !mpi.ends && words.contains("EXIT STRING: Hangup (signal 1)");
    words.contains("passed") && (ran.status.success() || is_made_up)
}

fn assert_passed(mpi: &Mpi, ran: &Output) {
    let words = said(ran);
    assert!(has_passed(mpi, ran), "{words}");
    assert!(words.contains(KEPT_BY_DAEMON), "its ranks shared memory: {words}");
}

#[test]
fn every_call_of_mpi_io_works_by_ranks_on_several_nodes() {
    let c = Cluster::up("apart", NODES);
    for mpi in &MPIS {
        for name in ["calls", "datarep"] {
            let Some(program) = built(&c, mpi, name) else { continue };
            assert_passed(mpi, &by_ranks_apart(&c, mpi, &format!("{} /forebay/file", program.display())));
        }
    }
    c.check();
}

/// Programs on files in volumes: the volumes that each uses, and its arguments.
const ON_VOLUMES: [(&str, &[&str], &str); 10] = [
    ("calls", &["v", "v0", "v1", "v.striped"], "forebay:v"),
    ("calls", &["v", "v0", "v1", "v.striped"], "forebay:v full"),
    ("views", &["v"], "forebay:v - 1 2"),
    ("misuse", &["v"], "forebay:v"),
    ("misuse", &["v"], "forebay:v full"),
    ("datarep", &["v", "v.0", "v.1", "v.2", "v.3"], "forebay:v"),
    ("meeting", &["v", "v.other"], "forebay:v"),
    ("exchange", &["v"], "forebay:v 1 3"),
    ("storm", &["v.pointer", "v.atomic"], "forebay:v 200 50"),
    ("volumes", &["v", "w"], "v w 16777216"),
];

/// The file in a volume over all nodes is one of every rank's, with one end, pointer and lock.
#[test]
fn every_call_of_mpi_io_works_on_a_volume_by_ranks_on_several_nodes() {
    let c = Cluster::up("apart-volume", NODES);
    for mpi in &MPIS {
        for (name, volumes, words) in ON_VOLUMES {
            // With ranks that poll, these take MPICH ten seconds each where there are few processors.
            if !mpi.ends && !is_soak() && ["meeting", "exchange"].contains(&name) {
                continue;
            }
            let Some(program) = built(&c, mpi, name) else { continue };
            for made in volumes {
                let on = ["--on", "n3,n1,n2,n4", "--stripe-size", "64KiB"];
                succeeds(volume(&c, 1, &[&["create", made, "--size", "16MiB"], &on[..]].concat()));
            }
            let ran = by_ranks_apart(&c, mpi, &format!("{} {words}", program.display()));
            assert!(has_passed(mpi, &ran), "{name} {words}: {}", said(&ran));
            // A rank's daemon may count it as a user of the volume for a moment after its end.
            for made in volumes {
                until("the deletion", || volume(&c, 4, &["delete", made]).status.success().then_some(()));
            }
        }
    }
    c.check();
}

/// Runs mpi/tests/storm.c while workers are killed; its arguments for an MPI.
fn storm(c: &Cluster, words_of: impl Fn(&Mpi) -> String) {
    for mpi in &MPIS {
        let Some(program) = built(c, mpi, "storm") else { continue };
        let line = format!("{} {}", program.display(), words_of(mpi));
        let log = c.file().with_file_name(format!("log-{}", mpi.compiler));
        let file = File::create(&log).unwrap();
        let mut command = ranks_apart(c, mpi, &[], &line);
        command.env("RANKS_HERE", "1");
        let mut running = command.stdout(file.try_clone().unwrap()).stderr(file).spawn().unwrap();
        let is_begun = || String::from_utf8_lossy(&fs::read(&log).unwrap()).contains(KEPT_BY_DAEMON);
        // The first rank's node keeps the pointer; every second kill hits its worker. A busy machine may need as long as
        // a pause to start a worker again: without an end of the kills the program would not end.
        let (mut kills, nodes) = (0, [1, 2, 1, 3, 1, 4]);
        let status = loop {
            if let Some(status) = running.try_wait().unwrap() {
                break status;
            }
            if kills == KILLS_MAX || kills == 0 && !is_begun() {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            c.kill_worker(nodes[kills % nodes.len()]);
            kills += 1;
            std::thread::sleep(Duration::from_millis(700));
        };
        assert_passed(mpi, &Output { status, stdout: fs::read(&log).unwrap(), stderr: Vec::new() });
        assert!(kills > 0, "it was over before a daemon was killed");
    }
    c.check();
}

#[test]
fn shared_pointer_gives_each_record_one_place_though_daemons_are_killed() {
    let c = Cluster::up("storm", NODES);
    storm(&c, |mpi| format!("/forebay/{} 700 150", mpi.compiler));
}

#[test]
fn shared_pointer_of_a_volume_gives_each_record_one_place_though_daemons_are_killed() {
    if !is_soak() {
        return println!(
            "skipped: a soak does this; `make test` has the same with a file, and on a volume without kills"
        );
    }
    let c = Cluster::up("storm-volume", NODES);
    for made in MPIS.iter().flat_map(|mpi| ["pointer", "atomic"].map(|end| format!("{}.{end}", mpi.compiler)))
    {
        let words = ["create", &made, "--size", "8MiB", "--on", "n1,n2,n4,n3", "--stripe-size", "64KiB"];
        succeeds(volume(&c, 1, &words));
    }
    storm(&c, |mpi| format!("forebay:{} 300 60", mpi.compiler));
}

#[test]
fn rank_that_is_killed_leaves_no_lock_and_takes_only_what_it_made() {
    let c = Cluster::up("survivors", NODES);
    for mpi in &MPIS {
        let Some(program) = built(&c, mpi, "survivors") else { continue };
        for dead in [NODES - 1, 0] {
            let line = format!("{} /forebay/file {dead}", program.display());
            let ran = ranks_apart(&c, mpi, mpi.outliving, &line).output().unwrap();
            let words = said(&ran);
            assert!(
                words.matches("went on").count() == NODES - 1 && !words.contains("survivors.c:"),
                "{words}"
            );
            // A rank that lost the pointer with rank 0 gets one message about it, with the first reply.
            let told = words.matches("are not available: ").count();
            assert_eq!(told, if dead == 0 { NODES - 1 } else { 0 }, "{words}");
        }
    }
    c.check();
}

/// Runs mpi/tests/late.c. Calls `meanwhile` when all ranks except the last one are in a close; then the last one
/// closes.
fn late(c: &Cluster, mpi: &Mpi, launcher: &[&str], more: &str, meanwhile: impl FnOnce()) -> Option<Output> {
    let program = built(c, mpi, "late")?;
    let beside = |name: &str| c.file().with_file_name(format!("{name}{more}-{}", mpi.compiler));
    let (log, go) = (beside("log"), beside("go"));
    let line = format!("{} /forebay/{}{more} {} {more}", program.display(), mpi.compiler, go.display());
    let file = File::create(&log).unwrap();
    let mut command = ranks_apart(c, mpi, launcher, &line);
    let mut running = command.stdout(file.try_clone().unwrap()).stderr(file).spawn().unwrap();
    until("a close", || {
        let is_begun = String::from_utf8_lossy(&fs::read(&log).unwrap()).contains("in the close");
        (is_begun || running.try_wait().unwrap().is_some()).then_some(())
    });
    meanwhile();
    fs::write(&go, "").unwrap();
    let status = running.wait().unwrap();
    Some(Output { status, stdout: fs::read(&log).unwrap(), stderr: Vec::new() })
}

#[test]
fn node_that_is_cut_off_for_seconds_keeps_no_rank_in_a_close_and_makes_none_fail() {
    let c = Cluster::up("late", NODES);
    // Neither the last rank's node nor the node that keeps the group. The ranks' own messages take another path.
    let cut = NODES - 1;
    for mpi in &MPIS {
        let ran = late(&c, mpi, &[], "", || {
            if !c.bed.set_link(cut, false) {
                return println!("skipped: links cannot be cut here");
            }
            let reached = || {
                let nodes = c.status(cut)["nodes"].as_array().cloned().unwrap();
                nodes.iter().filter(|node| node["state"] == "up").count()
            };
            until("the cut", || (reached() == 0).then_some(()));
            // The rank on that node sends a request each second.
            std::thread::sleep(Duration::from_secs(4));
            assert!(c.bed.set_link(cut, true));
            until("the end of the cut", || (reached() == NODES - 1).then_some(()));
        });
        if let Some(ran) = ran {
            assert_passed(mpi, &ran);
        }
    }
    c.check();
}

#[test]
fn rank_0_that_is_killed_in_a_close_keeps_no_other_in_it() {
    let c = Cluster::up("parted", NODES);
    // MPICH's launcher ends when a rank is killed with which others exchange messages, also without Forebay.
    for mpi in &MPIS[..1] {
        let ran = late(&c, mpi, mpi.outliving, "dies", || std::thread::sleep(Duration::from_secs(2)));
        let Some(ran) = ran else { continue };
        let words = said(&ran);
        assert!(words.matches("went on").count() == NODES - 1 && !words.contains("late.c:"), "{words}");
    }
    c.check();
}
