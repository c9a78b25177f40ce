//! A store with limits: of bytes per second, and of calls at a time; and, to model a slow store, of latency.
//!
//! All threads share the limits. The limit of calls adapts to the store ([`Gate`]). A call waits for its turn for a
//! limited time, so that calls which hang do not make all others hang: these fail with a transient error. The bytes of
//! all reads and uploads pass one bucket ([`Bucket`]) in pieces. One leaf mutex each, held for arithmetic only. Tests:
//! beside the modules; `tests/stores` runs the suite of all stores through this wrapper.

mod bucket;
mod gate;

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use forebay_types::{Code, Kind, StoreVersion};

pub use self::bucket::Bucket;
use self::gate::Sort;
pub use self::gate::{Gate, GateLimits};
use super::attributes::{
    Abilities, Attributes, DirectoryRemoval, Leftovers, Listing, Object, Outcome, Warnings, Xattrs,
};
use super::error::StoreResult;
use super::path::StorePath;
use super::posix::StoreDirectory;
use super::source::Source;
use super::temporary::Temporaries;
use super::Store;

/// Objects of a listing that cost one latency: a page of an object store.
const PAGE_OBJECTS: u64 = 1000;

/// Limits of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Limits {
    /// Bytes per second of reads and uploads together; 0: no limit.
    pub bytes_per_second: u64,
    /// Time that each call takes in addition; a model of a distant store.
    pub latency: Duration,
    /// Calls at a time.
    pub calls: GateLimits,
}

impl Limits {
    /// One node's share, when this many nodes use the store: an equal part of the rate and of the calls.
    pub fn share_of(self, nodes: u64) -> Limits {
        let nodes = nodes.max(1);
        let bytes_per_second = match self.bytes_per_second {
            0 => 0,
            rate => (rate / nodes).max(1),
        };
        let share = |calls: usize| (calls / usize::try_from(nodes).unwrap_or(usize::MAX)).max(1);
        let calls = GateLimits { least: share(self.calls.least), most: share(self.calls.most), ..self.calls };
        Limits { bytes_per_second, calls, ..self }
    }
}

/// A store with limits.
pub struct Limited {
    inner: Arc<dyn Store>,
    latency: Duration,
    gate: Gate,
    bucket: Bucket,
}

impl Limited {
    /// Wraps a store.
    pub fn new(inner: Arc<dyn Store>, limits: Limits) -> Limited {
        let gate = Gate::new(limits.calls);
        if inner.has_slow_names() {
            gate.begin_distant();
        }
        Limited { inner, latency: limits.latency, gate, bucket: Bucket::new(limits.bytes_per_second) }
    }

    /// Changes the rate, e.g. because other nodes take or leave their share; 0: no limit.
    pub fn set_rate(&self, bytes_per_second: u64) {
        self.bucket.set_rate(bytes_per_second);
    }

    /// The number of calls that may run at a time now.
    pub fn parallelism(&self) -> usize {
        self.gate.limit()
    }

    /// The number of large files that may be uploaded at a time now.
    pub fn large_uploads(&self) -> usize {
        self.gate.large_limit()
    }

    /// The same at most, whatever the gate learns.
    pub fn large_uploads_max(&self) -> usize {
        self.gate.large_limit_max()
    }

    /// Lets so many large files be uploaded at a time, if the bounds allow that.
    pub fn admit_large_uploads(&self, files: usize) {
        self.gate.admit_large(files);
    }

    /// The bytes that all uploads of large files so far have read.
    pub fn large_bytes(&self) -> u64 {
        self.gate.moved()
    }

    /// True if its calls take at least so long, as far as is known: a server has to answer each.
    pub fn answers_after(&self, time: Duration) -> bool {
        self.gate.takes_at_least(time)
    }

    /// One call that moves `bytes`.
    fn call<T>(&self, sort: Sort, bytes: u64, call: impl FnOnce() -> StoreResult<T>) -> StoreResult<T> {
        let permit = self.gate.enter(sort, || self.inner.title())?;
        self.wait_latency();
        let result = call();
        permit.leave(bytes, result.as_ref().err());
        result
    }

