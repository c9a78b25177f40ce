//! The core's use of wide directories: calls go to the part that has the name, answers that are not the client's are followed
//! (`wide.rs`).

use super::state::ShardThread;
use crate::worker::call::Call;
use crate::worker::wide::may_ask_anew;
use crate::worker::wide::Listing;
use crate::worker::wide::Redirect;
use forebay_meta::Client;
use forebay_types::limits::WIDTH_MAX;
use forebay_types::{Answer, Code, Ino, Refusal, Request};

impl ShardThread<'_> {
    /// A call of a process of this node that names a wide directory becomes one of the part, if the parts are known.
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
        // No directory is born on a node without a target: it is on that of the part, like its name.
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

    /// What comes of the answer to a call of a process of this node, or to what was asked in its place; none: it is the client's reply.
    /// `asked` is the call, if it did not leave this node.
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

    /// A call was refused as it named a wide directory, or a part for a name that this part has not.
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
            (_, None) => Err("and nobody knows of what request"),
            (Refusal::Wide(_), _) if !may => Err("and the request was asked anew too often"),
            (Refusal::Wide(parts), Some(asked)) => self.wide.learn_by(here, asked.request(), *parts),
            (Refusal::Code(_), _) => Err("and asked one for a name that it has not"),
        };
        let why = match (learnt, asked) {
            (Ok(()), Some(asked)) => return Redirect::Ask(asked),
            (Err(why), Some(asked)) => {
                self.wide.forget_parts_in(here, asked.request());
                why
            }
            (Ok(()), None) => "and nobody knows of what request",
            (Err(why), None) => why,
        };
        let of = match refusal {
            Refusal::Wide(parts) => parts.of,
            Refusal::Code(_) => Ino(0),
        };
        tracing::warn!("a node told of parts of a wide directory ({of}), {why}: the request is refused");
        state.listing = None;
        Redirect::Answer(Code::Io.into())
    }

    /// A listing goes on, or is over: parts are asked ahead, if there is room for that among what this daemon asks others.
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
            self.wide.asked_ahead += 1;
            let number = self.wide.asked_ahead;
            self.wide.ahead.insert(number, (client, index));
            if let Ok(call) = Call::encode(client, caller, &listing.question(index)) {
                let node = listing.parts.as_slice()[index].birth_node();
                steps.ask_ahead(number, node, call.bytes().to_vec());
            }
        }
    }

    /// A part that a listing asked ahead has answered, or will not.
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

    /// Has a call served again, or another in its place.
    pub(in crate::worker) fn serve_anew(&mut self, call: Call) {
        if let Some(steps) = &mut self.cross_node {
            steps.serve_anew(call);
        }
    }
}
