//! Programs that write more than their node has space for, on a node that does not have the store's tree.

use super::bed::{text, Nodes};

/// 120 MB in files of 3 MB, in a pool with 64 MiB a node.
const WRITE: &str = "for i in $(seq 40); do head -c 3000000 /dev/urandom > $W/f$i; done";

#[test]
fn preloaded_program_of_a_full_node_without_tree_and_mount_waits_for_space() {
    let Some(nodes) = Nodes::up(2, "64MiB") else { return };
    nodes.attach(1, "?rate=10MB/s", &[]);
    // Through a mount, writes wait: here creates do.
    nodes.ok(2, &["umount", nodes.at(2).to_str().unwrap()]);
    let done = nodes.command(2, &format!("W=/forebay/s; {WRITE}"), true).output().unwrap();
    assert!(done.status.success(), "{}\n{}", text(&done), nodes.logs());
    nodes.durable(2);
    assert_eq!(nodes.differences(1), "");
}
