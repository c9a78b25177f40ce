//! The table of requests. An entry has a request's name, number, class, effect, home, flags, reply, and fields in the
//! order in which they are encoded. A new request needs an entry here and an arm where it is served. docs/requests.md
//! is printed from this table.
//!
//! | word | meaning |
//! |---|---|
//! | `client`, `step`, `peer` | see [`Class`] |
//! | `read`, `change` | whether it may change the shard; the reply to a change is kept ([`Request::changes`]) |
//! | `at(field)`, `root`, `anywhere` | the node that serves it: the field's node, the root's home, the receiver |
//! | `+ several` | may have parts on several nodes |

use crate::attr::Timestamp;
use crate::backing::{BackingId, BackingOp};
use crate::backing_store::StoreVersion;
use crate::bytes::{Reader, Writer};
use crate::error::Code;
use crate::hash::Cookie;
use crate::id::{Ino, NodeId};
use crate::layout::Layout;
use crate::set_attr::SetAttr;
use crate::transaction::{Part, TxId};
use crate::volume::{PieceId, Segment};

use super::fields::{
    backing, create, AnyBool, BackingIds, Bytes, DirCookie, Field, LinkTarget, MoveFlags, Name, NodeMode,
    Permissions, RenameFlags, SegmentIds, Sessions, StripeCount, XattrFlags, XattrName, XattrValue,
};
use super::Caller;

/// Where a request may come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// Sent by programs, tools and mounts.
    Client,
    /// Sent by the same, for a backing file. The daemon serves it without its shard.
    Data,
    /// Sent by a daemon to another daemon's shard, as a step of a cross-node transaction.
    Step,
    /// Sent by a daemon to another daemon. Its network thread or its leases serve the request.
    Peer,
}

/// An entry of the table.
#[derive(Clone, Copy, Debug)]
pub struct RequestInfo {
    /// Its name.
    pub name: &'static str,
    /// The number that stands for the request in a message.
    pub number: u8,
    /// Where it may come from.
    pub class: Class,
    /// True when the request may change the shard.
    pub changes: bool,
    /// The node that serves it, as in the table.
    pub home: &'static str,
    /// Flags.
    pub flags: &'static [&'static str],
    /// Names and types of its fields, in the order in which they are encoded.
    pub fields: &'static [(&'static str, &'static str)],
    /// Its reply.
    pub reply: &'static str,
    /// What it does.
    pub doc: &'static str,
}

impl RequestInfo {
    /// Whether it has a flag.
    const fn has(&self, flag: &str) -> bool {
        let mut i = 0;
        while i < self.flags.len() {
            let (one, other) = (self.flags[i].as_bytes(), flag.as_bytes());
            let mut same = one.len() == other.len();
            let mut at = 0;
            while same && at < one.len() {
                same = one[at] == other[at];
                at += 1;
            }
            if same {
                return true;
            }
            i += 1;
        }
        false
    }
}

/// The node of the inode, target or backing file that a request names.
trait HomeNode {
    fn home_node(&self) -> NodeId;
}

impl HomeNode for Ino {
    fn home_node(&self) -> NodeId {
        self.birth_node()
    }
}

impl HomeNode for NodeId {
    fn home_node(&self) -> NodeId {
        *self
    }
}

impl HomeNode for BackingId {
    fn home_node(&self) -> NodeId {
        self.node()
    }
}

