//! Copies a released file's data from its store into the pool, in parallel ranges. Readers can use each of them when it
//! has arrived (`ranges.rs`).

use std::os::fd::AsFd;
use std::sync::Mutex;

use forebay_client::has_name;
use forebay_types::limits::RANGES_FILE_BYTES_MIN;
use forebay_types::{Code, Entry, Error, Ino, Result, SetAttr, StoreVersion, TimeSet};
use rustix::fs::{fstat, ftruncate, futimens, Timespec, Timestamps};

use super::link::Link;
use super::ranges::{Backing, FileRanges};
use super::stores::{Located, Stores};
use crate::host;
use crate::store::{Store, StoreError, StoreResult};

/// Bytes of a file for which one more thread copies it.
const BYTES_A_THREAD: u64 = 8 << 20;
/// Threads that copy a file, beside the one for readers.
const THREADS_MAX: u64 = 4;
/// How often a restore begins anew because the store has another version by now.
const ATTEMPTS: u32 = 20;
/// How long a rename in the store may take to be recorded, before the restore tries again.
const RENAME_PAUSE: std::time::Duration = std::time::Duration::from_millis(30);

/// Restores a file, if it is not resident.
pub(super) fn restore(link: &Link, stores: &Stores, ranges: &FileRanges, ino: Ino) -> Result<Entry> {
    let what = || format!("cannot restore file {ino} from its backing store");
    for _ in 0..ATTEMPTS {
        let entry = link.inode(ino).map_err(|code| Error::new(code, what()))?;
        if entry.attr.is_resident() {
            return Ok(entry);
        }
        let located = stores.locate(ino)?;
        let Some(placed) = located.placed else { return Err(Error::new(Code::Corrupt, what())) };
        let copied = copy(link, &located, ranges, &entry, &placed.version);
        ranges.stop();
        match copied {
            Ok(entry) if entry.attr.is_resident() => {
                located.at.note_success();
                return Ok(entry);
            }
            Ok(_) => {} // its place was moved meanwhile, or it was released again
            Err(e) => {
                let failed = match e.code() {
                    // What has arrived is of another version.
                    Code::Stale => adopt(link, &located, &entry).map(|()| ranges.begin_anew()).err(),
                    _ => Some(Error::from(e)),
                };
                let Some(e) = failed else { continue };
                if !may_be_elsewhere(link, stores, &located, ino) {
                    located.at.note_failure(&e);
                    return Err(e);
                }
            }
        }
    }
    Err(Error::new(Code::Io, what()).why("the store's file changes all the time"))
}

/// True when a file that was not found in its store may be there under another name, or was removed in the pool: a
/// rename is made in the store before it is recorded.
fn may_be_elsewhere(link: &Link, stores: &Stores, located: &Located, ino: Ino) -> bool {
    match link.inode(ino) {
        Err(Code::NotFound) => return true,
        Err(_) => return false,
        Ok(_) => {}
    }
    host::sleep(RENAME_PAUSE);
    // A store that refuses or fails says nothing of the kind.
    let Ok(found) = located.at.store.look(&located.path) else { return false };
    let is_same = stores.locate(ino).is_ok_and(|now| now.path == located.path);
    let place = link.store_place(ino);
    let is_pending = place.is_ok_and(|place| link.has_pending_in(place.parent).unwrap_or(false));
    found.is_none() && (!is_same || is_pending)
}

/// Takes over the version of a released file that another program wrote in the store.
pub(super) fn refresh(link: &Link, stores: &Stores, entry: &Entry) -> Result<()> {
    if !entry.attr.is_file() || entry.attr.is_resident() {
        return Ok(());
    }
    let located = stores.locate(entry.attr.ino)?;
    let found = located.at.store.look(&located.path).map_err(Error::from)?;
    let known = located.placed.map(|placed| placed.version);
    match found.map(|found| found.version) {
        version if version == known => Ok(()),
        _ => adopt(link, &located, entry),
    }
}

