//! Sources and destinations: the rules by which a pair is interpreted.
//!
//! - A destination is the name that the source gets: `/store/run7:/input` creates `/input`. A directory staged onto an
//!   existing directory is merged into it: entries that the source lacks stay.
//! - A destination that ends in `/` is a directory into which the source goes: `/store/a.nc:/inputs/` creates
//!   `/inputs/a.nc`. So does a file staged onto an existing directory.
//! - A source that ends in `/` stands for its contents: `/store/run7/:/inputs/` fills `/inputs`. With a destination
//!   that does not end in `/` the slash makes no difference.
//! - Without a destination (stage-in) it is `/` with the source's last name, or `/` itself for contents.
//! - A symbolic link given as a source is followed; links within a source are staged as links. A destination that is a
//!   link to a directory stands for that directory.
//! - Missing directories above a destination are created.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use forebay_types::{Code, Error, Result};

/// A source and its destination. One is an absolute path in the backing store, the other a path in the pool that starts
/// with `/`. An empty destination means `/` with the source's last name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pair {
    /// A file or directory to copy.
    pub source: PathBuf,
    /// Its destination.
    pub destination: PathBuf,
}

/// A directory's path and a name in it. The name `.` means the directory itself, which only the root needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Spot {
    pub(crate) parent: Vec<u8>,
    pub(crate) name: Vec<u8>,
}

/// A pair after the rules that do not depend on the trees.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Mapped {
    pub(crate) source: Spot,
    pub(crate) destination: Spot,
    /// The source's contents are staged, not the directory itself.
    pub(crate) contents: bool,
}

impl Spot {
    /// The spot of an absolute path, without its `.` and double slashes.
    pub(crate) fn of(path: &[u8]) -> Result<Spot> {
        let invalid = |why: &str, cure: &str| {
            Err(Error::new(Code::Invalid, format!("cannot stage {}", crate::report::display(path)))
                .why(why)
                .cure(cure))
        };
        if path.first() != Some(&b'/') {
            return invalid("the path does not start with /", "give an absolute path");
        }
        if path.contains(&0) {
            return invalid("the path holds a NUL byte", "give a path without one");
        }
        let mut names: Vec<&[u8]> =
            path.split(|&b| b == b'/').filter(|n| !n.is_empty() && n != b".").collect();
        let Some(name) = names.pop() else { return Ok(Spot { parent: b"/".to_vec(), name: b".".to_vec() }) };
        if name == b".." {
            return invalid("the path ends in ..", "give the directory's own name");
        }
        let parent = names.iter().fold(b"/".to_vec(), |parent, name| join(&parent, name));
        Ok(Spot { parent, name: name.to_vec() })
    }

    /// The whole path.
    pub(crate) fn path(&self) -> Vec<u8> {
        join(&self.parent, &self.name)
    }

    /// True for the root, which has no name.
    pub(crate) fn is_root(&self) -> bool {
        self.name == b"."
    }

    /// The spot `name` in this directory.
    pub(crate) fn child(&self, name: &[u8]) -> Spot {
        Spot { parent: self.path(), name: name.to_vec() }
    }
}

/// A directory's path and a name in it as one path.
pub(crate) fn join(parent: &[u8], name: &[u8]) -> Vec<u8> {
    if name == b"." {
        return parent.to_vec();
    }
    let slash: &[u8] = if parent.ends_with(b"/") { b"" } else { b"/" };
    [parent, slash, name].concat()
}

fn names_contents(path: &[u8]) -> bool {
    path.ends_with(b"/") || path.ends_with(b"/.")
}

impl Mapped {
    /// Applies the rules to a pair.
    pub(crate) fn of(pair: &Pair) -> Result<Mapped> {
        let bytes = |path: &Path| path.as_os_str().as_bytes().to_vec();
        let (from, to) = (bytes(&pair.source), bytes(&pair.destination));
        let source = Spot::of(&from)?;
        let contents = names_contents(&from);
        let to = if to.is_empty() { b"/".to_vec() } else { to };
        let mut destination = Spot::of(&to)?;
        if names_contents(&to) && !contents {
            destination = destination.child(&source.name);
        }
        Ok(Mapped { source, destination, contents })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped(source: &str, destination: &str) -> (String, String, bool) {
        let m = Mapped::of(&Pair { source: source.into(), destination: destination.into() }).unwrap();
        (crate::report::display(&m.source.path()), crate::report::display(&m.destination.path()), m.contents)
    }

    #[test]
    fn map_by_the_rules_of_the_header() {
        for (source, destination, from, to, contents) in [
            ("/store/run7", "/input", "/store/run7", "/input", false),
            ("/store/run7/", "/input", "/store/run7", "/input", true),
            ("/store/a.nc", "/inputs/", "/store/a.nc", "/inputs/a.nc", false),
            ("/store/run7/", "/inputs/", "/store/run7", "/inputs", true),
            ("/store/run7/.", "/inputs/", "/store/run7", "/inputs", true),
            ("/store/run7", "", "/store/run7", "/run7", false),
            ("/store/run7/", "", "/store/run7", "/", true),
            ("/store/run7", "/", "/store/run7", "/run7", false),
            ("//store//./x//", "//a//b", "/store/x", "/a/b", true),
            ("/", "/all", "/", "/all", true),
            ("/x", "/a/./", "/x", "/a/x", false),
        ] {
            assert_eq!(
                mapped(source, destination),
                (from.into(), to.into(), contents),
                "{source} {destination}"
            );
        }
    }

    #[test]
    fn map_of_relative_or_climbing_paths_is_refused() {
        for (source, destination) in [("x", "/x"), ("/x", "x"), ("/a/..", "/x"), ("/x", "/b/../"), ("", "/x")]
        {
            let pair = Pair { source: source.into(), destination: destination.into() };
            assert_eq!(Mapped::of(&pair).unwrap_err().code, Code::Invalid, "{source} {destination}");
        }
    }
}
