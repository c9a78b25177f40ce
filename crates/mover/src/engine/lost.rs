//! Clean files of nodes that do not answer: their store has them, so programs of the other nodes need not wait for the
//! node to come back.
//!
//! Such a file is released without its node. Nothing is lost by that: a clean file has no program that may write it,
//! and to be opened for writing, on whatever node, it is marked dirty first by the tree's home, which is here. A program
//! of a node that is only cut off goes on to read the data that it has open. What the node has of the file is unlinked
//! by its mover when it is back ([`super::evict`]).

use std::collections::HashSet;
use std::time::Duration;

use forebay_client::Kept;
use forebay_types::{node_of, Code, Entry, Error, Ino, NodeId, Result, SetAttr, TimeSet, FLAG_ATTACHED};

use super::shared::Shared;
use crate::store::Store;
use crate::tasks::Progress;

/// How long a node does not answer before its clean files are released: longer than a daemon takes to start again.
pub(super) const AFTER: Duration = Duration::from_secs(30);

/// Whether a node that does not answer has data of a file.
pub(super) fn has_data(shared: &Shared, entry: &Entry) -> bool {
    nodes_of(entry).any(|node| shared.peers.is_lost(node))
}

fn nodes_of(entry: &Entry) -> impl Iterator<Item = NodeId> + '_ {
    entry.layout.stripes().map(|(component, stripe)| {
        let components = entry.layout.components();
        node_of(components[component].target(stripe))
    })
}

/// Releases a file without the nodes that have its data, if its store has the version that the pool knows.
pub(super) fn release(shared: &Shared, entry: &Entry) -> Result<std::result::Result<u64, Kept>> {
    let (link, ino) = (&shared.link, entry.attr.ino);
    let kept = |why| Ok(Err(Kept::because(why)));
    if let Some(kept) = link.pool.must_be_kept(entry) {
        return Ok(Err(kept));
    }
    let located = shared.stores.locate(ino)?;
    let looked = located.at.store.look(&located.path).map_err(Error::from)?;
    let known = located.placed.map(|placed| placed.version);
    let Some(object) = looked.filter(|object| Some(object.version) == known) else {
        return kept("another program changed it in the store, and its node does not answer");
    };
    let set = SetAttr {
        size: Some(object.bytes()),
        atime: TimeSet::At(object.atime),
        mtime: TimeSet::At(object.mtime),
        ..SetAttr::default()
    };
    match link.release(ino, entry.attr.epoch(), set) {
        Ok(_) => {}
        Err(Code::Stale) => return kept("a program changed it"),
        Err(Code::Busy) => return kept("it is pinned, or the store does not have its attributes yet"),
        Err(Code::NotFound) => return kept("it was removed"),
        Err(code) => return Err(Error::new(code, format!("cannot release file {ino}"))),
    }
    // A part that this node has; others' movers find theirs.
    let _ = link.pool.unlink_released(entry);
    Ok(Ok(0))
}

/// Releases all clean files that have data on these nodes, in the trees whose names this node has.
pub(super) fn release_all(shared: &Shared, nodes: &HashSet<NodeId>) {
    let names: Vec<String> = nodes.iter().map(ToString::to_string).collect();
    let what = format!("node {} does not answer for {} s", names.join(", "), AFTER.as_secs());
    let progress = Progress::default();
    for root in shared.stores.roots() {
        let mut is_over = || shared.stores.is_stopping() || progress.is_cancelled();
        let (mut released, mut kept) = (0, 0);
        each_known_file(shared, root, &mut is_over, &mut |entry| {
            if !nodes_of(entry).any(|node| nodes.contains(&node)) || !entry.attr.is_resident() {
                return;
            }
            match release(shared, entry) {
                Ok(Ok(_)) => released += 1,
                Ok(Err(_)) => kept += 1,
                Err(e) => {
                    kept += 1;
                    tracing::debug!("{e}");
                }
            }
        });
        if released > 0 {
            let path = shared.link.path(root, b"");
            tracing::warn!("{what}: {released} files below {path} come from their store from now on");
        }
        if kept > 0 {
            tracing::warn!("{what}: {kept} files are nowhere else, or cannot be released now");
        }
    }
}

/// The files that the pool knows: no directory is listed for this.
fn each_known_file(
    shared: &Shared,
    root: Ino,
    is_over: &mut dyn FnMut() -> bool,
    each: &mut dyn FnMut(&Entry),
) {
    let link = &shared.link;
    let mut directories = vec![root];
    while let Some(directory) = directories.pop() {
        let mut listing = link.pool.read_known(directory);
        let mut inodes = Vec::new();
        while let Ok(Some(found)) = listing.next(link.pool) {
            if found.name != b"." && found.name != b".." {
                inodes.push(found.ino);
            }
        }
        for ino in inodes {
            if is_over() {
                return;
            }
            match link.inode(ino) {
                Ok(entry) if entry.attr.flags & FLAG_ATTACHED == 0 => {}
                Ok(entry) if entry.attr.is_directory() => directories.push(ino),
                Ok(entry) if entry.attr.is_file() => each(&entry),
                _ => {}
            }
        }
    }
}
