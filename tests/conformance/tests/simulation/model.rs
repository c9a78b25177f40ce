//! What a file tree is, and what each operation does to it: in one step, or, where docs/semantics.md and
//! docs/decisions/0012 say that several nodes take part one after the other, in several.

use std::collections::BTreeMap;

use forebay_types::{Code, Ino, Kind};

use crate::history::{Name, Op, Outcome};

/// An inode of the model.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Id {
    /// Clients know its number.
    Known(u64),
    /// Made by an operation that was not answered: the number shows when somebody meets it.
    MadeBy(usize, /* node that it is born on */ u16),
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
    /// Found empty by a removal that is under way, or that nobody finished: takes no entry.
    pub(crate) condemned: bool,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct File {
    pub(crate) kind: Kind,
    pub(crate) links: u32,
    pub(crate) mode: u32,
    pub(crate) xattr: Option<u32>,
    pub(crate) word: Option<u32>,
}

/// A file tree.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct State {
    pub(crate) directories: BTreeMap<Id, Directory>,
    pub(crate) files: BTreeMap<Id, File>,
}

/// How far an operation is that takes several steps.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Progress {
    /// Not begun.
    Asked,
    /// A removal on two nodes that has condemned this directory.
    Condemned(Id),
    /// A removal that found its entry gone, and has yet to undo the first step.
    Leaving(Id),
    Finished,
}

/// One way in which an operation can go on: what becomes of the tree, and how far it is then.
pub(crate) struct Way {
    pub(crate) state: State,
    pub(crate) progress: Progress,
}

impl State {
    /// A new pool.
    pub(crate) fn new() -> State {
        let root = (Id::Known(Ino::ROOT.0), Directory::default());
        State { directories: BTreeMap::from([root]), files: BTreeMap::new() }
    }

    /// Learns the number of an inode that somebody has met.
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

    /// True when `id` is the inode that was met as `ino`; what was not known of it is learnt.
    fn is(&mut self, id: Id, ino: Ino) -> bool {
        match id {
            Id::Known(known) => known == ino.0,
            Id::MadeBy(_, node) => {
                let met = Id::Known(ino.0);
                // A number is one inode's.
                let new = !self.directories.contains_key(&met) && !self.files.contains_key(&met);
                if new && node == ino.birth_node().0 {
                    self.learn(id, ino);
                }
                new && node == ino.birth_node().0
            }
        }
    }

    fn get(&self, dir: Ino, name: Name) -> Result<Id, Code> {
        let directory = self.directories.get(&Id::Known(dir.0)).ok_or(Code::NotFound)?;
        directory.entries.get(&name).copied().ok_or(Code::NotFound)
    }

