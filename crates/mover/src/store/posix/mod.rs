//! A store that is a directory: of Lustre, GPFS, NFS, or any file system that the kernel mounts.
//!
//! Invariants: every path is resolved beneath the root without following links (`resolve`); names change places only by
//! calls that can be undone (`names`); bytes go to temporaries alone. A version is size, modification time and inode
//! number. A foreign program that writes a file in place and sets both size and time back is not noticed.
//!
//! Faults survived: death at any instant (what is left has names that a sweep understands), full and read-only file
//! systems, file systems without exchange, links, holes, extended attributes or owners. Assumed: rename is atomic, and
//! fsync means what it says. No locks. Tests: beside the modules, and `tests/stores`.

mod apply;
mod copy;
mod described;
mod directory;
mod durable;
mod leftovers;
mod names;
mod open;
mod parts;
mod read_ahead;
mod resolve;
mod sources;
mod tree;
mod upload_directories;

use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use forebay_types::{Code, Kind, StoreVersion};
use rustix::fs::{Mode, OFlags, Stat};
use rustix::io::Errno;

use self::apply::{apply, Handle, IsNew, Lost};
use self::copy::{copy, CopyFailure, Copying, File, Holes};
use self::described::{look, stat, version_of};
pub use self::directory::StoreDirectory;
use self::durable::Durability;
use self::names::{unlink, NameCalls, Replaced};
pub use self::open::PosixOptions;
use self::resolve::{At, Directory, Place, Root};
use self::sources::{Sources, State};
use super::attributes::{
    Abilities, Attributes, DirectoryRemoval, Leftovers, Listing, Object, Outcome, Warnings, Xattrs,
};
use super::error::{StoreError, StoreResult};
use super::path::StorePath;
use super::source::{retried, Source};
use super::temporary::{Temporaries, TemporaryName};
use super::Store;

/// A directory as a store.
pub struct PosixStore {
    title: String,
    path: PathBuf,
    root: Root,
    /// The file system of the root.
    device: u64,
    directory: StoreDirectory,
    names: NameCalls,
    temporaries: Temporaries,
    lost: Lost,
    is_root: bool,
    keeps_xattrs: bool,
    durability: Durability,
    /// Whether uploads may have their temporaries in other directories; not known before that was tried.
    links_across: OnceLock<bool>,
    copying: Copying,
    /// Files that are read in ranges.
    sources: Sources,
}

impl fmt::Debug for PosixStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PosixStore")
            .field("title", &self.title)
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

impl PosixStore {
    /// "cannot publish /store/a/b".
    fn what(&self, verb: &str, path: &StorePath) -> String {
        if path.is_root() {
            return format!("cannot {verb} {}", self.title);
        }
        format!("cannot {verb} {}/{path}", self.title.trim_end_matches('/'))
    }

    /// An object with the file system's number in the store. The root's own is 0: device numbers change at a mount.
    fn told(&self, object: Object) -> Object {
        let is_own = object.file_system == self.device;
        Object { file_system: if is_own { 0 } else { object.file_system }, ..object }
    }

    /// The failure of a system call on a path.
    fn failed(&self, verb: &str, path: &StorePath, e: Errno) -> StoreError {
        let failure = StoreError::system(self.what(verb, path), e);
        match failure.code() {
            Code::NotDirectory => failure
                .cure("a component is a symbolic link or no directory: Forebay follows no links in a store"),
            Code::NoSpace => {
                failure.cure("free space or raise the quota there; Forebay keeps the data until then")
            }
            Code::AccessDenied => failure.cure("let the user who runs Forebay write there"),
            Code::ReadOnly => failure.cure("attach the store with --read-only"),
            Code::NotPermitted => failure.cure("owners and devices need root, on NFS without root_squash"),
            _ => failure,
        }
    }

