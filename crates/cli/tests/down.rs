//! How pools end: signals and kills at each stage of `forebay down`, daemons that do not answer or answer something else,
//! and what programs write meanwhile. `backing.rs` has the rest of what happens before the end of a pool with a store.

mod common;

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use common::{eventually, is_alive, kill, lock_holder, Place, Ran, Replaced, TIMEOUT};
use forebay_server::launch::{self, Attempt, DownOptions};
use forebay_types::Code;
use serde_json::{json, Value};

/// What the slow store takes longer for than the steps of a test.
const BIG: &str = "head -c 6000000 /dev/zero >/forebay/data/big";

/// A pool that is up.
struct Bed {
    place: Place,
    pool: PathBuf,
    store: PathBuf,
}

impl Bed {
    fn new() -> Bed {
        Bed::with(&[])
    }

    fn with(options: &[&str]) -> Bed {
        let place = Place::new();
        let (pool, store) = (place.join("p"), place.join("store"));
        std::fs::create_dir(&store).unwrap();
        let words = ["up", "--capacity", "128MiB", "--path", pool.to_str().unwrap()];
        place.ok(words.iter().chain(options));
        Bed { place, pool, store }
    }

    /// With a store at `/data` that gets something when it is told to, and 2 MB of it in a second.
    fn with_slow_store() -> Bed {
        let bed = Bed::new();
        bed.attach("?rate=2MB/s");
        bed
    }

    fn attach(&self, options: &str) {
        let url = format!("file://{}{options}", self.store.display());
        self.ok(&["attach", &url, "/data", "--drain", "request"]);
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.place.command(arguments);
        command.env("FOREBAY_POOL", &self.pool);
        command
    }

    fn spawn(&self, arguments: &[&str]) -> Child {
        self.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        Ran::of(self.command(arguments).output().unwrap())
    }

    fn ok(&self, arguments: &[&str]) -> Ran {
        let ran = self.run(arguments);
        assert_eq!(ran.code, Some(0), "{arguments:?}: {ran:?}");
        ran
    }

    /// Runs a shell command that sees the pool at `/forebay`.
    fn sh(&self, script: &str) {
        self.ok(&["run", "--quiet", "--", "sh", "-c", script]);
    }

    /// Mounts the pool; none where that is not possible.
    fn mount(&self) -> Option<PathBuf> {
        let at = self.place.join("mnt");
        std::fs::create_dir(&at).unwrap();
        (self.run(&["mount", at.to_str().unwrap()]).code == Some(0)).then_some(at)
    }

    fn is_mounted(&self) -> bool {
        !self.place.mounts().iter().all(|at| !at.ends_with("/mnt"))
    }

    fn status(&self) -> Value {
        let ran = self.run(&["status", "--json"]);
        serde_json::from_str(&ran.out).unwrap_or_default()
    }

    fn worker(&self) -> i32 {
        self.status()["pids"]["worker"].as_i64().unwrap() as i32
    }

    /// With a volume; none where there are no volumes.
    fn with_volume() -> Option<Bed> {
        let bed = Bed::new();
        if bed.status()["backing"] == "directory" {
            return None;
        }
        bed.ok(&["volume", "create", "v", "--size", "1MiB"]);
        Some(bed)
    }

    /// True once the pool was told to stop. Its worker may be stopped, so that `status` would take long.
    fn stops(&self) -> bool {
        std::fs::read_to_string(self.pool.join("log")).unwrap().contains("pool stops")
    }

    fn supervisor(&self) -> i32 {
        lock_holder(&self.pool).unwrap()
    }

    fn stored(&self, name: &str) -> Option<u64> {
        std::fs::metadata(self.store.join(name)).ok().map(|metadata| metadata.len())
    }

    /// Stops the pool and expects the store to have all of `big`.
    fn down(&self) {
        self.ok(&["down"]);
        assert_eq!(self.stored("big"), Some(6_000_000));
    }
}

fn ended(child: Child) -> Ran {
    Ran::of(child.wait_with_output().unwrap())
}

