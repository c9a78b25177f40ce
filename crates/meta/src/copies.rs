//! The records that lead from an inode to the places at which a backing store has it.
//!
//! | record | key | holds |
//! |---|---|---|
//! | copy | inode | the place that has its last version, the epoch of a file's data in it, and the version's generation |
//! | further place | inode and place | a place that has the inode too, under another of its names: the generation there |
//!
//! A change of an inode makes the place of its copy pending. When that place is settled, the first of the further
//! places becomes pending, and so on through all of them: so one change writes few records, however many names the
//! inode has. If the store loses the copy, a further place of the same generation takes its place. A copy without a
//! place (empty name) notes that the attributes changed before the inode was first published.
//!
//! Invariants: a copy or further place leads to a place with its inode. A file that is not resident has a copy; a clean
//! file has one of its epoch. A directory's copy outlives its inode while its place exists, since places below it may
//! have to be removed first.

use forebay_types::limits::NAME_MAX;
use forebay_types::{
    Code, CopyOf, Ino, Kind, Placed, Reader, StoreVersion, Timestamp, Writer, EPOCH_UNKNOWN, FLAG_ATTACHED,
    FLAG_DIRTY, FLAG_DRAINING, FLAG_STORE, FLAG_UNLISTED,
};

use crate::batch::{Answer, Batch, Context};
use crate::keys::{self, Key};
use crate::record::{EntryRecord, Inode, RECORD_VERSION};

const COPY_BYTES_MAX: usize = 1 + 24 + NAME_MAX;
const FURTHER_BYTES: usize = 9;
/// Most links to one object whose places follow a change of its attributes in one transaction. Those of more are found
/// to have been changed when they are next looked at.
const LINKS_MAX: usize = 64;
/// The generation of a further place whose data may be any.
const NO_GENERATION: u64 = 0;

/// Where a store has the last published version of an inode.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Copy {
    /// Epoch of a file's data; 0 for other kinds.
    pub(crate) epoch: u64,
    /// Grows with each new version.
    generation: u64,
    /// Directory.
    pub(crate) parent: Ino,
    /// Name in it.
    pub(crate) name: Vec<u8>,
}

impl Copy {
    pub(crate) fn first(epoch: u64, parent: Ino, name: &[u8]) -> Copy {
        Copy { epoch, generation: NO_GENERATION + 1, parent, name: name.to_vec() }
    }

    fn is_at(&self, parent: Ino, name: &[u8]) -> bool {
        (self.parent, self.name.as_slice()) == (parent, name)
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// True for one that only notes a change.
    pub(crate) fn is_mark(&self) -> bool {
        self.name.is_empty()
    }

    pub(crate) fn told(self) -> CopyOf {
        CopyOf { parent: self.parent, name: self.name, epoch: self.epoch }
    }
}

pub(crate) fn decode_copy(bytes: &[u8]) -> Answer<Copy> {
    match bytes {
        [RECORD_VERSION, rest @ ..] if rest.len() >= 24 && rest.len() <= 24 + NAME_MAX => {
            let (numbers, name) = rest.split_at(24);
            let mut r = Reader::new(numbers);
            Ok(Copy { epoch: r.u64()?, generation: r.u64()?, parent: Ino(r.u64()?), name: name.to_vec() })
        }
        _ => Err(Code::Corrupt),
    }
}

pub(crate) fn decode_further(bytes: &[u8]) -> Answer<u64> {
    match bytes {
        [RECORD_VERSION, rest @ ..] if rest.len() == 8 => Reader::new(rest).u64(),
        _ => Err(Code::Corrupt),
    }
}

/// A further place of an inode.
struct Further {
    parent: Ino,
    name: Vec<u8>,
}

impl Batch<'_> {
    fn copy_or_mark(&self, ino: Ino) -> Answer<Option<Copy>> {
        self.tx.get(&keys::copy(ino))?.map(decode_copy).transpose()
    }

    /// The place that has an inode's last version.
    pub(crate) fn copy_record(&self, ino: Ino) -> Answer<Option<Copy>> {
        Ok(self.copy_or_mark(ino)?.filter(|copy| !copy.is_mark()))
    }

    pub(crate) fn put_copy(&mut self, ino: Ino, copy: &Copy) -> Answer<()> {
        let mut buffer = [0; COPY_BYTES_MAX];
        let mut w = Writer::new(&mut buffer);
        w.u8(RECORD_VERSION)?;
        w.u64(copy.epoch)?;
        w.u64(copy.generation)?;
        w.u64(copy.parent.0)?;
        w.put(&copy.name)?;
        let n = w.len();
        self.state.last_copied = self.state.last_copied.map(|last| last.max(ino.0));
        self.tx.put(&keys::copy(ino), &buffer[..n])
    }

