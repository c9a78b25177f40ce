//! Huge pages of shared memory: a first access costs a fault for 2 MiB in place of 4 KiB, and the processor's tables hold
//! more of the memory. A process that writes 256 MiB of a volume for the first time does so at 16 GB/s with them, and at
//! 2 GB/s without; later passes are a third faster (Linux 6.18, a virtual machine; docs/benchmarks.md).
//!
//! Two things are needed. The memory must be of huge pages: [`collapse`], since a memfd has small ones unless the
//! administrator has changed `/sys/kernel/mm/transparent_hugepage/shmem_enabled`. And each mapping must begin where the
//! processor could map a huge page: [`map_shared`], since the kernel aligns mappings of a memfd only with that setting.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

/// Bytes of a huge page.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Since Linux 6.1 (madvise(2)).
const MADV_COLLAPSE: libc::c_int = 25;

/// How often a place is looked for that no other thread takes meanwhile.
const ATTEMPTS: usize = 8;

/// Maps `bytes` bytes of a descriptor from an offset on, shared. If a huge page fits in, address and offset are alike
/// within one, where there are addresses for that.
///
/// # Errors
/// Those of mmap(2).
pub fn map_shared(
    fd: BorrowedFd<'_>,
    offset: u64,
    bytes: usize,
    protection: libc::c_int,
) -> io::Result<*mut u8> {
    let map = |place: *mut libc::c_void, flags| {
        let flags = flags | libc::MAP_SHARED;
        // SAFETY: a place of the kernel's choice, or one that it refuses if anything is there.
        let at =
            unsafe { libc::mmap(place, bytes, protection, flags, fd.as_raw_fd(), offset as libc::off_t) };
        match at {
            libc::MAP_FAILED => Err(io::Error::last_os_error()),
            at => Ok(at.cast::<u8>()),
        }
    };
    if bytes >= HUGE_PAGE_BYTES {
        // Nothing is replaced, as what is there may be another thread's by then.
        for place in
            std::iter::repeat_with(|| free_place(offset, bytes)).take(ATTEMPTS).map_while(|place| place)
        {
            match map(place, libc::MAP_FIXED_NOREPLACE) {
                Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {}
                done => return done,
            }
        }
    }
    map(ptr::null_mut(), 0)
}

/// Addresses that are free at this moment for so many bytes, and are alike the offset within a huge page.
fn free_place(offset: u64, bytes: usize) -> Option<*mut libc::c_void> {
    let room = bytes.checked_add(HUGE_PAGE_BYTES)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a fresh range of addresses at a place of the kernel's choice, which is given back at once.
    let start = unsafe {
        let start = libc::mmap(ptr::null_mut(), room, libc::PROT_NONE, flags, -1, 0);
        if start == libc::MAP_FAILED {
            return None;
        }
        libc::munmap(start, room);
        start
    };
    let within = offset as usize % HUGE_PAGE_BYTES;
    let skipped = (within + HUGE_PAGE_BYTES - start as usize % HUGE_PAGE_BYTES) % HUGE_PAGE_BYTES;
    Some(start.wrapping_byte_add(skipped))
}

