//! What programs of several nodes do to a file one after the other: locks, and writes at the end of a file of several backing
//! files. Both are kept at the file's first backing file, by the daemon of the node that has it
//! (`crates/server/src/worker/network/locks.rs`).

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;
use std::time::Duration;

use forebay_ring::{call_clock, pause};
use forebay_types::limits::APPEND_MS;
use forebay_types::{BackingId, BackingOp, Code, LockWish, Reply, Request};

use crate::elsewhere::new_handle;
use crate::file::{File, Stripe};
use crate::pool::{caller, Pool};

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

impl File {
    /// Where its locks are.
    pub fn lock_place(&self) -> LockPlace<'_> {
        match self.stripe(0, 0) {
            Stripe::Here(fd) => LockPlace::Here(fd.as_fd()),
            Stripe::There(there) => LockPlace::There(LocksElsewhere { pool: self.pool, id: there.id }),
        }
    }

    /// Writes at the end. Of a file with one backing file, which is on another node, what is no longer than
    /// [`forebay_types::limits::MOVE_BYTES_MAX`] goes in as a whole, whoever else appends; of several backing files anything
    /// does, while others append likewise.
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

    /// Writes all, and fails where only some of it can be: who appended the rest by another call would leave a gap before it, where some of the
    /// stripes behind took theirs.
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
