//! Faults of hosts and links while programs write: a node is killed whole, a node is full, a link is slow, clocks
//! differ.

use std::fs;
use std::os::unix::fs::FileExt;

use crate::nodes::{bytes, said, until, Cluster};

/// Mounts the pool on so many nodes. Preloaded programs open other nodes' files through these mounts. False where
/// mounting is not possible.
fn mounted(c: &Cluster, nodes: usize) -> bool {
    (1..=nodes).all(|node| c.mount(node).is_some())
}

#[test]
fn node_that_is_killed_in_a_write_storm_harms_only_what_it_has_and_keeps_what_it_acknowledged() {
    let c = Cluster::up("writes", 3);
    for i in 1..=3 {
        c.tell(i, &format!("mkdir /forebay/d{i}"));
    }
    if !mounted(&c, 3) {
        return;
    }
    let list = |node: usize| c.file().with_file_name(format!("acknowledged{node}"));
    // Node 1 writes to its own directory and must not notice anything. Node 3 writes to the directory of the killed
    // node, and continues when that node is back. It records each acknowledged write before the next one begins.
    let own = "set -e; for i in $(seq 600); do head -c 5000 /dev/zero | tr '\\0' x > /forebay/d1/f$i; mv /forebay/d1/f$i /forebay/d1/g$i; done";
    let others = format!(
        "i=0; while [ ! -e {stop} ]; do i=$((i+1)); if echo $i > /forebay/d2/f$i && mv /forebay/d2/f$i /forebay/d2/g$i; then echo $i >> {list}; \
         else sleep 0.1; fi; done 2>/dev/null",
        stop = c.file().with_file_name("stop").display(),
        list = list(3).display()
    );
    let (mut unharmed, mut other) = (c.spawn(1, own), c.spawn(3, &others));
    let acknowledged = || fs::read_to_string(list(3)).unwrap_or_default().lines().count();
    until("the first writes", || (acknowledged() > 20).then_some(()));
    c.kill(2);
    assert!(unharmed.wait().unwrap().success(), "who has nothing on the node that was killed was harmed");
    let before = acknowledged();
    assert!(c.start(2).status.success());
    until("writes to the node that is back", || (acknowledged() > before + 20).then_some(()));
    fs::write(c.file().with_file_name("stop"), "").unwrap();
    assert!(other.wait().unwrap().success());
    assert_eq!(c.tell(3, "cat /forebay/d1/g* | wc -c; ls /forebay/d1 | wc -l"), "3000000\n600\n");
    let lost = c.tell(
        1,
        &format!(
            "while read -r i; do [ \"$(cat /forebay/d2/g$i)\" = $i ] || echo $i; done < {}",
            list(3).display()
        ),
    );
    assert_eq!(lost, "", "acknowledged, and lost");
    until("quiet", || c.status(2)["pids"]["worker"].as_u64());
    c.tell(1, "rm -r /forebay/d1 /forebay/d2 /forebay/d3");
    c.check();
}

#[test]
fn slow_link_slows_and_breaks_nothing() {
    let c = Cluster::up("slow", 2);
    c.tell(2, "mkdir /forebay/d; : > /forebay/d/f");
    let Some(at) = c.mount(1) else { return };
    // At 8 Mbit/s, 2 MiB take about 2 s in each direction, with heartbeats between the pieces.
    if !c.bed.limit(2, 8) {
        return println!("skipped: links cannot be limited here");
    }
    let data = bytes(2 << 20, 7);
    let file = fs::OpenOptions::new().read(true).write(true).open(at.join("d/f")).unwrap();
    let names = c.spawn(1, "set -e; for i in $(seq 50); do : > /forebay/d/n$i; done");
    file.write_all_at(&data, 0).unwrap();
    let mut seen = vec![0; data.len()];
    file.read_exact_at(&mut seen, 0).unwrap();
    assert!(seen == data, "what went over the slow link is what was written");
    assert!(names.wait_with_output().unwrap().status.success(), "requests beside the data");
    let sum = |node| c.tell(node, "cksum < /forebay/d/f; ls /forebay/d | wc -l");
    assert_eq!(sum(1), sum(2));
    let log = fs::read_to_string(c.pool(1).join("log")).unwrap();
    assert!(
        !log.contains("cannot be reached") && !log.contains("unreachable"),
        "it was taken for dead: {log}"
    );
    drop(file);
    c.tell(1, "rm -r /forebay/d");
    c.check();
}

