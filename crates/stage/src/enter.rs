//! Entering directories: those that the user named, and those within them.

use std::ops::Range;

use forebay_types::{Code, Kind};

use crate::branch::{Branch, DirectoryState, Side};
use crate::engine::{At, Engine};
use crate::entry::Entry;
use crate::job::{Job, Worker};
use crate::tree::{Meta, Object, Tree};

/// Mode of a directory while it is filled: other users have no access until its attributes are set.
pub(crate) const FILLING_MODE: u32 = 0o700;

impl<S: Tree, D: Tree> Engine<'_, S, D> {
    /// Stages the first of the names that the user gave, and queues the others for any thread.
    pub(crate) fn top(&self, mut range: Range<usize>, worker: &mut Worker<S, D>) {
        let Some(index) = range.next() else { return };
        if !range.is_empty() {
            self.queue.push(Job::Tops(range));
        }
        let top = &self.tops[index];
        if top.is_directory() {
            return self.top_directory(index);
        }
        let source = match self.source.open_path(&top.source.parent) {
            Ok(opened) => opened,
            Err(code) => return self.error(At::Source, "open its directory", code, top.source.path(), None),
        };
        let destination = match self.destination.open_path(&top.staged.parent) {
            Ok(opened) => opened,
            Err(code) => {
                return self.error(At::Destination, "open its directory", code, top.staged.path(), None)
            }
        };
        let at = Branch::new(DirectoryState {
            parent: None,
            source: Side::new(top.source.parent.clone(), source, &self.source_shelf),
            destination: Side::new(top.staged.parent.clone(), destination, &self.destination_shelf),
            meta: None,
            fresh: false,
            prune: false,
            ended: self.ended.clone(),
        });
        let entry = Entry {
            at,
            name: top.source.name.as_slice().into(),
            renamed: Some(top.staged.name.as_slice().into()),
            follow: true,
        };
        self.entry(entry, Some(top.kind), worker);
    }

    fn top_directory(&self, index: usize) {
        let top = &self.tops[index];
        let (from, to) = (top.source.path(), top.staged.path());
        let source = match self.source.open_path(&from) {
            Ok(opened) => opened,
            Err(code) => return self.error(At::Source, "open the directory", code, from, None),
        };
        let mut fresh = false;
        let made = self.destination.open_path(&top.staged.parent).and_then(|(parent, _)| {
            match self.destination.make_directory(&parent, &top.staged.name, FILLING_MODE) {
                Ok(()) => fresh = true,
                Err(Code::Exists) => self.make_traversable(&parent, &top.staged.name),
                Err(code) => return Err(code),
            }
            self.destination.open_path(&to)
        });
        let destination = match made {
            Ok(opened) => opened,
            Err(code) => return self.error(At::Destination, "make the directory", code, to, None),
        };
        if !fresh {
            self.merge_into(&destination, &|| to.clone());
        }
        let meta = Some(source.1).filter(|_| top.keeps_attributes);
        self.queue.push(Job::List(
            Branch::new(DirectoryState {
                parent: None,
                source: Side::new(from, source, &self.source_shelf),
                destination: Side::new(to.clone(), destination, &self.destination_shelf),
                meta,
                fresh,
                prune: top.adopted,
                ended: self.ended.clone(),
            }),
            0,
        ));
    }

    /// Enters a directory within a source: creates its copy, and queues its listing.
    pub(crate) fn enter(&self, entry: Entry<S, D>) {
        let opened = entry
            .at
            .source(self.source, &self.source_shelf)
            .and_then(|handle| self.source.open_directory(&handle, &entry.name, false));
        let source = match opened {
            Ok(opened) => opened,
            Err(code) => return self.source_error("open the directory", code, &entry),
        };
        let mut fresh = false;
        let made = entry.at.destination(self.destination, &self.destination_shelf).and_then(|parent| {
            // When staging is resumed, most files of an existing directory exist too.
            match self.destination.make_directory(&parent, entry.to(), FILLING_MODE) {
                Ok(()) => fresh = true,
                Err(Code::Exists) => self.make_traversable(&parent, entry.to()),
                Err(code) => return Err(code),
            }
            self.destination.open_directory(&parent, entry.to(), false)
        });
        let destination = match made {
            Ok(opened) => opened,
            Err(code) => return self.destination_error("make the directory", code, &entry),
        };
        if !fresh {
            self.merge_into(&destination, &|| entry.destination_path());
        }
        let meta = Some(source.1);
        let to = entry.to().to_vec();
        let prune = entry.at.prune && !fresh;
        self.queue.push(Job::List(
            Branch::new(DirectoryState {
                source: Side::new(entry.name.to_vec(), source, &self.source_shelf),
                destination: Side::new(to, destination, &self.destination_shelf),
                parent: Some(entry.at),
                meta,
                fresh,
                prune,
                ended: self.ended.clone(),
            }),
            0,
        ));
    }

    /// Restores this user's access to a directory of its own which an earlier staging gave the source's restrictive
    /// mode. If that fails, opening the directory returns the error.
    fn make_traversable(&self, parent: &D::Directory, name: &[u8]) {
        if let Ok(meta) = self.destination.stat(parent, name, false) {
            if meta.kind == Kind::Directory && meta.mode & FILLING_MODE != FILLING_MODE {
                let _ = self.destination.set_mode(Object::Entry(parent, name), meta.mode | FILLING_MODE);
            }
        }
    }

    /// Prepares an existing directory for merging.
    fn merge_into(&self, destination: &(D::Directory, Meta), path: &dyn Fn() -> Vec<u8>) {
        self.clear_leftovers(&destination.0, None, path);
    }
}
