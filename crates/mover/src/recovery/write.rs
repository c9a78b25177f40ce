//! Writes what was found into a store: under its own name where the store has nothing there, else beside what is there.
//! Nothing is ever replaced, so no version has to be known.
//!
//! A version whose data the store has already, under its own name or beside it from an earlier recovery, is not written
//! again. So a recovery that was interrupted can be repeated.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use forebay_tasks::recovery::{Fate, RecoveryPlan};
use forebay_types::{Code, Error, Kind, Result, Timestamp};
use rustix::fs::{fallocate, ftruncate, FallocateFlags, MemfdFlags};

use super::find::{Destination, Found, Item};
use super::parts::Parts;
use crate::store::{
    may_run, Attributes, MoverId, Object, Outcome, Source, Store, StoreDirectory, StorePath, StoreUrl,
};

/// What the names of versions beside others have between the name and the time.
const BESIDE: &str = ".forebay-recovered-";
/// The same of files of which parts are missing.
const PARTIAL: &str = ".forebay-partial-";
/// Names that are tried for one version.
const NAMES_MAX: u32 = 1000;
/// Bytes that are compared at a time.
const COMPARED_BYTES: u64 = 4 << 20;
const NAME_BYTES_MAX: usize = forebay_types::limits::NAME_MAX;

/// Attributes of a directory that is made for what is in it, when no record of its own is left.
fn default_directory() -> Attributes {
    Attributes { mode: Some(0o755), ..Attributes::default() }
}

/// An opened store, or why it cannot be opened.
type Opened = std::result::Result<Arc<dyn Store>, Code>;

/// A directory of a store: its URL, and the path.
type In = (Vec<u8>, StorePath);

/// The stores, opened when they are first needed.
pub(super) struct Writer<'a> {
    plan: &'a RecoveryPlan,
    found: &'a Found,
    mover: MoverId,
    stores: Mutex<HashMap<Vec<u8>, Opened>>,
    failures: Mutex<HashMap<Vec<u8>, String>>,
    /// Directories that exist, in which leftovers of dead movers were looked for.
    made: Mutex<HashSet<In>>,
    /// Versions that earlier recoveries wrote beside others.
    beside: Mutex<HashMap<In, Arc<Vec<Object>>>>,
    /// The items that are directories, by their paths in the stores.
    directories: HashMap<&'a [u8], &'a Item>,
}

