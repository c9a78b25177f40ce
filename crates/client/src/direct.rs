//! Transfers between allocated memory (`program_memory`) and other nodes, from and to the place where the program has the
//! bytes. A part that is not of whole pages, or whose pages were replaced, is copied as any other.

use std::ops::Range;
use std::os::fd::RawFd;

use forebay_ring::call_clock;
use forebay_types::limits::{MOVE_ABOVE_BYTES, PROGRAM_MEMORY_PAUSE_MS, QUARANTINE_MS};
use forebay_types::Code;

use crate::attached::Attached;
use crate::far_parts::{Memory, Part};
use crate::memory_slots::{memory_in_use, InUse};
use crate::pool::Pool;
use crate::program_memory::{Allocated, PAGE_BYTES};

/// How long a put or a get waits until its memory is registered, and as many seconds more as the memory has GiB.
const REGISTRATION_TIMEOUT_S: libc::time_t = 1;

/// What this node's daemon has of allocated memory.
#[derive(Debug, Default)]
pub(crate) struct Registration {
    current: Option<Registered>,
    /// Those that are not used again, and that the daemon may have.
    to_withdraw: Vec<Registered>,
    /// A thread exchanges messages with the daemon about it.
    is_under_way: bool,
    /// When the daemon last refused it, gave no answer, or a registration ended.
    refused_ns: Option<u64>,
}

/// Memory that a worker has registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Registered {
    /// The process's session.
    session: u64,
    /// The worker's epoch.
    epoch: u64,
    /// Its number there.
    number: u64,
}

impl Allocated {
    /// Has the memory registered with the worker that serves the process's session, unless it is: its number and the
    /// worker's epoch. `None` if it must be copied for now. Other threads do not wait for the answer.
    pub(crate) fn register(&self, attached: &Attached, timeout_s: libc::time_t) -> Option<(u64, u64)> {
        let (session, epoch) = (attached.reply.session, attached.ring.epoch());
        if attached.reply.nodes <= 1 {
            return None;
        }
        let mut to_withdraw = match self.transfers().registration.begin(session, epoch, call_clock()) {
            Begun::Registered(number) => return Some((number, epoch)),
            Begun::Refused => return None,
            Begun::Withdrawing(to_withdraw) => to_withdraw,
        };
        let new = self.exchange(session, &mut to_withdraw, timeout_s);
        let epoch_after = attached.ring.epoch();
        let mut transfers = self.transfers();
        let registration = &mut transfers.registration;
        registration.to_withdraw.append(&mut to_withdraw);
        (registration.is_under_way, registration.refused_ns) = (false, Some(call_clock()));
        let (number, is_registered) = new?;
        let registered = Registered { session, epoch: epoch_after, number };
        if !is_registered || epoch_after != epoch {
            // It is unknown whether a worker has registered it, and which.
            registration.to_withdraw.push(registered);
            return None;
        }
        (registration.current, registration.refused_ns) = (Some(registered), None);
        Some((number, epoch))
    }

    /// Withdraws what is not used again, and registers the memory. Returns its number, and whether the daemon has said
    /// that it is registered; `None` if it certainly is not.
    fn exchange(
        &self,
        session: u64,
        to_withdraw: &mut Vec<Registered>,
        timeout_s: libc::time_t,
    ) -> Option<(u64, bool)> {
        self.withdraw_all(to_withdraw);
        if !to_withdraw.is_empty() {
            return None;
        }
        let (memory, number) = (self.memory()?, random_number()?);
        match self.pool.address().register_memory(session, number, memory, timeout_s) {
            Ok(answer) => answer.ok().map(|()| (number, true)),
            Err(_) => Some((number, false)),
        }
    }

    /// Removes those that the daemon does not have any longer.
    fn withdraw_all(&self, to_withdraw: &mut Vec<Registered>) {
        while let Some(one) = to_withdraw.last() {
            if self.pool.address().withdraw_memory(one.session, one.number).is_err() {
                return;
            }
            to_withdraw.pop();
        }
    }

    /// Has it withdrawn, before it is freed. If the daemon does not answer, it has the memory until this process ends.
    pub(crate) fn withdraw(&self) {
        let registration = std::mem::take(&mut self.transfers().registration);
        let mut all = registration.to_withdraw;
        all.extend(registration.current);
        self.withdraw_all(&mut all);
    }
}

