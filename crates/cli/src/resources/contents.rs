//! What a resources file says, in either form, and where in it.

use std::path::PathBuf;

use forebay_server::Medium;
use forebay_tasks::StoreSettings;
use forebay_types::{Code, Error, Result};

use crate::backing::Url;

/// What a resources file says.
#[derive(Debug, Default)]
pub(crate) struct Resources {
    /// Bytes of the pool.
    pub(crate) capacity: Option<u64>,
    /// Its medium.
    pub(crate) media: Option<Medium>,
    /// Where it is to be mounted.
    pub(crate) mount: Option<PathBuf>,
    /// Directories in front of stores, in the order of the file.
    pub(crate) directories: Vec<Attachment>,
    /// What the file says that has no meaning here, for people.
    pub(crate) notes: Vec<String>,
}

/// A directory in front of a store.
#[derive(Debug)]
pub(crate) struct Attachment {
    /// The directory in the pool.
    pub(crate) at: Vec<u8>,
    /// The store.
    pub(crate) url: Url,
    /// How it is attached.
    pub(crate) settings: StoreSettings,
    /// Paths below the directory whose data are copied into the pool at once.
    pub(crate) prestage: Vec<String>,
}

/// Where a value is, for errors: the file, and the keys that lead to it.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) file: PathBuf,
    pub(super) keys: String,
}

impl Place {
    pub(super) fn below(&self, key: &str) -> Place {
        let dot = if self.keys.is_empty() || key.starts_with('[') { "" } else { "." };
        Place { keys: format!("{}{dot}{key}", self.keys), ..self.clone() }
    }

    /// An error at a line.
    pub(super) fn wrong(&self, line: usize, why: impl std::fmt::Display) -> Error {
        let key = if self.keys.is_empty() { String::new() } else { format!(", key {}", self.keys) };
        Error::new(Code::Invalid, format!("cannot use {}: line {line}{key}", self.file.display())).why(why)
    }

    /// The same for a reason that is an error itself.
    pub(super) fn because(&self, line: usize, e: &Error) -> Error {
        let reason = if e.why.is_empty() { e.what.clone() } else { format!("{}: {}", e.what, e.why) };
        self.wrong(line, reason).cure(e.cure.clone())
    }

    pub(super) fn unknown(&self, key: &str, line: usize, known: &[&str]) -> Error {
        let error = self.below(key).wrong(line, "there is no such key");
        error.cure(format!("the keys here are {}", known.join(", ")))
    }
}

/// Refuses a directory that equals another directory of the file, lies below it, or contains it.
pub(super) fn check_disjoint(at: &[u8], others: &[Attachment], place: &Place, line: usize) -> Result<()> {
    let is_below = |path: &[u8], above: &[u8]| {
        above == b"/" || path == above || path.starts_with(above) && path.get(above.len()) == Some(&b'/')
    };
    match others.iter().find(|other| is_below(at, &other.at) || is_below(&other.at, at)) {
        None => Ok(()),
        Some(other) => {
            let other = String::from_utf8_lossy(&other.at).into_owned();
            Err(place.wrong(line, format!("{other} is in front of a store already: one tree has one store")))
        }
    }
}
