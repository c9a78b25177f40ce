//! A node during cross-node transactions: the daemon's own code without threads, over a simulated network. The test
//! plays the other nodes, which answer when it decides, or never.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_data::{Media, Target};
use forebay_fabric::simulated::{Faults, Network};
use forebay_fabric::{CallEvent, CallId, Calls, CallsSettings, Identity, Ticket};
use forebay_ring::{memfd_sealed, Board, Claim, Doorbell, Lookup, Mapping, Removal, Ring, Seal};
use forebay_server::stepped::{session_of, Keeper, Moment, Node, Setup};
use forebay_server::FLIGHT_RECORDER_BYTES;
use forebay_types::limits::{
    BUFFERS_QUARANTINED_MAX, BUFFER_BYTES, FILE_BYTES_MAX, LEASE_MS, LOCKS_OF_UNREACHED_MS, NODE_TIMEOUT_MS,
    QUARANTINE_MS, SESSIONS_PERIOD_MS,
};
use forebay_types::{
    Answer, Attr, BackingId, BackingOp, Caller, Change, Code, Entry, Error, Ino, Kind, Layout, LockKind,
    LockRequest, Move, MoveKind, NodeId, Part, Parts, Refusal, Reply, Request, SetAttr, StoreObject,
    StoreVersion, Timestamp, TxId, Writer,
};
use forebay_wire::{Message, Secret, Stamp};

const NODE: NodeId = NodeId(1);
const CALLER: Caller = Caller { uid: 7, gid: 8 };
/// The bit that marks a daemon's own session.
const DAEMON: u64 = 1 << 47;

/// The clock of this process, in nanoseconds. It is not reset between tests.
static NOW_NS: AtomicU64 = AtomicU64::new(0);
/// Tests run one at a time, because they share the clock.
static TURN: Mutex<()> = Mutex::new(());

struct Clock;

impl forebay_ring::Waiter for Clock {
    fn now_ns(&self) -> u64 {
        NOW_NS.load(Ordering::Relaxed)
    }

    fn sleep(&self, _: &AtomicU32, _: u32, _: u64) {
        panic!("nobody here sleeps");
    }
}

fn timestamp() -> Timestamp {
    let ns = NOW_NS.load(Ordering::Relaxed);
    Timestamp { sec: 1_000_000 + (ns / 1_000_000_000) as i64, nsec: (ns % 1_000_000_000) as u32 }
}

fn secret() -> Secret {
    Secret::new(&(0..32).collect::<Vec<u8>>()).unwrap()
}

fn address(node: NodeId) -> Vec<u8> {
    format!("simulated:{node}").into_bytes()
}

/// Another node, played by the test.
struct Peer {
    calls: Calls,
    /// Requests that it has received and not answered.
    asked: Vec<(Ticket, Vec<u8>)>,
    /// Unanswered requests to transfer data.
    moves: Vec<Ticket>,
    answers: HashMap<CallId, Result<Vec<u8>, Code>>,
}

impl Peer {
    fn start(network: &Network, number: u16, seed: u64) -> Peer {
        Peer::with_data(
            network,
            number,
            NodeId(number),
            CallsSettings { seed: Some(seed), ..CallsSettings::default() },
        )
    }

    /// A node at the address of node `place`.
    fn with_data(network: &Network, place: u16, node: NodeId, settings: CallsSettings) -> Peer {
        let endpoint = network.endpoint(place.into());
        let identity = Identity { pool: secret().pool(), node, capacity_bytes: 0 };
        let mut calls = Calls::new(Box::new(endpoint), identity, secret(), settings);
        calls.add_node(NODE, &address(NODE)).unwrap();
        Peer { calls, asked: Vec::new(), moves: Vec::new(), answers: HashMap::new() }
    }
}

/// The resources that outlive the node's worker.
struct Held {
    target: OwnedFd,
    recorder: OwnedFd,
    doorbell: OwnedFd,
    keeper: Keeper,
    rings: Vec<(u64, OwnedFd)>,
}

