//! Deliveries to other nodes, and their order: the oldest first, nodes in turn, and a limited number at a time for each
//! node, so that no node, up or down, delays the others. No I/O and no clock.
//!
//! A node that was not reached is *silent*: it gets one delivery at a time, until one arrives or the node sends
//! something.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::time::Duration;

use forebay_types::limits::{
    DELIVERIES_AHEAD, DELIVERIES_AHEAD_NODE, DELIVERIES_AHEAD_SILENT, DELIVERY_AGAIN_MS,
};
use forebay_types::NodeId;

use crate::effects::Delivery;

/// The result of a delivery.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ended {
    /// It was acknowledged, or there is no longer a node to receive it.
    Made,
    /// The node was reached and refused it.
    Refused,
    /// The node was not reached.
    NotReached,
}

/// The deliveries to one node.
#[derive(Debug, Default)]
struct NodeQueue {
    /// When each is due; none while it is in flight.
    all: BTreeMap<Delivery, Option<Duration>>,
    /// Those that are not in flight, by the time when they are due.
    due: BTreeSet<(Duration, Delivery)>,
    under_way: usize,
    silent: bool,
}

impl NodeQueue {
    fn put_off(&mut self, delivery: Delivery, until: Duration) {
        if let Some(Some(at)) = self.all.insert(delivery, Some(until)) {
            self.due.remove(&(at, delivery));
        }
        self.due.insert((until, delivery));
    }

    /// How many may be in flight.
    fn ahead(&self) -> usize {
        if self.silent {
            1
        } else {
            DELIVERIES_AHEAD_NODE
        }
    }
}

/// All deliveries; see the module.
#[derive(Debug, Default)]
pub(crate) struct Deliveries {
    nodes: BTreeMap<NodeId, NodeQueue>,
    under_way: usize,
    under_way_silent: usize,
    /// The node that got the last delivery.
    last: Option<NodeId>,
}

impl Deliveries {
    pub(crate) fn is_empty(&self) -> bool {
        self.nodes.values().all(|queue| queue.all.is_empty())
    }

    pub(crate) fn contains(&self, delivery: &Delivery) -> bool {
        self.nodes.get(&delivery.node()).is_some_and(|queue| queue.all.contains_key(delivery))
    }

    /// Adds a delivery that is due now, unless it exists. A new delivery is a reason to try a silent node again.
    pub(crate) fn add(&mut self, delivery: Delivery, now: Duration) {
        let queue = self.nodes.entry(delivery.node()).or_default();
        if !queue.all.contains_key(&delivery) {
            queue.put_off(delivery, now);
        }
    }

