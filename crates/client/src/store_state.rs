//! What a program can learn of a file in front of a backing store, and do with it: its state, whether the store has it,
//! restoring, releasing, pinning. Each call concerns one inode; the `forebay` command walks trees.

use std::time::{Duration, Instant};

use forebay_types::{
    Attr, Code, Entry, Ino, PendingPlace, Placed, Reply, Request, SetAttr, StorePlace, TimeSet, Timestamp,
    FLAG_ATTACHED, FLAG_DIRTY, FLAG_DRAINING, FLAG_PINNED,
};

use crate::leased::LeaseKind;
use crate::pool::Pool;

/// Pause between two looks whether the store has a file.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// How often a release that is taken back begins anew because a program has set the file's times.
const TAKE_BACK_ATTEMPTS: u32 = 20;

/// Where an inode's data are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DataState {
    /// In the pool: it belongs to no store.
    Unattached,
    /// In the store alone.
    Released,
    /// In both, equal.
    Clean,
    /// In the pool, newer than in the store.
    Dirty,
    /// The same, and they are being copied.
    Draining,
}

impl DataState {
    /// The state of an inode.
    pub fn of(attr: &Attr) -> DataState {
        match attr.flags {
            flags if flags & FLAG_ATTACHED == 0 => DataState::Unattached,
            _ if attr.is_file() && !attr.is_resident() => DataState::Released,
            flags if flags & FLAG_DRAINING != 0 => DataState::Draining,
            flags if flags & FLAG_DIRTY != 0 => DataState::Dirty,
            _ => DataState::Clean,
        }
    }
}

/// What a store has of an inode.
#[derive(Clone, Copy, Debug)]
pub struct StoreState {
    /// The attributes in the pool.
    pub attr: Attr,
    /// Where its data are.
    pub data: DataState,
    /// The last version that was published to the store, or imported from it.
    pub placed: Option<Placed>,
    /// The store differs from the pool in data, names or attributes.
    pub is_pending: bool,
    /// The store has a version that others wrote.
    pub conflict: bool,
}

impl StoreState {
    /// True if the store has all that the pool has of it.
    pub fn is_durable(&self) -> bool {
        !self.is_pending && matches!(self.data, DataState::Released | DataState::Clean)
    }
}

/// Why a file was not released.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kept {
    /// It is released already.
    Released,
    /// Its data are not in the store yet, or it is pinned, open, or of no store.
    Because(String),
}

impl Kept {
    /// For this reason.
    pub fn because(why: &str) -> Kept {
        Kept::Because(why.to_owned())
    }
}

fn bytes<T>(reply: Reply<'_>, read: impl FnOnce(&[u8]) -> Result<T, Code>) -> Result<T, Code> {
    match reply {
        Reply::Bytes(bytes) => read(bytes),
        _ => Err(Code::Malformed),
    }
}

impl Pool {
    /// The pending place of a name; none if it is not pending.
    pub fn pending_place(&self, parent: Ino, name: &[u8]) -> Result<Option<PendingPlace>, Code> {
        // Places come in the order of their names, from the one behind the given one on.
        let mut behind = name[..name.len().saturating_sub(1)].to_vec();
        loop {
            let request = Request::Pending { parent, name: &behind };
            let places = self.request(&request, |reply| bytes(reply, PendingPlace::decode_list))?;
            let Some(last) = places.last().map(|place| (place.parent, place.name.clone())) else {
                return Ok(None);
            };
            let found = places.into_iter().find(|place| (place.parent, &place.name[..]) >= (parent, name));
            match found {
                Some(place) => {
                    return Ok(Some(place).filter(|place| place.parent == parent && place.name == name))
                }
                None => behind = last.1,
            }
        }
    }

    /// What the store has of an inode. `name` is a name of it: a directory and the name there.
    pub fn store_state(&self, ino: Ino, name: Option<(Ino, &[u8])>) -> Result<StoreState, Code> {
        let attr = self.get_attr(ino)?.attr;
        let data = DataState::of(&attr);
        let mut state = StoreState { attr, data, placed: None, is_pending: false, conflict: false };
        if data == DataState::Unattached {
            return Ok(state);
        }
        let place = match self.request(&Request::StorePlace { ino }, |reply| bytes(reply, StorePlace::decode))
        {
            Ok(place) => Some(place),
            Err(Code::NotFound) => None,
            Err(code) => return Err(code),
        };
        let mut places: Vec<(Ino, Vec<u8>)> =
            name.map(|(parent, name)| (parent, name.to_vec())).into_iter().collect();
        match &place {
            // The directory with the store.
            Some(place) if place.path.is_empty() => places.clear(),
            Some(place) => {
                let name = place.path.rsplit(|b| *b == b'/').next().unwrap_or_default();
                places.push((place.parent, name.to_vec()));
            }
            None => state.is_pending = true,
        }
        places.dedup();
        for (parent, name) in places {
            if let Some(pending) = self.pending_place(parent, &name)? {
                state.is_pending = true;
                state.conflict |= pending.conflict;
            }
        }
        state.placed = place.and_then(|place| place.placed);
        Ok(state)
    }

