//! The trees that each operation can make of a tree.

use forebay_types::{Code, Ino, Kind};

use super::{File, Id, State};
use crate::history::{Name, Op, Outcome};

/// The trees found so far, of those that fit the operation's reply.
struct Ways<'t> {
    /// The reply, if there was one.
    told: Option<&'t Outcome>,
    /// All deliveries to other nodes are done.
    settled: bool,
    found: Vec<State>,
}

impl Ways<'_> {
    /// The operation may end in this tree with this outcome.
    fn end(&mut self, state: State, outcome: Outcome) {
        // Without a reply, a failed operation counts as one that did not happen.
        let fits = match self.told {
            Some(told) => *told == outcome,
            None => !matches!(outcome, Outcome::Failed(_)),
        };
        if fits {
            self.found.push(state);
        }
    }

    fn end_with(&mut self, state: State, result: Result<Outcome, Code>) {
        self.end(state, result.unwrap_or_else(Outcome::Failed));
    }

    fn fail(&mut self, state: &State, codes: impl IntoIterator<Item = Code>) {
        codes.into_iter().for_each(|code| self.end(state.clone(), Outcome::Failed(code)));
    }

    /// A change of data of a file that was unlinked before the operation opened it, between its steps, or after it.
    fn without_effect(&mut self, state: &State) {
        self.fail(state, [Code::NotFound, Code::Stale]);
        self.end(state.clone(), Outcome::Done);
    }
}

impl State {
    /// The trees that an operation can make of this one. `told` is its reply, if there was one: only trees that fit it
    /// are returned. `index` and `node` are the operation's number and its client's node. `settled`: all deliveries to
    /// other nodes are done.
    pub(crate) fn after(
        &self,
        op: &Op,
        told: Option<&Outcome>,
        (index, node): (usize, u16),
        settled: bool,
    ) -> Vec<State> {
        let mut ways = Ways { told, settled, found: Vec::new() };
        // An operation that met other cross-node transactions again and again was given up. A version may also not
        // support an operation.
        if let (Some(Outcome::Failed(code @ (Code::Busy | Code::CrossDevice))), false) =
            (told, op.only_reads() || matches!(op, Op::Lock { .. }))
        {
            ways.fail(self, [*code]);
            return ways.found;
        }
        match op {
            Op::Create { dir, name, .. } => {
                self.after_create((*dir, *name), Kind::File, (index, node), &mut ways)
            }
            Op::Symlink { dir, name } => {
                self.after_create((*dir, *name), Kind::Symlink, (index, node), &mut ways)
            }
            Op::Mkdir { dir, name } => {
                self.after_create((*dir, *name), Kind::Directory, (index, node), &mut ways)
            }
            Op::Link { ino, dir, name } => self.after_link(*ino, *dir, *name, &mut ways),
            Op::Unlink { dir, name } => self.after_unlink(*dir, *name, &mut ways),
            Op::Rmdir { dir, name } => self.after_rmdir(*dir, *name, &mut ways),
            Op::Rename { dir, name, to_dir, to_name, replaces } => {
                let mut state = self.clone();
                match state.rename((*dir, *name), (*to_dir, *to_name), *replaces) {
                    Ok(()) => ways.end(state, Outcome::Done),
                    Err(reasons) => ways.fail(self, reasons),
                }
            }
            Op::Lookup { dir, name } => self.after_lookup(*dir, *name, &mut ways),
            Op::List { dir } => self.after_list(*dir, |_| true, &mut ways),
            Op::ListPart { dir, letters } => {
                self.after_list(*dir, |name| name.bit() & letters != 0, &mut ways)
            }
            Op::WidenNew { .. } | Op::Widen { .. } => self.after_widen(op, &mut ways),
            Op::Count { dir } => self.after_count(*dir, &mut ways),
            Op::Stat { ino } => self.after_stat(*ino, &mut ways),
            Op::Chmod { ino, .. } | Op::SetXattr { ino, .. } | Op::GetXattr { ino } => {
                self.after_attributes(*ino, op, &mut ways);
            }
            Op::Write { ino, value, large } => self.after_change(*ino, &mut ways, |file| {
                *(if *large { &mut file.block } else { &mut file.word }) = Some(*value);
            }),
            Op::Append { ino, value, .. } => {
                self.after_change(*ino, &mut ways, |file| file.appended.push(*value));
            }
            Op::Truncate { ino, bytes } | Op::Allocate { ino, bytes } => {
                self.after_change(*ino, &mut ways, |file| {
                    file.bytes = match (op, told, file.bytes) {
                        // Some nodes may have done it, and others not.
                        (_, None, _) => None,
                        (Op::Truncate { .. }, ..) => Some(*bytes),
                        (_, _, before) => before.map(|before| before.max(*bytes)),
                    };
                });
            }
            Op::Lock { ino, client } => self.after_lock(*ino, *client, true, &mut ways),
            Op::Unlock { ino, client } => self.after_lock(*ino, *client, false, &mut ways),
            Op::ReadAppended { ino } | Op::Size { ino } => self.after_size(*ino, op, &mut ways),
            Op::Read { ino, large } => self.after_read(*ino, *large, &mut ways),
        }
        ways.found
    }

