//! The one library behind every door in a process: path walk, open, attributes, names, directories, striping, retry.
//!
//! Look-ups read the board; what it does not know, and every change, is asked through the ring. File data never
//! passes here: a file with one local backing file is opened as that file, and its descriptor is the kernel's.
//!
//! Everything that a file door calls is async-signal-safe: no allocation, no lock, errno left alone by the caller's
//! guard. A process attaches at its first call; a forked child attaches anew at its first call, as its ring is its
//! parent's. Threads share one ring.
//!
//! Faults survived: the daemon's worker restarts (calls wait and are answered; the board is exchanged), the program
//! closes all its descriptors (the target is fetched again). When the pool is gone, calls fail with
//! [`Code::PoolGone`](forebay_types::Code) after a bounded wait. Tests: `tests/`, and the conformance suite.

mod ahead;
mod attached;
mod attributes;
mod buffer;
mod call_deadline;
mod connection;
mod descriptor;
mod directory;
mod errno;
mod fan_out;
mod file;
mod gaps;
mod group;
mod holes;
mod inode;
mod layout_choice;
mod locks;
mod making;
mod migrate;
mod mounted;
pub mod nameless;
mod names;
mod open;
mod path;
mod pool;
mod read_ahead;
mod remembered;
mod remote_data;
mod remote_inodes;
mod runs;
mod scatter;
mod sieve;
mod stat;
mod unnamed;
mod walk;
mod wide;
mod xattr;

pub use connection::Role;
pub use directory::Directory;
pub use file::{File, Striping};
pub use layout_choice::targets_of;
pub use locks::{leaves_lock_in_doubt, new_lock_owner, LockPlace, LocksElsewhere, Unlocks};
pub use mounted::{inode_of_name, INODE_NAME, MOUNTED_MARK};
pub use open::directories_opened;
pub use path::{PathBuffer, Place};
pub use pool::{Door, Fail, Pool};
pub use runs::Run;
