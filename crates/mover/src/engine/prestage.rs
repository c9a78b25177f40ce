//! Prestages files: copies released ones into the pool, many small ones at a time.
//!
//! A thread restores small files in groups (`restore_many.rs`). A task has as many threads at work as its store takes calls (`parallel.rs`).
//! Where several tasks prestage from one store, the oldest has all its threads and each later one has a single thread: the
//! store gives the first task its data sooner than if all shared it alike, and the last no later; a short task does not
//! wait for a long one to end. A leaf mutex each; threads that may not run yet look again every [`TURN_PERIOD`].

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{sync_channel, Receiver};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use forebay_types::{Entry, Error, Ino, Result};

use super::parallel::threads_for;
use super::restore_many::{restore_group, GroupSize, FILE_BYTES_MAX};
use super::shared::{locked, restore_for_task, Shared};
use crate::tasks::Progress;

/// Files that one task restores at a time, at most.
const FILES_AT_ONCE: usize = 64;
/// Files that are found ahead, so that threads rarely wait for the next.
const FOUND_AHEAD: usize = 1024;
/// From this size on a file is restored by parallel ranges, and few such files at a time suffice.
const LARGE_BYTES: u64 = 16 << 20;
/// Large files at a time.
const LARGE_AT_ONCE: usize = 2;
/// Pause between two looks whether a task has become the oldest.
const TURN_PERIOD: Duration = Duration::from_millis(20);

/// Bounds how many large files are restored at a time.
#[derive(Default)]
struct LargeFiles {
    running: Mutex<usize>,
    ended: Condvar,
}

impl LargeFiles {
    fn during<T>(&self, run: impl FnOnce() -> T) -> T {
        let full = |running: &mut usize| *running >= LARGE_AT_ONCE;
        let waited = self.ended.wait_while(locked(&self.running), full);
        *waited.unwrap_or_else(std::sync::PoisonError::into_inner) += 1;
        let result = run();
        *locked(&self.running) -= 1;
        self.ended.notify_one();
        result
    }
}

/// Restores the files that `walk` finds. `store` is the directory with their store.
pub(super) fn prestage(
    shared: &Shared,
    progress: &Progress,
    store: Option<Ino>,
    walk: impl FnOnce(&mut dyn FnMut(&Entry, String)) -> Result<()>,
) -> Result<()> {
    let turn = shared.prestaging.begin(store);
    let at = store.and_then(|root| shared.stores.of(root).ok());
    let threads = || at.as_ref().map_or(FILES_AT_ONCE, |at| threads_for(&at.store));
    let large = LargeFiles::default();
    let note = |restored: Result<()>, entry: &Entry, path: String| match restored {
        Ok(()) => progress.done(1, entry.attr.size),
        Err(e) => progress.failed(path, &e),
    };
    let restore = |size: &mut GroupSize, group: Vec<(Entry, String)>| {
        let (small, rest): (Vec<_>, Vec<_>) =
            group.into_iter().partition(|(entry, _)| entry.attr.size <= FILE_BYTES_MAX);
        let entries: Vec<Entry> = small.iter().map(|(entry, _)| *entry).collect();
        for (restored, (entry, path)) in restore_group(shared, size, &entries).into_iter().zip(small) {
            note(restored, &entry, path);
        }
        for (entry, path) in rest {
            let restored = || restore_for_task(shared, entry.attr.ino);
            let restored = match entry.attr.size {
                bytes if bytes >= LARGE_BYTES => large.during(restored),
                _ => restored(),
            };
            note(restored, &entry, path);
        }
    };
    let is_over = AtomicBool::new(false);
    let (found, files) = sync_channel::<(Entry, String)>(FOUND_AHEAD);
    let files = Mutex::new(files);
    std::thread::scope(|scope| {
        for number in 0..FILES_AT_ONCE {
            let (turn, is_over, files, restore, threads) = (&turn, &is_over, &files, &restore, &threads);
            let run = move || {
                // The first thread goes on in any case, and notes when there are no files left.
                while number > 0 && !(turn.is_oldest() && number < threads()) {
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                    std::thread::sleep(TURN_PERIOD);
                }
                let mut size = GroupSize::new();
                loop {
                    let group = next(files, size.get());
                    if group.is_empty() {
                        break;
                    }
                    if !progress.is_cancelled() && !shared.stores.is_stopping() {
                        restore(&mut size, group);
                    }
                }
                is_over.store(true, Ordering::Relaxed);
            };
            let started = std::thread::Builder::new().name("prestage".to_owned()).spawn_scoped(scope, run);
            if let (Err(e), 0) = (started, number) {
                return Err(Error::io("cannot start a thread that restores files", &e));
            }
        }
        let walked = walk(&mut |entry, path| {
            progress.found(1, entry.attr.size);
            match entry.attr.is_resident() {
                true => progress.done(1, entry.attr.size),
                // Fails only when no thread is left.
                false => drop(found.send((*entry, path))),
            }
        });
        drop(found);
        walked
    })
}

/// Waits for a file, and takes as many more as have been found. A large one ends the group. None at the end.
fn next(files: &Mutex<Receiver<(Entry, String)>>, most: usize) -> Vec<(Entry, String)> {
    let files = locked(files);
    let mut group: Vec<_> = files.recv().into_iter().collect();
    let is_small =
        |group: &[(Entry, String)]| group.last().is_some_and(|(entry, _)| entry.attr.size <= FILE_BYTES_MAX);
    while group.len() < most && is_small(&group) {
        let Ok(file) = files.try_recv() else { break };
        group.push(file);
    }
    group
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_files_are_restored_few_at_a_time() {
        let (large, running, most) = (LargeFiles::default(), Mutex::new(0), Mutex::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    large.during(|| {
                        *locked(&running) += 1;
                        let now = *locked(&running);
                        let mut most = locked(&most);
                        *most = now.max(*most);
                        drop(most);
                        std::thread::sleep(Duration::from_millis(5));
                        *locked(&running) -= 1;
                    });
                });
            }
        });
        assert!((1..=LARGE_AT_ONCE).contains(&locked(&most)), "{most:?}");
    }
}
