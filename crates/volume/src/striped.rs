//! Access to one volume, or to several over which data are striped.

use std::sync::atomic::{fence, AtomicU64, Ordering};
use std::sync::Arc;

use forebay_types::{AtomicOp, BackingId, Code, Ino, PieceWord};

use crate::far::Far;
use crate::mapped::{Mapped, Place};

/// See the module. The bytes of several volumes are those of a RAID-0 over them, as large as the smallest allows.
#[derive(Debug)]
pub struct Striped {
    parts: Vec<Mapped>,
    stripe_bytes: u64,
    bytes: u64,
    is_writable: bool,
    /// All pieces are mapped.
    is_mapped: bool,
    /// The way to pieces on other nodes, if there are any.
    far: Option<Arc<dyn Far>>,
}

impl Striped {
    /// Bytes of a stripe over joined volumes.
    pub const STRIPE_BYTES: u64 = 1 << 20;

    /// One volume, or several that are joined.
    ///
    /// # Errors
    /// [`Code::Invalid`] for an empty list, and if one of several volumes is smaller than a stripe.
    pub fn new(parts: Vec<Mapped>) -> Result<Striped, Code> {
        let smallest = parts.iter().map(Mapped::bytes).min().ok_or(Code::Invalid)?;
        let stripe_bytes = Striped::STRIPE_BYTES;
        let bytes = match parts.len() {
            1 => smallest,
            n => smallest / stripe_bytes * stripe_bytes * n as u64,
        };
        let is_writable = parts.iter().all(Mapped::is_writable);
        let is_mapped = parts.iter().all(Mapped::is_mapped);
        let far = parts.iter().find_map(Mapped::far).cloned();
        match bytes {
            0 => Err(Code::Invalid),
            _ => Ok(Striped { parts, stripe_bytes, bytes, is_writable, is_mapped, far }),
        }
    }

    /// The size.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// True if it was opened for writing.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// Why this thread's last call failed, if a piece on another node was the reason.
    pub fn reason(&self) -> Option<String> {
        self.far.as_ref().and_then(|far| far.reason())
    }

    /// The number of pieces of its volumes.
    pub fn pieces(&self) -> usize {
        self.parts.iter().map(Mapped::pieces).sum()
    }

