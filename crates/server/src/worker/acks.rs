//! Acknowledgements of a batch: each reply is encoded once, and kept until the batch's changes are on the board.

use std::ops::Range;

use forebay_meta::Client;
use forebay_types::limits::MESSAGE_BYTES_MAX;
use forebay_types::{Answer, Code, Reply, REPLY_HEADER_BYTES};

use super::leases::Wait;
use super::notifier::Invalidation;

/// Bytes for replies that are collected before the batch is published. A batch is published early when the next reply
/// might not fit.
const REPLY_BYTES: usize = 16 * MESSAGE_BYTES_MAX;
/// More than any reply without a payload takes, including a list of targets.
const SHORT_REPLY_BYTES: usize = 8192;

/// A call that was executed or refused.
#[derive(Debug)]
pub(super) struct Ack {
    /// The session's index. It is valid for this batch only: sessions are added and removed between batches.
    pub(super) session: usize,
    pub(super) client: Client,
    pub(super) is_error: bool,
    reply: Range<usize>,
    /// Invalidations that are written to the kernel first.
    pub(super) invalidations: Vec<Invalidation>,
    /// What the reply waits for: revocations, and leases of unknown holders.
    pub(super) wait: Option<Wait>,
}

/// An encoded reply that was not made in a batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ReplyBuf {
    pub(super) bytes: Vec<u8>,
    pub(super) is_error: bool,
}

impl ReplyBuf {
    /// Encodes a reply.
    pub(super) fn encode(answer: &Answer<'_>) -> ReplyBuf {
        let payload = match answer {
            Ok(Reply::Bytes(bytes)) => bytes.len(),
            Ok(Reply::Entries(entries)) => entries.bytes.len(),
            Ok(_) => SHORT_REPLY_BYTES,
            Err(_) => 256,
        };
        let mut bytes = vec![0; REPLY_HEADER_BYTES + payload];
        let len = Reply::encode_answer(answer, &mut bytes).unwrap_or(0);
        bytes.truncate(len);
        ReplyBuf { bytes, is_error: answer.is_err() }
    }
}

impl From<Code> for ReplyBuf {
    fn from(code: Code) -> ReplyBuf {
        ReplyBuf::encode(&Err(code.into()))
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Acks {
    acks: Vec<Ack>,
    replies: Vec<u8>,
    used: usize,
}

impl Acks {
    pub(super) fn new() -> Acks {
        Acks { acks: Vec::new(), replies: vec![0; REPLY_BYTES], used: 0 }
    }

    /// True when a reply of any length has room.
    pub(super) fn has_room(&self) -> bool {
        self.used + MESSAGE_BYTES_MAX <= REPLY_BYTES
    }

    /// Encodes a reply.
    pub(super) fn encode(&mut self, answer: &Answer<'_>) -> Range<usize> {
        let room = &mut self.replies[self.used..];
        // A reply of any length has room: it cannot fail.
        let len = Reply::encode_answer(answer, room).unwrap_or(0);
        self.copied(len)
    }

    /// Takes a reply that is encoded already.
    pub(super) fn copy(&mut self, reply: &[u8]) -> Range<usize> {
        self.replies[self.used..self.used + reply.len()].copy_from_slice(reply);
        self.copied(reply.len())
    }

    fn copied(&mut self, len: usize) -> Range<usize> {
        let reply = self.used..self.used + len;
        self.used += len;
        reply
    }

    /// An encoded reply.
    pub(super) fn reply(&self, reply: &Range<usize>) -> &[u8] {
        &self.replies[reply.clone()]
    }

    /// Acknowledges a call when the batch is published.
    pub(super) fn add(
        &mut self,
        session: usize,
        client: Client,
        is_error: bool,
        reply: Range<usize>,
    ) -> &mut Ack {
        let ack = Ack { session, client, is_error, reply, invalidations: Vec::new(), wait: None };
        self.acks.push(ack);
        let last = self.acks.len() - 1;
        &mut self.acks[last]
    }

    /// Takes all acknowledgements, each with its encoded reply, and empties the memory.
    pub(super) fn release(&mut self, mut each: impl FnMut(Ack, &[u8])) {
        for ack in self.acks.drain(..) {
            let reply = ack.reply.clone();
            each(ack, &self.replies[reply]);
        }
        self.used = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_released_in_order_and_make_room() {
        let mut acks = Acks::new();
        for round in 0..3 {
            let long = vec![round; MESSAGE_BYTES_MAX - 100];
            let mut count = 0;
            while acks.has_room() {
                let reply = acks.encode(&Ok(Reply::Bytes(&long)));
                assert_eq!(Reply::decode(acks.reply(&reply)), Ok(Reply::Bytes(&long)));
                acks.add(0, Client { session: 1, slot: 0, seq: count }, false, reply);
                count += 1;
            }
            assert!(count >= 15, "{count}");
            let mut seen = 0;
            acks.release(|ack, reply| {
                assert_eq!(ack.client.seq, seen);
                assert_eq!(Reply::decode(reply), Ok(Reply::Bytes(&long)));
                seen += 1;
            });
            assert_eq!(seen, count);
        }
    }

    #[test]
    fn reply_that_is_encoded_already_is_taken_as_it_is() {
        let mut acks = Acks::new();
        let reply = acks.copy(&[7, 0, 0, 0]);
        acks.add(0, Client { session: 1, slot: 0, seq: 1 }, true, reply);
        acks.release(|ack, reply| {
            assert_eq!((ack.is_error, Reply::decode(reply)), (true, Err(Code::NoSpace)))
        });
    }
}
