//! What a supervisor needs beside its pool and may fail to get: made before it takes the pool over, so that a failure
//! leaves the pool to its starter, who takes it away again.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;

use forebay_fabric::secret_file;
use forebay_types::{Error, Result};

use crate::bundle::hexadecimal;
use crate::directory::{SOCKET_FILE, SUPERVISOR_FILE};
use crate::pool_place::OpenPool;
use crate::setup::FLIGHT_RECORDER_BYTES;

/// Clients that may wait for a worker; the kernel allows net.core.somaxconn at most.
const CLIENTS_BACKLOG: i32 = 4096;

/// The sockets of an opened pool, and the flight recorder.
pub(crate) struct Supplies {
    pub(crate) clients: UnixListener,
    pub(crate) listener: UnixListener,
    pub(crate) recorder: OwnedFd,
    /// The id of a pool with a secret, in hexadecimal digits.
    pub(crate) pool_id: Option<String>,
}

impl Supplies {
    pub(crate) fn make(pool: &OpenPool) -> Result<Supplies> {
        let clients = pool.dir.listen(SOCKET_FILE)?;
        // Clients of a large node come all at once, and wait here while a worker is replaced.
        rustix::net::listen(&clients, CLIENTS_BACKLOG)
            .map_err(|e| Error::io("cannot listen for clients", &e.into()))?;
        let listener = pool.dir.listen(SUPERVISOR_FILE)?;
        listener
            .set_nonblocking(true)
            .map_err(|e| Error::io("cannot make the supervisor's socket non-blocking", &e))?;
        let recorder = rustix::fs::memfd_create("forebay-flight-recorder", rustix::fs::MemfdFlags::CLOEXEC)
            .and_then(|fd| rustix::fs::ftruncate(&fd, FLIGHT_RECORDER_BYTES).map(|()| fd))
            .map_err(|e| Error::io("cannot make the flight recorder", &e.into()))?;
        let secret = pool.membership.as_ref().map(|m| secret_file::read(&m.key)).transpose()?;
        Ok(Supplies { clients, listener, recorder, pool_id: secret.map(|s| hexadecimal(&s.pool())) })
    }
}
