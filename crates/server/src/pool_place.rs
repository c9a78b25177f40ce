//! Finds or makes a pool's directory and targets before its daemon serves, and removes them afterwards.
//!
//! Only the process that holds the pool's lock runs this code. A killed pool leaves its lock free, its sockets dead and
//! its target unchanged: opening it again finds the data, and `sweep` removes the pool. If a pool cannot start,
//! everything that was made for it is removed again.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_data::{is_mounted_here, Medium, Target};
use forebay_types::limits::NODE_NUMBER_MAX;
use forebay_types::{Code, Error, Result, MOVER_SOCKET};
use serde_json::Value;

use crate::directory::{
    remove_empty_above, PoolDirectory, IDENTITY_FILE, KEPT_FILES, LOCK_FILE, LOG_FILE, MIRRORS_DIRECTORY,
    NODES_FILES, RUN_MOUNT, SOCKET_FILE, SUPERVISOR_FILE, TARGET_FILE,
};
use crate::identity::{Backing, PoolIdentity};
use crate::media_profile::MediaProfile;
use crate::more_targets::{self, MoreTarget};
use crate::mount_process::clear_dead_mounts;
use crate::pool_file::Membership;
use crate::pool_options::PoolOptions;
use crate::protocol::Stopped;
use crate::target::{
    clear_stray_target, costs_of, make_target, remove_directory, remove_target, remove_tree, reopen,
};

/// How long a start waits for a pool that is stopping.
const ENDING_GRACE: Duration = Duration::from_secs(15);
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// Numbers for nodes that lost their data: above those that pool files give by position.
const NEW_NUMBERS: std::ops::RangeInclusive<u16> = 2048..=NODE_NUMBER_MAX;
/// The message of a pool that replaces one whose memory is gone.
const LOST: &str = "empty: the data of the pool that was here before went with the memory that they were in";

/// A pool directory whose lock this process holds.
#[derive(Debug)]
pub(crate) struct LockedPool {
    pub(crate) dir: PoolDirectory,
    lock: OwnedFd,
    made: bool,
}

/// A pool that is open and locked.
#[derive(Debug)]
pub(crate) struct OpenPool {
    pub(crate) dir: PoolDirectory,
    lock: OwnedFd,
    pub(crate) identity: PoolIdentity,
    target_dir: OwnedFd,
    more: Vec<MoreTarget>,
    pub(crate) costs: Vec<String>,
    /// The features of the target's file system, for `status`.
    pub(crate) capabilities: Value,
    pub(crate) reopened: bool,
    pub(crate) membership: Option<Membership>,
}

impl OpenPool {
    /// The directories of the node's targets, in the order of their numbers.
    pub(crate) fn target_dirs(&self) -> Vec<BorrowedFd<'_>> {
        let more = self.more.iter().map(|target| target.target_dir.as_fd());
        std::iter::once(self.target_dir.as_fd()).chain(more).collect()
    }

    /// The locks that exclude other pools from the targets.
    pub(crate) fn locks(&self) -> Vec<BorrowedFd<'_>> {
        let more = self.more.iter().map(|target| target.lock.as_fd());
        std::iter::once(self.lock.as_fd()).chain(more).collect()
    }

    /// The node's targets as `status` reports them.
    pub(crate) fn targets_status(&self) -> Vec<Value> {
        let i = &self.identity;
        if i.shard_only {
            return Vec::new();
        }
        let first = (i.media, i.backing, i.capacity_bytes);
        let first = more_targets::describe(self.dir.path(), first, &self.capabilities);
        std::iter::once(first).chain(self.more.iter().map(MoreTarget::status)).collect()
    }
}

/// Makes the directory and takes its lock. [`Code::Busy`] when the pool is up. Waits for a pool that is stopping.
pub(crate) fn lock_pool(path: &Path) -> Result<LockedPool> {
    let deadline = Instant::now() + ENDING_GRACE;
    loop {
        let (dir, made) = PoolDirectory::make(path)?;
        match dir.lock() {
            Ok(lock) => return Ok(LockedPool { dir, lock, made }),
            Err(e) if e.code == Code::Stale && Instant::now() < deadline => {} // it was removed between two steps
            Err(e) if e.code == Code::Busy && dir.connect(SUPERVISOR_FILE).is_ok() => return Err(e),
            Err(e) if e.code == Code::Busy && Instant::now() < deadline => std::thread::sleep(LOOK_AGAIN),
            Err(e) => {
                if made {
                    let _ = rustix::fs::rmdir(dir.path()); // fails if another pool is in it by now
                    remove_empty_above(dir.path());
                }
                return Err(e);
            }
        }
    }
}

