//! Calls that create, remove and read names: mkdir, rmdir, unlink, rename, link, symlink, readlink, mknod.

use std::os::raw::{c_char, c_int, c_uint};

use libc::{dev_t, mode_t};

use crate::abi::Place;
use crate::fortified::overflow;
use crate::interpose::{answer, answer_int};
use crate::{descriptor, magic, real, route, umask};

const HERE: c_int = libc::AT_FDCWD;

#[inline(always)]
unsafe fn mkdir_any(dirfd: c_int, path: *const c_char, mode: mode_t) -> isize {
    // SAFETY: libc's contract.
    unsafe {
        route::on_path(
            dirfd,
            path,
            false,
            |dirfd, path| system_call!(libc::SYS_mkdirat, dirfd, path, mode),
            |pool, place, escape| pool.make_directory(place, umask::apply(mode & 0o7777), escape),
        )
    }
}

#[inline(always)]
unsafe fn unlink_any(dirfd: c_int, path: *const c_char, flags: c_int) -> isize {
    // SAFETY: libc's contract.
    unsafe {
        route::on_path(
            dirfd,
            path,
            false,
            |dirfd, path| system_call!(libc::SYS_unlinkat, dirfd, path, flags),
            |pool, place, escape| match flags {
                0 => pool.unlink(place, escape),
                libc::AT_REMOVEDIR => pool.remove_directory(place, escape),
                _ => -i64::from(libc::EINVAL),
            },
        )
    }
}

unsafe fn rename_any(
    from_dirfd: c_int,
    from: *const c_char,
    to_dirfd: c_int,
    to: *const c_char,
    flags: c_uint,
) -> isize {
    // SAFETY: libc's contract.
    unsafe {
        let known = libc::RENAME_NOREPLACE | libc::RENAME_EXCHANGE | libc::RENAME_WHITEOUT;
        let both = libc::RENAME_NOREPLACE | libc::RENAME_EXCHANGE;
        if flags & !known != 0 || flags & both == both {
            return -(libc::EINVAL as isize);
        }
        route::on_two_paths(
            (from_dirfd, from),
            (to_dirfd, to),
            (false, false),
            |from_dirfd, from, to_dirfd, to| {
                if flags == 0 {
                    return system_call!(libc::SYS_renameat, from_dirfd, from, to_dirfd, to);
                }
                system_call!(libc::SYS_renameat2, from_dirfd, from, to_dirfd, to, flags)
            },
            |pool, from, to, escape| pool.rename(from, to, flags, escape),
        )
    }
}

unsafe fn link_any(
    from_dirfd: c_int,
    from: *const c_char,
    to_dirfd: c_int,
    to: *const c_char,
    flags: c_int,
) -> isize {
    if flags & !(libc::AT_SYMLINK_FOLLOW | libc::AT_EMPTY_PATH) != 0 {
        return -(libc::EINVAL as isize);
    }
    // SAFETY: libc's contract.
    unsafe {
        let follow = flags & libc::AT_SYMLINK_FOLLOW != 0;
        if crate::path::is_wild(to) {
            return -(libc::EFAULT as isize);
        }
        if from_dirfd != HERE && crate::stat::is_descriptor(from, flags) {
            if let Some((pool, ino)) = descriptor::inode_of(from_dirfd) {
                return link_inode(pool, ino, to_dirfd, to);
            }
            if let Some(result) = link_unnamed(from_dirfd, to_dirfd, to) {
                return result;
            }
            // A file outside the pool.
            return route::on_path(
                to_dirfd,
                to,
                false,
                |to_dirfd, to| system_call!(libc::SYS_linkat, from_dirfd, from, to_dirfd, to, flags),
                |_, _, _| match descriptor::is_open(from_dirfd) {
                    true => -i64::from(libc::EXDEV),
                    false => -i64::from(libc::EBADF),
                },
            );
        } else if follow && !crate::path::is_wild(from) && *from as u8 == b'/' && magic::may_be(from) {
            // The usual path for naming a file that was opened with O_TMPFILE: /proc/self/fd/N.
            let linked = magic::end_of(crate::path::bytes(from), |fd| link_unnamed(fd, to_dirfd, to));
            if let Some(result) = linked {
                return result;
            }
        }
        let (from, flags) = crate::stat::here_for_empty(from, flags);
        route::on_two_paths(
            (from_dirfd, from),
            (to_dirfd, to),
            (follow, true),
            |from_dirfd, from, to_dirfd, to| {
                system_call!(libc::SYS_linkat, from_dirfd, from, to_dirfd, to, flags)
            },
            |pool, from, to, escape| pool.link(from, to, follow as i32, escape),
        )
    }
}

