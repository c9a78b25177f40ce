//! Waiting: poll for work for as long as that pays, yield the processor now and then, sleep on a futex or descriptor.
//!
//! A sleep ends with a wake-up, which on a virtual machine costs more than most requests, so a thread that expects
//! work soon polls for it first ([`look`]). How long that pays is learnt from the results of recent looks
//! ([`Learnt`]). Between attempts it yields, so that the thread it waits for can run if it needs the same processor. A
//! caller brings its own [`Budget`], because different budgets were measured to pay: the shard and network threads
//! take into account how crowded the node is, the mount's threads share one bound, and a client counts attempts,
//! because reading its clock may be a system call.
//!
//! Nothing here allocates memory, and only a failed futex call changes errno.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What a look may spend.
pub trait Budget {
    /// Number of attempts before the next yield. A smaller number than before ends the look.
    fn looks(&mut self) -> u32;
    /// True when the look has to end before the next yield.
    fn is_spent(&mut self) -> bool;
    /// True when the yield took so long that other threads must be at work. Then `work` is tried once more, and the
    /// look ends.
    fn was_long(&mut self) -> bool;
}

/// Tries `work` until it finds something or the budget is spent.
#[inline]
pub fn look<T>(budget: &mut impl Budget, mut work: impl FnMut() -> Option<T>) -> Option<T> {
    loop {
        for _ in 0..budget.looks() {
            let found = work();
            if found.is_some() {
                return found;
            }
            std::hint::spin_loop();
        }
        if budget.is_spent() {
            return None;
        }
        std::thread::yield_now();
        if budget.was_long() {
            return work();
        }
    }
}

/// A budget of time. It reads the clock twice for each yield.
#[derive(Debug)]
pub struct Time {
    started: Instant,
    most: Duration,
    looks_per_yield: u32,
    yield_long: Duration,
    yielded_at: Instant,
    long_yield_ended: Option<Instant>,
}

impl Time {
    /// Permits attempts for `most` after `started`. A yield that takes `yield_long` ends them.
    pub fn new(started: Instant, most: Duration, looks_per_yield: u32, yield_long: Duration) -> Time {
        Time { started, most, looks_per_yield, yield_long, yielded_at: started, long_yield_ended: None }
    }

    /// When the yield that ended the look by its length returned, if there was one.
    pub fn long_yield_ended(&self) -> Option<Instant> {
        self.long_yield_ended
    }
}

impl Budget for Time {
    #[inline]
    fn looks(&mut self) -> u32 {
        self.looks_per_yield
    }

    #[inline]
    fn is_spent(&mut self) -> bool {
        self.yielded_at = Instant::now();
        self.yielded_at - self.started >= self.most
    }

    #[inline]
    fn was_long(&mut self) -> bool {
        let now = Instant::now();
        self.long_yield_ended = (now - self.yielded_at >= self.yield_long).then_some(now);
        self.long_yield_ended.is_some()
    }
}

/// A budget of attempts, which reads no clock.
#[derive(Debug)]
pub struct Count {
    left: u32,
    looks_per_yield: u32,
    is_spent: bool,
}

impl Count {
    /// Permits `most` attempts.
    pub fn new(most: u32, looks_per_yield: u32) -> Count {
        Count { left: most, looks_per_yield, is_spent: false }
    }
}

impl Budget for Count {
    #[inline]
    fn looks(&mut self) -> u32 {
        let looks = self.left.min(self.looks_per_yield);
        self.left -= looks;
        self.is_spent = looks < self.looks_per_yield;
        looks
    }

    #[inline]
    fn is_spent(&mut self) -> bool {
        self.is_spent
    }

    #[inline]
    fn was_long(&mut self) -> bool {
        false
    }
}

/// How long looking has recently paid, in the caller's unit. It becomes `most` after a sleep that a longer look would
/// have avoided, and is halved after each look in vain. Threads may share one: a lost update costs one look.
#[derive(Debug)]
pub struct Learnt {
    now: AtomicU64,
    most: u64,
    least: u64,
    floor: u64,
}

impl Learnt {
    /// Starts with `most`. A value below `least` becomes `floor`.
    pub const fn new(most: u64, least: u64, floor: u64) -> Learnt {
        Learnt { now: AtomicU64::new(most), most, least, floor }
    }