/// How a registration begins.
#[derive(PartialEq, Eq, Debug)]
enum Begun {
    /// It is registered, under this number.
    Registered(u64),
    /// It is not registered for now.
    Refused,
    /// These are to be withdrawn, and then it is to be registered.
    Withdrawing(Vec<Registered>),
}

impl Registration {
    fn begin(&mut self, session: u64, epoch: u64, now_ns: u64) -> Begun {
        let is_valid = |current: &Registered| current.session == session && current.epoch == epoch;
        if let Some(current) = self.current.filter(is_valid) {
            return Begun::Registered(current.number);
        }
        let pause_ns = PROGRAM_MEMORY_PAUSE_MS * 1_000_000;
        if self.is_under_way || self.refused_ns.is_some_and(|refused| now_ns < refused + pause_ns) {
            return Begun::Refused;
        }
        // The worker may serve an earlier session of this process, too. One that has ended has none.
        self.to_withdraw.extend(self.current.take());
        self.to_withdraw.retain(|one| one.epoch == epoch);
        self.is_under_way = true;
        Begun::Withdrawing(std::mem::take(&mut self.to_withdraw))
    }

    /// A request that named this number has failed.
    fn end(&mut self, number: u64) {
        if let Some(current) = self.current.take_if(|current| current.number == number) {
            self.to_withdraw.push(current);
            self.refused_ns = Some(call_clock());
        }
    }
}

/// A number that no other process guesses; never 0.
fn random_number() -> Option<u64> {
    let mut bytes = [0; 8];
    // SAFETY: the bytes are writable for the call.
    let n = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    (n == bytes.len() as isize).then(|| u64::from_le_bytes(bytes).max(1))
}

/// A place in memory that the network reads or writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DirectPlace {
    /// The memory's number.
    pub(crate) number: u64,
    /// Offset in the memory.
    pub(crate) at: u32,
}

/// Allocated memory that a call moves bytes from or to.
pub(crate) struct Direct {
    /// It, which this process has allocated.
    in_use: InUse,
    /// Where the caller's memory begins in it.
    from: usize,
    reads: bool,
    /// The number under which it is registered, and the epoch of the worker that has it.
    registered: (u64, u64),
    /// A part has failed: the others are copied.
    is_given_up: bool,
}

