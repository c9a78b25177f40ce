//! The engine: what the mover does by itself, and for tasks.
//!
//! | thread | does |
//! |---|---|
//! | recover | once: records what a mover that died did, and removes its temporaries |
//! | work | waits for tasks of the shard: directories to list, names to look up, files or ranges to restore; gives each to a thread of its own |
//! | watch | reads the pending places, gives those of each store to a thread that makes a pass; evicts |
//! | peers | takes messages of other nodes' movers, gives their jobs to a thread each |
//! | around | asks other nodes' movers whether they answer, and are full |
//!
//! Requests to the pool may come from any thread. A thread that calls a store holds no lock, so a store that hangs holds
//! up only its own work: calls that wait for it end after the daemon's limit.

mod ahead;
mod batch;
mod copy_turn;
mod copying;
mod drain;
mod evict;
mod hold;
mod holds;
mod kept_ranges;
mod large_copies;
mod link;
mod list;
mod listings;
mod look;
mod looks;
mod lost;
mod marks;
mod moving;
mod name_turns;
mod new_directories;
mod pace;
mod parallel;
mod parts;
mod pass;
mod peers;
mod prestage;
mod prestage_turns;
mod ranges;
mod readers;
mod reconcile;
mod recover;
mod removals;
mod renaming;
mod reports;
mod restore;
mod restore_many;
mod roots;
mod serve;
mod shared;
mod stores;
mod through;
mod trees;
mod upload;
mod upload_batches;
mod upload_directories;
mod upload_queue;
mod walks;
mod wanted;
mod yielding;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use forebay_client::Pool;
use forebay_tasks::{Keep, MoverReport, Verb};
use forebay_types::{Code, Error, Ino, NodeId, PendingPlace, Result, StoreTask, Wanted, FLAG_DIRTY};

use self::evict::Restoring;
use self::holds::Holds;
use self::link::Link;
use self::marks::Marks;
use self::pace::{Found, Pace, WATCH_PERIOD};
use self::pass::{Due, Pass, Reason};
use self::peers::{Counted, Jobs, Peers, Work};
use self::prestage_turns::Turns;
use self::ranges::Ranges;
use self::shared::{
    bring_forward, bytes_of, copied_by, for_programs, locked, needs_room, range_asked, range_asked_there,
    restore_there, Retry, Shared,
};
use self::stores::{AttachedStore, Stores};
use crate::host::{self, Instant};
use crate::program;
use crate::store::Store;
use crate::tasks::{Operations, Progress};

/// Period of the questions to other nodes' movers.
const AROUND_PERIOD: Duration = Duration::from_secs(1);
/// How long a place is left alone after it had to wait or failed; doubled each time, up to the second.
const RETRY_FIRST: Duration = Duration::from_millis(200);
const RETRY_MAX: Duration = Duration::from_secs(20);
/// How long listings and restores wait for what the last mover did.
const RECOVERY_PATIENCE: Duration = Duration::from_secs(10);
/// With fewer pending places, the sizes of other nodes' files are asked for.
const STAT_MAX: usize = 256;
/// How often the bytes of all dirty files are added up.
const SUM_PERIOD: Duration = Duration::from_secs(1);
/// Listings and restores at a time.
const WORKERS_MAX: usize = 128;

