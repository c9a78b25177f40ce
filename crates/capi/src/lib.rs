//! libforebay.so: the one copy of the client in a process, and its two interfaces.
//!
//! `include/forebay.h` declares the public interface. The build script writes the exported functions from it
//! (`exports.rs`), and the other modules have their bodies. `abi.rs` and `door.rs` are the private interface, for the
//! preload library. Both are thin layers over `forebay_client::Pool`.
//!
//! Invariants: every function that C calls runs inside the guard (`boundary.rs`). The library exports the functions of
//! forebay.h and `forebay_door`, and nothing else. Its own system calls go to the kernel, even where the preload
//! library interposes libc (`kernel.rs`). Tests: `tests/`.

pub mod abi;
pub mod allocation;
mod answer;
mod backing;
mod boundary;
pub mod completion_queue;
pub mod completions;
pub mod door;
pub mod exports;
pub mod file;
mod group;
pub mod header;
mod io_threads;
mod kernel;
pub mod later;
mod layout;
pub mod memory;
pub mod model;
mod opened;
mod per_process;
pub mod public;
pub mod staging;
mod text;
mod transfers;
pub mod volume;
