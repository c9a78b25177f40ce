//! Writes right into the pieces of volumes: what is stored when a client, its node, the piece or the request is gone, or wrong,
//! and how long the piece is in use.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use forebay_data::{NodeTargets, Target};
use forebay_fabric::CallEvent;
use forebay_types::{PieceId, Rights};
use forebay_wire::Memory;
use rustix::fs::FlockOperation;

use super::*;
use crate::worker::network::{Commands, IoWorker};
use crate::worker::piece_table::{self, PieceKind};

const PIECE: usize = 1 << 20;
/// More than goes ahead of a request.
const LONG: usize = 256 << 10;
const AT: usize = 512 << 10;
const PUT: u8 = 9;
const BEFORE: u8 = 3;

/// The memory of a piece, as the shard thread keeps it.
fn memory() -> Arc<OwnedFd> {
    let memory = rustix::fs::memfd_create("piece", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, PIECE as u64).unwrap();
    Arc::new(memory)
}

fn fill(memory: &OwnedFd, byte: u8) {
    assert_eq!(rustix::io::pwrite(memory, &vec![byte; PIECE], 0), Ok(PIECE));
}

fn is_filled(memory: &OwnedFd, byte: u8) -> bool {
    let mut all = vec![0; PIECE];
    assert_eq!(rustix::io::pread(memory, &mut all, 0), Ok(PIECE));
    all.iter().all(|b| *b == byte)
}

/// As the shard thread asks before it frees the memory of a piece.
fn is_unused(memory: &OwnedFd) -> bool {
    let lock = |operation| rustix::fs::flock(memory, operation).is_ok();
    lock(FlockOperation::NonBlockingLockExclusive) && lock(FlockOperation::Unlock)
}

/// A process of one node that has a piece of the other open.
struct Scene {
    network: Network,
    client: NetworkThread,
    files: NetworkThread,
    /// The clients' end of the answers, and what must not be dropped.
    told: Receiver<Message>,
    _others: (Receiver<Message>, Taker),
    /// Of the piece's node: what the I/O workers are to do, and have done.
    jobs: Taker,
    commands: Receiver<Command>,
    session: u64,
    piece: PieceId,
    memory: Arc<OwnedFd>,
    place: PathBuf,
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.place);
    }
}

