//! Holes of a file of any layout: finding its data, and turning a range into a hole.
//!
//! Other nodes are not queried for holes: all bytes of their backing files count as data, which lseek(2) allows.

use std::os::fd::{AsRawFd, RawFd};

use forebay_types::Code;

use crate::errno;
use crate::file::{File, Stripe};

/// The result of lseek(2) with `whence`; `None` if `at` is behind the last data or the end.
fn seek(fd: RawFd, at: u64, whence: i32) -> Result<Option<u64>, Code> {
    // SAFETY: plain system call; the descriptor is ours, and its own offset is not used.
    let found = unsafe { libc::lseek(fd, at as i64, whence) };
    if found >= 0 {
        return Ok(Some(found as u64));
    }
    // SAFETY: errno of this thread.
    if unsafe { *libc::__errno_location() } == libc::ENXIO {
        return Ok(None);
    }
    Err(errno::last())
}

impl File {
    /// The first byte at or after `offset` that is not in a hole.
    ///
    /// # Errors
    /// [`Code::NoDevice`] (ENXIO) when there is none.
    pub fn seek_data(&self, offset: u64) -> Result<u64, Code> {
        let size = self.size()?;
        let mut found = None;
        for (component, stripe) in self.layout().stripes() {
            // The offset in this backing file that corresponds to `offset`.
            let at = self.layout().backing_bytes(component, stripe, offset);
            let data = match self.stripe_at(self.index_of(component, stripe)) {
                Stripe::Local(fd) => seek(fd.as_raw_fd(), at, libc::SEEK_DATA)?,
                Stripe::Remote(_) => Some(at),
            };
            let place = data.map(|data| self.layout().size_from(component, stripe, data + 1) - 1);
            found = found.into_iter().chain(place).min();
        }
        found.filter(|found| *found < size).ok_or(Code::NoDevice)
    }

    /// The first byte at or after `offset` that is in a hole. The file's end counts as a hole.
    ///
    /// # Errors
    /// [`Code::NoDevice`] (ENXIO) when `offset` is not within the file.
    pub fn seek_hole(&self, offset: u64) -> Result<u64, Code> {
        let size = self.size()?;
        if offset >= size {
            return Err(Code::NoDevice);
        }
        let mut at = offset;
        while at < size {
            let extent = self.layout().locate(at, size - at);
            let Stripe::Local(fd) = self.stripe_at(self.index_of(extent.component, extent.stripe)) else {
                at += extent.len;
                continue;
            };
            // The backing file ends before this extent, which is therefore a hole.
            let hole = seek(fd.as_raw_fd(), extent.offset, libc::SEEK_HOLE)?.unwrap_or(extent.offset);
            if hole < extent.offset + extent.len {
                return Ok(at + (hole - extent.offset));
            }
            at += extent.len;
        }
        Ok(size)
    }

    /// Turns a range into a hole, which reads as zeros and takes no space. The file's size does not change.
    pub fn punch(&self, offset: u64, bytes: u64) -> Result<(), Code> {
        let end = offset.checked_add(bytes).ok_or(Code::Invalid)?.min(forebay_types::limits::FILE_BYTES_MAX);
        if bytes == 0 {
            return Err(Code::Invalid);
        }
        match end.saturating_sub(offset) {
            0 => Ok(()),
            bytes => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                self.allocate_range(mode, offset, bytes)
            }
        }
    }
}