/// What became of an item.
pub(super) struct Written {
    pub(super) fate: Fate,
    /// The path in the store that has it, or would have it.
    pub(super) name: StorePath,
    pub(super) note: String,
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a> Writer<'a> {
    pub(super) fn new(plan: &'a RecoveryPlan, found: &'a Found) -> Writer<'a> {
        let is_directory = |item: &&Item| item.entry.is_some_and(|entry| entry.attr.is_directory());
        let keys = |item: &'a Item| item.destinations.iter().map(move |to| (to.key.as_slice(), item));
        Writer {
            directories: found.items.iter().filter(is_directory).flat_map(keys).collect(),
            plan,
            found,
            mover: MoverId::own(),
            stores: Mutex::default(),
            failures: Mutex::default(),
            made: Mutex::default(),
            beside: Mutex::default(),
        }
    }

    fn store(&self, url: &[u8]) -> Result<Arc<dyn Store>> {
        let mut stores = locked(&self.stores);
        if let Some(known) = stores.get(url) {
            let why = || locked(&self.failures).get(url).cloned().unwrap_or_default();
            return known.clone().map_err(|code| Error::new(code, why()));
        }
        let open = || -> Result<Arc<dyn Store>> {
            // Another directory in its place, such as the mount point of a file system that is not mounted, gets nothing.
            let directory = match self.plan.replaced || self.plan.to.is_some() {
                true => StoreDirectory::default(),
                false => self.found.directories.get(url).copied().unwrap_or_default(),
            };
            let store = StoreUrl::parse(url)?.open_directory(directory, self.mover.clone());
            let store = store.map_err(Error::from)?;
            store.list(&StorePath::root(), &mut |_| Err(stop())).map(drop).or_else(|e| {
                match e.error.what.as_str() {
                    STOP => Ok(()),
                    _ => Err(Error::from(e)),
                }
            })?;
            Ok(store)
        };
        match open() {
            Ok(store) => {
                stores.insert(url.to_vec(), Ok(Arc::clone(&store)));
                Ok(store)
            }
            Err(e) => {
                let e = match e.cure.is_empty() {
                    true => {
                        e.cure("mount or repair the store and run this again, or name another one with --to")
                    }
                    false => e,
                };
                stores.insert(url.to_vec(), Err(e.code));
                locked(&self.failures).insert(url.to_vec(), e.to_string());
                Err(e)
            }
        }
    }

    /// Writes an item to its first destination, and further names of it as links or copies.
    pub(super) fn write(&self, item: &Item) -> Result<Written> {
        let mut written: Option<Written> = None;
        for destination in &item.destinations {
            let next = self.write_to(item, destination)?;
            match &mut written {
                None => written = Some(next),
                Some(first) => {
                    let separator = if first.note.is_empty() { "" } else { "; " };
                    first.note.push_str(&format!("{separator}also as {}", next.name));
                }
            }
        }
        written.ok_or_else(|| {
            Error::new(Code::NotFound, "cannot recover a file").why("it has no place in a store")
        })
    }

    fn write_to(&self, item: &Item, destination: &Destination) -> Result<Written> {
        let store = self.store(&destination.url)?;
        let what = || {
            let key = String::from_utf8_lossy(&destination.key).into_owned();
            format!("cannot recover {key} into {}", store.title())
        };
        let path = StorePath::new(destination.key.clone())
            .map_err(|code| Error::new(code, what()).why("the recorded path does not stay in the store"))?;
        let directory = path.parent().unwrap_or_default();
        if !self.plan.dry_run {
            self.make_directories(&*store, destination, &directory)?;
        }
        let written = match item.entry.map_or(Kind::File, |entry| entry.attr.kind()) {
            Kind::Directory => self.write_directory(&*store, item, &path),
            Kind::Symlink => self.write_link(&*store, item, &path),
            _ => self.write_file(&*store, &destination.url, item, &path),
        };
        written.map_err(|e| match e.cure.is_empty() {
            true => e.cure("what was recovered so far stays: repair the cause and run this again"),
            false => e,
        })
    }

    /// Makes the directories above, and puts back what a dead mover had put aside.
    fn make_directories(
        &self,
        store: &dyn Store,
        destination: &Destination,
        directory: &StorePath,
    ) -> Result<()> {
        let seen = (destination.url.clone(), directory.clone());
        if locked(&self.made).contains(&seen) {
            return Ok(());
        }
        let mut path = StorePath::root();
        for name in directory.components() {
            path = path.join(name).map_err(|code| Error::new(code, "a path is too long"))?;
            match store.make_directory(&path, &self.attributes_of_directory(&path)).map_err(Error::from)? {
                Outcome::Done(_) => {}
                Outcome::Conflict(_) => {
                    return Err(Error::new(Code::NotDirectory, format!("cannot recover into {path}"))
                        .why("the store has something there that is no directory")
                        .cure("move it away in the store, or name another place with --to"))
                }
            }
        }
        match store.remove_leftovers(directory, &may_run) {
            Ok(_) => {}
            Err(e) if e.code() == Code::NotFound => {}
            Err(e) => return Err(Error::from(e)),
        }
        if let Some(above) = directory.parent() {
            store.sync_directory(&above).map_err(Error::from)?;
        }
        locked(&self.made).insert(seen);
        Ok(())
    }

    /// Attributes of a directory, from the item for it if there is one.
    fn attributes_of_directory(&self, path: &StorePath) -> Attributes {
        self.directories.get(path.as_bytes()).map_or_else(default_directory, |item| attributes(item))
    }

    fn write_directory(&self, store: &dyn Store, item: &Item, path: &StorePath) -> Result<Written> {
        let written = |fate| Written { fate, name: path.clone(), note: String::new() };
        match store.look(path).map_err(Error::from)? {
            Some(object) if object.kind == Kind::Directory => return Ok(written(Fate::Already)),
            Some(_) => return Err(taken(path)),
            None if self.plan.dry_run => return Ok(written(Fate::Recovered)),
            None => {}
        }
        match store.make_directory(path, &attributes(item)).map_err(Error::from)? {
            Outcome::Done(_) => {}
            Outcome::Conflict(_) => return Err(taken(path)),
        }
        store.sync_directory(&path.parent().unwrap_or_default()).map_err(Error::from)?;
        Ok(written(Fate::Recovered))
    }

    fn write_link(&self, store: &dyn Store, item: &Item, path: &StorePath) -> Result<Written> {
        let (directory, name) = (path.parent().unwrap_or_default(), path.name().unwrap_or_default());
        for number in 0..NAMES_MAX {
            let (to, fate) = self.candidate(&directory, name, number, BESIDE)?;
            match store.look(&to).map_err(Error::from)? {
                Some(object) if object.kind == Kind::Symlink && object.link_target == item.link_target => {
                    return Ok(Written { fate: Fate::Already, name: to, note: String::new() })
                }
                Some(_) => continue,
                None => {}
            }
            let written = Written { fate, name: to.clone(), note: String::new() };
            if self.plan.dry_run {
                return Ok(written);
            }
            let made = store.make_symlink(&to, &item.link_target, &attributes(item)).map_err(Error::from)?;
            if let Outcome::Done(_) = made {
                store.sync_directory(&directory).map_err(Error::from)?;
                return Ok(written);
            }
        }
        Err(taken(path))
    }

    /// The name that is tried as number `number`, and what a file under it is.
    fn candidate(
        &self,
        directory: &StorePath,
        name: &[u8],
        number: u32,
        beside: &str,
    ) -> Result<(StorePath, Fate)> {
        let is_own = number == 0 && beside == BESIDE;
        let name = match (is_own, number) {
            (true, _) => name.to_vec(),
            (_, 0 | 1) => with_suffix(name, &format!("{beside}{}", self.plan.stamp)),
            _ => with_suffix(name, &format!("{beside}{}-{number}", self.plan.stamp)),
        };
        let path =
            directory.join(&name).map_err(|code| Error::new(code, "a path in the store is too long"))?;
        let fate = match beside {
            PARTIAL => Fate::Incomplete,
            _ if is_own => Fate::Recovered,
            _ => Fate::Beside,
        };
        Ok((path, fate))
    }

    fn write_file(&self, store: &dyn Store, url: &[u8], item: &Item, path: &StorePath) -> Result<Written> {
        let (directory, name) = (path.parent().unwrap_or_default(), path.name().unwrap_or_default());
        let layout = item
            .entry
            .map_or_else(|| forebay_types::Layout::single(item.ino.birth_node(), 0), |entry| entry.layout);
        let parts = Parts::open(item.ino, &layout, &item.parts, &self.found.targets);
        let parts = parts.map_err(|code| {
            Error::new(code, format!("cannot open the backing files of {path}")).cure("check the medium")
        })?;
        let beside = if item.fate == Fate::Incomplete { PARTIAL } else { BESIDE };
        let written = |fate, name: &StorePath| Written { fate, name: name.clone(), note: String::new() };
        if let Some(there) = self.find_same(store, url, &directory, name, beside, &parts)? {
            return Ok(written(Fate::Already, &there));
        }
        let mut upload: Option<StorePath> = None;
        for number in 0..NAMES_MAX {
            let (to, fate) = self.candidate(&directory, name, number, beside)?;
            if store.look(&to).map_err(Error::from)?.is_some() {
                continue;
            }
            if self.plan.dry_run {
                return Ok(written(fate, &to));
            }
            let temporary = match &upload {
                Some(temporary) => temporary.clone(),
                None => {
                    let temporary = store.temporaries().next(&directory);
                    let uploaded = store.upload(&temporary, &parts, &attributes(item));
                    let durable = uploaded.and_then(|_| store.make_durable(std::slice::from_ref(&temporary)));
                    if let Err(e) = durable {
                        let _ = store.discard(&temporary);
                        return Err(Error::from(e));
                    }
                    upload.insert(temporary).clone()
                }
            };
            match store.publish(&temporary, &to, None) {
                Ok(Outcome::Done(_)) => {
                    store.sync_directory(&directory).map_err(Error::from)?;
                    return Ok(written(fate, &to));
                }
                // Another program took the name just now.
                Ok(Outcome::Conflict(_)) => {}
                Err(e) => {
                    let _ = store.discard(&temporary);
                    return Err(Error::from(e));
                }
            }
        }
        if let Some(temporary) = upload {
            let _ = store.discard(&temporary);
        }
        Err(taken(path))
    }

    /// A file of the store that has the same data: under the own name, or beside it.
    #[allow(clippy::too_many_arguments)]
    fn find_same(
        &self,
        store: &dyn Store,
        url: &[u8],
        directory: &StorePath,
        name: &[u8],
        beside: &str,
        parts: &Parts,
    ) -> Result<Option<StorePath>> {
        let own = directory.join(name).map_err(|code| Error::new(code, "a path in the store is too long"))?;
        let original = store.look(&own).map_err(Error::from)?;
        if let Some(object) = &original {
            if has_same_data(store, &own, object, parts)? {
                return Ok(Some(own));
            }
        } else if beside == BESIDE {
            return Ok(None);
        }
        let prefix = with_suffix(name, beside);
        let others = self.beside(store, url, directory)?;
        let others = others.iter().filter(|object| object.name.starts_with(&prefix));
        for object in others {
            let path = directory.join(&object.name).map_err(|code| Error::new(code, "a path is too long"))?;
            if has_same_data(store, &path, object, parts)? {
                return Ok(Some(path));
            }
        }
        Ok(None)
    }

    /// What earlier recoveries wrote beside others in a directory.
    fn beside(&self, store: &dyn Store, url: &[u8], directory: &StorePath) -> Result<Arc<Vec<Object>>> {
        let place = (url.to_vec(), directory.clone());
        if let Some(known) = locked(&self.beside).get(&place) {
            return Ok(Arc::clone(known));
        }
        let is_beside = |name: &[u8]| {
            let has = |mark: &str| name.windows(mark.len()).any(|part| part == mark.as_bytes());
            has(BESIDE) || has(PARTIAL)
        };
        let mut others = Vec::new();
        let listed = store.list(directory, &mut |object| {
            if object.kind == Kind::File && is_beside(&object.name) {
                others.push(object);
            }
            Ok(())
        });
        match listed {
            Ok(_) => {}
            Err(e) if e.code() == Code::NotFound => {}
            Err(e) => return Err(Error::from(e)),
        }
        let others = Arc::new(others);
        locked(&self.beside).insert(place, Arc::clone(&others));
        Ok(others)
    }
}

