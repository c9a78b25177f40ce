//! Checks a pool that is down, without a daemon.

use std::path::Path;

use forebay_types::{Code, Error, Result};
use serde_json::Value;

use crate::directory::PoolDirectory;
use crate::identity::PoolIdentity;
use crate::target::open_target_at_rest;

/// Checks shard and targets of the pool in `path`, which is down. The check is the daemon's, under the pool's lock, so
/// that the pool cannot be started meanwhile. [`Code::NotFound`] when the pool has no data.
pub fn check(path: &Path) -> Result<Value> {
    let dir = PoolDirectory::open(path)?;
    let Some(identity) = PoolIdentity::read(&dir)? else {
        return Err(Error::new(Code::NotFound, format!("cannot check {}", path.display()))
            .why("there is no pool in that directory")
            .cure("name the pool with --pool DIR"));
    };
    let _lock = dir.lock()?;
    let mut target_dirs = vec![open_target_at_rest(&dir, &identity)?];
    target_dirs.extend(crate::more_targets::open_at_rest(&identity)?);
    crate::worker::check_at_rest(&target_dirs, &identity)
}
