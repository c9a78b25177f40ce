//! Locks that processes of other nodes hold on this node's files, and their turns to append to files of several backing
//! files.
//!
//! Each owner has a descriptor of the backing file here, with the kernel's lock on it: flock(2), or
//! open-file-description locks for record locks. So these locks also exclude this node's programs, preloaded or through
//! the mount, because their locks are on the same backing file. No request waits here; a process that has to wait
//! retries.
//!
//! The supervisor has a duplicate of each descriptor. So locks outlive the worker, and the next worker restores them. A
//! turn to append is kept as an empty eventfd whose tag holds the whole record.
//!
//! Lock order: one table at a time, and no other lock is taken while it is locked.

use std::collections::hash_map::{Entry, HashMap};
use std::collections::{HashSet, VecDeque};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_ring::call_clock;
use forebay_types::limits::{
    APPEND_HOLD_MS, FILE_BYTES_MAX, LOCK_OWNERS_OVER_KEPT, LOCK_OWNER_OF_NODE, REMOTE_LOCK_OWNERS_MAX,
};
use forebay_types::{BackingId, Code, Ino, LockKind, LockRequest};

use crate::store::FdStore;
use crate::worker::session_id::{node_of_session, session_on};

/// Longest time of one append.
const HOLD_NS: u64 = APPEND_HOLD_MS * 1_000_000;

/// The owner of the locks on one descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Owner {
    session: u64,
    id: BackingId,
    owner: u64,
    flock: bool,
}

/// Prefix of the tags of lock descriptors in the supervisor's store.
pub(in crate::worker) const TAG: &str = "lock ";

impl Owner {
    /// The same value for all sessions under which the owner may be known.
    fn of_any_session(self) -> Owner {
        match self.owner & LOCK_OWNER_OF_NODE {
            0 => self,
            _ => Owner { session: session_on(node_of_session(self.session), 0), ..self },
        }
    }

    fn tag(&self) -> String {
        let Owner { session, id, owner, flock } = self;
        let BackingId { target, ino, number, stripe } = id;
        let flock = u8::from(*flock);
        format!("{TAG}{session:x} {target:x} {:x} {number:x} {stripe:x} {owner:x} {flock}", ino.0)
    }

    fn of_tag(tag: &str) -> Option<Owner> {
        let mut words = tag.strip_prefix(TAG)?.split(' ').map(|word| u64::from_str_radix(word, 16).ok());
        let mut next = || words.next().flatten();
        let session = next()?;
        let (target, ino) = (next()?.try_into().ok()?, Ino(next()?));
        let (number, stripe) = (next()?.try_into().ok()?, next()?.try_into().ok()?);
        Some(Owner {
            session,
            id: BackingId { target, ino, number, stripe },
            owner: next()?,
            flock: next()? != 0,
        })
    }
}

/// The process whose turn it is to append to a file.
#[derive(Debug)]
struct Appending {
    session: u64,
    handle: u64,
    /// By [`call_clock`].
    since_ns: u64,
}

/// Prefix of the tags of turns to append.
pub(in crate::worker) const TURN_TAG: &str = "append ";

/// The tag of a turn. The file's next turn has another tag.
fn turn_tag(id: &BackingId, session: u64, handle: u64) -> String {
    let BackingId { target, ino, number, stripe } = id;
    format!("{TURN_TAG}{session:x} {target:x} {:x} {number:x} {stripe:x} {handle:x}", ino.0)
}

fn turn_of_tag(tag: &str) -> Option<(BackingId, u64, u64)> {
    // The same words as in an owner's tag, except the last.
    let owner = Owner::of_tag(&format!("{TAG}{} 0", tag.strip_prefix(TURN_TAG)?))?;
    Some((owner.id, owner.session, owner.owner))
}

/// Owners that hold locks, and the last owners that released all their locks. A repeated lock request of the latter may
/// arrive behind their release; its lock would never be released. In memory only, as in `ended.rs`: the next worker has
/// new links.
#[derive(Debug, Default)]
struct Owners {
    held: HashMap<Owner, Arc<OwnedFd>>,
    over: HashSet<Owner>,
    over_in_order: VecDeque<Owner>,
}

impl Owners {
    /// The owner under the session of its first lock: its process may have attached again since.
    fn known(&self, owner: Owner) -> Owner {
        if owner.owner & LOCK_OWNER_OF_NODE == 0 || self.held.contains_key(&owner) {
            return owner;
        }
        let found = self.held.keys().find(|held| held.of_any_session() == owner.of_any_session());
        found.copied().unwrap_or(owner)
    }

