//! Paths in fixed buffers.

use forebay_types::limits::PATH_MAX;
use forebay_types::{Code, Ino};

/// Where a path starts, and the path: relative to `dir`, slashes in front ignored, no NUL. The empty path is `dir`
/// itself.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Directory (or, with an empty path, any inode).
    pub dir: Ino,
    /// Path from there.
    pub path: &'a [u8],
}

/// A NUL-terminated path of at most 4095 bytes, on the stack.
#[derive(Clone)]
pub struct PathBuffer {
    len: usize,
    bytes: [u8; PATH_MAX + 1],
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
        PathBuffer { len: 0, bytes: [0; PATH_MAX + 1] }
    }

    /// The bytes, without the NUL.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// The path for a system call.
    pub fn as_c_str_ptr(&self) -> *const libc::c_char {
        self.bytes.as_ptr().cast()
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for the empty path.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Empties it.
    pub fn clear(&mut self) {
        self.len = 0;
        self.bytes[0] = 0;
    }

    /// Makes it `path`; [`Code::NameTooLong`] when that does not fit.
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
        self.bytes[self.len..end].copy_from_slice(bytes);
        self.len = end;
        self.bytes[end] = 0;
        Ok(())
    }

    /// Keeps the bytes from `from` on, behind `front`: what a symlink in the middle of a path does.
    pub(crate) fn replace_front(&mut self, front: &[u8], from: usize) -> Result<(), Code> {
        let rest = self.len - from;
        let len = front.len() + rest;
        if len > PATH_MAX {
            return Err(Code::NameTooLong);
        }
        self.bytes.copy_within(from..self.len, front.len());
        self.bytes[..front.len()].copy_from_slice(front);
        self.len = len;
        self.bytes[len] = 0;
        Ok(())
    }
}
