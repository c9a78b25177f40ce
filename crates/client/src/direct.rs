//! Transfers between allocated memory (`program_memory`) and other nodes, from and to the place where the program has the
//! bytes. A part that is not of whole pages, or whose pages were replaced, is copied as any other.

use std::ops::Range;

use forebay_ring::call_clock;
use forebay_types::limits::{MOVE_ABOVE_BYTES, PROGRAM_MEMORY_PAUSE_MS};
use forebay_types::Code;

use crate::attached::Attached;
use crate::far_parts::{Memory, Part};
use crate::pool::Pool;
use crate::program_memory::{memory_in_use, Allocated, InUse, Slot, PAGE_BYTES};

/// What this node's daemon has of allocated memory.
#[derive(Debug, Default)]
pub(crate) struct Registration {
    current: Option<Registered>,
    /// One that is not used again. The daemon may not have noticed.
    ended: Option<Registered>,
    /// When the daemon refused it, or a registration ended.
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
    /// Has the memory registered with the worker that serves the process's session, unless it is. `None` if it must be
    /// copied for now.
    pub(crate) fn register(&mut self, attached: &Attached) -> Option<(u64, u64)> {
        let (session, epoch) = (attached.reply.session, attached.ring.epoch());
        if self.process != std::process::id() || attached.reply.nodes <= 1 {
            return None;
        }
        let registration = &mut self.registration;
        if let Some(now) = registration.current.filter(|now| now.session == session && now.epoch == epoch) {
            return Some((now.number, epoch));
        }
        // One with a worker that has ended is none.
        registration.current = None;
        let (now, pause_ns) = (call_clock(), PROGRAM_MEMORY_PAUSE_MS * 1_000_000);
        if registration.refused_ns.is_some_and(|refused| now < refused + pause_ns) {
            return None;
        }
        registration.refused_ns = Some(now);
        if let Some(ended) = registration.ended.take() {
            self.pool.address().withdraw_memory(ended.session, ended.number);
        }
        let memory = self.memory()?;
        let number = self.pool.address().register_memory(session, memory).ok()?;
        let registered = Registered { session, epoch, number };
        if attached.ring.epoch() != epoch {
            // It is unknown which worker has registered it.
            self.registration.ended = Some(registered);
            return None;
        }
        self.registration = Registration { current: Some(registered), ..Default::default() };
        Some((number, epoch))
    }

    /// Has it withdrawn, before it is freed.
    pub(crate) fn withdraw(&self) {
        if self.process != std::process::id() {
            return;
        }
        for one in [self.registration.ended, self.registration.current].into_iter().flatten() {
            self.pool.address().withdraw_memory(one.session, one.number);
        }
    }

    /// A request that named this number has failed.
    fn end_registration(&mut self, number: u64) {
        if let Some(current) = self.registration.current.filter(|current| current.number == number) {
            let refused_ns = Some(call_clock());
            self.registration = Registration { current: None, ended: Some(current), refused_ns };
        }
    }
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
    slot: &'static Slot,
    /// Where the caller's memory begins in it.
    from: usize,
    reads: bool,
    /// The number under which it is registered, and the epoch of the worker that has it.
    registered: (u64, u64),
    /// A part has failed: the others are copied.
    is_given_up: bool,
    _in_use: InUse,
}

impl Pool {
    /// The caller's memory of a call of `total` bytes, if it is allocated, and registered with this node's daemon.
    pub(crate) fn direct(&'static self, attached: &Attached, memory: Memory, total: usize) -> Option<Direct> {
        if total <= MOVE_ABOVE_BYTES {
            return None;
        }
        let (start, reads) = match memory {
            Memory::Into(to) => (to.cast_const(), true),
            Memory::From(from) => (from, false),
        };
        let in_use = memory_in_use(start, total).ok()??;
        let slot = in_use.slot()?;
        let mut allocated = slot.allocated();
        let allocated = allocated.as_mut().filter(|one| std::ptr::eq(one.pool, self))?;
        let registered = allocated.register(attached)?;
        let from = start as usize - slot.range().start;
        Some(Direct { slot, from, reads, registered, is_given_up: false, _in_use: in_use })
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
        let allocated = self.slot.allocated();
        let is_replaced = allocated.as_ref()?.replaced.iter().any(|one| overlap(one, &range));
        (!is_replaced).then_some(DirectPlace { number, at })
    }

    /// The request of a part has failed: the worker with the given epoch refused it, or its outcome is unknown. Later parts
    /// are copied. After that, nothing reads or writes the part's pages but this process.
    ///
    /// # Errors
    /// [`Code::Io`] if that is not so, as there is no memory.
    pub(crate) fn failed(
        &mut self,
        part: &Part,
        place: DirectPlace,
        refused_by: Option<u64>,
    ) -> Result<(), Code> {
        let mut allocated = self.slot.allocated();
        let Some(allocated) = allocated.as_mut() else { return Err(Code::Io) };
        self.is_given_up = true;
        if refused_by.is_some_and(|by| by != self.registered.1) {
            // The worker that had registered the memory has ended, and nothing can be in flight for it. A later call has
            // the memory registered with the new one.
            return Ok(());
        }
        allocated.end_registration(place.number);
        // What was refused is not read again, but a transfer may still write.
        if refused_by.is_some() && !self.reads {
            return Ok(());
        }
        let range = self.range(part);
        if allocated.replaced.iter().any(|one| one.start <= range.start && range.end <= one.end) {
            return Ok(());
        }
        let start = self.slot.range().start + range.start;
        // SAFETY: whole pages of the slot's mapping, which is not unmapped while this call uses it. They are the call's until
        // it ends: other threads do not access the range of a get, and read that of a put at most.
        unsafe { replace(start, range.len(), !self.reads) }?;
        allocated.replaced.push(range);
        Ok(())
    }
}

/// Puts other pages in the place of those of a range, with the same contents if `keeps`, else with zeros.
///
/// # Safety
/// The range is of whole pages, mapped, and nothing writes to it.
unsafe fn replace(start: usize, bytes: usize, keeps: bool) -> Result<(), Code> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, which then takes the place of the range. Both have as many bytes.
    unsafe {
        let pages = libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0);
        if pages == libc::MAP_FAILED {
            return Err(Code::Io);
        }
        if keeps {
            std::ptr::copy_nonoverlapping(start as *const u8, pages.cast(), bytes);
        }
        let moves = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        if libc::mremap(pages, bytes, bytes, moves, start as *mut libc::c_void) == libc::MAP_FAILED {
            libc::munmap(pages, bytes);
            return Err(Code::Io);
        }
    }
    Ok(())
}
