//! The FUSE protocol, version 7: its numbers, requests and replies.
//!
//! Requests are parsed field by field from the bytes that the kernel wrote; replies are appended to a buffer. Numbers
//! are in native byte order. Names follow `linux/fuse.h`, which is the reference. No I/O, no unsafe.

use forebay_sys::fuse::{out_header, OUT_HEADER_BYTES};

/// The major version. The kernel's must be the same; its minor version determines its features.
pub const MAJOR: u32 = 7;
/// The newest minor version whose features are used.
pub const MINOR: u32 = 45;
/// First minor version with `FUSE_NOTIFY_INC_EPOCH`.
pub const MINOR_OF_EPOCHS: u32 = 44;
/// Node number of the root directory.
pub const ROOT_NODE: u64 = 1;

/// Bytes of a request's header.
pub const IN_HEADER_BYTES: usize = 40;

/// Request codes.
pub mod op {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const GETLK: u32 = 31;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const SYNCFS: u32 = 50;
    pub const TMPFILE: u32 = 51;
    pub const STATX: u32 = 52;
    pub const COPY_FILE_RANGE_64: u32 = 53;
}

/// Features that both sides have, negotiated by INIT.
pub mod init {
    pub const ASYNC_READ: u64 = 1;
    pub const POSIX_LOCKS: u64 = 1 << 1;
    pub const ATOMIC_O_TRUNC: u64 = 1 << 3;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const FLOCK_LOCKS: u64 = 1 << 10;
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub const PASSTHROUGH: u64 = 1 << 37;
    pub const NO_EXPORT_SUPPORT: u64 = 1 << 38;
}

/// Flags in the reply to an open.
pub mod fopen {
    pub const DIRECT_IO: u32 = 1;
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
    pub const PASSTHROUGH: u32 = 1 << 7;
}

/// Which attributes a SETATTR sets.
pub mod fattr {
    pub const MODE: u32 = 1;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

/// Flag of WRITE: the data are pages of a mapping.
pub const WRITE_CACHE: u32 = 1;
/// Flag of WRITE: drop set-ID bits.
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// Flag of OPEN with O_TRUNC: drop set-ID bits.
pub const OPEN_KILL_SUIDGID: u32 = 1;
/// Flag of lock requests: the lock is one of flock(2), not of fcntl(2).
pub const LK_FLOCK: u32 = 1;
/// Flag of RELEASE: drop the handle's flock.
pub const RELEASE_FLOCK_UNLOCK: u32 = 2;
/// Flag of FSYNC: write the data alone.
pub const FSYNC_FDATASYNC: u32 = 1;

/// Reads a request's fields. A missing field is an error.
#[derive(Clone, Copy)]
pub struct Fields<'a> {
    rest: &'a [u8],
}

/// The request is shorter than its kind requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Short;

impl<'a> Fields<'a> {
    pub fn new(bytes: &'a [u8]) -> Fields<'a> {
        Fields { rest: bytes }
    }

    fn chunk<const N: usize>(&mut self) -> Result<[u8; N], Short> {
        let (chunk, rest) = self.rest.split_first_chunk().ok_or(Short)?;
        self.rest = rest;
        Ok(*chunk)
    }

    pub fn u16(&mut self) -> Result<u16, Short> {
        self.chunk().map(u16::from_ne_bytes)
    }

    pub fn u32(&mut self) -> Result<u32, Short> {
        self.chunk().map(u32::from_ne_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, Short> {
        self.chunk().map(u64::from_ne_bytes)
    }

    /// Bytes up to a NUL, which is taken too.
    pub fn name(&mut self) -> Result<&'a [u8], Short> {
        let end = self.rest.iter().position(|&b| b == 0).ok_or(Short)?;
        let (name, rest) = self.rest.split_at(end);
        self.rest = &rest[1..];
        Ok(name)
    }

    /// The next `count` bytes.
    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], Short> {
        if count > self.rest.len() {
            return Err(Short);
        }
        let (bytes, rest) = self.rest.split_at(count);
        self.rest = rest;
        Ok(bytes)
    }

    pub fn skip(&mut self, count: usize) -> Result<(), Short> {
        self.bytes(count).map(|_| ())
    }
}

/// A request's header, and the fields behind it.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    pub opcode: u32,
    pub unique: u64,
    pub node: u64,
    pub uid: u32,
    pub gid: u32,
    /// The calling thread; 0 if it is in a process namespace that this process cannot see.
    pub thread: u32,
    pub fields: Fields<'a>,
}

