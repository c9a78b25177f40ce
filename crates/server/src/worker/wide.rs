//! Wide directories as a daemon leads its programs to them (docs/decisions/0024): programs ask of the directory, and
//! their node's daemon of the part that has the name.
//!
//! ```text
//! a request ─ parts known ─► the same of the part: this node's, or sent on            what has the name answers
//!     └ not known ─► the directory's home ─ refusal with the parts ─► learnt, served anew
//! a listing: one part after the other, in the order of the cookies, until the reply is full. How many will go into it the first
//! part's reply tells, as all have about as many names: those behind are asked at the same time.
//! ```
//! What was learnt holds for good, as parts are never moved and no inode number comes twice: it needs no lease, and is forgotten only
//! for want of room; the next worker knows it too (`known_parts`). It is learnt of directories alone that the request names. Requests of other nodes' processes come with the part
//! already; one that does not is refused like that.

use std::cell::RefCell;
use std::collections::HashMap;

use forebay_meta::Client;
use forebay_types::limits::{READDIR_REPLY_BYTES, WIDTH_MAX};
use forebay_types::{
    go_on_behind, Answer, Caller, Code, Cookie, DirEntries, Ino, NodeId, Parts, Refusal, Reply, Request,
    REPLY_HEADER_BYTES,
};

use super::acks::ReplyBuf;
use super::call::Call;
use super::known_parts::KnownParts;

/// A request names two directories at most, and knowledge of the first may be forgotten meanwhile.
const ASKED_ANEW_MAX: u8 = 3;

/// The wide directories that this daemon knows.
#[derive(Debug, Default)]
pub(super) struct Wide {
    pub(super) known: KnownParts,
    /// Those that the last worker knew, of which this one has not heard.
    pub(super) left: HashMap<Ino, Parts>,
    /// Parts that listings have asked ahead, by the number under which they were asked: whose request, and which part.
    pub(super) ahead: HashMap<u64, (Client, usize)>,
    pub(super) asked_ahead: u64,
}

impl Wide {
    /// With what the last worker knew. What that asked before a directory was wide, its home has answered and no part:
    /// so that is asked first, and a part if the directory is gone.
    pub(super) fn with(mut known: KnownParts) -> Wide {
        let left = known.take();
        Wide { known, left, ..Wide::default() }
    }

    /// The home of a directory that the request names says that it is not there: if it was wide, its parts may have
    /// kept the answer to what the last worker asked them, and are known from here on. True when there is something
    /// else to ask.
    pub(super) fn learn_of_the_last(&mut self, here: NodeId, request: &Request<'_>) -> bool {
        let named = RefCell::new(Vec::new());
        let note = |ino| named.borrow_mut().extend(self.left.contains_key(&ino).then_some(ino));
        // Only to see which directories it names.
        let _ = request.in_parts(here, |ino| {
            note(ino);
            None
        });
        let named = named.into_inner();
        for of in &named {
            if let Some(parts) = self.left.remove(of) {
                self.known.insert(parts);
            }
        }
        !named.is_empty()
    }

    /// Takes the parts that a request of a process of `here` was refused with; what is wrong with them.
    pub(super) fn learn_by(
        &mut self,
        here: NodeId,
        request: &Request<'_>,
        parts: Parts,
    ) -> Result<(), &'static str> {
        // An error: it names it, and cannot be made of a part.
        if request.in_parts(here, |ino| (ino == parts.of).then_some(parts)) == Ok(None) {
            return Err("which the request does not name");
        }
        match self.known.get(parts.of) {
            Some(known) if known != parts => {
                self.known.retain(|known| known.of != parts.of);
                Err("and had others before")
            }
            _ => {
                self.left.remove(&parts.of);
                self.known.insert(parts);
                Ok(())
            }
        }
    }

    /// A part says that it does not have a name that it was asked for: what is known of its directory is asked anew.
    pub(super) fn forget_parts_in(&mut self, here: NodeId, request: &Request<'_>) {
        self.known.retain(|known| {
            let names =
                |part: &Ino| request.in_parts(here, |ino| (ino == *part).then_some(*known)) != Ok(None);
            !known.as_slice().iter().any(names)
        });
    }
}

