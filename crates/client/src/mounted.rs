//! The pool's mount, where it has one that this process sees: directories are opened there, and files that no
//! descriptor of this node can be had of.
//!
//! A directory's descriptor is then one of the kernel's own: it can be locked, a static program can work in it, and its
//! path is one that every program understands. Without a mount it is an anchor (`open`). Calls relative to either start
//! from the inode, which a directory of the mount shows as its own.
//!
//! A program under the preload library may know the mount's own paths too, and what it opens by them is the kernel's.
//! So the descriptors that are opened here carry a mark that stays with them over dup, fork and exec: O_DSYNC, which
//! means nothing of a directory ([`MOUNTED_MARK`]).
//!
//! A file that lies on another node, in a pool of several, only the kernel can make a descriptor of whose every use is
//! served. The mount shows it in its root under a name that is its number ([`INODE_NAME`]), and that name is the mark:
//! the kernel keeps it with the descriptor. Calls on such a descriptor are the kernel's; fstat alone puts the pool's
//! device in the place of the mount's, so that the file is the same one by path and by descriptor.
//!
//! The mount's process says where it is by a link in the pool's directory ([`MOUNT_LINK`]). It is believed only when
//! what is there shows the right device and inode: mounts come and go, and a process may live in a namespace that lacks
//! it.

use std::ffi::CStr;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use forebay_types::{mount_of_link, Code, Entry, Ino, MOUNT_LINK};

use crate::connection::Role;
use crate::descriptor::{proc_fd, proc_link};
use crate::errno;
use crate::open::{close, open_at};
use crate::path::PathBuffer;
use crate::pool::Pool;

/// The flag of descriptors that the pool opened on its mount.
pub const MOUNTED_MARK: i32 = libc::O_DSYNC;

/// In front of a file's inode number, in 16 digits, in the root of a mount. It is listed nowhere.
pub const INODE_NAME: &[u8] = b".forebay-inode-";
/// The number that the kernel gives the root of a mount of which it knows no attributes yet.
const FUSE_ROOT: u64 = 1;
/// What the kernel puts behind the path of a descriptor whose name it holds no longer, as it does of what it may not
/// believe.
const DELETED: &[u8] = b" (deleted)";

/// The inode that a name in a mount's root stands for.
pub fn inode_of_name(name: &[u8]) -> Option<Ino> {
    let digits = name.strip_prefix(INODE_NAME)?;
    if digits.len() != 16 || digits.iter().any(|d| !d.is_ascii_hexdigit() || d.is_ascii_uppercase()) {
        return None;
    }
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok().map(Ino)
}

/// True when this inode of the device is at a path, or, the path being empty, behind a descriptor. What the kernel
/// knows counts where it says so, without a request to a file system.
fn is_at(fd: RawFd, path: &CStr, device: u64, ino: Ino) -> bool {
    let look = |sync: i32| -> Result<(u64, u64), Code> {
        // SAFETY: an all-zero statx is valid; it is writable for the call, and the path NUL-terminated.
        unsafe {
            let mut found: libc::statx = std::mem::zeroed();
            let flags = libc::AT_EMPTY_PATH | libc::AT_SYMLINK_NOFOLLOW | sync;
            let mask = libc::STATX_INO | libc::STATX_TYPE;
            let result = libc::syscall(libc::SYS_statx, fd, path.as_ptr(), flags, mask, &raw mut found);
            errno::check(result as i32)?;
            Ok((libc::makedev(found.stx_dev_major, found.stx_dev_minor), found.stx_ino))
        }
    };
    match look(libc::AT_STATX_DONT_SYNC) {
        Ok(found) if found == (device, ino.0) => true,
        // The kernel has asked for the root of a new mount as little as anybody: it has FUSE's number for it.
        Ok((of, FUSE_ROOT)) if of == device => look(libc::AT_STATX_FORCE_SYNC) == Ok((device, ino.0)),
        _ => false,
    }
}

fn push_inode_name(path: &mut PathBuffer, ino: Ino) -> Result<(), Code> {
    path.push(b"/")?;
    path.push(INODE_NAME)?;
    let mut digits = [0; 16];
    for (i, digit) in digits.iter_mut().enumerate() {
        *digit = b"0123456789abcdef"[(ino.0 >> (60 - 4 * i) & 15) as usize];
    }
    path.push(&digits)
}

