//! Which data each node of the pool was met with, kept in the pool's directory.
//!
//! A node's number is part of every inode number that was given with its data. One that comes back without them must
//! not be taken for it: it would give the same inode numbers again. So a number belongs for ever to the data that it
//! was first met with; a node whose data are gone joins under a number that nobody had, from the address of the old
//! one, which is how the others know whose place it takes (docs/decisions/0020).

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use forebay_types::{Code, Error, NodeId, Result};
use serde::{Deserialize, Serialize};

use crate::directory::{MET_FILE, MET_FILE_NEW};

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Met {
    data: u32,
    /// The number in the pool file whose place it has now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    instead_of: Option<u16>,
    /// Another node has its place by now.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    gone: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct MetNodes {
    /// None: nothing is kept (simulations).
    dir: Option<PathBuf>,
    nodes: BTreeMap<u16, Met>,
    /// By numbers of the pool file.
    addresses: BTreeMap<u16, Vec<u8>>,
}

/// A node that was not met before.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct News {
    /// The number of who had its place until now, when its own is not in the pool file.
    pub(super) instead_of: Option<u16>,
}

impl MetNodes {
    /// Those of a pool directory.
    ///
    /// # Errors
    /// A file that cannot be read: a node taken for another is worse than none.
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
        Ok(MetNodes { dir: Some(dir.to_owned()), nodes, addresses: BTreeMap::new() })
    }

    /// Where the pool file says that a node is.
    pub(super) fn set_address(&mut self, number: u16, address: &[u8]) {
        self.addresses.insert(number, address.to_vec());
    }

    /// The number of who is in the place of the pool file's node.
    pub(super) fn number_now(&self, number: u16) -> u16 {
        self.nodes.iter().find(|(_, met)| met.instead_of == Some(number)).map_or(number, |(now, _)| *now)
    }

    /// True when another node is known to have taken a node's place, so that there never will be one of its number
    /// again. What a pool file leaves out may be there all the same, as another file has it.
    pub(super) fn is_gone(&self, node: NodeId) -> bool {
        self.number_now(node.0) != node.0 || self.nodes.get(&node.0).is_some_and(|met| met.gone)
    }

    /// Every number that was met, and its data.
    pub(super) fn all(&self) -> impl Iterator<Item = (NodeId, u32)> + '_ {
        self.nodes.iter().map(|(number, met)| (NodeId(*number), met.data))
    }

    /// A node was met, with this data, at this address if that is known; what is new of it.
    pub(super) fn meet(&mut self, node: NodeId, data: u32, address: Option<&[u8]>) -> Option<News> {
        if data == 0 || self.nodes.contains_key(&node.0) {
            return None; // with the same data, or it would not have been heard
        }
        let listed = self.addresses.contains_key(&node.0);
        let place = self.addresses.iter().find(|(_, at)| Some(at.as_slice()) == address);
        let instead_of = place.map(|(number, _)| *number).filter(|_| !listed);
        if !listed && instead_of.is_none() {
            return None; // nobody whom the pool file knows a place for
        }
        let before = instead_of.map(|listed| self.number_now(listed));
        // Whoever had the place before has it no more.
        for met in self.nodes.values_mut().filter(|met| instead_of.is_some() && met.instead_of == instead_of)
        {
            met.instead_of = None;
            met.gone = true;
        }
        self.nodes.insert(node.0, Met { data, instead_of, gone: false });
        if let Err(e) = self.write() {
            tracing::error!("{e}");
        }
        Some(News { instead_of: before })
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
        // It loses them again.
        assert_eq!(met.meet(NodeId(6000), 9, Some(b"two")), Some(News { instead_of: Some(5000) }));
        let again = read();
        assert_eq!(again.number_now(2), 6000);
        assert_eq!(
            [1, 2, 3, 5000, 6000].map(|node| again.is_gone(NodeId(node))),
            [false, true, false, true, false]
        );
        // A pool file without a node that was met says nothing of what became of it.
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
