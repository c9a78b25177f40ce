//! Nodes with several targets.

use std::fs;
use std::path::PathBuf;

use crate::nodes::{plain, program, said, until, Cluster};

/// The pool file's line for two targets of a node, both in memory. The first one is small.
fn two(c: &Cluster, node: usize) -> String {
    format!(
        "target = [{{ path = \"{}\", capacity = \"64MiB\" }}, {{ path = \"{}\", capacity = \"128MiB\" }}]",
        c.pool(node).display(),
        second(c, node).display()
    )
}

/// Fills a node's first target above its high-water mark with one file.
fn fill(c: &Cluster, node: usize, path: &str) {
    c.tell(
        node,
        &format!("head -c 64M /dev/zero > {path} 2> /dev/null; truncate -s -3M {path}; stat -c %s {path}"),
    );
}

/// The directory of a node's second target.
fn second(c: &Cluster, node: usize) -> PathBuf {
    c.file().with_file_name(format!("m{node}"))
}

fn up(name: &str, count: usize) -> Cluster {
    let c = Cluster::prepare_with(name, count, two);
    c.start_all();
    c
}

/// The numbers of backing files on a node's two targets.
fn files(c: &Cluster, node: usize) -> [usize; 2] {
    [c.pool(node), second(c, node)].map(|dir| {
        let found = plain("find", &[dir.join("target/data").to_str().unwrap(), "-type", "f"]);
        String::from_utf8_lossy(&found.stdout).lines().count()
    })
}

fn nothing_is_left(c: &Cluster, nodes: usize) {
    until("removal of all backing files", || (1..=nodes).all(|node| files(c, node) == [0, 0]).then_some(()));
}

#[test]
fn first_target_fills_and_what_is_made_then_is_on_the_second() {
    let c = up("fills", 2);
    let df = c.tell(2, "df -BM --output=size /forebay | tail -1");
    let size: u64 = df.trim().trim_end_matches('M').parse().unwrap();
    assert_eq!(size, 2 * (64 + 128), "all targets of all nodes");
    c.tell(1, "echo small > /forebay/a; mkdir /forebay/d");
    fill(&c, 1, "/forebay/full");
    assert_eq!((c.lies_on("/a").as_str(), c.lies_on("/full").as_str()), ("n1", "n1"));
    // The first target is above its high-water mark now. Its files remain usable.
    c.tell(
        1,
        "head -c 60M /dev/zero | tr '\\0' x > /forebay/b; echo more >> /forebay/a; echo in > /forebay/d/f",
    );
    assert_eq!((c.lies_on("/b").as_str(), c.lies_on("/d/f").as_str()), ("n1:1", "n1:1"));
    assert_eq!(files(&c, 1), [2, 2]);
    assert_eq!(
        c.tell(1, "cat /forebay/a /forebay/d/f; stat -c '%s %b' /forebay/b; grep -c xxx /forebay/b"),
        format!("small\nmore\nin\n{} {}\n1\n", 60 << 20, (60 << 20) / 512)
    );
    // Every kind of change of a file on the second target.
    c.tell(1, "cd /forebay; truncate -s 5 b; touch -d @1000000 b; mv b d/b; ln d/b e; chmod 600 e");
    assert_eq!(c.tell(1, "stat -c '%s %Y %h %a' /forebay/e; cat /forebay/d/b"), "5 1000000 2 600\nxxxxx");
    // Unnamed files can be linked, and FIFOs work, on whichever target has room.
    let script = "import os
fd = os.open('/forebay/d', os.O_TMPFILE | os.O_RDWR, 0o640)
os.write(fd, b'named late')
os.link(f'/proc/self/fd/{fd}', '/forebay/d/late', src_dir_fd=fd, follow_symlinks=True)
os.mkfifo('/forebay/d/fifo')
r = os.open('/forebay/d/fifo', os.O_RDONLY | os.O_NONBLOCK)
w = os.open('/forebay/d/fifo', os.O_WRONLY)
os.write(w, b'through')
assert os.read(r, 100) == b'through'
assert os.stat(fd).st_nlink == 1 and os.stat('/forebay/d/late').st_ino == os.fstat(fd).st_ino
os.fchmod(fd, 0o600)
fd = os.open('/forebay/d/gone', os.O_CREAT | os.O_RDWR)
os.unlink('/forebay/d/gone')
os.write(fd, b'kept')
assert os.pread(fd, 9, 0) == b'kept' and os.fstat(fd).st_nlink == 0
";
    fs::write(c.file().with_file_name("late.py"), script).unwrap();
    c.tell(1, &format!("python3 {}", c.file().with_file_name("late.py").display()));
    assert_eq!(c.lies_on("/d/late"), "n1:1");
    assert_eq!(c.tell(1, "cat /forebay/d/late; stat -c %a /forebay/d/late"), "named late600\n");
    // The other node and the mount use and create such files like others.
    if let (Some(m1), Some(m2)) = (c.mount(1), c.mount(2)) {
        assert_eq!(fs::read(m2.join("d/late")).unwrap(), b"named late");
        assert_eq!(c.tell(2, "cat /forebay/e /forebay/d/f"), "xxxxxin\n");
        fs::write(m1.join("d/mounted"), b"by the mount").unwrap();
        assert_eq!(c.lies_on("/d/mounted"), "n1:1");
        assert_eq!(c.tell(2, "cat /forebay/d/mounted; echo and more >> /forebay/d/mounted"), "by the mount");
        assert_eq!(fs::read(m1.join("d/mounted")).unwrap(), b"by the mountand more\n");
        fs::write(m2.join("d/there"), b"x").unwrap();
        assert_eq!(c.lies_on("/d/there"), "n2", "each node fills its own");
        fs::remove_file(m2.join("d/mounted")).unwrap();
    }
    c.check();
    // fsck finds a backing file on a target that its file's layout does not name.
    let name = |path: &str| {
        let ino: u64 = c.tell(1, &format!("stat -c %i {path}")).trim().parse().unwrap();
        format!("target/data/{:02x}/{ino:016x}", ino as u8)
    };
    let stray = second(&c, 1).join(name("/forebay/a"));
    fs::write(&stray, b"stray").unwrap();
    let pool = c.pool(1);
    let found = c.forebay(1, &["fsck", "--pool", pool.to_str().unwrap()]);
    assert!(!found.status.success() && said(&found).contains("lies on target 1"), "{}", said(&found));
    fs::remove_file(stray).unwrap();
    c.tell(1, "rm -r /forebay/a /forebay/full /forebay/d /forebay/e");
    nothing_is_left(&c, 2);
    assert_eq!(c.tell(1, "echo x > /forebay/again; cat /forebay/again"), "x\n");
    assert_eq!(c.lies_on("/again"), "n1", "there is room again");
    c.check();
}

