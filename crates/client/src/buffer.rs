//! The memory through which this process's data pass to and from other nodes: made and sealed by the daemon, which has the
//! network read and write it. It is got when data are first moved that are too large for a slot, and cut into pieces that are
//! taken by a bit each; a call copies between its caller's memory and a piece while other pieces are on their way.
//!
//! A piece whose request failed without word from the file's node may be written late: it is never used again, and its
//! buffer is left for another (docs/decisions/0018).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_ring::Mapping;
use forebay_types::limits::{BUFFER_BYTES, MOVE_BYTES_MAX};
use forebay_types::Code;

const PIECES: usize = BUFFER_BYTES / MOVE_BYTES_MAX;
const ALL: u64 = u64::MAX >> (64 - PIECES);
/// Buffers in turn that the daemon did not know: it has no room for more, and data go by slots from then on.
const REFUSALS_MAX: u32 = 3;

const _: () = assert!(PIECES > 0 && PIECES <= 64);

/// One buffer.
#[derive(Debug)]
pub(crate) struct Buffer {
    mapping: Mapping,
    number: u64,
    /// Pieces in use, or lost.
    used: AtomicU64,
}

impl Buffer {
    /// What the daemon handed over under this number: [`BUFFER_BYTES`] of memory.
    pub(crate) fn new(mapping: Mapping, number: u64) -> Buffer {
        assert_eq!(mapping.len(), BUFFER_BYTES);
        Buffer { mapping, number, used: AtomicU64::new(0) }
    }

    fn take(self: &Arc<Buffer>) -> Option<Piece> {
        let mut used = self.used.load(Ordering::Relaxed);
        while used != ALL {
            let index = (!used).trailing_zeros() as usize;
            let with = used | 1 << index;
            match self.used.compare_exchange_weak(used, with, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(Piece { buffer: Arc::clone(self), index, lost: false }),
                Err(now) => used = now,
            }
        }
        None
    }
}

/// A piece of a buffer, in use by one request.
#[derive(Debug)]
pub(crate) struct Piece {
    buffer: Arc<Buffer>,
    index: usize,
    lost: bool,
}

impl Piece {
    /// The buffer's number.
    pub(crate) fn buffer(&self) -> u64 {
        self.buffer.number
    }

    /// Where in the buffer it begins.
    pub(crate) fn at(&self) -> usize {
        self.index * MOVE_BYTES_MAX
    }

    /// Copies in.
    ///
    /// # Safety
    /// `bytes` bytes at `from` can be read.
    pub(crate) unsafe fn fill(&self, from: *const u8, bytes: usize) {
        assert!(bytes <= MOVE_BYTES_MAX);
        // SAFETY: the caller's promise.
        unsafe { self.buffer.mapping.copy_in(self.at(), from, bytes) };
    }

    /// Copies out.
    ///
    /// # Safety
    /// `bytes` bytes at `to` can be written.
    pub(crate) unsafe fn empty(&self, to: *mut u8, bytes: usize) {
        assert!(bytes <= MOVE_BYTES_MAX);
        // SAFETY: the caller's promise.
        unsafe { self.buffer.mapping.copy_out(self.at(), to, bytes) };
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if !self.lost {
            self.buffer.used.fetch_and(!(1 << self.index), Ordering::Release);
        }
    }
}

#[derive(Debug, Default)]
struct Held {
    buffer: Option<Arc<Buffer>>,
    refusals: u32,
}

/// The buffer that a process has, if it has one.
#[derive(Debug, Default)]
pub(crate) struct Buffers(Mutex<Held>);

impl Buffers {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A piece; the buffer is got by `make` if there is none. None: all pieces are in use, or there will be no buffer.
    pub(crate) fn piece(&self, make: impl FnOnce() -> Result<Buffer, Code>) -> Option<Piece> {
        let mut held = self.held();
        if held.buffer.is_none() {
            if held.refusals >= REFUSALS_MAX {
                return None;
            }
            match make() {
                Ok(buffer) => held.buffer = Some(Arc::new(buffer)),
                Err(_) => held.refusals += 1,
            }
        }
        held.buffer.as_ref()?.take()
    }

    /// The daemon does not know a piece's buffer: it is another worker, or has no room.
    pub(crate) fn refused(&self, piece: &Piece) {
        let mut held = self.held();
        if held.leave(piece) {
            held.refusals += 1;
        }
    }

    /// The daemon knew it.
    pub(crate) fn known(&self) {
        self.held().refusals = 0;
    }

    /// Whether a piece's request was served is not known: it may be written at any time.
    pub(crate) fn lose(&self, mut piece: Piece) {
        piece.lost = true;
        self.held().leave(&piece);
    }
}

impl Held {
    /// Leaves a piece's buffer, if it is the one that is held.
    fn leave(&mut self, piece: &Piece) -> bool {
        let same = self.buffer.as_ref().is_some_and(|buffer| Arc::ptr_eq(buffer, &piece.buffer));
        if same {
            self.buffer = None;
        }
        same
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_ring::{memfd_sealed, Seal};

    fn made(number: u64) -> Result<Buffer, Code> {
        let (_, mapping) = memfd_sealed(c"buffer", BUFFER_BYTES, Seal::Size).unwrap();
        Ok(Buffer::new(mapping, number))
    }

    #[test]
    fn pieces_are_each_taken_once_and_hold_what_was_copied_in() {
        let buffers = Buffers::default();
        let all: Vec<Piece> = (0..PIECES).map(|_| buffers.piece(|| made(7)).unwrap()).collect();
        assert!(buffers.piece(|| made(8)).is_none(), "one buffer a process");
        for (i, piece) in all.iter().enumerate() {
            assert_eq!(piece.buffer(), 7);
            let bytes = [i as u8; 9];
            // SAFETY: nine bytes.
            unsafe { piece.fill(bytes.as_ptr(), 9) };
        }
        for (i, piece) in all.iter().enumerate() {
            let mut bytes = [0; 9];
            // SAFETY: nine bytes.
            unsafe { piece.empty(bytes.as_mut_ptr(), 9) };
            assert_eq!(bytes, [i as u8; 9]);
        }
        let third = all[3].at();
        drop(all.into_iter().nth(3));
        assert_eq!(buffers.piece(|| made(8)).unwrap().at() % MOVE_BYTES_MAX, third % MOVE_BYTES_MAX);
    }

    #[test]
    fn a_lost_piece_is_not_used_again_and_its_buffer_left_for_another() {
        let buffers = Buffers::default();
        let (lost, other) = (buffers.piece(|| made(1)).unwrap(), buffers.piece(|| made(1)).unwrap());
        let old = Arc::clone(&lost.buffer);
        buffers.lose(lost);
        drop(other);
        assert_eq!(old.used.load(Ordering::Relaxed), 1, "the lost one stays taken");
        assert_eq!(buffers.piece(|| made(2)).unwrap().buffer(), 2);
    }

    #[test]
    fn a_daemon_that_knows_no_buffer_is_soon_not_asked_for_more() {
        let buffers = Buffers::default();
        for number in 0..u64::from(REFUSALS_MAX) {
            let piece = buffers.piece(|| made(number)).unwrap();
            assert_eq!(piece.buffer(), number);
            buffers.refused(&piece);
            buffers.refused(&piece);
        }
        assert!(buffers.piece(|| made(9)).is_none());
        buffers.known();
        assert!(buffers.piece(|| made(9)).is_some());
    }
}
