//! Leases: how long a node may use cached names and permissions of another node's directories in path walks, without
//! requests.
//!
//! When the home answers a look-up of a directory or a `GetAttr` for another node, the holder shows the name and the
//! permissions on its board. They are valid while the holder's lease from that home runs. Each pair of nodes has one
//! lease, which the network thread renews. It expires for the holder [`LEASE_MS`] after it *sent* the renewal, and for
//! the home [`LEASE_MS`] after it *answered*. So the home always waits for longer than the holder uses what it cached.
//!
//! ```text
//! home     answers about a name or directory  notes the holder, if its lease runs
//!          a noted name or directory changes  publishes, revokes it from its holders, acknowledges when each has
//!                                             answered or its lease has expired
//!          a cross-node transaction           the same, when its part is prepared; a repeated Prepare or Finish waits
//!                                             as long as the first
//!          a lease expired                    gives a new term; notes of the old term are void
//!          the worker started                 acknowledges no such change for LEASE_MS: the last notes are lost
//! holder   a new term                         drops all that it cached from that home
//!          a revocation overtook an answer    passes the answer on without caching it: `turn` counts revocations and
//!                                             terms
//! ```
//! The home does not renew a lease while a revocation is unanswered, so that no change waits for longer than a lease.
//! Only acknowledgements wait. Other requests proceed, and the home answers them with the new state at once.
//!
//! The shard thread owns all of it. Tests: `leases/tests.rs`, the crate's `tests/steps`, and
//! `tests/conformance/tests/cluster`.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use forebay_meta::Client;
use forebay_ring::{lease_clock, BoardWriter};
use forebay_types::limits::{BOARD_NAME_MAX, LEASED_MAX, LEASE_MS};
use forebay_types::{Answer, Code, Entry, Ino, Kind, NodeId, Part, Reply, Request, TxId, RENAME_NOREPLACE};
use forebay_wire::Stamp;

use super::notifier::{HeldReply, Invalidation};
use super::session_id::node_of_session;

pub(super) const LEASE_NS: u64 = LEASE_MS * 1_000_000;

/// Directory and name.
type Name = (Ino, Vec<u8>);
/// Permissions of a directory: mode, owner, group.
type Permissions = (u32, u32, u32);
/// Nodes that cached something, and the term in which they did.
type Holders = BTreeMap<NodeId, u64>;

/// A lease that this node gave to another.
#[derive(Debug)]
struct Given {
    term: u64,
    until: u64,
    /// Revocations that are not answered.
    revocations: usize,
}

/// What a change revokes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Revocation {
    Name(Name),
    Directory(Ino),
}

/// An acknowledgement that waits for revocations.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) held_reply: HeldReply,
    pub(super) invalidations: Vec<Invalidation>,
    wait: Wait,
}

/// What this node holds from another.
#[derive(Debug, Default)]
struct Taken {
    /// The lease is being renewed.
    renewed: bool,
    term: Option<u64>,
    /// Incremented by each revocation and each new term.
    turn: u64,
    names: BTreeSet<Name>,
    directories: BTreeSet<Ino>,
}

/// A look-up or `GetAttr` of another node's directory whose answer has not arrived.
#[derive(Debug)]
struct Look {
    node: NodeId,
    turn: u64,
    /// None: a `GetAttr` of the directory itself.
    name: Option<Name>,
}

/// What the acknowledgement of a change waits for.
#[derive(Clone, Debug, Default)]
pub(super) struct Wait {
    /// The cross-node transaction that the change is a part of.
    part_of: Option<TxId>,
    /// Revocations that are not answered. The acknowledgement waits for them until `until`.
    revocations: HashSet<u64>,
    /// End of the last of the revoked leases.
    until: u64,
    /// The acknowledgement is not sent before this time, whatever is answered.
    pub(super) not_before: u64,
}

impl Wait {
    pub(super) fn is_over(&self) -> bool {
        self.revocations.is_empty() && self.not_before == 0
    }
}

/// The leases of a node, given and taken.
#[derive(Debug)]
pub(super) struct Leases {
    given: HashMap<NodeId, Given>,
    names: HashMap<Name, Holders>,
    directories: HashMap<Ino, (Permissions, Holders)>,
    /// By number: the node, and the term of its lease.
    revocations: HashMap<u64, (NodeId, u64)>,
    pub(super) held: Vec<Held>,
    last_recall: u64,
    next_term: u64,
    /// Until then the last worker's leases may run.
    pub(super) cautious_until: u64,
    /// When to drop expired leases next.
    pub(super) free_at: u64,
    taken: HashMap<NodeId, Taken>,
    looks: HashMap<Stamp, Look>,
}

