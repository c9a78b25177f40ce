//! What processes that opened a file together over several nodes have in common: a pointer, and locks that no other
//! program's meet. MPI's shared file pointer and atomic mode are made of them. Kept at the file's first backing file,
//! by the daemon that has it (`crates/server/src/worker/network/groups.rs`), under a number which the process that
//! makes the group draws and tells the others.

use forebay_ring::pause;
use forebay_types::{BackingId, BackingOp, Code, GroupOp, LockKind, LockWish, Reply, Request};

use crate::file::File;
use crate::locks::{PAUSE, PAUSE_MAX};
use crate::pool::caller;
use crate::remote_inodes::new_handle;

/// Numbers that are tried before it is somebody's fault that they are taken.
const DRAWS: u32 = 4;

/// A number that hardly another process of the pool draws, and not 0. Sessions differ, and so do a process's handles;
/// the constants and shifts are SplitMix64's (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
/// 2014).
fn drawn(session: u64, handle: u64) -> u64 {
    let mut z = session.wrapping_add(handle.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)).max(1)
}

impl File {
    fn ask_group<T>(
        &self,
        key: u64,
        op: GroupOp,
        take: impl Fn(Reply<'_>) -> Result<T, Code>,
    ) -> Result<T, Code> {
        let id = BackingId::of(self.ino(), self.layout(), 0, 0);
        self.pool.ask_as(caller(), &Request::Backing { id, op: BackingOp::Group { key, op } }, take)
    }

    fn tell_group(&self, key: u64, op: GroupOp) -> Result<(), Code> {
        self.ask_group(key, op, |reply| match reply {
            Reply::Done => Ok(()),
            _ => Err(Code::Malformed),
        })
    }

    /// Makes a group whose pointer begins at `position`; its number, which is not 0. It ends with this process.
    ///
    /// # Errors
    /// [`Code::NotSupported`] in a pool of one node, whose processes share memory; [`Code::NoResources`] when there are too many.
    pub fn group_make(&self, position: u64) -> Result<u64, Code> {
        if !self.pool.spans_nodes() {
            return Err(Code::NotSupported);
        }
        let session = self.pool.attached()?.reply.session;
        let mut result = Err(Code::Exists);
        for _ in 0..DRAWS {
            let key = drawn(session, new_handle());
            result = self.tell_group(key, GroupOp::Make { position }).map(|()| key);
            if result != Err(Code::Exists) {
                break;
            }
        }
        result
    }

    /// Moves the group's pointer on; where it was. It is done once, whoever dies of those that serve it.
    ///
    /// # Errors
    /// [`Code::Stale`] when there is no such group any more; [`Code::FileTooLarge`] beyond the longest file.
    pub fn group_move(&self, key: u64, by: u64) -> Result<u64, Code> {
        self.ask_group(key, GroupOp::Move { by }, |reply| match reply {
            Reply::Count(before) => Ok(before),
            _ => Err(Code::Malformed),
        })
    }

    /// Puts the group's pointer somewhere.
    ///
    /// # Errors
    /// As [`File::group_move`].
    pub fn group_seek(&self, key: u64, position: u64) -> Result<(), Code> {
        self.tell_group(key, GroupOp::Seek { position })
    }

    /// Keeps others of the group from bytes `start` to `end`, with `writes` also those that only read; waits for those
    /// that do. The lock's number, for [`File::group_unlock`]. It goes with this process.
    ///
    /// # Errors
    /// As [`File::group_move`].
    pub fn group_lock(&self, key: u64, writes: bool, start: u64, end: u64) -> Result<u64, Code> {
        let (owner, mut wait) = (new_handle(), PAUSE);
        let kind = if writes { LockKind::Write } else { LockKind::Read };
        let wish = LockWish { owner, flock: false, kind, start, end };
        loop {
            match self.tell_group(key, GroupOp::Lock(wish)) {
                // As long as it takes: who has it is there, or it goes.
                Err(Code::Busy) => {
                    pause(wait);
                    wait = (wait * 2).min(PAUSE_MAX);
                }
                told => return told.map(|()| owner),
            }
        }
    }

    /// Lets a lock go.
    ///
    /// # Errors
    /// As [`File::group_move`].
    pub fn group_unlock(&self, key: u64, lock: u64) -> Result<(), Code> {
        let wish = LockWish { owner: lock, flock: false, kind: LockKind::Unlock, start: 0, end: 0 };
        self.tell_group(key, GroupOp::Lock(wish))
    }

    /// Ends a group that this process made.
    ///
    /// # Errors
    /// [`Code::NotPermitted`] for another's.
    pub fn group_end(&self, key: u64) -> Result<(), Code> {
        self.tell_group(key, GroupOp::End)
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
