//! Files of a backing store that are read while they are restored.
//!
//! The mount reads a large released file by requests, each of which waits for its own ranges alone
//! (`crates/mount/src/arriving.rs`). The mover fills a backing file that no other program opens before the file is
//! resident, and reports the ranges that have arrived with the number of that backing file. What has arrived in a backing
//! file never leaves it: a restore that begins anew has another one. So a reader that has the backing file of the report
//! open reads nothing that is missing.
//!
//! A file for which the pool has no room is read in the same way, whatever its size: the ranges that the mover cannot put
//! into the pool are read from the store, by messages to the mover of the tree's home ([`Pool::read_from_store`]). All of
//! them are of one version, which the reader chose with the first.
//!
//! In a pool of several nodes such a file is placed on the reader's node first. Where that cannot be, because it is being
//! restored to another node, the reader waits for the whole file.

use std::ops::Range;
use std::os::fd::{FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use forebay_data::BackingName;
use forebay_types::limits::{RANGES_FILE_BYTES_MIN, RESTORE_RESERVE_BYTES, STORE_READ_BYTES_MAX};
use forebay_types::{
    Code, Entry, Ino, Reply, Request, RestoredRange, StorePlace, StoreRead, StoreVersion, FLAG_ATTACHED,
};

use crate::open::open_at;
use crate::pool::Pool;

/// How long a piece of a file is asked for that stays in its store, while the mover does not answer: it may be started
/// again meanwhile.
const STORE_READ_PATIENCE: Duration = Duration::from_secs(60);
/// The pause between two questions.
const STORE_READ_PAUSE: Duration = Duration::from_millis(20);

/// What has arrived of a file.
#[derive(Clone, Copy, Debug)]
pub enum Arrived {
    /// All of it: it is a file like any other.
    Whole(Entry),
    /// A range.
    Range(RestoredRange),
}

#[inline]
fn is_released(entry: &Entry) -> bool {
    let attr = &entry.attr;
    !attr.is_resident() && attr.is_file() && attr.flags & FLAG_ATTACHED != 0
}

impl Pool {
    /// True for a released file that can be read on this node while it is restored: one that is large, or for which
    /// there is no room now.
    #[inline]
    pub fn comes_in_ranges(&self, entry: &Entry) -> bool {
        is_released(entry)
            && self.is_one_here(&entry.layout)
            && (entry.attr.size >= RANGES_FILE_BYTES_MIN || self.lacks_room(entry))
    }

    /// The same for a file that may be placed here first ([`Pool::placed_here`]).
    #[inline]
    pub(crate) fn may_come_in_ranges(&self, entry: &Entry) -> bool {
        match is_released(entry) && entry.attr.size >= RANGES_FILE_BYTES_MIN {
            true => self.is_one_here(&entry.layout) || self.spans_nodes() && self.takes_files(),
            false => self.comes_in_ranges(entry),
        }
    }

    /// True for a released file of this node that does not fit into its target, unless the mover releases others.
    #[cold]
    fn lacks_room(&self, entry: &Entry) -> bool {
        let fits = |here: &crate::attached::Attached| {
            let free = here.free_bytes_of(here.target_of(&entry.layout, 0, 0));
            free.is_none_or(|free| free >= entry.attr.size.saturating_add(RESTORE_RESERVE_BYTES))
        };
        is_released(entry) && self.is_one_here(&entry.layout) && self.attached().is_ok_and(|here| !fits(here))
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

    /// The version of a file that its store has; [`Code::NotFound`] for a file that it does not have.
    #[cold]
    pub fn store_version(&self, ino: Ino) -> Result<StoreVersion, Code> {
        let place = self.request(&Request::StorePlace { ino }, |reply| match reply {
            Reply::Bytes(bytes) => StorePlace::decode(bytes),
            _ => Err(Code::Malformed),
        })?;
        place.placed.map(|placed| placed.version).ok_or(Code::NotFound)
    }

    /// Reads a range of a file from its store, not through the pool. Fewer bytes than those of the range end the file.
    ///
    /// # Errors
    /// [`Code::Stale`] if the store has another version; [`Code::NotFound`] if the file is gone; [`Code::Io`] if the store
    /// or its mover does not answer.
    pub fn read_from_store(
        &self,
        ino: Ino,
        version: &StoreVersion,
        range: Range<u64>,
    ) -> Result<Vec<u8>, Code> {
        let mut data = Vec::new();
        let until = Instant::now() + STORE_READ_PATIENCE;
        let mut offset = range.start;
        while offset < range.end {
            let bytes = (range.end - offset).min(STORE_READ_BYTES_MAX as u64);
            let read = StoreRead { ino, version: *version, offset, bytes: bytes as u32 };
            let request = Request::AskMover { node: ino.birth_node(), message: &read.encode()? };
            let before = data.len();
            let answer = self.request(&request, |reply| match reply {
                Reply::Bytes(answer) => StoreRead::decode_answer(answer).map(|more| data.extend(more)),
                _ => Err(Code::Malformed),
            });
            match answer {
                Ok(()) => {
                    let got = (data.len() - before) as u64;
                    offset += got;
                    if got < bytes {
                        break;
                    }
                }
                // It reads for many, the store is slow, or it died with the message and is started again.
                Err(Code::Busy | Code::NoResources | Code::TimedOut) if Instant::now() < until => {
                    std::thread::sleep(STORE_READ_PAUSE);
                }
                Err(Code::Busy | Code::NoResources | Code::TimedOut) => return Err(Code::Io),
                Err(code) => return Err(code),
            }
        }
        Ok(data)
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
