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

mod caches;
mod late_removals;
mod listings;

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
            piece: None,
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
