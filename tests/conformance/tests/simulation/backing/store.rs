//! The backing store of a simulated pool: a directory of this machine, through the mover's own code for directories, with
//! faults. A call takes time, also between its system calls, in which other threads run and other programs change the
//! store; it fails before or after it took effect, takes effect after it was reported to have failed, or stalls.

use std::collections::BTreeSet;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_fabric::Numbers;
use forebay_mover::store::steps::with_steps;
use forebay_mover::store::{
    Abilities, Attributes, DirectoryRemoval, Leftovers, Listing, Object, Outcome, Source, Store, StoreError,
    StorePath, StoreResult, Temporaries, Warnings, Xattrs,
};
use forebay_types::{Code, Kind, StoreVersion};

use crate::baton::NOW_NS;

/// The longest that a call usually takes, and a call that stalls.
const SHORT: Duration = Duration::from_millis(20);
const STALL: Duration = Duration::from_secs(40);
/// The longest after which a call that was reported to have failed takes effect.
const LATE: Duration = Duration::from_secs(5);

/// Lets other threads run.
pub(super) fn sleep(time: Duration) {
    forebay_ring::pause(time.max(Duration::from_millis(1)));
}

/// A call that takes effect later.
type Late = (u64, Box<dyn FnOnce() + Send>);

/// What the stores of all movers share.
#[derive(Clone)]
pub(crate) struct Weather(Arc<Mutex<State>>);

struct State {
    numbers: Numbers,
    has_faults: bool,
    late: Vec<Late>,
    calls: u64,
    faults: u64,
    /// Versions that a mover has seen otherwise than as a conflict.
    seen: BTreeSet<(u64, u64)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    /// It does nothing.
    Unavailable,
    NoCredentials,
    Full,
    /// It takes effect, and its answer is lost.
    AnswerLost,
    /// It takes effect after it has failed.
    Late(u64),
    /// A part of the data is moved.
    Torn,
}

fn key(version: &StoreVersion) -> (u64, u64) {
    (version.ino, version.mtime.sec as u64 * 1_000_000_000 + u64::from(version.mtime.nsec))
}

