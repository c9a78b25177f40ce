//! The file in a volume: bytes from its beginning up to an end that all processes share. MPI-IO uses volumes so.
//!
//! The end is a word in the volume's head, a page beside its first piece, which lives as long as the volume:
//!
//! | word | meaning |
//! |---|---|
//! | 0 | a new or formatted volume: an empty file, which nobody has created yet |
//! | 1 | the file was removed |
//! | n + 2 | a file of n bytes |
//!
//! Invariant: as long as programs use a volume as a file only, its bytes beyond the end are zero. A write moves the end
//! before it copies, and to truncate or remove zeroes the bytes before it moves the end. So a range that a later write
//! skips reads as zeros, and the death of a process at any step keeps that. Zeros are not written when the end grows: other
//! processes may be writing there.
//!
//! Where the first piece is on another node each access to the word is a request to it. The word is only changed
//! atomically, so any number of processes may extend a file at a time. One that truncates or
//! removes it must not meet others that write to it, as with MPI_File_set_size.

use forebay_types::{AtomicOp, Code};

use crate::gathered::{Gets, Puts};
use crate::striped::{EndWord, Striped};

/// The word of a volume in which no file was created yet.
const NEW: u64 = 0;
/// The word of a volume whose file was removed.
const REMOVED: u64 = 1;
/// The word of an empty file.
const EMPTY: u64 = 2;

/// How a file is opened.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct FileFlags {
    /// It may be read.
    pub reads: bool,
    /// It may be written.
    pub writes: bool,
    /// It is created if it was removed.
    pub creates: bool,
    /// It must not exist before. A new volume's has not.
    pub is_exclusive: bool,
    /// It is made empty.
    pub truncates: bool,
}

/// See the module.
#[derive(Debug)]
pub struct VolumeFile {
    volume: Striped,
    reads: bool,
    writes: bool,
}

fn size_of(word: u64) -> u64 {
    word.saturating_sub(EMPTY)
}

/// Whether the file of a volume exists, and its size.
impl Striped {
    /// The size of the volume's file; 0 in a new volume, and none if the file was removed.
    ///
    /// # Errors
    /// [`Code::PoolGone`]; [`Code::Io`] if the node of the first piece cannot be reached; [`Code::NotSupported`] for a volume
    /// without a head.
    pub fn file_size(&self) -> Result<Option<u64>, Code> {
        self.fence()?;
        Ok(match self.end_word()?.load()? {
            REMOVED => None,
            // The volume may have been made smaller.
            word => Some(size_of(word).min(self.bytes())),
        })
    }

    /// Has the volume's file as that of a new volume. Its bytes must be zero.
    ///
    /// # Errors
    /// As [`Striped::file_size`]; [`Code::BadDescriptor`] if the volume is not open for writing.
    pub fn reset_file(&self) -> Result<(), Code> {
        self.writable_end()?.apply(AtomicOp::Swap { new: NEW }).map(drop)
    }

    /// Has the file reach at least to `size`, as a write that ended there does. It is created if it was removed.
    ///
    /// # Errors
    /// As [`Striped::reset_file`]; [`Code::NoSpace`] beyond the volume's end.
    pub fn extend_file(&self, size: u64) -> Result<(), Code> {
        let end = self.writable_end()?;
        match size <= self.bytes() {
            true => end.raise(size + EMPTY),
            false => Err(Code::NoSpace),
        }
    }

    /// Has the file end at `size`. Its bytes from there on must be zero.
    ///
    /// # Errors
    /// As [`Striped::extend_file`].
    pub fn end_file(&self, size: u64) -> Result<(), Code> {
        let end = self.writable_end()?;
        match size <= self.bytes() {
            true => end.apply(AtomicOp::Swap { new: size + EMPTY }).map(drop),
            false => Err(Code::NoSpace),
        }
    }

    /// Removes the volume's file: its bytes become zero. The volume stays.
    ///
    /// # Errors
    /// As [`Striped::reset_file`]; [`Code::NotFound`] if it was removed already.
    pub fn remove_file(&self) -> Result<(), Code> {
        self.shorten(0, REMOVED)
    }

