//! What policies drain gives way to transfers of other pools at the same store, for a limited time: somebody waits for
//! those. Not when the pool fills up, as programs wait for space then.

use forebay_tasks::YIELD;
use forebay_types::PendingPlace;

use super::drain::{self, overdue_s};
use super::pass::{Due, Pass, Reason};
use super::shared::Shared;
use super::stores::AttachedStore;

/// A pass over places that are due by their policies. Calls of the store's claims may hang, so this is not for the thread
/// that watches.
pub(super) fn pass(shared: &Shared, at: &AttachedStore, due: Due, is_full: bool) -> Pass {
    let is_claimed = !is_full && at.is_claimed();
    let waits = |place: &PendingPlace| {
        let has_waited_s = overdue_s(&shared.link, at, place);
        is_claimed && place.intent.is_none() && has_waited_s < YIELD.as_secs_f64()
    };
    let (waiting, places): (Vec<_>, Vec<_>) = due.places.into_iter().partition(waits);
    let mut done = match places.is_empty() {
        true => Pass::default(),
        false => {
            let gives_way = !is_full && !is_claimed;
            let reason = Reason { forced: false, is_full, progress: None, go_on: &|| true, gives_way };
            drain::pass(shared, at, Due { places, ..due }, reason)
        }
    };
    done.later.extend(waiting.into_iter().map(|place| (place.parent, place.name)));
    done
}
