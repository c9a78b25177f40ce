//! The watch thread: adds watches, repeats changes in mirrors, and removes mirrors without watches.
//!
//! The thread takes events of backing files before messages. The message about a change of names is sent before the
//! change is acknowledged, so before any program can write to a file that the change created. Therefore the thread
//! first raises events of files whose names it knows, then repeats the changes of names, then raises the remaining
//! events.

use forebay_sys::descriptor;
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_data::NodeTargets;
use forebay_ring::Doorbell;
use forebay_types::limits::{WATCHED_DIRECTORIES_MAX, WATCHED_NAMES_MAX, WATCH_CONTENTS_MS, WATCH_REVIEW_MS};
use forebay_types::{Code, Error, Ino, Result};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::inotify::{self, WatchFlags};
use rustix::io::Errno;

use super::contents::{Contents, RAISED};
use super::holders::{is_inotify, Holders};
use super::mirror::{parse_own_name, Leaf, Mirror};
use super::words::{Ask, Change, Chunk, Command, Named, Word, Words};
use crate::worker::message::Message;

/// Events that are never delivered for directories and their names. The daemon raises some of them itself, when it
/// reads a mirror and when it opens a file there to close it.
const NEVER_TOLD: u32 = libc::IN_OPEN | libc::IN_ACCESS | libc::IN_CLOSE_NOWRITE;

/// The parts of the worker that the watch thread uses.
#[derive(Clone, Debug)]
pub(super) struct WatchContext {
    pub(super) mirrors: PathBuf,
    pub(super) targets: Arc<NodeTargets>,
    pub(super) to_shard: Sender<Message>,
    pub(super) doorbell: Arc<Doorbell>,
}

/// A watched directory.
#[derive(Debug)]
struct Directory {
    mirror: Mirror,
    /// True when all of its entries were listed once.
    is_listed: bool,
    /// Those of the events [`RAISED`] that its watches request.
    mask: u32,
    /// Requests that wait until the directory is listed.
    waiting: Vec<Ask>,
}

/// The thread's state.
pub(super) struct WatchThread {
    context: WatchContext,
    /// The directory of the mirrors.
    mirrors: OwnedFd,
    words: Receiver<Word>,
    wake: Arc<OwnedFd>,
    /// The sending end, which the shard thread gets.
    own: Words,
    holders: Holders,
    contents: Contents,
    directories: HashMap<Ino, Directory>,
    /// The names of inodes in watched directories.
    places: HashMap<Ino, Vec<(Ino, Vec<u8>)>>,
    /// Names in all mirrors.
    names: usize,
    reviewed: Instant,
}

impl WatchThread {
    /// Starts the thread, which takes over mirrors that are still watched.
    pub(super) fn start(context: WatchContext, holders: Holders) -> Result<Words> {
        let what = "cannot watch directories";
        let failed = |e: Errno| Error::io(what, &e.into());
        let (words, receiver) = mpsc::channel();
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let wake = Arc::new(rustix::event::eventfd(0, flags).map_err(failed)?);
        let own = Words { words, waiting: Arc::new(AtomicUsize::new(0)), wake: Arc::clone(&wake) };
        let path = &context.mirrors;
        match rustix::fs::mkdir(path, rustix::fs::Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(failed(e)),
        }
        let flags =
            rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::CLOEXEC;
        let mirrors = rustix::fs::open(path, flags, rustix::fs::Mode::empty()).map_err(failed)?;
        let contents = Contents::new(Arc::clone(&context.targets)).map_err(failed)?;
        let mut thread = WatchThread {
            context,
            mirrors,
            words: receiver,
            wake,
            own: own.clone(),
            holders,
            contents,
            directories: HashMap::new(),
            places: HashMap::new(),
            names: 0,
            reviewed: Instant::now(),
        };
        std::thread::Builder::new()
            .name("watch".into())
            .spawn(move || thread.run())
            .map_err(|e| Error::io("cannot start a thread", &e))?;
        Ok(own)
    }

