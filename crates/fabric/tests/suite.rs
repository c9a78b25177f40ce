//! The test suite of endpoints, run over the simulated network and over libfabric's providers on 127.0.0.1.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use forebay_fabric::libfabric::{self, LibfabricEndpoint, Settings, Waiting};
use forebay_fabric::simulated::{Faults, Network};
use forebay_fabric::{Access, Direction, Endpoint, Event, Peer, Region, Transfer};
use forebay_types::Code;
use forebay_wire::Memory;
use rustix::fs::{ftruncate, memfd_create, MemfdFlags};
use rustix::mm::{mmap, MapFlags, ProtFlags};

const MIB: usize = 1 << 20;

#[derive(Debug, PartialEq)]
enum Told {
    Received(u64, Vec<u8>),
    Done(u64),
    Failed(u64, Peer, Code, String),
}

/// The source of endpoints.
enum Bed {
    Simulated(Network, u32),
    Libfabric(Settings),
}

impl Bed {
    fn simulated() -> Option<Bed> {
        Some(Bed::Simulated(Network::new(1, Faults::NONE), 0))
    }

    /// A provider on this machine, or None after printing the reason.
    fn libfabric(provider: &str, waiting: Waiting, register_local: bool) -> Option<Bed> {
        if let Some(why) = libfabric::unusable() {
            println!("skipped: {why}");
            return None;
        }
        let settings = Settings {
            provider: Some(provider.to_owned()),
            host: Some("127.0.0.1".to_owned()),
            waiting,
            message_bytes: MIB,
            receives: 16,
            piece_bytes: 300_000,
            register_local,
            ..Settings::default()
        };
        match LibfabricEndpoint::open(settings.clone()) {
            Ok(_) => Some(Bed::Libfabric(settings)),
            Err(e) => {
                println!("skipped: {e}");
                None
            }
        }
    }

    fn open(&mut self) -> Box<dyn Endpoint> {
        match self {
            Bed::Simulated(network, next) => {
                *next += 1;
                Box::new(network.endpoint(*next))
            }
            Bed::Libfabric(settings) => {
                Box::new(LibfabricEndpoint::open(settings.clone()).expect("opened before"))
            }
        }
    }
}

/// Endpoints that one thread drives together.
struct Room {
    bed: Bed,
    ends: Vec<Box<dyn Endpoint>>,
    told: Vec<Vec<Told>>,
}

impl Room {
    fn new(mut bed: Bed, count: usize) -> Room {
        let ends: Vec<_> = (0..count).map(|_| bed.open()).collect();
        let told = ends.iter().map(|_| Vec::new()).collect();
        Room { bed, ends, told }
    }

    fn peer(&mut self, from: usize, to: usize) -> Peer {
        let address = self.ends[to].address().to_vec();
        self.ends[from].connect(&address).expect("an address of its own kind")
    }

    fn soon(&self, from: usize) -> Duration {
        self.ends[from].now() + Duration::from_secs(10)
    }

    fn turn(&mut self) {
        if let Bed::Simulated(network, _) = &self.bed {
            network.turn();
        }
        for (end, told) in self.ends.iter_mut().zip(&mut self.told) {
            end.progress(&mut |event| {
                told.push(match event {
                    Event::Received { tag, bytes } => Told::Received(tag, bytes.to_vec()),
                    Event::Done { token } => Told::Done(token),
                    Event::Failed { token, peer, code, why } => {
                        Told::Failed(token, peer, code, why.to_owned())
                    }
                });
            });
        }
    }

    /// Drives all endpoints until `done`, 15 seconds at most.
    fn until(&mut self, what: &str, mut done: impl FnMut(&[Vec<Told>]) -> bool) {
        let end = self.ends[0].now() + Duration::from_secs(15);
        while !done(&self.told) {
            self.turn();
            if self.ends[0].now() > end {
                let brief: Vec<Vec<String>> =
                    self.told.iter().map(|t| t.iter().map(brief).collect()).collect();
                panic!("not in 15 s: {what}; {brief:?}");
            }
        }
    }

