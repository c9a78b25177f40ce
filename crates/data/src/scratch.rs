//! A directory for one test, removed with its contents when dropped.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A new directory, removed when dropped.
pub(crate) struct Scratch(PathBuf);

#[allow(dead_code, reason = "each test binary uses some of it")]
impl Scratch {
    /// A new directory in the directory for temporary files.
    pub(crate) fn new() -> Scratch {
        Scratch::within(&std::env::temp_dir())
    }

    /// A new directory in `parent`.
    pub(crate) fn within(parent: &Path) -> Scratch {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("forebay-data-test-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap_or_else(|e| panic!("cannot make {}: {e}", path.display()));
        Scratch(path)
    }

    /// A new directory with these files: their paths in it, and their contents.
    pub(crate) fn with(files: &[(&str, &str)]) -> Scratch {
        let scratch = Scratch::new();
        for (path, text) in files {
            let path = scratch.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        scratch
    }

    /// Its path.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let removed = std::fs::remove_dir_all(&self.0);
        if !std::thread::panicking() {
            removed.unwrap_or_else(|e| panic!("cannot remove {}: {e}", self.0.display()));
        }
    }
}
