//! Pools of several nodes, with a daemon each: what programs on one node see of the others, and what remains when a
//! node is killed, stopped, cut off or started with the wrong key. Only root can give each node a network of its own;
//! otherwise nodes are on 127.0.0.0/8 and links are not cut.
//!
//! Tests assert only one time: that nothing hangs.

mod bed;
mod collective;
mod devices;
mod doors;
mod faults;
mod large;
mod launch;
mod leases;
mod libraries;
mod names;
mod nodes;
mod pointers;
mod remote;
mod runs;
mod stripes;
mod targets;
mod volume_access;
mod volume_async;
mod volume_faults;
mod volume_history;
mod volume_memory;
mod volume_mix;
mod volume_resize;
mod volumes;
mod watches;
mod wide;
mod without;

use std::path::Path;

use nodes::{plain, said, until, Cluster};

/// A shell function that runs a command and prints `EIO`, `ok` or the command's output.
const ERRNO: &str = r#"errno() { out=$("$@" 2>&1) && echo ok || case "$out" in *'Input/output error'*) echo EIO;; *) echo "$out";; esac; }; "#;

/// Waits until the first two nodes' targets hold no backing file.
fn nothing_is_left_on_targets(c: &Cluster) {
    until("removal of all backing files", || {
        let count = |node| {
            let target = c.pool(node).join("target/data");
            plain("find", &[target.to_str().unwrap(), "-type", "f"]).stdout.len()
        };
        (count(1) + count(2) == 0).then_some(())
    });
}

#[test]
fn programs_see_what_those_on_other_nodes_make_rename_and_remove() {
    let c = Cluster::up("names", 3);
    // A directory of each node, and in each directory files of every node.
    for i in 1..=3 {
        c.tell(i, &format!("mkdir /forebay/d{i}"));
    }
    for i in 1..=3 {
        for j in 1..=3 {
            c.tell(i, &format!("echo from {i} > /forebay/d{j}/f{i}; mkdir -m 2775 /forebay/d{j}/sub{i}"));
        }
    }
    for i in 1..=3 {
        let listed = c.tell(i, "echo $(ls /forebay /forebay/d1)");
        assert_eq!(listed, "/forebay: d1 d2 d3 /forebay/d1: f1 f2 f3 sub1 sub2 sub3\n");
        let homes =
            c.tell(i, "stat -c %i /forebay/d1 /forebay/d2 /forebay/d3 /forebay/d1/f3 /forebay/d1/sub3");
        let homes: Vec<u64> = homes.lines().map(|n| n.parse::<u64>().unwrap() >> 48).collect();
        assert_eq!(homes, [1, 2, 3, 1, 3], "directories are at their makers', files at their directories'");
        assert_eq!(
            c.tell(i, "stat -c '%a %F %h %s' /forebay/d2 /forebay/d2/f1"),
            "755 directory 5 6\n644 regular file 1 7\n"
        );
        assert_eq!(
            c.tell(i, "cd /forebay/d2/sub1 && pwd -P && cd ../.. && pwd -P"),
            "/forebay/d2/sub1\n/forebay\n"
        );
    }
    // Changes made on one node are visible on the others at once.
    c.tell(1, "mv /forebay/d3/f3 /forebay/d3/g3; chmod 600 /forebay/d3/g3; ln /forebay/d3/g3 /forebay/d3/h3; ln -s g3 /forebay/d3/l");
    assert_eq!(
        c.tell(2, "stat -c '%a %h' /forebay/d3/h3; readlink /forebay/d3/l; stat -L -c %s /forebay/d3/l"),
        "600 2\ng3\n7\n"
    );
    assert_eq!(c.tell(3, "cat /forebay/d3/l"), "from 3\n");
    c.tell(2, "setfattr -n user.x -v y /forebay/d3/g3 2>/dev/null || python3 -c 'import os; os.setxattr(\"/forebay/d3/g3\", \"user.x\", b\"y\")'");
    assert_eq!(
        c.tell(1, "python3 -c 'import os; print(os.getxattr(\"/forebay/d3/h3\", \"user.x\"))'"),
        "b'y'\n"
    );
    // A directory of another node is renamed within its parent, and moved to a directory of a third node.
    c.tell(1, "mv /forebay/d2/sub3 /forebay/d2/renamed");
    assert_eq!(
        c.tell(3, "stat -c %i /forebay/d2/renamed | cut -c1-3; cd /forebay/d2/renamed && pwd -P"),
        "844\n/forebay/d2/renamed\n"
    );
    c.tell(3, "echo x > /forebay/d2/renamed/x; mv /forebay/d2/renamed /forebay/d1/moved");
    assert_eq!(
        c.tell(2, "ls /forebay/d2 /forebay/d1/moved"),
        "/forebay/d1/moved:\nx\n\n/forebay/d2:\nf1\nf2\nf3\nsub1\nsub2\n"
    );
    // Any node can remove. A directory that is not empty stays and remains usable.
    let full = c.shell(2, "rmdir /forebay/d1");
    assert!(!full.status.success() && said(&full).contains("not empty"), "{}", said(&full));
    c.tell(2, "echo more > /forebay/d1/more && rm -r /forebay/d1 /forebay/d3");
    assert_eq!(c.tell(3, "ls /forebay"), "d2\n");
    c.tell(1, "mkdir /forebay/d1 && echo again > /forebay/d1/f1");
    c.check();
}