/// The running engine.
#[derive(Debug)]
pub(crate) struct Engine {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Starts the engine.
pub fn start(pool: &'static Pool) -> Result<Arc<dyn program::Engine>> {
    // One engine runs in a process, as long as it.
    let link = Link { pool, listings: Box::leak(Box::default()) };
    let shared = Arc::new(Shared {
        link,
        stores: Stores::new(link),
        marks: Marks::new(link),
        restoring: Restoring::default(),
        whole: Restoring::default(),
        in_background: Restoring::default(),
        ranges: Ranges::default(),
        through: kept_ranges::Through::default(),
        listing: Restoring::default(),
        ahead: Restoring::default(),
        looks: looks::Looks::default(),
        persisting: Restoring::default(),
        peers: Peers::new(link),
        jobs: Jobs::default(),
        holds: Holds::default(),
        prestaging: Turns::default(),
        walks: walks::Walks::default(),
        wake: shared::Wake::default(),
        workers: AtomicUsize::new(0),
        lacking_room: AtomicUsize::new(0),
        lacked_room: Mutex::default(),
        too_large: Mutex::default(),
        retries: Mutex::default(),
        report: Mutex::default(),
        is_recovered: AtomicBool::new(false),
    });
    let spawn = |name: &str, run: fn(&Arc<Shared>)| {
        let shared = Arc::clone(&shared);
        let thread = host::start(name, move || run(&shared));
        thread.map_err(|e| Error::io("cannot start a thread of the mover", &e))
    };
    let threads = vec![
        spawn("recover", recover_all)?,
        spawn("work", work)?,
        spawn("watch", watch)?,
        spawn("peers", serve::serve)?,
        spawn("around", look_around)?,
    ];
    Ok(Arc::new(Engine { shared, threads: Mutex::new(threads.into_iter().flatten().collect()) }))
}

fn look_around(shared: &Arc<Shared>) {
    if !shared.link.pool.spans_nodes() {
        return;
    }
    let mut next = Instant::now();
    let mut lost = HashSet::new();
    shared.peers.greet();
    while !shared.stores.is_stopping() {
        host::sleep(WATCH_PERIOD);
        if Instant::now() >= next {
            shared.peers.look_around();
            let now_lost = shared.peers.silent_for(lost::AFTER);
            if !now_lost.is_subset(&lost) {
                lost::release_all(shared, &now_lost);
            }
            lost = now_lost;
            next = Instant::now() + AROUND_PERIOD;
        }
    }
}

/// Hands out the shard's tasks.
fn work(shared: &Arc<Shared>) {
    let mut restart = true;
    wait_for_recovery(shared);
    while !shared.stores.is_stopping() {
        match shared.link.work(restart) {
            Ok(tasks) => {
                restart = false;
                tasks.into_iter().for_each(|task| begin(shared, task));
            }
            Err(code) => {
                tracing::warn!("cannot get tasks from the pool: {}", code.name());
                host::sleep(Duration::from_millis(500));
                restart = true;
            }
        }
    }
}

fn begin(shared: &Arc<Shared>, task: StoreTask) {
    let ino = task.ino();
    let mut asks = None;
    if let StoreTask::Range(_, range) = task {
        match restored_by(shared, ino) {
            Some(node) => asks = Some((node, range)),
            None if range_asked(shared, ino, range) => return,
            None => {}
        }
    }
    if let StoreTask::Restore(_) = task {
        shared.whole.begin(ino);
    }
    let begins = mark_begun(shared, &task);
    if let StoreTask::Restore(_) = task {
        bring_forward(shared, ino);
    }
    if let Some((node, range)) = asks {
        // Its answer may take a while. If this fails, the reader asks again, or waits for the whole file.
        let _ = start_task(shared, move |shared| range_asked_there(shared, node, ino, range));
    }
    if !begins {
        return; // under way
    }
    let for_failure = task.clone();
    if let Err(e) = start_task(shared, move |shared| serve(shared, task)) {
        tracing::error!("cannot start a thread: {e}");
        shared.whole.end(ino);
        mark_ended(shared, &for_failure);
        let _ = match &for_failure {
            StoreTask::Look(_, name) => shared.link.looked_up(ino, name, Code::NoResources as u16),
            _ => shared.link.failed(ino, Code::NoResources),
        };
    }
}

/// The other node on which a file is restored.
fn restored_by(shared: &Shared, ino: Ino) -> Option<NodeId> {
    match shared.link.pool.spans_nodes() {
        true => copied_by(shared, &shared.link.inode(ino).ok()?),
        false => None,
    }
}

/// Starts a thread for a task, once there are not too many.
fn start_task(shared: &Arc<Shared>, run: impl FnOnce(&Shared) + Send + 'static) -> std::io::Result<()> {
    while shared.workers.load(Ordering::Relaxed) >= WORKERS_MAX && !shared.stores.is_stopping() {
        host::sleep(Duration::from_millis(5));
    }
    shared.workers.fetch_add(1, Ordering::Relaxed);
    let for_thread = Arc::clone(shared);
    let run = move || {
        run(&for_thread);
        for_thread.workers.fetch_sub(1, Ordering::Relaxed);
    };
    host::start("task", run).map(drop).inspect_err(|_| {
        shared.workers.fetch_sub(1, Ordering::Relaxed);
    })
}

/// The inodes with a task of this kind under way. None for a name.
fn under_way<'s>(shared: &'s Shared, task: &StoreTask) -> Option<&'s Restoring> {
    match task {
        StoreTask::List(_) => Some(&shared.listing),
        StoreTask::Restore(_) | StoreTask::Range(..) => Some(&shared.restoring),
        StoreTask::Persist(_) => Some(&shared.persisting),
        StoreTask::Look(..) => None,
    }
}

