//! The only interface between the engine and the trees that it copies: a tree of directories and files, either of the
//! backing store ([`PosixTree`](crate::posix::PosixTree)) or of the pool ([`PoolTree`](crate::pool::PoolTree)).
//!
//! All objects are addressed by an open directory and a name in it, never by a path. So trees may be deeper than the
//! longest path, and a link that another process puts in place of a directory is never followed. Failures are codes;
//! the engine adds the text.

use std::ops::Range;
use std::os::fd::BorrowedFd;

use forebay_types::{Code, Kind, Timestamp, RENAME_NOREPLACE};

/// The attributes of an object.
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
    /// Bytes allocated on the medium.
    pub(crate) allocated: u64,
    pub(crate) rdev: u64,
    pub(crate) device: u64,
    pub(crate) ino: u64,
    pub(crate) atime: Timestamp,
    pub(crate) mtime: Timestamp,
    pub(crate) ctime: Timestamp,
}

impl Meta {
    /// Identifies the object as long as it exists.
    pub(crate) fn identity(&self) -> (u64, u64) {
        (self.device, self.ino)
    }

    /// True if the file has holes, or if its medium compresses.
    pub(crate) fn is_sparse(&self) -> bool {
        self.allocated < self.size
    }
}

/// Attributes for a new object. Owner and group are `None` if the tree selects them.
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
pub(crate) struct OwnerAndMode {
    pub(crate) kind: Kind,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl From<Meta> for OwnerAndMode {
    fn from(meta: Meta) -> OwnerAndMode {
        OwnerAndMode { kind: meta.kind, mode: meta.mode, uid: meta.uid, gid: meta.gid }
    }
}

/// An object whose attributes are read or changed.
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

/// Names of a directory, in one piece of memory.
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

    /// The name at `index`, with its kind if the listing reported it.
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
    /// Truncates or extends the file; an extension is a hole.
    fn set_size(&self, bytes: u64) -> Result<(), Code>;
    /// Its present size and modification time.
    fn version(&self) -> Result<(u64, Timestamp), Code>;
    /// The next range of data in `within`; `None` if only holes follow. A file that cannot report its holes is all
    /// data, and [`File::knows_holes`] is false.
    fn next_data(&self, within: Range<u64>) -> Result<Option<Range<u64>>, Code>;
    /// True if `next_data` reports holes.
    fn knows_holes(&self) -> bool;
    /// The kernel's descriptor of a file with the same bytes, if there is one.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
    /// Starts writing to the medium, without waiting.
    fn start_sync(&self);
    /// Waits until content and attributes are on the medium.
    fn sync(&self) -> Result<(), Code>;
    /// Requests that the next read comes from the medium.
    fn forget_cached(&self);
}

/// A tree of directories and files.
pub(crate) trait Tree: Sync + Sized {
    /// An open directory.
    type Directory: Send + Sync;
    /// An open file.
    type File: File;

