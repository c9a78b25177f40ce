//! Volumes in a pool of several nodes: their names are the pool's, their pieces are on the nodes that `--on` names.

use std::process::Output;

use crate::nodes::{bytes, said, until, Cluster};
use crate::volume_access::{process, waits};

const MIB: u64 = 1 << 20;

/// Runs `forebay volume` on a node.
pub(crate) fn volume(c: &Cluster, node: usize, words: &[&str]) -> Output {
    let pool = c.pool(node);
    let mut all = vec!["volume"];
    all.extend(words);
    all.extend(["--pool", pool.to_str().unwrap()]);
    c.forebay(node, &all)
}

pub(crate) fn succeeds(output: Output) -> String {
    assert!(output.status.success(), "{}", said(&output));
    said(&output)
}

/// Bytes of a node that volumes have.
pub(crate) fn held(c: &Cluster, node: usize) -> u64 {
    let own = 96 * MIB;
    let pool = c.pool(node).join("target");
    // SAFETY: the structure is writable for the call.
    let size = unsafe {
        let mut room: libc::statvfs = std::mem::zeroed();
        let path = std::ffi::CString::new(pool.to_str().unwrap()).unwrap();
        assert_eq!(libc::statvfs(path.as_ptr(), &mut room), 0, "{}", std::io::Error::last_os_error());
        room.f_blocks * room.f_frsize
    };
    own - size
}

#[test]
fn volume_has_one_name_in_the_pool_and_is_changed_from_every_node() {
    let c = Cluster::up("volumes", 2);
    succeeds(volume(&c, 1, &["create", "v", "--size", "4MiB"]));
    assert!(said(&volume(&c, 2, &["list"])).contains("4 MiB  v"));
    assert!(said(&volume(&c, 2, &["show", "v"])).contains("4 MiB on 1:0"));
    assert!(said(&volume(&c, 2, &["create", "v", "--size", "4MiB"])).contains("cannot create volume v"));
    succeeds(volume(&c, 2, &["resize", "v", "--size", "6MiB"]));
    succeeds(volume(&c, 2, &["resize", "v", "--size", "4MiB"]));
    succeeds(volume(&c, 1, &["format", "v"]));
    succeeds(volume(&c, 2, &["format", "v"]));
    // Without a place it is on the node of the command.
    succeeds(volume(&c, 2, &["create", "w", "--size", "4MiB"]));
    assert!(said(&volume(&c, 1, &["show", "w"])).contains("4 MiB on 2:0"));
    for (words, why) in [
        (&["create", "x", "--size", "4MiB", "--on", "n1,n7"][..], "the pool has no node \"n7\""),
        (&["create", "x", "--size", "4MiB", "--on", "n1:3"], "n1 has 1 target"),
        (&["create", "x", "--size", "4MiB", "--on", "n1", "--stripe-size", "5000"], "pages of 4 KiB"),
        (&["create", "x", "--size", "1GiB", "--on", "n1,n2"], "512 MiB are needed on node 1"),
    ] {
        let refused = volume(&c, 1, words);
        assert!(!refused.status.success() && said(&refused).contains(why), "{words:?}: {}", said(&refused));
    }
    assert_eq!(said(&volume(&c, 1, &["list"])).lines().count(), 2);
    succeeds(volume(&c, 2, &["delete", "v", "w"]));
    assert_eq!(said(&volume(&c, 1, &["list"])), "");
    until("the memory of both is free", || (held(&c, 1) + held(&c, 2) == 0).then_some(()));
    c.check();
}

