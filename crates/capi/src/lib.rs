//! libforebay.so: the one copy of the client in a process, and its two interfaces.
//!
//! `include/forebay.h` is the public one (`public.rs`, `file.rs`, `group.rs`, `layout.rs`, `later.rs`, `memory.rs`, `staging.rs`);
//! `abi.rs` and `door.rs` are the private one, for the preload library. Both are thin over `forebay_client::Pool`.
//! Invariants: every function that C calls goes through `guard.rs`;
//! nothing but what `exports.txt` lists is exported (rustc writes the linker's version script; a test holds the two against each
//! other and the header); the library's own system calls reach the kernel and not the preload library
//! that may stand in front of libc (`kernel.rs`). Tests: `tests/`.

pub mod abi;
pub mod door;
pub mod file;
pub mod group;
mod guard;
mod kernel;
pub mod later;
pub mod layout;
pub mod memory;
pub mod public;
pub mod staging;
pub mod text;
