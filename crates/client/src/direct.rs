//! Transfers between allocated memory (`program_memory`) and other nodes, from and to the place where the program has the
//! bytes. A part that is not of whole pages, or whose pages were replaced, is copied as any other.

use std::ops::Range;
use std::os::fd::RawFd;

use forebay_ring::call_clock;
use forebay_types::limits::{MOVE_ABOVE_BYTES, PROGRAM_MEMORY_REGISTRATION_S, QUARANTINE_MS};
use forebay_types::Code;

use crate::allocated::PAGE_BYTES;
use crate::attached::Attached;
use crate::far_parts::{Memory, Part};
use crate::memory_slots::{memory_in_use, InUse};
use crate::pool::Pool;

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
        let timeout_s =
            PROGRAM_MEMORY_REGISTRATION_S as libc::time_t + (allocated.bytes >> 30) as libc::time_t;
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
    use crate::allocated::Allocated;
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
            // SAFETY: the test has allocated the memory, and nothing else uses it.
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
