//! The shared state of processes of several nodes that opened a file together, for files whose first backing file is on
//! this node: MPI's shared file pointer, and the locks of its atomic mode, which are separate from programs' own locks.
//!
//! All of it is in memory that the supervisor keeps over the worker: a table of groups, one of locks, and the last step
//! (a move or a seek) of each slot ([`ReplyCache`]). One store of its entry commits a step; the table of groups
//! follows. So the next worker knows where each pointer is, and a repeated step is answered and not executed again. A
//! lock is in its table before it is granted. Waiters for locks are in this process's memory alone: they send their
//! requests again.
//!
//! The network thread serves this by itself, and nothing blocks. Lock order: no other lock is taken with the table's.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_ring::{call_clock, memfd_sealed, Mapping, Seal};
use forebay_types::limits::{FILE_BYTES_MAX, GROUPS_MAX, GROUP_LOCKS_MAX, GROUP_PLACE_MS, REPLIES_KEPT};
use forebay_types::{BackingId, Code, Error, GroupOp, Ino, LockKind, LockRequest, Reply, Result};
use forebay_wire::Stamp;

use super::reply_cache::{ReplyCache, ENTRY_BYTES};
use crate::store::FdStore;

/// The tag of the memory in the supervisor's store.
const TAG: &str = "groups";
/// How long a waiter keeps its place in the queue without sending its request again.
const PLACE_NS: u64 = GROUP_PLACE_MS * 1_000_000;
/// Words of an entry of each table.
const WORDS: usize = 8;
/// Where the tables begin, in entries.
const STEPS_AT: usize = GROUPS_MAX;
const LOCKS_AT: usize = STEPS_AT + REPLIES_KEPT;
const MEMORY_BYTES: usize = (LOCKS_AT + GROUP_LOCKS_MAX) * ENTRY_BYTES;
/// The state of a step that is done. Its words: the group's key, and the pointer before and after the step.
const DONE: u64 = 1;

/// Words of a group: its state (1: it exists), key, the session that made it, target with number and stripe, inode, the
/// pointer, and the number of the first step that is not in the pointer.
const POSITION: usize = 5;
const APPLIED: usize = 6;

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
    held: Vec<Held>,
    waiting: VecDeque<Waiting>,
}

#[derive(Debug)]
struct State {
    groups: HashMap<u64, Group>,
    steps: ReplyCache,
    free_groups: Vec<usize>,
    free_locks: Vec<usize>,
}

/// All groups.
#[derive(Debug)]
pub(in crate::worker) struct Groups {
    /// None: nothing outlives this (simulations, tests).
    memory: Option<Mapping>,
    state: Mutex<State>,
}

impl Default for Groups {
    fn default() -> Groups {
        let state = State {
            groups: HashMap::new(),
            steps: ReplyCache::new(STEPS_AT * ENTRY_BYTES, REPLIES_KEPT),
            free_groups: (0..GROUPS_MAX).rev().collect(),
            free_locks: (LOCKS_AT..LOCKS_AT + GROUP_LOCKS_MAX).rev().collect(),
        };
        Groups { memory: None, state: Mutex::new(state) }
    }
}

fn packed(id: &BackingId) -> u64 {
    u64::from(id.target) << 32 | u64::from(id.number) << 16 | u64::from(id.stripe)
}

fn conflict(one: &LockRequest, other: &LockRequest) -> bool {
    let writes = one.kind == LockKind::Write || other.kind == LockKind::Write;
    writes && one.start <= other.end && other.start <= one.end
}

fn word(memory: &Mapping, entry: usize, index: usize) -> &AtomicU64 {
    memory.word64((entry * WORDS + index) * 8)
}

/// Writes an entry, its state last.
fn put(memory: &Option<Mapping>, entry: usize, words: &[u64]) {
    let Some(memory) = memory else { return };
    word(memory, entry, 0).store(0, Ordering::SeqCst);
    for (i, value) in words.iter().enumerate() {
        word(memory, entry, 1 + i).store(*value, Ordering::SeqCst);
    }
    word(memory, entry, 0).store(1, Ordering::SeqCst);
}

