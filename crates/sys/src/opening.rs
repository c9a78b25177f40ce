//! Opens that may wait: one that conflicts with another process's lease on the file waits in the kernel until that
//! process gives the lease up (fcntl(2), F_SETLEASE).
//!
//! A simulation runs all processes of a pool in one process, one thread at a time. The holder of the lease could not run
//! while such an open waits in the kernel, so a simulation provides another way to wait ([`simulate`]). Without one this
//! costs one load of an unchanging word for each open.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;

/// Lets other threads run, and returns some time later.
type Wait = Box<dyn Fn() + Send + Sync>;

static SIMULATED: OnceLock<Wait> = OnceLock::new();

/// Makes all opens of this process that conflict with a lease wait by calls of `wait` from now on. Only the first use
/// has an effect.
pub fn simulate(wait: impl Fn() + Send + Sync + 'static) {
    let _ = SIMULATED.set(Box::new(wait));
}

/// openat(2): the descriptor, or -1 with errno set.
#[inline]
pub fn open_at(directory: RawFd, name: &CStr, flags: i32, mode: libc::mode_t) -> RawFd {
    // SAFETY: the name is NUL-terminated; the kernel checks all else.
    let open = |flags| unsafe { libc::openat(directory, name.as_ptr(), flags, mode as libc::c_uint) };
    match SIMULATED.get() {
        Some(wait) if flags & (libc::O_NONBLOCK | libc::O_PATH) == 0 => open_simulated(wait, flags, open),
        _ => open(flags),
    }
}

/// Opens an existing file by its path.
pub fn open(path: &Path, flags: i32) -> io::Result<OwnedFd> {
    open_existing(libc::AT_FDCWD, &CString::new(path.as_os_str().as_bytes())?, flags)
}

/// Opens an existing file of a directory.
pub fn open_existing(directory: RawFd, name: &CStr, flags: i32) -> io::Result<OwnedFd> {
    match open_at(directory, name, flags, 0) {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: the descriptor is new and ours.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}

#[cold]
fn open_simulated(wait: &Wait, flags: i32, open: impl Fn(i32) -> RawFd) -> RawFd {
    loop {
        let fd = open(flags | libc::O_NONBLOCK);
        if fd >= 0 {
            // SAFETY: plain system call on a descriptor of ours.
            unsafe { libc::fcntl(fd, libc::F_SETFL, flags & (libc::O_APPEND | libc::O_NOATIME)) };
            return fd;
        }
        // SAFETY: the calling thread's errno.
        if unsafe { *libc::__errno_location() } != libc::EWOULDBLOCK {
            return fd;
        }
        // The attempt has broken the lease, as a waiting open does.
        wait();
    }
}
