//! The identity of a store's directory: by it another directory in the same place is recognized.

/// What tells a store's directory from another one in its place.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct StoreDirectory {
    /// Its inode number, if that lasts.
    pub number: Option<u64>,
    /// The magic number of its file system.
    pub file_system: Option<u32>,
}

impl StoreDirectory {
    /// False if what both have differs.
    pub(super) fn may_be(self, other: StoreDirectory) -> bool {
        let differ = |a: Option<u64>, b: Option<u64>| a.zip(b).is_some_and(|(a, b)| a != b);
        let kind = |of: StoreDirectory| of.file_system.map(u64::from);
        !differ(self.number, other.number) && !differ(kind(self), kind(other))
    }
}
