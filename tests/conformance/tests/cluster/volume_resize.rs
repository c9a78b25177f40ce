//! Volumes with pieces on several nodes grow and shrink on all of them or on none, whatever is killed meanwhile.

use forebay_client::{Pool, Role};
use forebay_types::Code;

use crate::nodes::{bytes, program, said, until, Cluster};
use crate::volume_access::{process, waits};
use crate::volumes::{held, succeeds, volume};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Three nodes, and a volume of 9 MiB over them whose record is on the first.
fn over_three(name: &str) -> Cluster {
    let c = Cluster::up(name, 3);
    succeeds(volume(&c, 2, &["create", "v", "--size", "9MiB", "--on", "n1,n2,n3", "--stripe-size", "64KiB"]));
    c
}

/// What volumes have on each node, without the page of the head.
fn all_held(c: &Cluster) -> [u64; 3] {
    [1, 2, 3].map(|node| held(c, node) / MIB * MIB)
}

fn until_held(c: &Cluster, expected: [u64; 3]) {
    until(&format!("{expected:?} bytes are held"), || (all_held(c) == expected).then_some(()));
}

fn size(c: &Cluster, node: usize) -> u64 {
    let shown = succeeds(volume(c, node, &["show", "v", "--json"]));
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    shown[0]["bytes"].as_u64().unwrap()
}

fn resize(c: &Cluster, node: usize, size: &str) -> std::process::Output {
    volume(c, node, &["resize", "v", "--size", size])
}

#[test]
fn volume_over_nodes_grows_in_use_and_shrinks_on_all_nodes_and_reads_as_zeros_when_it_grows_again() {
    let c = over_three("volume-resize");
    let mut user = process(&c, 3, "hold v");
    waits(&mut user, "open");
    let pool = Pool::attach_as(&c.pool(2), Role::Tool).unwrap();
    let data = bytes(9 << 20, 5);
    let before = pool.volume_open(b"v", true).unwrap();
    before.put_bytes(0, &data).unwrap();
    succeeds(resize(&c, 2, "15MiB"));
    assert_eq!((all_held(&c), size(&c, 1)), ([5 * MIB; 3], 15 * MIB));
    assert!(said(&volume(&c, 1, &["show", "v"])).contains("6 MiB on 1:0, 2:0, 3:0"), "as the first segment");
    // A program that had it open before goes on with the old size. One that opens it now has both segments.
    assert_eq!((before.bytes(), before.put_bytes(9 * MIB, b"x")), (9 * MIB, Err(Code::Range)));
    let more = bytes(6 << 20, 6);
    let after = pool.volume_open(b"v", true).unwrap();
    after.put_bytes(9 * MIB, &more).unwrap();
    let mut seen = vec![0; 15 << 20];
    after.get_bytes(0, &mut seen).unwrap();
    assert!(seen[..9 << 20] == data && seen[9 << 20..] == more);
    drop((before, after));
    for words in [&["resize", "v", "--size", "9MiB"][..], &["delete", "v"]] {
        let refused = volume(&c, 1, words);
        assert!(said(&refused).contains("a program has it open"), "{}", said(&refused));
    }
    user.kill().unwrap();
    user.wait().unwrap();
    until("the user is gone", || resize(&c, 3, "9MiB").status.success().then_some(()));
    until_held(&c, [3 * MIB; 3]);
    assert!(said(&resize(&c, 2, "4MiB")).contains("before it grew"));
    c.check();
    // The numbers of the pieces that are gone are not those of the new ones.
    succeeds(resize(&c, 1, "12MiB"));
    let after = pool.volume_open(b"v", true).unwrap();
    after.get_bytes(0, &mut seen[..12 << 20]).unwrap();
    assert!(seen[..9 << 20] == data && seen[9 << 20..12 << 20].iter().all(|byte| *byte == 0));
    drop(after);
    succeeds(volume(&c, 1, &["delete", "v"]));
    until_held(&c, [0; 3]);
    c.check();
}

#[test]
fn volume_that_cannot_grow_or_shrink_on_one_node_stays_as_it_is_on_all() {
    let c = over_three("volume-no-room");
    succeeds(volume(&c, 1, &["create", "big", "--size", "70MiB", "--on", "n3"]));
    let refused = resize(&c, 2, "60MiB");
    let why = "17 MiB are needed on node 3";
    assert!(!refused.status.success() && said(&refused).contains(why), "{}", said(&refused));
    assert_eq!(size(&c, 3), 9 * MIB);
    until_held(&c, [3 * MIB, 3 * MIB, 73 * MIB]);
    succeeds(volume(&c, 1, &["delete", "big"]));
    until_held(&c, [3 * MIB; 3]);
    succeeds(resize(&c, 2, "60MiB"));
    c.check();
    c.kill(3);
    for to in ["63MiB", "9MiB"] {
        let refused = resize(&c, 1, to);
        assert!(!refused.status.success(), "to {to}: {}", said(&refused));
        assert!(said(&refused).contains("down"), "to {to}: {}", said(&refused));
        assert_eq!(size(&c, 2), 60 * MIB);
    }
    until_held(&c, [20 * MIB, 20 * MIB, held(&c, 3)]);
    assert!(c.start(3).status.success());
    until("the deletion", || volume(&c, 1, &["delete", "v"]).status.success().then_some(()));
    until_held(&c, [0; 3]);
    c.check();
}

