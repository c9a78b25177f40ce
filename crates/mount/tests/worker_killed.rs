//! Workers are killed while they write invalidations to the kernel: a notification that waits for a directory's lock
//! does not delay the next worker. With `FOREBAY_SOAK` set there are more kills, and a worker is stopped for longer
//! than a call waits.

mod common;

use common::{kill, state, wait_for, Place, Stopped};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay_client::{Pool, Role};
use forebay_types::Code;

/// On a machine that is merely busy no call takes this long, over any number of kills. A call that hangs lasts until
/// the client gives up.
const LONGEST_CALL: Duration = Duration::from_secs(25);

fn soaks() -> bool {
    std::env::var_os("FOREBAY_SOAK").is_some()
}

/// A shell that sees the pool as /forebay, and gets one line after the other to execute.
struct Shell {
    child: Child,
    input: ChildStdin,
    words: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Shell {
    fn new(place: &Place) -> Shell {
        let mut command = place.command(&["run", "--quiet", "--", "sh"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut shell = Shell { child, input, words: BufReader::new(output).lines() };
        shell.say("true");
        shell.hears();
        shell
    }

    fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}; echo done $?").unwrap();
    }

    /// Waits until the line was executed.
    #[track_caller]
    fn hears(&mut self) {
        assert_eq!(self.words.next().unwrap().unwrap(), "done 0");
    }

    fn ends(mut self) {
        drop(self.input);
        self.child.wait().unwrap();
    }
}

/// Children of a pool's supervisor, by the names of their main threads.
fn children(supervisor: i32) -> Vec<(String, i32)> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        let Some((front, back)) = stat.rsplit_once(") ") else { continue };
        if back.split(' ').nth(1).and_then(|parent| parent.parse().ok()) == Some(supervisor) {
            found.push((front.split_once('(').unwrap().1.to_owned(), pid));
        }
    }
    found
}

fn worker_of(supervisor: i32) -> Option<i32> {
    worker_after(supervisor, None)
}

/// The living worker that is not `last`, which may take a while to end.
fn worker_after(supervisor: i32, last: Option<i32>) -> Option<i32> {
    let lives = |pid: i32| !matches!(state(Path::new(&format!("/proc/{pid}"))), 'Z' | 'X');
    let mut workers = children(supervisor).into_iter().filter(|(name, _)| name == "forebayd-worker");
    workers.find(|(_, pid)| Some(*pid) != last && lives(*pid)).map(|(_, pid)| pid)
}

fn notifiers_of(supervisor: i32) -> Vec<i32> {
    let children = children(supervisor).into_iter().filter(|(name, _)| name == "forebayd-notify");
    children.map(|(_, pid)| pid).collect()
}

/// True when a thread of a pool's daemon waits in the kernel uninterruptibly.
fn waits_in_the_kernel(supervisor: i32) -> bool {
    let of_daemon = |(name, pid): (String, i32)| name.starts_with("forebayd").then_some(pid);
    children(supervisor).into_iter().filter_map(of_daemon).any(|pid| {
        let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return false };
        tasks.flatten().any(|task| state(&task.path()) == 'D')
    })
}

fn told_late(place: &Place) -> u64 {
    place.status()["ring"]["told_late"].as_u64().unwrap()
}

/// Runs `act` while a notification waits for the lock of the directory d, and no longer.
fn while_a_notification_waits(place: &Place, shell: &mut Shell, act: impl FnOnce(&mut Shell)) {
    let supervisor = place.pid("supervisor");
    // A look-up beforehand, so that the kernel sends no request on the way to the directory.
    assert!(fs::metadata(place.file("d/other")).is_err());
    std::thread::scope(|scope| {
        let stopped = Stopped::new(place.pid("mount"));
        // Holds the directory's lock until the mount's process continues.
        let waits = scope.spawn(|| fs::metadata(place.file("d/missing")).is_err());
        wait_for("a notification waits for the directory's lock", || {
            shell.say("echo 1 > /forebay/d/before; rm /forebay/d/before");
            shell.hears();
            waits_in_the_kernel(supervisor)
        });
        act(shell);
        assert!(!waits.is_finished(), "the lock was free: the test shows nothing");
        drop(stopped);
        assert!(waits.join().unwrap());
    });
}