struct Scene {
    network: Network,
    node: Option<Node>,
    peers: BTreeMap<u16, Peer>,
    held: Held,
    /// The node's FUSE connection, to which it writes notifications.
    kernel: Option<OwnedFd>,
    /// True while the shard thread does nothing.
    shard_waits: bool,
    starts: u64,
    begun_ns: u64,
    dir: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.node = None;
        // Leases of this test have expired in the next one.
        NOW_NS.fetch_add(1_000_000_000_000, Ordering::Relaxed);
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Scene {
    fn new(name: &str) -> Scene {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        forebay_ring::simulate(Box::new(Clock));
        let shared = Path::new("/dev/shm");
        let parent = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
        let dir = parent.join(format!("forebay-steps-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(dir.join("shard")).unwrap();
        let target: OwnedFd = std::fs::File::open(&dir).unwrap().into();
        Target::format(&target).unwrap();
        let (recorder, _) = memfd_sealed(c"recorder", FLIGHT_RECORDER_BYTES as usize, Seal::Size).unwrap();
        let (doorbell, _) = Doorbell::create().unwrap();
        let network = Network::new(1, Faults::NONE);
        let peers = [2, 3].map(|number| (number, Peer::start(&network, number, number.into())));
        let mut scene = Scene {
            network,
            node: None,
            peers: peers.into(),
            held: Held { target, recorder, doorbell, keeper: Keeper::default(), rings: Vec::new() },
            kernel: None,
            shard_waits: false,
            starts: 0,
            begun_ns: NOW_NS.load(Ordering::Relaxed),
            dir,
            _turn: turn,
        };
        scene.start();
        scene
    }

    fn start(&mut self) {
        self.starts += 1;
        let node = Node::start(Setup {
            node: NODE,
            others: self.peers.keys().map(|n| (NodeId(*n), address(NodeId(*n)))).collect(),
            without_target: Vec::new(),
            endpoint: Box::new(self.network.endpoint(NODE.0.into())),
            calls: CallsSettings { seed: Some(100 + self.starts), ..CallsSettings::default() },
            secret: secret(),
            target: self.held.target.as_fd(),
            shard_bytes: 16 << 20,
            flight_recorder: self.held.recorder.as_fd(),
            doorbell: self.held.doorbell.as_fd(),
            keeper: Some(&mut self.held.keeper),
            rings: self.held.rings.iter().map(|(id, ring)| (*id, ring.try_clone().unwrap())).collect(),
            epoch: self.starts,
            clock: timestamp,
            planted: None,
            kernel: self.kernel.as_ref().map(|kernel| kernel.try_clone().unwrap()),
        });
        self.node = Some(node.unwrap());
    }

    /// Ends the node's worker like SIGKILL, and starts the next one.
    fn crash(&mut self) {
        self.node = None;
        self.network.kill(NODE.0.into());
        self.start();
    }

    /// Node 2 returns without its data, under another number, and meets the node.
    fn replace_2(&mut self) {
        const NEW: u16 = 5000;
        self.network.kill(2);
        self.peers.remove(&2);
        let settings = CallsSettings { seed: Some(7), data: Some(8), ..CallsSettings::default() };
        self.peers.insert(NEW, Peer::with_data(&self.network, 2, NodeId(NEW), settings));
        self.ask_and_wait(NEW, DAEMON | 1, 1, &Request::RenewLease);
    }

    fn turn(&mut self) {
        self.network.turn();
        NOW_NS.store(self.begun_ns + self.network.now().as_nanos() as u64, Ordering::Relaxed);
        let node = self.node.as_mut().expect("started");
        node.communicate();
        if !self.shard_waits {
            node.serve().unwrap();
        }
        while node.serve_data(|_| 0) {}
        while node.sweep() {}
        for peer in self.peers.values_mut() {
            peer.calls.progress();
            while let Some(event) = peer.calls.next_event() {
                match event {
                    CallEvent::Asked { ticket, body } => match body.message() {
                        Message::ReadStripe { .. } => peer.moves.push(ticket),
                        _ => peer.asked.push((ticket, body.bytes().to_vec())),
                    },
                    CallEvent::Answered { call, outcome, .. } => {
                        let outcome = outcome.map(|body| body.bytes().to_vec()).map_err(|f| f.code);
                        peer.answers.insert(call, outcome);
                    }
                    _ => {}
                }
            }
        }
    }

    /// Runs the work that the node does when it has no requests.
    fn rest(&mut self) {
        while self.node.as_mut().unwrap().rest().unwrap() {}
    }

    fn pass(&mut self, time: Duration) {
        let end = self.network.now() + time;
        while self.network.now() < end {
            self.turn();
        }
    }

    /// Sends a request of a process of a peer, or with [`DAEMON`] of its daemon.
    fn ask(&mut self, peer: u16, session: u64, sequence: u64, request: &Request<'_>) -> CallId {
        let stamp = Stamp { session: session_of(NodeId(peer), session), slot: 0, sequence };
        let deadline = self.network.now() + Duration::from_secs(60);
        let peer = self.peers.get_mut(&peer).unwrap();
        peer.calls.call(NODE, stamp, &Message::Ask(CALLER, *request), deadline).unwrap()
    }

    fn has_answer(&self, peer: u16, call: CallId) -> bool {
        self.peers[&peer].answers.contains_key(&call)
    }

    /// Waits for the answer to a call.
    fn answer(&mut self, peer: u16, call: CallId) -> Result<Vec<u8>, Code> {
        let end = self.network.now() + Duration::from_secs(40);
        loop {
            if let Some(answer) = self.peers.get_mut(&peer).unwrap().answers.remove(&call) {
                return answer.and_then(|bytes| Reply::decode(&bytes).map(|_| bytes.clone()));
            }
            assert!(self.network.now() < end, "no answer");
            self.turn();
        }
    }

    fn ask_and_wait(&mut self, peer: u16, session: u64, sequence: u64, request: &Request<'_>) -> Vec<u8> {
        let call = self.ask(peer, session, sequence, request);
        self.answer(peer, call).unwrap_or_else(|code| panic!("{request:?}: {code}"))
    }

    /// Waits until a peer receives a request for which `is_it` is true; returns its ticket.
    fn asked(&mut self, peer: u16, is_it: impl Fn(&Request<'_>) -> bool) -> Ticket {
        let end = self.network.now() + Duration::from_secs(20);
        loop {
            let asked = &mut self.peers.get_mut(&peer).unwrap().asked;
            let found = asked.iter().position(|(_, m)| is_it(&Request::decode(m).unwrap().1));
            if let Some(i) = found {
                return asked.remove(i).0;
            }
            assert!(self.network.now() < end, "it is not asked");
            self.turn();
        }
    }

    /// Waits until a peer receives a request to transfer data; returns its ticket.
    fn asked_move(&mut self, peer: u16) -> Ticket {
        let end = self.network.now() + Duration::from_secs(20);
        loop {
            if let Some(ticket) = self.peers.get_mut(&peer).unwrap().moves.pop() {
                return ticket;
            }
            assert!(self.network.now() < end, "it is not asked");
            self.turn();
        }
    }

    /// Attaches a process of the node; returns its ring and its session.
    fn process(&mut self, number: u64) -> (Ring, u64) {
        let session = session_of(NODE, number);
        let fd = self.node.as_mut().unwrap().attach(session).unwrap();
        let ring = Ring::open(fd.as_fd(), self.held.doorbell.as_fd()).unwrap();
        self.held.rings.push((session, fd));
        (ring, session)
    }

    /// The board as a process sees it.
    fn board(&self) -> Board {
        let node = self.node.as_ref().unwrap();
        let bytes = node.attach_reply(0, 0).board_bytes as usize;
        Board::open(Mapping::new(node.board(), bytes, false).unwrap()).unwrap()
    }

    fn give_buffer(&self, session: u64, number: u64) -> Mapping {
        let memory = self.node.as_ref().unwrap().buffers().give(session, number).unwrap();
        Mapping::new(memory.as_fd(), BUFFER_BYTES, true).unwrap()
    }

    /// Waits until a process's request is answered.
    fn take_any(&mut self, claim: &Claim<'_>) {
        let end = self.network.now() + Duration::from_secs(40);
        while !claim.is_answered() {
            assert!(self.network.now() < end, "no answer");
            self.turn();
        }
    }

    /// Waits for the answer to a process's request.
    fn take(&mut self, claim: Claim<'_>) -> Result<u64, Code> {
        self.take_any(&claim);
        let reply = claim.finish(&mut [0; 64], &|| true, |reply, _| match Reply::decode(reply)? {
            Reply::Count(n) => Ok(n),
            _ => Err(Code::Malformed),
        });
        reply.unwrap()
    }

    fn reply(&mut self, peer: u16, ticket: Ticket, reply: Reply<'_>) {
        self.tell(peer, ticket, Ok(reply));
    }

    fn tell(&mut self, peer: u16, ticket: Ticket, answer: Answer<'_>) {
        self.peers.get_mut(&peer).unwrap().calls.answer(&ticket, &Message::Answer(answer)).unwrap();
    }

    /// Makes a directory on the node for a peer's process; returns its inode number.
    fn make_directory(&mut self, parent: Ino, name: &[u8]) -> Ino {
        let reply = self.ask_and_wait(
            3,
            9,
            self.network.events(),
            &Request::MakeDirectory { parent, name, mode: 0o755 },
        );
        match Reply::decode(&reply) {
            Ok(Reply::Entry(entry)) => entry.attr.ino,
            other => panic!("{other:?}"),
        }
    }

    /// Gives node 3 a lease from the node.
    fn lease_to_3(&mut self) {
        let reply = self.ask_and_wait(3, 0, self.network.events(), &Request::RenewLease);
        assert!(matches!(Reply::decode(&reply), Ok(Reply::Count(_))));
    }
}

/// A directory of node 2 whose group new entries inherit.
fn parent_of_2(ino: Ino) -> Entry {
    let (time, home) = (Timestamp::default(), NodeId(2));
    let attr = Attr {
        ino,
        size: 0,
        rdev: 0,
        parent: Ino::ROOT,
        mode: 0o042_775,
        uid: 1,
        gid: 77,
        nlink: 2,
        flags: 0,
        home,
        width_log2: 0,
        atime: time,
        mtime: time,
        ctime: time,
        btime: time,
    };
    Entry { attr, layout: Layout::single(home, 0) }
}

fn leave(tx: TxId, name: &[u8], ino: Ino) -> Request<'_> {
    Request::Prepare { tx, index: 0, part: Part::Leave { parent: Ino::ROOT, name, ino, link: TxId::NONE } }
}

const SOON: Duration = Duration::from_millis(800);

#[test]
fn retry_of_a_decided_change_is_answered_when_the_other_node_knows_of_it() {
    let mut s = Scene::new("retry");
    let theirs = Ino::new(NodeId(2), 77);
    let make = Request::MakeDirectoryAt { node: NODE, parent: theirs, name: b"d", mode: 0o755 };
    let call = s.ask(2, 5, 1, &make);
    let ticket = s.asked(2, |r| matches!(r, Request::Prepare { part: Part::Enter { .. }, .. }));
    s.reply(2, ticket, Reply::Entry(parent_of_2(theirs)));
    let finish = |r: &Request<'_>| matches!(r, Request::Finish { commit: true, .. });
    s.asked(2, finish);
    assert!(!s.has_answer(2, call), "it is decided, and node 2 has not acknowledged it");
    s.crash();
    // The node retries the call with the same stamp.
    let ticket = s.asked(2, finish);
    s.pass(Duration::from_secs(4));
    assert!(!s.has_answer(2, call), "node 2 still has not");
    s.reply(2, ticket, Reply::Done);
    let reply = s.answer(2, call).unwrap();
    let Ok(Reply::Entry(entry)) = Reply::decode(&reply) else { panic!("{reply:?}") };
    assert_eq!((entry.attr.mode, entry.attr.gid), (0o042_755, 77), "after its parent");
    let reply = s.ask_and_wait(2, 5, 2, &Request::GetAttr { ino: entry.attr.ino });
    let Ok(Reply::Entry(kept)) = Reply::decode(&reply) else { panic!("{reply:?}") };
    assert_eq!((kept.attr.mode, kept.attr.gid), (0o042_755, 77), "and so the shard has it");
}

#[test]
fn part_that_is_prepared_has_recalled_the_name_that_it_holds() {
    let mut s = Scene::new("prepared");
    let d = s.make_directory(Ino::ROOT, b"d");
    s.lease_to_3();
    s.ask_and_wait(3, 4, 1, &Request::Lookup { parent: Ino::ROOT, name: b"d" });
    let tx = TxId::new(NodeId(2), 1);
    let call = s.ask(2, DAEMON | 1, 1, &leave(tx, b"d", d));
    let ticket =
        s.asked(3, |r| matches!(r, Request::RevokeName { parent: Ino::ROOT, name } if *name == b"d"));
    s.pass(SOON);
    assert!(!s.has_answer(2, call), "node 3 may still walk by the name");
    s.reply(3, ticket, Reply::Done);
    s.answer(2, call).unwrap();
    // Without an answer the part is prepared when the lease has expired.
    let e = s.make_directory(Ino::ROOT, b"e");
    s.lease_to_3();
    s.ask_and_wait(3, 4, 2, &Request::Lookup { parent: Ino::ROOT, name: b"e" });
    let begun = s.network.now();
    let call = s.ask(2, DAEMON | 1, 2, &leave(TxId::new(NodeId(2), 2), b"e", e));
    s.answer(2, call).unwrap();
    let took = (s.network.now() - begun).as_millis() as u64;
    assert!((LEASE_MS - 500..LEASE_MS + 1000).contains(&took), "{took} ms");
}

#[test]
fn change_that_is_finished_twice_is_acknowledged_when_its_recalls_are_over() {
    let mut s = Scene::new("twice");
    let d = s.make_directory(Ino::ROOT, b"d");
    let tx = TxId::new(NodeId(2), 1);
    s.ask_and_wait(2, DAEMON | 1, 1, &leave(tx, b"d", d));
    s.ask_and_wait(2, DAEMON | 1, 2, &Request::Prepare { tx, index: 1, part: Part::Condemn { ino: d } });
    s.lease_to_3();
    s.ask_and_wait(3, 4, 1, &Request::GetAttr { ino: d });
    let finish = Request::Finish { tx, commit: true };
    let first = s.ask(2, DAEMON | 1, 3, &finish);
    let ticket = s.asked(3, |r| matches!(r, Request::RevokeDirectory { ino } if *ino == d));
    // The coordinator has restarted, and does not know that it sent the decision before.
    let second = s.ask(2, DAEMON | 2, 1, &finish);
    s.pass(SOON);
    assert!(!s.has_answer(2, first) && !s.has_answer(2, second), "node 3 may still believe in it");
    s.reply(3, ticket, Reply::Done);
    s.answer(2, second).unwrap();
}

#[test]
fn number_in_reserve_for_another_nodes_process_outlives_a_crash() {
    let mut s = Scene::new("reserve");
    let create = |name, number, reserve| Request::Create {
        parent: Ino::ROOT,
        name,
        mode: 0o644,
        exclusive: true,
        dirty: true,
        layout: None,
        number,
        reserve,
    };
    let reply = s.ask_and_wait(2, 5, 1, &create(b"a", None, true));
    let Ok(Reply::Created { next: Some(next), .. }) = Reply::decode(&reply) else { panic!("{reply:?}") };
    s.crash();
    let reply = s.ask_and_wait(2, 5, 2, &create(b"b", Some(next), false));
    let Ok(Reply::Created { entry, .. }) = Reply::decode(&reply) else { panic!("{reply:?}") };
    assert_eq!(entry.attr.ino, next);
    let other = s.ask(2, 6, 1, &create(b"c", Some(next), false));
    assert_eq!(s.answer(2, other), Err(Code::Stale), "a number that is in reserve for nobody");
}

/// The node's backing files.
fn backing_files(s: &Scene) -> Vec<Ino> {
    let target = Target::open(s.held.target.as_fd(), 1 << 16).unwrap();
    let mut all = Vec::new();
    let each = &mut |ino, _, _| {
        all.push(ino);
        Ok(())
    };
    target.for_each(each).unwrap();
    all
}

/// Posts a request on the first free slot.
fn post<'r>(ring: &'r Ring, request: &Request<'_>) -> Claim<'r> {
    let mut message = [0; 512];
    let n = request.encode(CALLER, &mut message).unwrap();
    let claim = ring.try_claim().unwrap();
    assert_eq!(claim.post(&message[..n]), None);
    claim
}

/// As [`post`], for a process that may owe a late removal, which is returned.
fn post_owing<'r>(ring: &'r Ring, request: &Request<'_>) -> (Claim<'r>, Option<Removal>) {
    let mut message = [0; 512];
    let n = request.encode(CALLER, &mut message).unwrap();
    let claim = ring.try_claim().unwrap();
    let owed = claim.post(&message[..n]);
    (claim, owed)
}

/// Creates a file in the root and its backing file, as a process of the node does.
fn make_file(s: &mut Scene, ring: &Ring, name: &[u8]) -> Ino {
    let layout = Some(Layout::single(NODE, 0));
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
    let claim = post(ring, &request);
    s.take_any(&claim);
    let made = claim.finish(&mut [0; 512], &|| true, |reply, _| match Reply::decode(reply) {
        Ok(Reply::Created { entry, .. }) => entry.attr.ino,
        other => panic!("{other:?}"),
    });
    let ino = made.unwrap();
    Target::open(s.held.target.as_fd(), 1 << 16).unwrap().create(ino, 0, 0).unwrap();
    ino
}

/// Takes the reply of a removal. The client unlinks the backing file during its next request.
fn owe_removal(s: &mut Scene, claim: Claim<'_>, ino: Ino) {
    s.take_any(&claim);
    let removed = claim.finish(&mut [0; 512], &|| true, |reply, claim| match Reply::decode(reply) {
        Ok(Reply::Removed { ino: gone, last: true, .. }) if gone == ino => {
            claim.owe(Removal { ino, target: 0 });
        }
        other => panic!("{other:?}"),
    });
    removed.unwrap();
}

fn unlink_backing(s: &Scene, ino: Ino) {
    let target = Target::open(s.held.target.as_fd(), 1 << 16).unwrap();
    target.remove_all(ino, &Layout::single(NODE, 0)).unwrap();
}

/// Checks that `fsck` finds nothing: each backing file without an inode has a record.
fn is_clean(s: &mut Scene, what: &str) {
    let report = s.node.as_mut().unwrap().check().unwrap();
    assert_eq!(report["clean"], true, "{what}: {report}");
}

/// Checks that no backing file is left, and no record of one.
fn is_swept(s: &mut Scene, what: &str) {
    assert_eq!(backing_files(s), [], "{what}");
    let report = s.node.as_mut().unwrap().check().unwrap();
    assert!(report["clean"] == true && report["orphans"] == 0, "{what}: {report}");
}

const UNLINK_A: Request<'static> = Request::Unlink { parent: Ino::ROOT, name: b"a" };
const UNLINK_B: Request<'static> = Request::Unlink { parent: Ino::ROOT, name: b"b" };

/// A client has removed a file, and unlinks its backing file while its next removal is served. The client is killed
/// before or after that, the worker at each moment of it, or both.
#[test]
fn backing_file_unlinked_late_is_found_wherever_client_and_worker_are_killed() {
    let moments =
        [Moment::Journaled, Moment::Published, Moment::Answered, Moment::Committing, Moment::Committed];
    for moment in [None].into_iter().chain(moments.map(Some)) {
        for (unlinks, lives) in [(false, false), (true, false), (false, true), (true, true)] {
            // A client that is not killed unlinks the file in the end.
            let what = format!("killed at {moment:?}, unlinked before {unlinks}, the client lives {lives}");
            let mut s = Scene::new(&format!("late-{moment:?}-{unlinks}-{lives}"));
            let (ring, session) = s.process(5);
            let (a, b) = (make_file(&mut s, &ring, b"a"), make_file(&mut s, &ring, b"b"));
            let (claim, owed) = post_owing(&ring, &UNLINK_A);
            assert_eq!(owed, None);
            owe_removal(&mut s, claim, a);
            is_clean(&mut s, &what);
            let (claim, owed) = post_owing(&ring, &UNLINK_B);
            assert_eq!(owed, Some(Removal { ino: a, target: 0 }), "{what}");
            if unlinks {
                unlink_backing(&s, a);
            }
            match moment {
                Some(moment) => {
                    let node = s.node.as_mut().unwrap();
                    node.watch(Box::new(move |at| match at == moment {
                        true => Err(Error::new(Code::Io, "killed")),
                        false => Ok(()),
                    }));
                    // `rest` commits the transaction.
                    assert!(node.serve().and_then(|_| node.rest()).is_err(), "{what}: it is not killed");
                    s.crash();
                }
                None => {
                    s.node.as_mut().unwrap().serve().unwrap();
                }
            }
            // The restart has deleted records of files that count as unlinked.
            is_clean(&mut s, &what);
            if lives {
                unlink_backing(&s, a);
                owe_removal(&mut s, claim, b);
                let (claim, owed) = post_owing(&ring, &Request::Ping);
                assert_eq!(owed, Some(Removal { ino: b, target: 0 }), "{what}");
                s.take_any(&claim);
                is_clean(&mut s, &what);
                unlink_backing(&s, b);
                claim.finish(&mut [0; 512], &|| true, |_, _| ()).unwrap();
                let claim = post(&ring, &Request::Ping);
                s.take_any(&claim);
                claim.finish(&mut [0; 512], &|| true, |_, _| ()).unwrap();
            } else {
                s.node.as_mut().unwrap().end(session);
                s.held.rings.clear();
                s.pass(SOON);
            }
            is_swept(&mut s, &what);
        }
    }
}

#[test]
fn backing_file_unlinked_late_is_swept_when_the_daemon_rests_and_while_other_slots_keep_it_busy() {
    let mut s = Scene::new("late-rest");
    let ((ring, _), (other, _)) = (s.process(5), s.process(6));
    let (a, b) = (make_file(&mut s, &ring, b"a"), make_file(&mut s, &ring, b"b"));
    let (claim, _) = post_owing(&ring, &UNLINK_A);
    owe_removal(&mut s, claim, a);
    s.pass(SOON);
    assert_eq!(backing_files(&s).len(), 2, "its client may be about to unlink it");
    s.rest();
    s.pass(SOON);
    assert_eq!(backing_files(&s), [b]);
    // The client still unlinks the file, while it removes the next one.
    let (claim, owed) = post_owing(&ring, &UNLINK_B);
    assert_eq!(owed, Some(Removal { ino: a, target: 0 }));
    owe_removal(&mut s, claim, b);
    for _ in 0..600 {
        let claim = post(&other, &Request::Ping);
        s.take_any(&claim);
        claim.finish(&mut [0; 512], &|| true, |_, _| ()).unwrap();
    }
    is_swept(&mut s, "a slot at rest");
}

#[test]
fn free_space_is_told_behind_late_removals_alone_and_not_for_ever_behind_the_sweeper() {
    let mut s = Scene::new("late-space");
    let ((ring, _), (other, _)) = (s.process(5), s.process(6));
    let (a, b) = (make_file(&mut s, &ring, b"a"), make_file(&mut s, &ring, b"b"));
    let (claim, _) = post_owing(&ring, &UNLINK_A);
    owe_removal(&mut s, claim, a);
    let asks = post(&other, &Request::Targets);
    let serve = |s: &mut Scene| while s.node.as_mut().unwrap().serve().unwrap() {};
    serve(&mut s);
    assert!(!asks.is_answered() && backing_files(&s).len() == 2, "the sweeper has not been there");
    // Another late removal meanwhile does not prolong the wait.
    let (claim, _) = post_owing(&ring, &UNLINK_B);
    serve(&mut s);
    assert!(claim.is_answered());
    claim.finish(&mut [0; 512], &|| true, |_, claim| claim.owe(Removal { ino: b, target: 0 })).unwrap();
    assert!(!asks.is_answered());
    while s.node.as_mut().unwrap().sweep() {}
    assert_eq!(backing_files(&s), [b]);
    serve(&mut s);
    assert!(asks.is_answered());
    let told = |claim: Claim<'_>| {
        claim.finish(&mut [0; 4096], &|| true, |reply, _| {
            assert!(matches!(Reply::decode(reply), Ok(Reply::Targets { .. })));
        })
    };
    told(asks).unwrap();
    // The sweeper is busy: the wait ends after some seconds.
    let asks = post(&other, &Request::Targets);
    serve(&mut s);
    assert!(!asks.is_answered());
    NOW_NS.fetch_add(6_000_000_000, Ordering::Relaxed);
    serve(&mut s);
    assert!(asks.is_answered() && backing_files(&s) == [b]);
    told(asks).unwrap();
}

#[test]
fn other_nodes_do_not_wait_for_late_removals() {
    let mut s = Scene::new("late-peer");
    let (ring, _) = s.process(5);
    let a = make_file(&mut s, &ring, b"a");
    let (claim, _) = post_owing(&ring, &UNLINK_A);
    owe_removal(&mut s, claim, a);
    let told = s.ask_and_wait(2, DAEMON, 1, &Request::Targets);
    assert!(matches!(Reply::decode(&told), Ok(Reply::Targets { .. })));
    assert_eq!(backing_files(&s), [a], "its client may be about to unlink it");
}

fn create_in(parent: Ino, layout: Layout) -> Request<'static> {
    Request::Create {
        parent,
        name: b"f",
        mode: 0o644,
        exclusive: true,
        dirty: true,
        layout: Some(layout),
        number: None,
        reserve: false,
    }
}