    /// Repeats a transfer until it succeeds, as the provider notices a broken connection late. Returns the number of
    /// failures.
    fn until_transfer_works(&mut self, from: usize, to: Peer, transfer: &Transfer, first: u64) -> u64 {
        for failures in 0..100 {
            let (token, deadline) = (first + 500 + failures, self.soon(from));
            self.ends[from].transfer(to, transfer, token, deadline).unwrap();
            if self.outcome(from, token).is_ok() {
                return failures;
            }
            let again = self.ends[0].now() + Duration::from_millis(5);
            while self.ends[0].now() < again {
                self.turn();
            }
        }
        panic!("100 tries failed");
    }

    fn outcome(&mut self, at: usize, token: u64) -> Result<(), (Code, String)> {
        self.until(&format!("operation {token}"), |told| told[at].iter().any(|t| of(t, token)));
        let index = self.told[at].iter().position(|t| of(t, token)).expect("seen above");
        match self.told[at].remove(index) {
            Told::Failed(_, _, code, why) => Err((code, why)),
            _ => Ok(()),
        }
    }
}

fn of(told: &Told, token: u64) -> bool {
    matches!(told, Told::Done(t) | Told::Failed(t, ..) if *t == token)
}

fn brief(told: &Told) -> String {
    match told {
        Told::Received(tag, bytes) => format!("received {tag}, {} bytes", bytes.len()),
        other => format!("{other:?}"),
    }
}

fn pattern(seed: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 7 + i / 251 + seed * 13) as u8).collect()
}

fn filled(seed: usize, bytes: usize) -> Arc<Region> {
    let region = Region::new(bytes).unwrap();
    region.write_at(0, &pattern(seed, bytes)).unwrap();
    Arc::new(region)
}

fn content(region: &Region) -> Vec<u8> {
    let mut all = vec![0; region.len()];
    region.read_at(0, &mut all).unwrap();
    all
}

fn messages_of_every_size_arrive_whole_and_in_order(bed: Bed) {
    let mut room = Room::new(bed, 2);
    let to = room.peer(0, 1);
    let sizes = [0, 1, 63, 64, 65, 4096, 8192, 8193, 16_384, 65_536, 100_000, MIB - 1, MIB];
    for (i, bytes) in sizes.into_iter().enumerate() {
        let deadline = room.soon(0);
        room.ends[0].send(to, i as u64 + 1000, &pattern(i, bytes), i as u64, deadline).unwrap();
    }
    room.until("all messages", |told| told[1].len() == sizes.len() && told[0].len() == sizes.len());
    for (i, (told, bytes)) in room.told[1].iter().zip(sizes).enumerate() {
        assert!(*told == Told::Received(i as u64 + 1000, pattern(i, bytes)), "message {i}: {}", brief(told));
    }
    for i in 0..sizes.len() as u64 {
        assert_eq!(room.outcome(0, i), Ok(()));
    }
    let deadline = room.soon(0);
    assert_eq!(room.ends[0].send(to, 0, &vec![0; MIB + 1], 9, deadline), Err(Code::TooBig));
    assert_eq!(room.ends[0].send(Peer(77), 0, b"", 9, deadline), Err(Code::Invalid));
}

fn many_peers_talk_at_once(bed: Bed) {
    const ENDS: usize = 8;
    const EACH: usize = 40;
    let mut room = Room::new(bed, ENDS);
    for from in 0..ENDS {
        for to in (0..ENDS).filter(|to| *to != from) {
            let peer = room.peer(from, to);
            for i in 0..EACH {
                let deadline = room.soon(from);
                let bytes = pattern(from, i * 3);
                room.ends[from]
                    .send(peer, (from * EACH + i) as u64, &bytes, (to * EACH + i) as u64, deadline)
                    .unwrap();
            }
        }
    }
    let expected = (ENDS - 1) * EACH * 2;
    room.until("all messages", |told| told.iter().all(|t| t.len() == expected));
    for told in &room.told {
        let mut last = [None; ENDS];
        for told in told {
            match told {
                Told::Received(tag, bytes) => {
                    let (from, i) = (*tag as usize / EACH, *tag as usize % EACH);
                    assert_eq!(*bytes, pattern(from, i * 3));
                    assert!(last[from] < Some(i), "messages of one peer keep their order");
                    last[from] = Some(i);
                }
                Told::Done(_) => {}
                failed => panic!("{failed:?}"),
            }
        }
        assert_eq!(last.iter().filter(|l| **l == Some(EACH - 1)).count(), ENDS - 1);
    }
}

