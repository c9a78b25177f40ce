//! Memory mappings and sealed memfds.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicU8};

use forebay_sys::huge_pages;

/// What a memfd is sealed against, after its maker has mapped it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seal {
    /// Its size is fixed: neither side can make the other's access fault.
    Size,
    /// And no further mapping or write may change it: the maker's mapping alone writes.
    SizeAndWrites,
}

/// Makes a memfd of `bytes` zero bytes, maps it writable, and seals it.
pub fn memfd_sealed(name: &std::ffi::CStr, bytes: usize, seal: Seal) -> io::Result<(OwnedFd, Mapping)> {
    // SAFETY: `name` is NUL-terminated; the result is checked.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just made and nobody else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: plain system call on our descriptor.
    if unsafe { libc::ftruncate(fd.as_raw_fd(), bytes as libc::off_t) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mapping = Mapping::new(std::os::fd::AsFd::as_fd(&fd), bytes, true)?;
    let mut seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    if seal == Seal::SizeAndWrites {
        seals |= libc::F_SEAL_FUTURE_WRITE;
    }
    seals |= libc::F_SEAL_SEAL;
    // SAFETY: plain system call on our descriptor.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((fd, mapping))
}

/// Bytes of a page of memory; a kernel whose pages are larger answers for all of one.
pub(crate) const PAGE_BYTES: usize = 4096;

/// A shared mapping, unmapped on drop. All access goes through atomics, as another process may write at any time.
#[derive(Debug)]
pub struct Mapping {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: the memory is only ever accessed through atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` bytes of `fd`, which must be as long and sealed against shrinking.
    pub fn new(fd: BorrowedFd<'_>, bytes: usize, writable: bool) -> io::Result<Mapping> {
        let prot = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        Ok(Mapping { base: huge_pages::map_shared(fd, 0, bytes, prot)?, bytes })
    }

    /// Maps `fd` in this mapping's place, read-only, at the same address: readers in other threads see either memory
    /// and must check what they read.
    pub fn replace(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: the range is this mapping's own; the new one has the same length.
        let base =
            unsafe { libc::mmap(self.base.cast(), self.bytes, libc::PROT_READ, flags, fd.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// The number of bytes that are mapped.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// True for a mapping of no bytes; there is none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The word at byte `offset`, which must be a multiple of 4 within the mapping.
    #[inline]
    pub fn word32(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.bytes);
        // SAFETY: in bounds and aligned (asserted; the base is page-aligned), and always accessed atomically.
        unsafe { AtomicU32::from_ptr(self.base.add(offset).cast()) }
    }

    /// The word at byte `offset`, which must be a multiple of 8 within the mapping.
    #[inline]
    pub fn word64(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.bytes);
        // SAFETY: as in `word32`.
        unsafe { AtomicU64::from_ptr(self.base.add(offset).cast()) }
    }

    /// Copies `to.len()` bytes at `offset` (a multiple of 8) out, in relaxed 8-byte pieces.
    #[inline]
    pub fn load(&self, offset: usize, to: &mut [u8]) {
        assert!(offset.is_multiple_of(8) && offset + to.len() <= self.bytes);
        let (mut at, mut chunks) = (offset, to.chunks_exact_mut(8));
        for chunk in &mut chunks {
            // SAFETY: as in `word64`; all of the range was asserted above.
            let word = unsafe { AtomicU64::from_ptr(self.base.add(at).cast()) };
            chunk.copy_from_slice(&word.load(std::sync::atomic::Ordering::Relaxed).to_le_bytes());
            at += 8;
        }
        for byte in chunks.into_remainder() {
            *byte = self.byte(at).load(std::sync::atomic::Ordering::Relaxed);
            at += 1;
        }
    }

    /// Copies `from` to `offset` (a multiple of 8), in relaxed 8-byte pieces.
    #[inline]
    pub fn store(&self, offset: usize, from: &[u8]) {
        assert!(offset.is_multiple_of(8) && offset + from.len() <= self.bytes);
        let (mut at, chunks) = (offset, from.chunks_exact(8));
        let rest = chunks.remainder();
        for chunk in chunks {
            let word = u64::from_le_bytes([
                chunk[0], chunk[1], chunk[2], chunk[3], chunk[4], chunk[5], chunk[6], chunk[7],
            ]);
            // SAFETY: as in `word64`; all of the range was asserted above.
            let place = unsafe { AtomicU64::from_ptr(self.base.add(at).cast()) };
            place.store(word, std::sync::atomic::Ordering::Relaxed);
            at += 8;
        }
        for byte in rest {
            self.byte(at).store(*byte, std::sync::atomic::Ordering::Relaxed);
            at += 1;
        }
    }

    /// Gives the pages of this mapping up, which then no longer count as memory of this process. The memory has its bytes as
    /// before, also for this mapping, whose next accesses take page faults.
    pub fn give_pages_up(&self) {
        // SAFETY: the range is this mapping's own, and shared: the kernel drops entries of the page table alone.
        unsafe { libc::madvise(self.base.cast(), self.bytes, libc::MADV_DONTNEED) };
    }

    /// Leaves the memory out of core dumps of this process. Otherwise the kernel writes all of it, as it does memory that no
    /// file has.
    pub fn leave_out_of_dumps(&self) {
        // SAFETY: the range is this mapping's own; no byte changes.
        unsafe { libc::madvise(self.base.cast(), self.bytes, libc::MADV_DONTDUMP) };
    }

    /// Where it begins: for the network, which reads and writes it by itself.
    pub fn start(&self) -> std::ptr::NonNull<u8> {
        std::ptr::NonNull::new(self.base).unwrap_or(std::ptr::NonNull::dangling())
    }

    /// Frees the memory of a range of whole pages. After that the range reads as zeros in all mappings of this memory.
    pub fn discard(&self, range: std::ops::Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.bytes);
        // SAFETY: the range is of this mapping; no reference into it exists. Where the kernel cannot, the memory stays.
        unsafe { libc::madvise(self.base.add(range.start).cast(), range.len(), libc::MADV_REMOVE) };
    }

    /// Copies `bytes` bytes in at `offset`. What others write there at the same time may be mixed with it.
    ///
    /// # Safety
    /// `from` can be read for as many bytes, and is not in this mapping.
    pub unsafe fn copy_in(&self, offset: usize, from: *const u8, bytes: usize) {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        // SAFETY: within the mapping, to which no reference exists; the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, self.base.add(offset), bytes) };
    }

    /// Copies `bytes` bytes out from `offset`. They may be mixed of what others write at the same time.
    ///
    /// # Safety
    /// `to` can be written for as many bytes, and is not in this mapping.
    pub unsafe fn copy_out(&self, offset: usize, to: *mut u8, bytes: usize) {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        // SAFETY: within the mapping, to which no reference exists; the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(self.base.add(offset), to, bytes) };
    }

    /// Begins to bring the cache line at byte `offset` near, for a read that will follow.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        assert!(offset < self.bytes);
        // SAFETY: in bounds; a prefetch changes nothing and cannot fault.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
            _mm_prefetch::<_MM_HINT_T0>(self.base.add(offset).cast());
        }
    }

    /// Which pages from byte `offset` on, a multiple of [`PAGE_BYTES`], have memory behind them: bit 0 of each answer
    /// is set, also where the kernel does not tell, and is not behind the mapping's end.
    pub fn resident(&self, offset: usize, pages: &mut [u8]) {
        assert!(offset.is_multiple_of(PAGE_BYTES) && offset < self.bytes);
        let n = pages.len().min((self.bytes - offset).div_ceil(PAGE_BYTES));
        pages[..n].fill(1);
        pages[n..].fill(0);
        // SAFETY: pages of the mapping, and room for an answer for each.
        unsafe { libc::mincore(self.base.add(offset).cast(), n * PAGE_BYTES, pages.as_mut_ptr()) };
    }

    #[inline]
    fn byte(&self, offset: usize) -> &AtomicU8 {
        assert!(offset < self.bytes);
        // SAFETY: in bounds, and always accessed atomically.
        unsafe { AtomicU8::from_ptr(self.base.add(offset)) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and no reference into it outlives `self`.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}
