//! Locks through the mount: a granted lock stays, a wait can be interrupted, and locks end with their holders.

mod common;

use common::{wait_for, Place};
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Takes a lock on bytes of a file by fcntl. Returns the errno when it is refused.
fn lock(file: &File, command: i32, kind: i32, start: i64, bytes: i64) -> Result<(), i32> {
    // SAFETY: an all-zero flock is valid.
    let mut record: libc::flock = unsafe { std::mem::zeroed() };
    (record.l_type, record.l_start, record.l_len) = (kind as i16, start, bytes);
    // SAFETY: `record` lives over the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw const record) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error().raw_os_error().unwrap()),
    }
}

/// An open-file-description lock on bytes. Each open of this test is an owner of its own.
fn lock_opened(file: &File, kind: i32, start: i64, bytes: i64) -> Result<(), i32> {
    lock(file, libc::F_OFD_SETLK, kind, start, bytes)
}

fn read_write(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

/// Another process, which ends with the test.
struct Other(Child);

impl Other {
    /// Runs a line of Python on a file, and waits until it has printed something.
    fn start(line: &str, path: &Path) -> Other {
        let mut command = Command::new("python3");
        command.args(["-c", line]).arg(path).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut other = Other(command.spawn().unwrap());
        let mut word = [0; 1];
        other.0.stdout.as_mut().unwrap().read_exact(&mut word).unwrap();
        other
    }

    /// A process that holds a flock until it ends.
    fn holder(path: &Path) -> Other {
        Other::start("import fcntl, sys, time; f = open(sys.argv[1], 'r+b'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(600)", path)
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a process of this test that is not reaped yet.
        unsafe { libc::kill(self.0.id() as i32, signal) };
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.signal(libc::SIGKILL);
        let _ = self.0.wait();
    }
}

/// Tries a lock for writing as another process. True when it is granted.
fn other_gets(path: &Path, start: u64, bytes: u64) -> bool {
    let line = "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, int(sys.argv[3]), int(sys.argv[2]))";
    let mut command = Command::new("python3");
    command.args(["-c", line]).arg(path).args([start.to_string(), bytes.to_string()]);
    command.stderr(Stdio::null()).status().unwrap().success()
}

/// A mounted place, and python3 for other processes. None without them; prints the reason then.
fn mounted() -> Option<Place> {
    if Command::new("python3").arg("-V").output().is_err() {
        eprintln!("skipped: there is no python3");
        return None;
    }
    Place::mounted()
}

/// The numbers of descriptors and of threads of the mount's process.
fn inventory(place: &Place) -> (usize, usize) {
    let pid = place.pid("mount");
    let count = |what| std::fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
    (count("fd"), count("task"))
}

#[test]
fn lock_for_writing_keeps_the_locks_for_reading_that_were_taken_before() {
    let Some(place) = mounted() else { return };
    let path = place.file("f");
    drop(read_write(&path));
    let reader = File::open(&path).unwrap();
    lock(&reader, libc::F_SETLK, libc::F_RDLCK, 0, 10).unwrap();
    let writer = read_write(&path);
    lock(&writer, libc::F_SETLK, libc::F_WRLCK, 20, 10).unwrap();
    assert!(!other_gets(&path, 20, 10));
    assert!(!other_gets(&path, 0, 10), "the lock for reading is gone");
    assert!(other_gets(&path, 10, 10));
}

#[test]
fn lock_that_was_waited_for_is_held_though_another_descriptor_was_closed_meanwhile() {
    let Some(place) = mounted() else { return };
    let path = place.file("f");
    let mut first = Other::start("import fcntl, sys; f = open(sys.argv[1], 'a+b'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()", &path);
    let (file, another) = (read_write(&path), read_write(&path));
    let before = inventory(&place);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| lock(&file, libc::F_SETLKW, libc::F_WRLCK, 0, 0));
        wait_for("the lock waits", || inventory(&place).1 > before.1);
        assert!(!waits.is_finished());
        // The process has no lock yet that this close could release. It then gets the lock that it waits for.
        drop(another);
        drop(first.0.stdin.take());
        waits.join().unwrap().unwrap();
    });
    assert!(!other_gets(&path, 0, 1), "granted, and not held");
    drop(file);
    assert!(other_gets(&path, 0, 1));
}

#[test]
fn locks_of_an_open_file_go_with_it_and_with_its_process() {
    let Some(place) = mounted() else { return };
    let path = place.file("f");
    let (one, two) = (read_write(&path), read_write(&path));
    lock_opened(&one, libc::F_WRLCK, 0, 10).unwrap();
    assert_eq!(lock_opened(&two, libc::F_WRLCK, 5, 10), Err(libc::EAGAIN));
    drop(one);
    // The kernel does not wait for the reply to a release.
    wait_for("the lock went with its file", || lock_opened(&two, libc::F_WRLCK, 5, 10).is_ok());
    let other = Other::holder(&path);
    // SAFETY: plain system call on a descriptor of this test.
    let try_flock = || unsafe { libc::flock(two.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) };
    assert_eq!(try_flock(), -1);
    drop(other);
    wait_for("the lock went with its process", || try_flock() == 0);
}

