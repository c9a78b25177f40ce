//! Every message survives encoding and decoding, every limit refuses what exceeds it, and only a node with the secret
//! gets a session.

use forebay_types::limits::{FILE_BYTES_MAX, PATH_MAX};
use forebay_types::{
    Attr, BackingAttr, BackingId, BackingOp, Caller, Code, DirEntries, DirEntry, DirWriter, Entry, Ino,
    Kind as FileKind, Layout, NodeId, Outcome, Part, Parts, PoolSpace, Refusal, Reply, Request, SetAttr,
    TimeSet, Timestamp, TxId,
};
use forebay_wire::limits::*;
use forebay_wire::{
    respond, Answer, DataLocation, Header, Hello, Initiator, Kind, Memory, Message, Response, Secret,
    Session, Stamp,
};
use proptest::prelude::*;

fn hello(n: u16) -> Hello {
    Hello {
        protocols: (PROTOCOL_MIN, PROTOCOL_MAX),
        pool: [7; 16],
        node: NodeId(n),
        incarnation: 1000 + n as u64,
        link: 50 + n as u64,
        capacity_bytes: 1 << 40,
        clock_us: 1_700_000_000_000_000,
        nonce: [n as u8; 32],
        address: format!("address of {n}").into_bytes(),
    }
}

fn secret(first: u8) -> Secret {
    Secret::new(&(first..first + 32).collect::<Vec<_>>()).unwrap()
}

/// Both ends of a session.
fn sessions() -> (Session, Session) {
    let (key, mut out) = (secret(1), Vec::new());
    let initiator = Initiator::start(&key, hello(1)).unwrap();
    let Ok(Response::Welcome(peer, theirs)) = respond(&key, &hello(2), initiator.frame(), &mut out) else {
        panic!("refused")
    };
    assert_eq!(peer, hello(1));
    let Ok(Answer::Welcome(peer, mine)) = initiator.finish(&key, &out) else { panic!("not finished") };
    assert_eq!(peer, hello(2));
    (*mine, *theirs)
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>().prop_map(|b| if b == b'/' || b == 0 { b'x' } else { b }), 1..=255)
        .prop_map(|name| if name == b"." || name == b".." { b"dots".to_vec() } else { name })
}

fn stripe() -> impl Strategy<Value = BackingId> {
    (any::<u32>(), any::<u64>(), 0u8..3, 0u16..256).prop_map(|(target, ino, number, stripe)| BackingId {
        target,
        ino: Ino(ino),
        number,
        stripe,
    })
}

fn attr(ino: u64, mode: u32) -> Attr {
    let t = Timestamp { sec: -5, nsec: 7 };
    Attr {
        ino: Ino(ino),
        size: ino / 3,
        rdev: 4,
        parent: Ino::ROOT,
        mode: 0o100_000 | mode & 0o7777,
        uid: 6,
        gid: 7,
        nlink: 8,
        flags: 1,
        home: NodeId(10),
        width_log2: 1,
        atime: t,
        mtime: t,
        ctime: t,
        btime: t,
    }
}

/// Numbers and bytes from which each kind of message takes its fields.
#[derive(Clone, Debug)]
struct Seed {
    a: u64,
    b: u64,
    c: u32,
    flag: bool,
    name: Vec<u8>,
    other: Vec<u8>,
    data: Vec<u8>,
    stripe: BackingId,
}

fn seed() -> impl Strategy<Value = Seed> {
    let data = proptest::collection::vec(any::<u8>(), 2..2000);
    (any::<u64>(), any::<u64>(), any::<u32>(), any::<bool>(), name(), name(), data, stripe()).prop_map(
        |(a, b, c, flag, name, other, data, stripe)| Seed { a, b, c, flag, name, other, data, stripe },
    )
}

