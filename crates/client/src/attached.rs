//! One process's attachment to a pool: its ring, the board and this node's targets. It is built by system calls alone,
//! in memory from its own mmap, because a forked child may attach inside a signal handler. It is never freed, because
//! other threads may be using it.

use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

use forebay_pacing::{Pacer, Pacers};
use forebay_ring::{call_clock, AttachReply, Board, Mapping, Removal, Ring};
use forebay_types::limits::{
    HIGH_WATER_PERCENT, NODE_TARGETS_MAX, ROOM_LOOK_MS, ROOM_TO_SPARE_BYTES, ROOM_TO_SPARE_INODES,
    SCARCE_LOOK_MS, SCARCE_PERCENT,
};
use forebay_types::{Code, Ino, Kind, Layout};

use crate::buffer::Buffers;
use crate::connection::{Address, Role};
use crate::errno;

/// Our descriptors are at least this high where the limit allows it, because some programs count on low numbers.
const HIGH_DESCRIPTOR: i32 = 900;

/// Files created between two checks of the targets' free space, while there is some.
const FILES_A_LOOK: u32 = 16;

/// A target of this node.
struct TargetHere {
    /// Its directory.
    fd: AtomicI32,
    /// Device and inode of the directory, to detect that the program closed the descriptor.
    identity: (u64, u64),
    /// Until this time of [`call_clock`] the target counts as one with room to spare.
    roomy_until_ns: AtomicU64,
}

impl TargetHere {
    const fn none() -> TargetHere {
        TargetHere { fd: AtomicI32::new(NONE), identity: (0, 0), roomy_until_ns: AtomicU64::new(0) }
    }
}

/// True if the free space has room for files that are removed and not yet unlinked.
fn is_room_to_spare(space: &libc::statfs) -> bool {
    let free_bytes = space.f_bavail.saturating_mul(space.f_bsize as u64);
    // A file system that does not limit its inodes counts none.
    let has_inodes = space.f_files == 0 || space.f_ffree >= ROOM_TO_SPARE_INODES;
    // At least half: a program that allocates as much space as the removed file had finds it elsewhere.
    free_bytes >= ROOM_TO_SPARE_BYTES && space.f_bavail >= space.f_blocks / 2 && has_inodes
}

/// The percentage to which the file system of a descriptor is filled.
fn used_percent_of(fd: RawFd) -> Option<u64> {
    // SAFETY: an all-zero statfs is valid, and writable for the call; a bad descriptor is an error.
    let space = unsafe {
        let mut space: libc::statfs = std::mem::zeroed();
        (libc::fstatfs(fd, &mut space) == 0 && space.f_blocks > 0).then_some(space)
    }?;
    let used = space.f_blocks.saturating_sub(space.f_bavail);
    Some(used.saturating_mul(100) / space.f_blocks)
}

/// A number that is no descriptor.
const NONE: RawFd = -1;

/// One process's attachment.
pub(crate) struct Attached {
    pub(crate) ring: Ring,
    pub(crate) board: Board,
    /// Epoch of `board`, which may be read while the ring has the same epoch.
    epoch: AtomicU64,
    /// This node's targets, in the order of their numbers. On a node without targets: the directory for its anchors.
    targets: [TargetHere; NODE_TARGETS_MAX],
    target_count: usize,
    /// Number of checks of the targets' free space, and the result of the last one (`was_full`).
    room_looks: AtomicU32,
    was_full: AtomicBool,
    /// Whether space was scarce at the last look, and until when that counts.
    was_scarce: AtomicBool,
    scarce_until_ns: AtomicU64,
    pub(crate) reply: AttachReply,
    /// The pacers of this node's targets, in a pool whose media are paced.
    pacers: Option<Pacers>,
    /// Buffers for data that pass to and from other nodes.
    pub(crate) buffers: Buffers,
    /// Set when the pool is gone: the next call attaches anew.
    pub(crate) gone: AtomicBool,
}

/// Moves a descriptor to a high number, away from those of the program.
pub(crate) fn raised(fd: OwnedFd) -> RawFd {
    // SAFETY: plain system call on our descriptor.
    let high = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR) };
    if high >= 0 {
        high
    } else {
        fd.into_raw_fd()
    }
}

