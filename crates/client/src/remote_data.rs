//! Transfers of data of backing files on other nodes. A call is cut into parts, each a request in a slot of its own.
//! Several are in progress at the same time, to all nodes that have some of the data. Up to [`MOVE_ABOVE_BYTES`] bytes
//! travel in the request. Longer parts go through a piece of the process's buffer (`buffer`), which the network reads
//! and writes directly. Short parts of one backing file travel together (`together`).
//!
//! A call waits for its first slot, and takes more slots and pieces only if they are free. So threads that transfer
//! data at the same time never wait for one another's slots.

use std::collections::VecDeque;

use forebay_ring::{call_clock, pause, Claim, Ring};
use forebay_types::limits::{
    BACKING_AHEAD, BACKING_BYTES_MAX, BUFFER_BYTES, MESSAGE_BYTES_MAX, MOVE_ABOVE_BYTES, MOVE_BYTES_MAX,
    MOVE_BYTES_MIN,
};
use forebay_types::{BackingId, BackingOp, Code, Move, MoveKind, Reply, Request};

use crate::attached::Attached;
use crate::buffer::{Buffer, Piece};
use crate::call_deadline::CallDeadline;
use crate::direct::DirectPlace;
use crate::far_parts::{Memory, Part};
use crate::locks::{APPEND_TIMEOUT_NS, PAUSE, PAUSE_MAX};
use crate::pool::{caller, Pool};
use crate::remote_inodes::{gone_is_stale, new_handle};
use crate::together::Together;

/// Room for the fields of a data request, with a reserve.
const FIELDS_BYTES: usize = 96;
/// Parts start at page boundaries of their range.
const PAGE_BYTES: usize = 4096;

const _: () = assert!(BACKING_BYTES_MAX + FIELDS_BYTES <= MESSAGE_BYTES_MAX);

/// The result of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Moved {
    /// All parts of the caller's memory below this offset were moved.
    pub(crate) end: usize,
    /// The error of the part at `end`. `None` if the backing file ends there, or all was moved.
    pub(crate) failed: Option<Code>,
    /// It is unknown whether a part was written, or still will be.
    pub(crate) in_doubt: bool,
}

impl Moved {
    /// Lowers the end to `at`, with the reason.
    pub(crate) fn ends(&mut self, at: usize, failed: Option<Code>) {
        if at < self.end {
            (self.end, self.failed) = (at, failed);
        }
    }
}

/// Cuts a range of a backing file and of memory into parts for one request each.
pub(crate) fn parts(id: BackingId, offset: u64, at: usize, len: usize) -> impl Iterator<Item = Part> {
    parts_of(id, offset, at, len, MOVE_BYTES_MIN)
}

/// The length of the parts of a call that moves so many bytes.
pub(crate) fn part_bytes(len: usize, least: usize) -> usize {
    (len / BACKING_AHEAD).next_multiple_of(PAGE_BYTES).clamp(least, MOVE_BYTES_MAX)
}

/// The same with parts of so many bytes at least, except the last one.
pub(crate) fn parts_of(
    id: BackingId,
    offset: u64,
    at: usize,
    len: usize,
    least: usize,
) -> impl Iterator<Item = Part> {
    let size = part_bytes(len, least);
    (0..len).step_by(size).map(move |from| Part {
        id,
        offset: offset + from as u64,
        at: at + from,
        len: (len - from).min(size),
    })
}

/// Room for a request, or its reply, with so many bytes of data. No more than that: each call sets it to zero.
fn room_for(room: &mut Vec<u8>, data_bytes: usize) -> &mut [u8] {
    if room.len() < FIELDS_BYTES + data_bytes {
        room.resize(FIELDS_BYTES + data_bytes, 0);
    }
    room
}

/// Removes and returns the part with the lowest offset in memory, and drops all parts at or after `end`.
fn lowest(again: &mut Vec<Part>, end: usize) -> Option<Part> {
    again.retain(|part| part.at < end);
    let first = (0..again.len()).min_by_key(|i| again[*i].at)?;
    Some(again.swap_remove(first))
}

/// The registered memory that the data of a part pass through.
enum Through {
    /// A piece of the process's buffer, from and to which this process copies.
    Piece(Piece),
    /// The caller's memory itself.
    Memory(DirectPlace),
}

