//! A simple mover: it looks at one pending place after another and takes one step at a time, so that programs, kills
//! and reopened shards come between any two of its requests and calls. After a kill it knows only what the shard says.

use std::collections::VecDeque;

use forebay_types::{
    Code, Ino, Kind, PendingPlace, Placed, Request, StoreObject, StoreVersion, Timestamp, Wanted, Writer,
    FLAG_DIRTY,
};

use super::pool::Pool;
use super::store::{Id, Path, Store};

/// Directory and name.
pub(crate) type At = (Ino, Vec<u8>);

const NOTHING: StoreVersion = StoreVersion { bytes: 0, mtime: Timestamp { sec: 0, nsec: 0 }, ino: 0, tag: 0 };

#[derive(Clone, Debug)]
pub(crate) enum Step {
    BeginDrain(Ino),
    /// Copies a file's data to a node; attributes are those of `BeginDrain`.
    Copy(Ino, Id),
    Intend(At, StoreVersion),
    Put(At, Id),
    Move(At, At),
    Remove(At),
    Chmod(At, u32),
    /// Without an epoch: that of `BeginDrain`.
    Published(At, Ino, Option<u64>, u64, StoreVersion),
    Unpublished(At, u64),
    Settled(At, u64),
    Moved(At, At, StoreVersion),
    /// What the store has there is not known to be of any inode.
    Cleared(At, StoreVersion),
    Import(Ino, Vec<(Vec<u8>, Id)>),
    /// With the directory's epoch when the listing began.
    Listed(Ino, u64, Vec<(Vec<u8>, Id)>),
    /// The store was looked at, and lacks the name.
    Absent(At),
}

#[derive(Default)]
pub(crate) struct Mover {
    steps: VecDeque<Step>,
    drained: (u64, u32),
    parked: u32,
    /// Directories to list, and names to look up.
    pub(crate) lists: VecDeque<Ino>,
    pub(crate) looks: VecDeque<At>,
}

/// The path of a place in the store; none if the store does not have its directory.
fn path(pool: &mut Pool, at: &At) -> Option<Path> {
    match pool.store_place(at.0) {
        Ok((mut path, _)) => {
            path.push(at.1.clone());
            Some(path)
        }
        Err(Code::NotFound) => None,
        Err(code) => panic!("{code:?}"),
    }
}

impl Mover {
    pub(crate) fn kill(&mut self) {
        self.steps.clear();
    }

    /// Takes one step. False if there is nothing to do. `pick` chooses the place.
    pub(crate) fn step(&mut self, pool: &mut Pool, store: &mut Store, pick: usize) -> bool {
        if self.steps.is_empty() {
            self.plan(pool, store, pick);
        }
        let Some(step) = self.steps.pop_front() else { return false };
        let done = self.take(pool, store, &step);
        pool.trace(|| format!("mover: {step:?} {done:?}"));
        match done {
            Ok(()) => {}
            Err(Code::Busy | Code::Stale | Code::NotFound) => self.steps.clear(),
            Err(code) => panic!("{step:?} was answered with {code:?}"),
        }
        true
    }

