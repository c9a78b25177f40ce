//! Calls on names and directories: list, rename, link, make, remove a directory.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use forebay_types::{Code, Kind, StoreVersion};
use rustix::fs::{AtFlags, Mode, OFlags, RawDir};
use rustix::io::Errno;

use super::described::{describe, look, stat, version_of};
use super::names::{unlink, Replaced};
use super::resolve::At;
use super::PosixStore;
use crate::store::attributes::{Attributes, DirectoryRemoval, Listing, Object, Outcome};
use crate::store::error::{StoreError, StoreResult};
use crate::store::path::StorePath;
use crate::store::source::retried;
use crate::store::temporary::TemporaryName;

/// Bytes of one directory listing: about 1000 short names.
const LISTING_BYTES: usize = 32 * 1024;
/// Names of a listing that are looked at together: the first ones of them one after the other, and when most took longer
/// than [`LOOK_SLOW`], the others by [`LOOKS_AT_ONCE`] threads. Not when all together took long: on a busy node one of them
/// may have waited for a processor.
const LOOKS_TOGETHER: usize = 1024;
const LOOKS_FIRST: usize = 8;
const LOOK_SLOW: Duration = Duration::from_micros(500);
const LOOKS_AT_ONCE: usize = 32;

/// Passes the names in a directory to `each`, without `.` and `..`.
pub(super) fn each_name<E>(
    directory: BorrowedFd<'_>,
    failed: impl Fn(Errno) -> E,
    mut each: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut buffer = [MaybeUninit::<u8>::uninit(); LISTING_BYTES];
    let mut names = RawDir::new(directory, &mut buffer);
    while let Some(entry) = names.next() {
        let entry = match entry {
            Err(Errno::INTR) => continue,
            other => other.map_err(&failed)?,
        };
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            each(name)?;
        }
    }
    Ok(())
}

/// Passes the objects of these names to `each`, none for a name that is gone. When the first of them took long, as on a
/// distant store, the others are looked at many at a time.
fn look_at_all<E>(
    directory: BorrowedFd<'_>,
    names: &[Vec<u8>],
    mut each: impl FnMut(Result<Option<Object>, Errno>) -> Result<(), E>,
) -> Result<(), E> {
    let one = |name: &Vec<u8>| look(At { directory, name });
    let (first, rest) = names.split_at(names.len().min(LOOKS_FIRST));
    let mut slow = 0;
    let timed = |name| {
        let begun = Instant::now();
        let found = one(name);
        slow += usize::from(begun.elapsed() >= LOOK_SLOW);
        found
    };
    let found: Vec<_> = first.iter().map(timed).collect();
    let is_slow = slow > LOOKS_FIRST / 2;
    found.into_iter().try_for_each(&mut each)?;
    if rest.len() < LOOKS_FIRST || !is_slow {
        return rest.iter().map(one).try_for_each(each);
    }
    let part = rest.len().div_ceil(LOOKS_AT_ONCE);
    let parts = std::thread::scope(|scope| {
        let start = |part| {
            let run = move || -> Vec<_> { <[_]>::iter(part).map(one).collect() };
            (part, std::thread::Builder::new().name("look".to_owned()).spawn_scoped(scope, run))
        };
        let started: Vec<_> = rest.chunks(part).map(start).collect();
        let looked = started.into_iter().map(|(part, thread)| match thread.map(|thread| thread.join()) {
            Ok(Ok(found)) => found,
            _ => part.iter().map(one).collect(),
        });
        looked.collect::<Vec<_>>()
    });
    parts.into_iter().flatten().try_for_each(each)
}

