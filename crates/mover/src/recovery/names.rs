//! What the shards of a dead pool say: the newest usable snapshot of each node, or the shard itself where the node has
//! not died.
//!
//! LMDB may end the process that reads a torn file. So a shard of unknown state is first read by another process
//! (`--check-shard`), and counts only if that one has read all of it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use forebay_meta::{check_snapshot, NameIn, Remains, SNAPSHOT_FILE, STORE_SETTINGS};
use forebay_tasks::recovery::{PlannedTarget, ShardLeft};
use forebay_tasks::StoreSettings;
use forebay_types::{Code, Error, Ino, NodeId, Result, Timestamp, FLAG_STORE};

use crate::store::StoreDirectory;

/// The argument with which the mover's program reads a shard and reports by its exit status whether it could.
pub(crate) const CHECK_SHARD: &str = "--check-shard";

/// A file that has a shard's records.
#[derive(Debug)]
struct Candidate {
    path: PathBuf,
    taken: Timestamp,
    is_torn_perhaps: bool,
    source: &'static str,
}

/// The time of a shard that nothing is newer than.
const NOW: Timestamp = Timestamp { sec: i64::MAX, nsec: 0 };
const NEVER: Timestamp = Timestamp { sec: i64::MIN, nsec: 0 };

/// The records of one node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    /// When they were true.
    pub(super) taken: Timestamp,
    /// `snapshot` or `shard`.
    pub(super) source: &'static str,
}

/// The records of all nodes.
#[derive(Debug, Default)]
pub(super) struct Names {
    pub(super) remains: Remains,
    nodes: HashMap<NodeId, Known>,
    /// Directories with a store: their paths in the pool, and the settings.
    stores: HashMap<Ino, (Vec<u8>, StoreSettings)>,
    /// The identity of each node.
    pub(super) node_of: HashMap<String, NodeId>,
}

/// Where the pool has a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Place {
    /// The path in the pool, without a slash in front.
    pub(super) path: Vec<u8>,
    /// The directory with the store, and the path below it.
    pub(super) store: Option<(Ino, Vec<u8>)>,
}

fn joined(components: &[Vec<u8>], name: &[u8]) -> Vec<u8> {
    let mut path = components.join(&b'/');
    if !path.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    path
}

impl Names {
    /// Reads what there is. `note` gets what the user should know.
    pub(super) fn read(targets: &[PlannedTarget], note: &mut dyn FnMut(String)) -> Names {
        let mut names = Names::default();
        let mut candidates: HashMap<String, Vec<Candidate>> = HashMap::new();
        for target in targets {
            let of_pool = candidates.entry(target.pool.clone()).or_default();
            let snapshot = target.target.join("shard").join(SNAPSHOT_FILE);
            match check_snapshot(&snapshot) {
                Ok(head) if head.pool == target.pool => {
                    names.node_of.insert(head.pool, head.node);
                    let (taken, source) = (head.taken, "snapshot");
                    of_pool.push(Candidate { path: snapshot, taken, is_torn_perhaps: false, source });
                }
                Ok(head) => {
                    note(format!("{} is of another pool ({}): it is not used", snapshot.display(), head.pool))
                }
                Err(e) if e.code == Code::NotFound => {}
                Err(e) => note(e.to_string()),
            }
            let (taken, is_torn_perhaps) = match target.shard {
                ShardLeft::None => continue,
                ShardLeft::Whole => (NOW, false),
                ShardLeft::Unsure => (NEVER, true),
            };
            let path = target.target.join("shard/data.mdb");
            of_pool.push(Candidate { path, taken, is_torn_perhaps, source: "shard" });
        }
        for (pool, mut candidates) in candidates {
            candidates.sort_by_key(|candidate| std::cmp::Reverse(candidate.taken));
            for candidate in candidates {
                match read(&candidate) {
                    Ok((node, remains)) => {
                        if remains.damaged > 0 {
                            let path = candidate.path.display();
                            note(format!("{path}: {} records cannot be read", remains.damaged));
                        }
                        let known = Known { taken: candidate.taken, source: candidate.source };
                        names.nodes.insert(node, known);
                        names.node_of.insert(pool.clone(), node);
                        names.remains.merge(remains);
                        break;
                    }
                    Err(e) => note(e.to_string()),
                }
            }
        }
        names.find_stores(note);
        names
    }

