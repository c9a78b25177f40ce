//! Operations on one backing file on another node's target, which the process cannot open itself.

use crate::atomic::{AtomicOp, PieceWord};
use crate::attr::Timestamp;
use crate::backing_runs::{within, BackingRuns};
use crate::bytes::{Reader, Writer};
use crate::error::Code;
use crate::group::GroupOp;
use crate::id::{Ino, NodeId};
use crate::layout::Layout;
use crate::limits::{
    BACKING_BYTES_MAX, COMPONENTS_MAX, MOVE_BYTES_MAX, PROGRAM_MEMORY_BYTES_MAX, STRIPES_MAX, TARGETS_MAX,
    VOLUME_SEGMENTS_BEGUN_MAX,
};
use crate::lock::LockRequest;
use crate::set_attr::TimeSet;
use crate::volume::PieceId;

/// The number of a piece of a volume, which no backing file has.
const PIECE: u8 = u8::MAX;
/// Bits of the stripe number that are the index of a piece; the others are its segment's number.
const PIECE_INDEX_BITS: u32 = 3;
const _: () = assert!(
    1 << PIECE_INDEX_BITS == TARGETS_MAX
        && VOLUME_SEGMENTS_BEGUN_MAX as usize * TARGETS_MAX == u16::MAX as usize + 1
);

/// A backing file, or a piece of a volume ([`BackingId::of_piece`]), by the target that holds it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BackingId {
    /// The target, in the encoding of layouts: node in the upper 16 bits, the node's target index in the lower.
    pub target: u32,
    /// The file.
    pub ino: Ino,
    /// The number in its name: [`Layout::file_number`] of its component.
    pub number: u8,
    /// Stripe of the component.
    pub stripe: u16,
}

/// Encoded bytes of a [`BackingId`] in a list.
const BACKING_ID_BYTES: usize = 15;

