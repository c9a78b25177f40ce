//! The removal of the backing files of removed files, here and on other nodes, when processes are killed in between.

use super::*;

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
