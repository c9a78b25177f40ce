//! The options with which the daemon opens a pool.

use std::path::PathBuf;

use forebay_data::Medium;

use crate::bundle::Bundle;
use crate::media_profile::MediaProfile;
use crate::pool_file::{Membership, TargetEntry};

/// The pool that the daemon opens.
#[derive(Clone, Debug, Default)]
pub(crate) struct PoolOptions {
    pub(crate) path: PathBuf,
    pub(crate) media: Option<Medium>,
    pub(crate) capacity_bytes: Option<u64>,
    /// Milliseconds between two snapshots of the shard, 0 for none; without it the pool keeps its setting.
    pub(crate) snapshots_ms: Option<u64>,
    /// The medium that the targets emulate; without it the pool keeps its setting.
    pub(crate) media_profile: Option<MediaProfile>,
    pub(crate) embedded: bool,
    pub(crate) elsewhere_allowed: bool,
    /// For a pool with a pool file: its nodes, and the number of this one.
    pub(crate) membership: Option<Membership>,
    /// The node's data are lost: it takes a number that the pool has never had.
    pub(crate) renumber: bool,
    /// The bundle that came through a pipe, to be stored in the pool's directory.
    pub(crate) bundle: Option<Bundle>,
    /// The node has no target: `path` holds only its shard.
    pub(crate) shard_only: bool,
    /// The node's targets after the first, which is in `path`.
    pub(crate) more: Vec<TargetEntry>,
    /// The node's name.
    pub(crate) node_name: String,
    /// Bytes of the node's memory that other targets may still use.
    pub(crate) promised_bytes: u64,
}
