//! A real daemon with peers that have the pool's secret and send wrong requests, that have another secret, or that have
//! none. It answers or ignores them, its own clients notice nothing, and its shard stays clean.

use std::collections::HashMap;
use std::io::Write;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use forebay_client::{PathBuffer, Place, Pool};
use forebay_fabric::{Access, CallEvent, CallId, Calls, Direction, Region, Transfer};
use forebay_ring::{
    read_exact, receive_fds, send_fds, write_all, AttachReply, Header, Ring, ATTACH_FDS, HEADER_BYTES,
    KIND_ATTACH, KIND_BUFFER, KIND_ERROR,
};
use forebay_types::limits::{
    BUFFER_BYTES, EAGER_BUFFERS, EAGER_BUFFER_BYTES, MESSAGE_BYTES_MAX, MOVE_BYTES_MAX, RING_SLOTS,
};
use forebay_types::{
    BackingId, BackingOp, BackingRuns, Caller, Class, Code, Ino, Kind, Layout, Move, MoveKind, NodeId,
    Outcome, Part, Reply, Request, TxId,
};
use forebay_wire::{DataLocation, Memory, Message, Secret, Stamp};
use support::{skipped, Daemon};

mod support;

/// How many requests the wrong peer sends.
const ROUNDS: u64 = 2500;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// An inode number, mostly one that may exist.
    fn ino(&mut self) -> Ino {
        let node = [1, 1, 1, 2, 9][self.next() as usize % 5];
        Ino::new(NodeId(node), 1 + self.next() % 40)
    }
}

/// Two bytes at 5, and one at 0.
const RUNS: &[u8] = &[5, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];

fn request<'a>(random: &mut Random, round: u64, name: &'a [u8], data: &'a [u8]) -> Request<'a> {
    let (parent, ino) = (random.ino(), random.ino());
    let target = [1 << 16, 1 << 16, 2 << 16, 1 << 16 | 7][random.next() as usize % 4];
    let id = BackingId { target, ino, number: (random.next() % 2) as u8, stripe: (random.next() % 3) as u16 };
    let removal = TxId::new(NodeId(2), (1 << 20) | (round / 4));
    // A transaction that was begun recently.
    let recent = TxId::new(NodeId(2), round.saturating_sub(random.next() % 12));
    let runs = BackingRuns::of(RUNS).unwrap();
    match random.next() % 20 {
        0 | 1 => Request::Create {
            parent,
            name,
            mode: 0o644,
            exclusive: round.is_multiple_of(2),
            dirty: true,
            layout: Some(Layout::single(NodeId([1, 2, 77][random.next() as usize % 3]), 0)),
            number: (round.is_multiple_of(5)).then_some(ino),
            reserve: round.is_multiple_of(7),
        },
        2 => Request::Unlink { parent, name },
        3 => Request::MakeDirectory { parent, name, mode: 0o755 },
        4 => Request::RemoveDirectory { parent, name },
        5 => Request::Rename { parent, name, new_parent: ino, new_name: b"b", flags: (round % 3) as u32 },
        6 => Request::MakeDirectoryAt { node: NodeId(1 + (round % 2) as u16), parent, name, mode: 0o700 },
        // Each directory is entered once: only node 2 itself could detect that it enters a directory of its own under
        // two names.
        7 => Request::Prepare {
            tx: TxId::new(NodeId(2), round),
            index: (round % 3) as u8,
            part: Part::Enter {
                parent,
                name,
                ino: Ino::new(NodeId(2), 1000 + round),
                kind: Kind::Directory,
                link: TxId::NONE,
                flags: 0,
            },
        },
        8 | 18 => Request::Finish { tx: recent, commit: !random.next().is_multiple_of(3) },
        9 if round.is_multiple_of(2) => {
            Request::Prepare { tx: removal, index: 2, part: Part::Widen { ino, parts: None } }
        }
        9 => Request::Prepare { tx: removal, index: 0, part: Part::Condemn { ino } },
        10 => Request::Prepare { tx: removal, index: 1, part: Part::Climb { from: parent, avoid: ino } },
        11 => match round % 8 {
            6 => Request::SetWidth { ino, width: round as u16 % 4 },
            7 => Request::PartsOf { ino },
            0 => Request::DropLink { ino, link: removal },
            1 => Request::Touch { ino },
            2 => Request::AskOutcome { tx: removal },
            3 => Request::LeadsTo { node: NodeId(2), parent, cookie: round },
            4 => Request::Finish { tx: removal, commit: true },
            _ => Request::MoveDirectory { parent, name, new_parent: ino, new_name: b"b", flags: 0, ino },
        },
        // Parts of cross-node transactions whose other parts are missing or wrong.
        19 => Request::Prepare {
            tx: [recent, removal][random.next() as usize % 2],
            index: (3 + random.next() % 4) as u8,
            part: match random.next() % 4 {
                0 => {
                    Part::Leave { parent, name, ino, link: [TxId::NONE, recent][random.next() as usize % 2] }
                }
                1 => Part::Enter { parent, name, ino, kind: Kind::Directory, link: TxId::NONE, flags: 0 },
                2 => Part::Enter { parent, name, ino, kind: Kind::File, link: recent, flags: 0 },
                _ => Part::Count { ino, link: recent },
            },
        },
        12 => Request::EndSession { session: random.next() },
        13 => Request::Backing {
            id,
            op: BackingOp::Write { offset: round, append: round.is_multiple_of(2), bytes: data },
        },
        17 if round.is_multiple_of(2) => Request::Backing { id, op: BackingOp::ReadRuns { runs } },
        17 => Request::Backing { id, op: BackingOp::WriteRuns { runs, bytes: b"abc" } },
        14 => Request::Backing { id, op: BackingOp::Open { handle: round } },
        16 if round.is_multiple_of(2) => Request::RemoveBackings { ids: &[0; 30] },
        16 => Request::AreThere { sessions: &[7; 16] },
        15 => Request::Backing { id, op: [BackingOp::Make, BackingOp::Stat][round as usize % 2] },
        _ => Request::NameOf { parent, ino },
    }
}

