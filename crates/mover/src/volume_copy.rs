//! `forebay-mover --volume-copy`: copies between a volume and an object of a store. `forebay volume copy`, `flush` and
//! `load` start it: the plan is the first line of its standard input, events are lines of its standard output.
//!
//! An object is uploaded under a temporary name and published in place of the version that was there at the beginning, so
//! its name always has a whole object. When the standard input is closed, by a command that was stopped or killed, the
//! upload is given up and discarded. What a killed process has left is removed by the next one.
//!
//! Threads: this one, and one that waits for the end of the standard input. Tests: `crates/cli/tests/volume_copies.rs`.

use std::ffi::OsString;
use std::io::{BufRead, Read, Write};
use std::ops::Range;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;

use forebay_client::{Pool, Role};
use forebay_sys::process::shed_preload;
use forebay_tasks::volume_copy::{Direction, VolumeCopyEvent, VolumeCopyPlan};
use forebay_tasks::Failure;
use forebay_types::{Code, Error, Kind, Result};
use forebay_volume::Striped;
use rustix::fs::{fallocate, ftruncate, FallocateFlags, MemfdFlags};

use crate::store::{may_run, Attributes, MoverId, Object, Outcome, Source, Store, StorePath, StoreUrl};

const VOLUME_COPY: &str = "--volume-copy";
/// Bytes that are read from a store at a time.
const WINDOW_BYTES: u64 = 32 << 20;
/// Zeros of this many bytes are left out of an upload.
const HOLE_BYTES: u64 = 64 << 10;
/// The most bytes that are looked through for one range of data.
const RANGE_BYTES: u64 = 64 << 20;
/// A report is made after so many bytes.
const REPORT_BYTES: u64 = 8 << 20;

/// True if the first argument of the program says that it is started for a copy.
pub fn is_meant(first: Option<OsString>) -> bool {
    first.is_some_and(|first| first == VOLUME_COPY)
}

/// Runs the program for a copy.
pub fn main() -> ExitCode {
    if let Err(e) = shed_preload() {
        eprintln!("forebay-mover: cannot start again without LD_PRELOAD: {e}");
        return ExitCode::FAILURE;
    }
    forebay_log::to_stderr();
    let is_cancelled = Arc::new(AtomicBool::new(false));
    let report = |event: VolumeCopyEvent| {
        let Ok(mut line) = serde_json::to_vec(&event) else { return };
        line.push(b'\n');
        let mut out = std::io::stdout().lock();
        if out.write_all(&line).and_then(|()| out.flush()).is_err() {
            is_cancelled.store(true, Ordering::Relaxed);
        }
    };
    let copied = plan(&is_cancelled).and_then(|plan| {
        let copy = Copy { plan: &plan, report: &report, is_cancelled: &is_cancelled };
        copy.run()
    });
    match copied {
        Ok(()) => {
            report(VolumeCopyEvent::Over);
            ExitCode::SUCCESS
        }
        Err(e) => {
            report(VolumeCopyEvent::Failed(Failure::from(&e)));
            ExitCode::FAILURE
        }
    }
}

/// Reads the plan. From then on the end of the standard input cancels the copy.
fn plan(is_cancelled: &Arc<AtomicBool>) -> Result<VolumeCopyPlan> {
    let what = "cannot read what to copy";
    let mut line = Vec::new();
    std::io::stdin().lock().read_until(b'\n', &mut line).map_err(|e| Error::io(what, &e))?;
    let plan = serde_json::from_slice(&line).map_err(|e| {
        Error::new(Code::Malformed, what).why(e).cure("`forebay volume copy` starts this program: run that")
    })?;
    let is_cancelled = Arc::clone(is_cancelled);
    std::thread::Builder::new()
        .name("forebay-input".to_owned())
        .spawn(move || {
            let _ = std::io::stdin().lock().read_to_end(&mut Vec::new());
            is_cancelled.store(true, Ordering::Relaxed);
        })
        .map_err(|e| Error::io(what, &e))?;
    Ok(plan)
}

struct Copy<'a> {
    plan: &'a VolumeCopyPlan,
    report: &'a (dyn Fn(VolumeCopyEvent) + Sync),
    is_cancelled: &'a AtomicBool,
}

