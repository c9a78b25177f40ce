//! Memory of the program that it has allocated, or registered, for puts to and gets from volumes (docs/decisions/0053).
//!
//! Allocated memory is a memfd, which this process has mapped and this node's daemon has registered with the network. So
//! bytes to and from other nodes are transferred from and to the place where the program has them (`direct`). Registered
//! memory is the program's own, from which bytes are copied into the process's buffer (`buffer`), as from any other.
//!
//! A request that failed may still write the memory of a get, or read that of a put. The pages of its range are therefore
//! replaced by others, which the daemon does not have. They are copied from then on. During the call, the pages of the range
//! belong to the call alone: only ranges of whole pages are transferred directly.
//!
//! Which memory there is, and which calls use it, is in a table without a lock (`memory_slots`).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use forebay_ring::{memfd_sealed, Seal};
use forebay_types::limits::PROGRAM_MEMORY_BYTES_MAX;
#[cfg(doc)]
use forebay_types::limits::{PROGRAM_MEMORIES_MAX, QUARANTINE_MS};
use forebay_types::Code;

use crate::allocated::{Allocated, PAGE_BYTES};
use crate::connection::ANSWER_TIMEOUT_S;
use crate::errno;
use crate::memory_slots::{memory_in_use, publish_allocated, publish_registered, take};
use crate::pool::Pool;

/// Bytes whose pages are made present by one system call, at most.
const PRESENT_BYTES: usize = 1 << 20;

/// Makes all pages of a memfd present.
///
/// # Errors
/// [`Code::NoMemory`] if there are not as many.
fn make_present(memory: BorrowedFd<'_>, bytes: usize) -> Result<(), Code> {
    in_steps(bytes, |at, length| {
        // SAFETY: a plain system call on a descriptor.
        let done =
            unsafe { libc::fallocate(memory.as_raw_fd(), 0, at as libc::off_t, length as libc::off_t) };
        match errno::check(done) {
            Err(Code::NoSpace) => Err(Code::NoMemory),
            done => done.map(drop),
        }
    })
}

/// Does something for all of a range of pages, at most [`PRESENT_BYTES`] at a time. A signal interrupts a step without an
/// effect (tmpfs of some kernels): it is repeated, and is smaller then, as a timer of the program may interrupt each.
fn in_steps(bytes: usize, mut step: impl FnMut(usize, usize) -> Result<(), Code>) -> Result<(), Code> {
    let (mut at, mut most) = (0, PRESENT_BYTES);
    while at < bytes {
        let length = most.min(bytes - at);
        match step(at, length) {
            Ok(()) => (at, most) = (at + length, PRESENT_BYTES),
            Err(Code::Interrupted) => most = (most / 2).max(PAGE_BYTES),
            Err(code) => return Err(code),
        }
    }
    Ok(())
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
    /// process. It is shared with children of this process, but for pages that were replaced.
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
        make_present(memory.as_fd(), bytes)?;
        // SAFETY: the mapping of all of it.
        unsafe { forebay_sys::huge_pages::collapse(mapping.start().as_ptr(), bytes) };
        let allocated = Box::new(Allocated::new(self, memory, bytes)?);
        let start = mapping.start().as_ptr();
        publish_allocated(start as usize..start as usize + bytes, Some(allocated))?;
        // `free_memory` unmaps it.
        std::mem::forget(mapping);
        if let Some(in_use) = memory_in_use(start, bytes)? {
            // The memory can be used without, too.
            let _ = in_use.allocated().map(|allocated| allocated.register(attached, ANSWER_TIMEOUT_S));
        }
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
        publish_registered(range)?;
        self.prepare_buffer(attached);
        Ok(())
    }
}

/// Frees memory that [`Pool::allocate_memory`] returned. A child of the process that allocated it frees
/// its own mapping alone: calls of the parent do not prevent that, and the parent keeps its memory.
///
/// # Errors
/// [`Code::Invalid`] for any other address, as one that was freed; [`Code::Busy`] while a call uses it, and for
/// [`QUARANTINE_MS`] after a call that has failed, while a transfer may still write it.
///
/// # Safety
/// The program does not use the memory any longer.
pub unsafe fn free_memory(start: *mut u8) -> Result<(), Code> {
    let slot = take(start, true)?;
    let bytes = slot.range().len();
    if let Some(allocated) = slot.take_allocated() {
        allocated.withdraw();
    }
    // No call finds the slot before its memory is gone, and the addresses may be those of another.
    // SAFETY: the mapping of `allocate_memory`, which nothing uses any longer.
    unsafe { libc::munmap(start.cast(), bytes) };
    slot.release();
    Ok(())
}

/// Ends the registration of memory by [`Pool::register_memory`].
///
/// # Errors
/// [`Code::Invalid`] for any other address, as one that is not registered any longer; [`Code::Busy`] while a call uses it.
pub fn unregister_memory(start: *mut u8) -> Result<(), Code> {
    take(start, false)?.release();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_memory_than_there_is_is_refused() {
        assert_eq!(check_room(PAGE_BYTES), Ok(()));
        assert_eq!(check_room(PROGRAM_MEMORY_BYTES_MAX + PAGE_BYTES), Err(Code::NoMemory));
        assert_eq!(check_room(usize::MAX), Err(Code::NoMemory));
    }

    #[test]
    fn signals_do_not_make_memory_scarce() {
        // Signals that leave time for three pages.
        let (mut next, mut interrupted) = (0, 0);
        let done = in_steps(3 * PRESENT_BYTES + PAGE_BYTES, |at, length| {
            assert_eq!(at, next);
            if length > 3 * PAGE_BYTES {
                interrupted += 1;
                return Err(Code::Interrupted);
            }
            next += length;
            Ok(())
        });
        assert_eq!((done, next), (Ok(()), 3 * PRESENT_BYTES + PAGE_BYTES));
        assert!(interrupted > 0);
        assert_eq!(in_steps(PAGE_BYTES, |_, _| Err(Code::NoMemory)), Err(Code::NoMemory));
    }

    #[test]
    fn all_pages_of_memory_are_made_present() {
        let bytes = 2 * PRESENT_BYTES + PAGE_BYTES;
        let (memory, _mapping) = memfd_sealed(c"test", bytes, Seal::Size).unwrap();
        make_present(memory.as_fd(), bytes).unwrap();
        assert_eq!(errno::stat(memory.as_raw_fd()).unwrap().st_blocks as usize * 512, bytes);
    }
}
