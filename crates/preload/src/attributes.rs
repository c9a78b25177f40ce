//! Calls that change attributes: chmod, chown, truncate.

use std::os::raw::{c_char, c_int};

use libc::{gid_t, mode_t, off_t, uid_t};

use crate::door::Pool;
use crate::interpose::{answer_int, raw};
use crate::{descriptor, magic, real, route, stat};

const HERE: c_int = libc::AT_FDCWD;

#[inline(always)]
unsafe fn chmod_any(dirfd: c_int, path: *const c_char, mode: mode_t, flags: c_int) -> isize {
    // SAFETY: libc's contract.
    unsafe {
        if stat::is_descriptor(path, flags) && dirfd != HERE {
            if let Some((pool, ino)) = descriptor::inode_of(dirfd) {
                return pool.chmod_open(dirfd, ino, mode) as isize;
            }
        }
        let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
        if follow {
            let nameless = |fd, pool: Pool, ino| pool.chmod_open(fd, ino, mode) as isize;
            if let Some(result) = magic::nameless(path, nameless) {
                return result;
            }
        }
        route::on_path(
            dirfd,
            path,
            follow,
            |dirfd, path| {
                if flags == 0 {
                    return system_call!(libc::SYS_fchmodat, dirfd, path, mode);
                }
                raw(real::libc_own::fchmodat(dirfd, path, mode, flags))
            },
            |pool, place, escape| {
                if flags & !libc::AT_SYMLINK_NOFOLLOW != 0 {
                    return -i64::from(libc::EINVAL);
                }
                pool.chmod(place, mode, follow as i32, escape)
            },
        )
    }
}

#[inline(always)]
unsafe fn chown_any(dirfd: c_int, path: *const c_char, uid: uid_t, gid: gid_t, flags: c_int) -> isize {
    // SAFETY: libc's contract.
    unsafe {
        if stat::is_descriptor(path, flags) && dirfd != HERE {
            return match descriptor::inode_of(dirfd) {
                Some((pool, ino)) => pool.chown_open(dirfd, ino, uid, gid) as isize,
                None => system_call!(libc::SYS_fchownat, dirfd, path, uid, gid, flags),
            };
        }
        let (path, flags) = stat::here_for_empty(path, flags);
        let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
        if follow {
            let nameless = |fd, pool: Pool, ino| pool.chown_open(fd, ino, uid, gid) as isize;
            if let Some(result) = magic::nameless(path, nameless) {
                return result;
            }
        }
        route::on_path(
            dirfd,
            path,
            follow,
            |dirfd, path| system_call!(libc::SYS_fchownat, dirfd, path, uid, gid, flags),
            |pool, place, escape| {
                if flags & !(libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH) != 0 {
                    return -i64::from(libc::EINVAL);
                }
                pool.chown(place, uid, gid, follow as i32, escape)
            },
        )
    }
}

interpose! {
    /// chmod(2)
    chmod = fn(path: *const c_char, mode: mode_t) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { chmod_any(HERE, path, mode, 0) })
    }

    /// fchmodat(2)
    fchmodat = fn(dirfd: c_int, path: *const c_char, mode: mode_t, flags: c_int) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { chmod_any(dirfd, path, mode, flags) })
    }

    /// lchmod(3)
    lchmod = fn(path: *const c_char, mode: mode_t) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { chmod_any(HERE, path, mode, libc::AT_SYMLINK_NOFOLLOW) })
    }

    /// fchmod(2)
    fchmod = fn(fd: c_int, mode: mode_t) -> c_int {
        answer_int(match descriptor::opened_inode_of(fd) {
            // SAFETY: the handle is attached.
            Some((pool, ino)) => unsafe { pool.chmod_open(fd, ino, mode) as isize },
            // SAFETY: it touches no memory.
            None => unsafe { system_call!(libc::SYS_fchmod, fd, mode) },
        })
    }

    /// chown(2)
    chown = fn(path: *const c_char, uid: uid_t, gid: gid_t) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { chown_any(HERE, path, uid, gid, 0) })
    }

    /// lchown(2)
    lchown = fn(path: *const c_char, uid: uid_t, gid: gid_t) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { chown_any(HERE, path, uid, gid, libc::AT_SYMLINK_NOFOLLOW) })
    }

    /// fchownat(2)
    fchownat = fn(dirfd: c_int, path: *const c_char, uid: uid_t, gid: gid_t, flags: c_int) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { chown_any(dirfd, path, uid, gid, flags) })
    }

    /// fchown(2)
    fchown = fn(fd: c_int, uid: uid_t, gid: gid_t) -> c_int {
        answer_int(match descriptor::opened_inode_of(fd) {
            // SAFETY: the handle is attached.
            Some((pool, ino)) => unsafe { pool.chown_open(fd, ino, uid, gid) as isize },
            // SAFETY: it touches no memory.
            None => unsafe { system_call!(libc::SYS_fchown, fd, uid, gid) },
        })
    }

    /// truncate(2)
    truncate, truncate64 = fn(path: *const c_char, size: off_t) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe {
            route::on_path(
                HERE,
                path,
                true,
                |_, path| system_call!(libc::SYS_truncate, path, size),
                |pool, place, escape| match u64::try_from(size) {
                    Ok(size) => pool.truncate(place, size, escape),
                    Err(_) => -i64::from(libc::EINVAL),
                },
            )
        })
    }
}
