//! Transfers between two nodes' network threads over a network that loses messages: data that are acknowledged have
//! arrived.

use std::os::fd::AsFd;
use std::sync::mpsc::{channel, Receiver};
use std::sync::Arc;
use std::time::Duration;

use super::super::Round;
use super::*;
use crate::worker::message::Message;
use crate::worker::network::{queue, KeptOpen, Taker};
use crate::worker::session_id::session_on;
use forebay_fabric::simulated::{Faults, Network};
use forebay_fabric::Region;
use forebay_fabric::{Calls, CallsSettings, Identity};
use forebay_meta::Client;
use forebay_ring::{memfd_sealed, Mapping, Seal};
use forebay_types::limits::{
    BUFFER_BYTES, PROGRAM_MEMORIES_MAX, PROGRAM_MEMORIES_QUARANTINED_MAX, PROGRAM_MEMORIES_RETIRED_A_ROUND,
    PROGRAM_MEMORY_BYTES_MAX, PROGRAM_MEMORY_ENDED_BYTES_MAX, QUARANTINE_MS, REGISTRATION_BYTES,
};
use forebay_types::{BackingOp, Caller, Ino, Request};
use forebay_wire::{Secret, Stamp};

mod direct;
mod program_memory;

const CLIENTS: NodeId = NodeId(1);
const FILES: NodeId = NodeId(2);
const BYTES: usize = 60_000;
/// The byte that fills the file.
const FILLED: u8 = 7;

fn thread(network: &Network, node: NodeId, seed: u64) -> (NetworkThread, Receiver<Message>, Taker) {
    let secret = Secret::new(&(0..32).collect::<Vec<u8>>()).unwrap();
    let identity = Identity { pool: secret.pool(), node, capacity_bytes: 0 };
    let settings = CallsSettings { seed: Some(seed), ..CallsSettings::default() };
    let mut calls = Calls::new(Box::new(network.endpoint(node.0.into())), identity, secret, settings);
    let other = if node == CLIENTS { FILES } else { CLIENTS };
    calls.add_node(other, format!("simulated:{other}").as_bytes()).unwrap();
    let ((_, commands), (to_shard, told), (jobs, asked)) = (channel(), channel(), queue());
    let kept = std::sync::Arc::new(KeptOpen::default());
    (NetworkThread::new(calls, node, Vec::new(), commands, to_shard, (jobs, kept)), told, asked)
}

/// The result of a read.
#[derive(Debug, Default)]
struct Seen {
    /// The reply arrived without its data, and the request was repeated.
    asked_again: bool,
    reply: Option<Vec<u8>>,
    memory: Vec<u8>,
}

fn call(stamp: Stamp, id: BackingId, wish: Move) -> Call {
    let client = Client { session: stamp.session, slot: usize::from(stamp.slot), seq: stamp.sequence };
    let request = Request::Backing { id, op: BackingOp::Move(wish) };
    Call::encode(client, Caller { uid: 0, gid: 0 }, &request).unwrap()
}

/// The node of a process that has requested [`BYTES`] of a file of the other node.
fn asking_client(network: &Network, seed: u64) -> (NetworkThread, Receiver<Message>, Stamp) {
    let (mut client, told, _no_jobs) = thread(network, CLIENTS, seed);
    let stamp = Stamp { session: session_on(CLIENTS, 9), slot: 0, sequence: 1 };
    client.add_buffer(stamp.session, 5, Region::new(BUFFER_BYTES).unwrap());
    let id = BackingId { target: u32::from(FILES.0) << 16, ino: Ino(5), number: 0, stripe: 0 };
    let wish = Move { kind: MoveKind::Read, offset: 0, bytes: BYTES as u32, buffer: 5, at: 4096 };
    assert!(client.forward_move(FILES, id, wish, call(stamp, id, wish)));
    (client, told, stamp)
}

