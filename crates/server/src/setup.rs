//! The setup of a worker. It arrives as one message on the worker's store socket, followed by the descriptors that
//! earlier workers stored.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use forebay_types::{Code, Error, Result};
use rustix::net::RecvFlags;
use serde::{Deserialize, Serialize};

use crate::identity::PoolIdentity;
use crate::pool_file::Membership;
use crate::store::{receive, FdStore, Message};

/// The exit status of a worker that was stopped for so long that other nodes had given it up (`worker/handoff.rs`).
pub(crate) const WAS_STOPPED: u8 = 75;

/// Everything that a worker needs to serve.
#[derive(Debug)]
pub struct WorkerSetup {
    /// The targets, at least one: `target` in the pool's directory or the root of a detached mount, then the node's
    /// other targets.
    pub target_dirs: Vec<OwnedFd>,
    /// The listening socket on which clients attach.
    pub listener: OwnedFd,
    /// The store for descriptors that survive this worker. [`FdStore::ready`] must be called once the worker serves.
    pub store: FdStore,
    /// Descriptors that earlier workers stored and did not remove.
    pub restored: Vec<(String, Vec<OwnedFd>)>,
    /// A memfd of [`FLIGHT_RECORDER_BYTES`] that is zero when the pool starts and is shared by all its workers.
    pub flight_recorder: OwnedFd,
    /// The pool's identity.
    pub identity: PoolIdentity,
    /// The pool's directory.
    pub pool_dir: PathBuf,
    /// Drawbacks of the medium and its placement, for `status`.
    pub costs: Vec<String>,
    /// The other nodes, if the pool has a pool file.
    pub membership: Option<Membership>,
}

/// Bytes of the flight recorder.
pub const FLIGHT_RECORDER_BYTES: u64 = 64 * 1024;

/// The part of the setup that is text. The descriptors beside it are listener, flight recorder, the targets, and a lock
/// for each target.
#[derive(Serialize, Deserialize)]
pub(crate) struct SetupText {
    pub(crate) identity: PoolIdentity,
    pub(crate) pool_dir: PathBuf,
    pub(crate) costs: Vec<String>,
    pub(crate) membership: Option<Membership>,
}

/// Descriptors beside the setup, in this order.
pub(crate) struct SetupFds<'a> {
    pub(crate) listener: BorrowedFd<'a>,
    pub(crate) flight_recorder: BorrowedFd<'a>,
    pub(crate) target_dirs: Vec<BorrowedFd<'a>>,
    pub(crate) locks: Vec<BorrowedFd<'a>>,
}

impl<'a> SetupFds<'a> {
    pub(crate) fn in_order(&self) -> Vec<BorrowedFd<'a>> {
        let first = [self.listener, self.flight_recorder];
        first.iter().chain(&self.target_dirs).chain(&self.locks).copied().collect()
    }
}

/// Waits for the supervisor's setup on `socket`. The second value is the locks of the pool and its targets. The worker
/// holds them open so that no other pool starts on the same targets before this process has ended.
pub(crate) fn receive_setup(socket: OwnedFd) -> Result<(WorkerSetup, Vec<OwnedFd>)> {
    let what = "cannot receive the worker's setup from the supervisor";
    let strange = || Error::new(Code::Malformed, what).cure("workers are started by their supervisor alone");
    let next = |socket: BorrowedFd<'_>| {
        receive(socket, RecvFlags::empty()).map_err(|e| Error::io(what, &e.into()))?.ok_or_else(strange)
    };
    let Message::Setup(text, fds) = next(socket.as_fd())? else { return Err(strange()) };
    let text: SetupText = serde_json::from_str(&text).map_err(|e| strange().why(e))?;
    let targets = text.identity.target_count();
    if fds.len() != 2 + 2 * targets {
        return Err(strange());
    }
    let mut fds = fds.into_iter();
    let (Some(listener), Some(flight_recorder)) = (fds.next(), fds.next()) else { return Err(strange()) };
    let target_dirs = fds.by_ref().take(targets).collect();
    let locks = fds.collect();
    let mut restored = Vec::new();
    loop {
        match next(socket.as_fd())? {
            Message::Given(tag, fds) => restored.push((tag, fds)),
            Message::End => break,
            _ => return Err(strange()),
        }
    }
    let SetupText { identity, pool_dir, costs, membership } = text;
    let store = FdStore::new(socket);
    let setup = WorkerSetup {
        target_dirs,
        listener,
        store,
        restored,
        flight_recorder,
        identity,
        pool_dir,
        costs,
        membership,
    };
    Ok((setup, locks))
}
