//! The memory through which this process's data pass to and from other nodes. The daemon creates and seals it, and lets
//! the network read and write it. The process gets its buffer at the first transfer that is too large for a slot. A
//! buffer is cut into pieces, and a bit per piece says whether it is in use. A call copies between its caller's memory
//! and one piece while the transfers of other pieces are in flight.
//!
//! If a request fails without a reply from the file's node, its piece may still be written later. Such a piece is never
//! reused, and the process replaces the whole buffer (docs/decisions/0018). The piece of a write may still be read, too:
//! it keeps its bytes, so that the file's node never writes zeros.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_ring::{call_clock, Mapping};
use forebay_types::limits::{BUFFER_BYTES, MOVE_BYTES_MAX};
use forebay_types::{Code, NodeId};

const PIECES: usize = BUFFER_BYTES / MOVE_BYTES_MAX;
const ALL: u64 = u64::MAX >> (64 - PIECES);
/// Consecutive refusals for one node's data after which they go by slots: the daemon has no memory for more buffers, or
/// the network between the two nodes fails. A buffer is tried again after [`PAUSE_NS`].
const REFUSALS_MAX: u32 = 3;
const PAUSE_NS: u64 = 5_000_000_000;
/// Pause after the daemon failed to give a buffer: it may be starting, or out of descriptors.
const PAUSE_UNMADE_NS: u64 = 1_000_000_000;

/// Pieces that a call takes even when others are waiting.
const OWN: usize = 2;
/// A call takes more than [`OWN`] pieces only while fewer than these are in use, so that other threads find some.
const SPARE_ABOVE: u32 = (PIECES * 3 / 4) as u32;

const _: () = assert!(PIECES > 0 && PIECES <= 64);

/// One buffer.
#[derive(Debug)]
pub(crate) struct Buffer {
    mapping: Mapping,
    number: u64,
    /// A bit for each piece that is in use or lost.
    used: AtomicU64,
    /// A bit for each piece that may still be read.
    kept: AtomicU64,
}

impl Drop for Buffer {
    /// Runs when the last piece in use is returned. The daemon may keep the memory mapped while a piece may still be
    /// written or read.
    fn drop(&mut self) {
        let kept = *self.kept.get_mut();
        if kept == 0 {
            return self.mapping.discard(0..BUFFER_BYTES);
        }
        for index in (0..PIECES).filter(|index| kept & 1 << index == 0) {
            self.mapping.discard(index * MOVE_BYTES_MAX..(index + 1) * MOVE_BYTES_MAX);
        }
    }
}