    fn after_create(
        &self,
        (dir, name): (Ino, Name),
        kind: Kind,
        (index, node): (usize, u16),
        ways: &mut Ways<'_>,
    ) {
        let mut state = self.clone();
        let (id, made) = match ways.told {
            Some(Outcome::Inode(ino)) => (Id::Known(ino.0), *ino),
            _ => {
                let birth_node = match kind {
                    Kind::Directory => node,
                    _ if state.is_wide(dir) => 0,
                    _ => dir.birth_node().0,
                };
                (Id::MadeBy(index, birth_node), Ino(0))
            }
        };
        let result = state.make(dir, name, id, kind).map(|()| Outcome::Inode(made));
        ways.end_with(state, result);
    }

    fn after_link(&self, ino: Ino, dir: Ino, name: Name, ways: &mut Ways<'_>) {
        let (mut state, id) = (self.clone(), Id::Known(ino.0));
        let (file, doubtful) = state.file(ino);
        let exists = file.is_some();
        ways.fail(self, (!exists || doubtful).then_some(Code::NotFound));
        match state.open(dir, name) {
            Err(code) => ways.fail(self, [code]),
            Ok(directory) if exists => {
                directory.entries.insert(name, id);
                if let (Some(file), _) = state.file(ino) {
                    file.links += 1;
                }
                state.gets_name(id, dir);
                ways.end(state, Outcome::Done);
            }
            Ok(_) => {}
        }
    }

    fn after_unlink(&self, dir: Ino, name: Name, ways: &mut Ways<'_>) {
        let mut state = self.clone();
        let result = state.get(dir, name).and_then(|id| {
            if state.directories.contains_key(&id) {
                return Err(Code::IsDirectory);
            }
            state.remove_entry(dir, name);
            state.drop_link(id);
            Ok(Outcome::Done)
        });
        ways.end_with(state, result);
    }

    fn after_rmdir(&self, dir: Ino, name: Name, ways: &mut Ways<'_>) {
        let mut state = self.clone();
        let result = state.get(dir, name).and_then(|id| {
            let directory = state.directories.get(&id).ok_or(Code::NotDirectory)?;
            if !directory.entries.is_empty() {
                return Err(Code::NotEmpty);
            }
            state.remove_entry(dir, name);
            state.directories.remove(&id);
            Ok(Outcome::Done)
        });
        ways.end_with(state, result);
    }

    fn after_lookup(&self, dir: Ino, name: Name, ways: &mut Ways<'_>) {
        let mut state = self.clone();
        let told = match ways.told {
            Some(Outcome::Inode(ino)) => Some(*ino),
            _ => None,
        };
        let outcome = match (state.get(dir, name), told) {
            (Ok(id), Some(ino)) if state.is(id, ino) => Outcome::Inode(ino),
            (Ok(_), _) => Outcome::Inode(Ino(0)),
            (Err(code), _) => Outcome::Failed(code),
        };
        ways.end(state, outcome);
    }

    /// A listing of the names for which `is_listed` is true.
    fn after_list(&self, dir: Ino, is_listed: impl Fn(Name) -> bool, ways: &mut Ways<'_>) {
        let mut state = self.clone();
        match (self.directories.get(&Id::Known(dir.0)), ways.told) {
            // The home has not been notified yet that the directory is gone.
            (None, Some(told @ Outcome::Names(names))) if names.is_empty() && !ways.settled => {
                ways.end(state, told.clone());
            }
            (None, _) => ways.fail(self, [Code::NotFound]),
            (Some(directory), Some(told @ Outcome::Names(names))) => {
                let listed: Vec<_> = directory.entries.iter().filter(|(name, _)| is_listed(**name)).collect();
                let same = names.len() == listed.len()
                    && listed
                        .iter()
                        .all(|(name, id)| names.get(name).is_some_and(|ino| state.is(**id, *ino)));
                if same {
                    ways.end(state, told.clone());
                }
            }
            (Some(_), _) => {}
        }
    }

    fn after_widen(&self, op: &Op, ways: &mut Ways<'_>) {
        let (Op::WidenNew { dir } | Op::Widen { dir }) = op else { return };
        let mut state = self.clone();
        let directory = state.directories.get_mut(&Id::Known(dir.0)).ok_or(Code::NotFound);
        let result = directory.and_then(|directory| {
            match op {
                Op::WidenNew { .. } => directory.new_wide = true,
                _ if directory.wide => return Err(Code::Exists),
                _ if !directory.entries.is_empty() => return Err(Code::NotEmpty),
                _ => directory.wide = true,
            }
            Ok(Outcome::Done)
        });
        ways.end_with(state, result);
    }