fn signal(child: &Child, signal: i32) {
    kill(child.id() as i32, signal);
}

/// True once signals no longer end a command at once.
fn takes_signals(child: &Child) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
    u64::from_str_radix(blocked.trim(), 16).unwrap() & (1 << (libc::SIGTERM - 1)) != 0
}

/// True while the mover copies for a command.
fn copies(bed: &Bed) -> bool {
    let tasks = bed.run(&["tasks", "--json"]);
    let tasks: Value = serde_json::from_str(&tasks.out).unwrap_or_default();
    tasks.as_array().is_some_and(|tasks| tasks.iter().any(|task| task["state"] == "running"))
}

#[test]
fn down_that_a_signal_ends_while_it_copies_leaves_the_pool_with_its_mount() {
    let bed = Bed::with_slow_store();
    let mount = bed.mount();
    bed.sh(BIG);
    let down = bed.spawn(&["down"]);
    eventually("it copies", || copies(&bed));
    assert!(!bed.is_mounted());
    // A terminal that is closed, and a user who is impatient.
    for number in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM] {
        signal(&down, number);
    }
    let down = ended(down);
    assert!(down.signal.is_some() && down.err.contains("the pool is up"), "{down:?}");
    if let Some(mount) = mount {
        assert_eq!(std::fs::metadata(mount.join("data/big")).unwrap().len(), 6_000_000);
    }
    bed.down();
}

#[test]
fn down_that_a_signal_meets_before_it_copies_leaves_the_pool_with_its_mount() {
    let bed = Bed::with_slow_store();
    let Some(mount) = bed.mount() else { return };
    bed.sh(BIG);
    let worker = bed.worker();
    kill(worker, libc::SIGSTOP);
    let down = bed.spawn(&["down"]);
    eventually("the mount is taken away", || !bed.is_mounted());
    signal(&down, libc::SIGTERM);
    std::thread::sleep(Duration::from_millis(100));
    kill(worker, libc::SIGCONT);
    let down = ended(down);
    assert!(down.signal == Some(libc::SIGTERM) && down.err.contains("the pool is up"), "{down:?}");
    assert_eq!(std::fs::metadata(mount.join("data/big")).unwrap().len(), 6_000_000);
    bed.down();
}

#[test]
fn down_that_a_signal_meets_after_it_has_copied_does_not_stop_the_pool() {
    let bed = Bed::with_slow_store();
    let mount = bed.mount();
    bed.sh(BIG);
    let down = bed.spawn(&["down"]);
    eventually("it copies", || copies(&bed));
    let supervisor = bed.supervisor();
    kill(supervisor, libc::SIGSTOP);
    eventually("all is copied", || bed.stored("big") == Some(6_000_000));
    std::thread::sleep(Duration::from_secs(2));
    signal(&down, libc::SIGTERM);
    std::thread::sleep(Duration::from_millis(100));
    kill(supervisor, libc::SIGCONT);
    let down = ended(down);
    assert!(down.signal == Some(libc::SIGTERM) && down.err.contains("the pool is up"), "{down:?}");
    assert_eq!(bed.is_mounted(), mount.is_some());
    bed.down();
}

#[test]
fn down_that_a_signal_ends_while_the_pool_stops_says_so_at_once() {
    let bed = Bed::new();
    let worker = bed.worker();
    // The supervisor waits for it for a while, then kills it.
    kill(worker, libc::SIGSTOP);
    let down = bed.spawn(&["down"]);
    eventually("the pool stops", || bed.stops());
    signal(&down, libc::SIGTERM);
    let down = ended(down);
    assert!(down.signal == Some(libc::SIGTERM) && down.err.contains("stops by itself"), "{down:?}");
    assert!(is_alive(worker), "it waited for the end");
    eventually("the pool is down", || lock_holder(&bed.pool).is_none());
}

