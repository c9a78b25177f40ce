//! What the threads of a staging do: jobs, and the files that are being copied.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

use crate::attributes::Scratch;
use crate::branch::Branch;
use crate::copy::{Buffer, Failure, Method, Sum};
use crate::entry::Entry;
use crate::links::Key;
use crate::tree::{Meta, Names, Tree, Wanted};

/// Times that a file is copied when its source changes meanwhile.
pub(crate) const ATTEMPTS: u32 = 3;

/// Some of the names of a listing.
pub(crate) struct Listed<S: Tree, D: Tree> {
    pub(crate) at: Branch<S, D>,
    pub(crate) names: Arc<Names>,
    pub(crate) range: Range<usize>,
}

/// Something to do.
pub(crate) enum Job<S: Tree, D: Tree> {
    /// The names that the user gave, by index.
    Tops(Range<usize>),
    /// List a source directory from a cursor on.
    List(Branch<S, D>, u64),
    /// Enter the directories among these.
    Directories(Listed<S, D>),
    /// Enter one directory.
    Directory(Entry<S, D>),
    /// Stage those of these that are not directories.
    Files(Listed<S, D>),
    /// Stage one entry, the n-th attempt; the key is of an inode with several links that this attempt copies.
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
    /// The files job in progress; taken out when other threads go on with it.
    pub(crate) current: Option<Listed<S, D>>,
}

/// A copy that has no final name yet, or is not complete under it.
pub(crate) struct Copying<S: Tree, D: Tree> {
    pub(crate) entry: Entry<S, D>,
    pub(crate) directory: Arc<D::Directory>,
    pub(crate) file: D::File,
    /// The name that it has now.
    pub(crate) name: Box<[u8]>,
    pub(crate) temporary: bool,
    pub(crate) meta: Meta,
    pub(crate) wanted: Wanted,
    pub(crate) attempt: u32,
    /// Of an inode with several links.
    pub(crate) key: Option<Key>,
    pub(crate) data_bytes: u64,
    pub(crate) sum: Option<Sum>,
}

/// A large file in progress.
pub(crate) struct Large<S: Tree, D: Tree> {
    pub(crate) copying: Copying<S, D>,
    pub(crate) source: S::File,
    pub(crate) method: Method,
    pub(crate) ranges: u64,
    /// The copy is complete and being checked.
    pub(crate) checking: AtomicBool,
    pub(crate) next: AtomicU64,
    pub(crate) left: AtomicU64,
    pub(crate) data_bytes: AtomicU64,
    pub(crate) failure: Mutex<Option<Failure>>,
    pub(crate) sums: Mutex<Vec<Option<Sum>>>,
}
