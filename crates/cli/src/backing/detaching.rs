//! Takes a store away from a directory of the pool. Nothing is removed in the store.

use std::path::Path;

use forebay_client::Pool;
use forebay_sys::signals::Signals;
use forebay_types::{Code, Error, Ino, Kind, PendingPlace, Request, Result, FLAG_STORE};

use super::draining::{drain, would_lose, Drained};
use super::pending::{all, Lacking};
use super::trees::Trees;
use super::{look, path_of, settings_of};
use crate::staging::Style;
use crate::{pool, table};

/// How often the tree is forgotten again because programs list or change it meanwhile.
const PASSES_MAX: usize = 5;

/// What was lost by `--discard`.
pub(crate) fn detach(
    dir: &Path,
    pool: &'static Pool,
    path: &[u8],
    discard: bool,
    style: Style,
    signals: &Signals,
) -> Result<(Drained, Lacking)> {
    let what = format!("cannot detach {}", table::printable(path));
    let entry = look(pool, path, "detach")?;
    let ino = entry.attr.ino;
    if entry.attr.flags & FLAG_STORE == 0 {
        return Err(Error::new(Code::NoAttribute, what)
            .why("no store is attached there")
            .cure("`forebay status` lists the directories with stores"));
    }
    let settings = settings_of(pool, ino);
    let is_read_only = settings.as_ref().is_some_and(|settings| settings.read_only);
    let drained = match discard || is_read_only {
        true => Drained::default(),
        false => drain(dir, pool, Some(ino), style, signals)?,
    };
    let lacking = would_lose(dir, pool, Some(ino))?;
    if !discard && !lacking.is_nothing() {
        return Err(drained.refusal(what, lacking, &format!("detach --discard {}", table::printable(path))));
    }
    let explicit = settings.as_ref().is_some_and(|settings| settings.explicit);
    // Nobody wants on the store what is never drained.
    let discard = discard || settings.is_some_and(|settings| settings.policy_of_directories().is_temporary());
    for pass in 1.. {
        forget_all(pool, ino, explicit, discard)?;
        match pool.request(&Request::Detach { ino }, |_| Ok(())) {
            Ok(()) => break,
            Err(Code::NotEmpty | Code::Busy) if pass < PASSES_MAX => {}
            Err(Code::NotEmpty | Code::Busy) => {
                return Err(Error::new(Code::Busy, what)
                    .why("programs use the directory meanwhile")
                    .cure("end them, or have them leave it, and detach again"))
            }
            Err(code) => return Err(Error::new(code, what).why(pool::words(code))),
        }
    }
    Ok((drained, if discard { lacking } else { Lacking::default() }))
}

/// Removes everything of a store's tree from the pool alone. With `discard`, what the store does not have too, else of
/// that only what it is never to have.
pub(crate) fn forget_all(pool: &'static Pool, root: Ino, explicit: bool, discard: bool) -> Result<()> {
    if !discard {
        forget_pending(pool, root, explicit, |trees, place| {
            trees.policy(place).is_some_and(|policy| policy.is_temporary())
        })?;
    }
    forget_below(pool, root, !explicit, discard)?;
    match discard {
        true => forget_pending(pool, root, explicit, |_, _| true),
        false => Ok(()),
    }
}

/// Removes what is at pending places of a store's tree from the pool, and the places.
fn forget_pending(
    pool: &'static Pool,
    root: Ino,
    explicit: bool,
    goes: impl Fn(&mut Trees, &PendingPlace) -> bool,
) -> Result<()> {
    let mut trees = Trees::new(pool);
    for place in all(pool, &[root.birth_node()])? {
        if trees.store_of(place.parent) != Some(root) || !goes(&mut trees, &place) {
            continue;
        }
        match pool.forget_in(place.parent, &place.name, !explicit, true) {
            Ok(()) | Err(Code::NotFound) => {}
            Err(code) => return Err(kept(pool, place.parent, &place.name, code)),
        }
    }
    Ok(())
}

fn kept(pool: &Pool, parent: Ino, name: &[u8], code: Code) -> Error {
    let above = path_of(pool, parent);
    let path = format!("{}/{}", above.trim_end_matches('/'), table::printable(name));
    let error = Error::new(code, format!("cannot take {path} out of the pool"));
    match code {
        Code::Busy => {
            error.why("it was changed meanwhile").cure("end the programs that use it, and try again")
        }
        code => error.why(pool::words(code)),
    }
}

/// The entries of a directory. One that the store has not listed yet is not listed now: the store may be gone.
fn entries(pool: &Pool, directory: Ino) -> std::result::Result<Vec<(Vec<u8>, Ino, Kind)>, Code> {
    let (mut cursor, mut found) = (pool.read_known(directory), Vec::new());
    while let Some(entry) = cursor.next(pool)? {
        found.push((entry.name.to_vec(), entry.ino, entry.kind));
    }
    Ok(found)
}

fn forget_below(pool: &Pool, directory: Ino, relist: bool, discard: bool) -> Result<()> {
    let found = match entries(pool, directory) {
        Err(Code::NotFound) => return Ok(()),
        found => found.map_err(|code| {
            Error::new(code, format!("cannot list {}", path_of(pool, directory))).why(pool::words(code))
        })?,
    };
    for (name, ino, kind) in found {
        if kind == Kind::Directory {
            forget_below(pool, ino, relist, discard)?;
        }
        match pool.forget_in(directory, &name, relist, discard) {
            // The next pass removes a directory that got entries meanwhile.
            Ok(()) | Err(Code::NotFound | Code::NotEmpty) => {}
            Err(code) => return Err(kept(pool, directory, &name, code)),
        }
    }
    Ok(())
}
