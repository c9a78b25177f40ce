//! Leftovers of killed stagings, and the removal of trees.

use std::collections::HashSet;
use std::sync::Arc;

use forebay_types::{Code, Kind, Timestamp};

use crate::branch::DirectoryState;
use crate::engine::{At, Engine};
use crate::enter::FILLING_MODE;
use crate::names::{Owner, Tag, Temporary, Use};
use crate::pair::join;
use crate::report::add;
use crate::tree::{Names, Object, Tree};

/// A temporary of a staging that has ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Leftover {
    pub(crate) name: Vec<u8>,
    pub(crate) temporary: Temporary,
    pub(crate) kind: Kind,
}

/// Calls `each` for every name in a directory.
pub(crate) fn each_name<T: Tree>(
    tree: &T,
    at: &T::Directory,
    each: &mut dyn FnMut(&[u8]) -> Result<(), Code>,
) -> Result<(), Code> {
    let mut cursor = 0;
    loop {
        let mut names = Names::default();
        let next = tree.list(at, cursor, &mut names)?;
        for (name, _) in names.iter() {
            each(name)?;
        }
        match next {
            Some(next) => cursor = next,
            None => return Ok(()),
        }
    }
}

/// The leftovers in a directory whose final name's hash is in `hashes`; with `None` all leftovers.
pub(crate) fn find<T: Tree>(
    tree: &T,
    at: &T::Directory,
    hashes: Option<&HashSet<u64>>,
) -> Result<Vec<Leftover>, Code> {
    find_at(tree, at, hashes, now())
}

fn find_at<T: Tree>(
    tree: &T,
    at: &T::Directory,
    hashes: Option<&HashSet<u64>>,
    now: Timestamp,
) -> Result<Vec<Leftover>, Code> {
    let mut found = Vec::new();
    each_name(tree, at, &mut |name| {
        let Some(temporary) = Temporary::parse(name) else { return Ok(()) };
        if hashes.is_some_and(|hashes| !hashes.contains(&temporary.hash)) {
            return Ok(());
        }
        let meta = match tree.stat(at, name, false) {
            Err(Code::NotFound) => return Ok(()),
            other => other?,
        };
        let is_dead = |changed| temporary.tag.owner(changed, now) == Owner::Dead;
        // A live staging may change only what is deeper in its tree.
        let may_be_deeper = meta.kind == Kind::Directory && temporary.tag.is_foreign();
        if is_dead(meta.ctime) && !(may_be_deeper && has_change(tree, at, name, &|at| !is_dead(at))?) {
            found.push(Leftover { name: name.to_vec(), temporary, kind: meta.kind });
        }
        Ok(())
    })?;
    Ok(found)
}

