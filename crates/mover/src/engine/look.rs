//! Looks up one name of an unlisted directory in its store, and lists a directory in which programs look up many.
//!
//! A look-up costs one or two calls to the store; a listing costs as many as the directory has names, or pages of them,
//! and memory in the shard for each. So a program that needs one name of a million waits for that one alone. A program that
//! needs many is better served by a listing: after several look-ups (`looks.rs`) the directory is listed in the
//! background, but only as far as a number of names for each look-up that there was; a listing that meets more names is
//! given up, and begins anew when there were twice as many look-ups. So what is listed in vain is never more than a
//! fixed multiple of what the look-ups cost, however large the directory is. docs/decisions/0046 has the numbers.

use std::time::Duration;

use forebay_types::{Code, Error, Ino, Result};

use super::list::{self, Budget};
use super::shared::{for_programs, Shared};
use crate::host::{self, Instant};
use crate::store::{Object, Store, StorePath, StoreResult, TemporaryName};

/// How long a look-up waits for a directory that the store does not have, and the pause between two looks. The drain
/// reports a rename right after it.
const MOVED_PATIENCE: Duration = Duration::from_secs(1);
const MOVED_PERIOD: Duration = Duration::from_millis(10);

/// Looks a name up for a program that waits for it. The names up to which its directory is to be listed, if it is now.
pub(super) fn look(shared: &Shared, directory: Ino, name: &[u8]) -> Option<u64> {
    let link = &shared.link;
    let found = look_up(shared, directory, name);
    let code = match &found {
        Ok(true) => 0,
        Ok(false) => Code::NotFound as u16,
        Err(e) => {
            tracing::warn!("{e}");
            for_programs(e.code) as u16
        }
    };
    // Before the report: the shard may hand the name out again right after it.
    shared.looks.end(directory, name);
    if let Err(code) = link.looked_up(directory, name, code) {
        tracing::debug!("cannot report a name of {directory}: {}", code.name());
    }
    found.ok().and_then(|_| shared.looks.note(directory))
}

/// Lists a directory in the background, unless it has more names than these.
pub(super) fn list_some(shared: &Shared, directory: Ino, names: u64) {
    let go_on = || !shared.stores.is_stopping() && !shared.listing.has(directory);
    if !go_on() {
        return; // a program waits for the listing
    }
    match list::list_up_to(&shared.link, &shared.stores, directory, Budget { names, go_on: &go_on }) {
        Ok(true) => shared.looks.forget(directory),
        Ok(false) => {}
        Err(e) => tracing::debug!("{e}"),
    }
}

/// Asks the store for a name, and imports what it has. False if the store lacks it.
fn look_up(shared: &Shared, directory: Ino, name: &[u8]) -> Result<bool> {
    let (link, stores) = (&shared.link, &shared.stores);
    let what = || format!("cannot look up {} in its backing store", link.path(directory, name));
    let until = Instant::now() + MOVED_PATIENCE;
    // What this mover removes from the store meanwhile is not imported.
    let listing = link.listings.begin(directory);
    loop {
        let located = match stores.locate(directory) {
            // The directory is gone from the pool, or is not in the store.
            Err(e) if e.code == Code::NotFound => return Ok(false),
            located => located?,
        };
        let found = found_in(&*located.at.store, &located.path, name);
        // The drain may have renamed the directory meanwhile: the name was not looked for where it is, or what was found
        // belongs to another directory.
        let is_still_there = || stores.locate(directory).is_ok_and(|now| now.path == located.path);
        let done = match found {
            Ok(Found::NoDirectory) if Instant::now() < until && !stores.is_stopping() => {
                host::sleep(MOVED_PERIOD);
                continue;
            }
            Ok(_) if !is_still_there() => continue,
            Ok(Found::Object(object)) => list::import_one(link, directory, &object, &listing),
            Ok(Found::Nothing | Found::NoDirectory) => {
                stores.check(&located.at)?;
                Ok(false)
            }
            Err(e) => Err(e),
        };
        return match done {
            Ok(is_there) => {
                located.at.note_success();
                Ok(is_there)
            }
            Err(e) => {
                let is_of_pool = e.is_of_pool;
                let e = Error::from(e).why(what());
                if !is_of_pool {
                    located.at.note_failure(&e);
                }
                Err(e)
            }
        };
    }
}

enum Found {
    Object(Object),
    Nothing,
    /// The store has no such directory.
    NoDirectory,
}

fn found_in(store: &dyn Store, directory: &StorePath, name: &[u8]) -> StoreResult<Found> {
    let path = match directory.join(name) {
        Ok(path) if may_have(store, name) => path,
        // No listing would show it.
        _ => return Ok(Found::Nothing),
    };
    if let Some(object) = shortened(store.look(&path))? {
        return Ok(Found::Object(object));
    }
    // Without renames, a directory stays where it is until the shard has another place for it.
    if store.abilities().rename_directory && store.look(directory)?.is_none() {
        return Ok(Found::NoDirectory);
    }
    Ok(Found::Nothing)
}

/// A store that cannot have a name so long lacks it.
fn shortened(found: StoreResult<Option<Object>>) -> StoreResult<Option<Object>> {
    match found {
        Err(e) if e.code() == Code::NameTooLong => Ok(None),
        found => found,
    }
}

/// False for a name that a listing of the store leaves out.
fn may_have(store: &dyn Store, name: &[u8]) -> bool {
    let is_plain = || std::str::from_utf8(name).is_ok_and(|name| name.trim() == name);
    TemporaryName::parse(name).is_none() && (store.abilities().raw_names || is_plain())
}
