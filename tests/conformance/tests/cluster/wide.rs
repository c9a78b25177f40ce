//! Wide directories, as programs, mounts and the commands see them.

use crate::nodes::{said, until, Cluster};
use crate::ERRNO;

impl Cluster {
    fn widen(&self, node: usize, width: &str, path: &str) {
        let output = self.layout(node, &["set", "--width", width, path]);
        assert!(output.status.success(), "{}", said(&output));
    }
}

/// Python that creates `n` files in a directory.
fn make(dir: &str, prefix: &str, n: usize) -> String {
    format!(
        "python3 -c \"import os\nfor i in range({n}):\n    os.close(os.open('{dir}/{prefix}%d' % i, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640))\""
    )
}

/// Python that prints how many names a directory has on each node, from their inode numbers.
fn count(dir: &str) -> String {
    format!(
        "python3 -c \"import os, collections\nc = collections.Counter(e.inode() >> 48 for e in os.scandir('{dir}'))\nprint(*(c[n] for n in (1, 2, 3)))\""
    )
}

#[test]
fn programs_of_all_nodes_use_a_wide_directory_as_any_other() {
    let c = Cluster::up("wide", 3);
    c.tell(2, "mkdir -m 2770 /forebay/w; mkdir /forebay/n");
    c.widen(1, "0", "/w");
    let shown = said(&c.layout(3, &["get", "/w"]));
    assert!(shown.contains("entries on 3 nodes: n2, n3, n1"), "{shown}");
    for i in 1..=3 {
        c.tell(i, &make("/forebay/w", &format!("f{i}."), 100));
    }
    let spread: Vec<usize> =
        c.tell(1, &count("/forebay/w")).split_whitespace().map(|n| n.parse().unwrap()).collect();
    assert!(
        spread.iter().sum::<usize>() == 300 && spread.iter().all(|n| (60..=140).contains(n)),
        "{spread:?}"
    );
    // All nodes see one tree: attributes, data, existing and absent names, `..`, the path to the root.
    for i in 1..=3 {
        assert_eq!(
            c.tell(i, "ls /forebay/w | sort | uniq | wc -l; stat -c '%a %h %s' /forebay/w"),
            format!("{}\n2770 {} {}\n", 299 + i, 1 + i, 299 + i)
        );
        c.tell(i, &format!("for k in 1 2 3 4 5; do echo {i}-$k > /forebay/w/f{i}.$k; done"));
        assert_eq!(
            c.tell(i, &format!("cat /forebay/w/f{i}.[1-5] | tr '\\n' ' '")),
            format!("{i}-1 {i}-2 {i}-3 {i}-4 {i}-5 ")
        );
        assert_eq!(c.tell(i, &format!("mkdir -p /forebay/w/d{i}/e; cd /forebay/w/d{i}/e && pwd -P && cd ../.. && pwd -P && cd .. && pwd -P")),
            format!("/forebay/w/d{i}/e\n/forebay/w\n/forebay\n"));
        assert_eq!(
            c.tell(i, &format!("stat -c %i /forebay/w/d{i} | python3 -c 'print(int(input()) >> 48)'")),
            format!("{i}\n")
        );
        assert_eq!(c.tell(i, "stat -c %i /forebay/w/d1/.. /forebay/w | uniq | wc -l; ls -ia /forebay/w/d1 | awk '$2 == \"..\" {print $1}' | wc -l"), "1\n1\n");
    }
    assert_eq!(c.tell(1, "stat -c %h /forebay/w"), "5\n");
    // A node finds a name that another node created, also after it looked for it in vain.
    for k in 0..12 {
        assert_eq!(c.tell(1, &format!("test -e /forebay/w/late{k} || echo absent")), "absent\n");
        c.tell(2, &format!("touch /forebay/w/late{k}"));
        assert_eq!(c.tell(1, &format!("stat -c %F /forebay/w/late{k}")), "regular empty file\n");
        c.tell(3, &format!("rm /forebay/w/late{k}"));
        assert_eq!(c.tell(1, &format!("test -e /forebay/w/late{k} || echo absent")), "absent\n");
    }
    // Renames within the directory, out of it, into it and over a file; links; all kinds of inodes.
    for k in 0..6 {
        c.tell(3, &format!("mv /forebay/w/f1.{k} /forebay/w/g{k}; mv /forebay/w/f2.{k} /forebay/n/; ln /forebay/w/f3.{k} /forebay/w/h{k}; ln -s g{k} /forebay/w/l{k}; mkfifo /forebay/w/p{k}"));
        c.tell(1, &format!("mv /forebay/n/f2.{k} /forebay/w/f3.{k}; test $(stat -c %h /forebay/w/h{k}) = 1"));
    }
    assert_eq!(c.tell(1, "ls /forebay/w | wc -l; cat /forebay/w/l1; mv /forebay/w/d1 /forebay/w/d2/; ls /forebay/w/d2; rmdir /forebay/w/d3 2>/dev/null || rmdir /forebay/w/d3/e /forebay/w/d3; ls -d /forebay/w/d*"),
        "315\n1-1\nd1\ne\n/forebay/w/d2\n");
    // The parts receive changes of the directory's attributes, and new files inherit them.
    c.tell(3, "chgrp 7 /forebay/w; chmod 2755 /forebay/w");
    c.tell(1, &make("/forebay/w", "later", 20));
    assert_eq!(c.tell(2, "stat -c %g /forebay/w/later* | sort | uniq -c | awk '{print $1, $2}'; stat -c '%a %g' /forebay/w"), "20 7\n2755 7\n");
    c.tell(2, "touch -d 2001-02-03T04:05:06Z /forebay/w");
    assert_eq!(c.tell(1, "stat -c %Y /forebay/w"), "981173106\n");
    c.check();
    assert_eq!(
        c.tell(
            1,
            &format!("{ERRNO} rmdir /forebay/w 2>&1 | grep -c 'not empty'; rm -r /forebay/w; ls /forebay")
        ),
        "1\nn\n"
    );
    c.check();
    until("removal of all backing files", || {
        let left = (1..=3).map(|node| {
            let target = c.pool(node).join("target/data");
            crate::nodes::plain("find", &[target.to_str().unwrap(), "-type", "f"]).stdout.len()
        });
        (left.sum::<usize>() == 0).then_some(())
    });
}

