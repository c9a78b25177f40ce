//! The functions of include/forebay.h. Paths start at the pool's root; a path that leaves the pool is EXDEV.

use std::ffi::OsStr;
use std::os::raw::{c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use forebay_client::{Directory, Fail, PathBuffer, Place, Pool};
use forebay_types::{Code, Ino};

use crate::abi::PoolHandle;
use crate::door::time_sets;
use crate::guard::{bytes, guard, negative, on_pool, on_walk, room, text, FAULT};

type Handle = *const PoolHandle;

/// A directory being read: `forebay_dir`.
#[allow(non_camel_case_types)]
pub struct forebay_dir {
    pool: &'static Pool,
    directory: Directory,
}

/// `struct forebay_dirent`.
#[allow(non_camel_case_types)]
#[repr(C)]
pub struct forebay_dirent {
    ino: u64,
    cookie: u64,
    kind: u8,
    name: [u8; 256],
}

/// The place that a C path names: from the root, whether it starts with `/` or not.
///
/// # Safety
/// `path` is null or a C string.
unsafe fn at<'a>(path: *const c_char) -> Result<Place<'a>, Code> {
    // SAFETY: the caller's promise.
    let path = unsafe { text(path) }.map_err(|_| Code::Fault)?;
    if path.is_empty() {
        return Err(Code::NotFound);
    }
    let start = path.iter().position(|b| *b != b'/').unwrap_or(path.len());
    Ok(Place { dir: Ino::ROOT, path: &path[start..] })
}

/// Runs `body` on a path.
///
/// # Safety
/// `pool` is null or from forebay_attach, `path` null or a C string.
pub(crate) unsafe fn on_path(
    pool: Handle,
    path: *const c_char,
    body: impl FnOnce(&'static Pool, Place<'_>, &mut PathBuffer) -> Result<i64, Fail>,
) -> c_int {
    // SAFETY: the caller's promise.
    let answer = unsafe {
        on_walk(pool, std::ptr::null_mut(), |pool, escape| {
            let place = at(path).map_err(Fail::Code)?;
            body(pool, place, escape)
        })
    };
    answer as c_int
}

fn done(result: Result<(), Fail>) -> Result<i64, Fail> {
    result.map(|()| 0)
}

fn owner(id: u32) -> Option<u32> {
    (id != u32::MAX).then_some(id)
}

/// The outcome of a call that follows symbolic links unless `flags` is AT_SYMLINK_NOFOLLOW; other flags are EINVAL.
fn follow(flags: c_int) -> Result<bool, Fail> {
    match flags {
        0 => Ok(true),
        libc::AT_SYMLINK_NOFOLLOW => Ok(false),
        _ => Err(Fail::Code(Code::Invalid)),
    }
}

// SAFETY of the blocks below: forebay.h tells C callers what pools and paths must be, and that room and values must be as
// long as is said.

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_attach(dir: *const c_char, pool: *mut Handle) -> c_int {
    let answer = guard(|| {
        // SAFETY: see above.
        let out = unsafe { pool.as_mut() }.ok_or(FAULT)?;
        let dir = if dir.is_null() {
            std::env::var_os("FOREBAY_POOL").ok_or_else(|| {
                crate::text::remember(
                    "no pool is named: pass the pool's directory, or set FOREBAY_POOL (`forebay run` does)",
                );
                negative(Code::Invalid)
            })?
        } else {
            // SAFETY: see above; not null.
            OsStr::from_bytes(unsafe { text(dir) }?).to_owned()
        };
        match Pool::attach(Path::new(&dir)) {
            Ok(attached) => {
                *out = std::ptr::from_ref(attached).cast();
                Ok(0)
            }
            Err(error) => {
                crate::text::remember(&error.to_string());
                Err(negative(error.code))
            }
        }
    });
    answer as c_int
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_open(pool: Handle, path: *const c_char, flags: c_int, mode: u32) -> c_int {
    // SAFETY: see above.
    unsafe { on_path(pool, path, |pool, at, escape| pool.open(at, flags, mode, escape).map(i64::from)) }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_stat(pool: Handle, path: *const c_char, out: *mut libc::stat) -> c_int {
    // SAFETY: see above.
    unsafe { stat(pool, path, true, out) }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_lstat(pool: Handle, path: *const c_char, out: *mut libc::stat) -> c_int {
    // SAFETY: see above.
    unsafe { stat(pool, path, false, out) }
}

unsafe fn stat(pool: Handle, path: *const c_char, follow: bool, out: *mut libc::stat) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_path(pool, path, |pool, at, escape| {
            let out = out.as_mut().ok_or(Fail::Code(Code::Fault))?;
            *out = pool.stat(at, follow, escape)?;
            Ok(0)
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_fstat(pool: Handle, fd: c_int, out: *mut libc::stat) -> c_int {
    // SAFETY: see above.
    let answer = unsafe {
        on_pool(pool, |pool| {
            let out = out.as_mut().ok_or(FAULT)?;
            let mut kernel = std::mem::zeroed();
            if libc::fstat(fd, &mut kernel) != 0 {
                return Err(-i64::from(*libc::__errno_location()));
            }
            *out = pool.fstat(fd, &kernel).unwrap_or(kernel);
            Ok(0)
        })
    };
    answer as c_int
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_access(pool: Handle, path: *const c_char, amode: c_int) -> c_int {
    // SAFETY: see above.
    unsafe { on_path(pool, path, |pool, at, escape| done(pool.access(at, amode, false, true, escape))) }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_mkdir(pool: Handle, path: *const c_char, mode: u32) -> c_int {
    // SAFETY: see above.
    unsafe { on_path(pool, path, |pool, at, escape| done(pool.make_directory(at, mode, escape))) }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_rmdir(pool: Handle, path: *const c_char) -> c_int {
    // SAFETY: see above.
    unsafe { on_path(pool, path, |pool, at, escape| done(pool.remove_directory(at, escape))) }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_unlink(pool: Handle, path: *const c_char) -> c_int {
    // SAFETY: see above.
    unsafe { on_path(pool, path, |pool, at, escape| done(pool.unlink(at, escape))) }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_rename(
    pool: Handle,
    from: *const c_char,
    to: *const c_char,
    flags: u32,
) -> c_int {
    // SAFETY: see above.
    unsafe {
        on_path(pool, from, |pool, from, escape| {
            let to = at(to).map_err(Fail::Code)?;
            done(pool.rename(from, to, flags, escape))
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_link(pool: Handle, from: *const c_char, to: *const c_char) -> c_int {
    // SAFETY: see above.
    unsafe {
        on_path(pool, from, |pool, from, escape| {
            let to = at(to).map_err(Fail::Code)?;
            done(pool.link(from, to, false, escape))
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_symlink(pool: Handle, target: *const c_char, path: *const c_char) -> c_int {
    // SAFETY: see above.
    unsafe {
        on_path(pool, path, |pool, at, escape| {
            let target = text(target).map_err(|_| Fail::Code(Code::Fault))?;
            done(pool.symlink(target, at, escape))
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_readlink(
    pool: Handle,
    path: *const c_char,
    buffer: *mut c_char,
    buffer_room: usize,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_walk(pool, std::ptr::null_mut(), |pool, escape| {
            let place = at(path).map_err(Fail::Code)?;
            pool.read_link(place, room(buffer.cast(), buffer_room), escape).map(|n| n as i64)
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_chmod(pool: Handle, path: *const c_char, mode: u32) -> c_int {
    // SAFETY: see above.
    unsafe { on_path(pool, path, |pool, at, escape| done(pool.chmod(at, mode, true, escape))) }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_chown(
    pool: Handle,
    path: *const c_char,
    uid: u32,
    gid: u32,
    flags: c_int,
) -> c_int {
    // SAFETY: see above.
    unsafe {
        on_path(pool, path, |pool, at, escape| {
            done(pool.chown(at, owner(uid), owner(gid), follow(flags)?, escape))
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_utimens(
    pool: Handle,
    path: *const c_char,
    times: *const [libc::timespec; 2],
    flags: c_int,
) -> c_int {
    // SAFETY: see above.
    unsafe {
        on_path(pool, path, |pool, at, escape| {
            let [atime, mtime] = time_sets(times).map_err(|_| Fail::Code(Code::Invalid))?;
            done(pool.set_times(at, atime, mtime, follow(flags)?, escape))
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_truncate(pool: Handle, path: *const c_char, size: i64) -> c_int {
    // SAFETY: see above.
    unsafe {
        on_path(pool, path, |pool, at, escape| {
            let size = u64::try_from(size).map_err(|_| Fail::Code(Code::Invalid))?;
            done(pool.truncate(at, size, escape))
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_getxattr(
    pool: Handle,
    path: *const c_char,
    name: *const c_char,
    value: *mut std::os::raw::c_void,
    value_room: usize,
    flags: c_int,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_walk(pool, std::ptr::null_mut(), |pool, escape| {
            let place = at(path).map_err(Fail::Code)?;
            let name = text(name).map_err(|_| Fail::Code(Code::Fault))?;
            let value = room(value.cast(), value_room);
            pool.get_xattr(place, follow(flags)?, name, value, escape).map(|n| n as i64)
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_setxattr(
    pool: Handle,
    path: *const c_char,
    name: *const c_char,
    value: *const std::os::raw::c_void,
    value_bytes: usize,
    xattr_flags: c_int,
    flags: c_int,
) -> c_int {
    // SAFETY: see above.
    unsafe {
        on_path(pool, path, |pool, at, escape| {
            let name = text(name).map_err(|_| Fail::Code(Code::Fault))?;
            let value = bytes(value.cast(), value_bytes);
            done(pool.set_xattr(at, follow(flags)?, name, value, xattr_flags as u32, escape))
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_listxattr(
    pool: Handle,
    path: *const c_char,
    names: *mut c_char,
    names_room: usize,
    flags: c_int,
) -> i64 {
    // SAFETY: see above.
    unsafe {
        on_walk(pool, std::ptr::null_mut(), |pool, escape| {
            let place = at(path).map_err(Fail::Code)?;
            let names = room(names.cast(), names_room);
            pool.list_xattr(place, follow(flags)?, names, escape).map(|n| n as i64)
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_removexattr(
    pool: Handle,
    path: *const c_char,
    name: *const c_char,
    flags: c_int,
) -> c_int {
    // SAFETY: see above.
    unsafe {
        on_path(pool, path, |pool, at, escape| {
            let name = text(name).map_err(|_| Fail::Code(Code::Fault))?;
            done(pool.remove_xattr(at, follow(flags)?, name, escape))
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_statvfs(pool: Handle, out: *mut libc::statvfs) -> c_int {
    // SAFETY: see above.
    let answer = unsafe {
        on_pool(pool, |pool| {
            let out = out.as_mut().ok_or(FAULT)?;
            *out = pool.statvfs().map_err(negative)?;
            Ok(0)
        })
    };
    answer as c_int
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_opendir(
    pool: Handle,
    path: *const c_char,
    out: *mut *mut forebay_dir,
) -> c_int {
    // SAFETY: see above.
    unsafe {
        on_path(pool, path, |pool, at, escape| {
            let out = out.as_mut().ok_or(Fail::Code(Code::Fault))?;
            let entry = pool.resolve(at, true, escape)?;
            if !entry.attr.is_directory() {
                return Err(Fail::Code(Code::NotDirectory));
            }
            let itself = Place { dir: entry.attr.ino, path: b"" };
            pool.access(itself, libc::R_OK, true, true, escape)?;
            let directory = pool.read_directory(entry.attr.ino);
            *out = Box::into_raw(Box::new(forebay_dir { pool, directory }));
            Ok(0)
        })
    }
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_readdir(dir: *mut forebay_dir, out: *mut forebay_dirent) -> c_int {
    let answer = guard(|| {
        // SAFETY: see above; forebay.h says that one thread at a time uses a directory.
        let (dir, out) = unsafe { (dir.as_mut().ok_or(FAULT)?, out.as_mut().ok_or(FAULT)?) };
        let Some(entry) = dir.directory.next(dir.pool).map_err(negative)? else {
            return Ok(0);
        };
        let name_bytes = entry.name.len().min(out.name.len() - 1);
        out.name[..name_bytes].copy_from_slice(&entry.name[..name_bytes]);
        out.name[name_bytes] = 0;
        out.ino = entry.ino.0;
        out.cookie = entry.cookie;
        out.kind = entry.kind.dirent_type();
        Ok(1)
    });
    answer as c_int
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_seekdir(dir: *mut forebay_dir, cookie: u64) -> c_int {
    let answer = guard(|| {
        // SAFETY: see above.
        unsafe { dir.as_mut() }.ok_or(FAULT)?.directory.seek(cookie);
        Ok(0)
    });
    answer as c_int
}

/// See forebay.h.
///
/// # Safety
/// As forebay.h says.
#[no_mangle]
pub unsafe extern "C" fn forebay_closedir(dir: *mut forebay_dir) -> c_int {
    let answer = guard(|| {
        if dir.is_null() {
            return Err(FAULT);
        }
        // SAFETY: see above; it came from forebay_opendir and is not used again.
        drop(unsafe { Box::from_raw(dir) });
        Ok(0)
    });
    answer as c_int
}
