//! Changes by which a backing store comes in front: attaching it, importing its names, and the states of a file.
//!
//! | state | flags | leads to |
//! |---|---|---|
//! | released | – | clean: its data were restored |
//! | clean | RESIDENT | dirty: a program marked it; released |
//! | dirty | RESIDENT DIRTY | draining: a mover copies it, under leases that exclude writers |
//! | draining | RESIDENT DIRTY DRAINING | clean: the copy was published; dirty: a program marked it |
//!
//! A mark of a clean or draining file begins a new epoch, and so does a release. A publication names the epoch that was
//! copied, and makes the file clean only if that is its epoch still: so a write during the copy is never lost.
//!
//! A directory whose names are not imported yet is *unlisted*: requests for its entries are refused with
//! [`Code::NotListed`], until the daemon has had them imported. Tests: `tests/backing_store.rs`.

use forebay_types::{
    Attr, Code, Ino, Kind, Layout, Placed, Reader, Reply, SetAttr, StoreObject, StoreVersion, TxId,
    FLAG_ATTACHED, FLAG_DIRTY, FLAG_DRAINING, FLAG_PINNED, FLAG_RESIDENT, FLAG_STORE, FLAG_UNLISTED,
};

use crate::batch::{Answer, Batch, Context};
use crate::keys;
use crate::namespace::Entered;
use crate::page_budget::{Class, Work};
use crate::record::{EntryRecord, Inode, INODE_BYTES_MAX, MARK_VALUES};

/// The extended attribute that has the settings of a directory's store.
pub const STORE_SETTINGS: &[u8] = b"trusted.forebay.store";

