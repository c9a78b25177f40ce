//! The mount shows the pool's attributes although the kernel caches them: when another interface changes an inode
//! while the kernel looks it up for the first time, and for inodes that the kernel knows by two numbers.

mod common;

use common::Place;
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Makes directories by preload, lets another process look each of them up through the mount for the first time, and
/// changes its mode at about that moment. Prints how often the change was between request and reply, and how often an
/// old mode stayed.
const CHANGES: &str = r#"
import os, random, subprocess, sys, time
at, rounds = sys.argv[1], int(sys.argv[2])
looker = """
import os, sys, time
for line in sys.stdin:
    asked = time.perf_counter()
    os.stat(line.strip())
    print(asked, time.perf_counter(), flush=True)
"""
plain = {name: value for name, value in os.environ.items() if name != 'LD_PRELOAD'}
looker = subprocess.Popen(['taskset', '-c', '0', sys.executable, '-c', looker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=plain)
between = stale = 0
for i in range(rounds):
    os.mkdir('/forebay/d%d' % i, 0o755)
    print('%s/d%d' % (at, i), file=looker.stdin, flush=True)
    end = time.perf_counter() + random.random() * 16e-3
    while time.perf_counter() < end: pass
    before = time.perf_counter()
    os.chmod('/forebay/d%d' % i, 0o700)
    after = time.perf_counter()
    asked, answered = map(float, looker.stdout.readline().split())
    between += asked < before and after < answered
    time.sleep(0.05)
    stale += os.stat('%s/d%d' % (at, i)).st_mode & 0o777 != 0o700
looker.stdin.close()
looker.wait()
print(between, stale)
"#;

/// Runs this thread on the first processor, with this policy. False where that is not permitted.
fn pin(policy: i32, priority: i32) -> bool {
    // SAFETY: an all-zero set is empty, and the structures live over the calls.
    unsafe {
        let mut first: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(0, &mut first);
        libc::sched_setaffinity(0, size_of_val(&first), &first) == 0
            && libc::sched_setscheduler(0, policy, &libc::sched_param { sched_priority: priority }) == 0
    }
}

/// Takes the first processor from other threads, except for short moments.
fn hog(stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_micros(150));
        let end = Instant::now() + Duration::from_millis(8);
        while Instant::now() < end {
            std::hint::spin_loop();
        }
    }
}

#[test]
fn change_by_another_door_beside_the_first_look_is_seen() {
    for program in ["python3", "taskset"] {
        if Command::new(program).arg("-V").output().is_err() {
            return eprintln!("skipped: there is no {program}");
        }
    }
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return eprintln!("skipped: there is one processor");
    }
    let Some(place) = Place::mounted() else { return };
    let stop = AtomicBool::new(false);
    let said = std::thread::scope(|scope| {
        // The look-up has sent its request, and reads the reply late, because its processor is taken in between.
        scope.spawn(|| match pin(libc::SCHED_FIFO, 1) {
            true => hog(&stop),
            false => eprintln!("no real-time priority: answers are read early, and nothing is between"),
        });
        let mut command =
            place.command(&["run", "--quiet", "--", "taskset", "-c", "1", "python3", "-c", CHANGES]);
        let output = command.arg(place.mnt()).arg("100").output().unwrap();
        stop.store(true, Ordering::Relaxed);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    });
    let (between, stale) = said.trim().split_once(' ').unwrap();
    println!("{between} changes were made between question and answer");
    assert_eq!(stale, "0", "the kernel keeps modes from before a change");
}

#[test]
fn file_made_without_a_name_and_linked_shows_the_same_by_descriptor_and_by_name() {
    let Some(place) = Place::mounted() else { return };
    // Done while no other program uses the pool, because the kernel then caches attributes of files.
    let mut file: File = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_TMPFILE)
        .mode(0o600)
        .open(place.mnt())
        .unwrap();
    file.write_all(b"one").unwrap();
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    let path = place.file("named");
    let from = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    let to = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: both paths are NUL-terminated.
    let linked = unsafe {
        libc::linkat(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), libc::AT_SYMLINK_FOLLOW)
    };
    assert_eq!(linked, 0, "{}", std::io::Error::last_os_error());
    let agree = |what: &str| {
        let (one, other) = (file.metadata().unwrap(), fs::metadata(&path).unwrap());
        let facts =
            |m: &fs::Metadata| (m.mode(), m.len(), m.nlink(), m.mtime(), m.mtime_nsec(), m.ctime_nsec());
        assert_eq!(facts(&one), facts(&other), "{what}");
    };
    agree("linked");
    (&file).write_all(b" and two").unwrap();
    agree("written by the descriptor");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    agree("changed by the name");
    file.set_permissions(fs::Permissions::from_mode(0o600)).unwrap();
    agree("changed by the descriptor");
    OpenOptions::new().append(true).open(&path).unwrap().write_all(b" and three").unwrap();
    agree("written by the name");
    fs::hard_link(&path, place.file("again")).unwrap();
    agree("linked again");
    OpenOptions::new().write(true).open(&path).unwrap().set_len(5).unwrap();
    agree("cut by the name");
    assert_eq!(fs::read(&path).unwrap(), b"one a");
}

