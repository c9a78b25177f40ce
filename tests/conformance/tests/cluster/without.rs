//! Nodes without a target: their programs work like others, and their files and directories lie on other nodes.

use std::fs;
use std::path::PathBuf;

use crate::launch::OPEN_MPI;
use crate::nodes::{bytes, plain, said, until, Cluster};

/// Four nodes. The last two have no target.
pub(crate) fn prepare(name: &str) -> Cluster {
    Cluster::prepare_with(name, 4, |c, node| match node {
        1 | 2 => format!("target = [{{ path = \"{}\", capacity = \"96MiB\" }}]", c.pool(node).display()),
        _ => format!("state = \"{}\"", c.pool(node).display()),
    })
}

fn up(name: &str) -> Cluster {
    let c = prepare(name);
    c.start_all();
    c
}

/// The number of backing files on a node.
fn files_on(c: &Cluster, node: usize) -> usize {
    let found = plain("find", &[c.pool(node).join("target/data").to_str().unwrap(), "-type", "f"]);
    String::from_utf8_lossy(&found.stdout).lines().count()
}

/// The birth node of an inode.
fn home(c: &Cluster, path: &str) -> u64 {
    c.tell(1, &format!("stat -c %i {path}")).trim().parse::<u64>().unwrap() >> 48
}

#[test]
fn programs_of_nodes_without_a_target_make_read_and_remove_files() {
    let c = up("without");
    let mounts: Option<Vec<PathBuf>> = (1..=4).map(|node| c.mount(node)).collect();
    let Some(mounts) = mounts else { return };
    let df = c.tell(3, "df -BM --output=size /forebay | tail -1");
    assert_eq!(df.trim(), "192M", "what those with targets give");
    // New directories are on the home of their parent, and files on nodes with targets, in turn.
    c.tell(3, "mkdir /forebay/d3 /forebay/d3/in");
    c.tell(2, "mkdir /forebay/d2");
    c.tell(4, "mkdir /forebay/d2/d4");
    assert_eq!([home(&c, "/forebay/d3/in"), home(&c, "/forebay/d2/d4")], [1, 2]);
    c.tell(3, "for i in $(seq 20); do echo from 3: $i > /forebay/d3/f$i; done");
    c.tell(4, "for i in $(seq 20); do echo from 4: $i > /forebay/d2/d4/f$i; done");
    let spread: Vec<String> = (1..=20).map(|i| c.lies_on(&format!("/d3/f{i}"))).collect();
    for node in ["n1", "n2"] {
        let count = spread.iter().filter(|on| *on == node).count();
        assert!(count >= 5, "{node} has {count} of 20 files: {spread:?}");
    }
    assert_eq!((files_on(&c, 3), files_on(&c, 4)), (0, 0));
    assert_eq!(files_on(&c, 1) + files_on(&c, 2), 40);
    for node in 1..=4 {
        let read = c.tell(node, "cat /forebay/d3/f7 /forebay/d2/d4/f9; ls /forebay/d3 | wc -l");
        assert_eq!(read, "from 3: 7\nfrom 4: 9\n21\n", "on node {node}");
        assert_eq!(fs::read_to_string(mounts[node - 1].join("d3/f7")).unwrap(), "from 3: 7\n");
    }
    // Every kind of change from a node without a target, of files that any node created.
    c.tell(1, "echo of one > /forebay/one; echo of two > /forebay/d2/two");
    c.tell(
        4,
        "cd /forebay; echo more >> one; mv one d2/moved; ln d2/two d3/linked; ln -s ../d2/two d3/symlink; chmod 640 d2/two; \
         touch -d @1000000 d2/two; truncate -s 3 d2/moved; mkfifo d3/fifo; rmdir d3/in; rm d3/f20",
    );
    let found = "stat -c '%a %h %Y %s' d2/two; cat d2/moved d3/linked d3/symlink; stat -c %F d3/fifo";
    let told = "640 2 1000000 7\nof of two\nof two\nfifo\n";
    for node in [1, 3] {
        assert_eq!(c.tell(node, &format!("cd /forebay; {found}")), told);
    }
    let big = bytes(3_000_001, 7);
    fs::write(mounts[2].join("d3/big"), &big).unwrap();
    assert!(
        fs::read(mounts[3].join("d3/big")).unwrap() == big
            && fs::read(mounts[0].join("d3/big")).unwrap() == big
    );
    assert_ne!(c.lies_on("/d3/big"), "n3");
    // Only this node's programs share a mapping. Stores are written to the file at msync or when the mapping ends, and
    // a new mapping shows the current data.
    let script = "import mmap, os
fd = os.open('/forebay/d3/mapped', os.O_CREAT | os.O_RDWR)
os.write(fd, b'.' * 9000)
m = mmap.mmap(fd, 9000)
m[8000] = 33
assert os.pread(fd, 1, 8000) == b'!'
m[1] = 43
m.flush()
";
    let file = c.file().with_file_name("mapped.py");
    fs::write(&file, script).unwrap();
    c.tell(3, &format!("python3 {}", file.display()));
    assert_eq!(c.tell(1, "tr -d . < /forebay/d3/mapped"), "+!");
    c.tell(1, "printf '#' | dd of=/forebay/d3/mapped bs=1 seek=5 conv=notrunc status=none");
    let anew = "python3 -c \"import mmap; f = open('/forebay/d3/mapped', 'r+'); print(chr(mmap.mmap(f.fileno(), 9000)[5]))\"";
    assert_eq!(c.tell(3, anew), "#\n");
    // A file that is unlinked while it is open; locks; a lock that another node's program holds.
    let script = "import fcntl, os, sys
fd = os.open('/forebay/d3/gone', os.O_CREAT | os.O_RDWR, 0o400)
os.unlink('/forebay/d3/gone')
os.write(fd, b'kept')
assert os.pread(fd, 9, 0) == b'kept'
fd = os.open('/forebay/d3/locked', os.O_CREAT | os.O_RDWR)
fcntl.lockf(fd, fcntl.LOCK_EX)
try:
    os.open('/forebay/d3', os.O_TMPFILE | os.O_RDWR)
    sys.exit('a file without a name was made on a node without a target')
except OSError as e:
    assert e.errno == 95, e
print('locked', flush=True)
sys.stdin.readline()
";
    let file = c.file().with_file_name("calls.py");
    fs::write(&file, script).unwrap();
    let mut holder = c.command(3, &format!("python3 {}", file.display()));
    let holder = holder.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut holder = holder.spawn().unwrap();
    let mut line = String::new();
    let mut out = std::io::BufReader::new(holder.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut out, &mut line).unwrap();
    assert_eq!(line, "locked\n");
    let try_lock = "python3 -c \"import fcntl; fcntl.lockf(open('/forebay/d3/locked', 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)\"";
    for node in [1, 4] {
        let refused = c.shell(node, try_lock);
        assert!(
            !refused.status.success() && said(&refused).contains("BlockingIOError"),
            "{}",
            said(&refused)
        );
    }
    drop(holder.stdin.take());
    assert!(holder.wait().unwrap().success());
    until("release of the lock", || c.shell(4, try_lock).status.success().then_some(()));
    c.check();
    c.tell(4, "rm -r /forebay/*");
    until("removal of all backing files", || (files_on(&c, 1) + files_on(&c, 2) == 0).then_some(()));
    c.check();
}