#[test]
fn down_ignores_signals_that_its_starter_ignores() {
    let bed = Bed::with_slow_store();
    bed.sh(BIG);
    let script = "trap '' HUP; exec \"$0\" down";
    let mut command = Command::new("sh");
    bed.place.dress(command.args(["-c", script]).arg(common::forebay()).env("FOREBAY_POOL", &bed.pool));
    command.env("FOREBAY_POOL", &bed.pool).stdout(Stdio::piped()).stderr(Stdio::piped());
    let down = command.spawn().unwrap();
    eventually("it copies", || copies(&bed));
    signal(&down, libc::SIGHUP);
    let down = ended(down);
    assert_eq!((down.code, bed.stored("big")), (Some(0), Some(6_000_000)), "{down:?}");
}

#[test]
fn pool_whose_down_was_killed_is_ended_by_the_next() {
    // While it copies.
    let bed = Bed::with_slow_store();
    bed.mount();
    bed.sh(BIG);
    let mut down = bed.spawn(&["down"]);
    eventually("it copies", || copies(&bed));
    down.kill().unwrap();
    down.wait().unwrap();
    bed.down();
    assert!(!bed.is_mounted());
    // While the pool stops.
    let bed = Bed::with_slow_store();
    let worker = bed.worker();
    kill(worker, libc::SIGSTOP);
    let mut down = bed.spawn(&["down", "--discard"]);
    eventually("the pool stops", || bed.stops());
    down.kill().unwrap();
    down.wait().unwrap();
    assert!(is_alive(worker));
    bed.ok(&["down"]);
    assert!(!is_alive(worker) && lock_holder(&bed.pool).is_none());
}

/// Between the look at the pool and its stop, the pool gets its first store, and a program writes there.
#[test]
fn down_of_a_pool_that_gets_a_store_meanwhile_loses_nothing() {
    let bed = Bed::new();
    let worker = Replaced::new(&bed.pool, "socket");
    let down = bed.spawn(&["down"]);
    // The supervisor has answered `down`; the worker has not.
    let looks = worker.meet_and_restore();
    signal(&down, libc::SIGSTOP);
    bed.attach("");
    bed.sh("echo one >/forebay/data/one");
    signal(&down, libc::SIGCONT);
    drop(looks);
    let down = ended(down);
    assert_eq!((down.code, bed.stored("one")), (Some(0), Some(4)), "{down:?}");
}

/// The daemon does not answer when it is asked first, and then does.
#[test]
fn down_that_keeps_the_data_asks_for_volumes_again_if_the_daemon_was_silent() {
    let Some(bed) = Bed::with_volume() else { return };
    for options in [&["down", "--keep"][..], &["down", "--keep", "--force"]] {
        let supervisor = Replaced::new(&bed.pool, "supervisor");
        let down = bed.spawn(options);
        let asked = supervisor.meet_and_restore();
        let down = ended(down);
        drop(asked);
        down.assert_refused(1, &["its volumes have 1 MiB", "--discard"]);
    }
    bed.ok(&["volume", "delete", "v"]);
    bed.ok(&["down", "--keep"]);
}

#[test]
fn down_that_keeps_the_data_is_refused_if_the_worker_does_not_say_whether_there_are_volumes() {
    let Some(bed) = Bed::with_volume() else { return };
    let worker = bed.worker();
    kill(worker, libc::SIGSTOP);
    let down = bed.run(&["down", "--keep"]);
    kill(worker, libc::SIGCONT);
    down.assert_refused(1, &["its worker does not answer", "may have volumes", "--discard"]);
    bed.ok(&["volume", "delete", "v"]);
    bed.ok(&["down", "--keep"]);
}

