//! Leases that this node's mover holds for those of other nodes, while they copy or release a file of several nodes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_client::{LeaseKind, LeasedFiles};
use forebay_tasks::Failure;
use forebay_types::{Code, Entry, Error, Ino};

use super::link::Link;
use super::peers::Answer;
use crate::host::Instant;

/// How long leases are held after the last question about them: their mover may have died.
pub(super) const HELD: Duration = Duration::from_secs(15);

/// Leases on the backing files of a file.
#[derive(Debug)]
pub(super) struct Hold {
    pub(super) leases: LeasedFiles,
    pub(super) entry: Entry,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Holds(Mutex<HashMap<u64, (Arc<Hold>, Instant)>>);

impl Holds {
    fn all(&self) -> MutexGuard<'_, HashMap<u64, (Arc<Hold>, Instant)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn take(&self, link: &Link, number: u64, ino: Ino, epoch: u64, kind: LeaseKind) -> Answer {
        let taken = link.inode(ino).and_then(|entry| {
            if entry.attr.epoch() != epoch || !entry.attr.is_resident() {
                return Err(Code::Stale);
            }
            let leases = link.lease(&entry, kind)?;
            if kind == LeaseKind::Read {
                leases.note_copied()?;
            }
            Ok(Hold { leases, entry })
        });
        match taken {
            Ok(hold) => {
                self.all().insert(number, (Arc::new(hold), Instant::now()));
                Answer::Done
            }
            Err(code) => {
                // EAGAIN of an open in conflict with another lease has the code of EIO.
                let code = if code == Code::Io { Code::Busy } else { code };
                Answer::Failed(Failure::from(&Error::new(code, format!("cannot hold file {ino}"))))
            }
        }
    }

    /// A hold, which then stays until the caller drops it.
    pub(super) fn get(&self, number: u64) -> Option<Arc<Hold>> {
        let mut all = self.all();
        let (hold, asked) = all.get_mut(&number)?;
        *asked = Instant::now();
        Some(Arc::clone(hold))
    }

    pub(super) fn check(&self, number: u64) -> Answer {
        match self.all().get_mut(&number) {
            Some((hold, asked)) if hold.leases.is_undisturbed() => {
                *asked = Instant::now();
                Answer::Done
            }
            _ => Answer::Unknown,
        }
    }

    pub(super) fn end(&self, link: &Link, number: u64, unlink: bool) -> Answer {
        let hold = self.all().remove(&number);
        if let Some((hold, _)) = hold.filter(|_| unlink) {
            // The shard has the last word: the file may be resident again.
            let is_released = link.inode(hold.entry.attr.ino).is_ok_and(|now| !now.attr.is_resident());
            if is_released && hold.leases.is_undisturbed() {
                let _ = link.pool.unlink_released(&hold.entry);
            }
        }
        Answer::Done
    }

    /// Gives up leases that nobody asked about for long.
    pub(super) fn forget_old(&self) {
        self.all().retain(|_, (_, asked)| asked.elapsed() < HELD);
    }
}
