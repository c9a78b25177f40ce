//! realpath of paths that start in, end in or pass through the pool.

use std::os::raw::c_char;

use crate::abi::PATH_BYTES;
use crate::chdir::getcwd;
use crate::fortified::overflow;
use crate::interpose::{errno, set_errno};
use crate::names::readlink_any;
use crate::path::{self, Buffer};
use crate::stdio::libc_would_miss;
use crate::{real, stat};

const HERE: i32 = libc::AT_FDCWD;
/// The maximum number of symbolic links to follow, as in the kernel.
const LINKS_MAX: u32 = 40;

/// A path being resolved: `done` has no links, `rest` is not resolved yet. Both are C strings.
struct Resolving {
    done: [u8; PATH_BYTES],
    done_bytes: usize,
    rest: [u8; PATH_BYTES],
    rest_bytes: usize,
}

impl Resolving {
    fn push(&mut self, component: &[u8]) -> Result<(), i32> {
        let bytes = self.done_bytes + 1 + component.len();
        if bytes >= PATH_BYTES {
            return Err(libc::ENAMETOOLONG);
        }
        self.done[self.done_bytes] = b'/';
        self.done[self.done_bytes + 1..bytes].copy_from_slice(component);
        self.done[bytes] = 0;
        self.done_bytes = bytes;
        Ok(())
    }

    fn pop(&mut self) {
        let end = self.done[..self.done_bytes].iter().rposition(|b| *b == b'/').unwrap_or(0);
        self.done_bytes = end;
        self.done[end] = 0;
    }

    /// Puts `front` before the rest.
    fn put_before(&mut self, front: &[u8], from: usize) -> Result<(), i32> {
        let rest = self.rest_bytes - from;
        if front.len() + rest >= PATH_BYTES {
            return Err(libc::ENAMETOOLONG);
        }
        self.rest.copy_within(from..self.rest_bytes, front.len());
        self.rest[..front.len()].copy_from_slice(front);
        self.rest_bytes = front.len() + rest;
        Ok(())
    }

    fn run(&mut self) -> Result<(), i32> {
        let mut at = 0;
        let mut links = 0;
        loop {
            while at < self.rest_bytes && self.rest[at] == b'/' {
                at += 1;
            }
            if at == self.rest_bytes {
                return Ok(());
            }
            let end = self.rest[at..self.rest_bytes].iter().position(|b| *b == b'/');
            let end = end.map_or(self.rest_bytes, |n| at + n);
            let mut component = [0; 256];
            let bytes = end - at;
            component.get_mut(..bytes).ok_or(libc::ENAMETOOLONG)?.copy_from_slice(&self.rest[at..end]);
            at = end;
            match &component[..bytes] {
                b"." => {}
                b".." => self.pop(),
                name => {
                    self.push(name)?;
                    let mut target = [0; PATH_BYTES];
                    let c = self.done.as_ptr().cast();
                    // SAFETY: a C string, and a buffer of the given size.
                    let n = unsafe { readlink_any(HERE, c, target.as_mut_ptr(), PATH_BYTES - 1) };
                    match n {
                        0.. => {
                            links += 1;
                            if links > LINKS_MAX {
                                return Err(libc::ELOOP);
                            }
                            let target = &target[..n as usize];
                            self.put_before(target, at)?;
                            at = 0;
                            if target.first() == Some(&b'/') {
                                self.done_bytes = 0;
                                self.done[0] = 0;
                            } else {
                                self.pop();
                            }
                        }
                        _ if -n as i32 == libc::EINVAL => self.check_directory(at)?,
                        // A directory above the prefix need not exist in the kernel's tree.
                        _ if -n as i32 == libc::ENOENT && self.is_above_prefix() => {}
                        failed => return Err(-failed as i32),
                    }
                }
            }
        }
    }

    fn is_above_prefix(&self) -> bool {
        path::below(crate::settings::prefix(), &self.done[..self.done_bytes]).is_some()
    }

    /// A component before others must be a directory, even if only a slash or `..` follows.
    fn check_directory(&self, at: usize) -> Result<(), i32> {
        if at == self.rest_bytes {
            return Ok(());
        }
        let mut seen = std::mem::MaybeUninit::<libc::stat>::uninit();
        // SAFETY: a C string and a writable structure, filled on success.
        unsafe {
            if stat::stat(self.done.as_ptr().cast(), seen.as_mut_ptr()) != 0 {
                return Err(errno());
            }
            if seen.assume_init().st_mode & libc::S_IFMT != libc::S_IFDIR {
                return Err(libc::ENOTDIR);
            }
        }
        Ok(())
    }
}

/// Resolves a path that libc cannot see into `out`, or, when that is null, into memory of malloc.
unsafe fn resolve(text: &[u8], out: *mut c_char) -> Result<*mut c_char, i32> {
    if text.is_empty() {
        return Err(libc::ENOENT);
    }
    let mut path = Resolving { done: [0; PATH_BYTES], done_bytes: 0, rest: [0; PATH_BYTES], rest_bytes: 0 };
    path.put_before(text, 0)?;
    if text[0] != b'/' {
        let mut here = Buffer::new();
        // SAFETY: the buffer has the given size. After success it holds a C string.
        unsafe {
            if getcwd(here.first().cast(), PATH_BYTES).is_null() {
                return Err(errno());
            }
            path.put_before(b"/", 0)?;
            path.put_before(path::bytes(here.as_c()), 0)?;
        }
    }
    path.run()?;
    if path.done_bytes == 0 {
        path.done[0] = b'/';
        path.done[1] = 0;
        path.done_bytes = 1;
    }
    // SAFETY: libc's contract: PATH_MAX bytes at `out`, and the path fits.
    unsafe {
        if out.is_null() {
            let copy = libc::strdup(path.done.as_ptr().cast());
            return if copy.is_null() { Err(libc::ENOMEM) } else { Ok(copy) };
        }
        if path.done_bytes >= libc::PATH_MAX as usize {
            return Err(libc::ENAMETOOLONG);
        }
        out.copy_from_nonoverlapping(path.done.as_ptr().cast(), path.done_bytes + 1);
        Ok(out)
    }
}

interpose! {
    /// realpath(3)
    realpath = fn(name: *const c_char, out: *mut c_char) -> *mut c_char {
        // SAFETY: libc's contract.
        unsafe {
            if !libc_would_miss(HERE, name, false, true) {
                let resolved = real::libc_own::realpath(name, out);
                if !resolved.is_null()
                    || errno() != libc::ENOENT
                    || !libc_would_miss(HERE, name, true, true)
                {
                    return resolved;
                }
            }
            let before = errno();
            match resolve(path::bytes(name), out) {
                Ok(resolved) => {
                    set_errno(before);
                    resolved
                }
                Err(why) => {
                    set_errno(why);
                    std::ptr::null_mut()
                }
            }
        }
    }

    /// realpath(3), fortified
    __realpath_chk = fn(name: *const c_char, out: *mut c_char, known: usize) -> *mut c_char {
        if known < libc::PATH_MAX as usize && !out.is_null() {
            overflow();
        }
        // SAFETY: libc's contract.
        unsafe { realpath(name, out) }
    }

    /// canonicalize_file_name(3)
    canonicalize_file_name = fn(name: *const c_char) -> *mut c_char {
        // SAFETY: libc's contract.
        unsafe { realpath(name, std::ptr::null_mut()) }
    }
}
