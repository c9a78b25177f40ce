//! glob. Where a pattern may lead into the pool, libc's glob reads directories through functions of this library.

use std::os::raw::{c_char, c_int, c_void};

use crate::directory::{closedir, opendir, readdir};
use crate::path;
use crate::stat::{lstat, stat};
use crate::{cwd, magic, real, settings};

/// glob_t, with the functions that GLOB_ALTDIRFUNC takes.
#[repr(C)]
pub(crate) struct Glob {
    found: usize,
    paths: *mut *mut c_char,
    offset: usize,
    flags: c_int,
    closedir: *const c_void,
    readdir: *const c_void,
    opendir: *const c_void,
    lstat: *const c_void,
    stat: *const c_void,
}

type OnError = Option<unsafe extern "C-unwind" fn(*const c_char, c_int) -> c_int>;

const ALTDIRFUNC: c_int = libc::GLOB_ALTDIRFUNC;

/// True when a pattern names the prefix, or starts in the pool.
unsafe fn may_lead_to_pool(pattern: *const c_char) -> bool {
    let prefix = settings::prefix();
    if prefix.is_empty() || pattern.is_null() {
        return false;
    }
    // SAFETY: not null; libc's contract.
    let text = unsafe { path::bytes(pattern) };
    match text.first() {
        Some(b'/') if path::below(text, prefix).is_some() => true,
        // SAFETY: a C string that starts with a slash.
        Some(b'/') if unsafe { magic::may_be(pattern) } => true,
        Some(b'/') | None => path::contains(text, prefix),
        Some(_) => (cwd::may_be_pool() && cwd::directory().is_some()) || path::contains(text, prefix),
    }
}

interpose! {
    /// glob(3)
    glob, glob64 = fn(pattern: *const c_char, flags: c_int, error: OnError, out: *mut Glob) -> c_int {
        // SAFETY: libc's contract; the functions have the types that glob calls them with.
        unsafe {
            if flags & ALTDIRFUNC != 0 || out.is_null() || !may_lead_to_pool(pattern) {
                return real::libc_own::glob(pattern, flags, error, out.cast());
            }
            (*out).closedir = closedir as *const c_void;
            (*out).readdir = readdir as *const c_void;
            (*out).opendir = opendir as *const c_void;
            (*out).lstat = lstat as *const c_void;
            (*out).stat = stat as *const c_void;
            let result = real::libc_own::glob(pattern, flags | ALTDIRFUNC, error, out.cast());
            (*out).flags &= !ALTDIRFUNC;
            result
        }
    }
}
