//! Incoming links: of nodes that send requests to this node.

use std::collections::BTreeSet;

use forebay_types::Code;
use forebay_wire::{respond_unless, Hello, Kind, Message, Refusal, Response, Stamp};

use super::call_event::{Body, CallEvent, Ticket};
use super::link::Incoming;
use super::state::{OutgoingFrame, Role, State, To};

impl State {
    pub(super) fn hear_hello(&mut self, frame: &[u8]) -> Result<(), Code> {
        let link = self.new_link();
        let (me, mut out) = (self.hello(link), Vec::new());
        let lost =
            |peer: &Hello| self.lacks_its_data(peer).map(|detail| Refusal { code: Code::Stale, detail });
        let (hello, session) = match respond_unless(&self.secret, &me, frame, &mut out, lost)? {
            Response::Welcome(hello, session) => (hello, session),
            Response::Refuse(hello, refusal) => {
                tracing::warn!("node {} was refused: {}", hello.node, refusal.detail);
                self.outgoing.push_back(OutgoingFrame {
                    to: To::Address(hello.address),
                    frame: out,
                    node: 0,
                });
                return Ok(());
            }
        };
        if self.incoming.len() >= self.settings.incoming_max {
            // Unproven links are removed first. So replays of a Hello can use up no more than the places of unproven
            // links.
            let unproven = self.incoming.iter().find(|(_, i)| !i.proven).map(|(link, _)| *link);
            let unproven = unproven.ok_or(Code::NoResources)?;
            self.drop_incoming(unproven);
        }
        self.outgoing.push_back(OutgoingFrame {
            to: To::Address(hello.address.clone()),
            frame: out,
            node: 0,
        });
        let incoming = Incoming { hello, session, proven: false, heard: self.now, asked: BTreeSet::new() };
        self.incoming.insert(link, incoming);
        self.links.insert(link, Role::In);
        Ok(())
    }

    fn drop_incoming(&mut self, link: u64) -> Option<Incoming> {
        self.links.remove(&link);
        let gone = self.incoming.remove(&link)?;
        let of = (gone.hello.node, gone.hello.incarnation);
        if self.proven_links.get(&of) == Some(&link) {
            self.proven_links.remove(&of);
        }
        Some(gone)
    }

    /// Marks a link as proven. It replaces older links of its node.
    fn prove(&mut self, link: u64) {
        let Some(new) = self.incoming.get(&link) else { return };
        let (node, incarnation) = (new.hello.node, new.hello.incarnation);
        let older: Vec<u64> = self
            .proven_links
            .range((node, 0)..=(node, u64::MAX))
            .map(|(_, link)| *link)
            .filter(|l| *l != link)
            .collect();
        let (mut asked, mut known) = (BTreeSet::new(), false);
        for old in older {
            let Some(old) = self.drop_incoming(old) else { continue };
            if old.hello.incarnation == incarnation {
                asked.extend(old.asked);
                known = true;
            } else {
                let why = "it has restarted".to_owned();
                self.happened.push_back(CallEvent::Left { node, incarnation: old.hello.incarnation, why });
            }
        }
        if let Some(new) = self.incoming.get_mut(&link) {
            new.proven = true;
            new.asked = asked;
            self.proven_links.insert((node, incarnation), link);
            if !known {
                let (capacity_bytes, address) = (new.hello.capacity_bytes, new.hello.address.clone());
                self.happened.push_back(CallEvent::Joined { node, incarnation, capacity_bytes, address });
            }
        }
    }

