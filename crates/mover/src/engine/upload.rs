//! Copies a file's data to its store under a temporary name, without stopping the programs that use it.
//!
//! The copy is made under read leases on all backing files: no program has the file open for writing. `BeginDrain` has
//! published before, for many files at a time, that the file is being copied: every open for writing after that marks the
//! file, which begins a new epoch, and then the publication does not make the file clean. An open before that is over
//! when the leases are granted, and what was written is in the copy. So leases need not be held longer than the copy
//! takes. A program that opens the file for writing meanwhile breaks a lease: the copy ends at its next read, and the
//! program goes on.
//!
//! A file that stays open can be copied without leases. Such a copy has all that was written before it began, and perhaps
//! part of what was written since. It makes those data durable, but not the file clean: its epoch is unknown.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use forebay_client::{File, LeaseKind};
use forebay_types::{
    Code, Entry, Error, Ino, Layout, ReportOutcome, Result, StoreVersion, Timestamp, EPOCH_UNKNOWN,
};

use super::hold::Held;
use super::link::Link;
use super::parts;
use super::peers::Peers;
use super::wanted::{OpenFiles, WantedUpload};
use crate::store::{is_dense, Attributes, Source, Store, StorePath};

/// Bytes of a file that the kernel copies by itself: longer files are read piece by piece, so that a broken lease is
/// seen.
const BY_KERNEL_BYTES: u64 = 4 << 20;

/// Backing files under leases, as the bytes of one file.
struct Leased<'a> {
    held: &'a Held<'a>,
    /// The whole file, if other nodes have parts of it.
    whole: Option<File>,
    layout: Layout,
    bytes: u64,
    /// It has no holes, as far as is known: none are looked for.
    is_dense: bool,
}

impl Leased<'_> {
    fn fd(&self, index: usize) -> std::result::Result<BorrowedFd<'_>, Code> {
        self.held.here().files().nth(index).map(AsFd::as_fd).ok_or(Code::Io)
    }
}

fn code(e: rustix::io::Errno) -> Code {
    Code::from_errno(e.raw_os_error())
}

impl Source for Leased<'_> {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn next_data(&self, within: Range<u64>) -> std::result::Result<Option<Range<u64>>, Code> {
        match self.layout.is_single() {
            _ if within.is_empty() => Ok(None),
            true if !self.is_dense => crate::store::next_data(self.fd(0)?, within),
            _ => Ok(Some(within)),
        }
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::result::Result<usize, Code> {
        // A file that is read at once is looked at when it was read. Without leases always true.
        let is_all = offset == 0 && self.bytes <= buffer.len() as u64;
        if !is_all && !self.held.is_undisturbed() {
            return Err(Code::Busy);
        }
        let room = (buffer.len() as u64).min(self.bytes.saturating_sub(offset)) as usize;
        let buffer = &mut buffer[..room];
        if self.layout.is_single() {
            return rustix::io::pread(self.fd(0)?, buffer, offset).map_err(code);
        }
        if buffer.is_empty() {
            return Ok(0);
        }
        if let Some(file) = &self.whole {
            return file.read_at(buffer, offset);
        }
        let extent = self.layout.locate(offset, buffer.len() as u64);
        let at = (extent.component, extent.stripe);
        let index = self.layout.stripes().position(|stripe| stripe == at).ok_or(Code::Io)?;
        let buffer = &mut buffer[..extent.len as usize];
        let n = rustix::io::pread(self.fd(index)?, &mut *buffer, extent.offset).map_err(code)?;
        // Behind the end of a backing file the file has zeros.
        buffer[n..].fill(0);
        Ok(buffer.len())
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self.layout.is_single() && self.bytes <= BY_KERNEL_BYTES {
            true => self.fd(0).ok(),
            false => None,
        }
    }
}

/// Attributes that the store's object gets.
pub(super) fn attributes_of(link: &Link, entry: &Entry) -> Result<Attributes> {
    attributes_and_bytes(link, entry).map(|(attributes, ..)| attributes)
}

