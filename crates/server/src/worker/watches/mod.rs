//! Directories that preloaded programs watch with inotify (docs/decisions/0036).
//!
//! The kernel raises inotify events for changes of its own directories alone. So the daemon keeps a mirror of each watched directory: a
//! kernel's directory, on the first target where that is memory and else in the pool's directory. It has an empty file or directory for each
//! name, and the watch thread makes every change there that the shard thread made to the watched one. The program's own inotify instance
//! watches the mirror, so that its events are the kernel's.
//!
//! ```text
//!  program ── KIND_WATCH, its inotify descriptor ──► connection's thread ── Ask ──► watch thread ──► mirrors
//!  shard thread ── Listed, Changes, after the board shows them ──────────────────────▲    │
//!        ▲──────────────────────────── Enrol, List, Leave ─────────────────────────────────┘
//!  the kernel ── contents of backing files that changed (contents.rs) ────────────────▲
//! ```
//!
//! The watch thread starts with the first watch; before that a change costs one look at an option. The shard thread never waits for it. Which
//! mirrors still have watches the kernel tells by weak references (`holders.rs`), so that nothing is recorded of processes: close, dup, fork,
//! exec and death need no word. The references outlive the worker in the descriptor store; the next worker compares each mirror with
//! its directory, and what happened in between is told as removals and creations.
//!
//! Tests: beside the code; `crates/preload/tests/watches.rs`.

mod contents;
mod holders;
mod mirror;
mod thread;

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};

use forebay_data::NodeTargets;
use forebay_meta::Effects;
use forebay_ring::Doorbell;
use forebay_types::limits::MESSAGE_BYTES_MAX;
use forebay_types::{Caller, Code, Cookie, Error, Ino, Kind, Reply, Request, Result};

use super::shard_thread::{Message, ShardThread};
use crate::directory::MIRRORS_DIRECTORY;
use crate::store::FdStore;
use holders::Holders;
use thread::WatchThread;

/// The tag of the weak references in the supervisor's store.
const TAG: &str = "watches";

/// A name after a change, and what it leads to.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Named {
    parent: Ino,
    name: Vec<u8>,
    entry: Option<(Ino, Kind)>,
}

/// A change to what is watched.
#[derive(Debug)]
enum Change {
    /// Names of one change, each with what it leads to now.
    Names(Vec<Named>),
    /// The two names of a rename: the source's, then the destination's.
    Rename(Named, Named),
    /// Mode, owner or extended attributes of an inode were set.
    Attributes(Ino),
    /// A watched directory was removed, or was spread over several nodes.
    Gone(Ino),
}

/// A program's request to watch a directory.
#[derive(Debug)]
struct Ask {
    directory: Ino,
    inotify: OwnedFd,
    mask: u32,
    answer: Sender<std::result::Result<i32, Code>>,
}

/// Entries of a directory, and the cookie behind which there are more.
type Chunk = (Vec<(Vec<u8>, Ino, Kind)>, Option<Cookie>);

/// What the watch thread receives. Of words from the shard thread, each holds from the moment at which it was sent.
#[derive(Debug)]
enum Word {
    Ask(Ask),
    Changes(Vec<Change>),
    Listed(Ino, std::result::Result<Chunk, Code>),
}

/// The watch thread, as others reach it.
#[derive(Clone, Debug)]
pub(super) struct Words {
    words: Sender<Word>,
    /// An eventfd that the thread polls.
    wake: Arc<OwnedFd>,
}

impl Words {
    /// The thread lives as long as the worker, so that nothing sent is lost.
    fn send(&self, word: Word) {
        let _ = self.words.send(word);
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }
}

/// What the watch thread asks of the shard thread. Answered by [`Word::Listed`].
#[derive(Debug)]
pub(super) enum Command {
    /// Send changes of this directory from now on, and the first of its entries.
    Enrol(Ino, Words),
    /// The entries behind a cookie.
    List(Ino, Cookie),
    /// Send no more changes of this directory.
    Leave(Ino),
}

