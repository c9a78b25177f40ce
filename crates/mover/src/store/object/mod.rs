//! A store that is an object store, through OpenDAL: S3 and what is compatible with it.
//!
//! A file is one object. A directory is a prefix; an empty one is a marker object `dir/`. Attributes of files are user
//! metadata (`metadata`); directories have none. A temporary is published by a copy inside the store, conditional where
//! the store supports that, which is tried when it is opened (`publish`). Each upload carries a mark, its temporary
//! name, so a copy whose answer was lost is recognized, and a foreign object is never taken for the mover's.
//!
//! Threads: one runtime with two workers; each call blocks its own thread, with a time limit. No locks. Credentials come
//! from the environment, profile files or the instance, and stay inside OpenDAL. Faults survived: 503, lost answers,
//! time-outs. Assumed: strong consistency, as S3 has since 2020.
//!
//! Not done: extended attributes, hard links, nodes; attributes of objects larger than [`REWRITE_BYTES`] cannot be
//! changed, because OpenDAL's copy keeps the metadata; objects of more than 5 GiB lose their metadata when they are
//! published, for the same reason; unfinished multipart uploads of dead movers need a lifecycle rule of the bucket.
//! Tests: beside the modules, and `tests/stores` with servers of their own.

mod failures;
mod late;
mod listing;
mod metadata;
mod open;
mod publish;

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forebay_types::{Code, Kind, StoreVersion};
use opendal::{Buffer, ErrorKind, Metadata, Operator};
use tokio::runtime::Runtime;

use self::late::LateUploads;
use self::metadata::{directory, object_of, user_metadata, version_of, Marked};
pub use self::open::S3Place;
use super::attributes::{
    mark_hash, of_upload, Abilities, Attributes, DirectoryRemoval, Leftovers, Listing, Object, Outcome,
    Warnings, Xattrs,
};
use super::error::{StoreError, StoreResult};
use super::path::StorePath;
use super::source::{retried, Source};
use super::temporary::{Temporaries, TemporaryName};
use super::Store;

/// Bytes of one request for data, and of one part of an upload, unless that would make more than [`PARTS`] parts.
const PIECE_BYTES: u64 = 8 << 20;
/// Parts of one upload; S3 allows 10,000.
const PARTS: u64 = 9_000;
/// Parts of one upload that are sent at a time.
const PARTS_AT_A_TIME: usize = 4;
/// Largest object that is read and written again to change its attributes.
const REWRITE_BYTES: u64 = 64 << 20;
/// Time limit of one request without data, unless the URL has another.
const REQUEST_LIMIT: Duration = Duration::from_secs(60);
/// After this many time limits of a piece an upload whose answer did not come is removed once more.
const LATE_LIMITS: u32 = 2;

/// Time limits of requests.
#[derive(Clone, Copy, Debug)]
struct RequestLimits {
    /// One without data.
    request: Duration,
    /// One with a piece.
    piece: Duration,
    /// A copy inside the store.
    copy: Duration,
}

impl RequestLimits {
    fn of(request: Duration) -> RequestLimits {
        RequestLimits { request, piece: 2 * request, copy: 10 * request }
    }
}

/// An object store.
pub struct ObjectStore {
    title: String,
    operator: Operator,
    runtime: Runtime,
    temporaries: Temporaries,
    /// The store evaluates conditions of copies.
    is_conditional: bool,
    /// The store has etags everywhere.
    has_tags: bool,
    lost_xattrs: AtomicU64,
    limits: RequestLimits,
    late: LateUploads,
}

impl fmt::Debug for ObjectStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectStore").field("title", &self.title).finish_non_exhaustive()
    }
}

impl ObjectStore {
    fn what(&self, verb: &str, path: &StorePath) -> String {
        let slash = if path.is_root() { "" } else { "/" };
        format!("cannot {verb} {}{slash}{path}", self.title)
    }

