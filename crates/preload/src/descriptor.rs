//! Which descriptors belong to the pool.
//!
//! A descriptor of the pool is that of a file's backing file (of mode 0700), of a directory's or symbolic link's anchor
//! (which was removed and has no links), or of a directory of the pool's mount. A file of another node, opened by that mount,
//! has the device of the mount. The kernel's fstat shows this without an attached pool, and only a candidate is looked
//! up in the pool. So descriptors that came through fork, exec or a socket are found too.
//!
//! Programs that never use the pool make many calls relative to a directory's descriptor (find, rm -r), and must not
//! pay for an fstat each time. Until the process has an anchor, the number of a descriptor is examined once; afterwards
//! it is examined each time.

use std::os::raw::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::door::{self, Pool};
use crate::real;

/// Set when the process is first seen to have a directory of the pool open.
static DIRECTORIES: AtomicBool = AtomicBool::new(false);
/// Device of the pool's mount, after one of its directories was found, or a file was opened by it.
static MOUNT: AtomicU64 = AtomicU64::new(0);
/// Devices of directories that were examined and are not on the pool's mount.
static OTHERS: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];
/// Descriptors below 1024 that were examined and are no directories of the pool, one bit each. Used until
/// [`DIRECTORIES`] is set.
static CHECKED: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];

/// Permissions of a backing file. That a mover has copied it is noted in its sticky bit, which does not count here.
const BACKING_PERMISSIONS: libc::mode_t = 0o700;
const COUNTED: libc::mode_t = 0o7777 & !libc::S_ISVTX;

/// True when the kernel's stat of `fd` could be that of a backing file or a directory of the pool. A backing file that
/// was created under a strict umask has fewer permissions than 0700. The process that created it is attached, so there
/// the check is cheap.
#[inline]
pub(crate) fn is_candidate(fd: c_int, stat: &libc::stat) -> bool {
    let permissions = stat.st_mode & COUNTED;
    match stat.st_mode & libc::S_IFMT {
        libc::S_IFDIR => return is_anchor(stat) || is_on_mount(Some(fd), stat.st_dev),
        libc::S_IFLNK => return stat.st_nlink == 0,
        _ => {}
    }
    permissions == BACKING_PERMISSIONS
        || (permissions & !BACKING_PERMISSIONS == 0 && door::is_attached())
        || (stat.st_dev != 0 && stat.st_dev == MOUNT.load(Ordering::Relaxed))
}

/// True for a possible anchor: a removed directory that is not on the mount. `stat` is the kernel's.
#[inline]
fn is_anchor(stat: &libc::stat) -> bool {
    let is_removed = stat.st_nlink == 0 && stat.st_mode & libc::S_IFMT == libc::S_IFDIR;
    is_removed && stat.st_dev != MOUNT.load(Ordering::Relaxed)
}

/// True for a directory that the kernel knows as removed; AT_FDCWD is the working directory.
#[cold]
pub(crate) fn is_removed_directory(dirfd: c_int) -> bool {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: a C string and a writable structure, which the kernel has filled after success.
    unsafe {
        real::fstatat(dirfd, c"".as_ptr(), stat.as_mut_ptr(), libc::AT_EMPTY_PATH) == 0
            && is_anchor(&stat.assume_init())
    }
}

/// True when a directory of this device may be on the pool's mount. A descriptor must also be one that the pool opened.
/// Without a descriptor it is the working directory.
#[inline]
pub(crate) fn is_on_mount(fd: Option<c_int>, device: u64) -> bool {
    if libc::major(device) != 0 || crate::settings::prefix_bytes() == 0 {
        return false;
    }
    // The mark is checked first. Nearly all descriptors have none, and then their file systems need not be queried.
    fd.is_none_or(is_marked)
        && (MOUNT.load(Ordering::Relaxed) == device
            || !OTHERS.iter().any(|other| other.load(Ordering::Relaxed) == device) && is_on_fuse(fd, device))
}

/// True for a descriptor that the pool opened. The kernel serves one that was opened by the mount's own path.
fn is_marked(fd: c_int) -> bool {
    // SAFETY: it touches no memory.
    let flags = unsafe { system_call!(libc::SYS_fcntl, fd, libc::F_GETFL) };
    flags >= 0 && flags as c_int & crate::abi::MOUNTED_MARK != 0
}

/// Queries the kernel. A device of another kind of file system is queried once.
#[cold]
fn is_on_fuse(fd: Option<c_int>, device: u64) -> bool {
    let mut about = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: a C string, and a writable structure, which is filled after success.
    let kind = unsafe {
        let asked = match fd {
            None => system_call!(libc::SYS_statfs, c".".as_ptr(), about.as_mut_ptr()),
            Some(fd) => system_call!(libc::SYS_fstatfs, fd, about.as_mut_ptr()),
        };
        if asked != 0 {
            return false;
        }
        about.assume_init().f_type
    };
    if kind != libc::FUSE_SUPER_MAGIC {
        remember_other(device);
    }
    kind == libc::FUSE_SUPER_MAGIC
}

fn remember_other(device: u64) {
    OTHERS[device as usize % OTHERS.len()].store(device, Ordering::Relaxed);
}

/// Notes that the pool's mount opened a file of another node. From now on files of its device are looked up in the
/// pool.
#[cold]
pub(crate) fn opened_by_mount(fd: c_int) {
    if let Some(stat) = kernel_stat(fd) {
        MOUNT.store(stat.st_dev, Ordering::Relaxed);
    }
}

/// Keeps the result of a look-up for a directory whose device may be that of the mount.
pub(crate) fn learn_device(stat: &libc::stat, is_ours: bool) {
    if stat.st_nlink == 0 || stat.st_mode & libc::S_IFMT != libc::S_IFDIR {
    } else if is_ours {
        MOUNT.store(stat.st_dev, Ordering::Relaxed);
    } else if MOUNT.load(Ordering::Relaxed) != stat.st_dev {
        remember_other(stat.st_dev);
    }
}

