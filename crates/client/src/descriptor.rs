//! Finds the inode of a descriptor. The function queries the kernel each time, so this library need not track close,
//! dup, exec or descriptors received from other processes.
//!
//! The names of backing files and anchors contain the inode number. /proc/self/fd shows the name even after it was
//! unlinked. On a file system that never reuses inode numbers (tmpfs), the result is cached by the kernel's inode
//! number.

use std::os::fd::RawFd;

use forebay_data::{AnchorName, BackingName};
use forebay_types::{Code, Entry, Ino, Kind};

use crate::errno;
use crate::path::PathBuffer;
use crate::pool::Pool;
use crate::remembered::{cached_ino, key_of, remember};

/// The name that the kernel shows for a link of /proc: `/proc/self/fd/N` or `/proc/self/cwd`.
pub(crate) fn proc_link<'a>(link: &std::ffi::CStr, buffer: &'a mut [u8]) -> Result<&'a [u8], Code> {
    // SAFETY: the link is NUL-terminated and the buffer has the given length.
    let n = unsafe { libc::readlink(link.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len()) };
    errno::check(n as i32)?;
    Ok(&buffer[..n as usize])
}

/// `/proc/self/fd/N`, without allocation.
pub(crate) fn proc_fd(fd: RawFd, buffer: &mut [u8; 32]) -> Option<&std::ffi::CStr> {
    let mut digits = [0; 12];
    let (mut rest, mut n) = (u32::try_from(fd).ok()?, 0);
    loop {
        digits[n] = b'0' + (rest % 10) as u8;
        rest /= 10;
        n += 1;
        if rest == 0 {
            break;
        }
    }
    let front = b"/proc/self/fd/";
    buffer[..front.len()].copy_from_slice(front);
    for i in 0..n {
        buffer[front.len() + i] = digits[n - 1 - i];
    }
    buffer[front.len() + n] = 0;
    std::ffi::CStr::from_bytes_until_nul(buffer).ok()
}

impl Pool {
    /// A path by which the kernel finds a file's first backing file, or a bound socket's node, through the target's
    /// descriptor. Each inode has its own path. For a file of another node it is a path of the pool's mount.
    ///
    /// # Errors
    /// [`Code::NotSupported`] for an inode that is neither a file nor a socket, and for a file of another node without
    /// a mount.
    pub fn backing_path(&self, ino: Ino, path: &mut PathBuffer) -> Result<(), Code> {
        let mut entry = self.get_attr(ino)?;
        if self.needs_mount(&entry) || self.hands_out_paced(&entry, 0) {
            return self.mount_path_of(&entry, path);
        }
        if entry.attr.is_file() && !entry.layout.is_single() {
            self.make_single(ino, false)?;
            entry = self.get_attr(ino)?;
        }
        let is_whole = entry.attr.is_file() && entry.layout.is_single();
        if !is_whole && entry.attr.kind() != Kind::Socket {
            return Err(Code::NotSupported);
        }
        self.path_of_backing(&entry, path)
    }

    /// The same for an inode that is known to have a backing file on this node.
    pub(crate) fn path_of_backing(&self, entry: &Entry, path: &mut PathBuffer) -> Result<(), Code> {
        let mut digits = [0; 10];
        let (mut at, mut rest) = (digits.len(), self.attached()?.target_of(&entry.layout, 0, 0) as u32);
        while rest > 0 || at == digits.len() {
            at -= 1;
            digits[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
        path.set(b"/proc/self/fd/")?;
        path.push(&digits[at..])?;
        path.push(b"/")?;
        path.push(BackingName::new(entry.attr.ino, 0, 0).as_bytes())
    }

    /// The inode of a descriptor that leads to a backing file, an anchor, or a directory of this pool's mount. `kernel`
    /// is the result of `fstat`. `None` for any other descriptor.
    pub fn inode_of(&self, fd: RawFd, kernel: &libc::stat) -> Option<Ino> {
        let attached = self.attached().ok()?;
        let Some(target) = attached.target_on(kernel.st_dev) else { return self.directory_on_mount(kernel) };
        let stable = attached.is_stable(target);
        if stable {
            if let Some(ino) = cached_ino(key_of(kernel)) {
                return Some(ino);
            }
        }
        let mut name = [0; 32];
        let ino = self.inode_named(kernel, proc_fd(fd, &mut name)?)?;
        if stable {
            remember(kernel, ino);
        }
        Some(ino)
    }

    /// The pool's inode of the working directory, if that is in the pool. `kernel` is the result of `stat` of `.`.
    pub fn inode_of_working_directory(&self, kernel: &libc::stat) -> Option<Ino> {
        let attached = self.attached().ok()?;
        if attached.target_on(kernel.st_dev).is_none() {
            return self.directory_on_mount(kernel);
        }
        self.inode_named(kernel, c"/proc/self/cwd")
    }

    /// The inode of a directory of the mount. Regular files on the mount were opened by the mount's own paths, and the
    /// kernel alone serves them.
    fn directory_on_mount(&self, kernel: &libc::stat) -> Option<Ino> {
        let is_directory = kernel.st_mode & libc::S_IFMT == libc::S_IFDIR;
        (is_directory && self.is_mount(kernel.st_dev)).then_some(Ino(kernel.st_ino))
    }

    fn inode_named(&self, kernel: &libc::stat, link: &std::ffi::CStr) -> Option<Ino> {
        // The relevant names are in the last 80 bytes or so. The bytes before them depend on the target's path.
        let mut buffer = [0; forebay_types::limits::PATH_MAX];
        let shown = proc_link(link, &mut buffer).ok()?;
        let mut parts = shown.rsplitn(3, |&b| b == b'/');
        let (last, above) = (parts.next()?, parts.next()?);
        match kernel.st_mode & libc::S_IFMT {
            libc::S_IFDIR | libc::S_IFLNK if above == b"anchors" => AnchorName::parse(last),
            libc::S_IFREG | libc::S_IFIFO | libc::S_IFSOCK | libc::S_IFCHR | libc::S_IFBLK
                if above.len() == 2 =>
            {
                BackingName::parse(last).map(|(ino, ..)| ino)
            }
            _ => None,
        }
    }
}