#[test]
fn data_of_other_nodes_is_read_and_written_through_mounts() {
    let c = Cluster::up("data", 2);
    let (Some(one), Some(two)) = (c.mount(1), c.mount(2)) else { return };
    let at = |mount: &Path, name: &str| mount.join(name).to_str().unwrap().to_owned();
    std::fs::create_dir(at(&one, "d")).unwrap();
    let bytes: Vec<u8> = (0..7_000_001u32).flat_map(|i| i.to_le_bytes()).take(7_000_001).collect();
    std::fs::write(at(&one, "d/f"), &bytes).unwrap();
    assert!(std::fs::read(at(&two, "d/f")).unwrap() == bytes, "read on the other node");
    // Writes on the other node, in the middle of the file and beyond its end.
    use std::os::unix::fs::FileExt;
    let there = std::fs::OpenOptions::new().read(true).write(true).open(at(&two, "d/f")).unwrap();
    there.write_all_at(b"middle", 3_000_000).unwrap();
    there.write_all_at(b"end", 8_000_000).unwrap();
    there.sync_all().unwrap();
    let mut expected = bytes.clone();
    expected.resize(8_000_003, 0);
    expected[3_000_000..3_000_006].copy_from_slice(b"middle");
    expected[8_000_000..].copy_from_slice(b"end");
    assert!(std::fs::read(at(&one, "d/f")).unwrap() == expected);
    assert_eq!(std::fs::metadata(at(&two, "d/f")).unwrap().len(), 8_000_003);
    there.set_len(5).unwrap();
    assert_eq!(std::fs::read(at(&one, "d/f")).unwrap(), expected[..5]);
    let times = std::fs::FileTimes::new()
        .set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000));
    there.set_times(times).unwrap();
    let seen = std::fs::metadata(at(&one, "d/f")).unwrap().modified().unwrap();
    assert_eq!(seen.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs(), 1_000_000);
    // A file that is open on the other node outlives its name, and is distinct from a new file of that name.
    std::fs::write(at(&one, "d/gone"), b"still here").unwrap();
    let gone = std::fs::OpenOptions::new().read(true).write(true).open(at(&two, "d/gone")).unwrap();
    std::fs::remove_file(at(&one, "d/gone")).unwrap();
    std::fs::write(at(&one, "d/gone"), b"another").unwrap();
    gone.write_all_at(b"!", 10).unwrap();
    let mut left = [0; 20];
    assert_eq!((gone.read_at(&mut left, 0).unwrap(), &left[..11]), (11, b"still here!".as_slice()));
    drop(gone);
    // The data of a file that the other node creates in this node's directory lie on the other node.
    std::fs::write(at(&two, "d/g"), b"from two").unwrap();
    assert_eq!(std::fs::read(at(&one, "d/g")).unwrap(), b"from two");
    // Appends of both nodes to one file: each line is whole, none is lost.
    let lines = |mount: &Path, who: char| {
        let path = at(mount, "d/log");
        std::thread::spawn(move || {
            use std::io::Write;
            let mut log = std::fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
            for i in 0..300 {
                log.write_all(format!("{who} {i:04} {}\n", "x".repeat(i % 90)).as_bytes()).unwrap();
            }
        })
    };
    for writer in [lines(&one, 'a'), lines(&two, 'b'), lines(&one, 'c'), lines(&two, 'd')] {
        writer.join().unwrap();
    }
    let log = std::fs::read_to_string(at(&two, "d/log")).unwrap();
    for who in ['a', 'b', 'c', 'd'] {
        let mine: Vec<&str> = log.lines().filter(|l| l.starts_with(who)).collect();
        let expected: Vec<String> =
            (0..300).map(|i| format!("{who} {i:04} {}", "x".repeat(i % 90))).collect();
        assert_eq!(mine, expected);
    }
    // Unmodified programs.
    let source = env!("CARGO_MANIFEST_DIR");
    let tar = format!("tar -C {source} -cf - . | tar -C {} -xf -", at(&one, "d"));
    let copied = plain("sh", &["-c", &tar]);
    assert!(copied.status.success(), "{}", said(&copied));
    let same =
        plain("diff", &["-r", "-x", "f", "-x", "g", "-x", "gone", "-x", "log", source, &at(&two, "d")]);
    assert!(same.status.success(), "{}", said(&same));
    let git = format!(
        "set -e; cd {}; git init -q r; cp -r d/src r/; cd r; git add -A; git -c user.name=t -c user.email=t@t commit -qm one; \
         cd {}/r; git -c safe.directory='*' status --short; git -c safe.directory='*' fsck",
        two.display(),
        one.display()
    );
    let versions = plain("sh", &["-c", &git]);
    assert!(versions.status.success() && versions.stdout.is_empty(), "{}", said(&versions));
    // A preloaded program opens files on another node through its own node's mount, and still sees one file system.
    let preloaded = c.tell(
        1,
        "cd /forebay; cat d/g; echo; echo more >> d/g; cp d/g d/copy; cat < d/copy; stat -c %s d/g; \
         python3 -c 'import os; f = open(\"d/g\"); print(os.fstat(f.fileno()).st_dev == os.stat(\"d/g\").st_dev, \
         os.fstat(f.fileno()).st_ino == os.stat(\"d/g\").st_ino, f.read(4))'; truncate -s 3 d/g; wc -c < d/g",
    );
    assert_eq!(preloaded, "from two\nfrom twomore\n13\nTrue True from\n3\n");
    assert_eq!(std::fs::read(at(&two, "d/g")).unwrap(), b"fro");
    // Executes programs and scripts that lie on the other node, and stages out files from there.
    c.tell(2, "cp /bin/echo /forebay/d/echo; printf '#!/bin/sh\\necho script $1\\n' > /forebay/d/s; chmod 755 /forebay/d/s");
    assert_eq!(c.tell(1, "/forebay/d/echo binary; cd /forebay/d && ./s 1"), "binary\nscript 1\n");
    let (pool, out) = (c.pool(1), c.file().with_file_name("out"));
    let direct = c
        .forebay(1, &["run", "--quiet", "--pool", pool.to_str().unwrap(), "--", "/forebay/d/echo", "direct"]);
    assert_eq!(said(&direct), "direct\n");
    let pair = format!("/d:{}", out.display());
    let staged = c.forebay(1, &["stage-out", "--pool", pool.to_str().unwrap(), &pair]);
    assert!(staged.status.success(), "{}", said(&staged));
    let same = plain("diff", &["-r", out.to_str().unwrap(), &at(&two, "d")]);
    assert!(same.status.success(), "{}", said(&same));
    // The backing files on the other node's target are removed too.
    drop(there);
    std::fs::remove_dir_all(at(&two, "d")).unwrap();
    std::fs::remove_dir_all(at(&one, "r")).unwrap();
    nothing_is_left_on_targets(&c);
    c.check();
}

