//! Attributes of an inode, as they are stored in the shard and published on the board.

use crate::bytes::{Reader, Writer};
use crate::error::Code;
use crate::id::{Ino, NodeId};

/// Encoded bytes of an [`Attr`].
pub const ATTR_BYTES: usize = 104;
/// Offset of mode, owner and group, 4 bytes each, in an encoded [`Attr`].
pub const PERMISSIONS_OFFSET: usize = 32;
/// Offset of a file's epoch, 8 bytes, in an encoded [`Attr`].
pub const EPOCH_OFFSET: usize = 16;
/// Offset of the flags, 4 bytes, in an encoded [`Attr`].
pub const FLAGS_OFFSET: usize = 48;

/// The file may differ from its copy in slow storage, so its data must not be dropped. The flag is set before any
/// descriptor that can write is handed out.
pub const FLAG_DIRTY: u32 = 1;
/// The file's data are in its backing files. A file without the flag was released, or never restored: its data are in
/// the backing store alone.
pub const FLAG_RESIDENT: u32 = 2;
/// The file is being copied to its backing store. A write since then must be marked ([`FLAG_DIRTY`] alone does not
/// suffice).
pub const FLAG_DRAINING: u32 = 4;
/// The inode belongs to the tree of a backing store. What is created in such a directory gets the flag too.
pub const FLAG_ATTACHED: u32 = 8;
/// The directory has names in its backing store that are not in the pool yet.
pub const FLAG_UNLISTED: u32 = 16;
/// The file, or what is in the directory, is not released.
pub const FLAG_PINNED: u32 = 32;
/// The directory is where a backing store is attached.
pub const FLAG_STORE: u32 = 64;
/// fsync of the file waits until its backing store has the data. What is created in such a directory gets the flag too.
pub const FLAG_FSYNC_WAITS: u32 = 128;
/// The same of close, after a program has had the file open for writing.
pub const FLAG_CLOSE_WAITS: u32 = 1 << 14;
/// The inode may have extended attributes; without the flag it has none. The shard's record has it as a mark.
pub const FLAG_HAS_VALUES: u32 = 1 << 13;
/// What a new entry of a directory inherits.
pub const FLAGS_INHERITED: u32 = FLAG_ATTACHED | FLAG_FSYNC_WAITS | FLAG_CLOSE_WAITS;
/// An epoch that no file has.
pub const EPOCH_UNKNOWN: u64 = u64::MAX;
/// Epochs of a file between two versions that it takes over from other programs, as a power of two: more than a file is
/// marked and released in its life.
const EPOCHS_LOG2: u32 = 32;

/// The bits of a directory's flags that hold the width of new directories in it.
const WIDTH_OF_NEW_SHIFT: u32 = 8;
const WIDTH_OF_NEW: u32 = 0x1f << WIDTH_OF_NEW_SHIFT;
const _: () = assert!(WIDTH_OF_NEW & (FLAGS_INHERITED | FLAG_HAS_VALUES | FLAG_STORE | FLAG_PINNED) == 0);

/// Kind of an inode: the type bits of its mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Regular file.
    File = 1,
    /// Directory.
    Directory = 2,
    /// Symbolic link.
    Symlink = 3,
    /// FIFO.
    Fifo = 4,
    /// Character device.
    CharDevice = 5,
    /// Block device.
    BlockDevice = 6,
    /// Socket.
    Socket = 7,
}

impl Kind {
    /// The kind in the type bits of `mode`; none for an impossible combination.
    pub fn from_mode(mode: u32) -> Option<Kind> {
        match mode & 0o170_000 {
            0o100_000 => Some(Kind::File),
            0o040_000 => Some(Kind::Directory),
            0o120_000 => Some(Kind::Symlink),
            0o010_000 => Some(Kind::Fifo),
            0o020_000 => Some(Kind::CharDevice),
            0o060_000 => Some(Kind::BlockDevice),
            0o140_000 => Some(Kind::Socket),
            _ => None,
        }
    }

