//! Makes one place of a store equal to the pool, except for files' data (`drain.rs`).
//!
//! Nothing is overwritten or removed in the store that the pool does not know: each call names the version that it may
//! replace. An inode whose only copy lies at a place that another inode is to get is *parked* first: renamed to a name
//! of its own in the same directory, from which its own place fetches it.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, OnceLock};

use forebay_types::{
    Code, CopyOf, Entry, Error, Ino, Kind, PendingPlace, Placed, Result, StoreVersion, Timestamp, Wanted,
    EPOCH_UNKNOWN, FLAG_DIRTY,
};

use super::link::Link;
use super::shared::locked;
use super::stores::{AttachedStore, Stores};
use super::upload::attributes_of;
use super::wanted::{OpenFiles, WantedUpload};
use crate::host;
use crate::store::{
    runs_here, Attributes, DirectoryRemoval, Object, Outcome, Store, StorePath, TemporaryName,
};

/// What remains to be done at a place.
#[derive(Debug)]
pub(super) enum Next {
    /// Nothing: the store is equal, or the place has its next look in the list.
    Done,
    /// It has to wait for another place, or for a program.
    Later,
    /// The file's data are to be uploaded, and published in place of a version.
    Upload(Box<WantedUpload>),
    /// The store cannot rename directories: what is below is to be copied.
    Move(Box<DirectoryMove>),
}

/// A directory that gets another place in a store that cannot rename it.
#[derive(Debug)]
pub(super) struct DirectoryMove {
    pub(super) place: PendingPlace,
    pub(super) ino: Ino,
    /// Where the store has it.
    pub(super) copy: CopyOf,
    pub(super) from: StorePath,
    /// Where it is to be.
    pub(super) path: StorePath,
}

/// What became of a version that was in the way.
pub(super) enum Parked {
    /// It has a name of its own.
    Free,
    Later,
    /// Another program changed it in the store, or removed it.
    Changed(Option<Box<Object>>),
}

/// What pending places want.
#[derive(Default)]
struct WantedInodes {
    /// Names in directories of the pool, by inode, two at most.
    places: HashMap<u64, Vec<(Ino, Vec<u8>)>>,
    /// Inodes at places of which the store never gets anything, by their policy.
    temporary: HashSet<u64>,
}

/// The places of one store, during one pass over them.
pub(super) struct Reconciler<'a> {
    pub(super) link: &'a Link,
    pub(super) stores: &'a Stores,
    pub(super) at: &'a AttachedStore,
    /// Where the store has directories; none for one that it does not have.
    directories: HashMap<u64, Option<StorePath>>,
    /// As of the first question in this pass.
    wanted: OnceLock<WantedInodes>,
    /// Released files that only places of temporary files want: the pool has to have their data before the store may lose
    /// them.
    pub(super) to_restore: Mutex<Vec<Ino>>,
    /// A rename in the store could not be recorded: paths below it are not known until that is made up for.
    pub(super) has_unrecorded: bool,
}

pub(super) fn pool_error(what: &str, path: &StorePath, code: Code) -> Error {
    Error::new(code, format!("cannot {what} {path}: the pool refuses its record"))
}