impl Pool {
    /// The mount's device and, in `path`, where it is mounted.
    pub(crate) fn find_mount(&self, path: &mut PathBuffer) -> Option<u64> {
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

    /// Opens an inode of the pool by its path on the mount; none where there is no mount, or it does not let this
    /// process.
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
        if !is_at(fd, c"", device, ino) {
            close(fd);
            return None;
        }
        Some(fd)
    }

    /// Puts into `path` where this process sees the pool mounted: one in a mount namespace of its own, as in a
    /// container, may not.
    ///
    /// # Errors
    /// [`Code::NotSupported`] when that is nowhere.
    #[cold]
    pub(crate) fn sees_mount(&self, path: &mut PathBuffer) -> Result<(), Code> {
        // The mount's own process would wait for itself.
        if self.role() == Role::Mount {
            return Err(Code::NotSupported);
        }
        let device = self.find_mount(path).ok_or(Code::NotSupported)?;
        let root = self.attached()?.reply.root;
        if !is_at(libc::AT_FDCWD, path.as_c_str(), device, root) {
            return Err(Code::NotSupported);
        }
        Ok(())
    }

    /// Puts into `path` where the kernel reaches a file that no descriptor of this node can be had of.
    ///
    /// # Errors
    /// As [`Pool::sees_mount`].
    #[cold]
    pub(crate) fn lead_to_mount(&self, entry: &Entry, path: &mut PathBuffer) -> Result<(), Code> {
        self.sees_mount(path)?;
        push_inode_name(path, entry.attr.ino)
    }

    /// Has the kernel take over an inode's owner and group where it has the pool mounted. It was told that its
    /// attributes are old, but where only an owner may do something it compares the one that it has with the caller,
    /// without a GETATTR: it would refuse the new owner until somebody looks. Others than directories are looked up by
    /// their number; of a directory that would be a second name, which the kernel does not allow.
    ///
    /// Nothing is done in a process that does not see the mount: `forebay-mount` refuses the old owner in any case.
    #[cold]
    pub(crate) fn show_owner(&self, entry: &Entry) {
        // Under the preload library this path is the kernel's, also where the mount is the prefix.
        let (mut at, mut path) = (PathBuffer::new(), PathBuffer::new());
        let mut show = || -> Result<(), Code> {
            self.sees_mount(&mut at)?;
            path.set(b"/proc/self/root")?;
            path.push(at.as_bytes())?;
            if entry.attr.is_directory() {
                let mut inside = PathBuffer::new();
                self.path_of(entry.attr.ino, &mut inside)?;
                path.push(inside.as_bytes())?;
            } else {
                push_inode_name(&mut path, entry.attr.ino)?;
            }
            // SAFETY: an all-zero statx is valid; it is writable for the call, and the path NUL-terminated.
            unsafe {
                let mut found: libc::statx = std::mem::zeroed();
                let flags = libc::AT_STATX_FORCE_SYNC | libc::AT_SYMLINK_NOFOLLOW;
                let (here, mask) = (libc::AT_FDCWD, libc::STATX_UID | libc::STATX_GID);
                libc::syscall(libc::SYS_statx, here, path.as_c_str_ptr(), flags, mask, &raw mut found);
            }
            Ok(())
        };
        // Without a mount there is nothing to show.
        let _ = show();
    }

    /// True for a descriptor that was opened by a path of [`Pool::lead_to_mount`], `kernel` being what `fstat` gave for
    /// it.
    pub(crate) fn was_led_to_mount(&self, fd: RawFd, kernel: &libc::stat) -> bool {
        let is_file = kernel.st_mode & libc::S_IFMT == libc::S_IFREG;
        if !is_file || !self.spans_nodes() || !self.is_mount(kernel.st_dev) {
            return false;
        }
        let (mut link, mut shown) = ([0; 32], [0; forebay_types::limits::PATH_MAX]);
        let Some(link) = proc_fd(fd, &mut link) else { return false };
        let Ok(shown) = proc_link(link, &mut shown) else { return false };
        let shown = shown.strip_suffix(DELETED).unwrap_or(shown);
        let last = shown.rsplit(|b| *b == b'/').next().unwrap_or_default();
        inode_of_name(last) == Some(Ino(kernel.st_ino))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inode_of_name_takes_its_own_form_alone() {
        assert_eq!(inode_of_name(b".forebay-inode-000200000000001f"), Some(Ino(2 << 48 | 31)));
        for other in
            [".forebay-inode-", ".forebay-inode-2", ".forebay-inode-000200000000001F", "000200000000001f"]
        {
            assert_eq!(inode_of_name(other.as_bytes()), None, "{other}");
        }
    }
}