    /// The kind that a number stands for in an encoding.
    pub fn from_u8(v: u8) -> Result<Kind, Code> {
        Ok(match v {
            1 => Kind::File,
            2 => Kind::Directory,
            3 => Kind::Symlink,
            4 => Kind::Fifo,
            5 => Kind::CharDevice,
            6 => Kind::BlockDevice,
            7 => Kind::Socket,
            _ => return Err(Code::Malformed),
        })
    }

    /// The type bits of a mode.
    pub fn mode_bits(self) -> u32 {
        match self {
            Kind::File => 0o100_000,
            Kind::Directory => 0o040_000,
            Kind::Symlink => 0o120_000,
            Kind::Fifo => 0o010_000,
            Kind::CharDevice => 0o020_000,
            Kind::BlockDevice => 0o060_000,
            Kind::Socket => 0o140_000,
        }
    }

    /// True when a target has something for the inode: a file's data, or the node by which the kernel opens a FIFO,
    /// socket or device.
    pub fn has_backing(self) -> bool {
        matches!(self, Kind::File | Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice)
    }

    /// `d_type` of `struct dirent` (DT_REG...).
    pub fn dirent_type(self) -> u8 {
        (self.mode_bits() >> 12) as u8
    }
}

/// A point in time: seconds and nanoseconds since the epoch, negative seconds allowed, `0 <= nsec < 1e9`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash)]
pub struct Timestamp {
    /// Seconds since 1970-01-01 UTC.
    pub sec: i64,
    /// Nanoseconds within the second.
    pub nsec: u32,
}

/// Attributes of an inode.
///
/// For a regular file `size` is a hint, and `atime`, `mtime` and part of `ctime` live in the backing files: see "Sizes,
/// times" in docs/semantics.md.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attr {
    /// Inode number.
    pub ino: Ino,
    /// A symlink: bytes of its target. A file: a hint of its bytes. A directory: the number of its entries.
    pub size: u64,
    /// Device number (`dev_t`) of a device node; of a file its data's epoch, of a directory that of its names
    /// ([`Attr::epoch`]); else 0.
    pub rdev: u64,
    /// The parent of a directory (the root is its own parent); else the zero inode.
    pub parent: Ino,
    /// Type and permission bits, as in `st_mode`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Hard links. A directory has 2, and one more for each subdirectory.
    pub nlink: u32,
    /// `FLAG_…`; for a directory also [`Attr::width_of_new`].
    pub flags: u32,
    /// A directory: its home, the node that owns its entries. Else: the node that owns the inode.
    pub home: NodeId,
    /// A directory's width as a power of two, rounded up: 0 is one node.
    pub width_log2: u8,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of content.
    pub mtime: Timestamp,
    /// Last change of the inode.
    pub ctime: Timestamp,
    /// Creation.
    pub btime: Timestamp,
}

/// Permission bits, checked.
pub(crate) fn permission_bits(mode: u32) -> Result<u32, Code> {
    if mode & !0o7777 == 0 {
        Ok(mode)
    } else {
        Err(Code::Invalid)
    }
}

impl Attr {
    /// The inode's kind. Encoded attributes were checked, so there is one.
    pub fn kind(&self) -> Kind {
        Kind::from_mode(self.mode).unwrap_or(Kind::File)
    }

    /// For a directory: the number of nodes over which the entries of new directories in it are distributed. 0 means
    /// one. A new directory inherits the value.
    pub fn width_of_new(&self) -> u8 {
        ((self.flags & WIDTH_OF_NEW) >> WIDTH_OF_NEW_SHIFT) as u8
    }

    pub(crate) fn set_width_of_new(&mut self, width: u8) {
        self.flags = self.flags & !WIDTH_OF_NEW | u32::from(width) << WIDTH_OF_NEW_SHIFT;
    }

