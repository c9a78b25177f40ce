//! The shard thread's part of snapshots: it gives its last commit away, and puts off others.

use std::sync::mpsc::Sender;
use std::sync::Arc;

use forebay_types::Result;

use super::state::ShardThread;
use crate::worker::snapshot_hold::{Answer, Hold};

impl ShardThread<'_> {
    /// Commits, and answers with the commit.
    ///
    /// # Errors
    /// Those that end the worker.
    pub(in crate::worker) fn give_snapshot(&mut self, reply: &Sender<Answer>) -> Result<()> {
        // A mark that was written since has what was acknowledged since.
        let taken = crate::worker::now();
        self.commit()?;
        let source = self.shard.snapshot_source();
        let hold = Arc::new(Hold::default());
        self.snapshot_hold = source.is_ok().then(|| Arc::clone(&hold));
        let _ = reply.send(source.map(|source| (source, taken, hold)));
        Ok(())
    }

    /// True while commits that are not necessary are put off.
    pub(in crate::worker) fn is_held_for_snapshot(&self) -> bool {
        self.snapshot_hold.as_ref().is_some_and(|hold| hold.holds())
    }
}
