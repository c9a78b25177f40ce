//! Watches of directories of the pool with inotify deliver the same events as on a plain file system.

mod support;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use support::{compile, succeeds, Pool, Scratch};

/// Sentences of docs/semantics.md that the tests here prove. `tests/conformance/tests/document.rs` compares them with
/// it.
#[allow(dead_code)]
const PROMISES: [&str; 3] = [
    "A program under preload that watches a directory with inotify gets the kernel's events of its names, whichever \
     program changes them: IN_CREATE, IN_DELETE, IN_MOVED_FROM and IN_MOVED_TO with one cookie, IN_ATTRIB, \
     IN_DELETE_SELF, IN_MOVE_SELF and IN_ISDIR.",
    "A change of the contents of a file in a watched directory raises IN_MODIFY, and IN_CLOSE_WRITE after the last \
     byte.",
    "A watch lives as long as its inotify descriptor is open in any process, and outlives the daemon's worker.",
];

/// A limit for steps that take milliseconds.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A program that is killed when the test ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

impl Running {
    /// Starts a program, and reads the first line of its output.
    fn start(command: &mut Command, first: &str) -> (Running, BufReader<ChildStdout>) {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let running = Running(child);
        assert_eq!(line_of(&mut lines), first);
        (running, lines)
    }
}

fn line_of(lines: &mut BufReader<ChildStdout>) -> String {
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

/// Unmounts when the test ends.
struct Mounted(Command);

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmounted = self.0.output().unwrap();
        let said = String::from_utf8_lossy(&unmounted.stderr).into_owned();
        assert!(unmounted.status.success() || std::thread::panicking(), "{said}");
    }
}

/// The number of directories with a mirror at the daemon.
fn mirrors(pool: &Pool) -> usize {
    let mut status = Command::new(support::binary("forebay"));
    let text = succeeds(status.args(["status", "--json", "--pool"]).arg(pool.path()));
    let number = text.split("\"watched_directories\": ").nth(1).unwrap_or_else(|| panic!("{text}"));
    number.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
}