    /// Runs a request on this thread. The outer error is the time-out.
    fn wait<T>(
        &self,
        limit: Duration,
        request: impl Future<Output = opendal::Result<T>>,
    ) -> opendal::Result<T> {
        self.runtime.block_on(async {
            match tokio::time::timeout(limit, request).await {
                Ok(result) => result,
                Err(_) => Err(failures::timed_out(limit)),
            }
        })
    }

    /// The key of a path. Names that OpenDAL would change are refused.
    fn key(&self, verb: &str, path: &StorePath) -> StoreResult<String> {
        let refused = |why| {
            StoreError::lasting(Code::NotSupported, self.what(verb, path))
                .why(why)
                .cure("rename the file, or use a directory as the store")
        };
        let key =
            std::str::from_utf8(path.as_bytes()).map_err(|_| refused("an object's name must be UTF-8"))?;
        if key.trim() != key {
            return Err(refused("an object's name cannot begin or end with white space"));
        }
        Ok(key.to_owned())
    }

    /// The metadata of an object; none if there is no object with exactly this key.
    fn stat(&self, verb: &str, path: &StorePath) -> StoreResult<Option<Metadata>> {
        let key = self.key(verb, path)?;
        match self.wait(self.limits.request, self.operator.stat(&key)) {
            Ok(metadata) => Ok(Some(metadata)),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(self.failed(verb, path, e)),
        }
    }

    fn version(&self, metadata: &Metadata) -> StoreVersion {
        version_of(metadata, self.has_tags)
    }

    /// The object of a file's metadata. The target of a symbolic link is its data.
    fn describe(&self, path: &StorePath, metadata: &Metadata) -> StoreResult<Object> {
        let name = path.name().unwrap_or_default();
        let mut object = object_of(name, metadata, self.version(metadata));
        if object.kind == Kind::Symlink {
            let key = self.key("read", path)?;
            let target = self.wait(self.limits.piece, self.operator.read(&key));
            object.link_target = target.map_err(|e| self.failed("read", path, e))?.to_vec();
        }
        Ok(object)
    }

    /// The object at a path, file or directory.
    fn find(&self, verb: &str, path: &StorePath) -> StoreResult<Option<Object>> {
        if path.is_root() {
            return Ok(Some(directory(b"")));
        }
        if let Some(metadata) = self.stat(verb, path)? {
            return self.describe(path, &metadata).map(Some);
        }
        let is_directory = self.has_directory(verb, path)?;
        Ok(is_directory.then(|| directory(path.name().unwrap_or_default())))
    }

    /// True if a key has this path as a prefix.
    fn has_directory(&self, verb: &str, path: &StorePath) -> StoreResult<bool> {
        let key = format!("{}/", self.key(verb, path)?);
        // OpenDAL looks for any key with the prefix.
        match self.wait(self.limits.request, self.operator.stat(&key)) {
            Ok(_) => Ok(true),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
            Err(e) => Err(self.failed(verb, path, e)),
        }
    }

    /// A conflict with what is at a path now.
    fn conflict<T>(&self, verb: &str, path: &StorePath) -> StoreResult<Outcome<T>> {
        Ok(Outcome::conflict(self.find(verb, path)?))
    }

    fn not_supported<T>(&self, verb: &str, path: &StorePath, why: &str) -> StoreResult<T> {
        Err(StoreError::lasting(Code::NotSupported, self.what(verb, path)).why(why))
    }

