//! Groups: the shared state of processes of several nodes that opened a file together. This node has the groups of
//! files whose first backing file is here: MPI's shared file pointer, and the locks of its atomic mode, which are
//! separate from programs' own locks.
//!
//! The groups, the locks, and the last step (a move or a seek of the pointer) of each slot ([`ReplyCache`]) are in
//! durable tables (`durable_table.rs`). A single store to a step's entry commits the step; the group's entry is updated
//! after it. So the next worker restores each pointer, and answers a repeated step without executing it again. A lock
//! is in its table before it is granted. Waiters for locks are only in this process's memory: they send their requests
//! again.
//!
//! The network thread serves these requests without the shard thread, and never blocks. Lock order: no other lock is
//! taken while the mutex of the groups is held.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_ring::call_clock;
use forebay_types::limits::{FILE_BYTES_MAX, GROUPS_MAX, GROUP_LOCKS_MAX, GROUP_PLACE_MS, REPLIES_KEPT};
use forebay_types::{BackingId, Code, GroupOp, Ino, LockKind, LockRequest, Reply};
use forebay_wire::Stamp;

use super::reply_cache::{packed, ReplyCache, NUMBERS_END, WORDS};
use crate::worker::durable_table::{DurableMemory, DurableTable, Format};

/// The tables: groups, last steps, locks.
pub(super) const FORMAT: Format = Format {
    tag: "groups",
    what: "the state of groups of processes",
    version: 1,
    tables: &[(GROUPS_MAX, GROUP_WORDS), (REPLIES_KEPT, WORDS), (GROUP_LOCKS_MAX, LOCK_WORDS)],
};
/// Words of a group: its state, its key, the session that made it, the backing file (target, number and stripe in one
/// word, then the inode), the pointer, and the number of the first step that is not in the pointer.
const GROUP_WORDS: usize = 7;
const POSITION: usize = 5;
const APPLIED: usize = 6;
/// Words of a lock: its state, the group's key, session, owner, first and last byte, and 1 for a write lock.
const LOCK_WORDS: usize = 7;
/// The state of a group or a lock that exists.
const EXISTS: u64 = 1;
/// The state of a finished step. Its words: the group's key, and the pointer before and after the step.
const DONE: u64 = 1;
/// How long a waiter keeps its place in the queue without sending its request again.
const PLACE_NS: u64 = GROUP_PLACE_MS * 1_000_000;

#[derive(Debug)]
struct Held {
    entry: usize,
    session: u64,
    wish: LockRequest,
}

#[derive(Debug)]
struct Waiting {
    session: u64,
    wish: LockRequest,
    /// By [`call_clock`].
    asked_ns: u64,
}

#[derive(Debug)]
struct Group {
    entry: usize,
    session: u64,
    id: BackingId,
    position: u64,
    /// The number of the first step that is not in `position`.
    applied: u64,
    held: Vec<Held>,
    waiting: VecDeque<Waiting>,
}

#[derive(Debug)]
struct State {
    groups: HashMap<u64, Group>,
    steps: ReplyCache,
    group_table: DurableTable<GROUP_WORDS>,
    lock_table: DurableTable<LOCK_WORDS>,
}

/// All groups.
#[derive(Debug)]
pub(in crate::worker) struct Groups {
    state: Mutex<State>,
}

impl Default for Groups {
    fn default() -> Groups {
        Groups::open(&DurableMemory::none(&FORMAT))
    }
}

fn conflict(one: &LockRequest, other: &LockRequest) -> bool {
    let writes = one.kind == LockKind::Write || other.kind == LockKind::Write;
    writes && one.start <= other.end && other.start <= one.end
}

impl Group {
    /// A step has moved the pointer: updates the group's entry in `table`.
    fn moved(&mut self, table: &DurableTable<GROUP_WORDS>, number: u64, position: u64) {
        (self.position, self.applied) = (position, number + 1);
        table.set(self.entry, POSITION, position);
        table.set(self.entry, APPLIED, number + 1);
    }
}