#[test]
fn ranks_on_nodes_without_a_target_share_files_with_those_on_others() {
    let c = up("without-mpi");
    let program = c.file().with_file_name("ranks");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster/ranks.c");
    let compiled = plain("mpicc.openmpi", &["-O1", "-o", program.to_str().unwrap(), source]);
    if !compiled.status.success() {
        return println!("skipped: no Open MPI to compile with: {}", said(&compiled));
    }
    // The first rank, which creates the shared file, is on a node with a target, then on one without.
    for (at, dir) in [([1, 2, 3, 4], "/forebay/a"), ([3, 4, 1, 2], "/forebay/b")] {
        c.tell(4, &format!("mkdir {dir}"));
        let ranks = c.by_ranks(&OPEN_MPI, &at, &format!("{} {dir}", program.display()));
        assert!(said(&ranks).contains("all 4 ranks"), "{}", said(&ranks));
        let on = c.lies_on(&format!("{}/shared", dir.trim_start_matches("/forebay")));
        let mut on: Vec<&str> = on.split(", ").collect();
        on.sort_unstable();
        assert_eq!(on, ["n1", "n2"]);
        assert_eq!(
            c.tell(3, &format!("ls {dir}; stat -c %s {dir}/shared")),
            "own0\nown1\nown2\nown3\nshared\n12582980\n"
        );
    }
    c.tell(3, "rm -r /forebay/a /forebay/b");
    c.check();
}