#[test]
fn peer_with_the_secret_that_asks_anything_is_answered_and_harms_nothing() {
    if skipped() {
        return;
    }
    let seed = std::env::var("FOREBAY_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(99);
    let daemon = Daemon::start("liar", 0);
    let worker = daemon.status().unwrap().pids.worker;
    let mut calls = daemon.peer(&daemon.secret());
    let mut random = Random(seed);
    let data = vec![3; MESSAGE_BYTES_MAX / 8];
    let (mut under_way, mut answered, mut refused) = (HashMap::<CallId, u64>::new(), 0u64, 0);
    for round in 0..ROUNDS {
        let name = [b"a".as_slice(), b"b", b"c"][round as usize % 3];
        let request = request(&mut random, round, name, &data);
        // Sessions of node 2 and of other nodes, slots that exist and others, sequences that decrease.
        let node = [2, 2, 2, 1, 9][random.next() as usize % 5];
        // Requests that only daemons send have a daemon's session.
        let daemons = if matches!(request.class(), Class::Step | Class::Peer) { 1 << 47 } else { 0 };
        let session = (node << 48) | (random.next() % 3) | daemons;
        let slot = (random.next() % (RING_SLOTS as u64 + 4)) as u16;
        let stamp = Stamp { session, slot, sequence: round - random.next() % (round + 1).min(3) };
        let message = Message::Ask(Caller { uid: 5, gid: 5 }, request);
        let deadline = calls.now() + Duration::from_secs(20);
        under_way.insert(calls.call(NodeId(1), stamp, &message, deadline).unwrap(), round);
        while under_way.len() >= 48 || round == ROUNDS - 1 && !under_way.is_empty() {
            calls.progress();
            while let Some(event) = calls.next_event() {
                match event {
                    // The peer refuses every request of the daemon, and reports its own transactions as aborted.
                    CallEvent::Asked { ticket, body } => {
                        let refusal = Message::Failure { code: Code::NotSupported, detail: b"a lie" };
                        let aborted = Message::Answer(Ok(Reply::Outcome(Outcome::Aborted)));
                        let asks = matches!(body.message(), Message::Ask(_, Request::AskOutcome { .. }));
                        calls.answer(&ticket, if asks { &aborted } else { &refusal }).unwrap();
                    }
                    CallEvent::Answered { call, outcome, .. } => {
                        let round = under_way.remove(&call);
                        match outcome {
                            Ok(_) => answered += 1,
                            // A request that a later one of its slot replaced is abandoned, and times out.
                            Err(failed) if failed.code == Code::TimedOut => refused += 1,
                            Err(failed) => panic!("round {round:?}: {failed:?}"),
                        }
                    }
                    _ => {}
                }
            }
            calls.wait(Duration::from_millis(20));
        }
    }
    assert!(answered > ROUNDS / 2, "{answered} answered, {refused} overtaken");
    calls.leave("done");
    daemon.assert_unharmed(worker);
}

/// Connects two addresses of this host.
fn connect_from(host: &str, (to, port): (&str, u16)) -> std::io::Result<TcpStream> {
    use rustix::net::{bind, connect, socket, AddressFamily, SocketType};
    let address = |host: &str, port| std::net::SocketAddr::new(host.parse().unwrap(), port);
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
    bind(&socket, &address(host, 0))?;
    connect(&socket, &address(to, port))?;
    Ok(TcpStream::from(socket))
}

#[test]
fn peers_without_the_secret_are_not_answered() {
    if skipped() {
        return;
    }
    let daemon = Daemon::start("stranger", 1);
    let worker = daemon.status().unwrap().pids.worker;
    let stranger = Secret::new(&(7..39).collect::<Vec<u8>>()).unwrap();
    let mut calls = daemon.peer(&stranger);
    let message = Message::Ask(Caller { uid: 0, gid: 0 }, Request::GetAttr { ino: Ino::ROOT });
    let deadline = calls.now() + Duration::from_secs(20);
    calls.call(NodeId(1), Stamp::default(), &message, deadline).unwrap();
    let failed = loop {
        calls.progress();
        match calls.next_event() {
            Some(CallEvent::Answered { outcome, .. }) => break outcome.unwrap_err(),
            Some(_) => {}
            None => calls.wait(Duration::from_millis(20)),
        }
    };
    assert_eq!(failed.code, Code::Io, "{failed:?}");
    // Connections that send bytes other than libfabric's protocol.
    let mut random = Random(5);
    for round in 0..20 {
        // From the other node's host: the kernel drops connections from hosts that are not nodes.
        let Ok(mut socket) = connect_from(&daemon.hosts[1], (&daemon.hosts[0], daemon.port)) else {
            continue;
        };
        let noise: Vec<u8> = (0..round * 37).map(|_| random.next() as u8).collect();
        let _ = socket.write_all(&noise);
    }
    daemon.assert_unharmed(worker);
    let forged = daemon.status().unwrap().more["network"]["forged"].as_u64();
    assert!(forged.is_some_and(|n| n > 0), "{forged:?}");
}

/// Sends node 1 a request and waits: the answer, or the code and text of the failure.
fn answer(
    calls: &mut Calls,
    sequence: u64,
    message: &Message<'_>,
) -> Result<Result<u64, Code>, (Code, String)> {
    let stamp = Stamp { session: 2 << 48 | 5, slot: 3, sequence };
    let deadline = calls.now() + Duration::from_secs(20);
    let id = calls.call(NodeId(1), stamp, message, deadline).unwrap();
    loop {
        calls.progress();
        match calls.next_event() {
            Some(CallEvent::Answered { call, outcome, .. }) if call == id => {
                let body = outcome.map_err(|failed| (failed.code, failed.why))?;
                let Message::Answer(reply) = body.message() else { panic!("{body:?}") };
                return Ok(reply.map_err(|refusal| refusal.code()).map(|reply| match reply {
                    Reply::Count(n) => n,
                    other => panic!("{other:?}"),
                }));
            }
            Some(_) => {}
            None => calls.wait(Duration::from_millis(20)),
        }
    }
}

#[test]
fn peer_moves_data_of_a_file_by_its_own_memory_and_by_no_other() {
    if skipped() {
        return;
    }
    let daemon = Daemon::start("mover", 2);
    let worker = daemon.status().unwrap().pids.worker;
    let pool = Pool::attach(&daemon.pool()).unwrap();
    let place = Place { dir: pool.root().unwrap(), path: b"file" };
    let mut escape = PathBuffer::new();
    let fd = pool.open(place, libc::O_CREAT | libc::O_RDWR, 0o600, &mut escape).unwrap();
    // SAFETY: the descriptor is new and ours.
    let file = unsafe { <std::fs::File as std::os::fd::FromRawFd>::from_raw_fd(fd) };
    let data: Vec<u8> = (0..MOVE_BYTES_MAX as u32 + 37_856).map(|i| (i % 251) as u8).collect();
    let len = data.len();
    std::os::unix::fs::FileExt::write_all_at(&file, &data, 0).unwrap();
    let ino = pool.resolve(place, true, &mut escape).ok().unwrap().attr.ino;
    let id = BackingId { target: 1 << 16, ino, number: 0, stripe: 0 };

    let mut calls = daemon.peer(&daemon.secret());
    let region = Arc::new(Region::new(BUFFER_BYTES).unwrap());
    let mine = calls.endpoint().register(Arc::clone(&region), Access::BOTH).unwrap().remote;
    let at =
        |offset: usize| DataLocation::Remote(Memory { address: mine.address + offset as u64, key: mine.key });
    let whole = MOVE_BYTES_MAX as u64;
    let read = |id, offset, bytes, to| Message::ReadStripe { id, offset, bytes, to };
    let write = |offset, append, bytes, from| Message::WriteStripe { id, offset, append, bytes, from };

    assert_eq!(answer(&mut calls, 1, &read(id, 0, whole, at(4096))), Ok(Ok(whole)));
    let mut back = vec![0; MOVE_BYTES_MAX];
    region.read_at(4096, &mut back).unwrap();
    assert!(back == data[..MOVE_BYTES_MAX]);
    assert_eq!(answer(&mut calls, 2, &read(id, whole, whole, at(0))), Ok(Ok(len as u64 - whole)), "its end");
    assert_eq!(answer(&mut calls, 3, &read(id, 1 << 30, 9, at(0))), Ok(Ok(0)), "beyond it");

    region.write_at(0, &[7; 1000]).unwrap();
    assert_eq!(answer(&mut calls, 10, &write(5, false, 1000, at(0))), Ok(Ok(1000)));
    let stored = || std::fs::read(format!("/proc/self/fd/{fd}")).unwrap();
    assert!(stored()[5..1005] == [7; 1000] && stored().len() == len);
    // A retry is answered and not done again. A request with an earlier sequence that arrives late is refused.
    region.write_at(0, &[8; 1000]).unwrap();
    assert_eq!(answer(&mut calls, 10, &write(5, false, 1000, at(0))), Ok(Ok(1000)));
    let late = answer(&mut calls, 9, &write(5, false, 1000, at(0))).unwrap_err();
    assert_eq!(late.0, Code::Stale, "{late:?}");
    let inline = BackingOp::Write { offset: 5, append: false, bytes: b"late" };
    let late =
        answer(&mut calls, 9, &Message::Ask(Caller { uid: 0, gid: 0 }, Request::Backing { id, op: inline }));
    assert_eq!(late.unwrap_err().0, Code::Stale);
    assert!(stored()[5..1005] == [7; 1000]);
    assert_eq!(answer(&mut calls, 11, &write(0, true, 1000, at(0))), Ok(Ok(1000)));
    assert_eq!(answer(&mut calls, 11, &write(0, true, 1000, at(0))), Ok(Ok(1000)));
    assert!(stored()[len..] == [8; 1000], "appended once");

    // Files that do not exist, targets of other nodes, more bytes than one piece.
    let absent = BackingId { ino: Ino(1 << 48 | 99), ..id };
    assert_eq!(answer(&mut calls, 20, &read(absent, 0, 9, at(0))), Ok(Err(Code::NotFound)));
    let other = BackingId { target: 3 << 16, ..id };
    assert_eq!(answer(&mut calls, 21, &read(other, 0, 9, at(0))), Ok(Err(Code::Stale)));
    let long = answer(&mut calls, 22, &read(id, 0, whole + 1, at(0))).unwrap_err();
    assert_eq!(long.0, Code::TooBig, "{long:?}");
    // Memory that the peer does not own: the transport refuses it, and the next request is served.
    let wrong = [
        DataLocation::Remote(Memory { address: mine.address, key: mine.key ^ 0x55 }),
        at(BUFFER_BYTES),
        at(BUFFER_BYTES - 5),
        DataLocation::Remote(Memory { address: u64::MAX - 100_000, key: mine.key }),
    ];
    for (i, memory) in wrong.into_iter().enumerate() {
        let sequence = 30 + 10 * i as u64;
        assert_eq!(answer(&mut calls, sequence, &read(id, 0, 70_000, memory)), Ok(Err(Code::Interrupted)));
        assert_eq!(
            answer(&mut calls, sequence + 1, &write(0, false, 70_000, memory)),
            Ok(Err(Code::Interrupted))
        );
        assert_eq!(answer(&mut calls, sequence + 2, &read(id, 0, 5, at(0))), Ok(Ok(5)));
    }
    assert!(stored()[5..1005] == [7; 1000]);
    calls.leave("done");
    daemon.assert_unharmed(worker);
}

#[test]
fn data_that_a_peer_sends_ahead_are_written_where_they_have_come_and_fetched_where_not() {
    if skipped() {
        return;
    }
    let daemon = Daemon::start("sent", 2);
    let worker = daemon.status().unwrap().pids.worker;
    let pool = Pool::attach(&daemon.pool()).unwrap();
    let place = Place { dir: pool.root().unwrap(), path: b"file" };
    let mut escape = PathBuffer::new();
    let fd = pool.open(place, libc::O_CREAT | libc::O_RDWR, 0o600, &mut escape).unwrap();
    // SAFETY: the descriptor is new and ours.
    let file = unsafe { <std::fs::File as std::os::fd::FromRawFd>::from_raw_fd(fd) };
    let ino = pool.resolve(place, true, &mut escape).ok().unwrap().attr.ino;
    let id = BackingId { target: 1 << 16, ino, number: 0, stripe: 0 };
    const BYTES: usize = 60_000;
    let stored = || {
        let mut bytes = vec![0; BYTES];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 0).unwrap();
        bytes
    };

    let mut calls = daemon.peer(&daemon.secret());
    let region = Arc::new(Region::new(EAGER_BUFFER_BYTES).unwrap());
    let mine = calls.endpoint().register(Arc::clone(&region), Access::BOTH).unwrap();
    let eager_buffers = |calls: &mut Calls, grant, sequence| {
        let stamp = Stamp { session: 2 << 48 | 5, slot: 4, sequence };
        let deadline = calls.now() + Duration::from_secs(20);
        let id = calls.call(NodeId(1), stamp, &Message::TakeEagerBuffers { grant }, deadline).unwrap();
        loop {
            calls.progress();
            match calls.next_event() {
                Some(CallEvent::Answered { call, outcome, .. }) if call == id => {
                    return outcome.map_err(|failed| failed.code).map(|body| match body.message() {
                        Message::GrantEagerBuffers { memory, buffers, bytes } => {
                            assert_eq!(
                                (usize::from(buffers), bytes as usize),
                                (EAGER_BUFFERS, EAGER_BUFFER_BYTES)
                            );
                            memory
                        }
                        other => panic!("{other:?}"),
                    });
                }
                Some(_) => {}
                None => calls.wait(Duration::from_millis(20)),
            }
        }
    };
    let transfer = |calls: &mut Calls, memory: Memory, buffer: usize| {
        let end = memory.address + ((buffer + 1) * EAGER_BUFFER_BYTES) as u64;
        let remote = Memory { address: end - BYTES as u64, key: memory.key };
        let (direction, local) = (Direction::Write, mine.local);
        let order = Transfer { direction, local, local_offset: 0, remote, bytes: BYTES };
        let deadline = calls.now() + Duration::from_secs(20);
        calls.transfer(NodeId(1), &order, 1, deadline).unwrap();
    };
    let generation = std::cell::Cell::new(0);
    let write = |grant, buffer: usize| Message::WriteStripe {
        id,
        append: false,
        offset: 0,
        bytes: BYTES as u64,
        from: DataLocation::Eager {
            memory: mine.remote,
            grant,
            buffer: buffer as u16,
            generation: generation.replace(generation.get() + 1) + 1,
        },
    };
    let done = Ok(Ok(BYTES as u64));

    let first = eager_buffers(&mut calls, 7, 1).unwrap();
    assert_eq!(eager_buffers(&mut calls, 7, 2).unwrap(), first, "a retry");
    // The peer's own memory has other bytes than the eager buffer, which shows whether the daemon fetched the data.
    region.write_at(0, &[1; BYTES]).unwrap();
    let ahead = calls.endpoint().limits().in_order;
    if ahead {
        transfer(&mut calls, first, 3);
        assert_eq!(
            answer(
                &mut calls,
                1,
                &Message::ReadStripe { id, offset: 0, bytes: 1, to: DataLocation::Remote(mine.remote) }
            ),
            Ok(Ok(0))
        );
        region.write_at(0, &[2; BYTES]).unwrap();
        assert_eq!(answer(&mut calls, 2, &write(7, 3)), done);
        assert!(stored() == [1; BYTES], "the data that had arrived");
    }
    // No data are in the eager buffer: used before, never used (twice), of another grant, no such buffer. So the daemon
    // fetches the data.
    for (i, (grant, buffer)) in [(7, 3), (7, 4), (7, 4), (6, 5), (7, EAGER_BUFFERS)].into_iter().enumerate() {
        let byte = 10 + i as u8;
        region.write_at(0, &[byte; BYTES]).unwrap();
        assert_eq!(answer(&mut calls, 10 + i as u64, &write(grant, buffer)), done);
        assert!(stored() == [byte; BYTES], "{i}: fetched");
    }
    // A new grant has new memory, and the old grant is retired.
    let second = eager_buffers(&mut calls, 8, 3).unwrap();
    assert_ne!(second.key, first.key);
    assert_eq!(eager_buffers(&mut calls, 7, 4), Err(Code::Stale));
    region.write_at(0, &[20; BYTES]).unwrap();
    transfer(&mut calls, second, 0);
    assert_eq!(answer(&mut calls, 20, &write(8, 0)), done);
    assert_eq!(answer(&mut calls, 20, &write(8, 0)), done, "a retry, whose buffer was released");
    assert!(stored() == [20; BYTES]);
    transfer(&mut calls, first, 0);
    region.write_at(0, &[21; BYTES]).unwrap();
    assert_eq!(answer(&mut calls, 21, &write(7, 0)), done);
    assert!(stored() == [21; BYTES], "fetched, when the link was made anew");
    calls.leave("done");
    daemon.assert_unharmed(worker);
}

