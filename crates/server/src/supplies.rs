//! Resources that a supervisor needs besides its pool and that may be unavailable. They are made before the supervisor
//! takes over the pool, so that on failure its starter removes the pool again.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;

use forebay_fabric::secret_file;
use forebay_types::{Error, Result};

use crate::bundle::hexadecimal;
use crate::directory::{SOCKET_FILE, SUPERVISOR_FILE};
use crate::pool_place::OpenPool;
use crate::setup::FLIGHT_RECORDER_BYTES;

/// Length of the clients' queue while a worker is replaced; the kernel limits it to net.core.somaxconn.
const CLIENTS_BACKLOG: i32 = 4096;

/// The sockets of an opened pool, and the flight recorder.
pub(crate) struct Supplies {
    pub(crate) clients: UnixListener,
    pub(crate) listener: UnixListener,
    pub(crate) recorder: OwnedFd,
    /// The ID of a pool with a secret, in hexadecimal digits.
    pub(crate) pool_id: Option<String>,
}

impl Supplies {
    pub(crate) fn make(pool: &OpenPool) -> Result<Supplies> {
        let clients = pool.dir.listen(SOCKET_FILE)?;
        // All clients of a large node may connect at once, and they wait in this queue while a worker is replaced.
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
