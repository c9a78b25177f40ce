//! Files whose stripes are on several nodes, and locks between nodes.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::process::Output;

use crate::nodes::{bytes, plain, said, until, Cluster};
use crate::ERRNO;

fn fine(output: &Output) {
    assert!(output.status.success(), "{}", said(output));
}

/// Total size of a node's backing files.
fn stored(c: &Cluster, node: usize) -> u64 {
    let found =
        plain("find", &[c.pool(node).join("target/data").to_str().unwrap(), "-type", "f", "-printf", "%s\n"]);
    String::from_utf8_lossy(&found.stdout).lines().map(|bytes| bytes.parse::<u64>().unwrap()).sum()
}

fn nothing_is_left(c: &Cluster, nodes: usize) {
    until("removal of all backing files", || {
        let files = |node| {
            let data = c.pool(node).join("target/data");
            plain("find", &[data.to_str().unwrap(), "-type", "f"]).stdout.len()
        };
        ((1..=nodes).map(files).sum::<usize>() == 0).then_some(())
    });
}

#[test]
fn directory_s_layout_holds_for_every_door_and_all_nodes_see_one_file() {
    let c = Cluster::up("stripes", 4);
    c.tell(1, "mkdir /forebay/d");
    fine(&c.layout(2, &["set", "-c", "4", "-S", "64KiB", "/d"]));
    let told = said(&c.layout(3, &["get", "/d"]));
    assert!(told.contains("files made in it: 4 backing files, stripes of 64 KiB"), "{told}");
    let mounts: Option<Vec<PathBuf>> = (1..=4).map(|node| c.mount(node)).collect();
    // Without a mount a program can get no descriptor of a striped file, so it creates files with one backing file.
    let Some(m) = mounts else { return };
    let data = bytes(1_000_003, 1);
    fs::write(m[1].join("d/mounted"), &data).unwrap();
    // The same holds for a program that does not see the mount, as in a container.
    let unseen = format!("unshare -m sh -c 'umount -l {} && echo alone >/forebay/d/alone'", m[2].display());
    c.tell(3, &unseen);
    assert_eq!(fs::read(m[0].join("d/alone")).unwrap(), b"alone\n");
    assert_eq!(c.lies_on("/d/alone"), "n3");
    let source = c.file().with_file_name("source");
    fs::write(&source, &data).unwrap();
    c.tell(
        3,
        &format!(
            "cp {} /forebay/d/preloaded; (set -C; echo new > /forebay/d/new); mkdir /forebay/d/sub",
            source.display()
        ),
    );
    for name in ["mounted", "preloaded"] {
        for mount in &m {
            assert!(fs::read(mount.join("d").join(name)).unwrap() == data, "{name} by {}", mount.display());
        }
        let sum = c.tell(
            4,
            &format!("cmp /forebay/d/{name} {} && stat -c '%s %h' /forebay/d/{name}", source.display()),
        );
        assert_eq!(sum, "1000003 1\n");
        let told = said(&c.layout(1, &["get", &format!("/d/{name}")]));
        assert!(["n1", "n2", "n3", "n4"].iter().all(|node| told.contains(node)), "{told}");
    }
    for node in 1..=4 {
        let share = stored(&c, node);
        assert!((400_000..600_000).contains(&share), "node {node} has {share} bytes of two files of 1 MB");
    }
    assert_eq!(fs::read(m[0].join("d/new")).unwrap(), b"new\n");
    // Directories inherit the layout, also on another node than their parent.
    assert!(said(&c.layout(1, &["get", "/d/sub"])).contains("4 backing files"));
    // A directory whose layout names one node, and a file with a layout of its own.
    c.tell(2, "mkdir /forebay/e");
    fine(&c.layout(2, &["set", "--targets", "n3", "/e"]));
    fs::write(m[0].join("e/f"), &data).unwrap();
    assert!(said(&c.layout(1, &["get", "/e/f"])).contains("one backing file, on n3"));
    assert_eq!(c.tell(4, "cksum < /forebay/e/f"), c.tell(3, "cksum < /forebay/e/f"));
    fine(&c.layout(4, &["set", "-c", "4", "-t", "n2,4", "/e/g"]));
    assert!(said(&c.layout(1, &["get", "/e/g"])).contains("4 backing files, stripes of 1 MiB, on n2, n4"));
    let wrong = c.layout(4, &["set", "-c", "2", "-t", "n2,n9", "/e/h"]);
    assert!(!wrong.status.success() && said(&wrong).contains("no node \"n9\""), "{}", said(&wrong));
    // An existing file remains one file under every change.
    let (here, there) = (m[0].join("d/f"), m[3].join("d/f"));
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&here).unwrap();
    file.write_all_at(&data, 0).unwrap();
    file.set_len(300_001).unwrap();
    assert_eq!(fs::metadata(&there).unwrap().len(), 300_001);
    OpenOptions::new().write(true).open(&there).unwrap().set_len(500_000).unwrap();
    let mut expected = data[..300_001].to_vec();
    expected.resize(500_000, 0);
    assert!(fs::read(&here).unwrap() == expected);
    c.tell(2, "touch -d @1000000 /forebay/d/f; chmod 600 /forebay/d/f; mv /forebay/d/f /forebay/d/g");
    let there = m[3].join("d/g");
    let st = fs::metadata(&there).unwrap();
    assert_eq!((st.mtime(), st.mode() & 0o777, st.len()), (1_000_000, 0o600, 500_000));
    // SAFETY: plain system call on an open descriptor.
    assert_eq!(unsafe { libc::posix_fallocate(file.as_raw_fd(), 900_000, 100_000) }, 0);
    assert_eq!(fs::metadata(&there).unwrap().len(), 1_000_000);
    // A file that is unlinked while it is open remains usable through its open descriptors.
    fs::remove_file(&there).unwrap();
    let st = file.metadata().unwrap();
    assert_eq!((st.len(), st.nlink()), (1_000_000, 0));
    file.write_all_at(b"end", 1_999_997).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 2_000_000);
    file.set_len(100).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 100);
    let mut read = [0; 200];
    assert_eq!(file.read_at(&mut read, 0).unwrap(), 100);
    assert_eq!(read[..100], data[..100]);
    drop(file);
    // The pool's size includes all nodes.
    let df = c.tell(3, "df -m --output=size /forebay | tail -1");
    assert_eq!(df.trim().parse::<u64>().unwrap(), 4 * 96, "{df}");
    let staged = c.file().with_file_name("out");
    let (pool, pair) = (c.pool(4), format!("/d:{}", staged.display()));
    fine(&c.forebay(4, &["stage-out", "--pool", pool.to_str().unwrap(), &pair]));
    assert!(fs::read(staged.join("mounted")).unwrap() == data);
    c.tell(4, "rm -r /forebay/d /forebay/e");
    nothing_is_left(&c, 4);
    c.check();
}

