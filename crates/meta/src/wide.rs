//! Wide directories (docs/decisions/0024): the directory's inode, whose value of the empty name lists its parts; and
//! parts, which are directories except for these differences:
//!
//! | | the directory | a part |
//! |---|---|---|
//! | entries | none: a request for one is refused with [`Code::Wide`] and the parts | those whose hashes belong to it |
//! | entry that leads to it | in its parent | none: its parent is the directory |
//! | cookie of its own entry | as any | its index, and the number of parts |
//! | mode, owner, group, layout | visible to programs | the same, for what is created in it |
//!
//! Only changes of the directory change a part: a request that sets attributes or a layout of a part is refused.
//!
//! Cross-node transactions create, change and remove the parts together with the directory (`coordinator.rs`). Parts
//! never move, and inode numbers are never used again, so a list of parts that a node has learned stays valid.

use forebay_types::{
    name_hash, part_of_hash, Attr, Change, Code, Cookie, Ino, Layout, NodeId, Part, Parts, Reader, Refusal,
    Reply, SetAttr, Timestamp, TxId, Writer, FLAG_UNLISTED,
};

use crate::batch::{Answer, Batch, Context};
use crate::holds::Hold;
use crate::keys::ValueKey;
use crate::record::Inode;

/// Upper bound of the bytes of an encoded list of parts.
const PARTS_BYTES_MAX: usize = 9 + 8 * forebay_types::limits::WIDTH_MAX;

/// The index of a part and the number of parts. Its record has them in place of the cookie of other directories'
/// entries.
pub(crate) fn place_of_part(index: u8, width: u8) -> Cookie {
    Cookie::from(index) << 8 | Cookie::from(width)
}

/// The index of a part, and the number of parts.
pub(crate) fn decode_place(cookie: Cookie) -> (usize, usize) {
    ((cookie >> 8) as usize, (cookie & 0xff) as usize)
}

