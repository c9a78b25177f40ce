//! Memory that a program has allocated for transfers, which its process has the daemon register (docs/decisions/0053).

use std::os::fd::AsFd;

use forebay_ring::{receive_fds, write_all, Header, ATTACH_FDS, KIND_MEMORY};
use forebay_types::{Code, Reader};

use super::connection::Connection;
use crate::worker::network::{accept_memory, Command};

impl Connection<'_> {
    /// Registers or withdraws memory of a process.
    pub(super) fn program_memory(&self, body: &[u8]) -> Result<(), Code> {
        let mut r = Reader::new(body);
        let (Ok(session), Ok(number), []) = (r.u64(), r.u64(), r.rest()) else {
            return self.refuse(Code::Malformed, "memory needs a session and a number");
        };
        let mut fds = [const { None }; ATTACH_FDS];
        if number == 0 {
            receive_fds(self.socket.as_fd(), &mut [0], &mut fds)?;
        }
        let Some(network) = &self.desk.network else {
            return self.refuse(Code::NotSupported, "the pool has no other nodes");
        };
        let number = match fds {
            [None, ..] if number != 0 => {
                network.give(Command::WithdrawMemory { session, number });
                number
            }
            [Some(memory), None, ..] => {
                if !self.is_known(session)? {
                    return self.refuse(Code::UnknownSession, "attach again");
                }
                let mut new = [0; 8];
                rustix::rand::getrandom(&mut new, rustix::rand::GetRandomFlags::empty())
                    .map_err(|e| Code::from_errno(e.raw_os_error()))?;
                let new = u64::from_le_bytes(new).max(1);
                if let Err(e) = accept_memory(network, session, new, &memory) {
                    tracing::debug!("{e}");
                    return self.refuse(e.code, &e.to_string());
                }
                self.end_if_over(session)?;
                new
            }
            _ => return self.refuse(Code::Malformed, "memory needs one descriptor"),
        };
        let mut message = Header { kind: KIND_MEMORY, len: 8 }.encode().to_vec();
        message.extend(number.to_le_bytes());
        write_all(self.socket.as_fd(), &message)
    }
}