#[track_caller]
fn comes_about(what: &str, mut holds: impl FnMut() -> bool) {
    let since = Instant::now();
    while !holds() {
        assert!(since.elapsed() < TIMEOUT, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A pool, and the C program.
fn bed() -> (Pool, Scratch, PathBuf) {
    let scratch = Scratch::new();
    let program = compile("watches", scratch.path());
    (Pool::start(), scratch, program)
}

fn make(pool: &Pool, directory: &str) {
    succeeds(pool.command("mkdir").arg("-p").arg(directory));
}

fn compare(what: &str) {
    let (pool, scratch, program) = bed();
    let place = scratch.path().join("place");
    std::fs::create_dir(&place).unwrap();
    let on_linux = succeeds(Command::new(&program).arg(&place).arg(what));
    assert!(on_linux.lines().count() > 20, "{on_linux}");
    make(&pool, "/forebay/place");
    let in_the_pool = succeeds(pool.command(&program).args(["/forebay/place", what]));
    assert_eq!(in_the_pool, on_linux);
    comes_about("mirrors of directories that nobody watches stay", || mirrors(&pool) == 0);
}

#[test]
fn events_of_names_are_those_of_linux() {
    compare("names");
}

#[test]
fn events_of_contents_are_those_of_linux() {
    compare("contents");
}

#[test]
fn changes_by_other_programs_and_the_mount_raise_events() {
    let (pool, scratch, program) = bed();
    make(&pool, "/forebay/d");
    let watcher =
        |name: &str| Running::start(pool.command(&program).args(["/forebay/d", "until", name]), "ready");
    let (_watcher, mut lines) = watcher("end");
    succeeds(pool.command("sh").args(["-c", "echo text > /forebay/d/file && mkdir /forebay/d/end"]));
    let mut heard = Vec::new();
    while heard.last().is_none_or(|last| last != "1: CREATE ISDIR end") {
        heard.push(line_of(&mut lines));
        assert!(!heard.last().unwrap().is_empty(), "{heard:?}");
    }
    assert_eq!(heard[0], "1: CREATE file");

    if !Path::new("/dev/fuse").exists() {
        eprintln!("skipped in part: there is no /dev/fuse");
        return;
    }
    let at = scratch.path().join("mount");
    std::fs::create_dir(&at).unwrap();
    let forebay = |verb: &str| {
        let mut command = Command::new(support::binary("forebay"));
        command.arg(verb).arg("--pool").arg(pool.path()).arg(&at);
        command
    };
    if !forebay("mount").output().unwrap().status.success() {
        eprintln!("skipped in part: the pool cannot be mounted here");
        return;
    }
    let _mounted = Mounted(forebay("umount"));
    let (_watcher, mut lines) = watcher("renamed");
    std::fs::write(at.join("d/new"), "text").unwrap();
    // The mount creates a file and opens it, so that a writable descriptor is closed twice.
    let mut heard = Vec::new();
    while heard.last().is_none_or(|last: &String| !last.contains("CLOSE_WRITE")) {
        heard.push(line_of(&mut lines));
        assert!(!heard.last().unwrap().is_empty(), "{heard:?}");
    }
    std::fs::rename(at.join("d/new"), at.join("d/renamed")).unwrap();
    while heard.last().is_none_or(|last: &String| !last.contains("MOVED_TO")) {
        heard.push(line_of(&mut lines));
        assert!(!heard.last().unwrap().is_empty(), "{heard:?}");
    }
    heard.dedup();
    assert_eq!(
        heard,
        [
            "1: CREATE new",
            "1: CLOSE_WRITE new",
            "1: MOVED_FROM (cookie) new",
            "1: MOVED_TO (same cookie) renamed"
        ]
    );
}

#[test]
fn a_watch_outlives_the_worker() {
    let (pool, _scratch, program) = bed();
    make(&pool, "/forebay/d");
    let (_watcher, mut lines) =
        Running::start(pool.command(&program).args(["/forebay/d", "until", "end"]), "ready");
    for round in 0..3 {
        let worker = pool.worker().unwrap();
        // SAFETY: the worker of this test's own pool.
        unsafe { libc::kill(worker, libc::SIGKILL) };
        // The next worker makes some of these changes before it has taken over the watch.
        succeeds(pool.command("mkdir").arg(format!("/forebay/d/{round}")));
        assert_eq!(line_of(&mut lines), format!("1: CREATE ISDIR {round}"));
        succeeds(pool.command("rmdir").arg(format!("/forebay/d/{round}")));
        assert_eq!(line_of(&mut lines), format!("1: DELETE ISDIR {round}"));
        assert_ne!(pool.worker(), Some(worker));
    }
    succeeds(pool.command("mkdir").arg("/forebay/d/end"));
    assert_eq!(line_of(&mut lines), "1: CREATE ISDIR end");
}

#[test]
fn a_watch_lasts_while_any_process_has_its_descriptor() {
    let (pool, _scratch, program) = bed();
    make(&pool, "/forebay/d");
    let (mut parent, mut lines) =
        Running::start(pool.command(&program).args(["/forebay/d", "child"]), "ready");
    assert!(parent.0.wait().unwrap().success());
    // Longer than the interval at which the daemon checks for mirrors without a watch.
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(mirrors(&pool), 1);
    succeeds(pool.command("mkdir").arg("/forebay/d/end"));
    assert_eq!(line_of(&mut lines), "1: CREATE ISDIR end");
    comes_about("the mirror stays", || mirrors(&pool) == 0);

    let (killed, _lines) =
        Running::start(pool.command(&program).args(["/forebay/d", "until", "end2"]), "ready");
    assert_eq!(mirrors(&pool), 1);
    drop(killed);
    comes_about("the mirror stays when its program was killed", || mirrors(&pool) == 0);

    // Stopping a pool removes its directories, so that programs that watch them get events.
    let (_watcher, mut lines) =
        Running::start(pool.command(&program).args(["/forebay/d", "until", "end3"]), "ready");
    drop(pool);
    let told = [line_of(&mut lines), line_of(&mut lines), line_of(&mut lines)];
    assert_eq!(told, ["1: DELETE ISDIR end", "1: DELETE_SELF", "1: IGNORED"]);
}

#[test]
fn watched_directories_are_limited_and_can_be_watched_again() {
    const MOST: usize = 1024;
    let (pool, _scratch, program) = bed();
    make(&pool, "/forebay/d");
    let mut command = pool.command(&program);
    command.args(["/forebay/d", "many", "1025"]);
    let (first, _lines) = Running::start(&mut command, &format!("{MOST} No space left on device"));
    assert_eq!(mirrors(&pool), MOST);
    drop(first);
    comes_about("mirrors stay", || mirrors(&pool) == 0);
    command = pool.command(&program);
    command.args(["/forebay/d", "many", "10"]);
    let (_second, _lines) = Running::start(&mut command, "10 all");
}

#[test]
fn tail_follows_a_name_without_polling() {
    let (pool, scratch, _program) = bed();
    let say = |text: &str| succeeds(pool.command("sh").args(["-c", text]));
    say("mkdir /forebay/d && echo first > /forebay/d/log");
    let errors = scratch.path().join("errors");
    let mut tail = pool.command("tail");
    // tail would poll only after an hour.
    tail.args(["-s", "3600", "-F", "/forebay/d/log"]).stderr(std::fs::File::create(&errors).unwrap());
    let (_tail, mut lines) = Running::start(&mut tail, "first");
    comes_about("tail watches no directory", || mirrors(&pool) == 1);
    say("echo second >> /forebay/d/log");
    assert_eq!(line_of(&mut lines), "second");
    say("mv /forebay/d/log /forebay/d/log.1 && echo third > /forebay/d/log");
    assert_eq!(line_of(&mut lines), "third");
    say("echo fourth >> /forebay/d/log");
    assert_eq!(line_of(&mut lines), "fourth");
    let errors = std::fs::read_to_string(&errors).unwrap();
    assert!(!errors.contains("inotify") && !errors.contains("cannot watch"), "{errors}");
}