/// Attaches a process of the daemon's node; returns its ring and its session.
fn attach_raw(daemon: &Daemon) -> (Ring, u64) {
    let socket = UnixStream::connect(daemon.pool().join("socket")).unwrap();
    send_fds(socket.as_fd(), &Header { kind: KIND_ATTACH, len: 0 }.encode(), &[]).unwrap();
    let (mut header, mut fds) = ([0; HEADER_BYTES], [const { None }; ATTACH_FDS]);
    let got = receive_fds(socket.as_fd(), &mut header, &mut fds).unwrap();
    read_exact(socket.as_fd(), &mut header[got..]).unwrap();
    let mut body = [0; AttachReply::BYTES];
    read_exact(socket.as_fd(), &mut body).unwrap();
    let [Some(ring), Some(doorbell), ..] = fds else { panic!("descriptors are missing") };
    let ring = Ring::open(ring.as_fd(), doorbell.as_fd()).unwrap();
    (ring, AttachReply::decode(&body).unwrap().session)
}

/// Requests a data buffer for a session; returns its number, or the kind of another answer.
fn buffer(daemon: &Daemon, session: u64) -> Result<u64, u16> {
    let socket = UnixStream::connect(daemon.pool().join("socket")).unwrap();
    send_fds(socket.as_fd(), &Header { kind: KIND_BUFFER, len: 8 }.encode(), &[]).unwrap();
    write_all(socket.as_fd(), &session.to_le_bytes()).unwrap();
    let (mut header, mut fds) = ([0; HEADER_BYTES], [const { None }; ATTACH_FDS]);
    let got = receive_fds(socket.as_fd(), &mut header, &mut fds).unwrap();
    read_exact(socket.as_fd(), &mut header[got..]).unwrap();
    let header = Header::decode(&header).unwrap();
    if header.kind != KIND_BUFFER {
        return Err(header.kind);
    }
    let mut number = [0; 8];
    read_exact(socket.as_fd(), &mut number).unwrap();
    assert!(fds[0].is_some());
    Ok(u64::from_le_bytes(number))
}

