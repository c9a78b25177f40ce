//! The times at which leases from other nodes are renewed.

use std::collections::HashMap;
use std::time::Duration;

use forebay_types::limits::LEASE_MS;
use forebay_types::NodeId;

/// Length of a lease, and the time from one renewal to the next.
pub(super) const LEASE: Duration = Duration::from_millis(LEASE_MS);
const PERIOD: Duration = Duration::from_millis(LEASE_MS / 3);

/// Renewals that are not due yet.
#[derive(Debug, Default)]
pub(super) struct Renewals {
    asked_at: HashMap<NodeId, Duration>,
    due: Vec<(Duration, NodeId)>,
}

impl Renewals {
    /// A lease is needed, or needed further on.
    pub(super) fn want(&mut self, node: NodeId, now: Duration) {
        let at = self.asked_at.get(&node).map_or(now, |asked| now.max(*asked + PERIOD));
        self.due.push((at, node));
    }

    /// Takes the nodes whose renewals are due.
    pub(super) fn take_due(&mut self, now: Duration) -> Vec<NodeId> {
        if self.due.iter().all(|(at, _)| *at > now) {
            return Vec::new();
        }
        let (due, later) = std::mem::take(&mut self.due).into_iter().partition(|(at, _)| *at <= now);
        self.due = later;
        let nodes: Vec<NodeId> = Vec::into_iter(due).map(|(_, node)| node).collect();
        self.asked_at.extend(nodes.iter().map(|node| (*node, now)));
        nodes
    }

    /// The time until a renewal is due.
    pub(super) fn next_timeout(&self, now: Duration) -> Duration {
        self.due.iter().map(|(at, _)| at.saturating_sub(now)).min().unwrap_or(Duration::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_asked_for_at_once_and_then_once_a_period() {
        let (mut renewals, node) = (Renewals::default(), NodeId(2));
        let start = Duration::from_secs(100);
        renewals.want(node, start);
        assert_eq!(renewals.take_due(start), [node]);
        renewals.want(node, start + PERIOD / 4);
        assert_eq!(renewals.take_due(start + PERIOD / 2), []);
        assert_eq!(renewals.next_timeout(start + PERIOD / 2), PERIOD - PERIOD / 2);
        assert_eq!(renewals.take_due(start + PERIOD), [node]);
        assert_eq!(renewals.next_timeout(start + PERIOD), Duration::MAX);
    }
}
