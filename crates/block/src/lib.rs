//! Block devices whose bytes a process of ours serves (docs/decisions/0050, 0051): loop devices, with direct I/O, on a file
//! that it serves through FUSE. Emulated media (`forebay-emulate`) and volumes (`forebay-device`) are such devices.
//!
//! The *server* ([`serve`]) has the bytes, behind the trait [`Medium`]. The *keeper* ([`keep`]) has the loop device open,
//! waits for the server, and takes everything away at the end. [`start`] is the command's part: it starts the keeper's
//! program, and waits for its report.
//!
//! Invariants: the server never waits for memory that its own device is to free: it is an I/O flusher (prctl(2)), what it
//! needs is allocated and locked before the device appears, and it leaves a limited memory cgroup. The server has neither
//! the loop device nor the mount open, and the keeper not the FUSE connection. So when the server dies, the kernel aborts
//! the connection, I/O on the device is EIO, and no process waits for ever. When the keeper dies, the kernel detaches the
//! device at its last close, and kills the server.
//!
//! Threads: the server has as many as its medium asks for; the keeper has one. Tests: `crates/cli/tests/emulate.rs` and
//! `crates/cli/tests/served_devices.rs`.

mod connection;
mod keeper;
mod memory_cgroup;
mod process;
mod report;
mod serve;
mod turns;

pub use forebay_fuse::Device;
pub use keeper::{keep, Ending, Plan, Tell, Up};
pub use memory_cgroup::{leave_limited, Limited};
pub use process::Process;
pub use report::{start, Report};
pub use serve::{serve, Medium, Memory, Served};