impl Weather {
    pub(crate) fn new(seed: u64) -> Weather {
        Weather(Arc::new(Mutex::new(State {
            numbers: Numbers::new(seed),
            has_faults: true,
            late: Vec::new(),
            calls: 0,
            faults: 0,
            seen: BTreeSet::new(),
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Called by the scheduler: runs the calls that take effect now.
    pub(crate) fn turn(&self) {
        let now = NOW_NS.load(Ordering::Relaxed);
        let due: Vec<Late> = self.state().late.extract_if(.., |(at, _)| *at <= now).collect();
        due.into_iter().for_each(|(_, run)| run());
    }

    /// Ends all faults. Late calls take effect.
    pub(crate) fn clear(&self) {
        self.state().has_faults = false;
        let late = std::mem::take(&mut self.state().late);
        late.into_iter().for_each(|(_, run)| run());
    }

    /// Calls and faults so far.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let state = self.state();
        (state.calls, state.faults)
    }

    /// Whether a mover has seen a version, by inode number and modification time.
    pub(crate) fn has_seen(&self, version: (u64, u64)) -> bool {
        self.state().seen.contains(&version)
    }

    fn saw(&self, version: &StoreVersion) {
        self.state().seen.insert(key(version));
    }

    /// Time that a call takes, and its fault.
    fn next(&self, may_be_late: bool, is_data: bool) -> (Duration, Option<Fault>) {
        let mut state = self.state();
        state.calls += 1;
        let time = Duration::from_micros(state.numbers.below(SHORT.as_micros() as u64));
        if !state.has_faults || !state.numbers.chance(100) {
            return (time, None);
        }
        state.faults += 1;
        let fault = match state.numbers.below(12) {
            0 => return (Duration::from_millis(state.numbers.below(STALL.as_millis() as u64)), None),
            1..=3 => Fault::AnswerLost,
            4..=5 if may_be_late => Fault::Late(state.numbers.below(LATE.as_nanos() as u64)),
            4..=7 if is_data => Fault::Torn,
            8 => Fault::NoCredentials,
            9 if is_data => Fault::Full,
            _ => Fault::Unavailable,
        };
        (time, Some(fault))
    }
}

fn error(fault: Fault) -> StoreError {
    let what = "cannot call the simulated store";
    match fault {
        Fault::Unavailable | Fault::Torn => StoreError::transient(Code::Busy, what),
        Fault::AnswerLost | Fault::Late(_) => StoreError::transient(Code::TimedOut, what),
        Fault::NoCredentials => StoreError::lasting(Code::AccessDenied, what),
        Fault::Full => StoreError::lasting(Code::NoSpace, what),
    }
}

/// The store as one mover uses it.
pub(crate) struct Disturbed {
    inner: Arc<dyn Store>,
    weather: Weather,
}

impl Disturbed {
    pub(crate) fn new(inner: Arc<dyn Store>, weather: Weather) -> Disturbed {
        Disturbed { inner, weather }
    }

    /// Runs a call, in which other threads run.
    fn slowly<T>(&self, run: impl FnOnce() -> T) -> T {
        let weather = self.weather.clone();
        let hook = move |_| {
            let pauses = weather.state().numbers.chance(100);
            if pauses {
                sleep(Duration::from_millis(1));
            }
        };
        with_steps(hook, run).0
    }

    fn call<T>(&self, run: impl FnOnce() -> StoreResult<T>) -> StoreResult<T> {
        let (time, fault) = self.weather.next(false, false);
        sleep(time);
        match fault {
            None => self.slowly(run),
            Some(fault @ Fault::AnswerLost) => self.slowly(run).and(Err(error(fault))),
            Some(fault) => Err(error(fault)),
        }
    }

    fn late(&self, after_ns: u64, run: impl FnOnce() + Send + 'static) {
        let at = NOW_NS.load(Ordering::Relaxed) + after_ns;
        self.weather.state().late.push((at, Box::new(run)));
    }
}

/// The bytes of an upload that takes effect late, or a part of them.
struct Bytes(Vec<u8>);

impl Bytes {
    fn of(source: &dyn Source) -> Result<Bytes, Code> {
        let mut bytes = vec![0; source.bytes() as usize];
        let mut at = 0;
        while at < bytes.len() {
            match source.read_at(&mut bytes[at..], at as u64)? {
                0 => break,
                n => at += n,
            }
        }
        Ok(Bytes(bytes))
    }
}

impl Source for Bytes {
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn next_data(&self, within: Range<u64>) -> Result<Option<Range<u64>>, Code> {
        Ok((!within.is_empty()).then_some(within))
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
        let left = self.0.get(offset as usize..).unwrap_or_default();
        let n = left.len().min(buffer.len());
        buffer[..n].copy_from_slice(&left[..n]);
        Ok(n)
    }
}

impl Store for Disturbed {
    fn title(&self) -> String {
        self.inner.title()
    }

    fn abilities(&self) -> Abilities {
        self.inner.abilities()
    }

    fn warnings(&self) -> Warnings {
        self.inner.warnings()
    }

    fn temporaries(&self) -> &Temporaries {
        self.inner.temporaries()
    }

    fn list(
        &self,
        directory: &StorePath,
        each: &mut dyn FnMut(Object) -> StoreResult<()>,
    ) -> StoreResult<Listing> {
        // `each` sends requests to the pool, which take their own time.
        let mut found = Vec::new();
        let listing = self.call(|| {
            self.inner.list(directory, &mut |object| {
                found.push(object);
                Ok(())
            })
        })?;
        found.sort_by(|a: &Object, b: &Object| a.name.cmp(&b.name));
        for object in found {
            self.weather.saw(&object.version);
            each(object)?;
        }
        Ok(listing)
    }

    fn look(&self, path: &StorePath) -> StoreResult<Option<Object>> {
        let found = self.call(|| self.inner.look(path))?;
        if let Some(object) = &found {
            self.weather.saw(&object.version);
        }
        Ok(found)
    }

    fn read(
        &self,
        path: &StorePath,
        expected: &StoreVersion,
        range: Range<u64>,
        into: BorrowedFd<'_>,
    ) -> StoreResult<()> {
        let (time, fault) = self.weather.next(false, true);
        sleep(time);
        match fault {
            None => self.slowly(|| self.inner.read(path, expected, range, into)),
            Some(fault @ (Fault::AnswerLost | Fault::Torn)) => {
                let middle = range.start + (range.end - range.start) / 2;
                self.slowly(|| self.inner.read(path, expected, range.start..middle, into))?;
                Err(error(fault))
            }
            Some(fault) => Err(error(fault)),
        }
    }

    fn upload(
        &self,
        temporary: &StorePath,
        source: &dyn Source,
        attributes: &Attributes,
    ) -> StoreResult<StoreVersion> {
        let (time, fault) = self.weather.next(true, true);
        sleep(time);
        let bytes = || Bytes::of(source).map_err(|code| StoreError::lasting(code, "cannot read the source"));
        match fault {
            None => self.slowly(|| self.inner.upload(temporary, source, attributes)),
            Some(fault @ Fault::AnswerLost) => {
                self.slowly(|| self.inner.upload(temporary, source, attributes)).and(Err(error(fault)))
            }
            Some(fault @ Fault::Torn) => {
                let mut bytes = bytes()?;
                bytes.0.truncate(bytes.0.len() / 2);
                self.slowly(|| self.inner.upload(temporary, &bytes, attributes)).and(Err(error(fault)))
            }
            Some(fault @ Fault::Late(after)) => {
                let (inner, bytes) = (Arc::clone(&self.inner), bytes()?);
                let (temporary, attributes) = (temporary.clone(), attributes.clone());
                self.late(after, move || drop(inner.upload(&temporary, &bytes, &attributes)));
                Err(error(fault))
            }
            Some(fault) => Err(error(fault)),
        }
    }

    fn make_durable(&self, temporaries: &[StorePath]) -> StoreResult<()> {
        self.call(|| self.inner.make_durable(temporaries))
    }

    fn publish(
        &self,
        temporary: &StorePath,
        to: &StorePath,
        expected: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        let (time, fault) = self.weather.next(true, false);
        sleep(time);
        match fault {
            None => self.slowly(|| self.inner.publish(temporary, to, expected)),
            Some(fault @ Fault::AnswerLost) => {
                self.slowly(|| self.inner.publish(temporary, to, expected)).and(Err(error(fault)))
            }
            Some(fault @ Fault::Late(after)) => {
                let (inner, expected) = (Arc::clone(&self.inner), expected.copied());
                let (temporary, to) = (temporary.clone(), to.clone());
                self.late(after, move || drop(inner.publish(&temporary, &to, expected.as_ref())));
                Err(error(fault))
            }
            Some(fault) => Err(error(fault)),
        }
    }

    fn rename(
        &self,
        from: &StorePath,
        version: &StoreVersion,
        to: &StorePath,
        replaced: Option<&StoreVersion>,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.call(|| self.inner.rename(from, version, to, replaced))
    }

    fn remove(&self, path: &StorePath, expected: &StoreVersion) -> StoreResult<Outcome<()>> {
        self.call(|| self.inner.remove(path, expected))
    }

    fn discard(&self, temporary: &StorePath) -> StoreResult<()> {
        self.call(|| self.inner.discard(temporary))
    }

    fn make_directory(&self, path: &StorePath, attributes: &Attributes) -> StoreResult<Outcome<Object>> {
        self.call(|| self.inner.make_directory(path, attributes))
    }

    fn remove_directory(
        &self,
        path: &StorePath,
        is_alive: &dyn Fn(&str) -> bool,
    ) -> StoreResult<DirectoryRemoval> {
        self.call(|| self.inner.remove_directory(path, is_alive))
    }

    fn link(
        &self,
        existing: &StorePath,
        version: &StoreVersion,
        new: &StorePath,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.call(|| self.inner.link(existing, version, new))
    }

    fn make_symlink(
        &self,
        path: &StorePath,
        target: &[u8],
        attributes: &Attributes,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.call(|| self.inner.make_symlink(path, target, attributes))
    }

    fn make_node(
        &self,
        path: &StorePath,
        kind: Kind,
        rdev: u64,
        attributes: &Attributes,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.call(|| self.inner.make_node(path, kind, rdev, attributes))
    }

    fn set_attributes(
        &self,
        path: &StorePath,
        expected: &StoreVersion,
        attributes: &Attributes,
    ) -> StoreResult<Outcome<StoreVersion>> {
        self.call(|| self.inner.set_attributes(path, expected, attributes))
    }

    fn xattrs(&self, path: &StorePath) -> StoreResult<Xattrs> {
        self.call(|| self.inner.xattrs(path))
    }

    fn sync_directory(&self, directory: &StorePath) -> StoreResult<()> {
        self.call(|| self.inner.sync_directory(directory))
    }

    fn remove_leftovers(
        &self,
        directory: &StorePath,
        is_alive: &dyn Fn(&str) -> bool,
    ) -> StoreResult<Leftovers> {
        self.call(|| self.inner.remove_leftovers(directory, is_alive))
    }
}
