//! Files that wait for a batch, while more may come. A leaf mutex.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Bytes of one batch, after which no further file is added to it, but for [`BATCH_FILES_LEAST`]. Files of a batch become
/// clean together, and only then can they be released: programs may be waiting for that.
const BATCH_BYTES: u64 = 64 << 20;
const BATCH_FILES_LEAST: usize = 2;

/// Files of one pass that are uploaded in batches, each an `F` with its bytes when the pass came to it.
#[derive(Debug)]
pub(super) struct UploadQueue<F> {
    state: Mutex<State<F>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<F> {
    files: VecDeque<(F, u64)>,
    /// More files may come.
    is_open: bool,
}

/// A queue to which files are added. No more come when this is dropped.
pub(super) struct Adding<'a, F>(&'a UploadQueue<F>);

impl<F> UploadQueue<F> {
    /// These files and no others.
    pub(super) fn of(files: Vec<(F, u64)>) -> UploadQueue<F> {
        UploadQueue::new(files, false)
    }

    /// A queue without files, to which some will be added. Calls for batches wait for files until the [`Adding`] is dropped.
    pub(super) fn open() -> UploadQueue<F> {
        UploadQueue::new(Vec::new(), true)
    }

    fn new(files: Vec<(F, u64)>, is_open: bool) -> UploadQueue<F> {
        UploadQueue { state: Mutex::new(State { files: files.into(), is_open }), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State<F>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For files that come to an open queue.
    pub(super) fn adding(&self) -> Adding<'_, F> {
        Adding(self)
    }

    /// For how many batches at a time there are files now, `most` at most.
    pub(super) fn batches(&self, most: usize) -> usize {
        self.lock().files.len().clamp(1, most)
    }

    /// The next files that are uploaded and made durable together, as many as `most` says at most, which is called once there
    /// are some. Waits while there are none and more may come; none if no more do.
    pub(super) fn next_batch(&self, most: impl FnOnce() -> usize) -> Vec<F> {
        let is_to_come = |state: &mut State<F>| state.files.is_empty() && state.is_open;
        let waited = self.changed.wait_while(self.lock(), is_to_come);
        let files = &mut waited.unwrap_or_else(PoisonError::into_inner).files;
        let mut bytes = 0;
        let n = files.iter().take(most()).enumerate().take_while(|(i, (_, more))| {
            let fits = *i < BATCH_FILES_LEAST || bytes < BATCH_BYTES;
            bytes += more;
            fits
        });
        let n = n.count();
        files.drain(..n).map(|(file, _)| file).collect()
    }

    /// The files that no batch has taken.
    pub(super) fn into_left(self) -> impl Iterator<Item = F> {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        state.files.into_iter().map(|(file, _)| file)
    }
}

impl<F> Adding<'_, F> {
    pub(super) fn add(&self, files: Vec<(F, u64)>) {
        self.0.lock().files.extend(files);
        self.0.changed.notify_all();
    }

    /// No more files come. Returns those that wait behind the next `most`.
    pub(super) fn end(self, most: usize) -> Vec<F> {
        let files = &mut self.0.lock().files;
        let most = most.min(files.len());
        files.split_off(most).into_iter().map(|(file, _)| file).collect()
    }
}

impl<F> Drop for Adding<'_, F> {
    fn drop(&mut self) {
        self.0.lock().is_open = false;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_has_so_many_files_and_bytes_at_most() {
        let queue = UploadQueue::of((1..=5).map(|file| (file, 1)).collect());
        assert_eq!((queue.batches(3), queue.batches(8)), (3, 5));
        assert_eq!(queue.next_batch(|| 3), [1, 2, 3]);
        assert_eq!(queue.next_batch(|| 3), [4, 5]);
        assert_eq!(queue.next_batch(|| 3), [0; 0]);
        let queue = UploadQueue::of((1..=4).map(|file| (file, BATCH_BYTES)).collect());
        assert_eq!(queue.next_batch(|| 10), [1, 2]);
        assert!(queue.into_left().eq([3, 4]));
    }

    #[test]
    fn batch_waits_for_files_that_are_to_come_and_ends_when_no_more_do() {
        let queue = UploadQueue::open();
        std::thread::scope(|scope| {
            let adding = queue.adding();
            let next = scope.spawn(|| queue.next_batch(|| 8));
            adding.add(vec![(1, 1), (2, 1)]);
            assert_eq!(next.join().unwrap(), [1, 2]);
            let next = scope.spawn(|| queue.next_batch(|| 8));
            drop(adding);
            assert_eq!(next.join().unwrap(), [0; 0]);
        });
        let queue = UploadQueue::open();
        let adding = queue.adding();
        adding.add((1..=5).map(|file| (file, 1)).collect());
        assert_eq!(adding.end(3), [4, 5]);
        assert_eq!(queue.next_batch(|| 8), [1, 2, 3]);
        assert_eq!(queue.next_batch(|| 8), [0; 0]);
    }
}
