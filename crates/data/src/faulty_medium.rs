//! The faulty medium: a target in memory that fails and crashes on request, for tests of code that uses a medium.
//!
//! It keeps a live image in memfds, and a durable one that [`Media::sync`] takes. [`FaultyMedium::crash`] simulates the
//! death of the node. Of each backing file it keeps an arbitrary prefix of the changes since the last sync (creation,
//! truncation, times, removal), and an arbitrary subset of the 4 KiB blocks that were written. Backing files are
//! independent of each other, as nothing orders them on a real medium. If a removal is not kept, the file exists again,
//! but without the unsynced writes that preceded the removal.
//!
//! Assumptions: a block is written whole or not at all; ctime after a crash is the time of the crash; descriptors from
//! before a crash belong to the dead node and no longer reach the medium.
//!
//! One lock protects everything. There is no thread. Tests: here, and the suite `tests/media.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_types::{Code, Ino, TimeSet, Timestamp};
use rustix::fs::{MemfdFlags, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use crate::code_of;
use crate::media::{backing_stat, timestamps, Access, BackingStat, Media, Space};

const BLOCK_BYTES: usize = 4096;

type Key = (Ino, usize, u16);

/// A target in memory with a live and a durable image.
#[derive(Debug)]
pub struct FaultyMedium {
    target: u32,
    total_bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    live: BTreeMap<Key, Live>,
    durable: BTreeMap<Key, Image>,
    /// The changes of each backing file since the last sync, in order.
    unsynced: BTreeMap<Key, Vec<Change>>,
    /// Instances made so far. A name that is removed and created again is a new instance.
    instances: u64,
    fault: Option<Fault>,
}

#[derive(Debug)]
struct Live {
    instance: u64,
    file: OwnedFd,
}

#[derive(Debug, Clone, Copy)]
struct Fault {
    calls_left: u64,
    code: Code,
}

#[derive(Debug, Clone, Copy)]
enum Change {
    Create { instance: u64 },
    Remove,
    Truncate { bytes: u64 },
    SetTimes { atime: Timestamp, mtime: Timestamp },
}

/// The contents of a backing file on the medium.
#[derive(Debug, Clone, Default)]
struct Image {
    instance: u64,
    bytes: u64,
    /// Blocks that are not holes, by index, [`BLOCK_BYTES`] each.
    blocks: BTreeMap<u64, Vec<u8>>,
    times: Option<(Timestamp, Timestamp)>,
}

impl FaultyMedium {
    /// An empty target with this number, as layouts name it, that reports a size of `total_bytes`. The size is not
    /// enforced: use [`FaultyMedium::fail_after`] with [`Code::NoSpace`].
    pub fn new(target: u32, total_bytes: u64) -> FaultyMedium {
        FaultyMedium { target, total_bytes, state: Mutex::default() }
    }

    /// Lets the next `calls` calls of [`Media`] pass. Later ones fail with `code` until [`FaultyMedium::heal`].
    pub fn fail_after(&self, calls: u64, code: Code) {
        self.lock().fault = Some(Fault { calls_left: calls, code });
    }

    /// Ends the failures that [`FaultyMedium::fail_after`] set.
    pub fn heal(&self) {
        self.lock().fault = None;
    }

    /// The node dies and restarts. The durable image and an arbitrary part of unsynced changes remain. The same seed
    /// after the same calls gives the same result. Ends failures.
    pub fn crash(&self, seed: u64) -> Result<(), Code> {
        let mut state = self.lock();
        let mut random = SplitMix(seed);
        let keys: BTreeSet<Key> =
            state.durable.keys().chain(state.unsynced.keys()).chain(state.live.keys()).copied().collect();
        let (mut live, mut durable) = (BTreeMap::new(), BTreeMap::new());
        for key in keys {
            let changes = state.unsynced.get(&key).map_or(&[][..], Vec::as_slice);
            let kept = random.below(changes.len() as u64 + 1) as usize;
            let mut image = state.durable.get(&key).cloned();
            for change in &changes[..kept] {
                image = change.apply(image);
            }
            let Some(mut image) = image else { continue };
            if let Some(now) = state.live.get(&key).filter(|now| now.instance == image.instance) {
                image.mix(&Image::of(now)?, &mut random);
            }
            let file = image.write()?;
            // The crash acts as a sync: the remaining data are durable.
            live.insert(key, Live { instance: image.instance, file });
            durable.insert(key, image);
        }
        (state.live, state.durable) = (live, durable);
        state.unsynced.clear();
        state.fault = None;
        Ok(())
    }

    /// The state, also after a test panicked while it held the lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state for one call of [`Media`], or the failure that was set.
    fn call(&self) -> Result<MutexGuard<'_, State>, Code> {
        let mut state = self.lock();
        if let Some(fault) = &mut state.fault {
            match fault.calls_left.checked_sub(1) {
                Some(left) => fault.calls_left = left,
                None => return Err(fault.code),
            }
        }
        Ok(state)
    }
}

