//! Lock requests: flock and fcntl's record locks, taken on the backing file, as the other interfaces do.
//!
//! Each owner has a descriptor of its own that holds its locks: flocks by flock(2), record locks as
//! open-file-description locks, which conflict with the record locks of processes and with one another. The kernel
//! reports in three ways that an owner releases its locks: by an unlock, by a flush when a process closes one of its
//! descriptors, and by the release of an open file. For a program's own open-file-description locks it reports only
//! that release, which is matched by the number of the open. A lock is taken or released while the table of owners is
//! locked, so that every granted lock is in the table and nothing else closes its descriptor.
//!
//! One thread retries all waiting locks, and exists only while there are any, so that no serving thread waits. An
//! INTERRUPT ends a wait. An INTERRUPT that another thread reads before the wait has begun is remembered.
//!
//! If the first backing file of a file is on another node, that node's daemon takes the locks on it, each owner's on a
//! descriptor of its own, as the programs of that node do. Requests to that node are sent while nothing here is
//! locked. The node may have granted a lock whose owner got an error, and may have missed an unlock: such unlocks are
//! sent again until the node acknowledges them.
//!
//! Tests: `lock_table.rs`, and `tests/locks.rs`.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use forebay_client::{leaves_lock_in_doubt, new_lock_owner, LockPlace};
use forebay_types::limits::LOCK_WAITS_MAX;
use forebay_types::{Code, LockKind};

use crate::errno::{check, Errno};
use crate::filesystem::{FileSystem, Outcome};
use crate::handles::Handle;
use crate::lock_table::{Flushed, FuseLock, Held, On, Owner, Wait, PAUSE, PAUSE_MAX};
use crate::opened::reopen;
use forebay_fuse::protocol::{Body, Request, LK_FLOCK};

impl FileSystem {
    fn request(&self, rq: &Request<'_>) -> Result<FuseLock, Errno> {
        let mut f = rq.fields;
        let (handle, owner, start, end) = (f.u64()?, f.u64()?, f.u64()?, f.u64()?);
        let (kind, _pid, flags) = (f.u32()? as i32, f.u32()?, f.u32()?);
        if end < start {
            return Err(Errno(libc::EINVAL));
        }
        let owner = Owner { ino: self.open_ino(rq.node).0, owner, flock: flags & LK_FLOCK != 0 };
        Ok(FuseLock { owner, handle, kind, start, end })
    }

    /// A descriptor for an owner's locks. Record locks for writing need a writable descriptor, and an owner's locks
    /// must stay on one descriptor. So it is writable from the first lock on, whatever the kind of that lock.
    fn lock_descriptor(&self, owner: Owner) -> Result<On, Errno> {
        let parts = self.handles.parts_of(owner.ino);
        let opened;
        let file = match parts.as_deref() {
            Some(Handle::Parts(file, _)) => match file.lock_place() {
                LockPlace::There(locks) => return Ok(On::Elsewhere(locks, new_lock_owner())),
                LockPlace::Here(file) => file,
            },
            _ => {
                let node = self.nodes.opened(owner.ino).ok_or(Errno(libc::EOPNOTSUPP))?;
                opened = node.writable().or_else(|| node.any()).ok_or(Errno(libc::EBADF))?;
                opened.as_fd()
            }
        };
        if owner.flock {
            return reopen(&file, libc::O_RDONLY).map(On::File);
        }
        match reopen(&file, libc::O_RDWR) {
            // ETXTBSY: a program runs from the backing file, so no program writes it.
            Err(Errno(libc::ETXTBSY | libc::EACCES | libc::EROFS)) => reopen(&file, libc::O_RDONLY),
            file => file,
        }
        .map(On::File)
    }

