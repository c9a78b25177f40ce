//! Eager buffers: memory of a node into which another node writes data before it sends the request that names them
//! (docs/decisions/0018). A write of data then takes one message each way; it takes two where the file's node fetches
//! the data.
//!
//! ```text
//!  writer's node ([`RemoteBuffers`]): take a buffer ─► transfer, WriteStripe right behind ─► reply: the buffer is free
//!  file's node ([`GrantedBuffers`]):  canary ─► … the canary is gone: data have arrived ─► written ─► canary ─► reply
//! ```
//! Data arrive from the first byte to the last, and end where the buffer ends. So the buffer's last byte shows whether
//! all data have arrived: until then it is the *canary*. Data whose last byte equals the canary do not use the buffer.
//!
//! A buffer whose transfer may still be in flight is never reused. The writer retires a buffer when its transfer or its
//! request failed, and all buffers when the link to the node was made again; then it requests a new grant. The file's
//! node retires a buffer when it found the canary, because the data may arrive late. It retires all buffers of a grant
//! when the writer requests a new grant, has left, or has restarted. Their memory is then unregistered and quarantined,
//! as clients' buffers are.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use forebay_fabric::{Access, Endpoint, Local, Region, Ticket};
use forebay_types::limits::{
    EAGER_BUFFERS, EAGER_BUFFER_BYTES, EAGER_GRANTS_MAX, EAGER_GRANTS_QUARANTINED_MAX, MOVE_ABOVE_BYTES,
    NODE_TIMEOUT_MS, QUARANTINE_MS,
};
use forebay_types::{Code, NodeId};
use forebay_wire::Memory;

/// The pause after a request for a grant that was refused.
const PAUSE: Duration = Duration::from_secs(5);
/// Grants of one node whose memory is in quarantine. With so many, the node gets no other grant.
const QUARANTINED_MAX: usize = 2;
/// In place of the number of completions that are pending: the buffer is retired.
const RETIRED: u8 = u8::MAX;
/// Retired buffers of a grant after which a new grant is requested.
const RETIRED_MAX: usize = EAGER_BUFFERS / 2;

/// The canary of a buffer. Neighbours have different ones. None is 0, a byte that files are full of.
fn canary(buffer: u16) -> u8 {
    0xa7 ^ buffer as u8
}

// --- on the node that has the files

/// A buffer of a grant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BufferId {
    node: NodeId,
    incarnation: u64,
    grant: u32,
    buffer: u16,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Its last byte is the canary.
    Ready,
    /// It holds the data of a request.
    InUse,
    /// Data may arrive late.
    Retired,
}

/// The last grant to one incarnation of another node.
#[derive(Debug)]
struct Grant {
    incarnation: u64,
    number: u32,
    memory: Arc<Region>,
    local: Local,
    remote: Memory,
    states: [State; EAGER_BUFFERS],
    /// The last generation of each buffer that a request named.
    generations: [u32; EAGER_BUFFERS],
}

/// All grants of this node.
#[derive(Debug, Default)]
pub(super) struct GrantedBuffers {
    grants: HashMap<NodeId, Grant>,
    /// Memory that a peer may still write: until when, and the peer.
    quarantined: Vec<(Duration, NodeId, Arc<Region>)>,
    /// A defect that a simulation plants: canaries are not checked.
    pub(super) trusts_canaries: bool,
}