    /// The directory, if it takes an entry.
    fn open(&mut self, dir: Ino, name: Name) -> Result<&mut Directory, Code> {
        let directory = self.directories.get_mut(&Id::Known(dir.0)).ok_or(Code::NotFound)?;
        if directory.entries.contains_key(&name) {
            return Err(Code::Exists);
        }
        if directory.condemned {
            return Err(Code::NotFound);
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
            file.links -= 1;
            if file.links == 0 {
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
        self.open(dir, name)?.entries.insert(name, id);
        if kind == Kind::Directory {
            self.directories.insert(id, Directory::default());
        } else {
            let mode = if kind == Kind::Symlink { 0o777 } else { 0o644 };
            self.files.insert(id, File { kind, links: 1, mode, xattr: None, word: None });
        }
        Ok(())
    }

    /// Renames, or says all that is against it: which reason is given is not promised.
    fn rename(&mut self, from: (Ino, Name), to: (Ino, Name), replaces: bool) -> Result<(), Vec<Code>> {
        let mut reasons = Vec::new();
        let (moved, target) = (self.get(from.0, from.1), self.directories.get(&Id::Known(to.0 .0)));
        let (Ok(moved), Some(target)) = (moved, target) else { return Err(vec![Code::NotFound]) };
        let replaced = target.entries.get(&to.1).copied();
        if target.condemned && replaced.is_none() {
            reasons.push(Code::NotFound);
        }
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
            self.directories.remove(&replaced);
            self.drop_link(replaced);
        }
        self.remove_entry(from.0, from.1);
        if let Some(directory) = self.directories.get_mut(&Id::Known(to.0 .0)) {
            directory.entries.insert(to.1, moved);
        }
        Ok(())
    }

    /// The ways in which an operation can go on from here. `told` is what it was answered, if it was: only what fits is
    /// returned. `index` and `node` are the operation's number and its client's node.
    pub(crate) fn ways(
        &self,
        op: &Op,
        progress: Progress,
        told: Option<&Outcome>,
        index: usize,
        node: u16,
    ) -> Vec<Way> {
        let mut ways = Vec::new();
        let mut end = |state: State, outcome: Outcome| {
            // Without an answer, one that failed is one that did not happen.
            let fits = match told {
                Some(told) => *told == outcome,
                None => !matches!(outcome, Outcome::Failed(_)),
            };
            if fits {
                ways.push(Way { state, progress: Progress::Finished });
            }
        };
        let answer = |result: Result<Outcome, Code>| result.unwrap_or_else(Outcome::Failed);
        let mut state = self.clone();
        match op {
            Op::Create { dir, name } | Op::Symlink { dir, name } | Op::Mkdir { dir, name } => {
                let kind = match op {
                    Op::Create { .. } => Kind::File,
                    Op::Symlink { .. } => Kind::Symlink,
                    _ => Kind::Directory,
                };
                let (id, made) = match told {
                    Some(Outcome::Inode(ino)) => (Id::Known(ino.0), *ino),
                    _ => {
                        let born = if kind == Kind::Directory { node } else { dir.birth_node().0 };
                        (Id::MadeBy(index, born), Ino(0))
                    }
                };
                let result = state.make(*dir, *name, id, kind);
                let outcome = answer(result.map(|()| Outcome::Inode(made)));
                end(state, outcome);
            }
            Op::Link { ino, dir, name } => {
                if told == Some(&Outcome::Failed(Code::CrossDevice)) {
                    end(self.clone(), Outcome::Failed(Code::CrossDevice));
                }
                let id = Id::Known(ino.0);
                let result = match state.files.get(&id) {
                    None => Err(Code::NotFound),
                    Some(_) => state.open(*dir, *name).map(|d| {
                        d.entries.insert(*name, id);
                    }),
                };
                if let (Ok(()), Some(file)) = (result, state.files.get_mut(&id)) {
                    file.links += 1;
                }
                // Which of several reasons is given is not said.
                if result.is_err() && matches!(told, Some(Outcome::Failed(Code::NotFound | Code::Exists))) {
                    let both = self.files.contains_key(&id) || told == Some(&Outcome::Failed(Code::NotFound));
                    if both || self.get(*dir, *name).is_ok() {
                        end(state.clone(), told.cloned().unwrap_or(Outcome::Done));
                    }
                }
                end(state, answer(result.map(|()| Outcome::Done)));
            }
            Op::Unlink { dir, name } => {
                let result = state.get(*dir, *name).and_then(|id| {
                    if state.directories.contains_key(&id) {
                        return Err(Code::IsDirectory);
                    }
                    state.remove_entry(*dir, *name);
                    state.drop_link(id);
                    Ok(Outcome::Done)
                });
                end(state, answer(result));
            }
            Op::Rmdir { dir, name } => return self.remove_directory(*dir, *name, progress, told),
            Op::Rename { dir, name, to_dir, to_name, replaces } => {
                if told == Some(&Outcome::Failed(Code::CrossDevice)) {
                    end(self.clone(), Outcome::Failed(Code::CrossDevice));
                }
                match state.rename((*dir, *name), (*to_dir, *to_name), *replaces) {
                    Ok(()) => end(state, Outcome::Done),
                    Err(reasons) => {
                        for reason in reasons {
                            end(self.clone(), Outcome::Failed(reason));
                        }
                    }
                }
            }
            Op::Lookup { dir, name } => {
                let told_ino = match told {
                    Some(Outcome::Inode(ino)) => Some(*ino),
                    _ => None,
                };
                let outcome = match (state.get(*dir, *name), told_ino) {
                    (Ok(id), Some(ino)) if state.is(id, ino) => Outcome::Inode(ino),
                    (Ok(_), _) => Outcome::Inode(Ino(0)),
                    (Err(code), _) => Outcome::Failed(code),
                };
                end(state, outcome);
            }
            Op::List { dir } => {
                let Some(directory) = state.directories.get(&Id::Known(dir.0)).cloned() else {
                    // One that was removed and not freed yet is still listed, as empty.
                    if told == Some(&Outcome::Names(BTreeMap::new())) {
                        end(state.clone(), Outcome::Names(BTreeMap::new()));
                    }
                    end(state, Outcome::Failed(Code::NotFound));
                    return ways;
                };
                if let Some(Outcome::Names(names)) = told {
                    let same = names.len() == directory.entries.len()
                        && directory
                            .entries
                            .iter()
                            .all(|(name, id)| names.get(name).is_some_and(|ino| state.is(*id, *ino)));
                    if same {
                        end(state, Outcome::Names(names.clone()));
                    }
                }
            }
            Op::Stat { ino } => {
                let id = Id::Known(ino.0);
                if let Some(file) = state.files.get(&id) {
                    let outcome = Outcome::Attr { kind: file.kind, links: file.links, mode: file.mode };
                    end(state, outcome);
                } else if state.directories.contains_key(&id) {
                    // Of directories only that they are there.
                    if let Some(told @ Outcome::Attr { kind: Kind::Directory, .. }) = told {
                        end(state, told.clone());
                    }
                } else {
                    end(state, Outcome::Failed(Code::NotFound));
                }
            }
            Op::Chmod { ino, mode } => {
                let file = state.files.get_mut(&Id::Known(ino.0));
                let result = file.map(|file| file.mode = *mode).ok_or(Code::NotFound);
                end(state, answer(result.map(|()| Outcome::Done)));
            }
            Op::SetXattr { ino, value } => {
                let file = state.files.get_mut(&Id::Known(ino.0));
                let result = file.map(|file| file.xattr = Some(*value)).ok_or(Code::NotFound);
                end(state, answer(result.map(|()| Outcome::Done)));
            }
            Op::GetXattr { ino } => {
                let result = state.files.get(&Id::Known(ino.0)).ok_or(Code::NotFound);
                let outcome = answer(result.map(|file| Outcome::Value(file.xattr)));
                end(state, outcome);
            }
            Op::Write { ino, value } => {
                match state.files.get_mut(&Id::Known(ino.0)) {
                    Some(file) => {
                        file.word = Some(*value);
                        end(state, Outcome::Done);
                    }
                    // It was unlinked before it was opened, between the opening's steps, or behind it.
                    None => {
                        for outcome in
                            [Outcome::Failed(Code::NotFound), Outcome::Failed(Code::Stale), Outcome::Done]
                        {
                            end(state.clone(), outcome);
                        }
                    }
                }
            }
            Op::Read { ino } => match state.files.get(&Id::Known(ino.0)) {
                Some(file) => {
                    let outcome = Outcome::Value(file.word);
                    end(state, outcome);
                }
                None => {
                    for code in [Code::NotFound, Code::Stale] {
                        end(state.clone(), Outcome::Failed(code));
                    }
                    if let Some(told @ Outcome::Value(_)) = told {
                        end(state, told.clone());
                    }
                }
            },
        }
        ways
    }

    /// The steps of a directory's removal: one where its entry is on its own node; else it is condemned, its entry removed,
    /// and itself freed, or pardoned when the entry was gone.
    fn remove_directory(&self, dir: Ino, name: Name, progress: Progress, told: Option<&Outcome>) -> Vec<Way> {
        let mut ways = Vec::new();
        let mut push = |state: State, progress: Progress, outcome: Outcome| {
            let fits = progress != Progress::Finished || told.is_none_or(|told| *told == outcome);
            if fits {
                ways.push(Way { state, progress });
            }
        };
        let mut state = self.clone();
        match progress {
            Progress::Asked => {
                let id = match self.get(dir, name) {
                    Ok(id) if self.directories.contains_key(&id) => id,
                    Ok(_) => {
                        push(state, Progress::Finished, Outcome::Failed(Code::NotDirectory));
                        return ways;
                    }
                    Err(code) => {
                        push(state, Progress::Finished, Outcome::Failed(code));
                        return ways;
                    }
                };
                let empty = self.directories[&id].entries.is_empty();
                if id.node() == dir.birth_node().0 {
                    if empty {
                        state.remove_entry(dir, name);
                        state.directories.remove(&id);
                        push(state, Progress::Finished, Outcome::Done);
                    } else {
                        push(state, Progress::Finished, Outcome::Failed(Code::NotEmpty));
                    }
                    return ways;
                }
                // What was looked up may be condemned later: the look-up itself changes nothing.
                push(state, Progress::Leaving(id), Outcome::Done);
            }
            Progress::Leaving(id) => {
                match state.directories.get_mut(&id) {
                    Some(directory) if !directory.entries.is_empty() => {
                        push(state, Progress::Finished, Outcome::Failed(Code::NotEmpty));
                        return ways;
                    }
                    Some(directory) => directory.condemned = true,
                    None => {}
                }
                push(state, Progress::Condemned(id), Outcome::Done);
            }
            Progress::Condemned(id) => {
                if self.get(dir, name) == Ok(id) {
                    state.remove_entry(dir, name);
                    state.directories.remove(&id);
                    push(state, Progress::Finished, Outcome::Done);
                } else {
                    // Pardoned if it has another name, and if that was known.
                    push(state.clone(), Progress::Finished, Outcome::Failed(Code::NotFound));
                    if let Some(directory) = state.directories.get_mut(&id) {
                        directory.condemned = false;
                        push(state, Progress::Finished, Outcome::Failed(Code::NotFound));
                    }
                }
            }
            Progress::Finished => {}
        }
        ways
    }
}
