//! This node's targets, as the worker opens them.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use forebay_data::{NodeTargets, Target};
use forebay_sys::descriptor;
use forebay_sys::file_system::FileSystem;
use forebay_types::{target_of, Error, NodeId, Result};

use crate::identity::PoolIdentity;

/// Device number that all files of the pool show: the target's own. The pool's inode numbers are above 2^48, so they
/// never equal those of the file system that the target is on.
pub(super) fn device_of(target: &OwnedFd) -> Result<u64> {
    let st = rustix::fs::fstat(target).map_err(|e| Error::io("cannot stat the target", &e.into()))?;
    Ok(st.st_dev)
}

/// True when the target's file system never reuses an inode number: a tmpfs, whose 64-bit counter only increases.
pub(super) fn has_stable_inodes(target: &OwnedFd) -> bool {
    FileSystem::of(target).is_ok_and(|kind| kind == FileSystem::TMPFS)
}

/// Opens this node's targets, the first of which has the shard. A node without targets has only the shard's directory.
pub(super) fn open_targets(directories: &[OwnedFd], identity: &PoolIdentity) -> Result<NodeTargets> {
    let open = |(index, directory): (usize, &OwnedFd)| {
        let medium = index.checked_sub(1).map_or(identity.media, |more| identity.more[more].media);
        Ok(Target::open(directory.as_fd(), target_of(NodeId(identity.node), index as u16))?.on(medium))
    };
    if identity.shard_only {
        return open((0, &directories[0])).map(NodeTargets::of_shard_alone);
    }
    directories.iter().enumerate().map(open).collect::<Result<Vec<_>>>().map(NodeTargets::new)
}

/// The directory of a target's shard, also if the target has no path.
pub(super) fn shard_dir(target: &OwnedFd) -> PathBuf {
    descriptor::path_of_entry(target, b"shard")
}
