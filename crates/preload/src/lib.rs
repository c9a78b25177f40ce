//! libforebay_preload.so: libc's calls that take a path or a pool's descriptor, answered for paths under the pool's
//! prefix and handed on for all others.
//!
//! Invariants. The host program is never harmed: no thread, no signal handler, nothing on stdout, no panic that leaves
//! the library, errno as the system call would set it. Calls that POSIX lets a signal handler make neither allocate nor
//! lock here, once the pool is attached. A program that never touches the pool pays for a compare in each call, and
//! libforebay.so is not even loaded: that happens in `door.rs` at the first call that needs it. Nothing that unwinds
//! (thread cancellation in a call of libc's) meets a frame that needs unwinding: functions are `extern "C-unwind"`, and
//! only work on the pool runs inside the guard.
//!
//! The way of a call: `classify` looks whether its path may lead into the pool (a compare); if not, the kernel or libc
//! is asked at once. Else `route` walks: into the pool through the door, out of it again where a symbolic link or `..`
//! leaves it, and into it where the kernel's tree has a link to it (`crossing`). The other files hold the calls by kind.
//!
//! Tests: `tests/`, real programs and C programs against a pool.

#[macro_use]
mod real;
#[macro_use]
mod interpose;

#[path = "../../capi/src/abi.rs"]
#[allow(unreachable_pub, dead_code)]
mod abi;
#[path = "../../capi/src/boundary.rs"]
mod boundary;

#[macro_use]
mod arguments;
mod attributes;
mod classify;
mod crossing;
mod cwd;
mod descriptor;
mod directory;
mod door;
mod dynamic;
mod exec;
mod glob;
mod lock;
mod magic;
mod mounted;
mod names;
mod open;
mod path;
mod process;
mod program;
mod realpath;
mod route;
mod scan;
mod settings;
mod socket;
mod space;
mod spawn;
mod stat;
mod stdio;
mod stream;
mod syscall;
mod temporary;
mod times;
mod tree;
mod umask;
mod walk;
mod watch;
mod xattr;
