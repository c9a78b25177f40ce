//! The ring of a process of this node, from which two threads of the worker take requests.
//!
//! A request for data (`Class::Data`) needs no shard: the network thread takes it, serves it or sends it to another
//! node, and writes the reply into the slot. The shard thread takes every other request. It also takes data requests
//! that it finds first, for example while the network thread sleeps, and hands them over as commands. A slot belongs to
//! the thread that cleared its pending bit, until the slot is answered.
//!
//! The shard thread learns one thing from every request of a slot: the client has finished what the slot's last reply
//! called for, such as the creation or removal of a backing file. So the network thread leaves a slot alone while its
//! last reply has left such an obligation (docs/decisions/0040). The shard thread records that here before it answers.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use forebay_ring::ServedRing;
use forebay_types::is_for_data;

/// See the module.
#[derive(Debug)]
pub(super) struct AttachedRing {
    ring: ServedRing,
    /// A bit for each slot whose last reply left an obligation. The shard thread writes it.
    obliged: AtomicU64,
    /// The network thread has left a request to the shard thread.
    left: AtomicBool,
}

impl AttachedRing {
    pub(super) fn new(ring: ServedRing) -> AttachedRing {
        AttachedRing { ring, obliged: AtomicU64::new(0), left: AtomicBool::new(false) }
    }

    /// Records whether the reply that the slot gets next, or the last one, leaves an obligation.
    #[inline]
    pub(super) fn set_obliged(&self, slot: usize, is_obliged: bool) {
        let before = self.obliged.load(Ordering::Relaxed);
        let after = before & !(1 << slot) | u64::from(is_obliged) << slot;
        if after != before {
            self.obliged.store(after, Ordering::Release);
        }
    }

    /// The slots with data requests that the network thread may take, as bits. If there are others, [`Self::take_left`]
    /// says so: their clients may have woken no thread, because the network thread is awake.
    #[inline]
    pub(super) fn data_requests(&self) -> u64 {
        if !self.ring.has_pending() {
            return 0;
        }
        // A request follows the reply before it, so this bit is as the shard thread left it with that reply.
        let is_wanted = |slot: usize, number| {
            let is_obliged = self.obliged.load(Ordering::Acquire) >> slot & 1 == 1;
            if is_for_data(number) && is_obliged {
                self.left.store(true, Ordering::Relaxed);
            }
            is_for_data(number) && !is_obliged
        };
        self.ring.pending_where(is_wanted)
    }

    /// True if a data request was left to the shard thread since the last call.
    #[inline]
    pub(super) fn take_left(&self) -> bool {
        self.left.load(Ordering::Relaxed) && self.left.swap(false, Ordering::Relaxed)
    }
}

impl Deref for AttachedRing {
    type Target = ServedRing;

    fn deref(&self) -> &ServedRing {
        &self.ring
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use forebay_ring::{Doorbell, Ring};
    use forebay_types::{BackingId, BackingOp, Caller, Ino, Request};

    use super::*;

    const CALLER: Caller = Caller { uid: 0, gid: 0 };

    fn post(ring: &Ring, request: &Request<'_>) {
        let mut bytes = [0; 256];
        let len = request.encode(CALLER, &mut bytes).unwrap();
        let claim = ring.try_claim().unwrap();
        let _ = claim.post(&bytes[..len]);
        std::mem::forget(claim);
    }

    #[test]
    fn data_requests_are_those_of_slots_without_an_obligation_and_each_goes_to_one_taker() {
        let (doorbell, _) = Doorbell::create().unwrap();
        let (fd, ring) = ServedRing::create().unwrap();
        let (ring, client) = (AttachedRing::new(ring), Ring::open(fd.as_fd(), doorbell.as_fd()).unwrap());
        let id = BackingId { target: 0, ino: Ino(7), number: 0, stripe: 0 };
        let data = Request::Backing { id, op: BackingOp::Make };
        for request in [&data, &Request::Ping, &data, &Request::GetAttr { ino: Ino(7) }, &data] {
            post(&client, request);
        }
        assert_eq!(ring.data_requests(), 0b10101);
        ring.set_obliged(3, true);
        assert!(ring.data_requests() == 0b10101 && !ring.take_left());
        ring.set_obliged(2, true);
        assert_eq!(ring.data_requests(), 0b10001);
        assert!(ring.take_left() && !ring.take_left(), "the shard thread takes it");
        assert_eq!(ring.take_slots(ring.data_requests()), 0b10001);
        assert_eq!((ring.data_requests(), ring.take_slots(0b10001)), (0, 0), "taken");
        assert_eq!(ring.take_pending(64), 0b01110, "the shard thread takes all that is left");
        ring.set_obliged(2, false);
        post(&client, &data);
        assert_eq!((ring.take_pending(64), ring.data_requests()), (1 << 5, 0));
    }
}