fn requests(s: &Seed) -> Vec<Request<'_>> {
    let (ino, parent, name, tx) = (Ino(s.a), Ino(s.b), &s.name[..], TxId(s.b));
    let time = TimeSet::At(Timestamp { sec: s.a as i64, nsec: s.c % 1_000_000_000 });
    let set = SetAttr {
        mode: Some(s.c & 0o7777),
        uid: s.flag.then_some(s.c),
        size: Some(s.a),
        atime: time,
        ..SetAttr::default()
    };
    let layout = s.flag.then(|| Layout::overstriped(NodeId(3), 1, 1 + (s.c % 256) as u16, 4096).unwrap());
    let (number, stripe) = (u8::from(s.flag), (s.c % 256) as u16);
    let backing = BackingId { target: s.c, ino, number, stripe };
    let target: Vec<u8> = s.data.iter().map(|b| (*b).max(1)).take(PATH_MAX).collect();
    let target: &'static [u8] = Box::leak(target.into_boxed_slice());
    vec![
        Request::Ping,
        Request::Space,
        Request::Lookup { parent, name },
        Request::GetAttr { ino },
        Request::SetAttr { ino, set },
        Request::Create {
            parent,
            name,
            mode: s.c & 0o7777,
            exclusive: s.flag,
            dirty: !s.flag,
            layout,
            number: s.flag.then_some(ino),
            reserve: s.flag,
        },
        Request::MakeDirectory { parent, name, mode: s.c & 0o7777 },
        Request::Symlink { parent, name, target },
        Request::Link { ino, parent, name },
        Request::Unlink { parent, name },
        Request::RemoveDirectory { parent, name },
        Request::Rename { parent, name, new_parent: ino, new_name: &s.other, flags: s.c % 3 },
        Request::ReadDirectory { ino, cookie: s.b >> 1, attributes: s.flag },
        Request::ReadLink { ino },
        Request::GetXattr { ino, name },
        Request::SetXattr { ino, name, value: &s.data, flags: s.c % 3 },
        Request::ListXattr { ino },
        Request::RemoveXattr { ino, name },
        Request::MarkDirty { ino },
        Request::SetLayout { ino, layout: Layout::single(NodeId(2), 1) },
        Request::MakeBacking { ino },
        Request::PathOf { ino },
        Request::Reserve,
        Request::MakeDirectoryAt { node: NodeId(s.c as u16), parent, name, mode: s.c & 0o7777 },
        Request::MoveDirectory { parent, name, new_parent: ino, new_name: &s.other, flags: s.c % 2, ino },
        Request::Prepare { tx, index: s.c as u8, part: Part::Leave { parent, name, ino, link: tx } },
        Request::Prepare {
            tx,
            index: 0,
            part: Part::Enter { parent, name, ino, kind: FileKind::File, link: tx, flags: s.c % 2 },
        },
        Request::Prepare { tx, index: 1, part: Part::Count { ino, link: tx } },
        Request::Prepare { tx, index: 2, part: Part::CreateInode { parent, mode: s.c & 0o7777 } },
        Request::Prepare { tx, index: 3, part: Part::Move { ino, parent } },
        Request::Prepare { tx, index: 4, part: Part::Condemn { ino } },
        Request::Prepare { tx, index: 5, part: Part::Climb { from: ino, avoid: parent } },
        Request::Prepare { tx, index: 6, part: Part::Widen { ino, parts: None } },
        Request::Finish { tx, commit: s.flag },
        Request::AskOutcome { tx },
        Request::Decide { tx, nodes: &s.data[..2], reply: &s.data },
        Request::DropLink { ino, link: tx },
        Request::Touch { ino },
        Request::IsLed { ino, parent, link: tx },
        Request::LeadsTo { node: NodeId(s.c as u16), parent, cookie: s.b },
        Request::NameOf { parent, ino },
        Request::SetWidth { ino, width: s.c as u16 },
        Request::PartsOf { ino },
        Request::EndSession { session: s.a },
        Request::AreThere { sessions: &[1; 16] },
        Request::RemoveBackings { ids: &[0; 30] },
        Request::Backing { id: backing, op: BackingOp::Stat },
        Request::Backing { id: backing, op: BackingOp::Read { offset: s.b >> 20, bytes: s.c % 65_537 } },
        Request::Backing {
            id: backing,
            op: BackingOp::Write { offset: s.b >> 20, append: s.flag, bytes: &s.data },
        },
        Request::Backing { id: backing, op: BackingOp::SetTimes { atime: time, mtime: TimeSet::Now } },
    ]
}