/// Reads [`BYTES`] of a file of `file_bytes`.
fn read(seed: u64, faults: Faults, file_bytes: usize) -> Seen {
    let network = Network::new(seed, Faults::NONE);
    let (mut client, told, stamp) = asking_client(&network, seed);
    let (mut files, _told, jobs) = thread(&network, FILES, seed + 1);
    let (mut seen, end) = (Seen::default(), network.now() + 2 * NODE_TIMEOUT);
    while seen.reply.is_none() && network.now() < end {
        network.turn();
        client.round();
        files.round();
        while let Some(Job::Move(mut moving)) = jobs.try_take() {
            network.set_faults(faults);
            let DataBuffer::Piece(piece) = &mut moving.room else { panic!("a read into a place") };
            piece.bytes(file_bytes).fill(FILLED);
            files.piece_moved(*moving, Ok(file_bytes));
        }
        // One loss is enough.
        if client.flights.values().any(|f| matches!(f, Flight::Move(asking) if asking.canary.is_none())) {
            seen.asked_again = true;
            network.set_faults(Faults::NONE);
        }
        seen.reply = told.try_iter().find_map(|message| match message {
            Message::Answered { stamp: of, reply } if of == stamp => Some(reply),
            _ => None,
        });
        if seen.reply.is_some() {
            // Read at once, without data that arrive later.
            seen.memory = vec![0; BYTES];
            let memory = client.moves.buffers.get(&5).map(|buffer| Arc::clone(&buffer.memory));
            let rested = || client.moves.quarantined.first().map(|one| Arc::clone(&one.memory));
            memory.or_else(rested).unwrap().read_at(4096, &mut seen.memory).unwrap();
        }
    }
    seen
}

#[test]
fn read_of_what_is_there_is_answered_without_asking_again() {
    for bytes in [BYTES, BYTES - 1, 1] {
        let seen = read(1, Faults::NONE, bytes);
        assert_eq!(Reply::decode(&seen.reply.unwrap()), Ok(Reply::Count(bytes as u64)));
        assert!(seen.memory[..bytes].iter().all(|b| *b == FILLED));
        assert!(!seen.asked_again, "{bytes}");
    }
}

#[test]
fn answer_that_comes_without_its_data_is_none() {
    let faults = Faults { drop_permille: 400, reorder: true, ..Faults::NONE };
    let (mut done, mut undone, mut again) = (0, 0, 0);
    for seed in 0..300 {
        let seen = read(seed, faults, BYTES);
        again += u32::from(seen.asked_again);
        let reply = seen.reply.unwrap_or_else(|| panic!("seed {seed}: no answer"));
        match Reply::decode(&reply) {
            Ok(Reply::Count(n)) => {
                done += 1;
                assert_eq!(n, BYTES as u64, "seed {seed}");
                assert!(seen.memory.iter().all(|b| *b == FILLED), "seed {seed}: other bytes than the file's");
            }
            // The client repeats the request with another buffer, or gives up: the program gets no wrong data.
            Err(Code::Fault | Code::Io) => undone += 1,
            other => panic!("seed {seed}: {other:?}"),
        }
    }
    assert!(done > 100 && undone > 10 && again > 10, "{done} done, {undone} not, {again} asked again");
}

#[test]
fn second_answer_of_another_worker_than_the_first_is_none() {
    let mut count = [0; 16];
    let n = Reply::encode(&Ok(Reply::Count(BYTES as u64)), &mut count).unwrap();
    let asked = |client: &mut NetworkThread| {
        let mut flights = client.flights.drain().map(|(_, flight)| flight);
        match (flights.next(), flights.next()) {
            (Some(Flight::Move(asking)), None) => asking,
            other => panic!("{other:?}"),
        }
    };
    for (other, expected) in [(false, Ok(Reply::Count(BYTES as u64))), (true, Err(Code::Fault))] {
        let network = Network::new(1, Faults::NONE);
        let (mut client, told, _) = asking_client(&network, 1);
        let first = asked(&mut client);
        client.move_ended(first, Ok(count[..n].to_vec()), true);
        assert!(told.try_recv().is_err(), "its data have not come");
        if other {
            client.doubt_moves(FILES);
        }
        let second = asked(&mut client);
        client.move_ended(second, Ok(count[..n].to_vec()), true);
        let reply = told.try_iter().find_map(|message| match message {
            Message::Answered { reply, .. } => Some(reply),
            _ => None,
        });
        assert_eq!(Reply::decode(&reply.unwrap()), expected);
    }
}

