//! Leases on all backing files of a file, on whatever nodes they are.
//!
//! Leases keep out the programs of one node. So each node's mover takes those on its own backing files, and a node that
//! reads or writes a backing file for another one opens it like a program. What is done under a hold counts only if
//! [`Held::is_whole`] is true after it.

use std::sync::Mutex;
use std::time::Duration;

use forebay_client::{LeaseKind, LeasedFiles};
use forebay_types::{Code, Entry, NodeId};

use super::link::Link;
use super::peers::{Answer, Letter, Peers};
use crate::host::Instant;

/// How often other nodes are asked whether their leases are undisturbed. They hold them for longer
/// ([`super::holds::HELD`]).
const CHECK_PERIOD: Duration = Duration::from_secs(3);

/// See the module.
pub(super) struct Held<'a> {
    peers: &'a Peers,
    here: LeasedFiles,
    /// Other nodes, and the numbers of their holds.
    there: Vec<(NodeId, u64)>,
    checked: Mutex<(Instant, bool)>,
}

impl<'a> Held<'a> {
    /// Takes the leases.
    ///
    /// # Errors
    /// [`Code::Busy`] if a program has the file open in conflict with them; [`Code::Stale`] and [`Code::NotFound`] if it
    /// was released or removed; [`Code::TimedOut`] if a node does not answer.
    pub(super) fn take(
        link: &Link,
        peers: &'a Peers,
        entry: &Entry,
        kind: LeaseKind,
    ) -> Result<Held<'a>, Code> {
        // EAGAIN of an open in conflict with another lease has the code of EIO.
        let here =
            link.lease(entry, kind).map_err(|code| if code == Code::Io { Code::Busy } else { code })?;
        if kind == LeaseKind::Read && link.pool.spans_nodes() {
            here.note_copied()?;
        }
        let mut held = Held { peers, here, there: Vec::new(), checked: Mutex::new((Instant::now(), true)) };
        if kind == LeaseKind::None {
            return Ok(held);
        }
        for node in link.pool.other_nodes_of(&entry.layout) {
            let (hold, write) = (peers.number(), kind == LeaseKind::Write);
            let (ino, epoch) = (entry.attr.ino.0, entry.attr.epoch());
            match peers.ask(node, &Letter::Hold { hold, ino, epoch, write }) {
                Ok(Answer::Done) => held.there.push((node, hold)),
                Ok(Answer::Failed(failure)) => return Err(Code::from_u16(failure.code)),
                _ => {
                    held.there.push((node, hold)); // it may hold them all the same: they are given up
                    return Err(Code::TimedOut);
                }
            }
        }
        Ok(held)
    }

    /// The other nodes that have backing files of it, and the numbers of their holds; none without leases.
    pub(super) fn there(&self) -> &[(NodeId, u64)] {
        &self.there
    }

    /// The backing files of this node.
    pub(super) fn here(&self) -> &LeasedFiles {
        &self.here
    }

    /// True if no program of this node has disturbed the leases, nor, as far as was asked in the last seconds, one of
    /// another node.
    pub(super) fn is_undisturbed(&self) -> bool {
        if !self.here.is_undisturbed() {
            return false;
        }
        let mut checked = self.checked.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !self.there.is_empty() && checked.1 && checked.0.elapsed() > CHECK_PERIOD {
            *checked = (Instant::now(), self.are_others_undisturbed());
        }
        checked.1
    }

    fn are_others_undisturbed(&self) -> bool {
        let is_undisturbed = |(node, hold): &(NodeId, u64)| {
            matches!(self.peers.ask(*node, &Letter::Check { hold: *hold }), Ok(Answer::Done))
        };
        self.there.iter().all(is_undisturbed)
    }

    /// True if no program of any node has disturbed the leases.
    pub(super) fn is_whole(&self) -> bool {
        self.here.is_undisturbed() && self.are_others_undisturbed()
    }

    /// Has the other nodes unlink their backing files of a file that was released. What a node does not unlink now, its
    /// mover finds later.
    pub(super) fn unlink_others(&mut self) {
        for (node, hold) in self.there.drain(..) {
            let _ = self.peers.ask(node, &Letter::Unhold { hold, unlink: true });
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        for (node, hold) in &self.there {
            let _ = self.peers.ask(*node, &Letter::Unhold { hold: *hold, unlink: false });
        }
    }
}
