//! A file that the kernel serves: one of the backing store, or the only backing file of a pool's file.

use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use forebay_types::{Code, Kind, Timestamp};
use rustix::fs::{Advice, SeekFrom, Stat, Timespec, Timestamps};
use rustix::io::Errno;

use crate::tree::{File, Meta};

/// A regular file by its descriptor.
#[derive(Debug)]
pub(crate) struct KernelFile(pub(crate) OwnedFd);

/// The code of an errno.
pub(crate) fn code(errno: Errno) -> Code {
    Code::from_errno(errno.raw_os_error())
}

/// Repeats a call that a signal interrupted.
pub(crate) fn retried<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Code> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other.map_err(code),
        }
    }
}

/// A stat's time of last modification.
fn mtime(stat: &Stat) -> Timestamp {
    Timestamp { sec: stat.st_mtime, nsec: stat.st_mtime_nsec as u32 }
}

/// The engine's attributes from a stat.
pub(crate) fn meta_of(stat: &Stat) -> Result<Meta, Code> {
    Ok(Meta {
        kind: Kind::from_mode(stat.st_mode).ok_or(Code::Invalid)?,
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        links: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
        size: stat.st_size as u64,
        allocated: stat.st_blocks as u64 * 512,
        rdev: stat.st_rdev,
        device: stat.st_dev,
        ino: stat.st_ino,
        atime: Timestamp { sec: stat.st_atime, nsec: stat.st_atime_nsec as u32 },
        mtime: mtime(stat),
        ctime: Timestamp { sec: stat.st_ctime, nsec: stat.st_ctime_nsec as u32 },
    })
}

/// Two times for the kernel.
pub(crate) fn timestamps(atime: Timestamp, mtime: Timestamp) -> Timestamps {
    let time = |t: Timestamp| Timespec { tv_sec: t.sec, tv_nsec: i64::from(t.nsec) };
    Timestamps { last_access: time(atime), last_modification: time(mtime) }
}

impl KernelFile {
    pub(crate) fn meta(&self) -> Result<Meta, Code> {
        meta_of(&retried(|| rustix::fs::fstat(&self.0))?)
    }

    pub(crate) fn set_times(&self, atime: Timestamp, mtime: Timestamp) -> Result<(), Code> {
        retried(|| rustix::fs::futimens(&self.0, &timestamps(atime, mtime)))
    }
}

impl File for KernelFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Code> {
        retried(|| rustix::io::pread(&self.0, &mut *buffer, offset))
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<usize, Code> {
        retried(|| rustix::io::pwrite(&self.0, data, offset))
    }

    fn set_size(&self, bytes: u64) -> Result<(), Code> {
        retried(|| rustix::fs::ftruncate(&self.0, bytes))
    }

    fn version(&self) -> Result<(u64, Timestamp), Code> {
        let stat = retried(|| rustix::fs::fstat(&self.0))?;
        Ok((stat.st_size as u64, mtime(&stat)))
    }

    fn next_data(&self, within: Range<u64>) -> Result<Option<Range<u64>>, Code> {
        if within.is_empty() {
            return Ok(None);
        }
        // These calls move the descriptor's own offset, which is not used: all reads and writes pass an offset.
        let start = match rustix::fs::seek(&self.0, SeekFrom::Data(within.start)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            Err(Errno::INVAL) => return Ok(Some(within)),
            Err(e) => return Err(code(e)),
        };
        if start >= within.end {
            return Ok(None);
        }
        match rustix::fs::seek(&self.0, SeekFrom::Hole(start)) {
            Ok(end) => Ok(Some(start..end.clamp(start, within.end))),
            // The file was truncated meanwhile: the copy detects that.
            Err(Errno::NXIO) => Ok(None),
            Err(e) => Err(code(e)),
        }
    }

    fn knows_holes(&self) -> bool {
        true
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }

    fn start_sync(&self) {
        // SAFETY: a plain system call on our descriptor; a failure has no effect, because `sync` follows.
        unsafe { libc::sync_file_range(self.0.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
    }

    fn sync(&self) -> Result<(), Code> {
        retried(|| rustix::fs::fsync(&self.0))
    }

    fn forget_cached(&self) {
        // Only advice: if the kernel ignores it, verification reads cached data.
        let _ = rustix::fs::fadvise(&self.0, 0, None::<NonZeroU64>, Advice::DontNeed);
    }
}