#[test]
fn appends_to_a_striped_file_are_whole_whoever_appends() {
    let c = Cluster::up("appends", 2);
    c.tell(1, "mkdir /forebay/d");
    fine(&c.layout(1, &["set", "-c", "2", "-S", "4KiB", "/d"]));
    let (Some(one), Some(two)) = (c.mount(1), c.mount(2)) else { return };
    let lines = |mount: &PathBuf, who: char| {
        let path = mount.join("d/log");
        std::thread::spawn(move || {
            let mut log = OpenOptions::new().append(true).create(true).open(path).unwrap();
            for i in 0..150 {
                log.write_all(format!("{who} {i:04} {}\n", "x".repeat(i * 7 % 900)).as_bytes()).unwrap();
            }
        })
    };
    for writer in [lines(&one, 'a'), lines(&two, 'b'), lines(&one, 'c'), lines(&two, 'd')] {
        writer.join().unwrap();
    }
    let log = fs::read_to_string(two.join("d/log")).unwrap();
    for who in ['a', 'b', 'c', 'd'] {
        let mine: Vec<&str> = log.lines().filter(|l| l.starts_with(who)).collect();
        let expected: Vec<String> =
            (0..150).map(|i| format!("{who} {i:04} {}", "x".repeat(i * 7 % 900))).collect();
        assert_eq!(mine, expected);
    }
    assert!(said(&c.layout(1, &["get", "/d/log"])).contains("2 backing files"));
    c.tell(2, "rm -r /forebay/d");
    c.check();
}

