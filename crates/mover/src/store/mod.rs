//! Backing stores: directories and object stores behind one trait.
//!
//! A mover uploads under temporary names, publishes under final names, renames, removes, and restores ranges. Its rules,
//! which each store keeps:
//!
//! - **Nothing is overwritten or removed whose version is not the expected one**, also not between compare and replace,
//!   as far as [`Abilities::conditional_publish`] says. Otherwise the answer is [`Outcome::Conflict`].
//! - **A torn file never appears under a final name**: only whole uploads are published.
//! - **Nothing outside the store is touched**: no path follows a symbolic link or leaves the root.
//! - **Credentials appear nowhere**: not in errors, `Debug`, `Display` or names.
//!
//! Calls block and come from many threads. A store holds no lock during a call, so a call that hangs hangs only its
//! thread. A call that failed with a transient error may have taken effect or may take effect later; the mover looks
//! before it repeats it.
//!
//! [`PosixStore`] is any directory, [`ObjectStore`] an object store. [`limited`] wraps a store with limits of rate and
//! parallelism, `faulty` with faults for tests. [`StoreUrl`] opens a store. Tests: beside the modules, and
//! `tests/stores`: one suite for all stores, races, escapes.

mod attributes;
mod error;
#[cfg(any(test, feature = "faults"))]
pub mod faulty;
pub mod limited;
mod object;
mod path;
mod posix;
mod source;
#[cfg(any(test, feature = "faults"))]
pub mod steps;
mod temporary;
mod url;

use std::ops::Range;
use std::os::fd::BorrowedFd;

pub use attributes::{
    Abilities, Attributes, DirectoryRemoval, Leftovers, Listing, Object, Outcome, Warnings, Xattrs,
};
pub use error::{StoreError, StoreResult};
use forebay_types::Kind;
pub use forebay_types::StoreVersion;
pub use object::{ObjectStore, S3Place};
pub use path::{check_name, with_suffix, StorePath};
pub use posix::{PosixOptions, PosixStore, StoreDirectory};
pub(crate) use source::{is_dense, next_data};
pub use source::{FileSource, Source};
pub(crate) use temporary::may_run;
#[cfg(feature = "simulation")]
pub use temporary::simulate_movers;
pub use temporary::{runs_here, Marks, MoverId, Temporaries, TemporaryKind, TemporaryName};
#[cfg(feature = "simulation")]
pub use url::simulate_stores;
pub use url::{StorePlace, StoreUrl};

/// A backing store. See the module for the rules.
///
/// Uploads into one directory for which directories for their temporaries pay ([`Store::make_upload_directories`]).
pub const UPLOADS_APART_MIN: usize = 16;

/// Every call may fail with a transient error ([`StoreError::is_transient`]), [`Code::Io`](forebay_types::Code::Io) or
/// [`Code::AccessDenied`](forebay_types::Code::AccessDenied); calls that write also with
/// [`Code::NoSpace`](forebay_types::Code::NoSpace) and [`Code::ReadOnly`](forebay_types::Code::ReadOnly). A parent
/// directory that is missing is [`Code::NotFound`](forebay_types::Code::NotFound), one that is a symbolic link or no
/// directory [`Code::NotDirectory`](forebay_types::Code::NotDirectory).
pub trait Store: Send + Sync {
    /// The store's URL for people, without credentials.
    fn title(&self) -> String;

    /// What the store can do.
    fn abilities(&self) -> Abilities;

    /// Attributes that were not kept since the store was opened.
    fn warnings(&self) -> Warnings;

    /// False if what was opened is not, or not any more, what the store's URL leads to: its directory was removed or
    /// replaced, or its file system was unmounted. It is to be opened again then.
    fn is_current(&self) -> bool {
        true
    }

    /// What tells the directory that was opened from others; nothing for an object store.
    fn directory(&self) -> StoreDirectory {
        StoreDirectory::default()
    }

    /// Names for temporaries of this mover.
    fn temporaries(&self) -> &Temporaries;

    /// Passes each object of a directory to `each`, in the store's order. Temporaries are left out and counted. An
    /// entry that is created or removed meanwhile may be missing. An error of `each` ends the listing.
    /// [`Code::NotFound`](forebay_types::Code::NotFound) if there is no such directory.
    fn list(
        &self,
        directory: &StorePath,
        each: &mut dyn FnMut(Object) -> StoreResult<()>,
    ) -> StoreResult<Listing>;

    /// The object at a path; none if there is no object, or no parent directory.
    fn look(&self, path: &StorePath) -> StoreResult<Option<Object>>;

    /// Writes the bytes of `range` of a file to `into` at the same offsets, holes as holes or zeros. The caller sets
    /// the size of `into`. [`Code::Stale`](forebay_types::Code::Stale) if the object is not of version `expected`,
    /// before or after: what was written to `into` then means nothing.
    fn read(
        &self,
        path: &StorePath,
        expected: &StoreVersion,
        range: Range<u64>,
        into: BorrowedFd<'_>,
    ) -> StoreResult<()>;

    /// True where new names are made slowly, and one at a time in each directory.
    fn has_slow_names(&self) -> bool {
        false
    }

    /// Makes directories in `directory` for the temporaries of so many uploads into it, where names are made faster so; none
    /// where they are not, or if that fails: uploads then have their temporaries in `directory` itself. The caller removes
    /// them ([`Store::remove_upload_directories`]).
    fn make_upload_directories(&self, _directory: &StorePath, _uploads: usize) -> Vec<StorePath> {
        Vec::new()
    }

    /// Removes upload directories that are empty. One that is left is a leftover like any other.
    fn remove_upload_directories(&self, _directories: &[StorePath]) {}

