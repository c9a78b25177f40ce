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
        let (Ok(session), Ok(number @ 1..), Ok(what @ (0 | 1)), []) = (r.u64(), r.u64(), r.u8(), r.rest())
        else {
            return self.refuse(Code::Malformed, "memory needs a session, a number, and what is to be done");
        };
        let registers = what == 1;
        let mut fds = [const { None }; ATTACH_FDS];
        if registers {
            receive_fds(self.socket.as_fd(), &mut [0], &mut fds)?;
        }
        let Some(network) = &self.desk.network else {
            return self.refuse(Code::NotSupported, "the pool has no other nodes");
        };
        match fds {
            [None, ..] if !registers => network.give(Command::WithdrawMemory { session, number }),
            [Some(memory), None, ..] => {
                if !self.is_known(session)? {
                    return self.refuse(Code::UnknownSession, "attach again");
                }
                if let Err(e) = accept_memory(network, session, number, &memory) {
                    tracing::debug!("{e}");
                    return self.refuse(e.code, &e.to_string());
                }
                self.end_if_over(session)?;
            }
            _ => return self.refuse(Code::Malformed, "memory needs one descriptor"),
        }
        let answered = write_all(self.socket.as_fd(), &Header { kind: KIND_MEMORY, len: 0 }.encode());
        if answered.is_err() && registers {
            // The client has given up. It may have withdrawn the memory before it was registered.
            network.give(Command::WithdrawMemory { session, number });
        }
        answered
    }
}
