//! What is asked of a pool's supervisor and of its worker, beside attaching.

use std::path::PathBuf;

use forebay_types::Error;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::members::{Answer, JoinRequest};
use crate::store::Failure;

/// How a pool is mounted.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct MountOptions {
    /// Other users may use it too.
    pub allow_other: bool,
    /// Data goes by requests even where passthrough is available.
    pub no_passthrough: bool,
}

/// Requests to the supervisor.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub(crate) enum Ask {
    /// Become a member for as long as the connection lasts. → `Member`
    Join(JoinRequest),
    /// Do something once in the group. → `Member`
    Claim { key: String },
    /// The claim was done, or failed. → `Member`
    Finish { key: String, failure: Option<String> },
    /// The member's program has ended. → `Member`
    LeavePlan { success: bool },
    /// Facts that the supervisor knows. → `Status`
    Status,
    /// The pool shall stay when its last member leaves. → `Kept`
    Keep,
    /// Mount the pool on an empty directory, named by its full path. → `Mounted`
    Mount { at: PathBuf, options: MountOptions },
    /// Unmount it, from wherever it is when no directory is named. → `Unmounted`
    Unmount { at: Option<PathBuf>, lazy: bool },
    /// Stop the pool. → `Stopped`, when nothing of it is left but what `keep` keeps.
    Down { keep: bool },
}

/// The supervisor's answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Reply {
    /// To a member.
    Member(Answer),
    /// To `Status`: keys that join those of the worker's.
    Status(Value),
    /// To `Mount`: how data is served, and why not by passthrough.
    Mounted(Value),
    /// To `Unmount`.
    Unmounted,
    /// To `Keep`.
    Kept,
    /// To `Down`.
    Stopped(Stopped),
    /// It failed.
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
    /// True when its data is still there for the next `up`.
    pub data_kept: bool,
    /// True when the worker had to be killed.
    pub killed: bool,
}

/// Asked of the worker, on the clients' socket.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub(crate) enum WorkerAsk {
    /// Facts that the worker knows.
    Status,
    /// Checks shard and target.
    Check,
}
