//! Rounds that fail in either thread, and a stop, while another node sends requests. The test calls the threads' loops
//! itself, to control their order.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};

use forebay_data::Target;
use forebay_fabric::simulated::{Faults, Network as Simulated};
use forebay_fabric::{CallEvent, CallId, Calls, CallsSettings, Identity};
use forebay_ring::{memfd_sealed, Mapping, Seal};
use forebay_types::{Caller, Ino, Layout, NodeId, Reply, Request, Timestamp};
use forebay_wire::{Message as WireMessage, Secret, Stamp};

use super::super::stepped::{session_of, Moment, Node, Setup};
use super::*;
use crate::worker::late_removals::LOOK_AFTER_BATCHES;
use crate::worker::message::Message;
use crate::worker::volumes::tests::used_piece;
use crate::FLIGHT_RECORDER_BYTES;

const NODE: NodeId = NodeId(1);
const PEER: NodeId = NodeId(2);

fn secret() -> Secret {
    Secret::new(&(0..32).collect::<Vec<u8>>()).unwrap()
}

fn calls(node: NodeId, network: &Simulated, seed: u64) -> Calls {
    let identity = Identity { pool: secret().pool(), node, capacity_bytes: 0 };
    let settings = CallsSettings { seed: Some(seed), ..CallsSettings::default() };
    Calls::new(Box::new(network.endpoint(node.0.into())), identity, secret(), settings)
}

/// Node 1 with its shard thread installed, and node 2, which sends it requests.
struct Scene {
    network: Simulated,
    handoff: Arc<Handoff>,
    node: Option<Node>,
    peer: Calls,
    answered: Vec<CallId>,
    /// Requests whose outcome node 2 cannot know.
    in_doubt: Vec<CallId>,
    /// All requests.
    asked: Vec<CallId>,
    /// The moments that the shard thread passed since it was installed.
    passed: Rc<RefCell<Vec<Moment>>>,
    target: OwnedFd,
    recorder: OwnedFd,
    doorbell: OwnedFd,
    epoch: u64,
    dir: PathBuf,
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.handoff.take_core();
        self.node = None;
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Scene {
    fn new() -> Scene {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("forebay-handoff-{}-{number}", std::process::id()));
        std::fs::create_dir_all(dir.join("shard")).unwrap();
        let target: OwnedFd = std::fs::File::open(&dir).unwrap().into();
        Target::format(&target).unwrap();
        let (recorder, _) = memfd_sealed(c"recorder", FLIGHT_RECORDER_BYTES as usize, Seal::Size).unwrap();
        let (doorbell, mapped) = Doorbell::create().unwrap();
        let network = Simulated::new(1, Faults::NONE);
        let mut peer = calls(PEER, &network, 2);
        peer.add_node(NODE, format!("simulated:{NODE}").as_bytes()).unwrap();
        let mut scene = Scene {
            handoff: Handoff::new(Arc::new(mapped), true),
            network,
            node: None,
            peer,
            answered: Vec::new(),
            in_doubt: Vec::new(),
            asked: Vec::new(),
            passed: Rc::default(),
            target,
            recorder,
            doorbell,
            epoch: 0,
            dir,
        };
        scene.start(None);
        scene
    }

    /// Starts a worker on what the last one left. Its round fails at the moment `fails_at`.
    fn start(&mut self, fails_at: Option<Moment>) {
        self.handoff.take_core();
        self.node = None;
        self.network.kill(NODE.0.into());
        self.epoch += 1;
        let mut node = Node::start(Setup {
            node: NODE,
            others: vec![(PEER, format!("simulated:{PEER}").into_bytes())],
            without_target: Vec::new(),
            endpoint: Box::new(self.network.endpoint(NODE.0.into())),
            calls: CallsSettings { seed: Some(10 + self.epoch), ..CallsSettings::default() },
            secret: secret(),
            target: self.target.as_fd(),
            shard_bytes: 16 << 20,
            flight_recorder: self.recorder.as_fd(),
            doorbell: self.doorbell.as_fd(),
            keeper: None,
            rings: Vec::new(),
            epoch: self.epoch,
            clock: || Timestamp { sec: 1, nsec: 0 },
            planted: None,
            kernel: None,
            piece: None,
        })
        .unwrap();
        let passed = Rc::new(RefCell::new(Vec::new()));
        self.passed = Rc::clone(&passed);
        node.watch(Box::new(move |moment| {
            passed.borrow_mut().push(moment);
            match fails_at == Some(moment) {
                true => Err(Error::new(Code::Io, "the test's")),
                false => Ok(()),
            }
        }));
        self.handoff.install(node.take_shard_thread().unwrap()).unwrap();
        self.node = Some(node);
    }

