//! What several crates need of Linux and no library that they may use has: the table of mounts, signals as a
//! descriptor, kinds of file systems, states of processes, descriptors over sockets, FUSE's notifications, and waiting.
//!
//! The client library is part of every host program and may use libc alone, so this crate uses libc alone. A library
//! for `/proc` was considered: the `procfs` crate refuses names and paths that are not UTF-8 and leaves the octal
//! escapes of mount points in place.
//!
//! Imports nothing of Forebay, starts no thread, holds no lock. Errors are `io::Error`s of the failed system call.

pub mod descriptor;
pub mod file_system;
pub mod fuse;
pub mod mounts;
pub mod process;
pub mod signals;
pub mod wait;
