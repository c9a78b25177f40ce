//! Access to facts about this node in `/proc`, `/sys` and `/etc`, under a root that tests replace.

use std::io;
use std::path::{Path, PathBuf};

/// The root under which `/proc`, `/sys`, `/etc` and `/run` are read.
#[derive(Clone, Debug)]
pub struct Host {
    root: PathBuf,
}

impl Host {
    /// This node.
    pub fn this() -> Host {
        Host::at("/")
    }

    /// A simulated node whose files are under `root`.
    pub fn at(root: impl Into<PathBuf>) -> Host {
        Host { root: root.into() }
    }

    /// The absolute `path`, under the root.
    pub(crate) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The bytes of a file.
    pub(crate) fn read_bytes(&self, path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
        std::fs::read(self.path(path))
    }

    /// The whole text of a file. Bytes that are not UTF-8 are replaced, as no number or keyword contains any.
    pub(crate) fn read(&self, path: impl AsRef<Path>) -> io::Result<String> {
        Ok(String::from_utf8_lossy(&self.read_bytes(path)?).into_owned())
    }

    /// The number in a file. None for `max`.
    pub(crate) fn read_number(&self, path: impl AsRef<Path>) -> Option<u64> {
        self.read(path).ok()?.trim().parse().ok()
    }

    /// Whether `path` exists.
    pub(crate) fn has(&self, path: impl AsRef<Path>) -> bool {
        self.path(path).exists()
    }
}
