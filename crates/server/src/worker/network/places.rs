//! Places: memory of a node that another one writes by itself, each ahead of the request that says what the data are
//! for (docs/decisions/0018). So a write of data takes one way there and one back, where it takes two when its node
//! fetches them.
//!
//! ```text
//!  writer's node ([`Taken`]):   place ─► transfer into it, and WriteStripe right behind ─────────────► answer: the place is free
//!  file's node ([`Granted`]):   mark ─► … the mark is gone: the data are there ─► written ─► mark ─► answer
//! ```
//! Data end where the place does, and come from the first byte to the last; so the last one of a place says whether all are there: it is the
//! place's mark until then, and a place whose mark it is is not taken for data that end in the same byte.
//!
//! Whoever does not know whether a place may still be written never uses it again. The writer gives up a place when its
//! transfer or its request failed, all when the link to the node was made anew, and then takes a new grant. The file's
//! node gives up a place when it found the mark, as the data may come late; all when the writer takes a new grant, has
//! left, or is another start of its node: their memory is unregistered then, and rests as clients' buffers do.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use forebay_fabric::{Access, Endpoint, Local, Region, Ticket};
use forebay_types::limits::{
    BUFFER_REST_MS, GRANTS_MAX, GRANTS_RESTING_MAX, MOVE_ABOVE_BYTES, NODE_TIMEOUT_MS, PLACES, PLACE_BYTES,
};
use forebay_types::{Code, NodeId};
use forebay_wire::Memory;

/// How long a node that granted nothing is not asked again.
const PAUSE: Duration = Duration::from_secs(5);
/// Grants of one node whose memory rests, and it gets no other.
const RESTING_MAX: usize = 2;
/// Beside what is still to be heard of a place: it is given up.
const LOST: u8 = u8::MAX;
/// So many places of a grant that are given up, and a new one is taken.
const LOST_MAX: usize = PLACES / 2;

/// What stands in the last byte of a place until data have come: neighbours have different ones, and none is 0, of
/// which files are full.
fn mark(place: u16) -> u8 {
    0xa7 ^ place as u8
}

// --- at the node that has the files

/// Which place of which grant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PlaceId {
    node: NodeId,
    incarnation: u64,
    grant: u32,
    place: u16,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// It has its mark.
    Marked,
    /// It holds the data of a request.
    InUse,
    /// Data may come late.
    Lost,
}

/// What a start of another node was granted last.
#[derive(Debug)]
struct Grant {
    incarnation: u64,
    number: u32,
    memory: Arc<Region>,
    local: Local,
    told: Memory,
    states: [State; PLACES],
    /// Which use of each was asked about last.
    turns: [u32; PLACES],
}

/// All grants of this node.
#[derive(Debug, Default)]
pub(super) struct Granted {
    grants: HashMap<NodeId, Grant>,
    /// Memory that a peer may write yet, which, and until when.
    resting: Vec<(Duration, NodeId, Arc<Region>)>,
    /// A defect that a simulation plants: marks are not looked at.
    pub(super) trusting: bool,
}

