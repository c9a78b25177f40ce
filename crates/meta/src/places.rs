//! What a backing store has, and where it may differ from the pool (docs/decisions/0041).
//!
//! | record | key | holds |
//! |---|---|---|
//! | place | directory and name, as the store has them | the inode that was imported or published there, and its version |
//! | pending | directory and name | that the store may differ there, since when, and how often the pool changed it |
//!
//! `copies.rs` has the records that lead from an inode to its places.
//!
//! Invariants: a place is pending unless the pool has the same inode there. A change of an attached tree makes the
//! places that it concerns pending, in the same transaction. A mover compares a pending place with the pool, makes the
//! store equal, and reports what the store has from then on; the place stays pending if the pool has changed it
//! meanwhile, and as long as it has a dirty file.
//!
//! Before a mover changes what the store has under a name, it notes the version that will be there (`Intend`). If it
//! dies in between, the place is still pending and the next mover recognises the version, even if the pool's name came
//! and went.
//!
//! Of a directory in memory it is known, once it was looked at, whether it has no places at all (`directories.rs`): the
//! store has nothing there, and its names need no look for a place. Each place that comes ends that. Tests:
//! `tests/backing_store`.

use forebay_types::limits::{NAME_MAX, PATH_MAX};
use forebay_types::{
    decode_inos, encode_store_place, Code, Ino, Kind, PendingPlace, Placed, Reader, Reply, Request,
    StorePlace, StoreVersion, Timestamp, Wanted, Writer, EPOCH_UNKNOWN, FLAG_ATTACHED, FLAG_DIRTY,
    FLAG_STORE, STORE_VERSION_BYTES,
};

use crate::batch::{Answer, Batch, Context};
use crate::copies::Copy;
use crate::effects::Mark;
use crate::keys::{self, Key};
use crate::page_budget::{Class, Work};
use crate::record::{Inode, RECORD_VERSION};

const PLACE_BYTES: usize = 1 + 9 + STORE_VERSION_BYTES;
const PENDING_BYTES: usize = 1 + 8 + 12 + 1 + STORE_VERSION_BYTES;
/// Bound on a walk from a place up to its store.
const DEPTH_MAX: usize = 1 << 16;

/// A pending place, as it is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct PendingRecord {
    /// Changes since it became pending.
    changes: u64,
    /// When it became pending.
    since: Timestamp,
    /// The store had a version that the pool did not know.
    conflict: bool,
    /// The version that a mover was about to publish.
    intent: Option<StoreVersion>,
}

impl PendingRecord {
    /// No mover has begun anything at the place, and it is in no conflict.
    fn is_plain(&self) -> bool {
        self.intent.is_none() && !self.conflict
    }

    fn encode(&self, buffer: &mut [u8; PENDING_BYTES]) -> Answer<usize> {
        let mut w = Writer::new(buffer);
        w.u8(RECORD_VERSION)?;
        w.u64(self.changes)?;
        w.u64(self.since.sec as u64)?;
        w.u32(self.since.nsec)?;
        w.u8(u8::from(self.conflict) | u8::from(self.intent.is_some()) << 1)?;
        if let Some(intent) = &self.intent {
            intent.encode(&mut w)?;
        }
        Ok(w.len())
    }

    pub(crate) fn decode(bytes: &[u8]) -> Answer<PendingRecord> {
        let read = |r: &mut Reader<'_>| {
            if r.u8()? != RECORD_VERSION {
                return Err(Code::Corrupt);
            }
            let changes = r.u64()?;
            let since = Timestamp { sec: r.u64()? as i64, nsec: r.u32()? };
            let bits = r.u8()?;
            let intent = if bits & 2 != 0 { Some(StoreVersion::decode(r)?) } else { None };
            Ok(PendingRecord { changes, since, conflict: bits & 1 != 0, intent })
        };
        read(&mut Reader::new(bytes)).map_err(|_| Code::Corrupt)
    }
}

pub(crate) fn decode_place(bytes: &[u8]) -> Answer<Placed> {
    match bytes.split_first() {
        Some((&RECORD_VERSION, rest)) => Placed::decode(&mut Reader::new(rest)).map_err(|_| Code::Corrupt),
        _ => Err(Code::Corrupt),
    }
}

