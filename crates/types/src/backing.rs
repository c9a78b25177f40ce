//! Operations on one backing file, for those who cannot open it: it lies on another node's target.

use crate::attr::Timestamp;
use crate::bytes::{Reader, Writer};
use crate::error::Code;
use crate::group::GroupOp;
use crate::id::{Ino, NodeId};
use crate::layout::Layout;
use crate::limits::{
    BACKING_BYTES_MAX, BUFFER_BYTES, COMPONENTS_MAX, FILE_BYTES_MAX, MOVE_BYTES_MAX, STRIPES_MAX,
};
use crate::lock::LockWish;
use crate::set_attr::TimeSet;

/// A backing file, by the target that holds it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BackingId {
    /// The target, as layouts name it: node in the upper 16 bits, the node's target index in the lower.
    pub target: u32,
    /// The file.
    pub ino: Ino,
    /// The number in its name: [`Layout::file_number`] of its component.
    pub number: u8,
    /// Stripe of the component.
    pub stripe: u16,
}

/// Bytes of one in a list.
const BACKING_ID_BYTES: usize = 15;

/// What to do with a backing file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BackingOp<'a> {
    /// Size, space and times. → `Backing`
    Stat,
    /// Makes it, empty, unless it is there. [`Code::NotFound`] when it was removed before, [`Code::Invalid`] for an
    /// inode of the node itself, whose shard makes it ([`crate::Request::MakeBacking`]). → `Done`
    Make,
    /// Reads: fewer bytes than asked for only at its end. → `Bytes`
    Read {
        /// Where.
        offset: u64,
        /// How much, at most [`BACKING_BYTES_MAX`].
        bytes: u32,
    },
    /// Writes all or fails. → `Count`: where the first byte went
    Write {
        /// Where; with `append` not looked at.
        offset: u64,
        /// At the end, wherever that is when it is written: no other write comes between.
        append: bool,
        /// What, at most [`BACKING_BYTES_MAX`].
        bytes: &'a [u8],
    },
    /// Cuts it, or lengthens it by a hole. → `Done`
    Truncate {
        /// Its new size.
        bytes: u64,
    },
    /// `fallocate`. → `Done`
    Allocate {
        /// As the system call has it.
        mode: u32,
        /// Where.
        offset: u64,
        /// How much.
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
    /// Keeps it open for the asking process, so that it stays when it is unlinked, until [`BackingOp::Close`] or the
    /// process's end. → `Done`
    Open {
        /// The process's number for this open.
        handle: u64,
    },
    /// Ends an open; one that is not known is fine. → `Done`
    Close {
        /// As it was opened.
        handle: u64,
    },
    /// Takes or drops a lock for the asking process, without waiting: it excludes those of the node's own programs, and
    /// goes with the process. → `Done`, [`Code::Busy`] when another is in the way
    Lock(LockWish),
    /// Which lock is in the way of this one? → `Done` for none, `Lock`
    TestLock(LockWish),
    /// The asking process is about to write at the end of a file of which this is one backing file of several: nobody
    /// else is until [`BackingOp::EndAppend`], the process's end, or [`crate::limits::APPEND_HOLD_MS`] have passed. →
    /// `Done`, [`Code::Busy`] when somebody is
    BeginAppend {
        /// The process's number for this append.
        handle: u64,
    },
    /// It has. One that is not known is fine. → `Done`
    EndAppend {
        /// As it was begun.
        handle: u64,
    },
    /// A piece of an append that is too large for one request; the last one has it written at the end, as a whole: no
    /// other write comes between. [`Code::Interrupted`] when the pieces before it are not known (any more),
    /// [`Code::Busy`] when too many appends are gathered: then from the first piece on. → `Count`: where the first byte
    /// went; 0 of pieces before the last
    AppendPiece {
        /// The process's number for this append.
        handle: u64,
        /// Where in the append this begins: where the piece before it ended.
        at: u32,
        /// Bytes of the append: 1 to [`MOVE_BYTES_MAX`].
        total: u32,
        /// What, 1 to [`BACKING_BYTES_MAX`] bytes.
        bytes: &'a [u8],
    },
    /// Moves data between it and the asking process's buffer. [`Code::Fault`] when the process has no such buffer, or
    /// none any more. Asked of the process's own daemon alone. → `Count`: the bytes moved; fewer than asked for are
    /// read at its end, and written never
    Move(Move),
    /// Does something with what a group of processes has in common that opened the file of which this is the first
    /// backing file. It need not be there any more. → what [`GroupOp`] says
    Group {
        /// The group's number, of its first process's drawing.
        key: u64,
        /// What to do.
        op: GroupOp,
    },
}

/// Which way data are moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MoveKind {
    /// From the backing file into the buffer.
    Read,
    /// From the buffer into the backing file.
    Write,
    /// The same, at its end: no other write comes between.
    Append,
}

