//! Points of the shard thread's pipeline at which a watcher may end the worker: simulations and tests of faults kill it
//! there.

use forebay_types::Result;

/// Where a shard thread is within a round: what is killed at one of these leaves something else behind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Moment {
    /// A change is in the journal, and neither shown nor answered.
    Journaled,
    /// A batch is on the board and not answered.
    Published,
    /// A batch is answered.
    Answered,
    /// A transaction is about to be committed.
    Committing,
    /// It is committed, and the journal still holds what was.
    Committed,
}

/// Told of each [`Moment`]; it may unwind, and an error ends the worker there.
pub type Watcher = Box<dyn FnMut(Moment) -> Result<()>>;
