//! The space map, and the selection of targets for new files by it.
//!
//! Nodes are asked for their space on demand, not periodically. A report that is at most [`FRESH`] old is used as it
//! is. An older one, up to [`OLD`], is used too while the nodes are asked again. Beyond that a request waits for the
//! nodes. The selection for a file never waits. It assumes that a node that has never reported has space, except for a
//! file of one stripe: it goes to another node only for space that the other node has reported.
//!
//! A state machine: the clock is an argument, and this module sends nothing.

use std::collections::HashMap;
use std::time::Duration;

use forebay_types::limits::{HIGH_WATER_PERCENT, TARGETS_MAX};
use forebay_types::{node_of, target_of, Code, NodeId, PoolSpace, TargetSpace, Targets};
use forebay_wire::Stamp;

/// No other round is started while the last one is not older than this.
const FRESH: Duration = Duration::from_secs(2);
/// If the last completed round is older than this, a request waits for the round in progress.
const OLD: Duration = Duration::from_secs(30);

/// What a node reported of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SpaceReport {
    pub(super) inodes: u64,
    pub(super) free_inodes: u64,
    pub(super) spaces: Vec<TargetSpace>,
}

/// A target on which a file may be created.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    target: u32,
    /// No call to its node has failed since the last that succeeded.
    reached: bool,
    /// It is below its high-water mark, or has not reported.
    roomy: bool,
}

/// A node, and how many targets the pool file gives it.
#[derive(Clone, Copy, Debug)]
pub(in crate::worker) struct TargetNode {
    pub(in crate::worker) node: NodeId,
    pub(in crate::worker) targets: u16,
}

/// A process that waits for the pool's space.
#[derive(Debug)]
struct Waiting {
    stamp: Stamp,
    own: PoolSpace,
}

/// What this node knows of the space on all nodes.
#[derive(Debug)]
pub(super) struct SpaceMap {
    me: NodeId,
    target_nodes: Vec<TargetNode>,
    /// None for a node that did not answer.
    said: HashMap<NodeId, Option<SpaceReport>>,
    /// When the last round started, and when the last completed round did.
    asked: Option<Duration>,
    heard: Option<Duration>,
    /// Answers of the current round that have not arrived.
    left: usize,
    waiting: Vec<Waiting>,
    /// Incremented for each file, so that files of one node are distributed over different other nodes.
    turn: usize,
}

/// True below the high-water mark.
fn is_roomy(space: &TargetSpace) -> bool {
    let used = space.total_bytes.saturating_sub(space.free_bytes);
    u128::from(used) * 100 < u128::from(space.total_bytes) * u128::from(HIGH_WATER_PERCENT)
}

impl SpaceMap {
    /// `target_nodes`: the pool's nodes, this one among them.
    pub(super) fn new(me: NodeId, target_nodes: Vec<TargetNode>) -> SpaceMap {
        let (said, waiting) = (HashMap::new(), Vec::new());
        SpaceMap { me, target_nodes, said, asked: None, heard: None, left: 0, waiting, turn: 0 }
    }

    /// A node that lost its data has a new number. Requests to the old one still end in [`SpaceMap::hear`].
    pub(super) fn renumber(&mut self, old: NodeId, new: NodeId) {
        self.said.remove(&old);
        self.target_nodes.iter_mut().filter(|g| g.node == old).for_each(|g| g.node = new);
    }

    /// A node no longer answers: it is selected only where there is no other.
    pub(super) fn lost(&mut self, node: NodeId) {
        self.said.insert(node, None);
    }

    /// A node that did not answer is reached again. Its space is unknown until it reports.
    pub(super) fn found(&mut self, node: NodeId) {
        if self.said.get(&node).is_some_and(Option::is_none) {
            self.said.remove(&node);
        }
    }

    /// The nodes to ask now, each once, if the last round is no longer fresh. Empty while a round is in progress. The
    /// caller calls [`SpaceMap::hear`] for each.
    pub(super) fn next_round(&mut self, now: Duration) -> Vec<NodeId> {
        let is_fresh = self.asked.is_some_and(|asked| now.saturating_sub(asked) <= FRESH);
        if is_fresh {
            return Vec::new();
        }
        self.round_now(now)
    }

