//! What the engine's threads share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_tasks::MoverReport;
use forebay_types::{Code, Entry, Ino, Result};

use super::evict::{evict, free_bytes, Restoring};
use super::link::Link;
use super::restore::restore;
use super::stores::Stores;
use super::turns::Turns;

/// A place that could not be made equal: how often, and when it is tried again.
#[derive(Debug)]
pub(super) struct Retry {
    pub(super) count: u32,
    pub(super) at: Instant,
}

pub(super) type Place = (Ino, Vec<u8>);

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) link: Link,
    pub(super) stores: Stores,
    pub(super) restoring: Restoring,
    /// Directories that are being listed.
    pub(super) listing: Restoring,
    pub(super) prestaging: Turns,
    pub(super) workers: AtomicUsize,
    pub(super) retries: Mutex<HashMap<Place, Retry>>,
    pub(super) report: Mutex<MoverReport>,
    /// What the last mover did is recorded.
    pub(super) is_recovered: AtomicBool,
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes that a restore leaves free, so that operations that free space have some.
const RESERVE_BYTES: u64 = 4 << 20;
/// How long a restore waits for space while what programs wrote is being drained.
const SPACE_PATIENCE: Duration = Duration::from_secs(60);
/// Pause between two looks for space.
const SPACE_PERIOD: Duration = Duration::from_millis(20);
/// Pause between two looks whether another thread has restored a file.
const OTHER_PERIOD: Duration = Duration::from_millis(5);

/// Restores a file. When the pool is full, other files are released first; where only files are left that the store does
/// not have yet, this waits for them to be drained.
pub(super) fn restore_with_room(shared: &Shared, ino: Ino) -> Result<Entry> {
    let until = Instant::now() + SPACE_PATIENCE;
    loop {
        let bytes = shared.link.inode(ino).map_or(0, |entry| entry.attr.size) + RESERVE_BYTES;
        let free = free_bytes(&shared.link);
        if free < bytes {
            evict(&shared.link, &shared.restoring, bytes - free)?;
        }
        match restore(&shared.link, &shared.stores, ino) {
            Err(e) if e.code == Code::NoSpace => {
                if Instant::now() >= until || shared.stores.is_stopping() || !is_draining(shared) {
                    return Err(e.cure("release files (forebay release), or make the pool larger"));
                }
            }
            result => return result,
        }
        std::thread::sleep(SPACE_PERIOD);
    }
}

/// True while a file is on its way to a store, or about to be: space may come.
fn is_draining(shared: &Shared) -> bool {
    let report = locked(&shared.report).dirty_files > 0;
    report || shared.stores.is_draining()
}

/// The same for a task, where the file may be restored for a program at the same time: one thread restores a file.
pub(super) fn restore_for_task(shared: &Shared, ino: Ino) -> Result<Entry> {
    while !shared.restoring.begin(ino) {
        std::thread::sleep(OTHER_PERIOD);
    }
    let restored = restore_with_room(shared, ino);
    shared.restoring.end(ino);
    if let Err(e) = &restored {
        // Programs that wait for it do not wait for ever.
        let _ = shared.link.failed(ino, e.code);
    }
    restored
}
