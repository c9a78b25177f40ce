//! The pool's mount, if this process sees one. Directories are opened there, and files for which this node has no
//! descriptor.
//!
//! A directory's descriptor is then an ordinary one of the kernel: it can be locked, a static program can work in it,
//! and every program understands its path. Without a mount it is an anchor (`open`). Calls relative to either start
//! from the inode, which is the `st_ino` of a directory on the mount.
//!
//! A program under the preload library may also use the mount's own paths, and the kernel alone serves descriptors that
//! it opens by them. So descriptors that this module opens carry a mark that survives dup, fork and exec: O_DSYNC,
//! which has no meaning for a directory ([`MOUNTED_MARK`]).
//!
//! For a file on another node, only the kernel can provide a descriptor that supports all calls. The mount shows such a
//! file in its root under a name that contains its inode number ([`INODE_NAME`]). The name is the mark: the kernel
//! keeps it with the descriptor. The kernel serves calls on such a descriptor. Only fstat replaces the mount's device
//! by the pool's, so that the file has the same identity by path and by descriptor.
//!
//! The mount's process publishes the mount point as a link in the pool's directory ([`MOUNT_LINK`]). The link counts
//! only if the device and inode at that path are the expected ones: mounts appear and disappear, and a process may live
//! in a mount namespace without this mount.

use std::ffi::CStr;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use forebay_types::{mount_of_link, Code, Entry, Ino, FLAG_ATTACHED, MOUNT_LINK};

use crate::connection::Role;
use crate::descriptor::{proc_fd, proc_link};
use crate::errno;
use crate::open::{close, open_at, KERNEL_FLAGS};
use crate::path::PathBuffer;
use crate::pool::Pool;

/// The flag of descriptors that the pool opened on its mount.
pub const MOUNTED_MARK: i32 = libc::O_DSYNC;

/// Prefix of a file's name in the root of a mount, before the inode number in 16 hexadecimal digits. Listings omit
/// these names.
pub const INODE_NAME: &[u8] = b".forebay-inode-";
/// The inode number that the kernel shows for the root of a mount before it has requested the root's attributes.
const FUSE_ROOT: u64 = 1;
/// Suffix that the kernel appends to the path of a descriptor after it has dropped the name. It also drops a name that
/// it may no longer trust.
const DELETED: &[u8] = b" (deleted)";

/// The inode of a name in a mount's root.
pub fn inode_of_name(name: &[u8]) -> Option<Ino> {
    let digits = name.strip_prefix(INODE_NAME)?;
    if digits.len() != 16 || digits.iter().any(|d| !d.is_ascii_hexdigit() || d.is_ascii_uppercase()) {
        return None;
    }
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok().map(Ino)
}

