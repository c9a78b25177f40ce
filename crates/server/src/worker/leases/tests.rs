use super::*;
use forebay_ring::{Board, Lookup, Mapping};
use forebay_types::{Attr, Layout, Timestamp};
use std::os::fd::AsFd;

const HOME: NodeId = NodeId(1);
const HOLDER: NodeId = NodeId(2);

fn of(session: u64, slot: usize, seq: u64, reply: &[u8]) -> HeldReply {
    HeldReply::Client { client: Client { session, slot, seq }, reply: reply.to_vec() }
}

fn slot_of(held_reply: &HeldReply) -> usize {
    match held_reply {
        HeldReply::Client { client, .. } => client.slot,
        HeldReply::Step { .. } => panic!("no step was held"),
    }
}

fn directory(ino: Ino, mode: u32) -> Entry {
    let t = Timestamp::default();
    let attr = Attr {
        ino,
        size: 0,
        rdev: 0,
        parent: Ino::ROOT,
        mode: Kind::Directory.mode_bits() | mode,
        uid: 0,
        gid: 0,
        nlink: 2,
        flags: 0,
        home: HOME,
        width_log2: 0,
        atime: t,
        mtime: t,
        ctime: t,
        btime: t,
    };
    Entry { attr, layout: Layout::single(HOME, 0) }
}

fn lookup(name: &[u8]) -> Request<'_> {
    Request::Lookup { parent: Ino::ROOT, name }
}

/// Makes a change and begins its revocations, as the shard thread does. Returns what its acknowledgement waits for.
fn change(l: &mut Leases, name: Option<&[u8]>, inode: Option<(Ino, Option<Permissions>)>, now: u64) -> Wait {
    let mut wait = Wait::default();
    let changed = l.changed(name.map(|name| (Ino::ROOT, name)).into_iter(), inode.into_iter());
    for (_, holders) in changed {
        for (node, term) in holders {
            l.begin_recall(node, term, now, &mut wait);
        }
    }
    wait
}

#[test]
fn a_change_waits_for_the_recall_of_what_was_told_while_the_lease_ran() {
    let (mut l, d) = (Leases::new(true), Ino::new(HOME, 9));
    let told = Ok(Reply::Entry(directory(d, 0o755)));
    l.told_at(HOLDER, &lookup(b"d"), &told, 100);
    assert!(
        change(&mut l, Some(b"d"), None, 100).revocations.is_empty(),
        "without a lease nothing is believed"
    );
    let term = l.renew(HOLDER, 100).unwrap();
    l.told_at(HOLDER, &lookup(b"d"), &told, 200);
    let same = permissions(&directory(d, 0o755));
    assert!(change(&mut l, None, Some((d, Some(same))), 200).revocations.is_empty(), "its times changed");
    let wait = change(&mut l, None, Some((d, Some((0, 0, 0)))), 200);
    assert_eq!(wait.revocations.len(), 1, "its mode changed");
    let also = change(&mut l, Some(b"d"), None, 200);
    assert_eq!((also.revocations.len(), also.until), (1, 100 + LEASE_NS));
    assert!(change(&mut l, Some(b"d"), None, 200).revocations.is_empty(), "told once, revoked once");
    assert_eq!(l.renew(HOLDER, 300), Err(Code::Busy), "no change waits for longer than a lease");
    let numbers: Vec<u64> = wait.revocations.iter().chain(&also.revocations).copied().collect();
    l.hold(of(1, 2, 3, b"first"), Vec::new(), wait);
    l.hold(of(1, 3, 3, b"second"), Vec::new(), also);
    assert!(l.due(400).is_empty());
    l.revoked(numbers[1], true);
    assert_eq!(l.due(400).iter().map(|h| slot_of(&h.held_reply)).collect::<Vec<_>>(), [3]);
    l.revoked(numbers[0], false);
    assert!(l.due(500).is_empty(), "it was not answered");
    assert_eq!(l.due(101 + LEASE_NS).len(), 1, "but nobody believes it any more");
    assert_ne!(l.renew(HOLDER, 101 + LEASE_NS), Ok(term), "what was told in the old term is void");
}

