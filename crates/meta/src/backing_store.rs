//! Changes by which a backing store comes in front: attaching it, and the states of a file.
//!
//! | state | flags | leads to |
//! |---|---|---|
//! | released | – | clean: its data were restored |
//! | clean | RESIDENT | dirty: a program marked it; released |
//! | dirty | RESIDENT DIRTY | draining: a mover copies it, under leases that exclude writers |
//! | draining | RESIDENT DIRTY DRAINING | clean: the copy was published; dirty: a program marked it |
//!
//! A mark of a clean or draining file begins a new epoch, and so does a release. A publication names the epoch that was
//! copied, and makes the file clean only if that is its epoch still: so a write during the copy is never lost. A released
//! file that takes over another program's version begins a new epoch, too: a restore that has read the version before is
//! void.
//!
//! A directory whose names are not imported yet is *unlisted*: requests for its entries are refused with
//! [`Code::NotListed`], until the daemon has had them imported: the one name that a request needs (`unlisted.rs`), or all
//! of them for a listing and to tell whether the directory is empty. Tests: `tests/backing_store`.

use forebay_types::{
    Code, Ino, Kind, Layout, NodeId, Placed, Reply, SetAttr, StorePlace, StoreVersion, Timestamp, TxId,
    CHANGES_ALL, EPOCH_UNKNOWN, FLAGS_INHERITED, FLAG_ATTACHED, FLAG_CLOSE_WAITS, FLAG_DIRTY, FLAG_DRAINING,
    FLAG_FSYNC_WAITS, FLAG_PINNED, FLAG_RESIDENT, FLAG_STORE, FLAG_UNLISTED,
};

