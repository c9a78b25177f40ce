//! Backing files on other nodes that are to go: their inode is gone, and its record stays among the orphans until they
//! are too. A node that is down gets its turn when it is back; a restart of this one begins anew from the records.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use forebay_types::{Ino, Layout, NodeId};

/// A removal that failed is tried again after so long, or when a node that was away is back.
const AGAIN: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Removal {
    layout: Layout,
    /// Requests that are not answered.
    left: usize,
    failed: bool,
    /// When it is tried again; none while requests are under way.
    again_at: Option<Duration>,
}

/// All that are under way or wait for a node.
#[derive(Debug, Default)]
pub(super) struct Removals {
    all: BTreeMap<u64, Removal>,
}

impl Removals {
    /// Requests for so many backing files of an inode are sent.
    pub(super) fn begin(&mut self, ino: Ino, layout: &Layout, requests: usize) {
        if requests == 0 {
            self.all.remove(&ino.0);
            return;
        }
        let removal = Removal { layout: *layout, left: requests, failed: false, again_at: None };
        self.all.insert(ino.0, removal);
    }

    /// One of them has ended. The inode, when it was the last and none failed.
    pub(super) fn ended(&mut self, ino: Ino, done: bool, now: Duration) -> Option<Ino> {
        let removal = self.all.get_mut(&ino.0)?;
        removal.failed |= !done;
        removal.left = removal.left.saturating_sub(1);
        if removal.left > 0 {
            return None;
        }
        if removal.failed {
            removal.again_at = Some(now + AGAIN);
            return None;
        }
        self.all.remove(&ino.0);
        Some(ino)
    }

    /// A node is back: what waits for it need not wait any longer.
    pub(super) fn hurry(&mut self, node: NodeId) {
        for removal in self.all.values_mut().filter(|r| r.again_at.is_some()) {
            let on: HashSet<u32> = removal
                .layout
                .stripes()
                .map(|(component, stripe)| removal.layout.components()[component].target(stripe) >> 16)
                .collect();
            if on.contains(&u32::from(node.0)) {
                removal.again_at = Some(Duration::ZERO);
            }
        }
    }

    /// Those that are to be tried again now.
    pub(super) fn due(&mut self, now: Duration) -> Vec<(Ino, Layout)> {
        let due = self.all.iter().filter(|(_, r)| r.again_at.is_some_and(|at| at <= now));
        due.map(|(ino, r)| (Ino(*ino), r.layout)).collect()
    }

    /// How long there is nothing to do.
    pub(super) fn next_timeout(&self, now: Duration) -> Duration {
        let next = self.all.values().filter_map(|r| r.again_at).min();
        next.map_or(Duration::MAX, |at| at.saturating_sub(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn a_removal_ends_when_all_of_it_is_done() {
        let mut r = Removals::default();
        let (ino, layout) = (Ino(7), Layout::single(NodeId(2), 0));
        r.begin(ino, &layout, 2);
        assert_eq!(r.ended(ino, true, S), None);
        assert_eq!(r.ended(ino, true, S), Some(ino));
        assert_eq!(r.ended(ino, true, S), None, "forgotten");
        assert_eq!(r.next_timeout(S), Duration::MAX);
    }

    #[test]
    fn a_removal_that_failed_is_due_later_or_when_its_node_is_back() {
        let mut r = Removals::default();
        let (ino, layout) = (Ino(7), Layout::single(NodeId(2), 0));
        r.begin(ino, &layout, 2);
        r.ended(ino, false, S);
        assert!(r.due(S * 100).is_empty(), "one is under way");
        assert_eq!(r.ended(ino, true, S), None);
        assert!(r.due(S).is_empty());
        assert_eq!(r.next_timeout(S), AGAIN);
        r.hurry(NodeId(3));
        assert!(r.due(S).is_empty(), "another node");
        r.hurry(NodeId(2));
        assert_eq!(r.due(S), [(ino, layout)]);
        r.begin(ino, &layout, 1);
        assert_eq!(r.ended(ino, true, S), Some(ino));
    }
}