fn removes(ino: Ino) -> impl Fn(&Request<'_>) -> bool {
    move |r| matches!(r, Request::RemoveBackings { ids } if BackingId::listed(ids).any(|id| id.ino == ino))
}

/// A process has created a file of another node, or the reply is still on its way, and has not made the backing file
/// yet, when the file is removed on its node. Whenever the worker of the process's node dies, the backing file that the
/// process makes then is removed after the process's next request.
#[test]
fn backing_file_of_another_nodes_file_that_is_gone_is_removed_whichever_worker_its_maker_outlives() {
    let places = [(false, false, false), (false, true, false), (false, false, true), (false, true, true)];
    for (early, before, behind) in places.into_iter().chain([(true, false, false), (true, false, true)]) {
        let name = format!("unborn-{early}-{before}-{behind}");
        let mut s = Scene::new(&name);
        let (ring, _) = s.process(5);
        let (parent, ino) = (Ino::new(NodeId(2), 77), Ino::new(NodeId(2), 99));
        let ids = BackingId::list(&[BackingId { target: 1 << 16, ino, number: 0, stripe: 0 }]);
        let remove = |s: &mut Scene| {
            let reply = s.ask_and_wait(2, DAEMON | 1, 1, &Request::RemoveBackings { ids: &ids });
            assert!(matches!(Reply::decode(&reply), Ok(Reply::Bytes([1]))), "{name}: node 2 forgets it");
        };
        let claim = post(&ring, &create_in(parent, Layout::unless_set(1 << 16)));
        let ticket = s.asked(2, |r| matches!(r, Request::Create { .. }));
        let mut entry = parent_of_2(ino);
        entry.attr.mode = 0o100_644;
        entry.layout = Layout::single(NODE, 0);
        if early {
            remove(&mut s);
        }
        s.reply(2, ticket, Reply::Created { entry, created: true, next: None });
        s.take_any(&claim);
        if before {
            s.crash();
        }
        if !early {
            remove(&mut s);
        }
        if behind {
            s.crash();
        }
        Target::open(s.held.target.as_fd(), 1 << 16).unwrap().create(ino, 0, 0).unwrap();
        s.pass(SOON);
        assert_eq!(backing_files(&s), [ino], "{name}: its maker may be about to open it");
        claim.finish(&mut [0; 512], &|| true, |_, _| ()).unwrap();
        let claim = post(&ring, &Request::Ping);
        s.take_any(&claim);
        claim.finish(&mut [0; 512], &|| true, |_, _| ()).unwrap();
        s.pass(SOON);
        assert_eq!(backing_files(&s), [], "{name}");
        let report = s.node.as_mut().unwrap().check().unwrap();
        assert!(report["clean"] == true && report["orphans"] == 0, "{name}: {report}");
    }
}

