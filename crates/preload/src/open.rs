//! open, openat, creat.

use std::cell::Cell;
use std::os::raw::{c_char, c_int};

use libc::mode_t;

use crate::abi::Place;
use crate::door::Pool;
use crate::fortified::overflow;
use crate::interpose::{answer_int, raw};
use crate::path::is_wild;
use crate::{descriptor, durable, magic, real, route, settings, umask};

/// Opens a file in the pool or outside. Returns the descriptor or a negative errno.
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
                    // The path leads to the backing file of a FIFO, or to the name of another node's file on the pool's
                    // mount. Either exists, or the file was removed.
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
            // The file was removed between look-up and open, so its name belongs to another file, or to none.
            if !escaped.get() {
                return fd;
            }
        }
        -(libc::ENOENT as isize)
    }
}

/// What counts beside O_PATH: the kernel ignores all other flags of open(2) then.
const PATH_FLAGS: c_int = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC;
/// How often an open starts again when the file is removed during the open.
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
    let flags = if flags & libc::O_PATH != 0 { flags & PATH_FLAGS } else { flags };
    let makes = flags & libc::O_CREAT != 0 || flags & libc::O_TMPFILE == libc::O_TMPFILE;
    let mode = if makes { umask::apply(mode & 0o7777) } else { 0 };
    // SAFETY: the contract of abi.rs is kept.
    let fd = unsafe { pool.open(place, flags, mode, escape) };
    let may_be_directory = fd >= 0 && !makes && flags & libc::O_ACCMODE == libc::O_RDONLY;
    // SAFETY: the handle is attached.
    if may_be_directory && unsafe { pool.directories_opened() } > 0 {
        descriptor::opened_directory();
    }
    if fd >= 0 {
        durable::note_opened(pool, fd as c_int, flags);
    }
    fd
}

/// The argument of openat2(2), in its first version.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct OpenHow {
    flags: u64,
    mode: u64,
    resolve: u64,
}

/// openat2(2), if it does what openat(2) does. `None` for what only the kernel can do: to resolve a path with
/// restrictions, or to refuse the arguments.
///
/// # Safety
/// `path` is null or a C string, and `how` is null or has `bytes` bytes.
pub(crate) unsafe fn openat2(
    dirfd: c_int,
    path: *const c_char,
    how: *const OpenHow,
    bytes: usize,
) -> Option<c_int> {
    const KNOWN: c_int = libc::O_ACCMODE
        | libc::O_CREAT
        | libc::O_EXCL
        | libc::O_NOCTTY
        | libc::O_TRUNC
        | libc::O_APPEND
        | libc::O_NONBLOCK
        | libc::O_SYNC
        | libc::O_ASYNC
        | libc::O_DIRECT
        | libc::O_DIRECTORY
        | libc::O_NOFOLLOW
        | libc::O_NOATIME
        | libc::O_CLOEXEC
        | libc::O_PATH
        | libc::O_TMPFILE;
    if bytes != size_of::<OpenHow>() || is_wild(how) || settings::prefix_bytes() == 0 {
        return None;
    }
    // SAFETY: the caller's promise.
    let OpenHow { flags, mode, resolve } = unsafe { how.read_unaligned() };
    let flags = c_int::try_from(flags).ok().filter(|flags| flags & !KNOWN == 0)?;
    let makes = flags & libc::O_CREAT != 0 || flags & libc::O_TMPFILE == libc::O_TMPFILE;
    // With O_PATH openat2 refuses what openat ignores.
    let ignored = flags & libc::O_PATH != 0 && flags & !PATH_FLAGS != 0;
    if resolve != 0 || mode & !0o7777 != 0 || mode != 0 && !makes || ignored {
        return None;
    }
    // SAFETY: the caller's promise.
    Some(answer_int(unsafe { open_any(dirfd, path, flags, mode as mode_t) }))
}

/// Ends the program, as libc's fortified open does, when the flags need a mode and the call has none.
fn check_no_mode(flags: c_int) {
    if flags & libc::O_CREAT != 0 || flags & libc::O_TMPFILE == libc::O_TMPFILE {
        overflow();
    }
}

interpose! {
    /// open(2). C passes `mode` only with O_CREAT or O_TMPFILE. Otherwise it is an arbitrary value, and is not used.
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
