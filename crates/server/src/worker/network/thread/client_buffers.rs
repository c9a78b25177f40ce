//! The memory of this node's clients that the network reads and writes: a buffer of each process, and memory that programs
//! have allocated for transfers (docs/decisions/0018, 0053).
//!
//! Memory whose request ended with an unknown outcome is retired: it is unregistered, refused from then on, and in
//! quarantine until no transfer can be in flight. A client that uses such memory as its own does not touch it again: it has
//! put other pages in the place of those that may still be written. When the program withdraws the memory, or its process
//! ends, this node keeps the addresses alone: the pages may be mapped by the program's children, so they are not discarded,
//! but this node no longer maps them, and the kernel frees them with their last mapping.
//!
//! A fetch that had begun before the memory was unregistered may still read the range of a write whose outcome is unknown.
//! So such ranges keep their bytes until the quarantine is over, here and in the client's buffer: a write that happens late
//! writes what it was to write.

use std::sync::Arc;
use std::time::Duration;

use forebay_fabric::Region;
use forebay_types::limits::{
    BUFFERS_MAX, BUFFERS_QUARANTINED_MAX, PROGRAM_MEMORIES_RETIRED_A_ROUND,
    PROGRAM_MEMORY_QUARANTINED_BYTES_MAX, QUARANTINE_MS,
};
use forebay_types::NodeId;

use super::flights::Flight;
use super::moves::{Buffer, Moves, Quarantined};
use super::registered_ranges::Ended;
use super::state::NetworkThread;
use crate::worker::network::eager_buffers::end_quarantine;
use crate::worker::network::unmapping::{Freeing, Unmapping};

/// How long memory that a peer may still write stays in quarantine: longer than any request is served.
const QUARANTINE: Duration = Duration::from_millis(QUARANTINE_MS);
/// Time between attempts to free the pages of memory in quarantine, if there is no memory for other pages.
const FREE_AGAIN: Duration = Duration::from_secs(10);

impl NetworkThread {
    /// Adds a process's buffer, which replaces the one it had.
    pub(super) fn add_buffer(&mut self, session: u64, number: u64, memory: Region) {
        self.retire_buffer_of(session, false);
        let count = self.moves.buffers.values().filter(|buffer| !buffer.is_programs).count();
        let quarantined = self.quarantined(false);
        if count >= BUFFERS_MAX || quarantined >= BUFFERS_QUARANTINED_MAX {
            return tracing::debug!(
                "{count} processes have buffers and {quarantined} are in quarantine: further processes send data inside \
                 requests"
            );
        }
        // A request may name it at once.
        if let Err(code) = self.register(session, number, memory, false, true) {
            tracing::warn!("cannot register a client's buffer: {code}");
        }
    }

    /// Buffers in quarantine, or ranges of memory of programs.
    pub(super) fn quarantined(&self, is_programs: bool) -> usize {
        self.moves.quarantined.iter().filter(|one| one.is_programs == is_programs).count()
    }

    /// Withdraws memory of a process.
    pub(super) fn withdraw_memory(&mut self, session: u64, number: u64) {
        let now = self.calls.now();
        let buffer = self.moves.buffers.get_mut(&number);
        if let Some(buffer) = buffer.filter(|buffer| buffer.session == session && buffer.is_programs) {
            buffer.abandoned = true;
            return self.retire_buffer(number, false);
        }
        let Moves { quarantined, unmapping, .. } = &mut self.moves;
        let is_it =
            |one: &&mut Quarantined| (one.session, one.number, one.is_programs) == (session, number, true);
        quarantined.iter_mut().filter(is_it).for_each(|one| one.free(unmapping, now));
    }

    fn retire_buffer_of(&mut self, session: u64, over: bool) {
        let mut meant = Vec::new();
        for (number, buffer) in &mut self.moves.buffers {
            if buffer.session == session && !buffer.is_programs {
                buffer.abandoned |= over;
                meant.push(*number);
            }
        }
        for number in meant {
            self.retire_buffer(number, false);
        }
    }

    /// Retires all memory of a process that has ended, and does not read what is in it either. That of the program is
    /// refused from now on, and unregistered over the next rounds.
    pub(super) fn retire_buffers(&mut self, session: u64) {
        self.retire_buffer_of(session, true);
        let now = self.calls.now();
        let Moves { buffers, quarantined, to_retire, unmapping, .. } = &mut self.moves;
        for (number, buffer) in buffers.iter_mut().filter(|(_, buffer)| buffer.session == session) {
            (buffer.abandoned, buffer.retired) = (true, true);
            to_retire.push_back((*number, buffer.generation));
        }
        let theirs = quarantined.iter_mut().filter(|one| one.session == session);
        theirs.for_each(|one| one.free(unmapping, now));
    }

