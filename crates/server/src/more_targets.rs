//! The targets of a node after its first. They are found or made when the pool starts, and removed with it.
//!
//! Each has a directory like the pool's own, with a lock, the target, and `target.json`, which names the pool that owns
//! it. A directory belongs to one pool, and its data are useless without the shard that refers to them. So these
//! targets are made and removed with the first one. A pool does not start if one of its targets is missing, because its
//! files would seem to be empty.
//!
//! A target's position in the list is its number, which layouts contain. New targets are added at the end.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use forebay_data::{Media, Medium, Target};
use forebay_types::{Code, Error, Result};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::directory::{PoolDirectory, IDENTITY_FILE, LOCK_FILE, OWNER_FILE, OWNER_FILE_NEW, TARGET_FILE};
use crate::identity::{Backing, PoolIdentity, TargetRecord};
use crate::pool_file::TargetEntry;
use crate::pool_options::PoolOptions;
use crate::target::{
    clear_stray_target, costs_of, is_tmpfs, make_target, open_target_at_rest, remove_directory,
    remove_target, reopen,
};

/// The format of [`Owner`].
const OWNER_FORMAT: u32 = 1;

/// The pool that owns a target, as in the target's `target.json`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Owner {
    format: u32,
    /// The pool's directory, on the node's first target.
    pool: PathBuf,
    uuid: String,
    /// The target's number on the node.
    index: u16,
}

/// A target that is open.
#[derive(Debug)]
pub(crate) struct MoreTarget {
    dir: PoolDirectory,
    pub(crate) lock: OwnedFd,
    pub(crate) target_dir: OwnedFd,
    record: TargetRecord,
    /// True when this start made it.
    is_new: bool,
    /// Drawbacks of the medium, for users to read.
    pub(crate) costs: Vec<String>,
    /// The features of its file system.
    pub(crate) capabilities: Value,
}

