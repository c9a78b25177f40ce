//! Fortified calls: those that know the size of the caller's buffer.

use crate::settings;

/// A fortified call ends the program, as libc's does, when the caller's buffer is smaller than the size that was
/// passed.
#[cold]
pub(crate) fn overflow() -> ! {
    settings::complain(&[b"*** buffer overflow detected ***: terminated\n"]);
    // SAFETY: it does not return.
    unsafe { libc::abort() }
}
