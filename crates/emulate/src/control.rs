//! A page that the server shares with commands: counters of faults, the faults that tests have it inject, and how long
//! requests are on their way.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_pacing::Direction;

use crate::way::Way;

/// Bytes of the page.
const PAGE_BYTES: usize = 4096;

#[repr(C)]
struct Words {
    checksum: AtomicU64,
    written: AtomicU64,
    refused: AtomicU64,
    syncs: AtomicU64,
    discarded_bytes: AtomicU64,
    spoil_writes: AtomicU64,
    /// The byte that a stray store is to hit, plus 1.
    stray: AtomicU64,
    /// The way of reads and of writes: a small one's, a large one's, in nanoseconds.
    ways: [[AtomicU64; 2]; 2],
}

/// What a device counted besides its requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub struct Faults {
    /// Reads of blocks that did not have their checksum.
    pub checksum_errors: u64,
    /// Writes that did not read back.
    pub verify_errors: u64,
    /// Requests that were refused.
    pub refused: u64,
    /// Flushes.
    pub syncs: u64,
    /// Bytes that were discarded or set to zero.
    pub discarded_bytes: u64,
}

/// The page, mapped.
#[derive(Debug)]
pub(crate) struct Control(*const Words);

// SAFETY: atomics alone.
unsafe impl Send for Control {}
// SAFETY: as above.
unsafe impl Sync for Control {}

impl Control {
    /// Makes the page.
    pub(crate) fn create() -> io::Result<(Control, OwnedFd)> {
        // SAFETY: plain system calls; the descriptor is new and ours.
        let fd = unsafe {
            let fd =
                libc::memfd_create(c"forebay-control".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            let fd = OwnedFd::from_raw_fd(fd);
            if libc::ftruncate(fd.as_raw_fd(), PAGE_BYTES as libc::off_t) != 0
                || libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW)
                    != 0
            {
                return Err(io::Error::last_os_error());
            }
            fd
        };
        Ok((Control::open(fd.as_fd())?, fd))
    }

    /// Maps the page of a descriptor.
    pub(crate) fn open(fd: BorrowedFd<'_>) -> io::Result<Control> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice; the file is sealed to be one page.
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), PAGE_BYTES, access, libc::MAP_SHARED, fd.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Control(base.cast_const().cast()))
    }

    fn words(&self) -> &Words {
        // SAFETY: mapped until the drop, aligned to a page, and made of atomics, for which all values are valid.
        unsafe { &*self.0 }
    }

    pub(crate) fn count_checksum_error(&self) {
        self.words().checksum.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_verify_error(&self) {
        self.words().written.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_refused(&self) {
        self.words().refused.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_sync(&self) {
        self.words().syncs.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_discarded(&self, bytes: u64) {
        self.words().discarded_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Begins to count flushes and discards again.
    pub(crate) fn reset_counted(&self) {
        self.words().syncs.store(0, Ordering::Relaxed);
        self.words().discarded_bytes.store(0, Ordering::Relaxed);
    }

    /// What was counted.
    pub(crate) fn faults(&self) -> Faults {
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let words = self.words();
        Faults {
            checksum_errors: load(&words.checksum),
            verify_errors: load(&words.written),
            refused: load(&words.refused),
            syncs: load(&words.syncs),
            discarded_bytes: load(&words.discarded_bytes),
        }
    }

    /// Sets how long requests of a direction are on their way.
    pub(crate) fn set_way(&self, direction: Direction, way: Way) {
        let [small, large] = &self.words().ways[direction as usize];
        small.store(way.small_ns, Ordering::Relaxed);
        large.store(way.large_ns, Ordering::Relaxed);
    }

    /// How long requests of a direction are on their way.
    pub(crate) fn way(&self, direction: Direction) -> Way {
        let [small_ns, large_ns] =
            self.words().ways[direction as usize].each_ref().map(|word| word.load(Ordering::Relaxed));
        Way { small_ns, large_ns }
    }

    /// How long a request is on its way.
    pub(crate) fn way_ns(&self, direction: Direction, bytes: usize) -> u64 {
        self.way(direction).of(bytes)
    }

    /// Has the next verified write go wrong.
    pub(crate) fn spoil_a_write(&self) {
        self.words().spoil_writes.store(1, Ordering::Release);
    }

    /// True once after [`Control::spoil_a_write`].
    pub(crate) fn takes_spoilt_write(&self) -> bool {
        let word = &self.words().spoil_writes;
        word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::Acquire) != 0
    }

    /// Has the server store to a byte of its memory, as a wild pointer would.
    pub(crate) fn order_stray_store(&self, byte: u64) {
        self.words().stray.store(byte + 1, Ordering::Release);
    }

    /// The byte to store to, once.
    pub(crate) fn takes_stray_store(&self) -> Option<u64> {
        let word = &self.words().stray;
        match word.load(Ordering::Relaxed) {
            0 => None,
            _ => word.swap(0, Ordering::Acquire).checked_sub(1),
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // SAFETY: mapped by `open` with this length; every reference into it borrows `self`.
        unsafe { libc::munmap(self.0.cast_mut().cast(), PAGE_BYTES) };
    }
}
