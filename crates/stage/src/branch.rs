//! A directory in progress: its source and destination, whose descriptors stay open while there are enough, and the
//! steps that follow once everything below it is done.
//!
//! Jobs, and the branches below a directory, hold it by a [`Branch`]. When the last [`Branch`] is dropped, the
//! directory's state moves to the list of [`Ended`] directories. The threads take directories from that list and finish
//! them (attributes, times), which drops the hold on the parent, and so on upwards, without recursion. If staging
//! stops, the list is emptied without finishing anything.

use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::{Arc, Mutex, Weak};

use forebay_types::Code;

use crate::pair::join;
use crate::tree::{Meta, Tree};

/// The most recently opened directories of one side. They stay open, because their entries are staged next. An older
/// directory is closed once no job uses it, and opened again through its parents when needed.
#[derive(Debug)]
pub(crate) struct Shelf<H> {
    most: usize,
    recent: Mutex<VecDeque<Arc<H>>>,
}

impl<H> Shelf<H> {
    /// Keeps `most` directories open.
    pub(crate) fn new(most: usize) -> Shelf<H> {
        Shelf { most, recent: Mutex::new(VecDeque::new()) }
    }

    fn keep(&self, handle: Arc<H>) {
        let mut recent = self.recent.lock().unwrap_or_else(|e| e.into_inner());
        recent.push_back(handle);
        let old = if recent.len() > self.most { recent.pop_front() } else { None };
        // Closing may take long, so it is not done under the lock.
        drop(recent);
        drop(old);
    }
}

/// One side of a branch: a directory that is open or can be opened again.
#[derive(Debug)]
pub(crate) struct Side<H> {
    /// Its name in the parent, or its path if there is no parent.
    pub(crate) name: Vec<u8>,
    /// Device and inode, checked when the directory is opened again.
    identity: (u64, u64),
    open: Mutex<Weak<H>>,
}

impl<H> Side<H> {
    pub(crate) fn new(name: Vec<u8>, opened: (H, Meta), shelf: &Shelf<H>) -> Side<H> {
        let side = Side { name, identity: opened.1.identity(), open: Mutex::new(Weak::new()) };
        side.keep(Arc::new(opened.0), shelf);
        side
    }

    fn live(&self) -> Option<Arc<H>> {
        self.open.lock().unwrap_or_else(|e| e.into_inner()).upgrade()
    }

    fn keep(&self, handle: Arc<H>, shelf: &Shelf<H>) {
        *self.open.lock().unwrap_or_else(|e| e.into_inner()) = Arc::downgrade(&handle);
        shelf.keep(handle);
    }
}

/// The state of a directory in progress.
pub(crate) struct DirectoryState<S: Tree, D: Tree> {
    pub(crate) parent: Option<Branch<S, D>>,
    pub(crate) source: Side<S::Directory>,
    pub(crate) destination: Side<D::Directory>,
    /// Attributes for the destination, set at the end; `None` for a directory that is not itself staged.
    pub(crate) meta: Option<Meta>,
    /// This staging created the destination: it contains only staged entries.
    pub(crate) fresh: bool,
    /// The destination is in a tree that a killed staging left: entries that the source lacks are removed.
    pub(crate) prune: bool,
    pub(crate) ended: Arc<Ended<S, D>>,
}

/// A hold on a directory in progress.
pub(crate) struct Branch<S: Tree, D: Tree>(Option<Arc<DirectoryState<S, D>>>);

/// Directories below which everything is done.
pub(crate) struct Ended<S: Tree, D: Tree>(Mutex<Vec<DirectoryState<S, D>>>);

impl<S: Tree, D: Tree> Ended<S, D> {
    pub(crate) fn new() -> Arc<Ended<S, D>> {
        Arc::new(Ended(Mutex::new(Vec::new())))
    }

    /// Removes and returns one of them.
    pub(crate) fn take(&self) -> Option<DirectoryState<S, D>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).pop()
    }
}