    /// Node 2 requests the creation of a file.
    fn create(&mut self, name: &[u8]) -> CallId {
        let layout = Some(Layout::single(PEER, 0));
        let request = Request::Create {
            parent: Ino::ROOT,
            name,
            mode: 0o644,
            exclusive: true,
            dirty: true,
            layout,
            number: None,
            reserve: false,
        };
        let stamp = Stamp { session: session_of(PEER, 5), slot: self.asked.len() as u16, sequence: 1 };
        let deadline = self.network.now() + Duration::from_secs(3600);
        let message = WireMessage::Ask(Caller { uid: 0, gid: 0 }, request);
        self.asked.push(self.peer.call(NODE, stamp, &message, deadline).unwrap());
        self.asked[self.asked.len() - 1]
    }

    /// Runs both nodes until node 2 receives nothing more. When the network thread sent the shard thread something, it
    /// calls `serve`.
    fn pass<T>(&mut self, serve: impl Fn(&Handoff) -> T) {
        for _ in 0..20_000 {
            self.network.turn();
            if self.node.as_mut().unwrap().has_told() {
                serve(&self.handoff);
            }
            self.peer.progress();
            while let Some(event) = self.peer.next_event() {
                match event {
                    CallEvent::Answered { call, outcome, .. } => {
                        let body = match outcome {
                            Ok(body) => body,
                            Err(failed) => {
                                assert_eq!(failed.code, Code::Io, "{failed:?}");
                                self.in_doubt.push(call);
                                continue;
                            }
                        };
                        assert!(
                            matches!(body.message(), WireMessage::Answer(Ok(Reply::Created { .. }))),
                            "{body:?}"
                        );
                        self.answered.push(call);
                    }
                    CallEvent::Asked { ticket, .. } => {
                        let nothing = WireMessage::Failure { code: Code::NotSupported, detail: b"" };
                        self.peer.answer(&ticket, &nothing).unwrap();
                    }
                    _ => {}
                }
            }
        }
    }

    fn is_over(&self) -> bool {
        self.handoff.shard.lock().unwrap().as_ref().unwrap().over
    }

    /// The worker must end: no thread serves a request, and no thread holds the core.
    fn assert_ends(&mut self) {
        assert!(self.is_over());
        let (passed, answered) = (self.passed.borrow().len(), self.answered.len());
        let name = format!("late {}", self.asked.len());
        let late = self.create(name.as_bytes());
        self.pass(Handoff::serve_for_shard_thread);
        assert_eq!(self.passed.borrow().len(), passed, "nothing is served after a round that failed");
        assert_eq!(self.answered.len(), answered);
        assert!(!self.answered.contains(&late));
        assert!(self.handoff.shard.try_lock().is_ok(), "nobody has the core");
    }

    /// The next worker answers all requests that are not given up, and has no other files.
    fn assert_goes_on(&mut self) {
        self.start(None);
        self.pass(Handoff::serve_for_shard_thread);
        for call in &self.asked {
            let told = self.answered.iter().chain(&self.in_doubt).filter(|c| *c == call);
            assert_eq!(told.count(), 1, "{call:?}");
        }
        let mut guard = self.handoff.shard().unwrap();
        let report = guard.as_mut().unwrap().thread.check_here().unwrap().unwrap();
        assert!(report["clean"] == true && report["inodes"] == 1 + self.answered.len() as u64, "{report}");
    }
}