    fn send(&self, key: &str, source: &dyn Source, marked: Marked<'_>) -> Result<Metadata, SendFailure> {
        let bytes = source.bytes();
        let part = PIECE_BYTES.max(bytes.div_ceil(PARTS).next_multiple_of(1 << 20));
        let writer = self
            .operator
            .writer_with(key)
            .user_metadata(user_metadata(marked))
            .chunk(part as usize)
            .concurrent(PARTS_AT_A_TIME);
        let mut writer =
            self.wait(self.limits.request, async { writer.await }).map_err(SendFailure::Store)?;
        let mut at = 0;
        let mut sent = Ok(());
        while at < bytes && sent.is_ok() {
            let piece = read_piece(source, at, part.min(bytes - at)).map_err(SendFailure::Source);
            sent = piece.and_then(|piece| {
                at += piece.len() as u64;
                self.wait(self.limits.piece, writer.write(piece)).map_err(SendFailure::Store)
            });
        }
        let closed =
            sent.and_then(|()| self.wait(self.limits.piece, writer.close()).map_err(SendFailure::Store));
        if closed.is_err() {
            // What is left otherwise are parts, which cost space until the bucket's lifecycle rule removes them.
            let _ = self.wait(self.limits.request, writer.abort());
        }
        closed
    }
}

/// Which side of an upload failed.
enum SendFailure {
    Source(Code),
    Store(opendal::Error),
}

fn read_piece(source: &dyn Source, offset: u64, bytes: u64) -> Result<Buffer, Code> {
    let mut piece = vec![0; bytes as usize];
    let mut at = offset;
    let end = offset + bytes;
    while at < end {
        // Holes are zeros already.
        let Some(data) = source.next_data(at..end)? else { break };
        let mut from = data.start;
        while from < data.end {
            let room = &mut piece[(from - offset) as usize..(data.end - offset) as usize];
            match source.read_at(room, from)? {
                // The source is shorter than it was.
                0 => return Err(Code::Stale),
                read => from += read as u64,
            }
        }
        at = data.end;
    }
    Ok(Buffer::from(piece))
}

/// The bytes of a symbolic link's target.
struct Target<'a>(&'a [u8]);

impl Source for Target<'_> {
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn next_data(&self, within: Range<u64>) -> Result<Option<Range<u64>>, Code> {
        Ok((!within.is_empty()).then_some(within))
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
        let left = self.0.get(offset as usize..).unwrap_or_default();
        let bytes = left.len().min(buffer.len());
        buffer[..bytes].copy_from_slice(&left[..bytes]);
        Ok(bytes)
    }
}

impl ObjectStore {
    /// The failure of a request on a path.
    pub(super) fn failed(&self, verb: &str, path: &StorePath, e: opendal::Error) -> StoreError {
        failures::describe(&e, self.what(verb, path))
    }
}

impl Store for ObjectStore {
    fn title(&self) -> String {
        self.title.clone()
    }

    fn abilities(&self) -> Abilities {
        Abilities {
            rename: false,
            rename_directory: false,
            hard_links: false,
            symbolic_links: true,
            nodes: false,
            modes: true,
            owners: true,
            times: true,
            extended_attributes: false,
            conditional_publish: self.is_conditional && self.has_tags,
            holes: false,
            parts: false,
            raw_names: false,
        }
    }

    fn warnings(&self) -> Warnings {
        Warnings { xattrs: self.lost_xattrs.load(Ordering::Relaxed), ..Warnings::default() }
    }

    fn temporaries(&self) -> &Temporaries {
        &self.temporaries
    }

    fn list(
        &self,
        directory: &StorePath,
        each: &mut dyn FnMut(Object) -> StoreResult<()>,
    ) -> StoreResult<Listing> {
        self.list_prefix(directory, each)
    }

    fn look(&self, path: &StorePath) -> StoreResult<Option<Object>> {
        self.find("look at", path)
    }