impl Batch<'_> {
    /// The slot of a directory that has entries of its own, all of which are known. [`Code::Wide`] for a wide one; its
    /// parts are then stored for [`Batch::refusal`].
    #[inline]
    pub(crate) fn entries_of(&mut self, ino: Ino) -> Answer<usize> {
        let slot = self.narrow(ino)?;
        match self.state.directories.get(slot).attr.flags & FLAG_UNLISTED {
            0 => Ok(slot),
            _ => self.check_listed(ino).map(|()| slot),
        }
    }

    /// The slot of a directory that has entries of its own, of which only some may be known.
    #[inline]
    pub(crate) fn narrow(&mut self, ino: Ino) -> Answer<usize> {
        let slot = self.directory(ino)?;
        match self.state.directories.get(slot).attr.width_log2 {
            0 => Ok(slot),
            _ => self.refuse_wide(ino),
        }
    }

    /// The same for a directory that has a name or may get it. A part refuses names whose hashes belong to another part
    /// with [`Code::Wide`], and with the list of parts if the directory is on this node too.
    #[inline]
    pub(crate) fn entries_for(&mut self, ino: Ino, name: &[u8]) -> Answer<usize> {
        let slot = self.narrow(ino)?;
        if self.state.directories.get(slot).attr.flags & FLAG_UNLISTED != 0 {
            self.check_known(slot, name)?;
        }
        if ino.is_part() {
            self.check_part(slot, name)?;
        }
        Ok(slot)
    }

    fn check_part(&mut self, slot: usize, name: &[u8]) -> Answer<()> {
        let part = self.state.directories.get(slot);
        let (index, width) = decode_place(part.cookie);
        if part_of_hash(name_hash(name), width) == index {
            return Ok(());
        }
        let of = part.attr.parent;
        self.met_wide = self.parts_if_wide(of)?;
        Err(Code::Wide)
    }

    #[cold]
    fn refuse_wide(&mut self, ino: Ino) -> Answer<usize> {
        self.met_wide = Some(self.parts_of(ino)?);
        Err(Code::Wide)
    }

    /// The refusal of the last request: the code, and with [`Code::Wide`] the parts, if known.
    pub fn refusal(&mut self, code: Code) -> Refusal {
        match self.met_wide.take().filter(|_| code == Code::Wide) {
            Some(parts) => Refusal::Wide(parts),
            None => Refusal::Code(code),
        }
    }

    /// The parts of a wide directory.
    pub(crate) fn parts_of(&self, ino: Ino) -> Answer<Parts> {
        let key = ValueKey::new(ino, b"");
        let bytes = self.tx.get(key.bytes())?.ok_or(Code::Corrupt)?;
        Parts::decode(&mut Reader::new(bytes)).map_err(|_| Code::Corrupt)
    }

    /// The parts of an inode that is a wide directory of this node.
    pub(crate) fn parts_if_wide(&mut self, ino: Ino) -> Answer<Option<Parts>> {
        match self.find_inode(ino)? {
            Some(inode) if inode.attr.is_directory() && inode.attr.width_log2 != 0 => {
                self.parts_of(ino).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// The directory under which programs know the names in `parent`: for a part the wide directory, for others
    /// `parent`.
    pub fn shown_parent(&self, parent: Ino) -> Ino {
        if !parent.is_part() {
            return parent;
        }
        self.find_inode(parent).ok().flatten().map_or(parent, |part| part.attr.parent)
    }

    pub(crate) fn tell_parts(&mut self, ino: Ino) -> Answer<Reply<'static>> {
        self.directory(ino)?;
        let parts = self.parts_if_wide(ino)?.ok_or(Code::NoAttribute)?;
        Ok(Reply::Parts(parts))
    }

    pub(crate) fn prepare_widen(&mut self, tx: TxId, ino: Ino) -> Answer<Reply<'static>> {
        let slot = self.directory(ino)?;
        let inode = *self.state.directories.get(slot);
        check_narrow(&inode)?;
        match self.state.holds.forbids(tx, ino, Hold::Widening) {
            true => Err(Code::Busy),
            false => Ok(Reply::Entry(inode.entry())),
        }
    }

    /// Commits that the directory is wide: from now on its parts have its entries.
    pub(crate) fn commit_widen(&mut self, c: &mut Context<'_>, parts: &Parts) -> Answer<()> {
        let slot = self.directory(parts.of)?;
        let mut bytes = [0; PARTS_BYTES_MAX];
        let mut w = Writer::new(&mut bytes);
        parts.encode(&mut w)?;
        let n = w.len();
        self.put_value(parts.of, b"", &bytes[..n])?;
        let (inode, first) = self.state.directories.change_whole(slot);
        inode.attr.width_log2 = width_log2(parts.as_slice().len());
        inode.attr.ctime = c.now;
        inode.mark_values();
        let entry = inode.entry();
        self.expect_write(first);
        c.effects.inode(entry);
        if !self.state.holds.is_being_created(parts.of) {
            c.effects.widened(parts.of);
        }
        Ok(())
    }

    /// Creates a part of a directory that is becoming wide.
    pub(crate) fn create_part(&mut self, c: &mut Context<'_>, part: &Part<'_>) -> Answer<Inode> {
        let Part::CreatePart { node, of, index, width, like } = *part else { return Err(Code::Invalid) };
        let home = self.shard.node();
        if node != home || of.is_part() {
            return Err(Code::Invalid);
        }
        // Its owner and group are those of the directory, not of the caller.
        let attr = Attr { uid: 0, gid: 0, ..self.attr_of_detached(c, Ino::part, of, 0)? };
        let layout = layout_of_part(like.layout.unwrap_or(Layout::single(of.birth_node(), 0)), of, home);
        let mut inode = Inode { attr, layout, cookie: place_of_part(index, width), marks: 0 };
        like.set.apply(&mut inode.attr, c.now)?;
        self.add_detached(inode)?;
        Ok(inode)
    }

    pub(crate) fn prepare_change(
        &mut self,
        c: &mut Context<'_>,
        tx: TxId,
        ino: Ino,
        change: &Change,
    ) -> Answer<Reply<'static>> {
        let slot = self.directory(ino)?;
        if self.state.holds.forbids(tx, ino, Hold::Changing) {
            return Err(Code::Busy);
        }
        let before = self.state.directories.get(slot).entry();
        let after = changed(before, ino, change, c.now)?;
        match change.layout {
            _ if ino.is_part() => Ok(Reply::Done),
            Some(_) => Ok(Reply::Relaid { ino, layout: before.layout }),
            None => Ok(Reply::Entry(after)),
        }
    }

    pub(crate) fn commit_change(&mut self, c: &mut Context<'_>, ino: Ino, change: &Change) -> Answer<()> {
        let slot = match self.directory(ino) {
            Ok(slot) => slot,
            Err(Code::NotFound) => return Ok(()), // only a peer that breaks the protocol causes this
            Err(code) => return Err(code),
        };
        let after = changed(self.state.directories.get(slot).entry(), ino, change, c.now)?;
        let (inode, first) = self.state.directories.change_whole(slot);
        inode.attr = after.attr;
        inode.layout = after.layout;
        self.expect_write(first);
        c.effects.inode(after);
        Ok(())
    }
}