    /// Retires some of the memory that is to be. True if there was any.
    pub(super) fn retire_some(&mut self) -> bool {
        for done in 0..PROGRAM_MEMORIES_RETIRED_A_ROUND {
            let Some((number, generation)) = self.moves.to_retire.pop_front() else { return done > 0 };
            // It may have been removed meanwhile, and another one have its number.
            if self.moves.buffers.get(&number).is_some_and(|buffer| buffer.generation == generation) {
                self.retire_buffer(number, false);
            }
        }
        true
    }

    /// A node has a new worker. Transfers of the old one may still arrive, behind those of the new one: the buffers of
    /// requests to it are retired when these have ended.
    pub(super) fn doubt_moves(&mut self, node: NodeId) {
        for flight in self.flights.values() {
            let Flight::Move(asking) = flight else { continue };
            if let Some(buffer) = self.moves.buffers.get_mut(&asking.buffer).filter(|_| asking.node == node) {
                (buffer.retired, buffer.in_doubt) = (true, true);
            }
        }
    }

    /// Retires a buffer. It is removed when the requests in flight have ended.
    pub(super) fn retire_buffer(&mut self, number: u64, in_doubt: bool) {
        let Some(buffer) = self.moves.buffers.get_mut(&number) else { return };
        buffer.retired = true;
        buffer.in_doubt |= in_doubt;
        if buffer.flights > 0 {
            return;
        }
        let Some(buffer) = self.moves.buffers.remove(&number) else { return };
        let Buffer { session, memory, registered, is_programs, in_doubt, abandoned, may_be_read, .. } =
            buffer;
        let ended = Ended { session, ranges: registered, memory: Arc::clone(&memory), is_programs, in_doubt };
        let Moves { unregistering, unmapping, .. } = &mut self.moves;
        if !in_doubt {
            // Nothing else has it, so that it is unmapped where large memory is.
            drop(memory);
            return unregistering.begin(self.calls.endpoint(), ended, unmapping);
        }
        unregistering.begin(self.calls.endpoint(), ended, unmapping);
        let now = self.calls.now();
        let until = now + QUARANTINE;
        let mut one = Quarantined {
            until,
            session,
            number,
            memory,
            is_programs,
            may_be_read,
            is_to_free: false,
            freeing: Freeing::default(),
            free_again_at: Duration::ZERO,
        };
        // A live process frees its memory itself, when it has read what is in it.
        if abandoned {
            one.free(&mut self.moves.unmapping, now);
        }
        self.moves.quarantined.push(one);
        self.bound_quarantine();
    }

    /// Leaves the pages of the oldest memory of programs in quarantine to them, if there is too much.
    fn bound_quarantine(&mut self) {
        let now = self.calls.now();
        let Moves { quarantined, unmapping, .. } = &mut self.moves;
        let mut kept = 0;
        for one in quarantined.iter_mut().rev().filter(|one| one.is_programs && !one.freeing.has_begun()) {
            kept += one.memory.len();
            if kept > PROGRAM_MEMORY_QUARANTINED_BYTES_MAX {
                one.free(unmapping, now);
            }
        }
    }

    /// Frees memory whose quarantine is over, and tries again to free pages where that has failed.
    pub(super) fn end_quarantines(&mut self, now: Duration) {
        self.moves.granted.end_quarantines(now);
        let Moves { quarantined, unmapping, .. } = &mut self.moves;
        let is_over = |one: &&mut Quarantined| one.is_programs && (one.is_to_free || one.until <= now);
        quarantined.iter_mut().filter(is_over).for_each(|one| one.free(unmapping, now));
        end_quarantine(&mut self.moves.quarantined, |one| one.until <= now, |one| &mut one.memory);
    }
}

impl Quarantined {
    /// Frees the pages of memory that no one looks at any longer. Those of a program are left to the processes that map
    /// them. What another node may still read for a write keeps its bytes: it would write others.
    fn free(&mut self, unmapping: &mut Unmapping, now: Duration) {
        self.is_to_free = true;
        if now < self.free_again_at || !self.freeing.begin() {
            return;
        }
        self.free_again_at = now + FREE_AGAIN;
        match self.is_programs {
            true => unmapping.detach(&self.memory, self.may_be_read.clone(), &self.freeing),
            false => {
                self.memory.discard(&self.may_be_read);
                self.freeing.end(true);
            }
        }
    }
}
