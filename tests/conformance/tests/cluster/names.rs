//! Names over several nodes: links to other nodes' files, renames between nodes, and what remains when workers and
//! programs are killed during them.

use crate::nodes::{plain, said, until, Cluster};

/// Python that makes the system calls directly, because `mv` copies where a rename fails.
const CALLS: &str = r#"
import os, errno, sys
def attempt(call, *a):
    try:
        call(*a)
        return "ok"
    except OSError as e:
        return errno.errorcode[e.errno]
def look(*paths):
    for p in paths:
        try:
            s = os.lstat(p)
            print(os.path.basename(p), s.st_ino >> 48, s.st_nlink)
        except OSError as e:
            print(os.path.basename(p), errno.errorcode[e.errno])
"#;

impl Cluster {
    /// Runs a Python program on a node and returns its output.
    fn python(&self, node: usize, script: &str) -> String {
        let path = self.file().with_file_name(format!("script-{}.py", rand()));
        std::fs::write(&path, format!("{CALLS}{script}")).unwrap();
        self.tell(node, &format!("cd /forebay && python3 {}", path.display()))
    }
}

/// A new number at each call.
fn rand() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    NUMBER.fetch_add(1, Ordering::Relaxed)
}

#[test]
fn files_of_other_nodes_have_hard_links_that_count() {
    let c = Cluster::up("links", 3);
    for i in 1..=3 {
        c.tell(i, &format!("mkdir /forebay/d{i}; echo from {i} > /forebay/d{i}/f; mkfifo /forebay/d{i}/p; ln -s f /forebay/d{i}/l"));
    }
    assert_eq!(
        c.python(1, "os.link('d2/f', 'd1/a'); os.link('d2/f', 'd3/b'); look('d2/f', 'd1/a', 'd3/b')"),
        "f 2 3\na 2 3\nb 2 3\n"
    );
    // Every node sees the links, can write through any name, and lists them with their attributes.
    for i in 1..=3 {
        assert_eq!(
            c.tell(i, "stat -c %h /forebay/d1/a; ls -l /forebay/d3 | awk 'NF > 2 {print $2, $9}'"),
            "3\n3 b\n1 f\n1 l\n1 p\n"
        );
    }
    c.tell(1, "chmod 600 /forebay/d1/a");
    assert_eq!(c.tell(3, "stat -c '%a %s' /forebay/d3/b"), "600 7\n");
    // Links fail for a name that exists and for a directory. Symlinks and FIFOs can have links too.
    let refused = "print(attempt(os.link, 'd2/f', 'd1/a'), attempt(os.link, 'd2', 'd1/x'), attempt(os.link, 'd2/none', 'd1/x'))";
    assert_eq!(c.python(3, refused), "EEXIST EPERM ENOENT\n");
    c.python(3, "os.link('d2/l', 'd1/l2', follow_symlinks=False); os.link('d2/p', 'd1/p2')");
    assert_eq!(c.tell(1, "readlink /forebay/d1/l2; stat -c '%F %h' /forebay/d1/p2"), "f\nfifo 2\n");
    // O_CREAT opens a link, O_EXCL fails on it. Links are renamed within their directory, replaced, and unlinked name
    // by name.
    assert_eq!(c.tell(1, "touch /forebay/d1/a; set -C; (: > /forebay/d1/l2) 2>/dev/null || echo there; mv /forebay/d1/a /forebay/d1/c; stat -c %h /forebay/d1/c"), "there\n3\n");
    c.tell(1, "mv /forebay/d1/f /forebay/d1/c");
    assert_eq!(c.python(2, "look('d2/f', 'd1/c')"), "f 2 2\nc 1 1\n");
    c.tell(3, "rm /forebay/d2/f");
    assert_eq!(c.python(1, "look('d2/f', 'd3/b')"), "f ENOENT\nb 2 1\n");
    c.tell(2, "rm /forebay/d3/b");
    c.tell(1, "rm -r /forebay/d1 /forebay/d2 /forebay/d3");
    c.check();
    until("removal of all backing files", || {
        let left = (1..=3).map(|node| {
            let target = c.pool(node).join("target/data");
            plain("find", &[target.to_str().unwrap(), "-type", "f"]).stdout.len()
        });
        (left.sum::<usize>() == 0).then_some(())
    });
}