fn replies(s: &Seed) -> Vec<forebay_types::Answer<'_>> {
    let entry = Entry { attr: attr(s.a, s.c), layout: Layout::single(NodeId(3), 1) };
    let mut raw = vec![0; 1000];
    let mut w = DirWriter::new(&mut raw);
    assert!(w.push(&DirEntry {
        cookie: s.a,
        ino: Ino(s.b),
        kind: FileKind::File,
        name: &s.name,
        attr: s.flag.then_some(entry.attr)
    }));
    let n = w.len();
    raw.truncate(n);
    let bytes: &'static [u8] = Box::leak(raw.into_boxed_slice());
    let mut all = vec![
        Ok(Reply::Done),
        Ok(Reply::Entry(entry)),
        Ok(Reply::Created { entry, created: s.flag, next: (s.a != 0).then_some(Ino(s.a)) }),
        Ok(Reply::Removed { ino: Ino(s.a), last: s.flag, kind: FileKind::File, layout: entry.layout }),
        Ok(Reply::Bytes(&s.data)),
        Ok(Reply::Entries(DirEntries { bytes, end: s.flag })),
        Ok(Reply::Space(PoolSpace { total_bytes: s.a, free_bytes: s.b, inodes: 3, free_inodes: 4 })),
        Ok(Reply::Number(Ino(s.a))),
        Ok(Reply::Elsewhere { ino: Ino(s.a), kind: FileKind::Directory }),
        Ok(Reply::PartOfPath { top: Ino(s.a), parent: Ino(s.b), path: &s.name }),
        Ok(Reply::Backing(BackingAttr { bytes: s.a, allocated_bytes: s.b, ..BackingAttr::default() })),
        Ok(Reply::Count(s.a)),
        Err(Refusal::Wide(
            Parts::new(Ino(1), &[Ino::part(NodeId(1), s.b >> 20), Ino::part(NodeId(2), s.c.into())]).unwrap(),
        )),
        Ok(Reply::Outcome(Outcome::Undecided)),
    ];
    all.extend(Code::ALL.map(|code| Err(code.into())));
    all
}

fn messages(s: &Seed) -> Vec<Message<'_>> {
    let caller = Caller { uid: s.c, gid: !s.c };
    let bytes = 1 + s.b % DATA_BYTES_MAX;
    let offset = s.a % (FILE_BYTES_MAX - DATA_BYTES_MAX);
    let memory = DataLocation::Remote(Memory { address: s.a >> 1, key: s.b });
    let inline = 1 + s.b % INLINE_BYTES_MAX as u64;
    let (stripe, detail) = (s.stripe, &s.data[..s.data.len().min(DETAIL_BYTES_MAX)]);
    let mut all: Vec<Message<'_>> = requests(s).into_iter().map(|r| Message::Ask(caller, r)).collect();
    all.extend(replies(s).into_iter().map(Message::Answer));
    all.extend([
        Message::Finish,
        Message::ReadStripe { id: stripe, offset, bytes: inline, to: DataLocation::Inline(&[]) },
        Message::ReadStripe { id: stripe, offset, bytes, to: memory },
        Message::WriteStripe {
            id: stripe,
            append: s.flag,
            offset,
            bytes: s.data.len() as u64,
            from: DataLocation::Inline(&s.data),
        },
        Message::WriteStripe { id: stripe, append: s.flag, offset, bytes, from: memory },
        Message::WriteStripe {
            id: stripe,
            append: false,
            offset,
            bytes,
            from: DataLocation::Eager {
                memory: Memory { address: s.a >> 1, key: s.b },
                grant: s.c,
                buffer: s.b as u16,
                generation: s.c ^ 1,
            },
        },
        Message::TakeEagerBuffers { grant: s.c },
        Message::GrantEagerBuffers {
            memory: Memory { address: s.a >> 1, key: s.b },
            buffers: 1 + s.c as u16 % 1000,
            bytes: 1 + s.c % 1000,
        },
        Message::Heartbeat { clock_us: s.a },
        Message::Alive { echo_us: s.a, clock_us: s.b },
        Message::Goodbye { detail },
    ]);
    all.extend(Code::ALL.map(|code| Message::Failure { code, detail }));
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn every_message_round_trips_sealed(s in seed(), request in any::<u64>(), session in any::<u64>(), slot in 0..=SLOT_MAX) {
        let (mut mine, mut theirs) = sessions();
        let stamp = Stamp { session, slot, sequence: s.a };
        let mut frame = Vec::new();
        let mut kinds = std::collections::HashSet::new();
        for message in messages(&s) {
            mine.seal(request, stamp, &message, &mut frame).unwrap();
            let (header, body) = theirs.open(&frame).unwrap();
            prop_assert_eq!((header.kind, header.request, header.stamp), (message.kind(), request, stamp));
            prop_assert_eq!(Message::decode(header.kind, body).unwrap(), message);
            kinds.insert(header.kind);
        }
        prop_assert_eq!(kinds.len(), Kind::ALL.len() - 3, "all kinds but the three that open a handshake");
    }

    #[test]
    fn a_frame_with_any_bit_flipped_is_refused(s in seed(), at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let (mut mine, mut theirs) = sessions();
        let mut frame = Vec::new();
        let request = Request::Unlink { parent: Ino(s.a), name: &s.name };
        let message = Message::Ask(Caller { uid: s.c, gid: 7 }, request);
        mine.seal(1, Stamp::default(), &message, &mut frame).unwrap();
        let mut bad = frame.clone();
        bad[at.index(frame.len())] ^= 1u8 << bit;
        prop_assert!(theirs.open(&bad).is_err());
        prop_assert!(theirs.open(&frame).is_ok());
        prop_assert_eq!(theirs.open(&frame).err(), Some(Code::Stale));
    }
}