impl State {
    fn file(&self, key: Key) -> Result<&OwnedFd, Code> {
        self.live.get(&key).map(|live| &live.file).ok_or(Code::NotFound)
    }

    fn note(&mut self, key: Key, change: Change) {
        self.unsynced.entry(key).or_default().push(change);
    }
}

impl Change {
    fn apply(self, image: Option<Image>) -> Option<Image> {
        match self {
            Change::Create { instance } => Some(Image { instance, ..Image::default() }),
            Change::Remove => None,
            Change::Truncate { bytes } => image.map(|mut image| {
                image.truncate(bytes);
                image
            }),
            Change::SetTimes { atime, mtime } => {
                image.map(|image| Image { times: Some((atime, mtime)), ..image })
            }
        }
    }
}

impl Image {
    fn of(live: &Live) -> Result<Image, Code> {
        let stat = backing_stat(&rustix::fs::fstat(&live.file).map_err(code_of)?);
        let mut blocks = BTreeMap::new();
        let mut at = 0;
        while at < stat.bytes {
            match rustix::fs::seek(&live.file, SeekFrom::Data(at)) {
                Ok(data) => at = data,
                Err(Errno::NXIO) => break,
                Err(e) => return Err(code_of(e)),
            }
            let index = at / BLOCK_BYTES as u64;
            let mut block = vec![0; BLOCK_BYTES];
            read_at(&live.file, &mut block, index * BLOCK_BYTES as u64)?;
            blocks.insert(index, block);
            at = (index + 1) * BLOCK_BYTES as u64;
        }
        let times = Some((stat.atime, stat.mtime));
        Ok(Image { instance: live.instance, bytes: stat.bytes, blocks, times })
    }

    fn truncate(&mut self, bytes: u64) {
        self.bytes = bytes;
        let (last, keep) = (bytes / BLOCK_BYTES as u64, (bytes % BLOCK_BYTES as u64) as usize);
        self.blocks.split_off(&if keep == 0 { last } else { last + 1 });
        if let Some(block) = self.blocks.get_mut(&last) {
            block[keep..].fill(0);
        }
    }

    /// Takes over an arbitrary part of the differences from `now`.
    fn mix(&mut self, now: &Image, random: &mut SplitMix) {
        if random.below(2) == 1 {
            self.bytes = now.bytes;
        }
        let indices: BTreeSet<u64> = self.blocks.keys().chain(now.blocks.keys()).copied().collect();
        for index in indices {
            if random.below(2) == 1 {
                match now.blocks.get(&index) {
                    Some(block) => self.blocks.insert(index, block.clone()),
                    None => self.blocks.remove(&index),
                };
            }
        }
        if random.below(2) == 1 {
            self.times = now.times;
        }
        self.truncate(self.bytes);
    }

    /// A new file with this image's bytes and times.
    fn write(&self) -> Result<OwnedFd, Code> {
        let file = new_file()?;
        rustix::fs::ftruncate(&file, self.bytes).map_err(code_of)?;
        for (index, block) in &self.blocks {
            let start = index * BLOCK_BYTES as u64;
            let mut rest = &block[..BLOCK_BYTES.min((self.bytes - start) as usize)];
            let mut at = start;
            while !rest.is_empty() {
                let n = rustix::io::pwrite(&file, rest, at).map_err(code_of)?;
                (rest, at) = (&rest[n..], at + n as u64);
            }
        }
        if let Some((atime, mtime)) = self.times {
            let times = timestamps(TimeSet::At(atime), TimeSet::At(mtime));
            rustix::fs::futimens(&file, &times).map_err(code_of)?;
        }
        Ok(file)
    }
}