/// Opens the pool that is in the directory, or makes one. On failure, everything that was made is removed again.
pub(crate) fn open_pool(locked: LockedPool, options: &PoolOptions) -> Result<OpenPool> {
    match try_open(&locked, options) {
        Ok(Opened { identity, target_dir, more, costs, capabilities, reopened }) => {
            let LockedPool { dir, lock, .. } = locked;
            let mut membership = options.membership.clone();
            if let Some(membership) = &mut membership {
                membership.take(&identity, dir.path(), !reopened);
            }
            Ok(OpenPool { dir, lock, identity, target_dir, more, costs, capabilities, reopened, membership })
        }
        Err(e) => {
            if locked.made {
                remove_directory(&locked.dir);
            }
            Err(e)
        }
    }
}

impl LockedPool {
    /// Releases a directory in which no pool was made, and removes it if it was made for one.
    pub(crate) fn give_up(self) {
        if self.made {
            remove_directory(&self.dir);
        }
    }
}

struct Opened {
    identity: PoolIdentity,
    target_dir: OwnedFd,
    more: Vec<MoreTarget>,
    costs: Vec<String>,
    capabilities: Value,
    reopened: bool,
}

fn try_open(locked: &LockedPool, options: &PoolOptions) -> Result<Opened> {
    let dir = &locked.dir;
    clear_dead_mounts(dir.path());
    let before = PoolIdentity::read(dir)?;
    if before.is_none() {
        more_targets::refuse_as_pool(dir)?;
    }
    if let (Some(identity), Some(asked)) = (&before, options.media) {
        if identity.media != asked {
            return Err(Error::new(Code::Invalid, format!("cannot start pool {}", dir.path().display()))
                .why(format!("its medium is {}, and {asked} was asked for", identity.media))
                .cure("leave out --media, or name another directory"));
        }
    }
    let medium = options.media.or(before.as_ref().map(|i| i.media)).unwrap_or(Medium::Dram);
    check_number(dir, before.as_ref(), options)?;
    // An embedded pool's data belong to one run, so their loss is not reported.
    let had_data = before.as_ref().is_some_and(|identity| !identity.embedded);
    let made = locked.made || before.as_ref().is_some_and(|identity| identity.made_directory);
    if let Some(identity) = before {
        if let Some(target_dir) = reopen(dir, &identity, options)? {
            if options.renumber {
                return Err(Error::new(
                    Code::Invalid,
                    format!("cannot renumber pool {}", dir.path().display()),
                )
                .why(format!("its data are there, and are node {}'s", identity.node))
                .cure("leave out --renumber"));
            }
            check_kind(dir, &identity, options)?;
            return finish(locked, identity, target_dir, options, true);
        }
    }
    // Drawn before anything is made, so that a refusal leaves no target behind.
    let renumbered = options.membership.as_ref().filter(|_| options.renumber).map(new_number).transpose()?;
    clear_stray_target(dir)?;
    // Of a pool whose data are gone.
    KEPT_FILES.iter().try_for_each(|name| dir.remove_file(name))?;
    let (backing, target_dir, capacity_bytes) = make_target(dir, medium, options)?;
    let mut identity = PoolIdentity::new(medium, backing, capacity_bytes)?;
    identity.shard_only = options.shard_only;
    if let Some(membership) = &options.membership {
        identity.node = renumbered.unwrap_or(membership.node);
        identity.instead_of = renumbered.map(|_| membership.node);
    }
    identity.made_directory = made;
    let result = finish(locked, identity.clone(), target_dir, options, false);
    match result {
        Ok(mut opened) => {
            if had_data {
                opened.costs.insert(0, LOST.to_owned());
            }
            Ok(opened)
        }
        Err(e) => {
            let _ = remove_target(dir, identity.backing);
            Err(e)
        }
    }
}

/// Refuses to add or drop the node's first target. Files may lie on an existing one, and a directory that was made for
/// a shard alone is too small for a target.
fn check_kind(dir: &PoolDirectory, identity: &PoolIdentity, options: &PoolOptions) -> Result<()> {
    if identity.shard_only == options.shard_only {
        return Ok(());
    }
    let (why, cure) = match identity.shard_only {
        true => (
            "the node had no target, and the pool file gives it one in the place of its state",
            "stop the node without --keep, remove this directory, and start the node with --renumber",
        ),
        false => (
            "files of the pool lie on this node's target, and the pool file gives it none",
            "list the target again; or remove the directory with its data, and start the node with --renumber",
        ),
    };
    Err(Error::new(Code::Invalid, format!("cannot start pool {}", dir.path().display())).why(why).cure(cure))
}

/// Refuses a node number that differs from that of the node's data, which keep theirs for ever.
fn check_number(dir: &PoolDirectory, before: Option<&PoolIdentity>, options: &PoolOptions) -> Result<()> {
    let Some(identity) = before else { return Ok(()) };
    let asked = options.membership.as_ref().map_or(identity.node, |m| m.node);
    if options.membership.is_none() && identity.node != forebay_types::NodeId::FIRST.0 {
        return Err(Error::new(Code::Invalid, format!("cannot start pool {}", dir.path().display()))
            .why(format!("it is node {} of a pool of several nodes", identity.node))
            .cure("start it by its pool file: forebay up --pool FILE"));
    }
    if asked == identity.node || identity.instead_of == Some(asked) {
        return Ok(());
    }
    Err(Error::new(Code::Invalid, format!("cannot start pool {}", dir.path().display()))
        .why(format!("its data is node {}'s, and the pool file says that it is node {asked}", identity.node))
        .cure(format!(
            "give the node its number in the pool file (number = {}), or another target",
            identity.node
        )))
}