#[test]
fn request_of_another_node_is_served_in_either_threads_hands() {
    let mut scene = Scene::new();
    let asked = [scene.create(b"a"), scene.create(b"b")];
    scene.pass(Handoff::serve_for_shard_thread);
    assert!(scene.answered == asked && !scene.is_over());
    assert!(scene.passed.borrow().contains(&Moment::Answered));
    // The shard thread itself, until it would sleep.
    let third = scene.create(b"c");
    scene.pass(|handoff| {
        let mut guard = handoff.shard().unwrap();
        let mut rest = Rest { spin: AdaptiveSpin::new(), idle_rounds: 0, slept: true };
        assert!(handoff.work(guard.as_mut().unwrap(), &mut rest).unwrap().is_some());
    });
    assert_eq!(scene.answered.last(), Some(&third));
}

#[test]
fn round_that_fails_in_the_network_threads_hands_ends_the_worker() {
    for moment in [Moment::Journaled, Moment::Published] {
        let mut scene = Scene::new();
        let first = scene.create(b"first");
        scene.pass(Handoff::serve_for_shard_thread);
        scene.start(Some(moment));
        scene.create(b"second");
        scene.pass(Handoff::serve_for_shard_thread);
        assert_eq!(scene.answered, [first], "{moment:?}: it is not acknowledged");
        assert_eq!(scene.passed.borrow().last(), Some(&moment));
        scene.assert_ends();
        // The doorbell was rung for the shard thread, which ends the worker with the error of that round.
        let why = scene.handoff.serve().unwrap_err();
        assert_eq!(why.what, "the test's");
        scene.assert_ends();
        scene.assert_goes_on();
    }
}

#[test]
fn piece_that_is_used_no_longer_is_dropped_although_requests_never_pause() {
    let scene = Scene::new();
    let (mut volumes, piece, used) = used_piece();
    volumes.keep_only(&BTreeSet::new());
    let mut guard = scene.handoff.shard().unwrap();
    let thread = &mut guard.as_mut().unwrap().thread;
    thread.volumes = volumes;
    // As after so many batches.
    (0..LOOK_AFTER_BATCHES).for_each(|_| thread.sweep_late_if_due());
    assert!(thread.volumes.has(piece));
    drop(used);
    (0..LOOK_AFTER_BATCHES).for_each(|_| thread.sweep_late_if_due());
    assert!(!thread.volumes.has(piece));
    drop(guard);
}

#[test]
fn commit_that_fails_in_the_network_threads_hands_loses_nothing() {
    let mut scene = Scene::new();
    let first = scene.create(b"first");
    scene.pass(Handoff::serve_for_shard_thread);
    scene.start(Some(Moment::Committing));
    let second = scene.create(b"second");
    scene.pass(Handoff::serve_for_shard_thread);
    assert_eq!(scene.answered, [first, second], "it is in the journal");
    // The transaction counts as long as one may be, so that the next request causes a commit.
    scene.handoff.shard().unwrap().as_mut().unwrap().thread.uncommitted = usize::MAX / 2;
    scene.create(b"third");
    scene.pass(Handoff::serve_for_shard_thread);
    assert_eq!(scene.answered, [first, second]);
    assert_eq!(scene.passed.borrow().last(), Some(&Moment::Committing));
    scene.assert_ends();
    assert!(scene.handoff.serve().is_err());
    scene.assert_goes_on();
}

#[test]
fn round_that_fails_in_the_shard_threads_hands_leaves_nothing_to_the_network_thread() {
    let mut scene = Scene::new();
    scene.start(Some(Moment::Journaled));
    scene.create(b"first");
    scene.pass(|_| {});
    assert!(scene.handoff.serve().is_err());
    scene.assert_ends();
    scene.assert_goes_on();
}

#[test]
fn stop_is_left_for_the_shard_thread_and_nothing_is_served_behind_it() {
    let mut scene = Scene::new();
    let first = scene.create(b"first");
    scene.pass(Handoff::serve_for_shard_thread);
    scene.node.as_ref().unwrap().tell(Message::Stop);
    let second = scene.create(b"second");
    scene.pass(Handoff::serve_for_shard_thread);
    assert_eq!(scene.answered, [first], "the network thread hears no order to stop");
    scene.handoff.serve().unwrap();
    assert!(!scene.is_over());
    scene.pass(Handoff::serve_for_shard_thread);
    assert_eq!((scene.answered.as_slice(), scene.in_doubt.as_slice()), (&[first][..], &[second][..]));
    assert!(scene.handoff.shard.try_lock().is_ok(), "nobody has the core");
    scene.handoff.take_core();
    scene.pass(Handoff::serve_for_shard_thread);
    scene.assert_goes_on();
}

