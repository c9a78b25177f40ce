//! The calling half of a ring: any thread of a process, at any nesting of signal handlers, claims a slot, writes a
//! request, and waits for the reply. No allocation, no lock, no errno changed.

use std::cell::Cell;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use forebay_sys::wait::{self, Count, Learnt};
use forebay_types::limits::{CALL_TIMEOUT_MS, LIVENESS_PERIOD_MS, MESSAGE_BYTES_MAX, RING_SLOTS};
use forebay_types::{is_for_data, may_change, Ino};

use crate::doorbell::Doorbell;
use crate::serve::{
    slot_offset, DONE, EPOCH_OFFSET, LEN_OFFSET, MESSAGE_OFFSET, PENDING_OFFSET, REPLY_OFFSET, REQUESTED,
    RING_BYTES, SEQ_OFFSET, SLEEPING,
};
use crate::shared::Mapping;
use crate::waiter::{is_simulated, now_ns, sleep};

/// Spins at least so often before sleeping: shorter than one futex call.
const SPINS_MIN: u64 = 32;
/// Spins at most so often: some 40 µs, several times a served request.
const SPINS_MAX: u64 = 2048;
/// A sleep that ends sooner than this is longer than the spin that would have spared it: it holds two wake-ups.
const SLEEP_SHORT_NS: u64 = 100_000;
/// A call that finds no slot free yields for so long, and then sleeps a millisecond at a time: the daemon may be
/// stopped.
const YIELDS_MS: u64 = 10;
/// Spins between two yields.
const SPINS_PER_YIELD: u32 = 64;

/// Why a call has no reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallFailure {
    /// The daemon did not answer in time, or `alive` said that it is gone.
    Gone,
    /// The daemon's answer is longer than a message can be.
    Malformed,
}

/// A backing file to be unlinked: of an inode without names, that has one backing file, on a target of this node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Removal {
    /// The inode.
    pub ino: Ino,
    /// Index of the target.
    pub target: u16,
}

/// A process's own ring.
#[derive(Debug)]
pub struct Ring {
    mapping: Mapping,
    doorbell: Doorbell,
    /// Slots in use, a bit each.
    claimed: AtomicU64,
    /// The sequence of each slot's last request.
    seq: [AtomicU64; RING_SLOTS],
    /// Slots in use by calls that were given up, a bit each: free when the daemon has answered.
    given_up: AtomicU64,
    /// What the daemon said to keep for each slot's next request.
    kept: [AtomicU64; RING_SLOTS],
    /// The removal that each slot's client owes: the inode, 0 for none, and the target.
    owed: [(AtomicU64, AtomicU32); RING_SLOTS],
    /// How long spinning has paid of late.
    spins: Learnt,
    /// Threads that wait for data.
    data_waits: AtomicUsize,
}

/// A thread waits for data, until this is dropped.
struct DataWait<'r>(&'r AtomicUsize);

impl Drop for DataWait<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Ring {
    /// Maps a ring and the doorbell, as the daemon handed them over.
    pub fn open(ring: BorrowedFd<'_>, doorbell: BorrowedFd<'_>) -> io::Result<Ring> {
        Ok(Ring {
            mapping: Mapping::new(ring, RING_BYTES, true)?,
            doorbell: Doorbell::open(doorbell)?,
            claimed: AtomicU64::new(0),
            given_up: AtomicU64::new(0),
            seq: [const { AtomicU64::new(0) }; RING_SLOTS],
            kept: [const { AtomicU64::new(0) }; RING_SLOTS],
            owed: [const { (AtomicU64::new(0), AtomicU32::new(0)) }; RING_SLOTS],
            spins: Learnt::new(SPINS_MAX, SPINS_MIN, SPINS_MIN),
            data_waits: AtomicUsize::new(0),
        })
    }

    /// The epoch of the board that may be trusted now.
    #[inline]
    pub fn epoch(&self) -> u64 {
        self.mapping.word64(EPOCH_OFFSET).load(Ordering::Acquire)
    }

    /// Sends a request of at most [`MESSAGE_BYTES_MAX`] bytes; the reply goes to `reply`. `then` sees it before the
    /// slot can carry another request. The daemon takes the slot's next request as the sign that the client has done
    /// what the reply calls for. `alive` is called about every [`LIVENESS_PERIOD_MS`] to see whether waiting makes
    /// sense. For clients that never owe a removal.
    pub fn call<T>(
        &self,
        request: &[u8],
        reply: &mut [u8],
        alive: &dyn Fn() -> bool,
        then: impl FnOnce(&[u8]) -> T,
    ) -> Result<T, CallFailure> {
        let claim = self.claim(alive)?;
        let owed = claim.post(request);
        debug_assert!(owed.is_none(), "{owed:?} is forgotten");
        claim.finish(reply, alive, |reply, _| then(reply))
    }