/// Device and inode of a descriptor's file.
pub(crate) fn identity(fd: RawFd) -> Result<(u64, u64), Code> {
    errno::stat(fd).map(|st| (st.st_dev, st.st_ino))
}

impl Attached {
    /// Attaches this process. The result lives as long as the process.
    pub(crate) fn new(address: &Address, role: Role) -> Result<&'static Attached, Code> {
        let (reply, fds) = address.attach(role)?;
        let ring = Ring::open(fds.ring.as_fd(), fds.doorbell.as_fd()).map_err(errno::of)?;
        let mapping =
            Mapping::new(fds.board.as_fd(), reply.board_bytes as usize, false).map_err(errno::of)?;
        let board = Board::open(mapping)?;
        // A pool that is to be slow is not used fast.
        let pacers = match (fds.pacing, reply.paced) {
            (_, 0) => None,
            (Some(fd), _) => Some(Pacers::open(fd.as_fd()).map_err(errno::of)?),
            (None, _) => return Err(Code::Malformed),
        };
        let mut targets = [const { TargetHere::none() }; NODE_TARGETS_MAX];
        let mut target_count = 0;
        for (here, fd) in targets.iter_mut().zip(fds.targets.into_iter().flatten()) {
            *here = TargetHere {
                identity: identity(fd.as_raw_fd())?,
                fd: AtomicI32::new(raised(fd)),
                ..TargetHere::none()
            };
            target_count += 1;
        }
        let attached = Attached {
            ring,
            board,
            epoch: AtomicU64::new(reply.epoch),
            targets,
            target_count,
            room_looks: AtomicU32::new(0),
            was_full: AtomicBool::new(false),
            was_scarce: AtomicBool::new(false),
            scarce_until_ns: AtomicU64::new(0),
            reply,
            pacers,
            buffers: Buffers::default(),
            gone: AtomicBool::new(false),
        };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a fresh anonymous mapping, large and aligned enough (a page) for one `Attached`, never unmapped.
        unsafe {
            let place = libc::mmap(
                std::ptr::null_mut(),
                size_of::<Attached>(),
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            );
            if place == libc::MAP_FAILED {
                return Err(Code::NoMemory);
            }
            let place: *mut Attached = place.cast();
            place.write(attached);
            Ok(&*place)
        }
    }

    /// The board, if it is valid; the board of a new worker is fetched. The ring must still have the returned epoch
    /// after a read of the board.
    #[inline]
    pub(crate) fn board(&self, address: &Address) -> Option<(&Board, u64)> {
        let epoch = self.ring.epoch();
        if epoch == self.epoch.load(Ordering::Acquire) {
            return Some((&self.board, epoch));
        }
        self.refresh(address).ok()?;
        let epoch = self.ring.epoch();
        (epoch == self.epoch.load(Ordering::Acquire)).then_some((&self.board, epoch))
    }

    #[cold]
    fn refresh(&self, address: &Address) -> Result<(), Code> {
        let (reply, board, targets) = address.refresh(self.reply.session)?;
        if reply.board_bytes as usize != self.board.mapping().len() {
            return Err(Code::Malformed);
        }
        self.board.mapping().replace(board.as_fd()).map_err(errno::of)?;
        self.epoch.store(reply.epoch, Ordering::Release);
        drop(targets);
        Ok(())
    }

    /// The pacer of this node's target with an index, if the node's media are paced.
    #[inline]
    pub(crate) fn pacer(&self, index: u16) -> Option<Pacer<'_>> {
        self.pacers.as_ref().map(|pacers| pacers.pacer(usize::from(index)))
    }

    /// True if the pool emulates a medium on which a request that does not continue the one before takes longer.
    pub(crate) fn seeks(&self) -> bool {
        self.pacer(0).is_some_and(|pacer| pacer.medium().seek_ns > 0)
    }

    /// The directory of the first target, which also holds anchors, FIFOs and devices.
    #[inline]
    pub(crate) fn target(&self) -> RawFd {
        self.targets[0].fd.load(Ordering::Relaxed)
    }

    /// True if this node has a target, so that files may lie on it.
    #[inline]
    pub(crate) fn takes_files(&self) -> bool {
        self.reply.targets > 0
    }

    /// Number of directories that this node has for targets or in their place.
    #[inline]
    pub(crate) fn target_count(&self) -> usize {
        self.target_count
    }

    /// The directory of this node's target with an index; an invalid descriptor if there is no such target.
    #[inline]
    pub(crate) fn target_at(&self, index: u16) -> RawFd {
        self.targets.get(usize::from(index)).map_or(NONE, |here| here.fd.load(Ordering::Relaxed))
    }

    /// The directory that holds a backing file of this node.
    #[inline]
    pub(crate) fn target_of(&self, layout: &Layout, component: usize, stripe: u16) -> RawFd {
        self.target_at(layout.components()[component].target(stripe) as u16)
    }

    /// All targets, with their indexes.
    pub(crate) fn targets(&self) -> impl Iterator<Item = (u16, RawFd)> + '_ {
        (0..self.target_count as u16).map(|index| (index, self.target_at(index)))
    }

    /// The index of the first target on a device.
    #[inline]
    pub(crate) fn target_on(&self, device: u64) -> Option<u16> {
        self.targets[..self.target_count].iter().position(|here| here.identity.0 == device).map(|i| i as u16)
    }

    /// True if the target's kernel inode numbers are never reused.
    #[inline]
    pub(crate) fn is_stable(&self, index: u16) -> bool {
        self.reply.stable_inodes >> index & 1 != 0
    }

    /// True if all backing files of a file on this node lie in memory.
    pub(crate) fn is_in_memory(&self, layout: &Layout) -> bool {
        let mut targets =
            layout.stripes().map(|(component, stripe)| layout.components()[component].target(stripe));
        let here = u32::from(self.reply.node.0);
        targets.all(|target| target >> 16 != here && self.reply.nodes > 1 || self.is_stable(target as u16))
    }

    /// The target for a new file that may lie on any target of this node: the first one below its high-water mark. If
    /// all are above, the one with the most free space.
    #[inline]
    pub(crate) fn roomy_target(&self) -> u16 {
        match self.target_count {
            1 => 0,
            _ => self.choose_target().0,
        }
    }

    /// True if all targets of this node are above their high-water marks. The result may be [`FILES_A_LOOK`] files old,
    /// unless the last check found them full.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        let look = self.room_looks.fetch_add(1, Ordering::Relaxed);
        if !look.is_multiple_of(FILES_A_LOOK) && !self.was_full.load(Ordering::Relaxed) {
            return false;
        }
        let full = self.choose_target().1;
        self.was_full.store(full, Ordering::Relaxed);
        full
    }

    /// True where writers are to wait for space when the mover makes some: from [`SCARCE_PERCENT`] on, as seen at most
    /// [`SCARCE_LOOK_MS`] ago.
    #[inline]
    pub(crate) fn is_scarce(&self) -> bool {
        let now = call_clock();
        if now >= self.scarce_until_ns.load(Ordering::Acquire) {
            self.was_scarce.store(self.used_percent() >= SCARCE_PERCENT, Ordering::Relaxed);
            self.scarce_until_ns.store(now + SCARCE_LOOK_MS * 1_000_000, Ordering::Release);
        }
        self.was_scarce.load(Ordering::Relaxed)
    }

    /// The percentage to which the target with the most space is filled.
    pub(crate) fn used_percent(&self) -> u64 {
        self.targets().filter_map(|(_, fd)| used_percent_of(fd)).min().unwrap_or(0)
    }

    /// Free bytes of the target with this descriptor; none if it does not tell.
    #[cold]
    pub(crate) fn free_bytes_of(&self, target: RawFd) -> Option<u64> {
        // SAFETY: an all-zero statfs is valid, and writable for the call; a bad descriptor is an error.
        let space = unsafe {
            let mut space: libc::statfs = std::mem::zeroed();
            (libc::fstatfs(target, &mut space) == 0).then_some(space)
        }?;
        Some(space.f_bavail.saturating_mul(space.f_bsize as u64))
    }

    /// The target for a new file. The flag is true if all targets are above their high-water marks.
    fn choose_target(&self) -> (u16, bool) {
        let mut roomiest = (0, 0);
        for (index, fd) in self.targets() {
            // SAFETY: an all-zero statfs is valid, and writable for the call; a bad descriptor is an error.
            let space = unsafe {
                let mut space: libc::statfs = std::mem::zeroed();
                (libc::fstatfs(fd, &mut space) == 0).then_some(space)
            };
            let Some(space) = space else { continue };
            let used = space.f_blocks.saturating_sub(space.f_bavail);
            if used.saturating_mul(100) < space.f_blocks.saturating_mul(HIGH_WATER_PERCENT) {
                return (index, false);
            }
            let free_bytes = space.f_bavail.saturating_mul(space.f_bsize as u64);
            if free_bytes > roomiest.0 {
                roomiest = (free_bytes, index);
            }
        }
        (roomiest.1, true)
    }

    /// True if the target with this descriptor is filled to [`SCARCE_PERCENT`] or more, or does not tell.
    #[cold]
    pub(crate) fn is_short(&self, target: RawFd) -> bool {
        used_percent_of(target).is_none_or(|used| used >= SCARCE_PERCENT)
    }

    /// The removal of a file's backing file, if it may wait for the slot's next request: the file has one backing file,
    /// on a target of this node with room to spare. So a removed file's space is free at once where space is short.
    pub(crate) fn may_wait(&self, ino: Ino, kind: Kind, layout: &Layout) -> Option<Removal> {
        let target = layout.components()[0].target(0);
        let is_here = self.reply.nodes <= 1 || target >> 16 == u32::from(self.reply.node.0);
        if kind != Kind::File || !layout.is_single() || !is_here {
            return None;
        }
        let here = self.targets.get(usize::from(target as u16))?;
        let now = call_clock();
        if here.roomy_until_ns.load(Ordering::Relaxed) <= now {
            // SAFETY: an all-zero statfs is valid, and filled by the call; a bad descriptor is an error.
            let mut space: libc::statfs = unsafe { std::mem::zeroed() };
            // SAFETY: `space` is valid for the call.
            let looked = unsafe { libc::fstatfs(here.fd.load(Ordering::Relaxed), &mut space) } == 0;
            if !looked || !is_room_to_spare(&space) {
                return None;
            }
            here.roomy_until_ns.store(now + ROOM_LOOK_MS * 1_000_000, Ordering::Relaxed);
        }
        Some(Removal { ino, target: target as u16 })
    }

    /// True if the program closed a target's descriptor: all descriptors are fetched again, and the caller repeats its
    /// open. Called after an open relative to a target failed with ENOENT, EBADF or ENOTDIR.
    #[cold]
    pub(crate) fn target_was_lost(&self, address: &Address) -> bool {
        let ours = &self.targets[..self.target_count];
        let is_lost = |here: &TargetHere| identity(here.fd.load(Ordering::Relaxed)) != Ok(here.identity);
        if !ours.iter().any(is_lost) {
            return false;
        }
        let Ok((_, _, targets)) = address.refresh(self.reply.session) else { return false };
        for (here, fd) in ours.iter().zip(targets.into_iter().flatten()) {
            // The program may use the number by now, so the old descriptor is not closed.
            if is_lost(here) {
                here.fd.store(raised(fd), Ordering::Release);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_to_spare_takes_bytes_and_inodes_where_they_are_limited() {
        // SAFETY: an all-zero statfs is valid.
        let mut space: libc::statfs = unsafe { std::mem::zeroed() };
        space.f_bsize = 4096;
        space.f_bavail = ROOM_TO_SPARE_BYTES / 4096;
        assert!(is_room_to_spare(&space), "its inodes are not limited");
        space.f_files = 1 << 20;
        assert!(!is_room_to_spare(&space), "no inodes");
        space.f_ffree = ROOM_TO_SPARE_INODES;
        assert!(is_room_to_spare(&space));
        space.f_blocks = 2 * space.f_bavail + 2;
        assert!(!is_room_to_spare(&space), "more than half is used");
        space.f_blocks -= 1;
        assert!(is_room_to_spare(&space));
        space.f_bavail -= 1;
        assert!(!is_room_to_spare(&space), "no bytes");
    }
}