#[test]
fn worker_killed_while_a_notification_waits_for_a_directory_has_a_successor_at_once() {
    let Some(place) = Place::mounted() else { return };
    fs::create_dir(place.file("d")).unwrap();
    let mut shell = Shell::new(&place);
    let supervisor = place.pid("supervisor");
    while_a_notification_waits(&place, &mut shell, |shell| {
        let mut worker = worker_of(supervisor).unwrap();
        for round in 0..3 {
            kill(worker);
            wait_for("another worker serves", || {
                let next = worker_of(supervisor).filter(|pid| *pid != worker);
                let serves = next.is_some() && place.status()["state"] == "up";
                worker = next.filter(|_| serves).unwrap_or(worker);
                serves
            });
            shell.say(&format!("echo {round} > /forebay/d/after{round}"));
            shell.hears();
        }
    });
    for round in 0..3 {
        let text = fs::read_to_string(place.file(&format!("d/after{round}"))).unwrap();
        assert_eq!(text, format!("{round}\n"));
    }
    shell.ends();
    wait_for("notifiers of dead workers end", || notifiers_of(supervisor).len() == 2);
    place.is_clean();
}

#[test]
fn notifier_killed_in_the_kernel_is_replaced_when_it_has_ended() {
    let Some(place) = Place::mounted() else { return };
    fs::create_dir(place.file("d")).unwrap();
    let mut shell = Shell::new(&place);
    let supervisor = place.pid("supervisor");
    let mut killed = Vec::new();
    while_a_notification_waits(&place, &mut shell, |shell| {
        killed = notifiers_of(supervisor);
        killed.retain(|pid| state(Path::new(&format!("/proc/{pid}"))) == 'D');
        assert_eq!(killed.len(), 1);
        killed.iter().copied().for_each(kill);
        shell.say("echo 1 > /forebay/d/after");
        shell.hears();
    });
    wait_for("another is there", || {
        shell.say("echo 2 > /forebay/d/before; rm /forebay/d/before");
        shell.hears();
        let now = notifiers_of(supervisor);
        now.len() == 2 && !now.contains(&killed[0])
    });
    assert_eq!(fs::read_to_string(place.file("d/after")).unwrap(), "1\n");
    shell.ends();
    place.is_clean();
}

#[test]
fn notifiers_that_are_killed_are_replaced_and_no_change_is_missed() {
    let Some(place) = Place::mounted() else { return };
    let supervisor = place.pid("supervisor");
    let mut shell = Shell::new(&place);
    for round in 0..3 {
        let name = format!("r{round}");
        assert!(fs::metadata(place.file(&name)).is_err(), "the kernel believes that there is none");
        let killed = notifiers_of(supervisor);
        assert_eq!(killed.len(), 2);
        killed.iter().copied().for_each(kill);
        shell.say(&format!("mkdir /forebay/{name} /forebay/{name}/sub"));
        shell.hears();
        assert_eq!(
            fs::metadata(place.file(&name)).map(|m| std::os::unix::fs::MetadataExt::nlink(&m)).unwrap(),
            3
        );
        wait_for("others are there", || {
            let now = notifiers_of(supervisor);
            now.len() == 2 && now.iter().all(|pid| !killed.contains(pid))
        });
    }
    shell.ends();
    place.is_clean();
}

/// Creates, renames and unlinks in one directory until `stop` is set. Returns the names that exist at the end, and the
/// longest call.
struct Load<'a> {
    dir: PathBuf,
    tag: String,
    stop: &'a AtomicBool,
    rounds: &'a AtomicU64,
}