/// Gives a file that was opened with O_TMPFILE on the pool's target a name in the pool. `None` when the descriptor is
/// of another kind of file, or the name is not in the pool.
unsafe fn link_unnamed(fd: c_int, to_dirfd: c_int, to: *const c_char) -> Option<isize> {
    if !descriptor::may_be_unnamed(fd) {
        return None;
    }
    const ELSEWHERE: isize = isize::MIN;
    // SAFETY: libc's contract.
    let result = unsafe {
        route::on_path(
            to_dirfd,
            to,
            false,
            |_, _| ELSEWHERE,
            |pool, place, escape| pool.link_unnamed(fd, place, escape),
        )
    };
    (result != ELSEWHERE).then_some(result)
}

/// Gives the pool's inode of an open descriptor another name.
unsafe fn link_inode(pool: crate::door::Pool, ino: u64, to_dirfd: c_int, to: *const c_char) -> isize {
    let itself = Place { dir: ino, path: std::ptr::null(), bytes: 0 };
    // SAFETY: libc's contract.
    unsafe {
        route::on_path(
            to_dirfd,
            to,
            false,
            |_, _| -(libc::EXDEV as isize),
            |_, place, escape| pool.link(itself, place, 0, escape),
        )
    }
}

unsafe fn symlink_any(target: *const c_char, dirfd: c_int, path: *const c_char) -> isize {
    // SAFETY: libc's contract.
    unsafe {
        route::on_path(
            dirfd,
            path,
            false,
            |dirfd, path| system_call!(libc::SYS_symlinkat, target, dirfd, path),
            |pool, place, escape| {
                if crate::path::is_wild(target) {
                    return -i64::from(libc::EFAULT);
                }
                let target = crate::path::bytes(target);
                pool.symlink(target.as_ptr(), target.len(), place, escape)
            },
        )
    }
}

/// readlink in the pool or outside: the number of bytes stored, or a negative errno.
///
/// # Safety
/// `path` is null or a C string, `out` has room for `room` bytes.
pub(crate) unsafe fn readlink_any(dirfd: c_int, path: *const c_char, out: *mut u8, room: usize) -> isize {
    // SAFETY: the caller's promise.
    unsafe {
        route::on_path(
            dirfd,
            path,
            false,
            |dirfd, path| match real::readlinkat(dirfd, path, out, room) {
                n if n > 0 => magic::shown(dirfd, path, out, room, n),
                n => n,
            },
            |pool, place, escape| {
                if room as c_int <= 0 {
                    return -i64::from(libc::EINVAL);
                }
                if crate::path::is_wild(out) {
                    return -i64::from(libc::EFAULT);
                }
                pool.read_link(place, out, room, escape)
            },
        )
    }
}

unsafe fn mknod_any(dirfd: c_int, path: *const c_char, mode: mode_t, device: dev_t) -> isize {
    // Refused before the path is read.
    match mode & libc::S_IFMT {
        0 | libc::S_IFREG | libc::S_IFCHR | libc::S_IFBLK | libc::S_IFIFO | libc::S_IFSOCK => {}
        libc::S_IFDIR => return -(libc::EPERM as isize),
        _ => return -(libc::EINVAL as isize),
    }
    // SAFETY: libc's contract.
    unsafe {
        route::on_path(
            dirfd,
            path,
            false,
            |dirfd, path| system_call!(libc::SYS_mknodat, dirfd, path, mode, device),
            |pool, place, escape| {
                let mode = mode & libc::S_IFMT | umask::apply(mode & 0o7777);
                pool.make_node(place, mode, device, escape).min(0)
            },
        )
    }
}