    /// The same, also if the last round is fresh.
    pub(super) fn round_now(&mut self, now: Duration) -> Vec<NodeId> {
        if self.left > 0 {
            return Vec::new();
        }
        self.asked = Some(now);
        let others: Vec<NodeId> =
            self.target_nodes.iter().map(|g| g.node).filter(|n| *n != self.me).collect();
        self.left = others.len();
        others
    }

    /// True while a round is in progress.
    pub(super) fn is_asking(&self) -> bool {
        self.left > 0
    }

    /// A node's last report. None if it did not answer.
    pub(super) fn said_by(&self, node: NodeId) -> Option<&SpaceReport> {
        self.said.get(&node)?.as_ref()
    }

    /// A node answered, or did not. After the round's last answer returns the processes that waited, with their
    /// replies.
    pub(super) fn hear(&mut self, node: NodeId, said: Result<SpaceReport, Code>) -> Vec<(Stamp, PoolSpace)> {
        self.said.insert(node, said.ok());
        self.left = self.left.saturating_sub(1);
        if self.left > 0 {
            return Vec::new();
        }
        self.heard = self.asked;
        let waiting = std::mem::take(&mut self.waiting);
        waiting.into_iter().map(|w| (w.stamp, self.total(&w.own))).collect()
    }

    /// The pool's space for a process; `own` is this node's. None: the process waits.
    pub(super) fn space(&mut self, now: Duration, stamp: Stamp, own: PoolSpace) -> Option<PoolSpace> {
        if self.left > 0 && self.heard.is_none_or(|heard| now.saturating_sub(heard) > OLD) {
            self.waiting.push(Waiting { stamp, own });
            return None;
        }
        Some(self.total(&own))
    }

    /// Space of all nodes that can be reached, and inodes of all shards there.
    fn total(&self, own: &PoolSpace) -> PoolSpace {
        let others = self.said.values().flatten();
        others.fold(*own, |mut sum, said| {
            for space in &said.spaces {
                sum.total_bytes = sum.total_bytes.saturating_add(space.total_bytes);
                sum.free_bytes = sum.free_bytes.saturating_add(space.free_bytes);
            }
            sum.inodes = sum.inodes.saturating_add(said.inodes);
            sum.free_inodes = sum.free_inodes.saturating_add(said.free_inodes);
            sum
        })
    }

    /// Selects targets for a file with `stripe_count` stripes. `own`: space of this node's targets.
    pub(super) fn place(&mut self, own: &[TargetSpace], stripe_count: u16) -> Targets {
        self.turn = self.turn.wrapping_add(1);
        // A file of one stripe goes to another node only for space that the node has reported.
        let candidates = self.candidates(own, stripe_count == 1);
        let chosen = choose(&candidates, self.me, self.turn, usize::from(stripe_count));
        // Some node has a target: at least the first, which has the root.
        Targets::new(&chosen)
            .or(Targets::new(&[target_of(NodeId::FIRST, 0)]))
            .unwrap_or_else(|| unreachable!())
    }

    fn candidates(&self, own: &[TargetSpace], certain: bool) -> Vec<Candidate> {
        let mut all = Vec::new();
        for TargetNode { node, targets } in &self.target_nodes {
            let said = self.said.get(node);
            let reached = *node == self.me || !matches!(said, Some(None));
            let spaces = match said {
                _ if *node == self.me => own,
                Some(Some(said)) => &said.spaces,
                _ => &[],
            };
            all.extend((0..*targets).map(|index| {
                let target = target_of(*node, index);
                let roomy = spaces.iter().find(|s| s.target == target).map_or(!certain, is_roomy);
                Candidate { target, reached, roomy }
            }));
        }
        all
    }
}

