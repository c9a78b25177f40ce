//! Writes many small pieces to a backing file in memory by two system calls instead of one each, and without the
//! inode's lock.
//!
//! The pieces' memory goes into a pipe by reference (vmsplice) and from there to a mapping of the backing file (readv).
//! So the kernel copies the data, once. If a page cannot be allocated because the medium is full, or another process
//! truncates the file meanwhile, the copy is short, where a store by the program would raise SIGBUS. The caller then
//! writes the rest by pwrite, which returns the error. The last piece is written first, by pwrite: that sets the file's
//! size and its times, which stores through a mapping do not change.
//!
//! A pipe exists for one call, because a program may close any descriptor. A mapping exists while the file is open: one
//! window of each backing file at a time. A thread never waits for the window's lock. If a pipe or a mapping is not
//! available, this is turned off for the file. Measurements: docs/decisions/0021.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

use forebay_types::limits::{
    SCATTER_BYTES_MAX, SCATTER_PIECES_MIN, SCATTER_SPREAD_MAX, SCATTER_WINDOW_BYTES,
};

/// Size requested for a pipe: the kernel's default limit for users.
const PIPE_BYTES: usize = 1 << 20;

const PAGE_BYTES: usize = 4096;

/// Most elements of an iovec in one system call (UIO_MAXIOV).
const PARTS_MAX: usize = 1024;

/// Memory, and its destination in the backing file.
#[derive(Clone, Copy)]
pub(crate) struct Spot {
    pub(crate) at: u64,
    pub(crate) memory: *mut u8,
    pub(crate) bytes: usize,
}

/// A mapped part of a backing file.
#[derive(Debug)]
struct Window {
    base: *mut u8,
    from: u64,
}

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for Window {}

impl Window {
    fn new(fd: RawFd, from: u64) -> Option<Window> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let bytes = SCATTER_WINDOW_BYTES as usize;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, libc::MAP_SHARED, fd, from as i64) };
        (base != libc::MAP_FAILED).then(|| Window { base: base.cast(), from })
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: our own mapping, whose address no one else has.
        unsafe { libc::munmap(self.base.cast(), SCATTER_WINDOW_BYTES as usize) };
    }
}

/// A pipe's two ends.
struct Pipe {
    out: RawFd,
    into: RawFd,
    /// Capacity in pages.
    pages: usize,
}

impl Pipe {
    fn new() -> Option<Pipe> {
        let mut ends = [0; 2];
        // By number, like all calls here: preloaded libraries interpose calls by name.
        // SAFETY: the array has room for both ends.
        unsafe {
            if libc::syscall(libc::SYS_pipe2, ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) != 0 {
                return None;
            }
            libc::fcntl(ends[0], libc::F_SETPIPE_SZ, PIPE_BYTES);
            let bytes = libc::fcntl(ends[0], libc::F_GETPIPE_SZ);
            Some(Pipe {
                out: ends[0],
                into: ends[1],
                pages: usize::try_from(bytes).unwrap_or(0) / PAGE_BYTES,
            })
        }
    }

    /// Copies `from` to `to`, which have the same length and fit the pipe. False if not all bytes were copied.
    fn pass(&self, from: &[libc::iovec], to: &[libc::iovec]) -> bool {
        let bytes = to.iter().map(|part| part.iov_len).sum::<usize>() as i64;
        // SAFETY: `from` is the caller's memory, which does not change meanwhile; `to` is in the mapping.
        unsafe {
            libc::syscall(libc::SYS_vmsplice, self.into, from.as_ptr(), from.len(), 0) == bytes
                && libc::syscall(libc::SYS_readv, self.out, to.as_ptr(), to.len()) == bytes
        }
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        crate::open::close(self.out);
        crate::open::close(self.into);
    }
}

/// The mappings of an open file.
#[derive(Debug, Default)]
pub(crate) struct Scatter {
    windows: OnceLock<Box<[Mutex<Option<Window>>]>>,
    is_off: AtomicBool,
}

impl Scatter {
    /// For a file whose medium is not memory.
    pub(crate) fn never() -> Scatter {
        Scatter { is_off: AtomicBool::new(true), ..Scatter::default() }
    }

    /// True if `spots` pay: many, small, in rising order and near one another.
    fn suits(&self, spots: &[Spot]) -> bool {
        let (Some(first), Some(last)) = (spots.first(), spots.last()) else { return false };
        let window = |at: u64| at / SCATTER_WINDOW_BYTES;
        let bytes = spots.iter().map(|spot| spot.bytes).sum::<usize>();
        !self.is_off.load(Ordering::Relaxed)
            && spots.len() >= SCATTER_PIECES_MIN
            && bytes / spots.len() <= SCATTER_BYTES_MAX
            && spots.windows(2).all(|two| two[0].at + two[0].bytes as u64 <= two[1].at)
            && last.at + last.bytes as u64 - first.at <= SCATTER_SPREAD_MAX * bytes as u64
            && window(first.at) == window(last.at + last.bytes as u64 - 1)
    }

