//! The work of a staging's threads: jobs, and files that are being copied.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

use crate::attributes::Scratch;
use crate::branch::Branch;
use crate::copy::{Buffer, Failure, Method, Sum};
use crate::entry::Entry;
use crate::links::Key;
use crate::tree::{Meta, Names, Tree, Wanted};

/// Attempts to copy a file whose source changes meanwhile.
pub(crate) const ATTEMPTS: u32 = 3;

/// Some of the names of a listing.
pub(crate) struct Listed<S: Tree, D: Tree> {
    pub(crate) at: Branch<S, D>,
    pub(crate) names: Arc<Names>,
    pub(crate) range: Range<usize>,
}

/// A unit of work.
pub(crate) enum Job<S: Tree, D: Tree> {
    /// The names that the user gave, by index.
    Tops(Range<usize>),
    /// List a source directory, starting at a cursor.
    List(Branch<S, D>, u64),
    /// Enter the directories among these.
    Directories(Listed<S, D>),
    /// Enter one directory.
    Directory(Entry<S, D>),
    /// Stage the entries among these that are not directories.
    Files(Listed<S, D>),
    /// Stage one entry; the number counts its attempts. The key is set if this attempt copies an inode with several
    /// links.
    File(Entry<S, D>, u32, Option<Key>),
    /// Copy or check ranges of a large file.
    Large(Arc<Large<S, D>>),
}

/// The state of one thread.
pub(crate) struct Worker<S: Tree, D: Tree> {
    pub(crate) buffer: Buffer,
    pub(crate) scratch: Scratch,
    /// Copies that wait to be synced together.
    pub(crate) batch: Vec<Copying<S, D>>,
    /// The files job in progress; taken out when it is queued for other threads.
    pub(crate) current: Option<Listed<S, D>>,
}

/// A copy without its final name, or one that is incomplete under it.
pub(crate) struct Copying<S: Tree, D: Tree> {
    pub(crate) entry: Entry<S, D>,
    pub(crate) directory: Arc<D::Directory>,
    pub(crate) file: D::File,
    /// Its current name.
    pub(crate) name: Box<[u8]>,
    pub(crate) temporary: bool,
    pub(crate) meta: Meta,
    pub(crate) wanted: Wanted,
    pub(crate) attempt: u32,
    /// The key of an inode with several links.
    pub(crate) key: Option<Key>,
    pub(crate) data_bytes: u64,
    /// Bytes that were reported as done before the copy is complete.
    pub(crate) reported: AtomicU64,
    pub(crate) sum: Option<Sum>,
}

/// A large file in progress.
pub(crate) struct Large<S: Tree, D: Tree> {
    pub(crate) copying: Copying<S, D>,
    pub(crate) source: S::File,
    pub(crate) method: Method,
    pub(crate) ranges: u64,
    /// The copy is complete and being verified.
    pub(crate) checking: AtomicBool,
    pub(crate) next: AtomicU64,
    pub(crate) left: AtomicU64,
    pub(crate) data_bytes: AtomicU64,
    pub(crate) failure: Mutex<Option<Failure>>,
    pub(crate) sums: Mutex<Vec<Option<Sum>>>,
}