#[test]
fn node_that_is_full_refuses_what_falls_on_it_and_loses_nothing() {
    let c = Cluster::up("full", 2);
    c.tell(1, "mkdir /forebay/d");
    let striped = c.layout(1, &["set", "-c", "2", "-S", "64KiB", "/d"]);
    assert!(striped.status.success(), "{}", said(&striped));
    let (Some(at), Some(_)) = (c.mount(1), c.mount(2)) else { return };
    let path = at.join("d/f");
    let data = bytes(8 << 20, 9);
    fs::write(&path, &data).unwrap();
    // A program on node 2 fills the node, to the last page.
    c.tell(2, "mkdir /forebay/own; dd if=/dev/zero of=/forebay/own/fill bs=1M 2>/dev/null; dd if=/dev/zero bs=4k 2>/dev/null >> /forebay/own/fill; :");
    let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mut end = data.len() as u64;
    let refused = loop {
        match file.write_all_at(&data[..1 << 20], end) {
            Ok(()) if end < 256 << 20 => end += 1 << 20,
            Ok(()) => panic!("256 MiB went into 192 MiB"),
            Err(e) => break e,
        }
    };
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC));
    let mut seen = vec![0; data.len()];
    file.read_exact_at(&mut seen, 0).unwrap();
    assert!(seen == data, "what was there before is there");
    // Files on the node with space remain usable, and all files can be removed.
    c.tell(1, "echo fine > /forebay/small && cat /forebay/small && rm /forebay/small");
    drop(file);
    c.tell(1, "rm -r /forebay/d /forebay/own");
    until("space again", || fs::write(at.join("again"), &data).ok());
    c.tell(2, "cmp <(head -c 8388608 /forebay/again) /forebay/again && rm /forebay/again");
    c.check();
}

#[test]
fn clocks_that_differ_hurt_nobody() {
    let c = Cluster::prepare("clocks", 3);
    assert!(c.start(1).status.success());
    // If the end of a lease or a deadline were sent as a time of one node's clock, it would be days off.
    for (node, ahead) in [(2, 1_000_000), (3, 5)] {
        let Some(output) = c.start_ahead(node, ahead) else {
            return println!("skipped: clocks cannot differ here");
        };
        assert!(output.status.success(), "{}", said(&output));
    }
    if !mounted(&c, 3) {
        return;
    }
    for i in 1..=3 {
        c.tell(i, &format!("mkdir -p /forebay/d{i}/sub; echo {i} > /forebay/d{i}/sub/f"));
    }
    for i in 1..=3 {
        assert_eq!(c.tell(i, "cat /forebay/d1/sub/f /forebay/d2/sub/f /forebay/d3/sub/f"), "1\n2\n3\n");
    }
    // Leases: a rename is not delayed, and no node finds the old name afterwards.
    for i in 1..=3 {
        let (from, to) = (format!("/forebay/d{i}/sub"), format!("/forebay/d{}/moved{i}", i % 3 + 1));
        c.tell(i % 3 + 1, &format!("mv {from} {to}"));
        for j in 1..=3 {
            assert_eq!(
                c.tell(j, &format!("cat {to}/f; test ! -e {from} && echo gone")),
                format!("{i}\ngone\n")
            );
        }
    }
    c.kill_worker(2);
    until("its worker", || c.shell(1, "mkdir /forebay/d2/after").status.success().then_some(()));
    c.tell(3, "rm -r /forebay/d1 /forebay/d2 /forebay/d3");
    c.check();
}