/// What the watch thread works with.
#[derive(Clone, Debug)]
struct SpaceMap {
    mirrors: PathBuf,
    targets: Arc<NodeTargets>,
    to_shard: Sender<Message>,
    doorbell: Arc<Doorbell>,
}

/// Ends all watches: the pool is stopped. Each is told of the removal of its directory.
pub(super) fn end(place: &Path) {
    let _ = std::fs::remove_dir_all(place.join(MIRRORS_DIRECTORY));
}

/// The attendant's end.
#[derive(Debug)]
pub(super) struct Watches {
    space_map: SpaceMap,
    store: FdStore,
    words: Mutex<Option<Words>>,
}

impl Watches {
    /// Takes over what the last worker left with the supervisor, out of `left`; mirrors in `place` without that are removed.
    pub(super) fn restored(
        place: &Path,
        targets: &Arc<NodeTargets>,
        to_shard: &Sender<Message>,
        doorbell: &Arc<Doorbell>,
        store: FdStore,
        left: &mut Vec<(String, Vec<OwnedFd>)>,
    ) -> Watches {
        let space_map = SpaceMap {
            mirrors: place.join(MIRRORS_DIRECTORY),
            targets: Arc::clone(targets),
            to_shard: to_shard.clone(),
            doorbell: Arc::clone(doorbell),
        };
        let kept = left.extract_if(.., |(tag, _)| tag == TAG).find_map(|(_, mut fds)| fds.pop());
        let words = match kept {
            Some(epoll) => {
                let taken_over = WatchThread::start(space_map.clone(), Holders::of(epoll));
                taken_over.inspect_err(|e| tracing::error!("the last worker's watches end: {e}")).ok()
            }
            None => None,
        };
        if words.is_none() {
            // Of an earlier supervisor, or of no use any more.
            end(place);
        }
        Watches { space_map, store, words: Mutex::new(words) }
    }

    fn words(&self) -> Result<Words> {
        let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(words) = &*words {
            return Ok(words.clone());
        }
        let holders = Holders::create()?;
        self.store.put(TAG, &[holders.epoll()])?;
        let started = WatchThread::start(self.space_map.clone(), holders)?;
        Ok(words.insert(started).clone())
    }

    /// Watches a directory with an inotify instance; the watch's descriptor.
    pub(super) fn watch(
        &self,
        directory: Ino,
        inotify: OwnedFd,
        mask: u32,
    ) -> std::result::Result<i32, Code> {
        let words = self.words().map_err(|e: Error| {
            tracing::warn!("{e}");
            Code::NotSupported
        })?;
        let (answer, answered) = mpsc::channel();
        words.send(Word::Ask(Ask { directory, inotify, mask, answer }));
        answered.recv().map_err(|_| Code::Io)?
    }
}

/// The shard thread's end: which directories are watched, and what is to be sent of them.
#[derive(Debug)]
pub(super) struct Watched {
    directories: HashSet<Ino>,
    changes: Vec<Change>,
    words: Words,
}

impl Watched {
    /// Notes a change, whose effects begin at `shown` (names, inodes).
    pub(super) fn note(&mut self, request: &Request<'_>, effects: &Effects, shown: (usize, usize)) {
        if self.directories.is_empty() {
            return;
        }
        let named = |n: forebay_meta::NameEffect<'_>| Named {
            parent: n.parent,
            name: n.name.to_vec(),
            entry: n.entry,
        };
        let concerns = |n: &Named| {
            let leads = n.entry.is_some_and(|(ino, _)| self.directories.contains(&ino));
            leads || self.directories.contains(&n.parent)
        };
        let mut names: Vec<Named> = match request {
            Request::Rename { .. } => effects.names().skip(shown.0).map(named).collect(),
            _ => effects
                .names()
                .skip(shown.0)
                .filter(|n| self.directories.contains(&n.parent))
                .map(named)
                .collect(),
        };
        if names.iter().any(concerns) {
            self.changes.push(match (request, names.len()) {
                (Request::Rename { .. }, 2) => {
                    let (to, from) = (names.remove(1), names.remove(0));
                    Change::Rename(from, to)
                }
                _ => Change::Names(names),
            });
        }
        for (ino, entry) in &effects.inodes()[shown.1..] {
            if entry.is_none() && self.directories.remove(ino) {
                self.changes.push(Change::Gone(*ino));
            }
        }
        if let Request::SetAttr { ino, .. }
        | Request::SetXattr { ino, .. }
        | Request::RemoveXattr { ino, .. } = *request
        {
            self.changes.push(Change::Attributes(ino));
        }
    }

    /// Sends what was noted, now that the board shows it.
    pub(super) fn send(&mut self, widened: &[Ino]) {
        for ino in widened {
            if self.directories.remove(ino) {
                self.changes.push(Change::Gone(*ino));
            }
        }
        if !self.changes.is_empty() {
            self.words.send(Word::Changes(std::mem::take(&mut self.changes)));
        }
    }
}