    /// Sets attributes of a new object, and returns its version.
    fn finish_new(&self, at: At<'_>, attributes: &Attributes) -> Result<StoreVersion, Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = retried(|| rustix::fs::openat(at.directory, at.name, flags, Mode::empty()))?;
        let created = retried(|| rustix::fs::fstat(&fd))?;
        let stat = self.set_new(Handle { fd: fd.as_fd(), is_path: true }, &created, attributes)?;
        Ok(version_of(&stat))
    }

    /// Sets attributes of a new object, which has those of `created`; returns what it has then.
    fn set_new(&self, handle: Handle<'_>, created: &Stat, attributes: &Attributes) -> Result<Stat, Errno> {
        apply(handle, created, attributes, IsNew(true), self.is_root, &self.lost)?;
        retried(|| rustix::fs::fstat(handle.fd))
    }

    fn set(&self, handle: Handle<'_>, attributes: &Attributes) -> Result<StoreVersion, Errno> {
        let stat = retried(|| rustix::fs::fstat(handle.fd))?;
        apply(handle, &stat, attributes, IsNew(false), self.is_root, &self.lost)?;
        Ok(version_of(&retried(|| rustix::fs::fstat(handle.fd))?))
    }

    /// Opens a file for reading without waiting for a FIFO's writer, and without changing its access time if possible.
    fn open_file(&self, path: &StorePath) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        match self.root.open(path, flags | OFlags::NOATIME) {
            Err(Errno::PERM) => self.root.open(path, flags),
            other => other,
        }
    }

    fn fill(&self, fd: BorrowedFd<'_>, source: &dyn Source) -> Result<(), CopyFailure> {
        let bytes = source.bytes();
        let end = copy(source, 0..bytes, fd, Holes::Skip, &self.copying)?;
        if end != bytes {
            retried(|| rustix::fs::ftruncate(fd, bytes)).map_err(CopyFailure::Destination)?;
        }
        Ok(())
    }

    fn upload_failure(&self, temporary: &StorePath, failure: CopyFailure) -> StoreError {
        match failure {
            CopyFailure::Source(code) => StoreError::of_pool(
                code,
                format!("cannot read the pool's copy for {}/{temporary}", self.title),
            ),
            CopyFailure::Destination(e) => self.failed("upload", temporary, e),
        }
    }
}

impl Store for PosixStore {
    fn title(&self) -> String {
        self.title.clone()
    }

    fn abilities(&self) -> Abilities {
        let links = self.names.links.load(Ordering::Relaxed);
        let no_replace = self.names.no_replace.load(Ordering::Relaxed);
        Abilities {
            rename: true,
            rename_directory: true,
            hard_links: links,
            symbolic_links: true,
            nodes: true,
            modes: true,
            owners: true,
            times: true,
            extended_attributes: self.keeps_xattrs,
            conditional_publish: links || no_replace,
            holes: true,
            parts: true,
            raw_names: true,
        }
    }

    fn warnings(&self) -> Warnings {
        self.lost.warnings()
    }

    fn is_current(&self) -> bool {
        match retried(|| rustix::fs::stat(&self.path)) {
            Ok(there) => self.look(&StorePath::root()).is_ok_and(|opened| {
                opened.is_some_and(|opened| opened.version.ino == there.st_ino && self.device == there.st_dev)
            }),
            // The calls that follow tell what else is wrong.
            Err(e) => !matches!(e, Errno::NOENT | Errno::NOTDIR | Errno::STALE),
        }
    }

    fn directory(&self) -> StoreDirectory {
        self.directory
    }

    fn temporaries(&self) -> &Temporaries {
        &self.temporaries
    }

    fn list(
        &self,
        directory: &StorePath,
        each: &mut dyn FnMut(Object) -> StoreResult<()>,
    ) -> StoreResult<Listing> {
        self.list_directory(directory, each)
    }

