//! The pool's mount, where it has one that this process sees: directories are opened there.
//!
//! A directory's descriptor is then one of the kernel's own: it can be locked, a static program can work in it, and its path
//! is one that every program understands. Without a mount it is an anchor (`open`). Calls relative to either start from the
//! inode, which a directory of the mount shows as its own.
//!
//! A program under the preload library may know the mount's own paths too, and what it opens by them is the kernel's. So the
//! descriptors that are opened here carry a mark that stays with them over dup, fork and exec: O_DSYNC, which means nothing
//! of a directory ([`MOUNTED_MARK`]).
//!
//! The mount's process says where it is by a link in the pool's directory ([`MOUNT_LINK`]). It is believed only when what is
//! there shows the right device and inode: mounts come and go, and a process may live in a namespace that lacks it.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use forebay_types::{mount_of_link, Code, Ino, MOUNT_LINK};

use crate::connection::Role;
use crate::errno;
use crate::open::{close, open_at};
use crate::path::PathBuffer;
use crate::pool::Pool;

/// The flag of descriptors that the pool opened on its mount.
pub const MOUNTED_MARK: i32 = libc::O_DSYNC;

/// What of a descriptor is told without asking a file system for it.
fn look(fd: RawFd) -> Result<libc::statx, Code> {
    // SAFETY: an all-zero statx is valid; it is writable for the call, and the path is the empty one.
    unsafe {
        let mut found: libc::statx = std::mem::zeroed();
        let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
        let mask = libc::STATX_INO | libc::STATX_TYPE;
        errno::check(libc::syscall(libc::SYS_statx, fd, c"".as_ptr(), flags, mask, &raw mut found) as i32)?;
        Ok(found)
    }
}

impl Pool {
    /// The mount's device and, in `path`, where it is mounted.
    fn find_mount(&self, path: &mut PathBuffer) -> Option<u64> {
        let mut link = PathBuffer::new();
        link.set(self.address().directory()).ok()?;
        link.push(b"/").ok()?;
        link.push(MOUNT_LINK.as_bytes()).ok()?;
        let mut text = [0; forebay_types::limits::PATH_MAX];
        // SAFETY: the path is NUL-terminated and the buffer as long as said.
        let n = unsafe { libc::readlink(link.as_c_str_ptr(), text.as_mut_ptr().cast(), text.len()) };
        let (device, at) = mount_of_link(text.get(..usize::try_from(n).ok()?)?)?;
        path.set(at).ok()?;
        self.mounted.store(device, Ordering::Relaxed);
        Some(device)
    }

    /// The device number of the mount, if the pool is mounted at this path.
    pub(crate) fn device_of_mount_at(&self, at: &[u8]) -> Option<u64> {
        let mut path = PathBuffer::new();
        let device =
            if self.role() == Role::Host && !at.is_empty() { self.find_mount(&mut path) } else { None };
        device.filter(|_| path.as_bytes() == at)
    }

    /// True when `device` (`st_dev`) is that of the pool's mount.
    pub(crate) fn is_mount(&self, device: u64) -> bool {
        // Mounts are of no block device.
        if libc::major(device) != 0 {
            return false;
        }
        self.mounted.load(Ordering::Relaxed) == device
            || self.find_mount(&mut PathBuffer::new()) == Some(device)
    }

    /// A descriptor of a directory to change to, which is no good for much else.
    pub fn open_to_enter(&self, dir: Ino) -> Result<RawFd, Code> {
        let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
        match self.open_mounted(dir, flags) {
            Some(fd) => Ok(fd),
            None => self.open_anchor(dir, flags),
        }
    }

    /// Opens an inode of the pool by its path on the mount; none where there is no mount, or it does not let this process.
    pub(crate) fn open_mounted(&self, ino: Ino, flags: i32) -> Option<RawFd> {
        // The mount's own process would wait for itself, and tools outlive no mount.
        if self.role() != Role::Host {
            return None;
        }
        let (mut path, mut inside) = (PathBuffer::new(), PathBuffer::new());
        let device = self.find_mount(&mut path)?;
        self.path_of(ino, &mut inside).ok()?;
        path.push(inside.as_bytes()).ok()?;
        let fd = open_at(libc::AT_FDCWD, path.as_c_str(), flags | libc::O_NOFOLLOW | MOUNTED_MARK).ok()?;
        // It may be another's by now: names move.
        let is_it = look(fd).is_ok_and(|found| {
            found.stx_ino == ino.0 && libc::makedev(found.stx_dev_major, found.stx_dev_minor) == device
        });
        if !is_it {
            close(fd);
            return None;
        }
        Some(fd)
    }
}