impl Granted {
    /// Grants places, in the stead of those that the node had; who asks again for the same gets the same.
    ///
    /// # Errors
    /// [`Code::Busy`] where there are too many, [`Code::Stale`] for a number that is not newer, and what the endpoint says.
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
                return Ok(old.told);
            }
            if is_same && old.number > number {
                return Err(Code::Stale);
            }
        }
        // One that asks again and again is not to keep the others from theirs.
        let rested = self.resting.iter().filter(|(_, node, _)| *node == asker.node).count();
        let is_known = self.grants.contains_key(&asker.node);
        if rested >= RESTING_MAX
            || self.resting.len() >= GRANTS_RESTING_MAX
            || self.grants.len() >= GRANTS_MAX + usize::from(is_known)
        {
            return Err(Code::Busy);
        }
        if let Some(incarnation) = self.grants.get(&asker.node).map(|old| old.incarnation) {
            self.leave(endpoint, now, asker.node, incarnation);
        }
        let memory = Arc::new(Region::new(PLACES * PLACE_BYTES)?);
        for place in 0..PLACES as u16 {
            memory.write_at(last_byte(place), &[mark(place)])?;
        }
        let registered = endpoint.register(Arc::clone(&memory), Access::WRITE)?;
        let grant = Grant {
            incarnation: asker.incarnation,
            number,
            memory,
            local: registered.local,
            told: registered.remote,
            states: [State::Marked; PLACES],
            turns: [0; PLACES],
        };
        self.grants.insert(asker.node, grant);
        Ok(registered.remote)
    }

    /// The data that a request says are in a place, if they are: nobody else has them until they are given back.
    pub(super) fn claim(&mut self, asker: &Ticket, bytes: u64, said: Use) -> Option<Arrived> {
        let Use { grant: number, place, turn } = said;
        let grant = self.grants.get_mut(&asker.node)?;
        let is_its = grant.incarnation == asker.incarnation && grant.number == number;
        let last_turn = grant.turns.get_mut(usize::from(place)).filter(|_| is_its)?;
        // A message that came twice says nothing of the place, which another request may have by now.
        if turn <= *last_turn {
            return None;
        }
        *last_turn = turn;
        let state = grant.states.get_mut(usize::from(place)).filter(|state| **state == State::Marked)?;
        let mut last = [0];
        let is_read = grant.memory.read_at(last_byte(place), &mut last).is_ok();
        if !is_read || !(1..=PLACE_BYTES as u64).contains(&bytes) || last[0] == mark(place) && !self.trusting
        {
            *state = State::Lost;
            return None;
        }
        *state = State::InUse;
        let at = last_byte(place) + 1 - bytes as usize;
        let of = PlaceId { node: asker.node, incarnation: asker.incarnation, grant: number, place };
        Some(Arrived { memory: Arc::clone(&grant.memory), at, of })
    }

    /// Nobody needs a request's data any more: by the answer to it the place is its owner's again.
    pub(super) fn give_back(&mut self, arrived: &Arrived) {
        let PlaceId { node, incarnation, grant: number, place } = arrived.of;
        let grant = self.grants.get_mut(&node).filter(|g| g.incarnation == incarnation && g.number == number);
        let Some(grant) = grant else { return };
        let marked = grant.memory.write_at(last_byte(place), &[mark(place)]);
        grant.states[usize::from(place)] = if marked.is_ok() { State::Marked } else { State::Lost };
    }

    /// This start of a node writes its places no more, but for what is under way.
    pub(super) fn leave(
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
            self.resting.push((now + Duration::from_millis(BUFFER_REST_MS), node, grant.memory));
        }
    }

    /// Lets go of memory that has rested.
    pub(super) fn wake_rested(&mut self, now: Duration) {
        bury_rested(&mut self.resting, |(until, ..)| *until <= now, |(.., memory)| memory);
    }
}

/// Takes out what has rested and nobody has any more, and buries its memory.
pub(super) fn bury_rested<T>(
    resting: &mut Vec<T>,
    has_rested: impl Fn(&T) -> bool,
    memory: impl Fn(&mut T) -> &mut Arc<Region>,
) {
    resting.retain_mut(|one| {
        if has_rested(one) {
            if let Some(memory) = Arc::get_mut(memory(one)) {
                memory.quarantine();
                return false;
            }
        }
        true
    });
}

fn last_byte(place: u16) -> usize {
    usize::from(place) * PLACE_BYTES + PLACE_BYTES - 1
}

/// Data that have come into a place.
#[derive(Debug)]
pub(super) struct Arrived {
    /// With where in it they begin.
    pub(super) memory: Arc<Region>,
    pub(super) at: usize,
    of: PlaceId,
}

