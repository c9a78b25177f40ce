//! Read-ahead in files of other nodes, for a caller that declares that it reads in order and that the file is not
//! written meanwhile.
//!
//! By default no data of other nodes are cached: each read sees all writes acknowledged before it. With read-ahead the
//! data of a read may be up to [`AGE_NS`] old, unless this open file was written, truncated or synced since. An open
//! file has one window. A read that starts where the last one ended is served from the window. If the window does not
//! hold enough, a new one is fetched, twice as long up to a limit. A window that ended at the file's end is not reused
//! for reads beyond it, so that growth of the file is seen. If another thread is using the window, a read bypasses it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, TryLockError};

use forebay_ring::call_clock;
use forebay_types::limits::{READ_AHEAD_BYTES_MAX, READ_AHEAD_BYTES_MIN, READ_AHEAD_MS, READ_AHEAD_OF_MAX};
use forebay_types::Code;

/// Longest age of a window's data, in nanoseconds.
const AGE_NS: u64 = READ_AHEAD_MS * 1_000_000;

/// Data that were read of a file, and the offset at which the next read is expected.
#[derive(Debug, Default)]
struct Window {
    bytes: Vec<u8>,
    /// Number of valid bytes in `bytes`.
    filled: usize,
    /// Their offset in the file.
    offset: u64,
    /// Time of the request for them.
    asked_ns: u64,
    /// Offset at which the last read ended.
    next: u64,
    /// Number of bytes that were fetched last.
    ahead: usize,
}

impl Window {
    fn takes(&self, buffer: &mut [u8], offset: u64, now: u64) -> bool {
        let held = self.offset..self.offset + self.filled as u64;
        let end = offset.saturating_add(buffer.len() as u64);
        let takes = held.contains(&offset) && end <= held.end && now < self.asked_ns.saturating_add(AGE_NS);
        if takes {
            let at = (offset - self.offset) as usize;
            buffer.copy_from_slice(&self.bytes[at..at + buffer.len()]);
        }
        takes
    }

    fn forget(&mut self) {
        (self.filled, self.ahead) = (0, 0);
    }
}

/// The read-ahead of an open file.
#[derive(Debug, Default)]
pub(crate) struct ReadAhead {
    asked: AtomicBool,
    /// Set by a write: the window's data are invalid.
    stale: AtomicBool,
    window: Mutex<Window>,
}

impl ReadAhead {
    /// Turns read-ahead on or off.
    pub(crate) fn ask(&self, wanted: bool) {
        self.forget();
        self.asked.store(wanted, Ordering::Release);
    }