impl<'a> Request<'a> {
    /// Parses the request that one read from the device returned.
    pub fn parse(bytes: &'a [u8]) -> Result<Request<'a>, Short> {
        let mut f = Fields::new(bytes);
        let len = f.u32()? as usize;
        let opcode = f.u32()?;
        let (unique, node) = (f.u64()?, f.u64()?);
        let (uid, gid, thread) = (f.u32()?, f.u32()?, f.u32()?);
        // Extensions lie behind the body, counted in units of 8 bytes.
        let extension_bytes = usize::from(f.u16()?) * 8;
        let end = len.checked_sub(extension_bytes).ok_or(Short)?;
        let fields = Fields::new(bytes.get(IN_HEADER_BYTES..end).ok_or(Short)?);
        Ok(Request { opcode, unique, node, uid, gid, thread, fields })
    }
}

/// A reply under construction: space for the header, then the body.
#[derive(Debug)]
pub struct Body {
    /// The message, followed by remains of longer ones: only memory that was never used before is cleared.
    memory: Vec<u8>,
    /// Bytes of the message.
    used: usize,
}

impl Default for Body {
    fn default() -> Body {
        Body::new()
    }
}

impl Body {
    pub fn new() -> Body {
        Body { memory: vec![0; OUT_HEADER_BYTES], used: OUT_HEADER_BYTES }
    }

    /// Empties the body, and keeps its memory.
    pub fn clear(&mut self) {
        self.used = OUT_HEADER_BYTES;
    }

    /// Appends `count` bytes with unspecified content.
    fn more(&mut self, count: usize) -> &mut [u8] {
        let (from, to) = (self.used, self.used + count);
        if to > self.memory.len() {
            self.memory.resize(to, 0);
        }
        self.used = to;
        &mut self.memory[from..to]
    }

    pub fn u16(&mut self, v: u16) {
        self.bytes(&v.to_ne_bytes());
    }

    pub fn u32(&mut self, v: u32) {
        self.bytes(&v.to_ne_bytes());
    }

    pub fn u64(&mut self, v: u64) {
        self.bytes(&v.to_ne_bytes());
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.more(bytes.len()).copy_from_slice(bytes);
    }

    pub fn zeros(&mut self, count: usize) {
        self.more(count).fill(0);
    }

    /// True if the body has no byte yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the body so far.
    pub fn len(&self) -> usize {
        self.used - OUT_HEADER_BYTES
    }

    /// Appends up to `count` bytes: `fill` writes them, and returns how many it wrote. Its buffer has unspecified
    /// content.
    pub fn fill<E>(
        &mut self,
        count: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<usize, E>,
    ) -> Result<usize, E> {
        let at = self.used;
        let used = fill(self.more(count));
        self.used = at + used.as_ref().map_or(0, |n| (*n).min(count));
        used
    }

    /// The whole message: a reply to `unique`, or a notification if `unique` is 0. `error` is 0 or a negative errno,
    /// and the number of a notification.
    pub fn message(&mut self, unique: u64, error: i32) -> &[u8] {
        let header = out_header(self.used, unique, error);
        self.memory[..OUT_HEADER_BYTES].copy_from_slice(&header);
        &self.memory[..self.used]
    }
}

/// How long the kernel may use a cached name or attributes; ordered by duration.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Validity {
    pub seconds: u64,
    pub nanoseconds: u32,
}

impl Validity {
    /// The kernel sends a request each time.
    pub const NONE: Validity = Validity { seconds: 0, nanoseconds: 0 };
    /// For attributes in the reply to a look-up.
    pub const BRIEF: Validity = Validity { seconds: 0, nanoseconds: 20_000_000 };
    /// Until an invalidation. A day bounds the effect of a lost invalidation.
    pub const LONG: Validity = Validity { seconds: 86_400, nanoseconds: 0 };
}

/// The three times as the protocol orders them: all seconds, then all nanoseconds.
fn put_times(out: &mut Body, st: &libc::stat) {
    out.u64(st.st_atime as u64);
    out.u64(st.st_mtime as u64);
    out.u64(st.st_ctime as u64);
    out.u32(st.st_atime_nsec as u32);
    out.u32(st.st_mtime_nsec as u32);
    out.u32(st.st_ctime_nsec as u32);
}