// --- at the node that writes

/// A use of a place, as a request says it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Use {
    pub(super) grant: u32,
    pub(super) place: u16,
    /// Rises with each use of the place, from 1 on.
    pub(super) turn: u32,
}

/// A place that is used by a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Used {
    node: NodeId,
    pub(super) of: Use,
}

/// Places of another node.
#[derive(Debug)]
struct Taking {
    number: u32,
    memory: Memory,
    free: Vec<u16>,
    /// What is still to be heard of those that are used: of the transfer and of the request.
    unheard: [u8; PLACES],
    turns: [u32; PLACES],
    lost: usize,
}

/// What other nodes have granted to this one.
#[derive(Debug, Default)]
pub(super) struct Taken {
    places: HashMap<NodeId, Taking>,
    /// The number that nodes were asked for last, and until when for no other.
    asked: HashMap<NodeId, (u32, Duration)>,
    number: u32,
}

impl Taken {
    /// True for data that go into places.
    pub(super) fn is_for(bytes: u64) -> bool {
        bytes > MOVE_ABOVE_BYTES as u64 && bytes <= PLACE_BYTES as u64
    }

    /// A place for so many bytes that end in `last`, and where they are to be brought.
    pub(super) fn take(&mut self, node: NodeId, bytes: u64, last: u8) -> Option<(Used, Memory)> {
        let taking = self.places.get_mut(&node)?;
        let index = taking.free.iter().rposition(|place| mark(*place) != last)?;
        let place = taking.free[index];
        // One that was used so often is used no more.
        let turn = taking.turns[usize::from(place)].checked_add(1)?;
        taking.free.remove(index);
        taking.turns[usize::from(place)] = turn;
        taking.unheard[usize::from(place)] = 2;
        let at = last_byte(place) as u64 + 1 - bytes;
        let to = Memory { address: taking.memory.address + at, key: taking.memory.key };
        Some((Used { node, of: Use { grant: taking.number, place, turn } }, to))
    }

    /// The number by which this node is to be asked for places, if it is.
    pub(super) fn asks(&mut self, node: NodeId, now: Duration) -> Option<u32> {
        if self.places.contains_key(&node) || self.asked.get(&node).is_some_and(|(_, until)| now < *until) {
            return None;
        }
        self.number += 1;
        self.asked.insert(node, (self.number, now + Duration::from_millis(NODE_TIMEOUT_MS)));
        Some(self.number)
    }

    /// A node has answered, or will not any more.
    pub(super) fn was_answered(&mut self, node: NodeId, number: u32, now: Duration) {
        if let Some((_, until)) = self.asked.get_mut(&node).filter(|(last, _)| *last == number) {
            *until = now + PAUSE;
        }
    }

    /// A node has granted places.
    pub(super) fn granted(&mut self, node: NodeId, number: u32, memory: Memory, places: u16, bytes: u32) {
        // When it was asked for another, it took these back. And a node of another build may have others.
        let is_last = self.asked.get(&node).is_some_and(|(last, _)| *last == number);
        if is_last && usize::from(places) == PLACES && bytes as usize == PLACE_BYTES {
            let free = (0..places).rev().collect();
            let taking = Taking { number, memory, free, unheard: [0; PLACES], turns: [0; PLACES], lost: 0 };
            self.places.insert(node, taking);
        }
    }

    fn of(&mut self, used: Used) -> Option<&mut Taking> {
        self.places.get_mut(&used.node).filter(|taking| taking.number == used.of.grant)
    }

    /// The transfer into a place has ended, or its request was answered: with both it is free.
    pub(super) fn heard(&mut self, used: Used) {
        let Some(taking) = self.of(used) else { return };
        match &mut taking.unheard[usize::from(used.of.place)] {
            0 | &mut LOST => {}
            unheard => {
                *unheard -= 1;
                if *unheard == 0 {
                    taking.free.push(used.of.place);
                }
            }
        }
    }

