//! Processes are killed while the mount serves: what docs/semantics.md promises for each of them.

mod common;

use common::{is_mounted, kill, state, wait_for, Place, Stopped};
use std::fs;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Creates, reads and removes files through the mount until `stop` is set, and counts. Panics on the first error.
fn load(place: &Place, thread: usize, stop: &AtomicBool, rounds: &AtomicU64) {
    let dir = place.file(&format!("load{thread}"));
    fs::create_dir_all(&dir).unwrap();
    let mut i = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let path = dir.join(format!("f{}", i % 50));
        fs::write(&path, i.to_string()).unwrap_or_else(|e| panic!("write of round {i}: {e}"));
        assert_eq!(fs::read_to_string(&path).unwrap(), i.to_string(), "round {i}");
        if i.is_multiple_of(3) {
            fs::remove_file(&path).unwrap_or_else(|e| panic!("removal of round {i}: {e}"));
            assert!(!path.exists(), "round {i}");
        }
        i += 1;
        rounds.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn worker_killed_under_load_is_not_noticed() {
    let Some(place) = Place::mounted() else { return };
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let (place, stop, rounds) = (&place, &stop, &rounds);
            scope.spawn(move || load(place, thread, stop, rounds));
        }
        for _ in 0..8 {
            let before = rounds.load(Ordering::Relaxed);
            wait_for("the load goes on", || rounds.load(Ordering::Relaxed) > before + 20);
            place.kill("worker");
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(place.status()["restarts"].as_u64() >= Some(8));
    assert_eq!(place.status()["mounts"][0]["restarts"], 0, "the mount's process lives");
    place.is_clean();
}

#[test]
fn worker_killed_between_doors_loses_no_word() {
    let Some(place) = Place::mounted() else { return };
    // The mount sees what preloaded programs created, even if workers die while they write invalidations to the
    // kernel.
    for round in 0..6 {
        let _ = fs::metadata(place.file(&format!("r{round}"))); // the kernel caches that there is none
        let worker = place.pid("worker");
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(15 + round * 3));
            kill(worker);
        });
        place.preloaded(&format!("for i in 1 2 3 4 5 6 7 8; do echo $i > /forebay/r{round}; mv /forebay/r{round} /forebay/m; done; echo last > /forebay/r{round}"));
        assert_eq!(fs::read_to_string(place.file(&format!("r{round}"))).unwrap(), "last\n");
        assert_eq!(fs::read_to_string(place.file("m")).unwrap(), "8\n");
        killer.join().unwrap();
    }
    place.is_clean();
}

#[test]
fn mount_process_killed_is_mounted_again_and_open_files_get_enotconn() {
    let Some(place) = Place::mounted() else { return };
    fs::write(place.file("f"), "before").unwrap();
    let mut file = fs::OpenOptions::new().read(true).write(true).open(place.file("f")).unwrap();
    let dir = fs::File::open(place.mnt()).unwrap();
    place.kill("mount");
    wait_for("it is mounted again", || fs::read(place.file("f")).is_ok());
    assert!(place.pid("mount") > 0);
    // The data of a file that was open remain accessible, because the kernel has the backing file. Everything else
    // belongs to another mount.
    file.seek(SeekFrom::Start(0)).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "before");
    file.write_all(b" and after").unwrap();
    assert_eq!(fs::read_to_string(place.file("f")).unwrap(), "before and after");
    let through = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&dir));
    assert_eq!(fs::read_dir(&through).unwrap_err().raw_os_error(), Some(libc::ENOTCONN));
    let moved = fs::rename(format!("{through}/f"), place.file("g"));
    assert_eq!(moved.unwrap_err().raw_os_error(), Some(libc::EXDEV), "from the dead mount to the new one");
    assert_eq!(place.status()["mounts"][0]["restarts"], 1);
    drop((file, dir));
    place.is_clean();
}

#[test]
fn mount_process_killed_under_load_loses_nothing_that_was_acknowledged() {
    let Some(place) = Place::mounted() else { return };
    let mut made = Vec::new();
    for round in 0..3 {
        let killer = {
            let pid = place.pid("mount");
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(60));
                kill(pid);
            })
        };
        for i in 0..2000 {
            let name = format!("k{round}-{i}");
            match fs::write(place.file(&name), &name) {
                Ok(()) => made.push(name),
                Err(_) => break,
            }
        }
        killer.join().unwrap();
        wait_for("it is mounted again", || fs::metadata(place.mnt()).is_ok() && is_mounted(&place.mnt()));
    }
    let _ = place.pid("mount");
    for name in &made {
        assert_eq!(fs::read_to_string(place.file(name)).unwrap(), *name);
    }
    place.is_clean();
}