/// Selects `count` different targets, or as many as there are: first those of this node, then those of the other nodes,
/// beginning with the `turn`-th. No node gives its second target before each has given one. Full or unreachable targets
/// are used only if there are no others.
fn choose(all: &[Candidate], me: NodeId, turn: usize, count: usize) -> Vec<u32> {
    let tiers: [fn(&Candidate) -> bool; 3] = [|c| c.reached && c.roomy, |c| c.reached, |_| true];
    let usable: Vec<u32> = tiers
        .iter()
        .map(|tier| all.iter().filter(|c| tier(c)).map(|c| c.target).collect::<Vec<_>>())
        .find(|some| !some.is_empty())
        .unwrap_or_default();
    let mut nodes: Vec<NodeId> = usable.iter().map(|t| node_of(*t)).filter(|n| *n != me).collect();
    nodes.dedup();
    if !nodes.is_empty() {
        let by = turn % nodes.len();
        nodes.rotate_left(by);
    }
    nodes.insert(0, me);
    let of = |node| usable.iter().copied().filter(move |t| node_of(*t) == node);
    let rounds = nodes.iter().map(|node| of(*node).count()).max().unwrap_or(0);
    let mut chosen: Vec<u32> =
        (0..rounds).flat_map(|round| nodes.iter().filter_map(move |node| of(*node).nth(round))).collect();
    chosen.truncate(count.clamp(1, TARGETS_MAX));
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const S: Duration = Duration::from_secs(1);

    fn t(node: u16, index: u16) -> u32 {
        target_of(NodeId(node), index)
    }

    fn space(target: u32, free_percent: u64) -> TargetSpace {
        TargetSpace { target, total_bytes: 1000, free_bytes: 10 * free_percent, in_memory: true }
    }

    fn of(nodes: &[(u16, u16)]) -> SpaceMap {
        let target_nodes =
            nodes.iter().map(|(node, targets)| TargetNode { node: NodeId(*node), targets: *targets });
        SpaceMap::new(NodeId(2), target_nodes.collect())
    }

    fn said(spaces: &[TargetSpace]) -> Result<SpaceReport, Code> {
        Ok(SpaceReport { inodes: 5, free_inodes: 50, spaces: spaces.to_vec() })
    }

    fn stamp(sequence: u64) -> Stamp {
        Stamp { session: 1, slot: 0, sequence }
    }

    #[test]
    fn place_begins_here_and_goes_round_the_others() {
        let mut s = of(&[(1, 1), (2, 1), (3, 1), (4, 1)]);
        let own = [space(t(2, 0), 50)];
        assert_eq!(s.place(&own, 1).as_slice(), [t(2, 0)]);
        let pairs: Vec<u32> = (0..3).map(|_| s.place(&own, 2).as_slice()[1]).collect();
        let mut sorted = pairs.clone();
        sorted.sort();
        assert_eq!(sorted, [t(1, 0), t(3, 0), t(4, 0)], "each of the others once: {pairs:?}");
        assert_eq!(s.place(&own, 100).as_slice().len(), 4);
    }

    #[test]
    fn place_avoids_the_full_and_the_unreachable_while_there_are_others() {
        let mut s = of(&[(1, 1), (2, 2), (3, 1)]);
        let full = [space(t(2, 0), 3), space(t(2, 1), 50)];
        assert_eq!(s.place(&full, 1).as_slice(), [t(2, 1)], "the node's next target");
        s.hear(NodeId(1), Err(Code::Io));
        s.hear(NodeId(3), said(&[space(t(3, 0), 60)]));
        let full = [space(t(2, 0), 3), space(t(2, 1), 0)];
        assert_eq!(s.place(&full, 2).as_slice(), [t(3, 0)], "then other nodes");
        s.hear(NodeId(3), said(&[space(t(3, 0), 1)]));
        assert_eq!(s.place(&full, 1).as_slice(), [t(2, 0)], "all are full");
    }

    #[test]
    fn place_avoids_a_node_from_when_it_is_lost_until_it_is_found() {
        let mut s = of(&[(1, 1), (2, 1), (3, 1)]);
        s.hear(NodeId(1), said(&[space(t(1, 0), 60)]));
        s.hear(NodeId(3), said(&[space(t(3, 0), 60)]));
        let full = [space(t(2, 0), 3)];
        s.lost(NodeId(1));
        assert!((0..4).all(|_| s.place(&full, 1).as_slice() == [t(3, 0)]));
        let own = [space(t(2, 0), 50)];
        assert!((0..4).all(|_| s.place(&own, 3).as_slice() == [t(2, 0), t(3, 0)]));
        s.found(NodeId(3));
        s.found(NodeId(1));
        assert_eq!(s.place(&own, 3).as_slice().len(), 3);
        assert!((0..4).all(|_| s.place(&full, 1).as_slice() == [t(3, 0)]), "what it has is not heard yet");
    }

    #[test]
    fn node_without_targets_places_on_the_others() {
        let mut s = of(&[(1, 1), (2, 0), (3, 1)]);
        let first: Vec<u32> = (0..2).map(|_| s.place(&[], 1).as_slice()[0]).collect();
        assert!(first.contains(&t(1, 0)) && first.contains(&t(3, 0)), "{first:?}");
    }

    #[test]
    fn space_waits_only_for_what_was_never_heard_or_is_old() {
        let mut s = of(&[(1, 1), (2, 1), (3, 1)]);
        let own = PoolSpace { total_bytes: 10, free_bytes: 5, inodes: 1, free_inodes: 2 };
        assert_eq!(s.next_round(S).len(), 2);
        assert!(s.next_round(S * 9).is_empty(), "a round is under way");
        assert_eq!(s.space(S, stamp(1), own), None);
        assert!(s.hear(NodeId(1), said(&[space(t(1, 0), 60)])).is_empty());
        let told = s.hear(NodeId(3), Err(Code::Io));
        let sum = PoolSpace { total_bytes: 1010, free_bytes: 605, inodes: 6, free_inodes: 52 };
        assert_eq!(told, [(stamp(1), sum)], "who cannot be reached gives nothing");
        assert!(s.next_round(S * 2).is_empty(), "it is fresh");
        assert!(s.said_by(NodeId(1)).is_some() && s.said_by(NodeId(3)).is_none() && !s.is_asking());
        assert_eq!(s.space(S * 2, stamp(2), own), Some(sum));
        assert_eq!(s.next_round(S * 10).len(), 2);
        assert_eq!(s.space(S * 10, stamp(3), own), Some(sum), "told while the nodes are asked again");
        s.hear(NodeId(1), said(&[]));
        s.hear(NodeId(3), said(&[]));
        assert_eq!(s.round_now(S * 11).len(), 2, "asked all the same");
        assert!(s.is_asking() && s.round_now(S * 11).is_empty());
        s.hear(NodeId(1), said(&[]));
        s.hear(NodeId(3), said(&[]));
        assert_eq!(s.next_round(S * 100).len(), 2);
        assert_eq!(s.space(S * 100, stamp(4), own), None, "what was heard is old");
    }

    proptest! {
        #[test]
        fn choose_gives_different_targets_and_none_that_is_worse_than_another(
            nodes in proptest::collection::vec(proptest::collection::vec((any::<bool>(), any::<bool>()), 0..4), 1..12),
            me in 0u16..14, turn in any::<usize>(), count in 1usize..20,
        ) {
            let all: Vec<Candidate> = nodes.iter().enumerate().flat_map(|(node, targets)| {
                targets.iter().enumerate().map(move |(index, (reached, roomy))| Candidate {
                    target: t(node as u16 + 1, index as u16), reached: *reached, roomy: *roomy,
                })
            }).collect();
            let chosen = choose(&all, NodeId(me), turn, count);
            let mut distinct = chosen.clone();
            distinct.sort();
            distinct.dedup();
            prop_assert_eq!(distinct.len(), chosen.len());
            let rank = |c: &Candidate| if c.reached && c.roomy { 0 } else if c.reached { 1 } else { 2 };
            let best = all.iter().map(rank).min();
            let of_best = all.iter().filter(|c| Some(rank(c)) <= best.max(Some(1)).min(best)).count();
            let expected = count.min(TARGETS_MAX);
            prop_assert!(chosen.len() <= expected && chosen.is_empty() == all.is_empty());
            // As many as there are of the best tier, or of all reachable ones when none has space.
            if best == Some(0) {
                prop_assert_eq!(chosen.len(), of_best.min(expected));
                for target in &chosen {
                    let c = all.iter().find(|c| c.target == *target).unwrap();
                    prop_assert!(c.reached && c.roomy);
                }
            }
            // This node's own target is first, if it is selected.
            if let Some(at) = chosen.iter().position(|t| node_of(*t) == NodeId(me)) {
                prop_assert_eq!(at, 0);
            }
        }
    }
}
