//! Marks backing files on targets that outlive the node (docs/decisions/0043): after the node's death they say where the
//! data belong.
//!
//! A pass marks the files of pending places that are not marked alike yet, and marks those clean that are not pending
//! any longer. So programs wait for a mark only in fsync, which has the mover write it first ([`mark_now`]). A mark has
//! the path by which the pool knows the file; when that changes, its place becomes pending again, or a directory above
//! it, and the mark is written anew.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_client::Pool;
use forebay_data::{outlives_node, BackingName, DataMark};
use forebay_tasks::StoreSettings;
use forebay_types::{
    Code, Entry, Error, Ino, PendingPlace, Result, Timestamp, Wanted, FLAG_ATTACHED, FLAG_DIRTY,
    FLAG_DRAINING,
};

use super::link::Link;
use super::roots::root_of;
use crate::host::{self, Instant};
use crate::store::StorePath;

/// How long the path of a directory is taken for known, unless a directory is pending.
const PATHS_AGE: Duration = Duration::from_secs(5);

/// The mark that a file has.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Marked {
    epoch: u64,
    /// The change time in the shard: that of the attributes.
    changed: Timestamp,
    flags: u32,
    parent: Ino,
    name: Vec<u8>,
    directory: Vec<u8>,
}

/// A directory of a store's tree.
#[derive(Clone, Debug)]
struct Known {
    /// The path of the directory with the store, in the pool.
    at: Vec<u8>,
    settings: StoreSettings,
    /// The path below it.
    below: Vec<u8>,
}

#[derive(Debug, Default)]
struct State {
    marked: HashMap<u64, Marked>,
    directories: HashMap<u64, Option<Known>>,
    read: Option<Instant>,
    /// What is marked now was read after this time.
    reads_since: Timestamp,
}

/// The begin of a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Begun {
    synced: u64,
    at: Timestamp,
}

/// What is marked.
#[derive(Debug)]
pub(super) struct Marks {
    /// This node's targets; none for those that end with the node.
    targets: Vec<Option<BorrowedFd<'static>>>,
    pool: String,
    /// How often a program had something marked.
    synced: AtomicU64,
    state: Mutex<State>,
}

fn identity(pool: &Pool) -> Option<String> {
    let directory = Path::new(OsStr::from_bytes(pool.directory()));
    let text = std::fs::read(directory.join("pool.json")).ok()?;
    let value: serde_json::Value = serde_json::from_slice(&text).ok()?;
    Some(value.get("uuid")?.as_str()?.to_owned())
}