#[test]
fn backing_file_that_was_removed_is_not_made_by_a_request_that_comes_late_to_the_next_worker() {
    let mut s = Scene::new("late-make");
    let id = BackingId { target: 1 << 16, ino: Ino::new(NodeId(2), 99), number: 1, stripe: 3 };
    let make = Request::Backing { id, op: BackingOp::Make };
    s.ask_and_wait(3, 5, 1, &make);
    assert_eq!(backing_files(&s), [id.ino]);
    s.ask_and_wait(2, DAEMON | 1, 1, &Request::RemoveBackings { ids: &BackingId::list(&[id]) });
    for sequence in [1, 2] {
        s.crash();
        let call = s.ask(3, 5, sequence, &make);
        assert_eq!(s.answer(3, call), Err(Code::NotFound));
    }
    assert_eq!(backing_files(&s), []);
}

/// A node that keeps replies for a process must keep them until the process's last request has arrived.
#[test]
fn process_that_is_gone_is_there_while_what_it_has_asked_of_another_node_is_under_way() {
    let mut s = Scene::new("ended");
    let (ring, session) = s.process(5);
    let claim = post(&ring, &Request::Unlink { parent: Ino::new(NodeId(2), 77), name: b"f" });
    let unlink = s.asked(2, |r| matches!(r, Request::Unlink { .. }));
    s.node.as_mut().unwrap().end(session);
    let words = session.to_le_bytes();
    let ask = |s: &mut Scene, sequence| {
        let reply = s.ask_and_wait(2, DAEMON | 1, sequence, &Request::AreThere { sessions: &words });
        match Reply::decode(&reply) {
            Ok(Reply::Bytes(there)) => there.to_vec(),
            other => panic!("{other:?}"),
        }
    };
    s.pass(SOON);
    assert_eq!(ask(&mut s, 1), [1], "its request may come again");
    s.reply(2, unlink, Reply::Done);
    s.asked(2, |r| matches!(r, Request::EndSession { .. }));
    assert_eq!(ask(&mut s, 2), [0]);
    drop(claim);
}

