//! The memory of this node's clients that the network reads and writes: a buffer of each process, and memory that programs
//! have allocated for transfers (docs/decisions/0018, 0053).
//!
//! Memory whose request ended with an unknown outcome is retired: it is unregistered, refused from then on, and in
//! quarantine until no transfer can be in flight. A client that uses such memory as its own does not touch it again: it has
//! put other pages in the place of those that may still be written.

use std::sync::Arc;
use std::time::Duration;

use forebay_fabric::{Access, Region};
use forebay_types::limits::{
    BUFFERS_MAX, BUFFERS_QUARANTINED_MAX, PROGRAM_MEMORIES_MAX, PROGRAM_MEMORIES_REGISTERED_MAX,
    QUARANTINE_MS,
};
use forebay_types::{Code, NodeId};

use super::flights::Flight;
use super::moves::{Buffer, Quarantined};
use super::state::NetworkThread;
use crate::worker::network::eager_buffers::end_quarantine;

/// How long memory that a peer may still write stays in quarantine: longer than any request is served.
const QUARANTINE: Duration = Duration::from_millis(QUARANTINE_MS);

impl NetworkThread {
    /// Adds a process's buffer, which replaces the one it had.
    pub(super) fn add_buffer(&mut self, session: u64, number: u64, memory: Region) {
        self.retire_where(|buffer| buffer.session == session && !buffer.is_programs, false);
        let count = self.moves.buffers.values().filter(|buffer| !buffer.is_programs).count();
        if count >= BUFFERS_MAX || self.moves.quarantined.len() >= BUFFERS_QUARANTINED_MAX {
            return tracing::debug!(
                "{count} processes have buffers and {} are in quarantine: further processes send data inside requests",
                self.moves.quarantined.len()
            );
        }
        if let Err(code) = self.register(session, number, memory, false) {
            tracing::warn!("cannot register a client's buffer: {code}");
        }
    }

    /// Adds memory that a process has allocated.
    ///
    /// # Errors
    /// [`Code::NoResources`] if the process, or all together, have as much as they may have; [`Code::Exists`] if the
    /// number, which the client chooses, is one of other memory.
    pub(super) fn add_program_memory(
        &mut self,
        session: u64,
        number: u64,
        memory: Region,
    ) -> Result<(), Code> {
        if self.moves.buffers.contains_key(&number) {
            return Err(Code::Exists);
        }
        let (mut own, mut all) = (0, 0);
        for buffer in self.moves.buffers.values().filter(|buffer| buffer.is_programs) {
            all += 1;
            own += usize::from(buffer.session == session);
        }
        let is_quarantine_full = self.moves.quarantined.len() >= BUFFERS_QUARANTINED_MAX;
        if own >= PROGRAM_MEMORIES_MAX || all >= PROGRAM_MEMORIES_REGISTERED_MAX || is_quarantine_full {
            return Err(Code::NoResources);
        }
        self.register(session, number, memory, true)
    }

    fn register(&mut self, session: u64, number: u64, memory: Region, is_programs: bool) -> Result<(), Code> {
        let memory = Arc::new(memory);
        let registered = self.calls.endpoint().register(Arc::clone(&memory), Access::BOTH)?;
        self.moves.buffers.insert(number, Buffer::new(session, memory, registered, is_programs));
        Ok(())
    }

    /// Withdraws memory of a process.
    pub(super) fn withdraw_memory(&mut self, session: u64, number: u64) {
        let buffer = self.moves.buffers.get(&number);
        if buffer.is_some_and(|buffer| buffer.session == session && buffer.is_programs) {
            self.retire_buffer(number, false);
        }
    }

    fn retire_where(&mut self, is_meant: impl Fn(&Buffer) -> bool, over: bool) {
        let meant = self.moves.buffers.iter_mut().filter(|(_, buffer)| is_meant(buffer));
        let meant: Vec<u64> = meant
            .map(|(number, buffer)| {
                buffer.orphaned |= over;
                *number
            })
            .collect();
        for number in meant {
            self.retire_buffer(number, false);
        }
    }

    /// Retires all memory of a process that has ended, and does not read what is in it either.
    pub(super) fn retire_buffers(&mut self, session: u64) {
        self.retire_where(|buffer| buffer.session == session, true);
        let theirs = self.moves.quarantined.iter().filter(|one| one.session == session && !one.is_programs);
        theirs.for_each(|one| one.memory.discard());
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
        self.calls.endpoint().unregister(buffer.registered.local);
        if buffer.in_doubt {
            if buffer.orphaned {
                // A live process frees its memory itself, when it has read what is in it.
                buffer.free();
            }
            let (until, session, is_programs) =
                (self.calls.now() + QUARANTINE, buffer.session, buffer.is_programs);
            self.moves.quarantined.push(Quarantined { until, session, memory: buffer.memory, is_programs });
        }
    }

    /// Frees memory whose quarantine is over.
    pub(super) fn end_quarantines(&mut self, now: Duration) {
        self.moves.granted.end_quarantines(now);
        end_quarantine(&mut self.moves.quarantined, |one| one.until <= now, |one| &mut one.memory);
    }
}
