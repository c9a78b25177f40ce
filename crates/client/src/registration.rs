//! How this node's daemon gets memory of this process that the network may read and write (docs/decisions/0053).

use std::os::fd::{AsFd, OwnedFd, RawFd};

use forebay_ring::{read_exact, send_fds, write_all, Header, HEADER_BYTES, KIND_MEMORY};
use forebay_types::Code;

use crate::connection::{Address, ANSWER_TIMEOUT_S};

/// Longest wait for the answer when memory is withdrawn, which changes nothing for this process.
const WITHDRAWAL_TIMEOUT_S: libc::time_t = 1;
/// The number in a request to register memory.
const NEW: u64 = 0;

impl Address {
    /// Has memory registered for a session. Returns the number by which requests name it.
    ///
    /// # Errors
    /// [`Code::NotSupported`] in a pool without other nodes, [`Code::NoResources`] if there is too much such memory.
    pub(crate) fn register_memory(&self, session: u64, memory: RawFd) -> Result<u64, Code> {
        let socket = self.connect(ANSWER_TIMEOUT_S, 0)?;
        ask(&socket, session, NEW)?;
        send_fds(socket.as_fd(), &[0], &[memory])?;
        answer(&socket)
    }

    /// Has memory withdrawn from the network. If that fails, the daemon does it when this process ends.
    pub(crate) fn withdraw_memory(&self, session: u64, number: u64) {
        let Ok(socket) = self.connect(WITHDRAWAL_TIMEOUT_S, 0) else { return };
        let _ = ask(&socket, session, number).and_then(|()| answer(&socket));
    }
}

fn ask(socket: &OwnedFd, session: u64, number: u64) -> Result<(), Code> {
    let mut message = [0; HEADER_BYTES + 16];
    message[..HEADER_BYTES].copy_from_slice(&Header { kind: KIND_MEMORY, len: 16 }.encode());
    message[HEADER_BYTES..HEADER_BYTES + 8].copy_from_slice(&session.to_le_bytes());
    message[HEADER_BYTES + 8..].copy_from_slice(&number.to_le_bytes());
    write_all(socket.as_fd(), &message)
}

fn answer(socket: &OwnedFd) -> Result<u64, Code> {
    let mut header = [0; HEADER_BYTES];
    read_exact(socket.as_fd(), &mut header)?;
    let header = Header::decode(&header)?;
    if header.kind == KIND_MEMORY && header.len == 8 {
        let mut number = [0; 8];
        read_exact(socket.as_fd(), &mut number)?;
        return Ok(u64::from_le_bytes(number));
    }
    let mut code = [0; 2];
    read_exact(socket.as_fd(), &mut code)?;
    Err(Code::from_u16(u16::from_le_bytes(code)))
}