#[test]
fn files_and_directories_are_renamed_between_nodes() {
    let c = Cluster::up("renames", 3);
    for i in 1..=3 {
        c.tell(i, &format!("mkdir /forebay/d{i}; for f in a b c; do echo $f'{i}' > /forebay/d{i}/$f; done"));
    }
    // A renamed file keeps its inode and its data, which stay where they are.
    let inode = c.tell(2, "stat -c %i /forebay/d2/a");
    c.python(1, "os.rename('d2/a', 'd3/a2'); look('d2/a', 'd3/a2')");
    assert_eq!(c.tell(2, "stat -c %i /forebay/d3/a2; cat /forebay/d3/a2"), format!("{inode}a2\n"));
    // Renames replace files of every node. Other renames fail.
    assert_eq!(
        c.python(1, "os.rename('d3/a2', 'd1/a'); os.rename('d1/b', 'd2/b'); look('d1/a', 'd2/b', 'd1/b')"),
        "a 2 1\nb 1 1\nb ENOENT\n"
    );
    let refused = "print(attempt(os.rename, 'd1/c', 'd2'), attempt(os.rename, 'd1/none', 'd2/c'), attempt(os.rename, 'd1', 'd2/c'))";
    assert_eq!(c.python(2, refused), "EISDIR ENOENT ENOTDIR\n");
    // Trees move from one node's directory to another's and into a third's. They cannot move below themselves, and
    // replace only an empty directory.
    c.tell(3, "mkdir -p /forebay/d3/t/u/v; echo deep > /forebay/d3/t/u/v/f; mkdir /forebay/d3/e");
    c.tell(1, "mkdir -p /forebay/d3/t/one; echo 1 > /forebay/d3/t/one/f");
    assert_eq!(
        c.python(2, "print(attempt(os.rename, 'd3/t', 'd3/t/u/v/x'), attempt(os.rename, 'd3', 'd3/t/one/x'), attempt(os.rename, 'd3/t', 'd2'))"),
        "EINVAL EINVAL ENOTEMPTY\n"
    );
    c.python(1, "os.rename('d3/t', 'd2/t'); os.rename('d2/t/one', 'd1/one'); os.rename('d1/one', 'd3/e')");
    for i in 1..=3 {
        assert_eq!(
            c.tell(i, "stat -c %s /forebay/d2/t/u/v/f /forebay/d3/e/f; cd /forebay/d2/t/u && pwd -P && cd ../../.. && pwd -P; stat -c '%n %h' /forebay/d1 /forebay/d2 /forebay/d3"),
            "5\n2\n/forebay/d2/t/u\n/forebay\n/forebay/d1 2\n/forebay/d2 3\n/forebay/d3 3\n"
        );
    }
    // mv renames here and copies nothing.
    let inode = c.tell(1, "stat -c %i /forebay/d2/t/u");
    assert_eq!(c.tell(3, "mv /forebay/d2/t/u /forebay/d1/w; stat -c %i /forebay/d1/w"), inode);
    assert_eq!(c.tell(1, "cd /forebay/d1/w && python3 -c 'import os; os.rename(\"v/f\", \"../../d3/f2\")'; stat -c %s /forebay/d3/f2"), "5\n");
    c.tell(2, "rm -r /forebay/d1 /forebay/d2 /forebay/d3");
    c.check();
}

#[test]
fn observers_on_every_node_find_a_renamed_file_under_one_name_and_not_under_both() {
    let c = Cluster::up("observers", 3);
    for i in 1..=3 {
        c.tell(i, &format!("mkdir /forebay/d{i}"));
    }
    c.tell(1, "for i in $(seq 200); do : > /forebay/d1/f$i; done");
    // Each file moves from d1 to d2 once. An observer that does not find it in d1 must find it in d2 then; an observer
    // that finds it in d2 must no longer find it in d1.
    let observer = "
def there(p): return os.path.lexists(p)
looks = 0
for i in range(1, 201):
    old, new = 'd1/f%d' % i, 'd2/f%d' % i
    while True:
        looks += 1
        if not there(old):
            if not there(new): sys.exit('%s is under no name' % new)
            break
        if there(new) and there(old): sys.exit('%s is under both names' % new)
print(looks)
";
    let mover = "
import time
for i in range(1, 201):
    time.sleep(0.005)
    os.rename('d1/f%d' % i, 'd2/f%d' % i)
";
    let dir = c.file().with_file_name("observe");
    std::fs::create_dir(&dir).unwrap();
    let write = |name: &str, text: &str| {
        let path = dir.join(name);
        std::fs::write(&path, format!("{CALLS}{text}")).unwrap();
        format!("cd /forebay && python3 {}", path.display())
    };
    let (observer, mover) = (write("observer.py", observer), write("mover.py", mover));
    let others = [1, 2, 3].map(|node| c.spawn(node, &observer));
    c.tell(3, &mover);
    for mut other in others {
        assert!(other.wait().unwrap().success(), "an observer saw what cannot be");
    }
    c.tell(2, "test $(ls /forebay/d2 | wc -l) = 200 && rm -r /forebay/d1 /forebay/d2 /forebay/d3");
    c.check();
}

