//! The doorbell: one word on which the daemon sleeps when no ring has a request, and that clients ring.
//!
//! Every client can write it. The worst that a scribbled doorbell does is a late wake-up: the daemon looks at the rings
//! by timer too.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use crate::futex;
use crate::shared::{memfd_sealed, Mapping, Seal};

const BYTES: usize = 4096;
const AWAKE: u32 = 0;
const SLEEPING: u32 = 1;

/// The shared word by which clients wake the daemon.
#[derive(Debug)]
pub struct Doorbell {
    mapping: Mapping,
}

impl Doorbell {
    /// A new doorbell, and the descriptor to hand to clients.
    pub fn create() -> io::Result<(OwnedFd, Doorbell)> {
        let (fd, mapping) = memfd_sealed(c"forebay-doorbell", BYTES, Seal::Size)?;
        Ok((fd, Doorbell { mapping }))
    }

    /// Maps a doorbell that was handed over.
    pub fn open(fd: BorrowedFd<'_>) -> io::Result<Doorbell> {
        Ok(Doorbell { mapping: Mapping::new(fd, BYTES, true)? })
    }

    /// Wakes the daemon if it sleeps. Call after the request is visible.
    #[inline]
    pub fn ring(&self) {
        let word = self.mapping.word32(0);
        // The fence orders the request's stores before this load; `sleep` has its twin. One of the two sides sees
        // the other.
        std::sync::atomic::fence(Ordering::SeqCst);
        if word.load(Ordering::Relaxed) != AWAKE && word.swap(AWAKE, Ordering::SeqCst) != AWAKE {
            futex::wake_one(word);
        }
    }

    /// The daemon's sleep: until a ring, or `timeout_ms`. `idle` is asked once more after clients can see that the
    /// daemon sleeps; when it says false there is work and the daemon does not sleep.
    pub fn sleep(&self, timeout_ms: u64, idle: impl FnOnce() -> bool) {
        if self.falls_asleep(idle) {
            self.sleep_on(timeout_ms);
        }
    }

    /// The first half of [`Doorbell::sleep`]: false when there is work. When true, [`Doorbell::sleep_on`] follows; who rings
    /// between the two is not missed, so that what `idle` looks at may be left to others before.
    pub fn falls_asleep(&self, idle: impl FnOnce() -> bool) -> bool {
        let word = self.mapping.word32(0);
        word.store(SLEEPING, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
        let asleep = idle();
        if !asleep {
            word.store(AWAKE, Ordering::SeqCst);
        }
        asleep
    }

    /// The second half.
    pub fn sleep_on(&self, timeout_ms: u64) {
        let word = self.mapping.word32(0);
        futex::wait(word, SLEEPING, timeout_ms);
        word.store(AWAKE, Ordering::SeqCst);
    }
}