#[test]
fn memory_of_a_program_is_not_answered_for_while_a_former_worker_may_write_it() {
    let mut count = [0; 16];
    let n = Reply::encode(&Ok(Reply::Count(BYTES as u64)), &mut count).unwrap();
    let done = Ok(Reply::Count(BYTES as u64));
    for (is_programs, kind, is_in_doubt, expected) in [
        (false, MoveKind::Read, true, done),
        (true, MoveKind::Read, false, done),
        (true, MoveKind::Read, true, Err(Code::Fault)),
        (true, MoveKind::Write, true, done),
    ] {
        let network = Network::new(1, Faults::NONE);
        let (mut client, told, _no_jobs) = thread(&network, CLIENTS, 1);
        let stamp = Stamp { session: session_on(CLIENTS, 9), slot: 0, sequence: 1 };
        let memory = Region::new(BUFFER_BYTES).unwrap();
        match is_programs {
            true => assert_eq!(client.accept_program_memory(stamp.session, 5, memory), Ok(true)),
            false => client.add_buffer(stamp.session, 5, memory),
        }
        let id = BackingId { target: u32::from(FILES.0) << 16, ino: Ino(5), number: 0, stripe: 0 };
        let wish = Move { kind, offset: 0, bytes: BYTES as u32, buffer: 5, at: 4096 };
        assert!(client.forward_move(FILES, id, wish, call(stamp, id, wish)));
        if is_in_doubt {
            client.doubt_moves(FILES);
        }
        let moves = client.flights.drain().filter_map(|(_, flight)| match flight {
            Flight::Move(asking) => Some(asking),
            _ => None,
        });
        let mut asking = { moves }.next().unwrap();
        // The data have arrived.
        asking.canary = None;
        client.move_ended(asking, Ok(count[..n].to_vec()), true);
        let reply = told.try_iter().find_map(|message| match message {
            Message::Answered { reply, .. } => Some(reply),
            _ => None,
        });
        assert_eq!(Reply::decode(&reply.unwrap()), expected, "{is_programs} {kind:?} {is_in_doubt}");
        // What is in doubt is used by no further request.
        assert_eq!(client.moves.buffers.contains_key(&5), !is_in_doubt);
        assert_eq!(client.moves.quarantined.len(), usize::from(is_in_doubt));
    }
}

/// The result of writes of [`BYTES`] each, one after the other, in spite of the faults.
#[derive(Debug, Default)]
struct Written {
    done: u32,
    undone: u32,
    /// Writes whose data arrived in an eager buffer.
    ahead: u32,
    /// Writes whose data were sent to an eager buffer, and were fetched.
    fetched: u32,
    /// Writes that would have written other bytes than the writer's.
    wrong: u32,
}