/// An operation on a backing file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BackingOp<'a> {
    /// Size, space and times. → `Backing`
    Stat,
    /// Creates it, empty, unless it exists. [`Code::NotFound`] when it was removed before; [`Code::Invalid`] for an
    /// inode of the receiving node, whose shard creates it ([`crate::Request::MakeBacking`]). → `Done`
    Make,
    /// Reads. Returns fewer bytes than requested only at the end of the file. → `Bytes`
    Read {
        /// Offset.
        offset: u64,
        /// Length, at most [`BACKING_BYTES_MAX`].
        bytes: u32,
    },
    /// Writes all bytes or fails. → `Count`: the offset of the first byte
    Write {
        /// Offset; ignored with `append`.
        offset: u64,
        /// Write at the end of the file at the time of the write. No other write comes in between.
        append: bool,
        /// Data, at most [`BACKING_BYTES_MAX`].
        bytes: &'a [u8],
    },
    /// Reads several ranges, in their order. Returns fewer bytes than requested only if a range ends behind the end of the
    /// file; then nothing of the ranges after it. → `Bytes`: of all ranges, one after the other
    ReadRuns {
        /// The ranges.
        runs: BackingRuns<'a>,
    },
    /// Writes several ranges, in their order: all bytes, or it fails, and any of them may be written. → `Count`: the bytes
    WriteRuns {
        /// The ranges.
        runs: BackingRuns<'a>,
        /// Data of all ranges, one after the other.
        bytes: &'a [u8],
    },
    /// Sets its length. → `Done`
    Truncate {
        /// New length.
        bytes: u64,
    },
    /// `fallocate`. → `Done`
    Allocate {
        /// `mode` of the system call.
        mode: u32,
        /// Offset.
        offset: u64,
        /// Length.
        bytes: u64,
    },
    /// Sets its times. → `Done`
    SetTimes {
        /// Access.
        atime: TimeSet,
        /// Modification.
        mtime: TimeSet,
    },
    /// `fsync`. → `Done`
    Sync,
    /// Keeps it open for the requesting process, so that it survives an unlink, until [`BackingOp::Close`] or the
    /// process's end. → `Done`
    Open {
        /// The process's number for this open.
        handle: u64,
    },
    /// Ends an open. An unknown handle is no error. → `Done`
    Close {
        /// The handle of the open.
        handle: u64,
    },
    /// Takes or releases a lock for the requesting process, without waiting. It excludes locks of programs on the
    /// backing file's node too, and ends with the process. → `Done`, [`Code::Busy`] when another lock conflicts
    Lock(LockRequest),
    /// Looks for a lock that conflicts with this one. → `Done` for none, `Lock`
    TestLock(LockRequest),
    /// Reserves the end of a file for a write of the requesting process; this is one of the file's several backing
    /// files. No other process may append until [`BackingOp::EndAppend`], the process's end, or
    /// [`crate::limits::APPEND_HOLD_MS`] have passed. → `Done`, [`Code::Busy`] when another process has the end
    /// reserved
    BeginAppend {
        /// The process's number for this append.
        handle: u64,
    },
    /// Ends the reservation. An unknown handle is no error. → `Done`
    EndAppend {
        /// The handle of the [`BackingOp::BeginAppend`].
        handle: u64,
    },
    /// A piece of an append that is too large for one request. With the last piece the whole append is written at the
    /// end; no other write comes in between. [`Code::Interrupted`] when the pieces before it are not, or no longer,
    /// known; [`Code::Busy`] when too many appends are being collected: in both cases the process starts again from the
    /// first piece. → `Count`: the offset of the first byte; 0 for pieces before the last
    AppendPiece {
        /// The process's number for this append.
        handle: u64,
        /// Where this piece begins in the append: at the end of the piece before.
        at: u32,
        /// Bytes of the whole append: 1 to [`MOVE_BYTES_MAX`].
        total: u32,
        /// Data, 1 to [`BACKING_BYTES_MAX`] bytes.
        bytes: &'a [u8],
    },
    /// Transfers data between it and the requesting process's buffer. Sent only to the process's own daemon.
    /// [`Code::Fault`] when the process has no such buffer, or no longer. → `Count`: the bytes transferred; a read
    /// returns fewer than requested at the end of the file, a write never
    Move(Move),
    /// Operates on the state of a group of processes that opened the file together. This is the file's first backing
    /// file; it need not exist any longer. → see [`GroupOp`]
    Group {
        /// The group's number, which its first process drew.
        key: u64,
        /// The operation.
        op: GroupOp,
    },
    /// Changes a 64-bit word of a piece of a volume, once: a repeated request gets the same reply. [`Code::Io`] when it
    /// is not known whether a worker that was killed has done it. → `Count`: what the word was
    Atomic {
        /// The word.
        word: PieceWord,
        /// The operation.
        op: AtomicOp,
    },
}

/// The direction of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MoveKind {
    /// From the backing file into the buffer.
    Read,
    /// From the buffer into the backing file.
    Write,
    /// From the buffer to the end of the backing file. No other write comes in between.
    Append,
}

/// A transfer of data through a process's buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Move {
    /// Its direction.
    pub kind: MoveKind,
    /// Offset in the backing file; ignored for an append.
    pub offset: u64,
    /// Length: 1 to [`MOVE_BYTES_MAX`].
    pub bytes: u32,
    /// The number of the buffer, or of memory that the program has allocated.
    pub buffer: u64,
    /// Offset in it.
    pub at: u32,
}

