//! What a file tree is, and what each operation does to it, in one step, whatever nodes take part
//! (docs/decisions/0016). What comes later, or earlier, is one thing: what a file's home knows of names on other nodes.
//! It learns of the end of one when that node gets to telling it, and counts a new one before that node shows it, or
//! finds that it cannot be.

use std::collections::BTreeMap;

use forebay_types::{Code, Ino, Kind};

use crate::history::{Name, Op, Outcome};

/// An inode of the model.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Id {
    /// Clients know its number.
    Known(u64),
    /// Made by an operation that was not answered: the number shows when somebody meets it.
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
    /// Its entries, and what is born in it, are on several nodes.
    pub(crate) wide: bool,
    /// Directories made in it are wide, and hand this on.
    pub(crate) new_wide: bool,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct File {
    pub(crate) kind: Kind,
    pub(crate) links: u32,
    pub(crate) mode: u32,
    pub(crate) xattr: Option<u32>,
    pub(crate) word: Option<u32>,
    /// What its block is full of.
    pub(crate) block: Option<u32>,
    /// What was appended.
    pub(crate) appended: Vec<u32>,
    /// Bytes of a file that is spread; none: what changed them last came to no known end.
    pub(crate) bytes: Option<u32>,
    /// It has, or had, names on other nodes: what it is told of their end comes later.
    pub(crate) abroad: bool,
    /// The client that has it locked.
    pub(crate) locked: Option<usize>,
}