/// True if the inode `ino` of `device` is at a path or, if the path is empty, behind a descriptor. The kernel's cached
/// attributes are used where possible, to save a request to the file system.
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
        // The kernel has not yet requested the attributes of a new mount's root, and shows FUSE's number for it.
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
    /// The mount's device; its mount point is stored in `path`.
    pub(crate) fn find_mount(&self, path: &mut PathBuffer) -> Option<u64> {
        let mut link = PathBuffer::new();
        link.set(self.address().directory()).ok()?;
        link.push(b"/").ok()?;
        link.push(MOUNT_LINK.as_bytes()).ok()?;
        let mut text = [0; forebay_types::limits::PATH_MAX];
        // SAFETY: the path is NUL-terminated and the buffer has the given length.
        let n = unsafe { libc::readlink(link.as_c_str_ptr(), text.as_mut_ptr().cast(), text.len()) };
        let (device, at) = mount_of_link(text.get(..usize::try_from(n).ok()?)?)?;
        path.set(at).ok()?;
        self.mounted.store(device, Ordering::Relaxed);
        Some(device)
    }

    /// The device number of the mount, if the pool is mounted at the path `at`.
    pub(crate) fn device_of_mount_at(&self, at: &[u8]) -> Option<u64> {
        let mut path = PathBuffer::new();
        let device =
            if self.role() == Role::Host && !at.is_empty() { self.find_mount(&mut path) } else { None };
        device.filter(|_| path.as_bytes() == at)
    }

    /// True if `device` (`st_dev`) is that of the pool's mount.
    pub(crate) fn is_mount(&self, device: u64) -> bool {
        // A FUSE mount has no block device.
        if libc::major(device) != 0 {
            return false;
        }
        self.mounted.load(Ordering::Relaxed) == device
            || self.find_mount(&mut PathBuffer::new()) == Some(device)
    }

    /// Opens an O_PATH descriptor of a directory, for changing to it.
    pub fn open_to_enter(&self, dir: Ino) -> Result<RawFd, Code> {
        let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
        match self.open_mounted(dir, flags) {
            Some(fd) => Ok(fd),
            None => self.open_anchor(dir, flags),
        }
    }

    /// Opens an inode of the pool by its path on the mount. `None` if there is no mount, or if the mount refuses this
    /// process.
    pub(crate) fn open_mounted(&self, ino: Ino, flags: i32) -> Option<RawFd> {
        // The mount's own process would wait for itself. A tool hands no descriptors to other programs and does not
        // need the mount's.
        if self.role() != Role::Host {
            return None;
        }
        let (mut path, mut inside) = (PathBuffer::new(), PathBuffer::new());
        let device = self.find_mount(&mut path)?;
        self.path_of(ino, &mut inside).ok()?;
        path.push(inside.as_bytes()).ok()?;
        let fd = open_at(libc::AT_FDCWD, path.as_c_str(), flags | libc::O_NOFOLLOW | MOUNTED_MARK).ok()?;
        // Names change, so the path may lead to another inode by now.
        if !is_at(fd, c"", device, ino) {
            close(fd);
            return None;
        }
        Some(fd)
    }

    /// Opens a file by the pool's mount where that serves a program better than its backing file. None where it does not,
    /// without a mount, and if the mount fails: then the backing file is opened.
    #[inline]
    pub(crate) fn open_better_by_mount(&self, entry: &Entry, flags: i32) -> Option<RawFd> {
        if self.hands_out_paced(entry, flags) && flags & (libc::O_PATH | libc::O_DIRECTORY) == 0 {
            return self.open_file_mounted(entry, flags);
        }
        let is_attached = entry.attr.is_file() && entry.attr.flags & FLAG_ATTACHED != 0;
        let is_refused = !entry.attr.is_resident() && !self.recalls();
        if !is_attached || is_refused || flags & (libc::O_PATH | libc::O_DIRECTORY) != 0 {
            return None;
        }
        let serves = match flags & (libc::O_ACCMODE | libc::O_TRUNC) {
            libc::O_RDONLY => self.may_come_in_ranges(entry),
            // Writes wait for space there. A descriptor of the backing file meets what space there is.
            _ => {
                self.is_one_here(&entry.layout) && self.attached().is_ok_and(|attached| attached.is_scarce())
            }
        };
        match serves {
            true => self.open_file_mounted(entry, flags),
            false => None,
        }
    }

    /// Replaces the descriptor of a new file's backing file in the same way, under the same number.
    #[inline]
    pub(crate) fn better_by_mount(&self, entry: &Entry, fd: RawFd, flags: i32) -> RawFd {
        let flags = flags & !libc::O_TRUNC;
        if let Some(mounted) = self.open_better_by_mount(entry, flags) {
            // If this fails, the program has the descriptor of the backing file.
            // SAFETY: plain system call on two descriptors that no one else uses yet.
            unsafe { libc::syscall(libc::SYS_dup3, mounted, fd, flags & libc::O_CLOEXEC) };
            close(mounted);
        }
        fd
    }

    #[cold]
    fn open_file_mounted(&self, entry: &Entry, flags: i32) -> Option<RawFd> {
        // The mount's own process would wait for itself. A tool reads whole files.
        if self.role() != Role::Host {
            return None;
        }
        let mut path = PathBuffer::new();
        self.mount_path_of(entry, &mut path).ok()?;
        open_at(libc::AT_FDCWD, path.as_c_str(), flags & (KERNEL_FLAGS | libc::O_TRUNC)).ok()
    }

    /// Stores in `path` the path at which this process sees the pool's mount. A process in another mount namespace, as
    /// in a container, may not see it.
    ///
    /// # Errors
    /// [`Code::NotSupported`] if this process does not see the mount.
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

    /// Stores in `path` the path by which the kernel reaches a file for which this node has no descriptor.
    ///
    /// # Errors
    /// As [`Pool::sees_mount`].
    #[cold]
    pub(crate) fn mount_path_of(&self, entry: &Entry, path: &mut PathBuffer) -> Result<(), Code> {
        self.sees_mount(path)?;
        push_inode_name(path, entry.attr.ino)
    }

    /// Makes the kernel fetch an inode's new owner and group if it has the pool mounted. The kernel was notified that
    /// the attributes are invalid. But for operations that only an owner may do, it compares its cached owner with the
    /// caller, without a GETATTR, and would refuse the new owner until the next look-up. Other kinds than directories
    /// are looked up by their inode number. For a directory that would be a second name, which the kernel does not
    /// allow.
    ///
    /// A process that does not see the mount does nothing here: `forebay-mount` refuses the old owner in any case.
    #[cold]
    pub(crate) fn show_owner(&self, entry: &Entry) {
        // Under the preload library a path below /proc/self/root reaches the kernel, even if the pool's prefix is its
        // mount point.
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
        // Without a mount the kernel has no attributes to update.
        let _ = show();
    }

    /// True for a descriptor that was opened by a path of [`Pool::mount_path_of`]. `kernel` is the result of `fstat`.
    pub(crate) fn was_opened_by_mount(&self, fd: RawFd, kernel: &libc::stat) -> bool {
        let is_file = kernel.st_mode & libc::S_IFMT == libc::S_IFREG;
        // Other file systems have few inodes with such numbers.
        let may_be = is_file && Ino(kernel.st_ino).birth_node().is_valid();
        if !may_be || !self.is_mount(kernel.st_dev) {
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
