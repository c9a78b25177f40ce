//! Inodes on other nodes: directories whose entry and inode are on two nodes, and backing files that cannot be opened
//! on this node.
//!
//! Requests for other nodes go through this node's daemon like all others (docs/decisions/0011). This module has the
//! operations that take several requests. Transfers of data are in `remote_data`.

use std::sync::atomic::{AtomicU64, Ordering};

use forebay_types::limits::PATH_MAX;
use forebay_types::{
    BackingAttr, BackingId, BackingOp, Caller, Code, Entry, Ino, Layout, NodeId, Reply, Request,
};

use crate::path::PathBuffer;
use crate::pool::{caller, Pool};

/// How often a directory's path is read again when a directory above it is moved meanwhile.
const PATHS_MAX: u32 = 16;

/// NotFound of a backing file that existed at the open means that the file lost its last name: [`Code::Stale`].
pub(crate) fn gone_is_stale(code: Code) -> Code {
    if code == Code::NotFound {
        Code::Stale
    } else {
        code
    }
}

/// A number that this process has not used before, for something that it has open or in progress on another node.
pub(crate) fn new_handle() -> u64 {
    static HANDLES: AtomicU64 = AtomicU64::new(1);
    HANDLES.fetch_add(1, Ordering::Relaxed)
}

/// A backing file on another node that this process has open. It remains when it is unlinked.
#[derive(Debug)]
pub(crate) struct OpenElsewhere {
    pool: &'static Pool,
    pub(crate) id: BackingId,
    handle: u64,
}

impl Drop for OpenElsewhere {
    fn drop(&mut self) {
        // If the message is lost, the backing file's node closes it when this process ends.
        let _ = self.pool.ask_backing(self.id, BackingOp::Close { handle: self.handle });
    }
}

impl Pool {
    /// This node's number.
    #[inline]
    pub fn node(&self) -> Result<NodeId, Code> {
        Ok(self.attached()?.reply.node)
    }

    /// True if this node has a target, so that files may lie on it and directories have their home on it.
    pub fn takes_files(&self) -> bool {
        self.attached().is_ok_and(|a| a.takes_files())
    }

    /// True if the pool has other nodes. This node does not know what their programs have open.
    pub fn spans_nodes(&self) -> bool {
        self.attached().is_ok_and(|a| a.reply.nodes > 1)
    }

    /// True if this node serves an inode, or a directory's entries.
    #[inline]
    pub fn is_served_here(&self, ino: Ino) -> bool {
        self.attached().is_ok_and(|a| a.reply.nodes <= 1 || ino.birth_node() == a.reply.node)
    }

    /// True if all backing files of a layout can be opened on this node.
    #[inline]
    pub fn is_here(&self, layout: &Layout) -> bool {
        let Ok(attached) = self.attached() else { return true };
        attached.reply.nodes <= 1 || {
            let here = u32::from(attached.reply.node.0);
            let used = |c: &forebay_types::Component| usize::from(c.target_count);
            layout.components().iter().all(|c| c.targets[..used(c)].iter().all(|t| t >> 16 == here))
        }
    }

    /// True for a file with one backing file, on this node: the kernel can open it.
    #[inline]
    pub fn is_one_here(&self, layout: &Layout) -> bool {
        layout.is_single() && self.is_here(layout)
    }

    /// True for a file that can only be opened as a descriptor through the pool's mount: a file that is not entirely on
    /// this node and, in a pool of several nodes, a file with several backing files. The latter is not converted to
    /// one, because another node may have it open (`migrate`).
    #[inline]
    pub(crate) fn needs_mount(&self, entry: &Entry) -> bool {
        entry.attr.is_file() && self.spans_nodes() && !self.is_one_here(&entry.layout)
    }

    /// The layout of a file that this process creates. In a pool of several nodes or targets, its data stay on this
    /// node even if the directory became wide since the look-up, and the name belongs to another node.
    pub(crate) fn layout_in(&self, asked: Option<Layout>) -> Result<Option<Layout>, Code> {
        match asked {
            None if self.spans_nodes() => Ok(Some(self.layout_here()?)),
            None if self.attached()?.target_count() > 1 => Ok(Some(self.layout_here()?)),
            asked => Ok(asked),
        }
    }

    /// The ID of a backing file, if it is on another node.
    pub(crate) fn backing_elsewhere(
        &self,
        entry: &Entry,
        component: usize,
        stripe: u16,
    ) -> Option<BackingId> {
        let reply = &self.attached().ok()?.reply;
        if reply.nodes <= 1 || component >= entry.layout.components().len() {
            return None;
        }
        let id = BackingId::of(entry.attr.ino, &entry.layout, component, stripe);
        (id.node() != reply.node).then_some(id)
    }

    // --- directories on two nodes

    /// Creates a directory in a parent of another node. This node serves the directory's inode, the other node its
    /// entry.
    pub(crate) fn make_directory_elsewhere(
        &self,
        caller: Caller,
        parent: Ino,
        name: &[u8],
        mode: u32,
    ) -> Result<Entry, Code> {
        let request = Request::MakeDirectoryAt { node: self.node()?, parent, name, mode };
        self.ask_as(caller, &request, |reply| match reply {
            Reply::Entry(entry) => Ok(entry),
            _ => Err(Code::Malformed),
        })
    }