    /// Its name in messages: "the store", "the pool".
    fn title(&self) -> &'static str;
    /// Opens the directory at an absolute path, following links.
    fn open_path(&self, path: &[u8]) -> Result<(Self::Directory, Meta), Code>;
    /// Opens a directory, to list it or create entries in it. `.` is `at` itself.
    fn open_directory(
        &self,
        at: &Self::Directory,
        name: &[u8],
        follow: bool,
    ) -> Result<(Self::Directory, Meta), Code>;
    /// Appends the entries after `cursor` (0: from the start), without `.` and `..`. Returns the next cursor, or `None`
    /// at the end. Only one thread lists an open directory at a time.
    fn list(&self, at: &Self::Directory, cursor: u64, names: &mut Names) -> Result<Option<u64>, Code>;
    /// Attributes of an entry.
    fn stat(&self, at: &Self::Directory, name: &[u8], follow: bool) -> Result<Meta, Code>;
    /// Opens an entry for reading. Other kinds than regular files may be opened or refused; the attributes show the
    /// kind.
    fn open(&self, at: &Self::Directory, name: &[u8], follow: bool) -> Result<(Self::File, Meta), Code>;
    /// Creates a regular file and opens it for reading and writing; [`Code::Exists`] if the name exists. The wanted
    /// attributes may be set at once if no user gets more access than wanted. The caller sets the rest.
    fn create(&self, at: &Self::Directory, name: &[u8], wanted: &Wanted) -> Result<Self::File, Code>;
    /// Creates a directory to which the caller can write.
    fn make_directory(&self, at: &Self::Directory, name: &[u8], mode: u32) -> Result<(), Code>;
    /// Creates a symbolic link.
    fn symlink(&self, target: &[u8], at: &Self::Directory, name: &[u8]) -> Result<(), Code>;
    /// A symbolic link's target.
    fn read_link(&self, at: &Self::Directory, name: &[u8]) -> Result<Vec<u8>, Code>;
    /// Creates a FIFO, socket or device node.
    fn make_node(&self, at: &Self::Directory, name: &[u8], meta: &Meta) -> Result<(), Code>;
    /// Adds a hard link to an object that is not a directory.
    fn link(&self, from: (&Self::Directory, &[u8]), to: (&Self::Directory, &[u8])) -> Result<(), Code>;
    /// Renames, and replaces an existing object unless `flags` are RENAME_NOREPLACE or RENAME_EXCHANGE.
    fn rename(
        &self,
        from: (&Self::Directory, &[u8]),
        to: (&Self::Directory, &[u8]),
        flags: u32,
    ) -> Result<(), Code>;
    /// Renames to a name that is free; [`Code::Exists`] if it is not.
    fn rename_to_free(
        &self,
        from: (&Self::Directory, &[u8]),
        to: (&Self::Directory, &[u8]),
    ) -> Result<(), Code> {
        match self.rename(from, to, RENAME_NOREPLACE) {
            // NFS does not support the flag. An object that gets the name after this check is replaced.
            Err(Code::Invalid | Code::NotSupported) => match self.stat(to.0, to.1, false) {
                Err(Code::NotFound) => self.rename(from, to, 0),
                found => found.and(Err(Code::Exists)),
            },
            other => other,
        }
    }
    /// Removes an object that is not a directory.
    fn unlink(&self, at: &Self::Directory, name: &[u8]) -> Result<(), Code>;
    /// Removes an empty directory.
    fn remove_directory(&self, at: &Self::Directory, name: &[u8]) -> Result<(), Code>;
    /// Fails unless the caller may create entries in a directory.
    fn check_writable(&self, at: &Self::Directory) -> Result<(), Code>;

    /// Sets owner and group if given; [`Code::NotPermitted`] or [`Code::Invalid`] if that is not allowed.
    fn set_owner(&self, object: Object<'_, Self>, uid: Option<u32>, gid: Option<u32>) -> Result<(), Code>;
    /// Sets the permission bits of an object that is not a symbolic link.
    fn set_mode(&self, object: Object<'_, Self>, mode: u32) -> Result<(), Code>;
    /// Present kind, owner and mode. For a file that was just created, the values of its creation suffice.
    fn owner_and_mode(&self, object: Object<'_, Self>) -> Result<OwnerAndMode, Code>;
    /// Sets access and modification time.
    fn set_times(&self, object: Object<'_, Self>, atime: Timestamp, mtime: Timestamp) -> Result<(), Code>;
    /// Stores the names of extended attributes, each followed by a NUL, in `names`, which is cleared first.
    fn list_xattrs(&self, object: Object<'_, Self>, names: &mut Vec<u8>) -> Result<(), Code>;
    /// Stores an extended attribute's value in `value`, which is cleared first.
    fn get_xattr(&self, object: Object<'_, Self>, name: &[u8], value: &mut Vec<u8>) -> Result<(), Code>;
    /// Sets an extended attribute.
    fn set_xattr(&self, object: Object<'_, Self>, name: &[u8], value: &[u8]) -> Result<(), Code>;

    /// Free space of the directory's file system.
    fn space(&self, at: &Self::Directory) -> Result<Space, Code>;
    /// Waits until the entries of a directory are on the medium.
    fn sync_directory(&self, at: &Self::Directory) -> Result<(), Code>;
    /// True if a call costs a network round trip, so that more threads pay.
    fn is_remote(&self, at: &Self::Directory) -> bool;
}