/// False if the task is under way already.
fn mark_begun(shared: &Shared, task: &StoreTask) -> bool {
    match (under_way(shared, task), task) {
        (Some(mine), _) => mine.begin(task.ino()),
        (None, StoreTask::Look(ino, name)) => shared.looks.begin(*ino, name),
        (None, _) => true,
    }
}

fn mark_ended(shared: &Shared, task: &StoreTask) {
    match (under_way(shared, task), task) {
        (Some(mine), _) => {
            mine.end(task.ino());
        }
        (None, StoreTask::Look(ino, name)) => shared.looks.end(*ino, name),
        (None, _) => {}
    }
}

fn serve(shared: &Shared, task: StoreTask) {
    let ino = task.ino();
    let done = match &task {
        StoreTask::Look(directory, name) => {
            let is_listing_due = look::look(shared, *directory, name);
            if let Some(names) = is_listing_due {
                look::list_some(shared, *directory, names);
            }
            return;
        }
        StoreTask::List(_) => {
            let done = list::list(&shared.link, &shared.stores, ino).map(drop);
            shared.listing.end(ino);
            if done.is_ok() {
                ahead::list_ahead(shared, ino);
            }
            done
        }
        StoreTask::Persist(_) => {
            let done = trees::persist(shared, ino);
            shared.persisting.end(ino);
            let code = done.err().map(|e| {
                tracing::warn!("a program waits for the store in vain: {e}");
                for_programs(e.code)
            });
            if let Err(code) = shared.link.persisted(ino, code) {
                tracing::debug!("cannot report that file {ino} is in the store: {}", code.name());
            }
            return;
        }
        StoreTask::Restore(_) | StoreTask::Range(..) => {
            let done = restore_there(shared, ino);
            // Its ranges, if it was restored before.
            shared.ranges.end(ino);
            shared.whole.end(ino);
            shared.restoring.end(ino);
            done
        }
    };
    if let Err(e) = done {
        tracing::warn!("{e}");
        let _ = shared.link.failed(ino, for_programs(e.code));
    }
}

/// Records what the last mover did, and removes the temporaries that it left. A store that does not answer holds this
/// thread: the others wait for [`RECOVERY_PATIENCE`], and each pass over a store begins with the same.
fn recover_all(shared: &Arc<Shared>) {
    let pending =
        || shared.link.all_pending().map_err(|code| Error::new(code, "cannot read the pending places"));
    fence(shared, &pending().unwrap_or_default());
    while !shared.stores.is_stopping() {
        match pending().and_then(|places| recover::recover(&shared.link, &shared.stores, &places, None)) {
            Ok(true) => continue,
            Ok(false) => break,
            Err(e) => tracing::warn!("{e}"),
        }
        host::sleep(Duration::from_millis(500));
    }
    shared.is_recovered.store(true, Ordering::Release);
    // It left them where it uploaded, and there it is still pending.
    let places = pending().unwrap_or_default();
    let directories: BTreeSet<Ino> = places.iter().map(|place| place.parent).collect();
    for directory in directories {
        if shared.stores.is_stopping() {
            return;
        }
        let Ok(located) = shared.stores.locate(directory) else { continue };
        match located.at.store.remove_leftovers(&located.path, &reconcile::is_alive) {
            Ok(_) => {}
            Err(e) if e.code() == Code::NotFound => {}
            Err(e) => located.at.note_failure(&Error::from(e)),
        }
    }
}

