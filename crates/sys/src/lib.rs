//! What several crates need of Linux, where no library that they may use provides it: the mount table, signals by a
//! descriptor, kinds of file systems, states of processes, descriptors over sockets, loop devices, FUSE notifications,
//! huge pages, processes that were stopped, and waiting.
//!
//! The client library is part of every program that uses it and may use libc alone, so this crate uses libc alone. The
//! `procfs` crate was considered for `/proc`: it rejects names and paths that are not UTF-8, and leaves the octal
//! escapes of mount points in place.
//!
//! The crate imports nothing of Forebay, starts no thread and holds no lock. Errors are `io::Error`s of the failed
//! system call.

pub mod descriptor;
pub mod file_system;
pub mod fuse;
pub mod huge_pages;
pub mod loop_device;
pub mod mounts;
pub mod opening;
pub mod packet;
pub mod process;
pub mod signals;
pub mod stopped;
pub mod wait;
pub mod written;
