//! libforebay_preload.so interposes the calls of libc that take a path or a descriptor. It serves paths under the
//! pool's prefix, and passes on all others.
//!
//! Invariants. The library never harms the host program: it starts no thread, installs no signal handler, writes
//! nothing to stdout, lets no panic out, and sets errno as the system call would. Calls that POSIX allows in a signal
//! handler neither allocate nor lock here, once the pool is attached. A program that never uses the pool pays for a
//! comparison in each call, and libforebay.so is not even loaded: `door.rs` loads it at the first call that needs it.
//! Thread cancellation unwinds out of calls of libc. Interposed functions are `extern "C-unwind"`, and only work on the
//! pool runs inside the guard (`boundary.rs`), so no frame that needs unwinding is in its way.
//!
//! The steps of a call: `classify` decides whether its path may lead into the pool (a comparison). If not, the kernel
//! or libc is called at once. Otherwise `route` follows the path: into the pool through the door, out of it where a
//! symbolic link or `..` leaves it, and into it where the kernel's tree has a link to it (`crossing`). The other files
//! have the calls by kind.
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
mod chdir;
mod classify;
mod crossing;
mod cwd;
mod descriptor;
mod directory;
mod door;
mod durable;
mod dynamic;
mod exec;
mod fortified;
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