/// A message that was sent twice because its answer took long arrives after the message that its process has ended.
#[test]
fn change_of_a_process_that_is_over_is_not_made_again_by_a_message_that_comes_late() {
    let mut s = Scene::new("late");
    let make = Request::MakeDirectory { parent: Ino::ROOT, name: b"d", mode: 0o755 };
    s.ask_and_wait(2, 5, 1, &make);
    s.ask_and_wait(3, 5, 1, &Request::RemoveDirectory { parent: Ino::ROOT, name: b"d" });
    assert!(s.node.as_mut().unwrap().kept_sessions().unwrap().contains(&session_of(NodeId(2), 5)));
    s.ask_and_wait(2, DAEMON | 1, 1, &Request::EndSession { session: session_of(NodeId(2), 5) });
    let late = s.ask(2, 5, 1, &make);
    assert_eq!(s.answer(2, late), Err(Code::Stale));
    let look = s.ask(3, 5, 2, &Request::Lookup { parent: Ino::ROOT, name: b"d" });
    assert_eq!(s.answer(3, look), Err(Code::NotFound));
    assert!(!s.node.as_mut().unwrap().kept_sessions().unwrap().contains(&session_of(NodeId(2), 5)));
    // Another process of the same node is served.
    s.ask_and_wait(2, 6, 1, &make);
}

#[test]
fn maker_that_is_told_again_of_a_file_that_is_gone_has_its_node_remove_the_backing_file_again() {
    let mut s = Scene::new("again");
    let create = create_in(Ino::ROOT, Layout::single(NodeId(2), 0));
    let made = s.ask_and_wait(2, 5, 1, &create);
    let Ok(Reply::Created { entry, .. }) = Reply::decode(&made) else { panic!("{made:?}") };
    let ino = entry.attr.ino;
    s.ask_and_wait(3, 5, 1, &Request::Unlink { parent: Ino::ROOT, name: b"f" });
    s.rest();
    let ticket = s.asked(2, removes(ino));
    s.reply(2, ticket, Reply::Bytes(&[1]));
    s.pass(SOON);
    // The creator's node restarts before it has the answer; then this node restarts after it.
    for crashes in [false, true] {
        assert_eq!(s.ask_and_wait(2, 5, 1, &create), made);
        if crashes {
            s.crash();
        }
        s.rest();
        let ticket = s.asked(2, removes(ino));
        s.reply(2, ticket, Reply::Bytes(&[1]));
        s.pass(SOON);
    }
    let report = s.node.as_mut().unwrap().check().unwrap();
    assert_eq!(report["orphans"], 0, "{report}");
}

