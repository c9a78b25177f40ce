//! Attributes of one inode: reading and setting them; and the path of a directory.

use forebay_types::limits::PATH_MAX;
use forebay_types::{Code, Ino, Kind, Layout, Reply, SetAttr};

use crate::batch::{Answer, Batch, Context};
use crate::keys;
use crate::page_budget::{Class, Work};
use crate::record::{EntryRecord, Inode};

/// Bound on a walk from a directory up to the root, which ends the walk in a damaged shard. No tree is deeper than its
/// number of inodes.
const DEPTH_MAX: u64 = 1 << 24;

impl Batch<'_> {
    pub(crate) fn get_attr(&mut self, c: &mut Context<'_>, ino: Ino) -> Answer<Reply<'static>> {
        let Some(inode) = self.find_inode(ino)? else {
            c.effects.gone(ino);
            return Err(Code::NotFound);
        };
        c.effects.inode(inode.entry());
        Ok(Reply::Entry(inode.entry()))
    }

    pub(crate) fn make_backing(&mut self, c: &mut Context<'_>, ino: Ino) -> Answer<Reply<'static>> {
        let inode = self.inode(ino)?;
        match inode.attr.kind() {
            // The data come from the backing store.
            Kind::File if !inode.attr.is_resident() => Err(Code::Stale),
            Kind::File | Kind::Fifo | Kind::CharDevice | Kind::BlockDevice => self.get_attr(c, ino),
            Kind::Directory => Err(Code::IsDirectory),
            Kind::Symlink | Kind::Socket => Err(Code::Invalid),
        }
    }

    pub(crate) fn set_layout(
        &mut self,
        c: &mut Context<'_>,
        ino: Ino,
        layout: Layout,
    ) -> Answer<Reply<'static>> {
        let mut inode = self.inode(ino)?;
        match inode.attr.kind() {
            Kind::Directory if layout.wish().is_none() && !ino.is_part() => {}
            Kind::File if layout.is_single() != inode.layout.is_single() && layout.is_placed() => {}
            _ => return Err(Code::Invalid),
        }
        self.admit(Class::Removal, Work::writes(3))?;
        let before = std::mem::replace(&mut inode.layout, layout);
        self.store_inode(&inode)?;
        c.effects.inode(inode.entry());
        Ok(Reply::Relaid { ino, layout: before })
    }

    pub(crate) fn set_attr(
        &mut self,
        c: &mut Context<'_>,
        ino: Ino,
        set: &SetAttr,
    ) -> Answer<Reply<'static>> {
        let mut inode = self.inode(ino)?;
        if ino.is_part() {
            return Err(Code::Invalid); // it changes with its directory
        }
        set.apply(&mut inode.attr, c.now)?;
        // Inode, kept reply, ledger.
        self.admit(Class::Change, Work::writes(3))?;
        self.store_inode(&inode)?;
        c.effects.inode(inode.entry());
        Ok(Reply::Entry(inode.entry()))
    }

    /// True when `above` is `ino` or an ancestor of it. [`Code::CrossDevice`] when only other nodes can decide this.
    pub(crate) fn is_above(&mut self, above: Ino, ino: Ino) -> Answer<bool> {
        let (top, met) = self.top_of(ino, above)?;
        // Both directories have the same topmost ancestor here, so no path between them leaves this node.
        if met || top == Ino::ROOT || top == self.top_of(above, Ino(0))?.0 {
            return Ok(met);
        }
        Err(Code::CrossDevice)
    }

    /// The topmost ancestor of `ino` that is on this shard with all directories between, and whether `met` is among
    /// them.
    fn top_of(&mut self, mut ino: Ino, met: Ino) -> Answer<(Ino, bool)> {
        for _ in 0..DEPTH_MAX {
            if ino == met || ino == Ino::ROOT {
                return Ok((ino, ino == met));
            }
            let slot = self.directory(ino).map_err(|_| Code::Corrupt)?;
            let parent = self.state.directories.get(slot).attr.parent;
            if !self.is_ours(parent) {
                return Ok((ino, false));
            }
            ino = parent;
        }
        Err(Code::Corrupt)
    }

    pub(crate) fn path_of<'o>(&mut self, ino: Ino, payload: &'o mut [u8]) -> Answer<Reply<'o>> {
        let slot = self.directory(ino)?;
        let mut inode: Inode = *self.state.directories.get(slot);
        // Filled from the end, as the walk goes upwards.
        let path = payload.get_mut(..PATH_MAX).ok_or(Code::TooBig)?;
        let mut start = PATH_MAX;
        while inode.attr.ino != Ino::ROOT {
            let parent = inode.attr.parent;
            if inode.attr.ino.is_part() && self.is_ours(parent) {
                // No name leads from a wide directory to its part.
                let slot = self.directory(parent).map_err(|_| Code::Corrupt)?;
                inode = *self.state.directories.get(slot);
                continue;
            }
            if !self.is_ours(parent) {
                return Ok(Reply::PartOfPath { top: inode.attr.ino, parent, path: &path[start..] });
            }
            let bytes = self.tx.get(&keys::entry(parent, inode.cookie))?.ok_or(Code::Corrupt)?;
            let record = EntryRecord::decode(bytes)?;
            if record.ino != inode.attr.ino {
                return Err(Code::Corrupt);
            }
            let next = start.checked_sub(record.name.len() + 1).ok_or(Code::NameTooLong)?;
            path[next] = b'/';
            path[next + 1..start].copy_from_slice(record.name);
            start = next;
            let slot = self.directory(parent).map_err(|_| Code::Corrupt)?;
            inode = *self.state.directories.get(slot);
        }
        Ok(Reply::Bytes(if start == PATH_MAX { b"/" } else { &path[start..] }))
    }
}
