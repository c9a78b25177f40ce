//! The server's part: requests take as long as the medium would need. A thread waits for its request's time by itself, so
//! there are as many threads as the medium has channels.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::OnceLock;

use forebay_block::Served;
use forebay_pacing::{Direction, Pacers, Place};

use crate::control::Control;
use crate::store::{Fault, Store};

/// Threads besides those that wait for the medium, so that a flush is not behind writes.
const SPARE_THREADS: usize = 2;
/// Most nanoseconds that the copy of 1 MiB is taken to need: a thread that was interrupted says more.
const COPY_NS_MAX: u64 = 1_000_000;

/// What the threads share.
#[derive(Debug)]
pub(crate) struct Medium {
    pub(crate) store: Store,
    pub(crate) pacers: Pacers,
    pub(crate) control: Control,
    pub(crate) copying: Copying,
}

/// How long the kernel takes to copy a transfer between the server and the device's user, learnt from the replies to
/// reads. The copy is a part of the time that a request takes for its user, so it is a part of the emulated time.
#[derive(Debug, Default)]
pub(crate) struct Copying(AtomicU64);

impl Copying {
    /// Takes a transfer into account whose copy took `ns`.
    fn note(&self, bytes: usize, ns: u64) {
        let per_mib = (ns.saturating_mul(1 << 20) / bytes.max(1) as u64).min(COPY_NS_MAX);
        let before = self.0.load(Ordering::Relaxed);
        // Interruptions of this thread count little, and a first value at once.
        let next = if before == 0 { per_mib } else { before - before / 8 + per_mib.min(2 * before) / 8 };
        self.0.store(next, Ordering::Relaxed);
    }

    /// The time that the copy of a transfer takes.
    fn of(&self, bytes: usize) -> u64 {
        (self.0.load(Ordering::Relaxed).saturating_mul(bytes as u64)) >> 20
    }
}

/// The mapping, for the handler of SIGSEGV.
static GUARDED: OnceLock<(usize, usize)> = OnceLock::new();
/// Bytes of [`GUARDED`] that a stray store hit, for tests.
static STRAY_EXIT: AtomicUsize = AtomicUsize::new(0);
/// Exit status of a server whose write protection caught a store.
pub(crate) const CAUGHT: i32 = 86;

/// Ends the process after a store to the protected mapping. Only calls that are safe in a handler.
extern "C" fn on_fault(_signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid structure; write(2) and _exit(2) are safe in a handler.
    unsafe {
        let address = (*info).si_addr() as usize;
        if let Some((base, bytes)) = GUARDED.get() {
            if address.wrapping_sub(*base) < *bytes {
                STRAY_EXIT.store(address - base, Ordering::Relaxed);
                let line = b"ERROR a stray write to the medium was caught by its write protection: the device ends\n";
                libc::write(2, line.as_ptr().cast(), line.len());
                libc::_exit(CAUGHT);
            }
        }
        libc::signal(libc::SIGSEGV, libc::SIG_DFL);
    }
}

/// Has stray stores to the store's mapping end this process.
pub(crate) fn guard(store: &Store) {
    let _ = GUARDED.set((store.base() as usize, store.bytes()));
    // SAFETY: an all-zero sigaction is valid; the handler keeps to what a handler may do.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_fault as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGSEGV, &action, std::ptr::null_mut());
    }
}

impl forebay_block::Medium for Medium {
    fn bytes(&self) -> u64 {
        self.store.bytes() as u64
    }

    fn threads(&self) -> usize {
        self.pacers.pacer(0).medium().queue_depth as usize + SPARE_THREADS
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> Served {
        let ticket = self.pacers.pacer(0).begin();
        self.obey_a_test();
        let len = to.len();
        let ahead_ns = self.copying.of(len) + self.control.way_ns(Direction::Read, len);
        // Before its bytes are moved: parts of one request, which arrive together, reach the medium in their order.
        let reserved = ticket.reserve(Direction::Read, Place { file: 0, offset }, len as u64);
        note(self, offset, len, self.store.read(offset, to))?;
        reserved.wait(ahead_ns);
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> Served {
        let ticket = self.pacers.pacer(0).begin();
        self.obey_a_test();
        let len = from.len();
        let way_ns = self.control.way_ns(Direction::Write, len);
        let ticket = ticket.arrived_before(self.copying.of(len));
        let reserved = ticket.reserve(Direction::Write, Place { file: 0, offset }, len as u64);
        note(self, offset, len, self.store.write(offset, from, &self.control))?;
        reserved.wait(way_ns);
        Ok(())
    }

    fn flush(&self) -> Served {
        self.control.count_sync();
        Ok(())
    }

    /// It takes what the memory takes.
    fn zero(&self, offset: u64, bytes: u64, _discards: bool) -> Served {
        note(self, offset, bytes as usize, self.store.zero(offset, bytes, &self.control))?;
        self.control.count_discarded(bytes);
        Ok(())
    }

    fn copied(&self, bytes: usize, ns: u64) {
        self.copying.note(bytes, ns);
    }
}

impl Medium {
    fn obey_a_test(&self) {
        if let Some(byte) = self.control.takes_stray_store() {
            stray(self, byte as usize);
        }
    }
}

/// Logs and counts a fault.
fn note(medium: &Medium, offset: u64, len: usize, done: Result<(), Fault>) -> Served {
    match done {
        Ok(()) => Ok(()),
        Err(Fault::Range) => {
            medium.control.count_refused();
            tracing::error!(
                "a request for {len} bytes at {offset} was refused: these are not blocks of the device"
            );
            Err(libc::EINVAL)
        }
        Err(Fault::Checksum { block }) => {
            medium.control.count_checksum_error();
            tracing::error!(
                "block {block} does not have its checksum: its bytes changed after they were written"
            );
            Err(libc::EIO)
        }
        Err(Fault::Written { block }) => {
            medium.control.count_verify_error();
            tracing::error!("block {block} does not read back as it was written");
            Err(libc::EIO)
        }
        Err(Fault::Memory(errno)) => {
            tracing::error!("cannot write the medium: {}", io::Error::from_raw_os_error(errno));
            Err(libc::EIO)
        }
    }
}

/// Stores to a byte of the mapping without the store's knowledge, as a wild pointer would. Tests order it.
#[cold]
fn stray(medium: &Medium, byte: usize) {
    if byte < medium.store.bytes() {
        // SAFETY: within the mapping. If that is protected, the store is a fault, which is what is tested.
        unsafe { medium.store.base().add(byte).write_volatile(0xa5) };
    }
}

/// The descriptors that commands open through /proc.
pub(crate) fn numbers(memory: &impl AsRawFd, pacing: &impl AsFd, control: &impl AsFd) -> [i32; 3] {
    [memory.as_raw_fd(), pacing.as_fd().as_raw_fd(), control.as_fd().as_raw_fd()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copying_follows_what_copies_take_and_not_single_interruptions() {
        let copying = Copying::default();
        assert_eq!(copying.of(1 << 20), 0, "nothing was copied yet");
        copying.note(1 << 20, 80_000);
        assert_eq!((copying.of(1 << 20), copying.of(1 << 19)), (80_000, 40_000));
        copying.note(1 << 20, 80_000_000);
        assert!(copying.of(1 << 20) <= 90_000, "{}", copying.of(1 << 20));
        for _ in 0..100 {
            copying.note(1 << 18, 10_000);
        }
        let settled = copying.of(1 << 20);
        assert!((39_000..42_000).contains(&settled), "{settled}");
    }
}
