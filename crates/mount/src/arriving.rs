//! Opens for reading of files that are being restored from a backing store. The kernel reads them by requests, and each
//! request waits for its own ranges alone.
//!
//! What has arrived is read from the backing file that the mover fills, which has it for ever
//! (`crates/client/src/ranges.rs`). Once the file is resident, an open reads the file's backing file like any other, by
//! requests still: the kernel refuses a mapping of such an open while others use passthrough, so that all opens of the
//! inode are by requests until the last is released. An open reads data of one version alone: when another program
//! changes the file in the store meanwhile, what has not arrived yet gives EIO.
//!
//! What the pool has no room for is read from the store alone, from the version that the first such read finds there. From
//! time to time a read asks again whether there is room. Meanwhile the pool may release the file and take over another
//! version. Both give the file a new epoch, as a program that writes does, so the epoch does not show which of them it
//! was. Such an open therefore reads on only while size and modification time stay as they were.
//!
//! In a pool of several nodes the file is placed on this node when it is opened. When it comes to another node all the
//! same, since it was not read yet, an open reads it there.
//!
//! A file that loses its last name through the mount is restored whole first. One that loses it elsewhere gives EIO for
//! what has not arrived. The mutex is a leaf. Tests: beside the code, `crates/mount/tests/arriving.rs` and `without_room.rs`.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_client::{Arrived, File, Pool};
use forebay_types::{Code, Entry, Ino, RestoredRange, StoreVersion, Timestamp};

use crate::errno::Errno;
use crate::opened::{fstat, open_backing, Opened};

/// How often a read starts over because a restore begins anew.
const ATTEMPTS: u32 = 100;
/// How long an open reads from the store alone before it asks again whether there is room in the pool; doubled each time.
const NO_ROOM_FIRST: Duration = Duration::from_secs(1);
const NO_ROOM_MAX: Duration = Duration::from_secs(30);

/// What tells a file's data from those of another version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Data {
    epoch: u64,
    /// How many versions of other programs the file has taken over.
    taken_over: u64,
    bytes: u64,
    mtime: Timestamp,
}

impl Data {
    fn of(entry: &Entry) -> Data {
        let attr = &entry.attr;
        Data {
            epoch: attr.epoch(),
            taken_over: attr.versions_taken_over(),
            bytes: attr.size,
            mtime: attr.mtime,
        }
    }

    /// True when a reader of `self` may go on with the data that the entry has now: they are the same, or programs of
    /// the pool wrote the file meanwhile. `from_store`: it has read what it has no backing file of.
    fn may_become(&self, now: &Data, from_store: bool) -> bool {
        match from_store {
            true => (self.bytes, self.mtime) == (now.bytes, now.mtime),
            false => self.taken_over == now.taken_over && self.epoch != now.epoch || self == now,
        }
    }
}

/// The ranges of a file that an open knows to have arrived, in their order, apart.
#[derive(Debug, Default)]
struct Known(Vec<Range<u64>>);

impl Known {
    fn add(&mut self, mut new: Range<u64>) {
        self.0.retain(|old| {
            let is_apart = old.end < new.start || new.end < old.start;
            if !is_apart {
                new = new.start.min(old.start)..new.end.max(old.end);
            }
            is_apart
        });
        let at = self.0.partition_point(|old| old.start < new.start);
        self.0.insert(at, new);
    }

    /// The first byte of a range that is not known to have arrived.
    fn first_missing(&self, range: &Range<u64>) -> Option<u64> {
        let there = self.0.iter().find(|known| known.contains(&range.start));
        let missing = there.map_or(range.start, |known| known.end);
        (missing < range.end).then_some(missing)
    }
}

/// How an open reads what the pool has no room for.
#[derive(Debug)]
struct FromStore {
    /// The version that it reads, once it has looked. Another is chosen until something was read.
    version: Option<StoreVersion>,
    /// It has read some of it, or of a backing file that it has given up.
    has_read: bool,
    /// Until when it does not ask whether there is room, and how long after that.
    until: Option<Instant>,
    pause: Duration,
}

impl FromStore {
    fn new() -> FromStore {
        FromStore { version: None, has_read: false, until: None, pause: NO_ROOM_FIRST }
    }

    /// There is no room.
    fn note(&mut self) {
        self.until = Some(Instant::now() + self.pause);
        self.pause = (2 * self.pause).min(NO_ROOM_MAX);
    }

    fn is_now(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() < until)
    }
}

#[derive(Debug)]
struct State {
    data: Data,
    /// The backing file, and the kernel's number of it.
    file: Option<(Arc<OwnedFd>, u64)>,
    known: Known,
    /// The file is that of the resident file.
    is_whole: bool,
    /// The file, when its data came to another node.
    elsewhere: Option<Arc<File>>,
    from_store: FromStore,
}

