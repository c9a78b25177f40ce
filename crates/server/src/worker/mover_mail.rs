//! Messages of other nodes' movers to this node's mover, and its answers (docs/decisions/0042). The worker does not read
//! them.
//!
//! `AskMover` waits here until the mover has answered by `MoverAnswer`, for [`ANSWER_NS`] at most. The mover takes the
//! messages by `MoverWork`, which waits here too while there is none. Messages that a mover took which then died fail at
//! once: the sender asks again. Tests: here.

use std::collections::VecDeque;

use forebay_meta::Client;
use forebay_types::Code;

use super::call::Call;

/// How long a message waits for its answer. Less than a call to another node may take.
const ANSWER_NS: u64 = 8_000_000_000;
/// How long one `MoverWork` waits.
const WORK_NS: u64 = 1_000_000_000;
/// Messages that wait at a time.
const WAITING_MAX: usize = 1024;

/// A message that has no answer yet.
#[derive(Debug)]
struct Letter {
    number: u64,
    /// The session of the mover that has taken it.
    taken_by: Option<u64>,
    until_ns: u64,
    call: Call,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct MoverMail {
    last: u64,
    letters: Vec<Letter>,
    /// The mover's `MoverWork`, while there is no message.
    idle_mover: Option<(u64, Call)>,
    /// Whether a mover has asked for messages and lives.
    mover: Option<u64>,
    /// Calls that are taken into the pipeline again, as [`MoverMail::answer_for`] and [`MoverMail::work_for`] have their
    /// answers now.
    pub(super) released: VecDeque<Call>,
    answers: Vec<(Client, Result<Vec<u8>, Code>)>,
    /// Calls of the mover that have waited long enough.
    waited: Vec<Client>,
}

impl MoverMail {
    /// True when nothing waits.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.letters.is_empty() && self.idle_mover.is_none()
    }

    /// True when a mover takes messages.
    pub(super) fn has_mover(&self) -> bool {
        self.mover.is_some()
    }

    /// The answer to a message, when its call was released; none the first time: then it waits.
    pub(super) fn answer_for(&mut self, call: &Call, now_ns: u64) -> Option<Result<Vec<u8>, Code>> {
        if let Some(i) = self.answers.iter().position(|(client, _)| *client == call.client) {
            return Some(self.answers.swap_remove(i).1);
        }
        if self.letters.len() >= WAITING_MAX {
            return Some(Err(Code::NoResources));
        }
        // A slot has one call: a later one takes its place.
        let Client { session, slot, .. } = call.client;
        self.letters.retain(|other| (other.call.client.session, other.call.client.slot) != (session, slot));
        self.last += 1;
        let letter =
            Letter { number: self.last, taken_by: None, until_ns: now_ns + ANSWER_NS, call: call.clone() };
        self.letters.push(letter);
        self.released.extend(self.idle_mover.take().map(|(_, call)| call));
        None
    }

    /// The next message for the mover: its number and its call. None when the mover's call waits from now on; with
    /// nothing in it when it has waited long enough.
    pub(super) fn work_for(&mut self, call: &Call, now_ns: u64) -> Option<Option<(u64, Call)>> {
        let session = call.client.session;
        self.mover = Some(session);
        if let Some(letter) = self.letters.iter_mut().find(|letter| letter.taken_by.is_none()) {
            letter.taken_by = Some(session);
            return Some(Some((letter.number, letter.call.clone())));
        }
        if let Some(i) = self.waited.iter().position(|client| *client == call.client) {
            self.waited.swap_remove(i);
            return Some(None);
        }
        if let Some((_, before)) = self.idle_mover.replace((now_ns + WORK_NS, call.clone())) {
            self.waited.push(before.client);
            self.released.push_back(before);
        }
        None
    }

    fn end_letters(&mut self, which: impl Fn(&Letter) -> bool, answer: &Result<Vec<u8>, Code>) {
        for letter in self.letters.extract_if(.., |letter| which(letter)) {
            self.answers.push((letter.call.client, answer.clone()));
            self.released.push_back(letter.call);
        }
    }

    /// The mover has answered a message. One that waits no longer is no error.
    pub(super) fn answered(&mut self, number: u64, answer: &[u8]) {
        self.end_letters(|letter| letter.number == number, &Ok(answer.to_vec()));
    }

