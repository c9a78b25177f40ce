//! Staging of one regular file by one thread: check whether its copy exists, copy, verify, set attributes, name.
//!
//! A copy gets its final name in one of two ways. Neither lets a killed staging leave a file that a later one takes for
//! complete:
//!
//! - *At once*: a file without holes that one write holds, if its name is free and copies need not be durable
//!   (stage-in). Its content is written in order and its modification time is set last, so a copy with the right size
//!   and time is complete.
//! - *Renamed*: every other file gets a temporary name beside its final one, and is renamed when it is complete. If
//!   copies are durable (stage-out), it is synced before. A thread keeps some copies open and syncs them together: on a
//!   journalling file system the first sync does most of the work for all.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use forebay_types::{Code, Kind};

use crate::attributes::{same_time, set_attributes};
use crate::copy::{
    can_clone, check_range, copy_range, read_full, whole_sum, write_full, Copied, Failure, Holes, Method,
};
use crate::engine::{At, Engine};
use crate::entry::Entry;
use crate::job::{Copying, Job, Worker, ATTEMPTS};
use crate::large::LARGE_BYTES;
use crate::links::{Claim, Key};
use crate::names::Use;
use crate::report::add;
use crate::tree::{File, Meta, Object, Tree, Wanted};

/// From this size on, a file leaves the rest of its job to other threads, and the check whether it can be cloned pays.
const SHARE_BYTES: u64 = 1 << 20;
/// Bytes of copies that one thread keeps open until they are synced together, at most.
const BATCH_BYTES: u64 = 64 << 20;

/// A file to copy: its source, and the state of its destination.
struct Plan<'a, S: Tree, D: Tree> {
    entry: Entry<S, D>,
    source: S::File,
    meta: Meta,
    directory: &'a Arc<D::Directory>,
    /// The destination's name exists.
    replaces: bool,
    attempt: u32,
    key: Option<Key>,
}