impl PosixStore {
    pub(super) fn list_directory(
        &self,
        directory: &StorePath,
        each: &mut dyn FnMut(Object) -> StoreResult<()>,
    ) -> StoreResult<Listing> {
        let failed = |e| self.failed("list", directory, e);
        let fd = self.root.open(directory, OFlags::RDONLY | OFlags::DIRECTORY).map_err(failed)?;
        let mut listing = Listing::default();
        let mut names: Vec<Vec<u8>> = Vec::new();
        let mut pass = |names: &mut Vec<Vec<u8>>, listing: &mut Listing| {
            look_at_all(fd.as_fd(), names, |object| match object.map_err(failed)? {
                Some(object) => {
                    listing.objects += 1;
                    each(self.told(object))
                }
                // Removed since its name was read.
                None => Ok(()),
            })?;
            names.clear();
            Ok(())
        };
        each_name(fd.as_fd(), failed, |name| {
            if TemporaryName::parse(name).is_some() {
                listing.temporaries += 1;
                return Ok(());
            }
            names.push(name.to_vec());
            match names.len() < LOOKS_TOGETHER {
                true => Ok(()),
                false => pass(&mut names, &mut listing),
            }
        })?;
        pass(&mut names, &mut listing)?;
        Ok(listing)
    }

    pub(super) fn rename_object(
        &self,
        from: &StorePath,
        version: &StoreVersion,
        to: &StorePath,
        replaced: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        let failed = |e| self.failed("rename", from, e);
        let source = match self.root.place(from) {
            Err(Errno::NOENT) => return Ok(Outcome::Conflict(None)),
            other => other.map_err(failed)?,
        };
        let source = source.at();
        let found = match stat(source) {
            Err(Errno::NOENT) => return Ok(Outcome::Conflict(None)),
            other => other.map_err(failed)?,
        };
        if version_of(&found) != *version {
            return Ok(Outcome::conflict(Some(describe(source, &found).map_err(failed)?)));
        }
        let place = self.root.place(to).map_err(|e| self.failed("rename to", to, e))?;
        let target = place.at();
        if Kind::from_mode(found.st_mode) == Some(Kind::Directory) {
            return self.rename_directory((from, source), version, target, replaced);
        }
        // Aside first: a version that a foreign program puts at `from` now, or at `to` afterwards, is not moved.
        let aside = self.names.put_aside(&self.temporaries, source, version, replaced).map_err(failed)?;
        let Some(aside) = aside else { return Ok(Outcome::conflict(look(source).map_err(failed)?)) };
        let Some(expected) = replaced else {
            return match self.names.put_new(aside.place(), target, false) {
                Ok(true) => {
                    aside.release();
                    Ok(Outcome::Done(*version))
                }
                Ok(false) => {
                    self.names.put_back(aside).map_err(failed)?;
                    Ok(Outcome::conflict(look(target).map_err(failed)?))
                }
                Err(e) => {
                    let _ = self.names.put_back(aside);
                    Err(failed(e))
                }
            };
        };
        let is_expected = match stat(target) {
            Ok(found) => version_of(&found) == *expected,
            Err(Errno::NOENT) => false,
            Err(e) => {
                let _ = self.names.put_back(aside);
                return Err(failed(e));
            }
        };
        if is_expected {
            let from = (aside, version.ino, source);
            match self
                .names
                .replace_from_aside(&self.temporaries, from, (target, expected))
                .map_err(failed)?
            {
                Replaced::Yes => return Ok(Outcome::Done(*version)),
                Replaced::Conflict => {}
            }
        } else {
            self.names.put_back(aside).map_err(failed)?;
        }
        Ok(Outcome::conflict(look(target).map_err(failed)?))
    }

