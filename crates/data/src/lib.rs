//! Backing files of one target: the daemon's only access to media.
//!
//! A [`Target`] is a directory on tmpfs, a DAX file system, XFS or ext4. It holds sparse backing files named by inode
//! number ([`BackingName`]). The daemon uses it through the trait [`Media`], which the [`FaultyMedium`] implements in
//! memory for crash tests. Further: mounts of Forebay's own tmpfs ([`attached_tmpfs`], [`detached_tmpfs`]), the
//! abilities of a directory's file system ([`Capabilities`]), the capacity that a pool may have ([`check_capacity`])
//! and whether a logout would clear a directory ([`logout_clears`]).
//!
//! Imports only `types` and `sys`. Has no thread, and no lock but that of the faulty medium.

mod capacity;
mod cgroup;
mod faulty_medium;
mod host;
mod lease;
mod logout;
mod mark;
mod media;
mod mount;
mod name;
mod namespace;
mod node_targets;
mod probe;
mod probe_file;
#[cfg(test)]
mod scratch;
mod size;
mod target;
#[cfg(test)]
mod testing;
mod tmpfs;

pub use capacity::{check_capacity, default_capacity, Bound, Bounds, Medium};
pub use cgroup::{tightest_memory_cgroup, MemoryCgroup};
pub use faulty_medium::FaultyMedium;
pub use host::Host;
pub use lease::lease_fault;
pub use logout::logout_clears;
pub use mark::{marked_attr, outlives_node, DataMark, MARK_BYTES_MAX, MARK_XATTR};
pub use media::{timestamps, Access, BackingStat, FileStat, Media, Space};
pub use mount::{attached_tmpfs, detached_tmpfs, is_in_table, is_mounted_here, unmount, Unmount};
pub use name::{AnchorName, BackingName, ANCHORS_DIRECTORY, DATA_DIRECTORY, SHARD_DIRECTORY};
pub use node_targets::NodeTargets;
pub use probe::{Capabilities, HugePages};
pub use size::{format_size, parse_size};
pub use target::Target;

/// The code of a system call's errno.
fn code_of(e: rustix::io::Errno) -> forebay_types::Code {
    forebay_types::Code::from_errno(e.raw_os_error())
}
