//! Where the temporaries of a batch's uploads are: beside their final names, or in directories that the store has made for
//! them ([`Store::make_upload_directories`]).

use std::collections::BTreeMap;

use crate::store::{Store, StorePath};

/// The directories that a store has made for a batch, removed when this is dropped.
pub(super) struct UploadDirectories<'a> {
    store: &'a dyn Store,
    /// By the directory of the final names.
    made: BTreeMap<StorePath, Vec<StorePath>>,
}

impl<'a> UploadDirectories<'a> {
    /// Has directories made for uploads into these, each named as often as it gets files.
    pub(super) fn make<'b>(
        store: &'a dyn Store,
        wanted: impl Iterator<Item = &'b StorePath>,
    ) -> UploadDirectories<'a> {
        let mut uploads = BTreeMap::<&StorePath, usize>::new();
        wanted.for_each(|directory| *uploads.entry(directory).or_default() += 1);
        let made = uploads.into_iter().filter(|(_, files)| *files > 1);
        let made = made.map(|(path, files)| (path.clone(), store.make_upload_directories(path, files)));
        UploadDirectories { store, made: made.filter(|(_, made)| !made.is_empty()).collect() }
    }

    /// True if uploads into `directory` have their temporaries in others, since names are made slowly there.
    pub(super) fn are_for(&self, directory: &StorePath) -> bool {
        self.made.contains_key(directory)
    }

    /// Where the temporary of the `i`th upload is, which goes into `directory`.
    pub(super) fn of<'b>(&'b self, i: usize, directory: &'b StorePath) -> &'b StorePath {
        self.made.get(directory).map_or(directory, |made| &made[i % made.len()])
    }
}

impl Drop for UploadDirectories<'_> {
    fn drop(&mut self) {
        self.made.values().for_each(|made| self.store.remove_upload_directories(made));
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
        let wanted = || std::iter::repeat_n(&many, 32).chain(std::iter::once(&few));
        for directory in [&many, &few] {
            store.make_directory(directory, &Attributes::default()).unwrap();
        }
        let made = UploadDirectories::make(&store, wanted());
        let (first, second) = (made.of(0, &many).clone(), made.of(1, &many).clone());
        assert!(first != many && second != many && first != second, "{first} {second}");
        assert!(made.are_for(&many) && !made.are_for(&few));
        assert_eq!((made.of(2, &many), made.of(0, &few)), (&first, &few));
        assert!(store.look(&first).unwrap().is_some());
        drop(made);
        assert!(store.look(&first).unwrap().is_none());
        std::fs::remove_dir_all(&at).unwrap();
    }
}