#[test]
fn lock_that_is_not_to_wait_is_granted_where_the_holder_s_release_is_on_its_way() {
    let Some(place) = mounted() else { return };
    let path = place.file("f");
    let (one, two) = (read_write(&path), read_write(&path));
    // SAFETY: plain system calls on descriptors of this test.
    let flock = |file: &File, how| unsafe { libc::flock(file.as_raw_fd(), how | libc::LOCK_NB) };
    // The flush of one descriptor, and a moment later the release with the other one, as on a busy machine.
    let is_granted = |one: File| {
        assert_eq!(flock(&one, libc::LOCK_EX), 0);
        let copy = one.try_clone().unwrap();
        drop(one);
        let closes = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(copy);
        });
        let granted = flock(&two, libc::LOCK_EX) == 0;
        closes.join().unwrap();
        assert_eq!(flock(&two, libc::LOCK_UN), 0);
        granted
    };
    // On a very busy machine that moment may be too long.
    assert!(is_granted(one) || (0..4).any(|_| is_granted(read_write(&path))));
    // A copy that stays open holds the lock, and makes a request wait once.
    let one = read_write(&path);
    assert_eq!(flock(&one, libc::LOCK_EX), 0);
    drop(one.try_clone().unwrap());
    let started = Instant::now();
    let attempts = 30;
    for _ in 0..attempts {
        assert_eq!(
            (flock(&two, libc::LOCK_EX), io::Error::last_os_error().raw_os_error()),
            (-1, Some(libc::EAGAIN))
        );
        drop(one.try_clone().unwrap());
    }
    assert!(started.elapsed() < attempts * Duration::from_millis(500), "each has waited");
    drop(one);
    wait_for("the lock went with its file", || flock(&two, libc::LOCK_EX) == 0);
}

#[test]
fn waiting_locks_are_interrupted_and_leave_nothing_behind() {
    let Some(place) = mounted() else { return };
    let path = place.file("f");
    drop(read_write(&path));
    let held = Other::holder(&path);
    let before = inventory(&place);
    let line = "import fcntl, sys; f = open(sys.argv[1], 'r+b'); print('open', flush=True); fcntl.flock(f, fcntl.LOCK_EX)";
    let mut waiting: Vec<Other> = (0..20).map(|_| Other::start(line, &path)).collect();
    // The waiting locks share one descriptor of the file that they read, and one thread.
    wait_for("all of them wait", || inventory(&place).0 >= before.0 + waiting.len());
    assert!(inventory(&place).1 <= before.1 + 1, "a thread for each");
    for (i, other) in waiting.iter_mut().enumerate() {
        other.signal(if i % 2 == 0 { libc::SIGTERM } else { libc::SIGKILL });
        assert!(!other.0.wait().unwrap().success(), "none got the lock");
    }
    wait_for("nothing of them is left", || inventory(&place) == before);
    drop(held);
    let file = read_write(&path);
    // SAFETY: plain system call on a descriptor of this test.
    wait_for("it is free", || unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0);
}

#[test]
fn interrupts_at_any_moment_end_the_wait() {
    let Some(place) = mounted() else { return };
    let path = place.file("f");
    drop(read_write(&path));
    let held = Other::holder(&path);
    // Signals from before the request is sent until long after. The kernel reports the first signal that arrives while
    // the program waits, once: a wait that misses it lasts for ever. A signal that arrives before the call is followed
    // by more.
    let line = "\
import fcntl, signal, sys
class Rang(Exception): pass
def ring(*_):
    signal.setitimer(signal.ITIMER_REAL, 0)
    raise Rang
signal.signal(signal.SIGALRM, ring)
f = open(sys.argv[1], 'r+b')
for i in range(150):
    try:
        signal.setitimer(signal.ITIMER_REAL, 4e-6 * (1 + i), 0.02)
        fcntl.flock(f, fcntl.LOCK_EX)
        sys.exit('got the lock')
    except Rang:
        pass
";
    let output = Command::new("timeout").args(["60", "python3", "-c", line]).arg(&path).output().unwrap();
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    drop(held);
}

#[test]
fn locks_through_the_mount_and_by_preload_exclude_one_another() {
    let Some(place) = mounted() else { return };
    let path = place.file("f");
    let file = read_write(&path);
    lock(&file, libc::F_SETLK, libc::F_WRLCK, 0, 10).unwrap();
    let line = "import fcntl, sys\nf = open('/forebay/f', 'r+b')\nfor at in 0, 10:\n    try:\n        fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, at); print('got', at)\n    except OSError as e:\n        print('refused', at)";
    std::fs::write(place.dir.join("try.py"), line).unwrap();
    let script = place.dir.join("try.py");
    assert_eq!(place.preloaded(&format!("python3 {}", script.display())), "refused 0\ngot 10\n");
}
