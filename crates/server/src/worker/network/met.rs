//! The data ID of each node that this node has had contact with, kept in the pool's directory.
//!
//! A node's number is a part of every inode number that was assigned with its data. A node that returns without its
//! data would assign the same inode numbers again. So a number belongs for ever to the data ID of its first contact. A
//! node that lost its data joins under a number that no node ever had, from the address of the old one. By that address
//! the others recognize which node it replaces (docs/decisions/0020).

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use forebay_sys::stopped;
use forebay_types::{Code, Error, NodeId, Result};
use serde::{Deserialize, Serialize};

use crate::directory::{MET_FILE, MET_FILE_NEW};

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Met {
    data: u32,
    /// The number in the pool file whose place it has taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    instead_of: Option<u16>,
    /// Another node has taken its place.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    gone: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct MetNodes {
    /// None: nothing is stored (simulations).
    dir: Option<PathBuf>,
    nodes: BTreeMap<u16, Met>,
    /// The file lacks something of `nodes`: writing it failed.
    unwritten: bool,
    /// By number in the pool file.
    addresses: BTreeMap<u16, Vec<u8>>,
}

/// A node at its first contact.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct News {
    /// If its own number is not in the pool file: the number of the node that it replaces.
    pub(super) instead_of: Option<u16>,
}

impl MetNodes {
    /// Reads the file in a pool's directory.
    ///
    /// # Errors
    /// A file that cannot be read: to take a node for another is worse than not to start.
    pub(super) fn read(dir: &Path) -> Result<MetNodes> {
        let path = dir.join(MET_FILE);
        let nodes = match std::fs::read(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => BTreeMap::new(),
            Err(e) => return Err(Error::io(format!("cannot read {}", path.display()), &e)),
            Ok(text) => serde_json::from_slice(&text).map_err(|e| {
                Error::new(Code::Corrupt, format!("cannot read {}", path.display())).why(e).cure(
                    "it says which nodes were met with which data; remove it if none has lost its data since",
                )
            })?,
        };
        Ok(MetNodes { dir: Some(dir.to_owned()), nodes, unwritten: false, addresses: BTreeMap::new() })
    }

    /// Sets the address of a node in the pool file.
    pub(super) fn set_address(&mut self, number: u16, address: &[u8]) {
        self.addresses.insert(number, address.to_vec());
    }

    /// The number that the node listed as `number` in the pool file has now.
    pub(super) fn number_now(&self, number: u16) -> u16 {
        self.nodes.iter().find(|(_, met)| met.instead_of == Some(number)).map_or(number, |(now, _)| *now)
    }

    /// True when another node has taken this node's place, so that its number is never used again. A node does not
    /// count as gone because this pool file omits it: another pool file may list it.
    pub(super) fn is_gone(&self, node: NodeId) -> bool {
        self.number_now(node.0) != node.0 || self.nodes.get(&node.0).is_some_and(|met| met.gone)
    }

