//! Wide directories (docs/decisions/0024): programs send requests that name the directory, and their node's daemon
//! redirects each to the part that has the name.
//!
//! ```text
//! request ─ parts known ─► the same for the part, on this node or sent on         the part answers
//!    └ parts unknown ─► the directory's home ─ refusal with the parts ─► stored, served again
//! listing: one part after the other, in the order of the cookies, until the reply is full. The first part's reply
//! shows how many parts will fit, because all parts have about the same number of names. The parts behind it are then
//! requested at the same time.
//! ```
//! Stored parts stay valid without a lease, because parts never move and inode numbers are never reused. They are
//! dropped when memory is full, and when one of them does not have a name that belongs to it. The next worker inherits
//! them (`known_parts`). Parts are stored only for directories that the request names. Requests of other nodes'
//! processes name the part already; a request that does not is refused with the parts.

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

/// A request names two directories at most, and the parts of the first may be dropped before it is served again.
const ASKED_ANEW_MAX: u8 = 3;

/// The wide directories whose parts this daemon knows.
#[derive(Debug, Default)]
pub(super) struct Wide {
    pub(super) known: KnownParts,
    /// Parts that the last worker knew, and that this worker has not received itself.
    pub(super) left: HashMap<Ino, Parts>,
    /// Parts of listings that were requested ahead, by the number of the request: the client's request, and the index
    /// of the part.
    pub(super) ahead: HashMap<u64, (Client, usize)>,
    pub(super) asked_ahead: u64,
}

impl Wide {
    /// Keeps the last worker's parts in `left`. If the last worker sent a request before the directory was wide, the
    /// kept reply is at the home and not at a part. So a request goes to the home first, and to a part if the home no
    /// longer has the directory.
    pub(super) fn with(mut known: KnownParts) -> Wide {
        let left = known.take();
        Wide { known, left, ..Wide::default() }
    }

    /// The home of a directory that the request names has answered `NotFound`. If the directory was wide, its parts may
    /// have the kept replies to the last worker's requests. They count as known from now on. True when there are any,
    /// so that the request is to be served again.
    pub(super) fn learn_of_the_last(&mut self, here: NodeId, request: &Request<'_>) -> bool {
        let named = RefCell::new(Vec::new());
        let note = |ino| named.borrow_mut().extend(self.left.contains_key(&ino).then_some(ino));
        // Called only to find the directories that the request names.
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

    /// Stores the parts that a request of a process of `here` was refused with. On an error, returns the reason for the
    /// log.
    pub(super) fn learn_by(
        &mut self,
        here: NodeId,
        request: &Request<'_>,
        parts: Parts,
    ) -> Result<(), &'static str> {
        // `Err` means that the request names the directory, but cannot be redirected to a part.
        if request.in_parts(here, |ino| (ino == parts.of).then_some(parts)) == Ok(None) {
            return Err("that the request does not name");
        }
        match self.known.get(parts.of) {
            Some(known) if known != parts => {
                self.known.retain(|known| known.of != parts.of);
                Err("that differ from the known ones")
            }
            _ => {
                self.left.remove(&parts.of);
                self.known.insert(parts);
                Ok(())
            }
        }
    }

    /// A part does not have a name for which it got a request: drops the parts of its directory, so that the home is
    /// asked again.
    pub(super) fn forget_parts_in(&mut self, here: NodeId, request: &Request<'_>) {
        self.known.retain(|known| {
            let names =
                |part: &Ino| request.in_parts(here, |ino| (ino == *part).then_some(*known)) != Ok(None);
            !known.as_slice().iter().any(names)
        });
    }
}

/// A listing of a wide directory that is in progress in a slot.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) client: Client,
    pub(super) caller: Caller,
    pub(super) parts: Parts,
    /// The part whose entries are next.
    index: usize,
    cookie: Cookie,
    attributes: bool,
    /// Bytes of the last part's entries.
    told_bytes: usize,
    /// Entries of the parts before it.
    collected: Vec<u8>,
    /// State of each part that was requested ahead.
    ahead: [Ahead; WIDTH_MAX],
}

