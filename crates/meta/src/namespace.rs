//! Entries and inodes: look-up, create, link, remove, list.
//!
//! Invariants after every request: every entry leads to an inode; an inode's link count is the number of entries that
//! lead to it (for a directory: 2, and one for each directory in it); a directory's size is the number of its entries.
//! A change of entries sets the directory's mtime and ctime; a change of links sets the inode's ctime.

use forebay_types::limits::{COLLISIONS_MAX, LINKS_MAX, NAME_MAX};
use forebay_types::{
    node_of, Attr, Code, Cookie, DirEntries, DirEntry, DirWriter, Ino, Kind, Layout, NodeId, Reply, Request,
    SetAttr, TxId, DISCRIMINATOR_BITS, FLAGS_INHERITED, FLAG_ATTACHED, FLAG_DIRTY, FLAG_RESIDENT, FLAG_STORE,
    FLAG_UNLISTED, REPLY_HEADER_BYTES,
};

use crate::batch::{Answer, Batch, Context};
use crate::foreign_links::Notification;
use crate::keys;
use crate::page_budget::{Class, Work};
use crate::record::{EntryRecord, Inode, ENTRY_HEADER_BYTES, INODE_BYTES_MAX, MARK_COLLISIONS, MARK_VALUES};

pub(crate) const S_ISGID: u32 = 0o2000;

/// An entry that was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Found {
    /// Its position in the directory.
    pub(crate) cookie: Cookie,
    /// Its inode.
    pub(crate) ino: Ino,
    /// The inode's kind.
    pub(crate) kind: Kind,
    /// A directory's home; for other kinds the node that owns the inode.
    pub(crate) home: NodeId,
    /// A directory's width as a power of two.
    pub(crate) width_log2: u8,
    /// The link under which the inode's node counts the entry, if it leads to a file of another node.
    pub(crate) link: TxId,
}

impl Found {
    /// The record of an entry under `name` that leads to the same inode.
    pub(crate) fn record<'n>(&self, name: &'n [u8]) -> EntryRecord<'n> {
        let Found { ino, kind, home, width_log2, link, .. } = *self;
        EntryRecord { ino, kind, home, width_log2, link, name }
    }
}

/// The result of [`Batch::enter`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Entered {
    /// The entry was created, with this cookie.
    New(Cookie),
    /// The name exists already, with this entry.
    Taken(Found),
}

/// The result of [`Batch::create_inode`].
#[allow(clippy::large_enum_variant)] // Not boxed: every create takes this path.
enum CreateOutcome {
    New(Inode),
    Taken(Found),
}

fn found(cookie: Cookie, record: &EntryRecord<'_>) -> Found {
    let EntryRecord { ino, kind, home, width_log2, link, .. } = *record;
    Found { cookie, ino, kind, home, width_log2, link }
}