#[test]
fn backing_file_on_another_node_of_a_file_that_was_removed_before_a_crash_is_removed() {
    let mut s = Scene::new("owed");
    let (ring, _) = s.process(5);
    let claim = post(&ring, &create_in(Ino::ROOT, Layout::single(NodeId(2), 0)));
    s.take_any(&claim);
    let ino = claim.finish(&mut [0; 512], &|| true, |reply, _| match Reply::decode(reply) {
        Ok(Reply::Created { entry, .. }) => entry.attr.ino,
        other => panic!("{other:?}"),
    });
    let claim = post(&ring, &Request::Unlink { parent: Ino::ROOT, name: b"f" });
    s.take_any(&claim);
    claim.finish(&mut [0; 512], &|| true, |_, _| ()).unwrap();
    s.crash();
    // The process unlinks only backing files of this node.
    let claim = post(&ring, &Request::Ping);
    s.take_any(&claim);
    claim.finish(&mut [0; 512], &|| true, |_, _| ()).unwrap();
    s.peers.get_mut(&2).unwrap().asked.clear();
    s.pass(Duration::from_secs(1));
    let ticket = s.asked(2, removes(ino.unwrap()));
    s.reply(2, ticket, Reply::Bytes(&[1]));
    s.pass(SOON);
    let report = s.node.as_mut().unwrap().check().unwrap();
    assert_eq!(report["orphans"], 0, "{report}");
}

#[test]
fn backing_file_on_a_node_whose_place_another_has_taken_counts_as_removed() {
    for asked in [true, false] {
        let mut s = Scene::new("retired");
        let (ring, _) = s.process(5);
        let claim = post(&ring, &create_in(Ino::ROOT, Layout::single(NodeId(2), 0)));
        s.take_any(&claim);
        claim.finish(&mut [0; 512], &|| true, |_, _| ()).unwrap();
        if !asked {
            s.replace_2();
        }
        let claim = post(&ring, &Request::Unlink { parent: Ino::ROOT, name: b"f" });
        s.take_any(&claim);
        claim.finish(&mut [0; 512], &|| true, |_, _| ()).unwrap();
        let claim = post(&ring, &Request::Ping);
        s.take_any(&claim);
        claim.finish(&mut [0; 512], &|| true, |_, _| ()).unwrap();
        s.pass(SOON);
        s.rest();
        if asked {
            s.asked(2, |r| matches!(r, Request::RemoveBackings { .. }));
            s.replace_2();
        }
        // A request in progress times out first, and is retried 10 s later.
        s.pass(Duration::from_millis(NODE_TIMEOUT_MS + 15_000));
        let report = s.node.as_mut().unwrap().check().unwrap();
        assert_eq!(report["orphans"], 0, "{asked}: {report}");
    }
}

#[test]
fn processes_of_a_node_whose_place_another_has_taken_are_gone() {
    let mut s = Scene::new("retired-processes");
    let make = Request::MakeDirectory { parent: Ino::ROOT, name: b"d", mode: 0o755 };
    s.ask_and_wait(2, 5, 1, &make);
    let kept = |s: &mut Scene| s.node.as_mut().unwrap().kept_sessions().unwrap();
    let session = session_of(NodeId(2), 5);
    assert!(kept(&mut s).contains(&session));
    s.replace_2();
    s.pass(Duration::from_millis(SESSIONS_PERIOD_MS + LOCKS_OF_UNREACHED_MS));
    assert!(!kept(&mut s).contains(&session));
}

/// Posts a read of another node's data through a data buffer.
fn post_read(ring: &Ring, node: u16, buffer: u64) -> Claim<'_> {
    let id =
        BackingId { target: u32::from(node) << 16, ino: Ino::new(NodeId(node), 5), number: 0, stripe: 0 };
    let op = BackingOp::Move(Move { kind: MoveKind::Read, offset: 0, bytes: 50_000, buffer, at: 0 });
    let mut message = [0; 256];
    let n = Request::Backing { id, op }.encode(CALLER, &mut message).unwrap();
    let claim = ring.try_claim().unwrap();
    assert_eq!(claim.post(&message[..n]), None);
    claim
}

#[test]
fn buffer_of_what_a_dead_worker_was_asked_is_used_no_more() {
    let mut s = Scene::new("late");
    let (ring, session) = s.process(5);
    s.give_buffer(session, 1);
    let (first, other) = (post_read(&ring, 2, 1), post_read(&ring, 3, 1));
    s.asked_move(2);
    let of_other = s.asked_move(3);
    // Transfers that the dead worker has begun may arrive late, after those of the next worker.
    s.network.kill(2);
    let next = Peer::start(&s.network, 2, 77);
    s.peers.insert(2, next);
    let ticket = s.asked_move(2);
    s.reply(2, ticket, Reply::Count(50_000));
    assert_eq!(s.take(first), Ok(50_000), "it is done all the same");
    s.reply(3, of_other, Reply::Count(7));
    assert_eq!(s.take(other), Ok(7));
    let again = post_read(&ring, 2, 1);
    assert_eq!(s.take(again), Err(Code::Fault), "its pieces may be written yet");
    s.give_buffer(session, 2);
    let (again, ticket) = (post_read(&ring, 2, 2), s.asked_move(2));
    s.reply(2, ticket, Reply::Count(1));
    assert_eq!(s.take(again), Ok(1));
    // A worker that only lost its link has the same incarnation.
    s.network.cut(1, 2, true);
    s.pass(Duration::from_secs(2));
    let claim = post_read(&ring, 2, 2);
    s.pass(Duration::from_secs(1));
    s.network.cut(1, 2, false);
    let ticket = s.asked_move(2);
    s.reply(2, ticket, Reply::Count(2));
    assert_eq!(s.take(claim), Ok(2));
    let claim = post_read(&ring, 2, 2);
    let ticket = s.asked_move(2);
    s.reply(2, ticket, Reply::Count(3));
    assert_eq!(s.take(claim), Ok(3));
}

#[test]
fn buffers_at_rest_are_bounded_and_give_their_memory_back() {
    let mut s = Scene::new("rest");
    let (ring, session) = s.process(5);
    // No request was sent to a node that is down, so no buffer is in doubt.
    s.network.kill(3);
    for number in 1..BUFFERS_QUARANTINED_MAX as u64 + 2 {
        s.give_buffer(session, number);
        let claim = post_read(&ring, 3, number);
        assert_eq!(s.take(claim), Err(Code::Io));
    }
    let mut last = None;
    for number in 1000..1000 + BUFFERS_QUARANTINED_MAX as u64 {
        let memory = s.give_buffer(session, number);
        memory.store(8192, b"what was in it");
        let claim = post_read(&ring, 2, number);
        let ticket = s.asked_move(2);
        let failed = Message::Answer(Err(Code::Interrupted.into()));
        s.peers.get_mut(&2).unwrap().calls.answer(&ticket, &failed).unwrap();
        assert_eq!(s.take(claim), Err(Code::Fault), "the network failed, and may write it yet");
        last = Some(memory);
    }
    s.give_buffer(session, 2000);
    let claim = post_read(&ring, 2, 2000);
    assert_eq!(s.take(claim), Err(Code::Fault), "there is no other for now");
    let resident = |memory: &Mapping| {
        let mut pages = [0; 4];
        memory.resident(0, &mut pages);
        pages.iter().any(|page| page & 1 != 0)
    };
    let last = last.unwrap();
    assert!(resident(&last), "its process may be looking at it");
    s.node.as_mut().unwrap().end(session);
    s.pass(SOON);
    assert!(!resident(&last), "nobody looks at it any more");
    // All buffers are released after the quarantine.
    s.pass(Duration::from_millis(QUARANTINE_MS));
    let (ring, session) = s.process(6);
    s.give_buffer(session, 1);
    let (claim, ticket) = (post_read(&ring, 2, 1), s.asked_move(2));
    s.reply(2, ticket, Reply::Count(1));
    assert_eq!(s.take(claim), Ok(1));
}

