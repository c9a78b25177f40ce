//! Prefixes as directories: listing, removal, leftovers.

use std::collections::{BTreeSet, HashSet};
use std::pin::Pin;

use futures_core::Stream;
use opendal::options::ListOptions;
use opendal::{Entry, ErrorKind};
use xxhash_rust::xxh3::xxh3_64;

use super::super::attributes::{DirectoryRemoval, Leftovers, Listing, Object};
use super::super::error::{StoreError, StoreResult};
use super::super::path::{check_name, StorePath};
use super::super::temporary::{TemporaryKind, TemporaryName};
use super::failures::NO_BUCKET;
use super::metadata::{directory, object_of, version_of};
use super::ObjectStore;
use forebay_types::Code;

/// What a key in a prefix is.
pub(super) enum Found<'a> {
    /// The marker of the prefix itself.
    Marker,
    File(&'a str),
    Directory(&'a str),
    /// Not a name that the pool can hold, or that OpenDAL could address.
    Unusable,
}

/// Whether a listing goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Going {
    On,
    Stop,
}

/// Which entry of the directory `prefix` (empty, or with a slash at its end) a key belongs to.
fn entry_of<'a>(prefix: &str, key: &'a str) -> Found<'a> {
    let Some(rest) = key.strip_prefix(prefix) else { return Found::Unusable };
    if rest.is_empty() || (prefix.is_empty() && rest == "/") {
        return Found::Marker;
    }
    // Servers that ignore the delimiter return whole keys.
    let (name, is_directory) = match rest.split_once('/') {
        Some((name, _)) => (name, true),
        None => (rest, false),
    };
    if check_name(name.as_bytes()).is_err() || name.trim() != name {
        return Found::Unusable;
    }
    if is_directory {
        Found::Directory(name)
    } else {
        Found::File(name)
    }
}

impl ObjectStore {
    /// Passes the entries of a prefix to `each`, page by page. False if there is no key with the prefix.
    pub(super) fn each_key(
        &self,
        verb: &str,
        path: &StorePath,
        mut each: impl FnMut(&Entry, Found<'_>) -> StoreResult<Going>,
    ) -> StoreResult<bool> {
        let key = self.key(verb, path)?;
        let prefix = if path.is_root() { String::new() } else { format!("{key}/") };
        let listed = if path.is_root() { "/" } else { &prefix };
        let lister = self.operator.lister_options(listed, ListOptions::default());
        let mut lister = match self.wait(self.limits.request, lister) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
            other => other.map_err(|e| self.failed(verb, path, e))?,
        };
        let mut first: Option<String> = None;
        loop {
            let entry = match self.wait(self.limits.request, next(&mut lister)) {
                Err(e) if e.kind() == ErrorKind::NotFound && !e.to_string().contains(NO_BUCKET) => None,
                other => other.map_err(|e| self.failed(verb, path, e))?,
            };
            let Some(entry) = entry else { return Ok(first.is_some()) };
            if first.as_deref() == Some(entry.path()) {
                // Servers exist that ignore the token of a page: the listing would not end.
                let failure = StoreError::lasting(Code::Corrupt, self.what(verb, path));
                return Err(failure.why("the server repeats its listing from the beginning"));
            }
            let going = each(&entry, entry_of(&prefix, entry.path()))?;
            if going == Going::Stop {
                return Ok(true);
            }
            first.get_or_insert_with(|| entry.path().to_owned());
        }
    }