#[test]
fn width_is_refused_with_words_where_it_cannot_be() {
    let c = Cluster::up("widths", 2);
    c.tell(1, "mkdir /forebay/full /forebay/e; touch /forebay/full/f /forebay/file");
    for (words, why) in [
        (["set", "-W", "2", "/full"], "it has entries, which lie on its node"),
        (["set", "-W", "2", "/file"], "only directories have one"),
        (["set", "-W", "3", "/e"], "the pool has 2 nodes"),
        (["set", "-W", "99", "/e"], "2 to 16 nodes, not 99"),
    ] {
        let output = c.layout(2, &words);
        assert!(!output.status.success() && said(&output).contains(why), "{words:?}: {}", said(&output));
    }
    c.widen(2, "2", "/e");
    let again = c.layout(1, &["set", "-W", "2", "/e"]);
    assert!(!again.status.success() && said(&again).contains("it is wide already"), "{}", said(&again));
    let json = said(&c.layout(1, &["get", "--json", "/e"]));
    assert!(json.contains("\"entries_on\""), "{json}");
    // The root can be made wide as long as it is empty.
    c.tell(1, "rm -r /forebay/full /forebay/file; rmdir /forebay/e");
    c.widen(1, "0", "/");
    c.tell(2, &make("/forebay", "f", 60));
    assert_eq!(c.tell(1, "ls /forebay | wc -l; stat -c %i /forebay/f* | awk '{print ($1 > 500000000000000)}' | sort | uniq | wc -l"), "60\n2\n");
    assert_eq!(c.tell(1, "mkdir -p /forebay/a/b; cd /forebay/a/b && pwd -P; mv /forebay/a /forebay/c; ls /forebay/c; cd /forebay/c/b/../.. && pwd -P"), "/forebay/a/b\nb\n/forebay\n");
    c.check();
}

