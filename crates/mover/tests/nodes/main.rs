//! Pools of several nodes in front of a store: names and data from every node, drained by the nodes that have them.

mod bed;
#[path = "../killing/mod.rs"]
mod killing;
mod kills;
mod ranges;
mod room;

use bed::Nodes;

#[test]
fn every_node_sees_lists_restores_and_changes_the_store() {
    let Some(nodes) = Nodes::up(3, "128MiB") else { return };
    let store = nodes.store();
    std::fs::create_dir_all(store.join("in/deep")).unwrap();
    std::fs::write(store.join("in/a"), "hello\n").unwrap();
    std::fs::write(store.join("in/deep/x"), "x").unwrap();
    let big: Vec<u8> = (0..9_000_000u32).map(|i| ((i * 7) >> 3) as u8).collect();
    std::fs::write(store.join("in/big"), &big).unwrap();
    std::os::unix::fs::symlink("a", store.join("in/link")).unwrap();
    nodes.attach(2, "", &[]);
    // The first look comes from a node that does not have the tree.
    assert_eq!(nodes.sh(3, "ls -R s"), "s:\nin\n\ns/in:\na\nbig\ndeep\nlink\n\ns/in/deep:\nx\n");
    assert_eq!(nodes.sh(1, "stat -c '%s %Y' s/in/big"), nodes.sh(1, "stat -c '%s %Y' $S/in/big"));
    assert_eq!(nodes.preloaded(1, "cat /forebay/s/in/link"), "hello\n");
    // A file comes to the node that opens it first.
    nodes.sh(1, "cmp s/in/big $S/in/big");
    assert!(nodes.ok(3, &["layout", "get", "/s/in/big"]).contains("n1"), "it was restored to its reader");
    nodes.sh(3, "cmp s/in/big $S/in/big");
    nodes.preloaded(3, "test $(cat /forebay/s/in/deep/x) = x");
    // Every node writes, in directories of every node's making.
    for i in 1..=3 {
        nodes.sh(i, &format!("mkdir s/d{i}; echo by {i} > s/in/by{i}"));
        nodes.preloaded(i, &format!("mkdir /forebay/s/in/p{i}; echo p{i} > /forebay/s/in/p{i}/f"));
    }
    for i in 1..=3 {
        for j in 1..=3 {
            nodes.sh(i, &format!("head -c {} /dev/urandom > s/d{j}/f{i}; mkdir s/d{j}/e{i}", i * 300_000));
        }
    }
    nodes.durable(1);
    assert_eq!(nodes.differences(2), "");
    assert!(nodes.ok(1, &["layout", "get", "/s/d1/f3"]).contains("n3"), "data stay with their writer");
    // Renames, links and removals by nodes that have neither the tree nor the data.
    nodes.sh(1, "mv s/d2/f2 s/d3/g2; mv s/d3/e1 s/d1/moved; ln s/d1/f1 s/d2/hard; rm s/d3/f3; rmdir s/d3/e2");
    nodes.sh(3, "mv s/d1/moved s/d2/again; printf more >> s/d3/g2; chmod 600 s/d1/f2; ln -s f1 s/d1/l");
    nodes.durable(3);
    assert_eq!(nodes.differences(1), "");
    assert_eq!(nodes.sh(2, "stat -c '%h %a' $S/d2/hard $S/d1/f2"), "2 644\n1 600\n");
    // The tree's border.
    let refused =
        nodes.command(1, "mkdir out; mv s/d1/f2 out/ 2>&1; ls out; mv out s/", false).output().unwrap();
    assert!(refused.status.success(), "mv copies over the border: {}", bed::text(&refused));
    let script =
        "import os, errno\nfor a, b in (('s/d1/l', 'here'), ('s/d1', 'there')):\n try: os.rename(a, b)\n \
                  except OSError as e: assert e.errno == errno.EXDEV, e\n else: raise Exception('done')";
    nodes.sh(3, &format!("python3 -c \"{script}\""));
    assert!(!nodes.command(1, "rmdir s", false).output().unwrap().status.success());
    nodes.durable(2);
    assert_eq!(nodes.differences(3), "");
    nodes.check();
}

