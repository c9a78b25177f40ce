//! Prestages files: copies released ones into the pool, many small ones at a time.
//!
//! A thread restores small files in groups (`restore_many.rs`). A task has as many threads at work as its store takes calls,
//! or as there are processors where the store answers at once (`parallel.rs`); each starts others when there may be more.
//! Where several tasks prestage from one store, the oldest has all its threads and each later one has a single thread,
//! which copies large files by one range at a time until a program waits for them, too (`ranges.rs`): the
//! store gives the first task its data sooner than if all shared it alike, and the last no later; a short task does not
//! wait for a long one to end. A leaf mutex each. One thread looks every [`TURN_PERIOD`] whether a task may have more
//! threads by now, as those that it has may take long.

use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{sync_channel, Receiver};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::Scope;
use std::time::Duration;

use forebay_types::{Entry, Error, Ino, Result};

use super::parallel::{start_one_more, Lateness};
use super::prestage_turns::Turn;
use super::restore_many::{restore_group, GroupSize, FILE_BYTES_MAX};
use super::shared::{bring_forward, locked, restore_for_task, restore_in_background, Shared};
use super::stores::AttachedStore;
use crate::host::Instant;
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
        *waited.unwrap_or_else(PoisonError::into_inner) += 1;
        let result = run();
        *locked(&self.running) -= 1;
        self.ended.notify_one();
        result
    }
}

/// A file, and its path for people.
type Found = (Entry, String);

/// A task that prestages, as its threads share it.
struct Prestaging<'a> {
    shared: &'a Shared,
    progress: &'a Progress,
    turn: Turn<'a>,
    /// The store; none where the task has several.
    at: Option<Arc<AttachedStore>>,
    lateness: Lateness,
    large: LargeFiles,
    files: Mutex<Receiver<Found>>,
    /// Files that are being restored in the background, while the turn is another task's.
    behind: Mutex<Vec<Ino>>,
    /// Threads that were started to restore files.
    started: AtomicUsize,
    /// No files are left to begin with.
    is_over: Mutex<bool>,
    ended: Condvar,
}

impl Prestaging<'_> {
    /// How many threads there may be now.
    fn threads(&self) -> usize {
        match &self.at {
            _ if !self.turn.is_oldest() => 1,
            Some(at) => self.lateness.threads_for(&at.store),
            None => FILES_AT_ONCE,
        }
    }

    fn start_others<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        while start_one_more(&self.started, self.threads().min(FILES_AT_ONCE)) {
            let run = || self.restore_all(scope);
            // Without it the others do its work.
            if std::thread::Builder::new().name("prestage".to_owned()).spawn_scoped(scope, run).is_err() {
                break;
            }
        }
    }

    /// Restores files until none are left.
    fn restore_all<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        let mut size = GroupSize::new();
        loop {
            self.start_others(scope);
            let group = next(&self.files, size.get());
            if group.is_empty() {
                break;
            }
            if !self.progress.is_cancelled() && !self.shared.stores.is_stopping() {
                self.restore(&mut size, group);
            }
        }
        *locked(&self.is_over) = true;
        self.ended.notify_one();
    }

    fn restore(&self, size: &mut GroupSize, group: Vec<Found>) {
        let (files, begun) = (group.len() as u32, Instant::now());
        let (small, rest): (Vec<_>, Vec<_>) =
            group.into_iter().partition(|(entry, _)| entry.attr.size <= FILE_BYTES_MAX);
        let entries: Vec<Entry> = small.iter().map(|(entry, _)| *entry).collect();
        for (restored, (entry, path)) in restore_group(self.shared, size, &entries).into_iter().zip(small) {
            self.note(restored, &entry, path);
        }
        for (entry, path) in rest {
            let restored = || self.restore_one(entry.attr.ino);
            let restored = match entry.attr.size {
                bytes if bytes >= LARGE_BYTES => self.large.during(restored),
                _ => restored(),
            };
            self.note(restored, &entry, path);
        }
        self.lateness.note(begun.elapsed() / files.max(1));
    }

    /// Restores a file: in the background, if it is not this task's turn.
    fn restore_one(&self, ino: Ino) -> Result<()> {
        if self.turn.is_oldest() || !self.shared.in_background.begin(ino) {
            return restore_for_task(self.shared, ino);
        }
        locked(&self.behind).push(ino);
        let restored = restore_in_background(self.shared, ino);
        locked(&self.behind).retain(|other| *other != ino);
        self.shared.in_background.end(ino);
        restored
    }

    fn note(&self, restored: Result<()>, entry: &Entry, path: String) {
        match restored {
            Ok(()) => self.progress.done(1, entry.attr.size),
            Err(e) => self.progress.failed(path, &e),
        }
    }

    /// When the task has become the oldest, starts threads and brings its files forward, until no files are left.
    fn watch_turn<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        let goes_on = |is_over: &mut bool| !*is_over;
        loop {
            let waited = self.ended.wait_timeout_while(locked(&self.is_over), TURN_PERIOD, goes_on);
            if *waited.unwrap_or_else(PoisonError::into_inner).0 {
                return;
            }
            if self.turn.is_oldest() {
                for ino in std::mem::take(&mut *locked(&self.behind)) {
                    bring_forward(self.shared, ino);
                }
            }
            self.start_others(scope);
        }
    }
}

/// Restores the files that `walk` finds. `store` is the directory with their store.
pub(super) fn prestage(
    shared: &Shared,
    progress: &Progress,
    store: Option<Ino>,
    walk: impl FnOnce(&mut dyn FnMut(&Entry, String)) -> Result<()>,
) -> Result<()> {
    let (found, files) = sync_channel::<Found>(FOUND_AHEAD);
    let at = store.and_then(|root| shared.stores.of(root).ok());
    let prestaging = Prestaging {
        shared,
        progress,
        turn: shared.prestaging.begin(store),
        lateness: at.as_ref().map_or_else(Lateness::default, |at| Lateness::of(&at.store)),
        at,
        large: LargeFiles::default(),
        files: Mutex::new(files),
        behind: Mutex::default(),
        started: AtomicUsize::new(1),
        is_over: Mutex::new(false),
        ended: Condvar::new(),
    };
    let prestaging = &prestaging;
    std::thread::scope(|scope| {
        let thread = || std::thread::Builder::new().name("prestage".to_owned());
        let failed = |e: std::io::Error| Error::io("cannot start a thread that restores files", &e);
        thread().spawn_scoped(scope, move || prestaging.restore_all(scope)).map_err(failed)?;
        // Without it the task has a single thread for longer.
        let _ = thread().spawn_scoped(scope, move || prestaging.watch_turn(scope));
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
fn next(files: &Mutex<Receiver<Found>>, most: usize) -> Vec<Found> {
    let files = locked(files);
    let mut group: Vec<_> = files.recv().into_iter().collect();
    let is_small = |group: &[Found]| group.last().is_some_and(|(entry, _)| entry.attr.size <= FILE_BYTES_MAX);
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
