//! Imports the names of a directory from its store.

use std::collections::HashSet;
use std::time::Duration;

use forebay_types::{Code, Error, Ino, Kind, Reader, Result, StoreObject, Writer};

use super::link::Link;
use super::listings::Listing;
use super::stores::Stores;
use crate::host::Instant;
use crate::store::{Object, Store, StoreError, StorePath, StoreResult};

/// Bytes of a list in one request, from which on no object is added to it.
const LIST_BYTES: usize = 48 * 1024;
/// Bytes of an encoded object, at most.
const OBJECT_BYTES: usize = 5000;

/// What an object of a store becomes in the pool.
fn object_of<'o>(object: &'o Object) -> StoreObject<'o> {
    let directory = object.kind == Kind::Directory;
    StoreObject {
        name: &object.name,
        kind: object.kind,
        mode: object.mode & 0o7777,
        uid: object.uid,
        gid: object.gid,
        rdev: object.rdev,
        atime: object.atime,
        version: forebay_types::StoreVersion {
            // The version of a directory has no time. The pool shows the directory's own.
            mtime: if directory { object.mtime } else { object.version.mtime },
            ..object.version
        },
        target: &object.link_target,
        nlink: if object.kind == Kind::File { object.nlink } else { 1 },
        file_system: if object.kind == Kind::File { object.file_system } else { 0 },
    }
}

/// How often a listing begins anew because the pool has forgotten names of the directory meanwhile.
const ATTEMPTS: u32 = 10;

/// Imports the names of directory `ino`, and reports it as listed. Returns how long the store took for its first answer.
pub(super) fn list(link: &Link, stores: &Stores, ino: Ino) -> Result<Duration> {
    let mut attempt = 1;
    loop {
        let epoch = epoch_of(link, ino)?;
        match import_while(link, stores, ino, Some(epoch), &mut || true)? {
            Imported::All { first_answer, .. } => return Ok(first_answer),
            Imported::Stale if attempt < ATTEMPTS => attempt += 1,
            Imported::Stale => return Err(not_listed(link, ino, Code::Stale)),
        }
    }
}

fn epoch_of(link: &Link, ino: Ino) -> Result<u64> {
    link.inode(ino).map(|entry| entry.attr.epoch()).map_err(|code| not_listed(link, ino, code))
}

/// Imports names that the store has and the pool does not know. Returns how many the store has.
pub(super) fn refresh(link: &Link, stores: &Stores, ino: Ino) -> Result<u64> {
    match import_while(link, stores, ino, None, &mut || true)? {
        Imported::All { names, .. } => Ok(names),
        Imported::Stale => Err(not_listed(link, ino, Code::Stale)),
    }
}

/// How far a listing goes for which no program waits.
pub(super) struct Budget<'a> {
    /// The names up to which it goes on.
    pub(super) names: u64,
    /// Whether it goes on at all.
    pub(super) go_on: &'a dyn Fn() -> bool,
}

/// As [`list`], but gives up when the directory has more names than the budget. What was imported until then stays. True if
/// the directory is listed.
pub(super) fn list_up_to(link: &Link, stores: &Stores, ino: Ino, budget: Budget<'_>) -> Result<bool> {
    let mut names = 0;
    let mut is_over = false;
    let epoch = epoch_of(link, ino)?;
    let listed = import_while(link, stores, ino, Some(epoch), &mut || {
        names += 1;
        is_over |= names > budget.names || !(budget.go_on)();
        !is_over
    });
    match listed {
        Ok(imported) => Ok(matches!(imported, Imported::All { .. })),
        Err(_) if is_over => Ok(false),
        Err(e) => Err(e),
    }
}

fn not_listed(link: &Link, ino: Ino, code: Code) -> Error {
    Error::new(code, format!("cannot list {}", link.path(ino, b"")))
}

/// Imports one object of a directory. False if this mover has removed it from the store since `listing` began.
pub(super) fn import_one(link: &Link, ino: Ino, object: &Object, listing: &Listing<'_>) -> StoreResult<bool> {
    let failed = |code: Code| {
        let name = object.name.as_slice();
        StoreError::of_pool(code, format!("cannot import {} from its backing store", link.path(ino, name)))
    };
    let mut batch = Batch::new();
    batch.add(object).map_err(failed)?;
    if listing.gone().contains(&object.name) {
        return Ok(false);
    }
    batch.import(link, ino, listing).map_err(failed).map(|()| true)
}

/// What became of a listing.
enum Imported {
    /// All names are there.
    All {
        /// How many the store has.
        names: u64,
        /// How long it took until it told the first one, or that it has none.
        first_answer: Duration,
    },
    /// The pool has forgotten names of the directory since the listing began.
    Stale,
}

