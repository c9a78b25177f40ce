//! Two entry points for fuzzing a daemon, used by `fuzz/` and `tests/garbage.rs`. A node of a pool of two runs without
//! threads ([`crate::stepped`]), and a peer sends it the input over the simulated network.
//!
//! The input is a list of pieces: one byte that selects what is done with the piece, two bytes for its length, then the
//! piece. For any input, the node must keep running and must serve a peer that sends well-formed requests.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use forebay_data::Target;
use forebay_fabric::simulated::{Faults, Network, SimulatedEndpoint};
use forebay_fabric::{CallsSettings, Endpoint, Event, Peer};
use forebay_ring::{memfd_sealed, Doorbell, Seal};
use forebay_types::{Caller, Code, Ino, NodeId, Refusal, Reply, Request, Timestamp};
use forebay_wire::{
    Answer, Frames, Header, Hello, Initiator, Kind, Message, Secret, Session, Stamp, PROTOCOL_MAX,
    PROTOCOL_MIN,
};

use crate::stepped::{session_of, Node, Setup};
use crate::FLIGHT_RECORDER_BYTES;

const NODE: u32 = 1;
const PEER: u16 = 2;
const SHARD_BYTES: u64 = 16 << 20;
/// Steps of the network after each piece: more than one request and its reply need.
const TURNS: usize = 4;
/// The most steps for a handshake or an answer.
const TURNS_MAX: usize = 5000;

/// A directory that is removed on drop.
struct Place(PathBuf);

impl Place {
    fn new() -> Place {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let shared = Path::new("/dev/shm");
        let parent = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("forebay-exercise-{}-{number}", std::process::id()));
        if let Err(e) = std::fs::create_dir_all(path.join("shard")) {
            panic!("cannot make {}: {e}", path.display());
        }
        Place(path)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The node, and its peer's end of the network.
struct Scene {
    network: Network,
    node: Node,
    peer: SimulatedEndpoint,
    at: Peer,
    /// Frames that the peer received.
    heard: Vec<Vec<u8>>,
    nonce: u8,
    /// The last field, because the node, which uses the directory, must be dropped first.
    _place: Place,
}

fn secret() -> Secret {
    match Secret::new(&(0..32).collect::<Vec<u8>>()) {
        Ok(secret) => secret,
        Err(code) => unreachable!("32 bytes: {code}"),
    }
}

fn start() -> forebay_types::Result<Scene> {
    let io = |what: &'static str| move |e: std::io::Error| forebay_types::Error::io(what, &e);
    let place = Place::new();
    let target: OwnedFd = std::fs::File::open(&place.0).map_err(io("cannot open the target"))?.into();
    Target::format(&target)?;
    let (recorder, _) = memfd_sealed(c"recorder", FLIGHT_RECORDER_BYTES as usize, Seal::Size)
        .map_err(io("cannot make the flight recorder"))?;
    let (doorbell, _) = Doorbell::create().map_err(io("cannot make the doorbell"))?;
    let network = Network::new(1, Faults::NONE);
    let node = Node::start(Setup {
        node: NodeId(NODE as u16),
        others: vec![(NodeId(PEER), format!("simulated:{PEER}").into_bytes())],
        without_target: Vec::new(),
        endpoint: Box::new(network.endpoint(NODE)),
        calls: CallsSettings { seed: Some(1), ..CallsSettings::default() },
        secret: secret(),
        target: target.as_fd(),
        shard_bytes: SHARD_BYTES,
        flight_recorder: recorder.as_fd(),
        doorbell: doorbell.as_fd(),
        keeper: None,
        rings: Vec::new(),
        epoch: 1,
        clock: || Timestamp { sec: 1, nsec: 0 },
        planted: None,
        kernel: None,
        piece: None,
    })?;
    let mut peer = network.endpoint(PEER.into());
    let at = peer
        .connect(format!("simulated:{NODE}").as_bytes())
        .map_err(|code| forebay_types::Error::new(code, "cannot reach the node"))?;
    Ok(Scene { network, node, peer, at, heard: Vec::new(), nonce: 0, _place: place })
}

impl Scene {
    fn send(&mut self, frame: &[u8]) {
        let deadline = self.network.now() + Duration::from_secs(1);
        // The network drops a frame that it does not accept, such as one that is too long.
        let _ = self.peer.send(self.at, 0, frame, 0, deadline);
    }

