//! Directories for the temporaries of many uploads into one directory.
//!
//! Linux locks a directory for each call that makes or removes a name in it, until the server of the file system has
//! answered. Where a new name is made by link and unlink, an upload takes three such calls; with its temporary in
//! another directory, the lock that all of them wait for is held for the link alone. These directories are in the
//! directory of the final names, so that an upload inherits from there what it would: striping, quotas, access lists.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use rustix::fs::Mode;

use super::names::remove_directory;
use super::resolve::At;
use super::PosixStore;
use crate::store::source::retried;
use crate::store::StorePath;

/// Uploads for which a directory of their own pays, and directories at a time, at least and at most.
const UPLOADS_EACH: usize = 16;
const DIRECTORIES_MIN: usize = 2;
const DIRECTORIES_MAX: usize = 8;

impl PosixStore {
    pub(super) fn make_uploads_apart(&self, directory: &StorePath, uploads: usize) -> Vec<StorePath> {
        let links = self.names.links.load(Ordering::Relaxed);
        if uploads < UPLOADS_EACH || !links || self.names.no_replace.load(Ordering::Relaxed) {
            return Vec::new();
        }
        let Ok(parent) = self.root.directory(directory) else { return Vec::new() };
        let make = |_| {
            let name = self.temporaries.next_upload_directory();
            let path = directory.join(&name).ok()?;
            retried(|| rustix::fs::mkdirat(parent.as_fd(), &name[..], Mode::RWXU)).ok().map(|()| path)
        };
        (0..(uploads / UPLOADS_EACH).clamp(DIRECTORIES_MIN, DIRECTORIES_MAX)).map_while(make).collect()
    }

    pub(super) fn remove_uploads_apart(&self, directories: &[StorePath]) {
        for path in directories {
            if let Ok(place) = self.root.place(path) {
                let _ = remove_directory(At { directory: place.directory.as_fd(), name: place.name });
            }
        }
    }
}