    fn ask_done(&self, request: &Request<'_>) -> Result<(), Code> {
        self.ask_as(caller(), request, |reply| match reply {
            Reply::Done => Ok(()),
            _ => Err(Code::Malformed),
        })
    }

    /// The path of a directory, which is assembled node by node.
    pub(crate) fn path_of_directory(&self, dir: Ino, path: &mut PathBuffer) -> Result<(), Code> {
        for _ in 0..PATHS_MAX {
            match self.path_of_directory_once(dir, path) {
                // A directory above was moved between the requests for its parent and for its name.
                Err(Code::NotFound) if self.spans_nodes() && self.get_attr(dir).is_ok() => {}
                done => return done,
            }
        }
        Err(Code::NotFound)
    }

    fn path_of_directory_once(&self, mut dir: Ino, path: &mut PathBuffer) -> Result<(), Code> {
        let mut reply = [0; PATH_MAX + 32];
        // The path below `dir`, filled from its end to its start.
        let (mut behind, mut start) = ([0; PATH_MAX], PATH_MAX);
        let mut put = |piece: &[u8]| -> Result<(), Code> {
            let at = start.checked_sub(piece.len()).ok_or(Code::NameTooLong)?;
            behind[at..start].copy_from_slice(piece);
            start = at;
            Ok(())
        };
        loop {
            let n = self.call(&Request::PathOf { ino: dir }, &mut reply)?;
            let (top, parent) = match Reply::decode(&reply[..n])? {
                Reply::Bytes(whole) => {
                    let whole = if whole == b"/" { b"" } else { whole };
                    put(whole)?;
                    break;
                }
                Reply::PartOfPath { top, parent, path } => {
                    put(path)?;
                    (top, parent)
                }
                _ => return Err(Code::Malformed),
            };
            if top.is_part() {
                // A wide directory has no name for its part.
                dir = parent;
                continue;
            }
            let n = self.call(&Request::NameOf { parent, ino: top }, &mut reply)?;
            match Reply::decode(&reply[..n])? {
                Reply::Bytes(name) => put(name)?,
                _ => return Err(Code::Malformed),
            }
            put(b"/")?;
            dir = parent;
        }
        path.set(if start == PATH_MAX { b"/" } else { &behind[start..] })
    }

    // --- backing files of other nodes

    /// Applies an operation whose reply carries no data to a backing file of another node.
    pub(crate) fn ask_backing(&self, id: BackingId, op: BackingOp<'_>) -> Result<(), Code> {
        self.ask_done(&Request::Backing { id, op }).map_err(gone_is_stale)
    }

    /// Attributes of a backing file of another node.
    pub(crate) fn stat_backing(&self, id: BackingId) -> Result<BackingAttr, Code> {
        self.ask_as(Caller { uid: 0, gid: 0 }, &Request::Backing { id, op: BackingOp::Stat }, |reply| {
            match reply {
                Reply::Backing(attr) => Ok(attr),
                _ => Err(Code::Malformed),
            }
        })
    }

    /// Creates a backing file on another node if it does not exist and its inode does.
    pub(crate) fn ensure_backing(&self, id: BackingId) -> Result<(), Code> {
        match self.stat_backing(id) {
            Err(Code::NotFound) => self.make_backing(id),
            told => told.map(|_| ()),
        }
    }

    /// Creates a missing backing file if its inode exists.
    fn make_backing(&self, id: BackingId) -> Result<(), Code> {
        match self.ask_entry(&Request::MakeBacking { ino: id.ino }) {
            // The inode's birth node has created its own backing files.
            Ok(_) if id.ino.birth_node() == id.node() => Ok(()),
            Ok(_) => self.ask_backing(id, BackingOp::Make),
            Err(code) => Err(gone_is_stale(code)),
        }
    }

    /// Opens backing files on other nodes, all at the same time. Missing ones are created.
    pub(crate) fn open_elsewhere(
        &self,
        ids: &mut dyn Iterator<Item = BackingId>,
    ) -> Result<Vec<OpenElsewhere>, Code> {
        let (mut opened, mut absent, mut failed) = (Vec::new(), Vec::new(), Ok(()));
        let mut asks = ids.map(|id| {
            let handle = new_handle();
            ((id, handle), id, BackingOp::Open { handle })
        });
        self.ask_many(&mut asks, |(id, handle), reply| {
            let of = OpenElsewhere { pool: self.for_ever(), id, handle };
            match reply {
                // The node has as many files open as it can: it opens this one anew for each request.
                Ok(Reply::Done) | Err(Code::NoResources | Code::NoMemory) => {}
                Err(Code::NotFound | Code::Stale) => absent.push((id, handle)),
                Ok(_) => failed = Err(Code::Malformed),
                Err(code) => failed = Err(code),
            }
            opened.push(of);
        })?;
        failed?;
        for (id, handle) in absent {
            self.make_backing(id)?;
            match self.ask_backing(id, BackingOp::Open { handle }) {
                Ok(()) | Err(Code::NoResources | Code::NoMemory) => {}
                Err(code) => return Err(code),
            }
        }
        Ok(opened)
    }
}
