//! Paths of the kernel's tree that lead into the pool: by a symbolic link to a path under the prefix, or by their text
//! (`//forebay`, `/x/../forebay`, `forebay` from `/`).
//!
//! The kernel has nothing under the prefix, so such a call first fails with ENOENT, and only then is the path examined.
//! One system call shows whether the path has a symbolic link. If it has none, and its text does not name the last
//! component of the prefix, the path does not lead into the pool.

use std::os::raw::{c_char, c_int};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::abi::PATH_BYTES;
use crate::path::{self, Buffer};
use crate::{real, settings};

/// The maximum number of symbolic links to follow, as in the kernel.
const LINKS_MAX: u32 = 40;

/// openat2(2) is not available (Linux before 5.6, or a sandbox).
static NO_OPENAT2: AtomicBool = AtomicBool::new(false);

/// Where `path`, under which the kernel found nothing, enters the pool: stores the path from the prefix on in `out`.
/// `follow` is true if the call follows a symbolic link at the end.
///
/// # Safety
/// `path` is null or a C string, and is not in `out`.
pub(crate) unsafe fn crossing(dirfd: c_int, path: *const c_char, follow: bool, out: &mut Buffer) -> bool {
    let prefix = settings::prefix();
    if prefix.is_empty() || crate::path::is_wild(path) {
        return false;
    }
    // SAFETY: not null; the caller's promise.
    let text = unsafe { path::bytes(path) };
    let at = prefix.iter().rposition(|b| *b == b'/').unwrap_or(0);
    let last = &prefix[at + 1..];
    // SAFETY: a C string.
    let asks = path::has_component(text, last) || unsafe { meets_link(dirfd, path, follow) };
    if !asks || text.is_empty() || !out.set(&[text]) {
        return false;
    }
    Walk { dirfd, above: &prefix[..at], last, path: out, bytes: text.len() }.run(follow)
}

/// True when the kernel meets a symbolic link on the path, or when openat2(2) is not available.
unsafe fn meets_link(dirfd: c_int, path: *const c_char, follow: bool) -> bool {
    if NO_OPENAT2.load(Ordering::Relaxed) {
        return true;
    }
    // struct open_how of openat2(2).
    #[repr(C)]
    struct How {
        flags: u64,
        mode: u64,
        resolve: u64,
    }
    const RESOLVE_NO_SYMLINKS: u64 = 4;
    let flags = libc::O_PATH | libc::O_CLOEXEC | if follow { 0 } else { libc::O_NOFOLLOW };
    let how = How { flags: flags as u64, mode: 0, resolve: RESOLVE_NO_SYMLINKS };
    // SAFETY: a C string, and a structure of the given size.
    let result = unsafe { system_call!(libc::SYS_openat2, dirfd, path, &raw const how, size_of::<How>()) };
    match -result as i32 {
        libc::ELOOP => true,
        libc::ENOSYS | libc::EPERM => {
            NO_OPENAT2.store(true, Ordering::Relaxed);
            true
        }
        _ => {
            if result >= 0 {
                real::close(result as c_int);
            }
            false
        }
    }
}

/// A walk along a path of the kernel's tree.
struct Walk<'a> {
    dirfd: c_int,
    /// The directory that holds the prefix, without a slash at its end: empty for `/`.
    above: &'static [u8],
    /// The prefix's last component.
    last: &'static [u8],
    path: &'a mut Buffer,
    bytes: usize,
}

impl Walk<'_> {
    fn run(mut self, follow: bool) -> bool {
        let (mut at, mut links) = (0, 0);
        loop {
            while self.byte(at) == b'/' {
                at += 1;
            }
            let mut end = at;
            while end < self.bytes && self.byte(end) != b'/' {
                end += 1;
            }
            if end == at {
                return false;
            }
            let is_last = end == self.bytes;
            let name = self.part(at, end);
            let is_dots = matches!(name, b"." | b"..");
            if name == self.last && self.is_above(at) {
                return self.enter(end);
            }
            if is_dots || (is_last && !follow) {
                at = end;
                continue;
            }
            let mut target = Buffer::new();
            let n = self.ending_at(end, |dirfd, path| {
                // SAFETY: a C string, and a buffer of the given size.
                unsafe { real::readlinkat(dirfd, path, target.first(), PATH_BYTES - 1) }
            });
            if n == -(libc::EINVAL as isize) {
                at = end;
                continue;
            }
            links += 1;
            let Ok(n) = usize::try_from(n) else { return false };
            if n == 0 || links > LINKS_MAX {
                return false;
            }
            // SAFETY: the kernel stored n bytes.
            let target = unsafe { std::slice::from_raw_parts(target.as_c().cast::<u8>(), n) };
            let start = if target[0] == b'/' { 0 } else { at };
            if !self.replace(start, end, target) {
                return false;
            }
            if let Some(inside) = path::below(self.part(0, self.bytes), settings::prefix()) {
                let end = self.bytes - inside.len();
                return self.enter(end);
            }
            at = start;
        }
    }

    fn byte(&self, i: usize) -> u8 {
        // SAFETY: callers stay within the path and its NUL, which were stored.
        unsafe { self.path.as_c().cast::<u8>().add(i).read() }
    }

    fn part(&self, start: usize, end: usize) -> &[u8] {
        // SAFETY: the first `bytes` bytes were stored, and end is no greater.
        unsafe { std::slice::from_raw_parts(self.path.as_c().cast::<u8>().add(start), end - start) }
    }

    /// Runs `body` on the path as if it ended at `end`.
    fn ending_at(&mut self, end: usize, body: impl FnOnce(c_int, *const c_char) -> isize) -> isize {
        // SAFETY: end is within the path or its NUL.
        let byte = unsafe { &mut *self.path.first().add(end) };
        let before = std::mem::replace(byte, 0);
        let result = body(self.dirfd, self.path.as_c());
        // SAFETY: as above.
        unsafe { self.path.first().add(end).write(before) };
        result
    }

    /// True when the first `end` bytes of the path are the directory that holds the prefix.
    fn is_above(&mut self, end: usize) -> bool {
        let mut wanted = Buffer::new();
        let above: &[u8] = if self.above.is_empty() { b"/" } else { self.above };
        let stat = |dirfd, path| {
            let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
            // SAFETY: a C string and a writable structure, which the kernel fills on success.
            unsafe { (real::fstatat(dirfd, path, stat.as_mut_ptr(), 0) == 0).then(|| stat.assume_init()) }
        };
        if !wanted.set(&[above]) {
            return false;
        }
        let mut here = None;
        if end == 0 {
            here = stat(self.dirfd, c".".as_ptr());
        } else {
            self.ending_at(end, |dirfd, path| {
                here = stat(dirfd, path);
                0
            });
        }
        match (here, stat(libc::AT_FDCWD, wanted.as_c())) {
            (Some(a), Some(b)) => (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino),
            _ => false,
        }
    }

    /// Replaces the bytes from `start` to `end` by `with`.
    fn replace(&mut self, start: usize, end: usize, with: &[u8]) -> bool {
        let rest = self.bytes - end;
        let bytes = start + with.len() + rest;
        if bytes >= PATH_BYTES {
            return false;
        }
        let first = self.path.first();
        // SAFETY: both ranges and the NUL are within the buffer.
        unsafe {
            first.add(start + with.len()).copy_from(first.add(end), rest + 1);
            first.add(start).copy_from_nonoverlapping(with.as_ptr(), with.len());
        }
        self.bytes = bytes;
        true
    }

    /// The path enters the pool with the component that ends at `end`.
    fn enter(&mut self, end: usize) -> bool {
        self.replace(0, end, settings::prefix())
    }
}
