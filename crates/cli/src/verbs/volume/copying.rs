//! `forebay volume copy`, `flush` and `load`.

use std::ffi::OsStr;
use std::ops::Range;
use std::path::Path;
use std::process::ExitCode;

use forebay_client::Pool;
use forebay_sys::signals::Signals;
use forebay_tasks::volume_copy::{Direction, VolumeCopyPlan};
use forebay_types::{Code, Error, Result};
use forebay_volume::{Specifier, Striped};
use indicatif::ProgressBar;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use serde_json::json;

use super::file::{Input, Output};
use super::place::Place;
use super::shown::bar;
use super::store;
use crate::arguments::{VolumeCopy, VolumeFlush, VolumeLoad};
use crate::{failure, pool, table};

/// Bytes that are copied in one step.
const STEP_BYTES: u64 = 4 << 20;
/// Bytes that are set to zero in one step.
const ZERO_BYTES: u64 = 64 << 20;
/// Zeros of this many bytes take no space in a thin volume.
const HOLE_BYTES: usize = 64 << 10;

/// A copy that was asked for.
struct Wanted<'a> {
    pool: &'static Pool,
    dir: &'a Path,
    from: Place,
    to: Place,
    from_offset: u64,
    /// None: a file or object is replaced.
    to_offset: Option<u64>,
    bytes: Option<u64>,
    /// What follows in the volume becomes zero.
    zero_rest: bool,
    signals: &'a Signals,
    /// The signal that ended the copy.
    signal: Option<i32>,
    shows_progress: bool,
}

fn signals() -> Result<Signals> {
    Signals::block(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP])
        .map_err(|e| Error::io("cannot wait for signals", &e))
}

pub(super) fn copy(pool: &'static Pool, dir: &Path, arguments: &VolumeCopy) -> Result<ExitCode> {
    let mut wanted = Wanted {
        pool,
        dir,
        from: Place::parse(&arguments.from),
        to: Place::parse(&arguments.to),
        from_offset: arguments.from_offset,
        to_offset: arguments.to_offset,
        bytes: arguments.bytes,
        zero_rest: false,
        signals: &signals()?,
        signal: None,
        shows_progress: !arguments.no_progress && !arguments.json,
    };
    wanted.run_once("copied", arguments.json)
}

/// The volume of `flush` and `load`, and the other place.
fn sides(verb: &str, volume: &OsStr, other: &OsStr) -> Result<(Place, Place)> {
    let (volume, other) = (Place::parse(volume), Place::parse(other));
    let cannot = |place: &Place| format!("cannot {verb} {}", place.shown());
    if !matches!(volume, Place::Volume(_)) {
        return Err(failure::invalid(cannot(&volume), "it is no volume", "`forebay volume list` shows them"));
    }
    if matches!(other, Place::Volume(_)) {
        let why = format!("{} is neither a file nor an object", other.shown());
        let cure = "write ./FILE, or use `forebay volume copy` between volumes";
        return Err(failure::invalid(cannot(&volume), why, cure));
    }
    Ok((volume, other))
}

pub(super) fn flush(pool: &'static Pool, dir: &Path, arguments: &VolumeFlush) -> Result<ExitCode> {
    let (from, to) = sides("flush", &arguments.volume, &arguments.to)?;
    let signals = signals()?;
    let mut wanted = Wanted {
        pool,
        dir,
        from,
        to,
        from_offset: 0,
        to_offset: None,
        bytes: None,
        zero_rest: false,
        signals: &signals,
        signal: None,
        shows_progress: !arguments.no_progress && !arguments.json,
    };
    // A first failure mostly means that the command is wrong.
    let done = wanted.run_once("flushed", arguments.json)?;
    let Some(every) = arguments.every else { return Ok(done) };
    loop {
        let period = Timespec { tv_sec: i64::try_from(every).unwrap_or(i64::MAX), tv_nsec: 0 };
        let _ = poll(&mut [PollFd::new(&signals, PollFlags::IN)], Some(&period));
        if let Some(received) = signals.next() {
            crate::death::die_of(received.signal);
        }
        if let Err(e) = wanted.run_once("flushed", arguments.json) {
            // What is wrong with the place that it is copied to may pass. A volume or a pool that is gone does not come back.
            wanted.is_there()?;
            note!("forebay: {e}\nforebay: it is tried again in {every} s");
        }
    }
}

