//! Operations passed to libfabric. Each has the context that the provider writes to, at an address that does not
//! change.

use std::sync::Arc;
use std::time::Duration;

use forebay_fabric_sys::{fi_close, fi_context2, fid_mr};
use forebay_types::Code;

use crate::endpoint::{Direction, Local, Peer};
use crate::memory::Region;

/// A registration, closed when it is dropped.
#[derive(Debug)]
pub(super) struct Mr(pub(super) *mut fid_mr);

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: opened by fi_mr_reg and closed once, before its domain, as every holder is dropped before `Objects`.
        unsafe { fi_close(self.0.cast()) };
    }
}

/// A buffer of this endpoint from which a message is sent.
#[derive(Debug)]
pub(super) struct Buffer {
    /// Closed before the region is freed, as fields are dropped in order.
    pub(super) mr: Option<Mr>,
    pub(super) region: Region,
}

/// A message to send.
#[derive(Debug)]
pub(super) struct Send {
    pub(super) token: u64,
    pub(super) tag: u64,
    pub(super) bytes: usize,
    pub(super) deadline: Duration,
    pub(super) buffer: Buffer,
}

/// A part of a transfer.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) transfer: u64,
    pub(super) direction: Direction,
    /// Keeps the memory alive as long as the provider may access it.
    pub(super) region: Arc<Registration>,
    pub(super) offset: usize,
    pub(super) bytes: usize,
    pub(super) address: u64,
    pub(super) key: u64,
}

/// Registered memory.
#[derive(Debug)]
pub(super) struct Registration {
    /// Closed before the region is freed.
    pub(super) mr: Mr,
    pub(super) region: Arc<Region>,
    /// The access and the key of the registration, for registering the memory again.
    pub(super) access: u64,
    pub(super) key: u64,
}

// SAFETY: the thread that drops it last closes the registration. One thread at a time uses an endpoint and its
// registrations (FI_THREAD_DOMAIN), as an `Arc<Registration>` never leaves its endpoint.
unsafe impl std::marker::Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

#[derive(Debug)]
pub(super) enum Work {
    /// A receive buffer, by its index.
    Receive(usize),
    Send(Send),
    Piece(Piece),
}

/// What libfabric's context pointer points to.
#[repr(C)]
pub(super) struct Operation {
    /// Used by the provider. It is the first field, so that its address is that of the operation.
    context: fi_context2,
    pub(super) peer: Peer,
    /// The operation was already reported to the user. Its completion is not reported again.
    pub(super) told: bool,
    pub(super) work: Work,
}

impl Operation {
    pub(super) fn new(peer: Peer, work: Work) -> Box<Operation> {
        Box::new(Operation {
            context: fi_context2 { internal: [std::ptr::null_mut(); 8] },
            peer,
            told: false,
            work,
        })
    }
}

/// A transfer whose pieces are not all complete.
#[derive(Debug)]
pub(super) struct Moving {
    pub(super) token: u64,
    pub(super) peer: Peer,
    pub(super) deadline: Duration,
    /// The memory to which no byte may be stored after the deadline, until it is replaced.
    pub(super) in_time: Option<(Local, Arc<Registration>)>,
    pub(super) pieces_left: usize,
    pub(super) told: bool,
    pub(super) failed: Option<(Code, String)>,
}