impl Buffer {
    /// The memory that the daemon gave under this number: [`BUFFER_BYTES`].
    pub(crate) fn new(mapping: Mapping, number: u64) -> Buffer {
        assert_eq!(mapping.len(), BUFFER_BYTES);
        Buffer { mapping, number, used: AtomicU64::new(0), kept: AtomicU64::new(0) }
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

    /// Its offset in the buffer.
    pub(crate) fn at(&self) -> usize {
        self.index * MOVE_BYTES_MAX
    }

    /// Copies into the piece.
    ///
    /// # Safety
    /// `bytes` bytes at `from` can be read.
    pub(crate) unsafe fn fill(&self, from: *const u8, bytes: usize) {
        assert!(bytes <= MOVE_BYTES_MAX);
        // SAFETY: the caller's promise.
        unsafe { self.buffer.mapping.copy_in(self.at(), from, bytes) };
    }

    /// Copies out of the piece.
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

/// Refusals of transfers of one node's data.
#[derive(Debug)]
struct Refusals {
    node: NodeId,
    count: u32,
    last_ns: u64,
}

#[derive(Debug, Default)]
struct Held {
    buffer: Option<Arc<Buffer>>,
    /// A few: for nodes that refused and have not moved data since.
    refusals: Vec<Refusals>,
    /// Time at which the daemon last failed to give a buffer.
    unmade_ns: Option<u64>,
}

/// The process's buffer, if it has one.
#[derive(Debug, Default)]
pub(crate) struct Buffers(Mutex<Held>);

impl Buffers {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A piece for a call that already `has` some. The call gets its first [`OWN`] pieces if any is free, and more only
    /// if other calls are unlikely to need them.
    pub(crate) fn another(
        &self,
        has: usize,
        node: NodeId,
        make: impl FnOnce() -> Result<Buffer, Code>,
    ) -> Option<Piece> {
        let is_spare = || {
            self.held()
                .buffer
                .as_ref()
                .is_none_or(|buffer| buffer.used.load(Ordering::Relaxed).count_ones() < SPARE_ABOVE)
        };
        (has < OWN || is_spare()).then(|| self.piece(node, make)).flatten()
    }

    /// A piece for data of a node; `make` gets the buffer if there is none. `None` if all pieces are in use, or if
    /// there is no buffer for now.
    pub(crate) fn piece(&self, node: NodeId, make: impl FnOnce() -> Result<Buffer, Code>) -> Option<Piece> {
        self.piece_at(call_clock(), node, make)
    }

    fn piece_at(&self, now: u64, node: NodeId, make: impl FnOnce() -> Result<Buffer, Code>) -> Option<Piece> {
        let mut held = self.held();
        if let Some(refused) = held.refusals.iter_mut().find(|refused| refused.node == node) {
            if refused.count >= REFUSALS_MAX {
                if now < refused.last_ns + PAUSE_NS {
                    return None;
                }
                refused.count = REFUSALS_MAX - 1;
            }
        }
        if held.buffer.is_none() {
            if held.unmade_ns.is_some_and(|unmade| now < unmade + PAUSE_UNMADE_NS) {
                return None;
            }
            match make() {
                Ok(buffer) => (held.buffer, held.unmade_ns) = (Some(Arc::new(buffer)), None),
                Err(_) => held.unmade_ns = Some(now),
            }
        }
        held.buffer.as_ref()?.take()
    }

    /// Abandons a piece's buffer and counts a refusal: the daemon does not know the buffer, because its worker
    /// restarted or is out of memory, or the transfer with this node failed.
    pub(crate) fn refused(&self, node: NodeId, piece: &Piece) {
        self.refused_at(call_clock(), node, piece);
    }

    fn refused_at(&self, now: u64, node: NodeId, piece: &Piece) {
        let mut held = self.held();
        if !held.leave(piece) {
            return;
        }
        match held.refusals.iter_mut().find(|refused| refused.node == node) {
            Some(refused) => (refused.count, refused.last_ns) = (refused.count + 1, now),
            None => held.refusals.push(Refusals { node, count: 1, last_ns: now }),
        }
    }

    /// Clears a node's refusals after its data were moved.
    pub(crate) fn known(&self, node: NodeId) {
        self.held().refusals.retain(|refused| refused.node != node);
    }

    /// Marks a piece as lost: it is unknown whether its request was served, so it may be written at any time, or read if
    /// the request `writes` the file.
    pub(crate) fn lose(&self, mut piece: Piece, writes: bool) {
        piece.lost = true;
        piece.buffer.kept.fetch_or(u64::from(writes) << piece.index, Ordering::Relaxed);
        self.held().leave(&piece);
    }
}

impl Held {
    /// Drops a piece's buffer if it is the current one.
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
    use std::os::fd::AsFd;

    use forebay_ring::{memfd_sealed, Seal};

    fn made(number: u64) -> Result<Buffer, Code> {
        let (_, mapping) = memfd_sealed(c"buffer", BUFFER_BYTES, Seal::Size).unwrap();
        Ok(Buffer::new(mapping, number))
    }

    #[test]
    fn pieces_are_each_taken_once_and_hold_what_was_copied_in() {
        let buffers = Buffers::default();
        let all: Vec<Piece> = (0..PIECES).map(|_| buffers.piece(NodeId(1), || made(7)).unwrap()).collect();
        assert!(buffers.piece(NodeId(1), || made(8)).is_none(), "one buffer a process");
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
        assert_eq!(
            buffers.piece(NodeId(1), || made(8)).unwrap().at() % MOVE_BYTES_MAX,
            third % MOVE_BYTES_MAX
        );
    }

    #[test]
    fn call_that_has_pieces_leaves_some_to_others() {
        let (buffers, node) = (Buffers::default(), NodeId(1));
        let mut has: Vec<Piece> = Vec::new();
        while let Some(piece) = buffers.another(has.len(), node, || made(7)) {
            has.push(piece);
        }
        assert_eq!(has.len(), SPARE_ABOVE as usize);
        let first = buffers.another(0, node, || made(7));
        let second = buffers.another(1, node, || made(7));
        assert!(first.is_some() && second.is_some());
        assert!(buffers.another(2, node, || made(7)).is_none());
        has.truncate(4);
        assert!(buffers.another(2, node, || made(7)).is_some());
    }

    #[test]
    fn a_lost_piece_is_not_used_again_and_its_buffer_left_for_another() {
        let buffers = Buffers::default();
        let memory = std::cell::RefCell::new(None);
        let make = || {
            let (fd, mapping) = memfd_sealed(c"buffer", BUFFER_BYTES, Seal::Size).unwrap();
            *memory.borrow_mut() = Some(Mapping::new(fd.as_fd(), BUFFER_BYTES, true).unwrap());
            Ok(Buffer::new(mapping, 1))
        };
        let (lost, other) =
            (buffers.piece(NodeId(1), make).unwrap(), buffers.piece(NodeId(1), || made(9)).unwrap());
        let old = Arc::clone(&lost.buffer);
        // SAFETY: one byte.
        unsafe { other.fill([7].as_ptr(), 1) };
        buffers.lose(lost, false);
        drop(other);
        assert_eq!(old.used.load(Ordering::Relaxed), 1, "the lost one stays taken");
        // The daemon's mapping of the buffer. The memory is freed with the last piece in use.
        let (daemons, mut pages) = (memory.borrow_mut().take().unwrap(), [0; 512]);
        daemons.resident(0, &mut pages);
        assert!(pages.iter().any(|page| page & 1 != 0));
        drop(old);
        daemons.resident(0, &mut pages);
        assert!(pages.iter().all(|page| page & 1 == 0), "its memory is kept");
        assert_eq!(buffers.piece(NodeId(1), || made(2)).unwrap().buffer(), 2);
    }

    #[test]
    fn lost_piece_of_a_write_keeps_its_bytes_when_the_buffer_is_freed() {
        let buffers = Buffers::default();
        let (fd, mapping) = memfd_sealed(c"buffer", BUFFER_BYTES, Seal::Size).unwrap();
        let daemons = Mapping::new(fd.as_fd(), BUFFER_BYTES, true).unwrap();
        let mut made = Some(Buffer::new(mapping, 1));
        let mut take = || buffers.piece(NodeId(1), || made.take().ok_or(Code::Busy)).unwrap();
        let (read, written, other) = (take(), take(), take());
        for piece in [&read, &written, &other] {
            // SAFETY: one byte.
            unsafe { piece.fill([7].as_ptr(), 1) };
        }
        let places = [read.at(), written.at(), other.at()];
        buffers.lose(read, false);
        buffers.lose(written, true);
        drop(other);
        let first = |place| {
            let mut byte = [0];
            // SAFETY: one byte.
            unsafe { daemons.copy_out(place, byte.as_mut_ptr(), 1) };
            byte[0]
        };
        assert_eq!(places.map(first), [0, 7, 0]);
    }

    #[test]
    fn node_that_refuses_is_soon_spared_and_tried_again_after_a_pause() {
        let (buffers, one, two) = (Buffers::default(), NodeId(1), NodeId(2));
        let refuse = |now, number| {
            let piece = buffers.piece_at(now, one, || made(number)).unwrap();
            assert_eq!(piece.buffer(), number);
            buffers.refused_at(now, one, &piece);
            buffers.refused_at(now, one, &piece);
        };
        for number in 0..u64::from(REFUSALS_MAX) {
            refuse(number, number);
            // Transfers with another node do not clear this node's refusals.
            buffers.known(two);
        }
        assert!(buffers.piece_at(9, one, || made(9)).is_none());
        assert!(buffers.piece_at(9, two, || made(9)).is_some(), "another node's data go by it");
        // After the pause one buffer is tried, and no more than one.
        let later = 2 * PAUSE_NS;
        refuse(later, 9);
        assert!(buffers.piece_at(later + 1, one, || made(10)).is_none());
        let piece = buffers.piece_at(later + PAUSE_NS, one, || made(10)).unwrap();
        buffers.known(one);
        buffers.refused_at(later + PAUSE_NS, one, &piece);
        assert!(buffers.piece_at(later + PAUSE_NS, one, || made(11)).is_some());
    }

    #[test]
    fn daemon_that_gave_no_buffer_is_asked_again_after_a_pause() {
        let (buffers, node) = (Buffers::default(), NodeId(1));
        for round in 0..10 {
            let now = round * PAUSE_UNMADE_NS;
            assert!(buffers.piece_at(now, node, || Err(Code::Busy)).is_none());
            assert!(buffers.piece_at(now + 1, node, || made(1)).is_none(), "not that soon");
        }
        assert!(buffers.piece_at(10 * PAUSE_UNMADE_NS, node, || made(1)).is_some());
    }
}
