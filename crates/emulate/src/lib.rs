//! Block devices in memory that are as slow as a profile says (docs/emulation.md, docs/decisions/0050).
//!
//! A device is a loop device, with direct I/O, on a file that a process of ours serves through FUSE. The *server*
//! ([`serve`]) keeps the bytes ([`store`]) and paces the requests; the *keeper* ([`program`]) has the loop device open,
//! measures how long requests are on their way through the kernel ([`way`]), waits for the server, and takes everything away
//! at the end.
//!
//! Invariants: the server never waits for memory that its own device is to free: it is an I/O flusher (prctl(2)), all
//! its memory is locked and allocated before the device appears, it leaves a limited memory cgroup, and serving a request
//! allocates nothing. The server has neither the loop device nor the mount open, and the keeper not the FUSE connection.
//! So when the server dies, the kernel aborts the connection, I/O on the device is EIO, and no process waits for ever.
//! When the keeper dies, the kernel detaches the device at its last close, and kills the server.
//!
//! Threads: the server has one for each request that the medium serves at the same time, and two more. A block's lock is
//! a leaf. Tests: beside the code, and `crates/cli/tests/emulate.rs`.

mod connection;
mod control;
mod description;
mod loop_device;
mod memory_cgroup;
pub mod program;
mod serve;
mod store;
mod way;

pub use control::Faults;
pub use description::{all, directory, find, is_name, Description, Options};
pub use loop_device::is_in_use;
pub use memory_cgroup::Limited;
pub use way::Way;