    /// Renames a directory: in one step, because its files are reached by its name.
    fn rename_directory(
        &self,
        (from, source): (&StorePath, At<'_>),
        version: &StoreVersion,
        target: At<'_>,
        replaced: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        let failed = |e| self.failed("rename", from, e);
        if replaced.is_some() {
            let failure = StoreError::lasting(Code::IsDirectory, self.what("rename", from));
            return Err(failure.why("a directory replaces nothing"));
        }
        if !self.names.put_new(source, target, true).map_err(failed)? {
            return Ok(Outcome::conflict(look(target).map_err(failed)?));
        }
        match stat(target) {
            Ok(stat) if version_of(&stat) == *version => Ok(Outcome::Done(*version)),
            // A foreign program put another directory at `from`.
            _ => {
                self.names.put_new(target, source, true).map_err(failed)?;
                Ok(Outcome::conflict(look(source).map_err(failed)?))
            }
        }
    }

    pub(super) fn link_object(
        &self,
        existing: &StorePath,
        version: &StoreVersion,
        new: &StorePath,
    ) -> StoreResult<Outcome<StoreVersion>> {
        let failed = |e| self.failed("link", existing, e);
        let source = self.root.place(existing).map_err(failed)?;
        let place = self.root.place(new).map_err(|e| self.failed("link to", new, e))?;
        let (from, to) = (source.at(), place.at());
        match retried(|| {
            rustix::fs::linkat(from.directory, from.name, to.directory, to.name, AtFlags::empty())
        }) {
            Ok(()) => {}
            Err(Errno::NOENT) => return Ok(Outcome::Conflict(None)),
            Err(Errno::EXIST) => return Ok(Outcome::conflict(look(to).map_err(failed)?)),
            Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS) => {
                let failure = StoreError::lasting(Code::NotSupported, self.what("link", existing));
                return Err(failure.why("the store has no hard links, or not for this file"));
            }
            Err(e) => return Err(failed(e)),
        }
        if version_of(&stat(to).map_err(failed)?) == *version {
            return Ok(Outcome::Done(*version));
        }
        // Another version has the name `existing`; only the new name goes.
        unlink(to).map_err(failed)?;
        Ok(Outcome::conflict(look(from).map_err(failed)?))
    }

    /// Makes an object that is no file and no directory.
    pub(super) fn make(
        &self,
        path: &StorePath,
        attributes: &Attributes,
        make: impl FnOnce(At<'_>) -> Result<(), Errno>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        let failed = |e| self.failed("make", path, e);
        let place = self.root.place(path).map_err(failed)?;
        match make(place.at()) {
            Err(Errno::EXIST) => return Ok(Outcome::conflict(look(place.at()).map_err(failed)?)),
            other => other.map_err(failed)?,
        }
        self.finish_new(place.at(), attributes).map(Outcome::Done).map_err(|e| {
            let _ = unlink(place.at());
            failed(e)
        })
    }

    pub(super) fn make_directory_at(
        &self,
        path: &StorePath,
        attributes: &Attributes,
    ) -> StoreResult<Outcome<Object>> {
        let failed = |e| self.failed("make directory", path, e);
        let place = self.root.place(path).map_err(failed)?;
        let at = place.at();
        // Until it has its owner and mode, only this process's user may enter it.
        let mode = if attributes.mode.is_some() { Mode::RWXU } else { Mode::from_raw_mode(0o777) };
        let is_new = match retried(|| rustix::fs::mkdirat(at.directory, at.name, mode)) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(e) => return Err(failed(e)),
        };
        if is_new {
            self.finish_new(at, attributes).map_err(|e| {
                // The next call would find it, and take its attributes for the wanted ones.
                let _ = retried(|| rustix::fs::unlinkat(at.directory, at.name, AtFlags::REMOVEDIR));
                failed(e)
            })?;
        }
        match look(at).map_err(failed)? {
            Some(object) if object.kind == Kind::Directory => Ok(Outcome::Done(object)),
            other => Ok(Outcome::conflict(other)),
        }
    }

    pub(super) fn remove_directory_at(
        &self,
        path: &StorePath,
        is_alive: &dyn Fn(&str) -> bool,
    ) -> StoreResult<DirectoryRemoval> {
        let failed = |e| self.failed("remove directory", path, e);
        let place = match self.root.place(path) {
            Err(Errno::NOENT) => return Ok(DirectoryRemoval::Removed),
            other => other.map_err(failed)?,
        };
        let remove = || retried(|| rustix::fs::unlinkat(&place.directory, place.name, AtFlags::REMOVEDIR));
        let removed = match remove() {
            Err(Errno::NOTEMPTY | Errno::EXIST) => {
                self.sweep(path, is_alive)?;
                remove()
            }
            other => other,
        };
        match removed {
            Ok(()) | Err(Errno::NOENT) => Ok(DirectoryRemoval::Removed),
            Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(DirectoryRemoval::NotEmpty),
            Err(e) => Err(failed(e)),
        }
    }
}
