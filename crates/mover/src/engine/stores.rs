//! The stores that are attached to the pool, opened when they are first needed, and where they have what.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_tasks::{Policy, StoreReport, StoreSettings};
use forebay_types::{
    Code, Error, Ino, Kind, NodeId, PendingPlace, Placed, Result, StorePlace, StoreVersion, Timestamp,
    Wanted, FLAG_STORE,
};

use super::large_copies::LargeCopies;
use super::link::Link;
use crate::host::{self, Instant};
use crate::store::limited::Limited;
use crate::store::{MoverId, Store, StoreDirectory, StorePath, StoreUrl};

/// How often it is looked whether another pool claims a store.
const CLAIMS_PERIOD: Duration = Duration::from_secs(1);

/// An attached store.
pub(super) struct AttachedStore {
    /// The directory at which it is attached.
    pub(super) root: Ino,
    pub(super) store: Arc<Limited>,
    pub(super) read_only: bool,
    pub(super) settings: StoreSettings,
    /// The same as the directory has them.
    raw_settings: Vec<u8>,
    /// When the directory was changed last, as of the last look at its settings.
    seen: Mutex<Option<Timestamp>>,
    url: String,
    last_error: Mutex<Option<(String, u64)>>,
    /// Old names of files that were copied to others, with their versions: to be removed.
    pub(super) outdated: Mutex<Vec<(StorePath, StoreVersion)>>,
    /// When files that stay open were copied last.
    pub(super) snapshots: Mutex<HashMap<u64, Instant>>,
    /// True while a thread drains to it.
    pub(super) is_draining: AtomicBool,
    /// The large files that are being copied to it.
    pub(super) large_copies: LargeCopies,
    /// Whether another pool claimed it, and when that was looked at.
    claimed: Mutex<Option<(Instant, bool)>>,
}

impl std::fmt::Debug for AttachedStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AttachedStore")
            .field("root", &self.root)
            .field("url", &self.url)
            .finish_non_exhaustive()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl AttachedStore {
    /// The policy of what is, or was, at a place.
    pub(super) fn policy_of(&self, link: &Link, place: &PendingPlace) -> Policy {
        let is_directory = match (&place.wanted, &place.placed) {
            (Some(Wanted::Here(entry, _)), _) => entry.attr.is_directory(),
            (Some(Wanted::Elsewhere(_, kind)), _) => *kind == Kind::Directory,
            (None, placed) => placed.is_some_and(|placed| placed.kind == Kind::Directory),
        };
        match is_directory {
            true => self.settings.policy_of_directories(),
            false if self.settings.rules.is_empty() => self.settings.drain,
            false => {
                let mut path = link.path_below(self.root, place.parent).unwrap_or_default();
                if !path.is_empty() {
                    path.push(b'/');
                }
                path.extend_from_slice(&place.name);
                self.settings.policy_of(&path)
            }
        }
    }

    /// Whether a transfer of another pool goes before what policies drain here.
    pub(super) fn is_claimed(&self) -> bool {
        let Some(yield_to) = &self.settings.yield_to else { return false };
        let known = locked(&self.claimed).filter(|(at, _)| at.elapsed() < CLAIMS_PERIOD);
        let is_claimed = known.map_or_else(|| yield_to.is_claimed(), |(_, is_claimed)| is_claimed);
        if known.is_none() {
            *locked(&self.claimed) = Some((Instant::now(), is_claimed));
        }
        is_claimed
    }

    /// Remembers a failure for the status, and logs it.
    pub(super) fn note_failure(&self, e: &Error) {
        tracing::warn!("{}: {e}", self.url);
        let now = host::since_1970().as_secs();
        *locked(&self.last_error) = Some((e.to_string(), now));
    }

    /// A call succeeded.
    pub(super) fn note_success(&self) {
        locked(&self.last_error).take();
    }
}

fn replaced(at: &AttachedStore) -> Error {
    let e = Error::new(Code::Io, format!("cannot use the store {}", at.url))
        .why("its directory was removed or replaced, or its file system was unmounted");
    at.note_failure(&e);
    e
}

/// Where a store has an inode.
#[derive(Clone, Debug)]
pub(super) struct Located {
    pub(super) at: Arc<AttachedStore>,
    pub(super) path: StorePath,
    /// What the store has there; none for the directory with the store.
    pub(super) placed: Option<Placed>,
    /// The epoch of a file's data there.
    pub(super) epoch: u64,
}

/// All attached stores.
#[derive(Debug)]
pub(super) struct Stores {
    link: Link,
    mover: MoverId,
    open: Mutex<HashMap<u64, Arc<AttachedStore>>>,
    /// The directories of stores that were closed since they were not current, with the settings of that time: they are
    /// opened again as these, also where the settings do not tell.
    closed: Mutex<HashMap<u64, (Vec<u8>, StoreDirectory)>>,
    /// Stores that could not be opened, for the status.
    failed: Mutex<HashMap<u64, (String, String, u64)>>,
    /// Passes over any store that have ended.
    passes: AtomicU64,
    pub(super) stopping: AtomicBool,
}