fn copy(
    link: &Link,
    located: &Located,
    ranges: &FileRanges,
    entry: &Entry,
    version: &StoreVersion,
) -> StoreResult<Entry> {
    let ino = entry.attr.ino;
    let pool = |code: Code| StoreError::lasting(code, format!("cannot write file {ino} of the pool"));
    let system = |e: rustix::io::Errno| pool(Code::from_errno(e.raw_os_error()));
    let make = || {
        let file = link.open_to_restore(entry).map_err(pool)?;
        let number = fstat(&file).map_err(system)?.st_ino;
        ftruncate(&file, version.bytes).map_err(system)?;
        Ok::<_, StoreError>(Backing { file, number })
    };
    let backing = match ranges.begin((entry.attr.epoch(), version.bytes), make) {
        // A release that this waited for left the file in the pool.
        Err(e) if e.code() == Code::Interrupted => return link.inode(ino).map_err(pool),
        begun => begun?,
    };
    let file = &backing.file;
    let failed = Mutex::new(None);
    let copy_ranges = |readers_alone: bool| {
        while let Some(bytes) = ranges.next(readers_alone) {
            if let Err(e) = located.at.store.read(&located.path, version, bytes.clone(), file.as_fd()) {
                ranges.fail();
                failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner).get_or_insert(e);
                return;
            }
            if let Some(arrived) = ranges.arrived(bytes) {
                link.range_restored(ino, arrived);
            }
        }
    };
    match version.bytes {
        // An empty file: its version is compared.
        0 => located.at.store.read(&located.path, version, 0..0, file.as_fd())?,
        bytes if bytes <= BYTES_A_THREAD => copy_ranges(false),
        bytes => std::thread::scope(|scope| {
            if bytes >= RANGES_FILE_BYTES_MIN {
                scope.spawn(|| copy_ranges(true));
            }
            for _ in 0..bytes.div_ceil(BYTES_A_THREAD).min(THREADS_MAX) {
                scope.spawn(|| copy_ranges(false));
            }
        }),
    }
    if let Some(e) = failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        return Err(e);
    }
    link.pool.note_arrived(file).map_err(pool)?;
    set_times(file, entry).map_err(system)?;
    // A release that was under way when this began may have unlinked it: then this begins anew.
    if !has_name(file.as_fd()).map_err(pool)? {
        return link.inode(ino).map_err(pool);
    }
    match link.restored(entry.attr.ino, entry.attr.epoch()) {
        Ok(now) => {
            // Times that were set meanwhile.
            if (now.attr.atime, now.attr.mtime) != (entry.attr.atime, entry.attr.mtime) {
                set_times(file, &now).map_err(system)?;
            }
            Ok(now)
        }
        // Another thread was faster.
        Err(Code::Stale) => link.inode(entry.attr.ino).map_err(pool),
        Err(code) => Err(pool(code)),
    }
}

pub(super) fn set_times(file: impl AsFd, entry: &Entry) -> rustix::io::Result<()> {
    let time = |t: forebay_types::Timestamp| Timespec { tv_sec: t.sec, tv_nsec: i64::from(t.nsec) };
    futimens(
        file,
        &Timestamps { last_access: time(entry.attr.atime), last_modification: time(entry.attr.mtime) },
    )
}

/// The store has another version than the pool knew: the released file gets its size and times.
fn adopt(link: &Link, located: &Located, entry: &Entry) -> Result<()> {
    let ino = entry.attr.ino;
    let what = || format!("cannot restore file {ino} from {}", located.path);
    let looked = located.at.store.look(&located.path).map_err(Error::from)?;
    let Some(object) = looked.filter(|object| object.kind == entry.attr.kind()) else {
        return Err(Error::new(Code::Io, what())
            .why("it was removed in the store, not by Forebay")
            .cure("restore it in the store, or remove it in the pool"));
    };
    tracing::info!("{} was changed in the store: the pool takes the store's version", located.path);
    let place = link.store_place(ino).map_err(|code| Error::new(code, what()))?;
    let name = located.path.name().unwrap_or_default();
    let done =
        link.published((place.parent, name), ino, located.epoch, u64::MAX, object.version).and_then(|()| {
            let times = SetAttr {
                size: Some(object.version.bytes),
                atime: TimeSet::At(object.atime),
                mtime: TimeSet::At(object.mtime),
                ..SetAttr::default()
            };
            link.set_attr(ino, times)
        });
    done.map(|_| ()).map_err(|code| Error::new(code, what()))
}