    pub(super) fn list_prefix(
        &self,
        path: &StorePath,
        each: &mut dyn FnMut(Object) -> StoreResult<()>,
    ) -> StoreResult<Listing> {
        let mut listing = Listing::default();
        // A key `a` excludes the directory `a/`, which would have the same name in the pool. So directories come last.
        // Files are kept as hashes, because a prefix may have millions of keys.
        let mut files = HashSet::new();
        let mut directories = BTreeSet::new();
        let is_there = self.each_key("list", path, |entry, found| {
            match found {
                Found::Marker => {}
                Found::Unusable => listing.unusable += 1,
                Found::File(name) | Found::Directory(name)
                    if TemporaryName::parse(name.as_bytes()).is_some() =>
                {
                    listing.temporaries += 1;
                }
                Found::Directory(name) => {
                    directories.insert(name.as_bytes().to_vec());
                }
                Found::File(name) => {
                    files.insert(xxh3_64(name.as_bytes()));
                    listing.objects += 1;
                    let metadata = entry.metadata();
                    let version = version_of(metadata, self.has_tags);
                    // Without user metadata: only `look` has it.
                    each(Object { is_complete: false, ..object_of(name.as_bytes(), metadata, version) })?;
                }
            }
            Ok(Going::On)
        })?;
        for name in directories {
            if files.contains(&xxh3_64(&name)) {
                listing.unusable += 1;
                continue;
            }
            listing.objects += 1;
            each(directory(&name))?;
        }
        if is_there || path.is_root() {
            return Ok(listing);
        }
        Err(StoreError::lasting(Code::NotFound, self.what("list", path)).why("no such directory"))
    }

    pub(super) fn sweep(&self, path: &StorePath, is_alive: &dyn Fn(&str) -> bool) -> StoreResult<Leftovers> {
        let mut done = Leftovers::default();
        let mut stale = Vec::new();
        self.each_key("sweep", path, |entry, found| {
            if let Found::File(name) = found {
                match TemporaryName::parse(name.as_bytes()) {
                    Some(temporary) if is_alive(temporary.mover) => done.live += 1,
                    Some(TemporaryName { kind: TemporaryKind::Upload, .. }) => {
                        stale.push(entry.path().to_owned())
                    }
                    _ => {}
                }
            }
            Ok(Going::On)
        })?;
        for key in stale {
            match self.wait(self.limits.request, self.operator.delete(&key)) {
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                other => other.map_err(|e| self.failed("sweep", path, e))?,
            }
            done.removed += 1;
        }
        Ok(done)
    }

    pub(super) fn remove_prefix(
        &self,
        path: &StorePath,
        is_alive: &dyn Fn(&str) -> bool,
    ) -> StoreResult<DirectoryRemoval> {
        let verb = "remove directory";
        if path.is_root() {
            return Err(
                StoreError::lasting(Code::Invalid, self.what(verb, path)).why("it is the store itself")
            );
        }
        self.sweep(path, is_alive)?;
        let mut is_empty = true;
        let is_there = self.each_key(verb, path, |_, found| {
            is_empty &= matches!(found, Found::Marker);
            Ok(if is_empty { Going::On } else { Going::Stop })
        })?;
        if !is_empty {
            return Ok(DirectoryRemoval::NotEmpty);
        }
        let marker = format!("{}/", self.key(verb, path)?);
        match self.wait(self.limits.request, self.operator.delete(&marker)) {
            Err(e) if e.kind() == ErrorKind::NotFound || !is_there => {}
            other => other.map_err(|e| self.failed(verb, path, e))?,
        }
        Ok(DirectoryRemoval::Removed)
    }
}

/// The next entry of a listing.
async fn next(lister: &mut opendal::Lister) -> opendal::Result<Option<Entry>> {
    std::future::poll_fn(|context| Pin::new(&mut *lister).poll_next(context)).await.transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_belongs_to_the_entry_of_its_first_component() {
        let shown = |prefix, key| match entry_of(prefix, key) {
            Found::Marker => "marker".to_owned(),
            Found::Unusable => "unusable".to_owned(),
            Found::File(name) => name.to_owned(),
            Found::Directory(name) => format!("{name}/"),
        };
        for (prefix, key, entry) in [
            ("a/", "a/", "marker"),
            ("", "/", "marker"),
            ("a/", "a/b", "b"),
            ("a/", "a/b/", "b/"),
            ("a/", "a/b/c/d", "b/"),
            ("a/", "a//c", "unusable"),
            ("a/", "a/../c", "unusable"),
            ("a/", "a/.", "unusable"),
            ("a/", "a/ b", "unusable"),
            ("a/", "b", "unusable"),
            ("", "b", "b"),
        ] {
            assert_eq!(shown(prefix, key), entry, "{prefix:?} {key:?}");
        }
    }
}