fn write(seed: u64, faults: Faults, trusts_canaries: bool) -> Written {
    let network = Network::new(seed, Faults::NONE);
    let (mut client, told, _no_jobs) = thread(&network, CLIENTS, seed);
    let (mut files, _told, jobs) = thread(&network, FILES, seed + 1);
    files.moves.granted.trusts_canaries = trusts_canaries;
    let id = BackingId { target: u32::from(FILES.0) << 16, ino: Ino(5), number: 0, stripe: 0 };
    let (mut seen, mut buffer, session) = (Written::default(), 0, session_on(CLIENTS, 9));
    for n in 1..=40u8 {
        if !client.moves.buffers.contains_key(&buffer) || client.moves.buffers[&buffer].retired {
            buffer += 1;
            client.add_buffer(session, buffer, Region::new(BUFFER_BYTES).unwrap());
        }
        let memory = Arc::clone(&client.moves.buffers[&buffer].memory);
        memory.write_at(0, &[n; BYTES]).unwrap();
        let stamp = Stamp { session, slot: 0, sequence: n.into() };
        let wish = Move { kind: MoveKind::Write, offset: 0, bytes: BYTES as u32, buffer, at: 0 };
        assert!(client.forward_move(FILES, id, wish, call(stamp, id, wish)));
        let flying = client.flights.values();
        let is_sent = flying.clone().any(|f| matches!(f, Flight::Move(asking) if asking.eager.is_some()));
        // The first write makes the link, and requests eager buffers.
        network.set_faults(if n > 2 { faults } else { Faults::NONE });
        let end = network.now() + 3 * NODE_TIMEOUT;
        let mut reply = None;
        while reply.is_none() && network.now() < end {
            network.turn();
            client.round();
            files.round();
            while let Some(Job::Move(moving)) = jobs.try_take() {
                // SAFETY: of memory that lives as long as the room; no other thread runs.
                let bytes =
                    unsafe { std::slice::from_raw_parts(moving.room.start(BYTES).unwrap().as_ptr(), BYTES) };
                seen.wrong += u32::from(bytes.iter().any(|byte| *byte != n));
                seen.ahead += u32::from(matches!(moving.room, DataBuffer::Eager(_)));
                seen.fetched += u32::from(is_sent && matches!(moving.room, DataBuffer::Piece(_)));
                files.piece_moved(*moving, Ok(BYTES));
            }
            reply = told.try_iter().find_map(|message| match message {
                Message::Answered { stamp: of, reply } if of == stamp => Some(reply),
                _ => None,
            });
        }
        let reply = reply.unwrap_or_else(|| panic!("seed {seed}: no answer to {n}"));
        match Reply::decode(&reply) {
            Ok(Reply::Count(count)) => {
                seen.done += 1;
                assert_eq!(count, BYTES as u64, "seed {seed}");
            }
            Err(Code::Fault | Code::Io) => seen.undone += 1,
            other => panic!("seed {seed}: {other:?}"),
        }
    }
    seen
}

#[test]
fn writes_go_ahead_of_their_requests_as_soon_as_there_are_places() {
    let seen = write(1, Faults::NONE, false);
    assert!(seen.done == 40 && seen.ahead >= 38 && seen.fetched == 0 && seen.wrong == 0, "{seen:?}");
}

#[test]
fn data_that_did_not_come_ahead_are_fetched_and_places_that_are_not_looked_at_hold_others() {
    let faults = Faults { drop_permille: 60, reorder: true, ..Faults::NONE };
    let sum = |trusts_canaries| {
        (0..60).map(|seed| write(seed, faults, trusts_canaries)).fold(Written::default(), |all, one| {
            Written {
                done: all.done + one.done,
                undone: all.undone + one.undone,
                ahead: all.ahead + one.ahead,
                fetched: all.fetched + one.fetched,
                wrong: all.wrong + one.wrong,
            }
        })
    };
    let seen = sum(false);
    assert!(seen.wrong == 0 && seen.done > 1000 && seen.ahead > 200 && seen.fetched > 200, "{seen:?}");
    let trusts_canaries = sum(true);
    assert!(trusts_canaries.wrong > 50, "the defect does not show: {trusts_canaries:?}");
}

#[test]
fn marks_of_neighbours_differ_and_none_is_zero() {
    assert!((0..2000).all(|n| Canary::byte(n) != 0 && Canary::byte(n) != Canary::byte(n + 1)));
}