    /// The next delivery, which is in flight from now on.
    pub(crate) fn next(&mut self, now: Duration) -> Option<Delivery> {
        if self.under_way >= DELIVERIES_AHEAD {
            return None;
        }
        let may_try_silent = self.under_way_silent < DELIVERIES_AHEAD_SILENT;
        let is_ready = |queue: &NodeQueue| {
            queue.due.first().is_some_and(|(at, _)| *at <= now)
                && queue.under_way < queue.ahead()
                && (!queue.silent || may_try_silent)
        };
        let behind = (self.last.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let ready = |(_, queue): &(&NodeId, &NodeQueue)| is_ready(queue);
        let node = *self.nodes.range(behind).find(ready).or_else(|| self.nodes.iter().find(ready))?.0;
        let queue = self.nodes.get_mut(&node)?;
        let (_, delivery) = queue.due.pop_first()?;
        queue.all.insert(delivery, None);
        queue.under_way += 1;
        self.under_way += 1;
        self.under_way_silent += usize::from(queue.silent);
        self.last = Some(node);
        Some(delivery)
    }

    fn set_silent(&mut self, node: NodeId, silent: bool) {
        if let Some(queue) = self.nodes.get_mut(&node).filter(|queue| queue.silent != silent) {
            queue.silent = silent;
            match silent {
                true => self.under_way_silent += queue.under_way,
                false => self.under_way_silent -= queue.under_way,
            }
        }
    }

    /// A delivery in flight has ended: it is removed, or due again later.
    pub(crate) fn ended(&mut self, delivery: Delivery, how: Ended, now: Duration) {
        let node = delivery.node();
        let Some(queue) = self.nodes.get_mut(&node).filter(|queue| queue.all.get(&delivery) == Some(&None))
        else {
            return;
        };
        queue.under_way -= 1;
        self.under_way -= 1;
        self.under_way_silent -= usize::from(queue.silent);
        match how {
            Ended::Made => {
                queue.all.remove(&delivery);
            }
            Ended::Refused | Ended::NotReached => {
                queue.put_off(delivery, now + Duration::from_millis(DELIVERY_AGAIN_MS));
            }
        }
        self.set_silent(node, how == Ended::NotReached);
        if self.nodes.get(&node).is_some_and(|queue| queue.all.is_empty()) {
            self.nodes.remove(&node);
        }
    }

    /// A node has sent something: all its deliveries are due.
    pub(crate) fn hurry(&mut self, node: NodeId, now: Duration) {
        self.set_silent(node, false);
        let Some(queue) = self.nodes.get_mut(&node) else { return };
        let later: Vec<Delivery> = queue.due.iter().filter(|(at, _)| *at > now).map(|(_, d)| *d).collect();
        for delivery in later {
            queue.put_off(delivery, now);
        }
    }

    /// When the next delivery is due, if only time prevents it.
    pub(crate) fn next_at(&self) -> Option<Duration> {
        if self.under_way >= DELIVERIES_AHEAD {
            return None;
        }
        let may_try_silent = self.under_way_silent < DELIVERIES_AHEAD_SILENT;
        let able = self
            .nodes
            .values()
            .filter(|queue| queue.under_way < queue.ahead() && (!queue.silent || may_try_silent));
        able.filter_map(|queue| queue.due.first().map(|(at, _)| *at)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::TxId;

    const NOW: Duration = Duration::from_secs(100);
    const LATER: Duration = Duration::from_secs(103);

    fn to(node: u16, number: u64) -> Delivery {
        Delivery::Commit(TxId::new(NodeId(1), number), NodeId(node))
    }

    fn all_ready(d: &mut Deliveries, now: Duration) -> Vec<Delivery> {
        std::iter::from_fn(|| d.next(now)).collect()
    }

    #[test]
    fn next_takes_nodes_in_turn_and_of_each_what_is_due_first() {
        let mut d = Deliveries::default();
        for number in 0..200 {
            d.add(to(2, number), NOW);
        }
        d.add(to(3, 900), NOW);
        d.add(to(3, 5), NOW + Duration::from_millis(1));
        let first = all_ready(&mut d, NOW);
        assert_eq!(first[..3], [to(2, 0), to(3, 900), to(2, 1)]);
        assert_eq!(first.len(), DELIVERIES_AHEAD_NODE + 1, "some of a node's, and what the other has");
        d.ended(to(2, 0), Ended::Made, NOW);
        assert_eq!(all_ready(&mut d, LATER), [to(3, 5), to(2, 16)]);
        assert!(d.contains(&to(2, 1)) && !d.contains(&to(2, 0)));
    }

    #[test]
    fn silent_node_is_tried_with_one_at_a_time_until_it_is_heard_of() {
        let mut d = Deliveries::default();
        for number in 0..100 {
            d.add(to(2, number), NOW);
        }
        for delivery in all_ready(&mut d, NOW) {
            d.ended(delivery, Ended::NotReached, NOW);
        }
        assert_eq!(all_ready(&mut d, NOW), [to(2, 16)], "those that were not tried yet come first");
        d.ended(to(2, 16), Ended::NotReached, NOW);
        assert_eq!(all_ready(&mut d, LATER), [to(2, 17)]);
        d.hurry(NodeId(2), LATER);
        assert_eq!(all_ready(&mut d, LATER).len(), DELIVERIES_AHEAD_NODE - 1);
        d.ended(to(2, 17), Ended::NotReached, LATER);
        d.ended(to(2, 18), Ended::Made, LATER);
        assert!(d.next(LATER).is_some(), "one that arrives says as much");
    }

    #[test]
    fn many_silent_nodes_leave_room_for_one_that_answers() {
        let mut d = Deliveries::default();
        for node in 2..200 {
            d.add(to(node, 1), NOW);
            d.add(to(node, 2), NOW);
        }
        for _ in 0..20 {
            for delivery in all_ready(&mut d, NOW) {
                d.ended(delivery, Ended::NotReached, NOW);
            }
        }
        let probes = all_ready(&mut d, LATER);
        assert_eq!(probes.len(), DELIVERIES_AHEAD_SILENT);
        d.add(to(1, 7), LATER);
        assert_eq!(all_ready(&mut d, LATER), [to(1, 7)]);
        for delivery in probes {
            d.ended(delivery, Ended::Refused, LATER);
        }
        d.ended(to(1, 7), Ended::Made, LATER);
        assert!(!d.contains(&to(1, 7)) && !d.is_empty());
        assert_eq!((d.under_way, d.under_way_silent), (0, 0));
    }
}
