//! What the engine's threads share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use forebay_tasks::MoverReport;
use forebay_types::limits::RESTORE_RESERVE_BYTES;
use forebay_types::{node_of, Code, Entry, Error, Ino, NodeId, Result, Timestamp};

use super::evict::{capacity, evict, free_bytes, is_full, Restoring};
use super::holds::Holds;
use super::kept_ranges::Through;
use super::link::Link;
use super::looks::Looks;
use super::marks::{mark_restored, Marks};
use super::peers::{Answer, Jobs, Letter, Peers, Work};
use super::prestage_turns::Turns;
use super::ranges::{FileRanges, Ranges};
use super::restore::restore;
use super::stores::Stores;
use super::walks::Walks;
use crate::host::{self, Instant};

/// How often a restore is begun on the node that is to have the file then.
const RELOCATIONS_MAX: u32 = 8;
/// How long a restore waits for space while what programs wrote is being drained.
const SPACE_PATIENCE: Duration = Duration::from_secs(60);
/// How long a node is asked for a range whose restore it has not begun, and the pause between two questions.
const RANGE_PATIENCE: Duration = Duration::from_secs(5);
const RANGE_PERIOD: Duration = Duration::from_millis(5);
/// Pause between two looks for space.
const SPACE_PERIOD: Duration = Duration::from_millis(20);
/// Pause between two looks whether another thread has restored a file.
const OTHER_PERIOD: Duration = Duration::from_millis(5);

/// A place that could not be made equal: how often, and when it is tried again.
#[derive(Debug)]
pub(super) struct Retry {
    pub(super) count: u32,
    pub(super) at: Instant,
}

/// Ends a thread's pause early.
#[derive(Debug, Default)]
pub(super) struct Wake {
    is_set: Mutex<bool>,
    set: Condvar,
}

impl Wake {
    pub(super) fn set(&self) {
        *locked(&self.is_set) = true;
        self.set.notify_one();
    }

    /// Pauses until it is set, `period` at most. True if it was set.
    pub(super) fn pause(&self, period: Duration) -> bool {
        let is_set = (&self.is_set, &self.set);
        std::mem::take(&mut *host::wait_while(is_set, locked(&self.is_set), period, |is_set| !*is_set).0)
    }
}

pub(super) type Place = (Ino, Vec<u8>);

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) link: Link,
    pub(super) stores: Stores,
    /// Which backing files say where they belong.
    pub(super) marks: Marks,
    pub(super) restoring: Restoring,
    /// Those of them for which programs wait as a whole, not for ranges alone.
    pub(super) whole: Restoring,
    /// Those that tasks restore whose turn has not come, as long as no program waits for them.
    pub(super) in_background: Restoring,
    /// What has arrived of them.
    pub(super) ranges: Ranges,
    /// What readers read of files for which there is no room.
    pub(super) through: Through,
    /// Directories that are being listed.
    pub(super) listing: Restoring,
    /// Directories below which others are being listed ahead.
    pub(super) ahead: Restoring,
    /// Names that are being looked up, and how often names of a directory were.
    pub(super) looks: Looks,
    /// Files for whose store a program waits.
    pub(super) persisting: Restoring,
    /// Other nodes' movers, the jobs that they have begun here, and the leases that are held for them.
    pub(super) peers: Peers,
    pub(super) jobs: Jobs,
    pub(super) holds: Holds,
    /// The order of the tasks that prestage.
    pub(super) prestaging: Turns,
    /// Where programs walk through trees that are not listed.
    pub(super) walks: Walks,
    /// Begins the next look at the pending places.
    pub(super) wake: Wake,
    pub(super) workers: AtomicUsize,
    /// Restores for which there is no room, in threads that wait for drains to make some.
    pub(super) lacking_room: AtomicUsize,
    /// When there was no room last for a file of which ranges alone were wanted.
    pub(super) lacked_room: Mutex<Option<Instant>>,
    /// Files larger than the targets for which there was no room: with epoch, size and modification time.
    pub(super) too_large: Mutex<HashMap<u64, (u64, u64, Timestamp)>>,
    pub(super) retries: Mutex<HashMap<Place, Retry>>,
    pub(super) report: Mutex<MoverReport>,
    /// What the last mover did is recorded.
    pub(super) is_recovered: AtomicBool,
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a program gets for a failure of a store.
pub(super) fn for_programs(code: Code) -> Code {
    match code {
        Code::NoSpace => Code::NoSpace,
        // Removed in the pool meanwhile.
        Code::NotFound => Code::NotFound,
        Code::AccessDenied | Code::NotPermitted => Code::AccessDenied,
        _ => Code::Io,
    }
}

/// The node whose mover copies a file's data: that of its first backing file. None for this one.
pub(super) fn copied_by(shared: &Shared, entry: &Entry) -> Option<NodeId> {
    let node = node_of(entry.layout.components()[0].target(0));
    (node != shared.peers.me()).then_some(node)
}

