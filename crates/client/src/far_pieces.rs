//! The pieces of a volume on other nodes (docs/decisions/0048): this node's daemon transfers their bytes as it does those
//! of backing files (`remote_data`), and their nodes execute atomic operations.
//!
//! The node of a piece keeps it open for this process, which counts as use of the volume. Its next worker does not know
//! that, and refuses a request with [`Code::Stale`]: the piece is opened again, and the request repeated. But only as long
//! as the session with this node's daemon is the one in which the piece was opened: a later one may be with another pool in
//! the same directory, whose pieces may have the same numbers.

use std::cell::RefCell;

use forebay_ring::{call_clock, pause};
use forebay_types::limits::{CALL_TIMEOUT_MS, MOVE_ABOVE_BYTES, MOVE_BYTES_MAX};
use forebay_types::{AtomicOp, BackingId, BackingOp, Code, NodeId, PieceWord, Reply, Request};
use forebay_volume::{Far, FarRange};

use crate::far_parts::{Memory, Part};
use crate::locks::{PAUSE, PAUSE_MAX};
use crate::pool::{caller, Pool};
use crate::remote_data::{parts_of, Moved};
use crate::remote_inodes::new_handle;

/// How often a piece is opened again within a call: a worker that dies more often has a defect.
const REOPENED_MAX: u32 = 8;