impl Copy<'_> {
    fn run(&self) -> Result<()> {
        let pool = Pool::attach_as(&self.plan.pool, Role::Tool)?;
        let writes = matches!(self.plan.direction, Direction::FromStore { .. });
        let volume = pool.volume_open(&self.plan.volume, writes)?;
        let (url, path) = StoreUrl::parse(&self.plan.url)?.object()?;
        let store = url.open(MoverId::own()).map_err(Error::from)?;
        match self.plan.direction {
            Direction::ToStore { mode } => self.upload(&volume, &*store, &path, mode),
            Direction::FromStore { to_offset, zero_rest } => {
                self.download(&*store, &path, &volume, to_offset, zero_rest)
            }
        }
    }

    fn error(&self, store: &dyn Store, path: &StorePath, code: Code) -> Error {
        let volume = String::from_utf8_lossy(&self.plan.volume).escape_debug().to_string();
        let object = format!("{path} in {}", store.title());
        Error::new(
            code,
            match self.plan.direction {
                Direction::ToStore { .. } => format!("cannot copy volume {volume} to {object}"),
                Direction::FromStore { .. } => format!("cannot copy {object} to volume {volume}"),
            },
        )
    }

    /// A failed access to the volume.
    fn failed(&self, store: &dyn Store, path: &StorePath, code: Code) -> Error {
        let error = self.error(store, path, code);
        match code {
            Code::NoSpace => error.why("the pool has no space for it"),
            Code::PoolGone => error.why("the pool's daemon is gone"),
            _ => error,
        }
    }

    /// The bytes to copy, of a source of `bytes` bytes.
    fn range(&self, store: &dyn Store, path: &StorePath, bytes: u64) -> Result<Range<u64>> {
        let from = self.plan.from_offset;
        match bytes.checked_sub(from) {
            Some(left) => Ok(from..from + left.min(self.plan.bytes.unwrap_or(u64::MAX))),
            None => Err(self.error(store, path, Code::Range).why(format!("there are {bytes} bytes"))),
        }
    }

    /// The object at a path, which must be a file.
    fn look(&self, store: &dyn Store, path: &StorePath) -> Result<Option<Object>> {
        match store.look(path).map_err(Error::from)? {
            Some(object) if object.kind != Kind::File => Err(self
                .error(store, path, Code::Invalid)
                .why("the store has something there that is no file")),
            found => Ok(found),
        }
    }

    fn upload(&self, volume: &Striped, store: &dyn Store, path: &StorePath, mode: u32) -> Result<()> {
        let root = StorePath::root();
        let range = self.range(store, path, volume.bytes())?;
        (self.report)(VolumeCopyEvent::Size(range.end - range.start));
        store.remove_leftovers(&root, &may_run).map_err(Error::from)?;
        let before = self.look(store, path)?;
        let mode = before.as_ref().map_or(mode, |before| before.mode & 0o7777);
        let attributes = Attributes { mode: Some(mode), ..Attributes::default() };
        let temporary = store.temporaries().next(&root);
        let source = VolumeSource { volume, range, copy: self, reported: AtomicU64::new(0) };
        let published = store
            .upload(&temporary, &source, &attributes)
            .and_then(|_| store.make_durable(std::slice::from_ref(&temporary)))
            .map_err(Error::from)
            // The pool may have died meanwhile, or the command.
            .and_then(|()| volume.flush().map_err(|code| self.failed(store, path, code)))
            .and_then(|()| self.check(store, path))
            .and_then(|()| {
                let expected = before.as_ref().map(|before| &before.version);
                store.publish(&temporary, path, expected).map_err(Error::from)
            });
        match published {
            Ok(Outcome::Done(_)) => store.sync_directory(&root).map_err(Error::from),
            Ok(Outcome::Conflict(_)) => {
                let _ = store.discard(&temporary);
                Err(self.error(store, path, Code::Stale).why("another program changed the object meanwhile"))
            }
            Err(e) => {
                let _ = store.discard(&temporary);
                Err(e)
            }
        }
    }

    fn check(&self, store: &dyn Store, path: &StorePath) -> Result<()> {
        match self.is_cancelled.load(Ordering::Relaxed) {
            true => Err(self.error(store, path, Code::Interrupted).why("it was stopped")),
            false => Ok(()),
        }
    }

    fn download(
        &self,
        store: &dyn Store,
        path: &StorePath,
        volume: &Striped,
        to_offset: u64,
        zero_rest: bool,
    ) -> Result<()> {
        let object = self.look(store, path)?;
        let object =
            object.ok_or_else(|| self.error(store, path, Code::NotFound).why("there is no such object"))?;
        let range = self.range(store, path, object.bytes())?;
        let bytes = range.end - range.start;
        let end = to_offset.checked_add(bytes).filter(|end| *end <= volume.bytes());
        let end = end.ok_or_else(|| {
            let why = format!(
                "the volume has {} bytes, too few for {bytes} of the object from byte {to_offset} on",
                volume.bytes()
            );
            let error = self.error(store, path, Code::Range).why(why);
            error.cure("copy less (--bytes), or make it larger: `forebay volume resize`")
        })?;
        (self.report)(VolumeCopyEvent::Size(bytes));
        let failed = |e: rustix::io::Errno| Error::io("cannot copy from a store", &e.into());
        let memory = rustix::fs::memfd_create(c"forebay-copied", MemfdFlags::CLOEXEC).map_err(failed)?;
        ftruncate(&memory, object.bytes()).map_err(failed)?;
        // What is zero takes no space in a thin volume.
        let zero = |offset, bytes| volume.zero(offset, bytes).map_err(|code| self.failed(store, path, code));
        let put = |offset, bytes: &[u8]| match bytes.iter().all(|byte| *byte == 0) {
            true => zero(offset, bytes.len() as u64),
            false => volume.put_bytes(offset, bytes).map_err(|code| self.failed(store, path, code)),
        };
        let mut buffer = vec![0; HOLE_BYTES as usize];
        let mut at = range.start;
        while at < range.end {
            let window = at..range.end.min(at + WINDOW_BYTES);
            self.check(store, path)?;
            store.read(path, &object.version, window.clone(), memory.as_fd()).map_err(|e| {
                match e.code() {
                    Code::Stale => {
                        self.error(store, path, Code::Stale).why("the object was changed meanwhile")
                    }
                    _ => Error::from(e),
                }
            })?;
            while at < window.end {
                let part = &mut buffer[..HOLE_BYTES.min(window.end - at) as usize];
                rustix::io::pread(&memory, &mut *part, at).map_err(failed).and_then(|n| {
                    if n == part.len() {
                        Ok(())
                    } else {
                        Err(failed(rustix::io::Errno::IO))
                    }
                })?;
                put(to_offset + (at - range.start), part)?;
                at += part.len() as u64;
            }
            let (mode, length) =
                (FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, window.end - window.start);
            fallocate(&memory, mode, window.start, length).map_err(failed)?;
            (self.report)(VolumeCopyEvent::Copied(at - range.start));
        }
        if zero_rest {
            let mut at = end;
            while at < volume.bytes() {
                self.check(store, path)?;
                let bytes = WINDOW_BYTES.min(volume.bytes() - at);
                zero(at, bytes)?;
                at += bytes;
            }
        }
        let ended = match zero_rest {
            true => volume.end_file(end),
            false => volume.extend_file(end),
        };
        ended.and_then(|()| volume.flush()).map_err(|code| self.failed(store, path, code))
    }
}