    /// Cuts the file off at the volume's end, which is before the file's if the volume was made smaller.
    ///
    /// # Errors
    /// As [`Striped::reset_file`].
    pub fn trim_file(&self) -> Result<(), Code> {
        let most = EMPTY + self.bytes();
        self.writable_end()?.update(|word| (word > most).then_some(most)).map(drop)
    }

    fn writable_end(&self) -> Result<EndWord<'_>, Code> {
        self.fence()?;
        match self.is_writable() {
            true => self.end_word(),
            false => Err(Code::BadDescriptor),
        }
    }

    /// Zeroes the file's bytes from `size` on, and sets the word to `new`.
    fn shorten(&self, size: u64, new: u64) -> Result<(), Code> {
        let end = self.writable_end()?;
        let mut word = end.load()?;
        loop {
            if word == REMOVED && new == REMOVED {
                return Err(Code::NotFound);
            }
            let before = size_of(word).min(self.bytes());
            if let Some(bytes) = before.checked_sub(size) {
                self.zero(size, bytes)?;
            }
            match end.apply(AtomicOp::CompareAndSwap { expected: word, new })? {
                was if was == word => return Ok(()),
                // Another process has moved the end.
                now => word = now,
            }
        }
    }
}

impl VolumeFile {
    /// Opens the file of a volume, which is open for writing unless the file is only read.
    ///
    /// # Errors
    /// [`Code::NotFound`] if it was removed; [`Code::Exists`]; [`Code::BadDescriptor`] if the volume is not open for
    /// writing and should be; [`Code::PoolGone`]; [`Code::NotSupported`].
    pub fn open(volume: Striped, flags: FileFlags) -> Result<VolumeFile, Code> {
        let FileFlags { reads, writes, creates, is_exclusive, truncates } = flags;
        if creates {
            let end = volume.writable_end()?;
            let created = |word| (word < EMPTY).then_some(EMPTY);
            let is_new = end.update(created)?.is_ok();
            if is_exclusive && !is_new {
                return Err(Code::Exists);
            }
        }
        volume.file_size()?.ok_or(Code::NotFound)?;
        let file = VolumeFile { volume, reads, writes };
        if truncates {
            file.volume.shorten(0, EMPTY)?;
        }
        Ok(file)
    }

    /// Its volume.
    pub fn volume(&self) -> &Striped {
        &self.volume
    }

    /// The size.
    ///
    /// # Errors
    /// [`Code::PoolGone`].
    pub fn size(&self) -> Result<u64, Code> {
        Ok(self.volume.file_size()?.unwrap_or(0))
    }

    fn check_writes(&self, end: Option<u64>) -> Result<(), Code> {
        match end {
            _ if !self.writes => Err(Code::BadDescriptor),
            Some(end) if end <= self.volume.bytes() => Ok(()),
            _ => Err(Code::NoSpace),
        }
    }

    /// Moves the end to `size` unless it is behind it.
    #[inline]
    fn extend(&self, size: u64) -> Result<(), Code> {
        self.volume.writable_end()?.raise(size + EMPTY)
    }

    /// As ftruncate(2).
    ///
    /// # Errors
    /// [`Code::NoSpace`] beyond the volume's end; [`Code::BadDescriptor`]; [`Code::PoolGone`].
    pub fn truncate(&self, size: u64) -> Result<(), Code> {
        self.check_writes(Some(size))?;
        self.volume.shorten(size, size + EMPTY)
    }

    /// As posix_fallocate(3) from the start: the space is there, so only the end may move.
    ///
    /// # Errors
    /// As [`VolumeFile::truncate`].
    pub fn allocate(&self, size: u64) -> Result<(), Code> {
        self.check_writes(Some(size))?;
        self.extend(size)
    }

    /// Zeroes a range up to the end of the file. It keeps its space.
    ///
    /// # Errors
    /// [`Code::BadDescriptor`], [`Code::PoolGone`].
    pub fn punch(&self, offset: u64, bytes: u64) -> Result<(), Code> {
        self.check_writes(Some(0))?;
        let end = offset.saturating_add(bytes).min(self.size()?);
        match end.checked_sub(offset) {
            Some(bytes) => self.volume.zero(offset, bytes),
            None => Ok(()),
        }
    }