pub(super) fn permissions(entry: &Entry) -> Permissions {
    (entry.attr.mode, entry.attr.uid, entry.attr.gid)
}

impl Leases {
    /// For a worker that starts now. `new`: no worker of this pool gave a lease before.
    pub(super) fn new(new: bool) -> Leases {
        let now = lease_clock();
        Leases {
            given: HashMap::new(),
            names: HashMap::new(),
            directories: HashMap::new(),
            revocations: HashMap::new(),
            held: Vec::new(),
            last_recall: 0,
            // Giving a term takes longer than a nanosecond, so no two workers give the same term.
            next_term: now,
            cautious_until: if new { 0 } else { now + LEASE_NS },
            free_at: now + LEASE_NS,
            taken: HashMap::new(),
            looks: HashMap::new(),
        }
    }

    // --- as the home

    /// The term of a node's lease, if it runs.
    fn term_of(&self, node: NodeId, now: u64) -> Option<u64> {
        self.given.get(&node).filter(|given| given.until >= now).map(|given| given.term)
    }

    /// Renews a node's lease, or gives it a new one. Returns the term.
    ///
    /// # Errors
    /// [`Code::Busy`] while a revocation is unanswered.
    pub(super) fn renew(&mut self, node: NodeId, now: u64) -> Result<u64, Code> {
        match self.given.get_mut(&node).filter(|given| given.until >= now) {
            Some(given) if given.revocations > 0 => Err(Code::Busy),
            Some(given) => {
                given.until = now + LEASE_NS;
                Ok(given.term)
            }
            None => {
                self.next_term += 1;
                let given = Given { term: self.next_term, until: now + LEASE_NS, revocations: 0 };
                self.given.insert(node, given);
                Ok(self.next_term)
            }
        }
    }

    /// Drops the notes of expired leases.
    pub(super) fn free_ended(&mut self, now: u64) {
        let before = self.given.len();
        self.given.retain(|_, given| given.until >= now);
        if self.given.len() == before {
            return;
        }
        let given = &self.given;
        let runs = |node: &NodeId, term: &mut u64| given.get(node).is_some_and(|given| given.term == *term);
        self.names.retain(|_, holders| {
            holders.retain(runs);
            !holders.is_empty()
        });
        self.directories.retain(|_, (_, holders)| {
            holders.retain(runs);
            !holders.is_empty()
        });
    }

    /// Notes what a process of another node was answered, because its node may cache it.
    pub(super) fn told(&mut self, client: &Client, request: &Request<'_>, answer: &Answer<'_>) {
        self.told_at(node_of_session(client.session), request, answer, lease_clock());
    }

    fn told_at(&mut self, node: NodeId, request: &Request<'_>, answer: &Answer<'_>, now: u64) {
        let (Some(term), Ok(reply)) = (self.term_of(node, now), answer) else { return };
        let directory = match *reply {
            Reply::Entry(entry) if entry.attr.is_directory() => Some(entry),
            Reply::Elsewhere { kind: Kind::Directory, .. } => None,
            _ => return,
        };
        if let Request::Lookup { parent, name } = *request {
            if name.len() > BOARD_NAME_MAX {
                return;
            }
            self.names.entry((parent, name.to_vec())).or_default().insert(node, term);
        }
        if let Some(entry) = directory {
            let told = self.directories.entry(entry.attr.ino).or_default();
            told.0 = permissions(&entry);
            told.1.insert(node, term);
        }
    }

    /// True when no change can need a revocation or a delay.
    pub(super) fn is_idle(&self, now: u64) -> bool {
        self.names.is_empty() && self.directories.is_empty() && self.cautious_until <= now
    }

    /// Returns what a change revokes, and the holders. They are no longer noted as holders.
    pub(super) fn changed<'e>(
        &mut self,
        names: impl Iterator<Item = (Ino, &'e [u8])>,
        inodes: impl Iterator<Item = (Ino, Option<Permissions>)>,
    ) -> Vec<(Revocation, Holders)> {
        let mut revocations = Vec::new();
        for (parent, name) in names {
            let name = (parent, name.to_vec());
            if let Some(holders) = self.names.remove(&name) {
                revocations.push((Revocation::Name(name), holders));
            }
        }
        for (ino, now) in inodes {
            let differs = |(told, _): &(Permissions, Holders)| now != Some(*told);
            if self.directories.get(&ino).is_some_and(differs) {
                if let Some((_, holders)) = self.directories.remove(&ino) {
                    revocations.push((Revocation::Directory(ino), holders));
                }
            }
        }
        revocations
    }

