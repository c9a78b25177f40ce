//! A backing store in memory: a tree of nodes, with the calls of a file system. A new version of a file is a new node;
//! files of two names are one node.

use std::collections::BTreeMap;

use forebay_types::{Kind, StoreVersion};

/// Number of a node.
pub(crate) type Id = u64;

pub(crate) const ROOT: Id = 0;

#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) kind: Kind,
    /// A file's data, a symbolic link's target.
    pub(crate) content: u64,
    pub(crate) mode: u32,
    pub(crate) entries: BTreeMap<Vec<u8>, Id>,
}

#[derive(Clone, Debug)]
pub(crate) struct Store {
    pub(crate) nodes: BTreeMap<Id, Node>,
    next: Id,
}

pub(crate) type Path = Vec<Vec<u8>>;

impl Store {
    pub(crate) fn new() -> Store {
        let mut store = Store { nodes: BTreeMap::new(), next: ROOT };
        store.make(Kind::Directory, 0, 0o755);
        store
    }

    /// A node without a name, as behind a temporary one.
    pub(crate) fn make(&mut self, kind: Kind, content: u64, mode: u32) -> Id {
        let id = self.next;
        self.next += 1;
        self.nodes.insert(id, Node { kind, content, mode, entries: BTreeMap::new() });
        id
    }

    pub(crate) fn version_of(id: Id) -> StoreVersion {
        StoreVersion { ino: id + 1000, ..StoreVersion::default() }
    }

    pub(crate) fn find(&self, path: &[Vec<u8>]) -> Option<Id> {
        path.iter().try_fold(ROOT, |at, name| self.nodes[&at].entries.get(name).copied())
    }

    pub(crate) fn version_at(&self, path: &[Vec<u8>]) -> Option<StoreVersion> {
        self.find(path).map(Store::version_of)
    }

    fn parent<'p>(&mut self, path: &'p [Vec<u8>]) -> (&mut Node, &'p Vec<u8>) {
        let (name, above) = path.split_last().expect("the root has no name");
        let id = self.find(above).unwrap_or_else(|| panic!("the store has no directory for {path:?}"));
        (self.nodes.get_mut(&id).unwrap(), name)
    }

    /// Gives a node a name, in place of what had it.
    pub(crate) fn put(&mut self, path: &[Vec<u8>], id: Id) {
        if let Some(there) = self.find(path) {
            let (old, new) = (&self.nodes[&there], &self.nodes[&id]);
            let is_directory = old.kind == Kind::Directory;
            assert_eq!(is_directory, new.kind == Kind::Directory, "{path:?} is of another kind");
            assert!(old.entries.is_empty(), "{path:?} is not empty");
        }
        let (parent, name) = self.parent(path);
        parent.entries.insert(name.clone(), id);
    }

    pub(crate) fn remove(&mut self, path: &[Vec<u8>]) {
        let id = self.find(path).unwrap_or_else(|| panic!("the store has no {path:?}"));
        assert!(self.nodes[&id].entries.is_empty(), "{path:?} is not empty");
        let (parent, name) = self.parent(path);
        parent.entries.remove(name);
    }

    pub(crate) fn rename(&mut self, from: &[Vec<u8>], to: &[Vec<u8>]) {
        let id = self.find(from).unwrap_or_else(|| panic!("the store has no {from:?}"));
        assert!(!to.starts_with(from), "{from:?} into itself");
        let (parent, name) = self.parent(from);
        parent.entries.remove(name);
        self.put(to, id);
    }

    /// The number of a node's names.
    pub(crate) fn names_of(&self, id: Id) -> u32 {
        self.nodes.values().flat_map(|node| node.entries.values()).filter(|there| **there == id).count()
            as u32
    }

    /// The content of every file that has a name.
    pub(crate) fn contents(&self) -> Vec<u64> {
        let (mut found, mut todo) = (Vec::new(), vec![ROOT]);
        while let Some(id) = todo.pop() {
            let node = &self.nodes[&id];
            if node.kind == Kind::File {
                found.push(node.content);
            }
            todo.extend(node.entries.values());
        }
        found
    }
}