/// Without a store nothing keeps `down` from killing it.
#[test]
fn down_that_a_signal_ends_while_the_daemon_does_not_answer_kills_nothing() {
    let bed = Bed::new();
    bed.sh("echo one >/forebay/one");
    let supervisor = bed.supervisor();
    for options in [&["down"][..], &["down", "--keep"], &["down", "--force", "--discard"]] {
        kill(supervisor, libc::SIGSTOP);
        let down = bed.spawn(options);
        eventually("it takes signals", || takes_signals(&down));
        signal(&down, libc::SIGTERM);
        let down = ended(down);
        assert!(
            down.signal == Some(libc::SIGTERM) && down.err.contains("the pool is as it was"),
            "{options:?}: {down:?}"
        );
        assert!(is_alive(supervisor));
        kill(supervisor, libc::SIGCONT);
        bed.sh("cat /forebay/one");
    }
    bed.ok(&["down"]);
}

/// Whatever state it meets the pool in.
#[test]
fn attempt_that_is_interrupted_neither_kills_nor_removes() {
    let bed = Bed::new();
    let (interrupt, mut other) = UnixStream::pair().unwrap();
    other.write_all(b"x").unwrap();
    let attempt = || {
        let interrupt = Some(interrupt.as_fd());
        launch::try_down(&bed.pool, DownOptions { force: true, interrupt, ..DownOptions::default() }).unwrap()
    };
    let supervisor = bed.supervisor();
    kill(supervisor, libc::SIGSTOP);
    assert!(matches!(attempt(), Attempt::Interrupted));
    assert!(is_alive(supervisor));
    kill(supervisor, libc::SIGCONT);
    assert!(matches!(attempt(), Attempt::Interrupted));
    assert_eq!(bed.status()["state"], "up");
    // A process has the pool, and cannot be reached.
    let supervisor_socket = bed.pool.join("supervisor");
    std::fs::rename(&supervisor_socket, bed.pool.join("aside")).unwrap();
    assert!(matches!(attempt(), Attempt::Interrupted));
    std::fs::rename(bed.pool.join("aside"), &supervisor_socket).unwrap();
    let worker = bed.worker();
    kill(supervisor, libc::SIGKILL);
    eventually("it is down", || !is_alive(supervisor) && !is_alive(worker));
    assert!(matches!(attempt(), Attempt::Interrupted));
    assert!(supervisor_socket.exists());
    bed.ok(&["down"]);
    assert!(!supervisor_socket.exists());
}

#[test]
fn down_that_a_signal_ends_after_it_told_the_pool_to_stop_says_what_it_knows() {
    let bed = Bed::new();
    let fates = [
        (Some("stopping"), Some(libc::SIGTERM), "it stops by itself"),
        (Some("up"), Some(libc::SIGTERM), "the pool is up"),
        (None, None, "cannot tell whether pool"),
    ];
    for (then, ended_by, said) in fates {
        let Replaced { socket, aside, fake } = Replaced::new(&bed.pool, "supervisor");
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            let mut state = Some("up");
            let mut silent = Vec::new();
            for asker in fake.incoming() {
                let mut asker = asker.unwrap();
                while let Some((magic, ask)) = receive(&mut asker) {
                    if ask["op"] != "status" {
                        state = then;
                        tell.send(()).unwrap();
                        break;
                    }
                    let Some(state) = state else { break };
                    let status = json!({ "state": state, "uses": 0, "pids": { "supervisor": 1 } });
                    answer(&mut asker, magic, &json!({ "status": status }));
                }
                silent.push(asker);
            }
        });
        let down = bed.spawn(&["down"]);
        told.recv_timeout(TIMEOUT).unwrap();
        signal(&down, libc::SIGTERM);
        let down = ended(down);
        assert!(down.signal == ended_by && down.err.contains(said), "{then:?}: {down:?}");
        std::fs::rename(&aside, &socket).unwrap();
    }
    bed.ok(&["down"]);
}