impl State {
    /// True once a program may have read from the file's data.
    fn has_read(&self) -> bool {
        self.file.is_some() || self.from_store.has_read
    }
}

/// Where a range can be read.
pub(crate) enum Readable {
    /// In a backing file.
    Here(Arc<OwnedFd>),
    /// On another node.
    Elsewhere(Arc<File>),
    /// These are its bytes, from the store.
    Read(Vec<u8>),
    /// It is behind the end of the file.
    Nothing,
}

/// An open for reading of a file that was released.
#[derive(Debug)]
pub(crate) struct Arriving {
    ino: Ino,
    opened: Arc<Opened>,
    state: Mutex<State>,
    count: Arc<AtomicUsize>,
}

impl Drop for Arriving {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Arriving {
    pub(crate) fn new(entry: &Entry, opened: Arc<Opened>, count: Arc<AtomicUsize>) -> Arriving {
        count.fetch_add(1, Ordering::Relaxed);
        let state = State {
            data: Data::of(entry),
            file: None,
            known: Known::default(),
            is_whole: false,
            elsewhere: None,
            from_store: FromStore::new(),
        };
        Arriving { ino: entry.attr.ino, opened, state: Mutex::new(state), count }
    }

    pub(crate) fn ino(&self) -> Ino {
        self.ino
    }