requests! {
    /// Does nothing.
    Ping = 1: client read anywhere -> "`Done`"
    /// Looks up the entry `name` of `parent`.
    Lookup = 2: client read at(parent) -> "`Entry`" {
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8] as Name,
    }
    /// Reads an inode's attributes.
    GetAttr = 3: client read at(ino) -> "`Entry`" {
        /// Inode.
        ino: Ino,
    }
    /// Changes attributes.
    SetAttr = 4: client change at(ino) + several -> "`Entry`" {
        /// Inode.
        ino: Ino,
        /// What to change.
        set: SetAttr,
    }
    /// Creates a regular file, or opens the existing one unless `exclusive`. The client creates the backing file,
    /// before its slot's next request. A client that knows the inode number creates it while the daemon serves the
    /// request, so a reply may reserve the next number.
    Create = 5: client change at(parent) by create -> "`Created`, or the directory's `Entry` where its layout decides" {
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8],
        /// Permission bits, umask applied.
        mode: u32,
        /// O_EXCL: fail with `Exists`.
        exclusive: bool,
        /// Whether the file begins dirty: true for a file that is to be written, false for one that has a copy in slow
        /// storage.
        dirty: bool,
        /// Layout. None: one backing file on the directory's node. A default that yields to the directory's own layout
        /// ([`Layout::unless_set`]) creates nothing if the directory has one: the reply is then the directory's
        /// `Entry`, and the client sends the request again with a layout that follows from it.
        layout: Option<Layout>,
        /// The inode number that is reserved for this slot, or none for a new one. [`Code::Stale`] if the slot has
        /// another reserved number, or none.
        number: Option<Ino>,
        /// Reserve a number for this slot's next `Create`.
        reserve: bool,
    }
    /// Makes a FIFO, socket or device node.
    MakeNode = 6: client change at(parent) -> "`Entry`" {
        /// Directory.
        parent: Ino,
        /// Type and permission bits.
        mode: u32 as NodeMode,
        /// Device number.
        rdev: u64,
        /// Name in it.
        name: &'a [u8] as Name,
    }
    /// Makes a directory.
    MakeDirectory = 7: client change at(parent) -> "`Entry`" {
        /// Parent.
        parent: Ino,
        /// Permission bits, umask applied.
        mode: u32 as Permissions,
        /// Name in it.
        name: &'a [u8] as Name,
    }
    /// Makes a symbolic link.
    Symlink = 8: client change at(parent) -> "`Entry`" {
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8] as Name,
        /// 1 to 4095 bytes without NUL.
        target: &'a [u8] as LinkTarget,
    }
    /// Adds a hard link.
    Link = 9: client change at(parent) + several -> "`Entry`" {
        /// Inode that gets the link: anything but a directory.
        ino: Ino,
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8] as Name,
    }
    /// Removes an entry that is not a directory. The reply does not report an inode of another node as removed: that
    /// node counts its links.
    Unlink = 10: client change at(parent) + several -> "`Removed`" {
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8] as Name,
    }
    /// Removes an empty directory.
    RemoveDirectory = 11: client change at(parent) + several -> "`Removed`" {
        /// Parent.
        parent: Ino,
        /// Name in it.
        name: &'a [u8] as Name,
    }
    /// Renames an entry.
    Rename = 12: client change at(parent) + several
        -> "`Removed`: the inode that was replaced, or the zero inode; `Elsewhere`: send `MoveDirectory`"
    {
        /// Source directory.
        parent: Ino,
        /// Destination directory.
        new_parent: Ino,
        /// 0, [`RENAME_NOREPLACE`](crate::RENAME_NOREPLACE) or [`RENAME_EXCHANGE`](crate::RENAME_EXCHANGE).
        flags: u32 as RenameFlags,
        /// Source name.
        name: &'a [u8] as Name,
        /// Destination name.
        new_name: &'a [u8] as Name,
    }
    /// Reads entries of a directory behind a cookie.
    ReadDirectory = 13: client read at(ino) -> "`Entries`" {
        /// Directory.
        ino: Ino,
        /// 0, or the last cookie that was read.
        cookie: Cookie as DirCookie,
        /// Include the attributes of each entry.
        attributes: bool as AnyBool,
    }
    /// Reads the target of a symbolic link.
    ReadLink = 14: client read at(ino) -> "`Bytes`" {
        /// Symbolic link.
        ino: Ino,
    }
    /// Reads an extended attribute.
    GetXattr = 15: client read at(ino) -> "`Bytes`" {
        /// Inode.
        ino: Ino,
        /// Full name, e.g. `user.a`.
        name: &'a [u8] as XattrName,
    }
    /// Sets an extended attribute.
    SetXattr = 16: client change at(ino) -> "`Done`" {
        /// Inode.
        ino: Ino,
        /// 0, [`XATTR_CREATE`](crate::XATTR_CREATE) or [`XATTR_REPLACE`](crate::XATTR_REPLACE).
        flags: u32 as XattrFlags,
        /// Full name.
        name: &'a [u8] as XattrName,
        /// Value, at most 64 KiB.
        value: &'a [u8] as XattrValue,
    }
    /// Reads the names of extended attributes, each ended by a NUL.
    ListXattr = 17: client read at(ino) -> "`Bytes`" {
        /// Inode.
        ino: Ino,
    }
    /// Removes an extended attribute.
    RemoveXattr = 18: client change at(ino) -> "`Done`" {
        /// Inode.
        ino: Ino,
        /// Full name.
        name: &'a [u8] as XattrName,
    }
    /// Marks a file dirty. The client sends it before it hands out a descriptor that can write.
    MarkDirty = 19: client change at(ino) -> "`Entry`" {
        /// File.
        ino: Ino,
    }
    /// Creates the missing backing files of a file. The client sends it when an open failed with ENOENT.
    MakeBacking = 20: client read at(ino) -> "`Entry`, or `NotFound` when the inode is gone" {
        /// File.
        ino: Ino,
    }
    /// Reads the path of a directory from the pool's root, starting with `/`.
    PathOf = 21: client read at(ino) -> "`Bytes`" {
        /// Directory.
        ino: Ino,
    }
    /// Reads the space of the pool.
    Space = 22: client read anywhere -> "`Space`"
    /// Reserves an inode number for this slot's next `Create`. The client can create the backing file under it
    /// beforehand.
    Reserve = 23: client change anywhere -> "`Number`"
    /// Changes a layout. A file's data must already be in the backing files of the new layout. A file changes only
    /// between one backing file and several: any other change would give old and new backing files the same names. On a
    /// directory: the layout of files that are created in it later.
    SetLayout = 24: client change at(ino) + several -> "`Relaid`" {
        /// File or directory.
        ino: Ino,
        /// Its new layout.
        layout: Layout,
    }
    /// Commits a transaction: writes the coordinator's record of it, with the reply to the client's request. A daemon
    /// sends it only to itself, as the coordinator.
    Decide = 25: step change anywhere -> "that reply" {
        /// The transaction.
        tx: TxId,
        /// The nodes that have prepared parts, see [`crate::decode_nodes`].
        nodes: &'a [u8] as Bytes,
        /// The encoded reply.
        reply: &'a [u8] as Bytes,
    }
    /// Removes a link whose entry on another node is gone. A link that does not exist is no error.
    DropLink = 26: step change anywhere -> "`Done`" {
        /// Inode.
        ino: Ino,
        /// The link.
        link: TxId,
    }
    /// Updates the ctime of an inode whose entry, on another node, was renamed.
    Touch = 27: step change anywhere -> "`Done`" {
        /// Inode.
        ino: Ino,
    }
    /// Checks whether this entry of another node leads to this inode: to a directory with this parent, or to another
    /// inode with this link.
    IsLed = 28: step read anywhere -> "`Done`, or `NotFound`" {
        /// Inode.
        ino: Ino,
        /// Directory that has the entry.
        parent: Ino,
        /// The entry's link; 0 for a directory.
        link: TxId,
    }
    /// Finds the name of the entry that leads to an inode, by reading the directory.
    NameOf = 31: client read at(parent) -> "`Bytes`" {
        /// Directory.
        parent: Ino,
        /// Inode that the entry leads to.
        ino: Ino,
    }
    /// Executes an operation on a backing file of another node.
    Backing = 32: data read at(id) by backing -> "as the operation says" {
        /// The backing file.
        id: BackingId,
        /// The operation.
        op: BackingOp<'a>,
    }
    /// A process of the sending node has ended. The receiver need not keep replies for it any longer.
    EndSession = 33: peer read anywhere -> "`Done`" {
        /// The process's session.
        session: u64,
    }
    /// Creates a directory on another node than its parent's. Later operations treat it like any other directory.
    MakeDirectoryAt = 34: client change at(node) + several -> "`Entry`" {
        /// Its home.
        node: NodeId,
        /// Parent.
        parent: Ino,
        /// Permission bits, umask applied.
        mode: u32 as Permissions,
        /// Name in it.
        name: &'a [u8] as Name,
    }
    /// Moves a directory when its ancestors are on several nodes, or when it replaces a directory of another node: the
    /// cases that `Rename` answers with `Elsewhere`. The root's home serves it.
    MoveDirectory = 35: client change root + several -> "`Removed`, or `Stale` when the source leads to another inode by now" {
        /// Source directory.
        parent: Ino,
        /// Destination directory.
        new_parent: Ino,
        /// 0 or [`RENAME_NOREPLACE`](crate::RENAME_NOREPLACE).
        flags: u32 as MoveFlags,
        /// The inode that the source named when the client looked it up.
        ino: Ino,
        /// Source name.
        name: &'a [u8] as Name,
        /// Destination name.
        new_name: &'a [u8] as Name,
    }
    /// Prepares a node's part of a transaction.
    Prepare = 36: step change anywhere -> "as the part says" {
        /// The transaction.
        tx: TxId,
        /// Index of the part.
        index: u8,
        /// The part.
        part: Part<'a>,
    }
    /// Applies or drops the parts that a node has prepared. If it has none, that is no error.
    Finish = 37: step change anywhere -> "`Done`" {
        /// The transaction.
        tx: TxId,
        /// Whether it was committed.
        commit: bool,
    }
    /// Reads the outcome of a transaction.
    AskOutcome = 38: step read anywhere -> "`Outcome`" {
        /// The transaction.
        tx: TxId,
    }
    /// Lists entries that lead to inodes of a node, in the order of directory and cookie; see `forebay-meta`.
    LeadsTo = 39: step read anywhere -> "`Bytes`" {
        /// The node.
        node: NodeId,
        /// The position behind which the list begins: directory.
        parent: Ino,
        /// And cookie.
        cookie: Cookie,
    }
    /// Chooses targets for a new file of so many stripes. The node that receives it prefers its own targets, and avoids
    /// full and unreachable ones while there are others.
    Place = 40: client read anywhere -> "`Placed`" {
        /// Number of backing files, at least one.
        stripe_count: u16 as StripeCount,
    }
    /// Reads the space of the receiver's targets and of its shard.
    Targets = 41: client read anywhere -> "`Targets`"
    /// Checks which of these processes of the receiving node live. The sending daemon keeps state for them.
    AreThere = 55: peer read anywhere -> "`Bytes`: one for each, 0 for one that is gone" {
        /// Sessions, eight bytes each, at most [`SESSIONS_ASKED_MAX`](crate::limits::SESSIONS_ASKED_MAX).
        sessions: &'a [u8] as Sessions,
    }
    /// Renews the sending node's lease on directories, names and permissions of the receiver, for
    /// [`crate::limits::LEASE_MS`] from when it was sent. The lease covers replies before and after this request. In a
    /// new term everything that the sender cached before is invalid.
    RenewLease = 56: peer read anywhere -> "`Count`: the lease's term"
    /// Revokes the receiver's cached look-up of a name in a directory of the sending node.
    RevokeName = 57: peer read anywhere -> "`Done`" {
        /// Directory of the sending node.
        parent: Ino,
        /// Name in it.
        name: &'a [u8] as Name,
    }
    /// Revokes the receiver's cached permissions of a directory of the sending node.
    RevokeDirectory = 58: peer read anywhere -> "`Done`" {
        /// Directory of the sending node.
        ino: Ino,
    }
    /// Unlinks backing files whose inodes are gone. A backing file that is absent is no error.
    RemoveBackings = 59: peer read anywhere -> "`Bytes`: one for each, 0 for one that still exists" {
        /// Backing files ([`BackingId::list`]), at most [`REMOVED_AT_ONCE_MAX`](crate::limits::REMOVED_AT_ONCE_MAX).
        ids: &'a [u8] as BackingIds,
    }
    /// Makes an empty directory wide: new entries are distributed over several nodes.
    SetWidth = 80: client change at(ino) + several
        -> "`Parts`; `NotEmpty`, `Exists` for one that is wide already, `NoDevice` when the pool has too few nodes"
    {
        /// The directory.
        ino: Ino,
        /// Number of nodes, its home among them. 0: all nodes, at most [`WIDTH_MAX`](crate::limits::WIDTH_MAX).
        width: u16,
    }
    /// Reads the parts of a wide directory.
    PartsOf = 81: client read at(ino) -> "`Parts`; `NoAttribute` of one that is not wide" {
        /// The directory.
        ino: Ino,
    }
    /// Attaches a backing store to an empty directory: from now on the directory and what is created in it belong to the
    /// store's tree. `Exists` for a directory that belongs to one, `NotEmpty` for one with entries.
    Attach = 90: client change at(ino) -> "`Entry`" {
        /// The directory.
        ino: Ino,
        /// Whether the store's names appear in it: the mover lists each directory at its first use.
        listed: bool,
        /// The store's settings, which the directory keeps as the value of `trusted.forebay.store`.
        settings: &'a [u8] as XattrValue,
    }
    /// Ends an attachment. The pool keeps what it has, the store too. `Busy` while names of its tree are pending.
    Detach = 91: client change at(ino) -> "`Entry`" {
        /// The directory with the store.
        ino: Ino,
    }
    /// Sets for which calls programs wait until the store has their data, in the tree of a store: for a directory that was
    /// just attached. What is created or imported in it from then on inherits this. `NotEmpty` once it has entries.
    WaitForStore = 114: client change at(ino) -> "`Entry`" {
        /// The directory with the store.
        ino: Ino,
        /// fsync.
        fsync: bool,
        /// close, of a file that was open for writing.
        close: bool,
    }
    /// Waits until the store has what a file contained when the request came first, for some seconds at most.
    Persist = 115: client read at(ino) -> "`Count`: 0, or what to send as `since` to wait on" {
        /// The file.
        ino: Ino,
        /// 0 in the first request.
        since: u64,
    }
    /// The store has what a file contained when the mover got the task, or does not get it.
    Persisted = 116: client read at(ino) -> "`Done`" {
        /// The file.
        ino: Ino,
        /// 0, or why not: a [`Code`].
        code: u16,
    }
    /// Waits for work of the node's mover: directories to list, files to restore.
    StoreWork = 92: client read anywhere -> "`Bytes`: a list of [`crate::StoreTask`]; empty after a while without work" {
        /// Whether the mover has just started: everything that was handed out before is handed out again.
        restart: bool,
    }
    /// Reports that a task cannot be done: calls that wait for it fail.
    StoreFailed = 93: client read at(ino) -> "`Done`" {
        /// The directory or file.
        ino: Ino,
        /// Why: a [`Code`].
        code: u16,
    }
    /// Creates the entries of a directory that its store has. A name that the directory has already is left as it is.
    /// When there is no room for all, those that come first are created.
    Import = 94: client change at(ino) -> "`Count`: how many objects, from the first, are there now" {
        /// The directory.
        ino: Ino,
        /// A list of [`crate::StoreObject`].
        objects: &'a [u8] as XattrValue,
    }
    /// Imports the last objects of a listing, as `Import` does. If there was room for all, all names of the directory are
    /// there from then on. `Stale`, and nothing is imported, if any was forgotten (`Forget`) since the listing began.
    Listed = 154: client change at(ino) -> "`Entry`; `Count` of the objects, from the first, that are there now, if that is not all, or there is no room for the rest of the change" {
        /// The directory.
        ino: Ino,
        /// Its epoch when the listing began.
        epoch: u64,
        /// A list of [`crate::StoreObject`], which may be empty.
        objects: &'a [u8] as XattrValue,
    }
    /// One name of an unlisted directory was looked up in its store: it was imported, or the store lacks it, or the
    /// look-up failed and calls that wait for it fail.
    LookedUp = 126: client read at(parent) -> "`Done`" {
        /// The directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8] as Name,
        /// 0 after an import, the number of `NotFound` ([`Code`]) if the store lacks it, else why the look-up failed.
        code: u16,
    }
    /// Reads the entries of a directory that the shard has, although its store may have more. Waits for no store.
    ReadKnown = 128: client read at(ino) -> "`Entries`" {
        /// The directory.
        ino: Ino,
        /// The position behind which the listing begins; 0 for the first entry.
        cookie: Cookie as DirCookie,
    }
    /// A process is about to open a released file for reading alone. `NoAttribute` if the store's setting forbids that
    /// its data are copied for it (`forebay attach --recall`).
    Recall = 127: client read at(ino) -> "`Done`" {
        /// The file.
        ino: Ino,
        /// The process, by the number that it has on its node; 0 if it is not known.
        process: u64,
    }
    /// Waits until a file's data are in the pool, for some seconds at most.
    Restore = 96: client read at(ino) -> "`Entry`: without [`crate::FLAG_RESIDENT`] when it still takes longer" {
        /// The file.
        ino: Ino,
    }
    /// A file's data are in its backing files. `Stale` when the file has another epoch by now; `Busy` when its times were
    /// set meanwhile: the backing files get those first.
    Restored = 142: client change at(ino) -> "`Entry`" {
        /// The file.
        ino: Ino,
        /// Its epoch when the copy began.
        epoch: u64,
        /// The access time of its backing files.
        atime: Timestamp,
        /// The modification time of its backing files.
        mtime: Timestamp,
        /// The layout of its backing files.
        layout: Layout,
    }
    /// Begins the copy of a file to its store. The mover takes leases that exclude writers next, and sends `MarkDirty` if
    /// they are refused. `Stale` unless it is resident.
    BeginDrain = 98: client change at(ino) -> "`Entry`" {
        /// The file.
        ino: Ino,
    }
    /// Reads places of a node's shard at which the store may differ from the pool, in the order of directory and name.
    Pending = 99: client read at(parent) -> "`Bytes`: a list of [`crate::PendingPlace`]" {
        /// The place behind which the list begins: directory, the node's inode number 0 ([`Ino::new`]) for the first. A
        /// plain 0 is the receiver's first.
        parent: Ino,
        /// And name, which may be empty.
        name: &'a [u8] as Bytes,
    }
    /// Counts the changes of places that `Pending` lists, since the receiver's worker started: a mover that waits reads the
    /// list again when there were some.
    PendingChanges = 155: client read anywhere -> "`Count`"
    /// Notes the version that is about to be at a place, so that it is known after a crash, before the store is changed
    /// there; all zeros before a removal. A mover that renames notes the same version at both places. `Busy` if that
    /// would lose the only copy of a file that is not resident, or a directory with something in it.
    Intend = 100: client change at(parent) -> "`Done`" {
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8] as Name,
        /// The version.
        version: StoreVersion,
    }
    /// The store has this inode at a place. The place stays pending if the pool has another inode there by now, or if the
    /// file was changed since. `Busy` for the second place of a directory, and like `Intend` if something else was
    /// there; `Stale` for a file that is not resident, unless it has this epoch. With [`crate::CHANGES_ALL`] a file that
    /// is not resident gets size and modification time of a new version in the same step, and a new epoch; `Stale` for a
    /// resident file, and for one whose copy is at another place.
    Published = 101: client change at(parent) -> "`Done`" {
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8] as Name,
        /// The inode.
        ino: Ino,
        /// For a file: its epoch at `BeginDrain`, or [`crate::EPOCH_UNKNOWN`] if the version may have other data than the
        /// pool.
        epoch: u64,
        /// The number of changes that the sender has seen ([`crate::PendingPlace::changes`]).
        seen: u64,
        /// The version in the store.
        version: StoreVersion,
    }
    /// The store has nothing at a place any longer. `Busy` like `Intend`.
    Unpublished = 102: client change at(parent) -> "`Done`" {
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8] as Name,
        /// The number of changes that the sender has seen.
        seen: u64,
    }
    /// The store does not differ at a place: it is no longer pending, unless it has changed since.
    Settled = 108: client change at(parent) -> "`Done`" {
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8] as Name,
        /// The number of changes that the sender has seen.
        seen: u64,
    }
    /// The store has renamed what it had at one place to another, which is pending from then on.
    Moved = 103: client change at(parent) -> "`Done`" {
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8] as Name,
        /// The directory to which it moved.
        new_parent: Ino,
        /// The name in it.
        new_name: &'a [u8] as Name,
        /// Its version there.
        version: StoreVersion,
    }
    /// Releases a clean file: its data leave the pool, its attributes stay. The caller holds a lease that excludes every
    /// open, and unlinks the backing files afterwards. `Stale` unless the file is clean and has this epoch.
    Release = 104: client change at(ino) -> "`Entry`" {
        /// The file.
        ino: Ino,
        /// Its epoch.
        epoch: u64,
        /// Size and times of its data.
        set: SetAttr,
    }
    /// Pins a file or directory, so that it is not released, or unpins it.
    Pin = 105: client change at(ino) -> "`Entry`" {
        /// The inode.
        ino: Ino,
        /// Whether to pin it.
        pinned: bool,
    }
    /// Reads where a store has an inode: the path below the directory with the store, and the version.
    StorePlace = 106: client read at(ino) -> "`Bytes`: a [`crate::StorePlace`]; `NotFound` for one that it does not have" {
        /// The inode.
        ino: Ino,
    }
    /// Removes an entry of an attached tree from the pool alone: the store keeps what it has. `Busy` while its place is
    /// pending, unless `discard`; `NotEmpty` for a directory with entries; `NotFound` if neither pool nor store are known
    /// to have anything there.
    Forget = 109: client change at(parent) -> "`Removed`; `Done` if only the store had it" {
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8] as Name,
        /// Whether the store's names appear in the directory: it is listed again at its next use.
        relist: bool,
        /// Whether to drop what the store does not have too.
        discard: bool,
    }
    /// Notes a conflict at a place: the store has another version than the one that the pool knew. The pool's version was
    /// published under another name, or not at all.
    Conflict = 107: client change at(parent) -> "`Done`" {
        /// Directory.
        parent: Ino,
        /// Name in it.
        name: &'a [u8] as Name,
        /// Whether there is one. False settles it in favour of the pool.
        found: bool,
        /// The version that the store has; a version of zeros for none.
        version: StoreVersion,
    }
    /// Moves the place to which a released file is to be restored: to this node's first target. It begins a new epoch,
    /// so that a restore to the old place comes to nothing. `Stale` if the file is resident.
    Relocate = 120: client change at(ino) -> "`Entry`" {
        /// The file.
        ino: Ino,
        /// The node.
        node: NodeId,
    }
    /// Sends a message to a node's mover, and waits for its answer, for some seconds at most. `TimedOut` if it has none
    /// by then. Programs read by it what a store has of a file for which there is no room ([`crate::StoreRead`]).
    AskMover = 121: client read at(node) -> "`Bytes`: the answer" {
        /// The node.
        node: NodeId,
        /// What the movers understand (`crates/mover/src/engine/peers`).
        message: &'a [u8] as XattrValue,
    }
    /// Waits for a message to this node's mover, about a second at most.
    MoverWork = 122: client read anywhere -> "`Bytes`: a number (u64), then the message; empty after a while without one"
    /// Answers a message to this node's mover.
    MoverAnswer = 123: client read anywhere -> "`Done`" {
        /// Its number.
        number: u64,
        /// The answer.
        answer: &'a [u8] as XattrValue,
    }
    /// Waits until a range of a file's data is in the pool, for some seconds at most. The file's other data follow. If
    /// there is no room for it, the range has no backing file ([`crate::RestoredRange::NO_ROOM`]).
    RestoreRange = 124: client read at(ino) -> "`Bytes`: a [`crate::RestoredRange`] with the byte; `Entry` when the file is resident, or it still takes longer" {
        /// The file.
        ino: Ino,
        /// A byte of the range.
        offset: u64,
    }
    /// A range of a file that is being restored has arrived: calls that wait for a part of it go on.
    RangeRestored = 125: client read at(ino) -> "`Done`" {
        /// The file.
        ino: Ino,
        /// The kernel's number of the backing file that has it; 0 if there is no room for it.
        backing: u64,
        /// Its first byte.
        from: u64,
        /// The byte behind it.
        to: u64,
    }
    /// Reads where a store has many inodes, as `StorePlace` does for one.
    StorePlaces = 140: client read at(node) -> "`Bytes`: for each a code (u16), its length (u16) and a [`crate::StorePlace`]; fewer if they do not fit" {
        /// The node that serves each of them.
        node: NodeId,
        /// At most [`crate::REPORTS_MAX`] inodes (u64).
        inos: &'a [u8] as XattrValue,
    }
    /// Reports of a mover about many files: `BeginDrain`, `Intend`, `Published` and `Restored`, as if they came one after
    /// the other.
    /// One transaction has them all, but one that is refused changes nothing and does not keep the others from taking
    /// effect.
    StoreReports = 129: client change at(node) -> "`Bytes`: an outcome for each ([`crate::ReportOutcome`])" {
        /// The node that serves each of them.
        node: NodeId,
        /// At most [`crate::REPORTS_MAX`] requests, each with its number in front of its fields.
        reports: &'a [u8] as XattrValue,
    }
    /// Begins a volume: records its name, owner and first segment. It stays invisible until `CommitVolume`, and goes with
    /// its maker's session. `MakePiece` reserves its pieces meanwhile.
    CreateVolume = 130: client change root -> "`Bytes`: the [`crate::Volume`]; `Exists`" {
        /// Its name ([`crate::check_volume_name`]).
        name: &'a [u8] as Name,
        /// Permission bits.
        mode: u32 as Permissions,
        /// The sender's session.
        maker: u64,
        /// Its first segment.
        segment: Segment,
    }
    /// Begins a further segment of a volume, which `CommitVolume` appends. `Busy` while another is being reserved.
    GrowVolume = 131: client change root -> "`Bytes`: the [`crate::Volume`]" {
        /// Its name.
        name: &'a [u8] as Name,
        /// Its number: `Stale` if the name leads to another volume by now.
        ino: Ino,
        /// The sender's session.
        maker: u64,
        /// The segment.
        segment: Segment,
    }
    /// The pieces of a volume's last segment are reserved: it can be used from now on. `Stale` if they are not.
    CommitVolume = 132: client change root -> "`Bytes`: the [`crate::Volume`]" {
        /// Its name.
        name: &'a [u8] as Name,
        /// Its number.
        ino: Ino,
    }
    /// Drops the segment of a volume that is being reserved; the volume too, if that is its first.
    AbandonVolume = 133: client change root -> "`Done`" {
        /// Its name.
        name: &'a [u8] as Name,
        /// Its number.
        ino: Ino,
    }
    /// Drops the trailing segments of a volume. `Invalid` if no segment ends at this size, `Busy` while a process has the
    /// volume open.
    ShrinkVolume = 134: client change root -> "`Bytes`: the [`crate::Volume`]" {
        /// Its name.
        name: &'a [u8] as Name,
        /// Its number.
        ino: Ino,
        /// The size that it is to have.
        bytes: u64,
    }
    /// Deletes a volume. `Busy` while a process has it open.
    DeleteVolume = 135: client change root -> "`Done`" {
        /// Its name.
        name: &'a [u8] as Name,
        /// Its number.
        ino: Ino,
    }
    /// Reads the record of a volume.
    GetVolume = 136: client read root -> "`Bytes`: the [`crate::Volume`]" {
        /// Its name.
        name: &'a [u8] as Name,
    }
    /// Reads records of volumes in the order of their names.
    ListVolumes = 137: client read root -> "`Bytes`: each name with its length in front, and the [`crate::Volume`]; empty behind the last" {
        /// The name behind which the list begins, or nothing.
        after: &'a [u8] as Bytes,
    }
    /// Reserves the memory of a piece of a volume up to an offset; repeated, it goes on from there. `NoSpace` leaves what is
    /// reserved. A process other than the volume's maker gets `Stale`.
    MakePiece = 138: client read at(node) -> "`Count`: the bytes that are reserved" {
        /// The node of the piece.
        node: NodeId,
        /// The piece.
        piece: PieceId,
        /// The target on which it is.
        target: u32,
        /// Its bytes.
        bytes: u64,
        /// The bytes from its beginning that are to be reserved.
        until: u64,
    }
    /// The same on a node that is not the volume's home. That node keeps the piece as long as the home has the segment
    /// ([`Request::AreSegments`]).
    MakePieceAway = 150: client read at(node) -> "`Count`: the bytes that are reserved" {
        /// The node of the piece.
        node: NodeId,
        /// The piece.
        piece: PieceId,
        /// The target on which it is.
        target: u32,
        /// Its bytes.
        bytes: u64,
        /// The bytes from its beginning that are to be reserved.
        until: u64,
        /// The volume's permission bits. Its owner is the caller.
        mode: u32 as Permissions,
        /// Nothing is to be reserved: [`Segment::is_thin`].
        is_thin: bool,
    }
    /// Looks whether a process has a volume's pieces on a node open.
    PiecesUnused = 151: client read at(node) -> "`Done`; `Busy` while a process has one open" {
        /// The node.
        node: NodeId,
        /// The volume.
        volume: Ino,
    }
    /// Has a node compare its pieces of volumes with the records of their home now, and not some time later.
    ReviewPieces = 152: client read at(node) -> "`Done`" {
        /// The node.
        node: NodeId,
    }
    /// Whether these segments of the receiver's volumes still exist. A piece of a segment that is gone is dropped.
    AreSegments = 153: peer read anywhere -> "`Bytes`: one for each, 0 for one that is gone, 2 for one that is being made" {
        /// The segments, at most [`SESSIONS_ASKED_MAX`](crate::limits::SESSIONS_ASKED_MAX).
        segments: &'a [u8] as SegmentIds,
    }
}