#[test]
fn stripes_go_over_all_targets_and_a_killed_worker_costs_none() {
    let c = up("all-targets", 2);
    c.tell(1, "mkdir /forebay/s /forebay/t");
    assert!(c.layout(1, &["set", "-c", "4", "-S", "64KiB", "/s"]).status.success());
    assert!(c.layout(1, &["set", "-t", "n2:1", "/t"]).status.success());
    for (targets, word) in [("n2:2", "node n2 has 2 targets"), ("n1:x", "no number of a target")] {
        let wrong = c.layout(1, &["set", "-t", targets, "/t"]);
        assert!(!wrong.status.success() && said(&wrong).contains(word), "{}", said(&wrong));
    }
    let (Some(m1), Some(m2)) = (c.mount(1), c.mount(2)) else { return };
    let data: Vec<u8> = (0..1_000_003u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    fs::write(m1.join("s/f"), &data).unwrap();
    let on = c.lies_on("/s/f");
    let mut all: Vec<&str> = on.split(", ").collect();
    all.sort_unstable();
    assert_eq!(all, ["n1", "n1:1", "n2", "n2:1"]);
    assert_eq!((files(&c, 1), files(&c, 2)), ([1, 1], [1, 1]));
    assert!(fs::read(m2.join("s/f")).unwrap() == data);
    fs::write(m1.join("t/f"), b"there").unwrap();
    assert_eq!((c.lies_on("/t/f").as_str(), files(&c, 2)), ("n2:1", [1, 2]));
    assert_eq!(c.tell(2, "echo own > /forebay/t/own; cat /forebay/t/f /forebay/t/own"), "thereown\n");
    assert_eq!(c.lies_on("/t/own"), "n2:1", "named in the directory's layout, by a program of that node");
    // Both targets are in use when the worker is killed: a program creates and removes files on both, and the other
    // node reads.
    fill(&c, 1, "/forebay/full");
    let mut maker = c.spawn(
        1,
        "cd /forebay; i=0; while [ ! -e /forebay/stop ]; do i=$((i+1)); echo $i > n$i && [ $(cat n$i) = $i ] || exit 1; \
         [ $((i % 3)) = 0 ] && rm n$i; done; echo $i > count",
    );
    for _ in 0..3 {
        std::thread::sleep(std::time::Duration::from_millis(300));
        c.kill_worker(1);
        assert!(fs::read(m2.join("s/f")).unwrap() == data);
    }
    c.tell(2, "touch /forebay/stop");
    assert!(maker.wait().unwrap().success(), "a program felt that the worker was killed");
    let count: u64 = c.tell(1, "cat /forebay/count").trim().parse().unwrap();
    assert!(count > 10, "only {count} files were made");
    let left = c.tell(1, "cd /forebay; for f in n*; do echo $f $(cat $f); done | awk '{ if ($1 != \"n\" $2 || $2 % 3 == 0) print }'");
    assert_eq!(left, "");
    assert!(files(&c, 1)[1] > 5, "the second target was not in use");
    c.check();
    c.tell(1, "rm -r /forebay/*");
    nothing_is_left(&c, 2);
    c.check();
}

#[test]
fn node_starts_again_with_the_targets_that_it_had_and_with_no_others() {
    let c = up("again", 2);
    c.tell(2, "mkdir /forebay/d; echo one > /forebay/d/a");
    fill(&c, 2, "/forebay/d/full");
    c.tell(2, "echo two > /forebay/d/b");
    let pool = c.pool(2);
    let down = |words: &[&str]| {
        let output = c.forebay(2, &[&["down", "--pool", pool.to_str().unwrap()], words].concat());
        assert!(output.status.success(), "{}", said(&output));
    };
    down(&["--keep"]);
    assert_eq!(files(&c, 2), [2, 1]);
    let checked = c.forebay(2, &["fsck", "--pool", pool.to_str().unwrap()]);
    assert!(checked.status.success(), "{}", said(&checked));
    // A node with another list of targets does not start.
    let text = fs::read_to_string(c.file()).unwrap();
    let (dir, other) = (second(&c, 2), c.file().with_file_name("other"));
    let refused = |text: &str, words: &[&str]| {
        fs::write(c.file(), text).unwrap();
        let output = c.start(2);
        let told = said(&output);
        assert!(
            !output.status.success() && words.iter().all(|word| told.contains(word)),
            "{words:?}: {told}"
        );
        assert!(!told.contains("panicked"), "{told}");
    };
    let path = |path: &std::path::Path| format!("\"{}\"", path.display());
    refused(
        &text.replace(&path(&dir), &path(&other)),
        &["node n2", "target 1", "in its place", "place in the list"],
    );
    let one = text.replace(&format!(", {{ path = {}, capacity = \"128MiB\" }}", path(&dir)), "");
    assert_ne!(one, text);
    refused(&one, &["not listed now", dir.to_str().unwrap()]);
    // A node does not start while the medium of a target is not mounted: files on it would seem empty.
    let at = dir.join("target");
    if plain("mountpoint", &["-q", at.to_str().unwrap()]).status.success() {
        let stash = c.file().with_file_name("stash");
        fs::create_dir(&stash).unwrap();
        let moved = |from: &PathBuf, to: &PathBuf| {
            let [from, to] = [from, to].map(|p| p.to_str().unwrap().to_owned());
            plain("mount", &["--move", &from, &to]).status.success()
                || plain("mount", &["--bind", &from, &to]).status.success()
                    && plain("umount", &["-l", &from]).status.success()
        };
        assert!(moved(&at, &stash));
        refused(&text, &["target 1", "its data is gone", "--renumber"]);
        assert!(moved(&stash, &at));
        fs::remove_dir(&stash).unwrap();
    }
    // It starts with the old list and one target more.
    let more = text.replace(
        &format!("{}, capacity = \"128MiB\" }}]", path(&dir)),
        &format!(
            "{}, capacity = \"128MiB\" }}, {{ path = {}, capacity = \"64MiB\" }}]",
            path(&dir),
            path(&other)
        ),
    );
    assert_ne!(more, text);
    fs::write(c.file(), &more).unwrap();
    let output = c.start(2);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(c.tell(2, "cat /forebay/d/a /forebay/d/b"), "one\ntwo\n");
    assert!(c.layout(2, &["set", "-t", "n2:2", "/d"]).status.success());
    assert_eq!(c.tell(2, "echo three > /forebay/d/c; cat /forebay/d/c"), "three\n");
    // When its other targets are full, its programs create files on the new target, also in directories of a node that
    // does not know that target yet.
    c.tell(2, "mkdir /forebay/d/e");
    assert!(c.layout(2, &["set", "-t", "n2:1", "/d/e"]).status.success());
    c.tell(2, "f=/forebay/d/e/full; head -c 128M /dev/zero > $f 2> /dev/null; truncate -s -3M $f; echo four > /forebay/x");
    assert_eq!((c.lies_on("/d/e/full").as_str(), c.lies_on("/x").as_str()), ("n2:1", "n2:2"));
    assert_eq!(c.tell(2, "cat /forebay/x"), "four\n");
    // A target that does not exist is refused, wherever the directory lies.
    c.tell(1, "mkdir /forebay/g");
    let script = format!(
        "import ctypes, errno
lib, pool = ctypes.CDLL('{}'), ctypes.c_void_p()
assert lib.forebay_attach(None, ctypes.byref(pool)) == 0
for path in b'g', b'd':
    for node, index, wanted in (1, 2, -errno.ENXIO), (2, 3, -errno.ENXIO), (3, 0, -errno.ENXIO), (2, 2, 0):
        target = (ctypes.c_uint32 * 1)(node << 16 | index)
        told = lib.forebay_layout_set_on(pool, path, 2, 65536, target, 1)
        assert told == wanted, (path, node, index, told)
",
        program("libforebay.so").display()
    );
    let at = c.file().with_file_name("absent.py");
    fs::write(&at, script).unwrap();
    (1..=2).for_each(|node| drop(c.tell(node, &format!("python3 {}", at.display()))));
    c.check();
    down(&[]);
    for dir in [&pool, &dir, &other] {
        assert!(!dir.exists(), "{} is left", dir.display());
    }
}
