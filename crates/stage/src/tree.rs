//! The one door of the engine to what it copies from and to: a tree of directories and files, either of the backing
//! store ([`PosixTree`](crate::posix::PosixTree)) or of the pool ([`PoolTree`](crate::pool::PoolTree)).
//!
//! Everything is named by an open directory and one name in it, never by a path, so trees may be deeper than any path
//! is long and a link that somebody swaps in is never followed. Failures are codes; the engine adds the words.

use std::ops::Range;
use std::os::fd::BorrowedFd;

use forebay_types::{Code, Kind, Timestamp};

/// What a tree says of one object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Meta {
    pub(crate) kind: Kind,
    /// Permission bits with set-id and sticky bits (07777).
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) links: u32,
    /// Apparent bytes.
    pub(crate) size: u64,
    /// Bytes that the medium holds.
    pub(crate) allocated: u64,
    pub(crate) rdev: u64,
    pub(crate) device: u64,
    pub(crate) ino: u64,
    pub(crate) atime: Timestamp,
    pub(crate) mtime: Timestamp,
    pub(crate) ctime: Timestamp,
}

impl Meta {
    /// What names the object as long as it exists.
    pub(crate) fn identity(&self) -> (u64, u64) {
        (self.device, self.ino)
    }

    /// True when the file has holes, or its medium compresses.
    pub(crate) fn is_sparse(&self) -> bool {
        self.allocated < self.size
    }
}

/// Attributes that a new object is to get. Owner and group are `None` when they are left to the tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Wanted {
    pub(crate) mode: u32,
    pub(crate) uid: Option<u32>,
    pub(crate) gid: Option<u32>,
    pub(crate) atime: Timestamp,
    pub(crate) mtime: Timestamp,
}

/// Kind, owner and mode of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Standing {
    pub(crate) kind: Kind,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl From<Meta> for Standing {
    fn from(meta: Meta) -> Standing {
        Standing { kind: meta.kind, mode: meta.mode, uid: meta.uid, gid: meta.gid }
    }
}

/// An object to read or change attributes of.
pub(crate) enum Object<'a, T: Tree> {
    /// An open file.
    File(&'a T::File),
    /// An open directory.
    Directory(&'a T::Directory),
    /// A name in a directory, not followed if it is a link.
    Entry(&'a T::Directory, &'a [u8]),
}

impl<T: Tree> Clone for Object<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Tree> Copy for Object<'_, T> {}

/// Space of a tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Space {
    pub(crate) free_bytes: u64,
    pub(crate) free_inodes: u64,
}

/// Names collected from a directory, in one piece of memory.
#[derive(Default, Debug)]
pub(crate) struct Names {
    bytes: Vec<u8>,
    ends: Vec<(usize, Option<Kind>)>,
}

impl Names {
    pub(crate) fn push(&mut self, name: &[u8], kind: Option<Kind>) {
        self.bytes.extend_from_slice(name);
        self.ends.push((self.bytes.len(), kind));
    }

    #[allow(clippy::len_without_is_empty, reason = "nobody asks")]
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The name and kind (where the listing told it) at `index`.
    pub(crate) fn get(&self, index: usize) -> (&[u8], Option<Kind>) {
        let start = if index == 0 { 0 } else { self.ends[index - 1].0 };
        let (end, kind) = self.ends[index];
        (&self.bytes[start..end], kind)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&[u8], Option<Kind>)> {
        (0..self.len()).map(|i| self.get(i))
    }

    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.ends.clear();
    }
}

/// An open regular file.
pub(crate) trait File: Send + Sync {
    /// Reads at most `buffer.len()` bytes at `offset`; 0 at the end.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code>;
    /// Writes at most `data.len()` bytes at `offset`.
    fn write_at(&self, data: &[u8], offset: u64) -> Result<usize, Code>;
    /// Cuts or extends it, with a hole.
    fn set_size(&self, bytes: u64) -> Result<(), Code>;
    /// Its present size and time of last change of content.
    fn version(&self) -> Result<(u64, Timestamp), Code>;
    /// The next range that is not a hole, within `within`; none when only holes follow. A file whose holes cannot be
    /// told is all data and says so by [`File::knows_holes`].
    fn next_data(&self, within: Range<u64>) -> Result<Option<Range<u64>>, Code>;
    /// Whether `next_data` tells holes.
    fn knows_holes(&self) -> bool;
    /// The kernel's descriptor that is byte for byte the file, if there is one.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
    /// Starts writing to the medium, without waiting.
    fn start_sync(&self);
    /// Waits until content and attributes are on the medium.
    fn sync(&self) -> Result<(), Code>;
    /// Asks that the next read comes from the medium.
    fn forget_cached(&self);
}