/// A file tree.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct State {
    pub(crate) directories: BTreeMap<Id, Directory>,
    pub(crate) files: BTreeMap<Id, File>,
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

    /// The directory, if it takes an entry.
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

    /// Renames, or says all that is against it: which reason is given is not promised.
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
            // Over several nodes it has happened when the source's has decided, and what is replaced may be changed by
            // its number until its own has heard of that.
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

    /// Notes that a file has a name in a directory of another node than its own.
    fn gets_name(&mut self, id: Id, dir: Ino) {
        let is_wide = self.is_wide(dir);
        if let Some(file) = self.files.get_mut(&id) {
            file.abroad |= is_wide || id.node() != dir.birth_node().0;
        }
    }

    /// A file is to get a name in a directory of another node than its own, whatever comes of it.
    pub(crate) fn goes_abroad(&mut self, ino: Ino) {
        if let Some(file) = self.files.get_mut(&Id::Known(ino.0)) {
            file.abroad = true;
        }
    }

    /// What is written to a file that was unlinked before it was opened, between the opening's steps, or behind it.
    fn without_effect(&self, end: &mut impl FnMut(State, Outcome)) {
        for outcome in [Outcome::Failed(Code::NotFound), Outcome::Failed(Code::Stale), Outcome::Done] {
            end(self.clone(), outcome);
        }
    }

    /// A file, and whether its home may know already that it has no name left, or not yet.
    fn file(&mut self, ino: Ino) -> (Option<&mut File>, bool) {
        let file = self.files.get_mut(&Id::Known(ino.0));
        let doubtful = file.as_ref().is_some_and(|file| file.links == 0);
        (file, doubtful)
    }

    /// The trees that an operation can make of this one. `told` is what it was answered, if it was: only what fits is
    /// returned. `index` and `node` are the operation's number and its client's node; in the end, when all is told that
    /// is to be told, `settled`.
    pub(crate) fn after(
        &self,
        op: &Op,
        told: Option<&Outcome>,
        (index, node): (usize, u16),
        settled: bool,
    ) -> Vec<State> {
        let mut ways = Vec::new();
        let mut end = |state: State, outcome: Outcome| {
            // Without an answer, one that failed is one that did not happen.
            let fits = match told {
                Some(told) => *told == outcome,
                None => !matches!(outcome, Outcome::Failed(_)),
            };
            if fits {
                ways.push(state);
            }
        };
        let answer = |result: Result<Outcome, Code>| result.unwrap_or_else(Outcome::Failed);
        let mut state = self.clone();
        // What met another change over several nodes again and again was given up; what a version does not do, too.
        if let (Some(Outcome::Failed(code @ (Code::Busy | Code::CrossDevice))), false) =
            (told, op.only_reads() || matches!(op, Op::Lock { .. }))
        {
            end(state, Outcome::Failed(*code));
            return ways;
        }
        match op {
            Op::Create { dir, name, .. } | Op::Symlink { dir, name } | Op::Mkdir { dir, name } => {
                let kind = match op {
                    Op::Create { .. } => Kind::File,
                    Op::Symlink { .. } => Kind::Symlink,
                    _ => Kind::Directory,
                };
                let (id, made) = match told {
                    Some(Outcome::Inode(ino)) => (Id::Known(ino.0), *ino),
                    _ => {
                        let born = match kind {
                            Kind::Directory => node,
                            _ if state.is_wide(*dir) => 0,
                            _ => dir.birth_node().0,
                        };
                        (Id::MadeBy(index, born), Ino(0))
                    }
                };
                let result = state.make(*dir, *name, id, kind);
                let outcome = answer(result.map(|()| Outcome::Inode(made)));
                end(state, outcome);
            }
            Op::Link { ino, dir, name } => {
                let id = Id::Known(ino.0);
                let (file, doubtful) = state.file(*ino);
                let mut reasons = Vec::new();
                if file.is_none() || doubtful {
                    reasons.push(Code::NotFound);
                }
                let there = file.is_some();
                reasons.extend(state.open(*dir, *name).err());
                for reason in &reasons {
                    end(self.clone(), Outcome::Failed(*reason));
                }
                if there && state.open(*dir, *name).is_ok() {
                    if let Ok(directory) = state.open(*dir, *name) {
                        directory.entries.insert(*name, id);
                    }
                    if let (Some(file), _) = state.file(*ino) {
                        file.links += 1;
                    }
                    state.gets_name(id, *dir);
                    end(state, Outcome::Done);
                }
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
            Op::Rmdir { dir, name } => {
                let result = state.get(*dir, *name).and_then(|id| {
                    let directory = state.directories.get(&id).ok_or(Code::NotDirectory)?;
                    if !directory.entries.is_empty() {
                        return Err(Code::NotEmpty);
                    }
                    state.remove_entry(*dir, *name);
                    state.directories.remove(&id);
                    Ok(Outcome::Done)
                });
                end(state, answer(result));
            }
            Op::Rename { dir, name, to_dir, to_name, replaces } => {
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
            Op::List { dir } => match (state.directories.get(&Id::Known(dir.0)).cloned(), told) {
                (None, Some(told @ Outcome::Names(names))) if names.is_empty() && !settled => {
                    end(state, told.clone()); // its home has not heard yet that it is gone
                }
                (None, _) => end(state, Outcome::Failed(Code::NotFound)),
                (Some(directory), Some(Outcome::Names(names))) => {
                    let same = names.len() == directory.entries.len()
                        && directory
                            .entries
                            .iter()
                            .all(|(name, id)| names.get(name).is_some_and(|ino| state.is(*id, *ino)));
                    if same {
                        end(state, Outcome::Names(names.clone()));
                    }
                }
                (Some(_), _) => {}
            },
            Op::ListPart { dir, letters } => {
                match (state.directories.get(&Id::Known(dir.0)).cloned(), told) {
                    (None, Some(told @ Outcome::Names(names))) if names.is_empty() && !settled => {
                        end(state, told.clone()); // likewise
                    }
                    (None, _) => end(state, Outcome::Failed(Code::NotFound)),
                    (Some(directory), Some(Outcome::Names(names))) => {
                        let its: Vec<_> =
                            directory.entries.iter().filter(|(name, _)| name.bit() & letters != 0).collect();
                        let same = names.len() == its.len()
                            && its
                                .iter()
                                .all(|(name, id)| names.get(name).is_some_and(|ino| state.is(**id, *ino)));
                        if same {
                            end(state, Outcome::Names(names.clone()));
                        }
                    }
                    (Some(_), _) => {}
                }
            }
            Op::WidenNew { dir } => {
                let directory = state.directories.get_mut(&Id::Known(dir.0)).ok_or(Code::NotFound);
                let result = directory.map(|directory| {
                    directory.new_wide = true;
                    Outcome::Done
                });
                end(state, answer(result));
            }
            Op::Widen { dir } => {
                let directory = state.directories.get_mut(&Id::Known(dir.0)).ok_or(Code::NotFound);
                let result = directory.and_then(|directory| {
                    if directory.wide {
                        return Err(Code::Exists);
                    }
                    if !directory.entries.is_empty() {
                        return Err(Code::NotEmpty);
                    }
                    directory.wide = true;
                    Ok(Outcome::Done)
                });
                end(state, answer(result));
            }
            Op::Stat { ino } => {
                let id = Id::Known(ino.0);
                match (state.files.get(&id).cloned(), told) {
                    (Some(file), Some(told @ Outcome::Attr { kind, links, mode })) => {
                        // Its home may not have been told yet of names that are gone, or counts one that is being made.
                        let lags = file.abroad && !settled && *links > file.links;
                        let counted = file.links > 0 && *links == file.links;
                        if file.kind == *kind && file.mode == *mode && (counted || lags) {
                            end(state, told.clone());
                        }
                    }
                    (Some(file), _) if file.links == 0 => end(state, Outcome::Failed(Code::NotFound)),
                    (Some(_), _) => {}
                    // Of directories only that they are there.
                    (None, Some(told @ Outcome::Attr { kind: Kind::Directory, .. }))
                        if state.directories.contains_key(&id) =>
                    {
                        end(state.clone(), told.clone());
                    }
                    (None, _) if state.directories.contains_key(&id) => {}
                    (None, _) => end(state, Outcome::Failed(Code::NotFound)),
                }
            }
            Op::Chmod { ino, .. } | Op::SetXattr { ino, .. } | Op::GetXattr { ino } => {
                let (file, doubtful) = state.file(*ino);
                if file.is_none() || doubtful {
                    end(self.clone(), Outcome::Failed(Code::NotFound));
                }
                if let (Some(file), _) = state.file(*ino) {
                    let outcome = match op {
                        Op::Chmod { mode, .. } => {
                            file.mode = *mode;
                            Outcome::Done
                        }
                        Op::SetXattr { value, .. } => {
                            file.xattr = Some(*value);
                            Outcome::Done
                        }
                        _ => Outcome::Value(file.xattr),
                    };
                    end(state, outcome);
                }
            }
            Op::Write { ino, value, large } => {
                let (file, doubtful) = state.file(*ino);
                if file.is_none() || doubtful {
                    self.without_effect(&mut end);
                }
                if let (Some(file), _) = state.file(*ino) {
                    *(if *large { &mut file.block } else { &mut file.word }) = Some(*value);
                    end(state, Outcome::Done);
                }
            }
            Op::Append { ino, value, .. } => {
                let (file, doubtful) = state.file(*ino);
                if file.is_none() || doubtful {
                    self.without_effect(&mut end);
                }
                if let (Some(file), _) = state.file(*ino) {
                    file.appended.push(*value);
                    end(state, Outcome::Done);
                }
            }
            Op::Lock { ino, client } | Op::Unlock { ino, client } => {
                let (file, doubtful) = state.file(*ino);
                if file.is_none() || doubtful {
                    self.without_effect(&mut end);
                    end(self.clone(), Outcome::Failed(Code::Busy));
                }
                if let (Some(file), _) = state.file(*ino) {
                    let is_its = file.locked == Some(*client);
                    let locks = matches!(op, Op::Lock { .. });
                    if locks && !is_its && file.locked.is_some() {
                        return {
                            end(state, Outcome::Failed(Code::Busy));
                            ways
                        };
                    }
                    if locks || is_its {
                        file.locked = locks.then_some(*client);
                    }
                    end(state, Outcome::Done);
                }
            }
            Op::Truncate { ino, bytes } | Op::Allocate { ino, bytes } => {
                let (file, doubtful) = state.file(*ino);
                if file.is_none() || doubtful {
                    self.without_effect(&mut end);
                }
                if let (Some(file), _) = state.file(*ino) {
                    file.bytes = match (op, told, file.bytes) {
                        // Some nodes may have done it, and others not.
                        (_, None, _) => None,
                        (Op::Truncate { .. }, ..) => Some(*bytes),
                        (_, _, before) => before.map(|before| before.max(*bytes)),
                    };
                    end(state, Outcome::Done);
                }
            }
            Op::ReadAppended { ino } | Op::Size { ino } => {
                let (file, doubtful) = state.file(*ino);
                let file = file.cloned();
                if file.is_none() || doubtful {
                    for code in [Code::NotFound, Code::Stale] {
                        end(self.clone(), Outcome::Failed(code));
                    }
                }
                match (file, told) {
                    (Some(file), Some(told @ Outcome::Appended { whole, .. })) if file.appended == *whole => {
                        end(state, told.clone());
                    }
                    (Some(_), _) if matches!(op, Op::ReadAppended { .. }) => {}
                    (Some(File { bytes: Some(bytes), .. }), _) => end(state, Outcome::Value(Some(bytes))),
                    // Nobody knows, or it was opened before it was gone.
                    (_, Some(told @ (Outcome::Value(_) | Outcome::Appended { .. }))) => {
                        end(state, told.clone())
                    }
                    _ => {}
                }
            }
            Op::Count { dir } => match state.directories.get(&Id::Known(dir.0)) {
                None => end(state, Outcome::Failed(Code::NotFound)),
                Some(directory) => {
                    let is_directory = |id: &&Id| state.directories.contains_key(*id);
                    let names = directory.entries.len() as u64;
                    let directories = directory.entries.values().filter(is_directory).count() as u32;
                    let wide = directory.wide;
                    end(state, Outcome::Count { names, directories, wide });
                }
            },
            Op::Read { ino, large } => {
                let (file, doubtful) = state.file(*ino);
                let word = file.map(|file| if *large { file.block } else { file.word });
                if word.is_none() || doubtful {
                    for code in [Code::NotFound, Code::Stale] {
                        end(self.clone(), Outcome::Failed(code));
                    }
                }
                match (word, told) {
                    (Some(word), _) => end(state, Outcome::Value(word)),
                    // It was opened before.
                    (None, Some(told @ Outcome::Value(_))) => end(state, told.clone()),
                    (None, _) => {}
                }
            }
        }
        ways
    }
}