    /// Nothing was brought to a place.
    pub(super) fn unused(&mut self, used: Used) {
        self.heard(used);
        self.heard(used);
    }

    /// Whether a place may still be written, nobody knows.
    pub(super) fn lost(&mut self, used: Used) {
        let Some(taking) = self.of(used) else { return };
        let unheard = std::mem::replace(&mut taking.unheard[usize::from(used.of.place)], LOST);
        taking.lost += usize::from(unheard != LOST);
        if taking.lost >= LOST_MAX {
            self.leave(used.node);
            self.asked.remove(&used.node);
        }
    }

    /// The link to a node is another, or none: what of its memory may still be written, nobody knows.
    pub(super) fn leave(&mut self, node: NodeId) {
        self.places.remove(&node);
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
    fn data_are_claimed_once_and_only_where_the_mark_is_gone() {
        let network = Network::new(1, Faults::NONE);
        let (mut endpoint, now) = (network.endpoint(1), Duration::from_secs(1));
        let mut granted = Granted::default();
        let told = granted.grant(&mut endpoint, now, &asker(5), 7).unwrap();
        assert_eq!(granted.grant(&mut endpoint, now, &asker(5), 7), Ok(told), "a retry");
        assert_eq!(granted.grant(&mut endpoint, now, &asker(5), 6), Err(Code::Stale));
        let memory = Arc::clone(&granted.grants[&NODE].memory);
        let of = |grant, place, turn| Use { grant, place, turn };
        let bring = |place: u16| memory.write_at(last_byte(place) - 2, &[1, 2, 3]).unwrap();
        bring(3);
        assert!(granted.claim(&asker(6), 3, of(7, 3, 1)).is_none(), "another start of the node");
        assert!(granted.claim(&asker(5), 3, of(8, 3, 1)).is_none(), "another grant");
        assert!(granted.claim(&asker(5), 3, of(7, PLACES as u16, 1)).is_none(), "no such place");
        let arrived = granted.claim(&asker(5), 3, of(7, 3, 1)).unwrap();
        let mut bytes = [0; 3];
        arrived.memory.read_at(arrived.at, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 3]);
        assert!(granted.claim(&asker(5), 3, of(7, 3, 2)).is_none(), "it is in use");
        granted.give_back(&arrived);
        drop(arrived);
        bring(3);
        for old in [1, 2] {
            assert!(granted.claim(&asker(5), 3, of(7, 3, old)).is_none(), "a message that came twice");
        }
        let arrived = granted.claim(&asker(5), 3, of(7, 3, 3)).expect("of which the place knows nothing");
        granted.give_back(&arrived);
        assert!(granted.claim(&asker(5), 3, of(7, 3, 4)).is_none(), "what it held was another request's");
        bring(3);
        assert!(
            granted.claim(&asker(5), 3, of(7, 3, 5)).is_none(),
            "these may be the ones that did not come"
        );
        for (turn, bytes) in (1..).zip([0, PLACE_BYTES as u64 + 1, u64::MAX]) {
            bring(4);
            assert!(granted.claim(&asker(5), bytes, of(7, 4, turn)).is_none(), "{bytes} bytes");
        }
        // A new grant, as of the next start, takes the old one's stead, whose memory rests.
        bring(5);
        let late = granted.claim(&asker(5), 3, of(7, 5, 1)).unwrap();
        assert_ne!(granted.grant(&mut endpoint, now, &asker(6), 1), Ok(told));
        granted.give_back(&late);
        assert!(granted.claim(&asker(5), 3, of(7, 6, 1)).is_none() && granted.resting.len() == 1);
        let rested = now + Duration::from_millis(BUFFER_REST_MS);
        granted.wake_rested(rested);
        assert_eq!(granted.resting.len(), 1, "somebody has it");
        drop((late, arrived, memory));
        granted.wake_rested(rested);
        assert!(granted.resting.is_empty());
    }

