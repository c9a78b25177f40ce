//! The longest gap between two ranges that a read includes, and the longest ranges that are read through the buffer
//! (`sieve.rs`). Both depend on the cost of a system call on this machine.
//!
//! A small pread takes 0.3 us on one machine and 1 us on another, depending on the processor, the hypervisor and the
//! kernel's mitigations of side channels, while the speed of copies is similar. So the first read of this kind in a
//! process measures the cost. Measurements: docs/decisions/0021.

use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::time::Instant;

use forebay_types::limits::{GAP_BYTES_MAX, SIEVE_BYTES_MAX};

/// Number of small preads that are timed. The fastest counts, because the others may have been interrupted.
const TRIES: usize = 8;

/// Cost of one more element of an iovec within a call.
const PART_NANOSECONDS: u64 = 70;
/// Bytes of a gap that the kernel copies in a nanosecond.
const GAP_BYTES_PER_NANOSECOND: u64 = 8;
/// Break-even length of a range, in bytes for each nanosecond that a system call costs: a second copy of the range
/// takes as long as one more element of an iovec.
const SIEVE_BYTES_PER_NANOSECOND: u64 = 13;

/// The longest gap and the longest ranges that pay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gaps {
    /// Bytes of a gap that is read together with the ranges around it.
    pub(crate) gap: usize,
    /// Average bytes of the ranges that are read through the buffer.
    pub(crate) sieve: usize,
}

impl Gaps {
    /// For data that may have to be read from a device, which reads one long range fastest.
    pub(crate) const LONGEST: Gaps = Gaps { gap: GAP_BYTES_MAX, sieve: SIEVE_BYTES_MAX };

    /// For files in memory; `fd` is one of them.
    pub(crate) fn in_memory(fd: RawFd, at: u64) -> Gaps {
        static MEASURED: OnceLock<Gaps> = OnceLock::new();
        *MEASURED.get_or_init(|| Gaps::of_calls_that_take(nanoseconds(fd, at)))
    }

    fn of_calls_that_take(nanoseconds: u64) -> Gaps {
        let bytes = |n: u64, most: usize| usize::try_from(n).unwrap_or(most).min(most);
        Gaps {
            gap: bytes(
                nanoseconds.saturating_sub(PART_NANOSECONDS).saturating_mul(GAP_BYTES_PER_NANOSECOND),
                GAP_BYTES_MAX,
            ),
            sieve: bytes(nanoseconds.saturating_mul(SIEVE_BYTES_PER_NANOSECOND), SIEVE_BYTES_MAX),
        }
    }
}

/// The cost of the smallest pread, in nanoseconds.
fn nanoseconds(fd: RawFd, at: u64) -> u64 {
    let mut byte = 0u8;
    let took = (0..TRIES).map(|_| {
        let start = Instant::now();
        // SAFETY: one byte, writable.
        unsafe { libc::pread(fd, (&raw mut byte).cast(), 1, at as i64) };
        u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    });
    took.min().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dear_calls_take_long_gaps_along_and_cheap_ones_short_ones() {
        assert_eq!(Gaps::of_calls_that_take(330), Gaps { gap: 2080, sieve: 4290 });
        assert_eq!(Gaps::of_calls_that_take(2000), Gaps::LONGEST);
        assert_eq!(Gaps::of_calls_that_take(u64::MAX), Gaps::LONGEST);
        assert_eq!(Gaps::of_calls_that_take(0), Gaps { gap: 0, sieve: 0 });
    }
}