    /// Opens the mirrors that are still watched, and removes all others.
    fn take_over(&mut self) {
        let mut watched = self.holders.take_over().unwrap_or_else(|e| {
            tracing::warn!("the watches of the last worker end, since it cannot be told which remain: {e}");
            HashMap::new()
        });
        // If a directory has two mirrors, one is kept.
        let mut mask_of = |name: &str| {
            let (ino, moved) = parse_own_name(name)?;
            Some((ino, moved, watched.remove(&ino)?))
        };
        let entries = match std::fs::read_dir(&self.context.mirrors) {
            Ok(entries) => entries,
            Err(e) => return tracing::warn!("the watches of the last worker get no more events: {e}"),
        };
        let mut others = Vec::new();
        for entry in entries.flatten() {
            let Some((ino, moved, mask)) = entry.file_name().to_str().and_then(&mut mask_of) else {
                others.push(entry);
                continue;
            };
            match self.open_mirror(ino, moved) {
                Ok(mirror) => {
                    self.names += mirror.len();
                    let directory = Directory { mirror, is_listed: false, mask, waiting: Vec::new() };
                    self.directories.insert(ino, directory);
                }
                Err(e) => {
                    tracing::warn!("a directory that the last worker watched is watched no more: {e}");
                    others.push(entry);
                }
            }
        }
        self.watch_contents();
        for ino in self.directories.keys() {
            self.order(Command::Enrol(*ino, self.own.clone()));
        }
        for entry in others {
            let removed = match entry.file_type().is_ok_and(|of| of.is_dir()) {
                true => std::fs::remove_dir_all(entry.path()),
                false => std::fs::remove_file(entry.path()),
            };
            if let Err(e) = removed {
                tracing::warn!("cannot remove {}: {e}", entry.path().display());
            }
        }
    }

    fn open_mirror(&self, ino: Ino, moved: bool) -> std::result::Result<Mirror, Errno> {
        let mut mirror = Mirror::open(self.mirrors.as_fd(), ino, moved)?;
        *mirror.directory_mut() = self.holders.numbered(mirror.directory(), ino)?;
        Ok(mirror)
    }

    fn make_mirror(&self, ino: Ino) -> std::result::Result<Mirror, Errno> {
        let mut mirror = Mirror::make(self.mirrors.as_fd(), ino)?;
        match self.holders.numbered(mirror.directory(), ino) {
            Ok(directory) => *mirror.directory_mut() = directory,
            Err(e) => {
                mirror.remove(self.mirrors.as_fd());
                return Err(e);
            }
        }
        Ok(mirror)
    }

    fn order(&self, order: Command) {
        let _ = self.context.to_shard.send(Message::Watch(order));
        self.context.doorbell.ring();
    }

    fn run(&mut self) {
        self.take_over();
        loop {
            let happened = self.contents.take();
            let late = match happened.lost {
                true => self.tell_everything(),
                false => self.tell_contents(happened.events.iter().copied()),
            };
            let mut count = [0; 8];
            let _ = rustix::io::read(&*self.wake, &mut count);
            // Processes only the messages that are queued now, so that senders cannot keep the thread busy. Later
            // messages wake it.
            let mut waiting = self.own.waiting.load(Ordering::Relaxed);
            while waiting > 0 {
                let Ok(word) = self.words.try_recv() else { break };
                let size = word.size();
                self.hear(word);
                self.own.waiting.fetch_sub(size, Ordering::Relaxed);
                waiting = waiting.saturating_sub(size);
            }
            self.tell_contents(late.into_iter());
            if self.reviewed.elapsed() >= Duration::from_millis(WATCH_REVIEW_MS) {
                self.review();
            }
            self.sleep(happened.lost || !happened.events.is_empty());
        }
    }

    /// Waits for messages and for events of backing files. Just after such events it waits for a moment without them.
    fn sleep(&self, were_changed: bool) {
        let milliseconds = |ms: u64| rustix::time::Timespec {
            tv_sec: (ms / 1000) as i64,
            tv_nsec: (ms % 1000 * 1_000_000) as i64,
        };
        let mut ready =
            [PollFd::new(&*self.wake, PollFlags::IN), PollFd::new(self.contents.instance(), PollFlags::IN)];
        let (ready, next_timeout) = match were_changed {
            true => (&mut ready[..1], Some(milliseconds(WATCH_CONTENTS_MS))),
            false => (&mut ready[..], (!self.directories.is_empty()).then(|| milliseconds(WATCH_REVIEW_MS))),
        };
        let _ = rustix::event::poll(ready, next_timeout.as_ref());
    }

    fn hear(&mut self, word: Word) {
        match word {
            Word::Ask(ask) => self.asked(ask),
            Word::Listed(directory, listed) => self.listed(directory, listed),
            Word::Changes(changes) => {
                for change in changes {
                    self.make(change);
                }
            }
        }
    }