    /// What the next look may spend.
    #[inline]
    pub fn get(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    /// Records that a longer look would have paid.
    #[inline]
    pub fn lengthen(&self) {
        self.now.store(self.most, Ordering::Relaxed);
    }

    /// Records that a look was in vain, which was permitted `spent` by [`Learnt::get`].
    #[inline]
    pub fn shorten(&self, spent: u64) {
        let half = spent / 2;
        self.now.store(if half < self.least { self.floor } else { half }, Ordering::Relaxed);
    }
}

/// Sleeps while `word` is `value`, at most for `timeout`. May return early: on a wake, on a signal, or spuriously.
pub fn sleep(word: &AtomicU32, value: u32, timeout: Duration) {
    let timeout = libc::timespec {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_nsec: timeout.subsec_nanos() as libc::c_long,
    };
    // SAFETY: `word` and `timeout` are valid for the call; errors (EAGAIN, EINTR, ETIMEDOUT) need no answer.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            value,
            &timeout,
            std::ptr::null::<u32>(),
            0,
        );
    }
}

/// Wakes at most `count` of the threads, of any process, that sleep on `word`.
pub fn wake(word: &AtomicU32, count: i32) {
    // SAFETY: `word` is valid for the call.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE,
            count,
            std::ptr::null::<u32>(),
            std::ptr::null::<u32>(),
            0,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn look_by_count_tries_as_often_as_it_may_and_no_more_when_it_finds() {
        for most in [0, 1, 63, 64, 65, 2048] {
            let mut tries = 0;
            let looked = look(&mut Count::new(most, 64), || {
                tries += 1;
                None::<()>
            });
            assert_eq!((looked, tries), (None, most));
        }
        let mut tries = 0;
        let looked = look(&mut Count::new(2048, 64), || {
            tries += 1;
            (tries == 100).then_some(tries)
        });
        assert_eq!(looked, Some(100));
    }

    #[test]
    fn look_by_time_lasts_its_time() {
        let (started, most) = (Instant::now(), Duration::from_millis(5));
        let mut budget = Time::new(started, most, 4, Duration::MAX);
        assert_eq!(look(&mut budget, || None::<()>), None);
        assert_eq!(budget.long_yield_ended(), None);
        assert!(started.elapsed() >= most);
    }

    #[test]
    fn look_whose_yield_was_long_tries_once_more() {
        let mut tries = 0;
        let mut budget = Time::new(Instant::now(), Duration::MAX, 4, Duration::ZERO);
        let looked = look(&mut budget, || {
            tries += 1;
            None::<()>
        });
        assert_eq!((looked, tries), (None, 5));
        assert!(budget.long_yield_ended().is_some());
        let mut tries = 0;
        let looked = look(&mut budget, || {
            tries += 1;
            (tries == 5).then_some(tries)
        });
        assert_eq!(looked, Some(5));
    }

    #[test]
    fn learnt_halves_down_to_its_floor_and_goes_back_to_all_at_once() {
        let learnt = Learnt::new(100, 10, 0);
        let mut seen = Vec::new();
        for _ in 0..5 {
            seen.push(learnt.get());
            learnt.shorten(learnt.get());
        }
        assert_eq!(seen, [100, 50, 25, 12, 0]);
        learnt.lengthen();
        assert_eq!(learnt.get(), 100);
        let kept = Learnt::new(100, 32, 32);
        (0..9).for_each(|_| kept.shorten(kept.get()));
        assert_eq!(kept.get(), 32);
    }

    #[test]
    fn sleep_ends_by_a_wake_by_another_value_and_by_time() {
        let word = AtomicU32::new(0);
        sleep(&word, 1, Duration::from_secs(3600));
        let started = Instant::now();
        sleep(&word, 0, Duration::from_millis(5));
        assert!(started.elapsed() < Duration::from_secs(60));
        std::thread::scope(|scope| {
            let sleepers: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        while word.load(Ordering::Acquire) == 0 {
                            sleep(&word, 0, Duration::from_secs(3600));
                        }
                    })
                })
                .collect();
            word.store(1, Ordering::Release);
            while !sleepers.iter().all(|sleeper| sleeper.is_finished()) {
                wake(&word, i32::MAX);
            }
        });
    }
}