    /// Stores a whole file under a temporary name. [`Code::Exists`](forebay_types::Code::Exists) if the name is taken.
    /// After a failure nothing is left, or a temporary. Returns the version, which `publish` may change.
    fn upload(
        &self,
        temporary: &StorePath,
        source: &dyn Source,
        attributes: &Attributes,
    ) -> StoreResult<StoreVersion>;

    /// Begins an upload whose parts several movers write: a file of this size, all hole, under a temporary name.
    fn begin_parts(&self, temporary: &StorePath, _bytes: u64) -> StoreResult<()> {
        Err(self.no_parts(temporary))
    }

    /// Writes the data of a source into an upload that any mover has begun, and makes them durable. The source's holes
    /// are left as they are.
    fn write_part(&self, temporary: &StorePath, _source: &dyn Source) -> StoreResult<()> {
        Err(self.no_parts(temporary))
    }

    /// Ends an upload whose parts were written: the rest of [`Store::upload`].
    fn end_parts(&self, temporary: &StorePath, _attributes: &Attributes) -> StoreResult<StoreVersion> {
        Err(self.no_parts(temporary))
    }

    /// The error of a store without [`Abilities::parts`].
    fn no_parts(&self, temporary: &StorePath) -> StoreError {
        let what = format!("cannot write a part of {temporary} in {}", self.title());
        StoreError::lasting(forebay_types::Code::NotSupported, what).why("this store gets whole files")
    }

    /// Makes the data and attributes of uploads durable, before they are published. One call for many files is cheaper
    /// than many calls.
    fn make_durable(&self, temporaries: &[StorePath]) -> StoreResult<()>;

    /// Gives an upload its final name, in place of the version `expected`, or of nothing. After a conflict the upload
    /// is still there, or is gone because another program replaced the file just after it was published.
    /// [`Code::NotFound`](forebay_types::Code::NotFound) if the temporary is gone: an earlier call may have taken
    /// effect, which `look` shows. Symbolic links, nodes and hard links made under a temporary name are published in
    /// the same way.
    fn publish(
        &self,
        temporary: &StorePath,
        to: &StorePath,
        expected: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>>;

    /// Renames a file or directory of version `version`, in place of the version `replaced`, or of nothing. A
    /// directory replaces nothing. The conflict names what was found at `from`, or else at `to`.
    fn rename(
        &self,
        from: &StorePath,
        version: &StoreVersion,
        to: &StorePath,
        replaced: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>>;

    /// Copies a file inside the store, in place of the version `replaced`, or of nothing, for stores that cannot rename
    /// without copying. If an earlier call has made the copy already, this call succeeds.
    /// [`Code::Stale`](forebay_types::Code::Stale) if the file at `from` is not of version `version`; a conflict names
    /// what was found at `to`.
    fn copy(
        &self,
        from: &StorePath,
        _version: &StoreVersion,
        _to: &StorePath,
        _replaced: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        let what = format!("cannot copy {from} in {}", self.title());
        Err(StoreError::lasting(forebay_types::Code::NotSupported, what).why("this store renames files"))
    }

    /// Removes an object, not a directory, of version `expected`. An object that is missing is a conflict with none.
    fn remove(&self, path: &StorePath, expected: &StoreVersion) -> StoreResult<Outcome<()>>;

    /// Removes a temporary of this mover, if it is there.
    fn discard(&self, temporary: &StorePath) -> StoreResult<()>;

    /// Makes a directory, or finds it: attributes are set only on a new one. A conflict if something else has the name.
    fn make_directory(&self, path: &StorePath, attributes: &Attributes) -> StoreResult<Outcome<Object>>;

    /// Removes an empty directory. Temporaries in it whose movers are dead do not count, and are swept first.
    fn remove_directory(
        &self,
        path: &StorePath,
        is_alive: &dyn Fn(&str) -> bool,
    ) -> StoreResult<DirectoryRemoval>;

    /// Gives a file of version `version` another name, which must be free: else a conflict with what has it.
    fn link(
        &self,
        existing: &StorePath,
        version: &StoreVersion,
        new: &StorePath,
    ) -> StoreResult<Outcome<StoreVersion>>;

    /// Makes a symbolic link at a path that must be free. The target is not interpreted.
    fn make_symlink(
        &self,
        path: &StorePath,
        target: &[u8],
        attributes: &Attributes,
    ) -> StoreResult<Outcome<StoreVersion>>;

    /// Makes a FIFO, socket or device at a path that must be free.
    fn make_node(
        &self,
        path: &StorePath,
        kind: Kind,
        rdev: u64,
        attributes: &Attributes,
    ) -> StoreResult<Outcome<StoreVersion>>;

    /// Sets attributes of an object of version `expected`, and returns the new version. The data are not touched. (A
    /// change of another program at this moment is kept: attributes may then be set on its version.)
    fn set_attributes(
        &self,
        path: &StorePath,
        expected: &StoreVersion,
        attributes: &Attributes,
    ) -> StoreResult<Outcome<StoreVersion>>;

    /// All extended attributes of the namespace `user.`.
    fn xattrs(&self, path: &StorePath) -> StoreResult<Xattrs>;

    /// Makes the names in a directory durable: after publications, renames and removals in it.
    fn sync_directory(&self, directory: &StorePath) -> StoreResult<()>;

    /// Makes the names in all directories to which this mover has uploaded durable by one call, for several of them. False
    /// where that cannot be relied on, or may have failed: [`Store::sync_directory`] does it for each then.
    fn sync_all_directories(&self) -> bool {
        false
    }

    /// Removes temporaries in a directory whose movers are dead, and puts back what they had put aside.
    fn remove_leftovers(
        &self,
        directory: &StorePath,
        is_alive: &dyn Fn(&str) -> bool,
    ) -> StoreResult<Leftovers>;
}