    /// What is uploaded, with its limits.
    fn paced<'a>(&'a self, source: &'a dyn Source) -> (Sort, Paced<'a>) {
        let sort = Sort::of_upload(source.bytes());
        let gate = (sort == Sort::LargeUpload).then_some(&self.gate);
        (sort, Paced { inner: source, bucket: &self.bucket, gate })
    }

    fn wait_latency(&self) {
        if !self.latency.is_zero() {
            std::thread::sleep(self.latency);
        }
    }
}

/// A source whose bytes pass a bucket.
struct Paced<'a> {
    inner: &'a dyn Source,
    bucket: &'a Bucket,
    /// Where it is a large upload.
    gate: Option<&'a Gate>,
}

impl Source for Paced<'_> {
    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn next_data(&self, within: Range<u64>) -> Result<Option<Range<u64>>, Code> {
        self.inner.next_data(within)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
        let piece = buffer.len().min(self.bucket.piece_bytes() as usize);
        let read = self.inner.read_at(&mut buffer[..piece], offset)?;
        self.bucket.take(read as u64);
        if let Some(gate) = self.gate {
            gate.note_moved(read as u64);
        }
        Ok(read)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        // The kernel's own copy passes no bucket.
        if self.bucket.is_unlimited() {
            self.inner.descriptor()
        } else {
            None
        }
    }
}

impl Store for Limited {
    fn title(&self) -> String {
        self.inner.title()
    }

    fn abilities(&self) -> Abilities {
        self.inner.abilities()
    }

    fn warnings(&self) -> Warnings {
        self.inner.warnings()
    }

    fn is_current(&self) -> bool {
        self.inner.is_current()
    }

    fn directory(&self) -> StoreDirectory {
        self.inner.directory()
    }

    fn temporaries(&self) -> &Temporaries {
        self.inner.temporaries()
    }

    fn list(
        &self,
        directory: &StorePath,
        each: &mut dyn FnMut(Object) -> StoreResult<()>,
    ) -> StoreResult<Listing> {
        let mut objects = 0;
        self.call(Sort::Other, 0, || {
            self.inner.list(directory, &mut |object| {
                objects += 1;
                if objects % PAGE_OBJECTS == 0 {
                    self.wait_latency();
                }
                each(object)
            })
        })
    }

    fn look(&self, path: &StorePath) -> StoreResult<Option<Object>> {
        self.call(Sort::Look, 0, || self.inner.look(path))
    }

    fn read(
        &self,
        path: &StorePath,
        expected: &StoreVersion,
        range: Range<u64>,
        into: BorrowedFd<'_>,
    ) -> StoreResult<()> {
        self.call(Sort::Read, range.end.saturating_sub(range.start), || {
            if self.bucket.is_unlimited() || range.is_empty() {
                return self.inner.read(path, expected, range.clone(), into);
            }
            let mut at = range.start;
            while at < range.end {
                let piece = at..range.end.min(at + self.bucket.piece_bytes());
                self.bucket.take(piece.end - at);
                at = piece.end;
                self.inner.read(path, expected, piece, into)?;
            }
            Ok(())
        })
    }

    fn has_slow_names(&self) -> bool {
        self.inner.has_slow_names()
    }

    fn make_upload_directories(&self, directory: &StorePath, uploads: usize) -> Vec<StorePath> {
        let make = || Ok(self.inner.make_upload_directories(directory, uploads));
        self.call(Sort::UploadDirectories, 0, make).unwrap_or_default()
    }

    fn remove_upload_directories(&self, directories: &[StorePath]) {
        // Without a turn they are leftovers.
        let _ = self.call(Sort::UploadDirectories, 0, || {
            self.inner.remove_upload_directories(directories);
            Ok(())
        });
    }

    fn upload(
        &self,
        temporary: &StorePath,
        source: &dyn Source,
        attributes: &Attributes,
    ) -> StoreResult<StoreVersion> {
        let (sort, paced) = self.paced(source);
        self.call(sort, source.bytes(), || self.inner.upload(temporary, &paced, attributes))
    }