    /// The numbers of its volumes, in their order.
    pub fn numbers(&self) -> impl Iterator<Item = Ino> + '_ {
        self.parts.iter().map(Mapped::ino)
    }

    /// The word with the end of its file, in the head of the first volume.
    #[inline]
    pub(crate) fn end_word(&self) -> Result<EndWord<'_>, Code> {
        let first = self.parts.first().ok_or(Code::NotSupported)?;
        match (first.end_word(), first.first_far_piece(), first.far()) {
            (Some(word), ..) => Ok(EndWord::Here(word)),
            (None, Some(piece), Some(far)) => Ok(EndWord::There(&**far, piece)),
            _ => Err(Code::NotSupported),
        }
    }

    /// The first piece of its first volume.
    pub fn first_piece(&self) -> Option<BackingId> {
        self.parts.first().and_then(Mapped::first_piece)
    }

    /// True if all of its pieces are mapped: puts and gets are copies of memory alone.
    #[inline]
    pub fn is_mapped(&self) -> bool {
        self.is_mapped
    }

    /// True if some of its pieces are on other nodes.
    #[inline]
    pub(crate) fn has_far_pieces(&self) -> bool {
        self.far.is_some()
    }

    /// The way to its pieces on other nodes.
    pub(crate) fn way(&self) -> Result<&dyn Far, Code> {
        self.far.as_deref().ok_or(Code::Io)
    }

    /// True if the volume that has this byte is thin.
    pub(crate) fn is_thin_at(&self, offset: u64) -> bool {
        self.parts[(offset / self.stripe_bytes % self.parts.len() as u64) as usize].is_thin()
    }

    /// True if all of its volumes are thin.
    pub fn is_thin(&self) -> bool {
        self.parts.iter().all(Mapped::is_thin)
    }

    /// The bytes that its volumes take: of a thin one those that were written and not discarded, in whole pages.
    ///
    /// # Errors
    /// [`Code::Io`] if a thin piece on another node cannot be reached.
    pub fn allocated(&self) -> Result<u64, Code> {
        self.parts.iter().map(Mapped::allocated).sum()
    }

    /// How many of its pieces are on other nodes.
    pub fn far_pieces(&self) -> usize {
        self.parts.iter().map(Mapped::far_pieces).sum()
    }

    /// Whether the pools of all volumes live.
    #[inline]
    fn check_life(&self) -> Result<(), Code> {
        self.parts.iter().try_for_each(Mapped::check_life)
    }

    /// What is the same for every access.
    #[inline]
    pub(crate) fn check(&self, offset: u64, bytes: u64, writes: bool) -> Result<(), Code> {
        self.check_life()?;
        if writes && !self.is_writable {
            return Err(Code::BadDescriptor);
        }
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(Code::Range),
        }
    }

    /// Where a byte is, and how many bytes follow each other from there on.
    #[inline]
    pub(crate) fn place(&self, offset: u64) -> (Place, u64) {
        match self.parts.as_slice() {
            [only] => only.place(offset),
            parts => {
                let (stripe, within) = (offset / self.stripe_bytes, offset % self.stripe_bytes);
                let n = parts.len() as u64;
                let at = stripe / n * self.stripe_bytes + within;
                let (place, run) = parts[(stripe % n) as usize].place(at);
                (place, run.min(self.stripe_bytes - within))
            }
        }
    }

    /// The same where no piece is on another node.
    #[inline]
    fn pointer(&self, offset: u64) -> (*mut u8, u64) {
        match self.place(offset) {
            (Place::Here(pointer), run) => (pointer, run),
            (Place::File(..) | Place::There(..), _) => {
                unreachable!("it is not mapped, and `is_mapped` says so")
            }
        }
    }

    /// Calls `copy` with each run of a checked range: the place in the volume, the offset in the range, the bytes.
    #[inline]
    fn each(&self, offset: u64, bytes: usize, mut copy: impl FnMut(*mut u8, usize, usize)) {
        let mut done = 0;
        while done < bytes {
            let (pointer, run) = self.pointer(offset + done as u64);
            let n = (bytes - done).min(usize::try_from(run).unwrap_or(usize::MAX));
            copy(pointer, done, n);
            done += n;
        }
    }

    /// Copies `bytes` bytes from `from` to the volume.
    ///
    /// # Errors
    /// [`Code::Range`] beyond the end, [`Code::BadDescriptor`] if it is not open for writing, [`Code::PoolGone`]. Nothing
    /// is copied then. [`Code::NoSpace`] of a thin volume: some bytes may be copied. [`Code::Io`] if a piece on another
    /// node cannot be reached: some bytes may be copied, now or, until the daemon has given up, later.
    ///
    /// # Safety
    /// `from` is readable for `bytes` bytes.
    #[inline]
    pub unsafe fn put(&self, offset: u64, from: *const u8, bytes: usize) -> Result<(), Code> {
        self.check(offset, bytes as u64, true)?;
        if !self.is_mapped {
            // SAFETY: the caller's promise.
            return unsafe { self.put_ranges(&[(offset, bytes as u64)], from) };
        }
        self.each(offset, bytes, |place, at, n| {
            // SAFETY: `place` is mapped writable for `n` bytes; the caller's promise. The two may overlap, if the caller's
            // memory is the volume's: memmove.
            unsafe { libc::memmove(place.cast(), from.add(at).cast(), n) };
        });
        Ok(())
    }

    /// Copies `bytes` bytes of the volume to `to`.
    ///
    /// # Errors
    /// [`Code::Range`], [`Code::PoolGone`]. Nothing is copied then.
    ///
    /// # Safety
    /// `to` is writable for `bytes` bytes.
    #[inline]
    pub unsafe fn get(&self, offset: u64, to: *mut u8, bytes: usize) -> Result<(), Code> {
        self.check(offset, bytes as u64, false)?;
        if !self.is_mapped {
            // SAFETY: the caller's promise.
            return unsafe { self.get_ranges(&[(offset, bytes as u64)], to) };
        }
        self.each(offset, bytes, |place, at, n| {
            // SAFETY: as in `put`.
            unsafe { libc::memmove(to.add(at).cast(), place.cast(), n) };
        });
        Ok(())
    }

    /// [`Striped::put`] of a slice.
    pub fn put_bytes(&self, offset: u64, from: &[u8]) -> Result<(), Code> {
        // SAFETY: the slice is readable.
        unsafe { self.put(offset, from.as_ptr(), from.len()) }
    }

    /// [`Striped::get`] into a slice.
    pub fn get_bytes(&self, offset: u64, to: &mut [u8]) -> Result<(), Code> {
        // SAFETY: the slice is writable.
        unsafe { self.get(offset, to.as_mut_ptr(), to.len()) }
    }

    /// Sets a range to zero. A thin volume gives back its space.
    ///
    /// # Errors
    /// As [`Striped::put`].
    pub fn zero(&self, offset: u64, bytes: u64) -> Result<(), Code> {
        self.check(offset, bytes, true)?;
        if !self.is_mapped {
            return self.zero_ranges(offset, bytes);
        }
        self.each(offset, usize::try_from(bytes).map_err(|_| Code::Range)?, |place, _, n| {
            // SAFETY: `place` is mapped writable for `n` bytes.
            unsafe { libc::memset(place.cast(), 0, n) };
        });
        Ok(())
    }

    /// Checks ranges of a list, offset and bytes each, which have `total` bytes together.
    fn check_all(&self, runs: &[(u64, u64)], total: usize, writes: bool) -> Result<(), Code> {
        let mut sum = 0u64;
        for (offset, bytes) in runs {
            self.check(*offset, *bytes, writes)?;
            sum = sum.checked_add(*bytes).ok_or(Code::Invalid)?;
        }
        self.check_life()?;
        if sum == total as u64 {
            Ok(())
        } else {
            Err(Code::Invalid)
        }
    }

    /// Copies consecutive bytes from `from` to several ranges, in their order.
    ///
    /// # Errors
    /// As [`Striped::put`], for any range: nothing is copied then. [`Code::Invalid`] if the ranges do not have `bytes`
    /// bytes together.
    ///
    /// # Safety
    /// `from` is readable for `bytes` bytes.
    pub unsafe fn put_runs(&self, runs: &[(u64, u64)], from: *const u8, bytes: usize) -> Result<(), Code> {
        self.check_all(runs, bytes, true)?;
        if !self.is_mapped {
            // SAFETY: the ranges have no more bytes together than the memory (checked).
            return unsafe { self.put_ranges(runs, from) };
        }
        let mut at = 0;
        for (offset, bytes) in runs {
            // SAFETY: the ranges have no more bytes together than the memory (checked).
            unsafe { self.put(*offset, from.add(at), *bytes as usize)? };
            at += *bytes as usize;
        }
        Ok(())
    }

    /// Copies several ranges, in their order, to consecutive bytes at `to`.
    ///
    /// # Errors
    /// As [`Striped::get`] and [`Striped::put_runs`].
    ///
    /// # Safety
    /// `to` is writable for `bytes` bytes.
    pub unsafe fn get_runs(&self, runs: &[(u64, u64)], to: *mut u8, bytes: usize) -> Result<(), Code> {
        self.check_all(runs, bytes, false)?;
        if !self.is_mapped {
            // SAFETY: as in `put_runs`.
            return unsafe { self.get_ranges(runs, to) };
        }
        let mut at = 0;
        for (offset, bytes) in runs {
            // SAFETY: as in `put_runs`.
            unsafe { self.get(*offset, to.add(at), *bytes as usize)? };
            at += *bytes as usize;
        }
        Ok(())
    }

    /// Changes the 64-bit word at an offset. [`Code::Invalid`] unless the offset is a multiple of 8;
    /// [`Code::NotSupported`] for a thin volume; [`Code::Io`] if its piece on another node cannot be reached, and then it
    /// may be changed or not.
    #[inline]
    fn atomic(&self, offset: u64, op: AtomicOp) -> Result<u64, Code> {
        if !offset.is_multiple_of(8) {
            return Err(Code::Invalid);
        }
        self.check(offset, 8, true)?;
        match (self.place(offset).0, &self.far) {
            // SAFETY: mapped as long as `self`, and aligned, since pieces and stripes are whole pages. Other access to
            // the word is by copies outside of Rust, or atomic.
            (Place::Here(pointer), _) => Ok(op.apply(unsafe { AtomicU64::from_ptr(pointer.cast()) })),
            (Place::There(piece, offset), Some(far)) => far.atomic(piece, PieceWord::At(offset), op),
            (Place::There(..), None) => Err(Code::Io),
            (Place::File(..), _) => Err(Code::NotSupported),
        }
    }

    /// Replaces the word at an offset by `new` if it is `expected`. Returns what it was.
    #[inline]
    pub fn compare_and_swap(&self, offset: u64, expected: u64, new: u64) -> Result<u64, Code> {
        self.atomic(offset, AtomicOp::CompareAndSwap { expected, new })
    }

    /// Adds to the word at an offset, modulo 2^64. Returns what it was.
    #[inline]
    pub fn fetch_add(&self, offset: u64, by: u64) -> Result<u64, Code> {
        self.atomic(offset, AtomicOp::Add { by })
    }

    /// Replaces the word at an offset. Returns what it was.
    #[inline]
    pub fn swap(&self, offset: u64, new: u64) -> Result<u64, Code> {
        self.atomic(offset, AtomicOp::Swap { new })
    }

    /// Orders this thread's calls before it before those after it, as all processes see them.
    #[inline]
    pub fn fence(&self) -> Result<(), Code> {
        fence(Ordering::SeqCst);
        self.check_life()
    }

    /// Returns when the bytes of all puts of this thread are where every process gets them from. An error means that some
    /// may have gone to a pool that was dead already.
    #[inline]
    pub fn flush(&self) -> Result<(), Code> {
        // All puts are done when they return. The order matters: the life is read after them.
        self.fence()?;
        self.far.as_ref().map_or(Ok(()), |far| far.check())
    }

    /// The address of the volume's byte `offset`, and how many bytes follow each other from there on, for a program that
    /// accesses it by itself. No access through it notices the death of the pool.
    ///
    /// # Errors
    /// [`Code::Range`] at and beyond the end, [`Code::NotSupported`] for a byte on another node, [`Code::PoolGone`].
    pub fn map(&self, offset: u64) -> Result<(*mut u8, u64), Code> {
        self.check(offset, 1, false)?;
        match self.place(offset) {
            (Place::Here(pointer), run) => Ok((pointer, run.min(self.bytes - offset))),
            (Place::File(..) | Place::There(..), _) => Err(Code::NotSupported),
        }
    }
}

