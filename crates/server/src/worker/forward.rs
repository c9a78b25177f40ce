//! The shard thread's dealings with other nodes: what it sends on for its clients, and what theirs ask of it.

use std::collections::HashSet;

use forebay_fabric::Ticket;
use forebay_meta::Client;
use forebay_types::limits::RING_SLOTS;
use forebay_types::{BackingId, Code, Ino, Layout, NodeId, Reply, Request, Result};
use forebay_wire::Stamp;

use super::batch::Taken;
use super::coordination::CrossNode;
use super::network::{Command, Network};
use super::notifier::Whose;
use super::recovery::has_inode;
use super::remote::{Door, RemoteSlots};
use super::session::{created, is_of_daemon, node_of_session, Session};
use super::shard_thread::{Message, ShardThread};
use super::wide::Redirect;

/// Processes of other nodes whose replies are kept: those of a pool with many nodes that all use one directory.
const REMOTE_SESSIONS_MAX: usize = 65_536;

/// Inodes that are remembered for what a client may be told later: as many backing files as are removed while a node does not
/// answer for some seconds, or nearly.
const REMOVED_ELSEWHERE_MAX: usize = 4096;

/// An error, encoded.
fn failure(code: Code) -> [u8; 4] {
    let mut bytes = [0; 4];
    // Four bytes are what an error takes.
    let _ = Reply::encode(&Err(code), &mut bytes);
    bytes
}

/// True when all backing files of a layout are on this node, or there are no other nodes.
pub(super) fn all_here(network: Option<&Network>, layout: &Layout) -> bool {
    let Some(Network { node, .. }) = network else { return true };
    layout.components().iter().all(|component| {
        let targets = &component.targets[..usize::from(component.target_count)];
        targets.iter().all(|target| target >> 16 == u32::from(node.0))
    })
}

