//! Calls that change the working directory or report it.

use std::os::raw::{c_char, c_int};

use crate::abi::Place;
use crate::cwd::{self, keep, KERNEL};
use crate::door::{either, Pool};
use crate::fortified::overflow;
use crate::interpose::answer_int;
use crate::path::Buffer;
use crate::{descriptor, real, route, settings};

/// Changes to the directory at `place`.
///
/// # Safety
/// `escape` has room for a path.
unsafe fn enter(pool: Pool, place: Place, escape: *mut u8) -> Result<i64, i64> {
    // SAFETY: the contract of abi.rs is kept: the place is valid, the buffers are writable.
    unsafe {
        let (itself, kind) = pool.reach(place, true, escape)?;
        if kind != libc::S_IFDIR {
            return Err(-i64::from(libc::ENOTDIR));
        }
        pool.allows(itself, libc::X_OK, escape)?;
        let fd = pool.open_to_enter(itself.dir);
        if fd < 0 {
            return Err(fd);
        }
        let entered = system_call!(libc::SYS_fchdir, fd);
        real::close(fd as c_int);
        if entered == 0 {
            keep(itself.dir);
        }
        Ok(entered as i64)
    }
}

/// getcwd(3) where the working directory is in the pool.
///
/// # Safety
/// `buffer` is null or has `room` bytes.
unsafe fn pool_getcwd(buffer: *mut c_char, room: usize) -> Option<*mut c_char> {
    let mut path = Buffer::new();
    let bytes = cwd::path(&mut path)?;
    let errno = match usize::try_from(bytes).map_err(|_| -bytes as i32) {
        Err(errno) => errno,
        Ok(_) if !buffer.is_null() && room == 0 => libc::EINVAL,
        Ok(bytes) if room != 0 && bytes + 1 > room => libc::ERANGE,
        Ok(bytes) => {
            let out = if buffer.is_null() {
                // SAFETY: malloc takes any size.
                unsafe { libc::malloc(room.max(bytes + 1)) }.cast::<c_char>()
            } else {
                buffer
            };
            if !out.is_null() {
                // SAFETY: there is room for the path and its NUL.
                unsafe { out.copy_from_nonoverlapping(path.as_c(), bytes + 1) };
                return Some(out);
            }
            libc::ENOMEM
        }
    };
    crate::interpose::set_errno(errno);
    Some(std::ptr::null_mut())
}

interpose! {
    /// chdir(2)
    chdir = fn(path: *const c_char) -> c_int {
        // SAFETY: libc's contract.
        answer_int(unsafe {
            route::on_path(libc::AT_FDCWD, path, true, |_, path| {
                let result = system_call!(libc::SYS_chdir, path);
                if result == 0 && settings::prefix_bytes() != 0 {
                    keep(KERNEL);
                }
                result
            }, |pool, place, escape| either(enter(pool, place, escape)))
        })
    }

    /// fchdir(2)
    fchdir = fn(fd: c_int) -> c_int {
        let inside = if settings::prefix_bytes() != 0 && descriptor::may_be_directory(fd) {
            descriptor::directory_of(fd)
        } else {
            None
        };
        // SAFETY: it touches no memory.
        let result = unsafe { system_call!(libc::SYS_fchdir, fd) };
        if result == 0 && settings::prefix_bytes() != 0 {
            keep(inside.map_or(KERNEL, |(_, ino)| ino));
        }
        answer_int(result)
    }

    /// getcwd(3)
    getcwd = fn(buffer: *mut c_char, room: usize) -> *mut c_char {
        // SAFETY: libc's contract.
        unsafe { pool_getcwd(buffer, room).unwrap_or_else(|| real::libc_own::getcwd(buffer, room)) }
    }

    /// getcwd(3), fortified
    __getcwd_chk = fn(buffer: *mut c_char, room: usize, known: usize) -> *mut c_char {
        if room > known {
            overflow();
        }
        // SAFETY: libc's contract.
        unsafe { getcwd(buffer, room) }
    }

    /// getwd(3)
    getwd = fn(buffer: *mut c_char) -> *mut c_char {
        // SAFETY: libc's contract: there is room for PATH_MAX bytes.
        unsafe { getcwd(buffer, libc::PATH_MAX as usize) }
    }

    /// getwd(3), fortified
    __getwd_chk = fn(buffer: *mut c_char, known: usize) -> *mut c_char {
        // SAFETY: libc's contract.
        unsafe { getcwd(buffer, known.min(libc::PATH_MAX as usize)) }
    }

    /// get_current_dir_name(3)
    get_current_dir_name = fn() -> *mut c_char {
        // SAFETY: C strings and writable structures. The result is memory of malloc, as libc's is.
        unsafe {
            let named = libc::getenv(c"PWD".as_ptr());
            if !named.is_null() && *named == b'/' as c_char {
                let mut there = std::mem::MaybeUninit::<libc::stat>::uninit();
                let mut here = std::mem::MaybeUninit::<libc::stat>::uninit();
                if crate::stat::stat(named, there.as_mut_ptr()) == 0
                    && crate::stat::stat(c".".as_ptr(), here.as_mut_ptr()) == 0
                {
                    let (there, here) = (there.assume_init(), here.assume_init());
                    if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino) {
                        return libc::strdup(named);
                    }
                }
            }
            getcwd(std::ptr::null_mut(), 0)
        }
    }
}