    /// Waits until the store has an inode, as its policy copies it; `limit` is how long at most. [`Code::TimedOut`]
    /// after that; [`Code::Exists`] if it is in conflict; [`Code::NoAttribute`] if no store is attached there.
    pub fn wait_durable(
        &self,
        ino: Ino,
        name: Option<(Ino, &[u8])>,
        limit: Option<Duration>,
    ) -> Result<(), Code> {
        let until = limit.map(|limit| Instant::now() + limit);
        loop {
            let state = self.store_state(ino, name)?;
            match () {
                () if state.data == DataState::Unattached => return Err(Code::NoAttribute),
                () if state.is_durable() => return Ok(()),
                () if state.conflict => return Err(Code::Exists),
                () if until.is_some_and(|until| Instant::now() >= until) => return Err(Code::TimedOut),
                () => std::thread::sleep(LOOK_AGAIN),
            }
        }
    }

    /// Releases a file whose data are on this node: its data leave the pool, its attributes stay. Returns the bytes that
    /// this freed. [`Code::NotSupported`] if another node has data of it: its programs are kept out by its mover, so a task does it.
    pub fn release_file(&self, entry: &Entry) -> Result<Result<u64, Kept>, Code> {
        if let Some(kept) = self.must_be_kept(entry) {
            return Ok(Err(kept));
        }
        if entry.layout.stripes().any(|at| self.backing_elsewhere(entry, at.0, at.1).is_some()) {
            return Err(Code::NotSupported);
        }
        let held = match self.lease_files(entry, LeaseKind::Write) {
            Ok(held) => held,
            // EAGAIN of an open in conflict with another lease has the code of EIO.
            Err(Code::Busy | Code::Io) => return Ok(Err(Kept::because("a program has it open"))),
            Err(Code::Stale | Code::NotFound) => return Ok(Err(Kept::because("it was removed"))),
            Err(code) => return Err(code),
        };
        self.release_leased(entry, || held.is_undisturbed())
    }

    /// Why a file's present state does not allow its release.
    pub fn must_be_kept(&self, entry: &Entry) -> Option<Kept> {
        let attr = &entry.attr;
        match () {
            () if !attr.is_file() || attr.flags & FLAG_ATTACHED == 0 => {
                Some(Kept::because("no store has it"))
            }
            () if !attr.is_resident() => Some(Kept::Released),
            () if attr.flags & (FLAG_DIRTY | FLAG_DRAINING) != 0 => {
                Some(Kept::because("the store does not have its data yet"))
            }
            () if attr.flags & FLAG_PINNED != 0 => Some(Kept::because("it is pinned")),
            () => None,
        }
    }

    /// Releases a file on all of whose backing files the caller has write leases, and unlinks those of this node.
    /// `is_whole` says whether none of the leases was lost. Returns the bytes that this freed.
    pub fn release_leased(
        &self,
        entry: &Entry,
        is_whole: impl FnOnce() -> bool,
    ) -> Result<Result<u64, Kept>, Code> {
        let attr = &entry.attr;
        let kept = |why| Ok(Err(Kept::because(why)));
        let st = self.stat_entry(entry)?;
        let at = |sec: i64, nsec: i64| TimeSet::At(Timestamp { sec, nsec: nsec as u32 });
        let set = SetAttr {
            size: Some(st.st_size as u64),
            atime: at(st.st_atime, st.st_atime_nsec),
            mtime: at(st.st_mtime, st.st_mtime_nsec),
            ..SetAttr::default()
        };
        let released = match self.ask_entry(&Request::Release { ino: attr.ino, epoch: attr.epoch(), set }) {
            Ok(released) => released,
            Err(Code::Stale) => return kept("a program changed it"),
            Err(Code::Busy) => return kept("it is pinned, or the store does not have its attributes yet"),
            Err(Code::NotFound) => return kept("it was removed"),
            Err(code) => return Err(code),
        };
        if !is_whole() {
            // A lease was lost, and a program may have the file open: it stays.
            self.take_back_release(Entry { layout: entry.layout, ..released })?;
            return kept("a program has it open");
        }
        self.unlink_released(entry)?;
        Ok(Ok(st.st_blocks as u64 * 512))
    }

    /// A file that was just released, and whose backing files are there, is resident again. `released` has its attributes
    /// and the layout of these.
    pub(crate) fn take_back_release(&self, mut released: Entry) -> Result<(), Code> {
        let Attr { ino, .. } = released.attr;
        for _ in 0..TAKE_BACK_ATTEMPTS {
            match self.ask_entry(&Request::restored(&released)) {
                // A program has set its times meanwhile.
                Err(Code::Busy) => {}
                Ok(_) | Err(Code::NotFound) => return Ok(()),
                Err(Code::Stale) => break,
                Err(code) => return Err(code),
            }
            let now = match self.get_attr(ino) {
                Err(Code::NotFound) => return Ok(()),
                now => now?,
            };
            if now.attr.is_resident() || now.attr.epoch() != released.attr.epoch() {
                break;
            }
            let Attr { atime, mtime, .. } = now.attr;
            match self.set_times_of_data(&released, TimeSet::At(atime), TimeSet::At(mtime)) {
                Err(Code::Stale) => return Ok(()),
                set => set?,
            }
            (released.attr.atime, released.attr.mtime) = (atime, mtime);
        }
        // It was restored into one backing file: no layout leads to its stripes any more.
        match self.get_attr(ino) {
            Ok(now) if now.attr.is_resident() && now.layout.is_single() && !released.layout.is_single() => {
                self.unlink_released(&released)
            }
            Ok(_) | Err(Code::NotFound) => Ok(()),
            Err(code) => Err(code),
        }
    }

    /// Pins a file or directory, so that it is not released, or unpins it.
    pub fn pin(&self, ino: Ino, pinned: bool) -> Result<(), Code> {
        self.ask_entry(&Request::Pin { ino, pinned }).map(|_| ())
    }
}