impl Move {
    fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        w.u8(match self.kind {
            MoveKind::Read => 0,
            MoveKind::Write => 1,
            MoveKind::Append => 2,
        })?;
        w.u64(self.offset)?;
        w.u32(self.bytes)?;
        w.u64(self.buffer)?;
        w.u32(self.at)
    }

    fn decode(r: &mut Reader<'_>) -> Result<Move, Code> {
        let kind = match r.u8()? {
            0 => MoveKind::Read,
            1 => MoveKind::Write,
            2 => MoveKind::Append,
            _ => return Err(Code::Malformed),
        };
        let (offset, bytes, buffer, at) = (r.u64()?, r.u32()?, r.u64()?, r.u32()?);
        within(offset, u64::from(bytes))?;
        if bytes == 0 {
            return Err(Code::Invalid);
        }
        if bytes as usize > MOVE_BYTES_MAX {
            return Err(Code::TooBig);
        }
        // The daemon knows how long the memory is.
        if u64::from(at) + u64::from(bytes) > PROGRAM_MEMORY_BYTES_MAX as u64 {
            return Err(Code::Fault);
        }
        Ok(Move { kind, offset, bytes, buffer, at })
    }
}

/// Attributes of a backing file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BackingAttr {
    /// Bytes up to its end.
    pub bytes: u64,
    /// Bytes that it takes on the medium.
    pub allocated_bytes: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of content.
    pub mtime: Timestamp,
    /// Last change of the inode.
    pub ctime: Timestamp,
}

impl BackingId {
    /// The backing file of a layout's stripe.
    pub fn of(ino: Ino, layout: &Layout, component: usize, stripe: u16) -> BackingId {
        let target = layout.components()[component].target(stripe);
        BackingId { target, ino, number: layout.file_number(component) as u8, stripe }
    }

    /// A piece of a volume. Of the operations `Open`, `Close`, `Read`, `Write`, `ReadRuns`, `WriteRuns`, `Move`, `Stat` and
    /// `Atomic` apply to it, and to a thin one `Allocate` that punches.
    pub fn of_piece(target: u32, piece: PieceId) -> BackingId {
        BackingId {
            target,
            ino: piece.volume,
            number: PIECE,
            stripe: piece.segment << PIECE_INDEX_BITS | piece.index,
        }
    }

    /// The piece of a volume that it is; none for a backing file.
    pub fn piece(&self) -> Option<PieceId> {
        let (segment, index) = (self.stripe >> PIECE_INDEX_BITS, self.stripe & ((1 << PIECE_INDEX_BITS) - 1));
        let piece = PieceId { volume: self.ino, segment, index };
        (self.number == PIECE).then_some(piece)
    }

    /// The node of its target.
    pub fn node(&self) -> NodeId {
        NodeId((self.target >> 16) as u16)
    }

    fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        w.u32(self.target)?;
        w.u64(self.ino.0)?;
        w.u8(self.number)?;
        w.u16(self.stripe)
    }

    fn decode(r: &mut Reader<'_>) -> Result<BackingId, Code> {
        let id = BackingId { target: r.u32()?, ino: Ino(r.u64()?), number: r.u8()?, stripe: r.u16()? };
        let is_sound = match id.piece() {
            // Each value of the 16 bits is a piece.
            Some(_) => true,
            None => usize::from(id.number) <= COMPONENTS_MAX && id.stripe < STRIPES_MAX,
        };
        is_sound.then_some(id).ok_or(Code::Malformed)
    }

    /// Encodes a list of them, 15 bytes each.
    pub fn list(ids: &[BackingId]) -> Vec<u8> {
        let mut bytes = vec![0; ids.len() * BACKING_ID_BYTES];
        let mut w = Writer::new(&mut bytes);
        // The buffer has space for all of them.
        let _ = ids.iter().try_for_each(|id| id.encode(&mut w));
        bytes
    }

    /// Decodes a list, up to the first entry that is malformed. Lists in decoded messages have none
    /// ([`BackingId::is_list`]).
    pub fn listed(bytes: &[u8]) -> impl Iterator<Item = BackingId> + '_ {
        let all = bytes.chunks_exact(BACKING_ID_BYTES);
        all.map_while(|bytes| BackingId::decode(&mut Reader::new(bytes)).ok())
    }

    /// True for a well-formed list of at most `most` backing files.
    pub(crate) fn is_list(bytes: &[u8], most: usize) -> bool {
        bytes.len().is_multiple_of(BACKING_ID_BYTES)
            && bytes.len() <= most * BACKING_ID_BYTES
            && BackingId::listed(bytes).count() == bytes.len() / BACKING_ID_BYTES
    }
}