/// The shard thread works until it would sleep, and has slept for `since`.
fn sleeps(handoff: &Handoff, since: Duration) {
    let mut guard = handoff.shard().unwrap();
    let core = guard.as_mut().unwrap();
    let mut rest = Rest { spin: AdaptiveSpin::new(), idle_rounds: 0, slept: false };
    assert!(handoff.work(core, &mut rest).unwrap().is_some());
    let began = Instant::now() - since;
    // Its timeout ends before any other work is due.
    core.asleep = Some((began, began));
}

#[test]
fn who_is_awake_minds_the_doorbell_of_who_sleeps() {
    let scene = Scene::new();
    let handoff = &scene.handoff;
    let tell = |message| scene.node.as_ref().unwrap().tell(message);
    let lost = || Message::Revoked(u64::MAX, false);
    assert!(!handoff.is_asked() && handoff.gives_doorbell_back(), "the shard thread has not slept yet");
    // A thread that is about to sleep is rung for as always.
    sleeps(handoff, Duration::ZERO);
    let soon = Instant::now() + Duration::from_secs(3600);
    handoff.shard().unwrap().as_mut().unwrap().asleep = Some((soon, Instant::now()));
    tell(lost());
    assert!(!handoff.is_asked());
    assert_eq!(handoff.serve_for_shard_thread(), Service::Done { gave: false });

    sleeps(handoff, FALLING_ASLEEP * 2);
    assert!(!handoff.is_asked() && handoff.minds.load(Ordering::Relaxed));
    tell(lost());
    assert!(handoff.is_asked(), "nobody rang");
    assert_eq!(handoff.serve_for_shard_thread(), Service::Done { gave: false });
    assert!(!handoff.is_asked() && handoff.gives_doorbell_back());
    assert!(!handoff.minds.load(Ordering::Relaxed));

    // A message between the last check and the sleep is not missed.
    assert!(!handoff.is_asked());
    tell(lost());
    assert!(!handoff.gives_doorbell_back() && handoff.minds.load(Ordering::Relaxed), "it is not given back");
    assert!(!handoff.gives_doorbell_back(), "nor the next time");
    assert_eq!(handoff.serve_for_shard_thread(), Service::Done { gave: false });
    assert!(handoff.gives_doorbell_back(), "it is given back once");
    assert!(!handoff.doorbell.falls_asleep(|| false), "and rings for the shard thread");

    // The thread that holds the core checks the doorbell itself.
    let held = handoff.shard().unwrap();
    tell(lost());
    assert!(!handoff.is_asked() && handoff.gives_doorbell_back());
    drop(held);
    assert_eq!(handoff.serve_for_shard_thread(), Service::Done { gave: false });
}

#[test]
fn what_is_the_shard_threads_own_wakes_it_whoever_minds_the_doorbell() {
    let scene = Scene::new();
    let handoff = &scene.handoff;
    sleeps(handoff, FALLING_ASLEEP * 2);
    assert!(!handoff.is_asked());
    scene.node.as_ref().unwrap().tell(Message::Stop);
    assert!(handoff.is_asked());
    assert_eq!(handoff.serve_for_shard_thread(), Service::Left);
    assert!(handoff.shard().unwrap().as_ref().unwrap().asleep.is_none(), "it was woken");
    assert!(!handoff.is_asked(), "and it is for that one to do");
    handoff.serve().unwrap();
}

#[test]
fn client_cannot_have_requests_for_data_wait_where_no_thread_polls_for_them() {
    let scene = Scene::new();
    let handoff = &scene.handoff;
    handoff.shard().unwrap().as_mut().unwrap().thread.network = None;
    handoff.doorbell.minds_data();
    sleeps(handoff, Duration::ZERO);
    let words = Mapping::new(scene.doorbell.as_fd(), 4096, true).unwrap();
    let sleeping = words.word32(0).load(Ordering::SeqCst);
    handoff.doorbell.ring_for_data();
    assert_ne!(words.word32(0).load(Ordering::SeqCst), sleeping, "it rings");
}
