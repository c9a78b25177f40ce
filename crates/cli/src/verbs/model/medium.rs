//! A medium to be measured: a file in a directory, or a file of the pool, that has no name any more.
//!
//! In a directory the file is opened with O_DIRECT where the file system has it. Elsewhere the kernel's page cache takes
//! part: writes go to fresh space, and reads follow a flush that drops the cached pages, as far as the file system does so.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use forebay_client::{PathBuffer, Place, Pool, Run, Striping};
use forebay_types::{Error, Ino, Result};

use crate::pool;

/// Backing files of the pool's file, and bytes of a stripe.
const STRIPE_COUNT: u16 = 4;
const STRIPE_BYTES: u32 = 1 << 20;

/// Memory for transfers: O_DIRECT needs it at a page's start.
pub(super) struct Memory {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

/// The alignment of O_DIRECT on common media.
pub(super) const PAGE: usize = 4096;

impl Memory {
    /// Contents that no file system compresses well.
    pub(super) fn new(len: usize) -> Memory {
        let mut bytes = vec![0; len + PAGE];
        let start = bytes.as_ptr().align_offset(PAGE).min(PAGE);
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for word in bytes.chunks_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let count = word.len();
            word.copy_from_slice(&state.to_le_bytes()[..count]);
        }
        Memory { bytes, start, len }
    }

    pub(super) fn slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// Where data are written and read.
pub(super) enum Medium {
    /// A file of a directory, and whether it bypasses the page cache.
    Directory(File, bool),
    /// A file of the pool.
    Pool(Box<forebay_client::File>),
}

fn in_directory(dir: &Path, direct: bool) -> std::io::Result<File> {
    let flags = libc::O_TMPFILE | if direct { libc::O_DIRECT } else { 0 };
    std::fs::OpenOptions::new().read(true).write(true).mode(0o600).custom_flags(flags).open(dir)
}

impl Medium {
    /// A file without a name in a directory.
    pub(super) fn directory(dir: &Path) -> Result<Medium> {
        if let Ok(file) = in_directory(dir, true) {
            let mut memory = Memory::new(PAGE);
            // Some file systems refuse O_DIRECT at the first transfer.
            if file.write_all_at(memory.slice(), 0).is_ok() {
                return Ok(Medium::Directory(file, true));
            }
        }
        let file = in_directory(dir, false).map_err(|e| {
            Error::io(format!("cannot make a file in {}", dir.display()), &e).cure(
                "name a directory on a file system that has files without names (O_TMPFILE), or the pool",
            )
        })?;
        Ok(Medium::Directory(file, false))
    }

    /// A file of the pool, as MPI-IO makes it for two ranks, whose name is removed at once.
    pub(super) fn pool(pool: &Pool) -> Result<Medium> {
        let name = format!("/.forebay-model-{}", std::process::id()).into_bytes();
        let place = Place { dir: Ino::ROOT, path: &name[1..] };
        let striping = Striping {
            stripe_count: STRIPE_COUNT,
            stripe_bytes: STRIPE_BYTES,
            directory_takes_precedence: true,
        };
        let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
        let mut escape = PathBuffer::new();
        let made = pool.open_striped(place, flags, 0o600, striping, &mut escape);
        let file = pool::worded(made, "make", &name)?;
        pool::worded(pool.unlink(place, &mut escape), "remove", &name)?;
        Ok(Medium::Pool(Box::new(file)))
    }

    /// How reads and writes reach the medium.
    pub(super) fn words(&self) -> &'static str {
        match self {
            Medium::Directory(_, true) => "O_DIRECT",
            Medium::Directory(_, false) => "through the page cache",
            Medium::Pool(_) => "pool",
        }
    }

    /// The smallest run: with O_DIRECT a page.
    pub(super) fn run_bytes_min(&self) -> usize {
        match self {
            Medium::Directory(_, true) => PAGE,
            _ => 512,
        }
    }

    /// Accesses that a transfer of these bytes is: in the pool one for each stripe, if the file has several backing files.
    pub(super) fn stripes(&self, bytes: u64) -> f64 {
        match self {
            Medium::Directory(..) => 1.0,
            Medium::Pool(file) if file.striping().stripe_count == 1 => 1.0,
            Medium::Pool(_) => bytes.div_ceil(u64::from(STRIPE_BYTES)).max(1) as f64,
        }
    }

    /// One transfer.
    pub(super) fn transfer(&self, writes: bool, memory: &mut [u8], offset: u64) -> Result<()> {
        let done = match self {
            Medium::Directory(file, _) if writes => file.write_all_at(memory, offset),
            Medium::Directory(file, _) => file.read_exact_at(memory, offset),
            Medium::Pool(file) => {
                let done = if writes { file.write_at(memory, offset) } else { file.read_at(memory, offset) };
                done.map(|_| ()).map_err(|code| std::io::Error::from_raw_os_error(code.errno()))
            }
        };
        done.map_err(|e| failed(writes, &e))
    }

    /// Many runs at these offsets: each a call on a directory, as MPI libraries do; one call on the pool, as its driver
    /// does.
    pub(super) fn runs(&self, writes: bool, memory: &mut [u8], offsets: &[u64], bytes: usize) -> Result<()> {
        let Medium::Pool(file) = self else {
            let pieces = memory.chunks_exact_mut(bytes);
            return offsets.iter().zip(pieces).try_for_each(|(at, piece)| self.transfer(writes, piece, *at));
        };
        let part = libc::iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: offsets.len() * bytes };
        assert!(part.iov_len <= memory.len());
        let runs: Vec<Run> = offsets.iter().map(|&offset| Run { offset, bytes: bytes as u64 }).collect();
        // SAFETY: the part is memory that this function has exclusively, and that is long enough.
        let done = unsafe {
            match writes {
                true => file.write_runs(&[part], &runs),
                false => file.read_runs(&[part], &runs),
            }
        };
        done.map(|_| ()).map_err(|code| failed(writes, &std::io::Error::from_raw_os_error(code.errno())))
    }

    /// Drops what was written, so that the next writes go to fresh space.
    pub(super) fn empty(&self) -> Result<()> {
        let done = match self {
            Medium::Directory(file, _) => file.set_len(0),
            Medium::Pool(file) => {
                file.truncate(0).map_err(|code| std::io::Error::from_raw_os_error(code.errno()))
            }
        };
        done.map_err(|e| failed(true, &e))
    }

    /// Brings written data to the medium, so that reads come from there.
    pub(super) fn settle(&self) -> Result<()> {
        let Medium::Directory(file, _) = self else { return Ok(()) };
        file.sync_data().map_err(|e| failed(true, &e))?;
        // SAFETY: a system call on an open descriptor. It is advice: a failure changes nothing.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        Ok(())
    }
}

fn failed(writes: bool, e: &std::io::Error) -> Error {
    let error = Error::io(format!("cannot {} the medium", if writes { "write to" } else { "read from" }), e);
    match e.raw_os_error() {
        Some(libc::ENOSPC) => error.cure("free some space, or use --quick, which needs 64 MiB"),
        _ => error,
    }
}
