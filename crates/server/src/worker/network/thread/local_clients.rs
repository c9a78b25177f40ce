//! The processes of this node, as the network thread knows them: their rings, and their data requests in progress.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use forebay_types::limits::{MESSAGE_BYTES_MAX, RING_SLOTS};
use forebay_types::{Code, NodeId};
use forebay_wire::Stamp;

use crate::worker::attached_ring::AttachedRing;
use crate::worker::call::Call;
use crate::worker::channel::Channel;

/// A process of this node.
#[derive(Debug)]
struct LocalClient {
    ring: Arc<AttachedRing>,
    /// The sequence of the request in progress of each slot.
    in_progress: Box<[Option<u64>; RING_SLOTS]>,
    /// Nodes that keep state for the process.
    nodes: BTreeSet<NodeId>,
    /// The process has ended: no more requests are taken.
    has_ended: bool,
}

/// The processes of this node, by session.
#[derive(Debug, Default)]
pub(super) struct LocalClients {
    all: BTreeMap<u64, LocalClient>,
    /// The session whose ring is taken from first.
    first: u64,
    /// Memory into which a request is copied.
    scratch: Vec<u8>,
}

impl LocalClients {
    /// A process has attached.
    pub(super) fn attach(&mut self, session: u64, ring: Arc<AttachedRing>) {
        let in_progress = Box::new([None; RING_SLOTS]);
        let client = LocalClient { ring, in_progress, nodes: BTreeSet::new(), has_ended: false };
        self.all.insert(session, client);
    }

    /// A process has ended. Its requests in progress continue; no more are taken.
    pub(super) fn stop_taking(&mut self, session: u64) {
        if let Some(client) = self.all.get_mut(&session) {
            client.has_ended = true;
        }
    }

    /// Forgets a process. Returns the nodes that keep state for it.
    pub(super) fn detach(&mut self, session: u64) -> BTreeSet<NodeId> {
        self.all.remove(&session).map(|client| client.nodes).unwrap_or_default()
    }

    /// Records that a node keeps state for a process.
    pub(super) fn note_node(&mut self, session: u64, node: NodeId) {
        if let Some(client) = self.all.get_mut(&session) {
            client.nodes.insert(node);
        }
    }

    /// True when a process has posted a data request.
    #[inline]
    pub(super) fn have_requests(&self) -> bool {
        self.all.values().any(|client| !client.has_ended && client.ring.data_requests() != 0)
    }

    /// True when a data request was found since the last call that the shard thread has to take.
    pub(super) fn have_left_requests(&self) -> bool {
        self.all.values().filter(|client| client.ring.take_left()).count() > 0
    }

    /// Takes data requests from the rings in turn, until there are `most`, or up to one ring more: calls, and the
    /// stamps of requests that cannot be parsed.
    pub(super) fn take(&mut self, most: usize) -> Vec<Result<Call, (Stamp, Code)>> {
        let mut taken = Vec::new();
        let first = std::mem::take(&mut self.first);
        let in_turn = self.all.range(first..).chain(self.all.range(..first));
        let in_turn: Vec<u64> = in_turn.map(|(session, _)| *session).collect();
        for session in in_turn {
            if taken.len() >= most {
                self.first = session;
                break;
            }
            let Some(client) = self.all.get_mut(&session).filter(|client| !client.has_ended) else {
                continue;
            };
            let mut slots = client.ring.take_slots(client.ring.data_requests());
            while slots != 0 {
                let slot = slots.trailing_zeros() as usize;
                slots &= slots - 1;
                // No correct client posts on a slot before it has the reply.
                if client.in_progress[slot].is_some() {
                    continue;
                }
                self.scratch.resize(MESSAGE_BYTES_MAX, 0);
                let channel = Channel::Ring(Arc::clone(&client.ring));
                let Some((of, call)) = channel.take(session, slot, &mut self.scratch) else { continue };
                client.in_progress[slot] = Some(of.seq);
                let stamp = Stamp { session: of.session, slot: of.slot as u16, sequence: of.seq };
                taken.push(call.map_err(|code| (stamp, code)));
            }
        }
        taken
    }

    /// Records a request that the shard thread took from the ring. False when its process has ended, and reads no
    /// reply, or when the slot has a request in progress.
    pub(super) fn adopt(&mut self, call: &Call) -> bool {
        let client = self.all.get_mut(&call.client.session).filter(|client| !client.has_ended);
        let slot = client.and_then(|client| client.in_progress.get_mut(call.client.slot));
        let Some(slot) = slot.filter(|slot| slot.is_none()) else { return false };
        *slot = Some(call.client.seq);
        true
    }

    /// True while a request of the process is in progress.
    pub(super) fn is_served(&self, session: u64) -> bool {
        self.all.get(&session).is_some_and(|client| client.in_progress.iter().any(Option::is_some))
    }

    /// True for a process of this node that has not ended.
    pub(super) fn is_attached(&self, session: u64) -> bool {
        self.all.contains_key(&session)
    }