impl Scene {
    fn new(name: &str) -> Scene {
        let network = Network::new(1, Faults::NONE);
        let (mut client, told, client_jobs) = thread(&network, CLIENTS, 1);
        let (mut files, files_told, jobs) = thread(&network, FILES, 2);
        let place = std::env::temp_dir().join(format!("forebay-direct-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&place);
        std::fs::create_dir(&place).unwrap();
        let directory = File::open(&place).unwrap();
        Target::format(&directory).unwrap();
        let targets = NodeTargets::new(vec![Target::open(&directory, 2 << 16).unwrap()]);
        let (sender, commands) = channel();
        let to_files = Commands::new(sender, files.calls.endpoint().waker().clone());
        files.io_worker = Some(IoWorker::new(Arc::new(targets), Arc::clone(&files.kept), to_files));
        let session = session_on(CLIENTS, 9);
        client.add_buffer(session, 5, Region::new(BUFFER_BYTES).unwrap());
        let region = &client.moves.buffers[&5].memory;
        region.write_at(0, &vec![PUT; PIECE]).unwrap();
        let piece = PieceId { volume: Ino(9 << 48 | 5), segment: 0, index: 0 };
        let memory = memory();
        fill(&memory, BEFORE);
        let scene = Scene {
            network,
            client,
            files,
            told,
            _others: (files_told, client_jobs),
            jobs,
            commands,
            session,
            piece,
            memory,
            place,
        };
        scene.add(piece, &scene.memory);
        scene.open(piece);
        scene
    }

    fn id(piece: PieceId) -> BackingId {
        BackingId::of_piece(2 << 16, piece)
    }

    fn add(&self, piece: PieceId, memory: &Arc<OwnedFd>) {
        let rights = Some(Rights { uid: 0, gid: 0, mode: 0o600 });
        let kind = PieceKind { target: 0, bytes: PIECE as u64, rights, is_thin: false };
        self.files.kept.pieces.add(piece, (memory, kind), None);
    }

    /// The process opens a piece.
    fn open(&self, piece: PieceId) {
        let (kept, id) = (&self.files.kept, Scene::id(piece));
        kept.open(self.session, &id, 1, || kept.pieces.open(piece, (0, 0)).map(|(file, _)| file)).unwrap();
        kept.keep_writable(self.session, &id, &kept.get(self.session, &id).unwrap());
    }

    fn put(&mut self, sequence: u64, piece: PieceId) {
        let stamp = Stamp { session: self.session, slot: 0, sequence };
        let wish = Move { kind: MoveKind::Write, offset: AT as u64, bytes: LONG as u32, buffer: 5, at: 0 };
        let id = Scene::id(piece);
        assert!(self.client.forward_move(FILES, id, wish, call(stamp, id, wish)));
    }

    fn turn(&mut self, client_runs: bool) {
        self.network.turn();
        if client_runs {
            self.client.round();
        }
        self.files.round();
        while let Some(job) = self.jobs.try_take() {
            self.files.io_worker.as_mut().unwrap().serve(job);
        }
        while let Ok(Command::Moved(moving, result)) = self.commands.try_recv() {
            self.files.piece_moved(*moving, result);
        }
    }

    fn until(&mut self, what: &str, client_runs: bool, done: impl Fn(&Scene) -> bool) {
        let end = self.network.now() + 3 * NODE_TIMEOUT;
        while !done(self) {
            assert!(self.network.now() < end, "{what} does not happen");
            self.turn(client_runs);
        }
    }

    fn turns(&mut self, time: Duration) {
        let end = self.network.now() + time;
        while self.network.now() < end {
            self.turn(true);
        }
    }

    /// Begins a put, and stops its node when the transfer has been started.
    fn put_in_flight(&mut self) {
        self.put(1, self.piece);
        self.until("a transfer", true, |scene| !scene.files.moves.under_way.is_empty());
        assert!(is_filled(&self.memory, BEFORE), "it has ended already");
        assert!(matches!(self.files.moves.under_way.values().next().unwrap().room, DataBuffer::Direct(_)));
        self.network.stop(CLIENTS.0.into(), true);
    }

    fn answer(&self, sequence: u64) -> Option<Result<u64, Code>> {
        self.told.try_iter().find_map(|message| match message {
            Message::Answered { stamp, reply } if stamp.sequence == sequence => {
                Some(Reply::decode(&reply).map(|reply| match reply {
                    Reply::Count(n) => n,
                    other => panic!("{other:?}"),
                }))
            }
            _ => None,
        })
    }

    fn is_written(&self, memory: &OwnedFd) -> bool {
        let mut all = vec![0; PIECE];
        assert_eq!(rustix::io::pread(memory, &mut all, 0), Ok(PIECE));
        let (before, rest) = all.split_at(AT);
        let (put, behind) = rest.split_at(LONG);
        put.iter().all(|b| *b == PUT) && before.iter().chain(behind).all(|b| *b == BEFORE)
    }
}

#[test]
fn put_writes_the_piece_and_the_piece_is_in_use_until_then() {
    let mut scene = Scene::new("put");
    let session = scene.session;
    scene.put(1, scene.piece);
    scene.until("a transfer", true, |scene| !scene.files.moves.under_way.is_empty());
    // The process ends, or its node cannot be reached: the transfer keeps the piece.
    scene.files.kept.end(session);
    assert!(!is_unused(&scene.memory));
    scene.until("its end", true, |scene| scene.files.moves.under_way.is_empty());
    assert!(is_unused(&scene.memory) && scene.is_written(&scene.memory));
    scene.turns(Duration::from_millis(100));
    assert_eq!(scene.answer(1), Some(Ok(LONG as u64)));
}

#[test]
fn put_that_is_late_changes_neither_its_piece_nor_memory_that_took_its_place() {
    let mut scene = Scene::new("late");
    scene.put_in_flight();
    let began = scene.network.now();
    // In use as long as a byte could be stored.
    while scene.network.now() < began + NODE_TIMEOUT - Duration::from_secs(1) {
        scene.turn(false);
        assert!(!is_unused(&scene.memory));
    }
    scene.until("the end of the transfer", false, |scene| scene.files.moves.under_way.is_empty());
    scene.files.kept.end(scene.session);
    assert!(is_unused(&scene.memory) && is_filled(&scene.memory, BEFORE));
    // Its memory is freed, and another volume has it.
    drop(scene.files.kept.pieces.remove(scene.piece));
    fill(&scene.memory, 0);
    let next = PieceId { volume: Ino(9 << 48 | 6), ..scene.piece };
    scene.add(next, &Arc::clone(&scene.memory));
    let (session, memory) = (scene.session, Arc::clone(&scene.memory));
    scene.network.stop(CLIENTS.0.into(), false);
    scene.turns(Duration::from_secs(10));
    assert!(is_filled(&memory, 0), "it came late");
    assert!(scene.files.moves.direct.is_empty() && is_unused(&memory));
    // The put failed, or its client repeats it: not as done.
    assert!(scene.answer(1).is_none_or(|answer| answer.is_err()));
    assert!(scene.files.kept.get(session, &Scene::id(scene.piece)).is_none());
}

#[test]
fn put_of_a_node_that_was_killed_leaves_the_piece_unused() {
    let mut scene = Scene::new("killed");
    scene.put_in_flight();
    scene.network.stop(CLIENTS.0.into(), false);
    scene.network.kill(CLIENTS.0.into());
    scene.until("the end of the transfer", false, |scene| scene.files.moves.under_way.is_empty());
    scene.files.kept.close_pieces(scene.session);
    assert!(is_unused(&scene.memory) && is_filled(&scene.memory, BEFORE));
}

#[test]
fn put_whose_segment_is_dropped_meanwhile_keeps_its_memory_and_the_next_is_an_error() {
    let mut scene = Scene::new("dropped");
    scene.put(1, scene.piece);
    scene.until("a transfer", true, |scene| !scene.files.moves.under_way.is_empty());
    drop(scene.files.kept.pieces.remove(scene.piece));
    assert!(!is_unused(&scene.memory), "so it is not freed");
    scene.turns(Duration::from_secs(3));
    assert_eq!(scene.answer(1), Some(Ok(LONG as u64)));
    assert!(scene.files.moves.direct.is_empty());
    scene.put(2, scene.piece);
    scene.turns(Duration::from_secs(1));
    assert_eq!(scene.answer(2), Some(Err(Code::Io)));
    assert!(is_unused(&scene.memory), "what its process keeps of it is gone");
}

#[test]
fn request_with_a_wrong_place_or_memory_is_answered_and_changes_nothing() {
    let mut scene = Scene::new("wrong");
    let session = scene.session;
    let stamp = |sequence| Stamp { session, slot: 7, sequence };
    let region = Arc::clone(&scene.client.moves.buffers[&5].memory);
    let is_readable = forebay_fabric::Access { read: true, write: true };
    let right = scene.client.calls.endpoint().register(region, is_readable).unwrap().remote;
    let id = Scene::id(scene.piece);
    let other = Scene::id(PieceId { index: 1, ..scene.piece });
    let far = |address: u64| Memory { address, ..right };
    let long = LONG as u64;
    let wrong = [
        (id, u64::MAX, long, right),
        (id, u64::MAX - long + 1, long, right),
        (id, PIECE as u64 - long + 1, long, right),
        (id, PIECE as u64, long, right),
        (id, 0, 2 * PIECE as u64, right),
        (id, 0, u64::MAX, right),
        (other, 0, long, right),
        (BackingId { target: 2 << 16 | 1, ..id }, 0, long, right),
        (id, 0, long, Memory { key: right.key ^ 1, ..right }),
        (id, 0, long, far(u64::MAX)),
        (id, 0, long, far(u64::MAX - long)),
        (id, 0, long, far(right.address + BUFFER_BYTES as u64)),
        (id, 0, long, far(right.address + BUFFER_BYTES as u64 - long + 1)),
    ];
    for (n, (id, offset, bytes, memory)) in (1..).zip(wrong) {
        let message =
            Wire::WriteStripe { id, offset, append: false, bytes, from: DataLocation::Remote(memory) };
        let deadline = scene.client.calls.now() + NODE_TIMEOUT;
        let asked = match scene.client.calls.call(FILES, stamp(n), &message, deadline) {
            Ok(asked) => asked,
            // No node sends or accepts it.
            Err(_) if [offset, memory.address].iter().any(|at| at.checked_add(bytes).is_none()) => continue,
            Err(_) if bytes == u64::MAX => continue,
            Err(code) => panic!("{n}: {code}"),
        };
        let mut outcome = None;
        while outcome.is_none() {
            scene.turn(false);
            scene.client.calls.progress();
            while let Some(event) = scene.client.calls.next_event() {
                match event {
                    CallEvent::Answered { call, outcome: its, .. } if call == asked => outcome = Some(its),
                    _ => {}
                }
            }
            assert!(scene.network.now() < deadline + Duration::from_secs(1), "{n}: it has no answer");
        }
        let is_done = match outcome.as_ref().and_then(|its| its.as_ref().ok()).map(Body::message) {
            Some(Wire::Answer(reply)) => reply.is_ok(),
            _ => false,
        };
        assert!(!is_done, "{n}: {outcome:?}");
        assert!(scene.files.moves.under_way.is_empty() && is_filled(&scene.memory, BEFORE), "{n}");
    }
    scene.put(1, scene.piece);
    scene.turns(Duration::from_secs(1));
    assert!(scene.answer(1) == Some(Ok(LONG as u64)) && scene.is_written(&scene.memory));
    assert!(piece_table::open(&scene.memory, true).is_ok());
}