    fn read(
        &self,
        path: &StorePath,
        expected: &StoreVersion,
        range: Range<u64>,
        into: BorrowedFd<'_>,
    ) -> StoreResult<()> {
        let key = self.key("read", path)?;
        if range.start > range.end || range.end > expected.bytes {
            return Err(StoreError::lasting(Code::Invalid, self.what("read", path))
                .why("the range is beyond its end"));
        }
        let check = || {
            let found = self.stat("read", path)?.filter(|found| self.version(found) == *expected);
            found.ok_or_else(|| {
                StoreError::lasting(Code::Stale, self.what("read", path))
                    .why("the object in the store is no longer the version that Forebay knows")
            })
        };
        let metadata = check()?;
        let etag = if self.has_tags { metadata.etag().map(str::to_owned) } else { None };
        let mut at = range.start;
        while at < range.end {
            let piece = at..range.end.min(at + PIECE_BYTES);
            let mut request = self.operator.read_with(&key).range(piece.clone());
            if let Some(etag) = &etag {
                request = request.if_match(etag);
            }
            let bytes = match self.wait(self.limits.piece, async { request.await }) {
                Err(e) if matches!(e.kind(), ErrorKind::ConditionNotMatch | ErrorKind::NotFound) => {
                    check()?;
                    return Err(self.failed("read", path, e));
                }
                other => other.map_err(|e| self.failed("read", path, e))?,
            };
            let mut offset = piece.start;
            for chunk in bytes {
                write_all(into, &chunk, offset).map_err(|e| {
                    let what = format!("cannot write the pool's copy of {}/{path}", self.title);
                    StoreError { is_transient: false, is_of_pool: true, ..StoreError::system(what, e) }
                })?;
                offset += chunk.len() as u64;
            }
            if offset != piece.end {
                return Err(
                    StoreError::transient(Code::Io, self.what("read", path)).why("the answer was too short")
                );
            }
            at = piece.end;
        }
        if etag.is_none() {
            check()?;
        }
        Ok(())
    }

    fn upload(
        &self,
        temporary: &StorePath,
        source: &dyn Source,
        attributes: &Attributes,
    ) -> StoreResult<StoreVersion> {
        let key = self.key("upload", temporary)?;
        for late in self.late.take_due(LATE_LIMITS * self.limits.piece) {
            let _ = self.wait(self.limits.request, self.operator.delete(&late));
        }
        if self.stat("upload", temporary)?.is_some() {
            return Err(StoreError::lasting(Code::Exists, self.what("upload", temporary)));
        }
        if attributes.xattrs.as_ref().is_some_and(|xattrs| !xattrs.is_empty()) {
            self.lost_xattrs.fetch_add(1, Ordering::Relaxed);
        }
        let marked = Marked { attributes, kind: Kind::File, mark: temporary.name().unwrap_or_default() };
        let sent = self.send(&key, source, marked).map_err(|failure| match failure {
            SendFailure::Source(code) => StoreError::lasting(
                code,
                format!("cannot read the pool's copy for {}/{temporary}", self.title),
            ),
            SendFailure::Store(e) => {
                self.late.note(&key, e.is_temporary() || e.is_persistent());
                self.failed("upload", temporary, e)
            }
        })?;
        drop(sent);
        Ok(of_upload(source.bytes(), mark_hash(marked.mark)))
    }

    fn make_durable(&self, _temporaries: &[StorePath]) -> StoreResult<()> {
        // An object whose upload was answered is durable.
        Ok(())
    }

    fn publish(
        &self,
        temporary: &StorePath,
        to: &StorePath,
        expected: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.publish_copy(temporary, to, expected)
    }

    fn rename(
        &self,
        from: &StorePath,
        version: &StoreVersion,
        to: &StorePath,
        replaced: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.rename_by_copy(from, version, to, replaced)
    }

    fn copy(
        &self,
        from: &StorePath,
        version: &StoreVersion,
        to: &StorePath,
        replaced: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.copy_object(from, version, to, replaced)
    }

    fn remove(&self, path: &StorePath, expected: &StoreVersion) -> StoreResult<Outcome<()>> {
        let key = self.key("remove", path)?;
        // OpenDAL's delete takes no condition: an object that replaces this one in the milliseconds until the delete is
        // removed. Buckets with versions keep it.
        match self.stat("remove", path)? {
            Some(found) if self.version(&found) == *expected => {}
            _ => return self.conflict("remove", path),
        }
        let deleted = self.wait(self.limits.request, self.operator.delete(&key));
        deleted.map(Outcome::Done).map_err(|e| self.failed("remove", path, e))
    }

