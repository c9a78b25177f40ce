//! The ranges of files that are being restored: which have arrived, and which readers wait for.
//!
//! The threads of a restore ([`Copier`]) take the ranges first for which readers wait, then those behind the last one of them, and in
//! the end the rest. Behind a reader the pieces are small at first, so that it does not wait for a large one, and grow.
//!
//! What has arrived in a backing file never leaves it, because readers have it open (`crates/client/src/ranges.rs`): a
//! restore that goes on after a failure, or after a rename in the store, fills the same backing file, and one that begins
//! anew has another. A backing file is of one version. Once there was no room for a range, readers are told so of each
//! range that they want and that has not arrived: they read it from the store (`through.rs`). Mutexes here are leaves.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use forebay_types::limits::RANGE_BYTES;
use forebay_types::{Ino, RestoredRange, StoreVersion};

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ranges that one call of the store copies, at most.
const RANGES_AT_ONCE: u64 = 8;
/// Ranges of one report, at most.
const REPORTED_MAX: u64 = 256;

/// The threads that copy a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Copier {
    /// Copies what readers wait for, and waits for them.
    ForReaders,
    /// Copies all.
    First,
    /// Copies all, but waits while the file is restored in the background.
    Other,
}

/// A range of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    Missing,
    OnItsWay,
    There,
}

/// The backing file of a restore.
#[derive(Debug)]
pub(super) struct Backing {
    pub(super) file: OwnedFd,
    /// The kernel's number of it.
    pub(super) number: u64,
}

#[derive(Debug, Default)]
struct State {
    backing: Option<Arc<Backing>>,
    /// The file's epoch, and the store's version that is copied into the backing file.
    is_for: (u64, StoreVersion),
    parts: Vec<Part>,
    /// Ranges for which readers wait, as far as they were not reported.
    asked: BTreeSet<u64>,
    /// The range behind the last one that a reader asked for, if any did.
    behind: Option<u64>,
    /// Where the search for a missing range begins, and how many are missing.
    cursor: u64,
    missing: u64,
    /// An attempt to copy is under way, and has not failed.
    runs: bool,
    /// There was no room for the file: readers do not wait for it.
    lacks_room: bool,
    /// A task restores it whose turn has not come, and nobody waits for it: one thread copies.
    is_in_background: bool,
}

/// A file that is being restored.
#[derive(Debug, Default)]
pub(super) struct FileRanges {
    state: Mutex<State>,
    changed: Condvar,
}

impl State {
    fn bytes_of(&self, ranges: Range<u64>) -> Range<u64> {
        let bytes = self.is_for.1.bytes;
        (ranges.start * RANGE_BYTES).min(bytes)..(ranges.end * RANGE_BYTES).min(bytes)
    }

    fn is(&self, range: u64, part: Part) -> bool {
        usize::try_from(range).ok().and_then(|i| self.parts.get(i)) == Some(&part)
    }

    /// What has arrived from a range on.
    fn arrived_from(&self, range: u64) -> Option<RestoredRange> {
        let backing = self.backing.as_ref().filter(|_| self.is(range, Part::There))?;
        let mut to = range + 1;
        while to < range + REPORTED_MAX && self.is(to, Part::There) {
            to += 1;
        }
        let bytes = self.bytes_of(range..to);
        Some(RestoredRange { backing: backing.number, from: bytes.start, to: bytes.end })
    }

    /// What a reader is told of a range for which there is no room.
    fn without_room(range: u64) -> RestoredRange {
        let from = range.saturating_mul(RANGE_BYTES);
        RestoredRange { backing: RestoredRange::NO_ROOM, from, to: from.saturating_add(RANGE_BYTES) }
    }

    /// Takes ranges one after the other from `first` on.
    fn take(&mut self, first: u64, most: u64) -> Range<u64> {
        let mut end = first;
        while end < first + most && self.is(end, Part::Missing) {
            self.parts[end as usize] = Part::OnItsWay;
            self.missing -= 1;
            end += 1;
        }
        first..end
    }

    fn take_asked(&mut self) -> Option<Range<u64>> {
        let first = self.asked.iter().copied().find(|range| self.is(*range, Part::Missing))?;
        Some(self.take(first, 1))
    }

    /// The ranges that are copied next when no reader waits.
    fn take_next(&mut self) -> Option<Range<u64>> {
        if self.missing == 0 {
            return None;
        }
        let count = self.parts.len() as u64;
        let cursor = self.cursor.min(count);
        let first = (cursor..count).chain(0..cursor).find(|range| self.is(*range, Part::Missing))?;
        let most = match self.behind {
            Some(behind) if first >= behind => (first - behind).clamp(1, RANGES_AT_ONCE),
            _ => RANGES_AT_ONCE,
        };
        let taken = self.take(first, most);
        self.cursor = taken.end;
        Some(taken)
    }
}

