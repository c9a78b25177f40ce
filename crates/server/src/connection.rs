//! One connection to the supervisor: the bytes received of its next message, and the bytes not sent yet.

use std::io::Write;
use std::os::unix::net::UnixStream;

pub(crate) struct Connection {
    pub(crate) stream: UnixStream,
    pub(crate) received: Vec<u8>,
    pub(crate) to_send: Vec<u8>,
    pub(crate) close_when_sent: bool,
}

impl Connection {
    /// Sends as much as the socket accepts; false when the connection is to be closed.
    pub(crate) fn flush(&mut self) -> bool {
        while !self.to_send.is_empty() {
            match self.stream.write(&self.to_send) {
                Ok(0) => return false,
                Ok(n) => drop(self.to_send.drain(..n)),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return true,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        !self.close_when_sent
    }
}