/// A node that has some of a file's data, and does not answer.
pub(super) fn silent_node(shared: &Shared, entry: &Entry) -> Option<NodeId> {
    let layout = &entry.layout;
    let mut nodes = layout.stripes().map(|(i, stripe)| node_of(layout.components()[i].target(stripe)));
    nodes.find(|node| shared.peers.is_silent(*node))
}

/// The bytes of a file's data. A node that does not answer is not asked again until it answers other questions.
pub(super) fn bytes_of(shared: &Shared, entry: &Entry) -> u64 {
    let node = copied_by(shared, entry);
    if node.is_some_and(|node| shared.peers.is_silent(node)) {
        return entry.attr.size;
    }
    match (shared.link.pool.stat_entry(entry), node) {
        (Ok(st), _) => st.st_size as u64,
        (Err(Code::Io | Code::TimedOut), Some(node)) => {
            shared.peers.gave_up(node, &Error::new(Code::Io, format!("node {node} does not answer")));
            entry.attr.size
        }
        (Err(_), _) => entry.attr.size,
    }
}

/// A program waits for a file, or a task whose turn has come: it is not restored in the background any more.
pub(super) fn bring_forward(shared: &Shared, ino: Ino) {
    if shared.in_background.end(ino) {
        shared.ranges.bring_forward(ino);
    }
}

/// A reader waits for a range of a file that is restored on this node: it is copied first, or reported if it is there.
/// True if it is there.
pub(super) fn range_asked(shared: &Shared, ino: Ino, range: u64) -> bool {
    let arrived = shared.ranges.ask(ino, range);
    if let Some(arrived) = arrived {
        shared.link.range_restored(ino, arrived);
    }
    arrived.is_some()
}

/// The same for a file that is restored on another node, or is about to be. A reader asks again after some seconds.
pub(super) fn range_asked_there(shared: &Shared, node: NodeId, ino: Ino, range: u64) {
    let until = Instant::now() + RANGE_PATIENCE;
    while Instant::now() < until && shared.restoring.has(ino) && !shared.stores.is_stopping() {
        match shared.peers.ask(node, &Letter::Range { ino: ino.0, range }) {
            Ok(Answer::Unknown) => host::sleep(RANGE_PERIOD), // its mover has not begun
            Ok(_) => return,
            Err(e) => {
                tracing::debug!("{e}");
                return;
            }
        }
    }
}

/// Restores a file, on the node that is to have it.
pub(super) fn restore_there(shared: &Shared, ino: Ino) -> Result<()> {
    for _ in 0..RELOCATIONS_MAX {
        let entry = shared.link.inode(ino);
        let entry = entry.map_err(|code| Error::new(code, format!("cannot restore file {ino}")))?;
        if entry.attr.is_resident() {
            return Ok(());
        }
        let whole = shared.whole.has(ino);
        let done = match copied_by(shared, &entry) {
            None => restore_with_room(shared, ino).map(drop),
            Some(node) => {
                let is_over = || shared.stores.is_stopping();
                shared.peers.run(node, Work::Restore { ino: ino.0, whole }, &|_| {}, &is_over).map(drop)
            }
        };
        match done {
            Ok(()) => {}
            // It is to be on another node by now.
            Err(e) if e.code == Code::NotSupported => {}
            // Programs wait for the whole file by now: there may be room in a while.
            Err(e) if e.code == Code::NoSpace && !whole && shared.whole.has(ino) => {}
            Err(e) => return Err(e),
        }
    }
    Err(Error::new(Code::Io, format!("cannot restore file {ino}")).why("its place changes all the time"))
}

/// Restores a file on this node, which no other thread restores.
pub(super) fn restore_with_room(shared: &Shared, ino: Ino) -> Result<Entry> {
    let restored = restore_ranges(shared, &shared.ranges.of(ino), ino);
    if shared.ranges.end(ino) && restored.is_err() {
        if let Ok(entry) = shared.link.inode(ino) {
            shared.link.remove_unrestored(&entry);
        }
    }
    restored
}