impl FileRanges {
    fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    /// A reader waits for a range. What has arrived from it on, if it has, or that there is no room for it.
    fn ask(&self, range: u64) -> Option<RestoredRange> {
        let mut state = self.state();
        (state.behind, state.cursor) = (Some(range + 1), range + 1);
        if std::mem::take(&mut state.is_in_background) {
            self.changed.notify_all();
        }
        let arrived =
            state.arrived_from(range).or_else(|| state.lacks_room.then(|| State::without_room(range)));
        if arrived.is_none() {
            state.asked.insert(range);
            self.changed.notify_all();
        }
        arrived
    }

    /// Begins an attempt to copy the file of an epoch and a version: in the backing file of the last attempt if that was
    /// for the same data, else in one that `make` makes.
    pub(super) fn begin<E>(
        &self,
        is_for: (u64, StoreVersion),
        make: impl FnOnce() -> Result<Backing, E>,
    ) -> Result<Arc<Backing>, E> {
        let mut state = self.state();
        let backing = match state.backing.take() {
            Some(backing) if state.is_for == is_for => backing,
            _ => {
                let count = usize::try_from(is_for.1.bytes.div_ceil(RANGE_BYTES)).unwrap_or(usize::MAX);
                state.parts = vec![Part::Missing; count];
                state.missing = count as u64;
                state.cursor = state.behind.unwrap_or(0);
                Arc::new(make()?)
            }
        };
        state.is_for = is_for;
        state.backing = Some(Arc::clone(&backing));
        // Of readers of a longer file.
        let count = state.parts.len() as u64;
        state.asked.retain(|range| *range < count);
        state.runs = true;
        Ok(backing)
    }

    /// One thread copies the file from now on, unless a reader has waited for it.
    pub(super) fn put_in_background(&self) {
        let mut state = self.state();
        state.is_in_background = state.behind.is_none();
    }

    /// All threads copy the file.
    pub(super) fn bring_forward(&self) {
        self.state().is_in_background = false;
        self.changed.notify_all();
    }

