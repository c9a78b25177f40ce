//! Conversions between C and Rust: the answer of a call, and its arguments.

use std::ffi::CStr;
use std::os::raw::{c_char, c_int};

use forebay_client::{Fail, PathBuffer};
use forebay_types::Code;

use crate::abi::{ESCAPED, PATH_BYTES};
use crate::boundary::guard;

/// The result of a failed call: a negative errno, or [`ESCAPED`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Failed(pub(crate) i64);

/// A pointer that must not be null is null.
pub(crate) const FAULT: Failed = Failed::errno(libc::EFAULT);
/// An argument is out of range.
pub(crate) const INVALID: Failed = Failed::errno(libc::EINVAL);

impl Failed {
    pub(crate) const fn errno(errno: c_int) -> Failed {
        Failed(-(errno as i64))
    }

    /// The failure of this thread's last system call.
    pub(crate) fn last() -> Failed {
        // SAFETY: the address of this thread's errno is valid for the life of the thread.
        Failed::errno(unsafe { *libc::__errno_location() })
    }
}

impl From<Code> for Failed {
    fn from(code: Code) -> Failed {
        Failed::errno(code.errno())
    }
}

/// Without a buffer for the kernel's path, a path that leaves the pool is EXDEV.
impl From<Fail> for Failed {
    fn from(fail: Fail) -> Failed {
        match fail {
            Fail::Code(code) => code.into(),
            Fail::Escape => Code::CrossDevice.into(),
        }
    }
}

/// The result of a successful call.
pub(crate) trait Number {
    /// The number that C receives.
    fn number(self) -> i64;
}

impl Number for () {
    fn number(self) -> i64 {
        0
    }
}

impl Number for i64 {
    fn number(self) -> i64 {
        self
    }
}

macro_rules! number {
    ($($ty:ty),*) => {$(
        impl Number for $ty {
            fn number(self) -> i64 {
                self as i64
            }
        }
    )*};
}
number!(bool, i32, u64, usize);

/// Runs the body of a call inside the guard. Returns its number, or a negative errno.
pub(crate) fn call<T: Number>(body: impl FnOnce() -> Result<T, Failed>) -> i64 {
    guard(|| body().map_or_else(|failed| failed.0, T::number))
}

/// Runs a path walk. Where it leaves the pool, the kernel's path is stored in `escape`.
///
/// # Safety
/// `escape` has room for [`PATH_BYTES`] bytes.
pub(crate) unsafe fn walk<T>(
    escape: *mut u8,
    body: impl FnOnce(&mut PathBuffer) -> Result<T, Fail>,
) -> Result<T, Failed> {
    let mut path = PathBuffer::new();
    body(&mut path).map_err(|fail| match fail {
        Fail::Code(code) => code.into(),
        Fail::Escape => {
            // SAFETY: the caller's promise.
            let stored = unsafe { store_path(&path, escape) };
            stored.map_or_else(|failed| failed, |_| Failed(ESCAPED))
        }
    })
}

/// Stores a path and a NUL. Returns the path's length.
///
/// # Safety
/// `out` has room for [`PATH_BYTES`] bytes.
pub(crate) unsafe fn store_path(path: &PathBuffer, out: *mut u8) -> Result<usize, Failed> {
    let path = path.as_bytes();
    if path.len() >= PATH_BYTES {
        return Err(Code::NameTooLong.into());
    }
    // SAFETY: the path and a NUL fit.
    unsafe {
        out.copy_from_nonoverlapping(path.as_ptr(), path.len());
        out.add(path.len()).write(0);
    }
    Ok(path.len())
}

/// A reference to the target of a pointer, or [`FAULT`] for null.
///
/// # Safety
/// `pointer` is null or valid.
pub(crate) unsafe fn given<'a, T>(pointer: *const T) -> Result<&'a T, Failed> {
    // SAFETY: the caller's promise.
    unsafe { pointer.as_ref() }.ok_or(FAULT)
}