/// A listing of a wide directory that is under way in a slot.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) client: Client,
    pub(super) caller: Caller,
    pub(super) parts: Parts,
    /// The part that was asked.
    index: usize,
    cookie: Cookie,
    attributes: bool,
    /// Bytes of the last part's entries.
    told_bytes: usize,
    /// Entries of the parts before it.
    collected: Vec<u8>,
    /// What became of each part that was asked ahead.
    ahead: [Ahead; WIDTH_MAX],
}

/// What became of a part of a listing that is not its turn yet.
#[derive(Clone, Default, Debug)]
enum Ahead {
    #[default]
    NotAsked,
    Asked,
    /// Its entries, or why there are none.
    Told(Result<Entries, Refusal>),
}

/// Entries of a part, until it is its turn.
#[derive(Clone, Debug)]
struct Entries {
    bytes: Vec<u8>,
    end: bool,
}

impl Entries {
    fn of(answer: &Answer<'_>) -> Result<Entries, Refusal> {
        match answer {
            Ok(Reply::Entries(entries)) => Ok(Entries { bytes: entries.bytes.to_vec(), end: entries.end }),
            Ok(_) => Err(Refusal::Code(Code::Malformed)),
            Err(refusal) => Err(*refusal),
        }
    }
}

/// What comes of a reply that is not yet the client's.
#[derive(Debug)]
pub(super) enum Redirect {
    /// This is asked next, for the same client.
    Ask(Call),
    /// This is the client's reply.
    Answer(ReplyBuf),
    /// Something was asked already whose answer is waited for.
    Wait,
}

fn encoded(entries: &[u8], end: bool) -> ReplyBuf {
    ReplyBuf::encode(&Ok(Reply::Entries(DirEntries { bytes: entries, end })))
}

impl Listing {
    /// A listing that begins with the part `index`, behind a cookie.
    pub(super) fn new(
        client: Client,
        caller: Caller,
        parts: Parts,
        index: usize,
        cookie: Cookie,
        attributes: bool,
    ) -> Listing {
        let (told_bytes, collected, ahead) = (0, Vec::new(), Default::default());
        Listing { client, caller, parts, index, cookie, attributes, told_bytes, collected, ahead }
    }

    /// Of so many parts the entries have room behind those of the one that was told last, which took `bytes`.
    fn room_for(&self, bytes: usize) -> usize {
        let left = READDIR_REPLY_BYTES.saturating_sub(REPLY_HEADER_BYTES + self.collected.len());
        left.checked_div(bytes).unwrap_or(WIDTH_MAX)
    }

