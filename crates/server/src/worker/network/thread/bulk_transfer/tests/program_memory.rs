//! Memory of programs: its registration in rounds, its limits, its quarantine.

use super::*;

#[test]
fn memory_of_programs_is_withdrawn_by_its_session_alone_and_a_buffer_does_not_replace_it() {
    let network = Network::new(1, Faults::NONE);
    let (mut client, _told, _no_jobs) = thread(&network, CLIENTS, 1);
    let (one, two) = (session_on(CLIENTS, 9), session_on(CLIENTS, 10));
    let memory = || Region::new(4096).unwrap();
    for number in 1..=PROGRAM_MEMORIES_MAX as u64 {
        client.accept_program_memory(one, number, memory()).unwrap();
    }
    assert_eq!(client.accept_program_memory(one, 999, memory()), Err(Code::NoResources));
    client.accept_program_memory(two, 1000, memory()).unwrap();
    client.add_buffer(one, 1001, memory());
    // A process chooses the number: it is not one that is there.
    assert_eq!(client.accept_program_memory(two, 2, memory()), Err(Code::Exists));
    client.withdraw_memory(two, 1);
    client.withdraw_memory(one, 1001);
    assert_eq!(client.moves.buffers.len(), PROGRAM_MEMORIES_MAX + 2);
    client.withdraw_memory(one, 1);
    client.accept_program_memory(one, 999, memory()).unwrap();
    client.retire_buffers(one);
    // They are refused at once, and unregistered a few at a time.
    assert_eq!(client.moves.buffers.len(), PROGRAM_MEMORIES_MAX + 1);
    let refused = client.moves.buffers.values().filter(|buffer| buffer.session == one && buffer.retired);
    assert_eq!(refused.count(), PROGRAM_MEMORIES_MAX);
    client.round();
    let left = PROGRAM_MEMORIES_MAX + 1 - PROGRAM_MEMORIES_RETIRED_A_ROUND;
    assert_eq!(client.moves.buffers.len(), left);
    while client.moves.buffers.len() > 1 {
        assert_eq!(client.round(), Round::Busy);
    }
    assert!(client.moves.buffers.contains_key(&1000));
    assert!(client.moves.quarantined.is_empty());
}

#[test]
fn memory_of_programs_in_quarantine_takes_no_place_of_a_buffer() {
    let network = Network::new(1, Faults::NONE);
    let (mut client, _told, _no_jobs) = thread(&network, CLIENTS, 1);
    let (one, two) = (session_on(CLIENTS, 9), session_on(CLIENTS, 10));
    let memory = || Region::new(4096).unwrap();
    for number in 1..=PROGRAM_MEMORIES_QUARANTINED_MAX as u64 {
        client.accept_program_memory(one, number, memory()).unwrap();
        client.retire_buffer(number, true);
    }
    assert_eq!(client.moves.quarantined.len(), PROGRAM_MEMORIES_QUARANTINED_MAX);
    assert_eq!(client.accept_program_memory(two, 1000, memory()), Err(Code::NoResources));
    client.add_buffer(two, 1001, memory());
    assert!(client.moves.buffers.contains_key(&1001));
    client.end_quarantines(client.calls.now() + Duration::from_millis(QUARANTINE_MS));
    client.accept_program_memory(two, 1000, memory()).unwrap();
}

#[test]
fn quarantine_of_memory_that_was_withdrawn_or_whose_process_has_ended_keeps_no_pages() {
    let network = Network::new(1, Faults::NONE);
    let (mut client, _told, _no_jobs) = thread(&network, CLIENTS, 1);
    let session = session_on(CLIENTS, 9);
    let written = |client: &mut NetworkThread, number: u64| {
        let memory = Region::new(4096).unwrap();
        memory.write_at(0, b"x").unwrap();
        client.accept_program_memory(session, number, memory).unwrap();
    };
    let is_kept = |client: &NetworkThread, number: u64| {
        let mut first = [0];
        let one = client.moves.quarantined.iter().find(|one| one.number == number).unwrap();
        one.memory.read_at(0, &mut first).unwrap();
        first == *b"x"
    };
    // Withdrawn after its request has failed, before, and not at all.
    (1..=3).for_each(|number| written(&mut client, number));
    client.retire_buffer(1, true);
    assert!(is_kept(&client, 1));
    client.withdraw_memory(session_on(CLIENTS, 10), 1);
    assert!(is_kept(&client, 1), "another process's session");
    client.withdraw_memory(session, 1);
    client.moves.buffers.get_mut(&2).unwrap().flights = 1;
    client.withdraw_memory(session, 2);
    client.moves.buffers.get_mut(&2).unwrap().flights = 0;
    client.retire_buffer(2, true);
    client.retire_buffer(3, true);
    assert_eq!([1, 2, 3].map(|number| is_kept(&client, number)), [false, false, true]);
    // Its process ends while a request is in flight.
    written(&mut client, 4);
    client.moves.buffers.get_mut(&4).unwrap().flights = 1;
    client.retire_buffers(session);
    assert!(!is_kept(&client, 3));
    client.round();
    client.moves.buffers.get_mut(&4).unwrap().flights = 0;
    client.retire_buffer(4, true);
    assert!(!is_kept(&client, 4));
}