thread_local! {
    /// Why this thread's last call failed.
    static REASON: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// See the module.
#[derive(Debug)]
pub(crate) struct FarPieces {
    pool: &'static Pool,
    handle: u64,
    pieces: Vec<BackingId>,
    /// The session in which they were opened, and its process. A child after fork has a session of its own.
    session: Option<u64>,
    process: u32,
}

impl Drop for FarPieces {
    fn drop(&mut self) {
        for piece in &self.pieces {
            // If the message is lost, the piece's node closes it when this process ends.
            let _ = self.pool.ask_backing(*piece, BackingOp::Close { handle: self.handle });
        }
    }
}

/// The failure of a call, in words too.
fn failed(node: NodeId, code: Code) -> Code {
    let code = match code {
        Code::Stale | Code::NotFound => Code::Io,
        code => code,
    };
    let why = match code {
        Code::PoolGone => "the pool's daemon on this node is gone".to_owned(),
        Code::Io => {
            format!("node {node} has lost its piece, or cannot be reached: `forebay status` tells which nodes are up")
        }
        code => format!("node {node}: {code}"),
    };
    REASON.with_borrow_mut(|reason| *reason = Some(why));
    code
}

/// True if a part is long enough to be transferred without a copy. The parts of several calls may be short, and far apart in
/// memory that would be registered for nothing.
fn is_one_long(parts: &[Part]) -> bool {
    parts.iter().any(|part| part.len > MOVE_ABOVE_BYTES)
}

/// As few parts as there can be, by their places in memory: each costs the messages and the wake-ups of a request, and nothing
/// copies one while the network moves the next, as with backing files. So ranges that follow each other in the piece and in
/// memory are one.
fn few_parts(ranges: &[FarRange]) -> Vec<Part> {
    let mut ranges = ranges.to_vec();
    // What is moved is moved up to an offset of the caller's memory.
    ranges.sort_unstable_by_key(|range| range.at);
    ranges.dedup_by(|next, range| {
        let follows = next.piece == range.piece
            && next.offset == range.offset + range.bytes as u64
            && next.at == range.at + range.bytes;
        if follows {
            range.bytes += next.bytes;
        }
        follows
    });
    let cut = |range: &FarRange| parts_of(range.piece, range.offset, range.at, range.bytes, MOVE_BYTES_MAX);
    ranges.iter().flat_map(cut).collect()
}

/// Whether a transfer that ended early goes on when its piece was opened again, which it was so often.
///
/// # Errors
/// The code with which it fails.
fn goes_on(moved: Moved, reopened: u32) -> Result<(), Code> {
    match moved.failed {
        // A part that may still be written must not be repeated: its caller could put other bytes there after that.
        why if moved.in_doubt => Err(why.filter(|code| *code == Code::PoolGone).unwrap_or(Code::Io)),
        Some(Code::Stale) if reopened < REOPENED_MAX => Ok(()),
        // A piece never ends before its volume says.
        why => Err(why.unwrap_or(Code::Io)),
    }
}

impl FarPieces {
    /// Opens pieces of a volume.
    ///
    /// # Errors
    /// The node of the piece that could not be opened, and why: [`Code::Io`] if the piece is lost or its node is down;
    /// [`Code::AccessDenied`].
    pub(crate) fn open(pool: &'static Pool, pieces: Vec<BackingId>) -> Result<FarPieces, (NodeId, Code)> {
        // Those that are open already are closed with it if one cannot be opened.
        let (session, process) = (pool.session(), std::process::id());
        let far = FarPieces { pool, handle: new_handle(), pieces, session, process };
        for piece in &far.pieces {
            far.reopen(*piece).map_err(|code| (piece.node(), failed(piece.node(), code)))?;
        }
        Ok(far)
    }

    /// [`Code::PoolGone`] if the session in which the pieces were opened is over.
    fn check_session(&self) -> Result<(), Code> {
        match self.pool.session() == self.session || std::process::id() != self.process {
            true => Ok(()),
            false => Err(Code::PoolGone),
        }
    }

    fn reopen(&self, piece: BackingId) -> Result<(), Code> {
        self.check_session()?;
        let (since, mut wait) = (call_clock(), PAUSE);
        let request = Request::Backing { id: piece, op: BackingOp::Open { handle: self.handle } };
        loop {
            let opened = self.pool.ask_as(caller(), &request, |reply| match reply {
                Reply::Done => Ok(()),
                _ => Err(Code::Malformed),
            });
            match opened {
                // Its worker has just started, or looks at the piece.
                Err(Code::Busy) if call_clock() - since < CALL_TIMEOUT_MS * 1_000_000 => {
                    pause(wait);
                    wait = (wait * 2).min(PAUSE_MAX);
                }
                Err(Code::Busy) => return Err(Code::Io),
                opened => return opened,
            }
        }
    }

    /// Sends a request to a piece's node, and repeats what its new worker has refused.
    fn ask<T>(
        &self,
        piece: BackingId,
        op: BackingOp<'_>,
        take: impl Fn(Reply<'_>) -> Result<T, Code>,
    ) -> Result<T, Code> {
        self.check_session().map_err(|code| failed(piece.node(), code))?;
        let request = Request::Backing { id: piece, op };
        let mut reopened = 0;
        loop {
            match self.pool.ask_as(caller(), &request, &take) {
                // It was not executed.
                Err(Code::Stale) if reopened < REOPENED_MAX => {
                    self.reopen(piece).map_err(|code| failed(piece.node(), code))?;
                    reopened += 1;
                }
                done => return done.map_err(|code| failed(piece.node(), code)),
            }
        }
    }

    /// Moves ranges of pieces. Repeats what a piece's new worker has refused.
    ///
    /// # Safety
    /// The memory of all ranges is readable or writable, as `memory` requires.
    unsafe fn move_all(&self, ranges: &[FarRange], memory: Memory) -> Result<(), Code> {
        let total = ranges.iter().map(|range| range.at + range.bytes).max().unwrap_or(0);
        let mut all = few_parts(ranges);
        self.check_session().map_err(|code| failed(ranges[0].piece.node(), code))?;
        let is_direct = is_one_long(&all);
        let mut reopened = 0;
        loop {
            // SAFETY: the caller's promise.
            let moved = unsafe { self.pool.move_far(&mut all.iter().copied(), total, memory, is_direct) }
                .map_err(|code| failed(ranges[0].piece.node(), code))?;
            if moved.end >= total {
                return Ok(());
            }
            // The first part that was not moved as a whole.
            let at = all.iter().position(|part| part.at + part.len > moved.end).unwrap_or(0);
            let piece = all[at].id;
            goes_on(moved, reopened)
                .and_then(|()| self.reopen(piece))
                .map_err(|code| failed(piece.node(), code))?;
            reopened += 1;
            all.drain(..at);
        }
    }
}

impl Far for FarPieces {
    unsafe fn get(&self, ranges: &[FarRange], to: *mut u8) -> Result<(), Code> {
        // SAFETY: the caller's promise.
        unsafe { self.move_all(ranges, Memory::Into(to)) }
    }

    unsafe fn put(&self, ranges: &[FarRange], from: *const u8) -> Result<(), Code> {
        // SAFETY: the caller's promise.
        unsafe { self.move_all(ranges, Memory::From(from)) }
    }

    fn discard(&self, piece: BackingId, offset: u64, bytes: u64) -> Result<(), Code> {
        let mode = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE) as u32;
        self.ask(piece, BackingOp::Allocate { mode, offset, bytes }, |reply| match reply {
            Reply::Done => Ok(()),
            _ => Err(Code::Malformed),
        })
    }

    fn allocated(&self, piece: BackingId) -> Result<u64, Code> {
        self.ask(piece, BackingOp::Stat, |reply| match reply {
            Reply::Backing(attr) => Ok(attr.allocated_bytes),
            _ => Err(Code::Malformed),
        })
    }

    fn atomic(&self, piece: BackingId, word: PieceWord, op: AtomicOp) -> Result<u64, Code> {
        self.ask(piece, BackingOp::Atomic { word, op }, |reply| match reply {
            Reply::Count(was) => Ok(was),
            _ => Err(Code::Malformed),
        })
    }

    fn check(&self) -> Result<(), Code> {
        // A piece that is lost cannot be opened, and one that is open can be opened again.
        let check = |piece: &BackingId| self.reopen(*piece).map_err(|code| failed(piece.node(), code));
        self.pieces.iter().try_for_each(check)
    }

    fn reason(&self) -> Option<String> {
        REASON.with_borrow(Clone::clone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::Ino;

    #[test]
    fn memory_is_registered_for_long_parts_only_however_far_apart_short_ones_are() {
        let id = BackingId { target: 1 << 16, ino: Ino(5), number: 0, stripe: 0 };
        let part = |at, len| Part { id, offset: 0, at, len };
        assert!(!is_one_long(&[part(0, 4096), part(1 << 36, MOVE_ABOVE_BYTES)]));
        assert!(is_one_long(&[part(0, 4096), part(8192, MOVE_ABOVE_BYTES + 1)]));
    }

    #[test]
    fn ranges_that_follow_each_other_in_piece_and_memory_are_one_part() {
        let piece = BackingId { target: 1 << 16, ino: Ino(5), number: 0, stripe: 0 };
        let range = |offset, at, bytes| FarRange { piece, offset, at, bytes };
        let parts = |ranges: &[FarRange]| {
            few_parts(ranges).iter().map(|part| (part.offset, part.at, part.len)).collect::<Vec<_>>()
        };
        // In any order of the list.
        let all = [range(104, 4, 6), range(100, 0, 4), range(110, 10, 5)];
        assert_eq!(parts(&all), [(100, 0, 15)]);
        // A gap in the piece, or in memory, or another piece.
        assert_eq!(parts(&[range(100, 0, 4), range(105, 4, 4)]), [(100, 0, 4), (105, 4, 4)]);
        assert_eq!(parts(&[range(100, 0, 4), range(104, 5, 4)]), [(100, 0, 4), (104, 5, 4)]);
        let other = FarRange { piece: BackingId { stripe: 1, ..piece }, ..range(104, 4, 4) };
        assert_eq!(parts(&[range(100, 0, 4), other]), [(100, 0, 4), (104, 4, 4)]);
        // No part is longer than a request moves.
        let half = MOVE_BYTES_MAX / 2;
        let three = [0, 1, 2].map(|i| range((i * half) as u64, i * half, half));
        assert_eq!(parts(&three), [(0, 0, MOVE_BYTES_MAX), (2 * half as u64, 2 * half, half)]);
    }

    #[test]
    fn transfer_goes_on_after_a_refusal_but_not_with_a_part_in_doubt() {
        let ends = |failed, in_doubt| Moved { end: 0, failed, in_doubt };
        let stale = Some(Code::Stale);
        assert_eq!(goes_on(ends(stale, false), 0), Ok(()));
        assert_eq!(goes_on(ends(stale, false), REOPENED_MAX), Err(Code::Stale));
        assert_eq!(goes_on(ends(stale, true), 0), Err(Code::Io));
        assert_eq!(goes_on(ends(Some(Code::PoolGone), true), 0), Err(Code::PoolGone));
        assert_eq!(goes_on(ends(Some(Code::NoSpace), false), 0), Err(Code::NoSpace));
        assert_eq!(goes_on(ends(None, false), 0), Err(Code::Io));
    }
}
