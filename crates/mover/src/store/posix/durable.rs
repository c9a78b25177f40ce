//! Makes uploads durable: all of a batch by one syncfs where that can be relied on, else each by an fsync of its own.
//!
//! syncfs writes the data of all files of a local file system, commits its journal and flushes the medium once. An fsync
//! of each file would flush the medium as often as there are files. What syncfs lacks is a report of which file could not
//! be written, and to a descriptor that is opened after another one got the report it says nothing. So it is called on a
//! *witness*: a descriptor that was opened with the store, before any upload, and used by one call at a time. If that says
//! that nothing has failed, nothing has. A witness that has reported a failure is closed. After that, and when all are in
//! use, each file is opened after the syncfs, and asked for its own errors, which writes and flushes nothing.
//!
//! Elsewhere (NFS, parallel file systems, FUSE) syncfs may promise less than fsync, and each call is a message: there an
//! upload is synced while it is still open, by the thread that made it, many at a time.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_sys::file_system::FileSystem;
use forebay_sys::written;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::resolve::Root;
use crate::store::path::StorePath;
use crate::store::source::retried;

/// Local file systems whose syncfs waits for data and journal, and flushes the medium.
const SYNCED_TOGETHER: [FileSystem; 5] =
    [FileSystem::EXT4, FileSystem::XFS, FileSystem::BTRFS, FileSystem::F2FS, FileSystem::TMPFS];
/// The first kernel whose syncfs reports what its file system could not do.
const KERNEL: (u32, u32) = (5, 17);

/// Witnesses of a store: as many batches as a pass makes durable at a time.
const WITNESSES: usize = 3;

/// How uploads of a store become durable.
#[derive(Debug)]
pub(super) struct Durability {
    /// The device of the files that one syncfs makes durable.
    device: Option<u64>,
    /// Descriptors of the store's root which have reported no failure, and are not in use. A leaf mutex.
    witnesses: Mutex<Vec<OwnedFd>>,
    /// An upload went to another file system, which is mounted in the store.
    has_others: AtomicBool,
}

/// The root of a store, open for syncfs.
fn open_root(root: impl AsFd) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    retried(|| rustix::fs::openat(&root, c".", flags, Mode::empty()))
}

impl Durability {
    /// For the store whose root this is, to which nothing was uploaded yet.
    pub(super) fn of(root: BorrowedFd<'_>) -> Durability {
        let kind = FileSystem::of(root).ok().filter(|kind| SYNCED_TOGETHER.contains(kind));
        let device = kind.filter(|_| is_reported()).and_then(|_| rustix::fs::fstat(root).ok());
        let witnesses = device.iter().flat_map(|_| (0..WITNESSES).map_while(move |_| open_root(root).ok()));
        Durability {
            witnesses: Mutex::new(witnesses.collect()),
            device: device.map(|stat| stat.st_dev),
            has_others: AtomicBool::new(false),
        }
    }

    fn witnesses(&self) -> MutexGuard<'_, Vec<OwnedFd>> {
        self.witnesses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes all files of the file system durable. False if some may have failed all the same.
    fn sync_all(&self, root: impl AsFd) -> Result<bool, Errno> {
        let witness = self.witnesses().pop();
        if let Some(witness) = witness {
            if retried(|| rustix::fs::syncfs(&witness)).is_ok() {
                self.witnesses().push(witness);
                return Ok(true);
            }
        }
        let root = open_root(root)?;
        retried(|| rustix::fs::syncfs(&root)).map(|()| false)
    }

    /// An upload is complete, and still open.
    pub(super) fn uploaded(&self, file: BorrowedFd<'_>, device: u64) -> Result<(), Errno> {
        match self.device {
            Some(own) if own == device => Ok(()),
            // Perhaps on another file system that is mounted in the store.
            _ => {
                self.has_others.store(true, Ordering::Relaxed);
                sync(file)
            }
        }
    }

    /// Makes the names of all uploads durable. False if some may not be.
    pub(super) fn sync_all_directories(&self, root: &Root) -> bool {
        let are_together = self.device.is_some() && !self.has_others.load(Ordering::Relaxed);
        let sync = || self.sync_all(root.directory(&StorePath::root())?);
        are_together && sync().unwrap_or(false)
    }

