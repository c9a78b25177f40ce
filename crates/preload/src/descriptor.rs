//! Which descriptors are the pool's.
//!
//! A descriptor of ours is a file's backing file (of mode 0700) or a directory's anchor (a directory that
//! was removed, so that it has no links). The kernel's fstat shows that much, without a pool being attached; only then
//! is the door asked. So descriptors that came through fork, exec or a socket are found too.
//!
//! Calls relative to a directory's descriptor are many in programs that never touch the pool (find, rm -r), and they must
//! not pay for an fstat each. As long as the process has had no anchor, a descriptor's number is looked at once; from
//! the first anchor on each time.

use std::os::raw::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::door::{self, Pool};
use crate::{interpose::guard, real};

/// Set with the first anchor that the process is seen to have.
static ANCHORS: AtomicBool = AtomicBool::new(false);
/// Descriptors below 1024 that were looked at and were no anchors, one bit each. Counts while there are no anchors.
static CHECKED: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];

/// True when the kernel's stat could be that of a backing file or an anchor. A backing file made under a strict umask has
/// less than 0700; whoever made it is attached, and there a look costs little.
#[inline]
pub(crate) fn is_candidate(mode: u32, links: libc::nlink_t) -> bool {
    let permissions = mode & 0o7777;
    if mode & libc::S_IFMT == libc::S_IFDIR {
        return links == 0;
    }
    permissions == 0o700 || (permissions & !0o700 == 0 && door::is_attached())
}

#[inline]
fn is_anchor(mode: u32, links: libc::nlink_t) -> bool {
    links == 0 && mode & libc::S_IFMT == libc::S_IFDIR
}

/// False when calls relative to `fd` are certainly the kernel's.
#[inline(always)]
pub(crate) fn may_be_anchor(fd: c_int) -> bool {
    if ANCHORS.load(Ordering::Relaxed) {
        return true;
    }
    match CHECKED.get(fd as usize / 64) {
        Some(word) => word.load(Ordering::Relaxed) & 1 << (fd as u32 % 64) == 0,
        None => true,
    }
}

/// Notes that the pool opened something that may be a directory.
#[inline]
pub(crate) fn opened_anchor() {
    ANCHORS.store(true, Ordering::Relaxed);
}

/// The pool's directory behind `fd`, if it is one.
pub(crate) fn directory_of(fd: c_int) -> Option<(Pool, u64)> {
    let stat = kernel_stat(fd)?;
    if !is_anchor(stat.st_mode, stat.st_nlink) {
        if let Some(word) = CHECKED.get(fd as usize / 64) {
            word.fetch_or(1 << (fd as u32 % 64), Ordering::Relaxed);
        }
        return None;
    }
    let found = ask(fd, &stat)?;
    ANCHORS.store(true, Ordering::Relaxed);
    Some(found)
}

/// The pool's inode behind `fd`, if it is one.
pub(crate) fn inode_of(fd: c_int) -> Option<(Pool, u64)> {
    if crate::settings::prefix_bytes() == 0 {
        return None;
    }
    let stat = kernel_stat(fd)?;
    if !is_candidate(stat.st_mode, stat.st_nlink) {
        return None;
    }
    ask(fd, &stat)
}

/// The pool's inode behind `fd`, if it is one and has a name.
pub(crate) fn named_inode_of(fd: c_int) -> Option<(Pool, u64)> {
    let stat = kernel_stat(fd)?;
    let is_directory = stat.st_mode & libc::S_IFMT == libc::S_IFDIR;
    if !is_candidate(stat.st_mode, stat.st_nlink) || (!is_directory && stat.st_nlink == 0) {
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
    guard(|| unsafe { (pool.door.fstat)(pool.handle, fd, stat) } as isize) == 1
}

/// The inode behind `fd`, of which the kernel gave `stat`.
pub(crate) fn ask(fd: c_int, stat: &libc::stat) -> Option<(Pool, u64)> {
    let pool = door::pool().ok()?;
    let mut ino = 0;
    // SAFETY: the handle is attached, the structures are readable and writable.
    let found = guard(|| unsafe { (pool.door.inode_of)(pool.handle, fd, stat, &mut ino) } as isize);
    (found == 1).then_some((pool, ino))
}

fn kernel_stat(fd: c_int) -> Option<libc::stat> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the structure is writable; after success the kernel has filled it.
    unsafe { (real::fstat(fd, stat.as_mut_ptr()) == 0).then(|| stat.assume_init()) }
}
