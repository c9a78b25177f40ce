//! The table of the program's memory (`program_memory`): its ranges, and the calls that use them.
//!
//! The table has no lock, because a child may have been made by fork(2) while another thread held one. A child has its
//! parent's ranges, and none of the calls that used them: the state of a slot has the number of the process whose calls are
//! counted there, and a call or a release in another process begins to count anew.
//!
//! A call counts as a user of its memory, and memory in use is not released.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use forebay_ring::call_clock;
use forebay_types::limits::PROGRAM_MEMORIES_MAX;
use forebay_types::Code;

use crate::allocated::Allocated;

/// A slot's state: its kind in two bits, the number of the process that set it in 30, and the number of calls that use its
/// memory in 32. It is 0 if the slot is free.
const KIND: u64 = 3 << 62;
/// It is being filled or emptied.
const TAKEN: u64 = 1 << 62;
/// Its range is compared to the others.
const OFFERED: u64 = 2 << 62;
/// It has a range.
const LIVE: u64 = 3 << 62;
const USERS: u64 = u32::MAX as u64;
const PROCESS_SHIFT: u32 = 32;

fn kind_of(state: u64) -> u64 {
    state & KIND
}

fn process_of(state: u64) -> u64 {
    (state & !KIND) >> PROCESS_SHIFT
}

/// One range of memory.
pub(crate) struct Slot {
    state: AtomicU64,
    start: AtomicUsize,
    bytes: AtomicUsize,
    /// The number of the process that filled it.
    owner: AtomicU64,
    /// Null for memory that the program has registered. Only the owner uses it.
    allocated: AtomicPtr<Allocated>,
    is_allocated: AtomicBool,
    /// Until this time of [`call_clock`] the memory is not released.
    kept_until_ns: AtomicU64,
}

static SLOTS: [Slot; PROGRAM_MEMORIES_MAX] = [const { Slot::new() }; PROGRAM_MEMORIES_MAX];
/// Slots that have ever been used are below this.
static USED: AtomicUsize = AtomicUsize::new(0);
/// All ranges there have been are between these addresses: other memory needs no search.
static LOWEST: AtomicUsize = AtomicUsize::new(usize::MAX);
static HIGHEST: AtomicUsize = AtomicUsize::new(0);

/// A page whose first word is the number of this process. It is 0 in a child until its first call.
static PROCESS: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());
/// The last number of a process: a child's is above those of all its ancestors.
static LAST_PROCESS: AtomicU64 = AtomicU64::new(0);
const PAGE_BYTES: usize = 4096;

/// The page of [`PROCESS`], which is made before the first slot is filled. Kernels before 4.14 do not clear it in a child,
/// which then counts as its parent.
fn process_page() -> Result<&'static AtomicU64, Code> {
    let known = PROCESS.load(Ordering::Acquire);
    // SAFETY: never unmapped once it is published.
    if let Some(page) = unsafe { known.as_ref() } {
        return Ok(page);
    }
    // SAFETY: a fresh anonymous mapping, large and aligned enough for the word; unmapped if no other thread has seen it.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let page = libc::mmap(std::ptr::null_mut(), PAGE_BYTES, protection, flags, -1, 0);
        if page == libc::MAP_FAILED {
            return Err(Code::NoMemory);
        }
        libc::madvise(page, PAGE_BYTES, libc::MADV_WIPEONFORK);
        let made: *mut AtomicU64 = page.cast();
        match PROCESS.compare_exchange(known, made, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(&*made),
            Err(other) => {
                libc::munmap(page, PAGE_BYTES);
                Ok(&*other)
            }
        }
    }
}

/// The number of this process.
fn process() -> Result<u64, Code> {
    let word = process_page()?;
    match word.load(Ordering::Relaxed) {
        0 => {
            let new = LAST_PROCESS.fetch_add(1, Ordering::Relaxed) + 1;
            Ok(word
                .compare_exchange(0, new, Ordering::Relaxed, Ordering::Relaxed)
                .map_or_else(|now| now, |_| new))
        }
        process => Ok(process),
    }
}