impl<S: Tree, D: Tree> Engine<'_, S, D> {
    /// Stages a regular file. `key` is set if this attempt copies an inode with several links.
    pub(crate) fn file(&self, entry: Entry<S, D>, attempt: u32, key: Option<Key>, worker: &mut Worker<S, D>) {
        let opened = entry
            .at
            .source(self.source, &self.source_shelf)
            .and_then(|handle| self.source.open(&handle, &entry.name, entry.follow));
        let (source, meta) = match opened {
            Ok(opened) => opened,
            Err(code) => {
                self.source_error("open it", code, &entry);
                return self.links_failed(key);
            }
        };
        if meta.kind != Kind::File {
            // The entry was replaced since it was listed.
            self.links_failed(key);
            return self.entry(entry, Some(meta.kind), worker);
        }
        let key = match key {
            None if meta.links > 1 => match self.links.claim(meta.identity(), meta.links, &entry) {
                Claim::Copy => Some(meta.identity()),
                Claim::Wait => return,
                Claim::Link(first) => return self.link(&first, entry, &meta),
            },
            key => key,
        };
        let directory = match entry.at.destination(self.destination, &self.destination_shelf) {
            Ok(directory) => directory,
            Err(code) => {
                self.destination_error("open its directory", code, &entry);
                return self.links_failed(key);
            }
        };
        let mut plan = Plan { entry, source, meta, directory: &directory, replaces: false, attempt, key };
        if !plan.entry.at.fresh {
            match self.destination.stat(&directory, plan.entry.to(), false) {
                Err(Code::NotFound) => {}
                Err(code) => {
                    self.destination_error("read its attributes", code, &plan.entry);
                    return self.links_failed(key);
                }
                Ok(there) if there.kind == Kind::Directory => {
                    self.destination_error("replace the directory", Code::IsDirectory, &plan.entry);
                    return self.links_failed(key);
                }
                Ok(there) if self.is_complete(&plan, &there, worker) => {
                    return self.skip(plan, &there, worker)
                }
                Ok(there) => {
                    self.warn_of_newer(&there, meta.mtime, || plan.entry.destination_path());
                    plan.replaces = true;
                }
            }
        }
        if meta.size >= SHARE_BYTES {
            self.share_rest(worker);
        }
        self.copy(plan, worker);
    }

    /// True if the existing file is a complete copy.
    fn is_complete(&self, plan: &Plan<'_, S, D>, there: &Meta, worker: &mut Worker<S, D>) -> bool {
        let meta = &plan.meta;
        let looks_so = self.settings.resume
            && there.kind == Kind::File
            && there.size == meta.size
            && same_time(meta.mtime, there.mtime);
        if !looks_so || !self.settings.verify {
            return looks_so;
        }
        let Ok((copy, _)) = self.destination.open(plan.directory, plan.entry.to(), false) else {
            return false;
        };
        let same = self.same_bytes(&plan.source, &copy, meta.size, worker.buffer.bytes());
        if same {
            add(&self.tally.verified, 1);
        }
        same
    }

    fn same_bytes(&self, a: &S::File, b: &D::File, size: u64, buffer: &mut [u8]) -> bool {
        let (left, right) = buffer.split_at_mut(buffer.len() / 2);
        let mut at = 0;
        while at < size {
            if self.is_stopping() {
                return false;
            }
            let step = (size - at).min(left.len() as u64).min(right.len() as u64);
            let (left, right) = (&mut left[..step as usize], &mut right[..step as usize]);
            let read = (read_full(a, left, at), read_full(b, right, at));
            if read != (Ok(left.len()), Ok(right.len())) || left != right {
                return false;
            }
            at += step;
        }
        true
    }

    /// Skips a file whose copy is complete, after an update of the copy's owner and mode.
    fn skip(&self, plan: Plan<'_, S, D>, there: &Meta, worker: &mut Worker<S, D>) {
        let Plan { entry, source, meta, directory, key, .. } = plan;
        let wanted = self.owners.wanted(&meta);
        let differs = wanted.mode != there.mode
            || wanted.uid.is_some_and(|u| u != there.uid)
            || wanted.gid.is_some_and(|g| g != there.gid);
        if differs {
            let dressed = self.destination.open(directory, entry.to(), false).and_then(|(file, _)| {
                let warn = |what, code| self.warning(what, code, || entry.destination_path());
                let from = (self.source, Object::File(&source));
                let object = Object::File(&file);
                set_attributes(from, (self.destination, object), &wanted, &mut worker.scratch, &warn)
            });
            if let Err(code) = dressed {
                self.destination_error("set its attributes", code, &entry);
                return self.links_failed(key);
            }
        }
        add(&self.tally.skipped_files, 1);
        add(&self.tally.skipped_bytes, meta.size);
        self.done(1, meta.size);
        self.links_done(key, &entry, &meta);
    }

    fn copy(&self, plan: Plan<'_, S, D>, worker: &mut Worker<S, D>) {
        let Plan { entry, source, meta, directory, replaces, attempt, key } = plan;
        let whole = meta.size <= worker.buffer.len() as u64 && !meta.is_sparse();
        let wanted = self.owners.wanted(&meta);
        let mut at_once = whole && !replaces && !self.settings.durable;
        let (name, file) = loop {
            let name: Box<[u8]> =
                if at_once { entry.to().into() } else { self.tag.temporary(entry.to(), Use::Part).into() };
            match self.destination.create(directory, &name, &wanted) {
                Ok(file) => break (name, file),
                // Another process has created it meanwhile.
                Err(Code::Exists) if at_once => at_once = false,
                Err(code) => {
                    // The temporary exists: two sources of this staging have the same destination.
                    let code = if code == Code::Exists { Code::Busy } else { code };
                    let path = entry.destination_path();
                    self.error(At::Destination, "create it", code, path, Some(meta.size));
                    return self.links_failed(key);
                }
            }
        };
        let (temporary, directory) = (!at_once, directory.clone());
        let mut copying = Copying {
            entry,
            directory,
            file,
            name,
            temporary,
            meta,
            wanted,
            attempt,
            key,
            data_bytes: 0,
            reported: AtomicU64::new(0),
            sum: None,
        };
        if meta.size >= LARGE_BYTES {
            return self.start_large(copying, source);
        }
        let filled = self
            .fill(&mut copying, &source, whole, worker)
            .and_then(|()| self.set_attributes_of(&copying, &source, worker));
        if let Err(failure) = filled {
            return self.abandon(&copying, failure);
        }
        if self.settings.durable {
            if meta.size >= SHARE_BYTES {
                copying.file.start_sync();
            }
            worker.batch.push(copying);
            let bytes: u64 = worker.batch.iter().map(|c| c.data_bytes).sum();
            if worker.batch.len() >= self.settings.batch_files || bytes >= BATCH_BYTES {
                self.flush(worker);
            }
        } else {
            self.finish_copy(&copying, worker.buffer.bytes());
        }
    }

    fn fill(
        &self,
        copying: &mut Copying<S, D>,
        source: &S::File,
        whole: bool,
        worker: &mut Worker<S, D>,
    ) -> Result<(), Failure> {
        let size = copying.meta.size;
        let buffer = worker.buffer.bytes();
        if whole {
            let bytes = &mut buffer[..size as usize];
            if read_full(source, bytes, 0).map_err(Failure::Source)? < bytes.len() {
                return Err(Failure::Changed);
            }
            write_full(&copying.file, bytes, 0).map_err(Failure::Destination)?;
            copying.data_bytes = size;
            copying.sum = self.settings.verify.then(|| whole_sum(bytes));
        } else {
            copying.file.set_size(size).map_err(Failure::Destination)?;
            let method = self.method(source, &copying.file, &copying.meta);
            let mut went = |_| !self.is_stopping();
            let copied = copy_range(source, &copying.file, 0..size, method, buffer, &mut went)?;
            let Copied { data_bytes, sum } = copied;
            (copying.data_bytes, copying.sum) = (data_bytes, sum);
        }
        Ok(())
    }

    /// Selects how a file's content is copied.
    pub(crate) fn method(&self, source: &S::File, copy: &D::File, meta: &Meta) -> Method {
        let holes = match (meta.is_sparse(), source.knows_holes()) {
            (false, _) => Holes::None,
            (true, true) => Holes::Told,
            (true, false) => Holes::Zeros,
        };
        let clone = !self.settings.verify
            && meta.size >= SHARE_BYTES
            && matches!((source.descriptor(), copy.descriptor()), (Some(a), Some(b)) if can_clone(a, b));
        Method { holes, clone, sum: self.settings.verify }
    }

    /// Checks that the source did not change while it was copied, and sets all attributes of the copy but its times.
    pub(crate) fn set_attributes_of(
        &self,
        copying: &Copying<S, D>,
        source: &S::File,
        worker: &mut Worker<S, D>,
    ) -> Result<(), Failure> {
        let meta = &copying.meta;
        if source.version().map_err(Failure::Source)? != (meta.size, meta.mtime) {
            return Err(Failure::Changed);
        }
        let warn = |what, code| self.warning(what, code, || copying.entry.destination_path());
        let from = (self.source, Object::File(source));
        let to = (self.destination, Object::File(&copying.file));
        set_attributes(from, to, &copying.wanted, &mut worker.scratch, &warn).map_err(Failure::Destination)
    }

    /// Finishes this thread's waiting copies.
    pub(crate) fn flush(&self, worker: &mut Worker<S, D>) {
        let batch = std::mem::take(&mut worker.batch);
        if self.is_stopping() {
            batch.iter().for_each(|copying| self.discard(copying));
            return;
        }
        batch.iter().for_each(|copying| copying.file.start_sync());
        for copying in &batch {
            self.finish_copy(copying, worker.buffer.bytes());
        }
    }

    fn finish_copy(&self, copying: &Copying<S, D>, buffer: &mut [u8]) {
        let checked = match &copying.sum {
            Some(sum) => self.sync_to_check(copying).and_then(|()| {
                let go_on = || !self.is_stopping();
                check_range(&copying.file, 0..copying.meta.size, sum, buffer, &go_on)
            }),
            None => Ok(()),
        };
        match checked.and_then(|()| self.give_name(copying)) {
            Ok(()) => {
                self.done(1, copying.meta.size);
                self.completed(copying, copying.data_bytes);
            }
            Err(failure) => self.abandon(copying, failure),
        }
    }

    /// Ensures that the next read of the copy comes from the medium.
    pub(crate) fn sync_to_check(&self, copying: &Copying<S, D>) -> Result<(), Failure> {
        if self.settings.durable {
            copying.file.sync().map_err(Failure::Destination)?;
            copying.file.forget_cached();
        }
        Ok(())
    }

    /// The last steps of a copy: its times, the sync, its final name.
    pub(crate) fn give_name(&self, copying: &Copying<S, D>) -> Result<(), Failure> {
        let Wanted { atime, mtime, .. } = copying.wanted;
        let named = || {
            self.destination.set_times(Object::File(&copying.file), atime, mtime)?;
            if self.settings.durable {
                copying.file.sync()?;
            }
            if copying.temporary {
                let from = (&*copying.directory, &*copying.name);
                self.destination.rename(from, (&copying.directory, copying.entry.to()), 0)?;
            }
            Ok(())
        };
        named().map_err(Failure::Destination)
    }

    /// Counts a complete copy, and creates the links that waited for it.
    pub(crate) fn completed(&self, copying: &Copying<S, D>, data_bytes: u64) {
        add(&self.tally.files, 1);
        add(&self.tally.bytes, data_bytes);
        add(&self.tally.holes_bytes, copying.meta.size.saturating_sub(data_bytes));
        if self.settings.verify {
            add(&self.tally.verified, 1);
        }
        self.links_done(copying.key, &copying.entry, &copying.meta);
    }

    /// Removes a failed copy, and queues it again if its source changed.
    pub(crate) fn abandon(&self, copying: &Copying<S, D>, failure: Failure) {
        self.discard(copying);
        if failure == Failure::Changed && copying.attempt + 1 < ATTEMPTS {
            add(&self.tally.retries, 1);
            self.withdrawn_bytes.fetch_add(copying.reported.load(Ordering::Relaxed), Ordering::Relaxed);
            let path = crate::report::display(&copying.entry.source_path());
            self.progress.message(&format!("{path}: it changed while it was copied; copying it again"));
            let again = Job::File(copying.entry.clone(), copying.attempt + 1, copying.key);
            return self.queue.push(again);
        }
        self.failure(failure, &copying.entry, copying.meta.allocated.max(copying.meta.size.min(4096)));
        self.links_failed(copying.key);
    }

    fn discard(&self, copying: &Copying<S, D>) {
        // Frees the space at once, even while the descriptor is open.
        let _ = copying.file.set_size(0);
        if let Err(code) = self.destination.unlink(&copying.directory, &copying.name) {
            if code != Code::NotFound {
                self.destination_error("remove the unfinished copy", code, &copying.entry);
            }
        }
    }

    fn links_done(&self, key: Option<Key>, first: &Entry<S, D>, meta: &Meta) {
        if let Some(key) = key {
            for entry in self.links.done(key, first) {
                self.link(first, entry, meta);
            }
        }
    }

    fn links_failed(&self, key: Option<Key>) {
        if let Some(key) = key {
            for entry in self.links.failed(key) {
                self.queue.push(Job::File(entry, 0, None));
            }
        }
    }
}