#[test]
fn a_worker_that_follows_another_acknowledges_no_change_of_directories_for_one_lease() {
    let mut l = Leases::new(false);
    let now = lease_clock();
    assert!(!l.is_idle(now));
    let wait = Wait { not_before: l.cautious_until, ..Wait::default() };
    l.hold(of(1, 2, 3, b"reply"), Vec::new(), wait);
    assert!(l.due(now).is_empty());
    assert!(l.next_timeout_ms().is_some_and(|ms| ms > 0 && ms <= LEASE_MS + 1));
    assert_eq!(l.due(now + LEASE_NS + 1_000_000_000).len(), 1);
}

#[test]
fn what_is_told_is_shown_until_it_is_recalled_overtaken_or_of_another_term() {
    let (fd, mut board) = BoardWriter::create(1 << 20).unwrap();
    board.set_node(HOLDER);
    let reader = Board::open(Mapping::new(fd.as_fd(), board.bytes(), false).unwrap()).unwrap();
    let (mut l, d) = (Leases::new(true), Ino::new(HOME, 9));
    let told = Ok(Reply::Entry(directory(d, 0o711)));
    let mut sequence = 0;
    let mut look =
        |l: &mut Leases, board: &mut BoardWriter, meanwhile: &dyn Fn(&mut Leases, &mut BoardWriter)| {
            sequence += 1;
            let stamp = Stamp { session: 5, slot: 0, sequence };
            l.looks(stamp, HOME, &lookup(b"d"));
            meanwhile(l, board);
            l.looked(stamp, &told, board)
        };
    let nothing = |_: &mut Leases, _: &mut BoardWriter| {};
    let shown = || matches!(reader.lookup(Ino::ROOT, b"d"), Lookup::Hit(found) if found.ino == d);
    let end = lease_clock() + 3600 * 1_000_000_000;
    assert_eq!(look(&mut l, &mut board, &nothing), Some(HOME), "a lease is wanted");
    assert!(!shown(), "there is none yet");
    l.renewed(HOME, Some((4, end)), &mut board);
    assert_eq!(look(&mut l, &mut board, &nothing), None);
    assert!(shown() && reader.permissions(d) == Some((0o040_711, 0, 0)));
    assert!(reader.inode(d).is_none(), "the rest of its attributes is its home's to tell");
    board.lease(HOME, lease_clock() - 1);
    assert!(!shown() && reader.permissions(d).is_none(), "the lease has run out");
    l.renewed(HOME, Some((4, end)), &mut board);
    assert!(shown(), "and was renewed");
    let revoke = |l: &mut Leases, board: &mut BoardWriter| {
        l.take_back(HOME, &Request::RevokeName { parent: Ino::ROOT, name: b"d" }, board).unwrap();
    };
    revoke(&mut l, &mut board);
    assert!(!shown(), "revoked");
    look(&mut l, &mut board, &revoke);
    assert!(!shown(), "a revocation overtook the answer");
    look(&mut l, &mut board, &nothing);
    assert!(shown());
    l.take_back(HOME, &Request::RevokeDirectory { ino: d }, &mut board).unwrap();
    assert!(!shown() && reader.permissions(d).is_none());
    look(&mut l, &mut board, &nothing);
    l.renewed(HOME, Some((5, end)), &mut board);
    assert!(!shown() && reader.permissions(d).is_none(), "another term");
    let foreign = Request::RevokeDirectory { ino: Ino::new(NodeId(3), 1) };
    assert_eq!(l.take_back(HOME, &foreign, &mut board), Err(Code::Malformed), "another's to revoke");
}

#[test]
fn what_was_told_under_a_lease_that_ended_is_freed() {
    let (mut l, d) = (Leases::new(true), Ino::new(HOME, 9));
    let told = Ok(Reply::Entry(directory(d, 0o755)));
    let other = NodeId(3);
    l.renew(HOLDER, 100).unwrap();
    l.renew(other, 200).unwrap();
    for node in [HOLDER, other] {
        l.told_at(node, &lookup(b"d"), &told, 300);
    }
    l.told_at(HOLDER, &lookup(b"e"), &told, 300);
    l.free_ended(100 + LEASE_NS);
    assert_eq!((l.names.len(), l.directories.len()), (2, 1), "they run still");
    l.free_ended(101 + LEASE_NS);
    assert_eq!((l.names.len(), l.directories.len()), (1, 1), "one has ended");
    assert_eq!(change(&mut l, Some(b"d"), None, 102 + LEASE_NS).revocations.len(), 1, "and is not asked");
    l.free_ended(201 + LEASE_NS);
    assert!(
        l.names.is_empty() && l.directories.is_empty() && l.given.is_empty() && l.is_idle(301 + LEASE_NS)
    );
}
