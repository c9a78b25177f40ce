//! errno as a [`Code`].

use forebay_types::Code;

/// The code of this thread's errno, after a failed system call.
pub(crate) fn last() -> Code {
    // SAFETY: errno of this thread.
    Code::from_errno(unsafe { *libc::__errno_location() })
}

/// The code of an I/O error from another crate; [`Code::NoMemory`] for an error without errno.
pub(crate) fn of(e: std::io::Error) -> Code {
    e.raw_os_error().map_or(Code::NoMemory, Code::from_errno)
}

/// True if a connect failed because no process listens on the socket: the pool is gone, or never existed.
pub(crate) fn nobody_listens() -> bool {
    // SAFETY: errno of this thread.
    matches!(unsafe { *libc::__errno_location() }, libc::ECONNREFUSED | libc::ENOENT | libc::ENOTDIR)
}

/// True if a call on a socket reached its timeout.
pub(crate) fn timed_out() -> bool {
    // SAFETY: errno of this thread.
    unsafe { *libc::__errno_location() == libc::EAGAIN }
}

/// fstat(2).
pub(crate) fn stat(fd: std::os::fd::RawFd) -> Result<libc::stat, Code> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the structure is writable, and filled on success.
    unsafe {
        check(libc::fstat(fd, stat.as_mut_ptr()))?;
        Ok(stat.assume_init())
    }
}

/// The result of a system call that returns -1 on failure.
pub(crate) fn check(result: i32) -> Result<i32, Code> {
    if result < 0 {
        Err(last())
    } else {
        Ok(result)
    }
}
