//! Registered memory through which data of this node's backing files pass to and from other nodes. A request has one
//! piece, which either the network or an I/O worker uses, never both at once. Backing files are never mapped: a client
//! could truncate a mapped file.

use std::ptr::NonNull;
use std::sync::Arc;

use forebay_fabric::{Access, Endpoint, Local, Region};
use forebay_types::limits::{BOUNCE_BYTES, MOVE_BYTES_MAX};
use forebay_types::Code;

use super::direct_pieces::DirectPlace;
use super::eager_buffers::Arrived;

const PIECES: usize = BOUNCE_BYTES / MOVE_BYTES_MAX;
/// Retired pieces after which the memory is replaced.
const LOST_MAX: usize = PIECES / 2;

/// The memory and its free pieces. The pieces used last are used next, because they are in the cache.
#[derive(Debug)]
pub(super) struct Bounce {
    memory: Arc<Region>,
    local: Local,
    free: Vec<usize>,
    lost: usize,
}

/// A piece, in use by one request.
#[derive(Debug)]
pub(in crate::worker) struct Piece {
    memory: Arc<Region>,
    /// The endpoint's handle of the memory.
    pub(super) local: Local,
    piece: usize,
}

/// The memory of a request's data on this node.
#[derive(Debug)]
pub(in crate::worker) enum DataBuffer {
    Piece(Piece),
    /// In an eager buffer, which the requester has written.
    Eager(Arrived),
    /// In a piece of a volume itself.
    Direct(DirectPlace),
}

impl DataBuffer {
    /// Its first bytes, to be read; none of a volume's piece, which no thread copies. The peer may change what is in an eager
    /// buffer.
    pub(super) fn start(&self, len: usize) -> Option<NonNull<u8>> {
        let (memory, at) = match self {
            DataBuffer::Piece(piece) => (&piece.memory, piece.at()),
            DataBuffer::Eager(arrived) => (&arrived.memory, arrived.at),
            DataBuffer::Direct(_) => return None,
        };
        let start = memory.at(at, len);
        Some(start.unwrap_or_else(|code| panic!("{len} bytes of a piece or an eager buffer: {code}")))
    }
}

impl Piece {
    /// Its offset in the memory.
    pub(super) fn at(&self) -> usize {
        self.piece * MOVE_BYTES_MAX
    }

    /// Its first bytes.
    pub(super) fn bytes(&mut self, len: usize) -> &mut [u8] {
        assert!(len <= MOVE_BYTES_MAX);
        let start: NonNull<u8> = self.memory.at(self.at(), len).unwrap_or(NonNull::dangling());
        // SAFETY: within the memory, which is mapped as long as this lives. Peers cannot reach it. A piece belongs to
        // one request, and no transfer uses it while the request is with the I/O workers: after a failed transfer,
        // which may still be in flight, the request loses the piece.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len) }
    }
}

impl Bounce {
    /// Registers memory.
    ///
    /// # Errors
    /// The endpoint's errors.
    pub(super) fn new(endpoint: &mut dyn Endpoint) -> Result<Bounce, Code> {
        let memory = Arc::new(Region::new(BOUNCE_BYTES)?);
        let registered = endpoint.register(Arc::clone(&memory), Access::LOCAL)?;
        Ok(Bounce { memory, local: registered.local, free: (0..PIECES).rev().collect(), lost: 0 })
    }

    /// A free piece.
    pub(super) fn take(&mut self) -> Option<Piece> {
        let piece = self.free.pop()?;
        Some(Piece { memory: Arc::clone(&self.memory), local: self.local, piece })
    }

    /// Frees a piece.
    pub(super) fn give_back(&mut self, piece: Piece) {
        if Arc::ptr_eq(&self.memory, &piece.memory) {
            self.free.push(piece.piece);
        }
    }

    /// Retires a piece whose transfer failed: the provider may still use it. True when too many are retired, and the
    /// memory is to be replaced. Pieces in use keep the old memory.
    pub(super) fn lose(&mut self, piece: &Piece) -> bool {
        if Arc::ptr_eq(&self.memory, &piece.memory) {
            self.lost += 1;
        }
        self.lost >= LOST_MAX
    }

    /// As the endpoint knows the memory.
    pub(super) fn local(&self) -> Local {
        self.local
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_fabric::simulated::{Faults, Network};

    #[test]
    fn pieces_are_taken_once_and_lost_ones_never_again() {
        let network = Network::new(1, Faults::NONE);
        let mut endpoint = network.endpoint(1);
        let mut bounce = Bounce::new(&mut endpoint).unwrap();
        let mut all: Vec<Piece> = (0..PIECES).map(|_| bounce.take().unwrap()).collect();
        assert!(bounce.take().is_none());
        for (i, room) in all.iter_mut().enumerate() {
            room.bytes(MOVE_BYTES_MAX).fill(i as u8);
        }
        assert!(all.iter_mut().enumerate().all(|(i, room)| room.bytes(3) == [i as u8; 3]));
        let given = all[5].at();
        bounce.give_back(all.remove(5));
        assert_eq!(bounce.take().map(|room| room.at()), Some(given));
        assert!(!bounce.lose(&all[0]) && bounce.take().is_none());
        assert!((1..LOST_MAX).any(|i| bounce.lose(&all[i])), "then new memory is taken");
        let mut new = Bounce::new(&mut endpoint).unwrap();
        new.give_back(all.remove(0));
        assert_eq!(new.free.len(), PIECES, "the old memory's pieces are none of the new one's");
    }
}
