//! Calls that wait for a backing store, and the tasks that this node's mover (`forebay-mover`) gets for them.
//!
//! `Persist` waits until the store has what the file contained when the call came: the mover gets the task anew for
//! calls that came after it took the last one, and reports by `Persisted`.
//!
//! A call that names an entry of an unlisted directory waits until the mover has looked the name up, which it reports by
//! `LookedUp`; one that needs all entries waits until the directory is listed. `Restore` waits until the
//! file is resident; `RestoreRange` until a range of it has arrived, which the mover reports by `RangeRestored`, or the
//! file is resident. The mover asks for tasks by `StoreWork`, which waits here too while there is none. It reports by
//! `Listed`, `Restored` or `StoreFailed`, and each of them ends the waiting for its inode. A `Listed` or `Import` that
//! brings a part of the names ends the waiting for these.
//!
//! No call waits for ever: a listing gets [`LIST_NS`], then the call fails with EIO; `Restore` is answered after
//! [`RESTORE_NS`] with the file as it is, and its client asks again. Tasks of a mover that died are handed out again
//! to the next one. Tests: here, and `tests/steps`.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};

use forebay_meta::Client;
use forebay_types::limits::RANGE_BYTES;
use forebay_types::{Code, Ino, RestoredRange, StoreTask};

use super::call::Call;

/// How long a call waits for the names of a directory, or for one of them. Less than its client waits.
pub(super) const LIST_NS: u64 = 25_000_000_000;
/// How long one `Restore` waits.
pub(super) const RESTORE_NS: u64 = 5_000_000_000;
/// How long one `Persist` waits.
const PERSIST_NS: u64 = 5_000_000_000;
/// Files of which it is remembered since when the store has their data.
const PERSISTED_MAX: usize = 4096;
/// How long one `StoreWork` waits: the mover's sign of life.
pub(super) const WORK_NS: u64 = 1_000_000_000;
/// How long a call waits for space. After that it meets the medium as it is.
const SPACE_NS: u64 = 25_000_000_000;
/// Time between two looks for space.
const LOOK_NS: u64 = 10_000_000;
/// A mover that has not asked for tasks for so long is dead, and was not started again.
const ABSENT_NS: u64 = 20_000_000_000;
/// Tasks in one reply.
const TASKS_AT_ONCE: usize = 256;

/// What a call waits for.
#[derive(Clone, PartialEq, Eq, Debug)]
enum WaitsFor {
    /// A task of the mover.
    Task(StoreTask),
    /// Free space: the mover releases files.
    Space,
}

/// A call that waits.
#[derive(Debug)]
struct Waiting {
    what: WaitsFor,
    /// For `Persist`: when the wait began. A call that repeats an earlier one goes on with the time of that one.
    since_ns: u64,
    until_ns: u64,
    call: Call,
}

/// What a call that has waited comes to.
#[derive(Debug)]
pub(super) enum Released {
    /// It is applied again.
    Again(Call),
    /// It fails.
    Failed(Call, Code),
}

/// Calls that wait for a backing store.
#[derive(Debug, Default)]
pub(super) struct StoreWaits {
    waiting: Vec<Waiting>,
    /// Tasks that no mover has yet, in the order of their calls.
    wanted: VecDeque<StoreTask>,
    /// Tasks that the mover has.
    handed: BTreeSet<StoreTask>,
    /// The mover's `StoreWork`, while there is no task.
    idle_mover: Option<(u64, Call)>,
    /// Calls that have waited.
    pub(super) released: VecDeque<Released>,
    /// When a mover asked for tasks last, or the first call began to wait for one.
    seen_ns: u64,
    /// When space is looked for next, and the calls before the next look when none waits.
    look_ns: u64,
    pub(super) calls_to_look: u32,
    /// When a call looks in any case.
    pub(super) look_at_ns: u64,
    /// Whether the last look found the targets full.
    pub(super) was_full: bool,
    /// `Restore` calls that have waited long enough. They are answered with the file as it is.
    answered_as_it_is: Vec<Client>,
    /// `Persist` calls that are over, and those that have waited long enough, with the time since which they do.
    persist_answers: Vec<(Client, Option<u64>)>,
    /// What `RestoreRange` calls that are over are answered.
    range_answers: Vec<(Client, RestoredRange)>,
    /// When the mover took the task of a file that is to be persisted.
    rounds: BTreeMap<Ino, u64>,
    /// Up to which time the store has a file's data.
    persisted: BTreeMap<Ino, u64>,
}