    /// True while read-ahead is on.
    pub(crate) fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Acquire)
    }

    /// Invalidates the window: later reads request their data anew.
    pub(crate) fn forget(&self) {
        self.stale.store(true, Ordering::Release);
    }

    /// Reads through the window, which `read` fills, and returns the number of bytes. `None` if the window does not
    /// serve this read.
    ///
    /// # Errors
    /// The errors of `read`.
    pub(crate) fn read(
        &self,
        buffer: &mut [u8],
        offset: u64,
        read: impl FnOnce(&mut [u8], u64) -> Result<usize, Code>,
    ) -> Result<Option<usize>, Code> {
        if !self.is_asked() || buffer.is_empty() || buffer.len() >= READ_AHEAD_OF_MAX {
            return Ok(None);
        }
        let mut window = match self.window.try_lock() {
            Ok(window) => window,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(None),
        };
        let (window, now) = (&mut *window, call_clock());
        if self.stale.swap(false, Ordering::AcqRel) {
            window.forget();
        }
        let goes_on = offset == window.next && offset > 0;
        window.next = offset.saturating_add(buffer.len() as u64);
        if window.takes(buffer, offset, now) {
            return Ok(Some(buffer.len()));
        }
        if !goes_on {
            window.forget();
            return Ok(None);
        }
        let ahead =
            (2 * window.ahead).max(2 * buffer.len()).clamp(READ_AHEAD_BYTES_MIN, READ_AHEAD_BYTES_MAX);
        window.forget();
        if window.bytes.len() < ahead {
            window.bytes.resize(ahead, 0);
        }
        let filled = read(&mut window.bytes[..ahead], offset)?;
        (window.filled, window.offset, window.asked_ns, window.ahead) = (filled, offset, now, ahead);
        let n = filled.min(buffer.len());
        buffer[..n].copy_from_slice(&window.bytes[..n]);
        window.next = offset + n as u64;
        Ok(Some(n))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Reads `bytes` bytes at `offset` of a file of `file` bytes, whose contents show their position. Returns the data
    /// and the number of bytes that were requested.
    fn read(ahead: &ReadAhead, file: usize, offset: u64, bytes: usize) -> (Option<Vec<u8>>, usize) {
        let (mut buffer, asked) = (vec![255; bytes], Cell::new(0));
        let fill = |room: &mut [u8], at: u64| {
            asked.set(room.len());
            let n = room.len().min(file.saturating_sub(at as usize));
            (0..n).for_each(|i| room[i] = ((at as usize + i) / 4096 % 250) as u8);
            Ok(n)
        };
        let n = ahead.read(&mut buffer, offset, fill).unwrap();
        if let Some(n) = n {
            let right = |i: usize| ((offset as usize + i) / 4096 % 250) as u8;
            assert!((0..n).all(|i| buffer[i] == right(i)), "other bytes than the file has");
            buffer.truncate(n);
        }
        (n.map(|_| buffer), asked.get())
    }

    #[test]
    fn reads_in_order_are_from_windows_that_grow_and_others_are_not() {
        let (ahead, file, step) = (ReadAhead::default(), 64 << 20, 64 << 10);
        assert_eq!(read(&ahead, file, 0, step).0, None, "nobody has asked for it");
        ahead.ask(true);
        let mut fetched = Vec::new();
        for offset in (0..8u64 << 20).step_by(step) {
            let (bytes, asked) = read(&ahead, file, offset, step);
            assert_eq!(bytes.is_some(), offset > 0, "the first read is in no order");
            fetched.extend(Some(asked).filter(|n| *n > 0));
        }
        assert_eq!(fetched[0], READ_AHEAD_BYTES_MIN);
        assert!(fetched.windows(2).all(|w| w[1] == (2 * w[0]).min(READ_AHEAD_BYTES_MAX)), "{fetched:?}");
        assert!(fetched.contains(&READ_AHEAD_BYTES_MAX));
        assert_eq!(read(&ahead, file, 40 << 20, step).0, None, "elsewhere");
        assert_eq!(read(&ahead, file, 0, step).0, None);
        assert_eq!(read(&ahead, file, step as u64, READ_AHEAD_OF_MAX).0, None, "longer than pays");
    }

    #[test]
    fn window_is_forgotten_by_writes_and_when_it_is_no_more_wanted() {
        let ahead = ReadAhead::default();
        ahead.ask(true);
        read(&ahead, 1 << 20, 0, 4096);
        assert!(read(&ahead, 1 << 20, 4096, 4096).1 > 0);
        assert_eq!(read(&ahead, 1 << 20, 8192, 4096).1, 0, "it is there");
        ahead.forget();
        assert!(read(&ahead, 1 << 20, 12288, 4096).1 > 0, "asked for anew");
        ahead.ask(false);
        assert_eq!(read(&ahead, 1 << 20, 16384, 4096).0, None);
    }

    #[test]
    fn window_that_is_too_old_is_fetched_anew() {
        let mut window = Window { bytes: vec![1; 10], filled: 10, offset: 100, ..Window::default() };
        window.asked_ns = 5;
        let mut buffer = [0; 4];
        assert!(window.takes(&mut buffer, 106, 4 + AGE_NS) && buffer == [1; 4]);
        assert!(!window.takes(&mut buffer, 106, 5 + AGE_NS));
        assert!(!window.takes(&mut buffer, 107, 6) && !window.takes(&mut buffer, 99, 6));
    }

    #[test]
    fn end_of_a_file_is_looked_for_each_time() {
        let ahead = ReadAhead::default();
        ahead.ask(true);
        read(&ahead, 10_000, 0, 4096);
        assert_eq!(read(&ahead, 10_000, 4096, 4096).0.map(|b| b.len()), Some(4096));
        let (last, asked) = read(&ahead, 10_000, 8192, 4096);
        assert_eq!(last.map(|b| b.len()), Some(10_000 - 8192));
        assert!(asked > 0, "the window ends where the file did, which may have grown");
        // The file grew, and the reader continues at its former end.
        assert_eq!(read(&ahead, 20_000, 10_000, 4096).0.map(|b| b.len()), Some(4096));
    }
}