    /// False for an inode that never had a copy, as its number is greater than that of any that had one.
    fn may_have_copy(&mut self, ino: Ino) -> Answer<bool> {
        let last = match self.state.last_copied {
            Some(last) => last,
            None => {
                let (first, last) = keys::all_copies();
                let found = match self.tx.last_in(&first, &last)?.map(|(key, _)| keys::decode(key)) {
                    Some(Some(Key::Copy(ino))) => ino.0,
                    None => 0,
                    _ => return Err(Code::Corrupt),
                };
                *self.state.last_copied.insert(found)
            }
        };
        Ok(ino.0 <= last)
    }

    fn put_further(&mut self, ino: Ino, parent: Ino, name: &[u8], generation: u64) -> Answer<()> {
        let mut buffer = [0; FURTHER_BYTES];
        let mut w = Writer::new(&mut buffer);
        w.u8(RECORD_VERSION)?;
        w.u64(generation)?;
        self.tx.put(keys::further(ino, parent, name).bytes(), &buffer)
    }

    /// Adds a place that has an inode too: data of a generation, or without one any.
    pub(crate) fn put_further_place(
        &mut self,
        ino: Ino,
        parent: Ino,
        name: &[u8],
        generation: Option<u64>,
    ) -> Answer<()> {
        self.put_further(ino, parent, name, generation.unwrap_or(NO_GENERATION))
    }

    /// The same file of the store is at several places: what is known of the copy holds for these further places.
    pub(crate) fn align_further(
        &mut self,
        ino: Ino,
        at: (Ino, &[u8]),
        others: &[(Ino, Vec<u8>)],
    ) -> Answer<()> {
        let Some(copy) = self.copy_record(ino)?.filter(|copy| copy.is_at(at.0, at.1)) else { return Ok(()) };
        for (parent, name) in others {
            if self.further_at(ino, *parent, name)?.is_some_and(|known| known != copy.generation) {
                self.put_further(ino, *parent, name, copy.generation)?;
            }
        }
        Ok(())
    }

    fn further_at(&self, ino: Ino, parent: Ino, name: &[u8]) -> Answer<Option<u64>> {
        self.tx.get(keys::further(ino, parent, name).bytes())?.map(decode_further).transpose()
    }

    /// The first further place of an inode behind a place, that has a generation if one is given.
    fn find_further(
        &self,
        ino: Ino,
        behind: (Ino, &[u8]),
        generation: Option<u64>,
    ) -> Answer<Option<Further>> {
        let (first, last) = (keys::further(ino, behind.0, behind.1), keys::last_further(ino));
        for item in self.tx.range(first.bytes(), last.bytes())? {
            let (key, bytes) = item?;
            let Some(Key::Further(of, parent, name)) = keys::decode(key) else { return Err(Code::Corrupt) };
            let found = decode_further(bytes)?;
            if of == ino && (parent, name) != behind && generation.is_none_or(|wanted| wanted == found) {
                return Ok(Some(Further { parent, name: name.to_vec() }));
            }
        }
        Ok(None)
    }

    /// The other places at which the store has a version of an inode: links to one object, whose attributes are the
    /// same at all of them. The first [`LINKS_MAX`] of them.
    pub(crate) fn other_places(
        &self,
        ino: Ino,
        at: (Ino, &[u8]),
        version: StoreVersion,
    ) -> Answer<Vec<(Ino, Vec<u8>, Placed)>> {
        let mut names = Vec::new();
        names.extend(self.copy_record(ino)?.map(|copy| (copy.parent, copy.name)));
        let (first, last) = (keys::further(ino, Ino(0), b""), keys::last_further(ino));
        for item in self.tx.range(first.bytes(), last.bytes())? {
            let Some(Key::Further(_, parent, name)) = keys::decode(item?.0) else {
                return Err(Code::Corrupt);
            };
            names.push((parent, name.to_vec()));
            if names.len() > LINKS_MAX {
                break;
            }
        }
        names.retain(|(parent, name)| (*parent, name.as_slice()) != at);
        let mut places = Vec::new();
        for (parent, name) in names {
            if let Some(placed) = self.placed(parent, &name)?.filter(|placed| placed.version == version) {
                places.push((parent, name, placed));
            }
        }
        Ok(places)
    }

