//! How this node's daemon gets memory of this process that the network may read and write (docs/decisions/0053).

use std::os::fd::{AsFd, OwnedFd, RawFd};

use forebay_ring::{read_exact, send_fds, write_all, Header, HEADER_BYTES, KIND_MEMORY};
use forebay_types::Code;

use crate::connection::Address;

/// Longest wait for the answer when memory is withdrawn, which changes nothing for this process.
const WITHDRAWAL_TIMEOUT_S: libc::time_t = 1;
/// The last byte of a message.
const WITHDRAW: u8 = 0;
const REGISTER: u8 = 1;

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