/// Ends what the last mover had other nodes do.
fn fence(shared: &Shared, places: &[PendingPlace]) {
    if !shared.link.pool.spans_nodes() || places.is_empty() {
        return;
    }
    let mut nodes: Vec<NodeId> = Vec::new();
    for place in places {
        if let Some(Wanted::Here(entry, _)) = &place.wanted {
            nodes.extend(shared::copied_by(shared, entry).filter(|_| entry.attr.is_file()));
        }
    }
    nodes.sort();
    nodes.dedup();
    shared.peers.fence(&nodes, &|| shared.stores.is_stopping());
}

/// Waits until what the last mover did is recorded, for a limited time.
fn wait_for_recovery(shared: &Shared) {
    let until = Instant::now() + RECOVERY_PATIENCE;
    let is_over = || shared.is_recovered.load(Ordering::Acquire) || shared.stores.is_stopping();
    while !is_over() && Instant::now() < until {
        host::sleep(Duration::from_millis(2));
    }
}

/// Watches the pending places and the free space.
fn watch(shared: &Arc<Shared>) {
    let mut pace = Pace::new();
    let mut summed: Option<Instant> = None;
    let mut known_changes = None;
    wait_for_recovery(shared);
    while !shared.stores.is_stopping() {
        let is_woken = shared.wake.pause(pace.left());
        let is_full = evict::is_full(&shared.link);
        let is_room_needed = needs_room(shared) || shared.peers.is_any_full();
        let have_changed = || shared.link.pending_changes().ok() != known_changes;
        if !is_woken && !pace.is_due(is_room_needed, have_changed) {
            continue;
        }
        let begins = Instant::now();
        // Before they are read: what changes meanwhile is read again.
        known_changes = shared.link.pending_changes().ok();
        let begun = shared.marks.begin();
        let passes = shared.stores.passes();
        let places = match shared.link.pending_until(due_now(shared, is_room_needed)) {
            Ok((places, _)) => places,
            Err(code) => {
                tracing::debug!("cannot read the pending places: {}", code.name());
                pace.failed(begins.elapsed());
                continue;
            }
        };
        let sums = summed.is_none_or(|summed| summed.elapsed() >= SUM_PERIOD);
        if sums {
            summed = Some(Instant::now());
        }
        note(shared, &places, sums);
        marks::pass(&shared.link, &shared.marks, begun, &places);
        let found = drain_all(shared, (places, passes), is_room_needed);
        let looked = begins.elapsed();
        if is_full && (is_woken || pace.is_to_evict(evict::is_waited_for(&shared.link))) {
            let begins = Instant::now();
            let freed = evict::evict(&shared.link, &shared.stores, &shared.peers, &shared.restoring, 0);
            let freed = freed.inspect_err(|e| tracing::warn!("{e}"));
            pace.evicted(begins.elapsed(), freed.unwrap_or(0));
        }
        pace.looked(looked, found);
    }
}

/// What the status shows of the pending places. With `sums` the bytes of dirty files are added up, a system call each;
/// else what they were stays.
fn note(shared: &Shared, places: &[PendingPlace], sums: bool) {
    let mut report = MoverReport { pending_places: Some(places.len() as u64), ..MoverReport::default() };
    for place in places {
        report.conflicts += u64::from(place.conflict);
        if let Some(Wanted::Here(entry, _)) = &place.wanted {
            if entry.attr.is_file() && entry.attr.flags & FLAG_DIRTY != 0 {
                report.dirty_files += 1;
                if !sums {
                    continue;
                }
                // Each question about another node's file is a message.
                let is_asked = places.len() < STAT_MAX || shared.link.pool.is_one_here(&entry.layout);
                report.dirty_bytes += if is_asked { bytes_of(shared, entry) } else { entry.attr.size };
            }
        }
    }
    report.restoring = shared.restoring.count();
    let mut shown = locked(&shared.report);
    if !sums && report.dirty_files > 0 {
        report.dirty_bytes = shown.dirty_bytes;
    }
    *shown = report;
}

/// True for a directory that neither the pool nor the store has, as the pool knows for certain.
fn is_gone(shared: &Shared, directory: Ino) -> bool {
    shared.link.inode(directory) == Err(Code::NotFound)
        && matches!(shared.link.store_place(directory), Err(Code::NotFound))
}

