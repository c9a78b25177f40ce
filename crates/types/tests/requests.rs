//! The bytes of each request, as they travel by ring and wire and are stored in journals: they never change without a
//! new number or a new protocol. The encoder that this table replaced wrote `requests.golden`.

use forebay_types::{
    BackingId, BackingOp, Caller, Ino, Layout, NodeId, Part, PieceId, Request, Segment, SetAttr,
    StoreVersion, Targets, TimeSet, Timestamp, TxId, RENAME_EXCHANGE, REQUESTS, XATTR_CREATE,
};

/// A sample of each request, with distinct values in all fields. Requests with optional fields have several.
fn samples() -> Vec<Request<'static>> {
    let (p, i) = (Ino::new(NodeId(3), 0x77), Ino::new(NodeId(300), 0x9988));
    let name = b"a name with \xff bytes".as_slice();
    let set =
        SetAttr { mode: Some(0o644), uid: None, gid: Some(7), size: Some(1 << 40), ..SetAttr::default() };
    let at = TimeSet::At(Timestamp { sec: -5, nsec: 999_999_999 });
    let (tx, link) = (TxId(0x0005_0000_0000_0102), TxId(0x0006_0000_0000_0304));
    let create = |layout, number, bits: u8| Request::Create {
        parent: p,
        name,
        mode: 0o755,
        exclusive: bits & 1 != 0,
        dirty: bits & 2 != 0,
        layout,
        number,
        reserve: bits & 4 != 0,
    };
    let version = StoreVersion { bytes: 9, mtime: Timestamp { sec: -5, nsec: 7 }, ino: 3, tag: 4 };
    let segment = Segment::new(1 << 30, 1 << 20, Targets::new(&[0x0001_0002, 10]).unwrap()).unwrap();
    vec![
        Request::Ping,
        Request::Lookup { parent: p, name },
        Request::GetAttr { ino: i },
        Request::SetAttr { ino: i, set },
        Request::SetAttr {
            ino: i,
            set: SetAttr { atime: TimeSet::Now, mtime: at, width_of_new: Some(4), ..set },
        },
        create(None, None, 1),
        create(Some(Layout::single(NodeId(2), 1)), Some(i), 6),
        create(None, Some(i), 0),
        Request::MakeNode { parent: p, name, mode: 0o010_600, rdev: 0x0102_0304_0506 },
        Request::MakeDirectory { parent: p, name, mode: 0o1777 },
        Request::Symlink { parent: p, name, target: b"../x" },
        Request::Link { ino: i, parent: p, name },
        Request::Unlink { parent: p, name },
        Request::RemoveDirectory { parent: p, name },
        Request::Rename { parent: p, name, new_parent: i, new_name: b"b", flags: RENAME_EXCHANGE },
        Request::ReadDirectory { ino: i, cookie: 5, attributes: true },
        Request::ReadLink { ino: i },
        Request::GetXattr { ino: i, name: b"user.a" },
        Request::SetXattr { ino: i, name: b"user.a", value: &[9; 70], flags: XATTR_CREATE },
        Request::ListXattr { ino: i },
        Request::RemoveXattr { ino: i, name: b"user.a" },
        Request::MarkDirty { ino: i },
        Request::MakeBacking { ino: i },
        Request::PathOf { ino: i },
        Request::Space,
        Request::Reserve,
        Request::SetLayout { ino: i, layout: Layout::overstriped(NodeId(2), 1, 5, 4096).unwrap() },
        Request::MakeDirectoryAt { node: NodeId(7), parent: p, name, mode: 0o750 },
        Request::MoveDirectory { parent: p, name, new_parent: i, new_name: b"b", flags: 1, ino: p },
        Request::Prepare { tx, index: 3, part: Part::Count { ino: i, link } },
        Request::Finish { tx, commit: true },
        Request::AskOutcome { tx },
        Request::Decide { tx, nodes: &[1, 0, 2, 0], reply: &[0, 0, 1, 0] },
        Request::DropLink { ino: i, link },
        Request::Touch { ino: i },
        Request::IsLed { ino: i, parent: p, link },
        Request::LeadsTo { node: NodeId(2), parent: p, cookie: 77 },
        Request::NameOf { parent: p, ino: i },
        Request::EndSession { session: 5 },
        Request::Place { stripe_count: 3 },
        Request::Targets,
        Request::RenewLease,
        Request::RevokeName { parent: p, name },
        Request::RevokeDirectory { ino: i },
        Request::SetWidth { ino: i, width: 16 },
        Request::PartsOf { ino: i },
        Request::AreThere { sessions: &[7; 24] },
        Request::RemoveBackings { ids: &[0; 30] },
        Request::Attach { ino: i, listed: true, settings: b"{}" },
        Request::Detach { ino: i },
        Request::WaitForStore { ino: i, fsync: true, close: false },
        Request::Persist { ino: i, since: 5 },
        Request::Persisted { ino: i, code: 8 },
        Request::StoreWork { restart: true },
        Request::StoreFailed { ino: i, code: 8 },
        Request::Import { ino: i, objects: &[1; 40] },
        Request::Listed { ino: i, epoch: 6, objects: &[1; 40] },
        Request::LookedUp { parent: p, name, code: 8 },
        Request::Recall { ino: i, process: 77 },
        Request::ReadKnown { ino: i, cookie: 5 },
        Request::Restore { ino: i },
        Request::Restored {
            ino: i,
            epoch: 6,
            atime: version.mtime,
            mtime: Timestamp { sec: 7, nsec: 8 },
            layout: Layout::single(NodeId(2), 1),
        },
        Request::BeginDrain { ino: i },
        Request::Pending { parent: p, name: b"" },
        Request::PendingChanges,
        Request::Intend { parent: p, name, version },
        Request::Published { parent: p, name, ino: i, epoch: 6, seen: 5, version },
        Request::Unpublished { parent: p, name, seen: 5 },
        Request::Settled { parent: p, name, seen: 5 },
        Request::Moved { parent: p, name, new_parent: i, new_name: b"b", version },
        Request::Release { ino: i, epoch: 6, set },
        Request::Pin { ino: i, pinned: true },
        Request::StorePlace { ino: i },
        Request::Forget { parent: p, name, relist: true, discard: false },
        Request::Conflict { parent: p, name, found: true, version },
        Request::Relocate { ino: i, node: NodeId(7) },
        Request::AskMover { node: NodeId(7), message: b"{}" },
        Request::MoverWork,
        Request::MoverAnswer { number: 5, answer: b"{}" },
        Request::RestoreRange { ino: i, offset: 1 << 33 },
        Request::RangeRestored { ino: i, backing: 9, from: 1 << 20, to: 1 << 21 },
        Request::StorePlaces { node: NodeId(7), inos: &[5; 16] },
        Request::StoreReports { node: NodeId(7), reports: b"\x62\x99\x88\0\0\0\0\x2c\x01" },
        Request::CreateVolume { name, mode: 0o640, maker: 7, segment },
        Request::GrowVolume { name, ino: i, maker: 7, segment },
        Request::CommitVolume { name, ino: i },
        Request::AbandonVolume { name, ino: i },
        Request::ShrinkVolume { name, ino: i, bytes: 1 << 20 },
        Request::DeleteVolume { name, ino: i },
        Request::GetVolume { name },
        Request::ListVolumes { after: b"" },
        Request::MakePiece {
            node: NodeId(7),
            piece: PieceId { volume: i, segment: 1, index: 2 },
            target: 9,
            bytes: 1 << 20,
            until: 1 << 19,
        },
        Request::MakePieceAway {
            node: NodeId(7),
            piece: PieceId { volume: i, segment: 1, index: 2 },
            target: 9,
            bytes: 1 << 20,
            until: 1 << 19,
            mode: 0o640,
            is_thin: true,
        },
        Request::PiecesUnused { node: NodeId(7), volume: i },
        Request::ReviewPieces { node: NodeId(7) },
        Request::AreSegments { segments: &[7; 20] },
        Request::Backing {
            id: BackingId { target: 9, ino: i, number: 0, stripe: 3 },
            op: BackingOp::Write { offset: 77, append: false, bytes: &[5; 30] },
        },
    ]
}