#[test]
fn killed_workers_and_programs_leave_no_change_half_done() {
    let c = Cluster::up("halves", 3);
    for i in 1..=3 {
        c.tell(i, &format!("mkdir /forebay/d{i} /forebay/d{i}/keep"));
    }
    // Every node moves files and directories of its own round the nodes. At the end each exists once, under one name.
    let storm = |node: usize| {
        let next = node % 3 + 1;
        format!(
            "import random
random.seed({node})
os.chdir('/forebay')
def again(call, *a):
    # A request in progress at two crashes is EIO, one that met others for long EBUSY: it was made or it was not.
    for _ in range(50):
        try:
            return call(*a)
        except OSError as e:
            if e.errno not in (errno.EIO, errno.EBUSY): return
for i in range(60):
    f = 'd{node}/f{node}.%d' % i
    open(f, 'w').write(f)
    again(os.rename, f, 'd{next}/f{node}.%d' % i)
    again(os.link, 'd{next}/f{node}.%d' % i, 'd{node}/l{node}.%d' % i)
    d = 'd{next}/s{node}.%d' % i
    again(os.mkdir, d)
    again(os.rename, d, 'd{node}/keep/s{node}.%d' % i)
    if i % 3 == 0: again(os.rmdir, 'd{node}/keep/s{node}.%d' % i)
    if i % 4 == 0: again(os.unlink, 'd{next}/f{node}.%d' % i)
"
        )
    };
    let dir = c.file().with_file_name("storm");
    std::fs::create_dir(&dir).unwrap();
    let mut children: Vec<_> = (1..=3)
        .map(|node| {
            let path = dir.join(format!("{node}.py"));
            std::fs::write(&path, format!("{CALLS}{}", storm(node))).unwrap();
            c.spawn(node, &format!("python3 {}", path.display()))
        })
        .collect();
    // These programs are killed in the middle of such changes.
    let doomed = "i=0; while :; do i=$((i+1)); python3 -c \"import os; os.chdir('/forebay'); os.mkdir('d2/x$i'); os.rename('d2/x$i', 'd3/x$i'); os.rmdir('d3/x$i')\"; done";
    for round in 0..10 {
        let mut victim = c.spawn(1, doomed);
        std::thread::sleep(std::time::Duration::from_millis(700));
        if round % 2 == 0 {
            c.kill_worker(1 + round / 2 % 3);
        }
        c.kill_program(&mut victim);
    }
    for child in &mut children {
        assert!(child.wait().unwrap().success());
    }
    for i in 1..=3 {
        until("quiet", || c.status(i)["pids"]["worker"].as_u64());
    }
    // What the killed programs left can be removed.
    c.tell(1, "rm -rf /forebay/d2/x* /forebay/d3/x*");
    let next = |node: usize| node % 3 + 1;
    for node in 1..=3 {
        let looked = c.python(
            2,
            &format!(
                "for i in range(60):
    f, l, s = 'd{}/f{node}.%d' % i, 'd{node}/l{node}.%d' % i, 'd{node}/keep/s{node}.%d' % i
    names = [os.path.lexists(p) for p in (f, l, s, 'd{node}/f{node}.%d' % i, 'd{}/s{node}.%d' % i)]
    links = os.lstat(l).st_nlink if names[1] else 0
    if names != [i % 4 != 0, True, i % 3 != 0, False, False] or links != 1 + (i % 4 != 0): print(i, names, links)
",
                next(node),
                next(node)
            ),
        );
        assert_eq!(looked, "", "of node {node}");
    }
    c.tell(3, "rm -r /forebay/d1 /forebay/d2 /forebay/d3");
    c.check();
}