fn new_file() -> Result<OwnedFd, Code> {
    let file = rustix::fs::memfd_create(c"forebay-medium", MemfdFlags::CLOEXEC).map_err(code_of)?;
    rustix::fs::fchmod(&file, Mode::RWXU).map_err(code_of)?;
    // Reads by the faulty medium itself do not count as access. `open` opens the file again for its callers.
    rustix::fs::fcntl_setfl(&file, OFlags::NOATIME).map_err(code_of)?;
    Ok(file)
}

/// Fills `buffer` from `offset`. Bytes of the buffer behind the end of the file stay as they are.
fn read_at(file: &OwnedFd, buffer: &mut [u8], offset: u64) -> Result<(), Code> {
    let mut done = 0;
    while done < buffer.len() {
        match rustix::io::pread(file, &mut buffer[done..], offset + done as u64).map_err(code_of)? {
            0 => break,
            n => done += n,
        }
    }
    Ok(())
}

impl Media for FaultyMedium {
    fn target(&self) -> u32 {
        self.target
    }

    fn create(&self, ino: Ino, component: usize, stripe: u16) -> Result<(), Code> {
        let (mut state, key) = (self.call()?, (ino, component, stripe));
        if state.live.contains_key(&key) {
            return Ok(());
        }
        let file = new_file()?;
        state.instances += 1;
        let instance = state.instances;
        state.live.insert(key, Live { instance, file });
        state.note(key, Change::Create { instance });
        Ok(())
    }

    fn open(&self, ino: Ino, component: usize, stripe: u16, access: Access) -> Result<OwnedFd, Code> {
        let state = self.call()?;
        let file = state.file((ino, component, stripe))?;
        let flags = match access {
            Access::Read => OFlags::RDONLY,
            Access::ReadWrite => OFlags::RDWR,
        };
        // Opened again, so that the descriptor has its own offset and access mode.
        rustix::fs::open(forebay_sys::descriptor::path(file), flags | OFlags::CLOEXEC, Mode::empty())
            .map_err(code_of)
    }

    fn remove(&self, ino: Ino, component: usize, stripe: u16) -> Result<(), Code> {
        let (mut state, key) = (self.call()?, (ino, component, stripe));
        if state.live.remove(&key).is_some() {
            state.note(key, Change::Remove);
        }
        Ok(())
    }

    fn stat(&self, ino: Ino, component: usize, stripe: u16) -> Result<BackingStat, Code> {
        let state = self.call()?;
        let stat = rustix::fs::fstat(state.file((ino, component, stripe))?).map_err(code_of)?;
        Ok(backing_stat(&stat))
    }

    fn truncate(&self, ino: Ino, component: usize, stripe: u16, bytes: u64) -> Result<(), Code> {
        let (mut state, key) = (self.call()?, (ino, component, stripe));
        rustix::fs::ftruncate(state.file(key)?, bytes).map_err(code_of)?;
        state.note(key, Change::Truncate { bytes });
        Ok(())
    }

    fn set_times(
        &self,
        ino: Ino,
        component: usize,
        stripe: u16,
        atime: TimeSet,
        mtime: TimeSet,
    ) -> Result<(), Code> {
        let (mut state, key) = (self.call()?, (ino, component, stripe));
        let file = state.file(key)?;
        rustix::fs::futimens(file, &timestamps(atime, mtime)).map_err(code_of)?;
        let now = backing_stat(&rustix::fs::fstat(file).map_err(code_of)?);
        state.note(key, Change::SetTimes { atime: now.atime, mtime: now.mtime });
        Ok(())
    }

    fn space(&self) -> Result<Space, Code> {
        let state = self.call()?;
        let mut taken = 0;
        for live in state.live.values() {
            taken += backing_stat(&rustix::fs::fstat(&live.file).map_err(code_of)?).allocated_bytes;
        }
        Ok(Space { total_bytes: self.total_bytes, free_bytes: self.total_bytes.saturating_sub(taken) })
    }