/// Imports the names of a directory while `go_on` says so before each; fails else. With the directory's `epoch` from
/// before, the directory is reported as listed.
fn import_while(
    link: &Link,
    stores: &Stores,
    ino: Ino,
    epoch: Option<u64>,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<Imported> {
    let what = || format!("cannot list {} in its backing store", link.path(ino, b""));
    let located = stores.locate(ino)?;
    let store = &*located.at.store;
    let listing = link.listings.begin(ino);
    let mut batch = Batch::new();
    let failed = |code: Code| of_pool(code, what());
    let import = |batch: &mut Batch| batch.import(link, ino, &listing).map_err(failed);
    let mut is_given_up = false;
    let (begun, mut first_answer) = (Instant::now(), None);
    let listed = store.list(&located.path, &mut |object| {
        first_answer.get_or_insert_with(|| begun.elapsed());
        if !go_on() {
            is_given_up = true;
            return Err(failed(Code::TooBig));
        }
        let whole;
        // Listings of object stores lack attributes.
        let object = match object.is_complete {
            true => object,
            false => {
                whole = complete(store, &located.path, object)?;
                whole
            }
        };
        if batch.len >= LIST_BYTES {
            import(&mut batch)?;
        }
        batch.add(&object).map_err(failed)
    });
    let first_answer = first_answer.unwrap_or_else(|| begun.elapsed());
    let mut is_stale = false;
    let listed = listed.and_then(|found| {
        let rest = match epoch {
            None => import(&mut batch),
            Some(epoch) => match batch.import_last(link, ino, &listing, epoch) {
                Err(Code::Stale) => {
                    is_stale = true;
                    Ok(())
                }
                rest => rest.map_err(failed),
            },
        };
        rest.map(|()| found)
    });
    let found = match listed {
        Ok(found) => found,
        Err(e) if is_given_up || e.is_of_pool => return Err(Error::from(e)),
        Err(e) => {
            stores.check(&located.at)?;
            let e = Error::from(e);
            located.at.note_failure(&e);
            return Err(e);
        }
    };
    located.at.note_success();
    if is_stale {
        return Ok(Imported::Stale);
    }
    if found.unusable > 0 {
        tracing::warn!("{}: the pool cannot have {} of its names", link.path(ino, b""), found.unusable);
    }
    Ok(Imported::All { names: found.objects, first_answer })
}

/// The pool could not take the names of a directory.
fn of_pool(code: Code, what: String) -> StoreError {
    let failure = StoreError::of_pool(code, what);
    match code {
        Code::NoSpace => failure.why("the pool has no room for its names").cure("make the pool larger"),
        _ => failure.why("the pool could not import its names"),
    }
}

/// Objects of one request.
struct Batch {
    /// The encoded objects, and room for one more.
    bytes: Vec<u8>,
    /// Bytes of the encoded objects.
    len: usize,
    /// Where each object begins.
    starts: Vec<usize>,
}

impl Batch {
    fn new() -> Batch {
        Batch { bytes: vec![0; LIST_BYTES + OBJECT_BYTES], len: 0, starts: Vec::new() }
    }

    /// Adds an object. The batch has fewer than [`LIST_BYTES`].
    fn add(&mut self, object: &Object) -> std::result::Result<(), Code> {
        let mut w = Writer::new(&mut self.bytes[self.len..]);
        object_of(object).encode(&mut w)?;
        self.starts.push(self.len);
        self.len += w.len();
        Ok(())
    }

    /// Leaves out the objects that this mover removed from the store since they were listed.
    fn leave_out(&mut self, gone: &HashSet<Vec<u8>>) -> std::result::Result<(), Code> {
        let (starts, len) = (std::mem::take(&mut self.starts), std::mem::take(&mut self.len));
        let ends = starts.iter().skip(1).copied().chain([len]);
        for (start, end) in starts.iter().copied().zip(ends) {
            let object = StoreObject::decode(&mut Reader::new(&self.bytes[start..end]))?;
            if !gone.contains(object.name) {
                self.bytes.copy_within(start..end, self.len);
                self.starts.push(self.len);
                self.len += end - start;
            }
        }
        Ok(())
    }

    /// Imports the objects.
    fn import(&mut self, link: &Link, ino: Ino, listing: &Listing<'_>) -> std::result::Result<(), Code> {
        self.send(listing, |objects| match objects {
            [] => Ok(None),
            objects => link.import(ino, objects).map(Some),
        })
    }

    /// Imports the objects, which are the last ones of a listing, and reports the directory as listed.
    fn import_last(
        &mut self,
        link: &Link,
        ino: Ino,
        listing: &Listing<'_>,
        epoch: u64,
    ) -> std::result::Result<(), Code> {
        self.send(listing, |objects| link.listed(ino, epoch, objects))
    }

    /// Sends the objects by `send`, which returns how many of them, from the first, are there; none when it is over.
    fn send(
        &mut self,
        listing: &Listing<'_>,
        send: impl Fn(&[u8]) -> std::result::Result<Option<u64>, Code>,
    ) -> std::result::Result<(), Code> {
        // Held until the objects are imported: no removal is reported meanwhile.
        let gone = listing.gone();
        if !gone.is_empty() {
            self.leave_out(&gone)?;
        }
        let mut first = 0;
        loop {
            let start = self.starts.get(first).copied().unwrap_or(self.len);
            match send(&self.bytes[start..self.len])? {
                None => break,
                Some(0) => return Err(Code::NoSpace),
                Some(count) => first += count as usize,
            }
        }
        self.starts.clear();
        self.len = 0;
        Ok(())
    }
}

/// The object with its attributes.
fn complete(store: &dyn Store, directory: &StorePath, object: Object) -> StoreResult<Object> {
    let path =
        directory.join(&object.name).map_err(|code| StoreError::lasting(code, "a name is too long"))?;
    Ok(match store.look(&path)? {
        Some(whole) => Object { name: object.name, ..whole },
        None => object,
    })
}
