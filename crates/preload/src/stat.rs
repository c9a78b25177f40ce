//! All stat calls, and access.

use std::os::raw::{c_char, c_int, c_uint};

use libc::stat as Stat;

use crate::abi::Place;
use crate::door::Pool;
use crate::interpose::{answer_int, raw};
use crate::path::{is_wild, Buffer};
use crate::{descriptor, real, route};

const STAT_FLAGS: c_int = libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH | libc::AT_NO_AUTOMOUNT;
/// AT_STATX_SYNC_TYPE: how current the attributes must be. They are always current.
const STATX_SYNC: c_int = 0x6000;
const EINVAL: i64 = -(libc::EINVAL as i64);
const EFAULT: i64 = -(libc::EFAULT as i64);

/// True for the empty path with AT_EMPTY_PATH, which means the descriptor itself.
///
/// # Safety
/// `path` is null or a C string.
#[inline(always)]
pub(crate) unsafe fn is_descriptor(path: *const c_char, flags: c_int) -> bool {
    // SAFETY: the caller's promise.
    flags & libc::AT_EMPTY_PATH != 0 && (path.is_null() || !is_wild(path) && unsafe { *path } == 0)
}

#[inline(always)]
unsafe fn stat_any(dirfd: c_int, path: *const c_char, out: *mut Stat, flags: c_int) -> isize {
    // SAFETY: libc's contract.
    unsafe {
        if is_descriptor(path, flags) && dirfd != libc::AT_FDCWD {
            return fstat_any(dirfd, out);
        }
        let (path, flags) = here_for_empty(path, flags);
        let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
        route::on_path(
            dirfd,
            path,
            follow,
            |dirfd, path| real::fstatat(dirfd, path, out, flags),
            |pool, place, escape| {
                if flags & !STAT_FLAGS != 0 {
                    return EINVAL;
                }
                if is_wild(out) {
                    return itself_or(pool, place, follow, escape, EFAULT);
                }
                pool.stat(place, follow as i32, out, escape)
            },
        )
    }
}

/// `answer` for a place that exists, otherwise the error of the walk, which the kernel reports first too.
///
/// # Safety
/// `escape` has room for a path.
#[cold]
pub(crate) unsafe fn itself_or(pool: Pool, place: Place, follow: bool, escape: *mut u8, answer: i64) -> i64 {
    // SAFETY: the caller's promise.
    unsafe { pool.reach(place, follow, escape) }.map_or_else(|failed| failed, |_| answer)
}

/// The empty path with AT_EMPTY_PATH and AT_FDCWD means the working directory.
#[inline(always)]
pub(crate) unsafe fn here_for_empty(path: *const c_char, flags: c_int) -> (*const c_char, c_int) {
    // SAFETY: the caller's promise, as of `is_descriptor`.
    if unsafe { is_descriptor(path, flags) } {
        return (c".".as_ptr(), flags & !libc::AT_EMPTY_PATH);
    }
    (path, flags)
}

#[inline(always)]
unsafe fn fstat_any(fd: c_int, out: *mut Stat) -> isize {
    // SAFETY: libc's contract.
    unsafe {
        let result = real::fstat(fd, out);
        if result == 0 && descriptor::is_candidate(fd, &*out) {
            fstat_candidate(fd, &mut *out);
        }
        result
    }
}

#[cold]
fn fstat_candidate(fd: c_int, out: &mut Stat) {
    if crate::settings::prefix_bytes() != 0 {
        descriptor::pool_stat(fd, out);
    }
}

/// The kernel's statx of a descriptor, with the attributes of the pool.
unsafe fn statx_of_descriptor(fd: c_int, flags: c_int, mask: c_uint, out: *mut libc::statx) -> isize {
    // SAFETY: libc's contract; the structures are writable.
    unsafe {
        let result = system_call!(libc::SYS_statx, fd, c"".as_ptr(), flags | libc::AT_EMPTY_PATH, mask, out);
        if result != 0 || crate::settings::prefix_bytes() == 0 {
            return result;
        }
        let mut stat = std::mem::MaybeUninit::<Stat>::uninit();
        if real::fstat(fd, stat.as_mut_ptr()) != 0 {
            return result;
        }
        let mut stat = stat.assume_init();
        if !descriptor::is_candidate(fd, &stat) || !descriptor::pool_stat(fd, &mut stat) {
            return result;
        }
        let x = &mut *out;
        x.stx_mask |= libc::STATX_BASIC_STATS;
        x.stx_attributes = 0;
        x.stx_attributes_mask = 0;
        x.stx_blksize = stat.st_blksize as u32;
        x.stx_nlink = stat.st_nlink as u32;
        x.stx_uid = stat.st_uid;
        x.stx_gid = stat.st_gid;
        x.stx_mode = stat.st_mode as u16;
        x.stx_ino = stat.st_ino;
        x.stx_size = stat.st_size as u64;
        x.stx_blocks = stat.st_blocks as u64;
        for (to, sec, nsec) in [
            (&mut x.stx_atime, stat.st_atime, stat.st_atime_nsec),
            (&mut x.stx_mtime, stat.st_mtime, stat.st_mtime_nsec),
            (&mut x.stx_ctime, stat.st_ctime, stat.st_ctime_nsec),
        ] {
            to.tv_sec = sec;
            to.tv_nsec = nsec as u32;
        }
        (x.stx_rdev_major, x.stx_rdev_minor) = (libc::major(stat.st_rdev), libc::minor(stat.st_rdev));
        (x.stx_dev_major, x.stx_dev_minor) = (libc::major(stat.st_dev), libc::minor(stat.st_dev));
        result
    }
}