    #[test]
    fn grants_and_memory_at_rest_are_bounded() {
        let network = Network::new(1, Faults::NONE);
        let (mut endpoint, now) = (network.endpoint(1), Duration::ZERO);
        let mut granted = Granted::default();
        let mut grant = |granted: &mut Granted, node: usize, number| {
            let asker = Ticket { node: NodeId(node as u16), ..asker(1) };
            granted.grant(&mut endpoint, now, &asker, number)
        };
        for node in 0..GRANTS_MAX {
            grant(&mut granted, node, 1).unwrap();
        }
        assert_eq!(grant(&mut granted, GRANTS_MAX, 1), Err(Code::Busy));
        for node in 0..GRANTS_RESTING_MAX / RESTING_MAX {
            let rested = (2..).take_while(|number| grant(&mut granted, node, *number).is_ok()).count();
            assert_eq!(rested, RESTING_MAX, "and it keeps the last");
        }
        assert_eq!(grant(&mut granted, GRANTS_MAX - 1, 2), Err(Code::Busy));
        assert_eq!(granted.grants.len(), GRANTS_MAX);
    }

    #[test]
    fn place_is_free_again_when_transfer_and_request_have_ended_and_never_when_one_failed() {
        let mut taken = Taken::default();
        let number = taken.asks(NODE, Duration::ZERO).unwrap();
        assert_eq!(taken.asks(NODE, PAUSE), None, "it was asked");
        taken.was_answered(NODE, number, Duration::ZERO);
        let number = taken.asks(NODE, PAUSE).expect("it gave none");
        taken.granted(NODE, number, Memory { address: 1 << 20, key: 3 }, PLACES as u16, PLACE_BYTES as u32);
        let (used, to) = taken.take(NODE, 100, 0).unwrap();
        assert_eq!(to.address, (1 << 20) + (last_byte(used.of.place) + 1 - 100) as u64);
        let mut all = vec![used];
        all.extend(std::iter::from_fn(|| taken.take(NODE, 100, 0)).map(|(used, _)| used));
        all.sort_by_key(|used| used.of.place);
        assert!(
            all.iter().enumerate().all(|(i, used)| usize::from(used.of.place) == i) && all.len() == PLACES
        );
        taken.heard(used);
        assert!(taken.take(NODE, 100, 0).is_none());
        taken.heard(used);
        assert!(taken.take(NODE, 100, mark(used.of.place)).is_none(), "the data end in its mark");
        let turn = |turn| Used { of: Use { turn, ..used.of }, ..used };
        assert_eq!(taken.take(NODE, 100, 0).unwrap().0, turn(2));
        taken.unused(turn(2));
        assert_eq!(taken.take(NODE, 100, 0).unwrap().0, turn(3));
        taken.lost(all[1]);
        taken.heard(all[1]);
        taken.heard(all[1]);
        taken.lost(all[1]);
        assert!(taken.take(NODE, 100, 0).is_none());
        all[2..LOST_MAX].iter().for_each(|used| taken.lost(*used));
        assert_eq!(taken.asks(NODE, Duration::ZERO), None);
        taken.lost(all[LOST_MAX]);
        let next = taken.asks(NODE, Duration::ZERO).expect("a new grant");
        taken.granted(NODE, next, Memory { address: 0, key: 4 }, PLACES as u16, PLACE_BYTES as u32);
        (0..2).for_each(|_| taken.heard(used));
        assert_eq!(
            std::iter::from_fn(|| taken.take(NODE, 100, 0)).count(),
            PLACES,
            "an old place is none of them"
        );
    }

    #[test]
    fn marks_of_one_grant_differ_and_none_is_zero() {
        let all: std::collections::HashSet<u8> = (0..PLACES as u16).map(mark).collect();
        assert!(all.len() == PLACES && !all.contains(&0));
    }
}
