//! Registering backing files for FUSE passthrough, for users who may not do so themselves.
//!
//! The kernel lets only CAP_SYS_ADMIN register a file, as registered files are not to be seen by the usual tools. That
//! is all this room does, and the only one that may run with a privilege its user has not: `forebay-register`, a
//! program with that one capability. It is started by `forebay-mount` as its user (a file capability,
//! [`Registrar::start`]), or by root before a job, listening on a socket (a batch system's prolog,
//! [`Registrar::connect`]).
//!
//! What it holds to, whoever asks:
//! - it acts as the user who asks: same user, groups and nothing above CAP_SYS_ADMIN; the kernel reads and writes registered
//!   files as who registered them;
//! - it registers regular files that this user owns, which he could open anyway, with connections that he holds a descriptor
//!   of; it opens nothing itself, and takes no path;
//! - it uses no library but libc, allocates bounded amounts, and answers each message or ends.
//!
//! Messages are numbered packets of a SOCK_SEQPACKET socket: 32 bytes, and a descriptor for some ([`Message`]).
//!
//! Its tests: beside the code, and `crates/mount/tests/ordinary_user.rs`.

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

/// Where a batch system's prolog has it listen, unless `FOREBAY_REGISTER` names another socket.
pub const SOCKET: &str = "/run/forebay/register";
/// Names the socket.
pub const SOCKET_VARIABLE: &str = "FOREBAY_REGISTER";
/// The program, beside `forebay-mount`.
pub const PROGRAM: &str = "forebay-register";