#[test]
fn specifier_names_the_node_of_a_volume_by_its_number_or_its_name_in_the_pool_file() {
    let c = Cluster::up("specifiers", 3);
    succeeds(volume(&c, 1, &["create", "v", "--size", "2MiB", "--on", "n2"]));
    succeeds(volume(&c, 1, &["create", "w", "--size", "2MiB", "--on", "n3"]));
    let back = c.file().with_file_name("back");
    for from in ["v", "2:v", "n2:v", "n1/n2:v", "1.0/n2.0:v", "n2:v+n3:w"] {
        succeeds(volume(&c, 1, &["copy", from, back.to_str().unwrap()]));
    }
    for (from, why) in [
        ("n3:v", "volume `v` is not on node `n3`"),
        ("n9:v", "volume `v` is not on node `n9`"),
        ("n2/n2:v", "`n2` is not this node"),
        ("n2:v+n2:w", "specifier 2: volume `w` is not on node `n2`"),
    ] {
        let refused = volume(&c, 1, &["copy", from, back.to_str().unwrap()]);
        assert!(!refused.status.success() && said(&refused).contains(why), "{from}: {}", said(&refused));
    }
    c.check();
}

#[test]
fn volume_over_nodes_is_counted_on_each_and_has_the_bytes_that_were_put_from_any() {
    let c = Cluster::up("volume-wide", 3);
    succeeds(volume(&c, 2, &["create", "v", "--size", "9MiB", "--on", "n1,2,n3", "--stripe-size", "64KiB"]));
    assert!(said(&volume(&c, 3, &["show", "v"])).contains("9 MiB on 1:0, 2:0, 3:0"));
    // The head is beside the first piece.
    assert_eq!([1, 2, 3].map(|node| held(&c, node)), [3 * MIB + 4096, 3 * MIB, 3 * MIB]);
    let (file, back) = (c.file().with_file_name("data"), c.file().with_file_name("back"));
    let data = bytes((9 << 20) - 5000, 3);
    std::fs::write(&file, &data).unwrap();
    succeeds(volume(&c, 2, &["copy", file.to_str().unwrap(), "v", "--to-offset", "4KiB"]));
    for node in [1, 3] {
        let shown = succeeds(volume(&c, node, &["show", "v", "--json"]));
        let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
        assert_eq!(shown[0]["file_bytes"], data.len() as u64 + 4096, "the end of its file: {shown}");
        let _ = std::fs::remove_file(&back);
        let size = data.len().to_string();
        let words = ["copy", "v", back.to_str().unwrap(), "--from-offset", "4KiB", "--bytes", &size];
        succeeds(volume(&c, node, &words));
        assert!(std::fs::read(&back).unwrap() == data, "as node {node} reads it");
    }
    c.check();
    // In use on another node, it is not deleted.
    let mut user = process(&c, 3, "hold v");
    waits(&mut user, "open");
    assert!(said(&volume(&c, 1, &["delete", "v"])).contains("a program has it open"));
    user.kill().unwrap();
    user.wait().unwrap();
    until("the deletion", || volume(&c, 1, &["delete", "v"]).status.success().then_some(()));
    until("the memory is free", || (1..=3).all(|node| held(&c, node) == 0).then_some(()));
    c.check();
}

#[test]
fn pieces_of_a_maker_that_was_killed_are_dropped_on_every_node() {
    let c = Cluster::up("volume-maker", 3);
    for maker in 1..=3 {
        let mut maker = process(&c, maker, "make and die");
        assert!(!maker.wait().unwrap().success());
        until("the memory is free", || (1..=3).all(|node| held(&c, node) == 0).then_some(()));
        assert_eq!(said(&volume(&c, 1, &["list"])), "");
    }
    // A worker that dies keeps what a record names, and what its home says that is gone goes.
    succeeds(volume(&c, 1, &["create", "v", "--size", "6MiB", "--on", "n2,n3"]));
    c.kill_worker(2);
    succeeds(volume(&c, 2, &["format", "v"]));
    c.kill_worker(3);
    until("the deletion", || volume(&c, 1, &["delete", "v"]).status.success().then_some(()));
    until("the memory is free", || (1..=3).all(|node| held(&c, node) == 0).then_some(()));
    c.check();
}
