//! Writes of many small pieces to a backing file in memory by two system calls instead of one each, and without its
//! lock.
//!
//! The pieces' memory goes into a pipe by reference (vmsplice) and from there to a mapping of the backing file (readv),
//! so that the data is copied once and by the kernel: where a page cannot be had because the medium is full, or another
//! process cuts the file meanwhile, the copy ends short where a store of the program's would be SIGBUS. Who calls this
//! then writes what is left by pwrite, which says why. The last piece is written so first: that sets the size, and the
//! file's times, which a mapping leaves alone.
//!
//! Pipes live as long as a call, as a program may close any descriptor. A mapping lives as long as the file is open, a
//! window of each backing file at a time; its lock is never waited for. Whatever is not to be had turns this off for
//! the file. Measured: docs/decisions/0021.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

use forebay_types::limits::{
    SCATTER_BYTES_MAX, SCATTER_PIECES_MIN, SCATTER_SPREAD_MAX, SCATTER_WINDOW_BYTES,
};

/// Bytes that are asked for in one pipe: what the kernel lets every user have.
const PIPE_BYTES: usize = 1 << 20;

const PAGE_BYTES: usize = 4096;

/// Pieces of memory that the kernel takes in one call (UIO_MAXIOV).
const PARTS_MAX: usize = 1024;

/// Memory, and where in the backing file it is to go.
#[derive(Clone, Copy)]
pub(crate) struct Spot {
    pub(crate) at: u64,
    pub(crate) memory: *mut u8,
    pub(crate) bytes: usize,
}

/// A part of a backing file that is mapped.
#[derive(Debug)]
struct Window {
    base: *mut u8,
    from: u64,
}

// SAFETY: the mapping is of the process, not of a thread.
unsafe impl Send for Window {}

impl Window {
    fn new(fd: RawFd, from: u64) -> Option<Window> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let bytes = SCATTER_WINDOW_BYTES as usize;
        // SAFETY: a new mapping, where the kernel likes it.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, libc::MAP_SHARED, fd, from as i64) };
        (base != libc::MAP_FAILED).then(|| Window { base: base.cast(), from })
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of which nobody has an address.
        unsafe { libc::munmap(self.base.cast(), SCATTER_WINDOW_BYTES as usize) };
    }
}

/// A pipe's two ends.
struct Pipe {
    out: RawFd,
    into: RawFd,
    /// Pages that it holds.
    pages: usize,
}

impl Pipe {
    fn new() -> Option<Pipe> {
        let mut ends = [0; 2];
        // By number, as all here: preloaded libraries look at calls by name.
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

    /// Moves `from` to `to`, which are equally long and fit the pipe; false when any of it was not.
    fn pass(&self, from: &[libc::iovec], to: &[libc::iovec]) -> bool {
        let bytes = to.iter().map(|part| part.iov_len).sum::<usize>() as i64;
        // SAFETY: `from` is the caller's memory, which nobody changes meanwhile; `to` is in the mapping.
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

/// What an open file has mapped.
#[derive(Debug, Default)]
pub(crate) struct Scatter {
    windows: OnceLock<Box<[Mutex<Option<Window>>]>>,
    is_off: AtomicBool,
}

impl Scatter {
    /// Of a file on a medium that is not memory.
    pub(crate) fn never() -> Scatter {
        Scatter { is_off: AtomicBool::new(true), ..Scatter::default() }
    }

    /// Whether `spots` are to be written so: many, small, in rising order and near each other.
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

    /// Writes `spots` to backing file `index` of `count`, the last of them by `write_last`, before the others; how many
    /// of them, from the first on. 0 where they do not suit, and `write_last` was not called then or failed.
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
        // A file that is full, or was cut, is not the medium's fault; a call that is not allowed never will be.
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

/// How many of `spots` went through the pipe, from the first on.
fn pass_all(pipe: &Pipe, window: &Window, spots: &[Spot]) -> usize {
    let (mut from, mut to) = (Vec::<libc::iovec>::new(), Vec::with_capacity(spots.len()));
    let mut done = 0;
    while done < spots.len() {
        from.clear();
        to.clear();
        let mut pages = 0;
        for spot in spots[done..].iter().take(PARTS_MAX) {
            // Memory takes a page of the pipe for each page that it touches.
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
