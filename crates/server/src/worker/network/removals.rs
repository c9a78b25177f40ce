//! Removal of backing files on other nodes whose inode was deleted. The inode's orphan record stays until all its
//! backing files are removed. A node that is down is asked again when it is up. After a restart of this node, the
//! removals start again from the records.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use forebay_types::{Ino, Layout, NodeId};

/// The pause before a failed removal is retried; it is also retried when a node is up again.
const AGAIN: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Removal {
    layout: Layout,
    /// Requests in flight.
    left: usize,
    failed: bool,
    /// When it is retried; none while requests are in flight.
    again_at: Option<Duration>,
}

/// All removals in progress.
#[derive(Debug, Default)]
pub(super) struct Removals {
    all: BTreeMap<u64, Removal>,
}

impl Removals {
    /// Notes that requests for so many backing files of an inode are sent.
    pub(super) fn begin(&mut self, ino: Ino, layout: &Layout, requests: usize) {
        if requests == 0 {
            self.all.remove(&ino.0);
            return;
        }
        let removal = Removal { layout: *layout, left: requests, failed: false, again_at: None };
        self.all.insert(ino.0, removal);
    }

    /// Notes the end of a request. The inode, when it was the last request and none failed.
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

    /// A node is up again: its removals are retried now.
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

    /// The removals to be retried now.
    pub(super) fn due(&mut self, now: Duration) -> Vec<(Ino, Layout)> {
        let due = self.all.iter().filter(|(_, r)| r.again_at.is_some_and(|at| at <= now));
        due.map(|(ino, r)| (Ino(*ino), r.layout)).collect()
    }

    /// The time until the next retry.
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