impl Pool {
    /// The caller's memory of a call of `total` bytes, if this process has allocated it, and it is registered with this
    /// node's daemon.
    pub(crate) fn direct(&'static self, attached: &Attached, memory: Memory, total: usize) -> Option<Direct> {
        if total <= MOVE_ABOVE_BYTES {
            return None;
        }
        let (start, reads) = match memory {
            Memory::Into(to) => (to.cast_const(), true),
            Memory::From(from) => (from, false),
        };
        let in_use = memory_in_use(start, total).ok()??;
        let allocated = in_use.allocated().filter(|one| std::ptr::eq(one.pool, self))?;
        let timeout_s = REGISTRATION_TIMEOUT_S + (allocated.bytes >> 30) as libc::time_t;
        let registered = allocated.register(attached, timeout_s)?;
        let from = start as usize - in_use.slot().range().start;
        Some(Direct { in_use, from, reads, registered, is_given_up: false })
    }
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Direct {
    fn range(&self, part: &Part) -> Range<usize> {
        self.from + part.at..self.from + part.at + part.len
    }

    /// The place of a part, if it can be transferred without a copy.
    pub(crate) fn place(&self, part: &Part) -> Option<DirectPlace> {
        let range = self.range(part);
        let is_whole = range.start.is_multiple_of(PAGE_BYTES) && range.end.is_multiple_of(PAGE_BYTES);
        if self.is_given_up || !is_whole || part.len <= MOVE_ABOVE_BYTES {
            return None;
        }
        let ((number, _), at) = (self.registered, u32::try_from(range.start).ok()?);
        let transfers = self.in_use.allocated()?.transfers();
        let is_replaced = transfers.replaced.iter().any(|one| overlap(one, &range));
        (!is_replaced).then_some(DirectPlace { number, at })
    }

    /// The request of a part has failed: the worker with the given epoch refused it, or its outcome is unknown. Later parts
    /// are copied. After that, nothing reads or writes the part's pages but this process.
    ///
    /// # Errors
    /// [`Code::Io`] if that is not so, as there is no memory. The memory is not freed then while a transfer may be in flight.
    pub(crate) fn failed(
        &mut self,
        part: &Part,
        place: DirectPlace,
        refused_by: Option<u64>,
    ) -> Result<(), Code> {
        self.is_given_up = true;
        if refused_by.is_some_and(|by| by != self.registered.1) {
            // The worker that had registered the memory has ended, and nothing can be in flight for it. A later call has
            // the memory registered with the new one.
            return Ok(());
        }
        let Some(allocated) = self.in_use.allocated() else { return Err(Code::Io) };
        let mut transfers = allocated.transfers();
        transfers.registration.end(place.number);
        // What was refused is not read again, but a transfer may still write.
        if refused_by.is_some() && !self.reads {
            return Ok(());
        }
        let range = self.range(part);
        if transfers.replaced.iter().any(|one| one.start <= range.start && range.end <= one.end) {
            return Ok(());
        }
        let start = self.in_use.slot().range().start + range.start;
        // SAFETY: whole pages of the slot's mapping, which is not unmapped while this call uses it. They are the call's until
        // it ends: other threads do not access the range of a get, and read that of a put at most. The memfd has them.
        let replaced = unsafe { replace(start, range.clone(), !self.reads, allocated.memory()) };
        transfers.replaced.push(range);
        if replaced.is_err() {
            self.in_use.slot().keep_until(call_clock() + QUARANTINE_MS * 1_000_000);
        }
        replaced
    }
}

/// Puts other pages in the place of those of a range of a memfd that is mapped from an address on, with the same contents
/// if `keeps`, else with zeros.
///
/// # Errors
/// [`Code::Io`] if there is no memory or no mapping left: the range has the pages it had.
///
/// # Safety
/// The range is of whole pages, mapped, and nothing writes to it.
unsafe fn replace(start: usize, range: Range<usize>, keeps: bool, memory: Option<RawFd>) -> Result<(), Code> {
    let (place, bytes) = (start as *mut libc::c_void, range.len());
    let (protection, anonymous) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, which then takes the place of the range. Both have as many bytes.
    unsafe {
        let pages = libc::mmap(std::ptr::null_mut(), bytes, protection, anonymous, -1, 0);
        if pages == libc::MAP_FAILED {
            return Err(Code::Io);
        }
        if keeps {
            std::ptr::copy_nonoverlapping(start as *const u8, pages.cast(), bytes);
        }
        let moves = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        if libc::mremap(pages, bytes, bytes, moves, place) != libc::MAP_FAILED {
            return Ok(());
        }
        libc::munmap(pages, bytes);
        // The kernel may have unmapped the range before it failed. What else the process maps must not get the addresses.
        let (fixed, offset) = (libc::MAP_SHARED | libc::MAP_FIXED, range.start as libc::off_t);
        let has_pages = memory.is_some_and(|memory| {
            libc::mmap(place, bytes, protection, fixed, memory, offset) != libc::MAP_FAILED
        });
        if !has_pages {
            libc::mmap(place, bytes, protection, anonymous | libc::MAP_FIXED, -1, 0);
        }
    }
    Err(Code::Io)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::Role;
    use crate::memory_slots::publish_allocated;
    use crate::program_memory::free_memory;
    use forebay_ring::{memfd_sealed, Mapping, Seal};
    use forebay_types::{BackingId, Ino};
    use std::os::fd::{AsFd, AsRawFd, OwnedFd};

    const BYTES: usize = 16 * PAGE_BYTES;

    fn memory() -> (OwnedFd, Mapping) {
        memfd_sealed(c"test", BYTES, Seal::Size).unwrap()
    }

    fn pool() -> &'static Pool {
        let pool = Pool::prepare_as(std::path::Path::new("/none"), Role::Tool).unwrap();
        Box::leak(Box::new(pool))
    }

    /// A mapping in the table, that is freed with it.
    fn allocated(memory: OwnedFd, mapping: Mapping) -> *mut u8 {
        let start = mapping.start().as_ptr();
        std::mem::forget(mapping);
        let allocated = Allocated::new(pool(), memory, BYTES).unwrap();
        allocated.transfers().replaced.reserve(4);
        publish_allocated(start as usize..start as usize + BYTES, Some(Box::new(allocated))).unwrap();
        start
    }