impl Stores {
    pub(super) fn new(link: Link) -> Stores {
        Stores {
            link,
            mover: MoverId::own(),
            open: Mutex::default(),
            closed: Mutex::default(),
            failed: Mutex::default(),
            passes: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
        }
    }

    /// True while a pass over any store is under way.
    pub(super) fn is_draining(&self) -> bool {
        locked(&self.open).values().any(|at| at.is_draining.load(Ordering::Acquire))
    }

    /// The number of passes that have ended. If it is the same before all pending places are read and after a thread has set
    /// `is_draining`, no pass over that store has changed them meanwhile.
    pub(super) fn passes(&self) -> u64 {
        self.passes.load(Ordering::Acquire)
    }

    /// The thread that has set `is_draining` ends its pass.
    pub(super) fn end_pass(&self, at: &AttachedStore) {
        self.passes.fetch_add(1, Ordering::AcqRel);
        at.is_draining.store(false, Ordering::Release);
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Opens a store that is not attached, and looks at its root.
    pub(super) fn probe(&self, url: &str) -> Result<()> {
        let store = StoreUrl::parse(url.as_bytes())?.open(self.mover.clone()).map_err(Error::from)?;
        let store: Arc<dyn Store> = store;
        store.list(&StorePath::root(), &mut |_| Ok(())).map_err(Error::from).map(|_| ())
    }

    /// The store that is attached at a directory.
    pub(super) fn of(&self, root: Ino) -> Result<Arc<AttachedStore>> {
        let known = locked(&self.open).get(&root.0).cloned();
        if let Some(store) = known {
            // The change of an attribute changes this time, which the board has: no request.
            let changed = self.link.inode(root).ok().map(|entry| entry.attr.ctime);
            if changed.is_some() && *locked(&store.seen) == changed {
                return Ok(store);
            }
            match self.link.settings(root) {
                Ok(bytes) if bytes != store.raw_settings => {}
                Err(Code::NoAttribute | Code::NotFound) => {}
                Ok(_) => {
                    *locked(&store.seen) = changed;
                    return Ok(store);
                }
                Err(_) => return Ok(store),
            }
            // It was detached; another may be attached there by now.
            locked(&self.open).remove(&root.0);
        }
        let opened = self.open(root);
        let mut failed = locked(&self.failed);
        match opened {
            Ok(store) => {
                failed.remove(&root.0);
                let mut open = locked(&self.open);
                Ok(Arc::clone(open.entry(root.0).or_insert(store)))
            }
            Err((url, e)) => {
                let (text, now) = (e.to_string(), host::since_1970().as_secs());
                let before = failed.insert(root.0, (url, text.clone(), now));
                // It is tried often.
                if before.is_none_or(|(_, before, _)| before != text) {
                    tracing::warn!("{text}");
                }
                Err(e)
            }
        }
    }

    fn open(&self, root: Ino) -> std::result::Result<Arc<AttachedStore>, (String, Error)> {
        let what = || format!("cannot open the store attached at {}", self.link.path(root, b""));
        let bytes = self.link.settings(root).map_err(|code| (String::new(), Error::new(code, what())))?;
        let settings: StoreSettings = serde_json::from_slice(&bytes)
            .map_err(|e| (String::new(), Error::new(Code::Corrupt, what()).why(e)))?;
        let open = || -> Result<(String, Arc<Limited>)> {
            let mut parsed = StoreUrl::parse(settings.url.as_bytes())?;
            let title = parsed.to_string();
            parsed.limits = parsed.limits.share_of(self.link.pool.node_count());
            let settled =
                StoreDirectory { number: settings.directory_ino, file_system: settings.file_system };
            let closed =
                locked(&self.closed).get(&root.0).filter(|(then, _)| *then == bytes).map(|(_, it)| *it);
            let directory = match settled == StoreDirectory::default() {
                true => closed.unwrap_or_default(),
                false => settled,
            };
            let store = parsed.open_directory(directory, self.mover.clone()).map_err(Error::from)?;
            Ok((title, store))
        };
        match open() {
            Ok((title, store)) => Ok(Arc::new(AttachedStore {
                root,
                store,
                read_only: settings.read_only,
                settings,
                raw_settings: bytes,
                seen: Mutex::default(),
                url: title,
                last_error: Mutex::default(),
                outdated: Mutex::default(),
                snapshots: Mutex::default(),
                is_draining: AtomicBool::new(false),
                large_copies: LargeCopies::default(),
                claimed: Mutex::default(),
            })),
            // A store that is missing does not lack a name.
            Err(e) if matches!(e.code, Code::NotFound | Code::NotDirectory) => {
                Err((settings.url, Error { code: Code::Io, ..e }))
            }
            Err(e) => Err((settings.url, e)),
        }
    }

    /// An error if a store's directory is not, or not any more, the one that was opened. The store is opened again when it
    /// is needed next, but not while a pass over it is under way. A thread that calls the store asks this when it misses
    /// something there.
    pub(super) fn check(&self, at: &AttachedStore) -> Result<()> {
        if at.store.is_current() {
            return Ok(());
        }
        if !at.is_draining.swap(true, Ordering::AcqRel) {
            self.close(at);
            at.is_draining.store(false, Ordering::Release);
        }
        Err(replaced(at))
    }

    /// The same for the thread that makes a pass over the store. An error, too, if the store was closed and perhaps opened
    /// again since this thread has asked for it: another thread may make a pass over it.
    pub(super) fn check_for_pass(&self, at: &AttachedStore) -> Result<()> {
        if at.store.is_current() {
            return match self.is_open(at) {
                true => Ok(()),
                false => Err(replaced(at)),
            };
        }
        self.close(at);
        Err(replaced(at))
    }

    fn close(&self, at: &AttachedStore) {
        let mut open = locked(&self.open);
        if open.get(&at.root.0).is_some_and(|now| std::ptr::eq(Arc::as_ptr(now), at)) {
            open.remove(&at.root.0);
            let closed = (at.raw_settings.clone(), at.store.directory());
            locked(&self.closed).insert(at.root.0, closed);
        }
    }

    fn is_open(&self, at: &AttachedStore) -> bool {
        locked(&self.open).get(&at.root.0).is_some_and(|now| std::ptr::eq(Arc::as_ptr(now), at))
    }

    /// The directories with stores whose trees' names this node has, as far as their stores were opened.
    pub(super) fn roots(&self) -> Vec<Ino> {
        let here = self.link.pool.node().unwrap_or(NodeId::FIRST);
        let open = locked(&self.open);
        open.keys().map(|root| Ino(*root)).filter(|root| root.birth_node() == here).collect()
    }

    /// True for a file whose policy is that it stays in the pool longest.
    pub(super) fn is_reusable(&self, ino: Ino) -> bool {
        let open = locked(&self.open);
        let has_any = open.values().any(|at| {
            at.settings.drain.reusable || at.settings.rules.iter().any(|rule| rule.policy.reusable)
        });
        drop(open);
        has_any
            && self
                .locate(ino)
                .is_ok_and(|located| located.at.settings.policy_of(located.path.as_bytes()).reusable)
    }

    /// Where its store has an inode. [`Code::NotFound`] if it does not have it.
    pub(super) fn locate(&self, ino: Ino) -> Result<Located> {
        self.located(ino, self.link.store_place(ino))
    }

    /// The same, once the pool has answered where the store has it.
    pub(super) fn located(&self, ino: Ino, place: std::result::Result<StorePlace, Code>) -> Result<Located> {
        let what = || format!("cannot find inode {ino} in its backing store");
        let place = place.map_err(|code| Error::new(code, what()))?;
        if !place.is_root {
            return Err(Error::new(Code::NotSupported, what()).why("another node has its directory"));
        }
        let path = StorePath::new(place.path).map_err(|code| Error::new(code, what()))?;
        Ok(Located { at: self.of(place.top)?, path, placed: place.placed, epoch: place.epoch })
    }

    pub(super) fn report(&self) -> Vec<StoreReport> {
        let is_attached = |root: u64| {
            let entry = self.link.inode(Ino(root));
            // One that cannot be asked about now stays.
            entry.map_or_else(|code| code != Code::NotFound, |entry| entry.attr.flags & FLAG_STORE != 0)
        };
        let known: Vec<_> = locked(&self.open).iter().map(|(root, store)| (*root, store.clone())).collect();
        let open: Vec<_> =
            known.into_iter().filter(|(root, _)| is_attached(*root)).map(|(_, store)| store).collect();
        let mut all: Vec<_> = open
            .iter()
            .map(|store| {
                let last = locked(&store.last_error).clone();
                StoreReport {
                    at: self.link.path(store.root, b""),
                    url: store.url.clone(),
                    last_error: last.as_ref().map(|(text, _)| text.clone()),
                    last_error_s: last.map(|(_, at)| at),
                }
            })
            .collect();
        all.extend(locked(&self.failed).iter().map(|(root, (url, error, at))| StoreReport {
            at: self.link.path(Ino(*root), b""),
            url: url.clone(),
            last_error: Some(error.clone()),
            last_error_s: Some(*at),
        }));
        all.sort_by(|a, b| a.at.cmp(&b.at));
        all
    }
}