fn set(memory: &Option<Mapping>, entry: usize, index: usize, value: u64) {
    if let Some(memory) = memory {
        word(memory, entry, index).store(value, Ordering::SeqCst);
    }
}

impl State {
    /// Releases the locks of which `which` is true, and removes such waiters.
    fn release(&mut self, memory: &Option<Mapping>, key: u64, which: impl Fn(u64, &LockRequest) -> bool) {
        let Some(group) = self.groups.get_mut(&key) else { return };
        for held in group.held.extract_if(.., |held| which(held.session, &held.wish)) {
            set(memory, held.entry, 0, 0);
            self.free_locks.push(held.entry);
        }
        group.waiting.retain(|waiting| !which(waiting.session, &waiting.wish));
    }

    fn remove(&mut self, memory: &Option<Mapping>, key: u64) {
        self.release(memory, key, |_, _| true);
        if let Some(group) = self.groups.remove(&key) {
            set(memory, group.entry, 0, 0);
            self.free_groups.push(group.entry);
        }
    }
}

impl Groups {
    /// The groups that the last worker left with the supervisor, taken out of `left`, or new memory that is put there.
    ///
    /// # Errors
    /// No memory; the supervisor is gone.
    pub(in crate::worker) fn restored(
        store: &FdStore,
        left: &mut Vec<(String, Vec<OwnedFd>)>,
    ) -> Result<Groups> {
        let kept = left.extract_if(.., |(tag, _)| tag == TAG).find_map(|(_, mut fds)| fds.pop());
        if let Some(fd) = kept {
            return Groups::open(fd.as_fd());
        }
        let what = "cannot keep what processes have in common that opened a file together";
        let (fd, mapping) =
            memfd_sealed(c"forebay-groups", MEMORY_BYTES, Seal::Size).map_err(|e| Error::io(what, &e))?;
        store.put(TAG, &[fd.as_fd()])?;
        Ok(Groups { memory: Some(mapping), ..Groups::default() })
    }