const STOP: &str = "enough was listed";

fn stop() -> crate::store::StoreError {
    crate::store::StoreError::lasting(Code::Interrupted, STOP)
}

fn taken(path: &StorePath) -> Error {
    Error::new(Code::Exists, format!("cannot recover {path}"))
        .why("the store has something else there, and under all names beside it")
        .cure("move it away in the store, or name another place with --to")
}

/// A name with a suffix, cut so that it is not too long.
fn with_suffix(name: &[u8], suffix: &str) -> Vec<u8> {
    // Room for the time and a number, so that all names of one file begin alike.
    let room = NAME_BYTES_MAX - 64;
    let mut whole = name[..name.len().min(room)].to_vec();
    whole.extend_from_slice(suffix.as_bytes());
    whole
}

/// Attributes of what is written.
fn attributes(item: &Item) -> Attributes {
    let latest = |time: fn(&super::parts::Part) -> Timestamp| item.parts.iter().map(time).max();
    let attr = item.entry.map(|entry| entry.attr);
    Attributes {
        mode: Some(attr.map_or(0o600, |attr| attr.mode & 0o7777)),
        uid: attr.map(|attr| attr.uid),
        gid: attr.map(|attr| attr.gid),
        atime: latest(|part| part.atime).or(attr.map(|attr| attr.atime)),
        mtime: latest(|part| part.mtime).or(attr.map(|attr| attr.mtime)),
        xattrs: item.xattrs.clone(),
    }
}