#[test]
fn node_that_is_down_takes_only_its_own_names_of_a_wide_directory_with_it() {
    let c = Cluster::up("widedown", 3);
    c.tell(1, "mkdir /forebay/w");
    c.widen(1, "0", "/w");
    c.tell(1, &make("/forebay/w", "f", 60));
    c.kill(3);
    let stats = c.tell(2, &format!("{ERRNO} for i in $(seq 0 59); do errno stat -c '' /forebay/w/f$i; done | sort | uniq -c | awk '{{print $2, ($1 > 10 && $1 < 50)}}'"));
    assert_eq!(stats, "EIO 1\nok 1\n");
    let made = c.tell(1, &format!("{ERRNO} for i in $(seq 0 29); do errno touch /forebay/w/new$i; done | sort | uniq -c | awk '{{print $2, ($1 > 2)}}'"));
    assert_eq!(made, "EIO 1\nok 1\n");
    // Nothing is guessed: a listing returns the entries before the missing part, then fails.
    assert_eq!(
        c.tell(1, &format!("{ERRNO} errno ls /forebay/w; errno stat /forebay/w; errno chmod 700 /forebay/w")),
        "EIO\nEIO\nEIO\n"
    );
    assert!(c.start(3).status.success());
    until("the node to be reached again", || {
        c.shell(1, "ls /forebay/w/ > /dev/null && stat /forebay/w > /dev/null").status.success().then_some(())
    });
    assert_eq!(c.tell(2, "ls /forebay/w/f* | wc -l; rm -r /forebay/w; ls /forebay"), "60\n");
    c.check();
}

#[test]
fn workers_are_killed_while_all_nodes_fill_and_empty_a_wide_directory() {
    let c = Cluster::up("widekill", 3);
    c.tell(3, "mkdir /forebay/w");
    c.widen(3, "0", "/w");
    let writers: Vec<_> = (1..=3)
        .map(|i| {
            let dir = format!("/forebay/w/f{i}.");
            c.spawn(i, &format!("set -e; for k in $(seq 150); do echo $k > {dir}$k; mv {dir}$k {dir}x$k; test $((k % 3)) = 0 || rm {dir}x$k; done"))
        })
        .collect();
    for node in [3, 1, 2, 3] {
        std::thread::sleep(std::time::Duration::from_millis(250));
        c.kill_worker(node);
    }
    for mut writer in writers {
        assert!(writer.wait().unwrap().success());
    }
    for i in 1..=3 {
        assert_eq!(c.tell(i, "ls /forebay/w | wc -l; stat -c %s /forebay/w"), "150\n150\n");
    }
    c.check();
}

#[test]
fn mounts_see_a_wide_directory_as_programs_do() {
    let c = Cluster::up("widemount", 2);
    c.tell(1, "mkdir /forebay/w");
    let Some(mounts) = [1, 2].map(|node| c.mount(node)).into_iter().collect::<Option<Vec<_>>>() else {
        return;
    };
    let at = |node: usize, path: &str| mounts[node - 1].join(path);
    // The kernel caches that these names are absent.
    for k in 0..20 {
        assert!(!at(1, &format!("w/f{k}")).exists());
    }
    c.widen(2, "2", "/w");
    for k in 0..20 {
        std::fs::write(at(2, &format!("w/f{k}")), format!("{k}")).unwrap();
        assert_eq!(std::fs::read(at(1, &format!("w/f{k}"))).unwrap(), format!("{k}").as_bytes());
    }
    let names = |node| {
        let mut names: Vec<_> =
            std::fs::read_dir(at(node, "w")).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(1).len(), 20);
    assert_eq!(names(1), names(2));
    for k in 0..20 {
        std::fs::remove_file(at(1, &format!("w/f{k}"))).unwrap();
        assert!(!at(2, &format!("w/f{k}")).exists());
    }
    std::fs::create_dir(at(2, "w/d")).unwrap();
    assert_eq!(std::fs::canonicalize(at(1, "w/d/../d")).unwrap(), at(1, "w/d"));
    assert_eq!(std::fs::metadata(at(1, "w")).unwrap().len(), 1);
    std::fs::remove_dir(at(1, "w/d")).unwrap();
    std::fs::remove_dir(at(2, "w")).unwrap();
    assert!(!at(1, "w").exists());
    c.check();
}

