//! Passes over the pending places of a store: names first, then files' data in batches, then removals. Data are copied
//! by the movers of the nodes that have them, at the same time.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use forebay_tasks::{DrainPolicy, Failure};
use forebay_types::{Error, Ino, Kind, NodeId, PendingPlace, Result, Wanted};
use xxhash_rust::xxh3::xxh3_64;

use super::batch::{upload_batch, Turn, Turns};
use super::link::Link;
use super::moving::{move_directory, remove_outdated};
use super::new_directories::make_directories;
use super::parallel::{in_few_threads, in_parallel, in_parallel_with_turns, Lateness};
use super::pass::{failed, note_snapshot, Due, Pass, Reason};
use super::peers::{Counted, Work};
use super::reconcile::{seconds_since, Next, Reconciler};
use super::recover::recover;
use super::removals::{remove_files, sorted};
use super::shared::{copied_by, locked, restore_for_task, Shared};
use super::stores::{AttachedStore, Stores};
use super::upload_batches::{
    ends, is_cancelled, open_files, upload_in_batches, ALONE_BYTES, BATCHES_AT_ONCE,
    BATCHES_AT_ONCE_SLOW_NAMES, BATCH_FILES,
};
use super::upload_queue::UploadQueue;
use super::wanted::{Uploads, WantedUpload};
use crate::host;
use crate::store::Store;
use crate::tasks::Progress;

/// Bytes of a message to another node's mover, after which no further file is added to it.
const LETTER_BYTES: usize = 40 * 1024;
/// With `close`, a change must be this old: a program that writes a file in several steps has it copied once.
const SETTLE_SECONDS: f64 = 0.2;

/// A file to upload, with the bytes that it had when the pass came to it.
type SizedUpload = (Box<WantedUpload>, u64);

/// True when the policy lets a place be drained now.
pub(super) fn is_due(link: &Link, at: &AttachedStore, place: &PendingPlace, reason: Reason<'_>) -> bool {
    due_in(link, at, place, reason).is_some_and(|time| time.is_zero())
}

/// How long it takes until the policy lets a place be drained, if time alone does.
pub(super) fn due_in(
    link: &Link,
    at: &AttachedStore,
    place: &PendingPlace,
    reason: Reason<'_>,
) -> Option<Duration> {
    if at.read_only || place.conflict {
        return None;
    }
    let by_time = || Duration::try_from_secs_f64((-overdue_s(link, at, place)).max(0.0)).ok();
    let by_room = || reason.is_full.then_some(Duration::ZERO);
    match at.policy_of(link, place).drain {
        DrainPolicy::Never => None,
        _ if reason.forced => Some(Duration::ZERO),
        DrainPolicy::Close => by_time(),
        DrainPolicy::Age(_) => by_room().or_else(by_time),
        DrainPolicy::Watermark => by_room(),
        DrainPolicy::Request => None,
    }
}

/// For how long a place has been due by its policy, in seconds.
pub(super) fn overdue_s(link: &Link, at: &AttachedStore, place: &PendingPlace) -> f64 {
    let from_s = match at.policy_of(link, place).drain {
        DrainPolicy::Close => SETTLE_SECONDS,
        DrainPolicy::Age(age) => age.as_secs_f64(),
        DrainPolicy::Watermark | DrainPolicy::Request | DrainPolicy::Never => 0.0,
    };
    seconds_since(place.since) - from_s
}

/// These places as they are now, read again if the last pass over their store may have ended since they were read. None if
/// what a mover that died did at any place was recorded just now: the next pass sees it.
///
/// One pass at a time works on a store, so what is intended now was not reported: its mover died, or the pool's worker
/// did. Places that are not of this pass count: paths may lead through what was renamed there.
fn as_they_are(
    (link, stores, at): (&Link, &Stores, &AttachedStore),
    Due { places, intended }: Due,
) -> Result<Option<Vec<PendingPlace>>> {
    if let Some(intended) = intended {
        let is_recorded = recover(link, stores, &intended, Some(at.root))?;
        return Ok((!is_recorded).then_some(places));
    }
    let mut now = link.all_pending().map_err(|code| Error::new(code, "cannot read the pending places"))?;
    if recover(link, stores, &now, Some(at.root))? {
        return Ok(None);
    }
    let wanted: HashSet<(u64, Vec<u8>)> =
        places.into_iter().map(|place| (place.parent.0, place.name)).collect();
    now.retain(|place| wanted.contains(&(place.parent.0, place.name.clone())));
    Ok(Some(now))
}