/// Whether a request may change the shard, by its number.
static CHANGES: [bool; 256] = {
    let mut changes = [false; 256];
    let mut i = 0;
    while i < REQUESTS.len() {
        changes[REQUESTS[i].number as usize] = REQUESTS[i].changes;
        i += 1;
    }
    changes
};

/// True when an encoded request may change the shard. The client may then have to act on the reply, and the slot's next
/// request confirms that it has. False for bytes that are no request.
#[inline]
pub fn may_change(message: &[u8]) -> bool {
    message.first().is_some_and(|number| CHANGES[usize::from(*number)])
}

/// By number: whether it is for data.
static DATA: [bool; 256] = {
    let mut data = [false; 256];
    let mut i = 0;
    while i < REQUESTS.len() {
        data[REQUESTS[i].number as usize] = matches!(REQUESTS[i].class, Class::Data);
        i += 1;
    }
    data
};

/// True when a request whose message begins with this byte is of [`Class::Data`].
#[inline]
pub fn is_for_data(number: u8) -> bool {
    DATA[usize::from(number)]
}

/// Bytes in front of every request: number, flags, reserved, uid, gid.
const HEADER_BYTES: usize = 12;

impl<'a> Request<'a> {
    /// Encodes the request into `buffer`. Returns the number of bytes. Fails with [`Code::TooBig`] when they do not
    /// fit.
    pub fn encode(&self, caller: Caller, buffer: &mut [u8]) -> Result<usize, Code> {
        let mut w = Writer::new(buffer);
        w.u8(self.number())?;
        w.u8(0)?;
        w.u16(0)?;
        w.u32(caller.uid)?;
        w.u32(caller.gid)?;
        self.put(&mut w)?;
        Ok(w.len())
    }

    /// Decodes and checks a request: in the result names, lengths, flags and times are within their bounds. The error
    /// is the reply to the caller.
    pub fn decode(bytes: &'a [u8]) -> Result<(Caller, Request<'a>), Code> {
        if bytes.len() < HEADER_BYTES {
            return Err(Code::Malformed);
        }
        let mut r = Reader::new(bytes);
        let number = r.u8()?;
        r.u8()?;
        r.u16()?;
        let caller = Caller { uid: r.u32()?, gid: r.u32()? };
        Ok((caller, Request::get(number, &mut r)?))
    }

    /// True when the request may change the shard: its reply is kept until the slot's next request, so that a retry is
    /// answered and not executed again.
    #[inline]
    pub const fn changes(&self) -> bool {
        self.info().changes
    }

    /// Where the request may come from.
    #[inline]
    pub const fn class(&self) -> Class {
        self.info().class
    }

    /// True for a change by a client that may have parts on several nodes.
    #[inline]
    pub const fn may_take_several_nodes(&self) -> bool {
        self.info().has("several")
    }
}