/// Adds memory of a program. Returns the receiver of the outcome.
fn add(client: &mut NetworkThread, session: u64, number: u64, bytes: usize) -> Receiver<Result<(), Code>> {
    let (outcome, is_done) = channel();
    client.add_program_memory(session, number, Region::new(bytes).unwrap(), outcome);
    is_done
}

/// Runs rounds until there is no work.
fn run_all(client: &mut NetworkThread) {
    let is_idle = (0..1000).any(|_| client.round() != Round::Busy);
    assert!(is_idle, "there is always work");
}

/// Memory that is still to be unregistered.
fn unregistering(client: &NetworkThread) -> usize {
    client.moves.unregistering.of_programs(0).1
}

#[test]
fn large_memory_is_registered_and_unregistered_in_steps_with_other_work_between_them() {
    const STEPS: usize = 4;
    let network = Network::new(1, Faults::NONE);
    let (mut client, _told, _no_jobs) = thread(&network, CLIENTS, 1);
    let (one, two) = (session_on(CLIENTS, 9), session_on(CLIENTS, 10));
    let large = add(&mut client, one, 5, STEPS * REGISTRATION_BYTES);
    for step in 0..STEPS {
        assert!(large.try_recv().is_err(), "{step}");
        // Small memory that arrives meanwhile is registered at once.
        let small = add(&mut client, two, 10 + step as u64, 4096);
        assert_eq!(small.try_recv(), Ok(Ok(())));
        assert_eq!(client.round(), Round::Busy);
    }
    assert_eq!(large.try_recv(), Ok(Ok(())));
    let memory = Arc::downgrade(&client.moves.buffers[&5].memory);
    client.withdraw_memory(one, 5);
    assert!(!client.moves.buffers.contains_key(&5), "it is refused at once");
    for step in 0..STEPS {
        assert!(memory.upgrade().is_some(), "{step}: the endpoint has ranges of it");
        assert_eq!(client.round(), Round::Busy);
    }
    // Another thread unmaps it.
    let is_unmapped = (0..20_000).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        memory.upgrade().is_none()
    });
    assert!(is_unmapped);
}

#[test]
fn round_registers_and_unregisters_bounded_bytes_of_several_memories() {
    const COUNT: u64 = 8;
    let network = Network::new(1, Faults::NONE);
    let (mut client, _told, _no_jobs) = thread(&network, CLIENTS, 1);
    let session = |n: u64| session_on(CLIENTS, 20 + n);
    let large: Vec<_> = (1..=COUNT).map(|n| add(&mut client, session(n), n, REGISTRATION_BYTES)).collect();
    let done = |all: &[Receiver<Result<(), Code>>]| all.iter().filter(|one| one.try_recv().is_ok()).count();
    assert_eq!(done(&large), 0);
    for round in 0..COUNT {
        client.round();
        assert_eq!(done(&large), 1, "{round}");
    }
    let at_once = REGISTRATION_BYTES / BUFFER_BYTES;
    let small: Vec<_> =
        (0..2 * at_once as u64).map(|n| add(&mut client, session(n), 100 + n, BUFFER_BYTES)).collect();
    assert_eq!(done(&small), at_once);
    run_all(&mut client);
    assert_eq!(done(&small), at_once);
    (1..=COUNT).for_each(|n| client.withdraw_memory(session(n), n));
    assert_eq!(unregistering(&client), COUNT as usize);
    client.round();
    assert_eq!(unregistering(&client), COUNT as usize - 1);
    // A round that registers more also unregisters more.
    let small: Vec<_> =
        (0..at_once as u64).map(|n| add(&mut client, session(n), 200 + n, BUFFER_BYTES)).collect();
    let _large = add(&mut client, session(0), 300, REGISTRATION_BYTES);
    client.round();
    assert_eq!((done(&small), unregistering(&client)), (at_once, COUNT as usize - 3));
}

