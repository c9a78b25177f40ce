//! A file in a directory whose file system is being probed.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

/// A file that is removed when this is dropped.
pub(crate) struct ProbeFile<'a> {
    directory: BorrowedFd<'a>,
    name: String,
}

impl<'a> ProbeFile<'a> {
    /// A new file of `bytes` bytes without data.
    pub(crate) fn new(directory: BorrowedFd<'a>, bytes: u64) -> std::result::Result<Self, Errno> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!(".forebay-probe.{}.{number}", std::process::id());
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(directory, &name, flags, Mode::RWXU)?;
        let made = ProbeFile { directory, name };
        rustix::fs::ftruncate(file, bytes)?;
        Ok(made)
    }

    /// Opens another descriptor of it.
    pub(crate) fn open(&self, flags: OFlags) -> std::result::Result<OwnedFd, Errno> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(self.directory, &self.name, flags, Mode::empty())
    }
}

impl Drop for ProbeFile<'_> {
    fn drop(&mut self) {
        let _ = rustix::fs::unlinkat(self.directory, &self.name, AtFlags::empty());
    }
}