    /// Returns when every process gets what this thread has written.
    ///
    /// # Errors
    /// [`Code::PoolGone`].
    pub fn sync(&self) -> Result<(), Code> {
        self.volume.flush()
    }

    /// Reads ranges, offset and bytes each. Their bytes, in their order, are those of `parts`. Returns the number of bytes
    /// before the first that is behind the end of the file.
    ///
    /// # Errors
    /// [`Code::Invalid`] if parts and ranges have not equally many bytes; [`Code::BadDescriptor`]; [`Code::PoolGone`].
    ///
    /// # Safety
    /// `parts` are writable memory.
    pub unsafe fn read_runs(
        &self,
        parts: &[libc::iovec],
        runs: impl Iterator<Item = (u64, u64)> + Clone,
    ) -> Result<u64, Code> {
        if !self.reads {
            return Err(Code::BadDescriptor);
        }
        check_total(parts, runs.clone())?;
        let size = self.size()?;
        let there = |offset: u64, bytes: usize| {
            bytes.min(usize::try_from(size.saturating_sub(offset)).unwrap_or(usize::MAX))
        };
        if self.volume.has_far_pieces() {
            let mut gets = Gets::new(&self.volume);
            let done = each(parts, runs, |offset, memory, bytes| {
                let bytes = there(offset, bytes);
                // SAFETY: `memory` is in `parts`, which have `bytes` bytes from it on, and outlive `gets`.
                unsafe { gets.get(offset.min(size), memory, bytes) }.map(|()| bytes)
            })?;
            // SAFETY: as above.
            return unsafe { gets.flush() }.map(|()| done);
        }
        each(parts, runs, |offset, memory, bytes| {
            let bytes = there(offset, bytes);
            // SAFETY: `memory` is in `parts`, which have `bytes` bytes from it on.
            unsafe { self.volume.get(offset.min(size), memory, bytes) }.map(|()| bytes)
        })
    }

    /// Writes ranges. Their bytes, in their order, are those of `parts`. Returns the number of bytes, which is that of all.
    ///
    /// # Errors
    /// As [`VolumeFile::read_runs`]; [`Code::NoSpace`] if a range ends behind the volume: nothing is written then.
    ///
    /// # Safety
    /// `parts` are readable memory.
    pub unsafe fn write_runs(
        &self,
        parts: &[libc::iovec],
        runs: impl Iterator<Item = (u64, u64)> + Clone,
    ) -> Result<u64, Code> {
        check_total(parts, runs.clone())?;
        let ends =
            runs.clone().filter(|(_, bytes)| *bytes > 0).map(|(offset, bytes)| offset.checked_add(bytes));
        let end = ends.max_by_key(|end| end.unwrap_or(u64::MAX)).unwrap_or(Some(0));
        self.check_writes(end)?;
        if let Some(end @ 1..) = end {
            self.extend(end)?;
        }
        if self.volume.has_far_pieces() {
            let mut puts = Puts::new(&self.volume);
            let done = each(parts, runs, |offset, memory, bytes| {
                // SAFETY: as in `read_runs`.
                unsafe { puts.put(offset, memory, bytes) }.map(|()| bytes)
            })?;
            return puts.flush().map(|()| done);
        }
        each(parts, runs, |offset, memory, bytes| {
            // SAFETY: as in `read_runs`.
            unsafe { self.volume.put(offset, memory, bytes) }.map(|()| bytes)
        })
    }
}

fn check_total(parts: &[libc::iovec], runs: impl Iterator<Item = (u64, u64)>) -> Result<(), Code> {
    let memory = parts.iter().try_fold(0u64, |sum, part| sum.checked_add(part.iov_len as u64));
    let mut runs = runs;
    let file = runs.try_fold(0u64, |sum, (_, bytes)| sum.checked_add(bytes));
    match memory.is_some() && memory == file {
        true => Ok(()),
        false => Err(Code::Invalid),
    }
}

