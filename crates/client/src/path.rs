//! Paths in fixed buffers.

use std::mem::MaybeUninit;

use forebay_types::limits::PATH_MAX;
use forebay_types::{Code, Ino};

/// A start directory and a path relative to it. Leading slashes are ignored; the path has no NUL. The empty path means
/// `dir` itself.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The start directory. With an empty path, any inode.
    pub dir: Ino,
    /// The path from there.
    pub path: &'a [u8],
}

/// A NUL-terminated path of at most 4095 bytes, on the stack.
pub struct PathBuffer {
    /// The first `len` bytes and the NUL after them are initialised. The others are not, because clearing 4 KiB would
    /// cost more than a look-up.
    len: usize,
    bytes: [MaybeUninit<u8>; PATH_MAX + 1],
}

impl Default for PathBuffer {
    fn default() -> Self {
        PathBuffer::new()
    }
}

impl std::fmt::Debug for PathBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", String::from_utf8_lossy(self.as_bytes()))
    }
}

impl PathBuffer {
    /// The empty path.
    pub const fn new() -> PathBuffer {
        let mut bytes = [MaybeUninit::uninit(); PATH_MAX + 1];
        bytes[0] = MaybeUninit::new(0);
        PathBuffer { len: 0, bytes }
    }

    /// The bytes, without the NUL.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: the first `len` bytes are initialised.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr().cast(), self.len) }
    }

    /// Writes bytes at `at`, which is at most the length.
    fn write(&mut self, at: usize, bytes: &[u8]) {
        for (to, from) in self.bytes[at..at + bytes.len()].iter_mut().zip(bytes) {
            *to = MaybeUninit::new(*from);
        }
    }

    /// Makes the first `len` bytes, which are initialised, the path.
    fn end_at(&mut self, len: usize) {
        self.len = len;
        self.bytes[len] = MaybeUninit::new(0);
    }

    /// The path for a system call.
    pub fn as_c_str_ptr(&self) -> *const libc::c_char {
        self.bytes.as_ptr().cast()
    }

    /// The path as a C string.
    pub(crate) fn as_c_str(&self) -> &std::ffi::CStr {
        // SAFETY: the path is followed by a NUL. If the path contains one, the string ends there.
        unsafe { std::ffi::CStr::from_ptr(self.as_c_str_ptr()) }
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for the empty path.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Sets the empty path.
    pub fn clear(&mut self) {
        self.end_at(0);
    }

    /// Sets the path; [`Code::NameTooLong`] if it does not fit.
    pub fn set(&mut self, path: &[u8]) -> Result<(), Code> {
        self.clear();
        self.push(path)
    }

    /// Appends.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), Code> {
        let end = self.len + bytes.len();
        if end > PATH_MAX {
            return Err(Code::NameTooLong);
        }
        self.write(self.len, bytes);
        self.end_at(end);
        Ok(())
    }

    /// Replaces the bytes before `from` by `front`, as for a symlink in the middle of a path.
    pub(crate) fn replace_front(&mut self, front: &[u8], from: usize) -> Result<(), Code> {
        let rest = self.len - from;
        let len = front.len() + rest;
        if len > PATH_MAX {
            return Err(Code::NameTooLong);
        }
        self.bytes.copy_within(from..self.len, front.len());
        self.write(0, front);
        self.end_at(len);
        Ok(())
    }
}