impl ShardThread<'_> {
    /// The node that is to be asked, when it is not this one.
    #[inline]
    pub(super) fn elsewhere(&self, request: &Request<'_>) -> Option<NodeId> {
        let here = self.network.as_ref()?.node;
        request.node().filter(|node| *node != here)
    }

    /// Sends a client's request on; with `keeps` the node is told when the client is gone. True: its answer will come.
    ///
    /// # Errors
    /// [`Code::Stale`] when a client of another node asked: this is not the node to ask.
    pub(super) fn forward(
        &mut self,
        session: usize,
        slot: usize,
        seq: u64,
        node: NodeId,
        request: (usize, usize),
        keeps: bool,
    ) -> std::result::Result<bool, Code> {
        let message = self.answers.request(request).to_vec();
        let stamp = Stamp { session: self.sessions[session].id, slot: slot as u16, sequence: seq };
        self.note_look(stamp, node, &message);
        let index = session;
        let session = &mut self.sessions[session];
        let (Some(network), Door::Ring(_)) = (&self.network, &session.door) else {
            return Err(Code::Stale);
        };
        if keeps && !session.asked_nodes.contains(&node) {
            session.asked_nodes.push(node);
        }
        session.slots[slot].forwarded = Some(seq);
        network.commands.give(Command::Forward { node, stamp, message: message.clone() });
        self.remember_sent(index, slot, &message);
        Ok(true)
    }

    /// Has the network thread answer a client of this node; false for another's, whom this node answers for itself.
    pub(super) fn ask_network(&mut self, taken: &Taken, order: impl FnOnce(Stamp) -> Command) -> bool {
        let session = &mut self.sessions[taken.session];
        let (Some(network), Door::Ring(_)) = (&self.network, &session.door) else { return false };
        session.slots[taken.slot].forwarded = Some(taken.seq);
        let stamp = Stamp { session: session.id, slot: taken.slot as u16, sequence: taken.seq };
        network.commands.give(order(stamp));
        true
    }

    /// A request that was sent on has its answer.
    pub(super) fn answered(&mut self, stamp: Stamp, reply: &[u8]) -> Result<()> {
        self.note_looked(stamp, reply);
        let Some(i) = self.sessions.iter().position(|s| s.id == stamp.session) else { return Ok(()) };
        let slot = usize::from(stamp.slot);
        if slot >= RING_SLOTS || self.sessions[i].slots[slot].forwarded != Some(stamp.sequence) {
            return Ok(());
        }
        self.sessions[i].slots[slot].forwarded = None;
        let whole;
        let reply = match self.redirect((i, slot, stamp.sequence), None, reply) {
            Some(Redirect::Ask(message)) => {
                self.serve_anew(i, slot, stamp.sequence, message);
                return Ok(());
            }
            Some(Redirect::Reply(reply)) => {
                whole = reply;
                &whole
            }
            Some(Redirect::Wait) => return Ok(()),
            None => reply,
        };
        if let Some((ino, _)) = created(reply) {
            // The client makes the backing file before it asks again: it is not to be removed before.
            self.sessions[i].slots[slot].pending_create = Some(ino);
            self.pending_creates.push(ino);
            if self.removed_elsewhere.contains(&ino) {
                self.remove_when_made(vec![ino])?;
            }
        }
        self.sessions[i].answer(slot, reply);
        Ok(())
    }

    /// A process of another node asks.
    pub(super) fn asked(&mut self, ticket: Ticket, message: Vec<u8>) -> Result<()> {
        let Some(network) = &self.network else { return Ok(()) };
        let stamp = ticket.stamp;
        let refuse = |code| {
            network.commands.give(Command::Answer { ticket, reply: failure(code).to_vec() });
            Ok(())
        };
        let slot = usize::from(stamp.slot);
        if slot >= RING_SLOTS || node_of_session(stamp.session) != ticket.node {
            tracing::warn!("node {} asks with the stamp of another: {stamp:?}", ticket.node);
            return refuse(Code::Malformed);
        }
        let known = self.sessions.iter().position(|s| s.id == stamp.session);
        let i = match known {
            Some(i) => i,
            None if self.remote_sessions >= REMOTE_SESSIONS_MAX => return refuse(Code::NoResources),
            None => {
                if is_of_daemon(stamp.session) {
                    self.end_daemons_before(ticket.node, stamp.session);
                }
                self.remote_sessions += 1;
                self.sessions.push(Session::new(
                    stamp.session,
                    Door::Remote(RemoteSlots::new(network.commands.clone())),
                ));
                self.sessions.len() - 1
            }
        };
        let session = &self.sessions[i];
        let Door::Remote(slots) = &session.door else {
            return refuse(Code::Malformed);
        };
        let (last, kept) = &session.slots[slot].last_change;
        if !kept.is_empty() && *last == stamp.sequence {
            // A retry: it was done, and its answer was lost, or is held back still.
            if slots.is_waiting(slot, stamp.sequence) {
                slots.put(slot, ticket, message);
                return Ok(());
            }
            let (reply, id, seq) = (kept.clone(), session.id, stamp.sequence);
            self.remove_again(&reply)?;
            let whose = Whose::Client { session: id, slot, seq, reply: reply.clone() };
            let client = Client { session: id, slot, seq };
            let held = Request::decode(&message).is_ok_and(|(_, request)| {
                self.answer_when_delivered(client, &request, &reply, &[])
                    || self.hold_cautiously(whose, &request, &[])
            });
            if held {
                if let Door::Remote(slots) = &self.sessions[i].door {
                    slots.put_served(slot, ticket);
                }
            } else if let Some(network) = &self.network {
                network.commands.give(Command::Answer { ticket, reply });
            }
            return Ok(());
        }
        if !kept.is_empty() && *last > stamp.sequence {
            return refuse(Code::Stale);
        }
        slots.put(slot, ticket, message);
        Ok(())
    }

    /// Another node's worker has begun: what was kept for the one before it is of no use any more.
    fn end_daemons_before(&self, node: NodeId, session: u64) {
        let is_before = |id: u64| is_of_daemon(id) && node_of_session(id) == node && id != session;
        let before: Vec<u64> = self.sessions.iter().map(|s| s.id).filter(|id| is_before(*id)).collect();
        for id in before {
            let _ = self.to_self.send(Message::EndedElsewhere(node, id));
        }
    }

    /// A process of another node is gone, as that node says.
    pub(super) fn ended_elsewhere(&mut self, node: NodeId, session: u64) -> Result<()> {
        if node_of_session(session) == node {
            self.end_session(session)?;
        }
        Ok(())
    }

    /// Has other nodes asked, or this one of them, whether their processes are there that replies are kept for: that one is
    /// gone is told once, and may get lost with a node.
    pub(super) fn review_sessions(&self, node: Option<NodeId>) {
        let Some(network) = &self.network else { return };
        let theirs = self.sessions.iter().filter(|s| !s.is_here()).map(|s| s.id);
        let theirs = theirs.filter(|id| node.is_none_or(|node| node_of_session(*id) == node));
        network.commands.give(Command::Review(node, theirs.collect()));
    }

    /// Another node asks which of these processes are there.
    pub(super) fn are_there(&self, ticket: Ticket, sessions: Vec<u64>) {
        let Some(network) = &self.network else { return };
        let here = self.sessions.iter().filter(|s| s.is_here()).map(|s| s.id);
        let known: HashSet<u64> = here.chain(self.cross_node.as_ref().map(CrossNode::session)).collect();
        let there = sessions.iter().map(|id| u8::from(known.contains(id))).collect();
        network.commands.give(Command::AreThere { ticket, sessions, there });
    }

    /// Inodes of another node are gone, and backing files of theirs here are to go too.
    pub(super) fn remove_backings(&mut self, ticket: Ticket, message: Vec<u8>) -> Result<()> {
        let Some(Network { commands, .. }) = &self.network else { return Ok(()) };
        let commands = commands.clone();
        if let Ok((_, Request::RemoveBackings { ids })) = Request::decode(&message) {
            // Only of one backing file is the name known before its maker asks for it.
            let single = || BackingId::listed(ids).filter(|id| id.number == 0).map(|id| id.ino);
            let asks = |s: &Session| s.is_here() && s.slots.iter().any(|slot| slot.forwarded.is_some());
            match self.sessions.iter().any(asks) {
                true => self.removed_elsewhere.extend(single()),
                false => self.removed_elsewhere.clear(),
            }
            self.removed_elsewhere
                .drain(..self.removed_elsewhere.len().saturating_sub(REMOVED_ELSEWHERE_MAX));
            let born = single().filter(|ino| self.pending_creates.contains(ino)).collect();
            self.remove_when_made(born)?;
        }
        commands.give(Command::Serve { ticket, message });
        Ok(())
    }

    /// Inodes of other nodes are gone whose backing files clients of here may be about to make: when they have, the sweeper removes
    /// them.
    fn remove_when_made(&mut self, mut inos: Vec<Ino>) -> Result<()> {
        inos.retain(|ino| self.unlinked_while_pending.iter().all(|(known, _)| known != ino));
        let Some(here) = self.network.as_ref().map(|network| network.node).filter(|_| !inos.is_empty())
        else {
            return Ok(());
        };
        for ino in inos {
            let layout = Layout::single(here, 0);
            self.unlinked_while_pending.push((ino, layout));
            if !self.remove_in_batch(|batch| batch.list_orphan(ino, &layout))? {
                tracing::warn!("no room to list inode {ino} of another node as an orphan");
            }
        }
        // Its node forgets it now: from here on this one alone knows.
        self.commit()
    }

    /// A process of another node is told again that it has made a file, which is gone meanwhile: what its node was to remove it may
    /// make now.
    fn remove_again(&mut self, reply: &[u8]) -> Result<()> {
        let Ok(Reply::Created { entry, created: true, .. }) = Reply::decode(reply) else { return Ok(()) };
        let (ino, layout) = (entry.attr.ino, entry.layout);
        if all_here(self.network.as_ref(), &layout) || has_inode(self.batch()?, ino) {
            return Ok(());
        }
        if self.remove_in_batch(|batch| batch.list_orphan(ino, &layout))? {
            self.sweep_soon((ino, layout));
            // Before it is told: it does not ask again.
            self.commit()?;
        }
        Ok(())
    }
}
