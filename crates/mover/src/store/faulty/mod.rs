//! A store that fails on purpose, for tests: scripted through [`Faults`], or at random from a seed.
//!
//! A fault is decided per call. `Late` and `Torn` let the call take effect although it reports a failure, as a store
//! does whose answer is lost. Threads of late calls are joined by [`Faults::wait_late`]. Tests: `tests/stores`.

mod script;

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use forebay_types::{Code, Kind, StoreVersion};

pub use self::script::{Call, Fault, Faults};
use super::attributes::{
    Abilities, Attributes, DirectoryRemoval, Leftovers, Listing, Object, Outcome, Warnings, Xattrs,
};
use super::error::{StoreError, StoreResult};
use super::path::StorePath;
use super::posix::StoreDirectory;
use super::source::Source;
use super::temporary::Temporaries;
use super::Store;

/// A store with faults.
pub struct Faulty {
    inner: Arc<dyn Store>,
    faults: Faults,
}

impl Faulty {
    /// Wraps a store. The handle stays usable for scripting.
    pub fn new(inner: Arc<dyn Store>, faults: Faults) -> Faulty {
        Faulty { inner, faults }
    }

    /// A call that has no way to take effect late.
    fn call<T>(&self, call: Call, run: impl FnOnce() -> StoreResult<T>) -> StoreResult<T> {
        match self.faults.next(call) {
            None => run(),
            Some(fault) => self.fail(fault, run),
        }
    }

    fn fail<T>(&self, fault: Fault, run: impl FnOnce() -> StoreResult<T>) -> StoreResult<T> {
        let what = format!("cannot call the store {}", self.inner.title());
        Err(match fault {
            Fault::Slow(time) => {
                std::thread::sleep(time);
                return run();
            }
            // A stalled call has waited already.
            Fault::Stall | Fault::Truncate(_) => return run(),
            Fault::Unavailable | Fault::Torn(_) => {
                StoreError::transient(Code::Busy, what).why("503 Service Unavailable")
            }
            Fault::Late(_) => StoreError::transient(Code::TimedOut, what).why("no answer in time"),
            // The answer is lost, after the effect.
            Fault::AnswerLost => match run() {
                Ok(_) => StoreError::transient(Code::TimedOut, what).why("no answer in time"),
                Err(e) => e,
            },
            Fault::NoCredentials => StoreError::lasting(Code::AccessDenied, what)
                .why("the credentials are not valid")
                .cure("renew the credentials"),
            Fault::Full => StoreError::lasting(Code::NoSpace, what).why("no space left"),
            Fault::Fail(code) => StoreError::lasting(code, what).why("injected"),
        })
    }

    /// A call that may take effect after it has reported a time-out.
    fn late_call<T>(
        &self,
        call: Call,
        run: impl FnOnce(&dyn Store) -> StoreResult<T> + Send + 'static,
    ) -> StoreResult<T> {
        match self.faults.next(call) {
            None => run(&*self.inner),
            Some(Fault::Late(after)) => {
                let inner = self.inner.clone();
                self.faults.later(after, move || drop(run(&*inner)));
                self.fail(Fault::Late(after), || unreachable!("a late call reports a time-out"))
            }
            Some(fault) => self.fail(fault, || run(&*self.inner)),
        }
    }
}

/// The first bytes of a source.
struct Truncated<'a> {
    inner: &'a dyn Source,
    bytes: u64,
}

impl Source for Truncated<'_> {
    fn bytes(&self) -> u64 {
        self.bytes.min(self.inner.bytes())
    }

    fn next_data(&self, within: Range<u64>) -> Result<Option<Range<u64>>, Code> {
        self.inner.next_data(within)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
        let left = self.bytes().saturating_sub(offset).min(buffer.len() as u64) as usize;
        self.inner.read_at(&mut buffer[..left], offset)
    }
}

/// A copy of a source, for an upload that lands after its caller has gone on.
struct Kept(Vec<u8>);

impl Kept {
    fn of(source: &dyn Source) -> Result<Kept, Code> {
        let mut bytes = vec![0; source.bytes() as usize];
        let mut at = 0;
        while at < bytes.len() {
            match source.read_at(&mut bytes[at..], at as u64)? {
                0 => break,
                read => at += read,
            }
        }
        Ok(Kept(bytes))
    }
}

impl Source for Kept {
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

impl Store for Faulty {
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

    fn has_slow_names(&self) -> bool {
        self.inner.has_slow_names()
    }

    fn make_upload_directories(&self, directory: &StorePath, uploads: usize) -> Vec<StorePath> {
        self.inner.make_upload_directories(directory, uploads)
    }

    fn remove_upload_directories(&self, directories: &[StorePath]) {
        self.inner.remove_upload_directories(directories);
    }

    fn list(
        &self,
        directory: &StorePath,
        each: &mut dyn FnMut(Object) -> StoreResult<()>,
    ) -> StoreResult<Listing> {
        self.call(Call::List, || self.inner.list(directory, each))
    }

    fn look(&self, path: &StorePath) -> StoreResult<Option<Object>> {
        self.call(Call::Look, || self.inner.look(path))
    }

    fn read(
        &self,
        path: &StorePath,
        expected: &StoreVersion,
        range: Range<u64>,
        into: BorrowedFd<'_>,
    ) -> StoreResult<()> {
        self.call(Call::Read, || self.inner.read(path, expected, range, into))
    }