#[test]
fn memory_in_doubt_is_unregistered_before_other_memory() {
    let network = Network::new(1, Faults::NONE);
    let (mut client, _told, _no_jobs) = thread(&network, CLIENTS, 1);
    let session = session_on(CLIENTS, 9);
    let _large = add(&mut client, session, 1, 8 * REGISTRATION_BYTES);
    let _in_doubt = add(&mut client, session, 2, REGISTRATION_BYTES);
    run_all(&mut client);
    client.withdraw_memory(session, 1);
    client.retire_buffer(2, true);
    client.round();
    assert_eq!(Arc::strong_count(&client.moves.quarantined[0].memory), 1, "the endpoint has a range of it");
    assert_eq!(unregistering(&client), 1);
}

#[test]
fn memory_that_is_still_to_be_unregistered_counts_for_the_limits() {
    let network = Network::new(1, Faults::NONE);
    let (mut client, _told, _no_jobs) = thread(&network, CLIENTS, 1);
    let (one, two) = (session_on(CLIENTS, 9), session_on(CLIENTS, 10));
    let small = |client: &mut NetworkThread, session, number| {
        client.accept_program_memory(session, number, Region::new(4096).unwrap()).map(drop)
    };
    let numbers = 1..=PROGRAM_MEMORIES_MAX as u64;
    let _done: Vec<_> = numbers.clone().map(|n| add(&mut client, one, n, BUFFER_BYTES + 4096)).collect();
    run_all(&mut client);
    numbers.for_each(|n| client.withdraw_memory(one, n));
    assert_eq!(small(&mut client, one, 1000), Err(Code::NoResources));
    assert_eq!(small(&mut client, two, 1001), Ok(()));
    client.round();
    assert_eq!(small(&mut client, one, 1000), Ok(()));
    run_all(&mut client);
    // Of few ranges, by their bytes.
    let numbers = 1..=(PROGRAM_MEMORY_ENDED_BYTES_MAX / PROGRAM_MEMORY_BYTES_MAX) as u64 + 1;
    let _done: Vec<_> = numbers.clone().map(|n| add(&mut client, one, n, PROGRAM_MEMORY_BYTES_MAX)).collect();
    run_all(&mut client);
    numbers.for_each(|n| client.withdraw_memory(one, n));
    assert_eq!(small(&mut client, two, 1002), Err(Code::NoResources));
    for _ in 0..PROGRAM_MEMORY_BYTES_MAX / REGISTRATION_BYTES {
        client.round();
    }
    assert_eq!(small(&mut client, two, 1002), Ok(()));
}

#[test]
fn memory_is_registered_no_further_when_its_client_waits_no_longer() {
    let network = Network::new(1, Faults::NONE);
    let (mut client, _told, _no_jobs) = thread(&network, CLIENTS, 1);
    let session = session_on(CLIENTS, 9);
    let large = add(&mut client, session, 1, PROGRAM_MEMORY_BYTES_MAX);
    let behind = add(&mut client, session, 2, 2 * REGISTRATION_BYTES);
    let now = client.calls.now();
    let until: Vec<u64> = client.moves.to_register.iter().map(|one| (one.until - now).as_secs()).collect();
    assert_eq!(until, [5, 1]);
    client.round();
    client.moves.to_register[0].until = client.calls.now();
    client.round();
    assert_eq!(large.try_recv(), Ok(Err(Code::TimedOut)));
    assert!(!client.moves.buffers.contains_key(&1));
    run_all(&mut client);
    assert_eq!(behind.try_recv(), Ok(Ok(())));
    assert_eq!(unregistering(&client), 0);
}