fn transfers_move_exactly_what_was_asked(bed: Bed) {
    let mut room = Room::new(bed, 2);
    let to = room.peer(0, 1);
    let (near, far) = (filled(1, 2 * MIB), filled(2, 2 * MIB));
    let mine = room.ends[0].register(near.clone(), Access::LOCAL).unwrap();
    let theirs = room.ends[1].register(far.clone(), Access::BOTH).unwrap();
    let (mut expect_near, mut expect_far) = (content(&near), content(&far));
    let cases = [
        (Direction::Read, 0, 0, 1),
        (Direction::Read, 13, 4097, 5000),
        (Direction::Write, 4096, 100, 70_001),
        (Direction::Read, 0, 0, 2 * MIB),
        (Direction::Write, 1, 2, 2 * MIB - 2),
        (Direction::Write, 2 * MIB - 1, 2 * MIB - 1, 1),
        (Direction::Read, 5, 6, 0),
    ];
    for (token, (direction, local_offset, offset, bytes)) in cases.into_iter().enumerate() {
        let remote = Memory { address: theirs.remote.address + offset as u64, ..theirs.remote };
        let transfer = Transfer { direction, local: mine.local, local_offset, remote, bytes };
        let deadline = room.soon(0);
        room.ends[0].transfer(to, &transfer, token as u64, deadline).unwrap();
        assert_eq!(room.outcome(0, token as u64), Ok(()), "{direction:?} of {bytes}");
        let (local, remote) = (local_offset..local_offset + bytes, offset..offset + bytes);
        match direction {
            Direction::Read | Direction::ReadInTime => {
                expect_near[local].copy_from_slice(&expect_far[remote])
            }
            Direction::Write | Direction::Ahead => expect_far[remote].copy_from_slice(&expect_near[local]),
        }
        assert!(
            content(&near) == expect_near && content(&far) == expect_far,
            "after {direction:?} of {bytes}"
        );
    }
    // Many messages at once.
    for i in 0..64u64 {
        let (at, bytes) = (i as usize * 32_768, 32_768);
        let remote = Memory { address: theirs.remote.address + at as u64, ..theirs.remote };
        let transfer =
            Transfer { direction: Direction::Read, local: mine.local, local_offset: at, remote, bytes };
        let deadline = room.soon(0);
        room.ends[0].transfer(to, &transfer, 100 + i, deadline).unwrap();
    }
    for i in 0..64 {
        assert_eq!(room.outcome(0, 100 + i), Ok(()));
    }
    assert!(content(&near) == expect_far);
}

/// For providers that promise this order. The memory is checked at the moment in which the message is reported.
fn messages_come_when_what_was_written_before_them_is_there(mut bed: Bed) {
    if let Bed::Libfabric(settings) = &mut bed {
        let cut = LibfabricEndpoint::open(settings.clone()).unwrap();
        assert!(!cut.limits().in_order, "one of several pieces may be lost");
        settings.piece_bytes = Settings::default().piece_bytes;
    }
    let mut room = Room::new(bed, 2);
    let is_tcp = room.ends[0].provider().starts_with("tcp");
    assert!(room.ends[0].limits().in_order || !is_tcp, "a connection of TCP keeps it");
    if !room.ends[0].limits().in_order {
        return println!("skipped: {} promises no such order", room.ends[0].provider());
    }
    let to = room.peer(0, 1);
    let (near, far) = (filled(1, 2 * MIB), filled(2, 2 * MIB));
    let mine = room.ends[0].register(near.clone(), Access::LOCAL).unwrap();
    let theirs = room.ends[1].register(far.clone(), Access::BOTH).unwrap();
    for round in 0..60u64 {
        let bytes = [1, 64 << 10, 299_999, MIB, 2 * MIB][round as usize % 5];
        let expected = pattern(round as usize, bytes);
        near.write_at(0, &expected).unwrap();
        let transfer = Transfer {
            direction: if round % 2 == 0 { Direction::Write } else { Direction::Ahead },
            local: mine.local,
            local_offset: 0,
            remote: theirs.remote,
            bytes,
        };
        let deadline = room.soon(0);
        room.ends[0].transfer(to, &transfer, 2 * round, deadline).unwrap();
        room.ends[0].send(to, round, b"behind it", 2 * round + 1, deadline).unwrap();
        let (mut came, mut ended) = (false, 0);
        while !came || ended < 2 {
            assert!(room.ends[0].now() < deadline, "round {round}");
            if let Bed::Simulated(network, _) = &room.bed {
                network.turn();
            }
            room.ends[0].progress(&mut |event| match event {
                Event::Done { .. } => ended += 1,
                other => panic!("{other:?}"),
            });
            room.ends[1].progress(&mut |event| {
                if let Event::Received { tag, .. } = event {
                    assert_eq!(tag, round);
                    let mut there = vec![0; bytes];
                    far.read_at(0, &mut there).unwrap();
                    assert!(there == expected, "round {round}: a message before its {bytes} bytes");
                    came = true;
                }
            });
        }
    }
}