    /// Makes the first further place behind a place pending.
    fn note_further(&mut self, now: Timestamp, ino: Ino, behind: (Ino, &[u8])) -> Answer<()> {
        match self.find_further(ino, behind, None)? {
            Some(next) if self.find_inode(ino)?.is_some() => self.note_place(now, next.parent, &next.name),
            _ => Ok(()),
        }
    }

    /// A place was looked at: if it has an inode with several names, the next of them is to be looked at.
    pub(crate) fn pass_on(&mut self, now: Timestamp, parent: Ino, name: &[u8]) -> Answer<()> {
        let Some(placed) = self.placed(parent, name)? else { return Ok(()) };
        if placed.kind == Kind::Directory {
            return Ok(());
        }
        match self.further_at(placed.ino, parent, name)? {
            Some(_) => self.note_further(now, placed.ino, (parent, name)),
            None => self.note_further(now, placed.ino, (Ino(0), b"")),
        }
    }

    /// Makes a place pending at which an inode is or will be published: its data or attributes change.
    pub(crate) fn note_inode(&mut self, c: &mut Context<'_>, ino: Ino) -> Answer<()> {
        let Some(mut inode) = self.find_inode(ino)? else { return Ok(()) };
        if inode.attr.flags & (FLAG_ATTACHED | FLAG_STORE) != FLAG_ATTACHED {
            return Ok(());
        }
        if let Some(copy) = self.copy_record(ino)? {
            return self.note_place(c.now, copy.parent, &copy.name);
        }
        match inode.attr.kind() {
            // A mover that copies it has read the attributes already: the copy is void.
            Kind::File if inode.attr.flags & FLAG_DRAINING != 0 => {
                inode.attr.next_epoch();
                inode.attr.flags &= !FLAG_DRAINING;
                self.store_inode(&inode)?;
                c.effects.inode(inode.entry());
                Ok(())
            }
            Kind::File => Ok(()),
            Kind::Directory => match self.tx.get(&keys::entry(inode.attr.parent, inode.cookie))? {
                Some(bytes) => {
                    let name = EntryRecord::decode(bytes)?.name.to_vec();
                    self.note_place(c.now, inode.attr.parent, &name)
                }
                None => Ok(()),
            },
            _ => self.put_copy(ino, &Copy::first(0, Ino(0), b"")),
        }
    }

    /// An inode has lost its last link: its places stay, until the mover has removed what is there.
    pub(crate) fn forget_copy(&mut self, inode: &Inode) -> Answer<()> {
        let is_attached = inode.attr.flags & FLAG_ATTACHED != 0 && !inode.attr.is_directory();
        if is_attached && self.may_have_copy(inode.attr.ino)? {
            self.tx.delete(&keys::copy(inode.attr.ino))?;
        }
        Ok(())
    }

    /// True if the store has anything in a directory.
    pub(crate) fn has_places(&self, directory: Ino) -> Answer<bool> {
        let (first, last) = keys::places_in(directory);
        Ok(self.tx.first_in(first.bytes(), last.bytes())?.is_some())
    }

    /// True unless a place has the only data of a file that is not resident, or a directory that is not empty.
    pub(crate) fn may_be_lost(&self, parent: Ino, name: &[u8], placed: &Placed) -> Answer<bool> {
        let copy = self.copy_record(placed.ino)?.filter(|copy| copy.is_at(parent, name));
        let Some(copy) = copy else { return Ok(true) };
        let inode = self.find_inode(placed.ino)?;
        if placed.kind == Kind::Directory {
            // The store may have more in an unlisted one.
            let is_listed = inode.is_none_or(|inode| inode.attr.flags & FLAG_UNLISTED == 0);
            return Ok(is_listed && !self.has_places(placed.ino)?);
        }
        Ok(inode.is_none_or(|inode| !inode.attr.is_file() || inode.attr.is_resident())
            || self.find_further(placed.ino, (Ino(0), b""), Some(copy.generation))?.is_some())
    }

