//! Files of a backing store that are read while they are restored.
//!
//! The mount reads a large released file by requests, each of which waits for its own ranges alone
//! (`crates/mount/src/arriving.rs`). The mover fills a backing file that no other program opens before the file is
//! resident, and reports the ranges that have arrived with the number of that backing file. What has arrived in a backing
//! file never leaves it: a restore that begins anew has another one. So a reader that has the backing file of the report
//! open reads nothing that is missing.
//!
//! In a pool of several nodes each reader waits for the whole file.

use std::os::fd::{FromRawFd, OwnedFd};

use forebay_data::BackingName;
use forebay_types::limits::RANGES_FILE_BYTES_MIN;
use forebay_types::{Code, Entry, Ino, Reply, Request, RestoredRange, FLAG_ATTACHED};

use crate::open::open_at;
use crate::pool::Pool;

/// What has arrived of a file.
#[derive(Clone, Copy, Debug)]
pub enum Arrived {
    /// All of it: it is a file like any other.
    Whole(Entry),
    /// A range.
    Range(RestoredRange),
}

impl Pool {
    /// True for a released file that can be read while it is restored.
    #[inline]
    pub fn comes_in_ranges(&self, entry: &Entry) -> bool {
        let attr = &entry.attr;
        !attr.is_resident()
            && attr.is_file()
            && attr.flags & FLAG_ATTACHED != 0
            && attr.size >= RANGES_FILE_BYTES_MIN
            && !self.spans_nodes()
            && self.is_one_here(&entry.layout)
    }

    /// Has a file restored, and waits for the range that contains a byte. Errors as for [`Pool::restore`].
    #[cold]
    pub fn restore_range(&self, ino: Ino, offset: u64) -> Result<Arrived, Code> {
        loop {
            let asked = self.request(&Request::RestoreRange { ino, offset }, |reply| match reply {
                Reply::Bytes(bytes) => RestoredRange::decode(bytes).map(Arrived::Range),
                Reply::Entry(entry) => Ok(Arrived::Whole(entry)),
                _ => Err(Code::Malformed),
            });
            match asked {
                Ok(Arrived::Whole(entry)) if !entry.attr.is_resident() => {}
                Err(Code::NotFound) => return Err(Code::Stale),
                result => return result,
            }
        }
    }

    /// Opens the backing file of a file that is being restored, for reading what has arrived. [`Code::NotFound`] if the
    /// restore has begun anew meanwhile, or has ended without success.
    pub fn open_arriving(&self, entry: &Entry) -> Result<OwnedFd, Code> {
        let name = BackingName::new(entry.attr.ino, 0, 0);
        let target = self.attached()?.target_of(&entry.layout, 0, 0);
        let fd = open_at(target, name.as_c_str(), libc::O_RDONLY | libc::O_CLOEXEC)?;
        // SAFETY: the descriptor is new and ours.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}
