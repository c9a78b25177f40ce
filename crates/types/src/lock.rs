//! Locks of a file's ranges, in their encoding for requests.

use crate::bytes::{Reader, Writer};
use crate::error::Code;
use crate::limits::FILE_BYTES_MAX;

/// The kind of a lock request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockKind {
    /// Excludes writers.
    Read,
    /// Excludes readers and writers.
    Write,
    /// Releases the lock.
    Unlock,
}

/// A lock of a range of a file, or of all of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockRequest {
    /// Its owner within the requesting process.
    pub owner: u64,
    /// A lock of flock(2), which has no range; else one of fcntl(2).
    pub flock: bool,
    /// Its kind.
    pub kind: LockKind,
    /// First byte.
    pub start: u64,
    /// Last byte; `i64::MAX` for the end of the file, wherever that is.
    pub end: u64,
}

impl LockRequest {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        w.u64(self.owner)?;
        w.u8(u8::from(self.flock))?;
        w.u8(match self.kind {
            LockKind::Read => 0,
            LockKind::Write => 1,
            LockKind::Unlock => 2,
        })?;
        w.u64(self.start)?;
        w.u64(self.end)
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<LockRequest, Code> {
        let (owner, flock) = (r.u64()?, r.u8()? != 0);
        let kind = match r.u8()? {
            0 => LockKind::Read,
            1 => LockKind::Write,
            2 => LockKind::Unlock,
            _ => return Err(Code::Malformed),
        };
        let (start, end) = (r.u64()?, r.u64()?);
        if start > end || end > FILE_BYTES_MAX {
            return Err(Code::Invalid);
        }
        Ok(LockRequest { owner, flock, kind, start, end })
    }
}