/// The places of each store: those of directories that no store has belong to the store of the nearest one above.
fn by_store(shared: &Shared, places: Vec<PendingPlace>) -> HashMap<u64, Vec<PendingPlace>> {
    let mut stores: HashMap<u64, Vec<PendingPlace>> = HashMap::new();
    let mut roots: HashMap<u64, Option<Ino>> = HashMap::new();
    for place in places {
        let root = *roots.entry(place.parent.0).or_insert_with(|| roots::root_of(&shared.link, place.parent));
        match root {
            Some(root) => stores.entry(root.0).or_default().push(place),
            // Its directory is gone from the pool and from the store, and the place with it.
            None if is_gone(shared, place.parent) => {
                if let Err(code) = shared.link.unpublished(place.parent, &place.name, place.changes) {
                    tracing::debug!("cannot forget a place of a directory that is gone: {}", code.name());
                }
            }
            None => {}
        }
    }
    stores
}

/// How many of these places a pass can take now: those that wait for a request, or that failed just now, are none of them.
fn due_now(shared: &Shared, is_full: bool) -> impl FnMut(&[PendingPlace]) -> usize + '_ {
    let now = Instant::now();
    let mut stores: HashMap<u64, Option<Arc<AttachedStore>>> = HashMap::new();
    let reason = Reason { forced: false, is_full, progress: None, go_on: &|| true, gives_way: false };
    let mut has_store_due = move |place: &PendingPlace| {
        let store = |parent| shared.stores.of(roots::root_of(&shared.link, parent)?).ok();
        let at = stores.entry(place.parent.0).or_insert_with(|| store(place.parent)).as_ref();
        let due_in = |at: &Arc<AttachedStore>| drain::due_in(&shared.link, at, place, reason);
        at.is_some_and(|at| place.intent.is_some() || due_in(at).is_some_and(|time| time.is_zero()))
    };
    move |places| {
        let retries = locked(&shared.retries);
        let waits = |place: &PendingPlace| {
            retries.get(&(place.parent, place.name.clone())).is_some_and(|retry| retry.at > now)
        };
        let ready: Vec<&PendingPlace> = places.iter().filter(|place| !waits(place)).collect();
        drop(retries);
        ready.into_iter().filter(|place| has_store_due(place)).count()
    }
}

/// Starts a pass over the places of each store that has none under way, if any is due. `passes` had ended before the places
/// were read.
fn drain_all(shared: &Arc<Shared>, (places, passes): (Vec<PendingPlace>, u64), is_full: bool) -> Found {
    let now = Instant::now();
    let mut until_due: Option<Duration> = None;
    let mut note = |time: Duration| until_due = Some(until_due.map_or(time, |least| least.min(time)));
    let intended = pass::intended(&places);
    let places = {
        let mut retries = locked(&shared.retries);
        if retries.len() > 4 * places.len() + 1000 {
            retries.retain(|_, retry| retry.at > now);
        }
        let mut is_due = |place: &PendingPlace| {
            let retry = retries.get(&(place.parent, place.name.clone()));
            let waits = retry.map(|retry| retry.at.since(now)).filter(|time| !time.is_zero());
            waits.map(&mut note).is_none()
        };
        places.into_iter().filter(|place| is_due(place)).collect::<Vec<_>>()
    };
    let mut started = false;
    for (root, mut places) in by_store(shared, places) {
        let Ok(at) = shared.stores.of(Ino(root)) else { continue };
        let reason = Reason { forced: false, is_full, progress: None, go_on: &|| true, gives_way: false };
        // A pass reads all places again: none is made for places that wait to be requested.
        let mut is_due = |place: &PendingPlace| {
            let time = drain::due_in(&shared.link, &at, place, reason);
            time.filter(|time| !time.is_zero()).map(&mut note);
            time.is_some_and(|time| time.is_zero())
        };
        places.retain(|place| place.intent.is_some() || is_due(place));
        if places.is_empty() {
            continue;
        }
        if at.is_draining.swap(true, Ordering::AcqRel) {
            // The pass that is under way ends soon, and wakes this thread only if it has done something.
            note(Duration::ZERO);
            continue;
        }
        started = true;
        let for_thread = Arc::clone(shared);
        let mine = Arc::clone(&at);
        let intended = (shared.stores.passes() == passes).then(|| intended.clone());
        let run = move || {
            let mut pass = yielding::pass(&for_thread, &mine, Due { places, intended }, is_full);
            let to_restore = std::mem::take(&mut pass.to_restore);
            let has_done = pass.done > 0;
            note_pass(&for_thread, pass);
            for_thread.stores.end_pass(&mine);
            if drain::restore_after(&for_thread, to_restore) || has_done {
                // What became due meanwhile: the store does not rest.
                for_thread.wake.set();
            }
        };
        if host::start("drain", run).is_err() {
            shared.stores.end_pass(&at);
        }
    }
    if started {
        Found::Due
    } else {
        Found::Nothing(until_due)
    }
}