impl GrantedBuffers {
    /// Grants buffers that replace those the node had. A retry gets the same grant.
    ///
    /// # Errors
    /// [`Code::Busy`] for too many grants; [`Code::Stale`] for a number that is not newer; the endpoint's errors.
    pub(super) fn grant(
        &mut self,
        endpoint: &mut dyn Endpoint,
        now: Duration,
        asker: &Ticket,
        number: u32,
    ) -> Result<Memory, Code> {
        if let Some(old) = self.grants.get(&asker.node) {
            let is_same = old.incarnation == asker.incarnation;
            if is_same && old.number == number {
                return Ok(old.remote);
            }
            if is_same && old.number > number {
                return Err(Code::Stale);
            }
        }
        // A node that requests grants again and again must not use up those of other nodes.
        let quarantined = self.quarantined.iter().filter(|(_, node, _)| *node == asker.node).count();
        let is_known = self.grants.contains_key(&asker.node);
        if quarantined >= QUARANTINED_MAX
            || self.quarantined.len() >= EAGER_GRANTS_QUARANTINED_MAX
            || self.grants.len() >= EAGER_GRANTS_MAX + usize::from(is_known)
        {
            return Err(Code::Busy);
        }
        if let Some(incarnation) = self.grants.get(&asker.node).map(|old| old.incarnation) {
            self.revoke(endpoint, now, asker.node, incarnation);
        }
        let memory = Arc::new(Region::new(EAGER_BUFFERS * EAGER_BUFFER_BYTES)?);
        for buffer in 0..EAGER_BUFFERS as u16 {
            memory.write_at(last_byte(buffer), &[canary(buffer)])?;
        }
        let registered = endpoint.register(Arc::clone(&memory), Access::WRITE)?;
        let grant = Grant {
            incarnation: asker.incarnation,
            number,
            memory,
            local: registered.local,
            remote: registered.remote,
            states: [State::Ready; EAGER_BUFFERS],
            generations: [0; EAGER_BUFFERS],
        };
        self.grants.insert(asker.node, grant);
        Ok(registered.remote)
    }

    /// Claims the data that a request expects in a buffer, if they have arrived. The buffer is in use until it is
    /// released.
    pub(super) fn claim(&mut self, asker: &Ticket, bytes: u64, said: BufferUse) -> Option<Arrived> {
        let BufferUse { grant: number, buffer, generation } = said;
        let grant = self.grants.get_mut(&asker.node)?;
        let is_its = grant.incarnation == asker.incarnation && grant.number == number;
        let last_generation = grant.generations.get_mut(usize::from(buffer)).filter(|_| is_its)?;
        // A duplicate: the buffer may belong to another request by now.
        if generation <= *last_generation {
            return None;
        }
        *last_generation = generation;
        let state = grant.states.get_mut(usize::from(buffer)).filter(|state| **state == State::Ready)?;
        let mut last = [0];
        let is_read = grant.memory.read_at(last_byte(buffer), &mut last).is_ok();
        if !is_read
            || !(1..=EAGER_BUFFER_BYTES as u64).contains(&bytes)
            || last[0] == canary(buffer) && !self.trusts_canaries
        {
            *state = State::Retired;
            return None;
        }
        *state = State::InUse;
        let at = last_byte(buffer) + 1 - bytes as usize;
        let of = BufferId { node: asker.node, incarnation: asker.incarnation, grant: number, buffer };
        Some(Arrived { memory: Arc::clone(&grant.memory), at, of })
    }

    /// Releases a buffer: with the reply to its request the writer may use it again.
    pub(super) fn release(&mut self, arrived: &Arrived) {
        let BufferId { node, incarnation, grant: number, buffer } = arrived.of;
        let grant = self.grants.get_mut(&node).filter(|g| g.incarnation == incarnation && g.number == number);
        let Some(grant) = grant else { return };
        let marked = grant.memory.write_at(last_byte(buffer), &[canary(buffer)]);
        grant.states[usize::from(buffer)] = if marked.is_ok() { State::Ready } else { State::Retired };
    }

    /// Ends the grant of a node's incarnation. Transfers may still be in flight.
    pub(super) fn revoke(
        &mut self,
        endpoint: &mut dyn Endpoint,
        now: Duration,
        node: NodeId,
        incarnation: u64,
    ) {
        if self.grants.get(&node).is_none_or(|grant| grant.incarnation != incarnation) {
            return;
        }
        if let Some(grant) = self.grants.remove(&node) {
            endpoint.unregister(grant.local);
            self.quarantined.push((now + Duration::from_millis(QUARANTINE_MS), node, grant.memory));
        }
    }