fn transfers_that_are_not_allowed_are_refused(bed: Bed) {
    let mut room = Room::new(bed, 3);
    let (near, far) = (filled(1, 8192), filled(2, 8192));
    let mine = room.ends[0].register(near.clone(), Access::LOCAL).unwrap();
    let theirs = room.ends[1].register(far.clone(), Access::BOTH).unwrap();
    let readable = room.ends[1].register(filled(3, 4096), Access::READ).unwrap();
    let private = room.ends[1].register(filled(4, 4096), Access::LOCAL).unwrap();
    let gone = room.ends[1].register(filled(5, 4096), Access::BOTH).unwrap();
    room.ends[1].unregister(gone.local);
    let to = room.peer(0, 1);
    let read = |remote, bytes| Transfer {
        direction: Direction::Read,
        local: mine.local,
        local_offset: 0,
        remote,
        bytes,
    };
    let write = |remote, bytes| Transfer { direction: Direction::Write, ..read(remote, bytes) };
    let at = |remote: Memory, offset: u64| Memory { address: remote.address.wrapping_add(offset), ..remote };

    // Errors on this side are refused at once.
    let deadline = room.soon(0);
    let stranger = Transfer { local: forebay_fabric::Local(999), ..read(theirs.remote, 1) };
    assert_eq!(
        room.ends[0].transfer(to, &stranger, 1, deadline),
        Err(Code::Fault),
        "memory that is not registered"
    );
    assert_eq!(room.ends[0].transfer(to, &read(theirs.remote, 8193), 1, deadline), Err(Code::Fault));
    let beyond = Transfer { local_offset: usize::MAX, ..read(theirs.remote, 1) };
    assert_eq!(room.ends[0].transfer(to, &beyond, 1, deadline), Err(Code::Fault));

    let wrong_key = Memory { key: theirs.remote.key ^ 0x5555, ..theirs.remote };
    let cases = [
        ("a wrong key", read(wrong_key, 100)),
        ("a wrong key", write(wrong_key, 100)),
        ("beyond the end", read(at(theirs.remote, 8000), 193)),
        ("beyond the end", write(at(theirs.remote, 8192), 1)),
        ("far beyond the end", read(at(theirs.remote, 1 << 40), 1)),
        ("write where only reads are allowed", write(readable.remote, 10)),
        ("local memory", read(private.remote, 10)),
        ("memory that was unregistered", read(gone.remote, 10)),
    ];
    let good = read(readable.remote, 10);
    let original = content(&near);
    for (token, (what, transfer)) in cases.into_iter().enumerate() {
        // A refusal may break the connection. The peer stays usable: permitted transfers work again, after some tries.
        let failures = room.until_transfer_works(0, to, &good, 1000 * token as u64);
        assert_eq!(content(&near)[..10], pattern(3, 10));
        near.write_at(0, &original[..10]).unwrap();
        let token = token as u64 + 10;
        let deadline = room.ends[0].now() + Duration::from_secs(5);
        room.ends[0].transfer(to, &transfer, token, deadline).unwrap();
        let outcome = room.outcome(0, token);
        println!("{failures} failures, then {what}: {outcome:?}");
        assert!(outcome.is_err(), "{what}");
        assert!(content(&near) == original, "nothing was written here");
        assert!(content(&far) == pattern(2, 8192), "nothing was written there");
    }
    room.until_transfer_works(0, to, &good, 100_000);
    // The third endpoint is not affected.
    let other = room.peer(2, 1);
    let deadline = room.soon(2);
    room.ends[2].send(other, 7, b"still here", 1, deadline).unwrap();
    room.until("the other's message", |told| told[1].iter().any(|t| matches!(t, Told::Received(7, _))));
}

