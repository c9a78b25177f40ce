//! The state of a batch of calls.

use std::collections::VecDeque;

use forebay_meta::{Client, PAYLOAD_BYTES_MAX};
use forebay_types::{Code, Timestamp};

use super::acks::Acks;
use super::call::Call;

/// A request that was taken from its slot.
#[derive(Debug)]
pub(super) struct Taken {
    /// The session's index. It is valid for this batch only: sessions are added and removed between batches.
    pub(super) session: usize,
    pub(super) client: Client,
    /// The parsed request, or why it cannot be parsed.
    pub(super) call: std::result::Result<Call, Code>,
}

/// The state of a batch, kept from batch to batch for its memory.
#[derive(Debug)]
pub(super) struct Pipeline {
    pub(super) taken: VecDeque<Taken>,
    pub(super) acks: Acks,
    /// Memory for what replies borrow.
    pub(super) payload: Vec<u8>,
    /// Calls served since the last publish.
    pub(super) served: usize,
    /// The time of the changes among them, read at the first one.
    pub(super) now: Option<Timestamp>,
}

impl Pipeline {
    pub(super) fn new() -> Pipeline {
        let payload = vec![0; PAYLOAD_BYTES_MAX];
        Pipeline { taken: VecDeque::new(), acks: Acks::new(), payload, served: 0, now: None }
    }
}