impl ShardThread<'_> {
    /// Directories that are watched, for `status`.
    pub(super) fn watched_directories(&self) -> usize {
        self.watched.as_ref().map_or(0, |watched| watched.directories.len())
    }

    /// Does what the watch thread asks.
    pub(super) fn mind_watches(&mut self, order: Command) -> Result<()> {
        let (directory, cookie) = match order {
            Command::Leave(directory) => {
                if let Some(watched) = &mut self.watched {
                    watched.directories.remove(&directory);
                }
                return Ok(());
            }
            Command::List(directory, cookie) => (directory, cookie),
            Command::Enrol(directory, words) => {
                let watched = self.watched.get_or_insert_with(|| Watched {
                    directories: HashSet::new(),
                    changes: Vec::new(),
                    words,
                });
                watched.directories.insert(directory);
                (directory, 0)
            }
        };
        let listed = self.list_watched(directory, cookie)?;
        if let Some(watched) = &mut self.watched {
            if listed.is_err() {
                watched.directories.remove(&directory);
            }
            watched.words.send(Word::Listed(directory, listed));
        }
        Ok(())
    }

    /// Entries of a watched directory behind a cookie. [`Code::NotSupported`] where other nodes have them.
    fn list_watched(&mut self, directory: Ino, cookie: Cookie) -> Result<std::result::Result<Chunk, Code>> {
        if self.network.as_ref().is_some_and(|network| network.node != directory.birth_node()) {
            return Ok(Err(Code::NotSupported));
        }
        let (mut out, mut effects) = (vec![0; MESSAGE_BYTES_MAX], Effects::new());
        let batch = self.batch()?;
        let mut ask = |request: &Request<'_>, out: &mut [u8]| {
            effects.clear();
            batch.apply(Caller { uid: 0, gid: 0 }, request, super::now(), &mut effects, out)
        };
        let n = ask(&Request::GetAttr { ino: directory }, &mut out);
        match Reply::decode(&out[..n]) {
            Ok(Reply::Entry(entry)) if !entry.attr.is_directory() => return Ok(Err(Code::NotDirectory)),
            Ok(Reply::Entry(entry)) if entry.attr.width_log2 != 0 => return Ok(Err(Code::NotSupported)),
            Ok(Reply::Entry(_)) => {}
            Ok(_) => return Ok(Err(Code::Io)),
            Err(code) => return Ok(Err(code)),
        }
        let n = ask(&Request::ReadDirectory { ino: directory, cookie, attributes: false }, &mut out);
        let entries = match Reply::decode(&out[..n]) {
            Ok(Reply::Entries(entries)) => entries,
            Ok(_) => return Ok(Err(Code::Io)),
            Err(code) => return Ok(Err(code)),
        };
        let (mut list, mut last) = (Vec::new(), None);
        for entry in entries.iter() {
            let Ok(entry) = entry else { return Ok(Err(Code::Io)) };
            last = Some(entry.cookie);
            if !matches!(entry.name, b"." | b"..") {
                list.push((entry.name.to_vec(), entry.ino, entry.kind));
            }
        }
        Ok(Ok((list, last.filter(|_| !entries.end))))
    }
}