impl<'a> BackingOp<'a> {
    pub(crate) fn encode(&self, id: &BackingId, w: &mut Writer<'_>) -> Result<(), Code> {
        id.encode(w)?;
        match *self {
            BackingOp::Stat => w.u8(1),
            BackingOp::Make => w.u8(2),
            BackingOp::Read { offset, bytes } => {
                w.u8(4)?;
                w.u64(offset)?;
                w.u32(bytes)
            }
            BackingOp::Write { offset, append, bytes } => {
                w.u8(if append { 6 } else { 5 })?;
                w.u64(offset)?;
                w.long_bytes(bytes)
            }
            BackingOp::Truncate { bytes } => {
                w.u8(7)?;
                w.u64(bytes)
            }
            BackingOp::Allocate { mode, offset, bytes } => {
                w.u8(8)?;
                w.u32(mode)?;
                w.u64(offset)?;
                w.u64(bytes)
            }
            BackingOp::SetTimes { atime, mtime } => {
                w.u8(9)?;
                atime.encode(w)?;
                mtime.encode(w)
            }
            BackingOp::Sync => w.u8(10),
            BackingOp::Open { handle } => {
                w.u8(11)?;
                w.u64(handle)
            }
            BackingOp::Close { handle } => {
                w.u8(12)?;
                w.u64(handle)
            }
            BackingOp::Lock(wish) => {
                w.u8(13)?;
                wish.encode(w)
            }
            BackingOp::TestLock(wish) => {
                w.u8(14)?;
                wish.encode(w)
            }
            BackingOp::BeginAppend { handle } => {
                w.u8(15)?;
                w.u64(handle)
            }
            BackingOp::EndAppend { handle } => {
                w.u8(16)?;
                w.u64(handle)
            }
            BackingOp::Move(wish) => {
                w.u8(17)?;
                wish.encode(w)
            }
            BackingOp::AppendPiece { handle, at, total, bytes } => {
                w.u8(18)?;
                w.u64(handle)?;
                w.u32(at)?;
                w.u32(total)?;
                w.long_bytes(bytes)
            }
            BackingOp::Group { key, op } => {
                w.u8(19)?;
                w.u64(key)?;
                op.encode(w)
            }
            BackingOp::Atomic { word: PieceWord::At(offset), op } => {
                w.u8(20)?;
                w.u64(offset)?;
                op.encode(w)
            }
            BackingOp::Atomic { word: PieceWord::End, op } => {
                w.u8(21)?;
                op.encode(w)
            }
            BackingOp::ReadRuns { runs } => {
                w.u8(22)?;
                w.long_bytes(runs.list)
            }
            BackingOp::WriteRuns { runs, bytes } => {
                w.u8(23)?;
                w.long_bytes(runs.list)?;
                w.long_bytes(bytes)
            }
        }
    }