fn refused(message: Message<'_>) -> Code {
    message.encode(&mut vec![0; BODY_BYTES_MAX * 2]).expect_err("a bound is exceeded")
}

#[test]
fn data_request_beyond_any_bound_is_refused_both_ways() {
    let stripe = BackingId { target: 1 << 16, ino: Ino(1), number: 0, stripe: 0 };
    let memory = DataLocation::Remote(Memory { address: 4096, key: 1 });
    let read = |stripe, offset, bytes, to| Message::ReadStripe { id: stripe, offset, bytes, to };
    let good = read(stripe, 9, 8, memory);
    let mut body = vec![0; 100];
    let n = good.encode(&mut body).unwrap();
    let change = |at: usize, with: &[u8]| {
        let mut bad = body[..n].to_vec();
        bad[at..at + with.len()].copy_from_slice(with);
        Message::decode(Kind::ReadStripe, &bad).expect_err("a bound is exceeded")
    };
    // Encoding: target 4, ino 8, number 1, location 1, stripe 2, offset 8, bytes 8, address 8, key 8.
    assert_eq!(change(12, &[3]), Code::Invalid);
    assert_eq!(refused(read(BackingId { number: 3, ..stripe }, 0, 1, memory)), Code::Invalid);
    assert_eq!(change(13, &[4]), Code::Malformed);
    assert_eq!(change(14, &256u16.to_le_bytes()), Code::Invalid);
    assert_eq!(refused(read(BackingId { stripe: 256, ..stripe }, 0, 1, memory)), Code::Invalid);
    assert_eq!(change(16, &(FILE_BYTES_MAX - 7).to_le_bytes()), Code::FileTooLarge);
    assert_eq!(change(16, &u64::MAX.to_le_bytes()), Code::Invalid);
    assert_eq!(refused(read(stripe, u64::MAX, 1, memory)), Code::Invalid);
    assert_eq!(change(24, &0u64.to_le_bytes()), Code::Invalid);
    assert_eq!(change(24, &(DATA_BYTES_MAX + 1).to_le_bytes()), Code::TooBig);
    assert_eq!(change(32, &(u64::MAX - 7).to_le_bytes()), Code::Invalid);
    assert_eq!(
        refused(read(stripe, 0, INLINE_BYTES_MAX as u64 + 1, DataLocation::Inline(&[]))),
        Code::TooBig
    );
    assert_eq!(refused(read(stripe, 0, 1, DataLocation::Inline(b"x"))), Code::Malformed);
    let write = Message::WriteStripe {
        id: stripe,
        append: false,
        offset: 0,
        bytes: 3,
        from: DataLocation::Inline(b"xx"),
    };
    assert_eq!(refused(write), Code::Malformed);
    // Only writes at an offset use eager buffers. Appends do not, as only the file's node knows its end.
    let sent = |address| DataLocation::Eager {
        memory: Memory { address, key: 1 },
        grant: 2,
        buffer: 3,
        generation: 4,
    };
    assert_eq!(refused(read(stripe, 0, 1, sent(0))), Code::Invalid);
    let write = |append, bytes, from| Message::WriteStripe { id: stripe, append, offset: 0, bytes, from };
    assert_eq!(refused(write(true, 1, sent(0))), Code::Invalid);
    assert_eq!(refused(write(false, DATA_BYTES_MAX + 1, sent(0))), Code::TooBig);
    assert_eq!(refused(write(false, 8, sent(u64::MAX - 7))), Code::Invalid);
    for (address, buffers, bytes) in [(0, 0, 1), (0, 1, 0), (u64::MAX - 7, 2, 4)] {
        let grant = Message::GrantEagerBuffers { memory: Memory { address, key: 1 }, buffers, bytes };
        let n = grant.encode(&mut body).unwrap();
        assert_eq!(Message::decode(Kind::GrantEagerBuffers, &body[..n]), Err(Code::Malformed));
    }
    let n = good.encode(&mut body).unwrap();
    let mut long = body[..n].to_vec();
    long.push(0);
    assert_eq!(Message::decode(Kind::ReadStripe, &long), Err(Code::Malformed), "bytes left over");
}

