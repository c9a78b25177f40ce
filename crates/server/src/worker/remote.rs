//! A process of another node, as the shard thread sees it: like a ring, but what it asks comes by the network, and is
//! answered there. One request a slot is under way; a later one of the same slot says that its process has given the earlier up.

use std::cell::RefCell;
use std::collections::BTreeMap;

use forebay_fabric::Ticket;
use forebay_ring::{ServedRing, SlotRequest};
use forebay_types::Code;

use super::network::{Order, Orders};

/// A request that came, and is not answered.
#[derive(Debug)]
struct Waiting {
    seq: u64,
    ticket: Ticket,
    message: Vec<u8>,
    taken: bool,
}

/// The slots of a process of another node.
#[derive(Debug)]
pub(super) struct RemoteSlots {
    orders: Orders,
    waiting: RefCell<BTreeMap<usize, Waiting>>,
}

impl RemoteSlots {
    pub(super) fn new(orders: Orders) -> RemoteSlots {
        RemoteSlots { orders, waiting: RefCell::default() }
    }

    /// A request came, perhaps again.
    pub(super) fn put(&self, slot: usize, ticket: Ticket, message: Vec<u8>) {
        let (seq, mut waiting) = (ticket.stamp.sequence, self.waiting.borrow_mut());
        match waiting.get_mut(&slot) {
            // Its answer goes to who asked last: its daemon, or that one's successor.
            Some(w) if w.seq == seq => w.ticket = ticket,
            // It was overtaken by a later one.
            Some(w) if w.seq > seq => {}
            _ => {
                waiting.insert(slot, Waiting { seq, ticket, message, taken: false });
            }
        }
    }

    /// True when this very request came and is not answered.
    pub(super) fn is_waiting(&self, slot: usize, seq: u64) -> bool {
        self.waiting.borrow().get(&slot).is_some_and(|w| w.seq == seq)
    }

    /// A request came whose answer is known, and will be given later.
    pub(super) fn put_served(&self, slot: usize, ticket: Ticket) {
        let waiting = Waiting { seq: ticket.stamp.sequence, ticket, message: Vec::new(), taken: true };
        self.waiting.borrow_mut().insert(slot, waiting);
    }

    fn bits(&self) -> u64 {
        self.waiting.borrow().iter().filter(|(_, w)| !w.taken).fold(0, |bits, (slot, _)| bits | 1 << slot)
    }

    fn take(&self, slot: usize, buffer: &mut [u8]) -> Option<(u64, Result<SlotRequest, Code>)> {
        let mut waiting = self.waiting.borrow_mut();
        let w = waiting.get_mut(&slot).filter(|w| !w.taken)?;
        w.taken = true;
        let len = w.message.len();
        let request = match buffer.get_mut(..len) {
            Some(room) => {
                room.copy_from_slice(&w.message);
                Ok(SlotRequest { slot, seq: w.seq, len })
            }
            None => Err(Code::Malformed),
        };
        Some((w.seq, request))
    }

    fn answer(&self, slot: usize, reply: &[u8]) {
        if let Some(w) = self.waiting.borrow_mut().remove(&slot) {
            self.orders.give(Order::Answer { ticket: w.ticket, reply: reply.to_vec() });
        }
    }
}

/// How a process asks.
#[derive(Debug)]
pub(super) enum Door {
    /// By its ring.
    Ring(ServedRing),
    /// By the network.
    Remote(RemoteSlots),
}

impl Door {
    /// The ring of a process of this node.
    pub(super) fn ring(&self) -> Option<&ServedRing> {
        match self {
            Door::Ring(ring) => Some(ring),
            Door::Remote(_) => None,
        }
    }

    /// True when a request may be waiting.
    #[inline]
    pub(super) fn has_pending(&self) -> bool {
        match self {
            Door::Ring(ring) => ring.has_pending(),
            Door::Remote(slots) => slots.bits() != 0,
        }
    }

    /// Takes up to `most` slots with new requests, as bits.
    #[inline]
    pub(super) fn take_pending(&self, most: usize) -> u64 {
        match self {
            Door::Ring(ring) => ring.take_pending(most),
            // What is taken out of its slot does not come again.
            Door::Remote(slots) => {
                let mut bits = slots.bits();
                while bits.count_ones() as usize > most {
                    bits &= bits - 1;
                }
                bits
            }
        }
    }

    /// Copies a request out, once.
    #[inline]
    pub(super) fn take(&self, slot: usize, buffer: &mut [u8]) -> Option<(u64, Result<SlotRequest, Code>)> {
        match self {
            Door::Ring(ring) => ring.take(slot, buffer),
            Door::Remote(slots) => slots.take(slot, buffer),
        }
    }

    /// Answers.
    #[inline]
    pub(super) fn answer(&self, slot: usize, reply: &[u8]) {
        match self {
            Door::Ring(ring) => ring.answer(slot, reply),
            Door::Remote(slots) => slots.answer(slot, reply),
        }
    }
}
