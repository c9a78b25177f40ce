//! Operations of several nodes on a file that exclude one another: locks, and appends to a file with several backing
//! files. The daemon of the node with the file's first backing file keeps the state of both
//! (`crates/server/src/worker/network/locks.rs`).

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use forebay_ring::{call_clock, pause};
use forebay_types::limits::{APPEND_MS, FILE_BYTES_MAX, LOCK_OWNER_OF_NODE};
use forebay_types::{BackingId, BackingOp, Code, LockKind, LockRequest, Reply, Request};

use crate::file::{File, Stripe};
use crate::pool::{caller, Pool};
use crate::remote_inodes::new_handle;

/// First and longest pause of a caller that waits for another append or lock to end.
pub(crate) const PAUSE: Duration = Duration::from_micros(100);
pub(crate) const PAUSE_MAX: Duration = Duration::from_millis(5);

/// Longest duration of an append, and longest wait for other appends, in [`call_clock`]'s nanoseconds.
pub(crate) const APPEND_TIMEOUT_NS: u64 = APPEND_MS * 1_000_000;

/// In a pool of one node only the mount's process appends to files with several backing files.
static APPENDING: Mutex<()> = Mutex::new(());

/// The node on which a file's locks are kept.
#[derive(Debug)]
pub enum LockPlace<'a> {
    /// The first backing file is on this node. The kernel's locks on it hold for all nodes.
    Here(BorrowedFd<'a>),
    /// The first backing file is on another node.
    There(LocksElsewhere),
}

/// The locks of a file whose first backing file is on another node.
#[derive(Clone, Copy, Debug)]
pub struct LocksElsewhere {
    pool: &'static Pool,
    id: BackingId,
}

impl LocksElsewhere {
    /// Takes or releases a lock, without waiting.
    ///
    /// # Errors
    /// [`Code::Busy`] if another lock conflicts; [`Code::NoResources`] if the file's node holds too many locks.
    pub fn set(&self, wish: LockRequest) -> Result<(), Code> {
        self.pool.ask_backing(self.id, BackingOp::Lock(wish))
    }

    /// Releases locks. False if the node may not have received the request.
    fn is_acknowledged(&self, wish: LockRequest) -> bool {
        match self.set(wish) {
            Ok(()) => true,
            // With any other error the node received the request, or is no longer a node that could hold a lock.
            // `PoolGone` refers to this node's worker, which may be stopped and may still serve earlier requests when
            // it continues.
            Err(code) => !matches!(
                code,
                Code::Io
                    | Code::TimedOut
                    | Code::Busy
                    | Code::NoResources
                    | Code::PoolGone
                    | Code::UnknownSession
            ),
        }
    }

    /// The lock that conflicts with `wish`, if there is one.
    pub fn test(&self, wish: LockRequest) -> Result<Option<LockRequest>, Code> {
        let request = Request::Backing { id: self.id, op: BackingOp::TestLock(wish) };
        self.pool.ask_as(caller(), &request, |reply| match reply {
            Reply::Done => Ok(None),
            Reply::Lock(found) => Ok(Some(found)),
            _ => Err(Code::Malformed),
        })
    }
}

/// A number for an owner of locks on other nodes. A number is not used again after all locks of its owner were
/// released: a delayed message can still request a lock, and the other node then recognizes the number and refuses. No
/// other process of the node has the number. So the other node recognizes it even if this process attached anew, under
/// another session.
///
/// The counter starts at random, because a process may have the process number of an earlier one: a mount that is
/// restarted in a container often does.
pub fn new_lock_owner() -> u64 {
    static FIRST: OnceLock<u64> = OnceLock::new();
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = FIRST.get_or_init(random).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
    LOCK_OWNER_OF_NODE | u64::from(std::process::id()) << 32 | number & 0xffff_ffff
}

/// A random number, or early after boot one by the clock.
fn random() -> u64 {
    let mut bytes = [0; 8];
    // SAFETY: the buffer is writable and has the given length.
    let n = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), libc::GRND_NONBLOCK) };
    if n == bytes.len() as isize {
        u64::from_ne_bytes(bytes)
    } else {
        call_clock()
    }
}

/// True for an error after which the lock may have been granted, or may still be granted.
pub fn leaves_lock_in_doubt(code: Code) -> bool {
    !matches!(code, Code::Busy | Code::NoResources)
}

/// Owners that released all their locks on other nodes, and whose release was not acknowledged because a link was down.
/// The release is retried until it is acknowledged, so that no lock without an owner remains.
#[derive(Debug, Default)]
pub struct Unlocks {
    waiting: Mutex<Vec<(LocksElsewhere, LockRequest)>>,
}

