//! What the kernel may believe without asking, and for how long.
//!
//! Entries, and attributes of what has no file data, change by requests to the pool alone: the daemon tells the kernel
//! of those that other doors make before it acknowledges them, so the kernel may keep them until then. Attributes of a
//! regular file change also by the writes of whoever has it open, through the kernel's own descriptors, which nobody
//! announces: the kernel may keep them only while nobody but the mount uses the pool. In a pool of several nodes that
//! is never so, and of what other nodes serve nobody tells: the kernel asks each time.
//!
//! What a name leads to the kernel may hear of for the first time, and is told nothing of before it has: while others
//! use the pool, attributes that come with a name are believed for a moment ([`Validity::BRIEF`]), those asked for by
//! number until told.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::protocol::Validity;

/// The rules as they stand.
#[derive(Debug, Default)]
pub(crate) struct CacheRules {
    /// The daemon tells of changes.
    told: AtomicBool,
    /// Nobody else writes files of the pool.
    alone: AtomicBool,
}

impl CacheRules {
    /// The daemon tells of changes from now on, or no longer does.
    pub(crate) fn set_told(&self, told: bool) {
        self.told.store(told, Ordering::Release);
    }

    /// Nobody else writes files from now on, or somebody may; how it was.
    pub(crate) fn set_alone(&self, alone: bool) -> bool {
        self.alone.swap(alone, Ordering::SeqCst)
    }

    /// True while nobody else uses the pool: what comes with a name is believed for long then, and taken back when
    /// somebody comes.
    pub(crate) fn is_alone(&self) -> bool {
        self.alone.load(Ordering::SeqCst)
    }

    /// Of a name, there or not.
    pub(crate) fn entry(&self) -> Validity {
        if self.told.load(Ordering::Acquire) {
            Validity::LONG
        } else {
            Validity::NONE
        }
    }

    /// Of attributes; `written` tells whether stores may move them that nobody announces.
    pub(crate) fn attr(&self, st: &libc::stat, written: impl FnOnce() -> bool) -> Validity {
        let told = self.told.load(Ordering::Acquire);
        let is_file = st.st_mode & libc::S_IFMT == libc::S_IFREG;
        if told && (!is_file || self.is_alone() && !written()) {
            Validity::LONG
        } else {
            Validity::NONE
        }
    }
}