fn nobody_there_fails_in_time_and_others_go_on(bed: Bed) {
    let mut room = Room::new(bed, 3);
    let gone = room.ends.pop().unwrap();
    room.told.pop();
    let address = gone.address().to_vec();
    drop(gone);
    let (dead, alive) = (room.ends[0].connect(&address).unwrap(), room.peer(0, 1));
    let start = room.ends[0].now();
    let near = filled(1, 4096);
    let mine = room.ends[0].register(near, Access::LOCAL).unwrap();
    for token in 0..20 {
        room.ends[0].send(dead, 1, b"hello?", token, start + Duration::from_millis(2000)).unwrap();
    }
    let remote = Memory { address: 0, key: 1 };
    let transfer =
        Transfer { direction: Direction::Write, local: mine.local, local_offset: 0, remote, bytes: 100 };
    room.ends[0].transfer(dead, &transfer, 50, start + Duration::from_millis(2000)).unwrap();
    for token in 100..150 {
        room.ends[0].send(alive, token, b"hello", token, start + Duration::from_secs(10)).unwrap();
    }
    room.until("messages to the living", |told| told[1].len() == 50);
    let quick = room.ends[0].now() - start;
    assert!(quick < Duration::from_millis(1800), "the living waited {quick:?} for the dead");
    for token in (0..20).chain([50]) {
        let (code, why) = room.outcome(0, token).unwrap_err();
        assert!(matches!(code, Code::TimedOut | Code::Io), "{code} {why}");
    }
    let all = room.ends[0].now() - start;
    assert!(all < Duration::from_millis(6000), "told after {all:?}");
    let named = room.told[0].iter().any(|t| matches!(t, Told::Failed(_, peer, ..) if *peer == dead));
    assert!(!named, "all were taken by their tokens");
}

fn endpoint_that_starts_again_is_reached_again(bed: Bed) {
    let mut room = Room::new(bed, 2);
    let to = room.peer(0, 1);
    let deadline = room.soon(0);
    room.ends[0].send(to, 1, b"before", 1, deadline).unwrap();
    room.until("the first message", |told| !told[1].is_empty());
    // The same address: the same host in the simulation, the same port in libfabric.
    let address = room.ends[1].address().to_vec();
    let old = room.ends.pop().unwrap();
    drop(old);
    let again: Box<dyn Endpoint> = match &room.bed {
        Bed::Simulated(network, _) => Box::new(network.endpoint(2)),
        Bed::Libfabric(settings) => {
            let port = u16::from_be_bytes([address[2], address[3]]);
            let settings = Settings { port: Some(port), ..settings.clone() };
            Box::new(LibfabricEndpoint::open(settings).expect("its port is free again"))
        }
    };
    assert_eq!(again.address(), address);
    room.ends.push(again);
    room.told[1].clear();
    let (mut token, start) = (10, room.ends[0].now());
    // The endpoint is not notified. Sends fail until the connection is made again.
    loop {
        let deadline = room.ends[0].now() + Duration::from_millis(500);
        room.ends[0].send(to, 2, b"after", token, deadline).unwrap();
        let _ = room.outcome(0, token);
        for _ in 0..1000 {
            room.turn();
        }
        if !room.told[1].is_empty() {
            break;
        }
        token += 1;
        assert!(room.ends[0].now() - start < Duration::from_secs(10), "not reached again");
    }
    println!("reached after {:?}, {} tries", room.ends[0].now() - start, token - 9);
    assert_eq!(room.told[1][0], Told::Received(2, b"after".to_vec()));
}

fn addresses_that_are_none_are_refused(bed: Bed) {
    let mut room = Room::new(bed, 1);
    for bad in [
        &b""[..],
        b"x",
        b"simulated:",
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        &[0; 256],
    ] {
        assert_eq!(room.ends[0].connect(bad).err(), Some(Code::Invalid), "{bad:?}");
    }
    let own = room.ends[0].address().to_vec();
    let peer = room.ends[0].connect(&own).unwrap();
    assert_eq!(room.ends[0].connect(&own), Ok(peer), "one address, one peer");
}

