//! Connects other nodes: calls of this node's clients that are forwarded, and calls of other nodes' clients that are
//! served here.

use crate::worker::network::all_here;
use std::collections::HashSet;
use std::sync::Arc;

use forebay_fabric::Ticket;
use forebay_meta::Client;
use forebay_types::limits::RING_SLOTS;
use forebay_types::{BackingId, Class, Code, Ino, Layout, NodeId, Reply, Request, Result};
use forebay_wire::Stamp;

use super::state::ShardThread;
use crate::worker::acks::ReplyBuf;
use crate::worker::call::Call;
use crate::worker::channel::{Channel, RemoteSlots};
use crate::worker::coordination::CrossNode;
use crate::worker::message::Message;
use crate::worker::network::{Command, Network};
use crate::worker::notifier::HeldReply;
use crate::worker::own_answers;
use crate::worker::session::{created, Session};
use crate::worker::session_id::{is_of_daemon, node_of_session};
use crate::worker::shard_queries::has_inode;
use crate::worker::wide::Redirect;

/// Limit of processes of other nodes whose replies are kept: enough for a large pool whose processes all use one
/// directory.
const REMOTE_SESSIONS_MAX: usize = 65_536;

impl ShardThread<'_> {
    /// The node that serves a request, if it is not this one.
    #[inline]
    pub(in crate::worker) fn elsewhere(&self, request: &Request<'_>) -> Option<NodeId> {
        let here = self.network.as_ref()?.node;
        if matches!(request, Request::Pending { parent: Ino(0), .. }) {
            return None;
        }
        request.node().filter(|node| *node != here)
    }

    /// In a pool of several nodes: forwards a call to another node or to the network thread if they serve it. True: the
    /// answer arrives later.
    ///
    /// # Errors
    /// [`Code::Stale`] when another node sent a call that this node does not serve.
    pub(in crate::worker) fn send_on(
        &mut self,
        session: usize,
        call: &Call,
    ) -> std::result::Result<bool, Code> {
        let request = call.request();
        let is_here = self.sessions[session].is_here();
        match request.class() {
            Class::Peer => return Err(Code::NotPermitted),
            // A step from a sender that is no daemon is refused where steps are served.
            Class::Step if is_here => return Err(Code::NotPermitted),
            Class::Step => return Ok(false),
            Class::Data if !is_here => return Err(Code::NotSupported),
            Class::Data => {
                if let Some(network) = &self.network {
                    network.commands.give(Command::ServeClient(call.clone()));
                }
                return Ok(true);
            }
            Class::Client => {}
        }
        match *request {
            Request::Space => {
                let own = own_answers::space(&self.targets, self.committed.inodes)?;
                return Ok(self.ask_network(session, call, |stamp| Command::Space { stamp, own }));
            }
            Request::Place { stripe_count } => {
                let own = own_answers::own_targets(&self.targets);
                return Ok(self.ask_network(session, call, |stamp| Command::Place {
                    stamp,
                    stripe_count,
                    own,
                }));
            }
            _ => {}
        }
        match self.elsewhere(request) {
            // Checked before the request may become a cross-node transaction, whose parts are not checked for this.
            None => {
                crate::worker::layout_change::check_targets(&self.targets, self.network.as_ref(), request)
                    .map(|()| false)
            }
            Some(_) if !is_here => Err(Code::Stale),
            Some(node) => {
                self.forward(session, node, call);
                Ok(true)
            }
        }
    }

    /// Forwards a call of a client of this node. [`ShardThread::answered`] gets the answer.
    fn forward(&mut self, session: usize, node: NodeId, call: &Call) {
        let stamp = call.stamp();
        if let Some(leases) = &mut self.leases {
            leases.looks(stamp, node, call.request());
        }
        let session = &mut self.sessions[session];
        if call.request().changes() {
            session.note_asked(node);
        }
        session.slots[call.client.slot].forwarded = Some(call.client.seq);
        session.remember_sent(call);
        if let Some(network) = &self.network {
            network.commands.give(Command::Forward { node, call: call.clone() });
        }
    }

    /// Makes the network thread take the data requests of a client of this node.
    pub(in crate::worker) fn give_ring_to_network(&self, session: &Session) {
        if let (Some(network), Some(ring)) = (&self.network, session.channel.ring()) {
            network.commands.give(Command::Attach(session.id, Arc::clone(ring)));
        }
    }

    /// Makes the network thread answer a client of this node. False for a client of another node, which the shard
    /// thread answers itself.
    fn ask_network(&mut self, session: usize, call: &Call, order: impl FnOnce(Stamp) -> Command) -> bool {
        let session = &mut self.sessions[session];
        let Some(network) = self.network.as_ref().filter(|_| session.is_here()) else { return false };
        session.slots[call.client.slot].forwarded = Some(call.client.seq);
        network.commands.give(order(call.stamp()));
        true
    }

    /// The answer to a forwarded call arrived.
    pub(in crate::worker) fn answered(&mut self, stamp: Stamp, reply: &[u8]) -> Result<()> {
        let answer = Reply::decode_answer(reply);
        self.note_looked(stamp, &answer);
        let Some(i) = self.sessions.index_of(stamp.session) else { return Ok(()) };
        let slot = usize::from(stamp.slot);
        if slot >= RING_SLOTS || self.sessions[i].slots[slot].forwarded != Some(stamp.sequence) {
            return Ok(());
        }
        self.sessions[i].slots[slot].forwarded = None;
        let client = Client { session: stamp.session, slot, seq: stamp.sequence };
        match self.redirect(i, &client, None, &answer) {
            Some(Redirect::Ask(call)) => self.serve_anew(call),
            Some(Redirect::Answer(reply)) => self.sessions[i].answer(slot, &reply.bytes),
            Some(Redirect::Wait) => {}
            None => {
                if let Some((ino, _)) = answer.ok().as_ref().and_then(created) {
                    // The client makes the backing file before it sends its next request. Until then the file must not
                    // be removed.
                    self.sessions[i].slots[slot].pending_create = Some(ino);
                    self.backing.create_pending(ino);
                    if self.backing.was_removed_elsewhere(ino) {
                        self.remove_when_made(vec![ino])?;
                    }
                }
                self.sessions[i].answer(slot, reply);
            }
        }
        Ok(())
    }

    /// A call of a process of another node, or a retry of one, arrived.
    pub(in crate::worker) fn asked(&mut self, ticket: Ticket, message: Vec<u8>) -> Result<()> {
        let Some(network) = &self.network else { return Ok(()) };
        let stamp = ticket.stamp;
        let refuse = |code| {
            network.commands.give(Command::Answer { ticket, reply: ReplyBuf::from(code).bytes });
            Ok(())
        };
        let slot = usize::from(stamp.slot);
        if slot >= RING_SLOTS || node_of_session(stamp.session) != ticket.node {
            tracing::warn!("node {} asks with the stamp of another: {stamp:?}", ticket.node);
            return refuse(Code::Malformed);
        }
        let client = Client { session: stamp.session, slot, seq: stamp.sequence };
        let call = match Call::parse(client, message) {
            Ok(call) => call,
            Err(code) => return refuse(code),
        };
        let known = self.sessions.index_of(stamp.session);
        let i = match known {
            Some(i) => i,
            None if self.sessions.remote_count() >= REMOTE_SESSIONS_MAX => return refuse(Code::NoResources),
            None => {
                if is_of_daemon(stamp.session) {
                    self.end_daemons_before(ticket.node, stamp.session);
                }
                let slots = RemoteSlots::new(stamp.session, network.commands.clone(), self.arrivals.clone());
                self.sessions.push(Session::new(stamp.session, Channel::Remote(slots)))
            }
        };
        let session = &self.sessions[i];
        let Channel::Remote(slots) = &session.channel else {
            return refuse(Code::Malformed);
        };
        let (last, kept) = &session.slots[slot].last_change;
        if !kept.is_empty() && *last == stamp.sequence {
            // A retry: the change was made, and its reply was lost or is still delayed.
            if slots.is_waiting(slot, stamp.sequence) {
                slots.put(ticket, call);
                return Ok(());
            }
            let reply = kept.clone();
            if let Ok(kept) = Reply::decode(&reply) {
                self.remove_again(&kept)?;
                let held_reply = HeldReply::Client { client, reply: reply.clone() };
                let held = self.answer_when_delivered(&call, &kept, &[])
                    || self.hold_cautiously(held_reply, call.request(), &[]);
                if held {
                    if let Channel::Remote(slots) = &self.sessions[i].channel {
                        slots.put_served(slot, ticket);
                    }
                    return Ok(());
                }
            }
            if let Some(network) = &self.network {
                network.commands.give(Command::Answer { ticket, reply });
            }
            return Ok(());
        }
        if !kept.is_empty() && *last > stamp.sequence {
            return refuse(Code::Stale);
        }
        slots.put(ticket, call);
        Ok(())
    }

    /// A new worker of another node has sent its first call: ends the sessions of the workers before it.
    fn end_daemons_before(&self, node: NodeId, session: u64) {
        let is_before = |id: u64| is_of_daemon(id) && node_of_session(id) == node && id != session;
        let before: Vec<u64> = self.sessions.iter().map(|s| s.id).filter(|id| is_before(*id)).collect();
        for id in before {
            let _ = self.to_self.send(Message::EndedElsewhere(node, id));
        }
    }

    /// A process of another node has ended, as that node reports.
    pub(in crate::worker) fn ended_elsewhere(&mut self, node: NodeId, session: u64) -> Result<()> {
        if node_of_session(session) == node {
            self.end_session(session)?;
        }
        Ok(())
    }

    /// Asks other nodes, or one of them, which of their processes with kept replies still exist. The end of a process
    /// is reported once, and that report may get lost with a node.
    pub(in crate::worker) fn review_sessions(&self, node: Option<NodeId>) {
        let Some(network) = &self.network else { return };
        let theirs = self.sessions.iter().filter(|s| !s.is_here()).map(|s| s.id);
        let theirs = theirs.filter(|id| node.is_none_or(|node| node_of_session(*id) == node));
        network.commands.give(Command::Review(node, theirs.collect()));
    }

    /// Another node asks which of these processes of this node exist.
    pub(in crate::worker) fn are_there(&self, ticket: Ticket, sessions: Vec<u64>) {
        let Some(network) = &self.network else { return };
        let here = self.sessions.local().iter().map(|s| s.id);
        let known: HashSet<u64> = here.chain(self.cross_node.as_ref().map(CrossNode::session)).collect();
        let there = sessions.iter().map(|id| u8::from(known.contains(id))).collect();
        network.commands.give(Command::AreThere { ticket, sessions, there });
    }

    /// Another node has removed inodes. Removes their backing files on this node.
    pub(in crate::worker) fn remove_backings(&mut self, ticket: Ticket, message: Vec<u8>) -> Result<()> {
        let Some(Network { commands, .. }) = &self.network else { return Ok(()) };
        let commands = commands.clone();
        if let Ok((_, Request::RemoveBackings { ids })) = Request::decode(&message) {
            // Only the backing file of a file that has just one (number 0) has a name that its creator knows before it
            // sends a further request.
            let single = BackingId::listed(ids).filter(|id| id.number == 0).map(|id| id.ino);
            let asks = |s: &Session| s.is_here() && s.slots.iter().any(|slot| slot.forwarded.is_some());
            let may_create = self.sessions.iter().any(asks);
            let born = self.backing.removed_elsewhere(&single.collect::<Vec<_>>(), may_create);
            self.remove_when_made(born)?;
        }
        commands.give(Command::Serve { ticket, message });
        Ok(())
    }

    /// Another node has removed inodes whose backing files clients of this node may still create: the sweeper removes
    /// these files when the clients have sent their next request.
    fn remove_when_made(&mut self, mut inos: Vec<Ino>) -> Result<()> {
        let Some(here) = self.network.as_ref().map(|network| network.node) else { return Ok(()) };
        inos.retain(|ino| self.backing.unlinked_while_pending(*ino, Layout::single(here, 0)));
        if inos.is_empty() {
            return Ok(());
        }
        for ino in inos {
            let layout = Layout::single(here, 0);
            if !self.remove_in_batch(|batch| batch.list_orphan(ino, &layout))? {
                tracing::warn!("no room to list inode {ino} of another node as an orphan");
            }
        }
        // The other node forgets the inodes now, so that only this node knows of the files.
        self.commit()
    }

    /// The kept reply to a create is sent again after the file was removed: the client may now create the backing file
    /// that its node has already removed.
    fn remove_again(&mut self, reply: &Reply<'_>) -> Result<()> {
        let Reply::Created { entry, created: true, .. } = *reply else { return Ok(()) };
        let (ino, layout) = (entry.attr.ino, entry.layout);
        if all_here(self.network.as_ref(), &layout) || has_inode(self.batch()?, ino) {
            return Ok(());
        }
        if self.remove_in_batch(|batch| batch.list_orphan(ino, &layout))? {
            self.backing.sweep_soon((ino, layout));
            // Committed before the client gets the reply, because the client does not send the request again.
            self.commit()?;
        }
        Ok(())
    }
}