impl Batch<'_> {
    /// The entry of a name in a directory in memory.
    #[inline]
    pub(crate) fn find_entry(&self, slot: usize, name: &[u8]) -> Answer<Option<Found>> {
        let directory = self.state.directories.get(slot);
        let (parent, hash) = (directory.attr.ino, (self.shard.hash)(name));
        if directory.marks & MARK_COLLISIONS != 0 {
            return Ok(self.probe(parent, hash, name)?.0);
        }
        let cookie = hash << DISCRIMINATOR_BITS;
        let Some(bytes) = self.tx.get(&keys::entry(parent, cookie))? else { return Ok(None) };
        let record = EntryRecord::decode(bytes)?;
        Ok((record.name == name).then(|| found(cookie, &record)))
    }

    /// Walks all entries of one hash. Returns the entry of this name, and the set of discriminators in use.
    fn probe(&self, parent: Ino, hash: u64, name: &[u8]) -> Answer<(Option<Found>, u128)> {
        let (first, last) = keys::entries_of_hash(parent, hash);
        let (mut hit, mut used) = (None, 0);
        for item in self.tx.range(&first, &last)? {
            let (key, bytes) = item?;
            let Some(keys::Key::Entry(_, cookie)) = keys::decode(key) else { return Err(Code::Corrupt) };
            let record = EntryRecord::decode(bytes)?;
            used |= 1u128 << (cookie & COLLISIONS_MAX as u64);
            if record.name == name {
                hit = Some(found(cookie, &record));
            }
        }
        Ok((hit, used))
    }

    /// Creates an entry unless the name exists. Does not change the directory's counts: the caller does.
    pub(crate) fn enter(&mut self, slot: usize, record: &EntryRecord<'_>) -> Answer<Entered> {
        let directory = self.state.directories.get(slot);
        let (parent, marks) = (directory.attr.ino, directory.marks);
        let hash = (self.shard.hash)(record.name);
        let mut buffer = [0; ENTRY_HEADER_BYTES + NAME_MAX];
        let n = record.encode(&mut buffer)?;
        let first = hash << DISCRIMINATOR_BITS;
        if marks & MARK_COLLISIONS == 0 && self.tx.insert(&keys::entry(parent, first), &buffer[..n])? {
            return Ok(Entered::New(first));
        }
        let (hit, used) = self.probe(parent, hash, record.name)?;
        if let Some(found) = hit {
            return Ok(Entered::Taken(found));
        }
        let discriminator = used.trailing_ones() as u64;
        if discriminator > COLLISIONS_MAX as u64 {
            return Err(Code::NoSpace);
        }
        if discriminator > 0 && marks & MARK_COLLISIONS == 0 {
            let (inode, first) = self.state.directories.change_whole(slot);
            inode.marks |= MARK_COLLISIONS;
            self.expect_write(first);
        }
        self.tx.put(&keys::entry(parent, first | discriminator), &buffer[..n])?;
        Ok(Entered::New(first | discriminator))
    }

    pub(crate) fn lookup(&mut self, c: &mut Context<'_>, parent: Ino, name: &[u8]) -> Answer<Reply<'static>> {
        let slot = self.entries_for(parent, name)?;
        let Some(found) = self.find_entry(slot, name)? else {
            let above = self.state.directories.get(slot);
            if above.attr.flags & FLAG_UNLISTED != 0 {
                // The board publishes no absence in a directory of which it knows that it is unlisted: an import does not
                // report each name.
                c.effects.inode(above.entry());
            }
            c.effects.name(parent, name, None);
            return Err(Code::NotFound);
        };
        if !self.is_ours(found.ino) {
            return Ok(Reply::Elsewhere { ino: found.ino, kind: found.kind });
        }
        let entry = self.entered_inode(found.ino)?.entry();
        c.effects.name(parent, name, Some((found.ino, found.kind)));
        c.effects.inode(entry);
        Ok(Reply::Entry(entry))
    }

    /// Attributes of a new inode in a directory; its number is set later.
    fn attr_of_new(&self, c: &Context<'_>, slot: usize, mode: u32) -> Attr {
        let parent = &self.state.directories.get(slot).attr;
        let directory = mode & 0o170_000 == Kind::Directory.mode_bits();
        let inherits = parent.mode & S_ISGID != 0;
        Attr {
            ino: Ino(0),
            size: 0,
            rdev: 0,
            parent: if directory { parent.ino } else { Ino(0) },
            mode: if directory && inherits { mode | S_ISGID } else { mode },
            uid: c.caller.uid,
            gid: if inherits { parent.gid } else { c.caller.gid },
            nlink: if directory { 2 } else { 1 },
            flags: parent.flags & FLAGS_INHERITED,
            home: self.shard.node(),
            width_log2: 0,
            atime: c.now,
            mtime: c.now,
            ctime: c.now,
            btime: c.now,
        }
    }

    /// Gives a new inode a number, a record and its first entry, unless the name exists. `extra` is the number of
    /// further records that the caller will write for it.
    fn create_inode(
        &mut self,
        c: &mut Context<'_>,
        slot: usize,
        name: &[u8],
        inode: Inode,
        extra: u64,
    ) -> Answer<CreateOutcome> {
        self.create_inode_as(c, slot, name, inode, extra, None)
    }

    /// [`Batch::create_inode`] with the inode's number, if the request has a reserved one.
    fn create_inode_as(
        &mut self,
        c: &mut Context<'_>,
        slot: usize,
        name: &[u8],
        mut inode: Inode,
        extra: u64,
        number: Option<Ino>,
    ) -> Answer<CreateOutcome> {
        // Entry, inode, kept reply, ledger.
        if let Err(code) = self.admit(Class::Growth, Work { writes: 4, run: extra }) {
            return self.find_entry(slot, name)?.map(CreateOutcome::Taken).ok_or(code);
        }
        let next = self.state.ledger.next_counter;
        // The request may reserve one more number.
        if next >= Ino::MAX_COUNTER {
            return Err(Code::NoSpace);
        }
        let ino = number.unwrap_or(Ino::new(self.shard.node(), next));
        if number.is_some() {
            let was_counted = ino.birth_node() == self.shard.node() && ino.counter() < next;
            if !was_counted || self.find_inode(ino)?.is_some() {
                return Err(Code::Stale);
            }
        }
        let directory = inode.attr.is_directory();
        if directory && self.state.directories.get(slot).attr.nlink >= LINKS_MAX {
            return self.find_entry(slot, name)?.map(CreateOutcome::Taken).ok_or(Code::TooManyLinks);
        }
        let kind = inode.attr.kind();
        let record = EntryRecord { ino, kind, home: inode.attr.home, width_log2: 0, link: TxId::NONE, name };
        let cookie = match self.enter(slot, &record)? {
            Entered::New(cookie) => cookie,
            Entered::Taken(found) => return Ok(CreateOutcome::Taken(found)),
        };
        inode.attr.ino = ino;
        inode.cookie = if directory { cookie } else { 0 };
        let mut buffer = [0; INODE_BYTES_MAX];
        let n = inode.encode(&mut buffer)?;
        self.tx.put(&keys::inode(ino), &buffer[..n])?;
        let ledger = &mut self.state.ledger;
        ledger.next_counter += u64::from(number.is_none());
        ledger.inodes += 1;
        ledger.entries += 1;
        let parent = self.state.directories.get(slot).attr.ino;
        c.effects.name(parent, name, Some((ino, kind)));
        c.effects.inode(inode.entry());
        self.touch_directory(c, slot, 1, directory as i64);
        Ok(CreateOutcome::New(inode))
    }

    /// Reserves the next inode number.
    pub(crate) fn reserve(&mut self) -> Answer<Reply<'static>> {
        // The kept reply, ledger.
        self.admit(Class::Growth, Work::writes(2))?;
        let next = self.state.ledger.next_counter;
        if next >= Ino::MAX_COUNTER {
            return Err(Code::NoSpace);
        }
        self.state.ledger.next_counter += 1;
        self.write_ledger()?;
        self.count_writes()?;
        Ok(Reply::Number(Ino::new(self.shard.node(), next)))
    }

    /// Executes a `Create`; [`Code::Invalid`] for any other request.
    pub(crate) fn create(&mut self, c: &mut Context<'_>, request: &Request<'_>) -> Answer<Reply<'static>> {
        let Request::Create { parent, name, mode, exclusive, dirty, layout, number, reserve } = *request
        else {
            return Err(Code::Invalid);
        };
        let slot = self.entries_for(parent, name)?;
        let mut attr = self.attr_of_new(c, slot, Kind::File.mode_bits() | mode);
        // A file that no store has differs from what the store has.
        let dirty = dirty || attr.flags & FLAG_ATTACHED != 0;
        attr.flags |= FLAG_RESIDENT | if dirty { FLAG_DIRTY } else { 0 };
        let layout = match layout {
            None => Layout::single(attr.home, 0),
            Some(layout) => match layout.wish() {
                None if layout.is_placed() => layout,
                None => return Err(Code::Invalid),
                Some(target) => {
                    let above = &self.state.directories.get(slot);
                    if above.layout.is_set(above.attr.home) && self.find_entry(slot, name)?.is_none() {
                        let above = above.entry();
                        c.effects.inode(above);
                        return Ok(Reply::Entry(above));
                    }
                    Layout::single(node_of(target), target as u16)
                }
            },
        };
        match self.create_inode_as(c, slot, name, Inode { attr, layout, cookie: 0, marks: 0 }, 0, number)? {
            CreateOutcome::New(inode) => {
                let next = reserve.then(|| Ino::new(self.shard.node(), self.state.ledger.next_counter));
                self.state.ledger.next_counter += u64::from(reserve);
                Ok(Reply::Created { entry: inode.entry(), created: true, next })
            }
            CreateOutcome::Taken(_) if exclusive => Err(Code::Exists),
            CreateOutcome::Taken(found) if found.kind == Kind::Directory && !self.is_ours(found.ino) => {
                Err(Code::IsDirectory)
            }
            CreateOutcome::Taken(found) if !self.is_ours(found.ino) => {
                Ok(Reply::Elsewhere { ino: found.ino, kind: found.kind })
            }
            CreateOutcome::Taken(found) => {
                let entry = self.entered_inode(found.ino)?.entry();
                c.effects.name(parent, name, Some((found.ino, found.kind)));
                c.effects.inode(entry);
                Ok(Reply::Created { entry, created: false, next: None })
            }
        }
    }

    pub(crate) fn make_node(
        &mut self,
        c: &mut Context<'_>,
        parent: Ino,
        name: &[u8],
        mode: u32,
        rdev: u64,
    ) -> Answer<Reply<'static>> {
        let slot = self.entries_for(parent, name)?;
        let mut attr = self.attr_of_new(c, slot, mode);
        match attr.kind() {
            Kind::CharDevice | Kind::BlockDevice => attr.rdev = rdev,
            Kind::Fifo | Kind::Socket => {}
            _ => return Err(Code::Invalid),
        }
        let layout = Layout::single(attr.home, 0);
        match self.create_inode(c, slot, name, Inode { attr, layout, cookie: 0, marks: 0 }, 0)? {
            CreateOutcome::New(inode) => Ok(Reply::Entry(inode.entry())),
            CreateOutcome::Taken(_) => Err(Code::Exists),
        }
    }

    pub(crate) fn make_directory(
        &mut self,
        c: &mut Context<'_>,
        parent: Ino,
        name: &[u8],
        mode: u32,
    ) -> Answer<Reply<'static>> {
        let slot = self.entries_for(parent, name)?;
        let mut attr = self.attr_of_new(c, slot, Kind::Directory.mode_bits() | mode);
        let above = self.state.directories.get(slot);
        let layout = above.layout;
        let width = Some(above.attr.width_of_new()).filter(|width| *width != 0);
        if width.is_some() {
            // With several nodes the directory becomes wide by a plan (coordinator.rs).
            SetAttr { width_of_new: width, ..SetAttr::default() }.apply(&mut attr, c.now)?;
        }
        match self.create_inode(c, slot, name, Inode { attr, layout, cookie: 0, marks: 0 }, 0)? {
            CreateOutcome::New(inode) => {
                self.state.directories.insert(inode);
                self.state.directories.note_untouched(inode.attr.ino, true);
                Ok(Reply::Entry(inode.entry()))
            }
            CreateOutcome::Taken(_) => Err(Code::Exists),
        }
    }

    pub(crate) fn symlink(
        &mut self,
        c: &mut Context<'_>,
        parent: Ino,
        name: &[u8],
        target: &[u8],
    ) -> Answer<Reply<'static>> {
        let slot = self.entries_for(parent, name)?;
        let mut attr = self.attr_of_new(c, slot, Kind::Symlink.mode_bits() | 0o777);
        attr.size = target.len() as u64;
        let layout = Layout::single(attr.home, 0);
        let pieces = Self::pieces_of(target.len());
        let mut inode = Inode { attr, layout, cookie: 0, marks: 0 };
        inode.mark_values();
        match self.create_inode(c, slot, name, inode, pieces)? {
            CreateOutcome::New(inode) => {
                self.put_value(inode.attr.ino, b"", target)?;
                Ok(Reply::Entry(inode.entry()))
            }
            CreateOutcome::Taken(_) => Err(Code::Exists),
        }
    }

    pub(crate) fn link(
        &mut self,
        c: &mut Context<'_>,
        ino: Ino,
        parent: Ino,
        name: &[u8],
    ) -> Answer<Reply<'static>> {
        if !self.is_ours(ino) {
            return Err(Code::CrossDevice); // in a pool of several nodes it is planned
        }
        // The part is checked first, as in all requests that name a directory: a retry must be led to the part that
        // keeps its reply, whatever has happened to the inode meanwhile.
        let slot = self.entries_for(parent, name)?;
        let mut inode = self.inode(ino)?;
        if !self.is_of_store(&inode, parent)? {
            return Err(Code::CrossDevice);
        }
        if inode.attr.is_directory() || inode.attr.nlink >= LINKS_MAX {
            let refusal = if inode.attr.is_directory() { Code::NotPermitted } else { Code::TooManyLinks };
            return Err(self.find_entry(slot, name)?.map_or(refusal, |_| Code::Exists));
        }
        if let Err(code) = self.admit(Class::Growth, Work::writes(4)) {
            return Err(self.find_entry(slot, name)?.map_or(code, |_| Code::Exists));
        }
        let kind = inode.attr.kind();
        let record = EntryRecord { ino, kind, home: inode.attr.home, width_log2: 0, link: TxId::NONE, name };
        if let Entered::Taken(_) = self.enter(slot, &record)? {
            return Err(Code::Exists);
        }
        inode.attr.nlink += 1;
        inode.attr.ctime = c.now;
        self.store_inode(&inode)?;
        self.state.ledger.entries += 1;
        c.effects.name(parent, name, Some((ino, kind)));
        c.effects.inode(inode.entry());
        self.touch_directory(c, slot, 1, 0);
        Ok(Reply::Entry(inode.entry()))
    }

    /// Drops one link of an inode that is no directory. With the last link it removes the inode, which becomes an
    /// orphan if a target has something of it. Returns whether the link was the last.
    pub(crate) fn drop_link(&mut self, c: &mut Context<'_>, inode: &mut Inode) -> Answer<bool> {
        inode.attr.nlink = inode.attr.nlink.saturating_sub(1);
        inode.attr.ctime = c.now;
        if inode.attr.nlink > 0 {
            self.store_inode(inode)?;
            c.effects.inode(inode.entry());
            return Ok(false);
        }
        self.remove_inode(c, inode)?;
        self.forget_copy(inode)?;
        if inode.attr.kind().has_backing() {
            self.add_orphan(inode.attr.ino, &inode.layout);
            c.effects.orphan(inode.attr.ino, inode.layout);
        }
        Ok(true)
    }

    /// Drops the link of a removed entry that did not lead to a directory: here, or by a debt to the inode's node.
    /// Returns the layout, and whether the link is known to be the last.
    pub(crate) fn lose_entry(
        &mut self,
        c: &mut Context<'_>,
        found: &Found,
        inode: Option<Inode>,
    ) -> Answer<(bool, Layout)> {
        match inode {
            Some(mut inode) => Ok((self.drop_link(c, &mut inode)?, inode.layout)),
            None => {
                self.add_debt(c, found.ino, found.link, Notification::Link)?;
                Ok((false, Layout::single(found.ino.birth_node(), 0)))
            }
        }
    }

    /// Removes an inode's record and values.
    pub(crate) fn remove_inode(&mut self, c: &mut Context<'_>, inode: &Inode) -> Answer<()> {
        let ino = inode.attr.ino;
        if !self.tx.delete(&keys::inode(ino))? {
            return Err(Code::Corrupt);
        }
        if inode.marks & MARK_VALUES != 0 {
            self.remove_values(ino)?;
        }
        self.state.ledger.inodes = self.state.ledger.inodes.saturating_sub(1);
        c.effects.gone(ino);
        Ok(())
    }

    /// The largest work of removing the last link of an inode.
    pub(crate) fn removal_work(inode: &Inode) -> Work {
        // Entry, inode, orphan, kept reply, ledger; all pieces of its values.
        Work { writes: 5, run: if inode.marks & MARK_VALUES != 0 { u64::MAX / 4 } else { 0 } }
    }

    pub(crate) fn unlink(&mut self, c: &mut Context<'_>, parent: Ino, name: &[u8]) -> Answer<Reply<'static>> {
        let slot = self.entries_for(parent, name)?;
        let found = self.find_entry(slot, name)?.ok_or(Code::NotFound)?;
        if found.kind == Kind::Directory {
            return Err(Code::IsDirectory);
        }
        let inode = match self.is_ours(found.ino) {
            true => Some(self.entered_inode(found.ino)?),
            false => None,
        };
        let work = inode.as_ref().map_or(Work::writes(5), Self::removal_work);
        self.admit(Class::Removal, work)?;
        self.tx.delete(&keys::entry(parent, found.cookie))?;
        self.state.ledger.entries = self.state.ledger.entries.saturating_sub(1);
        c.effects.name(parent, name, None);
        let (last, layout) = self.lose_entry(c, &found, inode)?;
        self.touch_directory(c, slot, -1, 0);
        Ok(Reply::Removed { ino: found.ino, last, kind: found.kind, layout })
    }

    pub(crate) fn remove_directory(
        &mut self,
        c: &mut Context<'_>,
        parent: Ino,
        name: &[u8],
    ) -> Answer<Reply<'static>> {
        let slot = self.entries_for(parent, name)?;
        let found = self.find_entry(slot, name)?.ok_or(Code::NotFound)?;
        if found.kind != Kind::Directory {
            return Err(Code::NotDirectory);
        }
        if !self.is_ours(found.ino) {
            return Err(Code::CrossDevice); // in a pool of several nodes it is planned
        }
        let inode = self.entered_inode(found.ino)?;
        if inode.attr.width_log2 != 0 {
            return Err(Code::CrossDevice); // likewise
        }
        if inode.attr.flags & FLAG_STORE != 0 {
            return Err(Code::Busy); // like a mount point
        }
        self.check_listed(found.ino)?;
        if inode.attr.size != 0 {
            return Err(Code::NotEmpty);
        }
        self.admit(Class::Removal, Self::removal_work(&inode))?;
        self.remove_entry(c, slot, &found, name, inode)
    }

    /// Removes an entry that leads to an inode of this node, which was admitted, and was checked if it is a directory.
    pub(crate) fn remove_entry(
        &mut self,
        c: &mut Context<'_>,
        slot: usize,
        found: &Found,
        name: &[u8],
        inode: Inode,
    ) -> Answer<Reply<'static>> {
        let parent = self.state.directories.get(slot).attr.ino;
        self.tx.delete(&keys::entry(parent, found.cookie))?;
        self.state.ledger.entries = self.state.ledger.entries.saturating_sub(1);
        c.effects.name(parent, name, None);
        let (last, layout) = match found.kind {
            Kind::Directory => {
                self.remove_inode(c, &inode)?;
                self.state.directories.remove(found.ino);
                (true, inode.layout)
            }
            _ => self.lose_entry(c, found, Some(inode))?,
        };
        self.touch_directory(c, slot, -1, if found.kind == Kind::Directory { -1 } else { 0 });
        Ok(Reply::Removed { ino: found.ino, last, kind: found.kind, layout })
    }

    pub(crate) fn read_directory<'o>(
        &mut self,
        ino: Ino,
        cookie: Cookie,
        attributes: bool,
        payload: &'o mut [u8],
    ) -> Answer<Reply<'o>> {
        self.entries_of(ino)?;
        self.entries_behind(ino, cookie, attributes, payload)
    }

    /// The entries of a directory that has its own behind a cookie.
    pub(crate) fn entries_behind<'o>(
        &self,
        ino: Ino,
        cookie: Cookie,
        attributes: bool,
        payload: &'o mut [u8],
    ) -> Answer<Reply<'o>> {
        let end = payload.len().min(forebay_types::limits::READDIR_REPLY_BYTES - REPLY_HEADER_BYTES);
        let mut writer = DirWriter::new(&mut payload[..end]);
        let mut complete = true;
        let (first, last) = (keys::entry(ino, cookie + 1), keys::entry(ino, u64::MAX));
        for item in self.tx.range(&first, &last)? {
            let (key, bytes) = item?;
            let Some(keys::Key::Entry(_, cookie)) = keys::decode(key) else { return Err(Code::Corrupt) };
            let record = EntryRecord::decode(bytes)?;
            let attr = match attributes {
                true if self.is_ours(record.ino) => Some(self.entered_inode(record.ino)?.attr),
                _ => None,
            };
            let entry = DirEntry { cookie, ino: record.ino, kind: record.kind, name: record.name, attr };
            if !writer.push(&entry) {
                complete = false;
                break;
            }
        }
        let written = writer.len();
        Ok(Reply::Entries(DirEntries { bytes: &payload[..written], end: complete }))
    }
}