fn forgotten_peer_comes_back_when_connected(bed: Bed) {
    let mut room = Room::new(bed, 2);
    let to = room.peer(0, 1);
    for round in 0..5 {
        let deadline = room.soon(0);
        let to = if round == 0 { to } else { room.peer(0, 1) };
        room.ends[0].send(to, round, b"round", round, deadline).unwrap();
        room.until("the message", |told| told[1].len() as u64 == round + 1);
        assert_eq!(room.outcome(0, round), Ok(()));
        room.ends[0].forget(to);
    }
}

/// Memory that others use, and what they see of it.
struct Shared(OwnedFd);

impl Shared {
    fn new() -> Shared {
        let memory = memfd_create("shared", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, MIB as u64).unwrap();
        Shared(memory)
    }

    /// A mapping, which the test never unmaps.
    fn region(&self) -> Arc<Region> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping overlaps nothing, and stays.
        Arc::new(unsafe {
            let start = mmap(std::ptr::null_mut(), MIB, access, MapFlags::SHARED, &self.0, 0).unwrap();
            Region::foreign(NonNull::new(start.cast()).unwrap(), MIB, Box::new(()))
        })
    }

    fn content(&self) -> Vec<u8> {
        let mut all = vec![0; MIB];
        assert_eq!(rustix::io::pread(&self.0, &mut all, 0), Ok(MIB));
        all
    }
}

/// Bytes of several peers arrive while this end is stopped. Then it makes one call or another.
fn transfers_to_memory_that_others_use_store_nothing_after_their_deadline(bed: Bed) {
    const IN_TIME: Duration = Duration::from_millis(100);
    const PEERS: usize = 3;
    // Fewer than a socket holds.
    const BYTES: usize = 64 << 10;
    let mut room = Room::new(bed, 1 + PEERS);
    if !room.ends[0].limits().copies {
        return println!("skipped: the provider is not one that copies");
    }
    let peers: Vec<Peer> = (1..=PEERS).map(|n| room.peer(0, n)).collect();
    let remotes: Vec<Memory> =
        (1..=PEERS).map(|n| room.ends[n].register(filled(n, MIB), Access::BOTH).unwrap().remote).collect();
    let shared = Shared::new();
    let mut local = room.ends[0].register(shared.region(), Access::LOCAL).unwrap().local;
    let other = room.ends[0].register(filled(9, MIB), Access::LOCAL).unwrap().local;
    let transfer = |local, n: usize| Transfer {
        direction: Direction::ReadInTime,
        local,
        local_offset: n * BYTES,
        remote: remotes[n],
        bytes: BYTES,
    };
    let turns = |room: &mut Room| {
        let end = room.ends[0].now() + Duration::from_millis(200);
        while room.ends[0].now() < end {
            room.turn();
        }
    };
    for (round, first) in
        ["progress", "send", "transfer", "sleep", "forget", "suspect"].into_iter().enumerate()
    {
        let token = |n: usize| 10_000 * (round as u64 + 1) + n as u64;
        for (n, peer) in peers.iter().enumerate() {
            room.until_transfer_works(0, *peer, &transfer(local, n), token(1000 * (n + 1)));
        }
        let arrived = shared.content();
        assert!((0..PEERS).all(|n| arrived[n * BYTES..][..BYTES] == pattern(n + 1, MIB)[..BYTES]));
        let before = pattern(100 + round, MIB);
        assert_eq!(rustix::io::pwrite(&shared.0, &before, 0), Ok(MIB));
        let stop = |room: &Room, stopped| {
            if let Bed::Simulated(network, _) = &room.bed {
                (1..=PEERS).for_each(|n| network.stop(n as u32 + 1, stopped));
            }
        };
        stop(&room, true);
        let deadline = room.ends[0].now() + IN_TIME;
        // One that is not late yet uses the same memory.
        for (n, peer) in peers.iter().enumerate() {
            let deadline = if n == 0 && round > 2 { deadline + Duration::from_secs(60) } else { deadline };
            room.ends[0].transfer(*peer, &transfer(local, n), token(n), deadline).unwrap();
        }
        while room.ends[0].now() < deadline + Duration::from_millis(10) {
            match &room.bed {
                Bed::Simulated(network, _) => network.turn(),
                Bed::Libfabric(_) => {
                    room.ends[1..].iter_mut().for_each(|end| {
                        end.progress(&mut |_| {});
                    });
                }
            }
        }
        stop(&room, false);
        let soon = room.soon(0);
        match first {
            "send" => room.ends[0].send(peers[0], 7, b"message", token(90), soon).unwrap(),
            "transfer" => {
                let transfer = Transfer { direction: Direction::Read, ..transfer(other, 0) };
                room.ends[0].transfer(peers[0], &transfer, token(90), soon).unwrap();
            }
            "sleep" => drop(room.ends[0].may_sleep()),
            "forget" => room.ends[0].forget(peers[0]),
            "suspect" => room.ends[0].suspect(),
            _ => room.turn(),
        }
        let late = 1..PEERS;
        let is_as_it_was = || {
            let content = shared.content();
            late.clone().all(|n| content[n * BYTES..][..BYTES] == before[n * BYTES..][..BYTES])
        };
        assert!(is_as_it_was(), "stored within the call: {first}");
        for n in late.clone() {
            let (code, why) = room.outcome(0, token(n)).unwrap_err();
            assert_eq!(code, Code::TimedOut, "{why}");
        }
        println!("{first}: the other one {:?}", room.outcome(0, token(0)));
        turns(&mut room);
        assert!(is_as_it_was(), "stored later, after: {first}");
        room.told.iter_mut().for_each(Vec::clear);
        if !room.ends[0].is_registered(local) {
            let refused = room.ends[0].transfer(peers[1], &transfer(local, 1), token(91), soon);
            assert_eq!(refused, Err(Code::Fault));
            local = room.ends[0].register(shared.region(), Access::LOCAL).unwrap().local;
        }
        if first == "forget" {
            let address = room.ends[1].address().to_vec();
            assert_eq!(room.ends[0].connect(&address), Ok(peers[0]));
        }
        // One whose deadline has passed already is not started.
        let now = room.ends[0].now();
        room.ends[0].transfer(peers[1], &transfer(local, 1), token(92), now).unwrap();
        assert_eq!(room.outcome(0, token(92)).unwrap_err().0, Code::TimedOut);
        turns(&mut room);
        assert!(is_as_it_was());
    }
}