#[test]
fn files_of_several_backing_files_stay_so_and_preloaded_programs_open_them_by_the_mount() {
    let c = Cluster::up("spread", 2);
    let (Some(one), Some(two)) = (c.mount(1), c.mount(2)) else { return };
    let layout = |node: usize, words: &[&str]| c.layout(node, words);
    c.tell(1, "mkdir /forebay/d");
    // A file whose name, inode and data are on node 1, and one whose data is on node 2.
    for (node, name) in [(1, "/d/one"), (2, "/d/two")] {
        let set = layout(node, &["set", "--stripe-count", "3", "--stripe-size", "4KiB", name]);
        assert!(set.status.success(), "{}", said(&set));
    }
    let bytes: Vec<u8> = (0..100_003u32).flat_map(u32::to_le_bytes).take(100_003).collect();
    for (name, from, to) in [("one", &two, &one), ("two", &one, &two)] {
        std::fs::write(from.join("d").join(name), &bytes).unwrap();
        assert!(std::fs::read(to.join("d").join(name)).unwrap() == bytes, "{name}");
        for node in [1, 2] {
            let told = c.tell(
                node,
                &format!(
                    "cd /forebay/d; cksum < {name}; stat -c %s {name}; python3 -c 'import os; f = open(\"{name}\"); \
                     print(os.fstat(f.fileno()).st_dev == os.stat(\"{name}\").st_dev)'"
                ),
            );
            let sum = plain("sh", &["-c", &format!("cksum < {}", to.join("d").join(name).display())]);
            assert_eq!(told, format!("{}100003\nTrue\n", String::from_utf8_lossy(&sum.stdout)));
            let migrated = layout(node, &["migrate", &format!("/d/{name}")]);
            assert!(
                !migrated.status.success() && said(&migrated).contains("several nodes"),
                "{}",
                said(&migrated)
            );
            let got = said(&layout(node, &["get", &format!("/d/{name}")]));
            assert!(got.contains("3 backing files"), "{got}");
        }
    }
    // A file that the program opens below the mount point keeps the mount's device number.
    let own = c.tell(
        2,
        &format!(
            "cat /forebay/d/one > /dev/null; python3 -c 'import os, sys; f = open(\"/forebay/d/one\"); g = open(sys.argv[1]); \
             print(os.fstat(g.fileno()).st_dev == os.stat(sys.argv[1]).st_dev, os.fstat(g.fileno()).st_dev == os.fstat(f.fileno()).st_dev, \
             os.path.samestat(os.fstat(f.fileno()), os.stat(\"/forebay/d/one\")))' {}",
            two.join("d/one").display()
        ),
    );
    assert_eq!(own, "True False True\n");
    c.tell(2, "rm -r /forebay/d");
    nothing_is_left_on_targets(&c);
    c.check();
}