use crate::batch::{Answer, Batch, Context, Unlisted, PAYLOAD_BYTES_MAX};
use crate::copies::Copy;
use crate::holds::Hold;
use crate::keys;
use crate::page_budget::{Class, Work};
use crate::record::Inode;

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
        // A cross-node transaction may be about to create an entry.
        if attr.size != 0 || self.state.holds.forbids(TxId::NONE, ino, Hold::Condemned) {
            return Err(Code::NotEmpty);
        }
        self.set_xattr(c, ino, STORE_SETTINGS, settings, 0)?;
        self.state.ledger.stores += 1;
        let flags = FLAG_ATTACHED | FLAG_STORE | if listed { FLAG_UNLISTED } else { 0 };
        self.change_flags(c, ino, flags, 0)
    }

    pub(crate) fn wait_for_store(
        &mut self,
        c: &mut Context<'_>,
        ino: Ino,
        fsync: bool,
        close: bool,
    ) -> Answer<Reply<'static>> {
        let slot = self.directory(ino)?;
        let attr = self.state.directories.get(slot).attr;
        if attr.flags & FLAG_STORE == 0 {
            return Err(Code::NoAttribute);
        }
        if attr.size != 0 {
            return Err(Code::NotEmpty);
        }
        let bits = |is: bool, bit: u32| if is { bit } else { 0 };
        let set = bits(fsync, FLAG_FSYNC_WAITS) | bits(close, FLAG_CLOSE_WAITS);
        self.change_flags(c, ino, set, (FLAG_FSYNC_WAITS | FLAG_CLOSE_WAITS) & !set)
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
        self.change_flags(c, ino, 0, FLAGS_INHERITED | FLAG_STORE | FLAG_UNLISTED)
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
        // Beside what a removal writes: places, pending places and copies of all names, a linked file, the directory.
        let removal = Self::removal_work(&inode);
        let names = u64::from(inode.attr.nlink.max(1));
        self.admit(Class::Removal, Work { writes: removal.writes + 4 * names + 5, ..removal })?;
        let is_last = inode.attr.is_directory() || inode.attr.nlink == 1;
        match self.placed(parent, name)? {
            Some(placed) if is_last => self.forget_linked_file(parent, found.ino, &placed.version)?,
            Some(placed) if relist => self.expect_name_again(parent, &placed)?,
            _ => {}
        }
        let at = if is_last { None } else { Some((parent, name)) };
        self.forget_places_of(found.ino, at, discard)?;
        self.drop_place(parent, name)?;
        self.state.absences.forget(parent, name);
        let reply = self.remove_entry(c, slot, &found, name, inode)?;
        if relist {
            // A listing that is under way may have imported the name already.
            let mut directory = self.inode(parent)?;
            directory.attr.next_epoch();
            self.store_inode(&directory)?;
            self.change_flags(c, parent, FLAG_UNLISTED, 0)?;
        }
        Ok(reply)
    }

    /// Drops what the pool knows of the store at a place to which no entry leads.
    fn forget_remains(&mut self, parent: Ino, name: &[u8]) -> Answer<Reply<'static>> {
        self.admit(Class::Removal, Work::writes(4))?;
        if let Some(placed) = self.placed(parent, name)? {
            self.forget_places_of(placed.ino, Some((parent, name)), true)?;
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
            // A file that was moved out of it may have its only copy there.
            Kind::Directory if !discard && self.has_places(attr.ino)? => Err(Code::Busy),
            Kind::File if attr.nlink == 1 && attr.flags & FLAG_DIRTY != 0 && !discard => Err(Code::Busy),
            _ => Ok(()),
        }
    }

    /// True for an inode of the tree of a store.
    pub fn is_attached_inode(&self, ino: Ino) -> bool {
        self.state.ledger.has_stores()
            && self.find_inode(ino).ok().flatten().is_some_and(|inode| inode.attr.flags & FLAG_ATTACHED != 0)
    }

    /// True for an inode of the tree of a store to which data are added only when there is space. A file that is being
    /// copied is none: its mover, which makes the space, marks it dirty when a program has it open.
    #[inline]
    pub fn waits_for_space(&self, ino: Ino) -> bool {
        let waits = |flags: u32| flags & (FLAG_ATTACHED | FLAG_DRAINING) == FLAG_ATTACHED;
        self.state.ledger.has_stores()
            && self.find_inode(ino).ok().flatten().is_some_and(|inode| waits(inode.attr.flags))
    }

    /// The directory with the store to which an inode belongs, and the store's settings; none for an inode of no store.
    pub fn store_settings(&mut self, ino: Ino) -> std::result::Result<Option<(Ino, Vec<u8>)>, Code> {
        let mut payload = vec![0; PAYLOAD_BYTES_MAX];
        let top = match self.store_place(ino, &mut payload)? {
            Reply::Bytes(bytes) => StorePlace::decode(bytes)?,
            _ => return Err(Code::Corrupt),
        };
        if !top.is_root {
            return Ok(None);
        }
        match self.get_xattr(top.top, STORE_SETTINGS, &mut payload) {
            Ok(Reply::Bytes(bytes)) => Ok(Some((top.top, bytes.to_vec()))),
            Ok(_) => Err(Code::Corrupt),
            Err(Code::NoAttribute) => Ok(None),
            Err(code) => Err(code),
        }
    }

    /// True for a file whose data are in its backing store alone.
    pub fn is_to_be_restored(&self, ino: Ino) -> bool {
        self.bytes_to_restore(ino).is_some()
    }

    /// The bytes of such a file; none for any other inode.
    pub fn bytes_to_restore(&self, ino: Ino) -> Option<u64> {
        if !self.state.ledger.has_stores() {
            return None;
        }
        let Inode { attr, .. } = self.find_inode(ino).ok().flatten()?;
        (attr.is_file() && !attr.is_resident()).then_some(attr.size)
    }

    /// Sets and clears flags of an inode.
    pub(crate) fn change_flags(
        &mut self,
        c: &mut Context<'_>,
        ino: Ino,
        set: u32,
        clear: u32,
    ) -> Answer<Reply<'static>> {
        self.admit(Class::Removal, Work::writes(3))?;
        let mut inode = self.inode(ino)?;
        if (set | clear) & FLAG_UNLISTED != 0 {
            self.state.absences.forget_all_of(ino);
        }
        if set & !inode.attr.flags & FLAG_UNLISTED != 0 {
            c.effects.becomes_unlisted(ino, inode.attr.flags & FLAG_ATTACHED != 0);
        }
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
                self.met_unlisted = Some((ino, None));
                Err(Code::NotListed)
            }
            _ => Ok(()),
        }
    }

    /// What the last request that was refused with [`Code::NotListed`] needs of the store.
    pub fn take_unlisted(&mut self) -> Option<Unlisted> {
        self.met_unlisted.take()
    }

    /// A file of an attached tree.
    pub(crate) fn attached_file(&mut self, ino: Ino) -> Answer<Inode> {
        let inode = self.inode(ino)?;
        match inode.attr.kind() {
            Kind::File if inode.attr.flags & FLAG_ATTACHED != 0 => Ok(inode),
            Kind::Directory => Err(Code::IsDirectory),
            _ => Err(Code::Invalid),
        }
    }

    /// Executes [`Request::Restored`]. From then on a stat shows the times of the backing files: those that a program has
    /// set meanwhile must be theirs already.
    pub(crate) fn restored(
        &mut self,
        c: &mut Context<'_>,
        ino: Ino,
        epoch: u64,
        times: (Timestamp, Timestamp),
        layout: Layout,
    ) -> Answer<Reply<'static>> {
        let mut inode = self.attached_file(ino)?;
        if inode.attr.epoch() != epoch || inode.attr.is_resident() {
            return Err(Code::Stale);
        }
        if (inode.attr.atime, inode.attr.mtime) != times {
            return Err(Code::Busy);
        }
        // A release that is taken back has left several backing files.
        if layout != inode.layout && (layout.is_single() || !layout.is_placed()) {
            return Err(Code::Invalid);
        }
        self.admit(Class::Removal, Work::writes(3))?;
        // Data of which it is not known that they are the pool's count as the pool's from now on.
        let is_known = self.copy_record(ino)?.is_some_and(|copy| copy.epoch == epoch);
        let dirty = if is_known { 0 } else { FLAG_DIRTY };
        inode.attr.flags = inode.attr.flags & !FLAG_DRAINING | FLAG_RESIDENT | dirty;
        inode.layout = layout;
        self.store_inode(&inode)?;
        c.effects.inode(inode.entry());
        Ok(Reply::Entry(inode.entry()))
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
        let before = self.placed(parent, name)?;
        let links = match &before {
            // The same file, which has other names: its times were set, or another program has written it.
            Some(before)
                if before.ino == ino
                    && before.version != version
                    && before.version.is_same_file(&version) =>
            {
                self.other_places(ino, (parent, name), before.version)?
            }
            _ => Vec::new(),
        };
        // What was there: place, copy, further place, pending, inode. Place, copy twice, two further places, inode,
        // pending, linked file.
        self.admit(Class::Change, Work::writes(14 + 2 * links.len() as u64))?;
        let found = self.find_inode(ino)?;
        if let Some(Inode { attr, .. }) = &found {
            let is_elsewhere = |copy: Copy| (copy.parent, copy.name.as_slice()) != (parent, name);
            match attr.kind() {
                Kind::File if !attr.is_resident() && epoch != attr.epoch() => return Err(Code::Stale),
                // The pool's data are of another version, or what was looked at is not the copy any longer.
                Kind::File
                    if seen == CHANGES_ALL
                        && (attr.is_resident() || self.copy_record(ino)?.is_none_or(is_elsewhere)) =>
                {
                    return Err(Code::Stale);
                }
                Kind::Directory if self.copy_record(ino)?.is_some_and(is_elsewhere) => {
                    return Err(Code::Busy); // what is in it has only one path
                }
                _ => {}
            }
        }
        let same = before.filter(|before| before.ino == ino);
        if same.is_none() {
            self.lose_place(c, parent, name)?;
        }
        let mut others = Vec::with_capacity(links.len());
        for (parent, name, placed) in links {
            self.put_place(parent, &name, &Placed { version, ..placed })?;
            others.push((parent, name));
        }
        let Some(mut inode) = found else {
            // It was removed meanwhile: what was published is to be removed.
            let kind = match same {
                Some(placed) => placed.kind,
                None => self.intended_kind(parent, name)?,
            };
            self.put_place(parent, name, &Placed { ino, kind, version })?;
            return self.settle_place(c, parent, name, None);
        };
        let kind = inode.attr.kind();
        self.put_place(parent, name, &Placed { ino, kind, version })?;
        let is_data = kind == Kind::File;
        // A dirty file that is not draining may have been written to since.
        let is_still = inode.attr.flags & (FLAG_DIRTY | FLAG_DRAINING) != FLAG_DIRTY;
        let copied = is_data && epoch == inode.attr.epoch() && is_still;
        let known = match (is_data, copied) {
            (false, _) => 0,
            (true, true) => epoch,
            (true, false) => EPOCH_UNKNOWN,
        };
        let is_new = same.is_none_or(|same| same.version != version);
        if let Some(same) = same.filter(|_| is_data) {
            self.follow_linked_file(parent, &inode, (same.version, version))?;
        }
        let again = self.note_copy(c, &inode, known, parent, name, is_new)?;
        self.align_further(ino, (parent, name), &others)?;
        let is_taken_over = is_data && is_new && !inode.attr.is_resident() && seen == CHANGES_ALL;
        if is_taken_over {
            self.begin_other_version(&mut inode)?;
            (inode.attr.size, inode.attr.mtime) = (version.bytes, version.mtime);
            inode.attr.ctime = c.now;
        }
        let was_draining = copied && inode.attr.flags & FLAG_DRAINING != 0;
        if was_draining {
            inode.attr.flags &= !(FLAG_DIRTY | FLAG_DRAINING);
        }
        if was_draining || is_taken_over {
            self.store_inode(&inode)?;
            c.effects.inode(inode.entry());
        }
        self.pass_on(c.now, parent, name)?;
        self.settle_place(c, parent, name, Some(seen).filter(|_| !again))
    }

    /// The copy of a released file has another program's data. The new epoch voids a restore that has read others.
    fn begin_other_version(&mut self, inode: &mut Inode) -> Answer<()> {
        let mut copy = self.copy_record(inode.attr.ino)?.ok_or(Code::Corrupt)?;
        inode.attr.next_version();
        copy.epoch = inode.attr.epoch();
        self.put_copy(inode.attr.ino, &copy)
    }

    pub(crate) fn unpublished(
        &mut self,
        c: &mut Context<'_>,
        parent: Ino,
        name: &[u8],
        seen: u64,
    ) -> Answer<Reply<'static>> {
        self.admit(Class::Removal, Work::writes(7))?;
        self.lose_place(c, parent, name)?;
        let is_wanted = self.entry_at(parent, name)?.is_some();
        self.settle_place(c, parent, name, Some(seen).filter(|_| !is_wanted))
    }

    pub(crate) fn settled(
        &mut self,
        c: &mut Context<'_>,
        parent: Ino,
        name: &[u8],
        seen: u64,
    ) -> Answer<Reply<'static>> {
        self.admit(Class::Removal, Work::writes(4))?;
        self.pass_on(c.now, parent, name)?;
        self.settle_place(c, parent, name, Some(seen))
    }

    pub(crate) fn moved(
        &mut self,
        c: &mut Context<'_>,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
        version: StoreVersion,
    ) -> Answer<Reply<'static>> {
        self.admit(Class::Change, Work::writes(12))?;
        let placed = self.placed(from.0, from.1)?.ok_or(Code::NotFound)?;
        if from == to {
            return Ok(Reply::Done);
        }
        if self.placed(to.0, to.1)?.is_some_and(|there| there.ino != placed.ino) {
            self.lose_place(c, to.0, to.1)?;
        }
        self.tx.delete(keys::place(from.0, from.1).bytes())?;
        self.put_place(to.0, to.1, &Placed { version, ..placed })?;
        self.move_copy(c.now, placed.ino, from, to)?;
        // A change of the inode may have been noted at the old place.
        self.note_place(c.now, to.0, to.1)?;
        self.settle_place(c, to.0, to.1, None)?;
        match self.entry_at(from.0, from.1)? {
            Some(_) => self.settle_place(c, from.0, from.1, None),
            None => self.end_intent(from.0, from.1),
        }
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
        let Some(mut copy) = self.copy_record(ino)? else { return Err(Code::Stale) };
        if inode.attr.epoch() != epoch || !is_clean || copy.epoch != epoch {
            return Err(Code::Stale);
        }
        // Pending: a mover moves it, or the store does not have its new attributes yet.
        if inode.attr.flags & FLAG_PINNED != 0 || self.is_pending(copy.parent, &copy.name)? {
            return Err(Code::Busy);
        }
        let (ctime, mtime) = (inode.attr.ctime, inode.attr.mtime);
        set.apply(&mut inode.attr, c.now)?;
        // A modification time that the shard does not know is that of a write, which changed the inode too.
        let is_known = inode.attr.mtime == mtime;
        inode.attr.ctime = if is_known { ctime } else { ctime.max(inode.attr.mtime) };
        inode.attr.next_epoch();
        self.admit(Class::Removal, Work::writes(4))?;
        copy.epoch = inode.attr.epoch();
        self.put_copy(ino, &copy)?;
        inode.attr.flags &= !FLAG_RESIDENT;
        if !inode.layout.is_single() {
            // It is restored into one backing file.
            inode.layout = Layout::single(self.shard.node(), 0);
        }
        self.store_inode(&inode)?;
        c.effects.inode(inode.entry());
        Ok(Reply::Entry(inode.entry()))
    }

    /// Moves the place to which a released file will be restored. The new epoch voids a restore that is under way.
    pub(crate) fn relocate(&mut self, c: &mut Context<'_>, ino: Ino, node: NodeId) -> Answer<Reply<'static>> {
        let mut inode = self.attached_file(ino)?;
        if inode.attr.is_resident() {
            return Err(Code::Stale);
        }
        if !node.is_valid() {
            return Err(Code::Invalid);
        }
        let mut copy = self.copy_record(ino)?.ok_or(Code::Stale)?;
        self.admit(Class::Removal, Work::writes(3))?;
        let is_known = copy.epoch == inode.attr.epoch();
        inode.attr.next_epoch();
        if is_known {
            copy.epoch = inode.attr.epoch();
            self.put_copy(ino, &copy)?;
        }
        inode.layout = Layout::single(node, 0);
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
                self.note_inode(c, ino)?;
            }
            inode.attr.flags = inode.attr.flags & !FLAG_DRAINING | FLAG_DIRTY;
            self.store_inode(&inode)?;
        }
        c.effects.inode(inode.entry());
        Ok(Reply::Entry(inode.entry()))
    }
}