impl Load<'_> {
    fn run(self) -> (BTreeMap<String, String>, Duration) {
        let (mut there, mut longest) = (BTreeMap::new(), Duration::ZERO);
        let mut timed = |what: &str, call: &dyn Fn() -> std::io::Result<()>| {
            let begun = Instant::now();
            call().unwrap_or_else(|e| panic!("{what} of {}: {e} after {:?}", self.tag, begun.elapsed()));
            longest = longest.max(begun.elapsed());
        };
        let mut i = 0u64;
        while !self.stop.load(Ordering::Relaxed) {
            let (new, kept) = (format!("{}-new{i}", self.tag), format!("{}-{}", self.tag, i % 40));
            let (from, to) = (self.dir.join(&new), self.dir.join(&kept));
            timed("create", &|| fs::write(&from, i.to_string()));
            timed("look-up", &|| match fs::metadata(self.dir.join("missing")) {
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
                other => other.map(drop),
            });
            timed("rename", &|| fs::rename(&from, &to));
            there.insert(kept.clone(), i.to_string());
            if i.is_multiple_of(3) {
                timed("unlink", &|| fs::remove_file(&to));
                there.remove(&kept);
            }
            i += 1;
            self.rounds.fetch_add(1, Ordering::Relaxed);
        }
        (there, longest)
    }
}

/// The same under the preload library. It prints its results when its standard input ends. Needs python3, as the
/// preload library's tests do.
const PRELOADED_LOAD: &str = r#"
import json, os, select, sys, time
tag, longest, there, i = sys.argv[1], 0.0, {}, 0
def timed(call, *words):
    global longest
    begun = time.monotonic()
    call(*words)
    longest = max(longest, time.monotonic() - begun)
def create(path, text):
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    os.write(fd, text.encode())
    os.close(fd)
while not select.select([sys.stdin], [], [], 0)[0]:
    new, kept = f"{tag}-new{i}", f"{tag}-{i % 40}"
    timed(create, "/forebay/d/" + new, str(i))
    timed(os.rename, "/forebay/d/" + new, "/forebay/d/" + kept)
    there[kept] = str(i)
    if i % 3 == 0:
        timed(os.unlink, "/forebay/d/" + kept)
        del there[kept]
    i += 1
print(json.dumps([there, longest, i]))
"#;

