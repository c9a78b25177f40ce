//! A resources file: which stores a pool is in front of, at which directories, and with which policies. `forebay up
//! --resources FILE` reads it, in TOML or in the YAML of echofs.
//!
//! Both are read into one tree whose nodes know their lines (`tree`), so that each error names line and key. Nothing is
//! started before the whole file was checked.

mod echofs;
mod own;
mod tree;

use std::path::{Path, PathBuf};

use forebay_server::Medium;
use forebay_tasks::StoreSettings;
use forebay_types::{Code, Error, Result};

use self::tree::Node;
use crate::backing::Url;

/// Bytes of a file that are read; a longer one is not a resources file.
const FILE_BYTES_MAX: u64 = 1 << 20;

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
struct Place {
    file: PathBuf,
    keys: String,
}

impl Place {
    fn below(&self, key: &str) -> Place {
        let dot = if self.keys.is_empty() || key.starts_with('[') { "" } else { "." };
        Place { keys: format!("{}{dot}{key}", self.keys), ..self.clone() }
    }

    /// An error at a line.
    fn wrong(&self, line: usize, why: impl std::fmt::Display) -> Error {
        let key = if self.keys.is_empty() { String::new() } else { format!(", key {}", self.keys) };
        Error::new(Code::Invalid, format!("cannot use {}: line {line}{key}", self.file.display())).why(why)
    }

    /// The same for a reason that is an error itself.
    fn because(&self, line: usize, e: &Error) -> Error {
        let reason = if e.why.is_empty() { e.what.clone() } else { format!("{}: {}", e.what, e.why) };
        self.wrong(line, reason).cure(e.cure.clone())
    }

    fn unknown(&self, key: &str, line: usize, known: &[&str]) -> Error {
        let error = self.below(key).wrong(line, "there is no such key");
        error.cure(format!("the keys here are {}", known.join(", ")))
    }
}

/// Reads a resources file.
pub(crate) fn read(file: &Path) -> Result<Resources> {
    let what = || format!("cannot read the resources file {}", file.display());
    let about = std::fs::metadata(file).map_err(|e| Error::io(what(), &e))?;
    if !about.is_file() || about.len() > FILE_BYTES_MAX {
        return Err(Error::new(Code::Invalid, what()).why("it is no file of at most 1 MiB"));
    }
    let bytes = std::fs::read(file).map_err(|e| Error::io(what(), &e))?;
    let text =
        String::from_utf8(bytes).map_err(|_| Error::new(Code::Invalid, what()).why("it is not UTF-8"))?;
    parse(&text, file)
}

fn parse(text: &str, file: &Path) -> Result<Resources> {
    let place = Place { file: file.to_owned(), keys: String::new() };
    // By content: files of echofs have any name.
    let is_toml = file.extension().is_some_and(|extension| extension == "toml");
    let is_yaml = file.extension().is_some_and(|extension| extension == "yaml" || extension == "yml");
    let root: Node = match tree::of_toml(text) {
        Ok(root) => root,
        Err((line, why)) if is_toml => return Err(place.wrong(line, format!("it is not TOML: {why}"))),
        Err((toml_line, toml_why)) => match tree::of_yaml(text) {
            Ok(root) => root,
            Err((line, why)) if is_yaml => return Err(place.wrong(line, format!("it is not YAML: {why}"))),
            Err((line, why)) => {
                let why = format!("it is not TOML: {toml_why}; and not YAML: line {line}: {why}");
                return Err(place.wrong(toml_line, why));
            }
        },
    };
    match echofs::is_of_echofs(&root) {
        true => echofs::resources(&root, &place),
        false => own::resources(&root, &place),
    }
}

/// Refuses two directories of which one is the other, or is below it.
fn check_disjoint(at: &[u8], others: &[Attachment], place: &Place, line: usize) -> Result<()> {
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

#[cfg(test)]
mod tests;