    fn sync(&self) -> Result<(), Code> {
        let mut state = self.call()?;
        let images = state.live.iter().map(|(key, live)| Ok((*key, Image::of(live)?)));
        state.durable = images.collect::<Result<_, Code>>()?;
        state.unsynced.clear();
        Ok(())
    }

    fn for_each(&self, visit: &mut dyn FnMut(Ino, usize, u16) -> Result<(), Code>) -> Result<(), Code> {
        let keys: Vec<Key> = self.call()?.live.keys().copied().collect();
        keys.into_iter().try_for_each(|(ino, component, stripe)| visit(ino, component, stripe))
    }
}

/// SplitMix64 (Steele, Lea and Flood): a small generator for which every seed is good.
struct SplitMix(u64);

impl SplitMix {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INO: Ino = Ino(0x1_0000_0000_0007);
    const BLOCK: u64 = BLOCK_BYTES as u64;

    fn write(medium: &FaultyMedium, bytes: &[u8], at: u64) {
        let file = medium.open(INO, 0, 0, Access::ReadWrite).unwrap();
        assert_eq!(rustix::io::pwrite(file, bytes, at).unwrap(), bytes.len());
    }

    fn read(medium: &FaultyMedium) -> Option<Vec<u8>> {
        let file = match medium.open(INO, 0, 0, Access::Read) {
            Ok(file) => file,
            Err(code) => {
                assert_eq!(code, Code::NotFound);
                return None;
            }
        };
        let mut bytes = vec![0; medium.stat(INO, 0, 0).unwrap().bytes as usize];
        read_at(&file, &mut bytes, 0).unwrap();
        Some(bytes)
    }

    /// The contents after each of 200 crashes of a medium on which `prepare` ran.
    fn outcomes(prepare: impl Fn(&FaultyMedium)) -> BTreeSet<Option<Vec<u8>>> {
        (0..200)
            .map(|seed| {
                let medium = FaultyMedium::new(0, 1 << 30);
                prepare(&medium);
                medium.crash(seed).unwrap();
                read(&medium)
            })
            .collect()
    }

    #[test]
    fn crash_after_sync_changes_nothing() {
        let medium = FaultyMedium::new(0, 1 << 30);
        medium.create(INO, 0, 0).unwrap();
        medium.create(INO, 1, 3).unwrap();
        write(&medium, &[7; 10_000], BLOCK * 5);
        let past = Timestamp { sec: -5, nsec: 9 };
        medium.set_times(INO, 0, 0, TimeSet::At(past), TimeSet::At(past)).unwrap();
        medium.remove(INO, 1, 3).unwrap();
        medium.sync().unwrap();
        let content = [vec![0; 5 * BLOCK_BYTES], vec![7; 10_000]].concat();
        for seed in 0..20 {
            medium.crash(seed).unwrap();
            let after = medium.stat(INO, 0, 0).unwrap();
            assert_eq!((after.bytes, after.allocated_bytes), (content.len() as u64, 3 * BLOCK));
            assert_eq!((after.atime, after.mtime), (past, past));
            assert_eq!(medium.stat(INO, 1, 3), Err(Code::NotFound));
        }
        assert_eq!(read(&medium), Some(content));
    }

    #[test]
    fn crash_of_unsynced_create_and_remove_both_outcomes_occur() {
        let created = outcomes(|medium| medium.create(INO, 0, 0).unwrap());
        assert_eq!(created, BTreeSet::from([None, Some(vec![])]));
        let removed = outcomes(|medium| {
            medium.create(INO, 0, 0).unwrap();
            write(medium, b"kept", 0);
            medium.sync().unwrap();
            medium.remove(INO, 0, 0).unwrap();
        });
        assert_eq!(removed, BTreeSet::from([None, Some(b"kept".to_vec())]));
    }

    #[test]
    fn crash_of_unsynced_writes_any_subset_of_blocks_occurs_and_nothing_else() {
        let (old, new) = (vec![1; 2 * BLOCK_BYTES], vec![2; 2 * BLOCK_BYTES]);
        let seen = outcomes(|medium| {
            medium.create(INO, 0, 0).unwrap();
            write(medium, &old, 0);
            medium.sync().unwrap();
            write(medium, &new, 0);
        });
        let mixed = |a: u8, b: u8| Some([vec![a; BLOCK_BYTES], vec![b; BLOCK_BYTES]].concat());
        assert_eq!(seen, BTreeSet::from([mixed(1, 1), mixed(1, 2), mixed(2, 1), mixed(2, 2)]));
    }