    pub(super) fn question(&self, index: usize) -> Request<'static> {
        let ino = self.parts.as_slice()[index];
        Request::ReadDirectory { ino, cookie: self.cookie, attributes: self.attributes }
    }

    /// The part whose turn it is has answered.
    pub(super) fn hear(&mut self, answer: &Answer<'_>) -> Redirect {
        self.hear_entries(Entries::of(answer))
    }

    fn hear_entries(&mut self, entries: Result<Entries, Refusal>) -> Redirect {
        let mut redirect = self.hear_one(entries);
        while matches!(redirect, Redirect::Wait) {
            match std::mem::take(&mut self.ahead[self.index]) {
                Ahead::NotAsked => {
                    let question = self.question(self.index);
                    return match Call::encode(self.client, self.caller, &question) {
                        Ok(call) => Redirect::Ask(call),
                        Err(code) => Redirect::Answer(code.into()),
                    };
                }
                Ahead::Told(entries) => redirect = self.hear_one(entries),
                Ahead::Asked => {
                    self.ahead[self.index] = Ahead::Asked;
                    return Redirect::Wait;
                }
            }
        }
        redirect
    }

    /// Takes one part's entries: the whole reply, or it is the next one's turn.
    fn hear_one(&mut self, entries: Result<Entries, Refusal>) -> Redirect {
        let entries = match entries {
            Ok(entries) => entries,
            // What the parts before it have is told first, and the failure when they ask on.
            Err(_) if !self.collected.is_empty() => return Redirect::Answer(encoded(&self.collected, false)),
            Err(refusal) => return Redirect::Answer(ReplyBuf::encode(&Err(refusal))),
        };
        if REPLY_HEADER_BYTES + self.collected.len() + entries.bytes.len() > READDIR_REPLY_BYTES {
            return Redirect::Answer(encoded(&self.collected, false));
        }
        let begin = self.collected.len();
        self.collected.extend_from_slice(&entries.bytes);
        let last = self.index + 1 == self.parts.as_slice().len();
        if last || !entries.end {
            return Redirect::Answer(encoded(&self.collected, entries.end));
        }
        // It was told whole, and is not asked again should the next ones' entries come with another request: so its are
        // of one moment.
        let told = &mut self.collected[begin..];
        if let Err(code) = go_on_behind(told, self.parts.last_cookie(self.index)) {
            return Redirect::Answer(code.into());
        }
        self.index += 1;
        self.told_bytes = entries.bytes.len();
        Redirect::Wait
    }

    /// A part that was asked ahead has answered; none: it is not its turn yet.
    pub(super) fn hear_ahead(&mut self, index: usize, answer: &Answer<'_>) -> Option<Redirect> {
        let slot = self.ahead.get_mut(index)?;
        if index == self.index {
            *slot = Ahead::NotAsked;
            return Some(self.hear(answer));
        }
        *slot = Ahead::Told(Entries::of(answer));
        None
    }

    /// Parts of other nodes than `here` behind the one whose turn it is that are to be asked now, as there is room for
    /// them.
    pub(super) fn ask_ahead(&mut self, here: NodeId) -> Vec<usize> {
        if self.index == 0 {
            return Vec::new(); // how large they are is not known
        }
        let end = self.parts.as_slice().len().min(self.index + 1 + self.room_for(self.told_bytes));
        let mut asked = Vec::new();
        for index in self.index + 1..end {
            let elsewhere = self.parts.as_slice()[index].birth_node() != here;
            if elsewhere && matches!(self.ahead[index], Ahead::NotAsked) {
                self.ahead[index] = Ahead::Asked;
                asked.push(index);
            }
        }
        asked
    }
}

