//! What the thread that copies a commit and the shard thread share: how many commits have come since, and whether the
//! copy is made (`snapshots.rs`).

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::Arc;

use forebay_meta::SnapshotSource;
use forebay_types::{Result, Timestamp};

/// Commits after which a copy is void.
const COMMITS_VOID: u32 = 2;

/// Between the thread that copies a commit and the shard thread.
#[derive(Debug, Default)]
pub(super) struct Hold {
    commits: AtomicU32,
    is_over: AtomicBool,
}

impl Hold {
    /// The shard thread has committed.
    pub(super) fn note_commit(&self) {
        self.commits.fetch_add(1, Ordering::AcqRel);
    }

    /// The copy is made, or given up.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    /// True while commits that are not necessary are put off.
    pub(super) fn holds(&self) -> bool {
        !self.is_over.load(Ordering::Acquire) && self.is_valid()
    }

    /// False once the copy may be torn.
    pub(super) fn is_valid(&self) -> bool {
        self.commits.load(Ordering::Acquire) < COMMITS_VOID
    }
}

/// Answered by the shard thread: its last commit, and a time before it.
pub(super) type Answer = Result<(SnapshotSource, Timestamp, Arc<Hold>)>;
