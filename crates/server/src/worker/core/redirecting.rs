//! Connects wide directories (`wide.rs`): calls go to the part that has the name, and answers that lead to another part
//! are followed.

use super::state::ShardThread;
use crate::worker::call::Call;
use crate::worker::wide::may_ask_anew;
use crate::worker::wide::Listing;
use crate::worker::wide::Redirect;
use forebay_meta::Client;
use forebay_types::limits::WIDTH_MAX;
use forebay_types::{Answer, Code, Ino, Refusal, Request};

impl ShardThread<'_> {
    /// Turns a call of this node's process that names a wide directory into a call to the part, if the parts are known.
    pub(in crate::worker) fn lead_to_parts(&mut self, session: usize, call: Call) -> Result<Call, Code> {
        let Some(network) = self.network.as_ref().filter(|_| !self.wide.known.is_empty()) else {
            return Ok(call);
        };
        if !self.sessions[session].is_here() {
            return Ok(call);
        }
        let (client, caller, known) = (call.client, call.caller(), &self.wide.known);
        let Some(led) = call.request().in_parts(network.node, |ino| known.get(ino))? else {
            return Ok(call);
        };
        // A node without a target is home to no directory: the new one is created on the part's node, like its name.
        let led = match led {
            Request::MakeDirectoryAt { parent, name, mode, .. } if self.targets.for_files().is_empty() => {
                Request::MakeDirectory { parent, name, mode }
            }
            led => led,
        };
        if let (
            &Request::ReadDirectory { ino, cookie, attributes },
            Request::ReadDirectory { ino: part, .. },
        ) = (call.request(), led)
        {
            if let Some(parts) = known.get(ino) {
                let index = parts.as_slice().iter().position(|p| *p == part).unwrap_or(0);
                let listing = Listing::new(client, caller, parts, index, cookie, attributes);
                self.sessions[session].slots[client.slot].listing = Some(Box::new(listing));
            }
        }
        Call::encode(client, caller, &led)
    }

    /// Follows the answer to a call of this node's process, or to a call that was made in its place. None: the answer
    /// is for the client. `asked` is the call, if it did not leave this node.
    pub(in crate::worker) fn redirect(
        &mut self,
        session: usize,
        client: &Client,
        asked: Option<&Call>,
        answer: &Answer<'_>,
    ) -> Option<Redirect> {
        let here = self.network.as_ref()?.node;
        if !self.sessions[session].is_here() {
            return None;
        }
        let state = &mut self.sessions[session].slots[client.slot];
        let asked = asked.or(state.sent.as_ref());
        match (answer, asked) {
            (Err(Refusal::Code(Code::NotFound)), Some(asked)) if !self.wide.left.is_empty() => {
                let learnt = self.wide.learn_of_the_last(here, asked.request());
                if learnt && may_ask_anew(&mut state.asked_anew, client.seq) {
                    return Some(Redirect::Ask(asked.clone()));
                }
            }
            (Err(refusal), _) if refusal.code() == Code::Wide => {
                let asked = asked.cloned();
                return Some(self.redirect_to_parts(session, client, asked, refusal));
            }
            _ => {}
        }
        let listing = self.sessions[session].slots[client.slot].listing.as_mut()?;
        if listing.client.seq != client.seq {
            self.sessions[session].slots[client.slot].listing = None;
            return None;
        }
        let redirect = listing.hear(answer);
        self.list_on(session, client.slot, &redirect);
        Some(redirect)
    }

    /// A call was refused because it named a wide directory, or a part that does not have the name.
    #[cold]
    fn redirect_to_parts(
        &mut self,
        session: usize,
        client: &Client,
        asked: Option<Call>,
        refusal: &Refusal,
    ) -> Redirect {
        let Some(here) = self.network.as_ref().map(|network| network.node) else {
            return Redirect::Answer(Code::Io.into());
        };
        let state = &mut self.sessions[session].slots[client.slot];
        state.sent = None;
        let may = may_ask_anew(&mut state.asked_anew, client.seq);
        let learnt = match (refusal, &asked) {
            (_, None) => Err("for an unknown request"),
            (Refusal::Wide(_), _) if !may => Err("and the request was redirected too often"),
            (Refusal::Wide(parts), Some(asked)) => self.wide.learn_by(here, asked.request(), *parts),
            (Refusal::Code(_), _) => Err("for a name that its part does not have"),
        };
        let why = match (learnt, asked) {
            (Ok(()), Some(asked)) => return Redirect::Ask(asked),
            (Err(why), Some(asked)) => {
                self.wide.forget_parts_in(here, asked.request());
                why
            }
            (Ok(()), None) => "for an unknown request",
            (Err(why), None) => why,
        };
        let of = match refusal {
            Refusal::Wide(parts) => parts.of,
            Refusal::Code(_) => Ino(0),
        };
        tracing::warn!("refused a request: a node sent parts of wide directory {of} {why}");
        state.listing = None;
        Redirect::Answer(Code::Io.into())
    }

    /// Continues or ends a listing. The next parts are requested ahead while this daemon has free slots at other nodes.
    fn list_on(&mut self, session: usize, slot: usize, redirect: &Redirect) {
        let state = &mut self.sessions[session].slots[slot].listing;
        let (Some(listing), Some(network), Some(steps)) =
            (state.as_mut(), &self.network, &mut self.cross_node)
        else {
            return;
        };
        if matches!(redirect, Redirect::Answer(_)) {
            *state = None;
            return;
        }
        if !steps.has_room_for(WIDTH_MAX) {
            return;
        }
        let (client, caller) = (listing.client, listing.caller);
        for index in listing.ask_ahead(network.node) {
            match Call::encode(client, caller, &listing.question(index)) {
                Ok(call) => {
                    self.wide.asked_ahead += 1;
                    let number = self.wide.asked_ahead;
                    self.wide.ahead.insert(number, (client, index));
                    let node = listing.parts.as_slice()[index].birth_node();
                    steps.ask_ahead(number, node, call.bytes().to_vec());
                }
                // Nothing was sent, so no answer would arrive: the failure counts when this part's entries are next.
                Err(code) => {
                    let redirect = listing.hear_ahead(index, &Err(code.into()));
                    debug_assert!(redirect.is_none(), "only parts behind the next one are requested ahead");
                }
            }
        }
    }

    /// The answer of a part that a listing requested ahead, or its failure.
    pub(in crate::worker) fn told_ahead(&mut self, number: u64, answer: &Answer<'_>) {
        let Some((client, index)) = self.wide.ahead.remove(&number) else { return };
        let Some(session) = self.sessions.iter().position(|s| s.id == client.session) else { return };
        let listing = &mut self.sessions[session].slots[client.slot].listing;
        let Some(listing) = listing.as_mut().filter(|listing| listing.client.seq == client.seq) else {
            return;
        };
        let Some(redirect) = listing.hear_ahead(index, answer) else { return };
        self.list_on(session, client.slot, &redirect);
        match redirect {
            Redirect::Ask(call) => self.serve_anew(call),
            Redirect::Answer(reply) => self.answer_client(client, &reply.bytes),
            Redirect::Wait => {}
        }
    }

    /// Queues a call to be served again, or another call in its place.
    pub(in crate::worker) fn serve_anew(&mut self, call: Call) {
        if let Some(steps) = &mut self.cross_node {
            steps.serve_anew(call);
        }
    }
}