    fn look(&self, path: &StorePath) -> StoreResult<Option<Object>> {
        let failed = |e| self.failed("look at", path, e);
        if path.is_root() {
            let directory = self.root.directory(path).map_err(failed)?;
            let found = look(At { directory: directory.as_fd(), name: b"." }).map_err(failed)?;
            return Ok(found.map(|object| self.told(Object { name: Vec::new(), ..object })));
        }
        match self.root.place(path) {
            Ok(place) => Ok(look(place.at()).map_err(failed)?.map(|object| self.told(object))),
            Err(Errno::NOENT) => Ok(None),
            Err(e) => Err(failed(e)),
        }
    }

    fn read(
        &self,
        path: &StorePath,
        expected: &StoreVersion,
        range: Range<u64>,
        into: BorrowedFd<'_>,
    ) -> StoreResult<()> {
        let failed = |e| self.failed("read", path, e);
        let stale = || {
            StoreError::lasting(Code::Stale, self.what("read", path))
                .why("the file in the store is no longer the version that Forebay knows")
        };
        if range.start > range.end || range.end > expected.bytes {
            return Err(StoreError::lasting(Code::Invalid, self.what("read", path))
                .why("the range is beyond its end"));
        }
        let is_part = range.end - range.start < expected.bytes;
        let is_expected = |fd: &Arc<OwnedFd>| State::of(fd, true).is_ok_and(|state| state.is(expected));
        let known = if is_part { self.sources.get(path).filter(is_expected) } else { None };
        let fd = match known {
            Some(fd) => fd,
            None => match self.open_file(path) {
                Err(Errno::NOENT | Errno::NOTDIR | Errno::NXIO) => return Err(stale()),
                Ok(opened) if is_part => self.sources.put(path, opened),
                opened => Arc::new(opened.map_err(failed)?),
            },
        };
        let check = |asks_server: bool| {
            let state = State::of(&fd, asks_server).map_err(failed)?;
            if state.is(expected) {
                Ok(state.is_dense)
            } else {
                Err(stale())
            }
        };
        let source = File { fd: fd.as_fd(), bytes: expected.bytes, is_dense: check(false)? };
        let copied = copy(&source, range, into, Holes::Punch, &self.copying);
        // Checked first: a file that became shorter is not an error of the medium.
        check(is_part)?;
        copied.map(drop).map_err(|failure| match failure {
            CopyFailure::Source(Code::Stale) => stale(),
            CopyFailure::Source(code) => StoreError::lasting(code, self.what("read", path)),
            CopyFailure::Destination(e) => {
                let what = format!("cannot write the pool's copy of {}/{path}", self.title);
                StoreError { is_transient: false, is_of_pool: true, ..StoreError::system(what, e) }
            }
        })
    }

    fn has_slow_names(&self) -> bool {
        self.names.are_slow()
    }

    fn make_upload_directories(&self, directory: &StorePath, uploads: usize) -> Vec<StorePath> {
        self.make_uploads_apart(directory, uploads)
    }

    fn remove_upload_directories(&self, directories: &[StorePath]) {
        self.remove_uploads_apart(directories);
    }

