//! The one guard around every function that C calls: no panic passes it, errno is as it was, null pointers are answered.

use std::ffi::CStr;
use std::os::raw::c_char;
use std::panic::{catch_unwind, AssertUnwindSafe};

use forebay_client::{Fail, PathBuffer, Place, Pool};
use forebay_types::{Code, Ino};

use crate::abi::{self, ESCAPED, PATH_BYTES};

/// What a body gives: its answer, or a negative errno.
pub(crate) type Answer = Result<i64, i64>;

/// The answer for a null pointer where there must be none.
pub(crate) const FAULT: i64 = -(libc::EFAULT as i64);

/// Runs `body`. A panic is EIO; errno stays.
pub(crate) fn guard(body: impl FnOnce() -> Answer) -> i64 {
    // SAFETY: the address of this thread's errno is valid for the thread's life.
    let errno = unsafe { &mut *libc::__errno_location() };
    let before = *errno;
    let answer = catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(-(libc::EIO as i64)));
    *errno = before;
    match answer {
        Ok(answer) | Err(answer) => answer,
    }
}

/// Runs `body` on the pool of a handle.
///
/// # Safety
/// `handle` is null or came from `attach`.
pub(crate) unsafe fn on_pool(
    handle: *const abi::PoolHandle,
    body: impl FnOnce(&'static Pool) -> Answer,
) -> i64 {
    guard(|| {
        // SAFETY: pools are never freed; the caller's promise says that this is one.
        let pool = unsafe { handle.cast::<Pool>().as_ref() }.ok_or(FAULT)?;
        body(pool)
    })
}

/// Runs a walk. Where it leaves the pool, the kernel's path goes to `escape`, or the answer is EXDEV when that is null.
///
/// # Safety
/// `handle` is null or came from `attach`; `escape` is null or has room for [`PATH_BYTES`] bytes.
pub(crate) unsafe fn on_walk(
    handle: *const abi::PoolHandle,
    escape: *mut u8,
    body: impl FnOnce(&'static Pool, &mut PathBuffer) -> Result<i64, Fail>,
) -> i64 {
    // SAFETY: the caller's promise.
    let walk = |pool| {
        let mut path = PathBuffer::new();
        match body(pool, &mut path) {
            Ok(answer) => Ok(answer),
            Err(Fail::Code(code)) => Err(negative(code)),
            Err(Fail::Escape) if escape.is_null() => Err(negative(Code::CrossDevice)),
            Err(Fail::Escape) => {
                let bytes = path.as_bytes();
                if bytes.len() >= PATH_BYTES {
                    return Err(negative(Code::NameTooLong));
                }
                // SAFETY: the bytes and a NUL fit, which was just checked.
                unsafe {
                    escape.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
                    escape.add(bytes.len()).write(0);
                }
                Err(ESCAPED)
            }
        }
    };
    // SAFETY: the caller's promise.
    unsafe { on_pool(handle, walk) }
}

/// The negative errno of a code.
pub(crate) fn negative(code: Code) -> i64 {
    -i64::from(code.errno())
}

/// The client's form of a place.
///
/// # Safety
/// `path` points to `bytes` bytes, or `bytes` is 0.
pub(crate) unsafe fn place<'a>(place: abi::Place) -> Place<'a> {
    // SAFETY: the caller's promise.
    Place { dir: Ino(place.dir), path: unsafe { bytes(place.path, place.bytes) } }
}

/// Bytes that C handed over; none when the pointer is null.
///
/// # Safety
/// `first` is null or points to `count` bytes that live as long as the call.
pub(crate) unsafe fn bytes<'a>(first: *const u8, count: usize) -> &'a [u8] {
    if first.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: the caller's promise; more than isize::MAX bytes cannot be there.
    unsafe { std::slice::from_raw_parts(first, count.min(isize::MAX as usize)) }
}

/// Room that C handed over; none when the pointer is null.
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

/// A C string's bytes.
///
/// # Safety
/// `text` is null or NUL-terminated and lives as long as the call.
pub(crate) unsafe fn text<'a>(text: *const c_char) -> Result<&'a [u8], i64> {
    if text.is_null() {
        return Err(FAULT);
    }
    // SAFETY: not null; the caller's promise.
    Ok(unsafe { CStr::from_ptr(text) }.to_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guard_of_a_panic_is_eio_and_keeps_errno() {
        // SAFETY: this thread's errno.
        unsafe { *libc::__errno_location() = 77 };
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| ()));
        assert_eq!(guard(|| panic!("expected")), -i64::from(libc::EIO));
        std::panic::set_hook(hook);
        // SAFETY: this thread's errno.
        assert_eq!(unsafe { *libc::__errno_location() }, 77);
    }

    #[test]
    fn null_pool_is_efault() {
        // SAFETY: null is allowed.
        assert_eq!(unsafe { on_pool(std::ptr::null(), |_| Ok(0)) }, FAULT);
    }
}