    fn is_over(&self, owner: Owner) -> bool {
        self.over.contains(&owner.of_any_session())
    }

    /// An owner has released all its locks. Its number is never used again.
    fn end(&mut self, owner: Owner) {
        let owner = owner.of_any_session();
        if !self.over.insert(owner) {
            return;
        }
        self.over_in_order.push_back(owner);
        if self.over_in_order.len() > LOCK_OWNERS_OVER_KEPT {
            if let Some(oldest) = self.over_in_order.pop_front() {
                self.over.remove(&oldest);
            }
        }
    }
}

/// All locks and turns that processes of other nodes hold here.
#[derive(Debug, Default)]
pub(in crate::worker) struct RemoteLocks {
    owners: Mutex<Owners>,
    appending: Mutex<HashMap<BackingId, Appending>>,
    /// None: nothing outlives the worker (simulations, tests).
    store: Option<FdStore>,
}

fn check(result: i32) -> Result<(), Code> {
    if result >= 0 {
        return Ok(());
    }
    match std::io::Error::last_os_error().raw_os_error().unwrap_or(0) {
        libc::EAGAIN | libc::EACCES => Err(Code::Busy),
        errno => Err(Code::from_errno(errno)),
    }
}

fn record(wish: &LockRequest) -> libc::flock {
    // SAFETY: an all-zero flock is valid.
    let mut record: libc::flock = unsafe { std::mem::zeroed() };
    record.l_type = match wish.kind {
        LockKind::Read => libc::F_RDLCK,
        LockKind::Write => libc::F_WRLCK,
        LockKind::Unlock => libc::F_UNLCK,
    } as i16;
    record.l_whence = libc::SEEK_SET as i16;
    record.l_start = wish.start as i64;
    // A length of 0 reaches to the end of the file, wherever that is.
    record.l_len = if wish.end >= FILE_BYTES_MAX { 0 } else { (wish.end - wish.start + 1) as i64 };
    record
}

fn apply(file: &OwnedFd, wish: &LockRequest) -> Result<(), Code> {
    if wish.flock {
        let how = match wish.kind {
            LockKind::Read => libc::LOCK_SH,
            LockKind::Write => libc::LOCK_EX,
            LockKind::Unlock => libc::LOCK_UN,
        };
        // SAFETY: plain system call on a descriptor of ours.
        return check(unsafe { libc::flock(file.as_raw_fd(), how | libc::LOCK_NB) });
    }
    let record = record(wish);
    // SAFETY: `record` lives over the call.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const record) })
}

/// Releases all locks on a descriptor. Closing it would not, while another process has a duplicate.
fn unlock(file: &OwnedFd, flock: bool) -> Result<(), Code> {
    apply(file, &LockRequest { owner: 0, flock, kind: LockKind::Unlock, start: 0, end: FILE_BYTES_MAX })
}

impl RemoteLocks {
    /// Restores what the last worker left in the store, and takes it out of `left`. New locks are put into `store`.
    pub(in crate::worker) fn restored(store: FdStore, left: &mut Vec<(String, Vec<OwnedFd>)>) -> RemoteLocks {
        let mut held = HashMap::new();
        for (tag, mut fds) in left.extract_if(.., |(tag, _)| tag.starts_with(TAG)) {
            match (Owner::of_tag(&tag), fds.pop()) {
                (Some(owner), Some(file)) => held.insert(owner, Arc::new(file)),
                _ => {
                    tracing::warn!("the descriptor store holds {tag:?}, which is not a valid lock tag");
                    None
                }
            };
        }
        let now = call_clock();
        let mut appending = HashMap::new();
        for (tag, _) in left.extract_if(.., |(tag, _)| tag.starts_with(TURN_TAG)) {
            match turn_of_tag(&tag) {
                // The turn gets its whole time again: when it began is unknown.
                Some((id, session, handle)) => {
                    appending.insert(id, Appending { session, handle, since_ns: now })
                }
                None => {
                    tracing::warn!(
                        "the descriptor store holds {tag:?}, which is not a valid tag of an append turn"
                    );
                    None
                }
            };
        }
        let owners = Mutex::new(Owners { held, ..Owners::default() });
        RemoteLocks { owners, appending: Mutex::new(appending), store: Some(store) }
    }

