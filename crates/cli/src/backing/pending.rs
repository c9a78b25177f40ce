//! What backing stores do not have yet.

use std::path::Path;

use forebay_client::Pool;
use forebay_server::control::{self, Status};
use forebay_types::{
    Code, Entry, Error, Ino, NodeId, PendingPlace, Reply, Request, Result, Wanted, FLAG_ATTACHED,
};
use serde_json::Value;

use super::trees::Trees;
use crate::{pool, table};

/// The nodes whose shards may have pending places: all that are up.
pub(crate) fn nodes(dir: &Path) -> Result<Vec<NodeId>> {
    nodes_in(&control::status(dir)?)
}

fn nodes_in(status: &Status) -> Result<Vec<NodeId>> {
    let others = status.more.get("nodes").and_then(Value::as_array);
    let is_alone = status.more.get("node_count").and_then(Value::as_u64).is_none_or(|n| n <= 1);
    if others.is_none() && !is_alone {
        return Err(Error::new(Code::TimedOut, "cannot tell which nodes the pool has")
            .why("its worker does not answer")
            .cure("try again"));
    }
    let others = others.into_iter().flatten().filter(|node| node["state"].as_str() == Some("up"));
    let numbers = others.filter_map(|node| node["node"].as_u64().and_then(|n| u16::try_from(n).ok()));
    let mut nodes: Vec<NodeId> = std::iter::once(status.node).chain(numbers).map(NodeId).collect();
    nodes.sort();
    nodes.dedup();
    Ok(nodes)
}

/// The nodes whose shards may have pending places that concern an inode: one node has an attached tree.
pub(crate) fn nodes_of(dir: &Path, entry: &Entry) -> Result<Vec<NodeId>> {
    match entry.attr.flags & FLAG_ATTACHED {
        0 => nodes(dir),
        _ => Ok(vec![entry.attr.ino.birth_node()]),
    }
}

/// All pending places of these nodes.
pub(crate) fn all(pool: &Pool, nodes: &[NodeId]) -> Result<Vec<PendingPlace>> {
    let mut all = Vec::new();
    for node in nodes {
        all.extend(all_of(pool, *node)?);
    }
    Ok(all)
}

fn all_of(pool: &Pool, node: NodeId) -> Result<Vec<PendingPlace>> {
    let failed = |code| Error::new(code, "cannot read what backing stores lack").why(pool::words(code));
    let (mut all, mut parent, mut name) = (Vec::new(), Ino::new(node, 0), Vec::new());
    loop {
        let more = pool.request(&Request::Pending { parent, name: &name }, |reply| match reply {
            Reply::Bytes(bytes) => PendingPlace::decode_list(bytes),
            _ => Err(Code::Malformed),
        });
        let more = more.map_err(failed)?;
        let Some(last) = more.last() else { return Ok(all) };
        (parent, name) = (last.parent, last.name.clone());
        all.extend(more);
    }
}

/// What stores lack, in numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Lacking {
    /// Files whose data are newer in the pool, or only there.
    pub(crate) files: u64,
    /// Bytes of their data.
    pub(crate) bytes: u64,
    /// Other changes: directories, links, names, removals, attributes.
    pub(crate) changes: u64,
    /// Places whose version in the store was changed by others; they are in the numbers above too.
    pub(crate) conflicts: u64,
}

impl Lacking {
    /// Counts these places. Those that are never to be written by the user's own choice (`--drain never`, `temporary`)
    /// are left out.
    pub(crate) fn of(pool: &'static Pool, places: &[PendingPlace]) -> Lacking {
        let (mut lacking, mut trees) = (Lacking::default(), Trees::new(pool));
        for place in places {
            if trees.policy(place).is_some_and(|policy| policy.is_temporary()) {
                continue;
            }
            lacking.conflicts += u64::from(place.conflict);
            match &place.wanted {
                Some(Wanted::Here(entry, _)) if entry.attr.is_file() && is_newer(place) => {
                    lacking.files += 1;
                    lacking.bytes +=
                        pool.stat_entry(entry).map_or(entry.attr.size, |stat| stat.st_size as u64);
                }
                _ => lacking.changes += 1,
            }
        }
        lacking
    }

    /// True when nothing is lacking.
    pub(crate) fn is_nothing(&self) -> bool {
        *self == Lacking::default()
    }

    /// In words: `3 files (2 GiB) and 1 other change`.
    pub(crate) fn words(&self) -> String {
        let mut parts = Vec::new();
        if self.files > 0 {
            parts.push(format!("{} ({})", table::count(self.files, "file"), table::bytes(self.bytes)));
        }
        if self.changes > 0 {
            parts.push(format!("{} of names or attributes", table::count(self.changes, "change")));
        }
        parts.join(" and ")
    }
}

/// True if the store does not have a file's data: they were written since, or never copied.
fn is_newer(place: &PendingPlace) -> bool {
    match &place.wanted {
        Some(Wanted::Here(entry, copy)) => {
            entry.attr.flags & forebay_types::FLAG_DIRTY != 0 || copy.is_none() && entry.attr.is_resident()
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_of_a_pool_whose_worker_is_silent_are_not_known() {
        let status = |value| serde_json::from_value::<Status>(value).unwrap();
        let nodes = |value| nodes_in(&status(value)).map_err(|e| e.code);
        assert_eq!(nodes(serde_json::json!({ "node": 1, "node_count": 1 })), Ok(vec![NodeId(1)]));
        assert_eq!(nodes(serde_json::json!({ "node": 1, "node_count": 2 })), Err(Code::TimedOut));
        let both = serde_json::json!([{ "node": 1, "state": "up" }, { "node": 2, "state": "up" }]);
        let both = serde_json::json!({ "node": 2, "node_count": 2, "nodes": both });
        assert_eq!(nodes(both), Ok(vec![NodeId(1), NodeId(2)]));
    }

    #[test]
    fn words_name_what_there_is() {
        let files = Lacking { files: 1, bytes: 1 << 20, ..Lacking::default() };
        assert_eq!(files.words(), "1 file (1 MiB)");
        let both = Lacking { files: 2, bytes: 4096, changes: 3, conflicts: 1 };
        assert_eq!(both.words(), "2 files (4 KiB) and 3 changes of names or attributes");
        assert!(!both.is_nothing() && Lacking::default().is_nothing());
    }
}
