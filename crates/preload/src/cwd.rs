//! The working directory: in the kernel's tree, or a directory of the pool.
//!
//! In the pool it is an anchor, or a directory of the pool's mount. To the kernel an anchor is a removed directory, so
//! the kernel's own relative look-ups all fail there. Look-ups in the pool start from the directory's inode. The inode
//! is determined at the first relative path and kept; chdir and fchdir set it. A child that runs in the memory of its
//! parent keeps nothing, as its working directory is its own.

use std::os::raw::{c_char, c_int};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::door::Pool;
use crate::path::Buffer;
use crate::{descriptor, door, process, real, settings};

/// [`STATE`] before the working directory is known.
const UNKNOWN: u64 = 0;
/// [`STATE`] of a directory in the kernel's tree. Inode numbers are greater.
pub(crate) const KERNEL: u64 = 1;

static STATE: AtomicU64 = AtomicU64::new(UNKNOWN);

/// False when relative paths certainly start in the kernel's tree.
#[inline(always)]
pub(crate) fn may_be_pool() -> bool {
    STATE.load(Ordering::Relaxed) != KERNEL
}

/// The working directory, if it is in the pool.
pub(crate) fn directory() -> Option<(Pool, u64)> {
    match STATE.load(Ordering::Relaxed) {
        KERNEL => None,
        UNKNOWN => find_out(),
        ino => door::pool().ok().map(|pool| (pool, ino)),
    }
}

fn find_out() -> Option<(Pool, u64)> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    let here = c".".as_ptr();
    // SAFETY: a C string and a writable structure.
    let seen = unsafe { real::fstatat(libc::AT_FDCWD, here, stat.as_mut_ptr(), 0) };
    // SAFETY: filled after success.
    let kernel = (seen == 0).then(|| unsafe { stat.assume_init() });
    match kernel {
        Some(stat)
            if stat.st_nlink == 0
                || descriptor::is_on_mount(None, stat.st_dev) && !named_otherwise(&stat) =>
        {
            // Without a pool nothing is kept, as the pool may come back.
            let pool = door::pool().ok()?;
            let mut ino = KERNEL;
            // SAFETY: the handle is attached, the structures are readable and writable.
            let found = unsafe { pool.working_directory(&stat, &mut ino) };
            descriptor::learn_device(&stat, found == 1);
            keep(if found == 1 { ino } else { KERNEL });
            (found == 1).then_some((pool, ino))
        }
        Some(_) => {
            keep(KERNEL);
            None
        }
        None => None,
    }
}

/// True when PWD names the working directory by a path outside the prefix. Then the program was started in a directory
/// of the mount by the mount's own path, and the kernel serves it.
fn named_otherwise(here: &libc::stat) -> bool {
    // SAFETY: `named` is a C string or null. The structure is writable, and filled after success.
    unsafe {
        let named = libc::getenv(c"PWD".as_ptr());
        if named.is_null() {
            return false;
        }
        let rest = crate::path::bytes(named).strip_prefix(settings::prefix());
        if rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/")) {
            return false;
        }
        let mut there = std::mem::MaybeUninit::<libc::stat>::uninit();
        if real::fstatat(libc::AT_FDCWD, named, there.as_mut_ptr(), 0) != 0 {
            return false;
        }
        let there = there.assume_init();
        (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
    }
}

pub(crate) fn keep(state: u64) {
    if process::borrows_memory() {
        STATE.store(UNKNOWN, Ordering::Relaxed);
    } else {
        STATE.store(state, Ordering::Relaxed);
    }
}

/// The working directory's path, if it is in the pool. Returns its length or a negative errno.
pub(crate) fn path(out: &mut Buffer) -> Option<isize> {
    if settings::prefix_bytes() == 0 || !may_be_pool() {
        return None;
    }
    let (pool, ino) = directory()?;
    let mut inside = Buffer::new();
    // SAFETY: the buffer has room for a path.
    let bytes = unsafe { pool.path_of(ino, inside.first()) } as isize;
    if bytes < 0 {
        return Some(bytes);
    }
    // SAFETY: the call stored a C string.
    let inside = unsafe { crate::path::bytes(inside.as_c()) };
    let inside = if inside == b"/" { b"".as_slice() } else { inside };
    if !out.set(&[settings::prefix(), inside]) {
        return Some(-(libc::ENAMETOOLONG as isize));
    }
    Some((settings::prefix().len() + inside.len()) as isize)
}

/// True when `path` is the directory of `dirfd` itself, in any spelling without a name, and that was removed from the pool.
///
/// # Safety
/// `path` is null or a C string.
#[cold]
pub(crate) unsafe fn is_removed(dirfd: c_int, path: *const c_char) -> bool {
    if crate::path::is_wild(path) {
        return false;
    }
    // SAFETY: the caller's promise.
    let path = unsafe { crate::path::bytes(path) };
    let is_here =
        path.first() == Some(&b'.') && path.split(|&b| b == b'/').all(|name| matches!(name, b"" | b"."));
    let found = match dirfd {
        _ if !is_here => None,
        libc::AT_FDCWD if may_be_pool() => directory(),
        libc::AT_FDCWD => None,
        dirfd => descriptor::directory_of(dirfd),
    };
    let Some((pool, ino)) = found else { return false };
    let mut seen = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the handle is attached, the structure writable.
    let found = unsafe { pool.stat_inode(ino, seen.as_mut_ptr()) };
    found == -i64::from(libc::ENOENT)
}