impl Batch<'_> {
    /// What the store has at a place, as far as the pool knows.
    pub(crate) fn placed(&self, parent: Ino, name: &[u8]) -> Answer<Option<Placed>> {
        if self.state.directories.has_places(parent) == Some(false) {
            return Ok(None);
        }
        self.tx.get(keys::place(parent, name).bytes())?.map(decode_place).transpose()
    }

    /// The kind that a removed inode has in the store, as the intent at its place tells.
    pub(crate) fn intended_kind(&self, parent: Ino, name: &[u8]) -> Answer<Kind> {
        let intent = self.pending_at(parent, name)?.and_then(|pending| pending.intent);
        Ok(if intent == Some(StoreVersion::A_DIRECTORY) { Kind::Directory } else { Kind::File })
    }

    fn pending_at(&self, parent: Ino, name: &[u8]) -> Answer<Option<PendingRecord>> {
        self.tx.get(keys::pending(parent, name).bytes())?.map(PendingRecord::decode).transpose()
    }

    /// True while a mover changes what the store has at a place.
    pub(crate) fn is_intended(&self, parent: Ino, name: &[u8]) -> Answer<bool> {
        Ok(self.pending_at(parent, name)?.is_some_and(|pending| pending.intent.is_some()))
    }

    pub(crate) fn is_pending(&self, parent: Ino, name: &[u8]) -> Answer<bool> {
        Ok(self.tx.get(keys::pending(parent, name).bytes())?.is_some())
    }

    /// True if a place in a directory is pending.
    pub(crate) fn has_pending_in(&self, directory: Ino) -> Answer<bool> {
        let (first, last) = keys::pending_in(directory);
        Ok(self.tx.first_in(first.bytes(), last.bytes())?.is_some())
    }

    pub(crate) fn put_place(&mut self, parent: Ino, name: &[u8], placed: &Placed) -> Answer<()> {
        let mut buffer = [0; PLACE_BYTES];
        let mut w = Writer::new(&mut buffer);
        w.u8(RECORD_VERSION)?;
        placed.encode(&mut w)?;
        let n = w.len();
        self.state.absences.forget(parent, name);
        self.state.directories.note_places(parent, true);
        self.tx.put(keys::place(parent, name).bytes(), &buffer[..n])
    }

    fn put_pending(&mut self, parent: Ino, name: &[u8], record: &PendingRecord) -> Answer<()> {
        if !record.is_plain() {
            self.state.directories.note_untouched(parent, false);
        }
        let mut buffer = [0; PENDING_BYTES];
        let n = record.encode(&mut buffer)?;
        self.state.pending_changes += 1;
        self.tx.put(keys::pending(parent, name).bytes(), &buffer[..n])
    }

    /// False if the place was not pending.
    fn delete_pending(&mut self, parent: Ino, name: &[u8]) -> Answer<bool> {
        let was_pending = self.tx.delete(keys::pending(parent, name).bytes())?;
        self.state.pending_changes += u64::from(was_pending);
        Ok(was_pending)
    }

    /// True if the directory belongs to the tree of a store.
    pub(crate) fn is_attached(&mut self, directory: Ino) -> Answer<bool> {
        match self.directory(directory) {
            Ok(slot) => Ok(self.state.directories.get(slot).attr.flags & FLAG_ATTACHED != 0),
            Err(Code::NotFound | Code::NotDirectory) => Ok(false),
            Err(code) => Err(code),
        }
    }

    /// Makes the places pending whose names a change concerned: those in the effects behind `mark`.
    pub(crate) fn note_names(
        &mut self,
        c: &mut Context<'_>,
        request: &Request<'_>,
        mark: Mark,
    ) -> Answer<()> {
        if is_report(request) {
            return Ok(());
        }
        let names = c.effects.since(mark).names().count();
        for i in 0..names {
            let Some(effect) = c.effects.since(mark).names().nth(i) else { break };
            let (parent, inode) = (effect.parent, effect.entry);
            if !self.is_attached(parent)? {
                continue;
            }
            let mut name = [0; NAME_MAX];
            let len = effect.name.len().min(NAME_MAX);
            name[..len].copy_from_slice(&effect.name[..len]);
            self.note_name(c.now, parent, &name[..len], inode)?;
        }
        if let Request::SetAttr { ino, .. }
        | Request::SetXattr { ino, .. }
        | Request::RemoveXattr { ino, .. } = request
        {
            self.note_inode(c, *ino)?;
        }
        Ok(())
    }

    fn note_name(
        &mut self,
        now: Timestamp,
        parent: Ino,
        name: &[u8],
        now_there: Option<(Ino, Kind)>,
    ) -> Answer<()> {
        if now_there.is_some() {
            return self.note_present(now, parent, name);
        }
        let is_placed = self.learn_places(parent)? && self.placed(parent, name)?.is_some();
        // A name that the store never had came and went.
        if !is_placed && self.state.directories.is_untouched(parent) {
            return self.delete_pending(parent, name).map(|_| ());
        }
        match self.pending_at(parent, name)? {
            Some(pending) if !is_placed && pending.is_plain() => {
                self.delete_pending(parent, name).map(|_| ())
            }
            None if !is_placed => Ok(()),
            pending => self.note(now, parent, name, pending),
        }
    }

    /// The same for a name that the pool has. Most were not pending: they take one look into the tree.
    fn note_present(&mut self, now: Timestamp, parent: Ino, name: &[u8]) -> Answer<()> {
        let mut buffer = [0; PENDING_BYTES];
        let n = PendingRecord { since: now, changes: 1, ..PendingRecord::default() }.encode(&mut buffer)?;
        match self.tx.insert(keys::pending(parent, name).bytes(), &buffer[..n])? {
            true => {
                self.state.pending_changes += 1;
                Ok(())
            }
            false => self.note_place(now, parent, name),
        }
    }

    /// False if the store has nothing in a directory. What was found is known from then on.
    pub(crate) fn learn_places(&mut self, directory: Ino) -> Answer<bool> {
        if let Some(known) = self.state.directories.has_places(directory) {
            return Ok(known);
        }
        let has_places = self.has_places(directory)?;
        self.state.directories.note_places(directory, has_places);
        Ok(has_places)
    }

    /// Makes a place pending, or counts one more change of it.
    pub(crate) fn note_place(&mut self, now: Timestamp, parent: Ino, name: &[u8]) -> Answer<()> {
        let pending = self.pending_at(parent, name)?;
        self.note(now, parent, name, pending)
    }

    fn note(
        &mut self,
        now: Timestamp,
        parent: Ino,
        name: &[u8],
        pending: Option<PendingRecord>,
    ) -> Answer<()> {
        let before = pending.unwrap_or(PendingRecord { since: now, ..PendingRecord::default() });
        self.put_pending(parent, name, &PendingRecord { changes: before.changes + 1, ..before })
    }

    /// The directory with the store to whose tree a directory belongs; none if it belongs to none.
    pub(crate) fn store_of(&mut self, mut directory: Ino) -> Answer<Option<Ino>> {
        for _ in 0..DEPTH_MAX {
            let slot = self.directory(directory)?;
            let attr = self.state.directories.get(slot).attr;
            match attr.flags & (FLAG_ATTACHED | FLAG_STORE) {
                0 => return Ok(None),
                flags if flags & FLAG_STORE != 0 => return Ok(Some(directory)),
                _ => directory = attr.parent,
            }
        }
        Err(Code::Corrupt)
    }

    /// True for the directory with a store.
    pub(crate) fn is_with_store(&self, ino: Ino) -> Answer<bool> {
        Ok(self.state.ledger.has_stores()
            && self.find_inode(ino)?.is_some_and(|inode| inode.attr.flags & FLAG_STORE != 0))
    }

    /// Refuses to bring an entry from one tree into another, as between two file systems.
    pub(crate) fn check_same_store(&mut self, from: Ino, to: Ino) -> Answer<()> {
        if !self.state.ledger.has_stores() || from == to {
            return Ok(());
        }
        match self.store_of(from)? == self.store_of(to)? {
            true => Ok(()),
            false => Err(Code::CrossDevice),
        }
    }

    /// Refuses a part of a cross-node transaction in a directory of an attached tree. One node has such a tree, with all
    /// its names and inodes, and changes it alone: what takes another node crosses the tree's border.
    pub(crate) fn check_outside_stores(&mut self, directory: Ino) -> Answer<()> {
        match self.state.ledger.has_stores() && self.is_attached(directory)? {
            true => Err(Code::CrossDevice),
            false => Ok(()),
        }
    }

    /// True if a directory belongs to the same store as an inode that is no directory, or both to none. With several
    /// stores, a file's store is known only while that store has it.
    pub(crate) fn is_of_store(&mut self, inode: &Inode, directory: Ino) -> Answer<bool> {
        if !self.state.ledger.has_stores() {
            return Ok(true);
        }
        let is_attached = self.is_attached(directory)?;
        if is_attached != (inode.attr.flags & FLAG_ATTACHED != 0) {
            return Ok(false);
        }
        if !is_attached || self.state.ledger.stores == 1 {
            return Ok(true);
        }
        match self.copy_record(inode.attr.ino)? {
            Some(copy) => match self.store_of(copy.parent) {
                Ok(store) => Ok(store == self.store_of(directory)?),
                Err(Code::NotFound) => Ok(false),
                Err(code) => Err(code),
            },
            None => Ok(false),
        }
    }

    /// Executes [`Request::Pending`].
    pub(crate) fn list_pending<'o>(
        &mut self,
        parent: Ino,
        name: &[u8],
        payload: &'o mut [u8],
    ) -> Answer<Reply<'o>> {
        let (first, last) = (keys::pending(parent, name), keys::last_pending());
        let mut found = Vec::new();
        let mut w = Writer::new(payload);
        for item in self.tx.range(first.bytes(), &last)? {
            let (key, bytes) = item?;
            let Some(Key::Pending(parent_of, name_of)) = keys::decode(key) else { return Err(Code::Corrupt) };
            if (parent_of, name_of) == (parent, name) {
                continue;
            }
            found.push((parent_of, name_of.to_vec(), PendingRecord::decode(bytes)?));
            // More do not fit into a reply.
            if found.len() >= 1024 {
                break;
            }
        }
        let mut end = 0;
        for (parent, name, record) in found {
            match self.pending_place(parent, name, &record)?.encode(&mut w) {
                Ok(()) => end = w.len(),
                Err(Code::TooBig) => break,
                Err(code) => return Err(code),
            }
        }
        Ok(Reply::Bytes(&payload[..end]))
    }

    fn pending_place(&mut self, parent: Ino, name: Vec<u8>, record: &PendingRecord) -> Answer<PendingPlace> {
        let placed = self.placed(parent, &name)?;
        let wanted = match self.directory(parent) {
            Ok(slot) => match self.find_entry(slot, &name)? {
                Some(found) if self.is_ours(found.ino) => {
                    let copy = self.copy_record(found.ino)?.map(Copy::told);
                    Some(Wanted::Here(self.entered_inode(found.ino)?.entry(), copy))
                }
                Some(found) => Some(Wanted::Elsewhere(found.ino, found.kind)),
                None => None,
            },
            // The directory was removed: nothing below it is wanted.
            Err(Code::NotFound) => None,
            Err(code) => return Err(code),
        };
        let PendingRecord { changes, since, conflict, intent } = *record;
        Ok(PendingPlace { parent, name, changes, since, intent, conflict, placed, wanted })
    }

    /// Where the store has an inode.
    fn find_store_place(&mut self, ino: Ino) -> Answer<StorePlace> {
        let (mut path, mut start) = (vec![0; PATH_MAX], PATH_MAX);
        let (mut at, mut parent, mut placed, mut epoch) = (ino, Ino(0), None, EPOCH_UNKNOWN);
        let is_root = loop {
            if self.find_inode(at)?.is_some_and(|inode| inode.attr.flags & FLAG_STORE != 0) {
                break true;
            }
            if !self.is_ours(at) {
                break false;
            }
            let copy = self.copy_record(at)?.ok_or(Code::NotFound)?;
            if at == ino {
                placed = self.placed(copy.parent, &copy.name)?;
                parent = copy.parent;
                let is_file = placed.is_some_and(|placed| placed.kind == Kind::File);
                epoch = if is_file { copy.epoch } else { EPOCH_UNKNOWN };
            }
            let separator = usize::from(start != PATH_MAX);
            let begin = start.checked_sub(copy.name.len() + separator).ok_or(Code::NameTooLong)?;
            path[begin..begin + copy.name.len()].copy_from_slice(&copy.name);
            if separator == 1 {
                path[start - 1] = b'/';
            }
            start = begin;
            at = copy.parent;
        };
        Ok(StorePlace { top: at, is_root, parent, placed, epoch, path: path.split_off(start) })
    }

    /// Executes [`Request::StorePlace`].
    pub(crate) fn store_place<'o>(&mut self, ino: Ino, payload: &'o mut [u8]) -> Answer<Reply<'o>> {
        let mut w = Writer::new(payload);
        self.find_store_place(ino)?.encode(&mut w)?;
        let n = w.len();
        Ok(Reply::Bytes(&payload[..n]))
    }

    /// Executes [`Request::StorePlaces`].
    pub(crate) fn store_places<'o>(&mut self, inos: &[u8], payload: &'o mut [u8]) -> Answer<Reply<'o>> {
        let mut w = Writer::new(payload);
        let mut end = 0;
        for ino in decode_inos(inos)? {
            match encode_store_place(&self.find_store_place(ino), &mut w) {
                Ok(()) => end = w.len(),
                Err(Code::TooBig) => break,
                Err(code) => return Err(code),
            }
        }
        Ok(Reply::Bytes(&payload[..end]))
    }

    /// Executes [`Request::Intend`].
    pub(crate) fn intend(
        &mut self,
        c: &mut Context<'_>,
        parent: Ino,
        name: &[u8],
        version: StoreVersion,
    ) -> Answer<Reply<'static>> {
        self.admit(Class::Removal, Work::writes(3))?;
        if let Some(placed) = self.placed(parent, name)? {
            let stays = placed.version == version || self.leads_to_inode(parent, name, placed.ino)?;
            if !stays {
                if !self.may_be_lost(parent, name, &placed)? {
                    return Err(Code::Busy);
                }
                self.expect_loss(c, parent, name, placed.ino)?;
            }
        }
        let pending = self.pending_at(parent, name)?;
        let pending =
            pending.unwrap_or(PendingRecord { since: c.now, changes: 1, ..PendingRecord::default() });
        self.put_pending(parent, name, &PendingRecord { intent: Some(version), ..pending })?;
        Ok(Reply::Done)
    }

    /// The entry of a pending or published name; none if it, or its directory, is gone.
    pub(crate) fn entry_at(&mut self, parent: Ino, name: &[u8]) -> Answer<Option<Ino>> {
        match self.directory(parent) {
            Ok(slot) => Ok(self.find_entry(slot, name)?.map(|found| found.ino)),
            Err(Code::NotFound) => Ok(None),
            Err(code) => Err(code),
        }
    }

    pub(crate) fn leads_to_inode(&mut self, parent: Ino, name: &[u8], ino: Ino) -> Answer<bool> {
        Ok(self.entry_at(parent, name)? == Some(ino))
    }

    /// Executes [`Request::Conflict`]: `version` is what the store has now, all zeros for nothing.
    pub(crate) fn note_conflict(
        &mut self,
        c: &mut Context<'_>,
        parent: Ino,
        name: &[u8],
        found: bool,
        version: StoreVersion,
    ) -> Answer<Reply<'static>> {
        self.admit(Class::Change, Work::writes(8))?;
        if let Some(placed) = self.placed(parent, name)? {
            // Another program has put a file there: what the store has of the old one is not the pool's to tell.
            self.forget_linked_file(parent, placed.ino, &placed.version)?;
        }
        if found {
            self.distrust_copy(c, parent, name)?;
        } else {
            // The pool's version may replace this one.
            self.lose_place(c, parent, name)?;
            if version != StoreVersion::default() {
                self.put_place(parent, name, &Placed { ino: Ino(0), kind: Kind::File, version })?;
            }
        }
        let before = self.pending_at(parent, name)?;
        let before = before.unwrap_or(PendingRecord { since: c.now, ..PendingRecord::default() });
        let record = PendingRecord { conflict: found, intent: None, changes: before.changes + 1, ..before };
        self.put_pending(parent, name, &record)?;
        Ok(Reply::Done)
    }

    /// True if the store does not differ from the pool at a place, as far as the shard knows. A file that was never
    /// published may stay out of the store.
    fn is_equal(&mut self, parent: Ino, name: &[u8]) -> Answer<bool> {
        let (placed, entry) = (self.placed(parent, name)?, self.entry_at(parent, name)?);
        let Some(ino) = entry else { return Ok(placed.is_none()) };
        let is_dirty = match self.find_inode(ino)? {
            Some(inode) => inode.attr.is_file() && inode.attr.flags & FLAG_DIRTY != 0,
            None => false,
        };
        match placed {
            Some(placed) => Ok(placed.ino == ino && !is_dirty),
            None => Ok(self.copy_record(ino)?.is_none()),
        }
    }

    /// Ends that a place is pending, unless the store differs there, or it has changed since the caller looked.
    pub(crate) fn settle_place(
        &mut self,
        c: &mut Context<'_>,
        parent: Ino,
        name: &[u8],
        seen: Option<u64>,
    ) -> Answer<Reply<'static>> {
        let pending = self.pending_at(parent, name)?;
        let is_equal = self.is_equal(parent, name)?;
        match pending {
            Some(pending) if is_equal && seen == Some(pending.changes) && !pending.conflict => {
                self.delete_pending(parent, name)?;
            }
            Some(pending) => {
                self.put_pending(parent, name, &PendingRecord { intent: None, ..pending })?;
            }
            None if !is_equal || seen.is_none() => self.note(c.now, parent, name, None)?,
            None => {}
        }
        Ok(Reply::Done)
    }

    /// A mover no longer changes what the store has at a place.
    pub(crate) fn end_intent(&mut self, parent: Ino, name: &[u8]) -> Answer<Reply<'static>> {
        if let Some(pending) = self.pending_at(parent, name)? {
            self.put_pending(parent, name, &PendingRecord { intent: None, ..pending })?;
        }
        Ok(Reply::Done)
    }

    /// True if a place of the tree of the store at `root` is pending.
    pub(crate) fn has_pending(&mut self, root: Ino) -> Answer<bool> {
        let first = keys::pending(Ino(0), b"");
        let mut parents = Vec::new();
        for item in self.tx.range(first.bytes(), &keys::last_pending())? {
            let Some(Key::Pending(parent, _)) = keys::decode(item?.0) else { return Err(Code::Corrupt) };
            if parents.last() != Some(&parent) {
                parents.push(parent);
            }
        }
        for parent in parents {
            // Unknown: a directory whose records are gone. It counts, since data may depend on it.
            if self.root_of_place(parent)?.is_none_or(|of| of == root) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The directory with the store that has a directory, which may be gone from the pool.
    pub(crate) fn root_of_place(&mut self, mut directory: Ino) -> Answer<Option<Ino>> {
        for _ in 0..DEPTH_MAX {
            if let Some(inode) = self.find_inode(directory)? {
                if inode.attr.flags & FLAG_STORE != 0 {
                    return Ok(Some(directory));
                }
            }
            match self.copy_record(directory)? {
                Some(copy) => directory = copy.parent,
                // Not in the store yet: it is in the pool.
                None => match self.find_inode(directory)? {
                    Some(inode) if inode.attr.flags & FLAG_ATTACHED != 0 => directory = inode.attr.parent,
                    _ => return Ok(None),
                },
            }
        }
        Err(Code::Corrupt)
    }

    /// Drops what the pool knows of the store at a place.
    pub(crate) fn drop_place(&mut self, parent: Ino, name: &[u8]) -> Answer<bool> {
        let had_place = self.tx.delete(keys::place(parent, name).bytes())?;
        let was_pending = self.delete_pending(parent, name)?;
        Ok(had_place | was_pending)
    }
}

/// Requests by which a mover reports what the store has: they change no name on behalf of a program.
fn is_report(request: &Request<'_>) -> bool {
    matches!(
        request,
        Request::Import { .. }
            | Request::Listed { .. }
            | Request::Published { .. }
            | Request::StoreReports { .. }
            | Request::Unpublished { .. }
            | Request::Settled { .. }
            | Request::Moved { .. }
            | Request::Forget { .. }
            | Request::Relocate { .. }
    )
}
