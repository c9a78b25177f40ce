//! The engine: threads that take jobs from one stack, list source directories, and copy their entries.
//!
//! Depth and the number of threads bound the memory, not the number of files: a listing is cut into jobs that are
//! finished before the next listing starts. All threads share the ranges of a large file. A thread records a failure
//! and continues; a full destination stops everything. Lock order: no lock is taken while another one is held, except
//! the two within a branch while a closed directory is opened again through its ancestors, one at a time.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use forebay_types::{Code, Kind, Timestamp};

use crate::attributes::{set_attributes, OwnerRules, Scratch};
use crate::branch::{Branch, DirectoryState, Ended, Shelf};
use crate::copy::{Buffer, Failure};
use crate::entry::Entry;
use crate::job::{Job, Listed, Worker, ATTEMPTS};
use crate::links::Links;
use crate::names::{is_temporary, Tag};
use crate::progress::Progress;
use crate::queue::Queue;
use crate::report::{add, display, human_bytes, reason, FileError, Tally};
use crate::tree::{Meta, Names, Object, Tree};

/// Files per job: enough to make taking a job cheap, few enough that all threads end at about the same time.
const FILES_PER_JOB: usize = 64;
/// Directories that wait to be synced together: on a journalling file system, the first sync does most of the work for
/// all.
const UNSYNCED_MAX: usize = 64;

/// The settings of this staging: the user's options with all defaults filled in.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) threads: usize,
    pub(crate) verify: bool,
    pub(crate) resume: bool,
    /// Copies are synced to the medium before they get their names.
    pub(crate) durable: bool,
    /// Bytes of one read and write.
    pub(crate) unit: usize,
    /// Copies that one thread keeps open until they are synced together.
    pub(crate) batch_files: usize,
    /// Directories kept open per side.
    pub(crate) open_directories: usize,
}

/// The side that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum At {
    Source,
    Destination,
}

/// Directories that wait to be synced, with their paths.
type Unsynced<D> = Vec<(Arc<<D as Tree>::Directory>, Vec<u8>)>;

/// One staging in progress.
pub(crate) struct Engine<'a, S: Tree, D: Tree> {
    pub(crate) source: &'a S,
    pub(crate) destination: &'a D,
    pub(crate) settings: Settings,
    pub(crate) progress: &'a dyn Progress,
    pub(crate) tally: Tally,
    pub(crate) queue: Queue<Job<S, D>>,
    pub(crate) links: Links<S, D>,
    pub(crate) source_shelf: Shelf<S::Directory>,
    pub(crate) destination_shelf: Shelf<D::Directory>,
    pub(crate) ended: Arc<Ended<S, D>>,
    pub(crate) tag: Tag,
    pub(crate) owners: OwnerRules,
    pub(crate) tops: Vec<crate::prepare::Top>,
    stop: AtomicBool,
    cancelled: AtomicBool,
    /// Bytes reported as done of copies that were abandoned and are made again.
    pub(crate) withdrawn_bytes: AtomicU64,
    unsynced: Mutex<Unsynced<D>>,
}