#[test]
fn node_that_is_killed_gives_eio_for_its_own_alone_and_comes_back_with_its_data() {
    let c = Cluster::up("killed", 3);
    for i in 1..=3 {
        c.tell(i, &format!("mkdir /forebay/d{i}; echo {i} > /forebay/d{i}/f"));
    }
    c.kill(2);
    let looks = c.tell(
        1,
        &format!(
            "{ERRNO} errno stat /forebay/d2; errno stat /forebay/d2/f; errno touch /forebay/d2/g; \
         errno touch /forebay/d1/g; errno stat /forebay/d3/f; errno mkdir /forebay/new; errno ls /forebay"
        ),
    );
    assert_eq!(looks, "EIO\nEIO\nEIO\nok\nok\nok\nok\n");
    let state = |node: &serde_json::Value| node["nodes"][0]["state"].as_str().map(str::to_owned);
    assert_eq!(state(&c.status(1)).as_deref(), Some("unreachable"));
    let told = c.forebay(1, &["status", "--pool", c.pool(1).to_str().unwrap()]);
    assert_eq!(told.status.code(), Some(5), "{}", said(&told));
    let line = |node: &str, word: &str| said(&told).lines().any(|l| l.contains(node) && l.contains(word));
    assert!(line("n2 ", "unreachable") && line("n3 ", " up ") && line("n1 ", " up "), "{}", said(&told));
    let output = c.start(2);
    assert!(output.status.success() && said(&output).contains("data from before"), "{}", said(&output));
    until("a look at the node that is back", || {
        c.shell(3, "stat /forebay/d2/f").status.success().then_some(())
    });
    assert_eq!(c.tell(2, "cat /forebay/d2/f; stat -c %s /forebay/d1/f /forebay/d3/f"), "2\n2\n2\n");
    until("its state", || (state(&c.status(1)).as_deref() == Some("up")).then_some(()));
    c.tell(1, "touch /forebay/d2/h && rm -r /forebay/d1 /forebay/d2 /forebay/d3");
    c.check();
}