    /// Counts a revocation, if the node's lease still runs in that term. Returns the revocation's number.
    pub(super) fn begin_recall(&mut self, node: NodeId, term: u64, now: u64, wait: &mut Wait) -> Option<u64> {
        let given = self.given.get_mut(&node).filter(|given| given.term == term && given.until >= now)?;
        given.revocations += 1;
        self.last_recall += 1;
        self.revocations.insert(self.last_recall, (node, term));
        wait.revocations.insert(self.last_recall);
        wait.until = wait.until.max(given.until);
        Some(self.last_recall)
    }

    /// A revocation was answered, or could not be delivered. In the second case its waiters wait until the lease
    /// expires.
    pub(super) fn revoked(&mut self, number: u64, answered: bool) {
        let Some((node, term)) = self.revocations.remove(&number) else { return };
        if !answered {
            return;
        }
        if let Some(given) = self.given.get_mut(&node).filter(|given| given.term == term) {
            given.revocations = given.revocations.saturating_sub(1);
        }
        for held in &mut self.held {
            held.wait.revocations.remove(&number);
        }
    }

    /// What the acknowledgements of this transaction's steps still wait for. A repeated step waits as long.
    pub(super) fn waits_of(&self, tx: TxId) -> Wait {
        let mut wait = Wait { part_of: Some(tx), ..Wait::default() };
        for Held { wait: held, .. } in self.held.iter().filter(|held| held.wait.part_of == Some(tx)) {
            wait.revocations.extend(&held.revocations);
            wait.until = wait.until.max(held.until);
            wait.not_before = wait.not_before.max(held.not_before);
        }
        wait
    }

    /// After a crash: what the acknowledgement of a change waits for, because holders of the last worker's leases are
    /// unknown.
    pub(super) fn caution(&self, request: &Request<'_>) -> Option<Wait> {
        // Assumes a directory: the kind of what a rename moved is no longer known.
        let waits = may_have_been_told(request, true) && self.cautious_until > lease_clock();
        waits.then(|| Wait { not_before: self.cautious_until, ..Wait::default() })
    }

    /// Delays a reply until `wait` is over.
    pub(super) fn hold(&mut self, held_reply: HeldReply, invalidations: Vec<Invalidation>, wait: Wait) {
        self.held.push(Held { held_reply, invalidations, wait });
    }

    /// Takes the acknowledgements whose wait is over.
    pub(super) fn due(&mut self, now: u64) -> Vec<Held> {
        let is_due = |Held { wait, .. }: &Held| {
            now > wait.not_before && (wait.revocations.is_empty() || now > wait.until)
        };
        let (due, held) = std::mem::take(&mut self.held).into_iter().partition(is_due);
        self.held = held;
        due
    }

    /// Milliseconds until the next acknowledgement is due by time.
    pub(super) fn next_timeout_ms(&self) -> Option<u64> {
        let first = self.held.iter().map(|Held { wait, .. }| wait.until.max(wait.not_before)).min()?;
        Some(first.saturating_sub(lease_clock()) / 1_000_000 + 1)
    }

    // --- as the holder

    /// A client's look-up or `GetAttr` was forwarded to another node.
    pub(super) fn looks(&mut self, stamp: Stamp, node: NodeId, request: &Request<'_>) {
        let name = match *request {
            // Programs use the wide directory's number, and the board has no leased names of its parts.
            Request::Lookup { parent, .. } if parent.is_part() => None,
            Request::Lookup { parent, name } if name.len() <= BOARD_NAME_MAX => Some((parent, name.to_vec())),
            Request::GetAttr { .. } => None,
            _ => return,
        };
        let turn = self.taken.get(&node).map_or(0, |taken| taken.turn);
        self.looks.insert(stamp, Look { node, turn, name });
    }