impl State {
    /// Releases the locks for which `which` is true, and removes such waiters.
    fn release(&mut self, key: u64, which: impl Fn(u64, &LockRequest) -> bool) {
        let Some(group) = self.groups.get_mut(&key) else { return };
        for held in group.held.extract_if(.., |held| which(held.session, &held.wish)) {
            self.lock_table.remove(held.entry);
        }
        group.waiting.retain(|waiting| !which(waiting.session, &waiting.wish));
    }

    fn remove(&mut self, key: u64) {
        self.release(key, |_, _| true);
        if let Some(group) = self.groups.remove(&key) {
            self.group_table.remove(group.entry);
        }
    }

    fn make(&mut self, session: u64, id: &BackingId, key: u64, position: u64) -> Result<(), Code> {
        // Steps of an earlier group with the same key do not belong to this one.
        let applied = self.steps.next_number();
        let words = [EXISTS, key, session, packed(id), id.ino.0, position, applied];
        let entry = self.group_table.insert(words).ok_or(Code::NoResources)?;
        let (held, waiting) = (Vec::new(), VecDeque::new());
        self.groups.insert(key, Group { entry, session, id: *id, position, applied, held, waiting });
        Ok(())
    }

    /// Moves a pointer to the value of `after`, unless the step was done before. Returns the pointer before the step.
    /// [`Code::FileTooLarge`] beyond the largest file.
    fn step(&mut self, stamp: &Stamp, key: u64, after: impl Fn(u64) -> Option<u64>) -> Result<u64, Code> {
        if let Some(done) = self.steps.get(stamp) {
            return Ok(done.words[1]);
        }
        if self.steps.is_overtaken(stamp) {
            return Err(Code::Stale);
        }
        let group = self.groups.get_mut(&key).ok_or(Code::Stale)?;
        let before = group.position;
        let after = after(before).ok_or(Code::FileTooLarge)?;
        let number = self.steps.put(stamp, DONE, [key, before, after]);
        group.moved(&self.group_table, number, after);
        Ok(before)
    }

    fn lock(&mut self, session: u64, key: u64, wish: LockRequest) -> Result<(), Code> {
        if wish.kind == LockKind::Unlock {
            self.release(key, |of, its| of == session && its.owner == wish.owner);
            return Ok(());
        }
        let State { groups, lock_table, .. } = self;
        let group = groups.get_mut(&key).ok_or(Code::Stale)?;
        let is_its = |of: u64, its: &LockRequest| of == session && its.owner == wish.owner;
        if group.held.iter().any(|held| is_its(held.session, &held.wish)) {
            return Ok(());
        }
        let now = call_clock();
        group.waiting.retain(|w| is_its(w.session, &w.wish) || now.saturating_sub(w.asked_ns) < PLACE_NS);
        let at = group.waiting.iter().position(|w| is_its(w.session, &w.wish));
        let before = at.unwrap_or(group.waiting.len());
        let is_free = !group.held.iter().any(|held| conflict(&held.wish, &wish))
            && !group.waiting.iter().take(before).any(|waiting| conflict(&waiting.wish, &wish));
        let writes = u64::from(wish.kind == LockKind::Write);
        let words = [EXISTS, key, session, wish.owner, wish.start, wish.end, writes];
        let entry = if is_free { lock_table.insert(words) } else { None };
        let Some(entry) = entry else {
            match at.and_then(|at| group.waiting.get_mut(at)) {
                Some(waiting) => waiting.asked_ns = now,
                None => group.waiting.push_back(Waiting { session, wish, asked_ns: now }),
            }
            return Err(Code::Busy);
        };
        if let Some(at) = at {
            group.waiting.remove(at);
        }
        group.held.push(Held { entry, session, wish });
        Ok(())
    }
}

