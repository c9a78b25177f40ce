//! How this node's daemon gets memory of this process that the network may read and write (docs/decisions/0053).

use std::os::fd::{AsFd, OwnedFd, RawFd};

use forebay_ring::{call_clock, read_exact, send_fds, write_all, Header, HEADER_BYTES, KIND_MEMORY};
use forebay_types::limits::PROGRAM_MEMORY_PAUSE_MS;
use forebay_types::Code;

use crate::connection::Address;

/// Longest wait for the answer when memory is withdrawn, which changes nothing for this process.
const WITHDRAWAL_TIMEOUT_S: libc::time_t = 1;
/// The last byte of a message.
const WITHDRAW: u8 = 0;
const REGISTER: u8 = 1;

/// What this node's daemon has of allocated memory.
#[derive(Debug, Default)]
pub(crate) struct Registration {
    pub(crate) current: Option<Registered>,
    /// Those that are not used again, and that the daemon may have.
    pub(crate) to_withdraw: Vec<Registered>,
    /// A thread exchanges messages with the daemon about it.
    pub(crate) is_under_way: bool,
    /// When the daemon last refused it, gave no answer, or a registration ended.
    pub(crate) refused_ns: Option<u64>,
}

/// Memory that a worker has registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Registered {
    /// The process's session.
    pub(crate) session: u64,
    /// The worker's epoch.
    pub(crate) epoch: u64,
    /// Its number there.
    pub(crate) number: u64,
}

/// How a registration begins.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Begun {
    /// It is registered, under this number.
    Registered(u64),
    /// It is not registered for now.
    Refused,
    /// These are to be withdrawn, and then it is to be registered.
    Withdrawing(Vec<Registered>),
}

impl Registration {
    /// Begins to register the memory for a session with the worker of an epoch, unless it is.
    pub(crate) fn begin(&mut self, session: u64, epoch: u64, now_ns: u64) -> Begun {
        let is_valid = |current: &Registered| current.session == session && current.epoch == epoch;
        if let Some(current) = self.current.filter(is_valid) {
            return Begun::Registered(current.number);
        }
        let pause_ns = PROGRAM_MEMORY_PAUSE_MS * 1_000_000;
        if self.is_under_way || self.refused_ns.is_some_and(|refused| now_ns < refused + pause_ns) {
            return Begun::Refused;
        }
        // The worker may serve an earlier session of this process, too. One that has ended has none.
        self.to_withdraw.extend(self.current.take());
        self.to_withdraw.retain(|one| one.epoch == epoch);
        self.is_under_way = true;
        Begun::Withdrawing(std::mem::take(&mut self.to_withdraw))
    }

    /// A request that named this number has failed.
    pub(crate) fn end(&mut self, number: u64) {
        if let Some(current) = self.current.take_if(|current| current.number == number) {
            self.to_withdraw.push(current);
            self.refused_ns = Some(call_clock());
        }
    }
}

/// A number that no other process guesses; never 0.
pub(crate) fn random_number() -> Option<u64> {
    let mut bytes = [0; 8];
    // SAFETY: the bytes are writable for the call.
    let n = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    (n == bytes.len() as isize).then(|| u64::from_le_bytes(bytes).max(1))
}

impl Address {
    /// Has memory registered for a session, under a number that is in use nowhere. The inner result is the daemon's answer.
    ///
    /// # Errors
    /// The outer error means that no answer arrived: the memory may be registered, now or later, and must be withdrawn. The
    /// inner one is [`Code::NotSupported`] in a pool without other nodes, [`Code::NoResources`] if there is too much such
    /// memory, [`Code::Exists`] for a number in use.
    pub(crate) fn register_memory(
        &self,
        session: u64,
        number: u64,
        memory: RawFd,
        timeout_s: libc::time_t,
    ) -> Result<Result<(), Code>, Code> {
        let socket = self.connect(timeout_s, 0)?;
        ask(&socket, session, number, REGISTER)?;
        send_fds(socket.as_fd(), &[0], &[memory])?;
        answer(&socket)
    }

    /// Has memory withdrawn from the network. What the daemon answers changes nothing for this process.
    ///
    /// # Errors
    /// No answer arrived. The daemon withdraws the memory when this process ends.
    pub(crate) fn withdraw_memory(&self, session: u64, number: u64) -> Result<(), Code> {
        let socket = self.connect(WITHDRAWAL_TIMEOUT_S, 0)?;
        ask(&socket, session, number, WITHDRAW)?;
        answer(&socket).map(drop)
    }
}

fn ask(socket: &OwnedFd, session: u64, number: u64, what: u8) -> Result<(), Code> {
    let mut message = [0; HEADER_BYTES + 17];
    message[..HEADER_BYTES].copy_from_slice(&Header { kind: KIND_MEMORY, len: 17 }.encode());
    message[HEADER_BYTES..HEADER_BYTES + 8].copy_from_slice(&session.to_le_bytes());
    message[HEADER_BYTES + 8..HEADER_BYTES + 16].copy_from_slice(&number.to_le_bytes());
    message[HEADER_BYTES + 16] = what;
    write_all(socket.as_fd(), &message)
}

fn answer(socket: &OwnedFd) -> Result<Result<(), Code>, Code> {
    let mut header = [0; HEADER_BYTES];
    read_exact(socket.as_fd(), &mut header)?;
    let header = Header::decode(&header)?;
    if header.kind == KIND_MEMORY && header.len == 0 {
        return Ok(Ok(()));
    }
    let mut code = [0; 2];
    read_exact(socket.as_fd(), &mut code)?;
    Ok(Err(Code::from_u16(u16::from_le_bytes(code))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registration_of_the_same_worker_is_withdrawn_when_the_session_changes() {
        let (one, two, ended) = (
            Registered { session: 1, epoch: 5, number: 10 },
            Registered { session: 1, epoch: 5, number: 11 },
            Registered { session: 1, epoch: 4, number: 12 },
        );
        let mut registration =
            Registration { current: Some(one), to_withdraw: vec![two, ended], ..Default::default() };
        assert_eq!(registration.begin(1, 5, 0), Begun::Registered(10));
        assert_eq!(registration.begin(2, 5, 0), Begun::Withdrawing(vec![two, one]));
        assert_eq!(registration.begin(2, 5, 0), Begun::Refused, "another thread is at it");
        registration.is_under_way = false;
        (registration.current, registration.refused_ns) = (Some(one), Some(7));
        let over = 7 + PROGRAM_MEMORY_PAUSE_MS * 1_000_000;
        assert_eq!(registration.begin(2, 6, over - 1), Begun::Refused);
        assert_eq!(registration.begin(2, 6, over), Begun::Withdrawing(Vec::new()), "its worker has ended");
        registration.current = Some(two);
        registration.end(10);
        assert_eq!((registration.current, registration.to_withdraw.len()), (Some(two), 0));
        registration.end(11);
        assert_eq!((registration.current, &registration.to_withdraw[..]), (None, &[two][..]));
    }
}
