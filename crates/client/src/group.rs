//! State that is shared by processes of several nodes which opened a file together: a file pointer, and locks that
//! conflict only within the group. MPI's shared file pointer and atomic mode use them. The daemon of the node with the
//! file's first backing file, or the volume's first piece, keeps them (`crates/server/src/worker/network/groups.rs`)
//! under a random number. The process that creates the group draws the number and passes it to the others.

use forebay_ring::pause;
use forebay_types::{BackingId, BackingOp, Code, GroupOp, LockKind, LockRequest, Reply, Request};

use crate::file::File;
use crate::locks::{PAUSE, PAUSE_MAX};
use crate::pool::{caller, Pool};
use crate::remote_inodes::new_handle;

/// Numbers that are tried before the call fails because each is in use.
const DRAWS: u32 = 4;

/// A pseudo-random number, not 0, that other processes of the pool are unlikely to draw. Processes differ in their
/// sessions, and the files of a process in their handles. The constants and shifts are SplitMix64's (Steele, Lea,
/// Flood: Fast splittable pseudorandom number generators, 2014).
fn drawn(session: u64, handle: u64) -> u64 {
    let mut z = session.wrapping_add(handle.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)).max(1)
}

impl File {
    /// The groups of processes that have this file open.
    pub fn groups(&self) -> Groups {
        Groups { pool: self.pool, at: BackingId::of(self.ino(), self.layout(), 0, 0) }
    }
}

impl Pool {
    /// The groups of processes that have a volume's file open, by the volume's first piece.
    pub fn groups_of_volume(&'static self, first_piece: BackingId) -> Groups {
        Groups { pool: self, at: first_piece }
    }
}

/// See the module.
#[derive(Clone, Copy)]
pub struct Groups {
    pool: &'static Pool,
    /// The backing file whose node keeps them.
    at: BackingId,
}

impl Groups {
    fn ask<T>(&self, key: u64, op: GroupOp, take: impl Fn(Reply<'_>) -> Result<T, Code>) -> Result<T, Code> {
        let request = Request::Backing { id: self.at, op: BackingOp::Group { key, op } };
        self.pool.ask_as(caller(), &request, take)
    }

    fn tell(&self, key: u64, op: GroupOp) -> Result<(), Code> {
        self.ask(key, op, |reply| match reply {
            Reply::Done => Ok(()),
            _ => Err(Code::Malformed),
        })
    }

    /// Creates a group whose pointer starts at `position`, and returns its number, which is not 0. The group ends with
    /// this process.
    ///
    /// # Errors
    /// [`Code::NotSupported`] in a pool of one node, whose processes share memory; [`Code::NoResources`] if there are
    /// too many groups.
    pub fn make(&self, position: u64) -> Result<u64, Code> {
        if !self.pool.spans_nodes() {
            return Err(Code::NotSupported);
        }
        let session = self.pool.attached()?.reply.session;
        let mut result = Err(Code::Exists);
        for _ in 0..DRAWS {
            let key = drawn(session, new_handle());
            result = self.tell(key, GroupOp::Make { position }).map(|()| key);
            if result != Err(Code::Exists) {
                break;
            }
        }
        result
    }

    /// Advances the group's pointer by `by` bytes, and returns its previous position. The pointer advances exactly
    /// once, even if a worker dies while it serves the request.
    ///
    /// # Errors
    /// [`Code::Stale`] if the group does not exist any more; [`Code::FileTooLarge`] beyond the longest file.
    pub fn move_by(&self, key: u64, by: u64) -> Result<u64, Code> {
        self.ask(key, GroupOp::Move { by }, |reply| match reply {
            Reply::Count(before) => Ok(before),
            _ => Err(Code::Malformed),
        })
    }

    /// Sets the group's pointer.
    ///
    /// # Errors
    /// As [`Groups::move_by`].
    pub fn seek(&self, key: u64, position: u64) -> Result<(), Code> {
        self.tell(key, GroupOp::Seek { position })
    }

    /// Locks bytes `start` to `end` within the group, exclusively with `writes`, else shared. Waits for conflicting
    /// locks. Returns the lock's number, for [`Groups::unlock`]. The lock ends with this process.
    ///
    /// # Errors
    /// As [`Groups::move_by`].
    pub fn lock(&self, key: u64, writes: bool, start: u64, end: u64) -> Result<u64, Code> {
        let (owner, mut wait) = (new_handle(), PAUSE);
        let kind = if writes { LockKind::Write } else { LockKind::Read };
        let wish = LockRequest { owner, flock: false, kind, start, end };
        loop {
            match self.tell(key, GroupOp::Lock(wish)) {
                // No timeout: the holder is alive, or its locks end.
                Err(Code::Busy) => {
                    pause(wait);
                    wait = (wait * 2).min(PAUSE_MAX);
                }
                told => return told.map(|()| owner),
            }
        }
    }

    /// Releases a lock.
    ///
    /// # Errors
    /// As [`Groups::move_by`].
    pub fn unlock(&self, key: u64, lock: u64) -> Result<(), Code> {
        let wish = LockRequest { owner: lock, flock: false, kind: LockKind::Unlock, start: 0, end: 0 };
        self.tell(key, GroupOp::Lock(wish))
    }

    /// Ends a group that this process made.
    ///
    /// # Errors
    /// [`Code::NotPermitted`] for a group that another process made.
    pub fn end(&self, key: u64) -> Result<(), Code> {
        self.tell(key, GroupOp::End)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_groups_differ_between_processes_and_between_a_process_s_files() {
        let mut all: Vec<u64> = (0..100).flat_map(|s| (1..100).map(move |h| drawn(s << 32 | 7, h))).collect();
        all.sort_unstable();
        all.dedup();
        assert!(all.len() == 9900 && all[0] > 0);
    }
}
