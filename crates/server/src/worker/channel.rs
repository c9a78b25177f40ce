//! Channels: the source of a session's requests and the destination of its replies. A channel is the ring of a process
//! of this node, or the network for a process of another node. Each slot of a process of another node has one request
//! in progress. A request with a later sequence replaces it, because the process has abandoned the earlier one.
//!
//! For one request of a process its daemon may send several requests to other nodes (for the parts of a wide directory,
//! `wide.rs`), all with the process's stamp. After a restart of its worker, that daemon sends the first of them again,
//! although this node may have received the last one already. So this module compares requests with one stamp by their
//! bytes too.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_fabric::Ticket;
use forebay_meta::Client;
use forebay_types::Code;

use super::acks::ReplyBuf;
use super::arrivals::Arrivals;
use super::attached_ring::AttachedRing;
use super::call::Call;
use super::network::{Command, Commands};

/// How many refused requests with one stamp are stored: more than a daemon sends for one request of a process
/// (`wide.rs`).
const REFUSALS_KEPT: usize = 8;

/// A request that is not answered yet.
#[derive(Debug)]
struct Waiting {
    seq: u64,
    ticket: Ticket,
    /// None if the request was executed before and its reply is delayed.
    call: Option<Call>,
    taken: bool,
    /// Another request with the same stamp that arrived after this one was taken.
    instead: Option<Call>,
}

/// The last refusals of a slot. The reply to a successful change is a kept reply in the shard. A change that was
/// refused must not be made by a duplicate that arrives later, when it might succeed.
#[derive(Debug, Default)]
struct Refused {
    seq: u64,
    /// The requests with this stamp that were refused, and the replies.
    refused: Vec<(Vec<u8>, Vec<u8>)>,
}

/// The slots of a process of another node.
#[derive(Debug)]
pub(super) struct RemoteSlots {
    session: u64,
    commands: Commands,
    arrivals: Arrivals,
    waiting: RefCell<BTreeMap<usize, Waiting>>,
    last: RefCell<BTreeMap<usize, Refused>>,
}

impl RemoteSlots {
    /// `arrivals`: the list of requests for the shard thread to take.
    pub(super) fn new(session: u64, commands: Commands, arrivals: Arrivals) -> RemoteSlots {
        RemoteSlots { session, commands, arrivals, waiting: RefCell::default(), last: RefCell::default() }
    }

    /// A request, or a duplicate of one, has arrived.
    pub(super) fn put(&self, ticket: Ticket, call: Call) {
        let slot = call.client.slot;
        let (seq, mut waiting) = (ticket.stamp.sequence, self.waiting.borrow_mut());
        if let Some(last) = self.last.borrow().get(&slot).filter(|last| last.seq >= seq) {
            if last.seq > seq {
                return self.overtaken(ticket);
            }
            if let Some((_, reply)) = last.refused.iter().find(|(request, _)| *request == call.bytes()) {
                return self.commands.give(Command::Answer { ticket, reply: reply.clone() });
            }
        }
        match waiting.get_mut(&slot) {
            // The reply goes to the last sender: the process's daemon may have a new worker.
            Some(w) if w.seq == seq => {
                w.ticket = ticket;
                match (w.call.as_ref().is_none_or(|known| known.bytes() == call.bytes()), w.taken) {
                    (true, _) => w.instead = None,
                    (false, false) => w.call = Some(call),
                    (false, true) => w.instead = Some(call),
                }
            }
            Some(w) if w.seq > seq => self.overtaken(ticket),
            _ => {
                let arrived = Waiting { seq, ticket, call: Some(call), taken: false, instead: None };
                let before = waiting.insert(slot, arrived);
                if before.is_none_or(|before| before.taken) {
                    self.arrivals.add(self.session, slot);
                }
            }
        }
    }

    /// Refuses a request whose slot has sent a later one.
    fn overtaken(&self, ticket: Ticket) {
        self.commands.give(Command::Answer { ticket, reply: ReplyBuf::from(Code::Stale).bytes });
    }

    /// True when this request has arrived and is not answered.
    pub(super) fn is_waiting(&self, slot: usize, seq: u64) -> bool {
        self.waiting.borrow().get(&slot).is_some_and(|w| w.seq == seq)
    }

    /// A request has arrived whose reply is known but is sent later.
    pub(super) fn put_served(&self, slot: usize, ticket: Ticket) {
        let (seq, mut waiting) = (ticket.stamp.sequence, self.waiting.borrow_mut());
        if waiting.get(&slot).is_some_and(|w| w.seq > seq) {
            return self.overtaken(ticket);
        }
        waiting.insert(slot, Waiting { seq, ticket, call: None, taken: true, instead: None });
    }

    fn take(&self, slot: usize) -> Option<Call> {
        let mut waiting = self.waiting.borrow_mut();
        let w = waiting.get_mut(&slot).filter(|w| !w.taken)?;
        w.taken = true;
        w.call.clone()
    }