/// It asks the worker for what stores lack, and the mover to copy it. Neither answers.
#[test]
fn down_that_a_signal_ends_while_it_waits_for_what_never_comes_leaves_the_pool() {
    let bed = Bed::with_slow_store();
    bed.sh(BIG);
    let worker = Replaced::new(&bed.pool, "socket");
    let down = bed.spawn(&["down"]);
    drop(worker.meet()); // its look at the pool
    let attaches = worker.meet();
    signal(&down, libc::SIGTERM);
    let down = ended(down);
    drop(attaches);
    worker.restore();
    assert!(down.signal == Some(libc::SIGTERM) && down.err.contains("the pool is up"), "{down:?}");

    let down = bed.spawn(&["down"]);
    eventually("it copies", || copies(&bed));
    let mover = bed.status()["mover"]["pid"].as_i64().unwrap() as i32;
    kill(mover, libc::SIGSTOP);
    signal(&down, libc::SIGTERM);
    let down = ended(down);
    kill(mover, libc::SIGCONT);
    assert!(down.signal == Some(libc::SIGTERM) && down.err.contains("the pool is up"), "{down:?}");
    bed.down();
}

#[test]
fn down_that_cannot_mount_the_pool_again_says_so() {
    let bed = Bed::with_slow_store();
    let Some(mount) = bed.mount() else { return };
    bed.sh(BIG);
    let down = bed.spawn(&["down"]);
    eventually("it copies", || copies(&bed));
    let supervisor = bed.supervisor();
    kill(supervisor, libc::SIGSTOP);
    signal(&down, libc::SIGTERM);
    let down = ended(down);
    kill(supervisor, libc::SIGCONT);
    let cure = format!("forebay mount --pool {} {}", bed.pool.display(), mount.display());
    assert!(down.signal == Some(libc::SIGTERM) && down.err.contains(&cure), "{down:?}");
    bed.down();
}

#[test]
fn two_downs_at_once_both_see_the_pool_end() {
    for more in [&[][..], &["--media", "ssd"]] {
        let bed = Bed::with(more);
        bed.attach("?rate=2MB/s");
        bed.mount();
        bed.sh(BIG);
        let first = bed.spawn(&["down"]);
        eventually("it copies", || copies(&bed));
        let second = bed.spawn(&["down"]);
        let (first, second) = (ended(first), ended(second));
        assert_eq!((first.code, second.code), (Some(0), Some(0)), "{first:?} {second:?}");
        assert_eq!((bed.stored("big"), bed.is_mounted()), (Some(6_000_000), false));
        // It gives its lock free before it ends.
        eventually("the daemon has ended", || lock_holder(&bed.pool).is_none());
    }
}

#[test]
fn down_of_a_pool_whose_daemon_is_killed_meanwhile_says_what_the_store_may_lack() {
    for more in [&[][..], &["--media", "ssd"]] {
        let bed = Bed::with(more);
        bed.attach("?rate=2MB/s");
        bed.sh(BIG);
        let backing = bed.status()["backing"].clone();
        let down = bed.spawn(&["down"]);
        eventually("it copies", || copies(&bed));
        kill(bed.supervisor(), libc::SIGKILL);
        let down = ended(down);
        match backing.as_str() {
            Some("directory") => {
                assert_eq!(down.code, Some(0), "{down:?}");
                assert!(down.out.contains("its backing store may lack some"), "{down:?}");
            }
            Some("tmpfs") => down.assert_refused(1, &["may have data", "forebay up", "--discard"]),
            _ => continue, // its data went with it
        }
        bed.ok(&["up", "--path", bed.pool.to_str().unwrap()]);
        bed.down();
    }
}

/// The pool ends at each of the places where `down` could notice.
#[test]
fn down_of_a_pool_that_another_has_stopped_meanwhile_is_no_failure() {
    let bed = Bed::with_slow_store();
    bed.sh(BIG);
    let worker = Replaced::new(&bed.pool, "socket");
    let late = bed.spawn(&["down"]);
    // The supervisor has answered `late`; the worker has not.
    let looks = worker.meet_and_restore();
    signal(&late, libc::SIGSTOP);
    bed.down();
    signal(&late, libc::SIGCONT);
    drop(looks);
    let late = ended(late);
    assert!(late.code == Some(0) && late.out.contains("is down"), "{late:?}");

    let bed = Bed::with_slow_store();
    bed.sh(BIG);
    let late = bed.spawn(&["down"]);
    eventually("it copies", || copies(&bed));
    signal(&late, libc::SIGSTOP);
    bed.down();
    signal(&late, libc::SIGCONT);
    let late = ended(late);
    assert!(late.code == Some(0) && late.out.contains("is down"), "{late:?}");
}

