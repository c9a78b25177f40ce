//! What `forebay volume copy`, `flush` and `load` have the mover's program do if one side is an object of a store: JSON, a
//! plan on the first line of its standard input, one event a line on its standard output. When its standard input is
//! closed, the copy is given up.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// What is to be copied.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VolumeCopyPlan {
    /// The pool's directory.
    pub pool: PathBuf,
    /// The specifier of the volume.
    pub volume: Vec<u8>,
    /// The URL of the object.
    pub url: Vec<u8>,
    /// Which way.
    pub direction: Direction,
    /// Where to begin in what is read.
    pub from_offset: u64,
    /// At most so many bytes; none: all.
    pub bytes: Option<u64>,
}

/// The direction of a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// The object is replaced when the copy is whole.
    ToStore {
        /// Permission bits of an object that is new.
        mode: u32,
    },
    /// The volume is changed in place.
    FromStore {
        /// Where to begin in the volume.
        to_offset: u64,
        /// What follows in the volume becomes zero.
        zero_rest: bool,
    },
}

/// What is reported.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VolumeCopyEvent {
    /// So many bytes are to be copied.
    Size(u64),
    /// So many are.
    Copied(u64),
    /// All are, and durable.
    Over,
    /// It failed. An object is as it was.
    Failed(Failure),
}
