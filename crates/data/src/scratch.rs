//! A directory for one test, gone with everything in it when dropped.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A new directory under a parent; removed when dropped.
pub(crate) struct Scratch(PathBuf);

#[allow(dead_code, reason = "each test binary uses some of it")]
impl Scratch {
    /// In the directory for temporary files.
    pub(crate) fn new() -> Scratch {
        Scratch::within(&std::env::temp_dir())
    }

    /// In `parent`.
    pub(crate) fn within(parent: &Path) -> Scratch {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("forebay-data-test-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap_or_else(|e| panic!("cannot make {}: {e}", path.display()));
        Scratch(path)
    }

    /// With these files, by their paths in it and their texts.
    pub(crate) fn with(files: &[(&str, &str)]) -> Scratch {
        let scratch = Scratch::new();
        for (path, text) in files {
            let path = scratch.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        scratch
    }

    /// Where it is.
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
