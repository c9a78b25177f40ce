//! What a forebay_file is: a file of the pool, or the file in a volume. Both do the same, except that the latter has no
//! descriptor.

use std::sync::Arc;

use ::forebay_volume::VolumeFile;
use forebay_client::{File, Run, Striping};
use forebay_types::Code;

type Answer<T> = Result<T, Code>;

/// See the module.
#[derive(Clone)]
pub enum Opened {
    Pool(Arc<File>),
    Volume(Arc<VolumeFile>),
}

use Opened::{Pool, Volume};

/// Ranges as a volume takes them.
fn ranges(runs: &[Run]) -> impl Iterator<Item = (u64, u64)> + Clone + '_ {
    runs.iter().map(|run| (run.offset, run.bytes))
}

fn part(memory: *mut u8, bytes: usize) -> [libc::iovec; 1] {
    [libc::iovec { iov_base: memory.cast(), iov_len: bytes }]
}

impl Opened {
    /// The file, for calls that the file in a volume has not.
    pub(crate) fn pool_file(&self) -> Answer<&File> {
        match self {
            Pool(file) => Ok(file),
            Volume(_) => Err(Code::NotSupported),
        }
    }

    /// A number that it has in common with other opens of the same file. Of a volume: the volume's; of joined volumes: a
    /// mix of theirs.
    pub(crate) fn number(&self) -> u64 {
        match self {
            Pool(file) => file.ino().0,
            Volume(file) => {
                let mix = |sum: u64, ino: forebay_types::Ino| sum.wrapping_mul(0x0100_0000_01b3) ^ ino.0;
                file.volume().numbers().fold(0, mix)
            }
        }
    }

    /// The layout; that of a volume is the number of its pieces.
    pub(crate) fn striping(&self) -> Striping {
        match self {
            Pool(file) => file.striping(),
            Volume(file) => Striping {
                stripe_count: file.volume().pieces().clamp(1, u16::MAX.into()) as u16,
                stripe_bytes: ::forebay_volume::Striped::STRIPE_BYTES as u32,
                directory_takes_precedence: false,
            },
        }
    }

    pub(crate) fn count_elsewhere(&self) -> usize {
        match self {
            Pool(file) => file.count_elsewhere(),
            Volume(file) => file.volume().far_pieces(),
        }
    }

    pub(crate) fn read_at(&self, buffer: &mut [u8], offset: u64) -> Answer<usize> {
        match self {
            Pool(file) => file.read_at(buffer, offset),
            Volume(file) => {
                let run = (offset, buffer.len() as u64);
                // SAFETY: the slice is writable.
                let done =
                    unsafe { file.read_runs(&part(buffer.as_mut_ptr(), buffer.len()), std::iter::once(run)) };
                done.map(|bytes| bytes as usize)
            }
        }
    }

    pub(crate) fn write_at(&self, buffer: &[u8], offset: u64) -> Answer<usize> {
        match self {
            Pool(file) => file.write_at(buffer, offset),
            Volume(file) => {
                let run = (offset, buffer.len() as u64);
                // SAFETY: the slice is readable, and only read.
                let done = unsafe {
                    file.write_runs(&part(buffer.as_ptr().cast_mut(), buffer.len()), std::iter::once(run))
                };
                done.map(|bytes| bytes as usize)
            }
        }
    }

    /// # Safety
    /// `parts` point to memory that is writable.
    pub(crate) unsafe fn read_runs(&self, parts: &[libc::iovec], runs: &[Run]) -> Answer<u64> {
        match self {
            // SAFETY: the caller's promise.
            Pool(file) => unsafe { file.read_runs(parts, runs) },
            // SAFETY: the caller's promise.
            Volume(file) => unsafe { file.read_runs(parts, ranges(runs)) },
        }
    }

    /// # Safety
    /// `parts` point to memory that is readable.
    pub(crate) unsafe fn write_runs(&self, parts: &[libc::iovec], runs: &[Run]) -> Answer<u64> {
        match self {
            // SAFETY: the caller's promise.
            Pool(file) => unsafe { file.write_runs(parts, runs) },
            // SAFETY: the caller's promise.
            Volume(file) => unsafe { file.write_runs(parts, ranges(runs)) },
        }
    }

    pub(crate) fn size(&self) -> Answer<u64> {
        match self {
            Pool(file) => file.size(),
            Volume(file) => file.size(),
        }
    }

    pub(crate) fn truncate(&self, size: u64) -> Answer<()> {
        match self {
            Pool(file) => file.truncate(size),
            Volume(file) => file.truncate(size),
        }
    }

    pub(crate) fn allocate(&self, size: u64) -> Answer<()> {
        match self {
            Pool(file) => file.allocate(size),
            Volume(file) => file.allocate(size),
        }
    }

    pub(crate) fn read_in_order(&self, wanted: bool) {
        if let Pool(file) = self {
            file.read_in_order(wanted);
        }
    }

    /// All bytes of a volume's file are data.
    pub(crate) fn seek_data(&self, offset: u64) -> Answer<u64> {
        match self {
            Pool(file) => file.seek_data(offset),
            Volume(file) if offset < file.size()? => Ok(offset),
            Volume(_) => Err(Code::NoDevice),
        }
    }

    pub(crate) fn seek_hole(&self, offset: u64) -> Answer<u64> {
        match self {
            Pool(file) => file.seek_hole(offset),
            Volume(file) => {
                let size = file.size()?;
                (offset < size).then_some(size).ok_or(Code::NoDevice)
            }
        }
    }

    pub(crate) fn punch(&self, offset: u64, bytes: u64) -> Answer<()> {
        match self {
            Pool(file) => file.punch(offset, bytes),
            Volume(file) => file.punch(offset, bytes),
        }
    }

    pub(crate) fn sync(&self) -> Answer<()> {
        match self {
            Pool(file) => file.sync(),
            Volume(file) => file.sync(),
        }
    }

    /// A request in progress keeps the file, and closes it.
    pub(crate) fn close(self) -> Answer<()> {
        match self {
            Pool(file) => Arc::into_inner(file).map_or(Ok(()), File::close),
            Volume(file) => {
                drop(file);
                Ok(())
            }
        }
    }
}
