//! Backing files between the shard's inodes and the media: those that clients may be about to create, and those that
//! are to be removed.
//!
//! ```text
//! created ─► pending: its client may be creating the backing file ─ the slot's next request ─► settled
//!               └ the file loses its last name meanwhile ─► unlinked while pending ─ the slot's next request ─► swept
//! orphaned ─► its client unlinks the backing file, the slot's next requests ─► unlinked ─► record deleted
//!      └ no client does ─► swept, many at a time ───────────────────────────────┘
//! ```
//! What must survive a crash is in the shard: orphans, and reserved numbers.

use std::collections::VecDeque;
use std::sync::mpsc::Sender;

use forebay_types::{Ino, Layout};

use super::sweeper::Sweep;

/// Orphan records are deleted this many at a time.
const FORGET_AT: usize = 256;
/// Orphans are given to the sweeper this many at a time, or after so many batches as many as there are: to wake the
/// sweeper, and another node, for each would cost more than the rest of an unlink.
const SWEEP_AT: usize = 256;
const SWEEP_AFTER_BATCHES: u32 = 32;
/// Removed inodes of other nodes that are remembered: about as many as are removed while a node does not answer for
/// some seconds.
const REMOVED_ELSEWHERE_MAX: usize = 4096;

/// See the module.
#[derive(Debug)]
pub(super) struct BackingFiles {
    sweeper: Sender<Sweep>,
    /// Files whose client may still be creating the backing file.
    pending: Vec<Ino>,
    /// Files unlinked while pending: swept at the slot's next request.
    unlinked_while_pending: Vec<(Ino, Layout)>,
    /// Inodes of other nodes whose backing files were removed while clients of this node had requests in progress at
    /// other nodes: the reply to such a request may create one of them.
    removed_elsewhere: VecDeque<Ino>,
    /// Orphans whose backing files no client unlinks, to be swept together.
    unswept: Vec<(Ino, Layout)>,
    /// Batches since the first of them.
    unswept_batches: u32,
    /// Orphans whose backing files are gone, and whose records can be deleted.
    unlinked: Vec<Ino>,
    /// Reserved numbers that were not used and are no longer reserved.
    given_up: Vec<Ino>,
}

impl BackingFiles {
    pub(super) fn new(sweeper: Sender<Sweep>) -> BackingFiles {
        BackingFiles {
            sweeper,
            pending: Vec::new(),
            unlinked_while_pending: Vec::new(),
            removed_elsewhere: VecDeque::new(),
            unswept: Vec::new(),
            unswept_batches: 0,
            unlinked: Vec::new(),
            given_up: Vec::new(),
        }
    }

    /// A client received the reply that it created a file, and may create its backing file from now on.
    pub(super) fn create_pending(&mut self, ino: Ino) {
        self.pending.push(ino);
    }

    /// True while a client may be creating the backing file.
    pub(super) fn is_pending(&self, ino: Ino) -> bool {
        self.pending.contains(&ino)
    }

    /// A file lost its last name while it was pending. False if that was noted before.
    pub(super) fn unlinked_while_pending(&mut self, ino: Ino, layout: Layout) -> bool {
        let is_known = self.unlinked_while_pending.iter().any(|(known, _)| *known == ino);
        if !is_known {
            self.unlinked_while_pending.push((ino, layout));
        }
        !is_known
    }

    /// The slot of a file's creator has sent its next request. Returns the file if it was unlinked meanwhile and is to
    /// be swept.
    pub(super) fn create_settled(&mut self, ino: Ino) -> Option<(Ino, Layout)> {
        if let Some(i) = self.pending.iter().position(|&pending| pending == ino) {
            self.pending.swap_remove(i);
        }
        let i = self.unlinked_while_pending.iter().position(|(unlinked, _)| *unlinked == ino)?;
        Some(self.unlinked_while_pending.swap_remove(i))
    }

    /// Another node removes backing files on this node of its own inodes. `may_create`: a client of this node may still
    /// get a reply that creates one of them. Returns those whose client may be creating the backing file.
    pub(super) fn removed_elsewhere(&mut self, inos: &[Ino], may_create: bool) -> Vec<Ino> {
        match may_create {
            true => self.removed_elsewhere.extend(inos),
            false => self.removed_elsewhere.clear(),
        }
        let excess = self.removed_elsewhere.len().saturating_sub(REMOVED_ELSEWHERE_MAX);
        self.removed_elsewhere.drain(..excess);
        inos.iter().copied().filter(|ino| self.is_pending(*ino)).collect()
    }

    /// True for a file of another node whose removal overtook the reply that created it.
    pub(super) fn was_removed_elsewhere(&self, ino: Ino) -> bool {
        self.removed_elsewhere.contains(&ino)
    }

    /// Gives the sweeper a job now.
    pub(super) fn sweep(&self, what: Sweep) {
        let _ = self.sweeper.send(what);
    }

