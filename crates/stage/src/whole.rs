//! All-or-nothing staging: copies have temporary names, and get their own names only when all are complete.
//!
//! A tree whose destination does not exist is staged beside it. A tree that is merged into an existing directory is
//! staged within that directory, which may be the top of a file system. At the end each tree is moved into place by
//! renames. If the name is free, one rename moves the whole tree. If both sides have a directory, its entries are moved
//! one by one. A file that is replaced is exchanged with its copy (RENAME_EXCHANGE), so that every step can be undone.
//! If a step fails, all are undone.
//!
//! If staging is killed before the moves, the destination is unchanged. If it is killed during the moves, the
//! destination has some old and some new files, each complete. The next run adopts the tree of a killed one, continues
//! it, and removes from it the entries that the source no longer has.

use std::collections::{HashMap, HashSet};

use forebay_types::{name_hash, Code, Kind, RENAME_EXCHANGE};

use crate::attributes::{set_attributes, Scratch};
use crate::engine::{At, Engine};
use crate::enter::FILLING_MODE;
use crate::leftovers::{each_name, find, remove_tree};
use crate::names::{Tag, Use};
use crate::pair::Spot;
use crate::prepare::Top;
use crate::tree::{Meta, Object, Tree, Wanted};

/// A completed step.
enum Step {
    /// An entry was moved to a free name.
    Moved { from: Spot, to: Spot },
    /// Two entries were exchanged.
    Swapped { from: Spot, to: Spot },
    /// An entry replaced another one for good, because the file system cannot exchange them.
    Replaced,
    /// A directory was made writable for this user.
    Opened { at: Spot, mode: u32 },
}

/// A directory of the staged tree that is merged into an existing one.
struct Merge {
    from: Spot,
    to: Spot,
    /// Attributes of `from` before its entries were moved; `None` if those of `to` stay.
    meta: Option<Meta>,
    /// The mode of `to`, if it was changed for the merge.
    mode: Option<u32>,
}

/// Prepares the directories in which trees are staged: removes the leftovers of killed stagings, or adopts them.
pub(crate) fn adopt<D: Tree>(
    tree: &D,
    tops: &mut [Top],
    tag: &Tag,
    resume: bool,
    whole: bool,
) -> Result<u64, Code> {
    // Each directory is listed once, for all tops in it.
    let mut places: HashMap<Vec<u8>, HashMap<u64, Vec<usize>>> = HashMap::new();
    for (index, top) in tops.iter().enumerate() {
        let hash = name_hash(&top.destination.name);
        places.entry(top.staged.parent.clone()).or_default().entry(hash).or_default().push(index);
    }
    let mut removed = 0;
    for (path, wanted) in places {
        let (at, _) = match tree.open_path(&path) {
            Err(Code::NotFound) => continue,
            other => other?,
        };
        let hashes: HashSet<u64> = wanted.keys().copied().collect();
        for leftover in find(tree, &at, Some(&hashes))? {
            let heir = wanted.get(&leftover.temporary.hash).and_then(|tops| tops.first()).copied();
            if let (Some(index), true) = (heir, whole && resume) {
                let top = &mut tops[index];
                let usable = leftover.kind == Kind::Directory
                    && leftover.temporary.purpose == Use::Part
                    && top.is_directory()
                    && !top.adopted;
                if usable && tree.rename_to_free((&at, &leftover.name), (&at, &top.staged.name)).is_ok() {
                    top.adopted = true;
                    continue;
                }
            }
            match remove_tree(tree, &at, &leftover.name, tag) {
                Ok(()) => removed += 1,
                Err(Code::NotFound) => {}
                Err(code) => return Err(code),
            }
        }
    }
    Ok(removed)
}