#[test]
fn program_that_waits_for_a_mount_process_that_is_killed_gets_an_error() {
    let Some(place) = Place::mounted() else { return };
    let pid = place.pid("mount");
    std::thread::scope(|scope| {
        let _stopped = Stopped::new(pid);
        let (begins, begun) = std::sync::mpsc::channel();
        let path = place.file("name");
        let waits = scope.spawn(move || {
            // SAFETY: cannot fail.
            begins.send(unsafe { libc::gettid() }).unwrap();
            fs::metadata(path)
        });
        let thread = begun.recv().unwrap();
        wait_for("the program waits in the kernel", || {
            matches!(state(Path::new(&format!("/proc/self/task/{thread}"))), 'S' | 'D')
        });
        assert!(!waits.is_finished(), "answered by a process that is stopped");
        kill(pid);
        let e = waits.join().unwrap().unwrap_err();
        assert!(matches!(e.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED)), "{e}");
    });
    wait_for("it is mounted again", || fs::write(place.file("name"), "x").is_ok());
}

#[test]
fn mount_process_that_is_stopped_holds_up_no_other_door() {
    let Some(place) = Place::mounted() else { return };
    fs::create_dir(place.file("d")).unwrap();
    // A program that has attached before: a new one would wait for the mount's reply.
    let mut command = place.command(&["run", "--quiet", "--", "sh"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut to_child, mut words) =
        (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()).lines());
    writeln!(to_child, "echo x > /forebay/before; echo ready").unwrap();
    assert_eq!(words.next().unwrap().unwrap(), "ready");
    // A look-up beforehand, so that the kernel sends no request on the way to the directory.
    assert!(fs::metadata(place.file("d/other")).is_err());
    std::thread::scope(|scope| {
        let stopped = Stopped::new(place.pid("mount"));
        // This holds the directory's lock until it is answered, and each invalidation of a name in it waits for that
        // lock.
        let waits = scope.spawn(|| fs::metadata(place.file("d/missing")).is_err());
        std::thread::sleep(Duration::from_millis(100));
        writeln!(
            to_child,
            "i=0; while [ $i -lt 3000 ]; do echo $i > /forebay/d/f$i; i=$((i+1)); done; echo done"
        )
        .unwrap();
        // If each of these calls were delayed for as long as the first, this would take minutes.
        let said = scope.spawn(move || (words.next().unwrap().unwrap(), words));
        wait_for("the other door goes on", || said.is_finished());
        assert_eq!(said.join().unwrap().0, "done");
        assert!(!waits.is_finished());
        drop(stopped);
        assert!(waits.join().unwrap());
    });
    for i in [0, 1, 1500, 2999] {
        assert_eq!(fs::read_to_string(place.file(&format!("d/f{i}"))).unwrap(), format!("{i}\n"));
    }
    assert_eq!(fs::read_dir(place.file("d")).unwrap().count(), 3000);
    drop(to_child);
    child.wait().unwrap();
    place.is_clean();
}

#[test]
fn supervisor_killed_leaves_nothing_that_the_next_up_does_not_clear() {
    let Some(place) = Place::mounted() else { return };
    let (supervisor, mount) = (place.pid("supervisor"), place.pid("mount"));
    kill(mount);
    kill(supervisor);
    wait_for("both are gone", || !Path::new(&format!("/proc/{supervisor}/exe")).exists());
    let up = ["up", "--path", place.pool().to_str().unwrap(), "--mount", place.mnt().to_str().unwrap()]
        .map(str::to_owned);
    let up: Vec<&str> = up.iter().map(String::as_str).collect();
    place.done(&up);
    fs::write(place.file("a"), "x").unwrap();
    assert_eq!(forebay_mount::mountpoint::mounts().iter().filter(|m| m.point == place.mnt()).count(), 1);
    let link = place.pool().join("mounted");
    assert!(link.symlink_metadata().is_ok());
    let supervisor = place.pid("supervisor");
    kill(place.pid("mount"));
    kill(supervisor);
    wait_for("both are gone", || !Path::new(&format!("/proc/{supervisor}/exe")).exists());
    place.done(&["up", "--path", place.pool().to_str().unwrap()]);
    assert!(link.symlink_metadata().is_err(), "programs would look for a mount that is no more");
}

#[test]
fn supervisor_killed_alone_takes_the_mount_along() {
    let Some(place) = Place::mounted() else { return };
    place.kill("supervisor");
    wait_for("the mount is taken away", || !is_mounted(&place.mnt()));
}

#[test]
fn preloaded_program_killed_harms_no_one_at_the_mount() {
    let Some(place) = Place::mounted() else { return };
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| load(&place, 0, &stop, &rounds));
        for _ in 0..4 {
            let line = "mkdir -p /forebay/p; i=0; while :; do echo $i > /forebay/p/f; mv /forebay/p/f /forebay/p/g; i=$((i+1)); done";
            let mut child = place.command(&["run", "--quiet", "--", "sh", "-c", line]).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(150));
            let before = rounds.load(Ordering::Relaxed);
            child.kill().unwrap();
            child.wait().unwrap();
            wait_for("the load goes on", || rounds.load(Ordering::Relaxed) > before + 10);
        }
        stop.store(true, Ordering::Relaxed);
    });
    place.is_clean();
}