    fn after_count(&self, dir: Ino, ways: &mut Ways<'_>) {
        let result = self.directories.get(&Id::Known(dir.0)).ok_or(Code::NotFound).map(|directory| {
            let is_directory = |id: &&Id| self.directories.contains_key(*id);
            let names = directory.entries.len() as u64;
            let directories = directory.entries.values().filter(is_directory).count() as u32;
            Outcome::Count { names, directories, wide: directory.wide }
        });
        ways.end_with(self.clone(), result);
    }

    fn after_stat(&self, ino: Ino, ways: &mut Ways<'_>) {
        let id = Id::Known(ino.0);
        match (self.files.get(&id), ways.told) {
            (Some(file), Some(told @ Outcome::Attr { kind, links, mode })) => {
                // The home may not have been notified yet of names that are gone, or counts a name in creation.
                let lags = file.abroad && !ways.settled && *links > file.links;
                let counted = file.links > 0 && *links == file.links;
                if file.kind == *kind && file.mode == *mode && (counted || lags) {
                    ways.end(self.clone(), told.clone());
                }
            }
            (Some(file), _) if file.links == 0 => ways.fail(self, [Code::NotFound]),
            (Some(_), _) => {}
            // Of a directory, only its existence is checked.
            (None, Some(told @ Outcome::Attr { kind: Kind::Directory, .. }))
                if self.directories.contains_key(&id) =>
            {
                ways.end(self.clone(), told.clone());
            }
            (None, _) if self.directories.contains_key(&id) => {}
            (None, _) => ways.fail(self, [Code::NotFound]),
        }
    }

    fn after_attributes(&self, ino: Ino, op: &Op, ways: &mut Ways<'_>) {
        let mut state = self.clone();
        let (file, doubtful) = state.file(ino);
        ways.fail(self, (file.is_none() || doubtful).then_some(Code::NotFound));
        let Some(file) = file else { return };
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
        ways.end(state, outcome);
    }

    /// A change of a file's data.
    fn after_change(&self, ino: Ino, ways: &mut Ways<'_>, change: impl FnOnce(&mut File)) {
        let mut state = self.clone();
        let (file, doubtful) = state.file(ino);
        if file.is_none() || doubtful {
            ways.without_effect(self);
        }
        if let Some(file) = file {
            change(file);
            ways.end(state, Outcome::Done);
        }
    }

    fn after_lock(&self, ino: Ino, client: usize, locks: bool, ways: &mut Ways<'_>) {
        let mut state = self.clone();
        let (file, doubtful) = state.file(ino);
        if file.is_none() || doubtful {
            ways.without_effect(self);
            ways.fail(self, [Code::Busy]);
        }
        let Some(file) = file else { return };
        let is_its = file.locked == Some(client);
        if locks && !is_its && file.locked.is_some() {
            return ways.fail(self, [Code::Busy]);
        }
        if locks || is_its {
            file.locked = locks.then_some(client);
        }
        ways.end(state, Outcome::Done);
    }

    fn after_size(&self, ino: Ino, op: &Op, ways: &mut Ways<'_>) {
        let mut state = self.clone();
        let (file, doubtful) = state.file(ino);
        if file.is_none() || doubtful {
            ways.fail(self, [Code::NotFound, Code::Stale]);
        }
        match (file, ways.told) {
            (Some(file), Some(told @ Outcome::Appended { whole, .. })) if file.appended == *whole => {
                ways.end(state, told.clone());
            }
            (Some(_), _) if matches!(op, Op::ReadAppended { .. }) => {}
            (Some(File { bytes: Some(bytes), .. }), _) => {
                let bytes = *bytes;
                ways.end(state, Outcome::Value(Some(bytes)));
            }
            // The size is unknown, or the file was opened before it was removed.
            (_, Some(told @ (Outcome::Value(_) | Outcome::Appended { .. }))) => ways.end(state, told.clone()),
            _ => {}
        }
    }

    fn after_read(&self, ino: Ino, large: bool, ways: &mut Ways<'_>) {
        let mut state = self.clone();
        let (file, doubtful) = state.file(ino);
        let word = file.map(|file| if large { file.block } else { file.word });
        if word.is_none() || doubtful {
            ways.fail(self, [Code::NotFound, Code::Stale]);
        }
        match (word, ways.told) {
            (Some(word), _) => ways.end(state, Outcome::Value(word)),
            // The file was opened before it was removed.
            (None, Some(told @ Outcome::Value(_))) => ways.end(state, told.clone()),
            (None, _) => {}
        }
    }
}
