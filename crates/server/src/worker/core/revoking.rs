//! Connects leases (`leases.rs`): what a change revokes, and what other nodes report about their leases.

use super::state::ShardThread;
use crate::worker::leases::held_by;
use crate::worker::leases::may_have_been_told;
use crate::worker::leases::permissions;
use crate::worker::leases::Revocation;
use crate::worker::leases::Wait;
use crate::worker::leases::LEASE_NS;
use crate::worker::network::Command;
use crate::worker::notifier::{HeldReply, Invalidation};
use forebay_fabric::Ticket;
use forebay_meta::Mark;
use forebay_ring::lease_clock;
use forebay_types::{Answer, Caller, Kind, NodeId, Reply, Request};
use forebay_wire::Stamp;

impl ShardThread<'_> {
    /// Another daemon renews its lease, or revokes what this node cached.
    pub(in crate::worker) fn lease_asked(&mut self, ticket: Ticket, message: &[u8]) {
        let (Some(network), Some(leases)) = (&self.network, &mut self.leases) else { return };
        let node = ticket.node;
        let result = match Request::decode(message) {
            Ok((_, Request::RenewLease)) => leases.renew(node, lease_clock()).map(Reply::Count),
            Ok((_, request)) => leases.take_back(node, &request, &mut self.board).map(|()| Reply::Done),
            Err(code) => Err(code),
        };
        let mut reply = [0; 32];
        let n = Reply::encode(&result, &mut reply).unwrap_or(0);
        network.commands.give(Command::Answer { ticket, reply: reply[..n].to_vec() });
    }

    /// The answer to a forwarded call arrived: what it contains about a directory may be cached.
    pub(in crate::worker) fn note_looked(&mut self, stamp: Stamp, answer: &Answer<'_>) {
        let (Some(network), Some(leases)) = (&self.network, &mut self.leases) else { return };
        if let Some(node) = leases.looked(stamp, answer, &mut self.board) {
            network.commands.give(Command::RenewLease(node));
        }
    }

    /// A lease was renewed until a time, or could not be. It is renewed again while this node has clients.
    pub(in crate::worker) fn lease_renewed(&mut self, node: NodeId, lease: Option<(u64, u64)>) {
        let (Some(network), Some(leases)) = (&self.network, &mut self.leases) else { return };
        leases.renewed(node, lease, &mut self.board);
        if lease.is_some() && !self.sessions.local().is_empty() {
            network.commands.give(Command::RenewLease(node));
        } else {
            leases.stop_renewing(node);
        }
    }

    /// Revokes what a change has made invalid, whose effects begin at `before`. Returns what its acknowledgement waits
    /// for.
    pub(in crate::worker) fn revoke(&mut self, request: &Request<'_>, before: Mark) -> Option<Wait> {
        let (network, leases) = (self.network.as_ref()?, self.leases.as_mut()?);
        let now = lease_clock();
        let mut wait = match *request {
            Request::Finish { tx, .. } | Request::Prepare { tx, .. } => leases.waits_of(tx),
            _ => Wait::default(),
        };
        if wait.is_over() && leases.is_idle(now) {
            return None;
        }
        let (cautious_until, effects) = (leases.cautious_until, self.effects.since(before));
        let changed = leases.changed(
            effects.names().map(|name| (name.parent, name.name)).chain(held_by(request)),
            effects.inodes().iter().map(|(ino, entry)| (*ino, entry.as_ref().map(permissions))),
        );
        for (what, holders) in changed {
            let mut message = [0; 512];
            let request = match &what {
                Revocation::Name((parent, name)) => Request::RevokeName { parent: *parent, name },
                Revocation::Directory(ino) => Request::RevokeDirectory { ino: *ino },
            };
            let n = request.encode(Caller { uid: 0, gid: 0 }, &mut message).unwrap_or(0);
            for (node, term) in holders {
                if let Some(number) = leases.begin_recall(node, term, now, &mut wait) {
                    network.commands.give(Command::Revocation {
                        node,
                        number,
                        message: message[..n].to_vec(),
                    });
                }
            }
        }
        let is_of_directory = match request {
            Request::SetAttr { .. } => {
                let mut changed = effects.inodes().iter();
                changed.any(|(_, entry)| entry.is_some_and(|entry| entry.attr.is_directory()))
            }
            _ => {
                let mut changed = effects.names();
                changed.any(|name| name.entry.is_some_and(|(_, kind)| kind == Kind::Directory))
            }
        };
        if cautious_until > now && may_have_been_told(request, is_of_directory) {
            wait.not_before = cautious_until;
        }
        (!wait.is_over()).then_some(wait)
    }

    /// After a crash: holds the acknowledgement of a change while nodes with a lease of the last worker may use the
    /// state before it. False when it need not be held.
    pub(in crate::worker) fn hold_cautiously(
        &mut self,
        held_reply: HeldReply,
        request: &Request<'_>,
        invalidations: &[Invalidation],
    ) -> bool {
        let Some(leases) = &mut self.leases else { return false };
        let Some(wait) = leases.caution(request) else { return false };
        leases.hold(held_reply, invalidations.to_vec(), wait);
        true
    }

    /// A revocation was answered, or could not be delivered.
    pub(in crate::worker) fn revoked(&mut self, number: u64, answered: bool) {
        if let Some(leases) = &mut self.leases {
            leases.revoked(number, answered);
        }
    }

    /// While the shard is idle, once in a lease's time: forgets what expired leases have left.
    pub(in crate::worker) fn free_ended_leases(&mut self) {
        let now = lease_clock();
        if let Some(leases) = self.leases.as_mut().filter(|leases| leases.free_at <= now) {
            leases.free_at = now + LEASE_NS;
            leases.free_ended(now);
        }
    }

    /// Sends the acknowledgements whose revocations are answered, or whose leases have expired.
    pub(in crate::worker) fn acknowledge_revoked(&mut self) {
        let Some(leases) = self.leases.as_mut().filter(|leases| !leases.held.is_empty()) else { return };
        for held in leases.due(lease_clock()) {
            match (&mut self.mount, held.held_reply) {
                (Some(mount), held_reply) if !held.invalidations.is_empty() => {
                    mount.hold(held_reply, held.invalidations)
                }
                (_, held_reply) => self.release_held(held_reply),
            }
        }
    }
}
