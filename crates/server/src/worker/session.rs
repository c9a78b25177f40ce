//! Sessions: one attached process each, with its ring, and what is owed to the shard when it moves on or dies.

use forebay_ring::ServedRing;
use forebay_types::limits::RING_SLOTS;
use forebay_types::{Ino, Kind, Layout, Reply};

/// A process that is attached.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: u64,
    pub(super) ring: ServedRing,
    pub(super) slots: Box<[Slot; RING_SLOTS]>,
}

/// What the daemon knows of a slot; nothing of it comes from the client's memory.
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// The file that the last request made, whose backing file the client may be about to make.
    pub(super) birth: Option<Ino>,
    /// Inodes that the last request left without links, whose backing files the client is unlinking.
    pub(super) orphans: Vec<(Ino, Layout)>,
    /// Sequence and reply of the last change; what a commit has to keep.
    pub(super) last_change: (u64, Vec<u8>),
    /// True while `last_change` is not in the shard.
    pub(super) unkept: bool,
}

impl Session {
    pub(super) fn new(id: u64, ring: ServedRing) -> Session {
        Session { id, ring, slots: Box::new(std::array::from_fn(|_| Slot::default())) }
    }
}

/// The file that a reply says was made.
pub(super) fn created(reply: &[u8]) -> Option<Ino> {
    match Reply::decode(reply) {
        Ok(Reply::Created { entry, created: true }) => Some(entry.attr.ino),
        _ => None,
    }
}

impl Slot {
    /// What a kept reply says is still owed.
    pub(super) fn restore(&mut self, reply: &[u8]) {
        self.birth = created(reply);
        match Reply::decode(reply) {
            Ok(Reply::Removed { ino, last: true, kind, layout }) if kind != Kind::Directory => {
                self.orphans.push((ino, layout));
            }
            _ => {}
        }
    }
}

/// A number that no other session of any pool on this node has had.
pub(super) fn new_session_id() -> forebay_types::Result<u64> {
    let bytes = crate::identity::random_bytes()?;
    let mut id = [0; 8];
    id.copy_from_slice(&bytes[..8]);
    Ok(u64::from_le_bytes(id).max(1))
}

/// A board's epoch: rises from worker to worker.
pub(super) fn new_epoch() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Tag under which a session's ring and pidfd lie in the descriptor store.
pub(super) fn store_tag(id: u64) -> String {
    format!("session {id:016x}")
}

/// The session of a tag.
pub(super) fn session_of_tag(tag: &str) -> Option<u64> {
    u64::from_str_radix(tag.strip_prefix("session ")?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_tag_round_trips() {
        for id in [1, u64::MAX, 0xabc] {
            assert_eq!(session_of_tag(&store_tag(id)), Some(id));
        }
        assert_eq!(session_of_tag("something else"), None);
    }
}