    /// Notes that the store no longer has at a place what it had. [`Code::Busy`] if it may not be lost.
    pub(crate) fn lose_place(&mut self, c: &mut Context<'_>, parent: Ino, name: &[u8]) -> Answer<()> {
        let Some(placed) = self.placed(parent, name)? else { return Ok(()) };
        if !self.may_be_lost(parent, name, &placed)? {
            return Err(Code::Busy);
        }
        let ino = placed.ino;
        self.tx.delete(keys::place(parent, name).bytes())?;
        if self.find_inode(ino)?.is_none() {
            self.forget_linked_file(parent, ino, &placed.version)?;
        }
        let copy = self.copy_record(ino)?.filter(|copy| copy.is_at(parent, name));
        let Some(copy) = copy else {
            self.tx.delete(keys::further(ino, parent, name).bytes())?;
            return self.note_further(c.now, ino, (parent, name));
        };
        let mut next = self.find_further(ino, (Ino(0), b""), Some(copy.generation))?;
        let is_same = next.is_some();
        if next.is_none() {
            next = self.find_further(ino, (Ino(0), b""), None)?;
        }
        match next {
            Some(Further { parent, name }) => {
                let (epoch, generation) = match is_same {
                    true => (copy.epoch, copy.generation),
                    false => (EPOCH_UNKNOWN, copy.generation + 1),
                };
                self.tx.delete(keys::further(ino, parent, &name).bytes())?;
                self.put_copy(ino, &Copy { epoch, generation, parent, name: name.clone() })?;
                // Changes of the inode were noted at the lost place.
                self.note_place(c.now, parent, &name)?;
            }
            None => drop(self.tx.delete(&keys::copy(ino))?),
        }
        match is_same {
            true => Ok(()),
            false => self.make_dirty(c, ino),
        }
    }

    /// The pool forgets what the store has of an inode, or with `at` what it has at this place alone. [`Code::Busy`],
    /// unless `discard`: another place of it is pending, or `at` has the only data of a file.
    pub(crate) fn forget_places_of(
        &mut self,
        ino: Ino,
        at: Option<(Ino, &[u8])>,
        discard: bool,
    ) -> Answer<()> {
        match at {
            Some((parent, name)) => self.forget_place_of(ino, parent, name, discard),
            None => self.forget_all_places_of(ino, discard),
        }
    }

    fn forget_place_of(&mut self, ino: Ino, parent: Ino, name: &[u8], discard: bool) -> Answer<()> {
        let Some(copy) = self.copy_record(ino)?.filter(|copy| copy.is_at(parent, name)) else {
            self.tx.delete(keys::further(ino, parent, name).bytes())?;
            return Ok(());
        };
        let next = self.find_further(ino, (Ino(0), b""), Some(copy.generation))?;
        if next.is_none() && !discard {
            return Err(Code::Busy);
        }
        match next {
            Some(Further { parent, name }) => {
                self.tx.delete(keys::further(ino, parent, &name).bytes())?;
                self.put_copy(ino, &Copy { parent, name, ..copy })
            }
            // Its further places, if any, are forgotten with its other names.
            None => self.tx.delete(&keys::copy(ino)).map(drop),
        }
    }

    fn forget_all_places_of(&mut self, ino: Ino, discard: bool) -> Answer<()> {
        let mut places: Vec<(Ino, Vec<u8>)> = Vec::new();
        let mut behind = (Ino(0), Vec::new());
        while let Some(Further { parent, name }) = self.find_further(ino, (behind.0, &behind.1), None)? {
            places.push((parent, name.clone()));
            behind = (parent, name);
        }
        let furthers = places.len();
        places.extend(self.copy_record(ino)?.map(|copy| (copy.parent, copy.name)));
        for (parent, name) in &places {
            if !discard && self.is_pending(*parent, name)? {
                return Err(Code::Busy);
            }
        }
        for (i, (parent, name)) in places.iter().enumerate() {
            self.drop_place(*parent, name)?;
            if i < furthers {
                self.tx.delete(keys::further(ino, *parent, name).bytes())?;
            }
        }
        self.tx.delete(&keys::copy(ino)).map(drop)
    }

    /// A mover is about to remove what the store has at a place: a clean file whose only copy that is differs from now on.
    pub(crate) fn expect_loss(
        &mut self,
        c: &mut Context<'_>,
        parent: Ino,
        name: &[u8],
        ino: Ino,
    ) -> Answer<()> {
        let Some(copy) = self.copy_record(ino)?.filter(|copy| copy.is_at(parent, name)) else {
            return Ok(());
        };
        match self.find_further(ino, (Ino(0), b""), Some(copy.generation))? {
            Some(_) => Ok(()),
            None => self.make_dirty(c, ino),
        }
    }