/// The FUSE notification that invalidates all cached names (fuse.h: FUSE_NOTIFY_INC_EPOCH).
const INC_EPOCH: i32 = 8;

/// How many of these notifications the kernel got.
fn epochs_moved(told: &mut std::fs::File) -> usize {
    use std::io::Read;
    let mut messages = [0; 4096];
    let n = match told.read(&mut messages) {
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => 0,
        read => read.unwrap(),
    };
    let (mut at, mut moved) = (0, 0);
    while at < n {
        let word = |i: usize| u32::from_ne_bytes(messages[at + 4 * i..][..4].try_into().unwrap());
        moved += usize::from(word(1) as i32 == INC_EPOCH);
        at += word(0) as usize;
    }
    moved
}

#[test]
fn kernel_forgets_what_it_believes_absent_when_a_directory_becomes_wide_and_after_a_crash() {
    let mut s = Scene::new("widened");
    let d = s.make_directory(Ino::ROOT, b"d");
    let (told, kernel) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
    let mut told = std::fs::File::from(told);
    s.kernel = Some(kernel);
    s.crash();
    assert_eq!(epochs_moved(&mut told), 1, "what the last worker told is not known");
    let tx = TxId::new(NodeId(2), 1);
    let parts = Parts::new(d, &[Ino::part(NODE, 77), Ino::part(NodeId(2), 9)]).unwrap();
    let widen = Part::Widen { ino: d, parts: Some(parts) };
    s.ask_and_wait(2, DAEMON | 1, 1, &Request::Prepare { tx, index: 0, part: widen });
    assert_eq!(epochs_moved(&mut told), 0, "nothing is decided yet");
    s.ask(2, DAEMON | 1, 2, &Request::Finish { tx, commit: true });
    s.pass(SOON);
    assert_eq!(epochs_moved(&mut told), 1);
    // Other changes of the directory cause single notifications.
    let set = SetAttr { mode: Some(0o700), ..SetAttr::default() };
    let change = Part::Change { ino: d, change: Change { set, layout: None } };
    let tx = TxId::new(NodeId(2), 2);
    s.ask_and_wait(2, DAEMON | 1, 3, &Request::Prepare { tx, index: 0, part: change });
    s.ask(2, DAEMON | 1, 4, &Request::Finish { tx, commit: true });
    s.pass(SOON);
    assert_eq!(epochs_moved(&mut told), 0);
}

/// An object of a store, with a name.
fn object(name: &[u8], kind: Kind) -> StoreObject<'_> {
    let version = StoreVersion { bytes: 5, ..StoreVersion::default() };
    let mode = if kind == Kind::Directory { 0o750 } else { 0o640 };
    let atime = timestamp();
    StoreObject {
        name,
        kind,
        mode,
        uid: 7,
        gid: 8,
        rdev: 0,
        atime,
        version,
        target: b"",
        nlink: 1,
        file_system: 0,
    }
}

fn objects(list: &[StoreObject<'_>]) -> Vec<u8> {
    let mut bytes = vec![0; 64 * 1024];
    let mut w = Writer::new(&mut bytes);
    list.iter().for_each(|object| object.encode(&mut w).unwrap());
    let n = w.len();
    bytes.truncate(n);
    bytes
}

/// Another program may make names in the store that the kernel and the board have cached as absent. They are imported
/// later without an invalidation each.
#[test]
fn kernel_and_board_forget_absent_names_when_a_directory_becomes_unlisted() {
    let mut s = Scene::new("unlisted");
    let d = s.make_directory(Ino::ROOT, b"d");
    let (told, kernel) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
    let mut told = std::fs::File::from(told);
    s.kernel = Some(kernel);
    s.crash();
    assert_eq!(epochs_moved(&mut told), 1, "what the last worker told is not known");
    // The new worker's board has no names of the directory, so it keeps an absence as such.
    let (f, g) = (&b"f"[..], &b"g"[..]);
    let mut sequence = 0;
    let mut ask = |s: &mut Scene, request: &Request<'_>| {
        sequence += 1;
        s.ask_and_wait(2, DAEMON | 1, sequence, request);
    };
    for name in [f, g] {
        ask(&mut s, &Request::MakeDirectory { parent: d, name, mode: 0o755 });
    }
    s.crash();
    for name in [f, g] {
        ask(&mut s, &Request::RemoveDirectory { parent: d, name });
    }
    let lookup = |s: &Scene, name: &[u8]| s.board().lookup(d, name);
    assert_eq!(lookup(&s, f), Lookup::Absent);
    assert!(epochs_moved(&mut told) > 0);
    ask(&mut s, &Request::Attach { ino: d, listed: true, settings: b"s" });
    assert_eq!(epochs_moved(&mut told), 1);
    assert_eq!((lookup(&s, f), lookup(&s, g)), (Lookup::Unknown, Lookup::Unknown));
    ask(&mut s, &Request::Import { ino: d, objects: &objects(&[object(f, Kind::File)]) });
    assert_eq!(epochs_moved(&mut told), 0, "no cache has that it is absent");
    ask(&mut s, &Request::Listed { ino: d, epoch: 0 });
    assert_eq!(epochs_moved(&mut told), 0);
    // Now an absence may be cached again.
    ask(&mut s, &Request::Forget { parent: d, name: f, relist: true, discard: false });
    assert_eq!(epochs_moved(&mut told), 1);
    assert_eq!((lookup(&s, f), lookup(&s, g)), (Lookup::Unknown, Lookup::Unknown));
}

#[test]
fn board_shows_imported_names_with_their_inodes_and_the_permissions_of_directories() {
    let mut s = Scene::new("imported");
    let d = s.make_directory(Ino::ROOT, b"d");
    s.ask_and_wait(2, DAEMON | 1, 1, &Request::Attach { ino: d, listed: true, settings: b"s" });
    let list = objects(&[object(b"f", Kind::File), object(b"sub", Kind::Directory)]);
    s.ask_and_wait(2, DAEMON | 1, 2, &Request::Import { ino: d, objects: &list });
    let board = s.board();
    let Lookup::Hit(file) = board.lookup(d, b"f") else { panic!("the board has no file") };
    assert_eq!(file.kind, Kind::File);
    let attr = board.inode(file.ino).unwrap().attr;
    assert_eq!((attr.size, attr.mode & 0o7777, attr.uid, attr.gid), (5, 0o640, 7, 8));
    let Lookup::Hit(directory) = board.lookup(d, b"sub") else { panic!("the board has no directory") };
    let mode = Kind::Directory.mode_bits() | 0o750;
    assert_eq!((directory.kind, directory.permissions), (Kind::Directory, (mode, 7, 8)));
    assert_eq!(board.permissions(directory.ino), Some((mode, 7, 8)));
    assert_eq!(board.lookup(d, b"other"), Lookup::Unknown);
    assert_eq!(board.lookup(directory.ino, b"other"), Lookup::Unknown, "its names are in the store");
}

