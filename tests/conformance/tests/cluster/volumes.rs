//! Volumes in a pool of several nodes: their names are the pool's, their memory is on the node of the root directory.

use std::process::Output;

use crate::nodes::{said, Cluster};

fn volume(c: &Cluster, node: usize, words: &[&str]) -> Output {
    let pool = c.pool(node);
    let mut all = vec!["volume"];
    all.extend(words);
    all.extend(["--pool", pool.to_str().unwrap()]);
    c.forebay(node, &all)
}

#[test]
fn volume_has_one_name_in_the_pool_and_is_changed_from_every_node() {
    let c = Cluster::up("volumes", 2);
    assert!(volume(&c, 1, &["create", "v", "--size", "4MiB"]).status.success());
    assert!(said(&volume(&c, 2, &["list"])).contains("4 MiB  v"));
    assert!(said(&volume(&c, 2, &["show", "v"])).contains("4 MiB on 1:0"));
    assert!(said(&volume(&c, 2, &["create", "v", "--size", "4MiB"])).contains("cannot create volume v"));
    // Pieces on other nodes are for a later version: such calls are refused, and leave nothing.
    let elsewhere = volume(&c, 2, &["create", "w", "--size", "4MiB"]);
    assert!(!elsewhere.status.success() && said(&elsewhere).contains("node of its root directory"));
    assert!(said(&volume(&c, 2, &["format", "v"])).contains("has pieces on other nodes"));
    assert_eq!(said(&volume(&c, 1, &["list"])).lines().count(), 1);
    assert!(volume(&c, 2, &["delete", "v"]).status.success());
    assert_eq!(said(&volume(&c, 1, &["list"])), "");
    for node in [1, 2] {
        assert!(c.forebay(node, &["fsck", "--pool", c.pool(node).to_str().unwrap()]).status.success());
    }
}