#[test]
fn down_of_a_daemon_that_is_stopped_says_how_it_goes_on() {
    let bed = Bed::new();
    bed.attach("");
    bed.sh("echo one >/forebay/data/one");
    if bed.status()["backing"] == "directory" {
        return; // see the next test
    }
    let supervisor = bed.supervisor();
    kill(supervisor, libc::SIGSTOP);
    let down = bed.run(&["down"]);
    kill(supervisor, libc::SIGCONT);
    let cure = format!("kill -CONT {supervisor}");
    down.assert_refused(1, &["does not answer", "is stopped", &cure, "--discard"]);
    bed.ok(&["down"]);
    assert_eq!(bed.stored("one"), Some(4));
}

/// Its data lie in a directory, and stay there.
#[test]
fn daemon_that_does_not_answer_is_killed_if_nothing_is_lost_by_that() {
    let bed = Bed::with(&["--media", "ssd"]);
    bed.attach("");
    bed.sh("echo one >/forebay/data/one");
    assert_eq!(bed.status()["backing"], "directory");
    kill(bed.supervisor(), libc::SIGSTOP);
    let down = bed.ok(&["down"]);
    assert!(down.out.contains("was killed; its data is kept"), "{down:?}");
    assert!(down.out.contains("its backing store may lack some") && bed.stored("one").is_none(), "{down:?}");
    bed.ok(&["up", "--path", bed.pool.to_str().unwrap()]);
    bed.ok(&["down"]);
    assert_eq!(bed.stored("one"), Some(4));
}

/// What happens to a command in place of the daemon's answer says nothing about the daemon.
#[test]
fn daemon_that_cannot_be_asked_is_not_killed() {
    let bed = Bed::new();
    let (socket, aside) = (bed.pool.join("supervisor"), bed.pool.join("aside"));
    let supervisor = bed.supervisor();
    std::fs::rename(&socket, &aside).unwrap();
    std::os::unix::fs::symlink(&socket, &socket).unwrap();
    bed.run(&["down"]).assert_refused(1, &["cannot connect to", "symbolic links"]);
    std::fs::remove_file(&socket).unwrap();
    let fake = UnixListener::bind(&socket).unwrap();
    let fake = std::thread::spawn(move || {
        for _ in 0..2 {
            let (mut asker, _) = fake.accept().unwrap();
            let (mut magic, _) = receive(&mut asker).unwrap();
            magic[3] -= 1;
            answer(&mut asker, magic, &json!({ "status": {} }));
        }
    });
    for verb in ["down", "status"] {
        bed.run(&[verb]).assert_refused(1, &["different versions", "the Forebay that started it"]);
    }
    fake.join().unwrap();
    std::fs::rename(&aside, &socket).unwrap();
    assert_eq!(lock_holder(&bed.pool), Some(supervisor));
    bed.ok(&["down"]);
}

/// The code is that of a file handle that is stale, too.
#[test]
fn failure_of_a_stop_is_no_use_by_a_program() {
    let bed = Bed::new();
    let (socket, aside) = (bed.pool.join("supervisor"), bed.pool.join("aside"));
    std::fs::rename(&socket, &aside).unwrap();
    let fake = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        for asker in fake.incoming() {
            let mut asker = asker.unwrap();
            while let Some((magic, ask)) = receive(&mut asker) {
                let said = match ask["op"].as_str() {
                    Some("status") => {
                        json!({ "status": { "state": "up", "uses": 0, "pids": { "supervisor": 1 } } })
                    }
                    _ => json!({ "failed": {
                        "code": Code::Stale as u16, "what": "cannot remove the data", "why": "stale file handle", "cure": ""
                    } }),
                };
                answer(&mut asker, magic, &said);
            }
        }
    });
    let down = bed.run(&["down"]);
    down.assert_refused(1, &["cannot remove the data", "stale file handle"]);
    assert!(!down.err.contains("a program"), "{down:?}");
    std::fs::rename(&aside, &socket).unwrap();
    bed.ok(&["down"]);
}

