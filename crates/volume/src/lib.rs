//! One-sided access to volumes (docs/decisions/0048): a volume's pieces on this node are mapped, and a put or get is a copy
//! from or to them, without a system call. Those on other nodes are reached through the daemon.
//!
//! [`Specifier`] parses the names by which programs open volumes. [`Mapped`] is one volume, with its pieces on this node
//! mapped and the way to the others ([`Far`]); [`Striped`] is several over which data are striped, or one, and [`VolumeFile`] the file in it, with an end of its own. They
//! know nothing of the daemon: `forebay-client` gets the pieces.
//!
//! What is promised: a put's bytes are in the volume when the call returns, in no order among puts of several threads. A
//! get that overlaps a put may return bytes of before and after it. Aligned 64-bit atomics are atomic and in one order
//! against those of all processes. [`Striped::fence`] orders a thread's own calls before and after it. Before each call
//! the word of the pool's life is compared: when the pool is gone, calls fail with [`forebay_types::Code::PoolGone`]
//! (EIO). [`Striped::flush`] compares it again: if it succeeds, every put of this thread before it was to a living pool.
//!
//! Memory: mappings are shared with other processes, which may write at any time, so no Rust reference to their bytes is
//! ever made. All copies go through raw pointers and memmove(3). A handle can be used by several threads, and by a child
//! after fork(2). Tests: beside the code; with processes and kills in the conformance suite.

mod far;
mod file;
mod gathered;
mod mapped;
mod ranges;
mod specifier;
mod striped;
mod thin;

pub use far::{memory_at, Far, FarRange};
pub use file::{FileFlags, VolumeFile};
pub use mapped::{Life, Mapped};
pub use ranges::Access;
pub use specifier::{Place, Problem, Specifier};
pub use striped::Striped;
