//! Memory of a process as the endpoint has it registered: in ranges of bounded size, one after the other, because to register
//! or to unregister memory may take as long as the kernel needs for all of its pages, and all clients share the network
//! thread. Only one thread at a time may use the endpoint, so no other thread can do it.
//!
//! Each range has as many bytes more as one request names at most. So the bytes of a request lie in one range.
//!
//! A round registers and unregisters ranges of about [`REGISTRATION_BYTES`] each way ([`cost`]), and unregisters no less than
//! it has registered, so that what is to be unregistered does not grow without bound.

use std::collections::VecDeque;
use std::sync::Arc;

use forebay_fabric::{Access, Endpoint, Local, Region, Registered};
use forebay_types::limits::{BUFFER_BYTES, MOVE_BYTES_MAX, REGISTRATION_BYTES};
use forebay_types::Code;
use forebay_wire::Memory;

use crate::worker::network::unmapping::Unmapping;

/// The place of a request's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RegisteredPlace {
    /// The endpoint's number of its range, and the offset in that.
    pub(super) local: Local,
    pub(super) local_offset: usize,
    /// Its address for peers.
    pub(super) remote: Memory,
}

/// The bytes that a range of so many counts in a round. A short one also needs a call of the network's library.
pub(super) fn cost(bytes: usize) -> usize {
    bytes.clamp(MOVE_BYTES_MAX, REGISTRATION_BYTES)
}

/// The ranges of some memory that are registered.
#[derive(Debug, Default)]
pub(super) struct RegisteredRanges(Vec<Registered>);

impl RegisteredRanges {
    /// What the next range of the memory counts in a round.
    pub(super) fn next_cost(&self, memory: &Region) -> usize {
        cost(memory.len().saturating_sub(self.0.len() * REGISTRATION_BYTES))
    }

    fn cost(&self) -> usize {
        self.0.iter().map(|range| cost(range.bytes)).sum()
    }

    /// Registers the next range of the memory. True when all are registered.
    ///
    /// # Errors
    /// The endpoint's errors.
    pub(super) fn register_next(
        &mut self,
        endpoint: &mut dyn Endpoint,
        memory: &Arc<Region>,
    ) -> Result<bool, Code> {
        let start = self.0.len() * REGISTRATION_BYTES;
        if start >= memory.len() {
            return Ok(true);
        }
        let bytes = (memory.len() - start).min(REGISTRATION_BYTES + MOVE_BYTES_MAX);
        let range = match bytes == memory.len() {
            true => Arc::clone(memory),
            false => Arc::new(Region::part(memory, start, bytes)?),
        };
        self.0.push(endpoint.register(range, Access::BOTH)?);
        Ok(self.0.len() * REGISTRATION_BYTES >= memory.len())
    }

    /// The place of bytes of a request; `None` if they are not in a range that is registered, or are too many.
    pub(super) fn place(&self, at: usize, bytes: usize) -> Option<RegisteredPlace> {
        let range = self.0.get(at / REGISTRATION_BYTES)?;
        let local_offset = at % REGISTRATION_BYTES;
        let remote = Memory { address: range.remote.address + local_offset as u64, key: range.remote.key };
        let is_within = local_offset.checked_add(bytes).is_some_and(|end| end <= range.bytes);
        is_within.then_some(RegisteredPlace { local: range.local, local_offset, remote })
    }
}

/// Memory that is no longer used, and its ranges that the endpoint still has.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) session: u64,
    pub(super) ranges: RegisteredRanges,
    pub(super) memory: Arc<Region>,
    /// As of [`super::moves::Buffer`].
    pub(super) is_programs: bool,
    /// As of [`super::moves::Buffer`]: the memory is in quarantine, which keeps it.
    pub(super) in_doubt: bool,
}

/// Memory of which ranges are to be unregistered.
#[derive(Debug, Default)]
pub(super) struct Unregistering {
    /// Peers may still read or write it: it comes before all other.
    in_doubt: VecDeque<Ended>,
    others: VecDeque<Ended>,
    /// What was unregistered in this round, as [`cost`] counts it.
    done: usize,
}

impl Unregistering {
    /// Has memory unregistered: a small one now, unless this round has unregistered much, a large one in the next rounds.
    /// Then it is unmapped, unless it is in quarantine.
    pub(super) fn begin(&mut self, endpoint: &mut dyn Endpoint, mut ended: Ended, unmapping: &mut Unmapping) {
        let cost = ended.ranges.cost();
        let is_small = ended.memory.len() <= BUFFER_BYTES;
        if cost == 0 || is_small && (ended.in_doubt || self.done + cost <= REGISTRATION_BYTES) {
            ended.ranges.0.drain(..).for_each(|range| endpoint.unregister(range.local));
            self.done += cost;
            return ended.unmap(unmapping);
        }
        match ended.in_doubt {
            true => self.in_doubt.push_back(ended),
            false => self.others.push_back(ended),
        }
    }

    /// Ends a round: unregisters ranges, until the round has unregistered at least so much, or there are no more. True if
    /// there were any.
    pub(super) fn end_round(
        &mut self,
        endpoint: &mut dyn Endpoint,
        unmapping: &mut Unmapping,
        least: usize,
    ) -> bool {
        let had_any = !self.in_doubt.is_empty() || !self.others.is_empty();
        while self.done < least {
            let queue = if self.in_doubt.is_empty() { &mut self.others } else { &mut self.in_doubt };
            let Some(ended) = queue.front_mut() else { break };
            if let Some(range) = ended.ranges.0.pop() {
                endpoint.unregister(range.local);
                self.done += cost(range.bytes);
            }
            if ended.ranges.0.is_empty() {
                queue.pop_front().into_iter().for_each(|ended| ended.unmap(unmapping));
            }
        }
        self.done = 0;
        had_any
    }

    /// The memory of programs that is still to be unregistered: of a session, of all, and the bytes of all.
    pub(super) fn of_programs(&self, session: u64) -> (usize, usize, usize) {
        let theirs = self.in_doubt.iter().chain(&self.others).filter(|ended| ended.is_programs);
        theirs.fold((0, 0, 0), |(own, all, bytes), ended| {
            (own + usize::from(ended.session == session), all + 1, bytes + ended.memory.len())
        })
    }
}

impl Ended {
    fn unmap(self, unmapping: &mut Unmapping) {
        if !self.in_doubt {
            unmapping.drop(self.memory);
        }
    }
}
