//! The doorbell: one word on which the daemon sleeps when no ring has a request, and by which clients wake it.
//!
//! Every client can write the word, and the one that says whether requests for data need a ring. The worst that an
//! overwritten doorbell causes is a late wake-up, because the daemon also checks the rings by timer. A daemon without a
//! thread that polls for requests for data writes the second word again whenever it falls asleep.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use forebay_sys::wait;

use crate::shared::{memfd_sealed, Mapping, Seal};

const BYTES: usize = 4096;
const AWAKE: u32 = 0;
const SLEEPING: u32 = 1;
/// Offset of the word that says whether a thread polls for requests for data.
const DATA_OFFSET: usize = 64;
const POLLED: u32 = 1;
const NOT_POLLED: u32 = 0;

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

    /// Maps a doorbell, given its descriptor.
    pub fn open(fd: BorrowedFd<'_>) -> io::Result<Doorbell> {
        Ok(Doorbell { mapping: Mapping::new(fd, BYTES, true)? })
    }

    /// Wakes the daemon if it sleeps. Call after the request is visible.
    #[inline]
    pub fn ring(&self) {
        let word = self.mapping.word32(0);
        // The fence orders the request's stores before this load; `falls_asleep` has its counterpart. So either this
        // client sees that the daemon sleeps, or the daemon sees the request.
        std::sync::atomic::fence(Ordering::SeqCst);
        if word.load(Ordering::Relaxed) != AWAKE && word.swap(AWAKE, Ordering::SeqCst) != AWAKE {
            wait::wake(word, 1);
        }
    }

    /// The same for a request for data, which a thread that polls for those finds by itself.
    #[inline]
    pub fn ring_for_data(&self) {
        // As in `ring`; `leaves_data` has its counterpart.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.mapping.word32(DATA_OFFSET).load(Ordering::Relaxed) == NOT_POLLED {
            self.ring();
        }
    }

    /// A thread of the daemon polls for requests for data from here on: clients that post such do not wake another thread.
    #[inline]
    pub fn minds_data(&self) {
        let word = self.mapping.word32(DATA_OFFSET);
        if word.load(Ordering::Relaxed) != POLLED {
            word.store(POLLED, Ordering::SeqCst);
        }
    }

    /// That thread is about to sleep: clients ring for data again. `idle` is called after they can see that. If it returns
    /// false there is work, and the thread must not sleep.
    pub fn leaves_data(&self, idle: impl FnOnce() -> bool) -> bool {
        self.mapping.word32(DATA_OFFSET).store(NOT_POLLED, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
        idle()
    }

    /// The daemon's sleep: until a ring, or for `timeout_ms`. `idle` is called once more after clients can see that
    /// the daemon sleeps. If it returns false there is work, and the daemon does not sleep.
    pub fn sleep(&self, timeout_ms: u64, idle: impl FnOnce() -> bool) {
        if self.falls_asleep(idle) {
            self.sleep_on(timeout_ms);
        }
    }

    /// The first half of [`Doorbell::sleep`]. Returns false when there is work. If it returns true, the caller calls
    /// [`Doorbell::sleep_on`]. A ring between the two is not missed, so the caller may first leave to other threads
    /// what `idle` checks.
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

    /// Spares clients the wake-up while the daemon's thread sleeps and another of its threads polls for their
    /// requests. Before the other thread stops polling, it calls [`Doorbell::falls_asleep`] in the sleeper's place, or
    /// [`Doorbell::wake`].
    #[inline]
    pub fn mind(&self) {
        let word = self.mapping.word32(0);
        if word.load(Ordering::Relaxed) != AWAKE {
            word.store(AWAKE, Ordering::SeqCst);
        }
    }

    /// Wakes the daemon's sleeping thread, even while another thread minds the doorbell.
    pub fn wake(&self) {
        let word = self.mapping.word32(0);
        word.store(AWAKE, Ordering::SeqCst);
        wait::wake(word, 1);
    }

    /// The second half of [`Doorbell::sleep`].
    pub fn sleep_on(&self, timeout_ms: u64) {
        let word = self.mapping.word32(0);
        wait::sleep(word, SLEEPING, Duration::from_millis(timeout_ms));
        word.store(AWAKE, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doorbell_that_is_minded_needs_no_ringing_until_it_is_given_back() {
        let (_, doorbell) = Doorbell::create().unwrap();
        let word = || doorbell.mapping.word32(0).load(Ordering::SeqCst);
        assert!(doorbell.falls_asleep(|| true));
        assert_eq!(word(), SLEEPING);
        doorbell.mind();
        doorbell.ring();
        assert_eq!(word(), AWAKE);
        assert!(doorbell.falls_asleep(|| true), "in the sleeper's place");
        assert_eq!(word(), SLEEPING);
        doorbell.mind();
        assert!(!doorbell.falls_asleep(|| false), "there was work");
        assert_eq!(word(), AWAKE);
    }

    #[test]
    fn request_for_data_rings_only_while_no_thread_polls_for_those() {
        let (_, doorbell) = Doorbell::create().unwrap();
        let word = || doorbell.mapping.word32(0).load(Ordering::SeqCst);
        assert!(doorbell.falls_asleep(|| true));
        doorbell.minds_data();
        doorbell.ring_for_data();
        assert_eq!(word(), SLEEPING);
        assert!(doorbell.leaves_data(|| {
            doorbell.ring_for_data();
            true
        }));
        assert_eq!(word(), AWAKE, "the thread would not see it");
        assert!(doorbell.falls_asleep(|| true));
        doorbell.minds_data();
        doorbell.ring();
        assert_eq!(word(), AWAKE, "another request");
    }

    #[test]
    fn sleeper_is_woken_though_its_doorbell_is_minded() {
        let (fd, doorbell) = Doorbell::create().unwrap();
        use std::os::fd::AsFd;
        let others = Doorbell::open(fd.as_fd()).unwrap();
        let woken = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert!(doorbell.falls_asleep(|| true));
                doorbell.sleep_on(3_600_000);
                woken.store(true, Ordering::SeqCst);
            });
            while !woken.load(Ordering::SeqCst) {
                others.mind();
                others.wake();
            }
        });
    }
}