#[test]
fn file_that_was_looked_at_before_the_first_program_came_shows_what_that_writes() {
    let Some(place) = Place::mounted() else { return };
    let path = place.file("f");
    fs::write(&path, "x").unwrap();
    std::thread::sleep(Duration::from_millis(50));
    for _ in 0..3 {
        assert_eq!(fs::metadata(&path).unwrap().len(), 1);
    }
    assert_eq!(place.preloaded("printf more >> /forebay/f && echo done"), "done\n");
    assert_eq!(fs::metadata(&path).unwrap().len(), 5);
}

#[test]
fn open_files_without_a_name_take_every_change_of_attributes() {
    if Command::new("cc").arg("--version").output().is_err() {
        return eprintln!("skipped: there is no C compiler");
    }
    let Some(place) = Place::mounted() else { return };
    // The table of calls and of ways to lose a name, with which the preload library is tested too.
    let sources = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../preload/tests/calls");
    let sources = fs::read_dir(sources).unwrap().map(|entry| entry.unwrap().path());
    let program = place.dir.join("calls");
    let mut compiler = Command::new("cc");
    compiler.args(["-std=gnu11", "-w", "-O1", "-pthread", "-o"]).arg(&program);
    let built = compiler.args(sources.filter(|path| path.extension().is_some_and(|e| e == "c"))).status();
    assert!(built.unwrap().success());
    let at = place.file("here");
    fs::create_dir(&at).unwrap();
    let output = Command::new(&program).arg(&at).arg("nameless").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    place.is_clean();
}

/// Stores through a shared mapping, and prints at which call its times change: at once, as on Linux, or only later.
const STORES: &str = r#"
import mmap, os, sys, time
def facts(path):
    st = os.stat(path)
    return st.st_mtime_ns, st.st_ctime_ns
for closes in (False, True):
    path = '%s/stored-%s' % (sys.argv[1], closes)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(fd, 8192)
    memory = mmap.mmap(fd, 8192, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    if closes:
        os.close(fd)
    before = facts(path)
    time.sleep(0.03)
    memory[0:1] = b'x'
    memory.flush()
    after = facts(path)
    time.sleep(0.03)
    open(path, 'rb').read()
    print('moved' if after[0] > before[0] and after[1] > before[1] else 'same', 'moved later' if facts(path) != after else 'same')
"#;

#[test]
fn store_through_a_mapping_moves_times_at_once() {
    if Command::new("python3").arg("-V").output().is_err() {
        return eprintln!("skipped: there is no python3");
    }
    let Some(place) = Place::mounted() else { return };
    let plain = std::path::PathBuf::from(format!("/dev/shm/fbm-stored-{}", std::process::id()));
    let said = |at: &std::path::Path| {
        // No other program uses the pool, so the kernel caches attributes of files.
        let output = Command::new("python3").args(["-c", STORES]).arg(at).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    fs::create_dir(&plain).unwrap();
    let linux = std::panic::catch_unwind(|| said(&plain));
    fs::remove_dir_all(&plain).unwrap();
    assert_eq!(said(&place.mnt()), linux.unwrap());
}

#[test]
fn names_made_after_a_file_are_not_older_and_files_made_after_a_name_are_not_either() {
    let Some(place) = Place::mounted() else { return };
    let file = File::create(place.file("f")).unwrap();
    let line = |i: usize, at: &std::path::Path| {
        let changed = |name: &str| {
            let st = fs::symlink_metadata(at.join(name)).unwrap();
            (st.mtime(), st.mtime_nsec())
        };
        let write = || {
            (&file).write_all(b"x").unwrap();
            changed("f")
        };
        // Read between two changes, so that the second gets an exact time, on kernels that have exact times.
        write();
        let first = write();
        let name = format!("d{i}");
        fs::create_dir(at.join(&name)).unwrap();
        let made = changed(&name);
        assert!(first <= made, "{name} is older than what was written before: {first:?} {made:?}");
        let last = write();
        assert!(made <= last, "f is older than {name}: {made:?} {last:?}");
        let link = format!("l{i}");
        std::os::unix::fs::symlink("f", at.join(&link)).unwrap();
        assert!(last <= changed(&link), "{link} is older than what was written before");
    };
    for i in 0..200 {
        line(i, &place.mnt());
    }
}

#[test]
fn extended_attributes_of_an_inode_have_128_kib_together() {
    let Some(place) = Place::mounted() else { return };
    let path = place.file("f");
    fs::write(&path, "x").unwrap();
    let text = CString::new(path.as_os_str().as_bytes()).unwrap();
    let value = vec![7u8; 30_000];
    let set = |number: u32| {
        let name = CString::new(format!("user.{number}")).unwrap();
        // SAFETY: both strings are NUL-terminated, and the value is as long as said.
        let done =
            unsafe { libc::setxattr(text.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
        if done == 0 {
            0
        } else {
            std::io::Error::last_os_error().raw_os_error().unwrap()
        }
    };
    assert_eq!([1, 2, 3, 4, 5].map(set), [0, 0, 0, 0, libc::ENOSPC]);
    let mut found = vec![0u8; 65_536];
    // SAFETY: as above, with a buffer as long as said.
    let n =
        unsafe { libc::getxattr(text.as_ptr(), c"user.4".as_ptr(), found.as_mut_ptr().cast(), found.len()) };
    assert_eq!(found.get(..n as usize), Some(value.as_slice()));
    fs::remove_file(&path).unwrap();
    place.is_clean();
}