impl Groups {
    /// Opens the groups in a memory.
    pub(super) fn open(memory: &DurableMemory) -> Groups {
        let (mut group_table, groups_left) = memory.table(0);
        let (mut lock_table, locks_left) = memory.table(2);
        let is_step =
            |state, [_, before, after]: &[u64; 3]| state == DONE && *before.max(after) <= FILE_BYTES_MAX;
        let mut steps = ReplyCache::open(memory, 1, is_step);
        let mut groups = HashMap::new();
        for (entry, [state, key, session, file, ino, position, applied]) in groups_left {
            let (target, number, stripe) = ((file >> 32) as u32, (file >> 16) as u8, file as u16);
            let id = BackingId { target, ino: Ino(ino), number, stripe };
            let is_sound = state == EXISTS && packed(&id) == file && position <= FILE_BYTES_MAX;
            if !is_sound || applied >= NUMBERS_END || groups.contains_key(&key) {
                group_table.remove(entry);
                continue;
            }
            // Steps with lower numbers may have been removed with their process; numbers are not reused.
            steps.number_from(applied);
            let (held, waiting) = (Vec::new(), VecDeque::new());
            groups.insert(key, Group { entry, session, id, position, applied, held, waiting });
        }
        for step in steps.in_order() {
            let [key, _, after] = step.words;
            // The worker was killed between the step's entry and the group's.
            if let Some(group) = groups.get_mut(&key).filter(|group| step.number >= group.applied) {
                group.moved(&group_table, step.number, after);
            }
        }
        for (entry, [state, key, session, owner, start, end, writes]) in locks_left {
            let kind = if writes == 1 { LockKind::Write } else { LockKind::Read };
            let wish = LockRequest { owner, flock: false, kind, start, end };
            let is_sound = state == EXISTS && writes <= 1 && start <= end && end <= FILE_BYTES_MAX;
            match groups.get_mut(&key).filter(|_| is_sound) {
                Some(group) => group.held.push(Held { entry, session, wish }),
                // The lock is malformed, or its group was being removed.
                None => lock_table.remove(entry),
            }
        }
        Groups { state: Mutex::new(State { groups, steps, group_table, lock_table }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves an operation of a process; see [`GroupOp`].
    pub(super) fn serve(
        &self,
        stamp: Stamp,
        id: &BackingId,
        key: u64,
        op: GroupOp,
    ) -> Result<Reply<'static>, Code> {
        let mut state = self.state();
        let there = state.groups.get_mut(&key);
        let is_its = there.as_ref().is_some_and(|group| group.id == *id);
        match op {
            GroupOp::Make { position } => match there {
                // A retry; other processes may have moved the pointer since.
                Some(group) if is_its && group.session == stamp.session => Ok(Reply::Done),
                Some(_) => Err(Code::Exists),
                None => state.make(stamp.session, id, key, position).map(|()| Reply::Done),
            },
            GroupOp::End => match there {
                Some(group) if is_its && group.session != stamp.session => Err(Code::NotPermitted),
                Some(_) if is_its => {
                    state.remove(key);
                    Ok(Reply::Done)
                }
                _ => Ok(Reply::Done),
            },
            _ if !is_its => Err(Code::Stale),
            GroupOp::Move { by: 0 } => there.map(|group| Reply::Count(group.position)).ok_or(Code::Stale),
            GroupOp::Move { by } => {
                let after = |before: u64| before.checked_add(by).filter(|at| *at <= FILE_BYTES_MAX);
                state.step(&stamp, key, after).map(Reply::Count)
            }
            GroupOp::Seek { position } => state.step(&stamp, key, |_| Some(position)).map(|_| Reply::Done),
            GroupOp::Lock(wish) => state.lock(stamp.session, key, wish).map(|()| Reply::Done),
        }
    }

    /// A process has ended, and repeats no step: removes its steps.
    pub(super) fn forget_steps(&self, session: u64) {
        self.state().steps.end(session);
    }

    /// A process has ended, or is considered dead: removes the groups that it made, and its locks and waiters in other
    /// groups.
    pub(super) fn end(&self, session: u64) {
        let mut state = self.state();
        let keys: Vec<u64> = state.groups.keys().copied().collect();
        for key in keys {
            if state.groups.get(&key).is_some_and(|group| group.session == session) {
                state.remove(key);
            } else {
                state.release(key, |of, _| of == session);
            }
        }
    }

    /// Processes with stored steps.
    pub(super) fn step_sessions(&self) -> Vec<u64> {
        self.state().steps.sessions()
    }

    /// Processes that made a group or hold a lock of one.
    pub(super) fn sessions(&self) -> Vec<u64> {
        let state = self.state();
        let of_group = |group: &Group| {
            let holders: Vec<u64> = group.held.iter().map(|held| held.session).collect();
            std::iter::once(group.session).chain(holders)
        };
        state.groups.values().flat_map(of_group).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: BackingId = BackingId { target: u32::MAX, ino: Ino(u64::MAX - 5), number: 3, stripe: 255 };

    /// A stamp for requests that are repeated; no other request uses its slot.
    fn stamp(session: u64, sequence: u64) -> Stamp {
        Stamp { session, slot: 63, sequence }
    }

    /// Sends each operation with a new stamp.
    struct Asker<'a>(&'a Groups, u64);

    impl Asker<'_> {
        fn ask(&mut self, session: u64, key: u64, op: GroupOp) -> Result<u64, Code> {
            self.1 += 1;
            self.0.serve(Stamp { session, slot: 0, sequence: self.1 }, &ID, key, op).map(
                |reply| match reply {
                    Reply::Count(n) => n,
                    _ => 0,
                },
            )
        }
    }

    fn wish(owner: u64, kind: LockKind, start: u64, end: u64) -> GroupOp {
        GroupOp::Lock(LockRequest { owner, flock: false, kind, start, end })
    }

    #[test]
    fn pointer_moves_once_for_each_request_and_ends_with_its_maker() {
        let groups = Groups::default();
        let mut a = Asker(&groups, 0);
        assert_eq!(a.ask(7, 1, GroupOp::Move { by: 1 }), Err(Code::Stale), "nobody made it");
        a.ask(7, 1, GroupOp::Make { position: 100 }).unwrap();
        assert_eq!(a.ask(8, 1, GroupOp::Make { position: 0 }), Err(Code::Exists));
        assert_eq!(a.ask(8, 1, GroupOp::Move { by: 5 }), Ok(100));
        a.ask(7, 1, GroupOp::Make { position: 100 }).unwrap();
        assert_eq!(a.ask(7, 1, GroupOp::Move { by: 1 }), Ok(105), "a retry of the making changes nothing");
        let step = || groups.serve(stamp(9, 1), &ID, 1, GroupOp::Move { by: 10 });
        assert_eq!((step(), step()), (Ok(Reply::Count(106)), Ok(Reply::Count(106))));
        assert_eq!(a.ask(9, 1, GroupOp::Move { by: 0 }), Ok(116));
        assert_eq!(a.ask(9, 1, GroupOp::Move { by: FILE_BYTES_MAX }), Err(Code::FileTooLarge));
        let seek = || groups.serve(stamp(7, 1 << 20), &ID, 1, GroupOp::Seek { position: 116 });
        assert_eq!(seek(), Ok(Reply::Done), "where it was");
        assert_eq!(a.ask(9, 1, GroupOp::Move { by: 4 }), Ok(116));
        assert_eq!(seek(), Ok(Reply::Done), "a retry, after somebody moved it");
        assert_eq!(a.ask(9, 1, GroupOp::Move { by: 0 }), Ok(120));
        a.ask(7, 1, GroupOp::Seek { position: 3 }).unwrap();
        a.ask(7, 2, GroupOp::Make { position: 50 }).unwrap();
        assert_eq!(a.ask(8, 1, GroupOp::Move { by: 1 }), Ok(3));
        assert_eq!(a.ask(8, 2, GroupOp::Move { by: 1 }), Ok(50), "each its own");
        let other = BackingId { ino: Ino(6), ..ID };
        assert_eq!(groups.serve(stamp(8, 99), &other, 1, GroupOp::Move { by: 1 }), Err(Code::Stale));
        assert_eq!(a.ask(8, 1, GroupOp::End), Err(Code::NotPermitted));
        a.ask(7, 1, GroupOp::End).unwrap();
        a.ask(7, 1, GroupOp::End).unwrap();
        assert_eq!(a.ask(8, 1, GroupOp::Move { by: 1 }), Err(Code::Stale));
        groups.end(7);
        assert_eq!(a.ask(8, 2, GroupOp::Move { by: 0 }), Err(Code::Stale));
    }

    #[test]
    fn locks_exclude_in_turn_and_end_with_their_process() {
        let groups = Groups::default();
        let mut a = Asker(&groups, 0);
        a.ask(7, 1, GroupOp::Make { position: 0 }).unwrap();
        let all = |owner| wish(owner, LockKind::Write, 0, FILE_BYTES_MAX);
        let off = |owner| wish(owner, LockKind::Unlock, 0, 0);
        a.ask(7, 1, wish(1, LockKind::Write, 10, 19)).unwrap();
        a.ask(7, 1, wish(1, LockKind::Write, 10, 19)).unwrap();
        a.ask(7, 1, wish(2, LockKind::Write, 20, 29)).unwrap();
        a.ask(8, 1, wish(1, LockKind::Read, 0, 9)).unwrap();
        a.ask(9, 1, wish(1, LockKind::Read, 5, 9)).unwrap();
        assert_eq!(a.ask(8, 1, wish(2, LockKind::Read, 19, 19)), Err(Code::Busy));
        assert_eq!(a.ask(9, 1, all(2)), Err(Code::Busy));
        // Waiters are served in order.
        a.ask(7, 1, off(1)).unwrap();
        assert_eq!(a.ask(7, 1, wish(3, LockKind::Read, 19, 19)), Err(Code::Busy), "another waits for that");
        a.ask(8, 1, wish(2, LockKind::Read, 19, 19)).unwrap();
        assert_eq!(groups.sessions().len(), 5, "its maker's and four locks'");
        groups.end(8);
        a.ask(9, 1, off(1)).unwrap();
        a.ask(7, 1, off(2)).unwrap();
        a.ask(9, 1, all(2)).unwrap();
        assert_eq!(a.ask(7, 1, wish(3, LockKind::Read, 19, 19)), Err(Code::Busy));
        assert_eq!(a.ask(8, 1, all(3)), Err(Code::Busy));
        groups.end(9);
        groups.state().groups.get_mut(&1).unwrap().waiting[0].asked_ns =
            call_clock().checked_sub(PLACE_NS).unwrap();
        a.ask(8, 1, all(3)).unwrap();
        groups.end(7);
        let state = groups.state();
        assert_eq!(
            (state.group_table.free_count(), state.lock_table.free_count()),
            (GROUPS_MAX, GROUP_LOCKS_MAX)
        );
    }

    #[test]
    fn more_than_the_bounds_are_refused_or_wait() {
        let groups = Groups::default();
        let mut a = Asker(&groups, 0);
        for key in 0..GROUPS_MAX as u64 {
            a.ask(7, key, GroupOp::Make { position: 0 }).unwrap();
        }
        assert_eq!(a.ask(7, 1 << 40, GroupOp::Make { position: 0 }), Err(Code::NoResources));
        for owner in 0..GROUP_LOCKS_MAX as u64 {
            a.ask(7, 0, wish(owner, LockKind::Read, 0, 1)).unwrap();
        }
        assert_eq!(a.ask(7, 1, wish(0, LockKind::Read, 0, 1)), Err(Code::Busy));
        a.ask(7, 0, wish(5, LockKind::Unlock, 0, 0)).unwrap();
        a.ask(7, 1, wish(0, LockKind::Read, 0, 1)).unwrap();
    }

    #[test]
    fn next_worker_knows_pointers_steps_and_locks() {
        let memory = DurableMemory::new(&FORMAT);
        let first = Groups::open(&memory);
        let mut a = Asker(&first, 0);
        for key in 1..=3 {
            a.ask(7, key, GroupOp::Make { position: 10 * key }).unwrap();
        }
        // A step whose reply is lost, followed by more steps of another process than the table has entries.
        let lost = |groups: &Groups| groups.serve(stamp(10, 5), &ID, 1, GroupOp::Move { by: 0x10 });
        assert_eq!(lost(&first), Ok(Reply::Count(10)));
        for _ in 0..REPLIES_KEPT + 10 {
            a.ask(8, 1, GroupOp::Move { by: 2 }).unwrap();
        }
        a.ask(7, 2, GroupOp::Seek { position: 5 }).unwrap();
        let seek = |groups: &Groups| groups.serve(stamp(8, 1 << 20), &ID, 2, GroupOp::Seek { position: 9 });
        assert_eq!(seek(&first), Ok(Reply::Done));
        assert_eq!(a.ask(8, 2, GroupOp::Move { by: 1 }), Ok(9));
        a.ask(7, 3, GroupOp::End).unwrap();
        a.ask(8, 1, wish(9, LockKind::Write, 100, 199)).unwrap();
        a.ask(8, 1, wish(10, LockKind::Read, 300, 399)).unwrap();
        a.ask(8, 1, wish(10, LockKind::Unlock, 0, 0)).unwrap();
        let end = 10 + 0x10 + 2 * (REPLIES_KEPT as u64 + 10);
        assert_eq!(first.serve(stamp(9, 1), &ID, 1, GroupOp::Move { by: 1 }), Ok(Reply::Count(end)));
        // The state as the next worker finds it, and the state if this worker had been killed right after the step's
        // entry.
        let entry = first.state().groups[&1].entry;
        let number = first.state().steps.next_number() - 1;
        for killed in [false, true] {
            if killed {
                first.state().group_table.set(entry, POSITION, end);
                first.state().group_table.set(entry, APPLIED, number);
            }
            let next = Groups::open(&memory);
            let step = next.serve(stamp(9, 1), &ID, 1, GroupOp::Move { by: 1 });
            assert_eq!(step, Ok(Reply::Count(end)), "it was done");
            assert_eq!(lost(&next), Ok(Reply::Count(10)), "it was done long ago");
            let mut b = Asker(&next, 1 << 32);
            assert_eq!(b.ask(9, 1, GroupOp::Move { by: 0 }), Ok(end + 1));
            assert_eq!(seek(&next), Ok(Reply::Done), "it was done too");
            assert_eq!(b.ask(9, 2, GroupOp::Move { by: 0 }), Ok(10));
            assert_eq!(b.ask(9, 3, GroupOp::Move { by: 0 }), Err(Code::Stale));
            assert_eq!(b.ask(9, 1, wish(1, LockKind::Read, 199, 200)), Err(Code::Busy));
            b.ask(9, 1, wish(2, LockKind::Write, 300, 399)).unwrap();
            b.ask(9, 1, wish(2, LockKind::Unlock, 0, 0)).unwrap();
            b.ask(8, 1, wish(9, LockKind::Write, 100, 199)).unwrap();
            let state = next.state();
            assert_eq!(state.group_table.free_count(), GROUPS_MAX - 2);
            assert_eq!(state.lock_table.free_count(), GROUP_LOCKS_MAX - 1);
            assert_eq!(state.groups[&1].entry, entry);
        }
    }

    #[test]
    fn step_that_was_not_finished_is_none() {
        let memory = DurableMemory::new(&FORMAT);
        let first = Groups::open(&memory);
        let mut a = Asker(&first, 0);
        a.ask(7, 1, GroupOp::Make { position: 0 }).unwrap();
        assert_eq!(first.serve(stamp(9, 1), &ID, 1, GroupOp::Move { by: 4 }), Ok(Reply::Count(0)));
        // The worker is killed before it stores the entry's state.
        let (mut steps, left) = memory.table::<WORDS>(1);
        left.iter().for_each(|(entry, _)| steps.remove(*entry));
        let entry = first.state().groups[&1].entry;
        first.state().group_table.set(entry, POSITION, 0);
        first.state().group_table.set(entry, APPLIED, 0);
        let next = Groups::open(&memory);
        assert_eq!(next.serve(stamp(9, 1), &ID, 1, GroupOp::Move { by: 4 }), Ok(Reply::Count(0)));
        assert_eq!(next.serve(stamp(9, 2), &ID, 1, GroupOp::Move { by: 0 }), Ok(Reply::Count(4)));
    }

    #[test]
    fn step_after_those_of_an_ended_process_is_in_the_pointer() {
        let memory = DurableMemory::new(&FORMAT);
        let first = Groups::open(&memory);
        let mut a = Asker(&first, 0);
        a.ask(7, 1, GroupOp::Make { position: 0 }).unwrap();
        (0..5).for_each(|_| _ = a.ask(8, 1, GroupOp::Move { by: 2 }).unwrap());
        let applied = first.state().groups[&1].applied;
        first.forget_steps(8);
        // The next worker finds no step. It is killed before it writes the group's entry.
        let next = Groups::open(&memory);
        assert_eq!(next.serve(stamp(9, 1), &ID, 1, GroupOp::Move { by: 4 }), Ok(Reply::Count(10)));
        let entry = next.state().groups[&1].entry;
        next.state().group_table.set(entry, POSITION, 10);
        next.state().group_table.set(entry, APPLIED, applied);
        assert_eq!(Asker(&Groups::open(&memory), 0).ask(9, 1, GroupOp::Move { by: 0 }), Ok(14));
    }

    #[test]
    fn entry_that_makes_no_sense_is_dropped() {
        let memory = DurableMemory::new(&FORMAT);
        let first = Groups::open(&memory);
        let mut a = Asker(&first, 0);
        a.ask(7, 1, GroupOp::Make { position: 5 }).unwrap();
        a.ask(7, 1, wish(1, LockKind::Write, 10, 19)).unwrap();
        let (mut groups, mut steps, mut locks) =
            (memory.table::<GROUP_WORDS>(0).0, memory.table::<WORDS>(1).0, memory.table::<LOCK_WORDS>(2).0);
        let (file, far) = (packed(&ID), FILE_BYTES_MAX + 1);
        // An invalid state, name, position or number, and one key twice; a step beyond the largest file.
        let group = [EXISTS, 2, 7, file, ID.ino.0, 5, 0];
        for (index, value) in
            [(0, 2), (3, file | 1 << 24), (POSITION, far), (APPLIED, NUMBERS_END), (0, EXISTS), (0, EXISTS)]
        {
            let entry = groups.insert(group).unwrap();
            groups.set(entry, index, value);
        }
        steps.insert([DONE, 0, 8, 0, 1, 1, 5, far]).unwrap();
        // An invalid state, kind, range or group.
        for (index, value) in [(0, 2), (6, 2), (4, 20), (5, far), (1, 3)] {
            let entry = locks.insert([EXISTS, 1, 7, 2, 10, 19, 1]).unwrap();
            locks.set(entry, index, value);
        }
        let next = Groups::open(&memory);
        assert_eq!((next.sessions(), next.step_sessions()), (vec![7; 3], vec![]));
        assert_eq!(Asker(&next, 0).ask(9, 1, GroupOp::Move { by: 0 }), Ok(5));
        let state = next.state();
        assert_eq!(state.group_table.free_count(), GROUPS_MAX - 2);
        assert_eq!(state.lock_table.free_count(), GROUP_LOCKS_MAX - 1);
    }
}
