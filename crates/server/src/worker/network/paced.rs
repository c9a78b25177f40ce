//! Reads and writes for other nodes, and for processes without a descriptor, at the speed of the medium that the node's
//! targets emulate.

use forebay_data::NodeTargets;
use forebay_pacing::{Direction, Place, Ticket};
use forebay_types::{BackingId, BackingOp, Code, Reply};

/// An operation of an I/O worker on a paced target.
#[must_use]
pub(super) struct Paced<'a>(Ticket<'a>);

impl<'a> Paced<'a> {
    /// Notes the arrival of an operation on a backing file; none if its target is not paced.
    pub(super) fn begin(targets: &'a NodeTargets, id: &BackingId) -> Option<Paced<'a>> {
        targets.pacer(id.target).map(|pacer| Paced(pacer.begin()))
    }

    /// Waits until the medium would have moved so many bytes.
    pub(super) fn complete(self, is_read: bool, id: &BackingId, offset: u64, bytes: usize) {
        let direction = if is_read { Direction::Read } else { Direction::Write };
        let place = Place::of(id.ino.0, usize::from(id.number), id.stripe, offset);
        self.0.complete(direction, place, bytes as u64);
    }

    /// Likewise, for an operation that moved bytes; others do not wait.
    pub(super) fn complete_op(self, id: &BackingId, op: &BackingOp<'_>, result: &Result<Reply<'_>, Code>) {
        match (op, result) {
            (BackingOp::Read { offset, .. }, Ok(Reply::Bytes(bytes))) => {
                self.complete(true, id, *offset, bytes.len());
            }
            (BackingOp::Write { bytes, .. }, Ok(Reply::Count(at))) => {
                self.complete(false, id, *at, bytes.len());
            }
            // Only the last piece of a long append writes; the count is then the offset of all.
            (BackingOp::AppendPiece { at, total, bytes, .. }, Ok(Reply::Count(to)))
                if u64::from(*at) + bytes.len() as u64 == u64::from(*total) =>
            {
                self.complete(false, id, *to, *total as usize);
            }
            _ => {}
        }
    }
}