/// Calls `copy` with each contiguous piece of ranges and memory, until one is shorter than asked. Returns the bytes copied.
fn each(
    parts: &[libc::iovec],
    runs: impl Iterator<Item = (u64, u64)>,
    mut copy: impl FnMut(u64, *mut u8, usize) -> Result<usize, Code>,
) -> Result<u64, Code> {
    let mut parts = parts.iter().filter(|part| part.iov_len > 0);
    let (mut memory, mut room) = (std::ptr::null_mut::<u8>(), 0);
    let mut done = 0;
    for (mut offset, mut bytes) in runs {
        while bytes > 0 {
            if room == 0 {
                let Some(part) = parts.next() else { return Ok(done) };
                (memory, room) = (part.iov_base.cast(), part.iov_len);
            }
            let n = room.min(usize::try_from(bytes).unwrap_or(usize::MAX));
            let copied = copy(offset, memory, n)?;
            done += copied as u64;
            if copied < n {
                return Ok(done);
            }
            memory = memory.wrapping_add(n);
            room -= n;
            offset += n as u64;
            bytes -= n as u64;
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapped::testing::{mapped, memfd, set};
    use proptest::prelude::*;
    use std::os::fd::{AsFd, OwnedFd};

    const ALL: FileFlags =
        FileFlags { reads: true, writes: true, creates: true, is_exclusive: false, truncates: false };

    /// Joined volumes of 4 MiB together, with their head and the page of the pool's life.
    fn volume(is_writable: bool, head: &OwnedFd) -> (Striped, OwnedFd) {
        let (first, life) = mapped(&[(3 << 20, 4096, 2)], is_writable);
        let first = first.with_head(head.as_fd()).unwrap();
        (Striped::new(vec![first, mapped(&[(2 << 20, 4096, 1)], is_writable).0]).unwrap(), life)
    }

    fn file(flags: FileFlags) -> (VolumeFile, OwnedFd) {
        let head = memfd(4096);
        let file = VolumeFile::open(volume(true, &head).0, flags).unwrap();
        (file, head)
    }

    fn parts(bytes: &mut [u8], cut: usize) -> [libc::iovec; 2] {
        let (a, b) = bytes.split_at_mut(cut);
        [a, b].map(|part| libc::iovec { iov_base: part.as_mut_ptr().cast(), iov_len: part.len() })
    }

    fn write(file: &VolumeFile, runs: &[(u64, u64)], data: &mut [u8]) -> Result<u64, Code> {
        let parts = parts(data, data.len() / 3);
        // SAFETY: the parts are in the slice.
        unsafe { file.write_runs(&parts, runs.iter().copied()) }
    }

    fn read(file: &VolumeFile, runs: &[(u64, u64)]) -> Result<Vec<u8>, Code> {
        let mut out = vec![0xee; runs.iter().map(|(_, bytes)| *bytes as usize).sum()];
        let parts = parts(&mut out, 0);
        // SAFETY: the parts are in the vector.
        let n = unsafe { file.read_runs(&parts, runs.iter().copied()) }?;
        out.truncate(n as usize);
        Ok(out)
    }

    #[derive(Clone, Debug)]
    enum Step {
        Write(Vec<(u64, u64)>, u8),
        Truncate(u64),
        Allocate(u64),
        Punch(u64, u64),
        Read(Vec<(u64, u64)>),
        Remove,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let place = || 0u64..60_000;
        let runs = || prop::collection::vec((place(), 0u64..9_000), 0..4);
        let step = prop_oneof![
            4 => (runs(), any::<u8>()).prop_map(|(r, b)| Step::Write(r, b)),
            2 => place().prop_map(Step::Truncate),
            1 => place().prop_map(Step::Allocate),
            1 => (place(), place()).prop_map(|(a, n)| Step::Punch(a, n)),
            3 => runs().prop_map(Step::Read),
            1 => Just(Step::Remove),
        ];
        prop::collection::vec(step, 1..30)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        /// It does what a file does: what is skipped reads as zeros, also where there were data before.
        #[test]
        fn file_of_a_volume_is_a_file(steps in steps()) {
            let (file, _head) = file(ALL);
            let mut model: Vec<u8> = Vec::new();
            for step in &steps {
                match step {
                    Step::Write(runs, byte) => {
                        let total: u64 = runs.iter().map(|(_, bytes)| bytes).sum();
                        let mut data: Vec<u8> = (0..total).map(|i| byte.wrapping_add(i as u8)).collect();
                        prop_assert_eq!(write(&file, runs, &mut data), Ok(total));
                        let mut from = 0;
                        for (at, n) in runs.iter().map(|(at, n)| (*at as usize, *n as usize)).filter(|(_, n)| *n > 0) {
                            model.resize(model.len().max(at + n), 0);
                            model[at..at + n].copy_from_slice(&data[from..from + n]);
                            from += n;
                        }
                    }
                    Step::Truncate(size) => {
                        prop_assert_eq!(file.truncate(*size), Ok(()));
                        model.resize(*size as usize, 0);
                    }
                    Step::Allocate(size) => {
                        prop_assert_eq!(file.allocate(*size), Ok(()));
                        model.resize(model.len().max(*size as usize), 0);
                    }
                    Step::Punch(at, n) => {
                        prop_assert_eq!(file.punch(*at, *n), Ok(()));
                        let end = model.len().min((at + n) as usize);
                        if let Some(hole) = model.get_mut(*at as usize..end) {
                            hole.fill(0);
                        }
                    }
                    Step::Read(runs) => {
                        let mut expected = Vec::new();
                        for (at, n) in runs.iter().map(|(at, n)| (*at as usize, *n as usize)) {
                            let there = model.get(at.min(model.len())..model.len().min(at + n)).unwrap();
                            expected.extend_from_slice(there);
                            if there.len() < n {
                                break;
                            }
                        }
                        prop_assert_eq!(read(&file, runs), Ok(expected));
                    }
                    Step::Remove => {
                        prop_assert_eq!(file.volume().remove_file(), Ok(()));
                        prop_assert_eq!(file.volume().remove_file(), Err(Code::NotFound));
                        model.clear();
                        prop_assert_eq!(file.truncate(0), Ok(()), "it is made again");
                    }
                }
                prop_assert_eq!(file.size(), Ok(model.len() as u64));
                prop_assert!(read(&file, &[(0, 70_000)]) == Ok(model.clone()));
            }
        }
    }

    #[test]
    fn new_removed_and_existing_files_are_opened_as_the_flags_say() {
        let head = memfd(4096);
        let open = |creates, is_exclusive| {
            let flags = FileFlags { creates, is_exclusive, ..ALL };
            VolumeFile::open(volume(true, &head).0, flags).map(|file| file.size().unwrap())
        };
        assert_eq!(open(false, false), Ok(0), "a new volume is an empty file");
        assert_eq!(open(true, true), Ok(0), "which nobody has created");
        assert_eq!(open(true, true), Err(Code::Exists));
        assert_eq!(open(true, false), Ok(0));
        let opened = VolumeFile::open(volume(true, &head).0, ALL).unwrap();
        write(&opened, &[(5, 3)], &mut [1, 2, 3]).unwrap();
        assert_eq!(open(false, false), Ok(8), "each opener of the head sees the end");
        assert_eq!(opened.volume().remove_file(), Ok(()));
        assert_eq!(open(false, false), Err(Code::NotFound));
        assert_eq!(open(true, true), Ok(0));
        opened.truncate(9).unwrap();
        let flags = FileFlags { truncates: true, ..ALL };
        assert_eq!(VolumeFile::open(volume(true, &head).0, flags).unwrap().size(), Ok(0));
        opened.truncate(9).unwrap();
        assert_eq!((opened.volume().reset_file(), opened.size(), open(true, true)), (Ok(()), Ok(0), Ok(0)));
        set(&head, (5 << 20) + 2);
        assert_eq!(opened.size(), Ok(4 << 20), "the volume was made smaller");
        let whole = opened.volume();
        assert_eq!((whole.end_file(5), whole.file_size()), (Ok(()), Ok(Some(5))));
        assert_eq!((whole.extend_file(4), whole.file_size()), (Ok(()), Ok(Some(5))));
        assert_eq!((whole.extend_file(6), whole.file_size()), (Ok(()), Ok(Some(6))));
        assert_eq!((whole.remove_file(), whole.extend_file(0)), (Ok(()), Ok(())));
        assert_eq!(whole.file_size(), Ok(Some(0)), "it is created");
        let beyond = whole.bytes() + 1;
        assert_eq!(
            (whole.end_file(beyond), whole.extend_file(beyond)),
            (Err(Code::NoSpace), Err(Code::NoSpace))
        );
        set(&head, (5 << 20) + 2);
        opened.volume().trim_file().unwrap();
        set(&head, u32::MAX);
        assert_eq!(opened.volume().trim_file().map(|()| opened.size()), Ok(Ok(4 << 20)));
    }

    #[test]
    fn bytes_beyond_the_volume_are_no_space_and_nothing_is_written() {
        let (file, _head) = file(ALL);
        let all = file.volume().bytes();
        write(&file, &[(0, 2)], &mut [1, 2]).unwrap();
        for runs in
            [vec![(all - 1, 2)], vec![(0, 1), (all, 1)], vec![(u64::MAX, 2)], vec![(u64::MAX, 1), (0, 1)]]
        {
            assert_eq!(write(&file, &runs, &mut [9, 9]), Err(Code::NoSpace), "{runs:?}");
        }
        assert_eq!(
            (file.truncate(all + 1), file.allocate(all + 1)),
            (Err(Code::NoSpace), Err(Code::NoSpace))
        );
        assert_eq!(read(&file, &[(0, 10)]).unwrap(), [1, 2]);
        assert_eq!(write(&file, &[(0, 1)], &mut [9, 9]), Err(Code::Invalid));
        assert_eq!(write(&file, &[(u64::MAX, 0)], &mut []), Ok(0), "nothing moves no end");
        assert_eq!((file.size(), read(&file, &[(u64::MAX, 1)])), (Ok(2), Ok(vec![])));
        file.truncate(all).unwrap();
        assert_eq!(write(&file, &[(all - 2, 2)], &mut [8, 9]), Ok(2));
        assert_eq!(read(&file, &[(all - 2, 9)]).unwrap(), [8, 9]);
    }

    #[test]
    fn rights_are_those_of_the_open_and_a_dead_pools_file_is_not_touched() {
        let head = memfd(4096);
        let only = |reads, writes| FileFlags { reads, writes, ..FileFlags::default() };
        let writer = VolumeFile::open(volume(true, &head).0, only(false, true)).unwrap();
        write(&writer, &[(0, 2)], &mut [1, 2]).unwrap();
        assert_eq!(read(&writer, &[(0, 2)]), Err(Code::BadDescriptor));
        let (striped, life) = volume(false, &head);
        let reader = VolumeFile::open(striped, only(true, false)).unwrap();
        assert_eq!(reader.size(), Ok(2));
        assert_eq!(write(&reader, &[(0, 2)], &mut [3, 4]), Err(Code::BadDescriptor));
        assert_eq!(
            (reader.truncate(0), reader.punch(0, 1)),
            (Err(Code::BadDescriptor), Err(Code::BadDescriptor))
        );
        assert_eq!(reader.volume().remove_file(), Err(Code::BadDescriptor));
        assert_eq!(reader.volume().reset_file(), Err(Code::BadDescriptor));
        let creates = VolumeFile::open(volume(false, &head).0, ALL);
        assert_eq!(creates.map(drop), Err(Code::BadDescriptor));
        set(&life, 0);
        assert_eq!((reader.size(), reader.sync()), (Err(Code::PoolGone), Err(Code::PoolGone)));
        assert_eq!(read(&reader, &[(0, 1)]), Err(Code::PoolGone));
        let headless = Striped::new(vec![mapped(&[(4096, 4096, 1)], true).0]).unwrap();
        assert_eq!(VolumeFile::open(headless, ALL).map(drop), Err(Code::NotSupported));
    }
}
