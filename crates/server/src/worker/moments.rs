//! Points of the shard thread's pipeline at which a watcher may end the worker: simulations and tests of faults kill
//! the worker there.

// Only the simulator exports these.
#![cfg_attr(not(any(test, feature = "simulation")), allow(unreachable_pub))]

use forebay_types::Result;

/// A point within a round. The state that a killed worker leaves differs from point to point.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Moment {
    /// A change is in the journal, and neither published nor answered.
    Journaled,
    /// A batch is on the board and not answered.
    Published,
    /// A batch is answered.
    Answered,
    /// A transaction is about to be committed.
    Committing,
    /// The transaction is committed, and the journal is not cleared yet.
    Committed,
}

/// Called at each [`Moment`]. It may unwind, and an error ends the worker there.
pub type Watcher = Box<dyn FnMut(Moment) -> Result<()>>;