    fn find_stores(&mut self, note: &mut dyn FnMut(String)) {
        let remains = &self.remains;
        let tops = remains.inodes.values().filter(|entry| entry.attr.flags & FLAG_STORE != 0);
        for top in tops.map(|entry| entry.attr.ino) {
            let at = remains.path_below(Ino::ROOT, top).map(|components| joined(&components, b""));
            let mut at = at.unwrap_or_default();
            if at.last() == Some(&b'/') {
                at.pop();
            }
            let settings = remains.value(top, STORE_SETTINGS).unwrap_or_default();
            match serde_json::from_slice::<StoreSettings>(settings) {
                Ok(settings) => drop(self.stores.insert(top, (at, settings))),
                Err(e) => note(format!(
                    "the settings of the store attached at /{} cannot be read ({e}): name a store with --to",
                    String::from_utf8_lossy(&at)
                )),
            }
        }
    }

    /// The records of the node that owns an inode.
    pub(super) fn known(&self, ino: Ino) -> Option<Known> {
        self.nodes.get(&ino.birth_node()).copied()
    }

    /// The store that is attached at a directory: its path in the pool, and the settings.
    pub(super) fn store(&self, top: Ino) -> Option<&(Vec<u8>, StoreSettings)> {
        self.stores.get(&top)
    }

    /// What tells the directories of the stores from others, by their URLs.
    pub(super) fn directories(&self) -> HashMap<Vec<u8>, StoreDirectory> {
        let of = |settings: &StoreSettings| StoreDirectory {
            number: settings.directory_ino,
            file_system: settings.file_system,
        };
        self.stores.values().map(|(_, settings)| (settings.url.clone().into_bytes(), of(settings))).collect()
    }

    /// Where the pool has a name; none if its directory is not known.
    pub(super) fn place(&self, (parent, name): &NameIn) -> Option<Place> {
        let above = self.remains.path_below(Ino::ROOT, *parent);
        let store = self.stores.keys().find_map(|top| {
            let below = self.remains.path_below(*top, *parent)?;
            Some((*top, joined(&below, name)))
        });
        let path = match (&above, &store) {
            (Some(above), _) => joined(above, name),
            // The directory above the store is on another node.
            (None, Some((top, key))) => joined(&[self.stores.get(top)?.0.clone()], key),
            (None, None) => return None,
        };
        Some(Place { path, store })
    }
}

fn read(candidate: &Candidate) -> Result<(NodeId, Remains)> {
    if candidate.is_torn_perhaps {
        check_in_a_process(&candidate.path)?;
    }
    Remains::read(&candidate.path)
}

fn check_in_a_process(path: &Path) -> Result<()> {
    let what = || format!("cannot use what is left of the shard, {}", path.display());
    let program = std::env::current_exe().map_err(|e| Error::io(what(), &e))?;
    let status = Command::new(program)
        .arg(CHECK_SHARD)
        .arg(path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .map_err(|e| Error::io(what(), &e))?;
    match status.success() {
        true => Ok(()),
        false => Err(Error::new(Code::Corrupt, what()).why("it is torn: the node died while it was written")),
    }
}

/// What the process started with [`CHECK_SHARD`] does.
pub(crate) fn check_shard(path: &Path) -> Result<()> {
    match Remains::read(path)? {
        (_, remains) if remains.damaged == 0 => Ok(()),
        (_, remains) => Err(Error::new(Code::Corrupt, format!("cannot read {}", path.display()))
            .why(format!("{} records are damaged", remains.damaged))),
    }
}