impl Owner {
    /// The owner of the target in `dir`; none when it has none.
    pub(crate) fn read(dir: &PoolDirectory) -> Result<Option<Owner>> {
        let fd = match dir.open_file(OWNER_FILE, OFlags::RDONLY) {
            Ok(fd) => fd,
            Err(e) if e.code == Code::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let what = || format!("cannot read {}", dir.file(OWNER_FILE).display());
        let mut text = String::new();
        std::fs::File::from(fd)
            .take(64 * 1024)
            .read_to_string(&mut text)
            .map_err(|e| Error::io(what(), &e))?;
        let owner: Owner = serde_json::from_str(&text).map_err(|e| {
            Error::new(Code::Corrupt, what())
                .why(format!("it does not name the pool that owns the target ({e})"))
                .cure("remove the directory if its data is no longer needed, or name another")
        })?;
        if owner.format > OWNER_FORMAT {
            return Err(Error::new(Code::NewerFormat, what())
                .why(format!("its format is {}, and this Forebay knows {OWNER_FORMAT} at most", owner.format))
                .cure("use the Forebay that made it or a newer one, or name another directory"));
        }
        Ok(Some(owner))
    }

    pub(crate) fn uuid(&self) -> &str {
        &self.uuid
    }

    pub(crate) fn index(&self) -> u16 {
        self.index
    }

    /// True when the owning pool is still in the recorded directory, or when that cannot be determined.
    fn has_pool(&self) -> bool {
        match PoolDirectory::open(&self.pool).and_then(|dir| PoolIdentity::read(&dir)) {
            Ok(identity) => identity.is_some_and(|identity| identity.uuid == self.uuid),
            Err(e) => !matches!(e.code, Code::NotFound | Code::NotDirectory),
        }
    }

    fn write(&self, dir: &PoolDirectory) -> Result<()> {
        let what = || format!("cannot write {}", dir.file(OWNER_FILE).display());
        let mut text = serde_json::to_string_pretty(self).map_err(|e| Error::new(Code::Io, what()).why(e))?;
        text.push('\n');
        let fd = dir.open_file(OWNER_FILE_NEW, OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC)?;
        std::fs::File::from(fd).write_all(text.as_bytes()).map_err(|e| Error::io(what(), &e))?;
        rustix::fs::renameat(dir.fd(), OWNER_FILE_NEW, dir.fd(), OWNER_FILE)
            .map_err(|e| Error::io(what(), &e.into()))
    }
}

/// Refuses to use a target of another pool as a pool's directory.
pub(crate) fn refuse_as_pool(dir: &PoolDirectory) -> Result<()> {
    let Some(owner) = Owner::read(dir)? else { return Ok(()) };
    Err(Error::new(Code::Exists, format!("cannot make a pool in {}", dir.path().display()))
        .why(format!("it is target {} of the pool at {}", owner.index, owner.pool.display()))
        .cure("name another directory, or remove this one if its data is no longer needed"))
}

/// Opens or makes the targets after the node's first one, `first`, as the pool file lists them, and records them in
/// `identity`. On failure the targets that this call made are removed again.
pub(crate) fn open(
    dir: &PoolDirectory,
    identity: &mut PoolIdentity,
    first: &OwnedFd,
    options: &PoolOptions,
    reopened: bool,
) -> Result<Vec<MoreTarget>> {
    if options.more.len() < identity.more.len() {
        let lost: Vec<String> =
            identity.more[options.more.len()..].iter().map(|t| t.path.display().to_string()).collect();
        return Err(Error::new(Code::Invalid, format!("cannot start pool {}", dir.path().display()))
            .why(format!("files of it are on targets that are not listed now: {}", lost.join(", ")))
            .cure("list them in the pool file again, behind the first, in the order that they had"));
    }
    let mut all: Vec<MoreTarget> = Vec::new();
    for (i, entry) in options.more.iter().enumerate() {
        let medium = entry.media.or(identity.more.get(i).map(|t| t.media)).unwrap_or(Medium::Dram);
        let wanted = Wanted {
            pool: dir,
            identity,
            index: i as u16 + 1,
            entry,
            known: identity.more.get(i).filter(|_| reopened),
            medium,
            promised_bytes: if medium == Medium::Dram { promised_memory(identity, first, &all) } else { 0 },
            renumber: options.renumber,
        };
        match wanted.open() {
            Ok(target) => all.push(target),
            Err(mut e) => {
                undo(&all);
                let node = match options.node_name.as_str() {
                    "" => String::new(),
                    name => format!(" of node {name}"),
                };
                e.what = format!("cannot use target {}{node}, {}: {}", i + 1, entry.path.display(), e.what);
                return Err(e);
            }
        }
    }
    identity.set_more(all.iter().map(|t| t.record.clone()).collect());
    Ok(all)
}

/// Removes the targets that this start made.
pub(crate) fn undo(all: &[MoreTarget]) {
    for target in all.iter().filter(|t| t.is_new) {
        clear(&target.dir, target.record.backing, target.record.made_directory);
    }
}

/// Memory that the targets opened so far may still use, in bytes.
fn promised_memory(identity: &PoolIdentity, first: &OwnedFd, all: &[MoreTarget]) -> u64 {
    let first = (identity.media, identity.backing, identity.capacity_bytes, first);
    let more = all.iter().map(|t| (t.record.media, t.record.backing, t.record.capacity_bytes, &t.target_dir));
    let left = |(medium, backing, capacity, fd): (Medium, Backing, u64, &OwnedFd)| {
        let used = match rustix::fs::fstatvfs(fd) {
            Ok(s) if backing != Backing::Directory => {
                (s.f_blocks.saturating_sub(s.f_bfree)).saturating_mul(s.f_frsize)
            }
            _ => 0,
        };
        if medium == Medium::Dram || is_tmpfs(fd.as_fd()) {
            capacity.saturating_sub(used)
        } else {
            0
        }
    };
    std::iter::once(first).chain(more).map(left).fold(0, u64::saturating_add)
}

/// A target that is to be opened or made.
struct Wanted<'a> {
    /// The pool's directory.
    pool: &'a PoolDirectory,
    identity: &'a PoolIdentity,
    index: u16,
    entry: &'a TargetEntry,
    /// The target that the pool had at this position, if its data exist.
    known: Option<&'a TargetRecord>,
    medium: Medium,
    /// Memory that other targets of the node may still use.
    promised_bytes: u64,
    /// The node's data are abandoned.
    renumber: bool,
}