#[test]
fn layouts_and_wide_directories_leave_nodes_without_a_target_out() {
    let c = up("without-wide");
    let mounts: Option<Vec<PathBuf>> = (1..=4).map(|node| c.mount(node)).collect();
    let Some(mounts) = mounts else { return };
    c.tell(3, "mkdir /forebay/s /forebay/w");
    for (words, why) in [
        (["set", "-t", "n3", "/s"], "node n3 has no target"),
        (["set", "-W", "3", "/w"], "the pool has 2 nodes with targets"),
    ] {
        let refused = c.layout(4, &words);
        assert!(!refused.status.success() && said(&refused).contains(why), "{}", said(&refused));
    }
    let set = c.layout(3, &["set", "-c", "4", "-S", "64KiB", "/s"]);
    assert!(set.status.success(), "{}", said(&set));
    let data = bytes(1_000_003, 3);
    fs::write(mounts[2].join("s/f"), &data).unwrap();
    let on = c.lies_on("/s/f");
    let mut on: Vec<&str> = on.split(", ").collect();
    on.sort_unstable();
    assert_eq!(on, ["n1", "n2"]);
    assert!((0..4).all(|i| fs::read(mounts[i].join("s/f")).unwrap() == data));
    // A wide directory lies over the nodes with targets. Inodes that other nodes create in it lie on the parts of their
    // names.
    let set = c.layout(4, &["set", "-W", "0", "/w"]);
    assert!(set.status.success(), "{}", said(&set));
    let json = c.layout(3, &["get", "--json", "/w"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json[0]["entries_on"], serde_json::json!([1, 2]));
    c.tell(4, "cd /forebay/w; for i in $(seq 30); do mkdir d$i; echo $i > d$i/f; echo $i > f$i; done");
    let homes = c.tell(
        1,
        "cd /forebay/w; stat -c %i d* f* | awk '{ print int($1 / 2 ^ 48) }' | sort | uniq -c | wc -l",
    );
    assert_eq!(homes, "2\n", "on the parts' nodes alone");
    let read = "cd /forebay/w; ls | wc -l; cat d17/f f23";
    assert_eq!((c.tell(1, read), c.tell(3, read)), ("60\n17\n23\n".to_owned(), "60\n17\n23\n".to_owned()));
    c.check();
    c.tell(3, "rm -r /forebay/w /forebay/s");
    c.check();
}

#[test]
fn node_without_a_target_is_killed_and_started_again_under_its_programs() {
    let c = up("without-killed");
    let Some(_) = (1..=4).map(|node| c.mount(node)).collect::<Option<Vec<_>>>() else { return };
    let mut maker = c.spawn(
        3,
        "cd /forebay; i=0; while [ ! -e stop ]; do i=$((i+1)); echo $i > n$i && [ $(cat n$i) = $i ] || exit 1; \
         [ $((i % 3)) = 0 ] && rm n$i; done; echo $i > count",
    );
    for _ in 0..3 {
        std::thread::sleep(std::time::Duration::from_millis(300));
        c.kill_worker(3);
    }
    until("files after the last kill", || c.shell(4, "test -e /forebay/n20").status.success().then_some(()));
    c.tell(4, "touch /forebay/stop");
    assert!(maker.wait().unwrap().success(), "a program felt that its node's worker was killed");
    let wrong = "cd /forebay; for f in n*; do echo $f $(cat $f); done | awk '{ if ($1 != \"n\" $2 || $2 % 3 == 0) print }'";
    assert_eq!(c.tell(4, wrong), "");
    // Its host dies: other nodes are not affected. It restarts under its number.
    c.tell(3, "echo before > /forebay/before");
    c.kill(3);
    assert_eq!(
        c.tell(4, "cat /forebay/before; echo x > /forebay/meanwhile; cat /forebay/meanwhile"),
        "before\nx\n"
    );
    let again = c.start(3);
    assert!(again.status.success(), "{}", said(&again));
    c.mount(3);
    assert_eq!(
        c.tell(3, "cat /forebay/before /forebay/meanwhile; echo y > /forebay/y; cat /forebay/y"),
        "before\nx\ny\n"
    );
    c.check();
    // Its state is not needed: without it, the node joins under another number.
    let pool = c.pool(3);
    let down = c.forebay(3, &["down", "--force", "--pool", pool.to_str().unwrap()]);
    assert!(down.status.success(), "{}", said(&down));
    let (file, renumber) = (c.file(), ["--node", "n3", "--renumber"]);
    let started = c.forebay(3, &[&["up", "--pool", file.to_str().unwrap()], &renumber[..]].concat());
    assert!(started.status.success() && said(&started).contains("no target"), "{}", said(&started));
    c.mount(3);
    assert_eq!(c.tell(3, "cat /forebay/before; echo z > /forebay/z; cat /forebay/z"), "before\nz\n");
    // A node without a target cannot get one.
    let target = format!("target = [{{ path = \"{}\" }}]", pool.display());
    let text = fs::read_to_string(&file).unwrap();
    let with = text.replace(&format!("state = \"{}\"", pool.display()), &target);
    assert_ne!(text, with);
    fs::write(&file, with).unwrap();
    let down = c.forebay(3, &["down", "--keep", "--force", "--pool", pool.to_str().unwrap()]);
    assert!(down.status.success(), "{}", said(&down));
    let refused = c.start(3);
    assert!(
        !refused.status.success() && said(&refused).contains("the node had no target"),
        "{}",
        said(&refused)
    );
    fs::write(&file, text).unwrap();
    let again = c.start(3);
    assert!(again.status.success(), "{}", said(&again));
    // All nodes with targets are down: requests fail, at once or soon, and nothing hangs.
    for node in [1, 2] {
        c.kill(node);
    }
    let failed = c.shell(3, "ls /forebay || cat /forebay/before || echo x > /forebay/none");
    assert!(!failed.status.success() && said(&failed).contains("Input/output error"), "{}", said(&failed));
    let status = c.status(4);
    assert_eq!((&status["capacity_bytes"], &status["free_bytes"]), (&0.into(), &0.into()), "{status}");
    for node in [1, 2] {
        assert!(c.start(node).status.success());
    }
    c.mount(1);
    until("answers of all nodes", || c.shell(4, "cat /forebay/before").status.success().then_some(()));
    assert_eq!(c.tell(4, "cat /forebay/before"), "before\n");
    c.check();
}
