//! Requests: what a door asks of the node that owns a directory or an inode.

use crate::attr::Timestamp;
use crate::backing::{BackingId, BackingOp};
use crate::hash::Cookie;
use crate::id::{Ino, NodeId};
use crate::layout::Layout;
use crate::transaction::{Part, TxId};

/// `renameat2`: fail with EEXIST rather than replace.
pub const RENAME_NOREPLACE: u32 = 1;
/// `renameat2`: swap the two entries.
pub const RENAME_EXCHANGE: u32 = 2;
/// `setxattr`: fail with EEXIST if the attribute is there.
pub const XATTR_CREATE: u32 = 1;
/// `setxattr`: fail with ENODATA if it is not.
pub const XATTR_REPLACE: u32 = 2;

/// On whose behalf a request is made: owner and group of what it creates. Permission was checked at the door.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Caller {
    /// File-system user id.
    pub uid: u32,
    /// File-system group id.
    pub gid: u32,
}

/// A time to set, as `utimensat` has them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TimeSet {
    /// Leave it (UTIME_OMIT).
    #[default]
    Omit,
    /// The daemon's clock (UTIME_NOW).
    Now,
    /// This time.
    At(Timestamp),
}

/// Attributes to set; what is `None` stays. Any change moves ctime; an empty `SetAttr` moves ctime alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SetAttr {
    /// Permission bits (07777).
    pub mode: Option<u32>,
    /// Owner. A change of owner or group by the door clears set-id bits by setting `mode` too.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// The size hint of a file.
    pub size: Option<u64>,
    /// Access time.
    pub atime: TimeSet,
    /// Modification time.
    pub mtime: TimeSet,
    /// Of a directory: nodes that the entries of directories made in it are cut over, 2 to [`WIDTH_MAX`]; 0 for one.
    ///
    /// [`WIDTH_MAX`]: crate::limits::WIDTH_MAX
    pub width_of_new: Option<u8>,
}