    /// Makes uploads durable. A failure that concerns one file names it.
    pub(super) fn make_durable<'p>(
        &self,
        root: &Root,
        files: &'p [StorePath],
    ) -> Result<(), (Option<&'p StorePath>, Errno)> {
        if self.device.is_none() || files.is_empty() {
            return Ok(());
        }
        if let [file] = files {
            return sync_file(root, file, sync).map_err(|e| (Some(file), e));
        }
        let together = || self.sync_all(root.directory(&StorePath::root())?);
        if together().map_err(|e| (None, e))? {
            return Ok(());
        }
        let check = |file: BorrowedFd<'_>| {
            retried(|| written::wait(file).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO)))
        };
        files.iter().try_for_each(|file| sync_file(root, file, check).map_err(|e| (Some(file), e)))
    }
}

/// fsync, where a file system that needs none may refuse it.
pub(super) fn sync(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    match retried(|| rustix::fs::fsync(fd)) {
        Err(Errno::INVAL) => Ok(()),
        other => other,
    }
}

/// True if the kernel's syncfs reports failures.
fn is_reported() -> bool {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= KERNEL
}

fn sync_file(
    root: &Root,
    path: &StorePath,
    sync: impl FnOnce(BorrowedFd<'_>) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let fd = match root.open(path, OFlags::RDONLY | OFlags::NONBLOCK) {
        // The mode of the upload keeps its owner from reading it.
        Err(Errno::ACCESS) => root.open(path, OFlags::WRONLY | OFlags::NONBLOCK)?,
        // A symbolic link or a socket: its directory's sync makes it durable.
        Err(Errno::NOTDIR | Errno::NXIO) => return Ok(()),
        other => other?,
    };
    sync(fd.as_fd())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_synced_together_on_a_local_file_system_only() {
        let tmpfs = std::fs::File::open("/dev/shm").unwrap();
        let own = rustix::fs::fstat(&tmpfs).unwrap().st_dev;
        assert_eq!(Durability::of(tmpfs.as_fd()).device, is_reported().then_some(own));
        let proc = std::fs::File::open("/proc").unwrap();
        assert_eq!(Durability::of(proc.as_fd()).device, None);
        let durability =
            Durability { device: Some(own), witnesses: Mutex::default(), has_others: AtomicBool::new(false) };
        let there_is_no_fsync_there = durability.uploaded(proc.as_fd(), own);
        assert_eq!(there_is_no_fsync_there, Ok(()));
    }

    #[test]
    fn witness_that_has_reported_a_failure_is_not_asked_again_and_files_are_asked_instead() {
        let root = std::fs::File::open("/dev/shm").unwrap();
        let durability = Durability::of(root.as_fd());
        if !is_reported() {
            return;
        }
        assert_eq!(durability.sync_all(&root), Ok(true));
        assert_eq!(durability.witnesses().len(), WITNESSES, "it is used again");
        // syncfs refuses such a descriptor, as it would report what could not be written.
        let refused = || {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::fs::openat(&root, c".", flags, Mode::empty()).unwrap()
        };
        durability.witnesses().push(refused());
        assert_eq!(durability.sync_all(&root), Ok(false));
        assert_eq!(durability.witnesses().len(), WITNESSES);
        assert_eq!(durability.sync_all(&root), Ok(true));
        durability.witnesses().clear();
        assert_eq!(durability.sync_all(&root), Ok(false));
        assert!(durability.witnesses().is_empty(), "one that was opened after uploads is none");
    }

    #[test]
    fn directories_are_synced_together_unless_an_upload_went_to_another_file_system() {
        let shm = std::fs::File::open("/dev/shm").unwrap();
        let durability = Durability::of(shm.as_fd());
        let device = rustix::fs::fstat(&shm).unwrap().st_dev;
        let root = Root::new(shm.try_clone().unwrap().into(), false);
        durability.uploaded(shm.as_fd(), device).unwrap();
        assert_eq!(durability.sync_all_directories(&root), is_reported());
        let other = std::fs::File::open("/proc").unwrap();
        durability.uploaded(other.as_fd(), device + 1).unwrap();
        assert!(!durability.sync_all_directories(&root));
        let elsewhere = Durability::of(other.as_fd());
        assert!(!elsewhere.sync_all_directories(&Root::new(other.into(), false)), "not that of a local one");
    }
}