/// The same, the bytes of a file's data, and whether it has no holes, as far as is known.
fn attributes_and_bytes(link: &Link, entry: &Entry) -> Result<(Attributes, u64, bool)> {
    let failed = |code| Error::new(code, format!("cannot read the attributes of inode {}", entry.attr.ino));
    let st = link.pool.stat_entry(entry).map_err(failed)?;
    let time = |sec: i64, nsec: i64| Timestamp { sec, nsec: nsec as u32 };
    let attributes = Attributes {
        mode: Some(entry.attr.mode & 0o7777),
        uid: Some(entry.attr.uid),
        gid: Some(entry.attr.gid),
        atime: Some(time(st.st_atime, st.st_atime_nsec)),
        mtime: Some(time(st.st_mtime, st.st_mtime_nsec)),
        xattrs: match entry.attr.is_file() || entry.attr.is_directory() {
            true => Some(link.xattrs(entry).map_err(failed)?),
            false => None,
        },
    };
    let bytes = st.st_size as u64;
    Ok((attributes, bytes, is_dense(bytes, st.st_blocks)))
}

/// An upload that is to be published.
#[derive(Debug)]
pub(super) struct Upload {
    pub(super) temporary: StorePath,
    pub(super) version: StoreVersion,
    /// The epoch of the data in it; [`EPOCH_UNKNOWN`] for a copy of a file that was open.
    pub(super) epoch: u64,
    file_epoch: u64,
    pub(super) bytes: u64,
}

impl Upload {
    /// A number for the name of a version that is published beside another.
    pub(super) fn number(&self) -> u64 {
        self.file_epoch
    }
}

/// Why a file was not uploaded.
#[derive(Debug)]
pub(super) enum NotUploaded {
    /// A program writes it, or it was removed or released: later.
    Later,
    /// The store or the pool failed.
    Failed(Error),
}

impl From<Error> for NotUploaded {
    fn from(e: Error) -> NotUploaded {
        NotUploaded::Failed(e)
    }
}

/// Uploads a file, with a temporary in the directory `apart`. `begun` is the outcome of its `BeginDrain`.
pub(super) fn upload(
    link: &Link,
    peers: &Peers,
    (root, store): (Ino, &dyn Store),
    (WantedUpload { entry, open_files, .. }, apart): (&WantedUpload, &StorePath),
    begun: ReportOutcome,
) -> std::result::Result<Upload, NotUploaded> {
    let later = |code: Code| match code {
        Code::Busy | Code::Stale | Code::NotFound | Code::Interrupted | Code::TimedOut => NotUploaded::Later,
        code => Error::new(code, format!("cannot read file {} of the pool", entry.attr.ino)).into(),
    };
    let epoch = begun.map_err(later)?;
    let held = Held::take(link, peers, entry, LeaseKind::Read);
    if held.as_ref().is_err_and(|code| *code == Code::Busy) {
        // It is not being copied, as a file that can become clean: so it does not count as such.
        link.mark_dirty(entry.attr.ino).map_err(later)?;
    }
    let (held, is_open) = match held {
        Ok(held) => (held, false),
        Err(Code::Busy) if *open_files == OpenFiles::Copied => {
            (Held::take(link, peers, entry, LeaseKind::None).map_err(later)?, true)
        }
        Err(code) => return Err(later(code)),
    };
    let now = link.inode(entry.attr.ino).map_err(later)?;
    // Of another epoch: a program has written since.
    let is_begun = is_open || now.attr.epoch() == epoch;
    if now.layout != entry.layout || !now.attr.is_resident() || !is_begun {
        return Err(NotUploaded::Later);
    }
    let (attributes, bytes, is_dense) = attributes_and_bytes(link, &now)?;
    let temporary = store.temporaries().next(apart);
    let uploaded = if parts::are_for(store, &held, bytes) {
        let (temporary, attributes, layout) = (&temporary, &attributes, now.layout);
        parts::upload(peers, store, &held, &parts::Whole { root, temporary, layout, bytes, attributes })
    } else {
        let whole = match link.pool.is_here(&now.layout) {
            true => None,
            false => Some(link.pool.open_file(&now, false).map_err(later)?),
        };
        let source = Leased { held: &held, whole, layout: now.layout, bytes, is_dense };
        store.upload(&temporary, &source, &attributes)
    };
    let is_whole = held.is_whole();
    drop(held);
    match uploaded {
        Ok(version) if is_whole => {
            let epoch = if is_open { EPOCH_UNKNOWN } else { now.attr.epoch() };
            Ok(Upload { temporary, version, epoch, file_epoch: now.attr.epoch(), bytes })
        }
        Ok(_) => {
            let _ = store.discard(&temporary);
            Err(NotUploaded::Later)
        }
        Err(e) => {
            let _ = store.discard(&temporary);
            match is_whole {
                true => Err(Error::from(e).into()),
                false => Err(NotUploaded::Later),
            }
        }
    }
}