/// A number of parts in the encoding of attributes.
pub(crate) fn width_log2(parts: usize) -> u8 {
    parts.next_power_of_two().ilog2() as u8
}

/// Checks that a directory may become wide: it must be empty, not wide yet, and no part.
pub(crate) fn check_narrow(directory: &Inode) -> Answer<()> {
    let attr = &directory.attr;
    match () {
        () if attr.ino.is_part() => Err(Code::Invalid),
        () if attr.width_log2 != 0 => Err(Code::Exists),
        () if attr.size != 0 => Err(Code::NotEmpty),
        () => Ok(()),
    }
}

/// The layout of a part, from its directory's layout. If the directory has none, files are on the part's node.
fn layout_of_part(layout: Layout, of: Ino, home: NodeId) -> Layout {
    match layout.is_set(of.birth_node()) {
        true => layout,
        false => Layout::single(home, 0),
    }
}

/// A directory's attributes and layout after a change.
fn changed(
    mut entry: forebay_types::Entry,
    ino: Ino,
    change: &Change,
    now: Timestamp,
) -> Answer<forebay_types::Entry> {
    debug_assert_eq!(entry.attr.ino, ino);
    if let Some(layout) = change.layout {
        if layout.wish().is_some() {
            return Err(Code::Invalid);
        }
        entry.layout = match ino.is_part() {
            true => layout_of_part(layout, entry.attr.parent, entry.attr.home),
            false => layout,
        };
    }
    if change.layout.is_none() || change.set != SetAttr::default() {
        change.set.apply(&mut entry.attr, now)?;
    }
    Ok(entry)
}

/// [`choose_nodes`] for a new directory of this width, or as near as the pool has nodes. Empty if it cannot be wide.
pub(crate) fn nodes_of_new(home: NodeId, pool: &[NodeId], width: u8) -> Vec<NodeId> {
    let others = pool.iter().filter(|node| **node != home).count();
    match u16::from(width).min(others as u16 + 1) {
        0 | 1 => Vec::new(),
        width => choose_nodes(home, pool, width).unwrap_or_default(),
    }
}

/// The nodes over which a directory's entries are distributed: its home, and others of the pool. The list begins with
/// the home, so that narrow directories do not all use the pool's first nodes.
pub(crate) fn choose_nodes(home: NodeId, pool: &[NodeId], width: u16) -> Answer<Vec<NodeId>> {
    let mut all: Vec<NodeId> = pool.iter().copied().chain([home]).collect();
    all.sort_unstable();
    all.dedup();
    let most = forebay_types::limits::WIDTH_MAX;
    let width = if width == 0 { all.len().min(most) } else { usize::from(width) };
    match width {
        1 if all.len() > 1 => return Err(Code::Invalid),
        0 | 1 => return Err(Code::NoDevice),
        _ if width > most => return Err(Code::Invalid),
        _ if width > all.len() => return Err(Code::NoDevice),
        _ => {}
    }
    let first = all.iter().position(|node| *node == home).unwrap_or(0);
    all.rotate_left(first);
    all.truncate(width);
    Ok(all)
}
