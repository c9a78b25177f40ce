//! Copies a released file's data from its store into the pool, in parallel ranges. Readers can use each of them when it
//! has arrived (`ranges.rs`).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;

use forebay_client::has_name;
use forebay_types::limits::{RANGES_FILE_BYTES_MIN, RESTORE_RESERVE_BYTES};
use forebay_types::{Code, Entry, Error, Ino, Result, SetAttr, StoreVersion, TimeSet, CHANGES_ALL};
use rustix::fs::{fstat, fstatvfs, ftruncate, futimens, Timespec, Timestamps};

use super::link::Link;
use super::ranges::{Backing, Copier, FileRanges};
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
            // It is the pool that lacks room. Its store has not failed.
            Err(e) if e.code() == Code::NoSpace => return Err(e.into()),
            Err(e) => {
                let is_of_pool = e.is_of_pool;
                let failed = match e.code() {
                    // What has arrived is of another version.
                    Code::Stale => match adopt(link, &located, &entry) {
                        // Another thread was faster, or the file was released again or has another place.
                        Ok(_) | Err(Error { code: Code::Stale, .. }) => {
                            ranges.begin_anew();
                            None
                        }
                        Err(e) => Some(e),
                    },
                    _ => Some(Error::from(e)),
                };
                let Some(e) = failed else { continue };
                if !may_be_elsewhere(link, stores, &located, ino) {
                    if !is_of_pool {
                        stores.check(&located.at)?;
                        located.at.note_failure(&e);
                    }
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

/// Takes over the version of a released file that another program wrote in the store. True if a name of the file has left
/// it instead: its directory is to be listed.
pub(super) fn refresh(link: &Link, stores: &Stores, entry: &Entry) -> Result<bool> {
    let (mut entry, mut attempts) = (*entry, 0);
    while entry.attr.is_file() && !entry.attr.is_resident() {
        let ino = entry.attr.ino;
        let located = stores.locate(ino)?;
        let found = located.at.store.look(&located.path).map_err(Error::from)?;
        let known = located.placed.map(|placed| placed.version);
        if found.map(|found| found.version) == known {
            break;
        }
        attempts += 1;
        match adopt(link, &located, &entry) {
            // It was restored or released meanwhile, or another thread has taken a version over.
            Err(e) if e.code == Code::Stale && attempts < ATTEMPTS => {
                let failed = |code| Error::new(code, format!("cannot refresh file {ino}"));
                entry = link.inode(ino).map_err(failed)?;
            }
            Err(e) => return stores.check(&located.at).and(Err(e)),
            adopted => return adopted,
        }
    }
    Ok(false)
}

/// The same for one name of a file. If it is one of several, and the store has another file there than at the last copy,
/// it leaves the file.
pub(super) fn refresh_name(
    link: &Link,
    stores: &Stores,
    (directory, name): (Ino, &[u8]),
    entry: &Entry,
) -> Result<bool> {
    if entry.attr.nlink < 2 {
        return refresh(link, stores, entry);
    }
    let failed = |code| Error::new(code, format!("cannot refresh {}", link.path(directory, name)));
    let copy = match stores.locate(entry.attr.ino) {
        Err(e) if e.code == Code::NotFound => return Ok(false), // not in the store yet
        located => located?,
    };
    let above = stores.locate(directory)?;
    let path = above.path.join(name).map_err(failed)?;
    if path == copy.path {
        return refresh(link, stores, entry);
    }
    let found = above.at.store.look(&path).map_err(Error::from)?;
    match (copy.placed, found) {
        (Some(placed), Some(found)) if is_another_file(&placed.version, &found.version) => {}
        _ => return Ok(false),
    }
    match leave(link, (directory, name)) {
        Ok(()) => Ok(true),
        // The mover is to link it once more, or meets the other file there.
        Err(Code::Busy | Code::NotFound) => Ok(false),
        Err(code) => Err(failed(code)),
    }
}

/// True if the store tells files apart, and these are two.
fn is_another_file(known: &StoreVersion, found: &StoreVersion) -> bool {
    known.is_same_file(known) && !known.is_same_file(found)
}

/// A name leaves a file that has others: the store has another program's file there.
fn leave(link: &Link, (directory, name): (Ino, &[u8])) -> std::result::Result<(), Code> {
    link.pool.forget_in(directory, name, true, false)?;
    tracing::info!("{} is another file in the store by now", link.path(directory, name));
    Ok(())
}

fn copy(
    link: &Link,
    located: &Located,
    ranges: &FileRanges,
    entry: &Entry,
    version: &StoreVersion,
) -> StoreResult<Entry> {
    let ino = entry.attr.ino;
    let pool = |code: Code| StoreError::of_pool(code, format!("cannot write file {ino} of the pool"));
    let system = |e: rustix::io::Errno| pool(Code::from_errno(e.raw_os_error()));
    let make = || {
        let file = link.open_to_restore(entry).map_err(pool)?;
        let number = fstat(&file).map_err(system)?.st_ino;
        ftruncate(&file, version.bytes).map_err(system)?;
        Ok::<_, StoreError>(Backing { file, number })
    };
    let backing = match ranges.begin((entry.attr.epoch(), *version), make) {
        // A release that this waited for left the file in the pool.
        Err(e) if e.code() == Code::Interrupted => return link.inode(ino).map_err(pool),
        begun => begun?,
    };
    let file = &backing.file;
    let failed = Mutex::new(None);
    let copy_ranges = |copier: Copier| {
        while let Some(bytes) = ranges.next(copier) {
            let read = check_room(entry, file, bytes.end - bytes.start)
                .and_then(|()| located.at.store.read(&located.path, version, bytes.clone(), file.as_fd()));
            if let Err(e) = read {
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
        bytes if bytes <= BYTES_A_THREAD => copy_ranges(Copier::First),
        bytes => std::thread::scope(|scope| {
            if bytes >= RANGES_FILE_BYTES_MIN {
                scope.spawn(|| copy_ranges(Copier::ForReaders));
            }
            for _ in 1..bytes.div_ceil(BYTES_A_THREAD).min(THREADS_MAX) {
                scope.spawn(|| copy_ranges(Copier::Other));
            }
            copy_ranges(Copier::First);
        }),
    }
    if let Some(e) = failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        return Err(e);
    }
    report(link, file, entry).map_err(pool)
}

/// All data of a file have arrived in a backing file: records that the file is resident. Returns the file as it is then,
/// which is not resident if the restore is to begin anew.
fn report(link: &Link, file: &OwnedFd, entry: &Entry) -> std::result::Result<Entry, Code> {
    let mut entry = *entry;
    for _ in 0..ATTEMPTS {
        if !complete(link, file, &entry)? {
            break;
        }
        match link.restored(&entry) {
            // A program has set its times meanwhile.
            Err(Code::Busy) => {
                let now = link.inode(entry.attr.ino)?;
                if now.attr.is_resident() || now.attr.epoch() != entry.attr.epoch() {
                    return Ok(now);
                }
                entry = now;
            }
            // Another thread was faster.
            Err(Code::Stale) => break,
            restored => return restored,
        }
    }
    link.inode(entry.attr.ino)
}

/// Leaves the reserve to small files, and to operations that free space: a range of a large one is not copied then.
fn check_room(entry: &Entry, file: &OwnedFd, bytes: u64) -> StoreResult<()> {
    if entry.attr.size <= RESTORE_RESERVE_BYTES {
        return Ok(());
    }
    match fstatvfs(file) {
        Ok(space) if space.f_bavail * space.f_frsize < bytes + RESTORE_RESERVE_BYTES => {
            let what = format!("cannot restore file {}", entry.attr.ino);
            Err(StoreError::of_pool(Code::NoSpace, what).why("the pool is full"))
        }
        _ => Ok(()),
    }
}

/// All data of a file have arrived in a backing file, which gets the times. False if a release that was under way when the
/// restore began has unlinked it: then the restore begins anew.
pub(super) fn complete(link: &Link, file: &OwnedFd, entry: &Entry) -> std::result::Result<bool, Code> {
    link.pool.note_arrived(file)?;
    set_times(file, entry)?;
    has_name(file.as_fd())
}

fn set_times(file: &OwnedFd, entry: &Entry) -> std::result::Result<(), Code> {
    let time = |t: forebay_types::Timestamp| Timespec { tv_sec: t.sec, tv_nsec: i64::from(t.nsec) };
    futimens(
        file,
        &Timestamps { last_access: time(entry.attr.atime), last_modification: time(entry.attr.mtime) },
    )
    .map_err(|e| Code::from_errno(e.raw_os_error()))
}

/// The store has another version than the pool knew: the released file gets its size and times. If it has other names,
/// and the version is another file, the name leaves it instead: true then. [`Code::Stale`] if it has another epoch by now.
///
/// Version, size and modification time change in one step: a later mover that found the version alone would take the file
/// for up to date. It is no change of the pool's, which would make the place pending, and the next version of the other
/// program a conflict. The step begins a new epoch, so that a restore that has read the version before begins anew.
fn adopt(link: &Link, located: &Located, entry: &Entry) -> Result<bool> {
    let ino = entry.attr.ino;
    let what = || format!("cannot restore file {ino} from {}", located.path);
    let failed = |code| Error::new(code, what());
    let looked = located.at.store.look(&located.path).map_err(Error::from)?;
    let Some(object) = looked.filter(|object| object.kind == entry.attr.kind()) else {
        return Err(Error::new(Code::Io, what())
            .why("it was removed in the store, not by Forebay")
            .cure("restore it in the store, or remove it in the pool"));
    };
    let place = link.store_place(ino).map_err(failed)?;
    let name = located.path.name().unwrap_or_default();
    let is_another = located.placed.is_some_and(|placed| is_another_file(&placed.version, &object.version));
    if entry.attr.nlink > 1 && is_another {
        match leave(link, (place.parent, name)) {
            Ok(()) => return Ok(true),
            Err(Code::Busy) if link.is_pending(place.parent, name).map_err(failed)? => {
                // The pool has changed the name, too. The copy passes on to another name that has the data.
                link.conflict(place.parent, name, true, object.version).map_err(failed)?;
                return Ok(false);
            }
            // No other name has these data: the file gets the ones that are there.
            Err(Code::Busy) => {}
            Err(code) => return Err(failed(code)),
        }
    }
    let version = object.version;
    if located.placed.is_some_and(|placed| placed.version == version) {
        return Ok(false); // it was changed while it was read, and another thread has taken that over
    }
    tracing::info!("{} was changed in the store: the pool takes the store's version", located.path);
    let published = link.published((place.parent, name), ino, located.epoch, CHANGES_ALL, version);
    let taken_over = published.and_then(|()| link.inode(ino)).and_then(|now| {
        // Programs may have set other times since.
        if now.attr.epoch() != located.epoch || now.attr.is_resident() {
            return Ok(());
        }
        // The shard that has the place lacks the inode.
        let times = SetAttr {
            size: Some(version.bytes),
            atime: TimeSet::At(object.atime),
            mtime: TimeSet::At(version.mtime),
            ..SetAttr::default()
        };
        link.set_attr(ino, times).map(drop)
    });
    taken_over.map(|()| false).map_err(failed)
}