/// Restores a file on this node. When its target is full, other files are released first; where only files are left that
/// the store does not have yet, this waits for them to be drained, if programs wait for the whole file. Readers of ranges
/// ask again.
fn restore_ranges(shared: &Shared, ranges: &FileRanges, ino: Ino) -> Result<Entry> {
    let until = Instant::now() + SPACE_PATIENCE;
    let mut lacks_room = LacksRoom { shared, counts: false };
    fails_again(shared, ino).inspect_err(|_| serve_without_room(shared, ranges, ino))?;
    loop {
        let missing = |entry: Entry| entry.attr.size.saturating_sub(ranges.arrived_bytes());
        let bytes = shared.link.inode(ino).map_or(0, missing) + RESTORE_RESERVE_BYTES;
        let free = free_bytes(&shared.link);
        if free < bytes {
            evict(&shared.link, &shared.stores, &shared.peers, &shared.restoring, bytes - free)?;
        }
        match restore(&shared.link, &shared.stores, ranges, ino) {
            Err(e) if e.code == Code::NoSpace => {
                serve_without_room(shared, ranges, ino);
                note_too_large(shared, ino);
                let is_waited_for = shared.whole.has(ino) && Instant::now() < until;
                if !is_waited_for || shared.stores.is_stopping() || !is_draining(shared) {
                    *locked(&shared.lacked_room) = Some(Instant::now());
                    return Err(e.cure("release files (forebay release), or make the pool larger"));
                }
            }
            result => {
                if let Ok(entry) = &result {
                    mark_restored(&shared.link, &shared.marks, entry);
                }
                return result;
            }
        }
        lacks_room.begin();
        host::sleep(SPACE_PERIOD);
    }
}

/// Readers do not wait for room: they read from the store what has not arrived.
fn serve_without_room(shared: &Shared, ranges: &FileRanges, ino: Ino) {
    let Some(wanted) = ranges.lacks_room() else { return };
    tracing::info!("there is no room to restore file {ino}: its readers read it from the store");
    for range in wanted {
        shared.link.range_restored(ino, range);
    }
}

/// What tells a file from other data of its inode, if it is larger than the targets. Its holes may let it fit.
fn larger_than_targets(shared: &Shared, ino: Ino) -> Option<(u64, u64, Timestamp)> {
    let attr = shared.link.inode(ino).ok()?.attr;
    (attr.size > capacity(&shared.link)?).then_some((attr.epoch(), attr.size, attr.mtime))
}

/// There was no room for a file: no more files are released for it if it can never fit.
fn note_too_large(shared: &Shared, ino: Ino) {
    match larger_than_targets(shared, ino) {
        Some(data) => locked(&shared.too_large).insert(ino.0, data),
        None => locked(&shared.too_large).remove(&ino.0),
    };
}

/// Fails for a file that is too large.
fn fails_again(shared: &Shared, ino: Ino) -> Result<()> {
    let known = locked(&shared.too_large).get(&ino.0).copied();
    if known.is_none() || known != larger_than_targets(shared, ino) {
        return Ok(());
    }
    let e = Error::new(Code::NoSpace, format!("cannot restore file {ino}"));
    Err(e.why("it is larger than the pool").cure("make the pool larger"))
}

/// Counts a restore that waits for room, until it is dropped.
struct LacksRoom<'s> {
    shared: &'s Shared,
    counts: bool,
}

impl LacksRoom<'_> {
    fn begin(&mut self) {
        if !std::mem::replace(&mut self.counts, true) {
            self.shared.lacking_room.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for LacksRoom<'_> {
    fn drop(&mut self) {
        if self.counts {
            self.shared.lacking_room.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// True if drains have to make room on this node.
pub(super) fn needs_room(shared: &Shared) -> bool {
    let lacked_room = || locked(&shared.lacked_room).is_some_and(|at| at.elapsed() < SPACE_PATIENCE);
    shared.lacking_room.load(Ordering::Relaxed) > 0 || lacked_room() || is_full(&shared.link)
}

/// True while a file is on its way to a store, or about to be: space may come.
fn is_draining(shared: &Shared) -> bool {
    let report = locked(&shared.report).dirty_files > 0;
    report || shared.stores.is_draining()
}

/// Restores a file for a task, where it may be restored for a program at the same time: one thread restores a file.
pub(super) fn restore_for_task(shared: &Shared, ino: Ino) -> Result<()> {
    while !shared.restoring.begin(ino) {
        host::sleep(OTHER_PERIOD);
    }
    restore_begun(shared, ino)
}

/// The same for a file whose restore this thread has begun.
pub(super) fn restore_begun(shared: &Shared, ino: Ino) -> Result<()> {
    shared.whole.begin(ino);
    let restored = restore_there(shared, ino);
    // Of a restore in the background that another node did.
    shared.ranges.end(ino);
    shared.whole.end(ino);
    shared.restoring.end(ino);
    if let Err(e) = &restored {
        // Programs that wait for it do not wait for ever.
        let _ = shared.link.failed(ino, e.code);
    }
    restored
}

/// Restores a file for a task in the background, if it is in [`Shared::in_background`]. On another node it is restored
/// as others are.
pub(super) fn restore_in_background(shared: &Shared, ino: Ino) -> Result<()> {
    while !shared.restoring.begin(ino) {
        host::sleep(OTHER_PERIOD);
    }
    let ranges = shared.ranges.of(ino);
    ranges.put_in_background();
    // It was brought forward before the line above, or will be after it.
    if !shared.in_background.has(ino) {
        ranges.bring_forward();
    }
    restore_begun(shared, ino)
}
