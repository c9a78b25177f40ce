//! Copies a released file's data from its store into the pool, in parallel ranges.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;

use forebay_client::has_name;
use forebay_types::{Code, Entry, Error, Ino, Result, SetAttr, StoreVersion, TimeSet};
use rustix::fs::{ftruncate, futimens, Timespec, Timestamps};

use super::link::Link;
use super::stores::{Located, Stores};
use crate::host;
use crate::store::{Store, StoreError, StoreResult};

/// Bytes of a range: one call of the store.
const RANGE_BYTES: u64 = 8 << 20;
/// Ranges of one file that are copied at a time.
const RANGES_AT_ONCE: u64 = 4;
/// How often a restore begins anew because the store has another version by now.
const ATTEMPTS: u32 = 20;
/// How long a rename in the store may take to be recorded, before the restore tries again.
const RENAME_PAUSE: std::time::Duration = std::time::Duration::from_millis(30);

/// Restores a file, if it is not resident.
pub(super) fn restore(link: &Link, stores: &Stores, ino: Ino) -> Result<Entry> {
    let what = || format!("cannot restore file {ino} from its backing store");
    for _ in 0..ATTEMPTS {
        let entry = link.inode(ino).map_err(|code| Error::new(code, what()))?;
        if entry.attr.is_resident() {
            return Ok(entry);
        }
        let located = stores.locate(ino)?;
        let Some(placed) = located.placed else { return Err(Error::new(Code::Corrupt, what())) };
        match copy(link, &located, &entry, &placed.version) {
            Ok(entry) if entry.attr.is_resident() => {
                located.at.note_success();
                return Ok(entry);
            }
            Ok(_) => {} // its place was moved meanwhile, or it was released again
            Err(e) => {
                let failed = match e.code() {
                    Code::Stale => adopt(link, &located, &entry).err(),
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

fn copy(link: &Link, located: &Located, entry: &Entry, version: &StoreVersion) -> StoreResult<Entry> {
    let pool =
        |code: Code| StoreError::lasting(code, format!("cannot write file {} of the pool", entry.attr.ino));
    let file = link.open_to_restore(entry).map_err(pool)?;
    let system = |e: rustix::io::Errno| pool(Code::from_errno(e.raw_os_error()));
    ftruncate(&file, version.bytes).map_err(system)?;
    let (next, failed) = (AtomicU64::new(0), Mutex::new(None));
    let ranges = version.bytes.div_ceil(RANGE_BYTES);
    let copy_ranges = || loop {
        let range = next.fetch_add(1, Ordering::Relaxed);
        if range >= ranges {
            return;
        }
        let (start, end) = (range * RANGE_BYTES, ((range + 1) * RANGE_BYTES).min(version.bytes));
        if let Err(e) = located.at.store.read(&located.path, version, start..end, file.as_fd()) {
            next.store(ranges, Ordering::Relaxed);
            failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner).get_or_insert(e);
            return;
        }
    };
    match ranges {
        // An empty file: its version is compared.
        0 => located.at.store.read(&located.path, version, 0..0, file.as_fd())?,
        1 => copy_ranges(),
        _ => drop(host::for_each(vec![(); ranges.min(RANGES_AT_ONCE) as usize], |()| copy_ranges())),
    }
    if let Some(e) = failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        // What was copied takes no space until the next attempt. No program has the file open.
        let _ = ftruncate(&file, 0);
        return Err(e);
    }
    set_times(&file, entry).map_err(system)?;
    // A release that was under way when this began may have unlinked it: then this begins anew.
    if !has_name(file.as_fd()).map_err(pool)? {
        return link.inode(entry.attr.ino).map_err(pool);
    }
    match link.restored(entry.attr.ino, entry.attr.epoch()) {
        Ok(now) => {
            // Times that were set meanwhile.
            if (now.attr.atime, now.attr.mtime) != (entry.attr.atime, entry.attr.mtime) {
                set_times(&file, &now).map_err(system)?;
            }
            Ok(now)
        }
        // Another thread was faster.
        Err(Code::Stale) => link.inode(entry.attr.ino).map_err(pool),
        Err(code) => Err(pool(code)),
    }
}

fn set_times(file: impl AsFd, entry: &Entry) -> rustix::io::Result<()> {
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