macro_rules! suite {
    ($($name:ident),* $(,)?) => {
        mod simulated {
            $(#[test] fn $name() { super::$name(super::Bed::simulated().unwrap()); })*
        }
        mod tcp {
            $(#[test] fn $name() {
                if let Some(bed) = super::Bed::libfabric("tcp;ofi_rxm", super::Waiting::Events, false) { super::$name(bed); }
            })*
        }
        mod tcp_spinning {
            $(#[test] fn $name() {
                if let Some(bed) = super::Bed::libfabric("tcp;ofi_rxm", super::Waiting::Spinning, false) { super::$name(bed); }
            })*
        }
        mod tcp_registered {
            $(#[test] fn $name() {
                if let Some(bed) = super::Bed::libfabric("tcp;ofi_rxm", super::Waiting::Events, true) { super::$name(bed); }
            })*
        }
        mod other_provider {
            /// `FOREBAY_PROVIDER=verbs;ofi_rxm` runs the suite over the network of the machine at hand.
            fn bed() -> Option<super::Bed> {
                super::Bed::libfabric(&std::env::var("FOREBAY_PROVIDER").ok()?, super::Waiting::Events, false)
            }
            $(#[test] fn $name() { if let Some(bed) = bed() { super::$name(bed); } })*
        }
    };
}

suite! {
    messages_of_every_size_arrive_whole_and_in_order,
    many_peers_talk_at_once,
    transfers_move_exactly_what_was_asked,
    messages_come_when_what_was_written_before_them_is_there,
    transfers_that_are_not_allowed_are_refused,
    nobody_there_fails_in_time_and_others_go_on,
    endpoint_that_starts_again_is_reached_again,
    addresses_that_are_none_are_refused,
    forgotten_peer_comes_back_when_connected,
    transfers_to_memory_that_others_use_store_nothing_after_their_deadline,
}