    fn take(&mut self, pool: &mut Pool, store: &mut Store, step: &Step) -> Result<(), Code> {
        match step {
            Step::BeginDrain(ino) => {
                let attr = pool.entry(Request::BeginDrain { ino: *ino })?;
                self.drained = (attr.epoch(), attr.mode & 0o7777);
            }
            Step::Copy(ino, id) => {
                let node = store.nodes.get_mut(id).unwrap();
                node.content = *pool.backing.get(ino).ok_or(Code::NotFound)?;
                node.mode = self.drained.1;
            }
            Step::Intend((parent, name), version) => {
                pool.ask(Request::Intend { parent: *parent, name, version: *version })?;
            }
            Step::Put(at, id) => {
                let path = path(pool, at).unwrap();
                store.put(&path, *id);
            }
            Step::Move(from, to) => {
                let (from, to) = (path(pool, from).unwrap(), path(pool, to).unwrap());
                assert_eq!(store.find(&to), None);
                store.rename(&from, &to);
            }
            Step::Remove(at) => {
                let path = path(pool, at).unwrap();
                store.remove(&path);
            }
            Step::Chmod(at, mode) => {
                let path = path(pool, at).unwrap();
                let id = store.find(&path).unwrap();
                store.nodes.get_mut(&id).unwrap().mode = *mode;
            }
            Step::Published((parent, name), ino, epoch, seen, version) => pool.ask(Request::Published {
                parent: *parent,
                name,
                ino: *ino,
                epoch: epoch.unwrap_or(self.drained.0),
                seen: *seen,
                version: *version,
            })?,
            Step::Unpublished((parent, name), seen) => {
                pool.ask(Request::Unpublished { parent: *parent, name, seen: *seen })?;
            }
            Step::Settled((parent, name), seen) => {
                pool.ask(Request::Settled { parent: *parent, name, seen: *seen })?;
            }
            Step::Moved((parent, name), (new_parent, new_name), version) => pool.ask(Request::Moved {
                parent: *parent,
                name,
                new_parent: *new_parent,
                new_name,
                version: *version,
            })?,
            Step::Cleared((parent, name), version) => {
                pool.ask(Request::Conflict { parent: *parent, name, found: false, version: *version })?
            }
            Step::Import(ino, list) => import(pool, store, *ino, list, None)?,
            Step::Listed(ino, epoch, last) => import(pool, store, *ino, last, Some(*epoch))?,
            Step::Absent((parent, name)) => pool.note_absent(*parent, name)?,
        }
        Ok(())
    }

    fn plan(&mut self, pool: &mut Pool, store: &mut Store, pick: usize) {
        let all = pool.pending();
        // Paths may lead through what the last mover renamed: that comes first.
        for place in &all {
            let steps = recover(pool, store, place, &all);
            if !steps.is_empty() {
                self.steps.extend(steps);
                return;
            }
        }
        if let Some(ino) = self.lists.pop_front() {
            if let Ok((path, _)) = pool.store_place(ino) {
                let id = store.find(&path).expect("a directory of the pool is in the store");
                let names: Vec<_> = store.nodes[&id].entries.clone().into_iter().collect();
                let (first, last) = names.split_at(names.len().saturating_sub(1 + names.len() % 2));
                self.steps.extend(first.chunks(2).map(|some| Step::Import(ino, some.to_vec())));
                self.steps.push_back(Step::Listed(ino, pool.attr(ino).unwrap().epoch(), last.to_vec()));
            }
            return;
        }
        if let Some((parent, name)) = self.looks.pop_front() {
            if let Some(path) = path(pool, &(parent, name.clone())) {
                self.steps.push_back(match store.find(&path) {
                    Some(id) => Step::Import(parent, vec![(name, id)]),
                    None => Step::Absent((parent, name)),
                });
            }
            return;
        }
        for i in 0..all.len() {
            let steps = self.plan_for(pool, store, &all[(i + pick) % all.len()], &all);
            if !steps.is_empty() {
                self.steps.extend(steps);
                return;
            }
        }
    }

