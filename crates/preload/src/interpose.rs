//! How a libc function is replaced, and how results are returned as libc returns them.

/// Defines a function and exports it under the names in front of it. The body returns the function's own return value.
macro_rules! interpose {
    ($($(#[$doc:meta])* $($name:ident),+ = fn($($arg:ident: $ty:ty),*) -> $ret:ty $body:block)*) => {$(
        interpose!(@each [$($name),+] ($($arg: $ty),*) -> $ret, [$($doc),*], $body);
    )*};
    (@each [$first:ident $(, $other:ident)*] $args:tt -> $ret:ty, $docs:tt, $body:block) => {
        interpose!(@define $first $args -> $ret, $docs, $body);
        $(interpose!(@alias $other $first $args -> $ret, $docs);)*
    };
    (@define $name:ident ($($arg:ident: $ty:ty),*) -> $ret:ty, [$($doc:meta),*], $body:block) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As libc's.
        #[cfg_attr(not(test), no_mangle)]
        #[allow(unreachable_pub, dead_code, clippy::too_many_arguments)]
        pub unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> $ret $body
    };
    (@alias $name:ident $first:ident ($($arg:ident: $ty:ty),*) -> $ret:ty, [$($doc:meta),*]) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As libc's.
        #[cfg_attr(not(test), no_mangle)]
        #[allow(unreachable_pub, dead_code, clippy::too_many_arguments)]
        pub unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> $ret {
            // SAFETY: the same contract.
            unsafe { $first($($arg),*) }
        }
    };
}

/// This thread's errno.
#[inline]
pub(crate) fn errno() -> i32 {
    // SAFETY: the address is valid for the thread's life.
    unsafe { *libc::__errno_location() }
}

/// Sets this thread's errno.
#[inline]
pub(crate) fn set_errno(errno: i32) {
    // SAFETY: the address is valid for the thread's life.
    unsafe { *libc::__errno_location() = errno }
}

/// The result of a system call as libc returns it: 0 or more, or -1 and errno.
#[inline]
pub(crate) fn answer(result: isize) -> isize {
    if result < 0 {
        set_errno(-result as i32);
        return -1;
    }
    result
}

/// [`answer`] for functions that return an `int`.
#[inline]
pub(crate) fn answer_int(result: isize) -> i32 {
    answer(result) as i32
}

/// The result of a libc function that returns -1 and errno, as that of a system call.
#[inline]
pub(crate) fn raw(result: impl Into<i64>) -> isize {
    let result = result.into();
    if result < 0 {
        return -(errno() as isize);
    }
    result as isize
}