    /// Frees memory whose quarantine is over.
    pub(super) fn end_quarantines(&mut self, now: Duration) {
        end_quarantine(&mut self.quarantined, |(until, ..)| *until <= now, |(.., memory)| memory);
    }
}

/// Removes entries whose quarantine is over and whose memory nothing else refers to.
pub(super) fn end_quarantine<T>(
    quarantined: &mut Vec<T>,
    is_over: impl Fn(&T) -> bool,
    memory: impl Fn(&mut T) -> &mut Arc<Region>,
) {
    quarantined.retain_mut(|one| {
        if is_over(one) {
            if let Some(memory) = Arc::get_mut(memory(one)) {
                memory.quarantine();
                return false;
            }
        }
        true
    });
}

fn last_byte(buffer: u16) -> usize {
    usize::from(buffer) * EAGER_BUFFER_BYTES + EAGER_BUFFER_BYTES - 1
}

/// Data that have arrived in a buffer.
#[derive(Debug)]
pub(super) struct Arrived {
    /// The grant's memory, and the offset of the data in it.
    pub(super) memory: Arc<Region>,
    pub(super) at: usize,
    of: BufferId,
}

// --- on the node that writes

/// A use of a buffer, as a request names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BufferUse {
    pub(super) grant: u32,
    pub(super) buffer: u16,
    /// Incremented with each use of the buffer, from 1 on.
    pub(super) generation: u32,
}

/// A buffer that a request uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct UsedBuffer {
    node: NodeId,
    pub(super) of: BufferUse,
}

/// A grant from another node.
#[derive(Debug)]
struct RemoteGrant {
    number: u32,
    memory: Memory,
    free: Vec<u16>,
    /// Completions of each buffer in use that are pending: of its transfer and of its request.
    pending: [u8; EAGER_BUFFERS],
    generations: [u32; EAGER_BUFFERS],
    retired: usize,
}

/// The grants from other nodes.
#[derive(Debug, Default)]
pub(super) struct RemoteBuffers {
    buffers: HashMap<NodeId, RemoteGrant>,
    /// The number of the last request to each node, and until when there is no other.
    asked: HashMap<NodeId, (u32, Duration)>,
    number: u32,
}

impl RemoteBuffers {
    /// True for lengths that go through eager buffers.
    pub(super) fn fits(bytes: u64) -> bool {
        bytes > MOVE_ABOVE_BYTES as u64 && bytes <= EAGER_BUFFER_BYTES as u64
    }

    /// Takes a buffer for `bytes` bytes whose last is `last`. Returns the memory to write them to.
    pub(super) fn take(&mut self, node: NodeId, bytes: u64, last: u8) -> Option<(UsedBuffer, Memory)> {
        loop {
            let remote = self.buffers.get_mut(&node)?;
            let index = remote.free.iter().rposition(|buffer| canary(*buffer) != last)?;
            let buffer = remote.free.remove(index);
            let of_buffer = usize::from(buffer);
            let used =
                |generation| UsedBuffer { node, of: BufferUse { grant: remote.number, buffer, generation } };
            let Some(generation) = remote.generations[of_buffer].checked_add(1) else {
                // The buffer's generations are used up. Those of the next grant begin anew.
                let used = used(u32::MAX);
                self.retire(used);
                continue;
            };
            let used = used(generation);
            remote.generations[of_buffer] = generation;
            remote.pending[of_buffer] = 2;
            let at = last_byte(buffer) as u64 + 1 - bytes;
            let to = Memory { address: remote.memory.address + at, key: remote.memory.key };
            return Some((used, to));
        }
    }

    /// The number of the request for a grant that is to be sent to this node now, if one is due.
    pub(super) fn next_request(&mut self, node: NodeId, now: Duration) -> Option<u32> {
        if self.buffers.contains_key(&node) || self.asked.get(&node).is_some_and(|(_, until)| now < *until) {
            return None;
        }
        self.number += 1;
        self.asked.insert(node, (self.number, now + Duration::from_millis(NODE_TIMEOUT_MS)));
        Some(self.number)
    }