impl StoreWaits {
    /// True when nothing waits.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.idle_mover.is_none()
    }

    /// A call waits for a task.
    pub(super) fn wait(&mut self, call: Call, task: StoreTask, now_ns: u64) {
        let patience = match task {
            StoreTask::List(_) | StoreTask::Look(..) => LIST_NS,
            StoreTask::Restore(_) | StoreTask::Range(..) => RESTORE_NS,
            StoreTask::Persist(_) => PERSIST_NS,
        };
        self.wait_since(call, task, now_ns, now_ns, patience);
    }

    /// As [`StoreWaits::wait`], for a `Persist` that began to wait at `since_ns`.
    pub(super) fn wait_to_persist(&mut self, call: Call, ino: Ino, since_ns: u64, now_ns: u64) {
        self.wait_since(call, StoreTask::Persist(ino), since_ns, now_ns, PERSIST_NS);
    }

    fn wait_since(&mut self, call: Call, task: StoreTask, since_ns: u64, now_ns: u64, patience: u64) {
        // A slot has one call: a later one takes its place.
        let Client { session, slot, .. } = call.client;
        if self.seen_ns == 0 {
            self.seen_ns = now_ns;
        }
        self.waiting.retain(|other| (other.call.client.session, other.call.client.slot) != (session, slot));
        let what = WaitsFor::Task(task.clone());
        self.waiting.push(Waiting { what, since_ns, until_ns: now_ns + patience, call });
        self.want(task);
    }

    /// A call that needs space waits until the mover has made some.
    pub(super) fn wait_for_space(&mut self, call: Call, now_ns: u64) {
        let Client { session, slot, .. } = call.client;
        self.waiting.retain(|other| (other.call.client.session, other.call.client.slot) != (session, slot));
        let what = WaitsFor::Space;
        self.waiting.push(Waiting { what, since_ns: now_ns, until_ns: now_ns + SPACE_NS, call });
    }

    /// True when calls wait for space, and it is time to look for it.
    pub(super) fn is_to_look_for_space(&mut self, now_ns: u64) -> bool {
        if self.look_ns > now_ns || !self.waiting.iter().any(|waiting| waiting.what == WaitsFor::Space) {
            return false;
        }
        self.look_ns = now_ns + LOOK_NS;
        true
    }

    /// There is space: the calls that wait for it go on.
    pub(super) fn has_space(&mut self) {
        let all = std::mem::take(&mut self.waiting).into_iter();
        let (over, waiting): (Vec<_>, Vec<_>) = all.partition(|waiting| waiting.what == WaitsFor::Space);
        self.waiting = waiting;
        self.released.extend(over.into_iter().map(|waiting| Released::Again(waiting.call)));
    }

    fn want(&mut self, task: StoreTask) {
        if !self.handed.contains(&task) && !self.wanted.contains(&task) {
            self.wanted.push_back(task);
        }
        if let Some((_, call)) = self.idle_mover.take() {
            self.released.push_back(Released::Again(call));
        }
    }

    /// True while a file is being restored, or is to be.
    pub(super) fn is_restoring(&self, ino: Ino) -> bool {
        let task = StoreTask::Restore(ino);
        self.handed.contains(&task) || self.wanted.contains(&task)
    }

    /// Tasks for the mover; none when its call is to wait. A mover that has just started gets all again.
    pub(super) fn tasks(&mut self, restart: bool, now_ns: u64) -> Vec<StoreTask> {
        self.seen_ns = now_ns;
        if restart {
            let again = std::mem::take(&mut self.handed);
            again.into_iter().for_each(|task| self.wanted.push_back(task));
        }
        let n = self.wanted.len().min(TASKS_AT_ONCE);
        let tasks: Vec<_> = self.wanted.drain(..n).collect();
        self.handed.extend(tasks.iter().cloned());
        for task in &tasks {
            if let StoreTask::Persist(ino) = task {
                self.rounds.insert(*ino, now_ns);
            }
        }
        tasks
    }

    /// The mover waits for tasks.
    pub(super) fn rest(&mut self, call: Call, now_ns: u64) {
        if let Some((_, before)) = self.idle_mover.replace((now_ns + WORK_NS, call)) {
            self.answered_as_it_is.push(before.client);
            self.released.push_back(Released::Again(before));
        }
    }

    /// A directory was listed, a file restored, or the task failed. A listing that failed says nothing of names that are
    /// looked up alone.
    pub(super) fn done(&mut self, ino: Ino, failed: Option<Code>) {
        self.end_tasks(failed, |task| match task {
            StoreTask::Persist(_) => false,
            StoreTask::Look(directory, _) => *directory == ino && failed.is_none(),
            _ => task.ino() == ino,
        });
    }

    /// A name was looked up: calls that wait for it are applied again, or fail.
    pub(super) fn looked_up(&mut self, directory: Ino, name: &[u8], failed: Option<Code>) {
        self.end_tasks(
            failed,
            |task| matches!(task, StoreTask::Look(ino, of) if *ino == directory && of == name),
        );
    }

    /// True when calls wait for single names of a directory.
    pub(super) fn waits_for_names_of(&self, directory: Ino) -> bool {
        let is_name = |waiting: &Waiting| matches!(&waiting.what, WaitsFor::Task(StoreTask::Look(of, _)) if *of == directory);
        self.waiting.iter().any(is_name)
    }

    /// Some names of a directory are there: calls that wait for one of them are applied again. Those that need all wait on.
    pub(super) fn names_arrived(&mut self, directory: Ino, names: &HashSet<&[u8]>) {
        self.end_tasks(
            None,
            |task| matches!(task, StoreTask::Look(of, name) if *of == directory && names.contains(&name[..])),
        );
    }

    fn end_tasks(&mut self, failed: Option<Code>, is_it: impl Fn(&StoreTask) -> bool) {
        self.handed.retain(|task| !is_it(task));
        self.wanted.retain(|task| !is_it(task));
        let all = std::mem::take(&mut self.waiting).into_iter();
        let (over, waiting): (Vec<_>, Vec<_>) =
            all.partition(|waiting| matches!(&waiting.what, WaitsFor::Task(task) if is_it(task)));
        self.waiting = waiting;
        self.released.extend(over.into_iter().map(|Waiting { call, .. }| match failed {
            Some(code) => Released::Failed(call, code),
            None => Released::Again(call),
        }));
    }

    /// A range of a file has arrived: calls that wait for a part of it go on.
    pub(super) fn range_restored(&mut self, ino: Ino, range: RestoredRange) {
        let is_in = |task: &StoreTask| match *task {
            StoreTask::Range(of, number) => {
                let from = number.saturating_mul(RANGE_BYTES);
                of == ino && range.from <= from && from < range.to
            }
            _ => false,
        };
        self.handed.retain(|task| !is_in(task));
        self.wanted.retain(|task| !is_in(task));
        let all = std::mem::take(&mut self.waiting).into_iter();
        let (over, waiting): (Vec<_>, Vec<_>) =
            all.partition(|waiting| matches!(&waiting.what, WaitsFor::Task(task) if is_in(task)));
        self.waiting = waiting;
        for Waiting { call, .. } in over {
            self.range_answers.push((call.client, range));
            self.released.push_back(Released::Again(call));
        }
    }

    /// What a `RestoreRange` whose range has arrived is answered, once.
    pub(super) fn range_answer(&mut self, client: &Client) -> Option<RestoredRange> {
        let i = self.range_answers.iter().position(|(other, _)| other == client)?;
        Some(self.range_answers.swap_remove(i).1)
    }

    /// The store has what a file contained when the mover took the task, or cannot get it: calls that came later wait
    /// for the next round.
    pub(super) fn persisted(&mut self, ino: Ino, failed: Option<Code>) {
        let persist = StoreTask::Persist(ino);
        let what = WaitsFor::Task(persist.clone());
        self.handed.remove(&persist);
        let Some(round_ns) = self.rounds.remove(&ino) else { return };
        if failed.is_none() {
            if self.persisted.len() >= PERSISTED_MAX {
                self.persisted.pop_first();
            }
            self.persisted.insert(ino, round_ns);
        }
        let is_of_round = |waiting: &Waiting| waiting.what == what && waiting.since_ns <= round_ns;
        let all = std::mem::take(&mut self.waiting).into_iter();
        let (over, waiting): (Vec<_>, Vec<_>) = all.partition(is_of_round);
        self.waiting = waiting;
        for Waiting { call, .. } in over {
            self.released.push_back(match failed {
                Some(code) => Released::Failed(call, code),
                None => {
                    self.persist_answers.push((call.client, None));
                    Released::Again(call)
                }
            });
        }
        if self.waiting.iter().any(|waiting| waiting.what == what) {
            self.want(persist);
        }
    }

    /// True if the store is known to have what a file contained at a time.
    pub(super) fn is_persisted(&self, ino: Ino, since_ns: u64) -> bool {
        self.persisted.get(&ino).is_some_and(|round_ns| since_ns <= *round_ns)
    }

    /// What a `Persist` that has waited is answered, once: none if it is over, else since when it waits.
    #[allow(clippy::option_option)]
    pub(super) fn persist_answer(&mut self, client: &Client) -> Option<Option<u64>> {
        let i = self.persist_answers.iter().position(|(other, _)| other == client)?;
        Some(self.persist_answers.swap_remove(i).1)
    }

    /// Releases what has waited long enough.
    pub(super) fn expire(&mut self, now_ns: u64) {
        if self.idle_mover.as_ref().is_some_and(|(until, _)| *until <= now_ns) {
            if let Some((_, call)) = self.idle_mover.take() {
                self.answered_as_it_is.push(call.client);
                self.released.push_back(Released::Again(call));
            }
        }
        if self.waiting.iter().all(|waiting| waiting.until_ns > now_ns) {
            return;
        }
        let all = std::mem::take(&mut self.waiting).into_iter();
        let (over, waiting): (Vec<_>, Vec<_>) = all.partition(|waiting| waiting.until_ns <= now_ns);
        self.waiting = waiting;
        for Waiting { what, since_ns, call, .. } in over {
            self.released.push_back(match what {
                WaitsFor::Space => {
                    self.answered_as_it_is.push(call.client);
                    Released::Again(call)
                }
                WaitsFor::Task(StoreTask::List(ino)) => {
                    tracing::warn!("the backing store did not list directory {ino} in time: a request fails");
                    Released::Failed(call, Code::TimedOut)
                }
                WaitsFor::Task(StoreTask::Look(ino, name)) => {
                    let name = name.escape_ascii();
                    tracing::warn!("the backing store did not say in time whether directory {ino} has {name}: a request fails");
                    Released::Failed(call, Code::TimedOut)
                }
                WaitsFor::Task(StoreTask::Restore(ino) | StoreTask::Range(ino, _))
                    if now_ns > self.seen_ns + ABSENT_NS =>
                {
                    tracing::warn!("no mover runs to restore file {ino}: a request fails");
                    Released::Failed(call, Code::TimedOut)
                }
                WaitsFor::Task(StoreTask::Persist(ino)) if now_ns > self.seen_ns + ABSENT_NS => {
                    tracing::warn!("no mover runs to copy file {ino} to its store: a request fails");
                    Released::Failed(call, Code::TimedOut)
                }
                WaitsFor::Task(StoreTask::Persist(_)) => {
                    self.persist_answers.push((call.client, Some(since_ns)));
                    Released::Again(call)
                }
                WaitsFor::Task(StoreTask::Restore(_) | StoreTask::Range(..)) => {
                    self.answered_as_it_is.push(call.client);
                    Released::Again(call)
                }
            });
        }
    }

    /// True, once, for a call that has waited long enough and is to be answered.
    pub(super) fn has_waited(&mut self, client: &Client) -> bool {
        match self.answered_as_it_is.iter().position(|other| other == client) {
            Some(i) => {
                self.answered_as_it_is.swap_remove(i);
                true
            }
            None => false,
        }
    }

    /// A process has ended: its calls do not wait any longer.
    pub(super) fn end(&mut self, session: u64) {
        self.waiting.retain(|waiting| waiting.call.client.session != session);
        self.answered_as_it_is.retain(|client| client.session != session);
        self.persist_answers.retain(|(client, _)| client.session != session);
        self.range_answers.retain(|(client, _)| client.session != session);
        if self.idle_mover.as_ref().is_some_and(|(_, call)| call.client.session == session) {
            self.idle_mover = None;
        }
    }

    /// When the next call has waited long enough.
    pub(super) fn next_ns(&self) -> Option<u64> {
        let mover = self.idle_mover.iter().map(|(until, _)| *until);
        let next = |waiting: &Waiting| match waiting.what {
            WaitsFor::Space => waiting.until_ns.min(self.look_ns),
            WaitsFor::Task(_) => waiting.until_ns,
        };
        self.waiting.iter().map(next).chain(mover).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::{Caller, Request};

    fn call(slot: usize, seq: u64) -> Call {
        let client = Client { session: 7, slot, seq };
        Call::encode(client, Caller { uid: 0, gid: 0 }, &Request::Ping).unwrap()
    }

    fn released(waits: &mut StoreWaits) -> Vec<(usize, Option<Code>)> {
        let each = |released| match released {
            Released::Again(call) => (call.client.slot, None),
            Released::Failed(call, code) => (call.client.slot, Some(code)),
        };
        waits.released.drain(..).map(each).collect()
    }

    #[test]
    fn calls_for_one_directory_are_one_task_and_end_together() {
        let mut waits = StoreWaits::default();
        waits.wait(call(1, 1), StoreTask::List(Ino(5)), 0);
        waits.wait(call(2, 1), StoreTask::List(Ino(5)), 0);
        waits.wait(call(3, 1), StoreTask::Restore(Ino(6)), 0);
        assert_eq!(waits.tasks(false, 1), [StoreTask::List(Ino(5)), StoreTask::Restore(Ino(6))]);
        assert_eq!(waits.tasks(false, 1), []);
        waits.done(Ino(5), None);
        assert_eq!(released(&mut waits), [(1, None), (2, None)]);
        waits.done(Ino(6), Some(Code::Io));
        assert_eq!(released(&mut waits), [(3, Some(Code::Io))]);
        assert!(waits.is_empty());
    }

    #[test]
    fn a_mover_that_starts_gets_the_tasks_of_the_last_one() {
        let mut waits = StoreWaits::default();
        waits.wait(call(1, 1), StoreTask::List(Ino(5)), 0);
        assert_eq!(waits.tasks(true, 1), [StoreTask::List(Ino(5))]);
        waits.wait(call(2, 1), StoreTask::List(Ino(5)), 0);
        assert_eq!(waits.tasks(false, 1), [], "the mover has it");
        assert_eq!(waits.tasks(true, 1), [StoreTask::List(Ino(5))]);
    }

    #[test]
    fn an_idle_mover_is_woken_by_a_task_or_after_its_time() {
        let mut waits = StoreWaits::default();
        waits.rest(call(9, 1), 0);
        waits.wait(call(1, 1), StoreTask::List(Ino(5)), 10);
        assert_eq!(released(&mut waits), [(9, None)]);
        assert!(!waits.has_waited(&call(9, 1).client), "it gets a task");
        waits.tasks(false, 15);
        waits.rest(call(9, 2), 20);
        waits.expire(19 + WORK_NS);
        assert_eq!(released(&mut waits), []);
        waits.expire(20 + WORK_NS);
        assert_eq!(released(&mut waits), [(9, None)]);
        assert!(waits.has_waited(&call(9, 2).client) && !waits.has_waited(&call(9, 2).client));
    }

    #[test]
    fn a_listing_that_takes_too_long_fails_and_a_restore_is_answered() {
        let mut waits = StoreWaits::default();
        waits.wait(call(1, 1), StoreTask::List(Ino(5)), 0);
        waits.wait(call(2, 1), StoreTask::Restore(Ino(6)), 0);
        assert_eq!(waits.next_ns(), Some(RESTORE_NS));
        waits.expire(RESTORE_NS);
        assert_eq!(released(&mut waits), [(2, None)]);
        assert!(waits.has_waited(&call(2, 1).client));
        waits.expire(LIST_NS);
        assert_eq!(released(&mut waits), [(1, Some(Code::TimedOut))]);
    }

    #[test]
    fn a_restore_fails_when_no_mover_has_asked_for_long() {
        let mut waits = StoreWaits::default();
        waits.wait(call(2, 1), StoreTask::Restore(Ino(6)), 5);
        waits.tasks(false, 10);
        for asked in 1..5 {
            waits.expire(asked * RESTORE_NS + 5);
            let expected = if asked * RESTORE_NS + 5 > 10 + ABSENT_NS { Some(Code::TimedOut) } else { None };
            assert_eq!(released(&mut waits), [(2, expected)], "{asked}");
            waits.wait(call(2, 1 + asked), StoreTask::Restore(Ino(6)), asked * RESTORE_NS + 5);
        }
        waits.expire(5 * RESTORE_NS + 5);
        assert_eq!(released(&mut waits), [(2, Some(Code::TimedOut))]);
    }

    #[test]
    fn a_call_for_space_goes_on_when_there_is_some_or_after_its_time() {
        let mut waits = StoreWaits::default();
        waits.wait_for_space(call(1, 1), 5);
        assert!(waits.is_to_look_for_space(6) && !waits.is_to_look_for_space(7));
        assert_eq!(waits.next_ns(), Some(6 + LOOK_NS));
        waits.has_space();
        assert_eq!(released(&mut waits), [(1, None)]);
        assert!(!waits.has_waited(&call(1, 1).client), "it may wait again");
        waits.wait_for_space(call(1, 2), 10);
        waits.expire(10 + SPACE_NS);
        assert_eq!(released(&mut waits), [(1, None)]);
        assert!(waits.has_waited(&call(1, 2).client));
    }

    #[test]
    fn a_persist_is_over_when_the_mover_took_its_task_after_it_came() {
        let mut waits = StoreWaits::default();
        waits.wait_to_persist(call(1, 1), Ino(5), 10, 10);
        assert_eq!(waits.tasks(false, 20), [StoreTask::Persist(Ino(5))]);
        waits.wait_to_persist(call(2, 1), Ino(5), 30, 30);
        assert_eq!(waits.tasks(false, 31), [], "one round at a time");
        waits.done(Ino(5), None);
        assert_eq!(released(&mut waits), [], "a restore is another task");
        waits.persisted(Ino(5), None);
        assert_eq!(released(&mut waits), [(1, None)]);
        assert_eq!(waits.persist_answer(&call(1, 1).client), Some(None));
        assert!(waits.is_persisted(Ino(5), 20) && !waits.is_persisted(Ino(5), 21));
        assert_eq!(waits.tasks(false, 40), [StoreTask::Persist(Ino(5))], "the next round");
        waits.expire(30 + PERSIST_NS);
        assert_eq!(released(&mut waits), [(2, None)]);
        assert_eq!(waits.persist_answer(&call(2, 1).client), Some(Some(30)), "it is to ask again");
        waits.wait_to_persist(call(2, 2), Ino(5), 30, 50);
        waits.persisted(Ino(5), Some(Code::Io));
        assert_eq!(released(&mut waits), [(2, Some(Code::Io))]);
        assert!(!waits.is_persisted(Ino(5), 30));
    }

    #[test]
    fn a_call_for_a_range_goes_on_when_it_has_arrived_or_the_whole_file() {
        let mut waits = StoreWaits::default();
        for number in 0..3 {
            waits.wait(call(1 + number, 1), StoreTask::Range(Ino(5), number as u64), 0);
        }
        let range = |number| StoreTask::Range(Ino(5), number);
        assert_eq!(waits.tasks(false, 1), [range(0), range(1), range(2)]);
        let arrived = RestoredRange { backing: 9, from: RANGE_BYTES, to: 2 * RANGE_BYTES };
        waits.range_restored(Ino(6), arrived);
        assert_eq!(released(&mut waits), [], "of another file");
        waits.range_restored(Ino(5), arrived);
        assert_eq!(released(&mut waits), [(2, None)]);
        assert_eq!(waits.range_answer(&call(1, 1).client), None);
        assert_eq!(waits.range_answer(&call(2, 1).client), Some(arrived));
        assert_eq!(waits.range_answer(&call(2, 1).client), None, "once");
        waits.wait(call(4, 1), range(1), 2);
        assert_eq!(waits.tasks(false, 3), [range(1)], "a mover that begins anew is given it again");
        waits.done(Ino(5), None);
        assert_eq!(released(&mut waits), [(1, None), (3, None), (4, None)]);
        assert!(waits.is_empty());
    }

    #[test]
    fn call_for_a_name_goes_on_when_that_was_looked_up_or_the_directory_is_listed() {
        let mut waits = StoreWaits::default();
        let look = |name: &[u8]| StoreTask::Look(Ino(5), name.to_vec());
        waits.wait(call(1, 1), look(b"a"), 0);
        waits.wait(call(2, 1), look(b"a"), 0);
        waits.wait(call(3, 1), look(b"b"), 0);
        waits.wait(call(4, 1), StoreTask::List(Ino(5)), 0);
        assert_eq!(waits.tasks(false, 1), [look(b"a"), look(b"b"), StoreTask::List(Ino(5))]);
        waits.looked_up(Ino(6), b"a", None);
        assert_eq!(released(&mut waits), [], "a name of another directory");
        waits.looked_up(Ino(5), b"a", None);
        assert_eq!(released(&mut waits), [(1, None), (2, None)]);
        waits.done(Ino(5), Some(Code::Io));
        assert_eq!(released(&mut waits), [(4, Some(Code::Io))], "the name may be found still");
        assert_eq!(waits.tasks(true, 1), [look(b"b")], "the next mover gets it");
        waits.looked_up(Ino(5), b"b", Some(Code::AccessDenied));
        assert_eq!(released(&mut waits), [(3, Some(Code::AccessDenied))]);
        waits.wait(call(1, 2), look(b"a"), 2);
        waits.wait(call(2, 2), look(b"c"), 2);
        waits.done(Ino(5), None);
        assert_eq!(released(&mut waits), [(1, None), (2, None)]);
        assert_eq!(waits.tasks(false, 3), []);
        waits.wait(call(1, 3), look(b"d"), 5);
        waits.expire(5 + LIST_NS);
        assert_eq!(released(&mut waits), [(1, Some(Code::TimedOut))]);
    }

    #[test]
    fn part_of_a_listing_ends_the_waiting_for_its_names_alone() {
        let mut waits = StoreWaits::default();
        let look = |name: &[u8]| StoreTask::Look(Ino(5), name.to_vec());
        waits.wait(call(1, 1), look(b"a"), 0);
        waits.wait(call(2, 1), look(b"b"), 0);
        waits.wait(call(3, 1), StoreTask::List(Ino(5)), 0);
        waits.wait(call(4, 1), StoreTask::Look(Ino(6), b"a".to_vec()), 0);
        waits.tasks(false, 1);
        assert!(waits.waits_for_names_of(Ino(5)) && !waits.waits_for_names_of(Ino(7)));
        waits.names_arrived(Ino(5), &[&b"a"[..], b"x"].into());
        assert_eq!(released(&mut waits), [(1, None)]);
        waits.wait(call(1, 2), look(b"b"), 2);
        waits.wait(call(5, 1), StoreTask::List(Ino(5)), 2);
        assert_eq!(waits.tasks(false, 3), [], "the mover has these");
        waits.done(Ino(5), None);
        assert_eq!(released(&mut waits), [(2, None), (3, None), (1, None), (5, None)]);
        assert!(!waits.waits_for_names_of(Ino(5)) && waits.waits_for_names_of(Ino(6)));
    }

    #[test]
    fn calls_of_a_process_that_ended_do_not_wait() {
        let mut waits = StoreWaits::default();
        waits.wait(call(1, 1), StoreTask::List(Ino(5)), 0);
        waits.rest(call(2, 1), 0);
        waits.end(7);
        assert!(waits.is_empty());
        waits.done(Ino(5), None);
        assert_eq!(released(&mut waits), []);
    }
}
