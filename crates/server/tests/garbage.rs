//! Sends a daemon random, mutated and well-formed input from peers with and without the pool's secret. The daemon must
//! not panic, and must answer a well-formed request afterwards. The entry points are those of `fuzz/`.

use std::time::{Duration, Instant};

use forebay_fabric::Numbers;
use forebay_server::exercise::{exercise_known, exercise_unknown};
use forebay_types::limits::BACKING_BYTES_MAX;
use forebay_types::{BackingId, BackingOp, BackingRuns, Caller, Ino, Layout, NodeId, Request, SetAttr};
use forebay_wire::{Kind, Message};

/// A piece of an input.
fn piece(what: u8, bytes: &[u8]) -> Vec<u8> {
    let mut all = vec![what];
    all.extend((bytes.len() as u16).to_le_bytes());
    all.extend(bytes);
    all
}

fn body(message: &Message<'_>) -> Vec<u8> {
    let mut body = Vec::new();
    message.encode_to(&mut body).unwrap();
    body
}

/// Well-formed requests, some of which only a daemon sends.
fn requests() -> Vec<Vec<u8>> {
    let (root, theirs) = (Ino::ROOT, Ino::new(NodeId(2), 1));
    let here = BackingId { target: 1 << 16, ino: theirs, number: 0, stripe: 0 };
    let removed = BackingId::list(&[here; 2]);
    let mut list = Vec::new();
    [(5, 2), (0, 1)].iter().for_each(|(offset, bytes)| BackingRuns::add(&mut list, *offset, *bytes));
    let runs = BackingRuns::of(&list).unwrap();
    let all = [
        Request::Lookup { parent: root, name: b"a" },
        Request::GetAttr { ino: root },
        Request::SetAttr { ino: root, set: SetAttr { mode: Some(0o700), ..SetAttr::default() } },
        Request::Create {
            parent: root,
            name: b"a",
            mode: 0o644,
            exclusive: true,
            dirty: true,
            layout: Some(Layout::single(NodeId(2), 0)),
            number: None,
            reserve: true,
        },
        Request::MakeDirectory { parent: root, name: b"b", mode: 0o755 },
        Request::Unlink { parent: root, name: b"a" },
        Request::RemoveDirectory { parent: root, name: b"b" },
        Request::Rename { parent: root, name: b"a", new_parent: root, new_name: b"c", flags: 0 },
        Request::Symlink { parent: root, name: b"s", target: b"t" },
        Request::SetXattr { ino: root, name: b"user.a", value: b"v", flags: 0 },
        Request::ReadDirectory { ino: root, cookie: 0, attributes: true },
        Request::EndSession { session: 2 << 48 | 1 },
        Request::AreThere { sessions: &[2; 16] },
        Request::Backing { id: here, op: BackingOp::Make },
        Request::Backing { id: here, op: BackingOp::Open { handle: 1 } },
        Request::Backing { id: here, op: BackingOp::Write { offset: 3, append: false, bytes: b"data" } },
        Request::Backing { id: here, op: BackingOp::Write { offset: 0, append: true, bytes: b"more" } },
        Request::Backing { id: here, op: BackingOp::Read { offset: 0, bytes: BACKING_BYTES_MAX as u32 } },
        Request::Backing { id: here, op: BackingOp::ReadRuns { runs } },
        Request::Backing { id: here, op: BackingOp::WriteRuns { runs, bytes: b"abc" } },
        Request::Backing { id: here, op: BackingOp::Truncate { bytes: 1 << 40 } },
        Request::RemoveBackings { ids: &removed },
    ];
    let caller = Caller { uid: 0, gid: 0 };
    all.iter().map(|request| body(&Message::Ask(caller, *request))).collect()
}

/// Pieces from which inputs are made: requests and bodies of all kinds for a peer with the secret, frames for one
/// without.
fn corpus(known: bool) -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = Vec::new();
    if !known {
        all.extend([piece(0, b""), piece(1, &[20, 1, 30, 255]), piece(1, &[60, 8])]);
        all.push(piece(2, b"FBAY\x01\x00\x0a\x00\x04\x00\x00\x00"));
        return all;
    }
    for request in requests() {
        for what in [2, 6, 18, 34] {
            all.push(piece(what, &request));
        }
    }
    for (i, _) in Kind::ALL.iter().enumerate() {
        all.push(piece(0, &[i as u8, 1, 2, 3, 4, 5, 6, 7]));
    }
    all.push(piece(1, &[0; 40]));
    all
}

fn input(numbers: &mut Numbers, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut input = Vec::new();
    for _ in 0..1 + numbers.below(12) {
        let mut piece = corpus[numbers.below(corpus.len() as u64) as usize].clone();
        match numbers.below(4) {
            0 => {
                // A random selector and random bytes.
                let bytes: Vec<u8> = (0..numbers.below(160)).map(|_| numbers.draw() as u8).collect();
                piece = self::piece(numbers.draw() as u8, &bytes);
            }
            1 | 2 if piece.len() > 3 => {
                for _ in 0..1 + numbers.below(4) {
                    let at = 3 + numbers.below(piece.len() as u64 - 3) as usize;
                    piece[at] = [0, 1, 0x7f, 0xff, numbers.draw() as u8][numbers.below(5) as usize];
                }
            }
            _ => {}
        }
        input.extend(piece);
    }
    input
}

/// Runs inputs for some seconds. If `exercise` panics, the message contains the input.
fn run(known: bool, exercise: fn(&[u8])) {
    let seed = std::env::var("FOREBAY_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(7);
    let (mut numbers, corpus, start) = (Numbers::new(seed), corpus(known), Instant::now());
    let mut rounds = 0;
    while rounds < 20 || start.elapsed() < Duration::from_secs(5) {
        let input = input(&mut numbers, &corpus);
        let survived = std::panic::catch_unwind(|| exercise(&input));
        assert!(survived.is_ok(), "input {rounds} of seed {seed}: {input:02x?}");
        rounds += 1;
    }
    println!("{rounds} inputs, seed {seed}");
}

#[test]
fn daemon_survives_anything_from_a_peer_with_the_secret() {
    // First each well-formed request alone.
    for request in requests() {
        exercise_known(&piece(2, &request));
    }
    run(true, exercise_known);
}

#[test]
fn daemon_keeps_nothing_of_somebody_without_the_secret() {
    run(false, exercise_unknown);
}

/// The canary test: a well-formed request of a peer with the secret does change the shard, so the other test would
/// detect a change by a sender without it.
#[test]
fn exercise_reaches_the_shard() {
    use forebay_server::exercise::inodes_behind;
    let sound = requests().iter().map(|r| inodes_behind(&piece(2, r))).max();
    assert_eq!(sound, Some(2));
}
