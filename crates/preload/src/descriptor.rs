//! Which descriptors are the pool's.
//!
//! A descriptor of ours is a file's backing file (of mode 0700), a directory's anchor (a directory that was removed, so that
//! it has no links), or a directory of the pool's mount; and a file of another node, opened by that mount, shows the pool's
//! device. The kernel's fstat shows that much, without a pool being attached;
//! only then is the door asked. So descriptors that came through fork, exec or a socket are found too.
//!
//! Calls relative to a directory's descriptor are many in programs that never touch the pool (find, rm -r), and they must
//! not pay for an fstat each. As long as the process has had no anchor, a descriptor's number is looked at once; from
//! the first anchor on each time.

use std::os::raw::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::door::{self, Pool};
use crate::real;

/// f_type of FUSE.
const FUSE: i64 = 0x6573_5546;
/// Set with the first directory of the pool that the process is seen to have open.
static DIRECTORIES: AtomicBool = AtomicBool::new(false);
/// Device of the pool's mount, once one of its directories was met, or a file was opened by it.
static MOUNT: AtomicU64 = AtomicU64::new(0);
/// Devices of directories that were met and are not the pool's mount.
static OTHERS: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];
/// Descriptors below 1024 that were looked at and were no directories of the pool, one bit each. Counts while there are none.
static CHECKED: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];

/// True when the kernel's stat of `fd` could be that of a backing file or a directory of the pool. A backing file made under
/// a strict umask has less than 0700; whoever made it is attached, and there a look costs little.
#[inline]
pub(crate) fn is_candidate(fd: c_int, stat: &libc::stat) -> bool {
    let permissions = stat.st_mode & 0o7777;
    if stat.st_mode & libc::S_IFMT == libc::S_IFDIR {
        return is_anchor(stat) || is_on_mount(Some(fd), stat.st_dev);
    }
    permissions == 0o700
        || (permissions & !0o700 == 0 && door::is_attached())
        || (stat.st_dev != 0 && stat.st_dev == MOUNT.load(Ordering::Relaxed))
}

/// True for what may be an anchor: a removed directory that is not one of the mount. `stat` is the kernel's.
#[inline]
fn is_anchor(stat: &libc::stat) -> bool {
    let is_removed = stat.st_nlink == 0 && stat.st_mode & libc::S_IFMT == libc::S_IFDIR;
    is_removed && stat.st_dev != MOUNT.load(Ordering::Relaxed)
}

/// True when a directory of this device may be one of the pool's mount, opened by the pool if it is a descriptor's; with none
/// it is the working directory.
#[inline]
pub(crate) fn is_on_mount(fd: Option<c_int>, device: u64) -> bool {
    if libc::major(device) != 0 || crate::settings::prefix_bytes() == 0 {
        return false;
    }
    // The mark is looked at first: nearly all descriptors have none, and then their file systems are not asked.
    fd.is_none_or(is_marked)
        && (MOUNT.load(Ordering::Relaxed) == device
            || !OTHERS.iter().any(|other| other.load(Ordering::Relaxed) == device) && is_on_fuse(fd, device))
}

/// True for a descriptor that the pool opened: one opened by the mount's own path is the kernel's.
fn is_marked(fd: c_int) -> bool {
    // SAFETY: it touches no memory.
    let flags = unsafe { system_call!(libc::SYS_fcntl, fd, libc::F_GETFL) };
    flags >= 0 && flags as c_int & crate::abi::MOUNTED_MARK != 0
}

/// Asks the kernel; a device of another kind is asked for once.
#[cold]
fn is_on_fuse(fd: Option<c_int>, device: u64) -> bool {
    let mut about = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: a C string, and a structure that is writable, and filled after success.
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
    if kind != FUSE {
        remember_other(device);
    }
    kind == FUSE
}

fn remember_other(device: u64) {
    OTHERS[device as usize % OTHERS.len()].store(device, Ordering::Relaxed);
}

/// A file of another node was opened by the pool's mount: from now on the door is asked about files of its device.
#[cold]
pub(crate) fn opened_by_mount(fd: c_int) {
    if let Some(stat) = kernel_stat(fd) {
        MOUNT.store(stat.st_dev, Ordering::Relaxed);
    }
}

/// What was asked about a directory of a device on which the mount may be.
pub(crate) fn learn_device(stat: &libc::stat, is_ours: bool) {
    if stat.st_nlink == 0 || stat.st_mode & libc::S_IFMT != libc::S_IFDIR {
    } else if is_ours {
        MOUNT.store(stat.st_dev, Ordering::Relaxed);
    } else if MOUNT.load(Ordering::Relaxed) != stat.st_dev {
        remember_other(stat.st_dev);
    }
}

/// False when calls relative to `fd` are certainly the kernel's.
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

/// Notes that the pool opened something that may be a directory.
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
    let is_directory = stat.st_mode & libc::S_IFMT == libc::S_IFDIR;
    if !is_candidate(fd, &stat) || (!is_directory && stat.st_nlink == 0) {
        return None;
    }
    ask(fd, &stat)
}

/// True for a regular file without a name, as what was opened with O_TMPFILE has none, and for one that another thread
/// may be giving its name right now.
pub(crate) fn may_be_unnamed(fd: c_int) -> bool {
    if crate::settings::prefix_bytes() == 0 {
        return false;
    }
    let Some(stat) = kernel_stat(fd).filter(|s| s.st_mode & libc::S_IFMT == libc::S_IFREG) else {
        return false;
    };
    let in_between = door::is_attached() && stat.st_nlink == 1 && stat.st_mode & 0o7777 == 0o700;
    stat.st_nlink == 0 || (in_between && ask(fd, &stat).is_none())
}

/// Turns the kernel's stat of `fd` into the pool's, if it is one of the pool's.
pub(crate) fn pool_stat(fd: c_int, stat: &mut libc::stat) -> bool {
    let Ok(pool) = door::pool() else { return false };
    // SAFETY: the handle is attached, the structure readable and writable.
    let found = unsafe { pool.fstat(fd, stat) };
    found == 1
}

/// The inode behind `fd`, of which the kernel gave `stat`.
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
    // SAFETY: a C string, and the structure is writable; after success the kernel has filled it.
    unsafe {
        let done = if MOUNT.load(Ordering::Relaxed) == 0 {
            real::fstat(fd, stat.as_mut_ptr())
        } else {
            // What matters here of a directory of the mount never changes: the mount's process is not asked.
            let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
            real::fstatat(fd, c"".as_ptr(), stat.as_mut_ptr(), flags)
        };
        (done == 0).then(|| stat.assume_init())
    }
}
