//! Paths to descriptors, without ever following a symbolic link or leaving the store.
//!
//! The root is opened once. openat2 resolves beneath it in one call; kernels and sandboxes without openat2 get a walk
//! that opens each directory relative to the one before, refusing links. Both are safe against a directory that another
//! process replaces by a link meanwhile.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::super::path::StorePath;
use super::super::source::retried;

/// Repetitions of a resolution that the kernel could not prove safe because of a rename elsewhere (EAGAIN).
const TRIES: usize = 32;

/// The root of a store, an O_PATH descriptor.
#[derive(Debug)]
pub(super) struct Root {
    fd: OwnedFd,
    walks: AtomicBool,
}

/// A directory, opened for paths relative to it.
#[derive(Debug)]
pub(super) enum Directory<'a> {
    Borrowed(BorrowedFd<'a>),
    Opened(OwnedFd),
}

impl AsFd for Directory<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Directory::Borrowed(fd) => *fd,
            Directory::Opened(fd) => fd.as_fd(),
        }
    }
}

/// A name in an opened directory.
#[derive(Debug)]
pub(super) struct Place<'a> {
    pub(super) directory: Directory<'a>,
    pub(super) name: &'a [u8],
}

impl Place<'_> {
    pub(super) fn at(&self) -> At<'_> {
        At { directory: self.directory.as_fd(), name: self.name }
    }
}

/// A borrowed [`Place`].
#[derive(Clone, Copy, Debug)]
pub(super) struct At<'a> {
    pub(super) directory: BorrowedFd<'a>,
    pub(super) name: &'a [u8],
}

const O_DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

impl Root {
    pub(super) fn new(fd: OwnedFd, walks: bool) -> Root {
        Root { fd, walks: AtomicBool::new(walks) }
    }

    /// Opens an object. `flags` get O_CLOEXEC and O_NOFOLLOW; with O_PATH a symbolic link at the end is opened itself.
    pub(super) fn open(&self, path: &StorePath, flags: OFlags) -> Result<OwnedFd, Errno> {
        // openat2 refuses flags that mean nothing to O_PATH.
        let no_terminal = if flags.contains(OFlags::PATH) { OFlags::empty() } else { OFlags::NOCTTY };
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW | no_terminal;
        if !self.walks.load(Ordering::Relaxed) {
            match self.open_beneath(path, flags, Mode::empty()) {
                Err(Errno::NOSYS) => self.walks.store(true, Ordering::Relaxed),
                other => return other,
            }
        }
        self.open_by_walk(path, flags)
    }

    /// Creates a file that must not exist, and opens it.
    pub(super) fn create(&self, path: &StorePath, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
        let flags = flags | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        if !self.walks.load(Ordering::Relaxed) {
            match self.open_beneath(path, flags, mode) {
                Err(Errno::NOSYS) => self.walks.store(true, Ordering::Relaxed),
                other => return other,
            }
        }
        let place = self.place(path)?;
        retried(|| rustix::fs::openat(&place.directory, place.name, flags, mode))
    }

    fn open_beneath(&self, path: &StorePath, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
        let bytes = if path.is_root() { b"." } else { path.as_bytes() };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let mut tries = 0;
        loop {
            match retried(|| rustix::fs::openat2(&self.fd, bytes, flags, mode, resolve)) {
                Err(Errno::AGAIN) if tries < TRIES => tries += 1,
                // A link on the way, or at the end of an open that is not O_PATH.
                Err(Errno::LOOP) => return Err(Errno::NOTDIR),
                other => return other,
            }
        }
    }

    fn open_by_walk(&self, path: &StorePath, flags: OFlags) -> Result<OwnedFd, Errno> {
        let open = |at: BorrowedFd<'_>, name: &[u8], flags| {
            let opened = retried(|| rustix::fs::openat(at, name, flags, Mode::empty()));
            opened.map_err(|e| if e == Errno::LOOP { Errno::NOTDIR } else { e })
        };
        let Some((parent, name)) = path.split() else { return open(self.fd.as_fd(), b".", flags) };
        let mut directory = None;
        for component in parent.split(|&b| b == b'/').filter(|component| !component.is_empty()) {
            let at = directory.as_ref().map_or(self.fd.as_fd(), AsFd::as_fd);
            directory = Some(open(at, component, O_DIRECTORY | OFlags::NOFOLLOW)?);
        }
        open(directory.as_ref().map_or(self.fd.as_fd(), AsFd::as_fd), name, flags)
    }

    /// Opens a directory for paths relative to it.
    pub(super) fn directory(&self, path: &StorePath) -> Result<Directory<'_>, Errno> {
        if path.is_root() {
            return Ok(Directory::Borrowed(self.fd.as_fd()));
        }
        Ok(Directory::Opened(self.open(path, O_DIRECTORY)?))
    }

    /// Opens the directory of a path. EISDIR for the root, which has none.
    pub(super) fn place<'a>(&'a self, path: &'a StorePath) -> Result<Place<'a>, Errno> {
        let (Some(parent), Some(name)) = (path.parent(), path.name()) else { return Err(Errno::ISDIR) };
        Ok(Place { directory: self.directory(&parent)?, name })
    }
}