/// A range of a volume as the source of an upload.
struct VolumeSource<'a> {
    volume: &'a Striped,
    range: Range<u64>,
    copy: &'a Copy<'a>,
    /// Where the last report was.
    reported: AtomicU64,
}

impl Source for VolumeSource<'_> {
    fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    fn next_data(&self, within: Range<u64>) -> std::result::Result<Option<Range<u64>>, Code> {
        let mut buffer = vec![0; HOLE_BYTES as usize];
        let mut data: Option<Range<u64>> = None;
        let mut at = within.start;
        while at < within.end {
            if self.copy.is_cancelled.load(Ordering::Relaxed) {
                return Err(Code::Interrupted);
            }
            let part = &mut buffer[..HOLE_BYTES.min(within.end - at) as usize];
            self.volume.get_bytes(self.range.start + at, part)?;
            let (is_zero, end) = (part.iter().all(|byte| *byte == 0), at + part.len() as u64);
            match &mut data {
                None if is_zero => {}
                None => data = Some(at..end),
                Some(_) if is_zero => break,
                Some(found) => {
                    found.end = end;
                    if end - found.start >= RANGE_BYTES {
                        break;
                    }
                }
            }
            at = end;
        }
        Ok(data)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::result::Result<usize, Code> {
        if self.copy.is_cancelled.load(Ordering::Relaxed) {
            return Err(Code::Interrupted);
        }
        let n = (buffer.len() as u64).min(self.bytes().saturating_sub(offset)) as usize;
        self.volume.get_bytes(self.range.start + offset, &mut buffer[..n])?;
        let done = offset + n as u64;
        if done >= self.reported.load(Ordering::Relaxed) + REPORT_BYTES {
            self.reported.store(done, Ordering::Relaxed);
            (self.copy.report)(VolumeCopyEvent::Copied(done));
        }
        Ok(n)
    }
}