    fn open(fd: BorrowedFd<'_>) -> Result<Groups> {
        let what = "cannot see what processes have in common that opened a file together";
        let memory = Mapping::new(fd, MEMORY_BYTES, true).map_err(|e| Error::io(what, &e))?;
        let groups = Groups::default();
        let mut state = groups.state();
        let State { free_groups, free_locks, .. } = &mut *state;
        let load = |entry, index| word(&memory, entry, index).load(Ordering::Acquire);
        let is_used = |entry: &usize| load(*entry, 0) == 1;
        let used_groups: Vec<usize> = free_groups.extract_if(.., |entry| is_used(entry)).collect();
        let used_locks: Vec<usize> = free_locks.extract_if(.., |entry| is_used(entry)).collect();
        for entry in used_groups {
            let (files, ino) = (load(entry, 3), Ino(load(entry, 4)));
            let (target, number, stripe) = ((files >> 32) as u32, (files >> 16) as u8, files as u16);
            let group = Group {
                entry,
                session: load(entry, 2),
                id: BackingId { target, ino, number, stripe },
                position: load(entry, POSITION),
                held: Vec::new(),
                waiting: VecDeque::new(),
            };
            state.groups.insert(load(entry, 1), group);
        }
        let steps = ReplyCache::restored(&memory, STEPS_AT * ENTRY_BYTES, REPLIES_KEPT);
        for step in steps.in_order() {
            let [key, _, after] = step.words;
            if let Some(group) = state.groups.get_mut(&key) {
                // The worker was killed before it wrote the table.
                if step.number >= load(group.entry, APPLIED) {
                    group.position = after;
                    word(&memory, group.entry, POSITION).store(after, Ordering::SeqCst);
                    word(&memory, group.entry, APPLIED).store(step.number + 1, Ordering::SeqCst);
                }
            }
        }
        state.steps = steps;
        for entry in used_locks {
            let kind = if load(entry, 6) != 0 { LockKind::Write } else { LockKind::Read };
            let (owner, start, end) = (load(entry, 3), load(entry, 4), load(entry, 5));
            let wish = LockRequest { owner, flock: false, kind, start, end };
            match state.groups.get_mut(&load(entry, 1)) {
                Some(group) => group.held.push(Held { entry, session: load(entry, 2), wish }),
                // The group was being removed.
                None => {
                    word(&memory, entry, 0).store(0, Ordering::SeqCst);
                    state.free_locks.push(entry);
                }
            }
        }
        drop(state);
        Ok(Groups { memory: Some(memory), ..groups })
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
    ) -> std::result::Result<Reply<'static>, Code> {
        let mut state = self.state();
        let there = state.groups.get_mut(&key);
        let is_its = there.as_ref().is_some_and(|group| group.id == *id);
        match op {
            GroupOp::Make { position } => match there {
                // A retry; others may have moved the pointer by now.
                Some(group) if is_its && group.session == stamp.session => Ok(Reply::Done),
                Some(_) => Err(Code::Exists),
                None => self.make(&mut state, stamp.session, id, key, position).map(|()| Reply::Done),
            },
            GroupOp::End => match there {
                Some(group) if is_its && group.session != stamp.session => Err(Code::NotPermitted),
                Some(_) if is_its => {
                    state.remove(&self.memory, key);
                    Ok(Reply::Done)
                }
                _ => Ok(Reply::Done),
            },
            _ if !is_its => Err(Code::Stale),
            GroupOp::Move { by: 0 } => there.map(|group| Reply::Count(group.position)).ok_or(Code::Stale),
            GroupOp::Move { by } => {
                let after = |before: u64| before.checked_add(by).filter(|at| *at <= FILE_BYTES_MAX);
                self.step(&mut state, &stamp, key, after).map(Reply::Count)
            }
            GroupOp::Seek { position } => {
                self.step(&mut state, &stamp, key, |_| Some(position)).map(|_| Reply::Done)
            }
            GroupOp::Lock(wish) => self.lock(&mut state, stamp.session, key, wish).map(|()| Reply::Done),
        }
    }

    fn make(
        &self,
        state: &mut State,
        session: u64,
        id: &BackingId,
        key: u64,
        position: u64,
    ) -> std::result::Result<(), Code> {
        let entry = state.free_groups.pop().ok_or(Code::NoResources)?;
        // Steps of an earlier group with the same key do not belong to this one.
        put(&self.memory, entry, &[key, session, packed(id), id.ino.0, position, state.steps.next_number()]);
        let (held, waiting) = (Vec::new(), VecDeque::new());
        state.groups.insert(key, Group { entry, session, id: *id, position, held, waiting });
        Ok(())
    }

    /// Moves a pointer from where it is to where `after` says, unless the step was done before; where it was.
    /// [`Code::FileTooLarge`] beyond the largest file.
    fn step(
        &self,
        state: &mut State,
        stamp: &Stamp,
        key: u64,
        after: impl Fn(u64) -> Option<u64>,
    ) -> std::result::Result<u64, Code> {
        if let Some(done) = state.steps.get(stamp) {
            return Ok(done.words[1]);
        }
        if state.steps.is_overtaken(stamp) {
            return Err(Code::Stale);
        }
        let group = state.groups.get_mut(&key).ok_or(Code::Stale)?;
        let before = group.position;
        let after = after(before).ok_or(Code::FileTooLarge)?;
        group.position = after;
        let entry = group.entry;
        let number = state.steps.put(self.memory.as_ref(), stamp, DONE, [key, before, after]);
        set(&self.memory, entry, POSITION, after);
        set(&self.memory, entry, APPLIED, number + 1);
        Ok(before)
    }

    fn lock(
        &self,
        state: &mut State,
        session: u64,
        key: u64,
        wish: LockRequest,
    ) -> std::result::Result<(), Code> {
        if wish.kind == LockKind::Unlock {
            state.release(&self.memory, key, |of, its| of == session && its.owner == wish.owner);
            return Ok(());
        }
        let State { groups, free_locks, .. } = state;
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
        let entry = if is_free { free_locks.pop() } else { None };
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
        let writes = u64::from(wish.kind == LockKind::Write);
        put(&self.memory, entry, &[key, session, wish.owner, wish.start, wish.end, writes]);
        group.held.push(Held { entry, session, wish });
        Ok(())
    }

    /// A process has ended: it repeats no step.
    pub(super) fn forget_steps(&self, session: u64) {
        self.state().steps.end(self.memory.as_ref(), session);
    }

    /// A process has ended, or counts as dead: removes the groups that it made, and its locks and waiters in others.
    pub(super) fn end(&self, session: u64) {
        let mut state = self.state();
        let keys: Vec<u64> = state.groups.keys().copied().collect();
        for key in keys {
            if state.groups.get(&key).is_some_and(|group| group.session == session) {
                state.remove(&self.memory, key);
            } else {
                state.release(&self.memory, key, |of, _| of == session);
            }
        }
    }

    /// Processes whose steps are kept.
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

    /// A stamp for requests that are repeated: their slot is used for nothing else.
    fn stamp(session: u64, sequence: u64) -> Stamp {
        Stamp { session, slot: 63, sequence }
    }

    /// Sends each operation with a stamp of its own.
    struct Asker<'a>(&'a Groups, u64);

    impl Asker<'_> {
        fn ask(&mut self, session: u64, key: u64, op: GroupOp) -> std::result::Result<u64, Code> {
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
        assert_eq!((state.free_groups.len(), state.free_locks.len()), (GROUPS_MAX, GROUP_LOCKS_MAX));
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
        let (fd, memory) = memfd_sealed(c"groups", MEMORY_BYTES, Seal::Size).unwrap();
        let first = Groups { memory: Some(memory), ..Groups::default() };
        let mut a = Asker(&first, 0);
        for key in 1..=3 {
            a.ask(7, key, GroupOp::Make { position: 10 * key }).unwrap();
        }
        // A step whose reply is lost, followed by more steps of another process than entries are kept.
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
        // As the next worker finds it, and as if this one had been killed right after the step's entry.
        let entry = first.state().groups[&1].entry;
        let number = first.state().steps.next_number() - 1;
        for killed in [false, true] {
            if killed {
                set(&first.memory, entry, POSITION, end);
                set(&first.memory, entry, APPLIED, number);
            }
            let next = Groups::open(fd.as_fd()).unwrap();
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
            assert_eq!(state.free_groups.len(), GROUPS_MAX - 2);
            assert_eq!(state.free_locks.len(), GROUP_LOCKS_MAX - 1);
            assert!(!state.free_groups.contains(&entry));
        }
    }

    #[test]
    fn step_that_was_not_finished_is_none() {
        let (fd, memory) = memfd_sealed(c"groups", MEMORY_BYTES, Seal::Size).unwrap();
        let first = Groups { memory: Some(memory), ..Groups::default() };
        let mut a = Asker(&first, 0);
        a.ask(7, 1, GroupOp::Make { position: 0 }).unwrap();
        assert_eq!(first.serve(stamp(9, 1), &ID, 1, GroupOp::Move { by: 4 }), Ok(Reply::Count(0)));
        // Killed before the entry's state was stored.
        (STEPS_AT..LOCKS_AT).for_each(|entry| set(&first.memory, entry, 0, 0));
        let entry = first.state().groups[&1].entry;
        set(&first.memory, entry, POSITION, 0);
        set(&first.memory, entry, APPLIED, 0);
        let next = Groups::open(fd.as_fd()).unwrap();
        assert_eq!(next.serve(stamp(9, 1), &ID, 1, GroupOp::Move { by: 4 }), Ok(Reply::Count(0)));
        assert_eq!(next.serve(stamp(9, 2), &ID, 1, GroupOp::Move { by: 0 }), Ok(Reply::Count(4)));
    }
}
