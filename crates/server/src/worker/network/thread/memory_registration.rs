//! Registration of clients' memory with the endpoint. Rounds of the network thread do it in steps of bounded size, with other
//! work between them (`registered_ranges.rs`). Small memory is registered at once, as long as its round has not registered
//! much.

use std::sync::mpsc::Sender;
use std::sync::Arc;
use std::time::Duration;

use forebay_fabric::Region;
use forebay_types::limits::{
    BUFFER_BYTES, PROGRAM_MEMORIES_MAX, PROGRAM_MEMORIES_QUARANTINED_MAX, PROGRAM_MEMORIES_REGISTERED_MAX,
    PROGRAM_MEMORY_ENDED_BYTES_MAX, PROGRAM_MEMORY_REGISTRATION_S, REGISTRATION_BYTES,
};
use forebay_types::Code;

use super::moves::{Buffer, Moves, ToRegister};
use super::registered_ranges::{cost, RegisteredRanges};
use super::state::NetworkThread;

impl NetworkThread {
    /// Adds memory that a process has allocated, and sends the outcome when all of it is registered, or when its client
    /// waits no longer: [`Code::TimedOut`], and nothing of it is registered.
    pub(super) fn add_program_memory(
        &mut self,
        session: u64,
        number: u64,
        memory: Region,
        outcome: Sender<Result<(), Code>>,
    ) {
        let timeout = Duration::from_secs(PROGRAM_MEMORY_REGISTRATION_S + (memory.len() >> 30) as u64);
        let until = self.calls.now() + timeout;
        match self.accept_program_memory(session, number, memory) {
            Ok(false) => {
                let generation = self.moves.generations;
                self.moves.to_register.push_back(ToRegister { number, generation, until, outcome });
            }
            // The client may have given up.
            done => drop(outcome.send(done.map(drop))),
        }
    }

    /// Adds memory that a process has allocated. True if it is registered; large memory, and what arrives when this round
    /// has registered much, is to be registered in the next rounds.
    ///
    /// # Errors
    /// [`Code::NoResources`] if the process, or all together, have as much as they may have, with what is still to be
    /// unregistered; [`Code::Exists`] if the number, which the client chooses, is one of other memory.
    pub(super) fn accept_program_memory(
        &mut self,
        session: u64,
        number: u64,
        memory: Region,
    ) -> Result<bool, Code> {
        if self.moves.buffers.contains_key(&number) {
            return Err(Code::Exists);
        }
        let (mut own, mut all, mut ended_bytes) = self.moves.unregistering.of_programs(session);
        for buffer in self.moves.buffers.values().filter(|buffer| buffer.is_programs) {
            all += 1;
            own += usize::from(buffer.session == session);
            ended_bytes += if buffer.retired { buffer.memory.len() } else { 0 };
        }
        let is_quarantine_full = self.quarantined(true) >= PROGRAM_MEMORIES_QUARANTINED_MAX;
        let is_full = own >= PROGRAM_MEMORIES_MAX || all >= PROGRAM_MEMORIES_REGISTERED_MAX;
        if is_full || is_quarantine_full || ended_bytes > PROGRAM_MEMORY_ENDED_BYTES_MAX {
            return Err(Code::NoResources);
        }
        let has_time = self.moves.registered + cost(memory.len()) <= REGISTRATION_BYTES;
        let at_once = memory.len() <= BUFFER_BYTES && has_time;
        self.register(session, number, memory, true, at_once)
    }

    /// Adds memory, and registers it `at_once`, or none of it yet. Returns `at_once`.
    ///
    /// # Errors
    /// The endpoint's errors.
    pub(super) fn register(
        &mut self,
        session: u64,
        number: u64,
        memory: Region,
        is_programs: bool,
        at_once: bool,
    ) -> Result<bool, Code> {
        let (memory, mut registered) = (Arc::new(memory), RegisteredRanges::default());
        if at_once {
            self.moves.registered += registered.next_cost(&memory);
            registered.register_next(self.calls.endpoint(), &memory)?;
        }
        self.moves.generations += 1;
        let buffer = Buffer::new(session, self.moves.generations, memory, registered, is_programs);
        self.moves.buffers.insert(number, buffer);
        Ok(at_once)
    }

    /// Registers ranges of the memory that is to be, and unregisters ranges of what is not used: at the end of a round.
    /// True if there were any.
    pub(super) fn register_some(&mut self) -> bool {
        let is_registered = self.register_ranges();
        let least = std::mem::take(&mut self.moves.registered).max(REGISTRATION_BYTES);
        let Moves { unregistering, unmapping, .. } = &mut self.moves;
        unregistering.end_round(self.calls.endpoint(), unmapping, least) || is_registered
    }

    /// Registers a range, however much its round has registered, and more as long as that is little.
    fn register_ranges(&mut self) -> bool {
        let mut has_registered = false;
        let now = self.calls.now();
        while let Some(&ToRegister { number, generation, until, .. }) = self.moves.to_register.front() {
            let buffer = self.moves.buffers.get_mut(&number);
            let buffer = buffer.filter(|buffer| buffer.generation == generation && !buffer.retired);
            let done = match buffer {
                Some(_) if until <= now => Err(Code::TimedOut),
                Some(buffer) => {
                    let cost = buffer.registered.next_cost(&buffer.memory);
                    if has_registered && self.moves.registered + cost > REGISTRATION_BYTES {
                        return true;
                    }
                    has_registered = true;
                    self.moves.registered += cost;
                    buffer.registered.register_next(self.calls.endpoint(), &buffer.memory)
                }
                // The program has withdrawn it, or its process has ended.
                None => Err(Code::Stale),
            };
            if done != Ok(false) {
                if done.is_err_and(|code| code != Code::Stale) {
                    self.retire_buffer(number, false);
                }
                let ended = self.moves.to_register.pop_front();
                let _ = ended.map(|ended| ended.outcome.send(done.map(drop)));
            }
        }
        has_registered
    }
}