/// A request. Names are of one component: 1 to 255 bytes without `/` and NUL, and not `.` or `..`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request<'a> {
    /// Does nothing. → `Done`
    Ping,
    /// The entry `name` of `parent`. → `Entry`
    Lookup {
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8],
    },
    /// An inode's attributes. → `Entry`
    GetAttr {
        /// Inode.
        ino: Ino,
    },
    /// Changes attributes. → `Entry`
    SetAttr {
        /// Inode.
        ino: Ino,
        /// What to change.
        set: SetAttr,
    },
    /// Creates a regular file, or opens the one that is there unless `exclusive`. The daemon makes no backing file: the
    /// client does, before its slot's next request. It can do so while the daemon serves the request when it knows the
    /// inode number, and so a reply may put the next one in reserve. → `Created`
    Create {
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8],
        /// Permission bits, umask applied.
        mode: u32,
        /// O_EXCL: fail with `Exists`.
        exclusive: bool,
        /// Born dirty: true for a file that is to be written, false for one whose copy is the backing store's.
        dirty: bool,
        /// Layout, or that of one backing file on the directory's node. Of one that leaves the word to the directory
        /// ([`Layout::unless_set`]), and a directory with a layout of its own, nothing is made; the reply is the directory's `Entry`,
        /// for the client to ask again with what follows from that.
        layout: Option<Layout>,
        /// The inode number that is in reserve for this slot, else the next one. [`Code::Stale`] when it is not this.
        number: Option<Ino>,
        /// Put a number in reserve for this slot's next `Create`.
        reserve: bool,
    },
    /// Makes a FIFO, socket or device node. → `Entry`
    MakeNode {
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8],
        /// Type and permission bits.
        mode: u32,
        /// Device number.
        rdev: u64,
    },
    /// Makes a directory. → `Entry`
    MakeDirectory {
        /// Parent.
        parent: Ino,
        /// Name in it.
        name: &'a [u8],
        /// Permission bits, umask applied.
        mode: u32,
    },
    /// Makes a symbolic link. → `Entry`
    Symlink {
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8],
        /// 1 to 4095 bytes without NUL.
        target: &'a [u8],
    },
    /// Adds a hard link. → `Entry`
    Link {
        /// What to link: anything but a directory.
        ino: Ino,
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8],
    },
    /// Removes an entry that is not a directory. → `Removed`; not the last link of another node's inode, whose node counts
    Unlink {
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8],
    },
    /// Removes an empty directory. → `Removed`
    RemoveDirectory {
        /// Parent.
        parent: Ino,
        /// Name in it.
        name: &'a [u8],
    },
    /// Renames. → `Removed`: what the destination was, if it was replaced (else the zero inode); `Elsewhere`: it is a
    /// directory, and to be asked for by `MoveDirectory`.
    Rename {
        /// Source directory.
        parent: Ino,
        /// Source name.
        name: &'a [u8],
        /// Destination directory.
        new_parent: Ino,
        /// Destination name.
        new_name: &'a [u8],
        /// 0, [`RENAME_NOREPLACE`] or [`RENAME_EXCHANGE`].
        flags: u32,
    },
    /// Entries behind a cookie. → `Entries`
    ReadDirectory {
        /// Directory.
        ino: Ino,
        /// 0, or the last cookie that was seen.
        cookie: Cookie,
        /// Attributes of each entry too.
        attributes: bool,
    },
    /// A symlink's target. → `Bytes`
    ReadLink {
        /// Symlink.
        ino: Ino,
    },
    /// An extended attribute. → `Bytes`
    GetXattr {
        /// Inode.
        ino: Ino,
        /// Full name, e.g. `user.a`.
        name: &'a [u8],
    },
    /// Sets an extended attribute. → `Done`
    SetXattr {
        /// Inode.
        ino: Ino,
        /// Full name.
        name: &'a [u8],
        /// Value, at most 64 KiB.
        value: &'a [u8],
        /// 0, [`XATTR_CREATE`] or [`XATTR_REPLACE`].
        flags: u32,
    },
    /// Names of extended attributes, each with a NUL behind. → `Bytes`
    ListXattr {
        /// Inode.
        ino: Ino,
    },
    /// Removes an extended attribute. → `Done`
    RemoveXattr {
        /// Inode.
        ino: Ino,
        /// Full name.
        name: &'a [u8],
    },
    /// Marks a file dirty, before a descriptor that can write is handed out. → `Entry`
    MarkDirty {
        /// File.
        ino: Ino,
    },
    /// Makes the backing files that are missing; sent when an open met ENOENT. → `Entry`, or `NotFound` when the
    /// inode is gone.
    MakeBacking {
        /// File.
        ino: Ino,
    },
    /// The path of a directory from the pool's root, starting with `/`. → `Bytes`
    PathOf {
        /// Directory.
        ino: Ino,
    },
    /// Space of the pool. → `Space`
    Space,
    /// Puts an inode number in reserve for this slot's next `Create`, which then names a backing file that is there. →
    /// `Number`
    Reserve,
    /// Gives a file another layout, whose backing files have its data already; of a directory, files that are made with
    /// several backing files in it later take it as their default. Between one backing file and several, or the other way round:
    /// else old and new would share names. → `Relaid`
    SetLayout {
        /// File or directory.
        ino: Ino,
        /// Its layout from now on.
        layout: Layout,
    },
    /// Makes a directory whose entry another node has, after which it takes as others do. → `Entry`
    MakeDirectoryAt {
        /// Its home, which is not its parent's.
        node: NodeId,
        /// Parent.
        parent: Ino,
        /// Name in it.
        name: &'a [u8],
        /// Permission bits, umask applied.
        mode: u32,
    },
    /// Moves a directory where it takes several nodes to tell what lies above it, or one that replaces another node's: what
    /// `Rename` answered `Elsewhere` for. The root's home does it. → `Removed`, [`Code::Stale`] when the source leads to
    /// something else by now
    MoveDirectory {
        /// Source directory.
        parent: Ino,
        /// Source name.
        name: &'a [u8],
        /// Destination directory.
        new_parent: Ino,
        /// Destination name.
        new_name: &'a [u8],
        /// 0 or [`RENAME_NOREPLACE`].
        flags: u32,
        /// What the source led to.
        ino: Ino,
    },
    /// Prepares a node's part in a transaction. From daemon to daemon. → what the part says
    Prepare {
        /// The transaction.
        tx: TxId,
        /// Which of its parts.
        index: u8,
        /// The part.
        part: Part<'a>,
    },
    /// Makes or drops the parts that a node has prepared; none is fine. From daemon to daemon. → `Done`
    Finish {
        /// The transaction.
        tx: TxId,
        /// Whether it was committed.
        commit: bool,
    },
    /// What became of a transaction? From daemon to daemon. → `Outcome`
    AskOutcome {
        /// The transaction.
        tx: TxId,
    },
    /// Commits a transaction: the coordinator's note of it, and the reply to whose request it was. Of the coordinator's daemon
    /// alone. → that reply
    Decide {
        /// The transaction.
        tx: TxId,
        /// The nodes that have prepared parts, see [`crate::decode_nodes`].
        nodes: &'a [u8],
        /// The encoded reply.
        reply: &'a [u8],
    },
    /// Does away with a link whose entry on another node is gone; one that is not there is fine. From daemon to daemon. → `Done`
    DropLink {
        /// Inode.
        ino: Ino,
        /// The link.
        link: TxId,
    },
    /// An inode's entry, on another node, got another name. From daemon to daemon. → `Done`
    Touch {
        /// Inode.
        ino: Ino,
    },
    /// Is an inode there, and led to by this entry of another node: a directory in this parent, another with this link? From
    /// daemon to daemon. → `Done`, or [`Code::NotFound`]
    IsLed {
        /// Inode.
        ino: Ino,
        /// Directory that has the entry.
        parent: Ino,
        /// The entry's link; none of a directory's.
        link: TxId,
    },
    /// Entries that lead to inodes of a node, in the order of their places; see `forebay-meta`. From daemon to daemon. → `Bytes`
    LeadsTo {
        /// The node.
        node: NodeId,
        /// The place behind which to begin: directory.
        parent: Ino,
        /// And cookie.
        cookie: Cookie,
    },
    /// The name of the entry that leads to an inode, found by reading the directory. → `Bytes`
    NameOf {
        /// Directory.
        parent: Ino,
        /// What the entry leads to.
        ino: Ino,
    },
    /// Does something with a backing file on another node.
    Backing(BackingId, BackingOp<'a>),
    /// A process of the asking node is gone: its replies need not be kept. From daemon to daemon. → `Done`
    EndSession {
        /// The process's session.
        session: u64,
    },
    /// Targets for a new file of so many stripes, chosen by who is asked: its own first, none that is full or cannot be reached
    /// if there are others. → `Placed`
    Place {
        /// Backing files, at least one.
        stripe_count: u16,
    },
    /// Space of the targets of the node that is asked, and of its shard. → `Targets`
    Targets,
    /// The asking node may believe what it was and will be told of directories, names and permissions, for
    /// [`crate::limits::LEASE_MS`] from when it asked. From daemon to daemon. → `Count`: the lease's term. In another term than
    /// before nothing counts that was told before.
    RenewLease,
    /// What this name was said to lead to counts no longer. From daemon to daemon. → `Done`
    RecallName {
        /// Directory of the node that asks.
        parent: Ino,
        /// Name in it.
        name: &'a [u8],
    },
    /// What this directory was said to permit counts no longer. From daemon to daemon. → `Done`
    RecallDirectory {
        /// Directory of the node that asks.
        ino: Ino,
    },
    /// Cuts the entries of an empty directory over several nodes, from then on. → `Parts`; [`Code::NotEmpty`], [`Code::Exists`] for
    /// one that is wide already, [`Code::NoDevice`] when the pool has not so many nodes
    SetWidth {
        /// The directory.
        ino: Ino,
        /// Over so many nodes, its home among them; 0: all, at most [`crate::limits::WIDTH_MAX`].
        width: u16,
    },
    /// The parts of a wide directory. → `Parts`; [`Code::NoAttribute`] of one that is not wide
    PartsOf {
        /// The directory.
        ino: Ino,
    },
    /// Which of these processes of the asked node are there? From daemon to daemon, which keeps something for them.
    /// → `Bytes`: one for each, 0 for one that is gone
    AreThere {
        /// Sessions, eight bytes each, at most [`crate::limits::SESSIONS_ASKED_MAX`].
        sessions: &'a [u8],
    },
    /// Unlinks backing files whose inodes are gone; one that is absent is fine. From daemon to daemon.
    /// → `Bytes`: one for each, 0 for one that is there still
    RemoveBackings {
        /// Which ([`crate::BackingId::list`]), at most [`crate::limits::REMOVED_AT_ONCE_MAX`].
        ids: &'a [u8],
    },
}