#[test]
fn names_in_doubt_are_eio_until_their_node_is_back_and_then_whole() {
    let c = Cluster::up("doubt", 3);
    for i in 1..=3 {
        c.tell(i, &format!("mkdir /forebay/d{i}; echo {i} > /forebay/d{i}/f"));
    }
    // Node 2 is stopped: renames to it fail in time, and release the names that they held.
    let go_on = c.stop_worker(2);
    assert_eq!(
        c.python(3, "print(attempt(os.rename, 'd3/f', 'd2/g'), attempt(os.link, 'd2/f', 'd3/x'))"),
        "EIO EIO\n"
    );
    assert_eq!(c.tell(3, "cat /forebay/d3/f; ls /forebay/d3"), "3\nf\n");
    go_on();
    until("a rename after it goes on", || {
        c.shell(3, "mv -T /forebay/d3/f /forebay/d2/g && test ! -e /forebay/d3/f")
            .status
            .success()
            .then_some(())
    });
    assert_eq!(c.tell(3, "cat /forebay/d2/g; ls /forebay/d2"), "3\nf\ng\n");
    // A link to a file of a node that is down: its directory's node has the entry and can remove it.
    c.python(1, "os.link('d2/f', 'd1/l')");
    c.kill(2);
    assert_eq!(
        c.python(1, "print(attempt(os.lstat, 'd1/l'), attempt(os.unlink, 'd1/l'), os.listdir('d1'))"),
        "EIO ok ['f']\n"
    );
    let output = c.start(2);
    assert!(output.status.success(), "{}", said(&output));
    until("its count", || {
        let count = c.shell(3, "stat -c %h /forebay/d2/f");
        (count.status.success() && said(&count) == "1\n").then_some(())
    });
    c.tell(1, "rm -r /forebay/d1 /forebay/d2 /forebay/d3");
    c.check();
}

#[test]
fn trees_of_real_programs_lie_over_several_nodes() {
    let c = Cluster::up("trees", 3);
    let (Some(one), Some(two), Some(_)) = (c.mount(1), c.mount(2), c.mount(3)) else { return };
    for i in 1..=3 {
        c.tell(i, &format!("mkdir -p /forebay/w/n{i}"));
    }
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
    c.tell(
        1,
        &format!("tar -C {source} -cf - . | tar -C /forebay/w/n2 -xf - && diff -r {source} /forebay/w/n2"),
    );
    c.tell(3, &format!("cp -al /forebay/w/n2/. /forebay/w/n3/ && diff -r {source} /forebay/w/n3 && mv /forebay/w/n3 /forebay/w/n1/moved && diff -r {source} /forebay/w/n1/moved"));
    let git = "export HOME=/nonexistent GIT_CONFIG_NOSYSTEM=1; git() { command git -c user.name=n -c user.email=n@n -c init.defaultBranch=main -c safe.directory='*' \"$@\"; }; ";
    let on = |node: usize, at: &std::path::Path, script: &str| {
        let mut command = c.bed.command(node, std::path::Path::new("/bin/bash"));
        let output =
            command.args(["-c", &format!("{git}set -e; cd {}; {script}", at.display())]).output().unwrap();
        assert!(output.status.success(), "on node {node}: {script}\n{}", said(&output));
        said(&output)
    };
    on(1, &one, "git init -q w/n1/repo; cd w/n1/repo; for i in $(seq 40); do echo $i > f$i; done; git add .; git commit -qm one");
    on(2, &two, "git clone -q w/n1/repo w/n2/clone; cd w/n2/clone; mkdir sub; git mv f1 sub/f1; git commit -qam two; git push -q origin HEAD:refs/heads/two");
    assert_eq!(
        on(
            1,
            &one,
            "cd w/n1/repo; git merge -q two; git fsck --strict; cat sub/f1; git status --short | wc -l"
        ),
        "1\n0\n"
    );
    on(1, &one, "mv w/n2/clone w/n1/clone; cd w/n1/clone; git status --short; git log --oneline | wc -l");
    c.tell(3, "rm -r /forebay/w");
    c.check();
}