/// The word that says where a volume's file ends (`file.rs`).
#[derive(Clone, Copy, Debug)]
pub(crate) enum EndWord<'a> {
    /// In this process's memory.
    Here(&'a AtomicU64),
    /// Beside the first piece, which is on another node: each access is a request.
    There(&'a dyn Far, BackingId),
}

impl EndWord<'_> {
    /// Executes an operation. Returns what the word was. [`Code::Io`] if its node cannot be reached: it may be executed.
    #[inline]
    pub(crate) fn apply(self, op: AtomicOp) -> Result<u64, Code> {
        match self {
            EndWord::Here(word) => Ok(op.apply(word)),
            EndWord::There(far, piece) => far.atomic(piece, PieceWord::End, op),
        }
    }

    /// What the word is.
    #[inline]
    pub(crate) fn load(self) -> Result<u64, Code> {
        match self {
            EndWord::Here(word) => Ok(word.load(Ordering::Acquire)),
            EndWord::There(..) => self.apply(AtomicOp::Load),
        }
    }

    /// Has the word be at least `least`.
    #[inline]
    pub(crate) fn raise(self, least: u64) -> Result<(), Code> {
        match self {
            // Writers of one file would pass the word's line around at each write.
            EndWord::Here(word) if word.load(Ordering::Acquire) >= least => Ok(()),
            _ => self.apply(AtomicOp::Max { least }).map(drop),
        }
    }

    /// Replaces the word by what `change` makes of it, and returns what it was; the word as it is, as an error, where
    /// `change` makes nothing of it.
    pub(crate) fn update(self, change: impl Fn(u64) -> Option<u64>) -> Result<Result<u64, u64>, Code> {
        let mut expected = self.load()?;
        loop {
            let Some(new) = change(expected) else { return Ok(Err(expected)) };
            match self.apply(AtomicOp::CompareAndSwap { expected, new })? {
                was if was == expected => return Ok(Ok(was)),
                was => expected = was,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapped::testing::{mapped, set};
    use proptest::prelude::*;

    /// Every shape: one piece, stripes, segments, joined volumes.
    fn shapes() -> Vec<Striped> {
        let page = 4096;
        let one = |segments: &[(u64, u64, u16)]| Striped::new(vec![mapped(segments, true).0]).unwrap();
        vec![
            one(&[(16 * page, page, 1)]),
            one(&[(15 * page, 2 * page, 3)]),
            one(&[(page, page, 8), (14 * page, page, 2), (page, page, 1)]),
            Striped::new((1..4).map(|n| mapped(&[(n << 20, page, n as u16)], true).0).collect()).unwrap(),
        ]
    }

    fn put(volume: &Striped, offset: u64, bytes: &[u8]) -> Result<(), Code> {
        // SAFETY: the slice is readable.
        unsafe { volume.put(offset, bytes.as_ptr(), bytes.len()) }
    }

    fn get(volume: &Striped, offset: u64, bytes: usize) -> Result<Vec<u8>, Code> {
        let mut out = vec![0; bytes];
        // SAFETY: the vector is writable.
        unsafe { volume.get(offset, out.as_mut_ptr(), bytes) }.map(|()| out)
    }

    #[derive(Clone, Debug)]
    enum Step {
        Put(prop::sample::Index, usize, u8),
        Runs(Vec<(prop::sample::Index, usize)>, u8),
        Add(prop::sample::Index, u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let put = (any::<prop::sample::Index>(), 0usize..20_000, any::<u8>())
            .prop_map(|(a, n, b)| Step::Put(a, n, b));
        let run = (any::<prop::sample::Index>(), 0usize..5_000);
        let runs = (prop::collection::vec(run, 0..5), any::<u8>()).prop_map(|(r, b)| Step::Runs(r, b));
        let add = (any::<prop::sample::Index>(), any::<u64>()).prop_map(|(a, n)| Step::Add(a, n));
        prop::collection::vec(prop_oneof![put, runs, add], 1..20)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        /// A volume is an array of bytes, whatever its pieces are.
        #[test]
        fn accesses_do_what_they_do_to_an_array(steps in steps()) {
            for volume in shapes() {
                let mut model = vec![0u8; volume.bytes() as usize];
                let all = model.len();
                for step in &steps {
                    match step {
                        Step::Put(at, n, byte) => {
                            let (at, data) = (at.index(all), vec![*byte; *n]);
                            let expected = if at + n <= all { Ok(()) } else { Err(Code::Range) };
                            prop_assert_eq!(put(&volume, at as u64, &data), expected);
                            if expected.is_ok() {
                                model[at..at + n].copy_from_slice(&data);
                            }
                        }
                        Step::Runs(runs, byte) => {
                            let runs: Vec<(u64, u64)> =
                                runs.iter().map(|(at, n)| (at.index(all) as u64, *n as u64)).collect();
                            let total: u64 = runs.iter().map(|(_, n)| n).sum();
                            let data: Vec<u8> = (0..total).map(|i| byte.wrapping_add(i as u8)).collect();
                            let fits = runs.iter().all(|(at, n)| at + n <= all as u64);
                            // SAFETY: the vector is readable.
                            let done = unsafe { volume.put_runs(&runs, data.as_ptr(), data.len()) };
                            prop_assert_eq!(done, if fits { Ok(()) } else { Err(Code::Range) });
                            if fits {
                                let mut from = 0;
                                for (at, n) in &runs {
                                    let (at, n) = (*at as usize, *n as usize);
                                    model[at..at + n].copy_from_slice(&data[from..from + n]);
                                    from += n;
                                }
                                let mut out = vec![0; data.len()];
                                // SAFETY: the vector is writable.
                                let got = unsafe { volume.get_runs(&runs, out.as_mut_ptr(), out.len()) };
                                prop_assert_eq!(got, Ok(()));
                                let expected: Vec<u8> = runs
                                    .iter()
                                    .flat_map(|(at, n)| model[*at as usize..(at + n) as usize].to_vec())
                                    .collect();
                                prop_assert_eq!(out, expected);
                            }
                        }
                        Step::Add(at, by) => {
                            let at = at.index(all) / 8 * 8;
                            let word: &mut [u8; 8] = (&mut model[at..at + 8]).try_into().unwrap();
                            let was = u64::from_ne_bytes(*word);
                            prop_assert_eq!(volume.fetch_add(at as u64, *by), Ok(was));
                            *word = was.wrapping_add(*by).to_ne_bytes();
                        }
                    }
                }
                prop_assert!(get(&volume, 0, all) == Ok(model));
            }
        }
    }

    #[test]
    fn bad_offsets_lengths_and_lists_are_refused_and_change_nothing() {
        for volume in shapes() {
            let end = volume.bytes();
            put(&volume, 0, &[7; 100]).unwrap();
            for (offset, bytes) in [(end, 1), (end - 1, 2), (u64::MAX, 1), (u64::MAX, 0), (end + 1, 0)] {
                assert_eq!(put(&volume, offset, &vec![9; bytes]), Err(Code::Range), "{offset} {bytes}");
                assert_eq!(get(&volume, offset, bytes), Err(Code::Range), "{offset} {bytes}");
            }
            assert_eq!(put(&volume, end, &[]), Ok(()), "nothing, at the end");
            for offset in [1, 4, 7, end - 4] {
                assert_eq!(volume.fetch_add(offset, 1), Err(Code::Invalid), "{offset}");
            }
            assert_eq!(volume.swap(end, 1), Err(Code::Range));
            let data = [9u8; 16];
            for (runs, code) in [
                (vec![(0, 8), (end - 4, 8)], Code::Range),
                (vec![(0, 8), (8, 9)], Code::Invalid),
                (vec![(0, 8)], Code::Invalid),
                (vec![(u64::MAX, 8), (0, 8)], Code::Range),
            ] {
                // SAFETY: the array is readable.
                assert_eq!(unsafe { volume.put_runs(&runs, data.as_ptr(), 16) }, Err(code), "{runs:?}");
            }
            assert_eq!(get(&volume, 0, 101).unwrap(), [[7; 100].as_slice(), &[0]].concat());
            assert_eq!(volume.map(end).map(drop), Err(Code::Range));
        }
    }

    #[test]
    fn volume_open_for_reading_is_not_written_and_a_dead_pools_volume_is_not_touched() {
        let (read_only, _life) = mapped(&[(8192, 4096, 1)], false);
        let read_only = Striped::new(vec![read_only]).unwrap();
        assert_eq!(put(&read_only, 0, b"x"), Err(Code::BadDescriptor));
        assert_eq!(read_only.compare_and_swap(0, 0, 1), Err(Code::BadDescriptor));
        assert_eq!(get(&read_only, 8191, 1).unwrap(), [0]);
        let (part, life) = mapped(&[(8192, 4096, 1)], true);
        let volume = Striped::new(vec![part]).unwrap();
        put(&volume, 0, b"before").unwrap();
        let (place, run) = volume.map(4000).unwrap();
        assert!(!place.is_null() && run == 8192 - 4000);
        assert_eq!((volume.flush(), volume.fence()), (Ok(()), Ok(())));
        set(&life, 0);
        assert_eq!(put(&volume, 0, b"after!"), Err(Code::PoolGone));
        assert_eq!(get(&volume, 0, 6), Err(Code::PoolGone));
        assert_eq!(volume.swap(0, 1), Err(Code::PoolGone));
        assert_eq!((volume.flush(), volume.fence()), (Err(Code::PoolGone), Err(Code::PoolGone)));
        assert_eq!(volume.map(0).map(drop), Err(Code::PoolGone));
    }

    #[test]
    fn joined_volumes_are_as_large_as_whole_stripes_of_the_smallest() {
        let part = |bytes| mapped(&[(bytes, 4096, 1)], true).0;
        let joined = Striped::new(vec![part(3 << 20), part((2 << 20) + 4096)]).unwrap();
        assert_eq!(joined.bytes(), 4 << 20);
        assert_eq!(Striped::new(vec![part(3 << 20), part(4096)]).map(drop), Err(Code::Invalid));
        assert_eq!(Striped::new(vec![]).map(drop), Err(Code::Invalid));
        put(&joined, (1 << 20) - 1, b"ab").unwrap();
        assert_eq!(get(&joined, (1 << 20) - 1, 2).unwrap(), b"ab");
    }

    #[test]
    fn put_from_the_volume_itself_is_a_move() {
        let volume = &shapes()[0];
        put(volume, 0, b"0123456789").unwrap();
        let (place, _) = volume.map(0).unwrap();
        // SAFETY: the volume's own memory is readable.
        unsafe { volume.put(3, place, 7) }.unwrap();
        assert_eq!(get(volume, 0, 10).unwrap(), b"0120123456");
    }
}