#[test]
fn wait_returns_for_messages_for_the_waker_and_at_its_timeout() {
    let Some(Bed::Libfabric(settings)) = Bed::libfabric("tcp;ofi_rxm", Waiting::Events, false) else {
        return;
    };
    let mut receiver = LibfabricEndpoint::open(settings.clone()).unwrap();
    assert!(receiver.descriptor().is_some());
    let address = receiver.address().to_vec();
    let waker = receiver.waker().clone();
    let start = receiver.now();
    while receiver.now() - start < Duration::from_millis(50) {
        receiver.progress(&mut |e| panic!("{e:?}"));
        receiver.wait(Duration::from_millis(50));
    }
    let thread = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        waker.wake();
        let mut sender = LibfabricEndpoint::open(settings).unwrap();
        let to = sender.connect(&address).unwrap();
        let deadline = sender.now() + Duration::from_secs(5);
        sender.send(to, 1, b"wake up", 1, deadline).unwrap();
        let mut done = false;
        while !done && sender.now() < deadline {
            sender.progress(&mut |e| done |= matches!(e, Event::Done { .. }));
            sender.wait(Duration::from_millis(100));
        }
        assert!(done);
        std::thread::sleep(Duration::from_millis(200));
    });
    let mut received = false;
    while !received {
        receiver.progress(&mut |e| received |= matches!(e, Event::Received { bytes: b"wake up", .. }));
        if !received {
            receiver.wait(Duration::from_secs(5));
        }
        assert!(receiver.now() - start < Duration::from_secs(4), "slept through");
    }
    // While the peer is connected and silent, waiting sleeps. While a connection is being made, the provider needs
    // calls.
    let (idle, mut rounds) = (receiver.now() + Duration::from_millis(50), 0);
    while receiver.now() < idle + Duration::from_millis(100) {
        receiver.progress(&mut |e| panic!("{e:?}"));
        receiver.wait(Duration::from_millis(20));
        rounds += u32::from(receiver.now() > idle);
    }
    println!("{rounds} rounds");
    assert!(rounds < 100, "it spun instead of sleeping: {rounds} rounds");
    thread.join().unwrap();
}

#[test]
fn provider_that_is_none_is_refused_with_a_hint() {
    if let Some(why) = libfabric::unusable() {
        return println!("skipped: {why}");
    }
    let settings = Settings { provider: Some("semaphore".to_owned()), ..Settings::default() };
    let error = LibfabricEndpoint::open(settings).map(|_| ()).unwrap_err();
    assert!(
        error.to_string().contains("provider semaphore") && error.to_string().contains("fi_info"),
        "{error}"
    );
    let auto =
        LibfabricEndpoint::open(Settings { host: Some("127.0.0.1".to_owned()), ..Settings::default() })
            .unwrap();
    println!("auto chose {}", auto.provider());
}

#[test]
fn who_uses_an_endpoint_while_another_thread_sleeps_for_it_leaves_nothing_that_does_not_wake_it() {
    let Some(Bed::Libfabric(settings)) = Bed::libfabric("tcp;ofi_rxm", Waiting::Events, false) else {
        return;
    };
    let mut receiver = LibfabricEndpoint::open(settings.clone()).unwrap();
    let mut sender = LibfabricEndpoint::open(settings).unwrap();
    let to = sender.connect(receiver.address()).unwrap();
    let long = Duration::from_secs(5);
    let mut received = 0;
    for number in 0..20 {
        let sleep = loop {
            receiver.progress(&mut |event| received += u32::from(matches!(event, Event::Received { .. })));
            if let Some(sleep) = receiver.falls_asleep(long) {
                break sleep;
            }
        };
        // If the message arrived before the receiver slept, it was received already.
        assert_eq!(received, number);
        let sleeper = std::thread::spawn(move || {
            let started = std::time::Instant::now();
            sleep.sleep();
            started.elapsed()
        });
        std::thread::sleep(Duration::from_millis(5));
        loop {
            receiver.progress(&mut |event| received += u32::from(matches!(event, Event::Received { .. })));
            if receiver.may_sleep() {
                break;
            }
        }
        let deadline = sender.now() + long;
        sender.send(to, 1, b"wake up", 1, deadline).unwrap();
        while !sleeper.is_finished() {
            sender.progress(&mut |event| assert!(!matches!(event, Event::Failed { .. }), "{event:?}"));
            std::thread::yield_now();
        }
        assert!(sleeper.join().unwrap() < long / 2, "message {number} woke nobody");
        // Making the connection takes several wake-ups.
        let until = std::time::Instant::now() + long;
        while received == number && std::time::Instant::now() < until {
            sender.progress(&mut |_| {});
            receiver.progress(&mut |event| received += u32::from(matches!(event, Event::Received { .. })));
        }
    }
}
