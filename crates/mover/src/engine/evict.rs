//! Releases clean files: their data leave the pool, their attributes stay.
//!
//! A file is released under write leases on its backing files, so that no program has it open. The shard publishes that
//! it is released before its backing files are unlinked; a program whose open waited for the lease reads the attributes
//! again, and has the file restored. A backing file is never truncated.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;

use forebay_client::{Kept, LeaseKind};
use forebay_data::BackingName;
use forebay_types::limits::HIGH_WATER_PERCENT;
use forebay_types::{Code, Entry, Error, Ino, Result, FLAG_ATTACHED, FLAG_DIRTY, FLAG_DRAINING, FLAG_PINNED};
use rustix::fs::{fstatvfs, statat, AtFlags, Dir, Mode, OFlags};

use super::hold::Held;
use super::link::Link;
use super::peers::Peers;
use super::stores::Stores;

/// Files are released from this percentage on: before programs that are about to write have to wait
/// ([`HIGH_WATER_PERCENT`]).
const EVICT_PERCENT: u64 = 80;
/// Files are released down to this percentage.
const LOW_WATER_PERCENT: u64 = 65;
/// After so many bytes were released the free space is looked at.
const LOOK_BYTES: u64 = 4 << 20;

/// Releases a file. Returns the bytes that this freed.
pub(super) fn release(link: &Link, peers: &Peers, entry: &Entry) -> Result<std::result::Result<u64, Kept>> {
    let kept = |why| Ok(Err(Kept::because(why)));
    let failed = |code| Error::new(code, format!("cannot release file {}", entry.attr.ino));
    if let Some(kept) = link.pool.must_be_kept(entry) {
        return Ok(Err(kept));
    }
    let mut held = match Held::take(link, peers, entry, LeaseKind::Write) {
        Ok(held) => held,
        Err(Code::Busy) => return kept("a program has it open"),
        Err(Code::TimedOut) => return kept("a node with a part of it does not answer"),
        Err(Code::Stale | Code::NotFound) => return kept("it was removed"),
        Err(code) => return Err(failed(code)),
    };
    let released = link.pool.release_leased(entry, || held.is_whole()).map_err(failed)?;
    if released.is_ok() {
        held.unlink_others();
    }
    Ok(released)
}

/// Percentage to which a target is filled.
fn filled(target: BorrowedFd<'_>) -> u64 {
    match fstatvfs(target) {
        Ok(space) if space.f_blocks > 0 => 100 - space.f_bavail * 100 / space.f_blocks,
        _ => 0,
    }
}

/// Free bytes of the target that has most of them.
pub(super) fn free_bytes(link: &Link) -> u64 {
    let free = |target| fstatvfs(target).map_or(0, |space| space.f_bavail * space.f_frsize);
    link.targets().into_iter().map(free).max().unwrap_or(0)
}

/// Bytes of the largest target, if all know theirs.
pub(super) fn capacity(link: &Link) -> Option<u64> {
    let bytes = |target| fstatvfs(target).map_or(0, |space| space.f_blocks * space.f_frsize);
    let all = link.targets().into_iter().map(bytes);
    all.min().filter(|least| *least > 0)?;
    link.targets().into_iter().map(bytes).max()
}

/// True when any target is filled up to [`EVICT_PERCENT`].
pub(super) fn is_full(link: &Link) -> bool {
    link.targets().into_iter().any(|target| filled(target) >= EVICT_PERCENT)
}

/// True when programs that are about to write may wait for space.
pub(super) fn is_waited_for(link: &Link) -> bool {
    link.targets().into_iter().any(|target| filled(target) >= HIGH_WATER_PERCENT)
}

/// Files that are being restored: their backing files are not leftovers.
#[derive(Debug, Default)]
pub(super) struct Restoring(Mutex<HashSet<u64>>);

impl Restoring {
    fn set(&self) -> std::sync::MutexGuard<'_, HashSet<u64>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// False when the file is being restored already.
    pub(super) fn begin(&self, ino: Ino) -> bool {
        self.set().insert(ino.0)
    }

    /// False when it was not.
    pub(super) fn end(&self, ino: Ino) -> bool {
        self.set().remove(&ino.0)
    }

    pub(super) fn count(&self) -> u64 {
        self.set().len() as u64
    }