    /// Decodes and checks: in the result offsets and lengths are within a file's bounds.
    pub(crate) fn decode(r: &mut Reader<'a>) -> Result<(BackingId, BackingOp<'a>), Code> {
        let id = BackingId::decode(r)?;
        let op = match r.u8()? {
            1 => BackingOp::Stat,
            2 => BackingOp::Make,
            4 => {
                let (offset, bytes) = (r.u64()?, r.u32()?);
                within(offset, u64::from(bytes))?;
                if bytes as usize > BACKING_BYTES_MAX {
                    return Err(Code::TooBig);
                }
                BackingOp::Read { offset, bytes }
            }
            tag @ (5 | 6) => {
                let (offset, bytes) = (r.u64()?, r.long_bytes()?);
                within(offset, bytes.len() as u64)?;
                if bytes.len() > BACKING_BYTES_MAX {
                    return Err(Code::TooBig);
                }
                BackingOp::Write { offset, append: tag == 6, bytes }
            }
            7 => {
                let bytes = r.u64()?;
                within(bytes, 0)?;
                BackingOp::Truncate { bytes }
            }
            8 => {
                let (mode, offset, bytes) = (r.u32()?, r.u64()?, r.u64()?);
                within(offset, bytes)?;
                BackingOp::Allocate { mode, offset, bytes }
            }
            9 => BackingOp::SetTimes { atime: TimeSet::decode(r)?, mtime: TimeSet::decode(r)? },
            10 => BackingOp::Sync,
            11 => BackingOp::Open { handle: r.u64()? },
            12 => BackingOp::Close { handle: r.u64()? },
            13 => BackingOp::Lock(LockRequest::decode(r)?),
            14 => BackingOp::TestLock(LockRequest::decode(r)?),
            15 => BackingOp::BeginAppend { handle: r.u64()? },
            16 => BackingOp::EndAppend { handle: r.u64()? },
            17 => BackingOp::Move(Move::decode(r)?),
            18 => {
                let (handle, at, total, bytes) = (r.u64()?, r.u32()?, r.u32()?, r.long_bytes()?);
                if bytes.len() > BACKING_BYTES_MAX || total as usize > MOVE_BYTES_MAX {
                    return Err(Code::TooBig);
                }
                if bytes.is_empty() || u64::from(at) + bytes.len() as u64 > u64::from(total) {
                    return Err(Code::Invalid);
                }
                BackingOp::AppendPiece { handle, at, total, bytes }
            }
            19 => BackingOp::Group { key: r.u64()?, op: GroupOp::decode(r)? },
            20 => {
                let offset = r.u64()?;
                within(offset, 8)?;
                if !offset.is_multiple_of(8) {
                    return Err(Code::Invalid);
                }
                BackingOp::Atomic { word: PieceWord::At(offset), op: AtomicOp::decode(r)? }
            }
            21 => BackingOp::Atomic { word: PieceWord::End, op: AtomicOp::decode(r)? },
            22 => BackingOp::ReadRuns { runs: BackingRuns::of(r.long_bytes()?)? },
            23 => {
                let (runs, bytes) = (BackingRuns::of(r.long_bytes()?)?, r.long_bytes()?);
                if runs.bytes() != bytes.len() {
                    return Err(Code::Malformed);
                }
                BackingOp::WriteRuns { runs, bytes }
            }
            _ => return Err(Code::Malformed),
        };
        Ok((id, op))
    }
}