#[test]
fn number_of_memory_that_was_withdrawn_or_has_ended_may_be_given_again_before_it_is_unregistered() {
    const STEPS: usize = 4;
    let network = Network::new(1, Faults::NONE);
    let (mut client, _told, _no_jobs) = thread(&network, CLIENTS, 1);
    let (one, two) = (session_on(CLIENTS, 9), session_on(CLIENTS, 10));
    // Withdrawn before all of it is registered.
    let withdrawn = add(&mut client, one, 6, STEPS * REGISTRATION_BYTES);
    client.round();
    client.withdraw_memory(one, 6);
    let other = add(&mut client, one, 6, STEPS * REGISTRATION_BYTES);
    client.round();
    assert_eq!(withdrawn.try_recv(), Ok(Err(Code::Stale)), "its client waits for an answer");
    assert!(other.try_recv().is_err(), "it has more ranges");
    run_all(&mut client);
    assert_eq!(other.try_recv(), Ok(Ok(())));
    assert!(client.moves.buffers.contains_key(&6));
    // Removed at the end of its last request, before the round that would have retired it.
    client.retire_buffers(one);
    client.retire_buffer(6, false);
    let third = add(&mut client, two, 6, STEPS * REGISTRATION_BYTES);
    run_all(&mut client);
    assert_eq!(third.try_recv(), Ok(Ok(())));
    assert!(client.moves.buffers.contains_key(&6));
}

#[test]
fn read_into_large_memory_arrives_where_two_ranges_meet() {
    let network = Network::new(1, Faults::NONE);
    let (mut client, told, _no_jobs) = thread(&network, CLIENTS, 1);
    let (mut files, _told, jobs) = thread(&network, FILES, 2);
    let stamp = Stamp { session: session_on(CLIENTS, 9), slot: 0, sequence: 1 };
    let (outcome, _is_done) = channel();
    let memory = Region::new(2 * REGISTRATION_BYTES).unwrap();
    client.add_program_memory(stamp.session, 5, memory, outcome);
    run_all(&mut client);
    let id = BackingId { target: u32::from(FILES.0) << 16, ino: Ino(5), number: 0, stripe: 0 };
    for (i, at) in [REGISTRATION_BYTES - 4096, REGISTRATION_BYTES, 2 * REGISTRATION_BYTES - BYTES]
        .into_iter()
        .enumerate()
    {
        let stamp = Stamp { sequence: stamp.sequence + i as u64, ..stamp };
        let wish = Move { kind: MoveKind::Read, offset: 0, bytes: BYTES as u32, buffer: 5, at: at as u32 };
        assert!(client.forward_move(FILES, id, wish, call(stamp, id, wish)));
        let (mut reply, end) = (None, network.now() + NODE_TIMEOUT);
        while reply.is_none() && network.now() < end {
            network.turn();
            client.round();
            files.round();
            while let Some(Job::Move(mut moving)) = jobs.try_take() {
                let DataBuffer::Piece(piece) = &mut moving.room else { panic!("a read into a place") };
                piece.bytes(BYTES).fill(FILLED);
                files.piece_moved(*moving, Ok(BYTES));
            }
            reply = told.try_iter().find_map(|message| match message {
                Message::Answered { stamp: of, reply } if of == stamp => Some(reply),
                _ => None,
            });
        }
        assert_eq!(Reply::decode(&reply.unwrap()), Ok(Reply::Count(BYTES as u64)), "{at}");
        let memory = &client.moves.buffers[&5].memory;
        let mut found = vec![0; BYTES + 2];
        let (before, after) = (1, usize::from(at + BYTES < memory.len()));
        memory.read_at(at - before, &mut found[..before + BYTES + after]).unwrap();
        assert!(found[before..before + BYTES].iter().all(|byte| *byte == FILLED), "{at}");
        assert_eq!(found[before + BYTES], 0, "{at}");
        memory.write_at(at, &vec![0; BYTES]).unwrap();
    }
    let beyond = Move {
        kind: MoveKind::Read,
        offset: 0,
        bytes: 2,
        buffer: 5,
        at: (2 * REGISTRATION_BYTES - 1) as u32,
    };
    let stamp = Stamp { sequence: 9, ..stamp };
    assert!(client.forward_move(FILES, id, beyond, call(stamp, id, beyond)));
    assert!(client.flights.is_empty(), "it is refused");
}