impl Request<'_> {
    /// True when the request may change the shard: its reply is kept until the slot's next request, so that a retry
    /// is answered and not repeated.
    pub fn changes(&self) -> bool {
        !matches!(
            self,
            Request::Ping
                | Request::Lookup { .. }
                | Request::GetAttr { .. }
                | Request::ReadDirectory { .. }
                | Request::ReadLink { .. }
                | Request::GetXattr { .. }
                | Request::ListXattr { .. }
                | Request::MakeBacking { .. }
                | Request::PathOf { .. }
                | Request::Space
                | Request::NameOf { .. }
                | Request::AskOutcome { .. }
                | Request::LeadsTo { .. }
                | Request::IsLed { .. }
                | Request::Backing(..)
                | Request::EndSession { .. }
                | Request::Place { .. }
                | Request::Targets
                | Request::AreThere { .. }
                | Request::RemoveBackings { .. }
                | Request::RenewLease
                | Request::RecallName { .. }
                | Request::RecallDirectory { .. }
                | Request::PartsOf { .. }
        )
    }

    /// True for what daemons ask each other, and programs may not.
    pub fn is_between_daemons(&self) -> bool {
        matches!(
            self,
            Request::EndSession { .. }
                | Request::AreThere { .. }
                | Request::RemoveBackings { .. }
                | Request::RenewLease
                | Request::RecallName { .. }
                | Request::RecallDirectory { .. }
        )
    }

    /// True for a client's change that may have other nodes to be told of it when it is made.
    pub fn may_take_several_nodes(&self) -> bool {
        matches!(
            self,
            Request::Unlink { .. }
                | Request::RemoveDirectory { .. }
                | Request::Rename { .. }
                | Request::MoveDirectory { .. }
                | Request::MakeDirectoryAt { .. }
                | Request::Link { .. }
                // Of a wide directory.
                | Request::SetAttr { .. }
                | Request::SetLayout { .. }
                | Request::SetWidth { .. }
        )
    }

    /// True when the request only gives space back, and is let through when the shard is nearly full.
    pub fn removes(&self) -> bool {
        matches!(
            self,
            Request::Unlink { .. }
                | Request::RemoveDirectory { .. }
                | Request::RemoveXattr { .. }
                | Request::MarkDirty { .. }
                | Request::SetLayout { .. }
                | Request::Finish { .. }
                | Request::DropLink { .. }
        )
    }

    /// True for what daemons alone say to each other.
    pub fn is_of_daemons(&self) -> bool {
        matches!(
            self,
            Request::Prepare { .. }
                | Request::Finish { .. }
                | Request::AskOutcome { .. }
                | Request::Decide { .. }
                | Request::DropLink { .. }
                | Request::Touch { .. }
                | Request::LeadsTo { .. }
                | Request::IsLed { .. }
                | Request::EndSession { .. }
                | Request::AreThere { .. }
                | Request::RemoveBackings { .. }
        )
    }
}
