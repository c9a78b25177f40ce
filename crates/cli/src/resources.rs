//! A resources file: which stores a pool is in front of, at which directories, and with which policies. `forebay up
//! --resources FILE` reads it, in TOML or in the YAML of echofs.
//!
//! Both are read into one tree whose nodes know their lines (`tree`), so that each error names line and key. Nothing is
//! started before the whole file was checked.

mod contents;
mod echofs;
mod own;
mod tree;

use std::path::Path;

use forebay_types::{Code, Error, Result};

use self::contents::Place;
pub(crate) use self::contents::{Attachment, Resources};
use self::tree::Node;

/// Bytes of a file that are read; a longer one is not a resources file.
const FILE_BYTES_MAX: u64 = 1 << 20;

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

#[cfg(test)]
mod tests;
