//! Changes to backing files that other nodes asked for.

use forebay_fabric::Ticket;

/// A change to a backing file, so that a retry is answered and not repeated, and one that comes late is not done over a
/// newer one.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) sequence: u64,
    pub(super) state: State,
}

#[derive(Debug)]
pub(super) enum State {
    /// It is under way; the answer goes to who asked last, whose daemon may have started anew.
    Running {
        asker: Ticket,
        /// It was sent ahead, behind the data that it tells of, and nobody has asked since.
        told: bool,
    },
    /// The answer.
    Done(Vec<u8>),
}
