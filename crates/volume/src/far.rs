//! The way to pieces of volumes on other nodes, which `forebay-client` goes.

use std::fmt::Debug;

use forebay_types::{AtomicOp, BackingId, Code, PieceWord};

/// A range of a piece on another node, and where its bytes are in the caller's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FarRange {
    /// The piece.
    pub piece: BackingId,
    /// Its first byte in the piece.
    pub offset: u64,
    /// Where they are, in bytes behind the start of the caller's memory ([`memory_at`]).
    pub at: usize,
    /// Its bytes.
    pub bytes: usize,
}

/// The address `at` bytes behind `start`. A list may have ranges in the memory of several calls. `start` is then the lowest
/// address of all, so the result may belong to another allocation than `start`.
#[inline]
pub fn memory_at(start: *const u8, at: usize) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(start.expose_provenance().wrapping_add(at))
}

/// The way to pieces on other nodes. A call ends when all is done, or with the first error: then it is not known which
/// ranges were moved, and an atomic operation may have been executed or not.
pub trait Far: Debug + Send + Sync {
    /// Copies ranges of pieces to `to`.
    ///
    /// # Safety
    /// All ranges of the caller's memory are writable.
    unsafe fn get(&self, ranges: &[FarRange], to: *mut u8) -> Result<(), Code>;

    /// Copies from `from` to ranges of pieces.
    ///
    /// # Safety
    /// All ranges of the caller's memory are readable.
    unsafe fn put(&self, ranges: &[FarRange], from: *const u8) -> Result<(), Code>;

    /// Frees a range of a thin piece, which reads as zeros then.
    fn discard(&self, piece: BackingId, offset: u64, bytes: u64) -> Result<(), Code>;

    /// The bytes that a piece takes.
    fn allocated(&self, piece: BackingId) -> Result<u64, Code>;

    /// Executes an operation on a word of a piece. Returns what it was.
    fn atomic(&self, piece: BackingId, word: PieceWord, op: AtomicOp) -> Result<u64, Code>;

    /// Fails unless the volume's pieces are where they were at the open.
    fn check(&self) -> Result<(), Code>;

    /// Why this thread's last call failed.
    fn reason(&self) -> Option<String>;
}