/// A request in progress.
struct UnderWay<'r> {
    claim: Claim<'r>,
    part: Part,
    /// The part and those that travel with it; none if it travels alone.
    together: Option<Together>,
    /// Through what the data pass; `None` if they are in the request or its reply.
    through: Option<Through>,
}

impl Pool {
    /// Moves parts, in any order. All parts lie below `total` in the caller's memory. Where that is allocated memory
    /// (`program_memory`), and `is_direct`, it is not copied: a failed call leaves any bytes in it then.
    ///
    /// # Safety
    /// The memory of all parts is readable or writable, as `memory` requires.
    pub(crate) unsafe fn move_far(
        &'static self,
        parts: &mut dyn Iterator<Item = Part>,
        total: usize,
        memory: Memory,
        is_direct: bool,
    ) -> Result<Moved, Code> {
        let attached: &'static Attached = self.attached()?;
        let (ring, alive): (&'static Ring, _) = (&attached.ring, || self.is_alive(attached));
        let mut direct = if is_direct { self.direct(attached, memory, total) } else { None };
        let mut room = Vec::new();
        // Parts to send before new ones: remainders of parts, and parts that were refused because the daemon did not
        // know their buffer.
        let mut again: Vec<Part> = Vec::new();
        // A part that has been taken and did not fit the request before.
        let mut next: Option<Part> = None;
        let mut under_way: VecDeque<UnderWay<'_>> = VecDeque::with_capacity(BACKING_AHEAD);
        let mut moved = Moved { end: total, failed: None, in_doubt: false };
        let mut deadline = CallDeadline::new();
        loop {
            while under_way.len() < BACKING_AHEAD && !deadline.is_over() {
                // Everything below the known end is moved, regardless of errors at higher offsets.
                let retried = lowest(&mut again, moved.end);
                let is_new = retried.is_none() && moved.end == total;
                let new = || if is_new { next.take().or_else(|| parts.next()) } else { None };
                let Some(mut part) = retried.or_else(new) else { break };
                let claim = if under_way.is_empty() {
                    match ring.claim(&alive) {
                        Ok(claim) => claim,
                        Err(failure) => {
                            moved.ends(part.at, Some(self.failed(attached, failure)));
                            break;
                        }
                    }
                } else {
                    let Some(claim) = ring.try_claim() else {
                        again.push(part);
                        break;
                    };
                    claim
                };
                let place = direct.as_ref().and_then(|direct| direct.place(&part));
                let mut through = place.map(Through::Memory);
                if part.len > MOVE_ABOVE_BYTES && through.is_none() {
                    let is_piece = |u: &&UnderWay<'_>| matches!(u.through, Some(Through::Piece(_)));
                    let has = under_way.iter().filter(is_piece).count();
                    let piece = attached.buffers.another(has, part.id.node(), || self.new_buffer(attached));
                    if piece.is_none() && has > 0 {
                        // One of this call's pieces will be free soon.
                        again.push(part);
                        break;
                    }
                    if piece.is_none() && part.len > BACKING_BYTES_MAX {
                        let (offset, at) =
                            (part.offset + BACKING_BYTES_MAX as u64, part.at + BACKING_BYTES_MAX);
                        again.push(Part { offset, at, len: part.len - BACKING_BYTES_MAX, ..part });
                        part.len = BACKING_BYTES_MAX;
                    }
                    through = piece.map(Through::Piece);
                }
                let together = match is_new {
                    true => Together::of(part, parts, &mut next),
                    false => None,
                };
                let inside = data_bytes(&part, through.as_ref(), together.as_ref());
                let message = room_for(&mut room, inside);
                // SAFETY: the caller's promise.
                let encoded = unsafe {
                    match &together {
                        Some(together) => together.encode(memory, message),
                        None => encode(&part, through.as_ref(), memory, message),
                    }
                };
                match encoded {
                    Ok(n) => self.post(attached, &claim, &room[..n]),
                    Err(code) => {
                        moved.ends(part.at, Some(code));
                        break;
                    }
                }
                under_way.push_back(UnderWay { claim, part, together, through });
            }
            // Every posted request is waited for: until its reply, the daemon owns its slot and its piece.
            let Some(UnderWay { claim, part, together, through }) = under_way.pop_front() else { break };
            let until_ns = deadline.until_ns();
            let inside = data_bytes(&part, through.as_ref(), together.as_ref());
            let answered = claim.finish_by(until_ns, room_for(&mut room, inside), &alive, |reply, _| {
                // SAFETY: the caller's promise.
                unsafe {
                    match &together {
                        Some(together) => together.take(memory, reply),
                        None => take(&part, through.as_ref(), memory, reply),
                    }
                }
            });
            match answered {
                Ok(_) => deadline.answered(),
                Err(_) => deadline.end(),
            }
            let answered = answered.map_err(|failure| self.failed(attached, failure)).and_then(|done| done);
            moved.in_doubt |=
                matches!(memory, Memory::From(_)) && answered.is_err_and(|code| !was_answered(code));
            match (answered, through) {
                (Err(Code::Fault), Some(Through::Memory(place))) => {
                    match direct
                        .as_mut()
                        .map_or(Ok(()), |direct| direct.failed(&part, place, Some(ring.epoch())))
                    {
                        Ok(()) => again.push(part),
                        Err(code) => moved.ends(part.at, Some(code)),
                    }
                }
                (Err(code), Some(Through::Memory(place))) if !was_answered(code) => {
                    // The call fails in any case.
                    let _ = direct.as_mut().map(|direct| direct.failed(&part, place, None));
                    moved.ends(part.at, Some(Code::Io));
                }
                // Another worker than that which had the request may have refused it. It is repeated as any request of
                // a worker that died is, though the piece's node may still execute the first one (docs/decisions/0048).
                (Err(Code::Fault), Some(Through::Piece(piece))) => {
                    attached.buffers.refused(part.id.node(), &piece);
                    again.push(part);
                }
                (Err(code), Some(Through::Piece(piece))) if !was_answered(code) => {
                    attached.buffers.lose(piece, matches!(memory, Memory::From(_)));
                    moved.ends(part.at, Some(Code::Io));
                }
                (Err(code), _) => moved.ends(part.at, Some(gone_is_stale(code))),
                (Ok(done), _) if together.is_some() => {
                    if let Some(at) = together.and_then(|together| together.end(done)) {
                        moved.ends(at, None);
                    }
                }
                (Ok(done), through) => {
                    if let Some(Through::Piece(_)) = through {
                        attached.buffers.known(part.id.node());
                    }
                    if done < part.len {
                        moved.ends(part.at + done, None);
                    }
                }
            }
        }
        // Parts that were not sent again.
        again.iter().for_each(|part| moved.ends(part.at, Some(Code::Io)));
        Ok(moved)
    }

    /// Has the process's buffer made, if it may need one.
    pub(crate) fn prepare_buffer(&self, attached: &Attached) {
        if attached.reply.nodes > 1 {
            drop(attached.buffers.piece(attached.reply.node, || self.new_buffer(attached)));
        }
    }

    fn new_buffer(&self, attached: &Attached) -> Result<Buffer, Code> {
        let (mapping, number) = self.address().buffer(attached.reply.session, BUFFER_BYTES)?;
        Ok(Buffer::new(mapping, number))
    }

    /// Appends to a backing file of another node: up to [`MOVE_BYTES_MAX`] bytes as a whole, more in parts of that
    /// size. Returns the number of bytes appended.
    pub(crate) fn append_backing(&self, id: BackingId, bytes: &[u8]) -> Result<usize, Code> {
        let mut done = 0;
        while done < bytes.len() {
            match self.append_some(id, &bytes[done..]) {
                Ok(n) => done += n,
                Err(code) if done == 0 => return Err(gone_is_stale(code)),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    fn append_some(&self, id: BackingId, bytes: &[u8]) -> Result<usize, Code> {
        let attached: &'static Attached = self.attached()?;
        let mut message = vec![0; bytes.len().min(BACKING_BYTES_MAX) + FIELDS_BYTES];
        while bytes.len() > BACKING_BYTES_MAX {
            let piece = attached.buffers.piece(id.node(), || self.new_buffer(attached));
            let Some(piece) = piece else { return self.append_in_pieces(id, bytes, &mut message) };
            let len = bytes.len().min(MOVE_BYTES_MAX);
            // SAFETY: within the slice.
            unsafe { piece.fill(bytes.as_ptr(), len) };
            let epoch = attached.ring.epoch();
            let op = moving(MoveKind::Append, 0, len, (piece.buffer(), piece.at() as u32));
            let n = Request::Backing { id, op }.encode(caller(), &mut message)?;
            let answered = self.exchange(&message[..n], &mut [0; 64], |reply| match Reply::decode(reply)? {
                Reply::Count(n) if n <= len as u64 => Ok(n as usize),
                _ => Err(Code::Malformed),
            });
            match answered.and_then(|answer| answer) {
                // Another worker refused the request. It is unknown whether the file's node has appended the data.
                Err(Code::Fault) if attached.ring.epoch() != epoch => {
                    attached.buffers.lose(piece, true);
                    return Err(Code::Io);
                }
                Err(Code::Fault) => attached.buffers.refused(id.node(), &piece),
                Err(code @ (Code::Io | Code::PoolGone)) => {
                    attached.buffers.lose(piece, true);
                    return Err(code);
                }
                answer => {
                    attached.buffers.known(id.node());
                    return answer;
                }
            }
        }
        let op = BackingOp::Write { offset: 0, append: true, bytes };
        let n = Request::Backing { id, op }.encode(caller(), &mut message)?;
        self.exchange(&message[..n], &mut [0; 64], |reply| match Reply::decode(reply)? {
            Reply::Count(_) => Ok(bytes.len()),
            _ => Err(Code::Malformed),
        })?
    }

    /// Appends, as a whole, data that are too long for one request when there is no piece of a buffer. The file's node
    /// gathers them and writes them when it has all.
    fn append_in_pieces(&self, id: BackingId, bytes: &[u8], message: &mut [u8]) -> Result<usize, Code> {
        let bytes = &bytes[..bytes.len().min(MOVE_BYTES_MAX)];
        let (since, mut wait) = (call_clock(), PAUSE);
        'anew: loop {
            let handle = new_handle();
            for (i, piece) in bytes.chunks(BACKING_BYTES_MAX).enumerate() {
                let (at, total) = ((i * BACKING_BYTES_MAX) as u32, bytes.len() as u32);
                let is_last = at as usize + piece.len() == bytes.len();
                let op = BackingOp::AppendPiece { handle, at, total, bytes: piece };
                let n = Request::Backing { id, op }.encode(caller(), message)?;
                let answered =
                    self.exchange(&message[..n], &mut [0; 64], |reply| match Reply::decode(reply)? {
                        Reply::Count(_) => Ok(()),
                        _ => Err(Code::Malformed),
                    })?;
                match answered {
                    // The node gathers appends of too many callers, or restarted and lost the earlier pieces.
                    Err(Code::Busy | Code::Interrupted) if call_clock() - since < APPEND_TIMEOUT_NS => {
                        pause(wait);
                        wait = (wait * 2).min(PAUSE_MAX);
                        continue 'anew;
                    }
                    Err(Code::Busy | Code::Interrupted) => return Err(Code::TimedOut),
                    Err(code) => return Err(code),
                    Ok(()) if is_last => return Ok(bytes.len()),
                    Ok(()) => {}
                }
            }
        }
    }
}

/// False if it is unknown whether the request was executed, or still will be.
fn was_answered(code: Code) -> bool {
    !matches!(code, Code::Io | Code::PoolGone)
}

impl Through {
    /// The number of the memory, and the offset in it.
    fn place(&self) -> (u64, u32) {
        match self {
            Through::Piece(piece) => (piece.buffer(), piece.at() as u32),
            Through::Memory(DirectPlace { number, at }) => (*number, *at),
        }
    }
}

fn moving(kind: MoveKind, offset: u64, len: usize, (buffer, at): (u64, u32)) -> BackingOp<'static> {
    BackingOp::Move(Move { kind, offset, bytes: len as u32, buffer, at })
}

/// The bytes of data in a part's request or reply.
fn data_bytes(part: &Part, through: Option<&Through>, together: Option<&Together>) -> usize {
    match (through, together) {
        (Some(_), _) => 0,
        (None, Some(together)) => together.message_bytes(),
        (None, None) => part.len,
    }
}

/// Encodes a part's request, and copies the data of a write.
///
/// # Safety
/// For a write, the part's memory is readable.
unsafe fn encode(
    part: &Part,
    through: Option<&Through>,
    memory: Memory,
    message: &mut [u8],
) -> Result<usize, Code> {
    let (offset, len) = (part.offset, part.len);
    let op = match (memory, through) {
        (Memory::Into(_), None) => BackingOp::Read { offset, bytes: len as u32 },
        (Memory::Into(_), Some(through)) => moving(MoveKind::Read, offset, len, through.place()),
        (Memory::From(from), None) => {
            // SAFETY: the caller's promise; the slice is gone when this returns.
            let bytes = unsafe { std::slice::from_raw_parts(part.place(from), len) };
            BackingOp::Write { offset, append: false, bytes }
        }
        (Memory::From(from), Some(through)) => {
            if let Through::Piece(piece) = through {
                // SAFETY: the caller's promise.
                unsafe { piece.fill(part.place(from), len) };
            }
            moving(MoveKind::Write, offset, len, through.place())
        }
    };
    Request::Backing { id: part.id, op }.encode(caller(), message)
}

/// Decodes a part's reply, copies the data of a read, and returns the number of bytes moved.
///
/// # Safety
/// For a read, the part's memory is writable.
unsafe fn take(part: &Part, through: Option<&Through>, memory: Memory, reply: &[u8]) -> Result<usize, Code> {
    match (Reply::decode(reply)?, memory, through) {
        (Reply::Bytes(bytes), Memory::Into(to), None) if bytes.len() <= part.len => {
            // SAFETY: the caller's promise.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), part.place(to), bytes.len()) };
            Ok(bytes.len())
        }
        (Reply::Count(n), Memory::Into(to), Some(through)) if n <= part.len as u64 => {
            if let Through::Piece(piece) = through {
                // SAFETY: the caller's promise.
                unsafe { piece.empty(part.place(to), n as usize) };
            }
            Ok(n as usize)
        }
        (Reply::Count(_), Memory::From(_), None) => Ok(part.len),
        (Reply::Count(n), Memory::From(_), Some(_)) if n <= part.len as u64 => Ok(n as usize),
        _ => Err(Code::Malformed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::Ino;

    #[test]
    fn parts_cover_a_range_once_and_in_order() {
        let id = BackingId { target: 1 << 16, ino: Ino(5), number: 0, stripe: 0 };
        for len in [
            0,
            1,
            MOVE_BYTES_MIN,
            MOVE_BYTES_MIN + 1,
            MOVE_BYTES_MAX - 1,
            MOVE_BYTES_MAX,
            3 * MOVE_BYTES_MAX + 7,
        ] {
            let mut next = 0;
            for part in parts(id, 100, 40, len) {
                assert_eq!((part.offset, part.at), (100 + next as u64, 40 + next));
                assert!(part.len > 0 && part.len <= MOVE_BYTES_MAX);
                next += part.len;
            }
            assert_eq!(next, len);
        }
        let count = |len| parts(id, 0, 0, len).count();
        assert_eq!(count(MOVE_BYTES_MIN), 1);
        assert_eq!(count(MOVE_BYTES_MAX), BACKING_AHEAD);
        assert_eq!(count(BACKING_AHEAD * MOVE_BYTES_MAX), BACKING_AHEAD);
        let few = |len| parts_of(id, 0, 0, len, MOVE_BYTES_MAX).map(|part| part.len);
        assert_eq!(few(MOVE_BYTES_MAX + 5).collect::<Vec<_>>(), [MOVE_BYTES_MAX, 5]);
    }

    #[test]
    fn parts_that_are_asked_again_go_in_order_as_far_as_the_end() {
        let id = BackingId { target: 1 << 16, ino: Ino(5), number: 0, stripe: 0 };
        let part = |at| Part { id, offset: at as u64, at, len: 10 };
        let mut again = vec![part(30), part(10), part(50), part(20)];
        let mut order = Vec::new();
        while let Some(part) = lowest(&mut again, 35) {
            order.push(part.at);
        }
        assert_eq!(order, [10, 20, 30]);
        assert!(again.is_empty(), "what lies above the end is not asked for");
    }

    #[test]
    fn a_transfer_ends_at_the_first_that_was_short_or_failed() {
        let mut moved = Moved { end: 100, failed: None, in_doubt: false };
        moved.ends(60, Some(Code::NoSpace));
        moved.ends(80, None);
        assert_eq!(moved, Moved { end: 60, failed: Some(Code::NoSpace), in_doubt: false });
        moved.ends(50, None);
        assert_eq!(moved, Moved { end: 50, failed: None, in_doubt: false });
    }
}
