//! The mount: a pool as a FUSE file system whose files are the kernel's own.
//!
//! A process of its own (docs/decisions/0004), an ordinary client of the pool: look-ups read the board, changes go
//! through the ring, and a worker that dies is not noticed. Files with one backing file are opened by *passthrough*:
//! the kernel reads, writes and maps the backing file by itself, at the medium's own speed. Others are read and written
//! by requests.
//!
//! Kept: what a door acknowledged is seen through the mount at once (`cache_rules`); an inode stays usable until the
//! kernel has let go of it, named or not (`nodes`, `opened`); locks exclude those of all doors (`locks`). One
//! registration an inode.
//!
//! Threads: some that serve requests and never wait for one another (`session`), one while locks wait (`locks`), and
//! the main thread, which hears the supervisor. Faults survived: the worker's death, a program's death, a reply that
//! nobody wants. Its own death ends the connection: the supervisor starts it again, and it clears the dead mount away
//! and mounts anew. Tests: `tests/`, and the conformance suite.

mod adaptive_spin;
mod attributes;
mod cache_rules;
mod closing;
mod device;
mod directories;
mod errno;
mod files;
mod filesystem;
mod handles;
mod lock_table;
mod locks;
mod lookup_pins;
pub mod mountpoint;
mod moved;
mod names;
mod nodes;
mod opened;
pub mod program;
mod protocol;
mod registrar;
mod rights;
mod serving_threads;
mod session;
mod sharing;
mod splice;

pub use device::Device;
pub use filesystem::{DataPath, FileSystem};
pub use session::{Agreement, Session};