    /// Claims a slot, to post a request on it, do something else while it is served, and take the reply.
    pub fn claim(&self, alive: &dyn Fn() -> bool) -> Result<Claim<'_>, CallFailure> {
        let begun_ns = now_ns();
        let slot = self.claim_slot(alive).ok_or(CallFailure::Gone)?;
        Ok(Claim::new(self, slot, begun_ns))
    }

    /// Frees slots of calls that were given up and are answered by now.
    fn take_back(&self) {
        let mut left = self.given_up.load(Ordering::Acquire);
        while left != 0 {
            let slot = left.trailing_zeros() as usize;
            let bit = 1 << slot;
            left &= !bit;
            let answered = self.mapping.word32(slot_offset(slot)).load(Ordering::Acquire) == DONE;
            // One thread alone frees it.
            if answered && self.given_up.fetch_and(!bit, Ordering::AcqRel) & bit != 0 {
                // While this thread did not run, others may have freed it, used it, and given it up once more.
                match self.mapping.word32(slot_offset(slot)).load(Ordering::Acquire) {
                    DONE => self.claimed.fetch_and(!bit, Ordering::Release),
                    _ => self.given_up.fetch_or(bit, Ordering::AcqRel),
                };
            }
        }
    }

    /// Claims a slot if one is free. Who has posted on one already must not wait for another: those who have the others
    /// may be waiting too.
    pub fn try_claim(&self) -> Option<Claim<'_>> {
        self.take_back();
        let mut claimed = self.claimed.load(Ordering::Relaxed);
        while claimed != u64::MAX {
            let slot = (!claimed).trailing_zeros() as usize;
            let with = claimed | 1 << slot;
            match self.claimed.compare_exchange_weak(claimed, with, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(Claim::new(self, slot, now_ns())),
                Err(now) => claimed = now,
            }
        }
        None
    }

    /// Claims a free slot, the lowest first so that a program with one thread touches one. With all 64 in use it
    /// yields until one is free; none when the daemon is gone, and they will never be, or none is for too long.
    fn claim_slot(&self, alive: &dyn Fn() -> bool) -> Option<usize> {
        self.take_back();
        let mut claimed = self.claimed.load(Ordering::Relaxed);
        let (mut asked, mut since) = (None, None);
        loop {
            if claimed == u64::MAX {
                let now = now_ns() / 1_000_000;
                if now - *since.get_or_insert(now) >= CALL_TIMEOUT_MS {
                    return None;
                }
                if now - *asked.get_or_insert(now) >= LIVENESS_PERIOD_MS {
                    if !alive() {
                        return None;
                    }
                    asked = Some(now);
                    self.take_back();
                }
                if now - since.unwrap_or(now) > YIELDS_MS {
                    static NOTHING: AtomicU32 = AtomicU32::new(0);
                    sleep(&NOTHING, 0, 1);
                } else {
                    // SAFETY: no arguments.
                    unsafe { libc::sched_yield() };
                }
                claimed = self.claimed.load(Ordering::Relaxed);
                continue;
            }
            let slot = (!claimed).trailing_zeros() as usize;
            match self.claimed.compare_exchange_weak(
                claimed,
                claimed | 1 << slot,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(slot),
                Err(now) => claimed = now,
            }
        }
    }

    /// Waits for the reply: if it `may_spin`, for as long as that has paid lately, and then asleep. False when the daemon is
    /// gone.
    ///
    /// Whether spinning pays is learnt from the sleeps too: one that ended soon would have been spared by a longer
    /// spin, and cost the daemon a system call.
    fn wait(
        &self,
        state: &AtomicU32,
        alive: &dyn Fn() -> bool,
        (begun_ns, until_ns): (u64, u64),
        may_spin: bool,
    ) -> bool {
        let spins = if is_simulated() || !may_spin { 0 } else { self.spins.get() };
        // It yields too, as the daemon may want this very processor.
        let is_done = || (state.load(Ordering::Acquire) == DONE).then_some(());
        if wait::look(&mut Count::new(spins as u32, SPINS_PER_YIELD), is_done).is_some() {
            return true;
        }
        let slept_from = now_ns();
        let until_ns = until_ns.min(begun_ns.saturating_add(CALL_TIMEOUT_MS * 1_000_000));
        loop {
            match state.compare_exchange(REQUESTED, SLEEPING, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) | Err(SLEEPING) => {}
                Err(_) => return true,
            }
            let started = now_ns();
            if started >= until_ns {
                return state.load(Ordering::Acquire) == DONE;
            }
            sleep(state, SLEEPING, LIVENESS_PERIOD_MS.min((until_ns - started).div_ceil(1_000_000)));
            let now = now_ns();
            if state.load(Ordering::Acquire) == DONE {
                match now.saturating_sub(slept_from) < SLEEP_SHORT_NS {
                    _ if !may_spin => {}
                    true => self.spins.lengthen(),
                    false => self.spins.shorten(spins),
                }
                return true;
            }
            let slept_ms = now.saturating_sub(started) / 1_000_000;
            if slept_ms >= LIVENESS_PERIOD_MS / 2 {
                // A wake-up lost with a killed daemon, or a doorbell that a client scribbled on.
                self.doorbell.ring();
                if !alive() {
                    return state.load(Ordering::Acquire) == DONE;
                }
            }
        }
    }
}

