//! The state shared by a group of processes that opened a file together: a pointer that each of them moves, and locks
//! that exclude only members of the group. The daemon that has the file's first backing file keeps both, under a random
//! number that the group's first process drew.

use crate::bytes::{Reader, Writer};
use crate::error::Code;
use crate::limits::FILE_BYTES_MAX;
use crate::lock::LockRequest;

/// An operation on a group's state. For a group that does not exist it fails with [`Code::Stale`], except
/// [`GroupOp::End`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GroupOp {
    /// Makes the group. It ends with the requesting process, if not before. → `Done`, [`Code::Exists`] when another
    /// process has a group of this number, [`Code::NoResources`] when there are too many groups
    Make {
        /// The pointer's first value.
        position: u64,
    },
    /// Advances the pointer. → `Count`: its value before
    Move {
        /// The distance; 0 reads the pointer.
        by: u64,
    },
    /// Sets the pointer. → `Done`
    Seek {
        /// Its new value.
        position: u64,
    },
    /// Takes an owner's one lock, without waiting, or releases it; `flock` is ignored. Conflicting locks are granted in
    /// the order of their first requests, as long as the requests are repeated. → `Done`, [`Code::Busy`]
    Lock(LockRequest),
    /// Ends the group; only the process that made it may. → `Done`
    End,
}

impl GroupOp {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        match *self {
            GroupOp::Make { position } => {
                w.u8(0)?;
                w.u64(position)
            }
            GroupOp::Move { by } => {
                w.u8(1)?;
                w.u64(by)
            }
            GroupOp::Seek { position } => {
                w.u8(2)?;
                w.u64(position)
            }
            GroupOp::Lock(wish) => {
                w.u8(3)?;
                wish.encode(w)
            }
            GroupOp::End => w.u8(4),
        }
    }

    /// Decodes and checks: in the result positions are within a file's bounds.
    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<GroupOp, Code> {
        let within = |value: u64| match value {
            0..=FILE_BYTES_MAX => Ok(value),
            _ => Err(Code::FileTooLarge),
        };
        Ok(match r.u8()? {
            0 => GroupOp::Make { position: within(r.u64()?)? },
            1 => GroupOp::Move { by: within(r.u64()?)? },
            2 => GroupOp::Seek { position: within(r.u64()?)? },
            3 => GroupOp::Lock(LockRequest::decode(r)?),
            4 => GroupOp::End,
            _ => return Err(Code::Malformed),
        })
    }
}
