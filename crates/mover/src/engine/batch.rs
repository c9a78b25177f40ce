//! Uploads the files of a batch, makes them durable together, and publishes them.

use std::collections::BTreeSet;

use forebay_types::{
    Code, Error, PendingPlace, ReportOutcome, Request, Result, StoreVersion, EPOCH_UNKNOWN, REPORTS_MAX,
};

use super::copy_turn::{CopyTurn, Copying};
use super::large_copies::LargeCopy;
use super::link::Link;
use super::name_turns::NameTurns;
use super::parallel::in_parallel_if_slow;
use super::pass::{failed, note_snapshot, Pass, Reason};
use super::reconcile::Reconciler;
use super::reports::Reports;
use super::shared::Shared;
use super::stores::AttachedStore;
use super::upload::{upload, NotUploaded, Upload};
use super::upload_directories::UploadDirectories;
use super::wanted::{Uploads, WantedUpload};
use crate::store::{with_suffix, Outcome, Store, StorePath};

enum Published {
    Done(StoreVersion),
    Later,
    Failed(Error),
}

/// What the batches of one pass have in common: turns, and where their temporaries are.
pub(super) struct Turns<'a> {
    copy: CopyTurn,
    names: NameTurns<StorePath>,
    places: UploadDirectories<'a>,
}

impl<'a> Turns<'a> {
    pub(super) fn new(store: &'a dyn Store) -> Turns<'a> {
        let places = UploadDirectories::new(store);
        Turns { copy: CopyTurn::default(), names: NameTurns::default(), places }
    }

    /// Before the first upload into these directories, each of which is named as often as it gets files, and in one call.
    pub(super) fn announce<'b>(&self, wanted: impl Iterator<Item = &'b StorePath>) {
        self.places.announce(wanted);
    }
}

/// When a batch is copied.
pub(super) enum Turn<'a> {
    /// In the turn of this pass's batches.
    Batch(&'a Turns<'a>),
    /// Now: one large file.
    Large(LargeCopy<'a>),
    /// Now, in no turn.
    Now,
}

/// The files of a batch, of which none begins any more when this is dropped.
struct Ending<'a> {
    places: &'a UploadDirectories<'a>,
    directories: Vec<StorePath>,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.directories.iter().for_each(|directory| self.places.ended(directory));
    }
}