pub(super) fn load(pool: &'static Pool, dir: &Path, arguments: &VolumeLoad) -> Result<ExitCode> {
    let (to, from) = sides("load", &arguments.volume, &arguments.from)?;
    let mut wanted = Wanted {
        pool,
        dir,
        from,
        to,
        from_offset: 0,
        to_offset: Some(0),
        bytes: None,
        zero_rest: true,
        signals: &signals()?,
        signal: None,
        shows_progress: !arguments.no_progress && !arguments.json,
    };
    wanted.run_once("loaded", arguments.json)
}

/// Puts bytes into a volume. In a thin one zeros become holes.
fn put(to: &Striped, offset: u64, bytes: &[u8]) -> std::result::Result<(), Code> {
    if !to.is_thin() {
        return to.put_bytes(offset, bytes);
    }
    let is_hole = |chunk: &[u8]| chunk.iter().all(|byte| *byte == 0);
    let chunks: Vec<&[u8]> = bytes.chunks(HOLE_BYTES).collect();
    let mut at = offset;
    for run in chunks.chunk_by(|a, b| is_hole(a) == is_hole(b)) {
        let length = run.iter().map(|chunk| chunk.len()).sum::<usize>();
        match is_hole(run[0]) {
            true => to.zero(at, length as u64)?,
            false => to.put_bytes(at, &bytes[(at - offset) as usize..][..length])?,
        }
        at += length as u64;
    }
    Ok(())
}

