//! open, openat, creat.

use std::cell::Cell;
use std::os::raw::{c_char, c_int};

use libc::mode_t;

use crate::abi::Place;
use crate::cwd::overflow;
use crate::door::Pool;
use crate::interpose::{answer_int, raw};
use crate::{cwd, descriptor, magic, real, route, umask};

/// Opens wherever the path leads; the descriptor or a negative errno.
///
/// # Safety
/// `path` is null or a C string.
#[inline(always)]
pub(crate) unsafe fn open_any(dirfd: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> isize {
    let follow = flags & libc::O_NOFOLLOW == 0;
    // SAFETY: the caller's promise.
    unsafe {
        let escaped = Cell::new(false);
        for _ in 0..ATTEMPTS {
            escaped.set(false);
            let fd = route::on_path(
                dirfd,
                path,
                follow,
                |at, way| {
                    // Where a FIFO of the pool leads to, its backing file, or a file of another node, its name on the pool's
                    // mount: it is there, or is nobody's.
                    let led = way != path;
                    let is_backing = led && magic::is_backing(crate::path::bytes(way));
                    let is_by_mount = led && magic::is_by_mount(crate::path::bytes(way));
                    escaped.set(is_backing || is_by_mount);
                    let mut flags = flags;
                    if escaped.get() {
                        flags &= !(libc::O_CREAT | libc::O_EXCL);
                    }
                    if is_backing {
                        flags &= !libc::O_TRUNC;
                    }
                    let fd = raw(real::libc_own::openat(at, way, flags, mode));
                    if is_by_mount && fd >= 0 {
                        descriptor::opened_by_mount(fd as c_int);
                    }
                    fd
                },
                |pool, place, escape| open_place(pool, place, flags, mode, escape),
            );
            if fd != -(libc::ENOENT as isize) {
                return fd;
            }
            if cwd::is_removed(dirfd, path) {
                return raw(real::libc_own::openat(dirfd, path, flags, mode));
            }
            // Removed between its look-up and its opening: its name is another file's, or nobody's.
            if !escaped.get() {
                return fd;
            }
        }
        -(libc::ENOENT as isize)
    }
}

/// How often an open starts again when what it led to is removed under it.
const ATTEMPTS: u32 = 4096;

/// Opens a place of the pool.
///
/// # Safety
/// `escape` has room for a path.
pub(crate) unsafe fn open_place(
    pool: Pool,
    place: Place,
    flags: c_int,
    mode: mode_t,
    escape: *mut u8,
) -> i64 {
    let makes = flags & libc::O_CREAT != 0 || flags & libc::O_TMPFILE == libc::O_TMPFILE;
    let mode = if makes { umask::apply(mode & 0o7777) } else { 0 };
    // SAFETY: the door's contract is kept.
    let fd = unsafe { pool.open(place, flags, mode, escape) };
    let may_be_directory = fd >= 0 && !makes && flags & libc::O_ACCMODE == libc::O_RDONLY;
    // SAFETY: the handle is attached.
    if may_be_directory && unsafe { pool.directories_opened() } > 0 {
        descriptor::opened_directory();
    }
    fd
}

/// Ends the program where a fortified open lacks the mode that its flags need, as libc's does.
fn check_no_mode(flags: c_int) {
    if flags & libc::O_CREAT != 0 || flags & libc::O_TMPFILE == libc::O_TMPFILE {
        overflow();
    }
}

interpose! {
    /// open(2). C passes `mode` only with O_CREAT or O_TMPFILE; without, it is whatever its register holds and not used.
    open, open64, __open, __open64 = fn(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { open_any(libc::AT_FDCWD, path, flags, mode) })
    }

    /// openat(2)
    openat, openat64 = fn(dirfd: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { open_any(dirfd, path, flags, mode) })
    }

    /// creat(2)
    creat, creat64 = fn(path: *const c_char, mode: mode_t) -> c_int {
        let flags = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC;
        // SAFETY: libc's contract.
        answer_int(unsafe { open_any(libc::AT_FDCWD, path, flags, mode) })
    }

    /// open(2), fortified
    __open_2, __open64_2 = fn(path: *const c_char, flags: c_int) -> c_int {
        check_no_mode(flags);
        // SAFETY: libc's contract.
        answer_int(unsafe { open_any(libc::AT_FDCWD, path, flags, 0) })
    }

    /// openat(2), fortified
    __openat_2, __openat64_2 = fn(dirfd: c_int, path: *const c_char, flags: c_int) -> c_int {
        check_no_mode(flags);
        // SAFETY: libc's contract.
        answer_int(unsafe { open_any(dirfd, path, flags, 0) })
    }
}
