//! What one process holds of a pool: ring, board and target. Made by system calls alone, in memory of its own mmap, as a
//! forked child may attach inside a signal handler; never freed, as other threads may be using it.

use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

use forebay_ring::{AttachReply, Board, Mapping, Ring};
use forebay_types::Code;

use crate::buffer::Buffers;
use crate::connection::{Address, Role};
use crate::errno;

/// Descriptors of ours sit this high where the limit allows, out of the way of programs that count theirs.
const HIGH_DESCRIPTOR: i32 = 900;

/// One process's attachment.
pub(crate) struct Attached {
    pub(crate) ring: Ring,
    pub(crate) board: Board,
    /// Epoch of `board`; it may be read while the ring says the same.
    epoch: AtomicU64,
    /// The target's directory.
    target: AtomicI32,
    /// Device and inode of the target's directory, to notice a descriptor that the program closed.
    target_identity: (u64, u64),
    pub(crate) reply: AttachReply,
    /// By which data pass to and from other nodes.
    pub(crate) buffers: Buffers,
    /// Set when the pool was found gone: the next call attaches anew.
    pub(crate) gone: AtomicBool,
}

/// Moves a descriptor out of the way of the program's.
fn raised(fd: OwnedFd) -> RawFd {
    // SAFETY: plain system call on our descriptor.
    let high = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR) };
    if high >= 0 {
        high
    } else {
        fd.into_raw_fd()
    }
}

fn identity(fd: RawFd) -> Result<(u64, u64), Code> {
    errno::stat(fd).map(|st| (st.st_dev, st.st_ino))
}

impl Attached {
    /// Attaches this process. The result lives as long as the process.
    pub(crate) fn new(address: &Address, role: Role) -> Result<&'static Attached, Code> {
        let (reply, fds) = address.attach(role)?;
        let ring = Ring::open(fds.ring.as_fd(), fds.doorbell.as_fd()).map_err(|_| Code::NoResources)?;
        let mapping = Mapping::new(fds.board.as_fd(), reply.board_bytes as usize, false)
            .map_err(|_| Code::NoResources)?;
        let board = Board::open(mapping)?;
        let target_identity = identity(fds.target.as_raw_fd())?;
        let attached = Attached {
            ring,
            board,
            epoch: AtomicU64::new(reply.epoch),
            target: AtomicI32::new(raised(fds.target)),
            target_identity,
            reply,
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
                return Err(Code::NoResources);
            }
            let place: *mut Attached = place.cast();
            place.write(attached);
            Ok(&*place)
        }
    }

    /// The board, if it may be trusted; a new worker's is fetched. The result's epoch must still be the ring's after
    /// a read.
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
        let (reply, board, target) = address.refresh(self.reply.session)?;
        if reply.board_bytes as usize != self.board.mapping().len() {
            return Err(Code::Malformed);
        }
        self.board.mapping().replace(board.as_fd()).map_err(|_| Code::NoResources)?;
        self.epoch.store(reply.epoch, Ordering::Release);
        drop(target);
        Ok(())
    }

    /// The target's directory.
    #[inline]
    pub(crate) fn target(&self) -> RawFd {
        self.target.load(Ordering::Relaxed)
    }

    /// True when the target's descriptor is still ours; called after an open relative to it met ENOENT, EBADF or
    /// ENOTDIR. When the program closed it, it is fetched again, and the open is to be repeated.
    #[cold]
    pub(crate) fn target_was_lost(&self, address: &Address) -> bool {
        let fd = self.target();
        if identity(fd) == Ok(self.target_identity) {
            return false;
        }
        let Ok((_, _, target)) = address.refresh(self.reply.session) else { return false };
        // The number may be the program's by now: it is not closed.
        self.target.store(raised(target), Ordering::Release);
        true
    }
}
