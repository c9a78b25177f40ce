//! The library behind every interface of Forebay in a process: path walk, open, attributes, names, directories,
//! striping, retry.
//!
//! Look-ups read the board. Names that the board lacks, and all changes, go to the daemon as requests in the ring. Data
//! of a file with one backing file on this node bypass this library: the program has the kernel's descriptor of the
//! backing file.
//!
//! All functions that the path calls of an interface use are async-signal-safe: they do not allocate or take locks, and
//! the caller's guard restores errno. A process attaches at its first call. A forked child attaches anew at its first
//! call, because the ring belongs to its parent. Threads share one ring.
//!
//! Faults survived: a restart of the daemon's worker (calls wait and are answered; the board is replaced), and a
//! program that closes all its descriptors (the targets are fetched again). When the pool is gone, calls fail with
//! [`Code::PoolGone`](forebay_types::Code) after a bounded wait. Tests: beside the code, and the conformance suite.

mod ahead;
mod allocated;
mod attached;
mod attributes;
mod buffer;
mod call_deadline;
mod connection;
mod descriptor;
mod direct;
mod directory;
mod errno;
mod fan_out;
mod far_parts;
mod far_pieces;
mod file;
mod gaps;
mod group;
mod holes;
mod inode;
mod layout_choice;
mod leased;
mod locks;
mod making;
mod marking;
mod memory_slots;
mod migrate;
mod mounted;
pub mod nameless;
mod names;
mod open;
mod paced;
mod path;
mod persisting;
mod pool;
mod program_memory;
mod ranges;
mod read_ahead;
mod registration;
mod remembered;
mod remote_data;
mod remote_inodes;
mod room;
mod runs;
mod scatter;
mod sieve;
mod stat;
mod store_state;
mod together;
mod unnamed;
mod volumes;
mod walk;
mod wide;
mod xattr;

pub use connection::Role;
pub use directory::Directory;
pub use file::{File, Striping};
pub use group::Groups;
pub use layout_choice::targets_of;
pub use leased::{has_arrived, has_name, LeaseKind, LeasedFiles};
pub use locks::{leaves_lock_in_doubt, new_lock_owner, LockPlace, LocksElsewhere, Unlocks};
pub use memory_slots::{memory_in_use, InUse};
pub use mounted::{inode_of_name, INODE_NAME, MOUNTED_MARK};
pub use open::directories_opened;
pub use paced::Paced;
pub use path::{PathBuffer, Place};
pub use persisting::Durable;
pub use pool::{Door, Fail, Pool, RequestMemory};
pub use program_memory::{free_memory, unregister_memory};
pub use ranges::Arrived;
pub use remembered::close_waits;
pub use runs::Run;
pub use store_state::{DataState, Kept, StoreState};
pub use volumes::{VolumeFailure, VolumePlaces};