    fn asked(&mut self, ask: Ask) {
        let code = |e: Errno| Code::from_errno(e.raw_os_error());
        let directory = ask.directory;
        if !is_inotify(&ask.inotify) {
            let _ = ask.answer.send(Err(Code::Invalid));
        } else if ask.mask & libc::IN_ALL_EVENTS != 0 && ask.mask & libc::IN_ALL_EVENTS & !NEVER_TOLD == 0 {
            let _ = ask.answer.send(Err(Code::NotSupported));
        } else if let Some(watched) = self.directories.get_mut(&directory) {
            match watched.is_listed {
                true => self.add(ask),
                false => watched.waiting.push(ask),
            }
        } else {
            if self.directories.len() >= WATCHED_DIRECTORIES_MAX {
                self.review();
            }
            if self.directories.len() >= WATCHED_DIRECTORIES_MAX || self.names >= WATCHED_NAMES_MAX {
                let _ = ask.answer.send(Err(Code::NoSpace));
                return;
            }
            match self.make_mirror(directory) {
                Ok(mirror) => {
                    let watched = Directory { mirror, is_listed: false, mask: 0, waiting: vec![ask] };
                    self.directories.insert(directory, watched);
                    self.order(Command::Enrol(directory, self.own.clone()));
                }
                Err(e) => drop(ask.answer.send(Err(code(e)))),
            }
        }
    }

    /// Adds a watch to a mirror that is complete.
    fn add(&mut self, ask: Ask) {
        let added = self.try_to_add(&ask);
        if added.is_err() {
            // The failed watch may have requested events that no other watch requests.
            self.watch_contents();
        }
        let answer = added.map(|(watch, _)| watch).map_err(|e| Code::from_errno(e.raw_os_error()));
        if let (Err(_), Ok((watch, true))) = (ask.answer.send(answer), added) {
            // The request timed out and the program got an error, so the watch is removed.
            let _ = inotify::remove_watch(&ask.inotify, watch);
        }
    }

    /// Returns the watch, and true if it is the instance's first watch of this directory.
    fn try_to_add(&mut self, ask: &Ask) -> std::result::Result<(i32, bool), Errno> {
        let union = self.directories.values().fold(ask.mask, |all, watched| all | watched.mask);
        let Some(watched) = self.directories.get_mut(&ask.directory) else { return Err(Errno::NOENT) };
        self.contents.watch_for(union)?;
        // The path is a link in /proc, which must be followed.
        let flags = WatchFlags::from_bits_retain(ask.mask & !libc::IN_DONT_FOLLOW & !NEVER_TOLD);
        let path = descriptor::path(watched.mirror.directory());
        let watch = inotify::add_watch(&ask.inotify, path, flags)?;
        let mask = watched.mask | (ask.mask & RAISED);
        let entered = self.holders.add(&ask.inotify, watched.mirror.directory_mut(), ask.directory, mask);
        let is_first = entered.inspect_err(|_| {
            // Without an entry the mirror would count as unwatched and be removed, which would end the watch.
            let _ = inotify::remove_watch(&ask.inotify, watch);
        })?;
        watched.mask = mask;
        Ok((watch, is_first))
    }

    fn listed(&mut self, ino: Ino, listed: std::result::Result<Chunk, Code>) {
        if !self.directories.contains_key(&ino) {
            return;
        }
        let (entries, next) = match listed {
            Ok(chunk) => chunk,
            Err(code) => return self.end(ino, code),
        };
        for (name, inode, kind) in entries {
            if !self.set(&Named { parent: ino, name, entry: Some((inode, kind)) }) {
                return;
            }
        }
        match next {
            Some(cookie) => self.order(Command::List(ino, cookie)),
            None => {
                let unconfirmed = self.directories.get(&ino).map(|watched| watched.mirror.unconfirmed());
                for name in unconfirmed.unwrap_or_default() {
                    self.set(&Named { parent: ino, name, entry: None });
                }
                let Some(watched) = self.directories.get_mut(&ino) else { return };
                watched.is_listed = true;
                for ask in std::mem::take(&mut watched.waiting) {
                    self.add(ask);
                }
            }
        }
    }

    /// Ends the watches of a directory; waiting requests fail with `code`.
    fn end(&mut self, ino: Ino, code: Code) {
        let Some(watched) = self.directories.remove(&ino) else { return };
        for ask in watched.waiting {
            let _ = ask.answer.send(Err(code));
        }
        self.names -= watched.mirror.len();
        for (name, leaf) in watched.mirror.iter() {
            leave_place(&mut self.places, leaf, ino, name);
        }
        watched.mirror.remove(self.mirrors.as_fd());
        self.order(Command::Leave(ino));
    }

