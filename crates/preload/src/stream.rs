//! A directory stream of this library: what opendir returns for a directory of the pool.
//!
//! Programs may pass a `DIR *` of either library to these functions. A stream of glibc begins with its descriptor, an
//! int that is never negative. A stream of this library begins with a number that is negative there.
//!
//! The stream has no descriptor until dirfd is called. Position 0 is the start, 1 is behind `.`, 2 is behind `..`, and
//! later positions are the cookie of the entry that was read last. Cookies are greater than 128.

use std::os::raw::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{dirent as Dirent, DIR};

use crate::abi::{DirectoryHandle, Entry, Place};
use crate::door::Pool;
use crate::path::Buffer;
use crate::{descriptor, real};

const MAGIC: u64 = 0xf0eb_a1d0_f0eb_a1d0;
const DOT: i64 = 1;
const DOT_DOT: i64 = 2;

/// A directory of the pool being read.
#[repr(C)]
pub(crate) struct Stream {
    magic: u64,
    busy: AtomicBool,
    /// Its anchor, or -1.
    fd: c_int,
    pool: Pool,
    ino: u64,
    directory: *mut DirectoryHandle,
    position: i64,
    entry: Dirent,
}

/// A stream that only this thread uses, until the value is dropped.
pub(crate) struct Held<'a>(&'a mut Stream);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.busy.store(false, Ordering::Release);
    }
}

impl Stream {
    /// A stream over the directory `ino`, which takes over `fd` unless it is -1; or a negative errno.
    pub(crate) fn open(pool: Pool, ino: u64, fd: c_int) -> Result<*mut DIR, i64> {
        let mut directory = std::ptr::null_mut();
        // SAFETY: the handle is attached, the pointer writable.
        let opened = unsafe { pool.directory_open(ino, &mut directory) };
        if opened < 0 {
            return Err(opened);
        }
        // SAFETY: a dirent of zeroes is a valid one.
        let entry = unsafe { std::mem::zeroed() };
        let busy = AtomicBool::new(false);
        let stream = Stream { magic: MAGIC, busy, fd, pool, ino, directory, position: 0, entry };
        Ok(Box::into_raw(Box::new(stream)).cast())
    }

    /// The stream behind `stream`, if it is of this library. Waits while another thread uses it.
    ///
    /// # Safety
    /// `stream` is null or an open stream, of libc or of this library.
    #[inline]
    pub(crate) unsafe fn of<'a>(stream: *mut DIR) -> Option<Held<'a>> {
        // SAFETY: the caller's promise. Both kinds have at least eight bytes and that alignment.
        if stream.is_null() || unsafe { stream.cast::<u64>().read() } != MAGIC {
            return None;
        }
        let ours: *mut Stream = stream.cast();
        // SAFETY: it is of this library. Before it is held, only the flag is used.
        let busy = unsafe { &(*ours).busy };
        while busy.swap(true, Ordering::Acquire) {
            // SAFETY: it touches no memory.
            unsafe { system_call!(libc::SYS_sched_yield) };
        }
        // SAFETY: only this thread holds it.
        Some(Held(unsafe { &mut *ours }))
    }
}

impl Held<'_> {
    /// The next entry, or none at the end, or a positive errno.
    pub(crate) fn read(&mut self) -> Result<Option<*mut Dirent>, c_int> {
        let stream = &mut *self.0;
        match stream.position {
            0 => stream.fill(stream.ino, DOT, libc::DT_DIR, b"."),
            DOT => stream.fill(stream.parent(), DOT_DOT, libc::DT_DIR, b".."),
            _ => {
                let mut entry = std::mem::MaybeUninit::<Entry>::uninit();
                let pool = stream.pool;
                // SAFETY: the handles are open, the entry writable.
                let found = unsafe { pool.directory_next(stream.directory, entry.as_mut_ptr()) };
                match found {
                    0 => return Ok(None),
                    // The directory was removed, so it has no entries.
                    gone if gone == -i64::from(libc::ENOENT) => return Ok(None),
                    1 => {
                        // SAFETY: filled.
                        let entry = unsafe { entry.assume_init_ref() };
                        let name = &entry.name[..entry.name_bytes as usize];
                        stream.fill(entry.ino, entry.cookie as i64, entry.kind, name);
                    }
                    failed => return Err(-failed as c_int),
                }
            }
        }
        Ok(Some(&raw mut stream.entry))
    }

    /// Its position.
    pub(crate) fn position(&self) -> i64 {
        self.0.position
    }

    /// Moves to a position that [`Held::position`] returned; 0 is the start.
    pub(crate) fn seek(&mut self, position: i64) {
        let cookie = if position > DOT_DOT { position as u64 } else { 0 };
        self.0.position = position.max(0);
        // SAFETY: the handle is open.
        unsafe { self.0.pool.directory_seek(self.0.directory, cookie) };
    }

    /// Its descriptor, opened if it has none yet; or a negative errno.
    pub(crate) fn descriptor(&mut self) -> isize {
        let stream = &mut *self.0;
        if stream.fd < 0 {
            let mut escape = Buffer::new();
            let itself = Place { dir: stream.ino, path: std::ptr::null(), bytes: 0 };
            let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
            let pool = stream.pool;
            // SAFETY: the handle is attached, the buffer has room for a path.
            let fd = unsafe { pool.open(itself, flags, 0, escape.first()) };
            if fd < 0 {
                return fd as isize;
            }
            descriptor::opened_directory();
            stream.fd = fd as c_int;
        }
        stream.fd as isize
    }

    /// Closes it.
    pub(crate) fn close(self) {
        let stream: *mut Stream = &raw mut *self.0;
        std::mem::forget(self);
        // SAFETY: it came from `Stream::open`. This thread holds it, and the program does not use it again.
        let mut stream = unsafe { Box::from_raw(stream) };
        // SAFETY: the handle is open and not used again.
        unsafe { stream.pool.directory_close(stream.directory) };
        if stream.fd >= 0 {
            real::close(stream.fd);
        }
        stream.magic = 0;
    }
}

impl Stream {
    fn fill(&mut self, ino: u64, position: i64, kind: u8, name: &[u8]) {
        let entry = &mut self.entry;
        entry.d_ino = ino;
        entry.d_off = position;
        entry.d_type = kind;
        let bytes = name.len().min(entry.d_name.len() - 1);
        for (to, from) in entry.d_name.iter_mut().zip(&name[..bytes]) {
            *to = *from as libc::c_char;
        }
        entry.d_name[bytes] = 0;
        entry.d_reclen = record_bytes(bytes) as u16;
        self.position = position;
    }

    /// Inode number of `..`.
    fn parent(&self) -> u64 {
        let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
        let mut escape = Buffer::new();
        let above = Place { dir: self.ino, path: b"..".as_ptr(), bytes: 2 };
        let out = stat.as_mut_ptr();
        // SAFETY: the handle is attached, structure and buffer are writable. A path that left the pool is a C string.
        unsafe {
            let mut found = self.pool.stat(above, 1, out, escape.first());
            if found == crate::abi::ESCAPED {
                found = real::fstatat(libc::AT_FDCWD, escape.as_c(), out, 0) as i64;
            }
            if found == 0 {
                stat.assume_init().st_ino
            } else {
                self.ino
            }
        }
    }
}

/// Bytes of a directory entry with a name of `name_bytes` bytes.
pub(crate) fn record_bytes(name_bytes: usize) -> usize {
    (std::mem::offset_of!(Dirent, d_name) + name_bytes + 1).next_multiple_of(8)
}