    /// A request for a grant has ended.
    pub(super) fn request_ended(&mut self, node: NodeId, number: u32, now: Duration) {
        if let Some((_, until)) = self.asked.get_mut(&node).filter(|(last, _)| *last == number) {
            *until = now + PAUSE;
        }
    }

    /// Adds a grant.
    pub(super) fn add_grant(&mut self, node: NodeId, number: u32, memory: Memory, buffers: u16, bytes: u32) {
        // A later request has ended this grant. And a node of another build may have buffers of another size.
        let is_last = self.asked.get(&node).is_some_and(|(last, _)| *last == number);
        if is_last && usize::from(buffers) == EAGER_BUFFERS && bytes as usize == EAGER_BUFFER_BYTES {
            let free = (0..buffers).rev().collect();
            let remote = RemoteGrant {
                number,
                memory,
                free,
                pending: [0; EAGER_BUFFERS],
                generations: [0; EAGER_BUFFERS],
                retired: 0,
            };
            self.buffers.insert(node, remote);
        }
    }

    fn of(&mut self, used: UsedBuffer) -> Option<&mut RemoteGrant> {
        self.buffers.get_mut(&used.node).filter(|remote| remote.number == used.of.grant)
    }

    /// The transfer into a buffer has ended, or its request was answered. With both, the buffer is free.
    pub(super) fn completed(&mut self, used: UsedBuffer) {
        let Some(remote) = self.of(used) else { return };
        match &mut remote.pending[usize::from(used.of.buffer)] {
            0 | &mut RETIRED => {}
            pending => {
                *pending -= 1;
                if *pending == 0 {
                    remote.free.push(used.of.buffer);
                }
            }
        }
    }

    /// Nothing was transferred into a buffer.
    pub(super) fn cancelled(&mut self, used: UsedBuffer) {
        self.completed(used);
        self.completed(used);
    }

    /// Retires a buffer: a transfer into it may still be in flight.
    pub(super) fn retire(&mut self, used: UsedBuffer) {
        let Some(remote) = self.of(used) else { return };
        let pending = std::mem::replace(&mut remote.pending[usize::from(used.of.buffer)], RETIRED);
        remote.retired += usize::from(pending != RETIRED);
        if remote.retired >= RETIRED_MAX {
            self.drop_grant(used.node);
            self.asked.remove(&used.node);
        }
    }