impl<'a, S: Tree, D: Tree> Engine<'a, S, D> {
    pub(crate) fn new(
        trees: (&'a S, &'a D),
        settings: Settings,
        owners: OwnerRules,
        tag: Tag,
        progress: &'a dyn Progress,
    ) -> Engine<'a, S, D> {
        Engine {
            source: trees.0,
            destination: trees.1,
            progress,
            tally: Tally::default(),
            queue: Queue::new(),
            links: Links::new(),
            source_shelf: Shelf::new(settings.open_directories),
            destination_shelf: Shelf::new(settings.open_directories),
            ended: Ended::new(),
            tag,
            owners,
            tops: Vec::new(),
            stop: AtomicBool::new(false),
            cancelled: AtomicBool::new(false),
            withdrawn_bytes: AtomicU64::new(0),
            unsynced: Mutex::new(Vec::new()),
            settings,
        }
    }

    /// Stages all tops with all threads. Returns when everything is done, or staging was stopped.
    pub(crate) fn run(&self) {
        self.queue.push(Job::Tops(0..self.tops.len()));
        std::thread::scope(|scope| {
            for _ in 1..self.settings.threads {
                scope.spawn(|| self.work());
            }
            self.work();
        });
        self.links.clear();
        let mut scratch = Scratch::default();
        self.finish_ended(&mut scratch);
        self.sync_directories(0);
    }

    /// True once staging is to stop, for any reason.
    pub(crate) fn is_stopping(&self) -> bool {
        if self.stop.load(Ordering::Relaxed) {
            return true;
        }
        if self.progress.cancelled() {
            self.cancelled.store(true, Ordering::Relaxed);
            self.stop.store(true, Ordering::Relaxed);
            return true;
        }
        false
    }

    /// True if the caller cancelled staging.
    pub(crate) fn was_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// True if staging has ended before everything was tried, for any reason.
    pub(crate) fn was_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn work(&self) {
        let mut worker = Worker {
            buffer: Buffer::new(self.settings.unit),
            scratch: Scratch::default(),
            batch: Vec::new(),
            current: None,
        };
        loop {
            let taken = self.queue.take_now().or_else(|| {
                // No job is available now: this thread finishes its pending work before it sleeps.
                self.flush(&mut worker);
                self.finish_ended(&mut worker.scratch);
                self.queue.take()
            });
            let Some((job, busy)) = taken else { break };
            self.job(job, &mut worker);
            self.finish_ended(&mut worker.scratch);
            drop(busy);
        }
    }

    fn job(&self, job: Job<S, D>, worker: &mut Worker<S, D>) {
        if let Job::Large(large) = job {
            // Runs even when staging stops, because the last range removes the temporary.
            return self.large(large, worker);
        }
        if self.is_stopping() {
            return;
        }
        match job {
            Job::Tops(range) => self.top(range, worker),
            Job::List(at, cursor) => self.list(at, cursor),
            Job::Directories(listed) => self.directories(listed),
            Job::Directory(entry) => self.enter(entry),
            Job::Files(listed) => self.files(listed, worker),
            Job::File(entry, attempt, key) => self.file(entry, attempt, key, worker),
            Job::Large(_) => unreachable!("handled above"),
        }
    }

    fn list(&self, at: Branch<S, D>, cursor: u64) {
        let mut names = Names::default();
        let listed = at
            .source(self.source, &self.source_shelf)
            .and_then(|handle| self.source.list(&handle, cursor, &mut names));
        let next = match listed {
            Ok(next) => next,
            Err(code) => {
                return self.error(At::Source, "list the directory", code, at.source_path(b"."), None);
            }
        };
        let has_directories = names.iter().any(|(_, kind)| kind == Some(Kind::Directory));
        let has_others = names.iter().any(|(_, kind)| kind != Some(Kind::Directory));
        let names = Arc::new(names);
        if let Some(next) = next {
            self.queue.push(Job::List(at.clone(), next));
        }
        if has_directories {
            let range = 0..names.len();
            self.queue.push(Job::Directories(Listed { at: at.clone(), names: names.clone(), range }));
        }
        if has_others {
            for start in (0..names.len()).step_by(FILES_PER_JOB) {
                let range = start..names.len().min(start + FILES_PER_JOB);
                self.queue.push(Job::Files(Listed { at: at.clone(), names: names.clone(), range }));
            }
        }
    }

    /// Enters the first directory of a list, and queues the others for any thread.
    fn directories(&self, mut listed: Listed<S, D>) {
        for index in listed.range.by_ref() {
            let (name, kind) = listed.names.get(index);
            if kind == Some(Kind::Directory) && !is_temporary(name) {
                let entry = Entry { at: listed.at.clone(), name: name.into(), renamed: None, follow: false };
                if !listed.range.is_empty() {
                    self.queue.push(Job::Directories(listed));
                }
                return self.enter(entry);
            }
        }
    }

    fn files(&self, listed: Listed<S, D>, worker: &mut Worker<S, D>) {
        worker.current = Some(listed);
        while let Some(current) = &mut worker.current {
            let Some(index) = current.range.next() else { break };
            let (name, kind) = current.names.get(index);
            if kind == Some(Kind::Directory) || is_temporary(name) {
                continue;
            }
            let entry = Entry { at: current.at.clone(), name: name.into(), renamed: None, follow: false };
            if self.is_stopping() {
                break;
            }
            self.entry(entry, kind, worker);
        }
        worker.current = None;
    }

    /// Queues the rest of the files job in progress for other threads, because the next file takes long.
    pub(crate) fn share_rest(&self, worker: &mut Worker<S, D>) {
        if let Some(rest) = worker.current.take().filter(|rest| !rest.range.is_empty()) {
            self.queue.push(Job::Files(rest));
        }
    }

    /// Stages an entry of any kind.
    pub(crate) fn entry(&self, entry: Entry<S, D>, kind: Option<Kind>, worker: &mut Worker<S, D>) {
        let kind = match kind {
            Some(kind) => kind,
            None => {
                let meta = entry
                    .at
                    .source(self.source, &self.source_shelf)
                    .and_then(|handle| self.source.stat(&handle, &entry.name, entry.follow));
                match meta {
                    Ok(meta) => meta.kind,
                    Err(code) => return self.source_error("read its attributes", code, &entry),
                }
            }
        };
        match kind {
            Kind::Directory => self.queue.push(Job::Directory(entry)),
            Kind::File => self.file(entry, 0, None, worker),
            _ => self.special(entry, worker),
        }
    }

    /// Finishes the directories below which everything is done.
    pub(crate) fn finish_ended(&self, scratch: &mut Scratch) {
        while let Some(state) = self.ended.take() {
            if !self.is_stopping() {
                self.finish_directory(&state, scratch);
            }
        }
    }

    fn finish_directory(&self, state: &DirectoryState<S, D>, scratch: &mut Scratch) {
        let handle = match state.destination(self.destination, &self.destination_shelf) {
            Ok(handle) => handle,
            Err(code) => {
                let path = state.destination_path(b".");
                return self.error(At::Destination, "open the directory again", code, path, None);
            }
        };
        if state.prune {
            self.prune(state, &handle);
        }
        if let Some(meta) = &state.meta {
            let done = state
                .source(self.source, &self.source_shelf)
                .map_err(|code| (At::Source, code))
                .and_then(|source| {
                    let wanted = self.owners.wanted(meta);
                    let from = (self.source, Object::Directory(&*source));
                    let object = Object::Directory(&*handle);
                    let warn = |what, code| self.warning(what, code, || state.destination_path(b"."));
                    set_attributes(from, (self.destination, object), &wanted, scratch, &warn)
                        .and_then(|()| self.destination.set_times(object, wanted.atime, wanted.mtime))
                        .map_err(|code| (At::Destination, code))
                });
            match done {
                Ok(()) => add(&self.tally.directories, 1),
                Err((at, code)) => {
                    let path = match at {
                        At::Source => state.source_path(b"."),
                        At::Destination => state.destination_path(b"."),
                    };
                    self.error(at, "set the directory's attributes", code, path, None);
                }
            }
        }
        if self.settings.durable {
            let path = state.destination_path(b".");
            self.unsynced.lock().unwrap_or_else(|e| e.into_inner()).push((handle, path));
            self.sync_directories(UNSYNCED_MAX.min(self.settings.open_directories));
        }
    }

    /// Syncs the waiting directories if there are more than `most`.
    fn sync_directories(&self, most: usize) {
        let mut waiting = self.unsynced.lock().unwrap_or_else(|e| e.into_inner());
        if waiting.len() <= most {
            return;
        }
        let all = std::mem::take(&mut *waiting);
        drop(waiting);
        for (handle, path) in all {
            if let Err(code) = self.destination.sync_directory(&handle) {
                self.error(At::Destination, "sync a directory to the medium", code, path, None);
            }
        }
    }

    /// Reports files and bytes as done, without the bytes that were reported already, of an abandoned copy.
    pub(crate) fn done(&self, files: u64, bytes: u64) {
        let mut twice = 0;
        let _ = self.withdrawn_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |withdrawn| {
            twice = withdrawn.min(bytes);
            (twice > 0).then(|| withdrawn - twice)
        });
        self.progress.done(files, bytes - twice);
    }

    /// Records a failure at `path`. `needed` is the number of bytes that the destination had to have room for.
    pub(crate) fn error(&self, at: At, action: &str, code: Code, path: Vec<u8>, needed: Option<u64>) {
        let title = match at {
            At::Source => self.source.title(),
            At::Destination => self.destination.title(),
        };
        let mut what = format!("cannot {action} in {title}: {}", reason(code));
        if at == At::Destination && code == Code::NoSpace {
            what.push_str(&self.space_words(needed));
            self.stop.store(true, Ordering::Relaxed);
        }
        if matches!(code, Code::PoolGone | Code::UnknownSession) {
            self.stop.store(true, Ordering::Relaxed);
        }
        if at == At::Source && code == Code::Io {
            add(&self.tally.errors_unreachable, 1);
        }
        let cure = match (at, code) {
            // The directory exists but does not let files be created: a file system of the kernel's own, such as /proc.
            (At::Destination, Code::NotFound) if self.has_directory_of(&path) => {
                format!("files cannot be made in this directory: choose another destination in {title}")
            }
            _ => cure(at, code, title),
        };
        self.tally.error(FileError { path: display(&path), code, what, cure });
    }

    /// True if the parent directory of the destination's `path` exists.
    fn has_directory_of(&self, path: &[u8]) -> bool {
        let cut = path.iter().rposition(|&b| b == b'/').unwrap_or(0);
        self.destination.open_path(&path[..cut.max(1).min(path.len())]).is_ok()
    }

    /// Free space of the destination, for messages.
    fn space_words(&self, needed: Option<u64>) -> String {
        let place = self.tops.first().and_then(|top| self.destination.open_path(&top.staged.parent).ok());
        let space = place.and_then(|(handle, _)| self.destination.space(&handle).ok());
        match (space, needed) {
            (Some(space), _) if space.free_inodes == 0 => "; no inodes are free".into(),
            (Some(space), Some(needed)) if space.free_bytes >= needed => format!(
                "; {} are needed and {} are free, so a quota may be used up",
                human_bytes(needed),
                human_bytes(space.free_bytes)
            ),
            (Some(space), Some(needed)) => format!(
                "; this file needs {}, {} are free",
                human_bytes(needed),
                human_bytes(space.free_bytes)
            ),
            (Some(space), None) => format!("; {} are free", human_bytes(space.free_bytes)),
            (None, _) => String::new(),
        }
    }

    pub(crate) fn source_error(&self, action: &str, code: Code, entry: &Entry<S, D>) {
        self.error(At::Source, action, code, entry.source_path(), None);
    }

    pub(crate) fn destination_error(&self, action: &str, code: Code, entry: &Entry<S, D>) {
        self.error(At::Destination, action, code, entry.destination_path(), None);
    }

    /// Records the reason of a failed copy.
    pub(crate) fn failure(&self, failure: Failure, entry: &Entry<S, D>, needed: u64) {
        match failure {
            Failure::Source(code) => self.source_error("read it", code, entry),
            Failure::Destination(code) => {
                let path = entry.destination_path();
                self.error(At::Destination, "write the copy", code, path, Some(needed));
            }
            Failure::Changed => {
                let what = format!("it changed while it was copied, {} times", ATTEMPTS);
                let cure = "stage it after the program that writes it has ended".to_string();
                self.tally.error(FileError {
                    path: display(&entry.source_path()),
                    code: Code::Busy,
                    what,
                    cure,
                });
            }
            Failure::Differs => {
                let what = format!(
                    "verification failed: the copy in {} differs from the source",
                    self.destination.title()
                );
                let cure = "run it again; if it happens again, the memory or medium of this node is faulty"
                    .to_string();
                let path = display(&entry.destination_path());
                self.tally.error(FileError { path, code: Code::Corrupt, what, cure });
            }
            Failure::Stopped => {}
        }
    }

    /// Warns that the copy replaces a file with a later modification time: another program may have changed that file
    /// since it was staged in the other direction, and its change is lost.
    pub(crate) fn warn_of_newer(&self, there: &Meta, mtime: Timestamp, path: impl FnOnce() -> Vec<u8>) {
        if there.kind == Kind::File && there.mtime > mtime {
            let what = format!(
                "in {}, a file was replaced by one with an older modification time",
                self.destination.title()
            );
            self.tally.warning(what, Code::Exists, || display(&path()));
        }
    }

    pub(crate) fn warning(&self, what: String, code: Code, path: impl FnOnce() -> Vec<u8>) {
        self.tally.warning(what, code, || display(&path()));
    }
}