impl Wanted<'_> {
    fn error(&self, code: Code) -> Error {
        Error::new(code, format!("cannot copy {} to {}", self.from.shown(), self.to.shown()))
    }

    /// Copies, and prints what was copied. A signal ends the process, when what was begun is removed.
    fn run_once(&mut self, verb: &str, json: bool) -> Result<ExitCode> {
        let bar = bar("copying", 0, self.shows_progress);
        let copied = self.run(&bar);
        bar.finish_and_clear();
        if let Some(signal) = self.signal {
            note!("forebay: stopped");
            crate::death::die_of(signal);
        }
        let bytes = copied?;
        let (from, to) = (self.from.shown(), self.to.shown());
        match json {
            true => failure::print_json(&json!({ "from": from, "to": to, "bytes": bytes })),
            false => failure::put(format!("{verb} {} from {from} to {to}\n", table::bytes(bytes))),
        }
        Ok(ExitCode::SUCCESS)
    }

    fn run(&mut self, bar: &ProgressBar) -> Result<u64> {
        match (self.from.clone(), self.to.clone()) {
            (Place::Volume(from), Place::Volume(to)) => {
                let (from, to) = (self.pool.volume_open(&from, false)?, self.pool.volume_open(&to, true)?);
                self.between_volumes(&from, &to, bar)
            }
            (Place::File(from), Place::Volume(to)) => {
                let (from, to) = (Input::open(&from)?, self.pool.volume_open(&to, true)?);
                self.read_file(&from, &to, bar)
            }
            (Place::Volume(from), Place::File(to)) => {
                let volume = self.pool.volume_open(&from, false)?;
                let bytes = self.bytes_of(volume.bytes())?;
                let mode = self.mode_of(&from);
                let output = match self.to_offset {
                    Some(_) => Output::in_place(&to, mode)?,
                    None => Output::replacing(&to, mode)?,
                };
                self.write_file(&volume, output, bytes, bar)
            }
            (Place::Volume(volume), Place::Object(url)) => {
                if self.to_offset.is_some() {
                    let error = self.error(Code::NotSupported).why("objects of stores are replaced whole");
                    return Err(error.cure("leave --to-offset away"));
                }
                let direction = Direction::ToStore { mode: self.mode_of(&volume) };
                self.by_mover(volume, url, direction, bar)
            }
            (Place::Object(url), Place::Volume(volume)) => {
                let to_offset = self.to_offset.unwrap_or(0);
                let direction = Direction::FromStore { to_offset, zero_rest: self.zero_rest };
                self.by_mover(volume, url, direction, bar)
            }
            _ => Err(self
                .error(Code::Invalid)
                .why("neither is a volume")
                .cure("a volume's name has no `/`: `forebay volume list` shows them")),
        }
    }

    fn by_mover(
        &mut self,
        volume: Vec<u8>,
        url: Vec<u8>,
        direction: Direction,
        bar: &ProgressBar,
    ) -> Result<u64> {
        let (from_offset, bytes) = (self.from_offset, self.bytes);
        let pool = std::fs::canonicalize(self.dir).map_err(|e| Error::io("cannot find the pool", &e))?;
        let plan = VolumeCopyPlan { pool, volume, url, direction, from_offset, bytes };
        store::copy(&plan, bar, &mut || self.stops())
    }

    /// Permission bits of a new file: those of the volume, or those that all volumes of a joined one have.
    fn mode_of(&self, specifier: &[u8]) -> u32 {
        let parts = Specifier::parse_all(specifier).unwrap_or_default();
        let modes = parts.iter().filter_map(|part| self.pool.volume(&part.volume).ok());
        modes.fold(0o666, |mode, volume| mode & volume.mode) | 0o600
    }

    /// An error if the volume that is copied, or the pool, is gone.
    fn is_there(&self) -> Result<()> {
        let Place::Volume(volume) = &self.from else { return Ok(()) };
        match self.pool.volume_open(volume, false) {
            Err(e) if matches!(e.code, Code::PoolGone | Code::NotFound | Code::NoDevice) => Err(e),
            _ => Ok(()),
        }
    }

    /// An error once a signal came.
    fn stops(&mut self) -> Result<()> {
        match self.signals.next() {
            Some(received) => {
                self.signal = Some(received.signal);
                Err(self.error(Code::Interrupted).why("a signal stopped it"))
            }
            None => Ok(()),
        }
    }

    /// How much there is to copy, out of a source of `bytes` bytes.
    fn bytes_of(&self, bytes: u64) -> Result<u64> {
        match bytes.checked_sub(self.from_offset) {
            Some(left) => Ok(left.min(self.bytes.unwrap_or(u64::MAX))),
            None => Err(self.error(Code::Range).why(format!(
                "{} has {bytes} bytes, and the copy is to begin at byte {}",
                self.from.shown(),
                self.from_offset
            ))),
        }
    }

    /// Where `bytes` bytes go in a volume.
    fn fitting(&self, volume: &Striped, bytes: u64) -> Result<u64> {
        let to_offset = self.to_offset.unwrap_or(0);
        match to_offset.checked_add(bytes) {
            Some(end) if end <= volume.bytes() => Ok(to_offset),
            _ => {
                let (size, from) = (volume.bytes(), self.from.shown());
                let why = format!(
                    "{} has {size} bytes, too few for {bytes} of {from} from byte {to_offset} on",
                    self.to.shown()
                );
                let error = self.error(Code::Range).why(why);
                Err(error.cure("copy less (--bytes), or make it larger: `forebay volume resize`"))
            }
        }
    }

    /// A failed access to a volume.
    fn failed(&self, code: Code) -> Error {
        self.error(code).why(pool::words(code))
    }

    fn between_volumes(&mut self, from: &Striped, to: &Striped, bar: &ProgressBar) -> Result<u64> {
        let bytes = self.bytes_of(from.bytes())?;
        let to_offset = self.fitting(to, bytes)?;
        self.check_apart(from, to)?;
        bar.set_length(bytes);
        let mut buffer = vec![0; STEP_BYTES.min(bytes) as usize];
        let steps = bytes.div_ceil(STEP_BYTES);
        for step in 0..steps {
            self.stops()?;
            // They may be the same volume: as memmove, from the end that is overwritten last.
            let at = STEP_BYTES * if to_offset > self.from_offset { steps - 1 - step } else { step };
            let part = &mut buffer[..STEP_BYTES.min(bytes - at) as usize];
            from.get_bytes(self.from_offset + at, part).map_err(|code| self.failed(code))?;
            put(to, to_offset + at, part).map_err(|code| self.failed(code))?;
            bar.inc(part.len() as u64);
        }
        // What is behind the end of the file of `from` is no part of a file in `to` either.
        let of_file = match from.file_size() {
            Ok(None | Some(0)) => bytes,
            Ok(Some(size)) => size.saturating_sub(self.from_offset).min(bytes),
            Err(code) => return Err(self.failed(code)),
        };
        self.end(to, to_offset + of_file)?;
        Ok(bytes)
    }

    /// A byte of a volume that is part of both sides must have the same offset in both, or the copy would read what it has
    /// written.
    fn check_apart(&self, from: &Striped, to: &Striped) -> Result<()> {
        let (sources, places): (Vec<_>, Vec<_>) = (from.numbers().collect(), to.numbers().collect());
        let is_shared = sources.iter().any(|source| places.contains(source));
        let is_twice = (1..sources.len()).any(|i| sources[..i].contains(&sources[i]));
        if !is_shared || (sources == places && !is_twice) {
            return Ok(());
        }
        let why = "both sides have a volume in common, but not as the same part";
        Err(self.error(Code::Invalid).why(why).cure("copy to a file first, and from there"))
    }

    /// Ends a copy into a volume, whose file ends at `end` or reaches to it.
    fn end(&self, to: &Striped, end: u64) -> Result<()> {
        let ended = match self.zero_rest {
            true => to.end_file(end),
            false => to.extend_file(end),
        };
        ended.and_then(|()| to.flush()).map_err(|code| self.failed(code))
    }

    fn read_file(&mut self, from: &Input, to: &Striped, bar: &ProgressBar) -> Result<u64> {
        let bytes = self.bytes_of(from.bytes)?;
        let to_offset = self.fitting(to, bytes)?;
        bar.set_length(bytes);
        let mut buffer = vec![0; STEP_BYTES.min(bytes) as usize];
        let (first, end) = (self.from_offset, self.from_offset + bytes);
        let mut at = first;
        while at < end {
            let data = from.next_data(at..end)?.unwrap_or(end..end);
            self.zero(to, to_offset + (at - first)..to_offset + (data.start - first))?;
            at = data.start;
            while at < data.end {
                self.stops()?;
                let part = &mut buffer[..STEP_BYTES.min(data.end - at) as usize];
                from.read(part, at)?;
                put(to, to_offset + (at - first), part).map_err(|code| self.failed(code))?;
                at += part.len() as u64;
                bar.set_position(at - first);
            }
        }
        if self.zero_rest {
            self.zero(to, to_offset + bytes..to.bytes())?;
        }
        self.end(to, to_offset + bytes)?;
        Ok(bytes)
    }

    /// Sets a range to zero; a thin volume gives its space back.
    fn zero(&mut self, volume: &Striped, range: Range<u64>) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            self.stops()?;
            let bytes = ZERO_BYTES.min(range.end - at);
            volume.zero(at, bytes).map_err(|code| self.failed(code))?;
            at += bytes;
        }
        Ok(())
    }

    fn write_file(&mut self, from: &Striped, to: Output, bytes: u64, bar: &ProgressBar) -> Result<u64> {
        bar.set_length(bytes);
        let to_offset = self.to_offset.unwrap_or(0);
        let mut buffer = vec![0; STEP_BYTES.min(bytes) as usize];
        let mut at = 0;
        while at < bytes {
            self.stops()?;
            let part = &mut buffer[..STEP_BYTES.min(bytes - at) as usize];
            from.get_bytes(self.from_offset + at, part).map_err(|code| self.failed(code))?;
            to.write(part, to_offset + at)?;
            at += part.len() as u64;
            bar.set_position(at);
        }
        // The pool may have died during the last step.
        from.flush().map_err(|code| self.failed(code))?;
        to.finish(bytes)?;
        Ok(bytes)
    }
}
