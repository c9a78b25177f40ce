//! What a copy reads and writes: a volume, a file, or an object of a store, as it is written on the command line.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use crate::table;

/// One side of a copy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// A volume, by its specifier.
    Volume(Vec<u8>),
    File(PathBuf),
    /// An object of a store, by its URL.
    Object(Vec<u8>),
}

impl Place {
    /// An argument. Names of volumes have no slash, and specifiers have a colon behind theirs.
    pub(super) fn parse(text: &OsStr) -> Place {
        let bytes = text.as_bytes();
        if bytes.windows(3).any(|window| window == b"://") {
            return Place::Object(bytes.to_vec());
        }
        let is_path = bytes.starts_with(b"/") || bytes.starts_with(b"./") || bytes.starts_with(b"../");
        let is_file = is_path || (bytes.contains(&b'/') && !bytes.contains(&b':'));
        match is_file {
            true => Place::File(text.into()),
            false => Place::Volume(bytes.to_vec()),
        }
    }

    /// For messages.
    pub(super) fn shown(&self) -> String {
        match self {
            Place::Volume(specifier) => format!("volume {}", table::printable(specifier)),
            Place::File(path) => table::printable(path.as_os_str().as_bytes()),
            Place::Object(url) => table::printable(url),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_volumes_files_or_objects() {
        let parse = |text: &str| Place::parse(OsStr::new(text));
        for volume in ["v", "node:v", "0/1:v", "a:v+b:w", "v w", ".v"] {
            assert_eq!(parse(volume), Place::Volume(volume.into()), "{volume}");
        }
        for file in ["/a/b", "./v", "../v", "dir/v", "./a:b", "/tmp/x:y"] {
            assert_eq!(parse(file), Place::File(file.into()), "{file}");
        }
        for object in ["s3://bucket/a", "file:///a/b?rate=1MB/s"] {
            assert_eq!(parse(object), Place::Object(object.into()), "{object}");
        }
    }
}