/// False when the kernel certainly serves calls relative to `fd`.
#[inline(always)]
pub(crate) fn may_be_directory(fd: c_int) -> bool {
    if DIRECTORIES.load(Ordering::Relaxed) {
        return true;
    }
    match CHECKED.get(fd as usize / 64) {
        Some(word) => word.load(Ordering::Relaxed) & 1 << (fd as u32 % 64) == 0,
        None => true,
    }
}

/// Notes that the pool opened a descriptor that may be of a directory.
#[inline]
pub(crate) fn opened_directory() {
    DIRECTORIES.store(true, Ordering::Relaxed);
}

/// Notes that `fd` is no directory of the pool.
fn note_checked(fd: c_int) {
    if let Some(word) = CHECKED.get(fd as usize / 64) {
        word.fetch_or(1 << (fd as u32 % 64), Ordering::Relaxed);
    }
}

/// The pool's directory behind `fd`, if it is one.
pub(crate) fn directory_of(fd: c_int) -> Option<(Pool, u64)> {
    let stat = kernel_stat(fd)?;
    let may_be = stat.st_mode & libc::S_IFMT == libc::S_IFDIR && is_candidate(fd, &stat);
    if !may_be {
        note_checked(fd);
        return None;
    }
    let found = ask(fd, &stat)?;
    DIRECTORIES.store(true, Ordering::Relaxed);
    Some(found)
}

/// The pool's directory behind `fd`, if that is an anchor.
pub(crate) fn anchor_of(fd: c_int) -> Option<(Pool, u64)> {
    let stat = kernel_stat(fd)?;
    if !is_anchor(&stat) {
        if !is_candidate(fd, &stat) {
            note_checked(fd);
        }
        return None;
    }
    ask(fd, &stat)
}

/// The pool's inode behind `fd`, if it is one.
pub(crate) fn inode_of(fd: c_int) -> Option<(Pool, u64)> {
    if crate::settings::prefix_bytes() == 0 {
        return None;
    }
    let stat = kernel_stat(fd)?;
    if !is_candidate(fd, &stat) {
        return None;
    }
    ask(fd, &stat)
}

/// The pool's inode behind `fd`, if it is one and has a name.
pub(crate) fn named_inode_of(fd: c_int) -> Option<(Pool, u64)> {
    let stat = kernel_stat(fd)?;
    let may_be_anchor = matches!(stat.st_mode & libc::S_IFMT, libc::S_IFDIR | libc::S_IFLNK);
    if !is_candidate(fd, &stat) || (!may_be_anchor && stat.st_nlink == 0) {
        return None;
    }
    ask(fd, &stat)
}

/// The pool's inode behind `fd`, if it is one and `fd` is not an O_PATH descriptor: by that the kernel refuses all calls
/// that take a descriptor alone.
pub(crate) fn opened_inode_of(fd: c_int) -> Option<(Pool, u64)> {
    let found = inode_of(fd)?;
    // SAFETY: it touches no memory.
    let flags = unsafe { system_call!(libc::SYS_fcntl, fd, libc::F_GETFL) };
    (flags >= 0 && flags as c_int & libc::O_PATH == 0).then_some(found)
}

/// True for an open descriptor; the working directory counts as one.
pub(crate) fn is_open(fd: c_int) -> bool {
    // SAFETY: it touches no memory.
    fd == libc::AT_FDCWD || unsafe { system_call!(libc::SYS_fcntl, fd, libc::F_GETFD) } >= 0
}

/// True for a regular file without a name, such as one opened with O_TMPFILE, and for one that another thread may be
/// naming at this moment.
pub(crate) fn may_be_unnamed(fd: c_int) -> bool {
    if crate::settings::prefix_bytes() == 0 {
        return false;
    }
    let Some(stat) = kernel_stat(fd).filter(|s| s.st_mode & libc::S_IFMT == libc::S_IFREG) else {
        return false;
    };
    let in_between =
        door::is_attached() && stat.st_nlink == 1 && stat.st_mode & COUNTED == BACKING_PERMISSIONS;
    stat.st_nlink == 0 || (in_between && ask(fd, &stat).is_none())
}

/// Replaces the kernel's stat of `fd` by the pool's, if the pool has that inode.
pub(crate) fn pool_stat(fd: c_int, stat: &mut libc::stat) -> bool {
    let Ok(pool) = door::pool() else { return false };
    // SAFETY: the handle is attached, the structure readable and writable.
    let found = unsafe { pool.fstat(fd, stat) };
    found == 1
}

/// The inode behind `fd`, for which the kernel returned `stat`.
pub(crate) fn ask(fd: c_int, stat: &libc::stat) -> Option<(Pool, u64)> {
    let pool = door::pool().ok()?;
    let mut ino = 0;
    // SAFETY: the handle is attached, the structures are readable and writable.
    let found = unsafe { pool.inode_of(fd, stat, &mut ino) };
    learn_device(stat, found == 1);
    (found == 1).then_some((pool, ino))
}

fn kernel_stat(fd: c_int) -> Option<libc::stat> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: a C string and a writable structure, which the kernel has filled after success.
    unsafe {
        let done = if MOUNT.load(Ordering::Relaxed) == 0 {
            real::fstat(fd, stat.as_mut_ptr())
        } else {
            // The fields of a directory of the mount that are used here never change, so the mount's process need not
            // be queried.
            let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
            real::fstatat(fd, c"".as_ptr(), stat.as_mut_ptr(), flags)
        };
        (done == 0).then(|| stat.assume_init())
    }
}