impl<S: Tree, D: Tree> Engine<'_, S, D> {
    /// Moves everything that was staged to its destination. True if all of it is there; otherwise the moves were
    /// undone.
    pub(crate) fn commit(&self) -> bool {
        let mut steps = Vec::new();
        let mut merges = Vec::new();
        for top in &self.tops {
            let moved = self.move_top(top, &mut steps, &mut merges);
            if let Err((code, spot)) = moved {
                self.error(
                    At::Destination,
                    "move the staged copies to their final names",
                    code,
                    spot.path(),
                    None,
                );
                self.undo(steps);
                return false;
            }
        }
        self.settle_merges(&merges);
        // The replaced objects have the temporary names now. Removing them from within a destination changed its times.
        self.roll_back(&[]);
        merges.iter().filter(|merge| self.tops.iter().any(|top| top.destination == merge.to)).for_each(
            |merge| {
                if let (Some(meta), Ok((at, _))) = (merge.meta, open_deep(self.destination, &merge.to.path()))
                {
                    // The times were set before, so this does not fail for lack of permission.
                    let _ = self.destination.set_times(Object::Directory(&at), meta.atime, meta.mtime);
                }
            },
        );
        if self.settings.durable {
            let mut synced = HashSet::new();
            for top in &self.tops {
                if synced.insert(&top.destination.parent) {
                    self.sync_place(&top.destination.parent);
                }
            }
            merges.iter().for_each(|merge| self.sync_place(&merge.to.path()));
        }
        true
    }

    /// Syncs the entries of the directory at `path` to the medium.
    pub(crate) fn sync_place(&self, path: &[u8]) {
        let synced =
            open_deep(self.destination, path).and_then(|(at, _)| self.destination.sync_directory(&at));
        if let Err(code) = synced {
            self.error(At::Destination, "sync the directory to the medium", code, path.to_vec(), None);
        }
    }

    fn move_top(
        &self,
        top: &Top,
        steps: &mut Vec<Step>,
        merges: &mut Vec<Merge>,
    ) -> Result<(), (Code, Spot)> {
        let mut waiting = vec![(top.staged.clone(), top.destination.clone())];
        while let Some((from, to)) = waiting.pop() {
            let failed = |code| (code, to.clone());
            if self.is_stopping() {
                return Err(failed(Code::Interrupted));
            }
            let Some(meta) = self.move_entry(&from, &to, steps).map_err(failed)? else { continue };
            self.open_up(&from, steps).map_err(failed)?;
            let mode = self.open_up(&to, steps).map_err(failed)?;
            let entries = self.entries(&from).map_err(failed)?;
            waiting.extend(entries.iter().map(|name| (from.child(name), to.child(name))));
            let keeps = to != top.destination || top.keeps_attributes;
            merges.push(Merge { from, to, meta: Some(meta).filter(|_| keeps), mode });
        }
        Ok(())
    }

    /// Moves one entry. If both sides have a directory, returns the attributes of `from`, and the caller moves the
    /// directory's entries.
    fn move_entry(&self, from: &Spot, to: &Spot, steps: &mut Vec<Step>) -> Result<Option<Meta>, Code> {
        let tree = self.destination;
        let (from_at, _) = open_deep(tree, &from.parent)?;
        let (to_at, _) = open_deep(tree, &to.parent)?;
        let (old, new) = ((&from_at, from.name.as_slice()), (&to_at, to.name.as_slice()));
        let meta = tree.stat(&from_at, &from.name, false)?;
        let kind = meta.kind;
        // A destination that the user named may be a link to a directory.
        let there = match tree.stat(&to_at, &to.name, false) {
            Err(Code::NotFound) => None,
            Ok(meta) if meta.kind == Kind::Symlink && kind == Kind::Directory => {
                Some(tree.stat(&to_at, &to.name, true)?)
            }
            other => Some(other?),
        };
        if let Some(there) = there.filter(|_| kind == Kind::File) {
            self.warn_of_newer(&there, meta.mtime, || to.path());
        }
        match there.map(|there| there.kind) {
            None => {
                self.rename_directory_too(kind, old, new)?;
                steps.push(Step::Moved { from: from.clone(), to: to.clone() });
            }
            Some(Kind::Directory) if kind == Kind::Directory => return Ok(Some(meta)),
            Some(Kind::Directory) => return Err(Code::IsDirectory),
            Some(_) if kind == Kind::Directory => return Err(Code::NotDirectory),
            Some(_) => match tree.rename(old, new, RENAME_EXCHANGE) {
                Ok(()) => steps.push(Step::Swapped { from: from.clone(), to: to.clone() }),
                Err(Code::Invalid | Code::NotSupported) => {
                    tree.rename(old, new, 0)?;
                    steps.push(Step::Replaced);
                }
                Err(code) => return Err(code),
            },
        }
        Ok(None)
    }

    /// The names in a directory.
    fn entries(&self, at: &Spot) -> Result<Vec<Vec<u8>>, Code> {
        let (at, _) = open_deep(self.destination, &at.path())?;
        let mut names = Vec::new();
        each_name(self.destination, &at, &mut |name| {
            names.push(name.to_vec());
            Ok(())
        })?;
        Ok(names)
    }

    /// Makes a directory writable so that entries can be moved, unless this user is root. Returns its mode if that
    /// changed.
    fn open_up(&self, at: &Spot, steps: &mut Vec<Step>) -> Result<Option<u32>, Code> {
        let tree = self.destination;
        let (parent, _) = open_deep(tree, &at.parent)?;
        let meta = tree.stat(&parent, &at.name, true)?;
        if meta.mode & FILLING_MODE == FILLING_MODE || rustix::process::geteuid().is_root() {
            return Ok(None);
        }
        tree.set_mode(Object::Entry(&parent, &at.name), meta.mode | FILLING_MODE)?;
        steps.push(Step::Opened { at: at.clone(), mode: meta.mode });
        Ok(Some(meta.mode))
    }

    /// Restores a directory's mode.
    fn close(&self, at: &Spot, mode: u32) -> Result<(), Code> {
        let (parent, _) = open_deep(self.destination, &at.parent)?;
        self.destination.set_mode(Object::Entry(&parent, &at.name), mode)
    }

    /// Renames to a name that is free. For other users than root, a directory must be writable to get another parent, so it is made writable
    /// for the rename.
    fn rename_directory_too(
        &self,
        kind: Kind,
        from: (&D::Directory, &[u8]),
        to: (&D::Directory, &[u8]),
    ) -> Result<(), Code> {
        let tree = self.destination;
        match tree.rename_to_free(from, to) {
            Err(Code::AccessDenied) if kind == Kind::Directory => {
                let meta = tree.stat(from.0, from.1, false)?;
                tree.set_mode(Object::Entry(from.0, from.1), meta.mode | FILLING_MODE)?;
                let renamed = tree.rename_to_free(from, to);
                let at = if renamed.is_ok() { to } else { from };
                let restored = tree.set_mode(Object::Entry(at.0, at.1), meta.mode);
                renamed.and(restored)
            }
            other => other,
        }
    }

    fn undo(&self, steps: Vec<Step>) {
        let tree = self.destination;
        for step in steps.into_iter().rev() {
            let undone = match &step {
                Step::Moved { from, to } => open_deep(tree, &from.parent).and_then(|(from_at, _)| {
                    let (to_at, _) = open_deep(tree, &to.parent)?;
                    let kind = tree.stat(&to_at, &to.name, false)?.kind;
                    self.rename_directory_too(kind, (&to_at, &to.name), (&from_at, &from.name))
                }),
                Step::Swapped { from, to } => open_deep(tree, &from.parent).and_then(|(from_at, _)| {
                    let (to_at, _) = open_deep(tree, &to.parent)?;
                    tree.rename((&to_at, &to.name), (&from_at, &from.name), RENAME_EXCHANGE)
                }),
                Step::Replaced => Err(Code::NotSupported),
                Step::Opened { at, mode } => self.close(at, *mode),
            };
            if let Err(code) = undone {
                let path = match &step {
                    Step::Moved { to: at, .. } | Step::Swapped { to: at, .. } | Step::Opened { at, .. } => {
                        at.path()
                    }
                    Step::Replaced => Vec::new(),
                };
                self.error(At::Destination, "move the staged copies back", code, path, None);
            }
        }
    }

    /// Sets the attributes of directories that were merged into to those of the merged directories.
    fn settle_merges(&self, merges: &[Merge]) {
        let tree = self.destination;
        let mut scratch = Scratch::default();
        // Deeper directories are later in the list and therefore first here. Setting their attributes does not change
        // their parents' times.
        for merge in merges.iter().rev() {
            let Some(meta) = merge.meta else {
                if let Some(Err(code)) = merge.mode.map(|mode| self.close(&merge.to, mode)) {
                    let path = merge.to.path();
                    self.error(At::Destination, "give the directory its mode back", code, path, None);
                }
                continue;
            };
            let settled = open_deep(tree, &merge.from.path()).and_then(|(from, _)| {
                let (to, _) = open_deep(tree, &merge.to.path())?;
                let wanted = Wanted {
                    mode: meta.mode,
                    uid: Some(meta.uid),
                    gid: Some(meta.gid),
                    atime: meta.atime,
                    mtime: meta.mtime,
                };
                let warn = |what, code| self.warning(what, code, || merge.to.path());
                let (from, to) = (Object::Directory(&from), Object::Directory(&to));
                set_attributes((tree, from), (tree, to), &wanted, &mut scratch, &warn)?;
                tree.set_times(to, wanted.atime, wanted.mtime)
            });
            if let Err(code) = settled {
                self.error(At::Destination, "set the directory's attributes", code, merge.to.path(), None);
            }
        }
    }

    /// Removes everything under temporary names, and the directories that were created above them.
    pub(crate) fn roll_back(&self, parents: &[Spot]) {
        let tree = self.destination;
        for top in &self.tops {
            let removed = tree
                .open_path(&top.staged.parent)
                .and_then(|(at, _)| remove_tree(tree, &at, &top.staged.name, &self.tag));
            match removed {
                Ok(()) | Err(Code::NotFound) => {}
                Err(code) => {
                    self.error(At::Destination, "remove what was staged", code, top.staged.path(), None);
                }
            }
        }
        for parent in parents.iter().rev() {
            // A directory that other processes use by now stays.
            let _ =
                tree.open_path(&parent.parent).and_then(|(at, _)| tree.remove_directory(&at, &parent.name));
        }
    }
}

/// Opens the directory at a path of any length.
fn open_deep<T: Tree>(tree: &T, path: &[u8]) -> Result<(T::Directory, Meta), Code> {
    match tree.open_path(path) {
        Err(Code::NameTooLong) => {}
        other => return other,
    }
    let mut at = tree.open_path(b"/")?;
    for name in path.split(|&b| b == b'/').filter(|name| !name.is_empty()) {
        at = tree.open_directory(&at.0, name, true)?;
    }
    Ok(at)
}