/// A part of a listing whose entries are not next yet.
#[derive(Clone, Default, Debug)]
enum Ahead {
    #[default]
    NotAsked,
    Asked,
    /// Its entries, or the refusal.
    Told(Result<Entries, Refusal>),
}

/// Entries of a part.
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

/// What follows from an answer that may not be the client's reply.
#[derive(Debug)]
pub(super) enum Redirect {
    /// This request is served next, for the same client.
    Ask(Call),
    /// This is the client's reply.
    Answer(ReplyBuf),
    /// The answer to a request ahead has to arrive first.
    Wait,
}

fn encoded(entries: &[u8], end: bool) -> ReplyBuf {
    ReplyBuf::encode(&Ok(Reply::Entries(DirEntries { bytes: entries, end })))
}

impl Listing {
    /// Starts with the part `index`, behind a cookie.
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

    /// How many parts with `bytes` of entries each still fit into the reply.
    fn room_for(&self, bytes: usize) -> usize {
        let left = READDIR_REPLY_BYTES.saturating_sub(REPLY_HEADER_BYTES + self.collected.len());
        left.checked_div(bytes).unwrap_or(WIDTH_MAX)
    }

    pub(super) fn question(&self, index: usize) -> Request<'static> {
        let ino = self.parts.as_slice()[index];
        Request::ReadDirectory { ino, cookie: self.cookie, attributes: self.attributes }
    }

    /// The part whose entries are next has answered.
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

    /// Takes one part's entries. Returns the client's reply, or `Wait` when the next part follows.
    fn hear_one(&mut self, entries: Result<Entries, Refusal>) -> Redirect {
        let entries = match entries {
            Ok(entries) => entries,
            // The entries of the parts before it are returned first. The next request of the listing gets the failure.
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
        // The part was read to its end. Its last entry gets the cookie of that end, so that the part is not read again
        // if the next parts' entries go into another reply. So a part's entries are from one moment.
        let told = &mut self.collected[begin..];
        if let Err(code) = go_on_behind(told, self.parts.last_cookie(self.index)) {
            return Redirect::Answer(code.into());
        }
        self.index += 1;
        self.told_bytes = entries.bytes.len();
        Redirect::Wait
    }

    /// A part that was requested ahead has answered. None: its entries are not next yet.
    pub(super) fn hear_ahead(&mut self, index: usize, answer: &Answer<'_>) -> Option<Redirect> {
        let slot = self.ahead.get_mut(index)?;
        if index == self.index {
            *slot = Ahead::NotAsked;
            return Some(self.hear(answer));
        }
        *slot = Ahead::Told(Entries::of(answer));
        None
    }

    /// The parts of nodes other than `here` to request now: those behind the next one whose entries should fit into the
    /// reply.
    pub(super) fn ask_ahead(&mut self, here: NodeId) -> Vec<usize> {
        if self.index == 0 {
            return Vec::new(); // the size of a part is unknown
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

/// Counts how often a slot's request was served again. False when that was too often.
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
        // Large parts: no more than fit into the reply.
        let mut l = listing();
        let many: Vec<u64> = (1..=READDIR_REPLY_BYTES as u64 / 2 / 120).collect();
        assert!(matches!(hear(&mut l, &entries(&many, 100, true)), Redirect::Ask(_)));
        let room = READDIR_REPLY_BYTES - l.collected.len();
        assert_eq!(l.ask_ahead(NodeId(1)), if room / l.told_bytes > 0 { vec![2] } else { vec![] });
        // A part whose request fails: the failure counts when its entries are next.
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
        // The second part's entries do not fit behind the first's: they are in the next reply.
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
        // A directory becomes wide once: of two different lists neither is used.
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
