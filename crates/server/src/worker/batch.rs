//! What a batch of calls is made of.

use std::collections::VecDeque;

use forebay_meta::{Client, PAYLOAD_BYTES_MAX};
use forebay_types::{Code, Timestamp};

use super::acks::Acks;
use super::call::Call;

/// A request that was taken from its slot.
#[derive(Debug)]
pub(super) struct Taken {
    /// The session's index: sessions come and go between batches.
    pub(super) session: usize,
    pub(super) client: Client,
    /// What is asked, or why that cannot be told.
    pub(super) call: std::result::Result<Call, Code>,
}

/// What a batch is made of, kept from one to the next for its memory.
#[derive(Debug)]
pub(super) struct Pipeline {
    pub(super) taken: VecDeque<Taken>,
    pub(super) acks: Acks,
    /// Where replies put what they borrow.
    pub(super) payload: Vec<u8>,
    /// Calls served since the last publish, and the time of the changes among them, asked for the first one.
    pub(super) served: usize,
    pub(super) now: Option<Timestamp>,
}

impl Pipeline {
    pub(super) fn new() -> Pipeline {
        let payload = vec![0; PAYLOAD_BYTES_MAX];
        Pipeline { taken: VecDeque::new(), acks: Acks::new(), payload, served: 0, now: None }
    }
}