#[test]
fn new_files_go_to_another_node_when_their_maker_s_is_above_its_high_water_mark() {
    let c = Cluster::up("mark", 2);
    let (Some(one), Some(two)) = (c.mount(1), c.mount(2)) else { return };
    // 91 of 96 MiB.
    c.tell(1, "mkdir /forebay/d; head -c 95420416 /dev/zero > /forebay/d/fill; echo small > /forebay/d/here");
    // A node requests the other nodes' free space only when it needs it, so the first files may still be created here.
    let data = bytes(2 << 20, 5);
    let mut there = 0;
    for i in 0..60 {
        let path = one.join(format!("d/f{i}"));
        fs::write(&path, if there < 10 { &data[..4096] } else { &data }).unwrap();
        let said = said(&c.layout(1, &["get", &format!("/d/f{i}")]));
        there += usize::from(said.contains("n2"));
        if there == 30 {
            break;
        }
    }
    assert!(there == 30, "{there} of 60 files were made on the node that has room");
    // Preloaded programs likewise. A program that could not open the file again creates it here.
    let made = "for i in $(seq 40); do head -c 1000 /dev/zero > /forebay/d/p$i; done; umask 777; : > /forebay/d/locked; ls /forebay/d | grep -c p";
    assert_eq!(c.tell(1, made), "40\n");
    let layout = |name: &str| said(&c.layout(1, &["get", name]));
    assert!((1..=40).any(|i| layout(&format!("/d/p{i}")).contains("n2")), "{}", layout("/d/p40"));
    for (i, at) in [(59, &two), (59, &one)] {
        let last = (0..=i).rev().find(|i| at.join(format!("d/f{i}")).exists()).unwrap();
        assert!(fs::read(at.join(format!("d/f{last}"))).unwrap() == data);
    }
    // With room again, new files are made here.
    c.tell(1, "rm /forebay/d/fill");
    until("a file of this node", || {
        c.tell(1, "rm -f /forebay/d/again; echo x > /forebay/d/again");
        layout("/d/again").contains("n1").then_some(())
    });
    c.tell(2, "rm -r /forebay/d");
    c.check();
}

/// If a full node has chosen a node for new files and that node has just died, the files lie elsewhere, through every
/// interface, and no name remains without a backing file.
#[test]
fn new_files_are_made_though_the_node_that_was_chosen_has_just_died() {
    let c = Cluster::up("chosen", 2);
    let (Some(one), Some(_)) = (c.mount(1), c.mount(2)) else { return };
    // Fills the node except for 4 MB.
    c.tell(1, "mkdir /forebay/d /forebay/s; head -c 100M /dev/zero > /forebay/d/fill; truncate -s -4MB /forebay/d/fill");
    let layout = |words: &[&str]| said(&c.layout(1, words));
    layout(&["set", "-c", "2", "-S", "64KiB", "/s"]);
    let on_two = |name: &str| layout(&["get", name]).contains("n2");
    // From now on the daemon knows that node 2 has room. The mount's process and a running shell know that their own
    // node is full.
    until("files on the node that has room", || {
        (0..8).for_each(|i| fs::write(one.join(format!("d/m{i}")), "mounted").unwrap());
        on_two("/d/m7").then_some(())
    });
    let (go, ready) = (c.file().with_file_name("go"), c.file().with_file_name("ready"));
    let script = format!(
        "for i in $(seq 40); do echo {w} > /forebay/d/p$i; done; : > {ready}; while [ ! -e {go} ]; do sleep 0.02; done; \
         for i in $(seq 41 50); do echo {w} > /forebay/d/p$i || exit 1; done; echo {w} > /forebay/s/p",
        w = "preloaded",
        go = go.display(),
        ready = ready.display()
    );
    let preloaded = c.spawn(1, &script);
    until("the shell's files", || ready.exists().then_some(()));
    assert!((1..=40).any(|i| on_two(&format!("/d/p{i}"))), "none of the shell's files is on node 2");
    c.kill(2);
    fs::write(&go, "").unwrap();
    for i in 10..16 {
        fs::write(one.join(format!("d/m{i}")), "mounted").unwrap();
    }
    fs::write(one.join("s/m"), "mounted").unwrap();
    let ended = preloaded.wait_with_output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    // The files created since lie here, and are whole.
    for i in 10..16 {
        assert_eq!(fs::read_to_string(one.join(format!("d/m{i}"))).unwrap(), "mounted");
    }
    let seen =
        c.tell(1, "cat /forebay/d/p4[1-9] /forebay/d/p50 /forebay/s/p | grep -c preloaded; cat /forebay/s/m");
    assert_eq!(seen, "11\nmounted");
    // In a directory whose layout names targets, the create fails and leaves no name.
    c.tell(1, "mkdir /forebay/t");
    layout(&["set", "-t", "n2", "/t"]);
    let refused = fs::write(one.join("t/m"), "x").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EIO));
    let told = said(&c.shell(1, "echo x > /forebay/t/p; ls -A /forebay/t"));
    assert!(
        told.contains("Input/output error") && !told.lines().any(|line| line == "m" || line == "p"),
        "{told}"
    );
    assert!(c.start(2).status.success());
    c.tell(1, "rm -r /forebay/d /forebay/s /forebay/t");
    c.check();
}
