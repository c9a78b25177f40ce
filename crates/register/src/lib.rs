//! Registering backing files for FUSE passthrough, for users who may not do so themselves.
//!
//! The kernel lets only a process with CAP_SYS_ADMIN register a file, because the usual tools do not show registered
//! files. This crate does nothing else. It alone may run with a privilege that its user does not have: as
//! `forebay-register`, a program with that one capability. `forebay-mount` starts the program as its own user (a file
//! capability, [`Registrar::start`]), or root starts it before a job, listening on a socket (a batch system's prolog,
//! [`Registrar::connect`]).
//!
//! Its rules for every user that sends requests:
//! - It acts as that user, with the same user id, the user's groups at most, and no capability but CAP_SYS_ADMIN: the
//!   kernel reads and writes a registered file with the credentials of the process that registered it.
//! - It registers only regular files that the user owns, which the user could open anyway, with connections that the
//!   user holds a descriptor of. It opens nothing itself and takes no path.
//! - It uses no library but libc, allocates bounded amounts of memory, and answers each message or ends.
//!
//! Messages are numbered packets of 32 bytes on a SOCK_SEQPACKET socket, some with a descriptor ([`Message`]).
//!
//! Tests: beside the code, and `crates/mount/tests/ordinary_user.rs`.

pub mod backing;
mod client;
pub mod message;
mod privilege;
mod program;
mod serve;
mod socket_address;

pub use client::{Failure, Registrar};
pub use message::Message;
pub use program::main;

/// Where the program listens when a batch system's prolog starts it, unless `FOREBAY_REGISTER` names another socket.
pub const SOCKET: &str = "/run/forebay/register";
/// The environment variable that names the socket.
pub const SOCKET_VARIABLE: &str = "FOREBAY_REGISTER";
/// The program's file name. It is in the directory of `forebay-mount`.
pub const PROGRAM: &str = "forebay-register";