#[test]
fn names_and_details_out_of_bounds_are_refused() {
    let unlink = |name: &[u8]| {
        let mut body = vec![0; 1024];
        let request = Request::Unlink { parent: Ino(5), name };
        let n = Message::Ask(Caller { uid: 1, gid: 1 }, request).encode(&mut body)?;
        Message::decode(Kind::Ask, &body[..n]).map(|_| ())
    };
    assert_eq!(unlink(b"ok"), Ok(()));
    assert_eq!(unlink(b""), Err(Code::NotFound));
    assert_eq!(unlink(b".."), Err(Code::Invalid));
    assert_eq!(unlink(b"a/b"), Err(Code::Invalid));
    assert_eq!(unlink(b"a\0b"), Err(Code::Invalid));
    assert_eq!(unlink(&[b'n'; 256]), Err(Code::NameTooLong));
    assert_eq!(unlink(&[b'n'; 255]), Ok(()));
    let long = [b'd'; DETAIL_BYTES_MAX + 1];
    assert_eq!(refused(Message::Goodbye { detail: &long }), Code::TooBig);
    let mut body = ((DETAIL_BYTES_MAX + 1) as u16).to_le_bytes().to_vec();
    body.extend(long);
    assert_eq!(Message::decode(Kind::Goodbye, &body), Err(Code::TooBig));
    for kind in [Kind::Hello, Kind::Welcome, Kind::Refuse] {
        assert_eq!(Message::decode(kind, b""), Err(Code::Malformed), "no body of a session");
    }
    assert_eq!(Message::decode(Kind::Finish, &vec![0; BODY_BYTES_MAX + 1]), Err(Code::TooBig));
}

#[test]
fn frame_of_a_kind_that_is_no_more_is_refused() {
    let (mut mine, _) = sessions();
    let mut frame = Vec::new();
    mine.seal(1, Stamp::default(), &Message::TakeEagerBuffers { grant: 1 }, &mut frame).unwrap();
    assert_eq!(Header::peek(&frame).map(|header| header.kind), Ok(Kind::TakeEagerBuffers));
    for kind in 14..=19 {
        assert_eq!(Kind::from_u8(kind), Err(Code::Malformed));
        frame[6] = kind;
        assert_eq!(Header::peek(&frame).err(), Some(Code::Malformed));
    }
}