    /// Handles a frame of an incoming link.
    pub(super) fn hear_from_asker(&mut self, link: u64, frame: &[u8]) -> Result<(), Code> {
        let now = self.now;
        let incoming = self.incoming.get_mut(&link).ok_or(Code::UnknownSession)?;
        let (header, body) = incoming.session.open(frame)?;
        incoming.heard = now;
        if !incoming.proven {
            self.prove(link);
        }
        let Some(incoming) = self.incoming.get_mut(&link) else { return Err(Code::UnknownSession) };
        match header.kind {
            Kind::Finish => Ok(()),
            Kind::Heartbeat => {
                let Message::Heartbeat { clock_us } = Message::decode(header.kind, body)? else {
                    return Err(Code::Malformed);
                };
                let alive = Message::Alive { echo_us: clock_us, clock_us: self.clock_us() };
                self.send_to_asker(link, 0, Stamp::default(), &alive);
                Ok(())
            }
            Kind::Goodbye => {
                let why = match Message::decode(header.kind, body)? {
                    Message::Goodbye { detail } => String::from_utf8_lossy(detail).into_owned(),
                    _ => String::new(),
                };
                if let Some(gone) = self.drop_incoming(link) {
                    let (node, incarnation) = (gone.hello.node, gone.hello.incarnation);
                    self.happened.push_back(CallEvent::Left { node, incarnation, why });
                }
                Ok(())
            }
            kind if kind.asks() => {
                if let Err(code) = Message::decode(kind, body) {
                    let failure = Message::Failure { code, detail: b"the request cannot be served as it is" };
                    self.send_to_asker(link, header.request, header.stamp, &failure);
                    return Ok(());
                }
                if incoming.asked.contains(&header.request) {
                    self.statistics.repeated += 1;
                    return Ok(());
                }
                if incoming.asked.len() >= 2 * self.settings.calls_per_node {
                    let failure =
                        Message::Failure { code: Code::Busy, detail: b"too many requests are unanswered" };
                    self.send_to_asker(link, header.request, header.stamp, &failure);
                    return Ok(());
                }
                incoming.asked.insert(header.request);
                let ticket = Ticket {
                    node: incoming.hello.node,
                    incarnation: incoming.hello.incarnation,
                    request: header.request,
                    stamp: header.stamp,
                };
                self.happened.push_back(CallEvent::Asked { ticket, body: Body::new(kind, body) });
                Ok(())
            }
            _ => Err(Code::Malformed),
        }
    }

    pub(super) fn send_to_asker(&mut self, link: u64, request: u64, stamp: Stamp, message: &Message<'_>) {
        let Some(incoming) = self.incoming.get_mut(&link) else { return };
        let mut frame = Vec::new();
        if incoming.session.seal(request, stamp, message, &mut frame).is_ok() {
            let to = To::Address(incoming.hello.address.clone());
            self.outgoing.push_back(OutgoingFrame { to, frame, node: 0 });
        }
    }

    pub(super) fn answer(&mut self, ticket: &Ticket, message: &Message<'_>) -> Result<(), Code> {
        if !message.kind().answers() {
            return Err(Code::Invalid);
        }
        let link = self.proven_links.get(&(ticket.node, ticket.incarnation));
        let Some(incoming) = link.and_then(|link| self.incoming.get_mut(link)) else { return Ok(()) };
        let mut frame = Vec::new();
        incoming.session.seal(ticket.request, ticket.stamp, message, &mut frame)?;
        incoming.asked.remove(&ticket.request);
        let to = To::Address(incoming.hello.address.clone());
        self.outgoing.push_back(OutgoingFrame { to, frame, node: 0 });
        Ok(())
    }

    pub(super) fn incoming_timers(&mut self) {
        let (now, timeout) = (self.now, self.settings.unreachable);
        let silent: Vec<u64> = self
            .incoming
            .iter()
            .filter(|(_, i)| now >= i.heard + if i.proven { timeout * 2 } else { timeout })
            .map(|(link, _)| *link)
            .collect();
        for link in silent {
            if let Some(gone) = self.drop_incoming(link).filter(|i| i.proven) {
                let why = format!("it has been silent for {} ms", (now - gone.heard).as_millis());
                let (node, incarnation) = (gone.hello.node, gone.hello.incarnation);
                self.happened.push_back(CallEvent::Left { node, incarnation, why });
            }
        }
    }
}