#[test]
fn what_another_node_may_still_read_for_a_write_keeps_its_bytes_when_the_memory_is_freed() {
    for (is_programs, kind, sent, kept) in [
        (true, MoveKind::Write, true, 7),
        (false, MoveKind::Write, true, 7),
        (false, MoveKind::Append, true, 7),
        // No node will write what was read into, or what was not sent.
        (true, MoveKind::Read, true, 0),
        (true, MoveKind::Write, false, 7),
    ] {
        let network = Network::new(1, Faults::NONE);
        let (mut client, _told, _no_jobs) = thread(&network, CLIENTS, 1);
        let stamp = Stamp { session: session_on(CLIENTS, 9), slot: 0, sequence: 1 };
        let (fd, mapping) = memfd_sealed(c"test", BUFFER_BYTES, Seal::Size).unwrap();
        let of_client = Mapping::new(fd.as_fd(), BUFFER_BYTES, true).unwrap();
        // SAFETY: the mapping lives as long as the region, and is sealed.
        let memory = unsafe { Region::foreign(mapping.start(), BUFFER_BYTES, Box::new(mapping)) };
        memory.write_at(0, &[7; 1 << 20]).unwrap();
        match is_programs {
            true => assert_eq!(client.accept_program_memory(stamp.session, 5, memory), Ok(true)),
            false => client.add_buffer(stamp.session, 5, memory),
        }
        let kept_by_node = Arc::clone(&client.moves.buffers[&5].memory);
        let id = BackingId { target: u32::from(FILES.0) << 16, ino: Ino(5), number: 0, stripe: 0 };
        let wish = Move { kind, offset: 0, bytes: BYTES as u32, buffer: 5, at: 8192 };
        assert!(client.forward_move(FILES, id, wish, call(stamp, id, wish)));
        let flights = client.flights.drain().filter_map(|(_, flight)| match flight {
            Flight::Move(asking) => Some(asking),
            _ => None,
        });
        let asking = { flights }.next().unwrap();
        client.move_ended(asking, Err(Code::Io), sent);
        // The program frees its memory, or the process ends.
        match is_programs {
            true => client.withdraw_memory(stamp.session, 5),
            false => client.retire_buffers(stamp.session),
        }
        let first = |at: usize| {
            let mut byte = [0];
            kept_by_node.read_at(at, &mut byte).unwrap();
            byte[0]
        };
        let case = format!("{is_programs} {kind:?} {sent}");
        assert_eq!((first(8192), first(8192 + BYTES - 2)), (kept, kept), "{case}");
        let is_quarantined = !client.moves.quarantined.is_empty();
        assert_eq!(
            (is_quarantined, first(0), first(1 << 19)),
            (sent, u8::from(!sent) * 7, u8::from(!sent) * 7)
        );
        if is_programs && sent {
            // No page is shared with the program any longer.
            // SAFETY: within the mapping.
            unsafe { of_client.copy_in(8192, [9].as_ptr(), 1) };
            assert_eq!(first(8192), kept, "{case}");
        }
    }
}

#[test]
fn quarantine_keeps_bounded_bytes_of_programs_and_leaves_the_oldest() {
    let network = Network::new(1, Faults::NONE);
    let (mut client, _told, _no_jobs) = thread(&network, CLIENTS, 1);
    let session = session_on(CLIENTS, 9);
    for number in 1..=3 {
        let memory = Region::new(PROGRAM_MEMORY_BYTES_MAX).unwrap();
        client.accept_program_memory(session, number, memory).unwrap();
        client.retire_buffer(number, true);
    }
    let free: Vec<bool> = client.moves.quarantined.iter().map(|one| one.is_to_free).collect();
    assert_eq!(free, [true, false, false]);
}

#[test]
fn pages_that_cannot_be_freed_are_kept_and_freed_by_a_later_attempt() {
    let network = Network::new(1, Faults::NONE);
    let (mut client, _told, _no_jobs) = thread(&network, CLIENTS, 1);
    let session = session_on(CLIENTS, 9);
    let memory = Arc::new(Region::new(8192).unwrap());
    memory.write_at(100, b"x").unwrap();
    // It is of no whole pages, so the kernel puts no others in their place.
    client.accept_program_memory(session, 1, Region::part(&memory, 100, 4096).unwrap()).unwrap();
    client.retire_buffer(1, true);
    client.withdraw_memory(session, 1);
    let one = |client: &NetworkThread| {
        let one = &client.moves.quarantined[0];
        (one.is_to_free, one.freeing.has_begun())
    };
    assert_eq!(one(&client), (true, false));
    client.moves.quarantined[0].memory = Arc::new(Region::new(4096).unwrap());
    let now = client.calls.now();
    client.end_quarantines(now + Duration::from_secs(9));
    assert_eq!(one(&client), (true, false));
    client.end_quarantines(now + Duration::from_secs(10));
    assert_eq!(one(&client), (true, true));
}
