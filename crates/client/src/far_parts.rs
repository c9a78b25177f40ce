//! Ranges of backing files on other nodes, and of the caller's memory.

use forebay_types::BackingId;

/// A range of a backing file on another node, and of the caller's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) id: BackingId,
    pub(crate) offset: u64,
    /// Offset in the caller's memory.
    pub(crate) at: usize,
    /// At most [`forebay_types::limits::MOVE_BYTES_MAX`].
    pub(crate) len: usize,
}

/// The caller's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Memory {
    /// Memory to read into.
    Into(*mut u8),
    /// Memory to write from.
    From(*const u8),
}
