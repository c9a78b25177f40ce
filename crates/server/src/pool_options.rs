//! What the daemon is asked to open.

use std::path::PathBuf;

use forebay_data::Medium;

use crate::bundle::Bundle;
use crate::pool_file::{Membership, TargetEntry};

/// The pool that the daemon opens.
#[derive(Clone, Debug, Default)]
pub(crate) struct PoolOptions {
    pub(crate) path: PathBuf,
    pub(crate) media: Option<Medium>,
    pub(crate) capacity_bytes: Option<u64>,
    pub(crate) embedded: bool,
    pub(crate) elsewhere_allowed: bool,
    /// Of a pool with a pool file: its nodes, and which of them this one is.
    pub(crate) membership: Option<Membership>,
    /// The node's data are gone: it takes a number that the pool has never had.
    pub(crate) renumber: bool,
    /// What came by a pipe of the pool, to be kept in its directory.
    pub(crate) bundle: Option<Bundle>,
    /// No file lies on the node: `path` has its shard alone.
    pub(crate) shard_only: bool,
    /// What the node gives beside that in `path`.
    pub(crate) more: Vec<TargetEntry>,
    /// The name by which people call the node.
    pub(crate) node_name: String,
    /// Memory of the node that is promised to other targets.
    pub(crate) promised_bytes: u64,
}
