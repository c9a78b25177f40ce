//! Extended attributes, by path, by symbolic link and by descriptor.

use std::os::raw::{c_char, c_int, c_void};

use crate::interpose::{answer, answer_int};
use crate::path::is_wild;
use crate::stat::itself_or;
use crate::{descriptor, route};

const HERE: c_int = libc::AT_FDCWD;
const EFAULT: i64 = -(libc::EFAULT as i64);

/// True where the kernel cannot read a name, or cannot read or write a value, list or buffer.
#[inline(always)]
fn is_bad<T>(name: *const c_char, value: *const T, bytes: usize) -> bool {
    is_wild(name) || bytes > 0 && is_wild(value)
}

unsafe fn get(
    path: *const c_char,
    name: *const c_char,
    value: *mut c_void,
    room: usize,
    follow: bool,
) -> isize {
    let number = if follow { libc::SYS_getxattr } else { libc::SYS_lgetxattr };
    // SAFETY: libc's contract.
    unsafe {
        route::on_path(
            HERE,
            path,
            follow,
            |_, path| system_call!(number, path, name, value, room),
            |pool, place, escape| {
                if is_bad(name, value, room) {
                    return itself_or(pool, place, follow, escape, EFAULT);
                }
                pool.get_xattr(place, follow as i32, name, value.cast(), room, escape)
            },
        )
    }
}

unsafe fn set(
    path: *const c_char,
    name: *const c_char,
    value: *const c_void,
    bytes: usize,
    flags: c_int,
    follow: bool,
) -> isize {
    let number = if follow { libc::SYS_setxattr } else { libc::SYS_lsetxattr };
    let value: *const u8 = value.cast();
    // SAFETY: libc's contract.
    unsafe {
        route::on_path(
            HERE,
            path,
            follow,
            |_, path| system_call!(number, path, name, value, bytes, flags),
            |pool, place, escape| {
                if is_bad(name, value, bytes) {
                    return EFAULT;
                }
                pool.set_xattr(place, follow.into(), name, value, bytes, flags as u32, escape)
            },
        )
    }
}

unsafe fn list(path: *const c_char, names: *mut c_char, room: usize, follow: bool) -> isize {
    let number = if follow { libc::SYS_listxattr } else { libc::SYS_llistxattr };
    // SAFETY: libc's contract.
    unsafe {
        route::on_path(
            HERE,
            path,
            follow,
            |_, path| system_call!(number, path, names, room),
            |pool, place, escape| {
                if room > 0 && is_wild(names) {
                    return itself_or(pool, place, follow, escape, EFAULT);
                }
                pool.list_xattr(place, follow as i32, names.cast(), room, escape)
            },
        )
    }
}

unsafe fn remove(path: *const c_char, name: *const c_char, follow: bool) -> isize {
    let number = if follow { libc::SYS_removexattr } else { libc::SYS_lremovexattr };
    // SAFETY: libc's contract.
    unsafe {
        route::on_path(
            HERE,
            path,
            follow,
            |_, path| system_call!(number, path, name),
            |pool, place, escape| {
                if is_wild(name) {
                    return EFAULT;
                }
                pool.remove_xattr(place, follow as i32, name, escape)
            },
        )
    }
}

interpose! {
    /// getxattr(2)
    getxattr = fn(path: *const c_char, name: *const c_char, value: *mut c_void, room: usize) -> isize {
        // SAFETY: libc's contract.
        answer(unsafe { get(path, name, value, room, true) })
    }

    /// lgetxattr(2)
    lgetxattr = fn(path: *const c_char, name: *const c_char, value: *mut c_void, room: usize) -> isize {
        // SAFETY: libc's contract.
        answer(unsafe { get(path, name, value, room, false) })
    }

    /// fgetxattr(2)
    fgetxattr = fn(fd: c_int, name: *const c_char, value: *mut c_void, room: usize) -> isize {
        // SAFETY: libc's contract; the handle is attached.
        answer(unsafe {
            match descriptor::opened_inode_of(fd) {
                Some(_) if is_bad(name, value, room) => EFAULT as isize,
                Some((pool, ino)) => {
                    pool.get_xattr_open(fd, ino, name, value.cast(), room) as isize
                }
                None => system_call!(libc::SYS_fgetxattr, fd, name, value, room),
            }
        })
    }

    /// setxattr(2)
    setxattr = fn(
        path: *const c_char,
        name: *const c_char,
        value: *const c_void,
        bytes: usize,
        flags: c_int
    ) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { set(path, name, value, bytes, flags, true) })
    }

    /// lsetxattr(2)
    lsetxattr = fn(
        path: *const c_char,
        name: *const c_char,
        value: *const c_void,
        bytes: usize,
        flags: c_int
    ) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { set(path, name, value, bytes, flags, false) })
    }

    /// fsetxattr(2)
    fsetxattr = fn(
        fd: c_int,
        name: *const c_char,
        value: *const c_void,
        bytes: usize,
        flags: c_int
    ) -> c_int {
        // SAFETY: libc's contract; the handle is attached.
        answer_int(unsafe {
            match descriptor::opened_inode_of(fd) {
                Some(_) if is_bad(name, value, bytes) => EFAULT as isize,
                Some((pool, ino)) => {
                    pool.set_xattr_open(fd, ino, name, value.cast(), bytes, flags as u32) as isize
                }
                None => system_call!(libc::SYS_fsetxattr, fd, name, value, bytes, flags),
            }
        })
    }

    /// listxattr(2)
    listxattr = fn(path: *const c_char, names: *mut c_char, room: usize) -> isize {
        // SAFETY: libc's contract.
        answer(unsafe { list(path, names, room, true) })
    }

    /// llistxattr(2)
    llistxattr = fn(path: *const c_char, names: *mut c_char, room: usize) -> isize {
        // SAFETY: libc's contract.
        answer(unsafe { list(path, names, room, false) })
    }

    /// flistxattr(2)
    flistxattr = fn(fd: c_int, names: *mut c_char, room: usize) -> isize {
        // SAFETY: libc's contract; the handle is attached.
        answer(unsafe {
            match descriptor::opened_inode_of(fd) {
                Some(_) if room > 0 && is_wild(names) => EFAULT as isize,
                Some((pool, ino)) => {
                    pool.list_xattr_open(fd, ino, names.cast(), room) as isize
                }
                None => system_call!(libc::SYS_flistxattr, fd, names, room),
            }
        })
    }

    /// removexattr(2)
    removexattr = fn(path: *const c_char, name: *const c_char) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { remove(path, name, true) })
    }

    /// lremovexattr(2)
    lremovexattr = fn(path: *const c_char, name: *const c_char) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe { remove(path, name, false) })
    }

    /// fremovexattr(2)
    fremovexattr = fn(fd: c_int, name: *const c_char) -> c_int {
        // SAFETY: libc's contract; the handle is attached.
        answer_int(unsafe {
            match descriptor::opened_inode_of(fd) {
                Some(_) if is_wild(name) => EFAULT as isize,
                Some((pool, ino)) => pool.remove_xattr_open(fd, ino, name) as isize,
                None => system_call!(libc::SYS_fremovexattr, fd, name),
            }
        })
    }
}
