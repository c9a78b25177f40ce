//! Directories that preloaded programs watch with inotify (docs/decisions/0036).
//!
//! The kernel raises inotify events for changes of its own directories alone. So the daemon keeps a mirror of each
//! watched directory: a kernel's directory, on the first target where that is memory and else in the pool's directory.
//! It has an empty file or directory for each name, and the watch thread makes every change there that the shard thread
//! made to the watched one. The program's own inotify instance watches the mirror, so that its events are the kernel's.
//!
//! ```text
//!  program ── KIND_WATCH, its inotify descriptor ──► connection's thread ── Ask ──► watch thread ──► mirrors
//!  shard thread ── Listed, Changes, after the board shows them ──────────────────────▲    │
//!        ▲──────────────────────────── Enrol, List, Leave ─────────────────────────────────┘
//!  the kernel ── contents of backing files that changed (contents.rs) ────────────────▲
//! ```
//!
//! The watch thread starts with the first watch; before that a change costs one look at an option. The shard thread
//! never waits for it. Which mirrors still have watches the kernel tells by weak references (`holders.rs`), so that
//! nothing is recorded of processes: close, dup, fork, exec and death need no word. The references outlive the worker
//! in the descriptor store; the next worker compares each mirror with its directory, and what happened in between is
//! told as removals and creations.
//!
//! Tests: beside the code; `crates/preload/tests/watches.rs`.

mod contents;
mod holders;
mod mirror;
mod thread;
mod words;

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use forebay_data::NodeTargets;
use forebay_meta::Since;
use forebay_ring::Doorbell;
use forebay_types::limits::{WATCHED_NAMES_MAX, WATCH_CHANGES_MAX};
use forebay_types::{Code, Error, Ino, Request, Result};

use super::message::Message;
use crate::directory::MIRRORS_DIRECTORY;
use crate::store::FdStore;
use holders::Holders;
use thread::{WatchContext, WatchThread};
use words::{Ask, Named};

pub(super) use words::{Change, Chunk, Command, Word, Words};

/// The tag of the weak references in the supervisor's store.
const TAG: &str = "watches";
/// Longest wait of a connection for its watch. It is shorter than the client's wait for the answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Ends all watches: the pool is stopped. Each is told of the removal of its directory.
pub(super) fn end(place: &Path) {
    let _ = std::fs::remove_dir_all(place.join(MIRRORS_DIRECTORY));
}

/// The attendant's end.
#[derive(Debug)]
pub(super) struct Watches {
    context: WatchContext,
    store: FdStore,
    pub(in crate::worker) words: Mutex<Option<Words>>,
}

impl Watches {
    /// Takes over what the last worker left with the supervisor, out of `left`; mirrors in `place` without that are
    /// removed. The watch thread does both: they can take long, and the worker is to serve.
    pub(super) fn restored(
        place: &Path,
        targets: &Arc<NodeTargets>,
        to_shard: &Sender<Message>,
        doorbell: &Arc<Doorbell>,
        store: FdStore,
        left: &mut Vec<(String, Vec<OwnedFd>)>,
    ) -> Watches {
        let context = WatchContext {
            mirrors: place.join(MIRRORS_DIRECTORY),
            targets: Arc::clone(targets),
            to_shard: to_shard.clone(),
            doorbell: Arc::clone(doorbell),
        };
        let kept = left.extract_if(.., |(tag, _)| tag == TAG).find_map(|(_, mut fds)| fds.pop());
        let watches = Watches { context, store, words: Mutex::new(None) };
        let started = match kept {
            Some(epoll) => watches.words_by(|| Ok(Holders::of(epoll))).map(drop),
            // Of an earlier supervisor.
            None if watches.context.mirrors.exists() => watches.words().map(drop),
            None => Ok(()),
        };
        if let Err(e) = started {
            tracing::error!("the last worker's watches end: {e}");
            end(place);
        }
        watches
    }

    fn words(&self) -> Result<Words> {
        self.words_by(|| {
            let holders = Holders::create()?;
            self.store.put(TAG, &[holders.epoll()])?;
            Ok(holders)
        })
    }

    /// The thread; it is started with `holders` where there is none.
    fn words_by(&self, holders: impl FnOnce() -> Result<Holders>) -> Result<Words> {
        let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(words) = &*words {
            return Ok(words.clone());
        }
        let started = WatchThread::start(self.context.clone(), holders()?)?;
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
        answered.recv_timeout(ANSWER_TIMEOUT).map_err(|e| match e {
            RecvTimeoutError::Timeout => Code::TimedOut,
            RecvTimeoutError::Disconnected => Code::Io,
        })?
    }
}

/// Inodes that had a name in a watched directory since the first was watched, and a few others: a set of bits, so that
/// it never grows.
#[derive(Debug)]
pub(in crate::worker) struct NamedInodes {
    bits: Box<[u64]>,
    is_empty: bool,
}

impl NamedInodes {
    /// Eight bits for each name that there may be.
    const BITS_LOG2: u32 = (8 * WATCHED_NAMES_MAX).ilog2();

    pub(in crate::worker) fn new() -> NamedInodes {
        NamedInodes { bits: vec![0; 1 << (NamedInodes::BITS_LOG2 - 6)].into(), is_empty: true }
    }