#[test]
fn found_names_displace_nothing_on_a_board_that_is_full() {
    let mut s = Scene::new("found");
    let d = s.make_directory(Ino::ROOT, b"d");
    s.ask_and_wait(2, DAEMON | 1, 1, &Request::Attach { ino: d, listed: true, settings: b"s" });
    let evicted = |s: &Scene| s.node.as_ref().unwrap().evicted();
    let (ring, _) = s.process(5);
    let mut made = 0;
    while evicted(&s) == 0 {
        for _ in 0..64 {
            make_file(&mut s, &ring, format!("m{made}").as_bytes());
            made += 1;
        }
    }
    let before = evicted(&s);
    let names: Vec<_> = (0..500).map(|i| format!("n{i}").into_bytes()).collect();
    let list: Vec<_> = names.iter().map(|name| object(name, Kind::File)).collect();
    s.ask_and_wait(2, DAEMON | 1, 2, &Request::Import { ino: d, objects: &objects(&list) });
    // The attributes of the directory itself are a change.
    assert!(evicted(&s) <= before + 1, "{} instead of {before}", evicted(&s));
    let shown = names.iter().filter(|name| matches!(s.board().lookup(d, name), Lookup::Hit(_))).count();
    assert!(shown < names.len(), "the board has room for all");
}

/// The part has the kept reply, and the directory's home no longer has the directory. For a request from before the
/// directory was wide, the home has the kept reply.
#[test]
fn request_that_a_dead_worker_sent_to_a_part_goes_to_that_part_again() {
    let mut s = Scene::new("led");
    let (d, part) = (Ino::new(NodeId(2), 7), Ino::part(NodeId(3), 9));
    let parts = Parts::new(d, &[Ino::part(NodeId(2), 9), part]).unwrap();
    assert_eq!(parts.of_name(b"x"), part);
    let (ring, _) = s.process(5);
    let unlinks = |dir| move |r: &Request<'_>| matches!(r, Request::Unlink { parent, .. } if *parent == dir);
    let claim = post(&ring, &Request::Unlink { parent: d, name: b"x" });
    let ticket = s.asked(2, unlinks(d));
    s.tell(2, ticket, Err(Refusal::Wide(parts)));
    s.asked(3, unlinks(part));
    s.crash();
    let ticket = s.asked(2, unlinks(d));
    s.tell(2, ticket, Err(Code::NotFound.into()));
    s.asked(3, unlinks(part));
    s.crash();
    let again = s.asked(2, unlinks(d));
    assert!(s.peers[&3].asked.is_empty());
    s.reply(2, again, Reply::Done);
    s.take_any(&claim);
    drop(claim);
}

/// A message that was sent twice because its answer took long arrives after the next request of its process.
#[test]
fn lock_and_turn_to_append_are_not_taken_again_by_a_message_that_comes_late() {
    let mut s = Scene::new("relocked");
    let id = BackingId::of(Ino::new(NodeId(2), 99), &Layout::single(NODE, 0), 0, 0);
    s.ask_and_wait(2, 5, 1, &Request::Backing { id, op: BackingOp::Make });
    let wish = |kind| {
        let wish = LockRequest { owner: 1, flock: false, kind, start: 0, end: FILE_BYTES_MAX };
        Request::Backing { id, op: BackingOp::Lock(wish) }
    };
    let turn = Request::Backing { id, op: BackingOp::BeginAppend { handle: 7 } };
    s.ask_and_wait(2, 5, 2, &wish(LockKind::Write));
    s.ask_and_wait(2, 5, 3, &wish(LockKind::Unlock));
    s.ask_and_wait(2, 5, 4, &turn);
    s.ask_and_wait(2, 5, 5, &Request::Backing { id, op: BackingOp::EndAppend { handle: 7 } });
    for (sequence, late) in [(2, &wish(LockKind::Write)), (4, &turn)] {
        let call = s.ask(2, 5, sequence, late);
        assert_eq!(s.answer(2, call), Err(Code::Stale));
    }
    s.ask_and_wait(3, 6, 1, &wish(LockKind::Write));
    s.ask_and_wait(3, 6, 2, &turn);
    // A retry of a request whose answer was lost gets the answer again.
    s.ask_and_wait(3, 6, 2, &turn);
}

/// Reads another node's data through buffer 1.
fn read_data(s: &mut Scene, ring: &Ring) {
    let claim = post_read(ring, 2, 1);
    let ticket = s.asked_move(2);
    s.reply(2, ticket, Reply::Count(1));
    assert_eq!(s.take(claim), Ok(1));
}

#[test]
fn data_request_is_served_while_the_shard_thread_does_nothing() {
    let mut s = Scene::new("bypass");
    let (ring, session) = s.process(5);
    s.give_buffer(session, 1);
    s.turn();
    s.shard_waits = true;
    read_data(&mut s, &ring);
    let id = BackingId::of(Ino::new(NODE, 99), &Layout::single(NODE, 0), 0, 0);
    for (op, answer) in [
        (BackingOp::EndAppend { handle: 7 }, None),
        (BackingOp::Truncate { bytes: 5 }, Some(Code::NotSupported)),
    ] {
        let claim = post(&ring, &Request::Backing { id, op });
        s.take_any(&claim);
        let reply = claim.finish(&mut [0; 64], &|| true, |reply, _| Reply::decode(reply).err());
        assert_eq!(reply.unwrap(), answer, "{op:?}");
    }
    // The shard thread is needed if the slot's last reply left work for its client.
    s.shard_waits = false;
    make_file(&mut s, &ring, b"a");
    s.shard_waits = true;
    let claim = post_read(&ring, 2, 1);
    s.pass(SOON);
    assert!(s.peers[&2].moves.is_empty() && !claim.is_answered());
    s.shard_waits = false;
    let ticket = s.asked_move(2);
    s.shard_waits = true;
    s.reply(2, ticket, Reply::Count(1));
    assert_eq!(s.take(claim), Ok(1), "the reply needs no shard");
    read_data(&mut s, &ring);
}

/// The creator of a file sends only data requests, which the shard thread need not process. Nevertheless, the file's
/// backing file is removed when another process removes the file, wherever the worker is killed.
#[test]
fn backing_file_goes_though_its_creator_sends_data_requests_alone() {
    for kill in 0..4 {
        let what = format!("killed at {kill}");
        let mut s = Scene::new("creator");
        let ((ring, session), (other, other_session)) = (s.process(5), s.process(6));
        let ino = make_file(&mut s, &ring, b"a");
        if kill == 1 {
            s.crash();
        }
        s.give_buffer(session, 1);
        let claim = post_read(&ring, 2, 1);
        let mut ticket = s.asked_move(2);
        if kill == 2 {
            s.crash();
            s.give_buffer(session, 1);
            ticket = s.asked_move(2);
        }
        s.reply(2, ticket, Reply::Count(1));
        let read = s.take(claim);
        assert!(read == Ok(1) || kill == 2 && read == Err(Code::Fault), "{what}: {read:?}");
        if kill == 3 {
            s.crash();
            s.give_buffer(session, 1);
            read_data(&mut s, &ring);
        }
        let claim = post(&other, &UNLINK_A);
        owe_removal(&mut s, claim, ino);
        s.node.as_mut().unwrap().end(other_session);
        s.pass(SOON);
        s.rest();
        s.pass(SOON);
        is_swept(&mut s, &what);
    }
}