impl Batch<'_> {
    pub(crate) fn attach_store(
        &mut self,
        c: &mut Context<'_>,
        ino: Ino,
        listed: bool,
        settings: &[u8],
    ) -> Answer<Reply<'static>> {
        let slot = self.directory(ino)?;
        let attr = self.state.directories.get(slot).attr;
        if attr.width_log2 != 0 || ino.is_part() {
            return Err(Code::NotSupported);
        }
        if attr.flags & FLAG_ATTACHED != 0 {
            return Err(Code::Exists);
        }
        if attr.size != 0 {
            return Err(Code::NotEmpty);
        }
        self.set_xattr(c, ino, STORE_SETTINGS, settings, 0)?;
        self.state.ledger.stores += 1;
        let flags = FLAG_ATTACHED | FLAG_STORE | if listed { FLAG_UNLISTED } else { 0 };
        self.change_flags(c, ino, flags, 0)
    }

    pub(crate) fn detach_store(&mut self, c: &mut Context<'_>, ino: Ino) -> Answer<Reply<'static>> {
        let slot = self.directory(ino)?;
        let attr = self.state.directories.get(slot).attr;
        if attr.flags & FLAG_STORE == 0 {
            return Err(Code::NoAttribute);
        }
        if attr.size != 0 {
            return Err(Code::NotEmpty);
        }
        if self.has_pending(ino)? {
            return Err(Code::Busy);
        }
        self.remove_xattr(c, ino, STORE_SETTINGS)?;
        self.state.ledger.stores = self.state.ledger.stores.saturating_sub(1);
        self.change_flags(c, ino, 0, FLAG_ATTACHED | FLAG_STORE | FLAG_UNLISTED)
    }

    /// Removes an entry from the pool alone. The directory is listed again at its next use, if its store's names appear
    /// in it: so a name that is forgotten is never missing.
    pub(crate) fn forget(
        &mut self,
        c: &mut Context<'_>,
        parent: Ino,
        name: &[u8],
        relist: bool,
        discard: bool,
    ) -> Answer<Reply<'static>> {
        if !discard && self.is_pending(parent, name)? {
            return Err(Code::Busy);
        }
        let slot = match self.directory(parent) {
            // A removed directory whose entries are still to be removed in the store.
            Err(Code::NotFound) => return self.forget_remains(parent, name),
            slot => slot?,
        };
        if self.state.directories.get(slot).attr.flags & FLAG_ATTACHED == 0 {
            return Err(Code::NoAttribute);
        }
        let Some(found) = self.find_entry(slot, name)? else { return self.forget_remains(parent, name) };
        let inode = self.entered_inode(found.ino)?;
        self.check_forgettable(&inode, discard)?;
        let copy = self.copy_of(found.ino)?;
        if let (Some(copy), false) = (&copy, discard) {
            if self.is_pending(copy.parent, &copy.name)? {
                return Err(Code::Busy);
            }
        }
        let removal = Self::removal_work(&inode);
        // Beside what a removal writes: two places, two pending places, a copy, the directory.
        self.admit(Class::Removal, Work { writes: removal.writes + 6, ..removal })?;
        let is_last = inode.attr.is_directory() || inode.attr.nlink == 1;
        let is_copy = copy.as_ref().is_some_and(|copy| copy.parent == parent && copy.name == name);
        // While other names lead to the inode, its copy needs the place.
        if is_last || !is_copy {
            self.drop_place(parent, name)?;
        }
        if let (true, Some(copy)) = (is_last, copy) {
            self.drop_place(copy.parent, &copy.name)?;
            self.tx.delete(&keys::copy(found.ino))?;
        }
        let reply = self.remove_entry(c, slot, &found, name, inode)?;
        if relist {
            self.change_flags(c, parent, FLAG_UNLISTED, 0)?;
        }
        Ok(reply)
    }

    /// Drops what the pool knows of the store at a place to which no entry leads.
    fn forget_remains(&mut self, parent: Ino, name: &[u8]) -> Answer<Reply<'static>> {
        self.admit(Class::Removal, Work::writes(4))?;
        if let Some(placed) = self.placed(parent, name)? {
            // The copy of a directory outlives its inode.
            if self.find_inode(placed.ino)?.is_none() {
                self.tx.delete(&keys::copy(placed.ino))?;
            }
        }
        match self.drop_place(parent, name)? {
            true => Ok(Reply::Done),
            false => Err(Code::NotFound),
        }
    }

    fn check_forgettable(&self, inode: &Inode, discard: bool) -> Answer<()> {
        let Inode { attr, .. } = inode;
        match attr.kind() {
            Kind::Directory if attr.flags & FLAG_STORE != 0 => Err(Code::Busy),
            Kind::Directory if attr.size != 0 => Err(Code::NotEmpty),
            Kind::Directory if attr.width_log2 != 0 => Err(Code::NotSupported),
            Kind::File if attr.nlink == 1 && attr.flags & FLAG_DIRTY != 0 && !discard => Err(Code::Busy),
            _ => Ok(()),
        }
    }

    /// True for a file whose data are in its backing store alone.
    pub fn is_to_be_restored(&self, ino: Ino) -> bool {
        let is_released = |inode: Inode| inode.attr.is_file() && !inode.attr.is_resident();
        self.state.ledger.has_stores() && self.find_inode(ino).ok().flatten().is_some_and(is_released)
    }

    /// Sets and clears flags of an inode.
    fn change_flags(
        &mut self,
        c: &mut Context<'_>,
        ino: Ino,
        set: u32,
        clear: u32,
    ) -> Answer<Reply<'static>> {
        self.admit(Class::Removal, Work::writes(3))?;
        let mut inode = self.inode(ino)?;
        inode.attr.flags = inode.attr.flags & !clear | set;
        self.store_inode(&inode)?;
        c.effects.inode(inode.entry());
        Ok(Reply::Entry(inode.entry()))
    }

    /// Refuses a directory of whose names some are in its store alone.
    #[inline]
    pub(crate) fn check_listed(&mut self, ino: Ino) -> Answer<()> {
        match self.find_inode(ino)? {
            Some(inode) if inode.attr.flags & FLAG_UNLISTED != 0 && inode.attr.is_directory() => {
                self.met_unlisted = Some(ino);
                Err(Code::NotListed)
            }
            _ => Ok(()),
        }
    }

    /// The directory for which the last request was refused with [`Code::NotListed`].
    pub fn take_unlisted(&mut self) -> Option<Ino> {
        self.met_unlisted.take()
    }

    pub(crate) fn import(&mut self, c: &mut Context<'_>, ino: Ino, objects: &[u8]) -> Answer<Reply<'static>> {
        let slot = self.directory(ino)?;
        if self.state.directories.get(slot).attr.flags & FLAG_ATTACHED == 0 {
            return Err(Code::NoAttribute);
        }
        let (mut r, mut list) = (Reader::new(objects), Vec::new());
        while !r.rest().is_empty() {
            list.push(StoreObject::decode(&mut r)?);
        }
        // Entry, inode, place and copy of each, and a link's target; the directory.
        let pieces = list.iter().map(|object| Self::pieces_of(object.target.len())).sum();
        self.admit(Class::Growth, Work { writes: 4 * list.len() as u64 + 2, run: pieces })?;
        let mut count = 0;
        for object in &list {
            count += u64::from(self.import_one(c, slot, ino, object)?);
        }
        Ok(Reply::Count(count))
    }

    fn import_one(
        &mut self,
        c: &mut Context<'_>,
        slot: usize,
        parent: Ino,
        object: &StoreObject<'_>,
    ) -> Answer<bool> {
        let above = self.state.directories.get(slot);
        let (mtime, layout) = (above.attr.mtime, above.layout);
        let (home, kind) = (self.shard.node(), object.kind);
        if self.placed(parent, object.name)?.is_some() {
            return Ok(false); // known: perhaps removed in the pool, and to be removed in the store
        }
        let next = self.state.ledger.next_counter;
        if next >= Ino::MAX_COUNTER {
            return Err(Code::NoSpace);
        }
        let ino = Ino::new(home, next);
        let record = EntryRecord { ino, kind, home, width_log2: 0, link: TxId::NONE, name: object.name };
        let Entered::New(cookie) = self.enter(slot, &record)? else { return Ok(false) };
        let is_directory = kind == Kind::Directory;
        let changed = object.version.mtime;
        let attr = Attr {
            ino,
            size: match kind {
                Kind::File => object.version.bytes,
                Kind::Symlink => object.target.len() as u64,
                _ => 0,
            },
            rdev: if matches!(kind, Kind::CharDevice | Kind::BlockDevice) { object.rdev } else { 0 },
            parent: if is_directory { parent } else { Ino(0) },
            mode: kind.mode_bits() | object.mode,
            uid: object.uid,
            gid: object.gid,
            nlink: if is_directory { 2 } else { 1 },
            flags: FLAG_ATTACHED
                | match kind {
                    Kind::Directory => FLAG_UNLISTED,
                    // A file's data come at its first use. Other kinds have none.
                    Kind::File => 0,
                    _ => FLAG_RESIDENT,
                },
            home,
            width_log2: 0,
            atime: object.atime,
            mtime: changed,
            ctime: changed,
            btime: changed,
        };
        let inode = Inode {
            attr,
            layout: if is_directory { layout } else { Layout::single(home, 0) },
            cookie: if is_directory { cookie } else { 0 },
            marks: if kind == Kind::Symlink { MARK_VALUES } else { 0 },
        };
        let mut buffer = [0; INODE_BYTES_MAX];
        let n = inode.encode(&mut buffer)?;
        self.tx.put(&keys::inode(ino), &buffer[..n])?;
        if kind == Kind::Symlink {
            self.put_value(ino, b"", object.target)?;
        }
        self.put_place(parent, object.name, &Placed { ino, kind, version: object.version })?;
        self.put_copy(ino, parent, object.name, 0)?;
        let ledger = &mut self.state.ledger;
        ledger.next_counter += 1;
        ledger.inodes += 1;
        ledger.entries += 1;
        // The directory has had these entries all along: its times stay.
        let unchanged = Context { caller: c.caller, now: mtime, effects: c.effects };
        self.touch_directory(&mut { unchanged }, slot, 1, i64::from(is_directory));
        Ok(true)
    }

    pub(crate) fn listed(&mut self, c: &mut Context<'_>, ino: Ino) -> Answer<Reply<'static>> {
        self.directory(ino)?;
        self.change_flags(c, ino, 0, FLAG_UNLISTED)
    }

    /// A file of an attached tree.
    fn attached_file(&mut self, ino: Ino) -> Answer<Inode> {
        let inode = self.inode(ino)?;
        match inode.attr.kind() {
            Kind::File if inode.attr.flags & FLAG_ATTACHED != 0 => Ok(inode),
            Kind::Directory => Err(Code::IsDirectory),
            _ => Err(Code::Invalid),
        }
    }

    pub(crate) fn restored(&mut self, c: &mut Context<'_>, ino: Ino, epoch: u64) -> Answer<Reply<'static>> {
        let inode = self.attached_file(ino)?;
        if inode.attr.epoch() != epoch || inode.attr.is_resident() {
            return Err(Code::Stale);
        }
        self.change_flags(c, ino, FLAG_RESIDENT, FLAG_DIRTY | FLAG_DRAINING)
    }

    pub(crate) fn begin_drain(&mut self, c: &mut Context<'_>, ino: Ino) -> Answer<Reply<'static>> {
        let inode = self.attached_file(ino)?;
        if !inode.attr.is_resident() {
            return Err(Code::Stale);
        }
        self.change_flags(c, ino, FLAG_DRAINING | FLAG_DIRTY, 0)
    }

    #[allow(clippy::too_many_arguments)]
    pub(crate) fn published(
        &mut self,
        c: &mut Context<'_>,
        parent: Ino,
        name: &[u8],
        ino: Ino,
        epoch: u64,
        seen: u64,
        version: StoreVersion,
    ) -> Answer<Reply<'static>> {
        // Place, copy, inode, pending, kept reply, ledger.
        self.admit(Class::Change, Work::writes(6))?;
        let Some(mut inode) = self.find_inode(ino)? else {
            // It was removed meanwhile: what was published is to be removed.
            let kind = self.placed(parent, name)?.map_or(Kind::File, |placed| placed.kind);
            self.put_place(parent, name, &Placed { ino, kind, version })?;
            return Ok(Reply::Done);
        };
        let kind = inode.attr.kind();
        self.put_place(parent, name, &Placed { ino, kind, version })?;
        let is_data = kind == Kind::File;
        let copied = is_data && epoch == inode.attr.epoch();
        if !is_data || copied || self.copy_of(ino)?.is_none() {
            self.put_copy(ino, parent, name, epoch)?;
        }
        if copied && inode.attr.flags & FLAG_DRAINING != 0 {
            inode.attr.flags &= !(FLAG_DIRTY | FLAG_DRAINING);
            self.store_inode(&inode)?;
            c.effects.inode(inode.entry());
        }
        let slot = self.directory(parent);
        let leads_there = match slot {
            Ok(slot) => self.find_entry(slot, name)?.is_some_and(|found| found.ino == ino),
            Err(_) => false,
        };
        // A dirty file stays pending, even if nothing has changed since the mover looked.
        let seen = if leads_there && inode.attr.flags & FLAG_DIRTY == 0 { seen } else { u64::MAX };
        self.settle_place(parent, name, seen)
    }

    pub(crate) fn unpublished(&mut self, parent: Ino, name: &[u8], seen: u64) -> Answer<Reply<'static>> {
        self.admit(Class::Removal, Work::writes(5))?;
        if let Some(placed) = self.placed(parent, name)? {
            let is_copy =
                self.copy_of(placed.ino)?.is_some_and(|copy| copy.parent == parent && copy.name == name);
            let inode = self.find_inode(placed.ino)?;
            if is_copy {
                if inode.is_some_and(|inode| inode.attr.is_file() && !inode.attr.is_resident()) {
                    return Err(Code::Busy);
                }
                self.tx.delete(&keys::copy(placed.ino))?;
            }
            self.tx.delete(keys::place(parent, name).bytes())?;
        }
        self.settle_place(parent, name, seen)
    }

    pub(crate) fn settled(&mut self, parent: Ino, name: &[u8], seen: u64) -> Answer<Reply<'static>> {
        self.admit(Class::Removal, Work::writes(3))?;
        self.settle_place(parent, name, seen)
    }

    pub(crate) fn moved(
        &mut self,
        parent: Ino,
        name: &[u8],
        new_parent: Ino,
        new_name: &[u8],
        version: StoreVersion,
    ) -> Answer<Reply<'static>> {
        self.admit(Class::Change, Work::writes(6))?;
        let placed = self.placed(parent, name)?.ok_or(Code::NotFound)?;
        self.tx.delete(keys::place(parent, name).bytes())?;
        self.put_place(new_parent, new_name, &Placed { version, ..placed })?;
        if let Some(copy) = self.copy_of(placed.ino)? {
            if copy.parent == parent && copy.name == name {
                self.put_copy(placed.ino, new_parent, new_name, copy.epoch)?;
            }
        }
        Ok(Reply::Done)
    }

    pub(crate) fn release(
        &mut self,
        c: &mut Context<'_>,
        ino: Ino,
        epoch: u64,
        set: &SetAttr,
    ) -> Answer<Reply<'static>> {
        let mut inode = self.attached_file(ino)?;
        let is_clean = inode.attr.flags & (FLAG_RESIDENT | FLAG_DIRTY | FLAG_DRAINING) == FLAG_RESIDENT;
        let has_copy = self.copy_of(ino)?.is_some_and(|copy| copy.epoch == epoch);
        if inode.attr.epoch() != epoch || !is_clean || !has_copy {
            return Err(Code::Stale);
        }
        if inode.attr.flags & FLAG_PINNED != 0 {
            return Err(Code::Busy);
        }
        let ctime = inode.attr.ctime;
        set.apply(&mut inode.attr, c.now)?;
        inode.attr.ctime = ctime;
        inode.attr.next_epoch();
        self.admit(Class::Removal, Work::writes(4))?;
        let copy = self.copy_of(ino)?.ok_or(Code::Corrupt)?;
        if self.is_pending(copy.parent, &copy.name)? {
            return Err(Code::Busy); // new attributes, which the store does not have yet
        }
        self.put_copy(ino, copy.parent, &copy.name, inode.attr.epoch())?;
        inode.attr.flags &= !FLAG_RESIDENT;
        if !inode.layout.is_single() {
            // It is restored into one backing file.
            inode.layout = Layout::single(self.shard.node(), 0);
        }
        self.store_inode(&inode)?;
        c.effects.inode(inode.entry());
        Ok(Reply::Entry(inode.entry()))
    }

    pub(crate) fn pin(&mut self, c: &mut Context<'_>, ino: Ino, pinned: bool) -> Answer<Reply<'static>> {
        let inode = self.inode(ino)?;
        if inode.attr.flags & FLAG_ATTACHED == 0 {
            return Err(Code::NoAttribute);
        }
        let (set, clear) = if pinned { (FLAG_PINNED, 0) } else { (0, FLAG_PINNED) };
        self.change_flags(c, ino, set, clear)
    }

    /// Marks a file dirty: a program is about to get a descriptor that can write.
    pub(crate) fn mark_dirty(&mut self, c: &mut Context<'_>, ino: Ino) -> Answer<Reply<'static>> {
        let mut inode = self.inode(ino)?;
        match inode.attr.kind() {
            Kind::File => {}
            Kind::Directory => return Err(Code::IsDirectory),
            _ => return Err(Code::Invalid),
        }
        // A file that was released is opened anew: the client sees in the reply that it is not resident.
        if inode.attr.needs_mark() && inode.attr.is_resident() {
            self.admit(Class::Removal, Work::writes(3))?;
            if inode.attr.flags & FLAG_ATTACHED != 0 {
                inode.attr.next_epoch();
                self.note_inode(c.now, ino)?;
            }
            inode.attr.flags = inode.attr.flags & !FLAG_DRAINING | FLAG_DIRTY;
            self.store_inode(&inode)?;
        }
        c.effects.inode(inode.entry());
        Ok(Reply::Entry(inode.entry()))
    }
}