/// Uploads files, makes them durable together, and publishes them. It copies while it has the turn of copying.
pub(super) fn upload_batch(
    shared: &Shared,
    at: &AttachedStore,
    batch: Uploads,
    reason: Reason<'_>,
    turn: Turn<'_>,
    pass: &mut Pass,
) {
    let (turns, large) = match turn {
        Turn::Batch(turns) => (Some(turns), None),
        Turn::Large(large) => (None, Some(large)),
        Turn::Now => (None, None),
    };
    let reconciler = &Reconciler::new(&shared.link, &shared.stores, at);
    let (link, store): (&Link, &dyn Store) = (reconciler.link, &*reconciler.at.store);
    let begin = batch.iter().map(|wanted| Request::BeginDrain { ino: wanted.entry.attr.ino });
    let begun = Reports::new(link, begin.collect());
    let copying = turns.map(|turns| turns.copy.take());
    let _ending = turns.filter(|turns| !turns.places.are_none()).map(|turns| Ending {
        places: &turns.places,
        directories: batch.iter().map(|wanted| wanted.directory.clone()).collect(),
    });
    let copied = in_parallel_if_slow(&at.store, &batch, |i, wanted| {
        let (directory, goes_on) = (&wanted.directory, (reason.go_on)());
        let apart = turns.filter(|_| goes_on).and_then(|turns| turns.places.next(directory));
        // After its place is made: all batches that wait for that would begin at the same time.
        if i + 1 == batch.len() {
            copying.iter().for_each(Copying::pass_on);
        }
        if !goes_on {
            return Err(NotUploaded::Later);
        }
        let apart = apart.as_ref().unwrap_or(directory);
        upload(link, &shared.peers, (at.root, store), (wanted, apart), begun.outcome(i))
    });
    drop((begun, copying, large));
    let mut uploaded: Vec<(Box<WantedUpload>, Upload)> = Vec::new();
    for (wanted, copied) in batch.into_iter().zip(copied) {
        match copied {
            Ok(upload) => uploaded.push((wanted, upload)),
            Err(NotUploaded::Later) => pass.later.push((wanted.place.parent, wanted.place.name)),
            Err(NotUploaded::Failed(e)) => failed(reconciler, pass, wanted.place, e),
        }
    }
    let temporaries: Vec<StorePath> = uploaded.iter().map(|(_, upload)| upload.temporary.clone()).collect();
    if let Err(e) = store.make_durable(&temporaries) {
        let e = Error::from(e);
        reconciler.at.note_failure(&e);
        for (wanted, upload) in uploaded {
            let _ = store.discard(&upload.temporary);
            let why = Error::new(e.code, "cannot make an upload durable").why(&e);
            pass.failed.push(((wanted.place.parent, wanted.place.name), why));
        }
        return;
    }
    let intend = uploaded.iter().map(|(wanted, upload)| Request::Intend {
        parent: wanted.place.parent,
        name: &wanted.place.name,
        version: upload.version,
    });
    let intended = Reports::new(link, intend.collect());
    let published = in_parallel_if_slow(&at.store, &uploaded, |i, (wanted, upload)| {
        let directory = &wanted.directory;
        let slow = turns.filter(|turns| turns.places.are_for(directory));
        let _naming = slow.map(|turns| turns.names.take(directory));
        let outcome = publish(reconciler, wanted, upload, reason, || intended.outcome(i));
        if !matches!(outcome, Published::Done(_)) {
            // If it has another name by now, it keeps that.
            let _ = store.discard(&upload.temporary);
        }
        outcome
    });
    drop(intended);
    let directories: BTreeSet<&StorePath> = uploaded.iter().map(|(wanted, _)| &wanted.directory).collect();
    let directories: Vec<_> = directories.into_iter().collect();
    let sync_failed = match directories.len() > 1 && store.sync_all_directories() {
        true => None,
        false => {
            let each = |_, directory: &&StorePath| store.sync_directory(directory);
            let synced = in_parallel_if_slow(&at.store, &directories, each);
            synced.into_iter().find_map(std::result::Result::err).map(Error::from)
        }
    };
    let mut done = Vec::new();
    for ((wanted, upload), outcome) in uploaded.into_iter().zip(published) {
        match (outcome, &sync_failed) {
            (Published::Done(version), None) => done.push((wanted, upload, version)),
            // Its name may not be durable: it stays dirty, and is published again.
            (Published::Done(_), Some(e)) => {
                let why = Error::new(e.code, format!("cannot make the name {} durable", wanted.path)).why(e);
                failed(reconciler, pass, wanted.place, why);
            }
            (Published::Later, _) => pass.later.push((wanted.place.parent, wanted.place.name)),
            (Published::Failed(e), _) => failed(reconciler, pass, wanted.place, e),
        }
    }
    record(reconciler, done, reason, pass);
}

fn report_of((wanted, upload, version): &(Box<WantedUpload>, Upload, StoreVersion)) -> Request<'_> {
    let WantedUpload { place, entry, .. } = &**wanted;
    // A copy of an open file leaves its place pending.
    let seen = if upload.epoch == EPOCH_UNKNOWN { 0 } else { place.changes };
    let (parent, ino, epoch, version) = (place.parent, entry.attr.ino, upload.epoch, *version);
    Request::Published { parent, name: &place.name, ino, epoch, seen, version }
}

/// Records in the pool what was published.
fn record(
    reconciler: &Reconciler<'_>,
    published: Vec<(Box<WantedUpload>, Upload, StoreVersion)>,
    reason: Reason<'_>,
    pass: &mut Pass,
) {
    let reports: Vec<Request<'_>> = published.iter().map(report_of).collect();
    let outcomes: Vec<_> =
        reports.chunks(REPORTS_MAX).flat_map(|some| reconciler.link.report(some)).collect();
    drop(reports);
    for ((wanted, upload, _), outcome) in published.into_iter().zip(outcomes) {
        match outcome {
            Ok(_) => {
                if upload.epoch == EPOCH_UNKNOWN {
                    note_snapshot(reconciler.at, wanted.entry.attr.ino);
                    pass.snapshots.push((wanted.place.parent, wanted.place.name));
                }
                pass.done += 1;
                reconciler.at.note_success();
                if let Some(progress) = reason.progress {
                    progress.done(1, upload.bytes);
                }
            }
            Err(code) => {
                let e = Error::new(code, format!("cannot record that {} was published", wanted.path));
                failed(reconciler, pass, wanted.place, e);
            }
        }
    }
}