    /// Answers the request that was taken. If another request with its stamp has replaced it, that one is announced
    /// instead. A reply `kept` under the stamp belongs to a change, which is made once: it answers both requests.
    fn answer(&self, slot: usize, reply: &[u8], kept: u64) {
        let mut waiting = self.waiting.borrow_mut();
        let Some(mut w) = waiting.remove(&slot) else { return };
        match w.instead.take() {
            Some(call) if w.seq != kept => {
                waiting.insert(slot, Waiting { call: Some(call), taken: false, ..w });
                self.arrivals.add(self.session, slot);
            }
            _ => {
                self.remember(slot, w.seq, w.call, reply, kept);
                self.commands.give(Command::Answer { ticket: w.ticket, reply: reply.to_vec() });
            }
        }
    }

    /// Stores the refusal of a change.
    fn remember(&self, slot: usize, seq: u64, call: Option<Call>, reply: &[u8], kept: u64) {
        let mut all = self.last.borrow_mut();
        let last = all.entry(slot).or_default();
        if last.seq != seq {
            *last = Refused { seq, refused: Vec::new() };
        }
        let change = call.filter(|call| seq != kept && call.request().changes());
        if let Some(call) = change.filter(|_| last.refused.len() < REFUSALS_KEPT) {
            last.refused.push((call.bytes().to_vec(), reply.to_vec()));
        }
    }
}

/// The source of a session's requests and the destination of its replies.
#[derive(Debug)]
pub(super) enum Channel {
    /// The ring of a process of this node.
    Ring(Arc<AttachedRing>),
    /// The network.
    Remote(RemoteSlots),
}

impl Channel {
    /// The ring of a process of this node.
    pub(super) fn ring(&self) -> Option<&Arc<AttachedRing>> {
        match self {
            Channel::Ring(ring) => Some(ring),
            Channel::Remote(_) => None,
        }
    }

    /// Takes the request of a slot of this session, once: its client, and the call or the error of parsing it.
    #[inline]
    pub(super) fn take(
        &self,
        session: u64,
        slot: usize,
        buffer: &mut [u8],
    ) -> Option<(Client, Result<Call, Code>)> {
        match self {
            Channel::Ring(ring) => {
                let (seq, request) = ring.take(slot, buffer)?;
                let client = Client { session, slot, seq };
                Some((client, request.and_then(|r| Call::parse(client, buffer[..r.len].to_vec()))))
            }
            Channel::Remote(slots) => slots.take(slot).map(|call| (call.client, Ok(call))),
        }
    }