    #[test]
    fn crash_of_unsynced_truncate_and_rewrite_never_shows_bytes_of_neither() {
        let seen = outcomes(|medium| {
            medium.create(INO, 0, 0).unwrap();
            write(medium, &[1; 6000], 0);
            medium.sync().unwrap();
            medium.truncate(INO, 0, 0, 10).unwrap();
            write(medium, &[2; 100], 5000);
        });
        assert!(seen.len() > 4, "{}", seen.len());
        for bytes in seen.into_iter().map(Option::unwrap) {
            assert!(matches!(bytes.len(), 10 | 6000 | 5100), "{} bytes", bytes.len());
            assert!(bytes.iter().all(|b| matches!(b, 0..=2)));
            assert_eq!(bytes[..10], [1; 10]);
        }
    }

    #[test]
    fn crash_of_a_name_made_again_never_mixes_the_two() {
        let seen = outcomes(|medium| {
            medium.create(INO, 0, 0).unwrap();
            write(medium, b"old", 0);
            medium.sync().unwrap();
            medium.remove(INO, 0, 0).unwrap();
            medium.create(INO, 0, 0).unwrap();
            write(medium, b"NEW!", 0);
        });
        let some = |bytes: &[u8]| Some(bytes.to_vec());
        assert_eq!(seen, BTreeSet::from([None, some(b"old"), some(b""), some(b"NEW!"), some(&[0; 4])]),);
    }

    #[test]
    fn crash_same_seed_same_outcome() {
        let run = |seed| {
            let medium = FaultyMedium::new(0, 1 << 30);
            medium.create(INO, 0, 0).unwrap();
            write(&medium, &[3; 40 * BLOCK_BYTES], 0);
            medium.crash(seed).unwrap();
            read(&medium)
        };
        assert_eq!(run(11), run(11));
        assert!((0..20).any(|seed| run(seed) != run(11)));
    }

    #[test]
    fn crash_old_descriptor_reaches_nothing() {
        let medium = FaultyMedium::new(0, 1 << 30);
        medium.create(INO, 0, 0).unwrap();
        medium.sync().unwrap();
        let old = medium.open(INO, 0, 0, Access::ReadWrite).unwrap();
        medium.crash(1).unwrap();
        rustix::io::pwrite(old, b"ghost", 0).unwrap();
        assert_eq!(read(&medium), Some(vec![]));
    }

    #[test]
    fn fail_after_n_calls_every_later_one_fails_until_healed() {
        let medium = FaultyMedium::new(0, 1 << 30);
        medium.fail_after(2, Code::NoSpace);
        assert_eq!(medium.create(INO, 0, 0), Ok(()));
        assert_eq!(medium.truncate(INO, 0, 0, 5), Ok(()));
        let (omit, none) = (TimeSet::Omit, &mut |_: Ino, _: usize, _: u16| Ok(()));
        assert_eq!(medium.create(INO, 0, 1), Err(Code::NoSpace));
        assert_eq!(medium.open(INO, 0, 0, Access::Read).map(drop), Err(Code::NoSpace));
        assert_eq!(medium.remove(INO, 0, 0), Err(Code::NoSpace));
        assert_eq!(medium.stat(INO, 0, 0).map(drop), Err(Code::NoSpace));
        assert_eq!(medium.truncate(INO, 0, 0, 0), Err(Code::NoSpace));
        assert_eq!(medium.set_times(INO, 0, 0, omit, omit), Err(Code::NoSpace));
        assert_eq!(medium.space().map(drop), Err(Code::NoSpace));
        assert_eq!(medium.sync(), Err(Code::NoSpace));
        assert_eq!(medium.for_each(none), Err(Code::NoSpace));
        medium.heal();
        assert_eq!(medium.stat(INO, 0, 0).unwrap().bytes, 5, "what failed changed nothing");
        assert_eq!(medium.stat(INO, 0, 1), Err(Code::NotFound));
    }
}
