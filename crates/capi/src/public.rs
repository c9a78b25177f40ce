//! The functions of include/forebay.h on paths, descriptors and directories. Paths start at the pool's root. A path
//! that leaves the pool is EXDEV.

use std::ffi::OsStr;
use std::os::raw::c_int;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use forebay_client::{Directory, PathBuffer, Place, Pool};
use forebay_types::{Code, Ino, TimeSet, Timestamp};

use crate::answer::{Failed, FAULT, INVALID};
use crate::header::forebay_dirent;

/// A directory being read.
#[allow(non_camel_case_types)]
pub struct forebay_dir {
    pool: &'static Pool,
    directory: Directory,
}

/// A C string. None for a null pointer.
pub(crate) type Text<'a> = Option<&'a [u8]>;
type Done = Result<(), Failed>;

/// The place that a path names: from the root, with or without a `/` at its start.
pub(crate) fn at(path: Text<'_>) -> Result<Place<'_>, Failed> {
    let path = path.ok_or(FAULT)?;
    if path.is_empty() {
        return Err(Code::NotFound.into());
    }
    let start = path.iter().position(|b| *b != b'/').unwrap_or(path.len());
    Ok(Place { dir: Ino::ROOT, path: &path[start..] })
}

/// The owner or group to set. None for (uid_t)-1.
pub(crate) fn owner(id: u32) -> Option<u32> {
    (id != u32::MAX).then_some(id)
}

/// True if a call with these flags follows a symbolic link at the end of its path.
fn follows(flags: c_int) -> Result<bool, Failed> {
    match flags {
        0 => Ok(true),
        libc::AT_SYMLINK_NOFOLLOW => Ok(false),
        _ => Err(INVALID),
    }
}

/// Access and modification time as utimensat(2) takes them.
pub(crate) fn time_sets(times: Option<&[libc::timespec; 2]>) -> Result<[TimeSet; 2], Failed> {
    let Some(times) = times else {
        return Ok([TimeSet::Now; 2]);
    };
    let mut sets = [TimeSet::Omit; 2];
    for (set, time) in sets.iter_mut().zip(times) {
        *set = match time.tv_nsec {
            libc::UTIME_NOW => TimeSet::Now,
            libc::UTIME_OMIT => TimeSet::Omit,
            nsec @ 0..=999_999_999 => TimeSet::At(Timestamp { sec: time.tv_sec, nsec: nsec as u32 }),
            _ => return Err(INVALID),
        };
    }
    Ok(sets)
}

/// A buffer for the kernel's path, where a path leaves the pool. Calls of forebay.h do not use that path.
fn escape() -> PathBuffer {
    PathBuffer::new()
}

pub(crate) fn attach(dir: Text<'_>, out: Option<&mut *mut Pool>) -> Done {
    let out = out.ok_or(FAULT)?;
    let dir = match dir {
        Some(dir) => OsStr::from_bytes(dir).to_owned(),
        None => std::env::var_os("FOREBAY_POOL").ok_or_else(|| {
            crate::text::remember(
                "no pool is named: pass the pool's directory, or set FOREBAY_POOL (`forebay run` does)",
            );
            INVALID
        })?,
    };
    let attached = Pool::attach(Path::new(&dir)).map_err(|error| {
        crate::text::remember(&error.to_string());
        error.code
    })?;
    *out = std::ptr::from_ref(attached).cast_mut();
    Ok(())
}

pub(crate) fn open(pool: &Pool, path: Text<'_>, flags: c_int, mode: u32) -> Result<c_int, Failed> {
    Ok(pool.open(at(path)?, flags, mode, &mut escape())?)
}

pub(crate) fn stat(pool: &Pool, path: Text<'_>, out: Option<&mut libc::stat>) -> Done {
    stat_following(pool, path, true, out)
}

pub(crate) fn lstat(pool: &Pool, path: Text<'_>, out: Option<&mut libc::stat>) -> Done {
    stat_following(pool, path, false, out)
}

fn stat_following(pool: &Pool, path: Text<'_>, follow: bool, out: Option<&mut libc::stat>) -> Done {
    let place = at(path)?;
    *out.ok_or(FAULT)? = pool.stat(place, follow, &mut escape())?;
    Ok(())
}

pub(crate) fn fstat(pool: &Pool, fd: c_int, out: Option<&mut libc::stat>) -> Done {
    let out = out.ok_or(FAULT)?;
    let mut kernel = std::mem::MaybeUninit::uninit();
    // SAFETY: the structure is writable.
    if unsafe { libc::fstat(fd, kernel.as_mut_ptr()) } != 0 {
        return Err(Failed::last());
    }
    // SAFETY: the kernel has filled it.
    let kernel = unsafe { kernel.assume_init() };
    *out = pool.fstat(fd, &kernel).unwrap_or(kernel);
    Ok(())
}

pub(crate) fn access(pool: &Pool, path: Text<'_>, mode: c_int) -> Done {
    Ok(pool.access(at(path)?, mode, false, true, &mut escape())?)
}

pub(crate) fn mkdir(pool: &Pool, path: Text<'_>, mode: u32) -> Done {
    Ok(pool.make_directory(at(path)?, mode, &mut escape())?)
}

pub(crate) fn rmdir(pool: &Pool, path: Text<'_>) -> Done {
    Ok(pool.remove_directory(at(path)?, &mut escape())?)
}

pub(crate) fn unlink(pool: &Pool, path: Text<'_>) -> Done {
    Ok(pool.unlink(at(path)?, &mut escape())?)
}

pub(crate) fn rename(pool: &Pool, from: Text<'_>, to: Text<'_>, flags: u32) -> Done {
    Ok(pool.rename(at(from)?, at(to)?, flags, &mut escape())?)
}

pub(crate) fn link(pool: &Pool, from: Text<'_>, to: Text<'_>) -> Done {
    Ok(pool.link(at(from)?, at(to)?, false, &mut escape())?)
}

pub(crate) fn symlink(pool: &Pool, target: Text<'_>, path: Text<'_>) -> Done {
    let place = at(path)?;
    Ok(pool.symlink(target.ok_or(FAULT)?, place, &mut escape())?)
}

pub(crate) fn readlink(pool: &Pool, path: Text<'_>, buffer: &mut [u8]) -> Result<usize, Failed> {
    Ok(pool.read_link(at(path)?, buffer, &mut escape())?)
}

pub(crate) fn chmod(pool: &Pool, path: Text<'_>, mode: u32) -> Done {
    Ok(pool.chmod(at(path)?, mode, true, &mut escape())?)
}

pub(crate) fn chown(pool: &Pool, path: Text<'_>, uid: u32, gid: u32, flags: c_int) -> Done {
    let place = at(path)?;
    Ok(pool.chown(place, owner(uid), owner(gid), follows(flags)?, &mut escape())?)
}

pub(crate) fn utimens(
    pool: &Pool,
    path: Text<'_>,
    times: Option<&[libc::timespec; 2]>,
    flags: c_int,
) -> Done {
    let place = at(path)?;
    let [atime, mtime] = time_sets(times)?;
    Ok(pool.set_times(place, atime, mtime, follows(flags)?, &mut escape())?)
}

pub(crate) fn truncate(pool: &Pool, path: Text<'_>, size: i64) -> Done {
    let place = at(path)?;
    let size = u64::try_from(size).map_err(|_| INVALID)?;
    Ok(pool.truncate(place, size, &mut escape())?)
}

pub(crate) fn getxattr(
    pool: &Pool,
    path: Text<'_>,
    name: Text<'_>,
    value: &mut [u8],
    flags: c_int,
) -> Result<usize, Failed> {
    let (place, name) = (at(path)?, name.ok_or(FAULT)?);
    Ok(pool.get_xattr(place, follows(flags)?, name, value, &mut escape())?)
}

pub(crate) fn setxattr(
    pool: &Pool,
    path: Text<'_>,
    name: Text<'_>,
    value: &[u8],
    xattr_flags: c_int,
    flags: c_int,
) -> Done {
    let (place, name) = (at(path)?, name.ok_or(FAULT)?);
    Ok(pool.set_xattr(place, follows(flags)?, name, value, xattr_flags as u32, &mut escape())?)
}

pub(crate) fn listxattr(
    pool: &Pool,
    path: Text<'_>,
    names: &mut [u8],
    flags: c_int,
) -> Result<usize, Failed> {
    let place = at(path)?;
    Ok(pool.list_xattr(place, follows(flags)?, names, &mut escape())?)
}

pub(crate) fn removexattr(pool: &Pool, path: Text<'_>, name: Text<'_>, flags: c_int) -> Done {
    let (place, name) = (at(path)?, name.ok_or(FAULT)?);
    Ok(pool.remove_xattr(place, follows(flags)?, name, &mut escape())?)
}

pub(crate) fn statvfs(pool: &Pool, out: Option<&mut libc::statvfs>) -> Done {
    *out.ok_or(FAULT)? = pool.statvfs()?;
    Ok(())
}

pub(crate) fn opendir(pool: &'static Pool, path: Text<'_>, out: Option<&mut *mut forebay_dir>) -> Done {
    let place = at(path)?;
    let out = out.ok_or(FAULT)?;
    let entry = pool.resolve(place, true, &mut escape())?;
    if !entry.attr.is_directory() {
        return Err(Code::NotDirectory.into());
    }
    let itself = Place { dir: entry.attr.ino, path: b"" };
    pool.access(itself, libc::R_OK, true, true, &mut escape())?;
    let directory = pool.read_directory(entry.attr.ino);
    *out = Box::into_raw(Box::new(forebay_dir { pool, directory }));
    Ok(())
}

/// Copies a name and a NUL. Returns the name's length.
pub(crate) fn store_name(name: &[u8], out: &mut [u8; 256]) -> usize {
    let bytes = name.len().min(out.len() - 1);
    out[..bytes].copy_from_slice(&name[..bytes]);
    out[bytes] = 0;
    bytes
}

/// # Safety
/// `dir` is null or an open directory that no other thread uses.
pub(crate) unsafe fn readdir(
    dir: *mut forebay_dir,
    out: Option<&mut forebay_dirent>,
) -> Result<bool, Failed> {
    // SAFETY: the caller's promise.
    let dir = unsafe { dir.as_mut() }.ok_or(FAULT)?;
    let out = out.ok_or(FAULT)?;
    let Some(entry) = dir.directory.next(dir.pool)? else {
        return Ok(false);
    };
    store_name(entry.name, &mut out.name);
    out.ino = entry.ino.0;
    out.cookie = entry.cookie;
    out.kind = entry.kind.dirent_type();
    Ok(true)
}

/// # Safety
/// `dir` is null or an open directory that no other thread uses.
pub(crate) unsafe fn seekdir(dir: *mut forebay_dir, cookie: u64) -> Done {
    // SAFETY: the caller's promise.
    unsafe { dir.as_mut() }.ok_or(FAULT)?.directory.seek(cookie);
    Ok(())
}

/// # Safety
/// `dir` is null or an open directory, which is not used again.
pub(crate) unsafe fn closedir(dir: *mut forebay_dir) -> Done {
    // SAFETY: the caller's promise.
    unsafe { free_handle(dir) }
}

/// Frees a handle that a call returned by `Box::into_raw`.
///
/// # Safety
/// `made` is null or such a pointer, which is not used again.
pub(crate) unsafe fn free_handle<T>(made: *mut T) -> Done {
    if made.is_null() {
        return Err(FAULT);
    }
    // SAFETY: the caller's promise.
    drop(unsafe { Box::from_raw(made) });
    Ok(())
}