impl Slot {
    const fn new() -> Slot {
        Slot {
            state: AtomicU64::new(0),
            start: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            owner: AtomicU64::new(0),
            allocated: AtomicPtr::new(std::ptr::null_mut()),
            is_allocated: AtomicBool::new(false),
            kept_until_ns: AtomicU64::new(0),
        }
    }

    /// Its addresses.
    pub(crate) fn range(&self) -> Range<usize> {
        let start = self.start.load(Ordering::Acquire);
        start..start + self.bytes.load(Ordering::Acquire)
    }

    /// Keeps its memory from being released until a time of [`call_clock`].
    pub(crate) fn keep_until(&self, until_ns: u64) {
        self.kept_until_ns.fetch_max(until_ns, Ordering::Relaxed);
    }

    /// Counts a call of a process as a user, unless the slot's memory is being released.
    fn enter(&self, process: u64) -> bool {
        let mut state = self.state.load(Ordering::Acquire);
        while kind_of(state) == LIVE {
            let entered = match process_of(state) == process {
                true => state + 1,
                false => LIVE | process << PROCESS_SHIFT | 1,
            };
            match self.state.compare_exchange_weak(state, entered, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }

    /// Makes it one that a process fills or empties, unless a call of the process uses it. `false` if it has no range.
    fn take(&self, process: u64) -> Result<bool, Code> {
        let mut state = self.state.load(Ordering::Acquire);
        while kind_of(state) == LIVE {
            if process_of(state) == process {
                let kept_until_ns = self.kept_until_ns.load(Ordering::Relaxed);
                if state & USERS != 0 || (kept_until_ns != 0 && call_clock() < kept_until_ns) {
                    return Err(Code::Busy);
                }
            }
            let taken = TAKEN | process << PROCESS_SHIFT;
            match self.state.compare_exchange_weak(state, taken, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Ok(true),
                Err(now) => state = now,
            }
        }
        Ok(false)
    }

    /// What a slot that this process has taken had of allocated memory. `None` if another process has allocated it: then
    /// this process's descriptor is closed, and nothing else touched, as threads may have been using it at the fork.
    pub(crate) fn take_allocated(&self) -> Option<Box<Allocated>> {
        let allocated = self.allocated.swap(std::ptr::null_mut(), Ordering::AcqRel);
        let is_own = process() == Ok(self.owner.load(Ordering::Acquire));
        // SAFETY: `publish_allocated` was given the box. No call uses the slot, and no later one finds it.
        unsafe {
            match allocated.as_ref() {
                Some(_) if is_own => return Some(Box::from_raw(allocated)),
                Some(of_parent) => of_parent.close(),
                None => {}
            }
        }
        None
    }

    /// Makes it free, after it was taken.
    pub(crate) fn release(&self) {
        self.state.store(0, Ordering::Release);
    }

    fn fill(&self, range: &Range<usize>, allocated: Option<Box<Allocated>>, is_allocated: bool, owner: u64) {
        self.start.store(range.start, Ordering::Release);
        self.bytes.store(range.len(), Ordering::Release);
        self.owner.store(owner, Ordering::Release);
        self.is_allocated.store(is_allocated, Ordering::Release);
        self.kept_until_ns.store(0, Ordering::Relaxed);
        self.allocated.store(allocated.map_or(std::ptr::null_mut(), Box::into_raw), Ordering::Release);
        LOWEST.fetch_min(range.start, Ordering::Relaxed);
        HIGHEST.fetch_max(range.end, Ordering::Relaxed);
    }

    fn overlaps(&self, range: &Range<usize>) -> bool {
        let own = self.range();
        own.start < range.end && range.start < own.end
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Slot({:x?})", self.range())
    }
}

/// A call that uses memory of the table, until it is dropped.
#[derive(Debug)]
pub struct InUse {
    slot: &'static Slot,
    process: u64,
}

impl InUse {
    /// True for uses of the same allocated or registered memory.
    pub fn is_of_same(&self, other: &InUse) -> bool {
        std::ptr::eq(self.slot, other.slot)
    }

    pub(crate) fn slot(&self) -> &'static Slot {
        self.slot
    }

    /// The memory, if this process has allocated it. `None` for the program's own, and in a child of the process that
    /// allocated it.
    pub(crate) fn allocated(&self) -> Option<&Allocated> {
        let is_own = self.slot.owner.load(Ordering::Acquire) == self.process;
        let allocated = self.slot.allocated.load(Ordering::Acquire);
        if !is_own {
            return None;
        }
        // SAFETY: it is not freed while this counts as a user.
        unsafe { allocated.as_ref() }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let mut state = self.slot.state.load(Ordering::Relaxed);
        // A child that was made during the call has begun to count anew.
        while kind_of(state) == LIVE && process_of(state) == self.process && state & USERS > 0 {
            match self.slot.state.compare_exchange_weak(
                state,
                state - 1,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return,
                Err(now) => state = now,
            }
        }
    }
}

fn slots() -> &'static [Slot] {
    &SLOTS[..USED.load(Ordering::SeqCst)]
}

