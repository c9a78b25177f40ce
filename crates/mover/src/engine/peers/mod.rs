//! The movers of a pool's nodes (docs/decisions/0042).
//!
//! The mover of the node that has an attached tree does what concerns names, and decides what is copied. Data are copied
//! by the mover of the node that has them: it gets a *job* for it. A job is begun, looked at until it is over, and
//! dropped, with a message each, so that no message waits long. The daemons carry the messages (`Request::AskMover`).
//!
//! A job ends by itself when nobody looks at it ([`FENCE`]): before a mover gives a node up, it waits for longer than
//! that. So no job changes the store of which its mover does not know. A mover that was started again fences the jobs of
//! the one before it. What is changed all the same by a call that hung in the store is found as a conflict.

mod ask;
mod jobs;
mod letters;

pub(super) use ask::Peers;
pub(super) use jobs::{Job, Jobs};
pub(super) use letters::{from_hex, to_hex, Answer, Counted, Letter, Outcome, Work};

use std::time::Duration;

/// How long a job goes on without a look at it.
pub(super) const FENCE: Duration = Duration::from_secs(12);
/// How long a mover waits for another node's, before it gives it up.
const PATIENCE: Duration = Duration::from_secs(20);