impl Wanted<'_> {
    fn refused(code: Code, why: String, cure: &str) -> Error {
        Error::new(code, "it cannot be had").why(why).cure(cure)
    }

    fn open(&self) -> Result<MoreTarget> {
        let path = &self.entry.path;
        if let Some(known) = self.known {
            if known.path != *path {
                let why = format!("the pool has had {} in its place", known.path.display());
                let cure =
                    "a target's place in the list is its number: put the list back, with new ones at its end";
                return Err(Wanted::refused(Code::Invalid, why, cure));
            }
            if known.media != self.medium {
                let why = format!("its medium is {}, and {} was asked for", known.media, self.medium);
                let cure = "give it the medium that it has, or list another directory at the end";
                return Err(Wanted::refused(Code::Invalid, why, cure));
            }
        }
        if let Some(parent) = path.parent().filter(|parent| !parent.is_dir()) {
            let why = format!("there is no directory {}", parent.display());
            let cure = "is its medium mounted on this node? else make that directory, or name another target";
            return Err(Wanted::refused(Code::NotFound, why, cure));
        }
        let (dir, made_directory) = PoolDirectory::make(path)?;
        match self.open_in(&dir, made_directory) {
            Ok((lock, target_dir, record)) => {
                let facts = facts_of(&dir, &record, &target_dir, self.index);
                if facts.is_err() && self.known.is_none() {
                    clear(&dir, record.backing, made_directory);
                }
                let (costs, capabilities) = facts?;
                let is_new = self.known.is_none();
                Ok(MoreTarget { dir, lock, target_dir, record, is_new, costs, capabilities })
            }
            Err(e) => {
                if made_directory {
                    remove_directory(&dir);
                }
                Err(e)
            }
        }
    }

    /// Returns the lock, the target and its record.
    fn open_in(&self, dir: &PoolDirectory, made_directory: bool) -> Result<(OwnedFd, OwnedFd, TargetRecord)> {
        if PoolIdentity::read(dir)?.is_some() {
            let why = format!("{IDENTITY_FILE} in it says that it is a pool, or a node's first target");
            let cure = "name another directory, or remove this one if its data is no longer needed";
            return Err(Wanted::refused(Code::Exists, why, cure));
        }
        let lock = dir.lock().map_err(|e| match e.code {
            Code::Busy => {
                let why = "a running pool uses it".to_owned();
                Wanted::refused(
                    // Not `Busy`, which would mean that this pool is up.
                    Code::Exists,
                    why,
                    "name another directory; is it listed twice, by another path?",
                )
            }
            _ => e,
        })?;
        let options = PoolOptions {
            path: self.entry.path.clone(),
            media: Some(self.medium),
            capacity_bytes: self.entry.capacity_bytes,
            promised_bytes: self.promised_bytes,
            ..PoolOptions::default()
        };
        let owner = Owner::read(dir)?;
        if let Some(known) = self.known {
            let is_ours = owner.is_some_and(|o| o.uuid == self.identity.uuid && o.index == self.index);
            let found = match is_ours {
                true => reopen(dir, &as_identity(known, self.identity), &options)?,
                false => None,
            };
            let Some(target_dir) = found else {
                let why = "its data is gone, and that of the node's first target is there".to_owned();
                let cure = "mount its medium again; or give up the node's data: remove the pool's directory on its first \
                            target, and start the node with --renumber (node 1: start the whole pool anew)";
                return Err(Wanted::refused(Code::NotFound, why, cure));
            };
            let mut record = known.clone();
            record.capacity_bytes = self.entry.capacity_bytes.unwrap_or(known.capacity_bytes);
            return Ok((lock, target_dir, record));
        }
        if let Some(owner) = owner {
            self.refuse_data_of(dir, &owner)?;
            discard(dir)?;
        }
        clear_stray_target(dir)?;
        let (backing, target_dir, capacity_bytes) = make_target(dir, self.medium, &options)?;
        let made = || {
            if backing == Backing::Detached && self.identity.backing != Backing::Detached {
                let why = "this user may not mount a tmpfs, and the node's first target stays when the pool is down";
                let cure = "name a directory on a tmpfs, such as one below /dev/shm";
                return Err(Wanted::refused(Code::NotPermitted, why.to_owned(), cure));
            }
            Target::format(&target_dir)?;
            let (pool, uuid) = (self.pool.path().to_owned(), self.identity.uuid.clone());
            Owner { format: OWNER_FORMAT, pool, uuid, index: self.index }.write(dir)
        };
        if let Err(e) = made() {
            drop(target_dir);
            let _ = remove_target(dir, backing);
            return Err(e);
        }
        let (path, media) = (self.entry.path.clone(), self.medium);
        Ok((lock, target_dir, TargetRecord { path, media, capacity_bytes, backing, made_directory }))
    }

    /// Refuses a target with data of another pool, or with data of this node that are lost, unless those are abandoned.
    fn refuse_data_of(&self, dir: &PoolDirectory, owner: &Owner) -> Result<()> {
        let is_given_up = self.renumber && owner.pool == self.pool.path();
        if is_given_up || !owner.has_pool() && !has_data(dir)? {
            return Ok(());
        }
        let why = format!(
            "it is of pool {} at {}, as its target {}",
            owner.uuid,
            owner.pool.display(),
            owner.index
        );
        let cure = "name another directory, or remove this one if its data is no longer needed";
        Err(Wanted::refused(Code::Exists, why, cure))
    }
}

