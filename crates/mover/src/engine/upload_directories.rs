//! Where the temporaries of a pass's uploads are: beside their final names, or in directories that the store has made for
//! them ([`Store::make_upload_directories`]).
//!
//! They are made when the first file of a directory is uploaded, and removed after its last one: on a distant store each of
//! these calls holds the lock of the directory that its names wait for.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::store::{Store, StorePath, UPLOADS_APART_MIN};

/// The directories that a store makes for a pass, removed when this is dropped at the latest.
pub(super) struct UploadDirectories<'a> {
    store: &'a dyn Store,
    /// By the directory of the final names. A leaf mutex.
    apart: Mutex<BTreeMap<StorePath, Arc<Apart>>>,
}

/// Those of one directory.
struct Apart {
    /// Files of the pass, those of them that are still to come, and those that have begun.
    uploads: usize,
    left: AtomicUsize,
    begun: AtomicUsize,
    /// None before the first file.
    made: OnceLock<Vec<StorePath>>,
}

impl Apart {
    fn made(&self) -> &[StorePath] {
        self.made.get().map_or(&[], Vec::as_slice)
    }
}

impl<'a> UploadDirectories<'a> {
    /// For uploads into no directory yet.
    pub(super) fn new(store: &'a dyn Store) -> UploadDirectories<'a> {
        UploadDirectories { store, apart: Mutex::default() }
    }

    /// For uploads into these directories too, each named as often as it gets files. All of a directory come in one call:
    /// its directories are removed after the last of them.
    pub(super) fn announce<'b>(&self, wanted: impl Iterator<Item = &'b StorePath>) {
        if !self.store.has_slow_names() {
            return;
        }
        let mut uploads = BTreeMap::<&StorePath, usize>::new();
        wanted.for_each(|directory| *uploads.entry(directory).or_default() += 1);
        let several = uploads.into_iter().filter(|(_, files)| *files >= UPLOADS_APART_MIN);
        let apart = several.map(|(path, uploads)| {
            let (left, begun) = (AtomicUsize::new(uploads), AtomicUsize::new(0));
            (path.clone(), Arc::new(Apart { uploads, left, begun, made: OnceLock::new() }))
        });
        self.lock().extend(apart);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<StorePath, Arc<Apart>>> {
        self.apart.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of(&self, directory: &StorePath) -> Option<Arc<Apart>> {
        self.lock().get(directory).cloned()
    }

    /// True if no directory is ever made for uploads that were announced.
    pub(super) fn are_none(&self) -> bool {
        self.lock().is_empty()
    }

    /// True if uploads into `directory` have their temporaries in others, since names are made slowly there.
    pub(super) fn are_for(&self, directory: &StorePath) -> bool {
        self.of(directory).is_some_and(|apart| !apart.made().is_empty())
    }

    /// Where the temporary of the next upload into `directory` is to be; none for this directory itself.
    pub(super) fn next(&self, directory: &StorePath) -> Option<StorePath> {
        let apart = self.of(directory)?;
        let made = apart.made.get_or_init(|| self.store.make_upload_directories(directory, apart.uploads));
        let begun = apart.begun.fetch_add(1, Ordering::Relaxed);
        made.get(begun % made.len().max(1)).cloned()
    }

    /// A file of `directory` has its name, or will get none in this pass.
    pub(super) fn ended(&self, directory: &StorePath) {
        let Some(apart) = self.of(directory) else { return };
        if apart.left.fetch_sub(1, Ordering::AcqRel) == 1 && !apart.made().is_empty() {
            self.store.remove_upload_directories(apart.made());
        }
    }
}

impl Drop for UploadDirectories<'_> {
    fn drop(&mut self) {
        let all = std::mem::take(&mut *self.lock());
        let left = all.values().filter(|apart| apart.left.load(Ordering::Acquire) > 0);
        left.filter(|apart| !apart.made().is_empty())
            .for_each(|apart| self.store.remove_upload_directories(apart.made()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Attributes, MoverId, PosixOptions, PosixStore};

    #[test]
    fn many_uploads_into_a_directory_of_a_slow_store_have_their_temporaries_apart() {
        let at = std::env::temp_dir().join(format!("forebay-apart-{}", std::process::id()));
        std::fs::create_dir(&at).unwrap();
        let options =
            PosixOptions { no_replace: false, exchange: false, slow_names: true, ..PosixOptions::default() };
        let store = PosixStore::open(&at, options, MoverId::own()).unwrap();
        let path = |name: &str| StorePath::root().join(name.as_bytes()).unwrap();
        let (many, few) = (path("many"), path("few"));
        let wanted = || std::iter::repeat_n(&many, 32).chain(std::iter::repeat_n(&few, 2));
        for directory in [&many, &few] {
            store.make_directory(directory, &Attributes::default()).unwrap();
        }
        let places = UploadDirectories::new(&store);
        assert!(places.are_none());
        places.announce(wanted());
        assert!(!places.are_for(&many) && std::fs::read_dir(at.join("many")).unwrap().next().is_none());
        let (first, second) = (places.next(&many).unwrap(), places.next(&many).unwrap());
        assert!(first != many && second != many && first != second, "{first} {second}");
        assert!(places.are_for(&many));
        assert_eq!((places.next(&many).as_ref(), places.next(&few)), (Some(&first), None));
        assert!(!places.are_for(&few));
        let are_there = || store.look(&first).unwrap().is_some();
        (1..32).for_each(|_| places.ended(&many));
        assert!(are_there(), "a file of the pass is left");
        places.ended(&many);
        assert!(!are_there());
        drop(places);
        let places = UploadDirectories::new(&store);
        places.announce(wanted());
        let first = places.next(&many).unwrap();
        places.ended(&many);
        assert!(store.look(&first).unwrap().is_some());
        drop(places);
        assert!(store.look(&first).unwrap().is_none(), "the pass has ended early");
        std::fs::remove_dir_all(&at).unwrap();
    }
}