#[test]
fn worker_that_is_killed_in_a_storm_loses_and_repeats_nothing() {
    let c = Cluster::up("storm", 2);
    c.tell(1, "mkdir /forebay/d");
    // Exclusive creates and removals from the other node. Each fails if it is executed twice.
    let storm = "set -eC; for i in $(seq 400); do echo $i > /forebay/d/f$i; \
         if [ $((i % 3)) = 0 ]; then rm /forebay/d/f$i; elif [ $((i % 3)) = 1 ]; then mv /forebay/d/f$i /forebay/d/g$i; fi; \
         mkdir /forebay/d/s$i; if [ $((i % 2)) = 0 ]; then rmdir /forebay/d/s$i; fi; done";
    let mut child = c.spawn(2, storm);
    for round in 0.. {
        if child.try_wait().unwrap().is_some() {
            assert!(round > 2, "the storm was over before anything was killed");
            break;
        }
        if round < 8 {
            c.kill_worker(1 + round % 2);
        }
        std::thread::sleep(std::time::Duration::from_millis(1500));
    }
    assert!(child.wait().unwrap().success(), "something was lost or done twice");
    let count = c.tell(1, "ls /forebay/d | grep -c f; ls /forebay/d | grep -c g; ls /forebay/d | grep -c s");
    assert_eq!(count, "133\n134\n200\n");
    assert_eq!(c.tell(2, "cat /forebay/d/g1 /forebay/d/f2"), "1\n2\n");
    until("quiet", || c.status(1)["pids"]["worker"].as_u64());
    c.check();
}

#[test]
fn node_that_is_stopped_or_cut_off_hangs_nobody_and_heals_by_itself() {
    let c = Cluster::up("cut", 2);
    c.tell(2, "mkdir /forebay/d; echo x > /forebay/d/f");
    assert_eq!(c.tell(1, "stat -c %s /forebay/d/f"), "2\n");
    let go_on = c.stop_worker(2);
    let looked = c.tell(1, &format!("{ERRNO} errno stat /forebay/d/f; errno touch /forebay/here"));
    go_on();
    assert_eq!(looked, "EIO\nok\n");
    until("a look after it goes on", || c.shell(1, "stat /forebay/d/f").status.success().then_some(()));
    if !c.bed.set_link(2, false) {
        return println!("skipped: links cannot be cut here");
    }
    let looked = c.tell(1, &format!("{ERRNO} errno stat /forebay/d/f; errno touch /forebay/there"));
    assert_eq!(looked, "EIO\nok\n");
    // The root is on node 1.
    assert_eq!(c.tell(2, &format!("{ERRNO} errno stat /forebay/d/f")), "EIO\n");
    assert!(c.bed.set_link(2, true));
    until("a look after the link is up", || c.shell(1, "stat /forebay/d/f").status.success().then_some(()));
    c.tell(2, "touch /forebay/d/g && rm -r /forebay/d");
    c.check();
}

#[test]
fn what_is_wrong_with_a_pool_file_a_key_or_a_port_is_said() {
    let c = Cluster::prepare("wrong", 2);
    let up = |node: usize| said(&c.start(node));
    assert!(up(1).contains("is up"));
    // Starting the same node again is no error; a pool with another secret at its place is one.
    assert!(up(1).contains("it was already"), "{}", up(1));
    let good = std::fs::read_to_string(c.file()).unwrap();
    // The other nodes ignore a node that is started with another key.
    let key = c.file().with_extension("key");
    let secret = std::fs::read(&key).unwrap();
    std::fs::write(&key, [secret[1..].to_vec(), vec![7]].concat()).unwrap();
    assert!(up(1).contains("already up"), "{}", up(1));
    assert!(up(2).contains("is up"));
    let told = c.status(2);
    assert_eq!(told["nodes"][0]["state"], "unreachable");
    let refused = c.tell(1, &format!("{ERRNO} errno stat /forebay"));
    assert_eq!(refused, "ok\n");
    let stranger = c.shell(2, "stat /forebay");
    assert!(said(&stranger).contains("Input/output error"), "{}", said(&stranger));
    assert!(c.status(1)["network"]["forged"].as_u64().unwrap() > 0);
    let pool = c.pool(2);
    assert!(c.forebay(2, &["down", "--pool", pool.to_str().unwrap()]).status.success());
    std::fs::write(&key, secret).unwrap();
    // A key that other users can read is refused.
    let chmod = |mode: &str| assert!(plain("chmod", &[mode, key.to_str().unwrap()]).status.success());
    chmod("644");
    assert!(up(2).contains("chmod 600"), "{}", up(2));
    chmod("600");
    // The number of a node belongs to its data and cannot be changed.
    assert!(up(2).contains("is up"));
    assert!(c.forebay(2, &["down", "--keep", "--pool", pool.to_str().unwrap()]).status.success());
    std::fs::write(c.file(), good.replace("name = \"n2\"\n", "name = \"n2\"\nnumber = 5\n")).unwrap();
    let renumbered = up(2);
    assert!(renumbered.contains("node 2's") && renumbered.contains("number = 2"), "{renumbered}");
    std::fs::write(c.file(), format!("{good}\ncolour = 1\n")).unwrap();
    assert!(up(2).contains("colour"), "{}", up(2));
    let address = good.lines().find(|l| l.starts_with("host")).unwrap();
    let elsewhere = address.replace('"', "").replace("host = ", "");
    std::fs::write(c.file(), good.replacen(&elsewhere, "192.0.2.7", 1)).unwrap();
    assert!(c.forebay(1, &["down", "--pool", c.pool(1).to_str().unwrap()]).status.success());
    let foreign = up(1);
    assert!(foreign.contains("192.0.2.7") && foreign.contains("cannot listen"), "{foreign}");
    std::fs::write(c.file(), good).unwrap();
}

