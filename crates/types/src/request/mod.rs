//! Requests: the messages that a client sends to the node that owns a directory or an inode, and that daemons send to
//! each other.

#[macro_use]
mod expand;
mod fields;
mod reports;
mod table;

pub use reports::{
    decode_inos, decode_outcomes, decode_store_places, encode_outcome, encode_store_place, ReportOutcome,
    OUTCOME_BYTES, REPORTS_MAX,
};
pub use table::{is_for_data, may_change, Class, Request, RequestInfo, REQUESTS};

/// `renameat2`: fail with EEXIST rather than replace.
pub const RENAME_NOREPLACE: u32 = 1;
/// `renameat2`: swap the two entries.
pub const RENAME_EXCHANGE: u32 = 2;
/// `setxattr`: fail with EEXIST if the attribute exists.
pub const XATTR_CREATE: u32 = 1;
/// `setxattr`: fail with ENODATA if it does not exist.
pub const XATTR_REPLACE: u32 = 2;

/// The user for whom a request is made: owner and group of what it creates. The client has checked permissions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Caller {
    /// File-system user id.
    pub uid: u32,
    /// File-system group id.
    pub gid: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attr::Timestamp;
    use crate::limits::STRIPES_MAX;
    use crate::set_attr::{SetAttr, TimeSet};
    use crate::{
        BackingId, BackingOp, Code, Ino, Layout, NodeId, Part, PieceId, Segment, StoreVersion, Targets, TxId,
    };
    use proptest::prelude::*;

    #[test]
    fn every_request_round_trips() {
        let (p, i) = (Ino(77), Ino(99));
        let name = b"a name with \xff bytes".as_slice();
        let set =
            SetAttr { mode: Some(0o644), uid: None, gid: Some(7), size: Some(1 << 40), ..SetAttr::default() };
        let time = Timestamp { sec: -5, nsec: 999_999_999 };
        let at = TimeSet::At(time);
        let version = StoreVersion { bytes: 9, mtime: Timestamp { sec: -5, nsec: 7 }, ino: 3, tag: 4 };
        let segment = Segment::new(1 << 30, 1 << 20, Targets::new(&[9, 10]).unwrap()).unwrap();
        let all = [
            Request::Ping,
            Request::Lookup { parent: p, name },
            Request::GetAttr { ino: i },
            Request::SetAttr { ino: i, set },
            Request::SetAttr { ino: i, set: SetAttr { atime: TimeSet::Now, mtime: at, ..set } },
            Request::Create {
                parent: p,
                name,
                mode: 0o755,
                exclusive: true,
                dirty: false,
                layout: None,
                number: None,
                reserve: true,
            },
            Request::Create {
                parent: p,
                name,
                mode: 0,
                exclusive: false,
                dirty: true,
                layout: Some(Layout::single(NodeId(2), 1)),
                number: Some(i),
                reserve: false,
            },
            Request::MakeNode { parent: p, name, mode: 0o010_600, rdev: 0 },
            Request::MakeDirectory { parent: p, name, mode: 0o1777 },
            Request::Symlink { parent: p, name, target: b"../x" },
            Request::Link { ino: i, parent: p, name },
            Request::Unlink { parent: p, name },
            Request::RemoveDirectory { parent: p, name },
            Request::Rename { parent: p, name, new_parent: i, new_name: b"b", flags: RENAME_EXCHANGE },
            Request::ReadDirectory { ino: i, cookie: 5, attributes: true },
            Request::ReadLink { ino: i },
            Request::GetXattr { ino: i, name: b"user.a" },
            Request::SetXattr { ino: i, name: b"user.a", value: &[9; 65_536], flags: XATTR_CREATE },
            Request::ListXattr { ino: i },
            Request::RemoveXattr { ino: i, name: b"user.a" },
            Request::MarkDirty { ino: i },
            Request::MakeBacking { ino: i },
            Request::PathOf { ino: i },
            Request::Space,
            Request::Reserve,
            Request::SetLayout { ino: i, layout: Layout::overstriped(NodeId(2), 1, 5, 4096).unwrap() },
            Request::MakeDirectoryAt { node: NodeId(7), parent: p, name, mode: 0o750 },
            Request::MoveDirectory { parent: p, name, new_parent: i, new_name: b"b", flags: 1, ino: i },
            Request::Prepare { tx: TxId(5), index: 3, part: Part::Count { ino: i, link: TxId(6) } },
            Request::Finish { tx: TxId(5), commit: true },
            Request::AskOutcome { tx: TxId(5) },
            Request::Decide { tx: TxId(5), nodes: &[1, 0, 2, 0], reply: &[0, 0, 1, 0] },
            Request::DropLink { ino: i, link: TxId(6) },
            Request::Touch { ino: i },
            Request::IsLed { ino: i, parent: p, link: TxId(6) },
            Request::LeadsTo { node: NodeId(2), parent: p, cookie: 77 },
            Request::NameOf { parent: p, ino: i },
            Request::EndSession { session: 5 },
            Request::Place { stripe_count: STRIPES_MAX },
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
                atime: time,
                mtime: time,
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
            Request::StorePlaces { node: NodeId(7), inos: &[7, 0, 0, 0, 0, 0, 0, 0] },
            Request::StoreReports { node: NodeId(7), reports: &[98, 0, 0, 0, 0, 0, 0, 0, 9] },
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
                id: BackingId::of_piece(9, PieceId { volume: i, segment: 15, index: 7 }),
                op: BackingOp::Atomic {
                    word: crate::PieceWord::At(72),
                    op: crate::AtomicOp::CompareAndSwap { expected: 3, new: 4 },
                },
            },
            Request::Backing {
                id: BackingId::of_piece(9, PieceId { volume: i, segment: 0, index: 0 }),
                op: BackingOp::Atomic {
                    word: crate::PieceWord::End,
                    op: crate::AtomicOp::Max { least: 1 << 40 },
                },
            },
            Request::Backing {
                id: BackingId { target: 9, ino: i, number: 0, stripe: 3 },
                op: BackingOp::Write { offset: 77, append: false, bytes: &[5; 3000] },
            },
        ];
        let caller = Caller { uid: 1000, gid: 100 };
        let mut buffer = vec![0; crate::limits::MESSAGE_BYTES_MAX];
        for request in all {
            let n = request.encode(caller, &mut buffer).unwrap();
            assert_eq!(Request::decode(&buffer[..n]).unwrap(), (caller, request));
            for short in 0..n.min(300) {
                assert!(Request::decode(&buffer[..short]).is_err(), "{request:?} cut to {short} bytes");
            }
        }
    }

    #[test]
    fn decode_bad_names_are_refused() {
        let caller = Caller { uid: 0, gid: 0 };
        let mut buffer = [0; 4096];
        let long = [b'x'; 256];
        for (name, code) in [
            (b"".as_slice(), Code::NotFound),
            (b".", Code::Invalid),
            (b"..", Code::Invalid),
            (b"a/b", Code::Invalid),
            (b"a\0", Code::Invalid),
            (&long, Code::NameTooLong),
        ] {
            let n = Request::Unlink { parent: Ino(1), name }.encode(caller, &mut buffer).unwrap();
            assert_eq!(Request::decode(&buffer[..n]).unwrap_err(), code, "{name:?}");
        }
    }

    proptest! {
        #[test]
        fn decode_of_any_bytes_never_panics(op in 0u8..145, bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let mut all = vec![op];
            all.extend(bytes);
            let _ = Request::decode(&all);
        }
    }
}