/// True if a file of the store has the same bytes. The store's are read into memory, piece by piece.
fn has_same_data(store: &dyn Store, path: &StorePath, object: &Object, parts: &Parts) -> Result<bool> {
    if object.kind != Kind::File || object.version.bytes != parts.bytes() {
        return Ok(false);
    }
    let failed = |e: rustix::io::Errno| Error::io("cannot compare with the store", &e.into());
    let memory: OwnedFd =
        rustix::fs::memfd_create(c"forebay-compared", MemfdFlags::CLOEXEC).map_err(failed)?;
    ftruncate(&memory, parts.bytes()).map_err(failed)?;
    let (mut theirs, mut ours) = (vec![0; COMPARED_BYTES as usize], vec![0; COMPARED_BYTES as usize]);
    let mut at = 0;
    while at < parts.bytes() {
        let n = (parts.bytes() - at).min(COMPARED_BYTES);
        match store.read(path, &object.version, at..at + n, memory.as_fd()) {
            Ok(()) => {}
            // It was changed meanwhile: another version.
            Err(e) if e.code() == Code::Stale => return Ok(false),
            Err(e) => return Err(Error::from(e)),
        }
        fill(&mut theirs[..n as usize], at, |buffer, at| {
            rustix::io::pread(&memory, buffer, at).map_err(|e| Code::from_errno(e.raw_os_error()))
        })?;
        fill(&mut ours[..n as usize], at, |buffer, at| parts.read_at(buffer, at))?;
        if theirs[..n as usize] != ours[..n as usize] {
            return Ok(false);
        }
        fallocate(&memory, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, n).map_err(failed)?;
        at += n;
    }
    Ok(true)
}

/// Reads until the buffer is full.
fn fill(
    buffer: &mut [u8],
    offset: u64,
    read: impl Fn(&mut [u8], u64) -> std::result::Result<usize, Code>,
) -> Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        match read(&mut buffer[done..], offset + done as u64) {
            Ok(0) => buffer[done..].fill(0),
            Ok(n) => {
                done += n;
                continue;
            }
            Err(code) => return Err(Error::new(code, "cannot read a backing file").cure("check the medium")),
        }
        break;
    }
    Ok(())
}