/// Marks memory as used by a call, if it is allocated or registered: `forebay_free` and `forebay_unregister` refuse it
/// while the result lives. `None` for other memory. Allocated memory hides a registered range that was left there.
///
/// # Errors
/// [`Code::Fault`] for a range that begins in allocated memory and ends beyond it.
#[inline]
pub fn memory_in_use(start: *const u8, bytes: usize) -> Result<Option<InUse>, Code> {
    let start = start as usize;
    if start < LOWEST.load(Ordering::Relaxed) || start >= HIGHEST.load(Ordering::Relaxed) || bytes == 0 {
        return Ok(None);
    }
    search(start, bytes, process()?)
}

fn search(start: usize, bytes: usize, process: u64) -> Result<Option<InUse>, Code> {
    for is_allocated in [true, false] {
        let is_meant = |slot: &Slot| {
            slot.is_allocated.load(Ordering::Acquire) == is_allocated && slot.range().contains(&start)
        };
        for slot in slots() {
            if kind_of(slot.state.load(Ordering::Acquire)) != LIVE || !is_meant(slot) || !slot.enter(process)
            {
                continue;
            }
            let used = InUse { slot, process };
            // It may have become another's before it was entered.
            if !is_meant(slot) {
                continue;
            }
            if slot.range().end - start < bytes && is_allocated {
                return Err(Code::Fault);
            }
            return Ok(Some(used));
        }
    }
    Ok(None)
}

/// A slot that is to be filled, and the number of this process.
fn vacant() -> Result<(usize, &'static Slot, u64), Code> {
    let process = process()?;
    for (i, slot) in SLOTS.iter().enumerate() {
        let state = slot.state.load(Ordering::Relaxed);
        // A thread of the parent was filling or emptying it at the fork.
        let is_left = matches!(kind_of(state), TAKEN | OFFERED) && process_of(state) != process;
        let taken = TAKEN | process << PROCESS_SHIFT;
        if (state == 0 || is_left)
            && slot.state.compare_exchange(state, taken, Ordering::SeqCst, Ordering::Relaxed).is_ok()
        {
            USED.fetch_max(i + 1, Ordering::SeqCst);
            return Ok((i, slot, process));
        }
    }
    Err(Code::NoResources)
}

/// The other slots that have something of a range, or are about to and have a lower index.
fn overlapping(index: usize, range: &Range<usize>, process: u64) -> impl Iterator<Item = &'static Slot> + '_ {
    slots()
        .iter()
        .enumerate()
        .filter(move |(i, slot)| loop {
            let state = slot.state.load(Ordering::SeqCst);
            let is_live = kind_of(state) == LIVE;
            let is_offered = kind_of(state) == OFFERED && process_of(state) == process;
            if *i == index || !(is_live || is_offered) || !slot.overlaps(range) {
                break false;
            }
            if is_live || *i < index {
                break true;
            }
            // Its thread has seen this range, and will not take the slot; or has not, and will.
            std::thread::yield_now();
        })
        .map(|(_, slot)| slot)
}