    /// Answers a request; `kept` is the sequence number of the slot's last change.
    #[inline]
    pub(super) fn answer(&self, slot: usize, reply: &[u8], kept: u64) {
        match self {
            Channel::Ring(ring) => ring.answer(slot, reply),
            Channel::Remote(slots) => slots.answer(slot, reply, kept),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{channel, Receiver};

    use super::*;
    use forebay_fabric::simulated::{Faults, Network};
    use forebay_fabric::Endpoint;
    use forebay_types::{Caller, Ino, NodeId, Request};
    use forebay_wire::Stamp;

    fn ticket(incarnation: u64, sequence: u64) -> Ticket {
        let stamp = Stamp { session: 9, slot: 3, sequence };
        Ticket { node: NodeId(2), incarnation, request: incarnation, stamp }
    }

    fn slots() -> (RemoteSlots, Receiver<Command>) {
        let (sender, commands) = channel();
        let endpoint = Network::new(1, Faults::NONE).endpoint(1);
        (RemoteSlots::new(9, Commands::new(sender, endpoint.waker().clone()), Arrivals::default()), commands)
    }

    fn asked(ticket: Ticket, request: &Request<'_>) -> (Ticket, Call) {
        let client = Client { session: 9, slot: 3, seq: ticket.stamp.sequence };
        (ticket, Call::encode(client, Caller { uid: 0, gid: 0 }, request).unwrap())
    }

    fn put(slots: &RemoteSlots, ticket: Ticket, request: &Request<'_>) {
        let (ticket, call) = asked(ticket, request);
        slots.put(ticket, call);
    }

    fn list(ino: u64) -> Request<'static> {
        Request::ReadDirectory { ino: Ino(ino), cookie: 0, attributes: false }
    }

    /// The inode of the request that is taken, by which the test distinguishes requests.
    fn taken(slots: &RemoteSlots) -> Option<u64> {
        let call = slots.take(3)?;
        match *call.request() {
            Request::ReadDirectory { ino, .. } => Some(ino.0),
            Request::Link { parent, .. } | Request::Lookup { parent, .. } => Some(parent.0),
            ref other => panic!("{other:?}"),
        }
    }

    /// The slots with requests that are not taken yet, as bits. Checks that each was announced.
    fn untaken(slots: &RemoteSlots) -> u64 {
        let waiting = slots.waiting.borrow();
        let untaken = waiting.iter().filter(|(_, w)| !w.taken).fold(0, |bits, (slot, _)| bits | 1 << slot);
        let announced = slots.arrivals.next().map_or(0, |(session, slot)| u64::from(session == 9) << slot);
        assert_eq!(announced & untaken, untaken);
        untaken
    }

    fn failure(code: Code) -> Vec<u8> {
        ReplyBuf::from(code).bytes
    }

    /// The incarnation that gets the only answer, and the answer.
    fn told(commands: &Receiver<Command>) -> (u64, Vec<u8>) {
        let all: Vec<Command> = commands.try_iter().collect();
        match &all[..] {
            [Command::Answer { ticket, reply }] => (ticket.incarnation, reply.clone()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn retry_has_the_answer_of_what_is_under_way() {
        let (slots, commands) = slots();
        put(&slots, ticket(1, 5), &list(1));
        assert_eq!(taken(&slots), Some(1));
        put(&slots, ticket(2, 5), &list(1));
        assert_eq!((taken(&slots), untaken(&slots)), (None, 0));
        slots.answer(3, b"names", 4);
        assert_eq!(told(&commands), (2, b"names".to_vec()));
        assert!(!slots.is_waiting(3, 5));
    }

    #[test]
    fn request_that_replaces_one_that_was_not_taken_is_announced_once() {
        let (slots, commands) = slots();
        for sequence in 5..50 {
            put(&slots, ticket(1, sequence), &list(sequence));
        }
        assert!(slots.arrivals.next().is_some() && slots.arrivals.is_empty());
        assert_eq!(taken(&slots), Some(49));
        // The reply to an earlier change is known: its late duplicate does not replace the request in progress.
        slots.put_served(3, ticket(2, 48));
        assert_eq!(told(&commands), (2, failure(Code::Stale)));
        assert!(slots.is_waiting(3, 49));
    }

    #[test]
    fn another_question_with_the_same_stamp_is_served_by_itself() {
        let (slots, commands) = slots();
        put(&slots, ticket(1, 5), &list(2));
        put(&slots, ticket(2, 5), &list(1));
        assert_eq!(taken(&slots), Some(1), "nobody had taken the other");

        put(&slots, ticket(3, 5), &list(2));
        assert_eq!(untaken(&slots), 0, "not before what is under way has ended");
        slots.answer(3, b"of the whole", 4);
        assert_eq!((commands.try_iter().count(), untaken(&slots)), (0, 1 << 3), "that is no answer to it");
        assert_eq!(taken(&slots), Some(2));
        slots.answer(3, b"of the part", 4);
        assert_eq!(told(&commands), (3, b"of the part".to_vec()));
    }

    #[test]
    fn change_that_was_refused_is_not_made_by_a_message_that_comes_twice() {
        let (slots, commands) = slots();
        let link = Request::Link { ino: Ino(7), parent: Ino(8), name: b"n" };
        let look = Request::Lookup { parent: Ino(8), name: b"n" };
        put(&slots, ticket(1, 5), &link);
        assert_eq!(taken(&slots), Some(8));
        slots.answer(3, &failure(Code::Exists), 4);
        assert_eq!(told(&commands), (1, failure(Code::Exists)));
        // A duplicate arrives.
        put(&slots, ticket(1, 5), &link);
        assert_eq!((told(&commands), untaken(&slots)), ((1, failure(Code::Exists)), 0));
        // Another request with the same stamp is served, and neither change is made when both arrive again.
        let other = Request::Link { ino: Ino(7), parent: Ino(9), name: b"n" };
        put(&slots, ticket(1, 5), &other);
        assert_eq!(taken(&slots), Some(9));
        slots.answer(3, &failure(Code::NotFound), 4);
        assert_eq!(told(&commands), (1, failure(Code::NotFound)));
        for (asked, code) in [(&link, Code::Exists), (&other, Code::NotFound)] {
            put(&slots, ticket(2, 5), asked);
            assert_eq!((told(&commands), untaken(&slots)), ((2, failure(code)), 0));
        }
        // A request that changes nothing is executed again. With a later sequence it discards the earlier refusals.
        for _ in 0..2 {
            put(&slots, ticket(2, 6), &look);
            assert_eq!(taken(&slots), Some(8));
            slots.answer(3, &failure(Code::NotFound), 4);
            assert_eq!(told(&commands), (2, failure(Code::NotFound)));
        }
        put(&slots, ticket(2, 5), &link);
        assert_eq!((told(&commands), untaken(&slots)), ((2, failure(Code::Stale)), 0));
    }

    #[test]
    fn change_that_was_made_answers_whatever_led_to_it() {
        let (slots, commands) = slots();
        put(&slots, ticket(1, 5), &list(2));
        assert!(taken(&slots).is_some());
        put(&slots, ticket(2, 5), &list(1));
        slots.answer(3, b"created", 5);
        assert_eq!(told(&commands), (2, b"created".to_vec()));
        assert!(!slots.is_waiting(3, 5), "it is not made twice");
    }
}