fn publish(
    reconciler: &Reconciler<'_>,
    wanted: &WantedUpload,
    upload: &Upload,
    reason: Reason<'_>,
    intend: impl FnOnce() -> ReportOutcome,
) -> Published {
    let (place, store): (&PendingPlace, &dyn Store) = (&wanted.place, &*reconciler.at.store);
    if !(reason.go_on)() {
        return Published::Later;
    }
    match intend() {
        Ok(_) => {}
        // The name went meanwhile, or data would be lost that only the store has.
        Err(Code::NotFound | Code::Busy | Code::Stale) => return Published::Later,
        Err(code) => return Published::Failed(Error::new(code, format!("cannot publish {}", wanted.path))),
    }
    match store.publish(&upload.temporary, &wanted.path, wanted.replaces.as_ref()) {
        Ok(Outcome::Done(version)) => Published::Done(version),
        Ok(Outcome::Conflict(Some(found))) if place.intent.is_some_and(|intent| found.is_upload(&intent)) => {
            // An earlier mover published it and died. This upload is newer: it replaces that one.
            match store.publish(&upload.temporary, &wanted.path, Some(&found.version)) {
                Ok(Outcome::Done(version)) => Published::Done(version),
                Ok(Outcome::Conflict(_)) => Published::Later,
                Err(e) => Published::Failed(e.into()),
            }
        }
        // Another program has removed it: nothing is overwritten.
        Ok(Outcome::Conflict(None)) if wanted.replaces.is_some() => {
            match store.publish(&upload.temporary, &wanted.path, None) {
                Ok(Outcome::Done(version)) => Published::Done(version),
                Ok(Outcome::Conflict(_)) => Published::Later,
                Err(e) => Published::Failed(e.into()),
            }
        }
        // The mover that requested it has given it up, and may have published another version.
        Ok(Outcome::Conflict(_)) if !(reason.go_on)() => Published::Later,
        Ok(Outcome::Conflict(found)) => {
            match reconciler.is_outdated(place) {
                Ok(false) => {}
                Ok(true) => return Published::Later,
                Err(e) => return Published::Failed(e),
            }
            match beside(reconciler, wanted, upload) {
                Ok(()) => {}
                Err(e) => return Published::Failed(e),
            }
            match reconciler.conflict(place, &wanted.path, found.as_deref()) {
                Ok(()) => Published::Later,
                Err(e) => Published::Failed(e),
            }
        }
        Err(e) => Published::Failed(e.into()),
    }
}

/// Publishes an upload beside the file that it may not replace, under a name that says so.
fn beside(reconciler: &Reconciler<'_>, wanted: &WantedUpload, upload: &Upload) -> Result<()> {
    let store: &dyn Store = &*reconciler.at.store;
    for number in 0..100 {
        let suffix = format!(".forebay-conflict-{}", upload.number() + number);
        let name = with_suffix(&wanted.place.name, &suffix);
        let path = wanted.directory.join(&name).map_err(|code| Error::new(code, "a path is too long"))?;
        match store.publish(&upload.temporary, &path, None) {
            Ok(Outcome::Done(_)) => {
                tracing::warn!("the pool's version of {} is beside it, as {path}", wanted.path);
                return store.sync_directory(&wanted.directory).map_err(Error::from);
            }
            Ok(Outcome::Conflict(Some(_))) => {}
            // The upload is gone: another program replaced the file just after it was published.
            Ok(Outcome::Conflict(None)) => return Ok(()),
            Err(e) if e.code() == Code::NotFound => return Ok(()),
            Err(e) => return Err(e.into()),
        }
    }
    Err(Error::new(Code::Exists, format!("cannot publish {} beside the store's version", wanted.path)))
}