    /// Retires all buffers of a node: the link to it has ended, or is a new one.
    pub(super) fn drop_grant(&mut self, node: NodeId) {
        self.buffers.remove(&node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_fabric::simulated::{Faults, Network};
    use forebay_wire::Stamp;

    const NODE: NodeId = NodeId(2);

    fn asker(incarnation: u64) -> Ticket {
        Ticket { node: NODE, incarnation, request: 1, stamp: Stamp::default() }
    }

    #[test]
    fn data_are_claimed_once_and_only_where_the_canary_is_gone() {
        let network = Network::new(1, Faults::NONE);
        let (mut endpoint, now) = (network.endpoint(1), Duration::from_secs(1));
        let mut granted = GrantedBuffers::default();
        let remote = granted.grant(&mut endpoint, now, &asker(5), 7).unwrap();
        assert_eq!(granted.grant(&mut endpoint, now, &asker(5), 7), Ok(remote), "a retry");
        assert_eq!(granted.grant(&mut endpoint, now, &asker(5), 6), Err(Code::Stale));
        let memory = Arc::clone(&granted.grants[&NODE].memory);
        let of = |grant, buffer, generation| BufferUse { grant, buffer, generation };
        let bring = |buffer: u16| memory.write_at(last_byte(buffer) - 2, &[1, 2, 3]).unwrap();
        bring(3);
        assert!(granted.claim(&asker(6), 3, of(7, 3, 1)).is_none(), "another incarnation of the node");
        assert!(granted.claim(&asker(5), 3, of(8, 3, 1)).is_none(), "another grant");
        assert!(granted.claim(&asker(5), 3, of(7, EAGER_BUFFERS as u16, 1)).is_none(), "no such buffer");
        let arrived = granted.claim(&asker(5), 3, of(7, 3, 1)).unwrap();
        let mut bytes = [0; 3];
        arrived.memory.read_at(arrived.at, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 3]);
        assert!(granted.claim(&asker(5), 3, of(7, 3, 2)).is_none(), "it is in use");
        granted.release(&arrived);
        drop(arrived);
        bring(3);
        for old in [1, 2] {
            assert!(granted.claim(&asker(5), 3, of(7, 3, old)).is_none(), "a duplicate");
        }
        let arrived = granted.claim(&asker(5), 3, of(7, 3, 3)).expect("its generation is new");
        granted.release(&arrived);
        assert!(granted.claim(&asker(5), 3, of(7, 3, 4)).is_none(), "what it held was another request's");
        bring(3);
        assert!(
            granted.claim(&asker(5), 3, of(7, 3, 5)).is_none(),
            "these may be the ones that did not come"
        );
        for (generation, bytes) in (1..).zip([0, EAGER_BUFFER_BYTES as u64 + 1, u64::MAX]) {
            bring(4);
            assert!(granted.claim(&asker(5), bytes, of(7, 4, generation)).is_none(), "{bytes} bytes");
        }
        // A new grant, as of the next incarnation, replaces the old one, whose memory goes into quarantine.
        bring(5);
        let late = granted.claim(&asker(5), 3, of(7, 5, 1)).unwrap();
        assert_ne!(granted.grant(&mut endpoint, now, &asker(6), 1), Ok(remote));
        granted.release(&late);
        assert!(granted.claim(&asker(5), 3, of(7, 6, 1)).is_none() && granted.quarantined.len() == 1);
        let quarantined = now + Duration::from_millis(QUARANTINE_MS);
        granted.end_quarantines(quarantined);
        assert_eq!(granted.quarantined.len(), 1, "somebody has it");
        drop((late, arrived, memory));
        granted.end_quarantines(quarantined);
        assert!(granted.quarantined.is_empty());
    }

    #[test]
    fn grants_and_quarantined_memory_are_bounded() {
        let network = Network::new(1, Faults::NONE);
        let (mut endpoint, now) = (network.endpoint(1), Duration::ZERO);
        let mut granted = GrantedBuffers::default();
        let mut grant = |granted: &mut GrantedBuffers, node: usize, number| {
            let asker = Ticket { node: NodeId(node as u16), ..asker(1) };
            granted.grant(&mut endpoint, now, &asker, number)
        };
        for node in 0..EAGER_GRANTS_MAX {
            grant(&mut granted, node, 1).unwrap();
        }
        assert_eq!(grant(&mut granted, EAGER_GRANTS_MAX, 1), Err(Code::Busy));
        for node in 0..EAGER_GRANTS_QUARANTINED_MAX / QUARANTINED_MAX {
            let quarantined = (2..).take_while(|number| grant(&mut granted, node, *number).is_ok()).count();
            assert_eq!(quarantined, QUARANTINED_MAX, "and it keeps the last");
        }
        assert_eq!(grant(&mut granted, EAGER_GRANTS_MAX - 1, 2), Err(Code::Busy));
        assert_eq!(granted.grants.len(), EAGER_GRANTS_MAX);
    }

    #[test]
    fn buffer_is_free_again_when_transfer_and_request_have_ended_and_never_when_one_failed() {
        let mut taken = RemoteBuffers::default();
        let number = taken.next_request(NODE, Duration::ZERO).unwrap();
        assert_eq!(taken.next_request(NODE, PAUSE), None, "it was asked");
        taken.request_ended(NODE, number, Duration::ZERO);
        let number = taken.next_request(NODE, PAUSE).expect("it gave none");
        taken.add_grant(
            NODE,
            number,
            Memory { address: 1 << 20, key: 3 },
            EAGER_BUFFERS as u16,
            EAGER_BUFFER_BYTES as u32,
        );
        let (used, to) = taken.take(NODE, 100, 0).unwrap();
        assert_eq!(to.address, (1 << 20) + (last_byte(used.of.buffer) + 1 - 100) as u64);
        let mut all = vec![used];
        all.extend(std::iter::from_fn(|| taken.take(NODE, 100, 0)).map(|(used, _)| used));
        all.sort_by_key(|used| used.of.buffer);
        assert!(
            all.iter().enumerate().all(|(i, used)| usize::from(used.of.buffer) == i)
                && all.len() == EAGER_BUFFERS
        );
        taken.completed(used);
        assert!(taken.take(NODE, 100, 0).is_none());
        taken.completed(used);
        assert!(
            taken.take(NODE, 100, canary(used.of.buffer)).is_none(),
            "the data end in the byte of its canary"
        );
        let generation = |generation| UsedBuffer { of: BufferUse { generation, ..used.of }, ..used };
        assert_eq!(taken.take(NODE, 100, 0).unwrap().0, generation(2));
        taken.cancelled(generation(2));
        assert_eq!(taken.take(NODE, 100, 0).unwrap().0, generation(3));
        taken.retire(all[1]);
        taken.completed(all[1]);
        taken.completed(all[1]);
        taken.retire(all[1]);
        assert!(taken.take(NODE, 100, 0).is_none());
        all[2..RETIRED_MAX].iter().for_each(|used| taken.retire(*used));
        assert_eq!(taken.next_request(NODE, Duration::ZERO), None);
        taken.retire(all[RETIRED_MAX]);
        let next = taken.next_request(NODE, Duration::ZERO).expect("a new grant");
        taken.add_grant(
            NODE,
            next,
            Memory { address: 0, key: 4 },
            EAGER_BUFFERS as u16,
            EAGER_BUFFER_BYTES as u32,
        );
        (0..2).for_each(|_| taken.completed(used));
        assert_eq!(
            std::iter::from_fn(|| taken.take(NODE, 100, 0)).count(),
            EAGER_BUFFERS,
            "a buffer of the old grant is none of them"
        );
    }

    #[test]
    fn buffer_with_no_generation_left_is_retired_and_the_next_one_taken() {
        let mut taken = RemoteBuffers::default();
        let number = taken.next_request(NODE, Duration::ZERO).unwrap();
        let memory = Memory { address: 1 << 20, key: 3 };
        taken.add_grant(NODE, number, memory, EAGER_BUFFERS as u16, EAGER_BUFFER_BYTES as u32);
        for retired in 1..RETIRED_MAX {
            let (used, _) = taken.take(NODE, 100, 0).unwrap();
            taken.cancelled(used);
            taken.buffers.get_mut(&NODE).unwrap().generations[usize::from(used.of.buffer)] = u32::MAX;
            let (next, _) = taken.take(NODE, 100, 0).expect("the other buffers are free");
            assert_ne!(next.of.buffer, used.of.buffer);
            taken.cancelled(next);
            assert_eq!(taken.buffers[&NODE].retired, retired);
        }
        assert_eq!(taken.next_request(NODE, Duration::ZERO), None);
        taken.buffers.get_mut(&NODE).unwrap().generations = [u32::MAX; EAGER_BUFFERS];
        assert!(taken.take(NODE, 100, 0).is_none());
        taken.next_request(NODE, Duration::ZERO).expect("a new grant is due");
    }

    #[test]
    fn canaries_of_one_grant_differ_and_none_is_zero() {
        let all: std::collections::HashSet<u8> = (0..EAGER_BUFFERS as u16).map(canary).collect();
        assert!(all.len() == EAGER_BUFFERS && !all.contains(&0));
    }
}