    /// The next bytes to copy; none when none are missing, or the attempt has failed. Waits where `copier` is to wait.
    pub(super) fn next(&self, copier: Copier) -> Option<Range<u64>> {
        let mut state = self.state();
        loop {
            if !state.runs {
                return None;
            }
            let waits = match copier {
                Copier::ForReaders => true,
                Copier::First => false,
                Copier::Other => state.is_in_background,
            };
            let taken = match state.take_asked() {
                None if !waits => state.take_next(),
                taken => taken,
            };
            if let Some(taken) = taken {
                if state.missing == 0 {
                    self.changed.notify_all();
                }
                return Some(state.bytes_of(taken));
            }
            if !waits || state.missing == 0 {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Bytes that [`FileRanges::next`] returned have arrived. What is to be reported to readers that wait.
    pub(super) fn arrived(&self, bytes: Range<u64>) -> Option<RestoredRange> {
        let mut state = self.state();
        let ranges = bytes.start / RANGE_BYTES..bytes.end.div_ceil(RANGE_BYTES);
        for range in ranges.clone() {
            if let Some(part) = state.parts.get_mut(range as usize) {
                *part = Part::There;
            }
        }
        let report = state.asked.range(ranges).next().copied().and_then(|range| state.arrived_from(range))?;
        state.asked.retain(|range| !(report.from..report.to).contains(&(range * RANGE_BYTES)));
        Some(report)
    }

    /// The attempt has ended: what is on its way has not arrived.
    pub(super) fn stop(&self) {
        let mut state = self.state();
        state.runs = false;
        let mut returned = 0;
        for part in state.parts.iter_mut().filter(|part| **part == Part::OnItsWay) {
            *part = Part::Missing;
            returned += 1;
        }
        state.missing += returned;
        state.cursor = state.behind.unwrap_or(0);
        drop(state);
        self.changed.notify_all();
    }

    /// No further calls are made in this attempt; those under way may still end well.
    pub(super) fn fail(&self) {
        self.state().runs = false;
        self.changed.notify_all();
    }

    /// There is no room for what is missing: readers do not wait for it. What is to be reported to those that do. `None`
    /// if that was known.
    pub(super) fn lacks_room(&self) -> Option<Vec<RestoredRange>> {
        let mut state = self.state();
        let was_known = std::mem::replace(&mut state.lacks_room, true);
        let asked = std::mem::take(&mut state.asked);
        (!was_known).then(|| asked.into_iter().map(State::without_room).collect())
    }

    /// The store has other data by now: the next attempt begins anew.
    pub(super) fn begin_anew(&self) {
        self.state().backing = None;
    }

    /// Bytes that have arrived.
    pub(super) fn arrived_bytes(&self) -> u64 {
        let state = self.state();
        let there = state.parts.iter().filter(|part| **part == Part::There).count();
        if state.backing.is_some() {
            there as u64 * RANGE_BYTES
        } else {
            0
        }
    }

    /// True when there is a backing file.
    fn has_backing(&self) -> bool {
        self.state().backing.is_some()
    }
}

/// The files that are being restored.
#[derive(Debug, Default)]
pub(super) struct Ranges(Mutex<HashMap<u64, Arc<FileRanges>>>);

impl Ranges {
    /// The ranges of a file that is being restored, or about to be.
    pub(super) fn of(&self, ino: Ino) -> Arc<FileRanges> {
        Arc::clone(locked(&self.0).entry(ino.0).or_default())
    }

    /// A reader waits for a range of a file. What has arrived from it on, if it has, or that there is no room for it.
    pub(super) fn ask(&self, ino: Ino, range: u64) -> Option<RestoredRange> {
        self.of(ino).ask(range)
    }

    /// All threads copy a file, if it is being restored in the background.
    pub(super) fn bring_forward(&self, ino: Ino) {
        let file = locked(&self.0).get(&ino.0).map(Arc::clone);
        if let Some(file) = file {
            file.bring_forward();
        }
    }

    /// A restore has ended. True when it leaves a backing file.
    pub(super) fn end(&self, ino: Ino) -> bool {
        locked(&self.0).remove(&ino.0).is_some_and(|file| file.has_backing())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 40 * RANGE_BYTES + 5;

    fn version(ino: u64) -> StoreVersion {
        StoreVersion { bytes: BYTES, ino, ..StoreVersion::default() }
    }

    fn backing(number: u64) -> Backing {
        Backing { file: std::fs::File::open("/dev/null").unwrap().into(), number }
    }

    fn begun() -> FileRanges {
        let file = FileRanges::default();
        file.begin((1, version(1)), || Ok::<_, ()>(backing(7))).unwrap();
        file
    }

    fn next(file: &FileRanges) -> Option<(u64, u64)> {
        file.next(Copier::First).map(|bytes| (bytes.start / RANGE_BYTES, bytes.end.div_ceil(RANGE_BYTES)))
    }

    #[test]
    fn without_readers_a_file_is_copied_from_its_begin_in_large_pieces() {
        let file = begun();
        let all: Vec<_> = std::iter::from_fn(|| next(&file)).collect();
        assert_eq!(all, [(0, 8), (8, 16), (16, 24), (24, 32), (32, 40), (40, 41)]);
        assert_eq!(file.arrived(40 * RANGE_BYTES..BYTES), None, "no reader waits");
    }

    #[test]
    fn ranges_that_readers_want_come_first_and_then_those_behind() {
        let file = begun();
        assert_eq!(next(&file), Some((0, 8)));
        assert_eq!(file.ask(30), None);
        assert_eq!(file.ask(20), None);
        assert_eq!([next(&file), next(&file)], [Some((20, 21)), Some((30, 31))]);
        let rest: Vec<_> = std::iter::from_fn(|| next(&file)).collect();
        assert_eq!(
            rest,
            [(21, 22), (22, 23), (23, 25), (25, 29), (29, 30), (31, 39), (39, 41), (8, 16), (16, 20)]
        );
    }

    #[test]
    fn a_reader_is_told_of_all_that_has_arrived_from_its_range() {
        let file = begun();
        file.ask(1);
        assert_eq!(next(&file), Some((1, 2)));
        file.ask(2);
        let bytes = |from, to| from * RANGE_BYTES..to * RANGE_BYTES;
        assert_eq!(
            file.arrived(bytes(1, 2)),
            Some(RestoredRange { backing: 7, from: RANGE_BYTES, to: 2 * RANGE_BYTES })
        );
        assert_eq!([next(&file), next(&file)], [Some((2, 3)), Some((3, 4))]);
        assert_eq!(file.arrived(bytes(3, 4)), None, "no reader waits for it");
        assert_eq!(
            file.arrived(bytes(2, 3)),
            Some(RestoredRange { backing: 7, from: 2 * RANGE_BYTES, to: 4 * RANGE_BYTES })
        );
        assert_eq!(file.arrived(bytes(2, 3)), None, "once");
        let arrived = RestoredRange { backing: 7, from: RANGE_BYTES, to: 4 * RANGE_BYTES };
        assert_eq!(file.ask(1), Some(arrived), "at once");
    }

    #[test]
    fn what_has_arrived_stays_for_the_next_attempt_unless_the_data_are_others() {
        let file = begun();
        assert_eq!([next(&file), next(&file)], [Some((0, 8)), Some((8, 16))]);
        file.arrived(0..8 * RANGE_BYTES);
        file.stop();
        assert_eq!(next(&file), None);
        let again = file.begin((1, version(1)), || Ok::<_, ()>(backing(8))).unwrap();
        assert_eq!((again.number, next(&file)), (7, Some((8, 16))));
        assert_eq!(file.arrived_bytes(), 8 * RANGE_BYTES);
        file.stop();
        file.begin_anew();
        let again = file.begin((1, version(1)), || Ok::<_, ()>(backing(8))).unwrap();
        assert_eq!((again.number, next(&file)), (8, Some((0, 8))));
        file.stop();
        let again = file.begin((2, version(1)), || Ok::<_, ()>(backing(9))).unwrap();
        assert_eq!((again.number, next(&file)), (9, Some((0, 8))), "another epoch");
        file.stop();
        let again = file.begin((2, version(2)), || Ok::<_, ()>(backing(10))).unwrap();
        assert_eq!(
            (again.number, next(&file)),
            (10, Some((0, 8))),
            "another file of the same size in the store"
        );
    }

    #[test]
    fn readers_are_told_that_there_is_no_room_for_what_has_not_arrived() {
        let file = begun();
        assert_eq!(next(&file), Some((0, 8)));
        file.arrived(0..8 * RANGE_BYTES);
        assert_eq!(file.ask(9), None);
        let no_room = RestoredRange { backing: 0, from: 9 * RANGE_BYTES, to: 10 * RANGE_BYTES };
        assert_eq!(file.lacks_room(), Some(vec![no_room]));
        assert_eq!(file.lacks_room(), None, "it is known");
        file.stop();
        assert_eq!(file.ask(9), Some(no_room));
        assert_eq!(file.ask(2).map(|range| range.backing), Some(7), "it has arrived");
    }

    #[test]
    fn a_thread_for_readers_waits_for_them_and_ends_with_the_attempt() {
        let file = begun();
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| file.next(Copier::ForReaders));
            file.ask(5);
            assert_eq!(asked.join().unwrap(), Some(5 * RANGE_BYTES..6 * RANGE_BYTES));
            let rests = scope.spawn(|| file.next(Copier::ForReaders));
            while next(&file).is_some() {}
            assert_eq!(rests.join().unwrap(), None, "nothing is missing");
        });
        let file = begun();
        std::thread::scope(|scope| {
            let rests = scope.spawn(|| file.next(Copier::ForReaders));
            file.fail();
            assert_eq!(rests.join().unwrap(), None);
        });
    }

    #[test]
    fn one_thread_copies_in_the_background_until_a_reader_waits_or_the_turn_comes() {
        let reads: fn(&FileRanges) = |file| assert_eq!(file.ask(30), None);
        // A reader may go back to what has arrived.
        let reads_again: fn(&FileRanges) = |file| assert_eq!(file.ask(2).map(|range| range.backing), Some(7));
        for bring_forward in [reads, reads_again, FileRanges::bring_forward] {
            let file = begun();
            file.put_in_background();
            std::thread::scope(|scope| {
                let (done, taken) = std::sync::mpsc::channel();
                let other = &file;
                scope.spawn(move || done.send(other.next(Copier::Other)).unwrap());
                assert_eq!([next(&file), next(&file)], [Some((0, 8)), Some((8, 16))]);
                file.arrived(0..8 * RANGE_BYTES);
                let wait = std::time::Duration::from_millis(20);
                assert!(taken.recv_timeout(wait).is_err(), "it waits");
                bring_forward(&file);
                let taken = taken.recv_timeout(1000 * wait);
                file.fail(); // or the thread waits for ever
                assert!(taken.is_ok_and(|taken| taken.is_some()));
            });
        }
        let file = begun();
        assert_eq!(file.ask(30), None);
        file.put_in_background();
        assert!(!file.state().is_in_background, "a reader has asked before");
        let file = begun();
        file.put_in_background();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| file.next(Copier::Other));
            while next(&file).is_some() {}
            assert_eq!(other.join().unwrap(), None, "nothing is missing");
        });
    }

    #[test]
    fn ends_of_restores_forget_the_files() {
        let ranges = Ranges::default();
        assert_eq!(ranges.ask(Ino(5), 3), None);
        assert!(!ranges.end(Ino(5)), "it has no backing file yet");
        ranges.of(Ino(5)).begin((1, version(1)), || Ok::<_, ()>(backing(7))).unwrap();
        assert!(ranges.end(Ino(5)) && !ranges.end(Ino(5)));
    }
}
