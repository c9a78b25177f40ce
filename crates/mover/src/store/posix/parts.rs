//! Uploads whose parts several movers write into one file.

use std::os::fd::{AsFd, OwnedFd};

use forebay_types::StoreVersion;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::super::attributes::Attributes;
use super::super::path::StorePath;
use super::super::source::{retried, Source};
use super::apply::Handle;
use super::copy::{copy, CopyFailure, Holes};
use super::described::version_of;
use super::durable::sync;
use super::names::unlink;
use super::PosixStore;

impl PosixStore {
    pub(super) fn make_empty(&self, temporary: &StorePath, bytes: u64) -> Result<(), Errno> {
        let fd = self.root.create(temporary, OFlags::WRONLY, Mode::RUSR | Mode::WUSR)?;
        let sized = retried(|| rustix::fs::ftruncate(&fd, bytes));
        if sized.is_err() {
            if let Ok(place) = self.root.place(temporary) {
                let _ = unlink(place.at());
            }
        }
        sized
    }

    /// The part is synced here, because a sync by another node does not write what this node's kernel has cached.
    pub(super) fn fill_part(&self, temporary: &StorePath, source: &dyn Source) -> Result<(), CopyFailure> {
        let fd = self.open_upload(temporary).map_err(CopyFailure::Destination)?;
        copy(source, 0..source.bytes(), fd.as_fd(), Holes::Skip, &self.copying)?;
        sync(fd.as_fd()).map_err(CopyFailure::Destination)
    }

    pub(super) fn finish_parts(
        &self,
        temporary: &StorePath,
        attributes: &Attributes,
    ) -> Result<StoreVersion, Errno> {
        let fd = self.open_upload(temporary)?;
        let before = retried(|| rustix::fs::fstat(&fd))?;
        let stat = self.set_new(Handle { fd: fd.as_fd(), is_path: false }, &before, attributes)?;
        self.durability.uploaded(fd.as_fd(), stat.st_dev)?;
        Ok(version_of(&stat))
    }

    fn open_upload(&self, temporary: &StorePath) -> Result<OwnedFd, Errno> {
        self.root.open(temporary, OFlags::WRONLY | OFlags::NONBLOCK)
    }
}
