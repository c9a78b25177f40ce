//! After a mover has died: what it changed in the store and did not report.
//!
//! Before each change under a final name the mover notes the version that will be there ([`Link::intend`]): zeros for a
//! removal, the same version at both places of a rename. So the next mover recognises what was done. It does this
//! before anything else, since paths may lead through what was renamed.

use std::collections::BTreeSet;

use forebay_types::{Code, Error, Ino, PendingPlace, Result, StoreVersion, Wanted, EPOCH_UNKNOWN};

use super::link::Link;
use super::reconcile::is_alive;
use super::stores::{Located, Stores};
use crate::store::{Object, Store};

/// Settles what dead movers had put aside where they were about to change something. Else a file that one had put aside
/// for its removal would count as removed, and come back with a later sweep.
fn settle_aside(stores: &Stores, places: &[PendingPlace], only: Option<Ino>) -> Result<()> {
    let intended = places.iter().filter(|place| place.intent.is_some());
    let directories: BTreeSet<Ino> = intended.map(|place| place.parent).collect();
    for directory in directories {
        let Some(located) = located(stores, directory, only)? else { continue };
        match located.at.store.remove_leftovers(&located.path, &is_alive) {
            Ok(_) => {}
            Err(e) if e.code() == Code::NotFound => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Where the store has a directory; none if it does not, or is not the store at `only`.
fn located(stores: &Stores, directory: Ino, only: Option<Ino>) -> Result<Option<Located>> {
    match stores.locate(directory) {
        Ok(located) if only.is_some_and(|only| only != located.at.root) => Ok(None),
        Ok(located) => Ok(Some(located)),
        Err(e) if matches!(e.code, Code::NotFound | Code::NotSupported) => Ok(None),
        Err(e) => Err(e),
    }
}

/// A place with an intent, and what the store has there.
struct Intended<'p> {
    place: &'p PendingPlace,
    real: Option<Object>,
}

impl Intended<'_> {
    /// What the store has is what the mover intended.
    fn is_done(&self, intent: &StoreVersion) -> bool {
        self.real.as_ref().is_some_and(|real| real.is_upload(intent))
    }

    fn is_as_known(&self) -> bool {
        self.real.as_ref().map(|real| real.version) == self.known()
    }

    fn known(&self) -> Option<StoreVersion> {
        self.place.placed.map(|placed| placed.version)
    }

    fn at(&self) -> (Ino, &[u8]) {
        (self.place.parent, &self.place.name)
    }
}

/// True unless a directory is elsewhere in the store, as after a rename that is not recorded yet.
fn is_there(located: &Located) -> Result<bool> {
    match located.placed {
        Some(placed) if placed.version.ino != 0 => {
            let looked = located.at.store.look(&located.path).map_err(Error::from)?;
            Ok(looked.is_some_and(|object| object.version == placed.version))
        }
        _ => Ok(true),
    }
}

/// What the store has at a place; nothing when it does not have its directory, or is not the store at `only`.
#[allow(clippy::option_option)]
fn look(stores: &Stores, place: &PendingPlace, only: Option<Ino>) -> Result<Option<Option<Object>>> {
    let Some(located) = located(stores, place.parent, only)? else { return Ok(None) };
    let path = located.path.join(&place.name).map_err(|code| Error::new(code, "a path is too long"))?;
    let looked = located.at.store.look(&path).map_err(Error::from)?;
    if looked.is_none() && !is_there(&located)? {
        return Ok(None);
    }
    Ok(Some(looked))
}

/// Reports what a mover that died did at these places, or at those of the store at `only`. True when there may be more:
/// what was renamed hid it.
pub(super) fn recover(
    link: &Link,
    stores: &Stores,
    places: &[PendingPlace],
    only: Option<Ino>,
) -> Result<bool> {
    settle_aside(stores, places, only)?;
    let mut intended = Vec::new();
    for place in places.iter().filter(|place| place.intent.is_some()) {
        if let Some(real) = look(stores, place, only)? {
            intended.push(Intended { place, real });
        }
    }
    for one in &intended {
        let Some(intent) = one.place.intent else { continue };
        if one.is_as_known() {
            continue; // it did nothing yet
        }
        let other = |is_other: &dyn Fn(&Intended<'_>) -> bool| {
            intended
                .iter()
                .find(|other| other.at() != one.at() && other.place.intent == Some(intent) && is_other(other))
        };
        let (parent, name) = one.at();
        let done = match &one.real {
            None if intent == StoreVersion::NOTHING => link.unpublished(parent, name, one.place.changes),
            None => match other(&|other| other.is_done(&intent) && !other.is_as_known()) {
                Some(to) => link.moved((parent, name), to.at(), intent),
                None => continue, // a directory above was moved, or another program removed it
            },
            // It set attributes of what was there.
            Some(real)
                if real.version == intent
                    && one.known().is_some_and(|known| known.differs_in_time(&real.version)) =>
            {
                let Some(placed) = one.place.placed else { continue };
                let epoch = match (&one.place.wanted, link.inode(placed.ino)) {
                    (Some(Wanted::Here(entry, Some(copy))), _) if entry.attr.ino == placed.ino => copy.epoch,
                    // The epoch of a file's data there is known if the pool has no data of it.
                    (_, Ok(entry)) if !entry.attr.is_resident() => entry.attr.epoch(),
                    (_, Ok(_) | Err(Code::NotFound)) => EPOCH_UNKNOWN,
                    (_, Err(code)) => {
                        return Err(Error::new(code, format!("cannot read inode {}", placed.ino)));
                    }
                };
                link.published((parent, name), placed.ino, epoch, 0, real.version)
            }
            Some(real) if real.is_upload(&intent) => {
                match other(&|other| other.real.is_none() && other.known() == Some(intent)) {
                    Some(from) => link.moved(from.at(), (parent, name), intent),
                    // It was published. Of which epoch is not known: it is published again.
                    None => link.conflict(parent, name, false, real.version),
                }
            }
            Some(_) => continue, // another program changed it: the next publication finds the conflict
        };
        match done {
            Ok(()) => {
                tracing::info!("the last mover died at {}: what it did is recorded", link.path(parent, name));
                return Ok(true);
            }
            Err(Code::Busy | Code::Stale | Code::NotFound) => {}
            Err(code) => return Err(Error::new(code, "cannot record what the last mover did")),
        }
    }
    Ok(false)
}