/// One pass over these places of a store. The caller has set `is_draining`.
pub(super) fn pass(shared: &Shared, at: &AttachedStore, due: Due, reason: Reason<'_>) -> Pass {
    let (link, stores) = (&shared.link, &shared.stores);
    let mut pass = Pass::default();
    if let Err(e) = stores.check_for_pass(at) {
        let failure = Failure::from(&e);
        let each = |place: PendingPlace| ((place.parent, place.name), Error::from(failure.clone()));
        pass.failed.extend(due.places.into_iter().map(each));
        return pass;
    }
    let places = match as_they_are((link, stores, at), due) {
        Ok(Some(places)) => places,
        Ok(None) => return Pass { done: 1, ..pass },
        Err(e) => {
            at.note_failure(&e);
            return pass;
        }
    };
    remove_outdated(at);
    let mut reconciler = Reconciler::new(link, stores, at);
    let due = places.into_iter().filter(|place| is_due(link, at, place, reason));
    let is_directory = |place: &PendingPlace| match &place.wanted {
        Some(Wanted::Here(entry, _)) => entry.attr.is_directory(),
        _ => false,
    };
    let (directories, others): (Vec<_>, Vec<_>) = due.partition(is_directory);
    let (mut wanted, mut removals): (Vec<_>, Vec<_>) =
        others.into_iter().partition(|place| place.wanted.is_some());

    // Directories, from the top: each round makes those whose parents the store has.
    let (mut left, mut inodes) =
        make_directories(shared, &mut reconciler, directories, &mut wanted, reason, &mut pass);
    loop {
        let before = left.len();
        left = reconcile_all(&mut reconciler, left, &mut pass, &mut Vec::new(), false);
        if left.is_empty() || left.len() == before || stores.is_stopping() {
            break;
        }
    }
    if pass.has_moved || reconciler.has_unrecorded {
        // What these places say of the store may be outdated: the next pass reads it anew.
        return pass;
    }
    let mut uploads = Uploads::new();
    left.extend(reconcile_all(&mut reconciler, wanted, &mut pass, &mut uploads, false));
    if reconciler.has_unrecorded {
        return pass;
    }
    // Names of one file are one file in the store: the first is uploaded, and the others are linked to it in the next
    // pass.
    if at.store.abilities().hard_links {
        let others =
            uploads.extract_if(.., |wanted: &mut Box<WantedUpload>| !inodes.insert(wanted.entry.attr.ino.0));
        pass.later.extend(others.map(|wanted| (wanted.place.parent, wanted.place.name)));
    }
    upload_all(shared, at, uploads, reason, &mut pass);
    // Removals: files, then directories from the bottom.
    let files =
        removals.extract_if(.., |place| place.placed.is_none_or(|placed| placed.kind != Kind::Directory));
    let files: Vec<_> = files.collect();
    let (done, waiting, refused) = sorted(remove_files(&mut reconciler, files));
    left.extend(waiting);
    pass.done += done;
    if done > 0 {
        at.note_success();
    }
    for (place, e) in refused {
        failed(&reconciler, &mut pass, place, e);
    }
    loop {
        let before = removals.len();
        removals = reconcile_all(&mut reconciler, removals, &mut pass, &mut Vec::new(), true);
        if removals.is_empty() || removals.len() == before || stores.is_stopping() {
            break;
        }
    }
    left.extend(removals);
    pass.to_restore.append(&mut locked(&reconciler.to_restore));
    pass.later.extend(left.into_iter().map(|place| (place.parent, place.name)));
    pass
}

/// Restores what a pass has found to be needed in the pool, so that the next one can remove it from the store. True if
/// any was restored. The caller has cleared `is_draining`: this may wait for room.
pub(super) fn restore_after(shared: &Shared, files: Vec<Ino>) -> bool {
    let mut has_restored = false;
    for ino in files {
        if shared.link.inode(ino).is_ok_and(|entry| entry.attr.is_resident()) {
            continue; // since the pass, or it is not this that the pass waits for
        }
        match restore_for_task(shared, ino) {
            Ok(()) => has_restored = true,
            // If it was the store that failed, that was noted.
            Err(e) => tracing::warn!("{e}"),
        }
    }
    has_restored
}

