//! Directories for the temporaries of many uploads into one directory.
//!
//! Linux locks a directory for each call that makes or removes a name in it, until the server of the file system has
//! answered. Where a new name is made by link and unlink, an upload takes three such calls; with its temporary in
//! another directory, the lock that all of them wait for is held for the link alone. These directories are in the
//! directory of the final names, so that an upload inherits from there what it would: striping, quotas, access lists.
//!
//! Some file systems have no links from one directory to another (AFS, BeeGFS), which is tried before the first of them
//! is used. On Lustre a new directory may get another metadata server, where the inodes of the files would stay.

use std::os::fd::{AsFd, BorrowedFd};

use forebay_sys::file_system::FileSystem;
use rustix::fs::{Mode, OFlags};

use super::names::{remove_directory, unlink};
use super::resolve::At;
use super::PosixStore;
use crate::store::source::retried;
use crate::store::{StorePath, UPLOADS_APART_MIN};

/// Directories at a time, at least and at most. A temporary is made
/// and removed while the directory of the final names is locked for one call: two of them keep up with it.
const DIRECTORIES_MIN: usize = 2;
const DIRECTORIES_MAX: usize = 4;

impl PosixStore {
    pub(super) fn make_uploads_apart(&self, directory: &StorePath, uploads: usize) -> Vec<StorePath> {
        if uploads < UPLOADS_APART_MIN || !self.names.are_slow() {
            return Vec::new();
        }
        let Ok(parent) = self.root.directory(directory) else { return Vec::new() };
        let parent = parent.as_fd();
        let make = |_| {
            let name = self.temporaries.next_upload_directory();
            let path = directory.join(&name).ok()?;
            retried(|| rustix::fs::mkdirat(parent, &name[..], Mode::RWXU)).ok()?;
            if *self.links_across.get_or_init(|| self.links_to_parent(parent, &path)) {
                return Some(path);
            }
            let _ = remove_directory(At { directory: parent, name: &name });
            None
        };
        (0..(uploads / UPLOADS_APART_MIN).clamp(DIRECTORIES_MIN, DIRECTORIES_MAX)).map_while(make).collect()
    }

    /// Whether a file in a new directory can get a name in the directory above, and whether its inode is where it would be.
    fn links_to_parent(&self, parent: BorrowedFd<'_>, below: &StorePath) -> bool {
        if FileSystem::of(parent).is_ok_and(|kind| kind == FileSystem::LUSTRE) {
            return false;
        }
        let name = self.temporaries.next_name();
        let Ok(inner) = self.root.directory(below) else { return false };
        let (from, to) =
            (At { directory: inner.as_fd(), name: &name }, At { directory: parent, name: &name });
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let created =
            retried(|| rustix::fs::openat(from.directory, from.name, flags, Mode::RUSR | Mode::WUSR));
        let linked = created.is_ok() && self.names.link(from, to).is_ok();
        for at in [from, to] {
            let _ = unlink(at);
        }
        linked
    }

    pub(super) fn remove_uploads_apart(&self, directories: &[StorePath]) {
        for path in directories {
            if let Ok(place) = self.root.place(path) {
                let _ = remove_directory(At { directory: place.directory.as_fd(), name: place.name });
            }
        }
    }
}