    /// Releases what has waited long enough.
    pub(super) fn expire(&mut self, now_ns: u64) {
        if self.idle_mover.as_ref().is_some_and(|(until, _)| *until <= now_ns) {
            if let Some((_, call)) = self.idle_mover.take() {
                self.waited.push(call.client);
                self.released.push_back(call);
            }
        }
        self.end_letters(|letter| letter.until_ns <= now_ns, &Err(Code::TimedOut));
    }

    /// A process has ended: its messages wait no longer. If it was the mover, what it had taken fails.
    pub(super) fn end(&mut self, session: u64) {
        self.letters.retain(|letter| letter.call.client.session != session);
        self.answers.retain(|(client, _)| client.session != session);
        self.waited.retain(|client| client.session != session);
        if self.idle_mover.as_ref().is_some_and(|(_, call)| call.client.session == session) {
            self.idle_mover = None;
        }
        if self.mover == Some(session) {
            self.mover = None;
        }
        self.end_letters(|letter| letter.taken_by == Some(session), &Err(Code::TimedOut));
    }

    /// When the next call has waited long enough.
    pub(super) fn next_ns(&self) -> Option<u64> {
        let idle = self.idle_mover.iter().map(|(until, _)| *until);
        self.letters.iter().map(|letter| letter.until_ns).chain(idle).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::{Caller, NodeId, Request};

    fn call(session: u64, slot: usize, seq: u64) -> Call {
        let client = Client { session, slot, seq };
        let request = Request::AskMover { node: NodeId(1), message: b"hello" };
        Call::encode(client, Caller { uid: 0, gid: 0 }, &request).unwrap()
    }

    fn released(mail: &mut MoverMail) -> Vec<(u64, usize)> {
        mail.released.drain(..).map(|call| (call.client.session, call.client.slot)).collect()
    }

    #[test]
    fn a_message_wakes_the_mover_and_its_answer_ends_the_waiting() {
        let mut mail = MoverMail::default();
        let (mover, asker) = (call(1, 0, 1), call(2, 3, 1));
        assert_eq!(mail.work_for(&mover, 0).map(|_| ()), None);
        assert!(mail.has_mover());
        assert_eq!(mail.answer_for(&asker, 5), None);
        assert_eq!(released(&mut mail), [(1, 0)]);
        let (number, taken) = mail.work_for(&mover, 6).unwrap().unwrap();
        assert_eq!(taken.client, asker.client);
        assert_eq!(mail.work_for(&call(1, 0, 2), 7).map(|_| ()), None, "it is taken once");
        mail.answered(number + 1, b"another");
        assert_eq!(released(&mut mail), []);
        mail.answered(number, b"yes");
        assert_eq!(released(&mut mail), [(2, 3)]);
        assert_eq!(mail.answer_for(&asker, 9), Some(Ok(b"yes".to_vec())));
    }

    #[test]
    fn what_a_mover_took_that_died_fails_and_the_rest_waits_for_the_next() {
        let mut mail = MoverMail::default();
        assert_eq!(mail.answer_for(&call(2, 0, 1), 0), None);
        assert_eq!(mail.answer_for(&call(2, 1, 1), 0), None);
        assert!(mail.work_for(&call(1, 0, 1), 1).unwrap().is_some());
        mail.end(1);
        assert!(!mail.has_mover());
        assert_eq!(released(&mut mail), [(2, 0)]);
        assert_eq!(mail.answer_for(&call(2, 0, 1), 2), Some(Err(Code::TimedOut)));
        assert!(mail.work_for(&call(7, 0, 1), 3).unwrap().is_some());
    }

    #[test]
    fn nothing_waits_for_ever() {
        let mut mail = MoverMail::default();
        assert_eq!(mail.answer_for(&call(2, 0, 1), 0), None);
        mail.expire(ANSWER_NS);
        assert_eq!(released(&mut mail), [(2, 0)]);
        assert_eq!(mail.answer_for(&call(2, 0, 1), 2), Some(Err(Code::TimedOut)));
        let mover = call(1, 0, 1);
        assert!(mail.work_for(&mover, 10).is_none());
        assert_eq!(mail.next_ns(), Some(10 + WORK_NS));
        mail.expire(10 + WORK_NS);
        assert_eq!(released(&mut mail), [(1, 0)]);
        assert_eq!(mail.work_for(&mover, 11).map(|message| message.is_none()), Some(true));
        assert!(mail.is_empty());
    }
}
