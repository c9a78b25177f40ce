//! What tasks do to files and trees: sync, prestage, release, purge, refresh; and settling conflicts.

use std::cell::{OnceCell, RefCell};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use forebay_client::Kept;
use forebay_tasks::{Keep, Verb};
use forebay_types::{
    Code, Entry, Error, Ino, NodeId, PendingPlace, Result, StoreVersion, Wanted, FLAG_ATTACHED,
    RENAME_NOREPLACE,
};

use super::drain;
use super::evict;
use super::link::{path_in, Link};
use super::lost;
use super::parallel::in_few_threads;
use super::pass::{intended, Due, Pass, Reason};
use super::peers::Work;
use super::prestage::prestage;
use super::roots::{root_of, DEPTH_MAX};
use super::shared::{bytes_of, copied_by, silent_node, Shared};
use crate::host::{self, Instant};
use crate::store::{with_suffix, Store};
use crate::tasks::Progress;

/// How long a sync waits for files that programs keep open, before it reports them.
const OPEN_PATIENCE: Duration = Duration::from_secs(10);
/// How long a program that waits for its store waits for one that fails, and the pause between two tries.
const PERSIST_PATIENCE: Duration = Duration::from_secs(30);
const PERSIST_PAUSE: Duration = Duration::from_millis(500);
/// Names that are tried for the pool's version of a file in conflict.
const BESIDE_MAX: u32 = 10_000;
/// Pause between two passes of a sync.
const PASS_PERIOD: Duration = Duration::from_millis(50);

/// The directory with the store to whose tree an inode belongs.
fn root_of_inode(shared: &Shared, entry: &Entry) -> Option<Ino> {
    match entry.attr.is_directory() {
        true => root_of(&shared.link, entry.attr.ino),
        false => shared.stores.locate(entry.attr.ino).ok().map(|located| located.at.root),
    }
}

/// True if a directory is `top` or below it.
fn is_below(link: &Link, mut ino: Ino, top: Ino) -> bool {
    for _ in 0..DEPTH_MAX {
        if ino == top {
            return true;
        }
        match link.inode(ino) {
            Ok(entry) if entry.attr.is_directory() && entry.attr.parent != ino => ino = entry.attr.parent,
            // Gone from the pool: a sync of the store's whole tree removes what remains of it in the store.
            Err(Code::NotFound) => return root_of(link, ino) == Some(top),
            _ => return false,
        }
    }
    false
}

fn attached(shared: &Shared, ino: Ino) -> Result<Entry> {
    let link = &shared.link;
    let entry = link.inode(ino).map_err(|code| Error::new(code, format!("cannot find inode {ino}")))?;
    match entry.attr.flags & FLAG_ATTACHED {
        0 => Err(Error::new(Code::NoAttribute, "no backing store is attached there")
            .cure("attach one: forebay attach URL DIR")),
        _ => Ok(entry),
    }
}

pub(super) fn run(shared: &Shared, verb: Verb, ino: Ino, recursive: bool, progress: &Progress) -> Result<()> {
    let entry = attached(shared, ino)?;
    match verb {
        Verb::Sync => sync(shared, &entry, recursive, progress),
        Verb::Prestage => prestage(shared, progress, root_of_inode(shared, &entry), |each| {
            each_file(shared, &entry, recursive, progress, each)
        }),
        Verb::Release => release(shared, &entry, recursive, progress),
        Verb::Purge => {
            sync(shared, &entry, recursive, progress)?;
            // Its state is another one now.
            match shared.link.inode(ino) {
                Ok(entry) => release(shared, &entry, recursive, progress),
                Err(Code::NotFound) => Ok(()),
                Err(code) => Err(Error::new(code, format!("cannot find inode {ino}"))),
            }
        }
        Verb::Refresh => refresh(shared, &entry, recursive, progress),
    }
}

fn release(shared: &Shared, entry: &Entry, recursive: bool, progress: &Progress) -> Result<()> {
    each_file(shared, entry, recursive, progress, &mut |entry, path| {
        progress.found(1, entry.attr.size);
        match release_there(shared, entry) {
            Ok(Ok(bytes)) => progress.done(1, bytes),
            Ok(Err(Kept::Released)) => progress.done(1, 0),
            Ok(Err(Kept::Because(why))) => {
                let e = Error::new(Code::Busy, format!("cannot release {path}")).why(why);
                progress.failed(path, &e);
            }
            Err(e) => progress.failed(path, &e),
        }
    })
}