/// A request on a connection, with the word that its message begins with.
fn receive(from: &mut UnixStream) -> Option<([u8; 4], Value)> {
    let mut header = [0; 12];
    from.read_exact(&mut header).ok()?;
    let mut text = vec![0; u32::from_le_bytes(header[8..].try_into().unwrap()) as usize];
    from.read_exact(&mut text).unwrap();
    Some((header[..4].try_into().unwrap(), serde_json::from_slice(&text).unwrap()))
}

/// Answers it.
fn answer(to: &mut UnixStream, magic: [u8; 4], value: &Value) {
    const CONTROL: u32 = 2;
    let text = value.to_string();
    let header = [magic, CONTROL.to_le_bytes(), (text.len() as u32).to_le_bytes()].concat();
    to.write_all(&[&header, text.as_bytes()].concat()).unwrap();
}

/// A pool that `up --foreground` keeps.
fn in_the_foreground(bed: &Bed) -> Child {
    bed.ok(&["down"]);
    let pool = bed.pool.to_str().unwrap();
    let up = bed.spawn(&["up", "--capacity", "128MiB", "--path", pool, "--foreground"]);
    bed.ok(&["status", "--wait", "60"]);
    up
}

#[test]
fn pool_in_the_foreground_takes_signals_that_come_together_for_one() {
    let bed = Bed::new();
    let up = in_the_foreground(&bed);
    bed.attach("?rate=2MB/s");
    bed.sh(BIG);
    for number in [libc::SIGTERM, libc::SIGHUP, libc::SIGINT] {
        signal(&up, number);
        std::thread::sleep(Duration::from_millis(20));
    }
    let up = ended(up);
    assert_eq!((up.code, bed.stored("big")), (Some(0), Some(6_000_000)), "{up:?}");
    assert!(lock_holder(&bed.pool).is_none());
}

#[test]
fn pool_in_the_foreground_waits_for_its_programs_to_end() {
    let bed = Bed::new();
    let up = in_the_foreground(&bed);
    bed.attach("");
    let script = "echo >&2; sleep 1.5; echo late >/forebay/data/late";
    let mut program = bed.spawn(&["run", "--quiet", "--", "sh", "-c", script]);
    program.stderr.take().unwrap().read_exact(&mut [0]).unwrap();
    signal(&up, libc::SIGTERM);
    assert_eq!(program.wait().unwrap().code(), Some(0));
    let up = ended(up);
    assert_eq!((up.code, bed.stored("late")), (Some(0), Some(5)), "{up:?}");
}

#[test]
fn pool_in_the_foreground_that_programs_use_to_the_end_keeps_what_they_wrote() {
    let bed = Bed::new();
    let up = in_the_foreground(&bed);
    bed.attach("");
    let stays_up = bed.status()["backing"] == "detached";
    let script =
        "echo >&2; i=0; while echo $i >/forebay/data/last; do i=$((i+1)); sleep 0.02; done 2>/dev/null";
    let mut program = bed.spawn(&["run", "--quiet", "--", "sh", "-c", script]);
    program.stderr.take().unwrap().read_exact(&mut [0]).unwrap();
    signal(&up, libc::SIGTERM);
    std::thread::sleep(Duration::from_secs(1));
    signal(&up, libc::SIGTERM);
    let up = ended(up);
    let fate = if stays_up { "the pool stays up" } else { "the data are kept" };
    up.assert_refused(1, &["programs use it", fate]);
    let _ = program.kill();
    program.wait().unwrap();
    if !stays_up {
        bed.ok(&["up", "--path", bed.pool.to_str().unwrap()]);
    }
    bed.ok(&["down"]);
    assert!(bed.stored("last").is_some());
}
