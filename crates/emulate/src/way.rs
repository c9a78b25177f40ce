//! The way of a request through the kernel: how much longer it takes for the device's user than the medium says. It is
//! measured once, when the device is made, and is a part of the emulated time from then on: the server answers so much
//! earlier.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_pacing::{now_ns, Direction, Medium};
use serde::{Deserialize, Serialize};

/// Bytes of a small and of a large request. The kernel splits larger ones, whose pages are apart from each other: each
/// part has the medium's latency.
pub(crate) const SMALL_BYTES: usize = 4096;
const LARGE_BYTES: usize = 512 << 10;
/// Each measurement is made so often, and the shortest way is taken: what else the machine does only adds to it.
const ROUNDS: usize = 3;
/// How long one measurement takes, about; and how many requests it makes.
const TIME: Duration = Duration::from_millis(50);
const REQUESTS_MIN: usize = 3;
const REQUESTS_MAX: usize = 41;
/// The way is no part of a request that takes so long, and longer ones are not waited for.
const REQUEST_TIME_MAX: Duration = Duration::from_millis(50);

/// How long requests of one direction are on their way, besides what copies of their bytes take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Way {
    /// One of 4 KiB, in nanoseconds.
    pub small_ns: u64,
    /// One of 512 KiB, in nanoseconds.
    pub large_ns: u64,
}

impl Way {
    /// The way of a request of so many bytes.
    pub(crate) fn of(self, bytes: usize) -> u64 {
        let (small, large) = (i128::from(self.small_ns), i128::from(self.large_ns));
        let part = bytes.clamp(SMALL_BYTES, 2 * LARGE_BYTES) - SMALL_BYTES;
        let ns = small + (large - small) * part as i128 / (LARGE_BYTES - SMALL_BYTES) as i128;
        u64::try_from(ns).unwrap_or(0)
    }
}

/// Memory that direct I/O can use, of zeros.
struct Aligned(Vec<u8>);

impl Aligned {
    fn new() -> Aligned {
        Aligned(vec![0; LARGE_BYTES + SMALL_BYTES])
    }

    fn start(&mut self) -> *mut u8 {
        let skip = self.0.as_ptr().align_offset(SMALL_BYTES);
        self.0[skip..].as_mut_ptr()
    }
}

/// Measures both directions of a device that no one uses yet: it has zeros, and is written zeros. The server takes no
/// way into account meanwhile.
pub(crate) fn measure(device: &Path, bytes: u64, medium: &Medium) -> io::Result<[Way; 2]> {
    let file = File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(device)?;
    let mut memory = Aligned::new();
    let mut ways = [Way { small_ns: u64::MAX, large_ns: u64::MAX }; 2];
    for _ in 0..ROUNDS {
        for direction in [Direction::Read, Direction::Write] {
            let mut of = |request| way_ns(&file, &mut memory, bytes, medium, direction, request);
            let (small_ns, large_ns) = (of(SMALL_BYTES)?, of(LARGE_BYTES)?);
            let way = &mut ways[direction as usize];
            *way = Way { small_ns: way.small_ns.min(small_ns), large_ns: way.large_ns.min(large_ns) };
        }
    }
    Ok(ways)
}

/// The median of what requests of a size take longer than the medium says. The first one, which finds caches empty, does
/// not count.
fn way_ns(
    file: &File,
    memory: &mut Aligned,
    bytes: u64,
    medium: &Medium,
    direction: Direction,
    request: usize,
) -> io::Result<u64> {
    let requests = bytes / request as u64;
    let speed = medium.speed(direction);
    // A device of a single one is read from its begin again and again.
    let seek_ns = if request == SMALL_BYTES || requests < 2 { medium.seek_ns } else { 0 };
    let configured = speed.latency_ns
        + seek_ns
        + (request as u64).saturating_mul(1_000_000_000).div_ceil(speed.bytes_per_s);
    if requests == 0 || Duration::from_nanos(configured) > REQUEST_TIME_MAX {
        return Ok(0);
    }
    // Small ones hop over the device, large ones follow each other.
    let step = if request == SMALL_BYTES { (requests * 5 / 8) | 1 } else { 1 };
    let (begun, mut times) = (Instant::now(), Vec::new());
    while times.len() < REQUESTS_MIN || times.len() < REQUESTS_MAX && begun.elapsed() < TIME {
        let block = (times.len() as u64 + 1).wrapping_mul(step) % requests;
        let at = (block * request as u64) as libc::off_t;
        let sent = now_ns();
        // SAFETY: the memory has at least as many bytes.
        let n = unsafe {
            match direction {
                Direction::Read => libc::pread(file.as_raw_fd(), memory.start().cast(), request, at),
                Direction::Write => libc::pwrite(file.as_raw_fd(), memory.start().cast(), request, at),
            }
        };
        match n {
            n if n == request as isize => {}
            n if n < 0 => return Err(io::Error::last_os_error()),
            _ => return Err(io::Error::from_raw_os_error(libc::EIO)),
        }
        times.push((now_ns() - sent).saturating_sub(configured));
    }
    let settled = &mut times[1..];
    settled.sort_unstable();
    Ok(settled[settled.len() / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn way_of_a_request_is_between_those_of_a_small_and_a_large_one() {
        let way = Way { small_ns: 50_000, large_ns: 250_000 };
        assert_eq!((way.of(512), way.of(SMALL_BYTES)), (50_000, 50_000));
        assert_eq!(way.of(LARGE_BYTES), 250_000);
        assert!(way.of(2 * LARGE_BYTES).abs_diff(450_000) < 5_000, "further on the same line");
        assert_eq!(way.of(2 * LARGE_BYTES), way.of(9 * LARGE_BYTES));
        let half = way.of((LARGE_BYTES + SMALL_BYTES) / 2);
        assert!(half.abs_diff(150_000) < 10, "{half}");
        let falls = Way { small_ns: 90, large_ns: 10 };
        assert_eq!((falls.of(SMALL_BYTES), falls.of(LARGE_BYTES), falls.of(2 * LARGE_BYTES)), (90, 10, 0));
    }
}
