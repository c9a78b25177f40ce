//! The table of tasks, and the file that keeps it over the mover's death.
//!
//! The file is replaced whole at each change of a task's state, before the change is acknowledged. Counters are stored
//! with it, and are as old as that otherwise. The file survives processes, not the node.

use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forebay_tasks::{Failure, Task, TaskError, TaskState, Verb};
use forebay_types::{Code, Error, Ino, Result, TASKS_FILE, TASKS_FILE_NEW};
use serde::{Deserialize, Serialize};

use super::progress::{Counts, Progress};

/// Tasks that are over and still shown; older ones are forgotten.
const OVER_MAX: usize = 500;
/// Tasks that are not over.
const OPEN_MAX: usize = 10_000;

/// The version of the file's contents.
const FILE_VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Stored {
    version: u32,
    next_id: u64,
    tasks: Vec<Task>,
}

#[derive(Debug)]
struct Entry {
    task: Task,
    progress: Arc<Progress>,
}

#[derive(Debug, Default)]
struct Inner {
    next_id: u64,
    entries: BTreeMap<u64, Entry>,
    queue: VecDeque<u64>,
    running: usize,
    /// The mover ends: running tasks are to be run again by the next one.
    stops: bool,
}

/// All tasks. The condition is signalled at each change of a state.
#[derive(Debug)]
pub(super) struct Table {
    pool: PathBuf,
    inner: Mutex<Inner>,
    changed: Condvar,
}

/// A task that is to be run now.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) id: u64,
    pub(super) verb: Verb,
    pub(super) ino: Ino,
    pub(super) recursive: bool,
    pub(super) progress: Arc<Progress>,
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn no_such(id: u64) -> Error {
    Error::new(Code::NotFound, format!("cannot find task {id}"))
        .why("the pool has no such task, or has forgotten it")
        .cure("`forebay tasks` lists those that there are")
}

impl Entry {
    /// The task with its counters as they are.
    fn now(&self) -> Task {
        let Counts { files_done, files_total, bytes_done, bytes_total, errors, unreachable } =
            self.progress.counts();
        let mut task = self.task.clone();
        if task.state == TaskState::Running {
            (task.files_done, task.files_total) = (files_done, files_total);
            (task.bytes_done, task.bytes_total) = (bytes_done, bytes_total);
            (task.error_count, task.errors) = (errors, self.progress.errors());
            task.unreachable_count = unreachable;
        }
        task
    }
}

