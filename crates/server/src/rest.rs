//! A pool at rest, looked at without a daemon.

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use forebay_data::Target;
use forebay_meta::Shard;
use forebay_types::{Code, Error, Result};
use serde_json::Value;

use crate::directory::PoolDirectory;
use crate::identity::PoolIdentity;
use crate::target::open_target_at_rest;

/// Checks shard and target of the pool in `path`, which is down: as the daemon would, under the pool's lock, so that it
/// cannot be started meanwhile. [`Code::NotFound`] when no data is there.
pub fn check(path: &Path) -> Result<Value> {
    let dir = PoolDirectory::open(path)?;
    let Some(identity) = PoolIdentity::read(&dir)? else {
        return Err(Error::new(Code::NotFound, format!("cannot check {}", path.display()))
            .why("there is no pool in that directory")
            .cure("name the pool with --pool DIR"));
    };
    let _lock = dir.lock()?;
    let target_dir = open_target_at_rest(&dir, &identity)?;
    let shard = Shard::open(&PathBuf::from(format!("/proc/self/fd/{}/shard", target_dir.as_raw_fd())))?;
    let target = Target::open(&target_dir, u32::from(identity.node) << 16)?;
    crate::worker::check(&shard, &target)
}
