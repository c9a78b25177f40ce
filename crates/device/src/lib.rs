//! Block devices of volumes (docs/decisions/0048, 0051).
//!
//! A volume that is one piece on this node is a loop device on the piece's memory, which the kernel copies to and from.
//! Others are devices of `forebay-block`: the process that [`program`] starts serves them, and gets and puts the bytes as
//! every client does ([`medium`]).
//!
//! Nothing records a device but the kernel ([`found`]): the name of the loop device says of which kind it is, and for a
//! served one of which pool and by which keeper; the inode number of its file is that of the memory, or of the volume, or one
//! that follows from those of joined volumes, whose specifier is among the arguments of the keeper. So
//! nothing is left of a device that has ended in whatever way.
//!
//! Tests: beside the code, `crates/cli/tests/volume_devices.rs`, `served_devices.rs`, and
//! `tests/conformance/tests/cluster/devices.rs`.

mod found;
mod medium;
mod options;
pub mod program;

pub use found::{all, joined_number, Found, Joined, Kind, MEMORY_MARK};
pub use options::Options;
pub use program::start;
