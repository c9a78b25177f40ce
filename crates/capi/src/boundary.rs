//! The guard between C and Rust. libforebay.so and libforebay_preload.so compile this one file.
//!
//! A panic must not unwind into C, and no call changes errno. Each function that C calls does its work inside
//! [`guard`], which ensures both. A Rust library catches only its own panics, so each of the two libraries has a guard.
//! Within a library guards are not nested. A function of the table in `abi.rs` has its guard in libforebay.so, so the
//! preload library calls it directly.

use std::os::raw::c_int;
use std::panic::{catch_unwind, AssertUnwindSafe};

/// Runs the body of a call. Afterwards errno is as it was before. A body that panics returns EIO.
#[inline]
pub(crate) fn guard<T: Returned>(body: impl FnOnce() -> T) -> T {
    // SAFETY: the address of this thread's errno is valid for the life of the thread.
    let errno: &mut c_int = unsafe { &mut *libc::__errno_location() };
    let before = *errno;
    let returned = catch_unwind(AssertUnwindSafe(body)).unwrap_or(T::PANICKED);
    *errno = before;
    returned
}

/// The result type of a guarded body.
pub(crate) trait Returned {
    /// The result after a panic.
    const PANICKED: Self;
}

impl Returned for i64 {
    const PANICKED: i64 = -(libc::EIO as i64);
}

impl Returned for isize {
    const PANICKED: isize = -(libc::EIO as isize);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errno() -> c_int {
        std::io::Error::last_os_error().raw_os_error().unwrap_or_default()
    }

    fn set_errno(errno: c_int) {
        // SAFETY: this thread's errno.
        unsafe { *libc::__errno_location() = errno }
    }

    /// A function as C calls it. It changes errno, and panics if `number` is negative.
    extern "C" fn called_by_c(number: i64) -> i64 {
        guard(|| {
            set_errno(libc::ENOENT);
            assert!(number >= 0, "a panic that the test expects");
            number
        })
    }

    #[test]
    fn guarded_call_that_succeeds_leaves_errno_as_it_was() {
        set_errno(77);
        assert_eq!((called_by_c(5), errno()), (5, 77));
    }

    #[test]
    fn panic_in_a_guarded_call_is_eio_in_c_and_leaves_errno_as_it_was() {
        set_errno(77);
        assert_eq!((called_by_c(-1), errno()), (-i64::from(libc::EIO), 77));
    }
}