/// Data to be moved through a process's buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Move {
    /// Which way.
    pub kind: MoveKind,
    /// Where in the backing file; of an append not looked at.
    pub offset: u64,
    /// How much: 1 to [`MOVE_BYTES_MAX`].
    pub bytes: u32,
    /// The buffer, as the daemon numbered it.
    pub buffer: u64,
    /// Where in the buffer.
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
        match offset.checked_add(u64::from(bytes)) {
            Some(end) if end <= FILE_BYTES_MAX => {}
            _ => return Err(Code::FileTooLarge),
        }
        if bytes == 0 {
            return Err(Code::Invalid);
        }
        if bytes as usize > MOVE_BYTES_MAX {
            return Err(Code::TooBig);
        }
        if u64::from(at) + u64::from(bytes) > BUFFER_BYTES as u64 {
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
    /// Bytes of the medium that it takes.
    pub allocated_bytes: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of content.
    pub mtime: Timestamp,
    /// Last change of anything.
    pub ctime: Timestamp,
}

impl BackingId {
    /// A backing file of a layout.
    pub fn of(ino: Ino, layout: &Layout, component: usize, stripe: u16) -> BackingId {
        let target = layout.components()[component].target(stripe);
        BackingId { target, ino, number: layout.file_number(component) as u8, stripe }
    }

    /// The node that has it.
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
        if usize::from(id.number) > COMPONENTS_MAX || id.stripe >= STRIPES_MAX {
            return Err(Code::Malformed);
        }
        Ok(id)
    }

    /// The bytes of a list of them, 15 each.
    pub fn list(ids: &[BackingId]) -> Vec<u8> {
        let mut bytes = vec![0; ids.len() * BACKING_ID_BYTES];
        let mut w = Writer::new(&mut bytes);
        // There is room for all of them.
        let _ = ids.iter().try_for_each(|id| id.encode(&mut w));
        bytes
    }

    /// The backing files of a list, as far as it is one: what is decoded from a message is.
    pub fn listed(bytes: &[u8]) -> impl Iterator<Item = BackingId> + '_ {
        let all = bytes.chunks_exact(BACKING_ID_BYTES);
        all.map_while(|bytes| BackingId::decode(&mut Reader::new(bytes)).ok())
    }

    /// True for bytes that are a list of at most so many.
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
        }
    }

    /// Decodes and checks: offsets and lengths are within a file's bounds behind this point.
    pub(crate) fn decode(r: &mut Reader<'a>) -> Result<(BackingId, BackingOp<'a>), Code> {
        let id = BackingId::decode(r)?;
        let within = |offset: u64, bytes: u64| match offset.checked_add(bytes) {
            Some(end) if end <= FILE_BYTES_MAX => Ok(()),
            _ => Err(Code::FileTooLarge),
        };
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
            13 => BackingOp::Lock(LockWish::decode(r)?),
            14 => BackingOp::TestLock(LockWish::decode(r)?),
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
            BackingOp::Lock(LockWish {
                owner: 1,
                flock: true,
                kind: LockKind::Write,
                start: 0,
                end: FILE_BYTES_MAX,
            }),
            BackingOp::TestLock(LockWish { owner: 2, flock: false, kind: LockKind::Read, start: 5, end: 6 }),
            BackingOp::BeginAppend { handle: 9 },
            BackingOp::EndAppend { handle: 9 },
            BackingOp::Move(Move { kind: MoveKind::Read, offset: 1 << 40, bytes: 1, buffer: 77, at: 0 }),
            BackingOp::Move(Move {
                kind: MoveKind::Append,
                offset: 0,
                bytes: MOVE_BYTES_MAX as u32,
                buffer: u64::MAX,
                at: (BUFFER_BYTES - MOVE_BYTES_MAX) as u32,
            }),
            BackingOp::AppendPiece { handle: 9, at: 5, total: 7, bytes: b"67" },
            BackingOp::AppendPiece {
                handle: 9,
                at: (MOVE_BYTES_MAX - BACKING_BYTES_MAX) as u32,
                total: MOVE_BYTES_MAX as u32,
                bytes: &[1; BACKING_BYTES_MAX],
            },
            group(GroupOp::Make { position: FILE_BYTES_MAX }),
            group(GroupOp::Move { by: 3 }),
            group(GroupOp::Seek { position: 0 }),
            group(GroupOp::Lock(LockWish {
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
            (Move { at: BUFFER_BYTES as u32 - 1, ..moving }, Code::Fault),
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
        let wish = LockWish { owner: 1, flock: false, kind: LockKind::Unlock, start: 7, end: 6 };
        assert_eq!(round_trip(BackingOp::Lock(wish)), Err(Code::Invalid));
        assert_eq!(round_trip(BackingOp::Lock(LockWish { end: u64::MAX, ..wish })), Err(Code::Invalid));
    }
}