impl BackingAttr {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        w.u64(self.bytes)?;
        w.u64(self.allocated_bytes)?;
        for t in [self.atime, self.mtime, self.ctime] {
            w.u64(t.sec as u64)?;
            w.u32(t.nsec)?;
        }
        Ok(())
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<BackingAttr, Code> {
        let (bytes, allocated_bytes) = (r.u64()?, r.u64()?);
        let mut times = [Timestamp::default(); 3];
        for t in &mut times {
            *t = Timestamp { sec: r.u64()? as i64, nsec: r.u32()? };
            if t.nsec >= 1_000_000_000 {
                return Err(Code::Malformed);
            }
        }
        let [atime, mtime, ctime] = times;
        Ok(BackingAttr { bytes, allocated_bytes, atime, mtime, ctime })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::FILE_BYTES_MAX;
    use crate::lock::LockKind;

    fn round_trip(op: BackingOp<'_>) -> Result<(), Code> {
        let id = BackingId { target: 3 << 16 | 1, ino: Ino(77), number: COMPONENTS_MAX as u8, stripe: 255 };
        let mut buffer = vec![0; BACKING_BYTES_MAX + 64];
        let mut w = Writer::new(&mut buffer);
        op.encode(&id, &mut w).unwrap();
        let n = w.len();
        let decoded = BackingOp::decode(&mut Reader::new(&buffer[..n]))?;
        assert_eq!(decoded, (id, op));
        for short in 0..n.min(200) {
            assert!(BackingOp::decode(&mut Reader::new(&buffer[..short])).is_err(), "{op:?} cut to {short}");
        }
        Ok(())
    }

    fn list(runs: &[(u64, u32)]) -> Vec<u8> {
        let mut list = Vec::new();
        runs.iter().for_each(|(offset, bytes)| BackingRuns::add(&mut list, *offset, *bytes));
        list
    }

    #[test]
    fn data_of_ranges_are_as_long_as_the_ranges() {
        let all = list(&[(0, 1)]);
        let runs = BackingRuns::of(&all).unwrap();
        assert_eq!(round_trip(BackingOp::WriteRuns { runs, bytes: b"xy" }), Err(Code::Malformed));
    }

    fn group(op: GroupOp) -> BackingOp<'static> {
        BackingOp::Group { key: u64::MAX, op }
    }

    #[test]
    fn every_operation_round_trips() {
        let at = TimeSet::At(Timestamp { sec: -1, nsec: 5 });
        for op in [
            BackingOp::Stat,
            BackingOp::Make,
            BackingOp::Read { offset: 1 << 40, bytes: BACKING_BYTES_MAX as u32 },
            BackingOp::Write { offset: 5, append: false, bytes: &[1; BACKING_BYTES_MAX] },
            BackingOp::Write { offset: 0, append: true, bytes: b"" },
            BackingOp::Truncate { bytes: FILE_BYTES_MAX },
            BackingOp::Allocate { mode: 3, offset: 4096, bytes: 1 },
            BackingOp::SetTimes { atime: TimeSet::Now, mtime: at },
            BackingOp::Sync,
            BackingOp::Open { handle: 7 },
            BackingOp::Close { handle: 8 },
            BackingOp::Lock(LockRequest {
                owner: 1,
                flock: true,
                kind: LockKind::Write,
                start: 0,
                end: FILE_BYTES_MAX,
            }),
            BackingOp::TestLock(LockRequest {
                owner: 2,
                flock: false,
                kind: LockKind::Read,
                start: 5,
                end: 6,
            }),
            BackingOp::BeginAppend { handle: 9 },
            BackingOp::EndAppend { handle: 9 },
            BackingOp::Move(Move { kind: MoveKind::Read, offset: 1 << 40, bytes: 1, buffer: 77, at: 0 }),
            BackingOp::Move(Move {
                kind: MoveKind::Append,
                offset: 0,
                bytes: MOVE_BYTES_MAX as u32,
                buffer: u64::MAX,
                at: (PROGRAM_MEMORY_BYTES_MAX - MOVE_BYTES_MAX) as u32,
            }),
            BackingOp::AppendPiece { handle: 9, at: 5, total: 7, bytes: b"67" },
            BackingOp::AppendPiece {
                handle: 9,
                at: (MOVE_BYTES_MAX - BACKING_BYTES_MAX) as u32,
                total: MOVE_BYTES_MAX as u32,
                bytes: &[1; BACKING_BYTES_MAX],
            },
            BackingOp::ReadRuns { runs: BackingRuns::of(&list(&[(1 << 40, 1), (0, 65000)])).unwrap() },
            BackingOp::WriteRuns { runs: BackingRuns::of(&list(&[(7, 2), (3, 1)])).unwrap(), bytes: b"abc" },
            group(GroupOp::Make { position: FILE_BYTES_MAX }),
            group(GroupOp::Move { by: 3 }),
            group(GroupOp::Seek { position: 0 }),
            group(GroupOp::Lock(LockRequest {
                owner: 1,
                flock: false,
                kind: LockKind::Unlock,
                start: 7,
                end: 7,
            })),
            group(GroupOp::End),
        ] {
            round_trip(op).unwrap();
        }
        let single = BackingId::of(Ino(1), &Layout::single(NodeId(3), 1), 0, 0);
        assert_eq!(single, BackingId { target: 3 << 16 | 1, ino: Ino(1), number: 0, stripe: 0 });
        assert_eq!(single.node(), NodeId(3));
        let several = Layout::overstriped(NodeId(3), 1, 2, 4096).unwrap();
        let second = BackingId { number: 1, stripe: 1, ..single };
        assert_eq!(BackingId::of(Ino(1), &several, 0, 1), second);
        let mut list = BackingId::list(&[single, second]);
        assert_eq!(BackingId::listed(&list).collect::<Vec<_>>(), [single, second]);
        assert!(BackingId::is_list(&list, 2) && BackingId::is_list(&[], 2));
        assert!(!BackingId::is_list(&list, 1) && !BackingId::is_list(&list[1..], 2));
        // No layout has so many stripes.
        list.truncate(2 * BACKING_ID_BYTES - 2);
        list.extend(STRIPES_MAX.to_le_bytes());
        assert!(!BackingId::is_list(&list, 2));
    }