    /// One step of the network, the node and the peer.
    fn turn(&mut self) {
        self.network.turn();
        self.node.communicate();
        if let Err(e) = self.node.serve() {
            panic!("the node cannot go on: {e}");
        }
        while self.node.serve_data(|_| 0) {}
        while self.node.sweep() {}
        let heard = &mut self.heard;
        self.peer.progress(&mut |event| {
            if let Event::Received { bytes, .. } = event {
                heard.extend(Frames::of(bytes).flatten().map(<[u8]>::to_vec));
            }
        });
    }

    /// Makes a link as a peer that has the secret.
    fn link(&mut self) -> Session {
        self.nonce = self.nonce.wrapping_add(1);
        let me = Hello {
            protocols: (PROTOCOL_MIN, PROTOCOL_MAX),
            pool: secret().pool(),
            node: NodeId(PEER),
            incarnation: 7,
            link: 1000 + u64::from(self.nonce),
            capacity_bytes: 0,
            clock_us: 0,
            nonce: [self.nonce; 32],
            address: self.peer.address().to_vec(),
        };
        let initiator = match Initiator::start(&secret(), me) {
            Ok(initiator) => initiator,
            Err(code) => unreachable!("the hello is sound: {code}"),
        };
        self.heard.clear();
        self.send(initiator.frame());
        for _ in 0..TURNS_MAX {
            self.turn();
            for frame in std::mem::take(&mut self.heard) {
                if let Ok(Answer::Welcome(_, mut session)) = initiator.finish(&secret(), &frame) {
                    let mut frame = Vec::new();
                    if session.seal(0, Stamp::default(), &Message::Finish, &mut frame).is_ok() {
                        self.send(&frame);
                    }
                    return *session;
                }
            }
        }
        panic!("the node welcomes nobody any more");
    }