#[test]
fn kernel_of_the_home_forgets_what_it_believed_absent_though_the_worker_is_killed_meanwhile() {
    let c = Cluster::up("widecrash", 2);
    let Some(mounts) = [1, 2].map(|node| c.mount(node)).into_iter().collect::<Option<Vec<_>>>() else {
        return;
    };
    let at = |node: usize, path: &str| mounts[node - 1].join(path);
    // The root too: it has no name that could be invalidated in the kernel. This caches the absence of a directory in
    // it.
    assert!(!at(1, "w0").exists());
    c.widen(1, "2", "/");
    for k in 0..12 {
        let dir = format!("w{k}");
        std::fs::create_dir(at(1, &dir)).unwrap();
        for name in 0..8 {
            assert!(!at(1, &format!("{dir}/f{name}")).exists());
        }
        let path = format!("/{dir}");
        std::thread::scope(|scope| {
            let widening = scope.spawn(|| c.layout(2, &["set", "--width", "2", &path]));
            std::thread::sleep(std::time::Duration::from_micros(700 * k));
            c.kill_worker(1);
            let output = widening.join().unwrap();
            assert!(output.status.success(), "{}", said(&output));
        });
        for name in 0..8 {
            let path = format!("{dir}/f{name}");
            std::fs::write(at(2, &path), &path).unwrap();
            assert_eq!(std::fs::read(at(1, &path)).unwrap(), path.as_bytes());
        }
    }
    c.check();
}

#[test]
fn directories_made_where_new_ones_are_wide_are_wide_whoever_is_killed() {
    let c = Cluster::up("widenew", 3);
    c.tell(1, "mkdir /forebay/runs /forebay/other");
    let set = c.layout(2, &["set", "--default-width", "0", "/runs"]);
    assert!(set.status.success(), "{}", said(&set));
    let over = "directories made in it: over 16 nodes, or all";
    for i in 1..=3 {
        c.tell(
            i,
            &format!("mkdir -p /forebay/runs/r{i}/deep && cd /forebay/runs/r{i}/deep && touch $(seq 60)"),
        );
        for dir in [format!("/runs/r{i}"), format!("/runs/r{i}/deep")] {
            let shown = said(&c.layout(1, &["get", &dir]));
            assert!(shown.contains("entries on 3 nodes") && shown.contains(over), "{shown}");
        }
        let spread = c.tell(i % 3 + 1, &count(&format!("/forebay/runs/r{i}/deep")));
        let spread: Vec<usize> = spread.split_whitespace().map(|n| n.parse().unwrap()).collect();
        assert!(spread.iter().sum::<usize>() == 60 && spread.iter().all(|n| *n > 4), "{spread:?}");
    }
    c.tell(3, "mkdir /forebay/other/narrow");
    assert!(!said(&c.layout(1, &["get", "/other/narrow"])).contains("nodes"));
    // Workers are killed meanwhile: each directory exists with all its parts, or not at all.
    let make = |node: usize| {
        format!(
            "python3 -c \"import os\nfor i in range(40):\n    try: os.mkdir('/forebay/runs/k{node}.%d' % i)\n    except FileExistsError: pass\n    except OSError as e: assert e.errno == 5, e\""
        )
    };
    let making: Vec<_> = (1..=3).map(|node| c.spawn(node, &make(node))).collect();
    for node in [2, 1, 3, 2, 1] {
        std::thread::sleep(std::time::Duration::from_millis(120));
        c.kill_worker(node);
    }
    for mut child in making {
        assert!(child.wait().unwrap().success());
    }
    let names = c.tell(1, "ls -d /forebay/runs/k*");
    let paths: Vec<&str> = names.lines().map(|name| name.trim_start_matches("/forebay")).collect();
    let told = c.layout(2, &[&["get", "--json"], &paths[..]].concat());
    let told: serde_json::Value = serde_json::from_slice(&told.stdout).unwrap();
    let all = told.as_array().unwrap();
    println!("{} of 120 were made", all.len());
    assert!(all.len() == paths.len() && all.len() > 20, "{names}");
    for one in all {
        let nodes = one["entries_on"].as_array().map(Vec::len);
        assert!(nodes == Some(3) && one["default_width"] == 16, "{one}");
    }
    c.tell(3, "rmdir /forebay/runs/k* && mkdir /forebay/runs/r1/last");
    // After the setting is removed, new directories are narrow.
    let set = c.layout(1, &["set", "--default-width", "1", "/runs"]);
    assert!(set.status.success(), "{}", said(&set));
    c.tell(2, "mkdir /forebay/runs/narrow");
    assert!(!said(&c.layout(1, &["get", "/runs/narrow"])).contains("nodes"));
    let refused = c.layout(1, &["set", "--default-width", "17", "/runs"]);
    assert!(!refused.status.success() && said(&refused).contains("2 to 16"), "{}", said(&refused));
    c.check();
}

