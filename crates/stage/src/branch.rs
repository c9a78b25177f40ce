//! A directory in progress: its two sides, open as long as descriptors are plenty, and what is to be done when all
//! below it is.
//!
//! Jobs, and branches below, hold a branch by a [`Branch`]. When the last of them is dropped, the directory's state goes
//! to the list of [`Ended`] ones, from which the threads take and finish it (attributes, times); that drops its hold on
//! its parent, and so on upwards, without recursion. Staging that stops empties the list without finishing anything.

use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use forebay_types::Code;

use crate::pair::join;
use crate::tree::{Meta, Tree};

/// How many directories may be kept open: a share of what the process may open.
#[derive(Debug)]
pub(crate) struct Budget(Arc<AtomicUsize>);

/// One of the directories that are kept open.
#[derive(Debug)]
struct Permit(Arc<AtomicUsize>);

impl Budget {
    pub(crate) fn new(most: usize) -> Budget {
        Budget(Arc::new(AtomicUsize::new(most)))
    }

    fn permit(&self) -> Option<Permit> {
        let one_less = |n: usize| n.checked_sub(1);
        self.0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less)
            .ok()
            .map(|_| Permit(self.0.clone()))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// One side of a branch: a directory that is open, or can be opened again.
#[derive(Debug)]
pub(crate) struct Side<H> {
    /// Its name in the parent's side, or its path if there is no parent.
    pub(crate) name: Vec<u8>,
    /// Follow it if it is a link: only what the user named.
    pub(crate) follow: bool,
    /// Device and inode, checked when it is opened again.
    pub(crate) identity: (u64, u64),
    open: Mutex<(Weak<H>, Option<(Arc<H>, Permit)>)>,
}

impl<H> Side<H> {
    pub(crate) fn new(name: Vec<u8>, follow: bool, opened: (H, Meta), budget: &Budget) -> Side<H> {
        let side =
            Side { name, follow, identity: opened.1.identity(), open: Mutex::new((Weak::new(), None)) };
        side.keep(Arc::new(opened.0), budget);
        side
    }

    fn live(&self) -> Option<Arc<H>> {
        self.open.lock().unwrap_or_else(|e| e.into_inner()).0.upgrade()
    }

    fn keep(&self, handle: Arc<H>, budget: &Budget) {
        let mut open = self.open.lock().unwrap_or_else(|e| e.into_inner());
        open.0 = Arc::downgrade(&handle);
        if open.1.is_none() {
            open.1 = budget.permit().map(|permit| (handle, permit));
        }
    }
}

/// What is known of a directory in progress.
pub(crate) struct Trunk<S: Tree, D: Tree> {
    pub(crate) parent: Option<Branch<S, D>>,
    pub(crate) source: Side<S::Directory>,
    pub(crate) destination: Side<D::Directory>,
    /// Attributes for the destination, set at the end; none for a directory that is not part of what is staged.
    pub(crate) meta: Option<Meta>,
    /// The destination was made by this staging: nothing is in it that was not staged.
    pub(crate) fresh: bool,
    /// The destination is within a tree that a killed staging left: what the source does not have is removed.
    pub(crate) prune: bool,
    pub(crate) ended: Arc<Ended<S, D>>,
}

/// A hold on a directory in progress.
pub(crate) struct Branch<S: Tree, D: Tree>(Option<Arc<Trunk<S, D>>>);

/// Directories below which all is done.
pub(crate) struct Ended<S: Tree, D: Tree>(Mutex<Vec<Trunk<S, D>>>);

impl<S: Tree, D: Tree> Ended<S, D> {
    pub(crate) fn new() -> Arc<Ended<S, D>> {
        Arc::new(Ended(Mutex::new(Vec::new())))
    }

    /// Takes one of them.
    pub(crate) fn take(&self) -> Option<Trunk<S, D>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).pop()
    }
}

impl<S: Tree, D: Tree> Branch<S, D> {
    pub(crate) fn new(trunk: Trunk<S, D>) -> Branch<S, D> {
        Branch(Some(Arc::new(trunk)))
    }
}

impl<S: Tree, D: Tree> Clone for Branch<S, D> {
    fn clone(&self) -> Self {
        Branch(self.0.clone())
    }
}

impl<S: Tree, D: Tree> Deref for Branch<S, D> {
    type Target = Trunk<S, D>;

    fn deref(&self) -> &Trunk<S, D> {
        match &self.0 {
            Some(trunk) => trunk,
            None => unreachable!("only drop takes it"),
        }
    }
}

impl<S: Tree, D: Tree> Drop for Branch<S, D> {
    fn drop(&mut self) {
        if let Some(trunk) = self.0.take().and_then(Arc::into_inner) {
            let ended = trunk.ended.clone();
            ended.0.lock().unwrap_or_else(|e| e.into_inner()).push(trunk);
        }
    }
}

impl<S: Tree, D: Tree> Trunk<S, D> {
    /// The open source directory.
    pub(crate) fn source(&self, tree: &S, budget: &Budget) -> Result<Arc<S::Directory>, Code> {
        reach(self, tree, |trunk| &trunk.source, budget)
    }

    /// The open destination directory.
    pub(crate) fn destination(&self, tree: &D, budget: &Budget) -> Result<Arc<D::Directory>, Code> {
        reach(self, tree, |trunk| &trunk.destination, budget)
    }

    /// The path of `name` in the source, for people.
    pub(crate) fn source_path(&self, name: &[u8]) -> Vec<u8> {
        path(self, |trunk| &trunk.source.name, name)
    }

    /// The path of `name` in the destination, for people.
    pub(crate) fn destination_path(&self, name: &[u8]) -> Vec<u8> {
        path(self, |trunk| &trunk.destination.name, name)
    }
}

/// Opens one side of a branch, going up to the nearest ancestor that is still open.
fn reach<S: Tree, D: Tree, T: Tree>(
    trunk: &Trunk<S, D>,
    tree: &T,
    side: impl Fn(&Trunk<S, D>) -> &Side<T::Directory>,
    budget: &Budget,
) -> Result<Arc<T::Directory>, Code> {
    let mut closed = Vec::new();
    let mut at = trunk;
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
                break checked(opened, side(at), budget)?;
            }
        }
    };
    while let Some(at) = closed.pop() {
        let opened = tree.open_directory(&handle, &side(at).name, side(at).follow)?;
        handle = checked(opened, side(at), budget)?;
    }
    Ok(handle)
}

fn checked<H>(opened: (H, Meta), side: &Side<H>, budget: &Budget) -> Result<Arc<H>, Code> {
    if opened.1.identity() != side.identity {
        return Err(Code::Stale);
    }
    let handle = Arc::new(opened.0);
    side.keep(handle.clone(), budget);
    Ok(handle)
}

fn path<'a, S: Tree, D: Tree>(
    trunk: &'a Trunk<S, D>,
    part: impl Fn(&'a Trunk<S, D>) -> &'a Vec<u8>,
    name: &'a [u8],
) -> Vec<u8> {
    let mut parts = vec![name];
    let mut at = Some(trunk);
    while let Some(trunk) = at {
        parts.push(part(trunk));
        at = trunk.parent.as_deref();
    }
    parts
        .into_iter()
        .rev()
        .fold(Vec::new(), |path, part| if path.is_empty() { part.to_vec() } else { join(&path, part) })
}