/// What a user can do about a failure.
fn cure(at: At, code: Code, title: &str) -> String {
    match (at, code) {
        (At::Source, Code::AccessDenied | Code::NotPermitted) => {
            "make it readable (chmod u+r, directories u+rx), or leave it out".into()
        }
        (At::Destination, Code::AccessDenied | Code::NotPermitted | Code::ReadOnly) => {
            format!("choose a destination in {title} that you may write to")
        }
        (At::Source, Code::NotFound | Code::Stale) => {
            "it was removed or replaced while it was staged: run it again when the source is at rest".into()
        }
        (At::Destination, Code::NotFound | Code::Stale) => {
            "its directory was removed or renamed meanwhile: run it again when the program that did so has ended".into()
        }
        (At::Destination, Code::NoSpace) => {
            format!("free space in {title} or choose another destination, then run it again: complete files stay and are not copied again")
        }
        (At::Destination, Code::IsDirectory | Code::NotDirectory | Code::Exists) => {
            "a file and a directory have the same name: remove or rename the one in the destination".into()
        }
        (At::Destination, Code::Busy) => "give each file of the staging a destination of its own".into(),
        (_, Code::NoResources) => "raise the limit of open files (ulimit -n), or use fewer threads".into(),
        (_, Code::PoolGone | Code::UnknownSession) => {
            "check with `forebay status`, start the pool again with `forebay up`, then run it again".into()
        }
        (_, Code::Io) => "look in the kernel's log (dmesg), and at the health of the medium".into(),
        (At::Destination, Code::FileTooLarge) => format!("{title} cannot hold files of this size"),
        _ => String::new(),
    }
}
