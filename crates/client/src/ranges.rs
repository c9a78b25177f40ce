//! Files of a backing store that are read while they are restored.
//!
//! The mount reads a large released file by requests, each of which waits for its own ranges alone
//! (`crates/mount/src/arriving.rs`). The mover fills a backing file that no other program opens before the file is
//! resident, and reports the ranges that have arrived with the number of that backing file. What has arrived in a backing
//! file never leaves it: a restore that begins anew has another one. So a reader that has the backing file of the report
//! open reads nothing that is missing.
//!
//! In a pool of several nodes such a file is placed on the reader's node first. Where that cannot be, because it is being
//! restored to another node, the reader waits for the whole file.

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

#[inline]
fn is_long_and_released(entry: &Entry) -> bool {
    let attr = &entry.attr;
    !attr.is_resident()
        && attr.is_file()
        && attr.flags & FLAG_ATTACHED != 0
        && attr.size >= RANGES_FILE_BYTES_MIN
}

impl Pool {
    /// True for a released file that can be read on this node while it is restored.
    #[inline]
    pub fn comes_in_ranges(&self, entry: &Entry) -> bool {
        is_long_and_released(entry) && self.is_one_here(&entry.layout)
    }

    /// The same for a file that may be placed here first ([`Pool::placed_here`]).
    #[inline]
    pub(crate) fn may_come_in_ranges(&self, entry: &Entry) -> bool {
        is_long_and_released(entry)
            && (self.is_one_here(&entry.layout) || self.spans_nodes() && self.takes_files())
    }

    /// Has a released file restored to this node when it is restored, if this is one of several nodes with targets,
    /// unless a restore to another one is under way. [`Code::Stale`] if the file is gone.
    #[cold]
    pub(crate) fn placed_here(&self, entry: &Entry) -> Result<Entry, Code> {
        if !self.spans_nodes() || !self.takes_files() || self.is_here(&entry.layout) {
            return Ok(*entry);
        }
        let ino = entry.attr.ino;
        let placed = match self.ask_entry(&Request::Relocate { ino, node: self.node()? }) {
            Err(Code::Stale | Code::Busy) => self.get_attr(ino),
            placed => placed,
        };
        placed.map_err(|code| if code == Code::NotFound { Code::Stale } else { code })
    }

    /// The entry of a file that is about to be read, in a pool of several nodes: a released file is restored, or placed
    /// here if it can be read on this node while it is restored. Errors as for [`Pool::resident`].
    pub fn near(&self, entry: &Entry) -> Result<Entry, Code> {
        if self.recalls() && self.may_come_in_ranges(entry) {
            let placed = self.placed_here(entry)?;
            if self.comes_in_ranges(&placed) {
                return Ok(placed);
            }
        }
        self.resident_for(entry, true)
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