/// Releases a file, on the node that has its data.
fn release_there(shared: &Shared, entry: &Entry) -> Result<std::result::Result<u64, Kept>> {
    let Some(node) = copied_by(shared, entry) else {
        if lost::has_data(shared, entry) {
            return lost::release(shared, entry);
        }
        return evict::release(&shared.link, &shared.peers, entry);
    };
    if !entry.attr.is_resident() {
        return Ok(Err(Kept::Released));
    }
    if lost::has_data(shared, entry) {
        return lost::release(shared, entry);
    }
    let is_over = || shared.stores.is_stopping();
    let work = Work::Release { ino: entry.attr.ino.0 };
    let outcome = match shared.peers.run(node, work, &|_| {}, &is_over) {
        Err(_) if lost::has_data(shared, entry) => return lost::release(shared, entry),
        outcome => outcome?,
    };
    Ok(match outcome.kept {
        Some(why) => Err(Kept::Because(why)),
        None => Ok(outcome.counted.counts[3]),
    })
}

/// Calls `each` with a file, or with the files of a directory: its own alone, or with `recursive` all below it.
fn each_file(
    shared: &Shared,
    entry: &Entry,
    recursive: bool,
    progress: &Progress,
    each: &mut dyn FnMut(&Entry, String),
) -> Result<()> {
    let link = &shared.link;
    if !entry.attr.is_directory() {
        if entry.attr.is_file() {
            each(entry, format!("{}", entry.attr.ino));
        }
        return Ok(());
    }
    let mut directories = vec![entry.attr.ino];
    while let Some(directory) = directories.pop() {
        let failed = |code| Error::new(code, format!("cannot list {}", link.path(directory, b"")));
        let mut listing = link.pool.read_directory(directory);
        let mut names = Vec::new();
        loop {
            match listing.next(link.pool) {
                Ok(Some(found)) if found.name != b"." && found.name != b".." => {
                    names.push((found.ino, found.name.to_vec()));
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(code) => {
                    progress.failed(link.path(directory, b""), &failed(code));
                    break;
                }
            }
        }
        // A request: one for all files of it.
        let above = OnceCell::new();
        for (ino, name) in names {
            if progress.is_cancelled() || shared.stores.is_stopping() {
                return Ok(());
            }
            let Ok(entry) = link.inode(ino) else { continue };
            if entry.attr.is_directory() {
                if recursive {
                    directories.push(ino);
                }
            } else if entry.attr.is_file() {
                each(&entry, path_in(above.get_or_init(|| link.path_above(directory)), &name));
            }
        }
    }
    Ok(())
}

/// Makes the store equal to the pool at and below an inode.
fn sync(shared: &Shared, entry: &Entry, recursive: bool, progress: &Progress) -> Result<()> {
    let link = &shared.link;
    let ino = entry.attr.ino;
    let root = root_of_inode(shared, entry);
    // Of each directory as of this round: most have many places.
    let below: RefCell<HashMap<u64, bool>> = RefCell::default();
    let concerns = |place: &PendingPlace| match entry.attr.is_directory() {
        true if recursive => {
            *below.borrow_mut().entry(place.parent.0).or_insert_with(|| is_below(link, place.parent, ino))
        }
        true => place.parent == ino,
        false => {
            matches!(&place.wanted, Some(Wanted::Here(wanted, _)) if wanted.attr.ino == ino)
        }
    };
    // Files that programs have open: copied since this began, which is what was asked for.
    let mut copied: HashSet<(u64, Vec<u8>)> = HashSet::new();
    let mut counted: HashSet<(u64, Vec<u8>)> = HashSet::new();
    let mut last_progress = Instant::now();
    loop {
        let failed = |code| Error::new(code, "cannot read what is to be drained");
        below.borrow_mut().clear();
        let passes = shared.stores.passes();
        let is_copied = |place: &PendingPlace| copied.contains(&(place.parent.0, place.name.clone()));
        let at = root.and_then(|root| shared.stores.of(root).ok());
        let is_temporary =
            |place: &PendingPlace| at.as_ref().is_some_and(|at| at.policy_of(link, place).is_temporary());
        let is_to_copy = |place: &&PendingPlace| {
            concerns(place) && !is_copied(place) && !place.conflict && !is_temporary(place)
        };
        let count = |places: &[PendingPlace]| places.iter().filter(is_to_copy).count();
        // Behind a bound may be more, at which this has not looked.
        let (mut all, is_whole) = link.pending_until(count).map_err(failed)?;
        let mut places: Vec<_> =
            all.iter().filter(|place| concerns(place) && !is_copied(place)).cloned().collect();
        let is_new = |place: &&PendingPlace| counted.insert((place.parent.0, place.name.clone()));
        let new: Vec<_> = places.iter().filter(is_new).collect();
        let sizes = in_few_threads(&new, |place| match &place.wanted {
            Some(Wanted::Here(entry, _)) if entry.attr.is_file() => bytes_of(shared, entry),
            _ => 0,
        });
        sizes.into_iter().filter(|bytes| *bytes > 0).for_each(|bytes| progress.found(1, bytes));
        if places.is_empty() || progress.is_cancelled() || shared.stores.is_stopping() {
            return Ok(());
        }
        let conflicts: Vec<_> = places.extract_if(.., |place| place.conflict).collect();
        if places.is_empty() {
            report_conflicts(link, &conflicts, progress);
            return Ok(());
        }
        // Places above it must be in the store first.
        let root = match root.or_else(|| places.first().and_then(|place| root_of(link, place.parent))) {
            Some(root) => root,
            None => return Err(Error::new(Code::NoAttribute, "no backing store is attached there")),
        };
        let at = shared.stores.of(root)?;
        if at.read_only {
            return Err(Error::new(Code::ReadOnly, "cannot drain: the store is attached read-only"));
        }
        let before = places.len();
        places.retain(|place| !at.policy_of(link, place).is_temporary());
        if places.is_empty() && before > 0 {
            report_conflicts(link, &conflicts, progress);
            if !is_whole {
                report_rest(link, ino, progress);
            }
            return match entry.attr.is_directory() {
                true => Ok(()), // the others are done
                false => Err(Error::new(Code::Invalid, "cannot drain: by its policy the file is temporary")),
            };
        }
        let is_directory = |place: &PendingPlace| matches!(&place.wanted, Some(Wanted::Here(entry, _)) if entry.attr.is_directory());
        let intended = intended(&all);
        all.retain(|place| {
            concerns(place) && !is_copied(place)
                || is_directory(place) && root_of(link, place.parent) == Some(root)
        });
        if at.is_draining.swap(true, Ordering::AcqRel) {
            host::sleep(PASS_PERIOD);
            continue;
        }
        let reason = Reason {
            forced: true,
            is_full: false,
            progress: Some(progress),
            go_on: &|| true,
            gives_way: false,
        };
        let intended = (shared.stores.passes() == passes).then_some(intended);
        let mut pass = drain::pass(shared, &at, Due { places: all, intended }, reason);
        shared.stores.end_pass(&at);
        let to_restore = std::mem::take(&mut pass.to_restore);
        if drain::restore_after(shared, to_restore) || pass.done > 0 {
            last_progress = Instant::now();
        }
        copied.extend(pass.snapshots.iter().map(|(parent, name)| (parent.0, name.clone())));
        let is_stuck = last_progress.elapsed() > OPEN_PATIENCE;
        if is_stuck || pass.done == 0 && pass.later.is_empty() && !pass.failed.is_empty() {
            places.retain(|place| !pass.snapshots.contains(&(place.parent, place.name.clone())));
            report_undrained(shared, &places, pass, progress);
            report_conflicts(link, &conflicts, progress);
            if !is_whole {
                report_rest(link, ino, progress);
            }
            return Ok(());
        }
        if pass.done == 0 {
            host::sleep(PASS_PERIOD);
        }
    }
}

/// Reports that behind what cannot be drained there is more, which was not tried.
fn report_rest(link: &Link, directory: Ino, progress: &Progress) {
    let e = Error::new(Code::Busy, "cannot drain the rest: too many files wait before it")
        .cure("drain again when those are drained or removed");
    progress.failed(link.path(directory, b""), &e);
}

fn report_conflicts(link: &Link, conflicts: &[PendingPlace], progress: &Progress) {
    for place in conflicts {
        let path = link.path(place.parent, &place.name);
        let e = Error::new(Code::Exists, format!("{path} is in conflict with the store"))
            .cure(format!("settle it: forebay resolve {path} --keep pool|store|both"));
        progress.failed(path, &e);
    }
}

/// Reports what a pass has not drained, of what it was to drain: also what it has not come to.
fn report_undrained(shared: &Shared, places: &[PendingPlace], pass: Pass, progress: &Progress) {
    // A node is lost if its data cannot be had either: its mover alone may hang.
    let mut lost: HashMap<NodeId, bool> = HashMap::new();
    let mut silent = |place: &PendingPlace| match &place.wanted {
        Some(Wanted::Here(entry, _)) if entry.attr.is_file() => silent_node(shared, entry)
            .filter(|node| *lost.entry(*node).or_insert_with(|| shared.link.pool.stat_entry(entry).is_err())),
        _ => None,
    };
    let silent: HashMap<(Ino, &[u8]), NodeId> = places
        .iter()
        .filter_map(|place| Some(((place.parent, place.name.as_slice()), silent(place)?)))
        .collect();
    let failed = pass.failed.into_iter().map(|(at, e)| (at, Some(e)));
    let later = pass.later.into_iter().map(|at| (at, None));
    let told: Vec<_> = failed.chain(later).collect();
    let known: HashSet<(Ino, &[u8])> =
        told.iter().map(|((parent, name), _)| (*parent, name.as_slice())).collect();
    let untold = places.iter().filter(|place| !known.contains(&(place.parent, place.name.as_slice())));
    let untold: Vec<_> = untold.map(|place| ((place.parent, place.name.clone()), None)).collect();
    for ((parent, name), e) in told.into_iter().chain(untold) {
        let path = shared.link.path(parent, &name);
        let what = || format!("cannot drain {path}");
        if let Some(node) = silent.get(&(parent, name.as_slice())) {
            let e =
                Error::new(Code::Io, what()).why(format!("node {node}, which has its data, does not answer"));
            progress.unreachable(path, &e);
            continue;
        }
        let e = e.unwrap_or_else(|| {
            Error::new(Code::Busy, what())
                .why("programs open and close it all the time, or it waits for another name")
        });
        progress.failed(path, &e);
    }
}

/// True for a file that by its policy never reaches the store.
fn is_temporary(shared: &Shared, ino: Ino) -> Result<bool> {
    let link = &shared.link;
    let mut places = link.all_pending().map_err(|code| Error::new(code, "cannot read the pending places"))?;
    places.retain(|place| matches!(&place.wanted, Some(Wanted::Here(wanted, _)) if wanted.attr.ino == ino));
    let Some(root) = places.first().and_then(|place| root_of(link, place.parent)) else { return Ok(false) };
    let at = shared.stores.of(root)?;
    Ok(places.iter().all(|place| at.policy_of(link, place).is_temporary()))
}

/// Makes the store have what a file contains now, for a program that waits for that. A store that fails is given some
/// time.
pub(super) fn persist(shared: &Shared, ino: Ino) -> Result<()> {
    let link = &shared.link;
    let until = Instant::now() + PERSIST_PATIENCE;
    loop {
        let entry = match link.inode(ino) {
            Ok(entry) if entry.attr.flags & FLAG_ATTACHED != 0 && entry.attr.is_file() => entry,
            Ok(_) | Err(Code::NotFound) => return Ok(()),
            Err(code) => return Err(Error::new(code, format!("cannot find inode {ino}"))),
        };
        if is_temporary(shared, ino)? {
            return Ok(()); // the store is not to have it
        }
        let progress = Progress::default();
        let done = sync(shared, &entry, false, &progress);
        let failure = match (done, progress.errors().into_iter().next()) {
            (Err(e), _) => e,
            (Ok(()), Some(e)) => Error::from(e.error),
            (Ok(()), None) => return Ok(()),
        };
        let may_pass = matches!(failure.code, Code::Io | Code::TimedOut | Code::Busy);
        if !may_pass || Instant::now() >= until || shared.stores.is_stopping() {
            return Err(failure);
        }
        host::sleep(PERSIST_PAUSE);
    }
}

/// Takes over what other programs changed in the store: new names, and new versions of files that the pool has released.
fn refresh(shared: &Shared, entry: &Entry, recursive: bool, progress: &Progress) -> Result<()> {
    let link = &shared.link;
    if !entry.attr.is_directory() {
        return super::restore::refresh(link, &shared.stores, entry).map(drop);
    }
    let mut directories = vec![entry.attr.ino];
    while let Some(directory) = directories.pop() {
        if progress.is_cancelled() || shared.stores.is_stopping() {
            return Ok(());
        }
        match super::list::refresh(link, &shared.stores, directory) {
            Ok(files) => {
                progress.found(files, 0);
                progress.done(files, 0);
            }
            Err(e) if e.code == Code::NotFound => {} // not in the store yet
            Err(e) => progress.failed(link.path(directory, b""), &e),
        }
        let mut listing = link.pool.read_directory(directory);
        let mut is_to_be_listed = false;
        while let Ok(Some(found)) = listing.next(link.pool) {
            let is_child = found.name != b"." && found.name != b"..";
            if !is_child {
                continue;
            }
            match found.kind {
                forebay_types::Kind::Directory if recursive => directories.push(found.ino),
                forebay_types::Kind::File => {
                    let name = found.name.to_vec();
                    if let Ok(entry) = link.inode(found.ino) {
                        let at = (directory, name.as_slice());
                        match super::restore::refresh_name(link, &shared.stores, at, &entry) {
                            Ok(has_left) => is_to_be_listed |= has_left,
                            Err(e) => progress.failed(link.path(directory, &name), &e),
                        }
                    }
                }
                _ => {}
            }
        }
        if is_to_be_listed {
            if let Err(e) = super::list::list(link, &shared.stores, directory) {
                progress.failed(link.path(directory, b""), &e);
            }
        }
    }
    Ok(())
}

/// Gives what the pool has at a name another name beside it, which is free.
fn set_beside(link: &Link, parent: Ino, name: &[u8]) -> std::result::Result<(), Code> {
    for number in 1..=BESIDE_MAX {
        let suffix = if number == 1 { ".from-pool".to_owned() } else { format!(".from-pool-{number}") };
        let beside = with_suffix(name, &suffix);
        match link.pool.rename_in(parent, name, parent, &beside, RENAME_NOREPLACE) {
            Err(Code::Exists) => {}
            done => return done,
        }
    }
    Err(Code::Exists)
}

/// Settles the conflict at a place.
pub(super) fn resolve(shared: &Shared, parent: Ino, name: &[u8], keep: Keep) -> Result<()> {
    let link = &shared.link;
    let path = link.path(parent, name);
    let what = || format!("cannot settle the conflict at {path}");
    let failed = |code| Error::new(code, what());
    let places = link.all_pending().map_err(failed)?;
    let place =
        places.into_iter().find(|place| place.conflict && place.parent == parent && place.name == name);
    let Some(place) = place else {
        return Err(Error::new(Code::NotFound, what()).why("there is none"));
    };
    let located = shared.stores.locate(parent)?;
    let in_store = located.path.join(name).map_err(failed)?;
    let found = located.at.store.look(&in_store).map_err(Error::from)?;
    match keep {
        Keep::Pool => {
            let version = found.map_or(StoreVersion::default(), |found| found.version);
            link.conflict(parent, name, false, version).map_err(failed)
        }
        Keep::Store | Keep::Both => {
            // The pool's file gets another name, or goes; the store's is imported under its own.
            let wanted = match place.wanted {
                Some(Wanted::Here(entry, _)) => Some(entry.attr.ino),
                _ => None,
            };
            if wanted.is_some() {
                match keep {
                    Keep::Both => set_beside(link, parent, name).map_err(failed)?,
                    _ => link.pool.unlink_in(parent, name).map_err(|code| match code {
                        Code::IsDirectory => failed(code)
                            .why("it is a directory in the pool")
                            .cure("give it another name, or remove it, and settle the conflict then"),
                        code => failed(code),
                    })?,
                }
            }
            // What the store has is not to be removed: the pool does not know it as its own.
            link.conflict(parent, name, false, StoreVersion::default()).map_err(failed)?;
            super::list::refresh(link, &shared.stores, parent).map(|_| ())
        }
    }
}
