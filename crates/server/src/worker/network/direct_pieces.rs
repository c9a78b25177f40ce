//! Pieces of volumes that the network reads and writes without a copy: mappings of a piece are registered with the endpoint,
//! and a transfer goes to the place of its bytes (docs/decisions/0048).
//!
//! That is done where registering memory pins nothing and where the provider moves bytes within the endpoint's calls
//! ([`Limits::copies`](forebay_fabric::Limits::copies)): no byte is written there after a transfer has ended, or after its
//! deadline ([`Direction::ReadInTime`](forebay_fabric::Direction::ReadInTime)). The pieces are reserved memory of a sealed size; thin
//! pieces are copied. A transfer holds the descriptor of the process that requested it, and with it the lock that says that
//! the piece is in use. So the memory of a piece is not freed during a transfer.
//!
//! The network writes a piece through a mapping that nothing else uses: the endpoint puts other memory in its place when a
//! transfer is late. The next write makes another mapping.
//!
//! Pages of a mapping count as this process's memory when the kernel looks for a process to end, so all are given up
//! ([`DirectPieces::note`]) when there are too many. The bytes stay: they are those of the piece.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use forebay_fabric::{Access, Endpoint, Local, Region};
use forebay_ring::Mapping;
use forebay_types::limits::DIRECT_PIECE_BYTES;
use forebay_types::{Code, PieceId};

use super::unmapping::Unmapping;
use crate::worker::piece_table::PieceTable;

const HUGE_PAGE_BYTES: usize = 2 << 20;

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

/// What the network does with bytes of a piece.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Use {
    Reads,
    Writes,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct DirectPieces {
    all: HashMap<(PieceId, Use), Registered>,
    /// The huge pages that transfers have used since all were given up. The kernel maps whole ones.
    used: HashSet<(Local, usize)>,
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
        key: (PieceId, Use),
        (offset, bytes): (u64, usize),
        in_use: Arc<OwnedFd>,
    ) -> Result<DirectPlace, Code> {
        let at = usize::try_from(offset).map_err(|_| Code::Range)?;
        let local = match self.all.get(&key).filter(|registered| endpoint.is_registered(registered.local)) {
            Some(registered) => registered.local,
            None => {
                let mapping = Arc::new(table.map(key.0)?);
                // SAFETY: the mapping lasts as long as the owner. It is memory shared with other processes, of which no
                // reference is made.
                let region = unsafe {
                    Region::foreign(mapping.start(), mapping.len(), Box::new(Arc::clone(&mapping)))
                };
                let region = Arc::new(region);
                let local = endpoint.register(Arc::clone(&region), Access::LOCAL)?.local;
                self.all.insert(key, Registered { local, mapping, region });
                local
            }
        };
        self.note(local, at..at.saturating_add(bytes));
        Ok(DirectPlace { local, at, _in_use: in_use })
    }

    fn note(&mut self, local: Local, bytes: Range<usize>) {
        let pages = bytes.start / HUGE_PAGE_BYTES..bytes.end.div_ceil(HUGE_PAGE_BYTES);
        self.used.extend(pages.map(|page| (local, page)));
        if self.used.len() > DIRECT_PIECE_BYTES / HUGE_PAGE_BYTES {
            self.used.clear();
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
        for (_, gone) in self.all.extract_if(|(id, _), _| table.bytes(*id).is_err()) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::piece_table::PieceKind;
    use forebay_fabric::simulated::{Faults, Network};
    use forebay_fabric::{Direction, Event, Transfer};
    use forebay_types::{Ino, NodeId, Rights};
    use std::time::Duration;

    const BYTES: usize = 8192;

    #[test]
    fn bytes_go_right_into_a_piece_stay_when_pages_are_given_up_and_nothing_is_kept_of_a_piece_that_is_gone()
    {
        let network = Network::new(1, Faults::NONE);
        let (mut ours, mut theirs) = (network.endpoint(1), network.endpoint(2));
        let far = Arc::new(Region::new(BYTES).unwrap());
        far.write_at(0, &[7; BYTES]).unwrap();
        let remote = theirs.register(far, Access::BOTH).unwrap().remote;
        let memory: OwnedFd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, BYTES as u64).unwrap();
        let memory = Arc::new(memory);
        let (table, mut direct, mut unmapping) =
            (PieceTable::default(), DirectPieces::default(), Unmapping::default());
        let piece = |index| PieceId { volume: Ino::new(NodeId(1), 9), segment: 0, index };
        let rights = Some(Rights { uid: 0, gid: 0, mode: 0o600 });
        let kind = PieceKind { target: 0, bytes: BYTES as u64, rights, is_thin: false };
        table.add(piece(0), (&memory, kind), None);
        table.add(piece(1), (&memory, PieceKind { is_thin: true, ..kind }), None);
        let in_use = || Arc::new(rustix::io::dup(&memory).unwrap());
        let thin = direct.place(&mut ours, &table, (piece(1), Use::Writes), (0, 10), in_use());
        assert_eq!(thin.err(), Some(Code::NotSupported));
        let lock = in_use();
        let key = (piece(0), Use::Writes);
        let place = direct.place(&mut ours, &table, key, (4096, 4096), Arc::clone(&lock)).unwrap();
        let peer = ours.connect(theirs.address()).unwrap();
        let transfer = Transfer {
            direction: Direction::ReadInTime,
            local: place.local,
            local_offset: place.at,
            remote,
            bytes: 4096,
        };
        ours.transfer(peer, &transfer, 3, Duration::from_secs(5)).unwrap();
        let mut done = false;
        while !done && network.now() < Duration::from_secs(10) {
            network.turn();
            ours.progress(&mut |event| done |= event == Event::Done { token: 3 });
        }
        assert!(done && Arc::strong_count(&lock) == 2, "the piece is in use until the transfer has ended");
        let place_local = place.local;
        drop(place);
        assert_eq!(Arc::strong_count(&lock), 1);
        let (mut bytes, mapping) = ([0; BYTES], Arc::clone(&direct.all[&key].mapping));
        for page in 1..DIRECT_PIECE_BYTES / HUGE_PAGE_BYTES {
            (0..3).for_each(|_| direct.note(place_local, page * HUGE_PAGE_BYTES..page * HUGE_PAGE_BYTES + 1));
        }
        assert_eq!(
            direct.used.len() * HUGE_PAGE_BYTES,
            DIRECT_PIECE_BYTES,
            "the first is that of the transfer"
        );
        direct.note(place_local, DIRECT_PIECE_BYTES - 1..DIRECT_PIECE_BYTES + 1);
        assert!(direct.used.is_empty());
        rustix::io::pread(&*memory, &mut bytes, 0).unwrap();
        assert!(bytes[..4096].iter().all(|b| *b == 0) && bytes[4096..].iter().all(|b| *b == 7));
        let mut mapped = [0; BYTES];
        mapping.load(0, &mut mapped);
        assert_eq!(mapped, bytes);
        direct.drop_gone(&mut ours, &table, &mut unmapping);
        assert!(!direct.is_empty());
        drop(table.remove(piece(0)));
        direct.drop_gone(&mut ours, &table, &mut unmapping);
        assert!(direct.is_empty() && Arc::strong_count(&mapping) == 1);
        assert_eq!(ours.transfer(peer, &transfer, 4, Duration::from_secs(5)), Err(Code::Fault));
    }
}
