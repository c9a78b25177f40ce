//! Gives what the store has another name, when a place is to get an inode whose copy lies at another place.

use forebay_types::{
    Code, CopyOf, Entry, Error, Kind, PendingPlace, Placed, Result, StoreVersion, EPOCH_UNKNOWN,
};

use super::reconcile::{pool_error, DirectoryMove, Next, Parked, Reconciler};
use super::restore;
use crate::store::{Object, Outcome, StorePath};

/// How often a link that was made is reported, if the file is released again and again meanwhile.
const LINK_ATTEMPTS: u32 = 10;

impl Reconciler<'_> {
    /// Renames what lies at a place to a name of its own.
    pub(super) fn park(&mut self, place: &PendingPlace, placed: &Placed, path: &StorePath) -> Result<Parked> {
        let name = format!("forebay-parked-{}", placed.ino).into_bytes();
        let parent = path.parent().unwrap_or_default();
        let to = parent.join(&name).map_err(|code| Error::new(code, "a path in the store is too long"))?;
        if !self.clear_parked(place, placed, &name, &to)? {
            return Ok(Parked::Later);
        }
        let there = PendingPlace { name: name.clone(), ..place.clone() };
        if !self.intend(place, placed.version)? || !self.intend(&there, placed.version)? {
            return Ok(Parked::Later);
        }
        match self.store().rename(path, &placed.version, &to, None)? {
            Outcome::Done(version) => {
                let (from, to) = ((place.parent, &place.name[..]), (place.parent, &name[..]));
                self.record_move(from, to, version).map_err(|code| pool_error("park", path, code))?;
                Ok(Parked::Free)
            }
            Outcome::Conflict(found) => Ok(Parked::Changed(found)),
        }
    }

    /// Removes a copy that an earlier pass has parked, and that no pass has removed since the inode was uploaded under another
    /// name. False if it must stay for now.
    fn clear_parked(
        &self,
        place: &PendingPlace,
        placed: &Placed,
        name: &[u8],
        path: &StorePath,
    ) -> Result<bool> {
        let parked = self.link.pending_in(place.parent);
        let parked = parked.map_err(|code| Error::new(code, "cannot read the pending places"))?;
        let Some(parked) = parked.into_iter().find(|parked| parked.name == name) else { return Ok(true) };
        let Some(earlier) = parked.placed else { return Ok(true) };
        let copy = match self.stores.locate(placed.ino) {
            Err(e) if e.code == Code::NotFound => None,
            located => located?.placed,
        };
        // The file's last copy is fetched from there before.
        let is_last =
            copy.is_some_and(|copy| copy.version == earlier.version) && earlier.version != placed.version;
        match is_last || earlier.kind == Kind::Directory {
            true => Ok(false),
            false => self.clear(&parked, path, Some(earlier.version)),
        }
    }

    /// Brings an inode's copy from its old place: renames it, or links it when the old name is still wanted. None when
    /// it has to be uploaded instead.
    pub(super) fn fetch(
        &mut self,
        place: &PendingPlace,
        entry: &Entry,
        copy: &CopyOf,
        path: &StorePath,
        replaces: Option<&StoreVersion>,
        is_dirty: bool,
    ) -> Result<Option<Next>> {
        let ino = entry.attr.ino;
        let is_directory = entry.attr.is_directory();
        // Where it is now: another place of this pass may have parked it.
        let located = self.stores.locate(ino)?;
        let Some(placed) = located.placed else { return Ok(None) };
        let now = self.link.store_place(ino).map_err(|code| Error::new(code, "cannot find a copy"))?;
        let (from, name) =
            (located.path, now.path.rsplit(|b| *b == b'/').next().unwrap_or_default().to_vec());
        let copy = &CopyOf { parent: now.parent, name, epoch: copy.epoch };
        if from == *path {
            return Ok(Some(Next::Later));
        }
        let still_wanted = self.link.lookup(copy.parent, &copy.name);
        let still_wanted =
            still_wanted.map_err(|code| Error::new(code, "cannot look up a name"))? == Some(ino);
        let abilities = self.store().abilities();
        if is_directory && !abilities.rename_directory {
            let (place, copy, path) = (place.clone(), copy.clone(), path.clone());
            return Ok(Some(Next::Move(Box::new(DirectoryMove { place, ino, copy, from, path }))));
        }
        let can = match (still_wanted, is_directory) {
            // A dirty file is uploaded under each of its names.
            (true, _) => abilities.hard_links && replaces.is_none() && !is_dirty,
            (false, true) => abilities.rename_directory,
            (false, false) => abilities.rename && replaces.is_none(),
        };
        if !can {
            return Ok(None);
        }
        let source = PendingPlace { parent: copy.parent, name: copy.name.clone(), ..place.clone() };
        if !self.intend(place, placed.version)? || !still_wanted && !self.intend(&source, placed.version)? {
            return Ok(Some(Next::Later));
        }
        if still_wanted {
            return match self.store().link(&from, &placed.version, path)? {
                Outcome::Done(version) => self.linked(place, entry, copy.epoch, path, version).map(Some),
                // The other name has another file in the store by now: this one gets the pool's data.
                Outcome::Conflict(_) if entry.attr.is_resident() || !entry.attr.is_file() => Ok(None),
                Outcome::Conflict(found) => self.meet(place, entry, path, found.as_deref()).map(Some),
            };
        }
        match self.store().rename(&from, &placed.version, path, replaces)? {
            Outcome::Done(version) => {
                let (from_place, to) = ((copy.parent, &copy.name[..]), (place.parent, &place.name[..]));
                self.record_move(from_place, to, version)
                    .map_err(|code| pool_error("rename", &from, code))?;
                if !is_dirty {
                    self.settle(place)?;
                }
                Ok(Some(Next::Done))
            }
            Outcome::Conflict(found) => {
                // A crash between the rename and its record.
                let moved =
                    found.is_none() && self.store().look(path)?.is_some_and(|o| o.version == placed.version);
                if moved {
                    let (from_place, to) = ((copy.parent, &copy.name[..]), (place.parent, &place.name[..]));
                    self.record_move(from_place, to, placed.version)
                        .map_err(|code| pool_error("rename", &from, code))?;
                    return Ok(Some(Next::Done));
                }
                // Another program changed or removed what the pool has renamed: what it made stays under the old name,
                // and the new name gets what the pool has.
                if !is_directory && (entry.attr.is_resident() || !entry.attr.is_file()) {
                    tracing::warn!(
                        "{from} was {} in the store: it is not renamed there, {path} is copied from the pool",
                        if found.is_some() { "changed" } else { "removed" }
                    );
                    return Ok(None);
                }
                self.meet(place, entry, path, found.as_deref()).map(Some)
            }
        }
    }

    /// True if a place has the file of the store that its inode's last copy is.
    pub(super) fn is_linked(&self, place: &PendingPlace, entry: &Entry, path: &StorePath) -> Result<bool> {
        let Some(placed) = place.placed.filter(|placed| placed.ino == entry.attr.ino) else {
            return Ok(false);
        };
        if !placed.version.is_same_file(&placed.version) {
            return Ok(false); // the store does not tell
        }
        let copy = match self.stores.locate(entry.attr.ino) {
            Err(e) if e.code == Code::NotFound => return Ok(false),
            located => located?.placed,
        };
        let is_known = copy.is_some_and(|copy| copy.version == placed.version);
        Ok(is_known && self.store().look(path)?.is_some_and(|found| found.version == placed.version))
    }

    /// Links an inode's copy in place of an older version of the inode at another of its names. The name is never missing
    /// in the store. None if that cannot be done.
    pub(super) fn relink(
        &mut self,
        place: &PendingPlace,
        entry: &Entry,
        copy: &CopyOf,
        (directory, path): (&StorePath, &StorePath),
        replaces: Option<&StoreVersion>,
    ) -> Result<Option<Next>> {
        let is_older = place.placed.is_some_and(|placed| placed.ino == entry.attr.ino);
        if !is_older || !self.store().abilities().hard_links {
            return Ok(None);
        }
        let still_wanted = self.link.lookup(copy.parent, &copy.name);
        let still_wanted = still_wanted.map_err(|code| Error::new(code, "cannot look up a name"))?;
        let located = self.stores.locate(entry.attr.ino)?;
        let Some(placed) = located.placed.filter(|_| still_wanted == Some(entry.attr.ino)) else {
            return Ok(None);
        };
        if located.path == *path {
            return Ok(Some(Next::Later));
        }
        let temporary = self.store().temporaries().next(directory);
        let version = match self.store().link(&located.path, &placed.version, &temporary)? {
            Outcome::Done(version) => version,
            Outcome::Conflict(_) => return Ok(None),
        };
        let discard = || self.store().discard(&temporary).map_err(Error::from);
        if !self.intend(place, version)? {
            return discard().map(|()| Some(Next::Later));
        }
        match self.store().publish(&temporary, path, replaces)? {
            Outcome::Done(version) => self.linked(place, entry, located.epoch, path, version).map(Some),
            Outcome::Conflict(found) => {
                discard()?;
                self.conflict(place, path, found.as_deref()).map(|()| Some(Next::Later))
            }
        }
    }

    /// Records that a place has been linked to an inode's copy.
    fn linked(
        &self,
        place: &PendingPlace,
        entry: &Entry,
        mut epoch: u64,
        path: &StorePath,
        version: StoreVersion,
    ) -> Result<Next> {
        let (ino, at) = (entry.attr.ino, (place.parent, &place.name[..]));
        for attempt in 1.. {
            let known = if entry.attr.is_file() { epoch } else { EPOCH_UNKNOWN };
            match self.link.published(at, ino, known, place.changes, version) {
                Ok(()) => break,
                // Released meanwhile: the copy has the file's next epoch.
                Err(Code::Stale) if attempt < LINK_ATTEMPTS => epoch = self.stores.locate(ino)?.epoch,
                Err(code) => return Err(pool_error("link", path, code)),
            }
        }
        Ok(Next::Done)
    }

    /// The copy of what the pool renamed or linked is another one by now. A released file gets that version, since its
    /// own is nowhere any more.
    pub(super) fn meet(
        &self,
        place: &PendingPlace,
        entry: &Entry,
        path: &StorePath,
        found: Option<&Object>,
    ) -> Result<Next> {
        match found.is_some() && is_released(entry) {
            true => drop(restore::refresh(self.link, self.stores, entry)?),
            false => self.conflict(place, path, found)?,
        }
        Ok(Next::Later)
    }
}

fn is_released(entry: &Entry) -> bool {
    entry.attr.is_file() && !entry.attr.is_resident()
}
