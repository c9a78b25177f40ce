//! Requests to a pool's supervisor and to its worker, apart from attaching.

use std::path::PathBuf;

use forebay_types::Error;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::members::{Answer, JoinRequest};
use forebay_tasks::Failure;

/// How a pool is mounted.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct MountOptions {
    /// Other users may use the mount.
    pub allow_other: bool,
    /// Data go by requests even if passthrough is available.
    pub no_passthrough: bool,
}

/// Requests to the supervisor.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub(crate) enum Ask {
    /// Become a member until the connection closes. → `Member`
    Join(JoinRequest),
    /// Claim work that the group does once. → `Member`
    Claim { key: String },
    /// Report that the claim was done, or failed. → `Member`
    Finish { key: String, failure: Option<String> },
    /// Report that the member's program has ended. → `Member`
    LeavePlan { success: bool },
    /// Return the supervisor's part of the status. → `Status`
    Status,
    /// Keep the pool up when its last member leaves. → `Kept`
    Keep,
    /// This member begins to copy to the backing store what it lacks. → `Noted`
    Draining,
    /// The backing store has everything that was written before `Draining`. → `Noted`
    Drained,
    /// Mount the pool on an empty directory, named by its full path. → `Mounted`
    Mount { at: PathBuf, options: MountOptions },
    /// Unmount the pool, from wherever it is mounted if no directory is named. → `Unmounted`
    Unmount { at: Option<PathBuf>, lazy: bool },
    /// Start the mover, which the pool then keeps, unless it runs. → `MoverStarted`, when it is ready
    StartMover,
    /// Stop the pool. → `Stopped`, when everything of it is removed except what `keep` keeps. With `uses`, only if no
    /// program uses it, and if [`crate::control::Status::uses`] is still this number; otherwise → `Used`. With
    /// `spares_volumes` only if it has no volumes; otherwise → `Used`.
    Down {
        keep: bool,
        uses: Option<u64>,
        #[serde(default)]
        spares_volumes: bool,
    },
}

/// The supervisor's answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Reply {
    /// To a member.
    Member(Answer),
    /// To `Status`: keys that are merged with those of the worker.
    Status(Value),
    /// To `Mount`: how data are served, and why not by passthrough.
    Mounted(Value),
    /// To `Unmount`.
    Unmounted,
    /// To `Keep`.
    Kept,
    /// To `Draining` and `Drained`.
    Noted,
    /// To `StartMover`.
    MoverStarted,
    /// To `Down`.
    Stopped(Stopped),
    /// To `Down`: the pool is not stopped, as a program uses it or has used it, or as it has volumes.
    Used,
    /// To any request that failed.
    Failed(Failure),
}

impl Reply {
    pub(crate) fn failed(e: &Error) -> Reply {
        Reply::Failed(Failure::from(e))
    }
}

/// How a pool stopped.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Stopped {
    /// True when its data are kept for the next `up`.
    pub data_kept: bool,
    /// True when the worker had to be killed.
    pub killed: bool,
}

/// Requests to the worker, on the clients' socket.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub(crate) enum WorkerAsk {
    /// Return the worker's part of the status.
    Status,
    /// Check shard and target.
    Check,
}