/// Has the kernel make huge pages of what is present of a shared mapping, where it can (Linux 6.1). It is no failure if it
/// cannot.
///
/// # Safety
/// The range is mapped.
pub unsafe fn collapse(start: *mut u8, bytes: usize) {
    let skipped = (start as usize).next_multiple_of(HUGE_PAGE_BYTES) - start as usize;
    let whole = bytes.saturating_sub(skipped) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    if whole > 0 {
        // SAFETY: within the range that the caller promises.
        unsafe { libc::madvise(start.add(skipped).cast(), whole, MADV_COLLAPSE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};

    const BYTES: usize = 5 << 20;

    fn memory(bytes: usize) -> OwnedFd {
        // SAFETY: the name ends in NUL; the descriptor is nobody else's; plain calls on it.
        unsafe {
            let fd = libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0);
            assert_eq!(libc::ftruncate(fd, bytes as libc::off_t), 0);
            assert_eq!(libc::fallocate(fd, 0, 0, bytes as libc::off_t), 0);
            OwnedFd::from_raw_fd(fd)
        }
    }

    fn map(memory: &OwnedFd, offset: u64, bytes: usize) -> *mut u8 {
        map_shared(memory.as_fd(), offset, bytes, libc::PROT_READ | libc::PROT_WRITE).unwrap()
    }

    /// The mapping of /proc/self/smaps that begins at an address: its bytes, and those that are mapped by huge pages.
    fn found(at: *mut u8) -> (usize, usize) {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = text.lines().skip_while(|line| !line.starts_with(&format!("{:x}-", at as usize)));
        let first = lines.next().expect("the mapping is listed");
        let end = first.split(['-', ' ']).nth(1).map(|end| usize::from_str_radix(end, 16).unwrap());
        let huge = lines.find_map(|line| line.strip_prefix("ShmemPmdMapped:")).expect("smaps tells");
        let kib: usize = huge.trim().trim_end_matches(" kB").parse().unwrap();
        (end.unwrap() - at as usize, kib << 10)
    }

    #[test]
    fn mappings_begin_within_a_huge_page_where_their_offset_does_and_leave_nothing_beside() {
        let memory = memory(BYTES);
        for offset in [0, 4096, 3 << 20] {
            for bytes in [BYTES - offset as usize, 4096, HUGE_PAGE_BYTES - 4096] {
                let bytes = bytes.min(BYTES - offset as usize);
                let at = map(&memory, offset, bytes);
                if bytes >= HUGE_PAGE_BYTES {
                    assert_eq!(at as u64 % HUGE_PAGE_BYTES as u64, offset % HUGE_PAGE_BYTES as u64);
                }
                assert_eq!(found(at).0, bytes, "offset {offset}");
                // SAFETY: the mapping above.
                unsafe {
                    at.add(bytes - 1).write_volatile(7);
                    libc::munmap(at.cast(), bytes);
                }
            }
        }
    }

    #[test]
    fn a_mapping_that_is_refused_leaves_no_addresses_reserved() {
        let lines = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        let directory = std::fs::File::open("/").unwrap();
        let refused = || map_shared(directory.as_fd(), 0, BYTES, libc::PROT_READ);
        assert!(refused().is_err());
        let before = lines();
        (0..100).for_each(|_| assert!(refused().is_err()));
        assert!(lines() < before + 50);
    }

    /// The kernel may have unmapped what was at a fixed place when it refuses another mapping there.
    #[test]
    fn mapping_that_is_refused_unmaps_nothing_of_other_threads() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..20_000)
                    .for_each(|_| assert!(map_shared(socket.as_fd(), 0, BYTES, libc::PROT_READ).is_err()));
                is_over.store(true, std::sync::atomic::Ordering::Relaxed);
            });
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let mut lost = 0;
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                // SAFETY: a mapping of this thread, which it gives back.
                unsafe {
                    let at = libc::mmap(ptr::null_mut(), BYTES, libc::PROT_NONE, flags, -1, 0);
                    assert_ne!(at, libc::MAP_FAILED);
                    std::thread::sleep(std::time::Duration::from_micros(50));
                    lost += u32::from(libc::msync(at, BYTES, libc::MS_ASYNC) != 0);
                    libc::munmap(at, BYTES);
                }
            }
            assert_eq!(lost, 0, "mappings that are gone");
        });
    }

    #[test]
    fn whole_huge_pages_of_a_mapping_are_collapsed_and_mapped_as_such_where_the_kernel_can() {
        let memory = memory(BYTES);
        let at = map(&memory, 0, BYTES);
        // SAFETY: the mappings are those made here.
        unsafe {
            at.write_volatile(1);
            at.add(BYTES - 1).write_volatile(2);
            collapse(at, BYTES);
            assert_eq!((at.read_volatile(), at.add(BYTES - 1).read_volatile()), (1, 2));
            // Another process's mapping, in effect.
            let other = map(&memory, 0, BYTES);
            (0..BYTES).step_by(4096).for_each(|i| other.add(i).write_volatile(3));
            let huge = found(other).1;
            if huge != 2 * HUGE_PAGE_BYTES {
                let first = at.cast();
                assert_ne!(libc::madvise(first, 2 * HUGE_PAGE_BYTES, MADV_COLLAPSE), 0, "the kernel can");
                eprintln!("not tried: the kernel makes no huge pages of a memfd (Linux 6.1)");
            }
            libc::munmap(at.cast(), BYTES);
            libc::munmap(other.cast(), BYTES);
        }
    }
}