/// Draws a number for a node whose data are lost; the pool file does not have it. If two such nodes draw the same
/// number, the second is refused when it meets the other nodes.
fn new_number(membership: &Membership) -> Result<u16> {
    if membership.node == forebay_types::NodeId::FIRST.0 {
        return Err(Error::new(Code::Invalid, "cannot renumber node 1")
            .why("the pool's root was in its data, and without it there is no pool")
            .cure("stop all nodes (`forebay down --all`) and start the pool anew"));
    }
    loop {
        let [low, high, ..] = crate::identity::random_bytes()?;
        let number = u16::from_le_bytes([low, high]);
        if NEW_NUMBERS.contains(&number) && membership.nodes.iter().all(|n| n.number != number) {
            return Ok(number);
        }
    }
}

fn finish(
    locked: &LockedPool,
    mut identity: PoolIdentity,
    target_dir: OwnedFd,
    options: &PoolOptions,
    reopened: bool,
) -> Result<Opened> {
    identity.embedded = options.embedded;
    if let Some(bytes) = options.capacity_bytes {
        identity.capacity_bytes = bytes;
    }
    identity.snapshots_ms = options.snapshots_ms.or(identity.snapshots_ms);
    if let Some(MediaProfile(profile)) = &options.media_profile {
        identity.media_profile = profile.as_ref().map(ToString::to_string);
    }
    Target::format(&target_dir)?;
    let (mut costs, capabilities) = costs_of(&locked.dir, &identity, &target_dir)?;
    let more = more_targets::open(&locked.dir, &mut identity, &target_dir, options, reopened)?;
    let kept = options.bundle.as_ref().map_or(Ok(()), |bundle| bundle.write(&locked.dir));
    if let Err(e) = kept.and_then(|()| identity.write(&locked.dir)) {
        more_targets::undo(&more);
        return Err(e);
    }
    costs.extend(more.iter().flat_map(|target| target.costs.iter().cloned()));
    Ok(Opened { identity, target_dir, more, costs, capabilities, reopened })
}

/// Closes a pool whose worker has ended. With `discard` its data are removed. Otherwise the data stay if the medium is
/// persistent, or if `keep` is set and its memory can stay mounted.
pub(crate) fn close_pool(pool: OpenPool, keep: bool, discard: bool) -> Result<Stopped> {
    let OpenPool { dir, lock, identity, target_dir, more, .. } = pool;
    drop(target_dir);
    let locks: Vec<OwnedFd> = more.into_iter().map(|target| target.lock).collect();
    let result = take_away(&dir, &identity, keep, discard);
    drop((lock, locks));
    result
}

/// Removes the remains of a killed pool, as its supervisor would have done. [`Code::Busy`] if the pool is up.
pub(crate) fn sweep(dir: PoolDirectory, keep: bool) -> Result<Stopped> {
    let lock = dir.lock()?;
    let Some(identity) = PoolIdentity::read(&dir)? else { return Err(dir.not_up()) };
    clear_dead_mounts(dir.path());
    let discard = identity.embedded;
    let result = take_away(&dir, &identity, keep, discard);
    drop(lock);
    result
}

fn take_away(dir: &PoolDirectory, identity: &PoolIdentity, keep: bool, discard: bool) -> Result<Stopped> {
    dir.remove_file(SOCKET_FILE)?;
    dir.remove_file(SUPERVISOR_FILE)?;
    dir.remove_file(MOVER_SOCKET)?;
    dir.remove_directory(RUN_MOUNT);
    remove_tree(&dir.file(MIRRORS_DIRECTORY))?;
    let data_kept = !discard
        && match identity.backing {
            Backing::Tmpfs => keep && is_mounted_here(&dir.file(TARGET_FILE))?,
            Backing::Directory => true,
            Backing::Detached => false,
        };
    // Data on the node's other targets are useless without the shard.
    if !data_kept {
        more_targets::take_away(identity);
        remove_target(dir, identity.backing)?;
        if identity.made_directory {
            remove_directory(dir);
        } else {
            dir.remove_file(IDENTITY_FILE)?;
            dir.remove_file(LOG_FILE)?;
            dir.remove_file(LOCK_FILE)?;
            for name in NODES_FILES.into_iter().chain(KEPT_FILES) {
                dir.remove_file(name)?;
            }
        }
    }
    Ok(Stopped { data_kept, killed: false })
}
