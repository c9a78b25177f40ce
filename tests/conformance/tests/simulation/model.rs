//! The model: a file tree, and what each operation does to it in one step, whatever nodes take part
//! (docs/decisions/0016). One thing does not change in that step: a file's home learns later that a name on another
//! node was removed, when that node notifies it. It counts a new name on another node before that node publishes it, or
//! refuses it.

mod transitions;

use std::collections::BTreeMap;

use forebay_types::{Code, Ino, Kind};

use crate::history::Name;

/// An inode of the model.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Id {
    /// A reply has contained its number.
    Known(u64),
    /// Created by an operation without a reply. The number is known when a later reply contains it.
    MadeBy(usize, /* node that it is born on; 0: any */ u16),
}

impl Id {
    fn node(self) -> u16 {
        match self {
            Id::Known(ino) => Ino(ino).birth_node().0,
            Id::MadeBy(_, node) => node,
        }
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Directory {
    pub(crate) entries: BTreeMap<Name, Id>,
    /// Its entries, and the inodes created in it, are on several nodes.
    pub(crate) wide: bool,
    /// Directories created in it are wide and inherit this setting.
    pub(crate) new_wide: bool,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct File {
    pub(crate) kind: Kind,
    pub(crate) links: u32,
    pub(crate) mode: u32,
    pub(crate) xattr: Option<u32>,
    pub(crate) word: Option<u32>,
    /// The value that fills its block.
    pub(crate) block: Option<u32>,
    /// The appended values.
    pub(crate) appended: Vec<u32>,
    /// The size of a spread file, in bytes. None: the last change of the size has an unknown outcome.
    pub(crate) bytes: Option<u32>,
    /// It has or had names on other nodes. Its home learns later that such a name was removed.
    pub(crate) abroad: bool,
    /// The client that holds the lock.
    pub(crate) locked: Option<usize>,
}

/// A file tree.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct State {
    pub(crate) directories: BTreeMap<Id, Directory>,
    pub(crate) files: BTreeMap<Id, File>,
}

impl State {
    /// The tree of a new pool.
    pub(crate) fn new() -> State {
        let root = (Id::Known(Ino::ROOT.0), Directory::default());
        State { directories: BTreeMap::from([root]), files: BTreeMap::new() }
    }

    /// Replaces `id` by the number that a reply contained.
    fn learn(&mut self, id: Id, ino: Ino) {
        let known = Id::Known(ino.0);
        if let Some(directory) = self.directories.remove(&id) {
            self.directories.insert(known, directory);
        }
        if let Some(file) = self.files.remove(&id) {
            self.files.insert(known, file);
        }
        for directory in self.directories.values_mut() {
            directory.entries.values_mut().filter(|of| **of == id).for_each(|of| *of = known);
        }
    }

    /// True when `id` can be the inode `ino` of a reply. If its number was unknown, it is `ino` from now on.
    fn is(&mut self, id: Id, ino: Ino) -> bool {
        match id {
            Id::Known(known) => known == ino.0,
            Id::MadeBy(_, node) => {
                let met = Id::Known(ino.0);
                // No two inodes have the same number.
                let new = !self.directories.contains_key(&met) && !self.files.contains_key(&met);
                let fits = new && (node == 0 || node == ino.birth_node().0);
                if fits {
                    self.learn(id, ino);
                }
                fits
            }
        }
    }

    fn get(&self, dir: Ino, name: Name) -> Result<Id, Code> {
        let directory = self.directories.get(&Id::Known(dir.0)).ok_or(Code::NotFound)?;
        directory.entries.get(&name).copied().ok_or(Code::NotFound)
    }

    /// The directory, if it exists and has no entry of that name.
    fn open(&mut self, dir: Ino, name: Name) -> Result<&mut Directory, Code> {
        let directory = self.directories.get_mut(&Id::Known(dir.0)).ok_or(Code::NotFound)?;
        if directory.entries.contains_key(&name) {
            return Err(Code::Exists);
        }
        Ok(directory)
    }

    fn remove_entry(&mut self, dir: Ino, name: Name) {
        if let Some(directory) = self.directories.get_mut(&Id::Known(dir.0)) {
            directory.entries.remove(&name);
        }
    }

    fn drop_link(&mut self, id: Id) {
        if let Some(file) = self.files.get_mut(&id) {
            file.links = file.links.saturating_sub(1);
            if file.links == 0 && !file.abroad {
                self.files.remove(&id);
            }
        }
    }

    fn is_below(&self, id: Id, top: Id) -> bool {
        id == top
            || self.directories.get(&top).is_some_and(|d| {
                d.entries.values().any(|e| self.directories.contains_key(e) && self.is_below(id, *e))
            })
    }

    fn make(&mut self, dir: Ino, name: Name, id: Id, kind: Kind) -> Result<(), Code> {
        let above = self.open(dir, name)?;
        above.entries.insert(name, id);
        let new_wide = above.new_wide;
        if kind == Kind::Directory {
            self.directories.insert(id, Directory { wide: new_wide, new_wide, ..Directory::default() });
        } else {
            let mode = if kind == Kind::Symlink { 0o777 } else { 0o644 };
            let file = File {
                kind,
                links: 1,
                mode,
                xattr: None,
                word: None,
                block: None,
                appended: Vec::new(),
                bytes: Some(0),
                abroad: false,
                locked: None,
            };
            self.files.insert(id, file);
        }
        Ok(())
    }

    /// Renames, or returns all errors that apply: the order in which a rename checks them is not specified.
    fn rename(&mut self, from: (Ino, Name), to: (Ino, Name), replaces: bool) -> Result<(), Vec<Code>> {
        let mut reasons = Vec::new();
        let (moved, target) = (self.get(from.0, from.1), self.directories.get(&Id::Known(to.0 .0)));
        let (Ok(moved), Some(target)) = (moved, target) else { return Err(vec![Code::NotFound]) };
        let replaced = target.entries.get(&to.1).copied();
        let is_directory = self.directories.contains_key(&moved);
        if is_directory && self.is_below(Id::Known(to.0 .0), moved) {
            reasons.push(Code::Invalid);
        }
        if replaced.is_some() && !replaces {
            reasons.push(Code::Exists);
        }
        let same = replaced == Some(moved);
        match replaced.filter(|_| !same && replaces).map(|id| self.directories.get(&id)) {
            Some(None) if is_directory => reasons.push(Code::NotDirectory),
            Some(Some(d)) => {
                if !is_directory {
                    reasons.push(Code::IsDirectory);
                }
                if !d.entries.is_empty() {
                    reasons.push(Code::NotEmpty);
                }
            }
            _ => {}
        }
        if !reasons.is_empty() {
            return Err(reasons);
        }
        if same {
            return Ok(());
        }
        if let Some(replaced) = replaced {
            // A rename over several nodes happens when the source's home decides. The replaced file can still be
            // changed by its number until its own home is notified.
            let several =
                self.is_wide(from.0) || self.is_wide(to.0) || from.0.birth_node() != to.0.birth_node();
            if let Some(file) = self.files.get_mut(&replaced) {
                file.abroad |= several;
            }
            self.directories.remove(&replaced);
            self.drop_link(replaced);
        }
        self.remove_entry(from.0, from.1);
        if let Some(directory) = self.directories.get_mut(&Id::Known(to.0 .0)) {
            directory.entries.insert(to.1, moved);
        }
        self.gets_name(moved, to.0);
        Ok(())
    }

    fn is_wide(&self, dir: Ino) -> bool {
        self.directories.get(&Id::Known(dir.0)).is_some_and(|directory| directory.wide)
    }

    /// Records that a file gets a name in `dir`, possibly on a node other than its home.
    fn gets_name(&mut self, id: Id, dir: Ino) {
        let is_wide = self.is_wide(dir);
        if let Some(file) = self.files.get_mut(&id) {
            file.abroad |= is_wide || id.node() != dir.birth_node().0;
        }
    }

    /// Records that a file may get a name on another node, whatever the outcome.
    pub(crate) fn goes_abroad(&mut self, ino: Ino) {
        if let Some(file) = self.files.get_mut(&Id::Known(ino.0)) {
            file.abroad = true;
        }
    }

    /// The file, and whether it has lost its last name. Its home may know that already, or not yet.
    fn file(&mut self, ino: Ino) -> (Option<&mut File>, bool) {
        let file = self.files.get_mut(&Id::Known(ino.0));
        let doubtful = file.as_ref().is_some_and(|file| file.links == 0);
        (file, doubtful)
    }
}
