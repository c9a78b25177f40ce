//! Preallocation of space for files that are written in small steps, so that tmpfs uses huge pages.
//!
//! A tmpfs allocates pages no larger than the write. Ranks that write records of a few kilobytes in turns would fill a
//! file with small pages, and every later access would find and lock each page separately: writes would reach half the
//! speed, reads of runs of 4 KiB a third (docs/decisions/0021). So a backing file that grows by such writes is
//! preallocated in windows. The size of a window is a power of two.
//!
//! Preallocated space is freed only with the file, so it is bounded: by four times the bytes that this process wrote to
//! the file in small steps, by the offset of the window in its backing file, and by [`AHEAD_BYTES_MAX`] per window. A
//! write far from the last window preallocates nothing, because scattered writes leave holes. When the medium is full,
//! preallocation stops, and the write itself returns the error. The atomic variables need no memory order: a lost
//! update costs a system call or a missed window.
//!
//! In a file of several backing files, the next backing file's window is preallocated and filled with zeros while this
//! one is written. The kernel writes zeros under the inode's lock, and ranks that write the file together would
//! otherwise all wait for that lock at once.

use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;

use forebay_types::limits::{AHEAD_BYTES_MAX, AHEAD_BYTES_MIN, AHEAD_WRITE_BYTES_MAX};
use forebay_types::Code;

/// Preallocated bytes per byte that this process wrote, at most. More than 1, because several ranks fill a window
/// together.
const SHARE: u64 = 4;

/// The last windows of a backing file: the range `from..to` has no holes.
#[derive(Debug, Default)]
struct Window {
    from: AtomicU64,
    to: AtomicU64,
}

/// Preallocation of an open file.
#[derive(Debug, Default)]
pub(crate) struct Preallocation {
    windows: OnceLock<Box<[Window]>>,
    /// Bytes written in small steps.
    written: AtomicU64,
    /// Bytes preallocated; [`Preallocation::NEVER`] when preallocation has ended.
    taken: AtomicU64,
    /// The stripe of the last small step.
    stripe: AtomicU64,
}

impl Preallocation {
    const NEVER: u64 = u64::MAX;

    /// For a file on a medium that gains nothing from preallocation.
    pub(crate) fn never() -> Preallocation {
        Preallocation { taken: AtomicU64::new(Preallocation::NEVER), ..Preallocation::default() }
    }

    /// Preallocates before a write of `bytes` bytes to `range` of backing file `index` of `count`, whose descriptor is
    /// `fd`. The caller steps through the file by `step` bytes. True if such steps are small.
    pub(crate) fn take(
        &self,
        (index, count): (usize, usize),
        fd: RawFd,
        range: Range<u64>,
        bytes: usize,
        step: usize,
    ) -> bool {
        if step >= AHEAD_WRITE_BYTES_MAX || self.taken.load(Ordering::Relaxed) == Preallocation::NEVER {
            return false;
        }
        let windows = self.windows.get_or_init(|| (0..count).map(|_| Window::default()).collect());
        self.written.fetch_add(bytes as u64, Ordering::Relaxed);
        self.take_window(&windows[index], fd, range, false);
        true
    }

    /// True if stripe `number` of the file differs from the last call's.
    pub(crate) fn enters(&self, number: u64) -> bool {
        // Few steps enter a stripe; all others only load.
        self.stripe.load(Ordering::Relaxed) != number && self.stripe.swap(number, Ordering::Relaxed) != number
    }

    /// Preallocates in another backing file of the same file, before writes reach `range` of it. Called after
    /// [`Preallocation::take`].
    pub(crate) fn take_next(&self, index: usize, fd: RawFd, range: Range<u64>) {
        if let Some(windows) = self.windows.get() {
            self.take_window(&windows[index], fd, range, true);
        }
    }

    /// Preallocates the window that contains `range`. With `fills` its zeros are written at once.
    fn take_window(&self, window: &Window, fd: RawFd, range: Range<u64>, fills: bool) {
        let (start, end) = (range.start, range.end);
        let (from, to) = (window.from.load(Ordering::Relaxed), window.to.load(Ordering::Relaxed));
        if start >= from && end <= to {
            return;
        }
        let (written, taken) = (self.written.load(Ordering::Relaxed), self.taken.load(Ordering::Relaxed));
        let follows = start >= from && start <= to + AHEAD_BYTES_MAX;
        let next =
            if follows { next_window(start, end, to, (SHARE * written).saturating_sub(taken)) } else { None };
        let Some((first, last)) = next else {
            if !follows {
                // Start of the window that the next step may extend.
                window.from.store(start, Ordering::Relaxed);
                window.to.store(start, Ordering::Relaxed);
            }
            return;
        };
        if !has_bytes(fd, last) {
            // The second call finds pages that are allocated and not yet written, and fills them with zeros.
            let calls = if fills { 2 } else { 1 };
            for _ in 0..calls {
                // KEEP_SIZE: the window must not change the file's size.
                // SAFETY: plain system call on a descriptor of the caller's.
                let result = unsafe {
                    libc::fallocate(fd, libc::FALLOC_FL_KEEP_SIZE, first as i64, (last - first) as i64)
                };
                match crate::errno::check(result) {
                    Ok(_) => {}
                    // A signal interrupted the call; the next step tries again.
                    Err(Code::Interrupted) => return,
                    Err(_) => {
                        self.taken.store(Preallocation::NEVER, Ordering::Relaxed);
                        return;
                    }
                }
            }
            self.taken.store(taken + (last - first), Ordering::Relaxed);
        }
        if first > to {
            window.from.store(first, Ordering::Relaxed);
        }
        window.to.store(last, Ordering::Relaxed);
    }
}

