//! The daemon's half of a ring, and the ring's layout in memory.
//!
//! ```text
//! page 0   word 0   pending: a bit for each slot with a new request (written by both)
//!          word 8   epoch of the board that this client may read (written by the daemon)
//! slot i   at 4096 + i * 144 KiB:
//!          0  u32 state   4  u32 request bytes   8  u64 sequence   16  request
//!          72 KiB on: u32 reply bytes, at 8 the reply
//! ```
//!
//! Request and reply lie apart: a daemon killed in the middle of an answer leaves the request whole for the next.
//!
//! A slot's state goes idle/done → requested (client) → sleeping (client, if it tires of spinning) → done (daemon).
//! The daemon never acts on the state that a client wrote except to copy a request out, and each copy is served once.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use forebay_types::limits::{MESSAGE_BYTES_MAX, RING_SLOTS};
use forebay_types::Code;

use crate::shared::{memfd_sealed, Mapping, Seal};

pub(crate) const PENDING_OFFSET: usize = 0;
pub(crate) const EPOCH_OFFSET: usize = 64;
const SLOTS_OFFSET: usize = 4096;
const SLOT_BYTES: usize = 2 * REPLY_OFFSET;
/// Only pages that are touched take memory: of most slots none, of the others one for each half.
pub(crate) const REPLY_OFFSET: usize = 72 * 1024;
pub(crate) const LEN_OFFSET: usize = 4;
pub(crate) const SEQ_OFFSET: usize = 8;
pub(crate) const MESSAGE_OFFSET: usize = 16;
pub(crate) const RING_BYTES: usize = SLOTS_OFFSET + RING_SLOTS * SLOT_BYTES;

pub(crate) const REQUESTED: u32 = 1;
pub(crate) const SLEEPING: u32 = 2;
pub(crate) const DONE: u32 = 3;

const _: () = assert!(MESSAGE_OFFSET + MESSAGE_BYTES_MAX <= REPLY_OFFSET);

/// Where slot `i` begins.
#[inline]
pub(crate) fn slot_offset(i: usize) -> usize {
    SLOTS_OFFSET + i * SLOT_BYTES
}

/// A request that was copied out of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotRequest {
    /// Slot index, 0 to 63.
    pub slot: usize,
    /// The client's sequence for this slot; a retry has the same.
    pub seq: u64,
    /// Bytes of the request in the caller's buffer.
    pub len: usize,
}

/// What a client says of a slot; for a daemon that takes over the rings of a crashed one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotState {
    /// Nothing waits.
    Quiet,
    /// A request waits for its reply.
    Waiting,
}

/// The daemon's view of one process's ring.
#[derive(Debug)]
pub struct ServedRing {
    mapping: Mapping,
}

impl ServedRing {
    /// A new ring, and the descriptor to hand to its process and to keep over a crash.
    pub fn create() -> io::Result<(OwnedFd, ServedRing)> {
        let (fd, mapping) = memfd_sealed(c"forebay-ring", RING_BYTES, Seal::Size)?;
        Ok((fd, ServedRing { mapping }))
    }

    /// Maps a ring again that a crashed daemon of this pool made and sealed.
    pub fn reopen(fd: BorrowedFd<'_>) -> io::Result<ServedRing> {
        Ok(ServedRing { mapping: Mapping::new(fd, RING_BYTES, true)? })
    }

    /// Tells the client which board it may trust.
    pub fn set_epoch(&self, epoch: u64) {
        self.mapping.word64(EPOCH_OFFSET).store(epoch, Ordering::Release);
    }

    /// True when a request may be waiting.
    #[inline]
    pub fn has_pending(&self) -> bool {
        self.mapping.word64(PENDING_OFFSET).load(Ordering::Relaxed) != 0
    }

    /// Takes up to `most` slots with new requests, as bits; the others stay pending.
    #[inline]
    pub fn take_pending(&self, most: usize) -> u64 {
        let pending = self.mapping.word64(PENDING_OFFSET);
        let all = pending.load(Ordering::Relaxed);
        if all == 0 {
            return 0;
        }
        let mut taken = all;
        while taken.count_ones() as usize > most {
            taken &= !(1 << (63 - taken.leading_zeros()));
        }
        // Another thread of the daemon may take some of them too: each slot goes to one.
        pending.fetch_and(!taken, Ordering::Acquire) & taken
    }