    pub(super) fn has(&self, ino: Ino) -> bool {
        self.set().contains(&ino.0)
    }
}

/// A file that may be released.
struct Candidate {
    /// Its policy is to keep it longest.
    is_reusable: bool,
    /// When it was last used.
    used: (i64, i64),
    ino: Ino,
}

/// Releases files of targets that are filled up to [`EVICT_PERCENT`], those first that were not used for longest and
/// are not reusable, until `wanted` bytes are free or the low watermark is reached. Returns the bytes freed.
pub(super) fn evict(
    link: &Link,
    stores: &Stores,
    peers: &Peers,
    restoring: &Restoring,
    wanted: u64,
) -> Result<u64> {
    let mut freed = 0;
    for target in link.targets() {
        let high = if wanted > 0 { 0 } else { EVICT_PERCENT };
        if filled(target) < high {
            continue;
        }
        let mut candidates = candidates(link, stores, restoring, target)?;
        candidates.sort_by_key(|candidate| (candidate.is_reusable, candidate.used));
        // A look at the space for each file would cost more than to release many small ones.
        let (mut looked, mut unlooked_bytes) = (0, LOOK_BYTES);
        for (i, candidate) in candidates.iter().enumerate() {
            let is_to_look = i >= looked + 8 || unlooked_bytes >= LOOK_BYTES;
            let enough = match wanted {
                0 if is_to_look => {
                    (looked, unlooked_bytes) = (i, 0);
                    filled(target) <= LOW_WATER_PERCENT
                }
                0 => false,
                wanted => freed >= wanted,
            };
            if enough {
                break;
            }
            let Ok(entry) = link.inode(candidate.ino) else { continue };
            match release(link, peers, &entry) {
                Ok(Ok(bytes)) => {
                    tracing::debug!(
                        "released {}: {bytes} bytes, {} % are used",
                        candidate.ino,
                        filled(target)
                    );
                    freed += bytes;
                    unlooked_bytes += bytes;
                }
                Ok(Err(_)) => {}
                Err(e) => tracing::warn!("{e}"),
            }
        }
    }
    Ok(freed)
}

/// Clean files with a backing file on a target. Backing files of released files, which a mover that died left, are
/// unlinked.
fn candidates(
    link: &Link,
    stores: &Stores,
    restoring: &Restoring,
    target: BorrowedFd<'_>,
) -> Result<Vec<Candidate>> {
    let failed = |e: rustix::io::Errno| Error::io("cannot list the pool's files", &e.into());
    let mut all = Vec::new();
    for bucket in 0..256 {
        let name = format!("data/{bucket:02x}");
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = match rustix::fs::openat(target, name.as_str(), flags, Mode::empty()) {
            Ok(directory) => directory,
            Err(rustix::io::Errno::NOENT) => continue,
            Err(e) => return Err(failed(e)),
        };
        for entry in Dir::read_from(&directory).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let Some((ino, ..)) = BackingName::parse(entry.file_name().to_bytes()) else { continue };
            let Ok(inode) = link.inode(ino) else { continue };
            let attr = inode.attr;
            // Of a file that was released, or that was restored to another node.
            let is_left = |entry: &Entry| {
                let attr = &entry.attr;
                let is_here = || link.pool.is_one_here(&entry.layout) || !entry.layout.is_single();
                attr.is_file() && attr.flags & FLAG_ATTACHED != 0 && (!attr.is_resident() || !is_here())
            };
            if is_left(&inode) && !restoring.has(ino) {
                // In this order: a restore that has just ended has made the file resident.
                let is_left = || !restoring.has(ino) && link.inode(ino).is_ok_and(|now| is_left(&now));
                let _ = link.pool.remove_left(ino, directory.as_fd(), entry.file_name(), is_left);
                continue;
            }
            let bits = FLAG_ATTACHED | FLAG_DIRTY | FLAG_DRAINING | FLAG_PINNED;
            if !attr.is_file() || attr.flags & bits != FLAG_ATTACHED {
                continue;
            }
            let Ok(st) = statat(&directory, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW) else { continue };
            let used = (st.st_atime, st.st_atime_nsec as i64).max((st.st_mtime, st.st_mtime_nsec as i64));
            all.push(Candidate { is_reusable: stores.is_reusable(ino), used, ino });
        }
    }
    Ok(all)
}
