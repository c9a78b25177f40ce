//! Memory of the program that it has allocated, or registered, for puts to and gets from volumes (docs/decisions/0053).
//!
//! Allocated memory is a memfd, which this process has mapped and this node's daemon has registered with the network. So
//! bytes to and from other nodes are transferred from and to the place where the program has them ([`Direct`]). Registered
//! memory is the program's own, from which bytes are copied into the process's buffer (`buffer`), as from any other.
//!
//! A request that failed may still write the memory of a get, or read that of a put. The pages of its range are therefore
//! replaced by others, which the daemon does not have. They are copied from then on. During the call, the pages of the range
//! belong to the call alone: only ranges of whole pages are transferred directly.
//!
//! The table of such memory has no lock, because a child may have been made by fork(2) while another thread held one. What
//! only transfers need is behind a lock, which a child never takes. A call counts as a user of its memory, and memory in use
//! is not freed.

use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_ring::{memfd_sealed, Seal};
use forebay_types::limits::{PROGRAM_MEMORIES_MAX, PROGRAM_MEMORY_BYTES_MAX};
use forebay_types::Code;

use crate::attached::{identity, raised};
use crate::direct::Registration;
use crate::errno;
use crate::pool::Pool;

pub(crate) const PAGE_BYTES: usize = 4096;

/// The state of a slot: 0 if it is free; [`TAKEN`] while it is filled or emptied; [`LIVE`] and the number of calls that use
/// its memory.
const TAKEN: u64 = 1 << 62;
const LIVE: u64 = 1 << 63;

/// One range of memory.
pub(crate) struct Slot {
    state: AtomicU64,
    start: AtomicUsize,
    bytes: AtomicUsize,
    is_allocated: AtomicBool,
    /// `None` for memory that the program has registered.
    allocated: Mutex<Option<Allocated>>,
}

static SLOTS: [Slot; PROGRAM_MEMORIES_MAX] = [const { Slot::new() }; PROGRAM_MEMORIES_MAX];
/// Slots that have ever been used are below this.
static USED: AtomicUsize = AtomicUsize::new(0);
/// All ranges there have been are between these addresses: other memory needs no search.
static LOWEST: AtomicUsize = AtomicUsize::new(usize::MAX);
static HIGHEST: AtomicUsize = AtomicUsize::new(0);

/// Allocated memory.
#[derive(Debug)]
pub(crate) struct Allocated {
    pub(crate) pool: &'static Pool,
    /// The memfd, at a high number, and its device and inode: the program may close it and use the number.
    memory: RawFd,
    identity: (u64, u64),
    /// The process that made it.
    pub(crate) process: u32,
    pub(crate) registration: Registration,
    /// Ranges whose pages were replaced.
    pub(crate) replaced: Vec<Range<usize>>,
}

impl Allocated {
    /// The memfd, unless the program has closed it.
    pub(crate) fn memory(&self) -> Option<RawFd> {
        (identity(self.memory) == Ok(self.identity)).then_some(self.memory)
    }
}

impl Drop for Allocated {
    fn drop(&mut self) {
        if let Some(memory) = self.memory() {
            // SAFETY: the descriptor is still ours, and not used again.
            drop(unsafe { OwnedFd::from_raw_fd(memory) });
        }
    }
}

impl Slot {
    const fn new() -> Slot {
        Slot {
            state: AtomicU64::new(0),
            start: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            is_allocated: AtomicBool::new(false),
            allocated: Mutex::new(None),
        }
    }

    pub(crate) fn allocated(&self) -> MutexGuard<'_, Option<Allocated>> {
        self.allocated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its addresses.
    pub(crate) fn range(&self) -> Range<usize> {
        let start = self.start.load(Ordering::Acquire);
        start..start + self.bytes.load(Ordering::Acquire)
    }

    /// Counts a call as a user, unless the slot's memory is being freed.
    fn enter(&self) -> bool {
        let mut state = self.state.load(Ordering::Acquire);
        while state & LIVE != 0 {
            match self.state.compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }
}

/// A call that uses memory of the table, until it is dropped.
#[derive(Debug)]
pub struct InUse(&'static Slot);

impl InUse {
    /// The memory, if it is allocated and not the program's own.
    pub(crate) fn slot(&self) -> Option<&'static Slot> {
        self.0.is_allocated.load(Ordering::Acquire).then_some(self.0)
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Slot({:x?})", self.range())
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.state.fetch_sub(1, Ordering::Release);
    }
}

fn slots() -> &'static [Slot] {
    &SLOTS[..USED.load(Ordering::Acquire)]
}

