//! Restores many small files for a task: a thread copies one after the other, and asks and reports for all of them in two
//! requests. A request costs two switches between threads, which is more than the copy of a small file.
//!
//! What is not plain (another node's file, no space, a version that changed, a failure) is left to the restore of a single
//! file, which begins anew.

use std::os::fd::AsFd;
use std::time::Duration;

use forebay_types::limits::RESTORE_RESERVE_BYTES;
use forebay_types::{Code, Entry, Ino, Request, Result, StorePlace};
use rustix::fs::ftruncate;

use super::evict::free_bytes;
use super::marks::mark_restored;
use super::restore::complete;
use super::shared::{copied_by, restore_begun, restore_for_task, Shared};
use super::stores::Located;
use crate::host::Instant;
use crate::store::Store;

/// Files of a group, at most.
pub(super) const GROUP_FILES: usize = forebay_types::REPORTS_MAX;
/// Bytes of a file of a group, at most.
pub(super) const FILE_BYTES_MAX: u64 = 1 << 20;
/// How long a group may take: a program that opens one of its files waits for it.
const GROUP_TIME: Duration = Duration::from_millis(10);

/// How many files the next group of a thread has.
#[derive(Debug)]
pub(super) struct GroupSize(usize);

impl GroupSize {
    pub(super) fn new() -> GroupSize {
        GroupSize(1)
    }

    pub(super) fn get(&self) -> usize {
        self.0
    }

    /// A group of `files` has taken so long: the next grows twofold at most.
    pub(super) fn note(&mut self, files: usize, took: Duration) {
        let each = took.as_secs_f64() / files.max(1) as f64;
        let fits = (GROUP_TIME.as_secs_f64() / each.max(1e-9)) as usize;
        self.0 = fits.clamp(1, (2 * self.0).min(GROUP_FILES));
    }
}

/// A file whose data have been copied.
struct Copied {
    index: usize,
    located: Located,
}

/// Restores files of [`FILE_BYTES_MAX`] bytes at most. The outcomes are in their order.
pub(super) fn restore_group(shared: &Shared, size: &mut GroupSize, files: &[Entry]) -> Vec<Result<()>> {
    let begun = Instant::now();
    let outcomes = match files {
        [] => return Vec::new(),
        [file] => vec![restore_for_task(shared, file.attr.ino)],
        files => restore_together(shared, files),
    };
    size.note(files.len(), begun.elapsed());
    outcomes
}

fn restore_together(shared: &Shared, files: &[Entry]) -> Vec<Result<()>> {
    let link = &shared.link;
    let mine: Vec<bool> = files.iter().map(|file| shared.restoring.begin(file.attr.ino)).collect();
    let own = |(i, file): (usize, &'_ Entry)| (mine[i] && copied_by(shared, file).is_none()).then_some(i);
    let plain: Vec<usize> = files.iter().enumerate().filter_map(own).collect();
    let bytes: u64 = plain.iter().map(|&i| files[i].attr.size).sum();
    let mut copied = Vec::new();
    if free_bytes(link) >= bytes + RESTORE_RESERVE_BYTES {
        let inos: Vec<Ino> = plain.iter().map(|&i| files[i].attr.ino).collect();
        for (&index, place) in plain.iter().zip(link.store_places(&inos)) {
            if shared.stores.is_stopping() {
                break;
            }
            let one = copy(shared, &files[index], place);
            copied.extend(one.map(|located| Copied { index, located }));
        }
    }
    let restored = |copied: &Copied| Request::restored(&files[copied.index]);
    let reported = link.report(&copied.iter().map(restored).collect::<Vec<_>>());
    let mut is_done = vec![false; files.len()];
    for (one, outcome) in copied.iter().zip(reported) {
        is_done[one.index] = outcome.is_ok() && conclude(shared, &files[one.index], one);
    }
    let each = files.iter().enumerate().map(|(i, file)| {
        let ino = file.attr.ino;
        match (mine[i], is_done[i]) {
            (_, true) => {
                shared.restoring.end(ino);
                Ok(())
            }
            (true, false) => restore_begun(shared, ino),
            (false, false) => restore_for_task(shared, ino),
        }
    });
    each.collect()
}

/// Copies a file's data into the pool. None where that did not succeed at once.
fn copy(shared: &Shared, entry: &Entry, place: std::result::Result<StorePlace, Code>) -> Option<Located> {
    let located = shared.stores.located(entry.attr.ino, place).ok()?;
    let version = located.placed.as_ref()?.version;
    if version.bytes > FILE_BYTES_MAX {
        return None;
    }
    // What a release that is under way left of it is waited for, and what an earlier restore left is unlinked.
    let file = shared.link.open_to_restore(entry).ok()?;
    let filled = || {
        ftruncate(&file, version.bytes).ok()?;
        located.at.store.read(&located.path, &version, 0..version.bytes, file.as_fd()).ok()?;
        complete(&shared.link, &file, entry).ok().filter(|has_name| *has_name)
    };
    if filled().is_none() {
        shared.link.remove_unrestored(entry);
        return None;
    }
    Some(located)
}

/// After the pool has recorded that a file is resident. False if that is to be looked at again.
fn conclude(shared: &Shared, entry: &Entry, copied: &Copied) -> bool {
    copied.located.at.note_success();
    let Ok(now) = shared.link.inode(entry.attr.ino) else { return false };
    mark_restored(&shared.link, &shared.marks, &now);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_grow_while_files_are_fast_and_are_of_one_file_where_they_are_slow() {
        let mut size = GroupSize::new();
        let sizes: Vec<usize> = (0..8)
            .map(|_| {
                let now = size.get();
                size.note(now, Duration::from_micros(80) * now as u32);
                now
            })
            .collect();
        assert_eq!(sizes, [1, 2, 4, 8, 16, 32, 64, 64]);
        size.note(64, Duration::from_secs(2));
        assert_eq!(size.get(), 1, "30 ms each");
        size.note(1, Duration::ZERO);
        assert_eq!(size.get(), 2);
    }
}