#[test]
fn node_that_lost_its_data_is_refused_and_joins_under_a_new_number() {
    let c = Cluster::up("lost", 3);
    c.tell(2, "mkdir /forebay/two; echo lost > /forebay/two/f; mkdir /forebay/two/sub");
    let old: u64 = c.tell(1, "stat -c %i /forebay/two").trim().parse().unwrap();
    c.tell(3, "ls /forebay/two; mkdir /forebay/three; echo 3 > /forebay/three/f");
    // The host of node 2 loses power, and with it the data in memory.
    c.kill(2);
    let (file, pool) = (c.file(), c.pool(2));
    assert!(c.forebay(2, &["down", "--pool", pool.to_str().unwrap()]).status.success());
    // Node 1 is too slow to answer while node 2 starts; node 2 ends when node 1 answers.
    let go_on = c.stop_worker(1);
    let started = c.start(2);
    assert!(started.status.success(), "{}", said(&started));
    go_on();
    let ends =
        || until("node 2 hears that its data are refused, and ends", || (!pool.exists()).then_some(()));
    ends();
    // A busy node 1 may be too slow once more.
    let mut refused = c.start(2);
    for _ in 0..5 {
        if refused.status.success() {
            ends();
            refused = c.start(2);
        }
    }
    let text = said(&refused);
    assert!(
        !refused.status.success() && text.contains("without its data") && text.contains("--renumber"),
        "{text}"
    );
    let words = ["up", "--pool", file.to_str().unwrap(), "--node", "n2", "--renumber", "--json"];
    let joined = c.forebay(2, &words);
    let told: serde_json::Value =
        serde_json::from_slice(&joined.stdout).unwrap_or_else(|e| panic!("{e}: {}", said(&joined)));
    let number = told["node"].as_u64().unwrap();
    assert!(number > 1024 && number <= 32_766, "{told}");
    // Inodes of the old number give EIO for ever. The pool continues, and node 2 creates inodes with its new number.
    assert_eq!(
        c.tell(2, "stat -c %s /forebay/three/f; mkdir /forebay/again; echo new > /forebay/again/f"),
        "2\n"
    );
    let sees = |node: usize| {
        let looked = c.tell(
            node,
            &format!("{ERRNO} errno stat /forebay/two/f; ls /forebay/again; stat -c %i /forebay/again"),
        );
        let lines: Vec<&str> = looked.lines().collect();
        assert_eq!(lines[..2], ["EIO", "f"], "{looked}");
        let new: u64 = lines[2].parse().unwrap();
        assert_eq!((old >> 48, new >> 48), (2, number));
    };
    (1..=3).for_each(sees);
    // Wide directories include the node under its new number.
    let becomes_wide = |name: &str| {
        c.tell(1, &format!("mkdir /forebay/{name}"));
        let path = format!("/forebay/{name}");
        let widened = c.layout(1, &["set", "--width", "3", &path]);
        assert!(widened.status.success(), "{}", said(&widened));
        c.tell(3, &format!("cd {path} && touch $(seq 40)"));
        assert_eq!(c.tell(2, &format!("ls {path} | wc -l")).trim(), "40");
    };
    becomes_wide("wide");
    let nodes = c.status(1)["nodes"].clone();
    assert!(
        nodes
            .as_array()
            .unwrap()
            .iter()
            .any(|n| n["name"] == "n2" && n["node"] == number && n["state"] == "up"),
        "{nodes}"
    );
    // All nodes keep the new number over a restart, node 2 itself too.
    c.kill_worker(1);
    c.kill_worker(2);
    (1..=3).for_each(|node| {
        until("a look after a restart", || {
            c.shell(node, "stat /forebay/again/f").status.success().then_some(())
        });
        sees(node);
    });
    becomes_wide("wide-again");
    assert!(c.forebay(2, &["down", "--keep", "--pool", pool.to_str().unwrap()]).status.success());
    let back = c.start(2);
    assert!(
        said(&back).contains(&format!("node {number}")) && said(&back).contains("from before"),
        "{}",
        said(&back)
    );
    until("a look after it is back", || c.shell(3, "stat /forebay/again/f").status.success().then_some(()));
    // Node 1 has the root, so it cannot get a new number.
    assert!(c.forebay(1, &["down", "--force", "--pool", c.pool(1).to_str().unwrap()]).status.success());
    let words = ["up", "--pool", file.to_str().unwrap(), "--node", "n1", "--renumber"];
    let root = said(&c.forebay(1, &words));
    assert!(root.contains("root") && root.contains("anew"), "{root}");
}