    /// Checks that a well-formed request on a new link is answered.
    fn is_served(&mut self) {
        let mut session = self.link();
        let ask = Message::Ask(Caller { uid: 0, gid: 0 }, Request::GetAttr { ino: Ino::ROOT });
        // A slot and a process that the input cannot have used.
        let stamp = Stamp { session: session_of(NodeId(PEER), u64::MAX), slot: 63, sequence: u64::MAX - 1 };
        let mut frame = Vec::new();
        if let Err(code) = session.seal(1 << 60, stamp, &ask, &mut frame) {
            unreachable!("the request is sound: {code}");
        }
        self.send(&frame);
        for _ in 0..TURNS_MAX {
            self.turn();
            for frame in std::mem::take(&mut self.heard) {
                let Ok((header, body)) = session.open(&frame) else { continue };
                if header.request != 1 << 60 {
                    continue;
                }
                let Ok(Message::Answer(answer)) = Message::decode(header.kind, body) else {
                    panic!("a sound request is refused: {:?}", Message::decode(header.kind, body));
                };
                // A peer with the secret may have used up the state that the node keeps for processes.
                assert!(
                    matches!(answer, Ok(Reply::Entry(_)) | Err(Refusal::Code(Code::NoResources))),
                    "a sound request is answered with {answer:?}"
                );
                return;
            }
        }
        panic!("a sound request is not answered");
    }
}

/// The pieces of an input.
fn pieces(mut bytes: &[u8]) -> Vec<(u8, &[u8])> {
    let mut pieces = Vec::new();
    while let [what, low, high, rest @ ..] = bytes {
        let length = usize::from(u16::from_le_bytes([*low, *high]));
        let (piece, rest) = rest.split_at(rest.len().min(length));
        pieces.push((*what, piece));
        bytes = rest;
    }
    pieces
}

/// Sends a node frames from a sender without the secret: the pieces themselves, and modified copies of frames of a
/// valid link. The node must store nothing of them and must keep serving.
///
/// # Panics
/// When the node does not.
pub fn exercise_unknown(bytes: &[u8]) {
    let mut scene = start().unwrap_or_else(|e| panic!("{e}"));
    let mut overheard: Vec<Vec<u8>> = Vec::new();
    for (what, piece) in pieces(bytes) {
        match what % 4 {
            // A valid link of a peer that has the secret. Its frames are overheard.
            0 => {
                let mut session = scene.link();
                let (mut frame, path) = (Vec::new(), Message::Ask(Caller { uid: 0, gid: 0 }, Request::Space));
                let stamp = Stamp { session: session_of(NodeId(PEER), 5), slot: 0, sequence: 1 };
                if session.seal(9, stamp, &path, &mut frame).is_ok() {
                    overheard.push(frame);
                }
            }
            // The last overheard frame with some bytes changed, at the positions that the piece gives.
            1 => {
                let Some(frame) = overheard.last_mut() else { continue };
                for change in piece.chunks_exact(2) {
                    let at = usize::from(change[0]) % frame.len();
                    // At least one bit changes: an unchanged frame would be a valid one of the peer.
                    frame[at] ^= change[1] | 1;
                }
                let frame = frame.clone();
                if !piece.is_empty() {
                    scene.send(&frame);
                }
            }
            _ => scene.send(piece),
        }
        for _ in 0..TURNS {
            scene.turn();
        }
    }
    let report = scene.node.check().unwrap_or_else(|e| panic!("{e}"));
    assert!(
        report["clean"] == true && report["inodes"] == 1,
        "somebody without the secret did this: {report}"
    );
    scene.is_served();
}

/// Sends a node frames that are sealed with the pool's secret: any body of any kind, and requests that decode. The
/// node's shard must stay readable, and the node must keep serving.
///
/// # Panics
/// When the node does not.
pub fn exercise_known(bytes: &[u8]) {
    inodes_behind(bytes);
}

/// As [`exercise_known`]; returns the number of inodes in the shard afterwards, with the root.
pub fn inodes_behind(bytes: &[u8]) -> u64 {
    let mut scene = start().unwrap_or_else(|e| panic!("{e}"));
    let mut session = scene.link();
    for (number, (what, piece)) in pieces(bytes).into_iter().enumerate() {
        let (kind, body) = match (what % 4, piece) {
            // Any kind.
            (0, [kind, body @ ..]) => (Kind::ALL[usize::from(*kind) % Kind::ALL.len()], body),
            (0, []) => continue,
            // Time without frames, in which links are closed.
            (1, _) => {
                for _ in 0..20 * piece.len() {
                    scene.turn();
                }
                continue;
            }
            _ => (Kind::Ask, piece),
        };
        let process = u64::from(what >> 4);
        let stamp = Stamp {
            session: session_of(NodeId(PEER), process),
            slot: u16::from(what >> 2 & 3),
            sequence: number as u64,
        };
        let mut frame = Vec::new();
        if session.seal_body(kind, number as u64, stamp, body, &mut frame).is_err() {
            continue;
        }
        scene.send(&frame);
        for _ in 0..TURNS {
            scene.turn();
        }
        // The node may close the link. Then a new link is made.
        let hung_up = scene.heard.iter().any(|f| Header::peek(f).is_ok_and(|h| h.kind == Kind::Goodbye));
        scene.heard.clear();
        if hung_up || matches!(kind, Kind::Goodbye) {
            session = scene.link();
        }
    }
    let report = scene.node.check().unwrap_or_else(|e| panic!("the shard cannot be read any more: {e}"));
    scene.is_served();
    report["inodes"].as_u64().unwrap_or(0)
}
