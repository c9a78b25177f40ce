//! What the attendant shares with the threads of connections.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};

use forebay_ring::{Doorbell, Header, ServedRing, KIND_ERROR};
use forebay_types::{Code, Error, Result};
use rustix::io::Errno;

use crate::reserve::Seldom;
use crate::setup::WorkerSetup;
use crate::worker::attached_programs::AttachedPrograms;
use crate::worker::mounter::Mounter;
use crate::worker::network::Commands;
use crate::worker::watches::Watches;

pub(super) const TOKEN_LISTENER: u64 = 1 << 62;
pub(super) const TOKEN_STOP: u64 = TOKEN_LISTENER + 1;
pub(super) const TOKEN_WAKE: u64 = TOKEN_LISTENER + 2;

/// A session's process, while it lives.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) session: u64,
    /// False for a tool and a mount.
    pub(super) is_program: bool,
    pub(super) pidfd: OwnedFd,
}

/// See the module.
pub(super) struct Desk {
    pub(super) setup: WorkerSetup,
    /// The memory of the targets' pacers, in a pool whose media are paced.
    pub(super) pacing: Option<OwnedFd>,
    pub(super) board_fd: OwnedFd,
    pub(super) board_bytes: u64,
    pub(super) doorbell_fd: OwnedFd,
    pub(super) doorbell: Arc<Doorbell>,
    pub(super) device: u64,
    pub(super) stable_inodes: u64,
    pub(super) epoch: u64,
    pub(super) owner: u32,
    pub(super) epoll: OwnedFd,
    /// Written to wake the attendant when a connection ends.
    pub(super) wake: OwnedFd,
    pub(super) connections: AtomicUsize,
    /// Attached processes.
    pub(super) attached: AtomicUsize,
    pub(super) attached_programs: AttachedPrograms,
    pub(super) mounter: Mounter,
    pub(super) network: Option<Commands>,
    /// Limit of attached processes.
    pub(super) clients_max: usize,
    pub(super) refusals: Seldom,
    pub(super) watches: Watches,
    /// A ring for the next client, created while no client waits for it.
    pub(super) spare: Mutex<Option<(OwnedFd, ServedRing)>>,
}

impl Desk {
    /// These descriptors and those of the target directories.
    pub(super) fn with_targets(&self, some: &[&OwnedFd]) -> Vec<RawFd> {
        let all = some.iter().copied().chain(&self.setup.target_dirs);
        all.map(AsRawFd::as_raw_fd).collect()
    }

    /// A ring with its descriptor for a new client.
    pub(super) fn take_ring(&self) -> Result<(OwnedFd, ServedRing)> {
        match self.spare.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(spare) => Ok(spare),
            None => ServedRing::create().map_err(|e| Error::io("cannot make a ring", &e)),
        }
    }

    /// Creates the ring of the next client.
    pub(super) fn make_spare(&self) {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.is_none() {
            *spare = ServedRing::create().ok();
        }
    }
}

/// The message that refuses a client.
pub(super) fn refusal(code: Code, text: &str) -> Vec<u8> {
    let mut message = Header { kind: KIND_ERROR, len: 2 + text.len() as u32 }.encode().to_vec();
    message.extend((code as u16).to_le_bytes());
    message.extend(text.as_bytes());
    message
}

pub(super) fn failed(what: &str) -> impl FnOnce(Errno) -> Error + '_ {
    move |e| Error::io(what, &e.into())
}