impl Unlocks {
    fn waiting(&self) -> MutexGuard<'_, Vec<(LocksElsewhere, LockRequest)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases all locks of an owner. False if its node could not be reached: the release is kept for
    /// [`Unlocks::retry`].
    pub fn release(&self, locks: LocksElsewhere, owner: u64, flock: bool) -> bool {
        let wish = LockRequest { owner, flock, kind: LockKind::Unlock, start: 0, end: FILE_BYTES_MAX };
        let acknowledged = locks.is_acknowledged(wish);
        if !acknowledged {
            self.waiting().push((locks, wish));
        }
        acknowledged
    }

    /// Retries the releases that were not acknowledged. True if none remain.
    pub fn retry(&self) -> bool {
        let again = std::mem::take(&mut *self.waiting());
        for (i, (locks, wish)) in again.iter().enumerate() {
            if !locks.is_acknowledged(*wish) {
                // The others are mostly for the same node.
                self.waiting().extend_from_slice(&again[i..]);
                return false;
            }
        }
        self.waiting().is_empty()
    }
}

impl File {
    /// The node on which the file's locks are kept.
    pub fn lock_place(&self) -> LockPlace<'_> {
        match self.stripe(0, 0) {
            Stripe::Local(fd) => LockPlace::Here(fd.as_fd()),
            Stripe::Remote(remote) => LockPlace::There(LocksElsewhere { pool: self.pool, id: remote.id }),
        }
    }

    /// Writes at the file's end. Appends do not mix: if the file has one backing file, on another node, up to
    /// [`forebay_types::limits::MOVE_BYTES_MAX`] bytes are appended as a whole. If it has several backing files, any
    /// length is appended as a whole relative to other calls of this function.
    ///
    /// # Errors
    /// [`Code::TimedOut`] if other appends do not finish; [`Code::NotSupported`] for a file with one backing file on
    /// this node, where the caller appends by the descriptor, unless the pool emulates a medium.
    pub fn append(&self, buffer: &[u8]) -> Result<usize, Code> {
        match self.stripes() {
            [Stripe::Remote(remote)] => self.pool.append_backing(remote.id, buffer),
            [Stripe::Local(_)] if !self.is_paced() => Err(Code::NotSupported),
            [Stripe::Local(fd)] => self.append_here(fd, buffer),
            _ if !self.pool.spans_nodes() => {
                let _turn = APPENDING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                self.write_at(buffer, self.size()?)
            }
            _ => self.append_in_turn(buffer),
        }
    }

    fn append_in_turn(&self, buffer: &[u8]) -> Result<usize, Code> {
        let id = BackingId::of(self.ino(), self.layout(), 0, 0);
        let (handle, begin, mut wait) = (new_handle(), call_clock(), PAUSE);
        loop {
            match self.pool.ask_backing(id, BackingOp::BeginAppend { handle }) {
                Err(Code::Busy) if call_clock() - begin < APPEND_TIMEOUT_NS => {
                    pause(wait);
                    wait = (wait * 2).min(PAUSE_MAX);
                }
                Err(Code::Busy) => return Err(Code::TimedOut),
                begun => {
                    begun?;
                    break;
                }
            }
        }
        let until_ns = call_clock() + APPEND_TIMEOUT_NS;
        let written = self.size().and_then(|end| self.write_all_at(buffer, end, until_ns));
        // If the message is lost, other appends wait until this turn times out.
        let _ = self.pool.ask_backing(id, BackingOp::EndAppend { handle });
        written
    }

    /// Writes all bytes or fails. A short count would not do: later stripes may already have been written, and the
    /// caller's next append would leave a gap before them.
    fn write_all_at(&self, buffer: &[u8], at: u64, until_ns: u64) -> Result<usize, Code> {
        let mut done = 0;
        while done < buffer.len() {
            if call_clock() >= until_ns {
                // The turn may end before all bytes are written.
                return Err(Code::TimedOut);
            }
            match self.write_at(&buffer[done..], at + done as u64)? {
                0 => return Err(Code::Io),
                n => done += n,
            }
        }
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_owners_are_distinct_and_do_not_start_at_one_number_in_each_process() {
        let owners: Vec<u64> = (0..100).map(|_| new_lock_owner()).collect();
        let mut distinct = owners.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), owners.len());
        let process = LOCK_OWNER_OF_NODE | u64::from(std::process::id()) << 32;
        assert!(owners.iter().all(|owner| owner & !0xffff_ffff == process), "{owners:x?}");
        // A random start below 100 is expected once in 40 million runs.
        assert!(owners[0] & 0xffff_ffff >= 100, "a counter that starts at zero");
    }
}