/// Marks memory as used by a call, if it is allocated or registered: `forebay_free` and `forebay_unregister` refuse it
/// while the result lives. `None` for other memory.
///
/// # Errors
/// [`Code::Fault`] for a range that begins in allocated memory and ends beyond it.
#[inline]
pub fn memory_in_use(start: *const u8, bytes: usize) -> Result<Option<InUse>, Code> {
    let start = start as usize;
    if start < LOWEST.load(Ordering::Relaxed) || start >= HIGHEST.load(Ordering::Relaxed) || bytes == 0 {
        return Ok(None);
    }
    search(start, bytes)
}

fn search(start: usize, bytes: usize) -> Result<Option<InUse>, Code> {
    for slot in slots() {
        if slot.state.load(Ordering::Acquire) & LIVE == 0 || !slot.range().contains(&start) || !slot.enter() {
            continue;
        }
        let used = InUse(slot);
        // It may have become another's before it was entered.
        let range = slot.range();
        if !range.contains(&start) {
            continue;
        }
        if range.end - start < bytes && slot.is_allocated.load(Ordering::Acquire) {
            return Err(Code::Fault);
        }
        return Ok(Some(used));
    }
    Ok(None)
}

/// A slot that is being filled.
fn vacant() -> Result<&'static Slot, Code> {
    for (i, slot) in SLOTS.iter().enumerate() {
        if slot.state.compare_exchange(0, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            USED.fetch_max(i + 1, Ordering::AcqRel);
            return Ok(slot);
        }
    }
    Err(Code::NoResources)
}

/// Makes a slot that was filled the one of a range.
fn publish(slot: &Slot, start: usize, bytes: usize, is_allocated: bool) {
    slot.start.store(start, Ordering::Release);
    slot.bytes.store(bytes, Ordering::Release);
    slot.is_allocated.store(is_allocated, Ordering::Release);
    LOWEST.fetch_min(start, Ordering::Relaxed);
    HIGHEST.fetch_max(start + bytes, Ordering::Relaxed);
    slot.state.store(LIVE, Ordering::Release);
}

/// Takes the slot of a range that begins at an address, if no call uses it.
fn take(start: *mut u8, is_allocated: bool) -> Result<&'static Slot, Code> {
    for slot in slots() {
        let state = slot.state.load(Ordering::Acquire);
        let is_meant = state & LIVE != 0
            && slot.start.load(Ordering::Acquire) == start as usize
            && slot.is_allocated.load(Ordering::Acquire) == is_allocated;
        if is_meant {
            // A call that begins or ends meanwhile counts, too.
            let taken = slot.state.compare_exchange(LIVE, TAKEN, Ordering::AcqRel, Ordering::Acquire);
            return taken.map(|_| slot).map_err(|_| Code::Busy);
        }
    }
    Err(Code::Invalid)
}

/// Fails for more than this process may have, or the node has left: the kernel would kill a process otherwise.
fn check_room(bytes: usize) -> Result<(), Code> {
    // SAFETY: an all-zero rlimit is valid, and writable for the call.
    let limit = unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        errno::check(libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit))?;
        limit.rlim_cur
    };
    let text = std::fs::read_to_string("/proc/meminfo").map_err(errno::of)?;
    let available = text.lines().find_map(|line| {
        line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    });
    let available = available.map_or(u64::MAX, |kib| kib.saturating_mul(1024));
    match bytes > PROGRAM_MEMORY_BYTES_MAX || bytes as u64 > limit || bytes as u64 > available {
        true => Err(Code::NoMemory),
        false => Ok(()),
    }
}

impl Pool {
    /// Allocates memory, zeroed and aligned to pages, from and to which bytes are transferred without a copy in this
    /// process. It is shared with children of this process.
    ///
    /// # Errors
    /// [`Code::Invalid`] for 0 bytes; [`Code::NoMemory`] for more than [`PROGRAM_MEMORY_BYTES_MAX`], or than there is;
    /// [`Code::NoResources`] if this process has [`PROGRAM_MEMORIES_MAX`] ranges, or no descriptor left;
    /// [`Code::PoolGone`].
    pub fn allocate_memory(&'static self, bytes: usize) -> Result<*mut u8, Code> {
        if bytes == 0 {
            return Err(Code::Invalid);
        }
        let attached = self.attached()?;
        let bytes = bytes.checked_next_multiple_of(PAGE_BYTES).ok_or(Code::NoMemory)?;
        check_room(bytes)?;
        let (memory, mapping) =
            memfd_sealed(c"forebay-memory", bytes, Seal::Size).map_err(|e| match errno::of(e) {
                Code::NoSpace => Code::NoMemory,
                code => code,
            })?;
        // SAFETY: a plain system call on our descriptor.
        if unsafe { libc::fallocate(memory.as_raw_fd(), 0, 0, bytes as libc::off_t) } != 0 {
            return Err(Code::NoMemory);
        }
        let identity = identity(memory.as_raw_fd())?;
        let slot = vacant()?;
        let mut allocated = Allocated {
            pool: self,
            memory: raised(memory),
            identity,
            process: std::process::id(),
            registration: Registration::default(),
            replaced: Vec::new(),
        };
        // The memory can be used without, too.
        let _ = allocated.register(attached);
        *slot.allocated() = Some(allocated);
        let start = mapping.start().as_ptr();
        // `free_memory` unmaps it.
        std::mem::forget(mapping);
        publish(slot, start as usize, bytes, true);
        Ok(start)
    }