    /// Answers the slot of a request in progress, once. False for any other request.
    pub(super) fn answer(&mut self, stamp: Stamp, reply: &[u8]) -> bool {
        let Some(client) = self.all.get_mut(&stamp.session) else { return false };
        let slot = usize::from(stamp.slot);
        if client.in_progress.get(slot) != Some(&Some(stamp.sequence)) {
            return false;
        }
        client.in_progress[slot] = None;
        client.ring.answer(slot, reply);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use forebay_ring::{Doorbell, Ring, ServedRing};
    use forebay_types::{BackingId, BackingOp, Caller, Ino, Reply, Request};

    use super::*;

    const NODE: NodeId = NodeId(2);

    fn client(clients: &mut LocalClients, session: u64, doorbell: &OwnedFd) -> (Arc<AttachedRing>, Ring) {
        let (fd, ring) = ServedRing::create().unwrap();
        let ring = Arc::new(AttachedRing::new(ring));
        clients.attach(session, Arc::clone(&ring));
        (ring, Ring::open(fd.as_fd(), doorbell.as_fd()).unwrap())
    }

    fn post(ring: &Ring) -> forebay_ring::Claim<'_> {
        let (mut bytes, id) = ([0; 256], BackingId { target: 0, ino: Ino(7), number: 0, stripe: 0 });
        let request = Request::Backing { id, op: BackingOp::Make };
        let len = request.encode(Caller { uid: 0, gid: 0 }, &mut bytes).unwrap();
        let claim = ring.try_claim().unwrap();
        let _ = claim.post(&bytes[..len]);
        claim
    }

    fn stamps(taken: &[Result<Call, (Stamp, Code)>]) -> Vec<(u64, u16)> {
        taken
            .iter()
            .map(|call| call.as_ref().unwrap().stamp())
            .map(|stamp| (stamp.session, stamp.slot))
            .collect()
    }

    #[test]
    fn take_is_fair_between_rings_and_ends_with_the_process() {
        let (doorbell, _) = Doorbell::create().unwrap();
        let mut clients = LocalClients::default();
        let rings = [1, 2, 3].map(|session| client(&mut clients, session, &doorbell).1);
        let first: Vec<_> = rings.iter().flat_map(|ring| [post(ring), post(ring)]).collect();
        assert!(clients.have_requests());
        assert_eq!(stamps(&clients.take(2)), [(1, 0), (1, 1)]);
        let again = post(&rings[0]);
        assert_eq!(stamps(&clients.take(2)), [(2, 0), (2, 1)], "the next ring in turn");
        clients.stop_taking(3);
        assert_eq!(stamps(&clients.take(9)), [(1, 2)]);
        assert!(!clients.have_requests(), "what an ended process has posted is left");
        std::mem::forget((first, again));
    }

    #[test]
    fn request_that_the_shard_thread_has_to_take_is_left_and_found_once() {
        let (doorbell, _) = Doorbell::create().unwrap();
        let mut clients = LocalClients::default();
        let (served, ring) = client(&mut clients, 5, &doorbell);
        served.set_obliged(0, true);
        let claim = post(&ring);
        assert!(!clients.have_requests() && clients.have_left_requests() && !clients.have_left_requests());
        served.set_obliged(0, false);
        assert!(clients.have_requests() && !clients.have_left_requests());
        std::mem::forget(claim);
    }

    #[test]
    fn answer_reaches_the_slot_once_and_only_for_requests_that_were_taken_here() {
        let (doorbell, _) = Doorbell::create().unwrap();
        let mut clients = LocalClients::default();
        let (served, ring) = client(&mut clients, 5, &doorbell);
        let claim = post(&ring);
        let stamp = Stamp { session: 5, slot: 0, sequence: 1 };
        let mut bytes = [0; 16];
        let reply = Reply::encode(&Ok(Reply::Done), &mut bytes).map(|n| &bytes[..n]).unwrap();
        assert!(!clients.answer(stamp, reply), "it was not taken");
        // The shard thread takes it and hands it over.
        assert_eq!(served.take_pending(64), 1);
        let mut scratch = vec![0; MESSAGE_BYTES_MAX];
        let (_, call) = Channel::Ring(Arc::clone(&served)).take(5, 0, &mut scratch).unwrap();
        let call = call.unwrap();
        assert!(clients.adopt(&call) && clients.is_served(5));
        // A client that marks the slot as pending again, while its request is in progress, is not served twice.
        assert!(!clients.adopt(&call));
        served.repend(0);
        assert!(clients.have_requests() && clients.take(9).is_empty() && !clients.have_requests());
        for other in [Stamp { sequence: 2, ..stamp }, Stamp { slot: 1, ..stamp }, Stamp { slot: 64, ..stamp }]
        {
            assert!(!clients.answer(other, reply), "{other:?}");
        }
        assert!(clients.answer(stamp, reply) && !clients.answer(stamp, reply) && !clients.is_served(5));
        assert!(claim.is_answered());
        clients.note_node(5, NODE);
        assert_eq!(clients.detach(5), BTreeSet::from([NODE]));
        assert!(!clients.answer(stamp, reply));
        claim.finish(&mut [0; 64], &|| true, |_, _| ()).unwrap();
    }
}