/// Tries an exclusive flock without waiting.
fn locks(file: &File) -> bool {
    // SAFETY: plain system call on an open descriptor.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
}

/// After a link was cut, both sides agree on locks that were held, awaited or released meanwhile.
#[test]
fn locks_held_and_awaited_over_a_link_that_is_cut_are_free_when_nobody_wants_them() {
    let c = Cluster::up("cut-locks", 2);
    c.tell(2, "mkdir /forebay/d; echo x > /forebay/d/held; echo x > /forebay/d/awaited");
    let (Some(one), Some(two)) = (c.mount(1), c.mount(2)) else { return };
    let open =
        |mount: &PathBuf, name| OpenOptions::new().read(true).write(true).open(mount.join(name)).unwrap();
    let there = [open(&two, "d/held"), open(&two, "d/awaited")];
    for round in 0..2 {
        let (held, waits) = (open(&one, "d/held"), open(&one, "d/awaited"));
        assert!(locks(&held) && !locks(&there[0]), "round {round}");
        assert!(locks(&there[1]) && !locks(&waits), "round {round}");
        let waiter = std::thread::spawn(move || {
            // SAFETY: plain system call on an open descriptor.
            let locked = unsafe { libc::flock(waits.as_raw_fd(), libc::LOCK_EX) };
            (locked == 0, std::io::Error::last_os_error(), waits)
        });
        // The waiter repeats its request, so that one is in progress when the link is cut.
        std::thread::sleep(std::time::Duration::from_millis(300));
        if !c.bed.set_link(2, false) {
            // SAFETY: as above.
            assert_eq!(unsafe { libc::flock(there[1].as_raw_fd(), libc::LOCK_UN) }, 0);
            waiter.join().unwrap();
            return println!("skipped: links cannot be cut here");
        }
        let (locked, why, waits) = waiter.join().unwrap();
        assert!(!locked && why.raw_os_error() == Some(libc::EIO), "round {round}: {locked}, {why}");
        // One lock is released while its node cannot be reached. The awaited lock is free before the waiter's request
        // arrives.
        drop(held);
        // SAFETY: as above.
        assert_eq!(unsafe { libc::flock(there[1].as_raw_fd(), libc::LOCK_UN) }, 0);
        assert!(c.bed.set_link(2, true));
        until("the way to node 2", || c.shell(1, "cat /forebay/d/held").status.success().then_some(()));
        // A program whose request failed holds no lock, although its file is still open.
        let free = || {
            let all = there.iter().all(locks);
            // SAFETY: as above.
            there.iter().for_each(|file| unsafe {
                libc::flock(file.as_raw_fd(), libc::LOCK_UN);
            });
            all.then_some(())
        };
        // Longer than any message can have been in transit.
        std::thread::sleep(std::time::Duration::from_secs(3));
        until("the end of locks that nobody has", free);
        assert!(locks(&waits), "round {round}: and can have it now");
        // The close alone would release the lock at some later time: the kernel does not wait for a release.
        // SAFETY: as above.
        assert_eq!(unsafe { libc::flock(waits.as_raw_fd(), libc::LOCK_UN) }, 0);
    }
    drop(there);
    c.tell(2, "rm -r /forebay/d");
    c.check();
}