    fn upload(
        &self,
        temporary: &StorePath,
        source: &dyn Source,
        attributes: &Attributes,
    ) -> StoreResult<StoreVersion> {
        let failed = |e| self.failed("upload", temporary, e);
        let fd = self.root.create(temporary, OFlags::WRONLY, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        // Before the copy: a file system that asks its server for attributes has them now, and not after a write.
        let created = retried(|| rustix::fs::fstat(&fd)).map_err(failed);
        let finished = created.and_then(|created| {
            let filled = self.fill(fd.as_fd(), source);
            filled.map_err(|failure| self.upload_failure(temporary, failure))?;
            let handle = Handle { fd: fd.as_fd(), is_path: false };
            let set = self.set_new(handle, &created, attributes).and_then(|stat| {
                self.durability.uploaded(fd.as_fd(), stat.st_dev)?;
                Ok(version_of(&stat))
            });
            set.map_err(failed)
        });
        if finished.is_err() {
            if let Ok(place) = self.root.place(temporary) {
                let _ = unlink(place.at());
            }
        }
        finished
    }

    fn begin_parts(&self, temporary: &StorePath, bytes: u64) -> StoreResult<()> {
        self.make_empty(temporary, bytes).map_err(|e| self.failed("upload", temporary, e))
    }

    fn write_part(&self, temporary: &StorePath, source: &dyn Source) -> StoreResult<()> {
        let written = self.fill_part(temporary, source);
        written.map_err(|failure| self.upload_failure(temporary, failure))
    }

    fn end_parts(&self, temporary: &StorePath, attributes: &Attributes) -> StoreResult<StoreVersion> {
        self.finish_parts(temporary, attributes).map_err(|e| self.failed("upload", temporary, e))
    }

    fn make_durable(&self, temporaries: &[StorePath]) -> StoreResult<()> {
        self.durability.make_durable(&self.root, temporaries).map_err(|(path, e)| {
            let root = StorePath::root();
            self.failed("sync", path.unwrap_or(&root), e)
        })
    }

    fn publish(
        &self,
        temporary: &StorePath,
        to: &StorePath,
        expected: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        let failed = |e| self.failed("publish", to, e);
        let from = self.root.place(temporary).map_err(|e| self.failed("find", temporary, e))?;
        let upload = stat(from.at()).map_err(|e| {
            if e == Errno::NOENT {
                tracing::warn!("{}/{temporary} was removed before it was published", self.title);
            }
            self.failed("find", temporary, e)
        })?;
        if Kind::from_mode(upload.st_mode) == Some(Kind::Directory) {
            return Err(failed(Errno::ISDIR));
        }
        let version = version_of(&upload);
        // Nearly always in the directory of the upload.
        let place = match (temporary.split(), to.split()) {
            (Some((same, _)), Some((directory, name))) if same == directory => {
                Place { directory: Directory::Borrowed(from.directory.as_fd()), name }
            }
            _ => self.root.place(to).map_err(failed)?,
        };
        let Some(expected) = expected else {
            if self.names.put_new(from.at(), place.at(), false).map_err(failed)? {
                return Ok(Outcome::Done(version));
            }
            return Ok(Outcome::conflict(look(place.at()).map_err(failed)?));
        };
        let found = look(place.at()).map_err(failed)?;
        if found.as_ref().map(|object| object.version) != Some(*expected) {
            return Ok(Outcome::conflict(found));
        }
        let replaced = self
            .names
            .replace(&self.temporaries, (from.at(), &version), (place.at(), expected))
            .map_err(failed)?;
        match replaced {
            Replaced::Yes => Ok(Outcome::Done(version)),
            Replaced::Conflict => Ok(Outcome::conflict(look(place.at()).map_err(failed)?)),
        }
    }

    fn rename(
        &self,
        from: &StorePath,
        version: &StoreVersion,
        to: &StorePath,
        replaced: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.rename_object(from, version, to, replaced)
    }

    fn remove(&self, path: &StorePath, expected: &StoreVersion) -> StoreResult<Outcome<()>> {
        let failed = |e| self.failed("remove", path, e);
        let place = match self.root.place(path) {
            Err(Errno::NOENT) => return Ok(Outcome::Conflict(None)),
            other => other.map_err(failed)?,
        };
        let found = look(place.at()).map_err(failed)?;
        if found.as_ref().map(|object| object.version) != Some(*expected) {
            return Ok(Outcome::conflict(found));
        }
        if found.is_some_and(|object| object.kind == Kind::Directory) {
            return Err(failed(Errno::ISDIR));
        }
        match self.names.put_aside(&self.temporaries, place.at(), expected, None).map_err(failed)? {
            Some(aside) => aside.remove().map(Outcome::Done).map_err(failed),
            None => Ok(Outcome::conflict(look(place.at()).map_err(failed)?)),
        }
    }

    fn discard(&self, temporary: &StorePath) -> StoreResult<()> {
        let own = temporary.name().and_then(TemporaryName::parse);
        if own.is_none_or(|name| name.mover != self.temporaries.mover().as_str()) {
            return Err(
                StoreError::lasting(Code::Invalid, self.what("discard", temporary)).why("not a temporary")
            );
        }
        let place = match self.root.place(temporary) {
            Err(Errno::NOENT) => return Ok(()),
            other => other.map_err(|e| self.failed("discard", temporary, e))?,
        };
        match unlink(place.at()) {
            Err(Errno::NOENT) => Ok(()),
            other => other.map_err(|e| self.failed("discard", temporary, e)),
        }
    }

    fn make_directory(&self, path: &StorePath, attributes: &Attributes) -> StoreResult<Outcome<Object>> {
        self.make_directory_at(path, attributes)
    }

    fn remove_directory(
        &self,
        path: &StorePath,
        is_alive: &dyn Fn(&str) -> bool,
    ) -> StoreResult<DirectoryRemoval> {
        self.remove_directory_at(path, is_alive)
    }

    fn link(
        &self,
        existing: &StorePath,
        version: &StoreVersion,
        new: &StorePath,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.link_object(existing, version, new)
    }

    fn make_symlink(
        &self,
        path: &StorePath,
        target: &[u8],
        attributes: &Attributes,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.make(path, attributes, |at| retried(|| rustix::fs::symlinkat(target, at.directory, at.name)))
    }

    fn make_node(
        &self,
        path: &StorePath,
        kind: Kind,
        rdev: u64,
        attributes: &Attributes,
    ) -> StoreResult<Outcome<StoreVersion>> {
        let file_type = rustix::fs::FileType::from_raw_mode(kind.mode_bits());
        if !matches!(kind, Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice) {
            return Err(StoreError::lasting(Code::Invalid, self.what("make", path)).why("not a kind of node"));
        }
        let mode = Mode::RUSR | Mode::WUSR;
        self.make(path, attributes, |at| {
            retried(|| rustix::fs::mknodat(at.directory, at.name, file_type, mode, rdev))
        })
    }

    fn set_attributes(
        &self,
        path: &StorePath,
        expected: &StoreVersion,
        attributes: &Attributes,
    ) -> StoreResult<Outcome<StoreVersion>> {
        let failed = |e| self.failed("set attributes of", path, e);
        let fd = match self.root.open(path, OFlags::PATH) {
            Err(Errno::NOENT) => return Ok(Outcome::Conflict(None)),
            other => other.map_err(failed)?,
        };
        let found = retried(|| rustix::fs::fstat(&fd)).map_err(failed)?;
        if version_of(&found) != *expected {
            return Ok(Outcome::conflict(self.look(path)?));
        }
        let handle = Handle { fd: fd.as_fd(), is_path: true };
        self.set(handle, attributes).map(Outcome::Done).map_err(failed)
    }

    fn xattrs(&self, path: &StorePath) -> StoreResult<Xattrs> {
        let failed = |e| self.failed("read extended attributes of", path, e);
        let fd = self.root.open(path, OFlags::PATH).map_err(failed)?;
        let mode = retried(|| rustix::fs::fstat(&fd)).map_err(failed)?.st_mode;
        if !matches!(Kind::from_mode(mode), Some(Kind::File | Kind::Directory)) {
            return Ok(Xattrs::new());
        }
        apply::xattrs(Handle { fd: fd.as_fd(), is_path: true }).map_err(failed)
    }

    fn sync_directory(&self, directory: &StorePath) -> StoreResult<()> {
        let failed = |e| self.failed("sync", directory, e);
        let fd = self.root.open(directory, OFlags::RDONLY | OFlags::DIRECTORY).map_err(failed)?;
        durable::sync(fd.as_fd()).map_err(failed)
    }

    fn sync_all_directories(&self) -> bool {
        self.durability.sync_all_directories(&self.root)
    }

    fn remove_leftovers(
        &self,
        directory: &StorePath,
        is_alive: &dyn Fn(&str) -> bool,
    ) -> StoreResult<Leftovers> {
        self.sweep(directory, is_alive)
    }
}
