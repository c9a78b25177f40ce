//! Processes of other nodes that have ended. A repeated request of such a process may arrive after the message of its
//! end, when this node has forgotten its replies and would execute the request a second time. So the request is
//! refused.
//!
//! In memory alone: the next worker has new links, on which no message to this worker arrives.

use std::collections::{HashSet, VecDeque};

use forebay_types::limits::SESSIONS_ENDED_KEPT;

use crate::worker::session_id::is_of_process;

/// The processes that ended last.
#[derive(Debug, Default)]
pub(super) struct Ended {
    all: HashSet<u64>,
    order: VecDeque<u64>,
}

impl Ended {
    /// A process has ended. No other process gets its session. Sessions of daemons are not noted.
    pub(super) fn note(&mut self, session: u64) {
        if !is_of_process(session) || !self.all.insert(session) {
            return;
        }
        self.order.push_back(session);
        if self.order.len() > SESSIONS_ENDED_KEPT {
            if let Some(oldest) = self.order.pop_front() {
                self.all.remove(&oldest);
            }
        }
    }

    /// True for a process that has ended.
    pub(super) fn has(&self, session: u64) -> bool {
        self.all.contains(&session)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::session_id::{daemon_session, session_on};
    use forebay_types::NodeId;

    #[test]
    fn processes_that_ended_last_are_known() {
        let (mut ended, node) = (Ended::default(), NodeId(3));
        let last = SESSIONS_ENDED_KEPT as u64 + 2;
        for number in 1..=last {
            ended.note(session_on(node, number));
            ended.note(session_on(node, number));
        }
        assert!(!ended.has(session_on(node, 2)) && ended.has(session_on(node, 3)));
        assert!(ended.has(session_on(node, last)) && !ended.has(session_on(node, last + 1)));
        assert_eq!(ended.all.len(), SESSIONS_ENDED_KEPT);
        for session in [session_on(node, 0), daemon_session(node, 7)] {
            ended.note(session);
            assert!(!ended.has(session), "who asks for itself goes on");
        }
    }
}