#[test]
fn growth_whose_maker_or_a_worker_was_killed_has_the_old_or_the_new_size_and_loses_no_space() {
    let c = over_three("volume-grow-kill");
    for maker in 1..=3 {
        let mut maker = process(&c, maker, "grow and die");
        assert!(!maker.wait().unwrap().success());
        until_held(&c, [3 * MIB; 3]);
        assert_eq!(size(&c, 1), 9 * MIB);
    }
    for (node, to) in [(1, 30), (2, 60), (3, 90)] {
        let mut maker = c.bed.command(2, &program("forebay"));
        let to_size = format!("{to}MiB");
        maker.args(["volume", "resize", "v", "--size", &to_size, "--pool"]).arg(c.pool(2));
        let mut maker = maker.spawn().unwrap();
        c.kill_worker(node);
        let is_done = maker.wait().unwrap().success();
        let now = until("the record can be read", || {
            volume(&c, 1, &["show", "v", "--json"]).status.success().then(|| size(&c, 1))
        });
        assert!(!is_done || now == to * MIB, "{now}");
        until_held(&c, [now / 3; 3]);
        until("the check", || {
            (1..=3)
                .all(|node| {
                    let pool = c.pool(node);
                    c.forebay(node, &["fsck", "--pool", pool.to_str().unwrap()]).status.success()
                })
                .then_some(())
        });
        // It is whole: all of it can be written and read.
        until("it can be formatted", || volume(&c, 1, &["format", "v"]).status.success().then_some(()));
    }
}

#[test]
fn growth_during_which_a_nodes_daemon_was_killed_leaves_the_old_size_and_no_memory() {
    for dead in [2, 1] {
        let c = over_three(&format!("volume-grow-death-{dead}"));
        let mut maker = process(&c, 3, "grow and wait");
        waits(&mut maker, "growing");
        c.kill(dead);
        maker.kill().unwrap();
        maker.wait().unwrap();
        assert!(c.start(dead).status.success());
        until("the old size", || {
            let shown = volume(&c, 3, &["show", "v", "--json"]);
            (shown.status.success() && size(&c, 3) == 9 * MIB).then_some(())
        });
        // What the node had died with it. The others give back what they had reserved.
        let left = [1, 2, 3].map(|node| if node == dead { 0 } else { 3 * MIB });
        until_held(&c, left);
        until("the deletion", || volume(&c, 2, &["delete", "v"]).status.success().then_some(()));
        until_held(&c, [0; 3]);
        c.check();
    }
}

#[test]
fn thin_volume_over_nodes_takes_space_where_it_is_written_and_fails_where_there_is_none() {
    let c = Cluster::up("volume-thin", 3);
    succeeds(volume(&c, 2, &["create", "v", "--size", "3GiB", "--thin", "--on", "n1,n2,n3"]));
    assert_eq!(all_held(&c), [0; 3]);
    let pool = Pool::attach_as(&c.pool(2), Role::Tool).unwrap();
    let v = pool.volume_open(b"v", true).unwrap();
    let data = bytes(12 << 20, 7);
    v.put_bytes(GIB, &data).unwrap();
    let mut seen = vec![0; 14 << 20];
    v.get_bytes(GIB - MIB, &mut seen).unwrap();
    let zeros = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
    assert!(zeros(&seen[..1 << 20]) && seen[1 << 20..13 << 20] == data && zeros(&seen[13 << 20..]));
    // The kernel may take huge pages at both ends of what a piece has.
    let took = v.allocated().unwrap();
    assert!((12 * MIB..=24 * MIB).contains(&took), "{took}");
    for node in [1, 3] {
        assert!(said(&volume(&c, node, &["list"])).contains("(thin, "));
    }
    v.discard(GIB, 6 * MIB).unwrap();
    v.zero(GIB + 6 * MIB, MIB).unwrap();
    assert!(v.allocated().is_ok_and(|left| left < took && left >= 5 * MIB));
    v.get_bytes(GIB, &mut seen[..12 << 20]).unwrap();
    assert!(zeros(&seen[..7 << 20]) && seen[7 << 20..12 << 20] == data[7 << 20..]);
    for stripe in 0..3 {
        assert_eq!(v.fetch_add(stripe * MIB, 1), Err(Code::NotSupported), "on node {}", stripe + 1);
    }
    // Node 3 is full: what is on it fails, with its name, and the rest goes on.
    succeeds(volume(&c, 1, &["create", "big", "--size", "70MiB", "--on", "n3"]));
    let failed = (0..20).map(|i| v.put_bytes((3 * i + 2) * MIB, &data[..1 << 20])).find(Result::is_err);
    assert_eq!(failed, Some(Err(Code::NoSpace)));
    assert!(v.reason().is_some_and(|why| why.contains("node 3")), "{:?}", v.reason());
    v.put_bytes(0, &data[..2 << 20]).unwrap();
    drop(v);
    // It grows and shrinks as others do, and a killed worker keeps its bytes.
    succeeds(resize(&c, 1, "6GiB"));
    c.kill_worker(1);
    c.kill_worker(3);
    let v = pool.volume_open(b"v", true).unwrap();
    until("the bytes are read", || v.get_bytes(0, &mut seen[..2 << 20]).is_ok().then_some(()));
    assert!(seen[..2 << 20] == data[..2 << 20]);
    // On node 1: node 3 is full.
    v.put_bytes(5 * GIB + MIB, &data[..MIB as usize]).unwrap();
    drop(v);
    until("it shrinks", || resize(&c, 1, "3GiB").status.success().then_some(()));
    succeeds(volume(&c, 3, &["format", "v"]));
    assert!(
        said(&volume(&c, 2, &["list"])).contains("(thin, 0 B allocated)"),
        "{}",
        said(&volume(&c, 2, &["list"]))
    );
    succeeds(volume(&c, 1, &["delete", "v", "big"]));
    until_held(&c, [0; 3]);
    c.check();
}
