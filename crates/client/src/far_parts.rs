//! Ranges of backing files on other nodes, and of the caller's memory.

use forebay_types::BackingId;
use forebay_volume::memory_at;

/// A range of a backing file on another node, and of the caller's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) id: BackingId,
    pub(crate) offset: u64,
    /// Offset in the caller's memory ([`memory_at`]).
    pub(crate) at: usize,
    /// At most [`forebay_types::limits::MOVE_BYTES_MAX`].
    pub(crate) len: usize,
}

impl Part {
    /// Its place in the caller's memory, which begins at `start`.
    pub(crate) fn place(&self, start: *const u8) -> *mut u8 {
        memory_at(start, self.at)
    }
}

/// The caller's memory, by its lowest address.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Memory {
    /// Memory to read into.
    Into(*mut u8),
    /// Memory to write from.
    From(*const u8),
}