fn locked(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn now() -> Timestamp {
    let since = host::since_1970();
    Timestamp { sec: since.as_secs() as i64, nsec: since.subsec_nanos() }
}

impl Marks {
    pub(super) fn new(link: Link) -> Marks {
        let targets = link.targets().into_iter().map(|fd| outlives_node(fd).then_some(fd)).collect();
        Marks {
            targets,
            pool: identity(link.pool).unwrap_or_default(),
            synced: AtomicU64::new(0),
            state: Mutex::default(),
        }
    }

    /// What a pass reads begins here: it must not overwrite what an fsync has had marked meanwhile.
    pub(super) fn begin(&self) -> Begun {
        Begun { synced: self.synced.load(Ordering::Acquire), at: now() }
    }

    /// True if any of this node's targets outlives the node.
    fn is_any(&self) -> bool {
        self.targets.iter().any(Option::is_some)
    }

    /// The backing files of a file that are on targets of this node which outlive it.
    fn files(&self, link: &Link, entry: &Entry) -> Vec<(BorrowedFd<'static>, BackingName)> {
        let me = link.pool.node();
        let layout = &entry.layout;
        let file = |(component, stripe): (usize, u16)| {
            let target = layout.components().get(component)?.target(stripe);
            let is_here = !link.pool.spans_nodes() || me.is_ok_and(|me| u32::from(me.0) == target >> 16);
            let fd = self.targets.get((target & 0xffff) as usize).copied().flatten()?;
            let name = BackingName::new(entry.attr.ino, layout.file_number(component), stripe);
            is_here.then_some((fd, name))
        };
        layout.stripes().filter_map(file).collect()
    }
}

impl State {
    fn directory(&mut self, link: &Link, directory: Ino) -> Option<Known> {
        if let Some(known) = self.directories.get(&directory.0) {
            return known.clone();
        }
        let find = || {
            let root = root_of(link, directory)?;
            let settings = serde_json::from_slice(&link.settings(root).ok()?).ok()?;
            let at = link.path(root, b"").into_bytes();
            Some(Known { at, settings, below: link.path_below(root, directory)? })
        };
        let known = find();
        self.directories.insert(directory.0, known.clone());
        known
    }

    /// Reads paths anew that may have changed.
    fn age(&mut self, places: &[PendingPlace]) {
        let is_directory = |place: &PendingPlace| match &place.wanted {
            Some(Wanted::Here(entry, _)) => entry.attr.is_directory(),
            _ => place.placed.is_some_and(|placed| placed.kind == forebay_types::Kind::Directory),
        };
        let is_old = self.read.is_none_or(|read| read.elapsed() >= PATHS_AGE);
        if is_old || places.iter().any(is_directory) {
            self.directories.clear();
            self.read = Some(Instant::now());
        }
    }
}

/// Marks what is pending and not marked alike, and what is not pending any longer. `places` were read after `begun`.
pub(super) fn pass(link: &Link, marks: &Marks, begun: Begun, places: &[PendingPlace]) {
    if !marks.is_any() {
        return;
    }
    let mut state = locked(&marks.state);
    state.reads_since = begun.at;
    let again;
    let places = match begun.synced == marks.synced.load(Ordering::Acquire) {
        true => places,
        false => {
            state.reads_since = now();
            let Ok(read) = link.all_pending() else { return };
            again = read;
            &again
        }
    };
    state.age(places);
    let mut pending = HashSet::new();
    for place in places {
        let Some(Wanted::Here(entry, _)) = &place.wanted else { continue };
        if entry.attr.is_file() && pending.insert(entry.attr.ino.0) {
            note(mark(link, marks, &mut state, entry, (place.parent, &place.name)), &place.name);
        }
    }
    let settled: Vec<u64> = state.marked.keys().filter(|ino| !pending.contains(ino)).copied().collect();
    for ino in settled {
        let Some(known) = state.marked.get(&ino).cloned() else { continue };
        if known.flags & FLAG_DIRTY == 0 {
            state.marked.remove(&ino);
            continue;
        }
        let is_clean = |entry: &Entry| entry.attr.flags & (FLAG_DIRTY | FLAG_DRAINING) == 0;
        match link.inode(Ino(ino)) {
            Ok(entry) if entry.attr.is_resident() && is_clean(&entry) => {
                note(write(link, marks, &mut state, &entry, (known.parent, &known.name)), &known.name);
                state.marked.remove(&ino);
            }
            // Marked dirty just now: its place is in the next list.
            Ok(entry) if entry.attr.is_resident() => {}
            Ok(_) | Err(Code::NotFound) => drop(state.marked.remove(&ino)),
            Err(_) => {}
        }
    }
}

fn note(done: std::result::Result<(), Code>, name: &[u8]) {
    match done {
        // The file was removed or released meanwhile.
        Ok(()) | Err(Code::NotFound) => {}
        Err(code) => tracing::warn!(
            "cannot mark the backing file of {}: {}; after the node's death its name is known by snapshots alone",
            name.escape_ascii(),
            code.name()
        ),
    }
}

/// Marks a file of a pending place, unless it is marked alike.
fn mark(
    link: &Link,
    marks: &Marks,
    state: &mut State,
    entry: &Entry,
    place: (Ino, &[u8]),
) -> std::result::Result<(), Code> {
    if !entry.attr.is_resident() {
        return Ok(());
    }
    let mut pending = *entry;
    // The store lacks its data, its name or its attributes: a comparison decides.
    pending.attr.flags |= FLAG_DIRTY;
    write(link, marks, state, &pending, place)
}

fn write(
    link: &Link,
    marks: &Marks,
    state: &mut State,
    entry: &Entry,
    (parent, name): (Ino, &[u8]),
) -> std::result::Result<(), Code> {
    let Some(known) = state.directory(link, parent) else { return Ok(()) };
    let marked = Marked {
        epoch: entry.attr.epoch(),
        changed: entry.attr.ctime,
        flags: entry.attr.flags & FLAG_DIRTY,
        parent,
        name: name.to_vec(),
        directory: known.below.clone(),
    };
    if state.marked.get(&entry.attr.ino.0) == Some(&marked) {
        return Ok(());
    }
    let mut key = known.below;
    if !key.is_empty() {
        key.push(b'/');
    }
    key.extend_from_slice(name);
    if known.settings.read_only || known.settings.policy_of(&key).is_temporary() {
        return Ok(());
    }
    let files = marks.files(link, entry);
    if !files.is_empty() {
        let mark = DataMark {
            written: state.reads_since,
            pool: marks.pool.clone(),
            entry: *entry,
            at: known.at,
            url: known.settings.url.into_bytes(),
            key,
            xattrs: link.xattrs(entry)?,
            lacks_xattrs: false,
        };
        for (target, file) in &files {
            match mark.write(target, file) {
                // A backing file that no program has opened yet.
                Err(Code::NotFound) if files.len() > 1 => {}
                done => done?,
            }
        }
    }
    state.marked.insert(entry.attr.ino.0, marked);
    Ok(())
}

/// Marks a file clean that was just restored.
pub(super) fn mark_restored(link: &Link, marks: &Marks, entry: &Entry) {
    if !marks.is_any() || entry.attr.flags & (FLAG_DIRTY | FLAG_DRAINING) != 0 {
        return;
    }
    let Ok(place) = link.store_place(entry.attr.ino) else { return };
    let Some((_, name)) =
        StorePath::new(place.path).ok().and_then(|path| Some((path.parent()?, path.name()?.to_vec())))
    else {
        return;
    };
    let mut state = locked(&marks.state);
    state.reads_since = now();
    // A program may have it marked already.
    if link.inode(entry.attr.ino).is_ok_and(|now| now.attr.flags & (FLAG_DIRTY | FLAG_DRAINING) == 0) {
        note(write(link, marks, &mut state, entry, (place.parent, &name)), &name);
        state.marked.remove(&entry.attr.ino.0);
    }
}

/// Marks a file, or the pending files of a directory, before this returns. A file that no place names is of no store, or
/// was removed.
pub(super) fn mark_now(link: &Link, marks: &Marks, ino: Ino) -> Result<()> {
    let failed = |code| Error::new(code, format!("cannot mark the backing file of inode {ino}"));
    if !marks.is_any() {
        return Ok(());
    }
    let mut state = locked(&marks.state);
    marks.synced.fetch_add(1, Ordering::AcqRel);
    state.reads_since = now();
    let entry = match link.inode(ino) {
        Ok(entry) => entry,
        Err(Code::NotFound) => return Ok(()),
        Err(code) => return Err(failed(code)),
    };
    if entry.attr.flags & FLAG_ATTACHED == 0 {
        return Ok(());
    }
    if entry.attr.is_directory() {
        // A rename of a directory above it is part of what it names.
        state.directories.clear();
        return mark_directory(link, marks, &mut state, ino).map_err(failed);
    }
    let last = state.marked.get(&ino.0).map(|marked| (marked.parent, marked.name.clone()));
    if let Some((parent, name)) = last {
        if link.lookup(parent, &name).map_err(failed)? == Some(ino) {
            return mark(link, marks, &mut state, &entry, (parent, &name))
                .or_else(ignore_long)
                .map_err(failed);
        }
    }
    let is_it = |place: &&PendingPlace| matches!(&place.wanted, Some(Wanted::Here(entry, _)) if entry.attr.ino == ino);
    let places = link.all_pending().map_err(failed)?;
    match places.iter().find(is_it) {
        Some(place) => mark(link, marks, &mut state, &entry, (place.parent, &place.name))
            .or_else(ignore_long)
            .map_err(failed),
        None => Ok(()),
    }
}

/// A path that is too long for a mark is known by snapshots alone.
fn ignore_long(code: Code) -> std::result::Result<(), Code> {
    match code {
        Code::NameTooLong | Code::NotFound => Ok(()),
        code => Err(code),
    }
}

fn mark_directory(
    link: &Link,
    marks: &Marks,
    state: &mut State,
    directory: Ino,
) -> std::result::Result<(), Code> {
    for place in link.pending_in(directory)? {
        if let Some(Wanted::Here(entry, _)) = &place.wanted {
            if entry.attr.is_file() {
                mark(link, marks, state, entry, (place.parent, &place.name)).or_else(ignore_long)?;
            }
        }
    }
    Ok(())
}