/// Adds a range of the program's own memory.
///
/// # Errors
/// [`Code::Exists`] if something of it is in the table, [`Code::NoResources`] if the table is full.
pub(crate) fn publish_registered(range: Range<usize>) -> Result<(), Code> {
    let (index, slot, process) = vacant()?;
    slot.fill(&range, None, false, process);
    slot.state.store(OFFERED | process << PROCESS_SHIFT, Ordering::SeqCst);
    if overlapping(index, &range, process).next().is_some() {
        slot.release();
        return Err(Code::Exists);
    }
    slot.state.store(LIVE | process << PROCESS_SHIFT, Ordering::SeqCst);
    Ok(())
}

/// Adds a range of allocated memory. Registered ranges that overlap it are of memory that the program has freed, and end.
///
/// # Errors
/// [`Code::NoResources`] if the table is full.
pub(crate) fn publish_allocated(range: Range<usize>, allocated: Option<Box<Allocated>>) -> Result<(), Code> {
    let (index, slot, process) = vacant()?;
    slot.fill(&range, allocated, true, process);
    slot.state.store(LIVE | process << PROCESS_SHIFT, Ordering::SeqCst);
    for other in overlapping(index, &range, process) {
        // One that a call uses is hidden until it is unregistered.
        if !other.is_allocated.load(Ordering::Acquire) && other.take(process) == Ok(true) {
            other.release();
        }
    }
    Ok(())
}

