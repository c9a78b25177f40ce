//! The conformance suite on a pool of four nodes. Each call is made on the next node, so that a node writes, reads,
//! renames and removes what another one created. The exceptions of docs/network.md are the cases that need `OneNode`,
//! and on nodes without a target those that need `OwnData`.

use std::path::{Path, PathBuf};
use std::process::Command;

use forebay_conformance::harness::{self, not_me};

use crate::nodes::Cluster;
use crate::without;

const NODES: usize = 4;

/// A cluster that is mounted on each node.
fn mounted(name: &str) -> Option<(Cluster, Vec<PathBuf>)> {
    let c = Cluster::up(name, NODES);
    let mounts = (1..=NODES).map(|node| c.mount(node)).collect::<Option<Vec<_>>>()?;
    Some((c, mounts))
}

fn suite(c: &Cluster, command: &mut Command, first: &str, dir: &Path, others: &[PathBuf], lacking: &[&str]) {
    command.arg(first).arg(dir);
    for other in others {
        command.arg("--and").arg(other);
    }
    command.args(["--claim", "xattrs", "--claim", "large-xattrs"]);
    let excepted = [not_me(), "OneDoor", "OneNode", "OwnSpace", "SmallSpace"];
    harness::summary(command).passed_but_for(&[&excepted, lacking].concat());
    c.check();
}

#[test]
fn mounts_of_four_nodes_keep_every_promise() {
    let Some((c, mounts)) = mounted("doors-mount") else { return };
    suite(&c, &mut Command::new(harness::program()), "--root", &mounts[0], &mounts[1..], &[]);
}

#[test]
fn preloaded_programs_and_mounts_of_other_nodes_keep_every_promise() {
    let Some((c, mounts)) = mounted("doors-preload") else { return };
    let mut command = Command::new(harness::binaries().join("forebay"));
    command.args(["run", "--quiet", "--pool"]).arg(c.pool(1)).arg("--").arg(harness::program());
    suite(&c, &mut command, "--root", Path::new("/forebay"), &mounts[1..], &[]);
}

/// Two nodes with a target, two without: preloaded programs on one of the latter, and mounts of the others.
#[test]
fn nodes_without_a_target_keep_every_promise() {
    let c = without::prepare("doors-without");
    c.start_all();
    let Some(mounts) = (1..=NODES).map(|node| c.mount(node)).collect::<Option<Vec<_>>>() else { return };
    let mut command = Command::new(harness::binaries().join("forebay"));
    command.args(["run", "--quiet", "--pool"]).arg(c.pool(3)).arg("--").arg(harness::program());
    command.args(["--lacks", "own-data"]);
    let others = [mounts[3].clone(), mounts[0].clone()];
    suite(&c, &mut command, "--root", Path::new("/forebay"), &others, &["OwnData"]);
}

#[test]
fn clients_of_four_nodes_keep_every_promise() {
    let Some((c, _mounts)) = mounted("doors-client") else { return };
    let pools: Vec<PathBuf> = (1..=NODES).map(|node| c.pool(node)).collect();
    suite(
        &c,
        &mut Command::new(harness::program()),
        "--pool",
        &pools[0],
        &pools[1..],
        &["Outside", "DirectoryDescriptors"],
    );
}