/// A target's record as the identity of a pool with one target.
fn as_identity(record: &TargetRecord, pool: &PoolIdentity) -> PoolIdentity {
    PoolIdentity {
        media: record.media,
        backing: record.backing,
        capacity_bytes: record.capacity_bytes,
        made_directory: record.made_directory,
        embedded: false,
        more: Vec::new(),
        ..pool.clone()
    }
}

fn facts_of(
    dir: &PoolDirectory,
    record: &TargetRecord,
    target_dir: &OwnedFd,
    index: u16,
) -> Result<(Vec<String>, Value)> {
    let mut identity = PoolIdentity::new(record.media, record.backing, record.capacity_bytes)?;
    identity.made_directory = record.made_directory;
    let (costs, capabilities) = costs_of(dir, &identity, target_dir)?;
    Ok((costs.into_iter().map(|cost| format!("target {index}: {cost}")).collect(), capabilities))
}

/// True when a left-over target has a backing file.
///
/// # Errors
/// The target cannot be read. It may have data then.
fn has_data(dir: &PoolDirectory) -> Result<bool> {
    let at = dir.file(TARGET_FILE);
    let directory = match std::fs::File::open(&at) {
        Ok(directory) => directory,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(Error::io(format!("cannot open {}", at.display()), &e)),
    };
    let target = match Target::open(&directory, 0) {
        Ok(target) => target,
        // A target that was never formatted, or whose memory is gone, has none.
        Err(e) if e.code == Code::NotFound => return Ok(false),
        Err(e) => return Err(e),
    };
    let mut any = false;
    target
        .for_each(&mut |_, _, _| {
            any = true;
            Err(Code::Interrupted)
        })
        .or_else(|code| if any { Ok(()) } else { Err(code) })
        .map_err(|code| Error::new(code, format!("cannot look into {}", at.display())))?;
    Ok(any)
}

/// Removes a target that a removed pool left.
fn discard(dir: &PoolDirectory) -> Result<()> {
    let path = dir.file(TARGET_FILE);
    let backing = match forebay_data::is_mounted_here(&path)? {
        true => Backing::Tmpfs,
        false => Backing::Directory,
    };
    remove_target(dir, backing)?;
    dir.remove_file(OWNER_FILE)
}

fn clear(dir: &PoolDirectory, backing: Backing, made_directory: bool) {
    if let Err(e) = remove_target(dir, backing) {
        tracing::error!("{e}");
    }
    if made_directory {
        remove_directory(dir);
        return;
    }
    for name in [OWNER_FILE, OWNER_FILE_NEW, LOCK_FILE] {
        let _ = dir.remove_file(name);
    }
}

/// Removes, with their data, the targets after the first of a pool that is being removed.
pub(crate) fn take_away(identity: &PoolIdentity) {
    for (i, record) in identity.more.iter().enumerate() {
        let Ok(dir) = PoolDirectory::open(&record.path) else { continue };
        let is_ours = |o: &Owner| o.uuid == identity.uuid && usize::from(o.index) == i + 1;
        match Owner::read(&dir) {
            Ok(Some(owner)) if is_ours(&owner) => clear(&dir, record.backing, record.made_directory),
            _ => tracing::warn!("{} is not this pool's target any more, and stays", record.path.display()),
        }
    }
}

/// Opens the targets after the first of a pool that is down.
pub(crate) fn open_at_rest(identity: &PoolIdentity) -> Result<Vec<OwnedFd>> {
    let open = |record: &TargetRecord| {
        open_target_at_rest(&PoolDirectory::open(&record.path)?, &as_identity(record, identity))
    };
    identity.more.iter().map(open).collect()
}

/// A target's part of `status`.
pub(crate) fn describe(
    path: &Path,
    (media, backing, capacity_bytes): (Medium, Backing, u64),
    capabilities: &Value,
) -> Value {
    serde_json::json!({
        "path": path.to_string_lossy(),
        "media": media.to_string(),
        "backing": backing,
        "capacity_bytes": capacity_bytes,
        "fs_type": capabilities["fs_type"],
    })
}

impl MoreTarget {
    /// The target's part of `status`.
    pub(crate) fn status(&self) -> Value {
        let r = &self.record;
        describe(&r.path, (r.media, r.backing, r.capacity_bytes), &self.capabilities)
    }
}
