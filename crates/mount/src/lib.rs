//! The mount: serves a pool as a FUSE file system, with passthrough for the data of files.
//!
//! It runs in a process of its own (docs/decisions/0004), which is an ordinary client of the pool: look-ups read the
//! board, changes are sent through the ring, and a restart of the worker goes unnoticed. A file with one backing file
//! is opened for *passthrough*: the kernel itself reads, writes and maps the backing file, at the speed of the medium.
//! The data of other files are read and written by FUSE requests.
//!
//! Invariants: a change that another interface acknowledged is visible through the mount at once (`cache_rules`). An
//! inode stays usable until the kernel has forgotten it, with a name or without (`nodes`, `opened`). Locks exclude the
//! locks of all interfaces (`locks`). An inode has at most one registration.
//!
//! Threads: the serving threads, which never wait for one another (`session`); one thread while locks wait (`locks`);
//! one for each request that waits for a backing store (`waiting`); one that receives the daemon's messages about other programs (`sharing`); and the main thread, which receives the
//! supervisor's messages (`program`).
//!
//! The mount survives the death of the worker, the death of a program, and a reply that the kernel no longer waits
//! for. If the process itself dies, the connection ends: the supervisor starts the process again, which removes the
//! dead mount and mounts anew. Tests: `tests/`, and the conformance suite.

mod adaptive_spin;
mod arriving;
mod attributes;
mod cache_rules;
mod closing;
mod directories;
mod elsewhere;
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
mod registrar;
mod rights;
mod serving_threads;
mod session;
mod sharing;
mod splice;
mod store_requests;
mod waiting;

pub use filesystem::{DataPath, FileSystem};
pub use forebay_fuse::Device;
pub use session::{Agreement, Session};