fn preloaded_load(place: &Place, tag: &str) -> Child {
    let mut command: Command = place.command(&["run", "--quiet", "--", "python3", "-c", PRELOADED_LOAD, tag]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

/// Stops the load. Returns its names, its longest call and its number of rounds.
#[track_caller]
fn end_of(mut load: Child) -> (BTreeMap<String, String>, Duration, u64) {
    drop(load.stdin.take());
    let output = load.wait_with_output().unwrap();
    assert!(output.status.success(), "a preloaded program failed");
    let (there, longest, rounds): (_, f64, _) = serde_json::from_slice(&output.stdout).unwrap();
    (there, Duration::from_secs_f64(longest), rounds)
}

#[test]
fn workers_killed_in_quick_succession_lose_nothing_and_leave_the_pool_fast() {
    let Some(place) = Place::mounted() else { return };
    fs::create_dir(place.file("d")).unwrap();
    let supervisor = place.pid("supervisor");
    let pairs: u64 = if soaks() { 250 } else { 24 };
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let preloaded = ["p0", "p1"].map(|tag| preloaded_load(&place, tag));
    let mut there = BTreeMap::new();
    let mut longest = Duration::ZERO;
    std::thread::scope(|scope| {
        let loads: Vec<_> = (0..3)
            .map(|thread| {
                let load =
                    Load { dir: place.file("d"), tag: format!("m{thread}"), stop: &stop, rounds: &rounds };
                scope.spawn(|| load.run())
            })
            .collect();
        for pair in 0..pairs {
            let before = rounds.load(Ordering::Relaxed);
            let mut last = None;
            for which in ["first", "second"] {
                let begun = Instant::now();
                let worker = loop {
                    match worker_after(supervisor, last) {
                        Some(worker) => break worker,
                        None => assert!(
                            begun.elapsed() < LONGEST_CALL,
                            "no worker before the {which} kill of pair {pair}"
                        ),
                    }
                    std::thread::sleep(Duration::from_millis(1));
                };
                kill(worker);
                last = Some(worker);
                std::thread::sleep(Duration::from_millis(5 + pair * 7 % 35));
            }
            wait_for("the load goes on", || rounds.load(Ordering::Relaxed) > before + 5);
            // Longer than the life of a worker that the supervisor counts as crashed at its start.
            std::thread::sleep(Duration::from_millis(1050));
        }
        stop.store(true, Ordering::Relaxed);
        for load in loads {
            let (names, most) = load.join().unwrap();
            there.extend(names);
            longest = longest.max(most);
        }
    });
    for load in preloaded {
        let (names, most, done) = end_of(load);
        assert!(done > pairs, "the preloaded program did nothing");
        there.extend(names);
        longest = longest.max(most);
    }
    assert!(longest < LONGEST_CALL, "a call took {longest:?}");
    let listed: Vec<_> = fs::read_dir(place.file("d")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(listed.len(), there.len(), "{listed:?}");
    for (name, text) in &there {
        assert_eq!(fs::read_to_string(place.file("d").join(name)).unwrap(), *text, "{name}");
    }
    assert!(place.status()["restarts"].as_u64() >= Some(pairs + pairs / 2));
    assert_eq!(place.status()["mounts"][0]["restarts"], 0, "the mount's process lives");
    is_fast(&place);
    place.is_clean();
}

/// Changes through the mount wait for no notification, and changes of other programs only for as long as one takes.
#[track_caller]
fn is_fast(place: &Place) {
    const CHANGES: u64 = 100;
    let before = told_late(place);
    for i in 0..CHANGES {
        fs::write(place.file("fast"), i.to_string()).unwrap();
        fs::remove_file(place.file("fast")).unwrap();
    }
    place.preloaded("cd /forebay && i=0; while [ $i -lt 50 ]; do echo $i > fast$i; i=$((i+1)); done");
    let late = told_late(place) - before;
    // If each notification waited in vain, all of these would be late. On a busy machine some are.
    assert!(late < CHANGES, "{late} acknowledgements were held back until they were late");
}

/// Does what a mount's process does after a call without an answer: it has two sessions then.
#[test]
fn mount_process_that_attaches_anew_serves_on() {
    let Some(place) = Place::new() else { return };
    let device = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
    let announced = |pool: &Pool| pool.announce_mount(std::os::fd::AsFd::as_fd(&device));
    let attach = || Pool::attach_as(&place.pool(), Role::Mount).unwrap();
    let (first, second) = (attach(), attach());
    for pool in [first, first, second, first] {
        announced(pool).unwrap();
    }
    place.kill("worker");
    wait_for("the next worker takes it over", || match announced(second) {
        Err(Code::PoolGone) => false,
        announced => announced.map(|_| true).unwrap(),
    });
}

/// A worker is stopped for longer than a call waits: the mount's process attaches anew, and the worker does not die.
#[test]
fn worker_stopped_for_longer_than_calls_wait_leaves_the_pool_fast() {
    if !soaks() {
        return eprintln!("skipped: FOREBAY_SOAK is not set");
    }
    let Some(place) = Place::mounted() else { return };
    let worker = place.pid("worker");
    std::thread::scope(|scope| {
        let stopped = Stopped::new(worker);
        let waits = scope.spawn(|| fs::write(place.file("name"), "x"));
        let end = Instant::now() + Duration::from_secs(300);
        while !waits.is_finished() {
            assert!(Instant::now() < end, "a call waits for ever");
            std::thread::sleep(Duration::from_millis(100));
        }
        assert!(waits.join().unwrap().is_err());
        drop(stopped);
    });
    assert_eq!(place.pid("worker"), worker);
    wait_for("the pool is fast again", || {
        let before = told_late(&place);
        (0..10).for_each(|i| fs::write(place.file("name"), i.to_string()).unwrap());
        (0..10).for_each(|i| fs::write(place.file(&format!("name{i}")), i.to_string()).unwrap());
        told_late(&place) == before
    });
    is_fast(&place);
    place.is_clean();
}