/// A slot in use by one call. Dropped between [`Claim::post`] and the reply it stays in use until that comes: the
/// daemon will write to it.
#[derive(Debug)]
pub struct Claim<'r> {
    ring: &'r Ring,
    slot: usize,
    posted: Cell<bool>,
    /// What was posted may change the shard.
    changes: Cell<bool>,
    /// What was posted is a request for data.
    is_for_data: Cell<bool>,
    /// When the call began, which may have waited for a slot.
    begun_ns: u64,
}

impl<'r> Claim<'r> {
    fn new(ring: &'r Ring, slot: usize, begun_ns: u64) -> Claim<'r> {
        let (posted, changes, is_for_data) = (Cell::new(false), Cell::new(false), Cell::new(false));
        Claim { ring, slot, posted, changes, is_for_data, begun_ns }
    }

    /// Begins to wait. Who waits for data while another thread does sleeps at once: what counts then is no longer when one of
    /// them goes on, and their spins would take processors from the daemons that serve them. Returns whether spinning may
    /// pay.
    fn begin_wait(&self) -> (Option<DataWait<'r>>, bool) {
        if !self.is_for_data.get() {
            return (None, true);
        }
        let waits = &self.ring.data_waits;
        let others = waits.fetch_add(1, Ordering::Relaxed);
        (Some(DataWait(waits)), others == 0)
    }

    /// The number that was kept for this slot's next request; 0 when none was.
    pub fn kept(&self) -> u64 {
        self.ring.kept[self.slot].load(Ordering::Relaxed)
    }

    /// Keeps a number for this slot's next request.
    pub fn keep(&self, number: u64) {
        self.ring.kept[self.slot].store(number, Ordering::Relaxed);
    }

    /// Owes a removal: the client unlinks the backing file after it has posted the slot's next request, while the
    /// daemon serves that.
    pub fn owe(&self, removal: Removal) {
        let (ino, target) = &self.ring.owed[self.slot];
        target.store(removal.target.into(), Ordering::Relaxed);
        ino.store(removal.ino.0, Ordering::Relaxed);
    }

    /// The removal that is owed, for the caller to do now.
    pub fn take_owed(&self) -> Option<Removal> {
        let (ino, target) = &self.ring.owed[self.slot];
        match ino.load(Ordering::Relaxed) {
            0 => None,
            number => {
                ino.store(0, Ordering::Relaxed);
                Some(Removal { ino: Ino(number), target: target.load(Ordering::Relaxed) as u16 })
            }
        }
    }

    /// Posts a request, at most [`MESSAGE_BYTES_MAX`] bytes, and wakes the daemon. Once; [`Claim::finish`] must follow.
    /// The result is what the slot's client owed: it must be done before the reply is taken, as the daemon deletes the
    /// orphan's record when the slot's next request comes.
    #[must_use]
    pub fn post(&self, request: &[u8]) -> Option<Removal> {
        assert!(request.len() <= MESSAGE_BYTES_MAX && !self.posted.replace(true));
        self.changes.set(may_change(request));
        let (ring, slot, at) = (self.ring, self.slot, slot_offset(self.slot));
        let seq = ring.seq[slot].load(Ordering::Relaxed) + 1;
        ring.seq[slot].store(seq, Ordering::Relaxed);
        ring.mapping.store(at + MESSAGE_OFFSET, request);
        ring.mapping.word32(at + LEN_OFFSET).store(request.len() as u32, Ordering::Relaxed);
        ring.mapping.word64(at + SEQ_OFFSET).store(seq, Ordering::Relaxed);
        ring.mapping.word32(at).store(REQUESTED, Ordering::Release);
        ring.mapping.word64(PENDING_OFFSET).fetch_or(1 << slot, Ordering::SeqCst);
        self.is_for_data.set(request.first().is_some_and(|number| is_for_data(*number)));
        match self.is_for_data.get() {
            true => ring.doorbell.ring_for_data(),
            false => ring.doorbell.ring(),
        }
        self.take_owed()
    }

    /// True when the reply to what was posted is there.
    pub fn is_answered(&self) -> bool {
        self.ring.mapping.word32(slot_offset(self.slot)).load(Ordering::Acquire) == DONE
    }

    /// Waits for the reply to what was posted; `then` sees it before the slot is free.
    pub fn finish<T>(
        self,
        reply: &mut [u8],
        alive: &dyn Fn() -> bool,
        then: impl FnOnce(&[u8], &Self) -> T,
    ) -> Result<T, CallFailure> {
        self.finish_by(u64::MAX, reply, alive, then)
    }

    /// The same, for who waits no longer than until this time by [`crate::call_clock`]: one that is past takes what is
    /// there.
    pub fn finish_by<T>(
        self,
        until_ns: u64,
        reply: &mut [u8],
        alive: &dyn Fn() -> bool,
        then: impl FnOnce(&[u8], &Self) -> T,
    ) -> Result<T, CallFailure> {
        assert!(reply.len() <= MESSAGE_BYTES_MAX);
        let (mapping, at) = (&self.ring.mapping, slot_offset(self.slot));
        let times = (self.begun_ns, until_ns);
        let (waits, may_spin) = self.begin_wait();
        let is_answered = self.ring.wait(mapping.word32(at), alive, times, may_spin);
        drop(waits);
        if !is_answered {
            return Err(CallFailure::Gone);
        }
        self.posted.set(false);
        let len = mapping.word32(at + REPLY_OFFSET).load(Ordering::Relaxed) as usize;
        let Some(reply) = reply.get_mut(..len) else { return Err(CallFailure::Malformed) };
        mapping.load(at + REPLY_OFFSET + 8, reply);
        Ok(then(reply, &self))
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if self.posted.get() {
            // It stays claimed until it is answered: the daemon, should it come back, may still write into it. What was
            // to be kept for the slot's next request has gone with this one.
            self.keep(0);
            // A change may leave its client something to do, a backing file to unlink, and the slot's next request says
            // that it was done. It was not: the slot stays in use, and the daemon does it when this process ends.
            if !self.changes.get() {
                self.ring.given_up.fetch_or(1 << self.slot, Ordering::AcqRel);
            }
            return;
        }
        self.ring.claimed.fetch_and(!(1 << self.slot), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::ServedRing;
    use std::os::fd::AsFd;

    #[test]
    fn who_waits_for_data_while_another_thread_does_sleeps_at_once() {
        let ((ring_fd, served), (doorbell_fd, _doorbell)) =
            (ServedRing::create().unwrap(), Doorbell::create().unwrap());
        let ring = &Ring::open(ring_fd.as_fd(), doorbell_fd.as_fd()).unwrap();
        let request = |for_data| [(0..=u8::MAX).find(|number| is_for_data(*number) == for_data).unwrap()];
        let claim = |for_data| {
            let claim = ring.claim(&|| true).unwrap();
            assert_eq!(claim.post(&request(for_data)), None);
            claim
        };
        let [first, second, other] = [claim(true), claim(true), claim(false)];
        let [first_slot, second_slot] = [&first, &second].map(|claim| claim.slot);
        let sleeps = |slot| {
            while ring.mapping.word32(slot_offset(slot)).load(Ordering::Acquire) != SLEEPING {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(move || {
                first.finish(&mut [0; 8], &|| true, |reply, _| assert_eq!(reply, b"1")).unwrap()
            });
            sleeps(first_slot);
            assert_eq!([second.begin_wait().1, other.begin_wait().1], [false, true]);
            // What was slept through without a spin says nothing of spins.
            let spins = ring.spins.get();
            let waits = scope.spawn(move || second.finish(&mut [0; 8], &|| true, |_, _| ()).unwrap());
            sleeps(second_slot);
            served.answer(second_slot, b"2");
            waits.join().unwrap();
            assert_eq!(ring.spins.get(), spins);
            served.answer(first_slot, b"1");
        });
        assert!(claim(true).begin_wait().1, "nobody waits any more");
    }
}