/// Uploads files, those of each node by its mover.
fn upload_all(shared: &Shared, at: &AttachedStore, uploads: Uploads, reason: Reason<'_>, pass: &mut Pass) {
    let mut nodes: BTreeMap<Option<NodeId>, Uploads> = BTreeMap::new();
    for mut wanted in uploads {
        wanted.open_files = open_files(&shared.link, at, &wanted, reason);
        let node = copied_by(shared, &wanted.entry);
        match node.is_some_and(|node| shared.peers.is_silent(node)) {
            true => pass.later.push((wanted.place.parent, wanted.place.name)),
            false => nodes.entry(node).or_default().push(wanted),
        }
    }
    let one = |node: Option<NodeId>, files: Uploads| {
        let mut mine = Pass::default();
        match node {
            Some(node) => upload_there(shared, at, node, files, reason, &mut mine),
            None => upload_here(shared, at, files, reason, &mut mine),
        }
        mine
    };
    let all = host::for_each(nodes.into_iter().collect(), |(node, files)| one(node, files));
    all.into_iter().for_each(|one| pass.add(one));
}

/// Uploads files of this node: small ones in batches, some at a time, and large ones beside them, those
/// first that have waited longest.
pub(super) fn upload_here(
    shared: &Shared,
    at: &AttachedStore,
    uploads: Uploads,
    reason: Reason<'_>,
    pass: &mut Pass,
) {
    let sizes = in_few_threads(&uploads, |wanted| {
        shared.link.pool.stat_entry(&wanted.entry).map_or(0, |st| st.st_size as u64)
    });
    let (mut large, small): (Vec<_>, Vec<_>) =
        uploads.into_iter().zip(sizes).partition(|(_, bytes)| *bytes >= ALONE_BYTES);
    large.sort_by_key(|(wanted, _)| (wanted.place.since.sec, wanted.place.since.nsec));
    let mut lanes = vec![(true, large), (false, small)];
    lanes.retain(|(_, files)| !files.is_empty());
    let passes = host::for_each(lanes, |(are_large, files)| match are_large {
        true => upload_large(shared, at, files, reason),
        false => upload_small(shared, at, files, reason),
    });
    passes.into_iter().for_each(|one| pass.add(one));
}

/// Uploads files each of which becomes clean when it is copied, in their order: to a distant store as many at a time as it takes
/// calls.
fn upload_large(shared: &Shared, at: &AttachedStore, files: Vec<SizedUpload>, reason: Reason<'_>) -> Pass {
    let is_distant = Lateness::of(&at.store).is_late();
    let ends = || ends(shared, at, reason);
    let one = |_: usize, (wanted, _): &SizedUpload| {
        let mut pass = Pass::default();
        let turn = match is_distant {
            true => (!ends()).then_some(Turn::Now),
            false => at.large_copies.begin(&at.store, ends).map(Turn::Large),
        };
        match turn {
            None => pass.later.push((wanted.place.parent, wanted.place.name.clone())),
            Some(turn) => upload_batch(shared, at, vec![wanted.clone()], reason, turn, &mut pass),
        }
        pass
    };
    let passes = match is_distant {
        true => in_parallel(&at.store, &files, one),
        false => in_parallel_with_turns(&files, one),
    };
    let mut pass = Pass::default();
    passes.into_iter().for_each(|one| pass.add(one));
    pass
}

/// Uploads files in batches.
fn upload_small(shared: &Shared, at: &AttachedStore, files: Vec<SizedUpload>, reason: Reason<'_>) -> Pass {
    let turns = Turns::new(&*at.store);
    turns.announce(files.iter().map(|(wanted, _)| &wanted.directory));
    let queue = UploadQueue::of(files);
    let most = if at.store.has_slow_names() { BATCHES_AT_ONCE_SLOW_NAMES } else { BATCHES_AT_ONCE };
    let mut pass = upload_in_batches(shared, at, (&queue, &turns), queue.batches(most), reason);
    pass.later.extend(queue.into_left().map(|wanted| (wanted.place.parent, wanted.place.name)));
    pass
}