/// Places that wait or failed are left alone for a while.
fn note_pass(shared: &Shared, pass: Pass) {
    let now = Instant::now();
    let mut retries = locked(&shared.retries);
    let waits = pass.later.into_iter().map(|place| (place, Duration::from_secs(2)));
    let fails = pass.failed.into_iter().map(|(place, _)| (place, RETRY_MAX));
    for (place, most) in waits.chain(fails) {
        let retry = retries.entry(place).or_insert(Retry { count: 0, at: now });
        let pause = (RETRY_FIRST * 2u32.pow(retry.count.min(10))).min(most);
        *retry = Retry { count: retry.count + 1, at: now + pause };
    }
}

impl Engine {
    /// The node that has the tree of an inode, if it is not this one.
    fn elsewhere(&self, ino: Ino) -> Option<NodeId> {
        let (node, me) = (ino.birth_node(), self.shared.peers.me());
        (node != me && self.shared.link.pool.spans_nodes()).then_some(node)
    }

    /// Has the mover of the node that has a tree run a task.
    fn run_there(
        &self,
        node: NodeId,
        verb: Verb,
        ino: Ino,
        recursive: bool,
        progress: &Progress,
    ) -> Result<()> {
        let before = Mutex::new([0; 4]);
        let each = |Counted { counts }: Counted| {
            let before = std::mem::replace(&mut *locked(&before), counts);
            let more: Vec<u64> =
                counts.iter().zip(before).map(|(now, then)| now.saturating_sub(then)).collect();
            progress.found(more[0], more[2]);
            progress.done(more[1], more[3]);
        };
        let is_over = || progress.is_cancelled() || self.shared.stores.is_stopping();
        let work = Work::Task { verb, ino: ino.0, recursive };
        let outcome = self.shared.peers.run(node, work, &each, &is_over)?;
        let known = outcome.errors.len() as u64;
        for error in outcome.errors {
            progress.failed(error.path, &error.error.into());
        }
        for _ in known..outcome.error_count {
            progress.failed("...", &Error::new(Code::Io, "see the log of the node that has the tree"));
        }
        Ok(())
    }
}

impl Operations for Engine {
    fn run(&self, verb: Verb, ino: Ino, recursive: bool, progress: &Progress) -> Result<()> {
        match self.elsewhere(ino) {
            None => trees::run(&self.shared, verb, ino, recursive, progress),
            Some(node) => self.run_there(node, verb, ino, recursive, progress),
        }
    }

    fn resolve(&self, parent: Ino, name: &[u8], keep: Keep) -> Result<()> {
        let Some(node) = self.elsewhere(parent) else {
            return trees::resolve(&self.shared, parent, name, keep);
        };
        let work = Work::Resolve { parent: parent.0, name: name.to_vec(), keep };
        let is_over = || self.shared.stores.is_stopping();
        self.shared.peers.run(node, work, &|_| {}, &is_over).map(drop)
    }

    fn probe(&self, url: &str) -> Result<()> {
        self.shared.stores.probe(url)
    }
}

impl program::Engine for Engine {
    fn report(&self) -> MoverReport {
        MoverReport { stores: self.shared.stores.report(), ..locked(&self.shared.report).clone() }
    }

    fn stop(&self) {
        self.shared.stores.stopping.store(true, Ordering::Relaxed);
        // Threads that hang in a store are left to the process's end.
        let until = Instant::now() + Duration::from_secs(3);
        for thread in locked(&self.threads).drain(..) {
            while !thread.is_finished() && Instant::now() < until {
                host::sleep(Duration::from_millis(10));
            }
        }
    }
}
