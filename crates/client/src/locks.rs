//! What programs of several nodes do to a file one after the other: locks, and writes at the end of a file of several
//! backing files. Both are kept at the file's first backing file, by the daemon of the node that has it
//! (`crates/server/src/worker/network/locks.rs`).

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_ring::{call_clock, pause};
use forebay_types::limits::{APPEND_MS, FILE_BYTES_MAX, LOCK_OWNER_OF_NODE};
use forebay_types::{BackingId, BackingOp, Code, LockKind, LockWish, Reply, Request};

use crate::file::{File, Stripe};
use crate::pool::{caller, Pool};
use crate::remote_inodes::new_handle;

/// First and longest pause of who waits for another to have written.
pub(crate) const PAUSE: Duration = Duration::from_micros(100);
pub(crate) const PAUSE_MAX: Duration = Duration::from_millis(5);

/// How long who appends looks for the end, and waits for others who do, by [`call_clock`].
pub(crate) const PATIENCE_NS: u64 = APPEND_MS * 1_000_000;

/// In a pool of one node only one process writes at the end of files of several backing files: that of the mount.
static APPENDING: Mutex<()> = Mutex::new(());

/// Where the locks of a file are.
#[derive(Debug)]
pub enum LockPlace<'a> {
    /// Its first backing file is on this node: the kernel's locks on that are for all.
    Here(BorrowedFd<'a>),
    /// On another.
    There(LocksElsewhere),
}

/// The locks of a file whose first backing file is on another node.
#[derive(Clone, Copy, Debug)]
pub struct LocksElsewhere {
    pool: &'static Pool,
    id: BackingId,
}

impl LocksElsewhere {
    /// Takes or drops a lock, without waiting.
    ///
    /// # Errors
    /// [`Code::Busy`] when another is in the way; [`Code::NoResources`] when its node holds too many.
    pub fn set(&self, wish: LockWish) -> Result<(), Code> {
        self.pool.ask_backing(self.id, BackingOp::Lock(wish))
    }

    /// Drops locks; false when the node may not have heard of it.
    fn is_told(&self, wish: LockWish) -> bool {
        match self.set(wish) {
            Ok(()) => true,
            // Whatever else it says, it has heard, or is no node any more that could hold a lock. A pool that is gone
            // is this node's worker: it may be stopped, and what was asked before may still be served when it goes on.
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

    /// The lock that is in the way of one.
    pub fn test(&self, wish: LockWish) -> Result<Option<LockWish>, Code> {
        let request = Request::Backing { id: self.id, op: BackingOp::TestLock(wish) };
        self.pool.ask_as(caller(), &request, |reply| match reply {
            Reply::Done => Ok(None),
            Reply::Lock(found) => Ok(Some(found)),
            _ => Err(Code::Malformed),
        })
    }
}

/// A number for an owner of locks elsewhere. It is given up for good with all its locks: a message that took its time
/// on the way can ask for a lock again when its owner has long let go, and the other node knows it by the number. No
/// other process of the node has it, so that the other node also knows it when this process had to attach anew, under
/// another session.
pub fn new_lock_owner() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    LOCK_OWNER_OF_NODE
        | u64::from(std::process::id()) << 32
        | NEXT.fetch_add(1, Ordering::Relaxed) & 0xffff_ffff
}

/// True of a failure after which a lock may have been granted all the same, or may be yet.
pub fn leaves_lock_in_doubt(code: Code) -> bool {
    !matches!(code, Code::Busy | Code::NoResources)
}

/// Owners that have let go of all they had at other nodes, which these have not yet acknowledged: a link was down. They
/// are told until they have, so that no lock stays there of which nobody here knows.
#[derive(Debug, Default)]
pub struct Unlocks {
    waiting: Mutex<Vec<(LocksElsewhere, LockWish)>>,
}

impl Unlocks {
    fn waiting(&self) -> MutexGuard<'_, Vec<(LocksElsewhere, LockWish)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has an owner let go of everything. False: its node could not be told, and is to be told again
    /// ([`Unlocks::retry`]).
    pub fn give(&self, locks: LocksElsewhere, owner: u64, flock: bool) -> bool {
        let wish = LockWish { owner, flock, kind: LockKind::Unlock, start: 0, end: FILE_BYTES_MAX };
        let told = locks.is_told(wish);
        if !told {
            self.waiting().push((locks, wish));
        }
        told
    }

    /// Tells those again that could not be told; true when all have been.
    pub fn retry(&self) -> bool {
        let again = std::mem::take(&mut *self.waiting());
        for (i, (locks, wish)) in again.iter().enumerate() {
            if !locks.is_told(*wish) {
                // The others are mostly of the same node.
                self.waiting().extend_from_slice(&again[i..]);
                return false;
            }
        }
        self.waiting().is_empty()
    }
}

impl File {
    /// Where its locks are.
    pub fn lock_place(&self) -> LockPlace<'_> {
        match self.stripe(0, 0) {
            Stripe::Here(fd) => LockPlace::Here(fd.as_fd()),
            Stripe::There(there) => LockPlace::There(LocksElsewhere { pool: self.pool, id: there.id }),
        }
    }

    /// Writes at the end. Of a file with one backing file, which is on another node, what is no longer than
    /// [`forebay_types::limits::MOVE_BYTES_MAX`] goes in as a whole, whoever else appends; of several backing files
    /// anything does, while others append likewise.
    ///
    /// # Errors
    /// [`Code::TimedOut`] when others do not finish; [`Code::NotSupported`] for a file of one backing file of this node, whose
    /// descriptor appends.
    pub fn append(&self, buffer: &[u8]) -> Result<usize, Code> {
        match self.stripes() {
            [Stripe::There(there)] => self.pool.append_backing(there.id, buffer),
            [_] => Err(Code::NotSupported),
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
                Err(Code::Busy) if call_clock() - begin < PATIENCE_NS => {
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
        let until_ns = call_clock() + PATIENCE_NS;
        let written = self.size().and_then(|end| self.write_all_at(buffer, end, until_ns));
        // Should it not be heard, others wait until the turn is over by itself.
        let _ = self.pool.ask_backing(id, BackingOp::EndAppend { handle });
        written
    }

    /// Writes all, and fails where only some of it can be: who appended the rest by another call would leave a gap
    /// before it, where some of the stripes behind took theirs.
    fn write_all_at(&self, buffer: &[u8], at: u64, until_ns: u64) -> Result<usize, Code> {
        let mut done = 0;
        while done < buffer.len() {
            if call_clock() >= until_ns {
                // Its turn may be over before all is written.
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