#[test]
fn answers_with_entries_or_codes_that_are_unsound_are_refused() {
    let mut raw = [0; 300];
    let mut w = DirWriter::new(&mut raw);
    assert!(w.push(&DirEntry { cookie: 1, ino: Ino(2), kind: FileKind::File, name: b"name", attr: None }));
    let n = w.len();
    let answer = |bytes: &[u8]| {
        let mut body = Vec::new();
        let entries = DirEntries { bytes, end: true };
        Message::Answer(Ok(Reply::Entries(entries))).encode_to(&mut body).unwrap();
        Message::decode(Kind::Answer, &body).map(|_| ())
    };
    assert_eq!(answer(&raw[..n]), Ok(()));
    assert_eq!(answer(&raw[..n - 1]), Err(Code::Malformed), "a name that is cut off");
    assert_eq!(answer(&[&raw[..n], b"x"].concat()), Err(Code::Malformed), "bytes behind the last entry");
    assert_eq!(Message::decode(Kind::Answer, &[7, 0, 0, 0, 1]), Err(Code::Malformed), "bytes behind a code");
    assert_eq!(Message::decode(Kind::Answer, &[7, 0]), Err(Code::Malformed));
    assert_eq!(Message::decode(Kind::Answer, &[7, 0, 0, 0]), Ok(Message::Answer(Err(Code::NoSpace.into()))));
}

#[test]
fn largest_messages_fit_a_frame_and_larger_do_not() {
    let (mut mine, mut theirs) = sessions();
    let (value, mut frame) = (vec![7; 65_536], Vec::new());
    let name = [b'n'; 255];
    let set = Request::SetXattr { ino: Ino(1), name: &name, value: &value, flags: 0 };
    let message = Message::Ask(Caller { uid: 0, gid: 0 }, set);
    mine.seal(1, Stamp::default(), &message, &mut frame).unwrap();
    let (header, body) = theirs.open(&frame).unwrap();
    assert_eq!(Message::decode(header.kind, body), Ok(message));
    assert!(frame.len() <= FRAME_BYTES_MAX);
    let bytes = vec![7; BODY_BYTES_MAX];
    assert_eq!(
        mine.seal(1, Stamp::default(), &Message::Answer(Ok(Reply::Bytes(&bytes))), &mut frame),
        Err(Code::TooBig)
    );
    let stamp = Stamp { slot: SLOT_MAX + 1, ..Stamp::default() };
    assert_eq!(mine.seal(1, stamp, &Message::Finish, &mut frame), Err(Code::TooBig));
}

#[test]
fn handshake_with_another_secret_gets_no_answer() {
    let mut out = Vec::new();
    let initiator = Initiator::start(&secret(1), hello(1)).unwrap();
    assert_eq!(respond(&secret(2), &hello(2), initiator.frame(), &mut out).err(), Some(Code::AccessDenied));
    assert!(out.is_empty());
    respond(&secret(1), &hello(2), initiator.frame(), &mut out).unwrap();
    assert_eq!(initiator.finish(&secret(2), &out).err(), Some(Code::AccessDenied));
    assert!(matches!(initiator.finish(&secret(1), &out), Ok(Answer::Welcome(..))));
}

#[test]
fn handshake_replayed_or_reflected_gives_no_session() {
    let (key, mut welcome, mut again) = (secret(1), Vec::new(), Vec::new());
    let first = Initiator::start(&key, hello(1)).unwrap();
    respond(&key, &hello(2), first.frame(), &mut welcome).unwrap();
    let second = Initiator::start(&key, Hello { nonce: [99; 32], ..hello(1) }).unwrap();
    assert_eq!(second.finish(&key, &welcome).err(), Some(Code::Stale), "a welcome of another hello");
    assert_eq!(first.finish(&key, first.frame()).err(), Some(Code::Malformed), "its own hello");
    assert_eq!(respond(&key, &hello(2), &welcome, &mut again).err(), Some(Code::Malformed));
    // A replayed Hello gives a session with other keys. Recorded frames of the first session do not open in it.
    let Ok(Answer::Welcome(_, mut mine)) = first.finish(&key, &welcome) else { panic!() };
    let mut frame = Vec::new();
    mine.seal(1, Stamp::default(), &Message::Finish, &mut frame).unwrap();
    let me = Hello { nonce: [77; 32], ..hello(2) };
    let Ok(Response::Welcome(_, mut theirs)) = respond(&key, &me, first.frame(), &mut again) else {
        panic!()
    };
    assert_eq!(theirs.open(&frame).err(), Some(Code::AccessDenied));
    // A node's own frames, sent back to it, do not open as its peer's.
    assert_eq!(mine.open(&frame).err(), Some(Code::AccessDenied));
}

