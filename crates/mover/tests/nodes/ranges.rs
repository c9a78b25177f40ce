//! Large released files that programs of any node read while they are restored.
//!
//! The store is slow, so that a file takes many seconds.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::process::Command;

use super::bed::Nodes;

const MIB: usize = 1 << 20;
const BYTES: usize = 20 * MIB + 123;
/// Within the last two ranges.
const LATE: usize = 19 * MIB - 100;

/// The contents of a file: no two ranges are equal, and no byte is zero.
fn contents(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..BYTES).map(|_| (next() >> 32) as u8 | 1).collect()
}

/// Three nodes, the first of which has the tree, and files `f1` to `f3`.
fn up(options: &str) -> Option<Nodes> {
    let nodes = Nodes::up(3, "128MiB")?;
    for i in 1..=3 {
        std::fs::write(nodes.store().join(format!("f{i}")), contents(i)).unwrap();
    }
    nodes.attach(1, options, &[]);
    Some(nodes)
}

fn open(nodes: &Nodes, node: usize, name: &str) -> File {
    File::open(nodes.at(node).join("s").join(name)).unwrap()
}

fn read(file: &File, from: usize, len: usize) -> std::io::Result<Vec<u8>> {
    let mut read = vec![0; len];
    file.read_exact_at(&mut read, from as u64).map(|()| read)
}

fn is_resident(nodes: &Nodes, node: usize, name: &str) -> bool {
    nodes.state(node, &format!("/s/{name}"))["state"] != "released"
}

fn is_on(nodes: &Nodes, node: usize, name: &str) -> bool {
    nodes.ok(1, &["layout", "get", &format!("/s/{name}")]).contains(&format!("n{node}"))
}

#[test]
fn readers_on_every_node_get_what_they_read_before_the_rest_has_arrived() {
    // A third of it for each node.
    let Some(nodes) = up("?rate=9MB/s") else { return };
    for node in 1..=3 {
        let name = format!("f{node}");
        nodes.wait("the mover runs", || nodes.status(node)["mover"]["pid"].is_u64());
        let mover = nodes.status(node)["mover"]["pid"].to_string();
        let signal =
            |which: &str| assert!(Command::new("kill").args([which, &mover]).status().unwrap().success());
        let file = open(&nodes, node, &name);
        let late = read(&file, LATE, 200).unwrap();
        signal("-STOP");
        assert!(late == contents(node as u64)[LATE..LATE + 200], "node {node}: other bytes than the store's");
        assert!(!is_resident(&nodes, node, &name), "the rest has not arrived\n{}", nodes.logs());
        assert!(is_on(&nodes, node, &name), "it comes to its reader");
        // A preloaded program reads it so, too.
        let shown = nodes.preloaded(node, &format!("exec 3< /forebay/s/{name}; readlink /proc/self/fd/3"));
        signal("-CONT");
        assert!(shown.contains("/.forebay-inode-"), "{shown}");
    }
    nodes.sh(2, "cmp s/f2 $S/f2");
    nodes.preloaded(3, "cmp /forebay/s/f3 $S/f3");
    nodes.wait("all has arrived", || is_resident(&nodes, 2, "f2"));
    nodes.sh(1, "cmp s/f2 $S/f2");
}

#[test]
fn file_that_came_to_another_node_since_it_was_opened_is_read_there() {
    let Some(nodes) = up("") else { return };
    let early = open(&nodes, 2, "f1");
    assert!(is_on(&nodes, 2, "f1"));
    let other = open(&nodes, 3, "f1");
    assert_eq!(read(&other, 0, 100).unwrap(), contents(1)[..100]);
    nodes.wait("all has arrived", || is_resident(&nodes, 1, "f1"));
    assert!(is_on(&nodes, 3, "f1"), "who reads first gets it");
    assert!(read(&early, 0, BYTES).unwrap() == contents(1), "other bytes than the store's");
    assert_eq!(early.read_at(&mut [0; 10], BYTES as u64).unwrap(), 0);
    assert!(early.metadata().unwrap().len() == BYTES as u64);
}

#[test]
fn reader_of_a_file_that_another_node_removes_gets_an_error_for_what_has_not_arrived() {
    let Some(nodes) = up("?rate=300kB/s") else { return };
    let (file, whole) = (open(&nodes, 2, "f2"), contents(2));
    assert!(read(&file, 0, 1000).unwrap() == whole[..1000]);
    assert!(!is_resident(&nodes, 2, "f2"), "the rest has not arrived");
    nodes.preloaded(3, "rm /forebay/s/f2");
    let mut errors = 0;
    for from in (0..BYTES - 1000).step_by(MIB / 2) {
        match read(&file, from, 1000) {
            Ok(bytes) => {
                assert!(bytes == whole[from..from + 1000], "other bytes than the store's from {from} on")
            }
            Err(e) => {
                assert_eq!(e.raw_os_error(), Some(5), "{e}");
                errors += 1;
            }
        }
    }
    assert!(errors > 0, "not all has arrived");
}

#[test]
fn ranges_of_a_node_whose_mover_is_killed_arrive_later_and_are_never_wrong() {
    let Some(nodes) = up("?rate=9MB/s") else { return };
    let file = open(&nodes, 3, "f2");
    let whole = contents(2);
    assert!(read(&file, LATE, 200).unwrap() == whole[LATE..LATE + 200]);
    nodes.kill(3, "mover");
    let mut failures = 0;
    for range in 0..20 {
        let from = range * MIB;
        nodes.wait("a range arrives", || match read(&file, from, 1000) {
            Ok(bytes) => {
                assert!(bytes == whole[from..from + 1000], "other bytes than the store's from {from} on");
                true
            }
            Err(e) => {
                assert_eq!(e.raw_os_error(), Some(5), "{e}");
                failures += 1;
                false
            }
        });
    }
    println!("{failures} reads failed in between");
    nodes.sh(3, "cmp s/f2 $S/f2");
    nodes.check();
}

#[test]
fn reader_on_a_full_node_reads_from_the_store_what_its_node_has_no_room_for() {
    let Some(nodes) = up("?rate=60MB/s") else { return };
    let full = nodes.at(2).join("full");
    let mut fill = File::create(&full).unwrap();
    let error = loop {
        if let Err(e) = fill.write_all(&[7; 64 << 10]) {
            break e;
        }
    };
    assert_eq!(error.raw_os_error(), Some(28), "{error}");
    let file = open(&nodes, 2, "f2");
    assert!(read(&file, 0, BYTES).unwrap() == contents(2), "other bytes than the store's");
    nodes.preloaded(2, "cmp /forebay/s/f3 $S/f3");
    for node in [2, 1] {
        nodes.kill(node, "mover");
        assert!(read(&file, 0, BYTES).unwrap() == contents(2), "other bytes than the store's");
    }
    for name in ["f2", "f3"] {
        assert!(!is_resident(&nodes, 2, name), "there is no room for {name}\n{}", nodes.logs());
    }
    drop(fill);
    std::fs::remove_file(full).unwrap();
    nodes.wait("there is room again", || {
        assert!(read(&file, LATE, 200).unwrap() == contents(2)[LATE..LATE + 200]);
        is_resident(&nodes, 2, "f2")
    });
    assert!(is_on(&nodes, 2, "f2"), "it comes to its reader");
    assert!(read(&file, 0, BYTES).unwrap() == contents(2), "other bytes than the store's");
    nodes.check();
}