    /// The word and the bit of an inode.
    fn place(ino: Ino) -> (usize, u64) {
        // Multiplication by an odd number that is near 2^64 divided by the golden ratio spreads the numbers evenly.
        let bit = ino.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - NamedInodes::BITS_LOG2);
        ((bit / 64) as usize, 1 << (bit % 64))
    }

    pub(in crate::worker) fn insert(&mut self, ino: Ino) {
        let (word, bit) = NamedInodes::place(ino);
        self.bits[word] |= bit;
        self.is_empty = false;
    }

    fn may_have(&self, ino: Ino) -> bool {
        let (word, bit) = NamedInodes::place(ino);
        self.bits[word] & bit != 0
    }

    fn clear(&mut self) {
        if !self.is_empty {
            self.bits.fill(0);
            self.is_empty = true;
        }
    }
}

/// The shard thread's end: which directories are watched, and what is to be sent of them.
#[derive(Debug)]
pub(super) struct Watched {
    pub(in crate::worker) directories: HashSet<Ino>,
    pub(in crate::worker) named: NamedInodes,
    changes: Vec<Change>,
    pub(in crate::worker) words: Words,
}

impl Watched {
    pub(in crate::worker) fn new(words: Words) -> Watched {
        Watched { directories: HashSet::new(), named: NamedInodes::new(), changes: Vec::new(), words }
    }

    /// Notes a change that had these effects.
    pub(super) fn note(&mut self, request: &Request<'_>, effects: Since<'_>) {
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
            Request::Rename { .. } => effects.names().map(named).collect(),
            _ => effects.names().filter(|n| self.directories.contains(&n.parent)).map(named).collect(),
        };
        if names.iter().any(concerns) {
            names.iter().filter_map(|n| n.entry).for_each(|(ino, _)| self.named.insert(ino));
            self.changes.push(match (request, names.len()) {
                (Request::Rename { .. }, 2) => {
                    let (to, from) = (names.remove(1), names.remove(0));
                    Change::Rename(from, to)
                }
                _ => Change::Names(names),
            });
        }
        for (ino, entry) in effects.inodes() {
            if entry.is_none() && self.directories.remove(ino) {
                self.changes.push(Change::Gone(*ino, Code::NotFound));
            }
        }
        if let Request::SetAttr { ino, .. }
        | Request::SetXattr { ino, .. }
        | Request::RemoveXattr { ino, .. } = *request
        {
            if self.directories.contains(&ino) || self.named.may_have(ino) {
                self.changes.push(Change::Attributes(ino));
            }
        }
    }

    /// Sends what was noted, now that the board shows it.
    pub(super) fn send(&mut self, widened: &[Ino]) {
        for ino in widened {
            if self.directories.remove(ino) {
                self.changes.push(Change::Gone(*ino, Code::NotSupported));
            }
        }
        let waiting = self.words.waiting.load(Ordering::Relaxed);
        if !self.changes.is_empty() && waiting + self.changes.len() > WATCH_CHANGES_MAX {
            tracing::warn!(
                "directories change faster than those who watch them can be told, and all watches end"
            );
            self.changes.retain(|change| matches!(change, Change::Gone(..)));
            let all = self.directories.drain().map(|ino| Change::Gone(ino, Code::NoSpace));
            self.changes.extend(all);
        }
        if self.directories.is_empty() {
            self.named.clear();
        }
        if !self.changes.is_empty() {
            self.words.send(Word::Changes(std::mem::take(&mut self.changes)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_meta::Effects;

    fn watched() -> (Watched, mpsc::Receiver<Word>) {
        let (words, receiver) = mpsc::channel();
        let wake = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let words = Words { words, waiting: Arc::default(), wake: Arc::new(wake) };
        (Watched::new(words), receiver)
    }

    #[test]
    fn changes_that_mirrors_cannot_follow_end_all_watches() {
        let (mut watched, words) = watched();
        watched.directories = HashSet::from([Ino(1), Ino(2), Ino(3)]);
        let change = |watched: &mut Watched, n| {
            watched.changes.extend((0..n).map(|_| Change::Attributes(Ino(9))));
        };
        change(&mut watched, WATCH_CHANGES_MAX);
        watched.send(&[]);
        assert_eq!(words.try_recv().unwrap().size(), WATCH_CHANGES_MAX, "as many are kept");
        // The thread has not done with them. One directory was removed just now.
        change(&mut watched, 1);
        assert!(watched.directories.remove(&Ino(3)));
        watched.changes.push(Change::Gone(Ino(3), Code::NotFound));
        watched.send(&[]);
        let Ok(Word::Changes(changes)) = words.try_recv() else { panic!("nothing is sent") };
        let gone = |change: &Change| match change {
            Change::Gone(ino, code) => (ino.0, *code),
            other => panic!("{other:?} is sent"),
        };
        let mut gone: Vec<_> = changes.iter().map(gone).collect();
        gone.sort_unstable_by_key(|(ino, _)| *ino);
        assert_eq!(gone, [(1, Code::NoSpace), (2, Code::NoSpace), (3, Code::NotFound)]);
        assert!(watched.directories.is_empty());
        assert_eq!(watched.words.waiting.load(Ordering::Relaxed), WATCH_CHANGES_MAX + 3);
    }

    #[test]
    fn attributes_are_sent_of_what_watched_directories_name_alone() {
        let (mut watched, words) = watched();
        watched.directories.insert(Ino(1));
        watched.named.insert(Ino(20));
        let mut set = |ino| {
            let request = Request::RemoveXattr { ino, name: b"user.a" };
            watched.note(&request, Effects::new().since(forebay_meta::Mark::default()));
            watched.send(&[]);
            words.try_recv().is_ok()
        };
        assert!(set(Ino(1)) && set(Ino(20)));
        assert!(!set(Ino(21)));
    }
}