#[test]
fn client_that_names_a_buffer_that_is_not_its_own_is_refused() {
    if skipped() {
        return;
    }
    let daemon = Daemon::start("buffers", 3);
    let worker = daemon.status().unwrap().pids.worker;
    let ((ring, session), (other_ring, other)) = (attach_raw(&daemon), attach_raw(&daemon));
    assert_eq!(buffer(&daemon, 12_345), Err(KIND_ERROR), "a session that is not there");
    let (first, theirs) = (buffer(&daemon, session).unwrap(), buffer(&daemon, other).unwrap());
    let mine = buffer(&daemon, session).unwrap();
    let id = BackingId { target: 2 << 16, ino: Ino(2 << 48 | 5), number: 0, stripe: 0 };
    let ask = |ring: &Ring, op| {
        let (mut message, mut reply) = ([0; 256], [0; 256]);
        let n = Request::Backing { id, op }.encode(Caller { uid: 0, gid: 0 }, &mut message).unwrap();
        ring.call(&message[..n], &mut reply, &|| true, |reply| Reply::decode(reply).map(|_| ())).unwrap()
    };
    let good = Move { kind: MoveKind::Write, offset: 0, bytes: 4096, buffer: mine, at: 0 };
    for (wrong, why) in [
        (Move { buffer: first, ..good }, "one that it had"),
        (Move { buffer: theirs, ..good }, "another's"),
        (Move { buffer: mine ^ 1, ..good }, "nobody's"),
    ] {
        assert_eq!(ask(&ring, BackingOp::Move(wrong)), Err(Code::Fault), "{why}");
    }
    // Its own buffer: node 2 is down, so no request was sent, and the buffer stays usable.
    assert_eq!(ask(&ring, BackingOp::Move(good)), Err(Code::Io));
    assert_eq!(ask(&ring, BackingOp::Move(good)), Err(Code::Io));
    assert_eq!(ask(&other_ring, BackingOp::Move(Move { buffer: theirs, ..good })), Err(Code::Io));
    // Lengths and offsets out of bounds do not decode.
    for (bytes, at, code) in [
        (0, 0, Code::Invalid),
        (MOVE_BYTES_MAX as u32 + 1, 0, Code::TooBig),
        (u32::MAX, u32::MAX, Code::TooBig),
        (4096, BUFFER_BYTES as u32 - 4095, Code::Fault),
    ] {
        assert_eq!(ask(&ring, BackingOp::Move(Move { bytes, at, ..good })), Err(code), "{bytes} at {at}");
    }
    let here = BackingId { target: 1 << 16, ..id };
    let (mut message, mut reply) = ([0; 256], [0; 256]);
    let op = BackingOp::Move(good);
    let n = Request::Backing { id: here, op }.encode(Caller { uid: 0, gid: 0 }, &mut message).unwrap();
    let told = ring.call(&message[..n], &mut reply, &|| true, |reply| Reply::decode(reply).map(|_| ()));
    assert_eq!(told.unwrap(), Err(Code::NotSupported), "a file of this node");
    daemon.assert_unharmed(worker);
}