/// Takes the slot of a range that begins at an address, if no call uses it. It is released by [`Slot::release`].
///
/// # Errors
/// [`Code::Invalid`] if there is no such range, [`Code::Busy`] if it is in use.
pub(crate) fn take(start: *mut u8, is_allocated: bool) -> Result<&'static Slot, Code> {
    let process = process()?;
    for slot in slots() {
        let is_meant = slot.start.load(Ordering::Acquire) == start as usize
            && slot.is_allocated.load(Ordering::Acquire) == is_allocated;
        if is_meant && slot.take(process)? {
            return Ok(slot);
        }
    }
    Err(Code::Invalid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program_memory::{free_memory, unregister_memory};

    const MEMORY: usize = 3 * PAGE_BYTES;

    /// Memory of its own mapping.
    fn mapped() -> *mut u8 {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a fresh mapping.
        let memory = unsafe { libc::mmap(std::ptr::null_mut(), MEMORY, libc::PROT_READ, flags, -1, 0) };
        assert_ne!(memory, libc::MAP_FAILED);
        memory.cast()
    }

    fn range_of(memory: *mut u8) -> Range<usize> {
        memory as usize..memory as usize + MEMORY
    }

    fn is_allocated(used: &InUse) -> bool {
        used.slot.is_allocated.load(Ordering::Relaxed)
    }

    #[test]
    fn memory_in_use_is_found_by_all_its_addresses_and_not_taken() {
        let memory = mapped();
        let at = |offset: usize| memory.wrapping_add(offset);
        assert!(memory_in_use(at(0), 1).unwrap().is_none());
        publish_registered(range_of(memory)).unwrap();
        assert_eq!(publish_registered(at(5) as usize..at(6) as usize), Err(Code::Exists));
        for offset in [0, 1, MEMORY - 1] {
            let used = memory_in_use(at(offset), 1).unwrap();
            assert!(used.is_some_and(|used| used.allocated().is_none()), "{offset}");
            let used = memory_in_use(at(offset), 1).unwrap();
            assert_eq!(unregister_memory(at(0)), Err(Code::Busy));
            drop(used);
        }
        assert!(memory_in_use(at(MEMORY), 1).unwrap().is_none());
        // SAFETY: it is not freed, as it is no allocated memory.
        assert_eq!(unsafe { free_memory(at(0)) }, Err(Code::Invalid));
        assert_eq!(unregister_memory(at(1)), Err(Code::Invalid));
        assert_eq!(unregister_memory(at(0)), Ok(()));
        assert_eq!(unregister_memory(at(0)), Err(Code::Invalid));
        assert!(memory_in_use(at(0), 1).unwrap().is_none());
    }

    #[test]
    fn range_beyond_allocated_memory_is_a_fault() {
        let memory = mapped();
        publish_allocated(range_of(memory), None).unwrap();
        assert!(memory_in_use(memory.wrapping_add(60), MEMORY - 60).unwrap().is_some());
        assert_eq!(memory_in_use(memory.wrapping_add(60), MEMORY - 59).map(drop), Err(Code::Fault));
        // SAFETY: not used again.
        assert_eq!(unsafe { free_memory(memory) }, Ok(()));
    }

    #[test]
    fn allocated_memory_ends_registered_ranges_at_its_addresses_or_hides_them() {
        let memory = mapped();
        let inner = memory.wrapping_add(PAGE_BYTES);
        let addresses = inner as usize..inner as usize + PAGE_BYTES;
        publish_registered(range_of(memory)).unwrap();
        publish_allocated(addresses.clone(), None).unwrap();
        assert_eq!(unregister_memory(memory), Err(Code::Invalid), "it has ended");
        take(inner, true).unwrap().release();

        publish_registered(range_of(memory)).unwrap();
        let stale = memory_in_use(memory, 1).unwrap().unwrap();
        publish_allocated(addresses, None).unwrap();
        let used = memory_in_use(inner, PAGE_BYTES).unwrap().unwrap();
        assert!(is_allocated(&used));
        assert_eq!(take(inner, true).map(drop), Err(Code::Busy));
        drop(used);
        take(inner, true).unwrap().release();
        drop(stale);
        assert_eq!(unregister_memory(memory), Ok(()));
    }

    #[test]
    fn of_threads_that_register_overlapping_memory_one_succeeds() {
        let memory = mapped();
        let barrier = std::sync::Barrier::new(4);
        for _ in 0..300 {
            let done = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4)
                    .map(|i| {
                        let (range, barrier) = (range_of(memory).start + i..range_of(memory).end, &barrier);
                        scope.spawn(move || {
                            barrier.wait();
                            publish_registered(range)
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
            });
            assert_eq!(done.iter().filter(|done| done.is_ok()).count(), 1, "{done:?}");
            let first = done.iter().position(|done| done.is_ok()).unwrap();
            assert_eq!(unregister_memory(memory.wrapping_add(first)), Ok(()));
        }
    }

    #[test]
    fn memory_is_kept_until_its_time_is_over() {
        let memory = mapped();
        publish_allocated(range_of(memory), None).unwrap();
        let until = call_clock() + 200_000_000;
        memory_in_use(memory, 1).unwrap().unwrap().slot().keep_until(until);
        while call_clock() < until {
            // SAFETY: refused, or not used again.
            let freed = unsafe { free_memory(memory) };
            assert!(freed == Err(Code::Busy) || call_clock() >= until);
            if freed.is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        // SAFETY: not used again.
        assert_eq!(unsafe { free_memory(memory) }, Ok(()));
    }

    #[test]
    fn child_counts_its_own_calls_alone() {
        let memory = mapped();
        publish_allocated(range_of(memory), None).unwrap();
        let of_parent = memory_in_use(memory, 1).unwrap().unwrap();
        // SAFETY: the child calls nothing that takes a lock.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: a child that hangs ends. The memory is freed once, and not used again.
            unsafe {
                libc::alarm(20);
                let own = memory_in_use(memory, 1);
                let is_counted = matches!(own, Ok(Some(_))) && free_memory(memory) == Err(Code::Busy);
                drop(own);
                let is_freed = free_memory(memory) == Ok(()) && free_memory(memory) == Err(Code::Invalid);
                libc::_exit(i32::from(!(is_counted && is_freed)));
            }
        }
        let mut status = -1;
        // SAFETY: it is writable for the call.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        // SAFETY: refused, or not used again.
        assert_eq!(unsafe { free_memory(memory) }, Err(Code::Busy));
        drop(of_parent);
        // SAFETY: as above.
        assert_eq!(unsafe { free_memory(memory) }, Ok(()));
    }
}