    /// Size and times of the file, after it has lost its name.
    pub(crate) fn stat(&self) -> Result<libc::stat, Errno> {
        let state = self.state();
        if let Some(file) = &state.elsewhere {
            return Ok(file.stat()?);
        }
        if let State { file: Some((file, _)), is_whole: true, .. } = &*state {
            return fstat(file);
        }
        // SAFETY: an all-zero stat is valid.
        let mut st: libc::stat = unsafe { std::mem::zeroed() };
        st.st_size = state.data.bytes as i64;
        let mtime = state.data.mtime;
        (st.st_atime, st.st_mtime, st.st_ctime) = (mtime.sec, mtime.sec, mtime.sec);
        (st.st_atime_nsec, st.st_mtime_nsec, st.st_ctime_nsec) =
            (mtime.nsec.into(), mtime.nsec.into(), mtime.nsec.into());
        Ok(st)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True when a read need not wait.
    pub(crate) fn is_there(&self, pool: &Pool, offset: u64, len: usize) -> bool {
        if self.state().is_whole {
            return true;
        }
        match pool.get_attr(self.ino) {
            Ok(entry) if !entry.attr.is_resident() => {
                let range = offset..entry.attr.size.min(offset.saturating_add(len as u64));
                self.state().known.first_missing(&range).is_none()
            }
            _ => true,
        }
    }

    /// From what a range can be read up to the file's end, once it has arrived.
    pub(crate) fn wait_for(&self, pool: &Pool, offset: u64, len: usize) -> Result<Readable, Errno> {
        for _ in 0..ATTEMPTS {
            match &*self.state() {
                State { file: Some((file, _)), is_whole: true, .. } => {
                    return Ok(Readable::Here(Arc::clone(file)));
                }
                State { elsewhere: Some(file), .. } => return Ok(Readable::Elsewhere(Arc::clone(file))),
                _ => {}
            }
            let end = offset.saturating_add(len as u64);
            let entry = match pool.get_attr(self.ino) {
                Ok(entry) => entry,
                Err(Code::NotFound) => return self.without_a_name(offset..end),
                Err(code) => return Err(code.into()),
            };
            if !pool.is_one_here(&entry.layout) {
                match self.go_elsewhere(pool, &entry) {
                    Ok(file) => return Ok(Readable::Elsewhere(file)),
                    Err(Errno(libc::ESTALE)) => continue,
                    Err(e) => return Err(e),
                }
            }
            if entry.attr.is_resident() {
                match self.go_over(pool, &entry) {
                    Ok(file) => return Ok(Readable::Here(file)),
                    Err(Errno(libc::ESTALE)) => continue, // it has lost its name, or was released again
                    Err(e) => return Err(e),
                }
            }
            let range = offset..end.min(entry.attr.size);
            if range.is_empty() {
                return Ok(Readable::Nothing);
            }
            let (missing, is_from_store) = {
                let state = self.state();
                match (state.known.first_missing(&range), &state.file) {
                    (None, Some((file, _))) => return Ok(Readable::Here(Arc::clone(file))),
                    (missing, _) => (missing.unwrap_or(range.start), state.from_store.is_now()),
                }
            };
            if !is_from_store {
                match pool.restore_range(self.ino, missing) {
                    Ok(Arrived::Range(arrived)) if arrived.backing != RestoredRange::NO_ROOM => {
                        self.note(pool, arrived.backing, arrived.from..arrived.to)?;
                        continue;
                    }
                    Ok(Arrived::Range(_)) | Err(Code::NoSpace) => self.note_no_room(),
                    Ok(Arrived::Whole(_)) | Err(Code::Stale) => continue,
                    // The store may deliver, although the node with the file does not answer.
                    Err(_) if self.state().from_store.has_read => self.state().from_store.note(),
                    Err(code) => return Err(code.into()),
                }
            }
            if let Some(data) = self.read_from_store(pool, range)? {
                return Ok(Readable::Read(data));
            }
        }
        tracing::warn!("the restore of file {} begins anew all the time: a read fails", self.ino);
        Err(Errno(libc::EIO))
    }

    /// Reads a range of a released file from its store. None if the file is to be looked at again.
    fn read_from_store(&self, pool: &Pool, range: Range<u64>) -> Result<Option<Vec<u8>>, Errno> {
        let chosen = self.state().from_store.version;
        let version = match chosen {
            Some(version) => version,
            None => match self.choose_version(pool)? {
                Some(version) => version,
                None => return Ok(None),
            },
        };
        let read = pool.read_from_store(self.ino, &version, range);
        let now = match pool.get_attr(self.ino) {
            Ok(now) => now,
            Err(Code::NotFound) => return Ok(None),
            Err(code) => return Err(code.into()),
        };
        let mut state = self.state();
        match read {
            Ok(data) => {
                // The pool took over another version while this one was chosen.
                self.check_data(&mut state, &now)?;
                if state.from_store.version != Some(version) {
                    return Ok(None); // another read of this open has chosen again
                }
                state.from_store.has_read = true;
                Ok(Some(data))
            }
            // The resident file's data are compared.
            Err(Code::Stale | Code::NotFound) if now.attr.is_resident() => Ok(None),
            Err(Code::Stale | Code::NotFound) if state.from_store.has_read => Err(self.was_changed()),
            Err(Code::Stale | Code::NotFound) => {
                // Programs of the pool wrote it, or nothing was read yet.
                if now.attr.epoch() == state.data.epoch && state.has_read() {
                    return Err(self.was_changed());
                }
                state.from_store.version = None;
                Ok(None)
            }
            Err(code) => Err(code.into()),
        }
    }

    /// Chooses the version of the store's file that this open reads: that of the data which it has read, if it has. None if
    /// the file is to be looked at again.
    fn choose_version(&self, pool: &Pool) -> Result<Option<StoreVersion>, Errno> {
        let looked = pool.store_version(self.ino).and_then(|version| Ok((version, pool.get_attr(self.ino)?)));
        let (version, now) = match looked {
            Ok(looked) => looked,
            Err(Code::NotFound) => return Ok(None),
            Err(code) => return Err(code.into()),
        };
        let mut state = self.state();
        self.check_data(&mut state, &now)?;
        // A file system's times are those that the pool shows, unless the pool has changed them since.
        let is_same = (version.bytes, version.mtime) == (now.attr.size, now.attr.mtime);
        if state.has_read() && version.ino != 0 && !is_same {
            return Err(self.was_changed());
        }
        state.from_store.version = Some(version);
        Ok(Some(version))
    }

    /// There is no room for the file. The space of what a restore copied in vain is free once no open has it.
    fn note_no_room(&self) {
        let mut state = self.state();
        state.from_store.note();
        let is_unlinked = |(file, _): &(Arc<OwnedFd>, u64)| fstat(file).is_ok_and(|st| st.st_nlink == 0);
        if !state.is_whole && state.file.as_ref().is_some_and(is_unlinked) {
            (state.file, state.known) = (None, Known::default());
            state.from_store.has_read = true;
        }
    }

    fn was_changed(&self) -> Errno {
        tracing::warn!("file {} was changed in its store while a program read it: the read fails", self.ino);
        Errno(libc::EIO)
    }

    /// A range has arrived in a backing file.
    fn note(&self, pool: &Pool, backing: u64, range: Range<u64>) -> Result<(), Errno> {
        let mut state = self.state();
        if state.file.as_ref().is_none_or(|(_, number)| *number != backing) {
            let Ok(entry) = pool.get_attr(self.ino) else { return Ok(()) };
            let file = match pool.open_arriving(&entry) {
                Ok(file) => file,
                Err(Code::NotFound) => return Ok(()), // the restore begins anew, or has failed
                Err(code) => return Err(code.into()),
            };
            if fstat(&file)?.st_ino != backing {
                return Ok(());
            }
            self.check_data(&mut state, &entry)?;
            state.file = Some((Arc::new(file), backing));
            state.known = Known::default();
        }
        state.known.add(range);
        Ok(())
    }

    /// Goes over from what has arrived to the backing file of the resident file.
    fn go_over(&self, pool: &Pool, entry: &Entry) -> Result<Arc<OwnedFd>, Errno> {
        let file = Arc::new(open_backing(pool, entry, libc::O_RDONLY).map_err(|code| match code {
            Code::NotFound => Errno(libc::ESTALE),
            code => code.into(),
        })?);
        let number = fstat(&file)?.st_ino;
        let mut state = self.state();
        if state.file.as_ref().is_none_or(|(_, before)| *before != number) {
            self.check_data(&mut state, entry)?;
        }
        self.opened.note_whole(&file);
        (state.file, state.is_whole) = (Some((Arc::clone(&file), number)), true);
        Ok(file)
    }

    /// Goes over to a file whose data are on another node, or come there. The other nodes' opens of a file that has data
    /// here keep it from being released, so that this open has read nothing, or the file was written meanwhile.
    fn go_elsewhere(&self, pool: &Pool, entry: &Entry) -> Result<Arc<File>, Errno> {
        let file =
            pool.resident(entry).and_then(|entry| pool.open_file(&entry, false).map(|file| (entry, file)));
        let (entry, file) = file.map_err(|code| match code {
            Code::NotFound | Code::Stale => Errno(libc::ESTALE),
            code => code.into(),
        })?;
        let mut state = self.state();
        self.check_data(&mut state, &entry)?;
        let file = Arc::new(file);
        state.elsewhere = Some(Arc::clone(&file));
        Ok(file)
    }

    /// Refuses another version's data, unless nothing was read yet.
    fn check_data(&self, state: &mut State, entry: &Entry) -> Result<(), Errno> {
        let now = Data::of(entry);
        let from_store = state.from_store.has_read;
        if state.has_read() && !state.data.may_become(&now, from_store) {
            return Err(self.was_changed());
        }
        if state.data != now && !from_store {
            // A read that is under way with the version of other data is made again.
            state.from_store.version = None;
        }
        state.data = now;
        Ok(())
    }

    /// The file has lost its last name: what has arrived can still be read.
    fn without_a_name(&self, range: Range<u64>) -> Result<Readable, Errno> {
        if let Some(file) = self.opened.any() {
            let mut state = self.state();
            let number = fstat(&file)?.st_ino;
            (state.file, state.is_whole) = (Some((Arc::clone(&file), number)), true);
            return Ok(Readable::Here(file));
        }
        let state = self.state();
        let range = range.start..range.end.min(state.data.bytes);
        if range.is_empty() {
            return Ok(Readable::Nothing);
        }
        let Some((file, _)) = &state.file else { return Err(Errno(libc::EIO)) };
        match forebay_client::has_arrived(fstat(file)?.st_mode) || state.known.first_missing(&range).is_none()
        {
            true => Ok(Readable::Here(Arc::clone(file))),
            false => Err(Errno(libc::EIO)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_ranges_that_touch_are_one() {
        let mut known = Known::default();
        for range in [10..20, 40..50, 20..30, 0..5, 35..45] {
            known.add(range);
        }
        assert_eq!(known.0, [0..5, 10..30, 35..50]);
        known.add(4..36);
        assert!(known.0.len() == 1 && known.0[0] == (0..50));
    }

    #[test]
    fn first_missing_byte_is_behind_what_is_known() {
        let mut known = Known::default();
        known.add(10..20);
        assert_eq!(known.first_missing(&(10..20)), None);
        assert_eq!(known.first_missing(&(12..21)), Some(20));
        assert_eq!(known.first_missing(&(5..12)), Some(5));
        assert_eq!(known.first_missing(&(20..22)), Some(20));
        assert_eq!(known.first_missing(&(22..22)), None, "nothing is read");
    }

    #[test]
    fn data_of_another_version_are_refused_unless_programs_of_the_pool_wrote_them() {
        let data =
            |epoch, bytes, sec| Data { epoch, taken_over: 0, bytes, mtime: Timestamp { sec, nsec: 0 } };
        let may = |now| data(1, 5, 7).may_become(&now, false);
        assert!(may(data(1, 5, 7)) && !may(data(1, 6, 7)) && !may(data(1, 5, 8)) && may(data(2, 6, 8)));
        let taken_over = Data { taken_over: 1, ..data(2, 6, 8) };
        assert!(!may(taken_over), "another program's version has a new epoch, too");
        // A release and a new place change the epoch, too.
        let may = |now| data(1, 5, 7).may_become(&now, true);
        assert!(may(data(1, 5, 7)) && may(data(2, 5, 7)), "the same data");
        assert!(!may(data(2, 6, 7)) && !may(data(2, 5, 8)) && !may(data(1, 5, 8)));
    }
}
