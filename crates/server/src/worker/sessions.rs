//! The sessions of all processes that the shard thread serves: those of this node, and those of other nodes' processes
//! that use directories of this node.
//!
//! A batch names a session by its index. Indexes change when a session is added or removed, which no stage of the
//! pipeline does.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};

use super::session::Session;

/// See the module. Sessions of this node come first.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    all: Vec<Session>,
    /// Number of sessions of this node.
    local: usize,
    /// The index of each session.
    by_id: HashMap<u64, usize>,
}

impl Sessions {
    /// Adds a session that is not there. Returns its index.
    pub(super) fn push(&mut self, session: Session) -> usize {
        let (mut index, id) = (self.all.len(), session.id);
        let is_here = session.is_here();
        debug_assert!(self.index_of(id).is_none(), "a session is added twice");
        self.all.push(session);
        self.by_id.insert(id, index);
        if is_here {
            self.swap(index, self.local);
            index = self.local;
            self.local += 1;
        }
        index
    }

    /// Removes a session.
    pub(super) fn remove(&mut self, id: u64) -> Option<Session> {
        let mut index = self.index_of(id)?;
        if index < self.local {
            self.local -= 1;
            self.swap(index, self.local);
            index = self.local;
        }
        self.swap(index, self.all.len() - 1);
        self.by_id.remove(&id);
        self.all.pop()
    }

    fn swap(&mut self, one: usize, other: usize) {
        self.all.swap(one, other);
        for index in [one, other] {
            self.by_id.insert(self.all[index].id, index);
        }
    }

    /// The index of a session.
    pub(super) fn index_of(&self, id: u64) -> Option<usize> {
        self.by_id.get(&id).copied()
    }

    /// A session.
    pub(super) fn find(&self, id: u64) -> Option<&Session> {
        self.index_of(id).map(|index| &self.all[index])
    }

    /// A session, to be changed.
    pub(super) fn find_mut(&mut self, id: u64) -> Option<&mut Session> {
        self.index_of(id).map(|index| &mut self.all[index])
    }

    /// The sessions of this node. Their indexes begin at 0.
    pub(super) fn local(&self) -> &[Session] {
        &self.all[..self.local]
    }

    /// Number of sessions of other nodes.
    pub(super) fn remote_count(&self) -> usize {
        self.all.len() - self.local
    }
}

impl Deref for Sessions {
    type Target = [Session];

    fn deref(&self) -> &[Session] {
        &self.all
    }
}

impl DerefMut for Sessions {
    fn deref_mut(&mut self) -> &mut [Session] {
        &mut self.all
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use forebay_fabric::simulated::{Faults, Network};
    use forebay_fabric::Endpoint;

    use super::*;
    use crate::worker::arrivals::Arrivals;
    use crate::worker::channel::{Channel, RemoteSlots};
    use crate::worker::network::Commands;

    fn session(id: u64) -> Session {
        match id {
            0..100 => Session::local(id, forebay_ring::ServedRing::create().unwrap().1),
            _ => Session::new(id, Channel::Remote(RemoteSlots::new(id, commands(), Arrivals::default()))),
        }
    }

    fn commands() -> Commands {
        let endpoint = Network::new(1, Faults::NONE).endpoint(1);
        Commands::new(std::sync::mpsc::channel().0, endpoint.waker().clone())
    }

    #[test]
    fn sessions_are_found_and_those_of_this_node_come_first_whichever_come_and_go() {
        let (mut sessions, mut expected) = (Sessions::default(), BTreeSet::new());
        let steps = [7, 107, 5, 109, 103, 9, 3, 7, 109, 3, 1, 101, 107, 9, 5, 1, 103, 101];
        for id in steps {
            match expected.remove(&id) {
                true => assert_eq!(sessions.remove(id).map(|session| session.id), Some(id)),
                false => {
                    expected.insert(id);
                    let index = sessions.push(session(id));
                    assert_eq!(sessions[index].id, id);
                }
            }
            assert!(sessions.remove(1000).is_none());
            assert_eq!(sessions.iter().map(|session| session.id).collect::<BTreeSet<_>>(), expected);
            assert!(sessions.local().iter().all(Session::is_here));
            assert_eq!(sessions.remote_count(), sessions.iter().filter(|session| !session.is_here()).count());
            for (index, session) in sessions.iter().enumerate() {
                assert_eq!(sessions.index_of(session.id), Some(index));
            }
            for id in steps {
                assert_eq!(sessions.find(id).map(|session| session.id), expected.get(&id).copied());
                assert_eq!(sessions.find_mut(id).is_some(), expected.contains(&id));
            }
        }
        assert!(expected.is_empty());
    }
}
