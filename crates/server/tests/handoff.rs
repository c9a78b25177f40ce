//! A real daemon whose rounds fail, whose threads panic, and which is stopped, while another node, which is the test,
//! sends requests. Every acknowledged change must exist, once, and the next worker must continue.

mod support;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_fabric::{CallEvent, CallId, Calls, CallsSettings};
use forebay_types::{Caller, Code, Ino, Layout, NodeId, Reply, Request};
use forebay_wire::{Message, Stamp};
use support::{skipped, Daemon};

/// Requests in progress at one time.
const AT_ONCE: usize = 4;
/// Each request uses a slot; a session has this many.
const SLOTS: u64 = 32;
/// Longer than any step of these tests takes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Node 2, which creates files in the root as fast as the daemon answers.
struct Traffic {
    calls: Calls,
    under_way: HashMap<CallId, u64>,
    made: BTreeMap<u64, Ino>,
    /// Creates that were answered with EIO: made, or not.
    in_doubt: u64,
    next: u64,
}

fn name(number: u64) -> Vec<u8> {
    format!("file {number}").into_bytes()
}

impl Traffic {
    fn new(daemon: &Daemon) -> Traffic {
        let calls = daemon.peer_with(&daemon.secret(), CallsSettings::default());
        Traffic { calls, under_way: HashMap::new(), made: BTreeMap::new(), in_doubt: 0, next: 0 }
    }

    fn ask(&mut self, number: u64, stamp: Stamp, request: Request<'_>) {
        let deadline = self.calls.now() + 2 * TIMEOUT;
        let message = Message::Ask(Caller { uid: 0, gid: 0 }, request);
        self.under_way.insert(self.calls.call(NodeId(1), stamp, &message, deadline).unwrap(), number);
    }

    /// Handles the events that have arrived; `keep` gets each successful reply.
    fn hear(&mut self, mut keep: impl FnMut(u64, Reply<'_>)) {
        self.calls.progress();
        let mut some = false;
        while let Some(event) = self.calls.next_event() {
            some = true;
            match event {
                CallEvent::Answered { call, outcome, .. } => {
                    let number = self.under_way.remove(&call).unwrap();
                    let body = match outcome {
                        Ok(body) => body,
                        Err(failed) if failed.code == Code::Io => {
                            println!("file {number}: {failed:?}");
                            self.in_doubt += 1;
                            continue;
                        }
                        Err(failed) => panic!("file {number}: {failed:?}"),
                    };
                    match body.message() {
                        Message::Answer(Ok(reply)) => keep(number, reply),
                        other => panic!("file {number}: {other:?}"),
                    }
                }
                CallEvent::Asked { ticket, .. } => {
                    let nothing = Message::Failure { code: Code::NotSupported, detail: b"" };
                    self.calls.answer(&ticket, &nothing).unwrap();
                }
                _ => {}
            }
        }
        if !some {
            self.calls.wait(Duration::from_millis(5));
        }
    }

    fn step(&mut self, asks: bool) {
        while asks && self.under_way.len() < AT_ONCE {
            let number = self.next;
            self.next += 1;
            let request = Request::Create {
                parent: Ino::ROOT,
                name: &name(number),
                mode: 0o644,
                exclusive: true,
                dirty: true,
                layout: Some(Layout::single(NodeId(2), 0)),
                number: None,
                reserve: false,
            };
            // A slot is used again only after its answer: there are more slots than requests in progress.
            let stamp =
                Stamp { session: 2 << 48 | 5, slot: (number % SLOTS) as u16, sequence: 1 + number / SLOTS };
            self.ask(number, stamp, request);
        }
        let mut made = std::mem::take(&mut self.made);
        self.hear(|number, reply| match reply {
            Reply::Created { entry, .. } => {
                assert!(made.insert(number, entry.attr.ino).is_none(), "file {number} is answered twice");
            }
            other => panic!("file {number}: {other:?}"),
        });
        self.made = made;
    }

    fn until(&mut self, what: &str, asks: bool, done: impl Fn(&Traffic) -> bool) {
        let end = Instant::now() + TIMEOUT;
        while !done(self) {
            assert!(Instant::now() < end, "{what} takes for ever; {} files are made", self.made.len());
            self.step(asks);
        }
    }

    /// Checks that the daemon still creates files.
    fn goes_on(&mut self) {
        let enough = self.made.len() + 200;
        self.until("to go on", true, |traffic| traffic.made.len() >= enough);
    }

    /// Checks that every acknowledged file exists with the inode number of its reply, and no other file.
    fn check(&mut self, daemon: &Daemon) {
        self.until("the rest", false, |traffic| traffic.under_way.is_empty());
        let made = std::mem::take(&mut self.made);
        let mut found = 0;
        for (at, (number, ino)) in made.iter().enumerate() {
            let stamp = Stamp { session: 2 << 48 | 6, slot: 0, sequence: 1 + at as u64 };
            self.ask(*number, stamp, Request::Lookup { parent: Ino::ROOT, name: &name(*number) });
            let end = Instant::now() + TIMEOUT;
            while !self.under_way.is_empty() {
                assert!(Instant::now() < end, "file {number} is not looked up");
                self.hear(|_, reply| match reply {
                    Reply::Entry(entry) => {
                        assert_eq!(entry.attr.ino, *ino, "file {number}");
                        found += 1;
                    }
                    other => panic!("file {number}: {other:?}"),
                });
            }
        }
        assert_eq!(found, made.len());
        let report = forebay_server::control::check(&daemon.pool()).unwrap();
        let least = 1 + made.len() as u64;
        let known = least..=least + self.in_doubt;
        assert!(report["clean"] == true && known.contains(&report["inodes"].as_u64().unwrap()), "{report}");
        println!("{} files were acknowledged, {} are in doubt", made.len(), self.in_doubt);
        self.made = made;
    }
}

fn shared_memory() -> Option<&'static Path> {
    let path = Path::new("/dev/shm");
    if !path.is_dir() {
        println!("skipped: no tmpfs, in which alone the network thread serves");
        return None;
    }
    (!skipped()).then_some(path)
}

