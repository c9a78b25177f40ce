//! Memory that the program has allocated (`program_memory`): a memfd, and its registration with this node's daemon.
//!
//! What transfers need is behind a lock, which a child of the process that allocated the memory never takes. It is not held
//! during an exchange with the daemon.

use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_ring::call_clock;
use forebay_types::Code;

use crate::attached::{identity, raised, Attached};
use crate::pool::Pool;
use crate::registration::{random_number, Begun, Registered, Registration};

pub(crate) const PAGE_BYTES: usize = 4096;

/// Allocated memory.
#[derive(Debug)]
pub(crate) struct Allocated {
    pub(crate) pool: &'static Pool,
    /// The memfd, at a high number, and its device and inode: the program may close it and use the number.
    memory: RawFd,
    identity: (u64, u64),
    pub(crate) bytes: usize,
    transfers: Mutex<Transfers>,
}

/// What transfers from and to allocated memory need.
#[derive(Debug, Default)]
pub(crate) struct Transfers {
    pub(crate) registration: Registration,
    /// Ranges that are not transferred without a copy, as their pages were replaced.
    pub(crate) replaced: Vec<Range<usize>>,
}

impl Allocated {
    /// A memfd of `bytes` bytes, for transfers of a pool.
    pub(crate) fn new(pool: &'static Pool, memory: OwnedFd, bytes: usize) -> Result<Allocated, Code> {
        let identity = identity(memory.as_raw_fd())?;
        Ok(Allocated { pool, memory: raised(memory), identity, bytes, transfers: Mutex::default() })
    }

    /// The memfd, unless the program has closed it.
    pub(crate) fn memory(&self) -> Option<RawFd> {
        (identity(self.memory) == Ok(self.identity)).then_some(self.memory)
    }

    /// Only the process that allocated the memory calls it: another thread may have held the lock at a fork.
    pub(crate) fn transfers(&self) -> MutexGuard<'_, Transfers> {
        self.transfers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the memory registered with the worker that serves the process's session, unless it is: its number and the
    /// worker's epoch. `None` if it must be copied for now. Other threads do not wait for the answer.
    pub(crate) fn register(&self, attached: &Attached, timeout_s: libc::time_t) -> Option<(u64, u64)> {
        let (session, epoch) = (attached.reply.session, attached.ring.epoch());
        if attached.reply.nodes <= 1 {
            return None;
        }
        let mut to_withdraw = match self.transfers().registration.begin(session, epoch, call_clock()) {
            Begun::Registered(number) => return Some((number, epoch)),
            Begun::Refused => return None,
            Begun::Withdrawing(to_withdraw) => to_withdraw,
        };
        let new = self.exchange(session, &mut to_withdraw, timeout_s);
        let epoch_after = attached.ring.epoch();
        let mut transfers = self.transfers();
        let registration = &mut transfers.registration;
        registration.to_withdraw.append(&mut to_withdraw);
        (registration.is_under_way, registration.refused_ns) = (false, Some(call_clock()));
        let (number, is_registered) = new?;
        let registered = Registered { session, epoch: epoch_after, number };
        if !is_registered || epoch_after != epoch {
            // It is unknown whether a worker has registered it, and which.
            registration.to_withdraw.push(registered);
            return None;
        }
        (registration.current, registration.refused_ns) = (Some(registered), None);
        Some((number, epoch))
    }

    /// Withdraws what is not used again, and registers the memory. Returns its number, and whether the daemon has said
    /// that it is registered; `None` if it certainly is not.
    fn exchange(
        &self,
        session: u64,
        to_withdraw: &mut Vec<Registered>,
        timeout_s: libc::time_t,
    ) -> Option<(u64, bool)> {
        self.withdraw_all(to_withdraw);
        if !to_withdraw.is_empty() {
            return None;
        }
        let (memory, number) = (self.memory()?, random_number()?);
        match self.pool.address().register_memory(session, number, memory, timeout_s) {
            Ok(answer) => answer.ok().map(|()| (number, true)),
            Err(_) => Some((number, false)),
        }
    }

    /// Removes those that the daemon does not have any longer.
    fn withdraw_all(&self, to_withdraw: &mut Vec<Registered>) {
        while let Some(one) = to_withdraw.last() {
            if self.pool.address().withdraw_memory(one.session, one.number).is_err() {
                return;
            }
            to_withdraw.pop();
        }
    }

    /// Has it withdrawn, before it is freed. If the daemon does not answer, it has the memory until this process ends.
    pub(crate) fn withdraw(&self) {
        let registration = std::mem::take(&mut self.transfers().registration);
        let mut all = registration.to_withdraw;
        all.extend(registration.current);
        self.withdraw_all(&mut all);
    }

    /// Closes this process's descriptor of the memory.
    pub(crate) fn close(&self) {
        if let Some(memory) = self.memory() {
            // SAFETY: the descriptor is still ours, and not used again.
            drop(unsafe { OwnedFd::from_raw_fd(memory) });
        }
    }
}

impl Drop for Allocated {
    fn drop(&mut self) {
        self.close();
    }
}
