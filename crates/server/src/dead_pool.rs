//! What a dead pool left: finds its targets for `forebay recover`, and keeps every pool off them meanwhile.
//!
//! A target's directory is taken by what it says itself (`pool.json`, `target.json`), so the pool's own directory may be
//! gone. Where the node has run on since the pool died, the shard is whole: acknowledged changes of the journal are
//! applied to it first, as the next worker would.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use forebay_data::outlives_node;
use forebay_meta::{check_snapshot, SNAPSHOT_FILE};
use forebay_tasks::recovery::{PlannedTarget, ShardLeft};
use forebay_types::{Code, Error, Result};

use crate::directory::{
    remove_empty_above, PoolDirectory, BOOT_FILE, IDENTITY_FILE, LOCK_FILE, OWNER_FILE, OWNER_FILE_NEW,
    TARGET_FILE,
};
use crate::identity::{Backing, PoolIdentity};
use crate::more_targets::Owner;
use crate::target::{remove_directory, remove_target};
use crate::worker;

/// The targets of a dead pool. No pool starts on them while this exists.
#[derive(Debug)]
pub struct DeadPool {
    /// The targets that have data.
    pub targets: Vec<PlannedTarget>,
    /// What the user should know: targets that are lost, and those that could not be locked.
    pub notes: Vec<String>,
    directories: Vec<(PoolDirectory, bool)>,
    _locks: Vec<OwnedFd>,
}

fn what(path: &Path) -> String {
    format!("cannot recover from {}", path.display())
}

/// What a directory says that it is.
struct Said {
    uuid: String,
    index: u16,
    identity: Option<PoolIdentity>,
}

fn said_by(dir: &PoolDirectory, notes: &mut Vec<String>) -> Result<Said> {
    let path = dir.path();
    match PoolIdentity::read(dir) {
        Ok(Some(identity)) => {
            return Ok(Said { uuid: identity.uuid.clone(), index: 0, identity: Some(identity) })
        }
        Ok(None) => {}
        // Torn by the death of the node, perhaps: a snapshot names the pool too.
        Err(e) if e.code == Code::Corrupt => {
            let snapshot = dir.file(TARGET_FILE).join("shard").join(SNAPSHOT_FILE);
            let Ok(head) = check_snapshot(&snapshot) else { return Err(e) };
            notes.push(format!(
                "{IDENTITY_FILE} in {} is damaged: the snapshot says whose it is",
                path.display()
            ));
            return Ok(Said { uuid: head.pool, index: 0, identity: None });
        }
        Err(e) => return Err(e),
    }
    match Owner::read(dir)? {
        Some(owner) => Ok(Said { uuid: owner.uuid().to_owned(), index: owner.index(), identity: None }),
        None => Err(Error::new(Code::NotFound, what(path))
            .why(format!("it is no pool's directory and no target: it has neither {IDENTITY_FILE} nor {OWNER_FILE}"))
            .cure("name the directories that the pool had as targets, as `path` in its pool file or `up --path` gave them")),
    }
}

impl DeadPool {
    /// Finds the targets in these directories, and the further targets that the first one of a node lists.
    ///
    /// # Errors
    /// [`Code::Busy`] if a pool is up on one of them; [`Code::NotFound`] if none has data; [`Code::Invalid`] if they
    /// are of different pools.
    pub fn find(paths: &[PathBuf]) -> Result<DeadPool> {
        let mut dead =
            DeadPool { targets: Vec::new(), notes: Vec::new(), directories: Vec::new(), _locks: Vec::new() };
        let mut seen = HashSet::new();
        let mut nodes: Vec<(u16, String, PathBuf)> = Vec::new();
        let mut left: Vec<(PathBuf, bool)> = paths.iter().rev().map(|path| (path.clone(), true)).collect();
        while let Some((path, is_named)) = left.pop() {
            let real = path.canonicalize().unwrap_or_else(|_| path.clone());
            if !seen.insert(real) {
                continue;
            }
            let dir = match PoolDirectory::open(&path) {
                Ok(dir) => dir,
                Err(e) if !is_named => {
                    dead.notes.push(format!(
                        "target {} is missing ({e}): its data are not recovered",
                        path.display()
                    ));
                    continue;
                }
                Err(mut e) => {
                    e.what = what(&path);
                    return Err(match e.cure.is_empty() {
                        true => {
                            e.cure("name a directory that the pool had as a target; is its medium mounted?")
                        }
                        false => e,
                    });
                }
            };
            let said = said_by(&dir, &mut dead.notes)?;
            dead.lock(&dir)?;
            if let Some(identity) = &said.identity {
                if let Some((_, _, other)) =
                    nodes.iter().find(|(node, uuid, _)| *node == identity.node && *uuid != said.uuid)
                {
                    return Err(Error::new(Code::Invalid, what(&path))
                        .why(format!("it is of another pool than {}", other.display()))
                        .cure("recover one pool after the other"));
                }
                nodes.push((identity.node, said.uuid.clone(), path.clone()));
                left.extend(identity.more.iter().map(|target| (target.path.clone(), false)));
            }
            dead.take(dir, said)?;
        }
        if dead.targets.is_empty() {
            let path = paths.first().cloned().unwrap_or_default();
            return Err(Error::new(Code::NotFound, what(&path))
                .why("its data was in memory and went with the node")
                .cure("name the directories of the pool's targets on disks, if it had any"));
        }
        Ok(dead)
    }