#[test]
fn hello_of_another_pool_protocol_or_itself_is_refused_in_words() {
    let key = secret(1);
    let cases = [
        (Hello { pool: [8; 16], ..hello(1) }, Code::Invalid),
        (Hello { protocols: (PROTOCOL_MAX + 1, PROTOCOL_MAX + 3), ..hello(1) }, Code::NotSupported),
        (Hello { incarnation: hello(2).incarnation, ..hello(1) }, Code::Exists),
    ];
    for (me, code) in cases {
        let mut out = Vec::new();
        let initiator = Initiator::start(&key, me.clone()).unwrap();
        let Ok(Response::Refuse(peer, refusal)) = respond(&key, &hello(2), initiator.frame(), &mut out)
        else {
            panic!("{code} is not refused")
        };
        assert_eq!((peer, refusal.code), (me, code));
        let Ok(Answer::Refused(said)) = initiator.finish(&key, &out) else { panic!("not told") };
        assert_eq!(said, refusal);
        assert!(said.detail.contains("node 2"), "{}", said.detail);
    }
    let newer = Hello { protocols: (PROTOCOL_MIN, PROTOCOL_MAX + 9), ..hello(1) };
    let initiator = Initiator::start(&key, newer).unwrap();
    let mut out = Vec::new();
    let Ok(Response::Welcome(_, session)) = respond(&key, &hello(2), initiator.frame(), &mut out) else {
        panic!()
    };
    assert_eq!(session.protocol(), PROTOCOL_MAX, "the newest that both speak");
}

#[test]
fn hello_with_a_field_out_of_bounds_is_not_sent() {
    let key = secret(1);
    let bad = [
        Hello { node: NodeId(0), ..hello(1) },
        Hello { node: NodeId(NODE_MAX + 1), ..hello(1) },
        Hello { protocols: (2, 1), ..hello(1) },
        Hello { protocols: (0, 1), ..hello(1) },
        Hello { link: 0, ..hello(1) },
        Hello { address: vec![], ..hello(1) },
        Hello { address: vec![1; ADDRESS_BYTES_MAX + 1], ..hello(1) },
        Hello { clock_us: u64::MAX, ..hello(1) },
    ];
    for hello in bad {
        assert!(Initiator::start(&key, hello.clone()).is_err(), "{hello:?}");
    }
    assert!(Initiator::start(&key, Hello { address: vec![1; ADDRESS_BYTES_MAX], ..hello(1) }).is_ok());
}

#[test]
fn frames_that_overtake_one_another_open_once() {
    let (mut mine, mut theirs) = sessions();
    let frames: Vec<Vec<u8>> = (0..200)
        .map(|n| {
            let mut frame = Vec::new();
            mine.seal(n, Stamp::default(), &Message::TakeEagerBuffers { grant: 1 }, &mut frame).unwrap();
            frame
        })
        .collect();
    for frame in frames.iter().rev() {
        assert!(theirs.open(frame).is_ok());
    }
    for frame in &frames {
        assert_eq!(theirs.open(frame).err(), Some(Code::Stale));
    }
}

#[test]
fn kinds_round_trip_and_unknown_ones_are_refused() {
    for kind in Kind::ALL {
        assert_eq!(Kind::from_u8(kind as u8), Ok(kind));
        assert!(
            !(kind.asks() && kind.answers()) && !(kind.is_handshake() && (kind.asks() || kind.answers()))
        );
    }
    assert_eq!(Kind::from_u8(0), Err(Code::Malformed));
    assert_eq!(Kind::from_u8(200), Err(Code::Malformed));
    assert_eq!(Header::peek(&[0; 88]).err(), Some(Code::Malformed));
}