    #[test]
    fn decode_beyond_a_file_s_bounds_is_refused() {
        let end = FILE_BYTES_MAX;
        for op in [
            BackingOp::Read { offset: end, bytes: 1 },
            BackingOp::Write { offset: u64::MAX, append: false, bytes: b"x" },
            BackingOp::Truncate { bytes: end + 1 },
            BackingOp::Allocate { mode: 0, offset: u64::MAX, bytes: u64::MAX },
            group(GroupOp::Make { position: end + 1 }),
            group(GroupOp::Move { by: u64::MAX }),
            group(GroupOp::Seek { position: end + 1 }),
        ] {
            assert_eq!(round_trip(op), Err(Code::FileTooLarge), "{op:?}");
        }
        assert_eq!(round_trip(BackingOp::Read { offset: 0, bytes: u32::MAX }), Err(Code::TooBig));
        let moving = Move { kind: MoveKind::Write, offset: 0, bytes: 2, buffer: 1, at: 0 };
        for (wrong, code) in [
            (Move { offset: end - 1, ..moving }, Code::FileTooLarge),
            (Move { offset: u64::MAX, ..moving }, Code::FileTooLarge),
            (Move { bytes: 0, ..moving }, Code::Invalid),
            (Move { bytes: MOVE_BYTES_MAX as u32 + 1, ..moving }, Code::TooBig),
            (Move { at: u32::MAX, ..moving }, Code::Fault),
        ] {
            assert_eq!(round_trip(BackingOp::Move(wrong)), Err(code), "{wrong:?}");
        }
        let long = vec![1; BACKING_BYTES_MAX + 1];
        for (at, total, bytes, code) in [
            (0, MOVE_BYTES_MAX as u32 + 1, &long[..5], Code::TooBig),
            (0, MOVE_BYTES_MAX as u32, &long[..], Code::TooBig),
            (0, 5, &long[..0], Code::Invalid),
            (1, 5, &long[..5], Code::Invalid),
            (u32::MAX, 5, &long[..1], Code::Invalid),
        ] {
            let piece = BackingOp::AppendPiece { handle: 1, at, total, bytes };
            assert_eq!(round_trip(piece), Err(code), "{at} of {total}");
        }
        let wish = LockRequest { owner: 1, flock: false, kind: LockKind::Unlock, start: 7, end: 6 };
        assert_eq!(round_trip(BackingOp::Lock(wish)), Err(Code::Invalid));
        assert_eq!(round_trip(BackingOp::Lock(LockRequest { end: u64::MAX, ..wish })), Err(Code::Invalid));
    }
}