interpose! {
    /// mkdir(2)
    mkdir = fn(path: *const c_char, mode: mode_t) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { mkdir_any(HERE, path, mode) })
    }

    /// mkdirat(2)
    mkdirat = fn(dirfd: c_int, path: *const c_char, mode: mode_t) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { mkdir_any(dirfd, path, mode) })
    }

    /// rmdir(2)
    rmdir = fn(path: *const c_char) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { unlink_any(HERE, path, libc::AT_REMOVEDIR) })
    }

    /// unlink(2)
    unlink = fn(path: *const c_char) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { unlink_any(HERE, path, 0) })
    }

    /// unlinkat(2)
    unlinkat = fn(dirfd: c_int, path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { unlink_any(dirfd, path, flags) })
    }

    /// remove(3)
    remove = fn(path: *const c_char) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe {
            match unlink_any(HERE, path, 0) {
                result if result == -(libc::EISDIR as isize) => unlink_any(HERE, path, libc::AT_REMOVEDIR),
                result => result,
            }
        })
    }

    /// rename(2)
    rename = fn(from: *const c_char, to: *const c_char) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { rename_any(HERE, from, HERE, to, 0) })
    }

    /// renameat(2)
    renameat = fn(from_dirfd: c_int, from: *const c_char, to_dirfd: c_int, to: *const c_char) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { rename_any(from_dirfd, from, to_dirfd, to, 0) })
    }

    /// renameat2(2)
    renameat2 = fn(
        from_dirfd: c_int,
        from: *const c_char,
        to_dirfd: c_int,
        to: *const c_char,
        flags: c_uint
    ) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { rename_any(from_dirfd, from, to_dirfd, to, flags) })
    }

    /// link(2)
    link = fn(from: *const c_char, to: *const c_char) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { link_any(HERE, from, HERE, to, 0) })
    }

    /// linkat(2)
    linkat = fn(
        from_dirfd: c_int,
        from: *const c_char,
        to_dirfd: c_int,
        to: *const c_char,
        flags: c_int
    ) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { link_any(from_dirfd, from, to_dirfd, to, flags) })
    }

    /// symlink(2)
    symlink = fn(target: *const c_char, path: *const c_char) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { symlink_any(target, HERE, path) })
    }

    /// symlinkat(2)
    symlinkat = fn(target: *const c_char, dirfd: c_int, path: *const c_char) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { symlink_any(target, dirfd, path) })
    }

    /// readlink(2)
    readlink = fn(path: *const c_char, out: *mut c_char, room: usize) -> isize {
        // SAFETY: libc's contract.
        answer(unsafe { readlink_any(HERE, path, out.cast(), room) })
    }

    /// readlinkat(2)
    readlinkat = fn(dirfd: c_int, path: *const c_char, out: *mut c_char, room: usize) -> isize {
        // SAFETY: libc's contract.
        answer(unsafe { readlink_any(dirfd, path, out.cast(), room) })
    }

    /// readlink(2), fortified
    __readlink_chk = fn(path: *const c_char, out: *mut c_char, room: usize, known: usize) -> isize {
        if room > known {
            overflow();
        }
        // SAFETY: libc's contract.
        answer(unsafe { readlink_any(HERE, path, out.cast(), room) })
    }

    /// readlinkat(2), fortified
    __readlinkat_chk = fn(
        dirfd: c_int,
        path: *const c_char,
        out: *mut c_char,
        room: usize,
        known: usize
    ) -> isize {
        if room > known {
            overflow();
        }
        // SAFETY: libc's contract.
        answer(unsafe { readlink_any(dirfd, path, out.cast(), room) })
    }

    /// mknod(2)
    mknod = fn(path: *const c_char, mode: mode_t, device: dev_t) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { mknod_any(HERE, path, mode, device) })
    }

    /// mknodat(2)
    mknodat = fn(dirfd: c_int, path: *const c_char, mode: mode_t, device: dev_t) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { mknod_any(dirfd, path, mode, device) })
    }

    /// mknod(2) of programs linked before glibc 2.33
    __xmknod = fn(_version: c_int, path: *const c_char, mode: mode_t, device: *const dev_t) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { mknod_any(HERE, path, mode, *device) })
    }

    /// mknodat(2) of programs linked before glibc 2.33
    __xmknodat = fn(
        _version: c_int,
        dirfd: c_int,
        path: *const c_char,
        mode: mode_t,
        device: *const dev_t
    ) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { mknod_any(dirfd, path, mode, *device) })
    }

    /// mkfifo(3)
    mkfifo = fn(path: *const c_char, mode: mode_t) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { mknod_any(HERE, path, mode & 0o7777 | libc::S_IFIFO, 0) })
    }

    /// mkfifoat(3)
    mkfifoat = fn(dirfd: c_int, path: *const c_char, mode: mode_t) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { mknod_any(dirfd, path, mode & 0o7777 | libc::S_IFIFO, 0) })
    }
}