/// A tree of directories and files.
pub(crate) trait Tree: Sync + Sized {
    /// An open directory.
    type Directory: Send + Sync;
    /// An open file.
    type File: File;

    /// What people call it: "the store", "the pool".
    fn title(&self) -> &'static str;
    /// Opens the directory at an absolute path, following links.
    fn open_path(&self, path: &[u8]) -> Result<(Self::Directory, Meta), Code>;
    /// Opens a directory to list it or make entries in it. `.` is `at` itself.
    fn open_directory(
        &self,
        at: &Self::Directory,
        name: &[u8],
        follow: bool,
    ) -> Result<(Self::Directory, Meta), Code>;
    /// Appends entries behind `cursor` (0: from the start), without `.` and `..`; the next cursor, or none at the end.
    /// One thread lists one open directory at a time.
    fn list(&self, at: &Self::Directory, cursor: u64, names: &mut Names) -> Result<Option<u64>, Code>;
    /// Attributes of an entry.
    fn stat(&self, at: &Self::Directory, name: &[u8], follow: bool) -> Result<Meta, Code>;
    /// Opens an entry for reading. What is not a regular file may be opened or refused; the attributes tell.
    fn open(&self, at: &Self::Directory, name: &[u8], follow: bool) -> Result<(Self::File, Meta), Code>;
    /// Makes a regular file and opens it for reading and writing; [`Code::Exists`] when the name is taken. Attributes
    /// may be set as wanted at once as far as nobody gets more access than wanted; `finish` sets the rest.
    fn create(&self, at: &Self::Directory, name: &[u8], wanted: &Wanted) -> Result<Self::File, Code>;
    /// Makes a directory that the caller can write to.
    fn make_directory(&self, at: &Self::Directory, name: &[u8], mode: u32) -> Result<(), Code>;
    /// Makes a symbolic link.
    fn symlink(&self, target: &[u8], at: &Self::Directory, name: &[u8]) -> Result<(), Code>;
    /// A symbolic link's target.
    fn read_link(&self, at: &Self::Directory, name: &[u8]) -> Result<Vec<u8>, Code>;
    /// Makes a FIFO, socket or device node.
    fn make_node(&self, at: &Self::Directory, name: &[u8], meta: &Meta) -> Result<(), Code>;
    /// Adds a hard link to what is not a directory.
    fn link(&self, from: (&Self::Directory, &[u8]), to: (&Self::Directory, &[u8])) -> Result<(), Code>;
    /// Renames; replaces what is there, unless `flags` are RENAME_NOREPLACE or RENAME_EXCHANGE.
    fn rename(
        &self,
        from: (&Self::Directory, &[u8]),
        to: (&Self::Directory, &[u8]),
        flags: u32,
    ) -> Result<(), Code>;
    /// Removes what is not a directory.
    fn unlink(&self, at: &Self::Directory, name: &[u8]) -> Result<(), Code>;
    /// Removes an empty directory.
    fn remove_directory(&self, at: &Self::Directory, name: &[u8]) -> Result<(), Code>;
    /// Whether the caller may make entries in a directory.
    fn check_writable(&self, at: &Self::Directory) -> Result<(), Code>;

    /// Sets owner and group where given; [`Code::NotPermitted`] or [`Code::Invalid`] when that is not allowed.
    fn set_owner(&self, object: Object<'_, Self>, uid: Option<u32>, gid: Option<u32>) -> Result<(), Code>;
    /// Sets the permission bits, of anything but a symbolic link.
    fn set_mode(&self, object: Object<'_, Self>, mode: u32) -> Result<(), Code>;
    /// Present owner and mode. Of a file that was just made, what it was made with will do.
    fn standing(&self, object: Object<'_, Self>) -> Result<Standing, Code>;
    /// Sets access and modification time.
    fn set_times(&self, object: Object<'_, Self>, atime: Timestamp, mtime: Timestamp) -> Result<(), Code>;
    /// The names of extended attributes, each with a NUL behind, into `names` (cleared first).
    fn list_xattrs(&self, object: Object<'_, Self>, names: &mut Vec<u8>) -> Result<(), Code>;
    /// An extended attribute's value, into `value` (cleared first).
    fn get_xattr(&self, object: Object<'_, Self>, name: &[u8], value: &mut Vec<u8>) -> Result<(), Code>;
    /// Sets an extended attribute.
    fn set_xattr(&self, object: Object<'_, Self>, name: &[u8], value: &[u8]) -> Result<(), Code>;

    /// Free space where the directory is.
    fn space(&self, at: &Self::Directory) -> Result<Space, Code>;
    /// Waits until the entries of a directory are on the medium.
    fn sync_directory(&self, at: &Self::Directory) -> Result<(), Code>;
    /// True when a call costs a network's round trip, so that more threads pay.
    fn is_remote(&self, at: &Self::Directory) -> bool;
}
