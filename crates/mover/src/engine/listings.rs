//! Directories whose names are being read from their store, and the names that this mover removed there meanwhile.
//!
//! A listing may have read a name before it was removed from the store. The pool forgets the name's place when the
//! removal is reported, so an import after that would bring the name back. Such names are left out of the import. The
//! lock of a directory is held over the requests of both sides to the pool, never over a call to the store.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};

use forebay_types::Ino;

use crate::host;

type Names = HashSet<Vec<u8>>;

/// A directory that is being listed: by how many listings, and the names that are gone.
type Listed = (usize, Arc<Mutex<Names>>);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Listings(Mutex<HashMap<u64, Listed>>);

/// A listing that is under way.
#[derive(Debug)]
pub(super) struct Listing<'a> {
    all: &'a Listings,
    directory: Ino,
    gone: Arc<Mutex<Names>>,
}

impl Listings {
    /// A listing of a directory begins. It ends when this is dropped.
    pub(super) fn begin(&self, directory: Ino) -> Listing<'_> {
        let mut all = host::lock(&self.0);
        let (count, gone) = all.entry(directory.0).or_default();
        *count += 1;
        Listing { all: self, directory, gone: Arc::clone(gone) }
    }

    /// Reports by `report` that a name of a directory is gone from the store. The store has it no longer.
    pub(super) fn gone<T>(&self, directory: Ino, name: &[u8], report: impl FnOnce() -> T) -> T {
        let listed = host::lock(&self.0).get(&directory.0).map(|(_, gone)| Arc::clone(gone));
        match listed {
            None => report(),
            Some(gone) => {
                let mut gone = host::lock(&gone);
                gone.insert(name.to_vec());
                report()
            }
        }
    }
}

impl Listing<'_> {
    /// The names that are gone since the listing began. None is added while the caller holds this.
    pub(super) fn gone(&self) -> MutexGuard<'_, Names> {
        host::lock(&self.gone)
    }
}

impl Drop for Listing<'_> {
    fn drop(&mut self) {
        let mut all = host::lock(&self.all.0);
        if let Some((count, _)) = all.get_mut(&self.directory.0) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.directory.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_that_goes_during_a_listing_is_known_until_its_end() {
        let all = Listings::default();
        all.gone(Ino(5), b"before", || {});
        let one = all.begin(Ino(5));
        let two = all.begin(Ino(5));
        assert_eq!(all.gone(Ino(5), b"x", || 7), 7);
        all.gone(Ino(6), b"elsewhere", || {});
        assert_eq!(one.gone().iter().cloned().collect::<Vec<_>>(), [b"x".to_vec()]);
        drop(one);
        assert_eq!(two.gone().len(), 1);
        drop(two);
        assert!(all.begin(Ino(5)).gone().is_empty());
    }
}
