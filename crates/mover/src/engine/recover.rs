//! After a mover has died: what it changed in the store and did not report.
//!
//! Before each change under a final name the mover notes the version that will be there ([`Link::intend`]): zeros for a
//! removal, the same version at both places of a rename. So the next mover recognises what was done. It does this
//! before anything else, since paths may lead through what was renamed.

use forebay_types::{Code, Error, Ino, PendingPlace, Result, StoreVersion};

use super::link::Link;
use super::stores::Stores;
use crate::store::{Object, Store};

/// What a removal intends.
pub(super) const NOTHING: StoreVersion =
    StoreVersion { bytes: 0, mtime: forebay_types::Timestamp { sec: 0, nsec: 0 }, ino: 0, tag: 0 };

/// What making a directory intends: its version is not known before.
pub(super) const A_DIRECTORY: StoreVersion = StoreVersion { bytes: u64::MAX, ..NOTHING };

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

/// What the store has at a place; nothing when it does not have its directory.
#[allow(clippy::option_option)]
fn look(stores: &Stores, place: &PendingPlace) -> Result<Option<Option<Object>>> {
    match stores.locate(place.parent) {
        Ok(located) => {
            let path =
                located.path.join(&place.name).map_err(|code| Error::new(code, "a path is too long"))?;
            Ok(Some(located.at.store.look(&path).map_err(Error::from)?))
        }
        Err(e) if matches!(e.code, Code::NotFound | Code::NotSupported) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Reports what a mover that died did at these places. True when there may be more: what was renamed hid it.
pub(super) fn recover(link: &Link, stores: &Stores, places: &[PendingPlace]) -> Result<bool> {
    let mut intended = Vec::new();
    for place in places.iter().filter(|place| place.intent.is_some()) {
        if let Some(real) = look(stores, place)? {
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
            None if intent == NOTHING => link.unpublished(parent, name, one.place.changes),
            None => match other(&|other| other.is_done(&intent) && !other.is_as_known()) {
                Some(to) => link.moved((parent, name), to.at(), intent),
                None => continue, // a directory above was moved, or another program removed it
            },
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