#[test]
fn files_over_several_nodes_are_drained_released_and_restored() {
    let Some(nodes) = Nodes::up(3, "128MiB") else { return };
    nodes.attach(1, "", &[]);
    nodes.sh(2, "mkdir s/st");
    nodes.ok(2, &["layout", "set", "-c", "3", "-S", "65536", "/s/st"]);
    let wide = nodes.forebay(2, &["layout", "set", "-W", "2", "/s/st"]);
    assert!(!wide.status.success(), "a directory of a tree stays narrow");
    for i in 1..=3 {
        nodes.sh(i, &format!("head -c 3000001 /dev/urandom > s/st/f{i}"));
    }
    assert!(nodes.ok(3, &["layout", "get", "/s/st/f2"]).contains("3 backing files"));
    nodes.durable(3);
    assert_eq!(nodes.differences(3), "");
    // A program cannot keep the programs of other nodes out.
    let ino = nodes.sh(3, "stat -c %i s/st/f2").trim().parse().unwrap();
    let pool = forebay_client::Pool::attach(&nodes.pool(3)).unwrap();
    let entry = pool.get_attr(forebay_types::Ino(ino)).unwrap();
    assert_eq!(pool.release_file(&entry), Err(forebay_types::Code::NotSupported));
    assert_eq!(nodes.state(1, "/s/st/f2")["state"], "clean");
    nodes.ok(3, &["release", "--recursive", "/s/st"]);
    for i in 1..=3 {
        assert_eq!(nodes.state(i, &format!("/s/st/f{i}"))["state"], "released");
        assert_eq!(nodes.state(i, &format!("/s/st/f{i}"))["resident_bytes"], 0);
    }
    assert_eq!(nodes.differences(2), "");
    nodes.check();
}

#[test]
fn every_node_writes_its_part_of_a_long_file_into_the_store() {
    let Some(nodes) = Nodes::up(3, "128MiB") else { return };
    nodes.attach(1, "", &[]);
    nodes.sh(2, "mkdir s/st");
    nodes.ok(2, &["layout", "set", "-c", "3", "-S", "65536", "/s/st"]);
    // One ends within a stripe, one has holes, one is all hole, one has another file's version in the store before.
    nodes.sh(1, "head -c 9000001 /dev/urandom > s/st/whole; chmod 640 s/st/whole; touch -d @1000 s/st/whole");
    nodes
        .sh(2, "truncate -s 20000003 s/st/holes; printf x | dd of=s/st/holes bs=1 seek=7000000 conv=notrunc");
    nodes.sh(3, "truncate -s 5000000 s/st/hole; head -c 6000000 /dev/urandom > s/st/again");
    nodes.durable(1);
    nodes.sh(3, "dd if=/dev/zero of=s/st/again bs=100000 seek=20 count=3 conv=notrunc; truncate -s 5500000 s/st/again");
    nodes.durable(2);
    assert_eq!(nodes.differences(3), "");
    assert_eq!(nodes.sh(1, "stat -c '%a %Y' $S/st/whole"), "640 1000\n");
    let blocks: u64 = nodes.sh(1, "stat -c %b $S/st/holes").trim().parse().unwrap();
    // A medium may have whole huge pages of data.
    assert!(blocks * 512 < 8 << 20, "{blocks} blocks");
    for node in 1..=3 {
        assert!(nodes.log(node).contains("wrote this node's part of file"), "node {node}\n{}", nodes.logs());
    }
    nodes.check();
}