    pub(crate) fn getlk(&self, rq: &Request<'_>, out: &mut Body) -> Result<Outcome, Errno> {
        self.make_whole(self.open_ino(rq.node))?;
        let request = self.request(rq)?;
        let mut record = request.record();
        let elsewhere = {
            let held = self.locks.held();
            let new;
            // On the owner's own descriptor its own locks do not conflict.
            let on = match held.get(request.owner) {
                Some(on) => on,
                None => {
                    new = self.lock_descriptor(request.owner)?;
                    &new
                }
            };
            match on {
                On::File(file) => {
                    // SAFETY: `record` lives over the call.
                    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut record) })?;
                    None
                }
                On::Elsewhere(locks, number) => Some((*locks, *number)),
            }
        };
        if let Some((locks, number)) = elsewhere {
            record.l_type = libc::F_UNLCK as i16;
            if let Some(found) = locks.test(request.elsewhere(number))? {
                let kind = if found.kind == LockKind::Read { libc::F_RDLCK } else { libc::F_WRLCK };
                let (start, end) = (found.start, found.end);
                record = FuseLock { kind, start, end, ..request }.record();
            }
        }
        let end = if record.l_len == 0 { i64::MAX } else { record.l_start + record.l_len - 1 };
        out.u64(record.l_start as u64);
        out.u64(end as u64);
        out.u32(record.l_type as u32);
        // The process that holds an open-file-description lock, such as the mount's own, cannot be determined.
        out.u32(record.l_pid.max(0) as u32);
        Ok(Outcome::Reply)
    }

    /// Takes a lock, without waiting.
    fn take(&self, request: &FuseLock) -> Result<(), Errno> {
        let mut held = self.locks.held();
        let (locks, number) = match held.get(request.owner) {
            Some(On::File(file)) => return request.apply(file),
            Some(On::Elsewhere(locks, number)) => (*locks, *number),
            None => {
                if held.owners >= self.locks.owners_max {
                    return Err(Errno(libc::ENOLCK));
                }
                let on = self.lock_descriptor(request.owner)?;
                let (taken, elsewhere) = match &on {
                    On::File(file) => (request.apply(file), None),
                    On::Elsewhere(locks, number) => (Ok(()), Some((*locks, *number))),
                };
                // Inserted even if the lock has to wait, because it will be retried.
                held.insert(Held {
                    owner: request.owner,
                    handle: request.handle,
                    on,
                    granted: false,
                    flushed: Flushed::Never,
                });
                match elsewhere {
                    None => return taken,
                    Some(elsewhere) => elsewhere,
                }
            }
        };
        drop(held);
        let taken = locks.set(request.elsewhere(number));
        let mut held = self.locks.held();
        let at = |on: &On| matches!(on, On::Elsewhere(_, of) if *of == number);
        let Some(of) = held.get_mut(request.owner).filter(|of| at(&of.on)) else {
            drop(held);
            // The owner was removed meanwhile, and its unlock may have been sent before this lock was granted. After
            // the unlock sent here the other node grants nothing more under the owner's number.
            self.locks.let_go_elsewhere(locks, number, request.owner.flock);
            return Err(Errno(libc::EINTR));
        };
        match taken {
            Ok(()) => of.granted = true,
            // The other node may still grant the lock, to an owner that gets an error and so never releases it.
            Err(code) if leaves_lock_in_doubt(code) && !of.granted => {
                held.remove(request.owner.ino, |of| of.owner == request.owner);
                drop(held);
                self.locks.let_go_elsewhere(locks, number, request.owner.flock);
            }
            Err(_) => {}
        }
        taken.map_err(|code| match code {
            Code::Busy => Errno(libc::EAGAIN),
            Code::NoResources => Errno(libc::ENOLCK),
            // The owner's number has ended at the other node, and by now here too.
            Code::Stale => Errno(libc::EIO),
            code => code.into(),
        })
    }

    /// Takes or releases a lock, without waiting.
    fn set_at_once(&self, rq: &Request<'_>) -> Result<Outcome, Errno> {
        let request = self.request(rq)?;
        if request.kind != libc::F_UNLCK {
            self.take(&request)?;
        } else if request.whole() {
            self.locks.drop_all(request.owner);
        } else {
            let dropped = match self.locks.held().get(request.owner) {
                Some(On::File(file)) => request.apply(file).map(|()| None),
                Some(On::Elsewhere(locks, number)) => Ok(Some((*locks, *number))),
                None => return Ok(Outcome::Reply),
            };
            if let Some((locks, number)) = dropped? {
                locks.set(request.elsewhere(number))?;
            }
            self.locks.try_again();
        }
        Ok(Outcome::Reply)
    }

    /// Takes or releases a lock, and lets it wait if necessary: `reply` is then called with the result. A lock that
    /// must not wait still does so where the release of the conflicting lock may be on its way.
    pub(crate) fn setlk(
        self: &Arc<Self>,
        rq: &Request<'_>,
        waits: bool,
        reply: impl FnOnce(i32) + Send + 'static,
    ) -> Result<Outcome, Errno> {
        self.make_whole(self.open_ino(rq.node))?;
        match self.set_at_once(rq) {
            Err(Errno(libc::EAGAIN)) => {}
            done => return done,
        }
        let request = self.request(rq)?;
        let until = if waits { None } else { self.locks.held().release_due(request.owner) };
        if !waits && until.is_none() {
            return Err(Errno(libc::EAGAIN));
        }
        let mut waits = self.locks.waits();
        if let Some(i) = waits.interrupted.iter().position(|unique| *unique == rq.unique) {
            waits.interrupted.remove(i);
            return Err(Errno(if until.is_some() { libc::EAGAIN } else { libc::EINTR }));
        }
        if waits.list.len() >= LOCK_WAITS_MAX {
            return Err(Errno(if until.is_some() { libc::EAGAIN } else { libc::ENOLCK }));
        }
        if !waits.retry_thread_runs {
            let this = Arc::clone(self);
            let thread = std::thread::Builder::new().name("locks".into()).stack_size(128 * 1024);
            thread.spawn(move || this.retry_locks()).map_err(|_| Errno(libc::ENOLCK))?;
            waits.retry_thread_runs = true;
        }
        // The first retry is immediate: the conflicting lock may have been released since the first attempt.
        let next = Instant::now();
        waits.list.push(Wait {
            request,
            unique: rq.unique,
            pause: PAUSE,
            next,
            until,
            reply: Box::new(reply),
        });
        self.locks.freed.notify_one();
        Ok(Outcome::Silence)
    }

    /// True when the owner's locks are at another node.
    fn is_elsewhere(&self, request: &FuseLock) -> bool {
        matches!(self.locks.held().get(request.owner), Some(On::Elsewhere(..)))
    }

    /// Retries the waiting locks, the longest waiting first, until none is left.
    fn retry_locks(&self) {
        let mut waits = self.locks.waits();
        while !waits.list.is_empty() {
            let (now, mut done) = (Instant::now(), Vec::new());
            let mut i = 0;
            while let Some(wait) = waits.list.get_mut(i) {
                if wait.next > now {
                    i += 1;
                    continue;
                }
                let (unique, request, error) = (wait.unique, wait.request, wait.interrupted());
                let mut is_due = wait.until.is_some_and(|until| until <= now);
                // Set also when the attempt fails, so that each lock is tried once in a round.
                wait.next = wait.until.map_or(now + wait.pause, |until| until.min(now + wait.pause));
                wait.pause = (wait.pause * 2).min(PAUSE_MAX);
                let mut taken;
                if self.is_elsewhere(&request) {
                    waits.trying = Some((unique, false));
                    drop(waits);
                    taken = self.take(&request);
                    waits = self.locks.waits();
                    let interrupted = waits.trying.take().is_some_and(|(_, interrupted)| interrupted);
                    if interrupted && taken == Err(Errno(libc::EAGAIN)) {
                        (taken, is_due) = (Err(Errno(error)), true);
                    }
                } else {
                    taken = self.take(&request);
                }
                // Other waits may have been added and removed while nothing was locked.
                if is_due && taken == Err(Errno(libc::EAGAIN)) {
                    self.locks.held().no_release_came(request.owner);
                }
                let Some(at) = waits.list.iter().position(|wait| wait.unique == unique) else { continue };
                if taken == Err(Errno(libc::EAGAIN)) && !is_due {
                    i = at + 1;
                } else {
                    done.push((waits.list.remove(at), taken.err().map_or(0, |e| e.0)));
                    i = at;
                }
            }
            if !done.is_empty() {
                drop(waits);
                for (wait, error) in done {
                    (wait.reply)(error);
                }
                waits = self.locks.waits();
                continue;
            }
            let next = waits.list.iter().map(|wait| wait.next).min().unwrap_or(now);
            let pause = next.saturating_duration_since(Instant::now());
            waits = self.locks.freed.wait_timeout(waits, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
        waits.retry_thread_runs = false;
    }
}