#[test]
#[cfg(debug_assertions)] // the faults exist only there
fn worker_whose_thread_fails_or_panics_is_followed_by_one_that_knows_all() {
    let Some(parent) = shared_memory() else { return };
    let daemon = Daemon::start_in(parent, "turns", 4);
    let mut traffic = Traffic::new(&daemon);
    traffic.goes_on();
    for (moment, thread, how) in [
        ("Journaled", "network", "fail"),
        ("Published", "network", "panic"),
        ("Answered", "network", "panic"),
        ("Journaled", "network", "panic"),
        ("Committing", "main", "fail"),
        ("Committed", "main", "fail"),
        ("Committing", "main", "panic"),
    ] {
        let workers = daemon.messages().matches("worker started").count();
        let fault = daemon.fault();
        std::fs::write(fault.with_extension("new"), format!("{moment} {thread} {how}")).unwrap();
        std::fs::rename(fault.with_extension("new"), &fault).unwrap();
        traffic.until(&format!("{how} of {thread} at {moment}"), true, |_| !fault.exists());
        traffic.goes_on();
        let more = daemon.messages().matches("worker started").count();
        assert_eq!(more, workers + 1, "{how} of {thread} at {moment}");
        assert!(!fault.with_extension("after").exists(), "it went on after {how} of {thread} at {moment}");
    }
    let said = daemon.messages();
    let ended = said.matches("ERROR worker was killed by signal 6").count()
        + said.matches("ERROR worker ended with status 1").count();
    assert_eq!(ended, 7, "each fault ended a worker");
    assert_eq!(traffic.in_doubt, 0, "the next worker answers what was under way");
    traffic.check(&daemon);
    traffic.calls.leave("done");
}

#[test]
fn worker_that_is_stopped_under_requests_of_another_node_ends_whole() {
    let Some(parent) = shared_memory() else { return };
    let mut daemon = Daemon::start_in(parent, "stopped", 5);
    let mut traffic = Traffic::new(&daemon);
    for _ in 0..3 {
        traffic.goes_on();
        // It is stopped between two rounds of the traffic; the next round's requests arrive while it stops.
        let stopped = std::thread::scope(|scope| {
            let stopping = scope.spawn(|| daemon.stop());
            while !stopping.is_finished() {
                traffic.step(true);
            }
            stopping.join().unwrap()
        });
        assert!(stopped.success(), "{stopped:?}");
        daemon.start_again();
    }
    traffic.goes_on();
    traffic.check(&daemon);
    traffic.calls.leave("done");
}