    /// Stores a turn with the supervisor, so that it outlives this worker.
    fn remember_turn(&self, id: &BackingId, session: u64, handle: u64) -> Result<(), Code> {
        let Some(store) = &self.store else { return Ok(()) };
        let nothing = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)
            .map_err(|e| Code::from_errno(e.raw_os_error()))?;
        store.put(&turn_tag(id, session, handle), &[nothing.as_fd()]).map_err(|e| {
            tracing::error!("{e}");
            Code::NoResources
        })
    }

    fn forget_turn(&self, id: &BackingId, turn: &Appending) {
        let tag = turn_tag(id, turn.session, turn.handle);
        if let Some(Err(e)) = self.store.as_ref().map(|store| store.remove(&tag)) {
            tracing::warn!("{e}");
        }
    }

    /// Removes an owner's descriptor. The table is locked, so that no other descriptor is stored for the owner
    /// meanwhile.
    fn give_up(&self, held: &mut HashMap<Owner, Arc<OwnedFd>>, owner: &Owner) {
        if held.remove(owner).is_none() {
            return;
        }
        let removed = self.store.as_ref().map_or(Ok(()), |store| store.remove(&owner.tag()));
        if let Err(e) = removed {
            tracing::warn!("{e}");
        }
    }

    fn owners(&self) -> MutexGuard<'_, Owners> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn appending(&self) -> MutexGuard<'_, HashMap<BackingId, Appending>> {
        self.appending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes or releases a lock. `open` opens a new descriptor for the owner's first lock.
    ///
    /// # Errors
    /// [`Code::Busy`] for a conflicting lock; [`Code::NoResources`] for too many owners; [`Code::Stale`] for an owner
    /// that has released all its locks.
    pub(super) fn lock(
        &self,
        session: u64,
        id: &BackingId,
        wish: &LockRequest,
        open: impl FnOnce() -> Result<OwnedFd, Code>,
    ) -> Result<(), Code> {
        let asks = Owner { session, id: *id, owner: wish.owner, flock: wish.flock };
        let of_all = wish.flock || wish.start == 0 && wish.end >= FILE_BYTES_MAX;
        let mut owners = self.owners();
        let owner = owners.known(asks);
        let file = owners.held.get(&owner).cloned();
        let file = match (file, wish.kind) {
            (file, LockKind::Unlock) if of_all => {
                owners.end(owner);
                self.give_up(&mut owners.held, &owner);
                drop(owners);
                // Released explicitly: another thread may be about to use the descriptor, and the supervisor has a
                // duplicate.
                return file.map_or(Ok(()), |file| apply(&file, wish));
            }
            (None, LockKind::Unlock) => return Ok(()),
            _ if owners.is_over(owner) => return Err(Code::Stale),
            (Some(file), _) => file,
            (None, _) => {
                drop(owners);
                let file = Arc::new(open()?);
                owners = self.owners();
                if owners.is_over(owner) {
                    return Err(Code::Stale);
                }
                if owners.held.len() >= REMOTE_LOCK_OWNERS_MAX {
                    return Err(Code::NoResources);
                }
                match owners.held.entry(owner) {
                    Entry::Occupied(first) => Arc::clone(first.get()),
                    Entry::Vacant(vacant) => {
                        if let Some(store) = &self.store {
                            store.put(&owner.tag(), &[file.as_fd()]).map_err(|e| {
                                tracing::error!("{e}");
                                Code::NoResources
                            })?;
                        }
                        Arc::clone(vacant.insert(file))
                    }
                }
            }
        };
        // The table is still locked, so that the owner's release of all locks is entirely before or after this.
        let applied = apply(&file, wish);
        drop(owners);
        applied
    }

    /// Returns a conflicting lock, if there is one.
    pub(super) fn test(
        &self,
        session: u64,
        id: &BackingId,
        wish: &LockRequest,
        open: impl FnOnce() -> Result<OwnedFd, Code>,
    ) -> Result<Option<LockRequest>, Code> {
        let asks = Owner { session, id: *id, owner: wish.owner, flock: wish.flock };
        // Locks on the owner's own descriptor do not conflict.
        let owners = self.owners();
        let file = owners.held.get(&owners.known(asks)).cloned();
        drop(owners);
        let file = match file {
            Some(file) => file,
            None => Arc::new(open()?),
        };
        let mut found = record(wish);
        // SAFETY: the record lives over the call.
        check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut found) })?;
        let kind = match i32::from(found.l_type) {
            libc::F_UNLCK => return Ok(None),
            libc::F_RDLCK => LockKind::Read,
            _ => LockKind::Write,
        };
        let start = found.l_start as u64;
        let end = if found.l_len == 0 { FILE_BYTES_MAX } else { start + found.l_len as u64 - 1 };
        Ok(Some(LockRequest { owner: 0, flock: false, kind, start, end }))
    }

    /// Gives a process the turn to write at the end of a file.
    ///
    /// # Errors
    /// [`Code::Busy`] while another process has the turn; [`Code::NoResources`] when the supervisor cannot store it.
    pub(super) fn begin_append(&self, session: u64, id: &BackingId, handle: u64) -> Result<(), Code> {
        let mut appending = self.appending();
        let now = call_clock();
        match appending.get(id) {
            Some(a)
                if (a.session, a.handle) != (session, handle) && now.saturating_sub(a.since_ns) < HOLD_NS =>
            {
                return Err(Code::Busy);
            }
            // A retry does not extend the turn: its process counts from the first request.
            Some(a) if (a.session, a.handle) == (session, handle) => {}
            _ => {
                self.remember_turn(id, session, handle)?;
                let late = appending.insert(*id, Appending { session, handle, since_ns: now });
                if let Some(late) = late {
                    self.forget_turn(id, &late);
                }
            }
        }
        Ok(())
    }

    /// A process has written: ends its turn.
    pub(super) fn end_append(&self, session: u64, id: &BackingId, handle: u64) {
        let mut appending = self.appending();
        if appending.get(id).is_some_and(|a| (a.session, a.handle) == (session, handle)) {
            if let Some(turn) = appending.remove(id) {
                self.forget_turn(id, &turn);
            }
        }
    }

    /// A process has ended: releases its locks and turns.
    pub(super) fn end(&self, session: u64) {
        let mut owners = self.owners();
        let held = &mut owners.held;
        let ended: Vec<Owner> = held.keys().filter(|owner| owner.session == session).copied().collect();
        for owner in ended {
            if let Some(Err(code)) = held.get(&owner).map(|file| unlock(file, owner.flock)) {
                tracing::warn!("cannot drop the locks of a process that is gone: {code}");
            }
            self.give_up(held, &owner);
        }
        drop(owners);
        for (id, turn) in self.appending().extract_if(|_, turn| turn.session == session) {
            self.forget_turn(&id, &turn);
        }
    }

    /// Sessions that hold a lock or a turn, with duplicates.
    pub(super) fn sessions(&self) -> Vec<u64> {
        let mut all: Vec<u64> = self.owners().held.keys().map(|owner| owner.session).collect();
        all.extend(self.appending().values().map(|a| a.session));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_types::NodeId;
    use std::os::fd::AsRawFd;

    const ALL: LockRequest =
        LockRequest { owner: 1, flock: false, kind: LockKind::Write, start: 0, end: FILE_BYTES_MAX };

    /// Opens a file that has no name any more, so that no test leaves it.
    fn file(name: &str) -> impl Fn() -> Result<OwnedFd, Code> + Clone {
        let path = std::env::temp_dir().join(format!("forebay-locks-{name}-{}", std::process::id()));
        let file = Arc::new(std::fs::File::create(&path).unwrap());
        std::fs::remove_file(path).unwrap();
        move || {
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            let opened = std::fs::OpenOptions::new().read(true).write(true).open(path);
            Ok(opened.unwrap().into())
        }
    }

    #[test]
    fn locks_of_a_process_that_attached_anew_are_its_own_under_its_new_session() {
        let open = file("anew");
        let (locks, id) =
            (RemoteLocks::default(), BackingId { target: 1 << 16, ino: Ino(5), number: 0, stripe: 0 });
        let (first, second) = (session_on(NodeId(2), 7), session_on(NodeId(2), 8));
        let elsewhere = session_on(NodeId(3), 8);
        let lock = |session, wish: LockRequest| locks.lock(session, &id, &wish, open.clone());
        let wish = LockRequest { owner: LOCK_OWNER_OF_NODE | 5, ..ALL };
        lock(first, wish).unwrap();
        assert_eq!(lock(elsewhere, wish), Err(Code::Busy), "another node's with the same number");
        lock(second, LockRequest { kind: LockKind::Read, ..wish }).unwrap();
        assert_eq!(locks.test(second, &id, &wish, open.clone()), Ok(None), "its own is not in its way");
        lock(second, LockRequest { kind: LockKind::Unlock, ..wish }).unwrap();
        // A request of its first session may still arrive.
        assert_eq!(lock(first, wish), Err(Code::Stale));
        lock(elsewhere, wish).unwrap();
    }

    #[test]
    fn locks_exclude_other_owners_and_this_node_s_programs_until_their_process_is_over() {
        let open = file("exclude");
        let (locks, id) =
            (RemoteLocks::default(), BackingId { target: 1 << 16, ino: Ino(5), number: 0, stripe: 0 });
        let lock = |session, wish: LockRequest| locks.lock(session, &id, &wish, open.clone());
        for flock in [false, true] {
            let wish = LockRequest { flock, ..ALL };
            lock(7, wish).unwrap();
            lock(7, wish).unwrap();
            assert_eq!(lock(7, LockRequest { owner: 2, ..wish }), Err(Code::Busy));
            assert_eq!(lock(8, wish), Err(Code::Busy));
            let local = open().unwrap();
            assert_eq!(apply(&local, &wish), Err(Code::Busy), "a program of this node");
            assert!(locks.sessions().contains(&7));
            locks.end(7);
            lock(8, wish).unwrap();
            lock(8, LockRequest { kind: LockKind::Unlock, ..wish }).unwrap();
            apply(&local, &wish).unwrap();
            assert_eq!(lock(8, LockRequest { owner: 3, ..wish }), Err(Code::Busy));
            drop(local);
            locks.end(8);
        }
        // Ranges.
        lock(7, LockRequest { start: 10, end: 19, ..ALL }).unwrap();
        lock(9, LockRequest { start: 20, end: 29, ..ALL }).unwrap();
        let found = locks.test(9, &id, &ALL, open.clone()).unwrap().unwrap();
        assert_eq!((found.start, found.end, found.kind), (10, 19, LockKind::Write));
        lock(7, LockRequest { start: 10, end: 14, kind: LockKind::Unlock, ..ALL }).unwrap();
        lock(9, LockRequest { start: 10, end: 14, ..ALL }).unwrap();
        assert_eq!(lock(9, LockRequest { start: 15, end: 15, kind: LockKind::Read, ..ALL }), Err(Code::Busy));
        lock(7, LockRequest { kind: LockKind::Unlock, ..ALL }).unwrap();
        assert_eq!(locks.test(9, &id, &ALL, open.clone()).unwrap(), None);
    }

    #[test]
    fn lock_that_is_asked_for_behind_the_word_that_its_owner_let_go_is_refused() {
        let open = file("late");
        let (locks, id) =
            (RemoteLocks::default(), BackingId { target: 1 << 16, ino: Ino(5), number: 0, stripe: 0 });
        let lock = |wish: LockRequest| locks.lock(7, &id, &wish, open.clone());
        for flock in [false, true] {
            let (of, unlock) = (|owner| LockRequest { owner, flock, ..ALL }, LockKind::Unlock);
            // A release that overtakes the first lock, and a repeated lock request.
            lock(LockRequest { kind: unlock, ..of(1) }).unwrap();
            assert_eq!(lock(of(1)), Err(Code::Stale));
            lock(of(2)).unwrap();
            lock(LockRequest { kind: unlock, ..of(2) }).unwrap();
            assert_eq!(lock(of(2)), Err(Code::Stale));
            lock(of(3)).unwrap();
            lock(LockRequest { kind: unlock, ..of(3) }).unwrap();
        }
        assert_eq!(locks.sessions(), [0; 0]);
        for owner in 0..2 * LOCK_OWNERS_OVER_KEPT as u64 {
            lock(LockRequest { kind: LockKind::Unlock, owner, ..ALL }).unwrap();
        }
        assert_eq!(locks.owners().over.len(), LOCK_OWNERS_OVER_KEPT);
    }

    #[test]
    fn tag_tells_whose_a_descriptor_is() {
        let id = BackingId { target: 0xabcd_0001, ino: Ino(u64::MAX), number: 255, stripe: u16::MAX };
        for flock in [false, true] {
            let owner = Owner { session: u64::MAX - 1, id, owner: 0, flock };
            assert_eq!(Owner::of_tag(&owner.tag()), Some(owner));
        }
        assert!(Owner::of_tag("lock 1 2 3").is_none() && Owner::of_tag("session 1").is_none());
        assert!(Owner::of_tag("lock 1 2 3 fff 5 6 1").is_none(), "there is no such backing file");
    }

    #[test]
    fn locks_outlive_the_worker_with_the_supervisors_descriptors() {
        let open = file("outlive");
        let (ours, theirs) = crate::store::pair().unwrap();
        let id = BackingId { target: 1 << 16, ino: Ino(5), number: 0, stripe: 0 };
        let locks = RemoteLocks::restored(FdStore::new(ours), &mut Vec::new());
        let wishes = [ALL, LockRequest { flock: true, ..ALL }];
        for wish in &wishes {
            locks.lock(7, &id, wish, open.clone()).unwrap();
        }
        let mut left = Vec::new();
        for _ in &wishes {
            let message = crate::store::receive(theirs.as_fd(), rustix::net::RecvFlags::empty()).unwrap();
            let Some(crate::store::Message::Put(tag, fds)) = message else { panic!("{message:?}") };
            left.push((tag, fds));
        }
        drop(locks);
        let local = open().unwrap();
        for wish in &wishes {
            assert_eq!(apply(&local, wish), Err(Code::Busy), "the worker is gone, its supervisor is not");
        }
        let (ours, _theirs) = crate::store::pair().unwrap();
        let next = RemoteLocks::restored(FdStore::new(ours), &mut left);
        assert_eq!((next.sessions(), left.len()), (vec![7, 7], 0));
        let other = next.lock(8, &id, &ALL, open.clone());
        assert_eq!(other, Err(Code::Busy));
        next.lock(7, &id, &ALL, open.clone()).unwrap();
        let supervisors: Vec<Arc<OwnedFd>> = next.owners().held.values().cloned().collect();
        next.end(7);
        for wish in &wishes {
            apply(&local, wish).unwrap();
        }
        drop(supervisors);
    }

    #[test]
    fn turns_to_append_outlive_the_worker_until_they_end() {
        let (ours, theirs) = crate::store::pair().unwrap();
        let id = |n| BackingId { target: 1 << 16, ino: Ino(n), number: 255, stripe: 3 };
        let locks = RemoteLocks::restored(FdStore::new(ours), &mut Vec::new());
        locks.begin_append(7, &id(1), u64::MAX).unwrap();
        locks.begin_append(7, &id(2), 2).unwrap();
        locks.begin_append(8, &id(3), 3).unwrap();
        locks.end_append(7, &id(2), 2);
        locks.end(8);
        drop(locks);
        // What the supervisor keeps.
        let mut left: Vec<(String, Vec<OwnedFd>)> = Vec::new();
        while let Ok(Some(message)) = crate::store::receive(theirs.as_fd(), rustix::net::RecvFlags::empty()) {
            match message {
                crate::store::Message::Put(tag, fds) => left.push((tag, fds)),
                crate::store::Message::Remove(tag) => left.retain(|(kept, _)| *kept != tag),
                message => panic!("{message:?}"),
            }
        }
        assert_eq!(left.len(), 1, "{left:?}");
        left.push(("append of nobody".to_owned(), Vec::new()));
        let (ours, _theirs) = crate::store::pair().unwrap();
        let next = RemoteLocks::restored(FdStore::new(ours), &mut left);
        assert!(left.is_empty());
        assert_eq!(next.begin_append(9, &id(1), 1), Err(Code::Busy), "its turn is not over");
        next.begin_append(9, &id(2), 1).unwrap();
        next.begin_append(9, &id(3), 1).unwrap();
        next.begin_append(7, &id(1), u64::MAX).unwrap();
        next.end_append(7, &id(1), u64::MAX);
        next.begin_append(9, &id(1), 1).unwrap();
    }

    #[test]
    fn appends_are_one_at_a_time_and_end_with_their_process() {
        let locks = RemoteLocks::default();
        let id = |n| BackingId { target: 1 << 16, ino: Ino(n), number: 1, stripe: 0 };
        locks.begin_append(7, &id(1), 1).unwrap();
        locks.begin_append(7, &id(1), 1).unwrap();
        locks.begin_append(8, &id(2), 1).unwrap();
        assert_eq!(locks.begin_append(7, &id(1), 2), Err(Code::Busy));
        assert_eq!(locks.begin_append(8, &id(1), 1), Err(Code::Busy));
        locks.end_append(8, &id(1), 1);
        assert_eq!(locks.begin_append(8, &id(1), 1), Err(Code::Busy), "it was not its to end");
        locks.end(7);
        locks.begin_append(8, &id(1), 1).unwrap();
        locks.appending().get_mut(&id(1)).unwrap().since_ns = call_clock().checked_sub(HOLD_NS).unwrap();
        locks.begin_append(9, &id(1), 1).unwrap();
    }
}
