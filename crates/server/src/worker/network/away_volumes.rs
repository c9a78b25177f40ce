//! Segments of volumes of other homes of which this node has pieces. Their homes are asked whether the segments still
//! exist: often while one is being made or its pieces are to be dropped, seldom otherwise, and when a process says that it
//! has removed one. So whatever dies on the way, a piece without a record is dropped in the end.

use std::collections::BTreeMap;
use std::time::Duration;

use forebay_types::limits::{SESSIONS_PERIOD_MS, VOLUME_REVIEW_MS};
use forebay_types::{NodeId, SegmentId};

/// The state of a segment in a reply: it is gone.
pub(in crate::worker) const GONE: u8 = 0;
/// It is complete.
pub(in crate::worker) const COMPLETE: u8 = 1;
/// It is being made.
pub(in crate::worker) const BEING_MADE: u8 = 2;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct AwayVolumes {
    /// When each is to be asked for.
    ask_at: BTreeMap<SegmentId, Duration>,
}

impl AwayVolumes {
    /// These segments have pieces here. New ones are asked for soon.
    pub(super) fn set(&mut self, segments: &[SegmentId], now: Duration) {
        self.ask_at.retain(|id, _| segments.contains(id));
        for id in segments {
            self.ask_at.entry(*id).or_insert(now + Duration::from_millis(VOLUME_REVIEW_MS));
        }
    }

    /// Has all of them asked for now.
    pub(super) fn hurry(&mut self, now: Duration) {
        self.ask_at.values_mut().for_each(|at| *at = now);
    }

    /// The segments to ask for now, by home. They are asked for again later unless their home answers before.
    pub(super) fn take_due(&mut self, now: Duration) -> BTreeMap<NodeId, Vec<SegmentId>> {
        let mut due = BTreeMap::<NodeId, Vec<SegmentId>>::new();
        for (id, at) in self.ask_at.iter_mut().filter(|(_, at)| **at <= now) {
            *at = now + Duration::from_millis(VOLUME_REVIEW_MS);
            due.entry(id.volume.birth_node()).or_default().push(*id);
        }
        due
    }

    /// What a home has answered. Returns the segments that are gone: they are asked for until their pieces are dropped.
    pub(super) fn answered(
        &mut self,
        segments: &[SegmentId],
        states: &[u8],
        now: Duration,
    ) -> Vec<SegmentId> {
        let mut gone = Vec::new();
        for (id, state) in segments.iter().zip(states) {
            match *state {
                GONE => gone.push(*id),
                COMPLETE => {
                    if let Some(at) = self.ask_at.get_mut(id) {
                        *at = now + Duration::from_millis(SESSIONS_PERIOD_MS);
                    }
                }
                _ => {}
            }
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::Ino;

    #[test]
    fn segments_are_asked_for_soon_until_they_are_complete_and_again_when_hurried() {
        let segment = |node, count, number| SegmentId { volume: Ino::new(NodeId(node), count), number };
        let (one, two) = (segment(1, 5, 0), segment(3, 6, 2));
        let mut away = AwayVolumes::default();
        let at = |n: u64| Duration::from_millis(n * VOLUME_REVIEW_MS);
        away.set(&[one, two], at(0));
        assert!(away.take_due(at(0)).is_empty());
        assert_eq!(away.take_due(at(1)), BTreeMap::from([(NodeId(1), vec![one]), (NodeId(3), vec![two])]));
        assert!(away.take_due(at(1)).is_empty(), "they are being asked for");
        assert!(away.answered(&[one, two], &[COMPLETE, BEING_MADE], at(1)).is_empty());
        assert_eq!(away.take_due(at(2)), BTreeMap::from([(NodeId(3), vec![two])]));
        away.hurry(at(2));
        assert_eq!(away.take_due(at(2)).len(), 2);
        assert_eq!(away.answered(&[one], &[GONE], at(2)), [one]);
        away.set(&[two], at(3));
        assert_eq!(away.take_due(at(9)), BTreeMap::from([(NodeId(3), vec![two])]));
    }
}