    /// Queues an orphan for the sweeper: no client unlinks its backing files.
    pub(super) fn sweep_soon(&mut self, orphan: (Ino, Layout)) {
        self.unswept.push(orphan);
    }

    /// After a batch: gives the sweeper the queued orphans, if that is due.
    pub(super) fn sweep_if_due(&mut self) {
        if !self.unswept.is_empty() {
            self.unswept_batches += 1;
            if self.unswept.len() >= SWEEP_AT || self.unswept_batches >= SWEEP_AFTER_BATCHES {
                self.sweep_together();
            }
        }
    }

    /// Gives the sweeper all queued orphans.
    pub(super) fn sweep_together(&mut self) {
        self.unswept_batches = 0;
        if !self.unswept.is_empty() {
            let orphans = std::mem::take(&mut self.unswept);
            self.sweep(Sweep::Orphans(orphans));
        }
    }

    /// The backing files of these orphans are gone.
    pub(super) fn unlinked(&mut self, inos: impl IntoIterator<Item = Ino>) {
        self.unlinked.extend(inos);
    }

    /// The list of such orphans, to add to.
    pub(super) fn all_unlinked(&mut self) -> &mut Vec<Ino> {
        &mut self.unlinked
    }

    /// True when there are orphans whose records can be deleted.
    pub(super) fn has_unlinked(&self) -> bool {
        !self.unlinked.is_empty()
    }

    /// True when it pays to delete their records.
    pub(super) fn has_many_unlinked(&self) -> bool {
        self.unlinked.len() >= FORGET_AT
    }

    /// Takes those orphans. The caller deletes their records.
    pub(super) fn take_unlinked(&mut self) -> Vec<Ino> {
        std::mem::take(&mut self.unlinked)
    }

    /// A reserved number was not used, and is no longer reserved.
    pub(super) fn give_up(&mut self, number: Option<Ino>) {
        self.given_up.extend(number);
    }

    /// Takes those numbers. The caller lists them as orphans.
    pub(super) fn take_given_up(&mut self) -> Vec<Ino> {
        std::mem::take(&mut self.given_up)
    }
}

/// The layout of the single backing file that may exist under a reserved number.
pub(super) fn layout_of_number(ino: Ino) -> Layout {
    Layout::single(ino.birth_node(), 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::NodeId;
    use std::sync::mpsc::{channel, Receiver};

    fn files() -> (BackingFiles, Receiver<Sweep>) {
        let (sender, swept) = channel();
        (BackingFiles::new(sender), swept)
    }

    fn orphan(n: u64) -> (Ino, Layout) {
        (Ino(n), Layout::single(NodeId(1), 0))
    }

    fn orphans(swept: &Receiver<Sweep>) -> Vec<Ino> {
        let lists = swept.try_iter().map(|sweep| match sweep {
            Sweep::Orphans(list) => list,
            other => panic!("{other:?}"),
        });
        lists.flatten().map(|(ino, _)| ino).collect()
    }

    #[test]
    fn file_unlinked_while_pending_is_swept_when_its_client_goes_on() {
        let (mut files, _) = files();
        let (ino, layout) = orphan(5);
        files.create_pending(ino);
        assert!(files.is_pending(ino));
        assert!(files.unlinked_while_pending(ino, layout));
        assert!(!files.unlinked_while_pending(ino, layout), "it is swept once");
        assert_eq!(files.create_settled(ino), Some((ino, layout)));
        assert!(!files.is_pending(ino));
        assert_eq!(files.create_settled(ino), None);
    }

    #[test]
    fn orphans_are_swept_many_at_a_time_or_after_some_batches() {
        let (mut files, swept) = files();
        files.sweep_soon(orphan(1));
        for _ in 1..SWEEP_AFTER_BATCHES {
            files.sweep_if_due();
        }
        assert_eq!(orphans(&swept), []);
        files.sweep_if_due();
        assert_eq!(orphans(&swept), [Ino(1)]);
        (0..SWEEP_AT as u64).for_each(|n| files.sweep_soon(orphan(n)));
        files.sweep_if_due();
        assert_eq!(orphans(&swept).len(), SWEEP_AT);
    }

    #[test]
    fn removals_of_other_nodes_are_remembered_while_a_reply_may_create_the_file() {
        let (mut files, _) = files();
        assert_eq!(files.removed_elsewhere(&[Ino(1)], true), []);
        assert!(files.was_removed_elsewhere(Ino(1)));
        files.create_pending(Ino(2));
        assert_eq!(files.removed_elsewhere(&[Ino(2)], true), [Ino(2)]);
        let many: Vec<Ino> = (10..10 + REMOVED_ELSEWHERE_MAX as u64).map(Ino).collect();
        files.removed_elsewhere(&many, true);
        assert!(!files.was_removed_elsewhere(Ino(1)), "the oldest go");
        files.removed_elsewhere(&[], false);
        assert!(!files.was_removed_elsewhere(many[0]));
    }
}