    fn lock(&mut self, dir: &PoolDirectory) -> Result<()> {
        match dir.lock() {
            Ok(lock) => self._locks.push(lock),
            Err(e) if e.code == Code::Busy => {
                let who = dir.lock_holder().map_or(String::new(), |pid| format!(" (pid {pid})"));
                return Err(Error::new(Code::Busy, what(dir.path()))
                    .why(format!("the pool is up{who}, or another recovery uses it"))
                    .cure(format!(
                        "a living pool drains by itself: `forebay down --pool {}` waits for that",
                        dir.path().display()
                    )));
            }
            Err(e) if matches!(e.code, Code::ReadOnly | Code::AccessDenied) => {
                self.notes.push(format!(
                    "{} cannot be locked: no pool must be started on it now",
                    dir.path().display()
                ));
            }
            Err(e) => return Err(e),
        }
        Ok(())
    }

    fn take(&mut self, dir: PoolDirectory, said: Said) -> Result<()> {
        let (path, target) = (dir.path().to_owned(), dir.file(TARGET_FILE));
        let made = said.identity.as_ref().is_some_and(|identity| identity.made_directory);
        let has_data = match std::fs::metadata(target.join("data/00")) {
            Ok(_) => true,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => false,
            Err(e) => {
                return Err(Error::io(what(&path), &e).cure(
                    "run this as the pool's user, or as root; check that the medium is mounted and works",
                ))
            }
        };
        if !has_data {
            self.notes.push(format!("the data of {} were in memory and are lost", path.display()));
            return Ok(());
        }
        let shard = match said.index {
            0 => self.shard_in(&target),
            _ => ShardLeft::None,
        };
        self.directories.push((dir, made));
        self.targets.push(PlannedTarget { path, target, pool: said.uuid, index: said.index, shard });
        Ok(())
    }

    /// The state of the shard in a node's first target. A whole one gets the changes of its journal.
    fn shard_in(&mut self, target: &Path) -> ShardLeft {
        if !target.join("shard/data.mdb").exists() {
            return ShardLeft::None;
        }
        let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let Ok(directory) = std::fs::File::open(target) else { return ShardLeft::Unsure };
        let is_of_this_boot = !boot.is_empty()
            && std::fs::read(target.join("shard").join(BOOT_FILE)).is_ok_and(|noted| noted == boot);
        // What is in memory has not survived a death of the node.
        if !is_of_this_boot && outlives_node(directory.as_fd()) {
            return ShardLeft::Unsure;
        }
        match worker::settle_at_rest(&directory.into()) {
            Ok(()) => ShardLeft::Whole,
            Err(e) => {
                self.notes.push(format!("the shard that was left is not used: {e}"));
                ShardLeft::Unsure
            }
        }
    }

    /// Removes the targets, with their data. The directories go too if they were made for the pool.
    pub fn discard(self) -> Result<()> {
        for (dir, made_directory) in &self.directories {
            remove_target(dir, Backing::Directory)?;
            for name in [IDENTITY_FILE, OWNER_FILE, OWNER_FILE_NEW] {
                dir.remove_file(name)?;
            }
            match made_directory {
                true => remove_directory(dir),
                false => dir.remove_file(LOCK_FILE)?,
            }
            remove_empty_above(dir.path());
        }
        Ok(())
    }
}