#[test]
fn all_ranks_change_one_wide_directory_at_once() {
    let c = Cluster::up("widechmod", 4);
    c.tell(2, "mkdir /forebay/w");
    c.widen(2, "0", "/w");
    let change = "python3 -c \"import os, threading\nbad = []\ndef go(t):\n    for i in range(12):\n        try:\n            os.chmod('/forebay/w', 0o700 + (t * 12 + i) % 64)\n            os.chown('/forebay/w', -1, t)\n            os.utime('/forebay/w')\n        except OSError as e:\n            bad.append(e)\nall = [threading.Thread(target=go, args=(t,)) for t in range(8)]\n[t.start() for t in all]\n[t.join() for t in all]\nprint(bad)\nraise SystemExit(len(bad))\"";
    let ranks: Vec<_> = (1..=4).map(|node| c.spawn(node, change)).collect();
    for mut rank in ranks {
        assert!(rank.wait().unwrap().success());
    }
    // Every part has the attributes of the same change.
    c.tell(3, &make("/forebay/w", "f", 40));
    assert_eq!(
        c.tell(1, "chmod 2700 /forebay/w; stat -c %a /forebay/w; ls /forebay/w | wc -l"),
        "2700\n40\n"
    );
    c.check();
}

#[test]
fn listings_of_wide_directories_of_all_sizes_are_whole_and_in_one_order_on_all_nodes() {
    let c = Cluster::up("widelist", 4);
    let sizes = [0, 1, 5, 60, 900, 2500];
    for (i, size) in sizes.into_iter().enumerate() {
        let node = 1 + i % 4;
        c.tell(node, &format!("mkdir /forebay/w{size}"));
        c.widen(node, "0", &format!("/w{size}"));
        c.tell(node, &make(&format!("/forebay/w{size}"), "a-name-of-some-length-", size));
    }
    for size in sizes {
        // Unsorted, in the order of the cookies, which is the same on all nodes; with attributes; and by several
        // programs at the same time.
        let list = format!("for k in 1 2 3; do (ls -f /forebay/w{size} | grep -v '^[.]' | md5sum > /tmp/widelist-$$-$k) & done; wait; cat /tmp/widelist-$$-* | uniq -c | awk '{{print $1, $2}}'; rm /tmp/widelist-$$-*; ls -f /forebay/w{size} | sort -u | wc -l; ls -l /forebay/w{size} | wc -l; stat -c %s /forebay/w{size}");
        let told: std::collections::BTreeSet<String> = (1..=4).map(|node| c.tell(node, &list)).collect();
        assert_eq!(told.len(), 1, "{told:?}");
        let told: Vec<String> = told.iter().flat_map(|text| text.lines().map(str::to_owned)).collect();
        assert!(told[0].starts_with("3 "), "{told:?}");
        let numbers: Vec<usize> = told[1..].iter().map(|n| n.parse().unwrap()).collect();
        assert_eq!(numbers, [size + 2, size + 1, size]);
    }
    // A listing requests names of later nodes ahead. If such a node does not answer, it returns the names before, then
    // fails.
    let resume = c.stop_worker(3);
    let said = c.tell(1, &format!("{ERRNO} errno ls /forebay/w60"));
    assert!(said.contains("EIO"), "{said}");
    resume();
    until("the node to be reached again", || {
        (c.shell(1, "ls /forebay/w60 | wc -l").stdout == b"60\n").then_some(())
    });
}
