//! Pieces of volumes that the network reads and writes without a copy: the node's mapping of a piece is registered with the
//! endpoint, and a transfer goes to the place of its bytes (docs/decisions/0048).
//!
//! That is done where registering memory pins nothing and where the provider moves bytes within the endpoint's calls
//! ([`Limits::copies`](forebay_fabric::Limits::copies)): no byte is written there after a transfer has ended, and those
//! whose deadline has passed can be stopped ([`Endpoint::stop_all`]). The pieces are reserved memory of a sealed size; thin
//! pieces are copied. A transfer holds the descriptor of the process that requested it, and with it the lock that says that
//! the piece is in use. So the memory of a piece is not freed during a transfer.
//!
//! Pages of a mapping count as this process's memory when the kernel looks for a process to end, so all are given up
//! ([`DirectPieces::count`]) when so many bytes have been moved. The bytes stay: they are those of the piece.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use forebay_fabric::{Access, Endpoint, Local, Region};
use forebay_ring::Mapping;
use forebay_types::limits::DIRECT_PIECE_BYTES;
use forebay_types::{Code, PieceId};

use super::unmapping::Unmapping;
use crate::worker::piece_table::PieceTable;

/// The place of a request's bytes in a piece.
#[derive(Debug)]
pub(in crate::worker) struct DirectPlace {
    /// The endpoint's number of the piece, and the offset in it.
    pub(super) local: Local,
    pub(super) at: usize,
    /// The lock of the process that requested them.
    _in_use: Arc<OwnedFd>,
}

#[derive(Debug)]
struct Registered {
    local: Local,
    mapping: Arc<Mapping>,
    region: Arc<Region>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct DirectPieces {
    all: HashMap<PieceId, Registered>,
    /// Bytes that were moved since the pages were given up.
    moved: usize,
}

impl DirectPieces {
    /// The place of bytes of a piece that a process has open with this descriptor. They are in the piece.
    ///
    /// # Errors
    /// Those of the table and of the endpoint: the bytes have to be copied.
    pub(super) fn place(
        &mut self,
        endpoint: &mut dyn Endpoint,
        table: &PieceTable,
        (id, offset, bytes): (PieceId, u64, usize),
        in_use: Arc<OwnedFd>,
    ) -> Result<DirectPlace, Code> {
        let at = usize::try_from(offset).map_err(|_| Code::Range)?;
        let local = match self.all.get(&id) {
            Some(registered) => registered.local,
            None => {
                let mapping = table.mapping(id)?;
                // SAFETY: the mapping lasts as long as the owner. It is memory shared with other processes, of which no
                // reference is made.
                let region = unsafe {
                    Region::foreign(mapping.start(), mapping.len(), Box::new(Arc::clone(&mapping)))
                };
                let region = Arc::new(region);
                let local = endpoint.register(Arc::clone(&region), Access::LOCAL)?.local;
                self.all.insert(id, Registered { local, mapping, region });
                local
            }
        };
        self.count(bytes);
        Ok(DirectPlace { local, at, _in_use: in_use })
    }

    fn count(&mut self, bytes: usize) {
        self.moved += bytes;
        if self.moved >= DIRECT_PIECE_BYTES {
            self.moved = 0;
            self.all.values().for_each(|registered| registered.mapping.give_pages_up());
        }
    }

    /// Drops what it has of pieces that are no longer there.
    pub(super) fn drop_gone(
        &mut self,
        endpoint: &mut dyn Endpoint,
        table: &PieceTable,
        unmapping: &mut Unmapping,
    ) {
        for (_, gone) in self.all.extract_if(|id, _| table.bytes(*id).is_err()) {
            endpoint.unregister(gone.local);
            drop(gone.mapping);
            unmapping.drop(gone.region);
        }
    }

    /// True if there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}