impl Table {
    /// The tasks that the pool in `pool` had. Those that were running are queued again.
    pub(super) fn load(pool: &Path) -> Result<Table> {
        let mut inner = Inner { next_id: 1, ..Inner::default() };
        match std::fs::read(pool.join(TASKS_FILE)) {
            Ok(bytes) => match serde_json::from_slice(&bytes) {
                Ok(Stored { version: FILE_VERSION, next_id, tasks }) => inner.take(next_id, tasks),
                other => {
                    let why =
                        other.map_or_else(|e: serde_json::Error| e.to_string(), |_| "its version".to_owned());
                    tracing::error!(
                        "the tasks of an earlier mover are lost: {TASKS_FILE} cannot be read ({why})"
                    );
                    // Above the numbers that the lost tasks may have.
                    inner.next_id = now_s();
                }
            },
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(Error::io(format!("cannot read {}", pool.join(TASKS_FILE).display()), &e)),
        }
        Ok(Table { pool: pool.to_owned(), inner: Mutex::new(inner), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn save(&self, inner: &Inner) -> Result<()> {
        let tasks = inner.entries.values().map(Entry::now).collect();
        let stored = Stored { version: FILE_VERSION, next_id: inner.next_id, tasks };
        let (new, file) = (self.pool.join(TASKS_FILE_NEW), self.pool.join(TASKS_FILE));
        let write = || -> std::io::Result<()> {
            let mut out = std::fs::File::create(&new)?;
            out.write_all(&serde_json::to_vec(&stored)?)?;
            std::fs::rename(&new, &file)
        };
        write().map_err(|e| Error::io(format!("cannot write {}", file.display()), &e))
    }

    /// As [`Table::save`], where nobody waits for the result.
    fn note(&self, inner: &Inner) {
        if let Err(e) = self.save(inner) {
            tracing::error!("{e}");
        }
    }

    /// Creates a task.
    pub(super) fn create(&self, verb: Verb, ino: Ino, path: String, recursive: bool) -> Result<Task> {
        let mut inner = self.lock();
        let open = inner.queue.len() + inner.running;
        if open >= OPEN_MAX || inner.stops {
            let why = if inner.stops { "the mover ends" } else { "too many tasks are not over" };
            return Err(Error::new(Code::Busy, format!("cannot start a {verb} of {path}")).why(why));
        }
        let id = inner.next_id;
        let task = Task {
            id,
            verb,
            ino: ino.0,
            path,
            recursive,
            state: TaskState::Queued,
            files_done: 0,
            files_total: 0,
            bytes_done: 0,
            bytes_total: 0,
            error_count: 0,
            unreachable_count: 0,
            errors: Vec::new(),
            starts: 0,
            created_s: now_s(),
            ended_s: None,
        };
        inner.next_id += 1;
        inner.entries.insert(id, Entry { task: task.clone(), progress: Arc::default() });
        inner.forget_old();
        if let Err(e) = self.save(&inner) {
            inner.entries.remove(&id);
            return Err(e);
        }
        inner.queue.push_back(id);
        self.changed.notify_all();
        Ok(task)
    }

    /// All tasks, the oldest first.
    pub(super) fn list(&self) -> Vec<Task> {
        self.lock().entries.values().map(Entry::now).collect()
    }

    /// One task.
    pub(super) fn show(&self, id: u64) -> Result<Task> {
        self.lock().entries.get(&id).map(Entry::now).ok_or_else(|| no_such(id))
    }

    /// One task, when its state changes or after `period`.
    pub(super) fn show_next(&self, id: u64, period: Duration) -> Result<Task> {
        let inner = self.lock();
        let before = inner.entries.get(&id).ok_or_else(|| no_such(id))?.task.state;
        let unchanged = |inner: &mut Inner| {
            !before.is_over() && inner.entries.get(&id).is_some_and(|entry| entry.task.state == before)
        };
        let (inner, _) =
            self.changed.wait_timeout_while(inner, period, unchanged).unwrap_or_else(PoisonError::into_inner);
        inner.entries.get(&id).map(Entry::now).ok_or_else(|| no_such(id))
    }

    /// Cancels a task, and waits at most `patience` until it is over.
    pub(super) fn cancel(&self, id: u64, patience: Duration) -> Result<Task> {
        let mut inner = self.lock();
        let entry = inner.entries.get_mut(&id).ok_or_else(|| no_such(id))?;
        entry.progress.cancel();
        if entry.task.state == TaskState::Queued {
            (entry.task.state, entry.task.ended_s) = (TaskState::Cancelled, Some(now_s()));
            inner.queue.retain(|queued| *queued != id);
            self.note(&inner);
            self.changed.notify_all();
        }
        let goes_on =
            |inner: &mut Inner| inner.entries.get(&id).is_some_and(|entry| !entry.task.state.is_over());
        let (inner, timeout) =
            self.changed.wait_timeout_while(inner, patience, goes_on).unwrap_or_else(PoisonError::into_inner);
        match inner.entries.get(&id) {
            Some(_) if timeout.timed_out() => {
                Err(Error::new(Code::TimedOut, format!("task {id} is not over yet"))
                    .why("it waits for a store")
                    .cure("it ends when the store answers: see `forebay tasks`"))
            }
            Some(entry) => Ok(entry.now()),
            None => Err(no_such(id)),
        }
    }

    /// The next task to be run; none when the mover ends. Waits.
    pub(super) fn next(&self) -> Option<Job> {
        let inner = self.lock();
        let idle = |inner: &mut Inner| inner.queue.is_empty() && !inner.stops;
        let mut inner = self.changed.wait_while(inner, idle).unwrap_or_else(PoisonError::into_inner);
        if inner.stops {
            return None;
        }
        let id = inner.queue.pop_front()?;
        let entry = inner.entries.get_mut(&id)?;
        entry.task.state = TaskState::Running;
        entry.task.starts += 1;
        entry.progress = Arc::default();
        let Task { verb, ino, recursive, .. } = entry.task;
        let progress = entry.progress.clone();
        inner.running += 1;
        self.note(&inner);
        self.changed.notify_all();
        Some(Job { id, verb, ino: Ino(ino), recursive, progress })
    }

    /// A task has returned.
    pub(super) fn ended(&self, id: u64, result: Result<()>) {
        let mut inner = self.lock();
        inner.running -= 1;
        let stops = inner.stops;
        let Some(entry) = inner.entries.get_mut(&id) else { return };
        let mut task = entry.now();
        if entry.progress.is_cancelled() && stops {
            // Not by a user: the next mover runs it again.
            self.changed.notify_all();
            return;
        }
        let is_cancelled = entry.progress.is_cancelled();
        if let (Err(e), false) = (&result, is_cancelled) {
            task.error_count += 1;
            task.errors.insert(0, TaskError { path: task.path.clone(), error: Failure::from(e) });
        }
        task.state = match task.error_count {
            _ if is_cancelled => TaskState::Cancelled,
            0 => TaskState::Done,
            _ => TaskState::Failed,
        };
        task.ended_s = Some(now_s());
        entry.task = task;
        self.note(&inner);
        self.changed.notify_all();
    }

    /// The mover ends: no task is started any more, and running ones are to return. Waits for them at most `patience`.
    pub(super) fn stop(&self, patience: Duration) {
        let mut inner = self.lock();
        inner.stops = true;
        for entry in inner.entries.values().filter(|entry| entry.task.state == TaskState::Running) {
            entry.progress.cancel();
        }
        self.changed.notify_all();
        let goes_on = |inner: &mut Inner| inner.running > 0;
        drop(self.changed.wait_timeout_while(inner, patience, goes_on));
    }
}

impl Inner {
    fn take(&mut self, next_id: u64, tasks: Vec<Task>) {
        self.next_id = next_id;
        for mut task in tasks {
            self.next_id = self.next_id.max(task.id + 1);
            if !task.state.is_over() {
                task.state = TaskState::Queued;
                self.queue.push_back(task.id);
            }
            self.entries.insert(task.id, Entry { task, progress: Arc::default() });
        }
    }

    fn forget_old(&mut self) {
        let over: Vec<u64> =
            self.entries.iter().filter(|(_, e)| e.task.state.is_over()).map(|(id, _)| *id).collect();
        for id in over.iter().take(over.len().saturating_sub(OVER_MAX)) {
            self.entries.remove(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(5);

    fn pool() -> tempdir::Dir {
        tempdir::Dir::new()
    }

    /// A directory that is removed at the end.
    mod tempdir {
        use std::path::PathBuf;
        use std::sync::atomic::{AtomicU64, Ordering};

        pub(super) struct Dir(pub(super) PathBuf);

        impl Dir {
            pub(super) fn new() -> Dir {
                static NEXT: AtomicU64 = AtomicU64::new(0);
                let number = NEXT.fetch_add(1, Ordering::Relaxed);
                let path =
                    std::env::temp_dir().join(format!("forebay-tasks-{}-{number}", std::process::id()));
                std::fs::create_dir(&path).unwrap();
                Dir(path)
            }
        }

        impl Drop for Dir {
            fn drop(&mut self) {
                let _ = std::fs::remove_dir_all(&self.0);
            }
        }
    }

    fn create(table: &Table, path: &str) -> u64 {
        table.create(Verb::Sync, Ino(7), path.to_owned(), true).unwrap().id
    }

    #[test]
    fn task_goes_from_queued_to_done_with_its_counts() {
        let dir = pool();
        let table = Table::load(&dir.0).unwrap();
        let id = create(&table, "/a");
        assert_eq!(table.show(id).unwrap().state, TaskState::Queued);
        let job = table.next().unwrap();
        assert_eq!((job.id, job.verb, job.ino, job.recursive), (id, Verb::Sync, Ino(7), true));
        job.progress.found(2, 10);
        job.progress.done(1, 5);
        let task = table.show(id).unwrap();
        assert_eq!(
            (task.state, task.files_done, task.files_total, task.bytes_done),
            (TaskState::Running, 1, 2, 5)
        );
        table.ended(id, Ok(()));
        let task = table.show_next(id, SOON).unwrap();
        assert_eq!((task.state, task.bytes_total, task.starts), (TaskState::Done, 10, 1));
        assert!(task.ended_s.is_some());
    }

    #[test]
    fn task_with_a_failed_path_or_an_error_has_failed() {
        let dir = pool();
        let table = Table::load(&dir.0).unwrap();
        let (one, two) = (create(&table, "/a"), create(&table, "/b"));
        table.next().unwrap().progress.failed("/a/x", &Error::new(Code::NoSpace, "cannot copy"));
        table.ended(one, Ok(()));
        table.next().unwrap();
        table.ended(two, Err(Error::new(Code::Io, "cannot reach the store")));
        let (one, two) = (table.show(one).unwrap(), table.show(two).unwrap());
        assert_eq!((one.state, two.state), (TaskState::Failed, TaskState::Failed));
        assert_eq!((&*one.errors[0].path, &*two.errors[0].path), ("/a/x", "/b"));
    }

    #[test]
    fn tasks_of_a_mover_that_died_are_run_again_under_their_numbers() {
        let dir = pool();
        let (done, running, queued) = {
            let table = Table::load(&dir.0).unwrap();
            let ids = (create(&table, "/a"), create(&table, "/b"), create(&table, "/c"));
            table.next().unwrap();
            table.ended(ids.0, Ok(()));
            table.next().unwrap();
            ids
        };
        let table = Table::load(&dir.0).unwrap();
        assert_eq!(table.show(done).unwrap().state, TaskState::Done);
        assert_eq!(table.show(running).unwrap().state, TaskState::Queued);
        assert_eq!((table.next().unwrap().id, table.next().unwrap().id), (running, queued));
        assert_eq!(table.show(running).unwrap().starts, 2);
        assert!(create(&table, "/d") > queued);
    }

    #[test]
    fn tasks_that_the_end_of_the_mover_interrupts_are_run_again() {
        let dir = pool();
        let table = Table::load(&dir.0).unwrap();
        let id = create(&table, "/a");
        let job = table.next().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !job.progress.is_cancelled() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                table.ended(id, Err(Error::new(Code::Interrupted, "ended")));
            });
            table.stop(SOON);
        });
        assert!(table.next().is_none());
        assert!(table.create(Verb::Sync, Ino(7), "/b".into(), false).is_err());
        assert_eq!(Table::load(&dir.0).unwrap().next().unwrap().id, id);
    }

    #[test]
    fn cancelled_task_ends_whether_it_was_started_or_not() {
        let dir = pool();
        let table = Table::load(&dir.0).unwrap();
        let (one, two) = (create(&table, "/a"), create(&table, "/b"));
        let job = table.next().unwrap();
        assert_eq!(table.cancel(two, SOON).unwrap().state, TaskState::Cancelled);
        assert_eq!(table.cancel(one, Duration::from_millis(5)).unwrap_err().code, Code::TimedOut);
        assert!(job.progress.is_cancelled());
        table.ended(one, Ok(()));
        assert_eq!(table.cancel(one, SOON).unwrap().state, TaskState::Cancelled);
        assert_eq!(table.cancel(99, SOON).unwrap_err().code, Code::NotFound);
    }

    #[test]
    fn old_tasks_are_forgotten_and_open_ones_are_not() {
        let dir = pool();
        let table = Table::load(&dir.0).unwrap();
        let first = create(&table, "/first");
        for _ in 0..OVER_MAX + 2 {
            let id = create(&table, "/a");
            table.cancel(id, SOON).unwrap();
        }
        create(&table, "/last");
        assert_eq!(table.list().len(), OVER_MAX + 2);
        assert_eq!(table.list()[0].id, first);
    }

    #[test]
    fn unreadable_file_is_no_end_of_the_mover() {
        let dir = pool();
        std::fs::write(dir.0.join(TASKS_FILE), b"{").unwrap();
        let table = Table::load(&dir.0).unwrap();
        assert!(table.list().is_empty());
        assert!(create(&table, "/a") > 1_000_000_000);
    }
}
