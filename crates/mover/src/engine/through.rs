//! Files that are read from their store without a copy in the pool: it has no room for them.
//!
//! A program asks for a piece of one version (`StoreRead`), which travels as a message to a mover. The mover reads the
//! range of [`RANGE_BYTES`] with the piece from the store, and keeps the last few of them (`kept_ranges.rs`): programs read
//! in order, and a call of a store costs much. The store compares the version before and after. What is kept is of the
//! version that it is kept for, whatever the store has by now.
//!
//! Each message has a thread, and a thread that calls a store holds no lock: others that need the same range look again
//! after a moment. Each store has so many messages at a time (`readers.rs`), and one that hangs holds up its own readers
//! alone. A mover that dies takes what it kept with it; programs ask the next one. Tests: `crates/mount/tests/without_room.rs`.

use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use forebay_types::limits::RANGE_BYTES;
use forebay_types::{Code, Error, Ino, Result, StoreRead, StoreVersion};
use rustix::fs::{ftruncate, memfd_create, MemfdFlags};

use super::kept_ranges::{Found, Key};
use super::restore::refresh;
use super::shared::{for_programs, Shared};
use super::stores::Located;
use crate::host::{self, Instant};
use crate::store::Store;

/// Pause between two looks whether another thread has read a range, and how long it is waited for: less than a message
/// waits for its answer. Threads do not gather at a store that hangs.
const OTHER_PERIOD: Duration = Duration::from_millis(1);
const OTHER_PATIENCE: Duration = Duration::from_secs(5);
/// How often a file is looked for that is being renamed in the store, and the pause between.
const ATTEMPTS: u32 = 20;
const RENAME_PAUSE: Duration = Duration::from_millis(30);

/// Answers a message, in a thread of its own.
pub(super) fn serve(shared: &Arc<Shared>, number: u64, wanted: std::result::Result<StoreRead, Code>) {
    let answer = move |shared: &Shared, data: std::result::Result<&[u8], Code>| {
        if let Err(code) = shared.link.mover_answer(number, &StoreRead::encode_answer(data)) {
            tracing::debug!("cannot answer a reader: {}", code.name());
        }
    };
    let wanted = match wanted {
        Ok(wanted) => wanted,
        Err(code) => return answer(shared, Err(code)),
    };
    if !shared.through.readers.begin() {
        return answer(shared, Err(Code::Busy));
    }
    let mine = Arc::clone(shared);
    let run = move || {
        let data = read(&mine, &wanted);
        if let Err(e) = &data {
            tracing::debug!("{e}");
        }
        answer(&mine, data.as_deref().map_err(|e| for_readers(e.code)));
        mine.through.readers.end();
    };
    if host::start("through", run).is_err() {
        shared.through.readers.end();
        answer(shared, Err(Code::Busy));
    }
}

fn for_readers(code: Code) -> Code {
    match code {
        Code::Stale | Code::Busy => code,
        code => for_programs(code),
    }
}

/// Reads a piece. [`Code::Stale`] if the store has another version.
fn read(shared: &Shared, wanted: &StoreRead) -> Result<Vec<u8>> {
    let failed = |code| Error::new(code, format!("cannot read file {}", wanted.ino));
    let find = || shared.link.store_place(wanted.ino).map(|place| place.top);
    let store = shared.through.readers.store_of(wanted.ino, find).map_err(failed)?;
    let Some(_reading) = shared.through.readers.of_store(store) else {
        return Err(failed(Code::Busy).why("many readers wait for its backing store"));
    };
    let end = (wanted.offset + u64::from(wanted.bytes)).min(wanted.version.bytes);
    let mut data = Vec::with_capacity(wanted.bytes as usize);
    while wanted.offset + (data.len() as u64) < end {
        let at = wanted.offset + data.len() as u64;
        let (number, from) = (at / RANGE_BYTES, (at % RANGE_BYTES) as usize);
        let range = range_of(shared, (wanted.ino, wanted.version, number))?;
        let to = range.len().min(from + (end - at) as usize);
        match range.get(from..to) {
            Some(more) if !more.is_empty() => data.extend_from_slice(more),
            _ => break,
        }
    }
    Ok(data)
}

fn range_of(shared: &Shared, key: Key) -> Result<Arc<Vec<u8>>> {
    let until = Instant::now() + OTHER_PATIENCE;
    loop {
        match shared.through.find(key) {
            Found::There(data) => return Ok(data),
            Found::Later if Instant::now() >= until || shared.stores.is_stopping() => {
                let e = Error::new(Code::Busy, format!("cannot read file {} yet", key.0));
                return Err(e.why("its backing store takes long"));
            }
            Found::Later => host::sleep(OTHER_PERIOD),
            Found::Mine => break,
        }
    }
    let read = read_range(shared, key).map(Arc::new);
    shared.through.end(key, read.as_ref().ok().cloned());
    read
}

fn read_range(shared: &Shared, (ino, version, number): Key) -> Result<Vec<u8>> {
    let what = || format!("cannot read file {ino} from its backing store");
    let stale = || Error::new(Code::Stale, what()).why("it was changed there");
    for _ in 0..ATTEMPTS {
        let located = shared.stores.locate(ino)?;
        if located.placed.map(|placed| placed.version) != Some(version) {
            return Err(stale());
        }
        let range = number * RANGE_BYTES..((number + 1) * RANGE_BYTES).min(version.bytes);
        match copy(&located, &version, range) {
            Ok(data) => {
                located.at.note_success();
                return Ok(data);
            }
            Err(e) if e.code == Code::Stale => {
                take_over(shared, ino);
                return Err(stale());
            }
            // A rename is made in the store before it is recorded.
            Err(e) if e.code == Code::NotFound => host::sleep(RENAME_PAUSE),
            Err(e) => {
                located.at.note_failure(&e);
                return Err(e);
            }
        }
    }
    let e = Error::new(Code::Io, what()).why("it is not there any more");
    Err(e.cure("restore it in the store, or remove it in the pool"))
}

/// Has the pool show the version that another program wrote in the store: the next open reads it.
fn take_over(shared: &Shared, ino: Ino) {
    let Ok(entry) = shared.link.inode(ino) else { return };
    if let Err(e) = refresh(&shared.link, &shared.stores, &entry) {
        tracing::debug!("{e}");
    }
}

/// Copies a range from the store into memory.
fn copy(located: &Located, version: &StoreVersion, range: Range<u64>) -> Result<Vec<u8>> {
    let failed = |e: rustix::io::Errno| Error::io("cannot get memory for a reader", &e.into());
    let memory = memfd_create(c"forebay-through", MemfdFlags::CLOEXEC).map_err(failed)?;
    // The store writes at the file's offsets: what is in front of them is a hole.
    ftruncate(&memory, range.end).map_err(failed)?;
    located.at.store.read(&located.path, version, range.clone(), memory.as_fd())?;
    let mut data = vec![0; (range.end - range.start) as usize];
    let mut done = 0;
    while done < data.len() {
        match rustix::io::pread(&memory, &mut data[done..], range.start + done as u64) {
            Ok(0) => return Err(Error::new(Code::Io, "cannot read what the store delivered")),
            Ok(n) => done += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(failed(e)),
        }
    }
    Ok(data)
}
