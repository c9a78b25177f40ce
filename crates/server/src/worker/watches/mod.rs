//! Directories that preloaded programs watch with inotify (docs/decisions/0036).
//!
//! The kernel raises inotify events only for changes that it makes itself. So the daemon keeps a mirror of each watched
//! directory: a directory of the kernel, on the first target if that is in memory, otherwise in the pool's directory.
//! The mirror has an empty file or directory for each name. The watch thread repeats there every change that the shard
//! thread makes to the watched directory. The program's own inotify instance watches the mirror, so the kernel raises
//! the program's events.
//!
//! ```text
//!  program ── KIND_WATCH, its inotify descriptor ──► connection's thread ── Ask ──► watch thread ──► mirrors
//!  shard thread ── Listed, Changes, after the board shows them ──────────────────────▲    │
//!        ▲──────────────────────────── Enrol, List, Leave ─────────────────────────────────┘
//!  the kernel ── contents of backing files that changed (contents.rs) ────────────────▲
//! ```
//!
//! The watch thread starts with the first watch; before that a change costs one check of an option. The shard thread
//! never waits for it. Weak references to the inotify instances (`holders.rs`) show which mirrors are still watched. So
//! no state of processes is needed: close, dup, fork, exec and the end of a process send no message. The references
//! survive the worker in the descriptor store. The next worker compares each mirror with its directory, and raises the
//! changes in between as removals and creations.
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
/// How long a connection waits for its watch: less than the client waits for the answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Ends all watches because the pool stops. Each gets the event that its directory was removed.
pub(super) fn end(place: &Path) {
    let _ = std::fs::remove_dir_all(place.join(MIRRORS_DIRECTORY));
}

/// The part of the connections' threads: adds watches.
#[derive(Debug)]
pub(super) struct Watches {
    context: WatchContext,
    store: FdStore,
    pub(in crate::worker) words: Mutex<Option<Words>>,
}

impl Watches {
    /// Takes over the watches that the last worker left with the supervisor, out of `left`. Without those, mirrors in
    /// `place` are removed. The watch thread does both, because they can take long and the worker must serve meanwhile.
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
            // The mirrors belong to an earlier supervisor.
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

    /// The sending end of the watch thread, which is started with `holders` if it does not run.
    fn words_by(&self, holders: impl FnOnce() -> Result<Holders>) -> Result<Words> {
        let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(words) = &*words {
            return Ok(words.clone());
        }
        let started = WatchThread::start(self.context.clone(), holders()?)?;
        Ok(words.insert(started).clone())
    }

    /// Watches a directory with an inotify instance; returns the watch descriptor.
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

/// The inodes that had a name in a watched directory since the first watch, and a few others. A fixed set of bits (a
/// Bloom filter with one hash), so that it never grows.
#[derive(Debug)]
pub(in crate::worker) struct NamedInodes {
    bits: Box<[u64]>,
    is_empty: bool,
}

impl NamedInodes {
    /// Eight bits for each name that watched directories may have.
    const BITS_LOG2: u32 = (8 * WATCHED_NAMES_MAX).ilog2();

    pub(in crate::worker) fn new() -> NamedInodes {
        NamedInodes { bits: vec![0; 1 << (NamedInodes::BITS_LOG2 - 6)].into(), is_empty: true }
    }

    /// The word and the bit of an inode.
    fn place(ino: Ino) -> (usize, u64) {
        // Multiplication by an odd number near 2^64 divided by the golden ratio spreads the numbers evenly.
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

/// The shard thread's part: the watched directories, and the changes to be sent.
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

    /// Collects a change with these effects, if it concerns a watched directory.
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
            _ => effects
                .names_and_found()
                .filter(|n| self.directories.contains(&n.parent))
                .map(named)
                .collect(),
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

    /// Sends the collected changes, after the board shows them. `widened`: directories that became wide.
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
        // The thread has not processed them yet. One directory was removed just now.
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