#[test]
fn all_nodes_are_started_and_stopped_by_one_command() {
    let c = Cluster::prepare("all", 3);
    let file = c.file();
    let words = |verb| ["--pool", file.to_str().unwrap(), verb, "--all"].map(str::to_owned);
    let up = c.by_remote_shell(&words("up"));
    assert!(up.status.success() && said(&up).contains("n3: pool"), "{}", said(&up));
    c.tell(1, "mkdir /forebay/d");
    assert_eq!(c.tell(3, "echo x > /forebay/d/f; ls /forebay/d"), "f\n");
    // Without a mount, `forebay run` warns what programs cannot do, and their calls fail with EOPNOTSUPP.
    let pool = c.pool(1);
    let bare = c.forebay(1, &["run", "--pool", pool.to_str().unwrap(), "--", "cat", "/forebay/d/f"]);
    let bare = said(&bare);
    assert!(bare.contains("not mounted here") && bare.contains("Operation not supported"), "{bare}");
    assert_eq!(c.status(2)["nodes"].as_array().unwrap().len(), 2);
    // Running nodes stay as they are; the others are started.
    c.kill(2);
    let again = c.by_remote_shell(&words("up"));
    assert!(again.status.success(), "{}", said(&again));
    assert_eq!(said(&again).matches("it was already").count(), 2, "{}", said(&again));
    until("the nodes know each other again", || {
        c.status(1)["nodes"].as_array().unwrap().iter().all(|n| n["state"] == "up").then_some(())
    });
    let down = c.by_remote_shell(&words("down"));
    assert!(down.status.success() && said(&down).contains("n2: pool"), "{}", said(&down));
    assert!(!c.pool(1).exists() && !c.pool(3).exists());
    let nothing = c.forebay(1, &["up", "--all"]);
    assert!(said(&nothing).contains("no pool file"), "{}", said(&nothing));
}

#[test]
fn mpi_ranks_on_two_nodes_share_a_file_and_read_each_others() {
    let c = Cluster::up("mpi", 2);
    let program = c.file().with_file_name("ranks");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster/ranks.c");
    let compiled = plain("mpicc.openmpi", &["-O1", "-o", program.to_str().unwrap(), source]);
    if !compiled.status.success() {
        return println!("skipped: no Open MPI to compile with: {}", said(&compiled));
    }
    c.tell(1, "mkdir /forebay/d");
    // The MPI sees one host, the pool two nodes. Successive ranks are on different nodes.
    let ranks = c.by_ranks(&launch::OPEN_MPI, &[1, 2, 1, 2], &format!("{} /forebay/d", program.display()));
    assert!(said(&ranks).contains("all 4 ranks"), "{}", said(&ranks));
    assert_eq!(
        c.tell(2, "ls /forebay/d; stat -c %s /forebay/d/shared"),
        "own0\nown1\nown2\nown3\nshared\n12582980\n"
    );
    c.tell(2, "rm -r /forebay/d");
    c.check();
}