    /// The answer has arrived. Shows the directory on the board, if the lease still runs and no revocation overtook the
    /// answer. Returns the node from which a lease is to be requested.
    pub(super) fn looked(
        &mut self,
        stamp: Stamp,
        answer: &Answer<'_>,
        board: &mut BoardWriter,
    ) -> Option<NodeId> {
        let Look { node, turn, name } = self.looks.remove(&stamp)?;
        let (directory, leads_to) = match *answer {
            Ok(Reply::Entry(entry)) if entry.attr.is_directory() => (Some(entry), entry.attr.ino),
            Ok(Reply::Elsewhere { ino, kind: Kind::Directory }) if name.is_some() => (None, ino),
            _ => return None,
        };
        let taken = self.taken.entry(node).or_default();
        if !taken.renewed {
            taken.renewed = true;
            return Some(node);
        }
        if taken.turn != turn || taken.term.is_none() {
            return None;
        }
        if taken.names.len() + taken.directories.len() >= LEASED_MAX {
            Leases::forget(taken, board);
        }
        if let Some(entry) = directory.filter(|entry| entry.attr.ino.birth_node() == node) {
            board.leased_directory(&entry);
            taken.directories.insert(entry.attr.ino);
        }
        if let Some((parent, name)) = name.filter(|(parent, _)| parent.birth_node() == node) {
            if board.leased_name(parent, &name, leads_to) {
                taken.names.insert((parent, name));
            }
        }
        board.finish();
        None
    }

    /// Removes from the board all that was cached from a node.
    fn forget(taken: &mut Taken, board: &mut BoardWriter) {
        for (parent, name) in std::mem::take(&mut taken.names) {
            board.forget_name(parent, &name);
        }
        for ino in std::mem::take(&mut taken.directories) {
            board.forget_directory_of(ino);
        }
        board.finish();
    }

    /// A lease was renewed until a time (`lease` is its term and end), or there is none.
    pub(super) fn renewed(&mut self, node: NodeId, lease: Option<(u64, u64)>, board: &mut BoardWriter) {
        let taken = self.taken.entry(node).or_default();
        let Some((term, until)) = lease else {
            // Cached entries stay valid until the lease expires. They are valid again if it is renewed in the same
            // term.
            taken.renewed = false;
            return;
        };
        if taken.term != Some(term) {
            Leases::forget(taken, board);
            taken.term = Some(term);
            taken.turn += 1;
        }
        board.lease(node, until);
    }

    /// A lease is no longer renewed, because this node has no clients that use it.
    pub(super) fn stop_renewing(&mut self, node: NodeId) {
        if let Some(taken) = self.taken.get_mut(&node) {
            taken.renewed = false;
        }
    }

    /// Executes another node's revocation.
    pub(super) fn take_back(
        &mut self,
        node: NodeId,
        request: &Request<'_>,
        board: &mut BoardWriter,
    ) -> Result<(), Code> {
        let taken = self.taken.entry(node).or_default();
        taken.turn += 1;
        match *request {
            Request::RevokeName { parent, name } if parent.birth_node() == node => {
                board.forget_name(parent, name);
                taken.names.remove(&(parent, name.to_vec()));
            }
            Request::RevokeDirectory { ino } if ino.birth_node() == node => {
                board.forget_directory_of(ino);
                taken.directories.remove(&ino);
            }
            _ => return Err(Code::Malformed),
        }
        board.finish();
        Ok(())
    }
}

/// True for a change of a directory's name or permissions, which another node may have cached. `is_of_directory`
/// matters for renames and new attributes only.
pub(super) fn may_have_been_told(request: &Request<'_>, is_of_directory: bool) -> bool {
    match *request {
        Request::RemoveDirectory { .. }
        | Request::MoveDirectory { .. }
        | Request::Finish { commit: true, .. } => true,
        Request::SetAttr { set, .. } => {
            is_of_directory && (set.mode.is_some() || set.uid.is_some() || set.gid.is_some())
        }
        Request::Rename { .. } => is_of_directory,
        Request::Prepare { part, .. } => match part {
            // A link is given for files only.
            Part::Leave { link, .. } => link == TxId::NONE,
            Part::Enter { kind, flags, .. } => kind == Kind::Directory && flags & RENAME_NOREPLACE == 0,
            _ => false,
        },
        _ => false,
    }
}

/// The name that a part holds once it is prepared. Other nodes must not walk through it from then on: once the
/// transaction is decided, no cached name may lead to the state before it, although this node may not have received the
/// decision yet.
pub(super) fn held_by<'a>(request: &Request<'a>) -> Option<(Ino, &'a [u8])> {
    match *request {
        Request::Prepare {
            part: Part::Leave { parent, name, .. } | Part::Enter { parent, name, .. },
            ..
        } => Some((parent, name)),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
