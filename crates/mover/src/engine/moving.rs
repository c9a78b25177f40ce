//! Renames directories in stores that have none: copies all below, records the new place, removes what was copied.
//!
//! The directory's record is the only one that has its path, so it changes in one step, after all copies are made: a
//! restore reads the old or the new files, and both are there. A mover that dies before that step makes the copies again,
//! and finds those that it had made. One that dies after it leaves the old files in the store, where the pool does not
//! show them. A file that another program has changed meanwhile is not removed.

use std::collections::HashMap;

use forebay_types::{
    Code, Error, Ino, Kind, PendingPlace, Result, StoreVersion, EPOCH_UNKNOWN, FLAG_UNLISTED,
};

use super::link::Link;
use super::parallel::in_parallel;
use super::reconcile::{is_alive, DirectoryMove, Next, Reconciler};
use super::stores::AttachedStore;
use crate::store::{Attributes, DirectoryRemoval, Outcome, Store, StorePath};

/// A directory of the tree that is moved, the top first.
struct Level {
    /// The directory above, by its index, and the name in it; none for the top.
    above: Option<(usize, Vec<u8>)>,
    from: StorePath,
    to: StorePath,
    files: Vec<(Vec<u8>, StoreVersion)>,
}

/// A file that is copied.
struct Job {
    level: usize,
    name: Vec<u8>,
    from: StorePath,
    to: StorePath,
    version: StoreVersion,
}

fn joined(directory: &StorePath, name: &[u8]) -> Result<StorePath> {
    directory.join(name).map_err(|code| Error::new(code, format!("a path below {directory} is too long")))
}

/// All directories below one, with their files.
fn levels(store: &dyn Store, from: &StorePath, to: &StorePath) -> Result<Vec<Level>> {
    let top = Level { above: None, from: from.clone(), to: to.clone(), files: Vec::new() };
    let mut all = vec![top];
    let mut index = 0;
    while index < all.len() {
        let (mut files, mut directories) = (Vec::new(), Vec::new());
        let listed = store.list(&all[index].from, &mut |object| {
            match object.kind {
                Kind::Directory => directories.push(object.name),
                _ => files.push((object.name, object.version)),
            }
            Ok(())
        });
        listed.map_err(Error::from)?;
        for name in directories {
            let (from, to) = (joined(&all[index].from, &name)?, joined(&all[index].to, &name)?);
            all.push(Level { above: Some((index, name)), from, to, files: Vec::new() });
        }
        all[index].files = files;
        index += 1;
    }
    Ok(all)
}

/// Moves a directory from where its store has it.
pub(super) fn move_directory(reconciler: &mut Reconciler<'_>, wanted: &DirectoryMove) -> Result<Next> {
    let DirectoryMove { place, copy, from, path, .. } = wanted;
    let at = reconciler.at;
    let store: &dyn Store = &*at.store;
    let levels = levels(store, from, path)?;
    for level in &levels {
        let made = store.make_directory(&level.to, &Attributes::default()).map_err(Error::from)?;
        if let Outcome::Conflict(found) = made {
            return reconciler.conflict(place, path, found.as_deref()).map(|()| Next::Later);
        }
    }
    let mut jobs = Vec::new();
    for (index, level) in levels.iter().enumerate() {
        for (name, version) in &level.files {
            let (from, to) = (joined(&level.from, name)?, joined(&level.to, name)?);
            jobs.push(Job { level: index, name: name.clone(), from, to, version: *version });
        }
    }
    let copied = in_parallel(&at.store, &jobs, |_, job| store.copy(&job.from, &job.version, &job.to, None));
    let mut versions = Vec::new();
    for outcome in copied {
        match outcome {
            Ok(Outcome::Done(version)) => versions.push(version),
            Ok(Outcome::Conflict(found)) => {
                return reconciler.conflict(place, path, found.as_deref()).map(|()| Next::Later);
            }
            // Another program changes it at this moment: the next pass sees what is there then.
            Err(e) if e.code() == Code::Stale => return Ok(Next::Later),
            Err(e) => return Err(e.into()),
        }
    }
    let places = ((copy.parent, &copy.name[..]), (place.parent, &place.name[..]));
    let moved = reconciler.record_move(places.0, places.1, StoreVersion::default());
    moved.map_err(|code| Error::new(code, format!("cannot record that {from} was renamed")))?;
    report(reconciler, wanted.ino, &levels, &jobs, &versions)?;
    let outdated = jobs.into_iter().map(|job| (job.from, job.version));
    let directories = levels.into_iter().rev().map(|level| (level.from, StoreVersion::default()));
    locked(at).extend(outdated.chain(directories));
    remove_outdated(at);
    Ok(Next::Done)
}

