//! Decides whether a path may lead into the pool: the comparison that every call pays for.

use std::os::raw::{c_char, c_int};

use crate::abi::Place;
use crate::door::{self, Absent, Pool};
use crate::{cwd, descriptor, magic, path, settings};

/// Where a path leads.
pub(crate) enum Leads {
    /// To the kernel's tree, as far as the text of the path shows.
    Kernel,
    /// Into the pool.
    Pool(Pool, Place),
    /// Nowhere. The call fails with this negative errno.
    Nowhere(isize),
}

/// False when a path certainly stays in the kernel's tree, by its text and the directory that it starts from.
///
/// # Safety
/// `path` is wild or a C string.
#[inline(always)]
pub(crate) unsafe fn may_lead_to_pool(dirfd: c_int, path: *const c_char) -> bool {
    let prefix = settings::prefix();
    if prefix.is_empty() || path::is_wild(path) {
        return false;
    }
    // SAFETY: a C string has a first byte.
    match unsafe { *path } as u8 {
        0 => false,
        // SAFETY: the caller's promise.
        b'/' => unsafe { is_below(path, prefix) || magic::may_be(path) },
        _ if dirfd == libc::AT_FDCWD => cwd::may_be_pool(),
        _ => dirfd >= 0 && descriptor::may_be_directory(dirfd),
    }
}

/// True when `path` is the prefix, or the prefix and a slash start it.
///
/// # Safety
/// `path` is a C string.
#[inline(always)]
unsafe fn is_below(path: *const c_char, prefix: &[u8]) -> bool {
    for (i, byte) in prefix.iter().enumerate() {
        // SAFETY: the bytes before this one equal those of the prefix, which has no NUL, so the string does not end
        // before it.
        if unsafe { *path.add(i) } as u8 != *byte {
            return false;
        }
    }
    // SAFETY: as above. The string extends at least to its NUL.
    matches!(unsafe { *path.add(prefix.len()) } as u8, 0 | b'/')
}

/// Where `path` leads from the directory `dirfd`. `follow` is true if the call follows a symbolic link at the end.
///
/// # Safety
/// `path` is null or a C string that lives as long as the result.
pub(crate) unsafe fn classify(dirfd: c_int, path: *const c_char, follow: bool) -> Leads {
    // SAFETY: the caller's promise.
    if !unsafe { may_lead_to_pool(dirfd, path) } {
        return Leads::Kernel;
    }
    // SAFETY: not null, as it may lead to the pool.
    let bytes = unsafe { path::bytes(path) };
    if bytes.len() >= libc::PATH_MAX as usize {
        return Leads::Nowhere(-(libc::ENAMETOOLONG as isize));
    }
    if let Some(inside) = path::below(bytes, settings::prefix()) {
        return match door::pool() {
            Ok(pool) => Leads::Pool(pool, Place { dir: ROOT, path: inside.as_ptr(), bytes: inside.len() }),
            Err(Absent::Failed(errno)) => Leads::Nowhere(-(errno as isize)),
            Err(Absent::Attaching) => Leads::Nowhere(-(libc::EIO as isize)),
        };
    }
    if bytes.first() == Some(&b'/') {
        return match magic::place(bytes, follow) {
            Ok(Some((pool, place))) => Leads::Pool(pool, place),
            Ok(None) => Leads::Kernel,
            Err(errno) => Leads::Nowhere(errno),
        };
    }
    let from = if dirfd == libc::AT_FDCWD { cwd::directory() } else { descriptor::directory_of(dirfd) };
    match from {
        Some((pool, dir)) => Leads::Pool(pool, Place { dir, path: bytes.as_ptr(), bytes: bytes.len() }),
        None => match door::failed() {
            // An anchor of a pool that is gone. To the kernel it is an empty directory, which fsync syncs.
            Some(errno) if descriptor::is_removed_directory(dirfd) => Leads::Nowhere(-(errno as isize)),
            _ => Leads::Kernel,
        },
    }
}

/// The root directory's inode number: the first of node 1.
pub(crate) const ROOT: u64 = (1 << 48) + 1;
