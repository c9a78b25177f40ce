//! What this process remembers of files that it opened: the pool's inode for a kernel inode, and a descriptor's
//! attributes at the time of the open. Calls on descriptors read it without a lock.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use forebay_types::{Attr, Ino, FLAG_CLOSE_WAITS};

/// Number of remembered inodes; a power of two.
const MEMORY: usize = 1024;

/// Marks a pair that is being written.
const BUSY: u64 = u64::MAX;

/// Pairs (kernel inode, pool inode); kernel inode 0 marks an empty pair.
static REMEMBERED: [[AtomicU64; 2]; MEMORY] = [const { [const { AtomicU64::new(0) }; 2] }; MEMORY];

/// Set with the first open of a file whose close waits for its store.
static CLOSE_WAITS: AtomicBool = AtomicBool::new(false);

/// True if this process has opened a file whose close waits for its store.
#[inline]
pub fn close_waits() -> bool {
    CLOSE_WAITS.load(Ordering::Relaxed)
}

/// The key of a kernel inode. It includes the device, because the pools of one process may use the same inode numbers.
/// A tmpfs numbers its inodes from one and device numbers are small, so keys do not collide.
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
    // One writer at a time; the others skip the update.
    if old == BUSY || key.compare_exchange(old, BUSY, Ordering::Acquire, Ordering::Relaxed).is_err() {
        return;
    }
    value.store(ino.0, Ordering::Release);
    key.store(kernel_ino, Ordering::Release);
}

/// Forgets all: another pool's target may use the same inode numbers.
pub(crate) fn forget_all() {
    for [key, _] in &REMEMBERED {
        key.store(0, Ordering::Release);
    }
}

/// Descriptors below this number are remembered.
const DESCRIPTORS: usize = 1024;

/// The inode of each descriptor, and the inode's mode, owner and group when this process opened it or last changed them.
/// Used only for inodes without names,
/// whose attributes the shard no longer has. An entry that a close left is harmless: it is for another inode, or still
/// correct.
static OPENED: [[AtomicU64; 3]; DESCRIPTORS] = [const { [const { AtomicU64::new(0) }; 3] }; DESCRIPTORS];

/// No descriptor from this number on was remembered.
static OPENED_END: AtomicUsize = AtomicUsize::new(0);

/// Remembers an inode's attributes at its open.
pub(crate) fn remember_opened(attr: &Attr, fd: RawFd) {
    if attr.flags & FLAG_CLOSE_WAITS != 0 {
        CLOSE_WAITS.store(true, Ordering::Relaxed);
    }
    if let Some([ino, mode, owner]) = OPENED.get(fd as usize) {
        ino.store(0, Ordering::Relaxed);
        mode.store(u64::from(attr.mode), Ordering::Relaxed);
        owner.store(u64::from(attr.uid) << 32 | u64::from(attr.gid), Ordering::Relaxed);
        ino.store(attr.ino.0, Ordering::Release);
        if OPENED_END.load(Ordering::Relaxed) <= fd as usize {
            OPENED_END.fetch_max(fd as usize + 1, Ordering::Relaxed);
        }
    }
}

/// Remembers the attributes of an inode that this process has changed, if it has opened it.
pub(crate) fn remember_changed(attr: &Attr) {
    let end = OPENED_END.load(Ordering::Relaxed);
    for (fd, [ino, ..]) in OPENED[..end].iter().enumerate() {
        if ino.load(Ordering::Acquire) == attr.ino.0 {
            remember_opened(attr, fd as RawFd);
        }
    }
}

/// Remembers changed attributes of an open inode.
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

/// Mode, owner and group of an inode when this process opened it or last changed them.
#[cold]
pub(crate) fn opened_as(ino: Ino) -> Option<(u32, u32, u32)> {
    let [_, mode, owner] = OPENED.iter().find(|[key, ..]| key.load(Ordering::Acquire) == ino.0)?;
    let owner = owner.load(Ordering::Relaxed);
    Some((mode.load(Ordering::Relaxed) as u32, (owner >> 32) as u32, owner as u32))
}