/// Counts the times that a slot's request was asked anew; false when they are too many.
pub(super) fn may_ask_anew(slot: &mut (u64, u8), seq: u64) -> bool {
    let times = if slot.0 == seq { slot.1.saturating_add(1) } else { 1 };
    *slot = (seq, times);
    times <= ASKED_ANEW_MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::{DirEntry, DirWriter, Kind, NodeId};

    fn listing() -> Listing {
        let inos = [1, 2, 3].map(|node| Ino::part(NodeId(node), 5));
        let parts = Parts::new(Ino::new(NodeId(1), 4), &inos).unwrap();
        let caller = Caller { uid: 0, gid: 0 };
        let (collected, ahead) = (Vec::new(), Default::default());
        Listing {
            client: Client { session: 1, slot: 0, seq: 1 },
            caller,
            parts,
            index: 0,
            cookie: 0,
            attributes: false,
            told_bytes: 0,
            collected,
            ahead,
        }
    }

    fn entries(cookies: &[u64], bytes: usize, end: bool) -> ReplyBuf {
        let mut room = vec![0; READDIR_REPLY_BYTES];
        let mut writer = DirWriter::new(&mut room);
        for cookie in cookies {
            let name = vec![b'n'; bytes];
            let entry = DirEntry { cookie: *cookie, ino: Ino(9), kind: Kind::File, name: &name, attr: None };
            assert!(writer.push(&entry));
        }
        let n = writer.len();
        encoded(&room[..n], end)
    }

    pub(super) fn hear(l: &mut Listing, reply: &ReplyBuf) -> Redirect {
        l.hear(&Reply::decode_answer(&reply.bytes))
    }

    pub(super) fn hear_ahead(l: &mut Listing, index: usize, reply: &ReplyBuf) -> Option<Redirect> {
        l.hear_ahead(index, &Reply::decode_answer(&reply.bytes))
    }

    fn cookies(redirect: Redirect) -> (Vec<u64>, bool) {
        let Redirect::Answer(reply) = redirect else { panic!("{redirect:?}") };
        let Ok(Reply::Entries(entries)) = Reply::decode(&reply.bytes) else { panic!("{reply:?}") };
        (entries.iter().map(|entry| entry.unwrap().cookie).collect(), entries.end)
    }

    #[test]
    fn listing_goes_from_part_to_part_until_the_last() {
        let mut l = listing();
        for node in [2, 3] {
            let Redirect::Ask(call) = hear(&mut l, &entries(&[u64::from(node)], 3, true)) else { panic!() };
            let asked = call.request();
            let ino = Ino::part(NodeId(node), 5);
            assert_eq!(*asked, Request::ReadDirectory { ino, cookie: 0, attributes: false });
        }
        let all = vec![l.parts.last_cookie(0), l.parts.last_cookie(1), 8, 9];
        assert_eq!(cookies(hear(&mut l, &entries(&[8, 9], 3, true))), (all, true));
    }

    #[test]
    fn listing_asks_ahead_what_has_room_and_tells_it_in_order() {
        let mut l = listing();
        let inos = [1, 2, 3, 4, 5].map(|node| Ino::part(NodeId(node), 5));
        l.parts = Parts::new(Ino::new(NodeId(1), 4), &inos).unwrap();
        assert!(l.ask_ahead(NodeId(4)).is_empty(), "before the first has told");
        assert!(matches!(hear(&mut l, &entries(&[1], 3, true)), Redirect::Ask(_)));
        assert_eq!(l.ask_ahead(NodeId(4)), [2, 4], "this node's own is asked in its turn");
        assert!(l.ask_ahead(NodeId(4)).is_empty(), "once");
        assert!(hear_ahead(&mut l, 4, &entries(&[5], 3, true)).is_none());
        assert!(matches!(hear(&mut l, &entries(&[2], 3, true)), Redirect::Wait));
        let Some(Redirect::Ask(call)) = hear_ahead(&mut l, 2, &entries(&[3], 3, true)) else { panic!() };
        let asked = call.request();
        assert_eq!(*asked, Request::ReadDirectory { ino: inos[3], cookie: 0, attributes: false });
        let mut all: Vec<u64> = (0..5).map(|index| l.parts.last_cookie(index)).collect();
        all[4] = 5;
        assert_eq!(cookies(hear(&mut l, &entries(&[4], 3, true))), (all, true));
        // Of large parts no more than the reply has room for.
        let mut l = listing();
        let many: Vec<u64> = (1..=READDIR_REPLY_BYTES as u64 / 2 / 120).collect();
        assert!(matches!(hear(&mut l, &entries(&many, 100, true)), Redirect::Ask(_)));
        let room = READDIR_REPLY_BYTES - l.collected.len();
        assert_eq!(l.ask_ahead(NodeId(1)), if room / l.told_bytes > 0 { vec![2] } else { vec![] });
        // One that fails does so in its turn.
        let mut l = listing();
        assert!(matches!(hear(&mut l, &entries(&[1], 3, true)), Redirect::Ask(_)));
        assert_eq!(l.ask_ahead(NodeId(1)), [2]);
        assert!(hear_ahead(&mut l, 2, &Code::Io.into()).is_none());
        let ends: Vec<u64> = (0..2).map(|index| l.parts.last_cookie(index)).collect();
        assert_eq!(cookies(hear(&mut l, &entries(&[2], 3, true))), (ends, false));
    }

    #[test]
    fn listing_stops_where_a_reply_is_full_or_a_part_is_not() {
        let mut l = listing();
        assert_eq!(cookies(hear(&mut l, &entries(&[1, 2], 3, false))), (vec![1, 2], false));
        let mut l = listing();
        let many: Vec<u64> = (1..=READDIR_REPLY_BYTES as u64 / 2 / 120).collect();
        assert!(matches!(hear(&mut l, &entries(&many, 100, true)), Redirect::Ask(_)));
        // The second part's do not fit behind the first's: they come with the next request.
        let more: Vec<u64> = (1000..=1000 + many.len() as u64).collect();
        let (told, end) = cookies(hear(&mut l, &entries(&more, 120, true)));
        assert!(told[..told.len() - 1] == many[..many.len() - 1] && !end);
        assert_eq!(l.parts.index_of_cookie(told[told.len() - 1]), 1, "and the first is not asked again");
    }

    #[test]
    fn listing_tells_a_failure_behind_what_it_has() {
        let failure = ReplyBuf::from(Code::Io);
        let mut l = listing();
        assert!(matches!(hear(&mut l, &entries(&[7], 3, true)), Redirect::Ask(_)));
        assert_eq!(cookies(hear(&mut l, &failure)), (vec![l.parts.last_cookie(0)], false));
        let Redirect::Answer(reply) = hear(&mut listing(), &failure) else { panic!() };
        assert_eq!(reply, failure);
    }

    const HERE: NodeId = NodeId(1);

    fn parts(of: Ino, counter: u64) -> Parts {
        Parts::new(of, &[2, 3].map(|node| Ino::part(NodeId(node), counter))).unwrap()
    }

    #[test]
    fn parts_are_learnt_of_directories_that_the_request_names() {
        let (a, b, c) = (Ino::new(NodeId(2), 4), Ino::new(NodeId(3), 4), Ino::new(NodeId(2), 5));
        let mut wide = Wide::default();
        let rename = Request::Rename { parent: a, name: b"x", new_parent: b, new_name: b"y", flags: 0 };
        assert!(wide.learn_by(HERE, &rename, parts(c, 1)).is_err());
        assert!(wide.known.is_empty());
        assert_eq!(wide.learn_by(HERE, &rename, parts(b, 1)), Ok(()));
        let create = Request::Create {
            parent: a,
            name: b"x",
            mode: 0,
            exclusive: false,
            dirty: true,
            layout: None,
            number: Some(Ino::new(HERE, 9)),
            reserve: false,
        };
        assert_eq!(wide.learn_by(HERE, &create, parts(a, 2)), Ok(()), "by a number of this node's");
        // A directory becomes wide once: of two lists neither is believed.
        let look = Request::Lookup { parent: a, name: b"x" };
        assert_eq!(wide.learn_by(HERE, &look, parts(a, 2)), Ok(()), "told twice");
        assert!(wide.learn_by(HERE, &look, parts(a, 3)).is_err());
        assert!(wide.known.get(a).is_none() && wide.known.get(b).is_some());
    }

    #[test]
    fn parts_of_which_one_denies_a_name_are_forgotten() {
        let (a, b) = (Ino::new(NodeId(2), 4), Ino::new(NodeId(3), 4));
        let mut wide = Wide::default();
        wide.known.insert(parts(a, 1));
        wide.known.insert(parts(b, 2));
        wide.forget_parts_in(HERE, &Request::Lookup { parent: Ino::part(NodeId(3), 1), name: b"x" });
        assert!(wide.known.get(a).is_none() && wide.known.get(b).is_some());
    }

    #[test]
    fn request_is_asked_anew_a_bounded_number_of_times() {
        let mut slot = (0, 0);
        let may: Vec<bool> = (0..5).map(|_| may_ask_anew(&mut slot, 7)).collect();
        assert_eq!(may, [true, true, true, false, false]);
        assert!(may_ask_anew(&mut slot, 8), "the next request");
    }
}
