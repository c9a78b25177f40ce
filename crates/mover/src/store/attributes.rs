//! What a store's calls take and return: objects, attributes, abilities, outcomes.

use forebay_types::{Kind, StoreVersion, Timestamp};
use xxhash_rust::xxh3::xxh3_64;

/// An object of a store, as it was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Object {
    /// Its name in its directory; empty for the root.
    pub name: Vec<u8>,
    /// Its kind.
    pub kind: Kind,
    /// Permission bits with set-ID and sticky bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last access.
    pub atime: Timestamp,
    /// Last modification as programs see it. An object store keeps it as metadata, and has another one in `version`.
    pub mtime: Timestamp,
    /// Device number of a device node, else 0.
    pub rdev: u64,
    /// Hard links.
    pub nlink: u32,
    /// The file system that has it, as `list` and `look` tell: 0 for the one of the store's root, and in stores that are
    /// none. Two objects of one file system with the same inode number are one.
    pub file_system: u64,
    /// Target of a symbolic link, else empty.
    pub link_target: Vec<u8>,
    /// Its version. A directory's has only its inode number, because its entries change its modification time.
    pub version: StoreVersion,
    /// Hash of the temporary name from which it was published, where the store keeps that; else 0.
    pub mark: u64,
    /// False if kind (between file and symbolic link), mode, owner and times are guesses: listings of object stores
    /// lack them, `look` has them.
    pub is_complete: bool,
}

impl Object {
    /// True if it was published from the upload of which this is the version. An object store gives an object another
    /// version when it is published; what stays is the mark of its upload, which `of_upload` has.
    pub fn is_upload(&self, upload: &StoreVersion) -> bool {
        let is_marked = self.mark != 0 && *upload == of_upload(self.version.bytes, self.mark);
        is_marked || self.version == *upload
    }

    /// Bytes of its data.
    pub fn bytes(&self) -> u64 {
        self.version.bytes
    }
}

/// A hash of the temporary name of an upload; never 0.
pub(crate) fn mark_hash(name: &[u8]) -> u64 {
    xxh3_64(name).max(1)
}

/// The version of an upload in a store that gives an object another version when it is published.
pub(crate) fn of_upload(bytes: u64, mark: u64) -> StoreVersion {
    StoreVersion { bytes, mtime: Timestamp::default(), ino: mark, tag: mark }
}

/// Attributes to set. What is none stays as it is, or is the store's default for a new object.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Attributes {
    /// Permission bits with set-ID and sticky bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Last access.
    pub atime: Option<Timestamp>,
    /// Last modification.
    pub mtime: Option<Timestamp>,
    /// All extended attributes of the namespace `user.`: others are removed.
    pub xattrs: Option<Xattrs>,
}

/// Extended attributes: full names (`user.…`) and values.
pub type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// What a store can do. What it cannot do fails with [`Code::NotSupported`](forebay_types::Code::NotSupported), except
/// for attributes: a store leaves out those that it cannot keep and counts them ([`Warnings`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abilities {
    /// Files are renamed without copying.
    pub rename: bool,
    /// Directories are renamed.
    pub rename_directory: bool,
    /// Several names of one file.
    pub hard_links: bool,
    /// Symbolic links.
    pub symbolic_links: bool,
    /// FIFOs, sockets, and for root devices.
    pub nodes: bool,
    /// Modes are kept.
    pub modes: bool,
    /// Owners are kept, if this process may set them.
    pub owners: bool,
    /// Times are kept to the nanosecond.
    pub times: bool,
    /// Extended attributes are kept.
    pub extended_attributes: bool,
    /// Comparing a version and replacing it is one step. Otherwise a change of another program between both (some
    /// milliseconds) may be overwritten.
    pub conditional_publish: bool,
    /// Holes stay holes.
    pub holes: bool,
    /// Several movers can write parts of one upload (`begin_parts`).
    pub parts: bool,
    /// Names may have any bytes except `/` and NUL. Otherwise they must be UTF-8, without white space at the ends of a
    /// path, and a file `a` excludes files under `a/`.
    pub raw_names: bool,
}

/// The outcome of a call that compares before it changes anything.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome<T> {
    /// Done.
    Done(T),
    /// Not done: the object found is not the expected one. None if there is no object.
    Conflict(Option<Box<Object>>),
}

impl<T> Outcome<T> {
    /// The result of a call that was done; none after a conflict.
    pub fn done(self) -> Option<T> {
        match self {
            Outcome::Done(value) => Some(value),
            Outcome::Conflict(_) => None,
        }
    }

    /// True for a conflict.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Outcome::Conflict(_))
    }

    pub(crate) fn conflict(found: Option<Object>) -> Outcome<T> {
        Outcome::Conflict(found.map(Box::new))
    }
}

/// The outcome of removing a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DirectoryRemoval {
    /// It is gone, or was not there.
    Removed,
    /// It has entries other than leftovers of dead movers.
    NotEmpty,
}

/// What a listing left out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Listing {
    /// Objects passed to the callback.
    pub objects: u64,
    /// Temporaries of movers, left out.
    pub temporaries: u64,
    /// Names that the pool cannot hold (keys with empty components, `.` or `..`), left out.
    pub unusable: u64,
}

/// What a sweep of temporaries did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Leftovers {
    /// Leftovers removed.
    pub removed: u64,
    /// Objects that a dead mover had put aside, back under their names.
    pub put_back: u64,
    /// Objects that a dead mover had put aside, whose names are taken: kept beside, as `<name>.forebay-kept-<number>`.
    pub kept: u64,
    /// Temporaries of live movers, untouched.
    pub live: u64,
}

/// Attributes that the store did not keep, counted since it was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Warnings {
    /// Owners that this process may not set.
    pub owners: u64,
    /// Modes.
    pub modes: u64,
    /// Times.
    pub times: u64,
    /// Objects whose extended attributes were not all kept.
    pub xattrs: u64,
}
