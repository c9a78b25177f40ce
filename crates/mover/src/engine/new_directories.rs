//! New directories of a pass, made many at a time; where names of the store are slow, while files of others are uploaded.
//!
//! On a distant store each new directory takes a call or more, and those of one parent wait for each other. So files that
//! the store never had, of directories that are there or have just been made, do not wait for the others. All else does:
//! what needs a rename, a link or a removal in the store, and large files, which take longer than the directories. When the
//! last directory is made, all files but the next few wait for the rest of the pass, so that those are not held up. A pass
//! with new files of other nodes uploads nothing meanwhile: their movers get them together.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use forebay_types::{PendingPlace, Wanted};

use super::batch::Turns;
use super::name_turns::NameTurns;
use super::parallel::in_parallel;
use super::pass::{failed, Pass, Reason};
use super::reconcile::{Next, Reconciler};
use super::shared::{copied_by, locked, Shared};
use super::stores::AttachedStore;
use super::upload_batches::{
    ends, open_files, upload_in_batches, ALONE_BYTES, BATCHES_AT_ONCE_SLOW_NAMES, BATCH_FILES_SLOW_NAMES,
};
use super::upload_queue::{Adding, UploadQueue};
use super::wanted::WantedUpload;
use crate::host;
use crate::store::Store;

/// Files that may still be uploaded before the rest of the pass when the last directory is made.
const FILES_BEHIND_DIRECTORIES: usize = BATCHES_AT_ONCE_SLOW_NAMES * BATCH_FILES_SLOW_NAMES;

/// True for what the store never had, at a place where it has nothing.
fn is_new(place: &PendingPlace) -> bool {
    let is_copied = match &place.wanted {
        Some(Wanted::Here(_, copy)) => copy.is_some(),
        _ => true,
    };
    !is_copied && place.placed.is_none() && place.intent.is_none()
}

fn is_new_file(place: &PendingPlace) -> bool {
    is_new(place) && matches!(&place.wanted, Some(Wanted::Here(entry, _)) if entry.attr.is_file())
}

/// True for a file of this node.
fn is_copied_here(shared: &Shared, place: &PendingPlace) -> bool {
    matches!(&place.wanted, Some(Wanted::Here(entry, _)) if copied_by(shared, entry).is_none())
}

/// The inode at a place, if it is here.
fn inode_at(place: &PendingPlace) -> Option<u64> {
    match &place.wanted {
        Some(Wanted::Here(entry, _)) => Some(entry.attr.ino.0),
        _ => None,
    }
}

/// Places in such an order that those of one parent, which wait for each other, are far apart.
fn by_turns(places: Vec<PendingPlace>) -> Vec<PendingPlace> {
    let mut counts = HashMap::<u64, usize>::new();
    let mut nth = |place: &PendingPlace| {
        let count = counts.entry(place.parent.0).or_default();
        *count += 1;
        *count
    };
    let mut places: Vec<_> = places.into_iter().map(|place| (nth(&place), place)).collect();
    places.sort_by_key(|(nth, _)| *nth);
    places.into_iter().map(|(_, place)| place).collect()
}

/// Makes the directories that the store never had, many at a time, those of a level after those above it, and says which
/// one is there now. Returns the places that are left.
fn make_new(
    reconciler: &mut Reconciler<'_>,
    directories: Vec<PendingPlace>,
    pass: &mut Pass,
    is_made: &(dyn Fn(&PendingPlace) + Sync),
) -> Vec<PendingPlace> {
    let (link, stores, at) = (reconciler.link, reconciler.stores, reconciler.at);
    let (new, mut left): (Vec<_>, Vec<_>) = directories.into_iter().partition(is_new);
    let (mut new, turns) = (by_turns(new), NameTurns::default());
    // One is made by the calls of any other.
    while new.len() > 1 && !stores.is_stopping() {
        let made = in_parallel(&at.store, &new, |_, place| {
            let naming = at.store.has_slow_names().then(|| turns.take(&place.parent));
            let mut own = Reconciler::new(link, stores, at);
            let next = own.reconcile(place, false);
            drop(naming);
            if matches!(next, Ok(Next::Done)) {
                is_made(place);
            }
            (next, own.has_unrecorded)
        });
        let before = new.len();
        let mut waiting = Vec::new();
        for (place, (next, has_unrecorded)) in new.into_iter().zip(made) {
            reconciler.has_unrecorded |= has_unrecorded;
            match next {
                Ok(Next::Done) => {
                    pass.done += 1;
                    at.note_success();
                }
                Ok(Next::Later) => waiting.push(place),
                // Not of a directory that is new; the caller looks again.
                Ok(Next::Upload(_) | Next::Move(_)) => left.push(place),
                Err(e) => failed(reconciler, pass, place, e),
            }
        }
        new = waiting;
        if new.len() == before || reconciler.has_unrecorded {
            break;
        }
    }
    left.append(&mut new);
    left
}

/// Files of a pass that are uploaded while directories are made.
struct Early<'a> {
    shared: &'a Shared,
    at: &'a AttachedStore,
    reason: Reason<'a>,
    /// By directory.
    waiting: Mutex<HashMap<u64, Vec<PendingPlace>>>,
    /// Inodes of files that are uploaded. Names of one file are one file in the store.
    inodes: Mutex<HashSet<u64>>,
    /// Places that the pass has to look at.
    left: Mutex<Vec<PendingPlace>>,
    queue: UploadQueue<Box<WantedUpload>>,
    /// Nobody takes from the queue any more.
    is_over: AtomicBool,
    turns: Turns<'a>,
}