/// Reports the versions of the copies: without that, they would be taken for changes by another program.
fn report(
    reconciler: &Reconciler<'_>,
    top: Ino,
    levels: &[Level],
    jobs: &[Job],
    versions: &[StoreVersion],
) -> Result<()> {
    let link = reconciler.link;
    let failed = |code| Error::new(code, "cannot record what was renamed in the store");
    let pending = link.all_pending().map_err(failed)?;
    let pending: HashMap<(u64, &[u8]), &PendingPlace> =
        pending.iter().map(|place| ((place.parent.0, &place.name[..]), place)).collect();
    // Of directories that are not listed, the names that the pool knows: the others it looks up at the new path.
    let mut unlisted: HashMap<u64, HashMap<Vec<u8>, Ino>> = HashMap::new();
    // The inode of which the store has a version at a place.
    let placed = |unlisted: &HashMap<u64, HashMap<Vec<u8>, Ino>>, parent: Ino, name: &[u8]| match (
        pending.get(&(parent.0, name)),
        unlisted.get(&parent.0),
    ) {
        (Some(place), _) => Ok(place.placed.map(|placed| placed.ino)),
        (None, Some(known)) => Ok(known.get(name).copied()),
        (None, None) => link.lookup(parent, name).map_err(failed),
    };
    let mut directories: Vec<Option<Ino>> = Vec::with_capacity(levels.len());
    for level in levels {
        let ino = match &level.above {
            None => Some(top),
            Some((above, name)) => match directories[*above] {
                Some(parent) => placed(&unlisted, parent, name)?,
                None => None,
            },
        };
        if let Some(ino) = ino {
            if let Some(known) = known_if_unlisted(link, ino).map_err(failed)? {
                unlisted.insert(ino.0, known);
            }
        }
        directories.push(ino);
    }
    for (job, version) in jobs.iter().zip(versions) {
        let Some(parent) = directories[job.level] else { continue };
        let Some(ino) = placed(&unlisted, parent, &job.name)? else { continue };
        let epoch = link.store_place(ino).map_or(EPOCH_UNKNOWN, |place| place.epoch);
        match link.published((parent, &job.name), ino, epoch, 0, *version) {
            Ok(()) | Err(Code::Stale | Code::NotFound | Code::Busy) => {}
            Err(code) => return Err(failed(code)),
        }
    }
    Ok(())
}

/// The names that the pool knows of a directory that is not listed; none for one that is, or is gone.
fn known_if_unlisted(
    link: &Link,
    directory: Ino,
) -> std::result::Result<Option<HashMap<Vec<u8>, Ino>>, Code> {
    match link.inode(directory) {
        Ok(entry) if entry.attr.flags & FLAG_UNLISTED != 0 => {}
        Ok(_) | Err(Code::NotFound) => return Ok(None),
        Err(code) => return Err(code),
    }
    let (mut listing, mut known) = (link.pool.read_known(directory), HashMap::new());
    while let Some(found) = listing.next(link.pool)? {
        known.insert(found.name.to_vec(), found.ino);
    }
    Ok(Some(known))
}

fn locked(at: &AttachedStore) -> std::sync::MutexGuard<'_, Vec<(StorePath, StoreVersion)>> {
    at.outdated.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Removes old names of files that were copied. What cannot be removed now is tried again with the next pass.
pub(super) fn remove_outdated(at: &AttachedStore) {
    let all = std::mem::take(&mut *locked(at));
    if all.is_empty() {
        return;
    }
    let store: &dyn Store = &*at.store;
    let is_file = |(_, version): &(StorePath, StoreVersion)| *version != StoreVersion::default();
    let (files, directories): (Vec<_>, Vec<_>) = all.into_iter().partition(is_file);
    let removed = in_parallel(&at.store, &files, |_, (path, version)| store.remove(path, version));
    let mut left = Vec::new();
    for (file, outcome) in files.into_iter().zip(removed) {
        match outcome {
            Ok(Outcome::Done(()) | Outcome::Conflict(None)) => {}
            Ok(Outcome::Conflict(Some(_))) => {
                tracing::warn!("{} was changed in the store while it was renamed: it stays there", file.0);
            }
            Err(e) => {
                tracing::warn!("cannot remove an old name yet: {e}");
                left.push(file);
            }
        }
    }
    for directory in directories {
        match store.remove_directory(&directory.0, &is_alive) {
            Ok(DirectoryRemoval::Removed) => {}
            // Of a file that could not be removed yet.
            Ok(DirectoryRemoval::NotEmpty) if !left.is_empty() => left.push(directory),
            Ok(DirectoryRemoval::NotEmpty) => {}
            Err(e) => {
                tracing::warn!("cannot remove an old directory yet: {e}");
                left.push(directory);
            }
        }
    }
    locked(at).append(&mut left);
}
