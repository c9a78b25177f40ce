//! How a device is requested.

use forebay_volume::Specifier;
use serde::{Deserialize, Serialize};

/// How a device is requested. Names are bytes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Options {
    /// The pool's directory.
    pub pool: Vec<u8>,
    /// What distinguishes this life of the pool from others, of the same directory too.
    pub life: u64,
    /// The volume's name, or the specifier of joined volumes.
    pub volume: Vec<u8>,
    /// The device cannot be written.
    pub is_read_only: bool,
    /// The volume is thin: discards free its space.
    pub is_thin: bool,
    /// The numbers of the volumes.
    pub numbers: Vec<u64>,
}

impl Options {
    /// The names of the volumes that are joined, or of the only one.
    pub fn names(&self) -> Vec<Vec<u8>> {
        let parsed = Specifier::parse_all(&self.volume).unwrap_or_default();
        parsed.into_iter().map(|one| one.volume).collect()
    }

    /// What cannot be done, as errors begin.
    pub(crate) fn what(&self) -> String {
        format!("cannot attach volume {}", self.volume.escape_ascii())
    }
}