#[test]
fn locks_exclude_programs_of_other_nodes_by_every_door_and_go_with_who_holds_them() {
    let c = Cluster::up("locks", 3);
    c.tell(1, "mkdir /forebay/striped; echo x > /forebay/whole");
    fine(&c.layout(1, &["set", "-c", "3", "-S", "4KiB", "/striped"]));
    let mounts: Option<Vec<PathBuf>> = (1..=3).map(|node| c.mount(node)).collect();
    let Some(m) = mounts else { return };
    c.tell(2, "echo x > /forebay/striped/f");
    for name in ["whole", "striped/f"] {
        let open =
            |mount: &PathBuf| OpenOptions::new().read(true).write(true).open(mount.join(name)).unwrap();
        let files: Vec<File> = m.iter().map(open).collect();
        for holder in 0..3 {
            assert!(locks(&files[holder]), "{name}: nobody has it");
            for other in (0..3).filter(|other| *other != holder) {
                assert!(!locks(&files[other]), "{name}: {holder} has it");
            }
            // Preloaded programs on every node.
            for node in 1..=3 {
                let tried = c.shell(node, &format!("flock -n /forebay/{name} true"));
                assert_eq!(tried.status.code(), Some(1), "{name} on node {node}: {}", said(&tried));
            }
            // SAFETY: as above.
            assert_eq!(unsafe { libc::flock(files[holder].as_raw_fd(), libc::LOCK_UN) }, 0);
        }
        // Record locks on ranges, by processes on different nodes.
        let record = "import fcntl, sys\nf = open(sys.argv[1], 'r+')\n\
             try:\n fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, int(sys.argv[2])); print('got')\n\
             except BlockingIOError: print('busy')\n";
        let path = c.file().with_file_name("record.py");
        fs::write(&path, format!("{record}\nsys.stdout.flush()\nif len(sys.argv) > 3: sys.stdin.read()\n"))
            .unwrap();
        let mut holder = std::process::Command::new("python3")
            .arg(&path)
            .arg(m[2].join(name))
            .args(["0", "stay"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut said_so = [0; 4];
        std::io::Read::read_exact(holder.stdout.as_mut().unwrap(), &mut said_so).unwrap();
        assert_eq!(&said_so, b"got\n");
        // The worker on the node of the file's first backing file is killed; the record lock and the flock survive.
        assert!(locks(&files[1]));
        c.kill_worker(if name == "whole" { 1 } else { 2 });
        let try_on = |node: usize, from: u32| {
            c.tell(node, &format!("python3 {} /forebay/{name} {from}", path.display()))
        };
        for node in 1..=3 {
            assert_eq!(try_on(node, 5), "busy\n", "{name} on node {node}");
            assert_eq!(try_on(node, 10), "got\n", "{name} on node {node}: another range");
        }
        for other in [0, 2] {
            assert!(!locks(&files[other]), "{name}: node 2 has it, over a crash");
        }
        // SAFETY: as above.
        assert_eq!(unsafe { libc::flock(files[1].as_raw_fd(), libc::LOCK_UN) }, 0);
        assert!(locks(&files[0]), "{name}: it is free again");
        // SAFETY: as above.
        assert_eq!(unsafe { libc::flock(files[0].as_raw_fd(), libc::LOCK_UN) }, 0);
        // A lock goes with the process that holds it.
        holder.kill().unwrap();
        holder.wait().unwrap();
        until("the lock's end", || (try_on(1, 5) == "got\n").then_some(()));
    }
    // A lock also ends with its node's mount.
    let held = OpenOptions::new().write(true).open(m[1].join("whole")).unwrap();
    assert!(locks(&held));
    let first = OpenOptions::new().write(true).open(m[0].join("whole")).unwrap();
    assert!(!locks(&first));
    c.kill(2);
    assert!(c.start(2).status.success());
    until("the end of a dead node's lock", || locks(&first).then_some(()));
    drop((held, first));
    let _ = plain("umount", &["-l", m[1].to_str().unwrap()]);
    c.tell(1, "rm -r /forebay/striped /forebay/whole");
    c.check();
}

#[test]
fn striped_file_gives_eio_for_what_a_node_that_is_down_has_and_nothing_else() {
    let c = Cluster::up("partial", 3);
    c.tell(1, "mkdir /forebay/d");
    fine(&c.layout(1, &["set", "-c", "2", "-S", "4KiB", "-t", "n1,n3", "/d"]));
    let Some(one) = c.mount(1) else { return };
    let path = one.join("d/f");
    let data = bytes(16_384, 3);
    fs::write(&path, &data).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    c.kill(3);
    let mut page = [0; 4096];
    file.read_exact_at(&mut page, 8192).unwrap();
    assert!(page[..] == data[8192..12_288], "what is here is read");
    file.write_all_at(&page, 0).unwrap();
    let errno = |e: std::io::Error| e.raw_os_error();
    assert_eq!(file.read_exact_at(&mut page, 4096).map_err(errno), Err(Some(libc::EIO)));
    assert_eq!(file.write_all_at(&page, 4096).map_err(errno), Err(Some(libc::EIO)));
    // New files without a layout that names the node avoid it, once the failure is detected. Existing striped files
    // still need it.
    let looks = c.tell(1, &format!("{ERRNO} mkdir /forebay/e; errno touch /forebay/e/f; errno ls /forebay/d; errno stat /forebay/d/f"));
    assert_eq!(looks, "ok\nok\nEIO\n");
    fine(&c.layout(1, &["set", "-c", "3", "/e"]));
    until("a file on the nodes that are up", || {
        let _ = fs::remove_file(one.join("e/g"));
        fs::write(one.join("e/g"), &data).ok()
    });
    assert!(fs::read(one.join("e/g")).unwrap() == data);
    assert!(!said(&c.layout(1, &["get", "/e/g"])).contains("n3"));
    assert!(c.start(3).status.success());
    until("the stripes of the node that is back", || file.read_exact_at(&mut page, 4096).ok());
    assert!(page[..] == data[4096..8192]);
    drop(file);
    c.tell(2, "rm -r /forebay/d /forebay/e");
    nothing_is_left(&c, 3);
    c.check();
}

/// The turn to append outlives the worker that keeps it, so that two writers never append at the same offset.
#[test]
fn appends_to_a_striped_file_are_whole_while_its_first_node_s_worker_is_killed() {
    const RECORD: usize = 150_000;
    const RECORDS_MAX: usize = 200;
    let c = Cluster::up("turns", 2);
    c.tell(2, "mkdir /forebay/d");
    fine(&c.layout(2, &["set", "-c", "2", "-S", "64KiB", "-t", "n2,n1", "/d"]));
    let (Some(one), Some(two)) = (c.mount(1), c.mount(2)) else { return };
    File::create(two.join("d/log")).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let counts: Vec<usize> = std::thread::scope(|scope| {
        let append = |who: u8, at: PathBuf| {
            let stop = &stop;
            scope.spawn(move || {
                let file = OpenOptions::new().append(true).open(at).unwrap();
                let mut count = 0;
                // The limit keeps a fast machine from filling the pool.
                while !stop.load(std::sync::atomic::Ordering::Relaxed) && count < RECORDS_MAX {
                    let n = (&file).write(&vec![who; RECORD]).unwrap();
                    assert_eq!(n, RECORD, "node {who}");
                    count += 1;
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                count
            })
        };
        let writers =
            [append(1, one.join("d/log")), append(2, two.join("d/log")), append(3, one.join("d/log"))];
        for _ in 0..4 {
            std::thread::sleep(std::time::Duration::from_millis(300));
            c.kill_worker(2);
            until("the next worker", || c.status(2)["pids"]["worker"].as_u64());
        }
        std::thread::sleep(std::time::Duration::from_millis(300));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    let log = fs::read(two.join("d/log")).unwrap();
    let of = |who: u8| log.chunks(RECORD).filter(|r| r.iter().all(|byte| *byte == who)).count();
    assert_eq!([of(1), of(2), of(3)], counts[..], "records of {} bytes in {}", RECORD, log.len());
    assert_eq!(log.len(), counts.iter().sum::<usize>() * RECORD);
    drop(log);
    c.tell(1, "rm -r /forebay/d");
    c.check();
}
