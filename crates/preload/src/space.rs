//! statfs and statvfs: the space of the pool, for every path in it.

use std::os::raw::{c_char, c_int};

use libc::{statfs as StatFs, statvfs as StatVfs};

use crate::abi::Place;
use crate::door::Pool;
use crate::interpose::{answer_int, raw};
use crate::open::open_any;
use crate::stdio::libc_would_miss;
use crate::{descriptor, real, route};

/// Walks to `place`: 0 when it exists.
unsafe fn exists(pool: Pool, place: Place, escape: *mut u8) -> i64 {
    let mut ino = 0;
    // SAFETY: the caller keeps the contract of abi.rs.
    unsafe { pool.resolve(place, 1, &mut ino, escape) }.min(0)
}

interpose! {
    /// pathconf(3)
    pathconf = fn(path: *const c_char, name: c_int) -> libc::c_long {
        // SAFETY: libc's contract.
        unsafe {
            if !libc_would_miss(libc::AT_FDCWD, path, false, true) {
                return real::libc_own::pathconf(path, name);
            }
            let fd = answer_int(open_any(libc::AT_FDCWD, path, libc::O_PATH | libc::O_CLOEXEC, 0));
            if fd < 0 {
                return -1;
            }
            let value = libc::fpathconf(fd, name);
            real::close(fd);
            value
        }
    }

    /// ftok(3)
    ftok = fn(path: *const c_char, id: c_int) -> libc::key_t {
        // SAFETY: libc's contract; all zeros is a valid stat.
        unsafe {
            if !libc_would_miss(libc::AT_FDCWD, path, false, true) {
                return real::libc_own::ftok(path, id);
            }
            let mut stat: libc::stat = std::mem::zeroed();
            if crate::stat::stat(path, &mut stat) != 0 {
                return -1;
            }
            let low = |value: u64, mask: u64| (value & mask) as libc::key_t;
            low(stat.st_ino, 0xffff) | low(stat.st_dev, 0xff) << 16 | (id & 0xff) << 24
        }
    }

    /// statfs(2)
    statfs, statfs64, __statfs = fn(path: *const c_char, out: *mut StatFs) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe {
            route::on_path(
                libc::AT_FDCWD,
                path,
                true,
                |_, path| system_call!(libc::SYS_statfs, path, out),
                |pool, place, escape| match exists(pool, place, escape) {
                    0 if crate::path::is_wild(out) => -i64::from(libc::EFAULT),
                    0 => pool.statfs(out),
                    failed => failed,
                },
            )
        })
    }

    /// fstatfs(2)
    fstatfs, fstatfs64 = fn(fd: c_int, out: *mut StatFs) -> c_int {
        // SAFETY: libc's contract; the handle is attached.
        answer_int(unsafe {
            match descriptor::inode_of(fd) {
                Some(_) if crate::path::is_wild(out) => -(libc::EFAULT as isize),
                Some((pool, _)) => pool.statfs(out) as isize,
                None => system_call!(libc::SYS_fstatfs, fd, out),
            }
        })
    }

    /// statvfs(3)
    statvfs, statvfs64 = fn(path: *const c_char, out: *mut StatVfs) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe {
            route::on_path(
                libc::AT_FDCWD,
                path,
                true,
                |_, path| raw(real::libc_own::statvfs(path, out)),
                |pool, place, escape| match exists(pool, place, escape) {
                    0 => pool.statvfs(out),
                    failed => failed,
                },
            )
        })
    }

    /// fstatvfs(3)
    fstatvfs, fstatvfs64 = fn(fd: c_int, out: *mut StatVfs) -> c_int {
        // SAFETY: libc's contract; the handle is attached.
        answer_int(unsafe {
            match descriptor::inode_of(fd) {
                Some((pool, _)) => pool.statvfs(out) as isize,
                None => raw(real::libc_own::fstatvfs(fd, out)),
            }
        })
    }
}
