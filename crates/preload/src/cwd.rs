//! The working directory: in the kernel's tree, or a directory of the pool.
//!
//! In the pool it is an anchor, or a directory of the pool's mount. To the kernel an anchor is a removed directory, so
//! the kernel's own relative look-ups all fail there. Look-ups in the pool start from the directory's inode. The inode
//! is determined at the first relative path and kept; chdir and fchdir set it. A child that runs in the memory of its
//! parent keeps nothing, as its working directory is its own.

use std::os::raw::{c_char, c_int};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::Place;
use crate::door::{either, Pool};
use crate::interpose::answer_int;
use crate::path::Buffer;
use crate::{descriptor, door, process, real, route, settings};

/// [`STATE`] before the working directory is known.
const UNKNOWN: u64 = 0;
/// [`STATE`] of a directory in the kernel's tree. Inode numbers are greater.
const KERNEL: u64 = 1;

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

fn keep(state: u64) {
    if process::borrows_memory() {
        STATE.store(UNKNOWN, Ordering::Relaxed);
    } else {
        STATE.store(state, Ordering::Relaxed);
    }
}

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

/// True when `path` is the working directory itself, and that was removed from the pool. Then only the kernel can open
/// it again, as an empty directory.
///
/// # Safety
/// `path` is null or a C string.
pub(crate) unsafe fn is_removed(dirfd: c_int, path: *const c_char) -> bool {
    // SAFETY: the caller's promise. The second byte is read only if the first is not the NUL.
    let is_here = !crate::path::is_wild(path) && unsafe { *path as u8 == b'.' && *path.add(1) == 0 };
    if dirfd != libc::AT_FDCWD || !is_here || STATE.load(Ordering::Relaxed) == KERNEL {
        return false;
    }
    let Some((pool, ino)) = directory() else { return false };
    let mut seen = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the handle is attached, the structure writable.
    let found = unsafe { pool.stat_inode(ino, seen.as_mut_ptr()) };
    found == -i64::from(libc::ENOENT)
}

/// getcwd(3) where the working directory is in the pool.
///
/// # Safety
/// `buffer` is null or has `room` bytes.
unsafe fn pool_getcwd(buffer: *mut c_char, room: usize) -> Option<*mut c_char> {
    let mut path = Buffer::new();
    let bytes = self::path(&mut path)?;
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

/// A fortified call ends the program, as libc's does, when the caller's buffer is smaller than the size that was
/// passed.
#[cold]
pub(crate) fn overflow() -> ! {
    settings::complain(&[b"*** buffer overflow detected ***: terminated\n"]);
    // SAFETY: it does not return.
    unsafe { libc::abort() }
}