    /// Registers the program's own memory: it counts as used by the calls that use it, and the process's buffer is there
    /// before the first of them.
    ///
    /// # Errors
    /// [`Code::Invalid`] for 0 bytes; [`Code::Fault`] beyond the address space; [`Code::Exists`] for a range that
    /// overlaps one that is registered or allocated; [`Code::NoResources`] as [`Pool::allocate_memory`];
    /// [`Code::PoolGone`].
    pub fn register_memory(&'static self, start: *mut u8, bytes: usize) -> Result<(), Code> {
        if bytes == 0 {
            return Err(Code::Invalid);
        }
        let attached = self.attached()?;
        let range = start as usize..(start as usize).checked_add(bytes).ok_or(Code::Fault)?;
        let overlaps = |slot: &Slot| {
            let own = slot.range();
            slot.state.load(Ordering::Acquire) & LIVE != 0 && own.start < range.end && range.start < own.end
        };
        if slots().iter().any(overlaps) {
            return Err(Code::Exists);
        }
        self.prepare_buffer(attached);
        publish(vacant()?, range.start, bytes, false);
        Ok(())
    }
}

/// Frees memory that [`Pool::allocate_memory`] returned.
///
/// # Errors
/// [`Code::Invalid`] for any other address, as one that was freed; [`Code::Busy`] while a call uses it.
///
/// # Safety
/// The program does not use the memory any longer.
pub unsafe fn free_memory(start: *mut u8) -> Result<(), Code> {
    let slot = take(start, true)?;
    let bytes = slot.bytes.load(Ordering::Acquire);
    if let Some(allocated) = slot.allocated().take() {
        allocated.withdraw();
    }
    // No call finds the slot before its memory is gone, and the addresses may be those of another.
    // SAFETY: the mapping of `allocate_memory`, which nothing uses any longer.
    unsafe { libc::munmap(start.cast(), bytes) };
    slot.state.store(0, Ordering::Release);
    Ok(())
}

/// Ends the registration of memory by [`Pool::register_memory`].
///
/// # Errors
/// [`Code::Invalid`] for any other address, as one that is not registered any longer; [`Code::Busy`] while a call uses it.
pub fn unregister_memory(start: *mut u8) -> Result<(), Code> {
    take(start, false)?.state.store(0, Ordering::Release);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_in_use_is_found_by_all_its_addresses_and_not_taken() {
        let memory = vec![0u8; 3 * PAGE_BYTES];
        let at = |offset: usize| memory.as_ptr().wrapping_add(offset);
        assert!(memory_in_use(at(0), 1).unwrap().is_none());
        publish(vacant().unwrap(), at(0) as usize, memory.len(), false);
        for offset in [0, 1, memory.len() - 1] {
            let used = memory_in_use(at(offset), 1).unwrap();
            assert!(used.is_some(), "{offset}");
            assert_eq!(unregister_memory(at(0).cast_mut()), Err(Code::Busy));
        }
        assert!(memory_in_use(at(memory.len()), 1).unwrap().is_none());
        // SAFETY: it is not freed, as it is no allocated memory.
        assert_eq!(unsafe { free_memory(at(0).cast_mut()) }, Err(Code::Invalid));
        assert_eq!(unregister_memory(at(1).cast_mut()), Err(Code::Invalid));
        assert_eq!(unregister_memory(at(0).cast_mut()), Ok(()));
        assert_eq!(unregister_memory(at(0).cast_mut()), Err(Code::Invalid));
        assert!(memory_in_use(at(0), 1).unwrap().is_none());
    }

    #[test]
    fn range_beyond_allocated_memory_is_a_fault() {
        let memory = [0u8; 100];
        let start = memory.as_ptr();
        publish(vacant().unwrap(), start as usize, 100, true);
        assert!(memory_in_use(start.wrapping_add(60), 40).unwrap().is_some());
        assert_eq!(memory_in_use(start.wrapping_add(60), 41).map(drop), Err(Code::Fault));
        take(start.cast_mut(), true).unwrap().state.store(0, Ordering::Release);
    }

    #[test]
    fn more_memory_than_there_is_is_refused() {
        assert_eq!(check_room(PAGE_BYTES), Ok(()));
        assert_eq!(check_room(PROGRAM_MEMORY_BYTES_MAX + PAGE_BYTES), Err(Code::NoMemory));
        assert_eq!(check_room(usize::MAX), Err(Code::NoMemory));
    }
}