    fn discard(&self, temporary: &StorePath) -> StoreResult<()> {
        let own = temporary.name().and_then(TemporaryName::parse);
        if own.is_none_or(|name| name.mover != self.temporaries.mover().as_str()) {
            return Err(
                StoreError::lasting(Code::Invalid, self.what("discard", temporary)).why("not a temporary")
            );
        }
        let key = self.key("discard", temporary)?;
        match self.wait(self.limits.request, self.operator.delete(&key)) {
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
            other => other.map_err(|e| self.failed("discard", temporary, e)),
        }
    }

    fn make_directory(&self, path: &StorePath, _attributes: &Attributes) -> StoreResult<Outcome<Object>> {
        let key = format!("{}/", self.key("make directory", path)?);
        if self.stat("make directory", path)?.is_some() {
            return self.conflict("make directory", path);
        }
        let made = self.wait(self.limits.request, self.operator.create_dir(&key));
        made.map_err(|e| self.failed("make directory", path, e))?;
        Ok(Outcome::Done(directory(path.name().unwrap_or_default())))
    }

    fn remove_directory(
        &self,
        path: &StorePath,
        is_alive: &dyn Fn(&str) -> bool,
    ) -> StoreResult<DirectoryRemoval> {
        self.remove_prefix(path, is_alive)
    }

    fn link(
        &self,
        existing: &StorePath,
        _version: &StoreVersion,
        _new: &StorePath,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.not_supported("link", existing, "an object store has no hard links")
    }

    fn make_symlink(
        &self,
        path: &StorePath,
        target: &[u8],
        attributes: &Attributes,
    ) -> StoreResult<Outcome<StoreVersion>> {
        let key = self.key("make", path)?;
        if self.find("make", path)?.is_some() {
            return self.conflict("make", path);
        }
        let marked = Marked { attributes, kind: Kind::Symlink, mark: path.name().unwrap_or_default() };
        match self.send(&key, &Target(target), marked) {
            Ok(_) => {}
            Err(SendFailure::Store(e)) => return Err(self.failed("make", path, e)),
            Err(SendFailure::Source(code)) => return Err(StoreError::lasting(code, self.what("make", path))),
        }
        match self.stat("make", path)? {
            Some(metadata) => Ok(Outcome::Done(self.version(&metadata))),
            None => Ok(Outcome::Conflict(None)),
        }
    }

    fn make_node(
        &self,
        path: &StorePath,
        _kind: Kind,
        _rdev: u64,
        _attributes: &Attributes,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.not_supported("make", path, "an object store has no FIFOs, sockets or devices")
    }

    fn set_attributes(
        &self,
        path: &StorePath,
        expected: &StoreVersion,
        attributes: &Attributes,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.rewrite(path, expected, attributes)
    }

    fn xattrs(&self, _path: &StorePath) -> StoreResult<Xattrs> {
        Ok(Xattrs::new())
    }

    fn sync_directory(&self, _directory: &StorePath) -> StoreResult<()> {
        Ok(())
    }

    fn remove_leftovers(
        &self,
        directory: &StorePath,
        is_alive: &dyn Fn(&str) -> bool,
    ) -> StoreResult<Leftovers> {
        self.sweep(directory, is_alive)
    }
}

fn write_all(into: BorrowedFd<'_>, mut bytes: &[u8], mut offset: u64) -> Result<(), rustix::io::Errno> {
    while !bytes.is_empty() {
        match retried(|| rustix::io::pwrite(into, bytes, offset))? {
            0 => return Err(rustix::io::Errno::IO),
            written => {
                bytes = &bytes[written..];
                offset += written as u64;
            }
        }
    }
    Ok(())
}