    /// Writes `spots` to backing file `index` of `count`. `write_last` writes the last one, before the others. Returns
    /// the number of spots written, from the first on. It is 0 if `spots` do not suit, in which case `write_last` was
    /// not called, or if `write_last` failed.
    pub(crate) fn write(
        &self,
        (index, count): (usize, usize),
        fd: RawFd,
        spots: &[Spot],
        write_last: impl FnOnce() -> bool,
    ) -> usize {
        if !self.suits(spots) {
            return 0;
        }
        let windows = self.windows.get_or_init(|| (0..count).map(|_| Mutex::default()).collect());
        let Ok(mut window) = windows[index].try_lock() else { return 0 };
        let from = spots[0].at / SCATTER_WINDOW_BYTES * SCATTER_WINDOW_BYTES;
        if window.as_ref().is_none_or(|window| window.from != from) {
            *window = None;
            *window = Window::new(fd, from);
        }
        let (Some(window), Some(pipe)) = (window.as_ref(), Pipe::new()) else {
            self.is_off.store(true, Ordering::Relaxed);
            return 0;
        };
        if !write_last() {
            return 0;
        }
        let rest = &spots[..spots.len() - 1];
        let done = pass_all(&pipe, window, rest);
        // Nothing was copied: the system calls are not permitted here, and will not be later. A full medium or a
        // truncated file mostly leaves a short copy and may change.
        if done == 0 {
            self.is_off.store(true, Ordering::Relaxed);
        }
        if done == rest.len() {
            spots.len()
        } else {
            done
        }
    }
}

fn pages_of(memory: *mut u8, bytes: usize) -> usize {
    (memory as usize % PAGE_BYTES + bytes).div_ceil(PAGE_BYTES)
}

/// Copies `spots` through the pipe. Returns the number of spots copied, from the first on.
fn pass_all(pipe: &Pipe, window: &Window, spots: &[Spot]) -> usize {
    let (mut from, mut to) = (Vec::<libc::iovec>::new(), Vec::with_capacity(spots.len()));
    let mut done = 0;
    while done < spots.len() {
        from.clear();
        to.clear();
        let mut pages = 0;
        for spot in spots[done..].iter().take(PARTS_MAX) {
            // Memory takes one page of the pipe for each page that it touches.
            match from.last_mut() {
                Some(last) if last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == spot.memory => {
                    let more = pages_of(last.iov_base.cast(), last.iov_len + spot.bytes)
                        - pages_of(last.iov_base.cast(), last.iov_len);
                    if pages + more > pipe.pages {
                        break;
                    }
                    pages += more;
                    last.iov_len += spot.bytes;
                }
                _ => {
                    let more = pages_of(spot.memory, spot.bytes);
                    if pages + more > pipe.pages {
                        break;
                    }
                    pages += more;
                    from.push(libc::iovec { iov_base: spot.memory.cast(), iov_len: spot.bytes });
                }
            }
            let target = window.base.wrapping_add((spot.at - window.from) as usize);
            to.push(libc::iovec { iov_base: target.cast(), iov_len: spot.bytes });
        }
        if to.is_empty() || !pipe.pass(&from, &to) {
            return done;
        }
        done += to.len();
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suits_only_pieces_that_are_many_small_rising_and_near_each_other() {
        let mut byte = 0u8;
        let memory = &raw mut byte;
        let suits = |count: usize, bytes: usize, distance: u64| {
            let spots: Vec<_> = (0..count as u64).map(|i| Spot { at: i * distance, memory, bytes }).collect();
            Scatter::default().suits(&spots)
        };
        assert!(suits(SCATTER_PIECES_MIN, 4096, 8192));
        assert!(!suits(SCATTER_PIECES_MIN - 1, 4096, 8192));
        assert!(!suits(SCATTER_PIECES_MIN, SCATTER_BYTES_MAX + 1, 65536));
        assert!(!suits(SCATTER_PIECES_MIN, 4096, 4095), "on each other");
        let falling = |i: u64| Spot { at: 1 << 20 >> i, memory, bytes: 1 };
        assert!(!Scatter::default().suits(&(0..20).map(falling).cycle().take(60).collect::<Vec<_>>()));
        assert!(suits(60, 1024, SCATTER_SPREAD_MAX << 10));
        assert!(!suits(60, 1024, 1 << 20), "each would take a huge page");
        assert!(!suits(8193, 4096, 8192), "more than a window");
        assert!(!Scatter::never().suits(&[Spot { at: 0, memory, bytes: 1 }; SCATTER_PIECES_MIN]));
    }
}