/// True if anything in a directory, at any depth, changed at a time that is `recent`, and if the directory cannot be
/// read. Another directory that cannot be read has its final mode, so everything in it is complete.
fn has_change<T: Tree>(
    tree: &T,
    at: &T::Directory,
    name: &[u8],
    recent: &dyn Fn(Timestamp) -> bool,
) -> Result<bool, Code> {
    // Paths of directories still to be listed. Each is opened from `at`, so that neither depth nor descriptors are
    // limits.
    let mut waiting = vec![name.to_vec()];
    while let Some(path) = waiting.pop() {
        let directory = match open_below(tree, at, &path) {
            Err(Code::AccessDenied) if path == name => return Ok(true),
            Err(Code::AccessDenied | Code::NotFound | Code::NotDirectory) => continue,
            other => other?,
        };
        let mut found = false;
        each_name(tree, &directory, &mut |inside| {
            match tree.stat(&directory, inside, false) {
                Ok(meta) if recent(meta.ctime) => found = true,
                Ok(meta) if meta.kind == Kind::Directory => waiting.push(join(&path, inside)),
                Ok(_) | Err(Code::AccessDenied | Code::NotFound) => {}
                Err(code) => return Err(code),
            }
            Ok(())
        })?;
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Opens the directory at a path relative to `at`, without following links.
fn open_below<T: Tree>(tree: &T, at: &T::Directory, path: &[u8]) -> Result<T::Directory, Code> {
    let mut names = path.split(|&b| b == b'/');
    let (mut handle, _) = tree.open_directory(at, names.next().unwrap_or(b"."), false)?;
    for name in names {
        handle = tree.open_directory(&handle, name, false)?.0;
    }
    Ok(handle)
}

fn now() -> Timestamp {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Timestamp { sec: since.as_secs() as i64, nsec: since.subsec_nanos() }
}

/// Removes a tree or another object. The tree is first renamed to a name that marks it as in removal, in case this
/// process is killed half-way. Directories within it are moved up when they are found, so that neither depth nor
/// descriptors are limits.
pub(crate) fn remove_tree<T: Tree>(tree: &T, at: &T::Directory, name: &[u8], tag: &Tag) -> Result<(), Code> {
    match tree.unlink(at, name) {
        Err(Code::IsDirectory | Code::NotPermitted) => {}
        other => return other,
    }
    // A directory must be writable to remove its entries and to be moved.
    let _ = tree.set_mode(Object::Entry(at, name), FILLING_MODE);
    let gone = tag.temporary(name, Use::Gone);
    tree.rename((at, name), (at, &gone), 0)?;
    let (top, _) = tree.open_directory(at, &gone, false)?;
    empty(tree, &top)?;
    tree.remove_directory(at, &gone)
}

/// Removes all entries of a directory.
fn empty<T: Tree>(tree: &T, top: &T::Directory) -> Result<(), Code> {
    let mut moved = 0u64;
    // Directories of `top` still to be emptied. The last one is emptied first, so there are few.
    let mut waiting = clear_files(tree, top)?;
    for name in &waiting {
        let _ = tree.set_mode(Object::Entry(top, name), FILLING_MODE);
    }
    while let Some(name) = waiting.pop() {
        let (directory, _) = tree.open_directory(top, &name, false)?;
        let inner = clear_files(tree, &directory)?;
        let mut up = Vec::new();
        for inside in inner {
            moved += 1;
            let new = format!("{moved:x}.moved").into_bytes();
            let _ = tree.set_mode(Object::Entry(&directory, &inside), FILLING_MODE);
            match tree.rename_to_free((&directory, &inside), (top, &new)) {
                Ok(()) => up.push(new),
                // The tree contains an entry of this name: a longer name is used.
                Err(Code::Exists) => {
                    let new = format!("{moved:x}.moved-{}", waiting.len()).into_bytes();
                    tree.rename_to_free((&directory, &inside), (top, &new))?;
                    up.push(new);
                }
                Err(code) => return Err(code),
            }
        }
        tree.remove_directory(top, &name)?;
        waiting.append(&mut up);
    }
    Ok(())
}

/// Unlinks everything but directories, and returns the names of the directories.
fn clear_files<T: Tree>(tree: &T, at: &T::Directory) -> Result<Vec<Vec<u8>>, Code> {
    let mut directories = Vec::new();
    // Removing entries during a listing may hide others, so it is repeated until only directories are left.
    loop {
        let mut removed = false;
        directories.clear();
        each_name(tree, at, &mut |name| {
            match tree.unlink(at, name) {
                Ok(()) => removed = true,
                Err(Code::NotFound) => {}
                Err(Code::IsDirectory) => directories.push(name.to_vec()),
                // POSIX allows EPERM for unlink of a directory.
                Err(Code::NotPermitted) if tree.stat(at, name, false)?.kind == Kind::Directory => {
                    directories.push(name.to_vec());
                }
                Err(code) => return Err(code),
            }
            Ok(())
        })?;
        if !removed {
            return Ok(directories);
        }
    }
}

impl<S: Tree, D: Tree> Engine<'_, S, D> {
    /// Removes the leftovers in a destination directory that existed before.
    pub(crate) fn clear_leftovers(
        &self,
        at: &D::Directory,
        hashes: Option<&HashSet<u64>>,
        path: &dyn Fn() -> Vec<u8>,
    ) {
        let found = match find(self.destination, at, hashes) {
            Ok(found) => found,
            Err(code) => {
                return self.error(
                    At::Destination,
                    "look for leftovers of a killed staging",
                    code,
                    path(),
                    None,
                )
            }
        };
        for leftover in found {
            match remove_tree(self.destination, at, &leftover.name, &self.tag) {
                Ok(()) => {
                    add(&self.tally.leftovers_removed, 1);
                    let path = crate::report::display(&join(&path(), &leftover.name));
                    self.progress.message(&format!("{path}: left by a staging that was killed; removed"));
                }
                Err(Code::NotFound) => {}
                Err(code) => {
                    let path = join(&path(), &leftover.name);
                    self.error(At::Destination, "remove what a killed staging left", code, path, None);
                }
            }
        }
    }

    /// Removes from a directory of an adopted tree the entries that its source no longer has.
    pub(crate) fn prune(&self, state: &DirectoryState<S, D>, destination: &Arc<D::Directory>) {
        let source = match state.source(self.source, &self.source_shelf) {
            Ok(source) => source,
            Err(code) => return self.error(At::Source, "open it again", code, state.source_path(b"."), None),
        };
        let mut extra = Vec::new();
        let listed = each_name(self.destination, destination, &mut |name| {
            if self.source.stat(&source, name, false) == Err(Code::NotFound) {
                extra.push(name.to_vec());
            }
            Ok(())
        });
        let pruned = listed.and_then(|()| {
            extra.iter().try_for_each(|name| remove_tree(self.destination, destination, name, &self.tag))
        });
        if let Err(code) = pruned {
            self.error(
                At::Destination,
                "remove entries that the source no longer has",
                code,
                state.destination_path(b"."),
                None,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir_all, write};
    use std::os::unix::fs::MetadataExt;
    use std::time::Duration;

    use super::*;
    use crate::names::FOREIGN_STALE_SECONDS;
    use crate::posix::PosixTree;
    use crate::trees::Scratch;

    #[test]
    fn tree_of_another_host_is_left_over_once_nothing_in_it_changes() {
        let scratch = Scratch::new();
        let name = Tag::of_another_host().temporary(b"tree", Use::Part);
        let top = scratch.join(std::str::from_utf8(&name).unwrap());
        create_dir_all(top.join("a/b/c")).unwrap();
        write(top.join("a/f"), b"f").unwrap();
        let tree = PosixTree::new();
        let (at, _) = tree.open_path(scratch.0.as_os_str().as_encoded_bytes()).unwrap();
        let stale_seconds =
            |path: &str| std::fs::metadata(top.join(path)).unwrap().ctime() + FOREIGN_STALE_SECONDS;
        let found = |sec| find_at(&tree, &at, None, Timestamp { sec, nsec: 0 }).unwrap().len();
        let stale = stale_seconds("");
        assert_eq!((found(stale - 1), found(stale + 1)), (0, 1));
        // Only the directory that gets the entry changes.
        while stale_seconds("a/b/c") <= stale + 1 {
            std::thread::sleep(Duration::from_millis(100));
            write(top.join("a/b/c/f"), b"f").unwrap();
            std::fs::remove_file(top.join("a/b/c/f")).unwrap();
        }
        assert_eq!(stale_seconds(""), stale);
        assert_eq!((found(stale + 1), found(stale_seconds("a/b/c"))), (0, 1));
    }
}