/// True if a file without holes would have all its space up to `end`: another process has preallocated it.
fn has_bytes(fd: RawFd, end: u64) -> bool {
    crate::errno::stat(fd).is_ok_and(|stat| stat.st_blocks as u64 * 512 >= end)
}

/// The window to preallocate before a write from `start` to `end`, if `room` bytes suffice for it. All space before
/// `to` is preallocated already.
fn next_window(start: u64, end: u64, to: u64, room: u64) -> Option<(u64, u64)> {
    let most = room.min(start.max(AHEAD_BYTES_MIN)).min(AHEAD_BYTES_MAX);
    if most < AHEAD_BYTES_MIN {
        return None;
    }
    let bytes = 1 << most.ilog2();
    let first = (start.max(to) / bytes * bytes).max(to);
    let last = end.next_multiple_of(bytes);
    // The pieces of one call may be far apart, which would make a window too long.
    (last > first && last - first <= room.min(2 * AHEAD_BYTES_MAX)).then_some((first, last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_window_is_never_longer_than_what_pays_for_it() {
        for start in (0..64 << 20).step_by(47_001) {
            for room in [0, 1000, 1 << 16, 300_000, 1 << 21, 1 << 40] {
                let Some((first, last)) = next_window(start, start + 47_001, 0, room) else { continue };
                assert!(first <= start && last >= start + 47_001 && last - first <= room, "{start} {room}");
                assert!(
                    last - first <= 2 * AHEAD_BYTES_MAX.min(start.max(AHEAD_BYTES_MIN)),
                    "{start} {room}"
                );
            }
        }
        assert_eq!(next_window(0, 4096, 0, AHEAD_BYTES_MIN - 1), None);
        assert_eq!(next_window(0, 4096, 0, AHEAD_BYTES_MIN), Some((0, AHEAD_BYTES_MIN)));
        assert_eq!(next_window(1 << 30, (1 << 30) + (64 << 20), 0, u64::MAX), None, "pieces far apart");
        // Preallocated space is not preallocated again.
        assert_eq!(next_window(100_000, 140_000, 131_072, 1 << 30), Some((131_072, 196_608)));
    }

    #[test]
    fn take_of_a_file_that_grows_is_whole_windows_and_of_a_far_write_nothing() {
        use std::os::fd::AsRawFd;
        use std::os::unix::fs::MetadataExt;
        let file = tempfile_in_memory();
        let (ahead, step) = (Preallocation::default(), 4096);
        for i in 0..1024 {
            ahead.take((0, 1), file.as_raw_fd(), i * step..(i + 1) * step, step as usize, step as usize);
        }
        let there = file.metadata().unwrap().blocks() * 512;
        assert!(there >= 1024 * step - AHEAD_BYTES_MIN, "{there}");
        assert!(there <= SHARE * 1024 * step, "{there}");
        assert_eq!(file.metadata().unwrap().len(), 0, "what is taken ahead shows in the size");
        let before = file.metadata().unwrap().blocks();
        for i in 1..100 {
            ahead.take((0, 1), file.as_raw_fd(), i << 30..(i << 30) + step, step as usize, step as usize);
        }
        assert_eq!(file.metadata().unwrap().blocks(), before);
    }

    #[test]
    fn take_next_takes_what_lies_ahead_and_nothing_that_is_there() {
        use std::os::fd::AsRawFd;
        use std::os::unix::fs::MetadataExt;
        let (this, next) = (tempfile_in_memory(), tempfile_in_memory());
        let blocks = || next.metadata().unwrap().blocks() * 512;
        let (ahead, stripe) = (Preallocation::default(), 1 << 20);
        ahead.take_next(1, next.as_raw_fd(), 0..stripe);
        assert_eq!(blocks(), 0, "nothing was written that pays for it");
        for i in 0..10 {
            assert!(ahead.take((0, 2), this.as_raw_fd(), i * 40_000..(i + 1) * 40_000, 40_000, 40_000));
        }
        assert!(ahead.enters(1) && !ahead.enters(1) && ahead.enters(2), "a stripe is entered once");
        ahead.take_next(1, next.as_raw_fd(), 0..stripe);
        assert_eq!((blocks(), next.metadata().unwrap().len()), (stripe, 0));
        // Another process finds the space allocated and does not count it as its own.
        let other = Preallocation::default();
        assert!(other.take((1, 2), next.as_raw_fd(), 0..100_000, 100_000, 100_000));
        assert_eq!(other.taken.load(Ordering::Relaxed), 0);
        assert!(
            !other.take((1, 2), next.as_raw_fd(), 0..2048, 2048, 1 << 20),
            "what is left of a large step"
        );
    }

    fn tempfile_in_memory() -> std::fs::File {
        use std::os::fd::FromRawFd;
        // SAFETY: a new descriptor without another owner.
        unsafe {
            let fd = libc::memfd_create(c"ahead".as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0);
            std::fs::File::from_raw_fd(fd)
        }
    }
}