/// A C string's bytes.
///
/// # Safety
/// `text` is null or NUL-terminated and lives as long as the call.
pub(crate) unsafe fn text<'a>(text: *const c_char) -> Option<&'a [u8]> {
    // SAFETY: not null; the caller's promise.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_bytes())
}

/// Bytes from C. Empty if the pointer is null.
///
/// # Safety
/// `first` is null or points to `count` bytes that live as long as the call.
pub(crate) unsafe fn bytes<'a>(first: *const u8, count: usize) -> &'a [u8] {
    if first.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: the caller's promise; no object has more than isize::MAX bytes.
    unsafe { std::slice::from_raw_parts(first, count.min(isize::MAX as usize)) }
}

/// A buffer from C. Empty if the pointer is null.
///
/// # Safety
/// `first` is null or points to `count` writable bytes that nothing else uses during the call.
pub(crate) unsafe fn room<'a>(first: *mut u8, count: usize) -> &'a mut [u8] {
    if first.is_null() || count == 0 {
        return &mut [];
    }
    // SAFETY: the caller's promise; bytes of any content are valid, and the client only writes to them.
    unsafe { std::slice::from_raw_parts_mut(first, count.min(isize::MAX as usize)) }
}

/// The bytes of a call of forebay.h: a null pointer to some is [`FAULT`].
///
/// # Safety
/// As of [`bytes`].
pub(crate) unsafe fn given_bytes<'a>(first: *const u8, count: usize) -> Result<&'a [u8], Failed> {
    match first.is_null() && count > 0 {
        true => Err(FAULT),
        // SAFETY: the caller's promise.
        false => Ok(unsafe { bytes(first, count) }),
    }
}

/// The buffer of a call of forebay.h: a null pointer to one that is not empty is [`FAULT`].
///
/// # Safety
/// As of [`room`].
pub(crate) unsafe fn given_room<'a>(first: *mut u8, count: usize) -> Result<&'a mut [u8], Failed> {
    match first.is_null() && count > 0 {
        true => Err(FAULT),
        // SAFETY: the caller's promise.
        false => Ok(unsafe { room(first, count) }),
    }
}

/// An array from C.
///
/// # Safety
/// `first` is null or points to `count` elements that live as long as the call.
pub(crate) unsafe fn array<'a, T>(first: *const T, count: c_int) -> Result<&'a [T], Failed> {
    match usize::try_from(count).map_err(|_| INVALID)? {
        0 => Ok(&[]),
        _ if first.is_null() => Err(FAULT),
        // SAFETY: not null; the caller's promise.
        count => Ok(unsafe { std::slice::from_raw_parts(first, count) }),
    }
}

/// A writable array from C.
///
/// # Safety
/// `first` is null or points to `count` writable elements that nothing else uses during the call.
pub(crate) unsafe fn array_mut<'a, T>(first: *mut T, count: c_int) -> Result<&'a mut [T], Failed> {
    match usize::try_from(count).map_err(|_| INVALID)? {
        0 => Ok(&mut []),
        _ if first.is_null() => Err(FAULT),
        // SAFETY: not null; the caller's promise.
        count => Ok(unsafe { std::slice::from_raw_parts_mut(first, count) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_handle_is_efault() {
        // SAFETY: null is allowed.
        assert_eq!(call(|| unsafe { given(std::ptr::null::<u64>()) }.copied()), FAULT.0);
    }

    #[test]
    fn arrays_that_cannot_be_are_refused() {
        // SAFETY: null is allowed.
        unsafe {
            assert_eq!(array(std::ptr::null::<u64>(), 1), Err(FAULT));
            assert_eq!(array_mut(std::ptr::null_mut::<u64>(), -1), Err(INVALID));
            assert_eq!(array(std::ptr::null::<u64>(), 0), Ok(&[][..]));
        }
    }
}