    fn begin_parts(&self, temporary: &StorePath, bytes: u64) -> StoreResult<()> {
        self.call(Sort::Name, 0, || self.inner.begin_parts(temporary, bytes))
    }

    fn write_part(&self, temporary: &StorePath, source: &dyn Source) -> StoreResult<()> {
        let (sort, paced) = self.paced(source);
        self.call(sort, source.bytes(), || self.inner.write_part(temporary, &paced))
    }

    fn end_parts(&self, temporary: &StorePath, attributes: &Attributes) -> StoreResult<StoreVersion> {
        self.call(Sort::Name, 0, || self.inner.end_parts(temporary, attributes))
    }

    fn make_durable(&self, temporaries: &[StorePath]) -> StoreResult<()> {
        self.call(Sort::MakeDurable, 0, || self.inner.make_durable(temporaries))
    }

    fn publish(
        &self,
        temporary: &StorePath,
        to: &StorePath,
        expected: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.call(Sort::Name, 0, || self.inner.publish(temporary, to, expected))
    }

    fn rename(
        &self,
        from: &StorePath,
        version: &StoreVersion,
        to: &StorePath,
        replaced: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.call(Sort::Name, 0, || self.inner.rename(from, version, to, replaced))
    }

    fn copy(
        &self,
        from: &StorePath,
        version: &StoreVersion,
        to: &StorePath,
        replaced: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.call(Sort::Other, 0, || self.inner.copy(from, version, to, replaced))
    }

    fn remove(&self, path: &StorePath, expected: &StoreVersion) -> StoreResult<Outcome<()>> {
        self.call(Sort::Name, 0, || self.inner.remove(path, expected))
    }

    fn discard(&self, temporary: &StorePath) -> StoreResult<()> {
        self.call(Sort::Name, 0, || self.inner.discard(temporary))
    }

    fn make_directory(&self, path: &StorePath, attributes: &Attributes) -> StoreResult<Outcome<Object>> {
        self.call(Sort::Name, 0, || self.inner.make_directory(path, attributes))
    }

    fn remove_directory(
        &self,
        path: &StorePath,
        is_alive: &dyn Fn(&str) -> bool,
    ) -> StoreResult<DirectoryRemoval> {
        self.call(Sort::Name, 0, || self.inner.remove_directory(path, is_alive))
    }

    fn link(
        &self,
        existing: &StorePath,
        version: &StoreVersion,
        new: &StorePath,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.call(Sort::Name, 0, || self.inner.link(existing, version, new))
    }

    fn make_symlink(
        &self,
        path: &StorePath,
        target: &[u8],
        attributes: &Attributes,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.call(Sort::Name, 0, || self.inner.make_symlink(path, target, attributes))
    }

    fn make_node(
        &self,
        path: &StorePath,
        kind: Kind,
        rdev: u64,
        attributes: &Attributes,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.call(Sort::Name, 0, || self.inner.make_node(path, kind, rdev, attributes))
    }

    fn set_attributes(
        &self,
        path: &StorePath,
        expected: &StoreVersion,
        attributes: &Attributes,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.call(Sort::Name, 0, || self.inner.set_attributes(path, expected, attributes))
    }

    fn xattrs(&self, path: &StorePath) -> StoreResult<Xattrs> {
        self.call(Sort::Look, 0, || self.inner.xattrs(path))
    }

    fn sync_directory(&self, directory: &StorePath) -> StoreResult<()> {
        self.call(Sort::MakeDurable, 0, || self.inner.sync_directory(directory))
    }

    fn sync_all_directories(&self) -> bool {
        self.call(Sort::MakeDurable, 0, || Ok(self.inner.sync_all_directories())).unwrap_or(false)
    }

    fn remove_leftovers(
        &self,
        directory: &StorePath,
        is_alive: &dyn Fn(&str) -> bool,
    ) -> StoreResult<Leftovers> {
        self.call(Sort::Other, 0, || self.inner.remove_leftovers(directory, is_alive))
    }
}
