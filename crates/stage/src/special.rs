//! Staging of symbolic links, FIFOs, sockets and device nodes, and of further links to inodes that were staged.

use std::sync::Arc;

use forebay_types::{Code, Kind};

use crate::attributes::{same_time, set_attributes};
use crate::engine::{At, Engine};
use crate::entry::Entry;
use crate::job::{Job, Worker};
use crate::links::Claim;
use crate::names::Use;
use crate::report::{add, reason};
use crate::tree::{Meta, Object, Tree};

/// The result of staging an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Placed {
    Made,
    /// It existed already.
    Same,
}

impl<S: Tree, D: Tree> Engine<'_, S, D> {
    /// Stages a symbolic link, FIFO, socket or device node.
    pub(crate) fn special(&self, entry: Entry<S, D>, worker: &mut Worker<S, D>) {
        let source = match entry.at.source(self.source, &self.source_shelf) {
            Ok(source) => source,
            Err(code) => return self.source_error("open its directory", code, &entry),
        };
        let meta = match self.source.stat(&source, &entry.name, entry.follow) {
            Ok(meta) => meta,
            Err(code) => return self.source_error("read its attributes", code, &entry),
        };
        if matches!(meta.kind, Kind::File | Kind::Directory) {
            // The entry was replaced since it was listed.
            return self.queue.push(match meta.kind {
                Kind::File => Job::File(entry, 0, None),
                _ => Job::Directory(entry),
            });
        }
        let key = (meta.links > 1).then(|| meta.identity());
        if let Some(key) = key {
            match self.links.claim(key, meta.links, &entry) {
                Claim::Copy => {}
                Claim::Wait => return,
                Claim::Link(first) => return self.link(&first, entry, &meta),
            }
        }
        let placed = self.place_special(&entry, &source, &meta, worker);
        let waiting = match (placed, key) {
            (Err(_), Some(key)) => self.links.failed(key),
            (Ok(_), Some(key)) => {
                for other in self.links.done(key, &entry) {
                    self.link(&entry, other, &meta);
                }
                Vec::new()
            }
            _ => Vec::new(),
        };
        for other in waiting {
            // It fails in the same way, and reports its own name.
            self.special(other, worker);
        }
        match placed {
            Ok(Placed::Made) if meta.kind == Kind::Symlink => add(&self.tally.symlinks, 1),
            Ok(Placed::Made) => add(&self.tally.special, 1),
            Ok(Placed::Same) => add(&self.tally.skipped_files, 1),
            Err((_, Code::NotPermitted)) if matches!(meta.kind, Kind::CharDevice | Kind::BlockDevice) => {
                let what = format!("device node not made: {}; only root may", reason(Code::NotPermitted));
                self.warning(what, Code::NotPermitted, || entry.source_path());
            }
            Err((At::Source, code)) => return self.source_error("read the link", code, &entry),
            Err((At::Destination, code)) => return self.destination_error("create it", code, &entry),
        }
        self.done(1, 0);
    }

    fn place_special(
        &self,
        entry: &Entry<S, D>,
        source: &Arc<S::Directory>,
        meta: &Meta,
        worker: &mut Worker<S, D>,
    ) -> Result<Placed, (At, Code)> {
        let there = |code| (At::Destination, code);
        let directory = entry.at.destination(self.destination, &self.destination_shelf).map_err(there)?;
        let target = match meta.kind {
            Kind::Symlink => {
                Some(self.source.read_link(source, &entry.name).map_err(|code| (At::Source, code))?)
            }
            _ => None,
        };
        let make = |name: &[u8]| match &target {
            Some(target) => self.destination.symlink(target, &directory, name),
            None => self.destination.make_node(&directory, name, meta),
        };
        let same = |found: &Meta| {
            found.kind == meta.kind
                && found.rdev == meta.rdev
                && match &target {
                    Some(target) => self.destination.read_link(&directory, entry.to()).as_ref() == Ok(target),
                    None => true,
                }
        };
        let wanted = self.owners.wanted(meta);
        let mut set_attributes_of = |name: &[u8]| {
            let object = Object::Entry(&*directory, name);
            let from = (self.source, Object::Entry(&**source, &entry.name));
            let warn = |what, code| self.warning(what, code, || entry.destination_path());
            set_attributes(from, (self.destination, object), &wanted, &mut worker.scratch, &warn)?;
            self.destination.set_times(object, wanted.atime, wanted.mtime)
        };
        let made = match make(entry.to()) {
            Err(Code::Exists) => {
                let found = self.destination.stat(&directory, entry.to(), false).map_err(there)?;
                if self.settings.resume && same(&found) {
                    if found.mode != wanted.mode || !same_time(meta.mtime, found.mtime) {
                        set_attributes_of(entry.to()).map_err(there)?;
                    }
                    return Ok(Placed::Same);
                }
                self.replace(&directory, entry.to(), &found, &|name| make(name), &mut set_attributes_of)
            }
            Ok(()) => set_attributes_of(entry.to()),
            Err(code) => Err(code),
        };
        made.map(|()| Placed::Made).map_err(there)
    }

    /// Creates an object under a temporary name and renames it over the existing one.
    fn replace(
        &self,
        directory: &Arc<D::Directory>,
        name: &[u8],
        found: &Meta,
        make: &dyn Fn(&[u8]) -> Result<(), Code>,
        set_attributes_of: &mut dyn FnMut(&[u8]) -> Result<(), Code>,
    ) -> Result<(), Code> {
        if found.kind == Kind::Directory {
            return Err(Code::IsDirectory);
        }
        let temporary = self.tag.temporary(name, Use::Part);
        make(&temporary)?;
        let renamed = set_attributes_of(&temporary)
            .and_then(|()| self.destination.rename((directory, &temporary), (directory, name), 0));
        if renamed.is_err() {
            // The first failure is the one to report.
            let _ = self.destination.unlink(directory, &temporary);
        }
        renamed
    }

    /// Creates `entry` as a hard link to the staged `first`.
    pub(crate) fn link(&self, first: &Entry<S, D>, entry: Entry<S, D>, meta: &Meta) {
        match self.place_link(first, &entry) {
            Ok(Placed::Made) => add(&self.tally.hard_links, 1),
            Ok(Placed::Same) => add(&self.tally.skipped_files, 1),
            Err(
                code @ (Code::NotPermitted | Code::NotSupported | Code::TooManyLinks | Code::CrossDevice),
            ) if meta.kind == Kind::File => {
                let what = format!("hard link not kept, the file was copied again: {}", reason(code));
                self.warning(what, code, || entry.destination_path());
                return self.queue.push(Job::File(entry, 0, Some(meta.identity())));
            }
            Err(code) => return self.destination_error("make the hard link", code, &entry),
        }
        self.done(1, meta.size);
    }

    fn place_link(&self, first: &Entry<S, D>, entry: &Entry<S, D>) -> Result<Placed, Code> {
        let from = first.at.destination(self.destination, &self.destination_shelf)?;
        let to = entry.at.destination(self.destination, &self.destination_shelf)?;
        let copy = (&*from, first.to());
        match self.destination.link(copy, (&to, entry.to())) {
            Err(Code::Exists) => {}
            other => return other.map(|()| Placed::Made),
        }
        let found = self.destination.stat(&to, entry.to(), false)?;
        if found.identity() == self.destination.stat(&from, first.to(), false)?.identity() {
            return Ok(Placed::Same);
        }
        let make = |name: &[u8]| self.destination.link(copy, (&to, name));
        self.replace(&to, entry.to(), &found, &make, &mut |_| Ok(()))?;
        Ok(Placed::Made)
    }
}