    fn plan_for(
        &mut self,
        pool: &mut Pool,
        store: &mut Store,
        place: &PendingPlace,
        all: &[PendingPlace],
    ) -> Vec<Step> {
        let (here, seen) = ((place.parent, place.name.clone()), place.changes);
        let Some(at) = path(pool, &here) else {
            return match (&place.placed, &place.wanted) {
                (None, None) => vec![Step::Settled(here, seen)],
                _ => Vec::new(), // its directory comes first
            };
        };
        let free = |pool: &mut Pool, store: &Store, ino: Ino| {
            all.iter().find_map(|other| {
                let wants = matches!(&other.wanted, Some(Wanted::Here(entry, _)) if entry.attr.ino == ino);
                let to = (other.parent, other.name.clone());
                let is_free = wants && other.placed.is_none() && to != here;
                let path = if is_free { path(pool, &to) } else { None };
                path.filter(|path| !path.starts_with(&at) && store.find(path).is_none()).map(|_| to)
            })
        };
        let remove = |here: At| {
            vec![
                Step::Intend(here.clone(), NOTHING),
                Step::Remove(here.clone()),
                Step::Unpublished(here, seen),
            ]
        };
        let occupant = place.placed.filter(|placed| match &place.wanted {
            Some(Wanted::Here(entry, _)) => entry.attr.ino != placed.ino,
            _ => true,
        });
        if let Some(placed) = occupant {
            let attr = pool.attr(placed.ino).ok();
            let mut is_copy = || pool.store_place(placed.ino).is_ok_and(|(path, _)| path == at);
            if let Some(attr) = attr.filter(|_| is_copy()) {
                if let Some(to) = free(pool, store, placed.ino) {
                    return moves(&here, &to, placed.version);
                }
                let is_needed = attr.is_directory() || attr.is_file() && !attr.is_resident();
                if is_needed && place.wanted.is_some() {
                    self.parked += 1;
                    let to = (here.0, format!(".parked-{}", self.parked).into_bytes());
                    return moves(&here, &to, placed.version);
                }
            }
            let is_directory = store.nodes[&store.find(&at).unwrap()].kind == Kind::Directory;
            match &place.wanted {
                Some(Wanted::Here(entry, _)) if !is_directory && !entry.attr.is_directory() => {}
                _ => return remove(here),
            }
        }
        let Some(Wanted::Here(entry, copy)) = &place.wanted else {
            return vec![Step::Settled(here, seen)];
        };
        let (attr, ino) = (entry.attr, entry.attr.ino);
        let dirty = attr.is_file() && attr.flags & FLAG_DIRTY != 0;
        let mode = attr.mode & 0o7777;
        if let Some(copy) = copy.as_ref().filter(|copy| (copy.parent, &copy.name) != (here.0, &here.1)) {
            let from = (copy.parent, copy.name.clone());
            let there = path(pool, &from).unwrap();
            let is_still = pool.lookup(copy.parent, &copy.name).is_ok_and(|found| found.ino == ino);
            let (_, known) = pool.store_place(ino).unwrap();
            let version = known.placed.unwrap().version;
            if store.version_at(&there) != Some(version) {
                return Vec::new(); // a mover died there: that comes first
            }
            if !is_still && place.placed.is_none() {
                return if at.starts_with(&there) { Vec::new() } else { moves(&from, &here, version) };
            }
            assert!(!attr.is_directory() || place.placed.is_none_or(|placed| placed.ino != ino));
            if attr.is_directory() || is_still && dirty {
                return Vec::new();
            }
            if !dirty {
                let id = store.find(&there).unwrap();
                let report = Step::Published(here.clone(), ino, Some(copy.epoch), seen, version);
                return match store.find(&at) == Some(id) {
                    true => vec![report],
                    false => vec![Step::Intend(here.clone(), version), Step::Put(here, id), report],
                };
            }
        } else if copy.is_some() && !dirty {
            let Some(Placed { version, .. }) = place.placed else { panic!("{place:?}") };
            let id = store.find(&at).unwrap();
            if store.nodes[&id].mode == mode {
                return vec![Step::Settled(here, seen)];
            }
            let epoch = if attr.is_file() { attr.epoch() } else { 0 };
            return vec![
                Step::Chmod(here.clone(), mode),
                Step::Published(here, ino, Some(epoch), seen, version),
            ];
        }
        if dirty {
            let id = store.make(Kind::File, 0, 0);
            let version = Store::version_of(id);
            return vec![
                Step::BeginDrain(ino),
                Step::Copy(ino, id),
                Step::Intend(here.clone(), version),
                Step::Put(here.clone(), id),
                Step::Published(here, ino, None, seen, version),
            ];
        }
        assert!(!attr.is_file(), "clean without a copy: {place:?}");
        let target = if attr.is_symlink() {
            let Ok(target) = pool.bytes(Request::ReadLink { ino }) else { return Vec::new() };
            String::from_utf8(target).unwrap().parse().unwrap()
        } else {
            0
        };
        let id = store.make(attr.kind(), target, mode);
        let version = Store::version_of(id);
        vec![
            Step::Intend(here.clone(), version),
            Step::Put(here.clone(), id),
            Step::Published(here, ino, Some(0), seen, version),
        ]
    }
}

