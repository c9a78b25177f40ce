//! What a pacer counts: in its shared memory, read without stopping the requests.

use std::sync::atomic::{AtomicU64, Ordering};

/// Buckets of a histogram: bucket n counts times from 2^n to 2^(n+1) - 1 nanoseconds, the last one all longer times
/// (from 2^35 ns, 34 s, on), the first one also 0.
pub const BUCKETS: usize = 36;

/// Counters of one direction, in shared memory.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Counters {
    requests: AtomicU64,
    bytes: AtomicU64,
    sequential: AtomicU64,
    configured_ns: AtomicU64,
    measured_ns: AtomicU64,
    /// Requests that were complete later than their reservation said by more than 5 %.
    late: AtomicU64,
    buckets: [AtomicU64; BUCKETS],
}

/// A histogram of times.
pub type Histogram = [u64; BUCKETS];

/// What a pacer counted in one direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Statistics {
    /// Requests that began.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Requests that began where the one before had ended.
    pub sequential: u64,
    /// Sum of the times for which completed requests had reservations, waiting for others included, in nanoseconds.
    pub configured_ns: u64,
    /// Sum of the times that they took.
    pub measured_ns: u64,
    /// Completed requests that took more than 5 % longer than their reservation.
    pub late: u64,
    /// The times that they took.
    pub histogram: Histogram,
}

/// The bucket of a time.
pub(crate) fn bucket(ns: u64) -> usize {
    (ns.max(1).ilog2() as usize).min(BUCKETS - 1)
}

impl Counters {
    pub(crate) fn began(&self, bytes: u64, sequential: bool) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.sequential.fetch_add(u64::from(sequential), Ordering::Relaxed);
    }

    pub(crate) fn completed(&self, configured_ns: u64, measured_ns: u64) {
        self.configured_ns.fetch_add(configured_ns, Ordering::Relaxed);
        self.measured_ns.fetch_add(measured_ns, Ordering::Relaxed);
        let is_late = measured_ns > configured_ns.saturating_add(configured_ns / 20);
        self.late.fetch_add(u64::from(is_late), Ordering::Relaxed);
        self.buckets[bucket(measured_ns)].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn reset(&self) {
        let Counters { requests, bytes, sequential, configured_ns, measured_ns, late, buckets } = self;
        let words = [requests, bytes, sequential, configured_ns, measured_ns, late];
        words.into_iter().chain(buckets).for_each(|word| word.store(0, Ordering::Relaxed));
    }

    pub(crate) fn read(&self) -> Statistics {
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        Statistics {
            requests: load(&self.requests),
            bytes: load(&self.bytes),
            sequential: load(&self.sequential),
            configured_ns: load(&self.configured_ns),
            measured_ns: load(&self.measured_ns),
            late: load(&self.late),
            histogram: std::array::from_fn(|i| load(&self.buckets[i])),
        }
    }
}

impl Statistics {
    /// Requests that completed.
    pub fn completed(&self) -> u64 {
        // The words are in memory that all processes may write.
        self.histogram.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// The upper bound of the bucket in which a share of the completed requests, from the shortest on, ends; in
    /// nanoseconds. 0 without requests.
    pub fn quantile_ns(&self, share: f64) -> u64 {
        let wanted = (self.completed() as f64 * share).ceil() as u64;
        let mut seen = 0;
        let found = self.histogram.iter().position(|count| {
            seen = u64::saturating_add(seen, *count);
            seen >= wanted && seen > 0
        });
        found.map_or(0, |bucket| (2u64 << bucket) - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_is_the_power_of_two_below_a_time() {
        let buckets = [0, 1, 2, 3, 4, 1023, 1024, u64::MAX].map(bucket);
        assert_eq!(buckets, [0, 0, 1, 1, 2, 9, 10, BUCKETS - 1]);
    }

    #[test]
    fn quantile_is_the_bound_of_the_bucket_that_reaches_the_share() {
        let mut some = Statistics {
            requests: 0,
            bytes: 0,
            sequential: 0,
            configured_ns: 0,
            measured_ns: 0,
            late: 0,
            histogram: [0; BUCKETS],
        };
        assert_eq!(some.quantile_ns(0.5), 0);
        some.histogram[4] = 90;
        some.histogram[10] = 10;
        assert_eq!((some.completed(), some.quantile_ns(0.5), some.quantile_ns(0.9)), (100, 31, 31));
        assert_eq!(some.quantile_ns(0.91), 2047);
    }
}