    /// The store does not have a file's present data any longer: as if the file were marked.
    fn make_dirty(&mut self, c: &mut Context<'_>, ino: Ino) -> Answer<()> {
        match self.find_inode(ino)? {
            Some(mut inode)
                if inode.attr.is_file() && inode.attr.is_resident() && inode.attr.flags & FLAG_DIRTY == 0 =>
            {
                inode.attr.next_epoch();
                inode.attr.flags |= FLAG_DIRTY;
                self.store_inode(&inode)?;
                c.effects.inode(inode.entry());
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The store was found to have something else at a place: if it is the place of a copy, that copy has unknown data,
    /// unless another place has the same.
    pub(crate) fn distrust_copy(&mut self, c: &mut Context<'_>, parent: Ino, name: &[u8]) -> Answer<()> {
        let Some(Placed { ino, kind: Kind::File, .. }) = self.placed(parent, name)? else { return Ok(()) };
        match self.copy_record(ino)? {
            Some(copy) if copy.is_at(parent, name) => {
                let same = self.find_further(ino, (Ino(0), b""), Some(copy.generation))?;
                if let Some(other) = same {
                    // Another name has the data.
                    self.tx.delete(keys::further(ino, other.parent, &other.name).bytes())?;
                    self.put_further(ino, parent, name, NO_GENERATION)?;
                    let Further { parent, name } = other;
                    // Changes of the inode were noted at the distrusted place.
                    self.note_place(c.now, parent, &name)?;
                    return self.put_copy(ino, &Copy { parent, name, ..copy });
                }
                let generation = copy.generation + 1;
                self.put_copy(ino, &Copy { epoch: EPOCH_UNKNOWN, generation, ..copy })?;
                self.make_dirty(c, ino)
            }
            _ => match self.further_at(ino, parent, name)? {
                Some(_) => self.put_further(ino, parent, name, NO_GENERATION),
                None => Ok(()),
            },
        }
    }

    /// A place has a version of an existing inode; `epoch` names the file's data in it, if they are known. Returns
    /// whether the place is to be looked at once more: changes of the inode may have been noted elsewhere.
    pub(crate) fn note_copy(
        &mut self,
        c: &mut Context<'_>,
        inode: &Inode,
        epoch: u64,
        parent: Ino,
        name: &[u8],
        is_new_version: bool,
    ) -> Answer<bool> {
        let ino = inode.attr.ino;
        let Some(copy) = self.copy_or_mark(ino)? else {
            self.put_copy(ino, &Copy::first(epoch, parent, name))?;
            return Ok(false);
        };
        if copy.is_mark() {
            self.put_copy(ino, &Copy::first(epoch, parent, name))?;
            return Ok(true);
        }
        let is_same = epoch == copy.epoch && epoch != EPOCH_UNKNOWN;
        if copy.is_at(parent, name) {
            let is_same = is_same && (inode.attr.is_resident() || !is_new_version);
            let generation = if is_same { copy.generation } else { copy.generation + 1 };
            self.put_copy(ino, &Copy { epoch, generation, ..copy })?;
            if epoch == EPOCH_UNKNOWN {
                self.make_dirty(c, ino)?;
            }
            return Ok(false);
        }
        if is_same || epoch == EPOCH_UNKNOWN {
            let generation = if is_same { copy.generation } else { NO_GENERATION };
            self.put_further(ino, parent, name, generation)?;
            return Ok(false);
        }
        self.put_further(ino, copy.parent, &copy.name, copy.generation)?;
        self.tx.delete(keys::further(ino, parent, name).bytes())?;
        let generation = copy.generation + 1;
        self.put_copy(ino, &Copy { epoch, generation, parent, name: name.to_vec() })?;
        Ok(true)
    }

    /// What a store had at one place is at another.
    pub(crate) fn move_copy(
        &mut self,
        now: Timestamp,
        ino: Ino,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
    ) -> Answer<()> {
        let Some(copy) = self.copy_record(ino)? else {
            // An inode without a link.
            self.tx.delete(keys::further(ino, from.0, from.1).bytes())?;
            return Ok(());
        };
        if copy.is_at(from.0, from.1) {
            self.tx.delete(keys::further(ino, to.0, to.1).bytes())?;
            self.put_copy(ino, &Copy { parent: to.0, name: to.1.to_vec(), ..copy })?;
        } else if let Some(generation) = self.further_at(ino, from.0, from.1)? {
            self.tx.delete(keys::further(ino, from.0, from.1).bytes())?;
            if !copy.is_at(to.0, to.1) {
                self.put_further(ino, to.0, to.1, generation)?;
            }
        }
        self.note_further(now, ino, (Ino(0), b""))
    }
}
