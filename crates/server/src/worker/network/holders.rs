//! Processes of other nodes that hold locks here, and when each was last known to live. A state machine: the clock is given.

use std::collections::HashMap;
use std::time::Duration;

use forebay_types::limits::{LOCKS_OF_UNREACHED_MS, LOCK_HOLDERS_PERIOD_MS};
use forebay_types::NodeId;

const PERIOD: Duration = Duration::from_millis(LOCK_HOLDERS_PERIOD_MS);
const UNREACHED: Duration = Duration::from_millis(LOCKS_OF_UNREACHED_MS);

/// When they were last heard of.
#[derive(Debug, Default)]
pub(super) struct Holders {
    heard: HashMap<u64, Duration>,
    looked: Option<Duration>,
}

impl Holders {
    /// True when it is time to ask for them; then not again for a while.
    pub(super) fn is_due(&mut self, now: Duration) -> bool {
        let is_due = self.looked.is_none_or(|looked| now.saturating_sub(looked) >= PERIOD);
        if is_due {
            self.looked = Some(now);
        }
        is_due
    }

    /// These are all that hold anything; one that is new is alive, as it has just asked.
    pub(super) fn keep(&mut self, holders: &[(NodeId, u64)], now: Duration) {
        self.heard.retain(|session, _| holders.iter().any(|(_, holder)| holder == session));
        for (_, session) in holders {
            self.heard.entry(*session).or_insert(now);
        }
    }

    /// A node said whether a holder is alive, or nothing: true when what it holds is to go.
    pub(super) fn hear<E>(&mut self, session: u64, is_alive: Result<bool, E>, now: Duration) -> bool {
        let Some(heard) = self.heard.get_mut(&session) else { return false };
        match is_alive {
            Ok(true) => {
                *heard = now;
                false
            }
            Ok(false) => true,
            Err(_) => now.saturating_sub(*heard) >= UNREACHED,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_of_the_dead_go_at_once_and_of_the_unreached_after_a_time() {
        const S: Duration = Duration::from_secs(1);
        let mut h = Holders::default();
        assert!(h.is_due(S) && !h.is_due(S * 2) && h.is_due(S + PERIOD));
        h.keep(&[(NodeId(2), 7), (NodeId(3), 8)], S);
        assert!(h.hear(7, Ok::<_, ()>(false), S), "dead");
        assert!(!h.hear(8, Err(()), S + UNREACHED / 2));
        assert!(!h.hear(8, Ok::<_, ()>(true), S + UNREACHED / 2));
        assert!(!h.hear(8, Err(()), S + UNREACHED), "it was heard of meanwhile");
        assert!(h.hear(8, Err(()), S + UNREACHED / 2 + UNREACHED));
        h.keep(&[], S);
        assert!(!h.hear(8, Ok::<_, ()>(false), S), "it holds nothing any more");
    }
}
