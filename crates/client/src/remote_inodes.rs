//! What lies on other nodes: directories whose entry and inode are on two, and backing files that cannot be opened
//! here.
//!
//! Requests for other nodes go through this node's daemon like any (docs/decisions/0011); what is here is only what
//! takes several of them. Their data are in `remote_data`.

use std::sync::atomic::{AtomicU64, Ordering};

use forebay_types::limits::PATH_MAX;
use forebay_types::{
    BackingAttr, BackingId, BackingOp, Caller, Code, Entry, Ino, Layout, NodeId, Reply, Request,
};

use crate::path::PathBuffer;
use crate::pool::{caller, Pool};

/// Looks for a directory's path while it is moved.
const PATHS_MAX: u32 = 16;

/// A backing file that was there when the file was opened went with the file's last name.
pub(crate) fn gone_is_stale(code: Code) -> Code {
    if code == Code::NotFound {
        Code::Stale
    } else {
        code
    }
}

/// A number that this process has not used for anything that it has open or under way at another node.
pub(crate) fn new_handle() -> u64 {
    static HANDLES: AtomicU64 = AtomicU64::new(1);
    HANDLES.fetch_add(1, Ordering::Relaxed)
}

/// A backing file of another node that this process has open: it stays when it is unlinked.
#[derive(Debug)]
pub(crate) struct OpenElsewhere {
    pool: &'static Pool,
    pub(crate) id: BackingId,
    handle: u64,
}

impl Drop for OpenElsewhere {
    fn drop(&mut self) {
        // Its node closes it at the latest when this process is gone.
        let _ = self.pool.ask_backing(self.id, BackingOp::Close { handle: self.handle });
    }
}

impl Pool {
    /// This node; of a pool of one node its only one.
    #[inline]
    pub fn node(&self) -> Result<NodeId, Code> {
        Ok(self.attached()?.reply.node)
    }

    /// True when this node has a target: files may lie on it, and directories have their homes on it.
    pub fn takes_files(&self) -> bool {
        self.attached().is_ok_and(|a| a.takes_files())
    }

    /// True when the pool has other nodes, whose programs this one knows nothing of.
    pub fn spans_nodes(&self) -> bool {
        self.attached().is_ok_and(|a| a.reply.nodes > 1)
    }

    /// True when an inode, and a directory's entries, are served by this node.
    #[inline]
    pub fn is_served_here(&self, ino: Ino) -> bool {
        self.attached().is_ok_and(|a| a.reply.nodes <= 1 || ino.birth_node() == a.reply.node)
    }

    /// True when all backing files of a layout can be opened on this node.
    #[inline]
    pub fn is_here(&self, layout: &Layout) -> bool {
        let Ok(attached) = self.attached() else { return true };
        attached.reply.nodes <= 1 || {
            let here = u32::from(attached.reply.node.0);
            let used = |c: &forebay_types::Component| usize::from(c.target_count);
            layout.components().iter().all(|c| c.targets[..used(c)].iter().all(|t| t >> 16 == here))
        }
    }

    /// True for a file that is one backing file of this node, of which the kernel has a descriptor.
    #[inline]
    pub fn is_one_here(&self, layout: &Layout) -> bool {
        layout.is_single() && self.is_here(layout)
    }

    /// True for a file of which no descriptor can be had but by the pool's mount: one that is not all on this node,
    /// and, in a pool of several nodes, one of several backing files: it is not made one, as nobody here knows whether
    /// another node has it open (`migrate`).
    #[inline]
    pub(crate) fn needs_mount(&self, entry: &Entry) -> bool {
        entry.attr.is_file() && self.spans_nodes() && !self.is_one_here(&entry.layout)
    }

    /// The layout of a file that this process makes: where the pool has several nodes, or this one several targets, its
    /// data stays here, though the directory has come to be wide, and the name another node's, since it was looked at.
    pub(crate) fn layout_in(&self, asked: Option<Layout>) -> Result<Option<Layout>, Code> {
        match asked {
            None if self.spans_nodes() => Ok(Some(self.layout_here()?)),
            None if self.attached()?.target_count() > 1 => Ok(Some(self.layout_here()?)),
            asked => Ok(asked),
        }
    }

    /// A backing file of a layout, if it is on another node.
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

    /// Makes a directory in a parent of another node, after which it takes: it is this node's, its entry that one's.
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

    /// The path of a directory, node by node.
    pub(crate) fn path_of_directory(&self, dir: Ino, path: &mut PathBuffer) -> Result<(), Code> {
        for _ in 0..PATHS_MAX {
            match self.path_of_directory_once(dir, path) {
                // One of those above was moved between the looks at its parent and at its name.
                Err(Code::NotFound) if self.spans_nodes() && self.get_attr(dir).is_ok() => {}
                done => return done,
            }
        }
        Err(Code::NotFound)
    }

    fn path_of_directory_once(&self, mut dir: Ino, path: &mut PathBuffer) -> Result<(), Code> {
        let mut reply = [0; PATH_MAX + 32];
        // Behind `dir`, from its end to its beginning.
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
                // No name leads from a wide directory to its part.
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

    /// Does something with a backing file of another node whose answer has no data.
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

    /// Makes sure that a backing file of another node is there, as long as its inode is.
    pub(crate) fn ensure_backing(&self, id: BackingId) -> Result<(), Code> {
        match self.stat_backing(id) {
            Err(Code::NotFound) => self.make_backing(id),
            told => told.map(|_| ()),
        }
    }

    /// Makes one that is not there, if its inode is.
    fn make_backing(&self, id: BackingId) -> Result<(), Code> {
        match self.ask_entry(&Request::MakeBacking { ino: id.ino }) {
            // The inode's home has made what it has of it.
            Ok(_) if id.ino.birth_node() == id.node() => Ok(()),
            Ok(_) => self.ask_backing(id, BackingOp::Make),
            Err(code) => Err(gone_is_stale(code)),
        }
    }

    /// Opens backing files of other nodes, all at the same time; those are made that are not there.
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
                // Its node keeps as many open as it can: this one is opened anew for each request.
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