impl<'a> Reconciler<'a> {
    pub(super) fn new(link: &'a Link, stores: &'a Stores, at: &'a AttachedStore) -> Reconciler<'a> {
        Reconciler {
            link,
            stores,
            at,
            directories: HashMap::new(),
            wanted: OnceLock::new(),
            to_restore: Mutex::default(),
            has_unrecorded: false,
        }
    }

    pub(super) fn store(&self) -> &dyn Store {
        &*self.at.store
    }

    /// Where the store has a directory.
    fn directory(&mut self, ino: Ino) -> Result<Option<StorePath>> {
        if let Some(known) = self.directories.get(&ino.0) {
            return Ok(known.clone());
        }
        let path = match self.stores.locate(ino) {
            Ok(located) => Some(located.path),
            Err(e) if e.code == Code::NotFound => None,
            Err(e) => return Err(e),
        };
        self.directories.insert(ino.0, path.clone());
        Ok(path)
    }

    /// True if an inode lives, and a place has its last copy.
    fn lives_at(&self, ino: Ino, parent: Ino, path: &StorePath) -> Result<bool> {
        match self.link.inode(ino) {
            Ok(_) => {}
            Err(Code::NotFound) => return Ok(false),
            Err(code) => return Err(Error::new(code, format!("cannot read inode {ino}"))),
        }
        match self.link.store_place(ino) {
            Ok(place) => Ok(place.parent == parent && place.path == path.as_bytes()),
            Err(Code::NotFound) => Ok(false),
            Err(code) => Err(Error::new(code, format!("cannot find the copy of inode {ino}"))),
        }
    }

    /// Where a place is in the store; none if the store does not have its directory.
    pub(super) fn path_of(&mut self, place: &PendingPlace) -> Result<Option<(StorePath, StorePath)>> {
        let Some(directory) = self.directory(place.parent)? else { return Ok(None) };
        let path = directory
            .join(&place.name)
            .map_err(|code| Error::new(code, format!("a path in the store below {directory} is too long")))?;
        Ok(Some((directory, path)))
    }

    /// Makes the store equal at a place, except for data.
    pub(super) fn reconcile(&mut self, place: &PendingPlace, is_below_wanted: bool) -> Result<Next> {
        if place.conflict {
            return Ok(Next::Later); // until somebody settles it
        }
        let at = self.path_of(place)?;
        match (&place.wanted, &at) {
            (None, at) => self.remove_at(place, at.as_ref().map(|(_, path)| path), is_below_wanted),
            (Some(_), None) => Ok(Next::Later),
            (Some(Wanted::Elsewhere(..)), _) => Ok(Next::Later),
            (Some(Wanted::Here(entry, copy)), Some((directory, path))) => {
                if TemporaryName::parse(&place.name).is_some() {
                    // A mover would remove it there as what a dead one has left.
                    return Err(Error::new(Code::Invalid, format!("cannot copy {path} to the store"))
                        .why("its name is one that Forebay gives to temporary files")
                        .cure("give it another name, or remove it"));
                }
                self.want(place, entry, copy.as_ref(), directory, path)
            }
        }
    }

    /// The pool has nothing at a place, which is at `path` in the store, if that has its directory.
    pub(super) fn remove_at(
        &self,
        place: &PendingPlace,
        path: Option<&StorePath>,
        is_below_wanted: bool,
    ) -> Result<Next> {
        match path {
            Some(path) => self.remove(place, path, is_below_wanted),
            // The directory is gone from the pool and from the store.
            None => self.unpublish(place, place.changes).map(|()| Next::Done),
        }
    }

    fn unpublish(&self, place: &PendingPlace, seen: u64) -> Result<()> {
        let done = self.link.unpublished(place.parent, &place.name, seen);
        done.map_err(|code| Error::new(code, format!("cannot forget inode {} of the store", place.parent)))
    }

    pub(super) fn settle(&self, place: &PendingPlace) -> Result<Next> {
        let done = self.link.settled(place.parent, &place.name, place.changes);
        done.map(|()| Next::Done).map_err(|code| Error::new(code, "cannot settle a place of the store"))
    }

    /// Removes an empty directory that a mover made and did not report.
    fn remove_unreported(&self, place: &PendingPlace, path: &StorePath) -> Result<()> {
        if place.placed.is_none() && place.intent == Some(StoreVersion::A_DIRECTORY) {
            match self.store().remove_directory(path, &is_alive) {
                Ok(_) => {}
                Err(e) if e.code() == Code::NotDirectory => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// True if another pending place wanted an inode when this pass began. Otherwise the store has it under another of its
    /// names too. Should a place want it only since, the shard refuses to lose what only the store has (`Intend`), and
    /// what the pool has is copied again.
    fn is_wanted_elsewhere(&self, ino: Ino, place: &PendingPlace) -> Result<bool> {
        let is_other = |other: &(Ino, Vec<u8>)| (other.0, &other.1) != (place.parent, &place.name);
        Ok(self.wanted()?.places.get(&ino.0).is_some_and(|places| places.iter().any(is_other)))
    }

    fn wanted(&self) -> Result<&WantedInodes> {
        if let Some(wanted) = self.wanted.get() {
            return Ok(wanted);
        }
        let all = self.link.all_pending();
        let all = all.map_err(|code| Error::new(code, "cannot read the pending places"))?;
        let mut wanted = WantedInodes::default();
        for other in all {
            let Some(Wanted::Here(entry, _)) = &other.wanted else { continue };
            let ino = entry.attr.ino.0;
            // Such a place fetches nothing.
            if self.at.policy_of(self.link, &other).is_temporary() {
                wanted.temporary.insert(ino);
                continue;
            }
            let places = wanted.places.entry(ino).or_default();
            if places.len() < 2 {
                places.push((other.parent, other.name));
            }
        }
        Ok(self.wanted.get_or_init(|| wanted))
    }

    /// Notes what the store will have at a place. False when the pool refuses, because data would be lost: later.
    pub(super) fn intend(&self, place: &PendingPlace, version: StoreVersion) -> Result<bool> {
        match self.link.intend(place.parent, &place.name, version) {
            Ok(()) => Ok(true),
            Err(Code::Busy | Code::Stale | Code::NotFound) => Ok(false),
            Err(code) => Err(Error::new(code, "cannot note what the store will have")),
        }
    }

    /// The pool has nothing at a place: so shall the store.
    fn remove(&self, place: &PendingPlace, path: &StorePath, is_below_wanted: bool) -> Result<Next> {
        let Some(placed) = place.placed else {
            // It was made, perhaps, and the mover died.
            if let Some(intent) = &place.intent {
                if *intent == StoreVersion::A_DIRECTORY {
                    self.remove_unreported(place, path)?;
                } else if *intent != StoreVersion::NOTHING {
                    if let Some(found) = self.store().look(path)?.filter(|found| found.is_upload(intent)) {
                        let _ = self.store().remove(path, &found.version)?;
                    }
                }
            }
            return self.settle(place);
        };
        if self.lives_at(placed.ino, place.parent, path)? && self.is_wanted_elsewhere(placed.ino, place)? {
            return Ok(Next::Later); // the place to which it was renamed fetches it
        }
        if placed.kind == Kind::Directory {
            if is_below_wanted {
                return Ok(Next::Later); // what is below is removed first
            }
            if !self.intend(place, StoreVersion::NOTHING)? {
                return Ok(Next::Later);
            }
            match self.store().remove_directory(path, &is_alive)? {
                DirectoryRemoval::Removed => {}
                DirectoryRemoval::NotEmpty => {
                    let waits = self.link.has_pending_in(placed.ino);
                    if waits.map_err(|code| Error::new(code, "cannot read the pending places"))? {
                        return Ok(Next::Later);
                    }
                    tracing::warn!("{path} has files that the pool does not know: the store keeps it");
                }
            }
        } else {
            if !self.intend(place, StoreVersion::NOTHING)? {
                if self.wanted()?.temporary.contains(&placed.ino.0) {
                    locked(&self.to_restore).push(placed.ino);
                }
                return Ok(Next::Later);
            }
            match self.store().remove(path, &placed.version) {
                // The kind of a version that is of no inode is not known.
                Err(e) if e.code() == Code::IsDirectory => {
                    self.store().remove_directory(path, &is_alive)?;
                }
                removed => {
                    if let Outcome::Conflict(Some(_)) = removed? {
                        tracing::warn!("{path} was changed in the store: it is not removed there");
                    }
                }
            }
        }
        self.unpublish(place, place.changes)?;
        Ok(Next::Done)
    }

    fn want(
        &mut self,
        place: &PendingPlace,
        entry: &Entry,
        copy: Option<&CopyOf>,
        directory: &StorePath,
        path: &StorePath,
    ) -> Result<Next> {
        let is_here = copy.is_some_and(|copy| (copy.parent, &copy.name) == (place.parent, &place.name));
        let is_file = entry.attr.is_file();
        let is_dirty = is_file
            && entry.attr.is_resident()
            && (entry.attr.flags & FLAG_DIRTY != 0
                || copy.is_none_or(|copy| copy.epoch != entry.attr.epoch()));
        if is_here {
            let Some(placed) = place.placed else { return Ok(Next::Later) };
            return match is_dirty {
                true => Ok(upload(place, entry, directory, path, Some(placed.version))),
                false => self.attributes(place, entry, copy, &placed, directory, path),
            };
        }
        if is_file && !is_dirty && self.is_linked(place, entry, path)? {
            return self.settle(place);
        }
        if !entry.attr.is_directory() || copy.is_some() {
            self.remove_unreported(place, path)?;
        }
        let Some(replaces) = self.free(place, entry, path, is_dirty)? else { return Ok(Next::Later) };
        let copies = is_file && !is_dirty && !self.store().abilities().rename;
        if let (Some(_), true) = (copy, copies) {
            return self.copy_inside(place, entry, directory, path, replaces);
        }
        if let (Some(_), Some(copy), true) = (&replaces, copy, is_file && !is_dirty) {
            if let Some(next) = self.relink(place, entry, copy, (directory, path), replaces.as_ref())? {
                return Ok(next);
            }
        }
        if let Some(copy) = copy {
            // A rename goes to a free place, so that the next mover can tell whether it was made.
            let replaces = match replaces {
                Some(_) if !is_dirty => match self.clear(place, path, replaces)? {
                    true => None,
                    false => return Ok(Next::Later),
                },
                replaces => replaces,
            };
            if let Some(next) = self.fetch(place, entry, copy, path, replaces.as_ref(), is_dirty)? {
                return Ok(next);
            }
        }
        if is_file {
            return match entry.attr.is_resident() {
                true => Ok(upload(place, entry, directory, path, replaces)),
                false => Ok(Next::Later),
            };
        }
        self.make(place, entry, directory, path, replaces.as_ref())
    }

    /// Frees a place for another inode. The version that may be replaced there, or none; nothing when it must wait.
    #[allow(clippy::option_option)]
    fn free(
        &mut self,
        place: &PendingPlace,
        entry: &Entry,
        path: &StorePath,
        is_dirty: bool,
    ) -> Result<Option<Option<StoreVersion>>> {
        let Some(placed) = place.placed else { return Ok(Some(None)) };
        if placed.ino == entry.attr.ino {
            return Ok(Some(Some(placed.version)));
        }
        if self.lives_at(placed.ino, place.parent, path)? {
            return match self.park(place, &placed, path)? {
                Parked::Free => Ok(Some(None)),
                Parked::Later => Ok(None),
                // The upload finds the conflict, and goes beside what the store has.
                Parked::Changed(_) if is_dirty => Ok(Some(Some(placed.version))),
                Parked::Changed(found) => match self.link.inode(placed.ino) {
                    Ok(other) => self.meet(place, &other, path, found.as_deref()).map(|_| None),
                    Err(_) => Ok(None), // removed meanwhile
                },
            };
        }
        let directories = (placed.kind == Kind::Directory, entry.attr.is_directory());
        match directories {
            (false, false) => Ok(Some(Some(placed.version))),
            (true, _) if self.has_wanted_below(placed.ino)? => match self.park(place, &placed, path)? {
                Parked::Free => Ok(Some(None)),
                Parked::Later | Parked::Changed(_) => Ok(None),
            },
            _ if !self.intend(place, StoreVersion::NOTHING)? => Ok(None),
            (true, _) => match self.store().remove_directory(path, &is_alive)? {
                DirectoryRemoval::Removed => self.unpublish(place, u64::MAX).map(|()| Some(None)),
                DirectoryRemoval::NotEmpty => Ok(None),
            },
            (false, true) => match self.store().remove(path, &placed.version)? {
                Outcome::Done(()) | Outcome::Conflict(None) => {
                    self.unpublish(place, u64::MAX).map(|()| Some(None))
                }
                Outcome::Conflict(Some(found)) => self.conflict(place, path, Some(&found)).map(|()| None),
            },
        }
    }

    /// True if a directory that is gone from the pool has something in the store that another place wants, which may be
    /// in the directory that is to be at its place. Such a directory can be parked, if the store renames directories.
    fn has_wanted_below(&self, directory: Ino) -> Result<bool> {
        if !self.store().abilities().rename_directory {
            return Ok(false);
        }
        let mut directories = vec![directory];
        while let Some(directory) = directories.pop() {
            let places = self.link.pending_in(directory);
            for place in places.map_err(|code| Error::new(code, "cannot read the pending places"))? {
                let Some(placed) = place.placed else { continue };
                if self.is_wanted_elsewhere(placed.ino, &place)? {
                    return Ok(true);
                }
                if placed.kind == Kind::Directory {
                    directories.push(placed.ino);
                }
            }
        }
        Ok(false)
    }

    /// Removes a version whose inode is gone.
    pub(super) fn clear(
        &self,
        place: &PendingPlace,
        path: &StorePath,
        version: Option<StoreVersion>,
    ) -> Result<bool> {
        let Some(version) = version else { return Ok(true) };
        if !self.intend(place, StoreVersion::NOTHING)? {
            return Ok(false);
        }
        match self.store().remove(path, &version)? {
            Outcome::Done(()) | Outcome::Conflict(None) => self.unpublish(place, u64::MAX).map(|()| true),
            Outcome::Conflict(Some(found)) => self.conflict(place, path, Some(&found)).map(|()| false),
        }
    }

    /// Records a rename that was made in the store.
    pub(super) fn record_move(
        &mut self,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
        version: StoreVersion,
    ) -> std::result::Result<(), Code> {
        let recorded = self.link.moved(from, to, version);
        self.has_unrecorded |= recorded.is_err();
        self.directories.clear();
        recorded
    }

    /// Makes what is no file.
    fn make(
        &mut self,
        place: &PendingPlace,
        entry: &Entry,
        directory: &StorePath,
        path: &StorePath,
        replaces: Option<&StoreVersion>,
    ) -> Result<Next> {
        let ino = entry.attr.ino;
        let attributes = attributes_of(self.link, entry)?;
        let kind = entry.attr.kind();
        if kind == Kind::Directory {
            let was_begun = place.placed.is_none() && place.intent == Some(StoreVersion::A_DIRECTORY);
            if !self.intend(place, StoreVersion::A_DIRECTORY)? {
                return Ok(Next::Later);
            }
            let made = match self.store().make_directory(path, &attributes)? {
                // A mover that died may have made it, and not have come to its attributes.
                Outcome::Done(object) if was_begun && self.is_unfinished(&object, &attributes) => {
                    self.store().set_attributes(path, &object.version, &attributes)?
                }
                Outcome::Done(object) => Outcome::Done(object.version),
                Outcome::Conflict(found) => Outcome::Conflict(found),
            };
            return match made {
                Outcome::Done(version) => {
                    self.directories.remove(&ino.0);
                    self.publish(place, ino, version, path)
                }
                Outcome::Conflict(found) => {
                    self.conflict(place, path, found.as_deref()).map(|()| Next::Later)
                }
            };
        }
        let temporary = self.store().temporaries().next(directory);
        let made = match kind {
            Kind::Symlink => {
                let target = self.link.target(ino);
                let target = target.map_err(|code| Error::new(code, format!("cannot read link {ino}")))?;
                self.store().make_symlink(&temporary, &target, &attributes)
            }
            kind => self.store().make_node(&temporary, kind, entry.attr.rdev, &attributes),
        };
        match made {
            Ok(Outcome::Done(version)) => {
                if let Err(code) = self.link.intend(place.parent, &place.name, version) {
                    let _ = self.store().discard(&temporary);
                    return Err(pool_error("make", path, code));
                }
            }
            Ok(Outcome::Conflict(_)) => return Ok(Next::Later),
            Err(e) if e.code() == Code::NotSupported => {
                tracing::warn!("the store cannot have {path}, a {kind:?}: it stays in the pool alone");
                return self.settle(place);
            }
            Err(e) => return Err(e.into()),
        }
        let published = self.store().publish(&temporary, path, replaces).inspect_err(|_| {
            let _ = self.store().discard(&temporary);
        });
        match published? {
            Outcome::Done(version) => self.publish(place, ino, version, path),
            Outcome::Conflict(found) => {
                let _ = self.store().discard(&temporary);
                match found {
                    Some(found) if place.intent.is_some_and(|intent| found.is_upload(&intent)) => {
                        self.publish(place, ino, found.version, path)
                    }
                    found => self.conflict(place, path, found.as_deref()).map(|()| Next::Later),
                }
            }
        }
    }

    fn publish(
        &self,
        place: &PendingPlace,
        ino: Ino,
        version: StoreVersion,
        path: &StorePath,
    ) -> Result<Next> {
        let at = (place.parent, &place.name[..]);
        let done = self.link.published(at, ino, EPOCH_UNKNOWN, place.changes, version);
        done.map(|()| Next::Done).map_err(|code| pool_error("publish", path, code))
    }

    /// Sets the attributes that differ between the store and the pool.
    fn attributes(
        &mut self,
        place: &PendingPlace,
        entry: &Entry,
        copy: Option<&CopyOf>,
        placed: &Placed,
        directory: &StorePath,
        path: &StorePath,
    ) -> Result<Next> {
        let Some(found) = self.store().look(path)? else {
            // Somebody has removed it in the store. The pool's data are published again.
            let is_here = entry.attr.is_resident() || !entry.attr.is_file();
            return match (is_here, entry.attr.is_file()) {
                (true, true) => Ok(upload(place, entry, directory, path, None)),
                (true, false) => self.make(place, entry, directory, path, None),
                (false, _) => Err(Error::new(Code::Io, format!("{path} is gone from the store"))
                    .why("another program removed it, and the pool had released its data")),
            };
        };
        let wanted = attributes_of(self.link, entry)?;
        let epoch = copy.map_or(EPOCH_UNKNOWN, |copy| copy.epoch);
        let record = |version, seen| {
            let at = (place.parent, &place.name[..]);
            let done = self.link.published(at, entry.attr.ino, epoch, seen, version);
            done.map(|()| Next::Done).map_err(|code| pool_error("set attributes of", path, code))
        };
        if found.kind != entry.attr.kind() || found.version != placed.version {
            // Through another link to it, or by a mover that died, it got the time that the pool wants.
            let is_ours =
                placed.version.differs_in_time(&found.version) && wanted.mtime == Some(found.version.mtime);
            return match is_ours && found.kind == entry.attr.kind() {
                true => record(found.version, 0).map(|_| Next::Later),
                false => self.conflict(place, path, Some(&found)).map(|()| Next::Later),
            };
        }
        let has_xattrs = match (&wanted.xattrs, self.store().abilities().extended_attributes) {
            (Some(_), true) => Some(self.store().xattrs(path)?),
            _ => None,
        };
        if !self.differs(&found, &wanted, has_xattrs) {
            return self.settle(place);
        }
        // The time is part of the version.
        let after = wanted.mtime.map(|mtime| StoreVersion { mtime, ..placed.version });
        let after =
            after.filter(|after| found.kind != Kind::Directory && placed.version.differs_in_time(after));
        if let Some(after) = after {
            if !self.intend(place, after)? {
                return Ok(Next::Later);
            }
        }
        match self.store().set_attributes(path, &placed.version, &wanted)? {
            Outcome::Done(version) => record(version, place.changes),
            Outcome::Conflict(found) => self.conflict(place, path, found.as_deref()).map(|()| Next::Later),
        }
    }

    /// True if a new directory, of which it is not known whether it was finished, may lack attributes. Not if it belongs to
    /// somebody else: then another program has made it.
    fn is_unfinished(&self, found: &Object, wanted: &Attributes) -> bool {
        let is_ours = found.uid == rustix::process::geteuid().as_raw() || wanted.uid == Some(found.uid);
        is_ours && (wanted.xattrs.is_some() || self.differs(found, wanted, None))
    }

    fn differs(&self, found: &Object, wanted: &Attributes, xattrs: Option<crate::store::Xattrs>) -> bool {
        let abilities = self.store().abilities();
        let is_link = found.kind == Kind::Symlink;
        let sorted = |list: &crate::store::Xattrs| {
            let mut list = list.clone();
            list.sort();
            list
        };
        let is_root = rustix::process::geteuid().is_root();
        abilities.modes && !is_link && wanted.mode != Some(found.mode & 0o7777)
            || abilities.owners && is_root && (wanted.uid, wanted.gid) != (Some(found.uid), Some(found.gid))
            || abilities.times && found.kind != Kind::Directory && wanted.mtime != Some(found.mtime)
            || matches!((&wanted.xattrs, xattrs), (Some(wanted), Some(has)) if sorted(wanted) != sorted(&has))
    }

    /// True if the store has another copy at a place than this pass has read: this pass has taken it to another place, or
    /// has put another one there. The next pass reads what is there now.
    pub(super) fn is_outdated(&self, place: &PendingPlace) -> Result<bool> {
        let now = self.link.pending_place(place.parent, &place.name);
        let now = now.map_err(|code| Error::new(code, "cannot read a pending place"))?;
        Ok(now.is_none_or(|now| now.placed != place.placed))
    }

    /// Notes a conflict: the store has a version that the pool does not know. Nothing if the place
    /// [is outdated](Self::is_outdated).
    pub(super) fn conflict(
        &self,
        place: &PendingPlace,
        path: &StorePath,
        found: Option<&Object>,
    ) -> Result<()> {
        if self.is_outdated(place)? {
            tracing::debug!("{path} has changed since this pass read it: {place:?}, the store has {found:?}");
            return Ok(());
        }
        tracing::warn!(
            "conflict at {path}: {}; `forebay state` shows it, `forebay resolve` settles it",
            if found.is_some() { "it was changed in the store" } else { "it was removed in the store" }
        );
        tracing::debug!("the place is {place:?}, the store has {found:?}");
        let version = found.map_or(StoreVersion::default(), |found| found.version);
        let done = self.link.conflict(place.parent, &place.name, true, version);
        done.map_err(|code| pool_error("note the conflict at", path, code))
    }
}

/// Whether a mover runs, as far as can be seen: one of another host counts as running.
pub(super) fn is_alive(mover: &str) -> bool {
    runs_here(mover).unwrap_or(true)
}

pub(super) fn upload(
    place: &PendingPlace,
    entry: &Entry,
    directory: &StorePath,
    path: &StorePath,
    replaces: Option<StoreVersion>,
) -> Next {
    Next::Upload(Box::new(WantedUpload {
        place: place.clone(),
        entry: *entry,
        directory: directory.clone(),
        path: path.clone(),
        replaces,
        open_files: OpenFiles::Wait,
    }))
}

/// Seconds since a time of this node's clock. A time that lies ahead is of before the clock was set back: how long ago
/// that was is not known, and it counts as longer than anything waits.
pub(super) fn seconds_since(time: Timestamp) -> f64 {
    let since = host::since_1970().as_secs_f64() - (time.sec as f64 + f64::from(time.nsec) / 1e9);
    match since {
        ..-1.0 => f64::INFINITY,
        since => since.max(0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_that_lies_ahead_of_a_clock_that_was_set_back_is_long_ago() {
        let now = host::since_1970().as_secs() as i64;
        let of = |sec| seconds_since(Timestamp { sec, nsec: 0 });
        assert!(of(now - 3600) >= 3600.0 && of(now - 3600).is_finite());
        assert_eq!(of(now + 3600), f64::INFINITY);
    }
}
