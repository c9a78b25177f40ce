//! A rate limit for bytes that many threads move.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Time whose bytes may pass at once after a pause, and by which a thread that woke late catches up.
const CREDIT: Duration = Duration::from_millis(20);
/// Least and most bytes of one piece.
const PIECE_BYTES: (u64, u64) = (16 * 1024, 4 << 20);

/// A token bucket that reserves: each piece gets its own time, in the order of arrival, and its thread sleeps until the
/// piece would have arrived.
#[derive(Debug)]
pub struct Bucket {
    /// Bytes per second, 0 without limit.
    rate: AtomicU64,
    free_at: Mutex<Instant>,
}

impl Bucket {
    /// A bucket for a rate; 0: no limit.
    pub fn new(bytes_per_second: u64) -> Bucket {
        Bucket { rate: AtomicU64::new(bytes_per_second), free_at: Mutex::new(Instant::now()) }
    }

    /// Changes the rate for what is not reserved yet.
    pub fn set_rate(&self, bytes_per_second: u64) {
        self.rate.store(bytes_per_second, Ordering::Relaxed);
    }

    /// True without a limit.
    pub fn is_unlimited(&self) -> bool {
        self.rate.load(Ordering::Relaxed) == 0
    }

    /// Bytes to take at a time, so that threads alternate: what passes in a fiftieth of a second.
    pub fn piece_bytes(&self) -> u64 {
        match self.rate.load(Ordering::Relaxed) {
            0 => PIECE_BYTES.1,
            rate => (rate / 50).clamp(PIECE_BYTES.0, PIECE_BYTES.1),
        }
    }

    /// Waits for the time of `bytes`.
    pub fn take(&self, bytes: u64) {
        let rate = self.rate.load(Ordering::Relaxed);
        if rate == 0 {
            return;
        }
        let long = Duration::from_secs_f64(bytes as f64 / rate as f64);
        let now = Instant::now();
        let end = {
            let mut free_at = self.free_at.lock().unwrap_or_else(|e| e.into_inner());
            let earliest = now.checked_sub(CREDIT).unwrap_or(now);
            *free_at = (*free_at).max(earliest) + long;
            *free_at
        };
        std::thread::sleep(end.saturating_duration_since(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_together_get_the_rate() {
        let bucket = Bucket::new(10_000_000);
        let started = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..5).for_each(|_| bucket.take(100_000)));
            }
        });
        // 2 MB at 10 MB/s, less the credit. The upper bound is for a busy machine.
        let took = started.elapsed();
        assert!(took >= Duration::from_millis(175) && took < Duration::from_secs(10), "{took:?}");
    }

    #[test]
    fn without_a_limit_nothing_waits() {
        let bucket = Bucket::new(0);
        let started = Instant::now();
        bucket.take(u64::MAX);
        assert!(started.elapsed() < Duration::from_secs(60));
        assert!(bucket.is_unlimited());
    }
}