/// Has another node's mover upload files.
fn upload_there(
    shared: &Shared,
    at: &AttachedStore,
    node: NodeId,
    uploads: Uploads,
    reason: Reason<'_>,
    pass: &mut Pass,
) {
    let peers = &shared.peers;
    let mut uploads = uploads.into_iter().peekable();
    while uploads.peek().is_some() && !ends(shared, at, reason) && !peers.is_silent(node) {
        let (mut batch, mut files, mut bytes) = (Vec::new(), Vec::new(), 0);
        while files.len() < BATCH_FILES && bytes < LETTER_BYTES {
            let Some(wanted) = uploads.next() else { break };
            match wanted.encode() {
                Ok(file) => {
                    bytes += file.len();
                    files.push(file);
                    batch.push(wanted);
                }
                Err(e) => pass.failed.push(((wanted.place.parent, wanted.place.name), e)),
            }
        }
        let of_root = |wanted: &WantedUpload| {
            xxh3_64(&[&at.root.0.to_le_bytes(), wanted.directory.as_bytes()].concat())
        };
        let mut directories: Vec<u64> = batch.iter().map(|wanted| of_root(wanted)).collect();
        directories.dedup();
        let sweep = peers.is_to_sweep(node, &directories);
        let counted = AtomicCounts::default();
        let each = |now: Counted| counted.report(now, reason.progress);
        let is_over = || is_cancelled(shared, reason);
        let done = peers.run(node, Work::Upload { root: at.root.0, sweep, files }, &each, &is_over);
        let place = |i: usize| batch.get(i).map(|wanted| (wanted.place.parent, wanted.place.name.clone()));
        match done {
            Ok(outcome) => {
                peers.note_swept(node, &directories);
                let rest = outcome.later.len() + outcome.failed.len();
                pass.done += batch.len().saturating_sub(rest) as u64;
                pass.later.extend(outcome.later.into_iter().filter_map(place));
                for wanted in outcome.snapshots.into_iter().filter_map(|i| batch.get(i)) {
                    note_snapshot(at, wanted.entry.attr.ino);
                    pass.snapshots.push((wanted.place.parent, wanted.place.name.clone()));
                }
                for (i, failure) in outcome.failed {
                    let e = Error::from(failure);
                    at.note_failure(&e);
                    pass.failed.extend(place(i).map(|place| (place, e)));
                }
            }
            Err(e) => {
                at.note_failure(&e);
                pass.later.extend((0..batch.len()).filter_map(place));
            }
        }
    }
    pass.later.extend(uploads.map(|wanted| (wanted.place.parent, wanted.place.name)));
}

/// What of another node's job was reported to a task.
#[derive(Default)]
struct AtomicCounts([std::sync::atomic::AtomicU64; 2]);

impl AtomicCounts {
    fn report(&self, now: Counted, progress: Option<&Progress>) {
        let [_, files, _, bytes] = now.counts;
        let more = |i: usize, now: u64| now.saturating_sub(self.0[i].swap(now, Ordering::Relaxed));
        let (files, bytes) = (more(0, files), more(1, bytes));
        if let Some(progress) = progress.filter(|_| files + bytes > 0) {
            progress.done(files, bytes);
        }
    }
}

/// Reconciles places, and returns those that wait. With `checks_below` a directory waits for places below it.
fn reconcile_all(
    reconciler: &mut Reconciler<'_>,
    places: Vec<PendingPlace>,
    pass: &mut Pass,
    uploads: &mut Uploads,
    checks_below: bool,
) -> Vec<PendingPlace> {
    let parents: HashSet<u64> = match checks_below {
        true => places.iter().map(|place| place.parent.0).collect(),
        false => HashSet::new(),
    };
    let mut left = Vec::new();
    for place in places {
        if reconciler.stores.is_stopping() || reconciler.has_unrecorded {
            left.push(place);
            continue;
        }
        let is_above = place.placed.is_some_and(|placed| parents.contains(&placed.ino.0));
        let next = match reconciler.reconcile(&place, is_above) {
            Ok(Next::Move(wanted)) => {
                pass.has_moved = true;
                move_directory(reconciler, &wanted)
            }
            next => next,
        };
        match next {
            Ok(Next::Done) => {
                pass.done += 1;
                reconciler.at.note_success();
            }
            Ok(Next::Later | Next::Move(_)) => left.push(place),
            Ok(Next::Upload(wanted)) => uploads.push(wanted),
            Err(e) => failed(reconciler, pass, place, e),
        }
    }
    left
}