    /// Every number with its data ID.
    pub(super) fn all(&self) -> impl Iterator<Item = (NodeId, u32)> + '_ {
        self.nodes.iter().map(|(number, met)| (NodeId(*number), met.data))
    }

    /// Contact with a node: its data ID, and its `address` if known. Returns what is new at the first contact. If the
    /// file could not be written before, tries again.
    pub(super) fn meet(&mut self, node: NodeId, data: u32, address: Option<&[u8]>) -> Option<News> {
        if self.unwritten {
            self.store();
        }
        if data == 0 || self.nodes.contains_key(&node.0) {
            return None; // the same data ID, or `Calls` would have refused the node
        }
        let listed = self.addresses.contains_key(&node.0);
        let place = self.addresses.iter().find(|(_, at)| Some(at.as_slice()) == address);
        let instead_of = place.map(|(number, _)| *number).filter(|_| !listed);
        if !listed && instead_of.is_none() {
            return None; // no node of the pool file has this address
        }
        let before = instead_of.map(|listed| self.number_now(listed));
        // The node that had the place before has lost it.
        for met in self.nodes.values_mut().filter(|met| instead_of.is_some() && met.instead_of == instead_of)
        {
            met.instead_of = None;
            met.gone = true;
        }
        self.nodes.insert(node.0, Met { data, instead_of, gone: false });
        self.store();
        Some(News { instead_of: before })
    }

    fn store(&mut self) {
        let written = self.write();
        // This is the network thread, and the disk may be slow.
        stopped::waited();
        self.unwritten = written.is_err();
        if let Err(e) = written {
            tracing::error!(
                "{e}; it is tried again at the next contact with a node: if this daemon restarts before, it may take \
                 a node that has lost its data for the one it has met"
            );
        }
    }

    fn write(&self) -> Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let (path, new) = (dir.join(MET_FILE), dir.join(MET_FILE_NEW));
        let what = || format!("cannot write {}", path.display());
        let text = serde_json::to_vec(&self.nodes).map_err(|e| Error::new(Code::Io, what()).why(e))?;
        let mut file = std::fs::File::create(&new).map_err(|e| Error::io(what(), &e))?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(|e| Error::io(what(), &e))?;
        let renamed = std::fs::rename(&new, &path).and_then(|()| std::fs::File::open(dir)?.sync_all());
        renamed.map_err(|e| Error::io(what(), &e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meet_writes_again_what_could_not_be_written() {
        let dir = std::env::temp_dir().join(format!("forebay-met-again-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        // A directory in the place of the new file.
        std::fs::create_dir_all(dir.join(MET_FILE_NEW)).unwrap();
        let mut met = MetNodes::read(&dir).unwrap();
        met.set_address(2, b"two");
        assert_eq!(met.meet(NodeId(2), 7, None), Some(News { instead_of: None }));
        assert_eq!(MetNodes::read(&dir).unwrap().all().count(), 0);
        std::fs::remove_dir(dir.join(MET_FILE_NEW)).unwrap();
        assert_eq!(met.meet(NodeId(2), 7, None), None);
        let written: Vec<(NodeId, u32)> = MetNodes::read(&dir).unwrap().all().collect();
        assert_eq!(written, [(NodeId(2), 7)]);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn meet_keeps_whose_place_a_new_number_takes_over_a_restart() {
        let dir = std::env::temp_dir().join(format!("forebay-met-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        let read = || {
            let mut met = MetNodes::read(&dir).unwrap();
            met.set_address(1, b"one");
            met.set_address(2, b"two");
            met
        };
        let mut met = read();
        assert_eq!(met.meet(NodeId(2), 0, None), None, "it says of no data");
        assert_eq!(met.meet(NodeId(2), 7, None), Some(News { instead_of: None }));
        assert_eq!(met.meet(NodeId(2), 7, Some(b"two")), None);
        assert_eq!(met.meet(NodeId(5000), 8, Some(b"elsewhere")), None, "nobody's place");
        assert_eq!(met.meet(NodeId(5000), 8, Some(b"two")), Some(News { instead_of: Some(2) }));
        assert_eq!((met.number_now(2), met.number_now(1)), (5000, 1));
        assert_eq!([1, 2, 3, 5000].map(|node| met.is_gone(NodeId(node))), [false, true, false, false]);
        // The node loses its data again.
        assert_eq!(met.meet(NodeId(6000), 9, Some(b"two")), Some(News { instead_of: Some(5000) }));
        let again = read();
        assert_eq!(again.number_now(2), 6000);
        assert_eq!(
            [1, 2, 3, 5000, 6000].map(|node| again.is_gone(NodeId(node))),
            [false, true, false, true, false]
        );
        // A pool file that does not list a known node does not make it gone.
        let mut other = MetNodes { dir: None, ..MetNodes::default() };
        other.nodes.insert(3, Met { data: 4, instead_of: None, gone: false });
        assert!(!other.is_gone(NodeId(3)));
        let all: Vec<(u16, u32)> = again.all().map(|(node, data)| (node.0, data)).collect();
        assert_eq!(all, [(2, 7), (5000, 8), (6000, 9)]);
        std::fs::write(dir.join(MET_FILE), "{").unwrap();
        assert_eq!(MetNodes::read(&dir).unwrap_err().code, Code::Corrupt);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
