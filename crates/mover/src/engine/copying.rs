//! Gives files other names in stores that cannot rename, by a copy inside the store. The old name is removed at its own
//! place, as that of a further link would be: so a mover that dies in between loses nothing.

use forebay_types::{Code, Entry, PendingPlace, Result, StoreVersion};

use super::reconcile::{pool_error, upload, Next, Reconciler};
use super::restore::refresh;
use crate::store::{Outcome, StorePath};

impl Reconciler<'_> {
    /// Gives a clean file another name in a store that cannot rename: copies it there. The old name is removed at its own
    /// place.
    pub(super) fn copy_inside(
        &mut self,
        place: &PendingPlace,
        entry: &Entry,
        directory: &StorePath,
        path: &StorePath,
        replaces: Option<StoreVersion>,
    ) -> Result<Next> {
        let ino = entry.attr.ino;
        let located = self.stores.locate(ino)?;
        let Some(placed) = located.placed else { return Ok(Next::Later) };
        if located.path == *path {
            return Ok(Next::Later);
        }
        match self.store().copy(&located.path, &placed.version, path, replaces.as_ref()) {
            Ok(Outcome::Done(version)) => {
                let at = (place.parent, &place.name[..]);
                let done = self.link.published(at, ino, located.epoch, place.changes, version);
                done.map(|()| Next::Done).map_err(|code| pool_error("copy", path, code))
            }
            Ok(Outcome::Conflict(found)) => {
                self.conflict(place, path, found.as_deref()).map(|()| Next::Later)
            }
            // Another program has changed or removed it in the store.
            Err(e) if e.code() == Code::Stale && entry.attr.is_resident() => {
                Ok(upload(place, entry, directory, path, replaces))
            }
            Err(e) if e.code() == Code::Stale => refresh(self.link, self.stores, entry).map(|_| Next::Later),
            Err(e) => Err(e.into()),
        }
    }
}