    /// A mirror cannot follow its directory: its watches end, as if the directory were removed.
    fn give_up(&mut self, ino: Ino, e: Errno) {
        tracing::warn!(
            "a directory can no longer be watched, and those who watch it are told that it is gone: {e}"
        );
        self.end(ino, Code::NoSpace);
        // After the failed change the mirror's names may differ from those in `places`.
        self.places.retain(|_, names| {
            names.retain(|(parent, _)| *parent != ino);
            !names.is_empty()
        });
    }

    /// Makes a change to a mirror and updates the number of names; false when the mirror was given up.
    fn change(
        &mut self,
        ino: Ino,
        change: impl FnOnce(&mut Mirror, std::os::fd::BorrowedFd<'_>) -> std::result::Result<(), Errno>,
    ) -> bool {
        let Some(watched) = self.directories.get_mut(&ino) else { return true };
        let before = watched.mirror.len();
        let changed = change(&mut watched.mirror, self.mirrors.as_fd());
        self.names = self.names - before + watched.mirror.len();
        let changed = changed.and(if self.names > WATCHED_NAMES_MAX { Err(Errno::NOSPC) } else { Ok(()) });
        if let Err(e) = changed {
            self.give_up(ino, e);
        }
        changed.is_ok()
    }

    fn leaf_at(&self, parent: Ino, name: &[u8]) -> Option<Leaf> {
        self.directories.get(&parent)?.mirror.get(name)
    }

    /// Sets a name of a watched directory as in `named`.
    fn set(&mut self, named: &Named) -> bool {
        let Named { parent, name, entry } = named;
        self.enter_leave(*parent, name, entry.map(Leaf::of));
        self.change(*parent, |mirror, _| mirror.set(name, entry.map(Leaf::of)))
    }

    /// Updates `places` before a name changes to `leaf`.
    fn enter_leave(&mut self, parent: Ino, name: &[u8], leaf: Option<Leaf>) {
        let Some(watched) = self.directories.get(&parent) else { return };
        let before = watched.mirror.get(name);
        if before == leaf {
            return;
        }
        if let Some(before) = before {
            leave_place(&mut self.places, before, parent, name);
        }
        if let Some(ino) = leaf.and_then(|leaf| leaf.ino) {
            self.places.entry(ino).or_default().push((parent, name.to_vec()));
        }
    }

    fn make(&mut self, change: Change) {
        match change {
            Change::Names(names) => {
                for named in &names {
                    self.set(named);
                }
            }
            Change::Rename(from, to) => {
                self.rename(&from, &to);
                for (ino, _) in [from.entry, to.entry].into_iter().flatten() {
                    self.change(ino, |mirror, mirrors| mirror.move_itself(mirrors, ino));
                }
            }
            Change::Attributes(ino) => {
                for (parent, name) in self.places.get(&ino).cloned().unwrap_or_default() {
                    self.change(parent, |mirror, _| mirror.touch(Some(&name)));
                }
                self.change(ino, |mirror, _| mirror.touch(None));
            }
            Change::Gone(ino, code) => self.end(ino, code),
        }
    }

    fn rename(&mut self, from: &Named, to: &Named) {
        // An entry that the mirrors do not have cannot be moved in them, so its names are set.
        let is = |there: Option<Leaf>, entry: Option<Leaf>| match (there, entry) {
            (Some(there), Some(entry)) => {
                there.is_directory == entry.is_directory && (there.ino.is_none() || there.ino == entry.ino)
            }
            _ => false,
        };
        let (mover, swapped) = (to.entry.map(Leaf::of), from.entry.map(Leaf::of));
        let Some(leaf) = mover else { return };
        let source = is(self.leaf_at(from.parent, &from.name), mover);
        let there = self.leaf_at(to.parent, &to.name);
        let of_to = self.directories.contains_key(&to.parent);
        self.enter_leave(from.parent, &from.name, swapped);
        self.enter_leave(to.parent, &to.name, mover);
        let same = from.parent == to.parent;
        match swapped {
            None if source && of_to && same => {
                self.change(to.parent, |mirror, _| mirror.rename(&from.name, &to.name, leaf));
            }
            None if source && of_to => {
                self.in_both(from, to, |a, b| a.rename_to(&from.name, b, &to.name, leaf))
            }
            Some(other) if source && is(there, swapped) && same => {
                self.change(to.parent, |mirror, _| {
                    mirror.exchange((&from.name, other), None, (&to.name, leaf))
                });
            }
            Some(other) if source && is(there, swapped) => {
                self.in_both(from, to, |a, b| a.exchange((&from.name, other), Some(b), (&to.name, leaf)));
            }
            Some(other) => {
                self.exchange_with_outside((source, from), other, true);
                self.exchange_with_outside((is(there, swapped), to), leaf, false);
            }
            None => {
                self.change(from.parent, |mirror, mirrors| match source {
                    true => mirror.move_out(mirrors, &from.name),
                    false => mirror.set(&from.name, None),
                });
                self.change(to.parent, |mirror, mirrors| mirror.move_in(mirrors, &to.name, leaf));
            }
        }
    }

    /// One side of an exchange whose other side is not watched, or whose entries differ from the mirrors'.
    fn exchange_with_outside(&mut self, (is_there, named): (bool, &Named), leaf: Leaf, is_source: bool) {
        self.change(named.parent, |mirror, mirrors| match is_there {
            true => mirror.exchange_with_outside(mirrors, &named.name, leaf, is_source),
            false => mirror.set(&named.name, Some(leaf)),
        });
    }

    /// Makes a change to two mirrors at once.
    fn in_both(
        &mut self,
        from: &Named,
        to: &Named,
        change: impl FnOnce(&mut Mirror, &mut Mirror) -> std::result::Result<(), Errno>,
    ) {
        let Some(mut of_to) = self.directories.remove(&to.parent) else { return };
        let mut changed = Ok(());
        if let Some(of_from) = self.directories.get_mut(&from.parent) {
            let before = of_from.mirror.len() + of_to.mirror.len();
            changed = change(&mut of_from.mirror, &mut of_to.mirror);
            self.names = self.names - before + of_from.mirror.len() + of_to.mirror.len();
        }
        self.directories.insert(to.parent, of_to);
        if let Err(e) = changed {
            self.give_up(from.parent, e);
            self.give_up(to.parent, e);
        }
    }

    /// Raises events of contents for each name of the file; returns the events of files that have no name yet.
    fn tell_contents(&mut self, happened: impl Iterator<Item = (Ino, u32)>) -> Vec<(Ino, u32)> {
        let mut unknown = Vec::new();
        for (ino, events) in happened {
            match self.places.get(&ino).cloned() {
                Some(places) => {
                    for (parent, name) in places {
                        self.raise(parent, &name, events);
                    }
                }
                None => unknown.push((ino, events)),
            }
        }
        unknown
    }

    fn raise(&mut self, parent: Ino, name: &[u8], events: u32) {
        let Some(watched) = self.directories.get(&parent) else { return };
        let events = events & watched.mask;
        self.change(parent, |mirror, _| {
            if events & libc::IN_ATTRIB != 0 {
                mirror.touch(Some(name))?;
            }
            mirror.change_contents(name, events)
        });
    }

    /// The kernel dropped events: raises a change of every file.
    fn tell_everything(&mut self) -> Vec<(Ino, u32)> {
        let all: Vec<_> =
            self.places.keys().map(|ino| (*ino, libc::IN_MODIFY | libc::IN_CLOSE_WRITE)).collect();
        self.tell_contents(all.into_iter())
    }

    /// Removes the mirrors that have no watches any more.
    fn review(&mut self) {
        self.reviewed = Instant::now();
        if self.directories.is_empty() {
            return;
        }
        let Ok(watched) = self.holders.directories() else { return };
        let idle = |(ino, directory): (&Ino, &Directory)| {
            let is_idle = directory.is_listed && !watched.contains_key(ino);
            is_idle.then_some(*ino)
        };
        let idle: Vec<Ino> = self.directories.iter().filter_map(idle).collect();
        for ino in &idle {
            self.end(*ino, Code::NotFound);
        }
        if !idle.is_empty() {
            self.watch_contents();
        }
    }

    /// Watches the backing files for the events that the remaining watches request.
    fn watch_contents(&mut self) {
        let union = self.directories.values().fold(0, |all, directory| all | directory.mask);
        if let Err(e) = self.contents.watch_for(union) {
            tracing::warn!("cannot watch the contents of files: {e}");
        }
    }
}

/// Removes a name from the names of its inode.
fn leave_place(places: &mut HashMap<Ino, Vec<(Ino, Vec<u8>)>>, leaf: Leaf, parent: Ino, name: &[u8]) {
    let Some(ino) = leaf.ino else { return };
    if let Some(of) = places.get_mut(&ino) {
        of.retain(|(p, n)| *p != parent || n != name);
        if of.is_empty() {
            places.remove(&ino);
        }
    }
}