#[test]
fn clean_files_of_a_node_that_died_come_from_the_store() {
    let Some(nodes) = Nodes::up(3, "64MiB") else { return };
    nodes.attach(1, "", &["--rule", "*.kept=request"]);
    nodes.sh(
        3,
        "mkdir s/d; for i in 1 2 3; do head -c 100000$i /dev/urandom > s/d/$i; done; touch -d @1000 s/d/1",
    );
    nodes.durable(1);
    nodes.ok(1, &["layout", "set", "-c", "3", "-S", "65536", "/s/d"]);
    nodes.sh(2, "head -c 1000000 /dev/urandom > s/d/striped");
    nodes.durable(2);
    nodes.sh(3, "echo only here > s/only.kept");
    let open = std::fs::File::open(nodes.at(2).join("s/d/3")).unwrap();
    nodes.kill_node(3);
    assert!(!nodes.command(2, "cat s/only.kept", false).output().unwrap().status.success());
    // By command, and by itself.
    nodes.wait("the release of a file", || {
        nodes.forebay(1, &["release", "--no-progress", "/s/d/2"]).status.success()
    });
    nodes.sh(2, "cmp s/d/2 $S/d/2");
    nodes.wait("a file from the store", || {
        nodes
            .command(2, "cmp s/d/1 $S/d/1 && cmp s/d/striped $S/d/striped", false)
            .output()
            .unwrap()
            .status
            .success()
    });
    nodes.preloaded(1, "cmp /forebay/s/d/3 $S/d/3");
    assert_eq!(nodes.sh(1, "stat -c '%s %Y' s/d/1"), "1000001 1000\n");
    nodes.sh(2, "printf more >> s/d/1; printf more >> s/d/striped");
    nodes.ok(1, &["wait-durable", "--recursive", "--no-progress", "--timeout", "60", "/s/d"]);
    // What is nowhere else stays, and comes back with its node.
    assert!(!nodes.command(2, "cat s/only.kept", false).output().unwrap().status.success());
    assert!(!nodes.store().join("only.kept").exists());
    nodes.start(3);
    assert!(nodes.mount(3));
    nodes.wait("the node", || {
        nodes.command(2, "grep only s/only.kept", false).output().unwrap().status.success()
    });
    assert_eq!(nodes.sh(3, "tail -c 4 s/d/1; tail -c 4 s/d/striped"), "moremore");
    nodes.ok(3, &["sync", "--recursive", "--no-progress", "/s"]);
    assert_eq!(nodes.differences(3), "");
    drop(open);
    nodes.check();
}

#[test]
fn open_files_of_other_nodes_are_copied_when_that_is_asked_for_and_not_before() {
    let Some(nodes) = Nodes::up(3, "64MiB") else { return };
    nodes.attach(1, "", &["--rule", "*.log=close,open=snapshot:1s"]);
    use std::io::Write;
    let create = |name: &str| std::fs::File::create(nodes.at(3).join("s").join(name)).unwrap();
    let (mut open, mut log) = (create("open"), create("a.log"));
    open.write_all(b"first").unwrap();
    log.write_all(b"line").unwrap();
    let stored = |name: &str| std::fs::read_to_string(nodes.store().join(name)).unwrap_or_default();
    nodes.wait("a snapshot", || stored("a.log") == "line");
    // Several passes later the other one is not there.
    nodes.sh(2, "echo x > s/closed");
    nodes.ok(1, &["wait-durable", "--no-progress", "/s/closed"]);
    assert_eq!(stored("open"), "");
    nodes.ok(2, &["sync", "--no-progress", "/s/open"]);
    assert_eq!(stored("open"), "first");
    assert_eq!(nodes.state(1, "/s/open")["durable"], false);
    open.write_all(b" second").unwrap();
    drop((open, log));
    nodes.durable(2);
    assert_eq!((stored("open"), nodes.differences(2)), ("first second".to_owned(), String::new()));
    nodes.check();
}

/// The descriptor is older than the worker that serves it, and the file was drained in between: the write is no less
/// noticed.
#[test]
fn a_write_of_another_node_after_a_drain_and_the_death_of_the_worker_reaches_the_store() {
    let Some(nodes) = Nodes::up(2, "64MiB") else { return };
    nodes.attach(2, "", &[]);
    nodes.sh(1, "head -c 100000 /dev/zero > s/f");
    nodes.durable(1);
    use std::os::unix::fs::FileExt;
    let open = std::fs::OpenOptions::new().write(true).open(nodes.at(2).join("s/f")).unwrap();
    open.write_all_at(b"first", 10).unwrap();
    nodes.kill(1, "worker");
    // The next worker knows of no descriptor.
    nodes.wait("the drain", || nodes.state(2, "/s/f")["state"] == "clean");
    open.write_all_at(b"second", 1000).unwrap();
    assert_eq!(nodes.state(2, "/s/f")["durable"], false);
    drop(open);
    nodes.durable(2);
    let stored = std::fs::read(nodes.store().join("f")).unwrap();
    assert_eq!((&stored[10..15], &stored[1000..1006]), (&b"first"[..], &b"second"[..]));
    nodes.check();
}

