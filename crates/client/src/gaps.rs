//! Which gaps between ranges are read along, and which ranges go by the buffer (`sieve.rs`): as a system call costs on
//! this machine.
//!
//! A small pread takes 0.3 us on one machine and a whole one on another, by its processor, its hypervisor and what its
//! kernel does against side channels, while copies are alike. So the first read of this kind of a process looks at a
//! clock. Measured: docs/decisions/0021.

use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::time::Instant;

use forebay_types::limits::{GAP_BYTES_MAX, SIEVE_BYTES_MAX};

/// Small preads that are timed: the quickest counts, as others were interrupted.
const TRIES: usize = 8;

/// What a change from one piece of memory to the next costs within a call.
const PART_NANOSECONDS: u64 = 70;
/// How much the kernel copies of a gap meanwhile, in a nanosecond.
const GAP_BYTES_PER_NANOSECOND: u64 = 8;
/// A range of so many bytes for each nanosecond that a call costs takes as long to copy once more as a change of
/// pieces.
const SIEVE_BYTES_PER_NANOSECOND: u64 = 13;

/// The longest of both that pay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gaps {
    /// Bytes of a gap that is read along.
    pub(crate) gap: usize,
    /// Bytes of a range, on average, of those that go by the buffer.
    pub(crate) sieve: usize,
}

impl Gaps {
    /// Where data may have to come from a device first, which reads one long stretch best.
    pub(crate) const LONGEST: Gaps = Gaps { gap: GAP_BYTES_MAX, sieve: SIEVE_BYTES_MAX };

    /// Of files in memory, of which `fd` is one.
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

/// What the smallest pread takes.
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
