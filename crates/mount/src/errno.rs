//! The error of a request: an errno, which is all that the kernel understands.

use std::io;

use forebay_types::Code;

use forebay_fuse::protocol::Short;

/// An errno.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Errno(pub(crate) i32);

impl Errno {
    /// This thread's errno, after a failed system call.
    pub(crate) fn last() -> Errno {
        Errno::from(io::Error::last_os_error())
    }
}

impl From<Code> for Errno {
    fn from(code: Code) -> Errno {
        Errno(code.errno())
    }
}

impl From<io::Error> for Errno {
    fn from(e: io::Error) -> Errno {
        Errno(e.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl From<Short> for Errno {
    fn from(_: Short) -> Errno {
        Errno(libc::EINVAL)
    }
}

/// The result of a system call that returns -1 on failure.
pub(crate) fn check<T: Copy + PartialOrd + From<i8>>(result: T) -> Result<T, Errno> {
    if result < T::from(0) {
        Err(Errno::last())
    } else {
        Ok(result)
    }
}
