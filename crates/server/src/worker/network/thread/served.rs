//! Changes to backing files that other nodes requested.

use forebay_fabric::Ticket;

/// The last change to a backing file that a slot requested. A retry of it is answered and not repeated, and a late
/// duplicate is not done over a newer change.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) sequence: u64,
    pub(super) state: State,
}

#[derive(Debug)]
pub(super) enum State {
    /// It is in progress. The reply is sent to the last requester: its daemon may have a new worker.
    Running {
        asker: Ticket,
        /// The reply was sent when its transfer had started, and there was no retry since.
        told: bool,
    },
    /// The reply.
    Done(Vec<u8>),
}