impl<S: Tree, D: Tree> Branch<S, D> {
    pub(crate) fn new(state: DirectoryState<S, D>) -> Branch<S, D> {
        Branch(Some(Arc::new(state)))
    }
}

impl<S: Tree, D: Tree> Clone for Branch<S, D> {
    fn clone(&self) -> Self {
        Branch(self.0.clone())
    }
}

impl<S: Tree, D: Tree> Deref for Branch<S, D> {
    type Target = DirectoryState<S, D>;

    fn deref(&self) -> &DirectoryState<S, D> {
        match &self.0 {
            Some(state) => state,
            None => unreachable!("only drop takes it"),
        }
    }
}

impl<S: Tree, D: Tree> Drop for Branch<S, D> {
    fn drop(&mut self) {
        if let Some(state) = self.0.take().and_then(Arc::into_inner) {
            let ended = state.ended.clone();
            ended.0.lock().unwrap_or_else(|e| e.into_inner()).push(state);
        }
    }
}

impl<S: Tree, D: Tree> DirectoryState<S, D> {
    /// The open source directory.
    pub(crate) fn source(&self, tree: &S, shelf: &Shelf<S::Directory>) -> Result<Arc<S::Directory>, Code> {
        reach(self, tree, |state| &state.source, shelf)
    }

    /// The open destination directory.
    pub(crate) fn destination(
        &self,
        tree: &D,
        shelf: &Shelf<D::Directory>,
    ) -> Result<Arc<D::Directory>, Code> {
        reach(self, tree, |state| &state.destination, shelf)
    }

    /// The path of `name` in the source, for messages.
    pub(crate) fn source_path(&self, name: &[u8]) -> Vec<u8> {
        path(self, |state| &state.source.name, name)
    }

    /// The path of `name` in the destination, for messages.
    pub(crate) fn destination_path(&self, name: &[u8]) -> Vec<u8> {
        path(self, |state| &state.destination.name, name)
    }
}

/// Opens one side of a branch, starting at its nearest ancestor that is still open.
fn reach<S: Tree, D: Tree, T: Tree>(
    state: &DirectoryState<S, D>,
    tree: &T,
    side: impl Fn(&DirectoryState<S, D>) -> &Side<T::Directory>,
    shelf: &Shelf<T::Directory>,
) -> Result<Arc<T::Directory>, Code> {
    let mut closed = Vec::new();
    let mut at = state;
    let mut handle = loop {
        if let Some(handle) = side(at).live() {
            break handle;
        }
        match &at.parent {
            Some(parent) => {
                closed.push(at);
                at = parent;
            }
            None => {
                let opened = tree.open_path(&side(at).name)?;
                break checked(opened, side(at), shelf)?;
            }
        }
    };
    while let Some(at) = closed.pop() {
        let opened = tree.open_directory(&handle, &side(at).name, false)?;
        handle = checked(opened, side(at), shelf)?;
    }
    Ok(handle)
}

fn checked<H>(opened: (H, Meta), side: &Side<H>, shelf: &Shelf<H>) -> Result<Arc<H>, Code> {
    if opened.1.identity() != side.identity {
        return Err(Code::Stale);
    }
    let handle = Arc::new(opened.0);
    side.keep(handle.clone(), shelf);
    Ok(handle)
}

fn path<'a, S: Tree, D: Tree>(
    state: &'a DirectoryState<S, D>,
    part: impl Fn(&'a DirectoryState<S, D>) -> &'a Vec<u8>,
    name: &'a [u8],
) -> Vec<u8> {
    let mut parts = vec![name];
    let mut at = Some(state);
    while let Some(state) = at {
        parts.push(part(state));
        at = state.parent.as_deref();
    }
    parts
        .into_iter()
        .rev()
        .fold(Vec::new(), |path, part| if path.is_empty() { part.to_vec() } else { join(&path, part) })
}
