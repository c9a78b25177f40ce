//! What `forebay recover` has the mover's program do, and what that reports: JSON, a plan on its standard input, one
//! event a line on its standard output.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// In what state a dead pool left the shard in a target.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ShardLeft {
    /// There is none.
    #[default]
    None,
    /// Whole: the node has run on since the pool died.
    Whole,
    /// The node has died since: what is on the medium may be torn.
    Unsure,
}

/// A target of the dead pool.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PlannedTarget {
    /// The directory that the user named.
    pub path: PathBuf,
    /// The target in it.
    pub target: PathBuf,
    /// The pool's identity on its node.
    pub pool: String,
    /// The target's number on its node.
    pub index: u16,
    /// The shard in it.
    pub shard: ShardLeft,
}

/// What is to be recovered.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RecoveryPlan {
    /// The targets.
    pub targets: Vec<PlannedTarget>,
    /// The store that gets the data under their paths in the pool, instead of the stores that were attached.
    pub to: Option<String>,
    /// What the names of versions beside others end with.
    pub stamp: String,
    /// Only say what is found, without looking into the stores.
    pub list: bool,
    /// Look into the stores, but write nothing.
    pub dry_run: bool,
    /// Files of which parts are missing are recovered too, under a name that says so.
    pub partial: bool,
    /// Data whose names are not known are recovered too, into `to`.
    pub unnamed: bool,
    /// A store's directory is used also if it is not the one that was attached.
    #[serde(default)]
    pub replaced: bool,
}

/// What happened to a file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fate {
    /// It is to be recovered: with `list` alone.
    Dirty,
    /// The store has it under its own name.
    Recovered,
    /// The store has it beside another version.
    Beside,
    /// The store had its data already.
    Already,
    /// Parts of it are missing. It was recovered under a name that says so if that was wanted.
    Incomplete,
    /// The pool had no name for its data, or it is not known any longer.
    Unnamed,
    /// No store was attached where it was.
    NoStore,
    /// By its policy the store is not to have it, or the store was attached read-only.
    Temporary,
    /// The store has it: it was clean.
    Clean,
    /// It could not be recovered.
    Failed,
}

impl Fate {
    /// The word in messages and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Fate::Dirty => "dirty",
            Fate::Recovered => "recovered",
            Fate::Beside => "beside",
            Fate::Already => "already",
            Fate::Incomplete => "incomplete",
            Fate::Unnamed => "unnamed",
            Fate::NoStore => "no-store",
            Fate::Temporary => "temporary",
            Fate::Clean => "clean",
            Fate::Failed => "failed",
        }
    }

    /// True if data are in the targets alone that somebody may miss.
    pub fn is_open(self) -> bool {
        matches!(self, Fate::Dirty | Fate::Incomplete | Fate::Unnamed | Fate::NoStore | Fate::Failed)
    }
}

/// A file, link or directory of the dead pool.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RecoveredFile {
    /// Its path in the pool, for people; its inode number if it has none.
    pub path: String,
    /// Its store.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub store: String,
    /// The path in the store under which it is, or would be.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Bytes of its data.
    pub bytes: u64,
    /// What happened to it.
    pub fate: Fate,
    /// What its name comes from: `mark`, `snapshot`, `shard`, `none`.
    pub source: String,
    /// What is missing of it, and what was left out.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
    /// Why it could not be recovered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Failure>,
}

/// A line of the report.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecoveryEvent {
    /// Something about the targets that the user should know, such as a snapshot that cannot be used.
    Note(String),
    /// Files and bytes that are to be copied.
    Found {
        /// Files.
        files: u64,
        /// Bytes.
        bytes: u64,
    },
    /// A file was dealt with.
    File(RecoveredFile),
    /// Everything was dealt with.
    Over,
    /// Nothing more can be done.
    Failed(Failure),
}
