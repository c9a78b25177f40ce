//! What this process remembers of the files that it opened: the inode behind a kernel inode, and what a descriptor's
//! inode was when it was opened. Calls on descriptors read it without a lock.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_types::{Attr, Ino};

/// Remembered inodes; a power of two.
const MEMORY: usize = 1024;

/// Kernel inode of a pair that is being written.
const BUSY: u64 = u64::MAX;

/// Pairs (kernel inode, pool inode); kernel inode 0 is none.
static REMEMBERED: [[AtomicU64; 2]; MEMORY] = [const { [const { AtomicU64::new(0) }; 2] }; MEMORY];

/// The kernel's inode as the memory has it: with its device, as pools in one process number theirs alike. A tmpfs
/// counts its inodes up from one and its devices are small, so that no two meet.
pub(crate) fn key_of(kernel: &libc::stat) -> u64 {
    kernel.st_ino ^ kernel.st_dev.rotate_left(44)
}

pub(crate) fn cached_ino(kernel_ino: u64) -> Option<Ino> {
    let [key, value] = &REMEMBERED[kernel_ino as usize % MEMORY];
    if key.load(Ordering::Acquire) != kernel_ino {
        return None;
    }
    let ino = value.load(Ordering::Acquire);
    (key.load(Ordering::Acquire) == kernel_ino).then_some(Ino(ino))
}

pub(crate) fn remember(kernel: &libc::stat, ino: Ino) {
    let kernel_ino = key_of(kernel);
    let [key, value] = &REMEMBERED[kernel_ino as usize % MEMORY];
    let old = key.load(Ordering::Relaxed);
    // One writer at a time; the others forgo it.
    if old == BUSY || key.compare_exchange(old, BUSY, Ordering::Acquire, Ordering::Relaxed).is_err() {
        return;
    }
    value.store(ino.0, Ordering::Release);
    key.store(kernel_ino, Ordering::Release);
}

/// Forgets all: another pool's target begins its numbers anew.
pub(crate) fn forget_all() {
    for [key, _] in &REMEMBERED {
        key.store(0, Ordering::Release);
    }
}

/// Descriptors below this number are remembered with what they were opened as.
const DESCRIPTORS: usize = 1024;

/// What each descriptor was opened as: inode, and mode, owner and group. Only asked for inodes without a name, whose
/// attributes the shard no longer has; an entry that a close left behind is of another inode or as good.
static OPENED: [[AtomicU64; 3]; DESCRIPTORS] = [const { [const { AtomicU64::new(0) }; 3] }; DESCRIPTORS];

/// Remembers what a file was when it was opened.
pub(crate) fn remember_opened(attr: &Attr, fd: RawFd) {
    if let Some([ino, mode, owner]) = OPENED.get(fd as usize) {
        ino.store(0, Ordering::Relaxed);
        mode.store(u64::from(attr.mode), Ordering::Relaxed);
        owner.store(u64::from(attr.uid) << 32 | u64::from(attr.gid), Ordering::Relaxed);
        ino.store(attr.ino.0, Ordering::Release);
    }
}

/// Remembers what became of a file since it was opened.
#[cold]
pub(crate) fn reopened_as(ino: Ino, fd: RawFd, (mode, uid, gid): (u32, u32, u32)) {
    let known = OPENED.iter().filter(|[key, ..]| key.load(Ordering::Acquire) == ino.0);
    let unknown = known.clone().next().is_none();
    for [key, kept_mode, kept_owner] in known.chain(OPENED.get(fd as usize).filter(|_| unknown)) {
        key.store(0, Ordering::Relaxed);
        kept_mode.store(u64::from(mode), Ordering::Relaxed);
        kept_owner.store(u64::from(uid) << 32 | u64::from(gid), Ordering::Relaxed);
        key.store(ino.0, Ordering::Release);
    }
}

/// Mode, owner and group that an inode had when this process opened it.
#[cold]
pub(crate) fn opened_as(ino: Ino) -> Option<(u32, u32, u32)> {
    let [_, mode, owner] = OPENED.iter().find(|[key, ..]| key.load(Ordering::Acquire) == ino.0)?;
    let owner = owner.load(Ordering::Relaxed);
    Some((mode.load(Ordering::Relaxed) as u32, (owner >> 32) as u32, owner as u32))
}