fn moves(from: &At, to: &At, version: StoreVersion) -> Vec<Step> {
    vec![
        Step::Intend(from.clone(), version),
        Step::Intend(to.clone(), version),
        Step::Move(from.clone(), to.clone()),
        Step::Moved(from.clone(), to.clone(), version),
    ]
}

/// What a mover has left at a place when it died.
fn recover(pool: &mut Pool, store: &Store, place: &PendingPlace, all: &[PendingPlace]) -> Vec<Step> {
    let here = (place.parent, place.name.clone());
    let (Some(intent), Some(at)) = (place.intent, path(pool, &here)) else { return Vec::new() };
    let real = store.version_at(&at);
    let was = |place: &PendingPlace| place.placed.map(|placed| placed.version);
    if real == was(place) {
        return Vec::new(); // it did nothing yet
    }
    let mut other = |is_other: &dyn Fn(&PendingPlace, Option<StoreVersion>) -> bool| {
        all.iter().find_map(|other| {
            let to = (other.parent, other.name.clone());
            let real = path(pool, &to).and_then(|path| store.version_at(&path));
            (to != here && other.intent == Some(intent) && is_other(other, real)).then_some(to)
        })
    };
    if real.is_none() && intent == NOTHING {
        return vec![Step::Unpublished(here, place.changes)];
    }
    if real.is_none() {
        return match other(&|other, real| real == Some(intent) && was(other) != real) {
            Some(to) => vec![Step::Moved(here, to, intent)],
            None => Vec::new(), // a directory above was moved
        };
    }
    assert_eq!(real, Some(intent), "{place:?}");
    match other(&|other, real| real.is_none() && was(other) == Some(intent)) {
        Some(from) => vec![Step::Moved(from, here, intent)],
        None => vec![Step::Cleared(here, intent)],
    }
}

/// Imports names, the last ones of a listing if it has begun at this epoch.
fn import(
    pool: &mut Pool,
    store: &Store,
    ino: Ino,
    list: &[(Vec<u8>, Id)],
    epoch: Option<u64>,
) -> Result<(), Code> {
    let targets: Vec<_> = list.iter().map(|(_, id)| store.nodes[id].content.to_string()).collect();
    let mut buffer = vec![0; 60_000];
    let mut w = Writer::new(&mut buffer);
    for ((name, id), target) in list.iter().zip(&targets) {
        let node = &store.nodes[id];
        let object = StoreObject {
            name,
            kind: node.kind,
            mode: node.mode,
            uid: 1,
            gid: 2,
            rdev: 0,
            atime: Timestamp::default(),
            version: Store::version_of(*id),
            target: if node.kind == Kind::Symlink { target.as_bytes() } else { b"" },
            nlink: store.names_of(*id),
            file_system: 0,
        };
        object.encode(&mut w).unwrap();
    }
    let n = w.len();
    let objects = &buffer[..n];
    pool.ask(match epoch {
        None => Request::Import { ino, objects },
        Some(epoch) => Request::Listed { ino, epoch, objects },
    })?;
    for (name, id) in list {
        // A directory that is not listed yet cannot be looked into; the data are known by the store's place.
        pool.imported.push((ino, name.clone(), store.nodes[id].content));
    }
    Ok(())
}