/// access in the pool or outside.
#[inline(always)]
unsafe fn access_any(dirfd: c_int, path: *const c_char, amode: c_int, flags: c_int) -> isize {
    let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
    let effective = flags & libc::AT_EACCESS != 0;
    // SAFETY: libc's contract.
    unsafe {
        let is_descriptor = is_descriptor(path, flags);
        if is_descriptor && dirfd != libc::AT_FDCWD {
            if let Some((pool, dir)) = descriptor::named_inode_of(dirfd) {
                let (itself, mut escape) = (Place { dir, path: std::ptr::null(), bytes: 0 }, Buffer::new());
                return pool.access(itself, amode, effective as i32, follow as i32, escape.first()) as isize;
            }
        }
        let (path, flags) = match is_descriptor && dirfd == libc::AT_FDCWD {
            true => here_for_empty(path, flags),
            false => (path, flags),
        };
        route::on_path(
            dirfd,
            path,
            follow,
            |dirfd, path| {
                if flags == 0 {
                    return system_call!(libc::SYS_faccessat, dirfd, path, amode);
                }
                raw(real::libc_own::faccessat(dirfd, path, amode, flags))
            },
            |pool, place, escape| {
                if flags & !(libc::AT_SYMLINK_NOFOLLOW | libc::AT_EACCESS | libc::AT_EMPTY_PATH) != 0 {
                    return EINVAL;
                }
                pool.access(place, amode, effective as i32, follow as i32, escape)
            },
        )
    }
}

interpose! {
    /// stat(2)
    stat, stat64 = fn(path: *const c_char, out: *mut Stat) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { stat_any(libc::AT_FDCWD, path, out, 0) })
    }

    /// lstat(2)
    lstat, lstat64 = fn(path: *const c_char, out: *mut Stat) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { stat_any(libc::AT_FDCWD, path, out, libc::AT_SYMLINK_NOFOLLOW) })
    }

    /// fstat(2)
    fstat, fstat64 = fn(fd: c_int, out: *mut Stat) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { fstat_any(fd, out) })
    }

    /// fstatat(2)
    fstatat, fstatat64 = fn(dirfd: c_int, path: *const c_char, out: *mut Stat, flags: c_int) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { stat_any(dirfd, path, out, flags) })
    }

    /// stat(2) of programs linked before glibc 2.33. The first argument is the version of the layout, and there is only
    /// one
    __xstat, __xstat64 = fn(_version: c_int, path: *const c_char, out: *mut Stat) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { stat_any(libc::AT_FDCWD, path, out, 0) })
    }

    /// lstat(2) of programs linked before glibc 2.33
    __lxstat, __lxstat64 = fn(_version: c_int, path: *const c_char, out: *mut Stat) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { stat_any(libc::AT_FDCWD, path, out, libc::AT_SYMLINK_NOFOLLOW) })
    }

    /// fstat(2) of programs linked before glibc 2.33
    __fxstat, __fxstat64 = fn(_version: c_int, fd: c_int, out: *mut Stat) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { fstat_any(fd, out) })
    }

    /// fstatat(2) of programs linked before glibc 2.33
    __fxstatat, __fxstatat64 = fn(
        _version: c_int,
        dirfd: c_int,
        path: *const c_char,
        out: *mut Stat,
        flags: c_int
    ) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { stat_any(dirfd, path, out, flags) })
    }

    /// statx(2)
    statx = fn(
        dirfd: c_int,
        path: *const c_char,
        flags: c_int,
        mask: c_uint,
        out: *mut libc::statx
    ) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe {
            if is_descriptor(path, flags) && dirfd != libc::AT_FDCWD {
                return answer_int(statx_of_descriptor(dirfd, flags, mask, out));
            }
            let (path, flags) = here_for_empty(path, flags);
            let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
            route::on_path(
                dirfd,
                path,
                follow,
                |dirfd, path| system_call!(libc::SYS_statx, dirfd, path, flags, mask, out),
                |pool, place, escape| {
                    if flags & !(STAT_FLAGS | STATX_SYNC) != 0 {
                        return EINVAL;
                    }
                    if is_wild(out) {
                        return itself_or(pool, place, follow, escape, EFAULT);
                    }
                    pool.statx(place, follow as i32, out, escape)
                },
            )
        })
    }

    /// access(2)
    access = fn(path: *const c_char, amode: c_int) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { access_any(libc::AT_FDCWD, path, amode, 0) })
    }

    /// faccessat(2)
    faccessat = fn(dirfd: c_int, path: *const c_char, amode: c_int, flags: c_int) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { access_any(dirfd, path, amode, flags) })
    }

    /// euidaccess(3)
    euidaccess, eaccess = fn(path: *const c_char, amode: c_int) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { access_any(libc::AT_FDCWD, path, amode, libc::AT_EACCESS) })
    }
}
