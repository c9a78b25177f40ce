//! Removes files from a store, many at a time.
//!
//! The names of one file are removed one after the other: the shard lets a mover remove one place of a file whose data
//! only the store has as long as it knows of another, and each of two removals at once would count on the other's place.

use std::collections::HashMap;

use forebay_types::{Error, PendingPlace, Result};

use super::parallel::in_parallel;
use super::reconcile::{Next, Reconciler};
use crate::store::StorePath;

/// A place, and where it is in the store, if that has its directory.
type Removal = (PendingPlace, Option<StorePath>);

/// Removes what the store has at places where the pool has nothing. Returns each with its outcome.
pub(super) fn remove_files(
    reconciler: &mut Reconciler<'_>,
    places: Vec<PendingPlace>,
) -> Vec<(PendingPlace, Result<Next>)> {
    let mut outcomes = Vec::new();
    let mut files: Vec<Vec<Removal>> = Vec::new();
    let mut file_of: HashMap<u64, usize> = HashMap::new();
    for place in places {
        match reconciler.path_of(&place) {
            Err(e) => outcomes.push((place, Err(e))),
            Ok(at) => {
                let new = files.len();
                let index = match place.placed {
                    Some(placed) if placed.ino.0 != 0 => *file_of.entry(placed.ino.0).or_insert(new),
                    _ => new,
                };
                if index == new {
                    files.push(Vec::new());
                }
                files[index].push((place, at.map(|(_, path)| path)));
            }
        }
    }
    let reconciler = &*reconciler;
    let removed = in_parallel(&reconciler.at.store, &files, |_, names| {
        let one = |(place, path): &Removal| match reconciler.stores.is_stopping() {
            true => Ok(Next::Later),
            false => reconciler.remove_at(place, path.as_ref(), false),
        };
        names.iter().map(one).collect::<Vec<Result<Next>>>()
    });
    for (names, removed) in files.into_iter().zip(removed) {
        outcomes.extend(names.into_iter().map(|(place, _)| place).zip(removed));
    }
    outcomes
}

/// Removed places, places that wait, and those that failed.
pub(super) fn sorted(
    outcomes: Vec<(PendingPlace, Result<Next>)>,
) -> (u64, Vec<PendingPlace>, Vec<(PendingPlace, Error)>) {
    let (mut done, mut later, mut failed) = (0, Vec::new(), Vec::new());
    for (place, outcome) in outcomes {
        match outcome {
            Ok(Next::Done) => done += 1,
            Ok(_) => later.push(place),
            Err(e) => failed.push((place, e)),
        }
    }
    (done, later, failed)
}