/// Encodes a device number in the kernel's 32 bits.
fn small_device(device: u64) -> u32 {
    let (major, minor) = (libc::major(device), libc::minor(device));
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// Decodes a device number from the kernel's 32 bits.
pub fn large_device(device: u32) -> u64 {
    libc::makedev((device & 0xfff00) >> 8, (device & 0xff) | ((device >> 12) & 0xfff00))
}

/// `struct fuse_attr`.
fn put_attr(out: &mut Body, st: &libc::stat) {
    out.u64(st.st_ino);
    out.u64(st.st_size as u64);
    out.u64(st.st_blocks as u64);
    put_times(out, st);
    out.u32(st.st_mode);
    out.u32(st.st_nlink as u32);
    out.u32(st.st_uid);
    out.u32(st.st_gid);
    out.u32(small_device(st.st_rdev));
    out.u32(st.st_blksize as u32);
    out.u32(0);
}

/// `struct fuse_attr_out`.
pub fn put_attr_out(out: &mut Body, st: &libc::stat, attr: Validity) {
    out.u64(attr.seconds);
    out.u32(attr.nanoseconds);
    out.u32(0);
    put_attr(out, st);
}

/// `struct fuse_entry_out`.
pub fn put_entry_out(out: &mut Body, node: u64, st: &libc::stat, entry: Validity, attr: Validity) {
    out.u64(node);
    out.u64(0); // generation: numbers are never used again
    out.u64(entry.seconds);
    out.u64(attr.seconds);
    out.u32(entry.nanoseconds);
    out.u32(attr.nanoseconds);
    put_attr(out, st);
}

/// A name that does not exist, which the kernel may cache for `entry`.
pub fn put_absent(out: &mut Body, entry: Validity) {
    out.u64(0);
    out.u64(0);
    out.u64(entry.seconds);
    out.u64(0);
    out.u32(entry.nanoseconds);
    out.zeros(ENTRY_OUT_BYTES - 36);
}

/// Bytes of `struct fuse_entry_out`.
pub const ENTRY_OUT_BYTES: usize = 128;

/// `struct fuse_open_out`.
pub fn put_open_out(out: &mut Body, handle: u64, flags: u32, backing: i32) {
    out.u64(handle);
    out.u32(flags);
    out.u32(backing as u32);
}

/// `struct fuse_statx_out`.
pub fn put_statx_out(out: &mut Body, st: &libc::stat, born: Option<(i64, u32)>, attr: Validity) {
    out.u64(attr.seconds);
    out.u32(attr.nanoseconds);
    out.u32(0);
    out.zeros(16);
    let mask = libc::STATX_BASIC_STATS | if born.is_some() { libc::STATX_BTIME } else { 0 };
    out.u32(mask);
    out.u32(st.st_blksize as u32);
    out.u64(0);
    out.u32(st.st_nlink as u32);
    out.u32(st.st_uid);
    out.u32(st.st_gid);
    out.u16(st.st_mode as u16);
    out.u16(0);
    out.u64(st.st_ino);
    out.u64(st.st_size as u64);
    out.u64(st.st_blocks as u64);
    out.u64(0);
    let (born_sec, born_nsec) = born.unwrap_or_default();
    for (sec, nsec) in [
        (st.st_atime, st.st_atime_nsec as u32),
        (born_sec, born_nsec),
        (st.st_ctime, st.st_ctime_nsec as u32),
        (st.st_mtime, st.st_mtime_nsec as u32),
    ] {
        out.u64(sec as u64);
        out.u32(nsec);
        out.u32(0);
    }
    out.u32(libc::major(st.st_rdev));
    out.u32(libc::minor(st.st_rdev));
    out.zeros(8 + 14 * 8);
}

/// Bytes of a directory entry with a name of `name_bytes`, including attributes in front of it if `plus` is set.
pub fn dirent_bytes(name_bytes: usize, plus: bool) -> usize {
    let front = if plus { ENTRY_OUT_BYTES } else { 0 };
    front + (24 + name_bytes).next_multiple_of(8)
}

/// `struct fuse_dirent`.
pub fn put_dirent(out: &mut Body, ino: u64, offset: u64, kind: u8, name: &[u8]) {
    out.u64(ino);
    out.u64(offset);
    out.u32(name.len() as u32);
    out.u32(u32::from(kind));
    out.bytes(name);
    out.zeros((24 + name.len()).next_multiple_of(8) - (24 + name.len()));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat() -> libc::stat {
        // SAFETY: an all-zero stat is valid.
        unsafe { std::mem::zeroed() }
    }

    #[test]
    fn replies_have_the_sizes_of_the_kernels_structures() {
        let mut out = Body::new();
        put_attr_out(&mut out, &stat(), Validity::NONE);
        assert_eq!(out.len(), 104);
        out.clear();
        put_entry_out(&mut out, 2, &stat(), Validity::LONG, Validity::NONE);
        assert_eq!(out.len(), ENTRY_OUT_BYTES);
        out.clear();
        put_absent(&mut out, Validity::LONG);
        assert_eq!(out.len(), ENTRY_OUT_BYTES);
        out.clear();
        put_open_out(&mut out, 1, 2, 3);
        assert_eq!(out.len(), 16);
        out.clear();
        put_statx_out(&mut out, &stat(), Some((1, 2)), Validity::NONE);
        assert_eq!(out.len(), 32 + 256);
        for n in 1..=255 {
            out.clear();
            put_dirent(&mut out, 1, 2, 8, &vec![b'x'; n]);
            assert_eq!(out.len(), dirent_bytes(n, false));
            assert_eq!(out.len() % 8, 0);
        }
    }

    #[test]
    fn parse_of_a_cut_request_is_refused() {
        let mut bytes = vec![0u8; 64];
        bytes[..4].copy_from_slice(&64u32.to_ne_bytes());
        assert!(Request::parse(&bytes).is_ok());
        for short in 0..64 {
            assert!(Request::parse(&bytes[..short]).is_err(), "{short}");
        }
        bytes[36..38].copy_from_slice(&9u16.to_ne_bytes()); // extensions longer than all
        assert!(Request::parse(&bytes).is_err());
    }

    #[test]
    fn device_numbers_round_trip() {
        for device in [0, libc::makedev(1, 3), libc::makedev(4095, 0xfffff), libc::makedev(8, 300)] {
            assert_eq!(large_device(small_device(device)), device);
        }
    }
}
