//! What a shard's data file says, read without changing it and without the rest of the pool: for recovery after the
//! death of the node. The file may be a snapshot, or what a dead pool left.
//!
//! Records that cannot be read are counted and left out. LMDB itself may fail on a file that is torn: read one of
//! unknown state in a process that may die (`crates/mover/src/recovery`).

use std::collections::{HashMap, HashSet};
use std::path::Path;

use forebay_types::{Code, CopyOf, Entry, Error, Ino, NodeId, Result};
use heed::{EnvFlags, EnvOpenOptions};

use crate::copies::decode_copy;
use crate::keys::{self, Key};
use crate::lmdb_txn::{code_of, Tree};
use crate::record::{decode_format, EntryRecord, Inode, FORMAT_VERSION};

/// Bound on a walk to the root.
const DEPTH_MAX: usize = 1 << 16;

/// A directory and a name in it.
pub type NameIn = (Ino, Vec<u8>);

/// Values of an inode by their names.
pub type Values = Vec<(Vec<u8>, Vec<u8>)>;

/// The records of one or more shards.
#[derive(Clone, Debug, Default)]
pub struct Remains {
    /// Inodes with attributes and layout.
    pub inodes: HashMap<Ino, Entry>,
    /// The names of each inode.
    pub names: HashMap<Ino, Vec<NameIn>>,
    /// Where a store has an inode's last published version.
    pub copies: HashMap<Ino, CopyOf>,
    /// Places at which a store may differ.
    pub pending: HashSet<NameIn>,
    /// Extended attributes of inodes, and under the empty name targets of symbolic links.
    pub values: HashMap<Ino, Values>,
    /// Records that could not be read.
    pub damaged: u64,
}

impl Remains {
    /// Reads a shard's data file.
    ///
    /// # Errors
    /// [`Code::Corrupt`] if it is none, or of a format that this version does not know.
    pub fn read(path: &Path) -> Result<(NodeId, Remains)> {
        let what = || format!("cannot read the shard {}", path.display());
        let broken = |e: heed::Error| Error::new(code_of(&e), what()).why(&e);
        let mut options = EnvOpenOptions::new().read_txn_without_tls();
        let flags = EnvFlags::READ_ONLY | EnvFlags::NO_LOCK | EnvFlags::NO_SUB_DIR | EnvFlags::NO_READ_AHEAD;
        // SAFETY: without LMDB's lock nothing must write the file meanwhile: the pool is dead, and the caller holds
        // its lock or has a copy.
        unsafe { options.flags(flags) };
        // SAFETY: the map is read-only, of a file that only the pool's user can change.
        let env = unsafe { options.open(path) }.map_err(broken)?;
        let txn = env.read_txn().map_err(broken)?;
        let tree: Option<Tree> = env.open_database(&txn, None).map_err(broken)?;
        let tree = tree.ok_or_else(|| Error::new(Code::Corrupt, what()).why("it has no records"))?;
        let format = tree.get(&txn, keys::FORMAT).map_err(broken)?.map(decode_format);
        let node = match format {
            Some(Ok((FORMAT_VERSION, node))) => node,
            Some(Ok((version, _))) => {
                return Err(Error::new(Code::NotSupported, what())
                    .why(format!("its format is version {version}, and this Forebay reads {FORMAT_VERSION}"))
                    .cure("use the Forebay that made the pool"))
            }
            _ => return Err(Error::new(Code::Corrupt, what()).why("its format record is damaged")),
        };
        let mut remains = Remains::default();
        for item in tree.iter(&txn).map_err(broken)? {
            let (key, value) = item.map_err(broken)?;
            if remains.take(key, value).is_err() {
                remains.damaged += 1;
            }
        }
        Ok((node, remains))
    }

    fn take(&mut self, key: &[u8], value: &[u8]) -> std::result::Result<(), Code> {
        match keys::decode(key).ok_or(Code::Corrupt)? {
            Key::Inode(ino) => {
                self.inodes.insert(ino, Inode::decode(ino, value)?.entry());
            }
            Key::Entry(parent, _) => {
                let entry = EntryRecord::decode(value)?;
                self.names.entry(entry.ino).or_default().push((parent, entry.name.to_vec()));
            }
            Key::Copy(ino) => {
                let copy = decode_copy(value)?;
                if !copy.is_mark() {
                    self.copies.insert(ino, copy.told());
                }
            }
            Key::Pending(parent, name) => drop(self.pending.insert((parent, name.to_vec()))),
            // Pieces of one value come in their order.
            Key::Value(ino, name, piece) => {
                let values = self.values.entry(ino).or_default();
                match values.last_mut().filter(|(last, _)| piece > 0 && last == name) {
                    Some((_, bytes)) => bytes.extend_from_slice(value),
                    None => values.push((name.to_vec(), value.to_vec())),
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Adds the records of another node's shard.
    pub fn merge(&mut self, other: Remains) {
        self.inodes.extend(other.inodes);
        for (ino, names) in other.names {
            self.names.entry(ino).or_default().extend(names);
        }
        self.copies.extend(other.copies);
        self.pending.extend(other.pending);
        self.values.extend(other.values);
        self.damaged += other.damaged;
    }

    /// The value of an inode's extended attribute.
    pub fn value(&self, ino: Ino, name: &[u8]) -> Option<&[u8]> {
        let values = self.values.get(&ino)?;
        values.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_slice())
    }

    /// The components of a directory's path below `top`, from the top; none if it is not below.
    pub fn path_below(&self, top: Ino, mut directory: Ino) -> Option<Vec<Vec<u8>>> {
        let mut path = Vec::new();
        for _ in 0..DEPTH_MAX {
            if directory == top {
                path.reverse();
                return Some(path);
            }
            if directory.is_part() {
                directory = self.inodes.get(&directory)?.attr.parent;
                continue;
            }
            let (parent, name) = self.names.get(&directory)?.first()?;
            path.push(name.clone());
            directory = *parent;
        }
        None
    }
}