#[test]
fn the_others_go_on_when_a_node_dies_and_what_it_has_is_drained_when_it_is_back() {
    let Some(nodes) = Nodes::up(3, "64MiB") else { return };
    nodes.attach(1, "?rate=6MB/s", &[]);
    for i in 1..=3 {
        nodes.sh(i, &format!("for k in 1 2 3; do head -c 1000000 /dev/urandom > s/n{i}-$k; done"));
    }
    nodes.kill_node(3);
    for i in 1..=2 {
        for k in 1..=3 {
            nodes.ok(1, &["wait-durable", "--no-progress", "--timeout", "90", &format!("/s/n{i}-{k}")]);
            nodes.sh(i, &format!("cmp s/n{i}-{k} $S/n{i}-{k}"));
        }
    }
    for k in 1..=3 {
        let (name, store) = (format!("n3-{k}"), nodes.store());
        let state = nodes.state(1, &format!("/s/{name}"));
        assert!(state["durable"] == false || store.join(&name).exists(), "{state}");
    }
    nodes.sh(2, "echo later > s/later");
    nodes.ok(2, &["wait-durable", "--no-progress", "--timeout", "90", "/s/later"]);
    nodes.start(3);
    assert!(nodes.mount(3));
    nodes.durable(1);
    assert_eq!(nodes.differences(3), "");
    nodes.check();
}

#[test]
fn sync_counts_what_is_not_drained_as_its_node_does_not_answer() {
    let Some(nodes) = Nodes::up(2, "64MiB") else { return };
    nodes.attach(1, "", &["--drain", "request"]);
    for i in 1..=2 {
        nodes.sh(i, &format!("echo {i} > s/n{i}"));
    }
    nodes.sh(1, "echo old > s/both");
    nodes.ok(1, &["sync", "--no-progress", "/s/both"]);
    nodes.sh(1, "echo outside > $S/both; echo inside > s/both");
    assert!(!nodes.forebay(1, &["sync", "--no-progress", "/s/both"]).status.success(), "a conflict");
    nodes.kill_node(2);
    let synced = nodes.forebay(1, &["sync", "--recursive", "--no-progress", "--json", "/s"]);
    let tasks: serde_json::Value = serde_json::from_slice(&synced.stdout).unwrap_or_default();
    let task = &tasks[0];
    assert_eq!(task["state"], "failed", "{}", bed::text(&synced));
    // What is in conflict is in the pool alone, too.
    assert_eq!((&task["error_count"], &task["unreachable_count"]), (&2.into(), &1.into()), "{task}");
    let failed: Vec<_> = task["errors"].as_array().unwrap().iter().map(|e| &e["path"]).collect();
    assert_eq!(failed, ["/s/n2", "/s/both"], "{task}");
    let stored = |name: &str| nodes.store().join(name).exists();
    assert!(stored("n1") && !stored("n2"), "the others are drained");
    nodes.start(2);
    assert!(nodes.mount(2));
    nodes.ok(1, &["resolve", "/s/both", "--keep", "pool"]);
    nodes.ok(1, &["sync", "--recursive", "--no-progress", "/s"]);
    assert!(stored("n2"));
}

#[test]
fn another_store_at_the_same_directory_is_not_the_one_before() {
    let Some(nodes) = Nodes::up(2, "64MiB") else { return };
    nodes.attach(1, "", &[]);
    nodes.sh(2, "echo one > s/one");
    nodes.ok(2, &["detach", "--no-progress", "/s"]);
    assert_eq!(nodes.sh(1, "ls s; cat $S/one"), "one\n");
    std::fs::create_dir(nodes.store().join("inner")).unwrap();
    let url = format!("file://{}/inner", nodes.store().display());
    nodes.ok(2, &["attach", &url, "/s"]);
    nodes.sh(2, "test -z \"$(ls s)\"; echo two > s/two");
    nodes.durable(1);
    assert_eq!(
        nodes.sh(1, "ls $S $S/inner"),
        format!("{0}:\ninner\none\n\n{0}/inner:\ntwo\n", nodes.store().display())
    );
}