/// Two things that are done at the same time.
enum Part<'a, 'b> {
    Make(&'a mut Reconciler<'b>, Vec<PendingPlace>),
    Upload,
}

impl Early<'_> {
    /// A directory is there: its files are added to those that are uploaded.
    fn begin(&self, adding: &Adding<'_, Box<WantedUpload>>, directory: u64) {
        if self.is_over.load(Ordering::Acquire) || ends(self.shared, self.at, self.reason) {
            return;
        }
        let Some(places) = locked(&self.waiting).remove(&directory) else { return };
        let mut reconciler = Reconciler::new(&self.shared.link, &self.shared.stores, self.at);
        let (mut files, mut left) = (Vec::new(), Vec::new());
        for place in places {
            let file = match reconciler.reconcile(&place, false) {
                Ok(Next::Upload(wanted)) => self.to_upload(wanted),
                // The pass looks again.
                _ => None,
            };
            match file {
                Some(file) => files.push(file),
                None => left.push(place),
            }
        }
        locked(&self.left).append(&mut left);
        self.turns.announce(files.iter().map(|(wanted, _)| &wanted.directory));
        adding.add(files);
    }

    /// A file and its bytes, if it is one of those that are uploaded now.
    fn to_upload(&self, mut wanted: Box<WantedUpload>) -> Option<(Box<WantedUpload>, u64)> {
        let link = &self.shared.link;
        let bytes = link.pool.stat_entry(&wanted.entry).map_or(0, |st| st.st_size as u64);
        if bytes >= ALONE_BYTES || !locked(&self.inodes).insert(wanted.entry.attr.ino.0) {
            return None;
        }
        wanted.open_files = open_files(link, self.at, &wanted, self.reason);
        Some((wanted, bytes))
    }
}

/// Makes the directories of a pass that the store never had, and uploads some of `files` meanwhile, which it takes from
/// there, where names of the store are slow. Returns the directories that are left, and the inodes of these files.
pub(super) fn make_directories(
    shared: &Shared,
    reconciler: &mut Reconciler<'_>,
    directories: Vec<PendingPlace>,
    files: &mut Vec<PendingPlace>,
    reason: Reason<'_>,
    pass: &mut Pass,
) -> (Vec<PendingPlace>, HashSet<u64>) {
    let at = reconciler.at;
    let are_waited_for = at.store.has_slow_names()
        && directories.len() > 1
        && directories.iter().all(is_new)
        && files.iter().any(is_new_file)
        && files.iter().filter(|place| is_new_file(place)).all(|place| is_copied_here(shared, place));
    if !are_waited_for {
        return (make_new(reconciler, directories, pass, &|_| {}), HashSet::new());
    }
    let to_make: HashSet<u64> = directories.iter().filter_map(inode_at).collect();
    let mut waiting = HashMap::<u64, Vec<PendingPlace>>::new();
    for place in files.extract_if(.., |place| is_new_file(place)) {
        waiting.entry(place.parent.0).or_default().push(place);
    }
    let are_there: Vec<u64> = waiting.keys().copied().filter(|ino| !to_make.contains(ino)).collect();
    let early = Early {
        shared,
        at,
        reason,
        waiting: Mutex::new(waiting),
        inodes: Mutex::default(),
        left: Mutex::default(),
        queue: UploadQueue::open(),
        is_over: AtomicBool::new(false),
        turns: Turns::new(&*at.store),
    };
    let run = |part: Part<'_, '_>| match part {
        Part::Make(reconciler, directories) => {
            let (adding, mut pass) = (early.queue.adding(), Pass::default());
            are_there.iter().for_each(|directory| early.begin(&adding, *directory));
            let is_made = |place: &PendingPlace| {
                inode_at(place).into_iter().for_each(|directory| early.begin(&adding, directory));
            };
            let left = make_new(reconciler, directories, &mut pass, &is_made);
            let most = if early.is_over.load(Ordering::Acquire) { 0 } else { FILES_BEHIND_DIRECTORIES };
            for wanted in adding.end(most) {
                locked(&early.inodes).remove(&wanted.entry.attr.ino.0);
                locked(&early.left).push(wanted.place);
            }
            (left, pass)
        }
        Part::Upload => {
            let all = (&early.queue, &early.turns);
            let pass = upload_in_batches(shared, at, all, BATCHES_AT_ONCE_SLOW_NAMES, reason);
            early.is_over.store(true, Ordering::Release);
            (Vec::new(), pass)
        }
    };
    let parts = host::for_each(vec![Part::Make(reconciler, directories), Part::Upload], run);
    let mut left = Vec::new();
    for (directories, part) in parts {
        left.extend(directories);
        pass.add(part);
    }
    let Early { waiting, inodes, left: not_early, queue, .. } = early;
    pass.later.extend(queue.into_left().map(|wanted| (wanted.place.parent, wanted.place.name)));
    files.append(&mut into_inner(not_early));
    files.extend(into_inner(waiting).into_values().flatten());
    (left, into_inner(inodes))
}

fn into_inner<T>(mutex: Mutex<T>) -> T {
    mutex.into_inner().unwrap_or_else(PoisonError::into_inner)
}