    /// A file's epoch: it changes when a clean file is marked dirty, when the file is released, and when a released file
    /// takes over a version that another program wrote in the store. So an open that finds the same epoch before and
    /// after has opened the file's present data. It stands in the place of a device number, which files have not.
    ///
    /// A directory's epoch: it changes when the pool forgets a name that the directory's store has.
    #[inline]
    pub fn epoch(&self) -> u64 {
        self.rdev
    }

    /// Begins a new epoch.
    pub fn next_epoch(&mut self) {
        self.rdev += 1;
    }

    /// Begins the first epoch of a version that another program wrote in the store.
    pub fn next_version(&mut self) {
        self.rdev = (self.versions_taken_over() + 1) << EPOCHS_LOG2;
    }

    /// How many versions of other programs a released file has taken over. While this stays the same, a new epoch means
    /// that programs of the pool changed the file, or that it was released or moved.
    pub fn versions_taken_over(&self) -> u64 {
        self.rdev >> EPOCHS_LOG2
    }

    /// True for a file whose data are in the pool.
    #[inline]
    pub fn is_resident(&self) -> bool {
        self.flags & FLAG_RESIDENT != 0
    }

    /// True when a write must be preceded by a mark: the file equals its copy in the backing store, or is being copied.
    #[inline]
    pub fn needs_mark(&self) -> bool {
        self.flags & (FLAG_DIRTY | FLAG_DRAINING) != FLAG_DIRTY
    }

    /// True for a directory.
    pub fn is_directory(&self) -> bool {
        self.mode & 0o170_000 == 0o040_000
    }

    /// True for a regular file.
    pub fn is_file(&self) -> bool {
        self.mode & 0o170_000 == 0o100_000
    }

    /// True for a symbolic link.
    pub fn is_symlink(&self) -> bool {
        self.mode & 0o170_000 == 0o120_000
    }

    /// Appends [`ATTR_BYTES`] bytes.
    pub fn encode(&self, w: &mut Writer<'_>) -> Result<(), Code> {
        w.u64(self.ino.0)?;
        w.u64(self.size)?;
        w.u64(self.rdev)?;
        w.u64(self.parent.0)?;
        w.u32(self.mode)?;
        w.u32(self.uid)?;
        w.u32(self.gid)?;
        w.u32(self.nlink)?;
        w.u32(self.flags)?;
        w.u16(self.home.0)?;
        w.u8(self.width_log2)?;
        w.u8(0)?;
        for t in [self.atime, self.mtime, self.ctime, self.btime] {
            w.u64(t.sec as u64)?;
            w.u32(t.nsec)?;
        }
        Ok(())
    }

    /// Reads [`ATTR_BYTES`] bytes; fails with [`Code::Malformed`] on a mode without a kind or a bad time.
    #[inline]
    pub fn decode(r: &mut Reader<'_>) -> Result<Attr, Code> {
        // The bytes are taken at once, so that the length is checked once.
        let mut r = Reader::new(r.array::<ATTR_BYTES>()?);
        let (ino, size, rdev, parent) = (Ino(r.u64()?), r.u64()?, r.u64()?, Ino(r.u64()?));
        let (mode, uid, gid, nlink, flags) = (r.u32()?, r.u32()?, r.u32()?, r.u32()?, r.u32()?);
        Kind::from_mode(mode).ok_or(Code::Malformed)?;
        let home = NodeId(r.u16()?);
        let width_log2 = r.u8()?;
        r.u8()?;
        let mut times = [Timestamp::default(); 4];
        for t in &mut times {
            *t = Timestamp { sec: r.u64()? as i64, nsec: r.u32()? };
            if t.nsec >= 1_000_000_000 {
                return Err(Code::Malformed);
            }
        }
        let [atime, mtime, ctime, btime] = times;
        Ok(Attr {
            ino,
            size,
            rdev,
            parent,
            mode,
            uid,
            gid,
            nlink,
            flags,
            home,
            width_log2,
            atime,
            mtime,
            ctime,
            btime,
        })
    }
}
