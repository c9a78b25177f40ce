//! errno as a [`Code`].

use forebay_types::Code;

/// The code of this thread's errno, after a failed system call.
pub(crate) fn last() -> Code {
    // SAFETY: errno of this thread.
    Code::from_errno(unsafe { *libc::__errno_location() })
}

/// The result of a system call that returns -1 on failure.
pub(crate) fn check(result: i32) -> Result<i32, Code> {
    if result < 0 {
        Err(last())
    } else {
        Ok(result)
    }
}