    /// The slots with new requests for which `is_wanted` is true, as bits. `is_wanted` gets the slot and the first byte
    /// of its request. The client may still change that byte.
    #[inline]
    pub fn pending_where(&self, is_wanted: impl Fn(usize, u8) -> bool) -> u64 {
        let (mut left, mut wanted) = (self.mapping.word64(PENDING_OFFSET).load(Ordering::Acquire), 0);
        while left != 0 {
            let slot = left.trailing_zeros() as usize;
            let first = self.mapping.word64(slot_offset(slot) + MESSAGE_OFFSET).load(Ordering::Relaxed);
            wanted |= u64::from(is_wanted(slot, first.to_le_bytes()[0])) << slot;
            left &= left - 1;
        }
        wanted
    }

    /// Takes the slots of `slots` that still have new requests, as bits.
    #[inline]
    pub fn take_slots(&self, slots: u64) -> u64 {
        self.mapping.word64(PENDING_OFFSET).fetch_and(!slots, Ordering::Acquire) & slots
    }

    /// Marks every slot that waits as pending, but for those whose answer is being held back: after a crash, the bits
    /// that the crashed daemon took are lost.
    pub fn repend(&self, held: u64) {
        let mut bits = 0;
        for slot in 0..RING_SLOTS {
            if held >> slot & 1 == 0 && self.state(slot) == SlotState::Waiting {
                bits |= 1 << slot;
            }
        }
        self.mapping.word64(PENDING_OFFSET).fetch_or(bits, Ordering::SeqCst);
    }

    /// What the client says of `slot`.
    pub fn state(&self, slot: usize) -> SlotState {
        match self.mapping.word32(slot_offset(slot)).load(Ordering::Acquire) {
            REQUESTED | SLEEPING => SlotState::Waiting,
            _ => SlotState::Quiet,
        }
    }

    /// Copies the request in `slot` out, once. `None` when the slot holds none (a scribbled pending bit); an error
    /// when its length is impossible, which is to be answered.
    #[inline]
    pub fn take(&self, slot: usize, buffer: &mut [u8]) -> Option<(u64, Result<SlotRequest, Code>)> {
        let at = slot_offset(slot);
        if self.state(slot) == SlotState::Quiet {
            return None;
        }
        let seq = self.mapping.word64(at + SEQ_OFFSET).load(Ordering::Relaxed);
        let len = self.mapping.word32(at + LEN_OFFSET).load(Ordering::Relaxed) as usize;
        if len > MESSAGE_BYTES_MAX || len > buffer.len() {
            return Some((seq, Err(Code::Malformed)));
        }
        self.mapping.load(at + MESSAGE_OFFSET, &mut buffer[..len]);
        Some((seq, Ok(SlotRequest { slot, seq, len })))
    }

    /// Copies out what a slot was answered last, while it carries no request: for a daemon that takes over. It is the
    /// client's memory by now, and may be anything.
    pub fn last_answer<'b>(&self, slot: usize, buffer: &'b mut [u8]) -> Option<&'b [u8]> {
        let at = slot_offset(slot);
        if self.mapping.word32(at).load(Ordering::Acquire) != DONE {
            return None;
        }
        let len = self.mapping.word32(at + REPLY_OFFSET).load(Ordering::Relaxed) as usize;
        let reply = buffer.get_mut(..len).filter(|_| len <= MESSAGE_BYTES_MAX)?;
        self.mapping.load(at + REPLY_OFFSET + 8, reply);
        Some(reply)
    }

    /// Answers `slot` and wakes its client if it sleeps.
    #[inline]
    pub fn answer(&self, slot: usize, reply: &[u8]) {
        let at = slot_offset(slot);
        self.mapping.store(at + REPLY_OFFSET + 8, reply);
        self.mapping.word32(at + REPLY_OFFSET).store(reply.len() as u32, Ordering::Relaxed);
        let state = self.mapping.word32(at);
        if state.swap(DONE, Ordering::AcqRel) == SLEEPING {
            forebay_sys::wait::wake(state, 1);
        }
    }
}
