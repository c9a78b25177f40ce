//! Space that is taken ahead of writes which go through a file in small steps, so that memory comes in huge pages.
//!
//! A tmpfs gives a write pages no larger than the write. Ranks that take turns with records of some kilobytes would so
//! fill a file with small pages, each found and locked by itself in every later access: writes half as fast, reads of 4
//! KiB runs a third (docs/decisions/0021). So a backing file that grows by such writes gets its space in windows, each
//! a power of two.
//!
//! What is taken is bounded, as nobody gives it back before the file goes: by four times what this process wrote to the
//! file in small steps, by the bytes before it in its backing file, and by [`AHEAD_BYTES_MAX`] a window. A write far
//! from the last one takes nothing: who writes here and there leaves holes. When the medium is full it is left alone,
//! and the write itself says so. Atomics without order between them: a lost update costs a call, or a window that is
//! not taken.
//!
//! Of a file of several backing files the next one's window is taken, and filled with zeros, while this one is written:
//! zeros are written under the inode's lock, for which the ranks that go through the file together would all wait at
//! once.

use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;

use forebay_types::limits::{AHEAD_BYTES_MAX, AHEAD_BYTES_MIN, AHEAD_WRITE_BYTES_MAX};
use forebay_types::Code;

/// How many times what a process wrote may be taken ahead: several ranks fill a window together.
const SHARE: u64 = 4;

/// The last windows of a backing file: nothing is missing from `from` to `to`.
#[derive(Debug, Default)]
struct Window {
    from: AtomicU64,
    to: AtomicU64,
}

/// What an open file has taken ahead.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    windows: OnceLock<Box<[Window]>>,
    /// Bytes written in small steps.
    written: AtomicU64,
    /// Bytes taken; [`Ahead::NEVER`] when no more are to be.
    taken: AtomicU64,
    /// The stripe that the last small step went to.
    stripe: AtomicU64,
}

impl Ahead {
    const NEVER: u64 = u64::MAX;

    /// Of a file on a medium that gives nothing for it.
    pub(crate) fn never() -> Ahead {
        Ahead { taken: AtomicU64::new(Ahead::NEVER), ..Ahead::default() }
    }

    /// Before `bytes` bytes are written to `range` of backing file `index` of `count`, whose descriptor is `fd`, by a
    /// call whose steps through the file are `step` bytes. Whether those are small.
    pub(crate) fn take(
        &self,
        (index, count): (usize, usize),
        fd: RawFd,
        range: Range<u64>,
        bytes: usize,
        step: usize,
    ) -> bool {
        if step >= AHEAD_WRITE_BYTES_MAX || self.taken.load(Ordering::Relaxed) == Ahead::NEVER {
            return false;
        }
        let windows = self.windows.get_or_init(|| (0..count).map(|_| Window::default()).collect());
        self.written.fetch_add(bytes as u64, Ordering::Relaxed);
        self.take_window(&windows[index], fd, range, false);
        true
    }

    /// Whether stripe `number` of the file is another than at the last call.
    pub(crate) fn enters(&self, number: u64) -> bool {
        // Few steps do: all others only read.
        self.stripe.load(Ordering::Relaxed) != number && self.stripe.swap(number, Ordering::Relaxed) != number
    }

    /// After [`Ahead::take`] and before writes reach `range` of another of its backing files.
    pub(crate) fn take_next(&self, index: usize, fd: RawFd, range: Range<u64>) {
        if let Some(windows) = self.windows.get() {
            self.take_window(&windows[index], fd, range, true);
        }
    }

    /// Takes the window that `range` lies in, and with `fills` has its zeros written at once.
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
                // Where a step that follows will start from.
                window.from.store(start, Ordering::Relaxed);
                window.to.store(start, Ordering::Relaxed);
            }
            return;
        };
        if !has_bytes(fd, last) {
            // The second call finds pages that nobody has written, and fills them.
            let calls = if fills { 2 } else { 1 };
            for _ in 0..calls {
                // Kept from being seen in the file's size.
                // SAFETY: plain system call on a descriptor of the caller's.
                let result = unsafe {
                    libc::fallocate(fd, libc::FALLOC_FL_KEEP_SIZE, first as i64, (last - first) as i64)
                };
                match crate::errno::check(result) {
                    Ok(_) => {}
                    // A signal: the next step tries again.
                    Err(Code::Interrupted) => return,
                    Err(_) => {
                        self.taken.store(Ahead::NEVER, Ordering::Relaxed);
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

/// Whether a file without holes would have all its space up to `end`: another process was here first.
fn has_bytes(fd: RawFd, end: u64) -> bool {
    crate::errno::stat(fd).is_ok_and(|stat| stat.st_blocks as u64 * 512 >= end)
}

/// The window to take before a write from `start` to `end` when all before `to` is there, if `room` bytes pay for it.
fn next_window(start: u64, end: u64, to: u64, room: u64) -> Option<(u64, u64)> {
    let most = room.min(start.max(AHEAD_BYTES_MIN)).min(AHEAD_BYTES_MAX);
    if most < AHEAD_BYTES_MIN {
        return None;
    }
    let bytes = 1 << most.ilog2();
    let first = (start.max(to) / bytes * bytes).max(to);
    let last = end.next_multiple_of(bytes);
    // The pieces of one call may be far apart.
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
        // What is there is not asked for again.
        assert_eq!(next_window(100_000, 140_000, 131_072, 1 << 30), Some((131_072, 196_608)));
    }

    #[test]
    fn take_of_a_file_that_grows_is_whole_windows_and_of_a_far_write_nothing() {
        use std::os::fd::AsRawFd;
        use std::os::unix::fs::MetadataExt;
        let file = tempfile_in_memory();
        let (ahead, step) = (Ahead::default(), 4096);
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
        let (ahead, stripe) = (Ahead::default(), 1 << 20);
        ahead.take_next(1, next.as_raw_fd(), 0..stripe);
        assert_eq!(blocks(), 0, "nothing was written that pays for it");
        for i in 0..10 {
            assert!(ahead.take((0, 2), this.as_raw_fd(), i * 40_000..(i + 1) * 40_000, 40_000, 40_000));
        }
        assert!(ahead.enters(1) && !ahead.enters(1) && ahead.enters(2), "a stripe is entered once");
        ahead.take_next(1, next.as_raw_fd(), 0..stripe);
        assert_eq!((blocks(), next.metadata().unwrap().len()), (stripe, 0));
        // Another process finds it there, and counts nothing as its own.
        let other = Ahead::default();
        assert!(other.take((1, 2), next.as_raw_fd(), 0..100_000, 100_000, 100_000));
        assert_eq!(other.taken.load(Ordering::Relaxed), 0);
        assert!(
            !other.take((1, 2), next.as_raw_fd(), 0..2048, 2048, 1 << 20),
            "what is left of a large step"
        );
    }

    fn tempfile_in_memory() -> std::fs::File {
        use std::os::fd::FromRawFd;
        // SAFETY: a new descriptor that nobody else has.
        unsafe {
            let fd = libc::memfd_create(c"ahead".as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0);
            std::fs::File::from_raw_fd(fd)
        }
    }
}