    /// The exit status of a child that does this.
    fn in_child(done: impl FnOnce() -> bool) -> i32 {
        // SAFETY: the child does little, and ends.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::alarm(20);
                libc::_exit(i32::from(!done()));
            }
            let mut status = -1;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            status
        }
    }

    #[test]
    fn registration_of_the_same_worker_is_withdrawn_when_the_session_changes() {
        let (one, two, ended) = (
            Registered { session: 1, epoch: 5, number: 10 },
            Registered { session: 1, epoch: 5, number: 11 },
            Registered { session: 1, epoch: 4, number: 12 },
        );
        let mut registration =
            Registration { current: Some(one), to_withdraw: vec![two, ended], ..Default::default() };
        assert_eq!(registration.begin(1, 5, 0), Begun::Registered(10));
        assert_eq!(registration.begin(2, 5, 0), Begun::Withdrawing(vec![two, one]));
        assert_eq!(registration.begin(2, 5, 0), Begun::Refused, "another thread is at it");
        registration.is_under_way = false;
        (registration.current, registration.refused_ns) = (Some(one), Some(7));
        let over = 7 + PROGRAM_MEMORY_PAUSE_MS * 1_000_000;
        assert_eq!(registration.begin(2, 6, over - 1), Begun::Refused);
        assert_eq!(registration.begin(2, 6, over), Begun::Withdrawing(Vec::new()), "its worker has ended");
        registration.current = Some(two);
        registration.end(10);
        assert_eq!((registration.current, registration.to_withdraw.len()), (Some(two), 0));
        registration.end(11);
        assert_eq!((registration.current, &registration.to_withdraw[..]), (None, &[two][..]));
    }

    #[test]
    fn replaced_pages_have_the_same_bytes_or_none_and_are_not_the_memfds() {
        let (fd, mapping) = memory();
        let start = mapping.start().as_ptr();
        let of_daemon = Mapping::new(fd.as_fd(), BYTES, true).unwrap();
        // SAFETY: within the mapping, which nothing else uses.
        unsafe {
            start.write_bytes(7, BYTES);
            let at = |page: usize| start as usize + page * PAGE_BYTES;
            let pages = |first: usize| first * PAGE_BYTES..(first + 2) * PAGE_BYTES;
            replace(at(2), pages(2), true, Some(fd.as_raw_fd())).unwrap();
            replace(at(6), pages(6), false, None).unwrap();
            of_daemon.start().as_ptr().write_bytes(9, BYTES);
            for (page, byte) in [(1, 9), (2, 7), (3, 7), (4, 9), (6, 0), (7, 0), (8, 9)] {
                let bytes = std::slice::from_raw_parts(at(page) as *const u8, PAGE_BYTES);
                assert!(bytes.iter().all(|one| *one == byte), "page {page}");
            }
        }
    }

    #[test]
    fn memory_whose_pages_cannot_be_replaced_is_kept_and_not_freed_at_once() {
        let status = in_child(|| {
            let (fd, mapping) = memory();
            let start = allocated(fd, mapping);
            let in_use = memory_in_use(start, BYTES).unwrap().unwrap();
            let mut direct = Direct { in_use, from: 0, reads: true, registered: (5, 1), is_given_up: false };
            let id = BackingId { target: 1 << 16, ino: Ino(5), number: 0, stripe: 0 };
            let part = Part { id, offset: 0, at: 0, len: BYTES };
            let place = DirectPlace { number: 5, at: 0 };
            // SAFETY: the memory is the test's.
            unsafe {
                start.write_bytes(7, BYTES);
                let none = libc::rlimit { rlim_cur: 1, rlim_max: 1 };
                libc::setrlimit(libc::RLIMIT_AS, &none);
                let is_refused = direct.failed(&part, place, None) == Err(Code::Io);
                let is_there = (0..BYTES).all(|i| start.add(i).read_volatile() == 7);
                direct.is_given_up = false;
                let is_copied = direct.place(&part).is_none();
                drop(direct);
                is_refused && is_there && is_copied && free_memory(start) == Err(Code::Busy)
            }
        });
        assert_eq!(status, 0);
    }

    #[test]
    fn child_neither_waits_for_a_lock_of_its_parent_nor_uses_the_registration() {
        let (fd, mapping) = memory();
        let start = allocated(fd, mapping);
        let in_use = memory_in_use(start, BYTES).unwrap().unwrap();
        // As another thread of the parent may hold it.
        let transfers = in_use.allocated().unwrap().transfers();
        let status = in_child(|| {
            let own = memory_in_use(start, BYTES);
            let is_copied = matches!(&own, Ok(Some(own)) if own.allocated().is_none());
            drop(own);
            // SAFETY: not used again.
            is_copied && unsafe { free_memory(start) } == Ok(())
        });
        assert_eq!(status, 0);
        drop(transfers);
        drop(in_use);
        // SAFETY: not used again.
        assert_eq!(unsafe { free_memory(start) }, Ok(()));
    }
}
