//! Memory of a process as the endpoint has it registered: in ranges of bounded size, one after the other, because to register
//! or to unregister memory may take as long as the kernel needs for all of its pages, and all clients share the network
//! thread. Only one thread at a time may use the endpoint, so no other thread can do it.
//!
//! Each range has as many bytes more as one request names at most. So the bytes of a request lie in one range.

use std::collections::VecDeque;
use std::sync::Arc;

use forebay_fabric::{Access, Endpoint, Local, Region, Registered};
use forebay_types::limits::{MOVE_BYTES_MAX, REGISTRATION_BYTES};
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

/// The ranges of some memory that are registered.
#[derive(Debug, Default)]
pub(super) struct RegisteredRanges(Vec<Registered>);

impl RegisteredRanges {
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

/// Ranges that are no longer used, and that the endpoint still has.
#[derive(Debug, Default)]
pub(super) struct Unregistering(VecDeque<Ended>);

#[derive(Debug)]
struct Ended {
    ranges: RegisteredRanges,
    /// The memory, if nothing else keeps it: it is unmapped when the endpoint has no range of it.
    memory: Option<Arc<Region>>,
}

impl Unregistering {
    /// Has ranges unregistered: a single one now, several in the next rounds. Then the memory is unmapped, if it is given.
    pub(super) fn begin(
        &mut self,
        endpoint: &mut dyn Endpoint,
        (ranges, memory): (RegisteredRanges, Option<Arc<Region>>),
        unmapping: &mut Unmapping,
    ) {
        if ranges.0.len() > 1 {
            return self.0.push_back(Ended { ranges, memory });
        }
        ranges.0.iter().for_each(|range| endpoint.unregister(range.local));
        memory.into_iter().for_each(|memory| unmapping.drop(memory));
    }

    /// Unregisters a range, and what memory is then unregistered as a whole. True if there was any.
    pub(super) fn step(&mut self, endpoint: &mut dyn Endpoint, unmapping: &mut Unmapping) -> bool {
        let Some(ended) = self.0.front_mut() else { return false };
        if let Some(range) = ended.ranges.0.pop() {
            endpoint.unregister(range.local);
        }
        if ended.ranges.0.is_empty() {
            let memory = self.0.pop_front().and_then(|ended| ended.memory);
            memory.into_iter().for_each(|memory| unmapping.drop(memory));
        }
        true
    }
}