    fn upload(
        &self,
        temporary: &StorePath,
        source: &dyn Source,
        attributes: &Attributes,
    ) -> StoreResult<StoreVersion> {
        match self.faults.next(Call::Upload) {
            None => self.inner.upload(temporary, source, attributes),
            Some(fault @ Fault::Late(after)) => {
                let kept =
                    Kept::of(source).map_err(|code| StoreError::lasting(code, "cannot read the source"))?;
                let (inner, temporary, attributes) =
                    (self.inner.clone(), temporary.clone(), attributes.clone());
                self.faults.later(after, move || drop(inner.upload(&temporary, &kept, &attributes)));
                self.fail(fault, || unreachable!("a late call reports a time-out"))
            }
            Some(Fault::Truncate(bytes)) => {
                self.inner.upload(temporary, &Truncated { inner: source, bytes }, attributes)
            }
            Some(fault @ Fault::Torn(bytes)) => {
                self.inner.upload(temporary, &Truncated { inner: source, bytes }, attributes)?;
                self.fail(fault, || unreachable!("a torn upload reports a failure"))
            }
            Some(fault) => self.fail(fault, || self.inner.upload(temporary, source, attributes)),
        }
    }

    fn begin_parts(&self, temporary: &StorePath, bytes: u64) -> StoreResult<()> {
        self.call(Call::Upload, || self.inner.begin_parts(temporary, bytes))
    }

    fn write_part(&self, temporary: &StorePath, source: &dyn Source) -> StoreResult<()> {
        self.call(Call::Upload, || self.inner.write_part(temporary, source))
    }

    fn end_parts(&self, temporary: &StorePath, attributes: &Attributes) -> StoreResult<StoreVersion> {
        self.call(Call::Upload, || self.inner.end_parts(temporary, attributes))
    }

    fn make_durable(&self, temporaries: &[StorePath]) -> StoreResult<()> {
        self.call(Call::MakeDurable, || self.inner.make_durable(temporaries))
    }

    fn publish(
        &self,
        temporary: &StorePath,
        to: &StorePath,
        expected: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        let (temporary, to, expected) = (temporary.clone(), to.clone(), expected.copied());
        self.late_call(Call::Publish, move |store| store.publish(&temporary, &to, expected.as_ref()))
    }

    fn rename(
        &self,
        from: &StorePath,
        version: &StoreVersion,
        to: &StorePath,
        replaced: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        let (from, version, to, replaced) = (from.clone(), *version, to.clone(), replaced.copied());
        self.late_call(Call::Rename, move |store| store.rename(&from, &version, &to, replaced.as_ref()))
    }

    fn copy(
        &self,
        from: &StorePath,
        version: &StoreVersion,
        to: &StorePath,
        replaced: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.call(Call::Rename, || self.inner.copy(from, version, to, replaced))
    }

    fn remove(&self, path: &StorePath, expected: &StoreVersion) -> StoreResult<Outcome<()>> {
        let (path, expected) = (path.clone(), *expected);
        self.late_call(Call::Remove, move |store| store.remove(&path, &expected))
    }

    fn discard(&self, temporary: &StorePath) -> StoreResult<()> {
        self.call(Call::Discard, || self.inner.discard(temporary))
    }

    fn make_directory(&self, path: &StorePath, attributes: &Attributes) -> StoreResult<Outcome<Object>> {
        let (path, attributes) = (path.clone(), attributes.clone());
        self.late_call(Call::MakeDirectory, move |store| store.make_directory(&path, &attributes))
    }

    fn remove_directory(
        &self,
        path: &StorePath,
        is_alive: &dyn Fn(&str) -> bool,
    ) -> StoreResult<DirectoryRemoval> {
        self.call(Call::RemoveDirectory, || self.inner.remove_directory(path, is_alive))
    }

    fn link(
        &self,
        existing: &StorePath,
        version: &StoreVersion,
        new: &StorePath,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.call(Call::Link, || self.inner.link(existing, version, new))
    }

    fn make_symlink(
        &self,
        path: &StorePath,
        target: &[u8],
        attributes: &Attributes,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.call(Call::MakeOther, || self.inner.make_symlink(path, target, attributes))
    }

    fn make_node(
        &self,
        path: &StorePath,
        kind: Kind,
        rdev: u64,
        attributes: &Attributes,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.call(Call::MakeOther, || self.inner.make_node(path, kind, rdev, attributes))
    }

    fn set_attributes(
        &self,
        path: &StorePath,
        expected: &StoreVersion,
        attributes: &Attributes,
    ) -> StoreResult<Outcome<StoreVersion>> {
        let (path, expected, attributes) = (path.clone(), *expected, attributes.clone());
        self.late_call(Call::SetAttributes, move |store| store.set_attributes(&path, &expected, &attributes))
    }

    fn xattrs(&self, path: &StorePath) -> StoreResult<Xattrs> {
        self.call(Call::Look, || self.inner.xattrs(path))
    }

    fn sync_directory(&self, directory: &StorePath) -> StoreResult<()> {
        self.call(Call::SyncDirectory, || self.inner.sync_directory(directory))
    }

    fn sync_all_directories(&self) -> bool {
        self.call(Call::SyncDirectory, || Ok(self.inner.sync_all_directories())).unwrap_or(false)
    }

    fn remove_leftovers(
        &self,
        directory: &StorePath,
        is_alive: &dyn Fn(&str) -> bool,
    ) -> StoreResult<Leftovers> {
        self.call(Call::RemoveLeftovers, || self.inner.remove_leftovers(directory, is_alive))
    }
}