#[test]
fn encode_of_each_request_gives_the_same_bytes_for_ever() {
    let mut buffer = vec![0; 4096];
    let text: String = samples()
        .iter()
        .map(|request| {
            let len = request.encode(Caller { uid: 1000, gid: 100 }, &mut buffer).unwrap();
            let hex: String = buffer[..len].iter().map(|byte| format!("{byte:02x}")).collect();
            let name: String =
                format!("{request:?}").chars().take_while(|c| c.is_ascii_alphanumeric()).collect();
            format!("{name} {hex}\n")
        })
        .collect();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/requests.golden");
    let expected = std::fs::read_to_string(golden).unwrap();
    for (now, then) in text.lines().zip(expected.lines()) {
        assert_eq!(now, then);
    }
    assert_eq!(text.lines().count(), expected.lines().count());
}

/// The contents of docs/requests.md, generated from the table.
fn page() -> String {
    let mut page = String::from(
        "# Requests\n\n\
         What travels by ring, wire and journal, printed from the table in `crates/types/src/request/table.rs`, whose head says\n\
         what the words mean. A message begins with number, flags (0), reserved (0), uid and gid (1, 1, 2, 4 and 4 bytes); the\n\
         fields follow in this order, little-endian.\n\n\
         | number | request | class | effect | home | flags | fields | reply | what it does |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    for r in REQUESTS {
        let fields: Vec<_> =
            r.fields.iter().map(|(name, of)| format!("{name}: {}", of.replace("'a ", ""))).collect();
        let effect = if r.changes { "change" } else { "read" };
        let class = format!("{:?}", r.class).to_lowercase();
        // Brackets of links are only for rustdoc.
        let doc = r.doc.trim().replace("crate::", "").replace("[`", "`").replace("`]", "`");
        page += &format!(
            "| {} | {} | {class} | {effect} | {} | {} | {} | {} | {doc} |\n",
            r.number,
            r.name,
            r.home,
            r.flags.join(" "),
            fields.join(", ").replace("<'a>", ""),
            r.reply,
        );
    }
    page
}

#[test]
fn documentation_of_requests_is_the_table() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/requests.md");
    if std::env::var_os("FOREBAY_PRINT").is_some() {
        std::fs::write(path, page()).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap_or_default();
    let advice = "FOREBAY_PRINT=1 cargo test -p forebay-types --test requests";
    assert!(written == page(), "docs/requests.md is not what the table says; print it anew with {advice}");
}

#[test]
fn numbers_and_names_are_each_of_one_request() {
    for (i, one) in REQUESTS.iter().enumerate() {
        for other in &REQUESTS[i + 1..] {
            assert!(one.number != other.number && one.name != other.name, "{one:?} {other:?}");
        }
    }
    for request in samples() {
        assert_eq!(request.info().number, request.number());
        assert!(format!("{request:?}").starts_with(request.info().name));
    }
    let missing: Vec<_> =
        REQUESTS.iter().filter(|r| !samples().iter().any(|s| s.number() == r.number)).collect();
    assert!(missing.is_empty(), "no sample has its bytes here: {missing:?}");
}
