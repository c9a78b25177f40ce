//! A pass over the pending places of a store: why it is made, and its outcome.

use forebay_types::{Code, Error, Ino, PendingPlace};

use super::reconcile::Reconciler;
use super::shared::locked;
use super::stores::AttachedStore;
use crate::host::Instant;
use crate::tasks::Progress;

/// Open files of which the time of the last copy is remembered.
const SNAPSHOTS_MAX: usize = 4096;

/// Why a pass is made.
#[derive(Clone, Copy)]
pub(super) struct Reason<'a> {
    /// On request: policies do not count.
    pub(super) forced: bool,
    /// The pool is filled up to its high watermark.
    pub(super) is_full: bool,
    /// The task that requested it.
    pub(super) progress: Option<&'a Progress>,
    /// False when nothing more may be changed in the store: another mover has requested it, and has given it up.
    pub(super) go_on: &'a (dyn Fn() -> bool + Sync),
    /// It ends after what it has begun when another pool claims the store (`yielding`).
    pub(super) gives_way: bool,
}

/// Places for a pass.
pub(super) struct Due {
    pub(super) places: Vec<PendingPlace>,
    /// The pending places with an intent, of all stores, if no pass was under way since all were read; else the pass reads
    /// all places again.
    pub(super) intended: Option<Vec<PendingPlace>>,
}

/// The places at which a mover was about to change its store.
pub(super) fn intended(all: &[PendingPlace]) -> Vec<PendingPlace> {
    all.iter().filter(|place| place.intent.is_some()).cloned().collect()
}

/// The outcome of a pass.
#[derive(Debug, Default)]
pub(super) struct Pass {
    /// Places at which something was done.
    pub(super) done: u64,
    /// Places of files that were copied while programs had them open for writing: they stay pending.
    pub(super) snapshots: Vec<(Ino, Vec<u8>)>,
    /// A directory was copied to another place.
    pub(super) has_moved: bool,
    /// Places that wait for a program or for another place.
    pub(super) later: Vec<(Ino, Vec<u8>)>,
    /// Released files that are to be restored once the pass is over: room for them may come by another pass.
    pub(super) to_restore: Vec<Ino>,
    /// Places that failed, with the reason.
    pub(super) failed: Vec<((Ino, Vec<u8>), Error)>,
}

impl Pass {
    /// Adds the outcome of another part of it.
    pub(super) fn add(&mut self, mut part: Pass) {
        self.done += part.done;
        self.snapshots.append(&mut part.snapshots);
        self.has_moved |= part.has_moved;
        self.later.append(&mut part.later);
        self.to_restore.append(&mut part.to_restore);
        self.failed.append(&mut part.failed);
    }
}

/// A copy of an open file was published.
pub(super) fn note_snapshot(at: &AttachedStore, ino: Ino) {
    let mut snapshots = locked(&at.snapshots);
    if snapshots.len() >= SNAPSHOTS_MAX {
        // Those of files that were closed long ago are the oldest.
        if let Some(oldest) = snapshots.iter().min_by_key(|(_, last)| **last).map(|(ino, _)| *ino) {
            snapshots.remove(&oldest);
        }
    }
    snapshots.insert(ino.0, Instant::now());
}

pub(super) fn failed(reconciler: &Reconciler<'_>, pass: &mut Pass, place: PendingPlace, e: Error) {
    // The pool changed meanwhile: the next pass sees it.
    if matches!(e.code, Code::NotFound | Code::Stale | Code::Busy) {
        pass.later.push((place.parent, place.name));
        return;
    }
    reconciler.at.note_failure(&e);
    pass.failed.push(((place.parent, place.name), e));
}
