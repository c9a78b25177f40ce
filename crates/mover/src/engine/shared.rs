//! What the engine's threads share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use forebay_tasks::MoverReport;
use forebay_types::{Code, Ino, Result};

use super::evict::{evict, Restoring};
use super::link::Link;
use super::restore::restore;
use super::stores::Stores;

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
    /// Files for whose store a program waits.
    pub(super) persisting: Restoring,
    pub(super) workers: AtomicUsize,
    pub(super) retries: Mutex<HashMap<Place, Retry>>,
    pub(super) report: Mutex<MoverReport>,
    /// What the last mover did is recorded.
    pub(super) is_recovered: AtomicBool,
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Restores a file. When the pool is full, other files are released first.
pub(super) fn restore_with_room(shared: &Shared, ino: Ino) -> Result<forebay_types::Entry> {
    match restore(&shared.link, &shared.stores, ino) {
        Err(e) if e.code == Code::NoSpace => {
            let bytes = shared.link.inode(ino).map_or(0, |entry| entry.attr.size);
            if evict(&shared.link, &shared.stores, &shared.restoring, bytes + (4 << 20))? == 0 {
                return Err(e.cure("release files (forebay release), or make the pool larger"));
            }
            restore(&shared.link, &shared.stores, ino)
        }
        result => result,
    }
}
