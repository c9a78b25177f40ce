//! Uploads the files of a queue in batches, some at a time.

use std::sync::atomic::{AtomicU32, Ordering};

use super::batch::{upload_batch, Turn, Turns};
use super::link::Link;
use super::pass::{Pass, Reason};
use super::reconcile::seconds_since;
use super::shared::{locked, Shared};
use super::stores::AttachedStore;
use super::upload_queue::UploadQueue;
use super::wanted::{OpenFiles, WantedUpload};
use crate::host;
use crate::store::Store;
use crate::tasks::Progress;

/// Files of one batch: they are made durable together.
pub(super) const BATCH_FILES: usize = 1024;
/// The same where names are slow: what the syncs of a batch take is little beside its uploads, and names, of which a
/// directory gets one at a time, are made while other files are copied.
pub(super) const BATCH_FILES_SLOW_NAMES: usize = 32;
/// The same of the first batch there, each further one having twice as many: no file of a batch gets its name before all
/// of them are copied, and a directory that gets one name at a time should not wait long for the first.
pub(super) const BATCH_FILES_FIRST: usize = 4;
/// A file of at least so many bytes is made durable alone: it becomes clean when it is copied.
pub(super) const ALONE_BYTES: u64 = 8 << 20;
/// Batches at a time: while the store makes one durable, the next is copied.
pub(super) const BATCHES_AT_ONCE: usize = 3;
/// The same where names are slow: together they have files for all calls that a store gets, while others get their names.
pub(super) const BATCHES_AT_ONCE_SLOW_NAMES: usize = 6;
/// How a file is copied that programs have open for writing.
pub(super) fn open_files(
    link: &Link,
    at: &AttachedStore,
    wanted: &WantedUpload,
    reason: Reason<'_>,
) -> OpenFiles {
    if reason.forced {
        return OpenFiles::Copied;
    }
    let place = &wanted.place;
    let Some(period) = at.policy_of(link, place).snapshot else {
        return OpenFiles::Wait;
    };
    let snapshots = locked(&at.snapshots);
    let is_due = match snapshots.get(&wanted.entry.attr.ino.0) {
        Some(last) => last.elapsed() >= period,
        None => seconds_since(place.since) >= period.as_secs_f64(),
    };
    match is_due {
        true => OpenFiles::Copied,
        false => OpenFiles::Wait,
    }
}

/// Whether the mover or the task ends.
pub(super) fn is_cancelled(shared: &Shared, reason: Reason<'_>) -> bool {
    shared.stores.is_stopping() || reason.progress.is_some_and(Progress::is_cancelled)
}

/// Whether nothing more is begun.
pub(super) fn ends(shared: &Shared, at: &AttachedStore, reason: Reason<'_>) -> bool {
    is_cancelled(shared, reason) || reason.gives_way && at.is_claimed()
}

/// Uploads the files of a queue in so many batches at a time, until no more come or nothing more is begun.
pub(super) fn upload_in_batches(
    shared: &Shared,
    at: &AttachedStore,
    (queue, turns): (&UploadQueue<Box<WantedUpload>>, &Turns<'_>),
    batches: usize,
    reason: Reason<'_>,
) -> Pass {
    let begun = AtomicU32::new(0);
    let run = || {
        let mut pass = Pass::default();
        while !ends(shared, at, reason) {
            let batch = queue.next_batch(|| match at.store.has_slow_names() {
                true => files_of_batch(begun.fetch_add(1, Ordering::Relaxed)),
                false => BATCH_FILES,
            });
            if batch.is_empty() {
                break;
            }
            upload_batch(shared, at, batch, reason, Turn::Batch(turns), &mut pass);
        }
        pass
    };
    // A thread that panicked has reported nothing: its files stay pending.
    let passes = host::for_each(vec![(); batches], |()| run());
    let mut pass = Pass::default();
    passes.into_iter().for_each(|one| pass.add(one));
    pass
}

/// Files of the nth batch of a pass where names are slow, at most.
fn files_of_batch(nth: u32) -> usize {
    (BATCH_FILES_FIRST << nth.min(8)).min(BATCH_FILES_SLOW_NAMES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_batches_are_small_where_names_are_slow() {
        let files: Vec<_> = [0, 1, 2, 3, 4, 61, 64, u32::MAX].map(files_of_batch).to_vec();
        assert_eq!(files, [4, 8, 16, 32, 32, 32, 32, 32]);
    }
}
