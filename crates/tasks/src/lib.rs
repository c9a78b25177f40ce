//! Requests to a node's mover (`forebay-mover`), the tasks that it runs for them, what it reports, and the
//! settings of stores.
//!
//! The mover listens on [`forebay_types::MOVER_SOCKET`] in the pool's directory. A connection carries lines of JSON: an
//! [`Ask`] from the command, one [`Answer`] from the mover, and so on. [`Ask::Wait`] alone gets several answers: the
//! task as it proceeds, until it is over. A task belongs to the pool, not to the connection: it goes on when the
//! command ends, and it is started again when the mover was killed.
//!
//! [`MoverClient`] is the command's side. The mover's side is `crates/mover/src/tasks`.

#![forbid(unsafe_code)]

mod client;
mod drain_policy;
mod failure;
mod policy;
pub mod recovery;
mod report;
mod settings;
pub mod volume_copy;
mod yield_to;

pub use client::MoverClient;
pub use drain_policy::DrainPolicy;
pub use failure::Failure;
pub use policy::{Policy, Rule};
pub use report::{MoverReport, StoreReport};
pub use settings::{Durable, Recall, StoreSettings};
pub use yield_to::{YieldTo, CLAIM_AGE, YIELD};

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a task does to a file, or to all files below a directory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verb {
    /// Make the store equal to the pool.
    Sync,
    /// Copy released data into the pool.
    Prestage,
    /// Drop the pool's copy of clean data. The names stay.
    Release,
    /// Sync, then release.
    Purge,
    /// Look for changes made in the store by others.
    Refresh,
}

impl Verb {
    /// All of them.
    pub const ALL: [Verb; 5] = [Verb::Sync, Verb::Prestage, Verb::Release, Verb::Purge, Verb::Refresh];

    /// The word on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Verb::Sync => "sync",
            Verb::Prestage => "prestage",
            Verb::Release => "release",
            Verb::Purge => "purge",
            Verb::Refresh => "refresh",
        }
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Whose version survives a conflict.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Keep {
    /// The version of the pool. It replaces that of the store.
    Pool,
    /// The version of the store. That of the pool is dropped.
    Store,
    /// Both: the pool's gets another name.
    Both,
}

/// The state of a task.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TaskState {
    /// It waits for a thread.
    Queued,
    /// It runs.
    Running,
    /// It has done everything.
    Done,
    /// It could not do everything: [`Task::errors`] has the first reasons.
    Failed,
    /// It was cancelled. What it had done stays.
    Cancelled,
}

impl TaskState {
    /// True when the task does nothing more.
    pub fn is_over(self) -> bool {
        matches!(self, TaskState::Done | TaskState::Failed | TaskState::Cancelled)
    }

    /// The word in messages and JSON.
    pub fn name(self) -> &'static str {
        match self {
            TaskState::Queued => "queued",
            TaskState::Running => "running",
            TaskState::Done => "done",
            TaskState::Failed => "failed",
            TaskState::Cancelled => "cancelled",
        }
    }
}

/// A path for which a task failed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TaskError {
    /// The path in the pool, for people.
    pub path: String,
    /// Why.
    pub error: Failure,
}

/// A task. Its JSON is that of `forebay tasks --json`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Task {
    /// Its number, which no other task of the pool has.
    pub id: u64,
    /// What it does.
    pub verb: Verb,
    /// The inode number of the file or directory.
    pub ino: u64,
    /// Its path when the task was created, for people.
    pub path: String,
    /// Whether it concerns everything below the directory.
    pub recursive: bool,
    /// Its state.
    pub state: TaskState,
    /// Files that it has done.
    pub files_done: u64,
    /// Files that it has found.
    pub files_total: u64,
    /// Bytes of data that it has copied or dropped.
    pub bytes_done: u64,
    /// Bytes of data of the files that it has found.
    pub bytes_total: u64,
    /// How many paths it failed for.
    pub error_count: u64,
    /// How many of them, as a node that has their data does not answer.
    #[serde(default)]
    pub unreachable_count: u64,
    /// The first of them.
    #[serde(default)]
    pub errors: Vec<TaskError>,
    /// How often it was started: more than once if the mover was killed meanwhile.
    pub starts: u64,
    /// When it was created, in seconds since 1970.
    pub created_s: u64,
    /// When it was over.
    pub ended_s: Option<u64>,
}

/// A request to the mover.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub enum Ask {
    /// Create a task. → `Task`
    Start {
        /// What to do.
        verb: Verb,
        /// The file or directory.
        ino: u64,
        /// Its path, for people.
        #[serde(default)]
        path: String,
        /// Whether everything below the directory is meant.
        #[serde(default)]
        recursive: bool,
    },
    /// All tasks that are not forgotten, the oldest first. → `Tasks`
    List,
    /// One task. → `Task`
    Show {
        /// Its number.
        id: u64,
    },
    /// A task as it proceeds. → `Task` now and then, the last one over
    Wait {
        /// Its number.
        id: u64,
    },
    /// End a task. → `Task`, as it is when it is over
    Cancel {
        /// Its number.
        id: u64,
    },
    /// Open a store and look at its root, without attaching it. → `Done`
    Probe {
        /// Its URL.
        url: String,
    },
    /// Settle a conflict. → `Done`
    Resolve {
        /// The directory.
        parent: u64,
        /// The bytes of the name in it.
        name: Vec<u8>,
        /// Whose version survives.
        keep: Keep,
    },
}

/// An answer of the mover.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// A task.
    Task(Task),
    /// Tasks.
    Tasks(Vec<Task>),
    /// It was done.
    Done,
    /// It failed.
    Failed(Failure),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asks_have_the_form_that_the_documentation_shows() {
        for text in [
            r#"{"op":"start","verb":"sync","ino":7,"recursive":true}"#,
            r#"{"op":"list"}"#,
            r#"{"op":"show","id":3}"#,
            r#"{"op":"wait","id":3}"#,
            r#"{"op":"cancel","id":3}"#,
            r#"{"op":"probe","url":"/lustre"}"#,
            r#"{"op":"resolve","parent":1,"name":[97],"keep":"both"}"#,
        ] {
            let ask: Ask = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::from_str::<Ask>(&serde_json::to_string(&ask).unwrap()).unwrap(), ask);
        }
    }

    #[test]
    fn names_of_verbs_are_those_of_their_json() {
        for verb in Verb::ALL {
            assert_eq!(serde_json::to_string(&verb).unwrap(), format!("{:?}", verb.name()));
        }
    }
}
